"""How large the buffers get into which reductions receive, from the order in which a step's reductions begin and end.

NCCL has buffers of its own, which are not counted.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ..distributed.transport.buffer_pool import STRETCH, BufferPool
from ..distributed.transports import NCCL, PEER_MEMORY
from .reductions import Reductions
from .sharding_plan import FlatGroupPlan, ShardingPlan, UnitPlan

_PEERS = 16  # buffers at most that stand for those of all peers, with as many bytes: the pool looks at each


def receive_buffer_bytes(plan: ShardingPlan) -> int:
    """Bytes of the pool of one rank over two steps: the second finds what the first has left. In host memory."""
    if plan.transport == NCCL or plan.topology.data_parallel_size == 1:
        return 0
    receiving = _Receiving(plan)
    for _ in range(2):
        receiving.step()
    return receiving.pool.bytes


class _Receiving:
    """The pool of one rank, and what of it is in use."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self.pool = BufferPool(torch.device("meta"))
        self._reductions = Reductions(self._start, self._finish, overlap=plan.overlap)
        self._own: dict[int, list[torch.Tensor]] = {}  # by unit: what is summed over replicas afterwards
        self._received: dict[int, list[torch.Tensor]] = {}

    def step(self) -> None:
        """The reductions of one backward."""
        trained = [unit for unit in reversed(self._plan.units) if unit.trainable]
        for unit in sorted(trained, key=lambda unit: unit.deferred):
            if not unit.gradients_stay:
                self._reductions.free_slot(unit)
            self._reductions.begin(unit)
        self._reductions.end()

    def _start(self, unit: UnitPlan) -> None:
        self._own[unit.index], self._received[unit.index] = [], []
        for group in unit.trainable:
            if self._plan.topology.replicate > 1:
                self._own[unit.index].append(self.pool.take(group.shard_numel, torch.float32))
            self._received[unit.index] += self._receive(group)

    def _finish(self, unit: UnitPlan) -> None:
        for buffer in self._received.pop(unit.index, ()):
            self.pool.give(buffer)
        for own in self._own.pop(unit.index, ()):
            self._sum_over_replicas(own.numel())
            self.pool.give(own)

    def _receive(self, group: FlatGroupPlan) -> list[torch.Tensor]:
        ranks = self._plan.topology.shard
        if group.unpacked:
            self._read_stretches(max((piece.numel for piece in group.shard_pieces), default=0), ranks, torch.float32)
            return []
        return self._sum(group.layout.numel, group.shard_numel, ranks) if ranks > 1 else []

    def _sum(self, sent: int, owned: int, ranks: int) -> list[torch.Tensor]:
        wire = self._plan.wire_dtype
        taken = [self.pool.take(sent, wire)] if wire != torch.float32 else []
        if self._plan.transport == PEER_MEMORY:
            self._read_stretches(owned, ranks, wire)
            return taken
        peers = min(ranks - 1, _PEERS)
        return taken + [self.pool.take(owned * (ranks - 1) // peers, wire) for _ in range(peers)]

    def _read_stretches(self, numel: int, ranks: int, dtype: torch.dtype) -> None:
        for buffer in [self.pool.take(min(STRETCH, numel), dtype) for _ in range(ranks - 1)]:  # ranks of one host
            self.pool.give(buffer)

    def _sum_over_replicas(self, owned: int) -> None:
        size = self._plan.topology.replicate
        step = -(-owned // size)
        ends = [min(step * index, owned) for index in range(size + 1)]
        low, high = list(pairwise(ends))[self._plan.topology.replicate_rank]
        for buffer in self._sum(owned, high - low, size):
            self.pool.give(buffer)
