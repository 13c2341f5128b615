"""A run that is killed and started again from its checkpoint is, bit for bit, the run that was never interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import patience
from resume_job import SAVED_AT

JOB = Path(__file__).with_name("resume_job.py")


def launch(world: int, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc-per-node", str(world), str(JOB), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300 * patience(), check=False)


AT_NIGHT = [pytest.param(world, "at night", marks=pytest.mark.nightly) for world in (1, 2, 3, 4)]


@pytest.mark.parametrize(("world", "cells"), [(2, "by day"), *AT_NIGHT])
def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(world: int, cells: str, tmp_path: Path) -> None:
    """Weights, masters, moments, losses, rates, loss scale, norms, random numbers, sample ids; 5 or 12 configurations."""
    whole = launch(world, "whole", str(tmp_path), cells)
    assert whole.returncode == 0, whole.stderr[-3000:]
    first = launch(world, "first", str(tmp_path), cells)
    assert "SIGKILL" in first.stderr, first.stderr[-3000:]
    second = launch(world, "second", str(tmp_path), cells)
    assert second.returncode == 0, second.stderr[-3000:]
    for rank in range(world):
        expected = torch.load(tmp_path / f"whole-{rank}.pt", weights_only=False)
        found = torch.load(tmp_path / f"second-{rank}.pt", weights_only=False)
        for key, (record, state) in expected.items():
            assert repr(found[key][0]) == repr(record[SAVED_AT:]), (rank, key)  # repr: a norm may be NaN
            assert found[key][1].keys() == state.keys(), (rank, key)
            for name, value in state.items():
                assert torch.equal(found[key][1][name], value), (rank, key, name)
