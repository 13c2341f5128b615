"""The workers of one host: starts them, watches them, and leaves nothing of them behind.

It runs inside the ``select`` loop of its caller, in one thread: in the launcher's on its own host, in an agent's on other
hosts. Events go to a :class:`Listener`. Workers are watched through pidfds, which become ready in the order in which the
workers end; where the kernel has no pidfds, workers are polled every 50 ms.

``interrupt`` passes a signal on and ``terminate`` ends the groups with SIGTERM; after either, SIGKILL follows ``grace``
seconds later. Ctrl-C goes to whole process groups, as in a terminal. SIGTERM and SIGHUP go only to the workers themselves:
a data loader process that dies of the signal would break the checkpoint that its worker is about to save.

However the workers end, the rest of their groups ends with them, and on Linux also the processes that left the groups
(this process adopts them). A worker that has ended stays a zombie until then, so that its id, which is also its group's
id, is given to no other process, and a signal to the group never hits a stranger. See bootstrap.py for what happens if
this process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from zerorun.errors import LaunchError
from zerorun.watch.board import RankProgress
from zerorun.watch.slow_ranks import Window

from .bootstrap import Guard, adopt_orphans, new_mark, start_process
from .copy_keeper import Keeper
from .flight_recorder import FlightRecorder
from .job_plan import WorkerCommand, full_environment
from .this_host import CGROUPS, OWN_CGROUP, cgroups
from .warm_workers import ForkedWorker, WarmWorkers
from .worker_boards import Boards, Seen, listens_to

GIVE_UP_SECONDS = 2.0  # after SIGKILL: only a process stuck in the kernel is still there
DRAIN_SECONDS = 1.0  # for the pipes of workers that have ended
_LOOK_SECONDS = 1.0
_HELD_SECONDS = 0.2  # between looks at workers for which signals are kept
_STACK_SECONDS = 0.5  # for a worker to write its stacks
STREAMS = ("stdout", "stderr")


class BoardListener(Protocol):
    """Hears what the boards of a node's workers say."""

    def on_seen(self, rank: int, seen: Seen | None) -> None:
        """A worker has not moved for a while, or has ended: what its board says. None: it moves again."""

    def on_windows(self, windows: list[Window]) -> None:
        """What workers were busy in steps that have ended."""

    def on_progress(self, rank: int, progress: RankProgress) -> None:
        """A worker has made a step; told of one worker at least once a second, and of each at its end."""

    def on_stacks(self, rank: int, text: str) -> None:
        """The stacks that ``ask_stacks`` has asked for; empty if the worker cannot tell."""


class Listener(Protocol):
    """Hears what happens on a node."""

    @property
    def hangs(self) -> BoardListener:
        """Who hears of boards in this round of workers."""

    def on_output(self, rank: int, stream: str, chunk: bytes) -> None:
        """``chunk`` is empty at the end of the stream."""

    def on_end(self, rank: int, returncode: int, at: float, asked: bool) -> None:
        """``at``: by this host's ``time.monotonic``. ``asked``: it had been told to stop."""

    def on_empty(self, unkillable: list[int], oom_kills: int, held: list[int]) -> None:
        """All workers have ended, their output is delivered, and no process is left but the ids in ``unkillable``.

        ``held``: signals that are kept for the next workers.
        """

    def on_note(self, text: str) -> None:
        """Something that the user should know."""

    def on_signal(self, number: int) -> None:
        """A signal has come to another launcher of this job."""


class Worker:
    """One worker process."""

    def __init__(
        self, command: WorkerCommand, process: subprocess.Popen[bytes] | ForkedWorker, held: Iterable[int] = ()
    ) -> None:
        self.command, self.process = command, process
        self.returncode: int | None = None
        self.asked = False
        self.group_gone = False
        self.held = [*held]  # signals for it that would end it

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self.process.pid

    def send(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)  # not process.send_signal, which would reap a zombie

    def pass_on(self, *numbers: int) -> None:
        """Send it signals that do not end the job, as soon as it listens to them: it may still import, or read its data."""
        waiting, self.held = [*self.held, *numbers], []
        for number in waiting:
            if listens_to(self.pid, number):
                self.send(number)
            elif number not in self.held:
                self.held.append(number)

    def send_group(self, number: int) -> None:
        if self.group_gone:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            self.group_gone = True
        except PermissionError:  # only processes of another user are left
            pass


