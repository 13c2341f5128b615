"""Layout: the place of each parameter of a unit in its flat buffer, and the part that each rank owns. Pure arithmetic.

[Note: one flat buffer]
The parameters of one kind (dtype, trainable or not) of a unit lie end to end in one flat buffer of ``numel`` elements.
``bounds`` cuts the buffer into one contiguous *shard* per rank of the shard axis. Every parameter starts at a multiple
of ``ALIGNMENT`` elements and, where shards may cut parameters, every shard bound is a multiple of it too. A vectorised
kernel therefore meets an odd tail only at the end of a parameter, whatever the shard degree, which is why an element-wise
update gives the same bits at every stage and world size.

Optimizers whose states have blocks of elements with a scale in common ask for a larger ``quantum``, and so do parameters
that are sent in such blocks: they begin at multiples of it, and so do all shards. No block is then in two parameters or two
shards, and the blocks of a parameter are counted from its own beginning.

Optimizers that need a whole matrix (Adafactor, Muon, or any that zerorun does not know) ask for ``whole=True``: then no
bound is inside a parameter, and shards have unequal sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

# Elements. 16 fp32 elements are one cache line of 64 bytes, the unit in which torch's fused CPU optimizers split work.
ALIGNMENT = 16
# Elements. Large shards are a multiple of it, so that they fill whole pages of 4 KiB, also with 16-bit elements, because
# ranks of one host map them.
PAGED = 2048
LARGE_SHARD = 128 * PAGED  # large enough that less than 1 % is padding


@dataclass(frozen=True)
class ParameterSpan:
    """One parameter: ``offset`` and ``numel`` in elements of the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns. All numbers in elements."""

    entry: int  # index into Layout.entries
    start: int  # offset in the flattened parameter
    shard_start: int  # offset in the rank's shard
    numel: int


@dataclass(frozen=True)
class Layout:
    """A flat buffer in ``degree`` shards, of ``sizes`` elements each: one number if all are equal, or one for each rank.

    ``bounds[r] .. bounds[r + 1]`` is the shard of rank r. A layout for thousands of ranks is as small as one for two.
    """

    entries: tuple[ParameterSpan, ...]
    degree: int
    sizes: tuple[int, ...]

    @cached_property
    def bounds(self) -> Sequence[int]:
        """Where shards begin and end, in elements of the flat buffer: degree + 1 numbers."""
        if self.even and self.sizes[0]:
            return range(0, self.sizes[0] * self.degree + 1, self.sizes[0])
        return tuple(accumulate((0, *map(self.shard_numel, range(self.degree)))))

    @property
    def numel(self) -> int:
        return sum(self.sizes) * (self.degree if self.even else 1)

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.numel - sum(entry.numel for entry in self.entries)

    @property
    def even(self) -> bool:
        """True if all shards have the same size, as NCCL's collectives require."""
        return len(self.sizes) == 1

    def shard_numel(self, rank: int) -> int:
        return self.sizes[0 if self.even else rank]

    def pieces(self, rank: int) -> list[Piece]:
        """Return the pieces that rank ``rank`` owns, in the order of the flat buffer."""
        found = (self.piece(index, rank) for index in range(len(self.entries)))
        return [piece for piece in found if piece is not None]

    def piece(self, index: int, rank: int) -> Piece | None:
        """Return the piece of ``entries[index]`` that rank ``rank`` owns; None if it has none."""
        entry, low = self.entries[index], self.bounds[rank]
        start, end = max(entry.offset, low), min(entry.end, self.bounds[rank + 1])
        return Piece(index, start - entry.offset, start - low, end - start) if start < end else None


def _align(numel: int, quantum: int = ALIGNMENT) -> int:
    return -(-numel // quantum) * quantum


def build_layout(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    degree: int,
    *,
    whole: bool = False,
    quantum: int | Sequence[int] = ALIGNMENT,
) -> Layout:
    """Lay parameters end to end for ``degree`` shards. ``whole`` keeps every parameter inside one shard.

    ``quantum``: elements, of all parameters or of each; a multiple of ALIGNMENT. A parameter fills whole quanta, and begins
    at a multiple of its own; shard bounds are multiples of the largest. With ``whole``, the largest is that of all.
    """
    quanta = [quantum] * len(names) if isinstance(quantum, int) else quantum
    if whole:
        return _build_whole(names, shapes, degree, max(quanta, default=ALIGNMENT))
    entries, offset = [], 0
    for name, shape, own in zip(names, shapes, quanta, strict=True):
        offset = _align(offset, own)
        entries.append(ParameterSpan(name, tuple(shape), offset, prod(shape)))
        offset += _align(prod(shape), own)
    shard = _align(-(-offset // degree), max(quanta, default=ALIGNMENT))
    if shard >= LARGE_SHARD:
        shard = -(-shard // PAGED) * PAGED
    return Layout(tuple(entries), degree, (shard,))


def _build_whole(names: Sequence[str], shapes: Sequence[tuple[int, ...]], degree: int, quantum: int) -> Layout:
    """Put the largest parameter first, each into the emptiest shard: within 4/3 of the best balance (Graham 1969)."""
    load = [0] * degree
    owner: list[int] = [0] * len(names)
    for index in sorted(range(len(names)), key=lambda i: (-prod(shapes[i]), i)):
        owner[index] = min(range(degree), key=lambda rank: (load[rank], rank))
        load[owner[index]] += _align(prod(shapes[index]), quantum)
    entries: list[ParameterSpan] = []
    offset = 0
    for rank in range(degree):
        for index, name in enumerate(names):
            if owner[index] == rank:
                entries.append(ParameterSpan(name, tuple(shapes[index]), offset, prod(shapes[index])))
                offset += _align(prod(shapes[index]), quantum)
    return Layout(tuple(entries), degree, tuple(load) if len({*load}) > 1 else (load[0],))


def aligned_bytes(size: int) -> int:
    """Return ``size`` rounded up to a multiple of 64 bytes: a cache line, and the widest vector."""
    return -(-size // 64) * 64
