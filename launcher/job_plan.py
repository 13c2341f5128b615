"""The plan of a job: which host runs which workers, with which commands and environment.

Pure data and pure functions: nothing here looks at the machine, opens a socket or starts a process. The command line
turns what the user typed and what the machine has into a :class:`LaunchRequest`; :func:`build_plan` turns that into a
:class:`JobPlan`; ``--dry-run`` prints the plan, and a job runs it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from zerorun.errors import LaunchError
from zerorun.watch.launch_environment import choose_interface

from .hosts import Host
from .this_host import LOOPBACK, LOOPBACK_INTERFACE, visible_gpus

DROPPED_PREFIX = "TORCHELASTIC_"  # left by a torchrun around us, these make torch look for an agent that is not there
JOB_SECRET = "ZERORUN_JOB_SECRET"  # lets hosts join a job; workers have no use for it
COPIES_FOLDER = "ZERORUN_KEEPER"  # the folder of a job's copies in memory (copy_keeper.py), for its own workers alone
# Variables that go to other hosts because they configure the libraries that a worker uses. --export adds more.
EXPORTED_PREFIXES = (
    "CUBLAS_", "CUDA_", "GLOO_", "HF_", "HUGGINGFACE_", "KMP_", "MKL_", "MLFLOW_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_",
    "TORCH", "TOKENIZERS_", "TRANSFORMERS_", "TRITON_", "UCX_", "WANDB_", "XDG_CACHE_HOME", "ZERORUN_",
)  # fmt: skip
EXPORTED_NAMES = ("LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")
THREADS_NAME = "OMP_NUM_THREADS"
DEVICES_NAME = "CUDA_VISIBLE_DEVICES"
# Not exported in spite of their prefix; CUDA_VISIBLE_DEVICES because other hosts may have other devices.
NOT_EXPORTED = (
    DEVICES_NAME,
    "PYTHONSTARTUP",
    "PYTHONHOME",
    "ZERORUN_TTY",
    JOB_SECRET,
    COPIES_FOLDER,
    DROPPED_PREFIX,
)
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|SIGNATURE|_PWD|(?:^|_)(?:DSN|SIG)$", re.IGNORECASE)
_USER_INFORMATION = re.compile(r"(?<=://)[^\s/?#@]*(?:@[^\s/?#@]*)*(?=@)")  # name:password of a URL; either may hold an @
_URL_FIELD = re.compile(r"(?<=[?&;])([\w.-]+)=[^&;#\s]+")
HIDDEN = "(hidden)"


class ProgramKind(Enum):
    """What the first positional argument names."""

    SCRIPT = "script"
    MODULE = "module"
    PROGRAM = "program"


@dataclass(frozen=True)
class Rendezvous:
    """Where the workers meet: an address and port of the first host, and host name -> network interface."""

    address: str
    port: int | str
    interfaces: Mapping[str, str] = field(default_factory=dict)


def on_one_host(host: str, address: str | None, port: int | str) -> Rendezvous:
    """Return the rendezvous of a job on one host, which no other host needs to reach."""
    interfaces = {host: LOOPBACK_INTERFACE} if LOOPBACK_INTERFACE else {}
    return Rendezvous(address or LOOPBACK, port, interfaces)


@dataclass(frozen=True)
class JobOptions:
    """How a job is run. ``carrier`` returns the command that reaches a host; None for the launcher's own host."""

    carrier: Callable[[Host], Sequence[str] | None] = lambda host: None
    master_addr: str | None = None
    master_port: int | None = None
    grace: float = 5.0
    log_dir: Path | None = None
    max_restarts: int = 0
    min_nodes: int | None = None  # None: all
    keep_warm: bool = False  # processes in reserve that have imported
    has_queue: bool = False  # the job goes back there if its workers ask to be started again
    shown: Mapping[str, bool] = field(default_factory=dict)  # by stream; a stream that is missing here is shown
    shown_local_ranks: frozenset[int] | None = None  # None: all


