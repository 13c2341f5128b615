"""Shared by all tests: the import path, how they are spread over processes, and how a run ends."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

pytest_plugins = ["leftovers"]
# Threads that wait sleep: the default is to spin, which costs a busy machine most of its time. Before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Hundreds of processes import zerorun: it is compiled once, whatever the shell says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Whoever is woken waits until a core is free. By default it interrupts whoever runs: if that is a thread of gloo's, which
# holds the lock of a connection, another one spins until it goes on. That took a fifth of a run on two cores.
with contextlib.suppress(AttributeError, OSError):  # where there is no such thing, or it is not allowed
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
_MOST_PROCESSES = 8


def _do_not_time_examples() -> None:
    """Hypothesis fails a test whose inputs took long to make. How long they take, a busy machine decides."""
    with contextlib.suppress(ImportError):
        from hypothesis import HealthCheck, settings

        settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("untimed")


# -- signals -----------------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """SIGTERM ends a run as Ctrl-C does: everything is torn down.

    A run in the background may have been told to ignore signals (``nohup``, ``&``), which its processes would inherit.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _do_not_time_examples()


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    """A test that leaves a handler of its own behind would decide how the run ends."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before, "the test has left a signal handler behind"


def _settings_of_torch() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "anomaly detection": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    """What a test leaves switched on for the process, it leaves to whatever test comes next there."""
    before = _settings_of_torch()
    yield
    after = _settings_of_torch()
    assert not before or after == before, "the test has left other settings of torch behind"


# -- what runs ---------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with ranks come last: their files are the shortest, so that all processes have something to do to the end."""
    from covering import mark_nightly

    mark_nightly(items)
    items.sort(key=lambda item: item.nodeid.startswith("tests/ranks/"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Tests are imported without collecting garbage, which takes a fifth less time.

    What has been imported stays: looking through all of it took each collection of garbage a fifth of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000)  # a twentieth less time
        gc.enable()


# -- processes ---------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True, optionalhook=True)  # the suite runs without xdist, too
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite, or a folder, goes to three processes or more; tests that are named run in this one.

    They wait for ranks of theirs as long as they compute, so that two would leave a fifth of two cores idle.
    """
    if any(Path(argument.split("::")[0]).is_file() for argument in config.args):
        return 0
    return max(3, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Processes of tests are forked, too: each would import PyTorch, and what else they have in common, by itself."""
    import forked_scripts

    for spec in specs:
        spec.python = shlex.join([sys.executable, str(Path(forked_scripts.__file__).with_name("process_of_tests.py"))])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file stays in one process, with what its tests share; so do all that use the cluster of hosts."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            if file.startswith("tests/gpu/"):  # processes of their own, and nothing that tests share
                return nodeid
            return "tests/cluster" if file.startswith("tests/cluster/") else file

    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    """Child processes must find the packages that setup.py maps to ``zerorun.ops`` and ``zerorun.launcher``."""
    command = [sys.executable, "-c", "import zerorun.ops, zerorun.launcher"]
    found = subprocess.run(command, cwd="/", capture_output=True, text=True)
    if found.returncode:
        pytest.exit(f"zerorun.ops cannot be imported in a child process; run pip install -e .\n{found.stderr}", 3)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """References sum in the same order, whatever the machine has and OMP_NUM_THREADS says, which is that of the ranks.

    Two threads wait for each other in a loop: where ranks compute beside them, a step of a small model took seconds.
    """
    torch = sys.modules.get("torch")  # imported by every module that computes, when it is collected
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _workers() -> Iterator[None]:
    yield
    harness = sys.modules.get("harness")
    if harness is not None:
        harness.close_pool()


# -- the end -----------------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line says what was not tried, and what it needs."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        told = "; ".join(f"{count} tests: {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"Not tried here: {told}")
