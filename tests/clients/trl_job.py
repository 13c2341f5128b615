"""Rank program: TRL's trainers SFT, DPO and GRPO, as DDP and by their DeepSpeed route.

zerorun --as-deepspeed --nproc-per-node 2 tests/clients/trl_job.py OUT.json
"""

from __future__ import annotations

from typing import Any

import torch
from cells import run_cells
from client_models import llama, stored, tokenizer, words
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

STEPS = 3
CELLS = (
    "SFT", "SFT, LoRA", "SFT, QLoRA", "SFT, LLM.int8", "SFT, accumulation", "DPO", "DPO, LoRA", "DPO, checkpointing",
    "GRPO", "GRPO, reference",
)  # fmt: skip
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
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    how: dict[str, Any] = {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [],
        "learning_rate": 1e-2, "use_cpu": True, "disable_tqdm": True, "ddp_backend": "gloo", "seed": 5, "bf16": False,
        "save_strategy": "no", "deepspeed": None if stage is None else {"zero_optimization": zero, **sizes},
        "gradient_accumulation_steps": 2 if variant == "accumulation" else 1,
        "gradient_checkpointing": variant == "checkpointing",
    }  # fmt: skip
    torch.manual_seed(11)
    adapts = variant in ("LoRA", *QUANTISED)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]) if adapts else None
    given = {"train_dataset": data(kind), "processing_class": tokenizer(), "peft_config": config}
    trainer: Any
    if kind == "SFT":
        args = SFTConfig(max_length=12, **how)
        trainer = SFTTrainer(quantised(folder, variant) if variant in QUANTISED else llama(), args, **given)
    elif kind == "DPO":
        trainer = DPOTrainer(stored(folder), args=DPOConfig(max_length=24, **how), **given)
    else:
        own = {"num_generations": 2, "max_completion_length": 5, "beta": 0.1 if variant == "reference" else 0.0}
        trainer = GRPOTrainer(stored(folder), reward, args=GRPOConfig(**own, **how), **given)
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == ("DistributedDataParallel" if stage is None else "Engine")
    log = trainer.state.log_history
    return {"log": [[entry["loss"], entry["grad_norm"]] for entry in log if "grad_norm" in entry]}


if __name__ == "__main__":
    run_cells(CELLS, train)
