"""Intake: the arguments of initialize() and estimate_memory(), checked before anything is made from them.

It returns the configuration with all values resolved, and the optimizer: its parameter groups, and whether it can work on
pieces of parameters.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..config.fields import ConfigNote
from ..config.parse import Config, ModelFacts, data_parallel_degree, load_config, resolve, with_values
from ..distributed.device import CPU
from ..distributed.tensor_shard import has_marked_parts, shards_of
from ..distributed.topology import Topology
from ..errors import ConfigError, ConfigProblem, ModelError, ZerorunError
from ..log import info_once, listed, warn_once
from ..ops.rounding import MasterFormat
from ..ops.single_pass import Adam8bit, SinglePassOptimizer
from ..ops.state_format import StateFormat
from ..optim import muon
from ..optim.lr_schedules import try_schedule
from ..optim.optimizer_needs import Needs, makes_states_in_step
from ..optim.optimizers import (
    as_list,
    build_optimizer,
    needs_of,
    parts_kind,
    refuse_unusable,
    resolve_optimizer,
    settings_of,
    takes_curvature,
    warn_of_kept_parameters,
)
from ..optim.requested_optimizer import RawOptimizer
from ..pipeline.pipelined import Pipelined
from ..pipeline.stages import refuse_other_axes
from ..plan.optimizer_states import OptimizerStates
from ..plan.parameter_kinds import own_weight, refuse_unusable_weights
from .matrix_roles import described, divide_by_role

OptimizerLike = torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_IN_OUR_PLACE = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")  # classes of torch
_FORMATS = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "store_param_remainders")  # keys of `bf16`


def take_in(
    model: nn.Module,
    config: str | Path | dict[str, Any] | None,
    args: Any,
    optimizer: OptimizerLike | None,
    model_parameters: Iterable[Any] | None,
    world_size: int,
    topology: Topology | None = None,
    scheduler_given: bool = False,
) -> tuple[Config, RawOptimizer]:
    """Return the resolved configuration and the optimizer that is asked for. Raises ConfigError or ModelError."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"an nn.Module is needed, got {type(model).__name__}.")
    _refuse_modules(model)
    _refuse_unmade(model)
    model_parameters = _listed(model_parameters)
    source = config_of(config, args)
    divided = topology is not None or isinstance(model, Pipelined)  # then the file does not tell the data-parallel size
    loaded = load_config(
        source,
        optimizer_given=optimizer is not None,
        scheduler_given=scheduler_given,
        world_size=None if divided else world_size,
    )
    if topology is not None:
        degrees = {"tensor_parallel.size": topology.tensor, "pipeline.stages": topology.pipe}
        views = {"sequence_parallel_size": topology.context, "expert_parallel.autoep_size": topology.expert}
        loaded = _with_degrees(loaded, degrees | views)
    if isinstance(model, Pipelined):
        loaded = _with_degrees(loaded, {"pipeline.stages": model.num_pipeline_stages(), "pipeline.chunks": model.chunks})
        refuse_other_axes(model.topology(), loaded.tensor_parallel.size, has_marked_parts(model))
    client = _client_optimizer(model, optimizer, model_parameters)
    wanted = resolve(
        loaded,
        data_parallel_size=data_parallel_degree(loaded, world_size),
        model_facts=ModelFacts(_hidden_size(model), isinstance(model, Pipelined)),
        optimizer_given=client is not None,
        scheduler_given=scheduler_given,
        learning_rate=client.param_groups[0].get("lr") if client else None,
    )
    refuse_unusable_weights(model, trains=client is not None or wanted.optimizer is not None)
    raw = _raw_optimizer(model, wanted, client, model_parameters, world_size)
    if world_size > 1:
        _tell_of_changing_rows(model)
    if not (wanted.fp16.enabled or wanted.bf16.enabled):  # where all is rounded, and meant to be
        _tell_of_rounded(model, raw)
    if raw.matrix_dtype is not None:
        wanted = wanted.noting(ConfigNote("optimizer.type", described(raw.groups, raw.params)))
    if raw.groups and wanted.scheduler is not None and not scheduler_given:
        try_schedule(wanted.scheduler.type, dict(wanted.scheduler.params), _stand_in(raw))
    return wanted, raw


