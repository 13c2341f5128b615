"""The ``zerorun-schedule`` command: simulates pipeline schedules, prints their numbers and draws them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import zerorun
from zerorun.errors import ScheduleError
from zerorun.log import command_parser, positive, run_command

from .schedule.actions import FORWARD_ONLY, PipelineSchedule
from .schedule.formulas import bubble, why_inexact
from .schedule.schedules import INTERLEAVED, SCHEDULES, ZERO_BUBBLE, make_schedule
from .schedule.simulate import Report, simulate
from .schedule.timeline import Panel, check_drawable, draw
from .schedule.times import Times
from .schedule.trace import read_trace

FAILED = 2
_SHOWN_RANKS = 16  # rows of each table; the middle ranks are left out
_TRAINING = [kind for kind in SCHEDULES if kind != FORWARD_ONLY]

_DESCRIPTION = """\
Simulate a pipeline schedule: how long a step takes, how long ranks wait, how
many micro-batches they keep. Draw it, compare it with other schedules, or with
what a run measured.
"""
_EPILOG = """\
Times are of one micro-batch on one stage: one number for all stages, or numbers
with commas for each. Their unit is yours; that of a trace is seconds.

bubble: how long a rank waits, from the first start to the last end (mean over
the ranks); formula: the same by the closed formula, for equal stages and
messages that take no time. kept: most micro-batches whose activations a rank
keeps until their weight gradient; whole: until their input gradient.

