"""Which transport the ranks of an axis use: NCCL between GPUs, each other's memory on one host, else messages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..device import CPU, on_gpu
from .gloo import Gloo
from .nccl import Nccl
from .peer_memory import PeerMemory
from .same_host import SameHost
from .statistics import CommunicationStatistics
from .through_host import ThroughHost
from .transport import Transport
from .world import uses_nccl


def connect_axis(
    axis: str,
    group: dist.ProcessGroup | None,
    rank: int,
    size: int,
    device: torch.device,
    statistics: CommunicationStatistics,
    *,
    reads_peers: bool = True,
) -> Transport:
    """The transport of an axis for tensors of ``device``. All its ranks must call it. ``reads_peers``: if they can."""
    if uses_nccl(device, group):
        return Nccl(axis, group, rank, size, device, statistics)
    home = torch.device(CPU) if on_gpu(device) else device
    inner = Gloo(axis, group, rank, size, home, statistics)
    if reads_peers and size > 1:
        memory = PeerMemory.connect(inner.values, rank, size, inner.names)
        if memory is not None:
            inner = SameHost(axis, group, rank, size, home, statistics, memory)
    return ThroughHost(inner, device) if on_gpu(device) else inner
