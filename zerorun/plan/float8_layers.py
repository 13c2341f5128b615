"""Layers that multiply in fp8: torchao's Float8Linear. They are known by their class, so that torchao need not be there."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from ..distributed.float8_codes import Float8Cast
from ..errors import ModelError
from .parameter_kinds import own_weight

MULTIPLE = 16  # of which kernels want the sides of a matrix to be
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
    if counts_tokens(layer):
        refuse_odd_tokens(layer, (x,))
    kind: Any = float8_class(layer)
    product: torch.Tensor = kind.forward(_Computing(layer, weight, bias), x)
    return product


def counts_tokens(layer: nn.Module) -> bool:
    """True if ``layer`` multiplies by kernels that compute the gradient of its weight from 16 tokens at a time."""
    config: Any = layer.config if is_float8(layer) else None
    if config is None or config.emulate or config.pad_inner_dim:
        return False
    return bool(config.cast_config_input_for_grad_weight.scaling_type.value != "disabled")


def refuse_odd_tokens(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise ModelError if the layer's weight is trained and ``inputs`` have another number of tokens: kernels would fail.

    It may be a hook before forward of a layer that ``counts_tokens``.
    """
    x, weight = inputs[0], own_weight(layer)
    tokens = x.numel() // max(x.shape[-1], 1)
    if tokens % MULTIPLE and torch.is_grad_enabled() and weight is not None and weight.requires_grad:
        raise ModelError(
            f"a layer that multiplies in fp8, of {list(weight.shape)}, gets an input of {list(x.shape)}: {tokens} tokens. "
            f"Kernels compute the gradient of its weight from multiples of {MULTIPLE}. Remedy: pad sequences, or choose a "
            f"micro-batch, so that there are; or use the recipe 'rowwise_with_gw_hp', which multiplies there in 16 bits; "
            f"or leave the layer out by fp8.filter_fqns."
        )


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
