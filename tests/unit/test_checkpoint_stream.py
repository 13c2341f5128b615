"""Files of a checkpoint on their way to the disk: past the page cache and through it, and what goes wrong there."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerorun.checkpoint import stream
from zerorun.checkpoint.stream import FileWriter, WriteQueue
from zerorun.checkpoint.tensorfile import FileRecord

BUFFER, BLOCK = 16384, 4096
PWRITE = os.pwrite


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BUFFER_BYTES", BUFFER)
    monkeypatch.setattr(stream, "BLOCK_BYTES", BLOCK)


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on tmp_path's file system, and one in memory, which has no disk below."""
    if request.param == "disk":
        yield tmp_path
        return
    folder = Path("/dev/shm") / f"zerorun-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def sums(data: bytes) -> tuple[int, ...]:
    return tuple(zlib.crc32(data[begin : begin + BLOCK]) for begin in range(0, len(data), BLOCK))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def write_all(folder: Path, contents: list[bytes], chosen: random.Random) -> list[FileRecord]:
    """Files ``0``, ``1``, ... written in turn, in pieces of random lengths."""
    for index in range(len(contents)):
        (folder / str(index)).unlink(missing_ok=True)  # of the example before
    queue = WriteQueue()
    writers = [FileWriter(folder / str(index), queue) for index in range(len(contents))]
    left = list(contents)
    while any(left):
        index = chosen.choice([index for index, data in enumerate(left) if data])
        length = chosen.randint(1, 3 * BUFFER)
        writers[index].write(left[index][:length])
        left[index] = left[index][length:]
    records = [writer.close() for writer in writers]
    queue.close()
    return records


SIZES = st.one_of(st.integers(0, 5 * BUFFER), st.sampled_from([BLOCK, BUFFER - 1, BUFFER, BUFFER + 1, 2 * BUFFER]))


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SIZES, min_size=1, max_size=4), st.integers(0, 1 << 30))
def test_what_is_written_is_there(place: Path, sizes: list[int], seed: int) -> None:
    chosen = random.Random(seed)
    contents = [chosen.randbytes(size) for size in sizes]
    before = open_files()
    records = write_all(place, contents, chosen)
    assert open_files() == before
    for index, data in enumerate(contents):
        assert (place / str(index)).read_bytes() == data
        assert records[index] == FileRecord(len(data), sums(data))


def test_whole_buffers_go_past_the_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk, and only there; the rest of the file does not."""
    seen: list[tuple[int, int, bool]] = []

    def watching(file: int, data: Any, at: int) -> int:
        seen.append((at, len(data), is_direct(file)))
        return PWRITE(file, data, at)

    monkeypatch.setattr(os, "pwrite", watching)
    write_all(place, [bytes(2 * BUFFER + 5)], random.Random(0))
    disk = os.major(place.stat().st_dev) != 0
    assert sorted(seen) == [(0, BUFFER, disk), (BUFFER, BUFFER, disk), (2 * BUFFER, 5, False)]


def refuse_direct(file: int, data: Any, at: int) -> int:
    """A file system that finds out late that it cannot."""
    if is_direct(file):
        raise OSError(errno.EINVAL, "Invalid argument")
    return PWRITE(file, data, at)


def refuse_two_at_once() -> Callable[..., int]:
    """The same, while another thread's write is under way too."""
    both = threading.Barrier(2)

    def refuse(file: int, data: Any, at: int) -> int:
        if is_direct(file):
            both.wait(60)
            raise OSError(errno.EINVAL, "Invalid argument")
        return PWRITE(file, data, at)

    return refuse


