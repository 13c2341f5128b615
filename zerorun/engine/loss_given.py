"""What a loop may give to ``backward``: the loss, and its weight. Mistakes are told by what was given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

from ..errors import StepError


def check_loss(loss: Any, function: str = "backward()") -> None:
    """Raise StepError for anything but a tensor of one element that depends on parameters."""
    if not isinstance(loss, torch.Tensor):
        raise StepError(f"{function} needs the loss as a tensor, got {_shown(loss)}. Remedy: {_remedy(loss)}")
    if loss.numel() != 1:
        raise StepError(
            f"{function} needs a scalar loss, got {tuple(loss.shape)}. Remedy: reduce it, for example with loss.mean()."
        )
    if not loss.requires_grad:
        raise StepError(
            "the loss does not depend on any trainable parameter. Remedy: compute it from the engine's output, outside "
            "torch.no_grad(), and without detach()."
        )


def _shown(loss: Any) -> str:
    kind = type(loss).__name__
    return f"{kind} {loss!r:.40}" if isinstance(loss, (Number, str)) else "None" if loss is None else f"a {kind}"


def _remedy(loss: Any) -> str:
    if loss is None:
        return "pass the tensor that the model computed; Hugging Face's compute a loss only if they are given labels."
    if isinstance(loss, Number) or hasattr(loss, "item"):
        return "pass the tensor itself, and take loss.item() only to print it: a number has no gradient."
    if hasattr(loss, "loss") or (isinstance(loss, Mapping) and "loss" in loss):
        return "pass the tensor in it, such as output.loss."
    return "pass the tensor that the model or the loss function returned."


def weight_of(weight: Any) -> float:
    """The weight of a loss as a number. Raises StepError for anything but a finite one from 0 on."""
    try:
        value = float(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise StepError(
            f"the weight of a loss must be a number, got {_shown(weight)} ({error}). Remedy: pass one number for the "
            "micro-batch, such as mask.sum()."
        ) from None
    if not math.isfinite(value) or value < 0:
        raise StepError(f"the weight of a loss must be finite and not negative, got {value}.")
    return value
