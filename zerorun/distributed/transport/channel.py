"""Channel: exchanges of flat buffers between the ranks of one axis, labelled and counted.

[Note: why not the stock collectives on gloo]
Ranks of one host read each other's memory (peer_memory.py). Between hosts, gloo's all-gather and reduce-scatter would copy
through buffers of their own. Sending each shard straight from the flat buffer it lies in to the place where the receiver
wants it needs no copy, and takes about a third of the time (64 MiB, 2 ranks: 15 ms against 48-61 ms). The sum of a
reduce-scatter is then ours to order: ranks ascending, in fp32, so that it gives the same bits in every run and at every
stage.

[Note: tags]
Point-to-point messages carry a tag made from a checksum of the collective's label and the number of calls with that
label. If ranks ever disagreed about the order, messages would wait for their counterpart: they could not deliver the
bytes of another unit.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from ...errors import OrderError
from ..layout import Piece
from ..transports import GLOO, NCCL, PEER_MEMORY
from ..waits import waiting
from ..wire import gather_values
from .buffer_pool import STRETCH, BufferPool, Stretches
from .mapped_shards import MappedShards
from .open_shards import OpenShards, close_all
from .peer_memory import PeerCollective, PeerMemory, PeerMemoryError

# Seconds that an exiting process gives others to read what it offers.
_EXIT_READ_TIMEOUT_S = 60
UNANSWERED = (
    "collective '{}' could not be completed on rank {}: another rank ended or did not take part. "
    "Look at the first failing rank's own error. ({})"
)


class Message:
    """A message between this rank and the rank of the world ``peer``, of the collective ``label``."""

    __slots__ = ("_work", "label", "peer")

    def __init__(self, work: dist.Work, label: str, peer: int) -> None:
        self._work, self.label, self.peer = work, label, peer

    def wait(self, *timeout: timedelta) -> None:
        """Return when it is sent, or has come. Raises RuntimeError."""
        with waiting(self.label, lambda: [self.peer]):
            self._work.wait(*timeout)


Started = dist.Work | PeerCollective | Message


class Pending:
    """One collective in flight. Keeps its buffers alive until ``wait`` has returned."""

    __slots__ = ("_finish", "_in_flight", "_works", "done", "label")

    def __init__(
        self, statistics: CommunicationStatistics, label: str, works: Sequence[Started], finish: Callable[[], None] | None
    ) -> None:
        self._in_flight = statistics.in_flight
        self._works: Sequence[Any] = works
        self._finish = finish
        self.label = label
        self.done = False
        self._in_flight.add(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the result is in place. Raises OrderError, naming the collective, if a peer is gone."""
        if self.done:
            return
        try:
            for work in self._works:
                timeout = () if timeout_s is None else (timedelta(seconds=timeout_s),)
                with waiting(self.label) if isinstance(work, dist.Work) else contextlib.nullcontext():
                    work.wait(*timeout)
        except RuntimeError as error:
            self.done = True
            self._in_flight.discard(self)
            raise OrderError(UNANSWERED.format(self.label, dist.get_rank(), error)) from error
        self.done = True
        self._in_flight.discard(self)
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None


