"""Grid: a topology with the methods that models written for Megatron or DeepSpeed expect of an ``mpu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..distributed.device import default_device
from ..distributed.process_topology import ProcessTopology
from ..distributed.topology import Topology


class Grid:
    """The methods of ``deepspeed.runtime.pipe.topology.PipelineParallelGrid`` and Megatron's ``mpu``, over a Topology.

    The names are theirs: "slice" and "tensor model" parallel ranks divide each layer, "pipe" and "pipeline model" parallel
    ranks are the stages, and "model parallel" means both together: the ranks that hold one copy of the model. Ranks are
    numbers within the group, except that ``get_*_src_rank`` and ``stage_to_global`` return global ranks.

    The constructor makes no process group. Groups of more than one rank along pipe, data or tensor are the topology's. The
    group of pipe and tensor together, and a group of one rank, are made at the first request, which all ranks of the world
    must make in the same order. ``topology.close()`` destroys them together with the others.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology, self._processes = topology, topology.process_topology
        self.is_first_stage = topology.pipe_rank == 0
        self.is_last_stage = topology.pipe_rank == topology.pipe - 1

    def topology(self) -> ProcessTopology:
        """Return the ranks over the axes pipe, data and model."""
        return self._processes

    def get_global_rank(self) -> int:
        return self._topology.rank

    def get_global_world_size(self) -> int:
        return self._topology.world_size

    # -- pipeline stages -----------------------------------------------------------------------------------------

    def get_stage_id(self) -> int:
        return self._topology.pipe_rank

    def stage_to_global(self, stage_id: int, **coords: int) -> int:
        """Return the global rank at ``stage_id``. Axes that are not in ``coords`` have this rank's data and model rank."""
        own = {"data": self._topology.data_rank, "model": self._topology.tensor_rank}
        return self._processes.get_rank(**{**own, **coords, "pipe": stage_id})

    def is_pipeline_first_stage(self) -> bool:
        return self.is_first_stage

    def is_pipeline_last_stage(self) -> bool:
        return self.is_last_stage

    def get_pipe_parallel_rank(self) -> int:
        return self._topology.pipe_rank

    def get_pipe_parallel_world_size(self) -> int:
        return self._topology.pipe

    def get_pipe_parallel_group(self) -> dist.ProcessGroup:
        return group_along(self._topology, "pipe")

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    # -- data-parallel ranks -------------------------------------------------------------------------------------

    def get_data_parallel_rank(self) -> int:
        return self._topology.data_parallel_rank

    get_data_parallel_id = get_data_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        return self._topology.data_parallel_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return group_along(self._topology, "batch")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks of the data-parallel group, in ascending order."""
        return list(self._topology.ranks_along("batch"))

    def get_data_parallel_src_rank(self) -> int:
        return self._topology.ranks_along("batch")[0]

    # -- ranks that hold one copy of the model -------------------------------------------------------------------

    def get_model_parallel_rank(self) -> int:
        return self._topology.pipe_rank * self._topology.tensor + self._topology.tensor_rank

    def get_model_parallel_world_size(self) -> int:
        return self._topology.pipe * self._topology.tensor

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return group_along(self._topology, "model")

    def get_model_parallel_src_rank(self) -> int:
        return self._topology.ranks_along("model")[0]

    # -- ranks that divide each layer ----------------------------------------------------------------------------

    def get_slice_parallel_rank(self) -> int:
        return self._topology.tensor_rank

    def get_slice_parallel_world_size(self) -> int:
        return self._topology.tensor

    def get_slice_parallel_group(self) -> dist.ProcessGroup:
        return group_along(self._topology, "tensor")

    def get_slice_parallel_src_rank(self) -> int:
        return self._topology.rank - self._topology.tensor_rank

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group
    get_tensor_model_parallel_src_rank = get_slice_parallel_src_rank


class PipelineParallelGrid(Grid):
    """The Grid of a ProcessTopology over pipe, data and model, whose process groups it makes: all ranks must call it.

    That of an engine's Topology has the engine's groups, and makes none. It has DeepSpeed's attributes besides.
    ``process_group`` has no effect, as in DeepSpeed. Raises TopologyError for axes, an order of axes or a number of ranks
    that zerorun has not.
    """

    def __init__(self, topology: ProcessTopology | Topology, process_group: Any = None) -> None:
        made = topology if isinstance(topology, Topology) else _opened(topology)
        super().__init__(made)
        self.global_rank, self.world_size = made.rank, made.world_size
        self.stage_id, self.data_parallel_id = made.pipe_rank, made.data_parallel_rank
        self.data_parallel_size, self.pipe_parallel_size = made.data_parallel_size, made.pipe
        self.model_parallel_size = self.slice_parallel_size = made.tensor
        self.dp_group, self.pp_group = list(made.ranks_along("data")), list(made.ranks_along("pipe"))
        self.dp_groups, self.pipe_groups = (list(map(list, made.groups(axis))) for axis in ("data", "pipe"))
        self.slice_group = list(made.ranks_along("tensor"))


def _opened(topology: ProcessTopology) -> Topology:
    return Topology.from_process_topology(topology, dist.get_rank(), device_type=default_device().type)


def group_along(topology: Topology, axis: str) -> dist.ProcessGroup:
    """The process group of the ranks along ``axis``; this rank alone if it is the only one. All make the first call."""
    return topology.group(axis) if topology.size(axis) > 1 else topology.own_group()


def method_of_tensor_ranks(mpu: Any, question: str) -> Callable[[], Any] | None:
    """What an mpu of any kind says of the ranks that divide each layer: ``question`` is "rank", "world_size" or "group".

    None if it says nothing. Where it only knows "model parallel" ranks, there are no pipeline stages among them.
    """
    for kind in ("tensor_model", "slice", "model"):
        found: Callable[[], Any] | None = getattr(mpu, f"get_{kind}_parallel_{question}", None)
        if found is not None:
            return found
    return None
