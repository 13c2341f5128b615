"""Precision: the loss scale's state machine at every stage, overflow, fp32 accumulation, buffers, dtypes held."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import Gpt, Place, tokens
from torch import nn
from training import make_config, shared_topology

import zerorun
from zerorun.config import load_config
from zerorun.errors import LossScaleError
from zerorun.optim.loss_scaler import LossScaler


def published_scales(overflows: list[bool], window: int, hysteresis: int, start: float, minimum: float) -> list[float]:
    """Scale after each step: halve once ``hysteresis`` overflows are used up, double after ``window`` clean steps."""
    scale, left, last = start, hysteresis, -1
    scales = []
    for step, overflow in enumerate(overflows):
        if overflow:
            last = step
            if left == 1:
                scale = max(scale / 2, minimum)
            else:
                left -= 1
        elif (step - last) % window == 0:
            scale, left = scale * 2, hysteresis
        scales.append(scale)
    return scales


OVERFLOWS = [False, False, True, False, True, True, False, False, False, False, True, False, False, False]


@pytest.mark.parametrize(("window", "hysteresis"), [(2, 1), (2, 2), (3, 2), (1000, 3)])
def test_scaler_follows_the_published_state_machine(window: int, hysteresis: int) -> None:
    scaler = LossScaler(256.0, True, window, hysteresis, minimum=1.0, hysteresis_left=hysteresis)
    scales = []
    for overflow in OVERFLOWS:
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == published_scales(OVERFLOWS, window, hysteresis, 256.0, 1.0)


def test_consecutive_hysteresis_is_refilled_by_a_clean_step() -> None:
    scaler = LossScaler(256.0, True, 1000, 2, consecutive=True, minimum=1.0, hysteresis_left=2)
    for overflow in (True, False, True, False, True):
        scaler.update(overflow)
    assert scaler.scale == 256.0


def test_static_scale_stays() -> None:
    scaler = LossScaler(128.0)
    scaler.update(True)
    assert scaler.scale == 128.0


def fp16_config(stage: int, **fp16: Any) -> dict[str, Any]:
    section = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2, **fp16}
    return make_config(stage, fp16=section, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}})


def train_with_overflows(stage: int) -> dict[str, Any]:
    """Plant an infinite gradient on rank 1 where OVERFLOWS says so."""
    engine = zerorun.initialize(Gpt(), fp16_config(stage), topology=shared_topology())
    scales, rates, moved = [], [], []
    for step, overflow in enumerate(OVERFLOWS):
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        logits = engine(tokens(Place(dist.get_rank(), step))[:, :-1])
        bad = float("inf") if overflow and dist.get_rank() == 1 else 1.0
        engine.backward(logits.float().square().mean() * bad)
        engine.step()
        after = engine.state_dict()
        moved.append(any(not torch.equal(before[name], after[name]) for name in before))
        scales.append(engine.loss_scale)
        rates.append(engine.get_lr()[0])
    counters = (engine.global_steps, engine.skipped_steps, engine.was_step_applied())
    engine.destroy()
    return {"scales": scales, "rates": rates, "moved": moved, "counters": counters}


@pytest.mark.parametrize("stage", by_day(range(4), 1, 3))
def test_overflow_on_one_rank_skips_on_all(stage: int) -> None:
    for found in run_ranks(2, train_with_overflows, stage):
        assert found["scales"] == published_scales(OVERFLOWS, 2, 2, 256.0, 1.0)
        assert found["counters"] == (len(OVERFLOWS), sum(OVERFLOWS), True)
        for step, overflow in enumerate(OVERFLOWS):
            assert not (overflow and found["moved"][step]), "weights moved in a skipped step"
            if overflow:
                assert found["rates"][step] == found["rates"][step - 1], "the schedule went on over a skipped step"


def overflow_at_minimum() -> tuple[str, bool]:
    config = fp16_config(3, initial_scale_power=1, hysteresis=1, min_loss_scale=1)
    config["gradient_accumulation_steps"] = 2
    engine = zerorun.initialize(Gpt(), config, topology=shared_topology())
    text, kept = "", False
    for step in range(4):
        before = engine.state_dict()
        for micro in range(2):
            logits = engine(tokens(Place(dist.get_rank(), step, micro))[:, :-1])
            bad = float("inf") if dist.get_rank() == 1 and micro == 1 else 1.0
            engine.backward(logits.float().square().mean() * bad)
            try:
                engine.step()
            except LossScaleError as error:
                text = str(error)
                after = engine.state_dict()
                kept = all(torch.equal(before[name], after[name]) for name in before)
        if text:
            break
    engine.destroy()
    return text, kept


def test_overflow_at_the_minimum_names_parameter_rank_and_micro_batch() -> None:
    answers = run_ranks(2, overflow_at_minimum)
    assert answers[0] == answers[1]
    text, kept = answers[0]
    assert "minimum, 1" in text
    assert "on rank 1 in micro-batch 1" in text
    assert "parameter '" in text
    assert kept


def scale_after_load(saved: dict[str, Any], section: dict[str, Any], folder: Path) -> tuple[LossScaler, list[str]]:
    """The scaler of an engine with ``section`` that goes on from a checkpoint of one with ``saved``, and the log."""
    config = {**make_config(1), "fp16": {"enabled": True}}
    for fp16 in (saved, section):
        engine = zerorun.initialize(nn.Linear(4, 4), {**config, "fp16": {"enabled": True, **fp16}})
        if fp16 is saved:
            engine.backward(engine(torch.ones(2, 4)).float().square().mean() * 1e30)
            engine.step()
            engine.save_checkpoint(folder)
        else:
            with logged() as lines:
                engine.load_checkpoint(folder)
        scaler = replace(engine.scaler)
        engine.destroy()
    return scaler, lines


@contextmanager
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerorun").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("zerorun").removeHandler(handler)


LOADED = {
    "dynamic, goes on": ({"initial_scale_power": 14, "hysteresis": 3}, {"hysteresis": 4}, 2.0**14, "loss scale 16384"),
    "static in place of dynamic": (
        {"initial_scale_power": 14},
        {"loss_scale": 128},
        128.0,
        "not its loss scale 16384, but 128",
    ),
    "dynamic in place of static": (
        {"loss_scale": 128},
        {"initial_scale_power": 9},
        512.0,
        "not its loss scale 128, but 512",
    ),
    "another static one": ({"loss_scale": 128}, {"loss_scale": 1024}, 1024.0, "not its loss scale 128, but 1024"),
    "other limits": (
        {"initial_scale_power": 5, "hysteresis": 4},
        {"hysteresis": 2, "min_loss_scale": 64},
        64.0,
        "loss scale 64",
    ),
}


@pytest.mark.parametrize("name", LOADED)
def test_a_loaded_loss_scale_is_one_that_the_configuration_allows(name: str, tmp_path: Path) -> None:
    saved, section, scale, words = LOADED[name]
    ((scaler, lines),) = run_ranks(1, scale_after_load, saved, section, tmp_path)
    section = {"loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1, **section}
    assert (scaler.scale, scaler.dynamic) == (scale, section["loss_scale"] == 0)
    goes_on = scaler.dynamic and saved.get("loss_scale", 0) == 0
    assert (scaler.steps, scaler.last_overflow) == ((1, 0) if goes_on else (0, -1))
    if scaler.dynamic:
        assert scaler.minimum == section["min_loss_scale"] and scaler.hysteresis == section["hysteresis"]
        assert scaler.hysteresis_left == min(saved["hysteresis"] - 1 if goes_on else 2, section["hysteresis"])
    (told,) = [line for line in lines if line.startswith("loaded ")]
    assert words in told


# -- autocast to fp16 --------------------------------------------------------------------------------------------

AUTOCAST_STEPS, BAD_STEP, SAVED_STEP = 6, 2, 4


def small_network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


def small_loss(model: Any, rank: int, step: int) -> torch.Tensor:
    """A loss whose gradients fp16 cannot hold without a scale. One of them is infinite, on rank 1 alone."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x).float() - x).square().mean() * (float("inf") if (rank, step) == (1, BAD_STEP) else 1e-6)


