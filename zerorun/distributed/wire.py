"""Wire: turns the values that ranks send each other into bytes and back, without pickle.

[Note: no code from the network]
A pickle can run any code where it is read, so that whoever gets one message into a job would own all its hosts. A message
from another rank is therefore only data: JSON, followed by the bytes of tensors. JSON's own values and lists stand for
themselves; everything else is an object with one key, its kind. Classes are never imported, called or given attributes
because a message says so. A message can name enumerations and named tuples that this process has loaded, whose members and
elements are data, and zerorun's own dataclasses, whose fields are filled without running code of the class.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch

from ..errors import MessageError

_JSON = {type(None), bool, float, str}
_DECIMAL_BITS = 14_000  # Python refuses to turn longer integers into decimal digits
_PREFIX = 8  # bytes: the length of the JSON
_TYPES: tuple[type, ...] = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_BUILTINS = {kind.__name__: kind for kind in _TYPES}  # what defaultdicts are made with
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "size": torch.Size}
_KINDS = {kind: name for name, kind in _SEQUENCES.items()}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PLAIN: tuple[tuple[type, Callable[[Any], Any]], ...] = ((str, str.__str__), (int, int.__int__), (float, float.__float__))
_NUMBERS = "biufc"  # numpy's kinds of scalars that are plain numbers


# -- to bytes ------------------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """Return ``value`` as bytes: None, numbers, strings, bytes, dense tensors, torch's dtypes, devices and sizes, slices,
    lists, tuples, sets and dicts, named tuples, members of enumerations, and dataclasses of zerorun.

    An instance of a class derived from str, int or float arrives as the plain value. Raises MessageError, naming the type,
    for anything else.
    """
    blobs: list[bytes] = []
    try:
        text = json.dumps(_to_json(value, blobs), separators=(",", ":")).encode()
    except RecursionError as error:
        raise MessageError("a value that other ranks should get is nested too deeply, or contains itself.") from error
    return b"".join([len(text).to_bytes(_PREFIX, "little"), text, *blobs])


def _to_json(value: Any, blobs: list[bytes]) -> Any:
    kind = type(value)
    if kind in _JSON or (kind is int and value.bit_length() < _DECIMAL_BITS):
        return value
    if kind is list:
        return [item if type(item) in _JSON else _to_json(item, blobs) for item in value]
    if kind is torch.dtype:
        return {"dtype": _NAMES[value]}
    if kind in _KINDS:
        return {_KINDS[kind]: [_to_json(item, blobs) for item in value]}
    if kind in (dict, OrderedDict):
        pairs = [[_to_json(key, blobs), _to_json(item, blobs)] for key, item in value.items()]
        return {"dict" if kind is dict else "ordered": pairs}
    if isinstance(value, torch.Tensor):
        return {"tensor": _keep(value, blobs)}
    return _class_to_json(value, kind, blobs)


def _keep(tensor: torch.Tensor, blobs: list[bytes]) -> list[Any]:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise MessageError(f"a tensor of layout {tensor.layout} on {tensor.device} has no plain values to send.")
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    blobs.append(flat.numpy().tobytes())
    return [_NAMES[tensor.dtype], list(tensor.shape)]


def _class_to_json(value: Any, kind: type, blobs: list[bytes]) -> Any:
    if isinstance(value, enum.Enum):
        return {"member": [*path_of(kind), value.name]}
    if is_namedtuple(kind):
        return {"named": [*path_of(kind), [_to_json(item, blobs) for item in value]]}
    if dataclasses.is_dataclass(kind) and _is_ours(kind.__module__):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind)}
        return {"data": [*path_of(kind), {name: _to_json(item, blobs) for name, item in fields.items()}]}
    return _rare_to_json(value, kind, blobs)


def _rare_to_json(value: Any, kind: type, blobs: list[bytes]) -> Any:
    if kind is int:
        return {"int": hex(value)}
    if kind in (bytes, bytearray):
        blobs.append(bytes(value))
        return {kind.__name__: len(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is torch.device:
        return {"device": str(value)}
    if kind is slice:
        return {"slice": [_to_json(part, blobs) for part in (value.start, value.stop, value.step)]}
    if kind is type and value in _TYPES:
        return {"type": value.__name__}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMBERS:
        blobs.append(value.tobytes())
        return {"number": [value.dtype.str, value.nbytes]}
    for plain, value_of in _PLAIN:
        if isinstance(value, plain):  # torch's version, for one
            return _to_json(value_of(value), blobs)
    raise MessageError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to other ranks: pickle, which could, lets whoever sends a "
        "message run code. Remedy: give numbers, strings and tensors, in lists, tuples, dicts or named tuples."
    )


# -- from bytes ----------------------------------------------------------------------------------------------------


def decode(content: bytes) -> Any:
    """Return what ``encode`` was given. Raises MessageError, whatever is wrong, for bytes that cannot be decoded."""
    try:
        begin = _PREFIX + int.from_bytes(content[:_PREFIX], "little")
        reader = _Reader(memoryview(content)[begin:])
        value = reader.value(json.loads(content[_PREFIX:begin]))
    except MessageError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"[:200]
        raise MessageError(f"a message from another rank cannot be read ({what}). {_SAME_VERSION}") from error
    if len(reader.rest):
        raise MessageError(f"a message from another rank is longer than it says. {_SAME_VERSION}")
    return value


_SAME_VERSION = "Remedy: run the same version of zerorun, and the same script, on all hosts."


class _Reader:
    """Makes values from JSON. ``rest``: the bytes behind it that are not read yet, in the order of the values."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def value(self, found: Any) -> Any:
        if type(found) is list:
            return self.values(found)
        if type(found) is not dict:
            return found
        (kind, content), *_ = found.items()
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.values(content))
        return _DECODERS[kind](self, content)

    def values(self, found: Iterable[Any]) -> list[Any]:
        return [self.value(item) for item in found]

    def take(self, count: int) -> bytes:
        if not 0 <= count <= len(self.rest):
            raise ValueError(f"{count} bytes wanted of {len(self.rest)}")
        taken, self.rest = bytes(self.rest[:count]), self.rest[count:]
        return taken

    def pairs(self, found: Iterable[Any]) -> dict[Any, Any]:
        return {self.value(key): self.value(item) for key, item in found}

    def tensor(self, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        taken = bytearray(self.take(prod(shape) * dtype.itemsize))
        return torch.frombuffer(taken, dtype=dtype).view(shape) if taken else torch.empty(shape, dtype=dtype)

    def named(self, module: str, name: str, items: list[Any]) -> Any:
        kind = loaded_class(module, name)
        if not is_namedtuple(kind) or len(items) != len(kind._fields):  # type: ignore[attr-defined]
            raise ValueError(f"{module}.{name} is no tuple with {len(items)} names")
        return tuple.__new__(kind, self.values(items))

    def data(self, module: str, name: str, fields: dict[str, Any]) -> Any:
        kind = loaded_class(module, name)
        if not (_is_ours(module) and dataclasses.is_dataclass(kind)):
            raise ValueError(f"{module}.{name} is no dataclass of zerorun")
        if fields.keys() != {field.name for field in dataclasses.fields(kind)}:
            raise ValueError(f"{module}.{name} has other fields")
        made = object.__new__(kind)
        for field, content in fields.items():
            object.__setattr__(made, field, self.value(content))
        return made

    def member(self, module: str, name: str, member: str) -> enum.Enum:
        kind = loaded_class(module, name)
        if not issubclass(kind, enum.Enum):
            raise ValueError(f"{module}.{name} is no enumeration")
        return kind._member_map_[member]

    def number(self, dtype: str, nbytes: int) -> Any:
        numpy = sys.modules["numpy"]
        kind = numpy.dtype(dtype)
        if kind.kind not in _NUMBERS:
            raise ValueError(f"{dtype} is no number")
        return numpy.frombuffer(self.take(nbytes), kind)[0]


_DECODERS: dict[str, Callable[[_Reader, Any], Any]] = {
    "dict": lambda reader, content: reader.pairs(content),
    "ordered": lambda reader, content: OrderedDict(reader.pairs(content)),
    "tensor": lambda reader, content: reader.tensor(_DTYPES[content[0]], content[1]),
    "member": lambda reader, content: reader.member(*content),
    "named": lambda reader, content: reader.named(*content),
    "data": lambda reader, content: reader.data(*content),
    "int": lambda reader, content: int(content, 16),
    "bytes": lambda reader, content: reader.take(content),
    "bytearray": lambda reader, content: bytearray(reader.take(content)),
    "complex": lambda reader, content: complex(*content),
    "dtype": lambda reader, content: _DTYPES[content],
    "device": lambda reader, content: torch.device(content),
    "slice": lambda reader, content: slice(*reader.values(content)),
    "type": lambda reader, content: _BUILTINS[content],
    "number": lambda reader, content: reader.number(*content),
}


# -- classes -------------------------------------------------------------------------------------------------------


def is_namedtuple(kind: type) -> bool:
    """Return True for a class that ``collections.namedtuple`` or ``typing.NamedTuple`` made."""
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def path_of(kind: type) -> tuple[str, str]:
    """Return (module, name in it). Raises MessageError for a class that other ranks could not find there."""
    module, name = kind.__module__, kind.__qualname__
    try:
        found = loaded_class(module, name)
    except (LookupError, ValueError):
        found = None
    if found is not kind:
        raise MessageError(
            f"a {module}.{name} cannot be sent to other ranks, which would not find its class by this name. Remedy: "
            "define the class at the top level of a module."
        )
    return module, name


def loaded_class(module: str, name: str) -> type:
    """Return a class that this process has, found by dictionaries alone: no import, and no look-up of attributes."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = vars(found)[part]
    if not isinstance(found, type):
        raise ValueError(f"{module}.{name} is no class")
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]
