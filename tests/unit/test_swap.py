"""States of units in a file: the same bits come back to the same tensors, two or more at a time, and full disks say so."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import by_day
from harness import patience
from small_disk import run_on_small_disk

from zerorun.errors import SwapError
from zerorun.ops import single_pass
from zerorun.ops.aio import BLOCK_BYTES, AsyncFile, Ticket
from zerorun.zero.offload import nvme as swap
from zerorun.zero.offload.host_link import HostLink
from zerorun.zero.offload.nvme import StateFile, require_room

NUMELS = (20_003, 777, 31, 10_000, 1)  # of the units of most tests; torch takes one thread for each of them

Tensors = list[torch.Tensor]


def values(numels: tuple[int, ...] = NUMELS) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator) for numel in numels]


def filled(folder: Path, wanted: Tensors, states: int = 0, **how: Any) -> tuple[StateFile, Tensors]:
    """A store with one master for each unit, and the masters, with these values."""
    store = StateFile(folder, {key: [value.numel()] for key, value in enumerate(wanted)}, states, **how)
    masters = [store.master(key, 0) for key in range(len(wanted))]
    for master, value in zip(masters, wanted, strict=True):
        master.copy_(value)
    store.begin()
    return store, masters


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["io_uring", "libaio", "threads", "python"])
def test_both_ways_see_the_same_bits(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written through the mapping and read into buffers, and the other way round, many times over."""
    monkeypatch.setenv("ZERORUN_AIO", backend)
    patterns = torch.randint(-(2**31), 2**31, (300_001,), dtype=torch.int32)  # NaNs with payloads, denormals
    wanted = [patterns[index::3].clone().view(torch.float32) for index in range(3)]
    try:
        store, masters = filled(tmp_path, wanted, buffer_count=2)
    except ValueError as error:
        pytest.skip(str(error))
    for turn in range(6):
        for key, master in enumerate(masters):
            bits = store.open(key)(master).view(torch.int32)
            assert torch.equal(bits, patterns[key::3] + turn)
            bits.add_(1)
            store.release(key)
        store.flush()
        for key, master in enumerate(masters):
            assert torch.equal(master.view(torch.int32), patterns[key::3] + turn + 1)
        if turn % 2:  # as loading a checkpoint does, and a single page of it
            masters[0].view(torch.int32)[5000:5010] += 1
            masters[0].view(torch.int32)[5000:5010] -= 1
            masters[2].copy_(masters[2].clone())
        store.begin()
    store.close()


def test_states_follow_every_part_of_their_master(tmp_path: Path) -> None:
    store = StateFile(tmp_path, {4: [1000, 7], 9: [], 2: [500]}, 2)
    masters = [store.master(4, 0), store.master(4, 1), store.master(2, 0)]
    states = [[store.state(master, number) for number in (0, 1)] for master in masters]
    for index, tensor in enumerate([*masters, *(state for pair in states for state in pair)]):
        assert (tensor == 0).all() and tensor.data_ptr() % 64 == 0
        tensor.fill_(index + 1)  # none overlaps another
    assert [float(t.sum() / t.numel()) for t in (*masters, *states[0], *states[1], *states[2])] == list(range(1, 10))
    part = masters[0][200:600].view(20, 20)
    assert store.state(part, 1).shape == (20, 20)
    assert store.state(part, 1).data_ptr() == states[0][1][200:].data_ptr()
    assert store.state(masters[1][7:], 0).numel() == 0
    store.begin()
    in_buffer = store.open(4)
    assert (in_buffer(part) == 1).all() and (in_buffer(states[1][0]) == 6).all() and in_buffer(masters[1][7:]).numel() == 0
    in_buffer(store.state(part, 0)).fill_(20)
    store.release(4)
    store.flush()
    assert float(states[0][0].sum()) == 600 * 4 + 400 * 20
    store.close()


