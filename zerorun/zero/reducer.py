"""The reducer: gradients on their way from where autograd leaves them to the reduced shards.

[Note: complete, late, deferred]
A unit's gradients are *complete* when the backward has left it: then they are collected, and reduced if this backward
reduces. Gradients that come even later stay on the parameter. They are found at the end of the backward, are *late*, and
are reduced before the step, on all ranks. A unit that is late again is from then on *deferred* to the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from ..distributed.transport.communicator import Communicator
from ..distributed.transport.quantised_sum import GradientCodes
from ..distributed.transport.statistics import Pending
from ..errors import ModelError, OrderError
from ..plan.reductions import Reductions
from ..plan.sharding_plan import ShardingPlan
from .placeholders import released_parameter
from .unit import Unit


class Backwards(Protocol):
    """Who counts the backwards of a step, and is told of them."""

    def reduces_now(self) -> bool:
        """Asked when a backward begins: whether accumulated gradients may be reduced in it."""
        ...

    def inspect(self, unit: Unit) -> None:
        """Called for each unit before its gradients are collected."""
        ...

    def ended(self, *, late: bool = False) -> None:
        """Called when a backward is over. ``late``: gradients came after their unit was inspected."""
        ...


class Reducer:
    """The reductions of one engine. All data-parallel ranks make the same calls in the same order."""

    def __init__(
        self, plan: ShardingPlan, units: list[Unit], comm: Communicator, backwards: Backwards, coding: GradientCodes
    ) -> None:
        self.late: set[int] = set()  # units whose gradients came after their turn
        self._units, self._comm, self._backwards, self._coding = units, comm, backwards, coding
        self._shares_slots = plan.shares_grads
        # At stage 0 every rank updates everything, so reduced gradients are gathered on all ranks.
        self._gathers_reduced = not plan.policy.shard_optimizer and plan.topology.shard > 1
        self._gathering: list[Pending] = []
        self._reduces = False  # in this backward
        self._is_last = False  # no other backward comes before the step, as far as is known
        self._used: set[int] = set()  # units with a forward since the last step
        self._watches = False  # in this backward: gradients come for units that are needed
        self._expected: set[int] = set()  # those units
        self._completed: set[int] = set()  # units, in this backward
        self._late_before: set[int] = set()
        self._reductions = Reductions(self._start, self._finish, Unit.vacate, Unit.go_on_reducing, overlap=plan.overlap)

    @contextmanager
    def counted_by(self, backwards: Backwards) -> Iterator[None]:
        """``backwards`` is asked about the backwards inside, and told of them."""
        before, self._backwards = self._backwards, backwards
        try:
            yield
        finally:
            self._backwards = before

    def forget_residuals(self) -> None:
        """Forget what rounding has left out of sums so far: it belongs to other weights."""
        self._coding.forget_residuals()

    def residuals(self) -> dict[str, torch.Tensor]:
        """What rounding has left out of this rank's sums so far, by a name that says whose and of which sums it is."""
        return {name: self._coding.settled(residual) for name, residual in self._own_residuals()}

    def residual_places(self) -> dict[str, torch.Tensor]:
        """The memory of residuals, by the same names. See ``go_on_with_residuals``."""
        return dict(self._own_residuals())

    def go_on_with_residuals(self) -> None:
        """The memory of all residuals has been filled with those that sums are to go on with."""
        self._coding.go_on_with(residual for _, residual in self._own_residuals())

    def _own_residuals(self) -> Iterator[tuple[str, torch.Tensor]]:
        hops = ", ".join(f"{hop.size} x {hop.parts} by {hop.stride}" for hop in self._coding.hops)
        for unit in self._units:
            for number, flat_group in enumerate(unit.trainable):
                if flat_group.residual is not None:
                    yield f"rank {self._comm.topology.rank}: {unit.name} {number} ({hops})", flat_group.residual

    def use(self, unit: Unit, *, in_backward: bool) -> None:
        """``unit`` is needed: gradients may come for it, and in a backward not before."""
        self._used.add(unit.index)
        if in_backward and unit.index not in self._expected:
            self._refuse_stray(unit)
            self._expected.add(unit.index)

    # -- in a backward -------------------------------------------------------------------------------------------

    def begin(self, *, watches: bool) -> None:
        """A backward begins: no gradients are complete. Find out whether they are to be reduced in it.

        ``watches``: gradients come for units that are needed, and those that are there are from before.
        """
        self._watches = watches
        self._expected.clear()
        for unit in self._units if watches else ():
            if not unit.resident:
                self._refuse_placeholder(unit)
                for flat_group in unit.trainable:
                    flat_group.set_late_aside()
        self._is_last = self._backwards.reduces_now()
        self._reduces = self._shares_slots or self._is_last
        self._completed.clear()

    def leave(self, unit: Unit) -> None:
        """The backward has left ``unit`` for good."""
        if unit.trainable and not unit.deferred and unit.index not in self._completed:
            self._complete(unit)

    def complete(self, units: Iterable[Unit]) -> None:
        """The backward is over: complete those of ``units`` whose turn has not come."""
        for unit in units:
            if unit.trainable and unit.index not in self._completed:
                self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """Collect the gradients of ``unit`` and, where this backward reduces, start their reduction."""
        self._refuse_stray(unit)
        self._completed.add(unit.index)
        if unit.grad_slot < 0 and any(flat_group.reduced for flat_group in unit.trainable):
            self.finish(of=unit)
        self._backwards.inspect(unit)
        if not (self._reduces and unit.take_loose()):
            self._reductions.free_slot(unit)
            unit.accumulate()
        if self._reduces:
            self._reductions.begin(unit)

    def _start(self, unit: Unit) -> None:
        unit.start_reduce(self._comm, self._coding, final=self._is_last)

    def _finish(self, unit: Unit) -> None:
        unit.finish_reduce()
        for flat_group in unit.trainable if self._gathers_reduced else ():
            label = f"{unit.name}: all-gather gradients"
            shard = self._comm.of(flat_group.plan.family).shard
            self._gathering.append(shard.all_gather(flat_group.grad_full, flat_group.layout.bounds, label))

    def end(self, *, held: bool, in_slot: Callable[[Unit], bool]) -> None:
        """The backward is over; look for gradients that are late. ``held``: they are not complete yet.

        ``in_slot``: whether a unit that shares slots still has its own.
        """
        late = [unit for unit in self._units if unit.has_gradient()]
        for unit in late:
            if not (held or unit.resident or in_slot(unit)):
                _refuse_lost_slot(unit)
            for flat_group in unit.trainable:
                flat_group.set_late_aside()
        self.late = set() if held else {unit.index for unit in late}
        self._backwards.ended(late=bool(self.late))

    def _refuse_stray(self, unit: Unit) -> None:
        """Raise if a unit that shares slots has a gradient, and was not unsharded for it."""
        if unit.resident:
            return
        self._refuse_placeholder(unit)
        if self._watches and unit.index not in self._expected and (names := unit.names_with_gradient()):
            raise ModelError(
                f"parameter {names[0]!r} got a gradient while the weights of its unit {unit.name!r} were not on this rank: "
                "the loss depends on something that the unit's forward has neither returned, nor put into its arguments, "
                "nor kept as an attribute of its modules; or the forward ran under torch.vmap. Remedy: let it return that, "
                "or use stage 2."
            )

    def _refuse_placeholder(self, unit: Unit) -> None:
        """Raise if a unit that was never unsharded has a gradient: a script has used its placeholder."""
        if unit.index not in self._used and (names := unit.names_with_gradient()):
            raise released_parameter(names[0], unit.name)

    # -- before a step -------------------------------------------------------------------------------------------

    def reduce_accumulated(self) -> None:
        """Reduce what backwards accumulated without reducing it, because the boundary was not known yet."""
        for unit in reversed(self._units):
            if any(flat_group.accumulated for flat_group in unit.trainable):
                self._reductions.begin(unit)
        self.finish()

    def finish(self, of: Unit | None = None) -> None:
        """Wait for all reductions in flight, or until that of one unit is done."""
        self._reductions.end(of)
        for pending in self._gathering:
            pending.wait()
        self._gathering.clear()

    def close(self) -> None:
        """Let go of all units. No backward can follow."""
        self._reductions.close()

    def reduce_late(self) -> None:
        """Reduce the gradients that came late on any rank. A unit that is late again waits for the end of the backward."""
        for index in sorted(set().union(*self._comm.control.data_values(self.late))):
            unit = self._units[index]
            if index in self._late_before:
                unit.defer()
            self._late_before.add(index)
            self._reductions.free_slot(unit)
            unit.accumulate()
            self._reductions.begin(unit)
        self.finish()
        self.late.clear()

    def look_for_late(self) -> None:
        """Find out which gradients are late: those of another kind have come into the place of those that were."""
        self.late = {unit.index for unit in self._units if unit.has_gradient()}

    def forget(self) -> None:
        """After a step: nothing is outstanding."""
        self._used.clear()
        self.late.clear()


def _refuse_lost_slot(unit: Unit) -> None:
    """Raise if a gradient came after its unit's slot was given away: it may be computed from another unit's weights."""
    names = unit.names_with_gradient()
    if names:
        raise OrderError(
            f"a gradient of parameter {names[0]!r} came when its unit {unit.name!r} had been left: the backward "
            "goes back and forth between units. Remedy: name the module around both units in "
            "zero_optimization.unit_policy, or use stage 2."
        )
