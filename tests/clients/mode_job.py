"""Rank program: what scripts made for DeepSpeed ask of parameters and state dicts, and the routes of zerorun.integrations.

python tests/clients/mode_job.py OUT.json

The two ranks are forks of one process: importing Trainer takes longer than all that they do.
"""

from __future__ import annotations

import gc
import io
import json
import sys
import tempfile
import weakref
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from zerorun.integrations.accelerate import plugin
from zerorun.integrations.transformers import ZerorunCallback

import deepspeed  # isort: skip
import zerorun  # isort: skip
from zerorun.deepspeed import entry  # isort: skip
import torch
import torch.distributed as dist
from accelerate import Accelerator
from cells import begin_anew, run_cell
from client_models import Sentences, llama
from safetensors.torch import save
from torch.utils.data import DataLoader
from trainer_job import train
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

lightning_job = import_module("lightning_job") if find_spec("lightning") is not None else None


def attempt(action: Callable[[], Any]) -> str:
    """The name of the error and its message, or "nothing"."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, "zero_optimization": {"stage": stage}, **more}


def parameters() -> dict[str, Any]:
    """Attributes of parameters, state dicts and files, at stage 3."""
    engine, *_ = deepspeed.initialize(model=llama(), config=configuration(3))
    param = engine.module.model.layers[0].mlp.up_proj.weight
    found: dict[str, Any] = {
        "attributes": [param.ds_numel, list(param.ds_shape), param.ds_status.name, param.ds_tensor.numel()],
        "others have none": hasattr(torch.nn.Parameter(torch.zeros(1)), "ds_id"),
        "numbers": len({other.ds_id for other in engine.module.parameters()}) == len(list(engine.module.parameters())),
    }
    with deepspeed.zero.GatheredParameters([param]):
        found["inside"] = param.ds_status.name
    state = engine.module.state_dict()
    shown = state["model.layers.0.mlp.up_proj.weight"]
    found["shape"] = [list(shown.shape), shown.numel(), len(state)]
    found["saved"] = [attempt(lambda: torch.save(state, io.BytesIO())), attempt(lambda: save({"a": shown}))]
    found["copied"] = [attempt(shown.contiguous), attempt(shown.cpu), attempt(shown.clone)]
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        found["not asked for"] = engine.save_16bit_model(shared[0])
        whole = engine.state_dict()
        engine.save_checkpoint(shared[0], tag="checkpoint")
        if dist.get_rank() == 0:
            from deepspeed.utils.zero_to_fp32 import (
                convert_zero_checkpoint_to_fp32_state_dict,
                get_fp32_state_dict_from_zero_checkpoint,
            )

            merged = get_fp32_state_dict_from_zero_checkpoint(shared[0])
            found["merged"] = all(torch.equal(merged[name], value) for name, value in whole.items() if name in merged)
            convert_zero_checkpoint_to_fp32_state_dict(shared[0], f"{shared[0]}/out", safe_serialization=True)
            found["converted"] = sorted(path.name for path in Path(shared[0], "out").iterdir())
        dist.barrier()
    engine.destroy()
    return found


def parameters_in_init() -> list[Any]:
    """Attributes of a parameter that has no engine yet: divided, whole for a while, and divided again."""
    with deepspeed.zero.Init():
        weight = torch.nn.Linear(4, 4).weight
    seen = [(weight.ds_id, weight.ds_status.name, weight.ds_tensor.numel())]
    with deepspeed.zero.GatheredParameters([weight]):
        seen.append((weight.ds_id, weight.ds_status.name, weight.ds_tensor.numel()))
        seen.append((list(weight.ds_shape), weight.ds_numel, weight.isfinite().all().item()))
    return [*seen, (weight.ds_id, weight.ds_status.name, weight.ds_tensor.numel())]


def ignored() -> list[str]:
    """What a file says that DeepSpeed reads over, and what it refuses, too."""
    idle = {"stage": 2, "offload_param": {"device": "cpu"}}
    over = configuration(2, misspelt=1, **{"zero_optimization.reduce_bucket_size": 5, "zero_optimization": idle})
    wrong = configuration(2, zero_optimization={"stage": 2, "sub_grup_size": 3})
    return [attempt(partial(deepspeed.initialize, model=llama(), config=config)) for config in (over, wrong)]


def two_configurations() -> str:
    """What is said if the command line names another file than the script."""
    args = Namespace(deepspeed_config="other.json")
    return attempt(partial(deepspeed.initialize, args=args, model=llama(), config=configuration(1)))


def ranks() -> list[int]:
    """Numbers of ranks before there is an engine."""
    from deepspeed.utils import groups

    return [groups.get_data_parallel_world_size(), groups.get_tensor_model_parallel_world_size()]


def kernels() -> list[float]:
    """Losses with an optimizer object of DeepSpeed's name, a schedule of its class, and its helper functions."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.lr_schedules import WarmupLR
    from deepspeed.utils import RepeatingLoader, groups, log_dist

    log_dist("begins", ranks=[0])
    model = llama()
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    schedule = WarmupLR(optimizer, warmup_min_lr=0.01, warmup_max_lr=0.01, warmup_num_steps=10)
    engine, _, _, made = deepspeed.initialize(model=model, config_params=config, optimizer=optimizer, lr_scheduler=schedule)
    assert made is schedule and groups.get_data_parallel_world_size() == deepspeed.comm.get_world_size() == 2
    losses, data = [], iter(RepeatingLoader(DataLoader(Sentences(), batch_size=2)))
    for _ in range(3):
        loss = engine(**next(data)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    return losses


def optimizer_kept() -> list[Any]:
    """What an optimizer does for a script that keeps it: without its engine, too."""
    engine, optimizer, *_ = deepspeed.initialize(model=llama(), config=configuration(3))
    optimizer.offload_states()
    optimizer.reload_states()
    seen = weakref.ref(engine)
    engine.destroy()
    del engine
    gc.collect()
    return [seen() is None, attempt(optimizer.offload_states)]


def accelerated() -> list[float]:
    """The same losses by accelerate, with the route of zerorun.integrations."""
    accelerator = Accelerator(deepspeed_plugin=plugin({"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}))
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _, batch in zip(range(3), DataLoader(Sentences(), batch_size=2), strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def logged(folder: str) -> list[list[str]]:
    """What Trainer's log has with the callback."""
    begin_anew()
    args = TrainingArguments(
        folder, max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        deepspeed={"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2}, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(llama(), args, train_dataset=Sentences(), callbacks=[ZerorunCallback()])
    trainer.train()
    return [sorted(entry) for entry in trainer.state.log_history if "loss" in entry]


def classifier() -> list[float]:
    """Losses of a model whose constructor makes another one while stage 3 is alive, and of the same weights in torch alone.

    The outer constructor writes to all layers that are not marked as done, which the inner one's were on rank 0 alone.
    """
    begin_anew()
    args = TrainingArguments("nowhere", report_to=[], use_cpu=True, deepspeed=configuration(3))
    sizes = llama().config.to_dict() | {"num_labels": 1}
    model = LlamaForSequenceClassification(LlamaConfig(**sizes))
    del args  # with it, the configuration is gone: the model below is a plain one
    gc.collect()
    engine, *_ = deepspeed.initialize(model=model, config=configuration(3))
    plain = LlamaForSequenceClassification(LlamaConfig(**sizes))
    plain.load_state_dict(engine.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    batch = {"input_ids": torch.arange(1, 25).view(2, 12), "labels": torch.tensor([0.5, -0.5])}
    losses = []
    for _ in range(2):
        both = engine(**batch).loss, plain(**batch).loss
        engine.backward(both[0])
        engine.step()
        both[1].backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses += [float(loss.detach()) for loss in both]
    engine.destroy()
    return losses


def resuming(folder: str) -> list[str]:
    """What is said where an engine goes on by itself: in a loop of the script's own, and in Trainer's, before it begins."""
    begin_anew()
    shared, said = [folder], list[str]()
    dist.broadcast_object_list(shared)
    config = configuration(1, checkpoint={"dir": shared[0], "auto_resume": True, "every_steps": 1})
    with patch.object(entry, "warn_once", said.append):
        for _ in range(2):
            engine, *_ = deepspeed.initialize(model=llama(), config=config)
            engine.backward(engine(**next(iter(DataLoader(Sentences(), batch_size=2)))).loss)
            engine.step()
            engine.destroy()
    given = {"report_to": [], "use_cpu": True, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 1}
    args = TrainingArguments("nowhere", deepspeed=config, **given)
    said.append(attempt(Trainer(llama(), args, train_dataset=Sentences()).train))
    begin_anew()
    dist.barrier()
    return said


def main() -> None:
    deepspeed.init_distributed("gloo")
    found: dict[str, Any] = {"ranks": ranks(), "two": two_configurations(), "kept": optimizer_kept()}
    found |= {"parameters": parameters(), "in init": parameters_in_init()}
    found |= {"ignored": ignored(), "kernels": kernels(), "accelerated": accelerated()}
    with tempfile.TemporaryDirectory() as folder:
        found |= {"logged": logged(folder), "ignored beside Trainer": ignored(), "resuming": resuming(f"{folder}/saved")}
    found["classifier"] = classifier()
    found["trainer"] = {}
    for cell, stage in (("by day", None), ("by day", 3), ("sequences by day", 1)):
        found["trainer"] |= run_cell(cell, stage, train)
    if lightning_job is not None:
        found["callbacks"] = lightning_job.refused_callbacks()
        for stage in (None, 1, 3):
            for cell in ("evaluation", "interrupted"):
                found["lightning"] = found.get("lightning", {}) | run_cell(cell, stage, lightning_job.train)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    gc.freeze()  # clients collect garbage again and again: what has been imported need not be looked through each time
    zerorun.notebook_launcher(main, num_processes=2)
