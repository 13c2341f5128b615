"""The order of units on which all ranks agree, and the trace of one pass along it. Pure data.

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

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class ExecutionTrace:
    """One pass along ``order``, an agreed list of units. It is None while there is none."""

    key: Hashable
    order: list[int] | None
    cursor: int = -1  # position of the unit in use
    issued: int = -1  # last position whose gather was issued
    recorded: list[int] = field(default_factory=list)  # units, in the order in which this rank needed them
    _current: int | None = None  # the unit in use
    _last: dict[int, int] = field(default_factory=dict)  # unit -> its last position in the order

    def __post_init__(self) -> None:
        self._last = {unit: position for position, unit in enumerate(self.order or [])}

    @property
    def with_gradients(self) -> bool:
        """Of a forward: whether it is recorded by autograd."""
        return bool(self.key[2])  # type: ignore[index]

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
        """The gather of the next unit that has none was issued, or was not needed."""
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
        """The unit under the cursor, if it does not come again after it."""
        assert self.order is not None
        unit = self.order[self.cursor]
        return unit if self._last[unit] == self.cursor else None


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
