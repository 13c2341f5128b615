"""The workers' output on its way to the terminal: in whole lines, labelled by rank, never mixed.

Every worker's stdout and stderr are always pipes that its node reads. A rank that inherited the terminal would keep its
progress bar, but its traceback could not be repeated in the report, and its bytes would land in the middle of other ranks'
lines. Pipes avoid both; what a terminal would have offered is restored like this:

* The output of rank 0 is passed on as it comes, chunk by chunk, if it goes to a terminal or there is only one rank:
  progress bars that redraw with a carriage return work, and so do prompts. ``ZERORUN_TTY`` and ``COLUMNS`` tell the rank
  that there is a terminal.
* Otherwise the output of rank 0 is passed on in whole lines (or redraws), unchanged. That of other ranks always goes out
  in whole lines with ``[rank k] `` in front. Only the last state of a redrawn line is kept, as a terminal would show it.
* If a rank writes while another rank's line is still open, a line feed is put in between: lines never mix.

Nothing here waits: a reader that does not read (a paused pager) must not keep the launcher from seeing a dead worker. At
the end of the job the launcher stays until all is read or the reader is gone, as any program does, or until a signal comes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from zerorun.log import counted

from .failures import TRACEBACK
from .job_plan import WorkerCommand
from .node import STREAMS

TAIL_LINES = 60
STUCK_SECONDS = 30.0  # without a byte read, at the end of the job, until the user is told
_STOPPED_SECONDS = 2.0  # the same after a signal has ended the job, until the rest is given up
_MAX_OPEN_LINE = 1 << 20  # bytes without a line feed after which we stop waiting for one
_MAX_TAIL_LINE = 4096
_MOST_EXCERPT = 1 << 13
_CONGESTED = 1 << 20  # bytes waiting for a slow reader after which the workers are made to wait too
_SAFE_WRITE = 4096  # PIPE_BUF: a pipe that is ready for writing takes this much without blocking
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ?")  # torch.distributed puts it in front of a traceback's lines


class Screen:
    """One place where output appears: the launcher's stdout or stderr, or both when they are the same."""

    def __init__(self, fd: int) -> None:
        self._fd = _without_waiting(fd)
        self._pending = bytearray()
        self._open_rank: int | None = None  # whose line has no line feed yet
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)
        self.failure: OSError | None = None  # nothing can be written here any more
        self.lost = 0  # bytes, since then

    def put(self, rank: int, data: bytes) -> None:
        """Append ``data`` of ``rank``; rank -1 is the launcher itself."""
        if not data or self.failure is not None:
            self.lost += len(data)
            return
        if self._open_rank not in (None, rank):
            self._pending += b"\n"
        self._open_rank = None if data.endswith(b"\n") else rank
        self._pending += data
        self.drain()

    def say(self, text: str) -> None:
        """Write a message of the launcher itself."""
        self.put(-1, text.encode(errors="replace") + b"\n")

    def drain(self) -> None:
        """Write as much as the reader takes without waiting."""
        while self._pending and self._poll.poll(0):
            try:
                written = os.write(self._fd, self._pending[:_SAFE_WRITE])
            except BlockingIOError:
                return
            except OSError as error:  # the reader is gone, or the disk is full: the job goes on without it
                self.failure, self.lost = error, len(self._pending)
                self._pending.clear()
                return
            del self._pending[:written]

    def drop(self) -> None:
        """Give up what has not been read."""
        self._pending.clear()

    @property
    def pending(self) -> int:
        """Bytes that wait for the reader."""
        return len(self._pending)

    @property
    def congested(self) -> bool:
        return self.pending > _CONGESTED


def _without_waiting(fd: int) -> int:
    """Return ``fd`` or, for a terminal, another descriptor for it that does not block.

    A pipe that is ready takes _SAFE_WRITE bytes, but a terminal that is ready may still block for as long as nobody reads
    it. ``fd`` itself is shared with the shell and must stay as it is.
    """
    if os.isatty(fd):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return fd


def open_screens() -> tuple[Screen, Screen]:
    """The screens for stdout and stderr; the same one twice when both lead to the same place."""
    stdout = Screen(1)
    with contextlib.suppress(OSError):  # one of them is closed
        if os.path.samestat(os.fstat(1), os.fstat(2)):
            return stdout, stdout
    return stdout, Screen(2)


