"""Asynchronous reads and writes of files: the files, tickets to wait for, the choice of a back end, and aligned memory.

The back ends are those of csrc/aio.cpp: io_uring, Linux AIO or threads, whichever is the first to work on this machine.
Without the native library, Python threads read and write the same bytes. ``ZERORUN_AIO`` chooses another back end:
``io_uring``, ``libaio``, ``threads`` or ``python``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from . import native

BACKENDS = ("io_uring", "libaio", "threads", "python")  # the first three in the order of enum Backend in aio.cpp
BLOCK_BYTES = 4096  # no disk or file system in use asks direct access to be aligned to more
PIECE_BYTES = 1 << 20  # most bytes per call of the kernel: large enough that calls cost nothing
DEPTH = 32  # most pieces that the kernel has at a time: more than disks work on at once
_PYTHON_THREADS = 8
_DIRECT = getattr(os, "O_DIRECT", 0)

_logger = logging.getLogger("zerorun")
_warned: set[str] = set()


@torch.inference_mode(False)  # an inference tensor could not be written to outside of inference mode
def aligned_empty(nbytes: int) -> torch.Tensor:
    """Return a tensor [nbytes] uint8 whose memory starts at a page boundary."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages to hand to the disk: reads and writes take a fifth less time
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Ticket:
    """One request. Call ``wait`` before the tensor is used; several threads may wait for the same ticket."""

    def __init__(self, file: AsyncFile, number: int) -> None:
        self._file, self._number = file, number
        self._errno: int | None = None  # 0 after success
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Return whether ``wait`` would return, or raise, at once."""
        return self._errno is not None or self._file._queue.done(self._number)

    def wait(self) -> None:
        """Wait until all bytes have moved. If that failed, every call raises OSError with the name of the file."""
        error = self.settle()
        if error:
            raise OSError(error, os.strerror(error), str(self._file.path))

    def settle(self) -> int:
        """Wait, and return errno, or 0 for success."""
        with self._lock:
            if self._errno is None:
                self._errno = self._file._finish(self._number)
            return self._errno


class AsyncFile:
    """A file to read and write, created if it does not exist. Threads may share it.

    ``descriptor``: that of the file, if it is open already. This object owns it from now on, and uses ``path`` in error
    messages only, because the path may lead to another file by now.

    Requests whose memory, offset and length are multiples of :data:`BLOCK_BYTES` bypass the page cache if the file system
    allows it. Requests that overlap and are under way at the same time may come out mixed.
    """

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """Raises OSError, and ValueError if ZERORUN_AIO names a back end that does not work here."""
        self.path = path
        opened = _open_twice(path) if descriptor is None else (_reopen_direct(descriptor), descriptor)
        self._direct, self._cached = opened
        try:
            self.backend, self._queue = _open_queue()
        except BaseException:
            _close_files((self._direct, self._cached))
            raise
        self._kept: dict[int, torch.Tensor] = {}  # request -> its tensor, not to be freed while the disk works with it
        self._tickets: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()
        self._release = weakref.finalize(self, _release, self._queue, (self._direct, self._cached), self._kept, os.getpid())

    @property
    def direct(self) -> bool:
        """True if requests may bypass the page cache."""
        return self._direct >= 0

    @property
    def descriptor(self) -> int:
        """A descriptor of the file without O_DIRECT, for everything but reading and writing."""
        return self._cached

    def allocate(self, nbytes: int) -> None:
        """Make the file at least ``nbytes`` long, and reserve room on the disk for all of them. Raises OSError."""
        try:
            os.posix_fallocate(self._cached, 0, nbytes)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def read(self, tensor: torch.Tensor, offset: int) -> Ticket:
        """Begin to fill ``tensor``, contiguous and on the CPU, with the bytes from ``offset`` on."""
        return self._submit(tensor, offset, write=False)

    def write(self, tensor: torch.Tensor, offset: int) -> Ticket:
        """Begin to write ``tensor``, contiguous and on the CPU, to ``offset``. It must not change until that is done."""
        return self._submit(tensor, offset, write=True)

    def close(self) -> None:
        """Wait for all requests, and close the file. Errors are left to the tickets. A second call does nothing."""
        for number in list(self._kept):
            ticket = self._tickets.get(number)
            self._finish(number) if ticket is None else ticket.settle()
        self._release()

    def _finish(self, number: int) -> int:
        error = self._queue.wait(number)
        self._kept.pop(number)
        return error

    def _submit(self, tensor: torch.Tensor, offset: int, *, write: bool) -> Ticket:
        if not self._release.alive:
            raise ValueError(f"{self.path} is closed")
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or offset < 0:
            place = f"a tensor on {tensor.device} with strides {tensor.stride()}, offset {offset}"
            raise ValueError(f"{self.path}: {place}; it must be contiguous and on the CPU, and the offset not negative")
        request = _Request(self._direct, self._cached, tensor.data_ptr(), tensor.nbytes, offset, write)
        number = self._queue.submit(request)
        self._kept[number] = tensor
        ticket = self._tickets[number] = Ticket(self, number)
        return ticket


def _open_twice(path: Path) -> tuple[int, int]:
    """Return (descriptor that bypasses the page cache, or -1; descriptor that uses it)."""
    cached = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    return _reopen_direct(cached), cached


def _reopen_direct(cached: int) -> int:
    """Open the same file so that it bypasses the page cache, and return the descriptor; -1 if that is impossible."""
    try:
        return os.open(f"/proc/self/fd/{cached}", os.O_RDWR | _DIRECT) if _DIRECT else -1
    except OSError:  # the file system cannot, or there is no /proc
        return -1


def _close_files(files: tuple[int, int]) -> None:
    for file in files:
        if file >= 0:
            os.close(file)


def _release(queue: _Queue, files: tuple[int, int], kept: dict[int, torch.Tensor], process: int) -> None:
    """Close everything. Requests that have not begun are cancelled; ``kept`` holds the memory until none is under way."""
    if os.getpid() == process:  # a forked child has neither the threads nor the memory
        queue.close()
        _close_files(files)
        kept.clear()


# -- back ends ---------------------------------------------------------------------------------------------------------


@dataclass
class _Request:
    """``nbytes`` between memory at ``address`` and the file at ``offset``. ``direct`` bypasses the page cache, or is -1."""

    direct: int
    cached: int
    address: int
    nbytes: int
    offset: int
    write: bool


class _Queue(Protocol):
    """Runs requests, which get numbers from 1. A number may be waited for only once."""

    def submit(self, request: _Request) -> int: ...
    def done(self, number: int) -> bool: ...
    def wait(self, number: int) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class FileStatus:
    """``backend``: one of :data:`BACKENDS`, or None if ZERORUN_AIO names one that does not work. ``reason``: why so."""

    backend: str | None
    reason: str


def status() -> FileStatus:
    """Return which back end files get in this process, and why. Opens a queue to find out."""
    wanted = os.environ.get("ZERORUN_AIO")
    try:
        backend, queue = _open_queue()
    except ValueError as error:
        return FileStatus(None, str(error))
    queue.close()
    if wanted:
        return FileStatus(backend, f"ZERORUN_AIO={wanted}")
    if backend == "python":
        return FileStatus(backend, f"threads of Python: {native.status().reason}")
    left_out = BACKENDS[: BACKENDS.index(backend)]
    return FileStatus(backend, f"{' and '.join(left_out)}: not allowed here, or not there" if left_out else "works here")


def _open_queue() -> tuple[str, _Queue]:
    """Return (the back end, a new queue of it). Raises ValueError if ZERORUN_AIO names one that does not work."""
    wanted = os.environ.get("ZERORUN_AIO")
    if wanted and wanted not in BACKENDS:
        raise ValueError(f"ZERORUN_AIO is {wanted!r}; it can be {', '.join(BACKENDS)}, or unset")
    library = native.library() if wanted != "python" else None
    for backend in BACKENDS[:-1]:
        if library and wanted in (None, "", backend) and (opened := _NativeQueue.open(library.functions, backend)):
            return backend, opened
    if wanted and wanted != "python":
        raise ValueError(f"ZERORUN_AIO is {wanted!r}, which does not work here: {native.status().reason}")
    if not wanted:
        _warn_once("files are read and written by threads of Python, as there is no native library: see above")
    return "python", _PythonQueue()


class _NativeQueue:
    """A queue of csrc/aio.cpp."""

    def __init__(self, functions: ctypes.CDLL, handle: int) -> None:
        self._functions, self._handle = functions, ctypes.c_void_p(handle)

    @classmethod
    def open(cls, functions: ctypes.CDLL, backend: str) -> _NativeQueue | None:
        pointer, number, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        functions.zerorun_io_open.argtypes, functions.zerorun_io_open.restype = [number, number, size], pointer
        functions.zerorun_io_submit.argtypes = [pointer, number, number, pointer, size, size, number]
        functions.zerorun_io_submit.restype = size
        for function in (functions.zerorun_io_wait, functions.zerorun_io_done):
            function.argtypes, function.restype = [pointer, size], number
        functions.zerorun_io_close.argtypes, functions.zerorun_io_close.restype = [pointer], None
        handle = functions.zerorun_io_open(BACKENDS.index(backend), DEPTH, PIECE_BYTES)
        return cls(functions, handle) if handle else None

    def submit(self, request: _Request) -> int:
        r = request
        number = self._functions.zerorun_io_submit(self._handle, r.direct, r.cached, r.address, r.nbytes, r.offset, r.write)
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        return int(number)

    def done(self, number: int) -> bool:
        return bool(self._functions.zerorun_io_done(self._handle, number))

    def wait(self, number: int) -> int:
        return int(self._functions.zerorun_io_wait(self._handle, number))

    def close(self) -> None:
        self._functions.zerorun_io_close(self._handle)


class _PythonQueue:
    """The same in Python. The system calls do most of the work, and release the interpreter's lock."""

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[tuple[int, _Request] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the next three
        self._left: dict[int, int] = {}  # request -> its pieces that are not done
        self._errors: dict[int, int] = {}
        self._last = 0
        self._threads = [
            threading.Thread(target=self._work, name="zerorun aio", daemon=True) for _ in range(_PYTHON_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: _Request) -> int:
        pieces = list(_cut(request))
        with self._changed:
            self._last += 1
            number = self._last
            self._left[number], self._errors[number] = len(pieces), 0
        for piece in pieces:
            self._pieces.put((number, piece))
        return number

    def done(self, number: int) -> bool:
        with self._changed:
            return not self._left.get(number)

    def wait(self, number: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: not self._left[number])
            del self._left[number]
            return self._errors.pop(number)

    def close(self) -> None:
        with self._changed:
            for number, left in self._left.items():
                if left and not self._errors[number]:
                    self._errors[number] = errno.ECANCELED
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._pieces.get()) is not None:
            number, piece = job
            error = self._errors[number] or _move(piece)
            with self._changed:
                self._errors[number] = self._errors[number] or error
                self._left[number] -= 1
                self._changed.notify_all()


def _cut(request: _Request) -> Iterator[_Request]:
    for done in range(0, request.nbytes, PIECE_BYTES):
        nbytes = min(PIECE_BYTES, request.nbytes - done)
        yield replace(request, address=request.address + done, nbytes=nbytes, offset=request.offset + done)


def _move(piece: _Request) -> int:
    """Move all bytes of a piece, and return errno, or 0 for success."""
    memory = memoryview((ctypes.c_char * piece.nbytes).from_address(piece.address)).cast("B")
    done, call, direct = 0, os.pwritev if piece.write else os.preadv, piece.direct
    while done < piece.nbytes:
        aligned = (piece.address + done) | (piece.nbytes - done) | (piece.offset + done)
        past_cache = direct >= 0 and aligned % BLOCK_BYTES == 0
        try:
            moved = call(direct if past_cache else piece.cached, [memory[done:]], piece.offset + done)
        except OSError as error:
            if error.errno == errno.EINVAL and past_cache:
                direct = -1
                continue
            return error.errno or errno.EIO
        if moved == 0:  # the file is shorter than that
            return errno.EIO if piece.write else errno.ENODATA
        done += moved
    return 0


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        _logger.warning(message)
