"""The simulator: against a slow and plain one, on broken schedules, and at size."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from harness import patience
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pipeline_schedules import SHAPES, chunks_of, uneven

from zerorun.errors import ScheduleError
from zerorun.pipeline.schedule.actions import Action, ActionKind, PipelineSchedule, peer
from zerorun.pipeline.schedule.schedules import make_schedule
from zerorun.pipeline.schedule.simulate import simulate
from zerorun.pipeline.schedule.times import Times

F, B, INPUT, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND, RECEIVE = ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_ACTIVATION
Lists = list[list[Action]]


def lists_of(schedule: PipelineSchedule) -> Lists:
    return [list(schedule.actions(rank)) for rank in range(schedule.stages)]


def reference(lists: Lists, times: Times, chunks: int) -> float:
    """The makespan by rounds over all ranks, each of which goes on as far as it can; no checks, messages by name."""
    stages = len(lists)
    clocks, places = [0.0] * stages, [0] * stages
    arrivals: dict[tuple[ActionKind, int, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while places[rank] < len(actions):
                kind, micro_batch, chunk = actions[places[rank]]
                if kind in (RECEIVE, ActionKind.RECEIVE_GRADIENT):
                    if (kind, rank, micro_batch, chunk) not in arrivals:
                        break
                    clocks[rank] = max(clocks[rank], arrivals[kind, rank, micro_batch, chunk])
                elif kind == SEND:
                    there = (RECEIVE, peer(kind, rank, stages), micro_batch, chunk + (rank == stages - 1))
                    arrivals[there] = clocks[rank] + times.transfer[rank]
                elif kind == ActionKind.SEND_GRADIENT:
                    there = (ActionKind.RECEIVE_GRADIENT, peer(kind, rank, stages), micro_batch, chunk - (rank == 0))
                    arrivals[there] = clocks[rank] + times.transfer[rank]
                else:
                    gradients = times.input_gradient[rank], times.weight_gradient[rank]
                    clocks[rank] += {F: times.forward[rank], B: sum(gradients), INPUT: gradients[0], W: gradients[1]}[
                        kind
                    ] / chunks
                places[rank] += 1
                moved = True
    assert places == [len(actions) for actions in lists]
    return max(clocks)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(0, 1000), st.sampled_from([0.0, 0.3, 4.0]))
def test_makespan_is_that_of_a_plain_simulator(shape: tuple[int, int, int, str], seed: int, transfer: float) -> None:
    stages, micro_batches, chunks, kind = shape
    chunks = chunks_of(kind, chunks)
    times = uneven(stages, seed, transfer)
    schedule = make_schedule(kind, stages, micro_batches, chunks=chunks, times=times)
    report = simulate(schedule, times, record=True)
    assert report.makespan == pytest.approx(reference(lists_of(schedule), times, chunks))
    for rank, spans in enumerate(report.spans):
        computed = [action for action in schedule.actions(rank) if action.kind.computes]
        assert [span.action for span in spans] == computed
        assert all(after.start >= before.end for before, after in pairwise(spans))
        assert sum(span.end - span.start for span in spans) == pytest.approx(report.busy[rank])


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.integers(0, 10_000))
def test_any_change_of_a_list_is_caught_or_harmless(shape: tuple[int, int, int, str], seed: int) -> None:
    """Drop, repeat or exchange actions by chance: either it is an error, or the plain simulator runs it as well."""
    stages, micro_batches, chunks, kind = shape
    chunks = chunks_of(kind, chunks)
    draw = random.Random(seed)
    lists = lists_of(make_schedule(kind, stages, micro_batches, chunks=chunks))
    chosen = draw.choice(lists)
    place, other = draw.randrange(len(chosen)), draw.randrange(len(chosen))
    change = draw.choice(("drop", "repeat", "exchange"))
    if change == "drop":
        del chosen[place]
    elif change == "repeat":
        chosen.insert(other, chosen[place])
    else:
        chosen[place], chosen[other] = chosen[other], chosen[place]
    times = uneven(stages, seed)
    broken = PipelineSchedule.from_lists(lists, micro_batches, chunks=chunks, kind=kind)
    try:
        report = simulate(broken, times)
    except ScheduleError as error:
        assert "Remedy: " in str(error)
    else:
        assert change == "exchange"
        assert report.makespan == pytest.approx(reference(lists, times, chunks))


# -- broken by hand ----------------------------------------------------------------------------------------------


def index(actions: list[Action], kind: ActionKind, micro_batch: int) -> int:
    return actions.index(Action(kind, micro_batch, 0))


def swap_receives(lists: Lists) -> None:
    mine = lists[2]
    here, there = index(mine, RECEIVE, 2), index(mine, RECEIVE, 3)
    mine[here], mine[there] = mine[there], mine[here]


def swap_micro_batches(lists: Lists) -> None:
    """Receive and forward of 2 and 3 exchanged on one rank: it is consistent in itself, but not with its neighbour."""
    lists[1] = [
        a._replace(micro_batch={2: 3, 3: 2}.get(a.micro_batch, a.micro_batch)) if a.kind in (F, RECEIVE) else a
        for a in lists[1]
    ]


def wait_for_one_another(lists: Lists) -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it sends its activation."""
    lists[0].remove(Action(ActionKind.RECEIVE_GRADIENT, 0, 0))
    lists[0].insert(1, Action(ActionKind.RECEIVE_GRADIENT, 0, 0))


