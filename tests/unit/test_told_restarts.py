"""Restarts: which make sense, what they cost, and how the launcher carries that out, by scripts without torch."""

from __future__ import annotations

import contextlib
import os
import py_compile
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from harness import patience

from zerorun.launcher.event_loop import dispatch
from zerorun.launcher.failures import WorkerEnd, fails_again
from zerorun.launcher.remote import RemoteNode
from zerorun.launcher.restarts import Attempt, Restarts
from zerorun.launcher.spare_hosts import ANSWER_S, FIRST_S, HostPlaces, Returning
from zerorun.watch.board import RankProgress

# As an engine writes it: the checkpoint's step, then a step.
TRAINS = """\
import os, sys, time
from zerorun.watch.board import board, show_board
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def train(first, last):
    show_board()
    if first: board.note_load(time.monotonic_ns(), first)
    for step in range(first, last):
        time.sleep(0.05)
        board.end_batch(step + 1, step + 1, over=True)
"""


def launch(folder: Path, script: str, *options: str, seconds: float = 30) -> tuple[int, str]:
    """(exit status, stderr) of a job of one worker."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "zerorun.launcher.cli", *options, "train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds * patience(), check=False)
    return done.returncode, done.stderr


def progress(step: int, *, at: float, began: float, loaded: int | None = None) -> dict[int, RankProgress]:
    return {0: RankProgress(step, at, shown=began - 3, met=began - 2, began=began, load_s=0.5, loaded=loaded)}


def test_what_a_restart_has_cost_is_told_once() -> None:
    """Four seconds of the nine are repeated steps: 56 and 57, at 0.5 s each, are one of them."""
    said: list[str] = []
    restarts = Restarts(3, said.append)
    lost = Attempt(begun=0.0, failed=100.0, noticed=106.0, ended=107.0, cause="host node1: gone", hopeless=False)
    restarts.end(lost, progress(57, at=100.0, began=44.0))
    restarts.look(110.0, {})
    restarts.look(110.0, progress(57, at=116.5, began=116.0, loaded=55))
    assert not said
    for step in (58, 59):
        restarts.look(110.0, progress(step, at=117.0 + 0.5 * (step - 58), began=116.0, loaded=55))
    assert said == [
        "[zerorun] back at step 57 after 16.5 s, 2 steps repeated: detect 6.0, end 1.0, regroup 3.0, start 3.0, rendezvous "
        "1.0, load 0.5, build 1.0, repeat 1.0"
    ]


def test_goodput_is_the_share_of_new_steps() -> None:
    restarts = Restarts(1, lambda text: None)
    restarts.end(Attempt(0.0, 60.0, 60.0, 61.0, "", False), progress(50, at=60.0, began=11.0))  # 1 s a step
    restarts.end(Attempt(65.0, 111.0, 111.0, 111.0, "", False), progress(75, at=111.0, began=72.0, loaded=35))
    assert restarts.goodput() == "goodput 67.6%: 75.0 s of 111.0 s went into 75 steps, 1 restart"


def test_steps_of_an_earlier_job_are_none_of_this_one() -> None:
    restarts = Restarts(1, lambda text: None)
    restarts.end(Attempt(0.0, 61.0, 61.0, 61.0, "", False), progress(1050, at=61.0, began=12.0, loaded=1000))
    assert restarts.goodput() == "goodput 82.0%: 50.0 s of 61.0 s went into 50 steps, no restart"


def test_goodput_is_not_more_than_all_of_the_time() -> None:
    """The first step was over 1.5 s after the load, and later ones took 10 s each: it counts as 1.5 s."""
    restarts = Restarts(1, lambda text: None)
    restarts.end(Attempt(8.0, 500.0, 500.0, 500.0, "", False), progress(50, at=500.0, began=10.0))
    assert restarts.goodput() == "goodput 99.9%: 491.5 s of 492.0 s went into 50 steps, no restart"


@pytest.mark.parametrize(
    ("code", "line", "seconds", "seen", "again"),
    [
        (1, "ModuleNotFoundError: No module named 'nothing'", 2.0, False, True),
        (1, "zerorun.errors.ConfigError: stage: 7", 2.0, True, True),
        (1, "zerorun.errors.ConfigError: stage: 7", 900.0, True, True),
        (1, "FileNotFoundError: [Errno 2] No such file or directory: 'data'", 900.0, False, False),  # it may have trained
        (2, "train.py: error: unrecognized arguments: --epoch", 1.0, False, True),
        (1, "RuntimeError: connection reset", 2.0, True, False),
        (1, "torch.OutOfMemoryError: CUDA out of memory", 2.0, True, False),
        (-9, "", 2.0, False, False),
    ],
)
def test_which_failures_another_start_repeats(code: int, line: str, seconds: float, seen: bool, again: bool) -> None:
    assert fails_again(WorkerEnd(0, code, seconds, [line], asked_to_stop=False), seen=seen) == again


def test_a_failure_at_the_start_is_final(tmp_path: Path) -> None:
    code, err = launch(tmp_path, "import nothing_of_this_name\n", "--max-restarts=5")
    assert code == 1 and err.count("failed first") == 1, err
    assert "[zerorun] no restart: it has failed at its start, and would do so again" in err


def test_the_same_failure_after_steps_is_not_final(tmp_path: Path) -> None:
    script = TRAINS + "train(2 * attempt, 2 * attempt + 2)\nif attempt == 0: import nothing_of_this_name\n"
    code, err = launch(tmp_path, script, "--max-restarts=5")
    assert code == 0 and "restart 1 of 5" in err, err
    assert "back at step 2 after" in err and "0 steps repeated" in err
    assert "went into 4 steps, 1 restart" in err


def test_three_restarts_without_a_new_step_end_the_job(tmp_path: Path) -> None:
    """Steps that are only repeated count for nothing; a restart that makes a new one begins the count anew."""
    script = TRAINS + (
        "train(*{0: (0, 3), 1: (1, 3), 2: (1, 3), 3: (1, 5)}.get(attempt, (4, 5)))\n"
        "if attempt == 5: os.kill(os.getpid(), 9)\n"
        "raise ValueError(f'sample {attempt}')\n"
    )
    code, err = launch(tmp_path, script, "--max-restarts=9", seconds=60)
    assert code == 1 and err.count("failed first") == 7, err
    table = err[err.index("no restart:") :].splitlines()
    assert table[0] == "no restart: 3 restarts in a row have made no step that was not made before"
    assert [line.split()[0] for line in table[1:9]] == ["start", *"0123456"]
    assert table[2].endswith("1 to 3  rank 0: ValueError: sample 0")
    assert table[5].endswith("2 to 5  rank 0: ValueError: sample 3")
    assert "rank 0: killed by SIGKILL" in table[7]


def test_short_starts_of_scripts_that_zerorun_does_not_see_are_in_vain(tmp_path: Path) -> None:
    code, err = launch(tmp_path, "raise RuntimeError('always')\n", "--max-restarts=9")
    assert code == 1 and err.count("failed first") == 4, err


def test_survivors_of_a_job_that_begins_again_have_no_grace(tmp_path: Path) -> None:
    script = (
        "import os, signal, time\nrank, attempt = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif attempt == '0': time.sleep(0 if rank == '1' else 100)\n"
        "if rank == '1' and attempt == '0': raise RuntimeError\n"
    )
    options = ("--max-restarts=1", "--nproc-per-node=2", "--grace=200")
    code, err = launch(tmp_path, script, *options, seconds=20)
    assert code == 0, err


@pytest.mark.parametrize("number", (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM))
def test_workers_that_were_told_by_the_launcher_are_not_started_again_here(tmp_path: Path, number: int) -> None:
    """A scheduler has told it, and will take the machine away."""
    (tmp_path / "train.py").write_text(
        "import signal, sys, time\n"
        f"signal.signal({number}, lambda *_: sys.exit(75))\nprint('ready', flush=True)\ntime.sleep(30)\n"
    )
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--max-restarts=3", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        job.send_signal(number)
        out, err = job.communicate(timeout=20 * patience())
    assert job.returncode == 75 and not out, err
    assert number == signal.SIGTERM or "no restart: the launcher has passed on a signal" in err


def test_a_signal_waits_for_workers_that_do_not_listen_yet(tmp_path: Path) -> None:
    """While they import, and while none is there: it reaches the next ones, and no restart goes by for it."""
    (tmp_path / "train.py").write_text(
        "import os, signal, sys, time\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('here', flush=True)\nwhile not os.path.exists('told'): time.sleep(0.01)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\ntime.sleep(30)\n"
    )
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--max-restarts=3", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "here\n"
        job.send_signal(signal.SIGUSR1)
        assert job.stderr is not None
        first = job.stderr.readline()
        (tmp_path / "told").touch()
        try:
            out, err = job.communicate(timeout=10 * patience())
        finally:
            job.kill()
    assert "SIGUSR1 is kept for rank 0" in first
    assert job.returncode == 75 and not out and "restart 1" not in err, err


def test_a_signal_between_two_starts_reaches_the_second(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, signal, sys, time\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise ValueError\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\ntime.sleep(30)\n"
    )
    text = """
