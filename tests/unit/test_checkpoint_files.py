"""The files of checkpoints without a process group: plain values, tensor files, plans, manifests and directories."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import math
import os
import random
import shutil
import sys
import time
import zlib
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from covering import by_day
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from zerorun.checkpoint import directory as folder
from zerorun.checkpoint import stream, tensorfile
from zerorun.checkpoint.files import is_plain
from zerorun.checkpoint.json_values import decode, encode
from zerorun.checkpoint.manifest import MANIFEST, SCHEMA, Manifest, read_manifest
from zerorun.checkpoint.ranks import alone, attempt
from zerorun.checkpoint.save import pack_scalars, scalar, unpack_scalars
from zerorun.checkpoint.stream import FileWriter, WriteQueue, write_small
from zerorun.checkpoint.tensorfile import (
    BLOCK_BYTES,
    Described,
    FileRecord,
    TensorFile,
    dtype_of,
    header_bytes,
    memory_of,
)
from zerorun.checkpoint.write import Destination, commit, index_files, small_tensor_file
from zerorun.checkpoint.write_plan import CAST, MASTER, MODEL, Row, WritePlan, make_plan
from zerorun.distributed.layout import build_layout
from zerorun.distributed.topology import Topology
from zerorun.errors import CheckpointError, DamagedError

quick = settings(
    max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DTYPES = list(tensorfile._DTYPES.values())


# -- plain values ------------------------------------------------------------------------------------------------


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits; for bool, any truth values."""
    size = math.prod(shape) * dtype.itemsize
    data = torch.randint(256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    data = data % 2 if dtype == torch.bool else data
    return data.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(memory_of(tensor.detach().contiguous()))


def namespace(kind: type[Any], members: dict[str, Any]) -> Any:
    """With any names, "self" among them."""
    made = kind()
    vars(made).update(members)
    return made


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(random_tensor, st.sampled_from(DTYPES), shapes, st.integers(0, 1000))
names = st.text(st.characters(codec="utf-8"), max_size=5)
atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats(), names, st.binary(max_size=9)
)
hashables = st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=4
)
rare = st.one_of(
    st.complex_numbers(), st.sampled_from(DTYPES), st.sampled_from([torch.device("cpu"), torch.device("cuda", 3)]), tensors
)
values: st.SearchStrategy[Any] = st.recursive(
    atoms | rare,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(names, inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$", "$$", "name", "items"]), inner, max_size=3),
        st.sets(hashables, max_size=3),
        st.frozensets(hashables, max_size=3),
        st.dictionaries(hashables, st.integers(), max_size=3).map(Counter),
        st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
        st.builds(namespace, st.sampled_from([Namespace, SimpleNamespace]), st.dictionaries(names, inner, max_size=3)),
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value; NaN equals NaN, and 0 is not -0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    if isinstance(one, (Namespace, SimpleNamespace)):
        return same(vars(one), vars(other))
    if isinstance(one, (set, frozenset)):
        left = list(other)
        for item in one:
            match = next((index for index, found in enumerate(left) if same(item, found)), None)
            if match is None:
                return False
            left.pop(match)
        return not left
    return bool(one == other)


def through_json(value: Any) -> Any:
    """What comes back from a manifest."""
    kept: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, kept, "place"), allow_nan=False)
    assert all(name.startswith("place") for name in kept)
    return decode(json.loads(text), kept)


@quick
@given(values)
@example({"$": "tensor", "name": "nothing"})
@example({"$": "float", "value": "1"})
@example([{1: {2: (3, [4])}}, {None: 1, True: 2, "$": 3}])
@example(Counter({(1, "a"): 2, None: -1}))
@example([float("inf"), -float("inf"), float("nan"), -0.0, 10**300, -(10**300)])
def test_plain_values_come_back(value: Any) -> None:
    assert same(through_json(value), value)


def test_tensors_that_torch_conjugates_later_are_stored_as_they_are() -> None:
    """Their memory has other values: a bit says that they are to be conjugated, or have another sign."""
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    kept: dict[str, torch.Tensor] = {}
    encode([conjugate, conjugate.imag], kept, "place")
    assert [torch.view_as_real(kept["place[0]"]).tolist(), kept["place[1]"].tolist()] == [[[1, -2], [3, 1]], [-2, 1]]
    assert not any(value.is_conj() or value.is_neg() for value in kept.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_all_dtypes_come_back(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3,), (2, 0, 5), (2, 3, 1)):
        value = {"here": [random_tensor(dtype, shape, 3)]}
        assert same(through_json(value), value)


