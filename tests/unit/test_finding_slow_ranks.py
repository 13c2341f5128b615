"""Which rank is slow, from what all were busy; and what a rank adds up for it, by a clock that the test sets."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import pytest

from zerorun.launcher.hang_detection import Hangs
from zerorun.launcher.worker_boards import Boards
from zerorun.watch import board as module
from zerorun.watch.board import ALL, NOBODY, PAGE, TIMED, WINDOW, Board, Phase, read_times, show_slow
from zerorun.watch.slow_ranks import SUCCESSION, WINDOW_SECONDS, Pace, Slow, Sparing, Window, slow_in

FAST = (4000, 3000, 10_000, 20_000, 5000, 3000, 0)  # us by TIMED, on a CPU


def with_more(phase: Phase, factor: float) -> tuple[int, ...]:
    return tuple(round(us * (factor if at == phase else 1)) for at, us in zip(TIMED, FAST, strict=True))


def windows(*busy: tuple[int, ...], number: int = 1, stages: int = 1) -> list[Window]:
    return [Window(rank, rank % stages, number, times, times) for rank, times in enumerate(busy)]


@pytest.mark.parametrize("phase", TIMED[:-1])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_takes_half_as_much_again_is_slow_in_each_phase(phase: Phase, ranks: int) -> None:
    slower, at = with_more(phase, 1.5), TIMED.index(phase)
    assert slow_in(windows(slower, *[FAST] * (ranks - 1))) == {0: Slow(0, phase, slower[at], FAST[at])}


@pytest.mark.parametrize(("factor", "slow"), [(1.09, False), (1.12, True)])
def test_less_than_a_tenth_is_not_slow(factor: float, slow: bool) -> None:
    assert bool(slow_in(windows(FAST, with_more(Phase.BACKWARD, factor)))) == slow


def test_what_is_little_of_a_step_is_not_told() -> None:
    assert slow_in(windows(FAST, with_more(Phase.SCRIPT, 1.3))) == {}
    assert slow_in(windows((0, 0, 100, 0, 0, 0, 0), (0, 0, 400, 0, 0, 0, 0))) == {}


def test_ranks_that_take_long_at_times_are_not_slow() -> None:
    """As where they do not always get a core."""
    longer = with_more(Phase.BACKWARD, 2)
    unsteady = [Window(rank, 0, 1, least, longer) for rank, least in enumerate((with_more(Phase.BACKWARD, 1.5), FAST))]
    assert slow_in(unsteady) == {}
    assert slow_in([unsteady[0], Window(1, 0, 1, FAST, with_more(Phase.BACKWARD, 1.2))])


def test_stages_are_compared_each_with_itself() -> None:
    double = tuple(2 * us for us in FAST)
    assert slow_in(windows(FAST, double, FAST, double, stages=2)) == {}
    found = slow_in(windows(FAST, double, FAST, double, FAST, with_more(Phase.FORWARD, 4), stages=2))
    assert list(found) == [5] and found[5].phase == Phase.FORWARD


GPU = (*FAST[:-1], 40_000)


def test_with_gpus_those_say_who_is_late() -> None:
    blocked = (30_000, *GPU[1:])  # the host waits for its GPU there, as for a loss that one rank prints
    assert slow_in(windows(GPU, blocked)) == {}
    late = (*GPU[:-1], 60_000)
    assert slow_in(windows(late, blocked)) == {0: Slow(0, Phase.DEVICE, 60_000, 40_000)}
    starved = (GPU[0], 21_000, *late[2:])
    assert slow_in(windows(starved, blocked)) == {0: Slow(0, Phase.DATA, 21_000, 3000)}
    assert slow_in(windows(late, (*GPU[:-1], -1))) == {}, "of one it is not known"


def told(pace: Pace, number: int, *busy: tuple[int, ...]) -> list[int]:
    return [slow.rank for window in windows(*busy, number=number) for slow in pace.add(window)]


def test_three_windows_in_succession_and_once() -> None:
    pace, slower = Pace(2), with_more(Phase.FORWARD, 1.5)
    assert SUCCESSION == 3
    assert [told(pace, number, FAST, slower) for number in (1, 2, 3, 4)] == [[], [], [1], []]
    assert pace.slowest == Slow(1, Phase.FORWARD, 15_000, 10_000) and pace.slowest.ratio == 1.5
    assert told(pace, 5, FAST, FAST) == [] and pace.slowest is None
    assert [told(pace, number, FAST, with_more(Phase.UPDATE, 1.5)) for number in (6, 7, 8)] == [[], [], [1]]


@pytest.mark.parametrize("numbers", [(1, 2, 5, 6), (1, 3, 5, 7)])
def test_windows_between_which_some_are_missing_do_not_count(numbers: tuple[int, ...]) -> None:
    pace = Pace(2)
    assert [told(pace, number, FAST, with_more(Phase.FORWARD, 1.5)) for number in numbers] == [[], [], [], []]


def test_hosts_whose_steps_are_fast_tell_of_fewer_windows() -> None:
    """By clocks that differ a little. Those of whom all tell are judged as if they were all there are."""
    pace, hosts = Pace(2), (Sparing(), Sparing())
    said, found, at = [0, 0], [], 0.0
    for number in range(1, 1001):
        at += 0.3
        for rank, (host, busy) in enumerate(zip(hosts, (FAST, with_more(Phase.FORWARD, 1.5)), strict=True)):
            for window in host.of([Window(rank, 0, number, busy, busy)], at + 0.1 * rank * (number % 3)):
                said[rank] += 1
                found += [(number, slow.rank) for slow in pace.add(window)]
    assert found == [(3, 1)] and pace.slowest is not None, "the first ones are told as they come"
    assert all(300 / (2 * WINDOW_SECONDS) < count < 300 / WINDOW_SECONDS + 12 for count in said)
    assert len(pace._open) < 50


def test_neither_do_two_ranks_in_turns_or_two_phases() -> None:
    pace, slower = Pace(2), with_more(Phase.FORWARD, 1.5)
    turns = [(FAST, slower), (slower, FAST)] * 3 + [(FAST, slower), (FAST, with_more(Phase.UPDATE, 1.5))] * 3
    assert [told(pace, number, *busy) for number, busy in enumerate(turns, 1)] == [[]] * 12


def test_windows_of_a_rank_that_tells_no_times_are_not_kept_for_ever() -> None:
    pace = Pace(3)
    for number in range(1000):
        assert told(pace, number, FAST, FAST) == []
    assert len(pace._open) < 50


# -- in the rank -----------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """A rank whose clock goes when the test says so."""

    board: Board
    page: mmap.mmap
    ns: int = 10**9
    without_core: int = 0

    def spends(self, ms: float) -> None:
        self.ns += round(ms * 1e6)

    def waits(self, ms: float, work: float = 0.0, *, nobody: bool = False) -> None:
        self.board.wait_begins("gather", NOBODY if nobody else ALL, 0)
        self.spends(ms)
        if work:
            self.moves(work)
        self.board.wait_ends("gather")

    def moves(self, ms: float) -> None:
        begun = self.ns
        self.spends(ms)
        self.board.end_transport(begun)

    def step(self, longer: float = 0.0) -> None:
        board = self.board
        board.enter(Phase.DATA)
        self.spends(2)
        board.enter(Phase.FORWARD)
        self.spends(3 + longer)
        self.waits(50, work=1)
        board.enter(Phase.BACKWARD)
        self.moves(0.5)
        self.spends(4)
        self.waits(0.25, nobody=True)
        board.enter(Phase.PIPELINE)
        self.spends(0.125)
        board.enter(Phase.UPDATE)
        self.spends(5)
        board.end_batch(1, 1, over=False)
        board.end_batch(1, 1, over=True)
        board.enter(Phase.SCRIPT)
        self.spends(6)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    page = mmap.mmap(-1, PAGE)
    found = Rank(Board(), page)
    monkeypatch.setattr(module, "monotonic_ns", lambda: found.ns)
    monkeypatch.setattr(module, "_without_core", lambda: found.without_core)
    found.board.go_on_at(page)
    found.board.enter(Phase.SCRIPT)
    return found


def test_a_rank_adds_up_what_it_is_busy_without_waits(rank: Rank) -> None:
    rank.step()  # in a window, the first step and the last one have less of the script
    for _ in range(WINDOW):
        rank.step()
    rank.board.write(STAGE=3)
    stage, times = read_times(rank.page, 0)
    assert (stage, list(times)) == (3, [1])
    assert times[1] == 2 * [6000, 2000, 3000, 4250, 5000, 1625, 0]


def test_what_a_gpu_was_busy_is_told_with_its_window(rank: Rank) -> None:
    rank.board.note_device(-1)
    for window in range(3):
        for step in range(WINDOW):
            rank.step()
            if (window, step) == (1, 5):
                rank.board.note_device(7_000_000)
    times = [busy[len(TIMED) - 1 :: len(TIMED)] for busy in read_times(rank.page, 0)[1].values()]
    assert times == [[-1, -1], [7000, 7000], [-1, -1]]


@pytest.mark.parametrize(("long", "least", "most"), [(2, 3, 3), (3, 3, 33), (17, 3, 33), (18, 33, 33)])
def test_what_nine_steps_of_ten_take(rank: Rank, long: int, least: int, most: int) -> None:
    for step in range(WINDOW):
        rank.step(longer=30 if step < long else 0)
    (times,) = read_times(rank.page, 0)[1].values()
    forward = TIMED.index(Phase.FORWARD)
    assert (times[forward], times[len(TIMED) + forward]) == (1000 * least, 1000 * most)


def test_what_a_rank_had_no_core_for_is_not_what_it_takes_at_least(rank: Rank) -> None:
    for missed in (10**9, 20_000_000, 0):  # ns, the first at its start, the second for steps of the second window
        rank.without_core += missed
        for _ in range(WINDOW):
            rank.step(longer=30)
    forward = TIMED.index(Phase.FORWARD)
    found = [(times[forward], times[len(TIMED) + forward]) for times in read_times(rank.page, 0)[1].values()]
    assert found == [(33000, 33000), (32000, 33000), (33000, 33000)]


def test_the_kernel_tells_how_long_a_thread_had_no_core() -> None:
    assert module._without_core() >= 0
    if Path("/proc/thread-self/schedstat").exists():
        waited = Path("/proc/thread-self/schedstat").read_text().split()[1]
        assert module._without_core() >= int(waited)


def test_a_reader_that_comes_seldom_finds_the_last_windows(rank: Rank) -> None:
    for _ in range(40 * WINDOW):
        rank.step()
    assert list(read_times(rank.page, 0)[1]) == list(range(25, 41))
    assert list(read_times(rank.page, 38)[1]) == [39, 40]


def test_the_monitors_rank_learns_who_is_slow(rank: Rank) -> None:
    assert rank.board.slow is None
    show_slow(rank.page, 0, 1500)
    assert rank.board.slow == (0, 1.5)
    show_slow(rank.page, -1, 0)
    assert rank.board.slow is None


# -- in the launcher -------------------------------------------------------------------------------------------------


def test_the_launcher_says_who_is_slow_and_tells_the_monitors() -> None:
    said: list[str] = []
    shown: list[tuple[int, int]] = []
    hangs = Hangs(2, "node{}".format, said.append, lambda _: None, lambda *slow: shown.append(slow))
    for number in (1, 2, 3, 4):
        hangs.on_windows(windows(FAST, with_more(Phase.BACKWARD, 1.5), number=number))
    hangs.on_windows(windows(FAST, FAST, number=5))
    assert said == [
        "[zerorun] rank 1 on node1 is slow: of each step it is in backward for at least 30.0 ms, the others of its stage "
        "for at most 20.0 ms (the median). All ranks wait for it."
    ]
    assert shown == [(1, 1500), (-1, 0)]


def test_boards_tell_each_window_once(rank: Rank) -> None:
    boards = Boards()
    files, _ = boards.make(0)
    boards.started(0, 1, files, 0.0)
    page = boards._pages[0].page
    rank.board.go_on_at(page)
    for _ in range(2 * WINDOW):
        rank.step()
    assert [window.number for window in boards.new_windows()] == [1, 2]
    assert boards.new_windows() == []
    boards.show_slow(0, 1200)
    assert rank.board.slow == (0, 1.2)
    rank.board.go_on_at(bytearray(PAGE))
    boards.close()
