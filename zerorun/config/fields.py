"""The building blocks of the configuration: value types, marks on keys, and the base class of every section."""

from __future__ import annotations

import math
import re
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, StrictBool
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from zerorun.errors import ConfigProblem

UNIT_POLICIES = ("by_block", "by_block_and_size", "by_block_group", "size_based")
STAGE_NAMES = {"NO_SHARD": 0, "SHARD_GRAD_OP": 2, "FULL_SHARD": 3, "HYBRID_SHARD": 3}
_DTYPES = {
    "fp32": ("fp32", "float32", "float", "single"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
}
_ANY = object()
NOT_ENABLED = '"enabled" is not given, so the section is off.'


@dataclass(frozen=True)
class Inert:
    """The key is understood but has no effect. A note says why, unless the key's value is ``unless``."""

    reason: str
    unless: object = _ANY


@dataclass(frozen=True)
class Refused:
    """Only ``allowed``, a value or a tuple of values, can be honoured. The default remedy is to write that value."""

    reason: str
    allowed: object = False
    remedy: str | None = None


@dataclass(frozen=True)
class OnlyStages:
    """The key has an effect only at these ZeRO stages; at other stages it is noted."""

    stages: tuple[int, ...]


@dataclass(frozen=True)
class Feature:
    """A section that zerorun does not implement: accepted while it is off, and refused for ``reason`` while it is on."""

    reason: str
    keys: tuple[str, ...] | None = None  # None: the section's content is not checked
    on_when_present: bool = False  # there is no switch: the section is on if it is present
    remedy: str = ""


@dataclass(frozen=True)
class ConfigNote:
    """A remark on a key: mostly why it has no effect in this run."""

    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


@dataclass(frozen=True)
class EffectiveValue:
    """The value in force for a key, its source (see Config.sources), and a note, if there is one."""

    value: Any
    source: str
    note: str | None


class Section(BaseModel):
    """One JSON object with known keys. A field's alias is DeepSpeed's spelling; its Python name is accepted as well."""

    # A validator is built when its class is first used: a file names few of the optimizers, schedules and monitors.
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, defer_build=True)
    other_names: ClassVar[dict[str, str]] = {}  # further spellings -> the key
    features: ClassVar[dict[str, Feature]] = {}

    def is_off(self) -> bool:
        """True if the section is switched off, so that its other keys have no effect on purpose."""
        return getattr(self, "enabled", True) is False

    @classmethod
    def rewrite(cls, raw: dict[str, Any], path: str, problems: list[ConfigProblem]) -> dict[str, Any]:
        """Turn old forms into today's keys before keys are checked. ``path`` ends with a dot, or is empty."""
        return raw

    @classmethod
    def fields_by_key(cls) -> dict[str, FieldInfo]:
        """Return the fields by the spelling that messages use."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    def spellings(cls) -> dict[str, str]:
        """Return every accepted spelling -> its key."""
        own = {name: field.alias or name for name, field in cls.model_fields.items()}
        return {**cls.other_names, **own, **{key: key for key in own.values()}}


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section class that a field holds, also if the field is optional; None for other fields."""
    options = typing.get_args(field.annotation) if _is_union(field.annotation) else (field.annotation,)
    return next((kind for kind in options if isinstance(kind, type) and issubclass(kind, Section)), None)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def fail(reason: str, remedy: str) -> NoReturn:
    """Refuse a value from inside a validator."""
    # The two texts travel as context, not as a template: they may hold braces.
    raise PydanticCustomError("zerorun", "{reason}", {"reason": reason, "remedy": remedy})


def _bare(value: object) -> str:
    return " without quotes" if isinstance(value, str) else ""


def _kind(value: object) -> str:
    names = {bool: "a boolean", str: "a string", dict: "an object", list: "a list", float: "a number", int: "a number"}
    return names.get(type(value), type(value).__name__)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail(f"must be a whole number, not {_kind(value)}.", f"Write it as a number{_bare(value)}, such as 8 or 5e8.")
    if isinstance(value, float) and not math.isfinite(value):
        fail("must be finite.", "Write a whole number.")
    if isinstance(value, float) and not value.is_integer():
        fail("must be a whole number.", "Round it.")
    if abs(value) >= 2**63:
        fail("does not fit 64 bits.", "Write a smaller number.")
    return int(value)


def _real(value: object) -> float:
    number = _real_or_infinite(value)
    if not math.isfinite(number):
        fail("must be finite.", "Write a finite number.")
    return number


def _real_or_infinite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail(f"must be a number, not {_kind(value)}.", f"Write it as a number{_bare(value)}, such as 1e-4.")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        fail(f"must be true or false, not {_kind(value)}.", f"Write true or false{_bare(value)}.")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        fail(f"must be a string, not {_kind(value)}.", "Put it in double quotes.")
    return value


def _dtype_name(value: object) -> str:
    name = _text(value).lower().removeprefix("torch.")
    for short, spellings in _DTYPES.items():
        if name in spellings:
            return short
    return fail("is not a dtype that can be used here.", 'Use "fp32", "fp16" or "bf16".')


def _stage(value: object) -> int:
    choices = "0, 1, 2, 3 or " + ", ".join(STAGE_NAMES)
    if isinstance(value, str) and not value.strip().isdigit():
        if value.upper() not in STAGE_NAMES:
            fail("is not a ZeRO stage.", f"Use {choices}.")
        return STAGE_NAMES[value.upper()]
    stage = _whole(value)
    if stage not in (0, 1, 2, 3):
        fail("is not a ZeRO stage.", f"Use {choices}.")
    return stage


def _unit_policy(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str) and value in UNIT_POLICIES:
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    fail(
        "is neither a known policy nor a list of module class names.",
        f'Use one of {", ".join(UNIT_POLICIES)}, or a list such as ["LlamaDecoderLayer"].',
    )


def _per_group(value: object) -> Any:
    """Check a number, or a list with one number for each parameter group."""
    if isinstance(value, (list, tuple)):
        if not value:
            fail("is an empty list.", "Write one number, or one for each parameter group.")
        return [_per_group_number(item) for item in value]
    return _per_group_number(value)


def _per_group_number(value: object) -> float:
    number = _real(value)
    if number < 0:
        fail("must not be negative.", "Use a number of at least 0.")
    return number


def _steps_per_print(value: object) -> float:
    number = _real_or_infinite(value)
    if number <= 0 or not (math.isinf(number) or number.is_integer()):
        fail("must be a positive whole number of steps, or Infinity.", "Remove the key to print nothing.")
    return number


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_whole)]
Real = Annotated[float, BeforeValidator(_real)]
Flag = Annotated[StrictBool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_dtype_name)]
Stage = Annotated[int, BeforeValidator(_stage)]
UnitPolicy = Annotated[str | tuple[str, ...], BeforeValidator(_unit_policy)]
PerGroup = Annotated[Any, BeforeValidator(_per_group)]
StepsPerPrint = Annotated[float, BeforeValidator(_steps_per_print)]
LowerCase = BeforeValidator(_lower)


def quoted_words(text: str) -> list[str]:
    """Return the words in single quotes, which is how pydantic lists allowed values."""
    return re.findall(r"'([^']*)'", text)
