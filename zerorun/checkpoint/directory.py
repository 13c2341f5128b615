"""The directory of checkpoints: tags, ``latest``, and the steps that make a new checkpoint appear whole or not at all.

[Note: how a checkpoint appears]
    1. everything is written to ``.saving.TAG`` and made durable, the manifest last
    2. an older checkpoint of the same tag is renamed to ``.replaced.TAG``
    3. ``.saving.TAG`` is renamed to ``TAG``
    4. ``latest`` is replaced by a file that names TAG; then ``.replaced.TAG`` and checkpoints beyond ``keep`` are deleted

After each step, and at any time within a step, the newest complete checkpoint is a directory with a manifest: ``TAG``,
``.replaced.TAG`` or the previous checkpoint. A directory whose name begins with ``.saving.`` is never chosen. A directory
that is to be deleted is first renamed to ``.deleting.`` and a random number, so that half of one never looks like a whole
one. The next save deletes what an interrupted deletion has left.

One save at a time writes ``.saving.TAG``, and holds it meanwhile. Another save of that tag, of this job or another, is
refused; where the file system has no locks, the one whose directory was taken away fails.

[Note: clocks]
Checkpoints are ordered by the times at which they were saved, and ``latest`` is older than one whose save was killed in its
last step. Hosts have other clocks, and a job may go on on another host. So no checkpoint is saved before the one that
``latest`` names, whatever the clock says, and ``latest`` is never older than what it names.

[Note: what is deleted]
Only what zerorun made is deleted, and a name alone does not prove that. A directory must have a file that every checkpoint
has, or nothing but files that a save writes. A checkpoint must also still have its own name; otherwise somebody has put it
aside. Links are neither followed nor deleted, and what a link beside the checkpoints points to stays. If something else has
a name that a save needs, the save is refused before it writes anything. Earlier versions renamed a replaced checkpoint to
``TAG.old``, which a person may do, too. Such a directory is read if TAG is missing, and is never deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ..errors import CheckpointError
from ..log import logger
from .files import HeldDirectory, create, is_plain, read_regular
from .manifest import MANIFEST, Manifest, read_manifest
from .tensorfile import FileRecord
from .write_plan import STATE_FILE

LATEST = "latest"
TEMPORARY = ".saving."
REPLACED = ".replaced."
DOOMED = ".deleting."
# Seconds after which an interrupted save of another tag is deleted. Until then, another process may be writing it.
_STALE_S = 900
OLD = ".old"
_TRIES = 50  # of a change that saves of other tags may disturb: each try that fails is one of theirs that did not
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=timezone.utc), timedelta(microseconds=1)
_POINTER_BYTES = 4096  # the most in ``latest``, which holds one name
_ALWAYS_THERE = (MANIFEST, STATE_FILE)  # in every checkpoint, unless one of them was lost
# What saves and exports write, and the names that NFS gives to files that are deleted while they are open.
_WRITTEN = re.compile(r".*\.safetensors(\.index\.json)?|(adapter_|generation_)?config\.json|\.nfs[0-9a-f]+", re.DOTALL)
_MARKS = re.compile(rf"{re.escape(TEMPORARY)}({LATEST}(\.[0-9a-f]{{16}})?|.*\.rank\d+)", re.DOTALL)


def check_tag(tag: str) -> str:
    """Return ``tag`` if it can be the name of a checkpoint's directory. Raises CheckpointError if not."""
    plain = tag == tag.strip() and is_plain(tag) and not any("\ud800" <= char <= "\udfff" for char in tag)
    if not plain or tag == LATEST or tag.startswith((TEMPORARY, REPLACED, DOOMED)) or tag.endswith(OLD):
        raise CheckpointError(
            f"tag = {tag!r}: it cannot name a directory of a checkpoint. Remedy: use a name in UTF-8 without '/', without "
            f"blanks at its ends, that begins with none of {TEMPORARY!r}, {REPLACED!r} and {DOOMED!r}, does not end with "
            f"{OLD!r}, and is not {LATEST!r}."
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
    """Make ``directory`` and any missing parents of it, durably."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


# -- appearing ---------------------------------------------------------------------------------------------------


def refuse_occupied(final: Path, *, replace: bool = True) -> None:
    """Raise CheckpointError if ``final`` is a link, or has files in it. With ``replace``, it may be a checkpoint."""
    what = "is no checkpoint" if replace else "is not empty"
    if final.is_symlink():
        what = "is a symbolic link"
    elif not final.exists() or not any(final.iterdir()) or (replace and any((final / n).exists() for n in _ALWAYS_THERE)):
        return
    raise CheckpointError(f"{final} exists and {what}; it is left as it is. Remedy: use another name.")


def refuse_strange_pointer(directory: Path) -> None:
    """Raise CheckpointError if ``latest`` in ``directory`` is a link, a directory or the like: no save has made it."""
    path = directory / LATEST
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise CheckpointError(
            f"{path} is no regular file, and is left as it is; a save writes the name of the newest checkpoint there. "
            "Remedy: move it away, or save with save_latest=False."
        )


def begin(directory: Path, tag: str, *, replace: bool = True) -> HeldDirectory:
    """Make an empty temporary directory for ``tag``, and hold it. What an interrupted save of this tag left is deleted.

    Raises OSError. Raises CheckpointError as ``refuse_occupied`` does, if something that is not zerorun's has a name that
    the save needs, or if another save of ``tag`` is writing.
    """
    refuse_occupied(directory / tag, replace=replace)
    temporary = directory / f"{TEMPORARY}{tag}"
    for path in (temporary, directory / f"{REPLACED}{tag}"):
        if os.path.lexists(path) and not _is_own(path):
            raise CheckpointError(
                f"{path} holds what zerorun did not write, and is left as it is; a save of {tag!r} needs this name. "
                "Remedy: move it away, or use another tag."
            )
    make_directory(directory)
    try:
        if temporary.exists():
            left = HeldDirectory(temporary)
            try:
                shutil.rmtree(temporary)
            finally:
                left.release()
        temporary.mkdir()
        return HeldDirectory(temporary)
    except (BlockingIOError, FileExistsError) as error:
        raise CheckpointError(
            f"another save of {tag!r} is writing {temporary}, and this one has written nothing. Remedy: give each run a "
            "directory of its own. If no other run is there, a process that an ended one has left behind holds that "
            f"directory: end it (`fuser {shlex.quote(str(temporary))}` names it)."
        ) from error


def require_held(held: HeldDirectory) -> None:
    """Raise CheckpointError if another save has taken the place of the temporary directory ``held``."""
    if not held.is_there():
        raise CheckpointError(
            f"{held.path} was deleted or replaced while it was written, as another save of the same tag does where the "
            "file system has no locks. Remedy: give each run a directory of its own."
        )


def _is_own(path: Path) -> bool:
    """True if ``path`` is a directory that zerorun made, whole or not. What is in it decides: anybody can use a name."""
    try:
        with os.scandir(path) as scan:
            entries = list(scan)
    except OSError:  # not a directory, or one that this user may not read
        return False
    if path.is_symlink():
        return False
    if any(entry.name in _ALWAYS_THERE for entry in entries):
        return True
    return all(_WRITTEN.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries)


def publish(directory: Path, tag: str) -> Path:
    """Turn the temporary directory of ``tag`` into the checkpoint. Raises OSError, or CheckpointError if it is occupied."""
    temporary, final = directory / f"{TEMPORARY}{tag}", directory / tag
    sync_directory(temporary)
    refuse_occupied(final)
    if final.exists() and not any(final.iterdir()):
        final.rmdir()
    if final.exists():
        replaced = directory / f"{REPLACED}{tag}"
        _remove(replaced)
        final.rename(replaced)
    temporary.rename(final)
    sync_directory(directory)
    return final


def named_by_latest(directory: Path) -> Manifest | None:
    """The manifest of what ``latest`` names; None if that is not there, or cannot be read."""
    tag = read_pointer(directory)
    try:
        return read_manifest(directory / tag) if is_plain(tag) else None
    except CheckpointError:
        return None


def after_latest(latest: Manifest | None, saved_at: str) -> str:
    """Return ``saved_at``, or the microsecond after ``latest`` was saved, if that is later. See [Note: clocks]."""
    if latest is None or latest.saved_at < saved_at:
        return saved_at
    try:
        return (_moment(latest.saved_at) + _MICROSECOND).isoformat(timespec="microseconds")
    except (ValueError, OverflowError):  # a manifest may say anything
        return saved_at


def advise_later(directory: Path, latest: Manifest | None, tag: str, steps: int) -> None:
    """Warn if ``latest`` has more optimizer steps than ``tag``, which has ``steps`` and takes its place."""
    if latest is not None and latest.global_steps > steps:
        logger.warning(
            "%s names %s, of %d steps; from here on it names %s, of %d. Remedy, if those are another run's: save into "
            "another directory, before this run replaces what has the same tags.",
            *(directory / LATEST, latest.tag, latest.global_steps, tag, steps),
        )


def _moment(saved_at: str) -> datetime:
    """Raises ValueError if it is no time."""
    found = datetime.fromisoformat(saved_at)
    return found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)


def point_latest(directory: Path, tag: str, saved_at: str = "") -> None:
    """Make ``latest`` name ``tag``, atomically. Raises OSError. ``saved_at``: of the checkpoint; it is not older."""
    for left in directory.glob(f"{TEMPORARY}{LATEST}*"):  # left by saves that were killed here
        with contextlib.suppress(FileNotFoundError):  # another save has been quicker
            if _is_mark(left):
                left.unlink()
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):  # another save has taken ours for one that was left
            _point(directory, tag, saved_at)
            return
    _point(directory, tag, saved_at)


def _point(directory: Path, tag: str, saved_at: str) -> None:
    temporary = directory / f"{TEMPORARY}{LATEST}.{secrets.token_hex(8)}"
    handle = create(temporary)
    try:
        try:
            os.write(handle, tag.encode())
            if saved_at > datetime.now(timezone.utc).isoformat(timespec="microseconds"):
                since = (_moment(saved_at) - _EPOCH) // _MICROSECOND * 1000
                os.utime(handle, ns=(since, since))
            os.fsync(handle)
        finally:
            os.close(handle)
        temporary.rename(directory / LATEST)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(directory)


def _remove(path: Path) -> None:
    """Delete the directory ``path`` if it is zerorun's."""
    if _is_own(path):
        doomed = path.with_name(f"{DOOMED}{secrets.token_hex(8)}")
        path.rename(doomed)
        shutil.rmtree(doomed)


def _remove_if_possible(path: Path) -> None:
    """Delete the directory ``path`` if it is zerorun's. A checkpoint that is complete does not fail because that fails."""
    try:
        _remove(path)
    except FileNotFoundError:  # another save has deleted it
        return
    except OSError as error:
        remedy = "The new checkpoint is complete. Remedy: delete that directory, or what is left of it, yourself."
        logger.warning("%s is not needed any more, and cannot be deleted: %s. %s", path, error.strerror, remedy)


def prune(directory: Path, tag: str, keep: int | None) -> list[str]:
    """Delete what is not needed any more, and return the checkpoints to be deleted because of ``keep``.

    That is the replaced version of ``tag``, what saves interrupted long ago have left, and all checkpoints but the newest
    ``keep``. Those that ``latest`` was not meant to name are neither counted nor deleted. ``tag`` itself always stays, and
    so do what ``latest`` names, what zerorun did not make, and what links in ``directory`` point to.
    """
    _remove_if_possible(directory / f"{REPLACED}{tag}")
    for left in directory.glob(f"{DOOMED}*"):
        if _is_own(left):
            shutil.rmtree(left, ignore_errors=True)
    for left in directory.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(FileNotFoundError):  # of a save of another tag, which is over meanwhile
            _remove_stale(left)
    if keep is None:
        return []
    targets = [Path(os.path.realpath(path)) for path in directory.iterdir() if path.is_symlink()]
    counted = [found for found in _by_time(directory)[0] if found.manifest.becomes_latest and not found.is_link]
    others = [found for found in counted if found.path.name != tag]
    left_over = others[max(keep - (len(counted) - len(others)), 0) :]
    named = read_pointer(directory)
    doomed = [found.path for found in left_over if found.has_own_name and found.path.name != named]
    doomed = [path for path in doomed if not any(_lies_in(target, path) for target in targets)]
    for path in doomed:
        _remove_if_possible(path)
    return [path.name for path in doomed]


def _remove_stale(left: Path) -> None:
    """Delete what an interrupted save has left, unless the save may still be running."""
    own_directory = _is_own(left)
    if own_directory or _is_mark(left):
        written = max(path.lstat().st_mtime for path in (left, *(left.iterdir() if own_directory else ())))
        if time.time() - written <= _STALE_S or (own_directory and _is_held(left)):
            return
        _remove_if_possible(left) if own_directory else left.unlink()


def _is_held(path: Path) -> bool:
    """True if a save is writing the directory ``path``, which is not new: to look is to hold it for a moment."""
    try:
        HeldDirectory(path).release()
    except BlockingIOError:
        return True
    return False


def _is_mark(path: Path) -> bool:
    """True if ``path`` is a short-lived file of a save."""
    return _MARKS.fullmatch(path.name) is not None and stat.S_ISREG(path.lstat().st_mode)


def _lies_in(target: Path, path: Path) -> bool:
    """True if ``target``, a path without links, is ``path`` or something in it."""
    real = Path(os.path.realpath(path))
    return real == target or real in target.parents


def replaced(directory: Path) -> list[str]:
    """The tags whose replaced version is still there, because their save was killed in its last steps."""
    found = (path for path in directory.glob(f"{REPLACED}*") if not path.is_symlink() and has_manifest(path))
    return sorted(path.name.removeprefix(REPLACED) for path in found)


def version_of(path: Path) -> str | None:
    """When the checkpoint ``path`` was saved; None if there is no checkpoint, or its manifest cannot be read."""
    try:
        return read_manifest(path).saved_at
    except CheckpointError:
        return None


def drop_replaced(directory: Path, tags: Iterable[str]) -> None:
    """Delete the replaced versions of ``tags``, whose new versions are on all disks."""
    for tag in tags:
        _remove_if_possible(directory / f"{REPLACED}{tag}")


# -- choosing ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A directory with a readable manifest, or a link to one."""

    path: Path
    manifest: Manifest
    is_link: bool

    @property
    def has_own_name(self) -> bool:
        """False if somebody has renamed or copied it."""
        name = self.path.name
        return self.manifest.tag in (name, name.removeprefix(REPLACED))


def has_manifest(path: Path) -> bool:
    """True if ``path`` is a directory with a file that may be a manifest. False if that cannot be looked up."""
    return os.path.isfile(path / MANIFEST)


def newest_first(directory: Path) -> list[str]:
    """The names of the directories with a readable manifest, newest first; links come last."""
    return [found.path.name for found in _by_time(directory)[0]]


def _by_time(directory: Path) -> tuple[list[_Found], dict[str, str]]:
    """(directories with a readable manifest, newest first and links last; name -> what is wrong, for other directories)."""
    found, damaged = [], {}
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name.startswith((TEMPORARY, DOOMED)) or not has_manifest(path):
            continue
        try:
            found.append(_Found(path, read_manifest(path), path.is_symlink()))
        except CheckpointError as error:
            damaged[path.name] = str(error)
    return sorted(found, key=lambda one: (not one.is_link, one.manifest.saved_at, one.path.name), reverse=True), damaged


def read_pointer(directory: Path) -> str:
    """The name in ``latest``; empty if there is none, or if it is not a file that a save can have written."""
    try:
        return read_regular(directory / LATEST, _POINTER_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


def in_order_of_trust(directory: Path) -> list[str]:
    """The tags to try: see ``times_in_order_of_trust``."""
    return list(times_in_order_of_trust(directory))


def times_in_order_of_trust(directory: Path) -> dict[str, str]:
    """The tags to try -> when they were saved, "" if nothing says so: what ``latest`` names, then the others, newest first.

    If the newest checkpoint that ``latest`` was to name was saved after ``latest`` was written, its save was killed at the
    last step. Then, and if what ``latest`` names is not there, all are tried newest first, and last those that it was not
    meant to name.
    """
    found, damaged = _by_time(directory)
    times = {one.path.name: one.manifest.saved_at for one in found}
    names = [one.path.name for one in sorted(found, key=lambda one: (one.is_link, not one.manifest.becomes_latest))]
    first = read_pointer(directory)
    try:
        written = (_EPOCH + (directory / LATEST).stat().st_mtime_ns // 1000 * _MICROSECOND).isoformat()
        there = is_plain(first) and os.path.isdir(directory / first)
    except OSError:
        there, written = False, ""
    for name, what in damaged.items():
        if name != first or not there:  # otherwise loading tries it, and says so
            logger.warning("%s It is left out.", what)
    saves = (one.manifest for one in found if one.manifest.becomes_latest and not one.is_link)
    interrupted = next((save.saved_at > written for save in saves), False)
    if first and not there:
        instead = f" The newest checkpoint is tried: {names[0]}." if names else ""
        logger.warning("%s names %r, which is not there.%s", directory / LATEST, first[:80], instead)
    if interrupted and there and names[0] != first:
        logger.warning(
            "%s names %r, and %s was saved after that by a save that was killed in its last step: it is tried first.",
            *(directory / LATEST, first[:80], names[0]),
        )
    order = names if interrupted or not there else [first, *names]
    return {name: times.get(name, "") for name in order}


def merged(orders: Iterable[Mapping[str, str]]) -> list[str]:
    """What several disks have, each in its order of trust. Of those that are next on a disk, the newest comes first."""
    left, names = [list(order.items()) for order in orders if order], list[str]()
    while left:
        best = max(left, key=lambda order: order[0][1])
        names.append(best[0][0])
        left = [rest for order in left if (rest := [one for one in order if one[0] != names[-1]])]
    return names


def missing_files(directory: Path, files: Mapping[str, FileRecord]) -> dict[str, str]:
    """Return name -> what is wrong, for those of ``files`` that are missing or do not have their full length."""
    wrong = {}
    for name, record in files.items():
        try:
            found = (directory / name).stat()
        except OSError as error:
            wrong[name] = f"cannot be found: {error.strerror}"
            continue
        if not stat.S_ISREG(found.st_mode):
            wrong[name] = "is no regular file"
        elif found.st_size != record.nbytes:
            wrong[name] = f"has {found.st_size} bytes instead of {record.nbytes}"
    return wrong
