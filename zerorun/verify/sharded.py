"""The run as configured: training by an engine, with records of what this rank has."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..distributed.device import on_device
from ..distributed.replication import Family
from ..errors import ZerorunError
from ..pipeline.pipelined import Pipelined
from ..plan.units import repeated_blocks
from ..zero.optimizer_pieces import owned_gradient
from ..zero.sharded_model import ShardedModel
from ..zero.value_access import safe_get_local_fp32_param
from .recorder import Draws, Named, Recorder, without_dropout
from .records import Kind, Records
from .task import RunSetting, Sizes, TrainingTask

Initialize = Callable[..., Any]


@dataclass(frozen=True)
class ShardedRun:
    """``records`` of this rank; ``draws``: what its dropouts would have drawn, if they were left out.

    ``divided``: names of the modules and parameters that tensor ranks divide. ``sent``: the reduced gradients that no rank
    before this one has. ``error``: by which the run ended early, on all ranks alike.
    """

    records: Records
    draws: Draws
    divided: frozenset[str]
    sent: Records
    error: ZerorunError | None


def named(model: ShardedModel) -> Named:
    """Return what is known of the parameters of this rank's part of a model."""
    copies = model.parts.copies
    names = {key: copies.get(home.name, home.name) for key, home in model.homes.items()}
    divided = model.comm.topology.context > 1  # then each rank has the gradient from its rows
    summands = {
        key
        for key, home in model.homes.items()
        if divided or home.flat_group.plan.replication.sums or home.flat_group.plan.family is Family.EXPERT
    }
    return Named(names, model.parts.shards, summands)


def around_blocks(module: Any) -> set[str]:
    """Return the names of the modules that contain repeated blocks, the whole module included."""
    found = {""}
    for name, _ in repeated_blocks(module):
        parts = name.split(".")
        found |= {".".join(parts[:end]) for end in range(len(parts))}
    return found


def watch(engine: Any, blocks: Collection[str], seed: int, *, counts: bool) -> Recorder:
    """Return a recorder of what ``engine`` computes."""
    module, topology = engine.module, engine.topology
    place = {"rank": topology.data_parallel_rank, "stage": topology.pipe_rank}
    skips = around_blocks(module) if counts else {""}
    if topology.context > 1:
        skips = {name for name, _ in module.named_modules()}  # their outputs are rows, or are joined
    skips |= set(_inside_experts(module))
    return Recorder(module, named(engine.sharded_model), blocks, seed, engine.device, counts=counts, skips=skips, **place)


def keep_reduced(recorder: Recorder, model: ShardedModel) -> Records:
    """Keep the gradients from which this rank will update its part of the weights: sums over different data. Return those
    that it is the first to have.
    """
    names, sent, context = named(model).names, Records(), model.comm.topology.context
    for unit in model.units:
        for group in unit.trainable:
            gradient = owned_gradient(group)
            for run in group.plan.owned_runs() if group.reduced else ():
                param = group.params[run.entry]
                part = gradient[run.offset : run.offset + run.numel]
                part = part if context == 1 else part / context  # each rank of a sequence has the whole loss
                place: dict[str, Any] = {"start": run.start, "shard": model.parts.shards.get(id(param))}
                point = recorder.keep(Kind.REDUCED, names[id(param)], part, **place)
                if group.plan.copy == 0 and not (group.plan.owns_everything and group.plan.shard_rank):
                    sent[point] = recorder.records[point]
    return sent


def keep_updated(recorder: Recorder, model: ShardedModel, step: int) -> None:
    """Keep this rank's part of the weights."""
    names = named(model).names
    for unit in model.units:
        for group in unit.trainable:
            for run in group.plan.owned_runs():
                param = group.params[run.entry]
                part = safe_get_local_fp32_param(param)
                if part is not None:
                    place = {"start": run.start, "shard": model.parts.shards.get(id(param))}
                    shown = part.to(group.plan.master_format.precision)
                    recorder.keep_updated(step, names[id(param)], shown, **place)


def run(setting: RunSetting, initialize: Initialize, *, drops: bool) -> ShardedRun:
    """Train by an engine. All ranks must call it. ``drops``: leave dropout as it is."""
    task, sizes = setting.task, setting.sizes
    options = dict(task.options)
    if task.dataset is not None:
        options["training_data"] = task.dataset
    engine = initialize(task.model, setting.config, **options)
    engine.train()
    pipelined = isinstance(engine.module, Pipelined)
    recorder, draws = watch(engine, setting.blocks, setting.seed, counts=pipelined), Draws()
    model, steps, sent = engine.sharded_model, itertools.count(-1), Records()

    def before_update() -> None:
        keep_updated(recorder, model, next(steps))
        sent.update(keep_reduced(recorder, model))

    model.before_update.append(before_update)
    error: ZerorunError | None = None
    own, divided = _own_batches(engine, sizes, setting.batches), frozenset(_divided(engine.module))
    try:
        with nullcontext() if drops else without_dropout(recorder, draws):
            for step in range(sizes.steps):
                recorder.begin_step(step)
                _step(engine, recorder, task, sizes, own, pipelined=pipelined)
                norm = engine.get_global_grad_norm()
                if norm is not None:
                    recorder.keep(Kind.NORM, "norm", torch.tensor(norm, dtype=torch.float64))
            keep_updated(recorder, model, sizes.steps - 1)
    except ZerorunError as found:  # there may be a cause among what was recorded
        error = found.with_traceback(None)  # its frames would keep the engine
        error.__context__ = None
    recorder.remove()
    model.before_update.remove(before_update)
    with contextlib.suppress(ZerorunError) if error is not None else nullcontext():
        engine.destroy()
    return ShardedRun(recorder.records, draws, divided, sent, error)


def _own_batches(engine: Any, sizes: Sizes, batches: list[Any]) -> Iterator[Any]:
    """Return the micro-batches of this rank: of the engine's own loader, if there is a dataset."""
    if engine.dataloader is not None:
        return iter(engine.dataloader)
    rank, count = engine.topology.data_parallel_rank, sizes.steps * sizes.accumulation
    return iter([batches[number * sizes.ranks + rank] for number in range(count)])


def _step(
    engine: Any, recorder: Recorder, task: TrainingTask, sizes: Sizes, own: Iterator[Any], *, pipelined: bool
) -> None:
    given = []
    for micro in range(sizes.accumulation):
        given.append(next(own))
        recorder.keep_input(given[-1], micro)
        if pipelined:
            continue
        recorder.begin_micro_batch(micro, sizes.rank)
        loss = task.loss(engine, on_device(given[-1], engine.device))
        recorder.keep(Kind.LOSS, "loss", loss, micro=micro)
        engine.backward(loss)
        engine.step()
    if pipelined:
        recorder.keep(Kind.LOSS, "mean loss", engine.train_batch(iter(given)))


def _inside_experts(module: nn.Module) -> Iterator[str]:
    """Yield the names of the modules that run on rows of all ranks."""
    for name, part in module.named_modules():
        if any(shard.axis == "expert" for shard in getattr(part, "tensor_shards", {}).values()):
            yield from (f"{name}.{inner}" for inner, _ in part.named_modules() if inner)


def _divided(module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        for own in getattr(part, "tensor_shards", ()):
            yield from (name, f"{name}.{own}")
