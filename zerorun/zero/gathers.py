"""Gathers: which unit's parameters are gathered when, in an order on which all ranks agree.

Why ranks must agree, and how they come to it, is told in execution_trace.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable

import torch

from ..distributed.transport.communicator import Communicator
from ..errors import OrderError
from ..log import warn_once
from .execution_trace import ExecutionTrace, merge_orders
from .unit import SlotPool, Unit

# Seconds that a rank which left the agreed order waits for the others to ask as well.
ORDER_TIMEOUT_S = float(os.environ.get("ZERORUN_ORDER_TIMEOUT_S", "60"))
_END = -1


class Gathers:
    """The slots that units share for parameters, and the orders of units by kind of pass.

    All data-parallel ranks make the same calls, in the same order.
    """

    def __init__(self, units: list[Unit], slots: SlotPool, comm: Communicator) -> None:
        self.slots = slots
        self.phases = 0  # forwards and backwards that have begun
        self._units, self._comm = units, comm
        self._shares = any(not unit.resident for unit in units)
        self._orders: dict[Hashable, list[int] | None] = {}  # agreed, by kind of pass; None: cannot be agreed
        self._in_backward = False
        self._last_backward: ExecutionTrace | None = None

    # -- passes --------------------------------------------------------------------------------------------------

    def begin_forward(self, key: Hashable) -> ExecutionTrace:
        """The trace of a forward of the kind ``key``."""
        self.phases += 1
        return ExecutionTrace(key, self._orders.get(key))

    def begin_backward(self, passes: list[ExecutionTrace]) -> ExecutionTrace:
        """The trace of the backward of ``passes``: their orders, backwards."""
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
        """Take the steps that this rank had no need for: other ranks may be waiting in them."""
        if trace.order:
            self._advance(trace, len(trace.order) - 1, leave)
            self._leave(trace, leave)

    def agree_at_end(self, trace: ExecutionTrace) -> None:
        """At the end of a pass without an order: let all ranks come to it, and make one of what they needed."""
        if not self._shares or trace.order is not None:
            return
        while not self._ask(trace, None):
            pass
        self.evict_all()  # ranks may hold different units: start afresh
        universe = self._as_defined()
        self._agree(trace, universe[::-1] if self._in_backward else universe)

    def end_backward(self, trace: ExecutionTrace | None = None) -> None:
        """No backward is running any more. ``trace``: of the one that has come to its end."""
        self._in_backward = False
        self._last_backward = trace or self._last_backward

    def agree_on_backward(self) -> None:
        """Let the next backward of its kind follow the order that the last one had."""
        if self._last_backward is not None:
            self._agree(self._last_backward, self._as_defined()[::-1])

    def forward_order(self) -> list[Unit]:
        """The units in the order in which the next forward needs them, as far as is known; the root first."""
        orders = [order or [] for key, order in self._orders.items() if key[0] == "forward" and key[2]]  # type: ignore[index]
        indices = dict.fromkeys([0, *(index for order in orders for index in order), *self._as_defined()])
        return [self._units[index] for index in indices]

    def _as_defined(self) -> list[int]:
        """All units but the root, in the order in which the model defines them."""
        return [unit.index for unit in self._units if unit.index]

    # -- along the order -----------------------------------------------------------------------------------------

    def _advance(self, trace: ExecutionTrace, position: int, leave: Callable[[Unit], None] | None) -> None:
        """Take every step of the order up to ``position``: the same steps, in the same order, on every rank."""
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
        """Issue gathers from the cursor on, as far as slots are free, in the agreed order."""
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
        """Start to fill the slot of ``unit``, unless its bytes are there already."""
        if not unit.resident and not self.holds(unit):
            self._fill(unit, "for backward" if self._in_backward else "for forward")

    def _fill(self, unit: Unit, phase: str) -> None:
        self.evict(unit.param_slot)
        unit.start_gather(self._comm, phase)
        self.slots.occupant[unit.param_slot] = unit.index

    # -- slots ---------------------------------------------------------------------------------------------------

    def holds(self, unit: Unit) -> bool:
        """True if the shared slot of ``unit`` has its bytes."""
        return self.slots.occupant[unit.param_slot] == unit.index

    def evict(self, slot: int) -> None:
        """Nothing is in shared slot ``slot`` from here on. All ranks must do it at the same point."""
        occupant = self.slots.occupant[slot]
        if occupant is None:
            return
        unit = self._units[occupant]
        if self._in_backward:  # gradients that are there by now were made from its own weights
            for flat_group in unit.trainable:
                flat_group.set_late_aside()
        unit.finish_gather()
        unit.reshard()
        if not unit.plan.keeps_others:
            unit.let_go_of_others()
        self.slots.occupant[slot] = None

    def evict_all(self) -> None:
        """The same of all slots."""
        for slot in range(self.slots.count if self._shares else 0):
            self.evict(slot)

    # -- agreement -----------------------------------------------------------------------------------------------

    def _ask(self, trace: ExecutionTrace, unit: Unit | None) -> bool:
        """One round: tell which unit this rank needs next, and gather what any rank needs. True if all have ended."""
        need = unit.index if unit is not None else _END
        message = torch.tensor([self.phases, trace.issued, need], dtype=torch.int64)
        try:
            answers = [tuple(answer.tolist()) for answer in self._comm.control.data_gather(message, ORDER_TIMEOUT_S)]
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
        unit.updated()
        for flat_group in unit.flat_groups:  # other ranks need our shard; what we receive goes to scratch
            unit.gather_into(self._comm, flat_group, torch.empty_like(flat_group.full), "as asked").wait()

    def _agree(self, trace: ExecutionTrace, universe: list[int]) -> None:
        """Merge what the ranks needed into the order of this kind of pass."""
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
            f"rank {self._comm.topology.rank} reached {name!r} outside the order agreed for this pass ({trace.key}), and "
            f"other ranks did not within {ORDER_TIMEOUT_S:.0f} s: they run the model's units in another order or "
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
