"""Memory copies: the newest step in the shared memory of each host and of another one, for a start after a failure.

[Note: what a copy is]
A checkpoint like any other, in a folder of a memory file system that the host's supervisor has made (launcher/keeper.py).
So each file is checked, it appears on all hosts or on none, and is loaded at any number of ranks. Two things are different.
Each rank sends its files to a rank of the next host, which checks them: the copy appears only when all have. And of frozen
parameters, which do not change, it has checksums only, which are computed once.

[Note: one step at most]
The copy of step s is made behind the forward and the backward of step s + 1, and ends before that step's update. So when
s + 1 is finished, s is whole on two hosts; whatever fails then, at most one finished step is repeated. The older copy is
deleted when the newer one has appeared on all hosts: there are two while one is made.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, DamagedError
from ..launcher.keeper import VARIABLE
from ..log import is_rank_zero, logger, warn_once
from . import directory as folder
from .checkpointer import Checkpointer
from .inventory import Subject
from .load import Wanted
from .ranks import Ranks, attempt

_TAG = re.compile(r"global_step(\d+)")


class MemoryCopies:
    """Those of one engine. All methods but ``due`` are collective. ``place``: the folder of this host."""

    def __init__(self, subject: Subject, run: Any, place: Path, every_steps: int) -> None:
        self.checkpointer = Checkpointer(subject, run)
        self._place, self._every_steps = place, every_steps

    @classmethod
    def make(cls, subject: Subject, run: Any, every_steps: int) -> MemoryCopies | None:
        """Return None if they are not asked for, or if no launcher keeps them."""
        place = os.environ.get(VARIABLE)
        if every_steps and place is None:
            warn_once("checkpoint.in_memory has no effect: only `zerorun --max-restarts` keeps copies for another start.")
        return cls(subject, run, Path(place), every_steps) if every_steps and place is not None else None

    def due(self, global_steps: int) -> bool:
        """True if a copy is to be made after this many steps."""
        return global_steps > 0 and global_steps % self._every_steps == 0

    def keep(self) -> None:
        """Begin to copy what the ranks have now."""
        options: dict[str, Any] = {"trainable_only": True, "asynchronous": True, "latest": False, "keep": 1}
        self.checkpointer.save(self._place, None, None, **options, doubled=True)

    def settle(self) -> None:
        """Wait until the last copy is whole. If it failed, say so: training goes on, with the copy before that."""
        try:
            self.checkpointer.wait()
        except CheckpointError as error:
            logger.warning("no copy of this step is kept in memory: %s", error)

    def load(self, wanted: Wanted, newer_than: int) -> Path | None:
        """Load the newest copy that is whole, if it has more steps than ``newer_than``; None if there is none."""
        ranks = self.checkpointer.saver.ranks
        for tag in self._tags(ranks):
            if _steps(tag) < newer_than:
                break
            try:
                path, _ = self.checkpointer.load(self._place, tag, wanted)
                return path
            except DamagedError as error:
                if is_rank_zero():
                    logger.warning("the copy %s in memory is not whole: %s", tag, error)
        return None

    def _tags(self, ranks: Ranks) -> list[str]:
        """Those that any host has, the newest first."""
        here = attempt(lambda: folder.newest_first(self._place))[0] or []
        found = {tag for tags in ranks.gather(here) for tag in tags if _TAG.fullmatch(tag)}
        return sorted(found, key=_steps, reverse=True)

    def close(self) -> None:
        """Wait for the last copy, and release the process group."""
        self.settle()
        self.checkpointer.close()


def _steps(tag: str) -> int:
    match = _TAG.fullmatch(tag)
    return int(match[1]) if match is not None else -1
