"""Later: a tensor that is computed when something is done with it, so that other things can be done before.

[Note: beside the exchange]
A block with shared experts calls them on all its rows, before its other experts or after them, and adds up what both make.
Nothing in the block says that the one need not wait for the other. So both return a ``Later``. The first step of the spread
experts is made at once, and sends rows; they go on where the block needs what they make, or where the shared experts are
half-way. Shared experts that are called first are computed when the rows are on their way. So the block's own code runs as
it is, and rows travel beside what the shared experts compute, there and back.

Operations that only give another shape are put off, too. All others get the tensor that was computed, whatever they are:
no result depends on what is put off, and the order of the sums in backward does not either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import ModelError

Steps = Generator[None, None, torch.Tensor]  # a computation that is interrupted where others may go on
_SHAPES = (torch.Tensor.view, torch.Tensor.reshape)


class Later(torch.Tensor):
    """What ``steps`` return. The first of them is made at once. ``after``: what is computed before, if this is used."""

    @staticmethod
    def __new__(cls, steps: Steps, after: Sequence[Later] = ()) -> Later:
        # What is not seen by __torch_function__ finds nothing here, and fails.
        return torch.Tensor._make_subclass(cls, torch.empty(0, device="meta"))

    def __init__(self, steps: Steps, after: Sequence[Later] = ()) -> None:
        self._steps: Steps | None = steps
        self._after, self._made = after, torch.Tensor()
        self._runs = False
        self.go_on()

    def go_on(self) -> None:
        """Make the next step, unless it is being made, or all are."""
        if self._steps is None or self._runs:
            return
        self._runs = True
        try:
            next(self._steps)
        except StopIteration as last:
            self._steps, self._made = None, last.value
        finally:
            self._runs = False

    def finished(self) -> torch.Tensor:
        """The tensor."""
        for other in self._after:
            other.finished()
        self._after = ()
        while self._steps is not None:
            self.go_on()
        return self._made

    @property
    def is_open(self) -> bool:
        """True if steps are left, and none is being made."""
        return self._steps is not None and not self._runs

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SHAPES and isinstance(args[0], Later):
            return Later(_reshaped(func, args, kwargs or {}))
        args, kwargs = looked_at((args, kwargs or {}))
        return func(*args, **kwargs)


def _reshaped(func: Callable[..., torch.Tensor], args: Any, kwargs: Any) -> Steps:
    yield
    return func(*looked_at(args), **kwargs)


def looked_at(values: Any) -> Any:
    """``values``, a pytree, with what was put off."""
    return tree_map_only(Later, Later.finished, values)


def result_of(steps: Steps) -> torch.Tensor:
    """What ``steps`` return, without interruption."""
    while True:
        try:
            next(steps)
        except StopIteration as last:
            return last.value  # type: ignore[no-any-return]


class Shared:
    """Replaces ``module.forward``, of shared experts that the block may call before the spread ones.

    ``defers()`` says whether what the block does now is put off, and ``goes_on()`` whether rows are on their way already.
    """

    def __init__(self, module: nn.Module, defers: Callable[[], bool], goes_on: Callable[[], bool]) -> None:
        self._name, self._own, self._defers, self._goes_on = type(module).__name__, module.forward, defers, goes_on
        self._last: weakref.ref[Later] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self._own(*args, **kwargs)  # type: ignore[no-any-return]
        steps = self._steps(*tree_map_only(torch.Tensor, _joined, (args, kwargs)))
        if self._goes_on() or not self._defers():
            return result_of(steps)
        made = Later(steps)
        self._last = weakref.ref(made)
        return made

    def waiting(self) -> list[Later]:
        """What was put off, and not computed since."""
        last = None if self._last is None else self._last()
        return [last] if last is not None and last.is_open else []

    def _steps(self, args: Any, kwargs: Any) -> Steps:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and not x.is_inference()]
        versions = [x._version for x in given]
        yield
        if versions != [x._version for x in given]:
            raise ModelError(
                f"{self._name}, the shared experts of a block, were called with a tensor that the block has changed in "
                "place before it used what they return. Remedy: make a new tensor there (x = x * y in place of x *= y)."
            )
        return self._own(*args, **kwargs)  # type: ignore[no-any-return]


def _joined(x: torch.Tensor) -> torch.Tensor:
    """``x``, whose gradients are added up where it was given, whenever what it was given to is computed."""
    return x.view_as(x) if x.requires_grad else x
