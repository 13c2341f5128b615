"""Communicator: the collectives of one engine, over the axes of its topology, and the channels of its parameters.

[Note: sums in fp16]
Gradients travel undivided: see [Note: one divisor] in engine/accumulation.py. In fp16, which ends at 65,504, the sum over
the micro-batches of a step could overflow where each of them does not. So gradients are multiplied by 1/p before they are
rounded to fp16, and by p when they are summed. p is the smallest power of two that is not below the accumulation steps:
apart from that rounding, no digit changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

import torch

from ...errors import OrderError
from ..device import Arrival, queues
from ..replication import Family
from ..secondary_partition import Secondary
from ..topology import Topology, everyone
from ..transport_kinds import PEER_MEMORY, reads_parts
from .connect import connect_axis
from .control import Control
from .peer_memory import PeerMemoryError
from .quantised_sum import Codes, reduce_scatter_codes
from .second_copy import SecondCopy
from .statistics import CommunicationStatistics, Pending, unanswered
from .sums import store
from .transport import Transport
from .world import uses_nccl

_live: weakref.WeakSet[Communicator] = weakref.WeakSet()


class Channels:
    """``shard``: between the ranks that divide the states of a family. ``replicate``: between those with the same shard.

    What is sent of gradients has dtype ``wire_dtype``. What needs the shard axis alone is asked of ``shard`` itself.
    """

    def __init__(self, shard: Transport, replicate: Transport, wire_dtype: torch.dtype) -> None:
        self.shard, self.replicate, self._wire_dtype = shard, replicate, wire_dtype
        self._raised = 1.0  # by this factor when they have been summed: see [Note: sums in fp16]

    def expect_micro_batches(self, count: int) -> None:
        """Let gradients that are sums over ``count`` micro-batches fit the dtype in which they are sent."""
        self._raised = 2.0 ** (count - 1).bit_length() if self._wire_dtype == torch.float16 else 1.0

    @property
    def is_first(self) -> bool:
        """True if this is the rank whose values count where ranks have different ones."""
        return self.shard.rank == self.replicate.rank == 0

    def broadcast(self, tensor: torch.Tensor, label: str) -> None:
        """Replace ``tensor``, in place, by that of the family's first rank. For set-up."""
        self.replicate.broadcast(tensor, label)
        self.shard.broadcast(tensor, label)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        bounds: Sequence[int],
        out: torch.Tensor,
        label: str,
        *,
        accumulate: bool,
        codes: Codes | None = None,
    ) -> Pending:
        """Sum ``full`` over all ranks of the family; this rank's shard goes into ``out``, or is added to it.

        Reduce-scatter over the shard axis, then all-reduce over the replicate axis. ``full`` and ``out`` are fp32;
        ``out`` may be this rank's part of ``full`` if not ``accumulate``. What is sent has dtype ``wire_dtype``; with
        ``codes``, it is those over the shard axis. What is in ``full`` afterwards is of no use.
        """
        statistics, raised = self.shard.statistics, self._raised
        whole = self.replicate.size == 1 and (raised == 1.0 or self.shard.size == 1 or codes is not None)
        own = out if whole else full[bounds[self.shard.rank] : bounds[self.shard.rank + 1]]
        adds = accumulate and whole
        if codes is not None:
            inner = reduce_scatter_codes(self.shard, codes, full, own, label, accumulate=adds)
        else:
            if not whole and raised != 1.0:
                full.mul_(1.0 / raised)
            inner = self.shard.reduce_scatter(full, bounds, own, label, accumulate=adds, wire_dtype=self._wire_dtype)
        if whole:
            return inner
        over_replicas = f"{label} over replicas"
        if codes is None:
            total = self.replicate.sum_after(inner, own, over_replicas, self._wire_dtype)
        else:  # which are added up by the program, when it waits
            total = Pending(statistics, over_replicas, [inner], partial(self._sum_over_replicas, own, over_replicas))
        return Pending(statistics, label, [total], lambda: store(own, out, accumulate, raised), inner.go_on)

    def _sum_over_replicas(self, decoded: torch.Tensor, label: str) -> None:
        """Sum what was ``decoded`` from codes over replicas, in place, times 1/p: it comes undivided."""
        if self._raised != 1.0:
            decoded.mul_(1.0 / self._raised)
        self.replicate.all_reduce(decoded, label, self._wire_dtype)

    # -- memory that ranks read of one another -------------------------------------------------------------------

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers into which sums receive, beside those that all transports of an engine share."""
        return self.shard.buffer_bytes + self.replicate.buffer_bytes

    def peer_reader(self) -> Callable[[int, int, torch.Tensor], None] | None:
        """A function that fills a tensor from an address of a rank of the shard axis, by its number in the world; None if
        there is none."""
        memory = self.shard.memory
        if memory is None:
            return None
        names = self.shard.names
        return lambda rank, address, out: memory.read_tensor(names.index(rank), address, out)


class Communicator:
    """The collectives of one engine, over its topology.

    Shards and gradients flow through the channels of their family (``of``), between ranks that have the same part of the
    model. ``control`` is for decisions. ``traffic`` counts calls and bytes sent by label. ``model_axes``: transports of
    other axes, by name: over them ranks sum gradients that are summands on each. ``secondary``: which ranks have a second
    copy of the weights, if they keep one. ``queues``: ``device`` does its work asynchronously.
    """

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        wire_dtype: torch.dtype = torch.float32,
        model_axes: dict[str, Transport] | None = None,
        secondary: Secondary | None = None,
    ) -> None:
        self.topology, self.device, self.wire_dtype = topology, device, wire_dtype
        self.queues = queues(device)
        self.statistics = CommunicationStatistics()
        self.traffic = self.statistics.traffic
        self.fences = 0  # so many: shards have not changed as long as this has not
        self.edits = 0  # and so many besides those of updates: nor have those that are not trained
        self._uploads: dict[int, Arrival] = {}  # the last copy of each host shard, by its address
        families = list(Family) if topology.expert > 1 else [Family.DENSE]
        self._channels = {family: self._connect_family(family) for family in families}
        self.dense = self.of(Family.DENSE)
        self.second_copy = None if secondary is None else SecondCopy(secondary, self.dense.shard, topology)
        self.model_axes = model_axes or {}
        self._stage: Transport | None = None  # made when it is needed
        self._world = self._connect_world()
        memory = next((axis.memory for axis in self._axes() if axis.memory is not None), None)
        self.control = Control(topology, self.statistics, memory)
        _live.add(self)

    def _connect_family(self, family: Family) -> Channels:
        shard, replicate = self._connect(family.shard_axis), self._connect(family.replicate_axis)
        return Channels(shard, replicate, self.wire_dtype)

    def _connect(self, axis: str) -> Transport:
        ranks = self.topology.ranks_along(axis)
        group = self.topology.group(axis) if len(ranks) > 1 else None
        return connect_axis(axis, group, ranks.index(self.topology.rank), len(ranks), self.device, self.statistics)

    def _connect_world(self) -> Transport | None:
        """All ranks, if NCCL serves them: over the shard axis, if that is all of them."""
        topology, group = self.topology, everyone()
        if topology.world_size == 1 or not uses_nccl(self.device, group):
            return None
        if topology.shard == topology.world_size:
            return self.dense.shard
        return connect_axis("world", group, topology.rank, topology.world_size, self.device, self.statistics)

    def _axes(self) -> tuple[Transport, ...]:
        stage = [] if self._stage is None or self._stage is self.dense.shard else [self._stage]
        near = [] if self.second_copy is None else [self.second_copy.near]
        pairs = [axis for channels in self._channels.values() for axis in (channels.shard, channels.replicate)]
        return (*pairs, *near, *self.model_axes.values(), *stage)

    def stage(self) -> Transport:
        """The ranks that have one copy of a pipeline stage's states between them, tensor ranks side by side.

        The first call connects them: all ranks must make it.
        """
        topology = self.topology
        if self._stage is None and topology.tensor == 1:
            self._stage = self.dense.shard
        elif self._stage is None:
            self._stage = self._connect("stage")
        return self._stage

    # -- flat tensors --------------------------------------------------------------------------------------------

    def of(self, family: Family) -> Channels:
        """The channels of a family of parameters."""
        return self._channels[family]

    def expect_micro_batches(self, count: int) -> None:
        """From now on sums of gradients are over ``count`` micro-batches. All ranks must call it before they reduce any."""
        for channels in self._channels.values():
            channels.expect_micro_batches(count)

    def sum_over_axis(self, parts: Sequence[torch.Tensor], axis: str, label: str = "") -> None:
        """Sum fp32 tensors [numel] over the ranks of ``axis``, in place and in one message.

        ``axis``: shard, replicate, or one of ``model_axes``. ``label``: default, that of gradients.
        """
        transport = {"shard": self.dense.shard, "replicate": self.dense.replicate, **self.model_axes}[axis]
        flat = torch.cat(list(parts))
        total = transport.sum_of(flat, label or f"gradients over {transport.axis}").split([part.numel() for part in parts])
        torch._foreach_copy_(list(parts), list(total))

    @property
    def sums_on_device(self) -> bool:
        """True if ``sum_on_device`` can be used: the devices of all ranks sum without their programs."""
        return self.queues and (self._world is not None or self.topology.world_size == 1)

    def sum_on_device(self, numbers: torch.Tensor, label: str) -> torch.Tensor:
        """The sum of ``numbers`` [n] over all ranks of the world, as a new tensor on the device, which adds by itself."""
        return numbers.clone() if self._world is None else self._world.sum_of(numbers, label)

    def stage_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The small CPU tensors of all ranks of this pipeline stage: data-parallel ranks one after the other, for each
        tensor rank."""
        found, tensor = self.control.data_gather(values), self.model_axes.get("tensor")
        if tensor is None or tensor.size == 1:
            return found
        mine = torch.cat(found).to(tensor.device)
        table = torch.empty(mine.numel() * tensor.size, dtype=mine.dtype, device=mine.device)
        bounds = range(0, table.numel() + 1, mine.numel())
        tensor.all_gather(table, bounds, "control", mine, until_given=True).wait()
        return list(table.cpu().split(values.numel()))

    # -- the order of collectives, where nothing else shows that it is the same ----------------------------------

    def told_order(self) -> list[float]:
        """The numbers that this rank adds to the sum of a step, for ``refuse_other_order``. All ranks add equally many."""
        if not self.dense.shard.queues:
            return []
        parts, checksum = self.topology.pipe * self.topology.tensor, float(self.statistics.order.checksum)
        here = self.topology.pipe_rank * self.topology.tensor + self.topology.tensor_rank
        mine = [checksum * (part == here) for part in range(parts)]
        return [*mine, *(value * value for value in mine)]

    def refuse_other_order(self, sums: Sequence[float]) -> None:
        """Raise OrderError, on all ranks alike, unless those with the same part of the model made the same collectives.

        Since the last call. ``sums``: of what ``told_order`` has given, over all ranks. Numbers are equal if the square of
        their sum is the sum of their squares, times their count.
        """
        parts, each = len(sums) // 2, self.topology.data_size
        same = all(int(sums[part]) ** 2 == each * int(sums[parts + part]) for part in range(parts))
        labels = [] if same else list(self.statistics.order.labels)
        self.statistics.order.begin()
        if not same:
            raise OrderError(self._name_difference(self.control.values(labels)))

    def _name_difference(self, found: Sequence[list[str]]) -> str:
        """``found``: the labels, by rank of the world."""
        for rank, labels in enumerate(found):
            place = self.topology.coordinate(rank)._replace(replicate=0, shard=0)
            first = self.topology.rank_at(**place._asdict())
            pairs = zip_longest(found[first], labels, fillvalue="nothing")
            for number, (one, other) in enumerate(pairs):
                if one != other:
                    return (
                        f"ranks made different collectives in this step: number {number} was {one!r} on rank {first} and "
                        f"{other!r} on rank {rank}. What they moved is mixed up; the weights are those before this step. "
                        "Remedy: let all ranks run the same parts of the model in the same order, and load a checkpoint."
                    )
        return "ranks made different collectives in this step. Remedy: let all ranks run the same parts of the model."

    # -- memory that ranks read of one another -------------------------------------------------------------------

    @property
    def transport(self) -> str:
        """How gradients and parameters travel: NCCL, GLOO or PEER_MEMORY."""
        return PEER_MEMORY if self.dense.replicate.memory is not None else self.dense.shard.name

    @property
    def reads_peers(self) -> bool:
        """True if ranks of the shard axis read one another's memory: then nothing moves while they compute."""
        return self.dense.shard.memory is not None

    @property
    def reads_parts(self) -> bool:
        """True if ``sum_parts`` can replace ``reduce_scatter``."""
        return reads_parts(self.dense.shard.name, self.topology, self.device.type, self.wire_dtype)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers into which reductions receive."""
        return self.statistics.pool.bytes + sum(channels.buffer_bytes for channels in self._channels.values())

    def reads(self, shard: torch.Tensor, until: Arrival) -> None:
        """A copy to the device, over ``until`` then, reads ``shard`` in host memory: see ``fence``."""
        self._uploads[shard.data_ptr()] = until

    def fence(self, *, update: bool = False) -> None:
        """Return when nobody reads buffers of this rank any more: shards may change. All ranks must call it.

        ``update``: only those that are trained will.
        """
        self.fences += 1
        self.edits += not update
        for arrival in self._uploads.values():
            arrival.synchronize()
        self._uploads.clear()
        try:
            for axis in self._axes():
                axis.fence()
        except PeerMemoryError as error:
            raise unanswered("before an update", self.topology.rank, error) from error

    def forget_groups(self) -> None:
        """Let go of the process groups. No collective can follow."""
        self.control.forget_groups()
        self.topology.forget_groups()


def has_communicators() -> bool:
    """True if an engine of this process still exists."""
    return bool(_live)


def forget_all_groups() -> None:
    """Let every engine of this process let go of its process groups."""
    for communicator in list(_live):
        communicator.forget_groups()
