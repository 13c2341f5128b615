"""Finds the number of pipeline stages and the stage of this process, and refuses what a topology says of other axes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from ..distributed.process_topology import ProcessTopology
from ..distributed.topology import Topology
from ..errors import PipelineError, TopologyError
from ..watch.launch_environment import launched, rank_in, world_size_in


@runtime_checkable
class HasPipeAxis(Protocol):
    """zerorun's Topology, of which only the pipe axis is used here."""

    @property
    def pipe(self) -> int: ...

    @property
    def pipe_rank(self) -> int: ...


@runtime_checkable
class HasNamedAxes(Protocol):
    """DeepSpeed's ProcessTopology, of which only the axis "pipe" is needed."""

    def get_dim(self, axis: str) -> int: ...

    def get_coord(self, rank: int) -> Any: ...


_in_one_piece = False


@contextlib.contextmanager
def in_one_piece() -> Iterator[None]:
    """Let every PipelineModule that is made in this block have one stage, with all layers."""
    global _in_one_piece
    _in_one_piece = True
    try:
        yield
    finally:
        _in_one_piece = False


def is_in_one_piece() -> bool:
    """Return True inside ``in_one_piece``."""
    return _in_one_piece


def find_stage(num_stages: int | None, topology: Any, stage: int | None) -> tuple[int, int]:
    """Return (number of stages, the local stage). Without a topology, the ranks of one stage have consecutive numbers.

    Raises PipelineError if these cannot be known, or if ``num_stages`` and ``topology`` disagree.
    """
    if _in_one_piece:
        return 1, 0
    if topology is None:
        if num_stages is None:
            raise PipelineError("a pipeline needs num_stages or a topology. Remedy: give one of the two.")
        return num_stages, _stage_of_rank(num_stages) if stage is None else stage
    if isinstance(topology, HasPipeAxis):
        found, own = topology.pipe, topology.pipe_rank
    elif isinstance(topology, HasNamedAxes):
        found = topology.get_dim("pipe") or 1
        own = topology.get_coord(_rank()).pipe if stage is None and found > 1 else 0
    else:
        raise PipelineError(
            f"topology = {topology!r} has no pipe axis. Remedy: give a zerorun.Topology, a ProcessTopology, or num_stages."
        )
    if num_stages not in (None, found):
        raise PipelineError(
            f"num_stages = {num_stages}, but the topology has {found} along its pipe axis. Remedy: give only one of them."
        )
    return found, own if stage is None else stage


def processes_of(topology: Any) -> ProcessTopology | None:
    """Return all axes of ``topology`` under DeepSpeed's names; None if it does not name them."""
    named = getattr(topology, "process_topology", topology)
    if not isinstance(named, HasNamedAxes) or not hasattr(named, "get_axis_names"):
        return None
    axes = list(named.get_axis_names())
    return ProcessTopology(axes, [named.get_dim(axis) for axis in axes])


def refuse_other_axes(topology: Any, tensor: int, parts: bool) -> None:
    """Raise TopologyError unless the ranks of ``topology``, which a module was made with, are those of ``tensor`` ranks.

    ``parts``: whether the script says that parameters are parts, so that they cannot be divided here.
    """
    processes = None if _in_one_piece else processes_of(topology)
    if processes is None:
        return
    found = Topology.from_process_topology(processes, 0).tensor
    if found == tensor and not (parts and found > 1):
        return
    divided = " and the script says that parameters are parts of layers" if found == tensor else ""
    raise TopologyError(
        f"the topology given to PipelineModule is {processes!r}: its axis 'model' has degree {max(found, 1)}, and "
        f"tensor_parallel.size is {tensor}{divided}. Layers that a script divides in a way of its own are not known as "
        "parts: ranks would count as data-parallel, with rank 0's part in place of their own. Remedy: name one degree in "
        "both places, and give whole layers with a tensor_parallel.plan, or layers of zerorun.tensor_parallel."
    )


def _stage_of_rank(num_stages: int) -> int:
    if num_stages == 1:
        return 0
    rank, world_size = _rank(), _world_size()
    if num_stages < 1 or world_size % num_stages:
        raise PipelineError(
            f"num_stages = {num_stages} does not divide the {world_size} ranks. Remedy: give a number of stages that does."
        )
    return rank // (world_size // num_stages)


def _rank() -> int:
    if not dist.is_initialized() and "RANK" in launched(os.environ):  # set by the launcher; the group is joined later
        return rank_in(os.environ)
    if not dist.is_initialized():
        raise PipelineError(
            "the stage of this process is unknown until the process group exists. Remedy: call "
            "zerorun.init_distributed() first, or give stage=."
        )
    return dist.get_rank()


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else world_size_in(os.environ)
