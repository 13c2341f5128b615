"""What monitors write is what one process finds: losses over ranks and micro-batches, norms, rates, scales, samples."""

from __future__ import annotations

import csv
import logging
import mmap
import re
from collections import UserDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import test_pipeline as pipeline
import torch
import torch.distributed as dist
from harness import run_ranks
from mirror import mirrored
from models import CASES, Case, Gpt, Mlp, Place
from races import looking_for_races
from reference import train_reference
from simulation import simulated_device
from test_bad_input import attempt
from training import make_config, make_engine

import zerorun
from zerorun.log import _RankFormatter, is_rank_zero, own_rank, setup_logging
from zerorun.monitors import monitor
from zerorun.monitors.observer import tokens_in
from zerorun.watch.board import PAGE, board, show_slow

CASE = CASES["plain"]
DIVIDED = Case("divided", lambda: Gpt(2, lambda: Mlp(32)))
STEPS, ACCUMULATION, BATCH = 3, 2, 2
WARMUP = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 2, "total_num_steps": 9}}


def values_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(samples, value) by name, as they are in the files of a csv_monitor."""
    found = {}
    for path in sorted(folder.glob("*.csv")):
        (step, name), *rows = csv.reader(path.read_text().splitlines())
        assert step == "step"
        found[name] = [(int(samples), float(value)) for samples, value in rows]
    return found


def written(folder: Path, **changes: Any) -> dict[str, Any]:
    """The changes of a configuration that writes to ``folder/run``."""
    return {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"}, **changes}


def train(config: dict[str, Any], mode: str, simulated: bool) -> None:
    """``mode``: of ``backward``, how losses count."""
    with simulated_device() if simulated else nullcontext():
        engine = zerorun.initialize(CASE.build(), config)
        for step in range(STEPS):
            for micro in range(ACCUMULATION):
                loss = CASE.loss(engine, Place(dist.get_rank(), step, micro))
                if mode == "mean":
                    engine.backward(loss)
                elif mode == "sum":
                    engine.backward(loss / ACCUMULATION, scale_wrt_gas=False)
                else:
                    engine.backward(loss, weight=weight_of(dist.get_rank(), step, micro))
                engine.step()
        engine.destroy()


def weight_of(rank: int, step: int, micro: int) -> float:
    """0 for one of the micro-batches."""
    return float((3 * rank + 2 * step + micro) % 5)


def weighted_losses() -> list[float]:
    """Of a run whose weights stay as they are."""
    module, found = CASE.build(), []
    for step in range(STEPS):
        places = [(rank, step, micro) for rank in range(2) for micro in range(ACCUMULATION)]
        weights = [weight_of(*place) for place in places]
        losses = [CASE.loss(module, Place(*place)).item() for place in places]
        found.append(sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights))
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mode", ("mean", "sum"))
@pytest.mark.parametrize("simulated", (False, True))
def test_values_are_those_of_one_process(stage: int, mode: str, simulated: bool, tmp_path: Path) -> None:
    config = make_config(stage, accumulation=ACCUMULATION, **written(tmp_path))
    run_ranks(2, train, config, mode, simulated)
    wanted = train_reference(CASE, world_size=2, steps=STEPS, accumulation=ACCUMULATION)
    found = values_of(tmp_path / "run")
    samples = [2 * BATCH * ACCUMULATION * (step + 1) for step in range(STEPS)]
    assert [x for x, _ in found["train_loss"]] == samples
    assert [y for _, y in found["train_loss"]] == pytest.approx(wanted.losses, rel=1e-6)
    assert [y for _, y in found["grad_norm"]] == pytest.approx(wanted.norms, rel=1e-5)
    assert found["lr"] == [(at, 3e-3) for at in samples]
    assert found["skipped_steps"] == [(at, 0.0) for at in samples]
    assert "loss_scale" not in found
    assert [x for x, _ in found["samples_per_second"]] == samples[1:]
    ratio = found["tokens_per_second"][0][1] / found["samples_per_second"][0][1]
    assert ratio == pytest.approx(6)  # tokens of a sample
    assert all(0 < y < 1000 for _, y in found["peak_memory_gib"])


@pytest.mark.parametrize("simulated", (False, True))
def test_weighted_losses(simulated: bool, tmp_path: Path) -> None:
    config = make_config(2, accumulation=ACCUMULATION, optimizer="SGD", **written(tmp_path))
    config["optimizer"]["params"] = {"lr": 0.0}
    run_ranks(2, train, config, "weight", simulated)
    assert [y for _, y in values_of(tmp_path / "run")["train_loss"]] == pytest.approx(weighted_losses(), rel=1e-6)


def test_tokens_of_a_forward() -> None:
    """They are found in any mapping, as in the BatchEncoding of transformers, and in keyword arguments."""
    tokens, values = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)
    given = ((tokens,), (UserDict(input_ids=tokens),), ({"input_ids": tokens},), (values,), ({"pixels": values},), ())
    assert [tokens_in(args, {}) for args in given] == [6, 6, 6, 0, 0, 0]
    assert tokens_in((), {"input_ids": tokens}) == 6


def train_with_larger_steps(config: dict[str, Any]) -> None:
    """Steps of one, two and three micro-batches, and at last of three smaller ones."""
    engine = zerorun.initialize(CASE.build(), config)
    for step, count in enumerate((1, 1, 2, 3, 3)):
        if count > 1:
            engine.set_train_batch_size(2 * BATCH * count)
        if step == 4:
            engine.set_train_micro_batch_size(1)
        for _ in range(count):
            batch = torch.zeros(BATCH if step < 4 else 1, 6, dtype=torch.long)
            engine.backward(engine(batch).mean())
            engine.step()
        engine.eval()
        engine(batch)  # with gradients, and without a backward: its tokens are not trained on
        engine.train()
    engine.destroy()


@pytest.mark.parametrize("stage", (0, 3))
def test_throughputs_are_those_of_each_steps_own_samples(stage: int, tmp_path: Path) -> None:
    run_ranks(2, train_with_larger_steps, make_config(stage, **written(tmp_path)))
    found = values_of(tmp_path / "run")
    speeds = zip(found["tokens_per_second"], found["samples_per_second"], strict=True)
    assert [tokens / samples for (_, tokens), (_, samples) in speeds] == pytest.approx([6] * 4)
    assert [x for x, _ in found["samples_per_second"]] == [8, 16, 28, 34]


# -- pipelines and tensor ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "data"), ((2, 1), (2, 2)))
def test_pipelines(stages: int, data: int, tmp_path: Path) -> None:
    config = make_config(1, accumulation=3, **written(tmp_path))
    run_ranks(stages * data, pipeline.train, 4, stages, config, 1)
    wanted, found = pipeline.reference(4, data, 3, 0.0), values_of(tmp_path / "run")
    assert [y for _, y in found["train_loss"]] == pytest.approx(wanted["losses"], rel=1e-6)
    assert [y for _, y in found["grad_norm"]] == pytest.approx(wanted["norms"], rel=1e-5)
    assert [x for x, _ in found["lr"]] == [2 * 3 * data * (step + 1) for step in range(pipeline.STEPS)]
    assert "tokens_per_second" in found


def divided(config: dict[str, Any], simulated: bool) -> list[float]:
    """Two tensor ranks, which have the same losses. Returns these."""
    losses = []
    with simulated_device() if simulated else nullcontext():
        engine = zerorun.initialize(DIVIDED.build(), config)
        for step in range(STEPS):
            loss = DIVIDED.loss(engine, Place(0, step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    return losses


@pytest.mark.parametrize("simulated", (False, True))
def test_tensor_ranks_count_once(simulated: bool, tmp_path: Path) -> None:
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    config = make_config(1, tensor_parallel={"size": 2, "plan": plan}, **written(tmp_path))
    losses, _ = run_ranks(2, divided, config, simulated)
    assert [y for _, y in values_of(tmp_path / "run")["train_loss"]] == pytest.approx(losses, rel=1e-6)


# -- skipped steps, resuming -------------------------------------------------------------------------------------------


def overflowing(config: dict[str, Any], simulated: bool) -> list[tuple[float, int]]:
    """The second step overflows. Returns the loss scale and the skipped steps after each."""
    found = []
    with simulated_device() if simulated else nullcontext():
        engine = zerorun.initialize(CASE.build(), config)
        for step in range(4):
            loss = CASE.loss(engine, Place(dist.get_rank(), step))
            engine.backward(loss * 1e30 if step == 1 else loss)
            engine.step()
            found.append((engine.loss_scale, engine.skipped_steps))
        engine.destroy()
    return found


@pytest.mark.parametrize("simulated", (False, True))
def test_skipped_steps(simulated: bool, tmp_path: Path) -> None:
    config = make_config(2, precision="fp16", scheduler=WARMUP, **written(tmp_path))
    config["fp16"] |= {"hysteresis": 1, "loss_scale_window": 2}
    (wanted, _) = run_ranks(2, overflowing, config, simulated)
    found = values_of(tmp_path / "run")
    assert [y for _, y in found["loss_scale"]] == [scale for scale, _ in wanted] == [256, 128, 128, 256]
    assert [y for _, y in found["skipped_steps"]] == [skipped for _, skipped in wanted] == [0, 1, 1, 1]
    assert [x for x, _ in found["grad_norm"]] == [4, 12, 16]
    rates = [y for _, y in found["lr"]]
    assert rates[0] == rates[1] < rates[2]  # the schedule has waited


def resumed(config: dict[str, Any], folder: str) -> None:
    for part in range(2):
        engine = make_engine(CASE, config)
        if part:
            engine.load_checkpoint(folder)
        for step in range(2 * part, 2 * part + 2):
            engine.backward(CASE.loss(engine, Place(dist.get_rank(), step)))
            engine.step()
        engine.save_checkpoint(folder)
        engine.destroy()


def test_a_resumed_run_goes_on_with_its_samples(tmp_path: Path) -> None:
    run_ranks(2, resumed, make_config(1, **written(tmp_path)), str(tmp_path / "saved"))
    losses = values_of(tmp_path / "run")["train_loss"]
    wanted = train_reference(CASE, world_size=2, steps=4)
    assert [x for x, _ in losses] == [4, 8, 12, 16]
    assert [y for _, y in losses] == pytest.approx(wanted.losses, rel=1e-6)


# -- what it costs, and says -------------------------------------------------------------------------------------------


def test_nobody_waits_for_the_device(tmp_path: Path) -> None:
    with mirrored(0, 8), simulated_device(), looking_for_races() as seen:
        engine = zerorun.initialize(CASE.build(), make_config(2, **written(tmp_path, steps_per_print=1)))
        for step in range(4):
            if step == 3:
                seen.begin_step()
            engine.backward(CASE.loss(engine, Place(0, step)))
            engine.step()
        assert not seen.host_waits
        engine.destroy()
    assert len(values_of(tmp_path / "run")["train_loss"]) == 4


def told(config: dict[str, Any], prefix: str = "step ") -> list[str]:
    """The lines of the log that begin so."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    setup_logging()  # which leaves a logger with handlers alone
    logging.getLogger("zerorun").addHandler(handler)
    try:
        train(config, "mean", False)
    finally:
        logging.getLogger("zerorun").removeHandler(handler)
    return [line for line in records if line.startswith(prefix)]


