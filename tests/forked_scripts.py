"""Scripts in processes of their own that need not import PyTorch: they are forked from one that has.

``python forked_scripts.py DESCRIPTOR MODULE ...`` imports the modules and forks a process for every script that it is sent.
A script ends as any program does, with its atexit handlers and exit code; only what is decided while the modules are
imported was decided before.

``python forked_scripts.py --listen SOCKET`` is the *origin* of a run with several processes of tests: who forks scripts or
ranks (rank_process.py) for one of these is forked from it, so that all share what it has imported. It has imported nothing
until the first one asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener, Pipe
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_ORIGIN = "TESTS_FORK_FROM"  # the socket of the run's origin: in the environment of all its processes
# Of whatever computes. Asking for a GPU takes none, so that processes can be forked.
ALONE = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class Origin:
    """The process from which others are forked, for all that are started after it is made. Its socket is in ``folder``."""

    def __init__(self, folder: str) -> None:
        os.environ[_ORIGIN] = f"{folder}/origin"
        command = [sys.executable, __file__, "--listen", os.environ[_ORIGIN]]
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(command, env=_kept() | ALONE, **nothing)  # type: ignore[call-overload]

    def close(self) -> None:
        """End it, and all that were forked from it."""
        os.environ.pop(_ORIGIN, None)
        self._process.kill()
        self._process.wait()


class Forked:
    """A process that is another one's child."""

    def __init__(self, pid: int) -> None:
        self.pid, self._handle = pid, os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self) -> None:
        select.select([self._handle], [], [])
        os.close(self._handle)


def start_server(
    file: str, environment: Mapping[str, str], *arguments: str, shares: bool
) -> tuple[Connection, Forked | subprocess.Popen[bytes]]:
    """Run ``file`` with ``arguments`` behind the descriptor of a pipe. Returns its other end, and the process.

    ``shares``: it may be forked from the origin of the run, if there is one. Then its function ``main`` is called, and its
    module and all of ``arguments`` that are names of modules are imported before.
    """
    if shares and _ORIGIN in os.environ:
        deadline = time.monotonic() + 60
        while not os.path.exists(os.environ[_ORIGIN]) and time.monotonic() < deadline:
            time.sleep(0.01)
        control: Connection = Client(os.environ[_ORIGIN], "AF_UNIX")
        control.send((Path(file).stem, dict(environment), arguments))
        return control, Forked(control.recv())
    control, theirs = Pipe()
    command = [sys.executable, file, str(theirs.fileno()), *arguments]
    process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    return control, process


def _kept() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "ZERORUN_"))}


class ForkedScripts:
    """The process that forks. ``modules`` are imported in it, by their names. ``shares``: see ``start_server``."""

    def __init__(self, *modules: str, shares: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zerorun-scripts-")
        self._control, self._process = start_server(__file__, _kept() | ALONE, *modules, shares=shares)
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
            prepare(*order)
            keep_imported()
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


def keep_imported() -> None:
    """What is there goes with its process: nobody looks through it for garbage, nor takes torch's operators apart."""
    gc.freeze()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def end_with_parent() -> None:
    """SIGKILL to this process when the one that started it has ended."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def listen(socket: str) -> tuple[Any, Connection, Sequence[str]]:
    """Fork a process for everyone who asks. Returns in each: the module whose ``main`` is to be called, and with what."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    with Listener(socket, "AF_UNIX") as listener:
        while True:
            control = listener.accept()
            name, environment, arguments = control.recv()
            module = importlib.import_module(name)
            module.prepare(*arguments)
            gc.collect()
            keep_imported()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            pid = os.fork()
            if not pid:
                break
            control.send(pid)
            control.close()
    end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    return module, control, arguments


def prepare(*modules: str) -> None:
    """Import what processes share.

    Some import accelerate. Where that finds no DeepSpeed, no process that is forked from here could begin the DeepSpeed
    mode: such a module is left to who needs it.
    """
    left = () if importlib.util.find_spec("deepspeed") else ("accelerate", "peft", "transformers")
    for module in modules:
        if module.split(".")[0] not in left:
            importlib.import_module(module)


def main(control: Connection, *modules: str) -> None:
    """Serve; and in each forked process, be the script."""
    exec(compile(serve(control), "script", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    end_with_parent()
    if sys.argv[1] == "--listen":
        program, pipe, given = listen(sys.argv[2])
    else:
        program, pipe, given = sys.modules["__main__"], Connection(int(sys.argv[1])), sys.argv[2:]
        prepare(*given)
    program.main(pipe, *given)