def _refuse_modules(model: nn.Module) -> None:
    """Raise ModelError for modules that no engine can take.

    What sums gradients or divides parameters by itself would be summed twice. What torch.jit has made takes no hooks.
    """
    for name, module in model.named_modules():
        where = f"its module {name!r}" if name else "the model"
        kind = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _IN_OUR_PLACE), None)
        if kind is not None:
            raise ModelError(
                f"{where} is wrapped in {kind}, which sums gradients over ranks by itself: they would count as many times "
                "as there are ranks. Remedy: give initialize() the model without it, in whose place zerorun works: its "
                "`.module`, before any other change."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{where} is a {type(module).__name__} of torch.jit, which takes no hooks around its state dict. Remedy: "
                "give initialize() the module that it was made of; engine.compile() or torch.compile makes it fast."
            )


def _refuse_unmade(model: nn.Module) -> None:
    """Raise ModelError for parameters and buffers that get their shapes in the first forward, as those of LazyLinear."""
    named = (*model.named_parameters(), *model.named_buffers())
    if names := [repr(name) for name, tensor in named if is_lazy(tensor)]:
        raise ModelError(
            f"{listed(names, 3)} have no shape before the first forward. Remedy: call the model once before initialize(), "
            "and before its optimizer is made, on all ranks with a batch of the same shape."
        )


def _tell_of_changing_rows(model: nn.Module) -> None:
    """Warn of embeddings that change the rows of their own batch in each forward: ranks have other ones."""
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)))
    found = [repr(name) for name, layer in layers if layer.max_norm is not None]
    if found:
        warn_once(
            f"{listed(found, 3)} have max_norm: in a forward, torch shortens the rows that this rank's batch uses, and no "
            "other rank does. Ranks train other weights than one process would. Remedy: leave max_norm out, and shorten "
            "rows in forward: F.normalize(rows, dim=-1) * torch.clamp(rows.norm(dim=-1, keepdim=True), max=max_norm)."
        )


def _tell_of_rounded(model: nn.Module, raw: RawOptimizer) -> None:
    """Warn of parameters that have more digits than the values that optimizers update."""
    taken = [(name, param) for name, param in model.named_parameters() if param.requires_grad and id(param) in raw.group_of]
    if names := [name for name, param in taken if param.dtype == torch.float64]:
        warn_once(
            f"parameters in fp64 are rounded to fp32 by the first step: {listed(list(map(repr, names)), 3)}. The model "
            "computes in fp64, but the values that optimizers update, gradients and optimizer states are in fp32. "
            "Remedy: model.float() takes half the memory; where fp64 is needed, train without zerorun."
        )


def _with_degrees(config: Config, degrees: dict[str, int]) -> Config:
    """Return the configuration with the degrees of the given topology or model. Raises ConfigError if they disagree."""
    written = {
        "tensor_parallel.size": config.tensor_parallel.size,
        "pipeline.stages": config.pipeline.stages,
        "pipeline.chunks": config.pipeline.chunks,
        "sequence_parallel_size": config.sequence_parallel_size or 1,
        "expert_parallel.autoep_size": config.expert_parallel.size,
    }
    for key, degree in degrees.items():
        if written[key] not in (1, degree):
            reason = f"the topology or model given to initialize() has {degree}."
            remedy = "Remove the key, or make them agree."
            if key == "pipeline.chunks":
                remedy = f"Remove the key, or give PipelineModule(..., chunks={written[key]})."
            raise ConfigError([ConfigProblem(key, written[key], reason, remedy)])
    switch = {"expert_parallel.enabled": True} if degrees.get("expert_parallel.autoep_size", 1) > 1 else {}
    return with_values(config, {**degrees, **switch})


