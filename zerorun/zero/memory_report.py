"""The byte ledger of an engine: the bytes of its tensors, under the kinds that the plan gives them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..plan.byte_ledger import DEVICE_KINDS, kind_in
from ..plan.parameter_kinds import apart_from, other_buffers, scale_bytes, stored_bytes
from ..plan.sharding_plan import DEVICE, DISK, HOST
from .flat_group import FlatGroup
from .offloaded_states import MOMENTS, storage_number
from .runtime import Runtime
from .sharded_optimizer import ShardedOptimizer
from .unit import links_of


def memory_by_kind(module: nn.Module, runtime: Runtime, sharded: ShardedOptimizer | None) -> dict[str, int]:
    """Return bytes by kind, counted from the existing tensors. ``planned_bytes`` computes the same from the plan."""
    ledger: defaultdict[str, int] = defaultdict(int)
    ledger |= dict.fromkeys(DEVICE_KINDS, 0)
    away = runtime.made.states.places()
    for unit in runtime.units:
        for flat_group in unit.flat_groups:
            for kind, size in _counted(flat_group, away):
                ledger[kind] += size
    taken = [param for unit in runtime.units for flat_group in unit.flat_groups for param in flat_group.params]
    ledger["parameters"] += sum(map(stored_bytes, apart_from(module, taken).values())) + scale_bytes(module)
    ledger["slots"] += runtime.made.param_slots.bytes + runtime.made.grad_slots.bytes + runtime.comm.buffer_bytes
    ledger["buffers"] = sum(_nbytes(buffer) for buffer in other_buffers(module))
    if sharded is not None:
        ledger["slots"] += sharded.buffer_bytes
        for kind, size in _states(runtime, sharded):
            ledger[kind] += size
    staging = sum(link.bytes for link in links_of(runtime.units)) + runtime.made.states.bytes_kept
    staging += sharded.host_buffer_bytes if sharded is not None else 0
    if staging:
        ledger["host staging"] = staging
    return dict(ledger)


def _counted(flat_group: FlatGroup, away: Mapping[int, str | None]) -> Iterator[tuple[str, int]]:
    """Yield (kind, bytes) for the tensors of ``flat_group``.

    If the plan puts a tensor under several kinds, each gets the planned bytes, and the last the rest of the tensor's bytes.
    """
    left: dict[str, int] = {}
    last = {buffer.tensor: index for index, buffer in enumerate(flat_group.plan.buffers)}
    for index, buffer in enumerate(flat_group.plan.buffers):
        there = left.setdefault(buffer.tensor, _nbytes(getattr(flat_group, buffer.tensor)))
        size = there if index == last[buffer.tensor] else buffer.bytes
        left[buffer.tensor] -= size
        place = away.get(storage_number(getattr(flat_group, buffer.tensor)), buffer.place)
        if place is not None:
            yield kind_in(place, buffer.kind), size


def _states(runtime: Runtime, sharded: ShardedOptimizer) -> Iterator[tuple[str, int]]:
    place = {id(flat_group): unit.plan.states_place for unit in runtime.units for flat_group in unit.trainable}
    if runtime.made.states.is_away(MOMENTS):
        place = {flat_group: HOST if where == DEVICE else where for flat_group, where in place.items()}
    stores = {id(flat_group): unit.link.store for unit in runtime.units for flat_group in unit.trainable}
    states = sharded.optimizer.state  # once: an access waits for the updates of all units
    for piece in sharded.pieces:
        where, store = place[id(piece.flat_group)], stores[id(piece.flat_group)]
        for value in states.get(piece.tensor, {}).values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                beside = where == DISK and store is not None and not store.holds(value)
                yield kind_in(HOST if beside else where, "moments"), stored_bytes(value)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
