"""Verification in a training loop: one forward and backward of a batch by the engine, and by a whole copy of its model."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..activations.random_streams import streams
from ..distributed.device import CPU, on_device
from ..distributed.generators import generators_as_before
from ..distributed.transport.world import gather_values
from ..errors import StepError
from ..plan.replaced_forwards import is_own_hook
from ..plan.units import repeated_blocks
from ..zero.gathered_parameters import GatheredParameters
from ..zero.gradients import reduce_all
from . import sharded
from .explain import axis_at, described, first_of_ranks
from .recorder import Recorder
from .records import Kind, Records, Tolerances, differences
from .summation_order import PermutedSums, backwards, interleaved
from .task import Loss, loss_of
from .unsharded import Whole, add_micro_batch
from .verification import refuse_lossy

_SEED = 1234
_ALONE = "Remedy: compare the whole training by zerorun verify module:function --config FILE."


def refuse_to_verify(engine: Any, *, in_a_step: bool) -> None:
    """Raise StepError or ConfigError where ``verify_batch`` cannot be done. Changes nothing."""
    topology = engine.topology
    refuse_lossy(engine.config)
    if topology.pipe * topology.tensor * topology.context * topology.expert > 1:
        raise StepError(f"engine.verify() needs a model that is whole on each rank, and this one is divided. {_ALONE}")
    if in_a_step or engine.sharded_model.optimizer is None:
        raise StepError("engine.verify() in a step that has begun, or without an optimizer. Remedy: call it after step().")


def verify_batch(engine: Any, batch: Any, loss: Loss | None) -> str:
    """Compare the engine with one process on ``batch``, and return a line that says so. All ranks must call it.

    ``refuse_to_verify`` comes first. Gradients are left behind for the caller to forget. Raises StepError, on all ranks
    alike, with the first value that differs.
    """
    topology, loss = engine.topology, loss or loss_of
    batches = gather_values(on_device(batch, torch.device(CPU)))
    whole, blocks = whole_copy(engine), {name for name, _ in repeated_blocks(engine.module)}
    found = _of_engine(engine, batch, loss, blocks)
    alone = [
        _of_copy(engine, copy.deepcopy(whole), batches, loss, blocks, order) for order in (None, backwards, interleaved)
    ]
    epsilon = torch.finfo(engine.compute_dtype or torch.float32).eps
    wrong, count = differences(found, alone[0], topology.rank, Tolerances(alone[0], alone[1:], epsilon))
    first = min(wrong, key=lambda one: one.when, default=None)
    text = ""
    if first is not None:
        axis = axis_at(first.point.kind, engine.config, topology, divided=False)
        text = described(first, axis, "in one process", topology=topology, steps=1, more=len(wrong) - 1)
    problem, told = first_of_ranks(first, text, count)
    if problem:
        raise StepError(f"step {engine.global_steps}: {problem}")
    return f"step {engine.global_steps}: {sum(told):,} values equal those of one process"


def _of_engine(engine: Any, batch: Any, loss: Loss, blocks: set[str]) -> Records:
    """Return the records of one forward and backward by ``engine``."""
    recorder = sharded.watch(engine, blocks, _SEED, counts=False)
    try:
        with _undisturbed(engine):
            recorder.begin_step(0)
            recorder.begin_micro_batch(0, engine.topology.data_parallel_rank)
            value = loss(engine, on_device(batch, engine.device))
            recorder.keep(Kind.LOSS, "loss", value, micro=0)
            engine.backward(value)
        reduce_all(engine.sharded_model, "engine.verify")
        sharded.keep_reduced(recorder, engine.sharded_model)
    finally:
        recorder.remove()
    return recorder.records


def _of_copy(engine: Any, model: nn.Module, batches: list[Any], loss: Loss, blocks: set[str], order: Any) -> Records:
    """Return the records of a whole model and all ranks' batches. ``order``: of sums."""
    subject = Whole(model, loss, engine.config, engine.scaler, engine.device)
    recorder = Recorder(model, subject.named(), blocks, _SEED, engine.device, rank=engine.topology.data_parallel_rank)
    for name, param in model.named_parameters():
        recorder.keep_updated(-1, name, param)
    with _undisturbed(engine), PermutedSums(order) if order is not None else torch.enable_grad():
        recorder.begin_step(0)
        for rank, batch in enumerate(batches):
            add_micro_batch(subject, recorder, batch, 0, rank)
    names = subject.named().names
    for param, total in subject.sums.items():
        recorder.keep(Kind.REDUCED, names[id(param)], total)
    recorder.remove()
    return recorder.records


@contextlib.contextmanager
def _undisturbed(engine: Any) -> Iterator[None]:
    """Leave random numbers and the buffers of the engine's module as they are."""
    buffers = [(buffer, buffer.clone()) for buffer in engine.module.buffers()]
    try:
        with generators_as_before(), streams.as_before():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def whole_copy(engine: Any) -> nn.Module:
    """Return a copy of the module with its whole weights and without zerorun's hooks. All ranks must call it."""
    module, model = engine.module, engine.sharded_model
    memo: dict[int, Any] = {id(kept): kept for kept in (engine, model, model.runtime, model.optimizer, model.comm)}
    memo.update({id(unit): unit for unit in model.units})
    for part in module.modules():
        for name, hooks in vars(part).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if not is_own_hook(hook))
    with GatheredParameters(module.parameters()), torch.no_grad():
        for param in module.parameters():
            memo[id(param)] = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    found: nn.Module = copy.deepcopy(module, memo)
    return found
