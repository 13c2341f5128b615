"""Jobs on the test bed: a launcher on the first host, scripts without torch, and what must be left of them: nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from harness import patience
from testbed import Cluster, Host, wait_for

# ``meet`` returns when all ranks are there: the folder is on all hosts.
PRELUDE = """\
import ctypes, os, signal, socket, subprocess, sys, time
rank, world, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
here = os.path.dirname(os.path.abspath(__file__))
def meet(name="here"):
    open(f"{here}/{name}.{attempt}.{rank}", "w").close()
    while not all(os.path.exists(f"{here}/{name}.{attempt}.{other}") for other in range(world)):
        time.sleep(0.01)
"""


class Job:
    """``script`` started by a launcher on host 0 on ``hosts`` hosts with ``slots`` workers each."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        script: str,
        *options: str,
        hosts: int,
        slots: int = 1,
        args: Sequence[str] = (),
        environment: Sequence[str] = (),
        **popen: object,
    ) -> None:
        self.cluster, self.folder, self.hosts = cluster, folder, hosts
        (folder / "train.py").write_text(PRELUDE + textwrap.dedent(script))
        (folder / "hostfile").write_text("".join(f"node{index} slots={slots}\n" for index in range(hosts)))
        launcher = [sys.executable, "-m", "zerorun.launcher.cli", "--hostfile", "hostfile", *options, "train.py", *args]
        command = cluster[0].command(["env", *environment, *launcher], folder)
        pipe = subprocess.PIPE
        streams: dict[str, object] = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, **popen}
        self.process: subprocess.Popen[str] = subprocess.Popen(command, text=True, **streams)  # type: ignore[call-overload]

    def wait_until_all_run(self) -> None:
        """All ranks have called ``meet``."""
        wait_for(lambda: len(list(self.folder.glob("here.0.*"))) == self.hosts, 20, "all ranks run")

    @property
    def launcher(self) -> int:
        """The launcher's process, which nsenter has started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def signal(self, number: int) -> None:
        os.kill(self.launcher, number)

    def finish(self, seconds: float) -> tuple[int, str, str]:
        """(exit status, stdout, stderr), within ``seconds`` of an idle machine."""
        try:
            out, err = self.process.communicate(timeout=seconds * patience())
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(self.launcher, signal.SIGABRT)
            self.process.kill()
            raise
        return self.process.returncode, out, err


def pythons(host: Host) -> list[str]:
    """Command lines of the Python processes that are alive on ``host``."""
    space = os.readlink(f"/proc/{host.pid}/ns/pid")
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "ns/pid") == space:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if "python" in command and state not in "ZX":
                    found.append(command)
    return found


def assert_nothing_left(cluster: Cluster, seconds: float, *, hosts: Sequence[int] | None = None) -> None:
    """No Python process is alive on the hosts, after at most ``seconds``."""
    watched = [cluster[index] for index in (range(len(cluster.hosts)) if hosts is None else hosts)]
    watched = [host for host in watched if host.is_up]
    deadline = time.monotonic() + seconds * patience()
    while left := {host.name: found for host in watched if (found := pythons(host))}:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)
