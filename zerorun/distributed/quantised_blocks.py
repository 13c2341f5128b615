"""Quantised blocks: floating-point values on the wire as small integers, codes, with one fp32 scale for each 256 of them.

That is the wire of ZeRO++ (Wang et al. 2023, arXiv:2306.10209). Codes of 8 bits are integers up to 127, codes of 4 bits up
to 7. Of a block with the largest magnitude ``a``, the scale is ``a / 127`` or ``a / 7``, and the code of ``x`` is the
integer nearest to ``x / scale``, so that no error is larger than half a scale. With noise it is one of the two next to it,
by chance and in such a way that the mean of the error is 0; then no error is larger than a scale.

The codes of [numel] values come first, and their scales after them, so that one message has both: 260 or 132 bytes for 256
values. Of the two codes in a byte, the lower bits are one of the first half of the block.

[Note: what is not finite stays so]
A block with a NaN or an infinity has a scale that is not finite, and is decoded to values of which none is finite. So
overflows are seen as they are without codes, though in the whole block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from .device import queues

BLOCK = 256  # elements that share a scale
_SCALE = torch.float32
# Elements that are coded at a time in host memory: few enough for what is in between to stay in the processor's cache.
_STRETCH = 1 << 17
_ZERO = 8  # the code of 4 bits for 0


def coded_bytes(numel: int, bits: int = 8) -> int:
    """Return the bytes that ``numel`` values take, a multiple of BLOCK."""
    return numel * bits // 8 + numel // BLOCK * _SCALE.itemsize


def encode(values: torch.Tensor, coded: torch.Tensor, bits: int = 8, noise: torch.Generator | None = None) -> None:
    """Fill ``coded`` [..., coded_bytes(numel)] uint8 from ``values`` [..., numel], of any floating-point dtype.

    ``noise``: what decides how to round; without it, the nearest code is taken.
    """
    most = 2 ** (bits - 1) - 1
    for rows, codes, scales in _pieces(values, coded, bits):
        scale = rows.abs().amax(-1).float().div_(most)
        scales.copy_(scale)
        quotient = rows / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)  # zeros stay zeros
        nearest = quotient.round_() if noise is None else quotient.add_(_uniform(quotient, noise)).floor_()
        nearest.clamp_(-most, most)
        codes.copy_(nearest if bits == 8 else _paired(nearest))


def decode(coded: torch.Tensor, out: torch.Tensor, bits: int = 8) -> None:
    """Fill ``out`` [..., numel] from what ``encode`` has made."""
    for rows, codes, scales in _pieces(out, coded, bits):
        torch.mul(_integers(codes, bits), scales.unsqueeze(-1), out=rows)


def add_decoded(coded: torch.Tensor, out: torch.Tensor, bits: int = 8) -> None:
    """Add to ``out`` [..., numel] fp32 what ``encode`` has made."""
    for rows, codes, scales in _pieces(out, coded, bits):
        rows.add_(_integers(codes, bits) * scales.unsqueeze(-1))


def decode_parts(coded: torch.Tensor, bounds: Sequence[int], full: torch.Tensor) -> None:
    """Fill ``full`` [bounds[-1]] from what ``encode`` has made of each part, one after the other in ``coded``.

    ``bounds`` are in elements, and multiples of BLOCK.
    """
    ranks = len(bounds) - 1
    if full.numel() and len({high - low for low, high in pairwise(bounds)}) == 1:
        decode(coded.view(ranks, -1), full.view(ranks, -1))
        return
    for low, high in pairwise(bounds):
        decode(coded[coded_bytes(low) : coded_bytes(high)], full[low:high])


def _pieces(
    values: torch.Tensor, coded: torch.Tensor, bits: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (rows [..., blocks, BLOCK], their codes [..., blocks, bytes], their scales [..., blocks]), views."""
    if not values.numel():
        return
    numel = values.shape[-1]
    blocks, size = numel // BLOCK, numel * bits // 8
    rows = values.unflatten(-1, (blocks, BLOCK))
    codes = coded[..., :size].view(torch.int8 if bits == 8 else torch.uint8).unflatten(-1, (blocks, size // blocks))
    scales = coded[..., size:].view(_SCALE)
    step = blocks if queues(values.device) else max(_STRETCH * blocks // values.numel(), 1)
    for begin in range(0, blocks, step):
        part = slice(begin, begin + step)
        yield rows[..., part, :], codes[..., part, :], scales[..., part]


def _uniform(like: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    return torch.rand(like.shape, generator=noise, dtype=torch.float32, device=like.device)


def _paired(codes: torch.Tensor) -> torch.Tensor:
    """Two integers in each byte: [..., BLOCK / 2] uint8."""
    low, high = codes.add_(_ZERO).to(torch.uint8).chunk(2, -1)
    return low | high << 4


def _integers(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The integers [..., BLOCK] that ``codes`` stand for."""
    if bits == 8:
        return codes
    return torch.cat((codes & 15, codes >> 4), -1).to(torch.int8).sub_(_ZERO)
