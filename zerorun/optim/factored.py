"""Rows and columns of a part: where its elements are in the matrices of its parameter. Pure arithmetic.

A parameter of two dimensions is a matrix, and one of more is a batch of matrices, its last two dimensions. A part is a
stretch of the flattened matrices, so it has whole rows, but for the first and the last. Sums over a row are complete on the
rank that has the row, and sums over columns on the one that has the matrix. Those of rows and matrices that are cut have
to be summed over ranks: they are *shared*, and have slots in what ranks sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from zerorun.distributed.tensor_shard import TensorShard

from .parameter_parts import Part, StateRange


@dataclass(frozen=True)
class MatrixBlock:
    """Elements from ``offset`` of a part on: ``shape`` [matrices, rows, columns] of it.

    They are in the rows from ``row`` on of those that the part touches, in its matrices from ``matrix`` on, and in the
    columns from ``column`` on.
    """

    offset: int
    shape: tuple[int, int, int]
    row: int
    matrix: int
    column: int


@dataclass(frozen=True)
class SharedSlots:
    """``numel`` numbers that are at ``here`` in those of a part, and at ``there`` in what ranks sum."""

    here: int
    there: int
    numel: int


@dataclass(frozen=True)
class Factors:
    """The rows and columns that ``part`` touches, of a parameter of at least two dimensions.

    Rows are numbered over all matrices. Columns are those of whole matrices, also where tensor ranks divide them.
    """

    part: Part

    @property
    def height(self) -> int:
        """Rows of a whole matrix."""
        return self.part.shape[-2]

    @property
    def width(self) -> int:
        """Columns of a whole matrix."""
        return self.part.shape[-1]

    @property
    def _local(self) -> tuple[int, int]:
        """(rows, columns) of a matrix that tensor ranks have divided, on this one."""
        return self.part.local_shape[-2], self.part.local_shape[-1]

    @property
    def local_width(self) -> int:
        return self._local[1]

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """The ranges of columns that this tensor rank has."""
        shard = self.part.shard
        return shard.ranges if shard is not None and shard.dim == len(self.part.shape) - 1 else ((0, self.width),)

    @cached_property
    def rows(self) -> tuple[int, int]:
        """(begin, end) of the rows that the part touches."""
        return self.part.start // self.local_width, -(-(self.part.start + self.part.numel) // self.local_width)

    @cached_property
    def matrices(self) -> tuple[int, int]:
        """(begin, end) of the matrices that the part touches."""
        return self.rows[0] // self._local[0], -(-self.rows[1] // self._local[0])

    @property
    def row_count(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def matrix_count(self) -> int:
        return self.matrices[1] - self.matrices[0]

    @cached_property
    def blocks(self) -> tuple[MatrixBlock, ...]:
        """The part as at most five blocks: the end of a row, rows of a matrix, matrices, rows, the beginning of a row."""
        return tuple(self._cut())

    def _cut(self) -> Iterator[MatrixBlock]:
        (height, width), place, end = self._local, self.part.start, self.part.start + self.part.numel
        while place < end:
            row, column = divmod(place, width)
            matrix, inside = divmod(row, height)
            rows = (end - place) // width
            if column or not rows:
                shape = (1, 1, min(width - column, end - place))
            elif inside or rows < height:
                shape = (1, min(height - inside, rows), width)
            else:
                shape = (rows // height, height, width)
            yield MatrixBlock(place - self.part.start, shape, row - self.rows[0], matrix - self.matrices[0], column)
            place += prod(shape)

    # -- what ranks sum --------------------------------------------------------------------------------------------

    @cached_property
    def _shared(self) -> tuple[list[int], list[int]] | None:
        """The rows and the matrices of which ranks have different elements; None if tensor ranks make it all of them."""
        if self.part.cuts is None:
            return None
        (height, width), cuts = self._local, self.part.cuts
        rows = {cut // width for cut in cuts if cut % width}
        return sorted(rows), sorted({cut // (height * width) for cut in cuts if cut % (height * width)})

    @cached_property
    def slots(self) -> tuple[int, int]:
        """How many sums over rows, and over columns, are sums over ranks. Equal on all of them."""
        if self._shared is None:
            return prod(self.part.shape[:-1]), prod(self.part.shape[:-2]) * self.width
        rows, matrices = self._shared
        return len(rows), len(matrices) * self.width

    @cached_property
    def shared_rows(self) -> tuple[SharedSlots, ...]:
        """Where sums over rows that the part touches are among the slots for rows."""
        if self._shared is not None:
            return tuple(_chosen(self._shared[0], self.rows, 1))
        return tuple(_whole_places(self.part.shard, len(self.part.shape) - 1, self.rows, 1))

    @cached_property
    def shared_columns(self) -> tuple[SharedSlots, ...]:
        """Where sums over the columns of the matrices that the part touches are among the slots for columns."""
        if self._shared is not None:
            return tuple(_chosen(self._shared[1], self.matrices, self.width))
        return tuple(_whole_places(self.part.shard, len(self.part.shape) - 2, self.matrices, self.width))

    # -- what checkpoints store ------------------------------------------------------------------------------------

    @property
    def stored_rows(self) -> tuple[StateRange, ...]:
        """The rows among those of the whole parameter, [..., rows, 1]. Whoever has its first element saves a row."""
        shape, cut_off = (*self.part.shape[:-1], 1), bool(self.part.start % self.local_width)
        return tuple(_stored(self.part.shard, shape, self.rows, cut_off, 1, len(shape) - 1))

    @property
    def stored_columns(self) -> tuple[StateRange, ...]:
        """The columns among those of the whole parameter, [..., 1, columns]. Whoever has its first element saves them."""
        shape, cut_off = (*self.part.shape[:-2], 1, self.width), bool(self.part.start % prod(self._local))
        return tuple(_stored(self.part.shard, shape, self.matrices, cut_off, self.width, len(shape) - 2))


def _chosen(shared: list[int], touched: tuple[int, int], width: int) -> Iterator[SharedSlots]:
    """Yield where the ``shared`` ones that are ``touched`` are. Each has ``width`` numbers."""
    for slot, number in enumerate(shared):
        if touched[0] <= number < touched[1]:
            yield SharedSlots((number - touched[0]) * width, slot * width, width)


def _whole_places(shard: TensorShard | None, dims: int, touched: tuple[int, int], width: int) -> Iterator[SharedSlots]:
    """Yield where the ``touched`` ones, numbered in this tensor rank's part, are among those of the whole parameter.

    They are numbered over the first ``dims`` dimensions. Each has ``width`` numbers.
    """
    if shard is None or shard.dim >= dims:
        yield SharedSlots(0, touched[0] * width, (touched[1] - touched[0]) * width)
        return
    inner, outer = prod(shard.shape[shard.dim + 1 : dims]), prod(shard.shape[: shard.dim])
    for index in range(outer):
        here, there = index * shard.length * inner, index * shard.shape[shard.dim] * inner
        for begin, end in shard.ranges:
            low, high = max(here, touched[0]), min(here + (end - begin) * inner, touched[1])
            if low < high:
                yield SharedSlots(
                    (low - touched[0]) * width, (there + begin * inner + low - here) * width, (high - low) * width
                )
            here += (end - begin) * inner


def _stored(
    shard: TensorShard | None, shape: tuple[int, ...], touched: tuple[int, int], cut_off: bool, width: int, dims: int
) -> Iterator[StateRange]:
    """Yield the ranges of the ``touched`` ones in a stored state of ``shape``. ``cut_off``: the first begins elsewhere."""
    kept = TensorShard(shape, shard.dim, shard.ranges) if shard is not None and shard.dim < dims else None
    count = touched[1] - touched[0]
    for first, number, saves in ((0, int(cut_off), False), (int(cut_off), count - cut_off, True)):
        if number:
            yield StateRange(first * width, (touched[0] + first) * width, number * width, shape, kept, saves)
