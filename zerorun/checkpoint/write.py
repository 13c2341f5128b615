"""Write: make the files of a checkpoint from a plan, and commit them, so that all ranks' files appear as one checkpoint.

[Note: who does what]
Every rank writes the files that the plan assigns to it. Ranks that see the same directory form a *volume*: all ranks if it
is on a shared file system, the ranks of one host if it is on a local disk. The first rank of a volume is its leader. It
makes the temporary directory, writes the small files and the manifest, which are the same on every volume, and carries out
the steps of directory.py. Which ranks see the same directory is not configured: the ranks find out by looking.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ..errors import CheckpointError, DamagedError
from . import directory as folder
from .files import HeldDirectory, mark
from .gather import Collector
from .manifest import MANIFEST, Manifest, index_name
from .ranks import Ranks, attempt
from .stream import FileWriter, WriteQueue, write_small
from .tensorfile import Described, FileRecord, dtype_of, header_bytes, memory_of
from .write_plan import WritePlan, is_single


@dataclass
class Destination:
    """Where a checkpoint goes, and what happens to older ones."""

    directory: Path
    tag: str
    latest: bool = True
    keep: int | None = None
    prune: bool = True  # False for an export: the directory is not one of checkpoints
    check: Callable[[str], None] = field(default=lambda point: None)  # called with the name of a point for tests to act at

    @property
    def temporary(self) -> Path:
        return self.directory / f"{folder.TEMPORARY}{self.tag}"


def place(target: Destination, name: str) -> Path:
    """The path at which to write the file ``name``. An adapter's file may be in a folder of its own: make that folder."""
    path = target.temporary / name
    path.parent.mkdir(exist_ok=True)
    return path


def sync_folders(target: Destination) -> None:
    """Make the names in folders inside the temporary directory durable."""
    for path in target.temporary.iterdir():
        if path.is_dir():
            folder.sync_directory(path)


def write_tensors(plan: WritePlan, collector: Collector, rank: int, target: Destination) -> dict[str, FileRecord]:
    """Write the files of this rank, durably. What fails is raised only when no rank is waiting for this one any more."""
    output = _Output(plan, target)
    problem: Exception | None = None
    try:
        for task in plan.tasks:
            if task.writer != rank:
                continue
            for stretch in collector.stretches(task):
                if problem is not None:
                    continue  # another rank may be sending it: receive it all the same
                try:
                    if task.file:
                        output.write(task.file, stretch)
                    if task.rounded is not None:
                        output.write(task.rounded_file, stretch.to(dtype_of(task.rounded.dtype)))
                except Exception as error:  # not of a disk only
                    problem = error.with_traceback(None)  # whose frames would keep buffers alive
        collector.finish()
        if problem is not None:
            raise problem
        own = [task for task in plan.tasks if task.writer == rank]
        return output.close([name for task in own for name in (task.file, task.rounded_file) if name])
    finally:
        output.abandon()


class _Output:
    """The open files of one rank."""

    def __init__(self, plan: WritePlan, target: Destination) -> None:
        self._tensors, self._target = plan.files(), target
        self._queue = WriteQueue()
        self._open: dict[str, FileWriter] = {}

    def write(self, name: str, stretch: torch.Tensor) -> None:
        if name not in self._open:
            self._open[name] = FileWriter(place(self._target, name), self._queue)
            self._open[name].write(header_bytes(self._tensors[name], {}))
        self._open[name].write(memory_of(stretch))
        self._target.check("write")

    def close(self, expected: list[str]) -> dict[str, FileRecord]:
        empty = torch.empty(0)
        for name in expected:  # empty tensors have no stretch: their file may not be open yet
            self.write(name, empty)
        records = {}
        for name, writer in self._open.items():
            self._target.check("sync")
            records[name] = writer.close()
        return records

    def abandon(self) -> None:
        for writer in self._open.values():
            writer.abandon()
        self._queue.close()


def index_files(plan: WritePlan) -> dict[str, bytes]:
    """For each set, the index that Hugging Face's loaders know: it says which file holds which tensor."""
    made = {}
    for kind, files in plan.sets.items():
        if is_single(kind):
            continue
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
        weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        made[index_name(kind)] = json.dumps(content, indent=1).encode()
    return made


