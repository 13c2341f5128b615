"""Replication: which ranks beyond the data-parallel ones hold the same parameter. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replication:
    """The replication of one parameter, on one rank.

    ``sums``: axes beyond the data-parallel ones over which the gradient must still be summed, once per step: each rank
    along them holds the whole parameter and a summand of its gradient. ``counted``: this rank's elements count in the
    global gradient norm; only one of several ranks that hold the same elements counts them.
    """

    sums: tuple[str, ...] = ()
    counted: bool = True


ALONE = Replication()
