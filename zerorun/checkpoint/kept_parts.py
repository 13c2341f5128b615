"""Kept parts: what each rank keeps of one step in shared memory, and how all of it together is read as a checkpoint is.

[Note: the files of a rank]
``EPOCH.SLOT.RANK.parts`` has the bytes of the parts one after the other, as they are in the rank's memory. It is made once
and written again and again. ``EPOCH.SLOT.RANK.record`` says which step it has, and the checksums: it is there only while
that is so. An epoch is a start of the workers, and has two slots. The names are the same on the host of a partner.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from ..distributed.device import on_host
from ..distributed.tensor_shard import TensorShard
from ..distributed.wire import decode
from ..errors import MessageError
from .cuts import put, take
from .ranks import Ranks
from .read import Read, Reader
from .save import Facts, RankFacts
from .tensorfile import Described, dtype_of
from .write_plan import MASTER, MODEL, WritePlan

BLOCK_BYTES = 1 << 18  # one sum each
_ALIGN = 64  # bytes
_AT_ONCE = 1 << 9  # blocks of which a GPU computes the sums together
_PIECES = "pieces"  # the set of single parts
_FACTOR = -7046029254386353131  # 2 ** 64 / golden ratio: odd, with bits all over the word


@dataclass(frozen=True)
class KeptPart:
    """``numel`` elements of the flattened tensor ``name`` of ``set``, from ``start`` on; with a ``shard``, of that part.

    ``begin``: bytes from the beginning of the rank's file. ``offset``: elements of the part that the rank has.
    """

    set: str
    name: str
    start: int
    numel: int
    dtype: str
    shard: TensorShard | None
    begin: int
    offset: int

    @property
    def end(self) -> int:
        return self.begin + self.numel * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class WholeTensor:
    """A whole tensor of ``set``. ``rounded``: there is one of this dtype in the set ``model``, too, to be made from it."""

    set: str
    tensor: Described
    rounded: str


@dataclass(frozen=True)
class PartsLayout:
    """The file of one rank: its ``parts`` and its length in bytes. ``tensors``: those that this rank tells of."""

    parts: tuple[KeptPart, ...]
    tensors: tuple[WholeTensor, ...]
    nbytes: int

    @classmethod
    def of(cls, plan: WritePlan, rank: int) -> PartsLayout:
        """What ``rank`` has to keep so that all ranks together have each element once."""
        parts, end = [], 0
        for task in plan.tasks:
            for source in task.sources:
                if source.rank == rank and source.numel:
                    begin = -(-end // _ALIGN) * _ALIGN
                    found = task.tensor.dtype, source.shard, begin, source.offset
                    parts.append(KeptPart(task.set, task.tensor.name, source.start, source.numel, *found))
                    end = parts[-1].end
        own = (task for task in plan.tasks if task.writer == rank)
        tensors = tuple(WholeTensor(t.set, t.tensor, t.rounded.dtype if t.rounded is not None else "") for t in own)
        return cls(tuple(parts), tensors, -(-end // BLOCK_BYTES) * BLOCK_BYTES)


@dataclass(frozen=True)
class Turn:
    """A step in a loop that may step several engines. See [Note: several engines] in memory_copies.py.

    ``ends_pass``: a pass of the loop was over with it. ``beside``: the steps of the other engines, by their numbers.
    """

    ends_pass: bool
    beside: dict[int, int]


@dataclass(frozen=True)
class PartsRecord:
    """What the file of ``rank``, one of ``world``, has: step, length, checksums, layout, and what the rank knows beside."""

    step: int
    epoch: str
    slot: int
    rank: int
    world: int
    nbytes: int
    sums: torch.Tensor  # int64, of each block
    layout: bytes  # an encoded PartsLayout, which is the same for many steps
    facts: RankFacts
    turn: Turn

    @property
    def version(self) -> tuple[str, int]:
        """Equal for the files of all ranks of one copy; the greatest is the newest."""
        return self.epoch, self.step

    @property
    def file(self) -> str:
        """The name of the file of parts."""
        return parts_file(self.epoch, self.slot, self.rank)


# -- files ---------------------------------------------------------------------------------------------------------------


def parts_file(epoch: str, slot: int, rank: int) -> str:
    return f"{epoch}.{slot}.{rank}.parts"


def record_of(parts: Path) -> Path:
    """The path of the record that belongs to a file of parts."""
    return parts.with_suffix(".record")


def make_room(path: Path, nbytes: int) -> torch.Tensor:
    """Make a file of ``nbytes``, and return its memory, uint8. Raises OSError if there is no room."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if nbytes:
            os.posix_fallocate(file, 0, nbytes)  # what is mapped and has no room ends the program when it is written
    except OSError as error:
        path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(file)
    return mapped(path, nbytes)


