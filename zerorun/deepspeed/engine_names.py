"""Methods that scripts made for DeepSpeed call on an engine: they say what is known otherwise, or do a little more."""

from __future__ import annotations

import gc
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..engine.engine import Engine
from ..errors import ConfigError, ConfigProblem
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


# -- methods that zerorun has, too, with DeepSpeed's arguments in DeepSpeed's order --------------------------------

_backward, _compile, _load, _save = Engine.backward, Engine.compile, Engine.load_checkpoint, Engine.save_checkpoint


def backward(
    engine: Engine, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **own: Any
) -> torch.Tensor:
    """Compute gradients as ever. ``own``: zerorun's other keywords."""
    return _backward(engine, loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas, **own)


def compile(
    engine: Engine,
    backend: Any = "inductor",
    compile_kwargs: dict[str, Any] | None = None,
    schedule: Any = None,
    compiled_autograd_enabled: bool = False,
    **own: Any,
) -> None:
    """Compile block by block as ever. ``own``: torch.compile's options.

    Raises ConfigError for a ``schedule`` of passes, and for ``compiled_autograd_enabled``.
    """
    if schedule is not None:
        reason = "zerorun gathers and reduces outside the graphs, and has no passes to put into them."
        _refuse("compile", "schedule", schedule, reason, "Leave it out.")
    if compiled_autograd_enabled:
        reason = "backward runs between hooks of the engine, which one graph of it would leave out."
        _refuse("compile", "compiled_autograd_enabled", compiled_autograd_enabled, reason, "Leave it out.")
    _compile(engine, compile_kwargs=compile_kwargs, backend=backend, **own)


def load_checkpoint(
    engine: Engine,
    load_dir: str | Path = "",
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
    **own: Any,
) -> tuple[Path | None, dict[str, Any] | None]:
    """Load as ever; where there is nothing to load, return (None, None). ``own``: zerorun's own keywords.

    Raises ConfigError for a ``custom_load_fn``.
    """
    _refuse_load_fn("load_checkpoint", custom_load_fn)
    path, client_state = _load(
        engine,
        own.pop("dir", load_dir),
        tag,
        strict=own.pop("strict", load_module_strict),
        load_optimizer=own.pop("load_optimizer", load_optimizer_states),
        load_scheduler=own.pop("load_scheduler", load_lr_scheduler_states),
        load_module_only=load_module_only,
        **own,
    )
    return path, None if path is None else client_state


def _refuse(method: str, key: str, value: Any, reason: str, remedy: str) -> NoReturn:
    raise ConfigError([ConfigProblem(key, value, reason, remedy)], f"engine.{method}()")


def _refuse_load_fn(method: str, function: Any) -> None:
    if function is not None:
        reason = "each rank reads its own parts of the weights, and no rank has what such a function copies from."
        remedy = "Rename the weights in the model or in the file before, or allow_missing=[names] for those that lack."
        _refuse(method, "custom_load_fn", getattr(function, "__qualname__", function), reason, remedy)


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
    ways = (
        optimizer_name,
        scheduler_name,
        dynamic_loss_scale,
        get_data_parallel_rank,
        module_state_dict,
        collect_python_gc,
    )
    for method in (*ways, backward, compile, load_checkpoint, save_checkpoint):
        setattr(Engine, method.__name__, method)