def _stand_in(raw: RawOptimizer) -> torch.optim.Optimizer:
    """Make the optimizer with one number in each group, so that a schedule can refuse it before units are made."""
    groups = [{**copy.deepcopy(settings), "params": [torch.zeros(1)]} for settings in settings_of(raw.groups)]
    if raw.optimizer is None:
        return build_optimizer(raw.name, raw.params, groups)
    return torch.optim.Optimizer(groups, copy.deepcopy(raw.optimizer.defaults))


def config_of(config: Any, args: Any) -> Any:
    """Return the one configuration that is given. Raises ConfigError if there is none, or if there are two.

    If another source is given, ``args.config`` is not compared with it: many scripts use this argument for something else.
    """
    found = {f"args.{name}": getattr(args, name, None) for name in ("zerorun_config", "deepspeed_config")}
    for name, value in found.items():
        if config is not None and value is not None and not _same_source(config, value):
            reason = f"initialize() was given another configuration as config=, {config!r:.60}."
            raise ConfigError([ConfigProblem(name, value, reason, "Pass one of the two.")])
    for value in (config, *found.values(), getattr(args, "config", None)):
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


def _same_source(one: Any, other: Any) -> bool:
    """True for the same object, for equal dicts, and for two spellings of one path."""
    if isinstance(one, (str, os.PathLike)) and isinstance(other, (str, os.PathLike)):
        return os.path.abspath(one) == os.path.abspath(other)
    return one is other or (isinstance(one, dict) and isinstance(other, dict) and one == other)


