"""Assembly: initialize() checks its arguments, on all ranks alike, and puts an Engine together."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from ..activations.blocks import CheckpointedBlocks, Recompute
from ..activations.checkpointing import Adopted
from ..activations.host_pool import HostPool
from ..checkpoint.automatic import refuse_shared_directory
from ..checkpoint.save import refuse_unsavable_states, warn_of_unsavable_buffers
from ..config.parse import Config
from ..data import EpochLoader
from ..distributed.agreement import agree, agree_and_tell
from ..distributed.device import default_device, on_host
from ..distributed.topology import Topology, limit_time
from ..distributed.transport.communicator import Communicator
from ..distributed.transport.process_group import init_distributed
from ..distributed.transport.quantised_sum import Feedback, GradientCodes
from ..distributed.transport.world import gather_values
from ..distributed.waits import RollCall, waiting
from ..errors import ConfigError, MessageError, OrderError, SwapError, ZerorunError
from ..log import info_once, setup_logging
from ..memory.fitting import Demand, Fitting
from ..model_setup.checked_arguments import (
    OptimizerLike,
    has_position,
    is_scheduler,
    loader_notes,
    refuse_settings_of_a_loader,
    refuse_unusable_extras,
    scheduler_made_by,
    take_in,
)
from ..model_setup.float8 import Float8Layers, described, float8_layers
from ..model_setup.job_topology import topology_of_job
from ..model_setup.optimizer_on_pieces import shard_optimizer
from ..model_setup.parallelize import cut, divide, divide_sequences, plan_experts, plan_layers, plan_sequences
from ..model_setup.parallelized_model import ParallelizedModel
from ..model_setup.same_model import Extras, Fingerprint, compare_extras, compare_ranks, extras
from ..model_setup.shared_memory import refuse_shared_memory
from ..monitors.breakdown import TimedModel
from ..monitors.monitor import refuse_missing_libraries
from ..monitors.observer import RunObserver, observes
from ..ops.single_pass import SinglePassOptimizer
from ..optim.loss_scaler import LossScaler
from ..optim.lr_schedules import build_schedule
from ..optim.requested_optimizer import OptimizerAsGiven, RawOptimizer, without_elsewhere
from ..pipeline.pipelined import Pipelined
from ..plan.make_plan import buffer_dtype, make_plan, secondary_partition, wire_dtype
from ..plan.parameter_kinds import (
    apart_from,
    as_bytes,
    follow_memory,
    followers,
    inner_tensors,
    keep_packing,
    packed_buffers,
    refuse_elsewhere,
)
from ..plan.sharding_plan import ShardingPlan
from ..plan.units import repeated_blocks
from ..watch.board import Phase, board, during, limit_waits
from ..zero.builder import build, map_shards
from ..zero.disks import Disk, open_disk
from ..zero.gathered_parameters import refuse_open_blocks
from ..zero.init import partitioned, refuse_overwritten, settle
from ..zero.leaf_modules import mark_chosen
from ..zero.offload.host_memory import keep_freed
from ..zero.optimizer_methods import OutsideStep
from ..zero.runtime import Removable, Runtime, refuse_managed
from ..zero.sharded_model import ShardedModel, refuse_shared_parameters
from ..zero.sharded_optimizer import ShardedOptimizer, refuse_new_group
from ..zero.state_dicts import adopt_loaded_weights, guard_copies, guard_state_dict
from ..zero.unit import Unit
from .accumulation import Accumulation, ModuleZeroGrad, zero_grad_beside
from .clip_calls import ClipCalls
from .compilation import show_compilation
from .engine import Engine, give_back, let_go
from .former_engines import taking_over
from .param_grad import ParamGrad

# What may be raised on one rank while others go on. The other named errors of initialize() are those of all ranks alike.
_OF_ONE_RANK = (OrderError, MessageError, SwapError)

T = TypeVar("T")
V = TypeVar("V")
P = ParamSpec("P")


def _told_plainly(function: Callable[P, T]) -> Callable[P, T]:
    """Raise configuration errors without the traceback of the frames that found them: the message says it all."""

    @wraps(function)
    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise error.with_traceback(None) from None

    return told


@_told_plainly
@during(Phase.INITIALIZE)
def initialize(
    model: nn.Module,
    config: str | Path | dict[str, Any] | None = None,
    *,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    training_data: Dataset[Any] | Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    topology: Topology | None = None,
    args: Any = None,
    engine_class: Callable[[type[Engine]], type[Engine]] | None = None,
) -> Engine:
    """Turn an ordinary module into a training engine. All ranks must call it with the same model and configuration.

    ``config``: path, dict, or None for ``args.config``. ``optimizer``: an instance over the model's parameters, or a
    callable that makes one; it takes precedence over the configuration's. ``model_parameters``: parameters or parameter
    groups to optimize (default: all that require a gradient). ``lr_scheduler``: an instance, or a callable that takes the
    optimizer; it takes precedence as well. ``training_data``: a dataset for ``engine.dataloader``, or a loader with a state
    of its own (torchdata's StatefulDataLoader), whose position is saved in checkpoints. ``topology``: if it has process
    groups, it is used as it is and stays open; if it has none, ``engine.topology`` is a copy with groups.
    ``engine_class``: given the class that the engine would have, returns one derived from it to be used instead. The engine
    that is returned also unpacks as (engine, optimizer, dataloader, lr_scheduler).

    A module that an engine has, or a parameter of, is refused, unless no rank has that engine any more: then that gives its
    module back first, with the weights of now. The module's parameters become views of flat buffers, with rank 0's values.
    Raises ConfigError, ModelError, TopologyError or DoesNotFitError, on all ranks alike, before any device memory is taken.
    Where it fails later, as when ``checkpoint.auto_resume`` or ``lr_scheduler`` does, the module and the optimizer are as
    they were given, and may be given again: weights have the digits of their masters, and frozen ones and buffers, which
    have none, are rounded to what such an engine keeps. That takes all ranks: where others may go on without the error,
    they stay with the engine, as they do where weights are loaded by half.
    """
    setup_logging()
    if topology is None and isinstance(model, Pipelined) and isinstance(model.topology(), Topology):
        topology = model.topology()
    device = default_device()
    init_distributed(device)
    script = _Script(optimizer, model_parameters, lr_scheduler, training_data, collate_fn, topology, engine_class)
    wanted, raw, in_fp8 = _read(model, config, args, script, device)
    prepared = _prepared(model, wanted, raw, in_fp8, script, device)
    engine = _engine_of(prepared, _built(prepared), script)
    _note_batch_norm(prepared.model, prepared.topology)
    for note in wanted.notes:
        info_once(f"{note.key}: {note.reason}")
    return engine


@dataclass(frozen=True)
class _Script:
    """What the script has given besides the model and the configuration, see ``initialize``."""

    optimizer: OptimizerLike | None
    model_parameters: Iterable[Any] | None
    lr_scheduler: Any
    training_data: Any
    collate_fn: Callable[[list[Any]], Any] | None
    topology: Topology | None
    engine_class: Callable[[type[Engine]], type[Engine]] | None


@dataclass(frozen=True)
class _Prepared:
    """A model whose layers are divided, and the plan for what this rank has of it. None of it has been moved."""

    model: nn.Module  # with the layers of this rank's pipeline stage
    device: torch.device
    config: Config
    raw: RawOptimizer
    topology: Topology
    owns_topology: bool
    comm: Communicator
    parallelized: ParallelizedModel
    unsettled: list[nn.Parameter]  # made in ``zero.Init``
    plan: ShardingPlan
    plan_without_mapping: Callable[[], ShardingPlan]
    disk: Disk | None
    observer: RunObserver | None


# -- checks ------------------------------------------------------------------------------------------------------


def _agree(check: Callable[[], T]) -> T:
    """Run ``check`` on every rank. If it fails on any rank, raise the same error on all, so that no rank waits."""
    return agree(check, _gathered)


def _agree_and_tell(check: Callable[[], tuple[T, V]]) -> tuple[T, list[V]]:
    """``_agree``, and what ``check`` tells on each rank."""
    return agree_and_tell(check, _gathered)


def _gathered(told: Any) -> list[Any]:
    if dist.get_world_size() == 1:
        return [told]
    roll = RollCall("initialize()", dist.get_world_size())
    roll.sign(dist.distributed_c10d._get_default_store(), dist.get_rank())
    with waiting("initialize(): whether all ranks agree", roll.missing):
        return gather_values(told)


def _is_of_all_ranks(error: BaseException) -> bool:
    """Whether it is known that no rank goes on without ``error``, so that collectives may follow it."""
    return dist.get_world_size() == 1 or (isinstance(error, ZerorunError) and not isinstance(error, _OF_ONE_RANK))


# -- what is wanted, and whether it can be had ---------------------------------------------------------------------


def _read(
    model: nn.Module, config: Any, args: Any, script: _Script, device: torch.device
) -> tuple[Config, RawOptimizer, Any]:
    """Return (configuration, what is asked of the optimizer, layers that multiply in fp8), on which all ranks agree."""

    def read() -> tuple[tuple[Config, RawOptimizer], Fingerprint]:
        if isinstance(model, nn.Module):
            refuse_managed(model)
            refuse_shared_parameters(model)
            refuse_open_blocks(model)
        given = (script.optimizer, script.model_parameters, dist.get_world_size(), script.topology)
        taken, raw = take_in(model, config, args, *given, script.lr_scheduler is not None)
        return (taken, raw), Fingerprint.of(model, taken, script.topology, raw)

    (wanted, raw), found = taking_over(model, lambda: _agree_and_tell(read))
    compare_ranks(found, model, wanted, raw)

    def refuse() -> tuple[Any, Extras]:
        limit_waits(wanted.hang_timeout_s)
        refuse_overwritten(model)
        refuse_elsewhere(model, device)
        refuse_shared_memory(model, raw.group_of.keys())
        refuse_unusable_extras(raw, script.lr_scheduler, script.training_data)
        refuse_settings_of_a_loader(wanted, script.training_data, script.collate_fn)
        refuse_unsavable_states(raw)
        warn_of_unsavable_buffers(model)
        refuse_shared_directory(wanted.checkpoint.dir)
        refuse_missing_libraries(wanted, writes=dist.get_rank() == 0)
        in_fp8 = float8_layers(model, wanted.fp8)
        note = described(model, wanted.fp8, in_fp8, device.type)
        return (in_fp8, note), extras(script.lr_scheduler, script.training_data)

    (in_fp8, note), every = _agree_and_tell(refuse)
    compare_extras(every)
    return wanted.noting(note, *loader_notes(wanted, script.training_data)), raw, in_fp8


def _prepared(
    model: nn.Module, wanted: Config, raw: RawOptimizer, in_fp8: Any, script: _Script, device: torch.device
) -> _Prepared:
    """Divide the model over pipeline stages and in its layers, and plan the rest. If it fails, the model is as before."""
    planned, unsettled = script.topology or topology_of_job(wanted), partitioned(model)
    owns_topology = planned.mesh is None

    def look() -> Any:
        return plan_layers(model, wanted, planned, plan_experts(model, planned)), plan_sequences(model, wanted, planned)

    layers, way = None, None
    if planned.pipe * planned.tensor * planned.expert * planned.context > 1 or isinstance(model, Pipelined):
        layers, way = _agree(look)
        model = _agree(lambda: cut(model, wanted, planned))
    raw = without_elsewhere(raw, model)
    if wanted.communication_timeout_s is not None:
        limit_time(planned, timedelta(seconds=wanted.communication_timeout_s))
    topology = planned.open(device.type) if owns_topology else planned
    board.write(STAGE=topology.pipe_rank)
    parallelized = ParallelizedModel()
    try:
        swap = partial(Float8Layers, in_fp8, wanted.fp8, device.type)
        multiplying = _agree(swap) if wanted.fp8.enabled else swap()
        parallelized = parallelized.undone_with(multiplying.remove)
        parallelized = divide(model, layers, wanted, topology, device, raw).undone_with(multiplying.remove)
        parallelized = divide_sequences(model, way, wanted, topology, device, parallelized)
        if wanted.fp8.enabled:
            _agree(multiplying.refuse_odd_parts)
        multiplying.count_tokens(model)
        secondary = secondary_partition(wanted, topology)
        comm = Communicator(topology, device, wire_dtype(wanted), parallelized.model_axes, secondary)
        mark_chosen(model, wanted.zero_optimization.leaf_module)
        make = partial(make_plan, model, wanted, raw, topology, comm.transport, device.type)
        make = partial(make, replication_of=parallelized.replication_of)
        fitting_of = partial(Fitting, model, wanted, raw, device=device, replication_of=parallelized.replication_of)
        plan = _fitting_plan(make, fitting_of)
        disk = open_disk(plan.disk, wanted, _agree)
        observer = _agree(lambda: RunObserver.make(wanted, topology, device)) if observes(wanted) else None
    except ZerorunError as error:
        parallelized.undo()
        if owns_topology:
            if not isinstance(error, OrderError):
                _agree(lambda: None)  # others may still be taking what this rank has sent through the groups
            topology.close()
        raise
    return _Prepared(
        model=model,
        device=device,
        config=wanted,
        raw=raw,
        topology=topology,
        owns_topology=owns_topology,
        comm=comm,
        parallelized=parallelized,
        unsettled=unsettled,
        plan=plan,
        plan_without_mapping=partial(make, maps_shards=False),
        disk=disk,
        observer=observer,
    )


# -- assembly ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Built:
    """What runs a model whose parameters are in flat buffers."""

    runtime: Runtime
    accumulation: Accumulation
    scaler: LossScaler


def _built(prepared: _Prepared) -> _Built:
    """Move parameters into flat buffers and buffers to the device, both with rank 0's values."""
    model, wanted, device, comm, plan = prepared.model, prepared.config, prepared.device, prepared.comm, prepared.plan
    unsettled, shards = prepared.unsettled, prepared.parallelized.shards
    divided = unsettled if prepared.topology.size("model") > 1 else [p for p in unsettled if id(p) in shards]
    settle(divided, model, prepared.parallelized.part)
    _move_buffers(model, device, comm, partial(buffer_dtype, wanted))
    if on_host(device):
        keep_freed()
    mapping = map_shards(plan, comm)
    if mapping is None:
        plan = prepared.plan_without_mapping()
    settings = wanted.zero_optimization
    pinned = settings.offload_optimizer.pin_memory and settings.offload_param.pin_memory
    made = build(plan, model, comm, pinned=pinned, mapping=mapping, disk=prepared.disk)
    _settle_apart(model, made.units, comm)
    scaler = LossScaler.of(wanted)
    accumulation = Accumulation(wanted, comm, scaler)
    backwards = accumulation if prepared.observer is None else prepared.observer.watching(comm, accumulation)
    feedback = _feedback(wanted, accumulation, scaler)
    if feedback is not None and not any(hop.feeds_back for hop in plan.hops):
        info_once("zeropp_loco_param has no effect: no gradient is sent in codes between hosts.")
    coding = GradientCodes(plan.hops, wanted.seed or 0, comm.topology.rank, lambda: accumulation.micro_steps, feedback)
    runtime = Runtime(model, plan, made, comm, backwards, coding)
    return _Built(runtime, accumulation, scaler)


def _engine_of(prepared: _Prepared, built: _Built, script: _Script) -> Engine:
    """Return the engine. If that fails on all ranks alike, the module and the optimizer are as they were given."""
    model, wanted, comm = prepared.model, prepared.config, prepared.comm
    runtime, accumulation, observer = built.runtime, built.accumulation, prepared.observer
    kept_as = ShardedModel if comm.statistics.watch is None else TimedModel
    given_optimizer = OptimizerAsGiven(prepared.raw.optimizer) if prepared.raw.optimizer is not None else None
    made_as = _engine_for(model)
    if script.engine_class is not None:
        made_as = script.engine_class(made_as)
    sharded_model, engine = None, None
    try:
        sharded = _optimizer_of(prepared, built)
        sharded_model = kept_as(runtime, sharded, prepared.parallelized, accumulation.gradient_factor)
        runtime.keep(_changes(sharded_model, wanted, prepared.device))
        runtime.keep(observer.attached_to(model) if observer is not None else ())
        engine = made_as(
            model,
            wanted,
            prepared.topology,
            sharded_model,
            accumulation,
            built.scaler,
            _scheduler(wanted, script.lr_scheduler, sharded),
            _loader(wanted, script.training_data, script.collate_fn, prepared.topology),
            observer,
            owns_topology=prepared.owns_topology,
        )
        if sharded is not None:
            drop = weakref.WeakMethod(engine.zero_grad)
            runtime.keep([ModuleZeroGrad(model, accumulation, drop)])
            sharded.give_methods(zero_grad=zero_grad_beside(accumulation, drop))
            runtime.keep([ClipCalls(sharded_model, wanted.gradient_clipping)])
            if not isinstance(model, Pipelined):  # whose script has no turn between a backward and the step
                runtime.keep([ParamGrad(engine)])
        runtime.keep(runtime.open_methods())
        show_compilation()
        if wanted.compile.enabled:
            engine.compile(backend=wanted.compile.backend, **wanted.compile.kwargs)
        engine.begin_saving()
        engine.announce()
    except BaseException as error:
        taken = sharded_model or kept_as(runtime, None, prepared.parallelized, accumulation.gradient_factor)
        if _is_of_all_ranks(error) and not taken.half_loaded.has("weights"):
            if engine is not None:
                engine.give_back(exact=True, as_given=True)
            else:
                own = prepared.topology if prepared.owns_topology else None
                give_back(taken, own, partial(let_go, taken, observer, {}), exact=True, as_given=True)
            if given_optimizer is not None:
                given_optimizer.put_back()
        raise
    return engine


def _engine_for(model: nn.Module) -> type[Engine]:
    if not isinstance(model, Pipelined):
        return Engine
    from .pipeline_engine import PipelineEngine  # imports schedules and messages, which other engines do not need

    return PipelineEngine


def _optimizer_of(prepared: _Prepared, built: _Built) -> ShardedOptimizer | None:
    refuses, copies = not prepared.config.zero_optimization.ignore_unused_parameters, prepared.parallelized.copies
    plan, units = built.runtime.plan, built.runtime.units
    sharded = shard_optimizer(prepared.raw, plan, units, prepared.comm, copies, refuse_unused=refuses)
    if sharded is not None:
        sharded.give_methods(add_param_group=refuse_new_group)
    return sharded


def _feedback(config: Config, accumulation: Accumulation, scaler: LossScaler) -> Feedback | None:
    """Return how errors of coded gradients are fed back. What is kept has the loss scale in it."""
    settings = config.zero_optimization.zeropp_loco_param
    if settings is None:
        return None
    reset = settings.reset_T * config.gradient_accumulation_steps
    return Feedback(settings.err_beta, lambda: (accumulation.micro_steps // reset, scaler.scale))


def _fitting_plan(make: Callable[[], ShardingPlan], fitting_of: Callable[[ShardingPlan], Fitting]) -> ShardingPlan:
    """Make the plan. Raises DoesNotFitError, on all ranks alike, if memory is certain to be too small for it."""

    def look() -> tuple[tuple[ShardingPlan, Fitting | None], Demand | None]:
        plan = make()
        fitting = None if os.environ.get("ZERORUN_MEMORY_CHECK", "1") == "0" else fitting_of(plan)
        return (plan, fitting), None if fitting is None else fitting.demand

    (plan, fitting), demands = _agree_and_tell(look)
    known = [demand for demand in demands if demand is not None]
    if fitting is not None and len(known) == len(demands):
        _agree(partial(fitting.require, known))
    return plan


def _move_buffers(
    model: nn.Module, device: torch.device, comm: Communicator, dtype_of: Callable[[torch.Tensor], torch.dtype]
) -> None:
    """Move buffers to the device, in the dtype that ``dtype_of`` gives, with rank 0's values. Shared ones stay shared."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    made |= {id(packed): (packed, packed) for packed in packed_buffers(model).values()}  # which are in units
    for module in model.modules():
        for name, buffer in sorted(module._buffers.items()):  # sorted: ranks may have registered them in any order
            if buffer is None:
                continue
            if id(buffer) not in made:
                moved = buffer.to(device, dtype_of(buffer))
                if moved.numel() and not moved.is_meta:
                    moved = moved.resolve_conj().resolve_neg().contiguous()
                    comm.control.data_broadcast(moved, 0, "initial buffers")
                made[id(buffer)] = buffer, moved
            module._buffers[name] = made[id(buffer)][1]


def _settle_apart(model: nn.Module, units: list[Unit], comm: Communicator) -> None:
    """Give parameters that are in no unit rank 0's values, in place: their class and all references to them stay."""
    taken = [param for unit in units for flat_group in unit.flat_groups for param in flat_group.params]
    for param in apart_from(model, taken).values():
        for _, inner in inner_tensors(param):
            memory = as_bytes(inner.contiguous())
            comm.control.data_broadcast(memory, 0, "initial parameters")
            if not inner.is_contiguous():
                inner.copy_(memory.view(inner.dtype).view(inner.shape))


def _scheduler(config: Config, client: Any, sharded: ShardedOptimizer | None) -> Any:
    optimizer = sharded.optimizer if sharded is not None else None
    if client is not None:
        return client if is_scheduler(client) else _agree(lambda: scheduler_made_by(client, optimizer))
    if config.scheduler is None or optimizer is None:
        return None
    return build_schedule(config.scheduler.type, dict(config.scheduler.params), optimizer)


def _changes(sharded_model: ShardedModel, config: Config, device: torch.device) -> Iterator[Removable]:
    """Make the other changes of the module and the optimizer that are undone when the engine is destroyed."""
    model = sharded_model.module
    sharded = sharded_model.optimizer
    if sharded is not None and not isinstance(sharded.optimizer, SinglePassOptimizer):
        yield OutsideStep(sharded_model, sharded)
    # A PipelineModule is plainly a part; a model that is cut looks like the whole.
    whole = getattr(model, "whole_model", model)
    for module in dict.fromkeys([model, whole]):
        yield from guard_state_dict(module, sharded_model, _lacks_layers if whole is not model else lambda _: False)
    yield from guard_copies(sharded_model)
    yield from adopt_loaded_weights(model, sharded_model)
    keep_packing(model)
    for layer in followers(model):
        follow_memory(layer)
        yield layer.register_forward_pre_hook(follow_memory)
    yield from _recompute(model, config, device)


def _lacks_layers(module: nn.Module) -> bool:
    """True if other pipeline stages have some of the modules inside ``module``."""
    return any(getattr(part, "is_elsewhere", False) for part in module.modules())


def _note_batch_norm(model: nn.Module, topology: Topology) -> None:
    """Tell the user that BatchNorm layers normalise by each rank's own samples, which may be unexpected."""
    own = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    name = next((n for n, m in model.named_modules() if isinstance(m, own) and m.training), None)
    if name is not None and topology.data_size > 1:
        info_once(
            f"{name!r} and other BatchNorm layers normalise by the samples of each rank alone, as in DDP; exports, and "
            "loads on other ranks, have the running statistics of rank 0. For statistics of all ranks, on GPUs: model = "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before initialize()."
        )


def _recompute(model: nn.Module, config: Config, device: torch.device) -> Iterator[Removable]:
    """Carry out the section ``activation_checkpointing``."""
    section = config.activation_checkpointing
    pool = HostPool(device) if section.cpu_checkpointing else None
    settings = Recompute(section.policy, section.every_n, pool)
    if settings != Recompute():
        yield Adopted(settings)
    if section.policy != "none":
        yield CheckpointedBlocks(model, repeated_blocks(model), settings)


def _loader(
    config: Config, data: Any, collate_fn: Callable[[list[Any]], Any] | None, topology: Topology
) -> EpochLoader | Any:
    if data is None or has_position(data):
        return data
    return EpochLoader(
        data,
        config.train_micro_batch_size_per_gpu,
        topology,
        collate_fn=collate_fn,
        shuffle=config.dataloader.shuffle,
        drop_last=config.dataloader_drop_last,
        seed=config.seed or 0,
        num_workers=config.dataloader.num_workers,
        divide=config.dataloader.divide_stream,
    )
