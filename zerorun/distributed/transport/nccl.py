"""Nccl: the collectives of NCCL between GPUs. They are queued on the device; the program does not wait for them.

[Note: one collective, whatever the shards]
Ranks that choose different operations hang, or get garbage. So the choice follows from the bounds, which all of them know,
and there is one operation for all: shards of different sizes (whole parameters, for optimizers that need them) travel in
a buffer in which all have the size of the largest. What is not added up travels as bytes, because NCCL lacks some dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise

import torch
import torch.distributed as dist

from ..device import Arrival, CopyStream, is_simulated
from ..transport_kinds import NCCL
from ..waits import waiting
from .simulated_nccl import SimulatedNccl, group_of
from .statistics import Pending, Started
from .sums import store
from .transport import Transport


class Nccl(Transport):
    """Tensors are in the memory of a GPU."""

    name = NCCL
    queues = True
    takes_from_source = True
    _has_connected = False

    @cached_property
    def calls(self) -> dist.ProcessGroup | SimulatedNccl:
        """Who carries out calls for tensors on the device."""
        return group_of(self.joined) if is_simulated(self.device) else self.joined

    @cached_property
    def _beside(self) -> CopyStream:
        """What follows a collective of another axis waits for it here."""
        return CopyStream(self.device)

    @contextmanager
    def _calling(self, label: str) -> Iterator[None]:
        """NCCL connects ranks in their first call, for which the program waits."""
        if self._has_connected:
            yield
        else:
            with waiting(label, span=self.span):  # for the others
                yield
            self._has_connected = True

    @contextmanager
    def _beside_after(self, first: Pending | Arrival) -> Iterator[None]:
        """What the block gives the device to do comes after ``first``, and nothing else waits for either."""
        self._beside.follow()
        with self._beside.copying():
            first.wait()
            yield

    def _all_gather(
        self, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor | None, until_given: bool
    ) -> Pending:
        self.statistics.order.note(label)
        width, own = _width(bounds), full[bounds[self.rank] : bounds[self.rank + 1]]
        if width * self.size == full.numel():
            table, sent = full, own if source is None else source  # NCCL puts it in its place
        else:
            table = full.new_zeros(width * self.size)
            sent = table[width * self.rank : width * (self.rank + 1)]
            sent[: own.numel()].copy_(own if source is None else source)
        with self._calling(label):
            work = self.calls._allgather_base(table.view(torch.uint8), sent.view(torch.uint8))
        return Pending(self.statistics, label, [work], lambda: _spread(table, full, bounds), reads=[sent])

    def all_gather_after(
        self, first: Pending | Arrival, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor
    ) -> Pending:
        """The device goes on from ``first`` to the gather by itself, on a stream for which nothing else waits."""
        if self.size == 1 or _width(bounds) * self.size != full.numel():  # for ranks of other sizes a buffer is made
            return super().all_gather_after(first, full, bounds, label, source)
        with self._beside_after(first):
            return self.all_gather(full, bounds, label, source)

    def _reduce_scatter(
        self,
        full: torch.Tensor,
        bounds: Sequence[int],
        out: torch.Tensor,
        label: str,
        accumulate: bool,
        wire_dtype: torch.dtype,
    ) -> Pending:
        self.statistics.order.note(label)
        width = _width(bounds)
        if width * self.size == full.numel():
            wire = full.to(wire_dtype)
        else:
            wire = full.new_zeros(width * self.size, dtype=wire_dtype)
            for rank, (low, high) in enumerate(pairwise(bounds)):
                wire[width * rank :][: high - low].copy_(full[low:high])
        direct = out.dtype == wire_dtype and out.numel() == width and not accumulate
        own = out if direct else wire[width * self.rank : width * (self.rank + 1)]
        with self._calling(label):
            works: list[Started] = [self.calls._reduce_scatter_base(own, wire, dist.ReduceScatterOptions())]
        return Pending(self.statistics, label, works, lambda: store(own[: out.numel()], out, accumulate), reads=[wire])

    def all_reduce(self, buffer: torch.Tensor, label: str, wire_dtype: torch.dtype | None = None) -> None:
        if self.size > 1:
            self.statistics.order.note(label)
            wire = buffer.to(wire_dtype or buffer.dtype)
            self._count_all_reduce(wire, label)
            with waiting(label, span=self.span):
                self.calls.allreduce([wire]).wait()
            store(wire, buffer, accumulate=False)

    def _all_to_all(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], label: str, until_given: bool
    ) -> Pending:
        self.statistics.order.note(label)
        empty = sent[0].new_empty(0)
        apart = [
            [(empty if peer == self.rank else flat).view(torch.uint8) for peer, flat in enumerate(flats)]
            for flats in (sent, received)
        ]
        with self._calling(label):
            work = self.calls.alltoall(apart[1], apart[0], dist.AllToAllOptions())
        return Pending(self.statistics, label, [work])

    def sum_after(self, first: Pending, buffer: torch.Tensor, label: str, wire_dtype: torch.dtype) -> Pending:
        """The device goes on from ``first`` to the sum by itself, on a stream for which nothing else waits."""
        self.statistics.order.note(label)
        wire = buffer if buffer.dtype == wire_dtype else torch.empty_like(buffer, dtype=wire_dtype)
        self._count_all_reduce(wire, label)
        kept = first.buffers  # read on that stream, and made on another
        with self._beside_after(first):
            store(buffer, wire, accumulate=False)
            with self._calling(label):
                work = self.calls.allreduce([wire])

        def finish() -> None:
            store(wire, buffer, accumulate=False)
            del kept[:]

        return Pending(self.statistics, label, [work], finish)

    def _count_all_reduce(self, wire: torch.Tensor, label: str) -> None:
        sent = 2 * wire.numel() * (self.size - 1) // self.size * wire.element_size()
        self.statistics.begin(label, self.span, sent, wire.numel() * wire.element_size())

    def send(self, flat: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return self.calls.send([flat.view(torch.uint8)], peer, tag)

    def receive(self, flat: torch.Tensor, peer: int, tag: int) -> dist.Work:
        return self.calls.recv([flat.view(torch.uint8)], peer, tag)


def _width(bounds: Sequence[int]) -> int:
    """Elements of the largest shard."""
    return max(high - low for low, high in pairwise(bounds))


def _spread(table: torch.Tensor, full: torch.Tensor, bounds: Sequence[int]) -> None:
    """Fill ``full`` from ``table``, in which all shards have the size of the largest, unless it is ``full``."""
    if table is not full:
        width = _width(bounds)
        for rank, (low, high) in enumerate(pairwise(bounds)):
            full[low:high].copy_(table[width * rank :][: high - low])
