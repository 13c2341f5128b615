"""Number checks: the problems of numbers that a user gives, by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from ..errors import ConfigProblem


def not_whole(numbers: Mapping[str, Any], least: int) -> Iterator[ConfigProblem]:
    """Yield a problem for each of ``numbers`` that is no whole number from ``least`` on. True is none."""
    for name, value in numbers.items():
        if type(value) is not int or value < least:
            yield ConfigProblem(name, value, f"is no whole number from {least} on.", "give one.")


def not_finite(numbers: Mapping[str, Any], *, may_be_0: bool) -> Iterator[ConfigProblem]:
    """Yield a problem for each of ``numbers`` that is no finite number above 0, or 0 if it may be."""
    for name, value in numbers.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
        if not is_number or value < 0 or not (value or may_be_0):
            yield ConfigProblem(name, value, f"is no finite number {'from 0 on' if may_be_0 else 'above 0'}.", "give one.")
