"""Swap: master weights and moments of units in a file, and in memory only while somebody works on them.

[Note: who sees what]
Optimizers know their states by tensor objects, and pieces are views of masters. So the tensors of a unit keep their
identity, and only their storage changes: while the unit is open they lie in a buffer, each at the place where it belongs,
and tensors that shared memory share it again. While it is out they keep shape and dtype, read as NaN (integers as their
highest value) and refuse in-place writes; a mistake shows up as in unit.py's note on loud placeholders.

[Note: three buffers]
One unit is read while another is worked on and a third is written: with three buffers the disk is never idle, with two it
is while an update runs, and a fourth finds no work. A buffer keeps a unit's bytes until another unit needs the place. One
that is opened again before is not read, so a model of few units stays in memory.
"""

from __future__ import annotations

import enum
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import SwapError
from ..ops.aio import BLOCK_BYTES, AsyncFile, Ticket, aligned_empty

_ALIGNMENT = 64  # bytes, of tensors in a buffer: a cache line, and the widest vector


class _State(enum.Enum):
    IDLE = enum.auto()  # may be given to another unit
    READING = enum.auto()  # prefetched: somebody is about to open it
    OPEN = enum.auto()
    WRITING = enum.auto()


@dataclass(eq=False)
class _Buffer:
    """``memory`` holds, or is about to hold, the bytes of unit ``key``."""

    memory: torch.Tensor  # [at least the room of its unit] uint8
    key: int | None = None
    state: _State = _State.IDLE
    ticket: Ticket | None = None  # of READING or WRITING
    dirty: bool = False  # holds what the file does not


@dataclass
class _Place:
    tensor: torch.Tensor
    strides: tuple[int, ...]  # contiguous
    offset: int  # bytes into the extent


@dataclass
class _Extent:
    """The bytes of one unit in the file; ``offset`` and ``room`` are multiples of BLOCK_BYTES."""

    offset: int
    room: int
    used: int = 0  # bytes
    places: list[_Place] = field(default_factory=list)


