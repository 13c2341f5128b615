"""The planner's table of model kinds, against transformers' own classes: parameters by the defaults of each class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zerorun.errors import ConfigError
from zerorun.planner.model_configs import read_shape, shape_of
from zerorun.planner.model_kinds import KINDS, ModelKind
from zerorun.planner.model_shape import ModelShape

transformers = pytest.importorskip("transformers")

# Some classes have defaults that make no model.
NEEDED: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 4096, "n_head": 32},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
# What changes the number of parameters, beside the default of each class.
VARIANTS: dict[str, dict[str, Any]] = {
    "apertus": {"num_key_value_heads": 8},
    "cohere": {"num_key_value_heads": 8, "tie_word_embeddings": False},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 1, "bias": True},
    "gemma": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "gpt2": {"n_inner": 1024, "n_positions": 8192},
    "gpt_bigcode": {"multi_query": False},
    "gpt_neox": {"tie_word_embeddings": True, "intermediate_size": 6144},
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 64},
    "mistral": {"head_dim": 160, "tie_word_embeddings": True},
    "mpt": {"expansion_ratio": 2},  # which the class does not read
    "opt": {"ffn_dim": 1024, "tie_word_embeddings": False},
    "phi3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 64, "num_key_value_heads": 4},
    "starcoder2": {"use_bias": False, "tie_word_embeddings": False},
}
LAYERS = 4  # so that the model is made in no time; the first three blocks of DeepSeek-V3 have no experts
# Keys whose value in a configuration is written only where it is not the class's, and others that people leave out.
LEFT_OUT = ("tie_word_embeddings", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "multi_query")
LEFT_OUT += ("use_bias", "bias", "use_qkv_bias", "n_shared_experts", "first_k_dense_replace", "qkv_bias", "num_kv_heads")


def made(kind: str, more: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the configuration of a model of transformers, with the number of its parameters."""
    layers = transformers.CONFIG_MAPPING[kind].attribute_map.get("num_hidden_layers", "num_hidden_layers")
    config = transformers.AutoConfig.for_model(kind, **{**more, layers: LAYERS})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return config.to_dict(), sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_the_parameters_of_its_class(kind: str) -> None:
    """Also where the configuration leaves out what the class has by default."""
    values, parameters = made(kind, NEEDED.get(kind, {}))
    given = NEEDED.get(kind, {})
    short = {key: value for key, value in values.items() if key not in LEFT_OUT or key in given}
    for config in (values, short):
        assert shape_of(config).parameters == pytest.approx(parameters, rel=0.0005), config


@pytest.mark.parametrize("kind", VARIANTS)
def test_keys_change_a_model_as_in_its_class(kind: str) -> None:
    values, parameters = made(kind, VARIANTS[kind])
    assert shape_of(values).parameters == pytest.approx(parameters, rel=0.0005)


@pytest.mark.parametrize(
    ("values", "parameters"),
    [
        ({"model_type": "phi3", "num_hidden_layers": 32, "hidden_size": 3072, "intermediate_size": 8192}, 3.82e9),
        ({"model_type": "gemma", "num_hidden_layers": 18, "hidden_size": 2048, "intermediate_size": 16384}, 2.51e9),
    ],
)
def test_sizes_are_those_that_their_authors_say(values: dict[str, Any], parameters: float) -> None:
    phi = {"num_attention_heads": 32, "vocab_size": 32064}
    gemma = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000}
    more = phi if values["model_type"] == "phi3" else gemma
    assert shape_of({**values, **more}).parameters == pytest.approx(parameters, rel=0.003)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({**LLAMA, "model_type": "rwkv"}, "model_type = 'rwkv': blocks are known of apertus, .* say the model_type of one"),
        (
            {**LLAMA, "model_type": "jamba", "num_experts": 16},
            "model_type = 'jamba': of mixtures, blocks are known of deep",
        ),
        ({**LLAMA, "vision_config": {"a": 1}}, "vision_config = '...': only what reads text is planned"),
        ({**LLAMA, "model_type": "opt", "word_embed_proj_dim": 32}, "word_embed_proj_dim = 32: is not the hidden size 64"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts = None: a mixtral has several experts"),
        ({**LLAMA, "intermediate_size": None}, "intermediate_size = None: is not in the configuration"),
        ({**LLAMA, "intermediate_size": "128"}, "intermediate_size = '128': is no whole number"),
        ({**LLAMA, "intermediate_size": [128] * 4}, r"intermediate_size = \[128, .*: is no whole number"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads = 0: is no whole number from 1 on"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers = 0: is no whole number from 1 on"),
        ({**LLAMA, "num_hidden_layers": -3}, "num_hidden_layers = -3: is no whole number from 1 on"),
        ({**LLAMA, "vocab_size": True}, "vocab_size = True: is no whole number from 1 on"),
        ({**LLAMA, "hidden_size": 64.0}, "hidden_size = 64.0: is no whole number from 1 on"),
        ({**LLAMA, "num_key_value_heads": 3}, "kv_heads = 3: does not divide 4 heads"),
        ({**MIXTRAL, "num_experts_per_tok": 16}, "used_experts = 16: is more than 8 experts"),
        ({**MIXTRAL, "mlp_only_layers": "0"}, "mlp_only_layers = '0': is no list"),
        ([LLAMA], "model = 'list': is no configuration of a model"),
        ({**LLAMA, "text_config": 5}, "model = 'dict': is no configuration of a model"),
    ],
)
def test_what_is_no_model_is_told(values: Any, reason: str, tmp_path: Path) -> None:
    """From a file, with its name."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=reason) as error:
        read_shape(path)
    assert str(path) in str(error.value)


def test_a_text_config_without_anything_is_none() -> None:
    assert shape_of({**LLAMA, "text_config": None}) == shape_of(LLAMA)
    assert shape_of({"text_config": LLAMA}) == shape_of(LLAMA)


def test_a_shape_is_checked_where_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"layers = -1: is no whole number from 1 on.*\n.*ffn = 1.5"):
        ModelShape(-1, 64, 4, 4, 16, 1.5, 3, 1000)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dense_layers = 2: leaves none of 2 blocks with experts"):
        ModelShape(2, 64, 4, 4, 16, 128, 3, 1000, experts=4, dense_layers=2, dense_ffn=128)


def test_biases_are_those_of_layers() -> None:
    every = ModelKind(bias_keys={"one": ("query key value", True), "two": ("output", False), "three": ("mlp", False)})
    assert every.biases({}) == "qkv"
    assert every.biases({"two": True}) == "attention"
    assert every.biases({"two": True, "three": True}) == "all"
    assert every.biases({"one": False, "three": True}) == "mlp"
    assert every.biases({"one": False}) == ""
