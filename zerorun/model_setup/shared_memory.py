"""Parameters that share memory without being one Parameter, such as ``head.weight.data = embedding.weight.data``.

In PyTorch an update of one of them changes the other. Here each parameter gets a place of its own in flat buffers, so that
they would drift apart without a word. What counts is memory, and not storage: slices of one buffer may well have no element
in common.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ModelError
from ..plan.parameter_kinds import inner_tensors, strides_of
from ..zero.init import partitioned


@dataclass(frozen=True)
class Extent:
    """Where the elements of a tensor lie: from byte ``low`` to ``high``. ``trained``: it will change."""

    name: str
    tensor: torch.Tensor
    low: int
    high: int
    trained: bool

    @property
    def is_dense(self) -> bool:
        """True if all memory between ``low`` and ``high`` is the tensor's."""
        return self.tensor.numel() * self.tensor.element_size() == self.high - self.low


def refuse_shared_memory(model: nn.Module, trained: Collection[int]) -> None:
    """Raise ModelError if a parameter that is trained shares memory with another parameter, or with a buffer.

    ``trained``: ids of the parameters that the optimizer has. What never changes may share memory.
    """
    extents = sorted(_extents(model, trained), key=lambda extent: (str(extent.tensor.device), extent.low))
    for cluster in _clusters(extents):
        found = _shared(cluster)
        if found is not None:
            first, second = sorted(extent.name for extent in found)
            raise ModelError(
                f"{first!r} and {second!r} share memory, but are not one Parameter: an update of one would not change the "
                "other, as it does in PyTorch. Remedy: to tie them, assign the Parameter itself, as in head.weight = "
                "embedding.weight; otherwise give one of them values of its own, by .clone(), before initialize()."
            )


def _extents(model: nn.Module, trained: Collection[int]) -> Iterator[Extent]:
    apart = {id(param) for param in partitioned(model)}  # they show placeholders, and have no values yet
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        changes = id(tensor) in trained and tensor.requires_grad
        for _, inner in inner_tensors(tensor) if id(tensor) not in apart else ():
            if inner.is_meta or inner.layout is not torch.strided or not inner.numel() or not inner.data_ptr():
                continue
            reach = sum((size - 1) * stride for size, stride in zip(inner.shape, strides_of(inner), strict=True))
            low, size = inner.data_ptr(), inner.element_size()
            yield Extent(name, inner, low, low + (reach + 1) * size, changes)


def _clusters(extents: list[Extent]) -> Iterator[list[Extent]]:
    """Yield those that may share memory, together. ``extents``: by device and ``low``."""
    cluster: list[Extent] = []
    end = 0
    for extent in extents:
        if cluster and (extent.tensor.device != cluster[0].tensor.device or extent.low >= end):
            yield cluster
            cluster, end = [], 0
        cluster.append(extent)
        end = max(end, extent.high)
    if cluster:
        yield cluster


def _shared(cluster: list[Extent]) -> tuple[Extent, Extent] | None:
    """Two members with an element in common, of which one is trained; None if there are none."""
    if len(cluster) == 1 or not any(extent.trained for extent in cluster):
        return None
    if all(extent.is_dense for extent in cluster):
        return _touching(cluster)
    # Members that go around each other, such as columns of one matrix: each element is marked with who has it.
    base = min(extent.low for extent in cluster)
    end = max(extent.high for extent in cluster)
    step = math.gcd(*(extent.tensor.element_size() for extent in cluster), *(extent.low - base for extent in cluster))
    marks = torch.zeros((end - base) // step, dtype=torch.int32)
    ordered = sorted(cluster, key=lambda extent: not extent.trained)
    for number, extent in enumerate(ordered, start=1):
        place = _place(marks, extent, base, step)
        taken = int(place.max())
        if taken:
            return ordered[taken - 1], extent
        if extent.trained:
            place.fill_(number)
    return None


def _touching(cluster: list[Extent]) -> tuple[Extent, Extent] | None:
    """``_shared`` for members of which each is all that is between its bounds."""
    reaching: dict[bool, Extent] = {}  # trained? -> the member so far that ends last
    for extent in cluster:
        for trained, other in reaching.items():
            if (trained or extent.trained) and other.high > extent.low:
                return other, extent
        last = reaching.get(extent.trained)
        if last is None or last.high < extent.high:
            reaching[extent.trained] = extent
    return None


def _place(marks: torch.Tensor, extent: Extent, base: int, step: int) -> torch.Tensor:
    """The elements of ``extent`` in ``marks``, which has one for each ``step`` bytes from ``base`` on."""
    each = extent.tensor.element_size() // step
    dims = [(n, s * each) for n, s in zip(extent.tensor.shape, strides_of(extent.tensor), strict=True) if s and n > 1]
    sizes, strides = [n for n, _ in dims], [s for _, s in dims]
    return marks.as_strided([*sizes, each], [*strides, 1], (extent.low - base) // step)
