"""Gathers: which unit's parameters are gathered when, in an order on which all ranks agree.

[Note: the agreed order]
Ranks may run different subsets of the units (branches, experts, early exit) but a collective needs all of them. So no
rank ever decides on a collective from what is ready on it alone. There is one agreed list of units for every kind of
pass, and a rank that needs a unit goes along the list up to it, taking part in the collectives of all units it passes.

1. The first time a pass of some kind runs, there is no list. Ranks then ask one another before every gather which units
   are needed next, and gather those: any divergence is fine, nothing overlaps.
2. At its end they merge what they needed into one list (``merge_orders``). Units that nobody needed are inserted where
   the model defines them. If the ranks' orders contradict one another, they go on as in 1.
3. From then on the trace prefetches along the list. If a rank needs a unit that the rest of its list does not have, it asks
   as in 1 for the remainder of the pass. That works if all ranks leave the list together; if they do not, the question
   stays unanswered, and the rank raises an error that names the unit, the pass and itself.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ..distributed.device import on_host, synchronize
from ..distributed.transport.communicator import Communicator
from ..errors import OrderError, RankLeftError
from ..log import warn_once
from ..plan.step_collectives import LARGEST
from .unit import SlotPool, Unit, gather_for_others

# Seconds for which a rank that has left the agreed order waits for the others to ask as well; None: as for any collective.
# A shorter limit would end runs in which one rank takes a minute for its first batch.
ORDER_TIMEOUT_S = float(os.environ["ZERORUN_ORDER_TIMEOUT_S"]) if "ZERORUN_ORDER_TIMEOUT_S" in os.environ else None
IN_TIME = "in time" if ORDER_TIMEOUT_S is None else f"within {ORDER_TIMEOUT_S:.0f} s"
_END = -1


@dataclass
class ExecutionTrace:
    """One pass along ``order``, the agreed list of units; None as long as there is no agreement."""

    key: tuple[Hashable, ...]
    order: list[int] | None
    cursor: int = -1  # position of the unit in use
    issued: int = -1  # last position whose gather was issued
    recorded: list[int] = field(default_factory=list)  # units, in the order in which this rank needed them
    _current: int | None = None  # the unit in use
    _last: dict[int, int] = field(default_factory=dict)  # unit -> its last position in the order
    _end: weakref.ref[Callable[[], None]] | None = None  # see ``ends_by``

    def __post_init__(self) -> None:
        self._last = {unit: position for position, unit in enumerate(self.order or [])}

    @property
    def with_gradients(self) -> bool:
        """True if autograd records this forward."""
        return bool(self.key[2])

    def ends_by(self, end: Callable[[], None]) -> None:
        """Autograd refers to ``end``, and nobody else, until it calls it, or until the pass has failed."""
        self._end = weakref.ref(end)

    @property
    def has_failed(self) -> bool:
        """True if the pass has ended in an exception."""
        return self._end is not None and self._end() is None

    def enters(self, unit: int) -> bool:
        """``unit`` is needed. True if another one was in use; that is noted. ``has_entered`` must follow."""
        if self._current == unit:
            return False
        self.recorded.append(unit)
        return True

    def has_entered(self, unit: int) -> None:
        """``unit`` is in use."""
        self._current = unit

    def advance(self) -> None:
        """The next unit of the order is in use."""
        self.cursor += 1

    def issue(self) -> None:
        """The gather of the next unit was issued, or was not needed."""
        self.issued += 1

    def leave_order(self) -> None:
        """The rest of the pass has no order."""
        self.order = None

    def find(self, unit: int) -> int | None:
        """The next position of ``unit``, not before the cursor."""
        if self.order is None:
            return None
        try:
            return self.order.index(unit, max(self.cursor, 0))
        except ValueError:
            return None

    def left_for_good(self) -> int | None:
        """The unit at the cursor, if the rest of the order does not have it again."""
        assert self.order is not None
        unit = self.order[self.cursor]
        return unit if self._last[unit] == self.cursor else None


class Gathers:
    """The slots that units share for parameters, and the orders of units by kind of pass.

    All data-parallel ranks make the same calls, in the same order.
    """

    def __init__(self, units: list[Unit], slots: SlotPool, comm: Communicator) -> None:
        self.slots = slots
        self.phases = 0  # forwards and backwards that have begun
        self.updates = 0  # of the weights
        self._units, self._comm = units, comm
        self._in_fp8 = any(group.plan.float8 is not None for unit in units for group in unit.flat_groups)
        self._largest_at = -1  # the state of the shards whose largest magnitudes are known
        self._shares = any(not unit.resident for unit in units)
        self._orders: dict[tuple[Hashable, ...], list[int] | None] = {}  # agreed, by kind of pass; None: cannot be agreed
        self._in_backward = False
        self._last_backward: ExecutionTrace | None = None

    # -- passes --------------------------------------------------------------------------------------------------

    def begin_forward(self, key: tuple[Hashable, ...]) -> ExecutionTrace:
        """Begin a forward of the kind ``key`` and return its trace."""
        self.phases += 1
        return ExecutionTrace(key, self._orders.get(key))

    def begin_backward(self, passes: list[ExecutionTrace]) -> ExecutionTrace:
        """Begin the backward of ``passes`` and return its trace. It follows their orders in reverse."""
        self.phases += 1
        for trace in passes:
            if trace.key not in self._orders:
                self._agree(trace, self._as_defined())
        key = ("backward", *(trace.key for trace in passes))
        if key not in self._orders:
            forward = [self._orders[trace.key] for trace in reversed(passes)]
            agreed = all(order is not None for order in forward)
            self._orders[key] = [unit for order in forward for unit in reversed(order or [])] if agreed else None
        self._in_backward = True
        return ExecutionTrace(key, self._orders[key])

    def need(self, trace: ExecutionTrace, unit: Unit, leave: Callable[[Unit], None] | None) -> None:
        """``unit`` is needed now: go along the agreed order up to it, or ask the other ranks.

        ``leave`` is called, in a backward, with each unit that is left for good.
        """
        if trace.enters(unit.index):
            position = trace.find(unit.index)
            if position is not None:
                self._advance(trace, position, leave)
            elif self._shares:
                self._ask(trace, unit)
            trace.has_entered(unit.index)
        unit.unshard()

    def end_of_order(self, trace: ExecutionTrace, leave: Callable[[Unit], None] | None) -> None:
        """Walk the rest of the order, which this rank did not need: other ranks may be waiting there."""
        if trace.order:
            self._advance(trace, len(trace.order) - 1, leave)
            self._leave(trace, leave)

    def agree_at_end(self, trace: ExecutionTrace) -> None:
        """At the end of a pass without an order, wait for all ranks and merge what they needed into one."""
        if not self._shares or trace.order is not None:
            return
        while not self._ask(trace, None):
            pass
        self.evict_all()  # ranks may hold different units: start afresh
        universe = self._as_defined()
        self._agree(trace, universe[::-1] if self._in_backward else universe)

    def end_backward(self, trace: ExecutionTrace | None = None) -> None:
        """No backward is running any more. ``trace``: that of the backward, if it was completed."""
        self._in_backward = False
        self._last_backward = trace or self._last_backward

    def agree_on_backward(self) -> None:
        """Make the order of the last backward the agreed one for its kind."""
        if self._last_backward is not None:
            self._agree(self._last_backward, self._as_defined()[::-1])

    def forward_order(self) -> list[Unit]:
        """The units in the order in which the next forward needs them, as far as is known; the root first."""
        orders = [order or [] for key, order in self._orders.items() if key[0] == "forward" and key[2]]
        indices = dict.fromkeys([0, *(index for order in orders for index in order), *self._as_defined()])
        return [self._units[index] for index in indices]

    def _as_defined(self) -> list[int]:
        """All units but the root, in the order in which the model defines them."""
        return [unit.index for unit in self._units if unit.index]

    # -- along the order -----------------------------------------------------------------------------------------

    def _advance(self, trace: ExecutionTrace, position: int, leave: Callable[[Unit], None] | None) -> None:
        """Walk the order up to ``position``. Every rank takes the same steps in the same order."""
        while trace.cursor < position:
            if trace.cursor >= 0:
                self._leave(trace, leave)
            trace.advance()
            self._prefetch(trace)

    def _leave(self, trace: ExecutionTrace, leave: Callable[[Unit], None] | None) -> None:
        left = trace.left_for_good() if leave is not None else None
        if leave is not None and left is not None:
            leave(self._units[left])

    def _prefetch(self, trace: ExecutionTrace) -> None:
        """Issue gathers in the agreed order, from the cursor on, as long as slots are free."""
        assert trace.order is not None
        if not self._shares:
            return
        last = min(trace.cursor + self.slots.count - 1, len(trace.order) - 1)
        while trace.issued < last:
            unit = self._units[trace.order[trace.issued + 1]]
            waiting = trace.order[trace.cursor : trace.issued + 1]  # in use, or gathered for their turn
            if any(self._units[other].param_slot == unit.param_slot >= 0 and other != unit.index for other in waiting):
                return
            trace.issue()
            self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        """Start filling the slot of ``unit``, unless it has the unit's bytes already."""
        if not unit.resident and not self.holds(unit):
            self._fill(unit, "for backward" if self._in_backward else "for forward")

    def _look_at_weights(self) -> None:
        """Before a gather: if shards have changed, find the largest magnitudes for those that are gathered in fp8."""
        if self._in_fp8 and self._largest_at != self._comm.fences:
            share_largest(self._units, self._comm)
            self._largest_at = self._comm.fences

    def _fill(self, unit: Unit, phase: str) -> None:
        self._look_at_weights()
        self.evict(unit.param_slot)
        unit.start_gather(self._comm, phase)
        self.slots.occupant[unit.param_slot] = unit.index

    # -- slots ---------------------------------------------------------------------------------------------------

    def holds(self, unit: Unit) -> bool:
        """True if the shared slot of ``unit`` has its bytes."""
        return self.slots.occupant[unit.param_slot] == unit.index

    def evict(self, slot: int) -> None:
        """Empty the shared slot ``slot``. All ranks must do so at the same point of the order."""
        occupant = self.slots.occupant[slot]
        if occupant is None:
            return
        unit = self._units[occupant]
        if self._in_backward:  # gradients that exist now were computed from the unit's own weights
            for flat_group in unit.trainable:
                flat_group.set_late_aside()
        unit.finish_gather()
        unit.reshard()
        if not unit.plan.keeps_others:
            unit.let_go_of_others()
        self.slots.occupant[slot] = None

    def begin_anew(self) -> None:
        """The weights have other values now."""
        self.updates += 1
        self.evict_all()

    def evict_all(self) -> None:
        """Empty all shared slots."""
        for slot in range(self.slots.count if self._shares else 0):
            self.evict(slot)

    # -- agreement -----------------------------------------------------------------------------------------------

    def _ask(self, trace: ExecutionTrace, unit: Unit | None) -> bool:
        """One round: tell which unit this rank needs, and gather what any rank needs. True if all ranks have ended."""
        need = unit.index if unit is not None else _END
        message = torch.tensor([self.phases, trace.issued, need], dtype=torch.int64)
        try:
            answers = [tuple(answer.tolist()) for answer in self._comm.control.data_gather(message, ORDER_TIMEOUT_S)]
        except RankLeftError:
            raise
        except OrderError as error:
            raise OrderError(self._unanswered(trace, unit)) from error
        if len({(phase, issued) for phase, issued, _ in answers}) > 1:
            raise OrderError(self._different_positions(answers))
        trace.leave_order()
        for index in sorted({needed for *_, needed in answers} - {_END}):
            self._gather_for_some(self._units[index], needed_here=index == need)
        return all(needed == _END for *_, needed in answers)

    def _gather_for_some(self, unit: Unit, *, needed_here: bool) -> None:
        if unit.resident:
            return
        if needed_here:
            self._fill(unit, "as asked")
            return
        self._look_at_weights()
        gather_for_others(unit, self._comm, "as asked")

    def _agree(self, trace: ExecutionTrace, universe: list[int]) -> None:
        """Merge what the ranks needed into the agreed order for this kind of pass."""
        if trace.key in self._orders and self._orders[trace.key] is None:
            return
        merged = merge_orders(self._comm.control.data_values(trace.recorded), universe)
        if merged is None:
            warn_once(
                "ranks run their units in contradictory orders: results are right, but nothing is prefetched, and "
                "ranks ask one another before every gather."
            )
        self._orders[trace.key] = merged

    def _unanswered(self, trace: ExecutionTrace, unit: Unit | None) -> str:
        name = unit.name if unit is not None else "the end of the pass"
        return (
            f"rank {self._comm.topology.rank} reached {name!r} outside the order agreed for this {trace.key[0]}, and "
            f"other ranks did not {IN_TIME}: they run the model's units in another order or "
            "another number of times. Remedy: call the model equally often on all ranks. If some ranks take a "
            "branch that none has taken before, let all take it in the first step, or define its modules in the order "
            "that they run in, or make the modules that differ one unit (zero_optimization.unit_policy with the class name "
            "of the module around them)."
        )

    def _different_positions(self, answers: list[tuple[int, ...]]) -> str:
        rank = next(rank for rank, answer in enumerate(answers) if answer[:2] != answers[0][:2])

        def where(phase: int, issued: int, need: int) -> str:
            unit = self._units[need].name if need >= 0 else "none"
            return f"forward or backward number {phase}, after {issued + 1} units of its plan, needing unit {unit!r}"

        return (
            f"rank 0 is in {where(*answers[0])}, but rank {rank} in {where(*answers[rank])}. "
            "Remedy: call the model and backward equally often, and its units in the same order, on all ranks."
        )


