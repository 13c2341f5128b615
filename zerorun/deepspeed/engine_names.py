"""Methods that scripts made for DeepSpeed call on an engine: they say what is known otherwise, or do a little more."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..config.parse import Config
from ..config.sections import OffloadOptimizer, OffloadParam, Optimizer, Scheduler
from ..engine.engine import Engine
from ..errors import CheckpointError, ConfigError, ConfigProblem
from ..log import listed, logger
from ..optim.loss_scaler import DTYPES
from ..zero.sharded_model import is_trained
from .mpu import group_along
from .name_table import MISSING, missing_reason
from .parameters import give_values, loading, tensors_by_name

# -- questions -----------------------------------------------------------------------------------------------------


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


def get_tensor_parallel_rank(engine: Engine) -> int:
    """This rank's number among those that divide each layer."""
    return engine.topology.tensor_rank


def get_pipeline_parallel_rank(engine: Engine) -> int:
    """The number of this rank's pipeline stage."""
    return engine.topology.pipe_rank


def get_sequence_parallel_group(engine: Engine) -> torch.distributed.ProcessGroup:
    """The process group of the ranks that divide each sequence; this rank alone if none are divided."""
    return group_along(engine.topology, "context")


def communication_data_type(engine: Engine) -> torch.dtype:
    """The dtype of gradients on the wire."""
    return engine.comm.wire_dtype


def mp_world_size(engine: Engine) -> int:
    """The number of ranks that divide each layer."""
    return engine.topology.tensor


def _params(section: Optimizer | Scheduler | None) -> dict[str, Any] | None:
    return None if section is None else dict(section.params)


def _if_on(section: OffloadOptimizer | OffloadParam) -> Any:
    return None if section.is_off() else section


# Methods that answer from the configuration: None where it has no such section, or one that is switched off.
_ANSWERS: dict[str, Callable[[Config], Any]] = {
    "optimizer_params": lambda config: _params(config.optimizer),
    "scheduler_params": lambda config: _params(config.scheduler),
    "torch_autocast_enabled": lambda config: config.torch_autocast.enabled,
    "torch_autocast_dtype": lambda config: DTYPES[config.torch_autocast.dtype],
    "zero_offload_optimizer": lambda config: _if_on(config.zero_optimization.offload_optimizer),
    "zero_offload_param": lambda config: _if_on(config.zero_optimization.offload_param),
    "zero_cpu_offload": lambda config: config.zero_optimization.offload_optimizer.device == "cpu",
    "zero_nvme_offload_optimizer": lambda config: config.zero_optimization.offload_optimizer.device == "nvme",
    "zero_use_cpu_optimizer": lambda config: not config.zero_optimization.offload_optimizer.is_off(),
    "load_universal_checkpoint": lambda config: config.checkpoint.load_universal,
    "use_node_local_storage": lambda config: config.checkpoint.use_node_local_storage,
}
# Those that are called as a key: at the top level, or in a section with the prefix that it has there.
_KEYS = (
    "dataloader_drop_last dump_state gradient_predivide_factor log_level memory_breakdown zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer"
)
_OF_ZERO = (
    "allgather_bucket_size contiguous_gradients ignore_unused_parameters max_live_parameters max_reuse_distance "
    "model_persistence_threshold overlap_comm param_persistence_threshold prefetch_bucket_size reduce_bucket_size "
    "reduce_scatter round_robin_gradients sub_group_size"
)
_OF_PROFILER = "enabled module_depth output_file profile_step top_modules"


def _answering(name: str, read: Callable[[Config], Any]) -> Callable[[Engine], Any]:
    def answer(engine: Engine) -> Any:
        return read(engine.config)

    answer.__name__ = name
    return answer


def _answers() -> dict[str, Callable[[Config], Any]]:
    return (
        _ANSWERS
        | {key: attrgetter(key) for key in _KEYS.split()}
        | {f"zero_{key}": attrgetter(f"zero_optimization.{key}") for key in _OF_ZERO.split()}
        | {f"flops_profiler_{key}": attrgetter(f"flops_profiler.{key}") for key in _OF_PROFILER.split()}
    )


# -- weights -------------------------------------------------------------------------------------------------------


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
        if exclude_frozen_parameters and not param.requires_grad and not is_trained(param):
            state.pop(prefix + name, None)
    return state


