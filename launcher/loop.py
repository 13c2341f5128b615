"""The one loop of a process: whatever is ready is handled, unless what was handled just before has put it away."""

from __future__ import annotations

import selectors


def dispatch(selector: selectors.BaseSelector, timeout: float) -> None:
    """Wait up to ``timeout`` seconds, and call the ``data`` of each key that is ready and still registered."""
    for key, _ in selector.select(timeout):
        current = selector.get_map().get(key.fileobj)
        if current is not None and current.data is key.data:
            key.data()
