"""The breakdown of a step: what its phases took, and how much of the communication was hidden behind them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ..config.sections import CommsLogger, part_of_label
from ..distributed.stopwatch import Interval, Stopwatch, covered
from ..distributed.transport.communicator import Communicator
from ..log import in_bytes
from ..watch.board import OF_STAGES
from ..zero.norm import Summary, Told
from ..zero.reducer import Backwards
from ..zero.sharded_model import ShardedModel
from ..zero.unit import Unit

EVALUATION = "evaluation"  # forwards without gradients: what is waited for in them belongs to no step
FORWARD, BACKWARD, REDUCE, NORM, UPDATE, PUBLISH = PHASES = ("forward", "backward", "reduce", "norm", "update", "publish")
# What collectives are for, by words in their labels; the first that fits.
_KINDS = {OF_STAGES: "messages", "all-gather gradients": "reduce", "all-gather": "gather", "gradients": "reduce"}

_SUM, _SUMMED = "all-reduce", (" over replicas", "gradients over ", "sum of losses")


class TimedModel(ShardedModel):
    """A sharded model whose steps are timed. ``comm.statistics.watch`` is the stopwatch."""

    @property
    def _watch(self) -> Stopwatch:
        watch = self.comm.statistics.watch
        assert watch is not None
        return watch

    def reduce(self) -> None:
        with self._watch.during(REDUCE):
            super().reduce()

    def norm(self, told: Told) -> Summary:
        with self._watch.during(NORM):
            return super().norm(told)

    def update(self, coefficient: torch.Tensor | float, *, unused: bool) -> None:
        with self._watch.during(UPDATE):
            super().update(coefficient, unused=unused)

    def publish(self) -> None:
        with self._watch.during(PUBLISH):
            super().publish()

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self._watch.end_step(NORM)


class TimedBackwards:
    """Tells ``backwards`` what it is told, and times them."""

    def __init__(self, backwards: Backwards, watch: Stopwatch) -> None:
        self._backwards, self._watch = backwards, watch
        self._begun: Any = None

    def reduces_now(self) -> bool:
        self._begun = self._watch.now()
        return self._backwards.reduces_now()

    def inspect(self, unit: Unit) -> None:
        self._backwards.inspect(unit)

    def ended(self, *, late: bool = False) -> None:
        self._backwards.ended(late=late)
        self._watch.add(BACKWARD, self._begun)


class ForwardHooks:
    """Times the forwards of a module: those that belong to training, and evaluation."""

    def __init__(self, module: nn.Module, watch: Stopwatch) -> None:
        self._watch, self._begun, self._depth = watch, watch.now(), 0
        self._handles = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0:
            self._begun = self._watch.now()
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0:
            self._watch.add(FORWARD if torch.is_grad_enabled() else EVALUATION, self._begun)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def watch_communication(comm: Communicator, watch: Stopwatch | None) -> None:
    """Let ``watch`` time the collectives of an engine; None: nobody does any more."""
    for statistics in {comm.statistics, *(axis.statistics for axis in comm.model_axes.values())}:
        statistics.watch_by(watch)


def kind_of(label: str) -> str:
    """What a collective is for: "gather" parameters, "reduce" gradients, "messages" of a pipeline, or "other"."""
    return next((kind for words, kind in _KINDS.items() if words in label), "other")


def _is_sum(label: str) -> bool:
    """True for the label of an all-reduce that says what is summed, and not how."""
    return label in ("control", "losses", NORM) or any(part in label for part in _SUMMED)


@dataclass
class LabelTimes:
    """Of one label so far: calls, seconds in flight, and seconds that the computation waited."""

    calls: int = 0
    flight: float = 0.0
    waited: float = 0.0


@dataclass
class Breakdown:
    """Sums over steps: seconds of ``phases``, by name; of collectives by kind, ``flight`` and ``waited``, and ``calls``."""

    steps: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    flight: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waited: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, step: Sequence[Interval]) -> None:
        """Add a step."""
        self.steps += 1
        by_kind: dict[str, list[Interval]] = defaultdict(list)
        evaluation = sorted((one.begun, one.ended) for one in step if one.name == EVALUATION)
        latest = list(accumulate((ended for _, ended in evaluation), max))
        for interval in step:
            before = bisect_right(evaluation, interval.ended, key=lambda span: span[0])
            if interval.waited_from is None:
                if interval.name != EVALUATION:
                    self.phases[interval.name] += interval.seconds
            elif not before or latest[before - 1] < interval.ended:  # nobody has waited for it in an evaluation
                by_kind[kind_of(interval.name)].append(interval)
        for kind, found in by_kind.items():
            self.calls[kind] += len(found)
            self.flight[kind] += covered((one.begun, one.ended) for one in found)
            self.waited[kind] += covered((one.waited_from or 0.0, one.ended) for one in found)

    def milliseconds(self, *phases: str) -> float:
        """Of a step, in these phases."""
        return 1e3 * sum(self.phases[name] for name in phases) / max(self.steps, 1)

    def line(self) -> str:
        """What a step took, in milliseconds."""
        each = 1e3 / max(self.steps, 1)
        step = self.milliseconds(REDUCE, NORM, UPDATE, PUBLISH)
        parts = [f"{name} {self.milliseconds(name):.2f} ms" for name in (FORWARD, BACKWARD)]
        parts.append(f"step {step:.2f} ms ({', '.join(f'{name} {self.milliseconds(name):.2f}' for name in PHASES[2:])})")
        for kind in sorted(self.calls):
            hidden, waited = each * (self.flight[kind] - self.waited[kind]), each * self.waited[kind]
            parts.append(f"{kind}: hidden {max(hidden, 0.0):.2f} ms, waited for {waited:.2f} ms")
        return "; ".join(parts)


class CommunicationTable:
    """What collectives took, by label, for the section ``comms_logger``."""

    def __init__(self, section: CommsLogger) -> None:
        self._section = section
        self._times: dict[str, LabelTimes] = defaultdict(LabelTimes)

    def add(self, step: Iterable[Interval]) -> list[str]:
        """Add a step, and return a line for each collective, if the section asks for that."""
        lines = []
        for interval in step:
            if interval.waited_from is None or not self._wants(interval.name):
                continue
            times, waited = self._times[interval.name], interval.ended - interval.waited_from
            times.calls += 1
            times.flight, times.waited = times.flight + interval.seconds, times.waited + waited
            lines.append(f"{interval.name}: {1e3 * interval.seconds:.3f} ms in flight, waited for {1e3 * waited:.3f} ms")
        return lines if self._section.verbose else []

    def _wants(self, label: str) -> bool:
        chosen = [part_of_label(name) for name in self._section.prof_ops]
        return self._section.prof_all or any(part in label for part in chosen) or (_SUM in chosen and _is_sum(label))

    def lines(self, report: dict[str, dict[str, int]]) -> list[str]:
        """``report``: the calls and bytes so far, by label. The bandwidth is at least that shown: it may be hidden.

        Messages from other pipeline stages have rows as well: this rank has waited for them, and others have the bytes.
        """
        messages = {label: times for label, times in self._times.items() if label.startswith(OF_STAGES)}
        received = {label: {"calls": times.calls, "bytes": 0} for label, times in messages.items()}
        rows = [f"{'collective':<48}{'calls':>8}{'sent':>12}{'in flight ms':>14}{'waited ms':>12}{'Gbit/s':>10}"]
        for label, counts in sorted({**received, **report}.items()):
            if not self._wants(label):
                continue
            times = self._times.get(label, LabelTimes())
            sent = counts["bytes"] / counts["calls"] * times.calls  # in the time that is known
            speed = f"{8e-9 * sent / times.flight:.3g}" if times.flight and sent else ""
            rows.append(
                f"{label:<48}{counts['calls']:>8}{in_bytes(counts['bytes']):>12}{1e3 * times.flight:>14.2f}"
                f"{1e3 * times.waited:>12.2f}{speed:>10}"
            )
        return rows
