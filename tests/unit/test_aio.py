"""Asynchronous files: every back end gives the same bytes, and says what went wrong."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import operator
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from covering import by_day
from harness import patience, start_script
from small_disk import run_on_small_disk

from zerorun.ops import aio, build, native
from zerorun.ops.aio import BLOCK_BYTES, PIECE_BYTES, AsyncFile, aligned_empty
from zerorun.report import software

SHARED_MEMORY = Path("/dev/shm")
LARGE = 70 * PIECE_BYTES  # more pieces than are at the kernel at a time


@pytest.fixture(params=aio.BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ZERORUN_AIO", request.param)
    if request.param not in (aio.status().backend,):
        pytest.skip(f"{request.param} does not work here")
    return str(request.param)


@pytest.fixture
def file(backend: str, tmp_path: Path) -> Iterator[AsyncFile]:
    opened = AsyncFile(tmp_path / "file")
    assert opened.backend == backend
    yield opened
    opened.close()


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return aligned_empty(nbytes).random_(0, 256, generator=generator)


def read_back(file: AsyncFile, nbytes: int, offset: int) -> torch.Tensor:
    found = aligned_empty(nbytes)
    file.read(found, offset).wait()
    return found


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_large_requests(file: AsyncFile) -> None:
    data = random_bytes(LARGE)
    file.write(data, 0).wait()
    assert torch.equal(read_back(file, LARGE, 0), data)
    assert file.path.read_bytes() == data.numpy().tobytes()


SIZES = [1, 511, BLOCK_BYTES, BLOCK_BYTES + 1, PIECE_BYTES - 1, PIECE_BYTES + BLOCK_BYTES, 3000001]


@pytest.mark.each_value
@pytest.mark.parametrize("nbytes", SIZES)
def test_odd_places(file: AsyncFile, nbytes: int) -> None:
    """Whatever is not aligned goes through the page cache, and meets what went past it."""
    before = random_bytes(4 * BLOCK_BYTES, 1)
    for start, offset in itertools.product((0, 1, BLOCK_BYTES), (0, 7, 512, 2 * BLOCK_BYTES)):
        os.truncate(file.path, 0)
        whole = random_bytes(start + nbytes)
        file.write(before, 0).wait()
        file.write(whole[start:], offset).wait()
        expected = bytearray(before.numpy().tobytes())
        expected[offset : offset + nbytes] = whole[start:].numpy().tobytes()
        assert file.path.read_bytes() == bytes(expected)
        assert torch.equal(read_back(file, nbytes, offset), whole[start:])


def test_tensors_of_any_type(file: AsyncFile) -> None:
    data = torch.arange(5000, dtype=torch.bfloat16).view(50, 100)
    file.write(data, 64).wait()
    found = torch.empty_like(data)
    file.read(found, 64).wait()
    assert torch.equal(found, data)
    empty = file.read(torch.empty(0), 0)
    assert empty.done()
    empty.wait()


def test_many_requests_at_once(file: AsyncFile) -> None:
    parts = [random_bytes(BLOCK_BYTES * (1 + seed % 3), seed) for seed in range(300)]
    written = [file.write(part, index * 4 * BLOCK_BYTES) for index, part in enumerate(parts)]
    for ticket in reversed(written):
        ticket.wait()
    found = [aligned_empty(part.numel()) for part in parts]
    read = [file.read(part, index * 4 * BLOCK_BYTES) for index, part in enumerate(found)]
    for ticket in read:
        ticket.wait()
        assert ticket.done()
    assert all(torch.equal(part, other) for part, other in zip(parts, found, strict=True))


def test_threads_share_a_file(file: AsyncFile) -> None:
    """One submits and another waits; several do both."""
    wrong = []

    def work(number: int) -> None:
        data = random_bytes(3 * PIECE_BYTES, number)
        for turn in range(4):
            offset = (4 * number + turn) * 3 * PIECE_BYTES
            ticket = file.write(data, offset)
            waiter = threading.Thread(target=ticket.wait)
            waiter.start()
            ticket.wait()
            waiter.join()
            if not torch.equal(read_back(file, data.numel(), offset), data):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_that_nobody_keeps(file: AsyncFile) -> None:
    for index in range(8):
        file.write(random_bytes(4 * PIECE_BYTES, index), index * 4 * PIECE_BYTES)
    file.close()
    content = file.path.read_bytes()
    for index in range(8):
        part = random_bytes(4 * PIECE_BYTES, index).numpy().tobytes()
        assert content[index * 4 * PIECE_BYTES :][: 4 * PIECE_BYTES] == part


def test_where_there_is_no_disk(backend: str) -> None:
    """File systems in memory take every request, past the cache or not."""
    if not SHARED_MEMORY.is_dir():
        pytest.skip("there is no /dev/shm")
    path = SHARED_MEMORY / f"zerorun-test-aio-{os.getpid()}"
    file = AsyncFile(path)
    try:
        data = random_bytes(3 * PIECE_BYTES + 5)
        file.write(data, 3).wait()
        assert torch.equal(read_back(file, data.numel(), 3), data)
    finally:
        file.close()
        path.unlink()


def test_a_file_system_without_direct_access(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "_DIRECT", 0)
    file = AsyncFile(tmp_path / "file")
    assert not file.direct
    data = random_bytes(2 * PIECE_BYTES)
    file.write(data, 0).wait()
    assert torch.equal(read_back(file, data.numel(), 0), data)
    file.close()


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="there is no /proc")
def test_a_disk_that_refuses_direct_access(file: AsyncFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some say so (EINVAL) only when they are asked to move bytes; so does this file in /proc, of what is no number."""
    refusing, cached = os.open("/proc/self/oom_score_adj", os.O_RDWR), os.open(file.path, os.O_RDWR)
    monkeypatch.setattr(aio, "_open_twice", lambda path: (refusing, cached))
    data = torch.full((2 * PIECE_BYTES,), 255, dtype=torch.uint8)
    other, aligned = AsyncFile(file.path), aligned_empty(data.nbytes).copy_(data)
    other.write(aligned, 0).wait()
    other.close()
    assert torch.equal(read_back(file, data.nbytes, 0), data)


