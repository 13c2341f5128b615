"""The second copy of hpZ (secondary_partition.py): made from the shards of all ranks, and what units are gathered from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..device import Arrival
from ..secondary_partition import Secondary
from ..topology import Topology, neighbours
from .connect import connect_axis
from .statistics import Pending
from .transport import Transport


class SecondCopy:
    """The ranks between which it is. ``shard``: the axis along which states are divided. All its ranks must make it."""

    def __init__(self, secondary: Secondary, shard: Transport, topology: Topology) -> None:
        self._secondary, self._shard, size = secondary, shard, secondary.size
        group = neighbours(topology, "shard", size)
        self.near = connect_axis("neighbours", group, shard.rank % size, size, shard.device, shard.statistics)

    def place(self, full: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        """Return this rank's part of the copy in ``full`` [bounds[-1]], if shards begin and end at ``bounds``."""
        parts = self._secondary.bounds(bounds)
        return full[parts[self.near.rank] : parts[self.near.rank + 1]]

    def all_gather(
        self,
        full: torch.Tensor,
        bounds: Sequence[int],
        label: str,
        second: torch.Tensor,
        *,
        after: Pending | Arrival | None = None,
    ) -> Pending:
        """Fill ``full`` [bounds[-1]] from the neighbours' parts of the copy, of which ``second`` is this rank's.

        It may be its ``place`` in ``full``. ``after``: what fills it.
        """
        parts = self._secondary.bounds(bounds)
        if after is None:
            return self.near.all_gather(full, parts, label, second)
        return self.near.all_gather_after(after, full, parts, label, second)

    def copy(self, source: torch.Tensor, second: torch.Tensor, bounds: Sequence[int], label: str) -> Pending:
        """Fill this rank's part of the copy, ``second``, from all shards, of which ``source`` is this rank's."""
        rank, nothing = self._shard.rank, source.new_empty(0)
        sent, received = ([nothing] * self._shard.size for _ in range(2))
        for keeper in self._secondary.keepers(rank):
            sent[keeper] = source
        begin = bounds[self._secondary.kept(rank).start]
        for owner in self._secondary.kept(rank):
            received[owner] = second[bounds[owner] - begin : bounds[owner + 1] - begin]
        return self._shard.all_to_all(sent, received, label)
