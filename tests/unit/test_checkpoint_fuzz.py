"""Thousands of spoiled checkpoints: each is refused with one named error, or loads, in bounded time and memory.

What has checksums is either refused or loads as it was. What an attacker has made whole again, or what has no checksums,
may load as something else, but never ends in another error.
"""

from __future__ import annotations

import copy
import faulthandler
import io
import json
import pickle
import pickletools
import random
import resource
import signal
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from covering import by_day

from zerorun.checkpoint.foreign import ForeignCheckpoint, ForeignTensor
from zerorun.checkpoint.importers.from_dcp import read_dcp
from zerorun.checkpoint.importers.from_deepspeed import read_deepspeed
from zerorun.checkpoint.json_values import decode, encode
from zerorun.checkpoint.manifest import MANIFEST
from zerorun.checkpoint.offline import write_foreign
from zerorun.checkpoint.ranks import alone
from zerorun.checkpoint.read import Read, Reader, open_on_all
from zerorun.checkpoint.save import unpack_scalars
from zerorun.checkpoint.tensorfile import BLOCK_BYTES, dtype_of
from zerorun.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")

SEED = 20260607
MOST_S, MOST_BYTES = 1.0, 64 << 20  # of one load: seconds of this process, and memory beyond what it had
_STUCK_S = 10
Files = dict[str, bytes]
Mutation = tuple[str, Files]  # (what was done, the files that are other ones now)


# -- limits ------------------------------------------------------------------------------------------------------


class Stuck(BaseException):
    """No reader catches it."""


def _stuck(number: int, frame: object) -> None:
    raise Stuck


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """A reader that never ends is ended, also one that does not come back to Python; none can take the machine's memory."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, _stuck)
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), before[1]))
    faulthandler.dump_traceback_later(6 * _STUCK_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.signal(signal.SIGALRM, handler)


def _memory(name: str) -> int:
    """``VmRSS`` or ``VmHWM``, its peak, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


@contextmanager
def watched(what: str) -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begin, before = time.process_time(), _memory("VmRSS")
    signal.alarm(_STUCK_S)
    try:
        yield
    except Stuck:
        pytest.fail(f"{what}: it takes for ever")
    finally:
        signal.alarm(0)
    taken, grown = time.process_time() - begin, _memory("VmHWM") - before
    assert taken < MOST_S, f"{what}: {taken:.2f} s"
    assert grown < MOST_BYTES, f"{what}: {grown >> 20} MiB"


def attack(
    place: Path, good: Files, mutations: Iterator[Mutation], load: Callable[[Path], Any], count: int, *, checked: bool
) -> None:
    """Try ``count`` mutations of the files ``good`` in ``place``. ``checked``: what loads is what it was."""
    expected, ends = load(place), Counter[str]()
    for number, (what, files) in zip(range(count), mutations, strict=False):
        for name, data in files.items():
            (place / name).write_bytes(data)
        what = f"mutation {number}, {what}"
        with watched(what):
            try:
                found = load(place)
                ends["loaded"] += 1
                assert not checked or repr(found) == repr(expected), f"{what}: it loads as something else"
            except CheckpointError as error:
                ends["refused"] += 1
                # What decodes and encodes values does not know the file.
                of_a_value = any(word in str(error) for word in ("a value", "optimizer.", "groups["))
                assert of_a_value or str(place) in str(error), f"{what}: {error}"
                assert len(str(error)) < 5000, f"{what}: {len(str(error))} characters"
        for name in files:
            (place / name).write_bytes(good[name])
    assert sum(ends.values()) == count
    assert ends["refused"] > count // 10, ends
    assert repr(load(place)) == repr(expected), "something in this process has changed"


# -- mutations ---------------------------------------------------------------------------------------------------


