"""Fits the planner's constants to published runs, and says how far its predictions are off.

    python tests/perf/fit_planner.py runs.csv                          # errors with this version's constants
    python tests/perf/fit_planner.py runs.csv --trials 4000 --write    # fit, and write calibration.json of the package
    python tests/perf/fit_planner.py runs.csv --left-out 1500          # each group predicted by a fit of the others

``runs.csv`` has the columns that docs/planning.md describes. Errors are |predicted / measured - 1| of tokens per second and
GPU, over rows of confidence A and B, without those of nanotron (which rank configurations, in cells) and of experts.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace

from zerorun.planner.calibration import PATH, Calibration, Constants, fitted, key_of
from zerorun.planner.published_runs import PublishedRun, published_runs

NAMES = [field.name for field in fields(Constants)]
LIMITS = {"fp8": (0.6, 1.0), "traffic": (200, 450), "pieces": (1, 64), "selective": (0.1, 1.0), "sent": (0.1, 1.5)}
MOST_EFFICIENT, GOOD = 1.05, 0.95


def log_error(run: PublishedRun, calibration: Calibration) -> float:
    return math.log(run.predicted(calibration) / (run.tokens_per_s_gpu or 1))


def quantile(errors: Sequence[float], part: float) -> float:
    return sorted(errors)[min(int(part * len(errors)), len(errors) - 1)]


def absolute(errors: Sequence[float]) -> list[float]:
    return [abs(math.exp(error) - 1) for error in errors]


def ranking(runs: Sequence[PublishedRun], calibration: Calibration) -> tuple[float, float]:
    """Return the speed of the predicted best, as a part of the best one's, and by how much it is ahead of bad ones."""
    rows = [(run.predicted(calibration), run.tokens_per_s_gpu or 0.0) for run in runs]
    best = max(measured for _, measured in rows)
    good = max(predicted for predicted, measured in rows if measured >= GOOD * best)
    bad = max((predicted for predicted, measured in rows if measured < GOOD * best), default=good / 2)
    return max(rows)[1] / best, math.log(good / bad)


class Fit:
    """A random search, one or two numbers at a time, from the constants' defaults."""

    def __init__(self, runs: Sequence[PublishedRun], cells: dict[str, list[PublishedRun]], seed: int = 0) -> None:
        self.runs, self.cells, self.random = runs, cells, random.Random(seed)
        self.keys = sorted({key_of(run.cluster.gpu, run.candidate.kernels) for run in runs})

    def loss(self, calibration: Calibration) -> float:
        errors = absolute([log_error(run, calibration) for run in self.runs])
        found = sum(min(error, 0.3) for error in errors) / len(errors)
        found += 0.5 * quantile(errors, 0.5) + 0.5 * quantile(errors, 0.9)
        for runs in self.cells.values():
            best, ahead = ranking(runs, calibration)
            found += 0.5 * max(0.0, 0.96 - best) + 0.5 * max(0.0, 0.004 - ahead)
        return found + 0.3 * sum(max(0.0, value - MOST_EFFICIENT) for value in calibration.efficiencies.values())

    def run(self, trials: int, start: Calibration | None = None) -> Calibration:
        best = start or Calibration(efficiencies=dict.fromkeys(self.keys, 0.85))
        lowest, widths = self.loss(best), dict.fromkeys(NAMES, 0.25) | dict.fromkeys(self.keys, 0.06)
        for trial in range(trials):
            if trial % 25 == 0:
                candidate, picked = self._centred(best), []
            else:
                picked = self.random.sample(sorted(widths), self.random.choice((1, 1, 2)))
                candidate = best
                for name in picked:
                    candidate = self._changed(candidate, name, math.exp(self.random.gauss(0, widths[name])))
            loss = self.loss(candidate)
            better = loss < lowest
            for name in picked:
                widths[name] = min(max(widths[name] * (1.4 if better else 0.96), 0.003), 0.5)
            if better:
                best, lowest = candidate, loss
        return best

    def _changed(self, calibration: Calibration, name: str, factor: float) -> Calibration:
        if name in self.keys:
            value = calibration.efficiencies[name] * factor
            return replace(calibration, efficiencies={**calibration.efficiencies, name: value})
        low, high = LIMITS.get(name, (0.0, math.inf))
        value = min(max(getattr(calibration.constants, name) * factor, low), high)
        return replace(calibration, constants=replace(calibration.constants, **{name: value}))

    def _centred(self, calibration: Calibration) -> Calibration:
        """Move each efficiency by half the median error of its runs."""
        errors = defaultdict(list)
        for run in self.runs:
            errors[key_of(run.cluster.gpu, run.candidate.kernels)].append(log_error(run, calibration))
        moved = {key: calibration.efficiencies[key] * math.exp(-0.5 * quantile(errors[key], 0.5)) for key in self.keys}
        return replace(calibration, efficiencies=moved)


