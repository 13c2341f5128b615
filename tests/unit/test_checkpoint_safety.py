"""Checkpoints among what others have made: nothing of theirs is deleted, overwritten, followed, or believed.

The attacker is another user who can write into the directory of checkpoints, or who has made the checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import patience

from zerorun.checkpoint import directory as folder
from zerorun.checkpoint.cli.verify import check
from zerorun.checkpoint.foreign import ForeignCheckpoint, ForeignTensor
from zerorun.checkpoint.json_values import decode
from zerorun.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from zerorun.checkpoint.offline import write_foreign
from zerorun.checkpoint.ranks import alone
from zerorun.checkpoint.read import Read, Reader, candidates, open_on_all
from zerorun.checkpoint.save import unpack_scalars
from zerorun.checkpoint.stream import FileWriter, WriteQueue, write_small
from zerorun.checkpoint.tensorfile import BLOCK_BYTES, FileRecord, TensorFile, dtype_of
from zerorun.checkpoint.write import Destination, commit
from zerorun.errors import CheckpointError, DamagedError

# -- what a save deletes, overwrites and follows -----------------------------------------------------------------


def save(directory: Path, tag: str, step: int = 0, keep: int | None = None) -> Path:
    """A whole save of one rank, of a checkpoint without tensors."""
    manifest = Manifest(tag, f"2026-01-01T00:00:{step:02}", {"global_steps": step})
    return commit(alone(), Destination(directory, tag, keep=keep), dict, lambda records: ({"config.json": b"{}"}, manifest))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def refuses(act: Callable[[], object], *words: str) -> None:
    with pytest.raises(CheckpointError, match="Remedy") as found:
        act()
    assert all(word in str(found.value) for word in words), found.value


@pytest.fixture(autouse=True)
def nothing_is_too_young(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interrupted save leaves is deleted after a while; here, at once."""
    monkeypatch.setattr(folder, "_STALE_S", -1)


@pytest.mark.parametrize("tag", ["last", "other"])
@pytest.mark.parametrize("locks", [True, False])
def test_two_saves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool, tag: str) -> None:
    """Of one tag, one save appears, whole, and the other one says why it does not. Other tags do not disturb it."""

    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
        monkeypatch.setattr(folder, "_STALE_S", 900)  # without locks, only time tells that a save goes on

    def write() -> dict[str, Any]:
        if locks and tag == "last":
            refuses(lambda: save(tmp_path, tag, 2), "another save of 'last'", ".saving.last", "fuser")
        else:
            save(tmp_path, tag, 2)
        return {}

    def outer() -> Path:
        manifest = Manifest("last", "2026-01-01T00:00:01", {"global_steps": 1})
        return commit(alone(), Destination(tmp_path, "last"), write, lambda records: ({"config.json": b"{}"}, manifest))

    if locks or tag == "other":
        outer()
        assert read_manifest(tmp_path / "last").global_steps == 1
    else:
        refuses(outer, "another save", ".saving.last")
    if tag == "other" or not locks:
        assert read_manifest(tmp_path / tag).global_steps == 2
    assert names(tmp_path) == sorted({"last", tag, "latest"})


@pytest.mark.parametrize("keep", [None, 2])
def test_saves_of_other_tags_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, keep: int | None
) -> None:
    """As those of several runs that somebody starts with one directory: what one deletes, others were about to.

    With ``keep`` they also delete each other's checkpoints, even the one that ``latest`` is about to name.
    """
    monkeypatch.setattr(folder, "_STALE_S", 900)

    def run(name: str) -> None:
        for step in range(20):
            save(tmp_path, f"{name}-{step % 5}", step, keep=keep)

    with ThreadPoolExecutor(3) as runs:
        assert [run.result() for run in [runs.submit(run, name) for name in "abc"]] == [None] * 3
    assert "cannot be deleted" not in caplog.text
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert keep is not None or (tmp_path / (tmp_path / "latest").read_text()).is_dir()


def test_a_pointer_that_another_save_took_for_one_that_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, taken = folder.create, list[Path]()

    def create(path: Path) -> int:
        handle = real(path)
        if not taken:
            taken.append(path)
            path.unlink()
        return handle

    monkeypatch.setattr(folder, "create", create)
    save(tmp_path, "last")
    assert taken
    assert names(tmp_path) == ["last", "latest"]


