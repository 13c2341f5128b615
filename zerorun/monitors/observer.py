"""The observer of a run: it is told of each step when its outcome is known, writes to monitors, and prints progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ..config.schema import Config
from ..distributed.device import most_used_bytes
from ..distributed.stopwatch import Stopwatch
from ..distributed.topology import Topology
from ..distributed.transport.communicator import Communicator
from ..log import counted, in_bytes, logger
from ..watch.board import board
from ..zero.reducer import Backwards
from .breakdown import (
    BACKWARD,
    FORWARD,
    PHASES,
    Breakdown,
    CommunicationTable,
    ForwardHooks,
    TimedBackwards,
    watch_communication,
)
from .flops import FlopsProfile, StepSizes
from .monitor import Event, Monitor

_TIMED_EVERY = 10  # steps, where steps_per_print does not say
_PREFIX = "Train/Samples/"
# How schedules call the number of steps that they are made for: DeepSpeed's, and torch's OneCycleLR.
_TOTALS = ("total_num_steps", "total_steps")


@dataclass(frozen=True)
class StepRecord:
    """What is known of a step. ``step``, ``samples``, ``skipped``: counts so far, with this one.

    ``own_samples``: of this step alone, over all ranks; ``micro_batch``: samples of a forward on one data-parallel rank.
    ``loss``: the mean over micro-batches and data-parallel ranks; None if no rank told one. ``norm``: None if the step was
    skipped. ``rates``: the learning rates after it, by parameter group. ``scale``: the loss scale after it, in fp16.
    """

    step: int
    samples: int
    skipped: int
    own_samples: int
    micro_batch: int
    loss: float | None
    norm: float | None
    rates: list[float]
    scale: float | None


@dataclass(frozen=True)
class Speed:
    """Per second, over all ranks. ``tokens``: None if they are not known."""

    samples: float
    tokens: float | None
    steps: float


class Meter:
    """Counts steps and tokens, and tells how fast they went since it was last read."""

    def __init__(self) -> None:
        self._begun: float | None = None  # when the first step was counted, from which on it is known
        self._samples = self._tokens = self._steps = 0

    def count(self, samples: int, tokens: int) -> None:
        """Count a step."""
        if self._begun is None:
            self._begun = time.perf_counter()
            return
        self._steps, self._samples, self._tokens = self._steps + 1, self._samples + samples, self._tokens + tokens

    def read(self) -> Speed | None:
        """The speed since the last call, between the ends of steps; None if that is not known yet."""
        if not self._steps or self._begun is None:
            return None
        now = time.perf_counter()
        seconds, self._begun = max(now - self._begun, 1e-9), now
        found = Speed(self._samples / seconds, self._tokens / seconds if self._tokens else None, self._steps / seconds)
        self._samples = self._tokens = self._steps = 0
        return found


def observes(config: Config) -> bool:
    """True if rank 0 has something to tell of a run."""
    wanted = config.observes_loss or config.wall_clock_breakdown or config.comms_logger.enabled
    return wanted or config.flops_profiler.enabled


class RunObserver:
    """What rank 0 tells of a run."""

    def __init__(self, config: Config, topology: Topology, device: torch.device) -> None:
        self.monitor = Monitor(config)
        self._device = device
        every = config.steps_per_print
        self._every = int(every) if every and math.isfinite(every) else 0
        params = config.scheduler.params if config.scheduler is not None else {}
        self._total = next((int(params[name]) for name in _TOTALS if params.get(name)), None)
        self._replicas = topology.data_parallel_size
        self._tokens = {True: 0, False: 0}  # by whether the module was in training mode
        self._each, self._printed = Meter(), Meter()
        self.watch = Stopwatch(device) if config.wall_clock_breakdown or config.comms_logger.enabled else None
        self._breakdown = Breakdown() if config.wall_clock_breakdown else None
        self._table = CommunicationTable(config.comms_logger) if config.comms_logger.enabled else None
        self._timed_every = self._every or _TIMED_EVERY
        profiles = config.flops_profiler.enabled
        self.flops = FlopsProfile(config, topology, device) if profiles else None

    @classmethod
    def make(cls, config: Config, topology: Topology, device: torch.device) -> RunObserver | None:
        """That of rank 0, and None elsewhere, for what ``observes``. Raises ConfigError if a monitor cannot begin."""
        return cls(config, topology, device) if topology.rank == 0 else None

    def count_steps_by(self, steps_so_far: Callable[[], int]) -> None:
        """Ask this how many steps of the run are over."""
        if self.flops is not None:
            self.flops.count_steps_by(steps_so_far)

    def watching(self, comm: Communicator, backwards: Backwards) -> Backwards:
        """Begin to time collectives, if times are wanted. Returns what is to be told of backwards instead."""
        if self.watch is None:
            return backwards
        watch_communication(comm, self.watch)
        return TimedBackwards(backwards, self.watch)

    def attached_to(self, module: nn.Module) -> list[Any]:
        """Look at the forwards of ``module`` until what is returned is removed."""
        timed = [] if self.watch is None else [ForwardHooks(module, self.watch)]
        flops = [] if self.flops is None else self.flops.attached_to(module)
        return [module.register_forward_pre_hook(self._look, with_kwargs=True), *timed, *flops]

    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tokens of a micro-batch from the arguments of its forward."""
        if torch.is_grad_enabled():
            self._tokens[module.training] += tokens_in(args, kwargs)

    def observe(self, record: StepRecord, report: Callable[[], dict[str, dict[str, int]]]) -> None:
        """A step is over, and its outcome is known. ``report`` gives calls and bytes of collectives, by label."""
        tokens, self._tokens = (self._tokens[True] or self._tokens[False]) * self._replicas, {True: 0, False: 0}
        for meter in (self._each, self._printed):
            meter.count(record.own_samples, tokens)
        speed = self._each.read()
        if self.monitor.enabled:
            self.monitor.write_events(self._events(record, speed))
        if self.flops is not None:
            micro_batches = record.own_samples // (record.micro_batch * self._replicas)
            sizes = StepSizes(record.own_samples, micro_batches, record.micro_batch)
            self.flops.observe(record.step - 1, sizes, None if speed is None else 1 / speed.steps)
        if self._every and record.step % self._every == 0:
            logger.info("%s", self._line(record, self._printed.read()))
        if self.watch is not None:
            self._tell_times(self.watch, record, report)

    def write_loads(self, loads: Mapping[str, list[int]], samples: int) -> None:
        """Write how many times the mean the largest load of an expert is, by layer: 1 if all get as many rows."""
        found = {layer: len(rows) * max(rows) / max(sum(rows), 1) for layer, rows in loads.items()}
        self.monitor.write_events([(f"{_PREFIX}expert_load/{layer}", value, samples) for layer, value in found.items()])

    def _tell_times(self, watch: Stopwatch, record: StepRecord, report: Callable[[], dict[str, dict[str, int]]]) -> None:
        """Of the steps before this one that the device has passed."""
        for step in watch.read():
            for line in self._table.add(step) if self._table is not None else ():
                logger.info("%s", line)
            if self._breakdown is not None:
                self._breakdown.add(step)
        if record.step % self._timed_every:
            return
        if self._breakdown is not None and self._breakdown.steps:
            logger.info(
                "mean of %s before step %d: %s", counted(self._breakdown.steps, "step"), record.step, self._breakdown.line()
            )
            self.monitor.write_events(self._elapsed(self._breakdown, record.samples))
            self._breakdown = Breakdown()
        if self._table is not None:
            logger.info("%s", self.communication_table(report()))

    def _elapsed(self, found: Breakdown, samples: int) -> list[Event]:
        values = {
            "forward": found.milliseconds(FORWARD),
            "backward": found.milliseconds(BACKWARD),
            "backward_allreduce": 1e3 * found.waited["reduce"] / found.steps,
            "step": found.milliseconds(*PHASES[2:]),
        }
        return [(f"{_PREFIX}elapsed_time_ms_{name}", value, samples) for name, value in values.items()]

    def communication_table(self, report: dict[str, dict[str, int]]) -> str:
        """Calls, bytes and times of collectives, if ``comms_logger`` is on; else calls and bytes."""
        return "\n".join(self._table.lines(report)) if self._table is not None else str(report)

    def _events(self, record: StepRecord, speed: Speed | None) -> list[Event]:
        values = {
            "train_loss": record.loss,
            "lr": record.rates[0] if record.rates else None,
            "loss_scale": record.scale,
            "grad_norm": record.norm,
            "skipped_steps": record.skipped,
            "samples_per_second": speed.samples if speed is not None else None,
            "tokens_per_second": speed.tokens if speed is not None else None,
            "peak_memory_gib": most_used_bytes(self._device) / 2**30,
            **dict(zip(("slow_rank", "slow_rank_ratio"), board.slow or (), strict=False)),
        }
        return [(_PREFIX + name, value, record.samples) for name, value in values.items() if value is not None]

    def _line(self, record: StepRecord, speed: Speed | None) -> str:
        left = speed and self._total and timedelta(seconds=round(max(self._total - record.step, 0) / speed.steps))
        parts = (
            f"step {record.step}{f' of {self._total}' if self._total else ''}",
            record.loss is not None and f"loss {record.loss:.6g}",
            f"norm {record.norm:.4g}" if record.norm is not None else "not applied",
            f"lr {', '.join(f'{rate:.3e}' for rate in record.rates)}",
            record.scale is not None and f"loss scale {record.scale:g}",
            f"skipped {record.skipped}",
            speed and f"{speed.samples:,.1f} samples/s",
            speed and speed.tokens and f"{speed.tokens:,.0f} tokens/s",
            f"at most {in_bytes(most_used_bytes(self._device))}",
            isinstance(left, timedelta) and f"{left} left",
        )
        return ", ".join(part for part in parts if part)

    def close(self, comm: Communicator, report: dict[str, dict[str, int]]) -> None:
        """The run is over."""
        if self._table is not None:
            logger.info("%s", self.communication_table(report))
        watch_communication(comm, None)
        self.monitor.close()


def tokens_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The tokens given to a forward: elements of ``input_ids``, or of a first argument [batch, sequence] of integers."""
    given = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(given, Mapping):  # as a BatchEncoding of transformers, which is no dict
        given = given.get("input_ids")
    if not isinstance(given, torch.Tensor) or given.ndim != 2:
        return 0
    return 0 if given.is_floating_point() or given.is_complex() else given.numel()
