"""The loss of Hugging Face causal language models, from the rows of hidden states that each context rank has.

[Note: the whole count]
The loss is a sum over targets, divided by their number in the whole batch, which every rank knows, or by what the caller
says (``num_items_in_batch``). So each rank sums over its own targets, and the sum over ranks is divided. A rank without a
target adds 0, where a mean of its own would be NaN. The mean over no target at all is NaN, with gradients of 0. All ranks
return the whole loss, the same bits.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as common

from ..errors import ModelError
from ..ops import linear_cross_entropy
from ..ops.token_loss import mean_over
from ..plan.replaced_forwards import UnavailableOutput, is_own_hook
from ..tensor_parallel.causal_loss import ReplacedLoss
from .divided_model import Division, OwnForward
from .sequence_rows import Rows, sum_over

_NO_LOGITS = (
    "with divided sequences a model in training that is given labels computes its loss without whole logits. Remedy: leave "
    "labels out of the call, and compute the loss from the logits, which are then whole; in evaluation they always are."
)

_OTHER_LOSS = (
    "sequence_parallel_size: the model was given another loss_function after initialize(), but its pipeline stages have "
    "rows of logits alone. Remedy: leave loss_function as it was, or remove sequence_parallel_size or pipeline."
)


class InModel(OwnForward):
    """The forward of a causal language model. If it is given labels, blocks, head and ``loss`` have rows only."""

    def __init__(self, module: nn.Module, division: Division, loss: ShardLoss) -> None:
        super().__init__(module, division)
        self._loss = loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self.inner).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.pop("kwargs", {})}
        labels, kept = given.get("labels"), given.get("logits_to_keep")
        whole = isinstance(kept, torch.Tensor) or kept or given.get("past_key_values") is not None
        if labels is None or whole or not self.division.way.divides(self.module):
            return self.inner(*args, **kwargs)
        if not self._loss.is_asked:
            if self.division.in_stages:
                raise ModelError(_OTHER_LOSS)
            return self.inner(*args, **kwargs)  # which joins what it gives another loss function
        ignored = given.get("ignore_index", -100)
        targets = given.get("shift_labels")
        if targets is None:
            targets = functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        in_tiles = self.division.way.tiles and self.module.training
        with self.division.with_loss(targets, ignored, in_tiles=in_tiles):
            output = self.inner(*args, **kwargs)
            return self._with_logits(output)

    def _with_logits(self, output: Any) -> Any:
        """Return ``output`` with whole logits in evaluation, and none in training."""
        rows = self.division.kept
        if rows is None:  # nothing was divided
            return output
        if isinstance(output, tuple):  # (loss, logits, ...)
            return (output[0], self._logits(output[1], rows), *output[2:])
        output["logits"] = self._logits(output["logits"], rows)
        return output

    def _logits(self, own: torch.Tensor, rows: Rows) -> Any:
        return UnavailableOutput(_NO_LOGITS) if self.module.training else rows.join(own)


class InHead(OwnForward):
    """The forward of the head: with targets known, it returns the sum of this rank's losses in place of its logits.

    Hooks of a script, which may come at any time, are given logits: those of this rank's rows.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        division, head = self.division, self.module
        if not division.in_tiles or division.kept is None or _is_watched(head):
            return self.inner(*args, **kwargs)
        hidden, bias = (args[0] if args else kwargs["input"]), head.bias
        targets = division.own_targets().to(hidden.device)
        assert isinstance(head.weight, torch.Tensor)
        assert bias is None or isinstance(bias, torch.Tensor)
        return linear_cross_entropy(hidden, head.weight, targets, bias, ignore_index=division.ignored, reduction="sum")


def _is_watched(head: nn.Module) -> bool:
    """True if a hook of a script gets what ``head`` returns, or its gradient."""
    of_head = (head._forward_hooks, head._backward_hooks, head._backward_pre_hooks)
    everywhere = (
        common._global_forward_hooks,
        common._global_backward_hooks,
        common._global_backward_pre_hooks,
    )
    return any(not is_own_hook(hook) for hooks in (*of_head, *everywhere) for hook in hooks.values())


class ShardLoss(ReplacedLoss):
    """Replaces the loss function of a causal language model, of the signature of ForCausalLMLoss."""

    def __init__(self, model: nn.Module, division: Division) -> None:
        self._division = division
        super().__init__(model, self.loss)

    def loss(
        self,
        logits: torch.Tensor,  # [batch, own rows, vocabulary], or the sum of their losses
        labels: torch.Tensor | None = None,  # [batch, sequence]
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the mean over all targets of the batch, or their sum / ``num_items_in_batch``."""
        division = self._division
        if division.kept is None:
            keywords = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **kwargs}
            return self.inner(logits, labels, vocab_size, shift_labels=shift_labels, **keywords)  # type: ignore[no-any-return]
        assert division.targets is not None
        if logits.dim() == 0:  # the head has computed the sum in tiles; others may have replaced its forward again
            own = logits
        else:
            targets = division.own_targets()
            keywords = {"num_items_in_batch": 1, "ignore_index": ignore_index, "shift_labels": targets, **kwargs}
            own = self.inner(logits, targets, vocab_size, **keywords)
        total = sum_over(own, division.axis)
        if num_items_in_batch is None:
            count = (division.targets != ignore_index).sum()
            return mean_over(total, count.to(total.device))
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch
