"""Steps that are skipped: what a loop, its schedule and its log learn of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from training import make_config

import zerorun

HALF = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "min_loss_scale": 2**-200}}
OVERFLOWS = (False, True, True, False, True)


@contextmanager
def warnings() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerorun").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("zerorun").removeHandler(handler)


def tiny(precision: str) -> zerorun.Engine:
    torch.manual_seed(0)
    config = {**make_config(1), **(HALF if precision == "fp16" else {})}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    return zerorun.initialize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), config)


def step(engine: zerorun.Engine, bad: bool) -> None:
    factor = float("inf") if bad and dist.get_rank() == dist.get_world_size() - 1 else 1.0
    (engine(torch.ones(2, 4)).float().sum() * factor).backward()
    engine.step()


def loop(precision: str, overflows: tuple[bool, ...]) -> tuple[list[Any], list[str]]:
    """For each step (norm, overflow, step applied?), and what was warned of."""
    engine, found = tiny(precision), []
    with warnings() as lines:
        for bad in overflows:
            step(engine, bad)
            found.append((engine.get_global_grad_norm(), engine.optimizer.overflow, engine.was_step_applied()))
    engine.destroy()
    return found, lines


@pytest.mark.parametrize("precision", ("fp16", "bf16", "fp32"))
def test_the_norm_and_the_flag_are_of_the_last_step(precision: str) -> None:
    planted = OVERFLOWS if precision != "fp32" else (False,) * 5
    for found, _ in run_ranks(2, loop, precision, planted):
        norms, overflows, applied = zip(*found, strict=True)
        assert overflows == planted
        assert applied == tuple(not bad for bad in planted)
        for number, bad in enumerate(planted):
            assert norms[number] is not None and 0 < norms[number] < float("inf")
            assert not bad or norms[number] == norms[number - 1]


def rates_of_accelerate(precision: str) -> list[float]:
    """The rate after each step, relative to the first, of a schedule that accelerate steps."""
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DeepSpeedOptimizerWrapper

    accelerator = Accelerator(cpu=True)
    engine, found = tiny(precision), []
    optimizer = DeepSpeedOptimizerWrapper(engine.optimizer)
    halving = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    schedule, first = AcceleratedScheduler(halving, optimizer, split_batches=True), engine.get_lr()[0]
    for bad in OVERFLOWS:
        step(engine, bad)
        schedule.step()
        found.append(engine.get_lr()[0] / first)
    engine.destroy()
    accelerator.state._reset_state(reset_partial_state=True)
    return found


@pytest.mark.parametrize("precision", ("fp16", "bf16"))
def test_a_schedule_of_accelerate_does_not_advance_over_a_skipped_step(precision: str) -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(2, rates_of_accelerate, precision) == [[0.5, 0.5, 0.5, 0.25, 0.25]] * 2


def first_is_skipped() -> tuple[float | None, bool]:
    engine = tiny("fp16")
    assert engine.optimizer.overflow is False
    step(engine, True)
    found = engine.get_global_grad_norm(), engine.optimizer.overflow
    engine.destroy()
    return found


def test_no_norm_before_a_step_was_applied() -> None:
    assert run_ranks(2, first_is_skipped) == [(None, True)] * 2


def test_one_line_for_each_skip_of_fp16_on_rank_zero() -> None:
    (_, first), (_, second) = run_ranks(2, loop, "fp16", OVERFLOWS)
    told = [line for line in first if "skipped" in line]
    assert told == [
        "step 2 skipped (1 in a row): gradients overflow in fp16; loss scale 256 -> 128",
        "step 3 skipped (2 in a row): gradients overflow in fp16; loss scale 128 -> 64",
        "step 5 skipped (1 in a row): gradients overflow in fp16; loss scale 64 -> 32",
    ]
    assert not [line for line in second if "skipped" in line]


def test_after_ten_in_a_row_every_hundredth() -> None:
    ((_, lines),) = run_ranks(1, loop, "fp16", (False, *(True,) * 120, False, True))
    numbers = [int(line.split()[1]) for line in lines if "skipped" in line]
    assert numbers == [*range(2, 12), 101, 123]


def pipelined() -> tuple[list[float | None], bool, list[str]]:
    torch.manual_seed(0)
    model = zerorun.PipelineModule([nn.Linear(4, 4) for _ in range(4)], num_stages=2, loss_fn=nn.functional.mse_loss)
    engine = zerorun.initialize(model, {**make_config(1), **HALF, "pipeline": {"stages": 2}})
    norms = []
    with warnings() as lines:
        for factor in (1.0, 1e30):  # too much for fp16
            engine.train_batch(iter([(torch.ones(2, 4) * factor, torch.ones(2, 4))]))
            norms.append(engine.get_global_grad_norm())
    found = norms, engine.optimizer.overflow, lines
    engine.destroy()
    return found


def test_a_pipeline_says_the_same() -> None:
    results = run_ranks(2, pipelined)
    for norms, overflow, _ in results:
        assert (norms[0], overflow) == (norms[1], True)
    assert [["loss scale 256 -> 128" in line for line in lines] for _, _, lines in results] == [[True], []]
