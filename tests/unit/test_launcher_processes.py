"""The launcher with real processes. The scripts are tiny and do not import torch."""

from __future__ import annotations

import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import patience

PRELUDE = """\
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def note(pid):
    with open("pids", "a") as file:
        file.write(f"{pid}\\n")
def meet(*ranks):
    '''Wait until the ranks are all here.'''
    with open(f"coming{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"coming{rank}", f"here{rank}")  # so that nobody sees it empty
    while not all(os.path.exists(f"here{other}") for other in ranks):
        time.sleep(0.005)
def ended(other):
    '''Whether that rank, which is here, has ended.'''
    with open(f"here{other}") as file:
        try:
            return ") Z " in open(f"/proc/{file.read()}/stat").read()
        except FileNotFoundError:
            return True
note(os.getpid())
"""
IGNORE_TERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SLEEPER = "[sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)']"


class Job:
    """A launcher started in ``folder`` with ``script``."""

    def __init__(
        self, folder: Path, script: str, *options: str, args: tuple[str, ...] = (), hurried: str = "", **popen: object
    ) -> None:
        """``hurried``: what gives constants of the launcher's modules other values."""
        self.folder = folder
        (folder / "train.py").write_text(PRELUDE + textwrap.dedent(script))
        begin = f"import sys; from zerorun.launcher import cli, run_outcome, worker_output; {hurried}; sys.exit(cli.main())"
        launcher = ["-c", begin] if hurried else ["-m", "zerorun.launcher.cli"]
        command = [sys.executable, *launcher, *options, "train.py", *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **popen}
        self.process: subprocess.Popen[bytes] = subprocess.Popen(command, cwd=folder, **pipes)  # type: ignore[call-overload]

    def pids(self, count: int) -> list[int]:
        """The noted processes, once there are ``count`` of them."""
        path = self.folder / "pids"
        wait_for(lambda: path.exists() and path.read_text().count("\n") >= count, 10)
        return [int(line) for line in path.read_text().split()]

    def finish(self, timeout: float = 20) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout * patience())
        return self.process.returncode, out.decode(), err.decode()


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds * patience()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def assert_gone(pids: list[int], seconds: float = 0.0) -> None:
    wait_for(lambda: not any(alive(pid) for pid in pids), seconds)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs, and ends what a failing test leaves running."""
    jobs: list[Job] = []

    def start_job(script: str, *options: str, folder: Path = tmp_path, **more: object) -> Job:
        jobs.append(Job(folder, script, *options, **more))  # type: ignore[arg-type]
        return jobs[-1]

    yield start_job
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()  # its guard does the rest
        job.process.communicate()


Start = Callable[..., Job]


# How a job ends


def test_success(start: Start) -> None:
    job = start("print('hello', rank, sys.argv[1:])", "--nproc", "3", args=("a b", "$HOME", "two\nlines"))
    code, out, err = job.finish()
    assert (code, err) == (0, "")
    said = "hello {} ['a b', '$HOME', 'two\\nlines']"
    lines = [said.format(0), "[rank 1] " + said.format(1), "[rank 2] " + said.format(2)]
    assert sorted(out.splitlines()) == sorted(lines)
    assert_gone(job.pids(3))


def test_exception_is_reported_last_with_its_traceback(start: Start) -> None:
    job = start(
        """
        meet(0, 1)
        if rank == 1:
            raise ValueError("bad weights")
        time.sleep(60)
        """,
        "--nproc", "2", "--log-dir", "logs",
    )  # fmt: skip
    begin = time.monotonic()
    code, _, err = job.finish()
    assert code == 1
    assert time.monotonic() - begin < 10 * patience()
    last = err[err.index("=" * 80) :]
    assert last.splitlines()[1].startswith("zerorun: rank 1 failed first, ")
    assert "\n  exit code 1\n\nTraceback (most recent call last):\n  File " in last
    assert 'raise ValueError("bad weights")\nValueError: bad weights\n' in last
    assert "stopped by zerorun because of this: rank 0\nlog: logs/rank1.stderr.log\n" in last
    assert last.endswith("=" * 80 + "\n")
    assert "ValueError: bad weights" in (job.folder / "logs" / "rank1.stderr.log").read_text()
    assert_gone(job.pids(2))


@pytest.mark.parametrize(
    ("action", "status", "words"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL (signal 9): probably out of host memory"),
        ("import ctypes; ctypes.string_at(0)", 139, "killed by SIGSEGV (signal 11): segmentation fault"),
    ],
)
def test_exit_status(start: Start, action: str, status: int, words: str) -> None:
    job = start(f"if rank == 1: {action}\ntime.sleep(60)", "--nproc=2")
    code, _, err = job.finish()
    assert code == status
    assert f"  {words}" in err
    if status == 139:
        assert "Fatal Python error: Segmentation fault" in err and 'train.py", line' in err


def test_workers_with_gpus_have_a_flight_recorder_and_a_report_that_names_it(start: Start) -> None:
    """Here a script does what torch does where there are GPUs."""
    job = start(
        """
        from zerorun.watch.board import ALL, board, show_board
        show_board()
        board.write(STEP=5, LIMIT=1000)
        pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + f"{rank}.pipe"
        os.mkfifo(pipe)
        if rank == 0:
            board.wait_begins("3: gather", ALL, 1)
        else:
            board.enter(1)
            assert open(pipe).read() == "1\\n"
            open(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + f"{rank}", "w").close()
        time.sleep(100)
        """,
        "--nproc=2", "--export", "CUDA_VISIBLE_DEVICES=0,1",
    )  # fmt: skip
    code, _, err = job.finish()
    assert code == 124 and "zerorun: the job hangs: rank 1 does not move" in err
    folder = Path(err.split("NCCL's last collectives are written to ")[1].split("/nccl_trace")[0])
    assert [path.name for path in folder.iterdir()] == ["nccl_trace_rank_1"]
    shutil.rmtree(folder)


def test_earlier_failure_is_the_cause(start: Start) -> None:
    job = start(
        """
        meet(*range(4))
        while rank != 3 and not ended(3):
            time.sleep(0.005)
        raise RuntimeError("root cause" if rank == 3 else "connection closed")
        """,
        "--nproc=4",
    )
    _, _, err = job.finish()
    assert "rank 3 failed first" in err
    assert "later, rank 0: exit code 1: RuntimeError: connection closed" in err


def test_a_rank_that_misses_another_may_be_the_first_to_end(start: Start) -> None:
    """The other one leaves its process groups before it ends."""
    job = start(
        """
        meet(*range(2))
        while rank == 1 and not ended(0):
            time.sleep(0.005)
        raise RuntimeError("connection closed" if rank == 0 else "root cause")
        """,
        "--nproc=2",
    )
    _, _, err = job.finish()
    assert "rank 1 failed first" in err and "later, rank 0: exit code 1: RuntimeError: connection closed" in err


def test_a_long_traceback_hides_no_cause(start: Start) -> None:
    """Although what the rank says at its end could be about another one."""
    job = start(
        """
        import atexit
        atexit.register(lambda: print("wandb: sync: retry after time out", file=sys.stderr))
        def even(depth): odd(depth - 1)
        def odd(depth):
            if depth < 0: raise ValueError("root cause")
            even(depth - 1)
        meet(*range(2))
        while rank == 1 and not ended(0):
            time.sleep(0.005)
        if rank == 0:
            raise RuntimeError("connection closed")
        even(100)
        """,
        "--nproc=2",
    )
    _, _, err = job.finish()
    report = err[err.index("=" * 80) :]
    assert "rank 1 failed first" in report and "Traceback (most recent call last):" in report
    assert "\nValueError: root cause\nwandb: sync: retry after time out\n" in report


def test_failures_alike_are_shown_once(start: Start) -> None:
    job = start("meet(*range(8))\nraise RuntimeError('same')", "--nproc", "8")
    code, _, err = job.finish()
    report = err[err.index("=" * 80) :]
    assert code == 1
    assert report.count("RuntimeError: same") == 1
    assert "\n7 others alike: ranks " in report


# Nothing is left


def test_worker_that_ignores_sigterm_is_killed_with_its_children(start: Start) -> None:
    job = start(
        IGNORE_TERM
        + f"""