@dataclass(frozen=True)
class LaunchRequest:
    """One job, with every default already decided. ``hosts`` have slots; their order is that of the ranks."""

    target: str
    target_args: tuple[str, ...]
    kind: ProgramKind
    hosts: tuple[Host, ...]
    python: str
    omp_threads: str | None = None  # OMP_NUM_THREADS, as the user has it; None: from the cores of each host
    pass_local_rank: bool = False
    terminal_columns: int | None = None  # None: the launcher's stderr is not a terminal
    bind_cores: bool = False
    core_list: tuple[int, ...] | None = None  # of each host, to bind workers to; None: all usable ones
    exports: Mapping[str, str] = field(default_factory=dict)
    slots_are_devices: bool = True  # else they are cores, or whatever the hostfile counts
    visible_devices: str | None = None  # the launcher's CUDA_VISIBLE_DEVICES, for workers on its own host
    local_names: tuple[str, ...] = ()  # hosts that are the launcher's own
    restarts: int = 0  # how many are allowed
    spares: int = 0  # the last of the hosts, which are in reserve
    job_id: str = "none"
    role: str = "default"
    told_codes: tuple[int, ...] = ()  # see JobPlan


@dataclass(frozen=True)
class WorkerCommand:
    """One worker process: ``argv`` goes to exec unchanged, ``env`` overrides the environment of its host."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cores: tuple[int, ...] = ()  # to bind it to; empty: no binding


@dataclass(frozen=True)
class NodePlan:
    """The workers of one host, in rank order."""

    host: str
    node_rank: int
    workers: tuple[WorkerCommand, ...]


@dataclass(frozen=True)
class JobPlan:
    """All hosts of the job, in rank order. ``exports`` go to other hosts with the commands, never on a command line."""

    master_addr: str
    master_port: int | str
    nodes: tuple[NodePlan, ...]
    exports: Mapping[str, str] = field(default_factory=dict)
    told_codes: tuple[int, ...] = ()  # with which a worker ends that has told why: there is no failure to report

    @property
    def workers(self) -> tuple[WorkerCommand, ...]:
        return tuple(worker for node in self.nodes for worker in node.workers)


def build_plan(
    request: LaunchRequest,
    rendezvous: Rendezvous,
    *,
    cores: Mapping[str, Sequence[int]] | None = None,
    restart: int = 0,
    hosts: Sequence[Host] | None = None,
) -> JobPlan:
    """Return the plan for ``request``; the same arguments always give the same plan.

    ``cores``: host name -> its usable cores, where they are known, with those of one NUMA node next to each other.
    ``restart``: how often the job has been started before. ``hosts``: the hosts of the request that are left; None for all.
    """
    chosen = request.hosts[: len(request.hosts) - request.spares] if hosts is None else hosts
    counts = [len(host.slots or ()) for host in chosen]
    nodes, first = [], 0
    for node_rank, (host, count) in enumerate(zip(chosen, counts, strict=True)):
        usable = request.core_list or (cores or {}).get(host.name, ())
        shares, threads = split_cores(usable, count), str(max(1, len(usable) // count)) if usable else None
        workers = []
        for local_rank in range(count):
            place = _WorkerPlace(host, node_rank, first + local_rank, local_rank, sum(counts), len(counts), tuple(counts))
            env = _worker_variables(request, place, rendezvous, restart, threads)
            bound = shares[local_rank] if request.bind_cores else ()
            workers.append(WorkerCommand(place.rank, local_rank, _worker_argv(request, local_rank), env, bound))
        nodes.append(NodePlan(host.name, node_rank, tuple(workers)))
        first += count
    return JobPlan(rendezvous.address, rendezvous.port, tuple(nodes), request.exports, request.told_codes)


@dataclass(frozen=True)
class _WorkerPlace:
    host: Host
    node_rank: int
    rank: int
    local_rank: int
    world_size: int
    node_count: int
    counts: tuple[int, ...]  # workers of each node


def warm_commands(request: LaunchRequest, host: Host, cores: Sequence[int]) -> tuple[WorkerCommand, ...]:
    """Return the workers of ``host`` as far as they do not depend on the others; none if there is nothing to import."""
    if request.kind is ProgramKind.PROGRAM:
        return ()
    return build_plan(request, Rendezvous("", 0), cores={host.name: cores}, hosts=[host]).workers


def lack_of_cores(request: LaunchRequest, host: str, workers: int, cores: Sequence[int]) -> str:
    """Return why the workers of ``host`` cannot be bound to ``cores`` (empty: not known yet); nothing if they can."""
    usable = request.core_list or cores
    if not request.bind_cores or not usable or len(usable) >= workers:
        return ""
    noun = "core" if len(usable) == 1 else "cores"
    return (
        f"{host}: --bind-cores: {workers} workers, and only {len(usable)} {noun} to bind them to. Remedy: fewer workers "
        "(--nproc-per-node), or no --bind-cores."
    )


def split_cores(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Split ``cores`` into ``count`` equal runs. The remainder is left over; with fewer cores than runs, all are empty."""
    size = len(cores) // count
    return [tuple(cores[index * size : (index + 1) * size]) for index in range(count)]


