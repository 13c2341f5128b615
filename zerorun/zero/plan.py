"""Plan: what the configuration means for ranks, units, slots and placements. Pure data.

initialize() builds units from a plan, and estimate_memory() makes the same units on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from ..config.parse import Config
from ..distributed.topology import Topology
from ..distributed.transport.communicator import Communicator
from ..errors import TopologyError
from ..optim.loss_scaler import DTYPES
from ..optim.requested import RawOptimizer
from .offload.placement import Placement, place_units
from .policy import STAGES, Policy
from .unit_builder import UnitBuilder, UnitPolicy, UnitSpec, choose_units

PLANNED = torch.device("meta")  # where units are made that are only to be counted


@dataclass(frozen=True)
class TransportTraits:
    """How the ranks exchange bytes, as far as memory depends on it.

    ``reads_peers``: they copy from one another's memory. ``reads_parts``: they sum gradients where autograd leaves them.
    ``apart``: their devices have memory of their own.
    """

    reads_peers: bool
    reads_parts: bool
    apart: bool


@dataclass
class ShardingPlan:
    """``builder.build(specs)`` makes the units. ``overlap``: whether collectives go on behind the computation."""

    builder: UnitBuilder
    specs: list[UnitSpec]
    overlap: bool


def make_plan(
    model: nn.Module,
    config: Config,
    raw: RawOptimizer,
    topology: Topology,
    exchange: TransportTraits,
    *,
    device: torch.device = PLANNED,
    comm: Communicator | None = None,
) -> ShardingPlan:
    """The plan for ``model``, which is not touched. Without ``comm`` its units are only for counting."""
    settings = config.zero_optimization
    specs = choose_units(model, _unit_policy(config))
    overlap = _overlap(config, exchange.reads_peers)
    builder = UnitBuilder(
        policy=_policy(config, topology),
        topology=topology,
        device=device,
        compute_dtype=compute_dtype(config),
        slot_count=_slot_count(config, overlap, [sum(p.numel() for _, p in spec.params) for spec in specs[1:]]),
        optimized=raw.group_of,
        whole=raw.whole,
        placements=_placements(config, specs, raw),
        pinned=settings.offload_optimizer.pin_memory and settings.offload_param.pin_memory,
        apart=exchange.apart,
        reads_parts=exchange.reads_parts,
        maps_shards=exchange.reads_peers and not exchange.apart,
        comm=comm,
    )
    return ShardingPlan(builder, specs, overlap)


def wire_dtype(config: Config) -> torch.dtype:
    """The dtype in which gradients are sent."""
    return DTYPES[config.communication_data_type or "fp32"]


def planned_topology(config: Config, world_size: int, ranks_per_node: int, rank: int = 0) -> Topology:
    """What ``config`` asks for, without process groups. Raises TopologyError if the degrees do not divide."""
    pipe, tensor = config.pipeline.stages, config.tensor_parallel.size
    degree = _shard_degree(config, world_size // (pipe * tensor), max(ranks_per_node // tensor, 1))
    return Topology.plan(world_size, rank, shard_degree=degree, pipe=pipe, tensor=tensor, ranks_per_host=ranks_per_node)


def _shard_degree(config: Config, world_size: int, ranks_per_node: int) -> int | None:
    """Ranks that a unit is divided over; None: all. Raises TopologyError if nodes cannot hold whole groups of ranks."""
    settings = config.zero_optimization
    if settings.stage == 0:
        return None
    if settings.shard_degree is None and settings.hybrid_shard:
        if world_size % ranks_per_node:
            raise TopologyError(f"{world_size} ranks are not a multiple of {ranks_per_node} ranks on this node.")
        return ranks_per_node
    return settings.shard_degree


def _policy(config: Config, topology: Topology) -> Policy:
    """The row of the stage. A group of one shares slots only where that moves something to the host."""
    settings = config.zero_optimization
    if topology.shard > 1:
        return STAGES[settings.stage]
    row = STAGES[min(settings.stage, 1)]
    return replace(
        row,
        share_grad_slots=settings.stage >= 2 and not settings.offload_optimizer.is_off(),
        share_param_slots=settings.stage == 3 and not settings.offload_param.is_off(),
    )


def _placements(config: Config, specs: list[UnitSpec], raw: RawOptimizer) -> list[Placement]:
    settings = config.zero_optimization
    numels = [sum(p.numel() for _, p in spec.params if p.requires_grad and id(p) in raw.group_of) for spec in specs]
    return place_units(
        numels,
        optimizer=not settings.offload_optimizer.is_off(),
        ratio=settings.offload_optimizer.ratio,
        params=not settings.offload_param.is_off(),
        states_on_disk=settings.offload_optimizer.device == "nvme",
        params_on_disk=settings.offload_param.device == "nvme",
    )


def compute_dtype(config: Config) -> torch.dtype | None:
    """The dtype of parameters and activations; None: as the module has them."""
    if config.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else None


def _unit_policy(config: Config) -> UnitPolicy:
    settings = config.zero_optimization
    if isinstance(settings.unit_policy, str):
        return UnitPolicy(settings.unit_policy, settings.unit_block_count, settings.unit_numel)
    return UnitPolicy("classes", classes=tuple(settings.unit_policy))


def _overlap(config: Config, reads_peers: bool) -> bool:
    """Whether units are gathered before they are needed, and reduced while the backward goes on.

    Stage 3 is chosen to save memory. Where ranks copy from one another's memory by themselves, nothing goes on behind the
    computation: being early would only hide the wait for a slower rank, at the price of a slot and a unit's gradients.
    """
    settings = config.zero_optimization
    return settings.overlap_comm if settings.overlap_comm is not None else settings.stage < 3 or not reads_peers


def _slot_count(config: Config, overlap: bool, numels: list[int]) -> int:
    """One for the unit in use, and one for the next to ``overlap``, unless the configuration asks for other look-ahead."""
    settings, sources = config.zero_optimization, config.sources
    largest = max(numels, default=0)
    ahead = int(overlap)
    if settings.overlap_comm is not False and largest:
        if sources.get("zero_optimization.stage3_prefetch_bucket_size", "default") != "default":
            ahead = -(-settings.prefetch_bucket_size // largest)
        if sources.get("zero_optimization.stage3_max_live_parameters", "default") != "default":
            ahead = min(ahead, max(settings.max_live_parameters // largest - 1, 0))
    return min(1 + ahead, max(len(numels), 1))
