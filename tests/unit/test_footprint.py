"""The planner's fast ledger equals estimate_memory to the byte, on random models and configurations."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from covering import by_day

import zerorun
from zerorun.planner.candidate import RunCandidate
from zerorun.planner.footprint import candidate_config, footprints
from zerorun.planner.model_shape import shape_of


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
    own |= {"num_attention_heads": heads, "num_key_value_heads": random.choice([4, heads])}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    return {**shared, **own, **experts}


def random_candidate(random: random.Random, kind: str) -> RunCandidate:
    tensor = 1 if kind in ("gpt2", "mixtral") else random.choice([1, 1, 2, 4])
    pipe = 1 if kind in ("gpt2", "mixtral") else random.choice([1, 1, 2, 3])
    data, stage = random.choice([1, 2, 3, 4, 8, 64]), random.randint(0, 3)
    shard = random.choice([d for d in (1, 2, 4, 8, 64, data) if data % d == 0 and d <= data]) if stage else 1
    return RunCandidate(
        data=data,
        tensor=tensor,
        pipe=pipe,
        stage=stage,
        shard=shard,
        precision=random.choice(["bf16", "bf16", "fp32", "bf16-pure", "fp16"]),
        offload_optimizer=stage > 0 and random.random() < 0.3,
        accumulation=random.choice([1, 4]),
    )


@pytest.mark.parametrize("seed", by_day(range(40), 0, 3))
def test_the_ledger_is_that_of_the_estimate(seed: int) -> None:
    """Five configurations for each seed: 200 in all."""
    chance = random.Random(seed)
    kind = ("llama", "llama", "qwen2", "gpt2", "mixtral")[seed % 5]
    values = random_model(chance, kind)
    model, shape = model_of(values), shape_of(values)
    assert shape.parameters == sum(param.numel() for param in model.parameters())
    for _ in range(5):
        candidate = random_candidate(chance, kind)
        exact = zerorun.estimate_memory(
            model, candidate_config(candidate), candidate.world, device="cuda", transport="nccl"
        )
        found = max(footprints(shape, candidate).values(), key=lambda one: one.device - one.activations)
        assert {kind: size for kind, size in found.kinds.items() if size} == {
            kind: size for kind, size in exact.kinds.items() if size
        }, (values, candidate)
        assert found.made == exact.gradients_in_backward, (values, candidate)
