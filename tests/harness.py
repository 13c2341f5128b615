"""Multi-rank tests on one machine: a pool of worker processes for each world size, kept for the whole test session.

    results = run_ranks(2, function, *args)

runs the top-level ``function`` on 2 ranks (gloo on CPU, one thread each, torch.distributed initialised) and returns
what each rank returned, by rank. If a rank raises, or does not answer in time, one AssertionError shows what every rank
did, with the stacks of those that hang, and the pool is replaced. A rank that returns while an engine is still alive
fails, too: ``engine.destroy()`` and the end of the function must have freed it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
DEFAULT_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 120.0  # importing torch on a busy machine
_GRACE_S = 5.0  # for the other ranks, after one has failed
_STACK_S = 2.0  # for faulthandler to write


# -- in the test process -----------------------------------------------------------------------------------------


class Pool:
    """``world_size`` worker processes in one process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="zerorun-ranks-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = Pipe()
            self._pipes.append(ours)
            self._processes.append(self._start(rank, theirs))
            theirs.close()
        self._collect(_START_TIMEOUT_S, "start")

    def _start(self, rank: int, pipe: Connection) -> subprocess.Popen[bytes]:
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "ZERORUN_"))},
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",  # the group is made from a file; nothing listens
            "OMP_NUM_THREADS": "1",
            "ZERORUN_DEVICE": "cpu",
            "ZERORUN_ORDER_TIMEOUT_S": "15",
            "ZERORUN_PEER_MEMORY": "0" if self.world_size == 3 else "1",  # so that both transports see every test
        }
        command = [sys.executable, __file__, str(pipe.fileno()), self._folder.name]
        return subprocess.Popen(command, env=env, pass_fds=[pipe.fileno()], stdin=subprocess.DEVNULL)

    def run(self, task: bytes, timeout_s: float, what: str) -> list[Any]:
        """Send ``task`` to all ranks. Raises AssertionError after closing the pool if any of them fails."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the worker is dead: _collect says so
                pipe.send_bytes(task)
        return self._collect(timeout_s, what)

    def _collect(self, timeout_s: float, what: str) -> list[Any]:
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.world_size:
            waiting = {self._pipes[rank]: rank for rank in range(self.world_size) if rank not in answers}
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                answers[rank] = self._receive(rank)
                if answers[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(answers) == self.world_size and all(kind == "ok" for kind, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.world_size)]
        report = self._describe(answers, timeout_s, what)
        self.close()
        raise AssertionError(report)

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            return "died", self._processes[rank].wait()
        return answer

    def _describe(self, answers: dict[int, tuple[str, Any]], timeout_s: float, what: str) -> str:
        hung = [rank for rank in range(self.world_size) if rank not in answers]
        stacks = self._stacks(hung)
        parts = [f"{what} failed on {self.world_size} ranks"]
        for rank in range(self.world_size):
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
        return {rank: _stack_file(self._folder.name, rank).read_text() or "(none)" for rank in ranks}

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._pipes, self._processes = [], []
        self._folder.cleanup()

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.poll() is None for process in self._processes)


_pools: dict[int, Pool] = {}


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
    """What ``function(*args)`` returns on each of ``world_size`` ranks, by rank.

    ``function`` must be at the top level of its module, and ``args`` and its result picklable.
    """
    pool = _pools.get(world_size)
    if pool is None or not pool.alive:
        if pool is not None:
            pool.close()
        pool = _pools[world_size] = Pool(world_size)
    file = sys.modules[function.__module__].__file__
    task = pickle.dumps((function.__module__, file, function.__qualname__, pickle.dumps(args)))
    return pool.run(task, timeout_s or DEFAULT_TIMEOUT_S, f"{function.__qualname__}{_short(args)}")


def start_two(script: Path, *args: str) -> list[subprocess.Popen[str]]:
    """Two ranks that run ``script``, without a launcher that would end one for the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ZERORUN_DEVICE": "cpu"}
    return [
        subprocess.Popen(
            [sys.executable, str(script), *args], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip


def _short(args: tuple[Any, ...]) -> str:
    text = repr(args)
    return text if len(text) < 300 else text[:300] + "..."


def close_pools() -> None:
    """End all workers."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


atexit.register(close_pools)


# -- in a worker -------------------------------------------------------------------------------------------------


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stacks-{rank}"


def _load(module_name: str, file: str) -> Any:
    """The module as the test process knows it, also if pytest put its folder on the path only there."""
    if module_name not in sys.modules:
        folder = str(Path(file).parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return sys.modules[module_name]


def _execute(task: bytes) -> Any:
    module_name, file, qualname, args = pickle.loads(task)
    value: Any = _load(module_name, file)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value(*pickle.loads(args))


def _check_leaks() -> None:
    """No engine may outlive its test: neither its communicator nor collectives in flight."""
    from zerorun import comm

    if comm._live:
        gc.collect()
    alive = len(comm._live)
    for communicator in list(comm._live):
        for pending in list(communicator.books.in_flight):
            pending.wait(1.0)
    comm._live.clear()
    assert not alive, f"{alive} engine(s) are still alive after the function has returned: destroy() does not free them"


def _serve(pipe: Connection, folder: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with _stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process, which then closes the pipe
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        _answer(pipe, ("ok", None))
        while True:
            try:
                task = pipe.recv_bytes()
            except EOFError:
                os._exit(0)
            try:
                answer = ("ok", _execute(task))
                _check_leaks()
            except BaseException:
                answer = ("error", traceback.format_exc())
            _answer(pipe, answer)


def _answer(pipe: Connection, answer: tuple[str, Any]) -> None:
    try:
        message = pickle.dumps(answer)
    except Exception:
        message = pickle.dumps(("error", f"the result cannot be pickled\n{traceback.format_exc()}"))
    pipe.send_bytes(message)


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    sys.modules["harness"] = sys.modules["__main__"]
    _serve(Connection(int(sys.argv[1])), sys.argv[2])
