"""Read: get the tensors of a stored model by set, name and range, from the files that hold them.

[Note: files that are elsewhere]
A host that saves to a local disk has only the files that its own ranks wrote. ``open_on_all`` finds out which rank sees
which file. ``fetch`` gets what a rank cannot read itself from the first rank that can. Ranks read only the elements that
they ask for or, if those are not contiguous, the rows that enclose them (``cuts.take``).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..distributed.device import on_host
from ..distributed.tensor_shard import TensorShard
from ..errors import CheckpointError, DamagedError
from ..log import is_rank_zero, logger
from ..plan.parameter_kinds import as_bytes
from . import directory as folder
from .cuts import span, take
from .files import is_plain, read_regular
from .hub_names import Joined
from .manifest import MANIFEST, Manifest, index_name, read_manifest
from .ranks import Problem, Ranks, attempt
from .tensorfile import Described, FileRecord, Located, TensorFile, dtype_of
from .write_plan import MODEL, STATE

_AHEAD_BYTES = 64 << 20  # how far the disk may be ahead of the reader
_MOST_SMALL = 256 << 20  # the most bytes of a file that is read as a whole


@dataclass
class Read:
    """A request to fill the 1-D ``out``, of any dtype, with elements of the flattened tensor ``name`` of ``set``.

    ``start``: the first of them. With a ``shard`` they are elements of that part of the tensor, flattened.
    """

    set: str
    name: str
    start: int
    out: torch.Tensor
    shard: TensorShard | None = None

    @property
    def span(self) -> tuple[int, int]:
        """The range (begin, end) of the flattened whole tensor that encloses the elements."""
        numel = self.out.numel()
        return (self.start, self.start + numel) if self.shard is None else span(self.shard, self.start, numel)


class Reader:
    """A stored model: a checkpoint with its ``manifest``, or without one (None), any directory of safetensors weights.

    ``missing``: file -> the first rank that has it, of the files that this rank does not see. ``join``: says for the names
    of all stored weights, without a manifest, which tensors they are; {} if they are as they are stored.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest | None,
        missing: dict[str, int] | None = None,
        join: Callable[[Iterable[str]], dict[str, Joined]] | None = None,
    ) -> None:
        self.path, self.manifest, self.missing, self._join = path, manifest, missing or {}, join
        self._files: dict[str, TensorFile] = {}
        self._elsewhere: dict[str, dict[str, Located]] = {}  # headers of missing tensor files
        self._small: dict[str, bytes] = {}  # contents of missing files that are not tensor files
        self._places: dict[str, dict[str, str]] = {}  # set -> tensor -> file
        self._joined: dict[str, Joined] = {}  # weights that are stored under other names, or in parts
        self._stored_in: dict[str, str] = {}  # stored tensor -> file, of these

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def sets(self) -> list[str]:
        return [kind for kind in self.manifest.sets if kind != STATE] if self.manifest else [MODEL]

    def places(self, kind: str) -> dict[str, str]:
        """Return tensor -> file, for one set. Raises CheckpointError."""
        if kind not in self._places:
            stored = self._places[kind] = self._find_places(kind)
            joined = self._join(stored) if self._join is not None and kind == MODEL else {}
            if joined:
                self._stored_in, self._places[kind] = (
                    stored,
                    {name: stored[entry.parts[0]] for name, entry in joined.items()},
                )
                self._joined = {name: entry for name, entry in joined.items() if entry.parts != (name,)}
        return self._places[kind]

    def _find_places(self, kind: str) -> dict[str, str]:
        if kind not in (self.manifest.sets if self.manifest is not None else (MODEL,)):
            return {}
        index, single = index_name(kind), f"{kind}.safetensors"
        if index in self._small or (self.path / index).is_file():
            return self._index(kind, index)
        if self.manifest is None and (self.path / single).is_file():
            return dict.fromkeys(self._open(single).tensors, single)
        raise CheckpointError(
            f"{self.path} has no {single} and no {index}. Remedy: give the directory of a checkpoint (the one that holds "
            f"{MANIFEST}) or of a model in safetensors format."
        )

    def _index(self, kind: str, index: str) -> dict[str, str]:
        """Return tensor -> file, as ``index`` says.

        Raises DamagedError if a file is not in the directory itself or, with a manifest, is not a file of the set.
        """
        try:
            places: dict[str, str] = json.loads(self.small_file(index))["weight_map"]
            for file in set(places.values()):
                if not is_plain(file) or (self.manifest is not None and file not in self.manifest.sets[kind]):
                    raise ValueError(f"{file!r:.80} is no file of the set {kind!r}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{self.path / index} is no readable index ({error!s:.200}).") from error
        return places

    def small_file(self, name: str) -> bytes:
        """The content of a small file, checked against the manifest if there is one."""
        if name in self._small:
            return self._small[name]
        path, record = self.path / name, self._record(name)
        try:
            data = read_regular(path, _MOST_SMALL, self._home)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}.") from error
        if record is not None:
            record.check(data, path)
        return data

    def _record(self, name: str) -> FileRecord | None:
        """What the manifest says of a file; None without a manifest. Raises DamagedError if the manifest lacks it."""
        if self.manifest is None:
            return None
        if name not in self.manifest.files:
            raise DamagedError(f"{self.path / name} cannot be checked: {MANIFEST} has no checksums of it.")
        return self.manifest.files[name]

    @property
    def _home(self) -> Path | None:
        """The directory in which a checkpoint's files must be; None for weights alone, which may be links to elsewhere."""
        return self.path if self.manifest is not None else None

    def tensor(self, kind: str, name: str) -> Described:
        """Dtype and shape of a tensor."""
        joined = _checked(self, name) if kind == MODEL else None
        if joined is not None:
            parts = [self._open(self._stored_in[part]).tensors[part] for part in joined.parts]
            other = next((part for part in parts if (part.dtype, part.shape) != (parts[0].dtype, parts[0].shape)), None)
            if other is not None:
                raise CheckpointError(
                    f"{other.name!r} in {self.path} has dtype {other.dtype} and shape {list(other.shape)}, but "
                    f"{parts[0].name!r}, beside which it belongs in {name!r}, {parts[0].dtype} and {list(parts[0].shape)}."
                )
            return Described(name, parts[0].dtype, joined.shape(parts[0].shape))
        file = self.places(kind)[name]
        header = self._elsewhere[file] if file in self.missing else self._open(file).tensors
        if name not in header:
            raise DamagedError(f"{self.path / file} does not hold {name!r}, although the index of {kind!r} says so.")
        return header[name]

    def state_tensors(self, ranks: Ranks) -> dict[str, torch.Tensor]:
        """The tensors that the manifest refers to. Collective: ranks that lack the file get them from another rank."""
        assert self.manifest is not None
        lacking = ranks.gather(any(file in self.missing for file in self.manifest.sets.get(STATE, [])))
        found, problem = (None, None) if lacking[ranks.rank] else attempt(self._state_tensors)
        ranks.agree(problem)
        if any(lacking):
            first = lacking.index(False)
            found = ranks.gather(found if ranks.rank == first else None)[first]
        return found or {}

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        assert self.manifest is not None
        found = {}
        for file in self.manifest.sets.get(STATE, []):
            opened = self._open(file)
            for name, tensor in opened.tensors.items():
                flat = torch.empty(tensor.numel, dtype=dtype_of(tensor.dtype))
                opened.read(name, 0, flat)
                found[name] = flat.view(tensor.shape)
        return found

    def _open(self, name: str) -> TensorFile:
        if name not in self._files:
            self._files[name] = TensorFile(self.path / name, self._record(name), self._home)
        return self._files[name]

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, request: Read) -> None:
        """Fill ``request.out`` from a file that this rank sees.

        To cast, or to copy to a device, takes a temporary CPU tensor of as many elements.
        """
        out, read = request.out, partial(_read_flat, self, request)
        dtype = dtype_of(self.tensor(request.set, request.name).dtype)
        in_place = out.dtype == dtype and on_host(out) and out.is_contiguous()
        found = out if in_place else torch.empty(out.numel(), dtype=dtype)
        if request.shard is None:
            read(request.start, found)
        else:
            take(request.shard, request.start, found, read)
        if not in_place:
            out.copy_(found)

    def fetch(self, requests: Sequence[Read], ranks: Ranks) -> None:
        """Do all reads, with the help of other ranks where files are missing. Collective. Raises CheckpointError."""
        here = [r for r in requests if self.places(r.set)[r.name] not in self.missing]
        away = [r for r in requests if self.places(r.set)[r.name] in self.missing]
        ranks.agree(attempt(lambda: self._read_all(here))[1])
        self._fetch_away(away, ranks)

    def _read_all(self, requests: list[Read]) -> None:
        """Do the reads in the order of the files, with the disk some way ahead."""
        ordered = sorted(requests, key=self._position)
        asked = ahead = 0
        for request in ordered:
            while asked < len(ordered) and ahead < _AHEAD_BYTES:
                ahead += self._expect(ordered[asked])
                asked += 1
            self.read(request)
            ahead -= self._size(request)

    def _size(self, request: Read) -> int:
        begin, end = request.span
        return (end - begin) * self._dtype(request).itemsize

    def _dtype(self, request: Read) -> torch.dtype:
        return dtype_of(self.tensor(request.set, request.name).dtype)

    def _expect(self, request: Read) -> int:
        """Let the system begin to read in the background. Return the number of bytes."""
        itemsize = self._dtype(request).itemsize
        for file, name, begin, numel in _stored(self, request, *request.span):
            file.expect(name, begin, numel * itemsize)
        return self._size(request)

    def _position(self, request: Read) -> tuple[str, int]:
        """Where a request is in the files, to sort by: neighbouring requests share blocks."""
        place = self.places(request.set)[request.name]
        for file, name, begin, _ in _stored(self, request, *request.span):
            tensor = file.tensors[name]
            return place, tensor.begin + begin * dtype_of(tensor.dtype).itemsize
        return place, 0

    def _fetch_away(self, away: list[Read], ranks: Ranks) -> None:
        wanted = [
            (r.set, r.name, r.start, r.shard, r.out.numel(), self._dtype(r), self.missing[self.places(r.set)[r.name]])
            for r in away
        ]
        orders = ranks.gather(wanted)
        if not any(orders):
            return
        problems: list[Problem] = []

        def serve() -> None:
            for rank, order in enumerate(orders):
                for tag, (kind, name, start, shard, numel, dtype, provider) in enumerate(order):
                    if provider != ranks.rank:
                        continue
                    part = torch.zeros(numel, dtype=dtype)
                    problem = attempt(partial(self.read, Read(kind, name, start, part, shard)))[1]
                    problems.extend([problem] if problem else [])
                    ranks.send(part, rank, tag).wait()

        server = threading.Thread(target=serve, name="zerorun checkpoint reader")
        server.start()
        for tag, request in enumerate(away):
            part = torch.empty(request.out.numel(), dtype=self._dtype(request))
            ranks.receive(part, wanted[tag][-1], tag)
            request.out.copy_(part)
        server.join()
        ranks.agree(problems[0] if problems else None)

    def share(self, ranks: Ranks) -> None:
        """Tell ranks what is in files that they do not see. Collective. Raises the same CheckpointError on all ranks."""
        needed = set().union(*ranks.gather(set(self.missing.items())))
        mine = sorted(file for file, provider in needed if provider == ranks.rank)

        def contents() -> tuple[dict[str, dict[str, Located]], dict[str, bytes]]:
            """(headers of the tensor files, contents of the other files)"""
            headers = {file: self._open(file).tensors for file in mine if file.endswith(".safetensors")}
            return headers, {file: self.small_file(file) for file in mine if file not in headers}

        found, problem = attempt(contents)
        ranks.agree(problem)
        for headers, small in ranks.gather(found or ({}, {})):
            self._elsewhere.update(headers)
            self._small.update(small)

    def check_small_files(self) -> None:
        """Raise DamagedError if a small file that this rank sees is not as it was written: some are not read otherwise."""
        assert self.manifest is not None
        for file in self.manifest.files:
            if not file.endswith(".safetensors") and file not in self.missing:
                self.small_file(file)