def autocast_in_torch() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Scales and weights of plain PyTorch in one process, with GradScaler's defaults.

    Gradients are the sum over the ranks at half the rate: those of halved losses would be rounded to fp16 elsewhere.
    """
    model = small_network()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=5e4, momentum=0.5), torch.amp.GradScaler("cpu")
    scales = []
    for step in range(AUTOCAST_STEPS):
        for rank in range(2):
            with torch.autocast("cpu", torch.float16):
                loss = small_loss(model, rank, step)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, model.state_dict()


def autocast_in_zerorun(stage: int, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same on two ranks. From SAVED_STEP on another engine goes on from a checkpoint."""
    config = make_config(stage, torch_autocast={"enabled": True, "dtype": "fp16"})
    config |= {"train_micro_batch_size_per_gpu": 8}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1e5, "momentum": 0.5}}
    engine = zerorun.initialize(small_network(), config, topology=shared_topology())
    scales = []
    for step in range(AUTOCAST_STEPS):
        if step == SAVED_STEP:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = zerorun.initialize(small_network(), config, topology=shared_topology())
            engine.load_checkpoint(folder)
        engine.backward(small_loss(engine, dist.get_rank(), step))
        engine.step()
        scales.append(engine.loss_scale)
    weights = engine.state_dict()
    engine.destroy()
    return scales, weights


