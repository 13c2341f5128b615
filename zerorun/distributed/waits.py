"""Waits: a process that waits long for another rank, a disk or a compiler says so, once, on stderr.

[Note: one watch for all waits]
A wait is entered in a table and taken out again, which costs about a microsecond; there is no thread per wait. One
daemon thread per process looks at the table every few seconds, and asks which ranks have not come for late waits only.

[Note: how long a collective may take]
All process groups of engines have the limit of the process group of all ranks. Only saving has a group with a longer one,
since a disk may take its time (checkpoint/ranks.py). torch gives every group that is made later a default of its own
(1,800 s with gloo, 600 s with NCCL alone), whatever the first one was told. With NCCL the limit is that of its watchdog,
which ends the process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..log import own_rank
from ..watch.board import ALL, Span, board

# Seconds after which a wait is reported, unless $ZERORUN_WAIT_NOTICE_S says otherwise; 0: never.
_DEFAULT_S = 30.0
_LOOKS = 6  # how often the watch looks in that time
_ANSWER_S = 5.0  # for which a notice waits to hear who has not come

Missing = Callable[[], Iterable[int]]


class WaitWatch:
    """The table of the waits of this process, and the thread that looks at it."""

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self.open: dict[int, waiting] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def tell_after(self, seconds: float) -> None:
        """Report waits that take longer than ``seconds`` from now on; 0: report none."""
        self.after_s = seconds
        self._wake.set()

    def start(self) -> None:
        with self._starting:
            if self._thread is None and self.after_s:
                self._thread = threading.Thread(target=self._run, name="zerorun waits", daemon=True)
                self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread is not None

    def _run(self) -> None:
        while True:
            self._wake.wait(self.after_s / _LOOKS or None)
            self._wake.clear()
            self._look()

    def _look(self) -> None:
        """Report late waits. A function of its own, so that the thread holds no entry of the table while it sleeps."""
        now = time.monotonic()
        for entry in tuple(self.open.values()):
            if self.after_s and not entry.told and now - entry.begun >= self.after_s:
                entry.told = True
                _say(entry, now)


class waiting:
    """``with waiting(...)`` around whatever may have to wait. ``what``: the label of a collective, or words.

    ``span``, for the board of this rank: those ranks of the world that take part; NOBODY for a disk or a compiler.
    ``number``: which it is of the collectives with this label. ``missing`` returns the ranks of the world that have not
    come, as far as known. It is called on another thread, if the wait takes long.
    """

    __slots__ = ("_key", "_number", "_span", "begun", "missing", "told", "what")

    def __init__(self, what: str, missing: Missing | None = None, span: Span = ALL, number: int = 0) -> None:
        self.what, self.missing, self.told = what, missing, False
        self._span, self._number = span, number

    def __enter__(self) -> None:
        self.begun = time.monotonic()
        self._key = next(_keys)
        watch.open[self._key] = self
        board.wait_begins(self.what, self._span, self._number)
        if not watch.started:
            watch.start()

    def __exit__(self, *unused: type[BaseException] | BaseException | TracebackType | None) -> None:
        watch.open.pop(self._key, None)
        board.wait_ends(self.what)


class RollCall:
    """Which of ``world_size`` ranks have come to ``place``, as often as this one has."""

    def __init__(self, place: str, world_size: int) -> None:
        self._place, self._world_size = place, world_size
        self._signed: list[tuple[dist.Store, int]] = []
        self._last: list[int] = []

    def sign(self, store: dist.Store, rank: int) -> None:
        """Say in ``store``, which all ranks have, that this rank has come."""
        self._signed.append((store, store.add(self._key(rank), 1)))

    def missing(self) -> list[int]:
        """Return the ranks that have not come, on any thread; before this rank has signed, rank 0, which has the store."""
        if not self._signed:
            return [0]
        self._last = self._absent(self._signed[-1][0].clone())  # type: ignore[attr-defined]  # its own may be waiting
        return self._last

    def missing_at_the_end(self) -> tuple[list[int], bool]:
        """Return them on the thread that has waited, and whether the store is still there; if not, who was missing last.

        Another connection to a store that has ended would be tried for as long as the first one was to wait.
        """
        if not self._signed:
            return [0], True
        try:
            return self._absent(self._signed[-1][0]), True
        except RuntimeError:
            return self._last, False

    def _absent(self, store: dist.Store) -> list[int]:
        return [rank for rank in range(self._world_size) if store.add(self._key(rank), 0) < self._signed[-1][1]]

    def _key(self, rank: int) -> str:
        return f"{self._place}: rank {rank}"


def _say(entry: waiting, now: float) -> None:
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - entry.begun)))
    absent, who = _absent(entry.missing) if entry.missing is not None else [], ""
    if absent:
        who = f" Rank {absent[0]} has" if len(absent) == 1 else f" Ranks {', '.join(map(str, absent))} have"
        who += " not come."
    line = (
        f"[zerorun rank {own_rank()}] has been waiting for {now - entry.begun:.0f} s, since {since}: {entry.what}.{who}\n"
    )
    sys.stderr.write(line)
    sys.stderr.flush()


def _absent(missing: Missing) -> list[int]:
    """Return the ranks that ``missing`` names; none if it does not answer in time.

    It is asked on a thread of its own. A store whose host has gone is tried for as long as the job may wait, and neither
    this notice nor that of any other wait is to be held up by it.
    """
    answer: list[int] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # the process that was asked may have ended, or the wait may be over
            answer.extend(sorted(missing()))

    asking = threading.Thread(target=ask, name="zerorun waits: who has not come", daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    return list(answer)


def _seconds() -> float:
    try:
        return max(float(os.environ.get("ZERORUN_WAIT_NOTICE_S", _DEFAULT_S)), 0.0)
    except ValueError:
        return _DEFAULT_S


def _begin_anew() -> None:
    """Start with a new watch in a forked process, which has neither the thread nor the waits."""
    global watch
    watch = WaitWatch(watch.after_s)


_keys = itertools.count()
watch = WaitWatch(_seconds())
os.register_at_fork(after_in_child=_begin_anew)


DEFAULT = timedelta(seconds=1800)


def time_limit() -> timedelta:
    """Return the limit of the process group of all ranks; DEFAULT if there is none, or it does not tell."""
    world = dist.group.WORLD
    backends = [] if world is None else [world._get_backend(device) for device in world._device_types]
    return max(filter(None, map(_limit_of, backends)), default=DEFAULT)


def _limit_of(backend: Any) -> timedelta | None:
    try:
        limit: timedelta = backend.options._timeout
    except (AttributeError, RuntimeError):  # other backends than gloo and NCCL need not have any options
        return None
    return limit


def set_time_limit(groups: Iterable[dist.ProcessGroup], limit: timedelta) -> None:
    """Set the limit of ``groups``, for collectives that begin later. Backends other than gloo and NCCL keep theirs."""
    for group in groups:
        backends = [group._get_backend(device) for device in group._device_types]
        if any(hasattr(backend, "_set_default_timeout") for backend in backends):
            c10d._set_pg_timeout(limit, group)
