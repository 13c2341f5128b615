"""The ``zerorun`` command: ``zerorun [options] script.py [script args...]``.

Makes a request of the command line (options.py), the hosts (chosen_hosts.py) and the machine, and has a job run it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerorun.errors import ConfigError, LaunchError

from .options import VERIFY_CODES, VERIFY_MODULE, build_parser, parse_args

if TYPE_CHECKING:
    from .agent_commands import CarrierOptions
    from .dump import RankState
    from .hosts import Host
    from .job_plan import JobOptions, LaunchRequest

USAGE_STATUS = 2  # the job was refused before a worker was started
_MODE, _OFF = "ZERORUN_AS_DEEPSPEED", ("", "0", "false", "no", "off")
# Keys of which a configuration has one. A file of the script's own has none of them, whatever else it has.
_TELLING = frozenset(("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"))
_CONFIG_OPTIONS = ("--config", "--deepspeed_config", "--deepspeed-config")
_ENV_FILES = (".deepspeed_env", ".zerorun_env")  # in the home directory, then in the current one; later ones win


def main(argv: Sequence[str] | None = None, **defaults: Any) -> int:
    """Run the command line ``argv`` and return the exit status. ``defaults``: of options, by their ``dest``."""
    if None in (sys.stdin, sys.stdout, sys.stderr):  # they were closed when Python began
        from zerorun.log import open_standard_streams

        open_standard_streams()
    parser = build_parser()
    parser.set_defaults(**defaults)
    try:
        args = parse_args(parser, sys.argv[1:] if argv is None else argv, os.environ)
    except BrokenPipeError:  # nobody reads --help, which Python tells before 3.11.4
        return 0
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
        check_config(args.target_args, in_mode=in_deepspeed_mode(args, os.environ))
    from .chosen_hosts import (
        by_hand,
        by_hand_with_hostfile,
        check_worker_word,
        choose_hosts,
        in_allocation,
        other_launchers,
    )

    if args.no_ssh and args.hostfile is not None:
        args = by_hand_with_hostfile(args)
    if args.sbatch:
        if not args.standalone:
            check_worker_word(args.nproc_per_node, gpus_are_known=True)  # in the job, SLURM tells them
        return _submit(args)
    from .agent_commands import CARRIERS  # here, so that --help does not pay for it
    from .job import Job
    from .sbatch import REQUEUE_STATUS, requeue

    launcher, hosts = choose_hosts(args, os.environ)
    is_meant = args.standalone or by_hand(args)
    if launcher == "local" and not is_meant and (warning := other_launchers(os.environ)):
        print(f"[zerorun] warning: {warning}", file=sys.stderr, flush=True)
    if args.spares and not args.max_restarts:
        what = f"--spares {args.spares} without --max-restarts: a host that is lost after the start ends the job"
        print(f"[zerorun] warning: {what}. Remedy: --max-restarts N.", file=sys.stderr, flush=True)
    request = make_request(args, launcher, hosts, os.environ)
    _refuse_to_show_nothing(args.local_ranks_filter, request)
    options = carrier_options(args)

    def carrier(host: Host) -> Sequence[str] | None:
        return None if host.name in request.local_names else CARRIERS[launcher](host, options)

    if args.dry_run is not None:
        carriers = {host.name: list(command) for host in hosts if (command := carrier(host)) is not None}
        print(_dry_run(args, request, carriers))
        return 0
    job_options = _job_options(args, carrier)
    if by_hand(args):
        return _by_hand(args, request, job_options)
    status = Job(request, job_options).run()
    if status == REQUEUE_STATUS and in_allocation(os.environ):
        print("[zerorun] requeueing this job", file=sys.stderr, flush=True)  # now: SLURM may end this process next
        problem = requeue(os.environ)
        if problem is not None:
            print(f"[zerorun] not requeued: {problem}", file=sys.stderr)
    return status


def _refuse_to_show_nothing(local_ranks: frozenset[int] | None, request: LaunchRequest) -> None:
    """Raise LaunchError if only the output of ``local_ranks`` is to be shown, and no host has any of them."""
    most = max((len(host.slots or ()) for host in request.hosts), default=0)
    if most and local_ranks is not None and min(local_ranks) >= most:
        asked = ",".join(map(str, sorted(local_ranks)))
        raise LaunchError(
            f"--local-ranks-filter {asked}: no host has such a rank, so that no output would be shown. Remedy: numbers "
            f"below {most}, which ranks have on each host."
        )


def _job_options(args: argparse.Namespace, carrier: Callable[[Host], Sequence[str] | None]) -> JobOptions:
    from .chosen_hosts import by_hand
    from .job_plan import JobOptions
    from .sbatch import is_batch_job

    return JobOptions(
        carrier=carrier,
        master_addr=args.master_addr,
        master_port=args.master_port,
        grace=args.grace,
        log_dir=args.log_dir,
        max_restarts=args.max_restarts,
        min_nodes=args.min_nodes,
        keep_warm=args.spares is not None,
        has_queue=is_batch_job(os.environ) and not by_hand(args),
        shown=args.shown,
        shown_local_ranks=args.local_ranks_filter,
    )


def carrier_options(args: argparse.Namespace, **module: Any) -> CarrierOptions:
    """How hosts are reached. ``module``: what runs there, and with which arguments, if it is not the agent."""
    from .agent_commands import CarrierOptions

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

    from .agent_commands import CARRIERS
    from .chosen_hosts import choose_hosts, own_names
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
    from .job_plan import Rendezvous, build_plan, lack_of_cores, on_one_host, render_json, render_text
    from .rendezvous import refuse_all
    from .this_host import reserve_port, usable_cores

    render = render_json if args.dry_run == "json" else render_text
    name = request.hosts[0].name
    cores = {name: usable_cores()} if not carriers else {}
    counts = {host.name: len(host.slots or ()) for host in request.hosts}
    problems = [lack_of_cores(request, host, count, cores.get(host, ())) for host, count in counts.items()]
    refuse_all([problem for problem in problems if problem])
    if carriers:
        plan = build_plan(request, Rendezvous(args.master_addr or name, args.master_port or "(a free one)"))
        return render(plan, carriers)
    with reserve_port(args.master_port) as port:
        meeting = on_one_host(name, args.master_addr, port)
        return render(build_plan(request, meeting, cores=cores))


def _by_hand(args: argparse.Namespace, request: LaunchRequest, options: JobOptions) -> int:
    from dataclasses import replace

    from .job import Job
    from .manual_launch import JOIN_SECONDS, LeadingJob, join
    from .secret import guests_secret, leaders_secret

    address, _, port_text = (args.rdzv_endpoint or "").rpartition(":")
    address, port = args.master_addr or address, args.master_port or int(port_text or 29500)
    count = args.num_nodes or 1
    if args.node_rank is not None and args.node_rank >= count:
        nodes = "1 node" if count == 1 else f"{count} nodes"
        raise LaunchError(f"--node-rank {args.node_rank} of {nodes}: they are counted from 0. Remedy: see --nnodes.")
    if count == 1:  # no other host will join
        return Job(request, replace(options, master_addr=address or None)).run()
    if args.spares is not None:
        raise LaunchError(
            f"--spares {args.spares}: hosts that join by themselves are not kept in reserve. Remedy: a hostfile."
        )
    if not address:
        raise LaunchError(f"--node-rank {args.node_rank}: where is node 0? Remedy: give --master-addr and --master-port.")
    leads = args.node_rank == 0 or (args.node_rank is None and _is_own(address))
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
    script = batch_script(command, name=stem, nodes=(args.num_nodes or 1) + (args.spares or 0), options=options)
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


def make_request(
    args: argparse.Namespace, launcher: str, hosts: Sequence[Host], environment: Mapping[str, str]
) -> LaunchRequest:
    """Decide every default from the machine and ``environment``."""
    from zerorun.watch.launch_environment import INTERFACE_NAMES, without_choices

    from .chosen_hosts import own_names
    from .job_plan import DEVICES_NAME, THREADS_NAME, LaunchRequest, ProgramKind, check_devices, exported
    from .this_host import trains_on_cpu

    environment = without_choices(environment)
    named = own_names() if launcher in ("local", "ssh") and not args.force_multi else set()
    local = tuple(host.name for host in hosts if host.name.lower() in named)
    several = len(local) < len(hosts)
    exports = read_exports(args.export, environment, files=several)
    here = {name: environment[name] for name in INTERFACE_NAMES if name in environment}
    request = LaunchRequest(
        target=args.target,
        target_args=tuple(args.target_args),
        kind=ProgramKind.MODULE if args.module else ProgramKind.PROGRAM if args.no_python else ProgramKind.SCRIPT,
        hosts=tuple(hosts),
        python=args.python or sys.executable,
        omp_threads=str(args.omp_threads or exports.get(THREADS_NAME, environment.get(THREADS_NAME, ""))) or None,
        pass_local_rank=_passes_local_rank(args, environment),
        terminal_columns=shutil.get_terminal_size().columns if _stderr_is_terminal() else None,
        bind_cores=args.bind_cores or args.bind_core_list is not None,
        core_list=args.bind_core_list,
        exports={**(exported(environment) if several else here), **exports},
        slots_are_devices=args.nproc_per_node != "cpu" and not trains_on_cpu({**environment, **exports}),
        visible_devices=environment.get(DEVICES_NAME),
        local_names=local,
        restarts=args.max_restarts,
        spares=args.spares or 0,
        job_id=args.rdzv_id,
        role=args.role,
        told_codes=VERIFY_CODES if args.module and args.target == VERIFY_MODULE else (),
    )
    check_devices(request)
    return request


def in_deepspeed_mode(args: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Return True if ``import deepspeed`` gives zerorun in the workers."""
    told = dict(args.export).get(_MODE) or environment.get(_MODE, "")
    return told.strip().lower() not in _OFF


