"""Rows: how a sequence is cut over the ranks of a context group, and how what they have of it is joined.

[Note: one factor]
Every rank of a context group computes the whole loss. What it computes from whole sequences has the whole gradient on each
of the P ranks, so their sum is P times the gradient. What it computes from its rows has a part of it. So the backward of
``join`` and ``sum_over``, where rows become something whole, multiplies by P: then the sum over ranks is P times the
gradient for every parameter, wherever it is used, and the divisor of the step counts all data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..distributed.tensor_shard import even_bounds
from ..tensor_parallel.axis import Axis

SEQUENCE = 1  # the dimension of the sequence in hidden states [batch, sequence, width], tokens and labels


class _Join(torch.autograd.Function):
    """``factor``: of the gradient; P if every rank computes the same from the whole, 1 if each uses its own rows of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Rows, dim: int, factor: int) -> torch.Tensor:
        ctx.rows, ctx.dim, ctx.factor = rows, dim, factor
        return rows.axis.all_gather(x, dim, rows.bounds, "context: join rows")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = ctx.rows.cut(grad, ctx.dim)
        return own * ctx.factor if ctx.factor > 1 else own, None, None, None


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.size = axis.size
        return axis.all_reduce(x, "context: sum of losses")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.size, None


class _Joined(torch.autograd.Function):
    """Backward alone of ``join``, and back from it: P times the gradient of own rows, 0 for all others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = torch.zeros_like(grad)
        ctx.rows.view(parts).copy_(ctx.rows.view(grad) * ctx.rows.axis.size)
        return parts, None


@dataclass(frozen=True)
class Rows:
    """The rows of this rank of a sequence of ``length``; parts are as equal as can be, the larger ones first."""

    length: int
    axis: Axis

    @property
    def bounds(self) -> list[int]:
        """Where each rank's rows begin and end."""
        return even_bounds(self.length, self.axis.size)

    @property
    def begin(self) -> int:
        return self.bounds[self.axis.rank]

    @property
    def end(self) -> int:
        return self.bounds[self.axis.rank + 1]

    @property
    def count(self) -> int:
        return self.end - self.begin

    def view(self, x: torch.Tensor, dim: int = SEQUENCE) -> torch.Tensor:
        """Return this rank's rows of ``x``, in its memory."""
        return x.narrow(dim, self.begin, self.count)

    def cut(self, x: torch.Tensor, dim: int = SEQUENCE) -> torch.Tensor:
        """Return this rank's rows of ``x``, in memory of their own, so that the whole may be given back."""
        return self.view(x, dim).clone(memory_format=torch.contiguous_format)

    def join(self, x: torch.Tensor, dim: int = SEQUENCE, *, recut: bool = False) -> torch.Tensor:
        """Return the whole of which ``x`` has this rank's rows. ``recut``: each rank will use its own rows of it alone."""
        return _Join.apply(x, self, dim, 1 if recut else self.axis.size)  # type: ignore[no-any-return, no-untyped-call]

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, which is whole on every rank, as if only own rows of it had been computed here, and joined."""
        return _Joined.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


def sum_over(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum over the context ranks of their summands ``x``, the same bits on each."""
    return _SumOver.apply(x, axis)  # type: ignore[no-any-return, no-untyped-call]
