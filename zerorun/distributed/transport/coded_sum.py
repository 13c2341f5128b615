"""Coded sums: the reduce-scatter of ZeRO++, in which gradients travel as block codes and are added up in fp32."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..block_codes import add_decoded, encode
from ..coded_hops import CodedHop
from ..device import on_host
from .statistics import Pending
from .sums import store
from .transport import Transport


@dataclass(frozen=True)
class Codes:
    """How gradients are coded: by which ``hops``, and with which ``noise`` for what is rounded."""

    hops: Sequence[CodedHop]
    noise: torch.Generator


class GradientCodes:
    """The codes of one engine's gradients: ``hops``, and noise that follows from ``seed``, the step and the rank.

    ``steps``: counts step() calls, from the beginning of the training, so that a run that goes on from a checkpoint rounds
    as one that was never interrupted. ``rank``: of the world, so that errors of ranks are independent.
    """

    def __init__(self, hops: Sequence[CodedHop], seed: int, rank: int, steps: Callable[[], int]) -> None:
        self._hops, self._seed, self._rank, self._steps = hops, seed, rank, steps
        self._step = -1
        self._sums: Counter[str] = Counter()  # that there were in this step, by label

    def of(self, label: str, device: torch.device) -> Codes:
        """How the next sum of this label is coded, on ``device``."""
        if self._step != self._steps():
            self._step = self._steps()
            self._sums.clear()
        self._sums[label] += 1
        place = f"{self._seed} {self._step} {label} {self._sums[label]} {self._rank}"
        number = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little") >> 1
        return Codes(self._hops, torch.Generator(device).manual_seed(number))


def reduce_scatter_codes(
    transport: Transport, codes: Codes, full: torch.Tensor, out: torch.Tensor, label: str, *, accumulate: bool
) -> Pending:
    """``Transport.reduce_scatter`` of ``full`` [ranks * numel] fp32, in codes. Shards have the same size on all ranks.

    What a rank keeps to itself is not rounded. In ``full`` sums are made; what it has afterwards is of no use.
    """
    chunks = full.view(transport.size, -1)
    hops = _Hops([_Exchange(transport, codes, hop, chunks, f"{label}{hop.suffix}") for hop in codes.hops])

    def finish() -> None:
        hops.end()
        store(chunks[transport.rank], out, accumulate)

    return Pending(transport.statistics, label, (), finish, hops.go_on)


class _Hops:
    """The exchanges of one sum, one after the other. The first one has begun."""

    def __init__(self, exchanges: Sequence[_Exchange]) -> None:
        self._now, *self._left = exchanges
        self._moving = self._now.begin()

    def go_on(self) -> None:
        """Begin the next one, if there is one, when the one before is over."""
        if self._left:
            self._finish_one()
            self._now = self._left.pop(0)
            self._moving = self._now.begin()

    def end(self) -> None:
        """Finish all."""
        while self._left:
            self.go_on()
        self._finish_one()

    def _finish_one(self) -> None:
        self._moving.wait()
        self._now.end()


class _Exchange:
    """One hop of one sum. ``chunks`` [ranks, numel] fp32, by owner."""

    def __init__(self, transport: Transport, codes: Codes, hop: CodedHop, chunks: torch.Tensor, label: str) -> None:
        self._transport, self._codes, self._hop, self._label = transport, codes, hop, label
        self._chunks, self._place = hop_view(chunks, hop, transport.rank), hop.place(transport.rank)
        self._buffers: list[torch.Tensor] = []
        self._moving: tuple[torch.Tensor, ...] = ()  # what is sent, and what comes: alive until the exchange is over

    def begin(self) -> Pending:
        """Send each peer the codes of what this rank has for it, and for those that it passes on to."""
        place, hop, rank = self._place, self._hop, self._transport.rank
        size = hop.sent_bytes(self._chunks.shape[-1])
        sent, received = (self._empty(size).view(hop.size - 1, hop.parts, -1) for _ in range(2))
        encode(self._chunks[:place], sent[:place], hop.bits, self._codes.noise)
        encode(self._chunks[place + 1 :], sent[place:], hop.bits, self._codes.noise)
        nothing = sent.new_empty(0)
        lists = [[nothing] * self._transport.size for _ in range(2)]
        for number, peer in enumerate(peer for peer in hop.peers(rank) if peer != rank):
            for messages, table in zip(lists, (sent, received), strict=True):
                messages[peer] = table[number].view(-1)
        self._moving = sent, received
        return self._transport.all_to_all(lists[0], lists[1], self._label)

    def end(self) -> None:
        """Add what the peers have sent, in the order of ranks."""
        for message in self._moving[1]:
            add_decoded(message, self._chunks[self._place], self._hop.bits)
        for buffer in self._buffers:
            self._transport.statistics.pool.give(buffer)
        self._buffers, self._moving = [], ()

    def _empty(self, size: int) -> torch.Tensor:
        """[size] uint8. In host memory it is used again and again."""
        if self._transport.queues or not on_host(self._transport.device):
            return torch.empty(size, dtype=torch.uint8, device=self._transport.device)
        self._buffers.append(self._transport.statistics.pool.take(size, torch.uint8))
        return self._buffers[-1]


def hop_view(chunks: torch.Tensor, hop: CodedHop, rank: int) -> torch.Tensor:
    """Return what ``hop`` moves of ``chunks`` [ranks, numel], as [peers, parts, numel]: by peer, what goes through it."""
    if hop.parts > 1:  # each peer gets the chunks of those ranks, of all hosts, that have its place
        return chunks.unflatten(0, (hop.parts, hop.size)).transpose(0, 1)
    peers = hop.peers(rank)
    return chunks[peers.start : peers.stop : peers.step].unsqueeze(1)
