"""Borders: the loss scale that a gradient has inside an engine, and outside.

[Note: borders]
Inside an engine every gradient has the loss scale of that engine, once, on whatever way it has come. Outside it has that of
the backward that runs: 1 in a plain ``loss.backward()``, and an engine's own in ``engine.backward(loss)``. So each tensor
that enters or leaves an engine passes an identity whose backward multiplies by the quotient of both.

The script gets another tensor than the module has. A hook on the module's own tensor would see flows that never leave the
engine, too: those from a loss that the module returns to the logits that it also returns.

In a gradient of a gradient the flow goes the other way, and the backward of a passage is a passage in the other direction.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import torch

from .loss_scaler import LossScaler


class Border:
    """The border of one engine: see [Note: borders]."""

    scaling: ClassVar[weakref.WeakSet[Border]] = weakref.WeakSet()  # those of engines that scale losses

    def __init__(self, scaler: LossScaler, scale: Callable[[], float], outside: Callable[[], float]) -> None:
        """``scale`` returns the loss scale of ``scaler`` now; ``outside`` that of the backward that runs."""
        self._scaler, self._scale, self._outside = scaler, scale, outside
        self._note_scaling()

    def _note_scaling(self) -> None:
        if self._scaler.dynamic or self._scaler.scale != 1.0:
            self.scaling.add(self)

    def close(self) -> None:
        """The engine is no more."""
        self.scaling.discard(self)

    def inwards(self, value: Any) -> Any:
        """Return ``value``, which the script gives to the module, with tensors that have passed the border."""
        self._note_scaling()  # a checkpoint may have changed that
        return _Carrying(self, inwards=True).carried(value)

    def outwards(self, value: Any) -> Any:
        """Return ``value``, which the module gives to the script, with tensors that have passed the border."""
        return _Carrying(self, inwards=False).carried(value)

    def factor(self, *, inwards: bool) -> float:
        """By what a gradient that passes now is multiplied."""
        inside, outside = self._scale(), self._outside()
        return inside / outside if inwards else outside / inside


class _Passage(torch.autograd.Function):
    """``tensor * factor``. Its gradient passes the border in the other direction. Without a factor it copies nothing."""

    @staticmethod
    def forward(tensor: torch.Tensor, factor: float, border: Border, inwards: bool) -> torch.Tensor:
        return tensor.detach() if factor == 1.0 else tensor * factor  # no view, which the script could not write to

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        _, ctx.factor, ctx.border, ctx.inwards = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        factor = ctx.factor * ctx.border.factor(inwards=not ctx.inwards)
        if torch.is_grad_enabled():
            return _Passage.apply(grad, factor, ctx.border, not ctx.inwards), None, None, None
        return grad if factor == 1.0 else grad * factor, None, None, None


class _Carrying:
    """Carries what one call is given, or returns, over a border. What was the same object is the same again."""

    def __init__(self, border: Border, *, inwards: bool) -> None:
        self._border, self._inwards = border, inwards
        self._made: dict[int, tuple[Any, Any]] = {}

    def carried(self, value: Any) -> Any:
        """Return ``value`` with its tensors exchanged; itself if there are none with gradients in it."""
        if id(value) not in self._made:
            self._made[id(value)] = value, self._carry(value)
        return self._made[id(value)][1]

    def _carry(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _Passage.apply(value, 1.0, self._border, self._inwards) if value.requires_grad else value
        if isinstance(value, dict):
            return self._carry_items(value, value.items(), _set_item)
        if isinstance(value, list):
            return self._carry_items(value, enumerate(value), _set_item)
        if isinstance(value, tuple):
            items = [self.carried(item) for item in value]
            return _tuple_like(value, items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
        if is_dataclass(value) and not isinstance(value, type):
            found = ((item.name, getattr(value, item.name)) for item in fields(value))
            return self._carry_items(value, found, object.__setattr__)
        return value

    def _carry_items(self, container: Any, items: Any, put: Callable[[Any, Any, Any], None]) -> Any:
        changed = {key: carried for key, item in items if (carried := self.carried(item)) is not item}
        if not changed:
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
