"""Axes beyond data parallelism in initialize(): cutting a model into stages, and dividing its layers.

Modules that only pipelines and tensor ranks need are imported inside functions: together they take a sixth of the time that
importing everything else takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config.parse import Config
from ..distributed.replication import Replication
from ..distributed.tensor_shard import shards_of
from ..distributed.topology import Topology, subgroup
from ..distributed.transport.connect import connect_axis
from ..distributed.transport.statistics import CommunicationStatistics
from ..distributed.transport.transport import Transport
from ..distributed.transport.world import gather_values
from ..errors import ModelError, PipelineError, TopologyError
from ..log import info_once
from ..optim.requested_optimizer import RawOptimizer
from ..pipeline.pipelined import Pipelined, Tie
from ..pipeline.stages import processes_of
from ..zero.init import part_of, refuse_partitioned
from ..zero.tied_copies import TiedCopy
from .parallelized_model import ParallelizedModel

if TYPE_CHECKING:
    from ..context_parallel.divided_model import Way
    from ..tensor_parallel.styles import ParallelPlan

_IN_A_GROUP = "in a parameter group"
Copies = dict[int, tuple[str, bool]]  # id(parameter) -> name in ``model_axes``, whether it is the first copy


def is_part(model: nn.Module) -> bool:
    """True if each rank has only a part of the model: ``model`` is a pipeline stage, or is made of divided layers."""
    return isinstance(model, Pipelined) or bool(shards_of(model))


def cut(model: nn.Module, config: Config, topology: Topology) -> nn.Module:
    """Return this rank's stage of ``model``. Raises ModelError or PipelineError before any layer is taken out."""
    section = config.pipeline
    if topology.pipe == 1 and not isinstance(model, Pipelined):
        return model
    from ..pipeline.module import PipelineModule  # only pipelines need it
    from ..pipeline.split_pretrained import split_pretrained

    if isinstance(model, Pipelined):
        _check_stage(model, topology, section.chunks)
        if config.sources.get("pipeline.partition") == "file":
            info_once("pipeline.partition: not used; the PipelineModule was cut when it was made, by its partition_method.")
    elif isinstance(model, nn.Sequential):
        model = PipelineModule(
            model,
            num_stages=topology.pipe,
            stage=topology.pipe_rank,
            partition_method=_method(section.partition),
            chunks=section.chunks,
        )
    else:
        if section.activation_checkpoint_interval:
            info_once("pipeline.activation_checkpoint_interval: not used; activation_checkpointing recomputes blocks.")
        stages, method = (topology.pipe, topology.pipe_rank), _method(section.partition)
        return split_pretrained(model, *stages, partition_method=method, chunks=section.chunks)
    if section.activation_checkpoint_interval and isinstance(model, PipelineModule):
        model.set_checkpoint_interval(section.activation_checkpoint_interval)
    return model


def _method(partition: str | tuple[int, ...]) -> Any:
    return partition if isinstance(partition, str) else list(partition)


def _check_stage(model: Pipelined, topology: Topology, chunks: int) -> None:
    if (model.num_pipeline_stages(), model.stage) != (topology.pipe, topology.pipe_rank):
        raise PipelineError(
            f"the module is stage {model.stage} of {model.num_pipeline_stages()}, but this rank is stage "
            f"{topology.pipe_rank} of {topology.pipe}. Remedy: give PipelineModule the topology that initialize() gets."
        )
    processes = processes_of(model.topology())
    if processes is not None and processes.world_size() != topology.world_size:
        raise TopologyError(
            f"the topology given to PipelineModule, {processes!r}, has {processes.world_size()} ranks, and the job has "
            f"{topology.world_size}. Remedy: make it for all ranks of the job."
        )
    if model.chunks != chunks:
        raise PipelineError(
            f"the module has {model.chunks} parts on each stage, and pipeline.chunks is {chunks}. Remedy: make them agree."
        )


def plan_experts(model: nn.Module, topology: Topology) -> tuple[str, ...]:
    """Return the names of the modules whose experts are to be spread. Must be called before ``cut``.

    Raises ConfigError, with nothing changed.
    """
    if topology.expert == 1 or any(shard.axis == "expert" for shard in shards_of(model).values()):
        return ()
    from .divided_experts import names_of_experts

    return names_of_experts(model, topology.expert)


