"""The byte ledger: what a rank holds, by kind, counted from the buffers of its units: live ones, or those of a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from .policy import Policy
from .runtime import Runtime
from .stepping import ShardedOptimizer
from .unit import Segment, Unit

# The kinds of memory on the device. Those in host memory are named "host ..." and come up only where there is any.
DEVICE_KINDS = ("parameters", "gradients", "master", "moments", "slots", "buffers")


def memory_by_kind(
    module: nn.Module, units: list[Unit], runtime: Runtime, sharded: ShardedOptimizer | None
) -> dict[str, int]:
    """Bytes by kind. ``slots``: everything a stage would not need by its formula (shared slots, receive buffers, and what
    a unit with a slot of its own holds beyond its shard). Padding of flat buffers is inside the kinds. What is placed in
    host memory is apart, as "host master" and so on, where there is any."""
    shared = runtime.param_slots.bytes + runtime.grad_slots.bytes + runtime.comm.pool.bytes
    moments = _live_moments(sharded) if sharded is not None else ()
    return count_bytes(module, units, runtime.policy, shared, moments)


def count_bytes(
    module: nn.Module, units: list[Unit], policy: Policy, shared: int, moments: Iterable[tuple[Segment, torch.Tensor]]
) -> dict[str, int]:
    """The ledger of ``units``, which may be a plan on the meta device. ``shared``: bytes of slots and receive buffers;
    ``moments``: what the optimizer keeps for each segment."""
    ledger: defaultdict[str, int] = defaultdict(int)
    ledger |= dict.fromkeys(DEVICE_KINDS, 0)
    for unit in units:
        for segment in unit.segments:
            _count_parameters(ledger, unit, segment, sharded=policy.share_param_slots)
            if segment.trainable:
                _count_gradients(ledger, unit, segment, sharded=policy.share_grad_slots)
    ledger["slots"] += shared
    ledger["buffers"] = sum(_nbytes(buffer) for buffer in module.buffers())
    on_host = {id(segment) for unit in units if unit.placement.optimizer for segment in unit.segments}
    for segment, value in moments:
        ledger["host moments" if id(segment) in on_host else "moments"] += _nbytes(value)
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


def _live_moments(sharded: ShardedOptimizer) -> Iterator[tuple[Segment, torch.Tensor]]:
    for piece in sharded.pieces:
        for value in sharded.optimizer.state.get(piece.tensor, {}).values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                yield piece.segment, value
