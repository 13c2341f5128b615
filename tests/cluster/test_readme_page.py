"""The manual's page on clusters, command by command, as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import slurmbed
from harness import patience
from jobs import PRELUDE, assert_nothing_left
from testbed import ROOT, Cluster, wait_for

PAGE = (ROOT / "docs" / "clusters.md").read_text()
LINES = [line[4:].partition("   # ")[0].strip() for line in PAGE.splitlines() if line.startswith("    ")]
HOSTFILE = "".join(f"{line}\n" for line in LINES if line.startswith("node"))
COMMANDS = [line for line in LINES if line.startswith(("zerorun", "salloc"))]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as the page assumes it: the hostfile, the script and its configuration."""
    (tmp_path / "hosts").write_text(HOSTFILE)
    (tmp_path / "train.py").write_text(PRELUDE + "meet()\nprint('trained', rank, world, *sys.argv[1:], flush=True)\n")
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    return tmp_path


def run(cluster: Cluster, place: Path, command: str, host: int = 0) -> subprocess.Popen[str]:
    """``command`` typed into a shell of ``host``."""
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    full = cluster[host].command(["env", path, "bash", "-c", command], place)
    return subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_trained(out: str, world: int, err: str) -> None:
    lines = sorted(line.rpartition("] ")[2] for line in out.splitlines() if "trained" in line)
    assert lines == sorted(f"trained {rank} {world} --config ds.json" for rank in range(world)), err


def test_the_page_has_the_commands_that_are_tried_here() -> None:
    kinds = [command.split(" train.py")[0] for command in COMMANDS]
    over_ssh = [kind for kind in kinds if "hostfile" in kind]
    assert over_ssh == ["zerorun --hostfile hosts --dry-run", "zerorun --hostfile hosts"]
    assert sum("--node-rank" in kind for kind in kinds) == 2
    assert sum("salloc" in kind or "--sbatch" in kind for kind in kinds) == 2
    assert len(kinds) == 6


@pytest.mark.nightly  # by day with fewer workers: test_launch.py
def test_over_ssh(cluster: Cluster, place: Path) -> None:
    planned, started = (command for command in COMMANDS if "hostfile" in command)
    out, err = run(cluster, place, planned).communicate(timeout=30 * patience())
    assert out.startswith("48 workers on 6 hosts, rendezvous at node0:"), err
    out, err = run(cluster, place, started).communicate(timeout=60 * patience())
    assert_trained(out, 48, err)
    assert_nothing_left(cluster, 1)


def test_by_hand(cluster: Cluster, place: Path) -> None:
    commands = [command for command in COMMANDS if "--node-rank" in command]
    jobs = [run(cluster, place, command, host) for host, command in enumerate(commands)]
    results = [job.communicate(timeout=60 * patience()) for job in jobs]
    assert_trained(results[0][0], 2, results[0][1])
    assert [job.returncode for job in jobs] == [0, 0]


@pytest.mark.nightly  # by day: test_slurm.py
def test_in_slurm(cluster: Cluster, place: Path) -> None:
    reason = slurmbed.missing()
    if reason is not None:
        pytest.skip(reason)
    slurm = slurmbed.Slurm(cluster, 4)
    slurm.up()
    try:
        allocated, submitted = (command for command in COMMANDS if "salloc" in command or "--sbatch" in command)
        out, err = run(cluster, place, allocated).communicate(timeout=60 * patience())
        assert_trained(out, 4, err)
        for marker in place.glob("here*"):
            marker.unlink()
        slurm.wait_until_idle()
        out, err = run(cluster, place, submitted).communicate(timeout=60 * patience())
        assert "Submitted batch job" in out, err
        log = place / f"slurm-{out.split()[-1]}.out"
        wait_for(lambda: log.exists() and log.read_text().count("trained") == 4, 40, "the batch job runs")
        assert_trained(log.read_text(), 4, "")
    finally:
        slurm.down()
