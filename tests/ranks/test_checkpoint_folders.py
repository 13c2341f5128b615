"""The directory of checkpoints, as a script sees it: which are kept, which is loaded, and from where paths count."""

from __future__ import annotations

import logging
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from training import make_config

import zerorun
from zerorun import log
from zerorun.checkpoint import checkpointer
from zerorun.errors import CheckpointError, StepError
from zerorun.log import logger


def make(**changes: Any) -> zerorun.Engine:
    torch.manual_seed(0)
    return zerorun.initialize(nn.Linear(6, 6), make_config(1, **changes))


def train(engine: zerorun.Engine, count: int) -> None:
    for _ in range(count):
        engine.backward(engine(torch.ones(2, 6)).square().mean())
        engine.step()


def keep_two(folder: str) -> tuple[list[str], Any]:
    """(what is there at the end, the client state that a load without a tag gives)."""
    engine = make(checkpoint={"dir": folder, "every_steps": 1, "keep_last": 1})
    train(engine, 1)
    engine.save_checkpoint(folder, "best", {"best": True}, save_latest=False)
    train(engine, 2)
    engine.save_checkpoint(folder, "probe", {"probe": True}, save_latest=False)
    path, client_state = engine.resume()
    assert path == Path(folder, "global_step3")
    assert engine.load_checkpoint(folder, "best")[1] == {"best": True}
    engine.destroy()
    return sorted(path.name for path in Path(folder).iterdir()), client_state


def test_keep_last_spares_what_is_saved_beside_the_latest(tmp_path: Path) -> None:
    for found in run_ranks(2, keep_two, str(tmp_path)):
        assert found == (["best", "global_step3", "latest", "probe"], {})


def move_between_hosts(folder: str, asynchronous: bool) -> list[Any]:
    """What is there after saves by clocks of which the first is ahead, and what loads without a tag give."""
    section = {"dir": folder, "every_steps": 1, "keep_last": 2, "asynchronous": asynchronous}
    ahead = (datetime.now(timezone.utc) + timedelta(minutes=10)).isoformat(timespec="microseconds")
    engine, loaded = make(checkpoint=section), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer, "now", lambda: ahead)
        train(engine, 2)
        engine.wait_for_checkpoint()
    train(engine, 2)
    loaded.append(engine.resume()[0])
    train(engine, 1)
    engine.wait_for_checkpoint()
    there = sorted(path.name for path in Path(folder).iterdir())

    def be_killed(point: str) -> None:
        if point == "latest":
            raise OSError("killed")

    engine.checkpointer.check_point = be_killed
    with pytest.raises(CheckpointError, match="killed"):
        engine.save_checkpoint(folder, "killed")
    loaded.append(engine.load_checkpoint(folder)[0])
    engine.destroy()
    return [there, *(path and path.name for path in loaded)]


@pytest.mark.parametrize("asynchronous", (False, True))
def test_a_clock_that_was_ahead_hides_no_checkpoint(asynchronous: bool, tmp_path: Path) -> None:
    for found in run_ranks(2, move_between_hosts, str(tmp_path), asynchronous):
        assert found == [["global_step4", "global_step5", "latest"], "global_step4", "killed"]


def change_folder(folder: str) -> list[str]:
    """Relative paths count from where they were given, whatever the script does while a save goes on, or afterwards."""
    for name in ("first", "second"):
        Path(folder, name).mkdir(exist_ok=True)
    before = Path.cwd()
    try:
        os.chdir(Path(folder, "first"))
        engine = make(checkpoint={"dir": "own", "every_steps": 2, "asynchronous": True})
        train(engine, 1)
        engine.checkpointer.check_point = lambda point: os.chdir(Path(folder, "second"))
        given = engine.save_checkpoint("asked", asynchronous=True)
        engine.wait_for_checkpoint()
        train(engine, 1)
        engine.wait_for_checkpoint()
        assert engine.resume()[0] == Path(folder, "first", "own", "global_step2")
        assert given == Path(folder, "first", "asked", "global_step1")
        engine.destroy()
    finally:
        os.chdir(before)
    dist.barrier()
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("zerorun.json"))


def test_paths_count_from_where_they_were_given(tmp_path: Path) -> None:
    expected = ["first/asked/global_step1/zerorun.json", "first/own/global_step2/zerorun.json"]
    assert run_ranks(2, change_folder, str(tmp_path)) == [expected] * 2


def save_two_engines(folder: str) -> list[str]:
    """What is said where two engines of a script, such as the halves of a GAN, save what they have."""
    log._warned.clear()
    first, second = make(), make()
    for engine in (first, second):
        train(engine, 1)
    first.save_checkpoint(folder)
    first.save_checkpoint(folder)
    second.save_checkpoint(folder, "second")
    assert not [text for text in log._warned if "another engine" in text]
    second.save_checkpoint(folder)
    said = [text for text in log._warned if "another engine" in text]
    second.destroy()
    first.save_checkpoint(folder)
    first.destroy()
    return [*said, *(text for text in log._warned if "another engine" in text)]


def test_an_engine_that_replaces_what_another_one_has_saved_says_so(tmp_path: Path) -> None:
    for said in run_ranks(2, save_two_engines, str(tmp_path)):
        assert len(said) == 2 and said[0] == said[1]
        assert f"{tmp_path}/global_step1, which another engine of this script has saved, is replaced" in said[0]
        assert "give each engine a directory of its own (checkpoint.keep_last counts" in said[0]


