"""Same data and same requests: how ranks notice that they were given, or are asked for, different things.

[Note: same requests]
Before a collective that the script asks for, ranks check that they all ask for the same things. A script may pass the
elements of a set, whose order differs from rank to rank. Several things that are asked for at once are therefore put into
an order of our own before anything is sent. Ranks also compare their requests, in one small message: otherwise the values
of one parameter would end up in another.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import OrderError
from .device import on_gpu

_COMPARED_ELEMENTS = 4096  # of each tensor, spread over it
_BITS = 20  # few enough that sums of squares of many checksums are exact in float64


def checksum(value: Any) -> int | None:
    """Return a checksum of ``value``; None if it holds no dense tensor, number or string.

    It covers the numbers and strings, and the shapes, dtypes and some elements of the dense tensors.
    """
    found: int | None = None
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout != torch.strided:
                continue
            flat = leaf.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _COMPARED_ELEMENTS)][:_COMPARED_ELEMENTS].cpu().contiguous()
            described = repr((tuple(leaf.shape), leaf.dtype)).encode() + some.view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, (bool, int, float, str)):
            described = repr(leaf).encode()
        else:
            continue
        found = zlib.crc32(described, found or 0)
    return None if found is None else found % 2**_BITS


def is_cheap(value: Any) -> bool:
    """Return True if ``value`` can be read without waiting for a device."""
    return not any(isinstance(leaf, torch.Tensor) and on_gpu(leaf) for leaf in _pytree.tree_leaves(value))


def inputs_and_labels(batch: Any) -> tuple[Any, Any]:
    """Split a mapping with "labels", or a pair, into (inputs, labels). Any other batch has labels None."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}, batch.get("labels")
    return tuple(batch) if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)


def summands(found: int | None, place: int, places: int) -> torch.Tensor:
    """Return float64 [3 * places]: what a rank at ``place`` adds to a sum that tells :func:`agree` whether all agree."""
    table = torch.zeros(3, places, dtype=torch.float64)
    if found is not None:
        table[:, place] = torch.tensor([1, found, found**2], dtype=torch.float64)
    return table.view(-1)


def agree(total: torch.Tensor) -> bool:
    """Return True if all ranks of each place had the same checksum. ``total``: the sum of the ranks' ``summands``."""
    count, first, second = total.view(3, -1)
    return bool((count * second == first * first).all())


def all_alike(total: torch.Tensor) -> bool:
    """Return True if all places had a checksum, and the same one. ``total``: as for :func:`agree`, which holds."""
    count, first, _ = total.view(3, -1)
    return bool(count.min() > 0 and (first * count[0] == first[0] * count).all())


SAME = "pass the same parameters on all ranks, in any order"


def fingerprint(wanted: Sequence[str]) -> torch.Tensor:
    """Return int64 [1] that is equal for the same strings in the same order."""
    digest = hashlib.sha256("\n".join(wanted).encode()).digest()
    return torch.tensor([int.from_bytes(digest[:8], "little", signed=True)], device="cpu")


def compare(
    problem: str,
    wanted: Sequence[str],
    gather: Callable[[torch.Tensor], list[torch.Tensor]],
    gather_objects: Callable[[Any], list[Any]],
    remedy: str = SAME,
) -> None:
    """Raise OrderError about ``problem``, on all ranks alike, if ranks want different things.

    ``gather`` and ``gather_objects`` return the small tensors and the values of all ranks concerned, by rank.
    """
    if len({int(theirs) for theirs in gather(fingerprint(wanted))}) > 1:
        raise OrderError(f"{problem}{_first_difference(gather_objects(list(wanted)))}. Remedy: {remedy}.")


def _first_difference(wanted: Sequence[Sequence[str]]) -> str:
    """Describe the first difference from rank 0 in ``wanted``, by rank; of the order, if all have the same."""
    for rank, theirs in enumerate(wanted):
        for who, other, more, less in ((0, rank, wanted[0], theirs), (rank, 0, theirs, wanted[0])):
            only = next(iter(Counter(more) - Counter(less)), None)
            if only is not None:
                return f": rank {who} has {only}, which rank {other} does not have"
    for rank, theirs in enumerate(wanted):
        for first, other_one in zip(wanted[0], theirs, strict=True):
            if first != other_one:
                return f": where rank 0 has {first}, rank {rank} has {other_one}"
    return ""
