"""The one loop of a process: whatever is ready is handled, and signals come in like everything else."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def dispatch(selector: selectors.BaseSelector, timeout: float) -> None:
    """Wait up to ``timeout`` seconds, and call the ``data`` of each key that is ready.

    Not of a key that has been put away meanwhile by what was called just before.
    """
    for key, _ in selector.select(timeout):
        current = selector.get_map().get(key.fileobj)
        if current is not None and current.data is key.data:
            key.data()


@contextlib.contextmanager
def signals_as_bytes(*, may_sleep: bool) -> Iterator[int]:
    """A descriptor from which the signals that arrive can be read, one byte each. ``may_sleep``: Ctrl-Z is as usual."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # A parent that ignores SIGCHLD would leave us no exit codes.
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
