"""All keys that a configuration can have, in words: for the manual's tables and for ``python -m zerorun.config --keys``."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic.fields import FieldInfo

from zerorun.config.fields import Inert, OnlyStages, Refused, Section
from zerorun.config.schema import Config

_WIDTH = 100  # characters of a line


@dataclass(frozen=True)
class Key:
    """One key, in Markdown. ``type`` and ``default`` are as JSON has them; no default is an empty string."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class KeyTable:
    """The keys of one section. ``path``: its dotted name, empty at the top level. ``meaning``: its docstring."""

    path: str
    meaning: str
    keys: tuple[Key, ...]


def key_tables(section: type[Section] = Config, path: str = "") -> Iterator[KeyTable]:
    """Yield ``section``, and behind it those in it. Reads the source of their classes, which has the keys' meanings."""
    meanings = _words_under_fields(section)
    inner, keys = [], []
    for key, field in section.fields_by_key().items():
        kind = section_of(field)
        if kind is not None:
            inner.append((f"{path}.{key}" if path else key, kind))
            continue
        name = next(name for name, other in section.model_fields.items() if other is field)
        meaning = _meaning(field, meanings.get(name, ""))
        keys.append(Key(key, " or ".join(dict.fromkeys(_types(field.annotation))), _default(field), meaning))
    yield KeyTable(path, inspect.getdoc(section) or "" if path else "", tuple(keys))
    for name, kind in inner:
        yield from key_tables(kind, name)


def keys_with(word: str) -> list[str]:
    """Return a paragraph for each key that has ``word`` in its dotted name: for a terminal, without Markdown's marks."""
    found = []
    for table in key_tables():
        for key in table.keys:
            name = f"{table.path}.{key.name}" if table.path else key.name
            if word.lower() in name.lower():
                default = f"; default {key.default}" if key.default else ""
                head = f"{name}: {key.type}{default}"
                body = textwrap.fill(key.meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
                found.append(f"{head}\n{body}".replace("`", "").replace("*", "").rstrip())
    return found


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section that ``field`` holds; None if it holds a value."""
    for kind in (field.annotation, *typing.get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _words_under_fields(section: type[Section]) -> dict[str, str]:
    """Name of a field -> the string that stands below it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    body, found = definition.body if isinstance(definition, ast.ClassDef) else [], {}
    for field, words in pairwise(body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(words, ast.Expr) and isinstance(words.value, ast.Constant):
            found[field.target.id] = " ".join(str(words.value.value).split())
    return found


def _types(annotation: Any) -> Iterator[str]:
    words = {bool: "true, false", int: "integer", float: "number", str: "text", tuple: "list", list: "list", dict: "object"}
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        yield from _types(inside[0])
    elif origin is typing.Literal:
        yield ", ".join(f'"{value}"' if isinstance(value, str) else json.dumps(value) for value in inside)
    elif origin in (typing.Union, types.UnionType):
        for kind in inside:
            yield from _types(kind) if kind is not type(None) else ()
    else:
        yield words.get(origin or annotation, "anything")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none: it must be given"
    value = field.get_default(call_default_factory=True)
    if value == 0 and any(getattr(mark, "ge", 0) == 1 for mark in field.metadata):
        return "follows from the others"
    return "" if value is None else f"`{json.dumps(value, default=str)}`"


def _meaning(field: FieldInfo, words: str) -> str:
    """What the key does; of one that does nothing here, or cannot be had, the reason."""
    said = [words] if words else []
    for mark in field.metadata:
        if isinstance(mark, Inert):
            said.append(f"*No effect:* {mark.reason}")
        elif isinstance(mark, Refused):
            said.append(f"*Refused:* {mark.reason}")
        elif isinstance(mark, OnlyStages):
            said.append(f"Only at stage {', '.join(map(str, mark.stages))}.")
    return " ".join(said)