def small_tensor_file(tensors: dict[str, torch.Tensor]) -> bytes:
    """The bytes of a tensor file that holds ``tensors``."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    described = [Described.of(name, tensor) for name, tensor in kept.items()]
    return b"".join([header_bytes(described, {}), *map(memory_of, kept.values())])


# -- commit ------------------------------------------------------------------------------------------------------


def find_volumes(ranks: Ranks, target: Destination) -> list[int]:
    """For each rank, the leader of its volume. Raises CheckpointError on all ranks if one cannot write to the directory."""
    places = ranks.volumes(target.directory)
    probe = target.directory / f"{folder.TEMPORARY}{target.tag}.rank"
    leads = places[ranks.rank] == ranks.rank

    def leave_mark() -> None:
        folder.make_directory(target.directory)
        mark(probe.with_suffix(f".rank{ranks.rank}"))

    try:
        ranks.agree(attempt(leave_mark)[1] if leads else None)
        leaders = sorted(set(places))
        seen = [other for other in leaders if leads and probe.with_suffix(f".rank{other}").exists()]
        first = [min(found, default=0) for found in ranks.gather(seen)]
    finally:
        if leads:
            with contextlib.suppress(OSError):
                probe.with_suffix(f".rank{ranks.rank}").unlink()
    return [first[place] for place in places]


def commit(
    ranks: Ranks,
    target: Destination,
    write: Callable[[], dict[str, FileRecord]],
    finish: Callable[[dict[str, FileRecord]], tuple[dict[str, bytes], Manifest | None]],
) -> Path:
    """Write a checkpoint on all ranks: all of it, or nothing if any rank has a problem. Collective.

    ``write`` writes this rank's files into the temporary directory, and returns their records. ``finish`` is called on
    rank 0 with the records of all files, and returns the small files and the manifest (None for an export, which has none).
    Raises the same CheckpointError on all ranks. It names the first rank that had a problem.
    """
    leaders = find_volumes(ranks, target)
    leads = leaders[ranks.rank] == ranks.rank

    def on_leader(act: Callable[[], object]) -> None:
        ranks.agree(attempt(act)[1] if leads else None)

    held, problem = attempt(lambda: _begin(target)) if leads else (None, None)
    try:
        ranks.agree(problem)
        records, problem = attempt(write)
        written = ranks.gather(records or {})
        ranks.agree((attempt(partial(folder.require_held, held))[1] if held else None) or problem)
        small, manifest = _finish_on(leaders, ranks, lambda: finish({n: found[n] for found in written for n in found}))
        here = {name: found[name] for r, found in enumerate(written) if leaders[r] == ranks.rank for name in found}
        on_leader(lambda: _complete(target, here, small, manifest))
        on_leader(lambda: _appear(target, held))
    except BaseException:
        if held is not None and held.is_there():
            shutil.rmtree(held.path, ignore_errors=True)
        raise
    finally:
        if held is not None:
            held.release()
    on_leader(lambda: _tidy(target, "" if manifest is None else manifest.saved_at))
    if target.prune:
        _drop_replaced(ranks, target.directory, leads)
    return target.directory / target.tag


_Finished = tuple[dict[str, bytes], Manifest | None]


def _finish_on(leaders: list[int], ranks: Ranks, finish: Callable[[], _Finished]) -> _Finished:
    """What ``finish`` returns on rank 0, on all leaders. Collective. Ranks that write no small files do not get them."""
    if any(leaders):
        return ranks.first(finish)
    found, problem = attempt(finish) if ranks.rank == 0 else (None, None)
    ranks.agree(problem)
    return found or ({}, None)


def _drop_replaced(ranks: Ranks, directory: Path, leads: bool) -> None:
    """Delete the versions that killed saves, of any tag, had replaced. Collective.

    A replaced version stays unless every volume has the same new version of its tag.
    """
    found = attempt(lambda: folder.replaced(directory))[0] if leads else None
    tags = sorted({tag for tags in ranks.gather(found) for tag in tags or ()})
    if not tags:
        return
    known = ranks.gather([folder.version_of(directory / tag) for tag in tags] if leads else None)
    versions = zip(*(times for times in known if times), strict=True)
    done = [tag for tag, times in zip(tags, versions, strict=True) if len(set(times)) == 1 and times[0] is not None]
    ranks.agree(attempt(lambda: folder.drop_replaced(directory, done))[1] if leads else None)


def _complete(
    target: Destination, written: dict[str, FileRecord], small: dict[str, bytes], manifest: Manifest | None
) -> None:
    """Check that the files of the volume's ranks are there in full; write the small files and, last, the manifest."""
    wrong = folder.missing_files(target.temporary, written)
    if wrong:
        name, what = next(iter(wrong.items()))
        raise CheckpointError(f"{target.temporary / name} was written, but {what}: the file system loses data.")
    for name, data in small.items():
        target.check("small")
        record = write_small(place(target, name), data)
        if manifest is not None:
            manifest.files[name] = record
    sync_folders(target)
    if manifest is not None:
        target.check("manifest")
        write_small(target.temporary / MANIFEST, _readable(manifest).encode())


def _readable(manifest: Manifest) -> str:
    """The manifest's text. Raises CheckpointError if no load could read it."""
    text = manifest.to_text()
    try:
        Manifest.from_text(text, Path(MANIFEST))
    except DamagedError as error:
        raise CheckpointError(f"nothing was saved, since nothing could load it: {error}") from error
    return text


def _begin(target: Destination) -> HeldDirectory:
    if target.latest:
        folder.refuse_strange_pointer(target.directory)
    return folder.begin(target.directory, target.tag, replace=target.prune)


def _appear(target: Destination, held: HeldDirectory | None) -> None:
    target.check("publish")
    if held is not None:
        folder.require_held(held)
    folder.publish(target.directory, target.tag)


def _tidy(target: Destination, saved_at: str) -> None:
    if target.latest:
        target.check("latest")
        folder.point_latest(target.directory, target.tag, saved_at)
    if target.prune:
        target.check("prune")
        folder.prune(target.directory, target.tag, target.keep)
