"""Process groups of a topology on 8 ranks: they hold the ranks that the look-ups say, and all are given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from zerorun.deepspeed.mpu import Grid, PipelineParallelGrid
from zerorun.distributed.process_topology import PipeDataParallelTopology
from zerorun.distributed.topology import AXES, Topology
from zerorun.distributed.transport.communicator import Communicator

GROUPS_OF_THE_GRID = {"pipe": "pipe", "pipeline_model": "pipe", "data": "data", "model": "model", "slice": "tensor"}


def alive() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def gathered(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks that answer in ``group``."""
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, dist.get_rank(), group=group)
    return tuple(ranks)


def check_groups(options: dict[str, int]) -> tuple[int, int]:
    """(groups alive before, groups alive after close)."""
    before, rank = alive(), dist.get_rank()
    made = Topology.create(dist.get_world_size(), rank, device_type="cpu", **options)
    for axis in (*AXES, "data", "model", "replica"):
        if made.size(axis) > 1 or axis in ("shard", "replicate", "data"):
            assert gathered(made.group(axis)) == made.ranks_along(axis), axis
    assert gathered(made.own_group()) == (rank,)
    grid = Grid(made)
    for name, axis in GROUPS_OF_THE_GRID.items():
        group = getattr(grid, f"get_{name}_parallel_group")()
        assert gathered(group) == made.ranks_along(axis), name
        assert dist.get_rank(group) == getattr(grid, f"get_{name}_parallel_rank")()
        assert dist.get_world_size(group) == getattr(grid, f"get_{name}_parallel_world_size")()
    made.close()
    return before, alive()


def look_at_their_grid() -> None:
    grid, rank = PipelineParallelGrid(PipeDataParallelTopology(2, 4)), dist.get_rank()
    assert (grid.stage_id, grid.data_parallel_id, grid.get_stage_id()) == (rank // 4, rank % 4, rank // 4)
    assert grid.dp_group == [*range(rank // 4 * 4, rank // 4 * 4 + 4)] and grid.pp_group == [rank % 4, rank % 4 + 4]
    assert grid.pp_group in grid.pipe_groups and grid.dp_group in grid.dp_groups and grid.slice_group == [rank]
    assert gathered(grid.get_data_parallel_group()) == tuple(grid.dp_group)
    assert gathered(grid.get_pipe_parallel_group()) == tuple(grid.pp_group)


def test_a_grid_of_a_process_topology() -> None:
    run_ranks(8, look_at_their_grid)


CASES = [{"pipe": 2, "tensor": 2}, {"pipe": 2, "shard_degree": 2}, {"tensor": 2, "shard_degree": 2}, {"tensor": 8}, {}]


@pytest.mark.parametrize("options", CASES)
def test_groups_hold_the_ranks_of_the_look_ups(options: dict[str, int]) -> None:
    for before, after in run_ranks(8, check_groups, options):
        assert before == after == 1


def groups_of_a_process_topology() -> tuple[tuple[int, ...], tuple[int, ...]]:
    made = Topology.from_process_topology(
        PipeDataParallelTopology(2, 4), dist.get_rank(), shard_degree=2, device_type="cpu"
    )
    found = gathered(made.group("pipe")), gathered(made.group("data"))
    made.close()
    return found


def test_groups_of_a_process_topology() -> None:
    results = run_ranks(8, groups_of_a_process_topology)
    assert results[5] == ((1, 5), (4, 5, 6, 7))


def weights_of_all_stages() -> dict[str, list[float]]:
    made = Topology.create(dist.get_world_size(), dist.get_rank(), pipe=2, device_type="cpu")
    stage = made.pipe_rank
    own = {f"of stage {stage}": torch.full((3,), stage + 1.0, dtype=torch.bfloat16), "of both": torch.tensor([stage])}
    found = Communicator(made, torch.device("cpu")).control.of_all_stages(own)
    made.close()
    return {name: value.tolist() for name, value in found.items()}


def test_every_replica_of_a_pipeline_has_the_weights_of_all_stages() -> None:
    """Stages are numbers in the group of a replica; only in the first one are they its ranks in the world."""
    expected = {"of stage 0": [1.0] * 3, "of both": [0], "of stage 1": [2.0] * 3}
    for found in run_ranks(4, weights_of_all_stages):
        assert list(found.items()) == list(expected.items())
