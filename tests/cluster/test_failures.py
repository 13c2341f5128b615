"""Whatever fails: all workers on all hosts end in time, nothing is left behind, and one report says what it was."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from covering import by_day
from harness import patience
from jobs import Job, assert_nothing_left
from testbed import Cluster

# Seconds from the failure to the end of everything, everywhere.
LIMIT, SILENT_LIMIT = 10.0, 30.0
counts = pytest.mark.parametrize("hosts", (2, pytest.param(12, marks=pytest.mark.nightly)))
FAILING = "meet()\nif rank == 1:\n    {}\ntime.sleep(100)\n"


def last_report(err: str) -> str:
    """The text between the two rules that end stderr."""
    assert err.rstrip().endswith("=" * 80), err
    return err.rstrip().split("=" * 80)[-2]


@pytest.mark.parametrize("hosts", by_day((2, 12), 12))
@pytest.mark.parametrize(
    ("action", "status", "words"),
    [
        ("raise ValueError('bad weights')", 1, "exit code 1"),
        # By day on one host: unit/test_launcher_processes.py.
        *by_day(
            (
                ("sys.exit(3)", 3, "exit code 3"),
                ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL (signal 9)"),
                ("ctypes.string_at(0)", 139, "killed by SIGSEGV (signal 11)"),
            )
        ),
    ],
)
def test_worker_fails(cluster: Cluster, tmp_path: Path, hosts: int, action: str, status: int, words: str) -> None:
    job = Job(cluster, tmp_path, FAILING.format(action), "--log-dir", "logs", hosts=hosts)
    job.wait_until_all_run()
    code, _, err = job.finish(LIMIT)
    report = last_report(err)
    assert code == status
    assert "zerorun: rank 1 on node1 failed first, " in report and words in report
    assert f"stopped by zerorun because of this: {'rank 0' if hosts == 2 else 'ranks 0, 2-11'}\n" in report
    assert "log: logs/rank1.stderr.log (on node1)" in report
    assert ("ValueError: bad weights" in report) == ("ValueError" in action)
    assert_nothing_left(cluster, 0.5)


@counts
def test_failures_alike_are_counted(cluster: Cluster, tmp_path: Path, hosts: int) -> None:
    script = "meet()\nraise ValueError('the same everywhere')\n"
    code, _, err = Job(cluster, tmp_path, script, hosts=hosts).finish(20)
    report = last_report(err)
    assert code == 1 and report.count("Traceback") == 1
    found = re.search(r"rank (\d+) on node\d+ failed first", report)
    assert found is not None, report
    others = [rank for rank in range(hosts) if rank != int(found[1])]
    assert f"{len(others)} other{'s' * (hosts > 2)} alike: rank{'s' * (hosts > 2)} " in report
    assert hosts > 2 or f"alike: rank {others[0]}" in report


def memory_group() -> Path | None:
    """A control group with a memory limit of 64 MiB, if one can be made here."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base) / f"zerorun-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(64 << 20))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group
    return None


@counts
def test_out_of_memory(cluster: Cluster, tmp_path: Path, hosts: int) -> None:
    group = memory_group()
    if group is None:
        pytest.skip("no control group with a memory limit can be made here")
    script = f"""
    meet()
    if rank == 1:
        for process in (os.getppid(), os.getpid()):
            open("{group}/cgroup.procs", "w").write(str(process))
        hoard = b"x" * (200 << 20)
    time.sleep(100)
    """
    job = Job(cluster, tmp_path, script, hosts=hosts)
    try:
        job.wait_until_all_run()
        code, _, err = job.finish(LIMIT)
    finally:
        assert_nothing_left(cluster, 5)
        group.rmdir()
    assert code == 137
    assert "out of host memory" in last_report(err)
    assert "the kernel's out-of-memory killer ended 1 process(es) during this job" in last_report(err)


@counts
def test_host_crashes(cluster: Cluster, tmp_path: Path, hosts: int) -> None:
    job = Job(cluster, tmp_path, "meet()\ntime.sleep(100)\n", hosts=hosts)
    job.wait_until_all_run()
    cluster[1].crash()
    code, _, err = job.finish(LIMIT)
    assert code == 69, err
    assert "zerorun: host node1 failed first, " in last_report(err) and "rank 1 of the job ran there" in last_report(err)
    assert_nothing_left(cluster, 0.5)