def plan_layers(model: nn.Module, config: Config, topology: Topology, experts: Collection[str] = ()) -> ParallelPlan | None:
    """Plan how to divide the layers of ``model``; None if they need not be divided. Must be called before ``cut``.

    ``experts``: modules that stay as they are, because they are spread. Raises ModelError, with nothing changed.
    """
    if topology.tensor * topology.pipe * topology.expert > 1:
        refuse_partitioned(model.parameters() if is_part(model) else (), "a model that is cut or divided over ranks")
    if topology.tensor == 1 or any(shard.axis == "tensor" for shard in shards_of(model).values()):
        return None
    from .divided_layers import plan_whole_layers

    return plan_whole_layers(model, config.tensor_parallel, topology.tensor, experts)


def divide(
    model: nn.Module,
    plan: ParallelPlan | None,
    config: Config,
    topology: Topology,
    device: torch.device,
    raw: RawOptimizer,
) -> ParallelizedModel:
    """Divide the layers of ``model`` in place by ``plan``, unless it is made of divided layers, and spread its experts.

    ``raw``: the optimizer that it will have. All ranks must call it. Raises ModelError, on all ranks alike, and leaves the
    model as it was.
    """
    made = ParallelizedModel()
    if topology.tensor > 1:
        from .divided_layers import divide_layers

        made = divide_layers(model, plan, config, topology, device)
    if topology.expert > 1:
        from .divided_experts import divide_experts

        made = divide_experts(model, topology, device, made)
    if isinstance(model, Pipelined) and topology.pipe > 1:
        _refuse_dropped(model, topology)
        _refuse_unlike(model, topology, raw)
        _tie(model, topology, made, device, raw)
    return made


def plan_sequences(model: nn.Module, config: Config, topology: Topology) -> Way | None:
    """Plan how to divide the sequences of ``model``; None if they need not be divided. Must be called before ``cut``.

    Raises ModelError, with nothing changed.
    """
    if topology.context == 1:
        return None
    from .divided_sequences import plan_divided_sequences

    return plan_divided_sequences(model, config, topology)


def divide_sequences(
    model: nn.Module, way: Way | None, config: Config, topology: Topology, device: torch.device, made: ParallelizedModel
) -> ParallelizedModel:
    """Let ``model`` divide its sequences by ``way``, after its layers. Returns ``made`` with that. All must call it."""
    if way is None:
        return made
    from .divided_sequences import divide_sequences_in

    return divide_sequences_in(model, way, config, topology, device, made)


def divide_shapes(
    model: nn.Module, plan: ParallelPlan | None, config: Config, topology: Topology
) -> Callable[[nn.Parameter], Replication]:
    """Do as ``divide`` for a model on the meta device, without other ranks. Returns how gradients are spread."""
    replication_of = ParallelizedModel().replication_of
    if topology.tensor > 1:
        from .divided_layers import divide_shapes_of_layers

        replication_of = divide_shapes_of_layers(model, plan, config, topology)
    if topology.expert > 1:
        from .divided_experts import divide_shapes_of_experts

        replication_of = divide_shapes_of_experts(model, topology, replication_of)
    if not isinstance(model, Pipelined) or topology.pipe == 1:
        return replication_of
    copies: Copies = {}
    for tie, stages in _ties_of_stages(model, topology):
        for local in _names_here(tie, topology):
            copies[id(model.get_parameter(local))] = (_name_of(tie), stages[0] == topology.pipe_rank)
    return _with_copies(replication_of, copies)


def _refuse_dropped(model: Pipelined, topology: Topology) -> None:
    """Raise ModelError, on all ranks alike, unless the stages together have every parameter of the model."""
    found = gather_values([name for name, _ in model.named_parameters(remove_duplicate=False)])
    lost = set(model.parameter_names()).difference(*found)
    if lost:
        raise ModelError(f"no pipeline stage has {', '.join(sorted(lost)[:5])}. This is an error in zerorun.")