def test_tickets_hold_the_file(file: AsyncFile) -> None:
    ticket = AsyncFile(file.path).write(random_bytes(PIECE_BYTES), 0)
    gc.collect()
    ticket.wait()
    assert torch.equal(read_back(file, PIECE_BYTES, 0), random_bytes(PIECE_BYTES))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_the_end_of_the_file(file: AsyncFile) -> None:
    file.write(random_bytes(3 * BLOCK_BYTES + 10), 0).wait()
    for nbytes, offset in ((BLOCK_BYTES, 3 * BLOCK_BYTES), (4 * PIECE_BYTES, 0), (1, 10**9)):
        ticket = file.read(aligned_empty(nbytes), offset)
        for _ in range(2):  # however often one asks
            with pytest.raises(OSError) as caught:
                ticket.wait()
            assert (caught.value.errno, caught.value.filename) == (errno.ENODATA, str(file.path))
    assert read_back(file, 10, 3 * BLOCK_BYTES).numel() == 10  # and others are not affected


BACKENDS_THAT_WORK = """
import os, resource, signal
from pathlib import Path
from zerorun.ops import aio
from zerorun.ops.aio import AsyncFile, aligned_empty
def backends():
    for name in aio.BACKENDS:
        os.environ["ZERORUN_AIO"] = name
        if aio.status().backend == name:
            yield name
"""

