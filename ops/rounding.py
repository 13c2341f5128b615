"""Rounding to bf16: to nearest, by chance, or so that nothing is lost, with the same bits in all kernels.

A weight that is kept in bf16 alone stands still under updates of less than half its last bit if it is rounded to nearest.
Rounded up or down by chance, with the distances as probabilities, it moves as fp32 would on average (arXiv:2502.20566).
Where a second tensor, the *rest*, keeps what the weight leaves out, nothing is left to chance. It is either a bf16 number
that is added (compensated summation, Kahan 1965). One that is rounded to half a last bit of the weight, so that the sum
would be rounded to another weight, is taken a bit smaller. Or the rest is the lower 16 bits of an fp32 number, its
*remainder*: weight and remainder are that number exactly. There the weight is rounded half away from zero, so that the
remainder alone tells which way, as the sign of a 16-bit integer.

[Note: noise by counter]
Noise is no random generator's, of which ranks have different ones. It is a hash of the seed, of the parameter's name, of
the number of its update, of which of its tensors is rounded, and of the element's position in the whole parameter. So
replicas round alike, and so do all ways to divide a parameter. The first four make a key of 64 bits. The position is mixed
with it by two rounds of multiplying and shifting in 32 bits, which vector instructions can do, with the constants of
C. Wellons' hash prospector. Two neighbours, at an even position and the next, have the two halves of one hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

HALF = 0x8000  # of the lower 16 bits
_WORD = 0xFFFFFFFF
# The odd constants of the hash, as in optimizer.cpp and triton_kernels.py.
_FIRST, _SECOND, _HIGH = 0x7FEB352D, 0x846CA68B, 0x9E3779B9


class MasterFormat(str, Enum):
    """What the values that an optimizer updates are kept as: fp32, the bf16 weight itself, or that and a rest."""

    FP32 = "fp32"
    BF16 = "bf16"
    KAHAN = "kahan"
    REMAINDER = "remainder"

    @property
    def dtype(self) -> torch.dtype:
        """That of the master."""
        return torch.float32 if self is MasterFormat.FP32 else torch.bfloat16

    @property
    def rest(self) -> torch.dtype | None:
        """That of the rest; None if there is none."""
        return {MasterFormat.KAHAN: torch.bfloat16, MasterFormat.REMAINDER: torch.int16}.get(self)

    @property
    def precision(self) -> torch.dtype:
        """The dtype by whose unit two runs differ that round alike: compensation has a few bits more."""
        return torch.float32 if self is MasterFormat.REMAINDER else self.dtype

    def parts(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (master, rest or None) that stand for ``values`` [n], of any dtype. Alone it is rounded to nearest."""
        if self.rest is None:
            return values.to(self.dtype), None
        return split(values.float(), self.rest)


def split(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``values`` [n] fp32 as (weight [n] bf16, rest [n] in ``dtype``)."""
    if dtype == torch.bfloat16:
        weight = values.bfloat16()
        rest = (values - weight).bfloat16()
        too_far = (weight + rest.float()).bfloat16() != weight
        return weight, (rest.view(torch.int16) - too_far.short()).view(torch.bfloat16)
    bits = values.contiguous().view(torch.int32)
    nan = values.isnan()
    upper = torch.where(nan, (bits >> 16) | 0x40, (bits + HALF) >> 16)
    return _upper_half(upper), torch.where(nan, 0, bits).to(torch.int16)


def join(weight: Tensor, rest: Tensor | None) -> Tensor:
    """Return the values [n] fp32 for which ``weight`` [n] stands, together with its ``rest``."""
    if rest is None:
        return weight.float()
    if rest.dtype == torch.bfloat16:
        return weight.float() + rest
    upper = weight.contiguous().view(torch.int16).int() << 16
    return (upper + rest).view(torch.float32)


def by_chance(values: Tensor, noise: Tensor) -> Tensor:
    """Return ``values`` [n] fp32 in bf16, rounded away from zero where ``noise`` [n] int32, of 16 bits, says so."""
    bits = values.contiguous().view(torch.int32)
    return _upper_half(torch.where(values.isnan(), (bits >> 16) | 0x40, (bits + noise) >> 16))


def _upper_half(upper: Tensor) -> Tensor:
    """Return the bf16 numbers whose bits are the lower 16 of ``upper`` [n] int32."""
    return upper.to(torch.int16).view(torch.bfloat16)


@dataclass(frozen=True)
class Origin:
    """Neighbouring elements of one parameter in a tensor of the optimizer: ``numel`` of them, from ``offset`` on.

    ``name``: of the parameter; what has the same name and ``seed`` is rounded alike. ``start``: the first element in this
    rank's part of the parameter, flattened. Where a rank has columns ``column .. column + row`` of rows of ``whole_row``
    elements, ``row`` is not 0. See :meth:`Noise.positions`.
    """

    offset: int
    numel: int
    name: str
    start: int = 0
    row: int = 0
    whole_row: int = 0
    column: int = 0
    seed: int = 0

    def within(self, low: int, high: int) -> Origin | None:
        """Return what of it is in elements ``low .. high`` of the tensor, with offsets from there; None for nothing."""
        first, last = max(low, self.offset), min(high, self.offset + self.numel)
        if first >= last:
            return None
        return replace(self, offset=first - low, numel=last - first, start=self.start + first - self.offset)

    def noise(self, step: int, purpose: str = "") -> Noise:
        """Return the noise of update number ``step``. ``purpose``: of another update with the same number."""
        text = f"{self.seed} {step} {purpose} {self.name}"
        digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
        keys = tuple(int.from_bytes(digest[4 * i : 4 * i + 4], "little") for i in range(8))
        return Noise(keys, self.start, self.row, self.whole_row, self.column)


@dataclass(frozen=True)
class Noise:
    """The noise of one update: see [Note: noise by counter].

    ``keys``: 8 numbers of 32 bits, two for each tensor that may be rounded: the weight and up to three states. The rest is
    as in :class:`Origin`.
    """

    keys: tuple[int, ...]
    start: int = 0
    row: int = 0
    whole_row: int = 0
    column: int = 0

    def positions(self, low: int, high: int, device: torch.device) -> Tensor:
        """Return the positions in the whole parameter of elements ``low .. high``: [high - low] int64."""
        here = torch.arange(self.start + low, self.start + high, device=device)
        if not self.row:
            return here
        rows = here.div(self.row, rounding_mode="floor")
        return rows * self.whole_row + (here - rows * self.row) + self.column

    def of(self, tensor: int, low: int, high: int, device: torch.device) -> Tensor:
        """Return the noise of elements ``low .. high`` of a tensor (0: weight, 1 to 3: states), [n] int32 of 16 bits."""
        place, (first, second) = self.positions(low, high, device), self.keys[2 * tensor : 2 * tensor + 2]
        pair = place >> 1
        mixed = (pair & _WORD) ^ (((pair >> 32) * _HIGH) & _WORD) ^ first
        mixed = ((mixed ^ (mixed >> 16)) * _FIRST) & _WORD
        mixed = (((mixed ^ (mixed >> 15)) + second) * _SECOND) & _WORD
        mixed = mixed ^ (mixed >> 16)
        return ((mixed >> 16 * (place & 1)) & 0xFFFF).int()


@dataclass(frozen=True)
class Rounding:
    """How an update rounds what it keeps in bf16. ``rest`` [n]: of the weight, bf16 or int16.

    Without ``noise`` all is rounded to nearest. With it, states are rounded by chance, and a weight that has no rest.
    """

    rest: Tensor | None = None
    noise: Noise | None = None


NEAREST = Rounding()
