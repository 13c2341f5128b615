"""Degrees: the numbers of ranks that fit others."""

from __future__ import annotations


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def degrees_for_experts(data: int, shard: int, tensor: int) -> list[int]:
    """Return the numbers of ranks over which experts can be spread, ascending.

    They are whole groups of ``tensor`` ranks, fill the ``data`` ranks of a stage, and cut the ``shard`` of these that
    divide the states evenly, or fill such groups.
    """
    fitting = [places for places in divisors(data) if shard % places == 0 or places % shard == 0]
    return sorted({1, *(tensor * places for places in fitting)})
