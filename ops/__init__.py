"""zerorun.ops: optimizer updates, the native library that runs them, and the loss over a large vocabulary.

It never imports the rest of zerorun.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {"linear_cross_entropy": "token_loss"}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"zerorun.ops.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'zerorun.ops' has no attribute {name!r}")
