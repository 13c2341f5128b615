"""The planner's fast ledger equals estimate_memory to the byte, on random models and configurations."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import by_day

import zerorun
from zerorun.planner.candidate import RunCandidate, candidate_config
from zerorun.planner.footprint import footprints
from zerorun.planner.model_configs import shape_of
from zerorun.planner.model_shape import ModelShape
from zerorun.planner.search import expert_degrees, has_blocks_everywhere

# Kinds of mixtures, with the key that says how many experts there are.
MIXTURES = dict.fromkeys(("mixtral", "gpt_oss"), "num_local_experts")
MIXTURES |= dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), "num_experts")
MIXTURES |= dict.fromkeys(("deepseek_v2", "deepseek_v3"), "n_routed_experts")
# Kinds whose own plan lets tensor ranks divide all of a block.
DIVIDED = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")

BIASES = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",)}  # keys that give layers some


def model_of(values: dict[str, Any]) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    values = dict(values)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def random_model(random: random.Random, kind: str) -> dict[str, Any]:
    heads = random.choice([4, 8])
    width = heads * random.choice([16, 32, 48])
    shared = {"model_type": kind, "vocab_size": 8 * random.randint(20, 400), "tie_word_embeddings": random.random() < 0.4}
    layers = random.randint(4, 9)
    if kind == "gpt2":
        return {
            **shared,
            "n_embd": width,
            "n_head": heads,
            "n_layer": layers,
            "n_positions": 64,
            "tie_word_embeddings": True,
        }
    own = {"hidden_size": width, "intermediate_size": 8 * random.randint(8, 60), "num_hidden_layers": layers}
    keys = heads if kind.startswith("deepseek") else random.choice([4, heads])  # its keys are made from narrow vectors
    own |= {"num_attention_heads": heads, "num_key_value_heads": keys}
    return {**shared, **own, **random_mixture(random, kind)}


def random_mixture(random: random.Random, kind: str) -> dict[str, Any]:
    if kind not in MIXTURES:
        biases = {key: random.random() < 0.5 for key in BIASES.get(kind, ())}
        return {"head_dim": random.choice([16, 32]), **biases} if kind == "qwen3" else biases
    narrow = {"moe_intermediate_size": 8 * random.randint(4, 30)}
    dense = {"first_k_dense_replace": random.randint(0, 2), "n_shared_experts": random.choice([1, 2])}
    latent = {"q_lora_rank": random.choice([None, 48]), "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    latent |= {"v_head_dim": 24, "n_group": 1, "topk_group": 1}
    more: dict[str, dict[str, Any]] = {
        "qwen2_moe": {**narrow, "shared_expert_intermediate_size": 8 * random.randint(4, 30)},
        "qwen3_moe": {**narrow, "head_dim": random.choice([16, 32]), "mlp_only_layers": random.choice([[], [0], [0, 1]])},
        "deepseek_v2": {**narrow, **dense, **latent},
        "deepseek_v3": {**narrow, **dense, **latent},
        "gpt_oss": {"head_dim": 16},
    }
    return {MIXTURES[kind]: 4, "num_experts_per_tok": 2, **more.get(kind, {})}


def random_placement(random: random.Random, stage: int, precision: str, shard: int) -> dict[str, Any]:
    """Where states and parameters are, and which ranks have a second copy of the weights."""
    host = stage > 0 and random.random() < 0.4
    return {
        "offload_optimizer": host,
        "offload_params": host and stage == 3 and random.random() < 0.5,
        "states_on_disk": host and precision != "bf16-pure" and random.random() < 0.4,
        "second": random.choice([d for d in (1, 2, 4) if shard % d == 0]) if stage == 3 else 1,
    }


def random_candidate(random: random.Random, kind: str, shape: ModelShape) -> RunCandidate:
    tensor = random.choice([1, 1, 2, 4]) if kind in DIVIDED else 1
    pipe = 1 if kind == "gpt2" else random.choice([1, 1, 2, 3])
    if kind in MIXTURES and random.random() < 0.8:  # the estimate tries the stages of a mixture, which takes seconds
        pipe = 1
    data, stage = random.choice([1, 2, 3, 4, 8, 64]), random.randint(0, 3)
    shard = random.choice([d for d in (1, 2, 4, 8, 64, data) if data % d == 0 and d <= data]) if stage else 1
    precision = random.choice(["bf16", "bf16", "fp32", "bf16-pure", "fp16"])
    found = RunCandidate(
        data=data,
        tensor=tensor,
        pipe=pipe,
        stage=stage,
        shard=shard,
        precision=precision,
        **random_placement(random, stage, precision, shard),
        accumulation=random.choice([1, 4]),
        sequence_parallel=tensor > 1 and kind not in MIXTURES and random.random() < 0.5,
    )
    if not has_blocks_everywhere(shape, found):
        found = replace(found, sequence_parallel=False)
    degrees = expert_degrees(4, found) if kind in MIXTURES else [1]
    return replace(found, expert=random.choice(degrees))


@pytest.mark.parametrize("seed", by_day(range(40), 0, 3))
def test_the_ledger_is_that_of_the_estimate(seed: int) -> None:
    """Five configurations for each seed: 200 in all."""
    check(seed, ("llama", "llama", "qwen2", "gpt2", "qwen3")[seed % 5])


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("seed", by_day(range(6), 0))
def test_the_ledger_of_a_mixture_is_that_of_the_estimate(seed: int, kind: str) -> None:
    """Experts divide their states over other ranks than the rest of the model: 210 configurations."""
    check(seed, kind)


def check(seed: int, kind: str) -> None:
    chance = random.Random(seed)
    values = random_model(chance, kind)
    model, shape = model_of(values), shape_of(values)
    assert shape.parameters == sum(param.numel() for param in model.parameters()), values
    for _ in range(5):
        candidate = random_candidate(chance, kind, shape)
        exact = zerorun.estimate_memory(
            model, candidate_config(candidate), candidate.world, device="cuda", transport="nccl"
        )
        found = max(footprints(shape, candidate).values(), key=lambda one: one.device - one.activations)
        assert {kind: size for kind, size in found.kinds.items() if size} == {
            kind: size for kind, size in exact.kinds.items() if size
        }, (values, candidate)
        assert found.made == exact.gradients_in_backward, (values, candidate)
