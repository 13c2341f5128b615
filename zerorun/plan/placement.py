"""Placement: what of a unit lies in host memory or in a file instead of on the device. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """``optimizer``: master, moments and reduced gradients are not on the device. ``params``: the shard is not.

    They are in host memory then; ``states_on_disk``: master and moments in a file; ``params_on_disk``: the shard.
    """

    optimizer: bool = False
    params: bool = False
    states_on_disk: bool = False
    params_on_disk: bool = False


ON_DEVICE = Placement()


def place_units(
    numels: Sequence[int], *, optimizer: bool, ratio: float, params: bool, states_on_disk: bool, params_on_disk: bool
) -> list[Placement]:
    """The placement of each unit, of ``numels`` trainable elements, the root first.

    ``ratio``: share of the optimizer's elements that goes to the host. The rest stays with the first units: their gradients
    come last in a backward, and their weights are needed first, so that hiding them is hardest. A unit is not cut, so the
    share is met to half of a unit.
    """
    stay, total, before = (1.0 - ratio) * sum(numels), sum(numels), 0
    placed = []
    for numel in numels:
        on_host = optimizer and (ratio == 1.0 or (ratio > 0.0 and total > 0 and before + numel / 2 >= stay))
        placed.append(Placement(on_host, params, on_host and states_on_disk, params_on_disk))
        before += numel
    return placed
