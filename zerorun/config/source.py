"""Read a configuration from a file, a dict or base64 text into plain data. This file knows JSON, but not the keys."""

from __future__ import annotations

import base64
import binascii
import json
import math
import numbers
import operator
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from zerorun.errors import ConfigError, ConfigProblem

# Deeper than any real configuration, shallow enough that walking it never exhausts the interpreter's stack.
MAX_DEPTH = 40

_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(_STRING + r"|(?P<blank>//[^\n]*|#[^\n]*|/\*.*?\*/)", re.DOTALL)
_TRAILING_COMMA = re.compile(_STRING + r"|(?P<blank>,)(?=\s*[}\]])")


class _Object(dict[str, Any]):
    """A JSON object that remembers which of its keys were written more than once."""

    duplicates: tuple[str, ...] = ()


def read_source(source: object) -> tuple[dict[str, Any], str]:
    """Return plain data that shares nothing with ``source``, and its name for messages. Raises only ConfigError."""
    if isinstance(source, Mapping):
        return plain_copy(source, "config"), "config"
    if isinstance(source, os.PathLike):
        return _read_file(Path(source))
    if not isinstance(source, str):
        kind, reason = type(source).__name__, "is neither a path, nor a dict, nor base64 text."
        _refuse("config", kind, reason, "Pass one of those.", "config")
    if os.path.exists(source) or source.endswith(".json"):
        return _read_file(Path(source))
    text = _from_base64(source)
    if text is None:
        reason = "there is no such file, and the text is not base64 of a JSON object."
        remedy = "Pass the path of a JSON file. JSON text itself goes through json.loads first."
        _refuse("config", source, reason, remedy, "config")
    return _parse(text, "base64 config"), "base64 config"


def _read_file(path: Path) -> tuple[dict[str, Any], str]:
    name = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        _refuse("config", name, "there is no such file.", "Check the path, relative to the current directory.", name)
    except UnicodeDecodeError as error:
        _refuse("config", name, f"is not UTF-8 text ({error.reason}).", "Save it as UTF-8 JSON.", name)
    except (OSError, ValueError) as error:
        _refuse("config", name, f"cannot be read ({error}).", "Pass the path of a readable JSON file.", name)
    return _parse(text, name), name


def _from_base64(text: str) -> str | None:
    try:
        decoded = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip("\ufeff \t\r\n").startswith(("{", "/", "#")) else None


def _parse(text: str, name: str) -> dict[str, Any]:
    """Parse JSON with comments and trailing commas. Blanking them keeps every line and column where it was."""
    for pattern in (_COMMENT, _TRAILING_COMMA):
        text = pattern.sub(_blank, text)
    try:
        content = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        _refuse("config", where, f"{name} is not JSON at {where}: {error.msg}.", _json_remedy(text, error.pos), name)
    except RecursionError:
        _refuse("config", "...", "is nested too deeply.", f"Use at most {MAX_DEPTH} levels.", name)
    except ValueError as error:  # an integer with more digits than Python converts
        _refuse("config", "...", f"holds a number that cannot be read ({error}).", "Write a smaller number.", name)
    if not isinstance(content, dict):
        _refuse("config", content, "must be a JSON object, { ... }.", "Put the keys between { and }.", name)
    return plain_copy(content, name)


def _blank(match: re.Match[str]) -> str:
    found = match.group(0)
    return found if match.group("blank") is None else "".join(c if c == "\n" else " " for c in found)


def _json_remedy(text: str, position: int) -> str:
    """A hint for the two mistakes that people make: a missing comma, and quotes other than double ones."""
    if text[position : position + 1] == "'":
        return "Use double quotes."
    if position and text[position : position + 1] == '"':
        return "Put a comma between the entries."
    return (
        "Correct the JSON there; comments (// or #) and trailing commas are fine. Keys and texts need double quotes, and "
        "entries commas: of a file in HJSON, the command hjson -j makes JSON."
    )


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        result.duplicates = tuple(sorted({key for key in keys if keys.count(key) > 1}))
    return result


def plain_copy(content: Mapping[Any, Any], name: str) -> dict[str, Any]:
    """Return a deep copy of dict, list, str, int, float, bool and None only. Raises ConfigError for everything else."""
    problems: list[ConfigProblem] = []
    result = _copy(content, "", (), problems)
    if problems:
        raise ConfigError(problems, name)
    return result


def _copy(value: Any, path: str, parents: tuple[int, ...], problems: list[ConfigProblem]) -> Any:
    """Copy ``value``. ``parents`` are the ids of the containers around it, because a container may contain itself."""
    if len(parents) > MAX_DEPTH or id(value) in parents:
        problems.append(
            ConfigProblem(path[:80], "...", "is nested too deeply, or in itself.", f"Use at most {MAX_DEPTH} levels.")
        )
        return None
    if isinstance(value, Mapping):
        return _copy_mapping(value, path, (*parents, id(value)), problems)
    if isinstance(value, (list, tuple)):
        parents = (*parents, id(value))
        return [_copy(item, f"{path}[{index}]", parents, problems) for index, item in enumerate(value)]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Number):
        return _copy_number(value, path, problems)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)  # by name, so that this module needs no torch
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    reason = f"a {type(value).__name__} cannot be part of a configuration."
    problems.append(ConfigProblem(path, value, reason, "Use JSON values: numbers, strings, booleans, lists, objects."))
    return None


def _copy_mapping(
    value: Mapping[Any, Any], path: str, parents: tuple[int, ...], problems: list[ConfigProblem]
) -> dict[str, Any]:
    prefix = f"{path}." if path else ""
    problems.extend(
        ConfigProblem(prefix + key, value[key], "is written more than once in the same object.", "Keep one of them.")
        for key in getattr(value, "duplicates", ())
    )
    result = {}
    for key, item in value.items():
        if isinstance(key, str):
            result[key] = _copy(item, prefix + key, parents, problems)
        else:
            problems.append(ConfigProblem(f"{prefix}{key!r}", item, "keys must be strings.", "Quote the key."))
    return result


def _copy_number(value: Any, path: str, problems: list[ConfigProblem]) -> int | float | None:
    """Return Python's own int or float, also for numpy scalars. NaN is a problem: it has no meaning in a configuration."""
    convert: Callable[[Any], int | float] = operator.index if isinstance(value, numbers.Integral) else float
    try:
        number = convert(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(number, int) and number.bit_length() > 63:
        remedy = "Write a smaller number; 1e18 is more than anything here can count."
        problems.append(ConfigProblem(path, f"{number.bit_length()}-bit integer", "does not fit 64 bits.", remedy))
        return None
    if isinstance(number, float) and math.isnan(number):
        problems.append(ConfigProblem(path, value, "is not a number.", "Write a number, or remove the key."))
        return None
    return number


def _refuse(key: str, value: object, reason: str, remedy: str, source: str) -> NoReturn:
    raise ConfigError([ConfigProblem(key, value, reason, remedy)], source)
