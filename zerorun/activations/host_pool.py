"""Host memory for kept activations: pinned buffers that are reused, and copies on a stream of their own.

[Note: order of prefetch]
A *group* is what one checkpoint keeps. Groups are numbered in the order in which forward makes them, starting at 0 again
whenever none is left. When backward opens a group, the group that followed it in the last backward is fetched as well.
Until another order has been seen, that is the group made just before it.
"""

from __future__ import annotations

import bisect
import weakref
from dataclasses import dataclass

import torch

from ..distributed.device import CopyStream, holds, host_empty, queues
from ..plan.parameter_kinds import strides_of

# Only tensors of at least this many bytes are worth a copy: for smaller ones, starting it takes longer than the transfer.
SMALL_BYTES = 2**16


@dataclass
class Counts:
    """What a pool has done so far."""

    buffers: int = 0  # allocated
    buffer_bytes: int = 0  # held
    out_copies: int = 0  # device to host
    out_bytes: int = 0
    in_copies: int = 0  # host to device
    late_groups: int = 0  # opened by backward before anything had fetched them


class HostPool:
    """Host-memory buffers for tensors of ``device``. If that is a GPU, they are pinned and have a stream for the copies.

    On a CPU, the same calls copy between host tensors. Copies run in order on one stream, so a buffer can be given to the
    next tensor as soon as nobody needs the bytes of the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = CopyStream(device)
        self.counts = Counts()
        self._free: list[torch.Tensor] = []  # [bytes], by size
        self._live: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._made = 0  # number of groups made since there was none
        self._followers: dict[
            int, int
        ] = {}  # group's number -> number of the next in backward, if that is not the one made before it
        self._opened: int | None = None  # the group that backward opened last

    def group(self) -> Group:
        """A new group, for one checkpoint."""
        if not self._live:
            self._made, self._opened = 0, None
        group = self._live[self._made] = Group(self, self._made)
        self._made += 1
        return group

    def follow(self, number: int) -> None:
        """Learn the order from the opening of group ``number``, and fetch the group that should come next."""
        if self._opened is not None and self._opened != number:
            if self._opened - 1 == number:
                self._followers.pop(self._opened, None)
            else:
                self._followers[self._opened] = number
        self._opened = number
        following = self._live.get(self._followers.get(number, number - 1))
        if following is not None:
            following.fetch()

    def take(self, nbytes: int) -> torch.Tensor:
        """Return the smallest free buffer of at least ``nbytes``. If there is none, a new one replaces one."""
        place = bisect.bisect_left(self._free, nbytes, key=torch.Tensor.numel)
        if place < len(self._free):
            return self._free.pop(place)
        if self._free:
            self.stream.synchronize()  # its last copy may have been queued only
            self.counts.buffer_bytes -= self._free.pop(0).numel()
        self.counts.buffers += 1
        self.counts.buffer_bytes += nbytes
        return host_empty(nbytes, torch.uint8, pinned=queues(self.device))

    def give_back(self, buffer: torch.Tensor) -> None:
        bisect.insort(self._free, buffer, key=torch.Tensor.numel)


class Stored:
    """A tensor in host memory. ``fetch`` starts to bring it back; ``get`` gives it to the computation."""

    def __init__(self, pool: HostPool, tensor: torch.Tensor) -> None:
        self._pool = pool
        self._size, self._stride = tensor.size(), strides_of(tensor)
        self._buffer = pool.take(tensor.nbytes)
        self._host = self._buffer[: tensor.nbytes].view(tensor.dtype)  # [numel]
        self._fetched: torch.Tensor | None = None  # [numel], on the device
        flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        pool.stream.follow(flat)
        pool.stream.copy(flat, self._host)
        pool.counts.out_copies += 1
        pool.counts.out_bytes += flat.nbytes

    def __del__(self) -> None:
        if hasattr(self, "_buffer"):
            self._pool.give_back(self._buffer)

    def fetch(self) -> None:
        if self._fetched is None:
            with self._pool.stream.copying():
                self._fetched = torch.empty_like(self._host, device=self._pool.device)
                self._fetched.copy_(self._host, non_blocking=True)
            self._pool.counts.in_copies += 1

    def get(self) -> torch.Tensor:
        """Return the tensor in new memory, with its old strides. The copy in host memory stays as long as this object."""
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        self._pool.stream.lead(fetched)
        return fetched.as_strided(self._size, self._stride)


class Group:
    """What one checkpoint keeps in host memory."""

    def __init__(self, pool: HostPool, number: int) -> None:
        self.pool, self.number = pool, number
        self._stored: list[weakref.ref[Stored]] = []  # in the order of forward
        self._fetching = False

    def store(self, tensor: torch.Tensor) -> Stored | None:
        """Copy ``tensor`` to host memory. Return None for tensors that had better stay: those that are small, on another
        device, have gaps, or have elements that strides read more than once."""
        if tensor.layout != torch.strided or tensor.nbytes < SMALL_BYTES:
            return None
        if not holds(self.pool.device, tensor) or not _is_dense(tensor):
            return None
        stored = Stored(self.pool, tensor)
        self._stored.append(weakref.ref(stored))
        return stored

    def fetch(self) -> None:
        """Start to copy everything back."""
        if not self._fetching:
            self._fetching = True
            for reference in self._stored:
                stored = reference()
                if stored is not None:
                    stored.fetch()

    def open(self) -> None:
        """Fetch the group for backward, which needs it now, and the group that should come next."""
        self.pool.counts.late_groups += not self._fetching
        self.fetch()
        self._fetching = False  # a second backward fetches again
        self.pool.follow(self.number)


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill one range of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(strides_of(tensor), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
