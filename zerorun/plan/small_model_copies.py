"""Small copies of transformers models, made from their configurations, to try out what is to be done to a large model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..distributed.generators import generators_as_before

# In parameters: a forward of a few tokens through so many takes a fraction of a second.
LARGEST_COPY = 50_000_000
VOCABULARY = 128
# Widths of the copy, where its blocks are tried on no more than two ranks. Names that a configuration does not have are
# left out.
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "word_embed_proj_dim": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
FEWER_LAYERS = 4
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")


def small_copy(model: nn.Module, shrink: Callable[[Any], None]) -> nn.Module:
    """Return a model of the class of ``model``, with random values on the CPU, after ``shrink`` of its configuration.

    Raises MemoryError if it would not be small, and whatever the class says to a configuration that it does not take.
    """
    kind, config = type(model), copy.deepcopy(model.config)
    shrink(config)
    with generators_as_before(gpus=False):
        torch.manual_seed(0)
        with torch.device("meta"):
            numel = sum(param.numel() for param in kind(config).parameters())  # type: ignore[call-arg]
        if numel > LARGEST_COPY:
            raise MemoryError(f"a copy would have {numel} parameters")
        with torch.device("cpu"):
            return kind(config)  # type: ignore[call-arg]


def narrow(config: Any, ranks: int = 1) -> None:
    """Let a model have all layers, but narrow ones, whose heads ``ranks`` can divide as they can those of the wide one."""
    _few_words(config)
    projected = getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size
    wide_heads = getattr(config, "num_attention_heads", None)
    wide_keys = {name: getattr(config, name) for name in _KEY_HEADS if isinstance(getattr(config, name, None), int)}
    for name, value in _widths(ranks).items():
        if isinstance(getattr(config, name, None), int):
            with contextlib.suppress(AttributeError):  # an attribute that is computed from others
                setattr(config, name, value)
    for name, keys in wide_keys.items():
        if keys == wide_heads:
            setattr(config, name, config.num_attention_heads)
        elif keys < ranks:  # ranks share a head
            setattr(config, name, keys)
    if projected:
        config.update({"word_embed_proj_dim": config.hidden_size // 2})


def _widths(ranks: int) -> dict[str, int]:
    """Return ``NARROW`` with two heads of queries and one of keys for each of ``ranks``."""
    if ranks <= 2:
        return NARROW
    head = 8 if ranks <= 8 else 4
    hidden = 2 * ranks * head
    widths = dict.fromkeys(("hidden_size", "word_embed_proj_dim"), hidden)
    widths |= dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size"), hidden * 3 // 2)
    widths |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), hidden // 2)
    widths |= dict.fromkeys(_KEY_HEADS, ranks)
    return {**NARROW, **widths, "num_attention_heads": 2 * ranks, "head_dim": head, "rotary_dim": head // 2}


def shorten(config: Any) -> None:
    """Let a model have few layers, which stay as wide as they are."""
    _few_words(config)
    config.update({"num_hidden_layers": min(config.num_hidden_layers, FEWER_LAYERS)})
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) > FEWER_LAYERS and name.startswith("layer"):
            setattr(config, name, value[:FEWER_LAYERS])


def _few_words(config: Any) -> None:
    config.update({"vocab_size": min(config.vocab_size, VOCABULARY)})
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0)
    if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
        config.update({"_attn_implementation": "eager"})  # the others need a GPU
