"""The sharding plan: what one rank holds of a model, and where it is kept. Frozen data.

A plan is made (make_plan.py) from shapes and the configuration alone, without process groups and devices, for any rank. The
builder executes it. Code that needs bytes, owners, slots or collectives reads them from the plan.

[Note: slots]
A *slot* is a flat buffer at a fixed address that holds one unit's unsharded parameters, or its full gradients. Units that
share slots take turns: unit i always uses slot i modulo the number of slots, so that tensors which autograd saved see the
right bytes again after the unit is unsharded for the backward. A unit that shares no slot has its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import PlainSerializer, PlainValidator

from ..distributed.float8_codes import Float8Cast
from ..distributed.layout import Layout, Piece, aligned_bytes
from ..distributed.quantised_blocks import coded_bytes
from ..distributed.quantised_hops import QuantisedHop
from ..distributed.replication import ALONE, Family, Replication
from ..distributed.secondary_partition import Secondary
from ..distributed.tensor_shard import TensorShard
from ..distributed.topology import Topology
from ..distributed.transport_kinds import reads_peers
from ..ops.rounding import MasterFormat
from ..ops.state_format import StateFormat
from ..optim.parameter_parts import Part, SumOfParts
from .matrix_exchange import MatrixExchange
from .placement import ON_DEVICE, Placement
from .stage_policy import Policy

DEVICE, HOST, DISK = "device", "host", "disk"


Stretch = tuple[int, StateFormat]  # a number of elements, and the format of their optimizer states


def _dtype(value: Any) -> torch.dtype:
    found = value if isinstance(value, torch.dtype) else getattr(torch, str(value), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{value!r} is no dtype of torch")
    return found


def _topology(value: Any) -> Topology:
    return value if isinstance(value, Topology) else Topology(**value)


def _degrees(topology: Topology) -> dict[str, int]:
    return {name: getattr(topology, name) for name in ("replicate", "shard", "rank", "pipe", "tensor", "context", "expert")}


# In JSON, a dtype is written as "bfloat16", and a topology as its degrees and the rank.
DType = Annotated[torch.dtype, PlainValidator(_dtype), PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."))]
Place = Annotated[Topology, PlainValidator(_topology), PlainSerializer(_degrees)]


@dataclass(frozen=True)
class Buffer:
    """Memory that a flat group allocates for its tensor ``tensor``, or for a part of it. ``kind``: its kind in the ledger.

    A tensor that is a view of another one, or that is in a slot shared by units, has no buffer.
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

    ``group``: the optimizer's parameter group. ``format``: that of all its states.
    """

    group: int
    low: int
    shape: tuple[int, ...]
    runs: tuple[ParameterRun, ...]
    format: StateFormat = StateFormat.FP32


@dataclass(frozen=True)
class FlatGroupPlan:
    """Parameters of a unit that lie end to end in one flat buffer. They have one dtype, and either all or none are trained.

    ``copies``: how many ranks have the same shard, and ``copy``: which of them this one is, along the axes of ``family``.
    ``dtype``: the dtype in which they are kept; ``given_dtype``: the one that the module has. ``packed``: memory that
    classes of other packages read in their own way (parameter_kinds.py). ``optimizer_groups``: for each parameter, the
    optimizer's parameter group; empty if frozen; ``state_formats``: the format of its states there. ``owned``: the range of
    elements whose master this rank has; ``divides_updates``: others of the shard axis have others. ``master_is_weight``:
    the master is the weight itself. ``resident``: the flat buffer belongs to this unit alone and is always whole, and the
    shard is a part of it; so it is where no other rank of the shard group has these experts, though the unit shares slots.
    ``mapped``: the flat buffer is made of the memory of all ranks, so that gathers move nothing. ``unpacked``: gradients
    are reduced from where autograd leaves them. ``coded``: gathers of the shards send codes (quantised_blocks.py), or with
    ``float8`` those of float8_codes.py; ``codes_gradients``: reductions send codes. ``secondary``: gathers are from a
    second copy of the weights. ``master_format``: what is kept of the values that are updated; ``gradient_dtype``: that of
    all buffers of gradients. ``buffers``: the memory that this rank allocates. ``tensor_shards``: for each parameter, what
    of it tensor ranks have here, for an optimizer that is told of parts.
    """

    layout: Layout
    shard_rank: int
    dtype: DType
    given_dtype: DType
    copies: int = 1
    copy: int = 0
    packed: bool = False
    replication: Replication = ALONE
    optimizer_groups: tuple[int, ...] = ()
    state_formats: tuple[StateFormat, ...] = ()
    owned: tuple[int, int] = (0, 0)
    divides_updates: bool = False
    master_is_weight: bool = False
    resident: bool = True
    mapped: bool = False
    unpacked: bool = False
    coded: bool = False
    float8: Float8Cast | None = None
    codes_gradients: bool = False
    secondary: Secondary | None = None
    master_format: MasterFormat = MasterFormat.FP32
    gradient_dtype: DType = torch.float32
    buffers: tuple[Buffer, ...] = ()
    tensor_shards: tuple[TensorShard | None, ...] = ()

    @property
    def trainable(self) -> bool:
        return bool(self.optimizer_groups)

    @cached_property  # cached, as the next one, because steps read it
    def family(self) -> Family:
        """Which channels its shards and gradients go through."""
        return self.replication.family

    @cached_property
    def counted(self) -> bool:
        """True if this rank's shard counts in the norm: each element counts once in the world."""
        return self.replication.counted and self.copy == 0

    @property
    def low(self) -> int:
        """The first element of this rank's shard."""
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
    def keeps_given(self) -> bool:
        """True if the weights stay where they are put together in the dtype that the module has, and are not a copy."""
        return self.resident and self.given_dtype == self.dtype

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients of all parameters."""
        return self.layout.numel * self.gradient_dtype.itemsize

    @property
    def owns_everything(self) -> bool:
        """True if every rank updates all elements, as at stage 0. Not where one has all by chance, and others nothing."""
        return self.trainable and self.owned_numel == self.layout.numel and not self.divides_updates

    def code_bytes(self, numel: int) -> int:
        """Return the bytes of the codes of ``numel`` elements in a gather."""
        return numel if self.float8 is not None else coded_bytes(numel)

    @property
    def gathered_bytes(self) -> int:
        """The bytes that stand for this rank's shard in a gather."""
        return self.code_bytes(self.shard_numel) if self.coded else self.shard_numel * self.dtype.itemsize

    @property
    def second_numel(self) -> int:
        """The number of elements of which this rank has the second copy."""
        kept = range(0) if self.secondary is None else self.secondary.kept(self.shard_rank)
        return self.layout.bounds[kept.stop] - self.layout.bounds[kept.start]

    @property
    def second_bytes(self) -> int:
        """The bytes of this rank's part of the second copy."""
        return self.code_bytes(self.second_numel) if self.coded else self.second_numel * self.dtype.itemsize

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """The bytes of what a shared slot has of it: the parameters, and the codes that they are made of."""
        if self.mapped or self.resident:
            return ()
        whole = self.layout.numel * self.dtype.itemsize
        return (whole, self.code_bytes(self.layout.numel)) if self.coded else (whole,)

    @property
    def numel_of_parameters(self) -> int:
        """The number of elements without padding."""
        return self.layout.numel - self.layout.padding

    @property
    def shard_pieces(self) -> list[Piece]:
        """The parts of parameters that are in this rank's shard."""
        return self.layout.pieces(self.shard_rank)

    def shard_piece(self, entry: int) -> Piece | None:
        """Return the part of parameter ``entry`` that is in this rank's shard; None if it has none."""
        return self.layout.piece(entry, self.shard_rank)

    def own_bytes(self, tensor: str) -> int:
        """Return the bytes that this rank allocates for ``tensor``."""
        return sum(buffer.bytes for buffer in self.buffers if buffer.tensor == tensor)

    def owned_runs(self) -> list[ParameterRun]:
        """Return the runs that this rank updates, with ``offset`` counted from the beginning of its owned range."""
        found = (self.owned_run(entry) for entry in range(len(self.layout.entries)))
        return [run for run in found if run is not None]

    def owned_run(self, entry: int) -> ParameterRun | None:
        """Return the run of parameter ``entry`` that this rank updates; None if it updates nothing of it.

        Nobody updates a parameter without elements, so that all layouts treat it alike.
        """
        if self.owns_everything:
            place = self.layout.entries[entry]
            return ParameterRun(entry, 0, place.offset, place.numel) if place.numel else None
        piece = self.shard_piece(entry)
        return None if piece is None else ParameterRun(entry, piece.start, piece.shard_start, piece.numel)

    def pieces(self, *, whole: bool, parts: bool = False) -> Iterator[PiecePlan]:
        """Yield the tensors that the optimizer gets; with ``whole``, one for each parameter, in its own shape.

        With ``parts``, one for each part of a parameter. See [Note: pieces] in zero/optimizer_pieces.py. In ``whole``
        layouts no parameter is in two shards.
        """
        members: list[list[ParameterRun]] = []
        kind = None
        for run in self.owned_runs():
            own = self.optimizer_groups[run.entry], self.state_formats[run.entry]
            if whole or parts or kind != own:
                members.append([])
                kind = own
            members[-1].append(run)
        for runs in members:
            low, last = runs[0].offset, runs[-1]
            flat = (last.offset + last.numel - low,)
            shape = self.layout.entries[last.entry].shape if whole else flat
            inside = tuple(ParameterRun(run.entry, run.start, run.offset - low, run.numel) for run in runs)
            yield PiecePlan(self.optimizer_groups[last.entry], low, shape, inside, self.state_formats[last.entry])

    def stretches(self) -> tuple[Stretch, ...]:
        """Return the elements that this rank updates as neighbouring stretches whose states have one format."""
        begins: list[Stretch] = []
        for piece in self.pieces(whole=False):
            if not begins or begins[-1][1] is not piece.format:
                begins.append((piece.low if begins else 0, piece.format))
        begins = begins or [(0, StateFormat.FP32)]
        ends = [*(low for low, _ in begins[1:]), self.owned_numel]
        return tuple((end - low, format) for (low, format), end in zip(begins, ends, strict=True))


