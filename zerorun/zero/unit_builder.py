"""Partition: which parameters form a unit, and the building of units from an ordinary module.

[Note: choosing units]
A unit is entered and left through its module's forward, so units never lie inside one another: a policy takes the
outermost modules that fit. A module without a forward of its own is never called: in its place stand its children.
Whatever no unit takes, and every parameter that two units share (tied weights), belongs to the root unit, which stays
gathered from the beginning of a forward to the end of its backward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..distributed.layout import PAGED, aligned_bytes, build_layout
from ..distributed.replication import ALONE, Replication
from ..distributed.topology import Topology
from ..distributed.transport.communicator import Communicator
from ..distributed.transport.mapped_shards import MappedShards
from ..errors import ConfigError, ConfigProblem, ModelError
from .flat_group import FlatGroup
from .init import forget_part, whole_value
from .offload.host_memory import give_back_freed
from .offload.placement import Disk, HostLink, Placement
from .placeholders import placeholders
from .policy import Policy
from .unit import SlotPool, Unit
from .weights import is_packed, stays_apart

ROOT = "root"
# Elements of the average parameter from which on gradients need no packing: reading many small tensors costs more.
LARGE_NUMEL = 65536
# Ranges of addresses that mapped shards may take. Linux allows a process 65,530 by default.
MOST_RANGES = 16384
# Bytes of other ranks' parameters, in units, that stay mapped to pages between their turns: see mapped_shards.py.
KEPT_BYTES = 32 << 20


@dataclass(frozen=True)
class UnitPolicy:
    """How to cut a model into units. ``kind``: by_block, by_block_and_size, by_block_group, size_based or classes."""

    kind: str = "by_block"
    block_count: int = 2  # blocks in a unit, for by_block_group
    numel: int = 50_000_000  # elements, for size_based and by_block_and_size
    classes: tuple[str, ...] = ()


@dataclass
class UnitSpec:
    """A unit before it has memory: the modules that enter it and the parameters it owns."""

    name: str
    modules: list[nn.Module]
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    shares_slots: bool = True  # False: an embedding or head, which keeps a slot of its own


def choose_units(module: nn.Module, policy: UnitPolicy) -> list[UnitSpec]:
    """Cut ``module`` into units by ``policy``; the root unit comes first. Raises ConfigError for unknown classes.

    What stays apart (weights.py) is in none of them.
    """
    specs = _candidates(module, policy)
    owners: dict[int, set[int]] = defaultdict(set)
    inside: set[int] = set()
    for index, spec in enumerate(specs):
        for part in spec.modules:
            for submodule in part.modules():
                inside.add(id(submodule))
                for param in submodule._parameters.values():
                    if param is not None:
                        owners[id(param)].add(index)
    for submodule in module.modules():
        if id(submodule) not in inside:
            for param in submodule._parameters.values():
                if param is not None:
                    owners[id(param)].add(-1)
    root = UnitSpec(ROOT, [module])
    for name, param in module.named_parameters():
        if stays_apart(param):
            continue
        holders = owners[id(param)]
        owner = next(iter(holders)) if len(holders) == 1 else -1
        (specs[owner] if owner >= 0 else root).params.append((name, param))
    return [root, *(spec for spec in specs if spec.params)]


def _candidates(module: nn.Module, policy: UnitPolicy) -> list[UnitSpec]:
    if policy.kind == "classes":
        return _by_class(module, policy.classes)
    if policy.kind == "size_based":
        found: list[UnitSpec] = []
        _by_size(module, "", policy.numel, found, is_root=True)
        return found
    blocks = repeated_blocks(module)
    if policy.kind == "by_block_group":
        return _grouped(blocks, policy.block_count)
    specs = [UnitSpec(name, [block]) for name, block in blocks]
    if policy.kind == "by_block_and_size":
        taken = {id(part) for _, block in blocks for part in block.modules()}
        for name, part in module.named_modules():
            leaf = id(part) not in taken and part is not module and not list(part.children())
            if leaf and has_forward(part) and _numel(part) >= policy.numel:
                specs.append(UnitSpec(name, [part], shares_slots=False))
    return specs


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    return [(f"{prefix}{name}", child) for name, child in module.named_children()]


def repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, block): members of the outermost lists in which one class with parameters comes at least twice.

    Members that have no forward, such as the inner lists of a list of lists, give their own members in their place.

    Of a model that is cut into pipeline stages, a list may be short: there a module made of others is a block as well.
    """
    return list(_blocks(module, "", set()))


