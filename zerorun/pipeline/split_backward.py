"""Split backward: linear layers whose weight gradients are computed later than the gradients of their inputs.

The previous stage waits for the gradient of the activations that it sent, not for gradients of weights. So a schedule may
put weight gradients off until nothing more urgent is left (Qi et al. 2023, arXiv:2401.10241). What a linear layer needs for
its weight gradient, its input and the gradient of its output, is kept until the job in ``WeightGradients`` that computes it
has run. All other layers compute their weight gradients together with those of their inputs. So does one whose weight has
hooks of the script, which autograd calls with the gradient, or is computed from other parameters, as in pruning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class WeightGradients:
    """The weight gradients that are still to be computed."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def put(self, job: Callable[[], None]) -> None:
        """Add ``job``, which computes the gradient of a weight and adds it to that of the parameter."""
        self._jobs.append(job)

    def take(self) -> list[Callable[[], None]]:
        """Return the jobs that one backward has left, and forget them."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def takes(self, weight: nn.Parameter) -> bool:
        """True if the gradient of ``weight`` is wanted, and may come later: no hook waits for it, and no other parameter.

        A script may prune or parametrize a layer at any time, so that its weight is computed from others.
        """
        hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        return weight.requires_grad and torch.is_grad_enabled() and weight.is_leaf and not hooks

    def product(
        self, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, *, transposed: bool
    ) -> torch.Tensor:
        """Compute x W^T + b, or x W + b for a ``transposed`` weight, as the layer itself does. W's gradient comes later."""
        return _Product.apply(x, weight, bias, self, transposed)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        later: WeightGradients,
        transposed: bool,
    ) -> torch.Tensor:
        if not transposed:
            y = functional.linear(x, weight, bias)
        else:
            flat = x.reshape(-1, x.shape[-1])
            y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
            y = y.view(*x.shape[:-1], weight.shape[1])
        ctx.save_for_backward(x.to(y.dtype))  # under autocast the product has another dtype
        ctx.weight, ctx.later, ctx.transposed, ctx.dtype = weight, later, transposed, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight, transposed = ctx.saved_tensors, ctx.weight, ctx.transposed
        ctx.later.put(lambda: _add_gradient(weight, x, grad, transposed=transposed))
        into = bias = None
        if ctx.needs_input_grad[0]:
            cast = weight.detach().to(grad.dtype)
            into = (grad @ (cast.t() if transposed else cast)).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return into, None, bias, None, None


def _add_gradient(weight: nn.Parameter, x: torch.Tensor, grad: torch.Tensor, *, transposed: bool) -> None:
    x, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    made = x.t() @ grad if transposed else grad.t() @ x
    if weight.grad is None:
        weight.grad = made.to(weight.dtype)
    else:
        weight.grad.add_(made.to(weight.dtype))


class SplitLayers:
    """Lets the linear layers of ``model`` leave their weight gradients to ``later``, until it is removed.

    Other layers take part if they have an attribute ``weight_gradients``: it is set to ``later``, and to None at the end.
    """

    def __init__(self, model: nn.Module, later: WeightGradients) -> None:
        self._ordinary = [layer for layer in model.modules() if _transposed(layer) is not None and _is_plain(layer)]
        self._willing = [layer for layer in model.modules() if hasattr(layer, "weight_gradients")]
        for layer in self._ordinary:
            layer.forward = _Split(layer, later)
        for layer in self._willing:
            layer.weight_gradients = later  # type: ignore[assignment]

    def remove(self) -> None:
        """Let the layers be ordinary ones again."""
        for layer in self._ordinary:
            layer.__dict__.pop("forward", None)
        for layer in self._willing:
            layer.weight_gradients = None  # type: ignore[assignment]


class _Split:
    """The forward of an ordinary linear layer that is split."""

    def __init__(self, layer: nn.Module, later: WeightGradients) -> None:
        self._layer, self._later, self._transposed = layer, later, bool(_transposed(layer))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        layer: Any = self._layer
        if not self._later.takes(layer.weight):
            return type(layer).forward(layer, x)  # type: ignore[no-any-return]
        return self._later.product(x, layer.weight, layer.bias, transposed=self._transposed)


def _is_plain(layer: nn.Module) -> bool:
    """False if the weight is computed from other parameters, which autograd must reach, or the forward is another one."""
    return isinstance(layer._parameters.get("weight"), nn.Parameter) and "forward" not in vars(layer)


def _transposed(layer: nn.Module) -> bool | None:
    """True if the weight is [in, out], False if it is [out, in], None if ``layer`` is not an ordinary linear layer."""
    if type(layer).forward is nn.Linear.forward:
        return False
    kind = type(layer)
    return True if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") else None
