"""``zerorun --dump`` and running jobs in zerorun-report: what is seen of ranks, whoever has started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from harness import patience
from test_report_findings import host

from zerorun.errors import LaunchError
from zerorun.launcher import cli
from zerorun.launcher.dump import RankState, gather, on_this_host, one_job, page
from zerorun.launcher.worker_boards import Boards, Seen, open_board
from zerorun.report.findings import find
from zerorun.report.page import render
from zerorun.watch.board import ALL, PAGE, Phase, Sight, Word

# -- this host -------------------------------------------------------------------------------------------------------

WORKER = """
import os, sys, time
from zerorun.watch.board import Phase, board, show_board
show_board()
board.write(STEP=5)
def standing():
    board.enter(Phase.FORWARD)
    board.wait_begins("3: gather", (1, 1, 1), 7)
    print("shown", flush=True)
    sys.stdin.readline()
def moving():
    print("shown", flush=True)
    while True:
        board.write(BATCHES=1)
        time.sleep(0.01)
moving() if os.environ["RANK"] == "1" else standing()
"""


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[str]]]:
    """Three ranks of a job, of which rank 1 moves."""
    boards, started = Boards(), []
    for rank in range(3):
        files, told = boards.make(rank)
        job = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "node0", "MASTER_PORT": str(os.getpid())}
        environment = {**os.environ, **job, **told, "SLURM_JOB_ID": "77"}
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER], env=environment, pass_fds=files, text=True, stdin=-1, stdout=-1
        )
        boards.started(rank, process.pid, files, 0.0)
        started.append(process)
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "shown\n"
    boards.close()  # whoever has started them may be gone
    yield started
    for process in started:
        process.kill()
        process.communicate()


def of_this_test(found: list[RankState]) -> dict[int, RankState]:
    return {rank.seen.sight.rank: rank for rank in found if rank.job == f"node0:{os.getpid()}"}


def test_ranks_are_found_and_asked_for_their_stacks(ranks: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 30 * patience()
    while True:  # a busy machine may need more than the time that they are given
        found = of_this_test(on_this_host())
        if found[1].moves and all("Current thread" in state.stacks for state in found.values()):
            break
        assert time.monotonic() < deadline
    assert sorted(found) == [0, 1, 2] and [found[rank].moves for rank in range(3)] == [False, True, False]
    still = found[0]
    assert (still.names, still.world_size, still.seen.sight.step) == ((still.job, "77"), 3, 5)
    assert (still.seen.sight.label, still.seen.sight.pid) == ("3: gather", ranks[0].pid)
    assert "in standing" in still.stacks and "Threads by the kernel:\n  1 x python" in still.stacks
    assert RankState.of(json.loads(json.dumps(asdict(still)))) == still


def test_what_the_command_prints(ranks: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]) -> None:
    ranks[2].send_signal(signal.SIGSTOP)
    while ") T " not in Path(f"/proc/{ranks[2].pid}/stat").read_text():
        time.sleep(0.01)
    job = f"node0:{os.getpid()}"
    assert cli.main(["--dump", job]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"job {job}, 77: 3 of 3 ranks on 1 host, 5 steps, ")
    assert "rank 0: 5 steps, micro-batch 0; in forward, at '3: gather', for " in text
    assert "rank 2: 5 steps, micro-batch 0; stopped, in forward, at '3: gather', for " in text
    assert "  1 x python" in text.split("rank 2: ")[1]  # it cannot write its stacks; the kernel tells of it
    assert cli.main(["--dump=nonsense"]) == cli.USAGE_STATUS
    error = capsys.readouterr().err
    assert "job nonsense does not run on localhost. Jobs that do: " in error and job in error
    assert "No worker is running" not in error
    with pytest.raises(SystemExit):
        cli.main(["--dump", job, "train.py"])
    assert "starts nothing" in capsys.readouterr().err


def test_a_trace_is_asked_for_on_the_board_of_rank_0(
    ranks: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    job = f"node0:{os.getpid()}"
    assert cli.main(["--trace", job, "--steps", "5"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"rank 0 of job {job} writes its next 5 steps to zerorun-trace-")
    file = told.split(" to ")[1].split(",")[0]
    for process, steps in zip(ranks, (5, 0, 0), strict=True):
        files = open_board(process.pid)
        written = os.pread(files[0], PAGE, 0)
        assert memoryview(written).cast("q")[Word.TRACE] == steps and (file.encode() in written) == (steps > 0)
        for opened in files:
            os.close(opened)
    assert cli.main(["--trace=nonsense"]) == cli.USAGE_STATUS
    assert "job nonsense does not run on localhost" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([("a", 0), ("b", 0)], "more than one job runs here. Remedy: give the name of one. job a: 1 of 8"),
        ([("a", 1), ("a", 2)], "rank 0 of job a was not among the 2 ranks that were seen"),
    ],
)
def test_whom_to_ask_for_a_trace_must_be_clear(found: list[tuple[str, int]], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        one_job([replace(state(rank), job=job, names=(job,)) for job, rank in found])


def test_other_hosts_are_asked_and_a_silent_one_is_told_of() -> None:
    found, silent = gather(
        {
            "good": [sys.executable, "-c", f"print('welcome'); print({json.dumps([asdict(state(4))])!r})"],
            "down": ["sh", "-c", "echo ssh: no route to host >&2; exit 255"],
            "odd": ["echo", "[1]"],
            "none": ["/no/such/program"],
        },
        None,
    )
    assert found == [state(4)]
    assert silent == {
        "down": "ssh: no route to host",
        "odd": "echo ended with status 0 and said nothing",
        "none": "cannot run '/no/such/program': No such file or directory",
    }


# -- the page --------------------------------------------------------------------------------------------------------

SIGHT = Sight(9, 1000, 0, True, None, 12, 24, Phase.FORWARD, 40.0, 40.0, ALL, 3, 0.1, "2: gather")
STACK = 'Thread 0x01 (most recent call first):\n  File "b.py", line 1 in beside\n\n' + (
    'Current thread 0x{} (most recent call first):\n  File "a.py", line {} in {}\n'
)


def state(rank: int, function: str = "wait", *, moves: bool = False, **sight: Any) -> RankState:
    seen = Seen(replace(SIGHT, rank=rank, pid=1000 + rank, **sight), 0.0 if moves else 40.0, False)
    stack = STACK.format(rank, 5, function)
    return RankState(f"node{rank // 4}", "node0:29500", ("node0:29500",), "python train.py", 8, seen, moves, stack)


def test_ranks_with_equal_stacks_are_shown_once_and_the_odd_one_first() -> None:
    odd = state(5, "save", phase=Phase.SCRIPT, wait_s=None)
    text = "\n".join(page([*(state(rank) for rank in range(8) if rank != 5), odd], {}, "", asked=["node0"]))
    assert text.startswith("job node0:29500: 8 of 8 ranks on 2 hosts, 12 steps, none of them moving\n  python train.py\n")
    assert "  rank 5 on node1 does not move: it has been in the script between calls of the engine for 40 s" in text
    first, second = text.split("\n\n  rank")[1:]
    assert first.startswith(
        " 5: 12 steps, micro-batch 24; in the script between calls of the engine, for 40 s (process 1005"
    )
    assert second.startswith("s 0-4, 6-7: 12 steps, micro-batch 24; in forward, at '2: gather', for 40 s (process 1000 on")
    assert text.count("in wait") == 1 and text.count("in save") == 1
    assert first.index("in save") < first.index("in beside")


def test_a_job_that_moves_has_no_verdict_and_missing_ranks_are_told() -> None:
    lines = list(page([state(rank, moves=True, step=12 + rank) for rank in (0, 1)], {"node1": "down"}, "", asked=["a"]))
    assert lines[0] == "job node0:29500: 2 of 8 ranks on 1 host, 12 to 13 steps, 2 of them moving"
    assert lines[2].startswith("  ranks 2-7 not seen")
    assert lines[-1] == "node1 does not answer: down"
    with pytest.raises(LaunchError, match="no job runs on a, b"):
        list(page([], {}, "", asked=["a", "b"]))


def test_the_report_tells_of_jobs_that_run_and_of_those_that_stand_still() -> None:
    assert not [finding for finding in find([host("a")], None) if "stands still" in finding.what]
    moving = [host("a", ranks=[asdict(state(0, moves=True))])]
    assert not [finding for finding in find(moving, None) if "stands still" in finding.what]
    report = {"verdict": {"line": "CAN TRAIN"}, "hosts": moving, "live": None}
    assert "Running jobs\n  job node0:29500: 1 of 8 ranks on 1 host, 12 steps, 1 of them moving" in render(report, [])
    odd = [*(state(rank) for rank in range(7)), state(7, phase=Phase.SCRIPT, wait_s=None)]
    [found] = [finding for finding in find([host("a", ranks=list(map(asdict, odd)))], None) if "job" in finding.what]
    assert found.what.startswith("job node0:29500 stands still: rank 7 on node1 does not move")
    assert "--dump" in found.remedy
