"""Cuts: where the elements of a rank's part of a tensor are in the whole tensor. Pure arithmetic, and copies based on it.

[Note: rows]
A tensor-parallel rank has ranges along one dimension (a ``TensorShard``). If the tensor is seen as a matrix, with all
dimensions before that one as rows, the rank has the same columns of every row. Data parallelism then cuts the rank's
flattened part into *runs*, without regard to rows. So a run is the end of a row, some whole rows, and the beginning of a
row: at most three *blocks*.
If no dimension precedes the divided one, there is only one row, and a run is a few stretches of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from ..distributed.tensor_shard import TensorShard

_MOST_BYTES = 4 << 20  # of enclosing rows that are read at a time


@dataclass(frozen=True)
class Stretch:
    """``width`` contiguous elements, which begin at ``here`` in the run and at ``there`` in the flattened whole tensor."""

    here: int
    there: int
    width: int


@dataclass(frozen=True)
class Block:
    """``rows`` rows. ``cuts`` are those of the first; the next row's are ``step_here`` and ``step_there`` elements on."""

    rows: int
    step_here: int
    step_there: int
    cuts: tuple[Stretch, ...]

    @property
    def begin(self) -> int:
        """The position of the first element in the whole tensor."""
        return min(cut.there for cut in self.cuts)

    @property
    def row_end(self) -> int:
        """The position after the last element of the first row."""
        return max(cut.there + cut.width for cut in self.cuts)

    @property
    def end(self) -> int:
        """The position after the last element in the whole tensor."""
        return self.row_end + (self.rows - 1) * self.step_there


def in_stretches(shard: TensorShard) -> bool:
    """True if a rank's part is one row: then a run is at most one stretch of the whole tensor for each range."""
    return prod(shard.shape[: shard.dim]) == 1


def blocks(shard: TensorShard, start: int, numel: int) -> Iterator[Block]:
    """Yield where elements ``start .. start + numel`` of the flattened part ``shard`` are in the whole tensor."""
    inner = prod(shard.shape[shard.dim + 1 :])
    step_here, step_there = shard.length * inner, shard.shape[shard.dim] * inner
    position, end = start, start + numel
    while position < end:
        row, column = divmod(position, step_here)
        rows = (end - position) // step_here if column == 0 else 0
        width = step_here if rows else min(step_here - column, end - position)
        cuts = _cuts(shard, inner, column, width, position - start, row * step_there)
        yield Block(max(rows, 1), step_here, step_there, tuple(cuts))
        position += max(rows, 1) * width


def _cuts(shard: TensorShard, inner: int, column: int, width: int, here: int, there: int) -> Iterator[Stretch]:
    """Yield the cuts of ``width`` elements of one row of the part, from ``column`` on.

    These elements begin at ``here`` in the run, and their row begins at ``there`` in the whole tensor.
    """
    begin = 0  # of a range, in the row of the part
    for low, high in shard.ranges:
        end = begin + (high - low) * inner
        left, right = max(begin, column), min(end, column + width)
        if left < right:
            yield Stretch(here + left - column, there + low * inner + left - begin, right - left)
        begin = end


def span(shard: TensorShard, start: int, numel: int) -> tuple[int, int]:
    """The range (begin, end) of the flattened whole tensor that encloses a run."""
    found = list(blocks(shard, start, numel))
    return min((block.begin for block in found), default=0), max((block.end for block in found), default=0)


def places(shard: TensorShard | None, start: int, numel: int, per: int = 1) -> torch.Tensor:
    """Return the place in the flattened whole tensor of elements ``start .. start + numel`` of the flattened part.

    [numel] int64, each divided by ``per``, rounded down. Without a ``shard`` the part is the whole.
    """
    if shard is None:
        return torch.arange(start, start + numel).div_(per, rounding_mode="floor")
    found = torch.empty(numel, dtype=torch.int64)
    for block in blocks(shard, start, numel):
        for cut in block.cuts:
            begins = torch.arange(block.rows).mul_(block.step_there).add_(cut.there)
            row = begins[:, None] + torch.arange(cut.width)
            _rows(found, cut.here, block.rows, cut.width, block.step_here).copy_(row)
    return found.div_(per, rounding_mode="floor")


def put(shard: TensorShard, start: int, run: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy ``run``, the elements from ``start`` on of the flattened part, to their places in the flattened ``whole``."""
    for block in blocks(shard, start, run.numel()):
        for cut in block.cuts:
            found = _rows(run, cut.here, block.rows, cut.width, block.step_here)
            _rows(whole, cut.there, block.rows, cut.width, block.step_there).copy_(found)


def take(shard: TensorShard, start: int, out: torch.Tensor, read: Callable[[int, torch.Tensor], None]) -> None:
    """Fill ``out``, contiguous, with the elements from ``start`` of the flattened part.

    ``read(begin, to)`` fills the contiguous 1-D ``to`` from element ``begin`` of the flattened whole tensor. For whole
    rows, the enclosing elements are read, some rows at a time, and the rank's own columns are picked from them: checksums
    are over blocks of files, so the bytes between short columns are read in any case. Of single rows, and of long ones,
    only the rank's own columns are read.
    """
    for block in blocks(shard, start, out.numel()):
        fitting = _MOST_BYTES // (block.step_there * out.element_size())
        if block.rows == 1 or fitting < 2:
            for row in range(block.rows):
                for cut in block.cuts:
                    begin = cut.here + row * block.step_here
                    read(cut.there + row * block.step_there, out[begin : begin + cut.width])
            continue
        for row in range(0, block.rows, fitting):
            _take_rows(block, row, min(fitting, block.rows - row), out, read)


def _take_rows(block: Block, first: int, rows: int, out: torch.Tensor, read: Callable[[int, torch.Tensor], None]) -> None:
    begin = block.begin
    found = torch.empty((rows - 1) * block.step_there + block.row_end - begin, dtype=out.dtype)
    read(begin + first * block.step_there, found)
    for cut in block.cuts:
        picked = _rows(found, cut.there - begin, rows, cut.width, block.step_there)
        _rows(out, cut.here + first * block.step_here, rows, cut.width, block.step_here).copy_(picked)


def _rows(flat: torch.Tensor, begin: int, rows: int, width: int, step: int) -> torch.Tensor:
    """A view [rows, width] of ``flat`` from element ``begin`` on, whose rows begin ``step`` elements apart."""
    return flat[begin:].as_strided((rows, width), (step, 1))
