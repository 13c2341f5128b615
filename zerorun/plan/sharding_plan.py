"""The sharding plan: what one rank holds of a model, and where it lies. Frozen data.

A plan is made (make.py) from shapes and the configuration alone, without process groups and devices, for any rank. The
builder executes it; whatever wants to know bytes, owners, slots or collectives reads it.

[Note: slots]
A *slot* is a flat buffer at a fixed address that holds one unit's unsharded parameters, or its full gradients. Units that
share slots take turns: unit i uses slot i modulo the number of slots, always the same one, so that tensors which autograd
saved see the right bytes again after the unit is unsharded for the backward. A unit that shares none has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import PlainSerializer, PlainValidator

from ..distributed.layout import Layout, Piece, aligned_bytes
from ..distributed.replication import ALONE, Replication
from ..distributed.topology import Topology
from ..distributed.transports import reads_peers
from .placement import ON_DEVICE, Placement
from .policy import Policy

DEVICE, HOST, DISK = "device", "host", "disk"


def _dtype(value: Any) -> torch.dtype:
    found = value if isinstance(value, torch.dtype) else getattr(torch, str(value), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{value!r} is no dtype of torch")
    return found


def _topology(value: Any) -> Topology:
    return value if isinstance(value, Topology) else Topology(**value)


def _degrees(topology: Topology) -> dict[str, int]:
    return {name: getattr(topology, name) for name in ("replicate", "shard", "rank", "pipe", "tensor")}


# As they are in JSON: "bfloat16", and the degrees with the rank.
DType = Annotated[torch.dtype, PlainValidator(_dtype), PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."))]
Place = Annotated[Topology, PlainValidator(_topology), PlainSerializer(_degrees)]


@dataclass(frozen=True)
class Buffer:
    """Memory that a flat group allocates for its tensor ``tensor``, or a part of it. ``kind``: as the ledger calls it.

    A tensor that is a view of another, or lies in a slot that units share, has none.
    """

    tensor: str
    kind: str
    bytes: int
    place: str = DEVICE


@dataclass(frozen=True)
class ParameterRun:
    """Elements ``start .. start + numel`` of parameter ``entry`` (index in its flat group), at ``offset`` in the piece."""

    entry: int
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class PiecePlan:
    """One tensor that the optimizer updates: elements from ``low`` of a flat group's owned range, in ``shape``.

    ``group``: the optimizer's parameter group.
    """

    group: int
    low: int
    shape: tuple[int, ...]
    runs: tuple[ParameterRun, ...]


@dataclass(frozen=True)
class FlatGroupPlan:
    """Parameters of a unit that lie end to end in one flat buffer. They have one dtype, and are trained all or none.

    ``dtype``: in which they are kept; ``given_dtype``: in which the module has them. ``packed``: memory that classes of
    other packages read in their own way (weights.py). ``optimizer_groups``: by parameter, the optimizer's parameter group;
    empty if frozen. ``owned``: the elements whose master this rank has; ``master_is_weight``: that is the weight itself.
    ``resident``: the flat buffer is its unit's own and whole all the time, and the shard a part of it. ``mapped``: the flat
    buffer is made of the memory of all ranks, and gathers move nothing. ``unpacked``: gradients are reduced from where
    autograd leaves them. ``buffers``: the memory that this rank allocates.
    """

    layout: Layout
    shard_rank: int
    dtype: DType
    given_dtype: DType
    packed: bool = False
    replication: Replication = ALONE
    optimizer_groups: tuple[int, ...] = ()
    owned: tuple[int, int] = (0, 0)
    master_is_weight: bool = False
    resident: bool = True
    mapped: bool = False
    unpacked: bool = False
    buffers: tuple[Buffer, ...] = ()

    @property
    def trainable(self) -> bool:
        return bool(self.optimizer_groups)

    @property
    def low(self) -> int:
        """First element of this rank's shard."""
        return self.layout.bounds[self.shard_rank]

    @property
    def high(self) -> int:
        return self.layout.bounds[self.shard_rank + 1]

    @property
    def shard_numel(self) -> int:
        return self.high - self.low

    @property
    def owned_numel(self) -> int:
        return self.owned[1] - self.owned[0]

    @property
    def owns_everything(self) -> bool:
        """True at stage 0: every rank updates all elements."""
        return self.trainable and self.owned_numel == self.layout.numel

    @property
    def numel_of_parameters(self) -> int:
        """Elements without padding."""
        return self.layout.numel - self.layout.padding

    @property
    def shard_pieces(self) -> list[Piece]:
        """What this rank's shard has of the parameters."""
        return self.layout.pieces(self.shard_rank)

    def own_bytes(self, tensor: str) -> int:
        """That this rank allocates for ``tensor``."""
        return sum(buffer.bytes for buffer in self.buffers if buffer.tensor == tensor)

    def owned_runs(self) -> list[ParameterRun]:
        """What this rank updates, with ``offset`` counted from the beginning of its owned range."""
        if self.owns_everything:
            return [ParameterRun(index, 0, entry.offset, entry.numel) for index, entry in enumerate(self.layout.entries)]
        return [ParameterRun(p.entry, p.start, p.shard_start, p.numel) for p in self.shard_pieces]

    def pieces(self, *, whole: bool) -> Iterator[PiecePlan]:
        """The tensors that the optimizer gets; with ``whole`` one for each parameter, in its own shape.

        See [Note: pieces] of zero/pieces.py. ``whole`` layouts have no parameter in two shards.
        """
        members: list[list[ParameterRun]] = []
        group = -1
        for run in self.owned_runs():
            if whole or not members or group != self.optimizer_groups[run.entry]:
                members.append([])
                group = self.optimizer_groups[run.entry]
            members[-1].append(run)
        for runs in members:
            low, last = runs[0].offset, runs[-1]
            flat = (last.offset + last.numel - low,)
            shape = self.layout.entries[last.entry].shape if whole else flat
            inside = tuple(ParameterRun(run.entry, run.start, run.offset - low, run.numel) for run in runs)
            yield PiecePlan(self.optimizer_groups[last.entry], low, shape, inside)


