"""Tensor files: safetensors files that are written as a stream and read by byte range, with a checksum for each block.

[Note: why not the safetensors package]
The format (an 8-byte length, a JSON header, the bytes of the tensors one after the other) is the package's; any loader
opens these files. The package writes a file from tensors that are all in memory, and reads slices by the first dimension
through mmap. Here a file is written while its tensors come in, one in memory at a time, and a rank reads exactly the bytes
it needs into the place where it needs them.

[Note: blocks]
The manifest has one CRC-32 (as in zlib, ISO 3309) for every ``BLOCK_BYTES`` of a file, counted from its beginning. So a
rank that reads a slice can check it without reading the whole file: the blocks around the slice are enough.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, DamagedError
from .files import open_regular

BLOCK_BYTES = 1 << 20
_MOST_HEADER = 100_000_000  # bytes, as in the safetensors package
_MOST_DIMS = 64  # of a tensor of torch
_MOST_NUMEL = 1 << 62

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_HEXADECIMAL = re.compile("[0-9a-f]*")
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def dtype_code(dtype: torch.dtype, name: str) -> str:
    """The format's name of ``dtype``. Raises CheckpointError, naming the tensor, if it has none."""
    if dtype not in _CODES:
        raise CheckpointError(
            f"tensor {name!r} has dtype {dtype}, which safetensors files cannot hold. Remedy: keep it in another dtype, or "
            "register a buffer that can be computed anew with persistent=False."
        )
    return _CODES[dtype]


def dtype_of(code: str) -> torch.dtype:
    """The dtype that the format calls ``code``. Raises CheckpointError if there is none."""
    if code not in _DTYPES:
        raise CheckpointError(f"dtype {code!r} in a safetensors file is not known to this version.")
    return _DTYPES[code]


@dataclass(frozen=True)
class Described:
    """One tensor of a file: its name, the format's name of its dtype, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * dtype_of(self.dtype).itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Described:
        return cls(name, dtype_code(tensor.dtype, name), tuple(tensor.shape))


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file: its length in bytes, and the CRC-32 of each of its blocks."""

    nbytes: int
    crcs: tuple[int, ...]

    def check(self, data: bytes, path: Path) -> None:
        """Raise CheckpointError, naming ``path``, if ``data`` is not what the file held when it was written."""
        if len(data) != self.nbytes:
            raise DamagedError(f"{path} has {len(data)} bytes instead of {self.nbytes}: it is not complete.")
        for block, crc in enumerate(self.crcs):
            part = data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if zlib.crc32(part) != crc:
                raise damaged(path, block * BLOCK_BYTES, len(part))

    def to_json(self) -> dict[str, object]:
        return {"bytes": self.nbytes, "crc32": "".join(f"{crc:08x}" for crc in self.crcs)}

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Undo ``to_json``. Raises ValueError, KeyError or TypeError for what ``to_json`` cannot have made."""
        nbytes, text = value["bytes"], value["crc32"]
        if type(nbytes) is not int or nbytes < 0 or type(text) is not str or not _HEXADECIMAL.fullmatch(text):
            raise ValueError(f"a file of {nbytes!r} bytes")
        if len(text) != 8 * -(-nbytes // BLOCK_BYTES):
            raise ValueError(f"{len(text)} digits are not the checksums of {nbytes} bytes")
        return cls(nbytes, tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8)))


def damaged(path: Path, begin: int, length: int) -> DamagedError:
    """The error for a block that does not have its checksum."""
    return DamagedError(f"{path} is damaged: bytes {begin}..{begin + length} do not have the checksum that was written.")


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place. The tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def tensor_sum(tensor: torch.Tensor, before: int = 0) -> int:
    """The CRC-32 of the bytes of ``tensor``, on any device, going on from ``before``."""
    kept = tensor.detach().cpu().contiguous()  # it must outlive the view of its memory
    return zlib.crc32(memory_of(kept), before)


# -- writing -----------------------------------------------------------------------------------------------------


def header_bytes(tensors: Sequence[Described], metadata: dict[str, str]) -> bytes:
    """The beginning of a file that holds ``tensors`` in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


# -- reading -----------------------------------------------------------------------------------------------------


def _refuse_overlap(tensors: Iterable[Located]) -> None:
    """Raise ValueError if tensors share bytes: then a small file could ask for any amount of memory."""
    end = 0
    for tensor in sorted((tensor for tensor in tensors if tensor.nbytes), key=lambda tensor: tensor.begin):
        if tensor.begin < end:
            raise ValueError(f"tensor {tensor.name!r} begins inside of another")
        end = tensor.begin + tensor.nbytes


@dataclass(frozen=True)
class Located(Described):
    """A tensor and where its bytes begin in the file."""

    begin: int  # bytes