def spoil_bytes(data: bytes, chosen: random.Random) -> bytes:
    """Some bytes flipped, replaced, left out, put in or doubled; or the end cut off."""
    made = bytearray(data)
    for _ in range(chosen.choice((1, 1, 1, 2, 5))):
        at = chosen.randrange(len(made) + 1)
        length = chosen.choice((1, 1, 2, 4, 8, 50))
        numbers = [struct.pack("<Q", value)[:length] for value in (0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1, 10**12)]
        part = bytes(made[at : at + length])
        made[at : at + length] = chosen.choice(
            [
                bytes([part[0] ^ 1 << chosen.randrange(8)]) + part[1:] if part else b"",
                chosen.randbytes(length),
                chosen.choice(numbers),
                b"",
                part * chosen.randrange(2, 50),
                b"\0" * len(part),
            ]
        )
        if chosen.random() < 0.1:
            del made[at:]
    return bytes(made)


def deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


STRANGE: list[Any] = [
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 2**64, 2**200, 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "F32", "x" * 10_000, "..", "../x", "/dev/zero", "/dev/stdin", "a\0b", "\ud800", "ü", MANIFEST),
    *([], {}, [[]], [0] * 1000, [2**40] * 5, deep(300), {"a": {"b": 1}}, {"$": "tensor", "name": "w"}, {"$": "float"}),
    *({"$": "dtype", "name": "load"}, {"$": []}, {"$": "dict", "items": [[{}, 1]]}, {"$": "deque", "maxlen": -1}),
]


def spoil_values(value: Any, chosen: random.Random) -> Any:
    """A copy of JSON's values in which a few are other ones, have other keys, or are missing."""
    made = [copy.deepcopy(value)]
    for _ in range(chosen.choice((1, 1, 1, 2, 4))):
        holders, left = [], [made]
        while left:
            holder: Any = left.pop()
            holders.append(holder)
            inner = holder.values() if isinstance(holder, dict) else holder
            left += [value for value in inner if isinstance(value, (dict, list)) and value]
        holder = chosen.choice(holders)
        key = chosen.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        other = copy.deepcopy(chosen.choice([*STRANGE, chosen.choice(holders), holder[key]]))
        way = chosen.randrange(4)
        if way == 0 and holder is not made:
            del holder[key]
            if not holder:
                holder.update({"k": 1}) if isinstance(holder, dict) else holder.append(1)
        elif way == 1 and isinstance(holder, dict):
            holder[chosen.choice(["", "x", "$", "/dev/zero", "a" * 1000, "name"])] = other
        else:
            holder[key] = other
    return made[0]


def spoil_pickle(data: bytes, chosen: random.Random) -> bytes:
    """Opcodes left out, doubled, swapped, of another kind, or with other operands; or bytes, as above."""
    if chosen.random() < 0.3:
        return spoil_bytes(data, chosen)
    starts = [position for _, _, position in pickletools.genops(data)] + [len(data)]
    parts = [data[begin:end] for begin, end in pairwise(starts) if data[begin] != pickle.FRAME[0]]
    kinds = [op.code.encode("latin1") for op in pickletools.opcodes]
    for _ in range(chosen.choice((1, 1, 2, 3))):
        at, other = chosen.randrange(len(parts)), chosen.randrange(len(parts))
        part, kind = parts[at], chosen.choice(kinds)
        long_number = b"\x8a\x08" + struct.pack("<q", chosen.choice((-1, 2**40, 2**62)))
        high_place = b"r" + struct.pack("<I", 2**32 - 1)
        parts[at : at + 1] = chosen.choice(
            [
                *([], [part, part], [parts[other], part], [parts[other]], [kind, part], [kind + part[1:]]),
                *([long_number, part], [part[:1] + chosen.randbytes(len(part) - 1)], [high_place, part]),
                [b"2" * chosen.randrange(1, 50), part],
            ]
        )
        parts = parts or [data]
    return b"".join(parts)


