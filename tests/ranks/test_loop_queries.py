"""What loops written for DeepSpeed ask an engine, by DeepSpeed's names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_ranks
from models import CASES
from training import make_config, make_engine

from zerorun.config.parse import EffectiveValue

SETTINGS = (
    *("zero_optimization", "zero_optimization_stage", "zero_optimization_partition_gradients"),
    *("zero_optimization_partition_weights", "fp16_enabled", "bfloat16_enabled", "gradient_clipping"),
    *("steps_per_print", "wall_clock_breakdown", "get_lr", "get_mom"),
)


def ask(stage: int, precision: str, optimizer: str, changes: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """(the answers, what they should be of each parameter group)."""
    config = make_config(stage, accumulation=3, clip=0.5, precision=precision, optimizer=optimizer, **changes)
    engine = make_engine(CASES["plain"], config)
    ranks = engine.global_rank, engine.local_rank, engine.world_size, engine.dp_world_size, str(engine.device)
    batch = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    assert ranks == (dist.get_rank(), dist.get_rank(), 2, 2, "cpu")
    assert batch == (12, 2, 3)
    answers = {name: getattr(engine, name)() for name in SETTINGS}
    assert engine.effective_config()["zero_optimization.stage"] == EffectiveValue(stage, "file", None)
    assert engine.effective_config()["train_batch_size"].value == 12
    groups = [(group["lr"], group.get("betas", group.get("momentum"))) for group in engine.optimizer.param_groups]
    engine.destroy()
    return answers, groups


@pytest.mark.parametrize("stage", range(4))
def test_ranks_sizes_and_settings(stage: int) -> None:
    precision, optimizer = ("fp32", "fp16", "bf16", "fp32")[stage], ("AdamW", "SGD")[stage % 2]
    changes = {"steps_per_print": 7} if stage else {}
    for answers, groups in run_ranks(2, ask, stage, precision, optimizer, changes):
        assert answers == {
            "zero_optimization": stage > 0,
            "zero_optimization_stage": stage,
            "zero_optimization_partition_gradients": stage > 1,
            "zero_optimization_partition_weights": stage > 2,
            "fp16_enabled": precision == "fp16",
            "bfloat16_enabled": precision == "bf16",
            "gradient_clipping": 0.5,
            "steps_per_print": 7 if stage else math.inf,
            "wall_clock_breakdown": False,
            "get_lr": [lr for lr, _ in groups],
            "get_mom": [momentum for _, momentum in groups],
        }
