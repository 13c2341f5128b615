"""The transports that collectives can use, and what follows from the choice. Pure data."""

from __future__ import annotations

import torch

from .device import CPU
from .replication import Family
from .topology import Topology

# How ranks exchange gradients and parameters: NCCL between GPUs, messages through gloo, or, on one host, each rank reads
# the memory of the others.
NCCL, GLOO, PEER_MEMORY = "nccl", "gloo", "peer memory"


def reads_peers(transport: str, topology: Topology, family: Family = Family.DENSE) -> bool:
    """Return True if ranks of a shard group copy from one another's memory themselves: nothing moves while they compute."""
    return transport == PEER_MEMORY and topology.size(family.shard_axis) > 1


def reads_parts(
    transport: str, topology: Topology, device_type: str, wire_dtype: torch.dtype, family: Family = Family.DENSE
) -> bool:
    """Return True if ranks can sum gradients from where autograd leaves them, so that nothing has to be packed."""
    direct = reads_peers(transport, topology, family) and topology.size(family.replicate_axis) == 1
    return direct and device_type == CPU and wire_dtype == torch.float32
