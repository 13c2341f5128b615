"""Traces of some steps of an engine, on demand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import StepError
from ..monitors.step_trace import StepTrace
from ..pipeline.schedule.simulate import Span
from ..watch.board import board
from .whole_weights import WholeWeights


class Tracing(WholeWeights):
    """The part of an engine that ends its steps, and traces some of them."""

    _trace: StepTrace | None

    def trace(self, path: str | Path, steps: int = 3) -> None:
        """Trace the next ``steps`` steps on all ranks, and write them to ``path`` on rank 0 when the last is over.

        The file is a Chrome trace in JSON, which https://ui.perfetto.dev opens. All ranks must call it, between two steps.
        Raises StepError while another trace is not over.
        """
        if self._trace is not None:
            raise StepError("trace() was called while an earlier trace is not over. Remedy: wait until its steps are.")
        self._trace = StepTrace(path, steps, self.comm, self.sharded_model, self.device)

    def _end_step(self, *, over: bool) -> None:
        board.end_batch(self.global_steps, self.micro_steps, over=over)
        if over and self._trace is not None and self._trace.end_step(self._actions):
            self._trace = None

    def _end_trace(self) -> None:
        """Write what there is of a trace that is not over. All ranks must call it."""
        if self._trace is not None:
            self._trace.write()
            self._trace = None

    @property
    def _actions(self) -> Sequence[Span]:
        """What a pipeline stage did in the last step."""
        return ()
