"""The byte ledger: what a rank holds, by kind, counted from the buffers of its units: live ones, or those of a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from .flat_group import FlatGroup
from .policy import Policy
from .runtime import Runtime
from .sharded_optimizer import ShardedOptimizer
from .unit import Unit, links_of
from .weights import apart_from, stored_bytes

# The kinds of memory on the device. Those in host memory are named "host ...", and those in files "disk ..."; they come up
# only where there is any.
DEVICE_KINDS = ("parameters", "gradients", "master", "moments", "slots", "buffers")


def memory_by_kind(
    module: nn.Module, units: list[Unit], runtime: Runtime, sharded: ShardedOptimizer | None
) -> dict[str, int]:
    """Bytes by kind. ``slots``: everything a stage would not need by its formula (shared slots, receive buffers, and what
    a unit with a slot of its own holds beyond its shard). Padding of flat buffers is inside the kinds. What is placed in
    host memory is apart, as "host master" and so on, and what is in files as "disk master", where there is any."""
    shared = runtime.param_slots.bytes + runtime.grad_slots.bytes + runtime.comm.pool.bytes
    moments = _live_moments(sharded) if sharded is not None else ()
    return count_bytes(module, units, runtime.policy, shared, moments, sum(link.bytes for link in links_of(units)))


def count_bytes(
    module: nn.Module,
    units: list[Unit],
    policy: Policy,
    shared: int,
    moments: Iterable[tuple[FlatGroup, int]],
    staging: int,
) -> dict[str, int]:
    """The ledger of ``units``, which may be a plan on the meta device. ``shared``: bytes of slots and receive buffers;
    ``moments``: bytes of what the optimizer keeps for flat groups; ``staging``: of buffers between the places."""
    ledger: defaultdict[str, int] = defaultdict(int)
    ledger |= dict.fromkeys(DEVICE_KINDS, 0)
    for unit in units:
        for flat_group in unit.flat_groups:
            _count_parameters(ledger, unit, flat_group, sharded=policy.share_param_slots)
            if flat_group.trainable:
                _count_gradients(ledger, unit, flat_group, sharded=policy.share_grad_slots)
    taken = [param for unit in units for flat_group in unit.flat_groups for param in flat_group.params]
    ledger["parameters"] += sum(map(stored_bytes, apart_from(module, taken).values()))
    ledger["slots"] += shared
    ledger["buffers"] = sum(_nbytes(buffer) for buffer in module.buffers())
    where = {id(flat_group): _states_in(unit) for unit in units for flat_group in unit.flat_groups}
    for flat_group, size in moments:
        ledger[f"{where[id(flat_group)]}moments"] += size
    if staging:
        ledger["host staging"] = staging
    return dict(ledger)


def total_of(ledger: Mapping[str, int], place: str) -> int:
    """Bytes of the kinds in ``place``: "device", "host" or "disk"."""
    found = dict.fromkeys(("device", "host", "disk"), 0)
    for kind, size in ledger.items():
        found["device" if kind in DEVICE_KINDS else kind.split()[0]] += size
    return found[place]


def _states_in(unit: Unit) -> str:
    """The beginning of the kind of its master and moments."""
    return "disk " if unit.placement.states_on_disk else "host " if unit.placement.optimizer else ""


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _count_parameters(ledger: dict[str, int], unit: Unit, flat_group: FlatGroup, *, sharded: bool) -> None:
    whole, shard = flat_group.layout.numel * flat_group.dtype.itemsize, _nbytes(flat_group.shard)
    if unit.resident:
        ledger["parameters"] += shard if sharded else whole
        ledger["slots"] += whole - shard if sharded else 0
    else:
        where = "disk " if unit.placement.params_on_disk else "host " if unit.placement.params else ""
        ledger[f"{where}parameters"] += shard
    if flat_group.master is not None and not flat_group.master_is_weight:
        ledger[f"{_states_in(unit)}master"] += _nbytes(flat_group.master)


def _count_gradients(ledger: dict[str, int], unit: Unit, flat_group: FlatGroup, *, sharded: bool) -> None:
    assert flat_group.grad_full is not None
    assert flat_group.grad_shard is not None
    if flat_group.host_grad is not None:
        ledger["host gradients"] += _nbytes(flat_group.host_grad)
        if unit.grad_slot < 0:
            ledger["slots" if sharded else "gradients"] += _nbytes(flat_group.grad_full)
        return
    ledger["gradients"] += _nbytes(flat_group.grad_shard if sharded else flat_group.grad_full)
    if sharded and unit.grad_slot < 0:
        ledger["slots"] += _nbytes(flat_group.grad_full)


def _live_moments(sharded: ShardedOptimizer) -> Iterator[tuple[FlatGroup, int]]:
    for piece in sharded.pieces:
        for value in sharded.optimizer.state.get(piece.tensor, {}).values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                yield piece.flat_group, stored_bytes(value)
