"""The event loop of a process: it handles whatever is ready, and signals arrive like all other input."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterator

_LONGEST_TURN_S = 2.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


class Turns:
    """Tells whoever measures silence for how long this process did not run, as while the whole job was frozen."""

    def __init__(self) -> None:
        self._last: float | None = None

    def held_up_s(self, now: float) -> float:
        """Return by how much more time has passed since the last call than a turn of the loop takes."""
        last, self._last = self._last, now
        return 0.0 if last is None else max(0.0, now - last - _LONGEST_TURN_S)


def dispatch(selector: selectors.BaseSelector, timeout: float) -> None:
    """Wait up to ``timeout`` seconds, and call the ``data`` of each key that is ready.

    A key that an earlier one of these calls has unregistered or replaced is skipped.
    """
    for key, _ in selector.select(timeout):
        current = selector.get_map().get(key.fileobj)
        if current is not None and current.data is key.data:
            key.data()


@contextlib.contextmanager
def signals_as_bytes(*, may_sleep: bool) -> Iterator[int]:
    """Yield a descriptor from which arriving signals are read, one byte each. With ``may_sleep``, Ctrl-Z works as usual."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Inherited from a parent that ignores SIGCHLD, this would leave us without exit codes.
    old_handlers = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}
    for number in (*STOP_SIGNALS, *PASSED_SIGNALS, *(() if may_sleep else (signal.SIGTSTP,))):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup
        old_handlers[number] = signal.signal(number, lambda *_: None)
    try:
        yield reader
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_writer)
        os.close(reader)
        os.close(writer)
