"""The keeper: owns the folder of a host's shared memory in which workers keep copies of their newest steps.

The copies outlive the workers, for the next start (zerorun/checkpoint/memory_copies.py). They must not outlive the job,
whatever its end. So a child of the supervisor empties the folder when the supervisor is gone, also if that was killed. A
keeper that is killed itself is replaced; the copies stay. If both are killed at once, the folder stays, and nobody has it
locked any more: the next supervisor on this host that makes one empties it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import time
from pathlib import Path

from .bootstrap import stand_apart
from .job_plan import COPIES_FOLDER

MEMORY = Path("/dev/shm")
_PREFIX = "zerorun-keeper-"
_QUIET_SECONDS = 3.0  # workers that are being ended may still write


class EngineFolders:
    """The folders of this process's engines in that of the keeper, numbered in the order in which the script makes them."""

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self.gone_on: dict[int, int] = {}  # the steps from which engines, by their numbers, have gone on in this start

    def note(self, number: int, step: int) -> None:
        """An engine has gone on from ``step``."""
        self.gone_on[number] = step

    def take(self, folder: str) -> Path:
        """Return that of the next engine."""
        self._next += 1
        return Path(folder, str(self._next - 1))

    def left_bytes(self, folder: str) -> int:
        """Return the bytes of copies that a start before has left for the next engine, and those after it.

        They make room for the engine's own: it loads one of two, and forgets the other.
        """
        found = 0
        for path in Path(folder).glob("*/*"):
            with contextlib.suppress(OSError):
                found += path.stat().st_blocks * 512 if int(path.parent.name) >= self._next else 0
        return found


engine_folders = EngineFolders()
_own_folder: str | None = None


def own_folder() -> str | None:
    """Return the folder in which the engines of this process keep copies; None if no supervisor has made one.

    The variable is taken out of the environment: a program that the script starts is another run, which would take the
    copies of this one for its own, and leave its own ones to the next start of this one.
    """
    global _own_folder
    _own_folder = os.environ.pop(COPIES_FOLDER, _own_folder)
    return _own_folder


def forget_folder() -> None:
    """Keep no copies any more, as in a forked process, which is no rank."""
    global _own_folder
    _own_folder = None


os.register_at_fork(after_in_child=forget_folder)


class Keeper:
    """That of one supervisor. Where the system has no such memory there is no folder."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._lock = -1  # the open folder, which is locked
        self._pid = 0
        self._writer = -1

    def begin(self) -> dict[str, str]:
        """Make the folder and the process, unless they are there, and return the variable that tells workers of them."""
        if self._folder is None and MEMORY.is_dir():
            _empty_abandoned()
            with contextlib.suppress(OSError):
                self._folder, self._lock = _make_folder()
        if self._folder is None:
            return {}
        if self._ended():
            self._fork(self._folder)
        return {COPIES_FOLDER: str(self._folder)}

    @property
    def pid(self) -> int:
        """The process; 0 if there is none."""
        return self._pid

    def watch(self) -> None:
        """Replace the process if it has ended. To be called now and then."""
        if self._folder is not None and self._ended():
            self._fork(self._folder)

    def end(self) -> None:
        """Empty the memory, and end the process."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            os.close(self._lock)
            os.close(self._writer)
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            self._pid = 0

    def _ended(self) -> bool:
        if not self._pid:
            return True
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self._pid, os.WNOHANG) != (0, 0)
        return True

    def _fork(self, folder: Path) -> None:
        if self._writer >= 0:
            os.close(self._writer)
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _main(reader, folder)
            finally:
                os._exit(0)
        os.close(reader)


def _make_folder() -> tuple[Path, int]:
    """Return (a new folder, what has it open and locked). Nobody sees it under its name before it is locked."""
    name = secrets.token_hex(8)
    made = MEMORY / f".zerorun-{name}"
    made.mkdir(mode=0o700)
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made.rename(MEMORY / f"{_PREFIX}{name}"), lock


def _empty_abandoned() -> None:
    """Delete the folders that no supervisor has locked: it and its keeper were killed at once."""
    for folder in MEMORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # that of another user, or one that is being deleted
            found = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(found)


def _main(reader: int, folder: Path) -> None:
    """Wait until no supervisor holds the other end of the pipe, then leave nothing in ``folder``."""
    stand_apart(b"zerorun-keeper", reader)
    with contextlib.suppress(OSError):
        os.chdir(folder)  # whoever finds the folder sees by this whose it is
    while os.read(0, 64):
        pass
    os.chdir("/")
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < _QUIET_SECONDS:
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            quiet_since = time.monotonic()
        time.sleep(0.05)
