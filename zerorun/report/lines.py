"""Messages as marked lines of JSON, so that they are found among whatever login shells and libraries print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
