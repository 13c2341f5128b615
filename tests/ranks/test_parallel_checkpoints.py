"""Checkpoints saved at one (tensor, pipe, data, stage) load at any other, and exports are the whole model's weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from test_parallel_matrix import MODELS, batch_of, build, one_step
from training import make_config, merged

import zerorun

# tensor, pipe, data, stage
CELLS = (
    (1, 1, 1, 0),
    (2, 1, 1, 1),
    (1, 2, 1, 2),
    (1, 3, 1, 0),
    (2, 2, 1, 3),
    (2, 1, 2, 3),
    (1, 2, 2, 3),
    (2, 3, 1, 1),
    (1, 1, 4, 3),
    (4, 1, 1, 2),
    (2, 2, 2, 2),
    (1, 1, 2, 1),
)


def engine_of(name: str, cell: tuple[int, ...], accumulation: int) -> Any:
    tensor, pipe, _, stage = cell
    degrees = {"tensor_parallel": {"size": tensor}, "pipeline": {"stages": pipe}}
    return zerorun.initialize(build(name), merged(make_config(stage, accumulation=accumulation, clip=0.5), degrees))


def steps(engine: Any, begin: int, count: int, pipe: int) -> list[float]:
    """The same 4 micro-batches of every step, however many ranks share them."""
    accumulation, rank = engine.gradient_accumulation_steps(), engine.topology.data_parallel_rank
    data = (
        batch_of(step, rank * accumulation + micro, 0)
        for step, micro in itertools.product(range(begin, begin + count), range(accumulation))
    )
    return [one_step(engine, data, accumulation, pipe) for _ in range(count)]


def save(name: str, cell: tuple[int, ...], folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train for 2 steps, save and export, and go on for 2 more."""
    engine = engine_of(name, cell, 4 // cell[2])
    steps(engine, 0, 2, cell[1])
    engine.save_checkpoint(folder, "here")
    engine.export(Path(folder) / "exported")
    weights = engine.state_dict()
    losses = steps(engine, 2, 2, cell[1])
    engine.destroy()
    return losses, weights


def load(name: str, cell: tuple[int, ...], folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = engine_of(name, cell, 4 // cell[2])
    path, _ = engine.load_checkpoint(folder, "here")
    assert path is not None
    weights = engine.state_dict()
    losses = steps(engine, 2, 2, cell[1])
    engine.destroy()
    dist.barrier()
    return losses, weights


def ranks_of(cell: tuple[int, ...]) -> int:
    return cell[0] * cell[1] * cell[2]


@pytest.mark.nightly  # by day: test_checkpoint_parallel.py
@pytest.mark.parametrize(
    ("name", "index"),
    # Those with odd numbers load.
    by_day([(("gpt2", "llama")[index % 4 == 0], index) for index in range(0, len(CELLS), 2)], ("llama", 4), ("gpt2", 6)),
)
def test_any_cell_loads_what_another_saved(name: str, index: int, tmp_path: Path) -> None:
    check(name, index, (5,) if name == "llama" else (9,), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("index", range(len(CELLS)))
def test_every_cell_loads_what_every_other_saved(name: str, index: int, tmp_path: Path) -> None:
    check(name, index, range(1, len(CELLS)), tmp_path)


def check(name: str, index: int, shifts: Iterable[int], tmp_path: Path) -> None:
    """What cell ``index`` saves goes on alike in the cells ``shifts`` further on, and is the whole model's for others."""
    source = CELLS[index]
    (losses, weights), *others = run_ranks(ranks_of(source), save, name, source, str(tmp_path))
    for other, _ in others:
        assert other == losses
    for shift in shifts:
        target = CELLS[(index + shift) % len(CELLS)]
        for found, loaded in run_ranks(ranks_of(target), load, name, target, str(tmp_path)):
            assert found == pytest.approx(losses, rel=1e-6)
            torch.testing.assert_close(loaded, weights, rtol=0, atol=0)
    from transformers import AutoModelForCausalLM

    for saved in ("exported", "here"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / saved).state_dict()
        torch.testing.assert_close({key: again[key] for key in weights}, weights, rtol=0, atol=0)
