"""Block codes: floating-point values on the wire as int8, with one fp32 scale for each 256 of them.

That is the wire of ZeRO++ (Wang et al. 2023, arXiv:2306.10209). Of a block with the largest magnitude ``a``, the scale is
``a / 127``, and the code of ``x`` is the integer nearest to ``x / scale``: the error is at most ``a / 254``. The codes of
[numel] values come first, and their scales after them, so that one message has both: 260 bytes for 256 values.

[Note: what is not finite stays so]
A block with a NaN or an infinity has a scale that is not finite, and is decoded to values of which none is finite. So
overflows are seen as they are without codes, though in the whole block.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from .device import queues

BLOCK = 256  # elements that share a scale
_MOST = 127  # the largest code
_SCALE = torch.float32
# Elements that are coded at a time in host memory: few enough for what is in between to stay in the processor's cache.
_STRETCH = 1 << 17


def coded_bytes(numel: int) -> int:
    """Return the bytes that ``numel`` values take, a multiple of BLOCK."""
    return numel + numel // BLOCK * _SCALE.itemsize


def encode(values: torch.Tensor, coded: torch.Tensor) -> None:
    """Fill ``coded`` [coded_bytes(numel)] uint8 from ``values`` [numel], of any floating-point dtype."""
    codes, scales = _parts(coded, values.numel())
    step = values.numel() if queues(values.device) else _STRETCH
    for begin in range(0, values.numel(), step or 1):
        rows = values[begin : begin + step].view(-1, BLOCK).float()
        scale = rows.abs().amax(1).div_(_MOST)
        blocks = slice(begin // BLOCK, begin // BLOCK + len(scale))
        scales[blocks] = scale
        divisor = torch.where(scale > 0, scale, 1.0)  # zeros stay zeros
        nearest = (rows / divisor[:, None]).round_()
        codes[begin : begin + step].view(-1, BLOCK).copy_(nearest.clamp_(-_MOST, _MOST))


def decode(coded: torch.Tensor, bounds: Sequence[int], full: torch.Tensor) -> None:
    """Fill ``full`` [bounds[-1]] from what ``encode`` has made of each part, one after the other in ``coded``.

    ``bounds`` are in elements, and multiples of BLOCK.
    """
    ranks = len(bounds) - 1
    if full.numel() == bounds[1] * ranks and all(high - low == bounds[1] for low, high in pairwise(bounds)):
        _decode_equal(coded, ranks, full)
        return
    for low, high in pairwise(bounds):
        _decode_equal(coded[coded_bytes(low) : coded_bytes(high)], 1, full[low:high])


def _decode_equal(coded: torch.Tensor, ranks: int, full: torch.Tensor) -> None:
    if not full.numel():
        return
    blocks = full.numel() // (ranks * BLOCK)
    table = coded.view(ranks, -1)
    codes = table[:, : blocks * BLOCK].view(torch.int8).unflatten(1, (blocks, BLOCK))
    scales = table[:, blocks * BLOCK :].view(_SCALE).unsqueeze(2)
    out = full.view(ranks, blocks, BLOCK)
    step = blocks if queues(full.device) else max(_STRETCH // (ranks * BLOCK), 1)
    for begin in range(0, blocks, step):
        part = slice(begin, begin + step)
        torch.mul(codes[:, part], scales[:, part], out=out[:, part])


def _parts(coded: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [numel] and the scales [numel / BLOCK] in ``coded``."""
    return coded[:numel].view(torch.int8), coded[numel:].view(_SCALE)
