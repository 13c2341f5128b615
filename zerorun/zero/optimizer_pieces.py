"""Pieces: what a torch optimizer sees of the sharded model, and the way back from a piece to named parameters.

[Note: pieces]
For an element-wise optimizer all neighbouring parameters of one parameter group in a unit make one 1-D piece, so that a
step costs O(units) calls. A parameter that gets no gradient on any rank must not move (torch's optimizers skip it, and its
step count stands still): the first time that happens, its piece is cut at the parameter's ends, together with its
optimizer state, and from then on it can be left out. Optimizers that are told of parts (optim/parameter_parts.py) get a 1-D
piece for each part of a parameter. All others get every parameter whole, in its own shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

import torch

from ..ops.rounding import Origin
from ..ops.state_format import StateFormat
from ..plan.sharding_plan import ParameterRun, PiecePlan
from ..plan.units import stored_name
from .flat_group import TrainedGroup
from .unit import Unit


@dataclass
class OptimizerPiece:
    """One tensor of the optimizer: a view of a flat group's master, and of its gradient. All its states have one format."""

    flat_group: TrainedGroup
    group: int
    low: int  # where it begins in the flat group's owned range, in elements
    tensor: torch.Tensor  # fp32 or bf16
    runs: list[ParameterRun]
    format: StateFormat = StateFormat.FP32

    @cached_property
    def gradient(self) -> torch.Tensor:
        """The reduced gradient, shaped like ``tensor``."""
        owned = owned_gradient(self.flat_group)
        return owned[self.low : self.low + self.tensor.numel()].view(self.tensor.shape)

    @property
    def weight(self) -> torch.Tensor:
        """The compute-dtype values that belong to ``tensor``, flat."""
        return self.flat_group.weight[self.low : self.low + self.tensor.numel()]

    @property
    def rest(self) -> torch.Tensor | None:
        """What ``tensor`` leaves out of the values that it stands for, flat; None if its format has nothing there."""
        rest = self.flat_group.rest
        return None if rest is None else rest[self.low : self.low + self.tensor.numel()]

    def origins(self, copies: Mapping[str, str], seed: int) -> tuple[Origin, ...]:
        """What of the model's parameters it consists of, by names that all ranks have for them.

        ``copies``: this rank's name of a parameter -> that which it has elsewhere.
        """
        return tuple(self._origin(run, copies, seed) for run in self.runs)

    def _origin(self, run: ParameterRun, copies: Mapping[str, str], seed: int) -> Origin:
        own, shards = stored_name(self.flat_group.names[run.entry]), self.flat_group.plan.tensor_shards
        name, shard = copies.get(own, own), shards[run.entry] if shards else None
        whole = Origin(run.offset, run.numel, name, run.start, seed=seed)
        if shard is None:
            return whole
        if len(shard.ranges) != 1:  # of several matrices in one: a name for what this rank has
            return replace(whole, name=f"{name} {shard.ranges}")
        inner = prod(shard.shape[shard.dim + 1 :])
        rows = {"row": shard.length * inner, "whole_row": shard.shape[shard.dim] * inner}
        return replace(whole, **rows, column=shard.ranges[0][0] * inner)


def owned_gradient(flat_group: TrainedGroup) -> torch.Tensor:
    """The gradient of what this rank updates: [owned], on the device of the master."""
    if flat_group.host_grad is not None:
        return flat_group.host_grad
    whole = flat_group.plan.owns_everything and flat_group.shares_grad_memory
    return flat_group.grad_full if whole else flat_group.grad_shard


def build_pieces(units: Iterable[Unit], *, whole: bool, parts: bool = False) -> list[OptimizerPiece]:
    """Pieces of everything this rank updates. ``whole``: one for each parameter, in its own shape; ``parts``: one for each
    part of a parameter."""
    return [
        OptimizerPiece(flat_group, piece.group, piece.low, _part(flat_group, piece), list(piece.runs), piece.format)
        for unit in units
        for flat_group in unit.trainable
        for piece in flat_group.plan.pieces(whole=whole, parts=parts)
    ]


def _part(flat_group: TrainedGroup, piece: PiecePlan) -> torch.Tensor:
    return flat_group.master[piece.low : piece.low + prod(piece.shape)].view(piece.shape)


def split_lengths(piece: OptimizerPiece) -> list[int]:
    """The lengths of the parts if ``piece`` is cut before each of its runs."""
    starts = [run.offset for run in piece.runs] + [piece.tensor.numel()]
    return [end - start for start, end in pairwise(starts)]


def split_piece(piece: OptimizerPiece, tensors: list[torch.Tensor]) -> list[OptimizerPiece]:
    """One piece for each run of ``piece``. ``tensors``: its tensor, cut into ``split_lengths``."""
    parts = []
    for run, tensor in zip(piece.runs, tensors, strict=True):
        parts.append(
            OptimizerPiece(
                piece.flat_group,
                piece.group,
                piece.low + run.offset,
                tensor,
                [ParameterRun(run.entry, run.start, 0, run.numel)],
                piece.format,
            )
        )
    return parts
