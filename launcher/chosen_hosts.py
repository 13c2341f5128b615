"""The hosts of a job, and how they are reached: from the command line, the hostfile, SLURM and the machine."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from zerorun.errors import LaunchError
from zerorun.watch.launch_environment import is_task_of_several, place_in_step

from .hosts import Host, first_hosts, limit_slots, parse_hostfile, select, slurm_gpus, slurm_hosts
from .this_host import trains_on_cpu, usable_cores, visible_gpus


def by_hand(args: argparse.Namespace) -> bool:
    """Return True if the other hosts join by themselves, by a command that is typed on each of them."""
    alone = args.hostfile is None and args.launcher in (None, "local")
    return args.node_rank is not None or (alone and args.rdzv_endpoint is not None and (args.num_nodes or 1) > 1)


def own_names() -> set[str]:
    """The names by which a hostfile may call this machine."""
    name = socket.gethostname()
    return {"localhost", "127.0.0.1", "::1", name.lower(), name.partition(".")[0].lower()}


def choose_hosts(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, list[Host]]:
    """Return (name of the launcher, hosts with the slots to use), from the command line, the hostfile and SLURM."""
    asked = args.nproc_per_node if isinstance(args.nproc_per_node, int) else None
    launcher = args.launcher
    has_all_nodes = in_allocation(environment) and not (args.standalone or by_hand(args))
    if args.hostfile is not None:
        launcher = launcher or "ssh"
        if launcher == "local":
            raise LaunchError("--launcher local reaches no host of a hostfile. Remedy: leave one of the two out.")
        hosts = parse_hostfile(_read(args.hostfile), args.hostfile)
        check_worker_word(args.nproc_per_node)
    elif launcher == "slurm" or (launcher is None and has_all_nodes):
        launcher = "slurm"
        if "SLURM_JOB_NODELIST" not in environment:
            raise LaunchError("--launcher slurm: this is no SLURM allocation. Remedy: run it in salloc or sbatch.")
        hosts = slurm_hosts(environment, asked)
        check_worker_word(args.nproc_per_node, gpus_are_known=slurm_gpus(environment) > 0)
        if args.nproc_per_node == "auto":
            hosts = [Host(host.name, host.slots or (0,)) for host in hosts]
    elif launcher in (None, "local"):
        own = _own_host(args, environment)
        _check_least(args.min_nodes, args.num_nodes or 1, 0)
        return "local", own
    else:
        raise LaunchError(f"--launcher {launcher}: no hosts are given. Remedy: give --hostfile.")
    hosts, spares = select(hosts, args.include, args.exclude), args.spares or 0
    count = None if args.num_nodes is None else args.num_nodes + spares
    hosts = limit_slots(first_hosts(hosts, count, args.min_nodes), asked)
    _check_spares(hosts, spares)
    _check_least(args.min_nodes, len(hosts) - spares, spares)
    return launcher, hosts


def by_hand_with_hostfile(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options as they would be for --node-rank without a hostfile, which tells them here.

    It says how many hosts there are, that the first one is node 0, and which slots this one has. Raises LaunchError if
    there is none with this number.
    """
    asked = args.nproc_per_node if isinstance(args.nproc_per_node, int) else None
    hosts = select(parse_hostfile(_read(args.hostfile), args.hostfile), args.include, args.exclude)
    hosts = first_hosts(hosts, args.num_nodes, args.min_nodes)
    if args.node_rank >= len(hosts):
        counted = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
        raise LaunchError(
            f"--node-rank {args.node_rank}: --hostfile {args.hostfile} gives {counted}, counted from 0. Remedy: the "
            "number of this host's line there."
        )
    own = hosts[args.node_rank]
    told: dict[str, object] = {"hostfile": None, "launcher": None, "include": "", "exclude": "", "num_nodes": len(hosts)}
    if own.slots is not None:
        told["own_slots"] = limit_slots([own], asked)[0].slots
    if args.master_addr is None and args.rdzv_endpoint is None:
        told["master_addr"] = hosts[0].name
    return argparse.Namespace(**{**vars(args), **told})


