"""A linear layer that is cut into tiles, of which one at a time is unsharded at stage 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .gathered_parameters import GatheredParameters


class Tile(nn.Linear):
    """A part of a layer with ``whole_in_features``: its initial values are as large as those of the whole."""

    def __init__(self, in_features: int, out_features: int, bias: bool, whole_in_features: int, **kwargs: Any) -> None:
        self.whole_in_features = whole_in_features
        super().__init__(in_features, out_features, bias, **kwargs)

    def reset_parameters(self) -> None:
        bound = 1 / sqrt(self.whole_in_features)
        for param in self._parameters.values():
            if param is not None:
                nn.init.uniform_(param, -bound, bound)


class TiledLinear(nn.Module):
    """nn.Linear in ``out_splits`` x ``in_splits`` tiles, as equal as can be, which run one after the other.

    For a layer that is too large to be unsharded whole: outside of a list of blocks each tile is a unit of its own. In a
    block, the unit is the block, unless ``zero_optimization.unit_policy`` names the classes of layers, ["Tile", ...].

    The input is one tensor [..., in_features], or a sequence of ``in_splits`` tensors [..., part of in_features], whatever
    ``input_is_already_split`` says. ``combine_out_splits``: the output is one tensor [..., out_features], else a list of
    ``out_splits``. ``in_parts``, ``out_parts``: the features with which tiles begin, and the number of all. ``linear_cls``
    makes tiles as nn.Linear does; its initial values are as large as a tile of its size has them. ``init_linear``: a layer
    whose values to take. ``kwargs``: for each tile, such as dtype. Raises ModelError for fewer features than tiles.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.combine_out_splits = combine_out_splits
        self._widths = _sizes("in", in_features, in_splits)
        self._heights = _sizes("out", out_features, out_splits)
        self.in_parts, self.out_parts = ([*accumulate(sizes, initial=0)] for sizes in (self._widths, self._heights))
        if linear_cls is nn.Linear:
            linear_cls, kwargs = Tile, {**kwargs, "whole_in_features": in_features}
        last = in_splits - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(width, height, bias=bias and number == last, **kwargs)
                for number, width in enumerate(self._widths)
            )
            for height in self._heights
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Return the output, or its parts; see the class."""
        parts = torch.split(input_, self._widths, -1) if isinstance(input_, Tensor) else input_
        outputs = []
        for row in self.linears:
            output, *others = (tile(part) for tile, part in zip(row, parts, strict=True))  # type: ignore[call-overload]
            for other in others:
                output = output + other
            outputs.append(output)
        return torch.cat(outputs, -1) if self.combine_out_splits else outputs

    def copy_params_from(self, other: nn.Linear) -> None:
        """Take the values of a layer of the same size. All ranks must call it. Raises ModelError for another size."""
        if (other.in_features, other.out_features) != (self.in_features, self.out_features):
            sizes = f"{other.in_features} x {other.out_features}, not {self.in_features} x {self.out_features}"
            raise ModelError(f"the layer to copy has {sizes} features. Remedy: give a layer of the same size.")
        if (other.bias is None) != (self.linears[0][-1].bias is None):  # type: ignore[index]
            raise ModelError("one of the two layers has a bias. Remedy: give bias= as the layer to copy has it.")
        with GatheredParameters(list(other.parameters())), GatheredParameters(list(self.parameters()), modifier_rank=0):
            rows = torch.split(other.weight.data, self._heights)
            for number, (row, values) in enumerate(zip(self.linears, rows, strict=True)):
                for tile, value in zip(row, torch.split(values, self._widths, 1), strict=True):  # type: ignore[call-overload]
                    tile.weight.data.copy_(value)
                if other.bias is not None:
                    row[-1].bias.data.copy_(torch.split(other.bias.data, self._heights)[number])  # type: ignore[index]


def _sizes(side: str, features: int, count: int) -> list[int]:
    if not 1 <= count <= features:
        raise ModelError(f"{side}_splits = {count}: a layer has 1 to {features} tiles there. Remedy: choose such a number.")
    return [features // count + (number < features % count) for number in range(count)]
