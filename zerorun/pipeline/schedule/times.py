"""Times: how long the parts of one micro-batch take on each stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerorun.errors import ScheduleError


@dataclass(frozen=True)
class Times:
    """Times of one micro-batch, all in the same unit; one number per stage in each field.

    A stage is everything that a rank holds; if it holds several chunks, each takes an equal part of the time. ``transfer``
    is the time that a message from this stage travels. A backward takes ``input_gradient`` + ``weight_gradient``.
    """

    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    transfer: tuple[float, ...]

    @classmethod
    def make(
        cls,
        stages: int,
        forward: float | Sequence[float] = 1.0,
        input_gradient: float | Sequence[float] = 1.0,
        weight_gradient: float | Sequence[float] = 1.0,
        transfer: float | Sequence[float] = 0.0,
    ) -> Times:
        """Make times from one number for all stages, or one for each. Raises ScheduleError if they cannot be times."""
        given = {
            "forward": forward,
            "input_gradient": input_gradient,
            "weight_gradient": weight_gradient,
            "transfer": transfer,
        }
        found = {name: _per_stage(name, value, stages) for name, value in given.items()}
        times = cls(**found)
        if not sum(times.work(rank) for rank in range(stages)):
            raise ScheduleError("times: no stage takes any time. Remedy: give at least one time above 0.")
        return times

    def check(self, stages: int) -> None:
        """Raise ScheduleError if these are not the times of ``stages`` stages."""
        if len(self.forward) != stages:
            raise ScheduleError(
                f"times of {len(self.forward)} stages do not fit a schedule of {stages}. "
                f"Remedy: make them with Times.make({stages}, ...)."
            )

    def work(self, rank: int) -> float:
        """Return the time of the forward and the backward of one micro-batch on the stage ``rank``."""
        return self.forward[rank] + self.input_gradient[rank] + self.weight_gradient[rank]


def _per_stage(name: str, value: float | Sequence[float], stages: int) -> tuple[float, ...]:
    values = tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),) * stages
    if len(values) != stages:
        raise ScheduleError(
            f"times: {name} has {len(values)} numbers for {stages} stages. Remedy: give one for all, or one for each stage."
        )
    for stage, number in enumerate(values):
        if not 0 <= number < math.inf:
            raise ScheduleError(
                f"times: {name} of stage {stage} is {number}, which is no time. Remedy: give a finite number from 0 on."
            )
    return values