def test_tensors_that_are_views() -> None:
    """Transposed, expanded, with a lazy conjugation or negation, parameters."""
    z = torch.tensor([[1 + 2j, 3 - 1j]], dtype=torch.complex64)
    found = through_json([torch.arange(6).view(2, 3).t(), torch.ones(1).expand(4), z.conj(), z.conj().imag])
    assert found[0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found[1].tolist() == [1] * 4
    assert found[2].tolist() == [[1 - 2j, 3 + 1j]]
    assert found[3].tolist() == [[-2, 1]]
    parameter = through_json(torch.nn.Parameter(torch.ones(2)))
    assert same(parameter, torch.ones(2))


def test_a_decoded_tensor_is_a_copy() -> None:
    kept: dict[str, torch.Tensor] = {}
    encoded = encode([torch.zeros(2)], kept, "place")
    decode(encoded, kept)[0].fill_(1)
    assert decode(encoded, kept)[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    "value, expected",
    [
        (np.float64(1.5), 1.5),
        (np.float32("nan"), float("nan")),
        (np.int64(-3), -3),
        (np.uint8(200), 200),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
        (np.bytes_(b"bytes"), b"bytes"),
        (np.complex128(1j), 1j),
    ],
    ids=repr,
)
def test_numpy_scalars_become_numbers(value: Any, expected: Any) -> None:
    assert same(through_json(value), expected)


@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"])
def test_numpy_arrays_come_back(kind: str) -> None:
    whole = (np.arange(24) % 2).reshape(2, 3, 4).astype(kind)
    for value in (whole, whole[:, ::-1, ::2], np.array(1, kind), np.zeros((0, 3), kind), np.asfortranarray(whole)):
        found = through_json([value])[0]
        assert isinstance(found, np.ndarray)
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert (found == value).all()


class Color(str, enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Own:
    """A class that only pickle could store."""


class OwnList(list):  # type: ignore[type-arg]
    pass


class OwnFloat(float):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value, expected",
    [
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (bytearray(b"x"), b"x"),
        (Path("a/b"), "a/b"),
        (Color.RED, "red"),
        ({1: "int", "1": "str", (1,): "tuple"}, {1: "int", "1": "str", (1,): "tuple"}),
        ([True, 1, 1.0], [True, 1, 1.0]),
        ("\ud800", "\ud800"),
    ],
    ids=repr,
)
def test_near_relatives(value: Any, expected: Any) -> None:
    """Subclasses that say nothing more than their base are stored as it; True is not 1, and 1 is not "1"."""
    found = through_json(value)
    assert found == expected
    assert same(found, expected) or isinstance(value, Color)


def test_arguments_of_a_script_come_back() -> None:
    """Megatron keeps them in its checkpoints."""
    args = Namespace(lr=0.1, dtype=torch.bfloat16, inner=SimpleNamespace(path=Path("a")), **{"$": 1, "a b": None})
    args.self = 2
    found = through_json({"args": args})["args"]
    assert vars(found) == {**vars(args), "inner": SimpleNamespace(path="a")} and type(found) is Namespace


def test_a_deque_keeps_its_length() -> None:
    assert through_json(deque([1, 2], maxlen=2)).maxlen == 2


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


REFUSED: dict[str, Callable[[], Any]] = {
    "object": object,
    "instance": Own,
    "class": lambda: Own,
    "function": lambda: endless,
    "lambda": lambda: lambda: None,
    "module": lambda: json,
    "generator": lambda: (i for i in range(3)),
    "range": lambda: range(3),
    "named tuple": lambda: Point(1, 2),
    "int enum": lambda: Level.HIGH,
    "subclass of list": lambda: OwnList([1]),
    "subclass of float": lambda: OwnFloat(1.0),
    "time": lambda: datetime.now(timezone.utc),
    "memory": lambda: memoryview(b"x"),
    "array of objects": lambda: np.array([object()]),
    "array of strings": lambda: np.array(["a"]),
    "records": lambda: np.zeros(2, dtype=[("x", "i4")]),
    "numpy time": lambda: np.datetime64("2020-01-01"),
    "generator of random numbers": lambda: torch.Generator(),
}
# What looks like a number, but is not.
IMPOSSIBLE: dict[str, Callable[[], Any]] = {
    "long double": lambda: np.longdouble(1),
    "array of long doubles": lambda: np.ones(2, np.longdouble),
    "sparse tensor": lambda: torch.eye(2).to_sparse(),
    "tensor on meta": lambda: torch.empty(2, device="meta"),
    "quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "endless": endless,
    "number too long for JSON": lambda: 10**5000,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_types_name_the_place(kind: str) -> None:
    value = REFUSED[kind]()
    places: dict[str, Any] = {
        "state": value,
        "state.args[3]": {"args": [1, 2, 3, value]},
        "state.a.b[0]": {"a": {"b": (value,)}},
        "state[1]": {1: value},
        "state[('x', 2)].y[1]": {("x", 2): {"y": deque([0, value])}},
    }
    for place, holder in places.items():
        with pytest.raises(CheckpointError) as found:
            encode(holder, {}, "state")
        assert str(found.value).startswith(f"{place} is a "), place
        assert "Remedy" in str(found.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_what_cannot_be_stored_is_a_checkpoint_error(kind: str) -> None:
    """Where other ranks wait, no other error will do. The place is named."""
    value = IMPOSSIBLE[kind]()
    with pytest.raises(CheckpointError, match=r"state(\.x| is nested too deeply)"):
        kept: dict[str, torch.Tensor] = {}
        json.dumps(encode({"x": [value]}, kept, "state"))
        small_tensor_file(kept)


def test_other_byte_order() -> None:
    """It is the same array to NumPy."""
    found = through_json([np.arange(3, dtype=">i4")])[0]
    assert found.tolist() == [0, 1, 2]


def test_keys_are_refused_like_values() -> None:
    with pytest.raises(CheckpointError, match="state key is a"):
        encode({Own(): 1}, {}, "state")


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2)},
        {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
        {"a": [torch.tensor(1)], "a[0]": torch.tensor(2)},
        {"a": {1: torch.tensor(1)}, "a[1]": torch.tensor(2)},
        {"a": [[torch.tensor(1)], torch.tensor(3)], "a[0]": [torch.tensor(2)]},
    ],
    ids=["dot first", "dot second", "index", "key", "nested"],
)
def test_tensors_are_not_confused(value: Any) -> None:
    """Two places whose names look alike hold two tensors."""
    assert same(through_json(value), value)


def test_tensors_as_keys_are_not_confused() -> None:
    value = {torch.tensor(1): "one", torch.tensor(2): "two"}
    assert {int(key): text for key, text in through_json(value).items()} == {1: "one", 2: "two"}


def test_unknown_kind() -> None:
    with pytest.raises(CheckpointError, match=r"'hologram'.*update zerorun"):
        decode({"$": "hologram", "items": []}, {})


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.0),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(2**62),
        torch.tensor(True),
        torch.tensor(float("inf")),
        torch.tensor(1.5, dtype=torch.bfloat16),
        7,
        0.1,
        float("nan"),
        True,
        None,
    ],
    ids=repr,
)
def test_scalars_of_an_optimizer_come_back(value: Any) -> None:
    packed = pack_scalars({"step": {"a": scalar(value, "step"), "b": scalar(value, "step")}, "k": {"a": scalar(1, "k")}})
    assert len(packed["step"]) == 1
    found = unpack_scalars(json.loads(json.dumps(packed, allow_nan=False)))
    assert same(found["a"]["step"], value)
    assert same(found["b"]["step"], value)
    assert found["a"]["k"] == 1
    assert "k" not in found["b"]


# -- tensor files ------------------------------------------------------------------------------------------------

Content = dict[str, torch.Tensor]
contents: st.SearchStrategy[Content] = st.dictionaries(
    st.one_of(st.sampled_from(["a.b.weight", 'quo"te', "ünï中😀", "back\\slash", "new\nline", "", "a b"]), names),
    tensors,
    max_size=5,
).filter(lambda content: "__metadata__" not in content)


def write_file(path: Path, content: Content, chosen: random.Random | None = None) -> FileRecord:
    """A file with ``content``, written in pieces of random lengths."""
    described = [Described.of(name, tensor) for name, tensor in content.items()]
    data = header_bytes(described, {"by": "test"}) + b"".join(bits(tensor) for tensor in content.values())
    path.unlink(missing_ok=True)  # of the example before
    writer = FileWriter(path, WriteQueue())
    while data:
        length = chosen.randint(1, 200) if chosen else len(data)
        writer.write(data[:length])
        data = data[length:]
    return writer.close()


