"""Replication: which ranks beyond the data-parallel ones hold the same parameter. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replication:
    """Of a parameter on one rank.

    ``sums``: axes beyond data parallelism over which its gradient is still to be summed, once for every step: each rank
    of them has the whole parameter and a summand of the gradient. ``counted``: this rank's elements count in the global
    gradient norm; of several ranks that have the same elements, one counts them.
    """

    sums: tuple[str, ...] = ()
    counted: bool = True


ALONE = Replication()
