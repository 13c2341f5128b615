"""Topology: the degrees of each mesh axis, and the process groups made from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import TopologyError


@dataclass(frozen=True)
class Topology:
    """Data-parallel ranks as ``replicate x shard`` (shard innermost: neighbouring ranks share parameters).

    ``shard`` is the number of ranks that a unit's states are divided over, ``replicate`` the number of such groups.
    """

    replicate: int
    shard: int
    rank: int
    pipe: int = 1
    tensor: int = 1
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    shared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # made once for all its engines

    @property
    def world_size(self) -> int:
        return self.replicate * self.shard

    @property
    def data_parallel_size(self) -> int:
        return self.replicate * self.shard

    @property
    def tensor_rank(self) -> int:
        return 0

    @property
    def pipe_rank(self) -> int:
        return 0

    def ranks_along(self, axis: str) -> tuple[int, ...]:
        base = self.rank - self.shard_rank
        return tuple(range(base, base + self.shard))

    @property
    def shard_rank(self) -> int:
        return self.rank % self.shard

    @property
    def replicate_rank(self) -> int:
        return self.rank // self.shard

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along ``axis``: "shard" or "replicate"."""
        if axis == "data":
            return dist.group.WORLD  # type: ignore[return-value]
        if self.mesh is None:
            raise TopologyError("this Topology was made without process groups; use Topology.create().")
        return self.mesh.get_group(axis)

    def close(self) -> None:
        """Give back the process groups. Every rank must call it, and nothing may use them afterwards."""
        for axis in ("replicate", "shard"):
            group = self.group(axis)
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    @classmethod
    def create(cls, world_size: int, rank: int, *, shard_degree: int | None = None, device_type: str) -> Topology:
        """Validate the degrees, then make the groups. Every rank must call it. Raises TopologyError."""
        shard = shard_degree or world_size
        if world_size % shard:
            raise TopologyError(
                f"shard degree {shard} does not divide the {world_size} data-parallel ranks. "
                f"Remedy: set zero_optimization.shard_degree to one of {divisors(world_size)}."
            )
        mesh = init_device_mesh(device_type, (world_size // shard, shard), mesh_dim_names=("replicate", "shard"))
        return cls(world_size // shard, shard, rank, mesh=mesh)


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
