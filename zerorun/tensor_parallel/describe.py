"""Describes what a plan does to a model, in words and in bytes."""

from __future__ import annotations

from torch import nn

from ..distributed.tensor_shard import TensorShard
from .styles import Assignment, ParallelPlan


def shards(model: nn.Module, plan: ParallelPlan, rank: int) -> dict[str, TensorShard]:
    """Map the name of each parameter that ``plan`` divides to what ``rank`` keeps of it. ``model`` is whole."""
    found: dict[str, TensorShard] = {}
    for entry in plan.entries:
        for name, dim in _divided(model, entry).items():
            shape = tuple(model.get_parameter(name).shape)
            found[name] = TensorShard(shape, dim, entry.own(rank, plan.size))
    return found


def _divided(model: nn.Module, entry: Assignment) -> dict[str, int]:
    """Map the name of each parameter that ``entry`` divides to the divided dimension."""
    if not entry.lengths or entry.shared_heads or entry.style == "mla_kv_a_proj":
        return {}
    if entry.parameter:
        return {entry.name: entry.dim}
    layer = model.get_submodule(entry.name)
    transposed = not isinstance(layer, nn.Linear | nn.Embedding)
    row = entry.style.startswith("rowwise")
    dims = {"weight": int(row != transposed)}
    if not row and getattr(layer, "bias", None) is not None:
        dims["bias"] = 0
    return {f"{entry.name}.{name}": dim for name, dim in dims.items()}


def bytes_per_rank(model: nn.Module, plan: ParallelPlan) -> list[int]:
    """Return the bytes of parameters on each tensor rank."""
    named = dict(model.named_parameters())
    total = sum(param.numel() * param.element_size() for param in named.values())
    result = []
    for rank in range(plan.size):
        saved = 0
        for name, shard in shards(model, plan, rank).items():
            if name in named:  # tied parameters are listed under one name
                whole = named[name].numel()
                saved += (whole - whole * shard.length // max(shard.shape[shard.dim], 1)) * named[name].element_size()
        result.append(total - saved)
    return result


def describe(model: nn.Module, plan: ParallelPlan) -> str:
    """Return one line per pattern: style, number of modules or parameters, sizes on the ranks. ``model`` is whole."""
    by_pattern: dict[tuple[str, str], list[Assignment]] = {}
    for entry in plan.entries:
        by_pattern.setdefault((entry.pattern, entry.style), []).append(entry)
    lines = [
        f"{p}: {style}, {len(found)} x {_sizes(model, found[0], plan.size)}" for (p, style), found in by_pattern.items()
    ]
    return "\n".join(lines)


def _sizes(model: nn.Module, entry: Assignment, size: int) -> str:
    if entry.shared_heads:
        return f"whole, {entry.shared_heads} heads used by {size} ranks"
    divided = _divided(model, entry)
    if not divided:
        return "whole"
    name, dim = next(iter(divided.items()))
    shape = tuple(model.get_parameter(name).shape)
    local = [TensorShard(shape, dim, entry.own(rank, size)).local_shape for rank in range(size)]
    return f"{list(shape)} -> {' '.join(str(list(one)) for one in dict.fromkeys(local))}"