OPTIMIZERS: dict[str, tuple[Callable[[Tensors], single_pass.SinglePassOptimizer], int]] = {
    "Adam": (lambda params: single_pass.Adam(params, lr=0.1), 2),
    "Adagrad": (lambda params: single_pass.Adagrad(params, lr=0.1, initial_accumulator_value=0.5), 1),
    "Lion": (lambda params: single_pass.Lion(params, lr=0.1), 1),
    "AdamSAGE": (lambda params: single_pass.AdamSAGE(params, lr=0.1), 3),
    "Sophia": (lambda params: single_pass.Sophia(params, lr=0.1, bs=8), 2),
    "SGD": (lambda params: single_pass.SGD(params, lr=0.1, momentum=0.9, dampening=0.3), 1),
    "SGD without momentum": (lambda params: single_pass.SGD(params, lr=0.1), 0),
}


def test_a_state_that_is_made_again_is_zero_again(tmp_path: Path) -> None:
    """As when an optimizer's states are cleared: what the first one held lies in the file still."""
    store, masters = filled(tmp_path, values(), states=2)
    for master in masters:
        for number in range(2):
            store.home(master, number).fill_(3.0 + number)
        assert not store.home(master, 0).any()
        assert store.state(master, 1).eq(4.0).all()
    store.close()


