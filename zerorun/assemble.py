"""Assembly: initialize() checks what it is given, on all ranks alike, and puts an Engine together."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .activations.blocks import CheckpointedBlocks, Recompute
from .activations.host import HostPool
from .checkpoint.directory import newest_first
from .checkpoint.routine import Routine
from .checkpointing import Adopted
from .comm import Communicator, default_device, init_distributed
from .config import Config, ModelFacts, load_config, resolve
from .dataloader import EpochLoader
from .engine import Engine
from .errors import ConfigError, ConfigProblem, ModelError, TopologyError, ZerorunError
from .log import info_once, logger, setup_logging
from .optim import build_optimizer, is_elementwise, refuse_unusable, resolve_optimizer, split_state
from .precision import DTYPES, LossScaler
from .schedules import build_schedule
from .topology import Topology
from .zero.access import Registry, guard_state_dict
from .zero.partition import UnitBuilder, UnitPolicy, UnitSpec, choose_units, repeated_blocks
from .zero.pieces import OptimizerPiece, build_pieces
from .zero.placement import Placement, place_units
from .zero.policy import STAGES, Policy
from .zero.runtime import Runtime
from .zero.stepping import ShardedOptimizer
from .zero.unit import Unit

OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]


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
) -> Engine:
    """Turn an ordinary module into a training engine. All ranks must call it with the same model and configuration.

    ``config``: path, dict, or None for ``args.config``. ``optimizer``: an instance over the model's parameters, or a
    callable that makes one; it wins over the configuration's. ``model_parameters``: parameters or parameter groups to
    optimize (default: all that require a gradient). ``lr_scheduler``: an instance, or a callable on the optimizer.
    ``training_data``: a dataset for ``engine.dataloader``, or a loader with a state of its own (torchdata's
    StatefulDataLoader), whose position is saved as well. Also unpacks as (engine, optimizer, dataloader, lr_scheduler).

    The module's parameters become views of flat buffers, with rank 0's values. Raises ConfigError, ModelError or
    TopologyError, on all ranks alike, before any device memory is taken.
    """
    setup_logging()
    device = default_device()
    init_distributed(device)
    wanted, raw = _agree(lambda: _prepare(model, config, args, optimizer, model_parameters, topology))
    _compare_ranks(model, wanted)
    settings = wanted.zero_optimization
    owns_topology = topology is None
    topology = topology or Topology.create(
        dist.get_world_size(), dist.get_rank(), shard_degree=_shard_degree(wanted), device_type=device.type
    )
    wire = DTYPES[wanted.communication_data_type or wanted.data_types.grad_accum_dtype or "fp32"]
    comm = Communicator(topology, device, wire)
    policy = _policy(wanted, topology)
    compute = _compute_dtype(wanted)
    _move_buffers(model, device, comm)
    builder = UnitBuilder(policy, comm, device, compute, 2, raw.group_of, raw.whole)
    specs = choose_units(model, _unit_policy(wanted))
    overlap = _overlap(wanted, comm)
    builder.slot_count = _slot_count(wanted, overlap, [sum(p.numel() for _, p in spec.params) for spec in specs[1:]])
    builder.placements = _placements(wanted, specs, raw)
    builder.pinned = settings.offload_optimizer.pin_memory and settings.offload_param.pin_memory
    units, param_slots, grad_slots = builder.build(specs)
    reduce_now: list[Callable[[], bool]] = []
    runtime = Runtime(model, units, policy, comm, param_slots, grad_slots, lambda: reduce_now[0]())
    runtime.overlap = overlap
    sharded = _shard_optimizer(raw, units, comm)
    registry = Registry(runtime, sharded, lambda: engine.gradient_factor())
    runtime._handles.append(guard_state_dict(model, runtime))
    runtime._handles += _recompute(model, wanted, device)
    engine = Engine(
        model,
        wanted,
        topology,
        comm,
        units,
        runtime,
        sharded,
        _scaler(wanted),
        _scheduler(wanted, lr_scheduler, sharded),
        _loader(wanted, training_data, collate_fn, topology),
        compute,
    )
    engine.registry = registry
    engine.owns_topology = owns_topology
    engine.checkpointer  # noqa: B018  it remembers the model as it is now
    reduce_now.append(engine._reduce_in_this_backward)
    if sharded is not None:
        sharded.refuse_unused = not settings.ignore_unused_parameters
    if wanted.compile.enabled:
        engine.compile(backend=wanted.compile.backend, **wanted.compile.kwargs)
    _begin_routine(engine)
    engine.announce()
    for note in wanted.notes:
        info_once(f"{note.key}: {note.reason}")
    return engine


# -- checks ------------------------------------------------------------------------------------------------------


@dataclass
class _Raw:
    """The optimizer before sharding. ``group_of``: id(parameter) -> index of its group."""

    optimizer: torch.optim.Optimizer | None
    groups: list[dict[str, Any]]
    group_of: dict[int, int]
    name: str
    params: dict[str, Any]
    whole: bool


def _agree(prepare: Callable[[], tuple[Config, _Raw]]) -> tuple[Config, _Raw]:
    """Run ``prepare`` on every rank; if it fails on any, raise the same error on all, so that nobody waits."""
    result: tuple[Config, _Raw] | None = None
    problem: ZerorunError | None = None
    try:
        result = prepare()
    except ZerorunError as error:
        problem = error
    if dist.get_world_size() > 1:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (type(problem), str(problem)) if problem else None)
        first = next((rank for rank, entry in enumerate(found) if entry is not None), None)
        if first is not None and problem is None:
            kind, text = found[first]
            raise _same_error(kind, f"rank {first}: {text}")
    if problem is not None:
        raise problem
    assert result is not None
    return result


def _same_error(kind: type[ZerorunError], text: str) -> ZerorunError:
    if issubclass(kind, ConfigError):
        error = ConfigError([], "")
        error.args = (text,)
        return error
    return kind(text)


def _prepare(
    model: nn.Module,
    config: str | Path | dict[str, Any] | None,
    args: Any,
    optimizer: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
    topology: Topology | None,
) -> tuple[Config, _Raw]:
    if not isinstance(model, nn.Module):
        raise ModelError(f"initialize() needs an nn.Module, got {type(model).__name__}.")
    source = config if config is not None else _config_of(args)
    client = _client_optimizer(model, optimizer, model_parameters)
    wanted = resolve(
        load_config(source),
        data_parallel_size=topology.data_parallel_size if topology else dist.get_world_size(),
        model_facts=ModelFacts(_hidden_size(model)),
        optimizer_given=client is not None,
        learning_rate=client.param_groups[0]["lr"] if client else None,
    )
    return wanted, _raw_optimizer(model, wanted, client, model_parameters)


def _config_of(args: Any) -> Any:
    for name in ("config", "zerorun_config", "deepspeed_config"):
        value = getattr(args, name, None)
        if value is not None:
            return value
    raise ConfigError(
        [
            ConfigProblem(
                "config",
                None,
                "no configuration was given.",
                "pass config='ds.json' or a dict to initialize(), or --config ds.json to the script (args=...).",
            )
        ]
    )


def _client_optimizer(
    model: nn.Module, optimizer: OptimizerLike | None, model_parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | None:
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if callable(optimizer):
        chosen = list(model_parameters) if model_parameters is not None else list(model.parameters())
        return optimizer([p for p in chosen if not isinstance(p, torch.Tensor) or p.requires_grad])
    raise ModelError(f"optimizer must be a torch.optim.Optimizer or make one, got {type(optimizer).__name__}.")


def _raw_optimizer(
    model: nn.Module, config: Config, client: torch.optim.Optimizer | None, model_parameters: Iterable[Any] | None
) -> _Raw:
    """Which parameters are optimized, in which groups, and by what."""
    name, params = "", {}
    if client is not None:
        refuse_unusable(client)
        _refuse_used(client)
        groups, whole = client.param_groups, not is_elementwise(client)
    elif config.optimizer is not None:
        name, params = config.optimizer.type, dict(config.optimizer.params)
        whole = not is_elementwise(resolve_optimizer(name, params)[0])
        groups = _groups(model, model_parameters)
    else:
        return _Raw(None, [], {}, "", {}, False)
    known = {id(param): label for label, param in model.named_parameters()}
    group_of: dict[int, int] = {}
    for index, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known:
                raise ModelError(
                    f"parameter {position} of the optimizer's group {index}, of shape {tuple(param.shape)}, is not a "
                    "parameter of the model. Remedy: make the optimizer from model.parameters() of this very model, "
                    "after any change of its layers."
                )
            if id(param) in group_of:
                raise ModelError(f"parameter {known[id(param)]!r} is in the optimizer twice. Remedy: list it once.")
            group_of[id(param)] = index
    if not any(param.requires_grad and id(param) in group_of for param in model.parameters()):
        raise ModelError(
            "the model has no trainable parameter that the optimizer could update. Remedy: set requires_grad, or leave "
            "the optimizer out to use the engine for inference only."
        )
    return _Raw(client, groups, group_of, name, params, whole)


def _groups(model: nn.Module, model_parameters: Iterable[Any] | None) -> list[dict[str, Any]]:
    chosen: list[Any] = list(model_parameters) if model_parameters is not None else list(model.parameters())
    if chosen and all(isinstance(item, dict) for item in chosen):
        return [{**group, "params": _as_list(group.get("params", []))} for group in chosen]
    return [{"params": [param for param in chosen if param.requires_grad]}]


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _hidden_size(model: nn.Module) -> int | None:
    """The width of a Hugging Face model, for "auto" sizes."""
    described = getattr(model, "config", None)
    for holder in (described, getattr(described, "text_config", None)):
        size = getattr(holder, "hidden_size", None)
        if isinstance(size, int):
            return size
    sizes = getattr(described, "hidden_sizes", None)
    return max(sizes) if sizes else None


def _compare_ranks(model: nn.Module, config: Config) -> None:
    """Raise, on all ranks alike, if a rank has another configuration or another model than rank 0."""
    if dist.get_world_size() == 1:
        return
    described = [f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()]
    mine = (config.fingerprint(), hashlib.sha256("\n".join(described).encode()).hexdigest())
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for rank, theirs in enumerate(found):
        if theirs[0] != found[0][0]:
            _explain_difference(config.describe().splitlines()[1:], rank, "configuration")
        if theirs[1] != found[0][1]:
            _explain_difference(described, rank, "model")


def _explain_difference(lines: list[str], rank: int, what: str) -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, lines)
    pairs = zip([*found[0], "(nothing)"], [*found[rank], "(nothing)"], strict=False)
    ours, theirs = next(((a, b) for a, b in pairs if a != b), ("", ""))
    text = (
        f"rank {rank} has another {what} than rank 0: {theirs.strip()!r} instead of {ours.strip()!r}. "
        f"Remedy: build the same {what} on every rank."
    )
    raise _same_error(ConfigError, text) if what == "configuration" else ModelError(text)


# -- assembly ----------------------------------------------------------------------------------------------------


def _shard_degree(config: Config) -> int | None:
    settings = config.zero_optimization
    if settings.stage == 0:
        return None
    if settings.shard_degree is None and settings.hybrid_shard:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        if dist.get_world_size() % local:
            raise TopologyError(f"{dist.get_world_size()} ranks are not a multiple of {local} ranks on this node.")
        return local
    return settings.shard_degree


def _policy(config: Config, topology: Topology) -> Policy:
    """The row of the stage. A group of one shares slots only where that moves something to the host."""
    settings = config.zero_optimization
    if topology.shard > 1:
        return STAGES[settings.stage]
    row = STAGES[min(settings.stage, 1)]
    return replace(
        row,
        share_grad_slots=settings.stage >= 2 and not settings.offload_optimizer.is_off(),
        share_param_slots=settings.stage == 3 and not settings.offload_param.is_off(),
    )


def _placements(config: Config, specs: list[UnitSpec], raw: _Raw) -> list[Placement]:
    settings = config.zero_optimization
    numels = [sum(p.numel() for _, p in spec.params if p.requires_grad and id(p) in raw.group_of) for spec in specs]
    return place_units(
        numels,
        optimizer=not settings.offload_optimizer.is_off(),
        ratio=settings.offload_optimizer.ratio,
        params=not settings.offload_param.is_off(),
    )


def _compute_dtype(config: Config) -> torch.dtype | None:
    if config.fp16.enabled:
        return torch.float16
    return torch.bfloat16 if config.bf16.enabled else None


def _unit_policy(config: Config) -> UnitPolicy:
    settings = config.zero_optimization
    if isinstance(settings.unit_policy, str):
        return UnitPolicy(settings.unit_policy, settings.unit_block_count, settings.unit_numel)
    return UnitPolicy("classes", classes=tuple(settings.unit_policy))


def _overlap(config: Config, comm: Communicator) -> bool:
    """Whether units are gathered before they are needed, and reduced while the backward goes on.

    Stage 3 is chosen to save memory. Where ranks copy from one another's memory by themselves, nothing goes on behind the
    computation: being early would only hide the wait for a slower rank, at the price of a slot and a unit's gradients.
    """
    settings = config.zero_optimization
    return settings.overlap_comm if settings.overlap_comm is not None else settings.stage < 3 or not comm.reads_peers


def _slot_count(config: Config, overlap: bool, numels: list[int]) -> int:
    """One for the unit in use, and one for the next to ``overlap``, unless the configuration asks for other look-ahead."""
    settings, sources = config.zero_optimization, config.sources
    largest = max(numels, default=0)
    ahead = int(overlap)
    if settings.overlap_comm is not False and largest:
        if sources.get("zero_optimization.stage3_prefetch_bucket_size", "default") != "default":
            ahead = -(-settings.prefetch_bucket_size // largest)
        if sources.get("zero_optimization.stage3_max_live_parameters", "default") != "default":
            ahead = min(ahead, max(settings.max_live_parameters // largest - 1, 0))
    return min(1 + ahead, max(len(numels), 1))


def _scaler(config: Config) -> LossScaler:
    fp16 = config.fp16
    if not fp16.enabled:
        return LossScaler()
    if fp16.loss_scale:
        return LossScaler(scale=float(fp16.loss_scale))
    return LossScaler(
        scale=float(2**fp16.initial_scale_power),
        dynamic=True,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive=fp16.consecutive_hysteresis,
        minimum=float(fp16.min_loss_scale),
        hysteresis_left=fp16.hysteresis,
    )


def _move_buffers(model: nn.Module, device: torch.device, comm: Communicator) -> None:
    """Buffers go to the device with rank 0's values, and keep their dtype: a rotary table is not rounded."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                moved = buffer.to(device)
                if moved.numel() and not moved.is_meta:
                    moved = moved.contiguous()
                    comm.broadcast(moved, 0, "initial buffers")
                module._buffers[name] = moved


