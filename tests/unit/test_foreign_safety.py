"""Checkpoints of other runtimes, made by an attacker: one error, soon, and nothing in this process is changed."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import random
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import patience
from torch.distributed.checkpoint import filesystem, metadata

from zerorun.checkpoint.foreign import HARMLESS
from zerorun.checkpoint.importers.from_dcp import makes_up, read_dcp
from zerorun.checkpoint.importers.from_deepspeed import read_deepspeed
from zerorun.checkpoint.importers.torch_files import FileSlice, look_through
from zerorun.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed", "ignore:Detected pickle protocol")

# -- pickles by hand ---------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def whole(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def attributes(name: str, value: bytes = b"K\x07") -> bytes:
    """The state (None, {name: value}), which pickle gives by setattr."""
    return b"N}" + text(name) + value + b"s\x86"


PATH, ENCODING = named("pathlib", "PosixPath"), named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
INFO = named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
SIZE = named("torch", "Size")


def tuples(count: int) -> bytes:
    """() in (), twice, again and again: it has 2^count parts, and takes as long to hash."""
    return b")" + b"".join(b"r" + struct.pack("<I", n) + b"j" + struct.pack("<I", n) + b"\x86" for n in range(count))


METADATA_ATTACKS = {
    "attribute of a class": whole(PATH, attributes("iterdir"), b"b"),
    "attribute of a record's class": whole(INFO, attributes("length"), b"b"),
    "attribute of a dtype": whole(named("torch", "float32"), attributes("itemsize"), b"b"),
    "dict of an enumeration's member": whole(ENCODING, b"K\x00\x85R", b"}", text("_value_"), b"K\x07sb"),
    "dict of a function": whole(named("torch.serialization", "_get_layout"), b"}", text("cache"), b"K\x07sb"),
    "attribute of a path": whole(PATH, text("x"), b"\x85R", attributes("_str", text("/etc")), b"b"),
    "a class as a dict": whole(ENCODING, text("x"), b"K\x00s"),
    "a path of a number": whole(PATH, b"K\x07\x85R"),
    "a size of texts": whole(SIZE, text("abc"), b"\x85\x85R"),
    "a negative size": whole(SIZE, b"J\xff\xff\xff\xff\x85\x85R"),
    "a call of a record": whole(INFO, text("a"), b"K\x00K\x01\x87R"),
    "a call of a text": whole(text("x"), b")R"),
    "an extension": whole(b"\x82\x01"),
    "an old instance": whole(b"(ipathlib\nPosixPath\n"),
    "a persistent value": whole(b"Pname\n"),
    "many bytes": whole(b"B" + struct.pack("<I", 2**32 - 1)),
    "many more bytes": whole(b"\x8e" + struct.pack("<Q", 2**40)),
    "a long text": whole(b"\x8d" + struct.pack("<Q", 2**40)),
    "a long frame": whole(b"\x95" + struct.pack("<Q", 2**40)),
    "a long number": whole(b"\x8b" + struct.pack("<i", 2**31 - 1)),
    "a high place": whole(b"}r" + struct.pack("<I", 2**32 - 1)),
    "a key that takes for ever": whole(b"}" + tuples(100) + b"Ns"),
    "a member that takes for ever": whole(b"\x8f(" + tuples(100) + b"\x90"),
    "nothing": b"",
    "no end": whole(b"N")[:-1],
    "a pile": whole(b"(" * 100_000),
    "deep": whole(b"]" * 100_000 + b"a" * 99_999),
    "none": whole(b"N"),
    "another record": whole(named("torch.distributed.checkpoint.metadata", "StorageMeta"), b")\x81"),
}


def attributes(kind: Any) -> dict[str, Any]:
    """Those of ``kind`` itself, but for what Python notes there of how it copies objects of it."""
    return {name: value for name, value in vars(kind).items() if name != "__slotnames__"}


@pytest.fixture(autouse=True)
def nothing_is_changed() -> Iterator[None]:
    """What the readers' pickles may name is as it was."""
    kinds: list[Any] = [pathlib.PosixPath, pathlib.PurePosixPath, pathlib.Path, pathlib.PurePath, torch.Size, torch.Tensor]
    kinds += [metadata.Metadata, metadata.TensorProperties, metadata.MetadataIndex, filesystem._StorageInfo]
    kinds += [*metadata._MEM_FORMAT_ENCODING, metadata._MEM_FORMAT_ENCODING, torch.serialization._get_layout]
    before = [attributes(kind) for kind in kinds]
    dtypes = [(np.dtype(code).itemsize, np.dtype(code).flags, np.dtype(code).fields) for code in "?bhilqBHILQefdFD"]
    yield
    assert [attributes(kind) for kind in kinds] == before
    assert [(np.dtype(c).itemsize, np.dtype(c).flags, np.dtype(c).fields) for c in "?bhilqBHILQefdFD"] == dtypes


