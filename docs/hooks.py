"""What mkdocs adds to the pages: the tables of configuration.md, from the sections' source, and the examples' pictures."""

from __future__ import annotations

import ast
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURES = ("loss_curve.png", "offload.png", "optimizers.png", "schedules.svg", "longcontext.png", "plan.png")
SOURCES = ("zerorun/config/schema.py", "zerorun/config/sections.py")
MARK = "<!-- keys -->"


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures of the examples."""
    from mkdocs.structure.files import File

    for name in PICTURES:
        files.append(File(name, str(ROOT / "examples"), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, **unused: Any) -> str:
    """Put the tables where the page wants them."""
    return markdown.replace(MARK, "\n".join(tables())) if MARK in markdown else markdown


# -- the configuration -------------------------------------------------------------------------------------------------


def tables() -> Iterator[str]:
    """The keys of each section as Markdown: first the top level, then the sections in the order in which it has them."""
    classes = {node.name: node for source in SOURCES for node in class_definitions(source)}
    yield from table("Top level", "", classes["Config"], classes)


def class_definitions(source: str) -> list[ast.ClassDef]:
    return [node for node in ast.parse((ROOT / source).read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]


def table(title: str, path: str, section: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """One section, and behind it those in it."""
    from zerorun.config import schema, sections

    model = getattr(schema, section.name, None) or getattr(sections, section.name)
    meanings = dict(fields(section))
    inner, rows = [], []
    for key, field in model.fields_by_key().items():
        name = next(name for name, other in model.model_fields.items() if other is field)
        kind = section_class(field.annotation, classes)
        if kind is not None:
            inner.append((f"{path}{key}", kind))
            continue
        rows.append(f"| `{key}` | {type_of(field)} | {default_of(field)} | {meaning_of(field, meanings.get(name, ''))} |")
    yield f"### {title}\n\n{ast.get_docstring(section) if path else ''}\n"
    if rows:
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])
    for name, kind in inner:
        yield from table(f"`{name}`", f"{name}.", classes[kind], classes)


def fields(section: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """(name, the words under it) of each field that has some."""
    for field, words in zip(section.body, section.body[1:], strict=False):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(words, ast.Expr) and isinstance(words.value, ast.Constant):
            yield field.target.id, " ".join(str(words.value.value).split())


def section_class(annotation: Any, classes: dict[str, ast.ClassDef]) -> str | None:
    """The name of the section that a field holds; None for a value."""
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if getattr(kind, "__name__", None) in classes and kind is not dict:
            return str(kind.__name__)
    return None


def type_of(field: Any) -> str:
    """In words, as JSON has it."""
    return " or ".join(dict.fromkeys(types_in(field.annotation)))


def types_in(annotation: Any) -> Iterator[str]:
    words = {bool: "true, false", int: "integer", float: "number", str: "text", tuple: "list", list: "list", dict: "object"}
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from types_in(inside[0])
    elif origin is typing.Literal:
        yield ", ".join(f'"{value}"' if isinstance(value, str) else json.dumps(value) for value in inside)
    elif origin in (typing.Union, types.UnionType):
        for kind in inside:
            yield from types_in(kind) if kind is not type(None) else ()
    else:
        yield words.get(origin or annotation, "anything")


def default_of(field: Any) -> str:
    if field.is_required():
        return "none: it must be given"
    value = field.get_default(call_default_factory=True)
    if value == 0 and any(getattr(mark, "ge", 0) == 1 for mark in field.metadata):
        return "follows from the others"
    shown = json.dumps(value, default=str)
    return "" if value is None else f"`{shown}`"


def meaning_of(field: Any, words: str) -> str:
    """What the key does; of one that does nothing here, or cannot be had, the reason."""
    from zerorun.config.fields import Inert, OnlyStages, Refused

    said = [words] if words else []
    for mark in field.metadata:
        if isinstance(mark, Inert):
            said.append(f"*No effect:* {mark.reason}")
        elif isinstance(mark, Refused):
            said.append(f"*Refused:* {mark.reason}")
        elif isinstance(mark, OnlyStages):
            said.append(f"Only at stage {', '.join(map(str, mark.stages))}.")
    return " ".join(said).replace("|", "\\|")
