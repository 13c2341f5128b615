"""Write plan: which rank writes which tensor into which file, and from which ranks its elements come. Pure arithmetic.

Every rank lists the *parts* that it holds. All ranks then make the same plan from the lists of all ranks. Each tensor has
one writer, and so has each file. A writer takes neighbouring tensors of the model, and all writers take about the same
number of bytes. All sets of one parameter go to the same writer, so that 16-bit weights are written from the fp32 values
that it has anyway.

[Note: columns]
The ranks at one place of the pipe and tensor axes are a *column* of a replica: what that place has of the model is divided
among them. A tensor comes whole from one column, or in parts from several, each of which has a ``TensorShard`` of it; or
from several ranks of a column that have different experts. What several columns have in common, such as norms, or an
embedding table that two pipeline stages use, comes from one of them: from the writer's own, otherwise from the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from ..distributed.tensor_shard import TensorShard
from ..distributed.topology import Coordinate, Topology
from ..errors import CheckpointError
from .cuts import blocks, in_stretches
from .tensorfile import Described, dtype_of

MODEL, MASTER, OPTIMIZER, STATE = "model", "master", "optimizer.", "state"
RESIDUAL = "residual"  # the set of what coding has left out of gradients: tensors of single ranks, not of parameters
BUFFER = "buffer"  # the set of buffers that ranks have otherwise than the first of their stage: see rank_buffers.py
STATE_FILE = f"{STATE}-00001-of-00001.safetensors"
CAST = "cast."  # prefix of tensors that are only written in the dtype ``rounded``: into the set that follows it, or model
ADAPTER = "adapter_model"  # PEFT's name for an adapter's only file; also the name of its set, maybe with a folder in front
NARROW = torch.bfloat16  # the dtype of parts that have a rest, which has as many bytes
# The most bytes in a file, unless a single tensor has more: what the Hugging Face hub's tools make.
MAX_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Rest:
    """What a part in bf16 leaves out of the fp32 values for which it stands: its dtype, and where it is in memory."""

    dtype: str
    address: int


@dataclass(frozen=True)
class Row:
    """One part that a rank holds: ``numel`` elements from ``start`` of the flattened tensor ``name`` of ``set``.

    ``dtype`` and ``shape`` are those of the whole tensor. ``address``: where the part is in the rank's memory.
    ``rounded``: the dtype of a copy of the tensor, in the set ``model`` or the one after ``CAST``; empty if there is none.
    ``shard``: the part of the tensor that the rank's column has, if not all; ``start`` then counts in that, flattened.
    ``rest``: what is beside the part, which is in bf16 then, if the tensor is in fp32.
    """

    set: str
    name: str
    start: int
    numel: int
    dtype: str
    shape: tuple[int, ...]
    address: int = 0
    rounded: str = ""
    shard: TensorShard | None = None
    rest: Rest | None = None

    @property
    def whole_numel(self) -> int:
        """The number of elements that the rank's column has of the tensor."""
        return prod(self.shape if self.shard is None else self.shard.local_shape)


_Rows = dict[int, list[Row]]  # the parts of one tensor of one set, by rank
_Column = tuple[bool, int, int, int]  # whether it is of another replica than the writer's; its replica, stage, tensor rank


@dataclass(frozen=True)
class Source:
    """Elements ``start .. start + numel`` of a tensor, at ``address`` of ``rank``: ``offset`` elements into its part.

    With a ``shard``, ``start`` counts in that, and the elements need not be contiguous in the whole tensor. ``rest``: as
    for :class:`Row`, of these elements.
    """

    rank: int
    start: int
    numel: int
    address: int
    offset: int = 0
    shard: TensorShard | None = None
    rest: Rest | None = None


@dataclass
class Task:
    """One tensor that its writer collects, and writes into one file, or into two."""

    number: int  # the same on all ranks
    set: str
    tensor: Described
    writer: int
    sources: list[Source]  # one, if the writer has all of it; in the tensor's order, unless they have shards
    file: str = ""  # empty for a tensor that is only written in another dtype
    rounded: Described | None = None  # the same tensor for the set ``model``, or for the set that it is cast for
    rounded_file: str = ""


