"""Asks every host for its facts and its clock, all at a time, each with a limit of its own."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .reporter import OWN_MODULES, unmark

HOST_SECONDS = 40.0  # connecting, and importing torch there
FAN_OUT = 64  # hosts that are asked at a time
_CLOCK_ROUNDS = 5
_CLOCK_SECONDS = 2.0  # for one answer
_END_SECONDS = 2.0  # for a host to end after its stdin has
_WORDS = 4  # lines of a carrier's stderr that are told


class _Silence(Exception):
    """A host does not answer; the text says why."""


def collect(commands: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """What each host says, in the order of ``commands``: (its name, the command that runs ``zerorun.report.host_facts``).

    ``facts``: None if it did not answer, and ``trouble`` says why. ``clock``: ``ahead_s``, how far its clock is before this
    host's, and ``within_s``, how exact that is.
    """
    if not commands:
        return []
    started: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(min(FAN_OUT, len(commands))) as pool:
        try:
            return list(pool.map(lambda pair: ask(pair[0], pair[1], started=started), commands))
        except BaseException:  # Ctrl-C, say: nobody waits for slow hosts then
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                _kill(process)
            raise


def ask(
    name: str,
    command: Sequence[str],
    seconds: float = HOST_SECONDS,
    started: list[subprocess.Popen[bytes]] | None = None,
) -> dict[str, Any]:
    """What the host ``name`` says to ``command`` within ``seconds``. The process is added to ``started``."""
    answer: dict[str, Any] = {"name": name, "facts": None, "clock": None, "trouble": None}
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, **OWN_MODULES},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            answer["trouble"] = f"cannot run {command[0]!r}: {error.strerror}"
            return answer
        if started is not None:
            started.append(process)
        try:
            conversation = _Conversation(process)
            answer["facts"] = conversation.read("facts", seconds)
            answer["clock"] = _compare_clocks(conversation)
        except _Silence as silence:
            if answer["facts"] is None:
                _end(process)  # first, so that its last words are there
                errors.seek(0)
                answer["trouble"] = _in_words(str(silence), command[0], process.returncode, errors.read())
        finally:
            _end(process)
    return answer


class _Conversation:
    """The lines of one process, each waited for with a limit."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self._rest = b""
        self._arrived = select.poll()  # select() takes no file from number 1024 on, and hosts may be many
        self._arrived.register(self._output, select.POLLIN)

    def say(self) -> None:
        try:
            self._input.write(b"\n")
        except OSError:
            raise _Silence("the connection was closed") from None

    def read(self, what: str, seconds: float) -> dict[str, Any]:
        """The next marked line. Raises _Silence."""
        deadline = time.monotonic() + seconds
        while True:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                message = unmark(line.decode(errors="replace"))
                if message is not None:
                    return message
                continue
            if not self._arrived.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                raise _Silence(f"no {what} within {seconds:.0f} s")
            chunk = os.read(self._output.fileno(), 1 << 16)
            if not chunk:
                raise _Silence("")
            self._rest += chunk


def _compare_clocks(conversation: _Conversation) -> dict[str, float]:
    """The shortest round trip tells best how clocks differ: the answer was made within it."""
    trips: list[tuple[float, float]] = []
    for _ in range(_CLOCK_ROUNDS):
        asked = time.time()
        conversation.say()
        clock = float(conversation.read("time", _CLOCK_SECONDS)["clock"])
        answered = time.time()
        trips.append((answered - asked, clock - (answered + asked) / 2))
    trip, ahead = min(trips)
    return {"ahead_s": ahead, "within_s": trip / 2}


def _in_words(silence: str, program: str, status: int | None, errors: bytes) -> str:
    said = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    words = "; ".join(said[-_WORDS:])
    if silence:
        return silence + (f": {words}" if words else "")
    return words or f"{program} ended with status {status} and said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let ``process`` end with its stdin, else kill it with all that it started."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