def read_all(path: Path, record: FileRecord | None) -> Content:
    found = {}
    with TensorFile(path, record) as file:
        for name, tensor in file.tensors.items():
            flat = torch.empty(tensor.numel, dtype=dtype_of(tensor.dtype))
            file.read(name, 0, flat)
            found[name] = flat.view(tensor.shape)
    return found


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 bytes, so that small files have many."""
    monkeypatch.setattr(tensorfile, "BLOCK_BYTES", 64)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 64)


def sums(data: bytes, block: int) -> tuple[int, ...]:
    return tuple(zlib.crc32(data[begin : begin + block]) for begin in range(0, len(data), block))


@quick
@given(contents, st.randoms(use_true_random=False))
def test_files_are_safetensors_files(tmp_path: Path, content: Content, chosen: random.Random) -> None:
    path = tmp_path / "x.safetensors"
    record = write_file(path, content, chosen)
    assert record == FileRecord(path.stat().st_size, sums(path.read_bytes(), BLOCK_BYTES))
    assert FileRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    record.check(path.read_bytes(), path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "test"}
        assert set(file.keys()) == set(content)
        for name, tensor in content.items():
            assert same(file.get_tensor(name), tensor), name
    assert same(read_all(path, record), content)
    assert same(read_all(path, None), content)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_a_file(tmp_path: Path, dtype: torch.dtype) -> None:
    content = {str(shape): random_tensor(dtype, shape, 5) for shape in ((), (0,), (7,), (0, 3), (2, 1, 3))}
    path = tmp_path / "x.safetensors"
    path.write_bytes(small_tensor_file(content))
    with safe_open(path, "pt") as file:
        assert all(same(file.get_tensor(name), tensor) for name, tensor in content.items())
    assert same(read_all(path, None), content)


def test_files_of_safetensors_are_read(tmp_path: Path) -> None:
    """The package orders tensors in its own way."""
    from safetensors.torch import save_file

    content = {f"t{index}": random_tensor(dtype, (3, index), index) for index, dtype in enumerate(DTYPES)}
    save_file(content, tmp_path / "x.safetensors", {"any": "thing"})
    found = read_all(tmp_path / "x.safetensors", None)
    assert found.keys() == content.keys()
    assert all(same(found[name], tensor) for name, tensor in content.items())


@quick
@given(st.data(), st.booleans(), st.integers(0, 300), st.integers(1, 200))
def test_any_range_is_read(
    tmp_path: Path, small_blocks: None, data: st.DataObject, checked: bool, before: int, count: int
) -> None:
    """With and without checksums, beginning and ending anywhere in blocks, in any order."""
    dtype = data.draw(st.sampled_from(DTYPES))
    content = {"before": random_tensor(torch.uint8, (before,), 1), "x": random_tensor(dtype, (count,), 2)}
    path = tmp_path / "x.safetensors"
    record = write_file(path, content)
    assert len(record.crcs) == -(-record.nbytes // 64)
    with TensorFile(path, record if checked else None) as file:
        for _ in range(4):
            start = data.draw(st.integers(0, count))
            length = data.draw(st.integers(0, count - start))
            out = torch.zeros(length, dtype=dtype)
            file.expect("x", start, length * dtype.itemsize)
            file.read("x", start, out)
            assert bits(out) == bits(content["x"][start : start + length])
        assert sum(file.blocks()) == record.nbytes
        for start, length in ((-1, 1), (0, count + 1), (count, 1)):
            with pytest.raises(CheckpointError, match="asked for"):
                file.read("x", start, torch.zeros(length, dtype=dtype))


def test_edges_of_real_blocks(tmp_path: Path) -> None:
    """Files of several blocks of the real size; reads that begin and end around every edge."""
    count = 3 * BLOCK_BYTES + 12345
    content = {"x": random_tensor(torch.uint8, (count,), 1), "y": random_tensor(torch.float32, (700_001,), 2)}
    path = tmp_path / "x.safetensors"
    record = write_file(path, content)
    assert record == FileRecord(path.stat().st_size, sums(path.read_bytes(), BLOCK_BYTES))
    with TensorFile(path, record) as file:
        begin = file.tensors["x"].begin
        edges = [0, count, *(block * BLOCK_BYTES - begin + off for block in (1, 2, 3) for off in (-1, 0, 1))]
        for start in edges:
            for end in (end for end in edges if end >= start):
                out = torch.empty(end - start, dtype=torch.uint8)
                file.read("x", start, out)
                assert torch.equal(out, content["x"][start:end]), (start, end)
        out = torch.empty(700_001)
        file.read("y", 0, out)
        assert bits(out) == bits(content["y"])


@quick
@given(st.data(), st.integers(1, 5), st.integers(0, 7), st.integers(0, 400))
def test_a_flipped_bit_is_found(
    tmp_path: Path, small_blocks: None, data: st.DataObject, tensors: int, bit: int, size: int
) -> None:
    """In any byte: when the file is opened, or when a range around it is read. Elsewhere nothing is refused."""
    content = {f"t{index}": random_tensor(torch.uint8, (size + index,), index) for index in range(tensors)}
    path = tmp_path / "x.safetensors"
    record = write_file(path, content)
    damaged = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(damaged) - 1))
    damaged[position] ^= 1 << bit
    path.write_bytes(damaged)
    whole = f"bytes {position // 64 * 64}..{min(position // 64 * 64 + 64, record.nbytes)} "
    with pytest.raises(DamagedError) as found:
        record.check(bytes(damaged), path)
    assert whole in str(found.value)
    header = len(header_bytes([Described.of(n, t) for n, t in content.items()], {"by": "test"}))
    if position // 64 <= (header - 1) // 64:
        with pytest.raises(DamagedError) as found:
            TensorFile(path, record)
        assert str(path) in str(found.value)
        assert whole in str(found.value)
        return
    with TensorFile(path, record) as file:
        for name, tensor in content.items():
            start = data.draw(st.integers(0, tensor.numel()))
            length = data.draw(st.integers(0, tensor.numel() - start))
            begin = file.tensors[name].begin + start
            out = torch.zeros(length, dtype=torch.uint8)
            if length and begin // 64 <= position // 64 <= (begin + length - 1) // 64:
                with pytest.raises(DamagedError) as found:
                    file.read(name, start, out)
                assert str(path) in str(found.value)
                assert whole in str(found.value)
            else:
                file.read(name, start, out)
                assert torch.equal(out, tensor[start : start + length])
        with pytest.raises(DamagedError, match="do not have the checksum"):
            list(file.blocks())


def test_every_byte_of_a_small_file(tmp_path: Path) -> None:
    content = {"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bool)}
    path = tmp_path / "x.safetensors"
    record = write_file(path, content)
    good = path.read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            path.write_bytes(bad)
            with pytest.raises(DamagedError, match=rf"x\.safetensors is damaged: bytes 0\.\.{len(good)} "):
                read_all(path, record)


def test_every_length_of_a_file(tmp_path: Path, small_blocks: None) -> None:
    """Cut, the file is refused, with a record and without; longer, too, with a record."""
    content = {"a": torch.arange(30.0), "b": torch.ones(2, dtype=torch.bool), "c": torch.empty(0)}
    path = tmp_path / "x.safetensors"
    record = write_file(path, content)
    good = path.read_bytes()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(DamagedError, match=f"has {length} bytes instead of {len(good)}"):
            TensorFile(path, record)
        with pytest.raises(DamagedError, match=str(path)):
            read_all(path, None)
        with pytest.raises(DamagedError):
            record.check(good[:length], path)
    for more in (b"\0", b"x" * 100):
        path.write_bytes(good + more)
        with pytest.raises(DamagedError, match="instead of"):
            TensorFile(path, record)


def file_with_header(header: bytes, length: int | None = None, data: bytes = b"\0" * 16) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def one(**changes: Any) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        b"12345678",
        b"\0" * 100,
        b"\xff" * 100,
        b"PK\x03\x04 a zip file, as of torch.save" * 9,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        file_with_header(b"{}", 2**63),
        file_with_header(b"{}", 2**64 - 1),
        file_with_header(b"{}", 19),
        file_with_header(b"{}", 0),
        file_with_header(b"{}", 1),
        file_with_header(b"{"),
        file_with_header(b"[]"),
        file_with_header(b"12"),
        file_with_header(b'"text"'),
        file_with_header(b"null"),
        file_with_header(b"true"),
        file_with_header(b"\xff\xfe{}"),
        file_with_header(b"[" * 100_000),
        file_with_header(b'{"a":1}'),
        file_with_header(b'{"a":null}'),
        file_with_header(b'{"a":{}}'),
        file_with_header(one(shape=[2])),
        file_with_header(one(shape=5)),
        file_with_header(one(shape=["1"])),
        file_with_header(one(shape=[-1, -1])),
        file_with_header(one(shape=[1.0])),
        file_with_header(one(shape=None)),
        file_with_header(one(dtype=["F32"])),
        file_with_header(one(dtype=None)),
        file_with_header(one(data_offsets=[0])),
        file_with_header(one(data_offsets=[0, 4, 8])),
        file_with_header(one(data_offsets=[4, 0])),
        file_with_header(one(data_offsets=[-4, 0])),
        file_with_header(one(data_offsets=[0.0, 4.0])),
        file_with_header(one(data_offsets=["0", "4"])),
        file_with_header(one(data_offsets=[14, 18])),
        file_with_header(one(data_offsets=[2**70, 2**70 + 4])),
    ],
    ids=lambda data: repr(data[8:70]),
)
def test_files_that_are_something_else(tmp_path: Path, data: bytes) -> None:
    """One error, that names the file, whatever is in it."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"x\.safetensors"):
        read_all(path, None)