def renew(gathers: Gathers, unit: Unit, trace: ExecutionTrace | None) -> None:
    """The shards of ``unit`` have other values. Its shared slot gets them if ``trace`` is running, and is emptied if None.

    A pass counts on what was gathered before: the unit may be running, or have been gathered for its turn. All
    data-parallel ranks must call it.
    """
    if unit.resident:
        return
    held, was_whole = gathers.holds(unit), unit.unsharded
    anywhere = held
    if trace is not None and trace.order is None:  # ranks may have gathered different units
        anywhere = any(map(int, gathers._comm.control.data_gather(torch.tensor([int(held)]))))
    if held:
        gathers.evict(unit.param_slot)
    if trace is not None and anywhere:
        gathers._gather_for_some(unit, needed_here=held)
        if was_whole:
            unit.unshard()


# -- orders, as pure data ----------------------------------------------------------------------------------------


def merge_orders(orders: Sequence[Sequence[int]], universe: Sequence[int]) -> list[int] | None:
    """One list that has every rank's order as a subsequence, or None if they contradict one another.

    ``universe``: all units in the order of their definition (reversed for a backward); those that no rank needed are
    inserted after their nearest predecessor that some rank did. A unit may come twice only if all ranks agree entirely.
    """
    distinct = {tuple(order) for order in orders}
    repeats = any(len(set(order)) < len(order) for order in distinct)
    if len(distinct) == 1:
        merged = list(next(iter(distinct)))
    elif repeats:
        return None
    else:
        found = _topological(distinct, universe)
        if found is None:
            return None
        merged = found
    return merged if repeats else _insert_missing(merged, universe)


