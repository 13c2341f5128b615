"""A plugin of pytest for DeepSpeed's own tests: starts their ranks on the CPU, and says for each file what came of it.

Their tests derive from a class that starts ranks from a pool, and waits for all of them for ten minutes. Here each rank is
a process; when one fails, the others are ended. ``ZERORUN_THEIR_RESULTS`` names a file that gets a line per test.
``ZERORUN_THEIR_DTYPE=fp32``: tests that prefer a dtype for training get fp32 instead of bf16.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import time
import traceback
from collections import Counter, defaultdict
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import their_internals
import torch

from zerorun.deepspeed.accelerator import Accelerator
from zerorun.errors import ZerorunError

their_internals.install()

LIMIT_S = float(os.environ.get("ZERORUN_THEIR_SECONDS", "120"))
_GRACE_S = 5.0  # after the first failure of a rank: what the others still say is not waited for any longer
_processes = get_context("forkserver")
_outcomes: list[dict[str, str]] = []


class RankFailedError(Exception):
    """A rank of a test has raised; the message is its traceback."""


# -- their environment -------------------------------------------------------------------------------------------


def _prepare() -> None:
    """Put the stand-ins into their helpers, before a module of tests imports them."""
    from unit import util

    util.bf16_required_version_check = lambda accelerator_check=True: True
    util.no_child_process_in_deepspeed_io = contextlib.nullcontext
    from unit import common

    common.DistributedExec._launch_procs = _launch
    if os.environ.get("ZERORUN_THEIR_DTYPE") == "fp32":
        Accelerator.is_bf16_supported = Accelerator.is_fp16_supported = lambda self: False  # type: ignore[method-assign]
    common.reduce_boolean_flags = lambda flag, op=all: op(_told_by_all(flag))
    pytest.raises = _raises  # type: ignore[assignment]
    torch.nn.parallel.DistributedDataParallel.__init__ = _without_device_ids  # type: ignore[method-assign]
    torch.cpu.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)


_pytest_raises, _init_ddp = pytest.raises, torch.nn.parallel.DistributedDataParallel.__init__


def _without_device_ids(self: Any, module: Any, *_: Any, **kwargs: Any) -> None:
    """On CPUs DistributedDataParallel is told no devices."""
    _init_ddp(self, module, **{key: value for key, value in kwargs.items() if key not in ("device_ids", "output_device")})


def _told_by_all(flag: bool) -> list[bool]:
    """The flags of all ranks. Theirs gathers tensors without dimensions, which gloo refuses."""
    told: list[Any] = [flag] * torch.distributed.get_world_size() if torch.distributed.is_initialized() else [flag]
    if len(told) > 1:
        torch.distributed.all_gather_object(told, flag)
    return told


def _raises(expected: Any = None, *args: Any, **kwargs: Any) -> Any:
    """pytest.raises, for which a named error of zerorun is as good as another, unless the test asks for words of theirs."""
    if expected in (AssertionError, ValueError, RuntimeError, NotImplementedError):
        expected = (expected, ZerorunError)
    return _pytest_raises(expected, *args, **kwargs)


def pytest_configure(config: pytest.Config) -> None:
    _processes.set_forkserver_preload(["torch", "torch._dynamo", "their_ranks", "zerorun.engine.initialize"])


def pytest_collection(session: pytest.Session) -> None:
    _prepare()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> Any:
    """Register what their fixtures with ranks are: pytest does not know them by their attributes any longer."""
    if isinstance(obj, their_internals.Unbuilt):
        return []
    if isinstance(obj, type) and getattr(obj, "is_dist_fixture", False) and name != "DistributedFixture":
        manager = collector.session._fixturemanager
        manager._register_fixture(name=name, func=obj, nodeid=collector.nodeid, scope="function")
        return []
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep some rows of each parametrized test, evenly spread, if ``ZERORUN_THEIR_ROWS`` says how many."""
    rows = int(os.environ.get("ZERORUN_THEIR_ROWS", "0"))
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    if rows:
        kept = {id(same[n * (len(same) - 1) // max(1, rows - 1)]) for same in tests.values() for n in range(rows)}
        items[:] = [item for item in items if id(item) in kept]


# -- ranks -------------------------------------------------------------------------------------------------------


def _launch(test: Any, size: int, init_method: str) -> None:
    """Run the test on ``size`` ranks. Raises RankFailedError for the first rank that fails, or if it lasts too long."""
    port = __import__("unit.common", fromlist=["common"]).get_master_port()
    job = pickle.dumps(test)
    ranks, pipes = [], {}
    for rank in range(size):
        mine, theirs = _processes.Pipe()
        process = _processes.Process(target=_rank, args=(job, rank, size, port, init_method, theirs))
        process.start()
        theirs.close()
        ranks.append(process)
        pipes[mine] = rank
    try:
        messages = _listen(dict(pipes))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in ranks:
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
    failed = next((text for kind, text in messages if kind == "failed"), None)
    if failed is not None:
        raise RankFailedError(failed)
    skipped = next((text for kind, text in messages if kind == "skipped"), None)
    if skipped is not None:
        pytest.skip(skipped)


def _listen(pipes: dict[Connection, int]) -> list[tuple[str, str]]:
    """Return what ranks say, in the order in which they say it."""
    end, heard = time.monotonic() + LIMIT_S, []
    while pipes:
        ready = connection.wait(list(pipes), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            heard.append(("failed", f"no end within {LIMIT_S:.0f} s on ranks {sorted(pipes.values())}"))
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                heard.append(pipe.recv())
            except EOFError:
                heard.append(("failed", f"rank {rank} has died"))
            if heard[-1][0] == "failed":
                end = min(end, time.monotonic() + _GRACE_S)
    return heard


def _rank(job: bytes, rank: int, size: int, port: str, init_method: str, say: Connection) -> None:
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    try:
        _prepare()
        test = pickle.loads(job)
        test.non_daemonic_procs = False  # else it tells a queue that it skips
        skipped = test._dist_run(rank, size, port, init_method)
        say.send(("skipped", skipped) if skipped else ("passed", ""))
    except BaseException:
        say.send(("failed", traceback.format_exc()))
    finally:
        with contextlib.suppress(EOFError):
            say.recv()  # until all have ended: a rank that is gone is an error for those that still need it
        os._exit(0)


# -- what came of it ---------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"no end within {2 * LIMIT_S:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(int(2 * LIMIT_S))
    try:
        return (yield)
    finally:
        signal.alarm(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    if report.when == "call" or not report.passed:
        reason = text = ""
        if report.skipped:
            reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(getattr(report, "wasxfail", ""))
        elif report.failed:
            error = call.excinfo.value
            text = str(error) if isinstance(error, RankFailedError) else "".join(traceback.format_exception(error))
            reason = _reason(text)
        _note(item.nodeid, report.outcome, reason, text)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
        _note(report.nodeid, "failed", lines[-1][1:].strip() if lines else "", str(report.longrepr))
    elif report.skipped:
        _note(report.nodeid, "skipped", str(report.longrepr), "")


def _reason(text: str) -> str:
    """The error of a traceback, in one line."""
    lines = text.rstrip().splitlines()
    start = max((n for n, line in enumerate(lines) if line.startswith("Traceback")), default=-1)
    ends = [n for n, line in enumerate(lines) if n > start and line and not line[0].isspace()]
    if not ends:
        return (lines or [""])[0]
    error = " ".join(line.strip() for line in lines[ends[0] :])
    if error.startswith("AssertionError"):  # which may say nothing: what was asserted does
        error += " <- " + next((line.strip() for line in lines[ends[0] - 1 : start : -1] if "^^" not in line), "")
    return error.removeprefix("their_internals.")[:400]


def _note(test: str, outcome: str, reason: str, text: str) -> None:
    line = {"test": test, "outcome": outcome, "reason": reason, "text": text[-6000:]}
    _outcomes.append(line)
    path = os.environ.get("ZERORUN_THEIR_RESULTS")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a line for each file, and below it each reason of a failure with its number of tests."""
    files: dict[str, list[dict[str, str]]] = defaultdict(list)
    for line in _outcomes:
        files[line["test"].partition("::")[0]].append(line)
    terminalreporter.section("by file: passed, failed, skipped")
    for name, lines in sorted(files.items()):
        count = Counter(line["outcome"] for line in lines)
        terminalreporter.write_line(f"{count['passed']:5}{count['failed']:5}{count['skipped']:5}  {name}")
        for reason, times in Counter(line["reason"] for line in lines if line["outcome"] == "failed").most_common():
            terminalreporter.write_line(f"{'':17}{times} x {reason}")
