"""What the workers said: passing it on while they run, and the one report when a worker has failed.

Every worker's stdout and stderr are pipes that the supervisor reads, always. A rank that inherited the terminal
would keep its progress bar, but its traceback could then not be repeated in the report, and its bytes would land in
the middle of other ranks' lines. Pipes give both; what a terminal would have given is restored like this:

* Rank 0 goes out as it comes, chunk by chunk, to a terminal and when it is the only rank: bars that redraw with a
  carriage return, and prompts, work. ``ZERORUN_TTY`` and ``COLUMNS`` tell it that a terminal is there.
* Elsewhere rank 0 goes out in whole lines (or redraws), unchanged, and the other ranks always in whole lines with
  ``[rank k] `` in front. Of a line that was redrawn only the last state is kept, as a terminal would show it.
* When another rank speaks while a rank's line is still open, a line feed comes between: lines never mix.
* A log file gets a rank's stream byte for byte.

Nothing here waits: a reader that does not read (a paused pager) must not keep the launcher from seeing a dead worker.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

TAIL_LINES = 60
_MAX_OPEN_LINE = 1 << 20  # bytes without a line feed after which we stop waiting for one
_MAX_TAIL_LINE = 4096
_CONGESTED = 1 << 20  # bytes waiting for a slow reader after which the workers are made to wait too
_SAFE_WRITE = 4096  # PIPE_BUF: a pipe that is ready for writing takes this much without blocking
_TRACEBACK = "Traceback (most recent call last):"
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ?")  # torch.distributed puts it in front of a traceback's lines
_RULE = "=" * 80

_SIGNAL_HINTS = {
    "SIGKILL": "probably out of host memory, or killed by hand or by the scheduler",
    "SIGSEGV": "segmentation fault in native code",
    "SIGABRT": "native code gave up: a failed assertion, an uncaught C++ exception or a communication watchdog",
    "SIGBUS": "bus error, often a full /dev/shm or a file that was cut while it was mapped",
    "SIGFPE": "arithmetic error in native code",
    "SIGILL": "an instruction that this processor does not have",
    "SIGTERM": "ended by someone other than zerorun",
}


class Screen:
    """One place where output appears: the launcher's stdout or stderr, or both when they are the same."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending = bytearray()
        self._open_rank: int | None = None  # whose line has no line feed yet
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._broken = False

    def put(self, rank: int, data: bytes) -> None:
        """Append ``data`` of ``rank``; rank -1 is the launcher itself."""
        if not data or self._broken:
            return
        if self._open_rank not in (None, rank):
            self._pending += b"\n"
        self._open_rank = None if data.endswith(b"\n") else rank
        self._pending += data
        self.drain()

    def say(self, text: str) -> None:
        """A message of the launcher's own."""
        self.put(-1, text.encode(errors="replace") + b"\n")

    def drain(self) -> None:
        """Write as much as the reader takes without waiting."""
        while self._pending and self._poll.poll(0):
            try:
                written = os.write(self._fd, self._pending[:_SAFE_WRITE])
            except BlockingIOError:
                return
            except OSError:  # the reader is gone: the job goes on without it
                self._broken = True
                self._pending.clear()
                return
            del self._pending[:written]

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    @property
    def congested(self) -> bool:
        return len(self._pending) > _CONGESTED


def open_screens() -> tuple[Screen, Screen]:
    """The screens for stdout and stderr; the same one twice when both lead to the same place."""
    stdout = Screen(1)
    with contextlib.suppress(OSError):  # one of them is closed
        if os.path.samestat(os.fstat(1), os.fstat(2)):
            return stdout, stdout
    return stdout, Screen(2)


