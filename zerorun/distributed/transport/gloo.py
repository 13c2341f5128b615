"""Gloo: messages between ranks, through torch's gloo backend, between hosts or where memory cannot be read.

[Note: why not the stock collectives on gloo]
gloo's all-gather and reduce-scatter would copy through buffers of their own. Sending each shard straight from the flat
buffer it lies in to the place where the receiver wants it needs no copy, and takes about a third of the time (64 MiB, 2
ranks: 15 ms against 48-61 ms). The sum of a reduce-scatter is then ours to order: ranks ascending, in fp32, so that it
gives the same bits in every run and at every stage.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from ...watch.board import board
from ..transport_kinds import GLOO
from .statistics import Message, Pending, Started
from .sums import sum_in_rank_order
from .transport import Transport


class Gloo(Transport):
    """Tensors are in host memory."""

    name = GLOO

    def _all_gather(
        self, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor | None, until_given: bool
    ) -> Pending:
        tag, chunks = self.statistics.tag(label), [full[low:high] for low, high in pairwise(bounds)]
        own, others = chunks[self.rank], [peer for peer in range(self.size) if peer != self.rank]
        works = [self._receiving(chunks[peer], peer, tag, label) for peer in others if chunks[peer].numel()]
        works += [self._sending(own, peer, tag, label) for peer in others if own.numel()]
        return Pending(self.statistics, label, works)

    def _reduce_scatter(
        self,
        full: torch.Tensor,
        bounds: Sequence[int],
        out: torch.Tensor,
        label: str,
        accumulate: bool,
        wire_dtype: torch.dtype,
    ) -> Pending:
        """Send every other rank its chunk, receive the others' versions of ours, then add."""
        tag, pool = self.statistics.tag(label), self.statistics.pool
        outgoing = full if wire_dtype == full.dtype else pool.take(full.numel(), wire_dtype).copy_(full)
        works: list[Started] = []
        parts: list[torch.Tensor] = []
        for peer, (low, high) in enumerate(pairwise(bounds)):
            if peer == self.rank:
                parts.append(full[low:high])
                continue
            part = pool.take(out.numel(), wire_dtype)
            parts.append(part)
            if out.numel():
                works.append(self._receiving(part, peer, tag, label))
            if high > low:
                works.append(self._sending(outgoing[low:high], peer, tag, label))

        def finish() -> None:
            begun = time.monotonic_ns()
            sum_in_rank_order(parts, out, accumulate)
            board.end_transport(begun)
            for peer, part in enumerate(parts):
                if peer != self.rank:
                    pool.give(part)
            if outgoing is not full:
                pool.give(outgoing)

        return Pending(self.statistics, label, works, finish)

    def _all_to_all(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], label: str, until_given: bool
    ) -> Pending:
        tag, others = self.statistics.tag(label), [peer for peer in range(self.size) if peer != self.rank]
        works = [self._receiving(received[peer], peer, tag, label) for peer in others if received[peer].numel()]
        works += [self._sending(sent[peer], peer, tag, label) for peer in others if sent[peer].numel()]
        return Pending(self.statistics, label, works)

    def sum_of(self, flat: torch.Tensor, label: str) -> torch.Tensor:
        """Between two ranks each takes all of the other's: as many bytes as in two phases, in one."""
        if self.size != 2:
            return super().sum_of(flat, label)
        self.statistics.begin(label, self.span, flat.numel() * flat.element_size(), flat.numel() * flat.element_size())
        return self._sum_of_two(flat, label)

    def _sum_of_two(self, flat: torch.Tensor, label: str) -> torch.Tensor:
        total, theirs, peer, tag = torch.empty_like(flat), torch.empty_like(flat), 1 - self.rank, self.statistics.tag(label)
        works = [self._receiving(theirs, peer, tag, label), self._sending(flat, peer, tag, label)] if flat.numel() else []
        Pending(self.statistics, label, works).wait()
        sum_in_rank_order([flat, theirs] if self.rank == 0 else [theirs, flat], total, accumulate=False)
        return total

    def _sending(self, flat: torch.Tensor, peer: int, tag: int, label: str) -> Started:
        return Message(self.send(flat, peer, tag), label, self.names[peer], tag)

    def _receiving(self, flat: torch.Tensor, peer: int, tag: int, label: str) -> Started:
        return Message(self.receive(flat, peer, tag), label, self.names[peer], tag)
