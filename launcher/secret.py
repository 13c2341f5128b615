"""The secret of a job whose hosts join by themselves: where it comes from, and how both ends prove that they know it.

The secret itself never travels. Each end makes up a nonce, and proves itself by an HMAC-SHA256 of both nonces. The
guest does so first, so that a stranger who connects gets nothing from which to guess the secret. Two keys derived from the
same nonces, one for each direction, then seal every line: nobody on the way can add, change or repeat a line.
"""

from __future__ import annotations

import getpass
import hmac
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from zerorun.errors import LaunchError

from .job_plan import JOB_SECRET

GUEST, LEADER, GUEST_WRITES, LEADER_WRITES = "guest", "leader", "guest writes", "leader writes"
_SHORTEST = 16  # characters: a stranger who overhears the messages must not find it out by trying
_LONGEST = 4096  # bytes of a file
_NONCE = re.compile(r"[0-9a-f]{64}")
_LOOK_SECONDS = 0.2
SILENT_WAIT_SECONDS = 10.0  # then a host that waits for node 0 says so
_REMEDY = (
    f"Remedy: --secret-file FILE in a folder that all hosts share (node 0 makes it), or the same {JOB_SECRET} in the "
    "environment on all hosts."
)


# -- where it comes from -----------------------------------------------------------------------------------------------


def leaders_secret(file: Path | None, environment: Mapping[str, str], *, terminal: bool) -> tuple[str, bool]:
    """Return (secret, whether it was made up here and must be shown). ``terminal``: it can be shown. Raises LaunchError."""
    if file is not None:
        return read_secret(file) or _write_secret(file), False
    if environment.get(JOB_SECRET):
        return _checked(environment[JOB_SECRET], JOB_SECRET), False
    if not terminal:  # what is not a terminal may be a log, which others may read
        raise LaunchError(f"the other hosts need a secret to join, and there is no terminal to show one on. {_REMEDY}")
    return secrets.token_urlsafe(32), True


def guests_secret(file: Path | None, environment: Mapping[str, str], *, seconds: float) -> str:
    """Return the secret for a host that wants to join. Waits up to ``seconds`` for ``file``. Raises LaunchError."""
    if file is not None:
        begun, told = time.monotonic(), False
        while (found := read_secret(file)) is None:
            waited = time.monotonic() - begun
            if waited > SILENT_WAIT_SECONDS and not told:
                told = True
                rest = f"node 0 makes it. Waiting for {seconds - waited:.0f} s more"
                print(f"[zerorun] --secret-file {file} is not there yet: {rest}", file=sys.stderr, flush=True)
            if waited > seconds:
                raise LaunchError(
                    f"--secret-file {file}: node 0 has not made it within {seconds:.0f} s. "
                    "Remedy: name a file in a folder that all hosts share."
                )
            time.sleep(_LOOK_SECONDS)
        return found
    if environment.get(JOB_SECRET):
        return _checked(environment[JOB_SECRET], JOB_SECRET)
    if not (sys.stdin and sys.stdin.isatty()):
        raise LaunchError(f"to join a job, this host needs its secret. {_REMEDY}")
    try:
        return _checked(getpass.getpass("the secret that node 0 shows: ").strip(), "the secret")
    except EOFError:
        raise LaunchError(f"to join a job, this host needs its secret. {_REMEDY}") from None


def read_secret(file: Path) -> str | None:
    """Return the secret in ``file``; None if missing or empty. Raises LaunchError if others could read or write it."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = "it is a symbolic link" if file.is_symlink() else error.strerror
        raise LaunchError(f"--secret-file {file}: {reason}. Remedy: name a file of your own with mode 0600.") from None
    try:
        _check_privacy(file, os.fstat(fd))
        text = os.read(fd, _LONGEST + 1).decode(errors="replace").strip()
    finally:
        os.close(fd)
    return _checked(text, f"--secret-file {file}") if text else None


def _check_privacy(file: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise LaunchError(f"--secret-file {file}: it is no regular file. Remedy: name a file with mode 0600.")
    if info.st_uid != os.geteuid():
        raise LaunchError(f"--secret-file {file}: it belongs to user {info.st_uid}. Remedy: name a file of your own.")
    if info.st_mode & 0o077:
        raise LaunchError(
            f"--secret-file {file}: its mode is {stat.S_IMODE(info.st_mode):04o}, so that others can read or write it. "
            "Remedy: delete it, and let node 0 make a new one with mode 0600."
        )


def _write_secret(file: Path) -> str:
    """Make up a secret, and write it to a new file that only this user can read. Raises LaunchError."""
    secret = secrets.token_urlsafe(32)
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as opened:
            opened.write(secret + "\n")
    except OSError as error:
        raise LaunchError(f"--secret-file {file}: cannot write it: {error.strerror}. Remedy: name another.") from None
    return secret


def _checked(secret: str, source: str) -> str:
    if not _SHORTEST <= len(secret) <= _LONGEST:
        raise LaunchError(
            f"{source}: a secret has {_SHORTEST} to {_LONGEST} characters, this one has {len(secret)}. "
            "Remedy: take one from `openssl rand -hex 32`."
        )
    return secret


# -- how it is proved --------------------------------------------------------------------------------------------------


def new_nonce() -> str:
    return secrets.token_hex(32)


def is_nonce(value: object) -> bool:
    return isinstance(value, str) and _NONCE.fullmatch(value) is not None


def proof(secret: str, role: str, leaders_nonce: str, guests_nonce: str) -> str:
    """Return the answer to these nonces, in ``role``, that only an end that knows ``secret`` can give."""
    words = "\0".join(("zerorun", role, leaders_nonce, guests_nonce))
    return hmac.digest(secret.encode(errors="surrogateescape"), words.encode(), "sha256").hex()


def proves(said: object, expected: str) -> bool:
    return isinstance(said, str) and hmac.compare_digest(said.encode(errors="replace"), expected.encode())


class Seal:
    """The marks of the lines in one direction, in order."""

    def __init__(self, key: str) -> None:
        self._key, self._count = bytes.fromhex(key), 0

    def mark(self, line: bytes) -> bytes:
        """Return the mark of the next line, 64 hexadecimal digits."""
        self._count += 1
        return hmac.digest(self._key, b"%d " % self._count + line, "sha256").hex().encode()