def _blocks(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    members = _callable_members(module, prefix) if is_list else _children(module, prefix)
    children = [(name, child) for name, child in members if id(child) not in seen]
    repeated: set[type] = set()
    elsewhere = is_list and any(getattr(child, "is_elsewhere", False) for child in module.children())
    cut = elsewhere or getattr(module, "is_cut", False)
    if cut or is_list:
        counts = Counter(type(child) for _, child in children if _numel(child))
        repeated = {kind for kind, count in counts.items() if count >= 2}
    if cut:
        made = [child for _, child in children if any(_numel(part) for part in child.children())]
        repeated |= {type(child) for child in made if has_forward(child)}
    for name, child in children:
        seen.add(id(child))
        if type(child) in repeated and _numel(child):
            yield name, child
        else:
            yield from _blocks(child, f"{name}.", seen)


def _callable_members(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The children, and in place of those without a forward their own, and so on."""
    for name, child in _children(module, prefix):
        if has_forward(child):
            yield name, child
        else:
            yield from _callable_members(child, f"{name}.")


def has_forward(module: nn.Module) -> bool:
    """False for lists, dicts and other modules that only hold parameters or modules: hooks on them never run."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _grouped(blocks: Sequence[tuple[str, nn.Module]], count: int) -> list[UnitSpec]:
    """Neighbouring blocks of one list, ``count`` to a unit."""
    specs: list[UnitSpec] = []
    last_parent, filled = None, 0
    for name, block in blocks:
        parent = name.rpartition(".")[0]
        if parent != last_parent or filled == count:
            specs.append(UnitSpec(name, []))
            last_parent, filled = parent, 0
        specs[-1].modules.append(block)
        filled += 1
    return specs


def _by_class(module: nn.Module, classes: Sequence[str]) -> list[UnitSpec]:
    specs: list[UnitSpec] = []
    inside: set[int] = set()
    found: set[str] = set()
    for name, part in module.named_modules():
        found.add(type(part).__name__)
        if id(part) in inside or type(part).__name__ not in classes or part is module:
            continue
        if not has_forward(part):
            raise ConfigError([_without_forward(name, part)])
        inside.update(id(sub) for sub in part.modules())
        specs.append(UnitSpec(name, [part]))
    missing = [name for name in classes if name not in found]
    parts = any(getattr(part, "is_cut", False) or getattr(part, "is_elsewhere", False) for part in module.modules())
    if missing and not parts:  # other pipeline stages may have them
        raise ConfigError(
            [
                ConfigProblem(
                    "zero_optimization.unit_policy",
                    missing,
                    "the model has no module of this class.",
                    f"name classes out of {sorted(found)}, or use 'by_block'.",
                )
            ]
        )
    return specs


def _without_forward(name: str, part: nn.Module) -> ConfigProblem:
    inner = sorted({type(child).__name__ for _, child in _callable_members(part, "") if _numel(child)})
    return ConfigProblem(
        "zero_optimization.unit_policy",
        type(part).__name__,
        f"{name!r} is of this class, which has no forward: it is never called, so nothing would gather its parameters.",
        f"name the classes that are called in it, out of {inner}.",
    )


def _by_size(module: nn.Module, prefix: str, numel: int, found: list[UnitSpec], *, is_root: bool) -> bool:
    """Smallest modules with at least ``numel`` elements, bottom up. True if ``module`` holds a unit."""
    before = len(found)
    holds = False
    for name, child in _children(module, prefix):
        holds = _by_size(child, f"{name}.", numel, found, is_root=False) or holds
    if not holds and not is_root and has_forward(module) and _numel(module) >= numel:
        found.insert(before, UnitSpec(prefix[:-1], [module]))
        return True
    return holds


# -- building ----------------------------------------------------------------------------------------------------


@dataclass
class UnitBuilder:
    """Turns specs into units with memory. One machinery for all stages: the policy only decides where slots lie.

    Without ``comm`` it makes a plan: the same units on the meta device, for any ``topology``. Parameters are not touched.
    """

    policy: Policy
    topology: Topology
    device: torch.device
    compute_dtype: torch.dtype | None  # None: every parameter keeps its dtype
    slot_count: int  # shared parameter slots: one in use, the others on their way
    optimized: dict[int, int]  # id(parameter) -> parameter group
    whole: bool  # never cut a parameter
    placements: Sequence[Placement] = ()  # of the units, if not all on the device
    pinned: bool = True  # host memory
    apart: bool = False  # the device has memory of its own
    reads_parts: bool = False  # ranks can sum gradients from where autograd leaves them
    maps_shards: bool = False  # ranks can share the memory of large shards
    comm: Communicator | None = None
    replication_of: Callable[[nn.Parameter], Replication] = lambda param: ALONE
    disk: Disk | None = None  # what the placements put on one; a plan needs none

    def disk_units(self, specs: list[UnitSpec]) -> dict[int, list[int]]:
        """Unit -> elements of the masters that this rank keeps on a disk."""
        found = {}
        for index, (spec, placement) in enumerate(zip(specs, self.placements, strict=bool(self.placements))):
            if placement.states_on_disk:
                found[index] = [s.high - s.low for s in self._flat_groups(spec) if s.trainable]
        return found

    def disk_params(self, specs: list[UnitSpec]) -> int:
        """Bytes of the shards that this rank keeps on a disk."""
        total = 0
        for spec, placement in zip(specs, self.placements, strict=bool(self.placements)):
            if placement.params_on_disk and self.policy.share_param_slots and _may_share(spec):
                flat_groups = self._flat_groups(spec)
                total += sum(aligned_bytes((s.high - s.low) * self._dtype(s.params[0]).itemsize) for s in flat_groups)
        return total

    def build(self, specs: list[UnitSpec]) -> tuple[list[Unit], SlotPool, SlotPool]:
        """(units, parameter slots, gradient slots). Parameters become views or placeholders; rank 0's values win."""
        units = [Unit(index, spec.name, spec.modules, self._flat_groups(spec)) for index, spec in enumerate(specs)]
        sharing = [unit for unit, spec in zip(units, specs, strict=True) if _may_share(spec)]
        share_params, share_grads = self.policy.share_param_slots, self.policy.share_grad_slots
        for unit, placement in zip(units, self.placements, strict=bool(self.placements)):
            unit.placement = placement
        for unit in sharing if share_params else ():
            for flat_group in unit.flat_groups:
                flat_group.mapped = self._can_map(unit, flat_group)
        self._mapping = self._map_shards(units)
        param_slots = self._pool(self.slot_count, [self._bytes(u.flat_groups) for u in sharing] if share_params else [])
        # A gradient slot is filled when its unit's backward is over and is on the wire during the next one's.
        in_flight = max(self.slot_count - 1, 1)
        grad_slots = self._pool(in_flight, [self._grad_bytes(u) for u in sharing] if share_grads else [])
        self._link = HostLink(self.device, pinned=self.pinned, store=self.disk.states if self.disk else None)
        self.staging_bytes = self._reserve_staging(units)
        for position, unit in enumerate(sharing):
            if share_params:
                unit.resident, unit.param_slot = False, position % self.slot_count
            if share_grads:
                unit.grad_slot = position % in_flight
        for unit in units:
            unit.deferred = unit not in sharing
            self._materialise(unit, param_slots, grad_slots)
            if self.comm is not None:
                give_back_freed()
        kept = 0
        for unit in units:
            kept += unit.mapped_from_others
            unit.keeps_others = kept <= KEPT_BYTES
        if self._mapping is not None:
            self._mapping.close()
        return units, param_slots, grad_slots

    def _can_map(self, unit: Unit, flat_group: FlatGroup) -> bool:
        """True if all ranks have the shards of ``flat_group`` in whole pages, where nothing but a step changes them."""
        here = not (unit.placement.params or unit.placement.optimizer)
        paged = all(bound % PAGED == 0 for bound in flat_group.layout.bounds) and flat_group.layout.even
        wide = self._dtype(flat_group.params[0]).itemsize >= 2  # PAGED elements are whole pages then
        return self.maps_shards and here and paged and wide and flat_group.layout.numel > 0

    def _map_shards(self, units: list[Unit]) -> MappedShards | None:
        """The memory of the mapped flat groups. None is where they are too many, or ranks can have none in common."""
        mapped = [flat_group for unit in units for flat_group in unit.flat_groups if flat_group.mapped]
        sizes = [(s.high - s.low) * self._dtype(s.params[0]).itemsize for s in mapped]
        few = 0 < len(mapped) * self.topology.shard <= MOST_RANGES
        mapping = self.comm.map_shards(sizes) if few and self.comm is not None else None
        for flat_group in mapped:
            flat_group.mapped = few and (mapping is not None or self.comm is None)
        return mapping

    def _mapped(self, flat_group: FlatGroup, dtype: torch.dtype) -> torch.Tensor:
        """The flat buffer [numel] over the memory of all ranks."""
        if self._mapping is None:
            return torch.empty(flat_group.layout.numel, dtype=dtype, device=self.device)
        return self._mapping.take().view(dtype)

    def _reserve_staging(self, units: list[Unit]) -> int:
        """Buffers for the largest flat group that is updated in host memory, where that needs any. Their bytes."""
        owned = [(s.high - s.low, self._dtype(s.params[0])) for u in units if u.placement.optimizer for s in u.trainable]
        gradients = max((numel * torch.float32.itemsize for numel, _ in owned), default=0)
        rounded = max((numel * dtype.itemsize for numel, dtype in owned if dtype.itemsize < 4), default=0)
        if self._link.apart:
            self._link.reserve(gradients, rounded)
        return 2 * (gradients + rounded) if self.apart else 0

    def _pool(self, count: int, sizes: list[int]) -> SlotPool:
        return SlotPool(count, max(sizes, default=0), self.device)

    def _bytes(self, flat_groups: Sequence[FlatGroup]) -> int:
        """Bytes of a parameter slot that holds ``flat_groups`` one after the other, except those that need none."""
        needing = [flat_group for flat_group in flat_groups if not flat_group.mapped]
        return sum(aligned_bytes(s.layout.numel * self._dtype(s.params[0]).itemsize) for s in needing)

    def _grad_bytes(self, unit: Unit) -> int:
        """Bytes of a gradient slot for ``unit``."""
        return sum(aligned_bytes(flat_group.layout.numel * torch.float32.itemsize) for flat_group in unit.trainable)

    def _flat_groups(self, spec: UnitSpec) -> list[FlatGroup]:
        kinds: dict[tuple[torch.dtype, bool, Replication, bool], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, param in spec.params:
            trainable = param.requires_grad and id(param) in self.optimized
            kinds[self._dtype(param), trainable, self.replication_of(param), is_packed(param)].append((name, param))
        flat_groups = []
        for (_, trainable, replication, packed), members in kinds.items():
            if trainable:  # neighbours of one parameter group make one optimizer piece
                members.sort(key=lambda member: self.optimized[id(member[1])])
            names, params = [name for name, _ in members], [param for _, param in members]
            layout = build_layout(
                names, [tuple(p.shape) for p in params], self.topology.shard, whole=self.whole and trainable
            )
            flat_group = FlatGroup(names, params, layout, self.topology.shard_rank, replication)
            flat_group.trainable, flat_group.packed = trainable, packed
            flat_groups.append(flat_group)
        return flat_groups

    def _dtype(self, param: nn.Parameter) -> torch.dtype:
        """That ``param`` is kept in. What is packed keeps its own, which says nothing about its values."""
        if self.compute_dtype is None or not param.is_floating_point() or is_packed(param):
            return param.dtype
        return self.compute_dtype

    def _materialise(self, unit: Unit, param_slots: SlotPool, grad_slots: SlotPool) -> None:
        if not unit.resident:
            needing = [flat_group for flat_group in unit.flat_groups if not flat_group.mapped]
            dtypes = [self._dtype(flat_group.params[0]) for flat_group in needing]
            carved = iter(param_slots.carve(unit.param_slot, [s.layout.numel for s in needing], dtypes))
        for flat_group in unit.flat_groups:
            dtype = self._dtype(flat_group.params[0])
            values = self._values(flat_group)  # [numel], the dtype the user gave
            flat_group.dtype = dtype
            large = flat_group.layout.numel >= LARGE_NUMEL * len(flat_group.params)
            flat_group.unpacked = large and dtype == torch.float32 and self.reads_parts
            flat_group.shard_is_in_place = unit.resident
            if unit.resident:
                flat_group.adopt_full(values if values.dtype == dtype else values.to(dtype))
                flat_group.shard = flat_group.full[flat_group.low : flat_group.high]
            elif flat_group.mapped:
                flat_group.adopt_full(self._mapped(flat_group, dtype))
                flat_group.shard = flat_group.full[flat_group.low : flat_group.high].copy_(
                    values[flat_group.low : flat_group.high]
                )
            else:
                flat_group.adopt_full(next(carved))
                flat_group.shard = self._kept_shard(unit, values[flat_group.low : flat_group.high], dtype)
            if flat_group.trainable:
                self._give_master(unit, flat_group, values)
            del values  # before the next flat group's are made
            if self.comm is not None:
                self._take_over(flat_group)
        if self.disk is not None and self.disk.states is not None and unit.placement.states_on_disk:
            self.disk.states.let_go(unit.index)
        self._give_gradients(unit, grad_slots)
        if self.comm is not None and not unit.resident:
            unit.reshard()

    def _take_over(self, flat_group: FlatGroup) -> None:
        """From here on the parameters are views, and what they held before is free."""
        for param, view in zip(flat_group.params, flat_group.views, strict=True):
            param.data = view
        flat_group.marks, flat_group.loud = placeholders(flat_group.params)

    def _values(self, flat_group: FlatGroup) -> torch.Tensor:
        """The flat buffer [numel] of rank 0's parameters, on this rank's device."""
        flat = torch.zeros(flat_group.layout.numel, dtype=flat_group.dtype, device=self.device)
        if self.comm is None:
            return flat
        for entry, param in zip(flat_group.layout.entries, flat_group.params, strict=True):
            if param.is_meta:
                raise ModelError(
                    f"parameter {entry.name} is on the meta device and has no values. Remedy: build the model inside "
                    "`with zerorun.zero.Init():`, or call to_empty() and initialise it, before zerorun.initialize()."
                )
            flat[entry.offset : entry.end].copy_(_taken_value(param))
        self.comm.broadcast(flat, 0, "initial parameters")
        return flat

    def _kept(self, values: torch.Tensor, dtype: torch.dtype, *, on_host: bool) -> torch.Tensor:
        """A copy of ``values`` where it is to stay."""
        if not on_host:
            return values.to(dtype, copy=True)
        return self._on_host(values.numel(), dtype).copy_(values)

    def _kept_shard(self, unit: Unit, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy of ``values`` for a unit that shares slots."""
        if self.disk is None or not unit.placement.params_on_disk:
            return self._kept(values, dtype, on_host=unit.placement.params)
        return self.disk.take(values.numel(), dtype).copy_(values)

    def _on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self.comm is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return self._link.empty(numel, dtype)

    def _give_master(self, unit: Unit, flat_group: FlatGroup, values: torch.Tensor) -> None:
        if self.policy.shard_optimizer:
            owned, compute = values[flat_group.low : flat_group.high], flat_group.shard
        else:
            owned, compute = values, flat_group.full
        on_host = unit.placement.optimizer
        weight_on_host = unit.placement.params and not unit.resident
        if flat_group.dtype == torch.float32 and on_host == weight_on_host and not unit.placement.states_on_disk:
            flat_group.master, flat_group.master_is_weight = compute, True
        elif self.disk is not None and unit.placement.states_on_disk:
            assert self.disk.states is not None
            flat_group.master = self.disk.states.master(unit.index, unit.trainable.index(flat_group)).copy_(owned)
        else:
            flat_group.master = self._kept(owned, torch.float32, on_host=on_host)

    def _give_gradients(self, unit: Unit, grad_slots: SlotPool) -> None:
        numels = [flat_group.layout.numel for flat_group in unit.trainable]
        if unit.grad_slot >= 0:
            slots = grad_slots.carve(unit.grad_slot, numels, [torch.float32] * len(numels))
        else:
            slots = [torch.zeros(numel, dtype=torch.float32, device=self.device) for numel in numels]
        on_host = unit.placement.optimizer  # then a reduced gradient leaves its slot at once
        for flat_group, slot in zip(unit.trainable, slots, strict=True):
            flat_group.adopt_grad(slot)
            owned = flat_group.high - flat_group.low
            if self.policy.share_grad_slots and not on_host:
                flat_group.grad_shard = torch.zeros(owned, dtype=torch.float32, device=self.device)
            else:
                flat_group.grad_shard = slot[flat_group.low : flat_group.high]
            if on_host:
                flat_group.host_grad, unit.link = self._on_host(owned, torch.float32), self._link


def _may_share(spec: UnitSpec) -> bool:
    """True if the unit needs no slots of its own, where the policy has shared ones."""
    return spec.shares_slots and spec.name != ROOT


def _taken_value(param: nn.Parameter) -> torch.Tensor:
    """The full value [numel], put together if ``Init`` partitioned it, which ends here."""
    whole = whole_value(param)
    if whole is None:
        return param.detach().reshape(-1)
    forget_part(param)
    return whole.reshape(-1)
