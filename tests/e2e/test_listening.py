"""On one host nothing of a job listens where another host could reach it, whoever starts it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from covering import by_day
from harness import patience

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import zerorun

# An optimizer of torch's would import its compiler, which takes each rank a second.
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}
engine, *_ = zerorun.initialize(model=torch.nn.Linear(4, 4), config=config)
engine.backward(engine(torch.ones(1, 4)).mean())
engine.step()
dist.all_reduce(torch.ones(1), group=dist.new_group())
open(f"ready{dist.get_rank()}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
"""
ALONE = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


def descendants(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        children = [
            int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
        ]
        return [pid, *(found for child in children for found in descendants(child))]
    return []


def listening(pids: Iterable[int]) -> set[str]:
    """``address:port`` in hexadecimal of every TCP socket on which one of ``pids`` listens."""
    inodes, found = set(), set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.add(fields[1])
    return found


def is_loopback(address: str) -> bool:
    """Of /proc/net/tcp: each four bytes in the order of this machine."""
    value = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address.partition(":")[0]), 8))
    return value[:1] == b"\x7f" if len(value) == 4 else value == bytes(15) + b"\x01" or value[10:13] == b"\xff\xff\x7f"


def commands(way: str) -> list[tuple[list[str], dict[str, str]]]:
    """The processes that start the job, each with its variables."""
    if way == "zerorun":
        return [([sys.executable, "-m", "zerorun.launcher.cli", "--nproc=2", "train.py"], {})]
    if way == "python":
        return [([sys.executable, "train.py"], {})]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(port)}
    return [([sys.executable, "train.py"], {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]


@pytest.mark.parametrize("way", by_day(("zerorun", "python", "variables"), "zerorun"))
def test_one_host_listens_on_loopback_only(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    inherited = {name: value for name, value in os.environ.items() if name not in ALONE}
    jobs = [subprocess.Popen(command, cwd=tmp_path, env={**inherited, **env}) for command, env in commands(way)]
    try:
        ranks = 1 if way == "python" else 2
        deadline = time.monotonic() + 60 * patience()
        while len(list(tmp_path.glob("ready*"))) < ranks:
            assert time.monotonic() < deadline and all(job.poll() is None for job in jobs)
            time.sleep(0.05)
        found = listening(pid for job in jobs for pid in descendants(job.pid))
        (tmp_path / "go").touch()
        assert [job.wait(30) for job in jobs] == [0] * len(jobs)
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()
    assert found, "not even the rendezvous was seen"
    assert all(is_loopback(address) for address in found), found


def test_the_interface_that_the_user_names_is_kept(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os; print(*(os.environ[n] for n in ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME', 'ZERORUN_INTERFACES')))"
    )
    command = [sys.executable, "-m", "zerorun.launcher.cli", "train.py"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth7"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30 * patience(), check=False
    )
    assert done.stdout == "eth7 lo NCCL_SOCKET_IFNAME=lo\n", done.stderr