def load_module_state_dict(
    engine: Engine,
    checkpoint: Mapping[str, Any],
    strict: bool = True,
    custom_load_fn: Any = None,
    fetch_z3_params: bool = False,
    z3_params_to_fetch: Any = None,
    allowed_missing_keys: Collection[str] | None = None,
) -> None:
    """Load what ``module_state_dict`` returned, or a dict that has it as ``module``. All ranks must call it at stage 3.

    All ranks must give equal values: what stage 3 divides is whole on each rank for the time, and gets those of rank 0, and
    the rest gets those of each rank. Both arguments that say which parameters have no effect. Where tensor ranks divide a
    parameter, each takes its part of the whole value. Where the dict has a placeholder, as of ``module_state_dict`` at
    stage 3, the parameter keeps its value. ``allowed_missing_keys``: with ``strict``, names that may be missing. Raises
    RuntimeError, as ``load_state_dict`` of a module does, for names and shapes of another model, and ConfigError for a
    ``custom_load_fn``.
    """
    _refuse_load_fn("load_module_state_dict", custom_load_fn)
    inside = checkpoint.get("module") if isinstance(checkpoint, Mapping) else None
    state = inside if isinstance(inside, Mapping) else checkpoint
    _refuse_other_dicts(engine, state)
    if strict and allowed_missing_keys is not None:
        own = tensors_by_name(engine).keys()
        wrong = (own - state.keys() - set(allowed_missing_keys)) | (state.keys() - own)
        if wrong:
            raise CheckpointError(
                f"load_module_state_dict(): {listed(sorted(wrong))}: only one of the model and the dict has these names. "
                "Remedy: add those that the dict lacks to allowed_missing_keys, or load what module_state_dict() of this "
                "model returned."
            )
        strict = False
    with loading(engine, state) as values:
        engine.module.load_state_dict(values, strict=strict)


def _refuse_other_dicts(engine: Engine, state: object) -> None:
    """Raise CheckpointError, on all ranks of a pipeline stage alike, for what is no dict, or another one than theirs."""
    items = state.items() if isinstance(state, Mapping) else ()
    told = "\n".join(sorted(f"{name} {tuple(getattr(value, 'shape', ()))}" for name, value in items))
    mine = (isinstance(state, Mapping), hashlib.sha256(told.encode()).hexdigest())
    found = engine.comm.control.data_values(mine)
    if found != [(True, found[0][1])] * len(found):
        other = next((rank for rank, theirs in enumerate(found) if not theirs[0] or theirs[1] != found[0][1]), 0)
        raise CheckpointError(
            f"load_module_state_dict(): data-parallel rank {other} gives no dict, or another one than rank 0. Nothing was "
            "loaded. Remedy: give all ranks the same dict, reading the file on each."
        )


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

    The process's generators stay as they are, unless ``load_random_numbers`` is true: what they choose is the script's, and
    trainers that restore them do it by themselves, later. Raises ConfigError for a ``custom_load_fn``.
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
        load_random_numbers=own.pop("load_random_numbers", False),
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

from zerorun.deepspeed.zero_to_fp32 import main

sys.exit(main())
"""


@wraps(_save)
def save_checkpoint(engine: Engine, *args: Any, **kwargs: Any) -> Path:
    """Save as ever, and leave a script beside the checkpoints, as DeepSpeed does: people run it years later.

    In the middle of an accumulation, its gradients are left out, with a warning.
    """
    path = _save(engine, *args, **{"unfinished_step": True, **kwargs})
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


# -- how engines get them ------------------------------------------------------------------------------------------

_look_up = Engine.__getattr__


def look_up(engine: Engine, name: str) -> Any:
    """Look up on the module what the engine lacks; say of what zerorun does not do why that is, and what to do instead."""
    try:
        return _look_up(engine, name)
    except AttributeError as error:
        path = f"deepspeed.DeepSpeedEngine.{name}"
        if path not in MISSING or error.obj is not engine or error.name != name:
            raise
        raise AttributeError(missing_reason(path), name=name, obj=engine) from None


_METHODS: tuple[Callable[..., Any], ...] = (
    optimizer_name,
    scheduler_name,
    dynamic_loss_scale,
    get_data_parallel_rank,
    get_tensor_parallel_rank,
    get_pipeline_parallel_rank,
    get_sequence_parallel_group,
    collect_python_gc,
    module_state_dict,
    load_module_state_dict,
    backward,
    compile,
    load_checkpoint,
    save_checkpoint,
)


def name_engines() -> None:
    """Give engines these methods. The mode does it at ``import deepspeed``."""
    named = {method.__name__: method for method in _METHODS}
    answers = {name: _answering(name, read) for name, read in _answers().items()}
    others: dict[str, Callable[..., Any]] = {
        "get_model_parallel_rank": get_tensor_parallel_rank,
        "_zero3_consolidated_16bit_state_dict": give_values,
        "_consolidated_16bit_state_dict": give_values,
        "__getattr__": look_up,
    }
    for name, method in (named | answers | others).items():
        setattr(Engine, name, method)
    for question in (communication_data_type, mp_world_size):
        setattr(Engine, question.__name__, property(question))
