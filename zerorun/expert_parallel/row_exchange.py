"""Rows that go to other ranks and back, as differentiable functions: the gradients of rows go the opposite way.

[Note: two nodes]
``begin`` sends rows, ``end`` waits for those that come. What is computed between the two goes on meanwhile. Backward does
the same in reverse: the node of ``end`` sends gradients, and that of ``begin`` waits for them. Autograd takes nodes from
the last that was made to the first, so the backward of what was computed between the two goes on between the two.
"""

from __future__ import annotations

from typing import Any

import torch

from ..tensor_parallel.axis import Axis, UnderWay

Rows = tuple[int, ...]  # numbers of rows, by rank of the axis


class Exchange:
    """One exchange of rows. ``sends`` and ``receives``: how many, by rank. All ranks of the axis must make it."""

    def __init__(self, axis: Axis, sends: Rows, receives: Rows, label: str) -> None:
        self._axis, self._sends, self._receives, self._label = axis, sends, receives, label
        self._under_way: UnderWay | None = None
        self._back: tuple[torch.Tensor, Exchange] | None = None  # what ``turn`` has begun

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Send ``rows`` [sum(sends), ...], those for each rank one after the other. Return [sum(receives), ...], by sender,
        whose values are there after ``wait``."""
        sent = rows.detach().contiguous()
        came = sent.new_empty(sum(self._receives), *sent.shape[1:])
        self._under_way = self._axis.all_to_all(_parts(sent, self._sends), _parts(came, self._receives), self._label)
        if torch.is_anomaly_enabled():
            self.wait()  # autograd looks at the values between any two nodes
        return came

    def wait(self) -> None:
        """Return when the rows of all ranks have come."""
        if self._under_way is not None:
            self._under_way.wait()

    def turn(self, grad: torch.Tensor) -> None:
        """Begin to send the gradients of the rows that came."""
        back = Exchange(self._axis, self._receives, self._sends, self._label.replace("forward", "backward"))
        self._back = begin(grad, back), back

    def turned(self) -> torch.Tensor:
        """The gradients of the rows that were sent, when they have come."""
        (coming, back), self._back = self._back, None  # type: ignore[misc]
        return end(coming, back)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.send(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.exchange.turned(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, came: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.wait()
        ctx.mark_dirty(came)  # its values have come since it was made
        return came

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.exchange.turn(grad)
        return grad, None  # of the shape that autograd expects; the node of ``begin`` makes nothing of it


def begin(rows: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """``exchange.send``, with gradients. What is returned is for ``end`` alone."""
    return _Begin.apply(rows, exchange)  # type: ignore[no-any-return, no-untyped-call]


def end(came: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """What ``begin`` has returned, when its rows have come."""
    return _End.apply(came, exchange)  # type: ignore[no-any-return, no-untyped-call]


def _parts(rows: torch.Tensor, counts: Rows) -> list[torch.Tensor]:
    return [part.view(-1) for part in rows.split(list(counts))]
