"""The directory of checkpoints: tags, ``latest``, and the steps that make a new checkpoint appear whole or not at all.

[Note: how a checkpoint appears]
    1. everything is written to ``.saving.TAG`` and made durable, the manifest last
    2. an older checkpoint of the same tag is renamed to ``TAG.old``
    3. ``.saving.TAG`` is renamed to ``TAG``
    4. ``latest`` is replaced by a file that names TAG; then ``TAG.old`` and what is more than enough is deleted

After each of them, and inside of each, the newest complete checkpoint is a directory with a manifest: ``TAG``, ``TAG.old``
or the one before. A directory whose name begins with ``.saving.`` is never chosen. To delete one, it is first renamed to
``.deleting.TAG``, so that half a directory never looks like a whole one; what an interrupted deletion leaves, the next
save deletes.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from ..errors import CheckpointError
from ..log import logger
from .manifest import MANIFEST, read_manifest
from .plan import STATE_FILE
from .tensorfile import FileRecord

LATEST = "latest"
TEMPORARY = ".saving."
DOOMED = ".deleting."
# Seconds after which an interrupted save of another tag is deleted. Before, another process may be writing it.
_STALE_S = 900
OLD = ".old"


def check_tag(tag: str) -> str:
    """``tag`` if it can be the name of a directory. Raises CheckpointError."""
    plain = tag == tag.strip() and "/" not in tag and "\0" not in tag
    if not plain or tag in ("", ".", "..", LATEST) or tag.startswith((TEMPORARY, DOOMED)) or tag.endswith(OLD):
        raise CheckpointError(
            f"tag = {tag!r}: it cannot name a directory of a checkpoint. Remedy: use a name without '/', without blanks at "
            f"its ends, that begins neither with {TEMPORARY!r} nor with {DOOMED!r}, does not end with {OLD!r}, and is not "
            f"{LATEST!r}."
        )
    return tag


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems cannot, and need not
        if error.errno not in (22, 95):
            raise
    finally:
        os.close(handle)


def make_directory(directory: Path) -> None:
    """Make ``directory`` and those it lies in, durably, as far as they are missing."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


# -- appearing ---------------------------------------------------------------------------------------------------


_ALWAYS_THERE = (MANIFEST, STATE_FILE)  # in a checkpoint; one of them may be lost


def refuse_occupied(final: Path, *, replace: bool = True) -> None:
    """Raise CheckpointError if there are files in ``final``, other than, with ``replace``, those of a checkpoint."""
    if final.exists() and any(final.iterdir()) and not (replace and any((final / name).exists() for name in _ALWAYS_THERE)):
        what = "is no checkpoint" if replace else "is not empty"
        raise CheckpointError(f"{final} exists and {what}; it is left as it is. Remedy: use another name.")


def begin(directory: Path, tag: str, *, replace: bool = True) -> Path:
    """An empty temporary directory for ``tag``. What an interrupted save of this tag left is deleted.

    Raises OSError, and CheckpointError as ``refuse_occupied`` does.
    """
    refuse_occupied(directory / tag, replace=replace)
    temporary = directory / f"{TEMPORARY}{tag}"
    make_directory(directory)
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    return temporary


def publish(directory: Path, tag: str) -> Path:
    """Turn the temporary directory of ``tag`` into the checkpoint. Raises OSError."""
    temporary, final = directory / f"{TEMPORARY}{tag}", directory / tag
    sync_directory(temporary)
    refuse_occupied(final)
    if final.exists() and not any(final.iterdir()):
        final.rmdir()
    if final.exists():
        old = directory / f"{tag}{OLD}"
        _remove(old)
        final.rename(old)
    temporary.rename(final)
    sync_directory(directory)
    return final


def point_latest(directory: Path, tag: str) -> None:
    """Let ``latest`` name ``tag``, in one step. Raises OSError."""
    temporary = directory / f"{TEMPORARY}{LATEST}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.write(handle, tag.encode())
        os.fsync(handle)
    finally:
        os.close(handle)
    temporary.rename(directory / LATEST)
    sync_directory(directory)