def speaker() -> tuple[int, bool, str]:
    """Of a rank whose group the script has made, without a launcher's RANK."""
    record = logging.LogRecord("zerorun", logging.INFO, __file__, 1, "text", None, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK")
        return own_rank(), is_rank_zero(), _RankFormatter("%(rank)s %(message)s").format(record)


def test_one_rank_speaks_in_a_group_of_the_scripts_own() -> None:
    assert run_ranks(2, speaker) == [(0, True, "0 text"), (1, False, "1 text")]


def test_lines_of_progress() -> None:
    config = make_config(1, accumulation=ACCUMULATION, precision="fp16", scheduler=WARMUP, steps_per_print=2)
    lines, others = run_ranks(2, told, config)
    assert (len(lines), others) == (1, [])
    pattern = (
        r"step 2 of 9, loss \d\.\d+, norm \d\.\d+, lr 3\.000e-03, loss scale 256, skipped 0, [\d.,]+ samples/s, "
        r"[\d,]+ tokens/s, at most [\d.]+ [MG]iB, \d+:\d\d:\d\d left"
    )
    assert re.fullmatch(pattern, lines[0]), lines[0]


def without_library(config: dict[str, Any]) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "find_spec", lambda name: None)
        return attempt(lambda: zerorun.initialize(CASE.build(), config))


def test_a_missing_library_is_one_error() -> None:
    config = make_config(1, tensorboard={"enabled": True}, comet={"enabled": True}, csv_monitor={"enabled": True})
    for kind, text in run_ranks(2, without_library, config):
        assert kind == "ConfigError"
        assert "2 problems" in text
        assert "tensorboard.enabled" in text and "pip install tensorboard" in text and "pip install comet-ml" in text


def train_with_a_slow_rank(config: dict[str, Any]) -> None:
    """The supervisor says that rank 3 takes 1.5 times as long."""
    page = mmap.mmap(-1, PAGE)
    board.go_on_at(page)
    show_slow(page, 3, 1500)
    try:
        train(config, "mean", False)
    finally:
        board.go_on_at(bytearray(PAGE))


def test_a_slow_rank_is_in_the_monitors(tmp_path: Path) -> None:
    run_ranks(1, train_with_a_slow_rank, make_config(0, accumulation=ACCUMULATION, **written(tmp_path)))
    found = values_of(tmp_path / "run")
    assert [y for _, y in found["slow_rank"]] == [3] * STEPS and [y for _, y in found["slow_rank_ratio"]] == [1.5] * STEPS
