"""Jobs that go on from copies in memory, whatever is killed. The 250 kills at random: python tests/cluster/kills.py."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from jobs import assert_nothing_left
from kills import KilledJob, assert_nothing_has_happened, kill_at_random, left_in_memory, uninterrupted
from testbed import Cluster, wait_for


def finish(cluster: Cluster, job: KilledJob, folder: Path) -> None:
    """The job has repeated one finished step at most for each start, and its result is that of one without kills."""
    notes = job.finish()
    assert max(notes.repeated) <= 1, notes.repeated
    wait_for(lambda: not left_in_memory(cluster), 10, "keepers leave nothing")
    assert_nothing_left(cluster, 0.5)
    assert_nothing_has_happened(notes, uninterrupted(folder, job.ranks, notes.step))


@pytest.mark.nightly  # by day: ranks/test_memory_copies.py, and unit/test_told_restarts.py for the launcher
def test_a_worker_that_is_killed_costs_one_step(cluster: Cluster, tmp_path: Path) -> None:
    """On one host. Partners on other hosts are in tests/ranks."""
    job = KilledJob(cluster, tmp_path, hosts=1, slow=0.02)
    job.wait_for_step(4)
    (keeper,) = job.processes("keeper", cluster[0])
    assert os.readlink(f"/proc/{keeper}/cwd").startswith("/dev/shm/zerorun-keeper-")  # so the folder is seen to be in use
    assert job.strike("keeper", cluster[0]) and job.strike("worker", cluster[0])
    job.wait_for_step(job.notes.step + 2)
    assert len(job.notes.begins) == 2
    finish(cluster, job, tmp_path / "whole")


@pytest.mark.nightly
def test_a_silent_host_and_a_worker_cost_one_step_each(cluster: Cluster, tmp_path: Path) -> None:
    """The host's ranks go to the one in reserve, which has nothing: all that they had comes from the host after it."""
    job = KilledJob(cluster, tmp_path, hosts=4)
    job.wait_for_step(4)
    assert job.strike("silence", cluster[1])
    job.wait_for_step(job.notes.step + 4)
    assert job.strike("keeper", cluster[2]) and job.strike("worker", cluster[2])
    job.wait_for_step(job.notes.step + 3)
    assert len(job.notes.begins) == 3
    finish(cluster, job, tmp_path / "whole")


@pytest.mark.nightly
@pytest.mark.parametrize("hosts", (3, 6, 9))
def test_kills_at_random(cluster: Cluster, tmp_path: Path, hosts: int) -> None:
    job = KilledJob(cluster, tmp_path, hosts)
    kill_at_random(job, 10, random.Random(hosts))
    finish(cluster, job, tmp_path / "whole")
