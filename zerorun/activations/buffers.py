"""Buffers that a call changes, such as running statistics: they are to change once, although the call runs twice."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..log import warn_once
from .changed_in_place import version_of

_SMALL_BYTES = 1 << 16  # of a buffer that is copied in any case
# Whether a module has changed its buffers in a forward so far; modules that have not run yet are not there.
_changing: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Before:
    """The buffers of ``module`` before a call. ``copies``: of those that are small, or of all if it has changed any."""

    module: nn.Module
    tensors: dict[str, torch.Tensor | None]
    versions: dict[str, int]
    copies: dict[str, torch.Tensor]

    @property
    def is_past(self) -> bool:
        buffers = self.module._buffers
        if len(buffers) != len(self.tensors) or any(buffers.get(name) is not it for name, it in self.tensors.items()):
            return True
        return self.versions != _versions(self.tensors)

    @property
    def lost(self) -> list[str]:
        """The names of buffers that have been changed in place and were not copied."""
        now = _versions(self.tensors)
        return [name for name, version in self.versions.items() if name not in self.copies and version != now[name]]

    def again(self) -> dict[str, torch.Tensor | None]:
        """The buffers as they were, in tensors that a second run may change."""
        return {name: _copied(tensor) for name, tensor in {**self.tensors, **self.copies}.items()}


class BufferStates:
    """The buffers in ``roots``, the modules of a call, before its first run, which is about to begin.

    A second run finds those that the first one has changed as this had found them: with spectral norms its results depend
    on them. What it does to them is dropped. Large ones that do not change are copied once, to learn that; if they begin
    later, the second run of that one call finds them changed, and a warning says so. A module may get buffers at any time,
    also in the first run, and modules may be added, so that each call looks at all of them.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = _parts_of(roots)
        self._before = [_before(module) for module in dict.fromkeys(part for part in modules if part._buffers)]
        self._without = [module for module in modules if not module._buffers]

    def finish(self) -> None:
        """The first run is over."""
        new = dict.fromkeys(module for module in self._without if module._buffers)
        self._before += [_Before(module, {}, {}, {}) for module in new]
        self._without = []
        for before in self._before:
            _changing[before.module] = _changing.get(before.module, False) or before.is_past
        self._before = [before for before in self._before if before.is_past]
        for before in self._before:
            if lost := before.lost:
                warn_once(
                    f"{type(before.module).__name__} has begun to change its buffer {lost[0]!r} in place, which it left "
                    "alone before, and which is too large to be copied for nothing. A block that runs again in backward "
                    "finds it changed, so the gradients of this one micro-batch are not exact. Those of later ones are."
                )

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """While the call runs again."""
        now = [dict(before.module._buffers) for before in self._before]
        for before in self._before:
            _put(before.module, before.again())
        try:
            yield
        finally:
            for before, buffers in zip(self._before, now, strict=True):
                _put(before.module, buffers)


def _before(module: nn.Module) -> _Before:
    tensors, all_of_them = dict(module._buffers), _changing.get(module, True)
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    copies = {name: tensor.detach().clone() for name, tensor in present.items() if all_of_them or _is_small(tensor)}
    return _Before(module, tensors, _versions(tensors), copies)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL_BYTES


def _versions(tensors: dict[str, torch.Tensor | None]) -> dict[str, int]:
    return {name: version_of(tensor) for name, tensor in tensors.items() if tensor is not None}


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _put(module: nn.Module, buffers: dict[str, torch.Tensor | None]) -> None:
    """Let ``module`` have these buffers, and no others: code may ask whether it has one, and make it if it has not."""
    for name in module._buffers.keys() - buffers.keys():
        del module._buffers[name]
    module._buffers.update(buffers)


def _parts_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules in ``roots``, one that is in several places more than once.

    Every call needs them, and ``modules()``, which looks at each whether it was there before, takes several times as long.
    """
    found = list(roots)
    for module in found:  # which grows
        if module._modules:
            found += [part for part in module._modules.values() if part is not None]
    return found


def modules_of(function: Any) -> list[nn.Module]:
    """Return the modules that ``function`` is, or is a method of, or holds: partial arguments, variables around it."""
    while isinstance(function, functools.partial):
        function = function.func
    cells = getattr(function, "__closure__", None) or ()
    held = [function, getattr(function, "__self__", None), *(cell.cell_contents for cell in cells if _is_set(cell))]
    return [item for item in held if isinstance(item, nn.Module)]


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable without a value
        return False
