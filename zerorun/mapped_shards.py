"""Mapped shards: the ranks of one host map each other's shards, so that gathered parameters are there without a copy.

[Note: one flat buffer over the memory of all ranks]
Every rank keeps its shards in a file in memory (memfd), at the same places as the others keep theirs. The flat buffer of a
unit is a range of addresses with the shard of rank 0 at its beginning, then that of rank 1, and so on: the rank's own, and
the pages of the others' files. A gather moves nothing, a slot is not needed, and the host holds each parameter once.
Shards change only between ``close`` and the next gather, see open_shards.py.

A module that writes to its parameters in its forward writes to the rank's own shard, and to copies of the others' pages
(the mapping is private), which ``let_go`` drops: nobody can change another rank's shard.

Pages are shared only where a shard is a whole number of them. The resident size of a process counts the pages of others
that it has touched, until it lets go of them: a unit does when another takes its turn, as it would give up a slot. They
are found again by page faults, 0.4 microseconds a page where this was measured: 1 to 3 % of a training step. So
those of the first units stay, up to ``KEPT_BYTES`` of partition.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_MAP_FIXED = 0x10  # as mman.h of Linux has it
_MADV_DONTNEED = 4


class MappedShards:
    """The files of a group of ranks. ``connect`` makes one, ``take`` gives the buffers, in the same order on all ranks."""

    def __init__(self, rank: int, files: list[int]) -> None:
        self._rank, self._files, self._offset = rank, files, 0

    @classmethod
    def connect(cls, gather: Callable[[Any], list[Any]], rank: int, size: int, nbytes: int) -> MappedShards | None:
        """The files of all ranks, with room for ``nbytes`` each; None if some rank cannot map them all.

        ``gather`` gives every rank's value to all of them, which must all call this.
        """
        own = -1
        with contextlib.suppress(OSError, AttributeError):
            own = os.memfd_create("zerorun shards")
            os.ftruncate(own, nbytes)
        found = cls(rank, [own] if own >= 0 else [])
        others = [place for peer, place in enumerate(gather((os.getpid(), own))) if peer != rank]
        if all(gather(found._open(others, nbytes))):
            return found
        found.close()
        return None

    def _open(self, others: list[tuple[int, int]], nbytes: int) -> bool:
        """Open the files of ``others`` (process, descriptor). True if all can be mapped at the same time."""
        mapped = []
        try:
            for process, file in others:
                self._files.append(os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY))
                mapped.append(_map(self._files[-1], nbytes))
        except (OSError, ValueError):  # ValueError: the file is shorter
            return False
        finally:
            for mapping in mapped:
                mapping.close()
        self._files.insert(self._rank, self._files.pop(0))
        return True

    def take(self, nbytes: int) -> torch.Tensor:
        """The next [size * nbytes] uint8: the next ``nbytes`` of every rank's file. Zeros at first."""
        whole = _map(-1, len(self._files) * nbytes)  # the range of addresses: it goes as one, when nobody has it any more
        buffer = torch.frombuffer(whole, dtype=torch.uint8)
        for rank, file in enumerate(self._files):
            sharing = mmap.MAP_SHARED if rank == self._rank else mmap.MAP_PRIVATE
            protection, address = mmap.PROT_READ | mmap.PROT_WRITE, buffer.data_ptr() + rank * nbytes
            found = _library().mmap(address, nbytes, protection, sharing | _MAP_FIXED, file, self._offset)
            if found != address:
                raise OSError(ctypes.get_errno(), "a shard of another rank could not be mapped")
        self._offset += nbytes
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