import signal, sys
from zerorun.launcher.cli import main
from zerorun.launcher.job import Job
regroup = Job._regroup
def told_meanwhile(job, restart):
    job.on_signal(signal.SIGUSR1)
    return regroup(job, restart)
Job._regroup = told_meanwhile
sys.exit(main(["--max-restarts=3", "train.py"]))
"""
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20 * patience(), check=False)
    assert done.returncode == 75 and "restart 2" not in done.stderr, done.stderr


def test_a_signal_that_is_kept_for_a_worker_that_fails_is_for_the_next_of_its_rank(tmp_path: Path) -> None:
    """Those of ranks whose workers have got it do not get it again."""
    (tmp_path / "train.py").write_text(
        "import os, signal, sys, time\n"
        "attempt, rank = (int(os.environ[name]) for name in ('TORCHELASTIC_RESTART_COUNT', 'RANK'))\n"
        "def say(what): os.write(1, f'{what} {attempt} {rank}\\n'.encode())\n"
        "def told(*_):\n    say('told')\n    if attempt: sys.exit(75)\n"
        "if attempt or not rank: signal.signal(signal.SIGUSR1, told)\n"
        "say('here')\nwhile not os.path.exists('told'): time.sleep(0.01)\n"
        "if not attempt and rank: raise ValueError\ntime.sleep(30)\n"
    )
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--max-restarts=3", "--nproc-per-node=2", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stderr is not None
        begun = sorted(job.stdout.readline() for _ in range(2))
        job.send_signal(signal.SIGUSR1)
        first = job.stderr.readline()
        (tmp_path / "told").touch()
        try:
            out, err = job.communicate(timeout=20 * patience())
        finally:
            job.kill()
    assert begun == ["[rank 1] here 0 1\n", "here 0 0\n"] and "SIGUSR1 is kept for rank 1," in first
    assert job.returncode == 75 and "restart 1 of 3" in err and "restart 2" not in err, err
    assert [line for line in out.splitlines() if "told" in line] in (
        ["told 0 0", "[rank 1] told 1 1"],
        ["[rank 1] told 1 1", "told 0 0"],
    )


def test_a_signal_while_a_failed_round_ends_reaches_the_next_workers_once(tmp_path: Path) -> None:
    """Also those of a rank that was still running, for which it is kept, too."""
    (tmp_path / "train.py").write_text(
        "import os, signal, sys, time\n"
        "attempt, rank = (int(os.environ[name]) for name in ('TORCHELASTIC_RESTART_COUNT', 'RANK'))\n"
        "def told(*_): os.write(1, f'told {attempt} {rank}\\n'.encode())\n"
        "if not attempt and not rank: raise ValueError\n"
        "if attempt: signal.signal(signal.SIGUSR1, told)\n"
        "time.sleep(2 if attempt else 30)\nsys.exit(75)\n"
    )
    text = """