exit status: 0 done. 2 the command could not be understood or carried out.
"""


@dataclass(frozen=True)
class Case:
    """One run and the numbers shown for it. ``formula``: the bubble by the closed formula; None if none applies."""

    kind: str
    label: str
    chunks: int
    report: Report
    formula: float | None
    why_inexact: str | None  # why the formula may differ from the simulation, or does not apply
    work: float  # mean time that a rank computes in a step

    @property
    def percent(self) -> float:
        """The bubble, in % of the makespan."""
        return 100 * (1 - self.report.efficiency)

    @property
    def formula_percent(self) -> float | None:
        """The formula's bubble, in % of the makespan by the formula."""
        return None if self.formula is None else 100 * self.formula / (self.formula + self.work or 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` and return the exit status."""
    args = build_parser().parse_args(argv)
    return run_command("zerorun-schedule", FAILED, partial(_run, args))


def _run(args: argparse.Namespace) -> tuple[int, Iterable[str]]:
    times, cases, micro_batches = _measured(args) if args.measured else _simulated(args)
    _draw(args, cases, micro_batches)
    if args.json:
        return 0, json.dumps(_as_json(times, cases, micro_batches), indent=2).splitlines()
    return 0, _lines(times, cases, micro_batches)


# -- arguments ---------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("zerorun-schedule", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add("--stages", type=positive, metavar="P", help="ranks of the pipeline")
    add("--micro-batches", type=positive, metavar="M", help="micro-batches of a step")
    add("--kind", choices=SCHEDULES, help="the schedule (default: 1f1b)")
    add(
        "--chunks",
        type=positive,
        metavar="V",
        help=f"chunks of the model per rank (default: 2 with {INTERLEAVED}, else 1)",
    )
    add("--times", type=_numbers, nargs=3, metavar=("F", "B", "W"), help="forward, input gradient, weight gradient: 1 1 1")
    add("--transfer", type=_numbers, metavar="T", default=0.0, help="time that a message travels (default: 0)")
    add("--limit", type=positive, metavar="N", help=f"{ZERO_BUBBLE}: micro-batches that a rank may keep (default: P)")
    add("--compare", nargs="*", choices=_TRAINING, metavar="KIND", help="these schedules, or all that train, side by side")
    add("--measured", metavar="TRACE", help="a measured run (JSON), beside its lists simulated with its median times")
    add("--svg", metavar="FILE", help="draw the timeline (with matplotlib)")
    add("--png", metavar="FILE", help="draw the timeline (with matplotlib)")
    add("--json", action="store_true", help="print the numbers as JSON")
    add("--version", action="version", version=f"zerorun {zerorun.__version__}")
    return parser


def _numbers(text: str) -> float | tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a comma-separated list of numbers") from None
    return numbers if "," in text else numbers[0]


# -- runs --------------------------------------------------------------------------------------------------------


def _simulated(args: argparse.Namespace) -> tuple[Times, list[Case], int]:
    for option, value in (("--stages", args.stages), ("--micro-batches", args.micro_batches)):
        if value is None:
            raise ScheduleError(f"{option} is missing. Remedy: give it, or a trace with --measured.")
    comparing = args.compare is not None
    if comparing and args.kind:
        raise ScheduleError(f"--compare shows several kinds, and --kind {args.kind} one. Remedy: leave one of them out.")
    stages, micro_batches = args.stages, args.micro_batches
    forward, inputs, weights = args.times or (1.0, 1.0, 1.0)
    times = Times.make(stages, forward, inputs, weights, args.transfer)
    kinds = args.compare or _TRAINING if comparing else [args.kind or "1f1b"]
    if args.svg or args.png:
        check_drawable(len(kinds) * stages * micro_batches)  # a lower bound: refuse before the simulation
    cases = []
    for kind in kinds:
        chunks = args.chunks or 2 if kind == INTERLEAVED else 1 if comparing else args.chunks or 1
        limit = None if comparing and kind != ZERO_BUBBLE else args.limit
        schedule = make_schedule(kind, stages, micro_batches, chunks=chunks, times=times, limit=limit)
        cases.append(_case(args, schedule, times, limit))
    return times, cases, micro_batches


def _measured(args: argparse.Namespace) -> tuple[Times, list[Case], int]:
    for option, value in (("--times", args.times), ("--limit", args.limit), ("--compare", args.compare is not None)):
        if value:
            raise ScheduleError(
                f"{option} cannot be combined with --measured, which brings its own. Remedy: leave one of them out."
            )
    trace = read_trace(args.measured)
    for name in ("stages", "micro_batches", "kind", "chunks"):
        given, found = getattr(args, name), getattr(trace, name)
        if given is not None and given != found:
            option = name.replace("_", "-")
            raise ScheduleError(
                f"--{option} {given} is not what {args.measured} has: {found}. Remedy: leave --{option} out."
            )
    times, report = trace.times(args.transfer), trace.report()
    simulated = _case(args, trace.schedule(), times, None)
    measured = replace(simulated, label=f"{trace.kind} measured", report=report, work=sum(report.busy) / trace.stages)
    return times, [replace(simulated, label=f"{trace.kind} simulated"), measured], trace.micro_batches


def _case(args: argparse.Namespace, schedule: PipelineSchedule, times: Times, limit: int | None) -> Case:
    kind, stages, micro_batches, chunks = schedule.kind, schedule.stages, schedule.micro_batches, schedule.chunks
    report = simulate(schedule, times, record=bool(args.svg or args.png))
    usual = limit is None or min(limit, micro_batches) == min(stages, micro_batches)
    formula = bubble(kind, stages, micro_batches, times, chunks=chunks) if usual else None
    label = kind + (f", {chunks} chunks" if chunks > 1 else "") + (f", limit {limit}" if limit else "")
    why = why_inexact(kind, stages, micro_batches, times) if usual else "is for a limit of P"
    return Case(kind, label, chunks, report, formula, why, sum(report.busy) / stages)


# -- what is shown -----------------------------------------------------------------------------------------------


def _draw(args: argparse.Namespace, cases: Sequence[Case], micro_batches: int) -> None:
    if not args.svg and not args.png:
        return
    panels = []
    for case in cases:
        report = case.report
        formula = "" if case.formula_percent is None else f" (formula {case.formula_percent:.1f} %)"
        title = f"{case.label}: {len(report.busy)} stages, {micro_batches} micro-batches, makespan {report.makespan:.4g}, "
        title += f"bubble {case.percent:.1f} %{formula}, at most {_kept(case, report.peak_kept)} micro-batches kept"
        panels.append(Panel(title, report, case.chunks))
    if args.svg:
        draw(args.svg, panels, "svg")
    if args.png:
        draw(args.png, panels, "png")


def _kept(case: Case, peaks: Sequence[int]) -> str:
    """Return the highest of ``peaks``, converted from chunks to micro-batches of a whole stage."""
    return f"{max(peaks) / case.chunks:.4g}"


def _lines(times: Times, cases: Sequence[Case], micro_batches: int) -> Iterator[str]:
    yield f"{len(times.forward)} stages, {micro_batches} micro-batches; times: " + ", ".join(
        f"{name.replace('_', ' ')} {_numbers_text(values)}" for name, values in asdict(times).items()
    )
    yield ""
    width = max(len("schedule"), *(len(case.label) for case in cases))
    heads = ("makespan", "bubble", "bubble %", "formula", "formula %", "kept", "whole")
    yield "  ".join([f"{'schedule':{width}}", *(f"{head:>9}" for head in heads)])
    for case in cases:
        formula = ("-", "-") if case.formula is None else (f"{case.formula:.4g}", f"{case.formula_percent:.1f}")
        kept = _kept(case, case.report.peak_kept), _kept(case, case.report.peak_whole)
        cells = (f"{case.report.makespan:.4g}", f"{case.report.bubble:.4g}", f"{case.percent:.1f}", *formula, *kept)
        yield "  ".join([f"{case.label:{width}}", *(f"{cell:>9}" for cell in cells)])
    for reason in dict.fromkeys(case.why_inexact for case in cases if case.why_inexact):
        kinds = dict.fromkeys(case.kind for case in cases if case.why_inexact == reason)
        yield f"note: the formula of {', '.join(kinds)} {reason}"
    if len({case.kind for case in cases}) == 1:
        for case in cases:
            yield ""
            yield from _rank_lines(case)


def _numbers_text(values: Sequence[float]) -> str:
    """Return one number if all values look equal, else their range."""
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _rank_lines(case: Case) -> Iterator[str]:
    yield f"{case.label}, each rank"
    yield "  ".join(f"{head:>9}" for head in ("rank", "busy", "idle", "idle %", "kept", "whole"))
    report = case.report
    rows = list(zip(report.busy, report.idle, report.peak_kept, report.peak_whole, strict=True))
    for rank, (busy, idle, kept, whole) in enumerate(rows):
        if _SHOWN_RANKS // 2 <= rank < len(rows) - _SHOWN_RANKS // 2:
            if rank == _SHOWN_RANKS // 2:
                yield f"{'...':>9}"
            continue
        percent = 100 * idle / report.makespan if report.makespan else 0.0
        cells = (str(rank), f"{busy:.4g}", f"{idle:.4g}", f"{percent:.1f}")
        peaks = (f"{kept / case.chunks:.4g}", f"{whole / case.chunks:.4g}")
        yield "  ".join(f"{cell:>9}" for cell in (*cells, *peaks))


def _as_json(times: Times, cases: Sequence[Case], micro_batches: int) -> dict[str, Any]:
    """Return all numbers for ``--json``. In ``peak_kept`` and ``peak_whole``, one micro-batch in one chunk counts as 1."""
    return {
        "stages": len(times.forward),
        "micro_batches": micro_batches,
        "times": asdict(times),
        "schedules": [
            {
                "kind": case.kind,
                "label": case.label,
                "chunks": case.chunks,
                "makespan": case.report.makespan,
                "bubble": case.report.bubble,
                "bubble_percent": case.percent,
                "efficiency": case.report.efficiency,
                "formula_bubble": case.formula,
                "formula_bubble_percent": case.formula_percent,
                "formula_inexact": case.why_inexact,
                "busy": case.report.busy,
                "idle": case.report.idle,
                "peak_kept": case.report.peak_kept,
                "peak_whole": case.report.peak_whole,
            }
            for case in cases
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
