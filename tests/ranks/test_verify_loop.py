"""engine.verify() compares a batch with one process in a training loop, and changes nothing there."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from verified import TASKS, config

import zerorun
from zerorun.activations.random_streams import streams
from zerorun.errors import StepError
from zerorun.zero.flat_group import TrainedGroup


def steps(task: str, raw: dict[str, Any], *, verifies: bool) -> dict[str, torch.Tensor]:
    model, batches, loss = TASKS[task]()
    engine = zerorun.initialize(model, raw)
    torch.manual_seed(5)
    for number in range(4):
        if verifies and number % 2 == 0:
            said = engine.verify(batches[dist.get_rank()], loss)
            assert "values equal" in said, said
        engine.backward(loss(engine, batches[2 * number + dist.get_rank()]))
        engine.step()
    weights = engine.state_dict()
    engine.destroy()
    return weights


def train(task: str, raw: dict[str, Any]) -> None:
    for one, other in zip(*(steps(task, raw, verifies=verifies).values() for verifies in (True, False)), strict=True):
        assert torch.equal(one, other)
    streams.reset()


@pytest.mark.parametrize(
    ("task", "raw"),
    [
        ("dropping", config(3, 2, activation_checkpointing={"policy": "full"})),
        ("streaming", config(1, 2, activation_checkpointing={"policy": "full"})),
        *[
            pytest.param(task, raw, marks=pytest.mark.nightly)
            for task, raw in (
                ("gpt", config(0)),
                ("tied", config(2, 2)),
                ("gpt", config(1, precision="bf16")),
                ("gpt", config(3, zero_optimization={"offload_optimizer": {"device": "cpu"}})),
            )
        ],
    ],
)
def test_a_loop_goes_on_as_without(task: str, raw: dict[str, Any]) -> None:
    run_ranks(2, train, task, raw)


def with_a_bug(task: str) -> str:
    model, batches, loss = TASKS[task]()
    engine = zerorun.initialize(model, config(2))
    ends = TrainedGroup.reduction_ends

    def doubled(group: TrainedGroup) -> None:
        ends(group)
        if group.names[0].startswith("blocks.1."):
            group.grad_shard.mul_(2)

    with patch.object(TrainedGroup, "reduction_ends", doubled), pytest.raises(StepError) as told:
        engine.verify(batches[dist.get_rank()], loss)
    engine.backward(loss(engine, batches[0]))
    with pytest.raises(StepError, match="step that has begun"):
        engine.verify(batches[0], loss)
    engine.zero_grad()
    engine.destroy()
    streams.reset()
    return str(told.value)


@pytest.mark.parametrize("task", ("gpt", "streaming"))
def test_a_difference_is_an_error(task: str) -> None:
    first, second = run_ranks(2, with_a_bug, task)
    assert first == second
    assert "gradient after its reduction: blocks.1." in first, first


def failing_loss() -> bool:
    """Whether buffers are as before a loss that has failed."""
    torch.manual_seed(0)
    engine = zerorun.initialize(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), config(1))
    before = [buffer.clone() for buffer in engine.module.buffers()]

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        model(batch)
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        engine.verify(torch.randn(4, 6), loss)
    found = all(map(torch.equal, before, engine.module.buffers()))
    engine.destroy()
    return found


def test_a_loss_that_fails_leaves_buffers_as_they_are() -> None:
    assert all(run_ranks(2, failing_loss))
