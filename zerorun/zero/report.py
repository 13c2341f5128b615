"""The byte ledger: what a rank holds, by kind, counted from the live buffers."""

from __future__ import annotations

import torch
from torch import nn

from .runtime import Runtime
from .unit import Segment, Unit


def memory_by_kind(
    module: nn.Module, units: list[Unit], runtime: Runtime, optimizer: torch.optim.Optimizer | None
) -> dict[str, int]:
    """Bytes by kind. ``slots``: everything a stage would not need by its formula (shared slots, receive buffers, and what
    a unit with a slot of its own holds beyond its shard). Padding of flat buffers is inside the kinds."""
    ledger = dict.fromkeys(("parameters", "gradients", "master", "moments", "slots", "buffers"), 0)
    policy, degree = runtime.policy, runtime.comm.topology.shard
    for unit in units:
        for segment in unit.segments:
            _count_parameters(ledger, unit, segment, sharded=policy.share_param_slots and degree > 1)
            if segment.trainable:
                _count_gradients(ledger, unit, segment, sharded=policy.share_grad_slots and degree > 1)
    ledger["slots"] += runtime.param_slots.bytes + runtime.grad_slots.bytes + runtime.comm.pool.bytes
    ledger["buffers"] = sum(_nbytes(buffer) for buffer in module.buffers())
    ledger["moments"] = sum(
        _nbytes(value)
        for state in (optimizer.state.values() if optimizer is not None else ())
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    return ledger


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _count_parameters(ledger: dict[str, int], unit: Unit, segment: Segment, *, sharded: bool) -> None:
    whole, shard = segment.layout.numel * segment.dtype.itemsize, _nbytes(segment.shard)
    ledger["parameters"] += shard if sharded else whole
    if sharded and unit.resident:
        ledger["slots"] += whole - shard
    if segment.master is not None and segment.master.dtype != segment.dtype:
        ledger["master"] += _nbytes(segment.master)


def _count_gradients(ledger: dict[str, int], unit: Unit, segment: Segment, *, sharded: bool) -> None:
    assert segment.grad_full is not None
    assert segment.grad_shard is not None
    ledger["gradients"] += _nbytes(segment.grad_shard if sharded else segment.grad_full)
    if sharded and unit.grad_slot < 0:
        ledger["slots"] += _nbytes(segment.grad_full)
