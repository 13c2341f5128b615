"""Steps in fp32 of optimizers whose classes compute in the dtype of what they keep, where that is bf16.

[Note: a few at a time]
A copy of the optimizer steps fp32 copies of some of its tensors and their states, and what it makes is rounded into those
that are kept. Then come the next ones, so that there are never many numbers in fp32. What depends on elements alone is cut
for it; other tensors are taken as they are. The optimizer itself takes its step at the end, without a gradient: that counts
what it counts by itself, and calls hooks.

Sums over ranks (parameter_parts.py) need all tensors before any can move. So copies step up to the first sum, which gets
what each has to add, and once more with the sum, up to the next one. What they made of their tensors until then is
forgotten: the last time they come to the end. Nothing is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.rounding import Origin, by_chance, join, split
from ..ops.state_format import StateFormat
from .optimizer_needs import copy_over, step_once
from .parameter_parts import PartsOptimizer, StateRange, SumOverRanks

UPDATES = "updates"  # the state that counts the steps of a tensor, for classes that keep no ``step``
_MOST = 1 << 22  # elements that are taken at a time, if they can be cut


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of the optimizer, in its parameter ``group``. ``gradient``: of any dtype, with as many elements.

    ``rest``: what a tensor in bf16 leaves out. ``origins``: what of the model's parameters it consists of, in which it is
    rounded by chance, as far as it is in bf16; () to round to nearest.
    """

    tensor: Tensor
    group: int
    gradient: Tensor
    rest: Tensor | None = None
    format: StateFormat = StateFormat.FP32
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True)
class _TakenElements:
    """Elements ``low .. high`` of the flattened tensor, in its update ``number``. ``before``: its states until then."""

    kept: KeptTensor
    low: int
    high: int
    number: int
    before: Mapping[str, Any]

    @property
    def is_all(self) -> bool:
        return self.high - self.low == self.kept.tensor.numel()

    def cut(self, tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1)[self.low : self.high]

    def copy(self, coefficient: float) -> Tensor:
        """The values in fp32, with their gradient: in the shape of the tensor, or flat if this is not all of it."""
        shape = self.kept.tensor.shape if self.is_all else (self.high - self.low,)
        rest = None if self.kept.rest is None else self.cut(self.kept.rest)
        copy = join(self.cut(self.kept.tensor), rest).clone().view(shape)
        copy.grad = self.cut(self.kept.gradient).float().mul(coefficient).view(shape)
        return copy

    def states(self) -> dict[str, Any]:
        """Copies of the states, in fp32 those that are kept in bf16."""
        return {key: self._state(value) for key, value in self.before.items() if key != UPDATES}

    def _state(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not self.is_all and value.dim() > 0:
            value = value[self.low : self.high]
        is_narrow = self.kept.format is StateFormat.BF16 and value.dtype == torch.bfloat16
        return value.float() if is_narrow else value.clone()

    def keep(self, values: Tensor) -> None:
        """Round ``values`` fp32 into the tensor."""
        flat, own = values.detach().reshape(-1), self.cut(self.kept.tensor)
        if self.kept.rest is not None:
            weight, rest = split(flat, self.kept.rest.dtype)
            own.copy_(weight)
            self.cut(self.kept.rest).copy_(rest)
        else:
            rounded_into(own, flat, self._origins, self.number)

    @property
    def _origins(self) -> tuple[Origin, ...]:
        found = (origin.within(self.low, self.high) for origin in self.kept.origins)
        return tuple(origin for origin in found if origin is not None)

    def keep_state(self, states: dict[str, Any], key: str, value: Any, ranges: Sequence[StateRange] | None) -> None:
        """Let ``states`` have the new ``value`` of the state ``key``.

        ``ranges``: where it is in that of the whole parameter, if it has not one value for each element.
        """
        is_narrow = self.kept.format is StateFormat.BF16 and isinstance(value, Tensor) and value.dtype == torch.float32
        if not isinstance(value, Tensor) or value.dim() == 0 or (self.is_all and not is_narrow):
            states[key] = value
            return
        by_element = ranges is None and value.numel() == self.high - self.low
        shape = self.kept.tensor.shape if by_element else value.shape
        if states.get(key) is None:
            states[key] = torch.zeros(shape, dtype=torch.bfloat16 if is_narrow else value.dtype, device=value.device)
        own = self.cut(states[key]) if by_element else states[key].view(-1)
        origins = self._origins if by_element else self._of_ranges(key, value.numel(), ranges)
        rounded_into(own, value.reshape(-1), origins, self.number, f"state {key}")

    def _of_ranges(self, key: str, numel: int, ranges: Sequence[StateRange] | None) -> tuple[Origin, ...]:
        if not self.kept.origins:
            return ()
        first = self.kept.origins[0]
        whole = Origin(0, numel, f"{first.name} {key}", seed=first.seed)
        if ranges is None:
            return (whole,)
        return tuple(replace(whole, offset=r.offset, numel=r.numel, start=r.start) for r in ranges)


def rounded_into(own: Tensor, values: Tensor, origins: Sequence[Origin], number: int, purpose: str = "") -> None:
    """Copy ``values`` [n] into ``own`` [n]; from fp32 to bf16 by chance where ``origins`` tell of the elements."""
    if not origins or own.dtype != torch.bfloat16 or values.dtype != torch.float32:
        own.copy_(values)
        return
    for origin in origins:
        cut = slice(origin.offset, origin.offset + origin.numel)
        noise = origin.noise(number, purpose).of(0, 0, origin.numel, values.device)
        own[cut].copy_(by_chance(values[cut], noise))


class StepsInFp32:
    """The steps of ``optimizer``. ``cuts``: the update of an element depends on that element alone."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, cuts: bool) -> None:
        self._optimizer, self._cuts = optimizer, cuts

    @torch.no_grad()
    def step(self, tensors: Sequence[KeptTensor], coefficient: float) -> None:
        """Update ``tensors``, whose gradients are to be multiplied by ``coefficient``. All ranks that sum must call it."""
        batches, sums = list(self._batches(tensors)), self._sums()
        while sums is not None and self._add_up(batches, sums, coefficient):
            pass
        for batch in batches:
            optimizer, copies = self._run(batch, coefficient, sums)
            for stretch, copy in zip(batch, copies, strict=True):
                self._keep(stretch, copy, optimizer.state.get(copy, {}))
        if isinstance(self._optimizer, PartsOptimizer):
            with self._optimizer.alone():
                self._optimizer.step()
        else:
            self._optimizer.step()

    def _batches(self, tensors: Sequence[KeptTensor]) -> Iterator[list[_TakenElements]]:
        batch: list[_TakenElements] = []
        taken = 0
        for kept in tensors:
            before, numel = dict(self._optimizer.state.get(kept.tensor, {})), kept.tensor.numel()
            number = int(before["step"] if "step" in before else before.get(UPDATES, 0)) + 1
            size = _MOST if self._cuts and kept.tensor.dim() == 1 else max(numel, 1)
            for low in range(0, max(numel, 1), size):
                stretch = _TakenElements(kept, low, min(low + size, numel), number, before)
                if batch and taken + stretch.high - low > _MOST:
                    yield batch
                    batch, taken = [], 0
                batch.append(stretch)
                taken += stretch.high - low
        if batch:
            yield batch

    def _sums(self) -> _KnownSums | None:
        real = self._optimizer.sum_over_ranks if isinstance(self._optimizer, PartsOptimizer) else None
        return None if real is None else _KnownSums(real)

    def _add_up(self, batches: Sequence[Sequence[_TakenElements]], sums: _KnownSums, coefficient: float) -> bool:
        """Find out the next sum of the step. False if there are no more."""
        for batch in ((), *batches):  # a rank without tensors adds nothing, and has to know
            try:
                self._run(batch, coefficient, sums)
            except _NotKnownError:
                continue
            return False
        sums.make()
        return True

    def _run(
        self, batch: Sequence[_TakenElements], coefficient: float, sums: _KnownSums | None
    ) -> tuple[torch.optim.Optimizer, list[Tensor]]:
        """Let a copy of the optimizer step copies of ``batch``; return both."""
        members: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        copies = [stretch.copy(coefficient) for stretch in batch]
        for stretch, copy in zip(batch, copies, strict=True):
            members[stretch.kept.group].append(copy)
        kept = dict(zip(copies, (stretch.kept.tensor for stretch in batch), strict=True))
        optimizer = copy_over(self._optimizer, members, kept)
        for stretch, copy in zip(batch, copies, strict=True):
            if states := stretch.states():
                optimizer.state[copy] = states
        if isinstance(optimizer, PartsOptimizer):
            if sums is not None:
                sums.begin()
            optimizer.take_copies(kept, sums)
        step_once(optimizer)
        return optimizer, copies

    def _keep(self, stretch: _TakenElements, copy: Tensor, found: Mapping[str, Any]) -> None:
        own, tensor = self._optimizer.state[stretch.kept.tensor], stretch.kept.tensor
        stretch.keep(copy)
        for key, value in found.items():
            ranges = None
            if isinstance(self._optimizer, PartsOptimizer) and key in self._optimizer.factors:
                ranges = self._optimizer.state_ranges(key, self._optimizer.part_of(tensor))
            stretch.keep_state(own, key, value, ranges)
        if "step" not in found:
            own[UPDATES] = stretch.number


class _NotKnownError(Exception):
    """A sum is not known yet."""


class _KnownSums:
    """Sums of one step, which are known one after the other; each is the same for all copies of the optimizer."""

    def __init__(self, real: SumOverRanks) -> None:
        self._real = real
        self._known: list[Tensor] = []
        self._asked = 0
        self._next: tuple[Tensor, Sequence[int], str] | None = None

    @property
    def device(self) -> torch.device:
        return self._real.device

    def begin(self) -> None:
        """A copy begins its step."""
        self._asked = 0

    def __call__(self, flat: Tensor, sizes: Sequence[int], label: str) -> Tensor:
        """The sum, or an error if it is not known: what this copy adds is noted then."""
        self._asked += 1
        if self._asked <= len(self._known):
            return self._known[self._asked - 1].clone()
        self._next = (flat if self._next is None else self._next[0] + flat, sizes, label)
        raise _NotKnownError

    def make(self) -> None:
        """Sum what copies have added, over ranks."""
        assert self._next is not None
        self._known.append(self._real(*self._next))
        self._next = None