def _worker_argv(request: LaunchRequest, local_rank: int) -> tuple[str, ...]:
    head = {
        ProgramKind.SCRIPT: (request.python, "-u", request.target),
        ProgramKind.MODULE: (request.python, "-u", "-m", request.target),
        ProgramKind.PROGRAM: (request.target,),
    }[request.kind]
    # Before the script's own arguments, as the deepspeed launcher does it, so that sub-commands keep working.
    extra = (f"--local_rank={local_rank}",) if request.pass_local_rank else ()
    return (*head, *extra, *request.target_args)


def _worker_variables(
    request: LaunchRequest, place: _WorkerPlace, rendezvous: Rendezvous, restart: int, threads: str | None
) -> dict[str, str]:
    """Return the variables of a worker. ``threads``: OMP_NUM_THREADS, unless the user has set it; None: unknown."""
    local_size = str(place.counts[place.node_rank])
    variables = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": str(place.node_rank),
        "GROUP_WORLD_SIZE": str(place.node_count),
        "NODE_RANK": str(place.node_rank),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        # Read by scripts written for the deepspeed launcher.
        "LOCAL_SIZE": local_size,
        "CROSS_RANK": str(place.node_rank),
        "CROSS_SIZE": str(place.node_count),
        # torchrun's names.
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(request.restarts),
        "TORCHELASTIC_RUN_ID": request.job_id,  # by this, torch.distributed.is_torchelastic_launched() is True
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "ROLE_NAME": request.role,
    }
    told = request.omp_threads or threads
    if told is not None:
        variables[THREADS_NAME] = told
    devices = _visible_devices(request, place.host)
    if devices is not None:
        variables[DEVICES_NAME] = devices
    if request.terminal_columns is not None:
        variables["ZERORUN_TTY"] = "1"
    proposed = _proposed_variables(request, rendezvous.interfaces.get(place.host.name))
    return {**variables, **{name: value for name, value in proposed.items() if name not in request.exports}}


def _proposed_variables(request: LaunchRequest, interface: str | None) -> dict[str, str]:
    """Return the variables of a worker that hold unless the user exports others, which may be in it, too."""
    proposed = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}  # a crash in native code still names the Python line
    if interface is not None:
        proposed.update(request.exports)
        choose_interface(proposed, interface)
    if request.terminal_columns is not None:
        proposed["COLUMNS"] = str(request.terminal_columns)  # tqdm cannot ask a pipe for its width
    return proposed


def check_devices(request: LaunchRequest) -> None:
    """Raise LaunchError if a host has a slot whose device is known not to be there."""
    for host in request.hosts:
        _visible_devices(request, host)


def _visible_devices(request: LaunchRequest, host: Host) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for the slots; None if they are simply the first ones. Names such as UUIDs are kept.

    Slots count the devices that the user has made visible, by --export or, on the launcher's own host, by its environment.
    """
    slots = host.slots or ()
    if slots == tuple(range(len(slots))) or not request.slots_are_devices:
        return None
    here = request.visible_devices if host.name in request.local_names else None
    told = request.exports.get(DEVICES_NAME, here)
    if told is None:
        return ",".join(map(str, slots))
    count = visible_gpus({DEVICES_NAME: told})
    if not count:  # none is to be seen
        return None
    if max(slots) >= count:
        raise LaunchError(
            f"{host.name}: slot {max(slots)} has no device, as {DEVICES_NAME}={told} there, whose devices are slots 0 to "
            f"{count - 1}. Remedy: slots among these, see --include and --exclude, or another {DEVICES_NAME}."
        )
    names = [name.strip() for name in told.split(",")]
    return ",".join(names[slot] for slot in slots)


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the launcher's ``environment`` that workers on other hosts get by default."""
    return {
        name: value
        for name, value in environment.items()
        if (name in EXPORTED_NAMES or name.startswith(EXPORTED_PREFIXES)) and not name.startswith(NOT_EXPORTED)
    }


