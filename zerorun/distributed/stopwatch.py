"""Stopwatch: when a rank's steps did what, for reports that nobody waits for.

[Note: hidden and waited for]
A collective is in flight from its issue until whoever needs its result has it. As long as the computation goes on
meanwhile, it is hidden; in the rest of that time the computation waits for it. These are moments of the device's own work:
on a GPU events, which are read when the outcome of a later step is known. The device has passed them by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .device import Clock

_KEPT = 100  # steps that are not read yet


@dataclass(frozen=True)
class Interval:
    """In seconds from some moment of the step. ``waited_from``: of a collective, when the computation needed it."""

    name: str
    begun: float
    ended: float
    waited_from: float | None = None

    @property
    def seconds(self) -> float:
        return self.ended - self.begun


class Stopwatch:
    """The intervals of one rank: ``during`` phases of a step, and of collectives and messages, by label."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._step: list[tuple[str, Any, Any, Any]] = []  # the names and moments of the step that runs
        self._over: deque[list[tuple[str, Any, Any, Any]]] = deque(maxlen=_KEPT)
        self._inside: set[str] = set()

    def now(self) -> Any:
        """This moment of the device's work."""
        return self._clock.now()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """The block is a phase. One that is inside another of the same name is a part of it."""
        if name in self._inside:
            yield
            return
        begun = self.now()
        self._inside.add(name)
        try:
            yield
        finally:
            self._inside.discard(name)
            self._step.append((name, begun, self.now(), None))

    def add(self, name: str, begun: Any, waited_from: Any = None) -> None:
        """A phase that began at ``begun`` is over; or a collective that was issued then, and needed at ``waited_from``."""
        self._step.append((name, begun, self.now(), waited_from))

    def issue(self, label: str, sent_bytes: int) -> None:
        """A collective is issued, of which this rank sends so many bytes."""

    def end_step(self, last_phase: str) -> None:
        """The step is over, if it has come to ``last_phase``."""
        if any(name == last_phase for name, *_ in self._step):
            self._over.append(self._step)
            self._step = []

    def read(self) -> list[list[Interval]]:
        """The steps that are over and that the device has passed, since the last call."""
        found = []
        while self._over and self._clock.has_passed(self._over[0][-1][2]):
            step, between = self._over.popleft(), self._clock.between
            zero = step[0][1]
            found.append(
                [
                    Interval(name, between(zero, begun), between(zero, ended), needed and between(zero, needed))
                    for name, begun, ended, needed in step
                ]
            )
        return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The seconds that ``spans``, each from when to when, cover together."""
    total, end = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        total += max(ended - max(begun, end), 0.0)
        end = max(end, ended)
    return total
