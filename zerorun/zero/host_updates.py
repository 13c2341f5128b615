"""Updates of units in host memory: one job for each unit, and the way of new weights to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..ops.single_pass import SinglePassOptimizer
from .pieces import OptimizerPiece
from .placement import Arrival, HostLink
from .unit import Segment, Unit

_ROUNDED = (torch.float32, torch.bfloat16, torch.float16)  # what updates can write


def beside_master(segment: Segment) -> bool:
    """True if the weight is another tensor than the master, on the same device, in a dtype that updates can write."""
    master, weight = segment.master, segment.weight
    return (
        master is not None
        and not segment.master_is_weight
        and weight.dtype in _ROUNDED
        and weight.device == master.device
    )


def weight_of(piece: OptimizerPiece) -> torch.Tensor:
    """The compute-dtype values of what ``piece`` updates: flat."""
    return piece.segment.weight[piece.low : piece.low + piece.tensor.numel()]


def begin_updates(
    units: Sequence[Unit], pieces: Sequence[OptimizerPiece], optimizer: SinglePassOptimizer, coefficient: float
) -> None:
    """Begin to update ``pieces``, unit by unit in the order of ``units``, from gradients times ``coefficient``.

    Settings of the optimizer's groups are taken now: a scheduler may change them before an update runs.
    """
    settings = optimizer.prepare(piece.tensor for piece in pieces)
    jobs: dict[int, list[_Job]] = {}
    for piece, taken in zip(pieces, settings, strict=True):
        jobs.setdefault(id(piece.segment), []).append(_Job(piece, optimizer, taken, coefficient))
    for link in dict.fromkeys(unit.link for unit in units):
        assert link is not None
        link.open()
    for unit in units:
        assert unit.link is not None
        found = [(segment, jobs[id(segment)]) for segment in unit.trainable if id(segment) in jobs]
        unit.update_by(partial(_let_wait, unit.link.begin(partial(_update, unit.link, found))))


@dataclass(frozen=True)
class _Job:
    """The update of one piece."""

    piece: OptimizerPiece
    optimizer: SinglePassOptimizer
    settings: dict[str, Any]
    coefficient: float

    def run(self, out: torch.Tensor | None) -> None:
        """``out``: where the new values go, rounded, besides the master."""
        self.optimizer.update(self.piece.tensor, self.piece.gradient, out, self.settings, self.coefficient)


def _let_wait(begun: Callable[[], list[Arrival]]) -> None:
    for arrival in begun():
        arrival.wait()


@torch.inference_mode(False)  # the forward that waits for it may be in that mode; the optimizer's state must not be
def _update(link: HostLink, segments: list[tuple[Segment, list[_Job]]]) -> list[Arrival]:
    """Update ``segments`` and begin to send what has to be sent."""
    arrivals: list[Arrival] = []
    for segment, jobs in segments:
        if segment.master_is_weight or (beside_master(segment) and not link.apart):
            for job in jobs:
                job.run(None if segment.master_is_weight else weight_of(job.piece))
        elif segment.dtype in _ROUNDED and segment.dtype != torch.float32:
            arrivals.append(_update_and_send(link, segment, jobs))
        else:
            for job in jobs:
                job.run(None)
            arrivals.append(link.send([(job.piece.tensor.view(-1), weight_of(job.piece)) for job in jobs]))
    return arrivals


def _update_and_send(link: HostLink, segment: Segment, jobs: list[_Job]) -> Arrival:
    """The update writes rounded weights into a staging buffer, and those go to the device: half the bytes of a master."""
    assert segment.master is not None
    place, rounded = link.rounding_place(segment.master.numel(), segment.dtype)
    pairs = []
    for job in jobs:
        part = rounded[job.piece.low : job.piece.low + job.piece.tensor.numel()]
        job.run(part)
        pairs.append((part, weight_of(job.piece)))
    return link.send(pairs, place)