def test_a_folder_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths count from it."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    engine = make()
    gone.rmdir()
    for act in (engine.save_checkpoint, engine.load_checkpoint, engine.export):
        with pytest.raises(CheckpointError, match=r"directory = 'here': .*working directory of this process was deleted"):
            act("here")
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_load_where_nothing_is_recorded_can_be_trained(stage: int, tmp_path: Path) -> None:
    """Tensors that are made in inference mode cannot be: a load for an evaluation may be there."""
    torch.manual_seed(0)
    engine = zerorun.initialize(nn.Linear(6, 6), make_config(stage))
    train(engine, 2)
    engine.save_checkpoint(tmp_path)
    train(engine, 2)
    expected = engine.state_dict()
    with torch.inference_mode():
        engine.load_checkpoint(tmp_path)
    train(engine, 2)
    assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())
    with torch.inference_mode():
        zerorun.load_pretrained(engine.module, tmp_path / "global_step2")
    train(engine, 1)
    engine.destroy()


def loads_of_paths(folder: str) -> tuple[list[Any], list[str]]:
    """(what a load of the path that a save has returned gives, what is said of other paths and other arguments)."""
    engine, rank = make(), dist.get_rank()
    train(engine, 1)
    path = engine.save_checkpoint(folder, client_state={"best": True})
    engine.save_checkpoint(folder, "other")
    loaded = [engine.load_checkpoint(path), engine.load_checkpoint(folder, ("other", "global_step1")[rank])]
    if rank == 0:
        Path(folder, "file").write_text("")
    dist.barrier()
    said = []
    for load in (
        lambda: engine.load_checkpoint(Path(folder, "file")),
        lambda: engine.load_checkpoint(folder, load_optimizer=rank == 0),
        lambda: engine.export(Path(folder, "weights"), dtype=("fp32", None)[rank]),
        lambda: engine.save_checkpoint(folder, save_latest=rank == 0),
        lambda: engine.save_checkpoint(folder, asynchronous=rank == 0),
    ):
        with pytest.raises(CheckpointError) as caught:
            load()
        said.append(str(caught.value))
    engine.destroy()
    return loaded, said


def test_what_a_save_returns_can_be_loaded(tmp_path: Path) -> None:
    """It began anew, with a warning. Ranks that ask for different things are told, and rank 0's tag counts."""
    for (returned, tagged), (file, optimizer, export, latest, later) in run_ranks(2, loads_of_paths, str(tmp_path)):
        assert returned == (tmp_path / "global_step1", {"best": True}) and tagged[0] == tmp_path / "other"
        assert "file is a file. Remedy: pass a directory" in file
        assert "load_checkpoint() was asked for" in optimizer and "on rank 1" in optimizer
        assert "export() was asked for" in export and not (tmp_path / "weights").exists()
        assert "save_checkpoint() was asked for save_latest=False" in latest and "asynchronous=False" in later


def go_back_beside_another_run(folder: str) -> list[str]:
    """What is said where two runs save into one directory, and one of them reads an export or forgets step()."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    first = make()
    train(first, 3)
    first.save_checkpoint(folder)
    first.export(Path(folder, "weights"))
    first.destroy()
    other = make()
    other.load_checkpoint(Path(folder, "weights"))
    other.backward(other(torch.ones(2, 6)).square().mean())
    with pytest.raises(StepError) as caught:
        other.save_checkpoint(folder)
    other.step()
    other.load_checkpoint(Path(folder, "weights"))
    other.save_checkpoint(folder, asynchronous=True)
    other.wait_for_checkpoint()
    logger.removeHandler(handler)
    other.destroy()
    return [*lines, str(caught.value)]


def test_what_is_said_where_two_runs_save_into_one_directory(tmp_path: Path) -> None:
    said, *others = run_ranks(2, go_back_beside_another_run, str(tmp_path))
    at = f"there is no checkpoint in {tmp_path}/weights: "
    remedy = " What is there are weights alone: zerorun.load_pretrained(model, dir) reads them."
    assert f"{at}training starts from the beginning.{remedy}" in said
    assert f"{at}the run goes on as it is.{remedy}" in said
    back = (
        f"{tmp_path}/latest names global_step3, of 3 steps; from here on it names global_step1, of 1. Remedy, if those are "
    )
    assert sum(line.startswith(back) for line in said) == 1
    assert f"checkpoint {tmp_path}/global_step1 is saved" in said
    for *_, refused in (said, *others):
        assert "step() has not been called yet. Remedy: " in refused and "pass unfinished_step=True" in refused


def save_on(folder: str, disks: list[int], steps: int) -> None:
    engine = make()
    train(engine, steps)
    engine.save_checkpoint(Path(folder) / f"disk{disks[dist.get_rank()]}")
    engine.destroy()


def load_from(folder: str, disks: list[int]) -> tuple[str, int, list[str]]:
    """(the tag and the steps of what a load without a tag gives, what is said)."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
        engine = make()
        path, _ = engine.load_checkpoint(Path(folder) / f"disk{disks[dist.get_rank()]}")
        assert path is not None
        found = path.name, engine.global_steps
        engine.destroy()
    return *found, said


@pytest.mark.parametrize("disks", ([0, 3, 1, 2], [3, 1, 0, 2]))
def test_a_disk_that_was_away_hides_no_newer_checkpoint(disks: list[int], tmp_path: Path) -> None:
    """Wherever it is now: the first one counted, so that a run went back to what was there, or found its files missing."""
    run_ranks(3, save_on, str(tmp_path), [0, 1, 2], 1)
    run_ranks(3, save_on, str(tmp_path), [3, 1, 2], 2)
    ranks = run_ranks(4, load_from, str(tmp_path), disks)
    assert [found[:2] for found in ranks] == [("global_step2", 2)] * 4
    (warning,) = (text for text in ranks[0][2] if "is tried first" in text)
    assert "global_step1" in warning and warning.endswith("global_step2 is tried first.")