def full_environment(worker: WorkerCommand, base: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of ``worker``; ``base`` is that of its host."""
    dropped = (DROPPED_PREFIX, JOB_SECRET, COPIES_FOLDER)
    kept = {name: value for name, value in base.items() if not name.startswith(dropped)}
    return {**kept, **worker.env}


def render_text(plan: JobPlan, carriers: Mapping[str, Sequence[str]] | None = None) -> str:
    """Render the plan for the user: the variables and the command of the workers, as a shell would accept them.

    What all workers have in common is shown once, and what is one worker's own in one line: a plan of a thousand workers
    has to be read, too.

    ``carriers``: host name -> the command that reaches it; a host that is missing here is this machine.
    """
    workers = plan.workers
    noun = "worker" if len(workers) == 1 else "workers"
    where = f"{len(plan.nodes)} hosts" if carriers else "this machine"
    lines = [f"{len(workers)} {noun} on {where}, rendezvous at {plan.master_addr}:{plan.master_port}"]
    if carriers:
        lines += ["exported to each host:", *(f"  {line}" for line in _assignments(shown_values(plan.exports)))]
    first = workers[0]
    common = {name: value for name, value in first.env.items() if all(each.env.get(name) == value for each in workers)}
    lines += ["each worker:", *(f"  {line}" for line in _assignments(common))]
    one_command = all(worker.argv == first.argv for worker in workers)
    if one_command:
        lines.append(f"  {shlex.join(map(shown, first.argv))}")
    for node in plan.nodes:
        if carriers:
            carrier = shlex.join(map(shown, carriers[node.host])) if node.host in carriers else "this launcher"
            lines += [f"host {node.host} (node {node.node_rank}):", f"  by {carrier}"]
        for worker in node.workers:
            own = _assignments({name: value for name, value in worker.env.items() if name not in common})
            if worker.cores:
                own.append(f"on cores {', '.join(map(str, worker.cores))}")
            if not one_command:
                own.append(shlex.join(map(shown, worker.argv)))
            if own:
                lines.append(" ".join([f"rank {worker.rank}:", *own]))
    return "\n".join(lines)


def _assignments(values: Mapping[str, str]) -> list[str]:
    return [f"{name}={shlex.quote(value)}" for name, value in values.items()]


def is_secret(name: str) -> bool:
    """Return True if the value of a variable of this name must not be shown."""
    return _SECRET_NAME.search(name) is not None


def shown(text: str, name: str = "") -> str:
    """Return ``text``, the value of ``name``, for printing: secrets are hidden, also users, passwords and keys in URLs."""
    if is_secret(name):
        return HIDDEN

    def field_of(match: re.Match[str]) -> str:
        return f"{match[1]}={HIDDEN}" if is_secret(match[1]) else match[0]

    return _URL_FIELD.sub(field_of, _USER_INFORMATION.sub(HIDDEN, text))


def shown_values(values: Mapping[str, str]) -> dict[str, str]:
    return {name: shown(value, name) for name, value in values.items()}


def render_json(plan: JobPlan, carriers: Mapping[str, Sequence[str]] | None = None) -> str:
    """Render the plan as JSON, for programs."""
    import json  # here, so that --help does not pay for it

    data = asdict(plan)
    data["exports"] = shown_values(plan.exports)
    data["carriers"] = {name: list(map(shown, command)) for name, command in (carriers or {}).items()}
    for worker in (worker for node in data["nodes"] for worker in node["workers"]):
        worker["argv"] = list(map(shown, worker["argv"]))
    return json.dumps(data, indent=2)


def python_folder_first(environment: Mapping[str, str], python: str) -> dict[str, str]:
    """Return ``environment`` with the folder of ``python`` in PATH, first if it was missing.

    This lets workers find the programs of a virtual environment.
    """
    folder = os.path.dirname(python)
    path = environment.get("PATH", os.defpath)
    if not folder or folder in path.split(os.pathsep):
        return dict(environment)
    return {**environment, "PATH": os.pathsep.join([folder, path])}
