"""Open shards: ranks of one host read each other's shards whenever they need them, without waiting for one another.

[Note: one offer for many reads]
Between two updates shards do not change, so a gather at stage 3 needs no answer from the other ranks: it copies their
shards, wherever they are in the model. Only around a change the ranks meet, twice. Before it, ``close``: all have read what
they had to. After it, at the next gather: all offer their shards again, which says that the change is done. What makes a
rank slower for a moment, in one unit, therefore does not hold up the others in that unit.

Ranks still make the same gathers, in the same order: other transports need it. ``close`` compares how many there were.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise

import torch

from ...errors import OrderError
from ...watch.board import board
from .peer_memory import PeerMemory, PeerMemoryError

# Those that others may be reading, in the order of opening: they stay alive, also when their engine does not.
_open: dict[OpenShards, None] = {}


class OpenShards:
    """The shards of one rank, flat, and the way to those of its group. ``tag``: CommunicationStatistics.tag."""

    def __init__(self, memory: PeerMemory, shards: Sequence[torch.Tensor], tag: Callable[[str], int]) -> None:
        self._memory, self._shards, self._tag = memory, list(shards), tag
        self._numbers = {id(shard): number for number, shard in enumerate(shards)}
        self._tables: list[torch.Tensor] = []  # by rank: where its shards are, while they are open
        self._gathers = 0  # since they were opened

    def __contains__(self, shard: torch.Tensor | None) -> bool:
        return id(shard) in self._numbers

    def gather(self, full: torch.Tensor, bounds: Sequence[int], shard: torch.Tensor) -> None:
        """Fill ``full`` [bounds[-1]] with what the other ranks have for ``shard``, which is one of those given.

        If ``shard`` is a part of ``full``, that has the memory of all ranks (mapped_shards.py), and nothing is to be read.
        """
        if not self._tables:
            self._exchange("opening shards", self._shards, self._keep, None)
            _open[self] = None
        self._gathers += 1
        if shard.numel() and full[bounds[self._memory.rank] :].data_ptr() == shard.data_ptr():  # empty ones are all at 0
            return
        number, begun = self._numbers[id(shard)], time.monotonic_ns()
        for peer, (low, high) in enumerate(pairwise(bounds)):
            if peer != self._memory.rank and high > low:
                self._memory.read_tensor(peer, int(self._tables[peer][number]), full[low:high])
        board.end_transport(begun)

    def close(self, timeout: timedelta | None = None) -> None:
        """Return when nobody reads any more: shards may change. All ranks must call it.

        Raises OrderError if ranks have not gathered equally often since the shards changed last.
        """
        if not self._tables:
            return
        counts = [self._gathers] * len(self._tables)

        def compare(tables: list[torch.Tensor]) -> None:
            found = torch.empty(1, dtype=torch.int64)
            for peer, table in enumerate(tables):
                if peer != self._memory.rank:
                    self._memory.read_tensor(peer, int(table[0]), found)
                    counts[peer] = int(found)

        self._exchange("closing shards", [torch.tensor([self._gathers])], compare, timeout)
        self._tables, self._gathers = [], 0
        _open.pop(self, None)
        if len(set(counts)) > 1:
            raise OrderError(
                f"since the parameters changed last, the ranks of this group gathered units {counts} times, by rank. "
                "Remedy: call the model equally often, and its units in the same order, on all ranks."
            )

    def _keep(self, tables: list[torch.Tensor]) -> None:
        self._tables = tables

    def _exchange(
        self,
        label: str,
        sources: Sequence[torch.Tensor],
        take: Callable[[list[torch.Tensor]], None],
        timeout: timedelta | None,
    ) -> None:
        self._memory.exchange(self._tag(label), label, sources, take, until_given=False).wait(timeout)


def close_all(timeout: timedelta) -> None:
    """At the end of the process: wait for those who still read."""
    for shards in tuple(_open):
        with contextlib.suppress(OrderError, PeerMemoryError):  # they have ended, or will say what is wrong
            shards.close(timeout)
