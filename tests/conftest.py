"""Shared by all tests: the import path, a check of the installation, and the end of the worker pools."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    """Child processes must find the packages that setup.py maps to ``zerorun.ops`` and ``zerorun.launcher``."""
    command = [sys.executable, "-c", "import zerorun.ops, zerorun.launcher"]
    found = subprocess.run(command, cwd="/", capture_output=True, text=True)
    if found.returncode:
        pytest.exit(f"zerorun.ops cannot be imported in a child process; run pip install -e .\n{found.stderr}", 3)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """References sum in the same order, whatever the machine has and OMP_NUM_THREADS says: some are close to 1e-6."""
    import torch

    torch.set_num_threads(2)


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    yield
    harness = sys.modules.get("harness")
    if harness is not None:
        harness.close_pools()
