"""Rows that go to other ranks and back, as a differentiable function: the gradients of rows go the opposite way."""

from __future__ import annotations

from typing import Any

import torch

from ..tensor_parallel.axis import Axis

Rows = tuple[int, ...]  # numbers of rows, by rank of the axis


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, axis: Axis, sends: Rows, receives: Rows, label: str) -> torch.Tensor:
        ctx.axis, ctx.sends, ctx.receives, ctx.label = axis, sends, receives, label
        return moved(rows, axis, sends, receives, label)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = exchange(grad, ctx.axis, ctx.receives, ctx.sends, ctx.label.replace("forward", "backward"))
        return back, None, None, None, None


def exchange(rows: torch.Tensor, axis: Axis, sends: Rows, receives: Rows, label: str) -> torch.Tensor:
    """Send ``rows`` [sum(sends), H], those for each rank one after the other; return [sum(receives), H], by sender.

    All ranks of the axis must call it, in forward and in backward.
    """
    return _RowExchange.apply(rows, axis, sends, receives, label)  # type: ignore[no-any-return, no-untyped-call]


def moved(rows: torch.Tensor, axis: Axis, sends: Rows, receives: Rows, label: str) -> torch.Tensor:
    """Do as ``exchange``, with rows of any shape [...], and without gradients."""
    sent = rows.detach().contiguous()
    came = sent.new_empty(sum(receives), *sent.shape[1:])
    axis.all_to_all(_parts(sent, sends), _parts(came, receives), label)
    return came


def _parts(rows: torch.Tensor, counts: Rows) -> list[torch.Tensor]:
    return [part.view(-1) for part in rows.split(list(counts))]
