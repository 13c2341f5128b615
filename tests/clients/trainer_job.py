"""Rank program: transformers' Trainer in every cell, once as DDP and once by its DeepSpeed route. Writes what came of it.

zerorun --as-deepspeed --nproc-per-node 2 tests/clients/trainer_job.py OUT.json
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from cells import BACKEND, begin_anew, run_cells
from client_models import Sentences, greedy, llama, mixtral
from transformers import Trainer, TrainingArguments

STEPS = 4
# Cell -> keywords of TrainingArguments.
CELLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "lora": {},
    "generate": {},
    "resume": {"save_strategy": "steps", "save_steps": 2},
    "by day": {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2,
               "train_sampling_strategy": "group_by_length"},  # draws the order from the process's generator
    "best": {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
             "load_best_model_at_end": True},
    "save": {"save_strategy": "steps", "save_steps": 4, "save_only_model": True},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "optimizer in the file": {},
    "offloaded optimizer": {},
    "offloaded parameters": {},
    "experts": {},
    "sequences": {"gradient_accumulation_steps": 2},  # as many samples as DDP in "plain"
    "sequences by day": {"gradient_accumulation_steps": 4, "train_sampling_strategy": "group_by_length"},
}  # fmt: skip


def configuration(cell: str, stage: int) -> dict[str, Any]:
    """A file as users of Trainer have it."""
    zero: dict[str, Any] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    if cell.startswith("offloaded"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if cell == "offloaded parameters":
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "gradient_clipping": "auto",
    }
    if cell == "experts":
        config["expert_parallel"] = {"enabled": True, "autoep_size": 2}
    if cell == "optimizer in the file":
        params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": params}
    if cell.startswith("offloaded"):
        config["zero_force_ds_cpu_optimizer"] = False
    return config


def train(cell: str, stage: int | None, folder: str) -> dict[str, Any]:
    """Train in one cell, at ``stage`` or, with None, as DDP; losses, norms and what is asked for besides."""
    config = None if stage is None else configuration(cell, stage)

    more: dict[str, Any] = {}
    if cell.startswith("sequences"):
        more["parallelism_config"] = ParallelismConfig(sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        ))  # fmt: skip

    def trainer() -> Trainer:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1, report_to=[], learning_rate=1e-2,
            use_cpu=BACKEND == "gloo", disable_tqdm=True, deepspeed=config, ddp_backend=BACKEND, seed=5,
            **{"save_strategy": "no", **CELLS[cell], **more},
        )  # fmt: skip
        model = mixtral() if cell == "experts" else llama()
        if cell == "lora":
            from peft import LoraConfig, get_peft_model  # which takes its time

            torch.manual_seed(11)
            model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
        return Trainer(model, args, train_dataset=Sentences(), eval_dataset=Sentences(8))

    used = trainer()
    used.train()
    if stage is not None or dist.get_world_size() > 1:
        assert type(used.model_wrapped).__name__.endswith("DistributedDataParallel" if stage is None else "Engine")
    found: dict[str, Any] = {"log": log_of(used), "evaluation": used.evaluate()["eval_loss"]}
    if cell in ("resume", "by day"):
        begin_anew()
        again = trainer()
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        found["resumed"] = log_of(again)
        found["evaluation after"] = again.evaluate()["eval_loss"]
    if cell == "generate":
        found["tokens"] = greedy(used.model_wrapped)
    if cell == "save":
        dist.barrier()
        begin_anew()  # at stage 3 the weights would be divided as they are loaded
        saved = type(llama()).from_pretrained(f"{folder}/checkpoint-4")
        found["saved"] = [float(value.double().sum()) for value in saved.state_dict().values()]
    return found


def log_of(trainer: Trainer) -> list[list[float]]:
    """[loss, gradient norm] of each step."""
    return [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]


def skip(cell: str, stage: int | None) -> bool:
    """DDP has fp16 on GPUs only; what is not divided cannot be offloaded."""
    if stage is None:
        return cell == "fp16" or cell.startswith("sequences")
    return (cell == "offloaded parameters" and stage != 3) or (cell == "offloaded optimizer" and stage == 0)


if __name__ == "__main__":
    run_cells(CELLS, train, skip)
