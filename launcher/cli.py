"""The ``zerorun`` command: ``zerorun [options] script.py [script args...]``.

Reads the command line and the machine (devices, cores, terminal, a free port), makes a plan and has it run. It knows
this machine only. More hosts need, besides their options here, a step between the plan and the supervisor that starts
one supervisor per host; neither of the two has to change for that.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerorun.errors import ConfigError, LaunchError

from .plan import LaunchRequest, Target, build_plan, render_json, render_text

USAGE_STATUS = 2  # the job was refused before a worker was started
_CONFIG_OPTIONS = ("--config", "--deepspeed_config", "--deepspeed-config")

_EPILOG = """\
Options after the script are the script's own and reach it unchanged.
exit status: that of the worker that failed first (128 + n if signal n ended it); 0 if all ended well;
2 if nothing was started.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit status."""
    parser = build_parser()
    args = parse_args(parser, sys.argv[1:] if argv is None else argv)
    try:
        return _launch(args)
    except (LaunchError, ConfigError) as error:
        print(f"zerorun: error: {error}\nNo worker is running.", file=sys.stderr)
        return USAGE_STATUS


def _launch(args: argparse.Namespace) -> int:
    if not args.no_config_check:
        check_config(args.target_args)
    from .supervisor import Supervisor, reserve_port  # here, so that --help does not pay for it

    with reserve_port(args.master_port) as port:
        plan = build_plan(make_request(args, port, os.environ))
        if args.dry_run is not None:
            print(render_json(plan) if args.dry_run == "json" else render_text(plan))
            return 0
        return Supervisor(plan, grace=args.grace, log_dir=args.log_dir).run()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zerorun",
        usage="zerorun [options] script.py [script args...]",
        description="Start one worker per device on this machine and see them through.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add(parser, "--nproc-per-node", "--nproc", "--num-gpus", type=_worker_count, default="auto", metavar="N",
         help="workers: a number, gpu (visible GPUs), cpu (usable cores) or auto (visible GPUs, else 1; the default)")
    _add(parser, "-m", "--module", action="store_true", help="the script is a module name, as in python -m")
    _add(parser, "--no-python", action="store_true", help="the script is a program to be run without Python")
    _add(parser, "--master-addr", default="127.0.0.1", metavar="ADDR", help="rendezvous address (default: 127.0.0.1)")
    _add(parser, "--master-port", type=_port, metavar="PORT", help="rendezvous port (default: a free one)")
    _add(parser, "--omp-threads", type=_positive, metavar="N",
         help="OMP_NUM_THREADS of each worker (default: as in the environment, else cores / workers)")
    _add(parser, "--local-rank-arg", action="store_true", help="give the script --local_rank=N, as deepspeed does")
    _add(parser, "--log-dir", type=Path, metavar="DIR", help="also append each stream to DIR/rankN.{stdout,stderr}.log")
    _add(parser, "--grace", type=_seconds, default=5.0, metavar="SECONDS",
         help="time between a request to end and SIGKILL (default: 5); raise it for scripts that save on SIGTERM")
    _add(parser, "--no-config-check", action="store_true",
         help="do not check the .json file that the script gets by --config or --deepspeed_config")
    _add(parser, "--dry-run", dest="dry_run", action="store_const", const="text", help="print the plan; start nothing")
    _add(parser, "--dry-run=json", dest="dry_run", action="store_const", const="json", help="the same as JSON")
    parser.add_argument("--version", action="version", version=f"zerorun {_version()}")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add(parser: argparse.ArgumentParser, *names: str, **options: Any) -> None:
    """Add an option; each long name is also understood with underscores, which --help does not repeat."""
    action = parser.add_argument(*names, **options)
    twins = ["--" + name[2:].replace("-", "_") for name in names if "-" in name[2:]]
    if twins:
        hidden = {**options, "dest": action.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        parser.add_argument(*twins, **hidden)


def parse_args(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """``argv`` as a namespace with ``target`` and ``target_args``; exits with status 2 if it cannot be understood."""
    args, unknown = parser.parse_known_args(list(argv))
    if unknown:
        parser.error(
            f"unknown option {unknown[0]}. This version starts workers on this machine only; options of the script "
            "belong after the script."
        )
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no script given")
    if args.module and args.no_python:
        parser.error("--module and --no-python exclude each other")
    args.target, *args.target_args = command
    if not args.module and not args.no_python and not os.path.exists(args.target):
        parser.error(f"script not found: {args.target}")
    return args


def _version() -> str:
    import zerorun

    return zerorun.__version__


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _port(text: str) -> int | None:
    """A port; 0, as everywhere, asks for any free one."""
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


def visible_gpus(environment: Mapping[str, str]) -> int:
    """How many GPUs a worker will see: what CUDA_VISIBLE_DEVICES allows, else the device files."""
    allowed = environment.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return len(glob.glob("/dev/nvidia[0-9]*"))
    names = [name.strip() for name in allowed.split(",")]
    return next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # CUDA stops there too


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def count_workers(asked: int | str, environment: Mapping[str, str]) -> int:
    if isinstance(asked, int):
        return asked
    if asked == "cpu":
        return usable_cores()
    gpus = visible_gpus(environment)
    if asked == "gpu" and gpus == 0:
        raise LaunchError("--nproc-per-node gpu: no GPU is visible here. Remedy: give a number, or cpu.")
    return max(1, gpus)


def make_request(args: argparse.Namespace, port: int, environment: Mapping[str, str]) -> LaunchRequest:
    """Decide every default from the machine and ``environment``."""
    nproc = count_workers(args.nproc_per_node, environment)
    inherited = environment.get("OMP_NUM_THREADS", "")
    threads = args.omp_threads or (int(inherited) if inherited.isdecimal() else max(1, usable_cores() // nproc))
    kind = Target.MODULE if args.module else Target.PROGRAM if args.no_python else Target.SCRIPT
    return LaunchRequest(
        target=args.target,
        target_args=tuple(args.target_args),
        kind=kind,
        nproc=nproc,
        master_addr=args.master_addr,
        master_port=port,
        python=sys.executable,
        omp_threads=threads,
        pass_local_rank=args.local_rank_arg,
        terminal_columns=shutil.get_terminal_size().columns if sys.stderr.isatty() else None,
    )


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
    """Refuse a configuration that cannot work now, once, and not later on every rank."""
    path = config_argument(script_args)
    if path is None:
        return
    if not os.path.isfile(path):
        raise LaunchError(f"configuration file not found: {path}")
    from zerorun.config import load_config  # here, so that --help does not pay for it

    load_config(path)


if __name__ == "__main__":
    sys.exit(main())
