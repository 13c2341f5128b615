"""A run that is killed and started again from its checkpoint is, bit for bit, the run that was never interrupted."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from harness import patience, start_ranks
from resume_job import SAVED_AT

JOB = Path(__file__).with_name("resume_job.py")


def run(world: int, mode: str, folder: Path, cells: str, code: int = 0) -> None:
    """The job on ``world`` ranks, all of which must end with ``code``."""
    with start_ranks(world, JOB.read_text(), mode, str(folder), cells) as scripts:
        for script in scripts:
            found, _, errors = script.finish(300 * patience())
            assert found == code, errors[-3000:]


AT_NIGHT = [pytest.param(world, "at night", marks=pytest.mark.nightly) for world in (1, 2, 3, 4)]


@pytest.mark.parametrize(("world", "cells"), [(2, "by day"), *AT_NIGHT])
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(world: int, cells: str, tmp_path: Path) -> None:
    """Weights, masters, moments, losses, rates, loss scale, norms, random numbers, sample ids; 3 or 12 configurations."""
    run(world, "whole", tmp_path, cells)
    run(world, "first", tmp_path, cells, code=-signal.SIGKILL)
    run(world, "second", tmp_path, cells)
    for rank in range(world):
        expected = torch.load(tmp_path / f"whole-{rank}.pt", weights_only=False)
        found = torch.load(tmp_path / f"second-{rank}.pt", weights_only=False)
        for key, (record, state) in expected.items():
            assert repr(found[key][0]) == repr(record[SAVED_AT:]), (rank, key)  # repr: a norm may be NaN
            assert found[key][1].keys() == state.keys(), (rank, key)
            for name, value in state.items():
                assert torch.equal(found[key][1][name], value), (rank, key, name)
