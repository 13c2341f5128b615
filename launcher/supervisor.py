"""Supervises the workers of one node: starts them, passes signals and output on, and leaves nothing behind.

Everything happens in one thread and one ``select`` loop. Workers are watched through pidfds, which become ready in the
order of the deaths, so that the first failure is the first; where the kernel has none they are looked at every 50 ms.

What ends a job:

* *A worker fails.* The others get ``SETTLE_SECONDS`` to fail by themselves, so that the report can tell a failure of
  one rank from a failure of all. Then every group gets SIGTERM and, after ``grace`` seconds, SIGKILL.
* *The launcher gets SIGINT, SIGTERM or SIGHUP.* It is passed on once; after ``grace`` seconds follows SIGKILL. Ctrl-C
  goes to whole process groups, as in a terminal. SIGTERM and SIGHUP go to the workers themselves only: a data loader
  process that dies of it would break the checkpoint that its worker is about to save. Another Ctrl-C kills at once.
  SIGUSR1 and SIGUSR2 are passed to the workers and end nothing here.
* *The launcher is killed.* See :mod:`zerorun.launcher.bootstrap`.

However a job ends, the rest of the workers' groups ends with it, and on Linux also the processes that left the groups
(the launcher adopts them). A worker that has ended stays a zombie until then: its id, which is also its group's id,
cannot be given to anybody else, so a signal to the group never hits a stranger.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from zerorun.errors import LaunchError

from .bootstrap import Guard, adopt_orphans
from .plan import Plan, WorkerCommand, full_environment
from .report import (
    Forwarder,
    Tail,
    WorkerEnd,
    count_oom_kills,
    describe_end,
    exit_status,
    failure_report,
    open_screens,
)

SETTLE_SECONDS = 1.0
GIVE_UP_SECONDS = 2.0  # after SIGKILL: only a process stuck in the kernel is still there
_DRAIN_SECONDS = 1.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def reserve_port(port: int | None) -> Iterator[int]:
    """A TCP port for the rendezvous: ``port`` if it is free, else one that is, kept from other launchers meanwhile.

    The socket is bound but does not listen. Linux then lets rank 0 listen on the port (both set SO_REUSEADDR) and
    gives it to nobody who asks for any free port.
    """
    try:
        holder = _bound_socket(port or 0)
    except OSError as error:
        reason = "it is already in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise LaunchError(
            f"master port {port}: {reason}. Remedy: leave --master-port out, and a free port is chosen."
        ) from None
    with holder:
        yield holder.getsockname()[1]


def _bound_socket(port: int) -> socket.socket:
    """Bound on all addresses of both IP versions; of one where the machine has no IPv6."""
    family, anywhere = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "0.0.0.0")
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((anywhere, port))
    except OSError:
        holder.close()
        raise
    return holder


@dataclass
class _Worker:
    command: WorkerCommand
    process: subprocess.Popen[bytes]
    stderr_tail: Tail
    log: Path | None
    returncode: int | None = None
    seconds: float = 0.0  # from the start of the job to the end of this worker
    asked_to_stop: bool = False
    group_gone: bool = False

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self.process.pid

    def send(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)  # not process.send_signal, which would reap a zombie

    def send_group(self, number: int) -> None:
        if self.group_gone:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            self.group_gone = True
        except PermissionError:  # only processes of another user are left
            pass

    def end(self) -> WorkerEnd:
        assert self.returncode is not None
        lines = self.stderr_tail.lines()
        return WorkerEnd(self.command.rank, self.returncode, self.seconds, lines, self.asked_to_stop, self.log)


@dataclass
class _Stopping:
    """How far the end of the job has come. Times are of ``time.monotonic``."""

    first_failure: _Worker | None = None
    by_signal: int | None = None
    terminate_at: float | None = None
    terminated: bool = False
    kill_at: float | None = None
    unkillable: list[int] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        return self.first_failure is not None or self.by_signal is not None


class Supervisor:
    """Runs the workers of ``plan`` on this machine; :meth:`run` returns the exit status of the job."""

    def __init__(self, plan: Plan, *, grace: float = 5.0, log_dir: Path | None = None) -> None:
        self._plan = plan
        self._grace = grace
        self._log_dir = log_dir
        self._workers: list[_Worker] = []
        self._stopping = _Stopping()
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, Callable[[], None]] = {}  # by file descriptor: reads it once
        self._reading = True
        self._draining = False
        self._has_pidfds = True
        self._next_look = 0.0  # when to look for orphans next
        self._start = time.monotonic()

    def run(self) -> int:
        _open_standard_streams()
        self._stdout, self._stderr = open_screens()
        oom_before = count_oom_kills()
        _make_log_dir(self._log_dir)
        with _signals_as_bytes() as wakeup:
            adopt_orphans()
            self._guard = Guard()
            self._selector.register(wakeup, selectors.EVENT_READ, lambda: self._on_signals(os.read(wakeup, 64)))
            try:
                for command in self._plan.workers:
                    self._start_worker(command)
                self._supervise()
                self._drain()
            finally:
                self._kill_all()  # finds something only when one of the lines above has raised
                self._guard.dismiss()
                self._selector.close()
        return self._conclude(count_oom_kills() - oom_before)

    # Starting

    def _start_worker(self, command: WorkerCommand) -> None:
        try:
            process = subprocess.Popen(
                command.argv,
                env=full_environment(command, os.environ),
                stdin=None if command.local_rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=self._guard.tie_worker,
            )
        except OSError as error:
            raise LaunchError(f"rank {command.rank}: cannot start {command.argv[0]!r}: {error.strerror}") from None
        assert process.stdout is not None and process.stderr is not None
        log = None if self._log_dir is None else self._log_dir / f"rank{command.rank}.stderr.log"
        worker = _Worker(command, process, Tail(), log)
        self._workers.append(worker)
        self._watch(worker)
        out, err = (self._forwarder(command.rank, name, worker) for name in ("stdout", "stderr"))
        self._connect(process.stdout.fileno(), out)
        self._connect(process.stderr.fileno(), err)

    def _forwarder(self, rank: int, stream: str, worker: _Worker) -> Forwarder:
        screen, fd, tail = (self._stdout, 1, None) if stream == "stdout" else (self._stderr, 2, worker.stderr_tail)
        raw = rank == 0 and (len(self._plan.workers) == 1 or os.isatty(fd))
        log = None if self._log_dir is None else self._log_dir / f"rank{rank}.{stream}.log"
        return Forwarder(rank, screen, raw=raw, tail=tail, log=log)

    def _watch(self, worker: _Worker) -> None:
        try:
            pidfd = os.pidfd_open(worker.pid)
        except OSError:  # kernel older than 5.3, or a sandbox without it
            self._has_pidfds = False
            return

        def ended() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            self._look_at(worker)

        self._selector.register(pidfd, selectors.EVENT_READ, ended)

    def _connect(self, fd: int, forwarder: Forwarder) -> None:
        def read() -> None:
            chunk = os.read(fd, 1 << 16)
            if chunk:
                forwarder.feed(chunk)
            else:
                self._selector.unregister(fd)
                del self._streams[fd]
                forwarder.close()

        self._streams[fd] = read
        self._selector.register(fd, selectors.EVENT_READ, read)

    # The loop

    def _supervise(self) -> None:
        while True:
            self._turn(self._patience())
            if not self._has_pidfds:
                for worker in self._running():
                    self._look_at(worker)
            self._advance(time.monotonic())
            if not self._running() and not self._leftovers():
                return
            if self._stopping.unkillable:
                return

    def _turn(self, timeout: float) -> None:
        """Wait for something to happen and handle it; see to output that a slow reader has not taken yet."""
        for key, _ in self._selector.select(timeout):
            key.data()
        self._stdout.drain()
        self._stderr.drain()
        congested = not self._draining and (self._stdout.congested or self._stderr.congested)
        if congested and self._reading:
            for fd in self._streams:
                self._selector.unregister(fd)
        elif not congested and not self._reading:
            for fd, read in self._streams.items():
                self._selector.register(fd, selectors.EVENT_READ, read)
        self._reading = not congested

    def _patience(self) -> float:
        """How long the loop may sleep, in seconds."""
        if not self._running():
            return 0.02
        waiting_output = self._stdout.pending or self._stderr.pending
        return 0.05 if self._stopping.begun or waiting_output or not self._has_pidfds else 1.0

    def _running(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.returncode is None]

    def _look_at(self, worker: _Worker) -> None:
        """See whether ``worker`` has ended, without taking its zombie away."""
        if worker.returncode is not None:
            return
        info = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return
        worker.returncode = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        worker.seconds = time.monotonic() - self._start
        if worker.returncode != 0 and not self._stopping.begun:
            self._stopping.first_failure = worker
            self._stopping.terminate_at = time.monotonic() + SETTLE_SECONDS

    # Ending

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _PASSED_SIGNALS:
                for worker in self._running():
                    worker.send(number)
            elif not self._stopping.begun:
                self._stop_for(number)
            elif number == signal.SIGINT:
                self._stopping.kill_at = time.monotonic()

    def _stop_for(self, number: int) -> None:
        self._stopping.by_signal = number
        self._stopping.kill_at = time.monotonic() + self._grace
        again = "; Ctrl-C again kills them now" if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        self._stderr.say(f"[zerorun] {name}: passed on to the workers, which have {self._grace:g} s to end{again}")
        for worker in self._running():
            worker.asked_to_stop = True
            if number == signal.SIGINT:
                worker.send_group(number)
            else:
                worker.send(number)

    def _advance(self, now: float) -> None:
        """Do what is due in the course of ending the job."""
        stopping = self._stopping
        if not self._running() and not stopping.terminated:
            stopping.terminate_at = now  # what the workers left behind
        if stopping.terminate_at is not None and now >= stopping.terminate_at and not stopping.terminated:
            stopping.terminated = True
            stopping.kill_at = min(now + self._grace, stopping.kill_at or float("inf"))
            self._signal_all(signal.SIGTERM)
        if stopping.kill_at is not None and now >= stopping.kill_at:
            self._signal_all(signal.SIGKILL)
            if now >= stopping.kill_at + GIVE_UP_SECONDS:
                groups = [worker.pid for worker in self._workers if not worker.group_gone]
                stopping.unkillable = [*groups, *self._orphans()]
        if now >= self._next_look:
            self._next_look = now + 1.0
            self._orphans()

    def _signal_all(self, number: int) -> None:
        for worker in self._running():
            worker.asked_to_stop = True
        for worker in self._workers:
            worker.send_group(number)
        if not self._running():
            for pid in self._orphans():
                with contextlib.suppress(OSError):
                    os.kill(pid, number)

    def _leftovers(self) -> bool:
        """Whether something that the workers started is still there. Only asked when all workers have ended."""
        for worker in self._workers:
            if worker.process.returncode is None:
                worker.process.wait()  # from here on the group has an end: no member is left
        orphans = self._orphans()
        for worker in self._workers:
            worker.send_group(0)
        return bool(orphans) or not all(worker.group_gone for worker in self._workers)

    def _orphans(self) -> list[int]:
        """Living processes that this one has adopted; the dead ones are reaped."""
        try:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        except OSError:
            return []
        known = {self._guard.pid, *(worker.pid for worker in self._workers)}
        living = []
        for pid in (int(child) for child in children):
            if pid not in known and os.waitpid(pid, os.WNOHANG) == (0, 0):
                living.append(pid)
        return living

    def _kill_all(self) -> None:
        for worker in self._workers:
            worker.send_group(signal.SIGKILL)
        for worker in self._workers:
            if worker.returncode is None and not self._stopping.unkillable:
                worker.process.wait()

    def _drain(self) -> None:
        """Take what the workers' pipes still hold. All writers are gone, so the end comes at once, if nobody hid."""
        self._draining = True  # what is left fits the pipes: take it even if nobody reads, for the report's sake
        deadline = time.monotonic() + _DRAIN_SECONDS
        waiting = True
        while waiting and time.monotonic() < deadline:
            self._turn(0.02)
            waiting = bool(self._streams) or self._stdout.pending or self._stderr.pending

    def _conclude(self, oom_kills: int) -> int:
        """Say how the job ended and give its exit status."""
        stopping = self._stopping
        status = 0
        if stopping.unkillable:
            self._stderr.say(f"[zerorun] SIGKILL did not end: {stopping.unkillable}")
            status = 1
        ends = [worker.end() for worker in self._workers if worker.returncode is not None]
        if stopping.first_failure is not None:
            first = stopping.first_failure.end()
            others = [end for end in ends if end.rank != first.rank]
            self._stderr.say(failure_report(first, others, oom_kills=oom_kills))
            status = exit_status(first.returncode)
        elif stopping.by_signal is not None:
            status = self._conclude_signal(stopping.by_signal, ends)
        self._flush()
        return status

    def _conclude_signal(self, number: int, ends: list[WorkerEnd]) -> int:
        """0 when every worker ended well (it saved and left, say), else 128 + the signal, as a shell has it."""
        name = signal.Signals(number).name
        odd = [end for end in ends if end.returncode not in (0, -number)]
        for end in odd:
            self._stderr.say(f"[zerorun] rank {end.rank}: {describe_end(end.returncode)}")
        if not self._stopping.unkillable:
            self._stderr.say(f"[zerorun] stopped by {name}; all {len(ends)} workers have ended")
        return 128 + number if any(end.returncode for end in ends) else 0

    def _flush(self) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while (self._stdout.pending or self._stderr.pending) and time.monotonic() < deadline:
            self._stdout.drain()
            self._stderr.drain()
            time.sleep(0.01)


def _make_log_dir(log_dir: Path | None) -> None:
    if log_dir is None:
        return
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--log-dir {log_dir}: {error.strerror}") from None
    if not os.access(log_dir, os.W_OK | os.X_OK):
        raise LaunchError(f"--log-dir {log_dir}: no permission to write there")


def _open_standard_streams() -> None:
    """Where the launcher was started with stdin, stdout or stderr closed, no pipe of ours may take that number."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd < 3:
        fd = os.dup(fd)
    os.close(fd)


@contextlib.contextmanager
def _signals_as_bytes() -> Iterator[int]:
    """A descriptor from which the signals that arrive can be read, one byte each."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A parent that ignores SIGCHLD would leave us no exit codes.
    old_handlers = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}
    for number in (*_STOP_SIGNALS, *_PASSED_SIGNALS):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup
        old_handlers[number] = signal.signal(number, lambda *_: None)
    try:
        yield reader
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_writer)
        os.close(reader)
        os.close(writer)
