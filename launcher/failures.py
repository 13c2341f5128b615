"""The one report when a job has failed: who failed first, how, where, and what became of the rest."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerorun.log import counted, ranks_in_words

TRACEBACK = "Traceback (most recent call last):"
RULE = "=" * 80
# Messages of gloo, NCCL, torch and zerorun when a peer has gone.
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|time[d ]*out|another rank|remote process exited|DistBackendError"
    r"|DistNetworkError|nccl\w*error",
    re.IGNORECASE,
)
# A line of these is one without a traceback above it. Others that name a cause, such as "wandb: ...", are not.
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)(:|$)")
_NATIVE_EXCEPTION = re.compile(r"\s*what\(\): ")
SAME_BATCHES = (
    "Remedy: give all ranks the same number of batches (DistributedSampler and drop_last=True do), and leave the loop on "
    "all of them at the same step."
)

# What another start would raise, too.
_AT_START = re.compile(
    r"([\w.]+\.)?(ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError|FileNotFoundError|NotADirectoryError"
    r"|IsADirectoryError|PermissionError|JSONDecodeError|ConfigError|ModelError|LaunchError)\b"
)
_USAGE_CODES = (2, 126, 127)  # of argparse and Python; of a shell that cannot run a program
_START_SECONDS = 120.0  # in which a script comes to its first step, where zerorun does not see it

_SIGNAL_HINTS = {
    "SIGKILL": "probably out of host memory, or killed by hand or by the scheduler",
    "SIGSEGV": "segmentation fault in native code",
    "SIGABRT": "native code gave up: a failed assertion, an uncaught C++ exception or a communication watchdog",
    "SIGBUS": "bus error, often a full /dev/shm or a file that was cut while it was mapped",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "an instruction that this processor does not have",
    "SIGTERM": "ended by someone other than zerorun",
}


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended. ``returncode`` is negative for a signal, as in :mod:`subprocess`."""

    rank: int
    returncode: int
    seconds: float  # from the start of the job
    stderr_tail: Sequence[str]
    asked_to_stop: bool
    log: Path | None = None
    host: str | None = None  # None: the launcher's own
    batches: int | None = None  # micro-batches that it had given to backward, if its board told

    @property
    def where(self) -> str:
        return f"rank {self.rank}" if self.host is None else f"rank {self.rank} on {self.host}"

    @property
    def how(self) -> str:
        """How it ended, in words."""
        return describe_end(self.returncode, asked=self.asked_to_stop)


@dataclass(frozen=True)
class HostEnd:
    """A host that the job has lost."""

    host: str
    reason: str
    seconds: float  # from the start of the job until the loss was noticed
    ranks: Sequence[int]
    last_seen: float  # seconds from the start of the job


