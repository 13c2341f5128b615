"""A disk of a few megabytes, for one Python script: mounted where only that script's process sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import patience, start_script

_REFUSED = 77  # exit status
_OWN_MOUNTS = """\
import ctypes as _ctypes, os as _os, subprocess as _subprocess, sys as _sys
_NEWNS, _NEWUSER, _user, _group = 0x20000, 0x10000000, _os.geteuid(), _os.getegid()
if _ctypes.CDLL(None).unshare(_NEWNS | (_NEWUSER if _user else 0)):
    _sys.exit(77)
if _user:
    for _name, _text in (("setgroups", "deny"), ("uid_map", f"0 {_user} 1"), ("gid_map", f"0 {_group} 1")):
        with open(f"/proc/self/{_name}", "w") as _file:
            _file.write(_text)
if _subprocess.run(["sh", "-c", _sys.argv[1]]).returncode:
    _sys.exit(77)
_os.chdir(_sys.argv[2])
"""


def run_on_small_disk(script: str, folder: Path, *, mebibytes: int, kind: str = "tmpfs") -> str:
    """What ``script`` prints; it finds the disk in its working directory. Skips the test where one may not mount.

    ``kind``: "tmpfs", or "ext4" on a loop device. ``folder`` is an empty one of the test's own.
    """
    disk, image = folder / "disk", folder / "image"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={mebibytes}m none {disk}"
    if kind == "ext4":
        mount = f"truncate -s {mebibytes}M {image} && mkfs.ext4 -q {image} && mount -o loop {image} {disk}"
    running = start_script(_OWN_MOUNTS + script, f"mount --make-rprivate / && {mount}", str(disk))
    code, out, err = running.finish(120 * patience())
    if code == _REFUSED:
        pytest.skip(f"this process may not mount a {kind}: {err.strip()}")
    assert code == 0, err
    return out
