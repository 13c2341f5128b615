"""Stream: write new files from beginning to end, past the page cache if they are on a disk, with checksums on the way.

[Note: past the page cache]
Written the ordinary way, a checkpoint is copied into the page cache, evicts what others keep there, and reaches the disk
only when fsync waits for it: a few GB take several times as long as the disk needs. So threads write full buffers from
aligned memory straight to the disk (O_DIRECT), a few at a time, while the next buffer is filled. Three things are written
the ordinary way: the rest of a file, files that are smaller than a buffer, and files on a file system without a block
device below it (memory, network, overlays, which gather writes better than we could).
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from .files import create
from .tensorfile import BLOCK_BYTES, FileRecord

BUFFER_BYTES = 4 << 20  # a multiple of BLOCK_BYTES and of what disks ask direct writes to be aligned to
_DEPTH = 2  # buffers that are being written at a time, per rank
_DIRECT = getattr(os, "O_DIRECT", 0)

if _DIRECT:
    import fcntl


_Job = tuple["Future[list[int]]", Callable[[mmap.mmap], list[int]], mmap.mmap]


class WriteQueue:
    """Writes full buffers in the background for the files of one rank, at most ``_DEPTH`` at a time.

    It has threads of its own: an executor of the standard library accepts no more work once the main thread has ended, but
    the last save of a program may go on after that.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._free: list[mmap.mmap] = []
        self._flying: deque[tuple[Future[list[int]], mmap.mmap]] = deque()

    def buffer(self) -> mmap.mmap:
        """Return ``BUFFER_BYTES`` of page-aligned memory for the caller to fill. Waits while too many writes are under way.

        An error of one of those writes is raised by the ``FileWriter`` of its file, not here.
        """
        while len(self._flying) >= _DEPTH:
            self._land()
        return self._free.pop() if self._free else mmap.mmap(-1, BUFFER_BYTES)

    def submit(self, write: Callable[[mmap.mmap], list[int]], buffer: mmap.mmap) -> Future[list[int]]:
        """Begin ``write(buffer)``, which returns the checksums of its blocks. The buffer belongs to the queue again."""
        while len(self._threads) < _DEPTH:
            self._threads.append(threading.Thread(target=_work, args=(self._jobs,), name="zerorun disk", daemon=True))
            self._threads[-1].start()
        future: Future[list[int]] = Future()
        self._jobs.put((future, write, buffer))
        self._flying.append((future, buffer))
        return future

    def give_back(self, buffer: mmap.mmap) -> None:
        """Take back ``buffer``, which the caller does not need any more."""
        self._free.append(buffer)

    def close(self) -> None:
        """Wait for the writes under way, then end the threads and release the memory."""
        while self._flying:
            self._land()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads, self._free = [], []

    def _land(self) -> None:
        future, buffer = self._flying.popleft()
        future.exception()
        self._free.append(buffer)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, write, buffer = job
        try:
            future.set_result(write(buffer))
        except BaseException as error:  # whoever waits for the future gets it
            future.set_exception(error)


class FileWriter:
    """A new file, written from beginning to end. Every method raises OSError with the file's name.

    ``queue`` is shared by the files that one rank writes at the same time.
    """

    def __init__(self, path: Path, queue: WriteQueue) -> None:
        self._path, self._queue = path, queue
        self._file = create(path)
        self._buffer: mmap.mmap | None = None
        self._filled = 0  # bytes of the buffer
        self._position = 0  # where in the file the buffer belongs
        self._flying: deque[Future[list[int]]] = deque()
        self._crcs: list[int] = []

    def write(self, data: memoryview | bytes) -> None:
        """Append ``data``, which is copied. An error of an earlier write may be raised now."""
        view = memoryview(data)
        while self._flying and self._flying[0].done():
            self._crcs += self._flying.popleft().result()
        while view.nbytes:
            if self._buffer is None:
                self._buffer = self._queue.buffer()
            part = view[: BUFFER_BYTES - self._filled]
            self._buffer[self._filled : self._filled + part.nbytes] = part
            self._filled += part.nbytes
            view = view[part.nbytes :]
            if self._filled == BUFFER_BYTES:
                self._send()

    def _send(self) -> None:
        assert self._buffer is not None
        if self._position == 0:
            _go_past_cache(self._file)
        position = self._position
        self._flying.append(self._queue.submit(lambda buffer: self._write_at(position, memoryview(buffer)), self._buffer))
        self._position += BUFFER_BYTES
        self._buffer, self._filled = None, 0

    def _write_at(self, position: int, data: memoryview) -> list[int]:
        """Write ``data`` at the byte ``position``, and return the checksum of each of its blocks."""
        crcs = [zlib.crc32(data[begin : begin + BLOCK_BYTES]) for begin in range(0, data.nbytes, BLOCK_BYTES)]
        done = 0
        with _naming(self._path):
            while done < data.nbytes:
                # Asked before the write: while this one fails, another thread's may have failed and changed the flag.
                direct = _goes_past_cache(self._file)
                try:
                    done += os.pwrite(self._file, data[done:], position + done)
                except OSError as error:
                    if error.errno != errno.EINVAL or not direct:
                        raise
                    _go_through_cache(self._file)
                else:
                    if done < data.nbytes:  # the disk is getting full: the rest may not be aligned
                        _go_through_cache(self._file)
        return crcs

    def close(self) -> FileRecord:
        """Write the rest of the file, make it durable, and return its record."""
        try:
            while self._flying:
                self._crcs += self._flying.popleft().result()
            if self._buffer is not None:
                _go_through_cache(self._file)
                self._crcs += self._write_at(self._position, memoryview(self._buffer)[: self._filled])
            with _naming(self._path):
                os.fsync(self._file)
        finally:
            self.abandon()
        return FileRecord(self._position + self._filled, tuple(self._crcs))

    def abandon(self) -> None:
        """Wait for the writes under way, and close the file without making it durable. A second call does nothing."""
        for future in self._flying:
            future.exception()
        if self._buffer is not None:
            self._queue.give_back(self._buffer)
            self._buffer = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an OSError, which otherwise has none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _go_past_cache(file: int) -> None:
    """Make writes to ``file`` bypass the page cache, if the file is on a disk."""
    if _DIRECT and os.major(os.fstat(file).st_dev) != 0:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | _DIRECT)
        except OSError:  # the file system cannot
            return


def _go_through_cache(file: int) -> None:
    """Make writes to ``file`` go through the page cache again."""
    if _goes_past_cache(file):
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~_DIRECT)


def _goes_past_cache(file: int) -> bool:
    return bool(_DIRECT and fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT)


def write_small(path: Path, data: bytes) -> FileRecord:
    """Write a whole small file, durably. Raises OSError with the file's name."""
    writer = FileWriter(path, WriteQueue())
    try:
        writer.write(data)
        return writer.close()
    finally:
        writer.abandon()
