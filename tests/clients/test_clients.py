"""Trainers that know DeepSpeed, in every cell: losses, norms and weights are those of DDP.

One pair of ranks runs all cells of a client, one after the other (see cells.py); the tests read what it found. All of it
is for the night; by day, Trainer's is one of the cells that test_mode.py's ranks run.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from harness import patience

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent
STAGES = (0, 1, 2, 3)
# In 16 bits DDP computes in another way: autocast with fp32 weights. TRL lets adapters of quantised models be bf16, and the
# engine computes with what fp32 masters make of them.
TOLERANCES = {"bf16": 0.05, "SFT, bf16": 0.06, "fp16": 1e-3, "SFT, QLoRA": 2e-3, "SFT, LLM.int8": 2e-3}
EXACT = 1e-6
TRAINER = (
    "plain", "accumulation", "checkpointing", "lora", "generate", "resume", "best", "save", "bf16", "fp16",
    "optimizer in the file", "offloaded optimizer", "offloaded parameters", "by day", "experts",
    "sequences",
)  # fmt: skip
ACCELERATE = (
    "plain", "accumulation", "checkpointing", "lora", "clipping", "evaluation", "resume", "bf16", "fp16",
    "dummy optimizer", "schedule", "state dict", "offload",
)  # fmt: skip
LOWEST_STAGE = {"offload": 1, "offloaded optimizer": 1, "offloaded parameters": 3}
VARIANTS = ("accumulation", "checkpointing", "LoRA", "generate", "resume", "bf16", "fp16", "offload")
TRL = {
    "SFT": ("SFT", *(f"SFT, {variant}" for variant in (*VARIANTS, "QLoRA", "LLM.int8"))),
    "DPO": ("DPO", *(f"DPO, {variant}" for variant in VARIANTS)),
    "GRPO": ("GRPO", *(f"GRPO, {variant}" for variant in (*VARIANTS, "reference"))),
}
LIGHTNING = (
    "plain", "accumulation", "clipping", "validation", "checkpoint", "weights only", "bf16", "offload", "manual",
    "dropped", "checkpointing", "lora", "evaluation", "interrupted",
)  # fmt: skip


@cache
def found_by(program: str, *cells: str, ranks: int = 2) -> dict[str, Any]:
    """Cell and stage -> what the ranks of the program found there, in all its cells or in these."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        mode = ["--as-deepspeed"] if program in ("trainer", "accelerate", "trl") else []
        launcher = ["-m", "zerorun.launcher.cli", *mode, "--nproc-per-node", str(ranks)] if program != "mode" else []
        command = [sys.executable, *launcher, str(HERE / f"{program}_job.py"), str(out), *cells]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300 * patience())
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def rows(cells: tuple[str, ...]) -> Any:
    """Each cell at each stage, but for stages that have nothing to be offloaded."""
    found = [(cell, stage) for cell in cells for stage in STAGES if stage >= LOWEST_STAGE.get(cell.rpartition(", ")[2], 0)]
    return pytest.mark.parametrize(("cell", "stage"), found)


def compare(found: dict[str, Any], cell: str, stage: int) -> None:
    """Raise AssertionError unless all that was found in the cell is, within its tolerance, what DDP has there."""
    result = found[f"{cell}, stage {stage}"]
    alike = (
        cell,
        cell.partition(", ")[0],
        "plain",
    )  # the plain cell where DDP cannot, as in fp16 on CPUs
    wanted = next((found[f"{other}, DDP"] for other in alike if f"{other}, DDP" in found), None)
    assert "error" not in result, result["error"]
    assert wanted is not None and "error" not in wanted, wanted
    tolerance = TOLERANCES.get(cell, TOLERANCES.get(cell.rpartition(", ")[2], EXACT))
    for what, value in result.items():
        assert distance(value, wanted[what]) <= tolerance, (what, value, wanted[what])


def distance(one: Any, other: Any) -> float:
    """The largest difference between numbers in nested lists."""
    if isinstance(one, list):
        assert len(one) == len(other)
        return max(map(distance, one, other), default=0.0)
    return abs(one - other) if isinstance(one, (int, float)) else 0.0 if one == other else float("inf")


@rows(TRAINER)
def test_trainer(cell: str, stage: int) -> None:
    """transformers' Trainer, by its argument ``deepspeed``."""
    compare(found_by("trainer"), cell, stage)


@rows(ACCELERATE)
def test_accelerate(cell: str, stage: int) -> None:
    """A loop with an Accelerator that has a DeepSpeedPlugin."""
    compare(found_by("accelerate"), cell, stage)


@rows(tuple(cell for cells in TRL.values() for cell in cells))
def test_trl(cell: str, stage: int) -> None:
    """TRL's trainers, by their argument ``deepspeed``."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("needs TRL: pip install -e '.[clients]'")
    compare(found_by("trl", *TRL[cell.partition(", ")[0]]), cell, stage)


@rows(LIGHTNING)
def test_lightning(cell: str, stage: int) -> None:
    """Lightning's Trainer with ZerorunStrategy, against DDPStrategy."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs Lightning: pip install -e '.[clients]'")
    compare(found_by("lightning"), cell, stage)


def test_what_lightning_asks_and_the_engine_does_not_is_refused() -> None:
    """Clipping by value became clipping by norm, a hook's clipping nothing, and the file's accumulation was overwritten."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs Lightning: pip install -e '.[clients]'")
    said = found_by("lightning", "refused")["refused, stage 1"]
    assert "error" not in said, said["error"]
    for case, words in {
        "by value": ("ConfigError", 'write "norm"'),
        "own hook": ("StepError", "gradient_clip_val=0.2", "does not clip", "Trainer(gradient_clip_val=...)"),
        "by hand": ("StepError", "this one does not clip", 'Remedy: say the norm as "gradient_clipping" in the file'),
        "no optimizer": ("ConfigError", "configure_optimizers = null: fit() needs an optimizer", "Remedy: Return one, or"),
        "own hook, by value": ("StepError", "'value'", "clips to the norm 0.2"),
        "own hook, as in the file": ("float32 clips to 0.2",),
        "accumulation": (
            "ConfigError",
            "gradient_accumulation_steps = 4",
            "accumulate_grad_batches=1",
            "=4 to the Trainer",
        ),
        "saves between": ("float32 clips to 0.0",),
        "batch": ("ConfigError", "train_batch_size = 8", "accumulate_grad_batches=3", "2 data-parallel ranks of 2 samples"),
        "no such batch": ("ConfigError", "train_batch_size = 9", "accumulate_grad_batches=1"),
        "resuming": ("ConfigError", "checkpoint.auto_resume = true", "checkpoint.in_memory.every_steps = 2", "ckpt_path"),
        "same": ("float32 clips to 0.0",),
        "auto": ("float32 clips to 0.0",),
        "auto, bf16": ("bfloat16 clips to 0.5",),
    }.items():
        assert all(word in said[case] for word in words), (case, said[case])
