"""Swap: master weights and moments of units in a file on a disk, and in memory only while they are updated.

[Note: two ways to the same bytes]
The file is mapped, and masters and moments are tensors over the mapping for the whole run. Code that reads or writes some
of them now and then (checkpoints, access by name) does so through the page cache, and need not know. An update needs every
byte of a unit in every step, and bypasses the page cache: the unit's extent is read into a buffer, updated there, and
written back. Kernels keep both ways coherent as long as they are not used at the same time: a direct read flushes what was
changed through the mapping, and a direct write drops what the page cache held. ``begin`` flushes in addition. When a page
was written through the mapping during a direct write to it, Linux 6.18 reported "Page cache invalidation failure on direct
I/O", and the next flush failed with EIO. So code that makes new states must wait for the disk first (``HostLink.home``).

[Note: three buffers]
One unit is read while a second is updated and a third is written. With three buffers the disk is never idle; with two it is
idle while an update runs; a fourth would have no work.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...distributed.layout import aligned_bytes
from ...distributed.waits import waiting
from ...errors import SwapError
from ...log import warn_once
from ...ops.aio import BLOCK_BYTES, AsyncFile, Ticket, aligned_empty
from ...ops.rounding import MasterFormat
from ...ops.state_format import StateFormat, StatePart
from ...watch.board import NOBODY

(FP32,) = StateFormat.FP32.parts
BUFFERS = 3


class _Phase(enum.Enum):
    IDLE = enum.auto()  # free for another unit
    READING = enum.auto()  # prefetched, and about to be opened
    OPEN = enum.auto()
    WRITING = enum.auto()


@dataclass(eq=False)
class _Buffer:
    """A buffer whose ``memory`` holds, or is about to hold, the bytes of unit ``key``."""

    memory: torch.Tensor  # [largest extent] uint8
    key: int | None = None
    phase: _Phase = _Phase.IDLE
    ticket: Ticket | None = None  # the request of READING or WRITING


Master = int | Sequence[tuple[int, StateFormat]]
"""The elements of a master: stretches of them, with the format of their states, or a number if all are fp32."""


@dataclass(frozen=True)
class _Stretch:
    """Elements ``low .. low + numel`` of a master. ``starts``: byte offset in the file of each (state, key of its part)."""

    low: int
    numel: int
    starts: Mapping[tuple[int, str], int]


@dataclass(frozen=True)
class _Array:
    """A master [numel] and its states. ``start``: byte offset in the file, where the master is; the states follow.

    ``rest``: byte offset of what it leaves out, if its ``format`` has that.
    """

    start: int
    numel: int
    stretches: tuple[_Stretch, ...]
    format: MasterFormat
    rest: int

    def stretch(self, element: int) -> _Stretch:
        """Return the stretch of which ``element`` is one."""
        return next(found for found in self.stretches if element < found.low + found.numel)


@dataclass(frozen=True)
class _Extent:
    """The bytes of one unit in the file. ``offset`` and ``room`` are multiples of BLOCK_BYTES."""

    offset: int
    room: int
    masters: tuple[_Array, ...]


def disk_of(folder: Path) -> int:
    """Return the number of the disk of ``folder``, which is made if it is not there. Raises :class:`SwapError`."""
    try:
        folder.mkdir(exist_ok=True)
        return folder.stat().st_dev
    except OSError as error:
        raise _unusable(folder, error) from error


def require_room(folder: Path, node_bytes: int) -> None:
    """Raise :class:`SwapError` if the disk of ``folder`` has less than ``node_bytes`` free.

    That is what all ranks of this machine need there, in all folders on this disk. It must be called before anything is
    allocated: no rank may make a file until all have called it.
    """
    try:
        folder.mkdir(exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _unusable(folder, error) from error
    if free < node_bytes:
        raise _too_small(folder, node_bytes, free)


def mapped_file(folder: Path, nbytes: int, *, node_bytes: int = 0) -> torch.Tensor:
    """Return [nbytes] uint8, all zero, over a file without a name on the disk of ``folder``.

    Raises :class:`SwapError` if the disk has no room for it. ``node_bytes``: as for :class:`StateFile`.
    """
    file = _open_without_name(folder)
    try:
        return torch.frombuffer(_map(folder, file, nbytes, node_bytes), dtype=torch.uint8)
    finally:
        file.close()


def file_bytes(units: Mapping[int, Sequence[Master]], states: int, format: MasterFormat = MasterFormat.FP32) -> int:
    """Return the size in bytes of the :class:`StateFile` with these arguments."""
    return sum(extent.room for extent in _extents(units, states, format).values())


def buffer_bytes(
    units: Mapping[int, Sequence[Master]],
    states: int,
    format: MasterFormat = MasterFormat.FP32,
    buffer_count: int = BUFFERS,
) -> int:
    """Return the bytes of memory that the buffers of this :class:`StateFile` take."""
    return buffer_count * max((extent.room for extent in _extents(units, states, format).values()), default=0)


def _extents(units: Mapping[int, Sequence[Master]], states: int, format: MasterFormat) -> dict[int, _Extent]:
    extents, offset = {}, 0
    for key, described in units.items():
        masters, start = [], offset
        for master in described:
            array, start = _array(master, states, start, format)
            masters.append(array)
        room = _blocks(start - offset)
        extents[key] = _Extent(offset, room, tuple(masters))
        offset += room
    return extents


def _array(master: Master, states: int, start: int, master_format: MasterFormat) -> tuple[_Array, int]:
    """Place a master and its states from byte ``start`` on. Return the next free byte, too."""
    described = [(master, StateFormat.FP32)] if isinstance(master, int) else master
    numel = sum(count for count, _ in described)
    rest = start + aligned_bytes(numel * master_format.dtype.itemsize)
    end = rest + (aligned_bytes(numel * master_format.rest.itemsize) if master_format.rest is not None else 0)
    stretches, low = [], 0
    for count, format in described:
        starts = {}
        for number in range(states):
            for part in format.parts:
                starts[number, part.key] = end
                end += aligned_bytes(part.nbytes(count))
        stretches.append(_Stretch(low, count, starts))
        low += count
    return _Array(start, numel, tuple(stretches), master_format, rest), end


class StateFile:
    """Masters and states of one rank's units on a disk, all zero at first.

    The file has no name once it is open, so nothing is left behind, however the process ends. ``begin``, ``prefetch``,
    ``open``, ``release`` and ``flush`` raise :class:`SwapError` if reading or writing fails, and then in every later call.
    Only one thread may use it at a time. While a unit is open, its tensors over the mapping must not be used.
    """

    def __init__(
        self,
        folder: Path,
        units: Mapping[int, Sequence[Master]],
        states: int,
        format: MasterFormat = MasterFormat.FP32,
        *,
        node_bytes: int = 0,
        buffer_count: int = BUFFERS,
    ) -> None:
        """``units``: unit -> its masters in ``format``, each of which has ``states`` states. ``buffer_count``: at least 2.

        ``node_bytes``: the bytes of all ranks of this machine together on this disk, for the error message if it is full.
        """
        if buffer_count < 2:
            raise ValueError(f"buffer_count must be at least 2, got {buffer_count}")
        self._folder, self._failure, self._states = folder, None, states
        self._extents = _extents(units, states, format)
        self.file_bytes = sum(extent.room for extent in self._extents.values())
        self._arrays = [array for extent in self._extents.values() for array in extent.masters if array.numel]
        self._starts = [array.start for array in self._arrays]
        self._given: set[tuple[int, int, str]] = set()  # (array, state, key of a part) that may no longer be zero
        self._wanted: int | None = None  # the unit whose prefetch waits for a free buffer
        self._file = _open_without_name(folder)
        try:
            self._map = self._allocate(node_bytes)
        except BaseException:
            self._file.close()
            raise
        largest = max((extent.room for extent in self._extents.values()), default=0)
        self._buffers = [_Buffer(aligned_empty(largest)) for _ in range(buffer_count)]  # least recently used first

    _failure: str | None

    @property
    def buffer_bytes(self) -> int:
        """The bytes of memory that all buffers take together once they have been used."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def _allocate(self, node_bytes: int) -> mmap.mmap | None:
        if not self.file_bytes:
            return None
        mapped = _map(self._folder, self._file, self.file_bytes, node_bytes)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        return mapped

    # -- tensors over the mapping --------------------------------------------------------------------------------

    def master(self, key: int, index: int) -> torch.Tensor:
        """Return the ``index``-th master of unit ``key``: [numel] in the dtype of its format."""
        array = self._extents[key].masters[index]
        return self._view(array.start, array.numel, array.format.dtype)

    def rest(self, key: int, index: int) -> torch.Tensor | None:
        """Return what the ``index``-th master of unit ``key`` leaves out, [numel]; None if its format has nothing there."""
        array = self._extents[key].masters[index]
        return None if array.format.rest is None else self._view(array.rest, array.numel, array.format.rest)

    def _view(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not numel:
            return torch.empty(0, dtype=dtype)
        return self._bytes[start : start + numel * dtype.itemsize].view(dtype)

    def home(self, param: torch.Tensor, number: int, part: StatePart = FP32) -> torch.Tensor:
        """Return a part of a state, all zeros, for ``param``: in the file if ``param`` is there, else in memory.

        In memory is also a state that the optimizer did not have when the file was made, as the momentum of SGD that a
        script sets later. No write to the file may be in flight.
        """
        if self.holds(param) and number >= self._states:
            warn_once(
                f"the optimizer keeps a state number {number + 1} of parameters on the disk now, for which the file at "
                f"nvme_path = {str(self._folder)!r} has no room: it is in host memory. Remedy: set what it needs, such "
                "as the momentum of SGD, in the configuration, and change it after initialize()."
            )
        if not self.holds(param) or number >= self._states:
            return part.zeros(param)
        state = self.state(param, number, part)
        whole = bisect_right(self._starts, self._offset(param)), number, part.key
        if whole in self._given:
            state.zero_()
        self._given.add(whole)
        return state

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` is a view of the mapping. A state that was replaced by another tensor is not."""
        return tensor.numel() > 0 and self._map is not None and 0 <= self._offset(tensor) < self.file_bytes

    def state(self, master: torch.Tensor, number: int, part: StatePart = FP32) -> torch.Tensor:
        """Return ``part`` of the ``number``-th state of ``master``, in its shape if it has as many elements.

        ``master`` may be any contiguous part of a master that begins where a block does, in one stretch.
        """
        if not master.numel():
            return part.zeros(master)
        offset = self._offset(master)
        array = self._arrays[bisect_right(self._starts, offset) - 1]
        element = (offset - array.start) // array.format.dtype.itemsize
        stretch = array.stretch(element)
        start = stretch.starts[number, part.key] + part.nbytes(element - stretch.low)
        state = self._bytes[start : start + part.nbytes(master.numel())].view(part.dtype)
        return state.view(master.shape) if part.per == 1 else state

    def _offset(self, tensor: torch.Tensor) -> int:
        """Return the byte offset of ``tensor`` in the file."""
        return tensor.data_ptr() - self._bytes.data_ptr()

    def let_go(self, key: int) -> None:
        """Write to the disk what was written to unit ``key`` through the mapping, and free its memory."""
        extent = self._extents[key]
        if self._map is None or not extent.room:
            return
        try:
            self._map.flush(extent.offset, extent.room)
            self._map.madvise(mmap.MADV_DONTNEED, extent.offset, extent.room)
            os.posix_fadvise(self._file.descriptor, extent.offset, extent.room, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._fail(key, error, writing=True) from error

    # -- units in buffers ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a series of updates: wait for writes, and flush to the file what was changed through the mapping."""
        self.flush()
        for buffer in self._buffers:
            if buffer.phase is _Phase.READING:  # announced before, and not opened
                self._land(buffer)
        if self._map is not None:
            try:
                self._map.flush()
            except OSError as error:
                raise self._fail(None, error, writing=True) from error

    def prefetch(self, key: int) -> None:
        """Begin to read unit ``key``, which is opened next, as soon as a buffer is free. Does not wait."""
        self._check()
        self._wanted = key
        self._read_wanted()

    def open(self, key: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Open unit ``key`` and return a function that maps tensors over the mapping to those in the buffer.

        The function returns all other tensors as they are. ``release`` must follow.
        """
        self._check()
        buffer = self._holding(key)
        if buffer is None:
            buffer = self._take(patient=True)
            assert buffer is not None
            self._begin_read(buffer, key)
        elif buffer.phase is _Phase.OPEN:
            raise RuntimeError(f"unit {key} is open already")
        self._land(buffer)
        buffer.key, buffer.phase = key, _Phase.OPEN
        self._read_wanted()
        memory, start = buffer.memory, self._extents[key].offset

        def in_buffer(tensor: torch.Tensor) -> torch.Tensor:
            if not self.holds(tensor):
                return tensor
            low = self._offset(tensor) - start
            return memory[low : low + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return in_buffer

    def release(self, key: int) -> None:
        """Begin to write unit ``key``, which must be open."""
        self._check()
        buffer, extent = self._holding(key), self._extents[key]
        if buffer is None or buffer.phase is not _Phase.OPEN:
            raise RuntimeError(f"unit {key} is not open")
        self._used_last(buffer)
        buffer.ticket = self._file.write(buffer.memory[: extent.room], extent.offset)
        buffer.phase = _Phase.WRITING
        self._read_wanted()

    def flush(self) -> None:
        """Wait for all writes in flight."""
        self._check()
        for buffer in self._buffers:
            if buffer.phase is _Phase.WRITING:
                self._land(buffer)

    def close(self) -> None:
        """Wait for all writes and close the file. Its space is freed once no tensor uses it. A second call does nothing.

        Raises :class:`SwapError` for a failure that no earlier call has raised.
        """
        try:
            if self._failure is None:
                self.flush()
        finally:
            self._file.close()

    # -- buffers -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failure is not None:
            raise SwapError(self._failure)  # a new one: each raise of the same one makes its traceback longer

    def _holding(self, key: int) -> _Buffer | None:
        """Return the buffer in which unit ``key`` is, or is about to be, up to date; else None."""
        return next((b for b in self._buffers if b.key == key and b.phase in (_Phase.READING, _Phase.OPEN)), None)

    def _take(self, *, patient: bool) -> _Buffer | None:
        """Return a buffer for another unit. Without ``patient``, return only a buffer that is free now, else None."""
        for buffer in self._buffers:
            if buffer.phase is _Phase.WRITING and buffer.ticket is not None and buffer.ticket.done():
                self._land(buffer)
        # Prefetched buffers come last: they are taken only if another unit is opened than the one that was prefetched.
        for phase in (_Phase.IDLE, *((_Phase.WRITING, _Phase.READING) if patient else ())):
            for buffer in self._buffers:
                if buffer.phase is phase:
                    self._land(buffer)
                    self._used_last(buffer)
                    return buffer
        if patient:
            raise RuntimeError(f"{len(self._buffers)} units are open, and there are no more buffers")
        return None

    def _used_last(self, buffer: _Buffer) -> None:
        self._buffers.remove(buffer)
        self._buffers.append(buffer)

    def _read_wanted(self) -> None:
        key = self._wanted
        if key is None:
            return
        if self._holding(key) is None:
            buffer = self._take(patient=False)
            if buffer is None:
                return
            self._begin_read(buffer, key)
        self._wanted = None

    def _begin_read(self, buffer: _Buffer, key: int) -> None:
        for other in self._buffers:
            if other.key == key:  # a write of this unit must be complete before it is read
                self._land(other)
        extent = self._extents[key]
        buffer.key, buffer.phase = key, _Phase.READING
        buffer.ticket = self._file.read(buffer.memory[: extent.room], extent.offset)

    def _land(self, buffer: _Buffer) -> None:
        """Wait for the buffer's request in flight, if any; the buffer is idle afterwards."""
        ticket, key, writing = buffer.ticket, buffer.key, buffer.phase is _Phase.WRITING
        buffer.ticket, buffer.key, buffer.phase = None, None, _Phase.IDLE
        if ticket is not None:
            try:
                with waiting(f"{'writing' if writing else 'reading'} optimizer states of unit {key} on disk", span=NOBODY):
                    ticket.wait()
            except OSError as error:
                raise self._fail(key, error, writing=writing) from error

    def _fail(self, key: int | None, error: OSError, *, writing: bool) -> SwapError:
        self._failure = _failed(self._folder, key, error, writing=writing)
        return SwapError(self._failure)


def _blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


# -- files and errors --------------------------------------------------------------------------------------------------


def _open_without_name(folder: Path) -> AsyncFile:
    try:
        folder.mkdir(exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f"zerorun-rank-{os.environ.get('RANK', '0')}-", dir=folder)
        os.unlink(name)
        return AsyncFile(Path(name), descriptor)
    except OSError as error:
        raise _unusable(folder, error) from error


def _map(folder: Path, file: AsyncFile, nbytes: int, node_bytes: int) -> mmap.mmap:
    """Allocate ``nbytes`` for ``file``, and map them. Raises SwapError."""
    free = _free(folder)
    try:
        file.allocate(nbytes)
        return mmap.mmap(file.descriptor, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _too_small(folder, max(node_bytes, nbytes), free, nbytes) from error
        raise _unusable(folder, error) from error


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def _unusable(folder: Path, error: OSError) -> SwapError:
    if isinstance(error, FileNotFoundError) and not folder.parent.exists():
        reason = f"there is no folder {str(folder.parent)!r}. Is the disk mounted?"
    else:
        reason = f"a file cannot be made there: {'it is no folder' if folder.is_file() else error.strerror}."
    return SwapError(
        f"nvme_path = {str(folder)!r}: {reason} Remedy: a folder on a local disk that all ranks of this machine can write "
        "to; its last part is made if it is not there."
    )


def _too_small(folder: Path, node_bytes: int, free: int, rank_bytes: int | None = None) -> SwapError:
    own = "" if rank_bytes is None else f", {_size(rank_bytes)} of them for this file"
    return SwapError(
        f"nvme_path = {str(folder)!r}: the disk is too small. All ranks of this machine together take {_size(node_bytes)} "
        f"({node_bytes} bytes) there, in all folders of this disk{own}; {_size(free)} ({free} bytes) are free. Remedy: "
        "nvme_path on a larger disk, offload_optimizer and offload_param on two disks, more ranks on more machines, or "
        "less on it: offload_param to the CPU, or a smaller offload_optimizer.ratio."
    )


def _failed(folder: Path, key: int | None, error: OSError, *, writing: bool) -> str:
    what, verb = ("written to", "writing") if writing else ("read from", "reading")
    which = "all units" if key is None else f"unit {key}"
    name = errno.errorcode.get(error.errno or 0, error.errno)
    return (
        f"optimizer states could not be {what} {error.filename}, the file of this rank without a name in {str(folder)!r}: "
        f"{error.strerror} ({name}) while {verb} {which}; {_size(_free(folder))} are free. The states are lost, and the "
        "weights of some units may be a step further than others. Checkpoints are not touched: the last one is as it was. "
        "Remedy: make room there, or set zero_optimization.offload_optimizer.nvme_path to another disk, start the program "
        "again, and resume from the last checkpoint."
    )


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
