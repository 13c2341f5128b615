"""Supervisors of ranks that torchrun or srun has started: which ranks start them, and what they see and end.

Programs that know nothing of PyTorch write on their boards as engines do. Two hosts are two jobs of this one that have a
store in common. Real launchers and hosts are tried by night, in tests/e2e/test_hangs.py and tests/cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from covering import by_day
from harness import patience

from zerorun.launcher.sidecar import AdoptedRanks
from zerorun.launcher.worker_boards import is_gone
from zerorun.watch import board, launch_environment, sidecars

ZERORUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {**ZERORUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77", "SLURM_NNODES": "3"}


class Store(dict[str, bytes]):
    """The store at which ranks meet, for those that come in the right order."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def torchrun(rank: int) -> dict[str, str]:
    return {**TORCHRUN, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)}


def srun(rank: int) -> dict[str, str]:
    return {**SRUN, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The orders of the supervisors that are to be started."""
    orders: list[dict[str, Any]] = []

    def take(order: dict[str, Any], *files: int) -> None:
        if files:  # what the supervisor is given is closed here
            port = socket.socket(fileno=os.dup(files[0]))
            assert port.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            order = {**order, "listens": port.getsockname()[1]}
            port.close()
        orders.append(order)

    monkeypatch.setattr(sidecars, "_start", take)
    return orders


def be(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_")) or "RANK" in name]:
        monkeypatch.delenv(name)
    for name in {*TORCHRUN, *environment}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("launcher", [torchrun, srun])
def test_the_first_ranks_of_hosts_start_them(launcher: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two hosts: that of rank 0 listens, and rank 2 is told where, and the secret. Others start none."""
    store = Store()
    for rank in range(4):
        environment = launcher(rank)
        assert sidecars.started_by_another(environment) and launch_environment.rank_in(environment) == rank
        be(monkeypatch, environment)
        sidecars.begin_together(store, "10.1.2.3")
    first, second = started
    assert first.keys() == {"world_size", "listener", "secret", "listens"} and first["world_size"] == 4
    assert second == {"world_size": 4, "address": "10.1.2.3", "port": first["listens"], "secret": first["secret"]}
    assert len(first["secret"]) == 64
    assert first["secret"] not in json.dumps(list(store))


def test_each_round_has_a_place_of_its_own_in_the_store(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store outlives a restart: who comes before rank 0 then waits, and is not told what was before."""
    store = Store()
    for rank, count in ((0, "0"), (2, "0"), (2, "1"), (0, "1")):
        be(monkeypatch, {**torchrun(rank), "TORCHELASTIC_RESTART_COUNT": count})
        with pytest.raises(KeyError) if (rank, count) == (2, "1") else contextlib.nullcontext():
            sidecars.begin_together(store, "10.1.2.3")
    assert len(started) == 3 and len({order["secret"] for order in started}) == 2


def test_where_nobody_can_listen_nobody_waits(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other hosts learn of it, whether rank 0 cannot, or is watched by somebody else already."""

    def cannot() -> socket.socket:
        raise OSError

    monkeypatch.setattr(sidecars, "_listener", cannot)
    monkeypatch.setattr(board, "_supervised", [])
    for begin in (sidecars.begin_together, board.watch_other_hosts):
        store = Store()
        be(monkeypatch, torchrun(0))
        begin(store, "here")
        be(monkeypatch, torchrun(2))
        sidecars.begin_together(store, "here")
    assert started == []


def test_jobs_on_one_host(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        be(monkeypatch, torchrun(rank))
        sidecars.begin_alone()
    assert started == [{"world_size": 4}]


@pytest.mark.parametrize(
    ("environment", "by_another", "here"),
    [
        (torchrun(1), True, False),
        ({**torchrun(1), "LOCAL_WORLD_SIZE": "4"}, True, True),
        ({**torchrun(0), "WORLD_SIZE": "1"}, False, False),
        ({name: value for name, value in torchrun(1).items() if name != "LOCAL_WORLD_SIZE"}, False, False),
        ({**ZERORUN, "RANK": "1", "LOCAL_RANK": "1"}, False, False),  # what a worker of zerorun has started
        (srun(1), True, False),
        ({**srun(1), "SLURM_STEP_NUM_NODES": "1"}, True, True),  # a step on one of the three nodes of the job
        ({**srun(1), "SLURM_NNODES": "1"}, True, True),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}, False, False),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, False, False),  # mpirun, or by hand
        ({}, False, False),
    ],
)
def test_who_has_started_a_rank_and_where(environment: dict[str, str], by_another: bool, here: bool) -> None:
    assert sidecars.started_by_another(environment) == by_another
    assert launch_environment.is_on_one_host(environment) == here


