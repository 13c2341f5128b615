"""Experts that are spread over ranks, and the effect on their gradients. Imported only if they are spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..distributed.replication import Family, Replication
from ..distributed.tensor_shard import shards_of
from ..distributed.topology import Topology
from ..distributed.transport.gloo import Gloo
from ..distributed.transport.statistics import CommunicationStatistics
from ..distributed.transport.world import gather_values
from ..errors import ConfigError, ConfigProblem
from ..expert_parallel.dispatch import dispatches
from ..expert_parallel.known_experts import KEY, check_experts, find_experts
from ..expert_parallel.rows_per_expert import ExpertLoads
from ..expert_parallel.spread_experts import spread
from ..pipeline.module import PipelineModule
from ..tensor_parallel.axis import TransportAxis, make_axis
from .parallelized_model import ParallelizedModel


def names_of_experts(model: nn.Module, size: int) -> tuple[str, ...]:
    """Return the names of the modules of experts that are to be spread over ``size`` ranks. Raises ConfigError."""
    found = find_experts(model)
    if found or not isinstance(model, PipelineModule):  # of which another stage may have all experts
        check_experts(model, found, size)
    return tuple(experts.name for experts in found)


def divide_experts(
    model: nn.Module, topology: Topology, device: torch.device, made: ParallelizedModel
) -> ParallelizedModel:
    """Spread the experts of ``model`` in place, unless they are spread already. All ranks must call it.

    Raises ConfigError, on all ranks alike, if no stage has experts.
    """
    axis, found = make_axis(topology, device, "expert"), find_experts(model)
    spread_before = _are_spread(model)
    if not any(gather_values(bool(found) or spread_before)):
        reason = "no stage of the pipeline has a module of experts that can be spread."
        raise ConfigError([ConfigProblem(KEY, topology.expert, reason, "Remove the section expert_parallel.")])
    undone = [] if spread_before else spread(found, axis, made.axes.get("tensor"))
    return replace(
        made,
        model_axes={**made.model_axes, "expert": axis.transport},
        shards=shards_of(model),
        replication_of=_with_experts(made.replication_of, model),
        changes=[*made.changes, *undone],
        axes={**made.axes, "expert": axis},
        loads=ExpertLoads(dispatches(model.modules())),
    )


def divide_shapes_of_experts(
    model: nn.Module, topology: Topology, replication_of: Callable[[nn.Parameter], Replication]
) -> Callable[[nn.Parameter], Replication]:
    """Do as ``divide_experts`` for a model on the meta device, without other ranks."""
    meta = partial(Gloo, device=torch.device("meta"), statistics=CommunicationStatistics(), group=None)
    axis = TransportAxis(meta("expert", rank=topology.expert_rank, size=topology.expert))
    tensor = TransportAxis(meta("tensor", rank=topology.tensor_rank, size=topology.tensor))
    if not _are_spread(model):
        spread(find_experts(model), axis, tensor if topology.tensor > 1 else None)
    return _with_experts(replication_of, model)


def _are_spread(model: nn.Module) -> bool:
    return any(shard.axis == "expert" for shard in shards_of(model).values())


def _with_experts(inner: Callable[[nn.Parameter], Replication], model: nn.Module) -> Callable[[nn.Parameter], Replication]:
    """Experts have channels of their own, and count in the norm on each of these ranks."""
    experts = {key for key, shard in shards_of(model).items() if shard.axis == "expert"}
    return lambda param: Replication(family=Family.EXPERT) if id(param) in experts else inner(param)
