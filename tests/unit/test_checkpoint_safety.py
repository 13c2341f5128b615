"""Checkpoints among what others have made: nothing of theirs is deleted, overwritten, followed, or believed.

The attacker is another user who can write into the directory of checkpoints, or who has made the checkpoint.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zerorun.checkpoint import directory as folder
from zerorun.checkpoint.manifest import Manifest, read_manifest
from zerorun.checkpoint.offline import alone
from zerorun.checkpoint.stream import FileWriter, WriteQueue, write_small
from zerorun.checkpoint.tensorfile import FileRecord
from zerorun.checkpoint.write import Target, commit
from zerorun.errors import CheckpointError

# -- what a save deletes, overwrites and follows -----------------------------------------------------------------


def save(directory: Path, tag: str, step: int = 0, keep: int | None = None) -> Path:
    """A whole save of one rank, of a checkpoint without tensors."""
    manifest = Manifest(tag, f"2026-01-01T00:00:{step:02}", {"global_steps": step})
    return commit(alone(), Target(directory, tag, keep=keep), dict, lambda records: ({"config.json": b"{}"}, manifest))


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
    commit(alone(), Target(tmp_path / "others", "base"), dict, lambda records: ({}, manifest))
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
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [pipe, device, bound])
def test_latest_that_never_ends(tmp_path: Path, make: Callable[[Path], None]) -> None:
    save(tmp_path, "s1", 1)
    (tmp_path / "latest").unlink()
    make(tmp_path / "latest")
    start = time.monotonic()
    assert folder.in_order_of_trust(tmp_path) == ["s1"]
    assert time.monotonic() - start < 1


def test_records() -> None:
    assert folder.missing_files(Path("/dev"), {"zero": FileRecord(0, ())}) == {"zero": "is no regular file"}
