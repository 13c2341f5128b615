"""Which checkpoint a command line means, what else is beside it, and how sizes are printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, DamagedError
from .. import directory as folder
from ..files import is_plain
from ..manifest import MANIFEST, Manifest, read_manifest
from ..read import Reader

# Files that only an unfinished checkpoint has without a manifest: an exported model has none of them.
OWN_FILES = ("master-*.safetensors", "optimizer.*.safetensors", "state-*.safetensors")
UNFINISHED = "a save that is going on, or was interrupted"


def locate(directory: Path, tag: str | None) -> Path:
    """The checkpoint that is meant. It may be damaged. Raises CheckpointError if there is none."""
    return candidates(directory, tag)[0]


def candidates(directory: Path, tag: str | None) -> list[Path]:
    """The checkpoints that may be meant, best first. Raises CheckpointError if there is none."""
    refuse_missing(directory)
    if tag is None and folder.has_manifest(directory):
        return [directory]
    found = [directory / name for name in folder.in_order_of_trust(directory)]
    if tag is None and found:
        return found
    if tag is not None and is_plain(tag) and folder.has_manifest(directory / tag):
        return [directory / tag]
    there = [entry.name for entry in survey(directory)]
    what = "no checkpoint in it" if tag is None else f"no checkpoint {tag!r} in it"
    beside = f"There is: {', '.join(there)}." if there else "Remedy: give a checkpoint, or the directory that has them."
    raise CheckpointError(f"{directory}: there is {what}. {beside}")


def refuse_missing(directory: Path) -> None:
    """Raise CheckpointError unless ``directory`` is a directory."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: there is no such directory. Remedy: give a checkpoint, or where they are.")


def open_reader(path: Path) -> Reader:
    """Open the checkpoint ``path`` for reading. Raises CheckpointError if any of its files is not there in full."""
    manifest = read_manifest(path)
    for name, what in folder.missing_files(path, manifest.files).items():
        raise DamagedError(f"{path / name} {what}: the checkpoint is not complete.")
    return Reader(path, manifest)


# -- what is there -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A directory that is a checkpoint, or was to become one. ``problems``: why a run would not load it as it is.

    ``nbytes``: the bytes that its files should have together.
    """

    name: str
    manifest: Manifest | None
    problems: tuple[str, ...] = ()
    nbytes: int = 0
    unfinished: bool = False


def survey(directory: Path) -> list[Candidate]:
    """All checkpoints in ``directory``, and what interrupted saves have left, by name."""
    named = folder.read_pointer(directory)
    found = []
    for path in sorted(directory.iterdir(), key=lambda path: path.name):
        if path.is_dir() and path.name.startswith(folder.TEMPORARY):
            found.append(Candidate(path.name, None, (UNFINISHED,), unfinished=True))
        elif path.is_dir() and path.name.startswith(folder.DOOMED):
            found.append(Candidate(path.name, None, ("a deletion that is going on, or was interrupted",), unfinished=True))
        elif path.is_dir() and folder.has_manifest(path):
            found.append(_entry(path))
        elif path.is_dir() and (path.name == named or any(next(path.glob(own), None) for own in OWN_FILES)):
            found.append(Candidate(path.name, None, (f"incomplete: it has no {MANIFEST}",), unfinished=True))
    return found


def _entry(path: Path) -> Candidate:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Candidate(path.name, None, (str(error),))
    wrong = folder.missing_files(path, manifest.files)
    return Candidate(
        path.name, manifest, tuple(f"{name} {what}" for name, what in wrong.items()), nbytes_of(path, manifest)
    )


def nbytes_of(path: Path, manifest: Manifest) -> int:
    """The bytes that all files of a checkpoint should have together."""
    return sum(record.nbytes for record in manifest.files.values()) + (path / MANIFEST).stat().st_size


# -- in words ----------------------------------------------------------------------------------------------------


def in_bytes(size: float) -> str:
    """``size`` bytes as ``512 B``, ``3.5 MB``, ``151 GB``: in decimal units, like those of --max-shard-size."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
