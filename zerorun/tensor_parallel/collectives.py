"""The conjugate collectives of tensor parallelism, as differentiable functions, and the region between them.

[Note: four pairs]
Outside a region, activations are *whole* on every tensor rank or, with sequence parallelism, divided along the sequence.
Inside, they are divided by columns (heads, hidden units). Each operation of the forward belongs to one of the backward
(Shoeybi et al. 2019, arXiv:1909.08053, figure 3; Korthikanti et al. 2022, arXiv:2205.05198, figure 5):

    enter   forward nothing          backward all-reduce         with sequence parallelism: all-gather / reduce-scatter
    leave   forward all-reduce       backward nothing            with sequence parallelism: reduce-scatter / all-gather
    gather  forward all-gather       backward take own part      (columns to whole)
    split   forward take own part    backward all-gather         (whole to columns, and whole to sequence)

[Note: one entry for several layers]
Query, key and value, or gate and up, are separate layers that get the same tensor. Each layer enters the region by itself,
but a tensor is entered only once, and the result is remembered until the region is left. Its gradient is complete when all
these layers have added to it, and is then summed over ranks once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from ..distributed.tensor_shard import TensorShard, even_bounds
from ..distributed.topology import Topology
from ..errors import ModelError
from ..plan.replaced_forwards import uncompiled
from .axis import Axis, make_axis
from .random import Streams, any_trains

SEQUENCE = -2  # the dimension of the sequence: activations are [..., sequence, width]
_regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()  # by id(axis)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.axis.all_reduce(grad, "tensor: all-reduce backward"), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return axis.all_reduce(x, "tensor: all-reduce forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """``summed``: ranks use the result in different ways, so each rank's gradient is a summand of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, bounds: Sequence[int], summed: bool) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.bounds, ctx.summed = axis, dim, bounds, summed
        return axis.all_gather(x, dim, bounds, "tensor: all-gather forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.summed:
            own = ctx.axis.reduce_scatter(grad, ctx.dim, ctx.bounds, "tensor: reduce-scatter backward")
        else:
            own = _own(grad, ctx.axis, ctx.dim, ctx.bounds).contiguous()
        return own, None, None, None, None


class _Scatter(torch.autograd.Function):
    """``summed``: each rank's input is a summand of the whole; else it is the whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int, bounds: Sequence[int], summed: bool) -> torch.Tensor:
        ctx.axis, ctx.dim, ctx.bounds = axis, dim, bounds
        if summed:
            return axis.reduce_scatter(x, dim, bounds, "tensor: reduce-scatter forward")
        return _own(x, axis, dim, bounds).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = ctx.axis.all_gather(grad, ctx.dim, ctx.bounds, "tensor: all-gather backward")
        return whole, None, None, None, None


def _own(x: torch.Tensor, axis: Axis, dim: int, bounds: Sequence[int]) -> torch.Tensor:
    low, high = bounds[axis.rank], bounds[axis.rank + 1]
    return x.narrow(dim, low, high - low)


def gather_columns(x: torch.Tensor, axis: Axis, bounds: Sequence[int]) -> torch.Tensor:
    """Columns [..., own] -> whole [..., bounds[-1]] on every rank."""
    return _Gather.apply(x, axis, -1, bounds, False)  # type: ignore[no-any-return, no-untyped-call]


def split_columns(x: torch.Tensor, axis: Axis, bounds: Sequence[int]) -> torch.Tensor:
    """Whole [..., bounds[-1]] -> this rank's columns."""
    return _Scatter.apply(x, axis, -1, bounds, False)  # type: ignore[no-any-return, no-untyped-call]


def enter_alone(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return ``x`` as it is; its gradient is summed over ranks. For tensors that enter without a ``Region``."""
    return _Enter.apply(x, axis)  # type: ignore[no-any-return, no-untyped-call]


def leave_alone(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum over ranks of their summands ``x``. All ranks must use the sum in the same way."""
    return _Leave.apply(x, axis)  # type: ignore[no-any-return, no-untyped-call]


def split_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Whole [..., sequence, width] -> this rank's part of the sequence."""
    bounds = even_bounds(x.shape[SEQUENCE], axis.size)
    return _Scatter.apply(x, axis, SEQUENCE, bounds, False)  # type: ignore[no-any-return, no-untyped-call]


def gather_sequence(x: torch.Tensor, axis: Axis, length: int) -> torch.Tensor:
    """This rank's part of the sequence -> whole [..., length, width], which all ranks must use in the same way."""
    return _Gather.apply(x, axis, SEQUENCE, even_bounds(length, axis.size), False)  # type: ignore[no-any-return, no-untyped-call]


def split_rows(x: torch.Tensor, axis: Axis, bounds: Sequence[int]) -> torch.Tensor:
    """Whole [bounds[-1], ...] -> this rank's rows."""
    return _Scatter.apply(x, axis, 0, bounds, False)  # type: ignore[no-any-return, no-untyped-call]


def gather_rows(x: torch.Tensor, axis: Axis, bounds: Sequence[int]) -> torch.Tensor:
    """This rank's rows -> whole [bounds[-1], ...], which all ranks must use in the same way."""
    return _Gather.apply(x, axis, 0, bounds, False)  # type: ignore[no-any-return, no-untyped-call]


def make_region(topology: Topology, device: torch.device) -> Region:
    """Return the region of the tensor axis of ``topology``, which is made once. All ranks must call this."""
    region: Region | None = topology.shared.get("region")
    if region is None:
        region = topology.shared["region"] = Region(make_axis(topology, device))
    return region


def forward_outside(model: nn.Module, region: Region) -> Callable[[], None]:
    """Let each forward of ``model`` begin and end outside ``region``, also if it raises. Return what undoes this."""
    handles = (
        model.register_forward_pre_hook(region.end, prepend=True),
        model.register_forward_hook(region.end, always_call=True),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def end_region(axis: Axis) -> None:
    """Be outside the region of ``axis``, if there is one."""
    region = _regions.get(id(axis))
    if region is not None:
        region.end()


class Region:
    """Knows whether a tensor rank is inside a region or outside. The layers of a model that share an axis share it."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.streams = Streams(axis.rank)
        self.divided: MutableMapping[torch.Tensor, TensorShard] = WeakIdKeyDictionary()  # parameters
        self.sequence_length: int | None = None  # of the whole sequence, while activations are divided along it
        self.given: tuple[torch.Tensor, int] | None = None  # by the block before, and how often it had been written to
        self._outside: weakref.ref[torch.Tensor] | None = None
        self._inside: torch.Tensor | None = None
        self._version = -1
        _regions[id(axis)] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self

    @uncompiled
    def enter(self, x: torch.Tensor, *, drawing: Iterable[nn.Module] = ()) -> torch.Tensor:
        """Return ``x`` as the layers inside may use it. The same tensor enters once. ``drawing``: what may draw inside.

        While activations are divided along the sequence, each rank draws from its own stream outside regions as well.
        """
        if self.sequence_length is None and any_trains(drawing):
            self.streams.enter(x.device)
        known = self._outside() if self._outside is not None else None
        if known is x and self._version == x._version and self._inside is not None and self._fits(x):
            return self._inside
        if self.sequence_length is None:
            entered = _Enter.apply(x, self.axis)  # type: ignore[no-untyped-call]
        else:
            bounds = even_bounds(self.sequence_length, self.axis.size)
            self._check(x, bounds[self.axis.rank + 1] - bounds[self.axis.rank])
            entered = _Gather.apply(x, self.axis, SEQUENCE, bounds, True)  # type: ignore[no-untyped-call]
        self._outside, self._inside, self._version = weakref.ref(x), entered, x._version
        return entered  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Forget the tensor that has entered, without a sum over ranks."""
        self._outside = self._inside = None

    @uncompiled
    def end(self, *ignored: Any) -> None:
        """Be outside, whatever was entered and not left. For the beginning and the end of a model's forward."""
        self.sequence_length = self.given = None
        self.forget()
        self.streams.leave()

    def _check(self, x: torch.Tensor, length: int) -> None:
        if x.dim() < 2 or x.shape[SEQUENCE] != length:
            raise ModelError(
                f"with sequence parallelism an activation of shape {tuple(x.shape)} came where [..., {length}, width] is "
                f"needed, of a sequence of {self.sequence_length}: the model reshapes what is divided along the sequence. "
                "Remedy: sequence_parallel=False."
            )

    def _fits(self, x: torch.Tensor) -> bool:
        """True if the remembered tensor requires grad exactly if a new one would."""
        assert self._inside is not None
        return self._inside.requires_grad == (x.requires_grad and torch.is_grad_enabled())

    @uncompiled
    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of their summands ``x``; with sequence parallelism, this rank's part of the sum."""
        self.forget()
        if self.sequence_length is None:
            self.streams.leave()
            return _Leave.apply(x, self.axis)  # type: ignore[no-any-return, no-untyped-call]
        self._check(x, self.sequence_length)
        bounds = even_bounds(self.sequence_length, self.axis.size)
        return _Scatter.apply(x, self.axis, SEQUENCE, bounds, True)  # type: ignore[no-any-return, no-untyped-call]
