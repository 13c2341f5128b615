"""Parts: what an optimizer that needs more than elements is told of the tensors that it updates.

[Note: parts]
Shards are even and flat, so that a rank has any stretch of a parameter, and of most parameters nothing. An optimizer that
goes by norms, rows and columns, or matrices gets one 1-D tensor for each stretch, and a :class:`Part` that says which
elements of which parameter these are. All ranks that have the same part of the model know the parts of all its parameters,
in the same order, also those of which they have no element: so they all know, without asking, what is to be summed, and
sum it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from zerorun.distributed.tensor_shard import TensorShard
from zerorun.ops.single_pass import SinglePassOptimizer


@dataclass(frozen=True)
class Part:
    """What a rank updates of one parameter.

    These are the elements ``start`` to ``start + numel`` of the flattened parameter, or with a ``shard`` of the flattened
    part of it that this tensor rank has, of shape ``local_shape``. ``shape`` is that of the whole parameter.

    ``cuts``: where in these flattened elements the parts of other ranks of the shard axis begin, ascending and without 0;
    () if no rank has only some of them; None if tensor ranks may have cut them at different places. ``counted``: False if
    another tensor rank has the same elements, and adds them to sums.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    shard: TensorShard | None = None
    cuts: tuple[int, ...] | None = ()
    counted: bool = True

    @classmethod
    def of_whole(cls, tensor: Tensor) -> Part:
        """The part that is all of a parameter."""
        return cls("", tuple(tensor.shape), 0, tensor.numel())

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self.shape if self.shard is None else self.shard.local_shape

    @property
    def whole_numel(self) -> int:
        """The number of elements of the whole parameter."""
        return prod(self.shape)

    @property
    def is_shared(self) -> bool:
        """True if ranks may have different elements of the parameter, so that sums over it are over ranks."""
        return self.cuts is None or bool(self.cuts)


@dataclass(frozen=True)
class SumOfParts:
    """One sum over ranks in a step: ``numel`` fp32 numbers, called ``label``."""

    label: str
    numel: int


@dataclass(frozen=True)
class StateRange:
    """``numel`` elements of a state, from ``offset`` on: in the stored state of the whole parameter, from ``start`` on.

    Both are flattened. ``shape``: that of the stored state. ``shard``: what of it this tensor rank has, if not all of it;
    ``start`` is in that then. ``saves``: False if another rank of the shard axis has the same elements, and saves them.
    """

    offset: int
    start: int
    numel: int
    shape: tuple[int, ...]
    shard: TensorShard | None = None
    saves: bool = True


class SumOverRanks(Protocol):
    """Sums numbers over the ranks that have parts of the same parameters, each element once. All of them must call it."""

    @property
    def device(self) -> torch.device:
        """Where the numbers must be."""
        ...

    def __call__(self, flat: Tensor, sizes: Sequence[int], label: str) -> Tensor:
        """The sum of ``flat`` [sum of sizes] fp32, with the same bits on all ranks. ``sizes``: by parameter, in order."""
        ...


class PartsOptimizer(torch.optim.Optimizer):
    """The base of zerorun's optimizers that need more than elements: see [Note: parts].

    Without :meth:`take_parts` each parameter is whole, and it steps as any optimizer of torch's. With it, parameters are
    1-D fp32 tensors, and a step may leave anything in their gradients, which are of no use afterwards.
    """

    add_param_group = SinglePassOptimizer.add_param_group  # does not import the compiler
    factors: frozenset[str] = frozenset()  # names of states that have not one value for each element
    parts: tuple[Part, ...] = ()  # of all parameters that this rank's pipeline stage trains
    _places: Mapping[Tensor, int] = {}  # tensor -> the index of its part
    _sum: SumOverRanks | None = None

    def take_parts(self, parts: Sequence[Part], places: Mapping[Tensor, int], sum: SumOverRanks) -> None:
        """Update parts from now on. ``places``: each tensor in the parameter groups -> the index of its part."""
        self.parts, self._places, self._sum = tuple(parts), dict(places), sum

    @property
    def sum_over_ranks(self) -> SumOverRanks | None:
        """What sums over ranks; None if no other rank has parts of the same parameters."""
        return self._sum

    def take_copies(self, copies: Mapping[Tensor, Tensor], sum: SumOverRanks | None) -> None:
        """Update copies of parts from now on. ``copies``: each -> the tensor that it is a copy of."""
        self._places = {copy: self._places[own] for copy, own in copies.items() if own in self._places}
        self._sum = sum

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing is summed over ranks inside."""
        kept, self._sum = self._sum, None
        try:
            yield
        finally:
            self._sum = kept

    def part_of(self, tensor: Tensor) -> Part:
        """What ``tensor``, one of the parameter groups, is a part of."""
        place = self._places.get(tensor)
        return Part.of_whole(tensor) if place is None else self.parts[place]

    def spent_gradient(self, tensor: Tensor) -> Tensor:
        """The gradient of ``tensor``, flat, to be written over: a copy of it, unless it is of no use after the step."""
        assert tensor.grad is not None
        return tensor.grad.reshape(-1) if tensor in self._places else tensor.grad.reshape(-1).clone()

    def sums(self, own: Mapping[Tensor, Tensor], size: Callable[[Part], int], label: str) -> dict[Tensor, Tensor]:
        """Sum numbers of parameters over the ranks that have parts of them, in one message for all parameters.

        All ranks must call it, also with nothing. ``own``: for each tensor of this rank, this rank's summands
        [size of its part]; ``size`` is 0 for parts that are not shared. Returns the sums, for the same tensors.
        """
        sizes = [size(part) for part in self.parts]
        if self._sum is None or not any(sizes):
            return dict(own)
        flat, found = torch.zeros(sum(sizes), device=self._sum.device), {}
        views = flat.split(sizes)
        for tensor, numbers in own.items():
            if self.part_of(tensor).counted:
                views[self._places[tensor]].copy_(numbers)
        totals = self._sum(flat, sizes, label).split(sizes)
        for tensor in own:
            found[tensor] = totals[self._places[tensor]].to(tensor.device)
        return found

    # -- what plans know before there is an optimizer --------------------------------------------------------------

    @staticmethod
    def planned_sums(parts: Sequence[Part]) -> tuple[SumOfParts, ...]:
        """Return the sums of one step, in order. ``parts``: as for ``take_parts``."""
        raise NotImplementedError

    @staticmethod
    def state_numels(part: Part) -> dict[str, int]:
        """Return how many fp32 elements each state of ``part`` has."""
        raise NotImplementedError

    @staticmethod
    def state_ranges(key: str, part: Part) -> tuple[StateRange, ...]:
        """Return what of the stored state ``key`` of its parameter, one of ``factors``, the state of ``part`` is."""
        raise NotImplementedError
