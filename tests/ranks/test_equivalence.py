"""Every stage, world size, accumulation, precision, unit policy and model gives the training run of plain PyTorch.

fp32: losses, gradient norms and final weights equal a single-process reference to 1e-6. bf16 and fp16: they are equal,
bit for bit, at all four stages. Combinations are chosen so that every pair of values comes at least once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import CASES
from reference import Result, differences, train_reference
from training import make_config, train

STEPS = 3
POLICIES: dict[str, dict[str, Any]] = {
    "by_block": {},
    "groups": {"unit_policy": "by_block_group", "unit_block_count": 2},
    "sized": {"unit_policy": "size_based", "unit_numel": 600},
    "block_and_size": {"unit_policy": "by_block_and_size", "unit_numel": 500},
    "classes": {},  # filled in: the case's own
}


# -- choosing combinations ---------------------------------------------------------------------------------------


def pairwise(values: Mapping[str, Sequence[Any]], first: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Rows that contain every pair of values of two keys, those of ``first`` among them. Greedy and deterministic."""
    keys = list(values)
    missing = {
        ((a, x), (b, y)): None for a, b in combinations(keys, 2) for x, y in product(values[a], values[b])
    }  # a dict as an ordered set
    rows = list(first)
    for row in rows:
        for pair in combinations(((key, row[key]) for key in keys), 2):
            missing.pop(pair, None)
    while missing:
        row = dict(next(iter(missing)))
        for key in keys:
            if key not in row:
                row[key] = max(values[key], key=lambda value: _gain(key, value, row, missing))
        for pair in combinations(((key, row[key]) for key in keys), 2):
            missing.pop(pair, None)
        rows.append({key: row[key] for key in keys})
    return rows


def _gain(key: str, value: Any, row: dict[str, Any], missing: Mapping[Any, None]) -> int:
    """How many pairs that are still missing ``value`` would add to ``row``."""
    added = (key, value)
    return sum((other, added) in missing or (added, other) in missing for other in row.items())


def by_world(rows: list[dict[str, Any]]) -> list[Any]:
    """Parameters in the order of world sizes, so that one pool of workers serves them all."""
    rows = sorted(rows, key=lambda row: row["world"])
    return [pytest.param(row, id="-".join(f"{value}" for value in row.values())) for row in rows]


# Every model at stage 3 with 2 and 3 ranks, in settings that differ from row to row.
EVERY_MODEL = [
    {
        "world": world,
        "model": model,
        "stage": 3,
        "policy": tuple(POLICIES)[(number + 2 * world) % len(POLICIES)],
        "accumulation": (1, 3)[(number + world) // 2 % 2],
        "clip": (0.5, 0.0)[number // 3 % 2],
        "optimizer": ("AdamW", "SGD")[number % 2],
    }
    for world in (2, 3)
    for number, model in enumerate(CASES)
]
FP32_ROWS = pairwise(
    {
        "world": (1, 2, 3, 4),
        "model": tuple(CASES),
        "stage": (2, 1, 0, 3),
        "policy": tuple(POLICIES),
        "accumulation": (1, 3),
        "clip": (0.0, 0.5),
        "optimizer": ("AdamW", "SGD"),
    },
    first=EVERY_MODEL,
)
LOW_ROWS = pairwise(
    {
        "world": (2, 3),
        "model": tuple(CASES),
        "precision": ("bf16", "fp16"),
        "policy": ("by_block", "classes"),
        "accumulation": (1, 3),
        "clip": (0.0, 0.5),
    }
)
LOW_ROWS += [{**row, "world": world} for world, first in ((4, 0), (1, 1)) for row in LOW_ROWS[first::8]]


def test_pairwise_covers_every_pair() -> None:
    values = {"a": (1, 2, 3), "b": "xyz", "c": (True, False), "d": range(4)}
    rows = pairwise(values)
    for first, second in combinations(values, 2):
        found = {(row[first], row[second]) for row in rows}
        assert found == set(product(values[first], values[second]))
    assert len(rows) < 3 * 4 + 6
    assert rows == pairwise(values)


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


@pytest.mark.parametrize("row", by_world(FP32_ROWS))
def test_fp32_equals_plain_pytorch(row: dict[str, Any]) -> None:
    results = run_ranks(row["world"], train_case, row["model"], settings(row, row["stage"]))
    wanted = reference(row["model"], row["world"], row["accumulation"], row["clip"], row["optimizer"])
    for rank, result in enumerate(results):
        assert not differences(result, wanted), f"rank {rank}"
        assert_identical(result, results[0], f"rank {rank} and rank 0")


@pytest.mark.parametrize("row", by_world(LOW_ROWS))
def test_low_precision_is_the_same_at_all_stages(row: dict[str, Any]) -> None:
    by_rank = run_ranks(row["world"], train_stages, row["model"], [settings(row, stage) for stage in range(4)])
    first = by_rank[0][0]
    for rank, results in enumerate(by_rank):
        for stage, result in enumerate(results):
            assert_identical(result, first, f"stage {stage} on rank {rank} and stage 0 on rank 0")
    wanted = reference(row["model"], row["world"], row["accumulation"], row["clip"], "AdamW")
    assert first.losses == pytest.approx(wanted.losses, rel=0.03)
    assert first.norms == pytest.approx(wanted.norms, rel=0.1)


def assert_identical(found: Result, wanted: Result, what: str) -> None:
    assert found.losses == wanted.losses, f"losses differ between {what}"
    assert found.norms == wanted.norms, f"gradient norms differ between {what}"
    assert found.weights.keys() == wanted.weights.keys()
    unequal = [name for name, value in found.weights.items() if not torch.equal(value, wanted.weights[name])]
    assert not unequal, f"weights differ between {what}: {unequal}"