def _remove(path: Path) -> None:
    if path.exists():
        doomed = path.with_name(f"{DOOMED}{path.name}")
        if doomed.exists():
            shutil.rmtree(doomed)
        path.rename(doomed)
        shutil.rmtree(doomed)


def prune(directory: Path, tag: str, keep: int | None) -> list[str]:
    """Delete the replaced version of ``tag``, saves long interrupted, and all but the newest ``keep``. What was deleted.

    ``tag`` itself always stays, and so does what zerorun did not make.
    """
    _remove(directory / f"{tag}{OLD}")
    for left in directory.glob(f"{DOOMED}*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in directory.glob(f"{TEMPORARY}*"):
        written = max(path.lstat().st_mtime for path in (left, *(left.iterdir() if left.is_dir() else ())))
        if time.time() - written > _STALE_S:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    if keep is None:
        return []
    doomed = [name for name in newest_first(directory) if name != tag][max(keep - 1, 0) :]
    for name in doomed:
        _remove(directory / name)
    return doomed


def replaced(directory: Path) -> list[str]:
    """Tags of which the replaced version is still there: their save was killed at its last steps."""
    return sorted(path.name.removesuffix(OLD) for path in directory.glob(f"*{OLD}") if (path / MANIFEST).is_file())


def version_of(path: Path) -> str | None:
    """When the checkpoint ``path`` was saved; None if there is none that can be read."""
    try:
        return read_manifest(path).saved_at
    except CheckpointError:
        return None


def drop_replaced(directory: Path, tags: Iterable[str]) -> None:
    """Delete the replaced versions of ``tags``, which are there in new versions on all disks. Raises OSError."""
    for tag in tags:
        _remove(directory / f"{tag}{OLD}")


# -- choosing ----------------------------------------------------------------------------------------------------


def newest_first(directory: Path) -> list[str]:
    """Names of the directories with a readable manifest, by time of saving. Damaged ones are left out."""
    return [name for _, name, _ in _by_time(directory)[0]]


def _by_time(directory: Path) -> tuple[list[tuple[str, str, bool]], dict[str, str]]:
    """(time of saving, name, whether ``latest`` is to name it), newest first; and by name what is wrong with others."""
    found, damaged = [], {}
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((TEMPORARY, DOOMED)) or not (path / MANIFEST).is_file():
            continue
        try:
            manifest = read_manifest(path)
            found.append((manifest.saved_at, path.name, manifest.becomes_latest))
        except CheckpointError as error:
            damaged[path.name] = str(error)
    return sorted(found, reverse=True), damaged


def in_order_of_trust(directory: Path) -> list[str]:
    """The tags to try: what ``latest`` names, then all others, newest first.

    A complete checkpoint that was saved after ``latest`` was written goes first: its save was killed at the last step.
    """
    found, damaged = _by_time(directory)
    names = [name for _, name, _ in found]
    first = ""
    try:
        first = (directory / LATEST).read_text(errors="replace").strip()
        written = datetime.fromtimestamp((directory / LATEST).stat().st_mtime, timezone.utc).isoformat()
        there = re.fullmatch(r"[^/\0]+", first) is not None and (directory / first).is_dir()
    except OSError:
        there, written = False, ""
    for name, what in damaged.items():
        if name != first or not there:  # else loading tries it, and says so
            logger.warning("%s It is left out.", what)
    interrupted = next((saved_at > written for saved_at, _, becomes_latest in found if becomes_latest), False)
    if interrupted or not there:
        return names
    return [first] + [name for name in names if name != first]


def missing_files(directory: Path, files: Mapping[str, FileRecord]) -> dict[str, str]:
    """Those of ``files`` that are not there in full: name -> what is wrong."""
    wrong = {}
    for name, record in files.items():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            wrong[name] = f"cannot be found: {error.strerror}"
            continue
        if size != record.nbytes:
            wrong[name] = f"has {size} bytes instead of {record.nbytes}"
    return wrong
