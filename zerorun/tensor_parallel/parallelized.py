"""Converts an existing model to tensor parallelism in place, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..distributed.topology import Topology
from ..errors import ModelError
from ..zero.init import part_of, refuse_partitioned
from .causal_loss import DividedLogits, with_divided_head
from .collectives import Region, make_region
from .convert import convert
from .describe import describe
from .heads import FUSED_NAMES, KEY_VALUE_NAMES, QUERY_NAMES
from .infer import Trials, infer_with, prove_along_sequence, prove_given
from .planning import make_plan, own_plan
from .sequence import SequenceParallel
from .styles import COLUMN, ParallelPlan, Style

_OF_ATTENTIONS = "each tensor rank computes some of the heads"
_OF_HIDDEN_STATES = "with sequence_parallel each tensor rank has a part of the sequence between blocks"


class Parallelized:
    """A converted ``model``. ``region``: None if there is one tensor rank, and nothing was changed."""

    def __init__(self, model: nn.Module, plan: ParallelPlan, region: Region | None, description: str) -> None:
        self.model, self.plan, self.region = model, plan, region
        self._description = description
        self._undo: list[Callable[[], None]] = []

    def describe(self) -> str:
        """Return one line for each pattern of the plan: style, count, sizes."""
        return self._description

    def undo(self) -> None:
        """Restore whole weights and ordinary classes, and drop gradients. All tensor ranks must call this."""
        while self._undo:
            self._undo.pop()()


def parallelize(
    model: nn.Module,
    plan: Mapping[str, Style] | None = None,
    *,
    topology: Topology | None = None,
    region: Region | None = None,
    sequence_parallel: bool = False,
    vocab_parallel_loss: bool = False,
) -> Parallelized:
    """Divide the layers of ``model`` over the tensor axis of ``topology`` or of ``region``. All tensor ranks must call it.

    ``plan``: name pattern -> style, see make_plan; None: the model's own, or else an inferred one. All ranks first take the
    values of tensor rank 0. Parameters on the meta device are divided in shape only. ``sequence_parallel``: hidden states
    between regions are also divided along the sequence; those that blocks output on the way stay divided.
    ``vocab_parallel_loss``: for a Hugging Face causal language model, whose logits then stay divided in training on labels.

    Raises ModelError before anything is changed; see make_plan, infer_plan and blocks_of.
    """
    if region is None:
        if topology is None:
            raise ModelError("parallelize() needs to know the ranks. Remedy: pass topology, or region.")
        if topology.tensor == 1:
            return Parallelized(model, ParallelPlan(1, ()), None, "one tensor rank: nothing is divided")
        region = make_region(topology, next((param.device for param in model.parameters()), torch.device("cpu")))
    refuse_partitioned(model.parameters(), "a model that parallelize() divides")
    size = region.axis.size
    made = plan_of(model, plan, size, sequence_parallel=sequence_parallel, vocab_parallel_loss=vocab_parallel_loss)
    with_loss = model if vocab_parallel_loss else None
    return carry_out(model, made, region, sequence_parallel=sequence_parallel, vocab_parallel_loss_of=with_loss)


def plan_of(
    model: nn.Module,
    plan: Mapping[str, Style] | None,
    size: int,
    spared: Collection[str] = (),
    *,
    sequence_parallel: bool = False,
    vocab_parallel_loss: bool = False,
) -> ParallelPlan:
    """Return the plan that ``parallelize`` carries out, proven unless it is the model's own. Raises ModelError.

    ``spared``: modules that stay as they are, whatever the plan says. ``sequence_parallel``: that is proven, too,
    of every model.
    """
    trials = Trials(model, size)
    given = infer_with(trials) if plan is None and not own_plan(model) else plan
    made = make_plan(model, given, size, spared)
    if plan is not None:
        prove_given(trials, made, plan, spared)
    if sequence_parallel:
        prove_along_sequence(trials, made, given, spared)
    made = replace(made, tried_bytes=trials.bytes)
    return with_divided_head(model, made) if vocab_parallel_loss else made


def carry_out(
    model: nn.Module,
    made: ParallelPlan,
    region: Region,
    *,
    sequence_parallel: bool,
    vocab_parallel_loss_of: nn.Module | None,
) -> Parallelized:
    """Convert ``model`` by ``made``, which is a plan for it. All tensor ranks must call this.

    ``vocab_parallel_loss_of``: the module that computes its loss from divided logits in training: ``model``, or the model
    of which it is a stage; None if there is none.
    """
    result = Parallelized(model, made, region, describe(model, made))
    _take_rank_zeros(model, region)
    result._undo += convert(model, made, region)
    result._undo += [hook.remove for hook in _refuse_partial_outputs(model, made, sequence_parallel=sequence_parallel)]
    if sequence_parallel:
        result._undo.append(SequenceParallel(model, made, region).remove)
    if vocab_parallel_loss_of is not None:
        result._undo.append(DividedLogits(vocab_parallel_loss_of, region).remove)
    return result


def _take_rank_zeros(model: nn.Module, region: Region) -> None:
    for _, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):  # ranks may have them in any order
        if not tensor.is_meta and part_of(tensor) is None:
            region.axis.broadcast(tensor.data, "tensor: whole weights")


def _refuse_partial_outputs(model: nn.Module, plan: ParallelPlan, *, sequence_parallel: bool) -> list[RemovableHandle]:
    """Let ``model``, and Hugging Face models in it, raise ModelError if they are asked for what ranks have in part.

    Their calls and their configurations ask for it. Return the hooks that see to it.
    """
    heads = QUERY_NAMES | KEY_VALUE_NAMES | FUSED_NAMES
    refused = {}
    if any(entry.style in COLUMN and entry.leaf in heads for entry in plan.entries):
        refused["output_attentions"] = _OF_ATTENTIONS
    if sequence_parallel:
        refused["output_hidden_states"] = _OF_HIDDEN_STATES
    asked = [module for module in model.modules() if hasattr(module, "config") and hasattr(module, "get_input_embeddings")]
    return [module.register_forward_pre_hook(partial(_refuse, refused), with_kwargs=True) for module in asked if refused]


def _refuse(refused: dict[str, str], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    for name, reason in refused.items():
        given = kwargs.get(name)
        if given if given is not None else getattr(module.config, name, False):
            raise ModelError(f"{name} cannot be had from {type(module).__name__} here: {reason}. Remedy: leave it out.")