class Tail:
    """The last lines of a stream, decoded, each as a terminal would show it, without torch's ``[rank0]: ``."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._open = b""

    def feed(self, chunk: bytes) -> None:
        *whole, self._open = (self._open + chunk).split(b"\n")
        for line in whole:
            self._lines.append(_text(line))
        if len(self._open) > _MAX_OPEN_LINE:
            self._open = _shown(self._open)[-_MAX_TAIL_LINE:]

    def lines(self) -> list[str]:
        rest = _text(self._open)
        return [*self._lines, *([rest] if rest else [])]


def _text(line: bytes) -> str:
    text = _shown(line)[:_MAX_TAIL_LINE].decode(errors="replace")
    return text[prefix.end() :] if (prefix := _TORCH_PREFIX.match(text)) else text


def _shown(line: bytes) -> bytes:
    """What remains visible of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Forwarder:
    """Passes one stream of one worker on to the screen, its log file and its tail."""

    def __init__(self, rank: int, screen: Screen, *, raw: bool, tail: Tail | None, log: Path | None) -> None:
        self._rank = rank
        self._screen = screen
        self._raw = raw
        self._tail = tail
        self._prefix = b"" if rank == 0 else b"[rank %d] " % rank
        self._open = b""
        self._log: BinaryIO | None = open(log, "ab", buffering=0) if log is not None else None  # noqa: SIM115

    def feed(self, chunk: bytes) -> None:
        self._write_log(chunk)
        if self._tail is not None:
            self._tail.feed(chunk)
        if self._raw:
            self._screen.put(self._rank, chunk)
            return
        self._open += chunk
        self._screen.put(self._rank, self._take_redraws() if self._rank == 0 else self._take_lines())

    def close(self) -> None:
        """The stream has ended: what is left of it goes out as it is."""
        if self._open:
            end = b"" if self._rank == 0 else b"\n"
            self._screen.put(self._rank, self._prefix + (_shown(self._open) if end else self._open) + end)
            self._open = b""
        if self._log is not None:
            self._log.close()

    def _take_lines(self) -> bytes:
        *whole, self._open = self._open.split(b"\n")
        if len(self._open) > _MAX_OPEN_LINE:
            whole, self._open = [*whole, self._open], b""
        return b"".join(self._prefix + _shown(line) + b"\n" for line in whole)

    def _take_redraws(self) -> bytes:
        """Up to the last line feed or carriage return; one at the very end may be half of a CR LF and waits."""
        cut = 1 + max(self._open.rfind(b"\n"), self._open.rfind(b"\r", 0, len(self._open) - 1))
        if len(self._open) - cut > _MAX_OPEN_LINE:
            cut = len(self._open)
        taken, self._open = self._open[:cut], self._open[cut:]
        return taken

    def _write_log(self, chunk: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(chunk)
        except OSError as error:  # a full disk must not end the training
            what = f"{self._log.name}: {error.strerror}"
            self._screen.say(f"[zerorun] {what}; rank {self._rank} is no longer logged there")
            self._log.close()
            self._log = None


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended. ``returncode`` is negative for a signal, as in :mod:`subprocess`."""

    rank: int
    returncode: int
    seconds: float
    stderr_tail: Sequence[str]
    asked_to_stop: bool
    log: Path | None = None


def exit_status(returncode: int) -> int:
    """The launcher's own exit status for a worker's return code: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def describe_end(returncode: int) -> str:
    """A return code in words, with the likely cause of a signal."""
    if returncode >= 0:
        via_shell = f" (in a shell, {_signal_name(returncode - 128)})" if 128 < returncode < 128 + 65 else ""
        return f"exit code {returncode}{via_shell}"
    name = _signal_name(-returncode)
    hint = _SIGNAL_HINTS.get(name)
    return f"killed by {name} (signal {-returncode})" + (f": {hint}" if hint else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_traceback(lines: Sequence[str]) -> list[str]:
    """From the header of the last Python traceback to the end of ``lines``; empty when there is none."""
    for index in range(len(lines) - 1, -1, -1):
        at = lines[index].find(_TRACEBACK)
        if at >= 0:
            # An exception group's header is indented; anything else in front is a progress bar's open line.
            lead = lines[index][:at]
            start = lines[index] if lead.strip() in ("", "+ Exception Group") else lines[index][at:]
            return [start, *lines[index + 1 :]]
    return []


def failure_line(end: WorkerEnd) -> str:
    """The line by which two failures count as alike: the exception, else the last words, else how it ended."""
    traceback = last_traceback(end.stderr_tail)
    for line in traceback[1:]:
        if line and not line[0].isspace():
            return line
    spoken = [line for line in end.stderr_tail if line.strip()]
    return spoken[-1] if spoken else describe_end(end.returncode)


def failure_report(first: WorkerEnd, others: Sequence[WorkerEnd], *, oom_kills: int = 0) -> str:
    """The one report: who failed first, how, where, and what became of the rest.

    ``oom_kills`` is how many processes the kernel's out-of-memory killer ended here during the job.
    """
    traceback = last_traceback(first.stderr_tail)
    lines = [_RULE, f"zerorun: rank {first.rank} failed first, {first.seconds:.1f} s after the start"]
    lines.append(f"  {describe_end(first.returncode)}")
    if oom_kills:
        lines.append(f"  the kernel's out-of-memory killer ended {oom_kills} process(es) during this job")
    if traceback:
        lines += ["", *traceback]
    elif any(line.strip() for line in first.stderr_tail):
        shown = list(first.stderr_tail)[-20:]
        lines += ["", f"the last {len(shown)} lines of its stderr:" if len(shown) > 1 else "its stderr:"]
        lines += [f"  {line}" for line in shown]
    else:
        lines += ["", "it wrote nothing to stderr"]
    lines += ["", *_others(first, others)]
    if first.log is not None:
        lines.append(f"log: {first.log}")
    lines.append(_RULE)
    return "\n".join(lines)


def _others(first: WorkerEnd, others: Sequence[WorkerEnd]) -> list[str]:
    failed = [end for end in others if end.returncode != 0 and not end.asked_to_stop]
    alike = [end for end in failed if failure_line(end) == failure_line(first) and end.returncode == first.returncode]
    different = [end for end in failed if end not in alike]
    stopped = [end for end in others if end.asked_to_stop]
    lines = []
    if alike:
        noun = "other" if len(alike) == 1 else "others"
        lines.append(f"{len(alike)} {noun} alike: {_ranks(alike)}")
    for end in different[:4]:
        lines.append(f"later, rank {end.rank}: {describe_end(end.returncode)}: {failure_line(end)}")
    if len(different) > 4:
        lines.append(f"later, {len(different) - 4} more in other ways: {_ranks(different[4:])}")
    if stopped:
        lines.append(f"stopped by zerorun because of this: {_ranks(stopped)}")
    return lines


def _ranks(ends: Sequence[WorkerEnd]) -> str:
    """``rank 3`` or ``ranks 0, 2-7``."""
    runs: list[list[int]] = []
    for rank in sorted(end.rank for end in ends):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ends) == 1 else f"ranks {text}"


def count_oom_kills() -> int:
    """How often the out-of-memory killer has struck in this control group so far; 0 where that cannot be read."""
    for group in _control_groups():
        try:
            events = (group / "memory.events").read_text()
        except OSError:
            continue
        counts = dict(line.split() for line in events.splitlines())
        return int(counts.get("oom_kill", 0))
    return 0


def _control_groups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return [root / line[3:].lstrip("/"), root]
    return [root]