def write_less(file: int, data: Any, at: int) -> int:
    """A disk that is nearly full, again and again."""
    return PWRITE(file, data[:BLOCK] if is_direct(file) else data[: max(len(data) // 3, 1)], at)


@pytest.mark.parametrize("act", [refuse_direct, write_less])
def test_writes_that_need_another_try(place: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[..., int]) -> None:
    chosen = random.Random(1)
    contents = [chosen.randbytes(size) for size in (3 * BUFFER + 777, BUFFER, 10)]
    monkeypatch.setattr(os, "pwrite", act)
    records = write_all(place, contents, chosen)
    assert [(place / str(index)).read_bytes() for index in range(3)] == contents
    assert [record.crcs for record in records] == [sums(data) for data in contents]


def test_two_writes_at_once_that_need_another_try(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(3)
    data = chosen.randbytes(2 * BUFFER)
    monkeypatch.setattr(os, "pwrite", refuse_two_at_once())
    assert write_all(place, [data], chosen) == [FileRecord(len(data), sums(data))]
    assert (place / "0").read_bytes() == data


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_one_write_that_fails_fails_the_file(place: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """In the background, and never again: what comes after it is written, and the file has a hole."""
    calls, lock = 0, threading.Lock()

    def failing(file: int, data: Any, at: int) -> int:
        nonlocal calls
        with lock:
            calls += 1
            if calls == nth:
                raise OSError(errno.EIO, "Input/output error")
        return PWRITE(file, data, at)

    monkeypatch.setattr(os, "pwrite", failing)
    queue = WriteQueue()
    writer = FileWriter(place / "bad", queue)
    with pytest.raises(OSError, match="Input/output error") as found:
        writer.write(bytes(3 * BUFFER + 9))
        writer.close()
    assert found.value.filename == str(place / "bad")
    writer.abandon()
    queue.close()


@pytest.mark.parametrize("nth", [1, 3, 4])
def test_errors_in_the_background_name_their_file(place: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """The file with the problem says so, the other one is as if nothing were."""
    chosen, calls = random.Random(2), 0
    lock = threading.Lock()

    def filling(file: int, data: Any, at: int) -> int:
        nonlocal calls
        if os.readlink(f"/proc/self/fd/{file}").endswith("bad"):
            with lock:
                calls += 1
                if calls >= nth:
                    raise OSError(errno.ENOSPC, "No space left on device")
        return PWRITE(file, data, at)

    monkeypatch.setattr(os, "pwrite", filling)
    before, threads = open_files(), threading.active_count()
    queue = WriteQueue()
    good, bad = FileWriter(place / "good", queue), FileWriter(place / "bad", queue)
    data = chosen.randbytes(3 * BUFFER + 9)
    with pytest.raises(OSError, match="No space left") as found:
        for begin in range(0, len(data), 1000):
            good.write(data[begin : begin + 1000])
            bad.write(data[begin : begin + 1000])
        bad.close()
    assert found.value.filename == str(place / "bad")
    written = good._position + good._filled
    good.write(data[written:])
    assert good.close() == FileRecord(len(data), sums(data))
    assert (place / "good").read_bytes() == data
    bad.abandon()
    queue.close()
    assert open_files() == before
    assert threading.active_count() == threads


def test_no_file_is_closed_under_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is free again may be another file's."""
    going, done = threading.Event(), []

    def slow(file: int, data: Any, at: int) -> int:
        going.wait(10)
        done.append(os.readlink(f"/proc/self/fd/{file}"))
        return PWRITE(file, data, at)

    monkeypatch.setattr(os, "pwrite", slow)
    queue = WriteQueue()
    writer = FileWriter(tmp_path / "x", queue)
    writer.write(bytes(2 * BUFFER))
    threading.Timer(0.2, going.set).start()
    writer.abandon()
    queue.close()
    assert done == [str(tmp_path / "x")] * 2


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer for each file that is being written, and those that are on their way."""
    made = []
    new = mmap.mmap

    def counting(*arguments: int) -> mmap.mmap:
        made.append(arguments)
        return new(*arguments)

    monkeypatch.setattr(mmap, "mmap", counting)
    write_all(tmp_path, [bytes(20 * BUFFER)] * 3, random.Random(3))
    assert len(made) <= 3 + stream._DEPTH
