"""Restarts: what each start of the workers came to, whether another one makes sense, and what interruptions have cost.

Pure bookkeeping. All moments are in seconds of the launcher's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from zerorun.log import counted
from zerorun.watch.board import RankProgress

MOST_IN_VAIN = 3  # restarts in a row that make no step which was not made before
VAIN_SECONDS = 60.0  # where zerorun cannot see the steps, a shorter start has made none


@dataclass(frozen=True)
class Attempt:
    """One start of all workers, after its end. ``step``: the furthest; None: zerorun has not seen the workers train."""

    begun: float
    failed: float  # when the first failure came
    noticed: float  # when the launcher knew of it
    ended: float  # when no process was left
    cause: str
    hopeless: bool  # it ended in a way in which another start would end, too, before any step
    step: int | None = None
    loaded: int | None = None  # the step that it went on from, if it has loaded a checkpoint
    useful_s: float = 0.0  # that went into steps which were not made before

    def row(self, number: int) -> tuple[str, ...]:
        """The words for a table: number, seconds, steps, cause."""
        first = self.loaded or 0
        steps = "none" if not self.step or self.step == first else f"{first + 1} to {self.step}"
        return str(number), f"{self.failed - self.begun:.1f} s", steps, self.cause

    def is_in_vain(self, furthest: int) -> bool:
        """True if it has made no step after ``furthest``.

        A script that loads by itself begins to count anew. Then, as where nothing is known, its time decides.
        """
        if (self.step or 0) > furthest:
            return False
        return self.loaded is not None or self.step == 0 or self.ended - self.begun < VAIN_SECONDS


@dataclass(frozen=True)
class StartPace:
    """What progress of the ranks together says of a start: when it trained, from which step, and how long steps take."""

    step: int
    loaded: int
    shown: float
    met: float
    load_s: float
    trains: float  # when its first step began
    step_s: float
    at: float

    @classmethod
    def of(cls, found: Mapping[int, RankProgress]) -> StartPace | None:
        """Return it for ranks that have all made a step; None before."""
        told = list(found.values())
        if not told or any(not progress.began for progress in told):
            return None
        last = max(told, key=lambda progress: progress.step)
        loaded, began = last.loaded or 0, max(progress.began for progress in told)
        more = last.step - loaded - 1
        step_s = max(0.0, last.at - began) / more if more > 0 else 0.0
        load_s = max(progress.load_s for progress in told)
        shown = max(progress.shown for progress in told)
        met = max(shown, *(progress.met for progress in told))
        trains = max(began - step_s, met + load_s)
        return cls(last.step, loaded, shown, met, load_s, trains, step_s, last.at)

    def useful_s(self, furthest: int) -> float:
        """The seconds that went into steps after ``furthest``: not more than there have been since it trains."""
        return min(max(0, self.step - max(self.loaded, furthest)) * self.step_s, max(0.0, self.at - self.trains))


class Restarts:
    """Those of one job, of which there may be ``allowed``."""

    def __init__(self, allowed: int, say: Callable[[str], None]) -> None:
        self._allowed, self._say = allowed, say
        self._attempts: list[Attempt] = []
        self._told = True  # whether the user knows what the last restart has cost

    @property
    def left(self) -> bool:
        """True if the workers may be started again after the start that is under way."""
        return len(self._attempts) < self._allowed

    @property
    def _furthest(self) -> int:
        return max((attempt.step or 0 for attempt in self._attempts), default=0)

    def look(self, begun: float, found: Mapping[int, RankProgress]) -> None:
        """Tell the user, once, what the restart has cost: when the workers are further than those before them were."""
        if self._told or (pace := StartPace.of(found)) is None or pace.step <= self._furthest:
            return
        self._told, last, furthest = True, self._attempts[-1], self._furthest
        repeated = max(0, furthest - pace.loaded)
        parts = {
            "detect": last.noticed - last.failed,
            "end": last.ended - last.noticed,
            "regroup": begun - last.ended,
            "start": pace.shown - begun,
            "rendezvous": pace.met - pace.shown,
            "load": pace.load_s,
            "build": pace.trains - pace.met - pace.load_s,
            "repeat": repeated * pace.step_s,
        }
        words = ", ".join(f"{name} {max(0.0, seconds):.1f}" for name, seconds in parts.items())
        total = pace.trains + parts["repeat"] - last.failed
        again = f"{counted(repeated, 'step')} repeated"
        self._say(f"[zerorun] back at step {furthest} after {total:.1f} s, {again}: {words}")

    def end(self, attempt: Attempt, found: Mapping[int, RankProgress]) -> None:
        """Note what a start came to. ``found``: what the ranks have told of it."""
        if found:
            last, pace = max(found.values(), key=lambda progress: progress.step), StartPace.of(found)
            useful_s = 0.0 if pace is None else pace.useful_s(self._furthest)
            attempt = replace(attempt, step=last.step, loaded=last.loaded, useful_s=useful_s)
        self._attempts.append(attempt)
        self._told = False

    def refusal(self) -> str | None:
        """Return why the workers should not be started again; None if they should."""
        last = self._attempts[-1]
        if last.hopeless and not self._furthest:
            return "it has failed at its start, and would do so again"
        in_vain, furthest = 0, self._attempts[0].step or 0
        for attempt in self._attempts[1:]:
            in_vain = in_vain + 1 if attempt.is_in_vain(furthest) else 0
            furthest = max(furthest, attempt.step or 0)
        if in_vain < MOST_IN_VAIN:
            return None
        words = f"{in_vain} restarts in a row have made no step that was not made before"
        return "\n  ".join([words, *_table(found.row(number) for number, found in list(enumerate(self._attempts))[-8:])])

    def goodput(self) -> str | None:
        """Return what share of the time went into steps that count, in words; None if zerorun has not seen any."""
        useful = sum(attempt.useful_s for attempt in self._attempts)
        if not self._allowed or not useful:
            return None
        total = self._attempts[-1].ended - self._attempts[0].begun
        restarts = counted(len(self._attempts) - 1, "restart") if len(self._attempts) > 1 else "no restart"
        steps = self._furthest - (self._attempts[0].loaded or 0)
        return f"goodput {useful / total:.1%}: {useful:.1f} s of {total:.1f} s went into {steps} steps, {restarts}"


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    whole = [("start", "after", "steps", "ended by"), *rows]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)][:-1]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in whole]
