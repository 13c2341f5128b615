"""The options of the ``zerorun`` command, and what their values may be."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zerorun
from zerorun.errors import did_you_mean

from .foreign_options import add_foreign_options, launcher_name, torchrun_defaults

VERIFY = "verify"  # the script that zerorun has: module:function --config FILE
VERIFY_MODULE, VERIFY_CODES = "zerorun.verify", (1, 2)  # it differs; it cannot be verified
_LAUNCHERS = ("local", "ssh", "slurm", "pdsh", "openmpi")

_EPILOG = """\
Options after the script are the script's own and reach it unchanged.
torchrun's variables (PET_NNODES, PET_NODE_RANK, ...) are defaults of the options of these names.
zerorun [options] verify module:function --config FILE compares the training that the function describes with one process.
exit status: that of the worker that failed first (128 + n if signal n ended it); 69 if a host failed first; 0 if all
ended well; 2 if nothing was started.
"""


def build_parser() -> argparse.ArgumentParser:
    # As zerorun.log's command_parser() makes one, whose module loads logging: an eighth of what --help takes.
    parser = argparse.ArgumentParser(
        prog="zerorun",
        usage="zerorun [options] script.py [script args...]",
        description="Start one worker per device, on this machine or on many hosts, and see them through.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = partial(_add, parser)
    _add_worker_options(add)
    _add_host_options(add)
    _add_run_options(add)
    add_foreign_options(add)
    parser.add_argument("--version", action="version", version=f"zerorun {zerorun.__version__}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_worker_options(add: Callable[..., None]) -> None:
    add(
        "--nproc-per-node",
        "--nproc",
        "--num-gpus",
        "--num-accelerators",
        type=_worker_count,
        default="auto",
        metavar="N",
        help="workers of a host: a number, gpu (its GPUs: of this machine, or as SLURM tells), cpu (usable cores of this "
        "machine) or auto (the slots of the hostfile or of SLURM, visible GPUs, else 1; the default)",
    )
    add("-m", "--module", action="store_true", help="the script is a module name, as in python -m")
    add("--no-python", action="store_true", help="the script is a program to be run without Python")
    add("--python", metavar="PATH", help="Python on the other hosts (default: the path of this one)")
    add(
        "--omp-threads",
        type=_positive,
        metavar="N",
        help="OMP_NUM_THREADS of each worker (default: as exported, or in the environment; else cores / workers)",
    )
    add(
        "--bind-cores",
        "--bind-cores-to-rank",
        action="store_true",
        help="bind each worker to its share of the host's cores, those of one NUMA node together; each needs one",
    )
    add("--bind-core-list", type=_cores, metavar="0-7,16", help="the cores to bind to; implies --bind-cores")
    add(
        "--local-rank-arg",
        action="store_true",
        default=None,
        help="give the script --local_rank=N, as deepspeed does (the default with --as-deepspeed if it has that option)",
    )
    add("--no-local-rank", dest="local_rank_arg", action="store_false", default=None, help="give it none")
    add(
        "--export",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        type=_export,
        help="give the workers this variable, also on other hosts; may be repeated",
    )
    add(
        "--as-deepspeed",
        action="append_const",
        dest="export",
        const=("ZERORUN_AS_DEEPSPEED", "1"),
        help="in the workers, import deepspeed gives zerorun: for scripts and trainers that know DeepSpeed",
    )


def _add_host_options(add: Callable[..., None]) -> None:
    add("-H", "--hostfile", metavar="FILE", help="lines such as: node1 slots=8 (user=NAME port=N); # comments")
    add("-i", "--include", default="", metavar="FILTER", help="only these: node1@node2:0,2@node[3-5]:0-3")
    add("--force-multi", action="store_true", help="reach this host by ssh, too, if it is in the hostfile")
    add("-e", "--exclude", default="", metavar="FILTER", help="all but these hosts and slots")
    add(
        "--num-nodes",
        "--nnodes",
        type=_node_counts,
        default=(None, None),
        metavar="N",
        help="the first N hosts; MIN:MAX: also --min-nodes MIN",
    )
    add(
        "--min-nodes",
        type=_positive,
        metavar="N",
        help="start and restart without hosts that cannot be had, if N or more are left",
    )
    add(
        "--spares",
        type=_count,
        metavar="N",
        help="keep the last N hosts (with --nnodes, N more) in reserve for those that are lost, and on all hosts processes "
        "that have imported PyTorch, for the next restart; 0: only those",
    )
    add(
        "--launcher",
        type=launcher_name,
        choices=_LAUNCHERS,
        help="how to reach hosts (default: slurm in an allocation, ssh with a hostfile, else local); pdsh means ssh",
    )
    add("--launcher-args", default="", metavar="ARGS", help="more arguments for ssh, srun or mpirun")
    add(
        "--node-rank",
        type=_count,
        metavar="K",
        help="no ssh: the same command is typed on each of --nnodes hosts, with K = 0 where --master-addr is",
    )
    add(
        "--no-ssh",
        action="store_true",
        help="with --node-rank: a hostfile says how many hosts there are, and the slots of each",
    )
    add(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="with --node-rank: holds what hosts must know to join; mode 0600, on all hosts. Node 0 makes it if it is not "
        "there. Without it: ZERORUN_JOB_SECRET, or node 0 shows one on its terminal",
    )
    add("--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="--master-addr and --master-port in one")
    add("--rdzv-id", default="none", metavar="ID", help="a name of the job, the same on all hosts")
    add("--role", default="default", metavar="NAME", help="ROLE_NAME of the workers, as torchrun")
    add("--rdzv-backend", choices=["static", "c10d"], help="as torchrun; changes nothing here")
    add("--standalone", action="store_true", help="as torchrun: this machine only, also in a SLURM allocation")
    add("--sbatch", action="store_true", help="write a batch script with this command and submit it to SLURM")
    add("--sbatch-args", default="", metavar="ARGS", help='options of sbatch, such as "--time=1:00:00 -p gpu"')
    add("--ssh-port", type=_positive, metavar="PORT", help="port of the hosts' ssh servers")
    add("--master-addr", metavar="ADDR", help="rendezvous address (default: the first host's own)")
    add("--master-port", type=_port, metavar="PORT", help="rendezvous port (default: a free one)")


def _add_run_options(add: Callable[..., None]) -> None:
    add(
        "--log-dir",
        "--enable-each-rank-log",
        type=Path,
        metavar="DIR",
        help="also append each stream to DIR/rankN.{stdout,stderr}.log",
    )
    add(
        "-r",
        "--redirects",
        type=_streams,
        default=frozenset(),
        metavar="0-3",
        help="streams that go to the files of --log-dir only and are not shown: 0 none (the default), 1 stdout, 2 stderr, "
        "3 both",
    )
    add(
        "-t",
        "--tee",
        type=_teed_streams,
        default=frozenset(),
        metavar="0-3",
        help="as torchrun: streams that are shown whatever --redirects says; all go to the files of --log-dir",
    )
    add("--local-ranks-filter", type=_ranks, metavar="0,1", help="show the output of these local ranks only")
    add(
        "--grace",
        "--shutdown-timeout",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="time between a request to end and SIGKILL (default: 5); raise it for scripts that save on SIGTERM",
    )
    add(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start all workers again, up to N times, after a worker or host has failed (default: 0)",
    )
    add(
        "--no-config-check",
        action="store_true",
        help="do not check the .json file that the script gets by --config or --deepspeed_config",
    )
    add(
        "--dump",
        nargs="?",
        const="",
        metavar="JOB",
        help="start nothing: print what all ranks of the jobs on the hosts are doing, with their stacks. JOB: only that "
        "one, by its number in SLURM, its --rdzv-id, or MASTER_ADDR:MASTER_PORT",
    )
    add(
        "--trace",
        nargs="?",
        const="",
        metavar="JOB",
        help="start nothing: have a running job trace its next steps, in a file in the folder of its rank 0. JOB: as of "
        "--dump, if there are several",
    )
    add("--steps", type=_positive, metavar="N", help="with --trace: how many (default: 3)")
    add("--dry-run", dest="dry_run", action="store_const", const="text", help="print the plan; start nothing")
    add("--dry-run=json", dest="dry_run", action="store_const", const="json", help="the same as JSON")


def _add(parser: argparse.ArgumentParser, *names: str, **options: Any) -> None:
    """Add an option; each long name is also understood with underscores, which --help does not repeat."""
    action = parser.add_argument(*names, **options)
    twins = ["--" + name[2:].replace("-", "_") for name in names if "-" in name[2:]]
    if twins:
        hidden = {**options, "dest": action.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(*twins, **hidden)


def _likely(parser: argparse.ArgumentParser, word: str) -> str:
    """Ask whether an option that --help names was meant by ``word``; empty if none is similar."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    known = {name[2:] for action in shown for name in action.option_strings if name.startswith("--")}
    return did_you_mean(word.partition("=")[0].strip("-").replace("_", "-"), known)


