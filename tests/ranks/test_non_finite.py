"""NaN in losses and gradients: one error that says where it comes from, in every precision and form of the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from simulation import simulated_device
from test_bad_input import attempt
from test_foreign_values import Layers, build, data
from training import make_config

import zerorun
from zerorun.engine.step_outcomes import SKIPS_IN_A_ROW


def plain(engine: zerorun.Engine, loss: torch.Tensor) -> None:
    loss.backward()


def by_engine(engine: zerorun.Engine, loss: torch.Tensor) -> None:
    engine.backward(loss)


def bad_gradient(engine: zerorun.Engine) -> torch.Tensor:
    """A finite loss, the gradient of whose head bias is infinite."""
    found = engine(data())
    return found + (engine.module.head.bias.float() * 0.0).sqrt().sum() if dist.get_rank() else found


def bad_loss(engine: zerorun.Engine) -> torch.Tensor:
    return engine(data()) * float("nan")


def steps(stage: int, precision: str, loss: Callable[..., torch.Tensor], backward: Callable[..., None]) -> Any:
    """(the error, how many steps came before it, what was logged, whether the weights have changed)."""
    engine = zerorun.initialize(build(), make_config(stage, precision=precision))
    before, done, lines = engine.state_dict(), 0, []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerorun").addHandler(handler)

    def loop() -> None:
        nonlocal done
        for _ in range(10):
            backward(engine, loss(engine))
            engine.step()
            done += 1

    answer = attempt(loop)
    logging.getLogger("zerorun").removeHandler(handler)
    after = engine.state_dict()
    engine.destroy()
    return answer, done, lines, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("backward", (plain, by_engine))
@pytest.mark.parametrize("loss", (bad_loss, bad_gradient))
@pytest.mark.parametrize("stage", (0, 1, 3))
def test_bf16_ends_when_nothing_is_finite(stage: int, loss: Any, backward: Any) -> None:
    at_once = loss is bad_loss and backward is by_engine
    for rank, ((kind, text), done, lines, unchanged) in enumerate(run_ranks(2, steps, stage, "bf16", loss, backward)):
        assert (kind, unchanged) == ("NonFiniteError", True)
        assert done == (0 if at_once else SKIPS_IN_A_ROW - 1)
        warned = [line for line in lines if "skipped: gradients are NaN or infinite" in line]
        assert len(warned) == (done if rank == 0 else 0)
        if loss is bad_gradient:
            first = "first in parameter 'head.bias' on rank 1 in micro-batch 0 of this step."
            assert f"in 'head.bias', {first}" in text


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_fp32_names_the_parameter(stage: int) -> None:
    for (kind, text), done, _, unchanged in run_ranks(2, steps, stage, "fp32", bad_gradient, by_engine):
        assert (kind, done, unchanged) == ("NonFiniteError", 0, True)
        assert "gradients are NaN or infinite at step 1 in 'head.bias'." in text


def one_bad_step() -> tuple[int, int]:
    engine = zerorun.initialize(build(), make_config(3, precision="bf16"))
    for step in range(7):
        (bad_gradient(engine) if step % 3 else engine(data())).backward()
        engine.step()
    found = engine.skipped_steps, engine.global_steps
    engine.destroy()
    return found


def test_a_good_step_begins_the_count_anew() -> None:
    assert run_ranks(2, one_bad_step) == [(4, 7)] * 2


class Penalised(Layers):
    """Reads the weight of a block that runs, outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.blocks[1].weight.square().sum()


def penalty(precision: str, place: str, steps: int = 2) -> tuple[str, str]:
    engine = zerorun.initialize(Penalised() if place == "model" else build(), make_config(3, precision=precision))

    def loop() -> None:
        for _ in range(steps):
            loss = engine(data())
            if place == "loop":
                loss = loss + engine.module.blocks[1].weight.square().sum()
            engine.backward(loss)
            engine.step()

    answer = attempt(loop)
    engine.zero_grad()
    engine.destroy()
    return answer


@pytest.mark.parametrize("place", ("model", "loop"))
@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
def test_a_weight_outside_its_unit_is_named_though_the_unit_runs(precision: str, place: str) -> None:
    for kind, text in run_ranks(2, penalty, precision, place):
        assert kind == "ReleasedParameterError"
        assert "'blocks.1.weight' was used outside the forward of its unit 'blocks.1'" in text


def penalty_on_a_device(precision: str) -> tuple[str, str]:
    with simulated_device():
        return penalty(precision, "loop", steps=30)


@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
def test_a_device_that_tells_later_names_it_too(precision: str) -> None:
    for kind, text in run_ranks(2, penalty_on_a_device, precision):
        assert kind == "ReleasedParameterError"
        assert "'blocks.1.weight' was used outside the forward of its unit 'blocks.1'" in text


def mean_of_nothing(clamped: bool) -> tuple[str, str]:
    """A micro-batch without a token, by hand: 0 / 0."""
    engine = zerorun.initialize(build(), make_config(1))

    def action() -> None:
        mask = torch.zeros(1) if dist.get_rank() else torch.ones(1)
        count = mask.sum().clamp(min=1) if clamped else mask.sum()
        engine.backward((engine(data()) * mask).sum() / count, weight=mask.sum())
        engine.step()

    answer = attempt(action) if not clamped else (str(action()), "")
    engine.zero_grad()
    engine.destroy()
    return answer


def test_a_mean_of_nothing_is_explained() -> None:
    assert run_ranks(2, mean_of_nothing, True) == [("None", "")] * 2
    for kind, text in run_ranks(2, mean_of_nothing, False):
        assert kind == "NonFiniteError"
        assert "Rank 1 gave micro-batch 0 a weight of 0" in text
        assert "clamp(min=1)" in text


def huge_gradients(stage: int, offload: bool) -> tuple[float | None, dict[str, torch.Tensor]]:
    """(the norm, weights after a step) of gradients whose squares are infinite in fp32; with torch alone at stage -1."""
    torch.manual_seed(3)
    model, x = torch.nn.Linear(8, 600), torch.randn(2, 8)
    if stage < 0:
        (model(x).square().mean() * 1e22).backward()
        grads = [param.grad.double() for param in model.parameters() if param.grad is not None]
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.data -= (0.5 * grad / norm).float()
        return norm.item(), model.state_dict()
    changes = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if offload else {}
    config = make_config(stage, clip=1.0, **changes)
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
    engine = zerorun.initialize(model, config)
    engine.backward(engine(x).square().mean() * 1e22)
    engine.step()
    found = engine.get_global_grad_norm(), engine.state_dict()
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, False), (3, True)])
def test_finite_gradients_are_finite_however_large(stage: int, offload: bool) -> None:
    ((wanted, weights),) = run_ranks(1, huge_gradients, -1, False)
    assert wanted is not None and wanted > 2e19
    for norm, found in run_ranks(2, huge_gradients, stage, offload):
        assert norm == pytest.approx(wanted, rel=1e-6)
        torch.testing.assert_close(found, dict(weights), rtol=1e-6, atol=1e-7)
