"""Pipelined: the interface through which the engine runs the local stage of a model that is cut into stages.

[Note: parts, stages and chunks]
A model is cut into ``num_stages * chunks`` *parts*, numbered in the order in which data passes through them. Stage p holds
``chunks`` of them: its *chunk* c is part ``c * num_stages + p`` (interleaved stages: Narayanan et al. 2021,
arXiv:2104.04473; chunks = 1 is the ordinary pipeline).

[Note: how to run a part]
For one micro-batch, on the stage that has the part:

    value = module.inputs_of(batch) if module.is_first(chunk) else <what arrived from the part before>
    value = module(value, chunk, batch if module.is_last(chunk) else None)
    loss = module.loss_of(value, batch) if module.is_last(chunk) else None; otherwise send value on

``value`` is any pytree. Between parts it may hold tensors, None, numbers and strings. Only the stages with the first and
the last part need ``batch``.

[Note: tied parameters]
A parameter that several parts use is one parameter of the model. Each stage that uses it has a copy with the same initial
values. The copies stay equal if their gradients are summed over the stages of ``Tie.parts`` before each step. Only one copy
counts in norms.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from ..errors import PipelineError
from .partition import Bounds


@dataclass(frozen=True)
class Tie:
    """One parameter that several parts use.

    name: its name in the model in one process, which is the name that its first user gives it.
    parts: the parts that use it, ascending.
    local_names: for each of these parts, the path at which ``get_parameter`` finds it on the part's stage.
    """

    name: str
    parts: tuple[int, ...]
    local_names: tuple[str, ...]


@dataclass(frozen=True)
class StageCut:
    """Where a model is cut: ``bounds`` of its parts, in layers, and which of them are local."""

    bounds: Bounds
    num_stages: int
    chunks: int
    stage: int

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise PipelineError(f"chunks = {self.chunks}: a stage has at least one. Remedy: give a positive number.")
        if not 0 <= self.stage < self.num_stages:
            raise PipelineError(
                f"stage = {self.stage} is none of the {self.num_stages} stages. Remedy: give one of 0 to "
                f"{self.num_stages - 1}."
            )

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1

    def part(self, chunk: int) -> int:
        """Return the number of the part that is chunk ``chunk`` of the local stage."""
        if not 0 <= chunk < self.chunks:
            raise PipelineError(f"chunk {chunk}: this stage has {self.chunks}. Remedy: give one of 0 to {self.chunks - 1}.")
        return chunk * self.num_stages + self.stage

    def layers(self, part: int) -> range:
        return range(self.bounds[part], self.bounds[part + 1])

    def local_layers(self) -> list[int]:
        return [layer for chunk in range(self.chunks) for layer in self.layers(self.part(chunk))]

    def part_of(self, layer: int) -> int:
        for part, (start, end) in enumerate(pairwise(self.bounds)):
            if start <= layer < end:
                return part
        raise PipelineError(
            f"layer {layer} does not exist: there are {self.bounds[-1]}. Remedy: give one of 0 to {self.bounds[-1] - 1}."
        )

    def stage_of(self, layer: int) -> int:
        return self.part_of(layer) % self.num_stages


class Pipelined(nn.Module):
    """Base class of PipelineModule and PretrainedPipeline. See the notes at the top of this file."""

    # The class of each layer of the whole model, where layers are given one by one.
    layer_classes: tuple[str, ...] = ()
    _cut: StageCut
    _ties: tuple[Tie, ...]
    _names: tuple[str, ...]

    @property
    def chunks(self) -> int:
        """The number of parts of the local stage."""
        return self._cut.chunks

    @property
    def stage(self) -> int:
        """The number of the local stage."""
        return self._cut.stage

    def topology(self) -> Any:
        """Return the topology that the module was made for; None if none was given."""
        return None

    def num_pipeline_stages(self) -> int:
        """Return the number of stages that the model is cut into."""
        return self._cut.num_stages

    def partitions(self) -> Bounds:
        """The bounds of all parts, in layers: part k has the layers bounds[k] .. bounds[k + 1] - 1."""
        return self._cut.bounds

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage that has layer ``layer_idx``. Raises PipelineError for a layer that does not exist."""
        return self._cut.stage_of(layer_idx)

    def is_first(self, chunk: int = 0) -> bool:
        """True if this chunk is the part that takes the batch."""
        return self._cut.part(chunk) == 0

    def is_last(self, chunk: int = 0) -> bool:
        """True if this chunk is the part that computes the loss."""
        return self._cut.part(chunk) == self._cut.parts - 1

    def ties(self) -> list[Tie]:
        """The parameters that more than one part uses; the same list on every stage."""
        return list(self._ties)

    def parameter_names(self) -> list[str]:
        """The names of all parameters of the whole model, as its ``named_parameters`` would give them in one process."""
        return list(self._names)

    @abstractmethod
    def forward(self, value: Any, chunk: int = 0, batch: Any = None) -> Any:
        """Run one local part. ``batch``: given to the last part, for models that compute their loss themselves."""

    @abstractmethod
    def modules_of(self, chunk: int) -> list[nn.Module]:
        """The layers of one chunk that are modules."""

    @abstractmethod
    def inputs_of(self, batch: Any) -> Any:
        """Return what the first part takes from a batch."""

    @abstractmethod
    def loss_of(self, output: Any, batch: Any) -> Any:
        """Return the loss, computed from what the last part returned."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode; afterwards each module has the mode that it had, also one that is to keep it."""
    whole = getattr(model, "whole_model", model)  # which is no child of a stage that was cut out of it
    modes = [(part, part.training) for part in (*model.modules(), whole)]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def find_ties(places: Mapping[Any, Sequence[tuple[int, str]]]) -> tuple[tuple[Tie, ...], tuple[str, ...]]:
    """Return (the ties, the names of all parameters).

    ``places``: identity of a parameter, of any type -> (part, name) of each of its users, in the order of the layers.
    """
    ties, names = [], []
    for users in places.values():
        names.append(users[0][1])
        first: dict[int, str] = {}
        for part, name in users:
            first.setdefault(part, name)
        if len(first) > 1:
            parts = sorted(first)
            ties.append(Tie(names[-1], tuple(parts), tuple(first[part] for part in parts)))
    return tuple(ties), tuple(names)
