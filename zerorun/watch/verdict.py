"""The verdict on a job that stands still: who is waited for, and does not come.

[Note: who is guilty]
A rank that waits has an edge to each rank of its collective that is not in it. Whoever waits for nobody is at the end of
all edges: it has ended, is stopped, or computes. Where edges end nowhere, ranks wait for each other in a circle: they have
made their calls in different orders. A collective in which all are, and that is not over, is a matter of the link.
If ranks had different sizes for a collective, that is the cause, wherever they are now (collective_sizes.py).

That a rank computes for long is not a fault by itself. So a verdict of this kind is not ``certain``: the job goes on for a
while, in which the rank may come.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..log import counted, ranks_in_words
from .board import NUMBERS, OF_SCRIPT, OF_STAGES, RENDEZVOUS, Phase, Sight
from .collective_sizes import differing, remedy_of_early_end

SUSPECT_AFTER_S = 30.0  # unless "hang_timeout_s" says otherwise
_LONGER = 5  # times the longest wait of this kind so far
_SLOW = 20  # times as long, for what may take its time
_SLOW_PHASES = (Phase.START, Phase.INITIALIZE, Phase.SAVE, Phase.LOAD, Phase.WHOLE_WEIGHTS, Phase.COMPILE)
_FIRST_STEPS = 2
_MOST_FOLLOWED = 16  # of those who wait: each way takes as long as the collective has ranks
_END_AFTER_S = 600.0  # that a rank may compute while others wait, unless "hang_timeout_s" is given
_END_AFTER = 2  # times "hang_timeout_s"
_COMES_S = 2.0  # in which a rank whose collective is over has a core, and goes on
_MOST_PLACES = 4  # at which ranks are, that are told

_WORDS = {
    Phase.START: "at its start",
    Phase.SCRIPT: "in the script between calls of the engine",
    Phase.DATA: "waiting for data",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.UPDATE: "in step()",
    Phase.PIPELINE: "in train_batch() or eval_batch()",
    Phase.INITIALIZE: "in initialize()",
    Phase.SAVE: "saving",
    Phase.LOAD: "loading",
    Phase.WHOLE_WEIGHTS: "gathering whole weights",
    Phase.COMPILE: "compiling",
    Phase.LEFT: "at the end of its script",
}


@dataclass(frozen=True)
class Standing:
    """A rank that does not move. ``stopped``: its process is, as by SIGSTOP."""

    rank: int
    host: str | None
    quiet_s: float
    sight: Sight
    stopped: bool

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.host is None else f"rank {self.rank} on {self.host}"

    @property
    def waits(self) -> bool:
        """True if it waits for ranks."""
        return self.sight.waits

    @property
    def limit_s(self) -> float:
        return SUSPECT_AFTER_S if self.sight.limit_s is None else self.sight.limit_s

    @property
    def doing(self) -> str:
        """What it is at, in words."""
        return in_words(self.sight)


@dataclass(frozen=True)
class Ended:
    """A rank whose process has ended. If it had a board: micro-batches that it has seen, and what it told last.

    ``returncode``: None where only the program knows that has started it. ``ago_s``: for how long the end has been known.
    """

    rank: int
    returncode: int | None
    batches: int | None
    sight: Sight | None = None
    ago_s: float = math.inf


@dataclass(frozen=True)
class Hang:
    """``guilty``: the ranks that are waited for. ``text``: who, what, since when. ``cause``: one word.

    ``asked_for``: the script has made them wait, by a barrier of its own, say. ``others``: one rank of each other place
    where ranks are, if it takes the stacks of both to tell who should not be where it is.
    """

    cause: str
    guilty: tuple[int, ...]
    text: str
    certain: bool = True
    asked_for: bool = False
    others: tuple[int, ...] = ()

    def ends_job(self, standing: Mapping[int, Standing]) -> bool:
        """True if the job must not wait any longer. ``standing``: the ranks that do not move now."""
        if self.certain:
            return True
        limits = []
        for rank in self.guilty:
            one = standing[rank]
            if self.asked_for and one.sight.limit_s is None:  # torch's own time limit, which the script may set, ends it
                return False
            end = _END_AFTER_S if one.sight.limit_s is None else _END_AFTER * one.limit_s
            limits.append(one.quiet_s >= end * _slowness(one))
        return all(limits)


def judge(standing: Mapping[int, Standing], ended: Mapping[int, Ended], world_size: int) -> Hang | None:
    """Return the verdict; None while it may be that all is well."""
    late = [one for one in standing.values() if is_late(one)]
    late.sort(key=_waited, reverse=True)
    for one in late[:_MOST_FOLLOWED]:
        found = _follow(one, standing, ended, world_size)
        if found is not None:
            return _sizes(standing, ended) or found
    return None


def _sizes(standing: Mapping[int, Standing], ended: Mapping[int, Ended]) -> Hang | None:
    sights = {rank: one.sight for rank, one in ended.items() if one.sight is not None}
    found = differing({**sights, **{rank: one.sight for rank, one in standing.items()}})
    if found is None:
        return None
    text = found.text(lambda rank: standing[rank].name if rank in standing else f"rank {rank}")
    return Hang("sizes", found.guilty, text)


def is_late(one: Standing) -> bool:
    """True if it waits for ranks, and longer than it should."""
    return one.waits and bool(one.limit_s) and _waited(one) > _patience(one)


def _follow(first: Standing, standing: Mapping[int, Standing], ended: Mapping[int, Ended], world_size: int) -> Hang | None:
    trail = [first]
    while True:
        one = trail[-1]
        missing = [rank for rank in one.sight.ranks(world_size) if rank != one.rank and not _is_in(one, standing.get(rank))]
        gone = [ended[rank] for rank in missing if rank in ended and not _just_left(one, ended[rank])]
        if gone:
            return _ended(one, gone)
        if any(rank not in standing for rank in missing):  # it moves
            return None
        stuck = [standing[rank] for rank in missing]
        still = [other for other in stuck if not other.waits]
        if still:
            return _still(still, standing, world_size)
        if not stuck:
            return _link(one, standing, world_size)
        if stuck[0] in trail:
            return _circle(trail[trail.index(stuck[0]) :], standing)
        trail.append(stuck[0])


def _is_in(one: Standing, other: Standing | None) -> bool:
    """True if ``other`` has come to the collective in which ``one`` is.

    In messages of which a collective consists, each waits for another one.
    """
    if other is None or not other.waits:
        return False
    if other.sight.span != one.sight.span and not (one.sight.is_message or other.sight.is_message):
        return False  # groups of the script have one label
    ahead = (other.sight.number - one.sight.number) % NUMBERS
    return other.sight.label == one.sight.label and ahead < NUMBERS // 2


def _just_left(one: Standing, other: Ended) -> bool:
    """True if ``other`` may have done its part, and ``one`` has not come to a core since, as where all waited for long.

    If ``other`` has seen more micro-batches it most likely has.
    """
    ahead = other.batches is not None and other.batches > one.sight.batches
    return other.ago_s <= (one.limit_s if ahead else _COMES_S)


def _waited(one: Standing) -> float:
    """For how long it has waited. Time in which nobody looked, as while the whole job was frozen, is not quiet time."""
    return min(one.sight.wait_s or 0.0, one.quiet_s)


def _patience(one: Standing) -> float:
    return max(one.limit_s, _LONGER * one.sight.longest_s)


def _slowness(one: Standing) -> int:
    return _SLOW if one.sight.phase in _SLOW_PHASES or one.sight.step < _FIRST_STEPS else 1


def in_words(sight: Sight) -> str:
    """What a rank is at: ``in forward, at '3: all-gather'``."""
    at = "" if sight.wait_s is None else f", at '{sight.label}'"
    return f"{_WORDS[sight.phase]}{at}"


# -- words -----------------------------------------------------------------------------------------------------------


def _ended(one: Standing, gone: Sequence[Ended]) -> Hang:
    first = gone[0]
    others = f" (and {ranks_in_words([other.rank for other in gone[1:]])})" if len(gone) > 1 else ""
    after = "" if first.batches is None else f" after {first.batches} micro-batches"
    code = "" if first.returncode is None else f" with exit code {first.returncode}"
    text = (
        f"rank {first.rank}{others} has ended{code}{after}; "
        f"{one.name} has been waiting for it for {_waited(one):.0f} s, after {one.sight.batches}, at '{one.sight.label}'. "
    )
    broke_off = first.returncode is None and first.sight is not None and first.sight.phase != Phase.LEFT
    own = "Remedy: look at its own error; it did not come to the end of its script."
    remedy = own if broke_off else remedy_of_early_end(first.batches)
    return Hang("ended", tuple(other.rank for other in gone), text + remedy)


def _still(still: Sequence[Standing], standing: Mapping[int, Standing], world_size: int) -> Hang | None:
    stopped = [one for one in still if one.stopped]
    guilty = stopped or [one for one in still if one.limit_s and one.quiet_s > one.limit_s * _slowness(one)]
    if not guilty:
        return None
    first = guilty[0]
    more = f" (and {ranks_in_words([one.rank for one in guilty[1:]])})" if len(guilty) > 1 else ""
    what = "is stopped, by SIGSTOP or a debugger" if stopped else "does not move"
    waiting = [one for one in standing.values() if one.waits]
    near = [one for one in waiting if first.rank in one.sight.ranks(world_size)]
    waiter = min(near, key=lambda one: (len(one.sight.ranks(world_size)), -_waited(one)))  # in the smallest group
    group = sorted({waiter.rank, *waiter.sight.ranks(world_size)})
    between = "" if len(group) == world_size else f" between {ranks_in_words(group)}"
    text = (
        f"{first.name}{more} {what}: it has been {first.doing} for {first.quiet_s:.0f} s, after {_steps(first)}. "
        f"{_are(waiting)} waiting for it, {waiter.name} for {_waited(waiter):.0f} s at '{waiter.sight.label}'{between}."
    )
    cause = "stopped" if stopped else "data" if first.sight.phase == Phase.DATA else "busy"
    asked_for = all(one.sight.label.endswith(OF_SCRIPT) for one in waiting)
    return Hang(cause, tuple(one.rank for one in guilty), text, certain=bool(stopped), asked_for=asked_for)


def _circle(circle: Sequence[Standing], standing: Mapping[int, Standing]) -> Hang | None:
    if any(_waited(one) <= one.limit_s for one in circle):
        return None
    if all(one.sight.is_message and one.sight.label.startswith(OF_STAGES) for one in circle):
        return _messages(circle)
    if any(one.sight.label.startswith(RENDEZVOUS) for one in circle):
        return _unconnected(standing)
    places: dict[tuple[str, int, int], list[Standing]] = defaultdict(list)  # different calls may have one label
    for one in standing.values():
        if one.waits:
            places[one.sight.label, one.sight.number, one.sight.phase].append(one)
    groups = sorted(places.values(), key=_oddness)
    told = "; ".join(
        f"{ranks_in_words([one.rank for one in group])} {'is' if len(group) == 1 else 'are'} {group[0].doing}, "
        f"after {_steps(group[0])}"
        for group in groups[:_MOST_PLACES]
    )
    seconds = min(map(_waited, circle))
    text = (
        f"ranks have been waiting for each other for {seconds:.0f} s, in different collectives: {told}. "
        "Remedy: let all ranks make the same calls in the same order; what one rank does alone must not need the others."
    )
    others = tuple(group[0].rank for group in groups[1:_MOST_PLACES])
    return Hang("order", tuple(one.rank for one in groups[0]), text, others=others)


def _messages(circle: Sequence[Standing]) -> Hang:
    """Stages of a pipeline wait for messages of each other: whether they were sent, no board tells."""
    told = "; ".join(f"{one.name} is {one.doing}, after {_steps(one)}" for one in circle[:4])
    text = (
        f"ranks have been waiting for messages of each other for {min(map(_waited, circle)):.0f} s: {told}. "
        f"Either {_way_between(circle)} lets nothing through, or they make their calls in different orders. "
        "Remedy: try it with zerorun-report and the same hosts; let all ranks make the same calls in the same order."
    )
    return Hang("messages", tuple(sorted(one.rank for one in circle)), text)


def _unconnected(standing: Mapping[int, Standing]) -> Hang:
    """Some ranks are through the rendezvous, for they have connections to all: others have not."""
    waiting = [one for _, one in sorted(standing.items()) if one.waits]
    there = [one for one in waiting if one.sight.label.startswith(RENDEZVOUS)]
    through = [one.rank for one in waiting if not one.sight.label.startswith(RENDEZVOUS)]
    way = _way_between(there) if len(there) > 1 else f"the way between {there[0].name} and another rank"
    text = (
        f"{ranks_in_words([one.rank for one in there])} {'is' if len(there) == 1 else 'are'} still at "
        f"'{there[0].sight.label}', for {min(map(_waited, there)):.0f} s, and {ranks_in_words(through)} through it: "
        f"connections are missing, since {way} lets nothing through. Remedy: try it with zerorun-report and the same hosts."
    )
    return Hang("link", tuple(one.rank for one in there), text)


def _way_between(ranks: Sequence[Standing]) -> str:
    hosts = dict.fromkeys(one.host for one in ranks if one.host is not None)
    return f"the link between {' and '.join(list(hosts)[:4])}" if len(hosts) > 1 else "the way between them"


def _oddness(group: Sequence[Standing]) -> tuple[int, bool, bool]:
    """The least for the ranks that are where the others are not: few, and in what a rank may do alone by mistake."""
    sight = group[0].sight
    return len(group), sight.phase not in _SLOW_PHASES, not sight.label.endswith(OF_SCRIPT)


def _link(one: Standing, standing: Mapping[int, Standing], world_size: int) -> Hang | None:
    slow = _SLOW if not one.sight.longest_s else 1
    others = [standing[rank] for rank in one.sight.ranks(world_size) if rank != one.rank and rank in standing]
    everyone = sorted((one, *others), key=lambda other: other.rank)
    if min(map(_waited, everyone)) <= _patience(one) * slow:  # the last one may just have come
        return None
    text = (
        f"{ranks_in_words([other.rank for other in everyone])} are all at '{one.sight.label}', {one.name} for "
        f"{_waited(one):.0f} s, and it does not end: {_way_between(everyone)} lets nothing through. "
        "Remedy: try it with zerorun-report and the same hosts."
    )
    return Hang("link", tuple(other.rank for other in everyone), text)


def _steps(one: Standing) -> str:
    return f"{counted(one.sight.step, 'step')} (micro-batch {one.sight.batches})"


def _are(ranks: Sequence[Standing]) -> str:
    words = ranks_in_words([one.rank for one in ranks])
    return f"{words[0].upper()}{words[1:]} {'is' if len(ranks) == 1 else 'are'}"
