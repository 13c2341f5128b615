"""ThroughHost: ranks that share one GPU, which NCCL does not serve, move its tensors through host memory."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from .mapped_shards import MappedShards
from .statistics import Pending
from .sums import store
from .transport import Transport


class ThroughHost(Transport):
    """Tensors of ``device``, over ``inner``, whose tensors are in host memory."""

    def __init__(self, inner: Transport, device: torch.device) -> None:
        super().__init__(inner.axis, inner.group, inner.rank, inner.size, device, inner.statistics)
        self._inner = inner
        self.name, self.memory = inner.name, inner.memory

    def _all_gather(
        self, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor | None, until_given: bool
    ) -> Pending:
        host = full.to("cpu")
        inner = self._inner._all_gather(host, bounds, label, None, until_given)
        return Pending(self.statistics, label, [inner], lambda: store(host, full, accumulate=False))

    def _reduce_scatter(
        self,
        full: torch.Tensor,
        bounds: Sequence[int],
        out: torch.Tensor,
        label: str,
        accumulate: bool,
        wire_dtype: torch.dtype,
    ) -> Pending:
        host = full.to("cpu")
        own = host[bounds[self.rank] : bounds[self.rank + 1]]
        inner = self._inner._reduce_scatter(host, bounds, own, label, False, wire_dtype)
        return Pending(self.statistics, label, [inner], lambda: store(own.to(out.device), out, accumulate))

    def _all_to_all(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], label: str, until_given: bool
    ) -> Pending:
        there, here = [flat.to("cpu") for flat in sent], [torch.empty_like(flat, device="cpu") for flat in received]

        def finish() -> None:
            for peer, flat in enumerate(received):
                if peer != self.rank:
                    flat.copy_(here[peer])

        return Pending(self.statistics, label, [self._inner._all_to_all(there, here, label, until_given)], finish)

    def all_reduce(self, buffer: torch.Tensor, label: str, wire_dtype: torch.dtype | None = None) -> None:
        if self.size > 1:
            host = buffer.to("cpu")
            self._inner.all_reduce(host, label, wire_dtype)
            buffer.copy_(host)

    def sum_of(self, flat: torch.Tensor, label: str) -> torch.Tensor:
        return self._inner.sum_of(flat.to("cpu"), label).to(flat.device)

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        self._inner.broadcast(tensor, label, source)

    def map_shards(self, sizes: Sequence[int]) -> MappedShards | None:
        return self._inner.map_shards(sizes)

    def fence(self) -> None:
        self._inner.fence()

    @property
    def buffer_bytes(self) -> int:
        return self._inner.buffer_bytes

    def drain(self, timeout: timedelta | None) -> None:
        """The inner transport is drained by itself."""
        self.group = None
