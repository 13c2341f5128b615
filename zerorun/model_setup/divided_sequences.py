"""Division of sequences over context ranks in a model. Imported only if there are such ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..config.parse import Config
from ..context_parallel.attention import AUTO, ULYSSES
from ..context_parallel.divided_model import Way
from ..context_parallel.divisible_models import Divided, inner_model, refusal, refuse_heads, way_of
from ..distributed.topology import Topology
from ..tensor_parallel.axis import make_axis
from .divided_layers import agree_on_random_numbers
from .parallelized_model import ParallelizedModel


def plan_divided_sequences(model: nn.Module, config: Config, topology: Topology) -> Way:
    """Plan how to divide the sequences of ``model``, which is still whole. Raises ModelError or ConfigError."""
    if config.context_parallel.method == ULYSSES:
        refuse_heads(model, topology.tensor, topology.context)
    section = config.context_parallel
    way = way_of(model, section.method or AUTO)
    if topology.pipe > 1 and not way.divides_loss:
        raise refusal(model, "in pipeline stages it needs the common loss of causal language models")
    return replace(way, in_evaluation=section.in_evaluation)


def divide_sequences_in(
    model: nn.Module, way: Way, config: Config, topology: Topology, device: torch.device, made: ParallelizedModel
) -> ParallelizedModel:
    """Let ``model``, of which ``made`` tells what is divided already, divide its sequences. All ranks must call it."""
    axis = make_axis(topology, device, "context")
    method, stages = config.context_parallel.method or AUTO, topology.pipe
    divided = Divided(inner_model(model), way, axis, method, in_stages=stages > 1)
    agree_on_random_numbers(axis)
    axes, model_axes = {**made.axes, "context": axis}, {**made.model_axes, "context": axis.transport}
    return replace(made, changes=[*made.changes, divided.remove], axes=axes, model_axes=model_axes)
