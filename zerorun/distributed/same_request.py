"""Same request: before a collective that the script asks for, ranks check that they all ask for the same things.

A script may pass the elements of a set, whose order differs from rank to rank. Several things that are asked for at once
are therefore put into an order of our own before anything is sent. Ranks also compare their requests, in one small message:
otherwise the values of one parameter would end up in another.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import OrderError

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
    """Describe the first difference from rank 0 in ``wanted``, by rank; empty if only the order differs."""
    for rank, theirs in enumerate(wanted):
        for who, other, more, less in ((0, rank, wanted[0], theirs), (rank, 0, theirs, wanted[0])):
            only = next(iter(Counter(more) - Counter(less)), None)
            if only is not None:
                return f": rank {who} has {only}, which rank {other} does not have"
    return ""
