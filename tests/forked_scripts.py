"""Scripts in processes of their own that need not import PyTorch: they are forked from one that has.

``python forked_scripts.py DESCRIPTOR MODULE ...`` imports the modules and forks a process for every script that it is sent.
A script ends as any program does, with its atexit handlers and exit code; only what is decided while the modules are
imported was decided before.
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
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class ForkedScripts:
    """The process that forks. ``modules`` are imported in it, by their names."""

    def __init__(self, *modules: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zerorun-scripts-")
        self._control, theirs = Pipe()
        command = [sys.executable, __file__, str(theirs.fileno()), *modules]
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "ZERORUN_"))}
        environment = {**kept, **one_thread}
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._started = 0

    def start(self, text: str, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> RunningScript:
        """Begin to run ``text`` in ``environment``, with ``arguments``, and with the umask of this process."""
        self._started += 1
        umask = os.umask(0o077)
        os.umask(umask)
        folder = Path(self._folder.name) / str(self._started)
        folder.mkdir()
        self._control.send((text, dict(environment), list(arguments), umask, str(folder)))
        return RunningScript(self, self._control.recv(), folder)

    def load(self, *modules: str) -> None:
        """Import further modules, unless it has them, for the scripts that begin from now on."""
        self._control.send(list(modules))

    def wait(self, pid: int, timeout_s: float | None) -> int | None:
        """The exit code of a script. One that has not ended in time is killed; None."""
        self._control.send(pid)
        late = not self._control.poll(timeout_s)
        if late:
            os.kill(pid, signal.SIGKILL)
        code: int = self._control.recv()
        return None if late else code

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
        self._ended = False

    def end(self) -> None:
        """SIGKILL, unless it has ended and ``finish`` has told of it."""
        if not self._ended:
            os.kill(self._pid, signal.SIGKILL)
            self.finish()

    def finish(self, timeout_s: float | None = None) -> tuple[int, str, str]:
        """(exit code, what it wrote to stdout, and to stderr), once it has ended. Kills it, and raises, if it is late."""
        code, self._ended = self._scripts.wait(self._pid, timeout_s), True
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        if code is None:
            raise TimeoutError(f"a script has not ended within {timeout_s} s. It wrote:\n{out[-2000:]}\n{err[-4000:]}")
        return code, out, err


def serve(control: Connection) -> str:
    """Fork scripts, and tell how they ended, until the pipe is closed. Returns in each forked process: the script."""
    gc.freeze()
    while True:
        try:
            order = control.recv()
        except EOFError:
            os._exit(0)
        if isinstance(order, list):
            for name in order:
                importlib.import_module(name)
            gc.freeze()
            continue
        if isinstance(order, int):
            control.send(os.waitstatus_to_exitcode(os.waitpid(order, 0)[1]))
            continue
        pid = os.fork()
        if not pid:
            control.close()
            return begin(*order)
        control.send(pid)


def begin(text: str, environment: dict[str, str], arguments: list[str], umask: int, folder: str) -> str:
    """Let the forked process be that of a script, which is returned."""
    end_with_parent()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["script", *arguments]
    tempfile.tempdir = None  # asked for already, in another environment
    return text


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
    exec(compile(serve(Connection(int(sys.argv[1]))), "script", "exec"), {"__name__": "__main__"})
