"""Assembly: initialize() checks its arguments, on all ranks alike, and puts an Engine together."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from ..distributed.agreement import Told, agree
from ..distributed.device import default_device, on_host
from ..distributed.topology import Topology, limit_time
from ..distributed.transport.coded_sum import Feedback, GradientCodes
from ..distributed.transport.communicator import Communicator
from ..distributed.transport.process_group import init_distributed
from ..distributed.transport.world import gather_values
from ..distributed.waits import waiting
from ..errors import ConfigError, MessageError, ModelError, OrderError, SwapError, ZerorunError
from ..log import info_once, setup_logging
from ..memory.fitting import Fitting
from ..monitors.breakdown import TimedModel
from ..monitors.monitor import refuse_missing_libraries
from ..monitors.observer import RunObserver
from ..ops.rounding import MasterFormat
from ..ops.single_pass import SinglePassOptimizer
from ..optim.loss_scaler import LossScaler
from ..optim.lr_schedules import build_schedule
from ..optim.muon import Muon
from ..optim.needs import give_overrides, overrides_of
from ..optim.optimizers import build_optimizer, split_state, watched
from ..optim.parts import PartsOptimizer
from ..optim.requested import OptimizerAsGiven, RawOptimizer, without_elsewhere
from ..pipeline.pipelined import Pipelined
from ..plan.make import buffer_dtype, make_plan, secondary_partition, wire_dtype
from ..plan.sharding_plan import ShardingPlan
from ..plan.units import repeated_blocks
from ..plan.weights import (
    apart_from,
    as_bytes,
    follow_memory,
    followers,
    inner_tensors,
    keep_packing,
    packed_buffers,
    refuse_elsewhere,
    sums_of_scales,
)
from ..startup.float8 import Float8Layers, described, float8_layers
from ..startup.inputs import (
    OptimizerLike,
    has_position,
    is_scheduler,
    loader_notes,
    refuse_settings_of_a_loader,
    refuse_unusable_extras,
    scheduler_made_by,
    take_in,
)
from ..startup.job_topology import topology_of_job
from ..startup.parallelize import cut, divide, divide_sequences, is_part, plan_experts, plan_layers, plan_sequences
from ..startup.parallelized_model import ParallelizedModel
from ..startup.shared_memory import refuse_shared_memory
from ..watch.board import Phase, board, during, limit_waits
from ..zero.builder import build, map_shards
from ..zero.disks import open_disk
from ..zero.gathered_parameters import refuse_open_blocks
from ..zero.init import partitioned, partitioned_as, refuse_overwritten, settle
from ..zero.leaf_modules import mark_chosen
from ..zero.matrix_updates import MatrixUpdates
from ..zero.offload.host_memory import keep_freed
from ..zero.outside_step import OutsideStep
from ..zero.part_sums import PartSums
from ..zero.pieces import OptimizerPiece, build_pieces
from ..zero.runtime import Removable, Runtime, refuse_managed
from ..zero.sharded_model import ShardedModel, refuse_shared_parameters
from ..zero.sharded_optimizer import PiecesInFp32, ShardedOptimizer, refuse_new_group
from ..zero.state_dicts import adopt_loaded_weights, guard_state_dict
from ..zero.unit import Unit, links_of
from .accumulation import Accumulation, ModuleZeroGrad, zero_grad_beside
from .compilation import show_compilation
from .engine import Engine, give_back, let_go
from .taking_over import taking_over

# What may be raised on one rank while others go on. The other named errors of initialize() are those of all ranks alike.
_OF_ONE_RANK = (OrderError, MessageError, SwapError)

T = TypeVar("T")
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
    given = (optimizer, model_parameters, dist.get_world_size(), topology, lr_scheduler is not None)

    def read() -> tuple[Config, RawOptimizer]:
        if isinstance(model, nn.Module):
            refuse_managed(model)
            refuse_shared_parameters(model)
            refuse_open_blocks(model)
        return take_in(model, config, args, *given)

    wanted, raw = taking_over(model, lambda: _agree(read))
    _compare_ranks(model, wanted, topology, raw.group_of)

    def refuse() -> Any:
        limit_waits(wanted.hang_timeout_s)
        refuse_overwritten(model)
        refuse_elsewhere(model, device)
        refuse_shared_memory(model, raw.group_of.keys())
        refuse_unusable_extras(raw, lr_scheduler, training_data)
        refuse_settings_of_a_loader(wanted, training_data, collate_fn)
        refuse_unsavable_states(raw)
        warn_of_unsavable_buffers(model)
        refuse_shared_directory(wanted.checkpoint.dir)
        refuse_missing_libraries(wanted, writes=dist.get_rank() == 0)
        in_fp8 = float8_layers(model, wanted.fp8)
        return in_fp8, described(model, wanted.fp8, in_fp8, device.type)

    in_fp8, note = _agree(refuse)
    wanted = wanted.noting(note, *loader_notes(wanted, training_data))
    settings = wanted.zero_optimization
    planned, unsettled = topology or topology_of_job(wanted), partitioned(model)
    owns_topology = planned.mesh is None

    def look() -> Any:
        return plan_layers(model, wanted, planned, plan_experts(model, planned)), plan_sequences(model, wanted, planned)

    layers, way = _agree(look)
    model = _agree(lambda: cut(model, wanted, planned))
    raw = without_elsewhere(raw, model)
    if wanted.communication_timeout_s is not None:
        limit_time(planned, timedelta(seconds=wanted.communication_timeout_s))
    topology = planned.open(device.type) if owns_topology else planned
    board.write(STAGE=topology.pipe_rank)
    parallelized = ParallelizedModel()
    try:
        multiplying = _agree(lambda: Float8Layers(in_fp8, wanted.fp8, device.type))
        parallelized = parallelized.undone_with(multiplying.remove)
        parallelized = divide(model, layers, wanted, topology, device).undone_with(multiplying.remove)
        parallelized = divide_sequences(model, way, wanted, topology, device, parallelized)
        _agree(multiplying.refuse_odd_parts)
        multiplying.count_tokens(model)
        secondary = secondary_partition(wanted, topology)
        comm = Communicator(topology, device, wire_dtype(wanted), parallelized.model_axes, secondary)
        mark_chosen(model, settings.leaf_module)
        planned_for = partial(make_plan, model, wanted, raw, topology, comm.transport, device.type)
        planned_for = partial(planned_for, replication_of=parallelized.replication_of)
        plan = _agree(planned_for)
        _check_memory(Fitting(model, wanted, raw, plan, device, replication_of=parallelized.replication_of), comm)
        disk = open_disk(plan.disk, wanted, _agree)
        observer = _agree(lambda: RunObserver.make(wanted, topology, device))
    except ZerorunError as error:
        parallelized.undo()
        if owns_topology:
            if not isinstance(error, OrderError):
                _agree(lambda: None)  # others may still be taking what this rank has sent through the groups
            topology.close()
        raise
    divided = unsettled if topology.size("model") > 1 else [p for p in unsettled if id(p) in parallelized.shards]
    settle(divided, model, parallelized.part)
    _move_buffers(model, device, comm, partial(buffer_dtype, wanted))
    if on_host(device):
        keep_freed()
    mapping = map_shards(plan, comm)
    if mapping is None:
        plan = planned_for(maps_shards=False)
    pinned = settings.offload_optimizer.pin_memory and settings.offload_param.pin_memory
    made = build(plan, model, comm, pinned=pinned, mapping=mapping, disk=disk)
    _settle_apart(model, made.units, comm)
    scaler = LossScaler.of(wanted)
    accumulation = Accumulation(wanted, comm, scaler)
    backwards = accumulation if observer is None else observer.watching(comm, accumulation)
    feedback = _feedback(wanted, accumulation, scaler)
    if feedback is not None and not any(hop.feeds_back for hop in plan.hops):
        info_once("zeropp_loco_param has no effect: no gradient is sent in codes between hosts.")
    coding = GradientCodes(plan.hops, wanted.seed or 0, topology.rank, lambda: accumulation.micro_steps, feedback)
    runtime = Runtime(model, plan, made, comm, backwards, coding)
    refuses = not settings.ignore_unused_parameters
    given_optimizer = OptimizerAsGiven(raw.optimizer) if raw.optimizer is not None else None
    kept_as = ShardedModel if comm.statistics.watch is None else TimedModel
    sharded_model, engine, made_as = None, None, _engine_for(model)
    if engine_class is not None:
        made_as = engine_class(made_as)
    try:
        sharded = _shard_optimizer(raw, plan, made.units, comm, parallelized.copies, refuse_unused=refuses)
        if sharded is not None:
            sharded.give_methods(zero_grad=zero_grad_beside(accumulation), add_param_group=refuse_new_group)
        sharded_model = kept_as(runtime, sharded, parallelized, accumulation.gradient_factor)
        runtime.keep(_changes(sharded_model, wanted, device))
        runtime.keep(observer.attached_to(model) if observer is not None else ())
        engine = made_as(
            model,
            wanted,
            topology,
            sharded_model,
            accumulation,
            scaler,
            _scheduler(wanted, lr_scheduler, sharded),
            _loader(wanted, training_data, collate_fn, topology),
            observer,
            owns_topology=owns_topology,
        )
        if sharded is not None:
            runtime.keep([ModuleZeroGrad(model, accumulation, weakref.WeakMethod(engine.zero_grad))])
        runtime.keep(runtime.open_methods())
        show_compilation()
        if wanted.compile.enabled:
            engine.compile(backend=wanted.compile.backend, **wanted.compile.kwargs)
        engine.begin_saving()
        engine.announce()
    except BaseException as error:
        taken = sharded_model or kept_as(runtime, None, parallelized, accumulation.gradient_factor)
        if _is_of_all_ranks(error) and not taken.half_loaded.has("weights"):
            if engine is not None:
                engine.give_back(exact=True, as_given=True)
            else:
                own = topology if owns_topology else None
                give_back(taken, own, partial(let_go, taken, observer, {}), exact=True, as_given=True)
            if given_optimizer is not None:
                given_optimizer.put_back()
        raise
    _note_batch_norm(model, topology)
    for note in wanted.notes:
        info_once(f"{note.key}: {note.reason}")
    return engine


# -- checks ------------------------------------------------------------------------------------------------------


def _agree(check: Callable[[], T]) -> T:
    """Run ``check`` on every rank. If it fails on any rank, raise the same error on all, so that no rank waits."""
    return agree(check, _gathered if dist.get_world_size() > 1 else lambda told: [told])


def _gathered(told: Told) -> list[Told]:
    with waiting("initialize(): whether all ranks agree"):
        return gather_values(told)


def _is_of_all_ranks(error: BaseException) -> bool:
    """Whether it is known that no rank goes on without ``error``, so that collectives may follow it."""
    return dist.get_world_size() == 1 or (isinstance(error, ZerorunError) and not isinstance(error, _OF_ONE_RANK))


def _compare_ranks(model: nn.Module, config: Config, topology: Topology | None, group_of: dict[int, int]) -> None:
    """Raise, on all ranks alike, if a rank has another configuration than rank 0, or another model than it should.

    A whole model must be the same on all ranks, and a part the same on all ranks that have this part. The parameter groups
    must agree as well, and so must the order in which ``Init`` made the parameters, because values were sent in this order.
    """
    if dist.get_world_size() == 1:
        return
    degrees = {"pipe": config.pipeline.stages, "tensor": config.tensor_parallel.size}
    planned = topology or Topology.plan(dist.get_world_size(), dist.get_rank(), **degrees)
    first = planned.ranks_along("data")[0] if is_part(model) else 0
    described = [*_described(model, group_of)]
    described += sums_of_scales(model)  # scales are not overwritten, while packed weights become those of rank 0
    bounds = list(model.partitions()) if isinstance(model, Pipelined) else []
    mine = (config.fingerprint(), hashlib.sha256("\n".join(described).encode()).hexdigest(), first, bounds)
    with waiting("initialize(): whether all ranks build the same model"):
        found: list[Any] = gather_values(mine)
    for rank, theirs in enumerate(found):
        if theirs[0] != found[0][0]:
            _explain_difference(config.describe().splitlines()[1:], rank, 0, "configuration")
        if theirs[3] != found[0][3]:
            raise ModelError(_other_cut(rank, theirs[3], found[0][3]))
        if theirs[1] != found[theirs[2]][1]:
            _explain_difference(described, rank, theirs[2], "model")


def _other_cut(rank: int, theirs: list[int], ours: list[int]) -> str:
    """Say how rank ``rank`` cuts a pipeline, at the bounds ``theirs``, and what to do. ``ours``: those of rank 0."""
    if theirs[-1:] != ours[-1:]:
        count, other = ([*bounds[-1:], 0][0] for bounds in (theirs, ours))
        return f"rank {rank} builds a pipeline of {count} layers, and rank 0 one of {other}. Remedy: build the same model."
    return (
        f"rank {rank} cuts the pipeline's layers at {theirs}, and rank 0 at {ours}. Remedy: pass the same "
        "partition_method on all ranks; measured times differ, so broadcast those of rank 0."
    )


def _described(model: nn.Module, group_of: dict[int, int]) -> Iterator[str]:
    for name, param in model.named_parameters():
        group = f", group {group_of[id(param)]} of the optimizer" if id(param) in group_of else ""
        number = partitioned_as(param)
        made = f", number {number} in zerorun.zero.Init" if number is not None else ""
        yield f"{name} {tuple(param.shape)} {param.dtype} {param.requires_grad}{group}{made}"
    for name, buffer in sorted(model.named_buffers(remove_duplicate=False)):
        yield f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}"


def _explain_difference(lines: list[str], rank: int, first: int, what: str) -> None:
    found = gather_values(lines)
    pairs = zip([*found[first], "(nothing)"], [*found[rank], "(nothing)"], strict=False)
    ours, theirs = next(((a, b) for a, b in pairs if a != b), ("", ""))
    remedy = f"build the same {what} on every rank"
    if what == "model":
        remedy += ", in the same order (that of a set differs between ranks), and give its optimizer the same groups"
    text = (
        f"rank {rank} has another {what} than rank {first}: {theirs.strip()!r} instead of {ours.strip()!r}. "
        f"Remedy: {remedy}."
    )
    raise ConfigError.saying(text) if what == "configuration" else ModelError(text)


def _engine_for(model: nn.Module) -> type[Engine]:
    if not isinstance(model, Pipelined):
        return Engine
    from .pipeline_engine import PipelineEngine  # imports schedules and messages, which other engines do not need

    return PipelineEngine


# -- assembly ----------------------------------------------------------------------------------------------------


def _feedback(config: Config, accumulation: Accumulation, scaler: LossScaler) -> Feedback | None:
    """Return how errors of coded gradients are fed back. What is kept has the loss scale in it."""
    settings = config.zero_optimization.zeropp_loco_param
    if settings is None:
        return None
    reset = settings.reset_T * config.gradient_accumulation_steps
    return Feedback(settings.err_beta, lambda: (accumulation.micro_steps // reset, scaler.scale))


def _check_memory(fitting: Fitting, comm: Communicator) -> None:
    """Raise DoesNotFitError, on all ranks alike, if memory is certain to be too small."""
    if os.environ.get("ZERORUN_MEMORY_CHECK", "1") == "0":
        return
    shared = comm.control.values(fitting.demand)
    _agree(lambda: fitting.require(shared))


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
                    moved = moved.contiguous()
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


def _shard_optimizer(
    raw: RawOptimizer,
    plan: ShardingPlan,
    units: list[Unit],
    comm: Communicator,
    copies: Mapping[str, str],
    *,
    refuse_unused: bool,
) -> ShardedOptimizer | None:
    if not raw.groups:
        return None
    pieces = build_pieces(units, whole=raw.whole, parts=plan.by_parts)
    members: list[list[OptimizerPiece]] = [[] for _ in raw.groups]
    for piece in pieces:
        members[piece.group].append(piece)
    if raw.optimizer is not None:
        overrides = overrides_of(raw.optimizer)
        for group, owned in zip(raw.optimizer.param_groups, members, strict=True):
            group["params"] = [piece.tensor for piece in owned]
        optimizer = raw.optimizer
        owners = {piece.tensor: id(piece.flat_group.params[piece.runs[0].entry]) for piece in pieces if overrides}
        give_overrides(optimizer, {tensor: overrides[owner] for tensor, owner in owners.items() if owner in overrides})
        optimizer.state.clear()  # Adagrad has some of whole parameters, and makes them anew
    else:
        groups = [
            {**group, "params": [piece.tensor for piece in owned]} for group, owned in zip(raw.groups, members, strict=True)
        ]
        optimizer = build_optimizer(raw.name, raw.params, groups)
    if isinstance(optimizer, PartsOptimizer) and plan.by_parts:
        number = {part.name: index for index, part in enumerate(plan.parts)}
        places = {piece.tensor: number[piece.flat_group.names[piece.runs[0].entry]] for piece in pieces}
        optimizer.take_parts(plan.parts, places, PartSums(plan, comm))
    if isinstance(optimizer, SinglePassOptimizer):
        optimizer.formats.update({piece.tensor: piece.format for piece in pieces})
        optimizer.rests.update({piece.tensor: rest for piece in pieces if (rest := piece.rest) is not None})
        if raw.seed is not None:
            optimizer.origins.update({piece.tensor: piece.origins(copies, raw.seed) for piece in pieces})
        link = next((link for link in links_of(units) if link.store is not None), None)
        if link is not None:
            optimizer.state_home = link.home
    matrices = None
    if plan.matrices is not None and isinstance(optimizer, Muon):
        matrices = MatrixUpdates(plan, plan.matrices, optimizer, units, comm.stage())
    in_fp32 = None
    if not isinstance(optimizer, SinglePassOptimizer) and (raw.formats or raw.master is not MasterFormat.FP32):
        cuts, seed = not (raw.whole or plan.by_parts), raw.seed
        in_fp32 = PiecesInFp32(optimizer, lambda piece: () if seed is None else piece.origins(copies, seed), cuts=cuts)
    return ShardedOptimizer(
        optimizer,
        pieces,
        units,
        comm,
        split_state,
        refuse_unused=refuse_unused,
        matrices=matrices,
        in_fp32=in_fp32,
        watched=watched(optimizer, raw.divided_for),
    )


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