def exit_status(returncode: int) -> int:
    """The launcher's own exit status for a worker's return code: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def describe_end(returncode: int, *, asked: bool = False) -> str:
    """Describe a return code, with the likely cause of a signal. ``asked``: the worker had been told to end."""
    if returncode >= 0:
        via_shell = f" (in a shell, {_signal_name(returncode - 128)})" if 128 < returncode < 128 + 65 else ""
        return f"exit code {returncode}{via_shell}"
    name = _signal_name(-returncode)
    hint = "it had been told to end, and had not when --grace was over" if asked and name == "SIGKILL" else None
    hint = hint or _SIGNAL_HINTS.get(name)
    return f"killed by {name} (signal {-returncode})" + (f": {hint}" if hint else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_traceback(lines: Sequence[str]) -> list[str]:
    """Return ``lines`` from the header of the last Python traceback on; an empty list if there is none."""
    for index in range(len(lines) - 1, -1, -1):
        at = lines[index].find(TRACEBACK)
        if at >= 0:
            # An exception group's header is indented; anything else in front is a progress bar's open line.
            lead = lines[index][:at]
            start = lines[index] if lead.strip() in ("", "+ Exception Group") else lines[index][at:]
            return [start, *lines[index + 1 :]]
    return []


def exception_line(end: WorkerEnd) -> str | None:
    """Return the line that names the exception with which it ended; None if there is none.

    Below a traceback it is the first that is not indented. That of native code counts if a signal has ended the worker.
    """
    lines = [line for line in end.stderr_tail if line.strip()]
    if end.returncode < 0 and (native := [line for line in lines if _NATIVE_EXCEPTION.match(line)]):
        return native[-1]
    traceback = last_traceback(lines)
    found = [line for line in traceback[1:] if not line[0].isspace()][:1] if traceback else lines[-1:]
    return found[0] if found and (traceback or _EXCEPTION.match(found[0])) else None


def failure_line(end: WorkerEnd) -> str:
    """Return the line by which failures are compared: the exception, else the last line of stderr, else how it ended."""
    spoken = [line for line in end.stderr_tail if line.strip()]
    return exception_line(end) or (spoken[-1] if spoken else end.how)


def _misses_a_peer(end: WorkerEnd) -> bool:
    """Whether its exception says that another rank has gone. What else it wrote says nothing about its end."""
    return _PEER_GONE.search(exception_line(end) or "") is not None


def because_of_a_peer(end: WorkerEnd) -> bool:
    """True if what it failed with says that another rank has gone."""
    return end.returncode > 0 and _misses_a_peer(end)


def fails_again(end: WorkerEnd, *, seen: bool) -> bool:
    """True for a failure at the start of a script that another start would repeat. ``seen``: zerorun has run in it."""
    if end.batches or not (seen or end.seconds < _START_SECONDS):
        return False
    return end.returncode in _USAGE_CODES or (end.returncode > 0 and _AT_START.match(exception_line(end) or "") is not None)


def failure_report(first: WorkerEnd, others: Sequence[WorkerEnd], *, oom_kills: int = 0, cause: str | None = None) -> str:
    """The one report: who failed first, how, where, and what became of the rest.

    ``oom_kills`` is how many processes the kernel's out-of-memory killer ended here during the job. ``cause``: what the
    ranks' boards say was wrong before.
    """
    traceback = last_traceback(first.stderr_tail)
    early = ended_early(first, others)
    lines = [RULE]
    if cause is not None:
        when = f"{first.seconds:.1f} s after the start"
        lines += [f"zerorun: {cause}", "", f"{first.where} failed first because of it, {when}"]
    elif early is not None:
        when = f"{early.seconds:.1f} s after the start{_after(early)}"
        lines.append(f"zerorun: {early.where} ended with exit code 0, {when}; others were waiting for it")
        lines += [
            f"  {SAME_BATCHES}",
            "",
            f"{first.where} failed first because of it, {first.seconds:.1f} s after the start{_after(first)}",
        ]
    else:
        lines.append(f"zerorun: {first.where} failed first, {first.seconds:.1f} s after the start")
    lines.append(f"  {first.how}")
    if oom_kills:
        lines.append(f"  the kernel's out-of-memory killer ended {oom_kills} process(es) during this job")
    if traceback:
        lines += ["", *traceback]
    elif shown := [line for line in first.stderr_tail if line.strip()][-20:]:  # a reader would not count blank lines
        lines += ["", f"the last {len(shown)} lines of its stderr:" if len(shown) > 1 else "its stderr:"]
        lines += [f"  {line}" for line in shown]
    else:
        lines += ["", "it wrote nothing to stderr"]
    lines += ["", *_others(first, others)]
    if first.log is not None:
        lines.append(f"log: {first.log}" + ("" if first.host is None else f" (on {first.host})"))
    lines.append(RULE)
    return "\n".join(lines)


def _after(end: WorkerEnd) -> str:
    return f", after {counted(end.batches, 'micro-batch', 'es')}" if end.batches else ""


def ended_early(first: WorkerEnd, others: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Return the first worker that ended with exit code 0, if all that failed did so because a peer had gone; else None."""
    left = [end for end in others if end.returncode == 0 and not end.asked_to_stop]
    if not left or not all(map(_misses_a_peer, (first, *_failed(others)))):
        return None
    return min(left, key=lambda end: end.seconds)


def early_end_note(ended: Sequence[WorkerEnd], running: Sequence[int], seconds: float) -> str:
    """Describe a job in which some ranks have ``ended`` well, the first of them ``seconds`` ago, and others still run."""
    first = min(ended, key=lambda end: end.seconds)
    rest = [end.rank for end in ended if end is not first]
    then = f", and then {ranks_in_words(rest)}" if rest else ""
    return (
        f"{first.where} ended with exit code 0 {seconds:.0f} s ago{then}; {ranks_in_words(running)} still "
        f"{'runs' if len(running) == 1 else 'run'}, and will fail if waiting for it. {SAME_BATCHES}"
    )


def host_report(lost: Sequence[HostEnd], others: Sequence[WorkerEnd]) -> str:
    """The one report when the first thing to fail was a host."""
    first = lost[0]
    lines = [RULE, f"zerorun: host {first.host} failed first, {first.seconds:.1f} s after the start", f"  {first.reason}"]
    lines += ["", f"{ranks_in_words(first.ranks)} of the job ran there"]
    lines += [f"later, host {end.host}: {end.reason}" for end in lost[1:]]
    lines += _later(_failed(others), "failed") + _stopped(others)
    return "\n".join([*lines, RULE])


def _others(first: WorkerEnd, others: Sequence[WorkerEnd]) -> list[str]:
    failed = _failed(others)
    alike = [end for end in failed if failure_line(end) == failure_line(first) and end.returncode == first.returncode]
    different = [end for end in failed if end not in alike]
    lines = []
    if alike:
        noun = "other" if len(alike) == 1 else "others"
        lines.append(f"{len(alike)} {noun} alike: {ranks_in_words([end.rank for end in alike])}")
    return lines + _later(different, "in other ways") + _stopped(others)


def _failed(ends: Sequence[WorkerEnd]) -> list[WorkerEnd]:
    """Return those that failed without having been told to stop."""
    return [end for end in ends if end.returncode != 0 and not end.asked_to_stop]


def _later(ends: Sequence[WorkerEnd], how: str) -> list[str]:
    """Describe the first four, and list the ranks of the rest; ``how`` says in words how these ended."""
    lines = [f"later, {end.where}: {end.how}: {failure_line(end)}" for end in ends[:4]]
    if len(ends) > 4:
        lines.append(f"later, {len(ends) - 4} more {how}: {ranks_in_words([end.rank for end in ends[4:]])}")
    return lines


def _stopped(ends: Sequence[WorkerEnd]) -> list[str]:
    stopped = [end.rank for end in ends if end.asked_to_stop]
    return [f"stopped by zerorun because of this: {ranks_in_words(stopped)}"] if stopped else []
