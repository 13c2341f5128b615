"""The order of units that ranks agree on: merged from theirs, and what is said where it cannot be kept."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerorun.errors import OrderError
from zerorun.zero.gathers import merge_orders
from zerorun.zero.reducer import Reducer


@pytest.mark.parametrize(
    ("orders", "universe", "merged"),
    [
        ([[1, 2, 3]] * 3, [1, 2, 3], [1, 2, 3]),
        ([[3, 1, 2]], [1, 2, 3], [3, 1, 2]),
        ([[1, 2], [1, 3]], [1, 2, 3], [1, 2, 3]),  # of units that ranks do not compare, that which is defined first
        ([[1, 3], [1, 2]], [3, 2, 1], [1, 3, 2]),  # a backward
        ([[1, 2, 5], [1, 4, 5]], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),  # nobody visited 3: after its predecessor
        ([[2, 1, 4]], [1, 2, 3, 4], [2, 3, 1, 4]),
        ([[3]], [1, 2, 3], [1, 2, 3]),  # 1 has no predecessor
        ([[], []], [1, 2], [1, 2]),
        ([[1, 2], [2, 1]], [1, 2], None),
        ([[1, 2], [2, 3], [3, 1]], [1, 2, 3], None),
        ([[1, 2, 1]] * 2, [1, 2, 3], [1, 2, 1]),  # a unit that comes twice: all ranks agree entirely
        ([[1, 2, 1], [1, 2]], [1, 2], None),
    ],
)
def test_orders_by_hand(orders: Sequence[Sequence[int]], universe: Sequence[int], merged: list[int] | None) -> None:
    assert merge_orders(orders, universe) == merged


@given(st.lists(st.sets(st.integers(1, 9)), min_size=1, max_size=4), st.permutations(range(1, 10)))
def test_every_order_is_a_part_of_the_merged_one(visited: list[set[int]], universe: list[int]) -> None:
    """Ranks that go through one model in one direction, each of them through some of its units, always agree."""
    orders = [[unit for unit in universe if unit in units] for units in visited]
    assert merge_orders(orders, universe) == universe


def test_a_gradient_that_comes_too_late_says_which_stage_would_do() -> None:
    """Up to stage 2 units keep their weights, so that the message cannot come there."""
    unit = SimpleNamespace(index=1, name="block", resident=False, param_slot=0)
    unit.names_with_gradient, unit.has_gradient, unit.trainable = (lambda: ["block.weight"]), (lambda: True), []
    reducer: Any = SimpleNamespace(_units=[unit], _backwards=SimpleNamespace(ended=lambda late: None), late=set())
    with pytest.raises(OrderError, match=r"gradient of parameter 'block\.weight' .* unit 'block' .* or use stage 2\."):
        Reducer.end(reducer, held=False, in_slot=lambda unit: False)
    Reducer.end(reducer, held=True, in_slot=lambda unit: False)
    Reducer.end(reducer, held=False, in_slot=lambda unit: True)
    reducer._units = [SimpleNamespace(**{**vars(unit), "resident": True})]
    Reducer.end(reducer, held=False, in_slot=lambda unit: False)
