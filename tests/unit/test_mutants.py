"""The table of planted bugs fits the tree. The bugs themselves are run by tests/mutants/run.py."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest
from mutants.table import KINDS, MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
FOLDERS = {"zerorun", "ops", "ops/csrc", "launcher"}


def parts_of_the_product() -> set[str]:
    """The folders that must have planted bugs: all packages, and the native code."""
    return FOLDERS | {str(path.parent.relative_to(ROOT)) for path in (ROOT / "zerorun").rglob("__init__.py")}


def test_each_row_fits_the_tree() -> None:
    text_of = functools.cache(lambda file: (ROOT / file).read_text())
    wrong = []
    for mutant in MUTANTS:
        files = [test.split("::")[0] for test in mutant.tests if ".py" in test]
        there = files and all((ROOT / file).is_file() for file in files)
        for file, _, function in (test.split("[")[0].partition("::") for test in mutant.tests if "::" in test):
            there = there and f"def {function.split('::')[-1]}(" in text_of(file)
        if not there or any("nightly" in test for test in mutant.tests):
            wrong.append(f"{mutant.name}: {mutant.tests} are no tests of the day")
        try:
            if mutant.applied(text_of(mutant.file)) == text_of(mutant.file):
                wrong.append(f"{mutant.name}: changes nothing")
        except ValueError as error:
            wrong.append(str(error))
    assert wrong == []


def test_there_are_enough_of_every_kind_everywhere() -> None:
    assert len(MUTANTS) >= 60
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert {mutant.kind for mutant in MUTANTS} == set(KINDS)
    assert {str(Path(mutant.file).parent) for mutant in MUTANTS} == parts_of_the_product()


def test_a_row_that_does_not_fit_is_named() -> None:
    mutant = Mutant("a-name", "sign", "file", "  x = 1", "  x = -1", ())
    assert mutant.applied("a\n  x = 1\nb\n") == "a\n  x = -1\nb\n"
    for text in ("x = 1\n", "  x = 1\n  x = 1\n", "  x = 12\n"):
        with pytest.raises(ValueError, match=r"a-name: file has [02] lines 'x = 1' instead of one"):
            mutant.applied(text)
    assert Mutant("a-name", "wait", "file", "  wait()", "", ()).applied("a\n  wait()\nb") == "a\nb"
