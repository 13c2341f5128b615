"""Every stage, world size, accumulation, precision, unit policy and model gives the training run of plain PyTorch.

fp32: losses, gradient norms and final weights equal a single-process reference to 1e-6. bf16 and fp16: they are equal,
bit for bit, at all four stages. Which combinations come, and which only nightly: below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import cycle, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import Row, covering
from harness import device, run_ranks
from models import CASES
from reference import Result, differences, train_reference
from training import make_config, train

from zerorun.ops import native, single_pass

STEPS = 2
POLICIES: dict[str, dict[str, Any]] = {
    "by_block": {},
    "groups": {"unit_policy": "by_block_group", "unit_block_count": 2},
    "sized": {"unit_policy": "size_based", "unit_numel": 600},
    "block_and_size": {"unit_policy": "by_block_and_size", "unit_numel": 500},
    "classes": {},  # filled in: the case's own
}


# -- choosing combinations ---------------------------------------------------------------------------------------

# Of every model one row, and every pair of settings; nightly every pair with a model. In low precision every model is at
# stage 3 and at another one.
SETTINGS: dict[str, Sequence[Any]] = {
    "world": (2, 3, 1, 4),
    "stage": (3, 2, 1, 0),
    "policy": tuple(POLICIES),
    "accumulation": (1, 3),
    "clip": (0.0, 0.5),
    "optimizer": ("AdamW", "SGD"),
}
# By day: shared and frozen parameters, those that a rank or a step leaves out, what runs twice, checkpoints of the model.
LOW_MODELS = ("plain", "tied", "frozen", "lora", "unused_on_one_rank", "unused_alternating", "moe", "repeated_apart")
LOW_MODELS += ("two_forwards", "checkpoint", "checkpoint_groups_reentrant", "two_groups")
LOW_SETTINGS: dict[str, Sequence[Any]] = {
    "world": (2, 3),
    "precision": ("bf16", "fp16"),
    "policy": ("by_block", "classes"),
    "accumulation": (1, 3),
    "clip": (0.0, 0.5),
}


def dealt(rows: Iterable[Row]) -> list[Row]:
    """``rows`` with a model each, in turn; each row and each model comes at least once."""
    rows = list(rows)
    return [{"model": model, **row} for row, model in zip(cycle(rows), islice(cycle(CASES), max(len(rows), len(CASES))))]


def by_world(kept: list[Row], nightly: Sequence[Row] = ()) -> list[Any]:
    """Parameters in the order of world sizes, so that one pool of workers serves them all."""
    marked = [(row, ()) for row in kept] + [(row, pytest.mark.nightly) for row in nightly if row not in kept]
    marked.sort(key=lambda pair: pair[0]["world"])
    return [pytest.param(row, marks=marks, id="-".join(f"{value}" for value in row.values())) for row, marks in marked]


_ROWS = covering(SETTINGS)
FP32_ROWS = dealt(_ROWS)
FP32_NIGHTLY = dealt(row for row in _ROWS if row["stage"] == 3) + dealt(row for row in _ROWS if row["stage"] != 3)
FP32_NIGHTLY += [row for row in covering({"model": tuple(CASES), **SETTINGS}) if row not in FP32_NIGHTLY]
_LOW_ROWS = dealt(covering(LOW_SETTINGS))
LOW_ROWS = [{**row, "stages": (index % 3, 3)} for index, row in enumerate(_LOW_ROWS) if row["model"] in LOW_MODELS]
LOW_NIGHTLY = covering({"model": tuple(CASES), **LOW_SETTINGS})
LOW_NIGHTLY += [{**row, "world": world} for world, first in ((4, 0), (1, 1)) for row in LOW_NIGHTLY[first::8]]
LOW_NIGHTLY += [row for row in _LOW_ROWS if row not in LOW_NIGHTLY]
LOW_NIGHTLY = [{**row, "stages": (0, 1, 2, 3)} for row in LOW_NIGHTLY]


# -- running -----------------------------------------------------------------------------------------------------


def settings(row: dict[str, Any], stage: int) -> dict[str, Any]:
    policy = dict(POLICIES[row["policy"]])
    if row["policy"] == "classes":
        policy["unit_policy"] = list(CASES[row["model"]].classes)
    return make_config(
        stage,
        accumulation=row["accumulation"],
        clip=row["clip"],
        precision=row.get("precision", "fp32"),
        optimizer=row.get("optimizer", "AdamW"),
        zero_optimization=policy,
    )


@cache
def reference(model: str, world: int, accumulation: int, clip: float, optimizer: str) -> Result:
    return train_reference(
        CASES[model], world_size=world, steps=STEPS, accumulation=accumulation, clip=clip, optimizer=optimizer
    )


def train_case(model: str, config: dict[str, Any]) -> Result:
    return train(CASES[model], config, STEPS)


def train_stages(model: str, configs: list[dict[str, Any]]) -> list[Result]:
    return [train(CASES[model], config, STEPS) for config in configs]


@pytest.mark.parametrize("row", by_world(FP32_ROWS, FP32_NIGHTLY))
def test_fp32_equals_plain_pytorch(row: dict[str, Any]) -> None:
    results = run_ranks(row["world"], train_case, row["model"], settings(row, row["stage"]))
    wanted = reference(row["model"], row["world"], row["accumulation"], row["clip"], row["optimizer"])
    for rank, result in enumerate(results):
        assert not differences(result, wanted), f"rank {rank}"
        assert_identical(result, results[0], f"rank {rank} and rank 0")


@pytest.mark.parametrize("row", by_world(LOW_ROWS, LOW_NIGHTLY))
def test_low_precision_is_the_same_at_all_stages(row: dict[str, Any]) -> None:
    stages = row["stages"]
    by_rank = run_ranks(row["world"], train_stages, row["model"], [settings(row, stage) for stage in stages])
    first = by_rank[0][0]
    for rank, results in enumerate(by_rank):
        for stage, result in zip(stages, results, strict=True):
            assert_identical(result, first, f"stage {stage} on rank {rank} and stage {stages[0]} on rank 0")
    wanted = reference(row["model"], row["world"], row["accumulation"], row["clip"], "AdamW")
    assert first.losses == pytest.approx(wanted.losses, rel=0.03)
    assert first.norms == pytest.approx(wanted.norms, rel=0.1)


def assert_identical(found: Result, wanted: Result, what: str) -> None:
    """The same bits; nearly so on the simulated device, which rounds norms in another way than the host."""
    if device() != "cpu":
        assert not differences(found, wanted), what
        return
    assert found.losses == wanted.losses, f"losses differ between {what}"
    assert found.norms == wanted.norms, f"gradient norms differ between {what}"
    assert found.weights.keys() == wanted.weights.keys()
    unequal = [name for name, value in found.weights.items() if not torch.equal(value, wanted.weights[name])]
    assert not unequal, f"weights differ between {what}: {unequal}"


# -- updates that round otherwise --------------------------------------------------------------------------------


def train_without_a_library_on_rank_1(stage: int) -> Result:
    """As on a host without a compiler."""
    found = native.library
    try:
        if dist.get_rank() == 1:
            native.library = lambda: None
        return train(CASES["plain"], make_config(stage, precision="bf16", zero_optimization={"shard_degree": 2}), STEPS)
    finally:
        native.library = found
        single_pass._left_to_torch.clear()


@pytest.mark.parametrize("stage", (0, 2))
def test_replicas_stay_the_same_where_one_has_no_library(stage: int) -> None:
    """With 4 ranks, 2 of them have each shard."""
    if native.library() is None:
        pytest.skip("there is no native library here")
    results = run_ranks(4, train_without_a_library_on_rank_1, stage)
    for rank, result in enumerate(results):
        assert_identical(result, results[0], f"rank {rank} and rank 0")