def _topological(orders: set[tuple[int, ...]], universe: Sequence[int]) -> list[int] | None:
    rank_of = {unit: position for position, unit in enumerate(universe)}
    waiting = {unit: set[int]() for order in orders for unit in order}
    for order in orders:
        for before, after in pairwise(order):
            waiting[after].add(before)
    merged: list[int] = []
    while waiting:
        ready = [unit for unit, before in waiting.items() if not before]
        if not ready:
            return None
        chosen = min(ready, key=lambda unit: rank_of[unit])
        merged.append(chosen)
        del waiting[chosen]
        for earlier in waiting.values():
            earlier.discard(chosen)
    return merged


def _insert_missing(merged: list[int], universe: Sequence[int]) -> list[int]:
    result, present = list(merged), set(merged)
    previous: int | None = None
    for unit in universe:
        if unit not in present:
            result.insert(0 if previous is None else result.index(previous) + 1, unit)
            present.add(unit)
        previous = unit
    return result


def gathers(recorded: Sequence[int], slot_of: Sequence[int], occupants: list[int | None]) -> list[int]:
    """The units that have to be gathered in a pass along ``recorded``. Changes ``occupants``, the units in the slots."""
    needed = []
    for unit in recorded:
        slot = slot_of[unit]
        if slot >= 0 and occupants[slot] != unit:
            occupants[slot] = unit
            needed.append(unit)
    return needed


def share_largest(units: Sequence[Unit], comm: Communicator) -> None:
    """Let the flat groups of ``units`` that are gathered in fp8 know the largest magnitude in each of their weights.

    It is one message for all weights. Updates in the background are waited for. All ranks of the shard axis must call it.
    """
    coded = [unit for unit in units if any(group.plan.float8 is not None for group in unit.flat_groups)]
    for unit in coded:
        unit.updated()
    groups = [group for unit in coded for group in unit.flat_groups if group.plan.float8 is not None]
    counts, ranks = [len(group.params) for group in groups], comm.topology.shard
    mine, table = (torch.empty(size * sum(counts), device=comm.device) for size in (1, ranks))
    for group, own in zip(groups, mine.split(counts), strict=True):
        own.copy_(group.largest_here())
    comm.dense.shard.all_gather(table, range(0, table.numel() + 1, mine.numel()), LARGEST, mine, until_given=True).wait()
    largest = table.view(ranks, -1).amax(0)
    if any(on_host(group.shard) for group in groups) and not on_host(comm.device):
        synchronize(comm.device)  # their codes are made on the host
    for group, own in zip(groups, largest.split(counts), strict=True):
        group.take_largest(own)
