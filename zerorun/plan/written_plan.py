"""A plan in written form: a table for people, and JSON for other programs."""

from __future__ import annotations

from collections import Counter

from pydantic import TypeAdapter

from ..distributed.replication import Family
from ..distributed.topology import Topology
from ..log import in_bytes
from .byte_ledger import planned_bytes
from .sharding_plan import FlatGroupPlan, ShardingPlan, UnitPlan
from .step_collectives import Collective, step_collectives

_ADAPTER = TypeAdapter(ShardingPlan)


def to_json(plan: ShardingPlan, *, indent: int | None = None) -> str:
    """Return everything in ``plan`` as JSON, from which ``from_json`` makes an equal plan."""
    return _ADAPTER.dump_json(plan, indent=indent).decode()


def from_json(text: str | bytes) -> ShardingPlan:
    """Read a plan written by ``to_json``. Raises pydantic's ValidationError for text that is not a plan."""
    return _ADAPTER.validate_json(text)


def as_table(plan: ShardingPlan) -> str:
    """Return a table of the units with their flat groups, the bytes by kind, and the collectives of a step."""
    topology = plan.topology
    lines = [
        f"rank {topology.rank} of {topology.world_size}: {topology.pipe} pipeline stages x {topology.replicate} replicas x "
        f"{topology.shard} shards x {topology.tensor} tensor ranks{_views(topology)}; stage {plan.policy.stage}, "
        f"{plan.transport}, {plan.device_type}",
        f"parameter slots {_slots(plan.param_slots.count, plan.param_slots.nbytes)}, "
        f"gradient slots {_slots(plan.grad_slots.count, plan.grad_slots.nbytes)}",
        "",
        f"{'unit':<32}{'slots':>9}{'parameters':>14}{'shard':>14}  dtype, kind and place",
    ]
    for unit in plan.units:
        for group in unit.flat_groups:
            numels = f"{group.numel_of_parameters:>14,}{group.shard_numel:>14,}"
            lines.append(f"{unit.name[:31]:<32}{_slot_of(unit):>9}{numels}  {_described(unit, group)}")
    lines += ["", "bytes of this rank by kind:"]
    lines += [f"  {kind:<20}{in_bytes(size):>12}" for kind, size in planned_bytes(plan).items() if size]
    lines += ["", f"collectives of a step of {plan.micro_batches} micro-batches, in order of their first:"]
    return "\n".join(lines + _collectives(step_collectives(plan)))


def _views(topology: Topology) -> str:
    degrees = {"in a sequence": topology.context, "with different experts": topology.expert}
    return "".join(f", {degree} {what}" for what, degree in degrees.items() if degree > 1)


def _slots(count: int, nbytes: int) -> str:
    return f"{count} of {in_bytes(nbytes)}" if nbytes else "none shared"


def _slot_of(unit: UnitPlan) -> str:
    """Return "parameter slot/gradient slot"; "own" is a slot that is not shared."""
    return "/".join("own" if slot < 0 else str(slot) for slot in (unit.param_slot, unit.grad_slot))


def _described(unit: UnitPlan, group: FlatGroupPlan) -> str:
    words = [str(group.dtype).removeprefix("torch."), "trained" if group.trainable else "frozen"]
    words += ["experts of this rank"] * (group.family is Family.EXPERT)
    words += ["packed"] * group.packed + ["mapped"] * group.mapped
    words += [f"second copy by {group.secondary.size}"] if group.secondary is not None else []
    words += ["gathered in fp8"] * (group.float8 is not None)
    if not unit.resident and unit.params_place != "device":
        words.append(f"shard in {unit.params_place}")
    if group.trainable and unit.states_place != "device":
        words.append(f"states in {unit.states_place}")
    return ", ".join(words)


def _collectives(calls: list[Collective]) -> list[str]:
    count, size = Counter(call.label for call in calls), Counter[str]()
    for call in calls:
        size[call.label] += call.bytes
    lines = [f"  {label:<56}{count[label]:>6} calls{in_bytes(size[label]):>12}" for label in count]
    return [*lines, f"  {'together':<56}{len(calls):>6} calls{in_bytes(sum(size.values())):>12}"]
