"""Every stage, kind of offload and of checkpointing gives the run of one process on the simulated device.

There copies are put off until somebody waits for them, and what they have still to write holds NaN.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle, pairwise, product
from typing import Any

import pytest
import test_parallel_matrix
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, Block, Case, Gpt, Mlp, Place
from own_optimizers import UnitRows
from races import looking_for_races
from reference import Result, differences, train_reference
from simulation import simulated_device
from training import make_config, make_engine, train

import zerorun
from zerorun import zero
from zerorun.activations import host_pool
from zerorun.errors import SwapError
from zerorun.plan.step_collectives import step_collectives

STEPS = 3
SETTINGS: dict[str, Any] = {
    "world": (2, 1, 4),
    "stage": (3, 2, 1, 0),
    "precision": ("fp32", "bf16", "fp16"),
    "offload": ("params", "cpu", "none", "params alone", "disk", "params on disk"),
    "checkpointing": ("selective in host memory", "none", "selective", "full in host memory"),
    "accumulation": (2, 1),
}


class InPlace(Mlp):
    """Writes into a result that selective checkpointing keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu_(self.down(torch.tanh(self.up(x))))


def build() -> Gpt:
    """Attention and writes in place, in turn."""
    kinds = cycle((Block, InPlace))
    return Gpt(4, make=lambda: next(kinds)())


CASE = Case("in place", build)


def allowed(row: dict[str, Any]) -> bool:
    """Offload needs shards."""
    return row["stage"] >= {"none": 0, "cpu": 1, "disk": 1}.get(row["offload"], 3)


ROWS = [row for row in (dict(zip(SETTINGS, values, strict=True)) for values in product(*SETTINGS.values())) if allowed(row)]