def test_unknown_dtype_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_with_header(one(dtype="F4_NEW")))
    with pytest.raises(CheckpointError, match="F4_NEW") as found:
        TensorFile(path)
    assert str(path) in str(found.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["F32", "BOOL"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4)
    ),
    max_leaves=10,
)


@quick
@given(
    json_values
    | st.fixed_dictionaries({"a": st.fixed_dictionaries(dict.fromkeys(("dtype", "shape", "data_offsets"), json_values))})
)
def test_any_header_is_read_or_refused(tmp_path: Path, header: Any) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_with_header(json.dumps(header).encode()))
    with contextlib.suppress(CheckpointError):
        read_all(path, None)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"none\.safetensors cannot be opened: No such file"):
        TensorFile(tmp_path / "none.safetensors")
    with pytest.raises(DamagedError, match="cannot be opened: Is a directory"):
        TensorFile(tmp_path)


def test_a_file_is_closed_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"12345678")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(DamagedError):
            TensorFile(path)
    assert len(os.listdir("/proc/self/fd")) == before


@quick
@given(st.binary(max_size=500), st.randoms(use_true_random=False))
def test_short_writes(tmp_path: Path, small_blocks: None, data: bytes, chosen: random.Random) -> None:
    """A nearly full disk takes less than it is given, again and again."""
    write = os.pwrite
    (tmp_path / "x").unlink(missing_ok=True)  # of the example before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, part, at: write(file, bytes(part)[: chosen.randint(1, 40)], at))
        record = write_small(tmp_path / "x", data)
    assert (tmp_path / "x").read_bytes() == data
    assert record == FileRecord(len(data), sums(data, 64))