FILL = """
for name in backends():
    file = AsyncFile(Path("file"))
    file.write(aligned_empty(1 << 20).fill_(3), 0).wait()  # pieces of one write are written in any order
    try:
        file.write(aligned_empty(12 << 20).fill_(1), 0).wait()
    except OSError as error:
        print(name, error.errno, error.filename, end=" ")
    file.write(aligned_empty(1 << 20).fill_(2), 0).wait()  # what lies there may be written again
    found = aligned_empty(1 << 20)
    file.read(found, 0).wait()
    print(int(found.min()), file.direct)
    file.close()
    os.unlink("file")
"""


@pytest.mark.parametrize("kind", by_day(("tmpfs", "ext4"), "ext4"))
def test_a_full_disk(kind: str, tmp_path: Path) -> None:
    printed = run_on_small_disk(BACKENDS_THAT_WORK + FILL, tmp_path, mebibytes=9, kind=kind).splitlines()
    assert printed[-1].startswith("python ")
    for line in printed:
        _, number, name, found, direct = line.split()
        assert (number, name, found) == (str(errno.ENOSPC), "file", "2")
        assert kind != "ext4" or direct == "True"


@pytest.mark.parametrize("write", (False, True))
def test_an_error_of_one_piece_is_that_of_the_request(file: AsyncFile, write: bool) -> None:
    """Whatever the other pieces, which are done before or after it, say."""
    memory = random_bytes(8 * PIECE_BYTES)
    file.write(memory, 0).wait()
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    page = (ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(BLOCK_BYTES))
    assert protect(*page, 0) == 0
    try:
        found = (file.write if write else file.read)(memory, 0).settle()
    finally:
        assert protect(*page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert found == errno.EFAULT


def test_a_piece_that_was_begun_before_another_failed_does_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, begun = aio._PythonQueue(), threading.Event()

    def move(piece: aio._Request) -> int:
        if piece.offset == 0:
            assert begun.wait(30 * patience())
            return errno.EIO
        begun.set()
        while pieces._left[1] > 1:
            time.sleep(0.001)
        return 0

    monkeypatch.setattr(aio, "_move", move)
    memory = aligned_empty(2 * PIECE_BYTES)
    number = pieces.submit(aio._Request(-1, -1, memory.data_ptr(), memory.nbytes, 0, True))
    assert pieces.wait(number) == errno.EIO
    pieces.close()


LIMIT = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for name in backends():
    resource.setrlimit(resource.RLIMIT_FSIZE, (aio.PIECE_BYTES + 4096 + 512, -1))
    file = AsyncFile(Path("file"))
    try:
        file.write(aligned_empty(3 * aio.PIECE_BYTES), 0).wait()
    except OSError as error:
        print(name, error.errno)
    file.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
"""


def test_a_limit_on_the_file(tmp_path: Path) -> None:
    """A short write first, then the error: in a process of its own, as the limit is the process's."""
    text = f"import os\nos.chdir({str(tmp_path)!r})\n{BACKENDS_THAT_WORK}{LIMIT}"
    code, out, err = start_script(text).finish(60 * patience())
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert lines[-1][0] == "python" and {number for _, number in lines} == {str(errno.EFBIG)}


def test_room_is_refused(file: AsyncFile) -> None:
    file.allocate(BLOCK_BYTES)
    assert file.path.stat().st_size == BLOCK_BYTES
    with pytest.raises(OSError) as caught:
        file.allocate(2**62)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG) and caught.value.filename == str(file.path)


def test_closed_files(file: AsyncFile) -> None:
    ticket = file.write(random_bytes(PIECE_BYTES), 0)
    late = file.read(aligned_empty(BLOCK_BYTES), 10**9)
    file.close()
    file.close()
    ticket.wait()
    with pytest.raises(OSError, match="No data"):
        late.wait()
    for begin in (file.read, file.write):
        with pytest.raises(ValueError, match="is closed"):
            begin(random_bytes(10), 0)


def test_tensors_that_have_no_place(file: AsyncFile) -> None:
    for tensor, offset in ((torch.ones(4, 4).t(), 0), (torch.ones(4, device="meta"), 0), (torch.ones(4), -1)):
        with pytest.raises(ValueError, match="contiguous"):
            file.write(tensor, offset)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        AsyncFile(tmp_path / "nowhere" / "file")


