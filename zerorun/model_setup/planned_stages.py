"""Parts: what each pipeline stage would hold of a model, made from shapes alone, for estimates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config.parse import Config
from ..distributed.device import CPU
from ..distributed.replication import ALONE, Replication
from ..distributed.topology import Topology
from ..optim.requested_optimizer import RawOptimizer, without_elsewhere
from ..pipeline.pipelined import Pipelined
from ..plan.make_plan import make_plan
from ..plan.parameter_kinds import rebuilt
from ..plan.sharding_plan import ShardingPlan
from .float8 import Float8Layers, float8_layers
from .parallelize import cut, divide_shapes, plan_experts, plan_layers, plan_sequences

if TYPE_CHECKING:
    from ..tensor_parallel.styles import ParallelPlan


@dataclass(frozen=True)
class PlannedPart:
    """A stage as its first tensor rank has it, which holds as much as any other. ``topology`` is that of this rank.

    ``tried_bytes``: the host memory that a process needs to try out how layers are divided, beside the whole model.
    """

    model: nn.Module
    raw: RawOptimizer
    topology: Topology
    replication_of: Callable[[nn.Parameter], Replication]
    tried_bytes: int = 0

    def plan(self, config: Config, transport: str, device_type: str) -> ShardingPlan:
        """Return the plan of what the rank holds; see ``make_plan``."""
        given = (self.model, config, self.raw, self.topology, transport, device_type)
        return make_plan(*given, replication_of=self.replication_of)


def planned_parts(model: nn.Module, config: Config, raw: RawOptimizer, topology: Topology) -> Iterator[PlannedPart]:
    """Yield every stage of ``model``, or only its own stage if it is a PipelineModule. ``model`` is not changed.

    Raises ModelError or PipelineError, as ``initialize`` would.
    """
    layers = plan_layers(
        model, config, topology, plan_experts(model, topology)
    )  # before classes change, as initialize does
    plan_sequences(model, config, topology)  # for what it refuses: nothing of it changes what a rank holds
    in_fp8 = Float8Layers(float8_layers(model, config.fp8), config.fp8, CPU)
    try:
        yield from _parts(model, config, raw, topology, layers)
    finally:
        in_fp8.remove()


def _parts(
    model: nn.Module, config: Config, raw: RawOptimizer, topology: Topology, layers: ParallelPlan | None
) -> Iterator[PlannedPart]:
    if topology.pipe * topology.tensor * topology.expert == 1:
        yield PlannedPart(model, raw, topology, lambda param: ALONE)
        return
    stages = [model.stage] if isinstance(model, Pipelined) else range(topology.pipe)
    for stage in stages:
        here = replace(topology, rank=topology.rank_at(pipe=stage))
        copied, own = _of_shapes(model, raw)
        part = cut(copied, config, here)
        replication_of = divide_shapes(part, layers, config, here)
        tried_bytes = layers.tried_bytes if layers is not None else 0
        yield PlannedPart(part, without_elsewhere(own, part), here, replication_of, tried_bytes)


def _of_shapes(model: nn.Module, raw: RawOptimizer) -> tuple[nn.Module, RawOptimizer]:
    """Return a copy of ``model`` on the meta device, and ``raw`` with the parameters of the copy."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        shape = rebuilt(param, lambda tensor: torch.empty_like(tensor, device="meta"))
        memo[id(param)] = nn.Parameter(shape, requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    same = dict(memo)  # a copy, because deepcopy adds entries to memo
    groups = [{**group, "params": [same[id(param)] for param in group["params"]]} for group in raw.groups]
    group_of = {id(same[key]): group for key, group in raw.group_of.items()}
    formats = {id(same[key]): format for key, format in raw.formats.items()}
    return copy.deepcopy(model, memo), replace(raw, groups=groups, group_of=group_of, formats=formats)
