"""The ``zerorun-plan`` command: how long a training step takes, before there is a cluster."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Sequence
from functools import partial

from zerorun.log import counted, run_command

from .calibration import fitted
from .published import published_runs

FAILED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit status."""
    args = build_parser().parse_args(argv)
    return run_command("zerorun-plan", FAILED, partial(_run, args))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zerorun-plan",
        description="Predict how fast a model trains on a cluster.",
        epilog="exit status: 0 done. 2 the command could not be understood or carried out.",
        allow_abbrev=False,
    )
    parser.add_argument("--predict", metavar="FILE", required=True, help="a table of runs (CSV); see docs/planning.md")
    parser.add_argument("--out", metavar="FILE", required=True, help="for the predictions (CSV: id,tokens_per_s_gpu)")
    return parser


def _run(args: argparse.Namespace) -> tuple[int, Iterable[str]]:
    return 0, [_predict(args.predict, args.out)]


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
