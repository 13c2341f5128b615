"""fp8 codes: weights on the wire as the fp8 values that their layer is going to cast them to, a byte for each.

A layer of torchao casts its weight by one scale, which follows from the largest magnitude in it. With the largest magnitude
of the whole weight, each rank casts its part just so. What comes is decoded to values that the layer casts to the same
codes again, by the same scale.

[Note: the same scale again]
A code ``c`` stands for ``c / scale``. In bf16 or fp32 that is off by much less than half the distance of two codes, so that
it becomes ``c`` again. The scale follows from the largest magnitude alone, so the largest code stands for that magnitude
itself, and not for the code's quotient. All others stand for less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .layout import Layout, Piece

_LEAST = 1e-12  # the least magnitude that a scale is made for
_STRETCH = 1 << 20  # codes that are looked up at a time


@dataclass(frozen=True)
class Float8Cast:
    """How a layer casts its weight: to ``format``, such as "float8_e4m3fn", by a scale that is a power of 2 or not."""

    format: str
    power_of_2: bool

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.format)
        return found

    def scales(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the scales [n] fp32 of weights whose ``largest`` magnitudes are [n]."""
        scale = (torch.finfo(self.dtype).max / largest.double().clamp(min=_LEAST)).float()
        return scale.log2().floor().exp2() if self.power_of_2 else scale

    def encode(self, shard: torch.Tensor, pieces: Sequence[Piece], largest: torch.Tensor, coded: torch.Tensor) -> None:
        """Fill ``coded`` [shard] uint8 from the ``pieces`` of weights in ``shard``. ``largest``: as for ``scales``."""
        scales, most, codes = self.scales(largest), torch.finfo(self.dtype).max, coded.view(self.dtype)
        for piece in pieces:
            part = slice(piece.shard_start, piece.shard_start + piece.numel)
            codes[part].copy_((shard[part].float() * scales[piece.entry]).clamp_(-most, most))

    def decode(self, coded: torch.Tensor, layout: Layout, largest: torch.Tensor, full: torch.Tensor) -> None:
        """Fill ``full`` from the codes [numel] of all ranks, see [Note: the same scale again]."""
        for entry, meanings in zip(layout.entries, self._meanings(largest).to(full.dtype), strict=True):
            for low, high in pairwise([*range(entry.offset, entry.end, _STRETCH), entry.end]):
                torch.index_select(meanings, 0, coded[low:high].int(), out=full[low:high])

    def _meanings(self, largest: torch.Tensor) -> torch.Tensor:
        """Return what each of the 256 codes stands for, by weight: [n, 256] fp32."""
        largest, scales = largest.float().unsqueeze(-1), self.scales(largest).unsqueeze(-1)
        codes = torch.arange(256, dtype=torch.uint8, device=largest.device).view(self.dtype).float()
        top = (largest * scales).to(self.dtype).float()
        return torch.where(codes.abs() == top, largest.copysign(codes), codes / scales)