def _checked(reader: Reader, name: str) -> Joined | None:
    """What is stored of a weight, if it is under another name or in parts. Raises CheckpointError if that is unclear."""
    joined = reader._joined.get(name)
    if joined is None or (joined.each and not joined.problem):
        return joined
    if joined.problem:
        remedy = "Remedy: give a directory that has all files of the model, and each tensor once."
        raise CheckpointError(f"{reader.path} {joined.problem}. {remedy}")
    one, *others = joined.parts
    for other in others:
        if not _have_same(reader, one, other):
            raise CheckpointError(
                f"{reader.path} has other values of {other!r} than of {one!r}, and both are {name!r} in this model. "
                "Remedy: take from the files the one that is not meant."
            )
    reader._joined[name] = Joined((one,))
    return reader._joined[name]


def _have_same(reader: Reader, *names: str) -> bool:
    """True if two stored tensors are the same."""
    found = []
    for name in names:
        opened = reader._open(reader._stored_in[name])
        tensor = opened.tensors[name]
        flat = torch.empty(tensor.numel, dtype=dtype_of(tensor.dtype))
        opened.read(name, 0, flat)
        found.append((tensor.dtype, tensor.shape, as_bytes(flat)))
    return found[0][:2] == found[1][:2] and torch.equal(found[0][2], found[1][2])


