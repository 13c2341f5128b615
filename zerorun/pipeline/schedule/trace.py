"""Traces: what a run really did, as a JSON file that Perfetto and ``chrome://tracing`` open.

    {"otherData": {"stages": 2, "micro_batches": 4, "kind": "1f1b", "chunks": 1},
     "traceEvents": [{"ph": "X", "name": "F 0", "cat": "F", "pid": 0, "tid": 0, "ts": 12000, "dur": 19000,
                      "args": {"micro_batch": 0, "chunk": 0}}, ...]}

The format is Chrome's (Trace Event Format, Google, 2016). ``tid`` is the stage; its events come in the order in which it
computed. Times are microseconds, with the same zero for all stages. ``cat`` is F (forward), B (backward), I or W (input and
weight gradient of a split backward); events of phases other than "X" are ignored. A trace holds one optimizer step: each
micro-batch and chunk has one F and, unless the kind is "forward_only", one B or one I and one W.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from zerorun.errors import ScheduleError

from .actions import FORWARD_ONLY, Action, ActionKind, PipelineSchedule, encode
from .schedules import SCHEDULES
from .simulate import Report, Span
from .times import Times

LETTERS = {
    "F": ActionKind.FORWARD,
    "B": ActionKind.BACKWARD,
    "I": ActionKind.INPUT_GRADIENT,
    "W": ActionKind.WEIGHT_GRADIENT,
}
_LETTER_OF = {kind: letter for letter, kind in LETTERS.items()}
_REMEDY = "Remedy: record one whole optimizer step on all ranks, with clocks that have one zero."
_MICRO = 1e6  # microseconds in a second
_OVERLAP_SECONDS = 1e-6  # a clock's resolution: a span may begin this much before the previous one ends


@dataclass(frozen=True)
class Trace:
    """One measured optimizer step. Times in ``spans`` are seconds; ``spans[rank]`` is in the order of time."""

    kind: str
    stages: int
    micro_batches: int
    chunks: int
    spans: tuple[tuple[Span, ...], ...]

    def report(self) -> Report:
        """Return the numbers of the run, from the first start to the last end on any rank.

        Raises ScheduleError if it took no time.
        """
        begin = min(spans[0].start for spans in self.spans)
        makespan = max(spans[-1].end for spans in self.spans) - begin
        if makespan <= 0:
            raise ScheduleError(f"the trace takes {makespan} s in all. {_REMEDY}")
        moved = tuple(
            tuple(Span(span.action, span.start - begin, span.end - begin) for span in spans) for spans in self.spans
        )
        busy = tuple(sum(span.end - span.start for span in spans) for spans in self.spans)
        peaks = [_peaks(spans, self.kind != FORWARD_ONLY) for spans in self.spans]
        return Report(makespan, busy, tuple(kept for kept, _ in peaks), tuple(whole for _, whole in peaks), moved)

    def times(self, transfer: float | Sequence[float] = 0.0) -> Times:
        """Return the times of each stage: medians over the micro-batches, summed over the chunks.

        A backward that is not split counts as an input gradient with a weight gradient of 0 s.
        """

        def medians(kind: ActionKind) -> list[float]:
            return [sum(_median(spans, kind, chunk) for chunk in range(self.chunks)) for spans in self.spans]

        parts = medians(ActionKind.FORWARD), medians(ActionKind.INPUT_GRADIENT), medians(ActionKind.WEIGHT_GRADIENT)
        return Times.make(self.stages, *parts, transfer)

    def schedule(self) -> PipelineSchedule:
        """Return the lists that were run: the computations in their measured order, with messages inserted."""
        lists = [tuple(encode(span.action, self.chunks) for span in spans) for spans in self.spans]
        return PipelineSchedule.from_computation(self.kind, self.stages, self.micro_batches, self.chunks, lists.__getitem__)


def _median(spans: Sequence[Span], kind: ActionKind, chunk: int) -> float:
    kinds = (kind, ActionKind.BACKWARD) if kind == ActionKind.INPUT_GRADIENT else (kind,)
    found = [span.end - span.start for span in spans if span.action.kind in kinds and span.action.chunk == chunk]
    return median(found) if found else 0.0


def _peaks(spans: Sequence[Span], trains: bool) -> tuple[int, int]:
    """Return the most micro-batches kept at once until the weight gradient, and until the input gradient."""
    kept = whole = most_kept = most_whole = 0
    for action, _, _ in spans if trains else ():
        kept += {ActionKind.FORWARD: 1, ActionKind.INPUT_GRADIENT: 0}.get(action.kind, -1)
        whole += {ActionKind.FORWARD: 1, ActionKind.WEIGHT_GRADIENT: 0}.get(action.kind, -1)
        most_kept, most_whole = max(most_kept, kept), max(most_whole, whole)
    return most_kept, most_whole


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write ``trace`` as JSON. Raises OSError."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(trace.spans):
        place = {"pid": 0, "tid": rank}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"rank {rank}"}})
        for (kind, micro_batch, chunk), start, end in spans:
            letter, where = _LETTER_OF[kind], {"micro_batch": micro_batch, "chunk": chunk}
            times = {"ts": start * _MICRO, "dur": (end - start) * _MICRO}
            events.append({"ph": "X", "name": f"{letter} {micro_batch}", "cat": letter, **place, **times, "args": where})
    head = {"stages": trace.stages, "micro_batches": trace.micro_batches, "kind": trace.kind, "chunks": trace.chunks}
    Path(path).write_text(json.dumps({"otherData": head, "traceEvents": events}), encoding="utf-8")


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read and check a trace. Raises ScheduleError for the first thing that is wrong with it, and tells where."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ScheduleError(f"trace {path} cannot be read: {error}. Remedy: name a JSON file of a measured run.") from error
    try:
        return _trace(found)
    except ScheduleError as error:
        raise ScheduleError(f"trace {path}: {error} {_REMEDY}") from None


def _trace(found: Any) -> Trace:
    found = _fields(found, ("otherData", "traceEvents"), "the file")
    head, events = (
        _fields(found["otherData"], ("stages", "micro_batches", "kind", "chunks"), "otherData"),
        found["traceEvents"],
    )
    counts = {name: _whole(head[name], f"otherData: {name}", 1) for name in ("stages", "micro_batches", "chunks")}
    if head["kind"] not in SCHEDULES:
        raise ScheduleError(f"otherData: kind is {head['kind']!r}, and not one of {', '.join(SCHEDULES)}.")
    if not isinstance(events, list):
        raise ScheduleError("traceEvents is no list.")
    if counts["stages"] > len(events):
        raise ScheduleError(f"otherData: stages is {counts['stages']}, and there are {len(events)} events.")
    spans: list[list[Span]] = [[] for _ in range(counts["stages"])]
    for number, event in enumerate(events):
        place = f"traceEvents[{number}]"
        if _fields(event, ("ph",), place)["ph"] == "X":
            rank = _whole(_fields(event, ("tid",), place)["tid"], f"{place}: tid", 0, counts["stages"])
            spans[rank].append(_span(event, place, counts))
    for rank, row in enumerate(spans):
        _check_rank(row, rank, head["kind"], counts)
    return Trace(head["kind"], counts["stages"], counts["micro_batches"], counts["chunks"], tuple(map(tuple, spans)))


def _fields(found: Any, names: tuple[str, ...], place: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ScheduleError(f"{place} is no object with {', '.join(names)}.")
    for name in names:
        if name not in found:
            raise ScheduleError(f"{place} lacks {name!r}.")
    return found


def _whole(value: Any, place: str, least: int, below: float = math.inf) -> int:
    if type(value) is not int or not least <= value < below:
        bound = "" if below == math.inf else f" and below {below}"
        raise ScheduleError(f"{place} is {value!r}, and no whole number from {least} on{bound}.")
    return value


def _span(event: Any, place: str, counts: dict[str, int]) -> Span:
    event = _fields(event, ("cat", "ts", "dur", "args"), place)
    if event["cat"] not in LETTERS:
        raise ScheduleError(f"{place}: cat is {event['cat']!r}, and not one of {', '.join(LETTERS)}.")
    where = _fields(event["args"], ("micro_batch", "chunk"), f"{place}: args")
    micro_batch = _whole(where["micro_batch"], f"{place}: micro_batch", 0, counts["micro_batches"])
    chunk = _whole(where["chunk"], f"{place}: chunk", 0, counts["chunks"])
    for name in ("ts", "dur"):
        if type(event[name]) not in (int, float) or not math.isfinite(event[name]):
            raise ScheduleError(f"{place}: {name} is {event[name]!r}, and no time in microseconds.")
    if event["dur"] < 0 or not math.isfinite(event["ts"] + event["dur"]):
        raise ScheduleError(f"{place}: dur is {event['dur']}, and no time from {event['ts']} on.")
    action = Action(LETTERS[event["cat"]], micro_batch, chunk)
    return Span(action, event["ts"] / _MICRO, (event["ts"] + event["dur"]) / _MICRO)


def _check_rank(spans: Sequence[Span], rank: int, kind: str, counts: dict[str, int]) -> None:
    """Raise ScheduleError unless the rank computes one thing at a time, and each as often as it must."""
    end = -math.inf
    done: dict[tuple[int, int], list[str]] = {}
    for place, span in enumerate(spans):
        if span.start < end - _OVERLAP_SECONDS:
            raise ScheduleError(
                f"action {place} of rank {rank} starts at {span.start} s, while another one runs until {end} s."
            )
        end = span.end
        done.setdefault((span.action.micro_batch, span.action.chunk), []).append(_LETTER_OF[span.action.kind])
    expected = ["F"] if kind == FORWARD_ONLY else ["BF", "FIW"]
    for micro_batch in range(counts["micro_batches"]):
        for chunk in range(counts["chunks"]):
            letters = "".join(sorted(done.get((micro_batch, chunk), [])))
            if letters not in expected:
                need = "one F" if kind == FORWARD_ONLY else "one F and one B, or one F, I and W"
                raise ScheduleError(
                    f"rank {rank} has {letters or 'nothing'} of micro-batch {micro_batch}, chunk {chunk}, and not {need}."
                )