@dataclass
class WritePlan:
    """All tasks, in the order of the model; and for each set its files with the tensors in them."""

    tasks: list[Task]
    sets: dict[str, dict[str, list[Described]]] = field(default_factory=dict)  # set -> file -> tensors

    def files(self) -> dict[str, list[Described]]:
        """All files with their tensors."""
        return {name: tensors for files in self.sets.values() for name, tensors in files.items()}


def is_single(kind: str) -> bool:
    """True for the set of an adapter, which is a single file without an index, as PEFT reads it."""
    return kind.rpartition("/")[2] == ADAPTER


def make_plan(
    tables: Sequence[Sequence[Row]], topology: Topology, order: Iterable[str], max_file: int = MAX_FILE_BYTES
) -> WritePlan:
    """Make the plan for what the ranks of ``topology`` hold. ``tables``: their rows, by rank.

    ``order``: the tensor names of the model, in order. ``max_file``: bytes.
    Raises CheckpointError if no rank holds some of a tensor's elements: then a rank lost something.
    """
    place = {name: index for index, name in enumerate(order)}
    held: dict[tuple[str, str], _Rows] = {}
    for rank, rows in enumerate(tables):
        for row in rows:
            held.setdefault((row.set, row.name), {}).setdefault(rank, []).append(row)
    keys = sorted(held, key=lambda key: (place.get(key[1], len(place)), key[1], key[0]))
    places = [topology.coordinate(rank) for rank in range(len(tables))]
    writers = _writers(keys, held, places)
    writers |= {name: 0 for kind, name in keys if is_single(kind.removeprefix(CAST))}
    writers |= {name: _near(held[kind, name], writers[name], places) for kind, name in keys}
    tasks = []
    for number, key in enumerate(keys):
        row = next(iter(held[key].values()))[0]
        tensor = Described(row.name, row.dtype, row.shape)
        rounded = Described(row.name, row.rounded, row.shape) if row.rounded else None
        writer = writers[row.name]
        tasks.append(Task(number, row.set, tensor, writer, _sources(held[key], tensor, writer, places), rounded=rounded))
    plan = WritePlan(tasks)
    _name_files(plan, max_file)
    return plan


