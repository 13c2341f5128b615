"""Which transport the ranks of an axis use: NCCL between GPUs, each other's memory on one host, else messages.

[Note: a process group for each link]
NCCL sends and receives in the order of the calls, one after the other for each process group and pair of ranks, and knows
no tags. A send may not end before its receive has begun. So where activations go one way and gradients the other, in one
group, each of two stages may begin with a send, and wait for ever: with 1F1B that is what happens. A *link* is one sort of
message from one rank to another, and has a process group of its own: what is sent there is received in the same order.
NCCL connects two ranks at their first message, for which both programs wait: links do that when they are made.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ..device import CPU, on_gpu
from ..topology import Topology, subgroup
from .gloo import Gloo
from .nccl import Nccl
from .peer_memory import PeerMemory
from .same_host import SameHost
from .statistics import CommunicationStatistics
from .through_host import ThroughHost
from .transport import Transport
from .world import uses_nccl, with_others


def connect_axis(
    axis: str,
    group: dist.ProcessGroup | None,
    rank: int,
    size: int,
    device: torch.device,
    statistics: CommunicationStatistics,
) -> Transport:
    """The transport of an axis for tensors of ``device``. All its ranks must call it."""
    if uses_nccl(device, group):
        return Nccl(axis, group, rank, size, device, statistics)
    home = torch.device(CPU) if on_gpu(device) else device
    inner = Gloo(axis, group, rank, size, home, statistics)
    if size > 1:
        memory = PeerMemory.connect(inner.values, rank, size, inner.names)
        if memory is not None:
            inner = SameHost(axis, group, rank, size, home, statistics, memory)
    return ThroughHost(inner, device) if on_gpu(device) else inner


Link = tuple[int, int, str]  # the numbers of two ranks along an axis, sender first, and the sort of message


def connect_links(
    axis: str, links: Iterable[Link], topology: Topology, device: torch.device, statistics: CommunicationStatistics
) -> dict[Link, Transport]:
    """A transport for each of this rank's ``links``, see [Note: a process group for each link]; none where messages have
    tags. All ranks must call it with the same links."""
    if not uses_nccl(device, topology.group(axis)):
        return {}
    here, found = topology.ranks_along(axis).index(topology.rank), dict[Link, Transport]()
    for link in links:
        sender, receiver, sort = link
        group = subgroup(topology, axis, (sender, receiver), sort)
        if group is not None:
            found[link] = Nccl(f"{axis}: {sort}", group, dist.get_rank(group), 2, device, statistics)
            first, other = torch.zeros(1, device=device), 1 - dist.get_rank(group)
            what = f"the first message of the {sort} between ranks {sender} and {receiver} of the axis {axis}"
            with with_others(what, span=found[link].span):
                (found[link].send if here == sender else found[link].receive)(first, other, 0).wait()
    return found
