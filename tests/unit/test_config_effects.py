"""No key is accepted in silence: each one is read, or says with a mark why it has no effect."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic.fields import FieldInfo

import zerorun
from zerorun.config.fields import Inert, OnlyStages, Refused, Section, section_of
from zerorun.config.params import OPTIMIZERS, SCHEDULERS, TORCH_SCHEDULERS, find_kind, wrong_name
from zerorun.config.parse import Config, ModelFacts, load_config, resolve
from zerorun.config.schema import Optimizer, Scheduler
from zerorun.errors import ConfigError
from zerorun.optim import lr_schedules
from zerorun.optim.optimizers import resolve_optimizer

PACKAGE = Path(zerorun.__file__).parent

# What the engine reads, by the names of the attributes.
READ_BY_THE_ENGINE = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "steps_per_print dataloader_drop_last seed gradient_clipping gradient_allreduce_op communication_data_type "
    "communication_timeout_s hang_timeout_s wall_clock_breakdown sequence_parallel_size",
    "flops_profiler.": "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
    "comms_logger.": "enabled verbose prof_all prof_ops",
    "fp16.": "enabled loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale",
    "bf16.": "enabled check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states store_param_remainders "
    "rounding",
    "fp8.": "enabled recipe filter_fqns enable_fsdp_float8_all_gather emulate",
    "torch_autocast.": "enabled dtype",
    "zero_optimization.": "stage unit_policy unit_block_count unit_numel shard_degree hybrid_shard overlap_comm "
    "prefetch_bucket_size max_live_parameters ignore_unused_parameters gather_16bit_weights_on_model_save "
    "zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients zero_quantized_gradients_bits zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param.": "err_beta reset_T",
    "zero_optimization.leaf_module.": "classes names name_suffixes",
    "zero_optimization.offload_optimizer.": "device pin_memory ratio nvme_path",
    "zero_optimization.offload_param.": "device pin_memory nvme_path",
    "optimizer.": "type params",
    "scheduler.": "type params",
    "activation_checkpointing.": "policy every_n cpu_checkpointing",
    "compile.": "enabled backend kwargs",
    "pipeline.": "stages schedule chunks partition activation_checkpoint_interval",
    "tensor_parallel.": "size plan sequence_parallel vocab_parallel_loss",
    "context_parallel.": "method in_evaluation",
    "expert_parallel.": "enabled autoep_size",
    "dataloader.": "shuffle num_workers divide_stream",
    "data_types.": "buffer_dtype",
    "tensorboard.": "enabled output_path job_name",
    "csv_monitor.": "enabled output_path job_name",
    "wandb.": "enabled group team project",
    "comet.": "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    "checkpoint.": "dir auto_resume keep_last every_steps every_minutes on_signal asynchronous",
    "checkpoint.in_memory.": "every_steps",
}
# What the configuration itself compares with the facts, or turns into another key, in resolve and load_config.
READ_BY_THE_CONFIGURATION = {
    "": "data_parallel_size",
    "data_types.": "param_dtype grad_accum_dtype",
    "optimizer.": "allow_fallback",
    "tensor_parallel.": "autotp_size tp_size",
    "tensor_parallel.tp.": "tp_size",
    "context_parallel.": "size",
    "zero_optimization.": "mics_shard_size",
}

Entry = tuple[str, type[Section], str, FieldInfo]  # path (ends with a dot or is empty), section, attribute, field


def fields(section: type[Section] = Config, path: str = "") -> Iterator[Entry]:
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is None:
            yield path, section, name, field
        else:
            yield from fields(inner, f"{path}{field.alias or name}.")


def dotted(table: dict[str, str]) -> set[str]:
    return {path + name for path, names in table.items() for name in names.split()}


def source_of(configuration: bool) -> str:
    engine = ("distributed", "optim", "plan", "zero", "activations", "model_setup", "memory", "monitors", "engine")
    folders = ("config",) if configuration else engine
    return "\n".join(path.read_text() for folder in folders for path in (PACKAGE / folder).rglob("*.py"))


def noted_by_its_switch(section: type[Section]) -> bool:
    """The section does nothing at all, and switching it on is noted."""
    switch = section.model_fields.get("enabled")
    return switch is not None and any(isinstance(mark, Inert) and mark.unless is False for mark in switch.metadata)


def test_every_key_is_read_or_marked() -> None:
    known = dotted(READ_BY_THE_ENGINE) | dotted(READ_BY_THE_CONFIGURATION)
    silent = [
        path + name
        for path, section, name, field in fields()
        if path + name not in known
        and not any(isinstance(mark, (Inert, Refused, OnlyStages)) for mark in field.metadata)
        and not noted_by_its_switch(section)
    ]
    assert not silent


def test_keys_that_are_read_have_no_mark_against_it() -> None:
    known = dotted(READ_BY_THE_ENGINE) | dotted(READ_BY_THE_CONFIGURATION)
    entries = {path + name: field for path, _, name, field in fields()}
    assert known <= entries.keys()
    assert not [key for key in known if any(isinstance(mark, (Inert, Refused)) for mark in entries[key].metadata)]


@pytest.mark.parametrize(("table", "configuration"), [(READ_BY_THE_ENGINE, False), (READ_BY_THE_CONFIGURATION, True)])
def test_keys_that_are_read_occur_in_the_source(table: dict[str, str], configuration: bool) -> None:
    source = source_of(configuration)
    names = {key.rpartition(".")[2] for key in dotted(table)}
    assert not [name for name in names if not re.search(rf'\.{name}\b|"{name}"', source)]


# Prints section -> keys that DeepSpeed takes: of its models, and of what it looks up at the top level and in data_types.
_OF_DEEPSPEED = """
import dataclasses, json, re, warnings
warnings.simplefilter("ignore")
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.module_inject.auto_ep_presets.base import AutoEPConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config, constants
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.activation_checkpointing import config as recomputation
from deepspeed.runtime.swap_tensor import constants as disks
from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

models = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "tensor_parallel": TPTrainingConfig,
    "tensor_parallel.tp": TPConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
}
found = {name: [field.alias or key for key, field in kind.model_fields.items()] for name, kind in models.items()}
found["expert_parallel"] = [each.name for each in dataclasses.fields(AutoEPConfig) if not each.name.startswith("_")]
for name, module, begin in (("aio", disks, "AIO_"), ("activation_checkpointing", recomputation, "ACT_CHKPT_")):
    words = {word: value for word, value in vars(module).items() if word.startswith(begin) and isinstance(value, str)}
    found[name] = [value for word, value in words.items() if not word.endswith(("_DEFAULT", "_FORMAT"))]
source = open(config.__file__).read()
for name, pattern in {
    "": r"get_scalar_param\\(param_dict, ([A-Z_0-9]+)",
    "data_types": r"data_types_params.get\\(([A-Z_0-9]+)",
}.items():
    found[name] = [getattr(constants, word) for word in re.findall(pattern, source)]
print(json.dumps(found))
"""


@pytest.mark.nightly
def test_every_key_of_deepspeed_is_known() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    environment = {key: value for key, value in os.environ.items() if key != "ZERORUN_AS_DEEPSPEED"}
    done = subprocess.run([sys.executable, "-c", _OF_DEEPSPEED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found[""]) > 10 and len(found["data_types"]) > 3 and len(found["aio"]) > 3
    unknown = []
    for path, keys in found.items():
        section: type[Section] = Config
        for word in filter(None, path.split(".")):
            kind = section_of(section.fields_by_key()[word])
            assert kind is not None
            section = kind
        unknown += [f"{path}.{key}" for key in keys if key not in section.spellings() and key not in section.features]
    assert not unknown


def test_features_have_a_reason_and_are_no_fields() -> None:
    for section in {section for _, section, _, _ in fields()}:
        assert all(feature.reason for feature in section.features.values())
        assert not section.features.keys() & section.spellings().keys()


# Candidates: the first that the key accepts and that is not what happens anyway.
_CANDIDATES: tuple[Any, ...] = (True, False, 7, 1, 0.5, "fp16", "ignore", "x", ["x"], {"x": {"y": 1}}, {"x": 1})
INERT = [
    pytest.param(path, section, field.alias or name, field, id=path + name)
    for path, section, name, field in fields()
    if any(isinstance(mark, Inert) for mark in field.metadata)
]


@pytest.mark.parametrize(("path", "section", "key", "field"), INERT)
def test_every_inert_key_is_noted_once(path: str, section: type[Section], key: str, field: FieldInfo) -> None:
    (mark,) = (mark for mark in field.metadata if isinstance(mark, Inert))
    for candidate in _CANDIDATES:
        source: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
        place = source
        for step in path.split(".")[:-1]:
            place = place.setdefault(step, {})
        if path == "optimizer.":
            place["type"] = "SGD"
        place |= {"enabled": True} if "enabled" in section.model_fields else {}
        place |= {"device": "cpu"} if path.startswith("zero_optimization.offload") else {}
        place[key] = candidate
        try:
            config = load_config(source)
        except ConfigError:
            continue
        notes = [note.reason for note in config.notes if note.key == path + key]
        if notes or candidate != mark.unless:
            again = resolve(config, data_parallel_size=1)
            assert notes == [note.reason for note in again.notes if note.key == path + key]
            if notes:
                assert notes == [mark.reason]
                return
    pytest.fail("no value of the key is noted")


@pytest.mark.parametrize(
    ("zero", "key"),
    [
        ({"reduce_bucket_size": 0}, "reduce_bucket_size"),
        ({"allgather_bucket_size": 2e8}, "allgather_bucket_size"),
        ({"reduce_scatter": False}, "reduce_scatter"),
        ({"stage3_param_persistence_threshold": 0}, "stage3_param_persistence_threshold"),
        ({"model_persistence_threshold": 10}, "stage3_model_persistence_threshold"),
        ({"reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}, None),
        ({"reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "reduce_scatter": True}, None),
        ({"unit_numel": "auto", "stage3_gather_16bit_weights_on_model_save": "auto"}, None),
    ],
)
def test_tuning_keys(zero: dict[str, Any], key: str | None) -> None:
    expected = [] if key is None else [f"zero_optimization.{key}"]
    for stage in (2, 3):
        source = {"train_batch_size": 8, "gradient_clipping": 0, "zero_optimization": {"stage": stage, **zero}}
        config = load_config(source)
        assert [note.key for note in config.notes] == expected
        resolved = resolve(config, data_parallel_size=2, model_facts=ModelFacts(64))
        assert [note.key for note in resolved.notes] == expected


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_casting_inputs_is_what_happens(precision: str) -> None:
    def notes(value: bool) -> list[str]:
        section = {"enabled": True, "auto_cast": value}
        return [note.key for note in load_config({"gradient_clipping": 0, precision: section}).notes]

    assert (notes(True), notes(False)) == ([], [f"{precision}.auto_cast"])


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ({"compile": {"enabled": True, "backend": "eager"}}, []),
        ({"compile": {"enabled": False, "backend": "eager"}}, []),
        ({"compile": {"disable": True}}, []),
        ({"compile": {"deepcompile": False}}, []),
        ({"compile": {"disable": False, "backend": "inductor"}}, ["compile"]),
        ({"compile": {"kwargs": {"dynamic": True}}}, ["compile"]),
        ({"compile": {"enabled": True, "kwargs": {"dynamic": True}}}, []),
        ({"fp16": {"loss_scale": 0}}, ["fp16"]),
        ({"fp16": {"enabled": "auto", "loss_scale": 0}}, []),
        ({"fp16": {"enabled": False, "loss_scale": 0}}, []),
        ({"flops_profiler": {"profile_step": 5}}, ["flops_profiler"]),
        ({"timers": {"throughput": {"enabled": True}}}, ["timers.throughput.enabled"]),
    ],
)
def test_sections_that_are_off(source: dict[str, Any], keys: list[str]) -> None:
    assert [note.key for note in load_config({"gradient_clipping": 0, **source}).notes] == keys


def test_compile_is_off_unless_enabled() -> None:
    assert (Config().compile.enabled, Config().compile.backend) == (False, "inductor")
    compile_ = load_config({"compile": {"enabled": True, "backend": "eager"}}).compile
    assert (compile_.enabled, compile_.backend) == (True, "eager")
    with pytest.raises(ConfigError, match=r"compile\.kwargs\.backend"):
        load_config({"compile": {"enabled": True, "kwargs": {"backend": "eager"}}})
    with pytest.raises(ConfigError, match="both true"):
        load_config({"compile": {"enabled": True, "disable": True}})


def test_defaults_of_optional_sections_are_not_printed() -> None:
    source = {"optimizer": {"type": "SGD"}, "scheduler": {"type": "WarmupLR"}}
    text = load_config(source).describe()
    assert "legacy_fusion" not in text
    assert 'optimizer.type = "SGD"' in text
    assert "legacy_fusion = true" in load_config({"optimizer": {"type": "SGD", "legacy_fusion": True}}).describe()


# Keywords


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_keyword_is_taken_or_marked(kind: str) -> None:
    for name, field in OPTIMIZERS[kind].model_fields.items():
        if not any(isinstance(mark, (Inert, Refused)) for mark in field.metadata):
            resolve_optimizer(kind, {name: 0})  # raises ConfigError for a keyword that the class has not


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_schedule_keyword_is_taken(kind: str) -> None:
    formula = inspect.signature(getattr(lr_schedules, kind)).parameters
    assert SCHEDULERS[kind].model_fields.keys() - {"last_batch_iteration"} == formula.keys()


def keywords(torch_class: type, *own: str) -> dict[str, inspect.Parameter]:
    found = inspect.signature(torch_class).parameters
    return {name: parameter for name, parameter in found.items() if name not in own}


def test_tables_have_all_optimizers_of_torch() -> None:
    """They may have more: a later torch drops a keyword, or an earlier one has not got it yet."""
    classes = [
        kind for kind in vars(torch.optim).values() if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    ]
    for found in classes:
        kind = find_kind("optimizer", found.__name__)
        if kind is None:
            problem = wrong_name("optimizer", found.__name__, {})
            assert found is torch.optim.Optimizer or (problem is not None and problem.remedy.startswith("Use"))
            continue
        # Adam means AdamW unless adam_w_mode is false, which is how to ask for this.
        known = {*kind.params.model_fields, *(["decoupled_weight_decay"] if kind.name == "Adam" else [])}
        assert keywords(found, "params").keys() <= known, kind.name
    own = {"Lion", "Lamb", "AdamSAGE", "Sophia", "SophiaG"} | {name for name in OPTIMIZERS if "8bit" in name}
    assert OPTIMIZERS.keys() - own <= {kind.__name__ for kind in classes}


def test_tables_have_all_schedules_of_torch() -> None:
    lr_scheduler = torch.optim.lr_scheduler
    for name in set(lr_scheduler.__all__) - {"LRScheduler"}:
        found = keywords(getattr(lr_scheduler, name), "optimizer")
        if name not in TORCH_SCHEDULERS:
            problem = wrong_name("scheduler", name, {})
            assert problem is not None
            assert problem.remedy.startswith("Build it in the program"), name
            continue
        table = TORCH_SCHEDULERS[name]
        needed = {word for word, parameter in found.items() if parameter.default is inspect.Parameter.empty}
        assert found.keys() <= table.model_fields.keys(), name
        assert needed == set(table.required), name
    assert TORCH_SCHEDULERS.keys() <= set(lr_scheduler.__all__)


def test_walk_reaches_optional_sections() -> None:
    sections = {section for _, section, _, _ in fields()}
    assert {Optimizer, Scheduler} <= sections
