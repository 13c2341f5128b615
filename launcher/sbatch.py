"""SLURM's batch jobs: the script that ``zerorun --sbatch`` submits, and the way back into the queue."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerorun.errors import LaunchError

# EX_TEMPFAIL of sysexits.h: a worker exits with it if it has saved its state and wants to go on later.
REQUEUE_STATUS = 75
_MARK = "# Written by zerorun --sbatch, which replaces it."


def batch_script(command: Sequence[str], *, name: str, nodes: int, options: Sequence[str]) -> str:
    """Return a script that runs ``command`` once, on the first node; sbatch's ``options`` win over those set here.

    The script uses exec because signals that SLURM sends to it (``--signal=B:...``) must reach the launcher. Raises
    LaunchError.
    """
    # SLURM ends an option at the line feed, quoted or not, and the shell would run what follows.
    if any(not option.isprintable() for option in options):
        raise LaunchError("--sbatch-args: a line feed or another control character in it. Remedy: leave it out.")
    plain_name = re.sub(r"[^\w.+-]", "_", name)
    fixed = [f"--job-name={plain_name}", f"--nodes={nodes}", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    asked = [f"#SBATCH {shlex.join(options)}"] if options else []
    lines = ["#!/bin/bash", _MARK, *(f"#SBATCH {option}" for option in fixed), *asked, f"exec {shlex.join(command)}", ""]
    return "\n".join(lines)


def submit(script: str, path: Path, environment: Mapping[str, str]) -> str:
    """Write ``script`` to ``path``, for the user, submit it in ``environment``, and return what sbatch said.

    sbatch reads the script from its stdin, because others who can write to the folder may have replaced the file by then.
    Raises LaunchError.
    """
    try:
        _write(script, path)
        done = subprocess.run(["sbatch"], input=script, env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        what = error.filename or "sbatch"
        raise LaunchError(f"--sbatch: {what}: {error.strerror}. Remedy: run it where SLURM is.") from None
    if done.returncode:
        raise LaunchError(f"sbatch refused {path}: {done.stderr.strip()}. Remedy: see --sbatch-args.")
    return done.stdout.strip()


def _write(script: str, path: Path) -> None:
    """Write a new file that only this user can read, in place of one that zerorun wrote before. Raises LaunchError."""
    if os.path.lexists(path):
        if not _is_own(path):
            raise LaunchError(f"--sbatch: {path} exists and was not written by zerorun. Remedy: rename or remove it.")
        path.unlink()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        file.write(script)


def _is_own(path: Path) -> bool:
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        return False
    with open(path, errors="replace") as file:
        return _MARK in file.read(200).splitlines()


def is_batch_job(environment: Mapping[str, str]) -> bool:
    """Return True in the script of a batch job. A shell of salloc is a step, or runs where SLURM starts nothing."""
    return _requeued_by(environment) is not None and "SLURMD_NODENAME" in environment


def _requeued_by(environment: Mapping[str, str]) -> str | None:
    """Return the number of the job, unless this is a step of it."""
    return None if "SLURM_STEP_ID" in environment else environment.get("SLURM_JOB_ID")


def requeue(environment: Mapping[str, str]) -> str | None:
    """Put this batch job back into the queue; SLURM then ends it. Return None, or why it cannot be done."""
    job = _requeued_by(environment)
    if job is None:
        return "this is no SLURM batch job"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join(command)}: {error}"
    return None if done.returncode == 0 else f"{shlex.join(command)}: {done.stderr.strip()}"
