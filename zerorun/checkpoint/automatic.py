"""Automatic saves, for which the script need not ask: every so many steps or minutes, and when the job is told to end.

SIGTERM or SIGUSR1 on any one rank is a wish. Wishes travel with the sums that every step makes anyway, so all ranks learn
of a wish at the same step, save together, and exit with ``EXIT_RESUME``. The launcher then starts the job again, or has it
put back into the queue.

[Note: the end of several engines]
A loop may step several engines, each of which saves into a directory of its own. What they save has to be of one pass of
the loop. So once they have been told, each saves at the end of each of its steps, and the engine that has made its first
step last, at whose step a pass ends, ends the job when all others have saved. If it makes no more steps, another one ends
the job after ``_MOST_SAVES``. Ranks decide alike, because their engines step in the same order.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ..config.sections import Checkpoint
from ..errors import ConfigError, ConfigProblem
from ..log import logger

EXIT_RESUME = 75  # EX_TEMPFAIL of sysexits.h: try again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_MOST_SAVES = 8  # of one engine since it was told to end, while others do not step


class Preempted(SystemExit):
    """The job was told to end, has saved, and exits with ``EXIT_RESUME``."""

    def __init__(self) -> None:
        super().__init__(EXIT_RESUME)


class _Listener:
    """What this process has been told, for all its engines that save by themselves."""

    def __init__(self) -> None:
        self.signal = 0
        self.savers: list[AutomaticSaves] = []
        self.stepping: list[AutomaticSaves] = []  # in the order of their first steps
        self._before: dict[int, Any] = {}

    def add(self, saves: AutomaticSaves) -> None:
        self.savers.append(saves)
        if saves.on_signal and not self._before and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._notice) for number in SIGNALS}

    def remove(self, saves: AutomaticSaves) -> None:
        for savers in (self.savers, self.stepping):
            if saves in savers:
                savers.remove(saves)

    def restore_handlers(self) -> None:
        """Let signals do what they did before, unless an engine still listens."""
        if not any(saves.on_signal for saves in self.savers):
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before, self.signal = {}, 0

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.signal = number  # a second one changes nothing: the save is coming


_listener = _Listener()


@dataclass(eq=False)
class AutomaticSaves:
    """When to save into ``directory``. ``every_steps``, ``every_minutes``: 0 for never."""

    directory: Path
    every_steps: int = 0
    every_minutes: float = 0.0
    on_signal: bool = True
    asynchronous: bool = False
    clock_counts: bool = True  # True on one rank only, so that clocks need not agree
    _last: float = field(default_factory=time.monotonic)
    _saved_since_told: int = 0

    def watch(self) -> None:
        """Begin. Signals are noticed from now on, if ``on_signal`` and in the main thread, since no other thread can."""
        _listener.add(self)

    def unwatch(self) -> None:
        """End. With the last one, the signal handlers are restored that there were before."""
        _listener.remove(self)
        _listener.restore_handlers()

    def wishes(self) -> tuple[bool, bool]:
        """(True if this rank was told to end, True if the time for a save has come). To be asked in each step."""
        if self not in _listener.stepping:
            _listener.stepping.append(self)
        due = self.clock_counts and self.every_minutes > 0 and time.monotonic() - self._last >= 60 * self.every_minutes
        return self.on_signal and _listener.signal != 0, due

    def due(self, global_steps: int) -> bool:
        """True if the number of steps alone asks for a save."""
        return self.every_steps > 0 and global_steps > 0 and global_steps % self.every_steps == 0

    def saved(self) -> None:
        """Begin to count minutes anew, since a save is over, or was begun if it is asynchronous."""
        self._last = time.monotonic()

    def ends_job(self) -> bool:
        """Note that this one has saved because the job is to end; True if that is enough."""
        self._saved_since_told += 1
        stepping = [other for other in _listener.stepping if other.on_signal]
        over = stepping[-1] is self and all(other._saved_since_told for other in stepping)
        return over or self._saved_since_told >= _MOST_SAVES

    def end(self) -> None:
        """End this rank, when all ranks have saved. Raises Preempted.

        The handlers stay: another signal must not interrupt what the script does at its end.
        """
        _listener.remove(self)
        told, _listener.signal = _listener.signal, 0  # not for an engine that a script makes in spite of it
        if told:
            logger.info("saved because of %s; ending with exit code %d", signal.Signals(told).name, EXIT_RESUME)
        raise Preempted


def refuse_shared_directory(directory: str | None) -> None:
    """Raise ConfigError if an engine of this process saves into ``directory``: both would write the same checkpoints."""
    if directory is not None and any(saves.directory.resolve() == Path(directory).resolve() for saves in _listener.savers):
        reason = "another engine of this process saves into it: their checkpoints would have the same names."
        remedy = "give each engine a directory of its own, or destroy() the engine that has ended."
        raise ConfigError([ConfigProblem("checkpoint.dir", directory, reason, remedy)])


def resuming_problems(section: Checkpoint, trainer: str, remedy: str) -> list[ConfigProblem]:
    """What lets an engine go on by itself, in a loop of ``trainer``, which begins to count its steps before it asks."""
    reason = f"the engine would go on from an earlier run, and {trainer} would make all its steps from the first one on."
    asked = {"auto_resume": section.auto_resume, "in_memory.every_steps": section.in_memory.every_steps}
    return [ConfigProblem(f"checkpoint.{key}", value, reason, remedy) for key, value in asked.items() if value]
