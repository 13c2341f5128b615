"""What is in flight, and what everything has cost: the counts by label, and the end of a collective."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import traceback
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import OrderError, RankLeftError
from ...watch.board import NUMBERS, Span, board, only
from ..stopwatch import Stopwatch
from ..waits import time_limit, waiting
from .peer_memory import PeerCollective, PeerEnded, PeerLeft, PeersDisagree, number_of
from .sums import BufferPool

# What gloo and NCCL say when a peer's process is gone.
_CLOSED = re.compile("connection (closed|reset)|broken pipe|remote process exited", re.IGNORECASE)
_unanswered: list[OrderError] = []  # the first of this process


def caught_error() -> OrderError | None:
    """The error of the first collective that could not be completed, for who knows that the script goes on; once."""
    return _unanswered.pop() if _unanswered else None


def unanswered(label: str, rank: int, error: BaseException) -> OrderError:
    """Return the error of a collective that ``rank`` cannot complete because of ``error``.

    Raises ``error`` itself if a signal handler has raised it in the wait, as torch's does when a worker of a data loader
    ends: that is no matter of other ranks.
    """
    if _is_of_handler(error):
        raise error
    made = _unanswered_by(label, rank, error)
    if not _unanswered:
        _unanswered.append(type(made)(str(made)))  # without what its traceback keeps alive
    return made


def _is_of_handler(error: BaseException) -> bool:
    """True if ``error`` was raised by a handler of a signal."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _unanswered_by(label: str, rank: int, error: BaseException) -> OrderError:
    what = f"collective '{label}' could not be completed on rank {rank}"
    if isinstance(error, PeersDisagree):
        return OrderError(f"{what}: {error}")
    if isinstance(error, PeerLeft):
        return RankLeftError(
            f"{what}: another rank takes no part in it: {error}. Remedy: let all ranks make the same calls of the engine, "
            "those that save and evaluate, too; give them the same number of batches, and leave the loop on all of them at "
            "the same step."
        )
    kind = RankLeftError if isinstance(error, PeerEnded) or _CLOSED.search(str(error)) else OrderError
    remedy = "Look at the first failing rank's own error."
    return kind(f"{what}: another rank ended or did not take part. {remedy} ({error})")


class Message:
    """A message between this rank and the rank of the world ``peer``, of the collective ``label`` that has ``tag``."""

    __slots__ = ("_number", "_work", "label", "peer")

    def __init__(self, work: dist.Work, label: str, peer: int, tag: int) -> None:
        self._work, self.label, self.peer, self._number = work, label, peer, number_of(tag)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when it is sent, or has come. Raises RuntimeError."""
        with waiting(self.label, lambda: [self.peer], only(self.peer), self._number):
            self._work.wait(time_limit() if timeout is None else timeout)  # gloo's own is that of when the group was made


class Pending:
    """One collective in flight. Keeps its buffers alive until ``wait`` has returned."""

    __slots__ = ("_finish", "_go_on", "_in_flight", "_issued", "_reads", "_watch", "_works", "done", "label")

    def __init__(
        self,
        statistics: CommunicationStatistics,
        label: str,
        works: Sequence[Started] = (),
        finish: Callable[[], None] | None = None,
        go_on: Callable[[], None] | None = None,
        reads: Sequence[torch.Tensor] = (),
    ) -> None:
        """``works``: waited for in this order; ``finish`` is called after the last. ``go_on``: see there. ``reads``: what
        they read, if nobody else keeps it.

        What waits for other pending ones, or begins them, is not timed: they are.
        """
        self._in_flight = statistics.in_flight
        made_of_others = go_on is not None or any(isinstance(work, Pending) for work in works)
        self._watch = None if made_of_others else statistics.watch
        self._issued = None if self._watch is None else self._watch.now()
        self._works: Sequence[Any] = works
        self._finish, self._go_on, self._reads = finish, go_on, reads
        self.label = label
        self.done = False
        self._in_flight.add(self)

    @property
    def buffers(self) -> list[object]:
        """The objects that hold its buffers. Whoever keeps them keeps the buffers alive after ``wait``."""
        return [*self._works, self._finish, *self._reads]

    def go_on(self) -> None:
        """Begin its next part, if it has one, when the one before is over. Without this call, ``wait`` does."""
        if self._go_on is not None and not self.done:
            self._go_on()

    def wait(self, *timeout: timedelta) -> None:
        """Return when the result is in place. Raises OrderError, naming the collective, if a peer is gone."""
        if self.done:
            return
        waited_from = None if self._watch is None else self._watch.now()
        try:
            for work in self._works:
                with waiting(self.label) if isinstance(work, dist.Work) else contextlib.nullcontext():
                    work.wait(*timeout)
        except RuntimeError as error:
            self.done = True
            self._in_flight.discard(self)
            if isinstance(error, OrderError):  # of a work that is itself pending
                raise
            raise unanswered(self.label, dist.get_rank(), error) from error
        self.done = True
        self._in_flight.discard(self)
        if self._finish is not None:
            self._finish()
        self._works, self._finish, self._go_on, self._reads = [], None, None, ()
        if self._watch is not None:
            self._watch.add(self.label, self._issued, waited_from)


_engines = itertools.count()  # that this process has made; all ranks have made as many

Started = dist.Work | PeerCollective | Message | Pending


# Labels that are kept to name the first difference; a step has a few for each unit.
_MOST_LABELS = 10_000


class Order:
    """The collectives since the last agreement of ranks, of transports that know no tags; see [Note: tags]."""

    def __init__(self) -> None:
        self.labels: deque[str] = deque(maxlen=_MOST_LABELS)
        self._checksum = 0

    def note(self, label: str) -> None:
        """Add a collective."""
        self.labels.append(label)
        self._checksum = zlib.crc32(label.encode(), self._checksum)

    @property
    def checksum(self) -> int:
        """18 bits: the sum of squares of 16,384 of these is exact in a double."""
        return self._checksum & 0x3FFFF

    def begin(self) -> None:
        """Start anew: ranks have agreed."""
        self.labels.clear()
        self._checksum = 0


@dataclass
class Traffic:
    """What one label has cost on this rank so far."""

    calls: int = 0
    bytes: int = 0  # sent to other ranks


class CommunicationStatistics:
    """What the transports of one engine have in common: counts, scratch buffers, what is in flight."""

    def __init__(self) -> None:
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.in_flight: set[Pending] = set()
        self.pool = BufferPool(torch.device("cpu"))
        self.order = Order()
        self._issued: dict[str, int] = defaultdict(int)
        self.watch: Stopwatch | None = None  # of what collectives take
        # Of the collectives of each label: other engines have such labels, too.
        self._first_number = next(_engines) % 64 * NUMBERS

    def watch_by(self, watch: Stopwatch | None) -> None:
        """Let ``watch`` time collectives from now on; None: nobody."""
        self.watch = watch

    def begin(self, label: str, span: Span, sent_bytes: int, size: int) -> None:
        """Count a collective, and show its ``size`` in bytes, which the ranks of ``span`` have in common."""
        self.count(label, sent_bytes)
        board.note_size(label, span, self.traffic[label].calls % NUMBERS + self._first_number, size)

    def count(self, label: str, sent_bytes: int) -> None:
        entry = self.traffic[label]
        entry.calls += 1
        entry.bytes += sent_bytes
        if self.watch is not None:
            self.watch.issue(label, sent_bytes)

    def tag(self, label: str) -> int:
        """The tag of the next message of this label: equal on all ranks that make the same calls."""
        self._issued[label] += 1
        return (self._issued[label] % 1024) << 20 | zlib.crc32(label.encode()) & 0xFFFFF
