"""Quantised sums: the reduce-scatter of ZeRO++, in which gradients travel as codes and are added up in fp32.

[Note: error feedback]
What rounding leaves out between hosts can be kept and sent later (LoCo: Xie et al. 2024, arXiv:2407.04480). A rank that has
to send ``g`` sends the codes of ``h = g + e``. The residual ``e`` is an average of what was left out before, and becomes
``beta * e + (1 - beta) * (h - codes)``. So what many sums have left out is ``e / (1 - beta)`` together, and does not grow.
Codes are the nearest ones then. A residual begins with zeros, and begins anew with each epoch. Of a sum with infinities or
NaNs nothing is kept.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..device import on_host
from ..quantised_blocks import add_decoded, encode
from ..quantised_hops import QuantisedHop
from .statistics import Pending
from .sums import store
from .transport import Transport


@dataclass(frozen=True)
class Feedback:
    """See [Note: error feedback]. ``epoch`` gives what is another value when residuals are to begin anew."""

    beta: float
    epoch: Callable[[], Hashable]


@dataclass(frozen=True)
class Codes:
    """How gradients are coded: by which ``hops``, and with which ``noise`` for what is rounded.

    ``residual`` [residual_numel] and ``beta``: of the hop that feeds back, if one does.
    """

    hops: Sequence[QuantisedHop]
    noise: torch.Generator
    residual: torch.Tensor | None = None
    beta: float = 0.0


class GradientCodes:
    """The codes of one engine's gradients: ``hops``, and noise that follows from ``seed``, the step and the rank.

    ``steps``: counts step() calls, from the beginning of the training, so that a run that goes on from a checkpoint rounds
    as one that was never interrupted. ``rank``: of the world, so that errors of ranks are independent. ``feedback``: for
    hops that feed back.
    """

    def __init__(
        self,
        hops: Sequence[QuantisedHop],
        seed: int,
        rank: int,
        steps: Callable[[], int],
        feedback: Feedback | None = None,
    ) -> None:
        self._hops, self._seed, self._rank, self._steps, self._feedback = hops, seed, rank, steps, feedback
        self._epoch: Hashable = None
        self._residuals: set[int] = set()  # that have begun in this epoch
        self._step = -1
        self._sums: Counter[str] = Counter()  # that there were in this step, by label

    @property
    def hops(self) -> Sequence[QuantisedHop]:
        """By which gradients travel."""
        return self._hops

    def forget_residuals(self) -> None:
        """Let all residuals begin anew."""
        self._residuals.clear()

    def settled(self, residual: torch.Tensor) -> torch.Tensor:
        """``residual`` as the next sum would find it: zeros if it has yet to begin."""
        assert self._feedback is not None
        if self._epoch != self._feedback.epoch() or id(residual) not in self._residuals:
            residual.zero_()
        return residual

    def go_on_with(self, residuals: Iterable[torch.Tensor]) -> None:
        """Take ``residuals`` for what sums of this epoch have left out: they were ``settled`` when they were saved."""
        assert self._feedback is not None
        self._epoch, self._residuals = self._feedback.epoch(), {id(residual) for residual in residuals}

    def of(self, label: str, device: torch.device, residual: torch.Tensor | None = None) -> Codes:
        """How the next sum of this label is coded, on ``device``. ``residual``: of what it sums, if that has one."""
        if self._step != self._steps():
            self._step = self._steps()
            self._sums.clear()
        self._sums[label] += 1
        place = f"{self._seed} {self._step} {label} {self._sums[label]} {self._rank}"
        number = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little") >> 1
        noise = torch.Generator(device).manual_seed(number)
        if residual is None or self._feedback is None:
            return Codes(self._hops, noise)
        if self._epoch != self._feedback.epoch():
            self._epoch = self._feedback.epoch()
            self.forget_residuals()
        if id(residual) not in self._residuals:
            self._residuals.add(id(residual))
            residual.zero_()
        return Codes(self._hops, noise, residual, self._feedback.beta)


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

    def __init__(self, transport: Transport, codes: Codes, hop: QuantisedHop, chunks: torch.Tensor, label: str) -> None:
        self._transport, self._codes, self._hop, self._label = transport, codes, hop, label
        self._chunks, self._place = hop_view(chunks, hop, transport.rank), hop.place(transport.rank)
        self._residual = codes.residual if hop.feeds_back else None
        self._buffers: list[torch.Tensor] = []
        self._received = torch.empty(0)  # [peers, parts, bytes]

    def begin(self) -> Pending:
        """Send each peer the codes of what this rank has for it, and for those that it passes on to."""
        place, hop, rank = self._place, self._hop, self._transport.rank
        size = hop.sent_bytes(self._chunks.shape[-1])
        sent, received = (self._empty(size).view(hop.size - 1, hop.parts, -1) for _ in range(2))
        self._encode(slice(place), slice(place), sent)
        self._encode(slice(place + 1, None), slice(place, None), sent)
        nothing = sent.new_empty(0)
        lists = [[nothing] * self._transport.size for _ in range(2)]
        for number, peer in enumerate(peer for peer in hop.peers(rank) if peer != rank):
            for messages, table in zip(lists, (sent, received), strict=True):
                messages[peer] = table[number].view(-1)
        self._received = received
        return self._transport.all_to_all(lists[0], lists[1], self._label)  # which keeps what is sent until it is over

    def _encode(self, these: slice, peers: slice, sent: torch.Tensor) -> None:
        """Code ``these`` chunks, for ``peers``, see [Note: error feedback]."""
        chunks, coded = self._chunks[these], sent[peers]
        if self._residual is None:
            encode(chunks, coded, self._hop.bits, self._codes.noise)
            return
        residual = self._residual.view(self._hop.size - 1, self._hop.parts, -1)[peers]
        encode(chunks.add_(residual), coded, self._hop.bits)
        add_decoded(coded, chunks.neg_(), self._hop.bits)  # what was left out, with the other sign
        residual.mul_(self._codes.beta).sub_(chunks, alpha=1 - self._codes.beta)
        torch.nan_to_num(residual, 0.0, 0.0, 0.0, out=residual)

    def end(self) -> None:
        """Add what the peers have sent, in the order of ranks."""
        for message in self._received:
            add_decoded(message, self._chunks[self._place], self._hop.bits)
        for buffer in self._buffers:
            self._transport.statistics.pool.give(buffer)
        self._buffers, self._received = [], torch.empty(0)

    def _empty(self, size: int) -> torch.Tensor:
        """[size] uint8. In host memory it is used again and again."""
        if self._transport.queues or not on_host(self._transport.device):
            return torch.empty(size, dtype=torch.uint8, device=self._transport.device)
        self._buffers.append(self._transport.statistics.pool.take(size, torch.uint8))
        return self._buffers[-1]


def hop_view(chunks: torch.Tensor, hop: QuantisedHop, rank: int) -> torch.Tensor:
    """Return what ``hop`` moves of ``chunks`` [ranks, numel], as [peers, parts, numel]: by peer, what goes through it."""
    if hop.parts > 1:  # each peer gets the chunks of those ranks, of all hosts, that have its place
        return chunks.unflatten(0, (hop.parts, hop.size)).transpose(0, 1)
    peers = hop.peers(rank)
    return chunks[peers.start : peers.stop : peers.step].unsqueeze(1)