# -- checkpoints of zerorun --------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sets = (("model", "w"), ("model", "b"), ("optimizer.m", "w"))
    tensors = [ForeignTensor(kind, name, torch.float32, (4, 3), lambda: torch.ones(4, 3)) for kind, name in sets]
    state = {"x": torch.ones(2), "y": (1, {2: "a"}), "z": [float("inf"), b"bytes", torch.float16]}
    group = {"lr": 0.1, "betas": (0.9, 0.95)}
    found = ForeignCheckpoint(
        tensors, {"w": True, "b": False}, {"c": "b"}, "AdamW", {"w": 0}, [group], {"step": {"w": 3.0}},
        {"global_steps": 3}, {"scale": 2.0}, {"last_epoch": 3}, state, [],
    )  # fmt: skip
    return write_foreign(found, tmp_path, "tag")


def files_of(place: Path) -> Files:
    return {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}


def tensors_of(reader: Reader) -> list[Any]:
    found = []
    for kind in reader.sets:
        for name in reader.places(kind):
            described = reader.tensor(kind, name)
            flat = torch.empty(described.numel, dtype=dtype_of(described.dtype))
            reader.read(Read(kind, name, 0, flat))
            found.append((kind, name, flat.view(described.shape).tolist()))
    return found


def load_checkpoint(place: Path) -> Any:
    """All that a run of one rank reads of a checkpoint."""
    with open_on_all(alone(), place.parent, place.name) as reader:
        manifest, tensors = reader.manifest, reader.state_tensors(alone())
        assert manifest is not None
        optimizer = manifest.optimizer or {"groups": [], "scalars": {}}
        values = (manifest.client_state, manifest.scheduler, manifest.extra_state, manifest.rng, manifest.data)
        plain = decode([*values, optimizer["groups"]], tensors)
        encode(plain, {}, "again")
        return tensors_of(reader), plain, unpack_scalars(optimizer["scalars"]), manifest.counters, manifest.loss_scale


def load_weights(place: Path) -> Any:
    with Reader(place, None) as reader:
        return tensors_of(reader)


def summed(content: dict[str, Any]) -> bytes:
    """The manifest with its right checksum."""
    crc = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps({"crc32": f"{crc:08x}", "content": content}).encode()


def recorded(good: Files, name: str, data: bytes) -> Files:
    """Another file, of which the manifest has the checksums."""
    content = json.loads(good[MANIFEST])["content"]
    crcs = [zlib.crc32(data[begin : begin + BLOCK_BYTES]) for begin in range(0, len(data), BLOCK_BYTES)]
    content["files"][name] = {"bytes": len(data), "crc32": "".join(f"{crc:08x}" for crc in crcs)}
    return {name: data, MANIFEST: summed(content)}


def spoil_header(data: bytes, chosen: random.Random) -> bytes:
    """Of a tensor file; mostly of the right length, and followed by the same tensors."""
    length = int.from_bytes(data[:8], "little")
    if chosen.random() < 0.5:
        return spoil_bytes(data[: 8 + length], chosen) + data[8 + length :]
    header = json.dumps(spoil_values(json.loads(data[8 : 8 + length]), chosen)).encode()
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


@pytest.mark.parametrize("count", by_day((100, 400), 100))
def test_bytes_of_checkpoints(count: int, checkpoint: Path) -> None:
    """Any file. A checkpoint is refused, or what was saved."""
    good, chosen = files_of(checkpoint), random.Random(SEED)

    def mutations() -> Iterator[Mutation]:
        while True:
            name = chosen.choice(sorted(good))
            yield name, {name: spoil_bytes(good[name], chosen)}

    attack(checkpoint, good, mutations(), load_checkpoint, count, checked=True)


@pytest.mark.parametrize("count", by_day((100, 500), 100))
def test_manifests_whose_checksum_is_right(count: int, checkpoint: Path) -> None:
    good, chosen = files_of(checkpoint), random.Random(SEED + 1)
    content = json.loads(good[MANIFEST])["content"]

    def mutations() -> Iterator[Mutation]:
        while True:
            spoiled = spoil_values(content, chosen)
            yield repr(spoiled)[:3000], {MANIFEST: summed(spoiled)}

    attack(checkpoint, good, mutations(), load_checkpoint, count, checked=False)