@dataclass(frozen=True)
class UnitPlan:
    """A part of the model whose parameters are unsharded, resharded and reduced together.

    ``modules``: names of those that enter and leave it. ``param_slot``, ``grad_slot``: index of the shared slot, -1 for one
    of its own. ``deferred``: its gradients may come after its turn, so they are reduced when the backward is over.
    ``keeps_others``: mapped pages of other ranks' parameters stay between its turns.
    """

    index: int
    name: str
    modules: tuple[str, ...]
    flat_groups: tuple[FlatGroupPlan, ...]
    param_slot: int = -1
    grad_slot: int = -1
    deferred: bool = True
    keeps_others: bool = True
    placement: Placement = ON_DEVICE

    @property
    def resident(self) -> bool:
        """True if its parameters are whole all the time: it has a slot of its own for them."""
        return self.param_slot < 0

    @property
    def trainable(self) -> tuple[FlatGroupPlan, ...]:
        """Its flat groups that are trained."""
        return tuple(group for group in self.flat_groups if group.trainable)

    @property
    def gradients_stay(self) -> bool:
        """True if its gradients are reduced from where autograd leaves them, so that it needs no gradient slot."""
        return all(group.unpacked for group in self.trainable) and not self.placement.optimizer

    @property
    def states_place(self) -> str:
        """Where master and moments lie."""
        return DISK if self.placement.states_on_disk else HOST if self.placement.optimizer else DEVICE

    @property
    def params_place(self) -> str:
        """Where the shards lie, if the unit shares slots."""
        return DISK if self.placement.params_on_disk else HOST if self.placement.params else DEVICE

    @property
    def param_slot_bytes(self) -> int:
        """That its parameters take in a shared slot."""
        needing = (group for group in self.flat_groups if not group.mapped)
        return sum(aligned_bytes(group.layout.numel * group.dtype.itemsize) for group in needing)

    @property
    def grad_slot_bytes(self) -> int:
        """That its gradients take in a shared slot."""
        return sum(aligned_bytes(group.layout.numel * torch.float32.itemsize) for group in self.trainable)


@dataclass(frozen=True)
class SlotPlan:
    """``count`` slots of ``nbytes`` bytes that units share."""

    count: int
    nbytes: int

    @property
    def bytes(self) -> int:
        return self.count * self.nbytes


@dataclass(frozen=True)
class StagingPlan:
    """Bytes of buffers between places: two for gradients, two for rounded weights, and those a disk is updated in.

    ``apart``: the device has memory of its own; else nothing goes through buffers on its way to the host.
    """

    gradients: int = 0
    rounded: int = 0
    disk: int = 0
    apart: bool = False

    @property
    def bytes(self) -> int:
        return 2 * (self.gradients + self.rounded) * self.apart + self.disk


NO_STAGING = StagingPlan()


@dataclass(frozen=True)
class DiskPlan:
    """What this rank keeps in files. ``masters``: unit -> elements of each of its masters, which have ``states`` states.

    ``states``: None if masters and states are not to lie in files.
    """

    masters: dict[int, tuple[int, ...]]
    states: int | None
    param_bytes: int


@dataclass(frozen=True)
class ShardingPlan:
    """Everything that rank ``topology.rank`` holds. ``topology`` has no process groups.

    ``transport``: of parameters and gradients, NCCL, GLOO or PEER_MEMORY. ``device_type``: "cpu" or "cuda".
    ``compute_dtype``: of parameters and activations; None: as the module has them. ``wire_dtype``: in which gradients are
    sent. ``overlap``: whether collectives go on behind the computation. ``whole``: no parameter is cut.
    ``micro_batches``: of a step. ``kept_apart``, ``buffers``: bytes of parameters that no unit has, and of the module's
    buffers. ``states``: bytes of optimizer states, by trained flat group; None if they are not known.
    """

    topology: Place
    policy: Policy
    transport: str
    device_type: str
    compute_dtype: DType | None
    wire_dtype: DType
    overlap: bool
    whole: bool
    micro_batches: int
    units: tuple[UnitPlan, ...]
    param_slots: SlotPlan
    grad_slots: SlotPlan
    staging: StagingPlan = NO_STAGING
    disk: DiskPlan | None = None
    kept_apart: int = 0
    buffers: int = 0
    states: tuple[int, ...] | None = None

    @cached_property
    def flat_groups(self) -> tuple[FlatGroupPlan, ...]:
        return tuple(group for unit in self.units for group in unit.flat_groups)

    @cached_property
    def trainable(self) -> tuple[FlatGroupPlan, ...]:
        return tuple(group for group in self.flat_groups if group.trainable)

    @cached_property  # hooks ask for it
    def shares_params(self) -> bool:
        """True if some units share slots for parameters, so that these are whole only while they are used."""
        return any(not unit.resident for unit in self.units)

    @cached_property
    def shares_grads(self) -> bool:
        """True if some units share slots for gradients, so that every backward reduces."""
        return any(unit.grad_slot >= 0 for unit in self.units)

    @property
    def reads_peers(self) -> bool:
        """True if the ranks that shard copy from one another's memory by themselves."""
        return reads_peers(self.transport, self.topology)