def check_worker_word(asked: int | str, *, gpus_are_known: bool = False) -> None:
    """Refuse a number of workers that only the other hosts could tell: plans are made before they are reached."""
    if asked == "cpu" or (asked == "gpu" and not gpus_are_known):
        raise LaunchError(
            f"--nproc-per-node {asked}: how many {asked.upper()}s other hosts have is not known here. Remedy: "
            "--nproc-per-node N, or slots=N in the hostfile (in SLURM, GPUs asked for by --gpus-per-node)."
        )


def _check_least(least: int | None, count: int, spares: int) -> None:
    """Refuse --min-nodes if the job never has as many hosts."""
    if least is not None and least > count:
        hosts = f"{count} host{'s' if count > 1 else ''}{f' besides {spares} in reserve' if spares else ''}"
        raise LaunchError(f"--min-nodes {least}: the job has {hosts}. Remedy: a smaller number, or more hosts.")


def _check_spares(hosts: Sequence[Host], spares: int) -> None:
    if spares >= len(hosts):
        raise LaunchError(
            f"--spares {spares}: of {len(hosts)} hosts, none is left. Remedy: give more hosts, or fewer spares."
        )
    slots = [len(host.slots or ()) for host in hosts]
    if spares and len(set(slots)) > 1:
        raise LaunchError(
            f"--spares {spares}: hosts have {slots} slots, and one cannot stand in for another. Remedy: equal slots."
        )


def in_allocation(environment: Mapping[str, str]) -> bool:
    """Return True in a SLURM allocation, except in one of several tasks of an srun step: that one has its part already."""
    return "SLURM_JOB_NODELIST" in environment and not is_task_of_several(environment)


def other_launchers(environment: Mapping[str, str]) -> str:
    """Return, in the first of several launchers that something else has started, what is to be said of it; else nothing.

    It is no error: several settings may be tried at once.
    """
    number, count = place_in_step(environment)
    started, remedy = f"mpirun or srun has started {count} launchers", "start zerorun once, without them"
    if count == 1:
        number, count = (_number(environment, *default) for default in (("RANK", 0), ("WORLD_SIZE", 1)))
        started = f"WORLD_SIZE={count} is set, as if something else, such as Kubernetes, had started {count} launchers"
        remedy = "start zerorun once"
    if number > 0 or count <= 1:
        return ""
    return (
        f"{started}, and each starts a job of its own, with a model of its own. If one job is meant: {remedy}; or have the "
        "ranks started in its place, with python instead of zerorun; or give --nnodes, --node-rank and --master-addr (or "
        "PET_NNODES, PET_NODE_RANK and PET_MASTER_ADDR). If not: --standalone."
    )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else default


def _own_host(args: argparse.Namespace, environment: Mapping[str, str]) -> list[Host]:
    if args.spares:
        raise LaunchError(
            f"--spares {args.spares}: no hosts are given to be in reserve. Remedy: --spares 0, or --hostfile."
        )
    if args.num_nodes not in (None, 1) and not by_hand(args):
        raise LaunchError(
            f"--num-nodes {args.num_nodes}: no hosts are given. Remedy: give --hostfile, or run in SLURM, "
            "or type it on each host with --node-rank K and --master-addr HOST."
        )
    if args.own_slots is not None:
        return [Host("localhost", args.own_slots)]
    if not args.include and not args.exclude:
        return [Host("localhost", tuple(range(count_workers(args.nproc_per_node, environment))))]
    asked = args.nproc_per_node if isinstance(args.nproc_per_node, int) else None
    told = {**environment, **{name: value for name, value in args.export if value is not None}}
    slots = count_workers("auto" if asked is not None else args.nproc_per_node, environment)
    if trains_on_cpu(told):  # slots are no devices, and may be cores
        slots = max(slots, count_workers("cpu", environment))
    hosts = [Host("localhost", tuple(range(slots)))]
    return limit_slots(select(hosts, args.include, args.exclude), asked)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"--hostfile {path}: {reason}. Remedy: give a file with a line for each host.") from None


def count_workers(asked: int | str, environment: Mapping[str, str]) -> int:
    if isinstance(asked, int):
        return asked
    if asked == "cpu":
        return len(usable_cores())
    gpus = visible_gpus(environment)
    if asked == "gpu" and gpus == 0:
        raise LaunchError("--nproc-per-node gpu: no GPU is visible here. Remedy: give a number, or cpu.")
    return max(1, gpus)
