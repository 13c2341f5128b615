"""Optimizers of other packages whose methods beside step() change weights, or look for gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, Place
from training import make_config, shared_topology

import zerorun
from zerorun.errors import ModelError, StepError

CASE = CASES["plain"]
SETTINGS = {"lr": 1e-2, "warmup_steps": 2, "eps": 1e-4}


class Sgd(torch.optim.Optimizer):
    """Plain descent with methods of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.move(param, group["lr"])

    def move(self, param: torch.Tensor, lr: float) -> None:
        """Called by step(), where there are gradients."""
        param.sub_(param.grad, alpha=lr)

    @torch.no_grad()
    def halve(self) -> None:
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.5)

    def look(self) -> int:
        return sum(param.numel() for group in self.param_groups for param in group["params"])

    def perturb(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad)


class Sophia(Sgd):
    def update_hessian(self) -> None:
        """Would read gradients."""


def plain_run(dtype: torch.dtype) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses of training and evaluation in turns, and the weights seen in each evaluation, without zerorun, on 2 ranks'
    data: fp32 masters and weights in ``dtype``."""
    module, weights = CASE.build(), CASE.build().to(dtype)
    optimizer = schedulefree.AdamWScheduleFree(module.parameters(), **SETTINGS)

    def write_back() -> None:
        with torch.no_grad():
            for weight, master in zip(weights.parameters(), module.parameters(), strict=True):
                weight.copy_(master)

    losses, seen = [], []
    for step in range(4):
        optimizer.train()
        write_back()
        total = torch.zeros(())
        for rank in range(2):
            loss = CASE.loss(weights, Place(rank, step))
            loss.backward()
            total += loss.detach() / 2
            for weight, master in zip(weights.parameters(), module.parameters(), strict=True):
                grad = weight.grad.float() / 2  # type: ignore[union-attr]
                master.grad = grad if master.grad is None else master.grad + grad
                weight.grad = None
        losses.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        write_back()
        losses.append(sum(float(CASE.loss(weights, Place(rank, 9))) for rank in range(2)) / 2)
        seen.append({name: value.detach().clone() for name, value in weights.state_dict().items()})
    return losses, seen


def sharded_run(stage: int, precision: str, folder: str) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    def engine_of() -> zerorun.Engine:
        make = lambda params: schedulefree.AdamWScheduleFree(params, **SETTINGS)  # noqa: E731
        config = make_config(stage, precision=precision)
        return zerorun.initialize(CASE.build(), config, optimizer=make, topology=shared_topology())

    engine = engine_of()
    losses, seen = [], []
    for step in range(4):
        engine.optimizer.train()
        loss = CASE.loss(engine, Place(dist.get_rank(), step))
        engine.backward(loss)
        engine.step()
        engine.optimizer.eval()
        if step == 1:  # saved in the view for evaluation, and gone on from there
            engine.save_checkpoint(f"{folder}/{stage}")
            engine.destroy()
            engine = engine_of()
            engine.load_checkpoint(f"{folder}/{stage}")
        with torch.no_grad():
            evaluated = CASE.loss(engine, Place(dist.get_rank(), 9))
        for value in (loss, evaluated):
            values: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(values, value.item())
            losses.append(sum(values) / len(values))
        seen.append(engine.state_dict())
    engine.destroy()
    return losses, seen


def run_stages(
    stages: Sequence[int], precision: str, folder: str
) -> list[tuple[list[float], list[dict[str, torch.Tensor]]]]:
    return [sharded_run(stage, precision, folder) for stage in stages]


@pytest.mark.parametrize("precision", by_day(("fp32", "bf16"), "bf16"))
@pytest.mark.parametrize("stages", by_day(([0, 3], [1, 2]), [0, 3]))
def test_accelerate_4159_schedule_free_evaluates_and_saves_its_average(
    tmp_path: Path, precision: str, stages: list[int]
) -> None:
    losses, weights = plain_run(torch.bfloat16 if precision == "bf16" else torch.float32)
    tolerance = 2e-6 if precision == "fp32" else 1e-3  # a weight or two that are rounded the other way
    assert any(abs(a - b) > 10 * tolerance for a, b in zip(losses, losses[2:], strict=False))
    for rank in run_ranks(2, run_stages, stages, precision, str(tmp_path)):
        for found, seen in rank:
            assert found == pytest.approx(losses, rel=tolerance)
            for ours, theirs in zip(seen, weights, strict=True):
                for name, value in theirs.items():
                    assert (ours[name].float() - value.float()).norm() <= 10 * tolerance * value.float().norm(), name


def other_methods(stage: int) -> tuple[float, float, int, str, bool]:
    optimizer = Sgd((module := CASE.build()).parameters())
    engine = zerorun.initialize(module, make_config(stage), optimizer=optimizer, topology=shared_topology())
    before = engine.state_dict()["blocks.1.up.weight"]
    engine.backward(CASE.loss(engine, Place(dist.get_rank())))
    seen = optimizer.look() if dist.get_rank() == 0 else 0  # changes nothing, so one rank may call it alone
    with pytest.raises(StepError) as error:
        optimizer.perturb()
    engine.step()
    stepped = engine.state_dict()["blocks.1.up.weight"]
    optimizer.halve()
    halved = engine.state_dict()["blocks.1.up.weight"]
    with torch.no_grad():
        loss = CASE.loss(engine, Place())  # all ranks see the same weights
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, loss.item())
    engine.destroy()
    assert "halve" not in vars(optimizer)
    moved, off = float((stepped - before).norm()), float((halved - stepped / 2).norm())
    return moved, off, seen, str(error.value), len(set(values)) == 1


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_masters_changed_by_any_method_reach_the_weights(stage: int) -> None:
    for moved, off, _, error, same in run_ranks(2, other_methods, stage):
        assert moved > 0 and off == 0 and same
        assert "Sgd.perturb() reads gradients" in error


def test_sophia_is_refused() -> None:
    module = CASE.build()
    with pytest.raises(ModelError, match=r"Sophia takes its curvature from gradients in update_hessian\(\)"):
        zerorun.estimate_memory(module, make_config(1), 2, optimizer=Sophia(module.parameters()))