def require_room(folder: Path, node_bytes: int) -> None:
    """Raise :class:`SwapError` if the disk of ``folder`` has less free than ``node_bytes``, which all ranks here need.

    For before anything is allocated: no rank may make its :class:`StateFile` until all have asked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _unusable(folder, error) from error
    if free < node_bytes:
        raise _too_small(folder, node_bytes, free)


class StateFile:
    """The states of one rank's units on a disk. One thread at a time.

    The file has no name once it is open, so nothing stays behind, however the process ends. Every method raises
    :class:`SwapError` if the disk does not give or take what it should, and then always again.
    """

    def __init__(self, folder: Path, rooms: Mapping[int, int], *, node_bytes: int = 0, buffer_count: int = 3) -> None:
        """``rooms``: unit -> bytes that its tensors will take, each rounded up to 64; they are allocated on the disk. A
        unit that turns out to need more gets it later, if the disk has it. ``buffer_count``: at least 2.

        ``node_bytes``: what all ranks of this machine take together, for the message that a full disk gets.
        """
        if buffer_count < 2:
            raise ValueError(f"buffer_count must be at least 2, got {buffer_count}")
        self._folder, self._node_bytes = folder, node_bytes
        self._extents: dict[int, _Extent] = {}
        self.file_bytes = 0
        self._failure: SwapError | None = None
        self._wanted: int | None = None  # prefetched while no buffer was to be had
        self._file = _open_without_name(folder)
        try:
            for key, room in rooms.items():
                self._extents[key] = self._append(_blocks(room))
            self._allocate()
        except BaseException:
            self._file.close()
            raise
        largest = max((extent.room for extent in self._extents.values()), default=0)
        self._buffers = [_Buffer(aligned_empty(largest)) for _ in range(buffer_count)]  # least recently used first

    @property
    def buffer_bytes(self) -> int:
        """Of memory that all buffers take together, once used."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    # -- a unit's tensors ----------------------------------------------------------------------------------------

    def put(self, key: int, tensors: Sequence[torch.Tensor]) -> None:
        """From now on the tensors of unit ``key`` are these: contiguous, on the CPU; they may be views of one another.

        The unit must be open, or new; it is open afterwards. Tensors that it had and has no more stay in their last
        memory. If they need more than the room of the unit, the file grows. While tensors of an open unit are arranged
        anew, there is one buffer more.
        """
        self._check()
        buffer = self._holding(key)
        is_open = buffer is not None and buffer.state is _State.OPEN
        new = not is_open and not (key in self._extents and self._extents[key].places)
        if not is_open and not new:
            raise RuntimeError(f"unit {key} is not open: its tensors cannot be changed")
        if buffer is None:
            buffer = self._take(patient=True)
            assert buffer is not None
        if new:
            self._land(buffer)
        elif self._unchanged(key, tensors, buffer):
            return
        places, used = _arrange(tensors)
        self._make_room(key, used)
        if not new or buffer.memory.nbytes < used:
            memory = aligned_empty(max(buffer.memory.nbytes, self._extents[key].room))
        else:
            memory = buffer.memory
        _copy_in(places, memory)
        buffer.memory, buffer.key, buffer.state, buffer.dirty = memory, key, _State.OPEN, True
        self._extents[key].places, self._extents[key].used = places, used

    def _unchanged(self, key: int, tensors: Sequence[torch.Tensor], buffer: _Buffer) -> bool:
        places, start = self._extents[key].places, buffer.memory.data_ptr()
        unique = list({id(tensor): tensor for tensor in tensors}.values())
        return len(unique) == len(places) and all(
            place.tensor is tensor and (not tensor.nbytes or tensor.data_ptr() == start + place.offset)
            for place, tensor in zip(places, unique, strict=True)
        )

    def _make_room(self, key: int, used: int) -> None:
        extent = self._extents.get(key)
        if extent is not None and used <= extent.room:
            return
        before = self.file_bytes
        larger = self._append(_blocks(used))  # what it had before is lost to the file; states appear once
        try:
            self._allocate()
        except SwapError:
            self.file_bytes = before
            raise
        self._extents[key] = larger

    def _append(self, room: int) -> _Extent:
        extent = _Extent(self.file_bytes, room)
        self.file_bytes += room
        return extent

    def _allocate(self) -> None:
        if not self.file_bytes:
            return
        free = shutil.disk_usage(self._folder).free
        try:
            self._file.allocate(self.file_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _too_small(self._folder, max(self._node_bytes, self.file_bytes), free, self.file_bytes) from error
            raise _unusable(self._folder, error) from error

    # -- in and out ----------------------------------------------------------------------------------------------

    def prefetch(self, key: int) -> None:
        """Begin to read unit ``key``, which is opened next, as soon as there is a buffer. Does not wait."""
        self._check()
        self._wanted = key
        self._read_wanted()

    def open(self, key: int) -> None:
        """Let the tensors of unit ``key`` have their values. ``release`` must follow."""
        self._check()
        buffer = self._holding(key)
        if buffer is None:
            buffer = self._take(patient=True)
            assert buffer is not None
            self._begin_read(buffer, key)
        elif buffer.state is _State.OPEN:
            raise RuntimeError(f"unit {key} is open already")
        self._land(buffer)
        buffer.state = _State.OPEN
        for place in self._extents[key].places:
            _set_in(place, buffer.memory)
        self._read_wanted()

    def release(self, key: int, *, dirty: bool = True) -> None:
        """Take the values away. ``dirty``: begin to write them; False if they are as they were when it was opened."""
        self._check()
        buffer, extent = self._holding(key), self._extents[key]
        if buffer is None or buffer.state is not _State.OPEN:
            raise RuntimeError(f"unit {key} is not open")
        for place in extent.places:
            _set_out(place.tensor)
        buffer.state = _State.IDLE
        self._used_last(buffer)
        if dirty or buffer.dirty:
            buffer.ticket = self._file.write(buffer.memory[: _blocks(extent.used)], extent.offset)
            buffer.state, buffer.dirty = _State.WRITING, False
        self._read_wanted()

    @contextmanager
    def opened(self, key: int, *, dirty: bool) -> Iterator[list[torch.Tensor]]:
        """``open`` and ``release`` around the body, which gets the tensors."""
        self.open(key)
        try:
            yield [place.tensor for place in self._extents[key].places]
        finally:
            self.release(key, dirty=dirty)

    def settle(self) -> None:
        """Wait for everything that is being written."""
        self._check()
        for buffer in self._buffers:
            if buffer.state is _State.WRITING:
                self._land(buffer)

    def close(self) -> None:
        """Wait, and give the disk's room back. Values that are out are lost. A second call does nothing.

        Raises :class:`SwapError` for a failure that nobody has been told of yet.
        """
        try:
            if self._failure is None:
                self.settle()
        finally:
            self._file.close()

    # -- buffers -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _holding(self, key: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.key == key), None)

    def _take(self, *, patient: bool) -> _Buffer | None:
        """A buffer for another unit. Without ``patient`` only one that is free now, else None."""
        for buffer in self._buffers:
            if buffer.state is _State.WRITING and buffer.ticket is not None and buffer.ticket.done():
                self._land(buffer)
        # Prefetched ones last: if all others are open, then something else came than was announced.
        for state in (_State.IDLE, *((_State.WRITING, _State.READING) if patient else ())):
            for buffer in self._buffers:
                if buffer.state is state:
                    self._land(buffer)
                    self._used_last(buffer)
                    buffer.key = None
                    return buffer
        if patient:
            raise RuntimeError(f"{len(self._buffers)} units are open, and there are no more buffers")
        return None

    def _used_last(self, buffer: _Buffer) -> None:
        self._buffers.remove(buffer)
        self._buffers.append(buffer)

    def _read_wanted(self) -> None:
        key = self._wanted
        if key is None or (self._holding(key) is None and (buffer := self._take(patient=False)) is None):
            return
        self._wanted = None
        if self._holding(key) is None:
            assert buffer is not None
            self._begin_read(buffer, key)

    def _begin_read(self, buffer: _Buffer, key: int) -> None:
        extent = self._extents[key]
        if buffer.memory.nbytes < extent.room:
            buffer.memory = aligned_empty(extent.room)
        buffer.key, buffer.state = key, _State.READING
        buffer.ticket = self._file.read(buffer.memory[: _blocks(extent.used)], extent.offset)

    def _land(self, buffer: _Buffer) -> None:
        """Wait for what is under way; the buffer is idle then."""
        ticket, writing, buffer.ticket = buffer.ticket, buffer.state is _State.WRITING, None
        buffer.state = _State.IDLE
        if ticket is not None:
            try:
                ticket.wait()
            except OSError as error:
                self._failure = _failed(self._folder, buffer.key, error, writing=writing)
                raise self._failure from error


# -- memory ------------------------------------------------------------------------------------------------------------


def _blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def _arrange(tensors: Sequence[torch.Tensor]) -> tuple[list[_Place], int]:
    """Where each tensor goes in its extent, and how many bytes they take. Overlapping ones keep their distance."""
    places, start, end, used = [], 0, -1, 0
    unique = {id(tensor): tensor for tensor in tensors}
    for tensor in sorted(unique.values(), key=torch.Tensor.data_ptr):
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            shape, strides = tuple(tensor.shape), tensor.stride()
            raise ValueError(f"a tensor of shape {shape} with strides {strides} on {tensor.device} cannot go to a file")
        if tensor.data_ptr() >= end:
            start, end, used = tensor.data_ptr(), tensor.data_ptr(), -(-used // _ALIGNMENT) * _ALIGNMENT
            base = used
        places.append(_Place(tensor, tensor.stride(), base + tensor.data_ptr() - start))
        end = max(end, tensor.data_ptr() + tensor.nbytes)
        used = max(used, places[-1].offset + tensor.nbytes)
    order = {key: index for index, key in enumerate(unique)}
    return sorted(places, key=lambda place: order[id(place.tensor)]), used


def _copy_in(places: list[_Place], memory: torch.Tensor) -> None:
    """Copy the values of all tensors into ``memory``, which none of them is in, and let them lie there."""
    for place in places:
        flat = place.tensor.detach().view(-1)
        memory[place.offset : place.offset + flat.nbytes].view(flat.dtype).copy_(flat)
    for place in places:  # only now: some share memory
        _set_in(place, memory)


@torch.no_grad()
def _set_in(place: _Place, memory: torch.Tensor) -> None:
    tensor = place.tensor
    start = memory.storage_offset() + place.offset
    tensor.set_(memory.untyped_storage(), start // tensor.element_size(), tensor.shape, place.strides)


@torch.no_grad()
def _set_out(tensor: torch.Tensor) -> None:
    loud = float("nan") if tensor.is_floating_point() or tensor.is_complex() else torch.iinfo(tensor.dtype).max
    element = torch.full((1,), loud, dtype=tensor.dtype)
    tensor.set_(element.untyped_storage(), 0, tensor.shape, (0,) * tensor.dim())


# -- files and errors --------------------------------------------------------------------------------------------------


def _open_without_name(folder: Path) -> AsyncFile:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f"zerorun-rank-{os.environ.get('RANK', '0')}-", dir=folder)
        try:
            os.close(descriptor)
            return AsyncFile(Path(name))
        finally:
            os.unlink(name)
    except OSError as error:
        raise _unusable(folder, error) from error


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def _unusable(folder: Path, error: OSError) -> SwapError:
    return SwapError(
        f"zero_optimization.offload_optimizer.nvme_path = {str(folder)!r}: a file for the optimizer states cannot be made "
        f"there: {error.strerror}. Remedy: a folder that all ranks of this machine can write to."
    )


def _too_small(folder: Path, node_bytes: int, free: int, rank_bytes: int | None = None) -> SwapError:
    own = "" if rank_bytes is None else f", {_size(rank_bytes)} of them for this one"
    return SwapError(
        f"zero_optimization.offload_optimizer.nvme_path = {str(folder)!r}: the disk is too small. The optimizer states of "
        f"all ranks of this machine take {_size(node_bytes)} ({node_bytes} bytes){own}; {_size(free)} ({free} bytes) are "
        "free. Remedy: nvme_path on a larger disk, a smaller offload_optimizer.ratio, more ranks on more machines, or a "
        "stage from 1 on, which gives each rank only its share."
    )


def _failed(folder: Path, key: int | None, error: OSError, *, writing: bool) -> SwapError:
    what, verb = ("written to", "writing") if writing else ("read from", "reading")
    name = errno.errorcode.get(error.errno or 0, error.errno)
    return SwapError(
        f"optimizer states could not be {what} {error.filename}, the file of this rank without a name in {str(folder)!r}: "
        f"{error.strerror} ({name}) while {verb} unit {key}; {_size(_free(folder))} are free. The states are lost, and the "
        "weights of some units may be a step further than others. Checkpoints are not touched: the last one is as it was. "
        "Remedy: make room there, or set zero_optimization.offload_optimizer.nvme_path to another disk, and resume from "
        "the last checkpoint."
    )


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
