"""A pipeline's times are those of the device, which comes to its work later than the program gives it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import run_ranks
from test_pipeline import plain_layers
from training import make_config

import zerorun
from zerorun.distributed.device import Clock
from zerorun.engine import pipeline_engine
from zerorun.pipeline.module import PipelineModule
from zerorun.pipeline.schedule.times import Times
from zerorun.pipeline.schedule.trace import read_trace

SECONDS = 7.0  # of each computation, to this device


class Later(Clock):
    """Of a device that takes ``SECONDS`` between two moments, and passes them when the program waits for it."""

    numbers = itertools.count()
    passed = -1

    def now(self) -> int:
        return next(self.numbers)

    def between(self, first: int, second: int) -> float:
        assert max(first, second) <= self.passed, "the device is not so far"
        return SECONDS * (second - first)


def wait(device: torch.device) -> None:
    Later.passed = next(Later.numbers)


def measured(path: Path) -> tuple[Any, list[float]]:
    """The times from which the schedule is made, and those of all computations that were recorded."""
    with mock.patch.object(pipeline_engine, "Clock", Later), mock.patch.object(pipeline_engine, "synchronize", wait):
        module = PipelineModule([*plain_layers()], num_stages=2, loss_fn=lambda out, labels: out.square().mean())
        engine = zerorun.initialize(module, make_config(1, accumulation=2, pipeline={"schedule": "zero_bubble"}))
        batch = (torch.ones(2, 4), None)
        for _ in range(3):
            engine.train_batch(iter([batch, batch]))
        engine.record(path, iter([batch, batch]))
        times = engine._times
        engine.destroy()
    return times, [span.end - span.start for row in read_trace(path).spans for span in row]


def test_times_are_those_of_the_device(tmp_path: Path) -> None:
    for times, spans in run_ranks(2, measured, tmp_path / "trace.json"):
        assert times == Times.make(2, SECONDS, SECONDS, SECONDS)
        assert spans and set(spans) == {SECONDS}