@dataclass(frozen=True)
class UnitPlan:
    """A part of the model whose parameters are unsharded, resharded and reduced together.

    ``modules``: names of the modules whose forward enters and leaves it. ``param_slot``, ``grad_slot``: index of the shared
    slot, or -1 if the unit has its own. ``deferred``: its gradients may come after its turn, so they are reduced when the
    backward is over. ``keeps_others``: pages of other ranks' parameters stay mapped between its turns.
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
        """True if its parameters are always whole, because it has a slot of its own for them."""
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
        """Where master and moments are kept: DEVICE, HOST or DISK."""
        return DISK if self.placement.states_on_disk else HOST if self.placement.optimizer else DEVICE

    @property
    def params_place(self) -> str:
        """Where the parameter shards are kept if the unit shares slots: DEVICE, HOST or DISK."""
        return DISK if self.placement.params_on_disk else HOST if self.placement.params else DEVICE

    @property
    def param_slot_bytes(self) -> int:
        """The bytes that its parameters take in a shared slot."""
        return sum(aligned_bytes(size) for group in self.flat_groups for size in group.slot_bytes)

    @property
    def grad_slot_bytes(self) -> int:
        """The bytes that its gradients take in a shared slot."""
        return sum(aligned_bytes(group.gradient_bytes) for group in self.trainable)


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
    """Staging buffers between device, host and disk, in bytes: two of ``gradients``, two of ``rounded`` weights, ``disk``.

    ``disk``: the buffers in which states on a disk are updated. ``apart``: the device has memory of its own; if it does
    not, nothing goes through buffers on its way to the host.
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
    """What this rank keeps in files. ``masters``: unit -> for each of its masters, stretches of its elements.

    ``states``: the number of optimizer states per master; None if masters and states are not kept in files. ``format``: of
    the masters.
    """

    masters: dict[int, tuple[tuple[Stretch, ...], ...]]
    states: int | None
    param_bytes: int
    format: MasterFormat = MasterFormat.FP32


