"""Outputs: puts the output of all workers of a job, and the launcher's own messages, on the launcher's two screens."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from .job_plan import WorkerCommand
from .node import STREAMS
from .screen import Forwarder, Tail, open_screens

_FLUSH_SECONDS = 1.0


class Outputs:
    """``shown``: stream -> whether it is shown; a missing one is. ``local_ranks``: whose output is shown; None for all."""

    def __init__(self, shown: Mapping[str, bool], local_ranks: frozenset[int] | None) -> None:
        self._shown, self._local_ranks = shown, local_ranks
        self._stdout, self._stderr = open_screens()
        self._workers: Sequence[WorkerCommand] = ()
        self._streams: dict[tuple[int, str], Forwarder] = {}
        self._tails: dict[int, Tail] = {}

    def expect(self, workers: Sequence[WorkerCommand]) -> None:
        """Begin another round: output that is taken from here on is that of ``workers``."""
        self._workers, self._streams, self._tails = workers, {}, {}

    def take(self, rank: int, stream: str, chunk: bytes) -> None:
        """Take a chunk that a worker has written; an empty one ends its stream."""
        forwarder = self._streams.get((rank, stream))
        if forwarder is None:
            forwarder = self._streams[rank, stream] = self._forwarder(rank, stream)
        if chunk:
            forwarder.feed(chunk)
        else:
            forwarder.close()

    def _forwarder(self, rank: int, stream: str) -> Forwarder:
        screen, fd = (self._stdout, 1) if stream == STREAMS[0] else (self._stderr, 2)
        tail = self._tails.setdefault(rank, Tail()) if stream == STREAMS[1] else None
        raw = rank == 0 and (len(self._workers) == 1 or os.isatty(fd))
        local_rank = next(worker.local_rank for worker in self._workers if worker.rank == rank)
        shown = self._shown.get(stream, True) and (self._local_ranks is None or local_rank in self._local_ranks)
        return Forwarder(rank, screen if shown else None, raw=raw, tail=tail)

    def tails(self) -> dict[int, list[str]]:
        """The last lines of stderr, by rank."""
        return {rank: tail.lines() for rank, tail in self._tails.items()}

    def say(self, text: str) -> None:
        """Write a message of the launcher itself."""
        self._stderr.say(text)

    def drain(self) -> None:
        """Write as much as readers take without waiting."""
        self._stdout.drain()
        self._stderr.drain()

    @property
    def pending(self) -> bool:
        return self._stdout.pending or self._stderr.pending

    @property
    def congested(self) -> bool:
        return self._stdout.congested or self._stderr.congested

    def flush(self) -> None:
        """Write everything, but give up after _FLUSH_SECONDS if a reader does not read."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while self.pending and time.monotonic() < deadline:
            self.drain()
            time.sleep(0.01)
