"""Loads: how many rows each expert got in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .dispatch import Dispatch

Loads = dict[str, list[int]]  # layer -> rows, by expert


class ExpertLoads:
    """The loads of a model's layers, as far as this rank has sent the rows."""

    def __init__(self, layers: Sequence[Dispatch]) -> None:
        self._layers = layers
        self.last: Loads = {}  # of the last step

    def end_step(self) -> None:
        """The step is over: what was counted is its load."""
        self.last = {layer.name: layer.take_loads() for layer in self._layers}


def added_up(found: Sequence[Mapping[str, list[int]]]) -> Loads:
    """The sum of the loads that ranks have counted."""
    total: Loads = {}
    for loads in found:
        for layer, rows in loads.items():
            known = total.setdefault(layer, [0] * len(rows))
            total[layer] = [one + other for one, other in zip(known, rows, strict=True)]
    return total