def mapped(path: Path, nbytes: int) -> torch.Tensor:
    """The bytes of a file in place."""
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8) if nbytes else torch.empty(0).byte()


def block_sums(memory: torch.Tensor) -> torch.Tensor:
    """A checksum of each block, int64: its 64-bit words, each times an odd number of its own, added up modulo 2 ** 64.

    So a word that is another one is always seen, and words that have changed places are. It runs at the speed of memory.
    """
    words = memory.view(torch.int64).view(-1, BLOCK_BYTES // 8)
    if on_host(memory):
        return words @ _factors(memory.device)
    return torch.cat([(some * _factors(memory.device)).sum(1) for some in words.split(_AT_ONCE)])  # no int64 matrices there


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same of a tensor [n] of any dtype, which zeros fill up to whole blocks."""
    content = tensor.detach().view(torch.uint8)
    whole = content.numel() // BLOCK_BYTES * BLOCK_BYTES
    rest = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=content.device)
    rest[: content.numel() - whole] = content[whole:]
    begin = content[:whole] if content.storage_offset() % 8 == 0 else content[:whole].clone()  # words lie at multiples of 8
    return torch.cat([block_sums(begin), block_sums(rest)])


@cache
def _factors(device: torch.device) -> torch.Tensor:
    return (torch.arange(1, BLOCK_BYTES // 8 + 1, device=device) * _FACTOR) | 1


def write_record(parts: Path, content: bytes) -> None:
    """Let the record of ``parts``, encoded, appear whole."""
    new = parts.with_suffix(".new")
    new.write_bytes(content)
    new.rename(record_of(parts))


def records_in(place: Path) -> Iterator[tuple[Path, PartsRecord]]:
    """Yield (file of parts, record) for those that are whole in a folder."""
    for path in sorted(place.glob("*.record")):
        with contextlib.suppress(OSError, MessageError):
            record = decode(path.read_bytes())
            if isinstance(record, PartsRecord):
                yield path.with_suffix(".parts"), record


def is_good(parts: Path, record: PartsRecord) -> bool:
    """True if the file has what its record says."""
    try:
        same = parts.stat().st_size == record.nbytes
        return same and torch.equal(block_sums(mapped(parts, record.nbytes)), record.sums)
    except (OSError, RuntimeError):
        return False


# -- reading ---------------------------------------------------------------------------------------------------------


class PartsReader(Reader):
    """A copy in memory, read as a checkpoint is. ``records``: by file of parts, those of all ranks that have kept it.

    ``facts``: what these ranks knew. ``missing``: as for a Reader.
    """

    def __init__(self, place: Path, facts: Facts, missing: dict[str, int], records: Mapping[str, PartsRecord]) -> None:
        self._records, self._state = records, facts.tensors
        self._memory: dict[str, torch.Tensor] = {}
        self._pieces: dict[str, tuple[str, KeptPart]] = {}
        self._parts: dict[tuple[str, str], list[str]] = {}
        self._whole: dict[tuple[str, str], Described] = {}
        for file, record in records.items():
            layout: PartsLayout = decode(record.layout)
            for number, part in enumerate(layout.parts):
                self._pieces[f"{file}.{number}"] = file, part
                self._parts.setdefault((part.set, part.name), []).append(f"{file}.{number}")
            for stored in layout.tensors:
                name = stored.tensor.name
                self._whole[stored.set, name] = stored.tensor
                if stored.rounded:
                    self._whole[MODEL, name] = Described(name, stored.rounded, stored.tensor.shape)
        kinds = dict.fromkeys(kind for kind, _ in self._whole)
        super().__init__(place, facts.manifest(kinds), missing)

    def _find_places(self, kind: str) -> dict[str, str]:
        if kind == _PIECES:
            return {key: file for key, (file, _) in self._pieces.items()}
        return {name: "" for found, name in self._whole if found == kind}

    def tensor(self, kind: str, name: str) -> Described:
        if kind != _PIECES:
            return self._whole[kind, name]
        _, part = self._pieces[name]
        return Described(name, part.dtype, (part.numel,))

    def state_tensors(self, ranks: Ranks) -> dict[str, torch.Tensor]:
        return self._state

    def read(self, request: Read) -> None:
        file, part = self._pieces[request.name]
        if file not in self._memory:
            self._memory[file] = mapped(self.path / file, self._records[file].nbytes)
        found = self._memory[file][part.begin : part.end].view(dtype_of(part.dtype))
        request.out.copy_(found[request.start : request.start + request.out.numel()])

    def _read_all(self, requests: list[Read]) -> None:
        for request in requests:
            self.read(request)

    def fetch(self, requests: Sequence[Read], ranks: Ranks) -> None:
        reads: list[Read] = []
        ends: list[Callable[[], object]] = []
        for request in requests:
            parts = self._parts_of(request)
            if all(part.shard == request.shard for _, part in parts):
                reads += _overlaps(request, parts)
            else:
                self._through_the_whole(request, parts, reads, ends)
        super().fetch(reads, ranks)
        for end in ends:
            end()

    def _parts_of(self, request: Read) -> list[tuple[str, KeptPart]]:
        keys = self._parts.get((request.set, request.name))
        if keys is None and request.set == MODEL:  # to be rounded
            keys = self._parts.get((MASTER, request.name))
        return [(key, self._pieces[key][1]) for key in keys or ()]

    def _through_the_whole(
        self,
        request: Read,
        parts: Iterable[tuple[str, KeptPart]],
        reads: list[Read],
        ends: list[Callable[[], object]],
    ) -> None:
        """For a tensor that is divided otherwise now: bring it together, and take from that."""
        described = self.tensor(request.set, request.name)
        whole = torch.empty(described.numel, dtype=next(dtype_of(part.dtype) for _, part in parts))
        for key, part in parts:
            run = whole[part.start : part.start + part.numel]
            if part.shard is not None:
                run = torch.empty(part.numel, dtype=whole.dtype)
                ends.append(partial(put, part.shard, part.start, run, whole))
            reads.append(Read(_PIECES, key, 0, run))

        def read(begin: int, to: torch.Tensor) -> None:
            to.copy_(whole[begin : begin + to.numel()])

        def fill() -> None:
            found = whole[request.start : request.start + request.out.numel()]
            if request.shard is not None:
                found = torch.empty(request.out.numel(), dtype=whole.dtype)
                take(request.shard, request.start, found, read)
            request.out.copy_(found)

        ends.append(fill)


def _overlaps(request: Read, parts: Iterable[tuple[str, KeptPart]]) -> Iterator[Read]:
    """What each of the parts, which are divided as the request is, has of it."""
    start, end = request.start, request.start + request.out.numel()
    for key, part in parts:
        low, high = max(start, part.start), min(end, part.start + part.numel)
        if low < high:
            yield Read(_PIECES, key, low - part.start, request.out[low - start : high - start])
