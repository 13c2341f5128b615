"""Pieces: what a torch optimizer sees of the sharded model, and the way back from a piece to named parameters.

[Note: pieces]
For an element-wise optimizer all neighbouring parameters of one parameter group in a unit make one 1-D piece, so that a
step costs O(units) calls. A parameter that gets no gradient on any rank must not move (torch's optimizers skip it, and its
step count stands still): the first time that happens, its piece is cut at the parameter's ends, together with its
optimizer state, and from then on it can be left out. Other optimizers get every parameter whole, in its own shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from .flat_group import FlatGroup
from .unit import Unit


@dataclass
class ParameterRun:
    """Elements ``start .. start + numel`` of parameter ``entry`` (index in its flat group), at ``offset`` in the piece."""

    entry: int
    start: int
    offset: int
    numel: int


@dataclass
class OptimizerPiece:
    """One tensor of the optimizer: a view of a flat group's master, and of its gradient."""

    flat_group: FlatGroup
    group: int
    low: int  # elements into the flat group's owned range
    tensor: torch.Tensor  # fp32
    runs: list[ParameterRun]

    @cached_property
    def gradient(self) -> torch.Tensor:
        """The reduced gradient, shaped like ``tensor``."""
        owned = owned_gradient(self.flat_group)
        return owned[self.low : self.low + self.tensor.numel()].view(self.tensor.shape)


def owns_everything(flat_group: FlatGroup) -> bool:
    """True at stage 0: every rank updates all elements."""
    return flat_group.master is not None and flat_group.master.numel() == flat_group.layout.numel


def owned_gradient(flat_group: FlatGroup) -> torch.Tensor:
    """The gradient of what this rank updates: [owned] fp32, where the master is."""
    if flat_group.host_grad is not None:
        return flat_group.host_grad
    whole = owns_everything(flat_group) and flat_group.shares_grad_memory
    found = flat_group.grad_full if whole else flat_group.grad_shard
    assert found is not None
    return found


def owned_runs(flat_group: FlatGroup) -> list[ParameterRun]:
    """What this rank updates, with ``offset`` counted from the beginning of its owned range."""
    if owns_everything(flat_group):
        return [ParameterRun(index, 0, entry.offset, entry.numel) for index, entry in enumerate(flat_group.layout.entries)]
    return [ParameterRun(p.entry, p.start, p.shard_start, p.numel) for p in flat_group.layout.pieces(flat_group.rank)]


def build_pieces(units: Iterable[Unit], group_of: Callable[[torch.Tensor], int], *, whole: bool) -> list[OptimizerPiece]:
    """Pieces of everything this rank updates. ``whole``: one for each parameter, in its own shape."""
    pieces: list[OptimizerPiece] = []
    for unit in units:
        for flat_group in unit.trainable:
            current: OptimizerPiece | None = None
            for run in owned_runs(flat_group):
                group = group_of(flat_group.params[run.entry])
                if current is None or whole or current.group != group:
                    current = OptimizerPiece(flat_group, group, run.offset, torch.empty(0), [])
                    pieces.append(current)
                current.runs.append(ParameterRun(run.entry, run.start, run.offset - current.low, run.numel))
    for piece in pieces:
        master, last = piece.flat_group.master, piece.runs[-1]
        assert master is not None
        tensor = master[piece.low : piece.low + last.offset + last.numel]
        piece.tensor = tensor.view(piece.flat_group.layout.entries[last.entry].shape) if whole else tensor
    return pieces


def split_lengths(piece: OptimizerPiece) -> list[int]:
    """Lengths that cut ``piece`` in front of each of its runs."""
    starts = [run.offset for run in piece.runs] + [piece.tensor.numel()]
    return [end - start for start, end in pairwise(starts)]


def split_piece(piece: OptimizerPiece, tensors: list[torch.Tensor]) -> list[OptimizerPiece]:
    """One piece for each run of ``piece``; ``tensors`` are the parts of its tensor, cut by ``split_lengths``."""
    parts = []
    for run, tensor in zip(piece.runs, tensors, strict=True):
        parts.append(
            OptimizerPiece(
                piece.flat_group,
                piece.group,
                piece.low + run.offset,
                tensor,
                [ParameterRun(run.entry, run.start, 0, run.numel)],
            )
        )
    return parts
