"""Modules have the shorter paths that README names, and those of before."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from harness import patience, start_script

import zerorun
from zerorun.import_paths import PATHS


@pytest.mark.parametrize("name", PATHS)
def test_it_is_the_same_module(name: str) -> None:
    module = importlib.import_module(PATHS[name])
    assert importlib.import_module(f"zerorun.{name}") is module
    assert getattr(zerorun, name) is module
    assert module.__name__ == PATHS[name]
    assert module.__spec__ is not None
    assert module.__spec__.name == PATHS[name]


def test_names_come_from_it() -> None:
    code = "from zerorun.checkpointing import checkpoint; import zerorun.dataloader as data; "
    code += "print(checkpoint.__module__, data.__name__)"
    _, said, _ = start_script(code).finish(60 * patience())
    assert said.split() == ["zerorun.activations.checkpointing", "zerorun.data"]


def test_it_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "zerorun.topology", "--world-size", "8", "--pipe", "2", "--tensor", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("8 ranks = pipe 2")
    assert not done.stderr


def test_others_are_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"zerorun\.nothing"):
        importlib.import_module("zerorun.nothing")
