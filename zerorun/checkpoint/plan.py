"""Plan: which rank writes which tensor into which file, and from which ranks its elements come. Pure arithmetic.

Every rank lists the *parts* it holds. All ranks then make the same plan from the lists of all. Each tensor has one writer,
and each file too. Writers take neighbouring tensors of the model, about the same number of bytes each; all sets of one
parameter go to the same writer, so that weights in 16 bits are written from the fp32 values that it has anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import CheckpointError
from .tensorfile import Described

MODEL, MASTER, OPTIMIZER, STATE = "model", "master", "optimizer.", "state"
STATE_FILE = f"{STATE}-00001-of-00001.safetensors"
CAST = "cast"  # no set: tensors that are only written in the dtype ``rounded``
# Bytes of a file, as far as tensors allow: what the Hugging Face hub's tools make.
MAX_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Row:
    """One part that a rank holds: ``numel`` elements from ``start`` of the flattened tensor ``name`` of ``set``.

    ``dtype`` and ``shape`` are the whole tensor's. ``address``: where the part lies in the rank's memory.
    ``rounded``: the dtype in which the set ``model`` has the same tensor; empty if it has it on its own.
    """

    set: str
    name: str
    start: int
    numel: int
    dtype: str
    shape: tuple[int, ...]
    address: int = 0
    rounded: str = ""


@dataclass(frozen=True)
class Source:
    """Elements ``start .. start + numel`` lie at ``address`` of ``rank``."""

    rank: int
    start: int
    numel: int
    address: int


@dataclass
class Task:
    """One tensor to be brought together by its writer, and written into one file, or two."""

    number: int  # the same on all ranks
    set: str
    tensor: Described
    writer: int
    sources: list[Source]  # one, if the writer holds all of it
    file: str = ""  # none for the set ``cast``
    rounded: Described | None = None  # the same tensor for the set ``model``
    rounded_file: str = ""


@dataclass
class Plan:
    """All tasks, in the order of the model; and for each set its files with the tensors in them."""

    tasks: list[Task]
    sets: dict[str, dict[str, list[Described]]] = field(default_factory=dict)  # set -> file -> tensors

    def files(self) -> dict[str, list[Described]]:
        """All files with their tensors."""
        return {name: tensors for files in self.sets.values() for name, tensors in files.items()}


def make_plan(tables: Sequence[Sequence[Row]], shard: int, order: Iterable[str], max_file: int = MAX_FILE_BYTES) -> Plan:
    """The plan for what the ranks hold. ``shard``: ranks of a replica, which are neighbours. ``order``: names of the model.

    Raises CheckpointError if elements of a tensor are nowhere: then a rank lost something.
    """
    place = {name: index for index, name in enumerate(order)}
    held: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for rank, rows in enumerate(tables):
        for row in rows:
            held.setdefault((row.set, row.name), {}).setdefault(rank, []).append(row)
    keys = sorted(held, key=lambda key: (place.get(key[1], len(place)), key[1], key[0]))
    writers = _writers(keys, held, len(tables))
    writers |= {name: _near(held[kind, name], writers[name], shard) for kind, name in keys}
    tasks = []
    for number, key in enumerate(keys):
        row = next(iter(held[key].values()))[0]
        tensor = Described(row.name, row.dtype, row.shape)
        rounded = Described(row.name, row.rounded, row.shape) if row.rounded else None
        writer = writers[row.name]
        tasks.append(Task(number, row.set, tensor, writer, _sources(held[key], tensor, writer, shard), rounded=rounded))
    plan = Plan(tasks)
    _name_files(plan, max_file)
    return plan


def _writers(keys: list[tuple[str, str]], held: dict[tuple[str, str], dict[int, list[Row]]], ranks: int) -> dict[str, int]:
    """name -> rank, in contiguous stretches of about equal bytes."""
    sizes: dict[str, int] = {}
    for key in keys:
        row = next(iter(held[key].values()))[0]
        nbytes = Described(row.name, row.dtype, row.shape).nbytes
        sizes[row.name] = sizes.get(row.name, 0) + nbytes + (nbytes // 2 if row.rounded else 0)
    total, before, writers = max(sum(sizes.values()), 1), 0, {}
    for name, size in sizes.items():
        writers[name] = min((2 * before + size) * ranks // (2 * total), ranks - 1)
        before += size
    return writers


def _near(rows: dict[int, list[Row]], writer: int, shard: int) -> int:
    """``writer``, or if its replica has nothing of the tensor, the first rank that has: replicas do not read each other."""
    return writer if any(rank // shard == writer // shard for rank in rows) else min(rows)


def _sources(rows: dict[int, list[Row]], tensor: Described, writer: int, shard: int) -> list[Source]:
    """Where the writer gets the tensor from: from itself if it has all, else from ranks of its own replica."""
    replica = writer // shard
    near = [writer, *(rank for rank in rows if rank // shard == replica)]
    for rank in near:  # somebody who has all of it
        for row in rows.get(rank, ()):
            if row.start == 0 and row.numel == tensor.numel:
                return [Source(rank, 0, row.numel, row.address)]
    found = sorted(
        (row.start, rank, row) for rank, parts in rows.items() if rank // shard == replica for row in parts if row.numel
    )
    sources, end = [], 0
    for start, rank, row in found:
        if start != end:
            break
        sources.append(Source(rank, start, row.numel, row.address))
        end = start + row.numel
    if end != tensor.numel:
        raise CheckpointError(
            f"{tensor.name!r} has {tensor.numel} elements, but ranks hold only the first {end} of them without a gap. "
            "This is an error in zerorun."
        )
    return sources


def _name_files(plan: Plan, max_file: int) -> None:
    """Give every task its file: ``SET-00001-of-0000N.safetensors``, a new one for another writer or when one is full."""
    chunks: dict[str, list[list[tuple[Task, Described, bool]]]] = {}
    last: dict[str, tuple[int, int]] = {}  # set -> (writer, bytes so far)
    for task in plan.tasks:
        wanted = [(task.set, task.tensor, False)] if task.set != CAST else []
        if task.rounded is not None:
            wanted.append((MODEL, task.rounded, True))
        for kind, tensor, rounded in wanted:
            writer, filled = last.get(kind, (-1, 0))
            if writer != task.writer or filled + tensor.nbytes > max_file:
                chunks.setdefault(kind, []).append([])
                filled = 0
            chunks[kind][-1].append((task, tensor, rounded))
            last[kind] = task.writer, filled + tensor.nbytes
    for kind, files in chunks.items():
        plan.sets[kind] = {}
        for index, members in enumerate(files):
            name = f"{kind}-{index + 1:05d}-of-{len(files):05d}.safetensors"
            plan.sets[kind][name] = [tensor for _, tensor, _ in members]
            for task, _, rounded in members:
                if rounded:
                    task.rounded_file = name
                else:
                    task.file = name
