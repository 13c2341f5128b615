"""The ``zerorun`` command: ``zerorun [options] script.py [script args...]``.

Reads the command line and the machine (hosts, devices, cores, terminal), makes a request and has a job run it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerorun.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from .carriers import CarrierOptions
    from .dump import RankState
    from .hosts import Host
    from .job_plan import JobOptions, LaunchRequest

VERIFY = "verify"  # the script that zerorun has: module:function --config FILE
USAGE_STATUS = 2  # the job was refused before a worker was started
_CONFIG_OPTIONS = ("--config", "--deepspeed_config", "--deepspeed-config")
_LAUNCHERS = ("local", "ssh", "slurm", "pdsh", "openmpi")
_ENV_FILES = (".deepspeed_env", ".zerorun_env")  # in the home directory, then in the current one; later ones win

_EPILOG = """\
Options after the script are the script's own and reach it unchanged.
zerorun [options] verify module:function --config FILE compares the training that the function describes with one process.
exit status: that of the worker that failed first (128 + n if signal n ended it); 69 if a host failed first; 0 if all
ended well; 2 if nothing was started.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit status."""
    parser = build_parser()
    args = parse_args(parser, sys.argv[1:] if argv is None else argv)
    try:
        return _launch(args)
    except (LaunchError, ConfigError) as error:
        after = "" if args.asks_jobs else "\nNo worker is running."
        print(f"zerorun: error: {error}{after}", file=sys.stderr)
        return USAGE_STATUS
    except KeyboardInterrupt:  # before a worker was started
        return 130


def _launch(args: argparse.Namespace) -> int:
    if args.asks_jobs:
        return _ask_jobs(args)
    if not args.no_config_check:
        check_config(args.target_args)
    if args.sbatch:
        return _submit(args)
    from .carriers import CARRIERS  # here, so that --help does not pay for it
    from .job import Job
    from .job_plan import JobOptions
    from .sbatch import REQUEUE_STATUS, requeue

    launcher, hosts = choose_hosts(args, os.environ)
    request = make_request(args, launcher, hosts, os.environ)
    options = carrier_options(args)

    def carrier(host: Host) -> Sequence[str] | None:
        return None if host.name in request.local_names else CARRIERS[launcher](host, options)

    if args.dry_run is not None:
        carriers = {host.name: list(command) for host in hosts if (command := carrier(host)) is not None}
        print(_dry_run(args, request, carriers))
        return 0
    job_options = JobOptions(
        carrier=carrier,
        master_addr=args.master_addr,
        master_port=args.master_port,
        grace=args.grace,
        log_dir=args.log_dir,
        max_restarts=args.max_restarts,
        min_nodes=args.min_nodes,
        keep_warm=args.spares is not None,
        shown=args.tee,
        shown_local_ranks=args.local_ranks_filter,
    )
    if by_hand(args):
        return _by_hand(args, request, job_options)
    status = Job(request, job_options).run()
    if status == REQUEUE_STATUS and launcher == "slurm":
        print("[zerorun] requeueing this job", file=sys.stderr, flush=True)  # now: SLURM may end this process next
        problem = requeue(os.environ)
        if problem is not None:
            print(f"[zerorun] not requeued: {problem}", file=sys.stderr)
    return status


def carrier_options(args: argparse.Namespace, **module: Any) -> CarrierOptions:
    """How hosts are reached. ``module``: what runs there, and with which arguments, if it is not the agent."""
    from .carriers import CarrierOptions

    return CarrierOptions(
        args.python or sys.executable,
        pythonpath=os.environ.get("PYTHONPATH"),
        extra=tuple(shlex.split(args.launcher_args)),
        ssh_port=args.ssh_port,
        **module,
    )


def _ask_jobs(args: argparse.Namespace) -> int:
    """Print what the ranks of running jobs are doing, or ask one of these jobs for a trace."""
    from zerorun.log import print_lines

    from .carriers import CARRIERS
    from .dump import chosen, gather, nodes_of, on_this_host, one_job, page, trace_on_this_host

    job = args.dump if args.trace is None else args.trace
    if args.launcher == "slurm" and job:
        os.environ.update(SLURM_JOB_ID=job, SLURM_JOB_NODELIST=nodes_of(job))  # also for srun
    launcher, hosts = choose_hosts(args, os.environ)
    own = own_names() if launcher in ("local", "ssh") else set()

    def ask(here: Callable[[], list[RankState]], *arguments: str) -> tuple[list[RankState], dict[str, str]]:
        options = carrier_options(args, module="zerorun.launcher.dump", arguments=arguments)
        carriers = {host.name: CARRIERS[launcher](host, options) for host in hosts if host.name.lower() not in own}
        return gather(carriers, here if len(carriers) < len(hosts) else None)

    found, silent = ask(on_this_host)
    asked = [host.name for host in hosts]
    if args.trace is None:
        print_lines(page(found, silent, job, asked=asked))
        return 1 if silent else 0
    first = one_job(chosen(found, silent, job, asked=asked))
    steps, file = str(args.steps), f"zerorun-trace-{time.strftime('%H%M%S')}.json"
    taken, _ = ask(lambda: trace_on_this_host(first.job, args.steps, file), first.job, steps, file)
    if not taken:
        raise LaunchError(f"--trace: rank 0 of job {first.job} has ended.")
    print(f"rank 0 of job {first.job} writes its next {steps} steps to {file}, in its folder on {first.host}")
    return 0


def _dry_run(args: argparse.Namespace, request: LaunchRequest, carriers: Mapping[str, Sequence[str]]) -> str:
    from .facts import reserve_port, usable_cores
    from .job_plan import Rendezvous, build_plan, on_one_host, render_json, render_text

    render = render_json if args.dry_run == "json" else render_text
    name = request.hosts[0].name
    if carriers:
        plan = build_plan(request, Rendezvous(args.master_addr or name, args.master_port or "(a free one)"))
        return render(plan, carriers)
    with reserve_port(args.master_port) as port:
        meeting = on_one_host(name, args.master_addr, port)
        return render(build_plan(request, meeting, cores={name: usable_cores()}))


def by_hand(args: argparse.Namespace) -> bool:
    """Return True if the other hosts join by themselves, by a command that is typed on each of them."""
    alone = args.hostfile is None and args.launcher in (None, "local")
    return args.node_rank is not None or (alone and args.rdzv_endpoint is not None and (args.num_nodes or 1) > 1)


def _by_hand(args: argparse.Namespace, request: LaunchRequest, options: JobOptions) -> int:
    from .by_hand import JOIN_SECONDS, LeadingJob, join
    from .job import Job
    from .secret import guests_secret, leaders_secret

    if args.spares is not None:
        raise LaunchError(
            f"--spares {args.spares}: hosts that join by themselves are not kept in reserve. Remedy: a hostfile."
        )
    address, _, port_text = (args.rdzv_endpoint or "").rpartition(":")
    address, port = args.master_addr or address, args.master_port or int(port_text or 29500)
    if not address:
        raise LaunchError(f"--node-rank {args.node_rank}: where is node 0? Remedy: give --master-addr and --master-port.")
    if args.node_rank is not None and args.node_rank >= (args.num_nodes or 1):
        count = args.num_nodes or 1
        raise LaunchError(f"--node-rank {args.node_rank}: there are {count} nodes, counted from 0. Remedy: see --nnodes.")
    leads = args.node_rank == 0 or (args.node_rank is None and _is_own(address))
    if leads and (args.num_nodes or 1) == 1:
        return Job(request, replace(options, master_addr=address)).run()  # no other host will join
    if leads:
        secret, shown = leaders_secret(args.secret_file, os.environ, terminal=_stderr_is_terminal())
        names: dict[str, Any] = {"job_id": args.rdzv_id, "secret": secret, "invitation": _invitation(args, secret, shown)}
        return LeadingJob(request, replace(options, master_addr=address), args.num_nodes, port, **names).run()
    secret = guests_secret(args.secret_file, os.environ, seconds=JOIN_SECONDS)
    own = replace(request, terminal_columns=None)
    return join(own, args.log_dir, address, port, args.node_rank, job_id=args.rdzv_id, secret=secret)


def _invitation(args: argparse.Namespace, secret: str, shown: bool) -> str:
    """Return the words that say how other hosts get the secret; if it was made up here, with the command to type there."""
    from .job_plan import JOB_SECRET

    if not shown:
        return f"with {f'the secret in {args.secret_file}' if args.secret_file else f'the same {JOB_SECRET}'}"
    own = args.words[: len(args.words) - len(args.command)]
    own = [word for word in own if word.partition("=")[0].replace("_", "-") != "--node-rank"]
    rank = [] if args.node_rank is None else ["--node-rank=1"]
    more = ", then 2 and so on" if rank and args.num_nodes > 2 else ""
    # With a blank in front, most shells keep the line out of their history.
    return f"by this command{more}:\n  {JOB_SECRET}={secret} {shlex.join(['zerorun', *own, *rank, *args.command])}"


def _is_own(address: str) -> bool:
    """Return True if ``address`` belongs to this machine: only then can a socket be bound to it."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def _submit(args: argparse.Namespace) -> int:
    from .sbatch import batch_script, submit

    own = _by_name(_without_sbatch(args.words[: len(args.words) - len(args.command)]))
    stem = Path(args.target).stem
    command = [sys.executable, "-m", "zerorun.launcher.cli", *own, *args.command]
    options = shlex.split(args.sbatch_args)
    script = batch_script(command, name=stem, nodes=args.num_nodes or 1, options=options)
    if args.dry_run is not None:
        print(script, end="")
        return 0
    values = {name: value for name, value in args.export if value is not None}
    print(submit(script, Path(f"{stem}.sbatch"), {**os.environ, **values}))
    return 0


