"""Division of layers over tensor ranks, by a plan, and its effect on gradients. Imported only if layers are divided."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from ..config.parse import Config
from ..config.sections import TensorParallel
from ..distributed.device import generators
from ..distributed.replication import ALONE, Replication
from ..distributed.tensor_shard import partial_of, shards_of
from ..distributed.topology import Topology
from ..distributed.transport.gloo import Gloo
from ..distributed.transport.statistics import CommunicationStatistics
from ..errors import ModelError
from ..log import info_once
from ..pipeline.module import PipelineModule
from ..pipeline.pipelined import Pipelined
from ..tensor_parallel.axis import TransportAxis, make_axis
from ..tensor_parallel.causal_loss import has_head
from ..tensor_parallel.collectives import Region, forward_outside, make_region
from ..tensor_parallel.layers import Parallel
from ..tensor_parallel.parallelized import Parallelized, carry_out, plan_of
from ..tensor_parallel.planning import make_plan, matches, matches_names
from ..tensor_parallel.sequence import has_blocks
from ..tensor_parallel.styles import HOOKED, ParallelPlan
from .parallelized_model import ParallelizedModel


def plan_whole_layers(model: nn.Module, section: TensorParallel, size: int, spared: Collection[str] = ()) -> ParallelPlan:
    """Plan how to divide the layers of ``model``, which are still whole, over ``size`` ranks, but for modules ``spared``.

    Raises ModelError.
    """
    if not isinstance(model, Pipelined):
        how = {"sequence_parallel": section.sequence_parallel, "vocab_parallel_loss": section.vocab_parallel_loss}
        return plan_of(model, section.plan or None, size, spared, **how)
    if isinstance(model, PipelineModule):
        _refuse_whole_model_keys(section)
    if not section.plan:
        raise ModelError(
            "a PipelineModule does not tell how its layers are to be divided over tensor-parallel ranks. Remedy: set "
            'tensor_parallel.plan (name pattern -> style, such as {"*.up": "colwise", "*.down": "rowwise"}), or make '
            "layers with zerorun.tensor_parallel.ColumnParallelLinear and its like."
        )
    _refuse_unmatched(model, section.plan)
    here = {pattern: style for pattern, style in section.plan.items() if matches(model, pattern)}
    return make_plan(model, here, size, spared) if here else ParallelPlan(size, ())


def _refuse_whole_model_keys(section: TensorParallel) -> None:
    """Raise ModelError for settings that need the whole model rather than the layers of one stage."""
    for key, instead in (
        ("sequence_parallel", "it works on a Hugging Face model that is not cut by hand."),
        ("vocab_parallel_loss", "let loss_fn call zerorun.tensor_parallel.vocab_parallel_cross_entropy."),
    ):
        if getattr(section, key):
            raise ModelError(
                f"tensor_parallel.{key} cannot be done in a PipelineModule. Remedy: set it to false; {instead}"
            )


def _refuse_unmatched(model: Pipelined, plan: Mapping[str, Any]) -> None:
    """Raise ModelError for a pattern that matches nothing on any stage: layers would stay whole without notice."""
    names = model.parameter_names()
    for pattern, style in plan.items():
        if style not in HOOKED and not matches_names(names, pattern):  # styles that only hook modules need no parameters
            raise ModelError(
                f"tensor_parallel.plan: pattern {pattern!r} matches no layer of any stage. Remedy: use names as of the "
                f'PipelineModule\'s parameter_names(), such as {names[0]!r}; "*" stands for one part between dots.'
            )


def divide_layers(
    model: nn.Module, plan: ParallelPlan | None, config: Config, topology: Topology, device: torch.device
) -> ParallelizedModel:
    """Divide the layers in place by ``plan``. All ranks must call it.

    ``plan`` is None if the model is made of divided layers already.
    """
    axis = make_axis(topology, device)
    if plan is not None:
        made = _convert(model, plan, config, make_region(topology, device))
        undo = made.undo
        info_once(made.describe())
    else:
        _take_rank_zeros(model, axis)
        undo = _forward_outside(model)
    agree_on_random_numbers(axis)
    return ParallelizedModel(
        {"tensor": axis.transport}, shards_of(model), replication_in_layers(model, topology), [undo], {"tensor": axis}
    )


def divide_shapes_of_layers(
    model: nn.Module, plan: ParallelPlan | None, config: Config, topology: Topology
) -> Callable[[nn.Parameter], Replication]:
    """Do as ``divide_layers`` for a model on the meta device, without other ranks."""
    place = (topology.tensor_rank, topology.tensor)
    nobody = Gloo("tensor", None, *place, torch.device("meta"), CommunicationStatistics())
    if plan is not None:
        _convert(model, plan, config, Region(TransportAxis(nobody)))
    return replication_in_layers(model, topology)


def _convert(model: nn.Module, plan: ParallelPlan, config: Config, region: Region) -> Parallelized:
    own, section = plan.here(model), config.tensor_parallel
    whole = getattr(model, "whole_model", model)  # a pipeline stage has only some of its layers
    return carry_out(
        model,
        own,
        region,
        sequence_parallel=section.sequence_parallel and has_blocks(own),
        vocab_parallel_loss_of=whole if section.vocab_parallel_loss and has_head(whole) else None,
    )


def replication_in_layers(model: nn.Module, topology: Topology) -> Callable[[nn.Parameter], Replication]:
    """Return a function that tells how the gradient of a parameter is spread over tensor ranks."""
    shards, partial, first = shards_of(model), partial_of(model), topology.tensor_rank == 0

    def replication_of(param: nn.Parameter) -> Replication:
        if id(param) in shards:
            return ALONE
        return Replication(("tensor",) if id(param) in partial else (), first, copied=True)

    return replication_of


def _forward_outside(model: nn.Module) -> Callable[[], None]:
    """Do what ``convert`` does for a model that it divides: each forward begins and ends outside all regions."""
    regions = {layer.region for layer in model.modules() if isinstance(layer, Parallel)}
    undone = [forward_outside(model, region) for region in regions]

    def undo() -> None:
        while undone:
            undone.pop()()

    return undo


def _take_rank_zeros(model: nn.Module, axis: TransportAxis) -> None:
    """Broadcast from tensor rank 0 what every tensor rank of a model made of divided layers has whole."""
    shards = shards_of(model)
    for _, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):  # ranks may have them in any order
        if id(tensor) not in shards and not tensor.is_meta:
            axis.broadcast(tensor.data, "tensor: whole weights")


def agree_on_random_numbers(axis: TransportAxis) -> None:
    """Give the default generators the state that rank 0 of ``axis`` has. See tensor_parallel/random.py."""
    for generator in generators(axis.transport.device):
        state = generator.get_state()
        axis.broadcast(state, "random state")
        generator.set_state(state)
