"""Rank program: loops with accelerate's Accelerator in every cell, as DDP and by its DeepSpeed route.

zerorun --as-deepspeed --nproc-per-node 2 tests/clients/accelerate_job.py OUT.json
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, PartialState
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from cells import run_cells
from client_models import Sentences, greedy, llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.utils.data import DataLoader

STEPS = 4
CELLS = (
    "plain", "accumulation", "checkpointing", "lora", "clipping", "evaluation", "resume", "bf16", "fp16",
    "dummy optimizer", "schedule", "state dict", "offload",
)  # fmt: skip


def plugin(cell: str, stage: int) -> DeepSpeedPlugin:
    accumulation = 2 if cell == "accumulation" else 1
    zero: dict[str, Any] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    if cell == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
    }
    if cell == "dummy optimizer":
        params = dict.fromkeys(("lr", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": {**params, "betas": [0.9, 0.999], "eps": 1e-8}}
    return DeepSpeedPlugin(hf_ds_config=config, gradient_clipping=0.5 if cell == "clipping" else None)


def train(cell: str, stage: int | None, folder: str) -> dict[str, Any]:
    set_seed(5)
    PartialState(cpu=True)  # accelerate itself takes DeepSpeed for something that GPUs alone have
    accelerator = Accelerator(
        cpu=stage is None,
        mixed_precision=cell if cell in ("bf16", "fp16") else "no",
        gradient_accumulation_steps=2 if cell == "accumulation" else 1,
        deepspeed_plugin=None if stage is None else plugin(cell, stage),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model = llama()
    if cell == "checkpointing":
        model.gradient_checkpointing_enable()
    if cell == "lora":
        torch.manual_seed(11)
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
    chosen = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.AdamW(chosen, lr=1e-2, weight_decay=0.0)
    # Without DeepSpeed accelerate steps a schedule once per rank; the one in the file is stepped once per step.
    per_step = 2 if cell == "dummy optimizer" else 1
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / per_step))
    if cell == "dummy optimizer" and stage is not None:
        optimizer = DummyOptim(chosen, lr=1e-2, weight_decay=0.0)
        schedule = DummyScheduler(optimizer, lr_scheduler_callable=lambda made: torch.optim.lr_scheduler.LambdaLR(
            made, lambda step: 1 / (1 + step)))  # fmt: skip
    if cell not in ("schedule", "dummy optimizer"):
        schedule = None
    data = DataLoader(Sentences(), batch_size=2)
    made = accelerator.prepare(*(thing for thing in (model, optimizer, data, schedule) if thing is not None))
    model, optimizer, data = made[:3]
    schedule = made[3] if schedule is not None else None
    assert type(model).__name__.endswith("DistributedDataParallel" if stage is None else "Engine")
    found: dict[str, Any] = {"log": []}
    saved = None
    for number, batch in enumerate(data):
        if number == STEPS * (2 if cell == "accumulation" else 1):
            break
        if cell == "resume" and number == 2:
            saved = accelerator.save_state(f"{folder}/state")
        with accelerator.accumulate(model):
            found["log"].append(step(accelerator, cell, model, optimizer, schedule, batch))
    if cell == "resume":
        accelerator.load_state(saved)
        found["resumed"] = [
            step(accelerator, cell, model, optimizer, schedule, batch)
            for number, batch in enumerate(data)
            if 2 <= number < STEPS
        ]
    if cell == "evaluation":
        model.eval()
        with torch.no_grad():
            losses = [
                accelerator.gather(model(**batch).loss.reshape(1)).tolist()
                for batch, _ in zip(data, range(2), strict=False)
            ]
        found["evaluation"] = losses
        found["tokens"] = greedy(model)
    if cell == "state dict":
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            found["state"] = {name.removeprefix("module."): value.float().sum().item() for name, value in state.items()}
            found["state"] = sorted(found["state"].items())
        accelerator.save_model(model, f"{folder}/model")
        accelerator.wait_for_everyone()
        found["saved"] = load_file(f"{folder}/model/model.safetensors")["model.embed_tokens.weight"].tolist()
    return found


def step(accelerator: Accelerator, cell: str, model: Any, optimizer: Any, schedule: Any, batch: Any) -> float:
    """One micro-batch; the loss, averaged over ranks."""
    loss = model(**batch).loss
    accelerator.backward(loss)
    if cell == "clipping" and accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    if not isinstance(optimizer, DummyOptim):
        optimizer.step()
    if schedule is not None:
        schedule.step()
    optimizer.zero_grad()
    return float(accelerator.reduce(loss.detach(), reduction="mean"))


if __name__ == "__main__":
    run_cells(CELLS, train, skip=lambda cell, stage: (cell, stage) in (("offload", 0), ("fp16", None)))  # no fp16 in DDP
