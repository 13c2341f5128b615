"""The boards of the workers of one host (zerorun/watch/board.py), as its supervisor makes and reads them."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerorun.watch.board import (
    FILE_NAME,
    PAGE,
    STACK_SIGNAL,
    STACKS_NAME,
    VARIABLE,
    Phase,
    RankProgress,
    Sight,
    SizeNote,
    ask_trace,
    make_files,
    read,
    read_progress,
    read_times,
    show_slow,
)
from zerorun.watch.slow_ranks import Window
from zerorun.watch.verdict import Standing

from .event_loop import Turns

_QUIET_S = 2.0  # after which a worker that has not moved is reported
_MOST_STACKS = 1 << 16  # bytes


@dataclass(frozen=True)
class Seen:
    """What a worker's board says at a time when it has not changed for ``quiet_s`` seconds."""

    sight: Sight
    quiet_s: float
    stopped: bool

    def older(self, seconds: float) -> Seen:
        """Return the same, ``seconds`` later."""
        sight, wait_s = self.sight, self.sight.wait_s
        sight = replace(sight, phase_s=sight.phase_s + seconds, wait_s=None if wait_s is None else wait_s + seconds)
        return replace(self, sight=sight, quiet_s=self.quiet_s + seconds)

    def standing(self, rank: int, host: str | None) -> Standing:
        """Return it for the verdict. ``host``: None where there is only one."""
        return Standing(rank, host, self.quiet_s, self.sight, self.stopped)

    @classmethod
    def of(cls, message: dict[str, Any]) -> Seen:
        """Return it from its ``asdict``. Raises one of line.UNHEARD_OF for anything else."""
        found = {name: _AS[name](value) for name, value in message["sight"].items()}
        return cls(Sight(**found), float(message["quiet_s"]), bool(message["stopped"]))


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)


def _span(value: Any) -> tuple[int, int, int]:
    first, stride, count = map(int, value)
    return first, stride or 1, count  # a range has no step of 0


def _sizes(value: Any) -> tuple[SizeNote, ...]:
    return tuple(SizeNote(*map(int, note)) for note in value)


_AS: dict[str, Callable[[Any], Any]] = {
    "phase": Phase,
    "phase_s": float,
    "limit_s": _seconds,
    "wait_s": _seconds,
    "longest_s": float,
    "span": _span,
    "sizes": _sizes,
    "label": str,
    "gives_stacks": bool,
    **dict.fromkeys(("events", "pid", "rank", "step", "batches", "number"), int),
}


@dataclass
class _Page:
    """The page of one worker, and the file into which its stacks are written."""

    rank: int
    page: mmap.mmap
    stacks: int
    session: int = 0  # of the worker's processes
    events: int = -1
    moved_at: float = 0.0
    window: int = 0  # the last one that was told
    step: int = -1  # the last one that was told
    told: tuple[int, bool] | None = None  # what was reported: events, and whether it was stopped; None: that it moves


