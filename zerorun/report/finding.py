"""What a finding is, and small things that finding it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

ERROR, WARNING, NOTE = "error", "warning", "note"
SEVERITIES = (ERROR, WARNING, NOTE)  # the worst first


@dataclass(frozen=True)
class Finding:
    """``host``: its name, or several with commas between; empty for what concerns all. ``remedy`` may be empty."""

    severity: str
    host: str
    what: str
    remedy: str = ""


def majority(values: Mapping[str, str]) -> str:
    """The value that most hosts have; of equally many, that of the first host."""
    counts = Counter(values.values())
    return max(values.values(), key=lambda value: counts[value])


def gibibytes(size: float) -> str:
    """``512 MiB``, ``3.5 GiB``, ``1511 GiB``."""
    if size < 1 << 30:
        return f"{size / (1 << 20):.0f} MiB"
    return f"{size / (1 << 30):.{1 if size < 10 << 30 else 0}f} GiB"
