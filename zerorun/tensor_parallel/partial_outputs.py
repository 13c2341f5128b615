"""Outputs of a Hugging Face model of which tensor ranks would have a part each, without a word: they are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import ModelError
from .heads import FUSED_NAMES, KEY_VALUE_NAMES, QUERY_NAMES
from .styles import COLUMN, ParallelPlan

_OF_ATTENTIONS = "each tensor rank computes some of the heads"
_OF_HIDDEN_STATES = "with sequence_parallel each tensor rank has a part of the sequence between blocks"


def refuse_partial_outputs(model: nn.Module, plan: ParallelPlan, *, sequence_parallel: bool) -> list[RemovableHandle]:
    """Let ``model``, and Hugging Face models in it, raise ModelError if they are asked for what ranks have in part.

    Their calls and their configurations ask for it. Return the hooks that see to it.
    """
    heads = QUERY_NAMES | KEY_VALUE_NAMES | FUSED_NAMES
    refused = {}
    if any(entry.style in COLUMN and entry.leaf in heads for entry in plan.entries):
        refused["output_attentions"] = _OF_ATTENTIONS
    if sequence_parallel:
        refused["output_hidden_states"] = _OF_HIDDEN_STATES
    asked = [module for module in model.modules() if hasattr(module, "config") and hasattr(module, "get_input_embeddings")]
    return [module.register_forward_pre_hook(partial(_refuse, refused), with_kwargs=True) for module in asked if refused]


def _refuse(refused: dict[str, str], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    for name, reason in refused.items():
        given = kwargs.get(name)
        if given if given is not None else getattr(module.config, name, False):
            raise ModelError(f"{name} cannot be had from {type(module).__name__} here: {reason}. Remedy: leave it out.")
