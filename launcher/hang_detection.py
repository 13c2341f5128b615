"""Hangs: what the launcher makes of the boards of all hosts, and what it tells the user."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from zerorun.watch.board import RankProgress, Sight
from zerorun.watch.collective_sizes import differing, left_early
from zerorun.watch.slow_ranks import Pace, Window
from zerorun.watch.verdict import Ended, Hang, Standing, is_late, judge

from .event_loop import Turns
from .failures import RULE, WorkerEnd
from .worker_boards import Seen, training_first

HANG_STATUS = 124  # as of timeout(1)
_MOST_STACKS = 4
_JUDGE_SECONDS = 0.5
_ANSWER_SECONDS = 3.0  # for stacks from other hosts


@dataclass
class Hangs:
    """The workers of one round that do not move. ``host_of``: the host of a rank, None where there is only one."""

    world_size: int
    host_of: Callable[[int], str | None]
    say: Callable[[str], None]
    ask_stacks: Callable[[int], None]
    show_slow: Callable[[int, int], None]  # a rank and its slowness in thousandths, for rank 0
    exits_known: bool = True  # with which codes ranks have ended
    progress: dict[int, RankProgress] = field(default_factory=dict)  # of the ranks that have told, the last
    _seen: dict[int, tuple[float, Seen]] = field(default_factory=dict)
    _ended: dict[int, float] = field(default_factory=dict)  # when it was first known
    _stacks: dict[int, str] = field(default_factory=dict)
    _verdict: Hang | None = None
    _pace: Pace = field(init=False)
    _asked: float = 0.0
    _next: float = 0.0  # when to judge again
    _turns: Turns = field(default_factory=Turns)

    def __post_init__(self) -> None:
        self._pace = Pace(self.world_size)

    def on_seen(self, rank: int, seen: Seen | None) -> None:
        """Note what a worker's board says; None: it moves again."""
        if seen is None:
            self._seen.pop(rank, None)
        else:
            self._seen[rank] = time.monotonic(), seen

    def batches(self, rank: int) -> int | None:
        """Return the micro-batches on the last board of a worker that has ended; None if it had none."""
        sight = self._last(rank)
        return None if sight is None else sight.batches

    def on_stacks(self, rank: int, text: str) -> None:
        """Note the stacks of a worker."""
        self._stacks[rank] = text

    def on_progress(self, rank: int, progress: RankProgress) -> None:
        """Note how far a worker is."""
        self.progress[rank] = progress

    def on_windows(self, windows: Iterable[Window]) -> None:
        """Note what workers were busy, and tell the user of those that are slow."""
        for window in windows:
            before = self._pace.slowest
            for slow in self._pace.add(window):
                self.say(f"[zerorun] {slow.text(self.host_of(slow.rank))}")
            now = self._pace.slowest
            if now != before:
                self.show_slow(*((-1, 0) if now is None else (now.rank, round(1e3 * now.ratio))))

    def must_end(self, ends: Mapping[int, WorkerEnd], now: float) -> bool:
        """Tell the user once of each hang that begins. True if the job must end because of it."""
        self._leave_out(self._turns.held_up_s(now))
        if (not self._seen and self._verdict is None) or now < self._next:
            return False
        self._next = now + _JUDGE_SECONDS
        standing = self._standing(ends, now)
        ended = {}
        for rank, end in ends.items():
            ago_s = now - self._ended.setdefault(rank, now)
            code = end.returncode if self.exits_known else None
            ended[rank] = Ended(rank, code, end.batches, self._last(rank), ago_s)
        verdict = judge(standing, ended, self.world_size)
        before, self._verdict = self._verdict, verdict
        if verdict is None:
            if before is not None:
                self.say("[zerorun] the job goes on")
            return False
        if before is None or (before.cause, before.guilty) != (verdict.cause, verdict.guilty):
            self.say(f"[zerorun] {verdict.text}")
            self._stacks, self._asked = {}, now
            for rank in self._shown(verdict):
                self.ask_stacks(rank)
        if not verdict.ends_job(standing):
            return False
        waiting = [rank for rank in self._shown(verdict) if rank not in self._stacks and rank not in ended]
        return not waiting or now - self._asked > _ANSWER_SECONDS

    def _leave_out(self, seconds: float) -> None:
        """The last ``seconds`` have passed for nobody."""
        if seconds:
            self._seen = {rank: (at + seconds, seen) for rank, (at, seen) in self._seen.items()}
            self._ended = {rank: at + seconds for rank, at in self._ended.items()}

    def some_wait_too_long(self) -> bool:
        """True if a rank waits for others beyond its limit."""
        now = time.monotonic()
        return any(is_late(found) for found in self._standing({}, now).values())

    def other_sizes(self) -> str | None:
        """Who had another size than others for a collective, in words, by the last boards; None if nobody had."""
        found = differing({rank: seen.sight for rank, (_, seen) in self._seen.items()})
        return None if found is None else found.text(self._name)

    def left_early(self, ended: Iterable[int]) -> str | None:
        """Which of the ranks that have ``ended`` had left its script while others still needed it, in words; None: none."""
        return left_early({rank: sight for rank in ended if (sight := self._last(rank)) is not None})

    @property
    def guilty(self) -> tuple[int, ...]:
        """The ranks that are guilty of the hang that there is now."""
        return () if self._verdict is None else self._verdict.guilty

    def report(self) -> str:
        """The report of a job that has ended because it hung."""
        verdict = self._verdict
        lines = [RULE, f"zerorun: the job hangs: {verdict.text}" if verdict is not None else "zerorun: the job hangs"]
        for rank, text in sorted(self._stacks.items()):
            if text.strip():
                lines += ["", f"rank {rank}:", *(f"  {line}" for line in training_first(text).splitlines())]
        return "\n".join([*lines, RULE])

    def _last(self, rank: int) -> Sight | None:
        return self._seen[rank][1].sight if rank in self._seen else None

    def _name(self, rank: int) -> str:
        host = self.host_of(rank)
        return f"rank {rank}" if host is None else f"rank {rank} on {host}"

    def _shown(self, verdict: Hang) -> tuple[int, ...]:
        return (*verdict.guilty[:_MOST_STACKS], *verdict.others)

    def _standing(self, ends: Mapping[int, WorkerEnd], now: float) -> dict[int, Standing]:
        found = {}
        for rank, (at, seen) in self._seen.items():
            if rank not in ends:
                found[rank] = seen.older(now - at).standing(rank, self.host_of(rank))
        return found