def dealt() -> list[dict[str, Any]]:
    """Of each stage with each offload one row, with the other settings in turn."""
    places = [(stage, offload) for stage in SETTINGS["stage"] for offload in SETTINGS["offload"]]
    places = [(stage, offload) for stage, offload in places if allowed({"stage": stage, "offload": offload})]
    turn = {"world": 3, "precision": 99, "checkpointing": 99, "accumulation": 4}  # after how many rows one is left out
    return [
        {
            name: {"stage": stage, "offload": offload}.get(
                name, values[(index + index // turn.get(name, 99)) % len(values)]
            )
            for name, values in SETTINGS.items()
        }
        for index, (stage, offload) in enumerate(places)
    ]


def configuration(row: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {}
    on_disk = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
    if row["offload"] not in ("none", "params alone"):
        zero["offload_optimizer"] = on_disk if row["offload"].endswith("disk") else {"device": "cpu"}
    if row["offload"].startswith("params"):
        zero["offload_param"] = on_disk if row["offload"].endswith("disk") else {"device": "cpu"}
    policy, _, where = row["checkpointing"].partition(" ")
    return make_config(
        row["stage"],
        accumulation=row["accumulation"],
        clip=0.5,
        precision=row["precision"],
        zero_optimization=zero,
        activation_checkpointing={"policy": policy, "cpu_checkpointing": bool(where)},
    )


@contextmanager
def small_tensors_are_moved() -> Iterator[None]:
    """Activations go to host memory whatever their size: those of this model are small."""
    before, host_pool.SMALL_BYTES = host_pool.SMALL_BYTES, 0
    try:
        yield
    finally:
        host_pool.SMALL_BYTES = before


def train_both(config: dict[str, Any]) -> tuple[Result, Result]:
    """On the simulated device, and on the CPU."""
    with small_tensors_are_moved():
        with simulated_device():
            found = train(CASE, config, STEPS)
        return found, train(CASE, config, STEPS)


@cache
def reference(world: int, accumulation: int) -> Result:
    return train_reference(CASE, world_size=world, steps=STEPS, accumulation=accumulation, clip=0.5)


@pytest.mark.parametrize(
    tuple(SETTINGS),
    by_day(sorted(tuple(row.values()) for row in ROWS), *(tuple(row.values()) for row in dealt())),
)
def test_equals_one_process(
    world: int, stage: int, precision: str, offload: str, checkpointing: str, accumulation: int
) -> None:
    row = dict(zip(SETTINGS, (world, stage, precision, offload, checkpointing, accumulation), strict=True))
    # A device adds up the norm in another order, by which gradients are clipped: fp16 makes 1e-8 larger.
    tolerance = 1e-4 if (precision, offload) == ("fp16", "params alone") else 1e-6
    for rank, (found, on_cpu) in enumerate(run_ranks(world, train_both, configuration(row))):
        assert not differences(found, on_cpu, tolerance), f"rank {rank}"
        if precision == "fp32":
            assert not differences(found, reference(world, accumulation)), f"rank {rank}"


def look(config: dict[str, Any], case: Case = CASE, **options: Any) -> list[str]:
    """The races of a run. ``options``: of the engine."""
    with small_tensors_are_moved(), simulated_device(), looking_for_races() as races:
        engine = make_engine(case, config, **options)
        for step in range(STEPS):
            for micro in range(engine.gradient_accumulation_steps()):
                engine.backward(case.loss(engine, Place(dist.get_rank(), step, micro)))
                if engine.is_gradient_accumulation_boundary():
                    with torch.no_grad():  # reads weights after the last gradient has left the device
                        case.loss(engine, Place(dist.get_rank(), step, micro))
                engine.step()
        engine.destroy()
    return list(races.found)


LOOKED_AT = {name: values for name, values in SETTINGS.items() if name != "world"}
LOOKED_ROWS = [row for row in (dict(zip(LOOKED_AT, v, strict=True)) for v in product(*LOOKED_AT.values())) if allowed(row)]


@pytest.mark.parametrize(
    tuple(LOOKED_AT),
    by_day(
        sorted(tuple(row.values()) for row in LOOKED_ROWS), *(tuple(row[name] for name in LOOKED_AT) for row in dealt())
    ),
)
def test_there_are_no_races(stage: int, precision: str, offload: str, checkpointing: str, accumulation: int) -> None:
    row = dict(zip(LOOKED_AT, (stage, precision, offload, checkpointing, accumulation), strict=True))
    for found in run_ranks(2, look, configuration(row)):
        assert not found, "\n".join(found)


def look_at_an_edit(config: dict[str, Any]) -> list[str]:
    """Shards in host memory are written to while the last gathers may still read them."""
    with small_tensors_are_moved(), simulated_device(), looking_for_races() as races:
        engine = make_engine(CASE, config)
        with torch.no_grad():
            CASE.loss(engine, Place(dist.get_rank()))
        param = engine.module.blocks[3].up.weight
        zero.safe_set_full_fp32_param(param, torch.ones(param.shape))
        engine.destroy()
    return list(races.found)


@pytest.mark.parametrize("world", (1, 2))
def test_an_edit_behind_an_evaluation_has_no_races(world: int) -> None:
    config = configuration(
        {"stage": 3, "precision": "bf16", "offload": "params", "checkpointing": "none", "accumulation": 1}
    )
    for found in run_ranks(world, look_at_an_edit, config):
        assert not found, "\n".join(found)


def look_at_branches(config: dict[str, Any]) -> list[str]:
    return look(config, CASES["branch"])


@pytest.mark.parametrize("world", (2, 4))
def test_a_unit_that_one_rank_did_not_need_has_no_races(world: int) -> None:
    """Its gather, which another rank needs, reads the shard that is updated next. With replicas the sum that decides on the
    update goes through another group, and waits for no gather."""
    for found in run_ranks(world, look_at_branches, make_config(3, zero_optimization={"shard_degree": 2})):
        assert not found, "\n".join(found)


def replicas(stage: int, wire: str, shards: int = 2) -> dict[str, Any]:
    zero = {"shard_degree": shards}
    return make_config(stage, clip=0.5, accumulation=2, zero_optimization=zero, communication_data_type=wire)


@pytest.mark.parametrize(
    ("stage", "wire", "shards"),
    by_day(
        [(1, "fp32", 1), (1, "bf16", 1), (2, "fp32", 2), (3, "bf16", 2)], (1, "bf16", 1), (2, "fp32", 2), (3, "bf16", 2)
    ),
)
def test_sums_over_replicas_have_no_races(stage: int, wire: str, shards: int) -> None:
    for found in run_ranks(2 * shards, look, replicas(stage, wire, shards)):
        assert not found, "\n".join(found)


def look_with_whole_parameters(config: dict[str, Any]) -> tuple[list[list[int]], list[str]]:
    """The sizes of shards by unit, and the races."""
    with simulated_device(), looking_for_races() as races:
        engine = make_engine(CASE, config, optimizer=lambda groups: UnitRows(groups))
        sizes = [[high - low for low, high in pairwise(unit.trainable[0].layout.bounds)] for unit in engine.units]
        for step in range(STEPS):
            engine.backward(CASE.loss(engine, Place(dist.get_rank(), step)))
            engine.step()
        engine.destroy()
    return sizes, list(races.found)


@pytest.mark.parametrize("stage", by_day([1, 2, 3], 2))
def test_sums_over_replicas_of_shards_of_other_sizes_have_no_races(stage: int) -> None:
    """What the rank with the largest shard sends is in a buffer of its own, and its result at once in its place."""
    for sizes, found in run_ranks(4, look_with_whole_parameters, make_config(stage, zero_optimization={"shard_degree": 2})):
        assert any(len(set(of_unit)) > 1 for of_unit in sizes)
        assert not found, "\n".join(found)


def order_of_a_step(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The reductions of a step's last backward: as they were issued before the step, and as planned."""
    with simulated_device():
        engine = make_engine(CASE, config)
        for micro in range(2):
            engine.comm.statistics.order.begin()
            engine.backward(CASE.loss(engine, Place(dist.get_rank(), 0, micro)))
            issued = list(engine.comm.statistics.order.labels)
            engine.step()
        planned = [call.label for call in step_collectives(engine.runtime.plan)]
        engine.destroy()
    found, wanted = ([label for label in labels if "reduce-scatter" in label] for labels in (issued, planned))
    return found, wanted[-len(found) :]


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_the_sum_over_replicas_follows_each_reduction(stage: int) -> None:
    """It is not put off until somebody waits for it: then the slowest link would begin when the backward is over."""
    for found, planned in run_ranks(4, order_of_a_step, replicas(stage, "fp32")):
        assert found == planned
        first, second = found[0::2], found[1::2]
        assert first and second == [f"{label} over replicas" for label in first]


def update_after_a_failure() -> str:
    """What the update of a unit that nobody has needed since the last one says of that."""

    def fail() -> None:
        raise SwapError("planted")

    engine = make_engine(CASE, make_config(3, zero_optimization={"offload_optimizer": {"device": "cpu"}}))
    engine.backward(CASE.loss(engine, Place(0, 0)))
    engine.step()
    unit = engine.units[1]
    unit.updated()
    unit.update_by(fail)
    try:
        engine.sharded_model.update(1.0, unused=False)
    except SwapError as error:
        return str(error)
    finally:
        unit.update_by(lambda: None)
        engine.destroy()
    return ""


def test_an_update_waits_for_the_one_before() -> None:
    """Whose error must not be lost: half of an update would pass for a whole one."""
    assert run_ranks(1, update_after_a_failure) == ["planted"]


# -- layers and stages -------------------------------------------------------------------------------------------------

# (stage, tensor, pipe, data, schedule)
PARALLEL = (
    *((3, 2, 1, 1, "1f1b"), (1, 2, 1, 2, "1f1b"), (0, 2, 2, 1, "1f1b"), (3, 1, 2, 2, "zero_bubble")),
    *((2, 1, 3, 1, "gpipe"), (0, 2, 1, 2, "1f1b")),
)
AS_PARALLEL = pytest.mark.parametrize(
    ("stage", "tensor", "pipe", "data", "schedule"), by_day(PARALLEL, PARALLEL[1], *PARALLEL[3:])
)


def train_parallel(tensor: int, pipe: int, config: dict[str, Any]) -> dict[str, Any]:
    with simulated_device():
        return test_parallel_matrix.train("llama", tensor, pipe, config)


@pytest.mark.parametrize(("stage", "tensor", "pipe", "data", "schedule"), (PARALLEL[1], PARALLEL[3], PARALLEL[5]))
def test_divided_models_equal_one_process(stage: int, tensor: int, pipe: int, data: int, schedule: str) -> None:
    config = make_config(stage, accumulation=2, clip=0.5, pipeline={"schedule": schedule})
    found = run_ranks(tensor * pipe * data, train_parallel, tensor, pipe, config)
    test_parallel_matrix.compare(found, test_parallel_matrix.reference("llama", data, 2))


def look_at_parallel(tensor: int, pipe: int, config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The run, in which copies are not put off, and its races."""
    with simulated_device(), looking_for_races() as races:
        result = test_parallel_matrix.train("llama", tensor, pipe, config)
    return result, list(races.found)


@AS_PARALLEL
def test_divided_models_have_no_races(stage: int, tensor: int, pipe: int, data: int, schedule: str) -> None:
    config = make_config(stage, accumulation=2, clip=0.5, pipeline={"schedule": schedule})
    found = run_ranks(tensor * pipe * data, look_at_parallel, tensor, pipe, config)
    for _, races in found:
        assert not races, "\n".join(races)
    test_parallel_matrix.compare([result for result, _ in found], test_parallel_matrix.reference("llama", data, 2))


def write_to_parts() -> list[list[float]]:
    """The first values of parameters to which tensor rank 0 has written."""
    config = make_config(3, tensor_parallel={"size": 2})
    with simulated_device():
        engine = zerorun.initialize(test_parallel_matrix.build("llama"), config)
        found = []
        for param in list(engine.module.parameters())[:4]:
            with zero.GatheredParameters([param], modifier_rank=0):
                if dist.get_rank() == 0:
                    param.data.fill_(len(found) + 1.0)
            with zero.GatheredParameters([param]):
                found.append(param.detach().flatten()[:2].tolist())
        engine.destroy()
    return found


def test_tensor_ranks_agree_on_what_they_gather() -> None:
    assert run_ranks(2, write_to_parts) == [[[value, value] for value in (1.0, 2.0, 3.0, 4.0)]] * 2


def left_in_flight() -> list[str]:
    """Labels of collectives that nobody waits for any more."""
    case = CASES["branch"]
    with simulated_device():
        engine = make_engine(case, make_config(3))
        for step in range(2):
            engine.backward(case.loss(engine, Place(dist.get_rank(), step)))
            engine.step()
        found = [pending.label for pending in engine.comm.statistics.in_flight]
        engine.destroy()
    return found


def test_gathers_for_others_are_waited_for() -> None:
    """What is not waited for keeps its buffers for ever."""
    assert run_ranks(2, left_in_flight) == [[], []]
