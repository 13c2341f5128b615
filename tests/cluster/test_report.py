"""zerorun-report on three hosts finds what was planted, and nothing else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import patience
from jobs import assert_nothing_left
from testbed import Cluster

HOSTFILE = "node0 slots=1\nnode1 slots=1\nnode2 slots=1\n"


def report(cluster: Cluster, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """(exit status, what --json prints) of a report on the first three hosts."""
    (folder / "hosts").write_text(HOSTFILE)
    command = [sys.executable, "-m", "zerorun.report.cli", "--hostfile", "hosts", "--quick", "--json", *options]
    done = subprocess.run(
        cluster[0].command(command, folder), capture_output=True, text=True, timeout=120 * patience(), check=False
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def serious(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What is not a note; nor that a rank computes slowly: on this machine others may compute, too."""
    found_here = [finding for finding in found["findings"] if finding["severity"] != "note"]
    return [finding for finding in found_here if "its own computing takes" not in finding["what"]]


@pytest.mark.nightly
def test_healthy_hosts(cluster: Cluster, tmp_path: Path) -> None:
    status, found = report(cluster, tmp_path)
    assert status == 0 and serious(found) == []
    assert found["live"]["world_size"] == 3
    assert_nothing_left(cluster, 2)


@pytest.mark.nightly  # by day what is found in the numbers: unit/test_report_findings.py
def test_one_host_has_a_slow_cable(cluster: Cluster, tmp_path: Path) -> None:
    with cluster[2].delayed(10):
        status, found = report(cluster, tmp_path)
    finding, *others = serious(found)
    assert not others, others
    assert status == 1 and finding["severity"] == "warning" and finding["host"] == "node2", finding
    assert "slow network" in finding["what"]


@pytest.mark.nightly
def test_one_host_has_another_torch_and_one_a_full_dev_shm(cluster: Cluster, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    version = Path(spec.origin).with_name("version.py")
    other = tmp_path / "version.py"
    other.write_text(version.read_text().replace("__version__ = '2.", "__version__ = '2.1"))
    cluster[1].shell(f"mount --bind {other} {version}")
    cluster[2].shell("mount -t tmpfs -o size=1m tmpfs /dev/shm; head -c 1048576 /dev/zero > /dev/shm/full")
    try:
        status, found = report(cluster, tmp_path)
    finally:
        cluster[1].shell(f"umount {version}")
        cluster[2].shell("umount /dev/shm")
    assert status == 2
    errors = {finding["host"]: finding["what"] for finding in serious(found) if finding["severity"] == "error"}
    assert sorted(errors) == ["node1", "node2"], errors
    assert "torch 2.1" in errors["node1"] and "/dev/shm" in errors["node2"]
    assert {finding["host"] for finding in serious(found)} == {"node1", "node2"}


@pytest.mark.nightly  # by day: a host without an address in tests/e2e, one that is cut off from a job in test_failures.py
def test_one_host_cannot_be_reached(cluster: Cluster, tmp_path: Path) -> None:
    cluster[1].cut()
    status, found = report(cluster, tmp_path)
    assert status == 2
    finding, *others = serious(found)
    assert not others, others
    assert finding["host"] == "node1" and finding["severity"] == "error" and finding["remedy"]
    assert found["live"]["world_size"] == 2  # the others are checked all the same
