"""Workers in reserve: processes that have imported PyTorch and zerorun, from which a worker is forked when it is needed.

    python -u -m zerorun.launcher.warm_workers SOCKET      SOCKET: an open file, a Unix socket

The supervisor of a host starts it.

To import takes longer than all else in a restart, and none of it depends on the rank. What does depend on the environment,
such as the number of threads, is there from the beginning; a worker with other such variables is started afresh. What is
forked is no child of the process that forks it, but of the supervisor, which adopts orphans.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from typing import IO, Any

from zerorun.watch.launch_environment import CHOSEN_INTERFACES, INTERFACE_NAMES

from .bootstrap import die_with, start_process
from .job_plan import WorkerCommand, full_environment

_SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # while it imports: nothing from the current folder
_MOST_FILES = 5
_NUMBER = 4  # bytes of what is said on the line: the number of a process, the length of an order
_ANSWER_S = 10.0
_IMPORTS = ("torch", "zerorun.engine.initialize")  # by this process alone: the launcher has no use for them
_FROZEN = ("<frozen runpy>", "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
_OWN_FILES = (__file__, runpy.__file__, *_FROZEN)
# They say which rank the worker is, and matter only when it runs.
_OF_A_RANK = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "CROSS_RANK"}
    | {"ROLE_RANK", "ROLE_WORLD_SIZE"}
    | {"CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"}
    | {CHOSEN_INTERFACES, *INTERFACE_NAMES}
)


class WarmWorker:
    """The supervisor's end of one. ``command``: that of the worker that it is for.

    Whoever is in reserve says its number when it has imported. If it was ordered before that, it becomes the worker itself,
    and leaves an heir, which is in reserve then.
    """

    def __init__(
        self, command: WorkerCommand, process: subprocess.Popen[bytes], line: socket.socket, given: Mapping[str, str]
    ) -> None:
        """``given``: its environment."""
        self.command, self._process, self._line, self._given = command, process, line, given
        self._pid = 0  # of what is ready
        self._gone = False
        self._worker = 0  # what it has become

    @property
    def pids(self) -> set[int]:
        """The processes in reserve. Those who are adopted have told of it before."""
        own = set() if self._worker == self._process.pid else {self._process.pid}
        return own | ({self._pid} if self._pid not in (0, self._worker) else set())

    def look(self) -> None:
        """Read what it has said."""
        self._line.settimeout(0.0)
        with contextlib.suppress(OSError):
            while said := self._line.recv(_NUMBER):
                self._pid = int.from_bytes(said, "little")
            self._gone = True

    def suits(self, command: WorkerCommand) -> bool:
        """True if there can be a worker of it for ``command``."""
        self.look()
        own = self.command
        same = own.argv == command.argv and own.cores == command.cores and own.local_rank == command.local_rank
        return same and _fixed(own.env) == _fixed(command.env) and not self._gone

    def become(
        self, command: WorkerCommand, environment: Mapping[str, str], files: Sequence[int], stdin: bool
    ) -> subprocess.Popen[bytes] | ForkedWorker:
        """Return the worker for ``command``. ``files``: those of its board; ``stdin``: it inherits ours. Raises OSError."""
        self.look()
        ready = self._pid not in (0, self._worker)
        gone = [name for name in self._given if name not in environment]
        order = {"argv": command.argv[2:], "env": dict(environment), "gone": gone, "stdin": stdin, "parent": os.getpid()}
        text = json.dumps({**order, "ready": ready}).encode()
        pipes = [os.pipe(), os.pipe()] if ready else []
        try:
            self._line.settimeout(_ANSWER_S)
            given = [*(writer for _, writer in pipes), *files, *([0] if stdin else [])]
            socket.send_fds(self._line, [len(text).to_bytes(_NUMBER, "little")], given)
            self._line.sendall(text)
            if not ready:
                self._worker = self._process.pid
                return self._process
            answer = self._line.recv(_NUMBER, socket.MSG_WAITALL)
            if len(answer) < _NUMBER:
                raise ChildProcessError("a process in reserve has ended")
            streams = [os.fdopen(os.dup(reader), "rb", 0) for reader, _ in pipes]
            return ForkedWorker(int.from_bytes(answer, "little"), *streams)
        finally:
            for number in (number for pipe in pipes for number in pipe):
                os.close(number)

    def end(self) -> None:
        """End it: it is not needed."""
        self.look()
        self._line.close()
        for pid in self.pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for pipe in (self._process.stdout, self._process.stderr) if self._process.pid in self.pids else ():
            if pipe is not None:
                pipe.close()


class WarmWorkers:
    """Processes in reserve, which have imported what workers import, at most one for each local rank."""

    def __init__(self, base: Mapping[str, str], mark: Mapping[str, str]) -> None:
        self._base, self._mark = base, mark
        self._workers: dict[int, WarmWorker] = {}

    def keep(self, commands: Iterable[WorkerCommand]) -> None:
        """Have one in reserve for each of ``commands``, of which only what is the same for all ranks counts.

        Those that do not suit are replaced. Raises LaunchError.
        """
        for command in commands:
            kept = self._workers.get(command.local_rank)
            if kept is None or not kept.suits(command):
                self._end(command.local_rank)
                self._workers[command.local_rank] = self._start(command)

    def _start(self, command: WorkerCommand) -> WarmWorker:
        ours, theirs = socket.socketpair()
        parent = os.getpid()

        def before_exec() -> None:
            die_with(parent)
            if command.cores:
                os.sched_setaffinity(0, command.cores)

        with theirs:
            environment = {**full_environment(command, self._base), **self._mark, **_SAFE_PATH}
            argv = (command.argv[0], "-u", "-m", "zerorun.launcher.warm_workers", str(theirs.fileno()))
            given: dict[str, Any] = {"env": environment, "pass_fds": (theirs.fileno(),), "stdin": subprocess.DEVNULL}
            process = start_process(command.rank, argv, **given, preexec_fn=before_exec)
        return WarmWorker(command, process, ours, environment)

    def become(
        self, command: WorkerCommand, environment: Mapping[str, str], files: Sequence[int], stdin: bool
    ) -> subprocess.Popen[bytes] | ForkedWorker | None:
        """Let one become ``command``, and return its process; None if none suits. The arguments: as of WarmWorker."""
        kept = self._workers.get(command.local_rank)
        if kept is None or not kept.suits(command):
            return None
        try:
            return kept.become(command, environment, files, stdin)
        except OSError:  # it has ended meanwhile
            self._end(command.local_rank)
            return None

    def pids(self) -> set[int]:
        """Their processes, all that have been adopted among them."""
        for kept in self._workers.values():
            kept.look()
        return {pid for kept in self._workers.values() for pid in kept.pids}

    def _end(self, local_rank: int) -> None:
        kept = self._workers.pop(local_rank, None)
        if kept is not None:
            kept.end()

    def end(self) -> None:
        """End them all."""
        for local_rank in list(self._workers):
            self._end(local_rank)


class ForkedWorker:
    """A worker that a process in reserve has forked: what the supervisor needs of ``subprocess.Popen``."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end, and return its status as Popen does."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _fixed(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _OF_A_RANK}