class LocalNode:
    """Runs workers on this host. ``start`` may be called again once they are all gone.

    ``base``: the environment that commands add to. ``gives_stdin``: rank 0 inherits the stdin of this process.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: Listener,
        *,
        base: Mapping[str, str],
        grace: float,
        log_dir: Path | None = None,
        gives_stdin: bool = False,
    ) -> None:
        self._selector, self._listener, self._base = selector, listener, base
        self._grace, self._log_dir, self._gives_stdin = grace, log_dir, gives_stdin
        self._workers: list[Worker] = []
        self._held: dict[int, list[int]] = {}  # by local rank, signals for workers that have ended without them
        self._streams: dict[int, Callable[[], None]] = {}  # file descriptor -> a function that reads it once
        self._pidfds: set[int] = set()
        self._reading = True
        self._guard: Guard | None = None
        self._mark = new_mark()
        self.warm_workers = WarmWorkers(base, self._mark)
        self.keeper = Keeper()
        self._kept: dict[str, str] = {}  # the variable that tells workers of it
        self._recorder = FlightRecorder()
        self._recorded: dict[str, str] = {}  # the variables that tell workers of it
        self._has_pidfds = True
        self._boards = Boards()
        self._next_look = 0.0  # when to look at boards and for orphans next
        self._stacks: dict[int, float] = {}  # rank -> when its stacks will be there
        self._terminated = False
        self._kill_at: float | None = None
        self._drain_until: float | None = None

    @property
    def busy(self) -> bool:
        """True from ``start`` until every process that came of it is gone or given up."""
        return self._guard is not None

    # -- starting ----------------------------------------------------------------------------------------------------

    def start(self, commands: Iterable[WorkerCommand]) -> None:
        """Start ``commands``. Raises LaunchError, and leaves none running, if one cannot be started.

        All logs are open before any worker runs, which could do harm before another one's log is refused.
        """
        commands = list(commands)
        make_log_dir(self._log_dir)
        _other_children.update(_children())  # started, say, by a shell that this program has replaced: not ours to end
        adopt_orphans()
        self._oom_before = oom_kills()
        self._terminated, self._kill_at, self._drain_until = False, None, None
        self._boards, self._stacks = Boards(), {}
        again = any(command.env.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" for command in commands)
        self._kept = self.keeper.begin() if again else {}
        self._recorded = self._recorder.begin({**self._base, **(commands[0].env if commands else {})})
        try:
            self._guard = Guard(self._mark)
            logs = {
                (command.rank, stream): Log(self._log_dir, command.rank, stream, self._listener.on_note)
                for command in commands
                for stream in STREAMS
            }
            for command in commands:
                self._start_worker(command, logs)
            if self._boards.trouble is not None:
                self._listener.on_note(self._boards.trouble)
        except OSError as error:
            self.end_now()
            raise LaunchError(f"cannot start workers: {error}") from None
        except BaseException:
            self.end_now()
            raise

    def _start_worker(self, command: WorkerCommand, logs: Mapping[tuple[int, str], Log]) -> None:
        guard, cores = self._guard, command.cores
        assert guard is not None

        def before_exec() -> None:
            guard.tie_worker()
            if cores:
                os.sched_setaffinity(0, cores)

        files, told = self._boards.make(command.rank)
        environment = {**full_environment(command, self._base), **self._mark, **self._kept, **self._recorded}
        gives_stdin = self._gives_stdin and command.rank == 0
        process = self.warm_workers.become(command, environment, files, gives_stdin)
        if process is not None:
            guard.watch(process.pid)
        else:
            process = start_process(
                command.rank,
                command.argv,
                env={**environment, **told},
                pass_fds=files,
                stdin=None if gives_stdin else subprocess.DEVNULL,
                preexec_fn=before_exec,
            )
        assert process.stdout is not None and process.stderr is not None
        worker = Worker(command, process, self._held.pop(command.local_rank, ()))
        self._boards.started(command.rank, process.pid, files, time.monotonic())
        self._workers.append(worker)
        self._watch(worker)
        for stream, pipe in zip(STREAMS, (process.stdout, process.stderr), strict=True):
            self._connect(pipe.fileno(), command.rank, stream, logs[command.rank, stream])

    def _watch(self, worker: Worker) -> None:
        try:
            pidfd = os.pidfd_open(worker.pid)
        except OSError:  # kernel older than 5.3, or a sandbox without it
            self._has_pidfds = False
            return

        def ended() -> None:
            self._selector.unregister(pidfd)
            self._pidfds.remove(pidfd)
            os.close(pidfd)
            self._look_at(worker)

        self._pidfds.add(pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, ended)

    def _connect(self, fd: int, rank: int, stream: str, log: Log) -> None:
        def read() -> None:
            chunk = os.read(fd, 1 << 16)
            log.write(chunk)
            if not chunk:
                self._selector.unregister(fd)
                del self._streams[fd]
                log.close()
            self._listener.on_output(rank, stream, chunk)

        self._streams[fd] = read
        if self._reading:
            self._selector.register(fd, selectors.EVENT_READ, read)

    # -- while they run ----------------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Stop reading the workers' output, or go on reading it."""
        if paused != self._reading or self._drain_until is not None:
            return
        self._reading = not paused
        for fd, read in self._streams.items():
            if paused:
                self._selector.unregister(fd)
            else:
                self._selector.register(fd, selectors.EVENT_READ, read)

    def patience(self) -> float:
        """How long the loop may sleep, in seconds."""
        if not self.busy:
            return 1.0
        if not self._running():
            return 0.02
        hurried = self._kill_at is not None or self._stacks or not self._has_pidfds
        return 0.05 if hurried else _HELD_SECONDS if any(worker.held for worker in self._running()) else 1.0

    def tick(self, now: float) -> None:
        """Do what is due. Must be called at least as often as ``patience`` says."""
        if not self.busy:
            return
        if not self._has_pidfds:
            for worker in self._running():
                self._look_at(worker)
        for worker in self._running():
            worker.pass_on()
        if not self._running() and not self._terminated:
            self.terminate(self._grace)  # what the workers left behind
        if self._kill_at is not None and now >= self._kill_at:
            self._signal_all(signal.SIGKILL)
        if now >= self._next_look:
            self._next_look = now + _LOOK_SECONDS
            self.keeper.watch()
            self._orphans()
            for rank, seen in self._boards.look(now):
                self._listener.hangs.on_seen(rank, seen)
            self._tell_of_steps()
        for rank in [rank for rank, ready in self._stacks.items() if now >= ready]:
            del self._stacks[rank]
            text = "\n\n".join(filter(None, (self._boards.stacks(rank), self._recorder.words)))
            self._listener.hangs.on_stacks(rank, text)
        given_up = self._kill_at is not None and now >= self._kill_at + GIVE_UP_SECONDS
        if given_up or (not self._running() and not self._leftovers()):
            self._finish(now, [*self._living_groups(), *self._orphans()] if given_up else [])

    def _finish(self, now: float, unkillable: list[int]) -> None:
        """Read what the workers' pipes still hold, then report the end.

        All writers are gone, so end of file comes at once, unless a process was not found and keeps a pipe open.
        """
        if self._drain_until is None:
            self.pause(False)  # the rest fits into the pipes: read it for the report even if the screen is full
            self._drain_until = now + DRAIN_SECONDS
        if self._streams and now < self._drain_until:
            return
        for fd in self._streams:
            self._selector.unregister(fd)
        self._streams.clear()
        self._held = {worker.command.local_rank: worker.held for worker in self._workers if worker.held}
        self._dismiss()
        held = sorted({number for numbers in self._held.values() for number in numbers})
        self._listener.on_empty(unkillable, (oom_kills() - self._oom_before).total(), held)

    def _dismiss(self) -> None:
        self._boards.close()
        self._recorder.end()
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        for worker in self._workers:
            for pipe in (worker.process.stdout, worker.process.stderr):
                if pipe is not None:
                    pipe.close()
        self._workers.clear()

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.returncode is None]

    def _look_at(self, worker: Worker) -> None:
        """Check whether ``worker`` has ended, and report it. The zombie is not reaped."""
        if worker.returncode is not None:
            return
        info = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return
        worker.returncode = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self._tell_of_steps(worker.command.rank)
        rank, last = worker.command.rank, self._boards.take_last(worker.command.rank)
        if last is not None:
            self._listener.hangs.on_seen(rank, last)
        self._listener.on_end(rank, worker.returncode, time.monotonic(), worker.asked)

    def _tell_of_steps(self, rank: int | None = None) -> None:
        """Tell what the boards say of steps that are over; ``rank``: how far this one is, None: the first one."""
        windows = self._boards.new_windows()
        if windows:
            self._listener.hangs.on_windows(windows)
        for which, progress in self._boards.new_progress(rank):
            self._listener.hangs.on_progress(which, progress)

    # -- ending ------------------------------------------------------------------------------------------------------

    def pass_on(self, number: int) -> None:
        """Send each worker a signal that does not end the job, and tell the user of those that do not listen to it yet."""
        for worker in self._running():
            worker.pass_on(number)
        held = [str(worker.command.rank) for worker in self._running() if number in worker.held]
        if held:
            name, ranks = signal.Signals(number).name, f"rank{'s'[: len(held) > 1]} {', '.join(held)}"
            self._listener.on_note(f"{name} is kept for {ranks}, until it would not simply end them")

    def ask_stacks(self, rank: int) -> None:
        """Have ``on_stacks`` hear of what each thread of a worker is doing."""
        self._boards.ask_stacks(rank)
        self._recorder.ask()
        self._stacks[rank] = time.monotonic() + _STACK_SECONDS

    def show_slow(self, rank: int, thousandths: int) -> None:
        """Tell rank 0, if it is here, which rank of the job is slow."""
        self._boards.show_slow(rank, thousandths)

    def interrupt(self, number: int, grace: float) -> None:
        """Pass signal ``number`` on as a request to end; SIGKILL follows ``grace`` seconds later."""
        if not self.busy:
            return
        self._kill_at = time.monotonic() + grace
        for worker in self._running():
            worker.asked = True
            if number == signal.SIGINT:
                worker.send_group(number)
            else:
                worker.send(number)

    def terminate(self, grace: float) -> None:
        """Send SIGTERM to all that the workers have started; SIGKILL follows in ``grace`` seconds, or when it was due."""
        if not self.busy:
            return
        self._terminated = True
        kill_at = time.monotonic() + grace
        self._kill_at = kill_at if self._kill_at is None else min(kill_at, self._kill_at)
        self._signal_all(signal.SIGTERM)

    def kill(self) -> None:
        """Have the next ``tick`` send SIGKILL."""
        if self.busy:
            self._kill_at = time.monotonic()

    def end_now(self) -> None:
        """Kill and reap all workers before returning. For errors, and for the end of the job."""
        self.warm_workers.end()
        self.keeper.end()
        for worker in self._workers:
            worker.send_group(signal.SIGKILL)
        for worker in self._workers:
            if worker.returncode is None:
                worker.returncode = worker.process.wait()
        for fd in [*self._pidfds, *(self._streams if self._reading else ())]:
            self._selector.unregister(fd)
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds.clear()
        self._streams.clear()
        self._dismiss()

    def _signal_all(self, number: int) -> None:
        for worker in self._running():
            worker.asked = True
        for worker in self._workers:
            worker.send_group(number)
        if not self._running():
            for pid in self._orphans():
                with contextlib.suppress(OSError):
                    os.kill(pid, number)

    def _leftovers(self) -> bool:
        """Return whether a process that the workers started is left. To be called only when all workers have ended."""
        for worker in self._workers:
            if worker.process.returncode is None:
                worker.process.wait()  # from here on the group vanishes with its last member
        orphans = self._orphans()
        for worker in self._workers:
            worker.send_group(0)
        return bool(orphans or self._living_groups())

    def _living_groups(self) -> list[int]:
        return [worker.pid for worker in self._workers if not worker.group_gone]

    def _orphans(self) -> list[int]:
        """Return the living processes that this one has adopted, and reap the dead ones."""
        guard, children = [] if self._guard is None else [self._guard.pid], _children()
        reserve = self.warm_workers.pids()  # after the look at children: whoever is adopted has told of it before
        known = {*guard, self.keeper.pid, *(worker.pid for worker in self._workers), *_other_children, *reserve}
        return [pid for pid in children if pid not in known and os.waitpid(pid, os.WNOHANG) == (0, 0)]


