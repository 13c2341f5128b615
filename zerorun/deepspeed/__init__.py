"""Interfaces for scripts made for DeepSpeed and Megatron, and the mode in which zerorun stands for DeepSpeed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .activation import ActivationError as ActivationError
    from .activation import activate as activate
    from .activation import is_active as is_active

__all__ = ["ActivationError", "activate", "is_active"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("zerorun.deepspeed.activation"), name)
    raise AttributeError(f"module 'zerorun.deepspeed' has no attribute {name!r}")