def _by_name(words: Sequence[str]) -> list[str]:
    """Return the launcher's own options without the values of --export: SLURM passes the submitter's variables on."""
    return ["=".join(word.split("=")[:2]) if word.startswith("--export=") else word for word in words]


def _without_sbatch(words: Sequence[str]) -> list[str]:
    """The launcher's own options without those that are about submitting."""
    submitting = ("--sbatch", "--sbatch-args", "--dry-run")
    return [word for word in words if word.partition("=")[0].replace("_", "-") not in submitting]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zerorun",
        usage="zerorun [options] script.py [script args...]",
        description="Start one worker per device, on this machine or on many hosts, and see them through.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_worker_options(parser)
    _add_host_options(parser)
    _add_run_options(parser)
    parser.add_argument("--version", action="version", version=f"zerorun {_version()}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_worker_options(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        "--nproc-per-node",
        "--nproc",
        "--num-gpus",
        "--num-accelerators",
        type=_worker_count,
        default="auto",
        metavar="N",
        help="workers of a host: a number, gpu (visible GPUs), cpu (usable cores) or auto (the slots of the "
        "hostfile or of SLURM, visible GPUs, else 1; the default)",
    )
    _add(parser, "-m", "--module", action="store_true", help="the script is a module name, as in python -m")
    _add(parser, "--no-python", action="store_true", help="the script is a program to be run without Python")
    _add(parser, "--python", metavar="PATH", help="Python on the other hosts (default: the path of this one)")
    _add(
        parser,
        "--omp-threads",
        type=_positive,
        metavar="N",
        help="OMP_NUM_THREADS of each worker (default: as in the environment, else cores / workers)",
    )
    _add(
        parser,
        "--bind-cores",
        "--bind-cores-to-rank",
        action="store_true",
        help="bind each worker to its share of the host's cores, those of one NUMA node together",
    )
    _add(parser, "--bind-core-list", type=_cores, metavar="0-7,16", help="the cores to bind to; implies --bind-cores")
    _add(parser, "--local-rank-arg", action="store_true", help="give the script --local_rank=N, as deepspeed does")
    _add(
        parser,
        "--export",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        type=_export,
        help="give the workers this variable, also on other hosts; may be repeated",
    )
    _add(
        parser,
        "--as-deepspeed",
        action="append_const",
        dest="export",
        const=("ZERORUN_AS_DEEPSPEED", "1"),
        help="in the workers, import deepspeed gives zerorun: for scripts and trainers that know DeepSpeed",
    )


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    _add(parser, "-H", "--hostfile", metavar="FILE", help="lines such as: node1 slots=8 (user=NAME port=N); # comments")
    _add(parser, "-i", "--include", default="", metavar="FILTER", help="only these: node1@node2:0,2@node[3-5]:0-3")
    _add(parser, "--force-multi", action="store_true", help="reach this host by ssh, too, if it is in the hostfile")
    _add(parser, "-e", "--exclude", default="", metavar="FILTER", help="all but these hosts and slots")
    _add(
        parser,
        "--num-nodes",
        "--nnodes",
        type=_node_counts,
        default=(None, None),
        metavar="N",
        help="the first N hosts; MIN:MAX: also --min-nodes MIN",
    )
    _add(
        parser,
        "--min-nodes",
        type=_positive,
        metavar="N",
        help="start and restart without hosts that cannot be had, if N or more are left",
    )
    _add(
        parser,
        "--spares",
        type=_count,
        metavar="N",
        help="keep the last N hosts (with --nnodes, N more) in reserve for those that are lost, and on all hosts processes "
        "that have imported PyTorch, for the next restart; 0: only those",
    )
    _add(
        parser,
        "--launcher",
        choices=_LAUNCHERS,
        help="how to reach hosts (default: slurm in an allocation, ssh with a hostfile, else local); pdsh means ssh",
    )
    _add(parser, "--launcher-args", default="", metavar="ARGS", help="more arguments for ssh, srun or mpirun")
    _add(
        parser,
        "--node-rank",
        type=_count,
        metavar="K",
        help="no ssh: the same command is typed on each of --nnodes hosts, with K = 0 where --master-addr is",
    )
    _add(
        parser,
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="with --node-rank: holds what hosts must know to join; mode 0600, on all hosts. Node 0 makes it if it is not "
        "there. Without it: ZERORUN_JOB_SECRET, or node 0 shows one on its terminal",
    )
    _add(parser, "--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="--master-addr and --master-port in one")
    _add(parser, "--rdzv-id", default="none", metavar="ID", help="a name of the job, the same on all hosts")
    _add(parser, "--rdzv-backend", choices=["static", "c10d"], help="as torchrun; changes nothing here")
    _add(parser, "--standalone", action="store_true", help="as torchrun: this machine only, a free port; the default")
    _add(parser, "--sbatch", action="store_true", help="write a batch script with this command and submit it to SLURM")
    _add(parser, "--sbatch-args", default="", metavar="ARGS", help='options of sbatch, such as "--time=1:00:00 -p gpu"')
    _add(parser, "--ssh-port", type=_positive, metavar="PORT", help="port of the hosts' ssh servers")
    _add(parser, "--master-addr", metavar="ADDR", help="rendezvous address (default: the first host's own)")
    _add(parser, "--master-port", type=_port, metavar="PORT", help="rendezvous port (default: a free one)")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        "--log-dir",
        "--enable-each-rank-log",
        type=Path,
        metavar="DIR",
        help="also append each stream to DIR/rankN.{stdout,stderr}.log",
    )
    _add(
        parser,
        "-t",
        "--tee",
        type=_streams,
        default={},
        metavar="0-3",
        help="streams to show: 0 none, 1 stdout, 2 stderr, 3 both (the default); what is not shown is in --log-dir",
    )
    _add(parser, "--local-ranks-filter", type=_ranks, metavar="0,1", help="show the output of these local ranks only")
    _add(
        parser,
        "--grace",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="time between a request to end and SIGKILL (default: 5); raise it for scripts that save on SIGTERM",
    )
    _add(
        parser,
        "--max-restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start all workers again, up to N times, after a worker or host has failed (default: 0)",
    )
    _add(
        parser,
        "--no-config-check",
        action="store_true",
        help="do not check the .json file that the script gets by --config or --deepspeed_config",
    )
    _add(
        parser,
        "--dump",
        nargs="?",
        const="",
        metavar="JOB",
        help="start nothing: print what all ranks of the jobs on the hosts are doing, with their stacks. JOB: only that "
        "one, by its number in SLURM, its --rdzv-id of torchrun, or MASTER_ADDR:MASTER_PORT",
    )
    _add(
        parser,
        "--trace",
        nargs="?",
        const="",
        metavar="JOB",
        help="start nothing: have a running job trace its next steps, in a file in the folder of its rank 0. JOB: as of "
        "--dump, if there are several",
    )
    _add(parser, "--steps", type=_positive, default=3, metavar="N", help="with --trace: how many (default: 3)")
    _add(parser, "--dry-run", dest="dry_run", action="store_const", const="text", help="print the plan; start nothing")
    _add(parser, "--dry-run=json", dest="dry_run", action="store_const", const="json", help="the same as JSON")


