"""Text from other hosts, made harmless for a terminal: it must not retitle, reprogram or overwrite what the user sees."""

from __future__ import annotations

import re
from typing import Any

# Colours, and the sequences by which progress bars redraw lines: cursor up, erase line.
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
_LONGEST = 4096  # bytes of an unfinished sequence; the end of a longer one is not waited for
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Cleaner:
    """Removes what a terminal would obey, except colours and redrawn lines, from one stream that comes in chunks."""

    def __init__(self) -> None:
        self._open = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return ``chunk`` without escapes. An unfinished one waits for the next chunk; an empty chunk ends the stream."""
        text, self._open = self._open + chunk, b""
        cut = _OPEN.search(text) if chunk else None
        if cut is not None and len(text) - cut.start() <= _LONGEST:
            text, self._open = text[: cut.start()], text[cut.start() :]
        return _ESCAPE.sub(lambda match: match[1] or b"", text)


def plain(value: Any) -> Any:
    """Return a decoded message without control characters in its strings, other than line feeds and tabs."""
    if isinstance(value, str):
        return _CONTROLS.sub("", value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value
