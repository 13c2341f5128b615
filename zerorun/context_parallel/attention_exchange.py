"""How queries, keys and values travel between the ranks of a context group: heads against rows, or keys and values alone.

[Note: two ways]
With P ranks, h heads of queries and k of keys and values, S tokens, B sequences:

    ulysses  a rank gets whole sequences of its own h/P heads, and of the max(k, P)/P heads of keys and values that they
             need; attention's output goes back (Jacobs et al. 2023, arXiv:2309.14509). A rank sends, in forward and again
             in backward, (P-1)/P^2 * B*S*D * 2(h + max(k, P)) elements.
    gather   a rank gets all keys and values, for the queries of its own rows (Llama 3, arXiv:2407.21783, 3.3.2). It sends
             (P-1)/P * B*S*D * 2k elements in forward, and as many in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .sequence_rows import Rows

TO_HEADS, TO_ROWS, GATHER = "context: rows to heads", "context: heads to rows", "context: gather keys and values"


def fits(heads: int, key_heads: int, size: int) -> bool:
    """True if ``size`` ranks can divide the heads of queries, and those of keys and values or the ranks that share one."""
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def heads_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return (begin, end) of those of ``count`` heads that ``rank`` needs: its own, or the one that it shares."""
    if count % size == 0:
        return rank * count // size, (rank + 1) * count // size
    return rank * count // size, rank * count // size + 1


def _to_heads(tensors: Sequence[torch.Tensor], rows: Rows, label: str) -> list[torch.Tensor]:
    """Rows [batch, heads, own rows, width] of all heads -> all rows of this rank's heads."""
    size, rank = rows.axis.size, rows.axis.rank
    sent = [
        torch.cat([x[:, slice(*heads_of(x.shape[1], peer, size))].reshape(-1) for x in tensors]) for peer in range(size)
    ]
    shapes = [(x.shape[0], _own(x.shape[1], rank, size), x.shape[3]) for x in tensors]
    lengths = [high - low for low, high in pairwise(rows.bounds)]
    received = [sent[0].new_empty(sum(b * h * length * d for b, h, d in shapes)) for length in lengths]
    _exchange(sent, received, rows, label)
    found: list[list[torch.Tensor]] = [[] for _ in tensors]
    for flat, length in zip(received, lengths, strict=True):
        parts = flat.split([b * h * length * d for b, h, d in shapes])
        for number, (part, (b, h, d)) in enumerate(zip(parts, shapes, strict=True)):
            found[number].append(part.view(b, h, length, d))
    return [torch.cat(parts, 2) for parts in found]


def _to_rows(tensors: Sequence[torch.Tensor], counts: Sequence[int], rows: Rows, label: str) -> list[torch.Tensor]:
    """All rows [batch, own heads, sequence, width] -> this rank's rows of all ``counts`` heads. Heads that ranks share are
    summed, in fp32."""
    size = rows.axis.size
    sent = [torch.cat([x[:, :, low:high].reshape(-1) for x in tensors]) for low, high in pairwise(rows.bounds)]
    shapes = [(x.shape[0], x.shape[1], rows.count, x.shape[3]) for x in tensors]  # each rank has as many heads
    each = [b * h * n * d for b, h, n, d in shapes]
    received = [sent[0].new_empty(sum(each)) for _ in range(size)]
    _exchange(sent, received, rows, label)
    pieces = [flat.split(each) for flat in received]
    found = []
    for number, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        parts = torch.stack([pieces[peer][number].view(shape) for peer in range(size)], 1)  # [batch, rank, heads, ...]
        b, h, n, d = shape
        if size * h > count:
            exact = torch.promote_types(parts.dtype, torch.float32)
            parts = parts.view(b, count, size * h // count, n, d).to(exact).sum(2).to(parts.dtype)
        found.append(parts.reshape(b, count, n, d))
    return found


def _exchange(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], rows: Rows, label: str) -> None:
    rows.axis.all_to_all(sent, received, label).wait()


def _own(count: int, rank: int, size: int) -> int:
    low, high = heads_of(count, rank, size)
    return high - low


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.rows, ctx.counts = rows, [x.shape[1] for x in tensors]
        return tuple(_to_heads(tensors, rows, f"{TO_HEADS} forward"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_to_rows(grads, ctx.counts, ctx.rows, f"{TO_HEADS} backward")


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, x: torch.Tensor, count: int) -> torch.Tensor:
        ctx.rows = rows
        return _to_rows([x], [count], rows, f"{TO_ROWS} forward")[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, _to_heads([grad], ctx.rows, f"{TO_ROWS} backward")[0], None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.axis.all_gather(x, 2, rows.bounds, f"{GATHER} forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.axis.reduce_scatter(grad, 2, ctx.rows.bounds, f"{GATHER} backward"), None


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Own rows of all heads [batch, heads, own rows, width] -> all rows of own heads [batch, own heads, length, width]."""
    return _ToHeads.apply(rows, query, key, value)  # type: ignore[no-any-return, no-untyped-call]


def to_rows(x: torch.Tensor, heads: int, rows: Rows) -> torch.Tensor:
    """The reverse, of one tensor with a part of ``heads`` heads on each rank."""
    return _ToRows.apply(rows, x, heads)  # type: ignore[no-any-return, no-untyped-call]


def gather(key: torch.Tensor, value: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Own rows of keys and values [batch, heads, own rows, width] -> all rows."""
    both = _GatherRows.apply(torch.cat((key, value), -1), rows)  # type: ignore[no-untyped-call]
    return both.split((key.shape[-1], value.shape[-1]), -1)  # type: ignore[no-any-return]
