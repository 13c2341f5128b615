"""Timelines: pictures of simulated and measured runs, as SVG (written here) or PNG (by matplotlib)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from zerorun.errors import ScheduleError

from .actions import ActionKind
from .simulate import Report, Span

MOST_ACTIONS = 50_000  # in one picture; more are neither seen nor opened by a viewer
_COLOURS = {
    ActionKind.FORWARD: ("forward", "#4c78a8"),
    ActionKind.BACKWARD: ("backward", "#54a24b"),
    ActionKind.INPUT_GRADIENT: ("input gradient", "#439894"),
    ActionKind.WEIGHT_GRADIENT: ("weight gradient", "#f58518"),
}
_IDLE = "#e4e4e4"
_PALEST = 0.55  # opacity of a rank's last chunk; the first is opaque

# Lengths of the SVG in pixels.
_WIDTH, _LEFT, _ROW, _GAP, _HEAD, _MARGIN = 1400, 64, 24, 3, 44, 16
_DIGIT = 7  # width of one in the numbers of the micro-batches


@dataclass(frozen=True)
class Panel:
    """One run to draw: ``report`` with spans, and a title."""

    title: str
    report: Report
    chunks: int


def check_drawable(actions: int) -> None:
    """Raise ScheduleError if a picture of so many actions would be of no use."""
    if actions > MOST_ACTIONS:
        raise ScheduleError(
            f"a picture of {actions} actions is too large. Remedy: draw fewer stages or micro-batches, "
            f"at most {MOST_ACTIONS} actions in all."
        )


def write_svg(path: str | os.PathLike[str], panels: Sequence[Panel]) -> None:
    """Draw ``panels`` one beneath the other on one time scale, a row per rank. Raises OSError and ScheduleError."""
    Path(path).write_text("\n".join(_svg(panels)) + "\n", encoding="utf-8")


def _svg(panels: Sequence[Panel]) -> Iterator[str]:
    check_drawable(_actions(panels))
    heights = [_HEAD + len(panel.report.spans) * _ROW + _MARGIN for panel in panels]
    height = _MARGIN + sum(heights) + _ROW
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">'
    rules = [f".k{int(kind)}{{fill:{colour}}}" for kind, (_, colour) in _COLOURS.items()]
    yield f"<style>text{{font:12px sans-serif}} .n{{fill:#fff;text-anchor:middle;font-size:11px}} {' '.join(rules)}</style>"
    yield f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    scale = (_WIDTH - _LEFT - _MARGIN) / _longest(panels)
    top = _MARGIN
    for panel, step in zip(panels, heights, strict=True):
        yield from _svg_panel(panel, top, scale)
        top += step
    yield from _svg_legend(panels, top)
    yield "</svg>"


def _svg_panel(panel: Panel, top: int, scale: float) -> Iterator[str]:
    end = panel.report.makespan * scale
    yield f'<text x="{_LEFT}" y="{top + 14}" style="font-weight:bold">{escape(panel.title)}</text>'
    yield f'<text x="{_LEFT}" y="{top + 34}">0</text>'
    yield f'<text x="{_LEFT + end:.1f}" y="{top + 34}" text-anchor="end">{panel.report.makespan:.4g}</text>'
    for rank, spans in enumerate(panel.report.spans):
        y = top + _HEAD + rank * _ROW
        yield f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">rank {rank}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{end:.2f}" height="{_ROW - _GAP}" fill="{_IDLE}"/>'
        for span in spans:
            yield from _svg_span(span, y, scale, _opacity(span, panel.chunks))


def _svg_span(span: Span, y: int, scale: float, opacity: float) -> Iterator[str]:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    kind, micro_batch, _ = span.action
    tip = f"{span.action}: {span.start:.6g} to {span.end:.6g}"
    yield (
        f'<rect class="k{int(kind)}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - _GAP}" '
        f'fill-opacity="{opacity:.2f}" stroke="#fff" stroke-width="0.5"><title>{tip}</title></rect>'
    )
    if width >= _DIGIT * (len(str(micro_batch)) + 0.5):
        yield f'<text class="n" x="{x + width / 2:.2f}" y="{y + 15}" pointer-events="none">{micro_batch}</text>'


def _svg_legend(panels: Sequence[Panel], top: int) -> Iterator[str]:
    x = _LEFT
    for name, colour in _legend(panels):
        yield f'<rect x="{x}" y="{top}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17}" y="{top + 11}">{name}</text>'
        x += 40 + _DIGIT * len(name)


def write_png(path: str | os.PathLike[str], panels: Sequence[Panel]) -> None:
    """The same picture by matplotlib. Raises OSError, and ScheduleError if matplotlib is not installed."""
    check_drawable(_actions(panels))
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ScheduleError(
            f"a PNG cannot be drawn without matplotlib ({error}). Remedy: pip install matplotlib, or write an SVG."
        ) from error
    ranks = [len(panel.report.spans) for panel in panels]
    figure = Figure(figsize=(14, 0.6 + sum(0.9 + 0.25 * count for count in ranks)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": [count + 2 for count in ranks]})
    longest = _longest(panels)
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        _png_panel(panel, axes, longest)
    handles = [Patch(color=colour, label=name) for name, colour in _legend(panels)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, format="png", dpi=120)


def _png_panel(panel: Panel, axes: Any, longest: float) -> None:
    report = panel.report
    for rank, spans in enumerate(report.spans):
        axes.broken_barh([(0, report.makespan)], (rank - 0.45, 0.9), facecolors=_IDLE)
        bars = [(span.start, span.end - span.start) for span in spans]
        shades = [(_COLOURS[span.action.kind][1], _opacity(span, panel.chunks)) for span in spans]
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolors=shades, edgecolors="white", linewidths=0.5)
        for span in spans:
            if (span.end - span.start) / longest * _WIDTH >= _DIGIT * (len(str(span.action.micro_batch)) + 0.5):
                middle = (span.start + span.end) / 2
                axes.text(middle, rank, str(span.action.micro_batch), ha="center", va="center", color="white", fontsize=7)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlim(0, longest)
    axes.set_ylim(len(report.spans) - 0.5, -0.5)
    axes.set_yticks(range(len(report.spans)), [f"rank {rank}" for rank in range(len(report.spans))], fontsize=8)


def _actions(panels: Sequence[Panel]) -> int:
    return sum(len(spans) for panel in panels for spans in panel.report.spans)


def _longest(panels: Sequence[Panel]) -> float:
    """The time scale's end; 1 if nothing takes any time."""
    return max(panel.report.makespan for panel in panels) or 1.0


def _opacity(span: Span, chunks: int) -> float:
    return 1 - (1 - _PALEST) * span.action.chunk / max(1, chunks - 1)


def _legend(panels: Sequence[Panel]) -> list[tuple[str, str]]:
    """(name, colour) of what is in the picture."""
    kinds = {span.action.kind for panel in panels for spans in panel.report.spans for span in spans}
    entries = [entry for kind, entry in _COLOURS.items() if kind in kinds]
    return [*entries, ("idle", _IDLE)]