def parse_args(
    parser: argparse.ArgumentParser, argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> argparse.Namespace:
    """Return ``argv`` as a namespace with ``target`` and ``target_args``; exit with status 2 if it cannot be parsed.

    Variables of torchrun in ``environment`` are defaults; the user is told which.
    """
    argv, environment = _joined(parser, argv), environment or {}
    taken = torchrun_defaults(parser, argv, environment)
    if taken:
        told = ", ".join(f"{name}={environment[name]}" for name in taken)
        print(f"[zerorun] options by variables that torchrun reads: {told}", file=sys.stderr, flush=True)
    argv = [*taken.values(), *argv]
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        likely = f" {question}" if (question := _likely(parser, unknown[0])) else ""
        parser.error(f"unknown option {unknown[0]}.{likely} Options of the script belong after the script.")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    args.words = argv
    args.own_slots = None  # all that this machine has, unless a hostfile says which
    args.target, *args.target_args = command or [""]
    least, args.num_nodes = args.num_nodes
    args.min_nodes = args.min_nodes or least
    args.asks_jobs = args.dump is not None or args.trace is not None
    if args.steps and args.trace is None:
        parser.error("--steps: how many a trace has, and none is asked for. Remedy: --trace, or leave it out.")
    args.steps = args.steps or 3
    others = _other_hosts(args)
    if args.standalone and (others or (args.num_nodes or 1) > 1):
        others = others or f"--num-nodes {args.num_nodes}"
        parser.error(f"--standalone: this machine only, but {others} names others. Remedy: leave one of the two out.")
    if args.node_rank is not None and others and not (args.no_ssh and args.hostfile is not None):
        what = f"--node-rank {args.node_rank}: hosts join by themselves"
        parser.error(f"{what}, but {others} names others. Remedy: leave one of the two out; --nnodes says how many join.")
    hidden = args.redirects - args.tee
    if hidden and args.log_dir is None:
        parser.error("--redirects: output that is not shown would be lost. Remedy: --log-dir DIR, or no --redirects.")
    args.shown = dict.fromkeys(hidden, False)
    if args.asks_jobs:
        if command:
            option = "--dump" if args.trace is None else "--trace"
            parser.error(f"{option} starts nothing: what is {command[0]!r} for?")
        return args
    if not command:
        parser.error("no script given")
    if args.no_ssh and args.node_rank is None:
        parser.error(
            "--no-ssh: which host is this? Remedy: on each, --node-rank K, and --hostfile FILE, or --nnodes N and "
            "--master-addr HOST"
        )
    if args.module and args.no_python:
        parser.error("--module and --no-python exclude each other")
    if command[0] == VERIFY and not (args.module or args.no_python or os.path.exists(VERIFY)):
        args.module, args.target = True, VERIFY_MODULE
    if not args.module and not args.no_python:
        if not os.path.exists(args.target):
            parser.error(f"script not found: {args.target}")
        if args.target.endswith(".json"):
            parser.error(f"{args.target} is no script. Remedy: zerorun SCRIPT.py --config {args.target}")
    return args


def _other_hosts(args: argparse.Namespace) -> str:
    """Return the option by which the user says which other hosts to reach; an empty string if there is none."""
    if args.hostfile is not None:
        return f"--hostfile {args.hostfile}"
    return f"--launcher {args.launcher}" if args.launcher not in (None, "local") else ""


def _joined(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Write our own options as --name=value: argparse takes a value that begins with a dash, as ssh's do, for an option."""
    words = list(argv)
    for index, word in enumerate(words):
        action = parser._option_string_actions.get(word)
        if not word.startswith("-") or word == "--":
            break
        if word.startswith("--") and action is not None and action.nargs is None and index + 1 < len(words):
            rest = _joined(parser, words[index + 2 :])
            return [*words[:index], f"{word}={words[index + 1]}", *rest]
        if action is not None and action.nargs is None:  # a short one: the next word is its value
            return [*words[: index + 2], *_joined(parser, words[index + 2 :])]
    return words


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _port(text: str) -> int | None:
    """Return the port; None for 0, which asks for any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number (0 to 65535)")
    return int(text) or None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _worker_count(text: str) -> int | str:
    return text if text in ("auto", "gpu", "cpu") else _positive(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


def _cores(text: str) -> tuple[int, ...]:
    from .this_host import parse_cores

    try:
        return tuple(parse_cores(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 0-7,16") from None


def _streams(text: str) -> frozenset[str]:
    if text not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(f"{text!r} is not 0, 1, 2 or 3")
    return frozenset(stream for stream, those in (("stdout", "13"), ("stderr", "23")) if text in those)


def _teed_streams(text: str) -> frozenset[str]:
    """Return the streams of ``3`` or, as torchrun has it for each local rank, of ``0:3,1:1``: those of any of them."""
    return frozenset[str]().union(*(_streams(item.rpartition(":")[2]) for item in text.split(",")))


def _ranks(text: str) -> frozenset[int]:
    return frozenset(_count(item) for item in text.split(","))


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host:
        return f"{text}:29500"
    _port(port)
    return f"{host.strip('[]')}:{port}"


def _node_counts(text: str) -> tuple[int | None, int]:
    """``N`` or ``MIN:MAX``."""
    low, colon, high = text.partition(":")
    if not colon:
        return None, _positive(text)
    if _positive(low) > _positive(high):
        raise argparse.ArgumentTypeError(f"{text!r}: the first number is larger than the second")
    return int(low), int(high)


def _export(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{name!r} is not the name of a variable")  # the value may be a secret
    return name, value if equals else None
