"""The memory peaks of a rank, from its plan: while units are built, and in a backward.

[Note: where memory is]
``device`` is the rank's accelerator and ``host`` the memory of its node. A rank on a CPU has only host memory: there, the
two are one, and its peak is that of their sum, ``both``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from ..plan.parameter_kinds import named_members
from ..plan.reductions import MAX_REDUCING
from ..plan.sharding_plan import DEVICE, DISK, Buffer, FlatGroupPlan, ShardingPlan


@dataclass(frozen=True)
class Bytes:
    """Bytes on the device and in host memory."""

    device: int = 0
    host: int = 0

    @property
    def both(self) -> int:
        return self.device + self.host

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.device - other.device, self.host - other.host)


@dataclass(frozen=True)
class Peak:
    """The highest value of each, which may be reached at different times."""

    device: int
    host: int
    both: int


@dataclass(frozen=True)
class Holding:
    """The bytes of a parameter before units are built. ``put_together``: its full size if only a part is held, else 0."""

    now: Bytes
    put_together: int = 0


Held = Callable[[nn.Parameter], Holding]


def start_up(plan: ShardingPlan, model: nn.Module, held: Held) -> Peak:
    """Return the peak while the builder (zero/builder.py) works. ``held``: what each parameter occupies at the start."""
    params = dict(named_members(model))
    live = sum((held(param).now for param in params.values()), Bytes(plan.param_slots.bytes + plan.grad_slots.bytes))
    steps = [live]
    for unit in plan.units:
        for group in unit.flat_groups:
            values = Bytes(group.layout.numel * group.given_dtype.itemsize)
            for holding in (
                held(params[entry.name]) for entry in group.layout.entries
            ):  # each parameter is freed as soon as it is copied
                steps.append(live + values + Bytes(holding.put_together))
                live -= holding.now
            live += _allocated(buffer for buffer in group.buffers if not _of_gradients(buffer))
            steps.append(live if group.keeps_given else live + values)
            live += _allocated(filter(_of_gradients, group.buffers))
            steps.append(live)
    return Peak(*(max(getattr(step, place) for step in steps) for place in ("device", "host", "both")))


def gradients_in_backward(plan: ShardingPlan) -> int:
    """Return the most bytes of gradients that autograd has made and no slot has taken over yet.

    They are those of the units that are reduced when the backward is over, and those of the largest other unit. Unpacked
    gradients stay until their reduction is over.
    """
    late, largest = 0, 0
    for unit in plan.units:
        made = sum(group.numel_of_parameters * group.dtype.itemsize for group in unit.trainable)
        if unit.deferred:
            late += made
            continue
        kept = 0
        if any(group.unpacked for group in unit.trainable):
            slots = plan.grad_slots.count if unit.placement.optimizer else 0
            kept = min(slots or MAX_REDUCING, MAX_REDUCING) if plan.overlap else 0
        largest = max(largest, made * (1 + kept))
    return late + largest


def never_written(plan: ShardingPlan) -> int:
    """Return the bytes of gradient slots that are not written while ranks sum gradients where autograd leaves them."""
    own = sum(_beyond_shard(group) for group in plan.trainable if group.unpacked)
    return own + (plan.grad_slots.bytes if any(group.unpacked for group in plan.trainable) else 0)


def _beyond_shard(group: FlatGroupPlan) -> int:
    """Return the bytes beyond this rank's shard in the group's own gradient slot; 0 if it has none."""
    slot = group.own_bytes("grad_full")
    return slot - slot * group.shard_numel // group.layout.numel if slot else 0


def _of_gradients(buffer: Buffer) -> bool:
    return buffer.tensor in ("grad_full", "grad_shard", "host_grad")


def _allocated(buffers: Iterable[Buffer]) -> Bytes:
    """Sum the bytes of ``buffers`` by place. Buffers in files take no memory."""
    total = Bytes()
    for buffer in buffers:
        if buffer.place != DISK:
            total += Bytes(buffer.bytes) if buffer.place == DEVICE else Bytes(host=buffer.bytes)
    return total
