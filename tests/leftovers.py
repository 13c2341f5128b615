"""Nothing of a test outlives the run: processes, temporary files and shared memory that are left over fail it, by name.

All temporary files that are not pytest's own go to a folder of the run, which is TMPDIR for all its processes. What is
left there when a process has torn everything down is told with the test after which it was first seen. Shared memory
belongs to all processes of the run, and to other programs: it is looked at when the last of ours has ended.
Processes are known by a variable of their environment, and by PYTEST_CURRENT_TEST, which pytest sets: they are ended.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from forked_scripts import Origin

_RUN = "TESTS_OF_RUN"  # the folder of the run: in the environment of all its processes
_SHARED_MEMORY = Path("/dev/shm")
# What PyTorch itself leaves; the last is of a DataLoader's worker that was told to end while it was reading ahead: it
# makes the folder when it hands over its first tensor, and it may do that after it has removed its folders.
_OF_LIBRARIES = ("torchelastic_", "torchinductor_", "pymp-")
_START_S = 1.0  # for processes that are starting
_GRACE_S = 5.0  # for processes that are ending


class Seen:
    """Which entries of a folder came with which test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._before = folder, entries(folder)
        self.came: dict[str, str] = {}

    def look(self, test: str) -> None:
        for name in entries(self.folder) - self._before - self.came.keys():
            self.came[name] = test


def left_of(folder: Path, came: Mapping[str, str]) -> list[str]:
    """What of ``came``, the tests by names of entries, is still there, and no process has open or stands in, nor inside."""
    there = sorted(entries(folder) & came.keys())
    used = {Path(path) for path in used_paths()} if there else set()
    used |= {parent for path in used for parent in path.parents}
    return [f"{folder / name}, of {came[name]}" for name in there if folder / name not in used]


def left_at_last(folder: Path, came: Mapping[str, str]) -> list[str]:
    """``left_of``, when what is ending has had time to: another run may be taking its own things away."""
    deadline = time.monotonic() + _GRACE_S
    while (left := left_of(folder, came)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def entries(folder: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return {name for name in os.listdir(folder) if not name.startswith(_OF_LIBRARIES)}
    return set()


def used_paths() -> set[str]:
    """Files that some process has mapped or open, and working directories, as far as this user may know."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            found |= {line.split(None, 5)[5] for line in lines if "/" in line}
            found |= {os.readlink(link) for link in ((process / "cwd"), *(process / "fd").iterdir())}
    return found


def processes_of(run: str) -> dict[int, str]:
    """Processes of this run beside pytest's own: the test that has started each, and its command."""
    found, marker = {}, f"{_RUN}={run}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            test = [each.partition(b"=")[2].decode() for each in variables if each.startswith(b"PYTEST_CURRENT_TEST=")]
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if marker in variables and test and state != "Z" and int(process.name) != os.getpid():
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found[int(process.name)] = f"process {process.name} ({command[:200]}), of {test[0]}"
    return found


def some_start() -> bool:
    """True if a process has a program, and no environment yet: its parent was told a moment before."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "exe") and not (process / "environ").read_bytes():
                return True
    return False


def end_processes(run: str) -> list[str]:
    """Wait for what is ending, and end the rest: what had to be ended."""
    now = time.monotonic()
    started, deadline = now + _START_S, now + _GRACE_S
    while ((left := processes_of(run)) and now < deadline) or (now < started and some_start()):
        time.sleep(0.1)
        now = time.monotonic()
    for number in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    return list(left.values())


# -- hooks -------------------------------------------------------------------------------------------------------


class Found:
    """What the processes that run tests have seen."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.shared: dict[str, str] = {}  # what came in shared memory, with the test that was the first to see it

    def add(self, left: Iterable[str], shared: Mapping[str, str]) -> None:
        self.told.extend(left)
        self.shared = {**shared, **self.shared}


class Watch:
    """The part of a process that runs tests: attributes what appears to tests."""

    def __init__(self, worker: str) -> None:
        folder = Path(os.environ[_RUN], worker)  # one for each process, so that a test answers for its own
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)  # some tests act as another user
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None  # to be found out again
        self.own, self.shared = Seen(folder), Seen(_SHARED_MEMORY)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        for folder in (self.own, self.shared):
            folder.look(item.nodeid)
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        result = yield
        left = left_of(self.own.folder, self.own.came)
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output |= {"left": left, "shared": self.shared.came}
        else:
            _found(session.config).add(left, self.shared.came)
        return result


class Run:
    """The part of the process that the user has started: makes the folder, and tells what is left."""

    def __init__(self, config: pytest.Config) -> None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own stay where they were
        kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kernels)  # where it is without us: compiling them takes long
        self.folder = tempfile.mkdtemp(prefix="zerorun-tests-")
        os.chmod(self.folder, 0o755)
        os.environ[_RUN] = self.folder
        self.found = _found(config)
        self._origin = Origin(self.folder) if config.getoption("numprocesses", None) else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """A process of pytest-xdist has ended."""
        output = getattr(node, "workeroutput", {})
        self.found.add(output.get("left", ()), output.get("shared", {}))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        result = yield
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        if self._origin is not None:
            self._origin.close()
        told = self.found.told
        told.extend(end_processes(self.folder))
        told.extend(left_at_last(_SHARED_MEMORY, self.found.shared))
        if told and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.found.told:
            terminalreporter.write_line(f"LEFT OVER {line}", red=True)

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


_KEY = pytest.StashKey[Found]()


def _found(config: pytest.Config) -> Found:
    return config.stash.setdefault(_KEY, Found())


def pytest_configure(config: pytest.Config) -> None:
    worker: str | None = getattr(config, "workerinput", {}).get("workerid")
    if worker is None:
        config.pluginmanager.register(Run(config))
    if worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Watch(worker or "alone"))
