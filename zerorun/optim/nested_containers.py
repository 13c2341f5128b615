"""Containers that calls are given and return: dicts, lists, tuples, named ones too, and dataclasses, at any depth."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn


class TreeMap:
    """Puts ``function(item)`` in the place of each instance of ``kind``. What was the same object is the same again.

    Containers stay as they are: those in which something changes are copied. ``fresh``: all dicts and lists are, so that
    whoever gets them may write to them.
    """

    def __init__(self, kind: type, function: Callable[[Any], Any], *, fresh: bool = False) -> None:
        self._kind, self._function, self._fresh = kind, function, fresh
        self._made: dict[int, tuple[Any, Any]] = {}

    def mapped(self, value: Any) -> Any:
        """Return ``value`` with other things in it; itself if there is nothing to exchange."""
        if id(value) not in self._made:
            self._made[id(value)] = value, value  # it may contain itself
            self._made[id(value)] = value, self._map(value)
        return self._made[id(value)][1]

    def _map(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return self._function(value)
        if isinstance(value, (dict, UserDict)):
            return self._map_items(value, value.items(), _set_item, fresh=self._fresh)
        if isinstance(value, list):
            return self._map_items(value, enumerate(value), _set_item, fresh=self._fresh)
        if isinstance(value, tuple):
            items = [self.mapped(item) for item in value]
            return _tuple_like(value, items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
        if is_dataclass(value) and not isinstance(value, (type, nn.Module)):
            found = ((item.name, getattr(value, item.name)) for item in fields(value) if hasattr(value, item.name))
            return self._map_items(value, found, object.__setattr__, fresh=False)
        return value

    def _map_items(
        self, container: Any, items: Iterable[tuple[Any, Any]], put: Callable[[Any, Any, Any], None], *, fresh: bool
    ) -> Any:
        changed = {key: mapped for key, item in items if (mapped := self.mapped(item)) is not item}
        if not changed and not fresh:
            return container
        made = copy.copy(container)  # the module may go on with its own
        for key, item in changed.items():
            put(made, key, item)
        return made


def _set_item(container: Any, key: Any, item: Any) -> None:
    container[key] = item


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    kind: Any = type(value)
    if hasattr(kind, "n_sequence_fields"):  # what torch.max and its like return
        return kind(items)
    made = tuple.__new__(kind, items)
    if hasattr(value, "__dict__"):
        made.__dict__.update(vars(value))
    return made


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with all floating-point tensors in it cast to ``dtype``; itself if there are none in another."""
    return TreeMap(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor).mapped(value)
