"""SameHost: ranks of one host read each other's memory (peer_memory.py); messages between two go through gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from ..layout import Piece
from ..transport_kinds import PEER_MEMORY
from .gloo import Gloo
from .mapped_shards import MappedShards
from .open_shards import OpenShards
from .peer_memory import PeerMemory, PeerMemoryError
from .statistics import CommunicationStatistics, Pending, Started, unanswered
from .sums import STRETCH, Stretches, sum_in_rank_order
from .transport import EXIT_READ_TIMEOUT_S


class SameHost(Gloo):
    """Tensors are in host memory, and in that of ranks that let this one read it."""

    name = PEER_MEMORY
    memory: PeerMemory

    def __init__(
        self,
        axis: str,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        device: torch.device,
        statistics: CommunicationStatistics,
        memory: PeerMemory,
    ) -> None:
        super().__init__(axis, group, rank, size, device, statistics)
        self.memory = memory
        self._open_shards: OpenShards | None = None
        self._stretches = Stretches(size - 1)

    # -- memory that others read ---------------------------------------------------------------------------------

    def map_shards(self, sizes: Sequence[int]) -> MappedShards | None:
        return MappedShards.connect(self.values, self.rank, self.size, sizes)

    def expose(self, shards: Sequence[torch.Tensor]) -> None:
        self._open_shards = OpenShards(self.memory, shards, self.statistics.tag)

    def fence(self) -> None:
        if self._open_shards is not None:
            self._open_shards.close()
        self.memory.finish()

    @property
    def buffer_bytes(self) -> int:
        return self._stretches.bytes

    def _let_others_read(self) -> None:
        with contextlib.suppress(PeerMemoryError):
            self.memory.finish(timedelta(seconds=EXIT_READ_TIMEOUT_S))

    # -- collectives ---------------------------------------------------------------------------------------------

    def _all_gather(
        self, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor | None, until_given: bool
    ) -> Pending:
        if self._open_shards is not None and source is not None and source in self._open_shards:
            return self._read_open(self._open_shards, full, bounds, label, source)
        chunks = [full[low:high] for low, high in pairwise(bounds)]

        def take(tables: list[torch.Tensor]) -> None:
            for peer, chunk in enumerate(chunks):
                if peer != self.rank and chunk.numel():
                    self.memory.read_tensor(peer, int(tables[peer][0]), chunk)

        own = chunks[self.rank] if source is None else source
        tag, size = self.statistics.tag(label), bounds[-1] * full.element_size()
        work = self.memory.exchange(tag, label, [own], take, until_given=until_given, size=size)
        return Pending(self.statistics, label, [work])

    def _all_to_all(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], label: str, until_given: bool
    ) -> Pending:
        def take(tables: list[torch.Tensor]) -> None:
            for peer, flat in enumerate(received):
                if peer != self.rank and flat.numel():
                    self.memory.read_tensor(peer, int(tables[peer][self.rank]), flat)

        tag = self.statistics.tag(label)
        return Pending(self.statistics, label, [self.memory.exchange(tag, label, sent, take, until_given=until_given)])

    def _read_open(
        self, shards: OpenShards, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor
    ) -> Pending:
        try:
            shards.gather(full, bounds, source)
        except PeerMemoryError as error:
            raise unanswered(label, dist.get_rank(), error) from error
        return Pending(self.statistics, label)

    def sum_parts(
        self, parts: Sequence[torch.Tensor], pieces: Sequence[Piece], out: torch.Tensor, label: str, *, accumulate: bool
    ) -> Pending:
        whole = sum(part.numel() for part in parts)
        sent = whole - sum(piece.numel for piece in pieces)
        self.statistics.begin(label, self.span, sent * out.element_size(), whole * out.element_size())
        return Pending(self.statistics, label, [self._read_and_add(parts, parts, pieces, out, label, accumulate)])

    def _sum_of_two(self, flat: torch.Tensor, label: str) -> torch.Tensor:
        total, whole = torch.empty_like(flat), [Piece(0, 0, 0, flat.numel())]
        work = self._read_and_add([flat], [flat], whole, total, label, accumulate=False, until_given=False)
        Pending(self.statistics, label, [work]).wait()
        return total

    def _reduce_scatter(
        self,
        full: torch.Tensor,
        bounds: Sequence[int],
        out: torch.Tensor,
        label: str,
        accumulate: bool,
        wire_dtype: torch.dtype,
    ) -> Pending:
        pool, piece = self.statistics.pool, Piece(0, bounds[self.rank], 0, out.numel())
        offered = full if wire_dtype == full.dtype else pool.take(full.numel(), wire_dtype).copy_(full)
        work = self._read_and_add([full], [offered], [piece], out, label, accumulate)
        return Pending(self.statistics, label, [work], None if offered is full else partial(pool.give, offered))

    def _read_and_add(
        self,
        parts: Sequence[torch.Tensor],
        offered: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        out: torch.Tensor,
        label: str,
        accumulate: bool,
        *,
        until_given: bool = True,
    ) -> Started:
        """Read and add bit by bit: what was read is added while it is in the processor's cache.

        ``parts`` are flat, as are ``offered``, what the others may read of them. ``pieces`` says what of them goes where
        in ``out``.
        """
        rank, memory, dtype = self.rank, self.memory, offered[0].dtype

        def take(tables: list[torch.Tensor]) -> None:
            longest = min(STRETCH, max((piece.numel for piece in pieces), default=0))
            scratch = self._stretches.take(longest, dtype)
            for piece in pieces:
                addresses = [int(table[piece.entry]) for table in tables]
                for begin in range(0, piece.numel, STRETCH):
                    numel, start = min(STRETCH, piece.numel - begin), piece.start + begin
                    found = [buffer[:numel] for buffer in scratch]
                    found.insert(rank, parts[piece.entry][start : start + numel])
                    for peer, address in enumerate(addresses):
                        if peer != rank:
                            memory.read_tensor(peer, address + start * dtype.itemsize, found[peer])
                    into = piece.shard_start + begin
                    sum_in_rank_order(found, out[into : into + numel], accumulate)

        tag, size = self.statistics.tag(label), sum(part.numel() for part in offered) * dtype.itemsize
        return memory.exchange(tag, label, offered, take, until_given=until_given, size=size)