def ratios(runs: Sequence[PublishedRun], calibration: Calibration) -> dict[str, list[tuple[int, float]]]:
    """Return for each run its nodes and its measured speed in terms of the predicted one, by the name of its efficiency."""
    found = defaultdict(list)
    for run in runs:
        ratio = round(math.exp(-log_error(run, calibration)), 3)
        found[key_of(run.cluster.gpu, run.candidate.kernels)].append((run.cluster.nodes, ratio))
    return {key: sorted(found[key]) for key in sorted(found)}


def mixtures(runs: Sequence[PublishedRun], calibration: Calibration) -> tuple[float, float]:
    """Return the least and the most of the same numbers, of runs of experts, which are too few to fit."""
    found = [round(math.exp(-log_error(run, calibration)), 3) for run in runs]
    return min(found), max(found)


def report(runs: Sequence[PublishedRun], cells: dict[str, list[PublishedRun]], of: Callable[[str], Calibration]) -> None:
    """Print errors by group. ``of``: the calibration for a group."""
    groups = defaultdict(list)
    for run in runs:
        groups[run.fields["group"]].append((log_error(run, of(run.fields["group"])), run))
    print(f"{'group':<18}{'rows':>5}{'median':>9}{'p90':>8}{'bias':>8}  the worst")
    for group, found in sorted(groups.items()):
        errors, (worst, which) = [error for error, _ in found], max(found, key=lambda one: abs(one[0]))
        bias, sizes = sum(errors) / len(errors), absolute(errors)
        print(
            f"{group:<18}{len(found):>5}{quantile(sizes, 0.5):>9.1%}{quantile(sizes, 0.9):>8.1%}{bias:>+8.1%}"
            f"  {which.id} {worst:+.1%}"
        )
    sizes = absolute([error for found in groups.values() for error, _ in found])
    means = [quantile(absolute([error for error, _ in found]), 0.5) for found in groups.values()]
    print(f"{'all':<18}{len(sizes):>5}{quantile(sizes, 0.5):>9.1%}{quantile(sizes, 0.9):>8.1%}")
    print(f"mean of the groups' medians: {sum(means) / len(means):.1%}")
    for cell, rows in sorted(cells.items()):
        best, ahead = ranking(rows, of("nanotron"))
        print(f"cell {cell}: {len(rows)} rows, the predicted best runs at {best:.3f} of the best; ahead by {ahead:+.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs")
    parser.add_argument("--trials", type=int, default=0, help="fit, with this many trials")
    parser.add_argument("--go-on", action="store_true", help="begin with the constants of this version")
    parser.add_argument("--left-out", type=int, default=0, metavar="TRIALS", help="fit without each group in turn")
    parser.add_argument("--write", action="store_true", help="write the result into the package")
    args = parser.parse_args()
    known = [run for run in published_runs(args.runs) if run.fields["outcome"] == "ok" and run.tokens_per_s_gpu]
    weak = ("nanotron", "moe", "tpu")
    runs = [run for run in known if run.fields["conf"] in ("A", "B") and run.fields["group"] not in weak]
    cells = defaultdict(list)
    for run in known:
        if run.fields["cell"]:
            cells[run.fields["cell"]].append(run)

    found = fitted()
    if args.trials:
        found = Fit(runs, cells).run(args.trials, found if args.go_on else None)
    print(json.dumps({**asdict(found.constants), **found.efficiencies}, indent=1))
    report(runs, cells, lambda group: found)
    held_out = found.held_out
    if args.left_out:
        without = {}
        for group in sorted({run.fields["group"] for run in runs}):
            rest = [run for run in runs if run.fields["group"] != group]
            without[group] = Fit(rest, {}).run(args.left_out)
        print("\neach group predicted from the others:")
        report(runs, {}, lambda group: without[group])
        errors = absolute([log_error(run, without[run.fields["group"]]) for run in runs])
        held_out = quantile(errors, 0.5), quantile(errors, 0.9)
    if args.write:
        errors = absolute([log_error(run, found) for run in runs])
        data = {
            "constants": {name: float(f"{value:.4g}") for name, value in asdict(found.constants).items()},
            "efficiencies": {name: round(value, 4) for name, value in sorted(found.efficiencies.items())},
            "median": round(quantile(errors, 0.5), 4),
            "p90": round(quantile(errors, 0.9), 4),
            "held_out": [round(error, 4) for error in held_out],
            "ratios": ratios(runs, found),
            "mixtures": mixtures([run for run in known if run.shape.experts > 1], found),
        }
        text = re.sub(r"\[\s+([^\[\]]+?),\s+([^\[\]]+?)\s+\]", r"[\1, \2]", json.dumps(data, indent=2))
        PATH.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
