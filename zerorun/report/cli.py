"""The ``zerorun-report`` command: asks the hosts, makes the live check, says what it found."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import zerorun
from zerorun.launcher.agent_commands import CARRIERS
from zerorun.launcher.chosen_hosts import choose_hosts, in_allocation, own_names
from zerorun.launcher.cli import carrier_options
from zerorun.launcher.hosts import Host, limit_slots
from zerorun.launcher.options import build_parser as launcher_parser
from zerorun.launcher.options import parse_args
from zerorun.launcher.this_host import visible_gpus
from zerorun.log import command_parser, counted, end_as_by_ctrl_c, positive, run_command

from . import collect, findings, live_check, page
from .finding import NOTE, Finding

CANNOT_TRAIN = 2
RANKS_WITHOUT_GPU = 2
MOST_SECONDS = 540  # of the live check: its workers end themselves a little later
FORMAT = 1  # of what --json prints
_REACH = ("launcher", "launcher-args", "ssh-port", "master-addr", "python")  # options of how hosts are reached

_EPILOG = """\
exit status: 0 can train (there may be notes); 1 can train, but something deserves a look (warnings); 2 cannot train
(errors), or the command could not be understood. Nothing is left running, and nothing hangs: what does not answer is a
finding.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit status."""
    args = build_parser().parse_args(argv)
    end_as_by_ctrl_c()  # so that what was started is ended, as after Ctrl-C
    return run_command("zerorun-report", CANNOT_TRAIN, partial(_run, args))


def _run(args: argparse.Namespace) -> tuple[int, Iterable[str]]:
    report, found = make_report(args, os.environ)
    text = json.dumps(report, indent=2) if args.json else page.render(report, found)
    return int(report["verdict"]["status"]), text.splitlines()


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "zerorun-report",
        "Say on one page whether this machine, or the hosts given, can train: what they are, what differs "
        "between them, and a live check of every collective.",
        _EPILOG,
    )
    add = parser.add_argument
    add("-H", "--hostfile", metavar="FILE", help="lines such as: node1 slots=8 (user=NAME port=N); # comments")
    add("-i", "--include", default="", metavar="FILTER", help="only these hosts and slots: node1@node2:0,2")
    add("-e", "--exclude", default="", metavar="FILTER", help="all but these hosts and slots")
    add("--num-nodes", type=positive, metavar="N", help="the first N hosts")
    add("--nproc-per-node", type=positive, metavar="N", help="ranks of a host (default: its slots; GPUs, else 2, here)")
    add("--launcher", choices=("local", *CARRIERS), help="how to reach hosts (default: as the zerorun command)")
    add("--launcher-args", default="", metavar="ARGS", help="more arguments for ssh, srun, pdsh or mpirun")
    add("--ssh-port", type=positive, metavar="PORT", help="port of the hosts' ssh servers")
    add("--master-addr", metavar="ADDR", help="rendezvous address (default: the first host's own)")
    add("--python", metavar="PATH", help="Python on the other hosts (default: the path of this one)")
    add("--quick", action="store_true", help="small messages only")
    add("--no-live", action="store_true", help="facts only, no live check")
    add("--time-limit", type=_seconds, default=live_check.TIME_LIMIT_SECONDS, metavar="SECONDS",
        help=f"for the whole live check (default: {live_check.TIME_LIMIT_SECONDS:.0f})")  # fmt: skip
    add("--json", action="store_true", help="everything as one JSON object")
    add("--version", action="version", version=f"zerorun {zerorun.__version__}")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to {MOST_SECONDS}")
    return seconds


# -- the report --------------------------------------------------------------------------------------------------------


def make_report(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[dict[str, Any], list[Finding]]:
    """Everything that --json prints, and the findings in it. Raises LaunchError for hosts that cannot be meant."""
    begun = time.time()
    launcher, hosts = _choose(args, environment)
    answers = collect.collect([(host.name, _command(args, launcher, host)) for host in hosts])
    able = set(findings.able(answers, zerorun.__version__))
    fit = [host for host in hosts if host.name in able]
    made = None if args.no_live or not fit else _make_live(args, launcher, fit)
    measured = None if made is None else made.as_json()
    found = findings.find(answers, measured)
    if args.no_live:
        found.append(Finding(NOTE, "", "no live check was made (--no-live)"))
    status, line = page.verdict(found, _summary(hosts, measured))
    report = {
        "format": FORMAT,
        "verdict": {"status": status, "line": line},
        "findings": [asdict(finding) for finding in found],
        "begun": begun,
        "seconds": round(time.time() - begun, 2),
        "launcher": launcher,
        "hosts": answers,
        "live": measured,
    }
    return report, found


def _summary(hosts: Sequence[Host], measured: Mapping[str, Any] | None) -> str:
    where = counted(len(hosts), "host")
    return where if measured is None else f"{where}, {counted(measured['world_size'], 'rank')}, every result right"


def _choose(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, list[Host]]:
    """(how to reach them, the hosts with their slots), as the launcher would choose."""
    options = _launcher_options(args, ("hostfile", "include", "exclude", "num-nodes", "nproc-per-node", *_REACH))
    wish = parse_args(launcher_parser(), [*options, "-m", "zerorun.report.live_worker"])
    alone = args.hostfile is None and args.launcher in (None, "local") and not in_allocation(environment)
    if alone and not (args.nproc_per_node or args.include or args.exclude):
        wish.nproc_per_node = visible_gpus(environment) or RANKS_WITHOUT_GPU
    launcher, hosts = choose_hosts(wish, environment)
    return launcher, limit_slots(hosts, None)


def _launcher_options(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that the user gave, as the launcher takes them."""
    given = {name: getattr(args, name.replace("-", "_")) for name in names}
    return [f"--{name}={value}" for name, value in given.items() if value]


def _command(args: argparse.Namespace, launcher: str, host: Host) -> Sequence[str]:
    """What runs ``zerorun.report.host_facts`` on ``host``."""
    own = launcher == "local" or (launcher == "ssh" and host.name.lower() in own_names())
    if own:
        return [sys.executable, "-m", "zerorun.report.host_facts"]
    return CARRIERS[launcher](host, carrier_options(args, module="zerorun.report.host_facts"))


def _make_live(args: argparse.Namespace, launcher: str, hosts: Sequence[Host]) -> live_check.Live:
    options = _launcher_options(args, [name for name in _REACH if name != "launcher"])
    command = [sys.executable, "-m", "zerorun.launcher.cli", f"--launcher={launcher}", *options]
    return live_check.run_live(hosts, command, several=launcher != "local", quick=args.quick, seconds=args.time_limit)


if __name__ == "__main__":
    sys.exit(main())
