"""Multi-rank tests on one machine: worker processes that have imported torch, kept for the whole test session.

    results = run_ranks(2, function, *args)

runs the top-level ``function`` on 2 ranks (gloo on CPU, one thread each, torch.distributed initialised) and returns
what each rank returned, by rank. Each call is a job with a process group of its own. If a rank raises, or does not
answer in time, one AssertionError shows what every rank did, with the stacks of those that hang, and the next job gets
new processes. A job that leaves something behind fails, too: see rank_process.py.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from forked_scripts import ALONE, ForkedScripts, RunningScript, start_server

TESTS = Path(__file__).parent
DEFAULT_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 120.0  # importing torch
_GRACE_S = 5.0  # for the other ranks, after one has failed
_STACK_S = 2.0  # for faulthandler to write
# Ranks have these where the tests have the library: it takes a second and a half, and there are two dozen of them.
_LIBRARIES = ("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")


def patience() -> float:
    """How many times as long as on an idle machine things may take now: by what runs, and has run for a minute."""
    with open("/proc/loadavg") as file:
        minute, *_, running = file.read().replace("/", " ").split()[:4]
    return 1.0 + 2.0 * max(float(minute), float(running)) / (os.cpu_count() or 1)


def device() -> str:
    """That of the ranks, as ZERORUN_DEVICE has it: the CPU, unless $ZERORUN_TEST_DEVICE says "simulated" or "cuda:0"."""
    return os.environ.get("ZERORUN_TEST_DEVICE", "cpu")


@dataclass(frozen=True)
class Job:
    """A call of ``function``, a dotted name in ``module`` (of ``file``), on ``world_size`` ranks; ``args`` are pickled."""

    number: int
    world_size: int
    module: str
    file: str
    function: str
    args: bytes
    test: str  # that it belongs to

    @property
    def environment(self) -> dict[str, str]:
        """What a launcher would tell all ranks, and the test, by which a process that is left over is known."""
        return {
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",  # the group is made by the harness; nothing listens
            "ZERORUN_PEER_MEMORY": "0" if self.world_size == 3 else "1",  # so that both transports see every test
            "PYTEST_CURRENT_TEST": self.test,
        }


class Nursery:
    """The process that forks ranks: see rank_process.py."""

    def __init__(self, folder: str) -> None:
        names = ("SLURM_", "ZERORUN_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(names)}
        settings = {"RANK": "0", "LOCAL_RANK": "0", "ZERORUN_DEVICE": device(), "ZERORUN_ORDER_TIMEOUT_S": "15"}
        self._is_on_gpu = device().startswith("cuda")
        if self._is_on_gpu:  # libraries may use it as they are imported, and then no process that is forked could
            settings["ZERORUN_TEST_DEVICE"] = device()
        libraries = [name for name in _LIBRARIES if name.split(".")[0] in sys.modules and not self._is_on_gpu]
        file, environment = str(TESTS / "rank_process.py"), {**kept, **ALONE, **settings}
        self._control, self._process = start_server(file, environment, folder, *libraries, shares=not self._is_on_gpu)
        self._modules: set[str] = set()

    def has(self, module: str, file: str) -> bool:
        """Whether ranks have ``module`` from their start. If not, those that are started from now on will.

        It is imported once, with libraries that take seconds, and not by each rank.
        """
        if module in self._modules or self._is_on_gpu:
            return True
        self._modules.add(module)
        self._control.send(("load", module, file))
        return False

    def start(self, rank: int, pipe: Connection) -> RankProcess:
        """A new rank, at the other end of ``pipe``."""
        self._control.send(("rank", rank))
        send_handle(self._control, pipe.fileno(), self._process.pid)
        return RankProcess(self, self._control.recv())

    def ended(self, pid: int, *, wait: bool) -> int | None:
        """The exit code of a rank; None if it has not ended, and nobody is to wait for it."""
        self._control.send(("wait" if wait else "poll", pid))
        code: int | None = self._control.recv()
        return code

    def close(self) -> None:
        """End it, and all ranks that are left."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class RankProcess:
    """A rank, as far as the test process sees it."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ended(self.pid, wait=False)
        return self.returncode

    def wait(self) -> int:
        """The exit code, once it has ended."""
        if self.returncode is None:
            self.returncode = self._nursery.ended(self.pid, wait=True)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Unless it has ended. The number is nobody else's until ``poll`` or ``wait`` have told of it."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Pool:
    """Worker processes, one for each rank. Those of the first ranks serve every job, the others only larger ones."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="zerorun-ranks-")
        self._nursery: Nursery | None = None
        self._processes: dict[int, RankProcess] = {}  # by rank, and so the pipes
        self._pipes: dict[int, Connection] = {}
        self._jobs = 0

    def run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """What the ranks return. Raises AssertionError after ending their processes if any of them fails."""
        file = str(sys.modules[function.__module__].__file__)
        if self._nursery is None:
            self._nursery = Nursery(self.folder.name)
        if not self._nursery.has(function.__module__, file):
            self._end(list(self._processes))
        self._grow(world_size)
        self._jobs += 1
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        packed = pickle.dumps(args)
        job = Job(self._jobs, world_size, function.__module__, file, function.__qualname__, packed, test)
        what = f"{function.__qualname__}{_short(args)}"
        self._send(world_size, job)
        results = self._collect(range(world_size), timeout_s, what)
        self._send(world_size, None)  # all have returned: nobody needs the process group any more
        self._collect(range(world_size), timeout_s, f"{what} has returned; what is left behind")
        return results

    def _grow(self, world_size: int) -> None:
        assert self._nursery is not None
        self._end([rank for rank, process in self._processes.items() if process.poll() is not None])
        new = [rank for rank in range(world_size) if rank not in self._processes]
        for rank in new:
            ours, theirs = Pipe()
            self._pipes[rank] = ours
            self._processes[rank] = self._nursery.start(rank, theirs)
            theirs.close()
        self._collect(new, _START_TIMEOUT_S * patience(), "start")

    def _send(self, world_size: int, message: Job | None) -> None:
        packed = pickle.dumps(message)
        for rank in range(world_size):
            with contextlib.suppress(OSError):  # the worker is dead: _collect says so
                self._pipes[rank].send_bytes(packed)

    def _collect(self, ranks: Sequence[int], timeout_s: float, what: str) -> list[Any]:
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(ranks):
            waiting = {self._pipes[rank]: rank for rank in ranks if rank not in answers}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                answers[rank] = self._receive(rank)
                if answers[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + _GRACE_S * patience())
        if len(answers) == len(ranks) and all(kind == "ok" for kind, _ in answers.values()):
            return [answers[rank][1] for rank in ranks]
        report = self._describe(ranks, answers, timeout_s, what)
        self._end(ranks)
        raise AssertionError(report)

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            return "died", self._processes[rank].wait()
        return answer

    def _describe(self, ranks: Sequence[int], answers: dict[int, tuple[str, Any]], timeout_s: float, what: str) -> str:
        stacks = self._stacks([rank for rank in ranks if rank not in answers])
        parts = [f"{what} failed on {len(ranks)} ranks"]
        for rank in ranks:
            kind, value = answers.get(rank, ("hung", None))
            if kind == "ok":
                parts.append(f"--- rank {rank}: returned")
            elif kind == "error":
                parts.append(f"--- rank {rank}: raised\n{value}")
            elif kind == "died":
                parts.append(f"--- rank {rank}: process ended with code {value}")
            else:
                after = "after another rank had failed" if answers else f"within {timeout_s:g} s"
                parts.append(f"--- rank {rank}: did not answer {after}; its stacks:\n{stacks[rank]}")
        return "\n".join(parts)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        for rank in ranks:
            self._processes[rank].send_signal(signal.SIGUSR1)
        if ranks:
            time.sleep(_STACK_S)
        return {rank: stack_file(self.folder.name, rank).read_text() or "(none)" for rank in ranks}

    def close(self) -> None:
        """End all processes; the next job starts new ones. Safe to call twice."""
        self._end(list(self._processes))
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None
        for left in Path(self.folder.name).iterdir():
            left.unlink()

    def _end(self, ranks: Sequence[int]) -> None:
        ended = [self._processes.pop(rank) for rank in ranks]
        for rank, process in zip(ranks, ended, strict=True):
            self._pipes.pop(rank).close()
            process.kill()
        for process in ended:
            process.wait()


