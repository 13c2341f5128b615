"""Buffers that differ between ranks, such as the running statistics of batch norm: each rank gets its own back.

The set ``model`` has those of the first rank of each pipeline stage. What another rank has otherwise is in the set
``buffer``, under a name that says whose it is. It is loaded only where the ranks are laid out as they were.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..distributed.topology import Topology
from ..log import is_rank_zero, logger
from .inventory import TensorPart
from .ranks import is_by_rank, leads_stage
from .read import Reader
from .tensorfile import tensor_sum
from .write_plan import BUFFER

Sums = dict[str, int]  # name -> CRC-32


def own_buffers(reader: Reader, topology: Topology) -> dict[str, str]:
    """Return buffer -> its name in the set ``buffer``, of those that this rank had otherwise than its stage's first."""
    manifest = reader.manifest
    if manifest is None or BUFFER not in reader.sets:
        return {}
    if not is_by_rank(topology, manifest.layout, manifest.layout.get("world_size")):
        if is_rank_zero():
            logger.info("buffers that differed between ranks are those of the first rank: there were other ranks.")
        return {}
    mine = _stored_name(topology.rank, "")
    return {name.removeprefix(mine): name for name in reader.places(BUFFER) if name.startswith(mine)}


def _stored_name(rank: int, name: str) -> str:
    return f"rank {rank}: {name}"


class RankBuffers:
    """Which buffers have ever differed between ranks of a stage. These are saved by rank, so that saves stay alike."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._differ: set[str] = set()

    def sums(self, buffers: Mapping[str, torch.Tensor]) -> Sums:
        """The checksums of those buffers of this rank that have not differed yet."""
        return {name: tensor_sum(value) for name, value in buffers.items() if name not in self._differ}

    def learn(self, by_rank: list[Sums]) -> None:
        """Learn from the sums of all ranks which buffers differ."""
        places = [self._topology.coordinate(rank) for rank in range(len(by_rank))]
        first: dict[int, Sums] = {}  # by pipeline stage
        for place, sums in zip(places, by_rank, strict=True):
            if place.replicate == place.shard == place.tensor == 0:
                first[place.pipe] = sums
        for place, sums in zip(places, by_rank, strict=True):
            self._differ |= {name for name, found in sums.items() if first[place.pipe].get(name, found) != found}

    def parts(self, buffers: Mapping[str, torch.Tensor]) -> list[TensorPart]:
        """This rank's own of those that differ, unless it is the first of its stage."""
        if leads_stage(self._topology):
            return []
        own = {_stored_name(self._topology.rank, name): buffers[name] for name in buffers if name in self._differ}
        return [
            TensorPart(BUFFER, name, 0, value.contiguous().reshape(-1), tuple(value.shape)) for name, value in own.items()
        ]