def _client_optimizer(
    model: nn.Module, optimizer: OptimizerLike | None, model_parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | None:
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if callable(optimizer):
        chosen = list(model_parameters) if model_parameters is not None else list(model.parameters())
        return _made_by(optimizer, [p for p in chosen if not isinstance(p, torch.Tensor) or p.requires_grad])
    raise ModelError(f"optimizer must be a torch.optim.Optimizer or make one, got {type(optimizer).__name__}.")


def _made_by(maker: Callable[[list[nn.Parameter]], Any], params: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = _called("optimizer", maker, params)
    if not isinstance(made, torch.optim.Optimizer):
        raise ModelError(
            f"optimizer={_name(maker)} returned {type(made).__name__}, and not a torch.optim.Optimizer. Remedy: return one "
            "that is made of the parameters it is given, such as lambda params: torch.optim.AdamW(params, lr=1e-3)."
        )
    return made


def scheduler_made_by(maker: Callable[[Any], Any], optimizer: torch.optim.Optimizer | None) -> Any:
    made = _called("lr_scheduler", maker, optimizer)
    if not hasattr(made, "step"):
        raise ModelError(
            f"lr_scheduler={_name(maker)} returned {type(made).__name__}, which has no step(). Remedy: return a scheduler, "
            "such as lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)."
        )
    return made


def _called(option: str, maker: Callable[[Any], Any], given: Any) -> Any:
    try:
        return maker(given)
    except ZerorunError:
        raise
    except Exception as error:
        raise ModelError(
            f"{option}={_name(maker)}, which initialize() called, raised {type(error).__name__}: {error}. Remedy: correct "
            "it, or pass an instance that is made already."
        ) from error


def _name(given: Any) -> str:
    return str(getattr(given, "__name__", type(given).__name__))


def _raw_optimizer(
    model: nn.Module,
    config: Config,
    client: torch.optim.Optimizer | None,
    model_parameters: Iterable[Any] | None,
    world_size: int,
) -> RawOptimizer:
    """Return which parameters are optimized, in which groups, and by which optimizer. Raises ModelError."""
    name, params, matrix_dtype = "", {}, None
    if client is not None:
        refuse_unusable(client)
        _refuse_used(client)
        warn_of_kept_parameters(client)
        groups = client.param_groups
    elif config.optimizer is not None:
        name, params = config.optimizer.type, dict(config.optimizer.params)
        groups = _groups(model, model_parameters)
        if resolve_optimizer(name, params)[0] is muon.Muon:
            groups = divide_by_role(model, groups)
            matrix_dtype = muon.DTYPES[params.get("ns_dtype", "bf16")]
    else:
        return RawOptimizer(None, [], {}, "", {}, False)
    # Muon by its name needs elements: its matrices go to their owners (plan/matrix_exchange.py).
    needs = needs_of(client, name, params, groups) if matrix_dtype is None else Needs.ELEMENTS
    is_divided = data_parallel_degree(config, world_size) < world_size
    sees_all = world_size == 1 or not (config.zero_optimization.stage or is_divided)
    parts = parts_kind(client, name, params, needs)
    whole = needs is not Needs.ELEMENTS and parts is None
    chosen = type(client).__name__ if client is not None else name
    if needs is Needs.MODEL and not sees_all:
        raise ModelError(
            f"{chosen} looks at all parameters together: what it does to one depends on the others, as a trial of it has "
            f"shown. At stage {config.zero_optimization.stage} on {world_size} ranks each rank updates a part of them. "
            "Remedy: use stage 0, or an optimizer whose update of a parameter depends on that parameter alone."
        )
    if takes_curvature(client, name) and isinstance(model, Pipelined):
        raise ModelError(
            f"{chosen} takes its curvature from backwards of their own, which the schedule of a pipeline does not have: it "
            "would only follow the sign of its momentum. Remedy: use AdamW or Lion, or ZeRO and tensor parallelism in "
            "place of pipeline stages."
        )
    if whole and config.tensor_parallel.size > 1:
        raise ModelError(
            f"{chosen} needs whole parameters, but tensor-parallel ranks hold parts of them (tensor_parallel.size = "
            f"{config.tensor_parallel.size}). Remedy: use an optimizer that works element by element, such as AdamW, or "
            "pipeline stages and ZeRO in place of tensor ranks."
        )
    group_of = _numbers_of_groups(model, groups)
    most = Needs.MODEL if whole and sees_all else Needs.MATRICES if whole else needs
    raw = RawOptimizer(client, groups, group_of, name, params, whole, parts, matrix_dtype, divided_for=most)
    tried = client
    if tried is None and (_keys_of_formats(config) or issubclass(resolve_optimizer(name, params)[0], SinglePassOptimizer)):
        tried = build_optimizer(name, params, [{**kept, "params": [torch.zeros(1)]} for kept in settings_of(groups)])
    return raw if tried is None else _with_formats(raw, model, config, tried, needs)


def _numbers_of_groups(model: nn.Module, groups: list[dict[str, Any]]) -> dict[int, int]:
    """Return id(parameter) -> the number of its group. Raises ModelError for groups that the model cannot be trained by."""
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
    wanted = {name: id(param) in group_of for name, param in model.named_parameters() if param.requires_grad}
    left_out = [repr(name) for name, is_in_a_group in wanted.items() if not is_in_a_group]
    trained = len(left_out) < len(wanted)
    if trained and left_out:
        info_once(
            f"{len(left_out)} of {len(wanted)} parameters that require a gradient are in no group of the optimizer: "
            f"{listed(left_out, 3)}. They do not change, and gradients are clipped by a norm without theirs."
        )
    if not trained and not isinstance(model, Pipelined):  # a pipeline stage may well have no trainable parameter
        raise ModelError(
            "the model has no trainable parameter that the optimizer could update. Remedy: set requires_grad, or leave "
            "the optimizer out to use the engine for inference only."
        )
    return group_of


def _with_formats(
    raw: RawOptimizer, model: nn.Module, config: Config, tried: torch.optim.Optimizer, needs: Needs
) -> RawOptimizer:
    """Return ``raw`` with the formats of masters and states. ``tried``: the optimizer, or one made for other tensors.

    Raises ConfigError if the configuration wants other formats than the optimizer can have.
    """
    section = config.bf16
    if not isinstance(tried, SinglePassOptimizer):
        return _with_formats_in_fp32(raw, model, config, tried, needs)
    if raw.matrix_dtype is not None:
        _refuse_formats(config, "Muon", "its momentum is in fp32", ("bf16_optimizer_states",))
    formats = _state_formats(model, tried)
    states_in_bf16 = section.enabled and section.bf16_optimizer_states
    if states_in_bf16 and isinstance(tried, Adam8bit):
        reason = f"{raw.name or type(tried).__name__} keeps states in 8 bits."
        remedy = 'Remove the key, or set optimizer.type to "AdamW".'
        raise ConfigError([ConfigProblem("bf16.bf16_optimizer_states", True, reason, remedy)])
    if states_in_bf16:
        formats = {id(param): StateFormat.BF16 for param in model.parameters()}
    return replace(raw, formats=formats, master=_master_format(config), seed=_seed_of_chance(config))


def _with_formats_in_fp32(
    raw: RawOptimizer, model: nn.Module, config: Config, tried: torch.optim.Optimizer, needs: Needs
) -> RawOptimizer:
    """``_with_formats`` for an optimizer that steps fp32 copies of some of its tensors at a time (optim/in_fp32.py)."""
    if not _keys_of_formats(config):
        return raw
    name = type(tried).__name__
    if needs is Needs.MODEL:
        _refuse_formats(config, name, "what it does to one parameter depends on others, and it steps some at a time")
    if all(callable(getattr(tried, method, None)) for method in ("train", "eval")):
        _refuse_formats(config, name, "its train() and eval() change masters between steps, where nothing is rounded")
    states = OptimizerStates(raw, torch.device(CPU))
    if states.unknown is not None:
        _refuse_formats(config, name, states.unknown)
    if foreign := states.dtypes - {torch.float32}:
        found = str(min(foreign, key=str)).removeprefix("torch.")
        _refuse_formats(config, name, f"it keeps states in {found} by itself", ("bf16_optimizer_states",))
    in_bf16 = config.bf16.bf16_optimizer_states
    formats = {id(param): StateFormat.BF16 for param in model.parameters()} if in_bf16 else {}
    return replace(raw, formats=formats, master=_master_format(config), seed=_seed_of_chance(config))


def _master_format(config: Config) -> MasterFormat:
    section = config.bf16
    if section.enabled and section.bf16_master_weights_and_grads:
        return MasterFormat.KAHAN if section.rounding == "kahan" else MasterFormat.BF16
    return MasterFormat.REMAINDER if section.enabled and section.store_param_remainders else MasterFormat.FP32


def _seed_of_chance(config: Config) -> int | None:
    """Return the seed if something is rounded by chance. States are, too, where weights have a rest."""
    section = config.bf16
    in_bf16 = section.bf16_master_weights_and_grads or section.bf16_optimizer_states
    return (config.seed or 0) if section.enabled and in_bf16 and section.rounding != "nearest" else None


def _refuse_formats(config: Config, name: str, reason: str, keys: Sequence[str] = _FORMATS) -> None:
    """Raise ConfigError, with all problems, for ``keys`` that let what the optimizer ``name`` keeps be in bf16."""
    remedy = "Set optimizer.type to another, such as AdamW, Lion, SGD or Adafactor, or remove the key."
    if wanted := [key for key in _keys_of_formats(config) if key in keys]:
        raise ConfigError([ConfigProblem(f"bf16.{key}", True, f"{name} cannot: {reason}.", remedy) for key in wanted])


def _keys_of_formats(config: Config) -> list[str]:
    """Return the keys of the section ``bf16`` that let masters or states be in bf16."""
    return [key for key in _FORMATS if config.bf16.enabled and getattr(config.bf16, key)]


def _state_formats(model: nn.Module, tried: SinglePassOptimizer) -> dict[int, StateFormat]:
    """Return id(parameter) -> the format of its states, of those that the optimizer does not keep in fp32.

    The numbers of elements are those of whole parameters, whatever ranks will have of them. Parameters that several
    pipeline stages have count as embeddings: each stage sees only its own modules, and must come to the same format.
    """
    shards = shards_of(model)
    embeddings = {id(own_weight(module)) for module in model.modules() if isinstance(module, nn.Embedding)}
    if isinstance(model, Pipelined):
        shared = [name for tie in model.ties() for name in tie.local_names]
        embeddings |= {id(param) for name, param in model.named_parameters(remove_duplicate=False) if name in shared}
    found = {}
    for param in model.parameters():
        numel = shards[id(param)].numel if id(param) in shards else param.numel()
        format = tried.default_format(numel, is_embedding=id(param) in embeddings)
        if format is not StateFormat.FP32:
            found[id(param)] = format
    return found


def _groups(model: nn.Module, model_parameters: Iterable[Any] | None) -> list[dict[str, Any]]:
    chosen: list[Any] = list(model_parameters) if model_parameters is not None else list(model.parameters())
    if chosen and all(isinstance(item, dict) for item in chosen):
        return [{**group, "params": as_list(group.get("params", []))} for group in chosen]
    return [{"params": [param for param in chosen if param.requires_grad]}]


def _listed(params: Any) -> list[Any] | None:
    """Return ``model_parameters`` as a list of parameters, or of groups with such lists. Names are dropped."""
    if params is None:
        return None
    single = isinstance(params, (torch.Tensor, str, dict)) or not isinstance(params, Iterable)
    items = [params] if single else list(params)
    if not single and all(isinstance(item, dict) for item in items):
        return [{**group, "params": _listed(as_list(group.get("params", [])))} for group in items]
    items = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in items]
    wrong = next((item for item in items if not isinstance(item, torch.Tensor)), None)
    if single or wrong is not None:
        found = type(params).__name__ if single else f"{type(wrong).__name__} among others"
        raise ModelError(
            f"model_parameters must be parameters, (name, parameter) pairs, or groups that are all dicts; got {found}. "
            "Remedy: pass model.parameters(), model.named_parameters(), or [{'params': [...], 'lr': ...}, ...]."
        )
    return items


def refuse_unusable_extras(raw: RawOptimizer, lr_scheduler: Any, training_data: Any) -> None:
    """Raise ModelError for a scheduler or training data that could not be used later."""
    if lr_scheduler is not None and not callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        raise ModelError(
            f"lr_scheduler must have step() or be a callable on the optimizer, got {type(lr_scheduler).__name__}. Remedy: "
            "pass one of torch.optim.lr_scheduler, or lambda optimizer: StepLR(optimizer, 10)."
        )
    if lr_scheduler is not None and not is_scheduler(lr_scheduler) and not raw.groups:
        raise ModelError(
            f"lr_scheduler={_name(lr_scheduler)} is to be called on the optimizer, but there is none. Remedy: give "
            "optimizer=..., or the section optimizer in the configuration."
        )
    if is_scheduler(lr_scheduler) and raw.groups:
        _refuse_schedule_of_another(lr_scheduler, raw)
    _refuse_unusable_data(training_data)


def _refuse_schedule_of_another(lr_scheduler: Any, raw: RawOptimizer) -> None:
    """Raise ModelError if the schedule sets rates that nobody reads. Wrappers of an optimizer show its own groups."""
    groups = getattr(getattr(lr_scheduler, "optimizer", None), "param_groups", None)
    known = {id(group) for group in raw.groups}
    if groups is not None and not any(id(group) in known for group in groups):
        own = "the one that initialize() got as optimizer=" if raw.optimizer is not None else "the configuration's"
        raise ModelError(
            f"lr_scheduler={_name(lr_scheduler)} was made for another optimizer than {own}: learning rates would stay as "
            "they are. Remedy: pass its optimizer as optimizer= as well, or a callable in its place, such as lambda "
            "optimizer: StepLR(optimizer, 10)."
        )


def is_scheduler(given: Any) -> bool:
    """True for a scheduler instance, which is used as it is; False for a callable that makes one, such as a class."""
    return hasattr(given, "step") and not isinstance(given, type)


def has_position(data: Any) -> bool:
    """True for a loader that knows its own position, such as torchdata's StatefulDataLoader."""
    return hasattr(data, "load_state_dict") and not isinstance(data, Dataset)


def _refuse_unusable_data(data: Any) -> None:
    if isinstance(data, DataLoader) and not has_position(data):
        raise ModelError(
            "training_data is a DataLoader, whose position cannot be saved. Remedy: pass its dataset (and collate_fn), or "
            "torchdata's StatefulDataLoader, or use the DataLoader in the loop without passing it."
        )
    usable = isinstance(data, IterableDataset) or (hasattr(data, "__len__") and hasattr(data, "__getitem__"))
    if data is not None and not usable and not has_position(data):
        raise ModelError(
            "training_data must be a dataset with __len__ and __getitem__, or an IterableDataset; got "
            f"{type(data).__name__}. Remedy: pass such a dataset, or iterate over the data in the loop without passing it."
        )
    samples_of(data)


def samples_of(data: Any) -> int | None:
    """How many samples ``training_data`` has, which ranks share; None if it is a stream, or a loader of this rank alone."""
    if data is None or has_position(data) or isinstance(data, IterableDataset):
        return None
    try:
        return len(data)
    except Exception as error:  # of the script's own code: no rank may go on without this one
        raise ModelError(
            f"len(training_data) of a {type(data).__name__} failed: {type(error).__name__}: {error}. Remedy: mend it, or "
            "iterate over the data in the loop without passing it."
        ) from error


def refuse_settings_of_a_loader(config: Config, data: Any, collate_fn: Any) -> None:
    """Raise ModelError or ConfigError if a loader with a state of its own was given, and makes other batches than asked."""
    if not has_position(data):
        return
    if collate_fn is not None:
        raise ModelError(
            f"collate_fn= is of no use: training_data is a {type(data).__name__}, which makes batches by itself. Remedy: "
            "give collate_fn= to it, or pass its dataset."
        )
    micro = config.train_micro_batch_size_per_gpu
    size = data.batch_size if isinstance(data, DataLoader) else None
    if size not in (None, micro):
        reason = f"the loader that was given as training_data has batches of {size}."
        remedy = f"Set it to {size}, or make the loader with batch_size={micro}."
        raise ConfigError([ConfigProblem("train_micro_batch_size_per_gpu", micro, reason, remedy)])


def loader_notes(config: Config, data: Any) -> Iterator[ConfigNote]:
    """Note the keys of the file that a loader with a state of its own, or a dataset with positions, does not read."""
    section = [f"dataloader.{name}" for name in type(config.dataloader).model_fields]
    idle = ["dataloader_drop_last", *section] if has_position(data) else []
    reason = "training_data is a loader, which decides that by itself."
    if hasattr(data, "__getitem__") and not isinstance(data, IterableDataset):
        idle, reason = ["dataloader.divide_stream"], "training_data is no IterableDataset; ranks always divide it."
    for key in idle:
        if config.sources.get(key, "default") in ("file", "auto"):
            yield ConfigNote(key, reason)


def _hidden_size(model: nn.Module) -> int | None:
    """The width of a Hugging Face model, for "auto" sizes."""
    described = getattr(model, "config", None)
    for holder in (described, getattr(described, "text_config", None)):
        size = getattr(holder, "hidden_size", None)
        if isinstance(size, int):
            return size
    sizes = getattr(described, "hidden_sizes", None)
    return max(sizes) if sizes else None


def _refuse_used(optimizer: torch.optim.Optimizer) -> None:
    made_early = isinstance(optimizer, torch.optim.Adagrad) and _is_as_constructed(optimizer)
    if optimizer.state and not made_early:
        raise ModelError(
            "the optimizer has been used before: it has state for whole parameters, but now works on pieces of them. "
            "Remedy: pass a fresh optimizer to initialize()."
        )
    if made_early and not makes_states_in_step(optimizer):
        raise ModelError(
            f"Adagrad of torch {torch.__version__} makes its state for whole parameters, and only when it is constructed, "
            'but is to work on pieces of them. Remedy: leave it out, and set "optimizer": {"type": "Adagrad", "params": '
            '{"lr": ...}} in the configuration, or use torch 2.13.'
        )


def _is_as_constructed(optimizer: torch.optim.Adagrad) -> bool:
    """True if its states are those of the start, which a step makes anew from one number."""
    start = optimizer.defaults["initial_accumulator_value"]
    found = [state for state in optimizer.state.values() if not state["sum"].is_meta]
    return all(float(state["step"]) == 0 and bool((state["sum"] == start).all()) for state in found)
