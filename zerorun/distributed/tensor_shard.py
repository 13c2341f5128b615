"""The tensor shard: which elements of a whole parameter a rank holds, if layers or experts are divided. Pure arithmetic.

A module with divided parameters says so in two attributes, which copies of the module keep:

    tensor_shards       parameter name -> TensorShard, of parameters that are a part of a whole one
    partial_gradients   names of whole parameters whose gradient on one rank is only a summand of the true one
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TensorShard:
    """The elements ``ranges`` (begin, end) along dimension ``dim`` of a tensor of ``shape``, concatenated.

    ``axis``: the ranks along it have the other elements: "tensor", or "expert" for experts.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: Ranges
    axis: str = "tensor"

    @property
    def length(self) -> int:
        """The length along ``dim`` of the part that this rank holds."""
        return sum(end - begin for begin, end in self.ranges)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``whole`` as a tensor of its own."""
        return torch.cat([whole.narrow(self.dim, begin, end - begin) for begin, end in self.ranges], self.dim)

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this rank's part to where it belongs in ``whole``."""
        lengths = [end - begin for begin, end in self.ranges]
        for (begin, end), piece in zip(self.ranges, part.split(lengths, self.dim), strict=True):
            whole.narrow(self.dim, begin, end - begin).copy_(piece)


def even_bounds(length: int, size: int) -> list[int]:
    """Return the ``size + 1`` bounds of parts of ``length`` elements, as equal as possible, the larger ones first."""
    small, larger = divmod(length, size)
    return [rank * small + min(rank, larger) for rank in range(size + 1)]


def even_range(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return (begin, end) of part ``rank`` of ``length`` elements in ``size`` parts."""
    bounds = even_bounds(length, size)
    return bounds[rank], bounds[rank + 1]


def fused_ranges(lengths: tuple[int, ...], rank: int, size: int) -> Ranges:
    """Return part ``rank`` of each of several consecutive blocks, as in a fused query-key-value projection."""
    ranges, begin = [], 0
    for length in lengths:
        low, high = even_range(length, rank, size)
        ranges.append((begin + low, begin + high))
        begin += length
    return tuple(ranges)


def has_marked_parts(model: nn.Module) -> bool:
    """Whether a parameter has the mark of Megatron's divided layers, which these have for one rank as well."""
    marks = ("model_parallel", "tensor_model_parallel")
    return any(getattr(param, mark, False) for param in model.parameters() for mark in marks)


def shards_of(model: nn.Module) -> dict[int, TensorShard]:
    """Return id(parameter) -> its tensor shard for the divided parameters of ``model``."""
    return {id(param): shard for param, shard in _divided(model)}


def numel_on_a_rank(param: torch.Tensor, shard: TensorShard | None, tensor_ranks: int) -> int:
    """Return the elements of ``param`` on one of ``tensor_ranks``: the mean, rounded up, which is the same on all of them.

    Their parts may differ in size. What is decided by size must be the same on all of them nevertheless: they go through
    units and flat groups together.
    """
    return param.numel() if shard is None or shard.axis != "tensor" else -(-shard.numel // tensor_ranks)


def _divided(model: nn.Module) -> Iterator[tuple[nn.Parameter, TensorShard]]:
    for module in model.modules():
        for name, shard in getattr(module, "tensor_shards", {}).items():
            param = module._parameters.get(name)
            if param is not None:
                yield param, shard


def partial_of(model: nn.Module) -> set[int]:
    """Return id(parameter) of the whole parameters of ``model`` whose gradients must be summed over the tensor axis."""
    found = set()
    for module in model.modules():
        for name in getattr(module, "partial_gradients", ()):
            param = module._parameters.get(name)
            if param is not None:
                found.add(id(param))
    return found
