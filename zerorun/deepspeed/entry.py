"""``deepspeed.initialize`` and the functions beside it, with DeepSpeed's signatures."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerorun

from ..checkpoint.automatic import resuming_problems
from ..config.deepspeed_leniency import as_deepspeed_reads
from ..config.parse import Config, data_parallel_degree, load_config, resolve
from ..distributed.transport import process_group
from ..engine.engine import Engine
from ..engine.former_engines import taking_over
from ..engine.initialize import initialize as make_engine
from ..errors import ConfigError, ConfigProblem, StepError, TopologyError
from ..log import is_rank_zero, script_logger, warn_once
from ..model_setup.checked_arguments import config_of
from ..watch.launch_environment import launched, world_size_in
from .engine_module import ModuleEngine
from .name_table import VERSION
from .parameters import show_placeholders
from .shown_gradients import show_gradients
from .tensor_ranks import with_own_samples, with_script_ranks

_engines: list[weakref.ref[Engine]] = []


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, Any, Any, Any]:
    """Return (engine, optimizer, dataloader, lr_scheduler), as ``zerorun.initialize`` makes them. The engine is a module.

    ``config_params`` is another name of ``config``. ``distributed_port`` has no effect: the launcher says where ranks meet.
    ``mesh_param``: the numbers of data-parallel ranks and of those that divide sequences. A model that an engine without an
    optimizer has, as TRL makes one to evaluate it, is given back by that engine first, which goes on as a call of the model
    (see ``taking_over``). Raises what ``zerorun.initialize`` raises; ConfigError for what tp_model_init(), ``mpu`` or
    ``mesh_param`` say otherwise than the configuration, and for an engine that is to go on by itself in transformers'
    Trainer; and TopologyError for an ``mpu`` whose ranks have parts of a layer, unless they are those that the
    configuration names, or if ``dist_init_required`` is False and ranks have not met.
    """
    _refuse_strangers(dist_init_required)
    source = config_of(config if config is not None else config_params, args)
    if model is None:
        raise ConfigError([ConfigProblem("model", None, "there is no model.", "Pass model=.")], "initialize()")
    source = as_deepspeed_reads(source)
    _refuse_resuming_in_trainer(source)
    make = partial(
        make_engine,
        model,
        with_script_ranks(source, model, mpu, mesh_param),
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        engine_class=_as_module,
    )
    engine = taking_over(model, make, untrained=True)
    if is_rank_zero():  # by these words clients see in a log that DeepSpeed has made an engine
        script_logger.info("DeepSpeed info: version=%s, the names of zerorun %s", VERSION, zerorun.__version__)
    show_placeholders(engine)
    show_gradients(engine)
    if engine.sharded is not None:
        ways = {name: _while_it_lives(getattr(engine, name)) for name in ("offload_states", "reload_states")}
        engine.sharded.give_methods(**ways)
    _engines.append(weakref.ref(engine))
    _tell_local_rank(args)
    if engine.global_steps:
        warn_once(
            f"the engine has gone on from step {engine.global_steps} by itself, as `checkpoint` in its file asks for. A "
            "loop that does not ask engine.global_steps, where DeepSpeed's is 0, makes all its steps from the first one on."
        )
    return engine, engine.optimizer, engine.dataloader, engine.lr_scheduler


def _refuse_resuming_in_trainer(source: Any) -> None:
    """Raise ConfigError if the engine is to go on by itself in transformers' Trainer."""
    accelerate, integration = sys.modules.get("accelerate.state"), sys.modules.get("transformers.integrations.deepspeed")
    if accelerate is None or integration is None or not accelerate.is_initialized():
        return
    plugin = accelerate.AcceleratorState().deepspeed_plugin
    if not isinstance(getattr(plugin, "hf_ds_config", None), integration.HfTrainerDeepSpeedConfig):
        return  # it is the script's own loop
    config = load_config(source, optimizer_given=True, scheduler_given=True)
    remedy = "Leave it out: trainer.train(resume_from_checkpoint=True) goes on from what Trainer has saved."
    if problems := resuming_problems(config.checkpoint, "Trainer", remedy):
        raise ConfigError(problems, config.provenance.file)


def _as_module(kind: type[Engine]) -> type[Engine]:
    """Return the class of engines that are what ``kind``, an Engine or a PipelineEngine, is, and modules."""
    if kind is Engine:
        return ModuleEngine
    from .pipeline_names import PipelineModuleEngine  # imports schedules and messages, which other engines do not need

    return PipelineModuleEngine


def _tell_local_rank(args: Any) -> None:
    """Let the script's arguments have this rank's number on its host from now on, as DeepSpeed does."""
    told = launched(os.environ).get("LOCAL_RANK")
    if told is None or not hasattr(args, "local_rank"):
        return
    if args.local_rank == -1 and dist.get_world_size() > 1:
        warn_once(
            f"args.local_rank was -1 before initialize(), as in a single process, though there are {dist.get_world_size()} "
            "ranks: what the script has chosen by it, such as a sampler, may be the same on all. Remedy: start with "
            "`zerorun --local-rank-arg`, or let the script read LOCAL_RANK."
        )
    args.local_rank = int(told)


def _while_it_lives(method: Callable[..., None]) -> Callable[..., None]:
    """Return ``method`` of an engine without keeping the engine alive: scripts may keep the optimizer longer."""
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> None:
        if (alive := found()) is None:
            raise StepError("the engine of this optimizer is gone, and with it the states on the device.")
        alive(*args, **kwargs)

    return call


def newest_engine() -> Engine | None:
    """The engine that ``initialize`` made last, of those that still exist."""
    found = [engine for made in _engines if (engine := made()) is not None]
    return found[-1] if found else None


def engine_of(optimizer: torch.optim.Optimizer) -> Engine | None:
    """The engine that ``initialize`` made with this optimizer, if there is one."""
    found = (engine for made in _engines if (engine := made()) is not None)
    return next((engine for engine in found if engine.sharded is not None and engine.sharded.optimizer is optimizer), None)


def parse_config(config: Any, mpu: Any = None, mesh_device: Any = None) -> Config:
    """Return the configuration of a path or a dict, with the batch sizes that it has on the ranks of this job.

    ``deepspeed.DeepSpeedConfig(...)``. An ``mpu`` tells tensor ranks from data-parallel ones, see ``with_own_samples``;
    ``mesh_device`` changes nothing. Raises ConfigError.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else world_size_in(os.environ)
    parsed = load_config(with_own_samples(as_deepspeed_reads(config), mpu), world_size=world_size)
    return resolve(parsed, data_parallel_size=data_parallel_degree(parsed, world_size))


def _refuse_strangers(dist_init_required: bool | None) -> None:
    if dist_init_required is False and not dist.is_initialized():
        raise TopologyError(
            "dist_init_required=False says that the program has joined the process group, but it has not. Remedy: call "
            "deepspeed.init_distributed() or torch.distributed.init_process_group() before, or leave the argument out."
        )


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = None,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group; see ``zerorun.init_distributed``.

    With ``init_method``, ranks meet there: torch's own rendezvous, with ``rank`` and ``world_size`` if they are given. The
    other arguments that ``zerorun.init_distributed`` does not have change nothing. Raises TopologyError if
    ``dist_init_required`` is False and ranks have not met.
    """
    _refuse_strangers(dist_init_required)
    if init_method is not None and not dist.is_initialized():
        process_group.meet_at(init_method, rank, world_size, dist_backend=dist_backend, timeout=timeout)
    process_group.init_distributed(dist_backend=dist_backend, timeout=timeout)
