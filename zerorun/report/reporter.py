"""How a worker of the live check says what it does, and the faults that tests plant in it.

It writes marked lines of JSON, which are found among whatever login shells and libraries print.

``ZERORUN_REPORT_FAULT`` plants faults for tests, separated by commas: ``hang:CHECK[:RANK]`` (the check never returns),
``wrong:CHECK[:RANK]`` (one element of its result is off by one), ``slow:RANK[:FACTOR]`` (that rank computes slowly) and
``raise:CHECK[:RANK]``. CHECK is how the name of a check starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LIFETIME_SECONDS = 600.0  # after which a worker ends itself, if nobody else has
# For all processes of a report: the folder in which it is asked for may hold a queue.py. Python 3.10 does not know it.
OWN_MODULES = {"PYTHONSAFEPATH": "1"}


@dataclass(frozen=True)
class Fault:
    """One planted fault."""

    kind: str
    target: str
    rest: tuple[str, ...]

    def hits(self, kind: str, check: str, rank: int) -> bool:
        named = not self.rest or self.rest[0] == str(rank)
        return self.kind == kind and check.startswith(self.target) and named


def parse_faults(text: str) -> list[Fault]:
    found = []
    for item in filter(None, text.split(",")):
        kind, target, *rest = item.split(":")
        found.append(Fault(kind, target, tuple(rest)))
    return found


@dataclass
class Reporter:
    """What this rank says of itself."""

    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    faults: list[Fault] = field(default_factory=lambda: parse_faults(os.environ.get("ZERORUN_REPORT_FAULT", "")))
    running: str = ""

    def say(self, **message: Any) -> None:
        sys.stdout.write(mark({"rank": self.rank, **message}))
        sys.stdout.flush()

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Say that ``name`` begins."""
        self.running = name
        self.say(begin=name)
        if self._planted("raise", name):
            raise RuntimeError("planted")
        if self._planted("hang", name):
            time.sleep(LIFETIME_SECONDS)
        yield

    def spoils(self, name: str) -> bool:
        return self._planted("wrong", name)

    def slowness(self) -> float:
        """By how much this rank shall be slower than it is."""
        mine = [fault for fault in self.faults if fault.kind == "slow" and fault.target == str(self.rank)]
        return max((float(fault.rest[0]) if fault.rest else 2.0 for fault in mine), default=1.0)

    def _planted(self, kind: str, check: str) -> bool:
        return any(fault.hits(kind, check, self.rank) for fault in self.faults)


MARK = "@zerorun-report "
JOINING, FIRST = "joining the process group", "the first collective"  # checks in which much is started
PAIR = "pair "  # how the names of checks of two hosts start; their node numbers follow


def mark(message: Mapping[str, Any]) -> str:
    """``message`` as one line, with its line feed: one write, so that ranks' lines do not mix."""
    return f"{MARK}{json.dumps(message)}\n"


def unmark(line: str) -> dict[str, Any] | None:
    """The message in ``line``, which may have something in front of it (``[rank 3] ``); None if there is none."""
    _, found, text = line.partition(MARK)
    if not found:
        return None
    try:
        message = json.loads(text)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
