"""Small Hugging Face models with mixtures of experts, of every family that expert parallelism is tried on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "eos_token_id": 1,
}
WIDE: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}  # DeepSeek's name for num_experts differs
LATENT: dict[str, Any] = {
    **WIDE,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# Family -> (what classes begin with, arguments of the configuration).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen2-moe": ("Qwen2Moe", {**WIDE, "num_experts": 8, "shared_expert_intermediate_size": 24}),
    "qwen3-moe": ("Qwen3Moe", {**WIDE, "num_experts": 8, "head_dim": 8}),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "n_group": 1}),
    "deepseek-v3": ("DeepseekV3", {**LATENT, "n_group": 2}),
    "ernie": ("Ernie4_5_Moe", {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 1}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4}),
}


def make(family: str, implementation: str = "grouped_mm", *, numbers: bool = True, **changes: Any) -> Any:
    """The model for training, with the same random values on every call; without ``numbers``, as it is made."""
    import transformers

    name, arguments = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **arguments, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, experts_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, param in sorted(model.named_parameters() if numbers else ()):
            param.normal_(std=0.2, generator=generator)
    return model.train()


def routers(model: nn.Module) -> list[nn.Module]:
    """What chooses the experts, by layer: gives logits, weights [T, K], numbers [T, K]."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def choosing(model: nn.Module, chosen: Any) -> None:
    """Let routers choose ``chosen(numbers [T, K])`` in place of ``numbers``."""
    for router in routers(model):
        router.register_forward_hook(lambda module, args, out: (*out[:2], chosen(out[2])))


def ids_of(rank: int, length: int | None = None) -> torch.Tensor:
    """[2, length] token ids, of another length on each rank unless it is given."""
    length = 5 + rank if length is None else length
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(rank))
