"""Cross-entropy of a linear layer's output in chunks of tokens, so that the logits of a large vocabulary never exist whole.

[Note: gradients in the forward]
The gradients of hidden and weight need nothing but a chunk's logits [tokens, classes]. The forward therefore computes the
gradients while it has the logits, and the backward only multiplies them by the gradient of the loss (as the Liger kernels
do, arXiv:2410.10989). torch has such an operation from 2.13 on, which is used for fp32 and fp64. For bf16 input its loss is
bf16, with two digits, so 16-bit input uses the code of this file, and so do older versions of torch. Reduction "none" also
uses this file, and computes each chunk again for its gradients. The mean is taken here, because where no token counts, the
mean of torch's operation gives gradients of NaN, while that of F.cross_entropy gives zeros.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Bytes of fp32 logits in a chunk, by default: large enough for full speed of the matrix products, small beside the rest.
CHUNK_BYTES = 2**26

Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    hidden: Tensor,  # [..., width]
    weight: Tensor,  # [classes, width]
    target: Tensor,  # [...] int64
    bias: Tensor | None = None,  # [classes]
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Return ``F.cross_entropy(F.linear(hidden, weight, bias), target)`` with memory for the logits of ``chunk`` tokens.

    ``chunk``: tokens at a time; by default as many as have 64 MiB of logits in fp32. For fp16 and bf16 input the loss is
    fp32, and sums over classes and tokens are taken in fp32; gradients have the dtypes of their tensors. Under autocast the
    layer is cast as F.linear casts it. The mean over no token is NaN, as in torch. Returns a scalar, or [...] for reduction
    "none". Backward may run again with retain_graph; gradients of gradients raise RuntimeError. Raises ValueError for
    shapes that do not fit.
    """
    _check(hidden, weight, target, bias, reduction, chunk)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), bias.to(dtype) if bias is not None else None
    with torch.autocast(kind, enabled=False):
        return _loss(hidden, weight, target, bias, ignore_index, reduction, chunk)


def _loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    chunk: int | None,
) -> Tensor:
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    size = chunk or max(CHUNK_BYTES // (4 * weight.shape[0]), 1)
    if reduction == "none":
        losses = [
            _rows_again(part, weight, ids, bias, ignore_index)
            for part, ids in zip(rows.split(size), wanted.split(size), strict=True)
        ]
        return torch.cat(losses).view(target.shape)
    count = (wanted != ignore_index).sum()
    exact = rows.dtype == weight.dtype in (torch.float32, torch.float64)
    total_of = _total_by_torch if _torch_has_it and exact and rows.shape[0] else _Total.apply
    total: Tensor = total_of(rows, weight, bias, wanted, ignore_index, size)
    if reduction == "sum":
        return total
    return mean_over(total, count)


def mean_over(total: Tensor, count: Tensor) -> Tensor:
    """Return ``total`` / ``count``, both scalars. Over no token it is NaN with gradients of 0, as of F.cross_entropy."""
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


_torch_has_it = hasattr(F, "linear_cross_entropy")


def _total_by_torch(
    rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, size: int
) -> Tensor:
    """Return what ``_Total`` computes, by torch's own operation."""
    options = torch.nn.LinearCrossEntropyOptions(
        allow_retain_graph=True, batch_chunk_size=size, chunking_method=None, acc_policy=_policy()
    )
    return F.linear_cross_entropy(
        rows, weight, target, linear_bias=bias, ignore_index=ignore_index, reduction="sum", options=options
    )


@cache
def _policy() -> Any:
    """Of fp32 and fp64 input all sums are exact. torch 2.13 has this one; where it is gone, "compact" does the same."""
    try:
        torch.nn.LinearCrossEntropyOptions(acc_policy="balanced")
    except ValueError:
        return "compact"
    return "balanced"


def _check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str, chunk: int | None) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} need the same last dimension")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target must have the shape {tuple(hidden.shape[:-1])} of hidden's tokens, got {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")


def _rows_again(rows: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore_index: int) -> Tensor:
    """Return the losses [tokens] of one chunk, whose logits are computed again in the backward."""

    def losses(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = F.linear(rows, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")

    return cast(Tensor, checkpoint(losses, rows, weight, bias, use_reentrant=False))


class _Total(torch.autograd.Function):
    """The sum of the losses, with the gradients for a sum computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, size: int
    ) -> Tensor:
        exact = torch.promote_types(rows.dtype, torch.float32)
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=exact, device=rows.device)
        for_rows = torch.empty_like(rows) if needs_rows else None
        for_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        for_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and needs_bias else None
        # One buffer for all chunks: on CPUs, the pages of a new one would cost as much as the softmax.
        buffer = torch.empty(min(size, rows.shape[0]), weight.shape[0], dtype=exact, device=rows.device)
        for start in range(0, rows.shape[0], size):
            part, ids = rows[start : start + size], target[start : start + size]
            logs = buffer[: part.shape[0]]
            _log_probabilities(part, weight, bias, logs)
            total += F.nll_loss(logs, ids, ignore_index=ignore_index, reduction="sum")
            if not (needs_rows or needs_weight or needs_bias):
                continue
            slope = _slope(logs, ids, ignore_index)
            if for_rows is not None:
                torch.mm(slope.to(weight.dtype), weight, out=for_rows[start : start + size])
            if for_weight is not None:
                for_weight.addmm_(slope.t(), part.to(exact))
            if for_bias is not None:
                for_bias += slope.sum(0)
        ctx.save_for_backward(for_rows, for_weight, for_bias)
        ctx.dtypes = rows.dtype, weight.dtype, bias.dtype if bias is not None else exact
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        grads = [(slope * grad).to(dtype) if slope is not None else None for slope, dtype in found]
        return *grads, None, None, None


def _log_probabilities(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the log of the softmax over classes into ``out`` [tokens, classes]."""
    if rows.dtype == out.dtype == weight.dtype:
        torch.mm(rows, weight.t(), out=out)
        if bias is not None:
            out += bias
    else:
        out.copy_(F.linear(rows, weight, bias))
    torch.log_softmax(out, -1, out=out)


def _slope(logs: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The gradient of the summed losses [tokens, classes], softmax minus one-hot, in the memory of ``logs``."""
    counted = target != ignore_index
    at = torch.where(counted, target, 0).unsqueeze(1)
    slope = logs.exp_()
    slope.scatter_add_(1, at, -torch.ones_like(at, dtype=logs.dtype))
    return slope.masked_fill_(~counted.unsqueeze(1), 0.0)