_other_children: set[int] = set()


def _children() -> list[int]:
    """Return the ids of the children of this process, dead or alive."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def own_child(pid: int) -> None:
    """Register ``pid``, a child of this process that is neither a worker nor an orphan: an ssh client, say."""
    _other_children.add(pid)


class Log:
    """The log file of one stream of one worker, byte for byte. Without a ``folder`` nothing is written."""

    def __init__(self, folder: Path | None, rank: int, stream: str, note: Callable[[str], None]) -> None:
        self._rank, self._note = rank, note
        self._path = None if folder is None else log_file(folder, rank, stream)
        self._file: BinaryIO | None = None
        if self._path is not None:
            self._file = open(_open_log(self._path), "ab", buffering=0)  # noqa: SIM115

    def write(self, chunk: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(chunk)
        except OSError as error:  # a full disk must not end the training
            self._note(f"{self._path}: {error.strerror}; rank {self._rank} is no longer logged there")
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _open_log(path: Path) -> int:
    """Open ``path`` for appending. Raises LaunchError for a link and for what is no regular file.

    In a folder that others can write to, the name may lead elsewhere, or be a pipe that nobody reads.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        fd = None
    if fd is not None and stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    if fd is not None:
        os.close(fd)
    what = "a symbolic link" if path.is_symlink() else "no regular file"
    raise LaunchError(f"--log-dir: {path} is {what}. Remedy: remove it, or choose a folder that only you can write.")


def log_file(folder: Path, rank: int, stream: str) -> Path:
    return folder / f"rank{rank}.{stream}.log"


def make_log_dir(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--log-dir {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise LaunchError(f"--log-dir {folder}: no permission to write there")


def oom_kills() -> Counter[Path]:
    """How often the out-of-memory killer has struck so far in this control group; nothing where that cannot be read.

    A scheduler may put this process into another group later, which has had other strikes.
    """
    with contextlib.suppress(OSError):
        for folder, version in cgroups(OWN_CGROUP.read_text(), CGROUPS, "memory"):
            with contextlib.suppress(OSError):
                events = (folder / ("memory.events" if version == 2 else "memory.oom_control")).read_text()
                counts = dict(line.split() for line in events.splitlines())
                return Counter({folder: int(counts.get("oom_kill", 0))})
    return Counter()
