"""Nccl: the collectives of NCCL between GPUs. They are queued on the device; the program does not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from ..transports import NCCL
from ..waits import waiting
from .statistics import Pending, Started
from .sums import store
from .transport import Transport


class Nccl(Transport):
    """Tensors are in the memory of a GPU."""

    name = NCCL
    queues = True

    def _all_gather(
        self, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor | None, until_given: bool
    ) -> Pending:
        own = full[bounds[self.rank] : bounds[self.rank + 1]]
        if full.numel() == own.numel() * self.size:
            work = self.joined._allgather_base(full, own)
        else:
            work = self.joined.allgather([[full[low:high] for low, high in pairwise(bounds)]], [own])
        return Pending(self.statistics, label, [work])

    def reduce_scatter(
        self,
        full: torch.Tensor,
        bounds: Sequence[int],
        out: torch.Tensor,
        label: str,
        *,
        accumulate: bool,
        wire_dtype: torch.dtype,
    ) -> Pending:
        wire = full.to(wire_dtype)
        own = wire[bounds[self.rank] : bounds[self.rank + 1]]
        works: list[Started] = []
        if self.size > 1:
            self.statistics.count(label, (wire.numel() - own.numel()) * wire.element_size())
            works.append(self._begin_sum(wire, bounds, own))
        return Pending(self.statistics, label, works, lambda: store(own, out, accumulate))

    def _begin_sum(self, wire: torch.Tensor, bounds: Sequence[int], own: torch.Tensor) -> dist.Work:
        if wire.numel() == own.numel() * self.size:
            return self.joined._reduce_scatter_base(own, wire, dist.ReduceScatterOptions())
        return self.joined.reduce_scatter([own], [[wire[low:high] for low, high in pairwise(bounds)]])

    def all_reduce(self, buffer: torch.Tensor, label: str, wire_dtype: torch.dtype | None = None) -> None:
        if self.size > 1:
            wire = buffer.to(wire_dtype or buffer.dtype)
            self.statistics.count(label, 2 * wire.numel() * (self.size - 1) // self.size * wire.element_size())
            with waiting(label):
                self.joined.allreduce([wire]).wait()
            store(wire, buffer, accumulate=False)
