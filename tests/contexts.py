"""Models and batches for sequences that ranks divide, each with one trait that dividing could get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BATCH, VOCABULARY = 2, 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": True, **changes}))


def mistral() -> nn.Module:
    """Attends to three tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=3))


def mixtral() -> nn.Module:
    """With the loss over its routers, which is a product of means over all tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))


def deepseek() -> nn.Module:
    """Keys and values of other widths (MLA), and as many of them as queries."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    widths = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    sizes = {**SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 16}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **experts, **widths))


def gpt_oss() -> nn.Module:
    """Sinks, one for each head, and windows in every other layer; eager. prime-rl #3397: sinks are cut as heads are."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, head_dim=8, sliding_window=3))


def gpt2() -> nn.Module:
    """What follows its blocks needs whole sequences; learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def granite() -> nn.Module:
    """Divides its logits by a number, so that they have to exist."""
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek": deepseek,
    "gpt_oss": gpt_oss,
    "gpt2": gpt2,
    "granite": granite,
    "llama, eager": lambda: llama(attn_implementation="eager"),
    "llama, 3 of 6 heads": lambda: llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48),
    "llama, 8 heads": lambda: llama(num_attention_heads=8, num_key_value_heads=8),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[name]()


# -- batches -----------------------------------------------------------------------------------------------------


def plain(generator: torch.Generator, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (BATCH, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def padded(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """13 tokens, of which the second row has 6: the last rank may have no label."""
    batch = plain(generator, 13)
    batch["attention_mask"] = torch.ones(BATCH, 13, dtype=torch.int64)
    batch["attention_mask"][1, 6:] = 0
    batch["labels"][1, 6:] = -100
    batch["labels"][:, 7:] = -100
    return batch


def packed(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two texts in a row, whose positions begin anew. trl #6843: nobody attends from one to the other."""
    batch = plain(generator, 11)
    batch["position_ids"] = torch.cat([torch.arange(4), torch.arange(7)]).expand(BATCH, -1).contiguous()
    batch["labels"][:, 4] = -100
    return batch


def counted(generator: torch.Generator) -> dict[str, Any]:
    """As the Trainer does: with the number of labels to divide by, and labels that are shifted already. transformers #48570
    ignored these."""
    batch = plain(generator, 9)
    shifted = torch.cat([batch["labels"][:, 1:], torch.full((BATCH, 1), -100)], 1)
    shifted[0, :3] = -100
    return {**batch, "shift_labels": shifted, "num_items_in_batch": 10}


BATCHES: dict[str, Callable[[torch.Generator], dict[str, Any]]] = {
    "plain": plain,
    "padded": padded,
    "packed": packed,
    "counted": counted,
    "short": lambda generator: plain(generator, 3),
}


def batch_of(kind: str, step: int, micro: int, rank: int) -> dict[str, Any]:
    return BATCHES[kind](torch.Generator().manual_seed(1 + 100 * step + 10 * micro + rank))
