"""Limits of host memory, as read from made-up /proc and /sys trees."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from zerorun.memory.limits import Limit, cgroup_path, host_limits

MIB = 2**20


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


MEMINFO = "MemTotal: 9999 kB\nMemAvailable: 4096 kB\nSwapFree: 1024 kB"


def test_free_memory_of_the_node_includes_swap(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": MEMINFO})
    assert host_limits(root) == [Limit("free memory of the node", 5 * MIB)]


def test_cgroup_v2_and_those_around_it(tmp_path: Path) -> None:
    """Usage without file cache, which can be dropped, and "max" is no limit."""
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/7/task",
            "sys/fs/cgroup/jobs/7/task/memory.max": "max",
            "sys/fs/cgroup/jobs/7/task/memory.current": 2 * MIB,
            "sys/fs/cgroup/jobs/7/memory.max": 10 * MIB,
            "sys/fs/cgroup/jobs/7/memory.current": 8 * MIB,
            "sys/fs/cgroup/jobs/7/memory.stat": f"anon {5 * MIB}\ninactive_file {2 * MIB}\nactive_file {MIB}\nslab 5",
            "sys/fs/cgroup/jobs/memory.max": 20 * MIB,
            "sys/fs/cgroup/jobs/memory.current": 30 * MIB,
        },
    )
    assert host_limits(root) == [
        Limit("memory.max of cgroup /jobs/7", 5 * MIB, "/jobs/7"),
        Limit("memory.max of cgroup /jobs", 0, "/jobs"),
    ]
    assert cgroup_path(root) == "/jobs/7/task"


def test_cgroup_v1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/box"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/elsewhere\n4:memory:/box\n0::/",
            f"{folder}/memory.limit_in_bytes": 6 * MIB,
            f"{folder}/memory.usage_in_bytes": 5 * MIB,
            f"{folder}/memory.stat": f"cache 1\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2**63 - 4096,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": MIB,
        },
    )
    assert host_limits(root) == [Limit("memory.limit_in_bytes of cgroup /box", 3 * MIB, "/box")]


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/memory.max": 3 * MIB,
            "sys/fs/cgroup/memory.current": MIB,
        },
    )
    assert host_limits(root) == [Limit("memory.max of cgroup /", 2 * MIB, "/")]


def test_limits_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits = {resource.RLIMIT_AS: 8 * MIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (set_limits[kind], resource.RLIM_INFINITY))
    root = write(tmp_path, {"proc/self/status": "Name: x\nVmSize: 3072 kB\nVmData: 1024 kB"})
    assert host_limits(root) == [Limit("RLIMIT_AS", 5 * MIB, None, virtual=True)]


def test_a_system_that_says_nothing_limits_nothing(tmp_path: Path) -> None:
    assert host_limits(tmp_path) == []
    assert cgroup_path(tmp_path) == "/"


def test_this_machine_has_memory() -> None:
    assert all(limit.available > 0 for limit in host_limits())