@pytest.mark.parametrize("where", ["pwrite", "fsync", "open"])
def test_errors_of_small_files_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """As a full disk reports them. The ranks are told ``filename`` and ``strerror``."""

    def failing(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    path = tmp_path / "zerorun.json"
    if where == "open":
        path = tmp_path / "nowhere" / "zerorun.json"
    else:
        monkeypatch.setattr(os, where, failing)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as found:
        write_small(path, b"data")
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(found.value.filename) == str(path)


# -- plans -------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """Parts of a model on every rank, and what they hold."""

    tables: list[list[Row]]
    memory: dict[tuple[int, str, str], list[int]]  # rank, set, name -> elements
    order: list[str]
    shard: int
    elements: dict[tuple[str, str], list[int]]  # set, name -> all elements

    @property
    def topology(self) -> Topology:
        return Topology.plan(len(self.tables), shard_degree=self.shard)


SETS = (MODEL, "optimizer.exp_avg", "optimizer.exp_avg_sq")


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Units of parameters over ``shard x replicate`` ranks; buffers on rank 0 and frozen parameters on all."""
    shard, replicate = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    found = Model([[] for _ in range(shard * replicate)], {}, [], shard, {})
    numbers = iter(range(10**9))

    def add(rank: int, kind: str, row: Row) -> None:
        found.tables[rank].append(row)
        whole = found.elements.setdefault((kind, row.name), [next(numbers) for _ in range(math.prod(row.shape))])
        found.memory[rank, kind, row.name] = whole[row.start : row.start + row.numel]

    sizes = st.lists(st.integers(1, 40), min_size=0, max_size=2).map(tuple)
    for unit in range(draw(st.integers(1, 3))):
        shapes = draw(st.lists(sizes, min_size=1, max_size=5))
        names = [f"u{unit}.p{index}" for index in range(len(shapes))]
        found.order += names
        layout = build_layout(names, shapes, shard, whole=draw(st.booleans()))
        kind = draw(st.sampled_from(["fp32", "bf16", "export", "frozen"]))
        for rank in range(shard * replicate):
            address = 1000 * (rank + 1)
            if kind == "frozen":
                for name, shape in zip(names, shapes, strict=True):
                    add(rank, MODEL, Row(MODEL, name, 0, math.prod(shape), "BF16", shape, address))
                continue
            for piece in layout.pieces(rank % shard):
                entry = layout.entries[piece.entry]
                first = {"fp32": MODEL, "bf16": MASTER, "export": CAST}[kind]
                rounded = "" if kind == "fp32" else "BF16"
                for target in (first, *SETS[1:]) if kind != "export" else (first,):
                    row = Row(target, entry.name, piece.start, piece.numel, "F32", entry.shape, address, rounded)
                    rounded = ""
                    add(rank, target, row)
    for index in range(draw(st.integers(0, 2))):
        shape = draw(sizes) if draw(st.booleans()) else (0,)
        found.order.append(f"buffer{index}")
        add(0, MODEL, Row(MODEL, f"buffer{index}", 0, math.prod(shape), "I64", shape, 5))
    return found


def check_plan(model: Model, plan: WritePlan, max_file: int) -> None:
    ranks = len(model.tables)
    assert [task.number for task in plan.tasks] == list(range(len(plan.tasks)))
    assert sorted((task.set, task.tensor.name) for task in plan.tasks) == sorted(model.elements)
    writer_of: dict[str, int] = {}
    in_files: Counter[tuple[str, str]] = Counter()
    held: dict[str, int] = {}
    loads = [0] * ranks
    for task in plan.tasks:
        # every element once, from where a rank has it
        together: list[int] = []
        for source in task.sources:
            own = model.memory[source.rank, task.set, task.tensor.name]
            row = next(r for r in model.tables[source.rank] if (r.set, r.name) == (task.set, task.tensor.name))
            assert (source.start, source.address) == (row.start, row.address)
            assert source.start == len(together)
            assert source.numel <= len(own)
            together += own[: source.numel]
        assert together == model.elements[task.set, task.tensor.name]
        # from the writer's replica, or all from one rank
        near = all(source.rank // model.shard == task.writer // model.shard for source in task.sources)
        assert near or len(task.sources) == 1
        if (task.writer, task.set, task.tensor.name) in model.memory and len(together) == len(
            model.memory[task.writer, task.set, task.tensor.name]
        ):
            assert [source.rank for source in task.sources] == [task.writer], "the writer has it all"
        # its files
        assert bool(task.file) == (task.set != CAST)
        assert bool(task.rounded_file) == (task.rounded is not None)
        for file, kind, tensor in ((task.file, task.set, task.tensor), (task.rounded_file, MODEL, task.rounded)):
            if file:
                assert tensor is not None
                assert tensor in plan.sets[kind][file]
                assert writer_of.setdefault(file, task.writer) == task.writer, "a file has one writer"
                in_files[kind, tensor.name] += 1
        assert 0 <= task.writer < ranks
        assert held.setdefault(task.tensor.name, task.writer) == task.writer, "all sets of a parameter go together"
        loads[task.writer] += task.tensor.nbytes + (task.tensor.nbytes // 2 if task.rounded else 0)
    assert set(in_files.values()) <= {1}
    assert sorted(plan.files()) == sorted(writer_of)
    for kind, files in plan.sets.items():
        expected = [f"{kind}-{index + 1:05d}-of-{len(files):05d}.safetensors" for index in range(len(files))]
        assert list(files) == expected
        for file, tensors in files.items():
            assert tensors, file
            assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= max_file
    if model.shard < ranks:
        return  # what one replica alone has, it writes, however much that is
    # nobody has more than his share, and one parameter
    sizes: Counter[str] = Counter()
    for task in plan.tasks:
        sizes[task.tensor.name] += task.tensor.nbytes + (task.tensor.nbytes // 2 if task.rounded else 0)
    assert max(loads) <= sum(sizes.values()) / ranks + max(sizes.values()) + 1


@pytest.mark.parametrize(("max_file", "together"), [(39, [1, 1, 1]), (40, [2, 1]), (59, [2, 1]), (60, [3])])
def test_a_file_may_be_as_large_as_is_said(max_file: int, together: list[int]) -> None:
    rows = [Row(MODEL, f"p{index}", 0, 5, "F32", (5,)) for index in range(3)]
    plan = make_plan([rows], Topology(1, 1, 0), ["p0", "p1", "p2"], max_file)
    assert [len(tensors) for tensors in plan.sets[MODEL].values()] == together


def test_an_index_tells_the_bytes_of_all_its_tensors() -> None:
    """As Hugging Face's tools write it, for whom ``total_size`` decides what fits where."""
    rows = [Row(MODEL, "a", 0, 6, "F32", (2, 3)), Row(MODEL, "b", 0, 5, "BF16", (5,)), Row(MODEL, "c", 0, 0, "F32", (0,))]
    (index,) = index_files(make_plan([rows], Topology(1, 1, 0), ["a", "b", "c"], 24)).values()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {"a": names[0], "b": names[1], "c": names[1]}
    assert json.loads(index) == {"metadata": {"total_size": 34}, "weight_map": weight_map}


@settings(quick, max_examples=200)
@given(models(), st.sampled_from([1, 100, 1000, 10**9]))
def test_plans_bring_every_element_together(model: Model, max_file: int) -> None:
    check_plan(model, make_plan(model.tables, model.topology, model.order, max_file), max_file)


@quick
@given(models(), st.data())
def test_plans_notice_what_is_missing(model: Model, data: st.DataObject) -> None:
    """A part that no rank has is an error; one that another replica has may be."""
    rank = data.draw(st.sampled_from([rank for rank, rows in enumerate(model.tables) if rows] or [0]))
    gone = data.draw(st.sampled_from(model.tables[rank]))
    for rows in model.tables:
        rows[:] = [row for row in rows if not (row.set == gone.set and row.name == gone.name and row.start == gone.start)]
    left = any(row.set == gone.set and row.name == gone.name for rows in model.tables for row in rows)
    if left:
        with pytest.raises(CheckpointError, match="is an error in zerorun"):
            make_plan(model.tables, model.topology, model.order)
    else:
        plan = make_plan(model.tables, model.topology, model.order)
        assert all((task.set, task.tensor.name) != (gone.set, gone.name) for task in plan.tasks)


def test_plan_of_nothing() -> None:
    assert make_plan([[], []], Topology.plan(2), []).files() == {}


# -- manifests ---------------------------------------------------------------------------------------------------


def some_manifest(tag: str = "global_step7", saved_at: str = "2024-06-07T08:09:10.111213+00:00") -> Manifest:
    made = Manifest(tag, saved_at, {"global_steps": 7, "micro_steps": 14, "skipped_steps": 0}, {"zerorun": "1"})
    made.parameters = {"ü.weight": {"shape": [2, 3], "dtype": "BF16", "trainable": True, "group": 0}}
    made.optimizer = {"type": "Adam", "groups": [{"lr": 0.1, "betas": {"$": "tuple", "items": [0.9, 0.95]}}], "scalars": {}}
    made.client_state = {"text": "spaces and 'quotes'", "small": 1e-300, "list": [1, None, True, -0.5]}
    made.sets = {"model": ["model-00001-of-00001.safetensors"]}
    made.files = {"model-00001-of-00001.safetensors": FileRecord(BLOCK_BYTES + 5, (1, 0xFFFFFFFF))}
    return made


def records(crcs: list[int]) -> st.SearchStrategy[FileRecord]:
    """Of files that have as many blocks."""
    longest = len(crcs) * BLOCK_BYTES
    return st.integers(max(longest - BLOCK_BYTES + 1, 0), longest).map(lambda size: FileRecord(size, tuple(crcs)))


@quick
@given(
    st.builds(
        Manifest,
        names,
        names,
        st.dictionaries(names, st.integers()),
        scheduler=values.filter(lambda value: True).map(lambda value: encode(value, {}, "x")),
        files=st.dictionaries(names.filter(is_plain), st.lists(st.integers(0, 2**32 - 1), max_size=3).flatmap(records)),
    )
)
def test_manifests_come_back(manifest: Manifest) -> None:
    assert Manifest.from_text(manifest.to_text(), Path("x")) == manifest
    assert Manifest.from_text(manifest.to_text().encode(), Path("x")) == manifest


def test_every_bit_of_a_manifest(tmp_path: Path) -> None:
    """A flipped bit is found, unless it changes nothing that is said."""
    manifest = some_manifest()
    good, path = manifest.to_text().encode(), tmp_path / MANIFEST
    harmless = 0
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            try:
                found = Manifest.from_text(bytes(bad), path)
            except DamagedError as error:
                assert str(path) in str(error)
            else:
                assert found == manifest, bytes(bad)
                harmless += 1
    assert harmless < len(good)  # a space that became a tab, an a that became an A in the checksum


@quick
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
def test_overwritten_manifests(position: int, stripe: bytes) -> None:
    manifest = some_manifest()
    bad = bytearray(manifest.to_text().encode())
    position %= len(bad)
    bad[position : position + len(stripe)] = stripe
    with contextlib.suppress(DamagedError):
        assert Manifest.from_text(bytes(bad), Path("x")) == manifest


def test_every_length_of_a_manifest() -> None:
    good = some_manifest().to_text().encode()
    for length in range(len(good)):
        with pytest.raises(DamagedError, match="x is damaged"):
            Manifest.from_text(good[:length], Path("x"))


@pytest.mark.parametrize("text", ["", "null", "[]", "12", '"text"', "{}", '{"content": {}}', "[" * 100_000, "\0" * 50])
def test_files_that_are_no_manifests(text: str) -> None:
    with pytest.raises(DamagedError, match="x is damaged"):
        Manifest.from_text(text, Path("x"))


def changed_manifest(**changes: Any) -> str:
    """With a right checksum; a value of ... takes the key away."""
    content = {**json.loads(some_manifest().to_text())["content"], **changes}
    content = {key: value for key, value in content.items() if value is not ...}
    crc = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps({"crc32": f"{crc:08x}", "content": content})


def test_a_manifest_of_the_future() -> None:
    """It is not damaged, and says what to do."""
    for changes in ({"schema": SCHEMA + 1}, {"schema": SCHEMA + 1, "hologram": 1, "files": ...}, {"block_bytes": 4096}):
        with pytest.raises(CheckpointError, match="update zerorun") as found:
            Manifest.from_text(changed_manifest(**changes), Path("x"))
        assert not isinstance(found.value, DamagedError)
        assert str(found.value).startswith("x has schema")


@pytest.mark.parametrize("changes", [{"hologram": 1}, {"tag": ...}, {"files": ...}, {"files": [1]}, {"counters": ...}])
def test_a_manifest_with_other_fields(changes: dict[str, Any]) -> None:
    """Of this schema, and with a right checksum: still an error that names the file."""
    with pytest.raises(CheckpointError, match="x"):
        Manifest.from_text(changed_manifest(**changes), Path("x"))


def test_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: zerorun\.json cannot be read: No such file"):
        read_manifest(tmp_path)


# -- directories -------------------------------------------------------------------------------------------------


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def fill(place: Path, tag: str, step: int, saved_at: str = "", *, latest: bool = True) -> None:
    """The files of a checkpoint; the manifest last."""
    record = write_small(place / "model.safetensors", str(step).encode() * 9)
    manifest = Manifest(tag, saved_at or now(), {"global_steps": step}, becomes_latest=latest)
    manifest.files = {"model.safetensors": record}
    write_small(place / MANIFEST, manifest.to_text().encode())


def save(
    directory: Path, tag: str, step: int, keep: int | None = None, *, latest: bool = True, aside: bool = False
) -> None:
    """What the leader of a save does. ``latest=False``: it is killed before that. ``aside``: with save_latest=False."""
    saved_at = now()
    held = folder.begin(directory, tag)
    fill(held.path, tag, step, saved_at, latest=not aside)
    folder.publish(directory, tag)
    held.release()
    if latest and not aside:
        folder.point_latest(directory, tag)
    folder.prune(directory, tag, keep)


def step_of(path: Path) -> int:
    """The step of a checkpoint that is complete to the last byte."""
    manifest = read_manifest(path)
    assert not folder.missing_files(path, manifest.files)
    for name, record in manifest.files.items():
        record.check((path / name).read_bytes(), path / name)
    return manifest.global_steps


def test_order_of_trust(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, f"s{step}", step)
    assert folder.in_order_of_trust(tmp_path) == ["s3", "s2", "s1"]
    assert folder.newest_first(tmp_path) == ["s3", "s2", "s1"]
    folder.point_latest(tmp_path, "s1")  # somebody goes back
    assert folder.in_order_of_trust(tmp_path) == ["s1", "s3", "s2"]
    (tmp_path / "latest").unlink()
    assert folder.in_order_of_trust(tmp_path) == ["s3", "s2", "s1"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\n",
        b"gone",
        b"..",
        b".",
        b"/",
        b"../s1",
        b"a\0b",
        b"\xff\xfe",
        b"latest",
        b".saving.s3",
        b"s3 and more",
        b"x" * 255,
        b"x" * 256,
        b"x" * 5000,
    ],
    ids=lambda text: repr(text[:12]) + str(len(text)),
)
def test_garbage_in_latest(tmp_path: Path, text: bytes) -> None:
    """Nothing in it makes the newest checkpoint be missed, or anything outside of the directory be loaded."""
    for step in (1, 2, 3):
        save(tmp_path, f"s{step}", step)
    (tmp_path / "latest").write_bytes(text)
    found = folder.in_order_of_trust(tmp_path)
    complete = [name for name in found if (tmp_path / name / MANIFEST).exists()]
    assert complete == ["s3", "s2", "s1"]


