"""Checkpoints: every one loads at every stage and world size, and training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import Row, by_day, covering
from harness import run_ranks
from models import Case, Gpt, Mlp, Place, token_loss, tokens
from training import make_config, make_engine

import zerorun

GLOBAL_BATCH = 12  # pairs of samples in a step, over all ranks
BEFORE, AFTER = 3, 5
STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)
SMALL = Case("mlp", lambda: Gpt(3, Mlp, tied=True))

Losses = list[float]
State = dict[tuple[str, str, int], torch.Tensor]


def steps(engine: zerorun.Engine, begin: int, end: int) -> Losses:
    """Global mean losses of steps ``begin .. end`` of a run whose samples do not depend on the number of ranks."""
    losses = []
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(begin, end):
        ids = torch.cat([tokens(Place(0, step, index)) for index in range(rank, GLOBAL_BATCH, size)])
        loss = token_loss(engine, ids)
        engine.backward(loss)
        engine.step()
        found: list[Any] = [None] * size
        dist.all_gather_object(found, loss.item())
        losses.append(sum(found) / size)
    return losses


def held(engine: zerorun.Engine) -> State:
    """The masters and moments that this rank holds: (set, name, first element) -> elements."""
    inventory = engine.checkpointer.inventory
    parts = [*inventory.weights(), *inventory.optimizer_state()[0]]
    return {(part.set, part.name, part.start): part.tensor.clone() for part in parts}


def config_for(stage: int) -> dict[str, Any]:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 3e-3}}
    return make_config(stage, clip=1.0, scheduler=scheduler)


def save_each(folder: str, stages: list[int]) -> dict[int, tuple[Losses, State]]:
    """For each stage: train, save, and go on without interruption."""
    results = {}
    for stage in stages:
        engine = make_engine(SMALL, config_for(stage))
        steps(engine, 0, BEFORE)
        engine.save_checkpoint(Path(folder) / f"{stage}-{dist.get_world_size()}")
        results[stage] = steps(engine, BEFORE, BEFORE + AFTER), held(engine)
        engine.destroy()
    return results


def load_all(folder: str, rows: list[Row]) -> list[tuple[Losses, State]]:
    results = []
    for row in rows:
        torch.manual_seed(1000)  # other weights than those saved
        engine = make_engine(SMALL, config_for(row["stage"]))
        path, _ = engine.load_checkpoint(Path(folder) / f"{row['saved stage']}-{row['saved world']}")
        assert path is not None
        assert engine.global_steps == BEFORE
        losses = steps(engine, BEFORE, BEFORE + AFTER)
        results.append((losses, held(engine)))
        engine.destroy()
    return results


def assert_close(found: State, expected: State, where: object) -> None:
    """``expected`` has whole tensors, as one rank at stage 0 holds them."""
    for (kind, name, start), part in found.items():
        whole = expected[kind, name, 0].view(-1)
        scale = float(whole.abs().max()) or 1.0
        assert float((part - whole[start : start + part.numel()]).abs().max()) <= 1e-6 * scale, (where, kind, name)


@pytest.mark.parametrize("strength", by_day((1, 2, 4), 1))
def test_every_checkpoint_loads_at_every_stage_and_world_size(strength: int, tmp_path: Path) -> None:
    """The next 5 losses equal the uninterrupted run to 1e-6, moments elementwise."""
    every = covering({"saved stage": STAGES, "saved world": WORLDS, "stage": STAGES, "world": WORLDS}, strength)
    wanted: dict[int, set[int]] = {1: {0}}  # the stages by the number of ranks; the first has the whole state
    for row in every:
        wanted.setdefault(row["saved world"], set()).add(row["saved stage"])
    saved = {
        world: run_ranks(world, save_each, str(tmp_path), sorted(stages), timeout_s=300)[0]
        for world, stages in wanted.items()
    }
    for world in WORLDS:
        rows = [row for row in every if row["world"] == world]
        for rank_results in run_ranks(world, load_all, str(tmp_path), rows, timeout_s=300):
            for row, (losses, state) in zip(rows, rank_results, strict=True):
                assert losses == pytest.approx(saved[row["saved world"]][row["saved stage"]][0], rel=1e-6), row
                assert_close(state, saved[1][0][1], row)
