"""Pipeline schedules: every list can be run, keeps what it may, waits as long as the formulas say; zero-bubble gains."""

from __future__ import annotations

import itertools
import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerorun.errors import ScheduleError
from zerorun.pipeline.schedule import zero_bubble
from zerorun.pipeline.schedule.actions import Action, ActionKind, decode, encode, peer
from zerorun.pipeline.schedule.formulas import bubble, why_inexact
from zerorun.pipeline.schedule.schedules import SCHEDULES, make_schedule
from zerorun.pipeline.schedule.simulate import simulate
from zerorun.pipeline.schedule.times import Times

CHUNKS = {"interleaved": (2, 3, 4), "forward_only": (1, 2, 3, 4)}
SHAPES = st.tuples(st.integers(1, 16), st.integers(1, 40), st.integers(1, 4), st.sampled_from(SCHEDULES))
# forward, input gradient, weight gradient; some with a weight gradient that is the longest part, or the shortest
TIMES = [(1, 1, 1), (1, 1.2, 0.8), (1, 0.5, 1), (0.5, 1, 0.8), (1, 1, 2), (1, 0, 1), (2, 1, 0.1)]


def chunks_of(kind: str, chunks: int) -> int:
    allowed = CHUNKS.get(kind, (1,))
    return chunks if chunks in allowed else allowed[0]


def uneven(stages: int, seed: int, transfer: float = 0.1) -> Times:
    draw = random.Random(seed)
    parts = [[draw.uniform(0.7, 1.3) for _ in range(stages)] for _ in range(3)]
    return Times.make(stages, parts[0], parts[1], parts[2], transfer)


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.integers(0, 1000))
def test_every_schedule_can_be_run(shape: tuple[int, int, int, str], seed: int) -> None:
    stages, micro_batches, chunks, kind = shape
    chunks = chunks_of(kind, chunks)
    times = uneven(stages, seed)
    schedule = make_schedule(kind, stages, micro_batches, chunks=chunks, times=times)
    report = simulate(schedule, times)  # which proves all that is in its note
    assert report.makespan >= max(report.busy) * (1 - 1e-9)
    assert len(report.idle) == stages
    most = {
        "naive": 1,
        "gpipe": micro_batches,
        "1f1b": min(stages, micro_batches),
        "zero_bubble": min(stages, micro_batches),
        "interleaved": min(stages * chunks + stages - 1, micro_batches * chunks),
        "forward_only": 0,
    }[kind]
    assert max(report.peak_kept) <= most
    assert all(whole <= kept for whole, kept in zip(report.peak_whole, report.peak_kept, strict=True))


@settings(max_examples=300, deadline=None)
@given(SHAPES, st.sampled_from(TIMES))
def test_bubble_is_the_formula_wherever_it_is_exact(shape: tuple[int, int, int, str], parts: tuple[float, ...]) -> None:
    stages, micro_batches, chunks, kind = shape
    chunks = chunks_of(kind, chunks)
    times = Times.make(stages, *parts)
    report = simulate(make_schedule(kind, stages, micro_batches, chunks=chunks, times=times), times)
    expected = bubble(kind, stages, micro_batches, times, chunks=chunks)
    if why_inexact(kind, stages, micro_batches, times) is None:
        assert report.idle == pytest.approx((expected,) * stages, abs=1e-9)
    else:
        assert report.bubble >= expected - 1e-9  # what it leaves out only costs


def test_formulas_by_hand() -> None:
    times = Times.make(4, 1, 2, 0.5)
    expected = {"naive": 84, "gpipe": 10.5, "1f1b": 10.5, "interleaved": 5.25, "zero_bubble": 7.5, "forward_only": 1.5}
    for kind, value in expected.items():
        chunks = 2 if kind in CHUNKS else 1
        assert bubble(kind, 4, 8, times, chunks=chunks) == pytest.approx(value), kind
    reasons = {
        why_inexact("1f1b", 4, 8, Times.make(4, transfer=0.1)),
        why_inexact("1f1b", 4, 8, Times.make(4, (1, 2, 1, 1))),
        why_inexact("zero_bubble", 4, 3, Times.make(4)),
        why_inexact("interleaved", 4, 9, Times.make(4)),
    }
    assert len(reasons) == 4
    assert None not in reasons


