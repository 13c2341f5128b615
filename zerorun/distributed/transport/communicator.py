"""Communication: the collectives of one engine, over the axes of its topology; joining and leaving the process group.

[Note: pending work and the end of a process]
gloo's threads drop the last references to tensors a little after the main thread has seen the result. A thread that does
so while the interpreter goes down is ended in the middle of C++ code, and the process aborts: its exit code is 134 and
not that of the error. So ``shutdown`` (called at exit) finishes what is in flight and then drops every process group,
which joins its threads. After an unhandled exception peers may never answer. Then it waits for nothing in flight, gives
the threads a moment to end, and ends the process without the interpreter if they do not.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...errors import OrderError, TopologyError
from ..layout import Piece
from ..topology import Topology
from ..transports import PEER_MEMORY, reads_parts
from ..waits import waiting
from ..wire import gather_values
from .channel import (
    UNANSWERED,
    Channel,
    CommunicationStatistics,
    Pending,
    Waiter,
    drain_channels,
    nothing,
    store,
)
from .mapped_shards import MappedShards
from .peer_memory import PeerEnded, PeerMemory, PeerMemoryError

# Seconds that an exiting process gives collectives in flight to finish.
_EXIT_TIMEOUT_S = 10
# Seconds that the threads of process groups have to end after an unhandled exception.
_EXIT_FAILED_TIMEOUT_S = 2.0
# Seconds to look out for rank 0's rendezvous, and between two looks.
_LISTEN_TIMEOUT_S = 5.0
_LISTEN_RETRY_S = 0.01
_LOOPBACK = "127.0.0.1"
_BACKLOG = 2048  # ranks that may connect at once
_live: weakref.WeakSet[Communicator] = weakref.WeakSet()
# What this rank has given up waiting for. Threads of gloo may still be at it, with its memory.
_given_up: list[dist.Work] = []
_AGREEMENT = "{}: an agreement of ranks, as in step() or a barrier"
_owns_process_group = False


def default_device() -> torch.device:
    """The device of this rank: its GPU by LOCAL_RANK if there is one, else the CPU. ZERORUN_DEVICE overrides it."""
    wanted = os.environ.get("ZERORUN_DEVICE")
    if wanted:
        return torch.device(wanted)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


_BACKENDS = ("nccl", "gloo", "mpi", "ccl")  # that scripts name


def init_distributed(
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
    *,
    dist_backend: str | None = None,
    timeout: timedelta | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    dist_init_required: bool | None = None,
    config: Any = None,
) -> None:
    """Join the process group that the launcher describes in the environment; alone, make a group of one.

    The backend follows from the device. Scripts made for DeepSpeed may name one, first or as ``dist_backend``; it and the
    keywords after ``timeout`` have no effect. Understands ``zerorun`` and ``torchrun`` (RANK, WORLD_SIZE, ...), ``srun``
    (SLURM_*) and plain ``python``. Does nothing if torch.distributed is initialised. Raises TopologyError for a half-set
    environment.
    """
    global _owns_process_group
    if dist.is_initialized():
        return
    device = torch.device(device) if device is not None and device not in _BACKENDS else default_device()
    timeout_s = timeout.total_seconds() if timeout is not None else timeout_s
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, world_size, address = _rendezvous()
    limit = timedelta(seconds=timeout_s or 1800)
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": limit}
    local = _is_one_host(world_size, address)
    if local and sys.platform == "linux":
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if address is None:
        options["store"] = dist.HashStore()
    elif local and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        options["store"] = _loopback_store(rank, world_size, int(address.rpartition(":")[2]), limit)
    else:
        options["init_method"] = f"tcp://{address}"
        if rank:
            _await_listener(address)
    with waiting(f"the rendezvous of {world_size} ranks at {address or 'this process'}"):
        dist.init_process_group(_backends(device, world_size), **options)
    _owns_process_group = True


def _is_one_host(world_size: int, address: str | None) -> bool:
    """True if all ranks are certainly on this host, so that nothing has to listen for others."""
    if address is None or address.startswith(("127.", "localhost:", "::1:", "[::1]:")):
        return True
    env = os.environ
    if "WORLD_SIZE" in env:
        return env.get("LOCAL_WORLD_SIZE") == str(world_size)
    return env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1"


def _loopback_store(rank: int, world_size: int, port: int, timeout: timedelta) -> dist.Store:
    """Where ranks of one host meet. torch itself would listen on every interface of the host."""
    if rank:
        _await_listener(f"{_LOOPBACK}:{port}")
        return dist.TCPStore(_LOOPBACK, port, world_size, False, timeout)
    listener = None
    with contextlib.suppress(OSError):  # an earlier group of this process has it, and shares it; else torch says why not
        listener = socket.create_server((_LOOPBACK, port), backlog=_BACKLOG).detach()
    return dist.TCPStore(_LOOPBACK, port, world_size, True, timeout, multi_tenant=True, master_listen_fd=listener)


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
    failed = hasattr(sys, "last_value")  # an unhandled exception
    drain_channels(None if failed else _EXIT_TIMEOUT_S)
    if not (_live or _owns_process_group):
        return
    if not failed:
        _leave_groups()
    elif not _leaves_groups_soon():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130 if isinstance(sys.last_value, KeyboardInterrupt) else 1)


def _leave_groups() -> None:
    for communicator in list(_live):
        communicator.forget_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a group in a reference cycle keeps its threads


def _leaves_groups_soon() -> bool:
    """False if threads still wait for what may never come."""
    if Waiter.waiting() or not all(work.is_completed() for work in _given_up):
        return False
    leaving = threading.Thread(target=_leave_groups, name="zerorun leaves", daemon=True)
    try:
        leaving.start()
    except RuntimeError:  # some versions of Python start no thread at exit
        return False
    leaving.join(_EXIT_FAILED_TIMEOUT_S)
    return not leaving.is_alive()


atexit.register(shutdown)


class Communicator:
    """The collectives of one engine, over its topology.

    ``traffic`` counts calls and bytes sent by label. ``pool`` holds the receive buffers of reductions. Data flows between
    *data-parallel ranks*, those that have the same part of the model; decisions are made by all ranks of the world.
    ``model_axes``: channels of other axes, by name: over them ranks sum gradients that are summands on each.
    """

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        wire_dtype: torch.dtype = torch.float32,
        model_axes: dict[str, Channel] | None = None,
    ) -> None:
        self.topology, self.device, self.wire_dtype = topology, device, wire_dtype
        self.statistics = CommunicationStatistics()
        self.traffic, self.pool = self.statistics.traffic, self.statistics.pool
        self._world: dist.ProcessGroup | None = dist.group.WORLD
        self._data = topology.group("data") if topology.data_parallel_size > 1 else None
        self._shard = self._channel("shard", topology.shard_rank, topology.shard)
        self._replicate = self._channel("replicate", topology.replicate_rank, topology.replicate)
        self.model_axes = model_axes or {}
        self._agreements = 0  # so far: what goes through the process group, in the same order on all ranks
        _live.add(self)

    def _channel(self, axis: str, rank: int, size: int) -> Channel:
        group = self.topology.group(axis) if size > 1 else None
        return Channel(axis, group, rank, size, self.device, self.statistics)

    # -- asynchronous, on flat buffers ---------------------------------------------------------------------------

    def all_gather(
        self, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor | None = None
    ) -> Pending:
        """Fill ``full`` [bounds[-1]] from the shards of the shard axis. ``source``: this rank's, if not in place."""
        return self._shard.all_gather(full, bounds, label, source)

    def map_shards(self, sizes: Sequence[int]) -> MappedShards | None:
        """Room for shards of ``sizes`` bytes in memory that ranks share; None where they cannot. All data-parallel ranks
        must call it."""
        return self._shard.map_shards(sizes)

    def expose(self, shards: Sequence[torch.Tensor]) -> None:
        """``shards``, the sources of gathers, change only after ``fence``: others may read them without asking."""
        self._shard.expose(shards)

    def reduce_scatter(
        self, full: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str, *, accumulate: bool
    ) -> Pending:
        """Sum ``full`` over all data-parallel ranks; this rank's shard goes into ``out``, or is added to it.

        Reduce-scatter over the shard axis, then all-reduce over the replicate axis. ``full`` and ``out`` are fp32;
        ``out`` may be this rank's part of ``full`` if not ``accumulate``. What is sent has dtype ``wire_dtype``.
        """
        if self._shard.nccl:
            return self._nccl_reduce_scatter(full, bounds, out, label, accumulate)
        if full.is_cuda:
            return self._host_reduce_scatter(full, bounds, out, label, accumulate)
        return self._p2p_reduce_scatter(full, bounds, out, label, accumulate)

    def sum_parts(
        self, parts: Sequence[torch.Tensor], pieces: Sequence[Piece], out: torch.Tensor, label: str, *, accumulate: bool
    ) -> Pending:
        """``reduce_scatter`` of fp32 tensors [numel] that lie apart, if ``reads_parts``: nothing is packed.

        ``pieces``: what of them is this rank's, and where in ``out`` it goes. They must not change before ``wait``.
        """
        return self._shard.sum_parts(parts, pieces, out, label, accumulate=accumulate)

    @property
    def buffer_bytes(self) -> int:
        """Of the buffers into which reductions receive."""
        return self.pool.bytes + self._shard.stretches.bytes + self._replicate.stretches.bytes

    @property
    def reads_peers(self) -> bool:
        """True if the ranks that shard copy from one another's memory by themselves: nothing moves while they compute."""
        return self._shard.memory is not None

    @property
    def transport(self) -> str:
        """NCCL, GLOO or PEER_MEMORY: of gradients and parameters."""
        return PEER_MEMORY if self._replicate.memory is not None else self._shard.transport

    @property
    def reads_parts(self) -> bool:
        """True if ``sum_parts`` can replace ``reduce_scatter``."""
        return reads_parts(self._shard.transport, self.topology, self.device.type, self.wire_dtype)

    def peer_reader(self) -> Callable[[int, int, torch.Tensor], None] | None:
        """How to fill a tensor from an address of another rank that shards with this one; None if that cannot be done."""
        memory, ranks = self._shard.memory, self.topology.ranks_along("shard")
        if memory is None:
            return None
        return lambda rank, address, out: memory.read_tensor(ranks.index(rank), address, out)

    # -- blocking, small -----------------------------------------------------------------------------------------

    def control_sum(self, values: torch.Tensor, label: str = "control") -> torch.Tensor:
        """Sum a small CPU tensor over all ranks of the world, in place. For decisions, not for data."""
        if self.topology.world_size > 1:
            self.statistics.count(label, values.numel() * values.element_size())
            self._finish_control(dist.all_reduce(values, group=self._world, async_op=True), label)
        return values

    def data_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small CPU tensor over the data-parallel ranks, in place."""
        if self._data is not None:
            self.statistics.count("control", values.numel() * values.element_size())
            self._finish_control(dist.all_reduce(values, group=self._data, async_op=True))
        return values

    def data_gather(self, values: torch.Tensor, timeout_s: float | None = None) -> list[torch.Tensor]:
        """The data-parallel ranks' small CPU tensors, by rank. Raises OrderError if a rank does not answer in time."""
        if self._data is None:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self.topology.data_parallel_size)]
        self.statistics.count("control", values.numel() * values.element_size())
        work = dist.all_gather(gathered, values, group=self._data, async_op=True)
        self._finish_control(work, timeout_s=timeout_s)
        return gathered

    def stage_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The small CPU tensors of all ranks of this pipeline stage: data-parallel ranks one after the other, for each
        tensor rank."""
        found, channel = self.data_gather(values), self.model_axes.get("tensor")
        if channel is None or channel.size == 1:
            return found
        mine = torch.cat(found).to(channel.device)
        table = torch.empty(mine.numel() * channel.size, dtype=mine.dtype, device=mine.device)
        bounds = range(0, table.numel() + 1, mine.numel())
        channel.all_gather(table, bounds, "control", mine, until_given=True).wait()
        return list(table.cpu().split(values.numel()))

    def control_objects(self, value: Any) -> list[Any]:
        """All ranks' values (see wire.py), by rank of the world. Set-up and error paths only."""
        return self._objects(value, self._world)

    def data_objects(self, value: Any) -> list[Any]:
        """The data-parallel ranks' values (see wire.py), by rank. Set-up and error paths only."""
        return [value] if self._data is None else self._objects(value, self._data)

    def _objects(self, value: Any, group: dist.ProcessGroup | None) -> list[Any]:
        self._finish_control(dist.barrier(group=group, async_op=True))
        with waiting(_AGREEMENT.format("control")):
            return gather_values(value, group)

    def of_all_stages(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The named CPU tensors of all pipeline stages, in their order; of one name, the first stage's. Collective."""
        if self.topology.pipe == 1:
            return own
        group = self.topology.group("pipe")
        found: dict[str, torch.Tensor] = {}
        described = {name: (tensor.shape, tensor.dtype) for name, tensor in own.items()}
        for stage, names in enumerate(self._objects(described, group)):
            for name, (shape, dtype) in names.items():
                if name in found:
                    continue
                here = stage == self.topology.pipe_rank
                flat = found[name] = own[name].contiguous() if here else torch.empty(shape, dtype=dtype)
                if flat.numel():
                    sent = flat.view(-1).view(torch.uint8)  # gloo does not know all dtypes
                    self.statistics.count("whole weights over stages", sent.numel())
                    self._finish_control(dist.broadcast(sent, group=group, group_src=stage, async_op=True))
        return found

    def barrier(self) -> None:
        """Return when all ranks of the world have called it."""
        self._finish_control(dist.barrier(group=self._world, async_op=True))

    def finish(self, message: Future[None], label: str) -> None:
        """Wait for a message between two ranks, and meanwhile for nobody to wait for this one. Raises OrderError."""
        try:
            with waiting(f"pipeline: {label}"):
                if memories := self._memories():
                    memories[0].wait_until(message.done)
                message.result()
        except RuntimeError as error:
            raise OrderError(UNANSWERED.format(label, dist.get_rank(), error)) from error

    def _finish_control(self, work: dist.Work, label: str = "control", timeout_s: float | None = None) -> None:
        """Wait for ``work``, and meanwhile for nobody to wait for this rank. Raises OrderError."""
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        memory = next(iter(self._memories()), None)
        self._agreements += 1
        number, missing = self._agreements, None
        if memory is not None:
            memory.note_agreement(number)
            missing = partial(memory.absent_from_agreement, number)
        try:
            with waiting(_AGREEMENT.format(label), missing):
                if memory is not None:
                    with contextlib.suppress(PeerEnded):  # it may have done its part
                        memory.wait_until(work.is_completed, timeout)
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timeout)
        except RuntimeError as error:
            _given_up.append(work)
            raise OrderError(UNANSWERED.format("control", dist.get_rank(), error)) from error

    def _channels(self) -> tuple[Channel, ...]:
        return (self._shard, self._replicate, *self.model_axes.values())

    def _memories(self) -> list[PeerMemory]:
        return [channel.memory for channel in self._channels() if channel.memory is not None]

    def fence(self) -> None:
        """Return when no other rank reads buffers of this one any more: shards may change. All ranks must call it."""
        try:
            for channel in self._channels():
                channel.fence()
        except PeerMemoryError as error:
            raise OrderError(UNANSWERED.format("before an update", dist.get_rank(), error)) from error

    def broadcast(self, tensor: torch.Tensor, source: int, label: str) -> None:
        """Give every data-parallel rank the contiguous ``tensor`` of number ``source`` among them."""
        if self._data is not None and tensor.numel():
            self.statistics.count(label, tensor.numel() * tensor.element_size())
            with waiting(label):
                dist.broadcast(tensor, group=self._data, group_src=source)

    def forget_groups(self) -> None:
        """Let go of the process groups. No collective can follow."""
        self._world = self._data = None
        self.topology.forget_groups()

    # -- sums over several axes ----------------------------------------------------------------------------------

    def sum_over_axis(self, parts: Sequence[torch.Tensor], axis: str) -> None:
        """Sum fp32 tensors [numel] over the ranks of ``beyond[axis]``, in place and in one message."""
        channel = self.model_axes[axis]
        flat = torch.cat(list(parts))
        total = channel.sum_of(flat, f"gradients over {channel.axis}").split([part.numel() for part in parts])
        torch._foreach_copy_(list(parts), list(total))

    def _p2p_reduce_scatter(
        self, full: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str, accumulate: bool
    ) -> Pending:
        if self.topology.data_parallel_size == 1:
            store(full, out, accumulate)
            return Pending(self.statistics, label, [], None)
        start = partial(self._shard.start_sum, full, bounds, label=label, wire_dtype=self.wire_dtype)
        if self.topology.replicate == 1:
            works, finish = start(out=out, accumulate=accumulate)
            return Pending(self.statistics, label, works, finish)
        own = self.pool.take(out.numel(), torch.float32)
        if self._shard.size > 1:
            works, finish = start(out=own, accumulate=False)
        else:
            own.copy_(full)
            works, finish = [], nothing

        def finish_over_replicas() -> None:
            finish()
            self._replicate.all_reduce(own, f"{label} over replicas", self.wire_dtype)
            store(own, out, accumulate)
            self.pool.give(own)

        return Pending(self.statistics, label, works, finish_over_replicas)

    def _host_reduce_scatter(
        self, full: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str, accumulate: bool
    ) -> Pending:
        """Two ranks on one GPU: through host memory."""
        rank = self._shard.rank
        host = full.to("cpu")
        own = host[bounds[rank] : bounds[rank + 1]]
        inner = self._p2p_reduce_scatter(host, bounds, own, label, False)

        def finish() -> None:
            inner.wait()
            store(own.to(out.device), out, accumulate)

        return Pending(self.statistics, label, [], finish)

    def _nccl_reduce_scatter(
        self, full: torch.Tensor, bounds: Sequence[int], out: torch.Tensor, label: str, accumulate: bool
    ) -> Pending:
        wire = full if self.wire_dtype == full.dtype else full.to(self.wire_dtype)
        rank = self._shard.rank
        own = wire[bounds[rank] : bounds[rank + 1]]
        works = [self._shard.nccl_sum(wire, bounds, own, label)] if self._shard.size > 1 else []

        def finish() -> None:
            self._replicate.all_reduce(own, f"{label} over replicas")
            store(own, out, accumulate)

        return Pending(self.statistics, label, works, finish)
