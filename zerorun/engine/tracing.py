"""Traces of some steps of an engine, on demand."""

from __future__ import annotations

from pathlib import Path

from ..errors import StepError
from .whole_weights import WholeWeights


class Tracing(WholeWeights):
    """The part of an engine that traces some of its steps."""

    def trace(self, path: str | Path, steps: int = 3) -> None:
        """Trace the next ``steps`` steps on all ranks, and write them to ``path`` on rank 0 when the last is over.

        The file is a Chrome trace in JSON, which https://ui.perfetto.dev opens. All ranks must call it, between two steps.
        ``zerorun --trace`` asks for the same from outside, while a job runs.
        Raises StepError while another trace is not over.
        """
        if self._trace is not None:
            raise StepError("trace() was called while an earlier trace is not over. Remedy: wait until its steps are.")
        self._begin_trace(path, steps)

    def _end_trace(self) -> None:
        """Write what there is of a trace that is not over. All ranks must call it."""
        if self._trace is not None:
            self._trace.write()
            self._trace = None
