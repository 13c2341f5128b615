"""Stages 1 and 2 gather what was trained and nothing else: after the update or, if told so, behind the next forward."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, Block, Case, Gpt, Place
from races import looking_for_races
from reference import differences, train_reference
from simulation import simulated_device
from test_bad_input import attempt
from torch import nn
from training import make_config, make_engine, train

import zerorun
from zerorun import zero
from zerorun.plan.step_collectives import step_collectives

STEPS = 3
BY_DAY = ("lora", "unused_alternating", "two_forwards", "moe")


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    zero_optimization = {"overlap_param_gather": True, **more.pop("zero_optimization", {})}
    return make_config(stage, clip=0.5, zero_optimization=zero_optimization, **more)


def train_on(model: str, where: str, config: dict[str, Any], monkey: bool = False) -> tuple[Any, list[str]]:
    races: list[str] = []
    with simulated_device() if where != "cpu" else nullcontext():
        if where != "races":
            return train(CASES[model], config, STEPS), races
        with looking_for_races() as found:
            result = train(CASES[model], config, STEPS)
        return result, list(found.found)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "model",
    by_day(("plain", "tied", "lora", "frozen", "unused_alternating", "checkpoint", "two_forwards", "moe"), *BY_DAY),
)
@pytest.mark.parametrize("stage", (1, 2))
@pytest.mark.parametrize("where", ("cpu", "simulated", "races"))
@pytest.mark.parametrize(("world", "shards"), ((2, 2), (4, 2), (3, 3)))
@pytest.mark.parametrize("accumulation", (1, 2))
def test_equals_one_process(model: str, stage: int, where: str, world: int, shards: int, accumulation: int) -> None:
    config = configuration(stage, accumulation=accumulation, zero_optimization={"shard_degree": shards})
    wanted = train_reference(CASES[model], world_size=world, steps=STEPS, accumulation=accumulation, clip=0.5)
    for rank, (result, races) in enumerate(run_ranks(world, train_on, model, where, config)):
        assert not differences(result, wanted), f"rank {rank}"
        assert not races, races


def use_between_steps(stage: int, where: str, folder: Path) -> dict[str, Any]:
    case = CASES["plain"]
    found: dict[str, Any] = {}
    values: list[list[Any]] = []
    for ahead in (True, False):
        with simulated_device() if where == "simulated" else nullcontext():
            engine = make_engine(case, configuration(stage, zero_optimization={"overlap_param_gather": ahead}))
            mine: list[Any] = []

            def step(number: int, engine: zerorun.Engine = engine) -> None:
                engine.backward(case.loss(engine, Place(dist.get_rank(), number)))
                engine.step()

            step(0)
            block = engine.module.blocks[1]
            if ahead:
                found["loud"] = bool(block.up.weight.isnan().all())
                found["in flight"] = [unit.name for unit in engine.units if not unit.unsharded]
            mine.append(zero.safe_get_full_fp32_param(block.up.weight))
            mine.append(block.up.weight.clone())  # the unit is whole since then
            step(1)
            with zero.GatheredParameters([block.down.bias], modifier_rank=0):
                mine.append(block.down.bias.clone())
                if dist.get_rank() == 0:
                    block.down.bias.data.fill_(0.25)
            step(2)
            mine.append(engine.state_dict())
            step(3)
            mine.append(dict(engine.module.state_dict()))
            step(4)
            engine.save_checkpoint(folder / str(ahead))
            step(5)
            engine.load_checkpoint(folder / str(ahead))
            step(6)
            mine.append(block(torch.ones(1, 2, 16)).detach())  # a unit by itself, before any other
            step(7)
            with torch.no_grad():
                mine.append(case.loss(engine, Place(dist.get_rank(), 8)))
            step(8)
            module = engine.module
            engine.destroy()
            mine.append([p.detach().clone() for p in module.parameters()])
            values.append(mine)
    found["same"] = [_same(one, other) for one, other in zip(*values, strict=True)]
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(_same, one, other))


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (1, 2))
@pytest.mark.parametrize("where", ("cpu", "simulated"))
def test_whoever_asks_sees_new_values(stage: int, where: str, tmp_path: Path) -> None:
    for found in run_ranks(2, use_between_steps, stage, where, tmp_path):
        assert found["loud"]  # and not the old values in silence
        assert found["in flight"] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
        assert all(found["same"]), found["same"]


def elsewhere() -> tuple[str, str]:
    """The loss reads a block's weight before the model has run."""
    case = CASES["plain"]
    engine = make_engine(case, configuration(1))
    engine.backward(case.loss(engine, Place(dist.get_rank(), 0)))
    engine.step()

    def action() -> None:
        penalty = engine.module.blocks[0].up.weight.square().sum()
        engine.backward(case.loss(engine, Place(dist.get_rank(), 1)) + penalty)
        engine.step()
        engine.refuse_failed()  # on a device a step has its outcome later

    answer = attempt(action)
    engine.zero_grad()
    engine.destroy()
    return answer


def test_a_parameter_read_too_early_is_an_error() -> None:
    for kind, text in run_ranks(2, elsewhere):
        assert kind == "NonFiniteError"
        assert "With overlap_param_gather, a parameter used before its module's forward reads as NaN, too." in text


class Gain(Block):
    """With a parameter of one element, and so a placeholder to which torch can write."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def written_early(asked: bool) -> tuple[str, str]:
    """``asked``: somebody reads the weights between the write and the next forward."""
    case = Case("gain", lambda: Gpt(3, Gain))
    engine = make_engine(case, configuration(1))
    engine.backward(case.loss(engine, Place(dist.get_rank(), 0)))
    engine.step()
    with torch.no_grad():
        engine.module.blocks[1].gain.fill_(0.5)
    if asked:
        engine.state_dict()
    answer = attempt(lambda: case.loss(engine, Place(dist.get_rank(), 1)))
    engine.zero_grad()
    engine.destroy()
    return answer


@pytest.mark.parametrize("asked", (False, True))
def test_a_write_that_would_be_lost_is_an_error(asked: bool) -> None:
    for kind, text in run_ranks(2, written_early, asked):
        assert kind == "ReleasedParameterError" and "'blocks.1.gain' was written to" in text


def traffic(stage: int, ahead: bool) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes of the last step by label, as counted and as planned; and the trained elements that come from other ranks."""
    case = CASES["lora"]
    engine = make_engine(case, configuration(stage, zero_optimization={"overlap_param_gather": ahead}))
    for number in range(3):
        before = {label: entry["bytes"] for label, entry in engine.communication_report().items()}
        engine.backward(case.loss(engine, Place(dist.get_rank(), number)))
        engine.step()
    after = {label: entry["bytes"] for label, entry in engine.communication_report().items()}
    sent = {label: found - before.get(label, 0) for label, found in after.items() if found > before.get(label, 0)}
    planned: dict[str, int] = {}
    for call in step_collectives(engine.plan):
        planned[call.label] = planned.get(call.label, 0) + call.bytes
    trained = sum(group.shard_numel for group in engine.plan.trainable)
    engine.destroy()
    return sent, planned, trained


@pytest.mark.parametrize("stage", (1, 2))
@pytest.mark.parametrize("ahead", (False, True))
def test_frozen_parameters_are_not_sent_again(stage: int, ahead: bool) -> None:
    for sent, planned, trained in run_ranks(2, traffic, stage, ahead):
        assert sent == {label: size for label, size in planned.items() if size}
        assert sum(size for label, size in sent.items() if "all-gather" in label) == 4 * trained
