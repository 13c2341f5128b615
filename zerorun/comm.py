"""Communication: the only file that calls collectives. In place on flat buffers, labelled, counted.

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

[Note: pending work and the end of a process]
gloo's threads drop the last references to tensors a little after the main thread has seen the result. A thread that does
so while the interpreter goes down is ended in the middle of C++ code, and the process aborts. So ``shutdown`` (called at
exit) finishes what is in flight and then drops every process group, which joins its threads.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import socket
import sys
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from .errors import OrderError, TopologyError
from .peer_memory import Exchange, PeerEnded, PeerMemory, PeerMemoryError
from .topology import Topology
from .zero.layout import Piece

# Seconds that an exiting process gives collectives in flight to finish, and others to read what it offers.
_EXIT_TIMEOUT_S = 10
_EXIT_READ_TIMEOUT_S = 60
# Seconds to look out for rank 0's rendezvous, and between two looks.
_LISTEN_TIMEOUT_S = 5.0
_LISTEN_RETRY_S = 0.01
# Elements that a sum reads from a peer at a time: few enough to be in the processor's cache when they are added.
STRETCH = 131072
# How ranks exchange gradients and parameters.
NCCL, GLOO, PEER_MEMORY = "nccl", "gloo", "peer memory"
_UNANSWERED = (
    "collective '{}' could not be completed on rank {}: another rank ended or did not take part. "
    "Look at the first failing rank's own error. ({})"
)
_live: weakref.WeakSet[Communicator] = weakref.WeakSet()
_owns_process_group = False


def default_device() -> torch.device:
    """The device of this rank: its GPU by LOCAL_RANK if there is one, else the CPU. ZERORUN_DEVICE overrides it."""
    wanted = os.environ.get("ZERORUN_DEVICE")
    if wanted:
        return torch.device(wanted)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def init_distributed(device: torch.device | None = None, timeout_s: float | None = None) -> None:
    """Join the process group that the launcher describes in the environment; alone, make a group of one.

    Understands ``zerorun`` and ``torchrun`` (RANK, WORLD_SIZE, ...), ``srun`` (SLURM_*) and plain ``python``.
    Does nothing if torch.distributed is initialised. Raises TopologyError for a half-set environment.
    """
    global _owns_process_group
    if dist.is_initialized():
        return
    device = device or default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, world_size, address = _rendezvous()
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=timeout_s or 1800)}
    if address is None:
        options["store"] = dist.HashStore()
    else:
        options["init_method"] = f"tcp://{address}"
        if rank:
            _await_listener(address)
    dist.init_process_group(_backends(device, world_size), **options)
    _owns_process_group = True


def _await_listener(address: str) -> None:
    """Return when rank 0 listens, or soon: torch itself would try again only after about 0.6 s."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _LISTEN_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, int(port)), timeout=_LISTEN_TIMEOUT_S).close()
        except ConnectionRefusedError:
            time.sleep(_LISTEN_RETRY_S)
        except OSError:  # torch's own words for it are as good
            return
        else:
            return


def _backends(device: torch.device, world_size: int) -> str:
    """Which backend serves which device. NCCL cannot serve two ranks that share one GPU; gloo can."""
    if device.type != "cuda":
        return "gloo"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("SLURM_NTASKS_PER_NODE", "1")))
    shared = world_size > 1 and local > torch.cuda.device_count()
    return "cpu:gloo,cuda:gloo" if shared or not dist.is_nccl_available() else "cpu:gloo,cuda:nccl"