import signal, sys
from zerorun.launcher.cli import main
from zerorun.launcher.job import Job
on_end, told = Job.on_end, []
def told_then(job, rank, returncode, *rest):
    on_end(job, rank, returncode, *rest)
    if not told:
        told.append(job.on_signal(signal.SIGUSR1))
Job.on_end = told_then
sys.exit(main(["--max-restarts=3", "--nproc-per-node=2", "train.py"]))
"""
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30 * patience(), check=False)
    assert done.returncode == 75 and "restart 1 of 3" in done.stderr and "restart 2" not in done.stderr, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 1] told 1 1", "told 1 0"]


def test_workers_that_ask_by_themselves_are_started_again_here(tmp_path: Path) -> None:
    script = TRAINS + "train(attempt, attempt + 1)\nsys.exit(75 * (attempt == 0))\n"
    code, err = launch(tmp_path, script, "--max-restarts=3")
    assert code == 0 and "restart 1 of 3" in err, err


def test_spares_take_the_places_of_the_lost() -> None:
    """The ranks of the others stay where they are. A lost host is in reserve when it is back."""
    places = HostPlaces(["a", "b", "c", "d", "e"], 2)
    assert places.fill("abcde") == [] and places.missing("abc") == []
    assert places.fill("acde") == [("b", "d")] and places.names == ["a", "d", "c"]
    assert places.fill("ac") == [] and places.missing("ac") == ["d", "b", "e"]
    assert places.fill("abc") == [("d", "b")] and places.names == ["a", "b", "c"] and places.reserve == ["d", "e"]


class Deaf:
    """A listener for hosts that say nothing but that they are there."""

    hangs = None

    def ignore(self, *_: object) -> None: ...

    on_note = on_signal = on_end = on_empty = on_output = ignore


def test_lost_hosts_are_tried_until_they_are_back(tmp_path: Path) -> None:
    """Each time later than before. One that cannot take part is told nothing, and no carrier is left."""
    selector, carriers = selectors.DefaultSelector(), {"down": ["false"], "old": AGENT, "back": ["false"]}
    tried: list[str] = []

    def connect(name: str) -> RemoteNode:
        tried.append(name)
        node = RemoteNode(name, selector, Deaf(), lambda _: None)  # type: ignore[arg-type]
        node.open(carriers[name])
        return node

    about = {"cwd": str(tmp_path), "env": {}, "script": None, "log_dir": None, "grace": 0.1}
    returning = Returning(connect, lambda node: ["another version"] if node.name == "old" else [], lambda: about)

    def look(at: float) -> list[str]:
        """Which are ready, after whoever has connected at the moment ``at`` has answered or ended."""
        ready = returning.tick(at, list(carriers))
        while returning.nodes:
            dispatch(selector, 0.05)
            for node in returning.nodes:
                node.tick(time.monotonic())
            ready += returning.tick(at, [])
        for node in ready:
            node.leave(0)
            wait_until(lambda node=node: node.gone)  # type: ignore[misc]
            node.close()
        return [node.name for node in ready]

    assert look(0.0) == [] and tried == []
    assert look(FIRST_S) == [] and tried == ["down", "old", "back"]
    carriers["back"] = AGENT
    assert look(2.5 * FIRST_S) == [] and len(tried) == 3
    assert look(3 * FIRST_S) == ["back"] and len(tried) == 6
    del carriers["back"]
    assert look(6.5 * FIRST_S) == [] and len(tried) == 6
    assert look(7 * FIRST_S) == [] and len(tried) == 8
    assert not selector.get_map()


def test_a_host_that_does_not_answer_is_given_up_and_tried_again_each_minute_at_last() -> None:
    selector, tried = selectors.DefaultSelector(), []

    def connect(name: str) -> RemoteNode:
        node = RemoteNode(name, selector, Deaf(), lambda _: None)  # type: ignore[arg-type]
        node.open(["sleep", "100"])
        tried.append(now)
        return node

    returning = Returning(connect, lambda node: [], dict)
    now = 0.0
    while len(tried) < 9:
        assert returning.tick(now, ["deaf"]) == []
        assert len(returning.nodes) <= 1 and now < 600.0
        now += 1.0
    pauses = [later - before - ANSWER_S for before, later in pairwise(tried)]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    returning.give_up(["deaf"])
    assert not returning.nodes and not selector.get_map()


AGENT = [sys.executable, "-m", "zerorun.launcher.agent"]

KEEPS = """\
import os, sys, time
folder = os.environ["ZERORUN_KEEPER"]
open(f"{folder}/copy", "w").close()
print(folder, os.getppid(), flush=True)
time.sleep(100)
"""


def keeper_of(supervisor: int) -> int:
    """The keeper among the children of a process; 0 if there is none."""
    for child in psutil.Process(supervisor).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            if child.name() == "zerorun-keeper":
                return child.pid
    return 0


@pytest.mark.parametrize("end", (signal.SIGKILL, signal.SIGTERM))
def test_keepers_leave_nothing_in_memory_whatever_the_end(tmp_path: Path, end: int) -> None:
    """Also if the keeper was killed before: it is replaced, and what it keeps stays."""
    (tmp_path / "train.py").write_text(KEEPS)
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--max-restarts=1", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as job:
        assert job.stdout is not None
        folder, supervisor = job.stdout.readline().split()
        first = keeper_of(int(supervisor))
        assert first
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: keeper_of(int(supervisor)) not in (0, first))
        assert os.listdir(folder) == ["copy"]
        os.kill(job.pid, end)
        wait_until(lambda: not os.path.exists(folder))


def test_a_keeper_ends_with_a_supervisor_of_many_hosts() -> None:
    """Which has a line to each, so that what it has opened for its keeper has great numbers."""
    text = """
