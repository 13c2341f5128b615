"""Rows of a matrix that are enough: each value, or each pair of values of two settings, comes at least once.

``@pytest.mark.each_value`` or ``@pytest.mark.each_pair`` on a parametrized test makes all its other rows nightly. A row
that is asked for by name runs. ``by_day`` says of the values of one parameter which are not nightly.

A defect that needs three settings at once is rare (Kuhn, Wallace, Gallo: Software Fault Interactions, IEEE Transactions on
Software Engineering 30(6), 2004). The whole product costs many times as much as its pairs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = dict[str, Any]
STRENGTHS = {"each_value": 1, "each_pair": 2}


def enough(rows: Sequence[Mapping[str, Hashable]], strength: int) -> list[int]:
    """Which of ``rows`` have every combination of ``strength`` settings that comes in any of them, ascending.

    Greedy and deterministic: not always the fewest that there are.
    """
    places: dict[Any, int] = {}  # of each value of each setting; numbers are looked up faster
    numbers: dict[Any, int] = {}  # of the combinations; from 0
    masks: list[int] = []  # by row, its combinations as the bits of one number
    having: list[list[int]] = []  # by combination, the rows that have it
    for row, settings in enumerate(rows):
        mask = 0
        values = [places.setdefault(item, len(places)) for item in settings.items()]
        for choice in combinations(values, min(strength, len(values))):
            number = numbers.setdefault(choice, len(having))
            if number == len(having):
                having.append([])
            having[number].append(row)
            mask |= 1 << number
        masks.append(mask)
    missing, chosen = (1 << len(having)) - 1, []
    while missing:
        wanted = (missing & -missing).bit_length() - 1
        best = max(having[wanted], key=lambda row: (masks[row] & missing).bit_count())
        missing &= ~masks[best]
        chosen.append(best)
    return sorted(chosen)


def covering(values: Mapping[str, Sequence[Any]], strength: int = 2) -> list[Row]:
    """Rows of the product of ``values`` that are enough."""
    places = [dict(zip(values, row, strict=True)) for row in product(*(range(len(each)) for each in values.values()))]
    return [{key: values[key][place] for key, place in places[row].items()} for row in enough(places, strength)]


def by_day(values: Iterable[Any], *kept: Any) -> list[Any]:
    """``values`` for ``pytest.mark.parametrize``, a tuple for several parameters: those not in ``kept`` are nightly."""
    rows = list(values)
    if missing := [value for value in kept if value not in rows]:
        raise ValueError(f"{missing} are not among {rows}")
    marks = {True: (), False: pytest.mark.nightly}
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=marks[row in kept]) for row in rows]


def mark_nightly(items: Sequence[pytest.Item]) -> None:
    """Mark the rows of matrices among ``items`` that others cover, which are not nightly themselves."""
    matrices: dict[tuple[str, int], list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            continue
        for name, strength in STRENGTHS.items():
            if isinstance(item, pytest.Function) and item.get_closest_marker(name) is not None:
                matrices.setdefault((item.nodeid.partition("[")[0], strength), []).append(item)
    for (_, strength), rows in matrices.items():
        # Values are told apart as objects: they come from one list, and not all can be compared.
        kept = enough([{key: id(value) for key, value in row.callspec.params.items()} for row in rows], strength)
        for row in {*range(len(rows))} - {*kept}:
            rows[row].add_marker(pytest.mark.nightly)
