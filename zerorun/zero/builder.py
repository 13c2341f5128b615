"""The builder: carries out a plan on an ordinary module, whose parameters become views of flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from ..distributed.replication import Family
from ..distributed.transport.communicator import Communicator
from ..distributed.transport.mapped_shards import MappedShards
from ..errors import ModelError
from ..plan.parameter_kinds import let_go_of_memory, named_members
from ..plan.sharding_plan import FlatGroupPlan, ShardingPlan, UnitPlan
from .flat_group import CodeBuffers, FlatGroup, GradientBuffers, TrainedGroup, rounded
from .init import forget_part, whole_value
from .offload.host_link import Disk, HostLink
from .offload.host_memory import give_back_freed
from .offloaded_states import States
from .unit import SlotPool, Unit


@dataclass(frozen=True)
class ShardedParameters:
    """What the builder has made: units, the slots that they share, and the memory of all that can be away."""

    units: list[Unit]
    param_slots: SlotPool
    grad_slots: SlotPool
    states: States


def build(
    plan: ShardingPlan,
    model: nn.Module,
    comm: Communicator,
    *,
    pinned: bool = True,
    mapping: Mapping[Family, MappedShards] | None = None,
    disk: Disk | None = None,
) -> ShardedParameters:
    """Make the units of ``plan``. All data-parallel ranks must call it; rank 0's values win.

    ``pinned``: host memory, for a GPU. ``mapping``: what ``map_shards`` has returned for the plan. ``disk``: room for what
    the plan puts there. Raises ModelError for parameters without values, before anything.
    """
    for name, param in model.named_parameters():
        if param.is_meta:
            raise ModelError(
                f"parameter {name} is on the meta device and has no values. Remedy: build the model inside "
                "`with zerorun.zero.Init():`, or call to_empty() and initialise it, before zerorun.initialize()."
            )
    return _Builder(plan, model, comm, pinned, mapping or {}, disk).build()


def map_shards(plan: ShardingPlan, comm: Communicator) -> dict[Family, MappedShards] | None:
    """Memory that ranks share, by family, for the flat groups that ``plan`` maps, in their order.

    None where they cannot share it. All data-parallel ranks must call it.
    """
    sizes: dict[Family, list[int]] = {}
    for group in plan.flat_groups:
        if group.mapped:
            sizes.setdefault(group.family, []).append(group.shard_numel * group.dtype.itemsize)
    found = {family: comm.of(family).shard.map_shards(sizes[family]) for family in Family if family in sizes}
    made = {family: mapping for family, mapping in found.items() if mapping is not None}
    alike = comm.topology.expert == 1 or all(comm.control.data_values(len(made) == len(sizes)))
    if alike and len(made) == len(sizes):
        return made
    for mapping in made.values():
        mapping.close()
    return None


class _Builder:
    """One call of ``build``."""

    def __init__(
        self,
        plan: ShardingPlan,
        model: nn.Module,
        comm: Communicator,
        pinned: bool,
        mapping: Mapping[Family, MappedShards],
        disk: Disk | None,
    ) -> None:
        self._plan, self._comm, self._device = plan, comm, comm.device
        self._modules, self._params = dict(model.named_modules()), dict(named_members(model))
        self._mapping, self._disk = mapping, disk
        neighbours = pairwise(plan.flat_groups)
        self._before_alike = {id(group) for group, following in neighbours if _are_put_together(group, following)}
        self._staging: torch.Tensor | None = None
        self._param_slots = SlotPool(plan.param_slots, self._device)
        self._grad_slots = SlotPool(plan.grad_slots, self._device)
        self._link = HostLink(self._device, pinned=pinned, store=disk.states if disk is not None else None)
        if self._link.apart:
            self._link.reserve(plan.staging.gradients, plan.staging.rounded)

    def build(self) -> ShardedParameters:
        units = [self._unit(unit) for unit in self._plan.units]
        for mapping in self._mapping.values():
            mapping.close()
        states = States(units, self._param_slots, self._grad_slots, self._device)
        return ShardedParameters(units, self._param_slots, self._grad_slots, states)

    def _unit(self, plan: UnitPlan) -> Unit:
        in_param_slot, in_grad_slot = self._in_param_slot(plan), self._in_grad_slot(plan)
        groups = [self._flat_group(plan, group, in_param_slot, in_grad_slot) for group in plan.flat_groups]
        if self._disk is not None and self._disk.states is not None and plan.placement.states_on_disk:
            self._disk.states.let_go(plan.index)
        unit = Unit(plan, [self._modules[name] for name in plan.modules], groups, self._link)
        if not plan.resident:
            unit.reshard()
        give_back_freed()
        return unit

    def _in_param_slot(self, plan: UnitPlan) -> Iterator[torch.Tensor]:
        """Where the flat groups of the unit lie in the slot that it shares."""
        needing = [group for group in plan.flat_groups if group.slot_bytes]
        dtypes = [dtype for group in needing for dtype in ((group.dtype, torch.uint8) if group.coded else (group.dtype,))]
        sizes = [size for group in needing for size in group.slot_bytes]
        numels = [size // dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
        return iter(self._param_slots.carve(plan.param_slot, numels, dtypes) if needing else ())

    def _in_grad_slot(self, plan: UnitPlan) -> Iterator[torch.Tensor]:
        groups = plan.trainable if plan.grad_slot >= 0 else ()
        numels, dtypes = [group.layout.numel for group in groups], [group.gradient_dtype for group in groups]
        return iter(self._grad_slots.carve(plan.grad_slot, numels, dtypes) if numels else ())

    def _flat_group(
        self, unit: UnitPlan, plan: FlatGroupPlan, param_slot: Iterator[torch.Tensor], grad_slot: Iterator[torch.Tensor]
    ) -> FlatGroup:
        params = [self._params[entry.name] for entry in plan.layout.entries]
        values = self._values(plan, params)
        full, shard = self._weights(unit, plan, values, param_slot)
        codes = self._codes(unit, plan, param_slot) if plan.coded else None
        master, rest = self._masters(unit, plan, full, shard, values) if plan.trainable else (None, None)
        del values  # before anything else is made
        second = self._second(unit, plan) if plan.secondary is not None else None
        if master is None:
            return FlatGroup(plan, params, full, shard, codes, second)
        gradients = self._gradients(unit, plan, grad_slot)
        weight_on_host = unit.placement.params and not unit.resident
        together = not self._link.apart or weight_on_host == unit.placement.optimizer
        return TrainedGroup(plan, params, full, shard, master, gradients, codes, second, rest, together=together)

    # -- parameters ----------------------------------------------------------------------------------------------

    def _values(self, plan: FlatGroupPlan, params: list[nn.Parameter]) -> torch.Tensor:
        """The flat buffer [numel] on this rank's device, in the dtype that the user gave, with the first rank's values."""
        flat, channels, written = self._staged(plan), self._comm.of(plan.family), 0
        for entry, param in zip(plan.layout.entries, params, strict=True):
            value = _taken_value(param)
            if channels.is_first:
                flat[written : entry.offset].zero_()
                flat[entry.offset : entry.end].copy_(value)
                written = entry.end
            del value
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)  # so that it does not lie there twice
            let_go_of_memory(param, param.data)
        if channels.is_first:
            flat[written:].zero_()
        channels.broadcast(flat, "initial parameters")
        return flat

    def _staged(self, plan: FlatGroupPlan) -> torch.Tensor:
        """Where the values of a flat group are put together [numel]; for the next one, too, if it is alike.

        The kernel would give each of them new memory, page by page, each zeroed. Memory for one that is not alike is not
        held beside that of another, so that the peak is that of one group.
        """
        flat, self._staging = self._staging, None
        if flat is None:
            flat = torch.empty(plan.layout.numel, dtype=plan.given_dtype, device=self._device)
        if id(plan) in self._before_alike:
            self._staging = flat
        return flat

    def _weights(
        self, unit: UnitPlan, plan: FlatGroupPlan, values: torch.Tensor, param_slot: Iterator[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(where the whole parameters lie [numel], this rank's shard) in compute dtype."""
        if plan.resident:
            full = rounded(plan, values)
            return full, full[plan.low : plan.high]
        own = rounded(plan, values[plan.low : plan.high])
        if plan.mapped:
            full = self._mapping[plan.family].take().view(plan.dtype)
            return full, full[plan.low : plan.high].copy_(own)
        return next(param_slot), self._kept_shard(unit, own, plan.dtype)

    def _codes(self, unit: UnitPlan, plan: FlatGroupPlan, param_slot: Iterator[torch.Tensor]) -> CodeBuffers:
        own = self._room(unit, plan.code_bytes(plan.shard_numel), torch.uint8)
        return CodeBuffers(own, next(param_slot))

    def _second(self, unit: UnitPlan, plan: FlatGroupPlan) -> torch.Tensor:
        dtype = torch.uint8 if plan.coded else plan.dtype
        return self._room(unit, plan.second_bytes // dtype.itemsize, dtype)

    def _room(self, unit: UnitPlan, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of where the unit's shard is kept."""
        if unit.placement.params_on_disk and self._disk is not None:
            return self._disk.take(numel, dtype)
        if unit.placement.params:
            return self._link.empty(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self._device)

    def _kept_shard(self, unit: UnitPlan, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if unit.placement.params_on_disk and self._disk is not None:
            return self._disk.take(values.numel(), dtype).copy_(values)
        return self._kept(values, dtype, on_host=unit.placement.params)

    def _kept(self, values: torch.Tensor, dtype: torch.dtype, *, on_host: bool) -> torch.Tensor:
        """A copy of ``values`` where it is to stay."""
        if on_host:
            return self._link.empty(values.numel(), dtype).copy_(values)
        return values.to(dtype, copy=True)

    def _masters(
        self, unit: UnitPlan, plan: FlatGroupPlan, full: torch.Tensor, shard: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(master [owned] in the dtype of its format, what it leaves out of ``values`` [owned] or None)."""
        whole = plan.owns_everything and plan.resident
        if plan.master_is_weight and plan.master_format.rest is None:
            return full if whole else shard, None
        owned, rest = plan.master_format.parts(values[plan.owned[0] : plan.owned[1]])
        master = (full if whole else shard) if plan.master_is_weight else self._master(unit, plan, owned)
        return master, None if rest is None else self._rest(unit, plan, rest)

    def _master(self, unit: UnitPlan, plan: FlatGroupPlan, owned: torch.Tensor) -> torch.Tensor:
        if unit.placement.states_on_disk and self._disk is not None and self._disk.states is not None:
            return self._disk.states.master(unit.index, unit.trainable.index(plan)).copy_(owned)
        return self._kept(owned, plan.master_format.dtype, on_host=unit.placement.optimizer)

    def _rest(self, unit: UnitPlan, plan: FlatGroupPlan, rest: torch.Tensor) -> torch.Tensor | None:
        if unit.placement.states_on_disk and self._disk is not None and self._disk.states is not None:
            there = self._disk.states.rest(unit.index, unit.trainable.index(plan))
            return None if there is None else there.copy_(rest)
        return self._kept(rest, rest.dtype, on_host=unit.placement.optimizer)

    # -- gradients -----------------------------------------------------------------------------------------------

    def _gradients(self, unit: UnitPlan, plan: FlatGroupPlan, grad_slot: Iterator[torch.Tensor]) -> GradientBuffers:
        own, on_host = plan.shard_numel, unit.placement.optimizer  # then a reduced gradient leaves its slot at once
        dtype = plan.gradient_dtype
        full = next(grad_slot) if unit.grad_slot >= 0 else self._zeros(plan.layout.numel, dtype)
        apart = self._plan.policy.share_grad_slots and not on_host
        shard = self._zeros(own, dtype) if apart else full[plan.low : plan.high]
        kept = plan.own_bytes("residual") // torch.float32.itemsize
        host = self._link.empty(own, dtype) if on_host else None
        return GradientBuffers(full, shard, host, self._zeros(kept, torch.float32) if kept else None)

    def _zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self._device)


def _are_put_together(group: FlatGroupPlan, following: FlatGroupPlan) -> bool:
    """True if the values of both can be put together in the same memory, one after the other."""
    alike = (group.layout.numel, group.given_dtype) == (following.layout.numel, following.given_dtype)
    return alike and not (group.keeps_given or following.keeps_given)


def _taken_value(param: nn.Parameter) -> torch.Tensor:
    """The full value [numel], put together if ``Init`` partitioned it, which ends here."""
    whole = whole_value(param)
    if whole is None:
        return param.detach().reshape(-1)
    forget_part(param)
    return whole.reshape(-1)
