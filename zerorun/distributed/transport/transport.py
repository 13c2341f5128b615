"""Transport: how the ranks of one axis move flat tensors. One interface; nccl.py, gloo.py and same_host.py fill it.

[Note: tags]
Point-to-point messages carry a tag made from a checksum of the collective's label and the number of calls with that
label. If ranks ever disagreed about the order, messages would wait for their counterpart: they could not deliver the
bytes of another unit. NCCL knows no tags: it would mix two units of one size in silence. So where it is used, each rank
keeps a checksum of the labels in their order, and the small sum of every step tells whether ranks with the same part of
the model have the same (``Communicator.refuse_other_order``).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ...errors import OrderError
from ...watch.board import ALL, Span, span_of
from ..device import Arrival
from ..layout import Piece
from ..waits import waiting
from .mapped_shards import MappedShards
from .open_shards import close_all
from .peer_memory import PeerMemory, note_left
from .statistics import CommunicationStatistics, Pending
from .sums import store
from .world import gather_values, with_others

# Seconds that an exiting process gives others to read what it offers.
EXIT_READ_TIMEOUT_S = 60
_live: weakref.WeakSet[Transport] = weakref.WeakSet()


class Transport(ABC):
    """The ranks of one axis, of which this is number ``rank`` of ``size``. ``group``: their process group.

    Every rank of the axis makes the same calls in the same order. Flat tensors are [numel] on ``device``; ``bounds``
    [size + 1] say in elements where each rank's part of one begins and ends. ``label`` is what a collective is called in
    counts and messages. ``name``: NCCL, GLOO or PEER_MEMORY.
    """

    name: str
    queues = False  # True: later work on the device's queue waits for what it moves; the program does not
    takes_from_source = False  # True: gathers send a rank's part directly from its source, and put it in place, too
    memory: PeerMemory | None = None  # if ranks read each other's memory

    def __init__(
        self,
        axis: str,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        device: torch.device,
        statistics: CommunicationStatistics,
    ) -> None:
        self.axis, self.rank, self.size, self.device, self.statistics = axis, rank, size, device, statistics
        self.group = group
        _live.add(self)

    @cached_property
    def names(self) -> list[int]:
        """The ranks of the axis, by their numbers in the world."""
        return dist.get_process_group_ranks(self.joined)

    @cached_property
    def span(self) -> Span:
        """``names``, for waits."""
        return ALL if self.group is None else span_of(self.names)

    @property
    def joined(self) -> dist.ProcessGroup:
        """The process group. Raises OrderError at the end of the process, when it has been left."""
        if self.group is None:
            raise OrderError(f"rank {self.rank} has left the ranks of the axis {self.axis}: nothing can be sent any more.")
        return self.group

    def values(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (see wire.py), by rank. For set-up."""
        with waiting(f"what ranks tell each other before they use the axis {self.axis}", span=self.span):
            return gather_values(value, self.group)

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_gather(
        self,
        full: torch.Tensor,
        bounds: Sequence[int],
        label: str,
        source: torch.Tensor | None = None,
        *,
        until_given: bool = False,
    ) -> Pending:
        """Fill ``full`` [bounds[-1]] from the ranks' parts. ``source``: this rank's, if not in place.

        ``until_given``: return from ``wait`` only when all others have read this rank's part.
        """
        own = full[bounds[self.rank] : bounds[self.rank + 1]]
        apart = source is not None and source.data_ptr() != own.data_ptr()
        if source is not None and apart and (self.size == 1 or not self.takes_from_source):
            own.copy_(source)
        if self.size == 1:
            return Pending(self.statistics, label)
        self.statistics.begin(
            label, self.span, own.numel() * (self.size - 1) * own.element_size(), bounds[-1] * full.element_size()
        )
        return self._all_gather(full, bounds, label, source, until_given)

    @abstractmethod
    def _all_gather(
        self, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor | None, until_given: bool
    ) -> Pending:
        """There is more than one rank. This one's part is in ``source`` if that is given, and in ``full`` if it is not or
        unless ``takes_from_source``."""

    def all_gather_after(
        self, first: Pending | Arrival, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor
    ) -> Pending:
        """``all_gather`` after ``first``, which fills ``source``: the collective of another axis, or a copy."""

        def finish() -> None:
            first.wait()
            if source.data_ptr() != full.data_ptr():
                full.copy_(source)

        if self.size == 1:
            return Pending(self.statistics, label, (), finish)
        first.wait()
        return self.all_gather(full, bounds, label, source)

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
        """Let ``out`` become, or grow by, the sum over ranks of this rank's part of ``full``.

        ``out`` may be this rank's part of ``full`` if not ``accumulate``. What is sent has dtype ``wire_dtype``.
        """
        if self.size == 1:
            store(full, out, accumulate)
            return Pending(self.statistics, label)
        self.statistics.begin(
            label, self.span, (full.numel() - out.numel()) * wire_dtype.itemsize, full.numel() * wire_dtype.itemsize
        )
        return self._reduce_scatter(full, bounds, out, label, accumulate, wire_dtype)

    @abstractmethod
    def _reduce_scatter(
        self,
        full: torch.Tensor,
        bounds: Sequence[int],
        out: torch.Tensor,
        label: str,
        accumulate: bool,
        wire_dtype: torch.dtype,
    ) -> Pending:
        """``reduce_scatter`` over more than one rank."""

    def all_reduce(self, buffer: torch.Tensor, label: str, wire_dtype: torch.dtype | None = None) -> None:
        """Sum a flat buffer over the axis, in place: reduce-scatter, then all-gather. The same bits on every rank."""
        if self.size == 1:
            return
        step = -(-buffer.numel() // self.size)
        bounds = [min(step * index, buffer.numel()) for index in range(self.size + 1)]
        own = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        wire = wire_dtype or buffer.dtype
        self.reduce_scatter(buffer, bounds, own, label, accumulate=False, wire_dtype=wire).wait()
        self.all_gather(buffer, bounds, label, until_given=True).wait()

    def sum_after(self, first: Pending, buffer: torch.Tensor, label: str, wire_dtype: torch.dtype) -> Pending:
        """Sum a flat buffer over the axis, in place, after ``first``, the collective of another axis that fills it."""
        return Pending(self.statistics, label, [first], lambda: self.all_reduce(buffer, label, wire_dtype))

    def sum_of(self, flat: torch.Tensor, label: str) -> torch.Tensor:
        """The sum of ``flat`` [numel] over the axis, as a new tensor, the same bits on every rank. ``flat`` must stay."""
        total = flat.clone()
        self.all_reduce(total, label)
        return total

    def sum_parts(
        self, parts: Sequence[torch.Tensor], pieces: Sequence[Piece], out: torch.Tensor, label: str, *, accumulate: bool
    ) -> Pending:
        """Sum over ranks of fp32 tensors [numel] that lie apart, where ranks read each other's memory: nothing is packed.

        ``pieces``: what of them is this rank's, and where in ``out`` it goes. They must not change before ``wait``.
        """
        raise NotImplementedError(f"{self.name} sums what is packed")

    def all_to_all(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], label: str, *, until_given: bool = True
    ) -> Pending:
        """Send each rank its tensor of ``sent``, and fill ``received`` with those of the others, by rank.

        They are flat, and of one dtype. One tensor may go to several ranks. After ``wait``, all of them may change; unless
        ``until_given``, ``sent`` must not until all ranks have made the call.
        """
        others = [flat for peer, flat in enumerate(sent) if peer != self.rank]
        received[self.rank].copy_(sent[self.rank])
        if self.size == 1:
            return Pending(self.statistics, label)
        self.statistics.count(label, sum(flat.numel() * flat.element_size() for flat in others))
        return self._all_to_all(sent, received, label, until_given)

    @abstractmethod
    def _all_to_all(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], label: str, until_given: bool
    ) -> Pending:
        """``all_to_all`` over more than one rank. What goes to this rank itself is in its place."""

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Replace ``tensor``, in place, by that of rank ``source``. For set-up: it goes through the process group."""
        if self.size > 1 and tensor.numel():
            through = tensor.detach().contiguous().to(self.device)
            sent = through.nbytes * (self.size - 1) if self.rank == source else 0
            self.statistics.begin(label, self.span, sent, through.nbytes)
            with with_others(label, span=self.span):
                dist.broadcast(through.view(-1).view(torch.uint8), group=self.group, group_src=source)  # bytes: any dtype
            if through.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(through)

    # -- messages ------------------------------------------------------------------------------------------------

    def send(self, flat: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a flat tensor. It must not change before that is over."""
        return self.joined.send([flat.view(torch.uint8)], peer, tag)  # bytes: any dtype

    def receive(self, flat: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to fill a flat tensor with what ``peer`` sends with this tag."""
        return self.joined.recv([flat.view(torch.uint8)], peer, tag)

    # -- memory that others read: nothing to do where they do not ------------------------------------------------

    def map_shards(self, sizes: Sequence[int]) -> MappedShards | None:
        """Room for shards of ``sizes`` bytes in memory that the ranks share; None where they cannot. All must call it."""
        return None

    def expose(self, shards: Sequence[torch.Tensor]) -> None:  # noqa: B027
        """Let others read ``shards``, the sources of gathers, at any time until ``fence``; no longer those given before."""

    def fence(self) -> None:  # noqa: B027
        """Return when no other rank reads buffers of this one any more. All ranks must call it."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory into which sums receive, beside the pool that all transports of an engine share."""
        return 0

    # -- the end -------------------------------------------------------------------------------------------------

    def drain(self, timeout: timedelta | None) -> None:
        """Finish what is in flight, or forget it if the timeout is None, and let go of the process group."""
        for pending in list(self.statistics.in_flight):
            if timeout is None:
                self.statistics.in_flight.discard(pending)
                continue
            try:
                pending.wait(timeout)
            except OrderError:
                self.statistics.in_flight.clear()
                timeout = None
        if timeout is not None:
            self._let_others_read()
        self.group = None

    def _let_others_read(self) -> None:  # noqa: B027
        """Wait until others have read what this rank offered."""


def drain_all(timeout: timedelta | None) -> None:
    """At the end of the process: finish everything in flight; with None, forget it. No call can follow."""
    if timeout is not None:
        note_left()
        close_all(timedelta(seconds=EXIT_READ_TIMEOUT_S))
    for transport in tuple(_live):
        transport.drain(timeout)
