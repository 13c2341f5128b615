"""Unmodified Hugging Face models at stage 3 on 2 ranks train like the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from covering import by_day
from harness import run_ranks
from training import shared_topology

import zerorun

pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test]'")

TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {**TEXT, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
ENCODER = {**TEXT, "intermediate_size": 48, "max_position_embeddings": 40, "hidden_dropout_prob": 0.0}
VISION = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "dropout": 0.0,
}

# kind of input, configuration class, its arguments, model class
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "llama": ("causal", "LlamaConfig", LLAMA, "LlamaForCausalLM"),
    "llama tied": ("causal", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}, "LlamaForCausalLM"),
    "mistral": ("causal", "MistralConfig", LLAMA, "MistralForCausalLM"),
    "qwen2": ("causal", "Qwen2Config", LLAMA, "Qwen2ForCausalLM"),
    "qwen3": ("causal", "Qwen3Config", {**LLAMA, "head_dim": 8}, "Qwen3ForCausalLM"),
    "gemma2": ("causal", "Gemma2Config", {**LLAMA, "head_dim": 8}, "Gemma2ForCausalLM"),
    "gpt2": (
        "causal",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
        | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "GPT2LMHeadModel",
    ),
    "gpt-neox": (
        "causal",
        "GPTNeoXConfig",
        {**TEXT, "intermediate_size": 48, "max_position_embeddings": 32},
        "GPTNeoXForCausalLM",
    ),
    "opt": (
        "causal",
        "OPTConfig",
        {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32, "dropout": 0.0},
        "OPTForCausalLM",
    ),
    "mixtral": ("causal", "MixtralConfig", {**LLAMA, **MOE}, "MixtralForCausalLM"),
    "qwen2-moe": (
        "causal",
        "Qwen2MoeConfig",
        {**LLAMA, **MOE, "shared_expert_intermediate_size": 24},
        "Qwen2MoeForCausalLM",
    ),
    "bert": ("masked", "BertConfig", {**ENCODER, "attention_probs_dropout_prob": 0.0}, "BertForMaskedLM"),
    "roberta": ("masked", "RobertaConfig", {**ENCODER, "attention_probs_dropout_prob": 0.0}, "RobertaForMaskedLM"),
    "t5": ("pairs", "T5Config", {**T5, "decoder_start_token_id": 0}, "T5ForConditionalGeneration"),
    "bart": ("pairs", "BartConfig", BART, "BartForConditionalGeneration"),
    "vit": (
        "images",
        "ViTConfig",
        {**VISION, "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "ViTForImageClassification",
    ),
    "resnet": (
        "images",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"},
        "ResNetForImageClassification",
    ),
}


def build(name: str) -> torch.nn.Module:
    import transformers

    _, config, arguments, model = ARCHITECTURES[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**arguments)).train()


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    if ARCHITECTURES[name][0] == "images":
        pixels = torch.randn(4, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (4,), generator=generator)}
    ids = torch.randint(2, 64, (2, 12), generator=generator)
    labels = torch.randint(2, 64, (2, 12), generator=generator) if ARCHITECTURES[name][0] != "causal" else ids
    return {"input_ids": ids, "labels": labels}


def train_engine(name: str, stage: int, steps: int) -> tuple[list[float], int]:
    """(losses, number of units): both ranks see the same data, so that the mean gradient is that of the plain loop."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5}},
        "zero_optimization": {"stage": stage},
    }
    engine = zerorun.initialize(build(name), config, topology=shared_topology())
    losses, units = [], len(engine.units)
    for step in range(steps):
        loss = engine(**batch(name, step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses, units


def train_plain(name: str, steps: int) -> list[float]:
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0)
    losses = []
    for step in range(steps):
        loss = model(**batch(name, step)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", by_day(ARCHITECTURES, "llama", "gpt2", "gemma2", "qwen2-moe", "bert", "t5", "resnet"))
def test_trains_like_the_plain_loop(name: str) -> None:
    expected = train_plain(name, 4)
    for losses, units in run_ranks(2, train_engine, name, 3, 4):
        assert losses == pytest.approx(expected, rel=2e-6)
        assert units > 2, "the blocks were not found"
