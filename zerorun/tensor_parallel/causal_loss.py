"""The loss of Hugging Face causal language models in training, from logits that stay divided along the vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..errors import ModelError
from ..plan.replaced_forwards import ReplacedForward, UnavailableOutput
from .collectives import Region
from .loss import vocab_parallel_cross_entropy
from .styles import ParallelPlan

_NO_LOGITS = (
    "with tensor_parallel.vocab_parallel_loss a model in training that is given labels computes its loss without whole "
    "logits. Remedy: leave labels out of the call, and compute the loss from the logits, which are then whole; in "
    "evaluation they always are."
)


def head_of(model: nn.Module) -> nn.Module:
    """Return the layer that gives logits. Raises ModelError unless ``model`` is a causal LM with the common loss."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    function = getattr(model, "loss_function", None)
    if not isinstance(head, nn.Module) or function is None:
        raise ModelError(
            f"vocab_parallel_loss needs a causal language model of Hugging Face transformers with its common loss; got "
            f"{type(model).__name__}. Remedy: divide its head as colwise, and call vocab_parallel_cross_entropy."
        )
    name = getattr(function, "__name__", type(function).__name__)
    # functools.wraps copies all names but this one.
    home: str = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    if name != "ForCausalLMLoss" or not home.startswith("transformers."):
        raise ModelError(
            f"tensor_parallel.vocab_parallel_loss = true: the loss function of {type(model).__name__} is {name} of {home}, "
            "but ranks compute ForCausalLMLoss of transformers from divided logits. Remedy: set vocab_parallel_loss to "
            "false, and the function is given whole logits; or divide the head as colwise, and call "
            "vocab_parallel_cross_entropy."
        )
    return head


def has_head(model: nn.Module) -> bool:
    """True if the head is on this pipeline stage."""
    return not getattr(head_of(model), "is_elsewhere", False)


def with_divided_head(model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
    """Return ``plan`` with a head that gathers its logits. Raises ModelError unless it divides the head by columns."""
    head, found = head_of(model), []
    for entry in plan.entries:
        is_head = not entry.parameter and model.get_submodule(entry.name) is head
        if is_head and entry.style in ("colwise", "colwise_gather_output"):
            found.append(entry.name)
        elif is_head:
            raise ModelError(f"{entry.name} is {entry.style}. Remedy: divide it as colwise, or vocab_parallel_loss=False.")
    if not found:
        raise ModelError("vocab_parallel_loss needs the head in the plan. Remedy: add it as colwise.")
    entries = tuple(replace(e, style="colwise_gather_output") if e.name in found else e for e in plan.entries)
    return replace(plan, entries=entries)


class ReplacedLoss:
    """Takes the place of the loss function of a ``model`` of transformers, until ``remove``. ``inner``: what was there."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        self._model, self._loss = model, loss
        self._had = vars(model).get("_loss_function")
        self.inner: Any = model.loss_function
        model.loss_function = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._loss(*args, **kwargs)

    @property
    def is_asked(self) -> bool:
        """False if a script has given the model another loss function since, which needs whole logits."""
        function = vars(self._model).get("_loss_function")
        while isinstance(function, ReplacedLoss) and function is not self:
            function = function.inner
        return function is self

    def remove(self) -> None:
        """Give the model its loss function back. One that a script has given it since stays."""
        if vars(self._model).get("_loss_function") is not self:
            return
        if self._had is None:
            del self._model._loss_function
        else:
            self._model._loss_function = self._had


class DividedLogits(ReplacedForward):
    """The forward of a causal language model, with its head converted already.

    In training, if it is given labels, its logits stay divided, and it computes the loss from them. In all other calls the
    head gathers them, because whoever generates, evaluates or computes a loss of his own needs whole ones, also by a loss
    function that the model has been given since.
    """

    def __init__(self, model: nn.Module, region: Region) -> None:
        super().__init__(model)
        self.region = region
        head: Any = head_of(model)
        head.own_stream = False
        self.head = head
        self.vocabulary: int = head.whole_sizes.get("out_features", head.whole_sizes.get("nf"))
        self.replaced_loss = ReplacedLoss(model, self.loss)

    __reduce__ = object.__reduce__  # copies divide their logits, too

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels", inspect.signature(self.inner).bind_partial(*args).arguments.get("labels"))
        if labels is None or not self.module.training or not self.replaced_loss.is_asked:
            return self.inner(*args, **kwargs)
        with self.head.keeping_columns():
            output = self.inner(*args, **kwargs)
        if isinstance(output, tuple):  # (loss, logits, ...)
            return (output[0], UnavailableOutput(_NO_LOGITS), *output[2:])
        output["logits"] = UnavailableOutput(_NO_LOGITS)
        return output

    def loss(
        self,
        logits: torch.Tensor,  # [batch, sequence, vocabulary], or this rank's part of the vocabulary
        labels: torch.Tensor | None = None,  # [batch, sequence], the tokens themselves
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the mean over targets, or their sum / ``num_items_in_batch``. The target of token n is token n + 1."""
        if self.head.gather_output:
            keywords = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **kwargs}
            return self.replaced_loss.inner(logits, labels, vocab_size, shift_labels=shift_labels, **keywords)  # type: ignore[no-any-return]
        self.region.forget()
        if shift_labels is None:
            if labels is None:
                raise ModelError("the loss needs labels or shift_labels. Remedy: pass labels to the model.")
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        flat = logits.reshape(-1, logits.shape[-1])
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = vocab_parallel_cross_entropy(
            flat, targets, self.region.axis, self.vocabulary, ignore_index=ignore_index, reduction=reduction
        )
        if num_items_in_batch is None:
            return loss
        return loss / (num_items_in_batch.to(loss.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)

    def remove(self) -> None:
        """Give the model its forward and its loss function back."""
        super().remove()
        self.replaced_loss.remove()