def test_kept_micro_batches() -> None:
    times = Times.make(4)
    kept = {kind: simulate(make_schedule(kind, 4, 8), times).peak_kept for kind in ("naive", "gpipe", "1f1b")}
    assert kept == {"naive": (1,) * 4, "gpipe": (8,) * 4, "1f1b": (4, 3, 2, 1)}
    # p (1 + (p-1) / (p v)) stages' worth on the first rank
    assert simulate(make_schedule("interleaved", 4, 8, chunks=2), times).peak_kept == (11, 9, 7, 5)


# -- zero bubble -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", [0, 0.02, 0.05])
def test_zero_bubble_saves_a_sixth_with_the_memory_of_1f1b(transfer: float) -> None:
    times = Times.make(4, 1, 1, 1, transfer)
    plain = simulate(make_schedule("1f1b", 4, 8), times)
    split = simulate(make_schedule("zero_bubble", 4, 8, times=times), times)
    assert split.makespan <= 0.85 * plain.makespan
    # Whole activations: no more on any rank. With the inputs of weight gradients: no more than 1F1B's fullest rank has.
    assert all(mine <= theirs for mine, theirs in zip(split.peak_whole, plain.peak_whole, strict=True))
    assert max(split.peak_kept) <= max(plain.peak_kept)
    if not transfer:
        assert (plain.makespan, split.makespan) == (33, 27)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 16), st.integers(1, 40), st.integers(0, 10_000), st.sampled_from([0, 0.1, 1.0]), st.integers(0, 20))
def test_zero_bubble_is_never_slower_than_1f1b(
    stages: int, micro_batches: int, seed: int, transfer: float, extra: int
) -> None:
    times = uneven(stages, seed, transfer)
    plain = simulate(make_schedule("1f1b", stages, micro_batches), times)
    schedule = make_schedule("zero_bubble", stages, micro_batches, times=times, limit=stages + extra)
    split = simulate(schedule, times)
    assert split.makespan <= plain.makespan * (1 + 1e-9)
    assert max(split.peak_kept) <= min(stages + extra, micro_batches)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
def test_zero_bubble_keeps_to_its_limit(limit: int) -> None:
    for stages, micro_batches in itertools.product((1, 2, 5), (1, 4, 11)):
        times = uneven(stages, limit)
        report = simulate(make_schedule("zero_bubble", stages, micro_batches, times=times, limit=limit), times)
        assert max(report.peak_kept) <= limit


def test_zero_bubble_with_twice_the_memory_has_the_bubble_of_h2() -> None:
    """(p-1)(F+B-2W), and no less than (p-1) F: the last rank cannot start before."""
    for parts in ((1, 2, 0.5), (1, 1, 0.5), (1, 1.2, 0.8)):
        times = Times.make(8, *parts)
        report = simulate(make_schedule("zero_bubble", 8, 32, times=times, limit=15), times)
        forward, inputs, weights = parts
        assert report.bubble == pytest.approx(7 * max(forward, forward + inputs - 2 * weights))


def test_zero_bubble_is_the_same_on_every_rank() -> None:
    """Each rank makes the schedule for itself; nothing in it may depend on chance."""
    times = uneven(6, 3)
    first, second = (make_schedule("zero_bubble", 6, 20, times=times) for _ in range(2))
    assert all(list(first.actions(rank)) == list(second.actions(rank)) for rank in range(6))


def test_a_large_zero_bubble_schedule_is_played_in_one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_bubble, "_BUDGET_ACTIONS", 1)  # everything is large
    times = Times.make(16, 1.1, 1.2, 0.9)
    schedule = make_schedule("zero_bubble", 16, 64, times=times)
    assert simulate(schedule, times).bubble < 1.2 * bubble("zero_bubble", 16, 64, times)


