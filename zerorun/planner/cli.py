"""The ``zerorun-plan`` command: the fastest configuration, how long it takes and what it costs, before there are GPUs."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from zerorun.errors import ConfigError, ConfigProblem
from zerorun.log import above_zero, amount, command_parser, counted, positive, run_command

from .answer import RunPlan, plan_run
from .calibration import fitted
from .candidate import PRECISIONS, KernelGeneration
from .comparison import compared
from .hardware import GB, cluster_of
from .published_runs import published_runs
from .search import Goal

FAILED = 2
_DESCRIPTION = """\
Find the fastest configuration of a model on a cluster that fits into memory:
its JSON file, the time of a step and what it goes into, days and GPU-hours.
"""
_EPILOG = """\
MODEL is a config.json of Hugging Face. GPUs: 384xH100.

exit status: 0 done. 2 the command could not be understood or carried out, or
nothing fits.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit status."""
    args = build_parser().parse_args(argv)
    return run_command("zerorun-plan", FAILED, partial(_run, args))


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("zerorun-plan", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add("--model", metavar="FILE", help="the model's config.json")
    add("--gpus", metavar="NxGPU", help="such as 384xH100")
    longest = "tokens of a sequence (default: 4096, or as many as the model has positions for)"
    add("--sequence", type=positive, metavar="N", help=longest)
    add("--batch", type=positive, default=0, metavar="N", help="sequences of a step (default: about 4M tokens)")
    add("--tokens", type=amount, default=0.0, metavar="N", help="tokens of the whole run, such as 1e12")
    add("--precision", choices=PRECISIONS, default="bf16", help="of weights and activations (default: bf16)")
    add("--compile", action="store_true", help="blocks are compiled")
    add("--no-offload", action="store_true", help="keep optimizer states on the GPUs")
    add("--disk", type=amount, default=0.0, metavar="GBS", help="gigabytes per second of a node's disks, for states")
    add("--host-memory", type=above_zero, metavar="GB", help="gigabytes of host memory of a node (default: 2000)")
    add("--nics", type=above_zero, metavar="GBPS", help="gigabits per second of all network cards of a node")
    add("--gpus-per-node", type=positive, default=8, metavar="N", help="default: 8")
    add("--days", type=amount, default=0.0, metavar="N", help="say how many GPUs are done with --tokens in so many days")
    add("--price", type=amount, default=0.0, metavar="N", help="of a GPU-hour")
    add(
        "--failure-hours",
        type=above_zero,
        default=Goal.failure_hours,
        metavar="N",
        help="GPU-hours between failures (50700)",
    )
    add("--compare", metavar="FILE", help="a configuration to compare the best one with")
    add("--write", metavar="FILE", help="write the configuration")
    add("--picture", metavar="FILE", help="draw a step and its memory (.svg or .png)")
    add("--json", action="store_true", help="print all figures as JSON")
    add("--calibrate", action="store_true", help="measure this machine, for --gpus Nxlocal")
    add("--ranks", type=positive, default=1, metavar="N", help="that measure at once: as many as will train on CPUs")
    add("--predict", metavar="FILE", help="a table of runs (CSV) whose speed is to be predicted")
    add("--out", metavar="FILE", help="for the predictions (CSV: id,tokens_per_s_gpu)")
    return parser


def _run(args: argparse.Namespace) -> tuple[int, Iterable[str]]:
    if args.calibrate:
        from .this_machine import calibrate  # which imports torch

        return 0, calibrate(args.ranks)
    needed = ("predict", "out") if args.predict or args.out else ("model", "gpus")
    missing = [key for key in needed if getattr(args, key) is None]
    if missing:
        reason = "is needed."
        raise ConfigError([ConfigProblem(f"--{key}", None, reason, "see --help.") for key in missing], "arguments")
    _refuse_idle(args)
    if args.predict:
        return 0, [_predict(args.predict, args.out)]
    goal = {
        "batch": args.batch,
        "precision": args.precision,
        "kernels": KernelGeneration.FUSED if args.compile else KernelGeneration.FLASH,
        "offload": not args.no_offload,
        "tokens": args.tokens,
        "price": args.price,
        "days": args.days,
        "failure_hours": args.failure_hours,
    }
    if args.sequence is not None:
        goal["sequence"] = args.sequence
    cluster = cluster_of(args.gpus, nics_gbps=args.nics, per_node=args.gpus_per_node, host_gigabytes=args.host_memory)
    plan = plan_run(args.model, replace(cluster, disk=args.disk * GB), goal)
    comparison = compared(args.compare, plan) if args.compare else None  # which may refuse, before anything is written
    if args.write:
        Path(args.write).write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
    if args.picture:
        from .memory_picture import draw_plan  # which imports matplotlib

        draw_plan(plan, args.picture)
    if args.json:
        beside = {} if comparison is None else {"comparison": comparison.as_json()}
        return 0, json.dumps({**plan.as_json(), **beside}, indent=2).splitlines()
    return 0, [*plan.page(), *(comparison.page() if comparison is not None else ()), *_configuration(args, plan)]


def _refuse_idle(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that would say nothing without another one."""
    problems = []
    for key, value in (("--days", args.days), ("--price", args.price)):
        if value and not args.tokens:
            reason = "it is about the whole run, and nothing says how long that is."
            problems.append(ConfigProblem(key, value, reason, "Give --tokens, too, such as 1e12."))
    if args.ranks != 1:
        problems.append(ConfigProblem("--ranks", args.ranks, "only --calibrate measures.", "Leave it out, or add that."))
    if problems:
        raise ConfigError(problems, "arguments")


def _configuration(args: argparse.Namespace, plan: RunPlan) -> Iterator[str]:
    if args.write:
        yield f"the configuration is in {args.write}"
    else:
        yield json.dumps(plan.config)


def _predict(path: str, out: str) -> str:
    """Write the predicted tokens per second and GPU of each run of ``path``. Return what was done."""
    rows = [(run.id, f"{run.predicted(fitted()):.6g}") for run in published_runs(path)]
    with open(out, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "tokens_per_s_gpu"))
        writer.writerows(rows)
    return f"{counted(len(rows), 'run')} of {path}: predictions are in {out}"


if __name__ == "__main__":
    sys.exit(main())
