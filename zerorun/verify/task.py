"""The task: what is to be verified, as the user's function gives it, and how its batches are dealt to ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler, default_collate

from ..activations.random_streams import streams
from ..distributed.device import generators
from ..errors import ModelError, ZerorunError
from ..pipeline.pipelined import Pipelined
from ..plan.units import repeated_blocks

Loss = Callable[[Any, Any], torch.Tensor]
_NAMES = ("model", "batches", "loss")
_OPTIONS = ("optimizer", "model_parameters", "lr_scheduler", "collate_fn")
_REMEDY = (
    "Remedy: let it return (model, batches) or (model, batches, loss), or a dict of these names and of optimizer, "
    "model_parameters, lr_scheduler and collate_fn as for zerorun.initialize(). batches: micro-batches, dealt to "
    "the ranks in turn, or a Dataset; loss: called as loss(model, batch)."
)


@dataclass(frozen=True)
class Sizes:
    """How a run is divided: optimizer steps, micro-batches of a step, data-parallel ranks, and which one this is."""

    steps: int
    accumulation: int
    ranks: int
    rank: int
    micro_batch: int

    def number(self, step: int, micro: int, rank: int) -> int:
        """Return the number of a micro-batch in the order of all."""
        return (step * self.accumulation + micro) * self.ranks + rank


@dataclass(frozen=True)
class TrainingTask:
    """A model and what trains it. ``options``: further arguments of initialize()."""

    model: nn.Module
    batches: Any
    loss: Loss
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def dataset(self) -> Dataset[Any] | None:
        """The dataset, if there is one instead of batches."""
        return self.batches if isinstance(self.batches, Dataset) else None

    def dealt(self, sizes: Sizes, *, shuffle: bool, seed: int) -> list[Any]:
        """Return all micro-batches, of all ranks, in order. Raises ModelError if there are too few.

        Samples of a dataset come in the order of torch's DistributedSampler, and each rank takes every n-th.
        """
        count = sizes.steps * sizes.accumulation * sizes.ranks
        if self.dataset is None:
            found = list(islice(iter(self.batches), count))
        else:
            order: list[int] = list(DistributedSampler(self.dataset, 1, 0, shuffle=shuffle, seed=seed))
            collate, size = self.options.get("collate_fn") or default_collate, sizes.micro_batch
            taken = [
                order[number // sizes.ranks * size * sizes.ranks + number % sizes.ranks :: sizes.ranks][:size]
                for number in range(count)
            ]
            found = [collate([self.dataset[index] for index in indices]) for indices in taken if len(indices) == size]
        if len(found) < count:
            raise ModelError(
                f"the function gives {len(found)} micro-batches, and {sizes.steps} steps of {sizes.accumulation} on "
                f"{sizes.ranks} data-parallel ranks need {count}. Remedy: let it give more; they may repeat."
            )
        return found


@dataclass(frozen=True)
class RunSetting:
    """What a run is made of. ``config``: as initialize() takes it. ``batches``: all micro-batches, of all ranks, in order.

    ``blocks``: names of the modules before which random numbers begin anew.
    """

    task: TrainingTask
    config: dict[str, Any]
    sizes: Sizes
    batches: list[Any]
    blocks: Collection[str]
    seed: int


def make(function: Callable[[], Any], seed: int) -> TrainingTask:
    """Call the user's function with fresh random numbers. Raises ModelError if it fails, or gives something else."""
    seed_all(seed)
    try:
        given = function()
    except ZerorunError:
        raise
    except (Exception, SystemExit) as error:
        told = f"{type(error).__name__}: {error}"
        raise ModelError(f"the function to be verified raised {told}. Remedy: call it by itself, and mend it.") from error
    if isinstance(given, (tuple, list)) and 2 <= len(given) <= len(_NAMES):
        given = dict(zip(_NAMES, given, strict=False))
    if not isinstance(given, Mapping) or not {"model", "batches"} <= {*given} <= {*_NAMES, *_OPTIONS}:
        shown = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ModelError(f"the function to be verified gives {shown}. {_REMEDY}")
    if not isinstance(given["model"], nn.Module):
        raise ModelError(f"the function to be verified gives a {type(given['model']).__name__} as the model. {_REMEDY}")
    options = {name: given[name] for name in _OPTIONS if given.get(name) is not None}
    return TrainingTask(given["model"], given["batches"], given.get("loss") or loss_of, options)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    """Return the loss of a model that computes it: its output, or ``.loss`` of it. Raises ModelError if there is none."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    found = getattr(output, "loss", None) if not isinstance(output, torch.Tensor) else output
    if found is None and isinstance(output, Sequence) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise ModelError(f"the model gives a {type(output).__name__}, which is no loss and has none. {_REMEDY}")
    return found


def seed_all(seed: int) -> None:
    """Seed what models and data draw from."""
    random.seed(seed)
    torch.manual_seed(seed)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    streams.begin_anew(seed)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed what a forward on ``device`` draws from."""
    for generator in generators(device):
        generator.manual_seed(seed)
    streams.begin_anew(seed)


def shorten(model: nn.Module, count: int) -> int:
    """Leave ``count`` blocks of each list in ``model``, and return how many were taken out.

    Raises ModelError for a model that has no such lists.
    """
    if isinstance(model, Pipelined):
        raise ModelError("a PipelineModule cannot be shortened. Remedy: let the function make one with fewer layers.")
    lists: dict[str, list[int]] = {}
    for name, _ in repeated_blocks(model):
        parent, _, key = name.rpartition(".")
        if key.isdigit() and isinstance(model.get_submodule(parent), (nn.ModuleList, nn.Sequential)):
            lists.setdefault(parent, []).append(int(key))
    taken = 0
    for parent, keys in lists.items():
        container: Any = model.get_submodule(parent)
        for place in sorted(keys[count:], reverse=True):
            del container[place]
            taken += 1
    if not lists:
        raise ModelError("the model has no list of blocks that could be shortened. Remedy: verify a smaller model.")
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "num_hidden_layers"):
            config.num_hidden_layers = min(config.num_hidden_layers, count)
    return taken