# -- lists -------------------------------------------------------------------------------------------------------


def test_the_lists_of_1f1b() -> None:
    shown = {
        ActionKind.FORWARD: "F",
        ActionKind.BACKWARD: "B",
        ActionKind.SEND_ACTIVATION: "s",
        ActionKind.RECEIVE_GRADIENT: "r",
    }
    schedule = make_schedule("1f1b", 2, 3)
    assert " ".join(f"{shown[a.kind]}{a.micro_batch}" for a in schedule.actions(0)) == "F0 s0 F1 s1 r0 B0 F2 s2 r1 B1 r2 B2"
    last = [action for action in schedule.actions(1) if action.micro_batch == 1]
    assert [action.kind for action in last] == [
        ActionKind.RECEIVE_ACTIVATION,
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
        ActionKind.SEND_GRADIENT,
    ]


def test_gradients_of_micro_batches_add_up_in_the_same_order_everywhere() -> None:
    for kind in SCHEDULES[:-1]:
        chunks = chunks_of(kind, 2)
        for rank in range(3):
            actions = list(make_schedule(kind, 3, 7, chunks=chunks).actions(rank))
            added = [a for a in actions if a.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)]
            for chunk in range(chunks):
                assert [a.micro_batch for a in added if a.chunk == chunk] == list(range(7)), kind


def test_one_rank_sends_nothing() -> None:
    for kind in SCHEDULES:
        schedule = make_schedule(kind, 1, 5, chunks=chunks_of(kind, 3))
        assert all(action.kind.computes for action in schedule.actions(0))


def test_lists_are_made_as_they_are_read() -> None:
    schedule = make_schedule("1f1b", 1024, 10**12)
    first = list(itertools.islice(schedule.actions(1023), 3))
    assert first == [
        Action(ActionKind.RECEIVE_ACTIVATION, 0, 0),
        Action(ActionKind.FORWARD, 0, 0),
        Action(ActionKind.BACKWARD, 0, 0),
    ]
    assert list(itertools.islice(pickle.loads(pickle.dumps(schedule)).actions(1023), 3)) == first


def test_codes_and_peers() -> None:
    for kind, micro_batch, chunk in itertools.product(ActionKind, (0, 5, 10**6), range(3)):
        action = Action(kind, micro_batch, chunk)
        assert decode(encode(action, 3), 3) == action
    assert [peer(kind, 2, 3) for kind in list(ActionKind)[4:]] == [0, 1, 1, 0]
    assert str(Action(ActionKind.SEND_GRADIENT, 3, 1)) == "send_gradient(micro-batch 3, chunk 1)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "1f1v"}, ["'1f1v' is unknown", 'Did you mean "1f1b"?', "zero_bubble"]),
        ({"stages": 0}, ["stages = 0 is too few", "Remedy: give 1 or more"]),
        ({"micro_batches": -1}, ["micro_batches = -1"]),
        ({"kind": "zero_bubble", "limit": 0}, ["limit = 0"]),
        ({"kind": "interleaved"}, ["chunks = 1", "2 or more"]),
        ({"kind": "gpipe", "chunks": 2}, ["chunks = 2", "gpipe has one chunk", "Remedy: use the kind interleaved"]),
        ({"limit": 3}, ["limit = 3", "1f1b", "Remedy: use the kind zero_bubble"]),
        ({"kind": "zero_bubble", "times": Times.make(3)}, ["3 stages", "schedule of 4"]),
    ],
)
def test_errors(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule(**{"kind": "1f1b", "stages": 4, "micro_batches": 8, **arguments})
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([(1, 2, 3)], "forward has 3 numbers for 2 stages"),
        ([1, -1], "input_gradient of stage 0 is -1.0"),
        ([1, 1, (1, float("nan"))], "weight_gradient of stage 1 is nan"),
        ([1, 1, 1, float("inf")], "transfer of stage 0 is inf"),
        ([0, 0, 0, 1], "no stage takes any time"),
    ],
)
def test_times_that_are_none(parts: list[Any], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        Times.make(2, *parts)
