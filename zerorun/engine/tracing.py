"""Traces of some steps of an engine, on demand."""

from __future__ import annotations

from pathlib import Path

from ..errors import StepError
from ..monitors.step_trace import StepTrace
from ..watch.board import board
from .offloading import Offloading
from .saving import Saving


class Tracing(Saving, Offloading):
    """The part of an engine that traces some of its steps."""

    def trace(self, path: str | Path, steps: int = 3) -> None:
        """Trace the next ``steps`` steps on all ranks, and write them to ``path`` on rank 0 when the last is over.

        The file is a Chrome trace in JSON, which https://ui.perfetto.dev opens. All ranks must call it, between two steps.
        ``zerorun --trace`` asks for the same from outside, while a job runs.
        Raises StepError while another trace is not over.
        """
        if self._trace is not None:
            raise StepError("trace() was called while an earlier trace is not over. Remedy: wait until its steps are.")
        if self._sample is not None:
            self._sample.stop()
        self._trace = StepTrace(path, steps, self.comm, self.sharded_model, self.device)

    def _trace_as_agreed(self) -> None:
        """Begin the trace that somebody has asked for, unless there is one. All ranks must call it."""
        steps, file = board.take_trace()
        if self._trace is None:
            self.trace(file, steps)

    def _end_trace(self) -> None:
        """Write what there is of a trace that is not over. All ranks must call it."""
        if self._trace is not None:
            self._trace.write()
            self._trace = None