class Excerpt:
    """The first and the last of lines of which there may be many; about _MOST_EXCERPT characters of both."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._last: deque[str] = deque()
        self._room = [_MOST_EXCERPT, _MOST_EXCERPT]  # characters that the first and the last may still have
        self._left_out = 0

    def add(self, line: str) -> None:
        if self._room[0] > 0:
            self._first.append(line)
            self._room[0] -= len(line) + 1
            return
        self._last.append(line)
        self._room[1] -= len(line) + 1
        while self._room[1] < 0:
            self._room[1] += len(self._last.popleft()) + 1
            self._left_out += 1

    def lines(self) -> list[str]:
        gap = [f"  ... {counted(self._left_out, 'line')} left out ..."] if self._left_out else []
        return [*self._first, *gap, *self._last]


class LastTraceback:
    """A traceback and what comes behind it. ``add`` is given its header first."""

    def __init__(self) -> None:
        self._frames, self._rest = Excerpt(), Excerpt()
        self.length = 0  # in lines
        self._behind = 0  # lines that are not indented: the exception, then its message or whatever the script says

    @property
    def survived(self) -> bool:
        """Whether so much has come behind it that it is no longer the last thing that has happened."""
        return self._behind > TAIL_LINES

    def add(self, line: str) -> None:
        self._behind += bool(self.length and line.strip() and not line[0].isspace())
        self.length += 1
        (self._rest if self._behind else self._frames).add(line)

    def lines(self) -> list[str]:
        return [*self._frames.lines(), *self._rest.lines()]


class Tail:
    """The last lines of a stream, decoded, each as a terminal would show it, without torch's ``[rank0]: ``.

    If a traceback is too long for them, they begin with its header, and lines in its midst are left out.
    """

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._traceback: LastTraceback | None = None
        self._open = b""

    def feed(self, chunk: bytes) -> None:
        *whole, self._open = (self._open + chunk).split(b"\n")
        for line in whole:
            self._add(_text(line))
        if len(self._open) > _MAX_OPEN_LINE:
            self._open = _shown(self._open)[-_MAX_TAIL_LINE:]

    def _add(self, line: str) -> None:
        self._lines.append(line)
        if TRACEBACK in line:
            self._traceback = LastTraceback()
        if self._traceback is not None:
            self._traceback.add(line)
            if self._traceback.survived:
                self._traceback = None

    def lines(self) -> list[str]:
        rest, traceback = _text(self._open), self._traceback
        kept = self._lines if traceback is None or traceback.length <= TAIL_LINES else traceback.lines()
        return [*kept, *([rest] if rest else [])]


def _text(line: bytes) -> str:
    text = _shown(line)[:_MAX_TAIL_LINE].decode(errors="replace")
    return text[prefix.end() :] if (prefix := _TORCH_PREFIX.match(text)) else text


def _shown(line: bytes) -> bytes:
    """Return the part of a line with carriage returns that remains visible."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Forwarder:
    """Passes one stream of one worker on to the screen, and keeps its tail."""

    def __init__(self, rank: int, screen: Screen | None, *, raw: bool, tail: Tail | None) -> None:
        self._rank = rank
        self._screen = screen  # None: it is not shown
        self._raw = raw
        self._tail = tail
        self._prefix = b"" if rank == 0 else b"[rank %d] " % rank
        self._open = b""

    def feed(self, chunk: bytes) -> None:
        if self._tail is not None:
            self._tail.feed(chunk)
        if self._screen is None:
            return
        if self._raw:
            self._screen.put(self._rank, chunk)
            return
        self._open += chunk
        self._screen.put(self._rank, self._take_redraws() if self._rank == 0 else self._take_lines())

    def close(self) -> None:
        """End the stream: write what is left of its last line."""
        if self._open and self._screen is not None:
            end = b"" if self._rank == 0 else b"\n"
            self._screen.put(self._rank, self._prefix + (_shown(self._open) if end else self._open) + end)
            self._open = b""

    def _take_lines(self) -> bytes:
        *whole, self._open = self._open.split(b"\n")
        if len(self._open) > _MAX_OPEN_LINE:
            whole, self._open = [*whole, self._open], b""
        return b"".join(self._prefix + _shown(line) + b"\n" for line in whole)

    def _take_redraws(self) -> bytes:
        """Return the text up to the last line feed or carriage return; a final one, perhaps half of a CR LF, waits."""
        cut = 1 + max(self._open.rfind(b"\n"), self._open.rfind(b"\r", 0, len(self._open) - 1))
        if len(self._open) - cut > _MAX_OPEN_LINE:
            cut = len(self._open)
        taken, self._open = self._open[:cut], self._open[cut:]
        return taken


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

    def end(self) -> dict[int, list[str]]:
        """End the round, with streams that have not ended, as of a lost host. Return the last lines of stderr, by rank."""
        for forwarder in self._streams.values():
            forwarder.close()
        return {rank: tail.lines() for rank, tail in self._tails.items()}

    def say(self, text: str) -> None:
        """Write a message of the launcher itself."""
        self._stderr.say(text)

    def drain(self) -> None:
        """Write as much as readers take without waiting."""
        self._stdout.drain()
        self._stderr.drain()

    @property
    def pending(self) -> int:
        """Bytes that wait for readers."""
        return sum(screen.pending for screen in {self._stdout, self._stderr})

    @property
    def congested(self) -> bool:
        return self._stdout.congested or self._stderr.congested

    def finish(self, wait: Callable[[], None], *, stopped: bool) -> None:
        """Write all that is left, for as long as there are readers. ``wait`` is called in between; it may raise.

        ``stopped``: a signal has ended the job, so a reader that reads nothing is soon given up.
        """
        left, since, told = self.pending, time.monotonic(), False
        while left:
            wait()
            self.drain()
            now = time.monotonic()
            if self.pending != left:
                left, since = self.pending, now
            elif stopped and now - since > _STOPPED_SECONDS:
                return
            elif not told and now - since > STUCK_SECONDS:
                told = True
                self._tell("wait for a reader that does not read. Remedy: let it read, or press Ctrl-C, which drops them.")
        for name, screen, other in self._screens():
            if screen.failure is not None and screen.failure.errno != errno.EPIPE:  # a reader may stop, as `head` does
                lost = f"{screen.lost} bytes of the job's {name} are lost: {screen.failure.strerror}"
                other.say(f"[zerorun] {lost}. Remedy: --log-dir keeps all output.")
                other.drain()

    def drop(self) -> None:
        """Give up what has not been read."""
        self._tell("are lost, because nobody has read them. Remedy: --log-dir keeps all output.")
        self._stdout.drop()
        self._stderr.drop()

    def _tell(self, what: str) -> None:
        """Say of a stream that waits for its reader, on the other one, how many bytes of it ``what``."""
        for name, screen, other in self._screens():
            if screen.pending and not other.pending:
                other.say(f"[zerorun] the job has ended; {screen.pending} bytes of its {name} {what}")

    def _screens(self) -> Iterator[tuple[str, Screen, Screen]]:
        """Yield the name of each stream, its screen, and that of the other one."""
        yield STREAMS[0], self._stdout, self._stderr
        yield STREAMS[1], self._stderr, self._stdout
