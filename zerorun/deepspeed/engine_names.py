"""Methods that scripts made for DeepSpeed call on an engine: they say what is known otherwise, or do a little more."""

from __future__ import annotations

import gc
from functools import wraps
from pathlib import Path
from typing import Any

from ..engine.engine import Engine
from ..log import logger


def optimizer_name(engine: Engine) -> str | None:
    """The optimizer's type in the file, in lower case as DeepSpeed has it; the class of one that the script has made."""
    section = engine.config.optimizer
    is_unused = any(note.key == "optimizer" for note in engine.config.notes)  # the script's own counts
    if section is not None and not is_unused:
        return section.type.lower()
    return None if engine.optimizer is None else type(engine.optimizer).__name__


def scheduler_name(engine: Engine) -> str | None:
    """The schedule's type in the file, or None."""
    return None if engine.config.scheduler is None else engine.config.scheduler.type


def dynamic_loss_scale(engine: Engine) -> bool:
    """True unless the file fixes the loss scale."""
    return engine.config.fp16.loss_scale == 0


def collect_python_gc(engine: Engine) -> int:
    """Let Python collect garbage, and return how many objects it has found."""
    return gc.collect()


def get_data_parallel_rank(engine: Engine) -> int:
    """This rank's number among those with different data."""
    return engine.topology.data_parallel_rank


def module_state_dict(
    engine: Engine,
    destination: Any = None,
    prefix: str = "",
    keep_vars: bool = False,
    exclude_frozen_parameters: bool = False,
) -> dict[str, Any]:
    """The model's own ``state_dict()``: at stage 3 of placeholders, where ``engine.state_dict()`` is whole."""
    state: dict[str, Any] = engine.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        if exclude_frozen_parameters and not param.requires_grad:
            state.pop(prefix + name, None)
    return state


_save = Engine.save_checkpoint
_SCRIPT = """#!/usr/bin/env python3
# Writes the fp32 weights of a checkpoint of zerorun: zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR; --help says more.
import sys

from zerorun.deepspeed.merged import main

sys.exit(main())
"""


@wraps(_save)
def save_checkpoint(engine: Engine, *args: Any, **kwargs: Any) -> Path:
    """Save as ever, and leave a script beside the checkpoints, as DeepSpeed does: people run it years later."""
    path = _save(engine, *args, **kwargs)
    if engine.topology.rank == 0:
        leave_script(path.parent)
    return path


def leave_script(directory: Path) -> None:
    """Write ``zero_to_fp32.py`` into ``directory``, where anyone may run it, if it is not there."""
    path = directory / "zero_to_fp32.py"
    if path.exists():
        return
    try:
        path.write_text(_SCRIPT)
        path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        logger.warning("%s was not written: %s. The checkpoint is whole.", path, error.strerror)


def name_engines() -> None:
    """Give engines these methods. The mode does it at ``import deepspeed``."""
    ways = (optimizer_name, scheduler_name, dynamic_loss_scale, get_data_parallel_rank, module_state_dict)
    for method in (*ways, collect_python_gc, save_checkpoint):
        setattr(Engine, method.__name__, method)
