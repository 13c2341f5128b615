"""The axes over which ranks sum what an optimizer needs of parts, one after the other.

[Note: the same bits]
Over the shard axis each rank adds its elements, and over the tensor axis each that has elements which no other has. What
one rank of a tensor group has computed for a parameter that all of them have whole counts for all. Ranks with copies of a
parameter, replicas above all, must come to the same bits. The transports of zerorun add in the order of ranks, so that
they do. NCCL may add in another order in each group: there the sums of the first copy go to the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..distributed.transports import NCCL
from .sharding_plan import ShardingPlan


@dataclass(frozen=True)
class Hop:
    """A sum over ``axis``. ``first_only``: ranks along it have the same numbers, and those of the first count."""

    axis: str
    suffix: str
    first_only: bool = False


def hops(plan: ShardingPlan) -> list[Hop]:
    """Return the sums that make one sum over all ranks that have parts of the same parameters."""
    topology, found = plan.topology, []
    sharded = plan.policy.shard_optimizer and topology.shard > 1
    if sharded:
        found.append(Hop("shard", ""))
    if topology.tensor > 1:
        found.append(Hop("tensor", " over tensor ranks"))
    copies = "replicate" if plan.policy.shard_optimizer else "shard"
    if found and plan.transport == NCCL and topology.size(copies) > 1:
        found.append(Hop(copies, " from the first replica", first_only=True))
    return found