RANKS = """
import os, subprocess, sys, time
from zerorun.watch.board import Phase, board, limit_waits, only, show_board, watch_other_hosts
class Store:
    def set(self, key, value):
        open("value.new", "w").write(value)
        os.rename("value.new", "value")
    def get(self, key):
        while not os.path.exists("value"):
            time.sleep(0.02)
        return open("value", "rb").read()
def planted_bug():
    if os.environ["RANK"] == "1":  # such as a process that loads data
        child = subprocess.Popen(["sleep", "100"], stderr=subprocess.DEVNULL)
        open("child", "w").write(str(child.pid))
    time.sleep(100)
show_board()
watch_other_hosts(Store(), "127.0.0.1")
limit_waits(1.0)
board.enter(Phase.SCRIPT)
for step in range(3):
    board.end_batch(step + 1, step + 1, over=True)
if os.environ["RANK"] == "0":
    board.wait_begins("gather", only(1), 3)
planted_bug()
"""


ENDS = """
import os, sys, time
from zerorun.watch.board import ALL, Phase, board, limit_waits, show_board
show_board()
rank = int(os.environ["RANK"])
board.end_batch(5, 5, over=True)
board.note_size("gather", ALL, 1, 8 + 8 * (sys.argv[1] == "sizes" and rank == 1))
if sys.argv[1] == "left":
    if rank == 1:
        board.enter(Phase.LEFT)
    else:
        board.note_size("gather", ALL, 2, 8)
board.wait_begins("gather", ALL, 1)
open(f"here.{rank}", "w").close()
while not os.path.exists("end"):
    time.sleep(0.02)
"""


