"""The loss of Hugging Face causal language models, from logits that stay divided along the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..errors import ModelError
from .collectives import Region
from .loss import vocab_parallel_cross_entropy
from .styles import ParallelPlan


def head_of(model: nn.Module) -> nn.Module:
    """Return the layer that gives logits. Raises ModelError unless ``model`` is a causal LM with the common loss."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    function = getattr(model, "loss_function", None)
    if not isinstance(head, nn.Module) or getattr(function, "__name__", None) != "ForCausalLMLoss":
        raise ModelError(
            f"vocab_parallel_loss needs a causal language model of Hugging Face transformers with its common loss; got "
            f"{type(model).__name__}. Remedy: divide its head as colwise, and call vocab_parallel_cross_entropy."
        )
    return head


def has_head(model: nn.Module) -> bool:
    """True if the head is on this pipeline stage."""
    return not getattr(head_of(model), "is_elsewhere", False)


def with_divided_head(model: nn.Module, plan: ParallelPlan) -> ParallelPlan:
    """Return ``plan`` with logits that are not gathered. Raises ModelError unless it divides the head by columns."""
    head, found = head_of(model), []
    for entry in plan.entries:
        is_head = not entry.parameter and model.get_submodule(entry.name) is head
        if is_head and entry.style in ("colwise", "colwise_gather_output"):
            entry = replace(entry, style="colwise")
            found.append(entry.name)
        elif is_head:
            raise ModelError(f"{entry.name} is {entry.style}. Remedy: divide it as colwise, or vocab_parallel_loss=False.")
    if not found:
        raise ModelError("vocab_parallel_loss needs the head in the plan. Remedy: add it as colwise.")
    entries = tuple(replace(e, style="colwise") if e.name in found else e for e in plan.entries)
    return replace(plan, entries=entries)


def use_divided_logits(model: nn.Module, region: Region) -> Callable[[], None]:
    """Let ``model``, with its head converted already, compute its loss from divided logits. Return what undoes this."""
    head: Any = head_of(model)
    head.own_stream = False
    vocabulary: int = head.whole_sizes.get("out_features", head.whole_sizes.get("nf"))
    had = vars(model).get("_loss_function")

    def loss_function(
        logits: torch.Tensor,  # [batch, sequence, own part of the vocabulary]
        labels: torch.Tensor | None = None,  # [batch, sequence], the tokens themselves
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the mean over targets, or their sum / ``num_items_in_batch``. The target of token n is token n + 1."""
        region.forget()
        if shift_labels is None:
            if labels is None:
                raise ModelError("the loss needs labels or shift_labels. Remedy: pass labels to the model.")
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        flat = logits.reshape(-1, logits.shape[-1])
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = vocab_parallel_cross_entropy(
            flat, targets, region.axis, vocabulary, ignore_index=ignore_index, reduction=reduction
        )
        if num_items_in_batch is None:
            return loss
        return loss / (num_items_in_batch.to(loss.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch)

    model.loss_function = loss_function  # type: ignore[assignment]

    def undo() -> None:
        if had is None:
            vars(model).pop("_loss_function", None)
        else:
            model._loss_function = had

    return undo
