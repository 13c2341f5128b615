"""Timelines: pictures of simulated and measured runs, drawn by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerorun.errors import ScheduleError

from .actions import ActionKind
from .simulate import Report, Span

MOST_ACTIONS = 50_000  # in one picture; more cannot be told apart, nor opened by a viewer
COLOURS = {
    ActionKind.FORWARD: ("forward", "#4c78a8"),
    ActionKind.BACKWARD: ("backward", "#54a24b"),
    ActionKind.INPUT_GRADIENT: ("input gradient", "#439894"),
    ActionKind.WEIGHT_GRADIENT: ("weight gradient", "#f58518"),
}
_IDLE = "#e4e4e4"
_PALEST = 0.55  # opacity of a rank's last chunk; the first is opaque

_WIDTH = 14  # inches
_DIGIT = 0.07  # inches, width of one digit of a micro-batch's number


@dataclass(frozen=True)
class Panel:
    """One run to draw: ``report`` with spans, and a title."""

    title: str
    report: Report
    chunks: int


def check_drawable(actions: int) -> None:
    """Raise ScheduleError if there are too many actions for a useful picture."""
    if actions > MOST_ACTIONS:
        raise ScheduleError(
            f"a picture of {actions} actions is too large. Remedy: draw fewer stages or micro-batches, "
            f"at most {MOST_ACTIONS} actions in all."
        )


def draw(path: str | os.PathLike[str], panels: Sequence[Panel], format: str) -> None:
    """Draw ``panels`` one beneath the other on one time scale, a row per rank. ``format``: "svg" or "png".

    Raises OSError, and ScheduleError if matplotlib is not installed.
    """
    check_drawable(sum(len(spans) for panel in panels for spans in panel.report.spans))
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ScheduleError(
            f"a timeline cannot be drawn without matplotlib ({error}). Remedy: pip install matplotlib."
        ) from error
    ranks = [len(panel.report.spans) for panel in panels]
    figure = Figure(figsize=(_WIDTH, 0.6 + sum(0.9 + 0.25 * count for count in ranks)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": [count + 2 for count in ranks]})
    longest = max(panel.report.makespan for panel in panels) or 1.0  # 1 if nothing takes any time
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        _draw_panel(panel, axes, longest)
    handles = [Patch(color=colour, label=name) for name, colour in _legend(panels)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    save(figure, path, format)


def save(figure: Any, path: str | os.PathLike[str], format: str) -> None:
    """Write a figure of matplotlib. ``format``: "svg" or "png". Raises OSError."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "zerorun"}):  # text stays text; same file each time
        figure.savefig(path, format=format, dpi=120, metadata={"Date": None} if format == "svg" else None)


def _draw_panel(panel: Panel, axes: Any, longest: float) -> None:
    report = panel.report
    for rank, spans in enumerate(report.spans):
        axes.broken_barh([(0, report.makespan)], (rank - 0.45, 0.9), facecolors=_IDLE)
        bars = [(span.start, span.end - span.start) for span in spans]
        shades = [(COLOURS[span.action.kind][1], _opacity(span, panel.chunks)) for span in spans]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=shades, edgecolors="white", linewidths=0.5)
        for span in spans:
            number = str(span.action.micro_batch)
            if (span.end - span.start) / longest * _WIDTH >= _DIGIT * (len(number) + 0.5):
                middle = (span.start + span.end) / 2
                axes.text(middle, rank, number, ha="center", va="center", color="white", fontsize=7)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", parse_math=False)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(report.spans) - 0.5, -0.5)
    axes.set_yticks(range(len(report.spans)), [f"rank {rank}" for rank in range(len(report.spans))], fontsize=8)


def _opacity(span: Span, chunks: int) -> float:
    return 1 - (1 - _PALEST) * span.action.chunk / max(1, chunks - 1)


def _legend(panels: Sequence[Panel]) -> list[tuple[str, str]]:
    """Return (name, colour) of everything that is in the picture."""
    kinds = {span.action.kind for panel in panels for spans in panel.report.spans for span in spans}
    entries = [entry for kind, entry in COLOURS.items() if kind in kinds]
    return [*entries, ("idle", _IDLE)]
