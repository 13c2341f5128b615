"""``zerorun-checkpoint verify``: check a checkpoint, every byte against its manifest, and its parts against each other."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, DamagedError
from ...log import counted
from ...ops.state_format import SCALE
from ..files import open_regular, read_regular
from ..manifest import MANIFEST, Manifest, index_name, read_manifest
from ..quantised_states import CODES, scale_shape
from ..tensorfile import BLOCK_BYTES, Described, FileRecord, TensorFile
from ..write_plan import BUFFER, MASTER, MODEL, OPTIMIZER, RESIDUAL, STATE
from .choose import Candidate, in_bytes, locate, survey

_SHOWN_RANGES = 8
_PROGRESS_SECONDS = 0.2


def run(args: argparse.Namespace) -> tuple[int, Iterator[str]]:
    """The exit status and the lines to print. Raises CheckpointError if there is nothing to check."""
    directory = Path(args.dir)
    chosen = [] if args.all else [locate(directory, args.tag)]
    beside = survey(directory) if args.all or chosen != [directory] else []
    if args.all and not beside:
        chosen = [locate(directory, None)]  # DIR is a checkpoint itself, or there is none
    paths = chosen or [directory / entry.name for entry in beside if not entry.unfinished]
    unfinished = [entry for entry in beside if entry.unfinished and directory / entry.name not in paths]
    verdicts = [check(path) for path in paths]
    failed = any(verdict.problems for verdict in verdicts) or (args.all and bool(unfinished))
    return int(failed), _lines(verdicts, unfinished, "" if args.all else "note: ")


def _lines(verdicts: list[Verdict], unfinished: list[Candidate], prefix: str) -> Iterator[str]:
    for verdict in verdicts:
        yield f"{verdict.path}: {'DAMAGED' if verdict.problems else f'good ({verdict.summary})'}"
        yield from (f"  {problem}" for problem in verdict.problems)
    for entry in unfinished:
        yield f"{prefix}{entry.name}: {entry.problems[0]}"


@dataclass
class Verdict:
    """What was found out about one checkpoint. ``problems`` is empty if it is good."""

    path: Path
    summary: str = ""
    problems: list[str] = field(default_factory=list)


def check(path: Path) -> Verdict:
    """Check one checkpoint, a block of a file at a time. Raises CheckpointError if it is of a later version."""
    verdict = Verdict(path)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        if not isinstance(error, DamagedError) and (path / MANIFEST).is_file():
            raise  # of a later version: this one cannot tell whether it is damaged
        verdict.problems.append(str(error))
        return verdict
    total = sum(record.nbytes for record in manifest.files.values())
    progress = _Progress(path.name, total)
    bad = set()
    for name, record in manifest.files.items():
        problems = [f"{name}: {problem}" for problem in file_problems(path / name, record, progress)]
        if problems:
            bad.add(name)
            verdict.problems += problems
    progress.end()
    try:
        agreement = _Agreement(path, manifest, bad)
    except CheckpointError as error:
        verdict.problems.append(str(error))
        return verdict
    verdict.problems += agreement.problems()
    tensors = sum(len(agreement.tensors(kind)) for kind in agreement.headers)
    files = counted(len(manifest.files) + 1, "file")
    verdict.summary = f"{files}, {in_bytes(total)}, {counted(tensors, 'tensor')} in {counted(len(manifest.sets), 'set')}"
    if manifest.frozen_base:
        verdict.summary += f"; {counted(len(manifest.frozen_base), 'frozen weight')} left out"
    return verdict


class _Progress:
    """A line on the terminal, if there is one, that says how much has been read."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._shown = 0.0 if sys.stderr.isatty() else float("inf")

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if time.monotonic() - self._shown > _PROGRESS_SECONDS:
            self._shown = time.monotonic()
            text = f"{self._what}: {in_bytes(self._done)} of {in_bytes(self._total)}"
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Erase the line."""
        if 0 < self._shown < float("inf"):
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# -- bytes -------------------------------------------------------------------------------------------------------


def file_problems(path: Path, record: FileRecord, progress: _Progress) -> Iterator[str]:
    """Yield what in a file is not as it was written, with the bytes concerned: from 0 on, ranges without their end."""
    try:
        with open(open_regular(path, path.parent), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            ranges = _damaged_ranges(file, record, progress)
    except OSError as error:
        yield f"cannot be read: {error.strerror}"
        return
    if ranges:
        shown = ", ".join(f"{begin}..{end}" for begin, end in ranges[:_SHOWN_RANGES])
        more = (
            f" and {len(ranges) - _SHOWN_RANGES} more ranges up to {ranges[-1][1]}" if len(ranges) > _SHOWN_RANGES else ""
        )
        yield f"bytes {shown}{more} do not have the checksum that was written"
    if size != record.nbytes:
        lacking = f": bytes {size}..{record.nbytes} are missing" if size < record.nbytes else ""
        yield f"has {size} bytes instead of {record.nbytes}{lacking}"


def _damaged_ranges(file: FileIO, record: FileRecord, progress: _Progress) -> list[tuple[int, int]]:
    """(begin, end) of the stretches whose blocks do not have their checksums, as far as the file goes."""
    ranges: list[tuple[int, int]] = []
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for block, crc in enumerate(record.crcs):
        begin = block * BLOCK_BYTES
        data = buffer[: min(BLOCK_BYTES, record.nbytes - begin)]
        filled = 0
        while filled < len(data) and (count := file.readinto(data[filled:])):
            filled += count
        progress.add(filled)
        if filled < len(data):
            break
        if zlib.crc32(data) != crc:
            joined = ranges.pop()[0] if ranges and ranges[-1][1] == begin else begin
            ranges.append((joined, begin + len(data)))
    return ranges


# -- agreement ---------------------------------------------------------------------------------------------------


class _Agreement:
    """Finds out whether manifest, indexes and headers tell of the same tensors. ``bad``: damaged files, which are skipped.

    Raises CheckpointError if a file is as it was written, but is no tensor file.
    """

    def __init__(self, path: Path, manifest: Manifest, bad: set[str]) -> None:
        self.path, self.manifest = path, manifest
        self.headers: dict[str, dict[str, dict[str, Described]]] = {}  # set -> file -> tensors; only undamaged sets
        for kind, files in manifest.sets.items():
            if not bad & {*files, index_name(kind)} and set(files) <= set(manifest.files):
                self.headers[kind] = {name: self._header(name) for name in files}

    def _header(self, name: str) -> dict[str, Described]:
        with TensorFile(self.path / name, self.manifest.files[name], self.path) as file:
            return dict(file.tensors)

    def problems(self) -> Iterator[str]:
        """One line for each disagreement."""
        for kind, files in self.manifest.sets.items():
            for name in files:
                if name not in self.manifest.files:
                    yield f"{MANIFEST}: {name} of the set {kind} has no checksums"
        for kind in self.headers:
            if kind != STATE:
                yield from self._index_problems(kind)
        if MODEL in self.headers:
            yield from self._weight_problems(self.tensors(MODEL))
        for kind in self.headers:
            if kind not in (MODEL, STATE, RESIDUAL, BUFFER):
                yield from self._state_problems(kind, self.tensors(kind))
        if STATE in self.headers or STATE not in self.manifest.sets:
            yield from self._reference_problems()

    def tensors(self, kind: str) -> dict[str, Described]:
        """The tensors of one set, as its headers describe them."""
        return {name: tensor for tensors in self.headers.get(kind, {}).values() for name, tensor in tensors.items()}

    def _index_problems(self, kind: str) -> Iterator[str]:
        index = index_name(kind)
        if index not in self.manifest.files:
            yield f"{MANIFEST}: the index {index} is not among the files"
            return
        try:
            text = read_regular(self.path / index, self.manifest.files[index].nbytes, self.path)
            places: dict[str, str] = {name: str(file) for name, file in json.loads(text)["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
            yield f"{index}: is no index"
            return
        held = self.headers[kind]
        for name, file in places.items():
            if name not in held.get(file, ()):
                yield f"{index}: {name} is not in {file}"
        for file, tensors in held.items():
            for name in tensors:
                if places.get(name) != file:
                    yield f"{file}: holds {name}, and {index} does not say so"

    def _weight_problems(self, stored: Mapping[str, Described]) -> Iterator[str]:
        manifest = self.manifest
        left_out = manifest.frozen_base or {}
        for name, entry in manifest.parameters.items():
            if name not in stored:
                if name not in left_out:
                    yield f"{MODEL}: the parameter {name} is missing"
                continue
            found = stored[name]
            if (found.dtype, list(found.shape)) != (entry["dtype"], entry["shape"]):
                said = f"{entry['dtype']} {entry['shape']}"
                yield f"{MODEL}: {name} is {found.dtype} {list(found.shape)}, and {said} in {MANIFEST}"
        for name, kept in manifest.aliases.items():
            if kept not in stored and kept not in left_out:
                yield f"{MODEL}: {kept}, which {name} is tied to, is missing"

    def _state_problems(self, kind: str, stored: Mapping[str, Described]) -> Iterator[str]:
        parameters = self.manifest.parameters
        for name, tensor in stored.items():
            if name not in parameters:
                yield f"{kind}: {name} is no parameter in {MANIFEST}"
            elif kind == MASTER and list(tensor.shape) != parameters[name]["shape"]:
                yield f"{kind}: {name} has the shape {list(tensor.shape)}, and {parameters[name]['shape']} in {MANIFEST}"
            elif tensor.dtype == CODES and f"{kind}{SCALE}" in self.manifest.sets:
                yield from self._scale_problems(kind, tensor)
        if kind == MASTER:  # all weights of one dtype that have elements have masters, or none has
            dtypes = {parameters[name]["dtype"] for name in stored if name in parameters}
            for name, entry in parameters.items():
                trained = entry["group"] is not None and 0 not in entry["shape"]
                if trained and entry["dtype"] in dtypes and name not in stored:
                    yield f"{kind}: {name} is missing"

    def _scale_problems(self, kind: str, codes: Described) -> Iterator[str]:
        """What is wrong with the scales of a state that is stored as ``codes``."""
        scale, wanted = self.tensors(f"{kind}{SCALE}").get(codes.name), scale_shape(codes.shape)
        if scale is None:
            yield f"{kind}{SCALE}: {codes.name} is missing"
        elif scale.shape != wanted:
            yield f"{kind}{SCALE}: {codes.name} has the shape {list(scale.shape)}, and not {list(wanted)}"

    def _reference_problems(self) -> Iterator[str]:
        manifest, stored = self.manifest, self.tensors(STATE)
        optimizer = manifest.optimizer or {"groups": [], "scalars": {}}
        values = (manifest.rng, manifest.data, manifest.scheduler, manifest.client_state, manifest.extra_state)
        for name in _references([*values, manifest.client_states, optimizer["groups"]]):
            if name not in stored:
                yield f"{STATE}: {name} is missing"
        for key, entries in optimizer["scalars"].items():
            for name in (name for entry in entries for name in entry["names"]):
                if name not in manifest.parameters:
                    yield f"{OPTIMIZER}{key}: {name} is no parameter in {MANIFEST}"


def _references(value: Any) -> Iterator[str]:
    """Yield the names of the tensors that an encoded value refers to."""
    if isinstance(value, dict) and value.get("$") in ("tensor", "ndarray"):
        yield value["name"]
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _references(item)
