"""Rank program: TRL's trainers SFT, DPO and GRPO, as DDP and by their DeepSpeed route.

zerorun --as-deepspeed --nproc-per-node 2 tests/clients/trl_job.py OUT.json
"""

from __future__ import annotations

from typing import Any

import torch
from cells import begin_anew, run_cells
from client_models import greedy, llama, stored, tokenizer, words
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

STEPS = 3
COMMON = ("accumulation", "checkpointing", "LoRA", "generate", "resume", "bf16", "fp16", "offload")
VARIANTS = {"SFT": (*COMMON, "QLoRA", "LLM.int8"), "DPO": COMMON, "GRPO": (*COMMON, "reference")}
CELLS = tuple(
    cell for kind, variants in VARIANTS.items() for cell in (kind, *(f"{kind}, {variant}" for variant in variants))
)
QUANTISED = {
    "QLoRA": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "LLM.int8": BitsAndBytesConfig(load_in_8bit=True),
}


def data(kind: str) -> Dataset:
    """What the trainer of this kind takes."""
    texts, others = words(32), words(32, seed=4)
    if kind == "SFT":
        return Dataset.from_dict({"text": texts})
    if kind == "DPO":
        return Dataset.from_dict({"prompt": texts, "chosen": others, "rejected": words(32, seed=5)})
    return Dataset.from_dict({"prompt": texts})


def reward(completions: list[str], **unused: Any) -> list[float]:
    """How many different words there are."""
    return [float(len(set(text.split()))) for text in completions]


def quantised(folder: str, variant: str) -> Any:
    """``llama()`` as transformers quantises it. Where a configuration with stage 3 is alive, no rank has all of it."""
    model = stored(folder, quantization_config=QUANTISED[variant], dtype=torch.float32)
    parts = [param for param in model.parameters() if type(param) is not torch.nn.Parameter and hasattr(param, "ds_id")]
    assert len(parts) == (14 if is_deepspeed_zero3_enabled() else 0)
    return model


def train(cell: str, stage: int | None, folder: str) -> dict[str, Any]:
    kind, _, variant = cell.partition(", ")
    zero: dict[str, Any] = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    if variant == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    precision = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "initial_scale_power": 8}}
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **sizes, **precision}
    how: dict[str, Any] = {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [],
        "per_device_eval_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True,
        "ddp_backend": "gloo", "seed": 5, "bf16": variant == "bf16", "fp16": variant == "fp16",
        "save_strategy": "steps" if variant == "resume" else "no", "save_steps": 2,
        "deepspeed": None if stage is None else config,
        "gradient_accumulation_steps": 2 if variant == "accumulation" else 1,
        "gradient_checkpointing": variant == "checkpointing",
    }  # fmt: skip
    trainer = make(kind, variant, folder, how)
    trainer.train()
    assert type(trainer.model_wrapped).__name__.endswith("DistributedDataParallel" if stage is None else "Engine")
    found: dict[str, Any] = {"log": log_of(trainer)}
    if variant == "generate":
        metrics = trainer.evaluate()
        found["evaluation"] = [metrics[key] for key in ("eval_loss", "eval_reward") if key in metrics]
        found["tokens"] = greedy(trainer.model_wrapped)
    if variant == "resume":
        begin_anew()
        trainer = make(kind, variant, folder, how)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        found["resumed"] = log_of(trainer)
    return found


def make(kind: str, variant: str, folder: str, how: dict[str, Any]) -> Any:
    """A trainer of this kind."""
    torch.manual_seed(11)
    adapts = variant in ("LoRA", *QUANTISED)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]) if adapts else None
    given = {"train_dataset": data(kind), "processing_class": tokenizer(), "peft_config": config}
    if variant == "generate":
        given["eval_dataset"] = data(kind).select(range(8))
    if kind == "SFT":
        args = SFTConfig(max_length=12, **how)
        return SFTTrainer(quantised(folder, variant) if variant in QUANTISED else llama(), args, **given)
    if kind == "DPO":
        return DPOTrainer(stored(folder), args=DPOConfig(max_length=24, **how), **given)
    own = {"num_generations": 2, "max_completion_length": 5, "beta": 0.1 if variant == "reference" else 0.0}
    return GRPOTrainer(stored(folder), reward, args=GRPOConfig(**own, **how), **given)


def log_of(trainer: Any) -> list[list[float]]:
    """[loss, gradient norm] of each step."""
    return [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "grad_norm" in entry]


def skip(cell: str, stage: int | None) -> bool:
    """DDP has fp16 on GPUs only; what is not divided cannot be offloaded."""
    return (cell.endswith("fp16") and stage is None) or (cell.endswith("offload") and stage == 0)


if __name__ == "__main__":
    run_cells(CELLS, train, skip)
