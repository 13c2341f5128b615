"""Making the plan: what the configuration means for ranks, units, slots and placements.

Only shapes are looked at. The model is not changed, and neither process groups nor devices are needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod

import torch
from torch import nn

from ..config.degrees import divisors
from ..config.parse import Config
from ..distributed.device import CPU
from ..distributed.layout import ALIGNMENT, PAGED, Layout, aligned_bytes, build_layout
from ..distributed.quantised_blocks import BLOCK
from ..distributed.replication import ALONE, Family, Replication
from ..distributed.secondary_partition import Secondary
from ..distributed.tensor_shard import TensorShard, numel_on_a_rank, shards_of
from ..distributed.topology import Topology
from ..distributed.transport_kinds import reads_parts, reads_peers
from ..errors import TopologyError
from ..log import info_once
from ..ops.rounding import MasterFormat
from ..ops.state_format import StateFormat
from ..optim.loss_scaler import DTYPES
from ..optim.requested_optimizer import RawOptimizer
from ..zero.offload.nvme import buffer_bytes
from .families import FamilyPlace, refuse_optimizer
from .float8_layers import casts_of
from .matrix_exchange import MatrixExchange, plan_exchange
from .optimizer_states import state_count
from .parameter_kinds import apart_from, is_packed, other_buffers, scale_bytes, scales_beside, stored_bytes
from .placement import Placement, place_units
from .quantised_parameters import Quantised, QuantisedWire
from .sharding_plan import HOST, Buffer, DiskPlan, FlatGroupPlan, ShardingPlan, SlotPlan, StagingPlan, UnitPlan
from .stage_policy import STAGES, Policy
from .units import ROOT, LeafModules, UnitPolicy, UnitSpec, choose_units

# If parameters have at least this many elements on average, gradients are not packed: reading many small tensors costs
# more than packing them.
LARGE_NUMEL = 65536
# The most address ranges that mapped shards may take. Linux allows a process 65,530 by default.
MOST_RANGES = 16384
# Parameters of at least this many elements are not in a flat group with others whose states are smaller per element.
APART_NUMEL = 4096
# The first units keep the pages of other ranks' parameters mapped between their turns, up to this many bytes in all: see
# mapped_shards.py.
KEPT_BYTES = 32 << 20


def make_plan(
    model: nn.Module,
    config: Config,
    raw: RawOptimizer,
    topology: Topology,
    transport: str,
    device_type: str,
    *,
    replication_of: Callable[[nn.Parameter], Replication] = lambda param: ALONE,
    maps_shards: bool = True,
) -> ShardingPlan:
    """Make the plan of rank ``topology.rank`` for ``model``, its part of the whole model.

    ``transport``: NCCL, GLOO or PEER_MEMORY. ``device_type``: that of the ranks' devices, "cpu" or "cuda".
    ``replication_of``: which ranks besides the data-parallel ones also have a parameter. ``maps_shards``: False if ranks
    turned out to have no memory in common. Raises ConfigError for unknown classes in ``unit_policy``, and for an optimizer
    whose states cannot be updated on a disk; ModelError for one that needs experts whole.
    """
    return _Planner(model, config, raw, topology, transport, device_type, replication_of, maps_shards).plan()


# -- what the configuration says ---------------------------------------------------------------------------------


def wire_dtype(config: Config) -> torch.dtype:
    """The dtype in which gradients are sent."""
    return DTYPES[config.communication_data_type or config.gradient_dtype]


def compute_dtype(config: Config) -> torch.dtype | None:
    """The dtype of parameters and activations; None if they keep the dtypes of the module."""
    if config.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else None


def buffer_dtype(config: Config, buffer: torch.Tensor) -> torch.dtype:
    """The dtype in which ``buffer`` is kept: its own, unless the configuration has one for floating-point buffers."""
    wanted = config.data_types.buffer_dtype
    return DTYPES[wanted] if wanted is not None and buffer.dtype in DTYPES.values() else buffer.dtype


def planned_topology(config: Config, world_size: int, ranks_per_node: int | Sequence[int], rank: int = 0) -> Topology:
    """Return the topology that ``config`` asks for, without process groups.

    ``ranks_per_node``: of each node, if they differ. Raises TopologyError if the degrees do not divide the ranks.
    """
    pipe, tensor, context = config.pipeline.stages, config.tensor_parallel.size, config.sequence_parallel_size or 1
    here = ranks_per_node if isinstance(ranks_per_node, int) else _neighbours(config, ranks_per_node)
    degree = _shard_degree(config, world_size // (pipe * tensor), max(here // tensor, 1))
    degrees = {"pipe": pipe, "tensor": tensor, "context": context, "expert": config.expert_parallel.size}
    found = Topology.plan(world_size, rank, shard_degree=degree, **degrees, ranks_per_host=here)
    secondary_partition(config, found)
    return found


def _neighbours(config: Config, sizes: Sequence[int]) -> int:
    """Return how many ranks that follow one another are on one node, where nodes have ``sizes`` ranks.

    Raises TopologyError if they differ, and ``config`` asks for groups that then lie on more than one.
    """
    common, tensor = gcd(*sizes), config.tensor_parallel.size
    if len(set(sizes)) == 1:
        return common
    counts = ", ".join(f"{nodes} x {here} ranks" for here, nodes in sorted(Counter(sizes).items(), reverse=True))
    if config.zero_optimization.hybrid_shard and config.zero_optimization.shard_degree is None:
        raise TopologyError(
            f"zero_optimization.hybrid_shard makes each node a group that divides the states, but nodes differ: {counts}. "
            "Remedy: start as many ranks on each node, or set shard_degree to a number that divides all of these."
        )
    if common % tensor:
        raise TopologyError(
            f"tensor degree {tensor} splits unevenly over nodes that differ, {counts}: a group would lie on more than one. "
            f"Remedy: use a tensor degree of {' or '.join(map(str, divisors(common)))}, or start a multiple of {tensor} "
            "ranks on each node."
        )
    return common


def secondary_partition(config: Config, topology: Topology, family: Family = Family.DENSE) -> Secondary | None:
    """Return which ranks have a second copy of the weights (hpZ); None if there is none, as of experts.

    Raises TopologyError if groups of that many ranks do not fill the shard group.
    """
    settings, shard = config.zero_optimization, topology.shard
    size = settings.zero_hpz_partition_size
    if settings.stage < 3 or size == 1 or family is not Family.DENSE:
        return None
    if size == shard or shard == 1:
        info_once(
            f"zero_hpz_partition_size is {size}: all ranks that divide the states are one group, without a second copy."
        )
        return None
    if shard % size:
        raise TopologyError(
            f"zero_optimization.zero_hpz_partition_size is {size}, which does not divide the {shard} ranks that divide the "
            f"states. Remedy: set it to the number of these ranks on a node, one of {divisors(shard)}."
        )
    return Secondary(shard, size)


def _shard_degree(config: Config, world_size: int, ranks_per_node: int) -> int | None:
    """Return the number of ranks that shard a unit; None means all data-parallel ranks.

    Raises TopologyError if each node is to be a group and the ranks do not fill whole nodes.
    """
    settings = config.zero_optimization
    if settings.stage == 0:
        return None
    if settings.shard_degree is None and settings.hybrid_shard:
        if world_size % ranks_per_node:
            raise TopologyError(f"{world_size} ranks are not a multiple of {ranks_per_node} ranks on this node.")
        return ranks_per_node
    return settings.shard_degree


def _policy(config: Config, topology: Topology) -> Policy:
    """Return the stage's row of the table. In a shard group of one rank, units share slots only if they are offloaded."""
    settings = config.zero_optimization
    if topology.shard > 1:
        return STAGES[settings.stage]
    row = STAGES[min(settings.stage, 1)]
    return replace(
        row,
        share_grad_slots=settings.stage >= 2 and not settings.offload_optimizer.is_off(),
        share_param_slots=settings.stage == 3 and not settings.offload_param.is_off(),
    )


