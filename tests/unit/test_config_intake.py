"""What initialize() makes of its arguments before any unit is built."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zerorun import log
from zerorun.config.parse import Config
from zerorun.errors import ConfigError
from zerorun.model_setup.checked_arguments import take_in
from zerorun.pipeline.module import PipelineModule
from zerorun.plan.make_plan import wire_dtype

BASE: dict[str, Any] = {"train_batch_size": 1, "gradient_clipping": 0}
SGD = torch.optim.SGD
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def given(config: Any, args: Any = None, **others: Any) -> Config:
    model = others.pop("model", None) or nn.Linear(2, 2)
    return take_in(model, config, args, others.pop("optimizer", None), others.pop("groups", None), 1, **others)[0]


def refused(config: Any, args: Any = None, **others: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        given(config, args, **others)
    return {problem.key: str(problem) for problem in caught.value.problems}


def notes(config: dict[str, Any], **others: Any) -> dict[str, str]:
    return {note.key: note.reason for note in given({**BASE, **config}, **others).notes}


@pytest.mark.parametrize(
    ("scheduler", "key"),
    [
        ({"type": "WarmupLRR"}, "type"),
        ({"type": "StepLR", "params": {"gama": 0.5, "step_size": 1}}, "params.gama"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}, "params.warmup_max_lr"),
        ({"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": -1}}, "params.total_steps"),
        ({"type": "CosineAnnealingLR", "params": {"T_max": "auto"}}, "params.T_max"),
        ({"type": "StepLR", "params": {"step_size": "2"}}, "params.step_size"),
        ({"type": "StepLR", "params": {"step_size": 0}}, "params"),  # which only the first step divides by
        ({"type": "MultiStepLR", "params": {"milestones": [2, "4"]}}, "params.milestones"),
        ({"type": "CyclicLR", "params": {"base_lr": 0.1, "max_lr": 1, "step_size_up": "9"}}, "params.step_size_up"),
        ({"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": "9"}}, "params.total_steps"),
    ],
)
@pytest.mark.parametrize("optimizer", [None, lambda params: SGD(params, lr=0.1)])
def test_a_wrong_schedule_is_found_before_units_are_built(scheduler: Any, key: str, optimizer: Any) -> None:
    assert set(refused({**BASE, **ADAM, "scheduler": scheduler}, optimizer=optimizer)) == {f"scheduler.{key}"}


def test_it_is_said_that_fp64_is_rounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(log, "_warned", set())
    caplog.set_level(logging.WARNING, "zerorun")  # another test may have set it up so that it tells more
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].double()
    given({**BASE, **ADAM}, model=model[:2])
    given({**BASE, **ADAM, "bf16": {"enabled": True}}, model=model)
    model[2].weight.requires_grad_(False)
    given({**BASE, **ADAM}, model=model, groups=[model[0].weight])
    assert not caplog.messages
    given({**BASE, **ADAM}, model=model)
    (told,) = caplog.messages
    assert "rounded to fp32 by the first step: '2.bias'." in told and "model.float()" in told


def test_a_schedule_for_each_group() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": torch.tensor(0.5)}, {"params": [model.bias]}]
    for params in ({"warmup_max_lr": [0.1, 0.2]}, {"warmup_min_lr": 0.01}):
        given({**BASE, **ADAM, "scheduler": {"type": "WarmupLR", "params": params}}, model=model, groups=groups)
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    cyclic = {"scheduler": {"type": "CyclicLR", "params": {"base_lr": 0.1, "max_lr": [0.2, 0.3]}}}
    given({**BASE, **cyclic}, model=model, optimizer=optimizer)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.1]


def test_a_given_schedule_counts() -> None:
    section = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}}
    assert "lr_scheduler=" in refused({**BASE, **ADAM, **section})["scheduler.params.total_num_steps"]
    assert set(notes({**ADAM, **section}, scheduler_given=True)) == {"scheduler"}
    config = given({**BASE, **ADAM, **section}, scheduler_given=True)
    assert (config.effective()["scheduler.type"].note or "").startswith("not used")
    assert not notes(ADAM, scheduler_given=True)


def test_a_schedule_without_an_optimizer_is_noted() -> None:
    section = {"scheduler": {"type": "WarmupLR"}}
    assert "no optimizer" in notes(section)["scheduler"]
    assert not notes(section, optimizer=lambda params: SGD(params, lr=0.1))
    assert not notes({**section, **ADAM})


def test_auto_for_what_an_optimizer_decides_says_what_to_pass() -> None:
    section = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    assert all("pass optimizer= to initialize()" in text for text in refused({**BASE, **section}).values())
    given({**BASE, **section}, optimizer=lambda params: SGD(params, lr=0.1))


def test_two_configurations_must_be_one(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 1}')
    relative = os.path.relpath(path)
    assert given(BASE, Namespace(config="model.yaml")).train_batch_size == 1  # of the script's own
    for name in ("zerorun_config", "deepspeed_config"):
        assert given(BASE, Namespace(**{name: None})).train_batch_size == 1
        assert given(str(path), Namespace(**{name: relative})).train_batch_size == 1
        assert given(path, Namespace(**{name: str(path)})).train_batch_size == 1
        assert given(BASE, Namespace(**{name: dict(BASE)})).train_batch_size == 1
        for one, other in ((BASE, str(path)), (path, "other.json"), (BASE, {**BASE, "seed": 1})):
            assert "one of the two" in refused(one, Namespace(**{name: other}))[f"args.{name}"]


def test_only_its_own_key_sets_the_dtype_on_the_wire() -> None:
    for written in ("fp32", "bf16", "fp16"):
        section = {"data_types": {"grad_accum_dtype": written}}
        assert wire_dtype(given({**BASE, **section})) == torch.float32
        assert wire_dtype(given({**BASE, **section, "communication_data_type": "bf16"})) == torch.bfloat16


@pytest.mark.parametrize(("key", "value"), [("schedule", "gpipe"), ("activation_checkpoint_interval", 1)])
def test_one_stage_has_no_schedule_unless_it_is_a_pipeline_module(key: str, value: Any) -> None:
    section = {"pipeline": {key: value}}
    assert "PipelineModule" in notes(section)[f"pipeline.{key}"]
    assert not notes(section, model=PipelineModule([nn.Linear(2, 2)], num_stages=1, stage=0))
    default = {"schedule": "1f1b", "activation_checkpoint_interval": 0}[key]
    assert not notes({"pipeline": {key: default}})
