"""What the clients' rank programs share: they train in one cell after the other, as DDP and at each stage."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

STAGES = (0, 1, 2, 3)
BACKEND = "nccl" if torch.cuda.is_available() and os.environ.get("ZERORUN_DEVICE") != "cpu" else "gloo"


def begin_anew() -> None:
    """Let the next run find nothing of the last one: these clients leave their settings to the process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def run_cells(
    cells: Iterable[str],
    train: Callable[[str, int | None, str], dict[str, Any]],
    skip: Callable[[str, int | None], bool] = lambda cell, stage: False,
) -> None:
    """Write to the file that the command line names: "cell, DDP" or "cell, stage N" -> what ``train`` found on rank 0.

    ``train(cell, stage, folder)``: stage None means DDP; ``folder`` is an empty one, the same on all ranks. The command
    line may name the cells to be run.
    """
    dist.init_process_group(BACKEND)
    found: dict[str, Any] = {}
    for cell in sys.argv[2:] or cells:
        for stage in (None, *STAGES):
            if not skip(cell, stage):
                found |= run_cell(cell, stage, train)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1))


def run_cell(cell: str, stage: int | None, train: Callable[[str, int | None, str], dict[str, Any]]) -> dict[str, Any]:
    """The name of the cell with its stage -> what ``train`` found, or the error that came of it."""
    begin_anew()
    try:
        with tempfile.TemporaryDirectory() as own:
            shared = [own]
            dist.broadcast_object_list(shared)
            result = train(cell, stage, shared[0])
            dist.barrier()
    except Exception as error:  # goes into the table as what it is
        result = {"error": "".join(traceback.format_exception(error))}
    return {f"{cell}, {'DDP' if stage is None else f'stage {stage}'}": result}
