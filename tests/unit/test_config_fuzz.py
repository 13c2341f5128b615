"""Thousands of damaged configurations: each gives a Config or a ConfigError, and a typo finds the key it came from."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from covering import by_day

from zerorun.config.parse import Config, ModelFacts, load_config, resolve
from zerorun.config.reader import is_comment
from zerorun.errors import ConfigError

MUTATIONS = (2_000, 10_000)  # by day, at night

_LARGE: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": math.inf,
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "communication_data_type": "fp32",
    "communication_timeout_s": 600,
    "data_types": {"grad_accum_dtype": "fp32"},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
    "zero_optimization": {
        "stage": 3,
        "unit_policy": ["Block", "Head"],
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_max_live_parameters": 1e9,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_gather_16bit_weights_on_model_save": True,
        "leaf_module": {"classes": ["Experts"]},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "mics_shard_size": 2,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 100},
    },
    "activation_checkpointing": {"partition_activations": False, "number_checkpoints": 4},
    "aio": {"block_size": 1048576, "queue_depth": 8},
    "compile": {"disable": False, "backend": "inductor"},
    "tensor_parallel": {"autotp_size": 1},
    "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}},
    "wandb": {"enabled": False, "project": "p"},
    "autotuning": {"enabled": False, "fast": True},
    "wall_clock_breakdown": False,
}
_AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "auto_cast": True},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "allgather_bucket_size": 2e8, "cpu_offload": True},
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto", "adam_w_mode": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_type": "linear"}},
}
_SMALL: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": True,
    "bfloat16": {"enabled": True},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": [0.2], "cycle_momentum": False}},
    "compression_training": {"row_pruning": {"shared_parameters": {"enabled": False}}},
}
BASES = (_LARGE, _AUTO, _SMALL)

_EXTREME: tuple[Any, ...] = (
    *(None, True, False, "", "auto", "AUTO", "none", "cpu", "\ud800", "\0", "x" * 2000, [], [[]], [None], {}, {"": {}}),
    *(0, -1, 1, 2, 3, 7, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 10**5000, 0.0, -0.0, 0.5, 1e-320, 1e308),
    *(math.inf, -math.inf, math.nan, {"enabled": True}, {"enabled": "x"}, {"type": 3}, {"params": []}, [0.9, 0.999]),
    *(object(), b"bytes", {1, 2}, (1, 2), 3 + 4j, {3: 4}, {None: 1}, Path("a"), print),
)


def _places(config: dict[Any, Any]) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Every (object, key) in the configuration."""
    for key, value in config.items():
        yield config, key
        if isinstance(value, dict):
            yield from _places(value)


def _typo(random_: random.Random, word: str) -> str:
    """One character removed, doubled, replaced, or swapped with its neighbour."""
    at = random_.randrange(len(word)) if word else 0
    kind = random_.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1 :]
    if kind == 1:
        return word[:at] + word[at : at + 1] * 2 + word[at + 1 :]
    if kind == 2:
        return word[:at] + random_.choice("abcxyz_39") + word[at + 1 :]
    return word[:at] + word[at + 1 : at + 2] + word[at : at + 1] + word[at + 2 :]


def _mutate(random_: random.Random, config: dict[Any, Any]) -> None:
    places = list(_places(config))
    if not places:
        config[random_.choice(["", "stage", "fp16"])] = copy.deepcopy(random_.choice(_EXTREME))
        return
    parent, key = random_.choice(places)
    kind = random_.randrange(7)
    if kind == 0:
        del parent[key]
    elif kind == 1:
        parent[_typo(random_, str(key))] = parent.pop(key)
    elif kind == 2:
        parent[key] = copy.deepcopy(random_.choice(_EXTREME))
    elif kind == 3:
        parent[key] = {key: parent[key]}
    elif kind == 4:
        other_parent, other_key = random_.choice(places)
        parent[other_key] = copy.deepcopy(other_parent[other_key])
    elif kind == 5:
        parent[key] = str(parent[key]) if isinstance(parent[key], (float, bool, list)) else [parent[key]]
    elif isinstance(parent[key], dict):
        config.update(parent[key])
    else:
        parent[key] = random_.choice([1, -1, 0.5, 1e9]) * random_.choice([1, 2, 3.7])


@pytest.mark.parametrize("mutations", by_day(MUTATIONS, MUTATIONS[0]))
def test_random_damage_gives_a_config_or_a_config_error(mutations: int) -> None:
    random_ = random.Random(20261121)
    loaded = resolved = 0
    for _ in range(mutations):
        config: dict[Any, Any] = copy.deepcopy(random_.choice(BASES))
        for _ in range(random_.choice([1, 1, 1, 2, 3, 8])):
            _mutate(random_, config)
        try:
            result = load_config(config)
            loaded += 1
            assert isinstance(result, Config)
            final = resolve(
                result,
                data_parallel_size=random_.choice([1, 2, 8]),
                micro_batch_hint=4,
                learning_rate=1e-3,
                model_facts=ModelFacts(64),
            )
            resolved += 1
            assert not final.auto
            final.describe()
        except ConfigError as error:
            assert error.problems
            assert all(problem.key is not None and problem.reason and problem.remedy for problem in error.problems)
    # Neither outcome may be the only one, or the mutations test nothing.
    assert 0.1 * mutations < resolved <= loaded < 0.7 * mutations


def test_random_damage_to_the_text(tmp_path: Path) -> None:
    random_ = random.Random(7)
    text = json.dumps(_LARGE, indent=1)
    path = tmp_path / "ds.json"
    for _ in range(300):
        damaged = text
        for _ in range(random_.choice([1, 2, 5])):
            at = random_.randrange(len(damaged))
            damaged = (
                damaged[:at]
                + random_.choice(['"', "{", "}", "[", ",", ":", "//", "#", "\\", "9", "e", ""])
                + damaged[at + 1 :]
            )
        path.write_text(damaged)
        try:
            load_config(path)
        except ConfigError as error:
            assert str(path) in str(error)


def _typos() -> Iterator[tuple[dict[str, Any], str, str]]:
    """Each base configuration with one character of one key changed: (configuration, key, wrong spelling)."""
    random_ = random.Random(3)
    for base in BASES:
        for index, (_, key) in enumerate(list(_places(base))):
            for _ in range(4):
                config = copy.deepcopy(base)
                parent, _ = list(_places(config))[index]
                wrong = _typo(random_, key)
                if wrong in parent or is_comment(wrong) or wrong == key:
                    continue
                parent[wrong] = parent.pop(key)
                yield config, key, wrong


# Free objects, whose content belongs to a feature that is off, are not looked into.
_FREE = {"shared_parameters"}


def test_every_typo_suggests_the_original() -> None:
    tried = 0
    for config, key, wrong in _typos():
        if key in _FREE or (key == "enabled" and "compression_training" in config):
            continue
        try:
            load_config(config)
        except ConfigError as error:
            remedies = [problem.remedy for problem in error.problems if problem.key.rpartition(".")[2] == wrong]
            if not remedies and "is another spelling" in str(error):
                continue
            assert remedies, (wrong, str(error))
            assert f'"{key}"' in remedies[0] or key in remedies[0], (wrong, remedies)
            tried += 1
        else:
            # A changed character may give another known key (lr -> l would not, bf16 -> fp16 does).
            pytest.fail(f"{wrong!r} for {key!r} was accepted")
    assert tried > 300
