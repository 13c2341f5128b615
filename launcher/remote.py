"""The hosts of a job as the launcher sees them: its own, and others at the end of a line, with the same methods."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from zerorun.watch.board import TIMED, RankProgress
from zerorun.watch.slow_ranks import Window

from .agent import HURRY_SECONDS, PING_SECONDS, SILENT_SECONDS
from .agent_commands import carrier_environment
from .agent_line import UNHEARD_OF, Line, Message, decode
from .bootstrap import die_with_parent
from .event_loop import PASSED_SIGNALS, STOP_SIGNALS, Turns
from .job_plan import WorkerCommand
from .node import STREAMS, Listener, LocalNode, own_child
from .terminal_escapes import Cleaner, plain
from .this_host import describe_host
from .worker_boards import Seen

_MOST_LINES = 20
LONGEST_MESSAGE = 1 << 20  # bytes; workers' output comes in chunks of 64 KiB


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole, value))


def _window(rank: int, stage: int, number: int, least: list[int], most: list[int]) -> Window:
    return Window(rank, stage, number, tuple(least), tuple(most))


def _is_window(row: Any) -> bool:
    if not isinstance(row, list) or len(row) != len(Window._fields) or not all(map(_whole, row[:3])):
        return False
    return all(_numbers(times) and len(times) == len(TIMED) for times in row[3:])


def _is_progress(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {field.name for field in fields(RankProgress)}:
        return False
    return _whole(value["step"]) and all(_number(value[name]) or (name, value[name]) == ("loaded", None) for name in value)


# The messages that an agent may send, and a check for each field that they must have.
_ANSWERS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "hello": {"version": _text, "machine": _text, "hostname": _text, "cores": _numbers},
    "ready": {},
    "reserved": {"port": lambda port: _whole(port) and 0 < port < 1 << 16},
    "probed": {"interface": lambda name: name is None or _text(name)},
    "output": {"rank": _whole, "stream": STREAMS.__contains__, "data": _text},
    "end": {"rank": _whole, "code": _whole, "at": _number, "asked": lambda asked: isinstance(asked, bool)},
    "empty": {"unkillable": _numbers, "oom_kills": _whole, "held": _numbers},
    "note": {"text": _text},
    "seen": {"rank": _whole, "seen": lambda seen: seen is None or isinstance(seen, dict)},
    "windows": {"of": lambda rows: isinstance(rows, list) and all(map(_is_window, rows))},
    "progress": {"rank": _whole, "of": _is_progress},
    "stacks": {"rank": _whole, "text": _text},
    "pong": {"t": _number, "now": _number},
    "trouble": {"text": _text},
    "signal": {"number": lambda number: number in (*STOP_SIGNALS, *PASSED_SIGNALS)},
}


class HostClock:
    """The monotonic clock of another host. ``ahead``: that clock minus ours, in seconds."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._best_trip = math.inf

    def learn(self, asked: float, answered: float) -> None:
        """Take the difference from the shortest round trip so far, as if the answer was made half-way.

        ``asked``: by our clock. ``answered``: by the other.
        """
        now = time.monotonic()
        if now - asked < self._best_trip:
            self._best_trip = now - asked
            self.ahead = answered - (now + asked) / 2

    def here(self, progress: RankProgress) -> RankProgress:
        """Return ``progress`` with its moments by our clock."""
        moments = {name: getattr(progress, name) for name in ("at", "shown", "met", "began")}
        return replace(progress, **{name: moment - self.ahead for name, moment in moments.items() if moment})