note(subprocess.Popen({SLEEPER}).pid)
note(subprocess.Popen({SLEEPER}, start_new_session=True).pid)
meet(0, 1)
if rank == 1: sys.exit(5)
time.sleep(60)
""",
        "--nproc=2", "--grace=0.5",
    )  # fmt: skip
    assert job.finish(timeout=10)[0] == 5
    assert_gone(job.pids(6))


def test_success_leaves_no_children_either(start: Start) -> None:
    job = start("note(subprocess.Popen(['sleep', '60']).pid)", "--nproc=2")
    assert job.finish(timeout=10)[0] == 0
    assert_gone(job.pids(4))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_to_the_launcher_ends_the_job(start: Start, number: int, status: int) -> None:
    job = start("note(subprocess.Popen(['sleep', '60']).pid)\ntime.sleep(60)", "--nproc=2")
    pids = job.pids(4)
    job.process.send_signal(number)
    code, _, err = job.finish(timeout=10)
    assert code == status
    assert err.endswith(f"[zerorun] stopped by {signal.Signals(number).name}; all 2 workers have ended\n")
    assert "failed first" not in err
    assert_gone(pids)


def test_workers_may_save_on_sigterm(start: Start) -> None:
    job = start(
        """
        def save(*_):
            time.sleep(0.3)
            print("saved, child", "alive" if child.poll() is None else "dead")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        child = subprocess.Popen(["sleep", "60"])
        note(child.pid)
        time.sleep(60)
        """,
        "--nproc=2",
    )
    pids = job.pids(4)
    job.process.terminate()
    code, out, _ = job.finish(timeout=10)
    assert code == 0
    assert sorted(out.splitlines()) == ["[rank 1] saved, child alive", "saved, child alive"]
    assert_gone(pids)


def test_second_ctrl_c_kills_at_once(start: Start) -> None:
    job = start("signal.signal(signal.SIGINT, signal.SIG_IGN)\nnote(0)\ntime.sleep(60)", "--nproc=2", "--grace=30")
    pids = [pid for pid in job.pids(4) if pid]
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.finish(timeout=5)[0] == 130
    assert_gone(pids)


def test_user_signals_are_passed_on_and_end_nothing(start: Start) -> None:
    job = start(
        """
        got = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        note(0)
        while not got:
            time.sleep(0.01)
        print("got it")
        """,
        "--nproc=2",
    )
    job.pids(4)
    job.process.send_signal(signal.SIGUSR1)
    code, out, _ = job.finish(timeout=10)
    assert (code, out.count("got it")) == (0, 2)


def test_killed_launcher_leaves_nothing(start: Start) -> None:
    job = start(IGNORE_TERM + f"note(subprocess.Popen({SLEEPER}).pid)\ntime.sleep(60)", "--nproc=2")
    pids = job.pids(4)
    assert all(alive(pid) for pid in pids)
    job.process.kill()
    job.process.wait()
    assert_gone(pids, seconds=5)


# Output


def test_lines_are_never_mixed(start: Start) -> None:
    job = start(
        """
        meet(*range(4))
        for n in range(300):
            stream = (sys.stdout, sys.stderr)[n % 2]
            stream.write(f"<{rank} ")
            stream.flush()
            stream.write("x" * 50 + f" {n}>\\n")
            stream.flush()
        """,
        "--nproc=4", stderr=subprocess.STDOUT,
    )  # fmt: skip
    out, _ = job.process.communicate(timeout=20 * patience())
    lines = out.decode().splitlines()
    assert len(lines) == 4 * 300
    for line in lines:
        match = re.fullmatch(r"(?:\[rank (\d)\] )?<(\d) x{50} \d+>", line)
        assert match and (match[1] or "0") == match[2], line


def test_progress_bar_of_rank_0_works_in_a_terminal(start: Start) -> None:
    main, terminal = pty.openpty()
    job = start(
        """
        if rank == 0:
            sys.stderr.write("\\r50% " + os.environ.get("ZERORUN_TTY", "no"))
            sys.stderr.flush()
            open("written", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
        """,
        "--nproc=2", stdout=terminal, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    seen = b""
    while b"50% 1" not in seen:
        seen += os.read(main, 1000)
    (job.folder / "go").touch()
    assert job.process.wait(timeout=10 * patience()) == 0
    os.close(main)


def test_reader_that_does_not_read_hides_no_failure(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    job = start(
        """
        if rank == 0:
            while True: print("x" * 10000)
        time.sleep(0.5)
        sys.exit("no luck")
        """,
        "--nproc=2", stderr=log.open("wb"),
    )  # fmt: skip
    wait_for(lambda: "its stderr:\n  no luck\n" in log.read_text(), 10)
    assert_gone(job.pids(2))
    job.process.communicate(timeout=10 * patience())
    assert job.process.returncode == 1


def test_a_slow_reader_gets_all_of_the_output(start: Start) -> None:
    """The report of the failure too, although nobody reads for a while when the last worker has ended."""
    job = start("for stream in (sys.stdout, sys.stderr): stream.write('x' * 500000 + '\\n')\nsys.exit(3)", "--nproc=1")
    assert_gone(job.pids(1), 20)
    time.sleep(2.5)
    code, out, err = job.finish()
    assert code == 3 and len(out) == 500001
    assert err.startswith("x" * 500000) and err.endswith("=" * 80 + "\n")


def test_a_signal_ends_the_wait_for_a_reader_and_the_loss_is_told(start: Start) -> None:
    job = start("print('x' * 499999)", "--nproc=1", hurried="worker_output.STUCK_SECONDS = 0.2")
    assert job.process.stderr is not None
    waits = job.process.stderr.readline().decode()
    found = re.fullmatch(r"\[zerorun\] the job has ended; (\d+) bytes of its stdout wait for .* Remedy: .*\n", waits)
    assert found, waits
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=10 * patience()) == 143
    _, out, err = job.finish()
    assert f"[zerorun] the job has ended; {found[1]} bytes of its stdout are lost, " in err
    assert len(out) + int(found[1]) == 500000


def test_after_a_signal_a_reader_that_takes_nothing_is_not_waited_for(start: Start) -> None:
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit())\nprint('x' * 499999, flush=True)\nnote(0)\n"
    job = start(script + "time.sleep(60)", "--nproc=1")
    job.pids(2)
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(timeout=15 * patience()) == 0
    _, out, err = job.finish()
    lost = re.search(r"(\d+) bytes of its stdout are lost", err)
    assert lost and len(out) + int(lost[1]) == 500000


def test_reader_that_leaves_does_not_end_the_job(start: Start) -> None:
    job = start("meet(0, 1)\nfor n in range(20000): print('x' * 50)\nopen(f'end{rank}', 'w').close()", "--nproc=2")
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(timeout=20 * patience()) == 0
    assert (job.folder / "end0").exists() and (job.folder / "end1").exists()


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_streams_that_are_closed_are_those_of_a_daemon(start: Start, closed: tuple[int, ...]) -> None:
    """The job's own pipes would get their numbers, and it never ended."""
    script = "meet(0, 1)\nprint('out', rank)\nprint('err', rank, file=sys.stderr)"
    job = start(script, "--nproc=2", preexec_fn=lambda: [os.close(fd) for fd in closed])
    code, out, err = job.finish()
    assert code == 0
    assert sorted(out.splitlines()) == ([] if 1 in closed else ["[rank 1] out 1", "out 0"])
    assert sorted(err.splitlines()) == ([] if 2 in closed else ["[rank 1] err 1", "err 0"])


def test_output_that_a_full_disk_does_not_take_is_told(start: Start) -> None:
    with open("/dev/full", "wb") as full:
        job = start("print('x' * 10)", "--nproc=1", stdout=full)
        err = job.process.communicate(timeout=20 * patience())[1].decode()
    lost = "[zerorun] 11 bytes of the job's stdout are lost: No space left on device. Remedy: --log-dir keeps all output.\n"
    assert (job.process.returncode, err) == (0, lost)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--local-ranks-filter=2,5", "--local-ranks-filter 2,5: no host has such a rank"),
        ("--steps=4", "--steps: how many a trace has, and none is asked for"),
    ],
)
def test_options_that_would_do_nothing(start: Start, option: str, told: str) -> None:
    code, out, err = start("note(0)", "--nproc=2", option).finish()
    assert (code, out) == (2, "")
    assert told in err and "Remedy" in err


