"""The collectives of one step, in order, with labels and the bytes that this rank sends.

The step is one whose order all ranks know already, and in which every micro-batch goes through the units in the order in
which the model defines them. Traffic that depends on batches is left out: activations between pipeline stages and between
tensor ranks.

[Note: the same bits]
Over the shard axis each rank adds its elements, and over the tensor axis each that has elements which no other has. What
one rank of a tensor group has computed for a parameter that all of them have whole counts for all. Ranks with copies of a
parameter, replicas above all, must come to the same bits. The transports of zerorun add in the order of ranks, so that
they do. NCCL may add in another order in each group: there the sums of the first copy go to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..distributed.quantised_hops import QuantisedHop
from ..distributed.transport_kinds import NCCL
from ..optim.parameter_parts import SumOfParts
from .matrix_exchange import FROM_OWNERS, TO_OWNERS
from .reductions import Reductions, reduce
from .sharding_plan import FlatGroupPlan, ShardingPlan, UnitPlan

CONTROL = "control"
# fp64 numbers that ranks sum before an update: see zero/norm.py. Automatic saves and monitors add two each. With NCCL,
# there are two more for each part of the model (see Communicator.told_order), and the devices sum some, too.
SUMMARY_NUMEL, NORM_NUMEL = 21, 3
NORM = "norm"
LARGEST = "largest weights"
_FP32 = torch.float32.itemsize


@dataclass(frozen=True)
class Collective:
    """One call, as ``engine.communication_report()`` counts it. ``bytes``: the bytes that this rank sends."""

    label: str
    bytes: int


def step_collectives(plan: ShardingPlan) -> list[Collective]:
    """Return the collectives of one step with an update, over all its micro-batches, in the order of their issue."""
    return _Step(plan).run()


class _Step:
    """One step of ``plan``, without any data."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self._issued: list[Collective] = []
        begin, end = self._start_reduction, self._finish_reduction
        self._reductions = Reductions(begin, end, go_on=self._go_on_reducing, overlap=plan.overlap)
        self._going_on: set[int] = set()  # units whose reductions are in their second hop
        self._occupants: dict[int, UnitPlan] = {}  # shared parameter slot -> the unit in it
        self._copied: set[str] = set()  # units whose second copy is up to date

    def run(self) -> list[Collective]:
        plan = self._plan
        order = plan.units[1:]  # the root unit stays unsharded
        for micro_batch in range(plan.micro_batches):
            self._pass(order, "for forward", reduces=False)
            reduces = plan.shares_grads or micro_batch == plan.micro_batches - 1
            self._pass(order[::-1], "for backward", reduces=reduces)
            if reduces:
                for unit in reversed(plan.units):
                    if unit.trainable and unit.deferred:
                        reduce(unit, self._reductions)
        self._reductions.end()
        if plan.topology.world_size > 1:
            numel = SUMMARY_NUMEL + (2 * plan.topology.pipe * plan.topology.tensor if plan.transport == NCCL else 0)
            self._issued.append(Collective(CONTROL, numel * torch.float64.itemsize))
            if plan.transport == NCCL:
                others = plan.topology.world_size - 1
                sent = 2 * NORM_NUMEL * others // plan.topology.world_size * torch.float64.itemsize
                self._issued.append(Collective(NORM, sent))
        for summed in plan.sums:
            self._sum_parts(summed)
        if plan.matrices is not None and plan.matrices.size > 1:
            for turn in range(len(plan.matrices.turns)):
                there, back = plan.matrices.sent(turn)
                self._issued += [Collective(TO_OWNERS, there), Collective(FROM_OWNERS, back)]
        if plan.policy.shard_optimizer:
            self._occupants.clear()
            for unit in plan.units:
                if unit.resident:
                    self._all_gather(unit.name, unit.trainable, "updated parameters")
        return self._issued

    def _sum_parts(self, summed: SumOfParts) -> None:
        """Follow ``PartSums`` in zero/part_sums.py."""
        for hop in hops(self._plan):
            size, rank = self._plan.topology.size(hop.axis), getattr(self._plan.topology, f"{hop.axis}_rank")
            for sent in self._bytes_of_sum(summed.numel, size, rank):
                self._issued.append(Collective(f"{summed.label}{hop.suffix}", sent))

    def _bytes_of_sum(self, numel: int, size: int, rank: int) -> list[int]:
        """Return the bytes of a sum of fp32 numbers, by call. Two ranks send each other all, as long as it is not NCCL."""
        if self._plan.transport != NCCL and size == 2:
            return [numel * torch.float32.itemsize]
        return self._bytes_of_all_reduce(numel, size, rank, torch.float32.itemsize)

    # -- parameters ----------------------------------------------------------------------------------------------

    def _pass(self, order: Sequence[UnitPlan], phase: str, *, reduces: bool) -> None:
        """Follow the runtime along its trace: leave the unit before, then gather ahead as far as slots are free."""
        ahead = -1
        for position in range(len(order)):
            if reduces and position:
                self._leave(order[position - 1])
            while ahead < min(position + self._plan.param_slots.count - 1, len(order) - 1):
                unit = order[ahead + 1]
                if any(other.param_slot == unit.param_slot >= 0 for other in order[position : ahead + 1]):
                    break
                ahead += 1
                self._gather(unit, phase)
        if reduces and order:
            self._leave(order[-1])

    def _share_largest(self) -> None:
        """Follow ``share_largest`` in zero/gathers.py, once after an update."""
        weights = sum(len(group.layout.entries) for group in self._plan.flat_groups if group.float8 is not None)
        if weights:
            sent = weights * (self._plan.topology.shard - 1) * _FP32
            self._issued.append(Collective(LARGEST, sent))

    def _gather(self, unit: UnitPlan, phase: str) -> None:
        if not unit.resident and self._occupants.get(unit.param_slot) is not unit:
            if not self._occupants:
                self._share_largest()
            self._occupants[unit.param_slot] = unit
            self._all_gather(unit.name, unit.flat_groups, phase)
            self._copied.add(unit.name)

    def _all_gather(self, unit: str, groups: Sequence[FlatGroupPlan], phase: str) -> None:
        for group in (group for group in groups if group.layout.degree > 1):
            rank, sent = group.shard_rank, group.gathered_bytes * (group.layout.degree - 1)
            if group.secondary is not None:
                sent = group.second_bytes * (group.secondary.size - 1)
                keepers = group.secondary.keepers(rank)
                if group.trainable and unit not in self._copied:
                    copied = group.gathered_bytes * (len(keepers) - (rank in keepers))
                    self._issued.append(Collective(f"{unit}: second copy", copied))
            self._issued.append(Collective(f"{unit}: all-gather {phase}", sent))

    # -- gradients -----------------------------------------------------------------------------------------------

    def _leave(self, unit: UnitPlan) -> None:
        if unit.trainable and not unit.deferred:
            reduce(unit, self._reductions)

    def _start_reduction(self, unit: UnitPlan) -> None:
        label = f"{unit.name}: reduce-scatter gradients"
        for group in unit.trainable:
            if group.codes_gradients:
                self._hop(label, group, self._plan.hops[:1])
            elif group.layout.degree > 1:
                self._issued.append(Collective(label, self._bytes_to_shards(group)))
            if self._goes_on(group):
                self._sum_over_replicas(unit, group)

    def _goes_on(self, group: FlatGroupPlan) -> bool:
        """True if the sum over replicas is issued with the one over shards, and not when somebody waits for that."""
        return self._plan.transport == NCCL and not group.codes_gradients

    def _hop(self, label: str, group: FlatGroupPlan, hops: Sequence[QuantisedHop]) -> None:
        for hop in hops if group.codes_gradients else ():
            self._issued.append(Collective(f"{label}{hop.suffix}", hop.sent_bytes(group.shard_numel)))

    def _bytes_to_shards(self, group: FlatGroupPlan) -> int:
        if group.unpacked:
            own = sum(piece.numel for piece in group.shard_pieces)
            return (group.numel_of_parameters - own) * torch.float32.itemsize
        return (group.layout.numel - group.shard_numel) * self._plan.wire_dtype.itemsize

    def _go_on_reducing(self, unit: UnitPlan) -> None:
        for group in unit.trainable if unit.index not in self._going_on else ():
            self._hop(f"{unit.name}: reduce-scatter gradients", group, self._plan.hops[1:])
        self._going_on.add(unit.index)

    def _finish_reduction(self, unit: UnitPlan) -> None:
        left = [] if unit.index in self._going_on else self._plan.hops[1:]
        self._going_on.discard(unit.index)
        for group in unit.trainable:
            self._hop(f"{unit.name}: reduce-scatter gradients", group, left)
            if not self._goes_on(group):
                self._sum_over_replicas(unit, group)
        reduced_everywhere = () if self._plan.policy.shard_optimizer else unit.trainable
        for group in (group for group in reduced_everywhere if group.layout.degree > 1):
            sent = group.shard_numel * (group.layout.degree - 1) * group.gradient_dtype.itemsize
            self._issued.append(Collective(f"{unit.name}: all-gather gradients", sent))

    def _sum_over_replicas(self, unit: UnitPlan, group: FlatGroupPlan) -> None:
        for sent in self._bytes_over_replicas(group) if group.copies > 1 else ():
            self._issued.append(Collective(f"{unit.name}: reduce-scatter gradients over replicas", sent))

    def _bytes_over_replicas(self, group: FlatGroupPlan) -> list[int]:
        """Return the bytes of an all-reduce, by call: one call through NCCL, else a reduce-scatter and an all-gather."""
        wire, kept = self._plan.wire_dtype.itemsize, group.gradient_dtype.itemsize
        return self._bytes_of_all_reduce(group.shard_numel, group.copies, group.copy, wire, kept)

    def _bytes_of_all_reduce(self, numel: int, size: int, rank: int, wire: int, kept: int = _FP32) -> list[int]:
        """As ``_bytes_over_replicas``, over ``size`` ranks of which this is number ``rank``.

        ``wire``, ``kept``: bytes per element where it is summed, and of the sum.
        """
        if self._plan.transport == NCCL:
            return [2 * numel * (size - 1) // size * wire]
        step = -(-numel // size)
        low, high = (min(step * (rank + end), numel) for end in (0, 1))
        return [(numel - (high - low)) * wire, (high - low) * (size - 1) * kept]


@dataclass(frozen=True)
class Hop:
    """A sum over ``axis``. ``first_only``: ranks along it have the same numbers, and those of the first count."""

    axis: str
    suffix: str
    first_only: bool = False


def hops(plan: ShardingPlan) -> list[Hop]:
    """Return the sums that make one sum over all ranks that have parts of the same parameters."""
    topology, found = plan.topology, []
    sharded = plan.policy.shard_optimizer and topology.shard > 1
    if sharded:
        found.append(Hop("shard", ""))
    if topology.tensor > 1:
        found.append(Hop("tensor", " over tensor ranks"))
    copies = "replicate" if plan.policy.shard_optimizer else "shard"
    if found and plan.transport == NCCL and topology.size(copies) > 1:
        found.append(Hop(copies, " from the first replica", first_only=True))
    return found