import os, resource, signal
from zerorun.launcher.copy_keeper import Keeper
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
for _ in range(1100):
    os.open("/dev/null", os.O_RDONLY)
print(*Keeper().begin().values(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == -9 and done.stdout, done.stderr
    wait_until(lambda: not os.path.exists(done.stdout.strip()))


def test_what_nobody_could_empty_is_emptied_by_the_next_job(tmp_path: Path) -> None:
    """A supervisor and its keeper are killed at once, while another job goes on."""
    (tmp_path / "train.py").write_text(KEEPS)
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--max-restarts=1", "train.py"]
    how = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with contextlib.ExitStack() as stack:
        folders = []
        for number in range(3):
            job = stack.enter_context(subprocess.Popen(command, **how))
            stack.callback(job.kill)
            assert job.stdout is not None
            folder, supervisor = job.stdout.readline().split()
            folders.append(folder)
            if number == 0:
                keeper = keeper_of(int(supervisor))
                os.kill(int(supervisor), signal.SIGSTOP)  # so that it does not replace its keeper
                os.kill(keeper, signal.SIGKILL)
                os.kill(int(supervisor), signal.SIGKILL)
                time.sleep(4)  # as long as keepers take
                assert os.listdir(folder) == ["copy"]
            if number == 1:
                assert not os.path.exists(folders[0])
        assert all(os.listdir(folder) == ["copy"] for folder in folders[1:])
    wait_until(lambda: not any(map(os.path.exists, folders)))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10 * patience()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


WARM = (
    """\
import os, pickle, sys
import multiprocessing
class Kept: pass
assert pickle.loads(pickle.dumps(Kept())).__class__ is Kept and sys.modules["__main__"].Kept is Kept
print("ARGV", sys.argv, __file__, __name__, sys.path[0] == os.path.dirname(os.path.abspath(__file__)), flush=True)
print("ENV", sorted(set(os.environ) - {"ZERORUN_BOARD"}), os.environ.get("PYTHONSAFEPATH"), flush=True)
imported = "torch" in sys.modules
"""
    + TRAINS
)


# What a main module sees of itself and of Python, in lines.
LOOK = """\
import os, sys
def scaled(loss: float) -> int: ...
kept: list[int] = []
print("ANNOTATIONS", scaled.__annotations__, __annotations__)
print("GIVEN", sys.argv, sys.orig_argv, sys.path, sep="\\n")
assert sys.modules["__main__"].__dict__ is globals()
for name, value in sorted(globals().items()):
    print(name, value if isinstance(value, str) else type(value))
if __spec__ is not None:
    print(__spec__.name, __spec__.origin, __spec__.parent)
print(getattr(__loader__, "path", getattr(__loader__, "archive", "")), sys._getframe().f_code.co_filename)
"""
RUN = "import sys; from zerorun.launcher.warm_workers import run_as_main; run_as_main(sys.argv[1:])"


def what_python_runs(folder: Path, kind: str) -> list[str]:
    """Arguments of Python that run LOOK, all in folders below ``folder``. It is to be run in ``folder / "here"``."""
    here, there = folder / "here", folder / "there"
    for place in (here / "package", there):
        place.mkdir(parents=True)
    for path in (there / "script.py", here / "package" / "__main__.py"):
        path.write_text(LOOK)
    match kind:
        case "link":
            (here / "train.py").symlink_to("../there/script.py")
            return ["train.py"]
        case "elsewhere":
            return ["../there/script.py"]
        case "compiled":
            py_compile.compile(str(there / "script.py"), str(here / "script.pyc"))
            return ["script.pyc"]
        case "archive":
            shutil.make_archive(str(here / "train"), "zip", here / "package")
            return ["train.zip"]
        case "module":
            return ["-m", "package"]
    return ["package"]


@pytest.mark.parametrize("safe", ("", "1"))
@pytest.mark.parametrize("kind", ("link", "elsewhere", "compiled", "folder", "archive", "module"))
def test_a_worker_in_reserve_runs_the_script_as_python_does(tmp_path: Path, kind: str, safe: str) -> None:
    """PYTHONSAFEPATH is set while it imports, and afterwards as the user has it."""
    argv = [*what_python_runs(tmp_path, kind), "--one", "two"]
    as_is = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    how = {"cwd": tmp_path / "here", "capture_output": True, "text": True, "check": False}
    fresh = subprocess.run([sys.executable, "-u", *argv], env={**as_is, "PYTHONSAFEPATH": safe}, **how)
    begin = f"import os; os.environ['PYTHONSAFEPATH'] = '{safe}'; {RUN}"
    warm = subprocess.run([sys.executable, "-u", "-c", begin, *argv], env={**as_is, "PYTHONSAFEPATH": "1"}, **how)
    assert fresh.returncode == 0 or (kind == "module" and safe), fresh.stderr
    assert warm.returncode == fresh.returncode, warm.stderr
    assert warm.stdout.splitlines() == fresh.stdout.splitlines()


def test_a_worker_in_reserve_becomes_as_one_that_is_started(tmp_path: Path) -> None:
    """Of the first start only imports differ. Its exception is shown as Python shows it; a daemon ends with it."""
    script = WARM + (
        "print('IMPORTED', imported, flush=True)\n"
        "if attempt == 1: os.posix_spawnp('setsid', ['setsid', 'sleep', '61.5'], os.environ)\n"
        "train(attempt, attempt + 1)\nif attempt == 0: time.sleep(8)\n"
        "if attempt < 2: raise KeyError('of attempt', attempt)\n"
    )
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--spares=0", "--max-restarts=3", "train.py", "--one", "two"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60 * patience(), check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    told = [line for line in lines if line.startswith(("ARGV", "ENV"))]
    assert len(set(told)) == 2 and len(told) == 6, told
    assert [line for line in lines if line.startswith("IMPORTED")][:2] == ["IMPORTED False", "IMPORTED True"]
    assert "warm_workers.py" not in done.stderr and "runpy" not in done.stderr
    assert done.stderr.count("KeyError: ('of attempt', 1)") == 2  # by the worker, and in the report
    assert "61.5" not in subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout


@pytest.mark.nightly  # by day: test_a_worker_in_reserve_becomes_as_one_that_is_started
def test_who_is_needed_before_it_has_imported_leaves_an_heir(tmp_path: Path) -> None:
    """Processes of one origin have the same secret of hashes: attempt 1 has waited for that of attempts 1 to 3."""
    script = WARM + (
        "print('HASH', attempt, hash('zerorun'), flush=True)\n"
        "train(attempt, attempt + 1)\ntime.sleep(1.5)\n"
        "if attempt < 3: raise KeyError('of attempt', attempt)\n"
    )
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--spares=0", "--max-restarts=3", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60 * patience(), check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("HASH")]
    assert [attempt for attempt, _ in told] == ["0", "1", "2", "3"]
    assert len({found for _, found in told[1:]}) == 1 and told[0][1] != told[1][1], told
