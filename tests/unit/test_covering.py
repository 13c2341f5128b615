"""Rows that are enough have every value, or every pair of values."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from covering import by_day, covering, enough

VALUES: dict[str, Any] = {"a": (1, 2, 3), "b": "xyz", "c": (True, False), "d": range(4)}


@pytest.mark.parametrize("strength", (1, 2, 3))
def test_every_combination_comes(strength: int) -> None:
    rows = covering(VALUES, strength)
    for keys in combinations(VALUES, strength):
        found = {tuple(row[key] for key in keys) for row in rows}
        assert found == set(product(*(VALUES[key] for key in keys)))
    assert rows == covering(VALUES, strength), "deterministic"


def test_rows_are_few() -> None:
    assert len(covering(VALUES, 1)) == 4
    assert len(covering(VALUES, 2)) < 3 * 4 + 6
    assert len(covering(VALUES, 4)) == len(covering(VALUES, 9)) == 3 * 3 * 2 * 4


def test_only_rows_that_there_are() -> None:
    rows = [{"stage": 3, "place": "disk"}, {"stage": 1, "place": "host"}, {"stage": 3, "place": "host"}]
    assert enough(rows, 2) == [0, 1, 2]
    assert enough(rows, 1) == [0, 1]
    assert enough([], 2) == []
    assert enough([{"only": 1}, {"only": 1}], 2) == [0]


def test_marked_tests_have_the_other_rows_at_night(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if item.name.startswith("test_a_matrix")]
    assert len(items) in (4, 15, 1)  # all of them at night, and 1 where it was asked for by name


def test_values_that_are_not_kept_are_nightly() -> None:
    rows = by_day("abc", "b")
    assert [row.values for row in rows] == [("a",), ("b",), ("c",)]
    assert [[mark.name for mark in row.marks] for row in rows] == [["nightly"], [], ["nightly"]]
    assert by_day([(1, "a"), (2, "b")], (2, "b"))[1].values == (2, "b")
    with pytest.raises(ValueError, match="x"):
        by_day("abc", "x")


@pytest.mark.each_value
@pytest.mark.parametrize("first", by_day(range(5), *range(4)))
@pytest.mark.parametrize("second", range(3))
def test_a_matrix(first: int, second: int) -> None:
    assert first in range(5)
    assert second in range(3)
