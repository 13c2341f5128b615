"""Workers in reserve: processes that have imported PyTorch and zerorun, and become a worker when they are told its command.

    python -u -m zerorun.launcher.warm SOCKET      started by the supervisor of a host; SOCKET: an open file, a Unix socket

To import takes longer than all else in a restart, and none of it depends on the rank. What does depend on the environment,
such as the number of threads, is there from the beginning; a worker with other such variables is started afresh.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from .job_plan import WorkerCommand

SAFE_PATH = {"PYTHONSAFEPATH": "1"}  # while it imports: nothing from the current folder
_MOST_FILES = 3
_IMPORTS = ("torch", "zerorun.engine.initialize")  # by this process alone: the launcher has no use for them
_OWN_FILES = (__file__, runpy.__file__, "<frozen runpy>")
# They say which rank the worker is, and matter only when it runs.
_OF_A_RANK = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "CROSS_RANK"}
    | {"CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"}
    | {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
)


class WarmWorker:
    """The supervisor's end of one. ``process`` and ``command``: those of the worker that it is to become."""

    def __init__(
        self, command: WorkerCommand, process: subprocess.Popen[bytes], line: socket.socket, given: Mapping[str, str]
    ) -> None:
        """``given``: its environment."""
        self.command, self.process, self._line, self._given = command, process, line, given

    def suits(self, command: WorkerCommand) -> bool:
        """True if it can become ``command``."""
        own = self.command
        same = own.argv == command.argv and own.cores == command.cores and own.local_rank == command.local_rank
        return same and _fixed(own.env) == _fixed(command.env) and self.process.poll() is None

    def become(self, command: WorkerCommand, environment: Mapping[str, str], files: Sequence[int], stdin: bool) -> None:
        """Let it run ``command``. ``files``: those of its board; ``stdin``: it inherits ours. Raises OSError."""
        gone = [name for name in self._given if name not in environment]
        order = {"argv": command.argv[2:], "env": dict(environment), "gone": gone, "stdin": stdin}
        text = json.dumps(order).encode()
        self._line.settimeout(5.0)
        socket.send_fds(self._line, [len(text).to_bytes(4, "little")], [*files, *([0] if stdin else [])])
        self._line.sendall(text)
        self._line.close()

    def end(self) -> None:
        """End it: it is not needed."""
        self._line.close()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _fixed(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _OF_A_RANK}


def command_of(command: WorkerCommand, line: int) -> tuple[str, ...]:
    """Return what starts a process that can become ``command``."""
    return (command.argv[0], "-u", "-m", "zerorun.launcher.warm", str(line))


# -- in the process ----------------------------------------------------------------------------------------------------


def main(line: socket.socket) -> None:
    """Import, wait for an order, and obey it. Without one there is nothing to do."""
    for module in _IMPORTS:
        with contextlib.suppress(ImportError):  # the script will say so, if it needs it
            import_module(module)
    head, files, _, _ = socket.recv_fds(line, 4, _MOST_FILES)
    if len(head) < 4:
        return
    with line.makefile("rb") as stream:
        order = json.loads(stream.read(int.from_bytes(head, "little")))
    line.close()
    _become(order, files)


def _become(order: dict[str, Any], files: list[int]) -> None:
    from zerorun.watch.board import VARIABLE

    if order["stdin"]:
        os.dup2(files[-1], 0)
        os.close(files.pop())
    for name in order["gone"]:
        os.environ.pop(name, None)
    os.environ.update(order["env"])  # what imports have set stays, as when they come later
    if files:
        os.environ[VARIABLE] = ",".join(map(str, files))
    argv = order["argv"]
    try:
        if argv[0] == "-m":
            sys.argv, sys.path[0:0] = argv[1:], [os.getcwd()]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            _run_script(argv)
    except Exception as error:  # as Python shows it, without the lines above
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
            trace = trace.tb_next
        sys.last_value = error.with_traceback(trace)
        sys.excepthook(type(error), error, trace)
        sys.exit(1)


def _run_script(argv: Sequence[str]) -> None:
    """Run the script as ``python`` does: its module is the main one, also for those who look at it later."""
    path = os.path.abspath(argv[0])
    sys.argv, sys.path[0:0] = list(argv), [os.path.dirname(path)]
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
