"""Methods that scripts made for DeepSpeed call on an engine, and that only say what is known otherwise."""

from __future__ import annotations

import gc
from typing import Any

from ..engine.engine import Engine


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


def name_engines() -> None:
    """Give engines these methods. The mode does it at ``import deepspeed``."""
    ways = (optimizer_name, scheduler_name, dynamic_loss_scale, get_data_parallel_rank, module_state_dict)
    for method in (*ways, collect_python_gc):
        setattr(Engine, method.__name__, method)