class TensorFile:
    """One safetensors file to read from. What is read is checked against ``record``, unless that is None.

    With ``home``, the directory that the file is in, a link must not lead out of that directory. Raises CheckpointError,
    which names the file, if it is short, damaged or no safetensors file.
    """

    def __init__(self, path: Path, record: FileRecord | None = None, home: Path | None = None) -> None:
        self.path, self._record = path, record
        self._kept: tuple[int, bytes] = (-1, b"")  # number and content of the last block that was read for a part of it
        try:
            self._file = open_regular(path, home)
        except OSError as error:
            raise DamagedError(f"{path} cannot be opened: {error.strerror}.") from error
        try:
            self.nbytes = os.fstat(self._file).st_size
            if record is not None and self.nbytes != record.nbytes:
                raise DamagedError(f"{path} has {self.nbytes} bytes instead of {record.nbytes}: it is not complete.")
            self.tensors, self.metadata = self._parse()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _parse(self) -> tuple[dict[str, Located], dict[str, str]]:
        try:
            length = int.from_bytes(self._range(0, 8), "little")
            if not 2 <= length <= min(self.nbytes - 8, _MOST_HEADER):
                raise ValueError(f"header length {length}")
            header = json.loads(self._range(8, length))
            if not isinstance(header, dict):
                raise ValueError("the header is no object")
            metadata = header.pop("__metadata__", {})
            if not isinstance(metadata, dict):
                raise ValueError(f"__metadata__ is {metadata!r:.40}")
            found = {name: self._locate(name, entry, 8 + length) for name, entry in header.items()}
            _refuse_overlap(found.values())
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{self.path} is no readable safetensors file: {error!s:.200}.") from error
        return found, metadata

    def _locate(self, name: str, entry: Any, start: int) -> Located:
        """One entry of the header. ``start``: where in the file the tensors begin, in bytes."""
        begin, end = entry["data_offsets"]
        numbers = (begin, end, *entry["shape"])
        if not all(type(number) is int and number >= 0 for number in numbers) or type(entry["dtype"]) is not str:
            raise ValueError(f"tensor {name!r} is described by {entry!r:.200}")
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name!r} has dtype {entry['dtype']!r:.40}, not known to this version.")
        tensor = Located(name, entry["dtype"], tuple(entry["shape"]), start + begin)
        if len(tensor.shape) > _MOST_DIMS or math.prod(filter(None, tensor.shape)) > _MOST_NUMEL:
            raise ValueError(f"tensor {name!r} has the shape {tensor.shape!r:.200}")
        if end - begin != tensor.nbytes or end > self.nbytes - start:
            raise ValueError(f"tensor {name!r} at {begin}..{end}")
        return tensor

    def _range(self, begin: int, length: int) -> bytes:
        buffer = bytearray(length)
        self.read_bytes(begin, memoryview(buffer))
        return bytes(buffer)

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill the contiguous 1-D CPU tensor ``out`` with elements from ``start`` of the flattened tensor ``name``."""
        tensor = self.tensors[name]
        if out.dtype != dtype_of(tensor.dtype) or start < 0 or start + out.numel() > tensor.numel:
            raise CheckpointError(
                f"{self.path}: {name!r} has dtype {tensor.dtype} and {tensor.numel} elements; "
                f"asked for {out.numel()} from {start} as {out.dtype}."
            )
        self.read_bytes(tensor.begin + start * out.element_size(), memory_of(out))

    def expect(self, name: str, start: int, size: int) -> None:
        """Let the system read ``size`` bytes from element ``start`` of ``name`` in the background, if it can."""
        tensor = self.tensors[name]
        if hasattr(os, "posix_fadvise"):
            begin = tensor.begin + start * dtype_of(tensor.dtype).itemsize
            os.posix_fadvise(self._file, begin, size, os.POSIX_FADV_WILLNEED)

    def read_bytes(self, begin: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``begin``, checked block by block."""
        if self._record is None:
            self._pread(begin, out)
            return
        done, size = 0, out.nbytes
        while done < size:
            block, inside = divmod(begin + done, BLOCK_BYTES)
            length = min(BLOCK_BYTES - inside, size - done)
            part = out[done : done + length]
            if inside == 0 and length == self._block_length(block):
                self._pread(begin + done, part)
                self._check(block, part)
            else:
                part[:] = memoryview(self._whole_block(block))[inside : inside + length]
            done += length

    def blocks(self) -> Iterator[int]:
        """Read and check every block; yields the bytes read."""
        for block in range(-(-self.nbytes // BLOCK_BYTES)):
            yield len(self._whole_block(block))

    def _block_length(self, block: int) -> int:
        return min(BLOCK_BYTES, self.nbytes - block * BLOCK_BYTES)

    def _whole_block(self, block: int) -> bytes:
        if self._kept[0] != block:
            buffer = bytearray(self._block_length(block))
            self._pread(block * BLOCK_BYTES, memoryview(buffer))
            self._check(block, buffer)
            self._kept = (block, bytes(buffer))
        return self._kept[1]

    def _check(self, block: int, data: memoryview | bytearray) -> None:
        if self._record is not None and zlib.crc32(data) != self._record.crcs[block]:
            raise damaged(self.path, block * BLOCK_BYTES, len(data))

    def _pread(self, begin: int, out: memoryview) -> None:
        done = 0
        while done < out.nbytes:
            try:
                read = os.preadv(self._file, [out[done:]], begin + done)
            except OSError as error:
                raise DamagedError(f"{self.path} cannot be read at byte {begin + done}: {error.strerror}.") from error
            if read == 0:
                raise DamagedError(f"{self.path} ends at byte {begin + done}: it is not complete.")
            done += read
