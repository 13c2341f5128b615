"""What the packages export: one list for those who run them, and the same for those who read their types."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zerorun
from zerorun import zero

ROOT = Path(__file__).parents[2]
PROGRAM = """
import zerorun
from torch import nn
reveal_type(zerorun.initialize(nn.Linear(2, 2), "ds.json"))
reveal_type(zerorun.estimate_memory(nn.Linear(2, 2), "ds.json", 8))
reveal_type(zerorun.zero.Init())
"""


def for_types(package: str) -> dict[str, str]:
    """Name -> full name of its module, of what a package imports for type checkers alone."""
    found = {}
    for node in ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                if line.module is not None:  # else modules of the package itself
                    found |= {alias.name: f"{package}.{line.module}" for alias in line.names}
    return found


def test_types_are_those_of_what_is_exported() -> None:
    assert for_types("zerorun") == zerorun._EXPORTS
    assert for_types("zerorun.zero") == {name: f"zerorun.zero.{module}" for name, module in zero._EXPORTS.items()}


def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "zerorun", "--help"], capture_output=True, text=True, check=True)
    assert "--hostfile" in done.stdout


@pytest.mark.nightly
def test_a_type_checker_knows_what_is_returned(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--config-file=", str(tmp_path / "program.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    for name in ("zerorun.engine.engine.Engine", "zerorun.memory.estimate.Estimate", "zerorun.zero.init.Init"):
        assert f'Revealed type is "{name}"' in done.stdout, done.stdout
