"""Placement: which parts of a unit are kept in host memory or in a file instead of on the device. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Where a unit is kept. ``optimizer``: master, moments and reduced gradients are not on the device.

    ``params``: the parameter shard is not on the device. Both are in host memory then, except that ``states_on_disk`` puts
    master and moments in a file, and ``params_on_disk`` the shard.
    """

    optimizer: bool = False
    params: bool = False
    states_on_disk: bool = False
    params_on_disk: bool = False


ON_DEVICE = Placement()


def place_units(
    numels: Sequence[int], *, optimizer: bool, ratio: float, params: bool, states_on_disk: bool, params_on_disk: bool
) -> list[Placement]:
    """Return the placement of each unit. ``numels``: their trainable elements, the root unit first.

    ``ratio``: the share of the optimizer's elements that goes to the host. The rest stays on the device, and belongs to the
    first units: their gradients come last in a backward and their weights are needed first, so that their transfers are the
    hardest to hide. Units are not cut, so the share is accurate to half a unit.
    """
    stay, total, before = (1.0 - ratio) * sum(numels), sum(numels), 0
    placed = []
    for numel in numels:
        on_host = optimizer and (ratio == 1.0 or (ratio > 0.0 and total > 0 and before + numel / 2 >= stay))
        placed.append(Placement(on_host, params, on_host and states_on_disk, params_on_disk))
        before += numel
    return placed