@pytest.mark.parametrize("stage", by_day(range(4), 0, 3))
def test_autocast_to_fp16_trains_as_torch_does_with_a_grad_scaler(stage: int, tmp_path: Path) -> None:
    scales, weights = autocast_in_torch()
    assert scales == [2.0**16] * BAD_STEP + [2.0**15] * (AUTOCAST_STEPS - BAD_STEP)
    begin = small_network().state_dict()
    for found_scales, found in run_ranks(2, autocast_in_zerorun, stage, tmp_path):
        assert found_scales == scales
        for name, weight in weights.items():
            assert not torch.allclose(weight, begin[name], atol=1e-3), "nothing was learned"
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def test_the_scale_of_autocast_is_that_of_grad_scaler() -> None:
    scaler = LossScaler.of(load_config({"torch_autocast": {"enabled": True, "dtype": "fp16"}}))
    theirs, ours = torch.tensor([2.0**16]), []
    growth, wanted = torch.zeros(1, dtype=torch.int32), []
    for step in range(6500):
        overflow = step in (0, 1, 1000, 3500)
        scaler.update(overflow)
        ours.append(scaler.scale)
        torch._amp_update_scale_(theirs, growth, torch.tensor([float(overflow)]), 2.0, 0.5, 2000)
        wanted.append(theirs.item())
    assert ours == wanted
    assert set(ours) == {2.0**15, 2.0**14, 2.0**13}
    with pytest.raises(LossScaleError):
        for _ in range(100):
            scaler.update(True)
    assert LossScaler.of(load_config({"torch_autocast": {"enabled": True}})) == LossScaler()
    assert LossScaler.of(load_config({"torch_autocast": {"enabled": False, "dtype": "fp16"}})) == LossScaler()


class WithTable(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0, 1, 7) / 3)
        self.register_buffer("unsaved", torch.linspace(0, 1, 7) / 7, persistent=False)


