"""Checkpoints: every one loads at every stage and world size, and training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import Case, Gpt, Mlp, Place, token_loss, tokens
from training import make_config, make_engine

import zerorun
from zerorun.zero.access import safe_get_full_fp32_param, safe_get_full_optimizer_state

GLOBAL_BATCH = 12  # pairs of samples in a step, over all ranks
BEFORE, AFTER = 3, 5
STAGES, WORLDS = (0, 1, 2, 3), (1, 2, 3, 4)
SMALL = Case("mlp", lambda: Gpt(3, Mlp, tied=True))

Losses = list[float]
State = dict[str, dict[str, torch.Tensor]]


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


def full_state(engine: zerorun.Engine) -> State:
    """Masters and moments by parameter."""
    found: State = {}
    for name, param in engine.module.named_parameters():
        values = {"master": safe_get_full_fp32_param(param)}
        values |= {key: safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")}
        found[name] = {key: value for key, value in values.items() if value is not None}
    return found


def config_for(stage: int, precision: str = "fp32", **changes: Any) -> dict[str, Any]:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 3e-3}}
    return make_config(stage, clip=1.0, precision=precision, scheduler=scheduler, **changes)


def save_everywhere(folder: str, precision: str) -> dict[int, tuple[Losses, State]]:
    """For each stage: train, save, and go on without interruption."""
    results = {}
    for stage in STAGES:
        engine = make_engine(SMALL, config_for(stage, precision))
        steps(engine, 0, BEFORE)
        engine.save_checkpoint(Path(folder) / f"{stage}-{dist.get_world_size()}")
        results[stage] = steps(engine, BEFORE, BEFORE + AFTER), full_state(engine)
        engine.destroy()
    return results


def load_everywhere(folder: str, precision: str) -> dict[tuple[int, int, int], tuple[Losses, State]]:
    results = {}
    for saved_stage in STAGES:
        for saved_world in WORLDS:
            for stage in STAGES:
                torch.manual_seed(1000)  # other weights than those saved
                engine = make_engine(SMALL, config_for(stage, precision))
                path, _ = engine.load_checkpoint(Path(folder) / f"{saved_stage}-{saved_world}")
                assert path is not None
                assert engine.global_steps == BEFORE
                losses = steps(engine, BEFORE, BEFORE + AFTER)
                results[saved_stage, saved_world, stage] = losses, full_state(engine)
                engine.destroy()
    return results


def assert_close(found: State, expected: State, where: object) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].keys() == values.keys(), (where, name)
        for key, value in values.items():
            scale = float(value.abs().max()) or 1.0
            assert float((found[name][key] - value).abs().max()) <= 1e-6 * scale, (where, name, key)


def test_every_checkpoint_loads_at_every_stage_and_world_size(tmp_path: Path) -> None:
    """Issue: the next 5 losses equal the uninterrupted run to 1e-6, moments elementwise."""
    saved = {world: run_ranks(world, save_everywhere, str(tmp_path), "fp32", timeout_s=300)[0] for world in WORLDS}
    for world in WORLDS:
        loaded = run_ranks(world, load_everywhere, str(tmp_path), "fp32", timeout_s=300)[0]
        for (saved_stage, saved_world, stage), (losses, state) in loaded.items():
            expected, moments = saved[saved_world][saved_stage]
            assert losses == pytest.approx(expected, rel=1e-6), (saved_stage, saved_world, stage, world)
            assert_close(state, moments, (saved_stage, saved_world, stage, world))

