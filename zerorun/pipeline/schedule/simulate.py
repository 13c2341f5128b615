"""The simulator: runs the lists of a schedule as the ranks would, and proves that they can be run.

[Note: what is proved]
Every action is run, in the order of the lists, by the rules of [Note: a schedule is data]. For each rank, micro-batch and
chunk, a byte holds what has been done. An action names the bits that must be set before it, and the bits (its own among
them) that must not be set; at the end all bits must be set. So each action comes exactly once, after everything that it
depends on. Each link is a queue, and a receive must find the message that it expects at the head of the queue. If no rank
can go on, an error names those that wait. Times play no part in this: a schedule that runs with some times runs with all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from zerorun.errors import ScheduleError

from .actions import FORWARD_ONLY, KIND_BITS, Action, ActionKind, PipelineSchedule, decode, encode, is_first, is_last, peer
from .times import Times

_SHOWN_WAITS = 8
_KIND_MASK = (1 << KIND_BITS) - 1

# What has been done for a micro-batch and chunk, as bits.
_ARRIVED, _FORWARD, _LEFT, _GRADIENT_ARRIVED, _INPUT, _GRADIENT_LEFT, _WEIGHT = (1 << bit for bit in range(7))
_MEANING = {
    _ARRIVED: "receive_activation",
    _FORWARD: "forward",
    _LEFT: "send_activation",
    _GRADIENT_ARRIVED: "receive_gradient",
    _INPUT: "backward or input_gradient",
    _GRADIENT_LEFT: "send_gradient",
    _WEIGHT: "backward or weight_gradient",
}


class Span(NamedTuple):
    """One computation and when it ran, in the unit of the times."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Report:
    """The times and the memory of a run. Times have the unit of the given ones; each tuple has one number per rank.

    ``peak_kept``: the most activations that are kept at once, from the forward to the weight gradient. ``peak_whole``: the
    same, but only until the input gradient, after which a split backward keeps less of each. The unit of both is the
    activations of one micro-batch in one chunk.
    """

    makespan: float
    busy: tuple[float, ...]
    peak_kept: tuple[int, ...]
    peak_whole: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...] = field(default=(), repr=False)  # per rank; empty unless asked for

    @property
    def idle(self) -> tuple[float, ...]:
        """The bubble: the time for which a rank waits between the start of the first rank and the end of the last."""
        return tuple(max(0.0, self.makespan - busy) for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The mean of ``idle`` over the ranks."""
        return sum(self.idle) / len(self.busy)

    @property
    def efficiency(self) -> float:
        """The fraction of the time in which ranks compute, 0 to 1."""
        return 1 - self.bubble / self.makespan if self.makespan else 1.0


def simulate(schedule: PipelineSchedule, times: Times, *, record: bool = False) -> Report:
    """Run ``schedule`` and report; ``record`` keeps a span for every computation.

    Raises ScheduleError if the ranks deadlock, if an action is missing, comes twice or comes before what it needs, and if a
    message is not the expected one.
    """
    times.check(schedule.stages)
    return _Run(schedule, times, record).report()


class _Row(NamedTuple):
    """What a rank needs to know of one kind of action in one chunk."""

    needs: int  # bits that must be set before it
    sets: int  # bits that must not be set before it, and that it sets
    seconds: float  # how long it takes
    keeps: int  # by how much it changes the number of kept micro-batches
    whole: int  # by how much it changes the number of those kept as a whole
    exists: bool  # False if this rank cannot do it in this chunk


def _rows(schedule: PipelineSchedule, times: Times, rank: int, chunk: int) -> list[_Row]:
    """Return one row for each ActionKind, in the order of their numbers."""
    stages, chunks, trains = schedule.stages, schedule.chunks, schedule.kind != FORWARD_ONLY
    receives = stages > 1 and not is_first(rank, chunk)  # the first chunk has nobody before it, the last nobody after it
    sends = stages > 1 and not is_last(rank, chunk, stages, chunks)
    forward, both = times.forward[rank] / chunks, (times.work(rank) - times.forward[rank]) / chunks
    inputs, weights = times.input_gradient[rank] / chunks, times.weight_gradient[rank] / chunks
    backward = _FORWARD | (_GRADIENT_ARRIVED if sends else 0)
    return [
        _Row(_ARRIVED if receives else 0, _FORWARD, forward, int(trains), int(trains), True),
        _Row(backward, _INPUT | _WEIGHT, both, -1, -1, trains),
        _Row(backward, _INPUT, inputs, 0, -1, trains),
        _Row(_INPUT, _WEIGHT, weights, -1, 0, trains),
        _Row(_FORWARD, _LEFT, 0.0, 0, 0, sends),
        _Row(0, _ARRIVED, 0.0, 0, 0, receives),
        _Row(_INPUT, _GRADIENT_LEFT, 0.0, 0, 0, trains and receives),
        _Row(0, _GRADIENT_ARRIVED, 0.0, 0, 0, trains and sends),
    ]


class _Run:
    """One run: queues between the ranks, and the ranks as generators that yield where they have to wait.

    Queue 2r holds the activations that travel to rank r, queue 2r + 1 the gradients: (code >> 3, time of arrival).
    """

    def __init__(self, schedule: PipelineSchedule, times: Times, record: bool) -> None:
        stages = schedule.stages
        self.schedule, self.times, self.record = schedule, times, record
        self.queues: list[deque[tuple[int, float]]] = [deque() for _ in range(2 * stages)]
        self.waits_at = [-1] * stages  # the queue that a rank waits at; -1: none
        self.waits_in = [-1] * stages  # the code of the receive in which a rank waits
        self.ready = deque(range(stages))
        self.ends = [0.0] * stages
        self.kept, self.whole = [0] * stages, [0] * stages
        self.spans: list[list[Span]] = [[] for _ in range(stages)]

    def report(self) -> Report:
        """Run all ranks to their ends."""
        schedule, times = self.schedule, self.times
        ranks = [self._rank(rank) for rank in range(schedule.stages)]
        while self.ready:
            rank = self.ready.popleft()
            self.waits_at[rank] = next(ranks[rank], -1)
        if any(queue >= 0 for queue in self.waits_at):
            self._refuse_deadlock()
        per_rank = times.forward if schedule.kind == FORWARD_ONLY else map(times.work, range(schedule.stages))
        busy = tuple(schedule.micro_batches * work for work in per_rank)
        spans = tuple(map(tuple, self.spans)) if self.record else ()
        return Report(max(self.ends), busy, tuple(self.kept), tuple(self.whole), spans)

    def _rank(self, rank: int) -> Iterator[int]:
        """Run the list of ``rank``; yields each queue that it waits at. The hot loop, so all that it uses is local."""
        schedule, queues, waits_at = self.schedule, self.queues, self.waits_at
        chunks, stages = schedule.chunks, schedule.stages
        rows = [row for chunk in range(chunks) for row in _rows(schedule, self.times, rank, chunk)]
        mask = [row.needs | row.sets if row.exists else 0 for row in rows]
        want = [row.needs if row.exists else -1 for row in rows]
        sets, keeps, wholes = [row.sets for row in rows], [row.keeps for row in rows], [row.whole for row in rows]
        seconds = [row.seconds for row in rows]
        period, first_message, alone = chunks << KIND_BITS, int(ActionKind.SEND_ACTIVATION), stages == 1 < chunks
        send_activation, send_gradient = int(ActionKind.SEND_ACTIVATION), int(ActionKind.SEND_GRADIENT)
        transfer = self.times.transfer[rank]
        # A message names the receiver's chunk, which differs from the sender's only where the pipeline wraps around.
        links = {send_activation: (2 * ((rank + 1) % stages), int(rank == stages - 1))}
        links[send_gradient] = 2 * ((rank - 1) % stages) + 1, -int(rank == 0)
        inbox = {int(ActionKind.RECEIVE_ACTIVATION): 2 * rank, int(ActionKind.RECEIVE_GRADIENT): 2 * rank + 1}
        done = bytearray(schedule.micro_batches * chunks)
        clock, kept, whole = 0.0, 0, 0
        for code in schedule.codes(rank):
            low, item, kind = code % period, code >> KIND_BITS, code & _KIND_MASK
            before = done[item]
            if before & mask[low] != want[low] or (alone and not _follows(done, item, kind, chunks)):
                self._refuse(rank, code, rows[low], before)
            done[item] = before | sets[low]
            if kind < first_message:
                if self.record:
                    self.spans[rank].append(Span(decode(code, chunks), clock, clock + seconds[low]))
                clock += seconds[low]
                kept += keeps[low]
                whole += wholes[low]
                if kept > self.kept[rank]:
                    self.kept[rank] = kept
                if whole > self.whole[rank]:
                    self.whole[rank] = whole
            elif kind in links:
                queue, turn = links[kind]
                queues[queue].append((item + turn, clock + transfer))
                if waits_at[queue >> 1] == queue:
                    waits_at[queue >> 1] = -1
                    self.ready.append(queue >> 1)
            else:
                queue = inbox[kind]
                if not queues[queue]:
                    self.waits_in[rank] = code
                    yield queue
                found, arrival = queues[queue].popleft()
                if found != item:
                    self._refuse_message(rank, code, found)
                if arrival > clock:
                    clock = arrival
        self.ends[rank] = clock
        self._check_complete(rank, rows, done)

    def _check_complete(self, rank: int, rows: list[_Row], done: bytearray) -> None:
        chunks, kinds = self.schedule.chunks, len(ActionKind)
        full = bytearray(chunks)
        for low, row in enumerate(rows):
            full[low // kinds] |= row.sets if row.exists else 0
        if done == full * self.schedule.micro_batches:
            return
        item = next(item for item, bits in enumerate(done) if bits != full[item % chunks])
        lacking = full[item % chunks] & ~done[item]
        what = _MEANING[lacking & -lacking]
        raise ScheduleError(
            f"rank {rank} ends without the {what} of {_name(item, chunks)}. "
            f"Remedy: put it into the list of rank {rank}; each micro-batch needs each action once."
        )

    def _refuse(self, rank: int, code: int, row: _Row, before: int) -> NoReturn:
        action, lacking = decode(code, self.schedule.chunks), row.needs & ~before
        if not row.exists:
            reason = f"cannot be done: this rank has no such action in a {self.schedule.kind} schedule"
            remedy = "take it out"
        elif before & row.sets:
            reason, remedy = "comes a second time", "let it come once"
        else:
            what = _MEANING[lacking & -lacking] if lacking else "same action of its neighbour chunk"
            reason, remedy = f"comes before the {what} that it needs", "put it behind that"
        raise ScheduleError(f"rank {rank}: {action} {reason}. Remedy: {remedy} in the list of rank {rank}.")

    def _refuse_message(self, rank: int, code: int, found: int) -> NoReturn:
        action = decode(code, self.schedule.chunks)
        sender = peer(action.kind, rank, self.schedule.stages)
        raise ScheduleError(
            f"rank {rank}: {action} finds {_name(found, self.schedule.chunks)}: rank {sender} did not send what is "
            f"expected before that. Remedy: let rank {sender} send, and rank {rank} receive, the same in the same order."
        )

    def _refuse_deadlock(self) -> NoReturn:
        """Raise ScheduleError. Every waiting rank waits for another waiting one, so the chain from any ends in a ring."""
        chunks, stages = self.schedule.chunks, self.schedule.stages
        chain = [next(rank for rank, queue in enumerate(self.waits_at) if queue >= 0)]
        while chain[-1] not in chain[:-1]:
            chain.append(peer(decode(self.waits_in[chain[-1]], chunks).kind, chain[-1], stages))
        ring = chain[chain.index(chain[-1]) : -1]
        waits = []
        for rank in ring[:_SHOWN_WAITS]:
            action = decode(self.waits_in[rank], chunks)
            never = "" if self._is_sent(rank, action) else ", which has no such send in its list"
            waits.append(f"rank {rank} waits in {action} for rank {peer(action.kind, rank, stages)}{never}")
        more = f"; and {len(ring) - _SHOWN_WAITS} more ranks" if len(ring) > _SHOWN_WAITS else ""
        raise ScheduleError(
            f"deadlock: {'; '.join(waits)}{more}. "
            f"Remedy: see that each of these messages is sent, and in one of the lists before the receive."
        )

    def _is_sent(self, rank: int, receive: Action) -> bool:
        """True if the sender's list has the send of what ``rank`` waits for."""
        sender = peer(receive.kind, rank, self.schedule.stages)
        if receive.kind == ActionKind.RECEIVE_ACTIVATION:
            send = Action(ActionKind.SEND_ACTIVATION, receive.micro_batch, receive.chunk - (rank == 0))
        else:
            send = Action(ActionKind.SEND_GRADIENT, receive.micro_batch, receive.chunk + (sender == 0))
        return encode(send, self.schedule.chunks) in self.schedule.codes(sender)


def _follows(done: bytearray, item: int, kind: int, chunks: int) -> bool:
    """True if the chunk before (in a backward: after) has done its part. For one rank, where no message tells this."""
    chunk = item % chunks
    if kind == ActionKind.FORWARD:
        return chunk == 0 or bool(done[item - 1] & _FORWARD)
    if kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
        return chunk == chunks - 1 or bool(done[item + 1] & _INPUT)
    return True


def _name(item: int, chunks: int) -> str:
    return f"micro-batch {item // chunks}, chunk {item % chunks}"
