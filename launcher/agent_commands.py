"""Carriers: the commands that start an agent on another host and carry its line. There is one process for each host.

A carrier is any program that runs a command on one host, with stdin and stdout connected. Everything that a job needs goes
over that line, so that no argument, path or variable of the user appears on a command line or in a remote shell. The only
exceptions are the path of the Python program and PYTHONPATH, which are quoted for ssh.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .agent import PING_SECONDS, SILENT_SECONDS
from .hosts import Host

CONNECT_SECONDS = 10
# By these of a batch job, srun would give the agent the part of one of the job's tasks: one GPU, a few cores. SLURM_GPUS is
# the number for all nodes.
_OF_TASKS = frozenset(
    {"SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_NODE"}
    | {"SLURM_NTASKS_PER_TRES", "SLURM_TRES_BIND", "SLURM_TRES_PER_TASK", "SRUN_CPUS_PER_TASK"}
)


@dataclass(frozen=True)
class CarrierOptions:
    """``python``: the interpreter on the other hosts. ``module``: what it runs, with ``arguments``, of no use to anybody
    who sees them. ``extra``: options of the carrier.
    """

    python: str
    module: str = "zerorun.launcher.agent"
    arguments: tuple[str, ...] = ()
    pythonpath: str | None = None
    extra: tuple[str, ...] = ()
    ssh_port: int | None = None


def agent_command(options: CarrierOptions) -> list[str]:
    """Return the command of the agent. PYTHONSAFEPATH, because it starts in the user's home, which may hold a select.py."""
    path = [] if options.pythonpath is None else [f"PYTHONPATH={options.pythonpath}"]
    return ["env", "PYTHONSAFEPATH=1", *path, options.python, "-m", options.module, *options.arguments]


def ssh(host: Host, options: CarrierOptions) -> list[str]:
    """OpenSSH. No shared connection (ControlMaster): there is one session for each host, and it lasts for the job."""
    alive = [f"ServerAliveInterval={PING_SECONDS:.0f}", f"ServerAliveCountMax={SILENT_SECONDS / PING_SECONDS:.0f}"]
    settings = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", *alive]
    fixed = ["-T", *(word for setting in settings for word in ("-o", setting))]
    port = host.port or options.ssh_port
    ports = [] if port is None else ["-p", str(port)]
    return ["ssh", *fixed, *ports, *options.extra, "--", host.address, "exec " + shlex.join(agent_command(options))]


def slurm(host: Host, options: CarrierOptions) -> list[str]:
    """A step of the SLURM allocation on one node, with all of the node's cores, memory and GPUs."""
    step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap", "--mem=0", "--cpu-bind=none"]
    return [*step, "--export=ALL", "--quiet", *options.extra, *agent_command(options)]


def openmpi(host: Host, options: CarrierOptions) -> list[str]:
    """mpirun with one process, for sites where other hosts are reached that way."""
    fixed = ["mpirun", "--host", host.name, "-np", "1", "--bind-to", "none", "--allow-run-as-root"]
    return [*fixed, *options.extra, *agent_command(options)]


CARRIERS: Mapping[str, Callable[[Host, CarrierOptions], Sequence[str]]] = {
    "ssh": ssh,
    "slurm": slurm,
    "pdsh": ssh,  # pdsh does not pass its stdin on to the hosts, so it cannot carry a line
    "openmpi": openmpi,
}


@contextlib.contextmanager
def carrier_environment(carrier: Sequence[str]) -> Iterator[dict[str, str] | None]:
    """Yield the environment in which to run ``carrier`` (None: ours), and delete what it leaves.

    An mpirun makes a folder below TMPDIR that is named after host and user. Where it is made by two at once, one of them
    ends with "File exists" (Open MPI 4.1: one of six starts on busy cores). So each has a TMPDIR of its own. It is not
    passed on to other hosts. srun takes variables of the job for options of the step.
    """
    if carrier[0] == "srun":
        yield {name: value for name, value in os.environ.items() if name not in _OF_TASKS}
    elif carrier[0] == "mpirun":
        with tempfile.TemporaryDirectory(prefix="zerorun-mpirun-", ignore_cleanup_errors=True) as folder:
            yield {**os.environ, "TMPDIR": folder}
    else:
        yield None