def test_one_bit_of_latest(tmp_path: Path) -> None:
    save(tmp_path, "global_step8", 8)
    save(tmp_path, "global_step11", 11)
    good = (tmp_path / "latest").read_bytes()
    for position in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            (tmp_path / "latest").write_bytes(bad)
            assert folder.in_order_of_trust(tmp_path)[0] == "global_step11", bytes(bad)


def test_latest_with_a_line_end(tmp_path: Path) -> None:
    """As an editor writes it."""
    save(tmp_path, "a", 1)
    save(tmp_path, "b", 2)
    (tmp_path / "latest").write_text("a\n")
    assert folder.in_order_of_trust(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("tag", ["a ", " a", "a\n", "a\t"])
def test_tags_with_white_space(tmp_path: Path, tag: str) -> None:
    """They are refused, or they are told from those without."""
    save(tmp_path, "a", 1)
    try:
        folder.check_tag(tag)
    except CheckpointError:
        return
    save(tmp_path, tag, 2)
    assert folder.in_order_of_trust(tmp_path)[0] == tag


def test_damaged_and_foreign_directories(tmp_path: Path) -> None:
    """A damaged manifest is tried only if ``latest`` names it; others' directories never."""
    assert folder.in_order_of_trust(tmp_path / "nowhere") == []
    for step in (1, 2, 3):
        save(tmp_path, f"s{step}", step)
    (tmp_path / "s2" / MANIFEST).write_text("damaged")
    (tmp_path / "others").mkdir()
    (tmp_path / "file").write_text("x")
    fill(folder.begin(tmp_path, "unfinished").path, "unfinished", 9)
    assert folder.in_order_of_trust(tmp_path) == ["s3", "s1"]
    (tmp_path / "s3" / MANIFEST).unlink()
    assert folder.in_order_of_trust(tmp_path) == ["s3", "s1"]
    assert folder.newest_first(tmp_path) == ["s1"]


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "/", "a\0b", "\udc80", ".saving.x", ".replaced.x", ".deleting.x", "x.old", "latest"]
)
def test_tags_that_are_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="Remedy"):
        folder.check_tag(tag)


@pytest.mark.parametrize("tag", ["global_step7", "7", "a b", "ü", "x.older", "a.tmp", "latest1", "-rf", "*", "[a]"])
def test_tags_that_are_good(tmp_path: Path, tag: str) -> None:
    assert folder.check_tag(tag) == tag
    save(tmp_path, "before", 1, keep=2)
    for step in (2, 3):
        save(tmp_path, tag, step, keep=2)
    assert folder.in_order_of_trust(tmp_path) == [tag, "before"]
    assert step_of(tmp_path / tag) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["before", "latest", tag])


@pytest.mark.parametrize("part", by_day(range(5), 0))  # of the examples: each waits for the disk some dozens of times
@settings(quick, max_examples=20)
@given(saves=st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, 1, 2, 3])), min_size=1, max_size=8))
def test_prune_keeps_the_newest(
    tmp_path_factory: pytest.TempPathFactory, part: int, saves: list[tuple[int, int | None]]
) -> None:
    directory = tmp_path_factory.mktemp("prune")
    there: list[str] = []  # newest first
    for number, (tag, keep) in enumerate(saves):
        save(directory, f"s{tag}", number, keep)
        there = [f"s{tag}", *(name for name in there if name != f"s{tag}")][:keep]
        assert folder.in_order_of_trust(directory) == there
        assert step_of(directory / there[0]) == number
        assert {path.name for path in directory.iterdir()} == {*there, "latest"}