@pytest.mark.parametrize("count", by_day((100, 300), 100))
@pytest.mark.parametrize("with_manifest", [True, False], ids=["of a checkpoint", "of weights"])
def test_indices_and_headers(count: int, checkpoint: Path, with_manifest: bool) -> None:
    """Whose checksums are right, or which have none."""
    good, chosen = files_of(checkpoint), random.Random(SEED + 2)
    names = sorted(name for name in good if name != MANIFEST and (with_manifest or name.startswith("model")))
    if not with_manifest:
        (checkpoint / MANIFEST).unlink()

    def mutations() -> Iterator[Mutation]:
        while True:
            name = chosen.choice(names)
            if name.endswith(".safetensors"):
                data = spoil_header(good[name], chosen)
            elif chosen.random() < 0.3:
                data = spoil_bytes(good[name], chosen)
            else:
                data = json.dumps(spoil_values(json.loads(good[name]), chosen)).encode()
            yield f"{name}: {data[:3000]!r}", recorded(good, name, data) if with_manifest else {name: data}

    load = load_checkpoint if with_manifest else load_weights
    attack(checkpoint, good, mutations(), load, count, checked=False)


# -- pickles -----------------------------------------------------------------------------------------------------


def everything(found: ForeignCheckpoint) -> Any:
    """All that an import reads and writes."""
    encode(found.groups, {}, "groups")
    tensors = [(tensor.set, tensor.name, tensor.load().tolist()) for tensor in found.tensors]
    return tensors, found.groups, found.counters, found.scalars


def load_dcp(place: Path) -> Any:
    return everything(read_dcp(place))


def load_deepspeed(place: Path) -> Any:
    return everything(read_deepspeed(place))


@pytest.mark.parametrize("count", by_day((100, 500), 100))
def test_metadata_of_dcp(count: int, tmp_path: Path) -> None:
    weights = {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(3)}
    state = {"state": {"w": {"exp_avg": torch.ones(3, 4)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    dcp.save({"model": weights, "optimizer": state, "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    good, chosen = files_of(tmp_path), random.Random(SEED + 4)

    def mutations() -> Iterator[Mutation]:
        while True:
            data = spoil_pickle(good[".metadata"], chosen)
            yield repr(data), {".metadata": data}

    attack(tmp_path, good, mutations(), load_dcp, count, checked=False)


def in_torch_file(data: bytes, pickled: bytes) -> bytes:
    """The file of torch.save ``data`` with another pickle in it."""
    reader, out = torch._C.PyTorchFileReader(io.BytesIO(data)), io.BytesIO()
    writer = torch._C.PyTorchFileWriter(out)
    for record in reader.get_all_records():
        if record not in ("version", ".data/serialization_id"):
            content = pickled if record == "data.pkl" else reader.get_record(record)
            writer.write_record(record, content, len(content))
    writer.write_end_of_file()
    return out.getvalue()


@pytest.mark.parametrize("zipped", [True, False], ids=["now", "before torch 1.6"])
def test_pickles_of_deepspeed(tmp_path: Path, zipped: bool) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    none = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "lr_scheduler")
    name = "mp_rank_00_model_states.pt"
    content = {
        **dict.fromkeys(none), "module": model.state_dict(), "buffer_names": [], "optimizer": optimizer.state_dict(),
        **dict.fromkeys(("global_steps", "dp_world_size", "mp_world_size"), 1), "ds_config": "x.json", "skipped_steps": 0,
        "mine": {"a": 1},
    }  # fmt: skip
    torch.save(content, tmp_path / name, _use_new_zipfile_serialization=zipped)
    good, chosen = files_of(tmp_path), random.Random(SEED + 5)
    inner = torch._C.PyTorchFileReader(io.BytesIO(good[name])).get_record("data.pkl") if zipped else b""

    def mutations() -> Iterator[Mutation]:
        while True:
            data = spoil_pickle(inner, chosen) if zipped else spoil_bytes(good[name], chosen)
            yield repr(data)[:3000], {name: in_torch_file(good[name], data) if zipped else data}

    attack(tmp_path, good, mutations(), load_deepspeed, 300 if zipped else 100, checked=False)