def is_refused(act: Callable[[], object], *words: str) -> None:
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="Remedy") as found:
        act()
    assert time.monotonic() - start < 2 * patience()
    assert all(word in str(found.value) for word in words), found.value
    assert len(str(found.value)) < 2000


@pytest.mark.parametrize("attack", METADATA_ATTACKS)
def test_metadata_that_attacks(tmp_path: Path, attack: str) -> None:
    (tmp_path / ".metadata").write_bytes(METADATA_ATTACKS[attack])
    is_refused(lambda: read_dcp(tmp_path), str(tmp_path / ".metadata"))


# -- metadata that lies ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    weights = {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(3)}
    state = {"state": {"w": {"exp_avg": torch.ones(3, 4)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    dcp.save({"model": weights, "optimizer": state, "step": 3}, checkpoint_id=folder, no_dist=True)
    return folder


def changed(source: Path, to: Path, change: Callable[[metadata.Metadata], object]) -> Path:
    found = pickle.loads((source / ".metadata").read_bytes())
    change(found)
    for path in source.glob("*.distcp"):
        (to / path.name).write_bytes(path.read_bytes())
    (to / ".metadata").write_bytes(pickle.dumps(found))
    return to


def load_all(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    return {(tensor.set, tensor.name): tensor.load() for tensor in read_dcp(folder).tensors}


def info(found: metadata.Metadata, key: str) -> Any:
    return next(value for index, value in found.storage_data.items() if index.fqn == key)


def tensor(found: metadata.Metadata, key: str = "model.w") -> Any:
    return found.state_dict_metadata[key]


Size, Chunk = torch.Size, metadata.ChunkStorageMetadata


def no_more_than(key: str, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Callable[[metadata.Metadata], object]:
    """``boxes`` are the parts of ``key``, and each has a place in the file."""

    def change(found: metadata.Metadata) -> None:
        tensor(found, key).chunks = [Chunk(Size(offsets), Size(sizes)) for offsets, sizes in boxes]
        first = info(found, key)
        end = filesystem._StorageInfo(first.relative_path, first.offset + first.length, 0)
        for offsets, _ in boxes:
            found.storage_data.setdefault(metadata.MetadataIndex(key, Size(offsets)), end)

    return change


LIES: dict[str, Callable[[metadata.Metadata], object]] = {
    "device": lambda m: setattr(info(m, "model.w"), "relative_path", "/dev/zero"),
    "way out": lambda m: setattr(info(m, "model.w"), "relative_path", "../x.distcp"),
    "folder": lambda m: setattr(info(m, "model.w"), "relative_path", "."),
    "offset": lambda m: setattr(info(m, "model.w"), "offset", -1),
    "length": lambda m: setattr(info(m, "model.w"), "length", 2**70),
    "number as text": lambda m: setattr(info(m, "model.w"), "length", "9"),
    "the same place": lambda m: setattr(info(m, "model.w"), "offset", info(m, "model.b").offset),
    "transformed": lambda m: setattr(info(m, "model.w"), "transform_descriptors", ["stream.zstd/1"]),
    "no place": lambda m: m.storage_data.pop(next(i for i in m.storage_data if i.fqn == "model.w")),
    "huge": lambda m: setattr(tensor(m), "size", Size([2**40, 2**20])),
    "huge without chunks": lambda m: (setattr(tensor(m), "size", Size([2**36])), setattr(tensor(m), "chunks", [])),
    "huge, in one chunk": lambda m: (
        setattr(tensor(m), "size", Size([2**36])), setattr(tensor(m), "chunks", [Chunk(Size([0]), Size([2**36]))])
    ),
    "a chunk outside": lambda m: setattr(tensor(m), "chunks", [Chunk(Size([1, 0]), Size([3, 4]))]),
    "a chunk of another form": lambda m: setattr(tensor(m), "chunks", [Chunk(Size([0]), Size([12]))]),
    "chunks without end": lambda m: setattr(tensor(m), "chunks", [Chunk(Size([0, 0]), Size([3, 4]))] * 10_000),
    "no chunks": lambda m: setattr(tensor(m), "chunks", None),
    "no dtype": lambda m: setattr(tensor(m).properties, "dtype", "float32"),
    "entries": lambda m: setattr(m, "state_dict_metadata", ["w"]),
    "an entry": lambda m: m.state_dict_metadata.update(w=Size([1])),
    "a long path": lambda m: m.planner_data.update({"model.w": ["model"] * 1000}),
    "a path of paths": lambda m: m.planner_data.update({"model.w": (("model",), "w")}),
    "places": lambda m: setattr(m, "storage_data", {"w": 5}),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies(source: Path, tmp_path: Path, lie: str) -> None:
    assert len(load_all(source)) == 3
    is_refused(lambda: load_all(changed(source, tmp_path, LIES[lie])))


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (2, 4)), ((0, 0), (2, 2))],  # as many elements as there are, but the last row has none
        [((0, 0), (3, 2)), ((0, 1), (3, 2))],
        [((0, 0), (3, 3)), ((1, 0), (1, 3))],
        [((0, 0), (2, 4))],
    ],
)  # fmt: skip
def test_parts_that_do_not_make_up_a_tensor(source: Path, tmp_path: Path, boxes: Any) -> None:
    is_refused(lambda: load_all(changed(source, tmp_path, no_more_than("model.w", boxes))), "model.w")


def test_any_cut_makes_up_a_tensor() -> None:
    """Random cuts do; one box moved, lost, doubled or made longer do not. By counting each element."""
    chosen = random.Random(3)
    for _ in range(300):
        shape = [chosen.randint(1, 5) for _ in range(chosen.randint(0, 4))]
        boxes = [(tuple([0] * len(shape)), tuple(shape))]
        for _ in range(chosen.randint(0, 6) if shape else 0):
            offsets, sizes = boxes.pop(chosen.randrange(len(boxes)))
            dim = chosen.randrange(len(shape))
            at = chosen.randint(0, sizes[dim])
            boxes.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
            moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
            boxes.append((moved, (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])))
        assert makes_up(boxes, shape)
        spoiled = chosen.choice(
            [boxes[1:], boxes + boxes[:1], [(tuple(max(0, o - 1) for o in boxes[0][0]), boxes[0][1]), *boxes[1:]]]
        )
        counts = np.zeros(shape)
        for offsets, sizes in spoiled:
            counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
        assert makes_up(spoiled, shape) == bool((counts == 1).all())


def test_many_parts_are_checked_soon() -> None:
    start = time.monotonic()
    grid = [((row, column), (1, 1)) for row in range(200) for column in range(200)]
    assert makes_up(grid, (200, 200))
    assert not makes_up(grid[:-1] + grid[:1], (200, 200))
    assert makes_up([((row, *[0] * 40), (1, *[2] * 40)) for row in range(1000)], (1000, *[2] * 40))
    assert not makes_up([((0,) * 60, (1,) * 60)], (2,) * 60)
    assert time.monotonic() - start < 5 * patience()


# -- numbers of numpy --------------------------------------------------------------------------------------------


def torch_file(data: bytes) -> bytes:
    """A file of torch.save with ``data`` as its pickle; its only tensor has one element."""
    file = io.BytesIO()
    torch.save(torch.ones(1), file)
    reader, out = torch._C.PyTorchFileReader(io.BytesIO(file.getvalue())), io.BytesIO()
    writer = torch._C.PyTorchFileWriter(out)
    for record in reader.get_all_records():
        if record not in ("version", ".data/serialization_id"):
            content = data if record == "data.pkl" else reader.get_record(record)
            writer.write_record(record, content, len(content))
    writer.write_end_of_file()
    return out.getvalue()


def load_pickle(data: bytes) -> Any:
    """As the readers do with a value."""
    with torch.serialization.safe_globals(HARMLESS):
        return torch.load(io.BytesIO(torch_file(data)), weights_only=True)


NP = "numpy._core.multiarray" if np.__version__ >= "2" else "numpy.core.multiarray"
DTYPE, ARRAY = named("numpy", "dtype"), named(NP, "_reconstruct") + named("numpy", "ndarray") + b"K\x00\x85" + text("b")
PLAIN = b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"


def dtype_of(code: str, state: bytes = PLAIN) -> bytes:
    return DTYPE + text(code) + b"\x89\x88\x87R" + state


def array_of(dtype: bytes, shape: bytes, data: bytes) -> bytes:
    content = named("_codecs", "encode") + text(data.decode("latin1")) + text("latin1") + b"\x86R"
    return ARRAY + b"\x87R(K\x01" + shape + dtype + b"\x89" + content + b"tb"


NUMPY_ATTACKS = {
    "fields": dtype_of("f8", b"(K\x03" + text("<") + b"N" + text("x") + b"\x85}" + text("x") + b"K\x00sK\x08K\x01K\x00tb"),
    "flags": dtype_of("f8", b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"),
    "size": dtype_of("f8", b"(K\x03" + text("<") + b"NNNK\x7fK\x01K\x00tb"),
    "sub-array": dtype_of("f8", b"(K\x03" + text("|") + b"K\x01NNK\x08K\x01K\x00tb"),
    "byte order": dtype_of("f8", b"(K\x03" + text("x") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"),
    "objects": dtype_of("O8"),
    "records": dtype_of("f8,f8"),
    "void": dtype_of("V1000000000"),
    "texts": dtype_of("U1000000000"),
    "too few bytes": array_of(dtype_of("f8"), b"M\xe8\x03\x85", b"12345678"),
    "a negative size": array_of(dtype_of("f8"), b"J\xff\xff\xff\xff\x85", b""),
    "a huge shape": array_of(dtype_of("f8"), b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86", b"12345678"),
    "no dtype": array_of(b"N", b"K\x01\x85", b"12345678"),
    "no array": named(NP, "_reconstruct") + named("pathlib", "PosixPath") + b"K\x00\x85" + text("b") + b"\x87R",
    "a number of too few bytes": named(NP, "scalar") + dtype_of("f8") + b"N\x86R",
}


@pytest.mark.parametrize("attack", NUMPY_ATTACKS)
def test_numpy_that_attacks(attack: str) -> None:
    with pytest.raises(ValueError, match=r"numpy"):  # of which the readers make a CheckpointError with the file's name
        load_pickle(whole(NUMPY_ATTACKS[attack]))


def test_numpy_that_does_not() -> None:
    assert load_pickle(whole(array_of(dtype_of("f8"), b"K\x01\x85", b"\0" * 8))).tolist() == [0.0]
    values = [np.arange(3.0), np.asfortranarray(np.arange(6).reshape(2, 3)), np.array(5, ">i4"), np.arange(4, dtype=">f8")]
    values += [np.array([True]), np.random.get_state()[1], np.array(2, np.complex64), np.ones((1, 2), np.float16)]
    for value in values:
        file = io.BytesIO()
        torch.save({"array": value, "number": value.flat[0]}, file)
        file.seek(0)
        with torch.serialization.safe_globals(HARMLESS):
            found = torch.load(file, weights_only=True)
        assert found["array"].shape == value.shape
        assert (found["array"] == value).all()
        assert (found["number"], type(found["number"])) == (value.flat[0], type(value.flat[0]))


# -- files of torch.save -----------------------------------------------------------------------------------------

STORAGE = b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x01tQ"
TENSOR = named("torch._utils", "_rebuild_tensor_v2")
HUGE = b"\x8a\x05" + struct.pack("<Q", 2**36)[:5]
LISTS = b"]" + b"".join(b"r%b](j%bj%be" % ((struct.pack("<I", number),) * 3) for number in range(60))


def tensor_of(shape: bytes, strides: bytes) -> bytes:
    return TENSOR + b"(" + STORAGE + b"K\x00" + shape + strides + b"\x89" + named("collections", "OrderedDict") + b")RtR"


TORCH_ATTACKS = {
    "room": whole(named("builtins", "bytearray"), HUGE, b"\x85R"),
    "room by another": whole(
        named("torch._tensor", "_rebuild_from_type_v2"), b"(", *[named("builtins", "bytearray")] * 2, HUGE, b"\x85}tR"
    ),
    "a tensor's room": whole(named("torch", "FloatTensor"), HUGE, b"\x85R"),
    "a storage's room": whole(named("torch.storage", "UntypedStorage"), HUGE, b"\x85R"),
    "a key that takes for ever": whole(b"}" + tuples(100) + b"Ns"),
    "shared values": whole(b"}" + text("module") + LISTS + b"s"),
    "a value in itself": whole(b"}" + text("module") + b"]q\x00h\x00as"),
    "one element many times": whole(b"}" + text("module") + tensor_of(HUGE + b"\x85", b"K\x00\x85") + b"s"),
    "more elements than bytes": whole(b"}" + text("module") + tensor_of(HUGE + b"\x85", b"K\x01\x85") + b"s"),
    "no values": whole(
        b"}" + text("module") + named("torch._utils", "_rebuild_meta_tensor_no_storage"),
        b"(" + named("torch", "float32") + b"K\x04\x85K\x01\x85\x89tRs",
    ),
}


@pytest.mark.parametrize("attack", TORCH_ATTACKS)
def test_torch_files_that_attack(source: Path, tmp_path: Path, attack: str) -> None:
    """Instead of DeepSpeed's model, and of a value and a tensor in torch's distributed checkpoints."""
    path, data = tmp_path / "mp_rank_00_model_states.pt", torch_file(TORCH_ATTACKS[attack])
    path.write_bytes(data)
    is_refused(lambda: read_deepspeed(tmp_path), str(path), "cannot be read")
    for key in ("model.w", "step"):
        place = tmp_path / key
        place.mkdir()

        def change(found: metadata.Metadata, key: str = key) -> None:
            place = info(found, key)
            place.relative_path, place.offset, place.length = "x.distcp", 0, len(data)

        changed(source, place, change)
        (place / "x.distcp").write_bytes(data)
        is_refused(lambda place=place: load_all(place), key)


def test_ordinary_torch_files_are_read(tmp_path: Path) -> None:
    """Also views, shared tensors and lists, and what tuples are keys of."""
    weight = torch.ones(4, 4)
    shared = [1, 2, {"a": (3, 4)}]
    value = {"module": {"a": weight, "b": weight.t(), "c": weight[1:, :2]}, (1, ("x", 2)): shared, "again": [shared] * 100}
    for zipped in (True, False):
        torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        with (tmp_path / "x.pt").open("rb") as file:
            look_through(FileSlice(file, 0, (tmp_path / "x.pt").stat().st_size))


def test_a_torch_file_that_is_compressed(tmp_path: Path) -> None:
    """A few bytes of it would become many."""
    path = tmp_path / "mp_rank_00_model_states.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", whole(b"}"))
        archive.writestr("archive/data/0", bytes(1 << 20))
    is_refused(lambda: read_deepspeed(tmp_path), str(path), "is compressed")


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "latest"])
def test_deepspeed_s_files_that_never_end(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    is_refused(lambda: read_deepspeed(tmp_path))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    is_refused(lambda: read_deepspeed(tmp_path))