def train(name: str, folder: Path | None, **how: Any) -> Tensors:
    """Masters and states after four steps, unit by unit; with ``folder``, in a file."""
    make, states = OPTIMIZERS[name]
    whole, store = values(), None
    if folder is not None:
        store, whole = filled(folder, whole, states, **how)
    pieces = [[master[: len(master) // 3], master[len(master) // 3 :]] for master in whole]
    optimizer = make([piece for parts in pieces for piece in parts])
    assert optimizer.state_count() == states
    if store is not None:
        optimizer.state_home = store.state
    generator = torch.Generator().manual_seed(1)
    where = None
    for _ in range(4):
        settings = [optimizer.prepare(parts) for parts in pieces]
        if store is not None:
            store.begin()
        for key, parts in enumerate(pieces):
            if store is not None:
                store.prefetch((key + 1) % len(whole))
                where = store.open(key)
            for piece, taken in zip(parts, settings[key], strict=True):
                optimizer.update(piece, torch.randn(piece.shape, generator=generator), None, taken, 1.0, where)
            if store is not None:
                store.release(key)
    if store is not None:
        store.close()
    states_of = [s for parts in pieces for piece in parts for s in optimizer.state[piece].values()]
    return [tensor.clone() for tensor in (*whole, *states_of)]


@pytest.mark.parametrize("buffer_count", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same(name: str, buffer_count: int, tmp_path: Path) -> None:
    expected, found = train(name, None), train(name, tmp_path, buffer_count=buffer_count)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_units_without_elements(tmp_path: Path) -> None:
    store = StateFile(tmp_path, {1: [], 2: [0]}, 2)
    assert store.file_bytes == store.buffer_bytes == 0
    assert store.master(2, 0).numel() == 0
    store.begin()
    for key in (1, 2):
        store.prefetch(key)
        store.open(key)
        store.release(key)
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
    store, _ = filled(tmp_path, values((64,) * 6), buffer_count=buffer_count)
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


def test_a_unit_is_read_after_it_is_written(tmp_path: Path, watched: type[_Watched]) -> None:
    store = six_units(tmp_path, watched, 3)
    for _ in range(2):
        store.open(1)
        store.release(1)
    assert watched.events == [
        "read 1",
        "wait for read 1",
        "write 1",
        "wait for write 1",
        *("read 1", "wait for read 1", "write 1"),
    ]
    store.close()


def test_what_was_read_before_a_series_of_updates_is_read_again(tmp_path: Path, watched: type[_Watched]) -> None:
    """A unit that was announced, and then written to through the mapping, as loading a checkpoint does."""
    states = six_units(tmp_path, watched, 3)
    states.prefetch(1)
    for buffer in states._buffers:
        if buffer.ticket is not None:
            buffer.ticket.wait()
    master = states.master(1, 0).fill_(7.0)
    states.begin()
    assert states.open(1)(master).eq(7.0).all()
    states.close()


def test_a_state_is_made_when_nothing_is_written(tmp_path: Path, watched: type[_Watched]) -> None:
    """What is written through the mapping beside it could be lost: a parameter may have its first gradient in any step."""
    store, masters = filled(tmp_path, values((64,) * 2), states=1)
    watched.events.clear()
    link = HostLink(torch.device("cpu"), store=store)
    for key in (0, 1):
        link.begin(partial(store.open, key))()
        link.begin(partial(store.release, key))()
    assert not [event for event in watched.events if event.startswith("wait for write")]
    assert not link.home(masters[1], 0).any()
    assert {"wait for write 0", "wait for write 1"} <= set(watched.events)
    elsewhere, count = torch.ones(3), len(watched.events)
    assert not link.home(elsewhere, 0).any() and len(watched.events) == count
    link.close()


def test_another_unit_than_was_announced(tmp_path: Path) -> None:
    wanted = values((64,) * 6)
    store, masters = filled(tmp_path, wanted, buffer_count=2)
    store.open(0)
    store.prefetch(1)
    assert torch.equal(store.open(2)(masters[2]), wanted[2])
    with pytest.raises(RuntimeError, match="2 units are open"):
        store.open(3)
    store.release(0)
    assert torch.equal(store.open(1)(masters[1]), wanted[1])
    store.release(1)
    store.prefetch(4)
    masters[4].fill_(7)
    store.begin()  # what was announced before has been read too early
    assert (store.open(4)(masters[4]) == 7).all()
    store.close()


def test_what_was_announced_stays_although_another_comes_first(tmp_path: Path, watched: type[_Watched]) -> None:
    """A buffer that is being written is waited for before one that has been read, and would have to be read again."""
    store = six_units(tmp_path, watched, 3)
    for key in (0, 1):
        store.open(key)
        store.release(key)
    store.prefetch(2)
    store.open(3)
    store.release(3)
    store.open(2)
    assert watched.events.count("read 2") == 1
    assert watched.events[-2:] == ["write 3", "wait for read 2"]
    store.close()


def test_calls_out_of_order(tmp_path: Path) -> None:
    store, _ = filled(tmp_path, values())
    with pytest.raises(RuntimeError, match="unit 1 is not open"):
        store.release(1)
    store.open(1)
    with pytest.raises(RuntimeError, match="unit 1 is open already"):
        store.open(1)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="at least 2"):
        StateFile(tmp_path, {}, 2, buffer_count=1)


# -- disks that fail ---------------------------------------------------------------------------------------------------

TOO_SMALL = """
import os, torch
from pathlib import Path
from zerorun.errors import SwapError
from zerorun.zero.offload.nvme import StateFile, require_room
def attempt(what):
    try:
        return what()
    except SwapError as error:
        print(str(error))
folder = Path("states")
attempt(lambda: require_room(folder, 64 << 20))
attempt(lambda: StateFile(folder, {0: [5 << 20], 1: [3 << 18]}, 0, node_bytes=48 << 20))
require_room(folder, 4 << 20)
store = StateFile(folder, {0: [1 << 18], 1: [3 << 18]}, 0)
store.master(0, 0).fill_(1)
store.close()
print(os.listdir(folder))
"""


@pytest.mark.parametrize("kind", by_day(("tmpfs", "ext4"), "ext4"))
def test_a_disk_that_is_too_small(kind: str, tmp_path: Path) -> None:
    before, making, left = run_on_small_disk(TOO_SMALL, tmp_path, mebibytes=16, kind=kind).splitlines()
    for line, need in ((before, "64.00 MiB"), (making, "48.00 MiB")):
        assert "nvme_path = 'states': the disk is too small" in line and f"take {need}" in line
        assert re.search(r"1\d\.\d\d MiB \(1\d{7} bytes\) are free|\d\.\d\d MiB", line) and "Remedy: nvme_path on a" in line
    assert "23.00 MiB of them for this file" in making
    assert left == "[]"


FULL = """
import os, torch
from pathlib import Path
from zerorun.errors import SwapError
from zerorun.ops.aio import AsyncFile
from zerorun.zero.offload.nvme import StateFile
AsyncFile.allocate = lambda self, nbytes: os.truncate(self._cached, nbytes)  # as file systems do that allocate late
Path("checkpoint").write_text("whole")
store = StateFile(Path("states"), {key: [1 << 19] for key in range(8)}, 0, buffer_count=2)
with open("filler", "wb") as filler:
    filler.write(bytes(10 << 20))
done = 0
try:
    for key in range(8):
        in_buffer = store.open(key)
        in_buffer(store.master(key, 0)).fill_(key)
        store.release(key)
        done += 1
    store.flush()
except SwapError as error:
    print(error)
for call in (store.flush, store.begin, lambda: store.open(0), lambda: store.prefetch(0), lambda: store.release(0)):
    try:
        call()
        print("nothing raised")
    except SwapError as error:
        assert "ENOSPC" in str(error)
store.close()
assert Path("checkpoint").read_text() == "whole"
print(0 < done < 8, os.listdir("states"))
"""


@pytest.mark.parametrize("kind", by_day(("tmpfs", "ext4"), "ext4"))
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
    store, _ = filled(tmp_path, values())
    store.open(0)
    monkeypatch.setattr(Ticket, "settle", lambda self: 5)
    store.release(0)
    with pytest.raises(SwapError, match=r"Input/output error \(EIO\) while writing unit"):
        store.close()
    store.close()


def test_who_waits_for_the_disk_hears_of_its_failure(tmp_path: Path) -> None:
    """A save reads through the mapping what the link's thread has had written."""
    store, _ = filled(tmp_path, values())
    link = HostLink(torch.device("cpu"), store=store)
    store.open(0)
    store.release(0)
    link.flush()
    store._fail(0, OSError(errno.EIO, "Input/output error"), writing=True)
    raised = []
    for _ in range(2):
        with pytest.raises(SwapError, match="Input/output error") as caught:
            link.flush()
        raised.append(caught.value)
    assert raised[0] is not raised[1]  # or each would carry the tracebacks of all before
    link.close()


def test_a_file_that_has_lost_its_end(tmp_path: Path) -> None:
    store, _ = filled(tmp_path, values(), buffer_count=2)
    os.truncate(store._file._cached, 0)
    with pytest.raises(SwapError, match="could not be read from") as caught:
        store.open(0)
    assert "while reading unit 0" in str(caught.value)
    store.close()


def test_a_file_that_was_swapped_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who can write to the folder puts a link in the place of the new file: what it leads to is not touched."""
    real, victim = swap.tempfile.mkstemp, tmp_path / "victim"
    victim.write_bytes(b"dear")

    def raced(*args: Any, **kwargs: Any) -> tuple[int, str]:
        descriptor, name = real(*args, **kwargs)
        os.unlink(name)
        os.symlink(victim, name)
        return descriptor, name

    monkeypatch.setattr(swap.tempfile, "mkstemp", raced)
    wanted = values()
    store, masters = filled(tmp_path / "swap", wanted)
    assert all(torch.equal(master, value) for master, value in zip(masters, wanted, strict=True))
    store.close()
    assert victim.read_bytes() == b"dear"
    assert not list((tmp_path / "swap").iterdir())


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for attempt in (lambda folder: require_room(folder, 1), lambda folder: StateFile(folder, {0: [1]}, 0)):
        with pytest.raises(SwapError, match=r"nvme_path = .* Remedy: a folder"):
            attempt(tmp_path / "file" / "below")


# -- what is left ------------------------------------------------------------------------------------------------------

# Until the test ends, that is, however it does. Python ignores SIGINT if it was started so, as shells start what goes into
# the background: a test run from a script would wait for the answer to a signal that its child never gets.
WORK_FOR_EVER = """
import os, signal, sys, torch
from pathlib import Path
from zerorun.zero.offload.nvme import StateFile
store = StateFile(Path(sys.argv[1]), {key: [1 << 20] for key in range(4)}, 0, buffer_count=2)
signal.signal(signal.SIGINT, signal.default_int_handler)
print("ready", flush=True)
while os.getppid() == int(sys.argv[2]):
    for key in range(4):
        store.prefetch((key + 1) % 4)
        store.open(key)(store.master(key, 0)).add_(1)
        store.release(key)
"""


@pytest.mark.parametrize("how", by_day((signal.SIGKILL, signal.SIGINT, signal.SIGTERM), signal.SIGKILL))
def test_nothing_is_left_after_a_kill(how: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    command = [sys.executable, "-c", WORK_FOR_EVER, str(folder), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            process.send_signal(how)
            assert process.wait(timeout=60 * patience()) != 0
        finally:
            process.kill()
    assert not list(folder.iterdir())