def _passes_local_rank(args: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Return True if the script gets --local_rank=N. In the mode it does if it has the option: others would refuse it."""
    if args.local_rank_arg is not None or not in_deepspeed_mode(args, environment):
        return bool(args.local_rank_arg)
    path = Path(f"{args.target.replace('.', '/')}.py") if args.module else Path(args.target)
    return path.is_file() and re.search(rb"[\"']--local_rank\b", path.read_bytes()) is not None


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
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise LaunchError(f"{path}: {reason}. Remedy: lines NAME=VALUE in UTF-8, or another name for the file.") from None
    for number, line in enumerate(content.splitlines(), 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise LaunchError(f"{path}, line {number}: expected NAME=VALUE. Remedy: mend it or make it a comment.")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[name] = value[1:-1] if quoted else value
    return found


def config_argument(script_args: Sequence[str]) -> tuple[str, str] | None:
    """The option and the ``.json`` file, among the script's arguments, that look like a configuration of zerorun's."""
    for index, arg in enumerate(script_args):
        name, equals, value = arg.partition("=")
        if name in _CONFIG_OPTIONS:
            value = value if equals else next(iter(script_args[index + 1 : index + 2]), "")
            if value.endswith(".json"):
                return name, value
    return None


def check_config(script_args: Sequence[str], *, in_mode: bool) -> None:
    """Refuse a configuration that cannot work: once, before the start, instead of later on every rank.

    What the script may replace is not looked at, such as the section ``optimizer``; ``in_mode``, nor is what DeepSpeed
    ignores.
    """
    found = config_argument(script_args)
    if found is None:
        return
    option, path = found
    after = "\nRemedy: as said there, or --no-config-check if the script does with the file as it should."
    if not os.path.isfile(path):
        raise LaunchError(f"configuration file not found: {path}. Remedy: mend the path, or use --no-config-check.")
    from zerorun.config import load_config  # here, so that --help does not pay for it
    from zerorun.config.deepspeed_leniency import as_deepspeed_reads
    from zerorun.config.source import read_source

    try:
        raw, _ = read_source(path)
        if option == "--config" and not _TELLING.intersection(raw):  # many scripts have another kind of file there
            return
        load_config(as_deepspeed_reads(raw) if in_mode else path, optimizer_given=True, scheduler_given=True)
    except ConfigError as error:
        raise LaunchError(f"{ConfigError(error.problems, path)}{after}") from None


if __name__ == "__main__":
    sys.exit(main())
