"""Layers that multiply in fp8: torchao's Float8Linear. They are known by their class, so that torchao need not be there."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from ..distributed.float8_codes import Float8Cast
from .weights import own_weight

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


def casts_of(model: nn.Module) -> dict[int, Float8Cast]:
    """Return id(weight) -> how its layer casts it, of the weights that can be gathered as what they are cast to.

    These are the weights that one layer alone has, if it casts them alike in forward and backward: with one scale for all.
    """
    holders: dict[int, list[nn.Module]] = defaultdict(list)
    for layer in model.modules():
        for param in layer._parameters.values():
            holders[id(param)].append(layer)
    found = {id(own_weight(layer)): cast for layer in model.modules() if (cast := _cast_of(layer)) is not None}
    return {param: cast for param, cast in found.items() if len(holders[param]) == 1}


def _cast_of(layer: nn.Module) -> Float8Cast | None:
    if not is_float8(layer) or own_weight(layer) is None:
        return None
    config: Any = layer.config
    forward, backward = config.cast_config_weight, config.cast_config_weight_for_grad_input
    for cast in (forward, backward):
        if (cast.scaling_type.value, cast.scaling_granularity.value) != ("dynamic", "tensorwise"):
            return None
    return Float8Cast(str(forward.target_dtype).removeprefix("torch."), config.round_scales_to_power_of_2)