def test_log_files_hold_each_stream(start: Start) -> None:
    script = "print('out', rank, end='\\rx')\nprint('err', rank, file=sys.stderr)"
    job = start(script, "--nproc=2", "--log-dir=deep/logs")
    assert job.finish()[0] == 0
    logs = job.folder / "deep" / "logs"
    assert {path.name: path.read_bytes() for path in logs.iterdir()} == {
        "rank0.stdout.log": b"out 0\rx", "rank0.stderr.log": b"err 0\n",
        "rank1.stdout.log": b"out 1\rx", "rank1.stderr.log": b"err 1\n",
    }  # fmt: skip


# Ports and refusals


def test_busy_port_is_named(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = start("", f"--master-port={port}")
        code, _, err = job.finish()
    assert code == 2
    assert f"master port {port}: it is already in use" in err
    assert not (job.folder / "pids").exists()


def test_concurrent_jobs_get_ports_that_rank_0_can_use(start: Start, tmp_path: Path) -> None:
    script = """
        import socket
        port = int(os.environ["MASTER_PORT"])
        print(f"port {port}")
        if rank == 0:
            with socket.create_server(("127.0.0.1", port)) as server:
                server.settimeout(10)
                server.accept()[0].sendall(b"welcome")
        for _ in range(1000 * rank):
            try:
                with socket.create_connection(("127.0.0.1", port)) as peer:
                    print(peer.recv(10))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        """
    jobs = []
    for index in range(5):
        folder = tmp_path / str(index)
        folder.mkdir()
        jobs.append(start(script, "--nproc=2", folder=folder))
    ports = set()
    for job in jobs:
        code, out, err = job.finish()
        assert code == 0, err
        assert "[rank 1] b'welcome'" in out
        ports |= set(re.findall(r"port (\d+)", out))
    assert len(ports) == 5


def test_program_that_cannot_be_started(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc=2", "--no-python", "./nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=10 * patience(), check=False)
    assert done.returncode == 2
    assert "rank 0: cannot start './nowhere': No such file or directory" in done.stderr


def test_module_and_program(start: Start) -> None:
    job = start("print('module', rank)")
    job.finish()
    for options, target in ((["-m"], ["train"]), (["--no-python"], ["sh", "-c", 'echo module "$RANK"'])):
        command = [sys.executable, "-m", "zerorun.launcher.cli", "--nproc=1", *options, *target]
        done = subprocess.run(command, cwd=job.folder, capture_output=True, text=True, timeout=10 * patience(), check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "module 0\n", "")


# What else may be around


def test_closed_stderr(start: Start) -> None:
    job = start("print('ran')")
    job.finish()
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m zerorun.launcher.cli train.py 2>&-"], cwd=job.folder,
                          capture_output=True, text=True, timeout=20 * patience(), check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ran\n")


def test_children_that_it_did_not_start_are_left_alone(start: Start) -> None:
    job = start("")
    job.finish()
    script = f"sleep 60 > /dev/null & echo $! > sleeper; exec {sys.executable} -m zerorun.launcher.cli train.py"
    done = subprocess.run(["bash", "-c", script], cwd=job.folder, timeout=20 * patience(), check=False)
    sleeper = int((job.folder / "sleeper").read_text())
    assert done.returncode == 0 and alive(sleeper)
    os.kill(sleeper, signal.SIGKILL)


def test_daemons_of_workers_do_not_outlive_a_killed_launcher(start: Start) -> None:
    daemon = "if os.fork() == 0:\n    os.setsid()\n    if os.fork():\n        os._exit(0)\n    note(os.getpid())\n"
    job = start(daemon + "time.sleep(60)\n")
    pids = job.pids(2)
    job.process.kill()
    assert_gone(pids, 5)


def test_log_that_cannot_be_opened(start: Start, tmp_path: Path) -> None:
    (tmp_path / "logs" / "rank0.stderr.log").mkdir(parents=True)
    code, _, err = start("", "--log-dir=logs").finish()
    assert code == 2 and "cannot start workers: [Errno 21] Is a directory" in err


@pytest.mark.parametrize("planted", ("link", "fifo"))
def test_log_that_somebody_has_planted_is_not_followed(start: Start, tmp_path: Path, planted: str) -> None:
    (tmp_path / "logs").mkdir()
    log, thesis = tmp_path / "logs" / "rank0.stdout.log", tmp_path / "thesis.txt"
    thesis.write_text("chapter 1\n")
    if planted == "link":
        log.symlink_to(thesis)
    else:
        os.mkfifo(log)
    code, _, err = start("print('overwritten')", "--log-dir=logs").finish(10)
    words = "a symbolic link" if planted == "link" else "no regular file"
    assert code == 2 and f"--log-dir: logs/rank0.stdout.log is {words}. Remedy: " in err
    assert thesis.read_text() == "chapter 1\n" and not (tmp_path / "pids").exists()


def test_terminal_that_nobody_reads_does_not_stop_the_launcher(start: Start) -> None:
    master, slave = pty.openpty()
    script = "for _ in range(3000): os.write(1, b'x' * 99 + b'\\n')\nnote(1)\nmeet(0, 1)\nsys.exit(3 * rank)\n"
    job = start(script, "--nproc=2", "--tee=3", stdout=slave, stderr=subprocess.DEVNULL)
    job.pids(2)
    time.sleep(0.5)
    os.kill(job.process.pid, signal.SIGTERM)  # it must hear this although its terminal is stuck
    assert job.process.wait(15) in (3, 143)
    os.close(master)
    os.close(slave)


# Workers that end well before the others


def test_a_worker_that_ended_well_while_others_go_on_is_named_once(start: Start) -> None:
    script = "if rank in (0, 2): time.sleep(2.5)\nif rank == 2: raise RuntimeError('Broken pipe')\n"
    code, _, err = start(script, "--nproc=3", hurried="run_outcome.EARLY_SECONDS = 0.3").finish(30)
    assert code == 1
    note = r"\[zerorun\] rank 1 ended with exit code 0 \d s ago; ranks 0, 2 still run, and will fail if waiting for it\. "
    assert len(re.findall(note, err)) == 1, err
    assert re.search(r"zerorun: rank 1 ended with exit code 0, .* s after the start; others were waiting for it\n", err)
    assert "rank 2 failed first because of it" in err


def test_workers_that_end_well_one_after_the_other_are_left_alone(start: Start) -> None:
    assert start("time.sleep(0.5 * rank)", "--nproc=2").finish() == (0, "", "")
