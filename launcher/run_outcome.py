"""How one run of the workers went: what was noticed, the launcher's exit status, and what the user is told."""

from __future__ import annotations

import signal
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from .failures import (
    HostEnd,
    WorkerEnd,
    because_of_a_peer,
    early_end_note,
    exit_status,
    fails_again,
    failure_line,
    failure_report,
    host_report,
)
from .hang_detection import HANG_STATUS
from .job_plan import JobPlan
from .restarts import Attempt
from .sbatch import REQUEUE_STATUS

SETTLE_SECONDS = 1.0
EARLY_SECONDS = 30.0  # from a worker's good end, while others go on, until the user is told
HOST_LOST_STATUS = 69  # EX_UNAVAILABLE


@dataclass
class Round:
    """One run of the workers. Times are of this host's ``time.monotonic``."""

    plan: JobPlan
    start: float
    ends: dict[int, WorkerEnd] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)  # ranks that failed by themselves
    lost: list[HostEnd] = field(default_factory=list)
    by_signal: int | None = None
    told: bool = False  # a signal has been passed on to the workers, which may ask to be started again because of it
    held: bool = False  # signals are kept for the next workers: these have ended without them
    settle_until: float | None = None
    noticed: float | None = None  # when the first thing that ends it was
    warm: bool = False  # whether nodes have been told to keep processes in reserve
    refused: bool = False  # a host could not start its workers
    hang: str | None = None  # the report, if the job was ended because it stood still
    other_sizes: str | None = None  # who had another size than others for a collective, if that is why ranks failed
    terminated: bool = False
    early_said: bool = False  # whether the user was told that some have ended well and others have not
    unkillable: list[int] = field(default_factory=list)
    oom_kills: int = 0

    @property
    def stopping(self) -> bool:
        return bool(self.failed or self.lost or self.hang or self.by_signal is not None)

    def host_of(self, rank: int) -> str:
        return next(node.host for node in self.plan.nodes if any(worker.rank == rank for worker in node.workers))

    @property
    def asks_again(self) -> bool:
        """True if the workers that failed ask to be started again: others may still save."""
        return bool(self.failed) and all(self.ends[rank].returncode == REQUEUE_STATUS for rank in self.failed)

    def leaves(self, status: int, *, has_queue: bool) -> str | None:
        """Return why workers that ask to be started again, by ``status``, are not started here; None if they may be."""
        if status != REQUEUE_STATUS:
            return None
        if has_queue:
            return "this batch job goes back into the queue"
        why = "the launcher has passed on a signal, so this machine may go away. Remedy: start the job again elsewhere"
        return why if self.told else None

    def first_failure(self, tails: Mapping[int, list[str]]) -> WorkerEnd | None:
        """Return the end of the worker that failed first by itself; None if it was none, or a host before it.

        It takes a rank a moment to leave its process groups. Those that miss it may be faster.
        """
        if not self.failed or (self.lost and not self._failed_before()):
            return None
        ends = [replace(self.ends[rank], stderr_tail=tails.get(rank, ())) for rank in self.failed]
        return min(ends, key=lambda end: (because_of_a_peer(end), end.seconds))

    def attempt(self, tails: Mapping[int, list[str]], seen: Container[int], now: float) -> Attempt:
        """Return what this round came to, at its end. ``seen``: the ranks in which zerorun has run."""
        first, noticed = self.first_failure(tails), self.noticed or now
        failed, cause, hopeless = noticed, "nothing has failed", self.refused
        if self.hang is not None:
            cause = self.hang.splitlines()[1].removeprefix("zerorun: ")
        elif first is not None:
            line = failure_line(first)
            failed, cause = self.start + first.seconds, f"{first.where}: {line if first.returncode > 0 else first.how}"
            hopeless = fails_again(first, seen=first.rank in seen)
            cause = self.other_sizes or cause
        elif self.lost:
            failed, cause = self.start + self.lost[0].last_seen, f"host {self.lost[0].host}: {self.lost[0].reason}"
        return Attempt(self.start, min(failed, noticed), noticed, now, cause, hopeless)

    def early_note(self, now: float) -> str | None:
        """Return, once, a note that a worker ended well EARLY_SECONDS ago or earlier and others still run; else None.

        It may be as intended (rank 0 writes a file), or the others may wait in a collective for half an hour.
        """
        ended = [end for end in self.ends.values() if end.returncode == 0]
        if self.early_said or self.stopping or not ended:
            return None
        ago = now - self.start - min(end.seconds for end in ended)
        running = [worker.rank for worker in self.plan.workers if worker.rank not in self.ends]
        if not running or ago < EARLY_SECONDS:
            return None
        self.early_said = True
        return early_end_note(ended, running, ago)

    def conclude(self, tails: Mapping[int, list[str]]) -> tuple[int, list[str]]:
        """Return (exit status, lines for the user). ``tails``: the last lines of the workers' stderr, by rank."""
        ends = {rank: replace(end, stderr_tail=tails.get(rank, ())) for rank, end in self.ends.items()}
        if self.by_signal is not None:
            return self._after_signal(self.by_signal, list(ends.values()))
        stuck = [f"[zerorun] these processes are still alive after SIGKILL: {self.unkillable}"] if self.unkillable else []
        if self.hang is not None:
            return HANG_STATUS, [*stuck, self.hang]
        if self.lost and not self._failed_before():
            return HOST_LOST_STATUS, [*stuck, host_report(self.lost, list(ends.values()))]
        if self.asks_again:
            asked = f"[zerorun] the workers ask to be started again (exit code {REQUEUE_STATUS})"
            return REQUEUE_STATUS, [*stuck, asked]
        first = self.first_failure(tails)
        if first is not None and first.returncode in self.plan.told_codes:
            return first.returncode, stuck
        if first is not None:
            others = [end for rank, end in ends.items() if rank != first.rank]
            report = failure_report(first, others, oom_kills=self.oom_kills, cause=self.other_sizes)
            return exit_status(first.returncode), [*stuck, report]
        return 1 if self.unkillable else 0, stuck

    def _after_signal(self, number: int, ends: list[WorkerEnd]) -> tuple[int, list[str]]:
        """Return (exit status, lines for the user).

        The status is 0 if every worker ended well (it saved and left, say), REQUEUE_STATUS if the others asked to be
        started again, else 128 + the signal, as in a shell.
        """
        lines = [f"[zerorun] these processes are still alive after SIGKILL: {self.unkillable}"] if self.unkillable else []
        lines += [f"[zerorun] {end.where}: {end.how}" for end in ends if end.returncode not in (0, -number, REQUEUE_STATUS)]
        lines += [f"[zerorun] {lost.host}: {lost.reason}" for lost in self.lost]
        if not self.unkillable:
            lines.append(f"[zerorun] stopped by {signal.Signals(number).name}; all {len(ends)} workers have ended")
        if not self.lost and {end.returncode for end in ends} in ({REQUEUE_STATUS}, {0, REQUEUE_STATUS}):
            return REQUEUE_STATUS, lines
        return (128 + number if self.lost or any(end.returncode for end in ends) else 0), lines

    def _failed_before(self) -> bool:
        """Whether a worker failed before the first host was lost, and not because of it."""
        if not self.failed:
            return False
        failed = min(self.ends[rank].seconds for rank in self.failed)
        return failed + SETTLE_SECONDS < min(host.last_seen for host in self.lost)
