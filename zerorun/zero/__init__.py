"""ZeRO: layouts, units, slots and shards, and access to the full values of a sharded model."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "GatheredParameters": "access",
    "Init": "init",
    "full_gradients": "gradients",
    "gradient_norms": "gradients",
    "safe_get_full_fp32_param": "access",
    "safe_get_full_grad": "gradients",
    "safe_get_full_optimizer_state": "access",
    "safe_get_local_fp32_param": "access",
    "safe_get_local_grad": "gradients",
    "safe_get_local_optimizer_state": "access",
    "safe_set_full_fp32_param": "access",
    "safe_set_full_optimizer_state": "access",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"zerorun.zero.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module 'zerorun.zero' has no attribute {name!r}")