# -- in the process ----------------------------------------------------------------------------------------------------


def main(line: socket.socket) -> None:
    """Import, then fork a worker for each order, or become the one that was ordered before. It ends with the line."""
    for module in _IMPORTS:
        with contextlib.suppress(ImportError):  # the script will say so, if it needs it
            import_module(module)
    gc.freeze()  # a collection would copy every page
    _say(line, os.getpid())
    while True:
        head, files, _, _ = socket.recv_fds(line, _NUMBER, _MOST_FILES)
        if len(head) < _NUMBER:
            return
        order = json.loads(line.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))
        forked = _fork(line, order["parent"])
        if forked == order["ready"]:  # the worker, or the one that leaves an heir
            break
        if forked:
            null = os.open(os.devnull, os.O_WRONLY)
            files = [null, null, *files]
            for number in (1, 2):
                os.dup2(null, number)
        for file in set(files):
            os.close(file)
    line.close()
    if order["ready"]:
        for number in (1, 2):
            os.dup2(files[0], number)
            os.close(files.pop(0))
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # as in a process of its own; Python's does so by itself
    _become(order, files)


def _say(line: socket.socket, pid: int) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        line.sendall(pid.to_bytes(_NUMBER, "little"))


def _fork(line: socket.socket, parent: int) -> bool:
    """Fork a process that is a child of ``parent``, and tell its number. True in that process."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return False
    between, child = os.getpid(), os.fork()
    if child:
        _say(line, child)
        os._exit(0)
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.001)
    die_with(parent)
    return True


def _become(order: dict[str, Any], files: list[int]) -> None:
    from zerorun.watch.board import VARIABLE

    if order["stdin"]:
        os.dup2(files[-1], 0)
        os.close(files.pop())
    for name in order["gone"]:
        os.environ.pop(name, None)
    os.environ.update(order["env"])  # what imports have set stays, as when they come later
    if files:
        os.environ[VARIABLE] = ",".join(map(str, files))
    try:
        run_as_main(order["argv"])
    except Exception as error:  # as Python shows it, without the lines above
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
            trace = trace.tb_next
        sys.last_value = error.with_traceback(trace)
        sys.excepthook(type(error), error, trace)
        sys.exit(1)


def run_as_main(argv: Sequence[str]) -> None:
    """Run what ``python`` would run: a script, a folder, an archive, or ``-m`` and a module.

    It is the main module, also for those who look at it later.
    """
    sys.orig_argv[1:] = ["-u", *argv]
    if sys.version_info < (3, 11):  # PYTHONSAFEPATH, under which this process was started, has no effect there
        del sys.path[0]
    safe = sys.version_info >= (3, 11) and bool(os.environ.get("PYTHONSAFEPATH"))
    path = os.path.join(os.getcwd(), argv[0])  # Python does no more to it
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __cached__=None)
    if "__annotations__" in vars(sys.modules["__main__"]):  # not in all versions of Python
        vars(module)["__annotations__"] = {}
    sys.modules["__main__"] = module
    if argv[0] == "-m":
        sys.argv, sys.path[0:0] = ["-m", *argv[2:]], [] if safe else [os.getcwd()]
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]  # as Python does
    elif pkgutil.get_importer(path) is not None:  # a folder or an archive
        sys.argv, sys.path[0:0] = list(argv), [path]
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        sys.argv, sys.path[0:0] = list(argv), [] if safe else [os.path.dirname(os.path.realpath(path))]
        kind = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
        vars(module).update(__file__=path, __loader__=(loader := kind("__main__", path)))
        if isinstance(loader, SourceFileLoader):
            exec(loader.source_to_code(loader.get_data(path), path), vars(module))
        else:
            loader.exec_module(module)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
