"""The byte ledger of a plan: what a rank holds after a step, by kind.

Kinds in host memory are named "host ...", and those in files "disk ..."; they come up only where there is any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from .optimizer_states import OptimizerStates
from .receive_buffers import receive_buffer_bytes
from .sharding_plan import DEVICE, FlatGroupPlan, ShardingPlan

# The kinds of memory on the device.
DEVICE_KINDS = ("parameters", "gradients", "master", "moments", "slots", "buffers")


def kind_in(place: str, kind: str) -> str:
    """``kind`` as the ledger calls it where it lies in ``place``."""
    return kind if place == DEVICE else f"{place} {kind}"


def planned_bytes(plan: ShardingPlan) -> dict[str, int]:
    """Bytes by kind, as ``engine.memory_report()`` counts them after a step.

    ``slots``: everything a stage would not need by its formula (shared slots, receive buffers, and what a unit with a slot
    of its own holds beyond its shard). Padding of flat buffers is inside the kinds. Without the states of the optimizer if
    the plan does not know them.
    """
    ledger: defaultdict[str, int] = defaultdict(int)
    ledger |= dict.fromkeys(DEVICE_KINDS, 0)
    states = iter(plan.states or ())
    for unit in plan.units:
        for group in unit.flat_groups:
            for buffer in group.buffers:
                ledger[kind_in(buffer.place, buffer.kind)] += buffer.bytes
            size = next(states) if group.trainable and plan.states is not None else 0
            if size:  # some optimizers keep nothing
                ledger[kind_in(unit.states_place, "moments")] += size
    ledger["parameters"] += plan.kept_apart
    ledger["slots"] += plan.param_slots.bytes + plan.grad_slots.bytes + receive_buffer_bytes(plan)
    ledger["buffers"] = plan.buffers
    if plan.staging.bytes:
        ledger["host staging"] = plan.staging.bytes
    return dict(ledger)


def total_of(ledger: Mapping[str, int], place: str) -> int:
    """Bytes of the kinds in ``place``: "device", "host" or "disk"."""
    found = dict.fromkeys(("device", "host", "disk"), 0)
    for kind, size in ledger.items():
        found["device" if kind in DEVICE_KINDS else kind.split()[0]] += size
    return found[place]


def with_states(plan: ShardingPlan, states: OptimizerStates) -> ShardingPlan:
    """``plan``, with the bytes of what the optimizer will keep."""
    return replace(plan, states=tuple(_states_of(group, states, plan.whole) for group in plan.trainable))


def _states_of(group: FlatGroupPlan, states: OptimizerStates, whole: bool) -> int:
    return sum(states.bytes(piece.group, piece.shape) for piece in group.pieces(whole=whole))
