"""The plan of a job: which worker runs which command with which environment.

Pure data and pure functions: nothing here looks at the machine, opens a socket or starts a process. The command
line turns what the user typed and what the machine has into a :class:`LaunchRequest`; :func:`build_plan` turns that
into a :class:`Plan`; ``--dry-run`` prints the plan and the supervisor runs it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum

DROPPED_PREFIX = "TORCHELASTIC_"  # left by a torchrun around us, these make torch look for an agent that is not there


class Target(Enum):
    """What the first positional argument names."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


@dataclass(frozen=True)
class LaunchRequest:
    """One job on this machine, with every default already decided."""

    target: str
    target_args: tuple[str, ...]
    kind: Target
    nproc: int
    master_addr: str
    master_port: int
    python: str
    omp_threads: int
    pass_local_rank: bool = False
    terminal_columns: int | None = None  # None: the launcher's stderr is not a terminal


@dataclass(frozen=True)
class WorkerCommand:
    """One worker process: ``argv`` goes to exec unchanged, ``env`` is laid over the launcher's own environment."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Plan:
    """All workers of the job, in rank order."""

    master_addr: str
    master_port: int
    workers: tuple[WorkerCommand, ...]


def build_plan(request: LaunchRequest) -> Plan:
    """The plan for ``request``; the same request always gives the same plan."""
    workers = tuple(
        WorkerCommand(rank, rank, _worker_argv(request, rank), _worker_variables(request, rank))
        for rank in range(request.nproc)
    )
    return Plan(request.master_addr, request.master_port, workers)


def _worker_argv(request: LaunchRequest, local_rank: int) -> tuple[str, ...]:
    head = {
        Target.SCRIPT: (request.python, "-u", request.target),
        Target.MODULE: (request.python, "-u", "-m", request.target),
        Target.PROGRAM: (request.target,),
    }[request.kind]
    # In front of the script's own arguments, where the deepspeed launcher puts it: sub-commands keep working.
    extra = (f"--local_rank={local_rank}",) if request.pass_local_rank else ()
    return (*head, *extra, *request.target_args)


def _worker_variables(request: LaunchRequest, rank: int) -> dict[str, str]:
    size = str(request.nproc)
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": request.master_addr,
        "MASTER_PORT": str(request.master_port),
        "OMP_NUM_THREADS": str(request.omp_threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code still names the Python line
        # Read by scripts written for the deepspeed launcher.
        "LOCAL_SIZE": size,
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
    }
    if request.terminal_columns is not None:
        variables["ZERORUN_TTY"] = "1"
        variables["COLUMNS"] = str(request.terminal_columns)  # tqdm cannot ask a pipe for its width
    return variables


def full_environment(worker: WorkerCommand, base: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of ``worker`` when the launcher's own environment is ``base``."""
    kept = {name: value for name, value in base.items() if not name.startswith(DROPPED_PREFIX)}
    return {**kept, **worker.env}


def render_text(plan: Plan) -> str:
    """The plan for reading: what is set for each worker, then a command that a shell would accept."""
    noun = "worker" if len(plan.workers) == 1 else "workers"
    lines = [f"{len(plan.workers)} {noun} on this machine, rendezvous at {plan.master_addr}:{plan.master_port}"]
    for worker in plan.workers:
        lines.append(f"rank {worker.rank}:")
        lines += [f"  {name}={shlex.quote(value)}" for name, value in worker.env.items()]
        lines.append(f"  {shlex.join(worker.argv)}")
    return "\n".join(lines)


def render_json(plan: Plan) -> str:
    """The plan for programs."""
    import json  # here, so that --help does not pay for it

    return json.dumps(asdict(plan), indent=2)