def test_prune_spares_what_latest_is_not_to_name(tmp_path: Path) -> None:
    """Such checkpoints are the script's own affair: they are neither deleted, nor do they push others out."""
    save(tmp_path, "s1", 1, keep=2)
    save(tmp_path, "best", 1, keep=2, aside=True)
    save(tmp_path, "probe", 1, keep=1, aside=True)
    assert folder.in_order_of_trust(tmp_path) == ["s1", "probe", "best"]
    for step in (2, 3, 4):
        save(tmp_path, f"s{step}", step, keep=2)
        assert step_of(tmp_path / "best") == step_of(tmp_path / "probe") == 1
    assert folder.in_order_of_trust(tmp_path) == ["s4", "s3", "probe", "best"]


def test_prune_spares_what_latest_names(tmp_path: Path) -> None:
    """Also where somebody has gone back to it."""
    for step in (1, 2, 3):
        save(tmp_path, f"s{step}", step)
    folder.point_latest(tmp_path, "s1")
    folder.prune(tmp_path, "s3", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "s1", "s3"]


def test_what_is_tried_where_latest_names_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, "s1", 1)
    save(tmp_path, "s2", 2)
    save(tmp_path, "probe", 3, aside=True)
    (tmp_path / "latest").write_text("gone")
    with caplog.at_level("WARNING", "zerorun"):
        assert folder.in_order_of_trust(tmp_path) == ["s2", "s1", "probe"]
    assert "latest names 'gone', which is not there. The newest checkpoint is tried: s2." in caplog.text


