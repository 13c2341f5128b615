"""Scripts in processes of their own that need not import PyTorch: they are forked from one that has.

``python forked_scripts.py DESCRIPTOR MODULE ...`` imports the modules and forks a process for every script that it is sent.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


class ForkedScripts:
    """The process that forks. ``modules`` are imported in it, by their names."""

    def __init__(self, *modules: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zerorun-scripts-")
        self._control, theirs = Pipe()
        command = [sys.executable, __file__, str(theirs.fileno()), *modules]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._started = 0

    def start(self, text: str, environment: dict[str, str]) -> RunningScript:
        """Begin to run ``text`` in ``environment``, and with the umask of this process."""
        self._started += 1
        umask = os.umask(0o077)
        os.umask(umask)
        folder = Path(self._folder.name) / str(self._started)
        folder.mkdir()
        self._control.send((text, environment, umask, str(folder)))
        return RunningScript(self, self._control.recv(), folder)

    def wait(self, pid: int) -> int:
        """The exit code of a script."""
        self._control.send(pid)
        code: int = self._control.recv()
        return code

    def close(self) -> None:
        """End it, and all scripts that still run."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


class RunningScript:
    """A script, from ``ForkedScripts.start``."""

    def __init__(self, scripts: ForkedScripts, pid: int, folder: Path) -> None:
        self._scripts, self._pid, self._folder = scripts, pid, folder

    def finish(self) -> tuple[int, str, str]:
        """(exit code, what it wrote to stdout, and to stderr), once it has ended."""
        code = self._scripts.wait(self._pid)
        return code, (self._folder / "out").read_text(), (self._folder / "err").read_text()


def serve(control: Connection) -> None:
    """Fork scripts, and tell how they ended, until the pipe is closed."""
    gc.freeze()
    while True:
        try:
            order = control.recv()
        except EOFError:
            os._exit(0)
        if isinstance(order, int):
            control.send(os.waitstatus_to_exitcode(os.waitpid(order, 0)[1]))
            continue
        pid = os.fork()
        if not pid:
            control.close()
            run(*order)
        control.send(pid)


def run(text: str, environment: dict[str, str], umask: int, folder: str) -> NoReturn:
    """What a forked process does."""
    end_with_parent()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # asked for already, in another environment
    code = 1
    try:
        exec(compile(text, "script", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_with_parent() -> None:
    """SIGKILL to this process when the one that started it has ended."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    end_with_parent()
    for module in sys.argv[2:]:
        importlib.import_module(module)
    serve(Connection(int(sys.argv[1])))
