"""How one run of the workers went: what was noticed, the launcher's exit status, and what the user is told."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .failures import HostEnd, WorkerEnd, early_end_note, exit_status, failure_report, host_report
from .hangs import HANG_STATUS
from .job_plan import JobPlan
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
    settle_until: float | None = None
    hang: str | None = None  # the report, if the job was ended because it stood still
    terminated: bool = False
    early_said: bool = False  # whether the user was told that some have ended well and others have not
    unkillable: list[int] = field(default_factory=list)
    oom_kills: int = 0

    @property
    def stopping(self) -> bool:
        return bool(self.failed or self.lost or self.hang or self.by_signal is not None)

    def host_of(self, rank: int) -> str:
        return next(node.host for node in self.plan.nodes if any(worker.rank == rank for worker in node.workers))

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
        if self.failed and all(ends[rank].returncode == REQUEUE_STATUS for rank in self.failed):
            asked = f"[zerorun] the workers ask to be started again (exit code {REQUEUE_STATUS})"
            return REQUEUE_STATUS, [*stuck, asked]
        if self.failed:
            first = min(self.failed, key=lambda rank: ends[rank].seconds)
            others = [end for rank, end in ends.items() if rank != first]
            report = failure_report(ends[first], others, oom_kills=self.oom_kills)
            return exit_status(ends[first].returncode), [*stuck, report]
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
