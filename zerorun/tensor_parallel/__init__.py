"""Tensor parallelism: layers whose weights are divided over the ranks of the tensor axis, and plans that convert models."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "ColumnParallelLinear": "layers",
    "RowParallelLinear": "layers",
    "VocabParallelEmbedding": "layers",
    "infer_plan": "infer",
    "make_plan": "planning",
    "make_region": "collectives",
    "parallelize": "parallelized",
    "vocab_parallel_cross_entropy": "loss",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module 'zerorun.tensor_parallel' has no attribute {name!r}")
