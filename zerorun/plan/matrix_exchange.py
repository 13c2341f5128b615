"""The matrix exchange: which rank orthogonalizes which matrix, and what ranks send each other for it. Pure arithmetic.

[Note: one owner per matrix]
Muon's update of a matrix needs all of it, but momentum and masters stay in flat, even shards. So each matrix has one
*owner* among the ranks that have one copy of the states between them, over the axes shard and tensor. Before an update,
ranks send their parts of the momentum to the owners, which orthogonalize the matrices, and send back the parts of the
results. Both go in bf16, or fp32: in bf16, that is 4 Psi (N - 1) / N^2 bytes for each rank and step, with Psi elements on N
ranks.

Owners are chosen over all units, so that all have as much to compute: the longest work first, each to the rank that has the
least (Graham 1969). What is exchanged at once is a *turn*: one matrix of each owner, or several small ones. So buffers hold
some matrices, and not all.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from ..distributed.layout import Layout
from ..distributed.topology import Topology

TO_OWNERS, FROM_OWNERS = "matrices: momentum to owners", "matrices: updates from owners"
# Elements of an owner's matrices in one turn, unless one alone has more: 16 MiB in bf16. A turn costs two collectives.
TURN_NUMEL = 8 << 20


@dataclass(frozen=True)
class Matrix:
    """One matrix that Muon updates. ``shape``: (rows, columns) of all of it, on all tensor ranks together.

    It is parameter ``entry`` of ``group``, one of the plan's trained flat groups. ``divided``: tensor ranks have parts of
    it; if not, each has all. ``owner``: a number of a rank, see MatrixExchange. ``here``: how many elements this rank has.
    """

    name: str
    shape: tuple[int, int]
    group: int
    entry: int
    divided: bool
    owner: int
    turn: int
    here: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class MatrixExchange:
    """What the ranks of one copy of a pipeline stage exchange. Rank number ``rank`` is shard * ``tensor`` + tensor rank.

    ``shares``: every shard rank has all elements of its tensor rank's part (stage 0). ``fp32``: matrices travel in fp32,
    else in bf16. ``matrices`` are the same on all these ranks, in the same order, but for ``group``, ``entry``, ``here``.
    ``staging``: elements of the buffer for this rank's parts in one turn; ``owned``: of that for what it owns in one. Both
    are the same on all ranks of a shard group. ``landing``: of a buffer in host memory, for directions whose gradients are
    there, if the device has memory of its own.
    """

    rank: int
    shard: int
    tensor: int
    shares: bool
    fp32: bool
    matrices: tuple[Matrix, ...]
    staging: int
    owned: int
    landing: int = 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.shard * self.tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which matrices travel, and in which the iteration works."""
        return torch.float32 if self.fp32 else torch.bfloat16

    @property
    def bytes(self) -> int:
        """The bytes of both buffers on the device."""
        return (self.staging + self.owned) * self.dtype.itemsize if self.size > 1 else 0

    @property
    def host_bytes(self) -> int:
        """The bytes of the buffer in host memory."""
        return self.landing * self.dtype.itemsize

    @cached_property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the matrices of each turn, ascending."""
        found: list[list[int]] = [[] for _ in range(1 + max((m.turn for m in self.matrices), default=-1))]
        for index, matrix in enumerate(self.matrices):
            found[matrix.turn].append(index)
        return tuple(map(tuple, found))

    def gives(self, rank: int, matrix: Matrix) -> bool:
        """Return True if the owner takes what ``rank`` has of ``matrix``, and not the same from another rank."""
        (shard, tensor), (owner_shard, owner_tensor) = divmod(rank, self.tensor), divmod(matrix.owner, self.tensor)
        return (matrix.divided or tensor == owner_tensor) and (not self.shares or shard == owner_shard)

    def copies(self, matrix: Matrix) -> int:
        """Return how many ranks have each element of ``matrix``."""
        return (1 if matrix.divided else self.tensor) * (self.shard if self.shares else 1)

    def sent(self, turn: int) -> tuple[int, int]:
        """Return the bytes that this rank sends to owners in ``turn``, and those that it sends back as an owner."""
        there, back = 0, 0
        for matrix in (self.matrices[index] for index in self.turns[turn]):
            if matrix.owner == self.rank:
                back += matrix.numel * self.copies(matrix) - matrix.here
            elif self.gives(self.rank, matrix):
                there += matrix.here
        return there * self.dtype.itemsize, back * self.dtype.itemsize


def plan_exchange(
    layouts: Sequence[Layout],
    shapes: Mapping[str, tuple[int, int]],
    divided: frozenset[str],
    topology: Topology,
    *,
    shares: bool,
    fp32: bool,
    on_host: frozenset[int] = frozenset(),
) -> MatrixExchange:
    """Plan the exchange of matrices: ``shapes``, by the names of their parameters. ``layouts``: of trained flat groups.

    The order of ``shapes`` must be the same on all ranks. ``divided``: names of those that tensor ranks have parts of.
    ``on_host``: the flat groups whose gradients are in host memory, if the device has memory of its own.
    """
    places = {entry.name: (g, e) for g, layout in enumerate(layouts) for e, entry in enumerate(layout.entries)}
    chosen = choose_owners(list(shapes.values()), topology.shard * topology.tensor)
    turns = 1 + max((turn for _, turn in chosen), default=-1)
    held = _held(layouts, shares)
    matrices, own = [], [[0] * turns for _ in range(topology.shard)]
    for (name, shape), (owner, turn) in zip(shapes.items(), chosen, strict=True):
        place = places[name]
        for rank, numel in enumerate(held[place]):
            own[rank][turn] += numel
        matrices.append(Matrix(name, shape, *place, name in divided, owner, turn, held[place][topology.shard_rank]))
    owned: dict[tuple[int, int], int] = {}
    for matrix in matrices:
        room = matrix.numel * (1 if matrix.divided else topology.tensor)
        owned[matrix.owner, matrix.turn] = owned.get((matrix.owner, matrix.turn), 0) + room
    return MatrixExchange(
        topology.shard_rank * topology.tensor + topology.tensor_rank,
        topology.shard,
        topology.tensor,
        shares,
        fp32,
        tuple(matrices),
        staging=max((numel for row in own for numel in row), default=0),
        owned=max(owned.values(), default=0),
        landing=max((matrix.here for matrix in matrices if matrix.group in on_host), default=0),
    )


def _held(layouts: Sequence[Layout], shares: bool) -> dict[tuple[int, int], list[int]]:
    """Return how many elements of each parameter (flat group, entry) each rank of the shard axis has."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, layout in enumerate(layouts):
        for index, entry in enumerate(layout.entries):
            found[number, index] = [entry.numel if shares else 0] * layout.degree
        for rank in range(0 if shares else layout.degree):
            for piece in layout.pieces(rank):
                found[number, piece.entry][rank] = piece.numel
    return found