def _writers(keys: list[tuple[str, str]], held: dict[tuple[str, str], _Rows], places: list[Coordinate]) -> dict[str, int]:
    """Return name -> the rank that writes it, which is one of the first pipeline stage that has the tensor.

    Each rank of a stage gets neighbouring tensors of the stage, all ranks about the same number of bytes.
    """
    sizes: dict[int, dict[str, int]] = {}  # stage -> name -> bytes
    stages: dict[str, int] = {}
    for key in keys:
        row = next(iter(held[key].values()))[0]
        nbytes = Described(row.name, row.dtype, row.shape).nbytes
        stage = stages.setdefault(row.name, min(places[rank].pipe for rank in held[key]))
        named = sizes.setdefault(stage, {})
        named[row.name] = named.get(row.name, 0) + nbytes + (nbytes // 2 if row.rounded else 0)
    writers = {}
    for stage, named in sizes.items():
        ranks = [rank for rank, place in enumerate(places) if place.pipe == stage]
        total, before = max(sum(named.values()), 1), 0
        for name, size in named.items():
            writers[name] = ranks[min((2 * before + size) * len(ranks) // (2 * total), len(ranks) - 1)]
            before += size
    return writers


def _near(rows: _Rows, writer: int, places: list[Coordinate]) -> int:
    """``writer``, or the first rank that has any of the tensor if the replica of ``writer`` has none of it.

    Replicas do not read from each other.
    """
    replica = places[writer].replicate
    return writer if any(places[rank].replicate == replica for rank in rows) else min(rows)


def _sources(rows: _Rows, tensor: Described, writer: int, places: list[Coordinate]) -> list[Source]:
    """Where the writer gets the tensor: from itself if it has all of it, otherwise from ranks of its own replica.

    What its replica does not have, as some experts, comes from the first one that does.
    """
    columns: dict[TensorShard | None, dict[_Column, _Rows]] = {}
    home = places[writer].replicate

    def column_of(rank: int) -> _Column:
        place = places[rank]
        return place.replicate != home, place.replicate, place.pipe, place.tensor

    for rank, found in rows.items():
        for row in found:
            columns.setdefault(row.shard, {}).setdefault(column_of(rank), {}).setdefault(rank, []).append(row)
    own = column_of(writer)
    shards = [shard for shard in columns if shard is not None] if None not in columns else []
    if shards:
        _check_shards(shards, tensor)
    sources: list[Source] = []
    for shard in shards or (None,):
        choice: dict[_Column, _Rows] = columns.get(shard) or {own: {}}
        sources += _of_column(choice[own if own in choice else min(choice)], tensor, writer)
    if all(source.shard is None for source in sources):
        sources.sort(key=lambda source: source.start)
    return sources


def _of_column(rows: _Rows, tensor: Described, writer: int) -> Iterator[Source]:
    """The sources of what a column has of the tensor: one rank if one has it all, preferably the writer; else several."""
    for rank in sorted(rows, key=lambda rank: (rank != writer, rank)):
        for row in rows[rank]:
            if row.start == 0 and row.numel == row.whole_numel:
                yield from _of_row(rank, row)
                return
    found = sorted((row.start, rank, row) for rank, parts in rows.items() for row in parts if row.numel)
    end, numel = 0, next((row.whole_numel for parts in rows.values() for row in parts), tensor.numel)
    for start, rank, row in found:
        if start != end:
            break
        yield from _of_row(rank, row)
        end = start + row.numel
    if end != numel:
        raise CheckpointError(
            f"{tensor.name!r} has {numel} elements, but ranks hold only the first {end} of them without a gap. "
            "This is an error in zerorun."
        )


def _of_row(rank: int, row: Row) -> Iterator[Source]:
    """The sources of one part: the part itself, or its stretches of the whole tensor if they are few."""
    if row.shard is None or not in_stretches(row.shard):
        yield Source(rank, row.start, row.numel, row.address, 0, row.shard, row.rest)
        return
    rest, itemsize = row.rest, dtype_of(row.dtype).itemsize if row.rest is None else NARROW.itemsize
    for block in blocks(row.shard, row.start, row.numel):
        for cut in block.cuts:
            beside = None if rest is None else replace(rest, address=rest.address + cut.here * NARROW.itemsize)
            yield Source(rank, cut.there, cut.width, row.address + cut.here * itemsize, cut.here, rest=beside)


def _check_shards(shards: Sequence[TensorShard], tensor: Described) -> None:
    """Raise CheckpointError unless every element of the tensor is in exactly one of ``shards``."""
    dims, end = {shard.dim for shard in shards}, 0
    for low, high in sorted(pair for shard in shards for pair in shard.ranges if pair[0] < pair[1]):
        if low != end:
            break
        end = high
    if len(dims) > 1 or end != tensor.shape[shards[0].dim]:
        raise CheckpointError(
            f"{tensor.name!r} of shape {list(tensor.shape)} is divided into {[(s.dim, s.ranges) for s in shards]}, which "
            "do not cover it exactly. This is an error in zerorun."
        )


def _name_files(plan: WritePlan, max_file: int) -> None:
    """Give every task its file, ``SET-00001-of-0000N.safetensors``. Another writer, or a full file, begins a new one."""
    chunks: dict[str, list[list[tuple[Task, Described, bool]]]] = {}
    last: dict[str, tuple[int, int]] = {}  # set -> (writer, bytes so far)
    for task in plan.tasks:
        wanted = [(task.set, task.tensor, False)] if not task.set.startswith(CAST) else []
        if task.rounded is not None:
            wanted.append((MODEL if wanted else task.set.removeprefix(CAST) or MODEL, task.rounded, True))
        for kind, tensor, rounded in wanted:
            writer, filled = last.get(kind, (-1, 0))
            if writer != task.writer or (filled + tensor.nbytes > max_file and not is_single(kind)):
                chunks.setdefault(kind, []).append([])
                filled = 0
            chunks[kind][-1].append((task, tensor, rounded))
            last[kind] = task.writer, filled + tensor.nbytes
    for kind, files in chunks.items():
        plan.sets[kind] = {}
        for index, members in enumerate(files):
            name = f"{kind}.safetensors" if is_single(kind) else f"{kind}-{index + 1:05d}-of-{len(files):05d}.safetensors"
            plan.sets[kind][name] = [tensor for _, tensor, _ in members]
            for task, _, rounded in members:
                if rounded:
                    task.rounded_file = name
                else:
                    task.file = name
