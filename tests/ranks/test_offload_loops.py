"""Loops that look at a training between step() and the next forward: under offload they see what they see without it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import Place
from test_offload import PLACES, SMALL
from torch import nn
from training import make_config, make_engine

import zerorun

Values = list[Any]
Loop = Callable[[zerorun.Engine, Path], Values]


def step(engine: zerorun.Engine, number: int) -> float:
    loss = SMALL.loss(engine, Place(dist.get_rank(), number, 0))
    engine.backward(loss)
    engine.step()
    return loss.item()


def go_on(engine: zerorun.Engine) -> Values:
    losses = [step(engine, number) for number in (5, 6)]
    return [losses, engine.state_dict()]


def load_right_after_a_step(engine: zerorun.Engine, folder: Path) -> Values:
    step(engine, 0)
    engine.save_checkpoint(folder)
    step(engine, 1)
    engine.load_checkpoint(folder)
    return go_on(engine)


def evaluate_in_inference_mode(engine: zerorun.Engine, folder: Path) -> Values:
    step(engine, 0)
    with torch.inference_mode():
        SMALL.loss(engine, Place(dist.get_rank(), 1, 0))
    return go_on(engine)


def hooks(engine: zerorun.Engine, folder: Path) -> Values:
    """Before the step: every gradient halved. After it: counts read, and masters clamped."""
    optimizer, counts = engine.optimizer, []
    assert optimizer is not None

    def tensors() -> list[torch.Tensor]:
        return [param for group in optimizer.param_groups for param in group["params"]]

    def before(*unused: Any) -> None:
        for param in tensors():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def after(*unused: Any) -> None:
        counts.append([int(optimizer.state[param]["step"]) for param in tensors()])
        for param in tensors():
            param.clamp_(-0.05, 0.05)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return [*go_on(engine), counts]


def held_optimizer(engine: zerorun.Engine, folder: Path) -> Values:
    """As DeepSpeed's 4-tuple gives it: moments read, and set to zero, right after a step."""
    _, optimizer, _, _ = engine
    step(engine, 0)
    sums = [float(state["exp_avg"].sum()) for state in optimizer.state.values()]
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    return [sums, *go_on(engine)]


def load_into_the_module(engine: zerorun.Engine, folder: Path) -> Values:
    if any(not unit.resident for unit in engine.units):
        return []  # placeholders refuse it
    weights = {name: value * 0.5 for name, value in engine.state_dict().items()}
    step(engine, 0)
    engine.module.load_state_dict(weights)
    return go_on(engine)


def replace_states(engine: zerorun.Engine, folder: Path) -> Values:
    step(engine, 0)
    assert engine.optimizer is not None
    for state in engine.optimizer.state.values():
        state["exp_avg"] = torch.ones_like(state["exp_avg"])
    return go_on(engine)


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        load_right_after_a_step,
        evaluate_in_inference_mode,
        hooks,
        held_optimizer,
        load_into_the_module,
        replace_states,
    )
}


def run(name: str, stage: int, places: list[dict[str, Any]], folder: str) -> list[Values]:
    found = []
    for number, place in enumerate(places):
        engine = make_engine(SMALL, make_config(stage, zero_optimization=place))
        found.append(LOOPS[name](engine, Path(folder) / str(number)))
        engine.destroy()
    return found


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert all(torch.equal(value, other[key]) for key, value in one.items())
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other


@pytest.mark.parametrize("stage", by_day((1, 3), 3))
@pytest.mark.parametrize("name", by_day(LOOPS, "load_right_after_a_step", "hooks", "replace_states"))
def test_loops_see_the_same(name: str, stage: int, tmp_path: Path) -> None:
    places = [{}, PLACES["optimizer"], PLACES["disk"], *([PLACES["both"], PLACES["all on disk"]] if stage == 3 else [])]
    for resident, *others in run_ranks(2, run, name, stage, places, str(tmp_path)):
        for other in others:
            assert_equal(other, resident)


class Backwards(nn.Module):
    """Runs its blocks in one order on rank 0 and in the other on rank 1, so that ranks need different units at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if dist.get_rank() == 0 else reversed(self.blocks):
            x = torch.tanh(block(x))
        return x


def run_backwards(places: list[dict[str, Any]]) -> list[Values]:
    found = []
    for place in places:
        torch.manual_seed(0)
        engine = zerorun.initialize(Backwards(), make_config(3, precision="bf16", zero_optimization=place))
        losses = []
        for _ in range(4):
            loss = engine(torch.linspace(-1, 1, 32).view(2, 16)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append([losses, engine.state_dict()])
        engine.destroy()
    return found


def test_other_ranks_are_given_updated_shards() -> None:
    for resident, *others in run_ranks(2, run_backwards, [{}, *(PLACES[name] for name in ("optimizer", "both", "disk"))]):
        for other in others:
            assert_equal(other, resident)


def interrupted(place: dict[str, Any]) -> Values:
    """SIGINT comes while the forward runs the updates of its units."""
    engine = make_engine(SMALL, make_config(3, zero_optimization=place))
    step(engine, 0)
    assert engine.sharded is not None
    original, sent = engine.sharded.optimizer.update, threading.Event()

    def update(*args: Any, **options: Any) -> None:
        if not sent.is_set():
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)
        original(*args, **options)

    if place:
        engine.sharded.optimizer.update = update  # type: ignore[method-assign]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            for unit in engine.units:
                unit.updated()
        signal.signal(signal.SIGINT, before)
    found = go_on(engine)
    engine.destroy()
    return found


def test_an_interrupt_does_not_break_an_update() -> None:
    for resident, placed in zip(run_ranks(2, interrupted, {}), run_ranks(2, interrupted, PLACES["optimizer"]), strict=True):
        assert_equal(placed, resident)
