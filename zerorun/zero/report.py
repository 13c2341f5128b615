"""The byte ledger: what a rank holds, by kind, counted from the live buffers."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from .runtime import Runtime
from .stepping import ShardedOptimizer
from .unit import Segment, Unit


def memory_by_kind(
    module: nn.Module, units: list[Unit], runtime: Runtime, sharded: ShardedOptimizer | None
) -> dict[str, int]:
    """Bytes by kind. ``slots``: everything a stage would not need by its formula (shared slots, receive buffers, and what
    a unit with a slot of its own holds beyond its shard). Padding of flat buffers is inside the kinds. What is placed in
    host memory is apart, as "host master" and so on, where there is any."""
    ledger: defaultdict[str, int] = defaultdict(int)
    ledger |= dict.fromkeys(("parameters", "gradients", "master", "moments", "slots", "buffers"), 0)
    policy = runtime.policy
    for unit in units:
        for segment in unit.segments:
            _count_parameters(ledger, unit, segment, sharded=policy.share_param_slots)
            if segment.trainable:
                _count_gradients(ledger, unit, segment, sharded=policy.share_grad_slots)
    ledger["slots"] += runtime.param_slots.bytes + runtime.grad_slots.bytes + runtime.comm.pool.bytes
    ledger["buffers"] = sum(_nbytes(buffer) for buffer in module.buffers())
    if sharded is not None:
        _count_moments(ledger, sharded)
    return dict(ledger)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _count_parameters(ledger: dict[str, int], unit: Unit, segment: Segment, *, sharded: bool) -> None:
    whole, shard = segment.layout.numel * segment.dtype.itemsize, _nbytes(segment.shard)
    if unit.resident:
        ledger["parameters"] += shard if sharded else whole
        ledger["slots"] += whole - shard if sharded else 0
    else:
        ledger["host parameters" if unit.placement.params else "parameters"] += shard
    if segment.master is not None and not segment.master_is_weight:
        ledger["host master" if unit.placement.optimizer else "master"] += _nbytes(segment.master)


def _count_gradients(ledger: dict[str, int], unit: Unit, segment: Segment, *, sharded: bool) -> None:
    assert segment.grad_full is not None
    assert segment.grad_shard is not None
    if segment.host_grad is not None:
        ledger["host gradients"] += _nbytes(segment.host_grad)
        if unit.grad_slot < 0:
            ledger["slots" if sharded else "gradients"] += _nbytes(segment.grad_full)
        return
    ledger["gradients"] += _nbytes(segment.grad_shard if sharded else segment.grad_full)
    if sharded and unit.grad_slot < 0:
        ledger["slots"] += _nbytes(segment.grad_full)


def _count_moments(ledger: dict[str, int], sharded: ShardedOptimizer) -> None:
    on_host = {id(segment) for unit in sharded.units if unit.placement.optimizer for segment in unit.segments}
    for piece in sharded.pieces:
        kind = "host moments" if id(piece.segment) in on_host else "moments"
        for value in sharded.optimizer.state.get(piece.tensor, {}).values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                ledger[kind] += _nbytes(value)