def tensor_of(content: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    """A tensor as a rank has sent it: its elements in order."""
    import torch

    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape) if content else torch.empty(shape, dtype=dtype)


def stack_file(folder: str, rank: int) -> Path:
    """Where a rank that is asked for its stacks writes them."""
    return Path(folder) / f"stacks-{rank}"


def _short(args: tuple[Any, ...]) -> str:
    text = repr(args)
    return text if len(text) < 300 else text[:300] + "..."


of_this_job: dict[Any, Any] = {}  # in a rank: what its functions share; emptied when the job ends
_pool: list[Pool] = []  # at most one


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
    """What ``function(*args)`` returns on each of ``world_size`` ranks, by rank.

    ``function`` must be at the top level of its module, and ``args`` and its result picklable. ``timeout_s`` is for an
    idle machine.
    """
    if not _pool:
        _pool.append(Pool())
    return _pool[0].run(world_size, function, args, (timeout_s or DEFAULT_TIMEOUT_S) * patience())


def close_pool() -> None:
    """End all workers, and whoever forks scripts."""
    while _pool:
        pool = _pool.pop()
        pool.close()
        pool.folder.cleanup()
    while _scripts:
        _scripts.pop().close()


atexit.register(close_pool)


# -- scripts without a launcher --------------------------------------------------------------------------------------

