"""The parts of a schedule: the actions, their order on each rank, and their form in memory.

[Note: a schedule is data]
A schedule is one list of actions for each rank. A rank runs its list from the first action to the last and decides
nothing. A send never blocks: the message is buffered and travels by itself. A receive blocks until the message is there.
Between two neighbours the messages of one direction and one sort (activations, gradients) arrive in the order in which
they were sent, and are taken in that order; so a message needs no label.

Rank r holds the chunks 0 .. chunks-1 of the model. Chunk c of rank r is the global stage c * stages + r: an activation
goes from rank r to rank r + 1, and from the last rank to the next chunk of rank 0. With one rank nothing is sent.

[Note: codes]
A schedule of 1,024 ranks and 4,096 micro-batches has 25 million actions. So actions are integers,
``(micro_batch * chunks + chunk) * 8 + kind``, made one by one on demand; they become objects only to be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from zerorun.errors import ScheduleError

KIND_BITS = 3  # lowest bits of a code
FORWARD_ONLY = "forward_only"


class ActionKind(IntEnum):
    """What an action does. ``BACKWARD`` is ``INPUT_GRADIENT`` and ``WEIGHT_GRADIENT`` in one."""

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3
    SEND_ACTIVATION = 4
    RECEIVE_ACTIVATION = 5
    SEND_GRADIENT = 6
    RECEIVE_GRADIENT = 7

    @property
    def computes(self) -> bool:
        """True if the action takes time on the rank; False for messages."""
        return self < ActionKind.SEND_ACTIVATION


class Action(NamedTuple):
    """One action of a rank. ``micro_batch`` counts from 0; ``chunk`` is one of the rank's chunks, from 0."""

    kind: ActionKind
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind.name.lower()}(micro-batch {self.micro_batch}, chunk {self.chunk})"


def encode(action: Action, chunks: int) -> int:
    """The code of an action. See [Note: codes]."""
    return (action.micro_batch * chunks + action.chunk) << KIND_BITS | action.kind


def decode(code: int, chunks: int) -> Action:
    """The action of a code."""
    micro_batch, chunk = divmod(code >> KIND_BITS, chunks)
    return Action(ActionKind(code & (1 << KIND_BITS) - 1), micro_batch, chunk)


def peer(kind: ActionKind, rank: int, stages: int) -> int:
    """The rank at the other end of a message that ``rank`` sends or receives."""
    onwards = kind in (ActionKind.SEND_ACTIVATION, ActionKind.RECEIVE_GRADIENT)
    return (rank + 1 if onwards else rank - 1) % stages


def is_first(rank: int, chunk: int) -> bool:
    """True if this chunk reads the data, so that nothing is received before its forward."""
    return rank == 0 and chunk == 0


def is_last(rank: int, chunk: int, stages: int, chunks: int) -> bool:
    """True if this chunk computes the loss, so that nothing is received before its backward."""
    return rank == stages - 1 and chunk == chunks - 1


@dataclass(frozen=True)
class PipelineSchedule:
    """One list of actions for each of ``stages`` ranks. ``codes(rank)`` gives a rank's list as codes."""

    kind: str
    stages: int
    micro_batches: int
    chunks: int
    codes: Callable[[int], Iterable[int]] = field(repr=False, compare=False)

    def actions(self, rank: int) -> Iterator[Action]:
        """Return the actions of ``rank`` in order, made one by one. Raises ScheduleError if there is no such rank."""
        if not 0 <= rank < self.stages:
            raise ScheduleError(
                f"rank {rank} has no actions: the schedule has {self.stages} stages. "
                f"Remedy: ask for a rank from 0 to {self.stages - 1}."
            )
        return (decode(code, self.chunks) for code in self.codes(rank))

    @classmethod
    def from_lists(
        cls, lists: Sequence[Iterable[Action]], micro_batches: int, *, chunks: int = 1, kind: str = "given"
    ) -> PipelineSchedule:
        """Make a schedule from given actions, messages included. Only the ``kind`` "forward_only" needs no backward.

        Raises ScheduleError if an action has a micro-batch or chunk that does not exist.
        """
        kept: list[tuple[int, ...]] = []
        for rank, actions in enumerate(lists):
            codes = []
            for action in actions:
                if not (0 <= action.micro_batch < micro_batches and 0 <= action.chunk < chunks):
                    raise ScheduleError(
                        f"rank {rank}: {action} does not exist: there are {micro_batches} micro-batches "
                        f"and {chunks} chunks. Remedy: count both from 0."
                    )
                codes.append(encode(action, chunks))
            kept.append(tuple(codes))
        return cls(kind, len(kept), micro_batches, chunks, kept.__getitem__)

    @classmethod
    def from_computation(
        cls, kind: str, stages: int, micro_batches: int, chunks: int, compute: Callable[[int], Iterable[int]]
    ) -> PipelineSchedule:
        """Make a schedule from the codes of each rank's computations. ``with_messages`` inserts the messages."""
        return cls(kind, stages, micro_batches, chunks, partial(with_messages, compute, stages, chunks))


def with_messages(compute: Callable[[int], Iterable[int]], stages: int, chunks: int, rank: int) -> Iterator[int]:
    """Yield the codes of ``rank``, each receive right before what needs it and each send right after what made it.

    This is the best place for both: a send does not block, and an earlier receive could only block earlier.
    """
    receive, send = _message_tables(stages, chunks, rank)
    period = chunks << KIND_BITS
    for code in compute(rank):
        low = code % period
        if receive[low]:
            yield code + receive[low]
        yield code
        if send[low]:
            yield code + send[low]


def _message_tables(stages: int, chunks: int, rank: int) -> tuple[list[int], list[int]]:
    """Return, by a computation's code modulo 8 * chunks, what to add for its receive's and its send's code; 0: none."""
    receive, send = ([0] * (chunks << KIND_BITS) for _ in range(2))
    if stages == 1:
        return receive, send
    for chunk in range(chunks):
        low = chunk << KIND_BITS
        first, last = is_first(rank, chunk), is_last(rank, chunk, stages, chunks)
        if not first:
            receive[low + ActionKind.FORWARD] = ActionKind.RECEIVE_ACTIVATION - ActionKind.FORWARD
        if not last:
            send[low + ActionKind.FORWARD] = ActionKind.SEND_ACTIVATION - ActionKind.FORWARD
        for kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            if not last:
                receive[low + kind] = ActionKind.RECEIVE_GRADIENT - kind
            if not first:
                send[low + kind] = ActionKind.SEND_GRADIENT - kind
    return receive, send
