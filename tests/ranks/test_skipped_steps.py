"""Steps that are skipped: what a loop, its schedule and its log learn of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from training import make_config

import zerorun
from zerorun.errors import LossScaleError

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
    from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper  # whether DeepSpeed is there or not

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


# -- a static loss scale -----------------------------------------------------------------------------------------

STATIC = {"fp16": {"enabled": True, "loss_scale": 128}}


def at_one_scale(section: dict[str, Any], bad_loss: bool) -> tuple[list[Any], list[torch.Tensor], list[str]]:
    """(what the engine says after each step, weights after each step, warnings) at a loss scale that stays as it is."""
    torch.manual_seed(0)
    engine = zerorun.initialize(nn.Linear(4, 1), {**make_config(1), "fp16": {"enabled": True, **section}})
    told, weights = [], []
    with warnings() as lines:
        for bad in OVERFLOWS:
            loss = engine(torch.ones(2, 4)).float().sum()
            factor = (float("inf") if bad_loss else 1e30) if bad and dist.get_rank() == 1 else 1.0
            engine.backward(loss * factor)
            engine.step()
            told.append((engine.skipped_steps, engine.was_step_applied(), engine.loss_scale, engine.get_lr()))
            weights += engine.state_dict().values()
    engine.destroy()
    return told, weights, lines


@pytest.mark.parametrize("bad_loss", [False, True])
def test_a_static_scale_skips_as_a_dynamic_one_does(bad_loss: bool) -> None:
    dynamic = {"initial_scale_power": 7, "hysteresis": 100}
    static, wanted = (run_ranks(2, at_one_scale, section, bad_loss) for section in ({"loss_scale": 128}, dynamic))
    for (told, weights, _), (told_of_dynamic, weights_of_dynamic, _) in zip(static, wanted, strict=True):
        assert told == told_of_dynamic and told[-1][0] == sum(OVERFLOWS)
        assert all(torch.equal(a, b) for a, b in zip(weights, weights_of_dynamic, strict=True))
    why = "gradients overflow in fp16 with the static loss scale 128; 10 such steps in a row are an error"
    assert [line for line in static[0][2] if "skipped" in line] == [f"step {n} skipped: {why}" for n in (2, 3, 5)]


def overflows_until_it_loads(folder: str) -> list[int]:
    """The steps from each load to the error."""
    engine, found = zerorun.initialize(nn.Linear(4, 1), {**make_config(1), **STATIC}), []
    step(engine, False)
    engine.save_checkpoint(folder)
    for _ in range(2):
        engine.load_checkpoint(folder)
        with pytest.raises(LossScaleError):
            while engine.global_steps < 30:
                step(engine, True)
                engine.settle()
        found.append(engine.global_steps)
    engine.destroy()
    return found


def test_a_load_ends_the_row_of_overflows(tmp_path: Path) -> None:
    assert run_ranks(2, overflows_until_it_loads, str(tmp_path)) == [[11, 11], [11, 11]]


def overflows_for_ever() -> tuple[int, str, bool]:
    """(steps that were counted, the error, whether the weights are those of before)"""
    engine = zerorun.initialize(nn.Linear(4, 1), {**make_config(3), **STATIC})
    step(engine, False)
    before, text = engine.state_dict(), ""
    while not text and engine.global_steps < 30:
        try:
            step(engine, True)
            engine.settle()
        except LossScaleError as error:
            text = str(error)
    kept = all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    found = engine.global_steps, text, kept
    engine.destroy()
    return found


def test_ten_overflows_in_a_row_at_a_static_scale_are_an_error() -> None:
    one, other = run_ranks(2, overflows_for_ever)
    steps, text, kept = one
    assert one == other and steps == 11 and kept
    assert "static loss scale 128 in 10 steps in a row: set a smaller fp16.loss_scale, or 0 for a dynamic one" in text
    assert "first in parameter 'bias' on rank 1 in micro-batch 0" in text


def pipelined() -> tuple[list[float | None], bool, list[str]]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    model = zerorun.PipelineModule(layers, num_stages=2, loss_fn=lambda y, wanted: (y.float() - wanted).square().mean())
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