class RemoteNode:
    """An agent reached through a carrier. After ``lost`` is set nothing more comes from it.

    Its messages are checked, and accepted only if they are about its own workers; no text in them can control a terminal.
    """

    def __init__(self, name: str, selector: selectors.BaseSelector, listener: Listener, say: Callable[[str], None]) -> None:
        self.name = name
        self._selector, self._listener, self._say = selector, listener, say
        self.facts: dict[str, Any] = {}  # what its hello said
        self.answers: dict[str, Message] = {}  # the last of each kind
        self.trouble: str | None = None  # why it cannot do what it was told
        self.lost: str | None = None  # why it was lost
        self.since = 0.0  # once it is lost: when it was last known to be alive
        self.busy = False
        self._paused = False
        self.clock = HostClock()
        self._heard = self._pinged = time.monotonic()
        self._turns = Turns()
        self._ranks: frozenset[int] = frozenset()  # of its workers
        self._cleaners: dict[tuple[int, str], Cleaner] = {}  # of their streams
        self._process: subprocess.Popen[bytes] | None = None
        self._belongings = contextlib.ExitStack()  # of the carrier
        self._errors: list[str] = []  # last lines of the carrier's stderr
        self._error_rest = b""
        self.line: Line | None = None
        self.on_hello: Callable[[], None] = lambda: None

    # -- the line ----------------------------------------------------------------------------------------------------

    def open(self, carrier: Sequence[str]) -> None:
        """Start the carrier. Raises OSError if it is not there."""
        with contextlib.ExitStack() as belongings:
            self._process = subprocess.Popen(
                carrier,
                env=belongings.enter_context(carrier_environment(carrier)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # a Ctrl-C is for the launcher
                preexec_fn=die_with_parent,
            )
            self._belongings = belongings.pop_all()
        own_child(self._process.pid)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        errors = self._process.stderr.fileno()
        os.set_blocking(errors, False)
        self._selector.register(errors, selectors.EVENT_READ, lambda: self._read_errors(errors))
        self.attach(Line(os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno())))
        self._process.stdin.close()
        self._process.stdout.close()

    def attach(self, line: Line) -> None:
        self.line = line
        line.longest = LONGEST_MESSAGE
        self._heard = time.monotonic()
        self._selector.register(line.reader, selectors.EVENT_READ, self._read)

    def send(self, do: str, **details: Any) -> None:
        if self.line is not None and self.lost is None:
            self.line.send({"do": do, **details})

    def ask(self, do: str, answer: str, **details: Any) -> None:
        """Send an order, and forget an older ``answer`` to it; the new one will be in ``answers``."""
        self.answers.pop(answer, None)
        self.send(do, **details)

    def _read(self) -> None:
        assert self.line is not None
        for message in self.line.receive():
            self._heard = time.monotonic()
            try:
                self._handle(message)
            except UNHEARD_OF:
                self.lose("what it sends cannot be understood")
                return
        if self.line.ended and self.lost is None:
            self.lose("")

    def _read_errors(self, fd: int) -> None:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        *lines, self._error_rest = (self._error_rest + chunk).split(b"\n")
        if not chunk:
            self._selector.unregister(fd)
            lines, self._error_rest = [self._error_rest], b""
        for text in (plain(line.decode(errors="replace")).rstrip() for line in lines):
            if text:
                self._errors = [*self._errors[-_MOST_LINES + 1 :], text]
                if self.facts:
                    self._say(f"[{self.name}] {text}")

    def _handle(self, message: Message) -> None:
        kind = message.get("is")
        if (kind == "hello") != (not self.facts):  # a greeting comes first, and once
            raise ValueError(kind)
        message = plain(message)
        if not all(is_right(message[name]) for name, is_right in _ANSWERS[str(kind)].items()):
            raise ValueError(kind)
        if kind in ("output", "end", "seen", "progress", "stacks") and message["rank"] not in self._ranks:
            raise ValueError(message["rank"])
        match kind:
            case "output":
                rank, stream = message["rank"], message["stream"]
                chunk = decode(message["data"])
                clean = self._cleaners.setdefault((rank, stream), Cleaner()).feed(chunk)
                if clean:
                    self._listener.on_output(rank, stream, clean)
                if not chunk:
                    self._listener.on_output(rank, stream, b"")
            case "end":
                at = message["at"] - self.clock.ahead
                self._listener.on_end(message["rank"], message["code"], at, message["asked"])
            case "empty":
                self.busy = False
                self._listener.on_empty(message["unkillable"], message["oom_kills"], message["held"])
            case "seen":
                self._listener.hangs.on_seen(message["rank"], None if message["seen"] is None else Seen.of(message["seen"]))
            case "windows":
                self._listener.hangs.on_windows([_window(*row) for row in message["of"] if row[0] in self._ranks])
            case "progress":
                self._listener.hangs.on_progress(message["rank"], self.clock.here(RankProgress(**message["of"])))
            case "stacks":
                self._listener.hangs.on_stacks(message["rank"], message["text"])
            case "note":
                self._listener.on_note(f"{self.name}: {message['text']}")
            case "pong":
                self.clock.learn(message["t"], message["now"])
            case "trouble":
                self.busy = False
                self.trouble = message["text"]
            case "signal":
                self._listener.on_signal(int(message["number"]))
            case "hello":
                self.facts = message
                self.send("ping", t=time.monotonic())  # the clocks tell which failure was the first
                self.on_hello()
            case _:
                self.answers[str(kind)] = message

    def tick(self, now: float) -> None:
        """Keep the line alive, and lose the node when the other end is silent or gone."""
        self._heard = min(now, self._heard + self._turns.held_up_s(now))
        if self.line is None or self.lost is not None:
            return
        self.line.flush()
        if self.facts and now - self._pinged >= PING_SECONDS:
            self._pinged = now
            self.send("ping", t=now)
        if self.facts and now - self._heard > SILENT_SECONDS:
            self.lose(f"nothing was heard from it for {SILENT_SECONDS:.0f} s: the host or the network is down")
        elif self.line.ended:
            self.lose("")

    def lose(self, reason: str) -> None:
        """Mark the node as lost, and end its carrier. An empty ``reason`` is replaced by the carrier's last words."""
        if self.line is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self.line.reader)
            self.line.close()
        self.busy = False
        now = time.monotonic()
        self.since = self._heard if now - self._heard > SILENT_SECONDS else now
        self.lost = reason or self._carrier_words()
        self.end_carrier()

    def _carrier_words(self) -> str:
        """Why the line has ended, in the words of the carrier."""
        if self._process is None:
            return "the connection was closed"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        if self._process.stderr is not None and not self._process.stderr.closed:
            with contextlib.suppress(KeyError, ValueError):
                self._read_errors(self._process.stderr.fileno())
        said = [*(plain(self.line.stray) if self.line and not self.facts else []), *self._errors]
        words = "; ".join(line.strip() for line in said[-4:])
        code = self._process.returncode
        program = str(self._process.args[0]) if isinstance(self._process.args, (list, tuple)) else "the carrier"
        return f"{program} ended with status {code}" + (f": {words}" if words else "")

    def end_carrier(self) -> None:
        """Leave no carrier behind: SIGTERM, and a second later SIGKILL."""
        process = self._process
        if process is None:
            return
        self._process = None
        if process.stderr is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(process.stderr.fileno())
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.stderr is not None:
            process.stderr.close()
        self._belongings.close()

    def leave(self, status: int) -> None:
        """Tell the agent to exit with ``status``, that of the job; ``gone`` becomes True later."""
        if self.facts:
            self.send("leave", status=status)

    @property
    def gone(self) -> bool:
        """True once the agent has hung up or is lost, and for one that has never said hello, which is not waited for."""
        if self.line is None or self.lost is not None or not self.facts:
            return True
        self.line.flush()
        self.line.receive()
        return self.line.ended

    def close(self) -> None:
        """Close the line, and end the carrier."""
        if self.lost is None:
            self.lose("the job is over")

    # -- as a LocalNode ----------------------------------------------------------------------------------------------

    def start(self, workers: Sequence[WorkerCommand]) -> None:
        self.busy = self.lost is None
        self._ranks, self._cleaners = frozenset(worker.rank for worker in workers), {}
        self.send("start", workers=[self._told(worker) for worker in workers])

    def _told(self, worker: WorkerCommand) -> Message:
        """Return what the agent needs to know about ``worker``."""
        return asdict(worker)

    def pause(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            self.send("pause", on=paused)

    def pass_on(self, number: int) -> None:
        self.send("pass", signal=number)

    def ask_stacks(self, rank: int) -> None:
        self.send("stacks", rank=rank)

    def show_slow(self, rank: int, thousandths: int) -> None:
        self.send("slow", rank=rank, thousandths=thousandths)

    def interrupt(self, number: int, grace: float) -> None:
        self.send("interrupt", signal=number, grace=grace)

    def terminate(self, grace: float) -> None:
        self.send("terminate", grace=grace)

    def kill(self) -> None:
        self.send("kill")

    def patience(self) -> float:
        return HURRY_SECONDS if self.line is not None and self.line.waiting else 0.5


class OwnNode(LocalNode):
    """The launcher's own host."""

    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.name = name
        self.facts = describe_host(os.environ)
        self.trouble: str | None = None
        self.lost: str | None = None

    def leave(self, status: int) -> None:
        """Do nothing: no agent waits for the exit status."""

    @property
    def gone(self) -> bool:
        return True

    def close(self) -> None:
        self.end_now()


Node = OwnNode | RemoteNode
