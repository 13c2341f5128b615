"""Replication: which ranks beyond the data-parallel ones hold the same parameter. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Family(Enum):
    """Which ranks have a parameter, and so divide its states and sum its gradients: see [Note: views] in mesh_places.py."""

    DENSE = "dense"  # those of the axis data
    EXPERT = "expert"  # those of the axis expert_data

    @property
    def shard_axis(self) -> str:
        """The axis of the ranks that divide its states."""
        return "shard" if self is Family.DENSE else "expert_shard"

    @property
    def replicate_axis(self) -> str:
        """The axis of the ranks that have the same states."""
        return "replicate" if self is Family.DENSE else "expert_replicate"


@dataclass(frozen=True)
class Replication:
    """The replication of one parameter, on one rank.

    ``sums``: axes beyond the data-parallel ones over which the gradient must still be summed, once per step: each rank
    along them holds the whole parameter and a summand of its gradient. ``counted``: this rank's elements count in the
    global gradient norm; only one of several ranks that hold the same elements counts them. ``copied``: tensor ranks hold
    the same elements. It is the same on all of them, so that all have the same flat groups in the same order, also the rank
    that counts. ``family``: the ranks over which it is summed before.
    """

    sums: tuple[str, ...] = ()
    counted: bool = True
    copied: bool = False
    family: Family = Family.DENSE


ALONE = Replication()
