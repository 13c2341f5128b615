"""Borders: the loss scale that a gradient has inside an engine, and outside.

[Note: borders]
Inside an engine every gradient has the loss scale of that engine, once, on whatever way it has come. Outside it has that of
the backward that runs: 1 in a plain ``loss.backward()``, and an engine's own in ``engine.backward(loss)``. So each tensor
that enters or leaves an engine passes an identity whose backward multiplies by the quotient of both.

The script gets another tensor than the module has. A hook on the module's own tensor would see flows that never leave the
engine, too: those from a loss that the module returns to the logits that it also returns.

What passes is found in the arguments and the output of the engine's call. A plain backward that comes to the weights by
another way is refused, as its gradients have no scale.

In a gradient of a gradient the flow goes the other way, and the backward of a passage is a passage in the other direction.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .loss_scaler import LossScaler
from .nested_containers import TreeMap


class Border:
    """The border of one engine: see [Note: borders]."""

    scaling: ClassVar[weakref.WeakSet[Border]] = weakref.WeakSet()  # those of engines that scale losses

    def __init__(
        self,
        scaler: LossScaler,
        scale: Callable[[], float],
        outside: Callable[[], float],
        entered: Callable[[], None],
    ) -> None:
        """``scale`` returns the loss scale of ``scaler`` now; ``outside`` that of the backward that runs.

        ``entered`` is called in a backward whose gradients pass into the engine.
        """
        self._scaler, self._scale, self._outside, self._entered = scaler, scale, outside, entered
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
        return self._carried(value, inwards=True)

    def outwards(self, value: Any) -> Any:
        """Return ``value``, which the module gives to the script, with tensors that have passed the border."""
        return self._carried(value, inwards=False)

    def _carried(self, value: Any, *, inwards: bool) -> Any:
        def carry(tensor: torch.Tensor) -> torch.Tensor:
            return _Passage.apply(tensor, 1.0, self, inwards) if tensor.requires_grad else tensor

        return TreeMap(torch.Tensor, carry).mapped(value)

    def factor(self, *, inwards: bool) -> float:
        """By what a gradient that passes now is multiplied."""
        inside, outside = self._scale(), self._outside()
        if inwards:
            self._entered()
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
