"""Gather: bring the elements of a tensor together on the rank that writes it, one stretch at a time.

Ranks of one shard group on one host read each other's memory; other ranks are sent what they need. A rank issues all its
sends at the beginning, straight from the memory of its parts. Each is carried out when the writer asks for it, so the ranks
need not work in step. Beside its own state, a writer holds no more than one part of one tensor; or one whole tensor and a
part of it, if tensor parallelism divides the tensor so that rows of the parts have to be joined. What is on a GPU comes to
host memory one stretch at a time, or, if another rank writes it, at the beginning. So are fp32 values made of bf16 and what
it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from ..distributed.device import on_host
from ..distributed.waits import waiting
from ..ops.rounding import join
from .cuts import put
from .ranks import Ranks
from .tensorfile import dtype_of
from .write_plan import NARROW, Source, Task, WritePlan

_STRETCH = 4 << 20  # bytes: stays in the processor's cache from reading to writing

PeerReader = Callable[[int, int, torch.Tensor], None]  # (rank, one of this rank's shard group; address; tensor to fill)


class Collector:
    """Collects the tensors of ``plan`` from all ranks. ``memory``: (set, name) -> this rank's part, as a 1-D tensor.

    ``rests``: the same -> what a part in bf16 leaves out, where the tensor is in fp32. Parts and rests must be in host
    memory if others read them.
    """

    def __init__(
        self,
        plan: WritePlan,
        memory: Mapping[tuple[str, str], torch.Tensor],
        ranks: Ranks,
        read_peer: PeerReader | None,
        rests: Mapping[tuple[str, str], torch.Tensor] | None = None,
    ) -> None:
        self._memory, self._ranks, self._read_peer = memory, ranks, read_peer
        self._rests = {} if rests is None else rests
        # All ranks of a shard group have peer memory, or none has: sender and writer decide alike.
        self._read = set(ranks.topology.ranks_along("shard")) if read_peer is not None else set()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._joined = torch.empty(0, dtype=torch.uint8)  # a whole tensor
        self._sends = list(self._send_all(plan))

    def _send_all(self, plan: WritePlan) -> Iterator[object]:
        for task in plan.tasks:
            for source in task.sources:
                if source.rank == self._ranks.rank != task.writer and source.numel and task.writer not in self._read:
                    (whole,) = self._own(task, source, source.numel)
                    yield self._ranks.send(_on_host(whole), task.writer, task.number)

    def _own(self, task: Task, source: Source, length: int) -> Iterator[torch.Tensor]:
        """Yield what this rank has of ``source``, in stretches of at most ``length`` elements."""
        key, cut = (task.set, task.tensor.name), slice(source.offset, source.offset + source.numel)
        parts = self._memory[key][cut].split(length)
        if key not in self._rests:
            yield from parts
            return
        for part, rest in zip(parts, self._rests[key][cut].split(length), strict=True):
            yield join(part, rest)

    def stretches(self, task: Task) -> Iterator[torch.Tensor]:
        """Yield the flattened tensor of ``task``, which this rank writes, in 1-D pieces. Each is valid until the next."""
        if all(source.shard is None for source in task.sources):
            for source in task.sources:
                yield from self._pieces(task, source)
            return
        dtype = dtype_of(task.tensor.dtype)
        self._joined, whole = _room(self._joined, task.tensor.numel, dtype)
        for source in task.sources:
            start = source.start
            for piece in self._pieces(task, source):
                assert source.shard is not None  # a plan does not mix sources with and without
                put(source.shard, start, piece, whole)
                start += piece.numel()
        yield from whole.split(_STRETCH // dtype.itemsize)

    def _pieces(self, task: Task, source: Source) -> Iterator[torch.Tensor]:
        """Yield the elements of ``source``, one stretch after the other."""
        dtype = dtype_of(task.tensor.dtype)
        length = _STRETCH // dtype.itemsize
        if source.rank == self._ranks.rank:
            yield from map(_on_host, self._own(task, source, length))
        elif source.rank in self._read:
            for begin in range(0, source.numel, length):
                numel = min(length, source.numel - begin)
                if source.rest is None:
                    yield self._read_from(source.rank, source.address + begin * dtype.itemsize, numel, dtype)
                else:
                    place = begin * NARROW.itemsize
                    part = self._read_from(source.rank, source.address + place, numel, NARROW).clone()
                    kind = dtype_of(source.rest.dtype)
                    yield join(part, self._read_from(source.rank, source.rest.address + place, numel, kind))
        elif source.numel:
            self._buffer, part = _room(self._buffer, source.numel, dtype)
            self._ranks.receive(part, source.rank, task.number)
            yield from part.split(length)

    def _read_from(self, rank: int, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._read_peer is not None
        self._buffer, piece = _room(self._buffer, numel, dtype)
        self._read_peer(rank, address, piece)
        return piece

    def finish(self) -> None:
        """Wait for all sends of this rank."""
        for send in self._sends:
            with waiting("checkpoint: a part of a tensor that another rank takes"):
                send.wait()  # type: ignore[attr-defined]
        self._sends = []


def _on_host(piece: torch.Tensor) -> torch.Tensor:
    return piece if on_host(piece) else piece.cpu()


def _room(buffer: torch.Tensor, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (``buffer``, or a larger byte buffer in its place; a view of its beginning as ``numel`` elements)."""
    size = numel * dtype.itemsize
    if buffer.numel() < size:
        buffer = torch.empty(size, dtype=torch.uint8)
    return buffer, buffer[:size].view(dtype)
