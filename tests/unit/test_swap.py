"""States of units in a file: the same bits come back to the same tensors, two or more at a time, and full disks say so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_disk import run_on_small_disk

from zerorun.errors import SwapError
from zerorun.ops import single_pass
from zerorun.ops.aio import BLOCK_BYTES, AsyncFile, Ticket
from zerorun.zero import swap
from zerorun.zero.swap import StateFile, require_room

NUMELS = (20_003, 777, 31, 10_000, 1)  # of the units of most tests; torch takes one thread for each of them

Tensors = list[torch.Tensor]


def masters(numels: tuple[int, ...] = NUMELS) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator) for numel in numels]


def filled(folder: Path, tensors: Tensors, **how: Any) -> StateFile:
    """A store with one tensor for each unit, all of them out."""
    store = StateFile(folder, {key: tensor.nbytes for key, tensor in enumerate(tensors)}, **how)
    for key, tensor in enumerate(tensors):
        store.put(key, [tensor])
        store.release(key)
    return store


# -- values and identity -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["io_uring", "libaio", "threads", "python"])
def test_every_bit_comes_back(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERORUN_AIO", backend)
    patterns = torch.randint(-(2**31), 2**31, (300_001,), dtype=torch.int32)  # NaNs with payloads, denormals
    tensors = [patterns[index::3].clone().view(torch.float32) for index in range(3)]
    expected = [tensor.clone().view(torch.int32) for tensor in tensors]
    try:
        store = filled(tmp_path, tensors, buffer_count=2)
    except ValueError as error:
        pytest.skip(str(error))
    for _ in range(2):
        for key, want in enumerate(expected):
            with store.opened(key, dirty=False) as (tensor,):
                assert tensor is tensors[key] and torch.equal(tensor.view(torch.int32), want)
    store.close()


def test_tensors_that_are_out_are_loud(tmp_path: Path) -> None:
    half, number = torch.randn(3, 4).bfloat16(), torch.arange(5)
    store = StateFile(tmp_path, {7: 1000})
    store.put(7, [half, number])
    store.release(7)
    assert half.shape == (3, 4) and half.dtype == torch.bfloat16 and half.isnan().all()
    assert (number == torch.iinfo(torch.int64).max).all()
    for tensor in (half, number):
        with pytest.raises(RuntimeError, match="single memory location"):
            tensor.add_(1)
        assert tensor.untyped_storage().nbytes() == tensor.element_size()
    with store.opened(7, dirty=False):
        assert number.tolist() == [0, 1, 2, 3, 4]
    store.close()


def test_views_share_memory_again(tmp_path: Path) -> None:
    """Pieces, whole parameters among them, are views of their master; whatever their order, also if some overlap."""
    master = torch.arange(1000.0)
    pieces = [master[:300], master[300:900].view(20, 30), master[250:310], master[999:], master[5:5]]
    store = StateFile(tmp_path, {0: 4000})
    store.put(0, [pieces[1], master, *pieces])
    assert store.file_bytes == BLOCK_BYTES
    store.release(0)
    with store.opened(0, dirty=True) as tensors:
        assert [id(tensor) for tensor in tensors] == [id(t) for t in (pieces[1], master, pieces[0], *pieces[2:])]
        assert torch.equal(master, torch.arange(1000.0)) and torch.equal(pieces[1].view(-1), master[300:900])
        pieces[2].fill_(-1)
        assert pieces[0][250] == -1 and pieces[1][0, 0] == -1 and master[309] == -1 and master[310] == 310
    with store.opened(0, dirty=False):
        memory = master.untyped_storage().data_ptr()
        store.put(0, [pieces[1], master, *pieces])  # the same as before: nothing is moved
        assert master.untyped_storage().data_ptr() == memory
        assert pieces[1][0, 9] == -1 and pieces[3].item() == 999 and pieces[4].numel() == 0
    store.close()


def test_in_inference_mode(tmp_path: Path) -> None:
    """An evaluation may be what waits for an update."""
    tensors = masters()
    with torch.inference_mode():
        store = filled(tmp_path, tensors, buffer_count=2)
        with store.opened(0, dirty=True):
            tensors[0].add_(1)
        for key in (1, 2, 3):
            with store.opened(key, dirty=False):
                pass
    with store.opened(0, dirty=True):
        assert torch.equal(tensors[0], masters()[0] + 1)
        tensors[0].sub_(1)
        store.put(0, [tensors[0], torch.ones(40_000)])
    store.close()


OPTIMIZERS: dict[str, Callable[[Tensors], torch.optim.Optimizer]] = {
    "torch AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "torch AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "torch SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "torch Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adam": lambda params: single_pass.Adam(params, lr=0.1),
    "Lion": lambda params: single_pass.Lion(params, lr=0.1),
    "SGD": lambda params: single_pass.SGD(params, lr=0.1, momentum=0.9),
}


def train(make: Callable[[Tensors], torch.optim.Optimizer], folder: Path | None, **how: Any) -> Tensors:
    """Masters, pieces and states after four steps, unit by unit; with ``folder``, out of a file."""
    whole = masters()
    pieces = [[master[: len(master) // 3], master[len(master) // 3 :]] for master in whole]
    optimizer = make([piece for parts in pieces for piece in parts])
    generator = torch.Generator().manual_seed(1)

    def tensors_of(key: int) -> Tensors:
        states = [state for piece in pieces[key] for state in optimizer.state[piece].values()]
        return [whole[key], *pieces[key], *(state for state in states if state.dim())]

    store = None if folder is None else StateFile(folder, {k: 3 * m.nbytes + 384 for k, m in enumerate(whole)}, **how)
    if store:
        for key in range(len(whole)):
            store.put(key, tensors_of(key))
            store.release(key)
    for _ in range(4):
        for key in range(len(whole)):
            if store:
                store.prefetch((key + 1) % len(whole))
                store.open(key)
            for piece in pieces[key]:
                piece.grad = torch.randn(piece.shape, generator=generator)
            optimizer.step()
            for piece in pieces[key]:
                piece.grad = None
            if store:
                store.put(key, tensors_of(key))
                store.release(key)
    found = []
    for key in range(len(whole)):
        if store:
            store.open(key)
        found += [tensor.clone() for tensor in tensors_of(key)]
        if store:
            store.release(key, dirty=False)
    if store:
        store.close()
    return found


@pytest.mark.parametrize("buffer_count", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same(name: str, buffer_count: int, tmp_path: Path) -> None:
    """States appear in the first step, and belong to the unit from then on."""
    expected, found = train(OPTIMIZERS[name], None), train(OPTIMIZERS[name], tmp_path, buffer_count=buffer_count)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


# -- room --------------------------------------------------------------------------------------------------------------


def test_units_outgrow_their_room(tmp_path: Path) -> None:
    tensors = masters()
    store = filled(tmp_path, tensors)
    before, late = store.file_bytes, torch.arange(1e6)
    store.open(3)
    store.put(3, [tensors[3], late])
    store.put(3, [tensors[3], late])
    store.release(3, dirty=False)  # that it has moved makes it dirty
    assert store.file_bytes == before + -(-(40_000 + 4_000_000) // BLOCK_BYTES) * BLOCK_BYTES
    for key in (0, 1, 2, 4, 3, 0, 1, 2, 4, 3):
        store.prefetch(key)
        with store.opened(key, dirty=True):
            assert torch.equal(tensors[key], masters()[key])
            assert key != 3 or torch.equal(late, torch.arange(1e6))
    store.open(3)
    store.put(3, [late])  # the other one is let go
    store.release(3)
    assert torch.equal(tensors[3], masters()[3]) and late.isnan().all()
    store.close()


def test_units_without_room_or_tensors(tmp_path: Path) -> None:
    store = StateFile(tmp_path, {})
    assert store.file_bytes == store.buffer_bytes == 0
    for key, tensors in ((1, []), (2, [torch.ones(3)])):
        store.put(key, tensors)
        store.release(key)
    with store.opened(1, dirty=True) as tensors, store.opened(2, dirty=True) as (ones,):
        assert tensors == [] and ones.tolist() == [1, 1, 1]
        store.put(1, [twos := torch.full((3,), 2.0)])
    store.put(3, [])
    store.release(3)
    store.put(3, [threes := torch.full((3,), 3.0)])
    store.release(3)
    with store.opened(1, dirty=False), store.opened(3, dirty=False):
        assert twos.tolist() == [2, 2, 2] and threes.tolist() == [3, 3, 3]
    store.close()


def test_tensors_that_cannot_go(tmp_path: Path) -> None:
    store = StateFile(tmp_path, {0: 100})
    for tensor in (torch.ones(3, 3).t(), torch.ones(3, device="meta")):
        with pytest.raises(ValueError, match="cannot go to a file"):
            store.put(0, [tensor])
    store.close()


# -- order -------------------------------------------------------------------------------------------------------------


class _Held(Ticket):
    """A ticket that is done when the test says so, or when somebody waits."""

    def done(self) -> bool:
        return self in _Watched.landed

    def wait(self) -> None:
        _Watched.events.append(f"wait for {_Watched.names.pop(self, 'it again')}")
        _Watched.landed.add(self)
        super().wait()


class _Watched(AsyncFile):
    """Notes what is begun and waited for, by offset in units of a block."""

    events: list[str]
    names: dict[Ticket, str]
    landed: set[Ticket]

    def _submit(self, tensor: torch.Tensor, offset: int, *, write: bool) -> Ticket:
        real = super()._submit(tensor, offset, write=write)
        held = self._tickets[real._number] = _Held(self, real._number)
        self.names[held] = f"{'write' if write else 'read'} {offset // BLOCK_BYTES}"
        self.events.append(self.names[held])
        return held


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Watched]]:
    _Watched.events, _Watched.names, _Watched.landed = [], {}, set()
    monkeypatch.setattr(swap, "AsyncFile", _Watched)
    yield _Watched


def six_units(tmp_path: Path, watched: type[_Watched], buffer_count: int) -> StateFile:
    store = filled(tmp_path, masters((64,) * 6), buffer_count=buffer_count)
    store.settle()
    watched.events.clear()
    return store


def test_three_buffers_read_and_write_beside_the_work(tmp_path: Path, watched: type[_Watched]) -> None:
    store = six_units(tmp_path, watched, 3)
    store.prefetch(0)
    for key in range(3):
        store.prefetch(key + 1)
        store.open(key)
        assert sorted(watched.names.values()) == sorted([f"read {key + 1}", f"write {key - 1}"][: 1 + (key > 0)])
        watched.landed.update(ticket for ticket, name in watched.names.items() if name == f"write {key - 1}")
        store.release(key)
    assert watched.events == [
        *("read 0", "read 1", "wait for read 0", "write 0"),
        *("read 2", "wait for read 1", "write 1"),
        *("wait for write 0", "read 3", "wait for read 2", "write 2"),
    ]
    store.close()


def test_two_buffers_read_as_soon_as_one_is_written(tmp_path: Path, watched: type[_Watched]) -> None:
    store = six_units(tmp_path, watched, 2)
    for key in (0, 1):
        store.open(key)
        store.release(key)
    store.open(2)
    (write,) = (ticket for ticket, name in watched.names.items() if name == "write 1")
    store.prefetch(3)
    assert "read 3" not in watched.events  # both buffers are taken, and prefetching waits for nobody
    watched.landed.add(write)
    store.release(2)
    assert watched.events[-2:] == ["wait for write 1", "read 3"]
    store.open(3)
    store.close()


def test_few_units_stay_in_memory(tmp_path: Path, watched: type[_Watched]) -> None:
    store = six_units(tmp_path, watched, 3)
    for key in (0, 1, 2) * 3:
        store.prefetch(key)
        with store.opened(key, dirty=False):
            pass
    assert [event for event in watched.events if event.startswith("read")] == ["read 0", "read 1", "read 2"]
    with store.opened(1, dirty=True) as (one,):
        one.fill_(5)
    with store.opened(1, dirty=True) as (one,):  # waits until it is written, and need not read it
        assert (one == 5).all()
    assert watched.events[-3:] == ["write 1", "wait for write 1", "write 1"]
    store.close()


def test_another_unit_than_was_announced(tmp_path: Path) -> None:
    tensors = masters((64,) * 6)
    store = filled(tmp_path, tensors, buffer_count=2)
    store.open(0)
    store.prefetch(1)
    store.open(2)
    assert torch.equal(tensors[2], masters((64,) * 6)[2])
    with pytest.raises(RuntimeError, match="2 units are open"):
        store.open(3)
    store.release(0)
    store.open(1)
    assert torch.equal(tensors[1], masters((64,) * 6)[1])
    store.close()


def test_calls_out_of_order(tmp_path: Path) -> None:
    tensors = masters()
    store = filled(tmp_path, tensors)
    with pytest.raises(RuntimeError, match="unit 1 is not open"):
        store.release(1)
    with pytest.raises(RuntimeError, match="unit 1 is not open"):
        store.put(1, [tensors[1]])
    store.open(1)
    with pytest.raises(RuntimeError, match="unit 1 is open already"):
        store.open(1)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="at least 2"):
        StateFile(tmp_path, {}, buffer_count=1)


# -- disks that fail ---------------------------------------------------------------------------------------------------

TOO_SMALL = """
import os, torch
from pathlib import Path
from zerorun.errors import SwapError
from zerorun.zero.swap import StateFile, require_room
def attempt(what):
    try:
        return what()
    except SwapError as error:
        print(str(error))
