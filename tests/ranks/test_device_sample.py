"""One step in twenty is timed on the device, and the board is told what of it was no wait."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from harness import run_ranks
from models import CASES, Place
from simulation import simulated_device
from training import make_config

import zerorun
from zerorun.watch.board import WINDOW, board

CASE = CASES["plain"]


def train(config: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return what the board is told, and the nanoseconds of each step."""
    told: list[int] = []
    steps: list[int] = []
    board.note_device = told.append  # type: ignore[method-assign]
    try:
        with simulated_device():
            engine = zerorun.initialize(CASE.build(), config)
            for step in range(WINDOW + 3):
                begun = time.monotonic_ns()
                engine.backward(CASE.loss(engine, Place(dist.get_rank(), step, 0)))
                engine.step()
                steps.append(time.monotonic_ns() - begun)
            engine.destroy()
            assert engine.comm.statistics.watch is None
    finally:
        del board.note_device  # type: ignore[method-assign]
    return told, steps


def test_a_step_of_a_window_is_timed() -> None:
    for told, steps in run_ranks(2, train, make_config(2)):
        assert told[0] == -1 and len(told) == 3, "after the first step of each window"
        assert 0 < told[1] < steps[1] and 0 < told[2] < steps[WINDOW + 1]
