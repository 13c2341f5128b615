"""Mapped shards: the ranks of one host map each other's shards, so that gathered parameters are there without a copy.

[Note: one flat buffer over the memory of all ranks]
Every rank keeps its shards in a file in memory (memfd), in the same order as the others keep theirs. The flat buffer of
a unit is a range of addresses with the shard of rank 0 at its beginning, then that of rank 1, and so on: the rank's own,
and the pages of the others' files. A gather moves nothing, a slot is not needed, and the host holds each parameter once.
Shards change only between ``close`` and the next gather, see open_shards.py.

A module that writes to its parameters in its forward writes to the rank's own shard, and to copies of the others' pages
(the mapping is private), which ``let_go`` drops: nobody can change another rank's shard.

Pages are shared only where a shard is a whole number of them. The resident size of a process counts the pages of others
that it has touched, until it lets go of them: a unit does when another takes its turn, as it would give up a slot. They
are found again by page faults, 0.4 microseconds a page where this was measured: 1 to 3 % of a training step. So
those of the first units stay, up to ``KEPT_BYTES`` of partition.py.

[Note: huge pages]
A huge page (2 MiB) is found again by one fault, and is one entry of the processor's address cache. The kernel maps it as
one only where the address and the place in the file agree in their low 21 bits, and in a buffer the shards follow one
another. So each rank's file has gaps, different from the others' (``_places``), and what lies at the ends of a shard stays
small pages. The usual settings of Linux give files in memory no huge pages by themselves; since 6.1 a process can ask for
the small ones that exist to be made one (MADV_COLLAPSE). Where that is refused, small pages serve as well. It takes
0.3 s/GB, and several times that in a virtual machine that gets the memory from its host only then, so it is done once, in
the first step: who builds an engine for something else does not wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .huge_pages import HUGE_PAGE

_MAP_FIXED = 0x10  # as mman.h of Linux has it
_MADV_DONTNEED = 4


def _places(sizes: Sequence[int], rank: int) -> list[int]:
    """Where the shards of ``sizes`` bytes begin in the file of ``rank``, and where it ends.

    Those with room for a huge page begin where their address does, modulo huge pages, if their buffer begins with one.
    """
    found, end = [], 0
    for nbytes in sizes:
        if nbytes >= HUGE_PAGE:
            end += (rank * nbytes - end) % HUGE_PAGE
        found.append(end)
        end += nbytes
    return [*found, end]


class MappedShards:
    """The files of a group of ranks. ``connect`` makes one, ``take`` gives the buffers, in the same order on all ranks."""

    def __init__(self, rank: int, files: list[int], sizes: Sequence[int], places: list[list[int]]) -> None:
        self._rank, self._files, self._sizes, self._places = rank, files, sizes, places
        self._taken = 0

    @classmethod
    def connect(cls, gather: Callable[[Any], list[Any]], rank: int, size: int, sizes: Sequence[int]) -> MappedShards | None:
        """The files of all ranks, for shards of ``sizes`` bytes; None if some rank cannot map them all.

        ``gather`` gives every rank's value to all of them, which must all call this.
        """
        places, own = [_places(sizes, peer) for peer in range(size)], -1
        with contextlib.suppress(OSError, AttributeError):
            own = os.memfd_create("zerorun shards")
            os.ftruncate(own, places[rank][-1])
        found = cls(rank, [own] if own >= 0 else [], sizes, places)
        others = [place for peer, place in enumerate(gather((os.getpid(), own))) if peer != rank]
        if all(gather(found._open(others))):
            return found
        found.close()
        return None

    def _open(self, others: list[tuple[int, int]]) -> bool:
        """Open the files of ``others`` (process, descriptor). True if all can be mapped at the same time."""
        mapped = []
        try:
            for process, file in others:
                self._files.append(os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY))
                mapped.append(_map(self._files[-1], sum(self._sizes)))
        except (OSError, ValueError):  # ValueError: the file is shorter
            return False
        finally:
            for mapping in mapped:
                mapping.close()
        self._files.insert(self._rank, self._files.pop(0))
        return True

    def take(self) -> torch.Tensor:
        """The next buffer: [number of ranks * its size] uint8, the shard of every rank's file. Zeros at first."""
        nbytes = self._sizes[self._taken]
        numel, spare = len(self._files) * nbytes, HUGE_PAGE if nbytes >= HUGE_PAGE else 0
        whole = _map(-1, numel + spare)  # the range of addresses: it goes as one, when nobody has it any more
        begin = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % HUGE_PAGE if spare else 0
        buffer = torch.frombuffer(whole, dtype=torch.uint8, count=numel, offset=begin)
        for rank, file in enumerate(self._files):
            sharing = mmap.MAP_SHARED if rank == self._rank else mmap.MAP_PRIVATE
            protection, address = mmap.PROT_READ | mmap.PROT_WRITE, buffer.data_ptr() + rank * nbytes
            place = self._places[rank][self._taken]
            found = _library().mmap(address, nbytes, protection, sharing | _MAP_FIXED, file, place)
            if found != address:
                raise OSError(ctypes.get_errno(), "a shard of another rank could not be mapped")
        self._taken += 1
        return buffer

    def close(self) -> None:
        """No buffer is taken any more."""
        for file in self._files:
            os.close(file)
        self._files = []


def _map(file: int, nbytes: int) -> mmap.mmap:
    """A private mapping of the beginning of ``file``, or of nothing."""
    kind = mmap.MAP_PRIVATE if file >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return mmap.mmap(file, nbytes, flags=kind, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def let_go(buffer: torch.Tensor) -> None:
    """Let the next access find others' pages again in ``buffer``, a part of one that ``take`` gave, of whole pages.

    What was written there is dropped, and what was read is no longer resident in this process.
    """
    if buffer.numel():
        _library().madvise(buffer.data_ptr(), buffer.numel() * buffer.element_size(), _MADV_DONTNEED)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library
