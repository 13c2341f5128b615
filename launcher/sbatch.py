"""SLURM's batch jobs: the script that ``zerorun --sbatch`` submits, and the way back into the queue."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerorun.errors import LaunchError

# EX_TEMPFAIL of sysexits.h: a worker that has saved its state and wants to go on later ends with it.
REQUEUE_STATUS = 75


def batch_script(command: Sequence[str], *, name: str, nodes: int, options: Sequence[str]) -> str:
    """A script that runs ``command`` once, on the first node; ``options`` are of sbatch and win over what stands before.

    exec: signals that SLURM sends to the batch script (``--signal=B:...``) must reach the launcher.
    """
    fixed = [f"--job-name={name}", f"--nodes={nodes}", "--ntasks-per-node=1", "--requeue", "--open-mode=append"]
    asked = [f"#SBATCH {shlex.join(options)}"] if options else []
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in fixed), *asked, f"exec {shlex.join(command)}", ""]
    return "\n".join(lines)


def submit(script: str, path: Path) -> str:
    """Write ``script`` to ``path`` and submit it; what sbatch said. Raises LaunchError."""
    try:
        path.write_text(script)
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    except OSError as error:
        what = error.filename or "sbatch"
        raise LaunchError(f"--sbatch: {what}: {error.strerror}. Remedy: run it where SLURM is.") from None
    if done.returncode:
        raise LaunchError(f"sbatch refused {path}: {done.stderr.strip()}. Remedy: see --sbatch-args.")
    return done.stdout.strip()


def requeue(environment: Mapping[str, str]) -> str | None:
    """Put this batch job back into the queue; SLURM then ends it. Why it cannot be; None if it is done."""
    job = environment.get("SLURM_JOB_ID")
    if job is None or "SLURM_STEP_ID" in environment:
        return "this is no SLURM batch job"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join(command)}: {error}"
    return None if done.returncode == 0 else f"{shlex.join(command)}: {done.stderr.strip()}"
