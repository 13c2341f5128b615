"""The command zerorun verify, as a user starts it: its output, its exit status, and how long models of each sort take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import TESTS, patience
from training import merged
from verified import config, tensor

pytestmark = pytest.mark.nightly  # each starts a launcher and ranks
SECONDS = 60
TASKS = """
import sys
sys.path[:0] = [{tests!r}, {examples!r}]
import torch
import torch.distributed as dist
from torch import Tensor
from train_gpt import GPT, next_byte_loss
from verified import layers, lora, mixtral

def gpt():
    generator = torch.Generator().manual_seed(1)
    pairs = [tuple(torch.randint(256, (2, 32), generator=generator) for _ in range(2)) for _ in range(12)]
    return GPT(2, 32, 4, 32), pairs, lambda model, batch: next_byte_loss(model(batch[0]), batch[1])

def breaks():
    return {{}}["weights"]

def leaves():
    sys.exit(0)

def leaves_in_the_loss():
    model, pairs, _ = gpt()
    return model, pairs, lambda model, batch: sys.exit(0)

def apart():
    model, pairs, loss = gpt()
    return model, pairs, lambda model, batch: loss(model, batch) * (1 + 0.001 * dist.get_rank())
"""


def command(folder: Path, task: str, raw: dict[str, Any], *more: str) -> tuple[int, str, str, float]:
    """Run it on two ranks, and return (exit status, stdout, stderr, seconds)."""
    texts = {"tests": str(TESTS), "examples": str(TESTS.parent / "examples")}
    (folder / "verified_tasks.py").write_text(TASKS.format(**texts))
    (folder / "ds.json").write_text(json.dumps(raw))
    words = ["--nproc-per-node", "2", "verify", f"verified_tasks:{task}", "--config", "ds.json", *more]
    environment = {**os.environ, "ZERORUN_DEVICE": "cpu", "PYTHONPATH": str(TESTS.parent)}
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "zerorun.launcher.cli", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS * 5 * patience(),
    )
    return ended.returncode, ended.stdout, ended.stderr, time.monotonic() - began


def test_a_difference_is_told_and_is_an_exit_status(tmp_path: Path) -> None:
    status, out, err, _ = command(tmp_path, "apart", config(3), "--steps", "1")
    assert status == 1, err
    assert "NOT EQUAL, first at step 1 of 1, micro-batch 1\n  point    loss: loss\n  rank     1 (shard 1)" in out
    assert "failed first" not in err, "a verdict was told as a crash"


@pytest.mark.parametrize(
    ("task", "raw"),
    [
        ("gpt", merged(config(3), {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})),
        ("lora", config(3)),
        ("mixtral", config(1, **tensor())),
        ("layers", config(1, 2)),
    ],
)
def test_each_sort_of_model_is_verified_within_a_minute(tmp_path: Path, task: str, raw: dict[str, Any]) -> None:
    status, out, err, seconds = command(tmp_path, task, raw)
    assert status == 0, out + err
    assert out.splitlines()[-1].startswith("zerorun verify: equal: 3 steps on 2 ranks"), out
    print(f"{task}: {seconds:.1f} s")
    assert seconds < SECONDS * patience()


def test_fewer_blocks_are_said(tmp_path: Path) -> None:
    status, out, err, _ = command(tmp_path, "lora", config(2), "--blocks", "1")
    assert status == 0, out + err
    assert "equal, with 1 blocks (2 left out)" in out


@pytest.mark.parametrize(
    ("function", "more", "told"),
    [
        ("TASKS", {}, "Remedy"),
        ("breaks", {}, "the function to be verified raised KeyError: 'weights'"),
        ("leaves", {}, "the function to be verified raised SystemExit: 0"),
        ("leaves_in_the_loss", {}, "the model or the loss raised SystemExit: 0"),
        ("gpt", {"communication_data_type": "bf16"}, "ranks compute with rounded values"),
    ],
)
def test_what_cannot_be_verified_is_refused(tmp_path: Path, function: str, more: dict[str, Any], told: str) -> None:
    status, _, err, _ = command(tmp_path, function, {**config(0), **more})
    assert status == 2
    assert told in err
    assert "failed first" not in err
