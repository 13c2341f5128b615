"""Formats in which an optimizer keeps its states: how many bytes they take, and the way to fp32 and back.

fp32 and bf16 states are tensors of that dtype. A ``block8`` state is two tensors, in the format of bitsandbytes (Dettmers
et al. 2022, arXiv:2110.02861): one byte per element, its *code*, and one fp32 *scale* for each 256 elements, the largest
magnitude among them. A code is the place of a number in a sorted map of 256 numbers within [-1, 1], or [0, 1] for states
that are never negative; an element is that number times its scale. The state ``exp_avg`` has its scales in
``exp_avg.scale``.

[Note: one lookup]
The nearest of 256 numbers is found by a single lookup. The upper 16 bits of an fp32 number, its sign aside, are a *cell*:
128 of them for each power of two. Neighbouring numbers of the maps are so far apart that no cell has more than one
*threshold*, the middle between two of them. So for each cell a table has the number of thresholds below the cell, and the
lower 16 bits of the threshold in it, which those of the number are compared with. Halfway goes to the smaller magnitude.
(With AVX2, csrc/optimizer.cpp computes most codes, and looks up those that are close to a threshold.)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # elements that share a scale
SCALE = ".scale"
NEVER_NEGATIVE = frozenset({"exp_avg_sq"})  # names of states whose map begins with 0
_MOST = 127  # numbers of the signed map on either side of 0, without 1


@dataclass(frozen=True)
class StatePart:
    """One tensor of a state: ``key`` is appended to the state's name; it has one item for each ``per`` elements."""

    key: str
    dtype: torch.dtype
    per: int = 1

    def numel(self, numel: int) -> int:
        """Return the number of elements for a parameter of ``numel`` elements."""
        return -(-numel // self.per)

    def nbytes(self, numel: int) -> int:
        """Return the bytes for a parameter of ``numel`` elements."""
        return self.numel(numel) * self.dtype.itemsize

    def zeros(self, param: Tensor) -> Tensor:
        """Return this part of a state of ``param``, all zeros, on its device. If it has as many items, it has its shape."""
        shape = param.shape if self.per == 1 else (self.numel(param.numel()),)
        return torch.zeros(shape, dtype=self.dtype, device=param.device)


class StateFormat(str, Enum):
    """What each state of a parameter is kept as."""

    FP32 = "fp32"
    BF16 = "bf16"
    BLOCK8 = "block8"

    @property
    def parts(self) -> tuple[StatePart, ...]:
        """The tensors of one state."""
        return _PARTS[self]

    @property
    def quantum(self) -> int:
        """Elements that must stay together: a state can be cut at multiples of it."""
        return max(part.per for part in self.parts)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of one state of a tensor of ``numel`` elements."""
        return sum(part.nbytes(numel) for part in self.parts)


_PARTS = {
    StateFormat.FP32: (StatePart("", torch.float32),),
    StateFormat.BF16: (StatePart("", torch.bfloat16),),
    StateFormat.BLOCK8: (StatePart("", torch.uint8), StatePart(SCALE, torch.float32, BLOCK)),
}


@dataclass(frozen=True)
class Blocks:
    """A ``block8`` state: ``codes`` [numel] uint8, ``scale`` [ceil(numel / 256)] fp32."""

    codes: Tensor
    scale: Tensor
    signed: bool

    def wide(self) -> Tensor:
        """Return the values, [numel] fp32."""
        values = codes_map(self.signed).to(self.codes.device)[self.codes.reshape(-1).int()]
        return values.mul_(self.scale.repeat_interleave(BLOCK)[: values.numel()])

    def keep(self, values: Tensor) -> None:
        """Take over ``values`` [numel] fp32. A block with one that is not finite becomes NaN."""
        numel = values.numel()
        rows = torch.nn.functional.pad(values.reshape(-1).float(), (0, -numel % BLOCK)).view(-1, BLOCK)
        scale = rows.abs().amax(1) if numel else rows.new_empty(0)
        finite = scale < torch.inf
        divisor = torch.where(finite & (scale > 0), scale, 1.0)
        quotient = torch.where(finite[:, None], rows / divisor[:, None], 0.0)
        thresholds = _thresholds(self.signed).to(values.device)
        places = torch.bucketize(quotient.abs(), thresholds, out_int32=True)  # the number of thresholds below
        if self.signed:
            places = torch.where(quotient < 0, _MOST - places.clamp(max=_MOST), _MOST + places)
        self.codes.view(-1).copy_(places.view(-1)[:numel])
        self.scale.copy_(torch.where(finite, scale, torch.nan))


State = Tensor | Blocks


def held(states: Mapping[str, Any], name: str) -> State:
    """Return the state ``name`` of one parameter, from all that an optimizer keeps for it. Raises KeyError."""
    if name + SCALE in states:
        return Blocks(states[name], states[name + SCALE], name not in NEVER_NEGATIVE)
    found: Tensor = states[name]
    return found


def wide_state(states: Mapping[str, Any], name: str) -> Tensor:
    """Return the values of the state ``name`` in the shape that it has: itself, or in fp32 if it is kept in few bits."""
    found = held(states, name)
    return found.wide().view(found.codes.shape) if isinstance(found, Blocks) else found


def keep_state(states: MutableMapping[str, Any], name: str, values: Tensor, start: int = 0) -> None:
    """Write ``values`` [n] fp32 into the state ``name``, from element ``start`` on, which must begin a block."""
    found, end = held(states, name), start + values.numel()
    if isinstance(found, Blocks):
        codes, scale = found.codes.view(-1)[start:end], found.scale[start // BLOCK : -(-end // BLOCK)]
        Blocks(codes, scale, found.signed).keep(values)
    else:
        found.view(-1)[start:end].copy_(values)


def is_scale(key: str, states: Mapping[str, Any]) -> bool:
    """True if ``key`` has the scales of another state in ``states``."""
    return key.endswith(SCALE) and key.removesuffix(SCALE) in states


# -- the maps ----------------------------------------------------------------------------------------------------------


def _magnitudes(signed: bool) -> list[float]:
    """0, then the numbers above it, rounded to fp32.

    For each power of ten from 10^-6 to 1 there are the middles of equal parts of a tenth of it up to all of it: 1, 2, ...
    64 parts, or twice as many without a sign. The last number is 1. Where parts begin and how long they are is rounded to
    fp32, too: a number is then one fused multiply-add.
    """
    found = [0.0, 1.0]
    for power in range(7):
        count = 2**power if signed else 2 ** (power + 1)
        low, step = torch.tensor([10.0 ** (power - 7), 0.9 * 10.0 ** (power - 6) / count]).tolist()
        found += [low + step * (part + 0.5) for part in range(count)]
    numbers: list[float] = torch.tensor(sorted(found), dtype=torch.float32).tolist()
    return numbers


@functools.cache
def codes_map(signed: bool) -> Tensor:
    """Return the number of each code: [256] fp32, ascending, on the CPU. Nobody may write to it."""
    above = _magnitudes(signed)
    below = [-number for number in above[_MOST:0:-1]] if signed else []
    return torch.tensor(below + above, dtype=torch.float32)


@functools.cache
def _thresholds(signed: bool) -> Tensor:
    """Return the largest fp32 number that is not nearer to the next magnitude than to this one, for all but the last."""
    numbers = torch.tensor(_magnitudes(signed), dtype=torch.float64)
    middle = (numbers[1:] + numbers[:-1]) / 2
    rounded = middle.float()
    below = torch.nextafter(rounded, torch.zeros(()))
    return torch.where(rounded.double() > middle, below, rounded)


@dataclass(frozen=True)
class CellTable:
    """See [Note: one lookup]. ``words`` [cells] int32: thresholds below the cell << 16 | lower bits of the one in it.

    ``first``: the number of the first cell, which stands for all smaller ones, as the last does for all larger ones.
    """

    words: Tensor
    first: int


@functools.cache
def cell_table(signed: bool) -> CellTable:
    """Return the table of the map's magnitudes, on the CPU."""
    bits = _thresholds(signed).view(torch.int32).tolist()
    first, last = (bits[0] >> 16) - 1, 0x3F80  # that of 1
    low = {number >> 16: number & 0xFFFF for number in bits}
    words, below = [], 0
    for cell in range(first, last + 1):
        words.append(below << 16 | low.get(cell, 0xFFFF))
        below += cell in low
    return CellTable(torch.tensor(words, dtype=torch.int32), first)
