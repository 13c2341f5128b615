"""Schedules over NCCL: a send may not end before its receive begins, and calls of one communicator have one order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from zerorun.pipeline.p2p import ACTIVATIONS, GRADIENTS, links_of
from zerorun.pipeline.schedule.actions import Action, ActionKind, PipelineSchedule, peer
from zerorun.pipeline.schedule.schedules import make_schedule

SORTS = {ActionKind.SEND_ACTIVATION: ACTIVATIONS, ActionKind.RECEIVE_ACTIVATION: ACTIVATIONS}
SORTS |= {ActionKind.SEND_GRADIENT: GRADIENTS, ActionKind.RECEIVE_GRADIENT: GRADIENTS}
SENDS = (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)
# What communicator a message from one stage to another, of a sort, goes through.
Communicator = Callable[[int, int, str], object]


def by_link(sender: int, receiver: int, sort: str) -> object:
    return sender, receiver, sort


def by_pair(sender: int, receiver: int, sort: str) -> object:
    return frozenset((sender, receiver))


def by_sort(sender: int, receiver: int, sort: str) -> object:
    return frozenset((sender, receiver)), sort


def is_finished(schedule: PipelineSchedule, communicator: Communicator) -> bool:
    """Run the lists: a receive waits until it is over, a send waits for nothing but stays in its communicator's queue."""
    stages = schedule.stages
    left = [deque(schedule.actions(stage)) for stage in range(stages)]
    queues: dict[tuple[int, object], deque[tuple[object, Action]]] = {}
    waits: list[deque[tuple[object, Action]] | None] = [None] * stages  # the queue whose last entry a stage waits for

    def step(stage: int) -> bool:
        if waits[stage] or not left[stage]:
            return False
        action = left[stage].popleft()
        if not action.kind.computes:
            other = peer(action.kind, stage, stages)
            ends = (stage, other) if action.kind in SENDS else (other, stage)
            place = communicator(*ends, SORTS[action.kind])
            queue = queues.setdefault((stage, place), deque())
            queue.append(((*ends, SORTS[action.kind]), action))
            waits[stage] = None if action.kind in SENDS else queue
        return True

    def meet() -> bool:
        met = False
        for (stage, place), queue in queues.items():
            for other in range(stages):
                theirs = queues.get((other, place))
                if other == stage or not queue or not theirs or queue[0][0] != theirs[0][0]:
                    continue
                assert {queue[0][1].kind in SENDS, theirs[0][1].kind in SENDS} == {True, False}
                queue.popleft()
                theirs.popleft()
                met = True
        return met

    while sum(step(stage) for stage in range(stages)) or meet():
        pass
    return not any(left) and not any(queues.values())


def made(kind: str, stages: int, micro_batches: int) -> PipelineSchedule:
    return make_schedule(kind, stages, micro_batches, chunks=2 if kind == "interleaved" else 1)


KINDS = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")


@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_stalls_with_a_process_group_for_each_link(kind: str) -> None:
    for stages in (2, 3, 4, 8):
        for micro_batches in (stages, 2 * stages, 8 * stages):
            schedule = made(kind, stages, micro_batches)
            assert is_finished(schedule, by_link), (stages, micro_batches)
            links = set(links_of(stages, schedule.chunks))
            for stage in range(stages):
                for action in schedule.actions(stage):
                    if action.kind in SENDS:
                        assert (stage, peer(action.kind, stage, stages), SORTS[action.kind]) in links


def test_fewer_process_groups_would_not_do() -> None:
    """What the links are for: this is how it was, and how it would be with a group for each sort."""
    stalls = {kind for kind in KINDS if not is_finished(made(kind, 2, 8), by_pair)}
    assert stalls == {"1f1b", "interleaved", "zero_bubble"}
    assert not is_finished(made("interleaved", 2, 8), by_sort)
