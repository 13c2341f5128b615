"""What the launcher tells of a hang: once, with the stacks of the guilty, and when it ends the job."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from zerorun.launcher.failures import WorkerEnd
from zerorun.launcher.flight_recorder import FlightRecorder
from zerorun.launcher.hang_detection import Hangs
from zerorun.launcher.worker_boards import Seen
from zerorun.watch.board import ALL, NOBODY, Phase, Sight, SizeNote


def seen(rank: int, wait_s: float | None, limit_s: float | None = 1.0) -> Seen:
    span, label = (NOBODY, "") if wait_s is None else (ALL, "gather")
    numbers = {"events": 9, "pid": 1, "step": 10, "batches": 20, "number": 0, "longest_s": 0.1, "phase_s": 5.0}
    sight = Sight(
        rank=rank, gives_stacks=True, limit_s=limit_s, phase=Phase.SCRIPT, wait_s=wait_s, span=span, label=label, **numbers
    )
    return Seen(sight, 5.0, False)


class Told:
    """The launcher's part of two ranks, of which rank 1 computes while rank 0 waits."""

    def __init__(self, limit_s: float | None = 1.0) -> None:
        self.said: list[str] = []
        self.asked: list[int] = []
        self.hangs = Hangs(2, lambda rank: None, self.said.append, self.asked.append, lambda *_: None)
        self.hangs.on_seen(0, seen(0, 50.0, limit_s))
        self.hangs.on_seen(1, seen(1, None, limit_s))
        self.now = max(at for at, _ in self.hangs._seen.values())

    def later(self, seconds: float, ends: dict[int, WorkerEnd] | None = None) -> bool:
        self.now += seconds
        return self.hangs.must_end(ends or {}, self.now)


def test_a_hang_is_told_once_and_ends_the_job_when_the_stacks_are_there() -> None:
    told = Told()
    assert not told.later(0.1)
    assert not told.later(0.1), "it does not judge at every turn"
    assert not told.later(1.0)
    assert (len(told.said), told.asked) == (1, [1])
    told.hangs.on_stacks(1, "Thread 7:\n  File beside\n\nCurrent thread 8:\n  File train.py\n")
    assert told.later(1.0)
    report = told.hangs.report()
    assert report.index("Current thread") < report.index("Thread 7")
    assert "zerorun: the job hangs: rank 1 does not move" in report and told.hangs.guilty == (1,)


def test_stacks_that_do_not_come_are_not_waited_for() -> None:
    told = Told()
    told.later(0.1)
    assert [told.later(1.0), told.later(1.0), told.later(1.5)] == [False, False, True]


def test_a_rank_that_comes_after_all() -> None:
    told = Told(limit_s=None)
    told.later(40.0)
    assert "does not move" in told.said[0]
    told.hangs.on_seen(1, None)
    assert not told.later(1.0)
    assert told.said[1:] == ["[zerorun] the job goes on"]
    assert not told.later(1.0) and len(told.said) == 2


def test_all_ranks_go_on() -> None:
    """That is told at once, and not when one of them stands still again."""
    told = Told(limit_s=None)
    told.later(40.0)
    for rank in range(2):
        told.hangs.on_seen(rank, None)
    told.later(1.0)
    assert told.said[1:] == ["[zerorun] the job goes on"]


def test_a_job_that_was_frozen_does_not_hang() -> None:
    """Nothing has looked for an hour, so nobody knows who would have moved."""
    told = Told(limit_s=None)
    assert not told.later(1.0) and not told.said
    assert not told.later(3600.0) and not told.said
    for _ in range(20):
        told.later(2.0)
    assert "does not move" in told.said[0]


def test_an_ended_rank_is_known_with_its_batches() -> None:
    told = Told()
    assert (told.hangs.batches(1), told.hangs.batches(7)) == (20, None)
    ends = {1: WorkerEnd(1, 0, 3.0, (), asked_to_stop=False, batches=told.hangs.batches(1))}
    assert not told.later(2.0, ends) and not told.said, "the other may not have had a core since"
    told.later(1.5, ends)
    told.later(1.5, ends)
    assert "rank 1 has ended with exit code 0 after 20 micro-batches" in told.said[0]
    assert told.later(1.0, ends)


def test_sizes_by_the_last_boards() -> None:
    """Of ranks that have ended, too: their boards are told when they have."""
    told, sizes = Told(), {0: 12, 1: 24}
    assert told.hangs.other_sizes() is None
    for rank, size in sizes.items():
        one = seen(rank, None)
        told.hangs.on_seen(rank, replace(one, sight=replace(one.sight, sizes=(SizeNote(7, *ALL, size),))))
    assert str(told.hangs.other_sizes()).startswith(
        "ranks disagree on the size of a collective: rank 0 has 12 bytes, rank 1 has 24 bytes."
    )


# -- what NCCL did last ----------------------------------------------------------------------------------------------

GPUS = {"CUDA_VISIBLE_DEVICES": "0,1"}


def test_ranks_with_gpus_are_asked_for_their_last_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a pipe for each rank, and writes beside it when it reads something there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    recorder = FlightRecorder()
    told = recorder.begin(GPUS)
    assert told["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000" and recorder.words == ""
    pipe = Path(f"{told['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}0.pipe")
    recorder.ask()
    os.mkfifo(pipe)
    recorder.ask()  # nobody reads it
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    recorder.ask()
    assert os.read(reader, 9) == b"1\n"
    os.close(reader)
    written = Path(f"{told['TORCH_NCCL_DEBUG_INFO_TEMP_FILE']}0")
    assert str(written.parent) in recorder.words
    written.touch()
    recorder.end()
    assert written.exists() and not pipe.exists()
    recorder.begin(GPUS)
    recorder.end()
    assert list(tmp_path.iterdir()) == [written.parent], "of a job that did not hang nothing is left"


@pytest.mark.parametrize("given", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {**GPUS, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "mine"}])
def test_without_gpus_and_with_files_of_the_user_s_nothing_is_said(given: dict[str, str]) -> None:
    assert FlightRecorder().begin(given) == {}


def test_how_much_is_remembered_the_user_may_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert FlightRecorder().begin({**GPUS, "TORCH_NCCL_TRACE_BUFFER_SIZE": "7"})["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"
