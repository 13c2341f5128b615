"""How the supervisor starts processes, and code that runs in those that it forks: in a worker before exec, in the guard.

Two things must hold even when the launcher itself is killed with SIGKILL: no worker survives, and neither does what
the workers started (data loader processes, shells). The kernel's parent-death signal does the first; it reaches
only the worker itself, so a guard process does the second by killing the workers' process groups.

**Why preexec_fn.** The parent-death signal has to be asked for by the child. A start-up program (``python
bootstrap.py ... exec script``) would need no code between fork and exec, but costs an interpreter start per worker
and shows up in every ``ps`` and traceback. ``preexec_fn`` is only dangerous when another thread of the parent may
hold a lock at the moment of the fork. The launcher has one thread, always, and everything the child calls (libc's
``prctl`` through a handle made beforehand, ``getppid``, ``write``) is async-signal-safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from zerorun.errors import LaunchError

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MARK = "ZERORUN_NODE_ID"

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Make this process the parent of every orphaned descendant, so that none gets out of sight."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies. To be called in a child, between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def die_with(parent: int) -> None:
    """Let this process die with its parent, the process ``parent``. To be called in a child, between fork and exec."""
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def name_process(name: bytes) -> None:
    """Let ``ps`` show this name."""
    _libc.prctl(_PR_SET_NAME, name, 0, 0, 0)


def new_mark() -> dict[str, str]:
    """Return a variable by which the processes of one supervisor are found."""
    return {_MARK: secrets.token_hex(8)}


class Guard:
    """A process that kills the workers' process groups if the launcher is killed.

    Each worker writes the id of its group to a pipe whose writing end the launcher holds. End of file without ``done``
    means that the launcher was killed. Processes that have left their group, as daemons do, are found by
    ``mark``, a variable in their environment (``new_mark``).
    """

    def __init__(self, mark: Mapping[str, str]) -> None:
        reader, self._writer = os.pipe()
        self._launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _guard_main(reader, f"{_MARK}={mark[_MARK]}".encode())
            finally:
                os._exit(0)
        os.close(reader)

    def tie_worker(self) -> None:
        """Let this worker die with the launcher, and tell the guard its group. To be called between fork and exec."""
        die_with(self._launcher)
        self.watch(os.getpid())

    def watch(self, group: int) -> None:
        """Tell the guard of a group of processes."""
        os.write(self._writer, b"%d\n" % group)

    def dismiss(self) -> None:
        """End the guard: the job is over, and no process of it is left."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"done\n")
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def start_process(rank: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, with pipes. Raises LaunchError."""
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(argv, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True, **options)
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise LaunchError(f"rank {rank}: cannot start {argv[0]!r}: {reason}") from None


def stand_apart(name: bytes, reader: int) -> None:
    """Let this process, which a supervisor has forked, outlive it. Nothing stays open but ``reader``, as descriptor 0."""
    os.setsid()  # a Ctrl-C in the terminal is for the launcher
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    name_process(name)
    os.dup2(reader, 0)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    for entry in os.listdir("/dev/fd"):  # a supervisor of many hosts has many
        with contextlib.suppress(OSError):
            os.close(max(int(entry), 3))


def _guard_main(reader: int, mark: bytes) -> None:
    stand_apart(b"zerorun-guard", reader)
    said = b""
    while chunk := os.read(0, 4096):
        said += chunk
    words = said.split()
    if b"done" in words:
        return
    for word in words:
        with contextlib.suppress(OSError):
            os.killpg(int(word), signal.SIGKILL)
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{int(entry)}/environ", "rb") as file:
                marked = mark in file.read().split(b"\0")
            if marked:
                os.kill(int(entry), signal.SIGKILL)