def dtypes_held(stage: int, precision: str) -> dict[str, Any]:
    model = WithTable()
    table = model.table.clone()
    engine = zerorun.initialize(model, make_config(stage, precision=precision), topology=shared_topology())
    flat_groups = [flat_group for unit in engine.units for flat_group in unit.flat_groups]
    found = {
        "parameters": {flat_group.shard.dtype for flat_group in flat_groups} | {p.dtype for p in model.parameters()},
        "masters": {flat_group.master.dtype for flat_group in flat_groups if flat_group.master is not None},
        "gradients": {flat_group.grad_shard.dtype for flat_group in flat_groups if flat_group.grad_shard is not None},
        "wire": engine.comm.wire_dtype,
        "buffers": torch.equal(model.table, table) and model.unsaved.dtype == torch.float32,
    }
    engine.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_dtypes_of_live_buffers(stage: int, precision: str) -> None:
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for found in run_ranks(2, dtypes_held, stage, precision):
        assert found["parameters"] == {compute}
        assert found["masters"] == found["gradients"] == {torch.float32}
        assert found["wire"] == torch.float32
        assert found["buffers"], "a buffer was rounded"


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def accumulate_tiny(stage: int) -> float:
    """One large gradient, then 255 that vanish beside it in bf16."""
    config = make_config(stage, accumulation=256, precision="bf16", optimizer="SGD")
    engine = zerorun.initialize(Scalar(), config, topology=shared_topology())
    weight = engine.module.weight
    for micro in range(256):
        engine.backward(engine(torch.full((16,), 256.0 if micro == 0 else 0.5)))
        if micro < 255:
            engine.step()
    gradient = zerorun.zero.safe_get_full_grad(weight)
    engine.step()
    engine.destroy()
    assert gradient is not None
    return float(gradient[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tiny_gradients_accumulate_in_fp32(stage: int) -> None:
    assert run_ranks(2, accumulate_tiny, stage) == [(256 + 255 * 0.5) / 256] * 2


ACCUMULATED = 8
SMALL = 2.0**-23  # the smallest number of fp16 but one


def gradients_on_an_fp16_wire(zero: dict[str, Any], way: str) -> list[float]:
    """The first element of a gradient, and its norm. ``way``: how the step got its number of micro-batches."""
    config = make_config(**zero, accumulation=ACCUMULATED, optimizer="SGD", communication_data_type="fp16")
    if way == "resized":
        config["gradient_accumulation_steps"] = 1
    if way == "by the loop":
        config["managed_gradient_accumulation"] = False
    topology = shared_topology(zero.get("zero_optimization", {}).get("shard_degree"))
    engine = zerorun.initialize(Scalar(), config, topology=topology)
    if way == "resized":
        engine.set_train_batch_size(2 * ACCUMULATED * dist.get_world_size())
    for micro in range(ACCUMULATED):
        engine.backward(engine(torch.full((16,), 20_000.0)))
        if micro < ACCUMULATED - 1 and way != "by the loop":
            engine.step()
    gradient = zerorun.zero.safe_get_full_grad(engine.module.weight)
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    assert gradient is not None
    assert norm is not None
    return [float(gradient[0]), norm]


@pytest.mark.parametrize("way", ["managed", "by the loop", "resized"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulated_gradients_fit_an_fp16_wire(stage: int, way: str) -> None:
    for found in run_ranks(2, gradients_on_an_fp16_wire, {"stage": stage}, way):
        assert found == [20_000.0, 80_000.0]


def small_gradients_on_an_fp16_wire(stage: int) -> float:
    """The first element of a gradient whose loss the loop has divided by itself."""
    config = make_config(stage, accumulation=ACCUMULATED, optimizer="SGD", communication_data_type="fp16")
    engine = zerorun.initialize(Scalar(), config)
    for micro in range(ACCUMULATED):
        engine.backward(engine(torch.full((16,), SMALL)) / ACCUMULATED, scale_wrt_gas=False)
        if micro < ACCUMULATED - 1:
            engine.step()
    gradient = zerorun.zero.safe_get_full_grad(engine.module.weight)
    engine.destroy()
    assert gradient is not None
    return float(gradient[0])


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_a_loop_has_divided_are_not_lost_on_an_fp16_wire(stage: int) -> None:
    assert run_ranks(2, small_gradients_on_an_fp16_wire, stage) == [SMALL] * 2


def test_accumulated_gradients_fit_an_fp16_wire_between_replicas() -> None:
    settings = {"stage": 3, "zero_optimization": {"shard_degree": 2}}
    for found in run_ranks(4, gradients_on_an_fp16_wire, settings, "managed"):
        assert found == [20_000.0, 80_000.0]