def _unit_policy(config: Config) -> UnitPolicy:
    settings, leaf = config.zero_optimization, config.zero_optimization.leaf_module
    leaves = LeafModules(leaf.classes, leaf.names, leaf.name_suffixes)
    if isinstance(settings.unit_policy, str):
        return UnitPolicy(settings.unit_policy, settings.unit_block_count, settings.unit_numel, leaves=leaves)
    return UnitPolicy("classes", classes=tuple(settings.unit_policy), leaves=leaves)


def _overlap(config: Config, transport: str, topology: Topology) -> bool:
    """Return whether units are gathered before they are needed, and reduced while backward goes on.

    Stage 3 is chosen to save memory. If ranks copy from each other's memory themselves, no transfer runs behind the
    computation: gathering early would only hide the wait for a slower rank, at the cost of a slot and a unit's gradients.
    """
    settings = config.zero_optimization
    if settings.overlap_comm is not None:
        return settings.overlap_comm
    return settings.stage < 3 or not reads_peers(transport, topology)


def _slot_count(config: Config, overlap: bool, numels: list[int]) -> int:
    """Return the number of shared parameter slots: one for the unit in use, and with ``overlap`` one for the next unit.

    The keys for prefetching and live parameters, if they are in the file, set another look-ahead.
    """
    settings, sources = config.zero_optimization, config.sources
    largest = max(numels, default=0)
    ahead = int(overlap)
    if settings.overlap_comm is not False and largest:
        if sources.get("zero_optimization.stage3_prefetch_bucket_size", "default") != "default":
            ahead = -(-settings.prefetch_bucket_size // largest)
        if sources.get("zero_optimization.stage3_max_live_parameters", "default") != "default":
            ahead = min(ahead, max(settings.max_live_parameters // largest - 1, 0))
    return min(1 + ahead, max(len(numels), 1))


def _grad_slot_count(param_slots: int, *, goes_on: bool) -> int:
    """Return the number of shared gradient slots. A slot is filled when backward leaves its unit.

    If the reduction ``goes_on`` behind the computation, one slot is being sent while the next unit's slot is filled.
    """
    return max(param_slots - 1, 2 if goes_on else 1)


# -- planning ----------------------------------------------------------------------------------------------------

_Members = list[tuple[str, nn.Parameter]]
_Place = tuple[int, int]  # (index of a unit, index of a flat group in it)
_KEPT = frozenset({"shard", "coded", "second"})  # buffers of weights that lie where offload_param says


def _fills_pages(group: FlatGroupPlan) -> bool:
    """True if gathers are of whole pages. Codes are no parameters yet when they have come."""
    layout, wide = group.layout, group.dtype.itemsize >= 2  # then PAGED elements fill whole pages
    return wide and not group.coded and layout.numel > 0 and layout.even and layout.sizes[0] % PAGED == 0


def _has_large_states(format: StateFormat, numel: int) -> bool:
    """True for a parameter whose states are much larger than those of others of its size, as an embedding's may be.

    In a flat group with others, some ranks would have all of them.
    """
    return format is StateFormat.FP32 and numel >= APART_NUMEL


@dataclass(frozen=True)
class _Planner:
    """The state of one call of ``make_plan``, whose arguments it holds."""

    model: nn.Module
    config: Config
    raw: RawOptimizer
    topology: Topology
    transport: str
    device_type: str
    replication_of: Callable[[nn.Parameter], Replication]
    maps_shards: bool

    @cached_property
    def policy(self) -> Policy:
        return _policy(self.config, self.topology)

    @cached_property
    def specs(self) -> list[UnitSpec]:
        return choose_units(self.model, _unit_policy(self.config), self.topology.tensor)

    @cached_property
    def placements(self) -> list[Placement]:
        settings = self.config.zero_optimization
        return place_units(
            [sum(self._numel(param) for _, param in spec.params if self._is_trained(param)) for spec in self.specs],
            optimizer=not settings.offload_optimizer.is_off(),
            ratio=settings.offload_optimizer.ratio,
            params=not settings.offload_param.is_off(),
            states_on_disk=settings.offload_optimizer.device == "nvme",
            params_on_disk=settings.offload_param.device == "nvme",
        )

    @cached_property
    def groups(self) -> list[list[FlatGroupPlan]]:
        """The flat groups of each unit, with their layouts; ``_complete`` fills in the other fields."""
        return [[self._lay_out(spec, members) for members in self._by_kind(spec)] for spec in self.specs]

    @cached_property
    def sharing(self) -> list[int]:
        """Indices of the units that use shared slots, if the policy has any."""
        return [index for index, spec in enumerate(self.specs) if spec.shares_slots and spec.name != ROOT]

    @cached_property
    def mapped(self) -> set[_Place]:
        """The flat groups whose buffer is made of the memory of all ranks. Empty if they need too many address ranges."""
        found = {
            (index, number): group.layout.degree
            for index in (self.sharing if self.policy.share_param_slots else ())
            for number, group in enumerate(self.groups[index])
            if self._can_map(group) and not (self.placements[index].params or self.placements[index].optimizer)
        }
        return set(found) if sum(found.values()) <= MOST_RANGES else set()

    def plan(self) -> ShardingPlan:
        config, topology = self.config, self.topology
        overlap = _overlap(config, self.transport, topology)
        count = _slot_count(config, overlap, [sum(self._numel(p) for _, p in spec.params) for spec in self.specs[1:]])
        in_flight = _grad_slot_count(count, goes_on=overlap and not reads_peers(self.transport, topology))
        units = self._units(count if self.policy.share_param_slots else 0, in_flight if self.policy.share_grad_slots else 0)
        sharing = [units[index] for index in self.sharing]
        disk = self._disk(units)
        taken = [param for spec in self.specs for _, param in spec.params]
        plan = ShardingPlan(
            topology=replace(topology, mesh=None),
            policy=self.policy,
            transport=self.transport,
            device_type=self.device_type,
            compute_dtype=compute_dtype(config),
            wire_dtype=wire_dtype(config),
            overlap=overlap,
            overlap_param_gather=self.config.zero_optimization.overlap_param_gather and self.topology.shard > 1,
            whole=self.raw.whole,
            micro_batches=config.gradient_accumulation_steps,
            units=units,
            param_slots=_slots(count, [u.param_slot_bytes for u in sharing] if self.policy.share_param_slots else []),
            grad_slots=_slots(in_flight, [u.grad_slot_bytes for u in sharing] if self.policy.share_grad_slots else []),
            staging=self._staging(units, disk),
            disk=disk,
            kept_apart=sum(map(stored_bytes, apart_from(self.model, taken).values())) + scale_bytes(self.model),
            buffers=sum(b.numel() * buffer_dtype(self.config, b).itemsize for b in other_buffers(self.model)),
            by_parts=self.raw.parts is not None,
            hops=self.wire.hops(units),
            matrices=self._matrices(units),
        )
        return plan if self.raw.parts is None else replace(plan, sums=self.raw.parts.planned_sums(plan.parts))

    # -- flat groups ---------------------------------------------------------------------------------------------

    def _is_trained(self, param: nn.Parameter) -> bool:
        return param.requires_grad and id(param) in self.raw.group_of

    def _dtype(self, param: nn.Parameter) -> torch.dtype:
        """The dtype in which ``param`` is kept. Packed memory keeps its own, which says nothing about its values."""
        wanted = compute_dtype(self.config)
        own = not param.is_floating_point() or is_packed(param) or id(param) in self.scales
        return param.dtype if wanted is None or own else wanted

    @cached_property
    def scales(self) -> set[int]:
        return scales_beside(self.model)

    def _by_kind(self, spec: UnitSpec) -> Iterator[_Members]:
        kinds: dict[tuple[torch.dtype, bool, Replication, bool, bool, Quantised], _Members] = defaultdict(list)
        for name, param in spec.params:
            has_formats = bool(self.raw.formats) and self._is_trained(param)
            apart = has_formats and _has_large_states(self._format(param), self._numel(param))
            kind = (
                self._dtype(param),
                self._is_trained(param),
                self.replication_of(param),
                is_packed(param),
                apart,
                self._coded(spec, param),
            )
            kinds[kind].append((name, param))
        for (_, trained, *_), members in kinds.items():
            if trained:  # neighbouring parameters of one optimizer group and state format form one piece
                members.sort(key=lambda member: (self.raw.group_of[id(member[1])], self._format(member[1])))
            yield members

    @cached_property
    def tensor_shards(self) -> dict[int, TensorShard]:
        return shards_of(self.model)

    def _numel(self, param: nn.Parameter) -> int:
        return numel_on_a_rank(param, self.tensor_shards.get(id(param)), self.topology.tensor)

    def _format(self, param: nn.Parameter) -> StateFormat:
        return self.raw.formats.get(id(param), StateFormat.FP32)

    @cached_property
    def wire(self) -> QuantisedWire:
        fp8 = self.config.fp8
        casts = casts_of(self.model) if fp8.enabled and fp8.enable_fsdp_float8_all_gather else {}
        return QuantisedWire(self.config.zero_optimization, self.policy, self.topology, self.raw.whole, casts)

    def _coded(self, spec: UnitSpec, param: nn.Parameter) -> Quantised:
        if self.replication_of(param).family is not Family.DENSE:
            return Quantised()
        return self.wire.of(spec, param, self._dtype(param), trained=self._is_trained(param), numel=self._numel(param))

    def _lay_out(self, spec: UnitSpec, members: _Members) -> FlatGroupPlan:
        params = [param for _, param in members]
        trained = self._is_trained(params[0])
        shapes, whole = [tuple(param.shape) for param in params], self.raw.whole and trained
        coded = self._coded(spec, params[0])
        in_blocks = coded.gradients or (coded.gathers and coded.float8 is None)
        least = BLOCK if in_blocks else ALIGNMENT
        quanta = [max(least, self._format(param).quantum) for param in params]
        replication = self.replication_of(params[0])
        told = self.raw.parts is not None or self.raw.matrix_dtype is not None or self.raw.seed is not None
        shards = self.tensor_shards if told else {}
        if trained and replication.family is Family.EXPERT:
            matrices = [name for name, param in members if self.raw.matrix_dtype is not None and self._is_matrix(param)]
            refuse_optimizer([name for name, _ in members], matrices, self.raw, self.topology)
        place = FamilyPlace.of(replication.family, self.topology)
        layout = build_layout([n for n, _ in members], shapes, place.degree, whole=whole, quantum=quanta)
        laid_out = by_layout(layout, members)
        return FlatGroupPlan(
            layout,
            place.shard_rank,
            copies=place.copies,
            copy=place.copy,
            dtype=self._dtype(params[0]),
            given_dtype=params[0].dtype,
            packed=is_packed(params[0]),
            coded=coded.gathers,
            float8=coded.float8,
            codes_gradients=coded.gradients,
            replication=replication,
            optimizer_groups=tuple(self.raw.group_of[id(param)] for param in laid_out) if trained else (),
            state_formats=tuple(self._format(param) for param in laid_out) if trained else (),
            tensor_shards=tuple(shards.get(id(param)) for param in laid_out) if shards else (),
        )

    def _can_map(self, group: FlatGroupPlan) -> bool:
        """True if ranks can share the memory of its shards."""
        direct = self.device_type == CPU and reads_peers(self.transport, self.topology, group.family)
        copied = secondary_partition(self.config, self.topology, group.family) is not None
        return self.maps_shards and direct and _fills_pages(group) and not copied

    # -- units ---------------------------------------------------------------------------------------------------

    def _units(self, param_slots: int, grad_slots: int) -> tuple[UnitPlan, ...]:
        """Plan the units. ``param_slots``, ``grad_slots``: the number of shared slots; 0 if the policy has none."""
        names = {id(module): name for name, module in self.model.named_modules()}
        turn = {index: turn for turn, index in enumerate(self.sharing)}
        units, kept = [], 0
        for index, spec in enumerate(self.specs):
            unit = UnitPlan(
                index=index,
                name=spec.name,
                modules=tuple(names[id(module)] for module in spec.modules),
                flat_groups=(),
                param_slot=turn[index] % param_slots if index in turn and param_slots else -1,
                grad_slot=turn[index] % grad_slots if index in turn and grad_slots else -1,
                deferred=index not in turn,
                placement=self.placements[index],
            )
            groups = tuple(self._complete(unit, number, group) for number, group in enumerate(self.groups[index]))
            kept += sum((g.layout.numel - g.shard_numel) * g.dtype.itemsize for g in groups if g.mapped)
            units.append(replace(unit, flat_groups=groups, keeps_others=kept <= KEPT_BYTES))
        return tuple(units)

    def _complete(self, unit: UnitPlan, number: int, group: FlatGroupPlan) -> FlatGroupPlan:
        trained, placement = group.trainable, unit.placement
        resident = unit.resident or (group.layout.degree == 1 and not placement.params)
        large = group.layout.numel >= LARGE_NUMEL * len(group.layout.entries) and group.dtype == torch.float32
        alike = placement.optimizer == (placement.params and not unit.resident) and not placement.states_on_disk
        owned = (group.low, group.high) if self.policy.shard_optimizer else (0, group.layout.numel)
        found = replace(
            group,
            owned=owned if trained else (0, 0),
            divides_updates=self.policy.shard_optimizer and group.layout.degree > 1 and group.layout.numel > 0,
            master_is_weight=trained and group.dtype == self.raw.master.dtype and alike,
            master_format=self.raw.master if trained else MasterFormat.FP32,
            gradient_dtype=DTYPES[self.config.gradient_dtype] if trained else torch.float32,
            resident=resident,
            secondary=None if resident else secondary_partition(self.config, self.topology, group.family),
            mapped=(unit.index, number) in self.mapped,
            unpacked=trained
            and large
            and not group.codes_gradients
            and reads_parts(self.transport, self.topology, self.device_type, wire_dtype(self.config), group.family),
        )
        return replace(found, buffers=tuple(self._buffers(unit, found)))

    def _buffers(self, unit: UnitPlan, group: FlatGroupPlan) -> Iterator[Buffer]:
        """Yield the buffers that ``group`` allocates.

        A unit may have its own slot although the stage has shared ones. What this slot holds beyond the shard then counts
        as "slots".
        """
        policy, size = self.policy, group.dtype.itemsize
        whole, shard = group.layout.numel * size, group.shard_numel * size
        if group.resident and policy.share_param_slots:
            yield Buffer("full", "parameters", shard)
            yield Buffer("full", "slots", whole - shard)
        elif group.resident:
            yield Buffer("full", "parameters", whole)
        else:
            yield Buffer("shard", "parameters", shard, unit.params_place)
        if group.coded:
            yield Buffer("coded", "parameters", group.code_bytes(group.shard_numel), unit.params_place)
        if group.secondary is not None:
            yield Buffer("second", "parameters", group.second_bytes, unit.params_place)
        if not group.trainable:
            return
        master, gradient = group.master_format, group.gradient_dtype.itemsize
        if not group.master_is_weight:
            yield Buffer("master", "master", group.owned_numel * master.dtype.itemsize, unit.states_place)
        if master.rest is not None:
            yield Buffer("rest", "master", group.owned_numel * master.rest.itemsize, unit.states_place)
        residual = self.wire.residual_numel(group.shard_numel) if group.codes_gradients else 0
        if residual:
            yield Buffer("residual", "gradients", residual * torch.float32.itemsize)
        if unit.grad_slot < 0:
            yield Buffer("grad_full", "slots" if policy.share_grad_slots else "gradients", group.gradient_bytes)
        if unit.placement.optimizer:
            yield Buffer("host_grad", "gradients", group.shard_numel * gradient, HOST)
        elif policy.share_grad_slots:
            yield Buffer("grad_shard", "gradients", group.shard_numel * gradient)

    # -- matrices ------------------------------------------------------------------------------------------------

    def _matrices(self, units: Sequence[UnitPlan]) -> MatrixExchange | None:
        """Plan the exchange of the matrices of Muon's groups, in the order of the model."""
        if self.raw.matrix_dtype is None:
            return None
        chosen = {name: param for name, param in self.model.named_parameters() if self._is_matrix(param)}
        divided = {name: self.tensor_shards[id(p)] for name, p in chosen.items() if id(p) in self.tensor_shards}
        whole = {name: divided[name].shape if name in divided else tuple(p.shape) for name, p in chosen.items()}
        trained = [(unit, group) for unit in units for group in unit.trainable]
        away = [index for index, (unit, _) in enumerate(trained) if unit.placement.optimizer and self.device_type != CPU]
        return plan_exchange(
            [group.layout for _, group in trained],
            {name: (shape[0], prod(shape[1:])) for name, shape in whole.items()},
            frozenset(divided),
            self.topology,
            shares=not self.policy.shard_optimizer,
            fp32=self.raw.matrix_dtype == torch.float32,
            on_host=frozenset(away),
        )

    def _is_matrix(self, param: nn.Parameter) -> bool:
        return self._is_trained(param) and bool(self.raw.groups[self.raw.group_of[id(param)]]["use_muon"])

    # -- what units have in common -------------------------------------------------------------------------------

    def _staging(self, units: Sequence[UnitPlan], disk: DiskPlan | None) -> StagingPlan:
        """Plan the staging buffers for the largest flat group that is updated in host memory, if it needs any."""
        on_disk = buffer_bytes(disk.masters, disk.states or 0, disk.format) if disk is not None and disk.masters else 0
        updated = [group for unit in units if unit.placement.optimizer for group in unit.trainable]
        narrower = [group for group in updated if group.dtype.itemsize < group.master_format.dtype.itemsize]
        rounded = [group.shard_numel * group.dtype.itemsize for group in narrower]
        gradients = [group.shard_numel * group.gradient_dtype.itemsize for group in updated]
        apart = self.device_type != CPU
        return StagingPlan(max(gradients, default=0), max(rounded, default=0), on_disk, apart)

    def _disk(self, units: Sequence[UnitPlan]) -> DiskPlan | None:
        """Plan what is kept in files. Raises ConfigError for an optimizer whose states cannot be updated there."""
        settings = self.config.zero_optimization
        states_there, params_there = settings.offload_optimizer.device == "nvme", settings.offload_param.device == "nvme"
        if not (states_there or params_there):
            return None
        there = [unit for unit in units if unit.placement.states_on_disk and states_there and self.raw.groups]
        shards = [group for unit in units if params_there and not unit.resident for group in unit.flat_groups]
        return DiskPlan(
            masters={unit.index: tuple(group.stretches() for group in unit.trainable) for unit in there},
            states=state_count(self.raw) if states_there and self.raw.groups else None,
            param_bytes=sum(aligned_bytes(b.bytes) for g in shards for b in g.buffers if b.tensor in _KEPT),
            format=self.raw.master,
        )


def _slots(count: int, sizes: Sequence[int]) -> SlotPlan:
    return SlotPlan(count, max(sizes, default=0))


def by_layout(layout: Layout, members: Iterable[tuple[str, nn.Parameter]]) -> list[nn.Parameter]:
    """Return the parameters in their order in the flat buffer."""
    by_name = dict(members)
    return [by_name[entry.name] for entry in layout.entries]
