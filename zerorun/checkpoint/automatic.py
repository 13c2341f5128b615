"""Automatic saves, for which the script need not ask: every so many steps or minutes, and when the job is told to end.

SIGTERM or SIGUSR1 on any one rank is a wish. Wishes travel with the sums that every step makes anyway, so all ranks learn
of a wish at the same step, save together, and exit with ``EXIT_RESUME``. The launcher then starts the job again, or has it
put back into the queue.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ..log import logger

EXIT_RESUME = 75  # EX_TEMPFAIL of sysexits.h: try again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SystemExit):
    """The job was told to end, has saved, and exits with ``EXIT_RESUME``."""

    def __init__(self) -> None:
        super().__init__(EXIT_RESUME)


@dataclass
class AutomaticSaves:
    """When to save into ``directory``. ``every_steps``, ``every_minutes``: 0 for never."""

    directory: Path
    every_steps: int = 0
    every_minutes: float = 0.0
    on_signal: bool = True
    asynchronous: bool = False
    clock_counts: bool = True  # True on one rank only, so that clocks need not agree
    _last: float = field(default_factory=time.monotonic)
    _signal: int = 0
    _before: dict[int, Any] = field(default_factory=dict)

    def watch(self) -> None:
        """Notice signals from now on, if ``on_signal``. Does nothing outside the main thread, since no other thread can."""
        if self.on_signal and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._notice)

    def unwatch(self) -> None:
        """Restore the signal handlers that there were before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._signal = number  # a second one changes nothing: the save is coming

    def wishes(self) -> tuple[bool, bool]:
        """(True if this rank was told to end, True if the time for a save has come)."""
        due = self.clock_counts and self.every_minutes > 0 and time.monotonic() - self._last >= 60 * self.every_minutes
        return self._signal != 0, due

    def due(self, global_steps: int) -> bool:
        """True if the number of steps alone asks for a save."""
        return self.every_steps > 0 and global_steps > 0 and global_steps % self.every_steps == 0

    def saved(self) -> None:
        """Begin to count minutes anew, since a save is over, or was begun if it is asynchronous."""
        self._last = time.monotonic()

    def end(self) -> None:
        """End this rank, when all ranks have saved. Raises Preempted."""
        if self._signal:
            logger.info("saved because of %s; ending with exit code %d", signal.Signals(self._signal).name, EXIT_RESUME)
        raise Preempted