_scripts: list[ForkedScripts] = []  # at most one


def start_script(text: str, *arguments: str, modules: Sequence[str] = (), **variables: str) -> RunningScript:
    """A program on one rank, which may import zerorun. ``variables``: of its environment.

    It has been imported before: of its variables, only ZERORUN_ORDER_TIMEOUT_S is read then. ``modules``: what several
    ranks, or programs, need not import each.
    """
    if not _scripts:
        _scripts.append(ForkedScripts("torch", "torch._dynamo", "zerorun.engine.initialize", shares=True))
    if modules:
        _scripts[0].load(*modules)
    return _scripts[0].start(text, {**os.environ, "ZERORUN_DEVICE": "cpu", **variables}, arguments)


@contextlib.contextmanager
def start_ranks(
    world_size: int, text: str, *arguments: str, modules: Sequence[str] = (), **variables: str
) -> Iterator[list[RunningScript]]:
    """The same program on each rank, without a launcher that would end one for the other. It ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables}
    scripts: list[RunningScript] = []
    try:
        for rank in range(world_size):
            more = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            scripts.append(start_script(text, *arguments, modules=modules, **more))
        yield scripts
    finally:
        for script in scripts:
            script.end()


def fork_program(
    ranks: int, script: str, *arguments: str, folder: Path, modules: Sequence[str] = (), **variables: str
) -> str:
    """What the first of ``ranks`` processes writes to stdout that are forked to run the file ``script`` in ``folder``.

    Fails unless all end with 0 and without a traceback. ``modules``: as for ``start_script``.
    """
    text = f"""
import os, runpy, sys
os.chdir({str(folder)!r})
sys.argv[0], sys.path[0] = {script!r}, {str(Path(script).parent)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    with start_ranks(ranks, text, *arguments, modules=modules, OMP_NUM_THREADS="1", **variables) as scripts:
        ended = [started.finish(120 * patience()) for started in scripts]
    for code, out, errors in ended:
        assert code == 0, f"exit code {code}\n{out}\n{errors}"
        assert "Traceback" not in errors
    return ended[0][1]