class Waiter:
    """A thread that waits for messages between two ranks, in order: gloo does not tell whether such a work is done.

    It ends when nobody refers to the waiter any more.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Message | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._queue.put, None).atexit = False

    @staticmethod
    def waiting() -> bool:
        """True if a message of this process has not come to its end."""
        return bool(_unfinished)

    def begin(self, work: dist.Work, kept: Any = None) -> Future[None]:
        """Done when ``work`` is, or failed as it has. ``kept``: what must stay alive until then."""
        if self._thread is None:  # a daemon: nobody waits at exit for a rank that has ended
            self._thread = threading.Thread(target=_work_off, args=(self._queue,), name="zerorun messages", daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        _unfinished.add(future)
        self._queue.put((future, work, kept))
        return future


_Message = tuple[Future[None], dist.Work, Any]
_unfinished: set[Future[None]] = set()  # of all waiters, whether anybody still refers to them or not


def _work_off(messages: SimpleQueue[_Message | None]) -> None:
    while (message := messages.get()) is not None:
        future, work, _ = message
        try:
            work.wait()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        _unfinished.discard(future)
        del message, future, work, _  # before the next comes


@dataclass
class Traffic:
    """What one label has cost on this rank so far."""

    calls: int = 0
    bytes: int = 0  # sent to other ranks


class CommunicationStatistics:
    """What the channels of one engine have in common: counts, scratch buffers, what is in flight."""

    def __init__(self) -> None:
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.in_flight: set[Pending] = set()
        self.pool = BufferPool(torch.device("cpu"))
        self._issued: dict[str, int] = defaultdict(int)

    def count(self, label: str, sent_bytes: int) -> None:
        entry = self.traffic[label]
        entry.calls += 1
        entry.bytes += sent_bytes

    def tag(self, label: str) -> int:
        """The same on all ranks that make the same calls."""
        self._issued[label] += 1
        return (self._issued[label] % 1024) << 20 | zlib.crc32(label.encode()) & 0xFFFFF


class Channel:
    """The ranks of one axis, of which this is number ``rank`` of ``size``. ``group``: their process group.

    Every rank of the axis makes the same calls in the same order. ``memory`` is set where they read each other's buffers.
    """

    def __init__(
        self,
        axis: str,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        device: torch.device,
        statistics: CommunicationStatistics,
        *,
        reads_peers: bool = True,
    ) -> None:
        self.axis, self.rank, self.size, self.device, self.statistics = axis, rank, size, device, statistics
        self.group = group
        self.nccl = device.type == "cuda" and "nccl" in str(dist.get_backend_config(group or dist.group.WORLD))
        self.memory = self._connect() if reads_peers and size > 1 and not self.nccl else None
        self.open_shards: OpenShards | None = None
        self.stretches = Stretches(size - 1)
        _live.add(self)

    def _connect(self) -> PeerMemory | None:
        return PeerMemory.connect(self._objects, self.rank, self.size, self._names)

    @cached_property
    def _names(self) -> list[int]:
        """The ranks of the axis, as they are called in the world."""
        return dist.get_process_group_ranks(self.group or dist.group.WORLD)

    def _objects(self, value: Any) -> list[Any]:
        with waiting(f"what ranks tell each other before they use the axis {self.axis}"):
            return gather_values(value, self.group)

    @property
    def transport(self) -> str:
        """NCCL, GLOO or PEER_MEMORY."""
        if self.nccl:
            return NCCL
        return PEER_MEMORY if self.memory is not None else GLOO

    def map_shards(self, sizes: Sequence[int]) -> MappedShards | None:
        """Room for shards of ``sizes`` bytes in memory that the ranks share; None where they cannot. All must call it."""
        return MappedShards.connect(self._objects, self.rank, self.size, sizes) if self.memory is not None else None

    def expose(self, shards: Sequence[torch.Tensor]) -> None:
        """From here on others may take ``shards``, when they are the sources of gathers, at any time until ``fence``.

        Has no effect where ranks do not read each other's memory.
        """
        if self.memory is not None and self.device.type == "cpu":
            self.open_shards = OpenShards(self.memory, shards, self.statistics.tag)

    def fence(self) -> None:
        """Return when no other rank reads buffers of this one any more. All ranks must call it."""
        if self.open_shards is not None:
            self.open_shards.close()
        if self.memory is not None:
            self.memory.finish()

    def drain(self, timeout_s: float | None) -> None:
        """Finish what is in flight, or forget it if the timeout is None, and let go of the process group."""
        for pending in list(self.statistics.in_flight):
            if timeout_s is None:
                self.statistics.in_flight.discard(pending)
                continue
            try:
                pending.wait(timeout_s)
            except OrderError:
                self.statistics.in_flight.clear()
                timeout_s = None
        if timeout_s is not None and self.memory is not None:  # others may still read what this rank offered
            with contextlib.suppress(PeerMemoryError):
                self.memory.finish(timedelta(seconds=_EXIT_READ_TIMEOUT_S))
        self.group = None

    # -- on flat buffers -----------------------------------------------------------------------------------------

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
        if source is not None and source.data_ptr() != own.data_ptr():
            own.copy_(source)
        if self.size == 1:
            return Pending(self.statistics, label, [], None)
        self.statistics.count(label, own.numel() * (self.size - 1) * own.element_size())
        if self.nccl:
            return self._nccl_all_gather(full, bounds, own, label)
        if self.open_shards is not None and source is not None and source in self.open_shards:
            return self._read_open(self.open_shards, full, bounds, label, source)
        return self._p2p_all_gather(full, bounds, label, source, until_given)

    def start_sum(
        self,
        full: torch.Tensor,
        bounds: Sequence[int],
        out: torch.Tensor,
        label: str,
        *,
        accumulate: bool,
        wire_dtype: torch.dtype,
    ) -> tuple[list[Started], Callable[[], None]]:
        """Let ``out`` become, or grow by, the sum over ranks of this rank's chunk of ``full``: (works, what then).

        Not over NCCL. Both in host memory; ``out`` may be this rank's part of ``full`` if not ``accumulate``. What is
        sent has dtype ``wire_dtype``.
        """
        outgoing, pool = full, self.statistics.pool
        if wire_dtype != full.dtype:
            outgoing = pool.take(full.numel(), wire_dtype).copy_(full)
        self.statistics.count(label, (full.numel() - out.numel()) * outgoing.element_size())
        if self.memory is not None:
            piece = Piece(0, bounds[self.rank], 0, out.numel())
            works, finish = [self._start_direct_sum([full], [outgoing], [piece], out, label, accumulate)], nothing
        else:
            works, finish = self._start_sent_sum(full, outgoing, bounds, out, label, accumulate)

        def finish_and_give() -> None:
            finish()
            if outgoing is not full:
                pool.give(outgoing)

        return works, finish_and_give

    def sum_parts(
        self, parts: Sequence[torch.Tensor], pieces: Sequence[Piece], out: torch.Tensor, label: str, *, accumulate: bool
    ) -> Pending:
        """Sum over ranks of fp32 tensors [numel] that lie apart, where ranks read each other's memory: nothing is packed.

        ``pieces``: what of them is this rank's, and where in ``out`` it goes. They must not change before ``wait``.
        """
        sent = sum(part.numel() for part in parts) - sum(piece.numel for piece in pieces)
        self.statistics.count(label, sent * out.element_size())
        work = self._start_direct_sum(parts, parts, pieces, out, label, accumulate)
        return Pending(self.statistics, label, [work], None)

    def all_reduce(self, buffer: torch.Tensor, label: str, wire_dtype: torch.dtype | None = None) -> None:
        """Sum a flat buffer over the axis, in place: reduce-scatter, then all-gather. The same bits on every rank."""
        if self.size == 1:
            return
        if self.nccl:
            sent = 2 * buffer.numel() * (self.size - 1) // self.size
            self.statistics.count(label, sent * buffer.element_size())
            assert self.group is not None
            with waiting(label):
                self.group.allreduce([buffer]).wait()
            return
        if buffer.is_cuda:  # two ranks on one GPU: through host memory
            host = buffer.to("cpu")
            self.all_reduce(host, label, wire_dtype)
            buffer.copy_(host)
            return
        step = -(-buffer.numel() // self.size)
        bounds = [min(step * index, buffer.numel()) for index in range(self.size + 1)]
        own = buffer[bounds[self.rank] : bounds[self.rank + 1]]
        wire = wire_dtype or buffer.dtype
        works = self.start_sum(buffer, bounds, own, label, accumulate=False, wire_dtype=wire)
        Pending(self.statistics, label, *works).wait()
        self.all_gather(buffer, bounds, label, until_given=True).wait()

    def sum_of(self, flat: torch.Tensor, label: str) -> torch.Tensor:
        """The sum of ``flat`` [numel] over the axis as a new tensor, the same bits on every rank. ``flat`` must not change.

        Between two ranks each takes all of the other's: as many bytes as in two phases, in one.
        """
        if self.size == 2 and not self.nccl and not flat.is_cuda:
            return self._sum_of_two(flat, label)
        total = flat.clone()
        self.all_reduce(total, label)
        return total

    def _sum_of_two(self, flat: torch.Tensor, label: str) -> torch.Tensor:
        total = torch.empty_like(flat)
        self.statistics.count(label, flat.numel() * flat.element_size())
        if self.memory is not None:
            piece = Piece(0, 0, 0, flat.numel())
            work = self._start_direct_sum([flat], [flat], [piece], total, label, accumulate=False, until_given=False)
            Pending(self.statistics, label, [work], None).wait()
            return total
        theirs, peer, tag = torch.empty_like(flat), 1 - self.rank, self.statistics.tag(label)
        assert self.group is not None
        works = [self.group.recv([theirs], peer, tag), self.group.send([flat], peer, tag)] if flat.numel() else []
        Pending(self.statistics, label, [Message(work, label, self._names[peer]) for work in works], None).wait()
        sum_in_rank_order([flat, theirs] if self.rank == 0 else [theirs, flat], total, accumulate=False)
        return total

    def broadcast(self, tensor: torch.Tensor, label: str, source: int = 0) -> None:
        """Let ``tensor`` be that of rank ``source``, in place. For set-up: it goes through the process group."""
        if self.size > 1 and tensor.numel():
            through = tensor.detach().contiguous().to(self.device if self.nccl else "cpu")
            self.statistics.count(label, through.nbytes * (self.size - 1) if self.rank == source else 0)
            with waiting(label):
                dist.broadcast(through.view(-1).view(torch.uint8), group=self.group, group_src=source)  # bytes: any dtype
            tensor.detach().copy_(through)

    def reduce_scatter(self, full: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str) -> None:
        """Let ``out`` be the sum over the axis of this rank's chunk of the flat ``full``. Blocks."""
        if self.nccl:
            own = full[bounds[self.rank] : bounds[self.rank + 1]]
            self.nccl_sum(full, bounds, own, label).wait()
            out.copy_(own)
            return
        host, target = (full.cpu(), torch.empty_like(out, device="cpu")) if full.is_cuda else (full, out)
        works = self.start_sum(host, bounds, target, label, accumulate=False, wire_dtype=full.dtype)
        Pending(self.statistics, label, *works).wait()
        store(target, out, accumulate=False)

    # -- through peer memory on one host, else point to point -------------------------------------------------------

    def _read_open(
        self, shards: OpenShards, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor
    ) -> Pending:
        try:
            shards.gather(full, bounds, source)
        except PeerMemoryError as error:
            raise OrderError(UNANSWERED.format(label, dist.get_rank(), error)) from error
        return Pending(self.statistics, label, [], None)

    def _p2p_all_gather(
        self, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor | None, until_given: bool
    ) -> Pending:
        rank, tag, target = self.rank, self.statistics.tag(label), full
        if full.is_cuda:  # two ranks on one GPU: through host memory
            full, source = target.to("cpu"), None
        chunks = [full[low:high] for low, high in pairwise(bounds)]

        def finish() -> None:
            if target.is_cuda:
                target.copy_(full)

        works: list[Started] = []
        if memory := self.memory:

            def take(tables: list[torch.Tensor]) -> None:
                for peer, chunk in enumerate(chunks):
                    if peer != rank and chunk.numel():
                        memory.read_tensor(peer, int(tables[peer][0]), chunk)

            own = chunks[rank] if source is None else source
            works.append(memory.exchange(tag, label, [own], take, until_given=until_given))
        else:
            group, others = self.group, [peer for peer in range(len(chunks)) if peer != rank]
            assert group is not None
            names = self._names
            works += [Message(group.recv([chunks[p]], p, tag), label, names[p]) for p in others if chunks[p].numel()]
            works += [Message(group.send([chunks[rank]], p, tag), label, names[p]) for p in others if chunks[rank].numel()]
        return Pending(self.statistics, label, works, finish)

    def _start_direct_sum(
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
        rank, memory = self.rank, self.memory
        assert memory is not None
        dtype = offered[0].dtype

        def take(tables: list[torch.Tensor]) -> None:
            longest = min(STRETCH, max((piece.numel for piece in pieces), default=0))
            scratch = self.stretches.take(longest, dtype)
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

        return memory.exchange(self.statistics.tag(label), label, offered, take, until_given=until_given)

    def _start_sent_sum(
        self,
        full: torch.Tensor,
        outgoing: torch.Tensor,
        bounds: Sequence[int],
        out: torch.Tensor,
        label: str,
        accumulate: bool,
    ) -> tuple[list[Started], Callable[[], None]]:
        """Send every other rank its chunk, receive the others' versions of ours, then add."""
        group, rank, tag, pool = self.group, self.rank, self.statistics.tag(label), self.statistics.pool
        assert group is not None
        works: list[Started] = []
        parts: list[torch.Tensor] = []
        for peer, (low, high) in enumerate(pairwise(bounds)):
            if peer == rank:
                parts.append(full[low:high])
                continue
            part = pool.take(out.numel(), outgoing.dtype)
            parts.append(part)
            if out.numel():
                works.append(Message(group.recv([part], peer, tag), label, self._names[peer]))
            if high > low:
                works.append(Message(group.send([outgoing[low:high]], peer, tag), label, self._names[peer]))

        def finish() -> None:
            sum_in_rank_order(parts, out, accumulate)
            for peer, part in enumerate(parts):
                if peer != rank:
                    pool.give(part)

        return works, finish

    # -- NCCL ----------------------------------------------------------------------------------------------------

    def _nccl_all_gather(self, full: torch.Tensor, bounds: Sequence[int], own: torch.Tensor, label: str) -> Pending:
        group = self.group
        assert group is not None
        if full.numel() == own.numel() * self.size:
            work = group._allgather_base(full, own)
        else:
            chunks = [full[low:high] for low, high in pairwise(bounds)]
            work = group.allgather([chunks], [own])
        return Pending(self.statistics, label, [work], None)

    def nccl_sum(self, full: torch.Tensor, bounds: Sequence[int], own: torch.Tensor, label: str) -> dist.Work:
        """Over NCCL: begin to sum this rank's chunk of ``full`` into ``own``, which may be a part of it."""
        group = self.group
        assert group is not None
        self.statistics.count(label, (full.numel() - own.numel()) * full.element_size())
        if full.numel() == own.numel() * self.size:
            return group._reduce_scatter_base(own, full, dist.ReduceScatterOptions())
        return group.reduce_scatter([own], [[full[low:high] for low, high in pairwise(bounds)]])


_live: weakref.WeakSet[Channel] = weakref.WeakSet()


def drain_channels(timeout_s: float | None) -> None:
    """At the end of the process: finish everything in flight; with None, forget it. No call can follow."""
    if timeout_s is not None:
        close_all(timedelta(seconds=_EXIT_READ_TIMEOUT_S))
    for channel in tuple(_live):
        channel.drain(timeout_s)


def nothing() -> None:
    pass


def store(value: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(value)
    elif value.data_ptr() != out.data_ptr():
        out.copy_(value)


def sum_in_rank_order(parts: list[torch.Tensor], out: torch.Tensor, accumulate: bool) -> None:
    """``out`` (+)= parts[0] + parts[1] + ..., added in this order in fp32. Overwrites received parts as scratch.

    At most one part is this rank's own, and it may be ``out`` itself: it is never used as scratch.
    """
    if len(parts) == 1:
        store(parts[0], out, accumulate)
        return
    if len(parts) == 2 and not accumulate:
        torch.add(parts[0], parts[1], out=out)
        return
    received = parts[0] if parts[0].data_ptr() != out.data_ptr() else parts[1]
    if received.dtype == torch.float32:
        scratch = torch.add(parts[0], parts[1], out=received)
    else:
        scratch = parts[0].float().add_(parts[1])
    for part in parts[2:]:
        scratch.add_(part)
    store(scratch, out, accumulate)
