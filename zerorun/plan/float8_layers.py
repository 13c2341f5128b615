"""Layers that multiply in fp8: torchao's Float8Linear. They are known by their class, so that torchao need not be there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PLACE = ("torchao.float8.float8_linear", "Float8Linear")


def float8_class(layer: nn.Module) -> type[nn.Module] | None:
    """Return torchao's class Float8Linear if ``layer`` is one of these, else None."""
    return next((kind for kind in type(layer).__mro__ if (kind.__module__, kind.__name__) == _PLACE), None)


def is_float8(layer: nn.Module) -> bool:
    """True if ``layer`` multiplies in fp8."""
    return float8_class(layer) is not None


class _Computing:
    """``layer`` with another weight and bias, as far as its forward can tell."""

    def __init__(self, layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._layer, self.weight, self.bias = layer, weight, bias

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def float8_product(layer: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b as the Float8Linear ``layer`` computes it. Scales are of this ``weight`` and this ``x``."""
    kind: Any = float8_class(layer)
    product: torch.Tensor = kind.forward(_Computing(layer, weight, bias), x)
    return product
