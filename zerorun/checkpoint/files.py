"""Files that anybody may have made: read only if they are regular and not too long, created only if nothing is there.

A named pipe would make a reader wait forever, a device never ends, and a name with ``..`` or a link may lead to any file
that the reading user can read. New files get names that nothing else has: a link of that name is never followed. A
directory that is being written is held by its writer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

if sys.platform != "win32":
    import fcntl

_MOST_IN_NAME = 255  # bytes, on every file system
_KINDS = {
    stat.S_IFIFO: "it is a named pipe",
    stat.S_IFSOCK: "it is a socket",
    stat.S_IFCHR: "it is a device",
    stat.S_IFBLK: "it is a device",
}


def is_plain(name: object) -> bool:
    """True if ``name`` can only name an entry of a directory: it is no path, nor the directory itself, nor its parent."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= _MOST_IN_NAME
    except UnicodeError:
        return False


def open_regular(path: Path, home: Path | None = None) -> int:
    """Return a descriptor to read the regular file ``path``. Raises OSError for anything else, without waiting.

    With ``home``, the directory that ``path`` is in, a link must not lead out of that directory.
    """
    _refuse_others(path, os.stat(path).st_mode)  # before it is opened: just opening some devices has effects
    if home is not None:
        _refuse_way_out(path, home)
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_others(path, os.fstat(file).st_mode)
    except BaseException:
        os.close(file)
        raise
    return file


def read_regular(path: Path, most: int, home: Path | None = None) -> bytes:
    """Read a whole regular file of at most ``most`` bytes. Raises OSError for others. ``home``: as in ``open_regular``."""
    file = open_regular(path, home)
    try:
        size = os.fstat(file).st_size
        parts, left = [], min(size, most) + 1
        while size <= most and left and (part := os.read(file, left)):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(file)
    if size > most or not left:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and {most} at most are expected", str(path))
    return b"".join(parts)


def _refuse_others(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"{_KINDS.get(stat.S_IFMT(mode), 'it is something else')}, not a file", str(path))


def _refuse_way_out(path: Path, home: Path) -> None:
    """Raise OSError if ``path`` is a link that leads out of ``home``.

    A cache of the Hugging Face hub counts as one place: ``snapshots/REVISION`` has links to files in ``blobs``.
    """
    if not path.is_symlink():
        return
    place, target = Path(os.path.realpath(home)), Path(os.path.realpath(path))
    caches = [parent.parent / "blobs" for parent in place.parents if parent.name == "snapshots"]
    if not any(inside in target.parents for inside in (place, *caches)):
        raise OSError(errno.ELOOP, f"it is a link to {target}, which is in another directory", str(path))


def create(path: Path) -> int:
    """Create the file ``path``, and return a descriptor to write it.

    Raises OSError if anything has that name, even a dangling link.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` write a file that takes the place of ``path`` only when it is whole and durable. Raises OSError."""
    temporary = path.with_name(f".saving.{secrets.token_hex(8)}")
    handle = create(temporary)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # torch.save ends in an error of its own, about what it has not written.
        of_disk = error.__context__ if isinstance(error, RuntimeError) else error
        if isinstance(of_disk, OSError) and of_disk.filename is None:
            raise OSError(of_disk.errno, of_disk.strerror, str(path)) from error
        raise


def mark(path: Path) -> None:
    """Create the empty file ``path`` unless it is there already. Raises OSError if a link has that name."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))


class HeldDirectory:
    """A directory that only its holder changes. It is locked, and known again if another one takes its name.

    A lock (flock(2)) ends with its process, however that ends. Some network file systems have none for directories: there,
    ``is_there`` tells what another process has done.
    """

    def __init__(self, path: Path) -> None:
        """Hold ``path``. Raises BlockingIOError if somebody else does, and OSError if it is no directory."""
        self.path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._handle)
            raise
        except OSError:  # no locks here
            return

    def is_there(self) -> bool:
        """False if nothing, or another directory, has its name now."""
        try:
            return os.path.samestat(os.fstat(self._handle), os.lstat(self.path))
        except OSError:
            return False

    def release(self) -> None:
        """Hold it no longer. Processes that were forked meanwhile have the same lock, so that closing is not enough."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._handle, fcntl.LOCK_UN)
        os.close(self._handle)
