"""A trace of some steps: what each rank did when, in Chrome's format, which Perfetto and chrome://tracing show.

[Note: tracks]
A rank is a process of the trace, and each track of it has spans that nest. *program* has the phases and waits that the
board has (zerorun/watch), by the host's clock. The others are by the device's: *computation* has the forwards and backwards
of units and the parts of step(), *pipeline* its actions; collectives are on tracks of their kind, from their issue to the
moment when their result was there and needed, and side by side where several are in flight. An arrow marks each issue,
with its bytes: these are the calls that communication_report() counts.

[Note: one clock]
Ranks of one host share the clock. Of each other host one rank answers rank 0 some times, and the shortest way there and
back says how far its clock is ahead, up to half of that way.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import torch
from torch import nn

from ..distributed.device import synchronize
from ..distributed.stopwatch import Stopwatch
from ..distributed.transport.communicator import Communicator
from ..distributed.transport.world import collect, nanoseconds_ahead
from ..errors import StepError
from ..log import logger
from ..pipeline.schedule.actions import Action
from ..watch.board import Phase, Span, board
from ..zero.placeholders import tensors_in
from ..zero.sharded_model import ShardedModel
from ..zero.unit import Unit
from .breakdown import TimedModel, kind_of, watch_communication

PROGRAM, COMPUTATION, PIPELINE = "program", "computation", "pipeline"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of a host, and so of its clock


class TraceEvent(NamedTuple):
    """Something that took ``ns`` from ``begun`` on, by this host's monotonic clock; -1: a moment."""

    track: str
    name: str
    begun: int
    ns: int
    args: dict[str, Any]


class _Track:
    """Spans that nest, as they begin and end."""

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self._open: list[tuple[str, Any, dict[str, Any]]] = []
        self.spans: list[tuple[str, Any, Any, dict[str, Any]]] = []

    @property
    def is_open(self) -> bool:
        """True if a span has not ended."""
        return bool(self._open)

    def begin(self, name: str, **args: Any) -> None:
        self._open.append((name, self._now(), args))

    def end(self, name: str | None = None) -> None:
        """End the last span called ``name``, and what began in it; None: all. Nothing, if there is none."""
        if name is None or any(name == each for each, *_ in self._open):
            now, last = self._now(), None
            while self._open and (name is None or last != name):
                last, begun, args = self._open.pop()
                self.spans.append((last, begun, now, args))


class Tracer(Stopwatch):
    """Notes what this rank does, from when it is made until ``stop``. It tells ``before`` what that would be told."""

    def __init__(self, device: torch.device, before: Stopwatch | None) -> None:
        super().__init__(device)
        self._device, self._before = device, before
        self._program, self._computation = _Track(monotonic_ns), _Track(self.now)
        self._issued: list[tuple[str, int, int]] = []
        self._actions: list[tuple[Action, Any, Any]] = []
        self._attached: list[Any] = []
        self._backward = ""  # the last that has begun: it lasts until that of another unit begins
        synchronize(device)
        self._zero = self.now(), monotonic_ns()

    def start(self, comm: Communicator, model: ShardedModel) -> None:
        """Begin, between two steps."""
        watch_communication(comm, self)
        model.become(TimedModel)
        board.tell(self)
        for unit in model.units:
            self._attached += [handle for module in unit.modules for handle in self._looking_at(unit, module)]

    def stop(self, comm: Communicator, model: ShardedModel) -> list[TraceEvent]:
        """End, between two steps, and return what was noted."""
        board.tell(None)
        watch_communication(comm, self._before)
        model.become(ShardedModel if self._before is None else TimedModel)
        for handle in self._attached:
            handle.remove()
        self._program.end()
        self._computation.end()
        synchronize(self._device)
        return sorted(self._events(), key=lambda event: (event.begun, -event.ns))

    # -- as a stopwatch ------------------------------------------------------------------------------------------

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        with nullcontext() if self._before is None else self._before.during(name):
            self._computation.begin(name)
            try:
                yield
            finally:
                self._computation.end(name)

    def add(self, name: str, begun: Any, waited_from: Any = None) -> None:
        super().add(name, begun, waited_from)
        if self._before is not None:
            self._before.add(name, begun, waited_from)

    def issue(self, label: str, sent_bytes: int) -> None:
        self._issued.append((label, monotonic_ns(), sent_bytes))

    def end_step(self, last_phase: str) -> None:
        if self._before is not None:
            self._before.end_step(last_phase)

    # -- the program and the units -------------------------------------------------------------------------------

    def enter(self, phase: int) -> None:
        """The board of this rank is told of a phase."""
        self._computation.end()
        self._program.end()
        self._program.begin(Phase(phase).name.lower())

    def wait_begins(self, label: str, span: Span, number: int) -> None:
        """The board of this rank is told of a wait."""
        first, stride, count = span
        ranks = {} if count <= 0 else {"ranks": list(range(first, first + stride * count, stride))}
        self._program.begin(f"wait: {label}", number=number, **ranks)

    def wait_ends(self, label: str) -> None:
        """The wait is over."""
        self._program.end(f"wait: {label}")

    def note_actions(self, actions: Sequence[tuple[Action, Any, Any]]) -> None:
        """Actions of a pipeline, with the moments at which they began and ended."""
        self._actions += actions

    def _looking_at(self, unit: Unit, module: nn.Module) -> Iterator[Any]:
        forward, backward = f"{unit.name}: forward", f"{unit.name}: backward"

        def comes_back(grad: torch.Tensor) -> None:
            if unit.index or not self._computation.is_open:  # the root and its last block may have the same outputs
                self._computation.end(self._backward)
                self._computation.begin(backward)
                self._backward = backward

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._computation.end(forward)
            found = next((tensor for tensor in tensors_in(output) if tensor.requires_grad), None)
            if found is not None:
                found.register_hook(comes_back)

        yield module.register_forward_pre_hook(lambda *_: self._computation.begin(forward))
        yield module.register_forward_hook(leave)

    # -- events --------------------------------------------------------------------------------------------------

    def _at(self, moment: Any) -> int:
        first, ns = self._zero
        return ns + round(1e9 * self._clock.between(first, moment))

    def _events(self) -> Iterator[TraceEvent]:
        for name, begun, ended, args in self._program.spans:
            yield TraceEvent(PROGRAM, name, begun, ended - begun, args)
        for name, begun, ended, args in self._computation.spans:
            yield TraceEvent(COMPUTATION, name, self._at(begun), self._at(ended) - self._at(begun), args)
        for action, begun, ended in self._actions:
            args = {"micro_batch": action.micro_batch, "chunk": action.chunk}
            yield TraceEvent(PIPELINE, action.kind.name.lower(), self._at(begun), self._at(ended) - self._at(begun), args)
        for label, when, sent in self._issued:
            yield TraceEvent(kind_of(label), label, when, -1, {"bytes": sent})
        for name, begun, ended, needed in self._step:
            waited = {} if needed is None else {"waited_ms": round(1e3 * self._clock.between(needed, ended), 3)}
            yield TraceEvent(kind_of(name), name, self._at(begun), self._at(ended) - self._at(begun), waited)


