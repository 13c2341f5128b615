"""A host at the other end of a line: the launcher's view of an agent, with the commands of a LocalNode."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from .agent import PING_SECONDS, SILENT_SECONDS
from .bootstrap import die_with_parent
from .line import Line, Message, decode
from .node import Listener, own_child
from .plan import WorkerCommand

_MOST_LINES = 20


class RemoteNode:
    """An agent reached through ``carrier``. After ``lost`` is set nothing more comes from it."""

    def __init__(self, name: str, selector: selectors.BaseSelector, listener: Listener, say: Callable[[str], None]) -> None:
        self.name = name
        self._selector, self._listener, self._say = selector, listener, say
        self.facts: dict[str, Any] = {}  # what its hello said
        self.answers: dict[str, Message] = {}  # the last of each kind
        self.trouble: str | None = None  # why it cannot do what it was told
        self.lost: str | None = None  # why it is not there any more
        self.busy = False
        self.clock = 0.0  # its monotonic clock minus ours
        self._best_trip = float("inf")
        self._heard = self._pinged = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: list[str] = []  # last lines of the carrier's stderr
        self._error_rest = b""
        self.line: Line | None = None
        self.on_hello: Callable[[], None] = lambda: None

    # -- the line ----------------------------------------------------------------------------------------------------

    def open(self, carrier: Sequence[str]) -> None:
        """Start the carrier. Raises OSError if it is not there."""
        self._process = subprocess.Popen(
            carrier,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C is for the launcher
            preexec_fn=die_with_parent,
        )
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
        self._heard = time.monotonic()
        self._selector.register(line.reader, selectors.EVENT_READ, self._read)

    def send(self, do: str, **details: Any) -> None:
        if self.line is not None and self.lost is None:
            self.line.send({"do": do, **details})

    def ask(self, do: str, answer: str, **details: Any) -> None:
        """Send, and forget an older ``answer``; the new one will be in ``answers``."""
        self.answers.pop(answer, None)
        self.send(do, **details)

    def _read(self) -> None:
        assert self.line is not None
        for message in self.line.receive():
            self._heard = time.monotonic()
            self._handle(message)
        if self.line.ended:
            self._lose("")

    def _read_errors(self, fd: int) -> None:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        *lines, self._error_rest = (self._error_rest + chunk).split(b"\n")
        if not chunk:
            self._selector.unregister(fd)
            lines, self._error_rest = [self._error_rest], b""
        for text in (line.decode(errors="replace").rstrip() for line in lines):
            if text:
                self._errors = [*self._errors[-_MOST_LINES + 1 :], text]
                if self.facts:
                    self._say(f"[{self.name}] {text}")

    def _handle(self, message: Message) -> None:
        match message.get("is"):
            case "output":
                self._listener.on_output(message["rank"], message["stream"], decode(message["data"]))
            case "end":
                at = message["at"] - self.clock
                self._listener.on_end(message["rank"], message["code"], at, message["asked"])
            case "empty":
                self.busy = False
                self._listener.on_empty(message["unkillable"], message["oom_kills"])
            case "note":
                self._listener.on_note(f"{self.name}: {message['text']}")
            case "pong":
                self._set_clock(message)
            case "trouble":
                self.busy = False
                self.trouble = message["text"]
            case "hello":
                self.facts = message
                self.on_hello()
            case kind:
                self.answers[str(kind)] = message

    def _set_clock(self, message: Message) -> None:
        """The shortest round trip so far tells best how the clocks differ: the answer was made half-way."""
        now = time.monotonic()
        trip = now - message["t"]
        if trip < self._best_trip:
            self._best_trip = trip
            self.clock = message["now"] - (now + message["t"]) / 2

    def tick(self, now: float) -> None:
        """Keep the line alive, and notice when the other end does not."""
        if self.line is None or self.lost is not None:
            return
        self.line.flush()
        if self.facts and now - self._pinged >= PING_SECONDS:
            self._pinged = now
            self.send("ping", t=now)
        if self.facts and now - self._heard > SILENT_SECONDS:
            self._lose(f"nothing was heard from it for {SILENT_SECONDS:.0f} s: the host or the network is down")
        elif self.line.ended:
            self._lose("")

    def _lose(self, reason: str) -> None:
        assert self.line is not None
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self.line.reader)
        self.line.close()
        self.busy = False
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
        said = [*(self.line.stray if self.line and not self.facts else []), *self._errors]
        words = "; ".join(line.strip() for line in said[-4:])
        code = self._process.returncode
        program = str(self._process.args[0]) if isinstance(self._process.args, (list, tuple)) else "the carrier"
        return f"{program} ended with status {code}" + (f": {words}" if words else "")

    def end_carrier(self) -> None:
        """Leave no carrier behind."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            if process.stderr is not None:
                self._selector.unregister(process.stderr.fileno())
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.stderr is not None:
            process.stderr.close()

    def close(self, status: int) -> None:
        """Let the agent go, and wait until it has."""
        if self.line is not None and self.lost is None:
            self.send("leave", status=status)
            deadline = time.monotonic() + 2.0
            while not self.line.ended and time.monotonic() < deadline:
                self.line.flush()
                self.line.receive()
                time.sleep(0.01)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self.line.reader)
            self.line.close()
        self.end_carrier()

    # -- as a LocalNode ----------------------------------------------------------------------------------------------

    def start(self, workers: Sequence[WorkerCommand]) -> None:
        self.busy = True
        self.send("start", workers=[asdict(worker) for worker in workers])

    def pause(self, paused: bool) -> None:
        self.send("pause", on=paused)

    def pass_on(self, number: int) -> None:
        self.send("pass", signal=number)

    def interrupt(self, number: int, grace: float) -> None:
        self.send("interrupt", signal=number, grace=grace)

    def terminate(self, grace: float) -> None:
        self.send("terminate", grace=grace)

    def kill(self) -> None:
        self.send("kill")

    def end_now(self) -> None:
        """Cut the line: the agent ends its workers."""
        self.end_carrier()

    def patience(self) -> float:
        return 0.5