def _read_flat(reader: Reader, request: Read, start: int, out: torch.Tensor) -> None:
    """Fill ``out`` from element ``start`` of the flattened whole tensor."""
    at = 0
    for file, name, begin, numel in _stored(reader, request, start, start + out.numel()):
        file.read(name, begin, out[at : at + numel])
        at += numel


def _stored(reader: Reader, request: Read, low: int, high: int) -> Iterator[tuple[TensorFile, str, int, int]]:
    """Yield (file, tensor, first element, number) of what is stored of the elements of the flattened whole tensor."""
    joined = reader._joined.get(request.name) if request.set == MODEL else None
    if joined is None:
        yield reader._open(reader.places(request.set)[request.name]), request.name, low, high - low
        return
    each = reader.tensor(request.set, request.name).numel // len(joined.parts)
    for number in range(low // max(each, 1), -(-high // max(each, 1))):
        part, begin = joined.parts[number], max(low - number * each, 0)
        yield reader._open(reader._stored_in[part]), part, begin, min(high - number * each, each) - begin


# -- opening -----------------------------------------------------------------------------------------------------


def candidates(ranks: Ranks, directory: Path) -> list[str]:
    """The tags that may be loaded, best first. Collective.

    Disks of single hosts may have other ones: a host that was away while the others went on has none of theirs.
    """
    places = ranks.volumes(directory)
    orders = ranks.gather(folder.times_in_order_of_trust(directory) if places[ranks.rank] == ranks.rank else {})
    names = folder.merged(orders)
    firsts = {rank: next(iter(order)) for rank, order in enumerate(orders) if order}
    if len(set(firsts.values())) > 1 and is_rank_zero():
        told = ", ".join(f"that of rank {rank} {name}" for rank, name in firsts.items())
        logger.warning("%s: disks name other checkpoints as the last: %s. %s is tried first.", directory, told, names[0])
    return names


def age_of(ranks: Ranks, directory: Path, tag: str) -> tuple[int, str]:
    """(the optimizer steps that a checkpoint has, when it was saved); (-1, "") if nobody can read that. Collective."""
    manifest = attempt(partial(read_manifest, directory / tag))[0]
    return max(ranks.gather((-1, "") if manifest is None else (manifest.global_steps, manifest.saved_at)))


def open_on_all(ranks: Ranks, directory: Path, tag: str) -> Reader:
    """Open a checkpoint on every rank. Collective. Raises CheckpointError if it is damaged, or a file is on no rank.

    A save that was to replace an older checkpoint of the tag may have been killed between its steps, on some disks earlier
    than on others. Then there are versions of it under two names. The newest complete one is opened.
    """
    here: dict[str, tuple[Path, Manifest]] = {}  # time of saving -> version
    problems = []
    for name in (tag, f"{folder.REPLACED}{tag}", f"{tag}{folder.OLD}"):
        path = directory / name
        manifest, problem = attempt(partial(read_manifest, path))
        if manifest is not None and (name == tag or manifest.tag == tag):  # otherwise somebody has given it this name
            here.setdefault(manifest.saved_at, (path, manifest))
        elif problem is not None and os.path.exists(path / MANIFEST):
            problems.append(problem)
    found = ranks.gather((list(here), problems, os.path.exists(directory / tag)))
    versions = sorted({version for known, _, _ in found for version in known}, reverse=True)
    failure = next((problem.error() for _, others, _ in found for problem in others), None)
    if not versions and failure is None and not any(exists for _, _, exists in found):
        names = ranks.first(lambda: folder.newest_first(directory))
        older = " and older ones" if len(names) > 5 else ""
        there = f"There are {', '.join(names[:5])}{older}" if names else "There is none"
        remedy = "Remedy: pass the name of one that is there, or none for the newest."
        raise CheckpointError(f"there is no checkpoint {tag!r} in {directory}. {there}. {remedy}")
    for version in versions:
        path, manifest = here.get(version, (directory / tag, None))
        try:
            return _open_version(ranks, path, manifest)
        except DamagedError as error:
            failure = failure or error
    if failure is None:
        refuse_foreign(ranks, directory / tag)
    raise failure or DamagedError(f"{directory / tag} is no complete checkpoint: there is no {MANIFEST} on any rank.")


def refuse_foreign(ranks: Ranks, path: Path) -> None:
    """Raise CheckpointError if another runtime has saved into the directory ``path``. Collective."""
    found = next((told for told in ranks.gather(_importer(path)) if told is not None), None)
    if found is not None:
        runtime, command = found
        raise CheckpointError(
            f"{path} is a checkpoint of {runtime}, in a format of its own. Remedy: zerorun-checkpoint {command} {path} "
            'NEW, and then engine.load_checkpoint("NEW", allow_missing=["rng", "data"]).'
        )


def _importer(path: Path) -> tuple[str, str] | None:
    """(the runtime that has saved into ``path``, the command that imports that); None for any other directory."""
    if next(path.glob("*_model_states.pt"), None) is not None:
        return "DeepSpeed", "import-deepspeed"
    return ("torch.distributed.checkpoint", "import-dcp") if (path / ".metadata").is_file() else None


def _open_version(ranks: Ranks, path: Path, manifest: Manifest | None) -> Reader:
    """Open one version on every rank. Collective. ``manifest``: None on ranks that do not see this version."""
    known = ranks.gather(manifest is not None)
    sees = manifest is not None  # if not, another version may be there, whose files have the same names and sizes
    if not all(known):
        first = known.index(True)
        given = ranks.gather(manifest if ranks.rank == first else None)[first]
        manifest = manifest or given
    assert manifest is not None
    places = ranks.volumes(path)
    leads = places[ranks.rank] == ranks.rank
    here = folder.missing_files(path, manifest.files) if sees else dict.fromkeys(manifest.files, "is not here")
    wrong = ranks.gather(here if leads else {})
    missing = {name: _first_with(name, places, wrong) for name in wrong[places[ranks.rank]]}
    lost = {name: what for found in wrong for name, what in found.items() if _first_with(name, places, wrong) < 0}
    if lost:
        name, what = next(iter(lost.items()))
        raise DamagedError(f"{path / name} {what}: the checkpoint is not complete.")
    reader = Reader(path, manifest, missing)
    ranks.agree(attempt(reader.check_small_files)[1] if leads else None)
    if any(wrong):
        reader.share(ranks)
    return reader


def _first_with(name: str, places: Iterable[int], wrong: Sequence[dict[str, str]]) -> int:
    """The first rank that has the file; -1 if none has."""
    return next((leader for leader in sorted(set(places)) if name not in wrong[leader]), -1)