def test_what_cannot_be_deleted_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "s1", 1)
    remove = shutil.rmtree

    def fails(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(39, "Directory not empty", ".nfs0001")  # as a file that another client has open
        remove(path, ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", fails)
    with caplog.at_level("WARNING", "zerorun"):
        save(tmp_path, "s2", 2, keep=1)
    assert f"{tmp_path / 's1'} is not needed any more, and cannot be deleted: Directory not empty." in caplog.text
    assert folder.in_order_of_trust(tmp_path) == ["s2"]


def test_prune_keeps_what_it_did_not_make(tmp_path: Path) -> None:
    """Directories without a manifest, files, and a damaged checkpoint: somebody may want to look at it."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    save(tmp_path, "s1", 1)
    (tmp_path / "s1" / MANIFEST).write_text("damaged")
    save(tmp_path, "s2", 2, keep=1)
    save(tmp_path, "s3", 3, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "logs", "notes.txt", "s1", "s3"]
    assert (tmp_path / "logs" / "events").exists()


def test_prune_leaves_temporary_files_of_others(tmp_path: Path) -> None:
    """zerorun's own are called ``.saving.TAG``; the user's may be called anything else."""
    (tmp_path / "tmp.notes").write_text("mine")
    (tmp_path / "tmp.data").mkdir()
    (tmp_path / "tmp.data" / "table.csv").write_text("mine")
    save(tmp_path, "s1", 1)
    assert (tmp_path / "tmp.notes").exists()
    assert (tmp_path / "tmp.data" / "table.csv").exists()


def test_a_directory_of_others_is_not_replaced(tmp_path: Path) -> None:
    """A tag that is the name of a directory without a manifest costs nobody his files."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("mine")
    with contextlib.suppress(CheckpointError, OSError):
        save(tmp_path, "data", 1)
    assert any(path.read_text() == "mine" for path in tmp_path.rglob("precious"))


def test_left_overs_are_replaced(tmp_path: Path) -> None:
    """Files of an interrupted save do not get into the next one."""
    stale = folder.begin(tmp_path, "s1")
    (stale.path / "model-00009-of-00009.safetensors").write_text("x")
    stale.release()  # as the end of its process does
    (tmp_path / ".saving.s1.rank0").touch()
    (tmp_path / ".saving.latest").write_text("s0")  # of an earlier version
    (tmp_path / f".saving.latest.{'0' * 16}").write_text("s0")
    (tmp_path / ".deleting.s0").mkdir()
    (tmp_path / ".deleting.s0" / MANIFEST).write_text("{}")
    assert folder.in_order_of_trust(tmp_path) == []
    save(tmp_path, "s1", 1)
    assert sorted(path.name for path in (tmp_path / "s1").iterdir()) == ["model.safetensors", MANIFEST]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "s1"]


def test_a_damaged_checkpoint_is_named_when_latest_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What ``latest`` names is tried, and named by that; others are named when they are left out."""
    for step in (1, 2, 3):
        save(tmp_path, f"s{step}", step)
    (tmp_path / "s2" / MANIFEST).write_text("{")
    (tmp_path / "s3" / MANIFEST).write_text("{")
    with caplog.at_level("WARNING", "zerorun"):
        assert folder.in_order_of_trust(tmp_path) == ["s3", "s1"]
        assert [str(tmp_path / "s2") in record.getMessage() for record in caplog.records] == [True]
        caplog.clear()
        (tmp_path / "latest").unlink()
        assert folder.in_order_of_trust(tmp_path) == ["s1"]
        assert len(caplog.records) == 2


def test_what_a_killed_save_had_replaced(tmp_path: Path) -> None:
    """The next save deletes it, of whatever tag it was; but not if it is the only version that can be read."""
    for tag in ("s1", "s2"):
        save(tmp_path, tag, 1)
        shutil.copytree(tmp_path / tag, tmp_path / f".replaced.{tag}")
    (tmp_path / "s2" / MANIFEST).write_text("{")
    content = Manifest("s3", "2026-01-03", {"global_steps": 3})
    commit(alone(), Destination(tmp_path, "s3"), dict, lambda records: ({}, content))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".replaced.s2", "latest", "s1", "s2", "s3"]


# -- interrupted between any two steps ---------------------------------------------------------------------------


@dataclass
class Witness:
    """Copies a directory before every change of it by this process, while it is active."""

    source: Path
    to: Path
    active: bool = False
    copies: list[Path] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
        if changes or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            self.copy()

    def copy(self) -> None:
        self.active = False
        self.copies.append(self.to / f"{len(self.copies)}")
        shutil.copytree(self.source, self.copies[-1])
        self.active = True


_witness: list[Callable[[str, tuple[Any, ...]], None]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _witness:
        _witness[-1](event, arguments)


@pytest.fixture(autouse=True)
def nothing_is_too_young(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted save leaves is deleted after a while; here, at once."""
    monkeypatch.setattr(folder, "_STALE_S", -1)


@pytest.fixture(scope="module")
def auditing() -> Iterator[None]:
    """A hook stays for the life of the process; without a witness it does nothing."""
    sys.addaudithook(_audit)
    yield
    _witness.clear()


def instants(source: Path, to: Path, act: Callable[[], None]) -> list[Path]:
    """Copies of ``source`` from before and after every change that ``act`` makes."""
    witness = Witness(source, to)
    _witness.append(witness)
    with pytest.MonkeyPatch.context() as patch:

        def witnessed(act: Callable[..., int]) -> Callable[..., int]:
            def writing(*arguments: Any) -> int:
                if witness.active:
                    witness.copy()
                return act(*arguments)

            return writing

        patch.setattr(os, "write", witnessed(os.write))
        patch.setattr(os, "pwrite", witnessed(os.pwrite))
        witness.active = True
        act()
        witness.copy()
    witness.active = False
    _witness.pop()
    return witness.copies


def check_instants(copies: list[Path], before: int, after: int) -> None:
    """First the old checkpoint is the newest, then, to the end, the new one; it is always complete."""
    steps = []
    for copy in copies:
        names = folder.in_order_of_trust(copy)
        assert names, f"nothing is found in {sorted(path.name for path in copy.iterdir())}"
        steps.append(step_of(copy / names[0]))
        for name in names[1:]:
            step_of(copy / name)
    assert set(steps) <= {before, after}
    assert steps == sorted(steps), "the new checkpoint is lost again"
    assert steps[-1] == after


@pytest.mark.parametrize("keep", [None, 1, 2])
@pytest.mark.parametrize("tag", ["s2", "s1"], ids=["new tag", "same tag"])
def test_interrupted_at_any_instant(tmp_path: Path, auditing: None, tag: str, keep: int | None) -> None:
    place = tmp_path / "checkpoints"
    save(place, "s0", 0)
    save(place, "s1", 1)
    copies = instants(place, tmp_path / "first", lambda: save(place, tag, 2, keep))
    assert len(copies) >= 10
    check_instants(copies, 1, 2)
    assert not list(place.glob(".saving.*"))


@pytest.mark.each_value
@pytest.mark.parametrize("second", ["s1", "s3"], ids=["same tag", "new tag"])
@pytest.mark.parametrize("first", ["s1", "s2"], ids=["after the same tag", "after a new tag"])
def test_interrupted_twice(tmp_path: Path, auditing: None, first: str, second: str) -> None:
    """From every state that an interrupted save leaves, another save, interrupted, too."""
    place = tmp_path / "checkpoints"
    save(place, "s1", 1)
    for number, copy in enumerate(instants(place, tmp_path / "first", lambda: save(place, first, 2, 1))):
        found = step_of(copy / folder.in_order_of_trust(copy)[0])
        copies = instants(copy, tmp_path / f"second{number}", lambda: save(copy, second, 3, 1))  # noqa: B023
        check_instants(copies, found, 3)
        assert sorted(path.name for path in copies[-1].iterdir()) == sorted(["latest", second]), "something is left over"


def durable_events(act: Callable[[], None]) -> list[tuple[str, str]]:
    """What ``act`` does to files, in order: (write, sync, rename, remove, make; path)."""
    events: list[tuple[str, str]] = []
    write, pwrite, fsync = os.write, os.pwrite, os.fsync

    def path_of(file: int) -> str:
        return os.readlink(f"/proc/self/fd/{file}")

    def writing(file: int, data: Any, *at: int) -> int:
        events.append(("write", path_of(file)))
        return pwrite(file, data, *at) if at else write(file, data)

    def syncing(file: int) -> None:
        fsync(file)
        events.append(("sync", path_of(file)))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            events.append((event.removeprefix("os."), str(arguments[0])))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", writing)
        patch.setattr(os, "pwrite", writing)
        patch.setattr(os, "fsync", syncing)
        _witness.append(hook)
        act()
        _witness.pop()
    return events


def test_everything_is_durable_before_it_is_relied_on(tmp_path: Path, auditing: None) -> None:
    """What a power cut leaves: files before the rename that shows them, names before the next step, deletions last."""
    save(tmp_path, "s0", 0)
    save(tmp_path, "s1", 1)
    events = durable_events(lambda: save(tmp_path, "s1", 2, 1))
    temporary, root = str(tmp_path / ".saving.s1"), str(tmp_path)

    def when(what: str, path: str, *, after: int = -1) -> int:
        return next(n for n, event in enumerate(events) if n > after and event == (what, path))

    away, appears = when("rename", str(tmp_path / "s1")), when("rename", temporary)
    files = [f"{temporary}/model.safetensors", f"{temporary}/{MANIFEST}"]
    for file in files:
        last = max(n for n, event in enumerate(events) if event == ("write", file))
        assert last < when("sync", file) < away
    assert when("sync", files[0]) < when("write", files[1]), "the manifest comes last"
    assert when("sync", files[1]) < when("sync", temporary) < away < appears
    shown = when("sync", root, after=appears)
    pointer = next(path for what, path in events if what == "write" and path.startswith(f"{root}/.saving.latest."))
    assert shown < when("write", pointer) < when("sync", pointer) < when("rename", pointer)
    assert when("rename", pointer) < when("sync", root, after=when("rename", pointer))
    deletions = [n for n, (what, _) in enumerate(events) if what in ("remove", "rmdir")]
    assert deletions
    assert min(deletions) > when("sync", root, after=when("rename", pointer))


def test_a_new_directory_is_durable(tmp_path: Path, auditing: None) -> None:
    """The first save makes the directory of checkpoints: its own name must be on the disk, too."""
    place = tmp_path / "runs" / "checkpoints"
    events = durable_events(lambda: save(place, "s1", 1))
    synced = {path for what, path in events if what == "sync"}
    assert {str(place), str(place.parent), str(tmp_path)} <= synced


def test_an_occupied_directory_is_left_alone(tmp_path: Path) -> None:
    """An export goes to a new or empty directory only; a save replaces a checkpoint only."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    save(tmp_path, "s1", 1)
    for name, replace in (("mine", True), ("mine", False), ("s1", False)):
        with pytest.raises(CheckpointError, match="left as it is"):
            folder.begin(tmp_path, name, replace=replace)
    (tmp_path / "empty").mkdir()
    folder.begin(tmp_path, "empty", replace=False)
    assert folder.publish(tmp_path, "empty").is_dir()


def test_a_save_that_was_killed_before_latest(tmp_path: Path) -> None:
    """It is complete, and it is newer than what ``latest`` names."""
    save(tmp_path, "s1", 1)
    time.sleep(0.02)  # more than the clock of the file system is late
    save(tmp_path, "s2", 2, latest=False)
    assert folder.in_order_of_trust(tmp_path) == ["s2", "s1"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "Remedy: let this user read and write there"),
        (errno.EROFS, "Remedy: let this user read and write there"),
        (errno.ENOTDIR, "so name another directory"),
        (errno.EEXIST, "so name another directory"),
        (errno.ENOSPC, "iB are free). Remedy: make room"),
        (errno.EDQUOT, "Remedy: make room, or let this user have more"),
        (errno.ENOENT, "Remedy: see that its file system is mounted"),
        (errno.ESTALE, "Remedy: see that its file system is mounted"),
        (errno.EIO, "so look into the kernel's log (dmesg)"),
    ],
)
def test_what_the_disk_refuses_says_what_to_do(number: int, remedy: str, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "file"))

    _, problem = attempt(fail)
    assert problem is not None and problem.text.startswith(f"{tmp_path}/file: {os.strerror(number)}")
    assert remedy in problem.text


def test_no_file_is_pickled_or_unpickled() -> None:
    """Only what reads other systems' checkpoints meets pickles, and that with an allow-list.

    What pipeline stages of one job tell each other is no file. Two modules write DeepSpeed's pytorch_model.bin for others;
    they read nothing.
    """
    package = Path(folder.__file__).parents[1]
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    meet = {path.stem for path, text in sources.items() if "torch.load(" in text or "torch.save(" in text}
    meet |= {path.stem for path, text in sources.items() if "import pickle" in text or "Unpickler" in text}
    write = {path.stem for path, text in sources.items() if "torch.load(" not in text and "Unpickler" not in text}
    meet -= {"zero_to_fp32", "saving"} & write
    assert meet <= {"from_deepspeed", "from_dcp", "foreign", "messages", "pickles", "torch_files"}
