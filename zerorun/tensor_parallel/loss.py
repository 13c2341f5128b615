"""Cross-entropy of logits whose vocabulary is divided over the tensor axis: three numbers for each token cross the wire."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..distributed.tensor_shard import even_range
from ..errors import ModelError
from ..ops.token_loss import mean_over
from .axis import Axis
from .collectives import end_region
from .vocabulary import check_inside


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    axis: Axis,
    vocabulary: int,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy`` of logits [..., own part of the vocabulary] and targets [...].

    ``vocabulary``: number of all classes. ``targets`` are whole and the same on all tensor ranks. The loss is computed in
    fp32. For each token, each rank sends the others 3 fp32 numbers: its largest logit, the sum of exponentials relative to
    that, and the target's logit if it has it. ``reduction``: "mean" over targets that are not ``ignore_index``, "sum" or
    "none". Raises ModelError for logits of another size than this rank's part, and VocabularyError for targets that are no
    class.
    """
    end_region(axis)  # the layer that gave the logits has entered, and nothing else leaves
    low, high = even_range(vocabulary, axis.rank, axis.size)
    if logits.shape[-1] != high - low:
        raise ModelError(
            f"logits have {logits.shape[-1]} classes, but tensor rank {axis.rank} of {axis.size} has {high - low} of "
            f"{vocabulary}. Remedy: pass what a ColumnParallelLinear without gather_output gives, and the whole number."
        )
    if reduction not in ("mean", "sum", "none"):
        raise ModelError(f"reduction is {reduction!r}. Remedy: use 'mean', 'sum' or 'none'.")
    check_inside(targets, vocabulary, "labels", ignore_index)
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, high - low), targets.reshape(-1), axis, low, ignore_index
    )
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    return mean_over(total, (targets != ignore_index).sum()) if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits in the dtype in which they came, and five values for each token."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, axis: Axis, low: int, ignore_index: int
    ) -> torch.Tensor:
        tokens, columns = logits.shape
        counted = targets != ignore_index
        own = counted & (targets >= low) & (targets < low + columns)
        column = (targets - low).masked_fill(~own, 0)
        wide = logits.float()
        mine = wide.new_zeros(3, tokens)
        if columns:
            torch.amax(wide, 1, out=mine[0])
            torch.sum((wide - mine[0].unsqueeze(1)).exp_(), 1, out=mine[1])
            mine[2] = wide.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill_(~own, 0)
        else:
            mine[0] = -torch.inf
        bounds = [3 * rank for rank in range(axis.size + 1)]
        highest, sums, target = (
            axis.all_gather(mine, 0, bounds, "tensor: cross-entropy").view(axis.size, 3, tokens).unbind(1)
        )
        top = highest.amax(0)
        log_sum = (sums * (highest - top).exp()).sum(0).log()
        ctx.save_for_backward(logits, top, log_sum, column, own, counted)
        return (log_sum - (target.sum(0) - top)).masked_fill(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, top, log_sum, column, own, counted = ctx.saved_tensors
        result = (logits.float() - top.unsqueeze(1)).sub_(log_sum.unsqueeze(1)).exp_()
        if result.shape[1]:
            result.scatter_add_(1, column.unsqueeze(1), -own.to(result.dtype).unsqueeze(1))
        result.mul_((grad * counted).unsqueeze(1))
        return result.to(logits.dtype), None, None, None, None
