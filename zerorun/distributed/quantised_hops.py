"""Quantised hops: the ways of gradients that are sent as codes, within hosts and then between them. Pure data.

[Note: two hops]
Ranks of a shard group are numbered host by host. Where the group fills several hosts with L ranks on each, gradients are
summed in two hops, as in ZeRO++ (Wang et al. 2023, arXiv:2306.10209). First each rank gets, from the ranks of its host,
what they have for those ranks of all hosts that have its own place there, and adds it up. Then these ranks exchange the
sums. So a gradient crosses between hosts once for each host, and not once for each rank, and is rounded twice at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from .quantised_blocks import coded_bytes
from .topology import Topology


@dataclass(frozen=True)
class QuantisedHop:
    """One exchange among ``size`` ranks of a shard group, ``stride`` apart: each sends each other one message.

    A message has ``parts`` shards in codes of ``bits`` bits. ``feeds_back``: what rounding leaves out is kept, and sent
    with the next sum.
    """

    size: int
    stride: int
    parts: int
    bits: int
    suffix: str = ""  # of the label
    feeds_back: bool = False

    def place(self, rank: int) -> int:
        """Return the place of the shard rank ``rank`` among the ranks of its hop."""
        return rank // self.stride % self.size

    def peers(self, rank: int) -> range:
        """Return the shard ranks of the hop that ``rank`` takes part in."""
        first = rank - self.place(rank) * self.stride
        return range(first, first + self.size * self.stride, self.stride)

    def residual_numel(self, shard: int) -> int:
        """Return the elements that a rank keeps of what rounding has left out, for shards of ``shard`` elements."""
        return (self.size - 1) * self.parts * shard if self.feeds_back else 0

    def sent_bytes(self, shard: int) -> int:
        """Return the bytes that a rank sends, and gets, for shards of ``shard`` elements."""
        return (self.size - 1) * self.parts * coded_bytes(shard, self.bits)


def plan_hops(topology: Topology, *, between: int, feedback: bool = False) -> tuple[QuantisedHop, ...]:
    """Return the hops of sums over the shard axis: 8 bits within a host, and ``between`` bits between hosts.

    ``feedback``: between hosts, errors are fed back.

    There is one hop if the axis is in one host, or if no two of its ranks are, or if hosts have different parts of it.
    """
    shard = topology.shard
    here = shard if topology.ranks_per_host is None else min(max(topology.ranks_per_host // topology.tensor, 1), shard)
    if here == shard:
        return (QuantisedHop(shard, 1, 1, 8),)
    if here == 1 or shard % here:
        return (QuantisedHop(shard, 1, 1, between, feeds_back=feedback),)
    hosts = shard // here
    return QuantisedHop(here, 1, hosts, 8), QuantisedHop(hosts, here, 1, between, " between hosts", feedback)
