"""Secondary partitions: the second copy of the weights in hpZ, the hierarchical partition of ZeRO++. Pure data.

[Note: the second copy]
The ranks of a shard group divide all states between them (Wang et al. 2023, arXiv:2306.10209). Neighbours among them, the
ranks of a node, keep a second copy of the weights between them, and gather units from one another: so forward and backward
send nothing between nodes. The copy is brought up to date once after each update, where a unit is first needed. Then each
shard goes to one rank of each node, so that between nodes a node gets each weight once in a step: a rank sends at most
``groups`` shards. ZeRO++ itself lets each forward gather from all ranks, all weights for each rank and micro-batch.

A rank keeps the shards of neighbouring numbers, so that the parts of a node lie in the flat buffer one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Secondary:
    """``shard`` ranks divide the states, and each ``size`` neighbours among them have a second copy of the weights."""

    shard: int
    size: int

    @property
    def groups(self) -> int:
        """How many copies there are."""
        return self.shard // self.size

    def kept(self, rank: int) -> range:
        """Return the shard ranks whose shards ``rank`` has a copy of."""
        first = rank % self.size * self.groups
        return range(first, first + self.groups)

    def keepers(self, rank: int) -> range:
        """Return the shard ranks that have a copy of the shard of ``rank``."""
        return range(rank // self.groups, self.shard, self.size)

    def bounds(self, bounds: Sequence[int]) -> Sequence[int]:
        """Return where the neighbours' parts begin and end, if shards do so at ``bounds`` [shard + 1]."""
        return bounds[:: self.groups]
