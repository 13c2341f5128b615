"""JSON values: turn Python values into JSON and back, without pickle. Tensors go into a tensor file; the JSON names them.

JSON has null, booleans, integers, finite floats, strings, lists and objects with string keys; these stand for themselves.
Everything else becomes an object: its key ``$`` says what kind of value it is, and the other keys hold the value in JSON's
terms. A value of a type that is not listed here is refused when it is saved, not when somebody needs it back. A defaultdict
comes back as a dict, a path as a string, and a parameter as a tensor.
"""

from __future__ import annotations

import base64
import math
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import torch

from ..errors import CheckpointError, DamagedError

_KIND = "$"
_INT_BITS = 14_000  # Python refuses to turn longer integers into decimal digits
_CLASSES = (torch.Size, tuple, set, frozenset, deque, Counter)
_SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in _CLASSES}
_NAMESPACES: dict[str, Any] = {kind.__name__: kind for kind in (Namespace, SimpleNamespace)}  # a script's arguments


def encode(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Return ``value`` in JSON's terms. Tensors in it are added to ``tensors`` under names that begin with ``where``.

    Raises CheckpointError, which names the place by a path from ``where``, for what cannot be stored without pickle.
    """
    try:
        return _encode(value, tensors, where)
    except RecursionError as error:
        raise CheckpointError(f"{where} is nested too deeply, or contains itself, and cannot be stored.") from error


def _encode(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # for an enumeration, its value
    if type(value) is int and value.bit_length() < _INT_BITS:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg()  # what is stored is the memory
        return {_KIND: "tensor", "name": _keep(plain, tensors, where)}
    if type(value) is list:
        return [_encode(item, tensors, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) in _CLASSES:
        items = value.items() if isinstance(value, Counter) else value
        extra = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
        return {_KIND: type(value).__name__, "items": _encode_all(items, tensors, where), **extra}
    if type(value) in (dict, OrderedDict, defaultdict):
        return _encode_dict(value, tensors, where)
    return _encode_rare(value, tensors, where)


def _keep(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], where: str) -> str:
    """Add ``tensor`` to ``tensors`` under a name that no other has, and return that name."""
    if tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"{where} is a tensor without plain values ({tensor.layout}, {tensor.device}). Remedy: "
            "give a dense tensor with values."
        )
    name, number = where, 1
    while name in tensors:
        number += 1
        name = f"{where}#{number}"
    tensors[name] = tensor
    return name


def _encode_all(items: Iterable[Any], tensors: dict[str, torch.Tensor], where: str) -> list[Any]:
    return [_encode(item, tensors, f"{where}[{index}]") for index, item in enumerate(items)]


def _encode_dict(value: dict[Any, Any], tensors: dict[str, torch.Tensor], where: str) -> Any:
    if all(type(key) is str for key in value) and _KIND not in value:
        return {key: _encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
    pairs = [[_encode(k, tensors, f"{where} key"), _encode(v, tensors, f"{where}[{k!r}]")] for k, v in value.items()]
    return {_KIND: "dict", "items": pairs}


def _encode_rare(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return {_KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "name": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_KIND: "device", "name": str(value)}
    if isinstance(value, complex):
        return {_KIND: "complex", "items": [_encode(value.real, {}, where), _encode(value.imag, {}, where)]}
    if isinstance(value, PurePath):
        return str(value)
    if type(value) in _NAMESPACES.values():
        return {_KIND: type(value).__name__, "items": _encode_dict(vars(value), tensors, where)}
    numpy = sys.modules.get("numpy")
    if (
        numpy is not None
        and isinstance(value, numpy.generic)
        and isinstance(value.item(), (bool, int, float, complex, str))
    ):
        return _encode(value.item(), tensors, where)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf" and value.itemsize <= 8:
        native = torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
        return {_KIND: "ndarray", "name": _keep(native, tensors, where)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored without pickle. "
        "Remedy: give numbers, strings, lists, dicts and tensors (for an object of your own, what its state_dict() or "
        "vars() gives)."
    )


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Undo ``encode``. Raises CheckpointError for what ``encode`` cannot have made, or only in a later version."""
    try:
        return _decode(value, tensors)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        what = f"{type(error).__name__}: {error!s:.200}"
        raise DamagedError(f"a value in the checkpoint cannot be decoded ({what}).") from error


def dtype_by_name(name: str) -> torch.dtype:
    """torch's dtype ``name``, such as ``float32``. Raises ValueError if there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r:.40}")
    return found


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    kind = value[_KIND]
    if kind in ("tensor", "ndarray"):
        tensor = tensors[value["name"]].clone()
        return tensor if kind == "tensor" else tensor.numpy()
    if kind == "float":
        return float(value["value"])
    if kind == "bytes":
        return base64.b64decode(value["base64"], validate=True)
    if kind == "dtype":
        return dtype_by_name(value["name"])
    if kind == "device":
        return torch.device(value["name"])
    if kind in _NAMESPACES:
        found = _NAMESPACES[kind]()
        vars(found).update(_decode(value["items"], tensors))
        return found
    items = [_decode(item, tensors) for item in value.get("items", [])]
    if kind == "complex":
        return complex(*items)
    if kind == "dict":
        return dict(items)
    if kind == "Counter":
        return Counter(dict(items))
    if kind == "deque":
        return deque(items, value.get("maxlen"))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](items)
    raise CheckpointError(
        f"the checkpoint holds a value of kind {kind!r:.80}, which this version does not know. Remedy: update zerorun."
    )