def _shard_optimizer(raw: _Raw, units: list[Unit], comm: Communicator) -> ShardedOptimizer | None:
    if not raw.groups:
        return None
    pieces = build_pieces(units, lambda param: raw.group_of[id(param)], whole=raw.whole)
    members: list[list[OptimizerPiece]] = [[] for _ in raw.groups]
    for piece in pieces:
        members[piece.group].append(piece)
    if raw.optimizer is not None:
        for group, owned in zip(raw.optimizer.param_groups, members, strict=True):
            group["params"] = [piece.tensor for piece in owned]
        optimizer = raw.optimizer
    else:
        groups = [
            {**group, "params": [piece.tensor for piece in owned]} for group, owned in zip(raw.groups, members, strict=True)
        ]
        optimizer = build_optimizer(raw.name, raw.params, groups)
    return ShardedOptimizer(optimizer, pieces, units, comm, split_state)


def _refuse_used(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise ModelError(
            "the optimizer has been used before: it has state for whole parameters, but now works on pieces of them. "
            "Remedy: pass a fresh optimizer to initialize()."
        )


def _scheduler(config: Config, client: Any, sharded: ShardedOptimizer | None) -> Any:
    optimizer = sharded.optimizer if sharded is not None else None
    if client is not None:
        is_instance = hasattr(client, "step")
        return client if is_instance else client(optimizer)
    if config.scheduler is None or optimizer is None:
        return None
    return build_schedule(config.scheduler.type, dict(config.scheduler.params), optimizer)


def _recompute(model: nn.Module, config: Config, device: torch.device) -> list[Any]:
    """Carry out the section ``activation_checkpointing``; returns handles that undo it."""
    section = config.activation_checkpointing
    pool = HostPool(device) if section.cpu_checkpointing else None
    settings = Recompute(section.policy, section.every_n, pool)
    handles: list[Any] = [Adopted(settings)] if settings != Recompute() else []
    if section.policy != "none":
        handles.append(CheckpointedBlocks(model, repeated_blocks(model), settings))
    return handles


def _begin_routine(engine: Engine) -> None:
    """What the section ``checkpoint`` asks for: saves and signals from now on, and the newest checkpoint loaded."""
    section = engine.config.checkpoint
    if section.dir is None:
        return
    if section.every_steps or section.every_minutes or section.on_signal:
        first = engine.topology.rank == 0
        engine.routine = Routine(
            Path(section.dir), section.every_steps, section.every_minutes, section.on_signal, section.asynchronous, first
        )
        engine.routine.watch()
    if section.auto_resume:
        engine.resume()
    elif engine.topology.rank == 0 and (newest := newest_first(Path(section.dir))[:1]):
        logger.info("%s has checkpoints; engine.resume() or checkpoint.auto_resume loads %s", section.dir, newest[0])


def _loader(
    config: Config, data: Any, collate_fn: Callable[[list[Any]], Any] | None, topology: Topology
) -> EpochLoader | Any:
    if data is None or (hasattr(data, "load_state_dict") and not isinstance(data, Dataset)):
        return data  # a loader that knows its own position, such as torchdata's StatefulDataLoader
    if isinstance(data, DataLoader):
        raise ModelError(
            "training_data is a DataLoader, whose position cannot be saved. Remedy: pass its dataset (and collate_fn), or "
            "torchdata's StatefulDataLoader, or use the DataLoader in the loop without passing it."
        )
    return EpochLoader(
        data,
        config.train_micro_batch_size_per_gpu,
        topology,
        collate_fn=collate_fn,
        drop_last=config.dataloader_drop_last,
        seed=config.seed or 0,
    )
