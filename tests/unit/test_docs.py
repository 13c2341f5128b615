"""The manual: what is shown there is what there is. Its pages are README.md, CONTRIBUTING.md and docs/."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import operator
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import zerorun
from zerorun import zero
from zerorun.config.fields import Section
from zerorun.config.keys import key_tables
from zerorun.config.parse import load_config, main
from zerorun.config.schema import Config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_LINES = 150  # of README
# Commands -> the modules that name their options; those of others are not looked into.
MAINS = {
    "zerorun": "zerorun.launcher.options",
    "zerorun-checkpoint": "zerorun.checkpoint.cli",
    "zerorun-plan": "zerorun.planner.cli",
    "zerorun-report": "zerorun.report.cli",
    "zerorun-schedule": "zerorun.pipeline.cli",
    "zerorun.config": "zerorun.config",
    "zerorun.topology": "zerorun.distributed.topology",
    "zerorun.plan": "zerorun.plan.__main__",
    "zerorun.tensor_parallel": "zerorun.tensor_parallel.__main__",
}


def named(pages: list[Path]) -> Any:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Lines of bash blocks, and indented ones that begin like a command."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    lines += [line[4:] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("    ")]
    parts = [part.strip() for line in lines for part in line.partition("   #")[0].split("&&")]
    return [
        part for part in parts if part.startswith(("zerorun", "python -m zerorun", "python tests/", "python examples/"))
    ]


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@named(PAGES)
def test_code_compiles_and_links_lead_somewhere(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)
    pictures = hooks().PICTURES  # which are copied beside the pages
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists() or link in pictures, f"{page.name}: {link}"


@named(PAGES)
def test_configurations_are_accepted(page: Path) -> None:
    for block in blocks(page, "json"):
        text = block if block.lstrip().startswith("{") else f"{{{block}}}"
        load_config({"train_micro_batch_size_per_gpu": 1, **json.loads(text)})


@cache
def help_of(module: str) -> str:
    """What ``--help`` prints, of all its subcommands together."""
    source = importlib.util.find_spec(module)
    assert source is not None and source.origin is not None
    folder = Path(source.origin).parent
    files = sorted(folder.glob("*.py")) if source.origin.endswith("__init__.py") else [Path(source.origin)]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@named(PAGES)
def test_commands_have_the_options_that_are_shown(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command, comments=True)
        if words[0] == "python":
            program, words = (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])
        else:
            program, words = words[0], words[1:]
        is_file = program.endswith(".py")
        known = (ROOT / program).read_text(encoding="utf-8") if is_file else help_of(MAINS[program])
        if program == "zerorun":  # what follows the script is the script's own
            script = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
            words, rest = words[:script], words[script:]
            assert not rest or not rest[0].startswith("examples/") or (ROOT / rest[0]).exists(), command
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in known or option.removeprefix("--").replace("-", "_") in known, f"{option} of {command}"


# -- troubleshooting ---------------------------------------------------------------------------------------------------


@cache
def texts() -> str:
    """All string constants of the product, and the parts of its f-strings."""
    found = []
    for folder in ("zerorun", "launcher", "ops"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\0".join(found)


def test_troubleshooting_is_found_by_what_is_printed() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(.+)`(?: \{.*\})?$", page, re.MULTILINE)
    assert len(headings) > 20
    missing = [heading for heading in headings if not all(part.strip() in texts() for part in heading.split("..."))]
    assert not missing


# -- the reference -----------------------------------------------------------------------------------------------------


def described_objects() -> Iterator[object]:
    """What reference.md describes, as it can be imported."""
    for path in re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE):
        module, _, name = path.rpartition(".")
        found = (
            importlib.import_module(path) if path == "zerorun.errors" else getattr(importlib.import_module(module), name)
        )
        yield from (vars(found).values() if path == "zerorun.errors" else [found])


def test_everything_public_is_in_the_reference() -> None:
    described = set(map(id, described_objects()))
    public = [*zerorun._EXPORTS, *(f"zero.{name}" for name in zero.__all__)]
    alike = {"Config", "PipeDataParallelTopology", "PipeModelDataParallelTopology"}  # made of what is described
    missing = [name for name in public if name not in alike and id(operator.attrgetter(name)(zerorun)) not in described]
    assert not missing


def test_public_members_are_described() -> None:
    silent = []
    for found in described_objects():
        for kind in inspect.getmro(found) if isinstance(found, type) else ():
            for name, member in vars(kind).items() if kind.__module__.startswith("zerorun") else ():
                function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if inspect.isfunction(function) and not name.startswith("_") and not function.__doc__:
                    silent.append(f"{kind.__name__}.{name}")
        if not isinstance(found, type) and inspect.isfunction(found) and not found.__doc__:
            silent.append(found.__name__)
    assert not silent


# -- the configuration -------------------------------------------------------------------------------------------------


def sections(section: type[Section]) -> list[type[Section]]:
    found = [section]
    for field in section.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Section):
                found += sections(kind)
    return found


def test_every_key_that_does_something_says_what() -> None:
    assert not [f"{table.path}.{key.name}" for table in key_tables() for key in table.keys if not key.meaning]


def test_keys_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--keys", "Overlap_comm"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("zero_optimization.overlap_comm: true, false") and "\n    " in printed
    assert "`" not in printed
    assert main(["--keys"]) == 0
    assert capsys.readouterr().out.count("\n\n") > 150
    assert main(["--keys", "no such key"]) == 2
    assert "no key has 'no such key'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert "give the path of a JSON file, or --keys" in capsys.readouterr().err


def test_the_page_of_keys_has_all_of_them() -> None:
    page = "\n".join(hooks().tables())
    for section in sections(Config):
        for key, field in section.fields_by_key().items():
            kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
            if not any(isinstance(kind, type) and issubclass(kind, Section) for kind in kinds):
                assert f"| `{key}` |" in page, key
    assert "<class" not in page and "zerorun.config.fields" not in page  # types in words
    assert sys.modules.get("mkdocs") is None
