"""Slow ranks: who is busy for longer than the others of its pipeline stage, in which phase, so that all wait for it.

[Note: what is compared]
A rank adds up for each phase how long it was busy: waits for other ranks are not counted, since those who wait are the fast
ones. Of WINDOW steps it tells what nine of ten took at least, and at most. A rank is slow if it takes at least more than
the others take at most, in SUCCESSION windows. So steps with a pause do not make a rank slow. Nor does a host with more to
do than cores: what a rank missed because it had no core is taken off its "at least", by the kernel's own count. The others
are their median, the lower one of two: of two ranks the faster says what is possible.

With GPUs only those can say who is late: hosts wait for them at different places. The phase is that in which the host loses
at least half of it, as where data comes late, or else the GPU's own work.

[Note: what goes over the line]
A window is some 80 bytes for each rank. The first ones of a run are told as they come. After them a host tells no window
for WINDOW_SECONDS after the last that it has told: it leaves out all but the multiples of a power of two, so that those of
the host that tells least are told by all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from .board import TIMED, Phase

SUCCESSION = 3
WINDOW_SECONDS = 4.0
_RATIO = 1.1
_OF_STEP = 0.03  # of what the others are busy in a step: less is not worth a line
_LEAST_US = 500
_KEPT = 32  # windows for which some rank has not told its times yet

_DEVICE = TIMED.index(Phase.DEVICE)
_WORDS = {
    Phase.SCRIPT: "in the script between calls of the engine",
    Phase.DATA: "loading data",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.UPDATE: "in step()",
    Phase.TRANSPORT: "in transport, which is taking what others send",
    Phase.DEVICE: "at work on its GPU",
}


class Window(NamedTuple):
    """What a rank of ``stage`` was busy in the steps of window ``number``: microseconds of a step by TIMED."""

    rank: int
    stage: int
    number: int
    least_us: tuple[int, ...]
    most_us: tuple[int, ...]


@dataclass(frozen=True)
class Slow:
    """A rank that is busy for ``busy_us`` of a step at least, the others for ``others_us`` at most."""

    rank: int
    phase: Phase
    busy_us: int
    others_us: int

    @property
    def ratio(self) -> float:
        return self.busy_us / max(self.others_us, 1)

    def text(self, host: str | None) -> str:
        """It, in words."""
        place = "" if host is None else f" on {host}"
        own, others = self.busy_us / 1e3, self.others_us / 1e3
        return (
            f"rank {self.rank}{place} is slow: of each step it is {_WORDS[self.phase]} for at least {own:.1f} ms, "
            f"the others of its stage for at most {others:.1f} ms (the median). All ranks wait for it."
        )


def slow_in(windows: Iterable[Window]) -> dict[int, Slow]:
    """The slow ranks of a window, each in the phase in which it loses most. ``windows``: those of all ranks."""
    stages: dict[int, list[Window]] = defaultdict(list)
    for window in windows:
        stages[window.stage].append(window)
    found: dict[int, Slow] = {}
    for members in stages.values():
        usual = [median_low(column) for column in zip(*(window.most_us for window in members), strict=True)]
        least = max(_LEAST_US, _OF_STEP * sum(usual))
        on_gpus = any(window.most_us[_DEVICE] for window in members)
        if on_gpus:
            if any(window.most_us[_DEVICE] < 0 for window in members):  # not known of all
                continue
            least = max(_LEAST_US, _OF_STEP * usual[_DEVICE])
        for window in members:
            lost = [max(busy - others, 0) for busy, others in zip(window.least_us, usual, strict=True)]
            at = _DEVICE if on_gpus else lost.index(max(lost))
            if lost[at] > max(least, (_RATIO - 1) * usual[at]):
                phase = lost.index(max(lost[:_DEVICE])) if 2 * max(lost[:_DEVICE]) >= lost[at] else at
                found[window.rank] = Slow(window.rank, TIMED[phase], window.least_us[phase], usual[phase])
    return found


@dataclass
class Pace:
    """The windows of a job of ``world_size`` ranks so far. ``slowest``: who loses most time now, if anybody is slow."""

    world_size: int
    slowest: Slow | None = None
    _open: dict[int, dict[int, Window]] = field(default_factory=dict)  # by number and rank, until all have come
    _in_a_row: dict[tuple[int, Phase], int] = field(default_factory=dict)
    _last: int = 0  # the window that was judged last
    _told: set[tuple[int, Phase]] = field(default_factory=set)

    def add(self, window: Window) -> list[Slow]:
        """Take a window of a rank, and return the ranks that prove slow by it; each is told once for each phase."""
        ranks = self._open.setdefault(window.number, {})
        ranks[window.rank] = window
        if len(ranks) < self.world_size:
            if len(self._open) > _KEPT:
                del self._open[
                    min(self._open, key=lambda number: (number & -number, number))
                ]  # who tells of few leaves it out
            return []
        self._open = {number: ranks for number, ranks in self._open.items() if number > window.number}
        return self._judge(window.number, slow_in(ranks.values()))

    def _judge(self, number: int, found: dict[int, Slow]) -> list[Slow]:
        before = self._in_a_row if number % max(number - self._last, 1) == 0 else {}  # by steps of a power of two
        self._last = number
        self._in_a_row = {(one.rank, one.phase): before.get((one.rank, one.phase), 0) + 1 for one in found.values()}
        proven = [one for one in found.values() if self._in_a_row[one.rank, one.phase] >= SUCCESSION]
        self.slowest = max(proven, key=lambda one: one.busy_us - one.others_us, default=None)
        new = [one for one in proven if (one.rank, one.phase) not in self._told]
        self._told.update((one.rank, one.phase) for one in new)
        return new


@dataclass
class Sparing:
    """Which windows of a host's ranks are told over a line."""

    _every: int = 1  # a power of two
    _last: int = 0  # the last window that was told
    _at: float = 0.0  # when

    def of(self, windows: Iterable[Window], now: float) -> list[Window]:
        """Those of ``windows`` that are told, ``now`` in seconds of a monotonic clock."""
        told = [window for window in windows if window.number <= SUCCESSION or window.number % self._every == 0]
        newest = max((window.number for window in told), default=0)
        if newest > self._last:
            if newest > SUCCESSION:
                self._adapt(now - self._at)
            self._last, self._at = newest, now
        return told

    def _adapt(self, seconds: float) -> None:
        if seconds < WINDOW_SECONDS:
            self._every *= 2
        elif seconds >= 2 * WINDOW_SECONDS and self._every > 1:
            self._every //= 2
