"""Look through files of torch.save that strangers have made, before torch reads them.

With ``weights_only``, torch's own reader runs nothing that is not on its list. But what is on the list can be told to take
any amount of memory (a bytearray of a given length, compressed records) or time (keys that take forever to hash, values
that are shared so often that nobody can print them). And the file may say that a tensor is larger than its bytes, or that
it has none.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from typing import IO, Any

import torch

from ...distributed.device import on_host
from .pickles import RuledUnpickler

_MOST_PICKLE = 1 << 30  # bytes
_MOST_VALUES = 1_000_000  # beyond one for each byte of the pickle; shared ones count as often as they are reached
_PICKLES_BEFORE_TENSORS = 5  # in the format before torch 1.6
_ALLOCATES = re.compile(r"torch\.(\w+\.)*\w*(Storage|Tensor)")
_TYPED = "torch._tensor._rebuild_from_type_v2"


class _Named:
    """A class or function that the pickle names."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Made:
    """Stands for what would be made of ``parts``."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


class _DryRun(RuledUnpickler):
    """Finds out what is in a pickle, and makes nothing but dicts, lists and the like."""

    def find_class(self, module: str, name: str) -> Any:
        return _Named(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return _Made(pid)

    def make(self, kind: Any, args: Any) -> Any:
        if not isinstance(kind, _Named) or type(args) is not tuple:
            return super().make(kind, args)
        if kind.name == "collections.OrderedDict" and not args:
            return {}
        first = args[0] if args else None
        typed = kind.name == _TYPED and not (isinstance(first, _Named) and first.name.startswith("torch._utils._rebuild_"))
        if typed or _ALLOCATES.fullmatch(kind.name) or (kind.name == "builtins.bytearray" and type(first) is int):
            raise pickle.UnpicklingError(f"it calls {kind.name:.80} with a size, not with values")
        return _Made(kind, args)

    def fill(self, made: Any, state: Any) -> None:
        if isinstance(made, _Made):
            made.parts += (state,)
        elif type(made) is not dict:  # an OrderedDict, whose attributes do not matter
            super().fill(made, state)


class FileSlice(io.RawIOBase):
    """``length`` bytes of an open file, as a file that returns no more than these, whatever length is asked for."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._file, self._begin, self.length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence])
        return self._at

    def readinto(self, out: Any) -> int:
        view = memoryview(out)[: max(0, self.length - self._at)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return int(count)

    def read(self, length: int | None = -1) -> bytes:
        left = max(0, self.length - self._at)
        return super().read(left if length is None or length < 0 else min(length, left)) or b""


def look_through(file: FileSlice) -> None:
    """Raise UnpicklingError, or whatever else damage leads to, for a file that torch should not read."""
    zipped = is_zipped(file)
    if zipped:
        _look_into_archive(file)
        return
    for _ in range(_PICKLES_BEFORE_TENSORS):
        begin = file.tell()
        _refuse_endless(_DryRun(file).load(), file.tell() - begin)
    file.seek(0)


def is_zipped(file: FileSlice) -> bool:
    """True if the file has torch's present format, a zip archive."""
    file.seek(0)
    start = file.read(4)
    file.seek(0)
    return start == b"PK\x03\x04"


def _look_into_archive(file: FileSlice) -> None:
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
                raise pickle.UnpicklingError(f"{record.filename!r:.80} is compressed, as torch does not")
            if record.filename.endswith(".pkl"):
                if record.file_size > min(_MOST_PICKLE, file.length):
                    raise pickle.UnpicklingError(f"{record.filename!r:.80} has {record.file_size} bytes")
                _refuse_endless(_DryRun(io.BytesIO(archive.read(record))).load(), record.file_size)
    file.seek(0)


def _refuse_endless(value: Any, nbytes: int) -> None:
    """Raise UnpicklingError for a value that contains itself, or has far more parts than the pickle has bytes."""
    counts: dict[int, int] = {}  # by id; -1: its parts are being counted
    left = [value]
    while left:
        parts, known = _parts(left[-1]), counts.get(id(left[-1]))
        if known is None and parts:
            counts[id(left[-1])] = -1
            left.extend(part for part in parts if id(part) not in counts and _parts(part))
            if any(counts.get(id(part)) == -1 for part in parts):
                raise pickle.UnpicklingError("a value is in itself")
            continue
        if known == -1:
            counts[id(left[-1])] = 1 + sum(counts.get(id(part), 1) for part in parts)
        left.pop()
    if counts.get(id(value), 1) > _MOST_VALUES + nbytes:
        raise pickle.UnpicklingError("its values are shared too often")


def _parts(value: Any) -> Any:
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    return value.parts if isinstance(value, _Made) else value if type(value) in (tuple, list, set, frozenset) else ()


def refuse_strange_tensors(value: Any, nbytes: int) -> None:
    """Raise ValueError unless all tensors in ``value`` are plain ones on the CPU, of at most ``nbytes`` each."""
    left, seen = [value], set()
    while left:
        item = left.pop()
        if isinstance(item, torch.Tensor):
            plain = item.layout == torch.strided and on_host(item) and not item.is_quantized
            if not plain or item.numel() * item.element_size() > nbytes:
                raise ValueError(f"it has a tensor of the shape {list(item.shape)!r:.80} without values for it")
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            left.extend(item.values() if isinstance(item, dict) else item)