folder = Path("states")
attempt(lambda: require_room(folder, 64 << 20))
attempt(lambda: StateFile(folder, {0: 20 << 20, 1: 3 << 20}, node_bytes=48 << 20))
require_room(folder, 4 << 20)
store = StateFile(folder, {0: 1 << 20, 1: 3 << 20})
master = torch.ones(1000)
store.put(0, [master])
attempt(lambda: store.put(0, [master, torch.ones(8 << 20)]))
store.release(0)
with store.opened(0, dirty=False):
    assert (master == 1).all()
store.close()
print(os.listdir(folder))
"""


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_is_too_small(kind: str, tmp_path: Path) -> None:
    before, making, growing, left = run_on_small_disk(TOO_SMALL, tmp_path, mebibytes=16, kind=kind).splitlines()
    for line, need in ((before, "64.00 MiB"), (making, "48.00 MiB"), (growing, "36.00 MiB")):
        assert "nvme_path = 'states': the disk is too small" in line and f"take {need}" in line
        assert re.search(r"1\d\.\d\d MiB \(1\d{7} bytes\) are free|\d\.\d\d MiB", line) and "Remedy: nvme_path on a" in line
    assert "23.00 MiB of them for this one" in making
    assert left == "[]"


FULL = """
import os, torch
from pathlib import Path
from zerorun.errors import SwapError
from zerorun.ops.aio import AsyncFile
from zerorun.zero.swap import StateFile
AsyncFile.allocate = lambda self, nbytes: os.truncate(self._cached, nbytes)  # as file systems do that allocate late
Path("checkpoint").write_text("whole")
masters = [torch.full((1 << 19,), float(key)) for key in range(8)]
store = StateFile(Path("states"), {key: 2 << 20 for key in range(8)}, buffer_count=2)
with open("filler", "wb") as filler:
    filler.write(bytes(10 << 20))