@counts
def test_a_host_that_dies_is_the_cause_of_what_its_peers_say(cluster: Cluster, tmp_path: Path, hosts: int) -> None:
    """As gloo does: the others notice at once that a peer is gone, perhaps before the launcher does."""
    script = """
    meet()
    if rank == 1:
        listener = socket.create_server(("", 7777))
        connections = [listener.accept() for _ in range(world - 1)]
        open(f"{here}/connected", "w").close()
        time.sleep(100)
    time.sleep(0.5)
    connection = socket.create_connection(("node1", 7777))
    try:
        connection.recv(1)
    finally:
        raise RuntimeError("Connection closed by peer") from None
    """
    job = Job(cluster, tmp_path, script, hosts=hosts)
    job.wait_until_all_run()
    while not (tmp_path / "connected").exists():
        time.sleep(0.01)
    cluster[1].crash()
    code, _, err = job.finish(LIMIT)
    report = last_report(err)
    assert code == 69 and "zerorun: host node1 failed first, " in report
    assert re.search(r"later, rank \d+ on node\d+: exit code 1: RuntimeError: Connection closed by peer", report), report


@counts
def test_host_is_silently_cut_off(cluster: Cluster, tmp_path: Path, hosts: int) -> None:
    job = Job(cluster, tmp_path, "meet()\ntime.sleep(100)\n", hosts=hosts)
    job.wait_until_all_run()
    begin = time.monotonic()
    cluster[1].cut()
    code, _, err = job.finish(SILENT_LIMIT)
    assert code == 69, err
    assert "zerorun: host node1 failed first, " in last_report(err)
    # The host that is cut off ends its workers by itself.
    assert_nothing_left(cluster, SILENT_LIMIT - (time.monotonic() - begin))


@counts
def test_launcher_is_killed(cluster: Cluster, tmp_path: Path, hosts: int) -> None:
    script = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\nmeet()\ntime.sleep(100)\n"
    job = Job(cluster, tmp_path, script, hosts=hosts)
    job.wait_until_all_run()
    job.signal(signal.SIGKILL)
    assert_nothing_left(cluster, LIMIT)
    job.process.wait(5)


STUBBORN = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


@counts
@pytest.mark.parametrize("presses", (1, 2))
def test_ctrl_c(cluster: Cluster, tmp_path: Path, hosts: int, presses: int) -> None:
    """Once: workers get it and end. Twice, with workers that do not: they are killed, long before the grace is over."""
    script = (STUBBORN if presses == 2 else "") + "meet()\ntime.sleep(100)\n"
    job = Job(cluster, tmp_path, script, "--grace=60", hosts=hosts)
    job.wait_until_all_run()
    for _ in range(presses):
        job.signal(signal.SIGINT)
        time.sleep(0.5)
    code, _, err = job.finish(LIMIT)
    assert code == 130
    assert f"stopped by SIGINT; all {hosts} workers have ended" in err
    assert_nothing_left(cluster, 0.5)


