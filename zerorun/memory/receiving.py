"""Receiving: how large the buffers get into which reductions receive. A step's sequence of them, without any data.

It follows Runtime (which unit is reduced when, how many at a time) and Communicator (what a reduction takes from its pool).
NCCL has buffers of its own, which are not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..distributed.topology import Topology
from ..distributed.transport.channel import STRETCH, BufferPool
from ..zero.flat_group import FlatGroup
from ..zero.runtime import MAX_REDUCING
from ..zero.unit import Unit

_PEERS = 16  # buffers at most that stand for those of all peers, with as many bytes: the pool looks at each


@dataclass
class _Reduction:
    """One flat group's, on its way. ``own``: what is summed over replicas afterwards; ``received``: all else."""

    own: torch.Tensor | None
    received: list[torch.Tensor]


class Receiving:
    """The pool of one rank over two steps: the second finds what the first has left."""

    def __init__(self, topology: Topology, wire: torch.dtype, *, reads_peers: bool, overlap: bool) -> None:
        self._topology, self._wire = topology, wire
        self._reads_peers, self._overlap = reads_peers, overlap
        self._pool = BufferPool(torch.device("meta"))
        self._in_flight: deque[tuple[Unit, list[_Reduction]]] = deque()

    def pool_bytes(self, units: Sequence[Unit]) -> int:
        """What the pool has come to."""
        late = [unit for unit in reversed(units) if unit.trainable and unit.deferred]
        order = [unit for unit in reversed(units) if unit.trainable and not unit.deferred] + late
        for _ in range(2 if self._topology.data_parallel_size > 1 else 0):
            for unit in order:
                self._reduce(unit)
            while self._in_flight:
                self._finish(self._in_flight.popleft()[1])
        return self._pool.bytes

    def _reduce(self, unit: Unit) -> None:
        for other, reductions in list(self._in_flight):
            if other.grad_slot == unit.grad_slot >= 0:  # it must leave the slot
                self._finish(reductions)
                self._in_flight.remove((other, reductions))
        while len(self._in_flight) >= MAX_REDUCING:
            self._finish(self._in_flight.popleft()[1])
        self._in_flight.append((unit, [self._start(flat_group) for flat_group in unit.trainable]))
        if not self._overlap:
            self._finish(self._in_flight.popleft()[1])

    def _finish(self, reductions: list[_Reduction]) -> None:
        for reduction in reductions:
            for buffer in reduction.received:
                self._pool.give(buffer)
            if reduction.own is not None:
                self._sum_over_replicas(reduction.own.numel())
                self._pool.give(reduction.own)

    def _start(self, flat_group: FlatGroup) -> _Reduction:
        owned, ranks = flat_group.high - flat_group.low, self._topology.shard
        own = self._pool.take(owned, torch.float32) if self._topology.replicate > 1 else None
        reduction = _Reduction(own, [])
        if flat_group.unpacked:
            self._read_stretches(max((piece.numel for piece in flat_group.pieces), default=0), ranks, torch.float32)
        elif ranks > 1:
            reduction.received = self._sum(flat_group.layout.numel, owned, ranks)
        return reduction

    def _sum(self, sent: int, owned: int, ranks: int) -> list[torch.Tensor]:
        taken = [self._pool.take(sent, self._wire)] if self._wire != torch.float32 else []
        if self._reads_peers:
            self._read_stretches(owned, ranks, self._wire)
            return taken
        peers = min(ranks - 1, _PEERS)
        return taken + [self._pool.take(owned * (ranks - 1) // peers, self._wire) for _ in range(peers)]

    def _read_stretches(self, numel: int, ranks: int, dtype: torch.dtype) -> None:
        for buffer in [self._pool.take(min(STRETCH, numel), dtype) for _ in range(ranks - 1)]:  # ranks of one host
            self._pool.give(buffer)

    def _sum_over_replicas(self, owned: int) -> None:
        size = self._topology.replicate
        step = -(-owned // size)
        ends = [min(step * index, owned) for index in range(size + 1)]
        low, high = list(pairwise(ends))[self._topology.replicate_rank]
        for buffer in self._sum(owned, high - low, size):
            self._pool.give(buffer)
