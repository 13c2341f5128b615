"""Text from other hosts, made harmless for a terminal: it must not retitle, reprogram or overwrite what the user sees."""

from __future__ import annotations

import re
from typing import Any

# Colours, and what progress bars redraw lines with: up, erase.
_HARMLESS = rb"\x1b\[[0-9;:]*[mKA]"
_ESCAPE = re.compile(
    rb"(" + _HARMLESS + rb")"
    rb"|\x1b\[[\x30-\x3f]*[\x20-\x2f]*[\x40-\x7e]"  # control sequences
    rb"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # strings: titles, clipboards
    rb"|\x1b[\x20-\x2f]*[\x30-\x7e]?"
    rb"|\xc2[\x80-\x9f]"  # the same controls as one character
    rb"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
)
_OPEN = re.compile(rb"\x1b(?:\[[\x30-\x3f]*[\x20-\x2f]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[\x20-\x2f]*)?\Z|\xc2\Z")
_LONGEST = 4096  # bytes of a sequence whose end is waited for
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Cleaner:
    """Takes out of one stream, which comes in chunks, what a terminal would obey; colours and redrawn lines remain."""

    def __init__(self) -> None:
        self._open = b""

    def feed(self, chunk: bytes) -> bytes:
        """``chunk`` without escapes; one whose end has not come yet is kept. An empty one ends the stream."""
        text, self._open = self._open + chunk, b""
        cut = _OPEN.search(text) if chunk else None
        if cut is not None and len(text) - cut.start() <= _LONGEST:
            text, self._open = text[: cut.start()], text[cut.start() :]
        return _ESCAPE.sub(lambda match: match[1] or b"", text)


def plain(value: Any) -> Any:
    """A decoded message with nothing in its texts that a terminal would obey, but line feeds and tabs."""
    if isinstance(value, str):
        return _CONTROLS.sub("", value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value