@dataclass(frozen=True)
class ShardingPlan:
    """Everything that rank ``topology.rank`` holds. ``topology`` has no process groups.

    ``transport``: NCCL, GLOO or PEER_MEMORY, for parameters and gradients. ``device_type``: "cpu" or "cuda".
    ``compute_dtype``: the dtype of parameters and activations; None if they keep the module's. ``wire_dtype``: the dtype in
    which gradients are sent. ``overlap``: collectives go on behind the computation. ``overlap_param_gather``: parameters of
    resident units are gathered behind the next forward. ``whole``: no parameter is cut. ``by_parts``: the optimizer is
    told of ``parts``, and ``sums`` are what ranks sum for it in a step.
    ``micro_batches``: their number per step. ``kept_apart``: bytes of the parameters that are in no unit. ``buffers``:
    bytes of the module's buffers. ``states``: bytes of optimizer states by trained flat group; None if they are not known.
    ``matrices``: what Muon's matrices need; None for other optimizers.
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
    overlap_param_gather: bool = False
    staging: StagingPlan = NO_STAGING
    disk: DiskPlan | None = None
    kept_apart: int = 0
    buffers: int = 0
    states: tuple[int, ...] | None = None
    by_parts: bool = False
    sums: tuple[SumOfParts, ...] = ()
    hops: tuple[QuantisedHop, ...] = ()
    matrices: MatrixExchange | None = None

    @cached_property
    def flat_groups(self) -> tuple[FlatGroupPlan, ...]:
        return tuple(group for unit in self.units for group in unit.flat_groups)

    @cached_property
    def trainable(self) -> tuple[FlatGroupPlan, ...]:
        return tuple(group for group in self.flat_groups if group.trainable)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """This rank's part of each trained parameter, by name: in the same order on all ranks of the pipeline stage."""
        found = (self.part(group, entry) for group in self.trainable for entry in range(len(group.layout.entries)))
        return tuple(sorted(found, key=lambda part: part.name))

    def part(self, group: FlatGroupPlan, entry: int) -> Part:
        """Return what this rank updates of parameter ``entry`` of ``group``."""
        place, bounds = group.layout.entries[entry], group.layout.bounds
        low, high = (max(place.offset, min(bound, place.end)) - place.offset for bound in group.owned)
        shard = group.tensor_shards[entry] if group.tensor_shards else None
        cuts: tuple[int, ...] | None = ()
        if self.topology.tensor > 1:  # those that have a parameter whole may have laid it out in other ways
            cuts = None
        elif not group.owns_everything:
            inside = bounds[bisect_right(bounds, place.offset) : bisect_left(bounds, place.end)]
            cuts = tuple(bound - place.offset for bound in dict.fromkeys(inside))
        counted = shard is not None or self.topology.tensor_rank == 0
        shape = place.shape if shard is None else shard.shape
        return Part(place.name, shape, low if low < high else 0, high - low, shard, cuts, counted)

    @cached_property  # cached because hooks read it
    def shares_params(self) -> bool:
        """True if some units share slots for parameters, which are then whole only while they are used."""
        return any(not unit.resident for unit in self.units)

    @cached_property
    def shares_grads(self) -> bool:
        """True if some units share slots for gradients, so that every backward reduces."""
        return any(unit.grad_slot >= 0 for unit in self.units)

    @property
    def reads_peers(self) -> bool:
        """True if the ranks of a shard group copy from each other's memory themselves."""
        return reads_peers(self.transport, self.topology)
