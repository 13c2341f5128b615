"""The byte ledger of a plan: what a rank holds after a step, by kind.

Kinds in host memory are named "host ...", and those in files "disk ...". They appear only if they are not empty.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..ops.state_format import StateFormat
from .optimizer_states import OptimizerStates
from .receive_buffers import receive_buffer_bytes
from .sharding_plan import DEVICE, FlatGroupPlan, ShardingPlan

MASTER_BYTES = 4  # of an element, in files
# The kinds of memory on the device.
DEVICE_KINDS = ("parameters", "gradients", "master", "moments", "slots", "buffers")


def kind_in(place: str, kind: str) -> str:
    """Return the ledger's name for ``kind`` in ``place``."""
    return kind if place == DEVICE else f"{place} {kind}"


def planned_bytes(plan: ShardingPlan) -> dict[str, int]:
    """Return the bytes by kind, as ``engine.memory_report()`` counts them after a step.

    ``slots``: everything that the formula of the stage does not include (shared slots, receive buffers, those for matrices
    on their way, and what a unit with a slot of its own holds beyond its shard). Each kind includes the padding of flat
    buffers. The optimizer's states are missing if the plan does not know them.
    """
    ledger: defaultdict[str, int] = defaultdict(int)
    ledger |= dict.fromkeys(DEVICE_KINDS, 0)
    states = iter(plan.states or ())
    for unit in plan.units:
        for group in unit.flat_groups:
            for buffer in group.buffers:
                ledger[kind_in(buffer.place, buffer.kind)] += buffer.bytes
            size = next(states) if group.trainable and plan.states is not None else 0
            if size:  # some optimizers keep no states
                ledger[kind_in(unit.states_place, "moments")] += size
    ledger["parameters"] += plan.kept_apart
    ledger["slots"] += plan.param_slots.bytes + plan.grad_slots.bytes + receive_buffer_bytes(plan)
    ledger["slots"] += plan.matrices.bytes if plan.matrices is not None else 0
    ledger["buffers"] = plan.buffers
    staging = plan.staging.bytes + (plan.matrices.host_bytes if plan.matrices is not None else 0)
    if staging:
        ledger["host staging"] = staging
    return dict(ledger)


def copied_bytes(plan: ShardingPlan) -> int:
    """Return the bytes of this rank's share of what is trained: states, and masters or weights."""
    total, states = 0.0, plan.states or (0,) * len(plan.trainable)
    for group, size in zip(plan.trainable, states, strict=True):
        rounded = not group.master_is_weight and group.dtype.itemsize < MASTER_BYTES  # weights are made from masters
        each = (0 if rounded else group.dtype.itemsize) + (0 if group.master_is_weight else MASTER_BYTES)
        share = group.shard_numel / group.copies
        total += share * each + size * share / max(group.owned_numel, 1)
    return round(total)


def total_of(ledger: Mapping[str, int], place: str) -> int:
    """Return the bytes of all kinds in ``place``: "device", "host" or "disk"."""
    found = dict.fromkeys(("device", "host", "disk"), 0)
    for kind, size in ledger.items():
        found["device" if kind in DEVICE_KINDS else kind.split()[0]] += size
    return found[place]


def with_states(plan: ShardingPlan, states: OptimizerStates) -> ShardingPlan:
    """Return ``plan`` with the bytes of the states that the optimizer will keep."""
    return replace(plan, states=tuple(_states_of(plan, group, states) for group in plan.trainable))


def heaviest_rank(plan: ShardingPlan, states: OptimizerStates) -> int:
    """Return the shard rank that holds the most. Ranks with other experts have as many of them.

    Shards are equal but for rounding unless parameters are whole. Of equal ones it is that of the most states: an optimizer
    that is told of parts keeps more for some than for others, so does Muon, for what AdamW updates, and formats differ.
    """
    uneven, ranks = [group for group in plan.flat_groups if not group.layout.even], range(plan.topology.shard)
    totals = [sum(_at(plan, group, rank).shard_numel for group in uneven) for rank in ranks]
    formats = {format for group in plan.trainable for format in group.state_formats}
    if plan.by_parts and plan.policy.shard_optimizer:
        totals = [0 for _ in ranks]
        for group in plan.trainable:
            for rank, size in _states_of_parts(plan, group, states):
                totals[rank] += size
    elif plan.policy.shard_optimizer and (plan.matrices is not None or not formats <= {StateFormat.FP32}):
        totals = [sum(_states_of(plan, _at(plan, group, rank), states) for group in plan.trainable) for rank in ranks]
    return totals.index(max(totals))


def _states_of_parts(plan: ShardingPlan, group: FlatGroupPlan, states: OptimizerStates) -> Iterator[tuple[int, int]]:
    """Yield (rank of the shard axis, bytes of its states) for each part of each parameter of ``group``."""
    for number, entry in enumerate(group.layout.entries):
        bounds = group.layout.bounds
        for rank in range(bisect_right(bounds, entry.offset) - 1, bisect_left(bounds, entry.end)) if entry.numel else ():
            yield rank, states.bytes_of_part(plan.part(_at(plan, group, rank), number))


def _at(plan: ShardingPlan, group: FlatGroupPlan, rank: int) -> FlatGroupPlan:
    """Return ``group`` with what rank ``rank`` of the shard axis updates. Neighbours may have the same part of experts."""
    bounds, place = group.layout.bounds, rank * group.layout.degree // plan.topology.shard
    return replace(group, shard_rank=place, owned=(bounds[place], bounds[place + 1]))


def _states_of(plan: ShardingPlan, group: FlatGroupPlan, states: OptimizerStates) -> int:
    if plan.by_parts:
        return sum(states.bytes_of_part(plan.part(group, run.entry)) for run in group.owned_runs())
    return sum(states.bytes(piece.group, piece.shape, piece.format) for piece in group.pieces(whole=plan.whole))
