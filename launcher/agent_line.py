"""The line between the launcher and the supervisor of another host: one JSON object per line, both ways.

JSON and line feeds are used because the carriers in between (ssh, srun, mpirun) may be line-buffered or change some bytes.
Neither end ever waits for the other: what a slow reader does not take is kept, and what a login shell prints before the
first message is put aside.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import select
from collections import deque
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Mark = Callable[[bytes], bytes]  # next line -> its mark; see secret.py

# What it may raise to handle a message that the other end never sends.
UNHEARD_OF = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
_CHUNK = 1 << 16
_MOST_STRAY_LINES = 50


class Line:
    """Messages over the descriptors ``reader`` and ``writer``, or over one socket; ``close`` closes them."""

    def __init__(self, reader: int, writer: int | None = None) -> None:
        self.reader = reader
        self.writer = writer = reader if writer is None else writer
        self.stray: list[str] = []  # lines that are no messages
        self.ended = False  # nothing more will come, or nobody listens
        self.longest: int | None = None  # bytes of a message; a longer one ends the line
        self._own_mark: Mark | None = None
        self._their_mark: Mark | None = None
        self._incoming = b""
        self._outgoing = bytearray()
        self._later: deque[bytes] = deque()  # messages that go out when no others wait
        self._later_bytes = 0
        for fd in {reader, writer}:
            os.set_blocking(fd, False)
        self._poll = select.poll()
        self._poll.register(writer, select.POLLOUT)

    def send(self, message: Message, *, later: bool = False) -> None:
        """Queue ``message`` and write what can be written now.

        With ``later`` it goes out after all others; such messages keep their order.
        """
        if self.ended:
            return
        data = json.dumps(message).encode("ascii")
        if later:
            self._later.append(data)
            self._later_bytes += len(data)
        else:
            self._put(data)
        self.flush()

    def seal(self, own_mark: Mark, their_mark: Mark) -> None:
        """Begin each line with its mark from here on; a line that comes with a wrong mark ends the connection."""
        self._own_mark, self._their_mark = own_mark, their_mark

    def _put(self, data: bytes) -> None:
        self._outgoing += data + b"\n" if self._own_mark is None else self._own_mark(data) + b" " + data + b"\n"

    def flush(self) -> None:
        """Write what can be written now. Must be called often while bytes are ``waiting``."""
        while self.waiting and not self.ended and self._poll.poll(0):
            if not self._outgoing:
                data = self._later.popleft()
                self._later_bytes -= len(data)
                self._put(data)
            try:
                written = os.write(self.writer, self._outgoing[:_CHUNK])
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                self._outgoing.clear()
                self._later.clear()
                self._later_bytes = 0
                return
            del self._outgoing[:written]

    @property
    def waiting(self) -> int:
        """Bytes that the other end has not taken yet."""
        return len(self._outgoing) + self._later_bytes

    def receive(self) -> list[Message]:
        """Return the messages that have come. Sets ``ended`` at end of file, and if one is too long or has a wrong mark."""
        try:
            chunk = os.read(self.reader, _CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            chunk = b""
        if not chunk:
            self.ended = True
            return []
        *lines, self._incoming = (self._incoming + chunk).split(b"\n")
        if self.longest is not None and max(map(len, (*lines, self._incoming))) > self.longest:
            self.ended = True
            return []
        return [message for line in lines if (message := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> Message | None:
        if self._their_mark is not None:
            mark, _, line = line.partition(b" ")
            if self.ended or not hmac.compare_digest(mark, self._their_mark(line)):
                self.ended = True
                return None
        if line.startswith(b"{"):
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict):
                    return message
        if line.strip() and len(self.stray) < _MOST_STRAY_LINES:
            self.stray.append(line.decode(errors="replace"))
        return None

    def close(self) -> None:
        self.ended = True
        for fd in {self.reader, self.writer}:
            with contextlib.suppress(OSError):
                os.close(fd)


def encode(data: bytes) -> str:
    """Return any bytes as text that JSON can hold; ``decode`` reverses it."""
    return base64.b64encode(data).decode("ascii")


def decode(text: str) -> bytes:
    return base64.b64decode(text)