done = 0
try:
    for key, master in enumerate(masters):
        store.put(key, [master])
        store.release(key)
        done += 1
    store.settle()
except SwapError as error:
    print(error)
for call in (store.settle, lambda: store.open(0), lambda: store.prefetch(0), lambda: store.release(0)):
    try:
        call()
        print("nothing raised")
    except SwapError as error:
        assert "ENOSPC" in str(error)
store.close()
assert Path("checkpoint").read_text() == "whole"
print(0 < done < 8, os.listdir("states"))
"""


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_disk_that_fills_up(kind: str, tmp_path: Path) -> None:
    told, after = run_on_small_disk(FULL, tmp_path, mebibytes=20, kind=kind).splitlines()
    for part in (
        "could not be written to ",
        "No space left on device (ENOSPC) while writing unit",
        "MiB are free",
        "'states'",
    ):
        assert part in told
    for part in (
        "Checkpoints are not touched",
        "Remedy: make room there, or set zero_optimization.offload_optimizer.nvme_path",
    ):
        assert part in told
    assert after == "True []"


def test_close_tells_of_a_failure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, masters())
    store.open(0)
    monkeypatch.setattr(Ticket, "settle", lambda self: 5)
    store.release(0)
    with pytest.raises(SwapError, match=r"Input/output error \(EIO\) while writing unit"):
        store.close()
    store.close()


def test_a_file_that_has_lost_its_end(tmp_path: Path) -> None:
    store = filled(tmp_path, masters(), buffer_count=2)
    store.settle()
    os.truncate(store._file._cached, 0)
    with pytest.raises(SwapError, match="could not be read from") as caught:
        store.open(0)
    assert "while reading unit 0" in str(caught.value)
    store.close()


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for attempt in (lambda folder: require_room(folder, 1), lambda folder: StateFile(folder, {0: 1})):
        with pytest.raises(SwapError, match=r"a file for the optimizer states cannot be made there: .* Remedy: a folder"):
            attempt(tmp_path / "file" / "below")


# -- what is left ------------------------------------------------------------------------------------------------------

WORK_FOR_EVER = """
import sys, torch
from pathlib import Path
from zerorun.zero.swap import StateFile
masters = [torch.ones(1 << 20) for _ in range(4)]
store = StateFile(Path(sys.argv[1]), {key: 4 << 20 for key in range(4)}, buffer_count=2)
for key, master in enumerate(masters):
    store.put(key, [master])
    store.release(key)
print("ready", flush=True)
while True:
    for key in range(4):
        store.prefetch((key + 1) % 4)
        with store.opened(key, dirty=True) as (master,):
            master.add_(1)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_kill(how: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "states"
    command = [sys.executable, "-c", WORK_FOR_EVER, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(how)
    assert process.wait(timeout=60) != 0
    process.stdout.close()
    assert not list(folder.iterdir())