@counts
def test_terminal_is_closed(cluster: Cluster, tmp_path: Path, hosts: int) -> None:
    master, slave = pty.openpty()

    def take_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    streams = {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": True, "preexec_fn": take_terminal}
    job = Job(cluster, tmp_path, "meet()\ntime.sleep(100)\n", hosts=hosts, **streams)
    os.close(slave)
    job.wait_until_all_run()
    os.close(master)
    assert_nothing_left(cluster, LIMIT)
    job.process.wait(5)


def test_signals_reach_each_worker_once(cluster: Cluster, tmp_path: Path) -> None:
    script = """
    caught = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: caught.append(number))
    meet()
    while signal.SIGTERM not in caught:
        time.sleep(0.01)
    time.sleep(0.5)
    print("caught", *(int(number) for number in caught))
    """
    job = Job(cluster, tmp_path, script, hosts=3, slots=2)
    wait = time.monotonic() + 20
    while len(list(tmp_path.glob("here.0.*"))) < 6:
        assert time.monotonic() < wait
        time.sleep(0.01)
    job.signal(signal.SIGUSR1)
    time.sleep(0.3)
    job.signal(signal.SIGTERM)
    code, out, err = job.finish(LIMIT)
    lines = [line.rpartition("] ")[2] for line in out.splitlines()]
    assert lines == [f"caught {int(signal.SIGUSR1)} {int(signal.SIGTERM)}"] * 6, (out, err)
    assert code == 0
    assert_nothing_left(cluster, 0.5)


def test_host_that_cannot_be_reached_starts_nothing(cluster: Cluster, tmp_path: Path) -> None:
    cluster[2].shell("kill $(cat /run/sshd.pid)")
    job = Job(cluster, tmp_path, "open(f'{here}/ran', 'w')\n", hosts=3)
    code, _, err = job.finish(20)
    cluster[2].shell("/usr/sbin/sshd -f /etc/ssh/sshd_config -E /run/sshd.log")
    assert code == 2
    assert "node2: ssh ended with status 255" in err and "Connection refused" in err and "No worker is running." in err
    assert not (tmp_path / "ran").exists()
    assert_nothing_left(cluster, 2)


def test_script_that_is_missing_on_one_host_starts_nothing(cluster: Cluster, tmp_path: Path) -> None:
    local = cluster.folder / "local"  # another folder on each host
    cluster[0].shell(f"echo 'import os; print(os.environ[\"RANK\"])' > {local}/only_here.py")
    (tmp_path / "hostfile").write_text("node0 slots=1\nnode1 slots=1\n")
    import sys

    launcher = [sys.executable, "-m", "zerorun.launcher.cli", "--hostfile", "hostfile", str(local / "only_here.py")]
    done = subprocess.run(
        cluster[0].command(launcher, tmp_path), capture_output=True, text=True, timeout=30 * patience(), check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "node1: script not found" in done.stderr and "Remedy: put it on all hosts." in done.stderr


# Rarer ways


@pytest.mark.parametrize("first", by_day(("raise ValueError('here')", "sys.exit(0)"), "sys.exit(0)"))
def test_the_launcher_s_own_workers_end_first(cluster: Cluster, tmp_path: Path, first: str) -> None:
    script = f"meet()\nif rank == 0:\n    {first}\ntime.sleep(1)\nif rank == 1: sys.exit(3)\ntime.sleep(100)\n"
    code, _, err = Job(cluster, tmp_path, script, hosts=3).finish(20)
    assert (code, "failed first" in last_report(err)) == (1 if "raise" in first else 3, True), err
    assert_nothing_left(cluster, 0.5)


def test_a_rank_that_left_early_on_another_host_is_the_cause(cluster: Cluster, tmp_path: Path) -> None:
    script = "meet()\nif rank == 1: sys.exit(0)\ntime.sleep(1)\nraise OSError('Connection closed by peer 10.77.0.11')\n"
    code, _, err = Job(cluster, tmp_path, script, hosts=3).finish(20)
    report = last_report(err)
    assert code == 1 and "zerorun: rank 1 on node1 ended with exit code 0, " in report, report
    assert "give all ranks the same number of batches" in report


def test_agent_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    script = "meet()\nif rank == 1: os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(100)\n"
    code, _, err = Job(cluster, tmp_path, script, hosts=3).finish(3 + LIMIT)
    assert code == 69 and "host node1 failed first" in last_report(err)
    assert_nothing_left(cluster, 0.5)


def test_worker_that_failed_before_a_host_was_lost_is_the_cause(cluster: Cluster, tmp_path: Path) -> None:
    script = STUBBORN + "meet()\nif rank == 1: sys.exit(3)\ntime.sleep(100)\n"
    job = Job(cluster, tmp_path, script, "--grace=6", hosts=3)
    job.wait_until_all_run()
    time.sleep(3)
    cluster[2].crash()
    code, _, err = job.finish(15)
    assert code == 3 and "rank 1 on node1 failed first" in last_report(err)


@pytest.mark.parametrize("number", by_day((signal.SIGINT, signal.SIGTERM), signal.SIGTERM))
def test_no_restart_after_a_signal(cluster: Cluster, tmp_path: Path, number: signal.Signals) -> None:
    script = STUBBORN + "meet()\nif rank == 1: sys.exit(3)\ntime.sleep(100)\n"
    job = Job(cluster, tmp_path, script, "--grace=3", "--max-restarts=5", hosts=2)
    job.wait_until_all_run()
    time.sleep(0.3)  # the survivors have a second to fail by themselves
    job.signal(number)
    code, _, err = job.finish(15)
    assert code == 3 and "restart" not in err
    assert_nothing_left(cluster, 0.5)


@pytest.mark.nightly  # by day: test_worker_fails
def test_failure_is_noticed_behind_a_flood_of_output(cluster: Cluster, tmp_path: Path) -> None:
    script = """
    meet()
    if rank == 3:
        time.sleep(2)
        sys.exit(7)
    while rank == 2:
        os.write(1, bytes(range(256)) * 100)
    time.sleep(100)
    """
    job = Job(cluster, tmp_path, script, hosts=2, slots=2, stdout=subprocess.DEVNULL)
    code, _, err = job.finish(4 + LIMIT)
    assert code == 7 and "rank 3 on node1 failed first" in last_report(err)
    assert_nothing_left(cluster, 0.5)


@pytest.mark.nightly  # by day: test_launch.py::test_arguments_paths_and_variables_arrive_unchanged
def test_long_commands_arrive(cluster: Cluster, tmp_path: Path) -> None:
    """Megabytes of them, through pipes that hold 64 KiB."""
    job = Job(cluster, tmp_path, "print(len(sys.argv[1]))\n", hosts=2, slots=12, args=["x" * 100_000])
    code, out, err = job.finish(30)
    assert code == 0 and [line.split()[-1] for line in out.splitlines()] == ["100000"] * 24, err
