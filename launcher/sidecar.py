"""The supervisor of ranks that another program has started on one host, such as torchrun, when they stand still.

    python -m zerorun.launcher.sidecar PARENT WORLD_SIZE      started by local rank 0 of the children of PARENT

It reads the boards that the ranks have made for themselves, says who is guilty of a hang, and ends that rank, so that the
program that has started them ends the job. It ends when they have.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

from .boards import Boards, open_board
from .failures import WorkerEnd
from .hangs import Hangs

_LOOK_SECONDS = 0.5
_START_SECONDS = 60.0  # for the other ranks to make their boards


class Sidecar:
    """Watches the ``world_size`` ranks among the children of the process ``parent``."""

    def __init__(self, parent: int, world_size: int) -> None:
        self._parent, self._world_size = parent, world_size
        self._boards = Boards()
        self._hangs = Hangs(world_size, lambda rank: None, _say, self._ask_stacks, self._boards.show_slow)
        self._processes: dict[int, int] = {}  # rank -> process
        self._ends: dict[int, WorkerEnd] = {}
        self._asked: set[int] = set()

    def run(self) -> None:
        """Return when no rank is left."""
        begun = time.monotonic()
        while len(self._ends) < len(self._processes) or (not self._processes and time.monotonic() - begun < _START_SECONDS):
            self._find()
            now = time.monotonic()
            for rank, seen in self._boards.look(now):
                self._hangs.on_seen(rank, seen)
            self._hangs.on_windows(self._boards.new_windows())
            for rank in self._asked:
                self._hangs.on_stacks(rank, self._boards.stacks(rank))
            self._asked.clear()
            self._note_ends(now - begun)
            if self._hangs.must_end(self._ends, now):
                self._end_job()
                return
            time.sleep(_LOOK_SECONDS)

    def _find(self) -> None:
        """Adopt the boards of ranks that have made them."""
        if len(self._processes) == self._world_size:
            return
        for process in _children(self._parent):
            if process in self._processes.values():
                continue
            with contextlib.suppress(OSError, ValueError):
                self._processes[self._boards.adopt(process, *open_board(process), time.monotonic())] = process

    def _note_ends(self, seconds: float) -> None:
        for rank, process in self._processes.items():
            if rank not in self._ends and _is_gone(process):
                last = self._boards.take_last(rank)
                self._hangs.on_seen(rank, last)
                batches = None if last is None else last.sight.batches
                self._ends[rank] = WorkerEnd(rank, 0, seconds, (), asked_to_stop=False, batches=batches)

    def _ask_stacks(self, rank: int) -> None:
        self._boards.ask_stacks(rank)
        self._asked.add(rank)

    def _end_job(self) -> None:
        """Say why, and end whoever is guilty: whoever has started the ranks then ends the others."""
        _say(self._hangs.report())
        guilty = [rank for rank in self._hangs.guilty if rank not in self._ends]
        for rank in guilty or self._processes:
            with contextlib.suppress(OSError):
                os.kill(self._processes[rank], signal.SIGKILL)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _children(parent: int) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                if int(_fields(int(entry))[1]) == parent:
                    yield int(entry)


def _is_gone(process: int) -> bool:
    try:
        return _fields(process)[0] == b"Z"
    except OSError:
        return True


def _fields(process: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ..."""
    with open(f"/proc/{process}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()


if __name__ == "__main__":
    Sidecar(int(sys.argv[1]), int(sys.argv[2])).run()
