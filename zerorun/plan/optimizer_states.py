"""Optimizer states: what an optimizer keeps for its parameters, found by a trial step on tiny tensors.

A parameter of the trial has prime numbers as dimensions, so that the shape of a state tells which dimensions it follows:
[3, 5] for the moments of Adam, [3, 1] and [1, 5] for the factors of torch's Adafactor. Step counts (0-dim tensors) are left
out, as in the ledger.

Optimizers of other packages may keep other states for large tensors than for small ones, such as 8-bit codes for tensors of
4096 elements and more. Their trial step therefore includes a tensor for each number of elements that the model has, or a
smaller one that behaves the same: it has the same remainder modulo ``_EVEN`` and more elements than any threshold. From
there on, the bytes grow evenly with the number of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..errors import ConfigError, ConfigProblem
from ..ops.single_pass import SinglePassOptimizer
from ..ops.state_format import StateFormat
from ..optim.optimizer_needs import copy_over, step_alone
from ..optim.optimizers import build_optimizer, keys_in_the_way
from ..optim.parameter_parts import Part
from ..optim.requested_optimizer import RawOptimizer
from .parameter_kinds import stored_bytes

_PRIMES = (3, 5, 7, 11, 13, 17)  # dimensions of a parameter in the trial; 255,255 elements for one with all six
_TRIED_AS_IT_IS = 1 << 14  # elements: up to this many, the trial uses the number itself
_EVEN = 1 << 12  # elements: a multiple of all block sizes in use, and the usual threshold

_Trial = tuple[int, tuple[int, ...]]  # (parameter group, shape)


@dataclass(frozen=True)
class StateTensor:
    """One state of a parameter. ``axes``: for each dimension, the parameter's dimension that it follows, or -size."""

    dtype: torch.dtype
    axes: tuple[int, ...]
    flat: bool  # the state has one dimension, with as many elements as the parameter

    def shape(self, parameter: torch.Size) -> tuple[int, ...]:
        """Return the state's shape for a ``parameter`` of this shape."""
        if self.flat:
            return (parameter.numel(),)
        return tuple(parameter[axis] if axis >= 0 else -axis for axis in self.axes)


