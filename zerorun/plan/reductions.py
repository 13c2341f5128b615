"""The order in which reductions begin and end. The runtime follows it, and plans use it to count buffers and calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from .sharding_plan import UnitPlan

# The most reductions in flight. Through gloo each has a receive buffer; with only one, ranks would wait for the slower.
MAX_REDUCING = 2


class HasGradSlot(Protocol):
    """A unit: ``grad_slot`` is the index of a slot that units share, or -1."""

    @property
    def grad_slot(self) -> int: ...


U = TypeVar("U", bound=HasGradSlot)


class Reductions(Generic[U]):
    """The reductions in flight, oldest first. ``start`` and ``finish`` do the work for one unit.

    ``vacate`` waits until the slot of a unit whose reduction has ended may be overwritten. ``go_on`` begins the next part
    of one that has several, as soon as the following one has begun: so that part, too, goes on behind the backward.
    Without ``overlap`` each reduction ends before anything else is done.
    """

    def __init__(
        self,
        start: Callable[[U], None],
        finish: Callable[[U], None],
        vacate: Callable[[U], None] = lambda unit: None,
        go_on: Callable[[U], None] = lambda unit: None,
        *,
        overlap: bool,
    ) -> None:
        self._start, self._finish, self._vacate, self._go_on, self._overlap = start, finish, vacate, go_on, overlap
        self._in_flight: deque[U] = deque()
        self._occupant: dict[int, U] = {}  # index of a shared slot -> the unit in it

    def free_slot(self, unit: U) -> None:
        """Hand its shared slot over to ``unit``, if it has one. End a reduction that is still in flight from the slot."""
        if unit.grad_slot < 0:
            return
        before = self._occupant.get(unit.grad_slot)
        if before is not None and before is not unit:
            self._end(before)
            self._vacate(before)
        self._occupant[unit.grad_slot] = unit

    def begin(self, unit: U) -> None:
        """Begin to reduce ``unit``. If too many reductions are in flight, end the oldest first."""
        while len(self._in_flight) >= MAX_REDUCING:
            self._end(self._in_flight[0])
        self._start(unit)
        for before in self._in_flight:
            self._go_on(before)
        self._in_flight.append(unit)
        if not self._overlap:
            self._end(unit)

    def end(self, of: U | None = None) -> None:
        """End all reductions in flight, or only those up to and including that of the unit ``of``."""
        while self._in_flight if of is None else of in self._in_flight:
            self._end(self._in_flight[0])

    def close(self) -> None:
        """Let go of all units. No reduction can follow."""
        self._in_flight.clear()
        self._occupant.clear()

    def _end(self, unit: U) -> None:
        if unit in self._in_flight:
            self._in_flight.remove(unit)
            self._finish(unit)


def reduce(unit: UnitPlan, reductions: Reductions[UnitPlan]) -> None:
    """Do what the runtime does with a unit's gradients when a backward that reduces leaves the unit."""
    if unit.grad_slot < 0:
        reductions.end(of=unit)
    if not unit.gradients_stay:
        reductions.free_slot(unit)
    reductions.begin(unit)