def watched_by(rank: int) -> int:
    """How many boards the supervisor has that a rank has started."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{rank}/task/{rank}/children").read_text().split():
            found += [os.readlink(file) for file in Path(f"/proc/{child}/fd").iterdir()]
    return sum(file.startswith(f"/memfd:{board.STACKS_NAME}") for file in found)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("sizes", "ranks disagree on the size of 'gather': rank 0 has 8 bytes, rank 1 has 16 bytes."),
        ("left", "rank 1 has come to the end of its script after 5 micro-batches, and then rank 0 began 'gather', "),
        ("nothing", ""),
    ],
)
def test_why_ranks_may_have_ended(tmp_path: Path, kind: str, told: str) -> None:
    """Their boards are read when they have ended. Who has started them knows their exit codes only."""
    (tmp_path / "train.py").write_text(ENDS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    job = {**kept, **TORCHRUN, "WORLD_SIZE": "2", "MASTER_PORT": f"{os.getpid()}", "MASTER_ADDR": tmp_path.name}
    with (tmp_path / "err").open("w") as err:
        ranks = [
            subprocess.Popen(
                [sys.executable, "train.py", kind],
                cwd=tmp_path,
                env={**job, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                stdout=subprocess.PIPE,  # its supervisor closes that when it has begun, and writes on stderr alone
                stderr=err,
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + 30 * patience()
        while len(list(tmp_path.glob("here.*"))) < 2 or watched_by(ranks[0].pid) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (tmp_path / "end").touch()
        for process in ranks:
            process.communicate()
    while (tmp_path / "err").read_text().count("=" * 80) < (2 if told else 0):
        assert time.monotonic() < deadline, (tmp_path / "err").read_text()
        time.sleep(0.05)
    if not told:
        time.sleep(1.5)
    assert told in (tmp_path / "err").read_text() and (told or not (tmp_path / "err").read_text())


@pytest.mark.parametrize("hosts", (1, 2))
def test_ranks_that_end_at_once_leave_nobody_behind(tmp_path: Path, hosts: int) -> None:
    """A supervisor that came too late to see them waited a minute for them, and its like on other hosts for ever.

    Whoever reads the output of the job waits until all have closed it.
    """
    (tmp_path / "train.py").write_text(RANKS.partition("limit_waits(1.0)")[0])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    job = {**kept, **TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // hosts), "MASTER_PORT": f"{os.getpid()}"}
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % (2 // hosts)), "MASTER_ADDR": f"{tmp_path.name}-{rank % hosts}"}
        command = [sys.executable, "train.py"]
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env={**job, **own}, stderr=subprocess.PIPE, text=True))
    for process in ranks:
        assert process.communicate(timeout=30 * patience())[1] == "" and process.returncode == 0


def test_a_rank_that_ends_before_it_was_seen() -> None:
    """Nobody waits for others then, and the supervisor of another host hangs up."""
    starter = subprocess.Popen(["sleep", "100"])
    heard: list[str] = []
    listener: Any = SimpleNamespace(hangs=None, on_empty=lambda *unused: heard.append("empty"))
    ranks = AdoptedRanks("nobody:1", starter.pid, 2, listener)
    try:
        ranks.tick(time.monotonic())
        assert ranks.busy and not heard  # a board may still come
    finally:
        starter.kill()
        starter.wait()
    ranks.tick(time.monotonic() + 1)
    assert not ranks.busy and heard


def test_ranks_that_nobody_has_seen(tmp_path: Path) -> None:
    """Such as those of a host that has stopped before its supervisor had come. They are told, and nothing is ended."""
    (tmp_path / "train.py").write_text(RANKS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    job = {**kept, **TORCHRUN, "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": tmp_path.name, "MASTER_PORT": f"{os.getpid()}"}
    first = subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**job, "RANK": "0", "LOCAL_RANK": "0"},
        stderr=(tmp_path / "err").open("w"),
    )
    try:
        deadline = time.monotonic() + 30 * patience()
        while not (told := (tmp_path / "err").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "ranks wait for others, and nothing is known of ranks 1-3: not at initialize() yet, or on a host" in told
        time.sleep(1.0)
        assert first.poll() is None and (tmp_path / "err").read_text() == told
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize("hosts", by_day((1, 2), 2))
def test_a_rank_that_stands_still_is_named_and_ended(tmp_path: Path, hosts: int) -> None:
    """Of a job on one host that rank alone, since torchrun ends the others. Of several hosts all."""
    (tmp_path / "train.py").write_text(RANKS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    job = {**kept, **TORCHRUN, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // hosts), "MASTER_PORT": f"{os.getpid()}"}
    ranks = []
    for rank in range(2):
        name = f"{tmp_path.name}-{rank if hosts > 1 else 0}"  # by which a supervisor knows the ranks of its host
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % (2 // hosts)), "MASTER_ADDR": name}
        command = [sys.executable, "train.py"]
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env={**job, **own}, stderr=subprocess.PIPE, text=True))
    first, second = ranks
    try:
        assert second.wait(30 * patience()) == -9
        if hosts > 1:
            assert first.wait(10 * patience()) == -9
        else:
            time.sleep(0.5)
            assert first.poll() is None
    finally:
        for process in ranks:
            process.kill()
        told = first.communicate()[1]  # also of the supervisor, which ends with the last rank
        second.communicate()
    assert is_gone(int((tmp_path / "child").read_text()))
    where = f" on {socket.gethostname()}" if hosts > 1 else ""
    assert f"zerorun: the job hangs: rank 1{where} does not move" in told, told
    assert "in planted_bug" in told
