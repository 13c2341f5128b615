"""The process group itself: torch's own collectives, over all ranks, for whoever has no engine yet, or checks the network.

Engines move their data by transports, which count it, and decide by control.py. No other file calls torch's collectives.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ...errors import MessageError
from ..device import is_simulated, on_gpu
from ..topology import everyone
from ..waits import waiting
from ..wire import decode, encode

T = TypeVar("T")


def size() -> int:
    """How many ranks there are."""
    return dist.get_world_size()


def rank() -> int:
    """This rank's number."""
    return dist.get_rank()


def uses_nccl(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """True if tensors on ``device`` go through NCCL, or what stands for it, in ``group`` (None: the world)."""
    return is_simulated(device) or (on_gpu(device) and "nccl" in str(dist.get_backend_config(group or dist.group.WORLD)))


# -- values ------------------------------------------------------------------------------------------------------------


def gather_values(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ranks' values (see wire.py), by rank of ``group`` (None: the world). Tensors arrive on the CPU. All its ranks
    must call it.

    Raises MessageError, on all ranks alike, if a rank's value is of a type that cannot be told.
    """
    try:
        content = encode((value, None))
    except MessageError as error:
        content = encode((None, str(error)))
    found = [decode(other) for other in _gather_bytes(content, group)]
    for number, (_, problem) in enumerate(found):
        if problem is not None:
            raise MessageError(f"rank {number}: {problem}")
    return [other for other, _ in found]


def _gather_bytes(content: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    group = group or everyone()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(content)]), group=group)
    padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(found, padded, group=group)
    return [bytes(part[: int(length)].numpy()) for part, length in zip(found, lengths, strict=True)]


# -- tensors -----------------------------------------------------------------------------------------------------------
#
# They are contiguous, and all ranks must call what is called "all". Each returns when the result is in place.


def all_gather(mine: torch.Tensor, what: str) -> list[torch.Tensor]:
    """The ranks' tensors of one shape and dtype, by rank. ``what``: the words for a long wait."""
    found = [torch.empty_like(mine) for _ in range(size())]
    with waiting(what):
        dist.all_gather(found, mine)
    return found


def all_gather_flat(flat: torch.Tensor, mine: torch.Tensor, what: str) -> None:
    """Fill ``flat`` [ranks * numel] with the ranks' ``mine`` [numel]."""
    with waiting(what):
        dist.all_gather(list(flat.chunk(size())), mine)


def all_gather_in_one(flat: torch.Tensor, mine: torch.Tensor) -> None:
    """The same by the call that engines make on GPUs."""
    _world()._allgather_base(flat, mine).wait()


def all_reduce(buffer: torch.Tensor, what: str, *, largest: bool = False) -> None:
    """Let every rank's ``buffer`` be the sum of all, or by element the largest."""
    with waiting(what):
        dist.all_reduce(buffer, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)


def reduce_scatter(full: torch.Tensor, own: torch.Tensor) -> None:
    """Let ``own`` [numel] be the sum of this rank's part of the ranks' ``full`` [ranks * numel]."""
    _world()._reduce_scatter_base(own, full, dist.ReduceScatterOptions()).wait()


def broadcast(tensor: torch.Tensor, source: int, what: str) -> None:
    """Let every rank's ``tensor`` be that of rank ``source``."""
    with waiting(what):
        dist.broadcast(tensor, source)


def barrier(what: str) -> None:
    """Return when all ranks have called it."""
    with waiting(what):
        dist.barrier()


def send(tensor: torch.Tensor, peer: int) -> None:
    """Send a tensor to one rank, which calls ``receive``."""
    with waiting("a message between two ranks", lambda: [peer]):
        dist.send(tensor, peer)


def receive(tensor: torch.Tensor, peer: int) -> None:
    """Fill ``tensor`` with what one rank sends."""
    with waiting("a message between two ranks", lambda: [peer]):
        dist.recv(tensor, peer)


def pass_on(mine: torch.Tensor, came: torch.Tensor) -> None:
    """Everyone to the next rank, all at a time."""
    following, previous = (rank() + 1) % size(), (rank() - 1) % size()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, following), dist.P2POp(dist.irecv, came, previous)]):
        work.wait()


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed is not initialised")
    return group


class HostGroup:
    """A process group of its own for data in host memory, which waits as long as ``timeout`` says. All must make it."""

    def __init__(self, timeout: timedelta) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def close(self) -> None:
        """Give it back."""
        dist.destroy_process_group(self._group)

    def values(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        return gather_values(value, self._group)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        dist.barrier(group=self._group)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a contiguous tensor to one rank. Not collective."""
        return self._group.send([tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Fill a contiguous tensor with what ``peer`` sends. Not collective."""
        self._group.recv([tensor], peer, tag).wait()
