"""What one host says of itself, and what its clock shows.

    python -m zerorun.report.host_facts

started on each host, prints its facts as one marked line, then answers each line of stdin with the time of its clock,
and ends with stdin.

Facts: those of machine.py, with ``versions``, ``cuda`` and ``native_ops`` of software.py, and ``software_trouble`` if torch
could not be asked; ``ranks``: those of jobs that run here, as launcher/dump.py tells them, without stacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from zerorun.launcher.dump import on_this_host

from .machine import describe_machine
from .reporter import mark, unmark

SOFTWARE_SECONDS = 25.0  # to import torch from a slow file system, and to start CUDA


def describe_host() -> dict[str, Any]:
    """All facts of this host. torch is asked while the rest is read."""
    child = subprocess.Popen(
        [sys.executable, "-m", "zerorun.report.software"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + SOFTWARE_SECONDS
    facts = describe_machine(os.environ)
    facts["ranks"] = [asdict(rank) for rank in on_this_host(stacks=False)]
    found, trouble = _finish(child, deadline)
    facts["versions"] = {**(facts["versions"] or {}), **found.pop("versions", {})}
    return {**facts, "cuda": None, "native_ops": [], **found, "software_trouble": trouble}


def _finish(child: subprocess.Popen[bytes], deadline: float) -> tuple[dict[str, Any], str | None]:
    """(what ``child`` has said, why it has not said anything). Ends it at ``deadline``."""
    try:
        output, errors = child.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {}, f"importing torch and starting CUDA took longer than {SOFTWARE_SECONDS:.0f} s"
    for line in output.decode(errors="replace").splitlines():
        found = unmark(line)
        if found is not None:
            return found, None
    said = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return {}, said[-1] if said else f"the process that imports torch ended with status {child.returncode}"


def main() -> int:
    _say(describe_host())
    for _ in sys.stdin:
        _say({"clock": time.time()})
    return 0


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(mark(message))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