def _refuse_unlike(model: Pipelined, topology: Topology, raw: RawOptimizer) -> None:
    """Raise ModelError, on all ranks alike, if copies of a tied parameter differ in how they are to be trained.

    That is their dtype, whether they are frozen, and what their parameter groups say.
    """
    mine = {}
    for tie, _ in _ties_of_stages(model, topology):
        for local in _names_here(tie, topology):
            param = model.get_parameter(local)
            how = f"{'trained' if param.requires_grad else 'frozen'}, {param.dtype}"
            mine[local] = tie.name, how, _settings_of(param, raw) if param.requires_grad else {}
    copies: dict[str, dict[str, str]] = {}
    optimized: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for found in gather_values(mine):
        for local, (name, how, settings) in found.items():
            copies.setdefault(name, {}).setdefault(f"{local} ({how})", how)
            optimized.setdefault(name, []).append((local, settings))
    for name, ways in copies.items():
        if len(set(ways.values())) > 1:
            raise ModelError(
                f"{name} is one parameter of several pipeline stages, where it is {', '.join(sorted(ways))}. Remedy: let "
                "it have one dtype, and freeze it on every stage that has it, under the name that it has there."
            )
    for name, every in optimized.items():
        keys = sorted({key for _, settings in every for key in settings})
        apart = [key for key in keys if len({settings.get(key) for _, settings in every}) > 1]
        if apart:
            shown = [_IN_A_GROUP] if _IN_A_GROUP in apart else apart
            texts = {f"{local} ({', '.join(f'{key}: {found.get(key)}' for key in shown)})" for local, found in every}
            raise ModelError(
                f"{name} is one parameter of several pipeline stages, and its copies are to be optimized in different "
                f"ways, by which they would not stay equal: {', '.join(sorted(texts))}. Remedy: on every stage that has "
                "it, put it into a parameter group of the same settings, under the name that it has there."
            )


def _settings_of(param: nn.Parameter, raw: RawOptimizer) -> dict[str, str]:
    """What the parameter group of ``param`` says, but for names of groups and parameters; nothing without an optimizer."""
    if not raw.groups:
        return {}
    if id(param) not in raw.group_of:
        return {_IN_A_GROUP: "no"}
    group = raw.groups[raw.group_of[id(param)]]
    settings = {key: _text_of(value) for key, value in group.items() if key not in ("params", "param_names", "name")}
    return {_IN_A_GROUP: "yes", **{key: text for key, text in settings.items() if text is not None}}


def _text_of(setting: Any) -> str | None:
    """The same for equal settings, also where one is a whole number; None for what has no equal on another rank."""
    if isinstance(setting, bool | str) or setting is None:
        return repr(setting)
    if isinstance(setting, int | float):
        return f"{float(setting):.9g}"
    if isinstance(setting, tuple | list):
        return ", ".join(str(_text_of(part)) for part in setting)
    return None


def _tie(model: Pipelined, topology: Topology, made: ParallelizedModel, device: torch.device, raw: RawOptimizer) -> None:
    """Give stages that have copies of one parameter a transport to sum its gradients, and the same values.

    Each tie has its own name, and therefore its own flat group, which has the same layout on all its stages.
    """
    copies: Copies = {}
    transports: dict[tuple[int, ...], Transport] = {}
    for tie, stages in _ties_of_stages(model, topology):
        group = subgroup(topology, "pipe", stages)
        if topology.pipe_rank not in stages:
            continue
        if stages not in transports:
            place = (stages.index(topology.pipe_rank), len(stages))
            transports[stages] = connect_axis(f"stages {stages}", group, *place, device, CommunicationStatistics())
        made.model_axes[_name_of(tie)] = transports[stages]
        here = _names_here(tie, topology)
        param = model.get_parameter(here[0])
        made.tied.append(TiedCopy(tie.name, here[0], param, stages, topology.pipe_rank, raw.group_of.get(id(param))))
        for local in here:
            param = model.get_parameter(local)
            if id(param) not in copies and part_of(param) is None:  # a stage may use it in several parts
                transports[stages].broadcast(param.data, "pipeline: tied parameters")
            copies[id(param)] = (_name_of(tie), stages[0] == topology.pipe_rank)
            if local != tie.name:
                made.copies[local] = tie.name
    made.replication_of = _with_copies(made.replication_of, copies)


def _ties_of_stages(model: Pipelined, topology: Topology) -> Iterator[tuple[Tie, tuple[int, ...]]]:
    """Yield each parameter that several stages have, with those stages."""
    for tie in model.ties():
        stages = tuple(sorted({part % topology.pipe for part in tie.parts}))
        if len(stages) > 1:
            yield tie, stages


def _names_here(tie: Tie, topology: Topology) -> list[str]:
    named = zip(tie.parts, tie.local_names, strict=True)
    return [local for part, local in named if part % topology.pipe == topology.pipe_rank]


def _name_of(tie: Tie) -> str:
    return f"copies of {tie.name}"


def _with_copies(inner: Callable[[nn.Parameter], Replication], copies: Copies) -> Callable[[nn.Parameter], Replication]:
    def replication_of(param: nn.Parameter) -> Replication:
        replication, copy = inner(param), copies.get(id(param))
        if copy is None:
            return replication
        return replace(replication, sums=(*replication.sums, copy[0]), counted=replication.counted and copy[1])

    return replication_of
