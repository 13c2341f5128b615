"""The size of the buffers that reductions receive into, from the order in which a step's reductions begin and end.

NCCL has buffers of its own, which are not counted.
"""

from __future__ import annotations

import torch

from ..distributed.quantised_hops import QuantisedHop
from ..distributed.transport.sums import PoolSizes, stretch_bytes
from ..distributed.transport_kinds import NCCL, PEER_MEMORY
from .reductions import Reductions, reduce
from .sharding_plan import FlatGroupPlan, ShardingPlan, UnitPlan

_PEERS = 16  # at most this many buffers stand for those of all peers, with the same bytes: the pool looks at each one


def receive_buffer_bytes(plan: ShardingPlan) -> int:
    """Return the bytes of one rank's receive buffers, in host memory, after two steps.

    The second step finds the buffers that the first has left, and may need more.
    """
    if plan.transport == NCCL or plan.topology.data_size == 1:
        return 0
    receiving = _Receiving(plan)
    for _ in range(2):
        receiving.step()
    return receiving.pool.bytes + _stretches(plan)


def _stretches(plan: ShardingPlan) -> int:
    """Return the bytes of stretches: where ranks read each other's memory, one for each peer, on all axes."""
    if plan.transport != PEER_MEMORY:
        return 0
    largest: dict[str, int] = {}  # axis -> bytes for all peers
    for group in plan.trainable:
        longest = max((piece.numel for piece in group.shard_pieces), default=0)
        dtype, numel = (torch.float32, longest) if group.unpacked else (plan.wire_dtype, group.shard_numel)
        over_shards = 0 if group.codes_gradients else stretch_bytes(numel, dtype)
        low, high = _part_of_replica(group)
        over_replicas = stretch_bytes(high - low, plan.wire_dtype)
        for axis, size, peers in (
            (group.family.shard_axis, over_shards, group.layout.degree - 1),
            (group.family.replicate_axis, over_replicas, group.copies - 1),
        ):
            largest[axis] = max(largest.get(axis, 0), peers * size)
    return sum(largest.values())


def _part_of_replica(group: FlatGroupPlan) -> tuple[int, int]:
    """Return the range of a shard that this rank sums for all replicas."""
    numel, step = group.shard_numel, -(-group.shard_numel // group.copies)
    return min(step * group.copy, numel), min(step * (group.copy + 1), numel)


class _Receiving:
    """The sizes of the buffers of one rank's pool, and which of them are in use."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self.pool = PoolSizes()
        self._reductions = Reductions(self._start, self._finish, go_on=self._go_on, overlap=plan.overlap)
        self._going_on: set[int] = set()  # units in their second hop
        self._received: dict[int, list[list[int]]] = {}  # index of a unit -> the buffers of each flat group

    def step(self) -> None:
        """Run the reductions of one step. Those of a micro-batch may still be in flight when the next one begins."""
        trained = [unit for unit in reversed(self._plan.units) if unit.trainable]
        for _ in range(self._plan.micro_batches if self._plan.shares_grads else 1):
            for unit in sorted(trained, key=lambda unit: unit.deferred):
                reduce(unit, self._reductions)
        self._reductions.end()

    def _start(self, unit: UnitPlan) -> None:
        self._received[unit.index] = [self._receive(group) for group in unit.trainable]

    def _go_on(self, unit: UnitPlan) -> None:
        received = self._received[unit.index]
        begins = len(self._plan.hops) > 1 and unit.index not in self._going_on
        for number, group in enumerate(unit.trainable):
            if begins and group.codes_gradients:
                self._give(received[number])
                received[number] = self._of_hop(self._plan.hops[1], group)
        self._going_on.add(unit.index)

    def _finish(self, unit: UnitPlan) -> None:
        left = [] if unit.index in self._going_on else self._plan.hops[1:]
        self._going_on.discard(unit.index)
        for group, buffers in zip(unit.trainable, self._received.pop(unit.index, ()), strict=False):
            for buffer in buffers:
                self.pool.give(buffer)
            for hop in left if group.codes_gradients else ():
                self._give(self._of_hop(hop, group))
            if group.copies > 1:
                self._sum_over_replicas(group)

    def _receive(self, group: FlatGroupPlan) -> list[int]:
        ranks = group.layout.degree
        if group.unpacked or ranks == 1:
            return []
        if group.codes_gradients:
            return self._of_hop(self._plan.hops[0], group)
        return self._sum(group, group.layout.numel, group.shard_numel, ranks)

    def _of_hop(self, hop: QuantisedHop, group: FlatGroupPlan) -> list[int]:
        """What an exchange of codes sends, and receives into."""
        return [self.pool.take(hop.sent_bytes(group.shard_numel), torch.uint8) for _ in range(2)]

    def _give(self, buffers: list[int]) -> None:
        for buffer in buffers:
            self.pool.give(buffer)

    def _sum(self, group: FlatGroupPlan, sent: int, owned: int, ranks: int) -> list[int]:
        wire = self._plan.wire_dtype
        taken = [self.pool.take(sent, wire)] if wire != group.gradient_dtype else []
        if self._plan.transport == PEER_MEMORY:
            return taken
        peers = min(ranks - 1, _PEERS)
        return taken + [self.pool.take(owned * (ranks - 1) // peers, wire) for _ in range(peers)]

    def _sum_over_replicas(self, group: FlatGroupPlan) -> None:
        low, high = _part_of_replica(group)
        for buffer in self._sum(group, group.shard_numel, high - low, group.copies):
            self.pool.give(buffer)
