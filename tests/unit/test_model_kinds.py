"""The planner's table of model kinds, against transformers' own classes: parameters by the defaults of each class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import by_day

import zerorun
from zerorun.errors import ConfigError, ZerorunError
from zerorun.plan.small_model_copies import narrow
from zerorun.planner.candidate import RunCandidate, candidate_config
from zerorun.planner.comparison import compared
from zerorun.planner.footprint import footprint
from zerorun.planner.hardware import cluster_of
from zerorun.planner.model_configs import read_shape, shape_of
from zerorun.planner.model_kinds import FEATURES, KINDS, ModelKind
from zerorun.planner.model_shape import ModelShape
from zerorun.planner.search import Goal, degrees, odd_layer

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


# -- what zerorun takes of a kind ----------------------------------------------------------------------------------

LIMITED = tuple(kind for kind, known in KINDS.items() if known.cannot)
ASKED: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel": {"size": 2, "sequence_parallel": False}},
    "rows": {"tensor_parallel": {"size": 2, "sequence_parallel": True}},
    "stages": {"pipeline": {"stages": 2}},
    "context": {"sequence_parallel_size": 2},
    "fp8": {"fp8": {"enabled": True, "recipe": "rowwise"}},
}
PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 1},
}


def tiny(kind: str) -> tuple[torch.nn.Module, ModelShape]:
    layers = transformers.CONFIG_MAPPING[kind].attribute_map.get("num_hidden_layers", "num_hidden_layers")
    config = transformers.AutoConfig.for_model(kind, **{**NEEDED.get(kind, {}), layers: LAYERS})
    narrow(config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config), shape_of(config.to_dict())


@pytest.mark.parametrize("kind", by_day(tuple(KINDS), "llama", "qwen3_moe", "bloom", "codegen", "falcon", "gptj", "mpt"))
def test_what_may_be_planned_for_a_kind_is_taken(kind: str) -> None:
    """On two GPUs: each degree alone, in bf16 and in fp8. Tensor ranks really divide it, maybe but for its embedding."""
    model, shape = tiny(kind)
    ways: dict[tuple[Any, ...], RunCandidate] = {}
    for precision in ("bf16", "fp8"):
        try:
            for one in degrees(shape, cluster_of("2xH100"), Goal(1 << 14, 4, precision=precision)):
                ways.setdefault((precision, one.tensor, one.pipe, one.context, one.sequence_parallel, one.expert), one)
        except ConfigError:
            assert precision == "fp8" and ("fp8" in shape.cannot or odd_layer(shape, 1))
    for way, one in ways.items():
        found = zerorun.estimate_memory(model, candidate_config(one), 2, device="cuda").kinds["parameters"]
        assert found == pytest.approx(footprint(shape, one).kinds["parameters"], rel=0.1), way


@pytest.mark.parametrize("kind", LIMITED)
def test_what_is_not_planned_for_a_kind_is_refused(kind: str) -> None:
    """Or does nothing: tensor ranks leave all blocks of the model whole."""
    model, shape = tiny(kind)
    assert shape.cannot <= {*FEATURES} == {*ASKED}
    for feature in shape.cannot:
        if (kind, feature) == ("hunyuan_v1_dense", "tensor"):
            continue
        with pytest.raises(ZerorunError):
            zerorun.estimate_memory(model, {**PLAIN, **ASKED[feature]}, 2, device="cuda")


def test_fp8_of_a_plan_fits_the_layers() -> None:
    """Of a kind whose layers are others, and of sides that are no multiple of 16, whole or on a tensor rank."""
    gpt2 = {**LLAMA, "model_type": "gpt2", "n_positions": 4096}
    with pytest.raises(ConfigError, match=r'goal\.precision = "fp8": is for nn\.Linear'):
        zerorun.plan_run(gpt2, "8xH100", {"precision": "fp8"})
    with pytest.raises(ConfigError, match="sides that are multiples of 16, and 'gate' has others"):
        zerorun.plan_run({**LLAMA, "intermediate_size": 136}, "8xH100", {"precision": "fp8"})
    odd = shape_of({**LLAMA, "intermediate_size": 144})
    for precision, most in (("bf16", 4), ("fp8", 1)):
        found = {one.tensor for one in degrees(odd, cluster_of("8xH100"), Goal(precision=precision))}
        assert max(found) == most


@pytest.mark.parametrize(
    ("model", "section", "reason"),
    [
        ("bloom", "tensor", r"tensor_parallel\.size = 2: is not for models of this kind"),
        ("olmo2", "rows", r"tensor_parallel\.sequence_parallel = true: is not for models of this kind"),
        ("nanochat", "stages", r"pipeline\.stages = 2: is not for models of this kind"),
        ("gptj", "context", r"sequence_parallel_size = 2: is not for models of this kind"),
        ("gpt2", "fp8", r"fp8\.enabled = true: is not for models of this kind"),
        ("llama", "fp8", r"fp8\.enabled = true: needs sides that are multiples of 16, and of 'gate' a rank has others"),
    ],
)
def test_what_is_refused_is_not_compared(model: str, section: str, reason: str, tmp_path: Path) -> None:
    odd = {"intermediate_size": 144} if model == "llama" else {}
    plan = zerorun.plan_run({**LLAMA, **odd, "model_type": model}, "8xH100", {"sequence": 1024, "batch": 16})
    tensor = ASKED["tensor"] if model == "llama" else {}
    path = tmp_path / "given.json"
    path.write_text(json.dumps({**PLAIN, **tensor, **ASKED[section]}), encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        compared(path, plan)


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
        ({**LLAMA, "model_type": "rwkv"}, 'model_type = "rwkv": blocks are known of apertus, .* say the model_type of one'),
        (
            {**LLAMA, "model_type": "jamba", "num_experts": 16},
            'model_type = "jamba": of mixtures, blocks are known of deep',
        ),
        ({**LLAMA, "vision_config": {"a": 1}}, 'vision_config = "...": only what reads text is planned'),
        ({**LLAMA, "model_type": "opt", "word_embed_proj_dim": 32}, "word_embed_proj_dim = 32: is not the hidden size 64"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts = null: a mixtral has several experts"),
        ({**LLAMA, "intermediate_size": None}, "intermediate_size = null: is not in the configuration"),
        ({**LLAMA, "num_hidden_layers": 10**9}, r"layers = 1000000000: is more than the 10,000 blocks"),
        ({**LLAMA, "intermediate_size": "128"}, 'intermediate_size = "128": is no whole number'),
        ({**LLAMA, "intermediate_size": [128] * 4}, r"intermediate_size = \[128, .*: is no whole number"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads = 0: is no whole number from 1 on"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers = 0: is no whole number from 1 on"),
        ({**LLAMA, "num_hidden_layers": -3}, "num_hidden_layers = -3: is no whole number from 1 on"),
        ({**LLAMA, "vocab_size": True}, "vocab_size = true: is no whole number from 1 on"),
        ({**LLAMA, "hidden_size": 64.0}, "hidden_size = 64.0: is no whole number from 1 on"),
        ({**LLAMA, "num_key_value_heads": 3}, "kv_heads = 3: does not divide 4 heads"),
        ({**MIXTRAL, "num_experts_per_tok": 16}, "used_experts = 16: is more than 8 experts"),
        ({**MIXTRAL, "mlp_only_layers": "0"}, 'mlp_only_layers = "0": is no list'),
        ([LLAMA], 'model = "list": is no configuration of a model'),
        ({**LLAMA, "text_config": 5}, 'model = "dict": is no configuration of a model'),
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