def test_a_save_that_is_over_holds_nothing(tmp_path: Path) -> None:
    """Also where a process that was forked meanwhile, such as a data loader's worker, has its files open still."""
    held = folder.begin(tmp_path, "last")
    inherited = os.dup(held._handle)
    held.release()
    save(tmp_path, "last")
    os.close(inherited)
    assert names(tmp_path) == ["last", "latest"]


BESIDE = ["last.old", "other.old", ".saving.other", ".deleting.other", ".replaced.other"]


@pytest.mark.parametrize("name", BESIDE)
def test_no_save_deletes_what_others_wrote(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("mine")
    for step in range(3):
        save(tmp_path, "last", step, keep=1)
    assert (tmp_path / name / "thesis.txt").read_text() == "mine"
    assert names(tmp_path) == sorted([name, "last", "latest"])


@pytest.mark.parametrize("name", [".saving.last", ".replaced.last"])
def test_a_name_that_a_save_needs(tmp_path: Path, name: str) -> None:
    """It is refused before anything is written."""
    save(tmp_path, "last", 1)
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("mine")
    refuses(lambda: save(tmp_path, "last", 2), name, "did not write")
    assert (tmp_path / name / "thesis.txt").read_text() == "mine"
    assert read_manifest(tmp_path / "last").global_steps == 1
    assert names(tmp_path) == sorted([name, "last", "latest"])


def test_files_of_others_with_such_names(tmp_path: Path) -> None:
    (tmp_path / ".saving.notes.txt").write_text("mine")
    (tmp_path / ".deleting.notes.txt").write_text("mine")
    save(tmp_path, "last", keep=1)
    assert names(tmp_path) == [".deleting.notes.txt", ".saving.notes.txt", "last", "latest"]


def test_a_replaced_checkpoint_of_an_earlier_version(tmp_path: Path) -> None:
    """``last.old`` with a manifest: it is found where ``last`` is missing. It may be somebody's copy, so it stays."""
    save(tmp_path, "last", 1)
    (tmp_path / "last").rename(tmp_path / "last.old")
    assert folder.in_order_of_trust(tmp_path) == ["last.old"]
    for step in (2, 3, 4):
        save(tmp_path, "last", step, keep=1)
    assert folder.in_order_of_trust(tmp_path) == ["last", "last.old"]
    assert read_manifest(tmp_path / "last.old").global_steps == 1


def test_what_somebody_put_aside_is_not_pruned(tmp_path: Path) -> None:
    save(tmp_path, "s1", 1)
    (tmp_path / "s1").rename(tmp_path / "best")
    for step in (2, 3, 4):
        save(tmp_path, f"s{step}", step, keep=1)
    assert names(tmp_path) == ["best", "latest", "s4"]


def test_links_beside_checkpoints(tmp_path: Path) -> None:
    """``keep`` passes over links, and over what they point to: here, a checkpoint, and a file in another."""
    place = tmp_path / "mine"
    save(tmp_path / "others", "base", 50)
    for step in (1, 2, 3):
        save(place, f"s{step}", step)
    (place / "best").symlink_to("s1")
    (place / "configuration").symlink_to(place / "s2" / "config.json")
    (place / "base").symlink_to(tmp_path / "others" / "base")
    (place / "gone").symlink_to(tmp_path / "nowhere")
    for step in (4, 5):
        save(place, f"s{step}", step, keep=1)
    assert names(place) == sorted(["base", "best", "configuration", "gone", "latest", "s1", "s2", "s5"])
    assert read_manifest(place / "best").global_steps == 1
    assert (place / "configuration").read_text() == "{}"
    assert read_manifest(tmp_path / "others" / "base").global_steps == 50


def test_another_run_s_checkpoint_is_not_the_newest(tmp_path: Path) -> None:
    """A link to one that was saved after ``latest`` was written does not look like an interrupted save."""
    save(tmp_path / "mine", "s1", 1)
    manifest = Manifest("base", "9999-01-01", {"global_steps": 50})
    commit(alone(), Destination(tmp_path / "others", "base"), dict, lambda records: ({}, manifest))
    (tmp_path / "mine" / "base").symlink_to(tmp_path / "others" / "base")
    assert folder.in_order_of_trust(tmp_path / "mine") == ["s1", "base"]
    (tmp_path / "mine" / "latest").unlink()
    assert folder.in_order_of_trust(tmp_path / "mine") == ["s1", "base"]


def test_a_tag_that_is_a_link(tmp_path: Path) -> None:
    save(tmp_path, "s1", 1)
    (tmp_path / "last").symlink_to("s1")
    refuses(lambda: save(tmp_path, "last", 2), "last", "is a symbolic link")
    assert read_manifest(tmp_path / "last").global_steps == 1
    assert names(tmp_path) == ["last", "latest", "s1"]


def test_latest_that_no_save_made(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").symlink_to(tmp_path / "victim")
    refuses(lambda: save(tmp_path / "run", "s1"), "latest", "save_latest=False")
    assert (tmp_path / "victim").read_text() == "mine"
    assert names(tmp_path / "run") == ["latest"]


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    """Whoever can write into the directory knows the names that a save uses."""
    victim, place = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    place.mkdir()
    (place / ".saving.latest").symlink_to(victim)
    save(place, "s1", 1)
    assert victim.read_text() == "mine"
    assert (place / "latest").read_text() == "s1"
    (place / ".saving.s2.rank0").symlink_to(tmp_path / "made")
    with pytest.raises(CheckpointError):
        save(place, "s2", 2)
    assert not (tmp_path / "made").exists()
    (place / ".saving.s3").symlink_to(tmp_path)
    refuses(lambda: save(place, "s3", 3), ".saving.s3")
    assert names(tmp_path) == ["run", "victim"]


def test_new_files_are_new(tmp_path: Path) -> None:
    """In a directory that a group can write, somebody may put a link where a file is about to be made."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "model.safetensors").symlink_to(victim)
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "made")
    for name in ("model.safetensors", "gone.safetensors"):
        with pytest.raises(FileExistsError):
            write_small(tmp_path / name, b"weights")
        with pytest.raises(FileExistsError):
            FileWriter(tmp_path / name, WriteQueue())
    assert victim.read_text() == "mine"
    assert not (tmp_path / "made").exists()


def test_a_killed_save_leaves_no_pointer_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_STALE_S", 900)
    (tmp_path / ".saving.latest.0123456789abcdef").write_text("s0")
    (tmp_path / ".saving.latest.notes").write_text("mine")
    save(tmp_path, "s1")
    assert names(tmp_path) == [".saving.latest.notes", "latest", "s1"]


def test_a_failed_save_leaves_no_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("s1").mkdir()

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        folder.point_latest(tmp_path, "s1")
    assert names(tmp_path) == ["s1"]


# -- what a reader opens -----------------------------------------------------------------------------------------


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("make", [pipe, device, bound])
def test_latest_that_never_ends(tmp_path: Path, make: Callable[[Path], None]) -> None:
    save(tmp_path, "s1", 1)
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    start = time.monotonic()
    assert folder.in_order_of_trust(tmp_path) == ["s1"]
    assert time.monotonic() - start < patience()


STRANGE: dict[str, Callable[[Path], None]] = {"pipe": pipe, "device": device, "socket": bound, "directory": Path.mkdir}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two checkpoints, ``good`` and the newer ``bad``, which is whole as yet."""
    place = tmp_path_factory.mktemp("source")
    for tag in ("good", "bad"):
        sets = ("model", "optimizer.m")
        tensors = [ForeignTensor(kind, "w", torch.float32, (4,), lambda: torch.arange(4.0)) for kind in sets]
        facts: Any = ({"w": True}, {}, "AdamW", {"w": 0}, [{"lr": 0.1}], {"step": {"w": 3.0}}, {}, None, None)
        write_foreign(ForeignCheckpoint(tensors, *facts, client_state={"x": torch.ones(2)}, notes=[]), place, tag)
    return place


@pytest.fixture
def bad(source: Path, tmp_path: Path) -> Path:
    """A copy of the newer checkpoint, to be spoiled, with the older one beside it."""
    return Path(shutil.copytree(source, tmp_path / "run")) / "bad"


def load(directory: Path, tag: str | None = None) -> str:
    """Read all that one rank would; the name of what was loaded."""
    ranks = alone()
    names = [tag] if tag else candidates(ranks, directory)
    for name in names:
        try:
            with open_on_all(ranks, directory, name) as reader:
                assert reader.manifest is not None
                for kind in reader.sets:
                    for tensor in reader.places(kind):
                        described = reader.tensor(kind, tensor)
                        reader.read(Read(kind, tensor, 0, torch.empty(described.numel, dtype=dtype_of(described.dtype))))
                decode(reader.manifest.client_state, reader.state_tensors(ranks))
                return name
        except DamagedError:
            if name == names[-1]:
                raise
    raise AssertionError("there is nothing to load")


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of a manifest, with a right checksum."""
    content = json.loads((path / MANIFEST).read_text())["content"]
    change(content)
    crc = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    (path / MANIFEST).write_text(json.dumps({"crc32": f"{crc:08x}", "content": content}))


def replace_file(path: Path, name: str, data: bytes) -> None:
    """Other bytes for a file, with right checksums."""
    (path / name).write_bytes(data)
    blocks = [zlib.crc32(data[begin : begin + BLOCK_BYTES]) for begin in range(0, len(data), BLOCK_BYTES)]
    record = {"bytes": len(data), "crc32": "".join(f"{crc:08x}" for crc in blocks)}
    rewrite(path, lambda content: content["files"].update({name: record}))


def is_refused(bad: Path) -> str:
    """By its tag, in one error, soon; without one, the checkpoint before is loaded."""
    start = time.monotonic()
    with pytest.raises(CheckpointError) as found:
        load(bad.parent, "bad")
    assert load(bad.parent) == "good"
    assert time.monotonic() - start < 2 * patience()
    return str(found.value)


MODEL_FILE, MODEL_INDEX = "model-00001-of-00001.safetensors", "model.safetensors.index.json"


@pytest.mark.parametrize("name", [MANIFEST, MODEL_FILE, MODEL_INDEX])
@pytest.mark.parametrize("kind", STRANGE)
def test_files_that_never_end(bad: Path, name: str, kind: str) -> None:
    assert load(bad.parent) == "bad"
    (bad / name).unlink()
    STRANGE[kind](bad / name)
    (bad.parent / "latest").write_text("bad")
    assert name in is_refused(bad)
    if name != MANIFEST:
        assert any(name in problem for problem in check(bad).problems)


@pytest.mark.parametrize("kind", STRANGE)
def test_weights_that_never_end(tmp_path: Path, kind: str) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json"):
        STRANGE[kind](tmp_path / name)
        with pytest.raises(CheckpointError):
            Reader(tmp_path, None).places("model")
        (tmp_path / name).rmdir() if kind == "directory" else (tmp_path / name).unlink()


def sparse(path: Path, length: int, begin: bytes = b"") -> None:
    path.write_bytes(begin)
    os.truncate(path, length)


def test_headers_and_small_files_that_are_too_long(bad: Path, tmp_path: Path) -> None:
    """Files with holes cost who sends them nothing."""
    header = tmp_path / "x.safetensors"
    sparse(header, 20 << 30, (19 << 30).to_bytes(8, "little"))
    with pytest.raises(DamagedError, match="header length"):
        TensorFile(header)
    sparse(tmp_path / MODEL_INDEX, 20 << 30)
    with pytest.raises(DamagedError, match="it has 21474836480 bytes"):
        Reader(tmp_path, None).places("model")
    sparse(bad / MANIFEST, 20 << 30)
    is_refused(bad)
    sparse(bad.parent / "latest", 20 << 30)
    assert folder.in_order_of_trust(bad.parent) == ["good"]


def test_tensors_that_share_their_bytes(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({f"t{index}": entry for index in range(1000)}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(DamagedError, match="begins inside of another"):
        TensorFile(tmp_path / "x.safetensors")


PATHS = ["../good/" + MODEL_FILE, "/dev/zero", "..", ".", "", "a/b", "a\0b"]


@pytest.mark.parametrize("name", PATHS)
def test_names_that_are_paths(bad: Path, name: str) -> None:
    rewrite(bad, lambda content: content["files"].update({name: {"bytes": 0, "crc32": ""}}))
    is_refused(bad)


@pytest.mark.parametrize("name", [*PATHS, "state-00001-of-00001.safetensors", "other.safetensors"])
def test_an_index_that_leads_elsewhere(bad: Path, tmp_path: Path, name: str) -> None:
    """Of a checkpoint to a file of another set, or outside; of weights alone, outside."""
    index = json.dumps({"weight_map": {"w": name}}).encode()
    replace_file(bad, MODEL_INDEX, index)
    is_refused(bad)
    (tmp_path / MODEL_INDEX).write_bytes(index)
    with pytest.raises(CheckpointError):
        Reader(tmp_path, None).tensor("model", "w")


def test_links_out_of_a_checkpoint(bad: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes((bad / MODEL_FILE).read_bytes())
    (bad / MODEL_FILE).unlink()
    (bad / MODEL_FILE).symlink_to(tmp_path / "secret")
    assert "which is in another directory" in is_refused(bad)


def test_links_that_users_have(bad: Path, tmp_path: Path) -> None:
    """A checkpoint by another name, links within it, a cache of the hub, and weights brought together from elsewhere."""
    (tmp_path / "elsewhere").symlink_to(bad.parent)
    assert load(tmp_path / "elsewhere") == "bad"
    (bad / MODEL_FILE).rename(bad / "weights")
    (bad / MODEL_FILE).symlink_to("weights")
    assert load(bad.parent) == "bad"
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "bad"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(path for path in bad.iterdir() if path.name != "weights"):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert load(snapshot.parent, "bad") == "bad"
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").symlink_to(bad / MODEL_FILE)
    with Reader(tmp_path / "weights", None) as reader:
        assert reader.tensor("model", "w").shape == (4,)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "time": lambda c: c.update(saved_at=5),
    "tag": lambda c: c.update(tag=None),
    "counters": lambda c: c.update(counters={"global_steps": "many"}),
    "too few sums": lambda c: c["files"][MODEL_FILE].update(crc32=""),
    "no sums of a small file": lambda c: c["files"][MODEL_INDEX].update(crc32=""),
    "too many sums": lambda c: c["files"][MODEL_FILE].update(crc32="00000000" * 1000),
    "sums of another length": lambda c: c["files"][MODEL_FILE].update(crc32="0000000"),
    "sums that are none": lambda c: c["files"][MODEL_FILE].update(crc32="-0000001"),
    "bytes": lambda c: c["files"][MODEL_FILE].update(bytes="248"),
    "negative bytes": lambda c: c["files"][MODEL_FILE].update(bytes=-1),
    "no sums of an index": lambda c: c["files"].pop(MODEL_INDEX),
    "sets": lambda c: c.update(sets={"model": MODEL_FILE}),
    "a set of no tensor file": lambda c: c["sets"]["model"].append(MODEL_INDEX),
    "a set that is a path": lambda c: c["sets"].update({"../good/model": []}),
    "shape": lambda c: c["parameters"]["w"].update(shape=[-4]),
    "parameter": lambda c: c["parameters"]["w"].pop("trainable"),
    "alias": lambda c: c.update(aliases={"v": ["w"]}),
    "optimizer": lambda c: c["optimizer"].update(groups=[[]]),
    "scalars": lambda c: c["optimizer"]["scalars"].update(step=[{"value": 1, "dtype": None, "names": "w"}]),
    "states": lambda c: c["optimizer"].update(states=[5]),
    "loss scale": lambda c: c.update(loss_scale={"scale": "big"}),
    "random numbers": lambda c: c.update(rng="x"),
    "latest": lambda c: c.update(becomes_latest="yes"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_manifests_whose_checksum_is_right(bad: Path, change: str) -> None:
    """One error, and a neighbour is loaded all the same; also if ``latest`` names the bad one, as here."""
    rewrite(bad, CHANGES[change])
    assert str(bad) in is_refused(bad)
    (bad.parent / "latest").write_text("good")
    assert load(bad.parent) == "good"


VALUES: dict[str, Any] = {
    "kind": {"$": ["tuple"]},
    "no name": {"$": "tensor"},
    "no such tensor": {"$": "tensor", "name": "gone"},
    "name": {"$": "ndarray", "name": []},
    "float": {"$": "float", "value": "much"},
    "bytes": {"$": "bytes", "base64": "?"},
    "function": {"$": "dtype", "name": "load"},
    "module": {"$": "dtype", "name": "os"},
    "device": {"$": "device", "name": "abacus"},
    "pairs": {"$": "dict", "items": [[1, 2, 3]]},
    "key": {"$": "dict", "items": [[[], 1]]},
    "size": {"$": "Size", "items": ["a"]},
    "set": {"$": "set", "items": [{}]},
    "items": {"$": "tuple", "items": 5},
    "length": {"$": "deque", "items": [], "maxlen": "a"},
    "complex": {"$": "complex", "items": [1, 2, 3]},
    "count": {"$": "Counter", "items": [1]},
}


@pytest.mark.parametrize("value", VALUES)
def test_values_that_nobody_encoded(value: str) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be decoded|does not know"):
        decode([{"here": VALUES[value]}], {})


def test_nested_values() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(CheckpointError, match="RecursionError"):
        decode(value, {})


@pytest.mark.parametrize("dtype", ["load", "float33", "float32"])
def test_scalars_that_nobody_packed(dtype: str) -> None:
    with pytest.raises(CheckpointError, match=r"optimizer\.step has a scalar"):
        unpack_scalars({"step": [{"value": "much", "dtype": dtype, "names": ["w"]}]})


def test_records() -> None:
    assert folder.missing_files(Path("/dev"), {"zero": FileRecord(0, ())}) == {"zero": "is no regular file"}
