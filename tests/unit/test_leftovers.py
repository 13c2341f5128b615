"""A run of pytest ends its processes, on SIGTERM too, and tells which test has left something behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from covering import by_day
from harness import patience
from process_of_tests import IMPORT_NOTHING

TESTS = Path(__file__).parents[1]
CASES = {
    "nothing": ("pass", ""),
    "a file": ("os.close(tempfile.mkstemp(suffix='.mine')[0])", ".mine, of test_it.py::test_it"),
    "shared memory": ("open('/dev/shm/left-' + os.environ['MARK'], 'w').close()", "/dev/shm/left-"),
    "what another run takes away": (
        "path = '/dev/shm/left-' + os.environ['MARK']; open(path, 'w').close(); env = {'PATH': os.environ['PATH']}; "
        "subprocess.Popen(['sh', '-c', 'sleep 2; rm ' + path], env=env, start_new_session=True)",
        "",
    ),
    "a folder in which another run has a file open": (
        "path = '/dev/shm/left-' + os.environ['MARK']; os.mkdir(path); env = {'PATH': os.environ['PATH']}; "
        "file = os.open(path + '/pid', os.O_CREAT | os.O_WRONLY); "
        "process = subprocess.Popen(['sleep', '600'], env=env, pass_fds=[file], start_new_session=True); "
        "os.write(file, str(process.pid).encode())",
        "",
    ),
    "a process": ("subprocess.Popen(['sleep', '600'], start_new_session=True)", "(sleep 600), of test_it.py::test_it"),
}
CODE = """
import os, subprocess, tempfile, time
from pathlib import Path
import pytest

@pytest.fixture
def torn_down():
    yield
    Path("torn-down").touch()

def test_it(torn_down):
    {what}
"""


def start(folder: Path, what: str, *options: str) -> subprocess.Popen[str]:
    (folder / "test_it.py").write_text(CODE.format(what=what))
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    path = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")])
    env |= {"MARK": folder.name, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", IMPORT_NOTHING: "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist.plugin", "-p", "no:cacheprovider", *options]
    command.append(f"--basetemp={folder / 'basetemp'}")
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.each_value
@pytest.mark.parametrize("workers", ("0", "2"))
@pytest.mark.parametrize("what", by_day(CASES, "nothing", "a process", "shared memory", "what another run takes away"))
def test_what_is_left_fails_the_run(what: str, workers: str, tmp_path: Path) -> None:
    code, said = CASES[what]
    process = start(tmp_path, code, "-n", workers)
    out, _ = process.communicate(timeout=60 * patience())
    left = Path(f"/dev/shm/left-{tmp_path.name}")
    if left.is_dir():
        os.kill(int((left / "pid").read_text()), signal.SIGKILL)
        shutil.rmtree(left)
    left.unlink(missing_ok=True)
    assert process.returncode == (1 if said else 0), out
    assert ("LEFT OVER" in out) == bool(said), out
    assert said in out


@pytest.mark.parametrize("workers", by_day(("0", "2"), "2"))
def test_sigterm_ends_a_run(workers: str, tmp_path: Path) -> None:
    what = "Path('begun').write_text(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)"
    process = start(tmp_path, what, "-n", workers)
    begun, deadline = tmp_path / "begun", time.monotonic() + 60 * patience()
    while not (begun.exists() and begun.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(begun.read_text())
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60 * patience())
    assert process.returncode == 2, out
    assert "KeyboardInterrupt" in out
    assert workers == "2" or (tmp_path / "torn-down").exists()
    deadline = time.monotonic() + 10 * patience()  # a process that is killed ends when it comes to a core
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(child), "its child lives on"


def lives(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    return False
