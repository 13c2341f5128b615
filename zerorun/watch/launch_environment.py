"""Where a rank is, by the environment that its launcher has given it: zerorun, torchrun, mpirun or srun."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping

INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # set by zerorun where the user has not
CHOSEN_INTERFACES = "ZERORUN_INTERFACES"  # those that zerorun has set, as "NAME=VALUE NAME=VALUE"
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OF_MPIRUN = (
    # Open MPI, MVAPICH, and MPICH with Intel MPI.
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def launched(environment: Mapping[str, str]) -> dict[str, str]:
    """Return where the rank with this ``environment`` is, in torchrun's variables, as far as its launcher tells it.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A process on its own has no RANK and no
    WORLD_SIZE. What torchrun's variables say counts. mpirun comes before srun, which may have started mpirun's daemons.
    """
    names = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")
    found = {name: environment[name] for name in names if environment.get(name)}
    by_name = "RANK" in found or "WORLD_SIZE" in found
    for told in (*_told_by_mpirun(environment), _told_by_srun(environment)):
        if all(found.get(name, value) == value for name, value in told.items() if name in _PLACE[:2]):
            found = {**told, **found}
    if not by_name and found.get("WORLD_SIZE") == "1":
        found = {name: value for name, value in found.items() if name not in _PLACE}
    return found


def choose_interface(environment: MutableMapping[str, str], interface: str) -> None:
    """Set ``INTERFACE_NAMES`` that are missing in ``environment``, and note there that it was not the user."""
    missing = [name for name in INTERFACE_NAMES if name not in environment]
    if missing:
        environment.update(dict.fromkeys(missing, interface))
        noted = environment.get(CHOSEN_INTERFACES, "").split()
        environment[CHOSEN_INTERFACES] = " ".join([*noted, *(f"{name}={interface}" for name in missing)])


def without_choices(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` without the interfaces that zerorun itself has set.

    They are those of the ranks of one run. A job that such a rank starts may have ranks on other hosts.
    """
    noted = environment.get(CHOSEN_INTERFACES, "").split()
    return {
        name: value
        for name, value in environment.items()
        if name != CHOSEN_INTERFACES and not (name in INTERFACE_NAMES and f"{name}={value}" in noted)
    }


def place_in_step(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return (number, count) of this process among those that mpirun, or one step of srun, has started; else (0, 1)."""
    told = next(_told_by_mpirun(environment), None) or _told_by_srun(environment)
    return int(told.get("RANK", 0)), int(told.get("WORLD_SIZE", 1))


def rank_in(environment: Mapping[str, str]) -> int:
    """The number of the rank; 0 of a process on its own."""
    return int(launched(environment).get("RANK", 0))


def world_size_in(environment: Mapping[str, str]) -> int:
    """How many ranks there are; 1 of a process on its own."""
    return int(launched(environment).get("WORLD_SIZE", 1))


def local_rank() -> int:
    """The number of this rank among those of its host; 0 where nobody tells it."""
    return int(launched(os.environ).get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def ranks_here(world_size: int) -> int:
    """How many of ``world_size`` ranks are on this host; all of them where nobody tells it."""
    return told_ranks_here(world_size) or world_size


def told_ranks_here(world_size: int) -> int | None:
    """How many of ``world_size`` ranks are on this host; None where nobody tells it."""
    told = launched(os.environ)
    known = told.get("WORLD_SIZE", str(world_size)) == str(world_size)
    return int(told["LOCAL_WORLD_SIZE"]) if known and "LOCAL_WORLD_SIZE" in told else None


def is_on_one_host(environment: Mapping[str, str]) -> bool:
    """True if all ranks are certainly on this host."""
    told = launched(environment)
    return "WORLD_SIZE" in told and told.get("LOCAL_WORLD_SIZE") == told["WORLD_SIZE"]


def tasks_of_nodes(text: str) -> list[int]:
    """``2(x3),1``, as SLURM has it, -> 2, 2, 2, 1. Empty for anything else."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def is_task_of_several(environment: Mapping[str, str]) -> bool:
    """True in one of several tasks of an srun step. A batch script has variables of tasks, too, and is none of them."""
    return environment.get("SLURM_STEP_ID", "").isdecimal() and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def _told_by_mpirun(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    for names in _OF_MPIRUN:
        told = {name: environment[theirs] for name, theirs in zip(_PLACE, names, strict=True) if theirs in environment}
        if "RANK" in told and "WORLD_SIZE" in told:
            yield told


def _told_by_srun(environment: Mapping[str, str]) -> dict[str, str]:
    if not is_task_of_several(environment) or "SLURM_PROCID" not in environment:
        return {}
    count = environment["SLURM_STEP_NUM_TASKS"]
    told = {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": count, "LOCAL_RANK": environment.get("SLURM_LOCALID", "0")}
    tasks, node = tasks_of_nodes(environment.get("SLURM_STEP_TASKS_PER_NODE", "")), int(environment.get("SLURM_NODEID", 0))
    one_node = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
    if one_node or node < len(tasks):
        told["LOCAL_WORLD_SIZE"] = count if one_node else str(tasks[node])
    # Its nodes are in order: the first, node[03-07] or so, has task 0. srun itself may run elsewhere.
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", environment.get("SLURM_STEP_NODELIST", "")).partition(",")[0]
    told["MASTER_ADDR"] = "127.0.0.1" if one_node else first or environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment["SLURM_STEP_ID"])
    told["MASTER_PORT"] = str(20000 + (job + 31 * step) % 20000)  # steps of a job may run at the same time
    return told
