"""Builds the native library: the compiler, its command, and where the result is kept. No torch: setup.py uses it.

ninja runs the compiler, once for each C++ file, in parallel.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCES = tuple(Path(__file__).with_name("csrc") / name for name in ("optimizer.cpp", "aio.cpp"))
INSTALLED = Path(__file__).with_name("lib") / "native.so"  # made by setup.py, unless the installation is editable

# The code is portable, whatever machine builds it: the source itself chooses the instruction set, at run time. Contraction
# is off, so that all instruction sets give the same bits. The two -fno flags change no results; they only let loops with
# sqrt and ?: be vectorised.
_NUMBERS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", *_NUMBERS)
_MOST_LINKS = 40  # symbolic links to follow, as many as Linux does
_SECONDS = 120  # for one command; a machine that is busy or has a slow disk may take long


class BuildError(Exception):
    """The library could not be built; the message says why, in one line."""


class UntrustedError(BuildError):
    """A file that was found may have been put there by another user."""


def source_key() -> str:
    """Return a hash of the sources and the flags. It is compiled into the library, which can report it."""
    return hashlib.sha256(b"\0".join(["\0".join(FLAGS).encode(), *map(Path.read_bytes, SOURCES)])).hexdigest()[:16]


def compilers(environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the commands of the C++ compilers that this machine has: $CXX, c++, g++, clang++. Each program comes once."""
    seen = set()
    for name in (environment.get("CXX", ""), "c++", "g++", "clang++"):
        try:
            command = shlex.split(name)
        except ValueError:  # $CXX has a quotation mark that is not closed: no program has that name
            continue
        found = shutil.which(command[0], path=environment.get("PATH")) if command else None
        if found and (os.path.realpath(found), *command[1:]) not in seen:
            seen.add((os.path.realpath(found), *command[1:]))
            yield [found, *command[1:]]


def cached_name(compiler: list[str] | None) -> str:
    """Return the library's file name in a cache; without a compiler, a pattern that matches those of all compilers.

    Several machines may share the disk of a cache, so the kind of processor and the C library are part of the name.
    """
    libc = "".join(platform.libc_ver())
    end = "*" if compiler is None else hashlib.sha256(_version(compiler).encode()).hexdigest()[:8]
    return f"native-{source_key()}-{platform.system().lower()}-{platform.machine()}-{libc}-{end}.so"


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return $ZERORUN_CACHE_DIR, else ``zerorun`` in $XDG_CACHE_HOME or ~/.cache. Raises BuildError if there is no home."""
    if own := environment.get("ZERORUN_CACHE_DIR"):
        return Path(own).absolute()
    shared = Path(environment.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():  # the XDG specification says to ignore relative paths
        return shared / "zerorun"
    try:
        return Path.home() / ".cache" / "zerorun"
    except RuntimeError as error:
        raise BuildError(f"there is no cache directory: {error}") from error


def refuse_untrusted(path: Path) -> None:
    """Raise :class:`UntrustedError` unless only this user and root can have made ``path``, which is to be executed.

    The file, the folders above it and the links on the way must belong to one of the two, and others must not be able to
    write to them. A folder with the sticky bit, such as /tmp, is accepted: others can write there, but not to files that
    are not theirs. Raises OSError if something cannot be examined.
    """
    path = path.absolute()
    for _ in range(_MOST_LINKS):
        for part in (*reversed(path.parents), path):
            if _is_link(part):
                path = part.parent / os.readlink(part) / path.relative_to(part)
                break
        else:
            return
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _is_link(part: Path) -> bool:
    """Return whether ``part`` is a symbolic link. Raises UntrustedError if others can change it."""
    found = os.lstat(part)
    if found.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{part} belongs to {_user(found.st_uid)}")
    if stat.S_ISLNK(found.st_mode):
        return True
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & stat.S_IWOTH and not sticky:
        raise UntrustedError(f"{part} can be written to by all users")
    if found.st_mode & stat.S_IWGRP and not sticky and not _is_private_group(found):
        raise UntrustedError(f"{part} can be written to by group {found.st_gid}")
    return False


def _is_private_group(found: os.stat_result) -> bool:
    """Return True for the group that many systems make for each user, with nobody else in it."""
    import grp  # here, because Windows, where setup.py imports this file, lacks it
    import pwd

    with contextlib.suppress(KeyError):
        group, owner = grp.getgrgid(found.st_gid), pwd.getpwuid(found.st_uid)
        return group.gr_name == owner.pw_name and group.gr_gid == owner.pw_gid and not set(group.gr_mem) - {owner.pw_name}
    return False


def _user(number: int) -> str:
    import pwd

    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(number).pw_name}"
    return f"user {number}"


def build(compiler: list[str], target: Path, *, openmp: bool = True) -> None:
    """Compile to ``target``, making its folder. ``openmp``: use it if the compiler has it. Raises :class:`BuildError`.

    The file appears whole or not at all, so several processes may build it at the same time: that of the last one stays.
    """
    target = target.absolute()  # ninja runs in another folder
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
            made = Path(folder) / target.name
            if not openmp or not _compiles_with_openmp(compiler, made):
                _compile(compiler, list(FLAGS), made)
            made.chmod(0o755)  # whatever the umask: a library that others can write to is not loaded
            os.replace(made, target)
    except OSError as error:
        raise BuildError(f"{target.parent} cannot be written: {error.strerror or error}") from error


def _compiles_with_openmp(compiler: list[str], target: Path) -> bool:
    try:
        _compile(compiler, [*FLAGS, "-fopenmp"], target)
    except BuildError:
        return False
    return True


def _compile(compiler: list[str], flags: list[str], target: Path) -> None:
    """Make ``target``, in a folder that is used for nothing else. Raises BuildError."""
    try:
        import ninja
    except ImportError as error:
        raise BuildError(f"ninja is not installed ({error})") from error
    (target.parent / "build.ninja").write_text(_rules([*compiler, *flags], target))
    done = _run([str(Path(ninja.BIN_DIR) / "ninja"), "--quiet", "-C", str(target.parent)])
    if done.returncode or not target.exists():
        lines = done.stdout.splitlines()
        said = [line for line in lines if not line.startswith(("FAILED:", "ninja:", compiler[0]))]
        raise BuildError(f"{shlex.join(compiler)} failed: {_first_error(said or lines)}")


def _rules(command: list[str], target: Path) -> str:
    """Return the text of a ninja file: compile each source to an object, in parallel, and link the objects."""
    from ninja import ninja_syntax

    text, key = io.StringIO(), f'-DZERORUN_SOURCE="{source_key()}"'
    rules = ninja_syntax.Writer(text, width=10**6)  # type: ignore[arg-type]  # it wants a str, and writes to a file
    words = ninja_syntax.escape(shlex.join([*command, key]))
    rules.rule("compile", f"{words} -c $source -o $out")
    rules.rule("link", f"{words} $in -o $out")
    objects = [str(target.with_name(f"{source.stem}.o")) for source in SOURCES]
    for made, source in zip(objects, SOURCES, strict=True):
        rules.build([made], "compile", variables={"source": ninja_syntax.escape(shlex.quote(str(source)))})
    rules.build([str(target)], "link", objects)
    return text.getvalue()


def _version(compiler: list[str]) -> str:
    done = _run([*compiler, "--version"])
    return f"{shlex.join(compiler)}\n{done.stdout}"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error


def _first_error(output: list[str]) -> str:
    lines = [line.strip() for line in output if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "it says nothing")[:300]
