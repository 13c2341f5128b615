"""Moments: what an optimizer keeps for its parameters, found by one step on tiny tensors.

A parameter of the trial has prime numbers as dimensions, so that the shape of a state tells which dimensions it follows:
(3, 5) for the moments of Adam, (3, 1) and (1, 5) for the factors of Adafactor. Step counts (0-dim) are left out, as the
ledger leaves them out.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .intake import RawOptimizer
from .optim import build_optimizer
from .zero.pieces import OptimizerPiece
from .zero.unit import Segment

_PRIMES = (3, 5, 7, 11, 13, 17)  # dimensions of a parameter in the trial; 255,255 elements for one with all six


@dataclass(frozen=True)
class StateTensor:
    """One state of a parameter. ``axes``: for each dimension, the parameter's that it follows; or its size, negated."""

    dtype: torch.dtype
    axes: tuple[int, ...]
    flat: bool  # one dimension, of all the parameter's elements

    def shape(self, parameter: torch.Size) -> tuple[int, ...]:
        """The shape for a parameter of this shape."""
        if self.flat:
            return (parameter.numel(),)
        return tuple(parameter[axis] if axis >= 0 else -axis for axis in self.axes)


class Moments:
    """The states of ``raw`` for ``pieces``, on the meta device. ``unknown`` says why there are none, if it cannot be found.

    The optimizer itself is not touched: a copy of it, or another of its kind, takes the step, on ``device``.
    """

    def __init__(self, raw: RawOptimizer, pieces: Iterable[OptimizerPiece], device: torch.device) -> None:
        self._pieces = list(pieces)
        self.unknown: str | None = None
        kinds = _kinds(raw)
        try:
            self._states = _take_step(raw, kinds, device) if kinds else {}
        except Exception as error:  # an optimizer of the user's, which may want anything
            self._states = {}
            self.unknown = f"the optimizer's states are not counted: a trial step failed with {error!r}"

    def tensors(self) -> Iterator[tuple[Segment, torch.Tensor]]:
        """(segment, state) of every piece."""
        for piece in self._pieces:
            for state in self._states.get((piece.group, piece.tensor.dim()), ()):
                shape = state.shape(piece.tensor.shape)
                yield piece.segment, torch.empty(shape, dtype=state.dtype, device="meta")


def _kinds(raw: RawOptimizer) -> list[tuple[int, int]]:
    """(group, number of dimensions) of all that any rank's optimizer may see: ranks take the same trial step."""
    groups = enumerate(raw.groups)
    return sorted({(index, p.dim() if raw.whole else 1) for index, group in groups for p in group["params"]})


def _take_step(
    raw: RawOptimizer, kinds: list[tuple[int, int]], device: torch.device
) -> dict[tuple[int, int], list[StateTensor]]:
    members: list[list[torch.Tensor]] = [[] for _ in raw.groups]
    tried = {}
    for group, dims in kinds:
        tried[group, dims] = torch.zeros(_PRIMES[:dims], device=device)
        tried[group, dims].grad = torch.ones_like(tried[group, dims])
        members[group].append(tried[group, dims])
    if raw.optimizer is not None:
        optimizer = _copy_over(raw.optimizer, members)
    else:
        groups = [{**group, "params": params} for group, params in zip(raw.groups, members, strict=True)]
        optimizer = build_optimizer(raw.name, raw.params, groups)
    optimizer.step()
    return {kind: list(_states(optimizer.state.get(param, {}), param)) for kind, param in tried.items()}


def _copy_over(optimizer: torch.optim.Optimizer, members: list[list[torch.Tensor]]) -> torch.optim.Optimizer:
    """A copy of ``optimizer`` with its settings, over other parameters, without its hooks and what schedulers put on it."""
    made: Any = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key not in ("step", "zero_grad"):
            made.__dict__[key] = copy(value) if isinstance(value, (dict, list, set)) else value
    made.param_groups = [{**g, "params": params} for g, params in zip(optimizer.param_groups, members, strict=True)]
    made.state = defaultdict(dict)
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    found: torch.optim.Optimizer = made
    return found


def _states(kept: dict[str, Any], parameter: torch.Tensor) -> Iterator[StateTensor]:
    axis_of = {size: axis for axis, size in enumerate(parameter.shape)}
    for value in kept.values():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            flat = value.dim() == 1 != parameter.dim() and value.numel() == prod(parameter.shape)
            yield StateTensor(value.dtype, tuple(axis_of.get(size, -size) for size in value.shape), flat)