def _rendezvous() -> tuple[int, int, str | None]:
    """(rank, world size, "host:port" or None for a process on its own), from the environment."""
    env = os.environ
    if "WORLD_SIZE" in env or "RANK" in env:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            raise TopologyError(
                f"the environment describes a distributed job but lacks {', '.join(missing)}. "
                "Remedy: start with `zerorun`, `torchrun` or `srun`, or unset RANK and WORLD_SIZE for one process."
            )
        return int(env["RANK"]), int(env["WORLD_SIZE"]), f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    if int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
        host = env.get("MASTER_ADDR") or env.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
        port = env.get("MASTER_PORT") or str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000)
        os.environ.setdefault("RANK", env["SLURM_PROCID"])
        os.environ.setdefault("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), f"{host}:{port}"
    return 0, 1, None


def shutdown() -> None:
    """Finish what is in flight and leave the process groups. Called at exit; afterwards engines are of no use."""
    failed = hasattr(sys, "last_value")  # an unhandled exception: peers may never answer, so do not wait for them
    communicators = list(_live)
    for communicator in communicators:
        communicator.drain(None if failed else _EXIT_TIMEOUT_S)
    if failed or not (communicators or _owns_process_group):
        return
    for communicator in communicators:
        communicator.forget_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a group in a reference cycle keeps its threads


atexit.register(shutdown)


class Pending:
    """One collective in flight. Keeps its buffers alive until ``wait`` has returned."""

    __slots__ = ("_communicator", "_finish", "_works", "done", "label")

    def __init__(
        self,
        communicator: Communicator,
        label: str,
        works: Sequence[dist.Work | Exchange],
        finish: Callable[[], None] | None,
    ) -> None:
        self._communicator = communicator
        self._works: Sequence[Any] = works
        self._finish = finish
        self.label = label
        self.done = False
        communicator.in_flight.add(self)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the result is in place. Raises OrderError, naming the collective, if a peer is gone."""
        if self.done:
            return
        try:
            for work in self._works:
                if timeout_s is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            self.done = True
            self._communicator.in_flight.discard(self)
            raise OrderError(_UNANSWERED.format(self.label, dist.get_rank(), error)) from error
        self.done = True
        self._communicator.in_flight.discard(self)
        if self._finish is not None:
            self._finish()
        self._works, self._finish = [], None


@dataclass
class Traffic:
    """What one label has cost on this rank so far."""

    calls: int = 0
    bytes: int = 0  # sent to other ranks


class BufferPool:
    """Scratch buffers that are used again and again, so that the steady state allocates nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []
        self.bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of ``numel`` elements; contents undefined. Give it back with ``give``."""
        size = numel * dtype.itemsize
        best = -1
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= size and (best < 0 or buffer.numel() < self._free[best].numel()):
                best = index
        if best >= 0:
            return self._free.pop(best)[:size].view(dtype)
        buffer = torch.empty(-(-size // 64) * 64, dtype=torch.uint8, device=self._device)
        self.bytes += buffer.numel()
        return buffer[:size].view(dtype)

    def give(self, view: torch.Tensor) -> None:
        """Return a buffer taken before."""
        storage = view.untyped_storage()
        self._free.append(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))


class Communicator:
    """The collectives of one engine, over its topology.

    ``traffic`` counts calls and bytes sent by label. ``pool`` holds the receive buffers of reductions.
    """

    def __init__(self, topology: Topology, device: torch.device, wire_dtype: torch.dtype = torch.float32) -> None:
        self.topology = topology
        self.device = device
        self.wire_dtype = wire_dtype
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.in_flight: set[Pending] = set()
        self.pool = BufferPool(torch.device("cpu"))
        self._issued: dict[str, int] = defaultdict(int)
        self._world: dist.ProcessGroup | None = dist.group.WORLD
        self._nccl = device.type == "cuda" and "nccl" in str(dist.get_backend_config(self._world))
        self._groups = {axis: topology.group(axis) for axis in ("shard", "replicate") if topology.size(axis) > 1}
        self._served: list[PeerMemory] = []
        self._memories = {axis: self._connect(axis) for axis in ("shard", "replicate")}
        _live.add(self)

    def _connect(self, axis: str) -> PeerMemory | None:
        size = self.topology.size(axis)
        if self._nccl or size == 1:
            return None

        def gather(value: Any) -> list[Any]:
            values: list[Any] = [None] * size
            dist.all_gather_object(values, value, group=self._groups[axis])
            return values

        return PeerMemory.connect(gather, self._rank(axis), size, self._served)

    def _rank(self, axis: str) -> int:
        return self.topology.shard_rank if axis == "shard" else self.topology.replicate_rank

    # -- asynchronous, on flat buffers ---------------------------------------------------------------------------

    def all_gather(
        self, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor | None = None
    ) -> Pending:
        """Fill ``full`` [bounds[-1]] from the shards of the shard axis. ``source``: this rank's, if not in place."""
        rank, degree = self.topology.shard_rank, self.topology.shard
        own = full[bounds[rank] : bounds[rank + 1]]
        if source is not None:
            own.copy_(source)
        if degree == 1:
            return Pending(self, label, [], None)
        self._count(label, own.numel() * (degree - 1) * own.element_size())
        if self._nccl:
            return self._nccl_all_gather(full, bounds, own, label)
        return self._p2p_all_gather("shard", full, bounds, label, source)

    def reduce_scatter(
        self, full: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str, *, accumulate: bool
    ) -> Pending:
        """Sum ``full`` over all data-parallel ranks; this rank's shard goes into ``out``, or is added to it.

        Reduce-scatter over the shard axis, then all-reduce over the replicate axis. ``full`` and ``out`` are fp32;
        ``out`` may be this rank's part of ``full`` if not ``accumulate``. What is sent has dtype ``wire_dtype``.
        """
        if self._nccl:
            return self._nccl_reduce_scatter(full, bounds, out, label, accumulate)
        if full.is_cuda:
            return self._host_reduce_scatter(full, bounds, out, label, accumulate)
        return self._p2p_reduce_scatter(full, bounds, out, label, accumulate)

    @property
    def reads_peers(self) -> bool:
        """True if the ranks that shard copy from one another's memory by themselves: nothing moves while they compute."""
        return self._memories["shard"] is not None

    @property
    def transport(self) -> str:
        """NCCL, GLOO or PEER_MEMORY."""
        if self._nccl:
            return NCCL
        return PEER_MEMORY if any(memory is not None for memory in self._memories.values()) else GLOO

    @property
    def reads_parts(self) -> bool:
        """True if ``sum_parts`` can replace ``reduce_scatter``."""
        direct = self.reads_peers and self.topology.replicate == 1 and self.device.type == "cpu"
        return direct and self.wire_dtype == torch.float32

    def peer_reader(self) -> Callable[[int, int, torch.Tensor], None] | None:
        """How to fill a tensor from an address of another rank that shards with this one; None if that cannot be done."""
        memory, first = self._memories["shard"], self.topology.rank - self.topology.shard_rank
        if memory is None:
            return None
        return lambda rank, address, out: memory.read_tensor(rank - first, address, out)

    # -- blocking, small -----------------------------------------------------------------------------------------

    def control_sum(self, values: torch.Tensor, label: str = "control") -> torch.Tensor:
        """Sum a small CPU tensor over all data-parallel ranks, in place. For decisions, not for data."""
        if self.topology.data_parallel_size > 1:
            self._count(label, values.numel() * values.element_size())
            self._finish_control(dist.all_reduce(values, group=self._world, async_op=True))
        return values

    def control_gather(self, values: torch.Tensor, timeout_s: float | None = None) -> list[torch.Tensor]:
        """All ranks' small CPU tensors, by rank. Raises OrderError if a rank does not answer in time."""
        size = self.topology.data_parallel_size
        gathered = [torch.empty_like(values) for _ in range(size)]
        self._count("control", values.numel() * values.element_size())
        work = dist.all_gather(gathered, values, group=self._world, async_op=True)
        self._finish_control(work, timeout_s)
        return gathered

    def control_objects(self, value: Any) -> list[Any]:
        """All ranks' picklable values, by rank. Set-up and error paths only."""
        gathered: list[Any] = [None] * self.topology.data_parallel_size
        self.barrier()
        dist.all_gather_object(gathered, value, group=self._world)
        return gathered

    def barrier(self) -> None:
        """Return when all data-parallel ranks have called it."""
        self._finish_control(dist.barrier(group=self._world, async_op=True))

    def _finish_control(self, work: dist.Work, timeout_s: float | None = None) -> None:
        """Wait for ``work``, and meanwhile for nobody to wait for this rank. Raises OrderError."""
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        try:
            if self._served:
                with contextlib.suppress(PeerEnded):  # it may have done its part
                    self._served[0].wait_until(work.is_completed, timeout)
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        except RuntimeError as error:
            raise OrderError(_UNANSWERED.format("control", dist.get_rank(), error)) from error

    def quiesce(self) -> None:
        """Return when no other rank reads buffers of this one any more: shards may change. All ranks must call it."""
        try:
            for memory in self._served:
                memory.finish()
        except PeerMemoryError as error:
            raise OrderError(_UNANSWERED.format("before an update", dist.get_rank(), error)) from error

    def broadcast(self, tensor: torch.Tensor, source: int, label: str) -> None:
        """Give every data-parallel rank the contiguous ``tensor`` of rank ``source``."""
        if self.topology.data_parallel_size > 1 and tensor.numel():
            self._count(label, tensor.numel() * tensor.element_size())
            dist.broadcast(tensor, source, group=self._world)

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _count(self, label: str, sent_bytes: int) -> None:
        entry = self.traffic[label]
        entry.calls += 1
        entry.bytes += sent_bytes

    def _tag(self, label: str) -> int:
        self._issued[label] += 1
        return (self._issued[label] % 1024) << 20 | zlib.crc32(label.encode()) & 0xFFFFF

    def drain(self, timeout_s: float | None) -> None:
        """Finish everything in flight; with None, forget it."""
        for pending in list(self.in_flight):
            if timeout_s is None:
                self.in_flight.discard(pending)
                continue
            try:
                pending.wait(timeout_s)
            except OrderError:
                self.in_flight.clear()
                return
        if timeout_s is not None:  # others may still read what this rank offered
            with contextlib.suppress(PeerMemoryError):
                for memory in self._served:
                    memory.finish(timedelta(seconds=_EXIT_READ_TIMEOUT_S))

    def forget_groups(self) -> None:
        """Let go of the process groups. No collective can follow."""
        self._groups.clear()
        self._world = None
        self.topology.forget_groups()

    # -- gloo: through peer memory on one host, else point to point -----------------------------------------------

    def _p2p_all_gather(
        self,
        axis: str,
        full: torch.Tensor,
        bounds: Sequence[int],
        label: str,
        source: torch.Tensor | None = None,
        *,
        until_given: bool = False,
    ) -> Pending:
        rank, tag, target = self._rank(axis), self._tag(label), full
        if full.is_cuda:  # two ranks on one GPU: through host memory
            full, source = target.to("cpu"), None
        chunks = [full[low:high] for low, high in pairwise(bounds)]

        def finish() -> None:
            if target.is_cuda:
                target.copy_(full)

        works: list[dist.Work | Exchange] = []
        if memory := self._memories[axis]:

            def take(tables: list[torch.Tensor]) -> None:
                for peer, chunk in enumerate(chunks):
                    if peer != rank and chunk.numel():
                        memory.read_tensor(peer, int(tables[peer][0]), chunk)

            own = chunks[rank] if source is None else source
            works.append(memory.exchange(tag, label, [own], take, until_given=until_given))
        else:
            group, others = self._groups[axis], [peer for peer in range(len(chunks)) if peer != rank]
            works += [group.recv([chunks[peer]], peer, tag) for peer in others if chunks[peer].numel()]
            works += [group.send([chunks[rank]], peer, tag) for peer in others if chunks[rank].numel()]
        return Pending(self, label, works, finish)

    def _start_sum(
        self, axis: str, full: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str, accumulate: bool
    ) -> tuple[list[dist.Work | Exchange], Callable[[], None]]:
        """Let ``out`` become, or grow by, the sum over ``axis`` of this rank's chunk of ``full``: (works, what then)."""
        rank, outgoing = self._rank(axis), full
        if self.wire_dtype != full.dtype:
            outgoing = self.pool.take(full.numel(), self.wire_dtype).copy_(full)
        self._count(label, (full.numel() - out.numel()) * outgoing.element_size())
        if self._memories[axis]:
            piece = Piece(0, bounds[rank], 0, out.numel())
            works, finish = [self._start_direct_sum(axis, [full], [outgoing], [piece], out, label, accumulate)], _nothing
        else:
            works, finish = self._start_sent_sum(axis, full, outgoing, bounds, out, label, accumulate)

        def finish_and_give() -> None:
            finish()
            if outgoing is not full:
                self.pool.give(outgoing)

        return works, finish_and_give

    def _start_direct_sum(
        self,
        axis: str,
        parts: Sequence[torch.Tensor],
        offered: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        out: torch.Tensor,
        label: str,
        accumulate: bool,
    ) -> dist.Work | Exchange:
        """Read and add bit by bit: what was read is added while it is in the processor's cache.

        ``parts`` are flat, as are ``offered``, what the others may read of them. ``pieces`` says what of them goes where
        in ``out``.
        """
        rank, memory = self._rank(axis), self._memories[axis]
        assert memory is not None
        dtype = offered[0].dtype

        def take(tables: list[torch.Tensor]) -> None:
            longest = min(STRETCH, max((piece.numel for piece in pieces), default=0))
            scratch = [self.pool.take(longest, dtype) for _ in tables[1:]]
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
                    _sum_in_rank_order(found, out[into : into + numel], accumulate)
            for buffer in scratch:
                self.pool.give(buffer)

        return memory.exchange(self._tag(label), label, offered, take, until_given=True)

    def _start_sent_sum(
        self,
        axis: str,
        full: torch.Tensor,
        outgoing: torch.Tensor,
        bounds: Sequence[int],
        out: torch.Tensor,
        label: str,
        accumulate: bool,
    ) -> tuple[list[dist.Work | Exchange], Callable[[], None]]:
        """Send every other rank its chunk, receive the others' versions of ours, then add."""
        group, rank, tag = self._groups[axis], self._rank(axis), self._tag(label)
        works: list[dist.Work | Exchange] = []
        parts: list[torch.Tensor] = []
        for peer, (low, high) in enumerate(pairwise(bounds)):
            if peer == rank:
                parts.append(full[low:high])
                continue
            part = self.pool.take(out.numel(), outgoing.dtype)
            parts.append(part)
            if out.numel():
                works.append(group.recv([part], peer, tag))
            if high > low:
                works.append(group.send([outgoing[low:high]], peer, tag))

        def finish() -> None:
            _sum_in_rank_order(parts, out, accumulate)
            for peer, part in enumerate(parts):
                if peer != rank:
                    self.pool.give(part)

        return works, finish

    def sum_parts(
        self, parts: Sequence[torch.Tensor], pieces: Sequence[Piece], out: torch.Tensor, label: str, *, accumulate: bool
    ) -> Pending:
        """``reduce_scatter`` of fp32 tensors [numel] that lie apart, if ``reads_parts``: nothing is packed.

        ``pieces``: what of them is this rank's, and where in ``out`` it goes. They must not change before ``wait``.
        """
        self._count(label, (sum(part.numel() for part in parts) - sum(p.numel for p in pieces)) * out.element_size())
        work = self._start_direct_sum("shard", parts, parts, pieces, out, label, accumulate)
        return Pending(self, label, [work], None)

    def _p2p_reduce_scatter(
        self, full: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str, accumulate: bool
    ) -> Pending:
        topology = self.topology
        if topology.data_parallel_size == 1:
            _store(full, out, accumulate)
            return Pending(self, label, [], None)
        if topology.replicate == 1:
            works, finish = self._start_sum("shard", full, bounds, out, label, accumulate)
            return Pending(self, label, works, finish)
        own = self.pool.take(out.numel(), torch.float32)
        if topology.shard > 1:
            works, finish = self._start_sum("shard", full, bounds, own, label, False)
        else:
            own.copy_(full)
            works, finish = [], _nothing

        def finish_over_replicas() -> None:
            finish()
            self._p2p_all_reduce(own, f"{label} over replicas")
            _store(own, out, accumulate)
            self.pool.give(own)

        return Pending(self, label, works, finish_over_replicas)

    def _p2p_all_reduce(self, buffer: torch.Tensor, label: str) -> None:
        """Sum a flat buffer over the replicate axis, in place: reduce-scatter, then all-gather."""
        rank, size = self.topology.replicate_rank, self.topology.replicate
        step = -(-buffer.numel() // size)
        bounds = [min(step * index, buffer.numel()) for index in range(size + 1)]
        own = buffer[bounds[rank] : bounds[rank + 1]]
        Pending(self, label, *self._start_sum("replicate", buffer, bounds, own, label, False)).wait()
        self._count(label, own.numel() * (size - 1) * own.element_size())
        self._p2p_all_gather("replicate", buffer, bounds, label, until_given=True).wait()

    def _host_reduce_scatter(
        self, full: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str, accumulate: bool
    ) -> Pending:
        """Two ranks on one GPU: through host memory."""
        rank = self.topology.shard_rank
        host = full.to("cpu")
        own = host[bounds[rank] : bounds[rank + 1]]
        inner = self._p2p_reduce_scatter(host, bounds, own, label, False)

        def finish() -> None:
            inner.wait()
            _store(own.to(out.device), out, accumulate)

        return Pending(self, label, [], finish)

    # -- NCCL ----------------------------------------------------------------------------------------------------

    def _nccl_all_gather(self, full: torch.Tensor, bounds: Sequence[int], own: torch.Tensor, label: str) -> Pending:
        group = self._groups["shard"]
        if full.numel() == own.numel() * self.topology.shard:
            work = group._allgather_base(full, own)
        else:
            chunks = [full[low:high] for low, high in pairwise(bounds)]
            work = group.allgather([chunks], [own])
        return Pending(self, label, [work], None)

    def _nccl_reduce_scatter(
        self, full: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str, accumulate: bool
    ) -> Pending:
        topology = self.topology
        wire = full if self.wire_dtype == full.dtype else full.to(self.wire_dtype)
        rank = topology.shard_rank
        own = wire[bounds[rank] : bounds[rank + 1]]
        works = []
        if topology.shard > 1:
            group = self._groups["shard"]
            self._count(label, (wire.numel() - own.numel()) * wire.element_size())
            if wire.numel() == own.numel() * topology.shard:
                works.append(group._reduce_scatter_base(own, wire, dist.ReduceScatterOptions()))
            else:
                chunks = [wire[low:high] for low, high in pairwise(bounds)]
                works.append(group.reduce_scatter([own], [chunks]))

        def finish() -> None:
            if topology.replicate > 1:
                size = topology.replicate
                self._count(f"{label} over replicas", 2 * own.numel() * (size - 1) // size * own.element_size())
                self._groups["replicate"].allreduce([own]).wait()
            _store(own, out, accumulate)

        return Pending(self, label, works, finish)


def _nothing() -> None:
    pass


def _store(value: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(value)
    elif value.data_ptr() != out.data_ptr():
        out.copy_(value)


def _sum_in_rank_order(parts: list[torch.Tensor], out: torch.Tensor, accumulate: bool) -> None:
    """``out`` (+)= parts[0] + parts[1] + ..., added in this order in fp32. Overwrites received parts as scratch.

    At most one part is this rank's own, and it may be ``out`` itself: it is never used as scratch.
    """
    if len(parts) == 1:
        _store(parts[0], out, accumulate)
        return
    if len(parts) == 2 and not accumulate:
        torch.add(parts[0], parts[1], out=out)
        return
    received = parts[0] if parts[0].data_ptr() != out.data_ptr() else parts[1]
    scratch = received if received.dtype == torch.float32 else torch.empty_like(out)
    torch.add(parts[0], parts[1], out=scratch)
    for part in parts[2:]:
        scratch.add_(part)
    _store(scratch, out, accumulate)