class OptimizerStates:
    """The sizes of the states of ``raw``. ``unknown`` says why they are not known, if they cannot be found.

    ``scalars``: by name, those that are no tensors of one dimension or more. The optimizer itself is not touched: a copy of
    it, or a new one of its class, takes the step, on ``device``. ``dtypes``: those of its states that are tensors.
    ``names``: of all states, and whether they are scalars. ``apart``: what belongs to no parameter, by name.
    """

    def __init__(self, raw: RawOptimizer, device: torch.device) -> None:
        self.unknown: str | None = None
        self.apart: dict[Any, Any]
        self._parts = raw.parts
        kinds = _kinds(raw) if raw.parts is None else []
        trials = [(group, _PRIMES[:dims]) for group, dims in kinds]
        if raw.whole and raw.optimizer is not None:
            trials += sorted({trial for group, shape in _shapes(raw) for trial in _alike(group, shape)})
        try:
            kept, self.apart = _take_step(raw, trials, device) if kinds else ({}, {})
        except Exception as error:  # an optimizer of the user's may raise anything
            kept, self.apart = {}, {}
            self.unknown = f"the optimizer's states are not counted: a trial step failed with {error!r}"
        self._states = {
            (group, dims): list(_states(kept[group, _PRIMES[:dims]], _PRIMES[:dims])) for group, dims in kinds if kept
        }
        self.names = {key: _is_scalar(value) for found in kept.values() for key, value in found.items()}
        self.scalars = {key: value for found in kept.values() for key, value in found.items() if _is_scalar(value)}
        self._tried = {trial: sum(map(stored_bytes, _tensors(found))) for trial, found in kept.items()}
        self.dtypes = {value.dtype for found in kept.values() for value in _tensors(found)}
        self._part_format = StateFormat.BF16 if StateFormat.BF16 in raw.formats.values() else StateFormat.FP32

    def bytes(self, group: int, shape: Sequence[int], format: StateFormat = StateFormat.FP32) -> int:
        """Return the bytes of the states of one tensor of ``shape`` in parameter group ``group``.

        ``format``: that of its states, if the optimizer is told.
        """
        if format is StateFormat.BLOCK8:
            return len(self._states.get((group, 1), ())) * format.nbytes(prod(shape))
        if format is StateFormat.BF16:
            states, parameter = self._states.get((group, len(shape)), ()), torch.Size(shape)
            return sum(format.nbytes(prod(state.shape(parameter))) for state in states)
        first, *more = _alike(group, tuple(shape))
        found = self._tried.get(first)
        if found is None or found == self._as_small(group, first[1]):
            return self._as_small(group, shape)
        return found + sum(self._tried[trial] - found for trial in more) * ((prod(shape) - prod(first[1])) // _EVEN)

    def bytes_of_part(self, part: Part) -> int:
        """Return the bytes of the states of ``part``, for an optimizer that is told of parts."""
        assert self._parts is not None
        return sum(map(self._part_format.nbytes, self._parts.state_numels(part).values()))

    def _as_small(self, group: int, shape: Iterable[int]) -> int:
        """Return the bytes for a tensor of this shape, assuming that it has the states of a small one."""
        parameter = torch.Size(shape)
        states = self._states.get((group, len(parameter)), ())
        return sum(prod(state.shape(parameter)) * state.dtype.itemsize for state in states)


def _kinds(raw: RawOptimizer) -> list[tuple[int, int]]:
    """Return (group, number of dimensions) of all tensors that any rank's optimizer may get.

    All ranks therefore take the same trial step.
    """
    groups = enumerate(raw.groups)
    return sorted({(index, p.dim() if raw.whole else 1) for index, group in groups for p in group["params"]})


def _shapes(raw: RawOptimizer) -> set[_Trial]:
    return {(index, tuple(p.shape)) for index, group in enumerate(raw.groups) for p in group["params"]}


def _alike(group: int, shape: tuple[int, ...]) -> list[_Trial]:
    """Return the trial for a tensor of ``shape``, and for a large one a second trial with ``_EVEN`` more elements."""
    ones, numel = (1,) * (len(shape) - 1), prod(shape)
    if not shape or numel <= _TRIED_AS_IT_IS:
        return [(group, (*ones, numel) if shape else ())]
    tried = 2 * _EVEN + numel % _EVEN
    return [(group, (*ones, tried)), (group, (*ones, tried + _EVEN))]


def _take_step(
    raw: RawOptimizer, trials: list[_Trial], device: torch.device
) -> tuple[dict[_Trial, dict[str, Any]], dict[Any, Any]]:
    """Return the states after one step on tensors of these shapes, and what the state has under other keys than them."""
    members: list[list[torch.Tensor]] = [[] for _ in raw.groups]
    tried = {}
    for group, shape in trials:
        tried[group, shape] = torch.zeros(shape, device=device)
        tried[group, shape].grad = torch.ones_like(tried[group, shape])
        members[group].append(tried[group, shape])
    if raw.optimizer is not None:
        optimizer = copy_over(raw.optimizer, members)
    else:
        groups = [{**group, "params": params} for group, params in zip(raw.groups, members, strict=True)]
        optimizer = build_optimizer(raw.name, raw.params, groups)
    if isinstance(optimizer, SinglePassOptimizer):  # in training it is told formats, too
        optimizer.formats.update(dict.fromkeys(tried.values(), StateFormat.FP32))
    step_alone(optimizer)
    apart = {key: value for key, value in optimizer.state.items() if not torch.is_tensor(key)}
    return {trial: optimizer.state.get(param, {}) for trial, param in tried.items()}, apart


def state_count(raw: RawOptimizer) -> int:
    """Return the number of states per parameter. Raises ConfigError unless the optimizer updates in a single pass."""
    tried: torch.optim.Optimizer | None = raw.optimizer
    if tried is None:
        tiny = [{**group, "params": [torch.zeros(1)]} for group in raw.groups]
        tried = build_optimizer(raw.name, raw.params, tiny)
    if isinstance(tried, SinglePassOptimizer):
        return tried.state_count()
    name, key = type(tried).__name__, "zero_optimization.offload_optimizer.device"
    what = f"{name} as optimizer.type" if raw.optimizer is None else f"the {name} that was passed to initialize()"
    reason = f"{what} has no update that works unit by unit on what a disk holds."
    remedy = 'Name Adam, AdamW, AdamW8bit, AdamSAGE, Adagrad, Lion, Muon, SGD or Sophia, or set device to "cpu".'
    if raw.optimizer is None and (names := keys_in_the_way(raw.name, raw.params, raw.groups)):
        reason = f"{what} has none with {' and '.join(names)}, that works unit by unit on what a disk holds."
        remedy = f'Remove {" and ".join(names)} from optimizer.params and the parameter groups, or set device to "cpu".'
    raise ConfigError([ConfigProblem(key, "nvme", reason, remedy)])


def new_states(optimizer: torch.optim.Optimizer, group: int, tensor: torch.Tensor) -> dict[str, Any]:
    """Return the states that ``optimizer`` keeps for a parameter like ``tensor`` in its ``group``.

    They are those after a step of a copy of the optimizer, with zeros as parameter and gradient.
    """
    members: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
    members[group].append(torch.zeros_like(tensor))
    members[group][0].grad = torch.zeros_like(tensor)
    stepped = copy_over(optimizer, members)
    step_alone(stepped)
    return stepped.state[members[group][0]]


def _tensors(kept: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in kept.values() if not _is_scalar(value))


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _states(kept: dict[str, Any], parameter: tuple[int, ...]) -> Iterator[StateTensor]:
    axis_of = {size: axis for axis, size in enumerate(parameter)}
    for value in _tensors(kept):
        flat = value.dim() == 1 != len(parameter) and value.numel() == prod(parameter)
        yield StateTensor(value.dtype, tuple(axis_of.get(size, -size) for size in value.shape), flat)
