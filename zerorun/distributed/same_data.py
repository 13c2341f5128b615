"""Same data: checksums by which ranks that must get the same data notice when they do not."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree

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