def test_nothing_stays_open(backend: str, tmp_path: Path) -> None:
    """Threads, files and the kernel's rings, of files that were closed and of files that were forgotten."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = held()
    for turn in range(4):
        file = AsyncFile(tmp_path / "file")
        file.write(aligned_empty(2 * PIECE_BYTES), 0)
        if turn % 2:
            file.close()
        del file
    end = time.monotonic() + 10  # a thread is joined a little before it is gone
    while any(map(operator.gt, held(), before)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(operator.gt, held(), before))


def test_forked_children_leave_it_alone(file: AsyncFile) -> None:
    child = os.fork()
    if not child:
        file._release()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    data = random_bytes(2 * PIECE_BYTES)
    file.write(data, 0).wait()
    assert torch.equal(read_back(file, data.numel(), 0), data)


# -- which one ---------------------------------------------------------------------------------------------------------


def test_names_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERORUN_AIO", "magic")
    with pytest.raises(ValueError, match="it can be io_uring, libaio, threads, python, or unset"):
        AsyncFile(tmp_path / "file")
    assert aio.status().backend is None


def test_without_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(aio, "_warned", set())
    monkeypatch.delenv("ZERORUN_AIO", raising=False)
    for _ in range(2):
        file = AsyncFile(tmp_path / "file")
        assert file.backend == "python"
        file.close()
    assert len([record for record in caplog.records if "threads of Python" in record.message]) == 1
    monkeypatch.setenv("ZERORUN_AIO", "threads")
    with pytest.raises(ValueError, match="does not work here"):
        AsyncFile(tmp_path / "file")


FORBID = """
import ctypes, os, struct, sys
from pathlib import Path
import torch
from zerorun.ops import aio
os.chdir(sys.argv[1])
os.environ.pop("ZERORUN_AIO", None)
numbers = [int(number) for number in sys.argv[2:]]
code = struct.pack("HBBI", 0x20, 0, 0, 0)  # load the number of the system call
for number in numbers:
    code += struct.pack("HBBI", 0x15, 0, 1, number) + struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | 1)  # EPERM
code += struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)  # allow
kept = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(kept)))
libc = ctypes.CDLL(None)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
file, data = aio.AsyncFile(Path("file")), torch.arange(10**6)
file.write(data, 0).wait()
found = torch.empty_like(data)
file.read(found, 0).wait()
print(file.backend, torch.equal(found, data), aio.status().reason)
"""
SETUP = {"x86_64": ("425", "206"), "aarch64": ("425", "0")}.get(platform.machine(), ())  # of io_uring, of AIO


@pytest.mark.skipif(not list(build.compilers(os.environ)) or not SETUP, reason="no C++ compiler, or another processor")
@pytest.mark.parametrize("forbidden", by_day((1, 2), 1))
def test_the_next_back_end_is_taken(forbidden: int, tmp_path: Path) -> None:
    """As in containers: the kernel forbids the system call."""
    code, out, err = start_script(FORBID, str(tmp_path), *SETUP[:forbidden]).finish(60 * patience())
    if code == 77:
        pytest.skip("this process may not forbid itself anything")
    assert code == 0, err
    backend, right, reason = out.split(maxsplit=2)
    assert right == "True"
    if backend == "threads":  # in a container without AIO from the beginning
        assert reason.startswith("io_uring and libaio: not allowed here")
    else:
        assert (backend, forbidden) == ("libaio", 1) and reason.startswith("io_uring: not allowed here")


def test_the_report_shows_it() -> None:
    (entry,) = (op for op in software.describe_software()["native_ops"] if op["name"] == "native file access")
    status = aio.status()
    assert entry["in_force"] == (status.backend != "python") and status.reason in entry["why"]
