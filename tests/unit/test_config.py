"""Loading, checking, resolving and printing configurations."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerorun.config.parse import Config, EffectiveValue, ModelFacts, data_parallel_degree, load_config, main, resolve
from zerorun.config.schema import flatten
from zerorun.errors import ConfigError, ConfigProblem

HF_STYLE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}

_PURE = {"enabled": True, "bf16_master_weights_and_grads": True}


def problems_of(source: object) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return caught.value.problems


def the_problem(source: object) -> ConfigProblem:
    found = problems_of(source)
    assert len(found) == 1, found
    return found[0]


def notes_of(source: dict[str, Any]) -> dict[str, str]:
    return {note.key: note.reason for note in load_config({"gradient_clipping": 1.0, **source}).notes}


# Sources


def test_a_file_in_hjson_is_told_how_to_become_json(tmp_path: Path) -> None:
    path = tmp_path / "ds.hjson"
    path.write_text("{\n  train_batch_size: 8\n}")
    with pytest.raises(ConfigError, match=r"line 2, column 3.*double quotes.*hjson -j makes JSON"):
        load_config(path)


def test_file_with_comments_and_trailing_commas(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{ // one\n "train_batch_size": 8, # two\n /* three */ "zero_optimization": {"stage": 2,},\n}')
    config = load_config(path)
    assert (config.train_batch_size, config.zero_optimization.stage) == (8, 2)
    assert load_config(str(path)) == config


def test_comment_signs_inside_strings_stay(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(r'{"train_batch_size": 8, "aio": {}, "_c": "a \" // #,}", "checkpoint": {"dir": "a//b#c,]"}}')
    assert load_config(path).checkpoint.dir == "a//b#c,]"


def test_malformed_file_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  "train_batch_size": 8\n  "seed": 1\n}')
    with pytest.raises(ConfigError, match="line 3, column 3") as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "comma" in caught.value.problems[0].remedy


def test_duplicate_keys_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"seed": 1, "seed": 2, "fp16": {"enabled": true, "enabled": false}}')
    assert [problem.key for problem in problems_of(path)] == ["seed", "fp16.enabled"]


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b"\xff\xfe\x00", b"{" * 100_000, b'{"seed": ' + b"9" * 6000 + b"}", b'{"seed": NaN}', b"null"],
)
def test_unusable_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    problems_of(path)


@pytest.mark.parametrize("source", ["no/such/file.json", "\0", "x" * 10_000, "/", None, 3, [], b"{}", "e30x", object()])
def test_unusable_sources(source: object) -> None:
    problems_of(source)


def test_base64() -> None:
    content = {"train_batch_size": 8, "checkpoint": {"dir": "x>?~"}}
    text = base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
    assert load_config(text).train_batch_size == 8


def test_dict_is_neither_changed_nor_kept() -> None:
    source: dict[str, Any] = {
        "zero_optimization": {"cpu_offload": True, "stage": 2},
        "optimizer": {"type": "AdamW", "params": {"betas": [0.5, 0.6]}},
    }
    before = json.dumps(source)
    config = load_config(source)
    assert json.dumps(source) == before
    source["optimizer"]["params"]["betas"].append(2)
    assert config.optimizer is not None
    assert config.optimizer.params == {"betas": [0.5, 0.6]}


def test_self_containing_dict() -> None:
    source: dict[str, Any] = {}
    source["zero_optimization"] = source
    problems_of(source)


def test_a_config_loads_as_itself() -> None:
    config = load_config({"train_batch_size": 8})
    assert load_config(config) is config


# Keys and values


def test_config_is_frozen() -> None:
    config = load_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.train_batch_size = 4
    with pytest.raises(ValueError, match="frozen"):
        config.zero_optimization.stage = 4


@pytest.mark.parametrize(
    ("source", "key", "suggestion"),
    [
        ({"train_bach_size": 8}, "train_bach_size", '"train_batch_size"'),
        ({"trian_batch_size": "auto"}, "trian_batch_size", '"train_batch_size"'),
        ({"zero_optimisation": {"stage": 1}}, "zero_optimisation", '"zero_optimization"'),
        ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge", '"stage"'),
        ({"zero_optimization": {"stage3_max_live_params": 1}}, None, '"stage3_max_live_parameters"'),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, None, '"device"'),
        ({"optimizer": {"type": "adam", "params": {"betta": [0, 0]}}}, "optimizer.params.betta", '"betas"'),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}}, None, '"warmup_num_steps"'),
        ({"bf16": {"enable": True}}, "bf16.enable", '"enabled"'),
        ({"wandb": {"enable": True}}, "wandb.enable", '"enabled"'),
        ({"curriculum_learning": {"enalbed": True}}, None, '"enabled"'),
        ({"quantize_training": {"enalbed": True}}, None, '"enabled"'),
        ({"stage": 3}, "stage", "zero_optimization.stage"),
        ({"zero_optimization": {"aio": {}}}, "zero_optimization.aio", "top level"),
        ({"comms_config": {"enabled": True}}, "comms_config", '"comms_logger"'),
        ({"monitor_config": {"enabled": True}}, "monitor_config", '"tensorboard", "wandb", "csv_monitor" and "comet"'),
    ],
)
def test_unknown_keys_get_a_suggestion(source: dict[str, Any], key: str | None, suggestion: str) -> None:
    problem = the_problem(source)
    assert key in (None, problem.key)
    assert suggestion in problem.remedy


@pytest.mark.parametrize("name", ["log", "cuda_visible_devices"])
def test_what_deepspeed_never_reads_is_noted(name: str) -> None:
    assert "DeepSpeed does not read it either" in notes_of({name: {"steps_per_print": 5}})[name]
    assert the_problem({"zero_optimization": {name: 1}}).key == f"zero_optimization.{name}"  # there its pydantic refuses it


@pytest.mark.parametrize(
    ("source", "pipelined", "expected"),
    [
        ({}, False, (True, "default")),
        ({}, True, (False, "derived")),
        ({"pipeline": {"stages": 2}}, False, (False, "derived")),
        ({"dataloader": {"shuffle": True}}, True, (True, "file")),
        ({"dataloader": {"shuffle": False}}, False, (False, "file")),
        ({"dataloader": {"shuffle": "auto"}}, True, (False, "auto")),
    ],
)
def test_data_is_shuffled_but_in_pipelines(source: dict[str, Any], pipelined: bool, expected: tuple[bool, str]) -> None:
    loaded = load_config({"train_batch_size": 4, **source})
    found = resolve(loaded, data_parallel_size=2, model_facts=ModelFacts(pipelined=pipelined))
    assert (found.dataloader.shuffle, found.sources["dataloader.shuffle"]) == expected


def test_comment_keys_at_every_level() -> None:
    load_config({"_comment": 1, "//": 2, "comment": 3, "fp16": {"_x": 1}, "wandb": {"//enabled": True}})
    load_config(
        {"optimizer": {"type": "Adam", "params": {"_lr": 1}}, "scheduler": {"type": "WarmupLR", "params": {"//": 1}}}
    )


def test_whole_floats_are_integers() -> None:
    config = load_config({"train_batch_size": 8.0, "zero_optimization": {"sub_group_size": 1e14}})
    assert config.train_batch_size == 8
    assert isinstance(config.train_batch_size, int)


@pytest.mark.parametrize(
    "source",
    [
        {"train_batch_size": 8.5},
        {"train_batch_size": "8"},
        {"train_batch_size": True},
        {"train_batch_size": 0},
        {"train_batch_size": float("inf")},
        {"train_batch_size": 10**30},
        {"train_batch_size": 10**6000},
        {"gradient_clipping": -1},
        {"gradient_clipping": True},
        {"gradient_clipping": float("nan")},
        {"gradient_clipping": float("inf")},
        {"fp16": {"loss_scale": True}},
        {"fp16": {"enabled": 1}},
        {"fp16": {"enabled": "true"}},
        {"fp16": True},
        {"fp16": {"hysteresis": 0}},
        {"steps_per_print": 0},
        {"steps_per_print": 2.5},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage": "SOME_SHARD"}},
        {"zero_optimization": {"unit_policy": "by_bloc"}},
        {"zero_optimization": {"unit_policy": []}},
        {"zero_optimization": {"leaf_module": {"classes": ["A", 3]}}},
        {"communication_data_type": "int8"},
        {"communication_timeout_s": 0.001},
        {"communication_timeout_s": 1e14},
        {"gradient_allreduce_op": "max"},
        {"optimizer": {"params": {"lr": 1}}},
        {"optimizer": {"type": "Adam", "params": [1]}},
        {"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}},
        {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": []}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}},
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
        {"seed": -1},
        {"seed": object()},
        {1: 2},
    ],
)
def test_wrong_values(source: dict[Any, Any]) -> None:
    problem = the_problem(source)
    assert problem.reason
    assert problem.remedy


def test_null_is_absent() -> None:
    source = {
        "train_batch_size": None,
        "optimizer": None,
        "fp16": {"loss_scale": None},
        "data_types": {"grad_accum_dtype": None},
        "zero_optimization": {"offload_optimizer": {"device": "none", "nvme_path": None}},
        "activation_checkpointing": {"number_checkpoints": None},
    }
    assert load_config(source).fingerprint() == load_config({}).fingerprint()


def test_all_problems_at_once() -> None:
    source = {
        "train_batch_size": "x",
        "fp16": {"enabled": True, "hysteresis": "y"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 7, "zenflow": {"topk_ratio": 0.1}},
        "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 3}},
        "gradient_cliping": 1,
    }
    keys = {problem.key for problem in problems_of(source)}
    assert keys == {
        "train_batch_size",
        "fp16.hysteresis",
        "bf16.enabled",
        "zero_optimization.stage",
        "zero_optimization.zenflow",
        "optimizer.type",
        "gradient_cliping",
    }


def test_infinite_steps_per_print() -> None:
    assert load_config({"steps_per_print": float("inf")}).steps_per_print == float("inf")


@pytest.mark.parametrize("written", ["bf16", "bfloat16", "torch.bfloat16"])
def test_dtype_spellings(written: str) -> None:
    assert load_config({"communication_data_type": written}).communication_data_type == "bf16"


def test_fractional_min_loss_scale() -> None:
    assert load_config({"fp16": {"enabled": True, "min_loss_scale": 1e-10}}).fp16.min_loss_scale == 1e-10


# Old spellings


@pytest.mark.parametrize(
    "name",
    ["prefetch_bucket_size", "max_live_parameters", "param_persistence_threshold", "model_persistence_threshold"],
)
def test_stage3_prefix_is_optional(name: str) -> None:
    for spelling in (name, f"stage3_{name}"):
        config = load_config({"zero_optimization": {"stage": 3, spelling: 0}})
        assert getattr(config.zero_optimization, name) == 0
        assert config.sources[f"zero_optimization.stage3_{name}"] == "file"


@pytest.mark.parametrize(
    "name",
    [
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ],
)
def test_gather_spellings(name: str) -> None:
    config = load_config({"zero_optimization": {"stage": 3, name: True}})
    assert config.zero_optimization.gather_16bit_weights_on_model_save


def test_two_spellings_that_disagree() -> None:
    source = {"zero_optimization": {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 2}}
    assert the_problem(source).key == "zero_optimization.stage3_max_live_parameters"
    source["zero_optimization"]["max_live_parameters"] = 2
    load_config(source)


def test_old_sections() -> None:
    assert load_config({"bfloat16": {"enabled": True}}).bf16.enabled
    assert load_config({"zero_optimization": True, "allgather_size": 9}).zero_optimization.allgather_bucket_size == 9
    assert load_config({"zero_optimization": True}).zero_optimization.stage == 1
    assert load_config({"zero_optimization": False}).zero_optimization.stage == 0
    zero = {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}
    offload = load_config({"zero_optimization": zero}).zero_optimization.offload_optimizer
    assert (offload.device, offload.pin_memory) == ("cpu", False)


def test_cpu_offload_beside_the_new_key() -> None:
    zero = {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}
    assert the_problem({"zero_optimization": zero}).key == "zero_optimization.cpu_offload"


@pytest.mark.parametrize(("name", "stage"), [("NO_SHARD", 0), ("SHARD_GRAD_OP", 2), ("full_shard", 3)])
def test_stage_names(name: str, stage: int) -> None:
    zero = load_config({"zero_optimization": {"stage": name}}).zero_optimization
    assert (zero.stage, zero.hybrid_shard) == (stage, False)


def test_hybrid_shard() -> None:
    zero = load_config({"zero_optimization": {"stage": "HYBRID_SHARD"}}).zero_optimization
    assert (zero.stage, zero.hybrid_shard, zero.shard_degree) == (3, True, None)


def test_mics_becomes_the_shard_degree() -> None:
    key = "mics_shard_size"
    config = load_config({"zero_optimization": {"stage": 3, key: 4}})
    zero = config.zero_optimization
    assert (zero.hybrid_shard, zero.shard_degree) == (True, 4)
    assert config.sources["zero_optimization.shard_degree"] == "derived"
    assert the_problem({"zero_optimization": {"stage": 3, key: 4, "shard_degree": 2}}).key.endswith(key)


# Refusals


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled"),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, "torch_autocast.enabled"),
        ({"fp16": {"enabled": True, "loss_scale": 1, "min_loss_scale": 2}}, "fp16.min_loss_scale"),
        (
            {"data_types": {"keep_in_fp32_modules": ["norm"], "buffer_dtype": "bf16"}},
            "data_types.keep_in_fp32_modules",
        ),
        ({"amp": {"enabled": True}}, "amp"),
        ({"amp": {"enabled": "auto"}}, "amp.enabled"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": " "}}},
            "zero_optimization.offload_param.device",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param.device",
        ),
        (
            {"zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}},
            "zero_optimization.zeropp_loco_param",
        ),
        ({"zero_optimization": {"stage": 1, "legacy_stage1": True}}, "zero_optimization.legacy_stage1"),
        ({"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}}, "compression_training"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention"),
        ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency"),
        ({"elasticity": {"enabled": True}}, "elasticity"),
        ({"autotuning": {"enabled": True}}, "autotuning"),
        ({"nebula": {"enabled": True}}, "nebula"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"comet": {"enabled": True, "mode": "continue"}}, "comet.mode"),
        ({"eigenvalue": {"enabled": True}}, "eigenvalue"),
        ({"expert_parallel": {"enabled": True, "top_k": 2}}, "expert_parallel.top_k"),
        ({"expert_parallel": {"expert_tensor_parallel_size": 2}}, "expert_parallel.expert_tensor_parallel_size"),
        ({"graph_harvesting": True}, "graph_harvesting"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"tensor_parallel": {"size": 2, "autotp_size": 4}}, "tensor_parallel.autotp_size"),
        ({"pipeline": {"stages": 2, "schedule": "interleaved"}}, "pipeline.chunks"),
        ({"pipeline": {"stages": 2, "chunks": 2}}, "pipeline.chunks"),
        ({"sequence_parallel_size": 2, "context_parallel": {"size": 4}}, "context_parallel.size"),
        (
            {"sequence_parallel_size": 2, "tensor_parallel": {"size": 2, "sequence_parallel": True}},
            "tensor_parallel.sequence_parallel",
        ),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
        ({"bf16": {**_PURE, "store_param_remainders": True}}, "bf16.store_param_remainders"),
        ({"bf16": {"enabled": True, "rounding": "kahan", "bf16_optimizer_states": True}}, "bf16.rounding"),
        (
            {"bf16": _PURE, "zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            "zero_optimization.zero_quantized_gradients",
        ),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm"),
        ({"optimizer": {"type": "Lion", "params": {"bias_correction": False}}}, "optimizer.params.bias_correction"),
    ],
)
def test_refused_with_a_remedy(source: dict[str, Any], key: str) -> None:
    problem = the_problem(source)
    assert problem.key == key
    assert problem.remedy


@pytest.mark.parametrize("name", Config.features)
def test_the_remedy_for_a_bare_true_names_no_key_inside(name: str) -> None:
    problem = the_problem({name: True})
    assert (problem.key, "Set enabled" in problem.remedy) == (name, False)


@pytest.mark.parametrize(
    ("source", "key", "remedy"),
    [
        ({"bf16": {"bf16": True}}, "bf16.bf16", 'Remove it; "enabled" switches bf16 on or off.'),
        ({"fp16": {"fp16": True, "enabled": True}}, "fp16.fp16", 'Remove it; "enabled" switches fp16 on or off.'),
        ({"pipeline": {"pipeline": 2}}, "pipeline.pipeline", "Remove it."),
        ({"zero_optimization": {"zero_optimization": {"stage": 2}}}, "zero_optimization.zero_optimization",
         "Write what it has into the section itself."),
        ({"fp16": {"bf16": True}}, "fp16.bf16", "It belongs elsewhere: write it as bf16."),
    ],
)  # fmt: skip
def test_a_section_inside_itself_belongs_nowhere_else(source: dict[str, Any], key: str, remedy: str) -> None:
    """As in the example files of GPT-NeoX: "write it as bf16" was no help inside of bf16."""
    problem = the_problem(source)
    assert (problem.key, problem.remedy) == (key, remedy)


@pytest.mark.parametrize("key", ["mpu", "tp_group"])
def test_null_process_groups_are_absent(key: str) -> None:
    assert load_config({"tensor_parallel": {"tp": {key: None}}}).fingerprint() == load_config({}).fingerprint()
    assert "topology=" in the_problem({"tensor_parallel": {"tp": {key: "x"}}}).remedy


def test_features_are_fine_when_off() -> None:
    off = ["amp", "elasticity", "autotuning", "wandb", "nebula", "data_efficiency", "hybrid_engine", "eigenvalue"]
    assert not notes_of({name: {"enabled": False} for name in off})
    load_config({"compression_training": {"row_pruning": {"shared_parameters": {"enabled": False}}}})
    load_config({"data_efficiency": {"enabled": False, "data_routing": {"enabled": True}}})
    load_config({"sparse_attention": {}, "tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 0})


def test_the_remedy_for_one_bit_optimizers_works() -> None:
    params = {"lr": 1e-3, "freeze_step": 400, "bias_correction": False, "cuda_aware": False, "weight_decay": 0.0}
    remedy = the_problem({"optimizer": {"type": "OnebitAdam", "params": params}}).remedy
    assert '"Adam"' in remedy
    kept = {key: value for key, value in params.items() if key not in remedy}
    assert set(kept) == {"lr", "bias_correction", "weight_decay"}
    load_config({"optimizer": {"type": "Adam", "params": kept}})


def test_what_torch_has_passes_verbatim() -> None:
    source = {
        "optimizer": {"type": "ASGD", "params": {"lambd": 1e-4, "t0": None}},
        "scheduler": {"type": "StepLR", "params": {"step_size": 30}},
    }
    config = load_config(source)
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert (config.optimizer.type, config.optimizer.params) == ("ASGD", {"lambd": 1e-4})
    assert config.scheduler.params == {"step_size": 30}


@pytest.mark.parametrize(
    ("section", "name", "params", "key", "remedy"),
    [
        ("optimizer", "AdmaW", {"lr": 1}, "type", '"AdamW"'),
        ("optimizer", "zzz", {}, "type", "Use one of Adam, AdamW"),
        ("optimizer", "LBFGS", {"lr": 1}, "type", 'Use "AdamW"'),
        ("optimizer", "SparseAdam", {"lr": 1}, "type", 'Use "Adam"'),
        ("optimizer", "AdamW", {"btas": [0.9, 0.95]}, "params.btas", '"betas"'),
        ("optimizer", "asgd", {"lamda": 1e-4}, "params.lamda", '"lambd"'),
        ("optimizer", "Rprop", {"weight_decay": 0.1}, "params.weight_decay", "step_sizes"),
        ("scheduler", "WarmupLRR", {}, "type", '"WarmupLR"'),
        ("scheduler", "CosineAnealingLR", {}, "type", '"CosineAnnealingLR"'),
        ("scheduler", "zzz", {}, "type", "Use one of WarmupLR"),
        ("scheduler", "ReduceLROnPlateau", {}, "type", "training loop"),
        ("scheduler", "LambdaLR", {"lr_lambda": 1}, "type", "pass lr_scheduler="),
        ("scheduler", "cosineannealinglr", {"T_max": 5, "eta_mn": 0}, "params.eta_mn", '"eta_min"'),
        ("scheduler", "StepLR", {}, "params.step_size", '"step_size"'),
        ("scheduler", "WarmupLR", {"warmup_steps": 3}, "params.warmup_steps", '"warmup_num_steps"'),
        ("scheduler", "WarmupLR", {"warmup_num_steps": 2.5}, "params.warmup_num_steps", "Round it"),
        ("scheduler", "WarmupLR", {"warmup_num_steps": -1}, "params.warmup_num_steps", "at least 0"),
        ("scheduler", "WarmupLR", {"warmup_min_lr": [0.1, float("nan")]}, "params.warmup_min_lr[1]", "Write a number"),
        ("scheduler", "WarmupLR", {"warmup_type": "cubic"}, "params.warmup_type", "Use one of 'log', 'linear'"),
        ("scheduler", "WarmupDecayLR", {"total_num_steps": None}, "params.total_num_steps", '"total_num_steps"'),
        ("scheduler", "LRRangeTest", {"lr_range_test_step_size": 0}, "params.lr_range_test_step_size", "at least 1"),
        ("scheduler", "OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1}, "params.cycle_max_mom", "<1"),
        (
            "scheduler",
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_min_mom": [0, 1]},
            "params.cycle_min_mom",
            "<1",
        ),
    ],
)
def test_wrong_names_and_keywords(section: str, name: str, params: dict[str, Any], key: str, remedy: str) -> None:
    problem = the_problem({section: {"type": name, "params": params}})
    assert problem.key == f"{section}.{key}"
    assert remedy.replace("<", "less than ") in problem.remedy


def test_wrong_names_come_with_all_other_problems() -> None:
    source = {"optimizer": {"type": "AdmaW"}, "scheduler": {"type": "StepLR", "params": {"gama": 1}}, "seed": -1}
    found = {problem.key for problem in problems_of(source)}
    assert found == {"optimizer.type", "scheduler.params.gama", "scheduler.params.step_size", "seed"}


def test_a_section_that_is_not_used_is_not_checked() -> None:
    source = {"optimizer": {"type": "Mine", "params": {"lr": "auto"}}, "scheduler": {"type": "My", "params": {"x": 1}}}
    assert len(problems_of(source)) == 2
    config = load_config(source, optimizer_given=True, scheduler_given=True)
    given = resolve(config, data_parallel_size=1, micro_batch_hint=1, optimizer_given=True, scheduler_given=True)
    assert {"optimizer", "scheduler"} <= {note.key for note in given.notes}
    with pytest.raises(ConfigError, match=r"optimizer\.type"):
        load_config({"optimizer": {"params": {}}}, optimizer_given=True)


def test_zero_warmup_and_per_group_rates() -> None:
    params = {"warmup_num_steps": 0, "warmup_max_lr": [1e-3, 1e-4], "warmup_type": "LINEAR"}
    scheduler = load_config({"scheduler": {"type": "WarmupLR", "params": params}}).scheduler
    assert scheduler is not None
    assert scheduler.params == {"warmup_num_steps": 0, "warmup_max_lr": [1e-3, 1e-4], "warmup_type": "linear"}


# Notes


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"zero_optimization": {"contiguous_gradients": False}}, "zero_optimization.contiguous_gradients"),
        ({"zero_optimization": {"max_reuse_distance": 1}}, "zero_optimization.stage3_max_reuse_distance"),
        ({"zero_optimization": {"stage": 2, "max_live_parameters": 1}}, "zero_optimization.stage3_max_live_parameters"),
        ({"zero_optimization": {"unit_numel": 100}}, "zero_optimization.unit_numel"),
        ({"fp16": {"enabled": True, "opt_level": "O2"}}, "fp16.opt_level"),
        ({"bf16": {"enabled": True, "rounding": "nearest"}}, "bf16.rounding"),
        ({"fp16": {"enabled": True, "loss_scale": 64, "hysteresis": 2}}, "fp16.hysteresis"),
        ({"bf16": {"enabled": True, "loss_scale": 0}}, "bf16.loss_scale"),
        ({"activation_checkpointing": {"partition_activations": True}}, None),
        ({"checkpoint": {"load_universal": True}}, "checkpoint.load_universal"),
        ({"aio": {"thread_count": 2}}, "aio.intra_op_parallelism"),
        ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}}, "optimizer.type"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype"),
        ({"data_types": {"grad_accum_dtype": "float16"}}, "data_types.grad_accum_dtype"),
        ({"autotuning": "auto"}, "autotuning"),
        ({"autotuning": {"enabled": "auto"}}, "autotuning"),
        ({"wandb": {"project": "p"}}, "wandb"),
        ({"autotuning": {"fast": False}}, "autotuning"),
        ({"tensor_parallel": {"sequence_parallel": True}}, "tensor_parallel.sequence_parallel"),
        ({"tensor_parallel": {"size": 1, "vocab_parallel_loss": True}}, "tensor_parallel.vocab_parallel_loss"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.3}}}, "zero_optimization.offload_optimizer.ratio"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "none", "max_in_cpu": 5}}},
            "zero_optimization.offload_param.max_in_cpu",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "none", "nvme_path": "/x"}}},
            "zero_optimization.offload_optimizer.nvme_path",
        ),
        ({"torch_autocast": {"enabled": False, "dtype": "fp16"}}, "torch_autocast.dtype"),
        ({"torch_autocast": {"dtype": "fp16"}}, "torch_autocast"),
        ({"disable_python_gc": True}, "disable_python_gc"),
        ({"data_types": {"keep_in_fp32_modules": ["norm"]}}, "data_types.keep_in_fp32_modules"),
        ({"compile": {"enabled": True, "autoep_non_moe": True}}, "compile.autoep_non_moe"),
        ({"compile": {"enabled": True, "offload_activation_pin_memory": True}}, "compile.offload_activation_pin_memory"),
        ({"tensor_parallel": {"vocab_parallel_ce_backend": "liger"}}, "tensor_parallel.vocab_parallel_ce_backend"),
        ({"tensor_parallel": {"kernel_inject": True}}, "tensor_parallel.replace_with_kernel_inject"),
        ({"tensor_parallel": {"vocab_parallel_lm_head": True}}, "tensor_parallel.vocab_parallel_loss"),
    ],
)
def test_keys_with_nothing_to_do_are_noted(source: dict[str, Any], key: str | None) -> None:
    notes = notes_of(source)
    assert len(notes) == 1
    assert key is None or key in notes


def test_the_head_of_deepspeed_is_the_divided_loss() -> None:
    for given in (True, False, None):
        section = load_config({"tensor_parallel": {"size": 2, "vocab_parallel_lm_head": given}}).tensor_parallel
        assert section.vocab_parallel_loss is bool(given)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"prof_all": False, "prof_ops": ["all_gathr"]}, ("prof_ops: ", "'all_gathr'", 'Did you mean "all_gather"')),
        ({"prof_all": False, "prof_ops": ["irecv"]}, ("prof_ops: ", "'irecv'", "all_gather, all_reduce, broadcast")),
        ({"prof_all": False}, ("comms_logger.prof_all", "no collective is counted")),
        ({"prof_ops": ["all_gather"]}, ("comms_logger.prof_ops", "all collectives are counted")),
        ({"prof_all": False, "prof_ops": ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]}, ()),
        ({"prof_all": False, "enabled": False}, ()),
    ],
)
def test_it_is_told_which_collectives_are_not_counted(section: dict[str, Any], words: tuple[str, ...]) -> None:
    notes = notes_of({"comms_logger": {"enabled": True, **section}})
    text = "".join(f"{key}: {reason}" for key, reason in notes.items())
    assert len(notes) == bool(words)
    assert all(word in text for word in words), text


def test_what_divides_kept_activations_is_named() -> None:
    notes = notes_of({"activation_checkpointing": {"partition_activations": True}, "tensor_parallel": {"size": 2}})
    assert notes == {
        "activation_checkpointing.partition_activations": "tensor_parallel.sequence_parallel divides between tensor ranks "
        "what is kept."
    }


def test_what_happens_anyway_is_not_noted() -> None:
    assert not notes_of({"data_types": {"keep_in_fp32_modules": "auto", "buffer_dtype": "bf16"}})
    assert not notes_of({"data_types": {"keep_in_fp32_modules": []}, "disable_python_gc": False})
    assert not notes_of({"tensor_parallel": {"vocab_parallel_ce_backend": "torch"}})
    zero = {
        "stage": 1,
        "contiguous_gradients": True,
        "allgather_partitions": True,
        "offload_optimizer": {"device": "none", "pin_memory": True, "ratio": 1},
    }
    assert not notes_of({"zero_optimization": zero, "wall_clock_breakdown": False, "fp16": {"enabled": False}})
    assert not notes_of({"data_types": {"grad_accum_dtype": "fp32"}, "torch_autocast": {"enabled": False, "dtype": "bf16"}})
    assert not notes_of({"tensor_parallel": {"sequence_parallel": False}, "wandb": {"enabled": False, "project": "p"}})
    assert not notes_of({"tensor_parallel": {"size": 2, "sequence_parallel": True}, "comet": {"project": None, "_x": 1}})


def test_default_clipping_is_said() -> None:
    config = load_config({})
    assert config.gradient_clipping == 1.0
    assert [note.key for note in config.notes] == ["gradient_clipping"]


# Resolving


def test_resolve_hf_style() -> None:
    config = resolve(
        load_config(HF_STYLE),
        data_parallel_size=8,
        model_facts=ModelFacts(hidden_size=1000),
        micro_batch_hint=4,
        learning_rate=1e-4,
        weight_decay=0.1,
        total_num_steps=50,
    )
    assert config.auto == ()
    assert '"auto"' not in json.dumps(config.as_dict())
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (32, 4)
    assert config.gradient_accumulation_steps == 1
    assert (config.bf16.enabled, config.fp16.enabled) == (True, False)
    zero = config.zero_optimization
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size, zero.param_persistence_threshold) == (
        10**6,
        900_000,
        10**4,
    )
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert config.optimizer.params == {"lr": 1e-4, "weight_decay": 0.1}
    expected = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-4, "warmup_num_steps": 0, "total_num_steps": 50}
    assert config.scheduler.params == expected
    assert config.sources["train_batch_size"] == "auto"
    assert config.sources["zero_optimization.stage"] == "file"
    assert config.sources["seed"] == "default"


def test_resolve_names_every_undecidable_auto() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(HF_STYLE), data_parallel_size=8)
    assert {problem.key for problem in caught.value.problems} == {
        "train_micro_batch_size_per_gpu",
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "scheduler.params.total_num_steps",
    }
    remedies = {problem.key: problem.remedy for problem in caught.value.problems}
    assert re.search(r"pass optimizer= .*takes --lr\.", remedies["optimizer.params.lr"])
    assert re.search(r"pass optimizer= .*takes --weight-decay\.", remedies["optimizer.params.weight_decay"])
    assert re.search(r"pass lr_scheduler= .*takes --total-steps\.", remedies["scheduler.params.total_num_steps"])


def test_given_optimizer_settles_the_optimizer_section() -> None:
    config = load_config({"train_batch_size": 8, "optimizer": HF_STYLE["optimizer"]})
    resolved = resolve(config, data_parallel_size=8, optimizer_given=True)
    assert "optimizer" in [note.key for note in resolved.notes]


def test_auto_precision_is_noted() -> None:
    config = load_config({"train_batch_size": 1, "bf16": {"enabled": "auto"}})
    told = [str(note) for note in resolve(config, data_parallel_size=1).provenance.notes]
    assert "bf16.enabled: auto chose bf16, which the device has; write false for fp32." in told


def test_auto_precision() -> None:
    def precision(source: dict[str, Any], bf16_available: bool = True) -> tuple[bool, bool]:
        config = load_config({"train_batch_size": 1, **source})
        resolved = resolve(config, data_parallel_size=1, bf16_available=bf16_available)
        return resolved.fp16.enabled, resolved.bf16.enabled

    both = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    assert precision(both) == (False, True)
    assert precision(both, bf16_available=False) == (False, False)
    assert precision({"fp16": {"enabled": "auto"}}) == (False, True)
    assert precision({"fp16": "auto"}) == (False, True)
    assert precision({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}) == (False, False)
    assert precision({"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}) == (True, False)
    assert precision({"torch_autocast": {"enabled": True}, "bf16": {"enabled": "auto"}}) == (False, False)
    with pytest.raises(ConfigError, match="no bf16"):
        precision({"bf16": {"enabled": True}}, bf16_available=False)


@pytest.mark.parametrize("key", ["stage", "whole section"])
def test_auto_stage_is_refused(key: str) -> None:
    zero = "auto" if key == "whole section" else {"stage": "auto"}
    config = load_config({"train_batch_size": 1, "zero_optimization": zero})
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage"):
        resolve(config, data_parallel_size=1)


def test_auto_accumulation_follows_the_other_sizes() -> None:
    source = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}
    assert resolve(load_config(source), data_parallel_size=8).gradient_accumulation_steps == 2


def test_hint_does_not_overrule_the_file() -> None:
    source = {"train_batch_size": 64, "gradient_accumulation_steps": 1}
    assert resolve(load_config(source), data_parallel_size=8, micro_batch_hint=2).train_micro_batch_size_per_gpu == 8
    source = {"train_micro_batch_size_per_gpu": 3}
    assert resolve(load_config(source), data_parallel_size=8, micro_batch_hint=2).train_batch_size == 24


def test_shard_degree_must_divide_the_ranks() -> None:
    config = load_config({"train_batch_size": 6, "zero_optimization": {"stage": 3, "shard_degree": 4}})
    with pytest.raises(ConfigError, match="1, 2, 3, 6"):
        resolve(config, data_parallel_size=6)


@pytest.mark.parametrize(
    ("source", "key", "remedy"),
    [
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "zero_hpz_partition_size", "one of 1, 2, 4, 8"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 3}}, "autoep_size", "one of 1, 2, 4, 8"),
        (
            {"zero_optimization": {"stage": 2, "shard_degree": 2}, "expert_parallel": {"enabled": True, "autoep_size": 16}},
            "autoep_size",
            "one of 1, 2, 4, 8",
        ),
    ],
)
def test_degrees_must_fit_the_ranks(source: dict[str, Any], key: str, remedy: str) -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1, **source})
    with pytest.raises(ConfigError) as caught:
        resolve(config, data_parallel_size=8)
    (problem,) = caught.value.problems
    assert problem.key.endswith(key) and remedy in problem.remedy


def test_degrees_that_fit_the_ranks() -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 4}
    experts = {"enabled": True, "autoep_size": 8}
    source = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "expert_parallel": experts}
    assert resolve(load_config(source), data_parallel_size=8).expert_parallel.size == 8
    alone = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    assert resolve(load_config(alone), data_parallel_size=1).zero_optimization.zero_hpz_partition_size == 8


@pytest.mark.parametrize(
    ("source", "key", "says"),
    [
        (
            {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True, "zero_quantized_gradients_bits": 16}},
            "zero_optimization.zero_quantized_gradients_bits",
            "Use one of 4 or 8.",
        ),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage", "number without quotes, such as 8"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage", "Write it as a number, such as 8"),
        ({"train_batch_size": float("inf")}, "train_batch_size", "Write a whole number"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1e-4}}}, "params.learning_rate", 'mean "lr"'),
        (
            {"optimizer": {"type": "AdamW8bit"}, "bf16": {"enabled": True, "bf16_optimizer_states": True}},
            "bf16.bf16_optimizer_states",
            'set optimizer.type to "AdamW"',
        ),
        ({"bf16": True}, "bf16", '{"enabled": true}'),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}, "offload_optimizer", '{"device": "cpu"}'),
        ({"checkpoint": {"dir": "d", "in_memory": True}}, "checkpoint.in_memory", '{"every_steps": 1}'),
        ({"checkpoint": {"dir": " "}}, "checkpoint.dir", "leave the key out"),
        ({"dataloader": {"pin_memory": True}}, "dataloader.pin_memory", "make a DataLoader with pin_memory=True"),
        ({"context_parallel": {"method": "ring"}}, "context_parallel.method", "'auto', 'ulysses', 'gather'"),
    ],
)
def test_remedies_are_what_was_wanted(source: dict[str, Any], key: str, says: str) -> None:
    problem = the_problem(source)
    assert problem.key.endswith(key) and says in problem.remedy


def test_the_value_of_a_problem_is_that_of_the_file() -> None:
    loco = {"err_beta": 0.5, "reset_T": 64}
    assert the_problem({"zero_optimization": {"stage": 2, "zeropp_loco_param": loco}}).value == loco


def test_shard_degree_below_the_ranks_is_hybrid() -> None:
    config = load_config({"train_batch_size": 8, "zero_optimization": {"stage": 3, "shard_degree": 4}})
    assert resolve(config, data_parallel_size=8).zero_optimization.hybrid_shard
    assert not resolve(config, data_parallel_size=4).zero_optimization.hybrid_shard


def test_param_dtype_must_agree() -> None:
    source = {"train_batch_size": 1, "bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}}
    resolve(load_config(source), data_parallel_size=1)
    source["data_types"] = {"param_dtype": "fp16"}
    with pytest.raises(ConfigError, match="param_dtype"):
        resolve(load_config(source), data_parallel_size=1)


def test_resolving_twice_changes_nothing() -> None:
    once = resolve(load_config({"train_batch_size": 8}), data_parallel_size=2)
    twice = resolve(once, data_parallel_size=2)
    assert twice.fingerprint() == once.fingerprint()
    assert twice.sources == once.sources


def test_as_dict_loads_again() -> None:
    source = {
        "train_batch_size": 8,
        "steps_per_print": float("inf"),
        "zero_optimization": {"stage": "HYBRID_SHARD", "mics_shard_size": 2, "unit_policy": ["Block"]},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    resolved = resolve(load_config(source), data_parallel_size=4)
    again = resolve(load_config(resolved.as_dict()), data_parallel_size=4)
    assert again.fingerprint() == resolved.fingerprint()


def test_fingerprint_sees_content_not_spelling() -> None:
    def fingerprint(source: dict[str, Any]) -> str:
        return load_config(source).fingerprint()

    assert fingerprint({"seed": 1, "bf16": {"enabled": True}}) == fingerprint({"bfloat16": {"enabled": True}, "seed": 1.0})
    assert fingerprint({"seed": 1}) != fingerprint({"seed": 2})


def test_describe_is_short_and_says_where_from() -> None:
    text = resolve(load_config({"train_batch_size": 8, "aio": {"use_gds": True}}), data_parallel_size=2).describe()
    assert "train_batch_size = 8  (file)" in text
    assert "train_micro_batch_size_per_gpu = 4  (derived)" in text
    assert "aio.use_gds: what is on the disk is updated in host memory" in text
    assert "loss_scale" not in text


def test_a_feature_that_waits_for_its_switch_stays_noted() -> None:
    config = load_config({"train_batch_size": 8, "autotuning": {"fast": True}})
    again = resolve(resolve(config, data_parallel_size=2), data_parallel_size=2)
    for found in (config, again):
        assert found.effective()["autotuning"] == EffectiveValue(
            False, "file", '"enabled" is not given, so the section is off.'
        )


def test_effective_values_say_where_from_and_why_not() -> None:
    source = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": "auto",
        "aio": {"use_gds": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1, "reduce_scatter": False},
    }
    config = resolve(load_config(source), data_parallel_size=2, optimizer_given=True)
    found = config.effective()
    assert {key: entry.value for key, entry in found.items()} == flatten(config.as_dict())
    assert {key: entry.source for key, entry in found.items()} == {key: config.sources[key] for key in found}
    for key, value, origin in (
        ("train_batch_size", 8, "file"),
        ("gradient_accumulation_steps", 1, "auto"),
        ("train_micro_batch_size_per_gpu", 4, "derived"),
        ("zero_optimization.stage", 1, "file"),
        ("pipeline.stages", 1, "default"),
    ):
        assert found[key] == EffectiveValue(value, origin, None)
    without_effect = {key for key, entry in found.items() if entry.note}
    assert without_effect >= {"zero_optimization.reduce_scatter", "optimizer.type", "optimizer.params.lr"}
    assert {note.reason for note in config.notes} == {entry.note for entry in found.values()} - {None}


# Command line


def test_cli_prints_the_resolved_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(HF_STYLE))
    arguments = [str(path), "--world-size", "64", "--micro-batch", "2", "--lr", "1e-4", "--weight-decay", "0"]
    assert main([*arguments, "--total-steps", "10"]) == 0
    assert "train_batch_size = 128  (auto)" in capsys.readouterr().out
    assert main([*arguments, "--total-steps", "10", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["train_batch_size"] == 128
    assert main(arguments) == 2
    assert "total_num_steps" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["key"] == "scheduler.params.total_num_steps"


def test_cli_survives_unprintable_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"\\ud800": 1}')
    assert main([str(path)]) == 2
    assert "\\ud800" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "code"), [("AdamW", 0), ("RMSprop", 0), ("AdmaW", 2)])
def test_module_runs_without_torch(tmp_path: Path, kind: str, code: int) -> None:
    path = tmp_path / "ds.json"
    schedule = {"type": "StepLR", "params": {"step_size": 3}}
    source = {"train_batch_size": 64, "optimizer": {"type": kind}, "scheduler": schedule}
    path.write_text(json.dumps(source))
    program = (
        "import sys; from zerorun.config import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path), "--world-size", "64"], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (code == 2) == ("Did you mean" in done.stdout)
    assert code or isinstance(load_config(path), Config)


@pytest.mark.parametrize(
    "section", ({"size": 2}, {"autotp_size": 2}, {"tp_size": 2}, {"tp": {"tp_size": 2}}, {"size": 2, "autotp_size": 2})
)
def test_every_name_of_the_tensor_degree(section: dict[str, Any]) -> None:
    config = load_config({"tensor_parallel": section, "pipeline": {"stages": 3}, "train_batch_size": 8})
    assert config.tensor_parallel.size == 2
    assert data_parallel_degree(config, 12) == 2
    assert resolve(config, data_parallel_size=2).train_micro_batch_size_per_gpu == 4
    with pytest.raises(ConfigError, match=r"pipeline.stages = 3.*8 ranks are no multiple of 2 tensor ranks x 3"):
        data_parallel_degree(config, 8)


# -- batch sizes, with everything else ---------------------------------------------------------------------------------


def written(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return path


def test_batch_sizes_are_reported_with_all_other_problems(tmp_path: Path) -> None:
    sizes = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}
    path = written(tmp_path, {**sizes, "zero_optimization": {"stage": 7}, "steps_per_prnt": 1})
    with pytest.raises(ConfigError) as caught:
        load_config(path, world_size=2)
    assert {problem.key for problem in caught.value.problems} == {
        "zero_optimization.stage",
        "steps_per_prnt",
        "train_batch_size",
    }
    assert "train_batch_size 10 (file)" in str(caught.value) and str(caught.value).startswith(f"{path}: 3 problems")


@pytest.mark.parametrize(
    "more", ({"train_batch_size": "ten"}, {"tensor_parallel": {"autotp_size": "two"}}, {"pipeline": {"stages": 0}})
)
def test_nothing_is_said_of_what_follows_from_a_wrong_value(more: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, **more})
    with pytest.raises(ConfigError) as caught:
        load_config(path, world_size=2)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "keys", (["train_micro_batch_size_per_gpu"], ["train_micro_batch_size_per_gpu", "train_batch_size"])
)
def test_batch_sizes_that_say_auto_are_told_so(keys: list[str], tmp_path: Path) -> None:
    path = written(tmp_path, dict.fromkeys(keys, "auto"))
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(path), data_parallel_size=2)
    text = str(caught.value)
    assert text.startswith(f'{path}: 1 problem\n  {keys[0]} = "auto": {" and ".join(keys)} say')
    assert "Give train_micro_batch_size_per_gpu" in text and "--micro-batch" in text
    assert resolve(load_config(path), data_parallel_size=2, micro_batch_hint=3).train_batch_size == 6


@pytest.mark.parametrize(
    ("name", "plain", "kept"),
    [("OneBitAdam", "Adam", {}), ("ZeroOneAdam", "Adam", {}), ("OneBitLamb", "Lamb", {"max_coeff": 0.3})],
)
def test_compressing_optimizers_fall_back_if_the_file_allows_it(name: str, plain: str, kept: dict[str, Any]) -> None:
    """Without their keywords of compression; otherwise the error names both ways out."""
    params = {"lr": 1e-3, **kept, "freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl"}
    section = {"type": name, "params": params}
    config = load_config({"train_batch_size": 8, "optimizer": {**section, "allow_fallback": True}})
    assert config.optimizer is not None
    assert (config.optimizer.type, config.optimizer.params) == (plain, {"lr": 1e-3, **kept})
    with pytest.raises(ConfigError, match="allow_fallback") as refused:
        load_config({"train_batch_size": 8, "optimizer": section})
    assert f'Use "{plain}", and remove freeze_step' in str(refused.value)


def test_monitors_are_off_unless_they_are_switched_on() -> None:
    for source in ({}, {"tensorboard": "auto"}, {"comet": {"enabled": "auto"}}, {"wandb": {"project": "p"}}):
        config = resolve(load_config({"train_batch_size": 8, **source}), data_parallel_size=2)
        assert not config.observes_loss
        assert not config.auto
    assert load_config({"comet": {"enabled": True}}).observes_loss
    assert load_config({"steps_per_print": 5}).observes_loss
    assert not load_config({"steps_per_print": float("inf")}).observes_loss