def _add(parser: argparse.ArgumentParser, *names: str, **options: Any) -> None:
    """Add an option; each long name is also understood with underscores, which --help does not repeat."""
    action = parser.add_argument(*names, **options)
    twins = ["--" + name[2:].replace("-", "_") for name in names if "-" in name[2:]]
    if twins:
        hidden = {**options, "dest": action.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(*twins, **hidden)


def parse_args(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return ``argv`` as a namespace with ``target`` and ``target_args``; exit with status 2 if it cannot be parsed."""
    argv = _joined(parser, argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unknown option {unknown[0]}. Options of the script belong after the script.")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    args.words = argv
    args.target, *args.target_args = command or [""]
    least, args.num_nodes = args.num_nodes
    args.min_nodes = args.min_nodes or least
    args.asks_jobs = args.dump is not None or args.trace is not None
    if args.asks_jobs:
        if command:
            option = "--dump" if args.trace is None else "--trace"
            parser.error(f"{option} starts nothing: what is {command[0]!r} for?")
        return args
    if not command:
        parser.error("no script given")
    if args.module and args.no_python:
        parser.error("--module and --no-python exclude each other")
    if command[0] == VERIFY and not os.path.exists(VERIFY):
        args.module, args.target = True, "zerorun.verify"
    if not args.module and not args.no_python and not os.path.exists(args.target):
        parser.error(f"script not found: {args.target}")
    return args


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


def _version() -> str:
    import zerorun

    return zerorun.__version__


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
    from .facts import parse_cores

    try:
        return tuple(parse_cores(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 0-7,16") from None


def _streams(text: str) -> dict[str, bool]:
    if text not in ("0", "1", "2", "3"):
        raise argparse.ArgumentTypeError(f"{text!r} is not 0, 1, 2 or 3")
    return {"stdout": text in "13", "stderr": text in "23"}


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


def own_names() -> set[str]:
    """The names by which a hostfile may call this machine."""
    name = socket.gethostname()
    return {"localhost", "127.0.0.1", "::1", name.lower(), name.partition(".")[0].lower()}


def choose_hosts(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, list[Host]]:
    """Return (name of the launcher, hosts with the slots to use), from the command line, the hostfile and SLURM."""
    from .hosts import Host, first_hosts, limit_slots, parse_hostfile, select, slurm_hosts

    asked = args.nproc_per_node if isinstance(args.nproc_per_node, int) else None
    launcher = args.launcher
    if args.hostfile is not None:
        launcher = launcher or "ssh"
        if launcher == "local":
            raise LaunchError("--launcher local reaches no host of a hostfile. Remedy: leave one of the two out.")
        hosts = parse_hostfile(_read(args.hostfile), args.hostfile)
    elif launcher == "slurm" or (launcher is None and in_allocation(environment) and not by_hand(args)):
        launcher = "slurm"
        if "SLURM_JOB_NODELIST" not in environment:
            raise LaunchError("--launcher slurm: this is no SLURM allocation. Remedy: run it in salloc or sbatch.")
        hosts = slurm_hosts(environment, asked)
        if args.nproc_per_node == "auto":
            hosts = [Host(host.name, host.slots or (0,)) for host in hosts]
    elif launcher in (None, "local"):
        return "local", _own_host(args, environment)
    else:
        raise LaunchError(f"--launcher {launcher}: no hosts are given. Remedy: give --hostfile.")
    hosts, spares = select(hosts, args.include, args.exclude), args.spares or 0
    count = None if args.num_nodes is None else args.num_nodes + spares
    hosts = limit_slots(first_hosts(hosts, count, args.min_nodes), asked)
    _check_spares(hosts, spares)
    return launcher, hosts


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
    inside = environment.get("SLURM_STEP_ID", "").isdigit() and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    return "SLURM_JOB_NODELIST" in environment and not inside


def _own_host(args: argparse.Namespace, environment: Mapping[str, str]) -> list[Host]:
    from .hosts import Host, limit_slots, select

    if args.spares:
        raise LaunchError(
            f"--spares {args.spares}: no hosts are given to be in reserve. Remedy: --spares 0, or --hostfile."
        )
    if args.num_nodes not in (None, 1) and not by_hand(args):
        raise LaunchError(f"--num-nodes {args.num_nodes}: no hosts are given. Remedy: give --hostfile, or run in SLURM.")
    if not args.include and not args.exclude:
        return [Host("localhost", tuple(range(count_workers(args.nproc_per_node, environment))))]
    from .facts import visible_gpus

    asked = args.nproc_per_node if isinstance(args.nproc_per_node, int) else None
    hosts = [Host("localhost", tuple(range(max(1, visible_gpus(environment)))))]
    return limit_slots(select(hosts, args.include, args.exclude), asked)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(f"--hostfile {path}: {reason}. Remedy: give a file with a line for each host.") from None


def count_workers(asked: int | str, environment: Mapping[str, str]) -> int:
    from .facts import usable_cores, visible_gpus

    if isinstance(asked, int):
        return asked
    if asked == "cpu":
        return len(usable_cores())
    gpus = visible_gpus(environment)
    if asked == "gpu" and gpus == 0:
        raise LaunchError("--nproc-per-node gpu: no GPU is visible here. Remedy: give a number, or cpu.")
    return max(1, gpus)


def make_request(
    args: argparse.Namespace, launcher: str, hosts: Sequence[Host], environment: Mapping[str, str]
) -> LaunchRequest:
    """Decide every default from the machine and ``environment``."""
    from .job_plan import INTERFACE_NAMES, LaunchRequest, ProgramKind, exported

    inherited = environment.get("OMP_NUM_THREADS", "")
    named = own_names() if launcher in ("local", "ssh") and not args.force_multi else set()
    local = tuple(host.name for host in hosts if host.name.lower() in named)
    several = len(local) < len(hosts)
    exports = read_exports(args.export, environment, files=several)
    here = {name: environment[name] for name in INTERFACE_NAMES if name in environment}
    return LaunchRequest(
        target=args.target,
        target_args=tuple(args.target_args),
        kind=ProgramKind.MODULE if args.module else ProgramKind.PROGRAM if args.no_python else ProgramKind.SCRIPT,
        hosts=tuple(hosts),
        python=args.python or sys.executable,
        omp_threads=args.omp_threads or (int(inherited) if inherited.isdecimal() else None),
        pass_local_rank=args.local_rank_arg,
        terminal_columns=shutil.get_terminal_size().columns if _stderr_is_terminal() else None,
        bind_cores=args.bind_cores or args.bind_core_list is not None,
        core_list=args.bind_core_list,
        exports={**(exported(environment) if several else here), **exports},
        visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
        local_names=local,
        restarts=args.max_restarts,
        spares=args.spares or 0,
    )


def _stderr_is_terminal() -> bool:
    try:
        return os.isatty(2)
    except OSError:  # it is closed
        return False


def read_exports(named: Sequence[tuple[str, str | None]], environment: Mapping[str, str], *, files: bool) -> dict[str, str]:
    """Return the variables of --export and, with ``files``, of ``.deepspeed_env`` and ``.zerorun_env``; --export wins."""
    found: dict[str, str] = {}
    for folder in (Path.home(), Path.cwd()) if files else ():
        for name in (environment.get("DS_ENV_FILE", _ENV_FILES[0]), *_ENV_FILES[1:]):
            if (folder / name).is_file():
                found.update(_parse_env_file(folder / name))
    for name, value in named:
        if value is None and name not in environment:
            raise LaunchError(f"--export {name}: there is no such variable here. Remedy: --export {name}=VALUE.")
        found[name] = environment[name] if value is None else value
    return found


def _parse_env_file(path: Path) -> dict[str, str]:
    """Parse lines NAME=VALUE. Quotes around a value are removed, nothing else; blank lines and comments are skipped."""
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise LaunchError(f"{path}, line {number}: expected NAME=VALUE. Remedy: mend it or make it a comment.")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[name] = value[1:-1] if quoted else value
    return found


def config_argument(script_args: Sequence[str]) -> str | None:
    """The ``.json`` file among the script's arguments that looks like a zerorun or DeepSpeed configuration."""
    for index, arg in enumerate(script_args):
        name, equals, value = arg.partition("=")
        if name in _CONFIG_OPTIONS:
            value = value if equals else next(iter(script_args[index + 1 : index + 2]), "")
            if value.endswith(".json"):
                return value
    return None


def check_config(script_args: Sequence[str]) -> None:
    """Refuse a configuration that cannot work: once, before the start, instead of later on every rank."""
    path = config_argument(script_args)
    if path is None:
        return
    if not os.path.isfile(path):
        raise LaunchError(f"configuration file not found: {path}")
    from zerorun.config import load_config  # here, so that --help does not pay for it

    load_config(path)


if __name__ == "__main__":
    sys.exit(main())