def drop(rank: int, kind: ActionKind, micro_batch: int) -> Callable[[Lists], None]:
    return lambda lists: lists[rank].remove(Action(kind, micro_batch, 0))


def add(rank: int, place: int, action: Action) -> Callable[[Lists], None]:
    return lambda lists: lists[rank].insert(place, action)


def weight_before_input(lists: Lists) -> None:
    mine = lists[1]
    here, there = index(mine, W, 1), index(mine, INPUT, 1)
    mine.insert(there, mine.pop(here))


@pytest.mark.parametrize(
    ("kind", "breaks", "words"),
    [
        ("1f1b", swap_micro_batches, "rank 1: receive_activation(micro-batch 3, chunk 0) finds micro-batch 2, chunk 0: "
                                     "rank 0 did not send what is expected before that"),
        ("1f1b", swap_receives, "finds micro-batch 2, chunk 0: rank 1 did not send what is expected"),
        ("1f1b", drop(0, SEND, 3), "(micro-batch 3, chunk 0) finds micro-batch 4, chunk 0: rank 0 did not send what is"),
        ("1f1b", drop(0, SEND, 7), "rank 0 waits in receive_gradient(micro-batch 5, chunk 0) for rank 1; rank 1 waits in "
                                   "receive_activation(micro-batch 7, chunk 0) for rank 0, which has no such send in its"),
        ("1f1b", drop(1, ActionKind.SEND_GRADIENT, 7), "rank 1 ends without the send_gradient of micro-batch 7, chunk 0"),
        ("1f1b", drop(3, B, 7), "rank 3: send_gradient(micro-batch 7, chunk 0) comes before the backward or input"),
        ("1f1b", drop(1, RECEIVE, 4), "rank 1: forward(micro-batch 4, chunk 0) comes before the receive_activation"),
        ("1f1b", drop(2, ActionKind.RECEIVE_GRADIENT, 4), "rank 2: backward(micro-batch 4, chunk 0) comes before the re"),
        ("zero_bubble", drop(2, W, 5), "rank 2 ends without the backward or weight_gradient of micro-batch 5, chunk 0"),
        ("zero_bubble", weight_before_input, "rank 1: weight_gradient(micro-batch 1, chunk 0) comes before the backward"),
        ("gpipe", add(1, 9, Action(F, 0, 0)), "rank 1: forward(micro-batch 0, chunk 0) comes a second time"),
        ("gpipe", add(0, 4, Action(SEND, 0, 0)), "rank 0: send_activation(micro-batch 0, chunk 0) comes a second time"),
        ("1f1b", add(3, 2, Action(SEND, 0, 0)), "rank 3: send_activation(micro-batch 0, chunk 0) cannot be done"),
        ("1f1b", add(0, 0, Action(RECEIVE, 0, 0)), "rank 0: receive_activation(micro-batch 0, chunk 0) cannot be done"),
        ("forward_only", add(3, 2, Action(B, 0, 0)), "rank 3: backward(micro-batch 0, chunk 0) cannot be done: this rank "
                                                     "has no such action in a forward_only schedule"),
        ("1f1b", wait_for_one_another, "deadlock: rank 0 waits in receive_gradient(micro-batch 0, chunk 0) for rank 1; "
                                       "rank 1 waits in receive_activation(micro-batch 0, chunk 0) for rank 0"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named(kind: str, breaks: Callable[[Lists], None], words: str) -> None:
    lists = lists_of(make_schedule(kind, 4, 8))
    breaks(lists)
    with pytest.raises(ScheduleError) as caught:
        simulate(PipelineSchedule.from_lists(lists, 8, kind=kind), Times.make(4))
    assert words in str(caught.value)
    assert "Remedy: " in str(caught.value)


def test_a_ring_of_waiting_ranks_is_named_and_not_the_rest() -> None:
    """Interleaved, all ranks wait for one another in a ring; of a long one, only the beginning is shown."""
    lists = lists_of(make_schedule("interleaved", 20, 20, chunks=2))
    late = Action(RECEIVE, 0, 1)
    lists[0].remove(late)
    lists[0].insert(0, late)  # the second chunk before the first has begun
    with pytest.raises(ScheduleError) as caught:
        simulate(PipelineSchedule.from_lists(lists, 20, chunks=2), Times.make(20))
    assert "rank 0 waits in receive_activation(micro-batch 0, chunk 1) for rank 19" in str(caught.value)
    assert "and 12 more ranks" in str(caught.value)


def test_chunks_of_one_rank_in_their_order() -> None:
    right = [Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 1), Action(B, 0, 0)]
    assert simulate(PipelineSchedule.from_lists([right], 1, chunks=2), Times.make(1)).makespan == 3
    for wrong in ([1, 0, 2, 3], [0, 1, 3, 2]):
        with pytest.raises(ScheduleError, match="same action of its neighbour chunk"):
            simulate(PipelineSchedule.from_lists([[right[place] for place in wrong]], 1, chunks=2), Times.make(1))


def test_a_chunk_takes_its_part_of_each_time() -> None:
    order = [(F, 0), (F, 1), (INPUT, 1), (W, 1), (INPUT, 0), (W, 0)]
    split = PipelineSchedule.from_lists([[Action(kind, 0, chunk) for kind, chunk in order]], 1, chunks=2)
    report = simulate(split, Times.make(1, 2.0, 4.0, 8.0), record=True)
    assert [span.end - span.start for span in report.spans[0]] == [1, 1, 2, 4, 2, 4]
    assert report.makespan == report.busy[0] == 14


def test_actions_and_times_that_do_not_fit() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0: forward\(micro-batch 1, chunk 0\) does not exist: there are 1"):
        PipelineSchedule.from_lists([[Action(F, 1, 0)]], 1)
    with pytest.raises(ScheduleError, match=r"times of 3 stages do not fit a schedule of 4"):
        simulate(make_schedule("1f1b", 4, 8), Times.make(3))
    with pytest.raises(ScheduleError, match="rank 4 has no actions"):
        make_schedule("1f1b", 4, 8).actions(4)


# -- numbers -----------------------------------------------------------------------------------------------------


def test_numbers_of_a_small_run() -> None:
    """Two ranks, one micro-batch: 2 + 0.5 + 3, and back 4 + 0.25 + 1."""
    times = Times.make(2, (2, 3), (0.5, 2), (0.5, 2), (0.5, 0.25))
    report = simulate(make_schedule("1f1b", 2, 1), times, record=True)
    assert report.makespan == 10.75
    assert report.busy == (3, 7)
    assert report.idle == (7.75, 3.75)
    assert report.bubble == 5.75
    assert report.efficiency == pytest.approx(10 / 21.5)
    assert [(span.start, span.end) for span in report.spans[0]] == [(0, 2), (9.75, 10.75)]


def test_hundreds_of_stages_take_a_second() -> None:
    times = Times.make(256)
    begun = time.perf_counter()
    report = simulate(make_schedule("1f1b", 256, 512), times)
    assert time.perf_counter() - begun < 15 * patience()  # 0.9 s; 1,024 x 4,096 under 60 s is in tests/perf/schedules.py
    assert report.idle == (3 * 255,) * 256
    assert report.peak_kept == tuple(range(256, 0, -1))
