"""The zero-bubble schedule: a list scheduler fills waiting times with weight gradients, as measured times suggest.

[Note: zero bubble]
A backward is split. The previous stage waits for the input gradient; the weight gradient can be computed at any later time
(Qi et al., 2023, arXiv 2401.10241). The scheduler plays the run from its start. A free rank takes a forward or an input
gradient, in turn if it could do both; otherwise a weight gradient; otherwise it waits. A micro-batch is kept from its
forward to its weight gradient, and a forward that would exceed the limit of kept micro-batches is not started. With the
limit of 1F1B's first rank, which is the number of stages, this finds the paper's ZB-H1; with one less than twice that, its
ZB-H2.

A list is only an order, and the best order for given times is often one that was found with simpler times: a rank that
looks no further than its next action is misled by small differences. So the run is played in several variants, all lists
are simulated with the real times, and the fastest is chosen; among equally fast ones, the one that keeps least. One of the
candidates is 1F1B with split backwards. It sends everything at least as early as 1F1B does, so the result is never slower
than 1F1B if the limit permits 1F1B.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from .actions import KIND_BITS, ActionKind, PipelineSchedule
from .simulate import simulate
from .times import Times

# A weight gradient is not started if an input gradient comes within this fraction of its time: another stage needs that.
_PATIENCE = 0.25
_ROUNDING = 1e-9  # relative to the longest time: two sums of the same times count as equal
_BUDGET_ACTIONS = 3_000_000  # over all variants, about 5 s; larger schedules are played in fewer variants
_FORWARD, _INPUT, _WEIGHT = ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT


def zero_bubble(stages: int, micro_batches: int, times: Times, limit: int | None = None) -> PipelineSchedule:
    """Return the fastest schedule found for ``times`` in which no rank keeps more than ``limit`` micro-batches.

    A micro-batch is kept from its forward to its weight gradient. The default is ``stages``, as many as the first rank of
    1F1B keeps.
    """
    times.check(stages)
    bound = min(stages if limit is None else limit, micro_batches)
    actions = 3 * stages * micro_batches
    variants = _variants(stages, times, bound)[: max(1, _BUDGET_ACTIONS // actions)]
    candidates: list[Callable[[int], Iterable[int]]] = [partial(_split_1f1b, stages, micro_batches, bound)]
    candidates += [_Play(variant, micro_batches, bound).lists().__getitem__ for variant in variants]
    schedules = [PipelineSchedule.from_computation("zero_bubble", stages, micro_batches, 1, codes) for codes in candidates]
    reports = [simulate(schedule, times) for schedule in schedules]
    enough = min(report.makespan for report in reports) * (1 + _ROUNDING)
    fastest = [index for index, report in enumerate(reports) if report.makespan <= enough]
    return schedules[min(fastest, key=lambda index: sum(reports[index].peak_whole))]


def _split_1f1b(stages: int, micro_batches: int, bound: int, rank: int) -> Iterator[int]:
    """1F1B with each weight gradient right after its input gradient."""
    ahead = min(stages - 1 - rank, bound - 1)
    for step in range(micro_batches + ahead):
        if step < micro_batches:
            yield step << KIND_BITS | _FORWARD
        if step >= ahead:
            yield step - ahead << KIND_BITS | _INPUT
            yield step - ahead << KIND_BITS | _WEIGHT


@dataclass(frozen=True)
class _Variant:
    """How to play. ``ahead``: for each rank, how many forwards it may be ahead of its input gradients."""

    times: Times
    ahead: tuple[int, ...]


def _variants(stages: int, times: Times, bound: int) -> list[_Variant]:
    """Return the variants that were best for random times, the most frequent winner first."""
    mean = [sum(part) / stages for part in (times.forward, times.input_gradient, times.weight_gradient)]
    equal, level = Times.make(stages), Times.make(stages, *mean)
    free = (bound,) * stages
    falling = tuple(-(-bound * (stages - rank) // stages) for rank in range(stages))  # as in 1F1B, one less for each rank
    pairs = ((equal, free), (level, falling), (times, free), (equal, falling), (times, falling), (level, free))
    return [_Variant(*pair) for pair in pairs]


class _Play:
    """Plays one variant. Micro-batches go in order, so three counters tell what a rank has done.

    ``arrived[kind][rank]``: when the message that the action needs arrives, for each micro-batch for which this is known.
    """

    def __init__(self, variant: _Variant, micro_batches: int, bound: int) -> None:
        times, stages = variant.times, len(variant.ahead)
        self.ahead, self.micro_batches, self.bound = variant.ahead, micro_batches, bound
        self.seconds = {_FORWARD: times.forward, _INPUT: times.input_gradient, _WEIGHT: times.weight_gradient}
        self.transfer = times.transfer
        self.rounding = _ROUNDING * max(max(part) for part in self.seconds.values())
        self.count = {kind: [0] * stages for kind in self.seconds}
        self.arrived: dict[ActionKind, list[list[float]]] = {
            kind: [[] for _ in range(stages)] for kind in (_FORWARD, _INPUT)
        }
        self.arrived[_FORWARD][0] = [0.0] * micro_batches
        self.waits = [False] * stages
        self.free_at = [0.0] * stages
        self.last = [_FORWARD] * stages  # the kind of the rank's last action that was not a weight gradient
        self.codes = [array("L") for _ in range(stages)]
        self.agenda = [(0.0, rank) for rank in range(stages)]  # a heap: when to look at a rank

    def lists(self) -> list[array[int]]:
        """Each rank's codes, without messages."""
        while self.agenda:
            now, rank = heappop(self.agenda)
            if now < self.free_at[rank]:
                continue
            kind, start = self._choose(rank, now)
            self.waits[rank] = kind is None
            if kind is not None:
                self._do(rank, kind, start)
            elif start < math.inf:
                heappush(self.agenda, (start, rank))
        return self.codes

    def _choose(self, rank: int, now: float) -> tuple[ActionKind | None, float]:
        """Return (what to start, when), or (None, when to look again); inf: when a message comes."""
        forwards, inputs, weights = (self.count[kind][rank] for kind in (_FORWARD, _INPUT, _WEIGHT))
        forward_at = input_at = math.inf
        room = forwards - weights < self.bound and forwards - inputs < self.ahead[rank]
        if room and forwards < len(self.arrived[_FORWARD][rank]):
            forward_at = self.arrived[_FORWARD][rank][forwards]
        if inputs < len(self.arrived[_INPUT][rank]):
            input_at = self.arrived[_INPUT][rank][inputs]
        soon = now + self.rounding
        if forward_at <= soon and (input_at > soon or self.last[rank] == _INPUT):
            return _FORWARD, max(now, forward_at)
        if input_at <= soon:
            return _INPUT, max(now, input_at)
        if weights < inputs and input_at > now + _PATIENCE * self.seconds[_WEIGHT][rank]:
            return _WEIGHT, now
        return None, min(forward_at, input_at)

    def _do(self, rank: int, kind: ActionKind, start: float) -> None:
        end = start + self.seconds[kind][rank]
        self.codes[rank].append(self.count[kind][rank] << KIND_BITS | kind)
        self.count[kind][rank] += 1
        self.free_at[rank] = end
        heappush(self.agenda, (end, rank))
        if kind == _WEIGHT:
            return
        self.last[rank] = kind
        neighbour, sort = (rank + 1, _FORWARD) if kind == _FORWARD else (rank - 1, _INPUT)
        if neighbour == len(self.codes):  # the last stage's loss: its own backward can begin
            self.arrived[_INPUT][rank].append(end)
        elif neighbour >= 0:
            arrival = end + self.transfer[rank]
            self.arrived[sort][neighbour].append(arrival)
            if self.waits[neighbour]:
                heappush(self.agenda, (arrival, neighbour))
