"""The board of a rank: what others read on it, and what the rank may do without being seen."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from harness import patience

from zerorun.launcher.worker_boards import Boards, Seen, open_board
from zerorun.watch.board import (
    ALL,
    PAGE,
    VARIABLE,
    Board,
    Phase,
    Sight,
    Word,
    during,
    limit_waits,
    read,
    show_board,
    span_of,
    stay_off_the_board,
)
from zerorun.watch.board import board as own


@pytest.fixture
def page() -> Iterator[tuple[Board, mmap.mmap]]:
    board, memory = Board(), mmap.mmap(-1, PAGE)
    board.go_on_at(memory)
    yield board, memory


def seen_on(memory: mmap.mmap) -> Sight:
    sight = read(memory)
    assert sight is not None
    return sight


def test_what_a_rank_does_can_be_read(page: tuple[Board, mmap.mmap]) -> None:
    board, memory = page
    board.write(STEP=7, BATCHES=14, LIMIT=2500)
    assert board.enter(Phase.FORWARD) == Phase.START
    board.wait_begins("3: all-gather für forward", (4, 2, 3), 1023)
    sight = seen_on(memory)
    assert (sight.step, sight.batches, sight.limit_s, sight.phase, sight.pid) == (7, 14, 2.5, Phase.FORWARD, os.getpid())
    assert (sight.label, list(sight.ranks(99)), sight.number) == ("3: all-gather für forward", [4, 6, 8], 1023)
    assert sight.wait_s is not None and 0 <= sight.wait_s < 5
    board.wait_ends("3: all-gather für forward")
    assert seen_on(memory).wait_s is None and seen_on(memory).events > sight.events


def test_a_page_on_which_nobody_has_written() -> None:
    sight = seen_on(mmap.mmap(-1, PAGE))
    assert (sight.events, sight.phase, sight.wait_s, sight.limit_s, sight.gives_stacks) == (
        0,
        Phase.START,
        None,
        None,
        False,
    )


def test_a_wait_within_a_wait_is_the_outer_one(page: tuple[Board, mmap.mmap]) -> None:
    board, memory = page
    board.wait_begins("outer", ALL, 0)
    board.wait_begins("inner", (1, 1, 1), 0)
    assert seen_on(memory).label == "outer"
    board.wait_ends("inner")
    assert seen_on(memory).wait_s is not None
    board.wait_ends("outer")
    assert seen_on(memory).wait_s is None


def test_the_longest_wait_of_a_label_is_told_but_not_those_of_the_first_steps(page: tuple[Board, mmap.mmap]) -> None:
    board, memory = page
    for step, longest in ((0, False), (2, False), (3, True)):
        board.write(STEP=step)
        board.wait_begins("gather", ALL, 0)
        assert (seen_on(memory).longest_s > 0.009) == longest
        time.sleep(0.01)
        board.wait_ends("gather")


def test_long_labels_are_cut(page: tuple[Board, mmap.mmap]) -> None:
    board, memory = page
    board.wait_begins("ä" * 1000, ALL, 0)
    assert seen_on(memory).label.startswith("ä" * 100)


def test_sizes_of_the_last_collectives_stay_on_the_page(page: tuple[Board, mmap.mmap]) -> None:
    """Sixteen of them, and those of a thread beside are not among them."""
    board, memory = page
    for number in range(20):
        board.note_size("ä" * 200 if number % 2 else "gather", (1, 2, 3), number, 8 * number)
    beside = threading.Thread(target=lambda: (stay_off_the_board(), board.note_size("a disk", ALL, 0, 1)))
    beside.start()
    beside.join()
    board.wait_begins("ä" * 200, (1, 2, 3), 19)
    sight = seen_on(memory)
    assert [note.size // 8 for note in sight.sizes] == list(range(4, 20))
    assert [note.is_of(sight.label) for note in sight.sizes] == [False, True] * 8
    assert {note[1:4] for note in sight.sizes} == {(1, 2, 3)}
    assert len({note.key for note in sight.sizes}) == 16
    told = Seen.of(json.loads(json.dumps(asdict(Seen(sight, 1.0, False)))))
    assert told.sight.sizes == sight.sizes and told.sight.label == sight.label


def test_spans() -> None:
    assert [span_of(ranks) for ranks in ((), (3,), (1, 3, 5))] == [(0, 1, 0), (3, 1, 1), (1, 2, 3)]


def test_threads_beside_are_not_shown(page: tuple[Board, mmap.mmap]) -> None:
    board, memory = page

    def beside() -> None:
        stay_off_the_board()
        board.wait_begins("a disk", ALL, 0)

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert seen_on(memory).wait_s is None


def test_phases_are_left_again_also_by_an_error() -> None:
    seen = []

    @during(Phase.SAVE)
    def fails() -> None:
        seen.append(own.enter(Phase.SAVE))
        raise ValueError

    before = own.enter(Phase.SCRIPT)
    with pytest.raises(ValueError):
        fails()
    assert (seen, own.enter(before)) == ([Phase.SAVE], Phase.SCRIPT)


# -- the supervisor --------------------------------------------------------------------------------------------------

WORKER = """
import os, sys, time
from zerorun.watch.board import board, show_board
show_board()
assert "ZERORUN_BOARD" not in os.environ
if os.fork() == 0:  # a process of the data loader: what it does is not what the rank does
    board.write(STEP=99)
    os._exit(0)
os.wait()
board.write(STEP=5)
print("shown", flush=True)
def waiting_for_godot():
    sys.stdin.readline()
