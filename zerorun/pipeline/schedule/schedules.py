"""Makes schedules: one list of actions for each rank, from a kind and the numbers of stages and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

from zerorun.errors import ScheduleError, did_you_mean

from .actions import FORWARD_ONLY, KIND_BITS, ActionKind, PipelineSchedule
from .times import Times
from .zero_bubble import zero_bubble

INTERLEAVED = "interleaved"
ZERO_BUBBLE = "zero_bubble"


def make_schedule(
    kind: str,
    stages: int,
    micro_batches: int,
    *,
    chunks: int = 1,
    times: Times | None = None,
    limit: int | None = None,
) -> PipelineSchedule:
    """Make the schedule of one optimizer step.

    ``kind``: one of ``SCHEDULES``. ``chunks``: parts of the model per rank, for "interleaved" (2 or more) and
    "forward_only". ``times`` and ``limit`` matter only for "zero_bubble": the times that it is optimized for (default: all
    parts take the same time), and how many micro-batches a rank may keep (default: as many as the first rank of "1f1b").
    Raises ScheduleError.
    """
    _check(kind, stages, micro_batches, chunks, limit)
    if kind == ZERO_BUBBLE:
        return zero_bubble(stages, micro_batches, times or Times.make(stages), limit)
    shape = Shape(stages, micro_batches, chunks)
    return PipelineSchedule.from_computation(kind, stages, micro_batches, chunks, partial(_COMPUTATIONS[kind], shape))


def _check(kind: str, stages: int, micro_batches: int, chunks: int, limit: int | None) -> None:
    if kind not in SCHEDULES:
        hint = f"schedule kind {kind!r} is unknown. {did_you_mean(kind, SCHEDULES)}".rstrip()
        raise ScheduleError(f"{hint} Remedy: use one of {', '.join(SCHEDULES)}.")
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks), ("limit", limit)):
        if value is not None and value < 1:
            raise ScheduleError(f"{name} = {value} is too few. Remedy: give 1 or more.")
    if kind == INTERLEAVED and chunks == 1:
        raise ScheduleError("chunks = 1 leaves nothing to interleave. Remedy: give chunks of 2 or more, or use 1f1b.")
    if chunks > 1 and kind not in (INTERLEAVED, FORWARD_ONLY):
        raise ScheduleError(
            f"chunks = {chunks} cannot be used: {kind} has one chunk per rank. "
            f"Remedy: use the kind {INTERLEAVED}, or leave chunks out."
        )
    if limit is not None and kind != ZERO_BUBBLE:
        raise ScheduleError(
            f"limit = {limit} cannot be used: what {kind} keeps is fixed. "
            f"Remedy: use the kind {ZERO_BUBBLE}, or leave limit out."
        )


@dataclass(frozen=True)
class Shape:
    """Numbers of ranks, of micro-batches and of chunks per rank, and the order that follows from them."""

    stages: int
    micro_batches: int
    chunks: int

    def order(self, kind: ActionKind) -> Iterator[int | None]:
        """Yield the codes of all forwards, or of all backwards, in the order that is the same on every rank.

        A round is as many micro-batches as there are ranks, and passes through one chunk after the other: its first
        micro-batch is back at rank 0 just when rank 0 has started the last one. If the last round is short, None stands for
        each missing micro-batch. Leaving out all actions of some micro-batches cannot cause a deadlock, so the number of
        micro-batches may be any.
        """
        chunks = range(self.chunks) if kind == ActionKind.FORWARD else range(self.chunks)[::-1]
        for first in range(0, self.micro_batches, self.stages):
            for chunk in chunks:
                for micro_batch in range(first, first + self.stages):
                    exists = micro_batch < self.micro_batches
                    yield (micro_batch * self.chunks + chunk) << KIND_BITS | kind if exists else None


def _forwards(shape: Shape, rank: int) -> Iterator[int]:
    """Nothing but forwards, for evaluation."""
    return (code for code in shape.order(ActionKind.FORWARD) if code is not None)


def _naive(shape: Shape, rank: int) -> Iterator[int]:
    """One micro-batch at a time goes through all stages and back: the baseline, in which all ranks but one are idle."""
    for micro_batch in range(shape.micro_batches):
        yield micro_batch << KIND_BITS | ActionKind.FORWARD
        yield micro_batch << KIND_BITS | ActionKind.BACKWARD


def _gpipe(shape: Shape, rank: int) -> Iterator[int]:
    """All forwards, then all backwards. Both start with the first micro-batch, so gradients add up in the usual order.

    Huang et al., GPipe, 2019 (arXiv 1811.06965).
    """
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        for micro_batch in range(shape.micro_batches):
            yield micro_batch << KIND_BITS | kind


def _alternating(shape: Shape, rank: int) -> Iterator[int]:
    """Some forwards ahead, then one forward and one backward in turn, then the remaining backwards.

    With one chunk, a rank runs ahead by one forward for each rank after it: 1F1B (Narayanan et al., PipeDream, 2019). With
    more chunks, it runs ahead by two forwards for each rank after it, and by a round for each chunk after the first
    (Narayanan et al., 2021, arXiv 2104.04473).
    """
    behind = shape.stages - 1 - rank
    ahead = behind if shape.chunks == 1 else 2 * behind + (shape.chunks - 1) * shape.stages
    forwards, backwards = shape.order(ActionKind.FORWARD), shape.order(ActionKind.BACKWARD)
    in_turn = chain.from_iterable(zip(forwards, backwards, strict=False))  # until there are no more forwards
    for code in chain(islice(forwards, ahead), in_turn, backwards):
        if code is not None:
            yield code


_COMPUTATIONS: dict[str, Callable[[Shape, int], Iterator[int]]] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _alternating,
    INTERLEAVED: _alternating,
    FORWARD_ONLY: _forwards,
}
SCHEDULES = ("naive", "gpipe", "1f1b", INTERLEAVED, ZERO_BUBBLE, FORWARD_ONLY)