def cost_of(shape: tuple[int, int]) -> int:
    """Return the operations of a step of the iteration: two products with the whole matrix, and one of squares."""
    short, long = sorted(shape)
    return 4 * short * short * long + 2 * short**3


def choose_owners(shapes: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return (owner, turn) of each matrix on ``size`` ranks. It depends on the shapes and their order alone."""
    loads = [(0, rank) for rank in range(size)]
    columns: list[list[int]] = []  # the first matrix of each owner, the second, ...
    owners, counts = [0] * len(shapes), [0] * size
    for index in sorted(range(len(shapes)), key=lambda i: (-cost_of(shapes[i]), i)):
        load, owner = heapq.heappop(loads)
        heapq.heappush(loads, (load + cost_of(shapes[index]), owner))
        if counts[owner] == len(columns):
            columns.append([])
        columns[counts[owner]].append(index)
        owners[index] = owner
        counts[owner] += 1
    turns = _turns([[(index, owners[index], prod(shapes[index])) for index in column] for column in columns])
    return [(owners[index], turns[index]) for index in range(len(shapes))]


def _turns(columns: Iterable[Sequence[tuple[int, int, int]]]) -> dict[int, int]:
    """Return the turn of each matrix. Columns of (matrix, owner, elements) share one as long as no owner has too much."""
    turn, found, held = -1, dict[int, int](), dict[int, int]()
    for column in columns:
        together = {owner: held.get(owner, 0) + numel for _, owner, numel in column}
        if turn < 0 or max(together.values()) > TURN_NUMEL:
            turn, together = turn + 1, {owner: numel for _, owner, numel in column}
            held = {}
        held |= together
        found |= dict.fromkeys((index for index, _, _ in column), turn)
    return found
