"""Offload: what lies in host memory changes nothing but where it lies."""

from __future__ import annotations

from typing import Any

import pytest
from harness import run_ranks
from models import CASES
from reference import Result
from test_equivalence import assert_identical, by_world, pairwise
from training import make_config, train

STEPS = 3
PLACES: dict[str, dict[str, Any]] = {
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "ratio 0": {"offload_optimizer": {"device": "cpu", "ratio": 0.0}},
    "ratio 0.3": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}},
    "params": {"offload_param": {"device": "cpu"}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "part of both": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "offload_param": {"device": "cpu"}},
}
ROWS = pairwise(
    {
        "world": (2, 3, 1),
        "stage": (3, 2, 1),
        "place": tuple(PLACES),
        "model": tuple(CASES),
        "accumulation": (1, 3),
        "clip": (0.0, 0.5),
        "optimizer": ("AdamW", "Lion", "Adagrad", "SGD"),
        "precision": ("fp32", "bf16", "fp16"),
    }
)


def train_placed(model: str, configs: list[dict[str, Any]]) -> list[Result]:
    return [train(CASES[model], config, STEPS) for config in configs]


@pytest.mark.parametrize("row", by_world(ROWS))
def test_offloaded_equals_resident(row: dict[str, Any]) -> None:
    place = PLACES[row["place"]]
    if "offload_param" in place and row["stage"] != 3:
        place = PLACES["optimizer"]
    configs = [
        make_config(
            row["stage"],
            accumulation=row["accumulation"],
            clip=row["clip"],
            precision=row["precision"],
            optimizer=row["optimizer"],
            zero_optimization=where,
        )
        for where in ({}, place)
    ]
    for rank, (resident, placed) in enumerate(run_ranks(row["world"], train_placed, row["model"], configs)):
        assert_identical(placed, resident, f"{row['place']} on rank {rank} and resident")
