"""Picture: a step of a planned run, on the stage that needs the most memory: what it computes, and what it holds.

The curves are those of the plan: the step ends when the plan says, and the peak is that of its footprint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConfigProblem
from ..pipeline.schedule.actions import ActionKind
from ..pipeline.schedule.timeline import COLOURS, save
from .answer import RunPlan, named
from .footprint import activations, context, footprints, heaviest, layers_of_stages
from .step_time import StepModel

_MOST_MICRO_BATCHES = 16  # that are drawn, and two of each stage; what follows looks alike
_AFTER = {"gathers and reductions": "#b279a2", "update": "#f58518", "waiting for others": "#9d9d9d"}
_STATES = {  # of the footprint's kinds, by name
    "CUDA and NCCL": (),
    "parameters": ("parameters", "buffers"),
    "gradients": ("gradients",),
    "slots of units": ("slots",),
    "optimizer states": ("master", "moments"),
}
_SHADES = dict(zip(_STATES, ("#bdbdbd", "#4c78a8", "#54a24b", "#439894", "#f58518"), strict=True))
_ACTIVATIONS = "#e45756"
# What a computation adds to the activations that are kept, in those of a micro-batch.
_KEEPS = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: -1,
    ActionKind.INPUT_GRADIENT: 0,
    ActionKind.WEIGHT_GRADIENT: -1,
}
_GIB = 2**30
_SIZE = (12, 6)  # inches


@dataclass(frozen=True)
class StepPicture:
    """``bars``: (what, begin, end) of what the stage does, in seconds. ``states``: bytes that stay, by what they are.

    ``moments``: (seconds, bytes) of activations and of gradients on their way, straight lines in between. ``drawn``:
    micro-batches, of ``micro_batches``.
    """

    stage: int
    bars: tuple[tuple[str, float, float], ...]
    states: dict[str, float]
    moments: tuple[tuple[float, float], ...]
    drawn: int
    micro_batches: int

    @property
    def peak(self) -> float:
        """The most bytes at any time."""
        return sum(self.states.values()) + max(size for _, size in self.moments)

    @property
    def seconds(self) -> float:
        return self.bars[-1][2]


def step_picture(plan: RunPlan) -> StepPicture:
    """Return the picture of ``plan``'s step."""
    shape, c, step = plan.shape, plan.best.candidate, plan.best.step
    stage, memory = heaviest(footprints(shape, c))
    model = StepModel(shape, c, plan.cluster, plan.calibration)
    drawn = min(c.accumulation, max(_MOST_MICRO_BATCHES, 2 * c.pipe))
    drawn -= drawn % c.pipe if c.chunks > 1 else 0  # interleaved schedules go round by round
    spans = model.schedule(drawn, record=True).spans[stage]
    found = activations(shape, c, stage)
    part = found.block * layers_of_stages(shape, c.pipe, c.chunks)[stage] / c.chunks
    bars, moments, kept = [], [(0.0, 0.0)], 0.0
    for span in spans:
        kind = span.action.kind
        bars.append((COLOURS[kind][0], span.start, span.end))
        passing = 0.0 if kind is ActionKind.FORWARD else found.passing + memory.made
        moments += [(span.start, kept), (span.start, kept + passing)]
        kept = max(0.0, kept + _KEEPS[kind] * part)
        moments += [(span.end, kept + passing), (span.end, kept)]
    bars += _after(bars[-1][2], model, step.causes)
    moments.append((bars[-1][2], 0.0))
    states = {name: float(sum(memory.kinds.get(kind, 0) for kind in kinds)) for name, kinds in _STATES.items()}
    states["CUDA and NCCL"] = context(plan.cluster.gpu)
    return StepPicture(stage, tuple(bars), states, tuple(moments), drawn, c.accumulation)


def _after(begin: float, model: StepModel, causes: dict[str, float]) -> Iterator[tuple[str, float, float]]:
    """Yield the bars of what follows the last backward."""
    seconds = {**causes, "gathers and reductions": model.exposed_in_step}
    for name in _AFTER:
        if seconds[name]:
            yield name, begin, begin + seconds[name]
            begin += seconds[name]


def draw_plan(plan: RunPlan, path: str) -> None:
    """Draw ``plan``'s step into the file ``path``, an .svg or a .png. Raises ConfigError, OSError."""
    kind = Path(path).suffix[1:].lower()
    if kind not in ("svg", "png"):
        raise ConfigError([ConfigProblem("--picture", path, "is no .svg and no .png.", "name such a file.")], "arguments")
    from matplotlib.figure import Figure

    found, c = step_picture(plan), plan.best.candidate
    figure = Figure(figsize=_SIZE, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1, 4]})
    stage = f"stage {found.stage} of {c.pipe}" if c.pipe > 1 else "each GPU"
    part = f", with {found.drawn} of {found.micro_batches} micro-batches" if found.drawn < found.micro_batches else ""
    figure.suptitle(f"{named(c)}: {stage}{part}", fontsize=11, parse_math=False)
    _draw_bars(found, above)
    _draw_memory(found, below)
    below.axhline(plan.cluster.gpu.memory / _GIB, color="black", linestyle="--", linewidth=1, label=plan.cluster.gpu.name)
    below.set_ylim(0, 1.1 * max(plan.cluster.gpu.memory, found.peak) / _GIB)
    figure.legend(*below.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, path, kind)


def _draw_bars(found: StepPicture, axes: Any) -> None:
    colours = dict([*COLOURS.values(), *_AFTER.items()])
    for name in dict.fromkeys(name for name, _, _ in found.bars):
        bars = [(begin, end - begin) for what, begin, end in found.bars if what == name]
        axes.broken_barh(bars, (0, 1), facecolors=colours[name], label=name)
    axes.set_yticks([])
    axes.legend(ncols=len(colours), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _draw_memory(found: StepPicture, axes: Any) -> None:
    seconds = [moment for moment, _ in found.moments]
    layers = {name: [size / _GIB] * len(seconds) for name, size in found.states.items() if size}
    layers["activations, and gradients on their way"] = [size / _GIB for _, size in found.moments]
    axes.stackplot(seconds, layers.values(), labels=layers, colors=[_SHADES.get(name, _ACTIVATIONS) for name in layers])
    axes.set_xlim(0, found.seconds)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GiB")