waiting_for_godot()
"""


@pytest.fixture
def worker() -> Iterator[tuple[Boards, subprocess.Popen[str]]]:
    boards = Boards()
    files, told = boards.make(3)
    command = [sys.executable, "-c", WORKER]
    process = subprocess.Popen(
        command, env={**os.environ, **told}, pass_fds=files, text=True, stdin=-1, stdout=-1, start_new_session=True
    )
    boards.started(3, process.pid, files, 100.0)
    assert process.stdout is not None and process.stdout.readline() == "shown\n"
    yield boards, process
    process.kill()
    process.communicate()
    boards.close()


def only_one(boards: Boards, now: float) -> Seen | None:
    found = boards.look(now)
    assert [rank for rank, _ in found] == [3]
    return found[0][1]


def test_a_worker_that_does_not_move_is_reported_once(worker: tuple[Boards, subprocess.Popen[str]]) -> None:
    boards, process = worker
    assert boards.look(101.0) == []
    assert boards.look(102.5) == []
    seen = only_one(boards, 104.0)
    assert seen is not None and (seen.sight.step, seen.quiet_s, seen.stopped) == (5, 3.0, False)
    assert boards.look(200.0) == []  # nobody has looked meanwhile: it may have been frozen with all others
    process.send_signal(signal.SIGSTOP)
    while "T" not in Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2]:
        time.sleep(0.01)
    seen = only_one(boards, 201.0)
    assert seen is not None and seen.stopped and seen.sight.step == 5
    assert Seen.of(asdict(seen)) == seen
    later = seen.older(9.0)
    assert (later.quiet_s, later.sight.phase_s) == (seen.quiet_s + 9, pytest.approx(seen.sight.phase_s + 9))


def test_a_worker_tells_its_stacks_and_its_last_page(worker: tuple[Boards, subprocess.Popen[str]]) -> None:
    boards, process = worker
    for _ in range(2):  # the second time replaces the first
        boards.ask_stacks(3)
        deadline = time.monotonic() + 10 * patience()
        while "in <module>" not in boards.stacks(3):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert boards.stacks(3).count("in waiting_for_godot") == 1
    process.kill()
    process.wait()
    last = boards.take_last(3)
    assert last is not None and last.sight.step == 5
    assert (boards.take_last(3), boards.look(999.0), boards.stacks(3)) == (None, [], "")


def test_stacks_are_whole_at_each_look(worker: tuple[Boards, subprocess.Popen[str]]) -> None:
    """Also of somebody else than the worker's own supervisor, who has the file open for himself, as zerorun --dump has."""
    _, process = worker
    for _ in range(2):
        other = Boards()
        other.adopt(process.pid, *open_board(process.pid), 100.0)
        other.ask_stacks(0)
        deadline = time.monotonic() + 10 * patience()
        while "in <module>" not in (found := other.stacks(0)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert found.lstrip().startswith(("Current thread", "Thread")) and found.count("in waiting_for_godot") == 1
        other.close()


def test_a_look_leaves_a_process_alone_that_hangs_while_it_ends() -> None:
    """Python gives the signal back then, and libraries are taken down: those of GPUs may wait for each other."""
    boards = Boards()
    files, told = boards.make(0)
    ends = "import ctypes\nfrom zerorun.watch.board import show_board\nshow_board()\nlibc = ctypes.CDLL(None)\n"
    ends += "libc.__cxa_atexit(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)\nprint('shown', flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", ends],
        env={**os.environ, **told},
        pass_fds=files,
        text=True,
        stdout=-1,
        start_new_session=True,
    )
    boards.started(0, process.pid, files, 100.0)
    try:
        assert process.stdout is not None and process.stdout.readline() == "shown\n"
        deadline = time.monotonic() + 10 * patience()
        while "pause" not in Path(f"/proc/{process.pid}/wchan").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        boards.ask_stacks(0)
        time.sleep(0.2)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
        boards.close()


@pytest.mark.parametrize(("variable", "given", "limit"), [("", None, -1), ("0", None, 0), ("7", 5.0, 7000), ("", 1e-4, 1)])
def test_limits_of_waits(variable: str, given: float | None, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable counts from the start. An engine whose configuration has no limit leaves what is there."""
    if variable:
        monkeypatch.setenv("ZERORUN_HANG_TIMEOUT_S", variable)
    memory = mmap.mmap(-1, PAGE)
    before = bytes(own._bytes)
    own.go_on_at(memory)
    try:
        show_board()
        if variable:
            assert memoryview(memory).cast("q")[Word.LIMIT] == round(float(variable) * 1e3)
        for seconds in (given, None):
            limit_waits(seconds)
            assert memoryview(memory).cast("q")[Word.LIMIT] == limit
    finally:
        own.go_on_at(bytearray(before))


@pytest.mark.parametrize("told", ["", "1", "0,1", "77,78", "x,y"])
def test_files_that_are_others_are_left_alone(told: str) -> None:
    """A wrapper of the script may have closed them, and others may have their numbers now."""
    command = [sys.executable, "-c", "from zerorun.watch.board import show_board; show_board(); print('well')"]
    found = subprocess.run(command, env={**os.environ, VARIABLE: told}, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("well\n", "")


def test_without_memory_to_share_there_are_no_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refused)
    boards = Boards()
    assert boards.make(0) == ((), {})
    boards.started(0, 1, (), 0.0)
    boards.ask_stacks(0)
    assert (boards.look(9.0), boards.take_last(0)) == ([], None)
    assert boards.trouble is not None and "Function not implemented" in boards.trouble