class Boards:
    """Made anew for each round of workers. Where the system has no such files, there are no boards."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._turns = Turns()
        self.trouble: str | None = None  # why there are none

    def make(self, rank: int) -> tuple[tuple[int, ...], dict[str, str]]:
        """Return (the open files that the worker inherits, the variable that tells it so)."""
        try:
            page, stacks = make_files()
            memory = mmap.mmap(page, PAGE)
        except (OSError, AttributeError, ValueError) as error:
            self.trouble = f"a run that hangs will not be explained: no memory can be shared with the workers ({error})"
            return (), {}
        self._pages[rank] = _Page(rank, memory, stacks)
        return (page, stacks), {VARIABLE: f"{page},{stacks}"}

    def started(self, rank: int, pid: int, files: tuple[int, ...], now: float) -> None:
        """Note that the worker runs, with ``files`` of ``make``."""
        if files:
            self._pages[rank].session, self._pages[rank].moved_at = pid, now
            os.close(files[0])

    def adopt(self, pid: int, page: int, stacks: int, now: float) -> int:
        """Take the open files of a rank that has made its board by itself, and return its number.

        Raises OSError, or ValueError for files of another process.
        """
        memory = mmap.mmap(page, PAGE)
        os.close(page)
        sight = read(memory)
        if sight is None or sight.pid != pid:
            memory.close()
            os.close(stacks)
            raise ValueError("the board is another process's")
        self._pages[sight.rank] = _Page(sight.rank, memory, stacks, os.getsid(pid), moved_at=now)
        return sight.rank

    def sight(self, rank: int) -> Sight | None:
        """Return what is on a worker's board now."""
        return read(self._pages[rank].page)

    def look(self, now: float) -> list[tuple[int, Seen | None]]:
        """Return the workers of which there is something new; with None, those that move again."""
        found: list[tuple[int, Seen | None]] = []
        held_up = self._turns.held_up_s(now)  # the workers most likely were, too
        for page in self._pages.values():
            page.moved_at += held_up
            sight = read(page.page)
            if sight is None:
                continue
            if sight.events != page.events:
                page.events, page.moved_at = sight.events, now
            quiet = now - page.moved_at
            if quiet < _QUIET_S:
                if page.told is not None:
                    page.told = None
                    found.append((page.rank, None))
                continue
            stopped = is_stopped(sight.pid)
            if page.told != (page.events, stopped):
                page.told = page.events, stopped
                found.append((page.rank, Seen(sight, quiet, stopped)))
        return found

    def new_windows(self) -> list[Window]:
        """Return what workers were busy in windows of steps that have ended since the last call."""
        found = []
        for page in self._pages.values():
            stage, times = read_times(page.page, page.window)
            for number, busy in times.items():
                page.window, half = number, len(busy) // 2
                found.append(Window(page.rank, stage, number, tuple(busy[:half]), tuple(busy[half:])))
        return found

    def new_progress(self, rank: int | None = None) -> list[tuple[int, RankProgress]]:
        """Return how far ``rank`` is, by default the first of the workers, if that is further than at the last call."""
        page = self._pages.get(min(self._pages, default=-1) if rank is None else rank)
        progress = None if page is None else read_progress(page.page)
        if page is None or progress is None or progress.step == page.step:
            return []
        page.step = progress.step
        return [(page.rank, progress)]

    def show_slow(self, rank: int, thousandths: int) -> None:
        """Tell rank 0, if it is here, which rank is slow: it writes that to the monitors. -1: none is."""
        if 0 in self._pages:
            show_slow(self._pages[0].page, rank, thousandths)

    def ask_trace(self, rank: int, steps: int, file: str) -> None:
        """Ask the job of ``rank``, which must be 0, for a trace of its next ``steps`` steps in ``file`` of its folder."""
        ask_trace(self._pages[rank].page, steps, file)

    def take_last(self, rank: int) -> Seen | None:
        """Return what the board of a worker that has ended says, and look at it no more."""
        page = self._pages.pop(rank, None)
        if page is None:
            return None
        sight = read(page.page)
        os.close(page.stacks)
        page.page.close()
        return None if sight is None else Seen(sight, 0.0, False)

    def ask_stacks(self, rank: int) -> None:
        """Have the worker write the stacks of its threads, for ``stacks``."""
        page = self._pages.get(rank)
        sight = None if page is None else read(page.page)
        if page is None or sight is None or not sight.gives_stacks:
            return
        os.ftruncate(page.stacks, 0)
        with contextlib.suppress(OSError):
            if os.getsid(sight.pid) == page.session:  # the worker, or a process that it has become
                os.kill(sight.pid, STACK_SIGNAL)

    def stacks(self, rank: int) -> str:
        """Return what has been written since ``ask_stacks``, and where the kernel has the threads."""
        page = self._pages.get(rank)
        if page is None:
            return ""
        written = os.pread(page.stacks, _MOST_STACKS, 0).decode(errors="replace")
        sight = read(page.page)
        return "\n\n".join(filter(None, (written.rstrip(), "" if sight is None else _in_the_kernel(sight.pid))))

    def close(self) -> None:
        """Give everything back."""
        for rank in list(self._pages):
            self.take_last(rank)


def training_first(stacks: str) -> str:
    """Return what ``Boards.stacks`` gives with the thread that trains in front: the signal has interrupted that one."""
    threads = stacks.strip().split("\n\n")
    return "\n\n".join(sorted(threads, key=lambda thread: not thread.startswith("Current thread")))


def open_board(process: int) -> tuple[int, int]:
    """Open the page and the file for stacks of a rank, for ``adopt``. Raises OSError, or ValueError if it has none."""
    folder, found = f"/proc/{process}/fd", []
    names = {os.readlink(f"{folder}/{entry}"): entry for entry in os.listdir(folder)}
    for wanted in (FILE_NAME, STACKS_NAME):
        entries = [entry for name, entry in names.items() if name.startswith(f"/memfd:{wanted}")]
        if not entries:
            raise ValueError(f"process {process} has no board")
        found.append(f"{folder}/{entries[0]}")
    page = os.open(found[0], os.O_RDWR)
    try:
        return page, os.open(found[1], os.O_RDWR)
    except OSError:
        os.close(page)
        raise


def is_stopped(pid: int) -> bool:
    """True if a process is stopped, by a signal or a debugger."""
    return _state(f"/proc/{pid}") in ("T", "t")


def is_gone(pid: int) -> bool:
    """True if a process has ended, whether its parent knows or not."""
    return _state(f"/proc/{pid}") in ("", "Z")


def listens_to(pid: int, number: int) -> bool:
    """True if a signal would not simply end a process: it has a handler, ignores it, or takes it later."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line[:3] == "Sig")
        return any(int(fields[name], 16) >> (number - 1) & 1 for name in ("SigCgt", "SigIgn", "SigBlk") if name in fields)
    return True  # this cannot be known here


def descendants(pid: int) -> list[int]:
    """The children of a process, theirs, and so on."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return [*found, *(other for child in found for other in descendants(child))]


def _state(folder: str) -> str:
    """The letter of a process or thread in /proc, such as S; empty if it is gone."""
    try:
        with open(f"{folder}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "stopped by a debugger"}


def _in_the_kernel(pid: int) -> str:
    """What /proc tells of all threads, which is all there is of those that run no Python."""
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            folder = f"/proc/{pid}/task/{thread}"
            with contextlib.suppress(OSError):
                state, where = _state(folder), Path(f"{folder}/wchan").read_text()
                name = Path(f"{folder}/comm").read_text().strip()
                found[f"{name} {_STATES.get(state, state)}{f' in {where}' if where.strip('0') else ''}"] += 1
    lines = [f"  {count} x {what}" for what, count in found.most_common()]
    return "\n".join(["Threads by the kernel:", *lines]) if lines else ""