class StepTrace:
    """A trace of ``steps`` steps that rank 0 writes to ``path``. All ranks make it at the same place of their loops."""

    def __init__(self, path: str | Path, steps: int, comm: Communicator, model: ShardedModel, device: torch.device) -> None:
        if steps < 1:
            raise StepError(f"trace(steps={steps}): there is nothing to trace. Remedy: give 1 or more.")
        self._path, self._left, self._comm, self._model = Path(path), steps, comm, model
        self._tracer = Tracer(device, comm.statistics.watch)
        self._tracer.start(comm, model)

    def end_step(self, actions: Sequence[tuple[Action, Any, Any]]) -> bool:
        """A step is over. True if it was the last; then the trace is written. ``actions``: of a pipeline."""
        self._tracer.note_actions(actions)
        self._left -= 1
        if not self._left:
            self.write()
        return not self._left

    def write(self) -> None:
        """Write what was noted so far. All ranks must call it."""
        events = self._tracer.stop(self._comm, self._model)
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
        hosts = self._comm.control.values((boot, socket.gethostname()))
        firsts = [[other for other, _ in hosts].index(name) for name, _ in hosts]  # the first rank of each rank's host
        ahead = nanoseconds_ahead(sorted(set(firsts) - {0}))
        found = collect(json.dumps(events).encode(), "rank 0 to collect the trace")
        if found:
            parts = [[TraceEvent(*event) for event in json.loads(part)] for part in found]
            names = [f"rank {number} on {host}" for number, (_, host) in enumerate(hosts)]
            try:
                self._path.write_text(as_json(parts, names, [ahead[first] for first in firsts]))
            except OSError as error:  # on this rank alone, while the others go on
                logger.warning("the trace cannot be written to %s: %s", self._path, error.strerror)


def as_json(parts: Sequence[Sequence[TraceEvent]], names: Sequence[str], ahead_ns: Sequence[int]) -> str:
    """The file, of the events of each rank in their order. ``ahead_ns``: its clock minus that of rank 0."""
    moments = [event.begun - ahead for part, ahead in zip(parts, ahead_ns, strict=True) for event in part]
    zero, rows = min(moments, default=0), []
    for number, (part, name, ahead) in enumerate(zip(parts, names, ahead_ns, strict=True)):
        rows.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        tracks: dict[str, int] = {}
        for event, track in _side_by_side(part):
            place = {"pid": number, "tid": tracks.setdefault(track, len(tracks))}
            kind = {"ph": "i", "s": "t"} if event.ns < 0 else {"ph": "X", "dur": event.ns / 1e3}
            kind |= {"name": event.name, "cat": event.track, "ts": (event.begun - ahead - zero) / 1e3}
            rows.append({**kind, **place, "args": event.args})
        for track, tid in tracks.items():
            rows.append({"ph": "M", "name": "thread_name", "pid": number, "tid": tid, "args": {"name": track}})
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n"


def _side_by_side(events: Sequence[TraceEvent]) -> Iterator[tuple[TraceEvent, str]]:
    """Events in their order, with the track of each: more than one where spans of a kind overlap and do not nest."""
    open_until: dict[str, list[int]] = {}
    for event in events:
        number, end = 1, event.begun + event.ns
        while event.ns >= 0:
            ends = open_until.setdefault(f"{event.track} {number}", [])
            while ends and ends[-1] <= event.begun:
                ends.pop()
            if not ends or (end <= ends[-1] and event.track in (PROGRAM, COMPUTATION)):
                ends.append(end)
                break
            number += 1
        yield event, event.track if number == 1 else f"{event.track} {number}"
