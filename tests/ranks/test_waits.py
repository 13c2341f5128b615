"""Whoever waits for long says so, once: for what, since when, and for whom."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import patience, run_ranks
from torch import nn
from training import make_config

import zerorun
from zerorun.distributed import waits
from zerorun.distributed.transport import gloo
from zerorun.distributed.transport.statistics import CommunicationStatistics, Message


class Shown(io.StringIO):
    """What is written. ``file`` is there as soon as there is something."""

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self._file = file

    def write(self, text: str) -> int:
        if self._file is not None:
            self._file.touch()
        return super().write(text)


@contextmanager
def told(after_s: float = 0.3, file: Path | None = None) -> Iterator[io.StringIO]:
    before, usual, written = sys.stderr, waits.watch.after_s, Shown(file)
    sys.stderr = written
    waits.watch.tell_after(after_s)
    try:
        yield written
    finally:
        sys.stderr = before
        waits.watch.tell_after(usual)


def until_told(folder: str) -> None:
    """Come late: when all others have been told that this rank has not come."""
    files = [Path(folder) / str(rank) for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    for _ in range(int(1200 * patience())):
        if all(file.exists() for file in files):
            break
        time.sleep(0.05)


def late(stage: int, place: str, folder: str) -> str:
    """What this rank has on stderr when the last rank comes late to ``place`` of a step."""
    torch.manual_seed(0)
    engine = zerorun.initialize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), make_config(stage))
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()  # the order is agreed on
    last = dist.get_rank() == dist.get_world_size() - 1
    with told(file=Path(folder) / str(dist.get_rank())) as written:
        if last and place == "step":
            until_told(folder)
        loss = engine(torch.ones(2, 4)).sum()
        engine.backward(loss)
        if last and place == "control":
            until_told(folder)
        engine.step()
        if last and place == "checkpoint":
            until_told(folder)
        if place == "checkpoint":
            engine.save_checkpoint(Path(folder) / "saved")
        engine.comm.control.barrier()
        found = written.getvalue()
    engine.destroy()
    return found


LINE = re.compile(
    r"\[zerorun rank (\d)\] has been waiting for \d+ s, since \d\d:\d\d:\d\d: (.+?)\.( Ranks? [\d, ]+ ha\w+ not come\.)?"
)


@pytest.mark.each_value
# 2 ranks read each other's memory; 3 send messages (harness.py).
@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("place", ("step", "control"))
@pytest.mark.parametrize("stage", (1, 3))
def test_one_line_names_the_collective_and_who_has_not_come(stage: int, place: str, ranks: int, tmp_path: Path) -> None:
    *waited, slow = run_ranks(ranks, late, stage, place, str(tmp_path))
    assert slow == ""
    for rank, text in enumerate(waited):
        (line,) = text.splitlines()
        found = LINE.fullmatch(line)
        assert found is not None, line
        assert int(found[1]) == rank
        known = ranks == 2 or "control" not in found[2]
        if known:
            assert f"Rank {ranks - 1} has not come." in line


def named_in_messages() -> list[int]:
    """Of whom a rank would say that it has not come, where ranks 1 and 2 of the world sum between them by messages."""
    group, rank, named = dist.new_group([1, 2]), dist.get_rank(), []
    if rank == 0:
        return []
    pair = gloo.Gloo("pair", group, rank - 1, 2, torch.device("cpu"), CommunicationStatistics())

    class Noted(Message):
        def __init__(self, work: dist.Work, label: str, peer: int, tag: int) -> None:
            super().__init__(work, label, peer, tag)
            named.append(peer)

    gloo.Message = Noted  # type: ignore[misc]
    try:
        assert pair.sum_of(torch.ones(4), "a sum of two").tolist() == [2.0] * 4
        pair.all_gather(torch.ones(4), (0, 2, 4), "a gather").wait()
        pair.all_reduce(torch.ones(4), "a sum in two phases")
    finally:
        gloo.Message = Message  # type: ignore[misc]
    return named


def test_ranks_of_a_group_are_named_as_in_the_world() -> None:
    assert run_ranks(3, named_in_messages) == [[], [2] * 8, [1] * 8]


def test_who_is_asked_and_does_not_answer_holds_up_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose host has gone is tried for an hour: the wait for it is told, and so are waits for others."""
    answers, asked = threading.Event(), []

    def unanswered() -> list[int]:
        asked.append(threading.current_thread())
        answers.wait(60 * patience())
        return [0]

    monkeypatch.setattr(waits, "_ANSWER_S", 0.1)
    with told() as written:
        with waits.waiting("a store", unanswered), waits.waiting("a disk"):
            for _ in range(int(100 * patience())):
                if len(written.getvalue().splitlines()) == 2:
                    break
                time.sleep(0.1)
        answers.set()
    for thread in asked:
        thread.join()
    lines = sorted(line.partition(", since ")[2][10:] for line in written.getvalue().splitlines())
    assert lines == ["a disk.", "a store."]


def test_a_save_says_so_too(tmp_path: Path) -> None:
    first, slow = run_ranks(2, late, 1, "checkpoint", str(tmp_path))
    waits_for = [line.partition(", since ")[2].partition(": ")[2] for line in first.splitlines()]
    assert waits_for and len({*waits_for}) == len(waits_for), "a line for each wait that took long"
    assert slow == ""


def slow_disk(folder: str) -> str:
    """What this rank has on stderr where the disk of rank 1 takes its time in a save."""
    engine = zerorun.initialize(nn.Linear(4, 4), make_config(1))
    with told(file=Path(folder) / str(dist.get_rank())) as written:
        if dist.get_rank() == 1:
            engine.checkpointer.check_point = lambda point: until_told(folder) if point == "sync" else None
        engine.save_checkpoint(Path(folder) / "saved")
        found = written.getvalue()
        engine.comm.control.barrier()
    engine.destroy()
    return found


@pytest.mark.parametrize("ranks", (2, 3))
def test_a_save_names_the_rank_whose_disk_is_slow(ranks: int, tmp_path: Path) -> None:
    first, slow, *last = run_ranks(ranks, slow_disk, str(tmp_path))
    assert all("what all ranks have to say or to write. Rank 1 has not come." in text for text in (first, *last))
    assert "not come" not in slow


def lines_of(wait: Callable[[], None], after_s: float) -> list[str]:
    with told(after_s) as written:
        wait()
        return written.getvalue().splitlines()


def test_short_waits_are_silent_and_0_switches_the_watch_off() -> None:
    limit = 0.1 * patience()  # of seconds: under load, a sleep of 10 ms takes many times as long

    def short() -> None:
        """Together they take longer than a wait may."""
        end = time.monotonic() + 2 * limit
        while time.monotonic() < end:
            with waits.waiting("nothing"):
                time.sleep(0.01)

    def long() -> None:
        with waits.waiting("nothing"):
            time.sleep(3 * limit)

    assert lines_of(short, limit) == []
    assert lines_of(long, 0) == []
    assert len(lines_of(long, limit)) == 1


def test_waits_of_any_number_have_one_thread() -> None:
    with waits.waiting("first"), waits.waiting("second"):
        assert sum(thread.name == "zerorun waits" for thread in threading.enumerate()) == 1
    assert not waits.watch.open
