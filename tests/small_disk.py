"""A disk of a few megabytes, for one Python script: mounted where only that script's process sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_REFUSED = 77  # exit status


def run_on_small_disk(script: str, folder: Path, *, mebibytes: int, kind: str = "tmpfs", **environment: str) -> str:
    """What ``script`` prints; it finds the disk in its working directory. Skips the test where one may not mount.

    ``kind``: "tmpfs", or "ext4" on a loop device. ``folder`` is an empty one of the test's own.
    """
    if not shutil.which("unshare"):
        pytest.skip("there is no unshare")
    disk, image = folder / "disk", folder / "image"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={mebibytes}m none {disk}"
    if kind == "ext4":
        mount = f"truncate -s {mebibytes}M {image} && mkfs.ext4 -q {image} && mount -o loop {image} {disk}"
    (folder / "script.py").write_text(script)
    run = f"({mount}) || exit {_REFUSED}; cd {disk} && exec {sys.executable} {folder / 'script.py'}"
    own = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    done = subprocess.run(
        [*own, "sh", "-c", run], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    if done.returncode == _REFUSED or "unshare failed" in done.stderr:
        pytest.skip(f"this process may not mount a {kind}: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout
