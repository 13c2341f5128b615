"""The ranks of all tests here: each job is on a clean slate, and what it leaves behind is its own failure."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import of_this_job, run_ranks
from models import Gpt
from training import make_config

import zerorun

at_night = partial(pytest.param, marks=pytest.mark.nightly)
_kept: list[Any] = []  # by jobs that leave something behind


def who(_: int = 0) -> tuple[int, int, int, float]:
    """Process, rank, ranks, and the sum of all ranks."""
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return os.getpid(), dist.get_rank(), dist.get_world_size(), float(total)


def test_groups_of_any_size_are_made_of_the_same_processes() -> None:
    found = {world: run_ranks(world, who) for world in (8, 1, 3, 2)}
    for world, answers in found.items():
        assert [rank for _, rank, _, _ in answers] == list(range(world))
        assert {(size, total) for _, _, size, total in answers} == {(world, world * (world + 1) / 2)}
        assert [process for process, *_ in answers] == [process for process, *_ in found[8]][:world]


# -- what is put back --------------------------------------------------------------------------------------------


def untidy() -> None:
    os.environ["WORLD_SIZE"] = "77"
    os.environ["ZERORUN_MEMORY_CHECK"] = "0"
    os.chdir("/")
    torch.manual_seed(5)
    random.seed(5)
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    of_this_job["kept"] = torch.ones(2**23)


def state() -> list[Any]:
    numbers = torch.rand(2).tolist(), random.random()
    settings = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    variables = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    return [numbers, settings, variables, os.getcwd(), signal.getsignal(signal.SIGTERM), dict(of_this_job)]


def test_a_job_does_not_see_what_another_has_changed() -> None:
    run_ranks(2, untidy)
    before = run_ranks(2, state)
    run_ranks(2, untidy)
    assert run_ranks(2, state) == before


# -- what fails a job --------------------------------------------------------------------------------------------


def leave_a_file() -> None:
    _kept.append(open(os.devnull))  # noqa: SIM115


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), name="left over", daemon=True).start()


def leave_memory() -> None:
    _kept.append(torch.ones(2**23))


def leave_an_engine() -> None:
    _kept.append(zerorun.initialize(Gpt(1), make_config(1)))


def leave_a_group() -> None:
    _kept.append(dist.new_group())


def leave_on_one_rank() -> None:
    if dist.get_rank() == 1:
        leave_a_file()


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (leave_a_file, "open /dev/null"),
        (leave_a_thread, "thread left over"),
        (leave_memory, "32 MiB of memory"),
        (leave_an_engine, "1 engine(s) are still alive"),
        at_night(leave_a_group, "open socket"),
        at_night(leave_on_one_rank, "open /dev/null"),
    ],
)
def test_what_a_job_leaves_behind_fails_it(leave: Callable[[], None], said: str) -> None:
    before = {process for process, *_ in run_ranks(2, who)}
    with pytest.raises(AssertionError, match="what is left behind") as caught:
        run_ranks(2, leave)
    assert said in str(caught.value)
    assert not before & {process for process, *_ in run_ranks(2, who)}, "the next job has new ranks"


# -- ranks that end ----------------------------------------------------------------------------------------------


def end(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(3)
        if how == "sys.exit":
            sys.exit(5)
        if how == "hangs":
            time.sleep(600)
        raise ValueError("of rank 1")
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "rank 1: process ended with code -9"),
        at_night("exits", "rank 1: process ended with code 3"),
        at_night("sys.exit", "SystemExit: 5"),
        at_night("raises", "ValueError: of rank 1"),
        ("hangs", "in end"),
    ],
)
def test_every_rank_is_told_of_and_the_next_has_fresh_ones(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness._GRACE_S", 0.2)
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, end, how, timeout_s=0.5 if how == "hangs" else None)
    assert said in str(caught.value)
    assert "rank 0: " in str(caught.value)
    assert [total for *_, total in run_ranks(2, who)] == [3.0, 3.0]


def test_processes_know_their_test(tmp_path: Path) -> None:
    names = run_ranks(2, os.getenv, "PYTEST_CURRENT_TEST")
    assert all("test_processes_know_their_test" in name for name in names)
