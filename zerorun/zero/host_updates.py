"""Updates of units in host memory: one job for each unit, and the way of new weights to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ..distributed.device import Arrival
from ..distributed.waits import waiting
from ..ops.single_pass import SinglePassOptimizer, Where
from ..watch.board import NOBODY
from .flat_group import ROUNDED, TrainedGroup
from .offload.host_link import HostLink
from .offload.nvme import StateFile
from .optimizer_pieces import OptimizerPiece
from .unit import Unit, links_of

_AnyWhere = Callable[[Where | None], None]  # work on states, given where they are now


def begin_updates(
    units: Sequence[Unit], pieces: Sequence[OptimizerPiece], optimizer: SinglePassOptimizer, coefficient: float
) -> None:
    """Begin to update ``pieces``, unit by unit in the order of ``units``, from gradients times ``coefficient``.

    Settings of the optimizer's groups are taken now: a scheduler may change them before an update runs.
    """
    settings = optimizer.prepare(piece.tensor for piece in pieces)
    jobs: dict[int, list[_Job]] = {}
    for piece, taken in zip(pieces, settings, strict=True):
        jobs.setdefault(id(piece.flat_group), []).append(_Job(piece, optimizer, taken, coefficient))
    on_disk = [unit.index for unit in units if unit.placement.states_on_disk]
    following = dict(pairwise(on_disk))
    for link in links_of(units):
        link.open()
        if link.store is not None and on_disk:
            link.begin(partial(_begin_disk, link.store, on_disk[0]))
    for unit in units:
        found = [(flat_group, jobs[id(flat_group)]) for flat_group in unit.trainable if id(flat_group) in jobs]
        work: Callable[[], list[Arrival]] = partial(_update, unit, unit.link, found)
        if unit.placement.states_on_disk:
            assert unit.link.store is not None
            work = partial(_update_on_disk, unit, unit.link, unit.link.store, found, following.get(unit.index))
        unit.update_by(partial(_let_wait, unit.link.begin(work)))


def take_in(
    units: Sequence[Unit],
    pieces: Sequence[OptimizerPiece],
    optimizer: SinglePassOptimizer,
    take: Callable[..., None],
    coefficient: float | torch.Tensor,
) -> None:
    """Take the gradients of ``pieces`` into states of ``optimizer``, wherever these lie. Returns when that is done.

    ``take``: ``Muon.advance`` or ``Sophia.update_curvature`` of it. ``units``: in which the pieces may be.
    """
    settings = optimizer.prepare(piece.tensor for piece in pieces)
    jobs: dict[int, list[_AnyWhere]] = {}
    for piece, taken in zip(pieces, settings, strict=True):
        job = partial(take, piece.tensor, piece.gradient, taken, coefficient)
        jobs.setdefault(id(piece.flat_group), []).append(job)
    on_disk: list[tuple[Unit, list[_AnyWhere]]] = []
    for unit in units:
        own = [job for flat_group in unit.trainable for job in jobs.get(id(flat_group), ())]
        if unit.placement.states_on_disk and own:
            on_disk.append((unit, own))
        else:
            for begin in own:
                begin(None)
    if on_disk:
        link = on_disk[0][0].link
        link.begin(partial(_take_in_on_disk, link, on_disk))()


def _take_in_on_disk(link: HostLink, jobs: Sequence[tuple[Unit, Sequence[_AnyWhere]]]) -> None:
    assert link.store is not None
    _begin_disk(link.store, jobs[0][0].index)
    following = [unit.index for unit, _ in jobs[1:]]
    for (unit, own), after in zip(jobs, [*following, None], strict=True):
        where = link.store.open(unit.index)
        if after is not None:
            link.store.prefetch(after)
        for job in own:
            job(where)
        link.store.release(unit.index)


@dataclass(frozen=True)
class _Job:
    """The update of one piece."""

    piece: OptimizerPiece
    optimizer: SinglePassOptimizer
    settings: dict[str, Any]
    coefficient: float

    def run(self, out: torch.Tensor | None, where: Where | None) -> None:
        """``out``: where the new values go, rounded, besides the master. ``where``: as for ``update``."""
        self.optimizer.update(self.piece.tensor, self.piece.gradient, out, self.settings, self.coefficient, where)


def _let_wait(begun: Callable[[], list[Arrival]]) -> None:
    with waiting("the update of a unit in host memory", span=NOBODY):
        for arrival in begun():
            arrival.wait()


def _update_on_disk(
    unit: Unit, link: HostLink, store: StateFile, flat_groups: list[tuple[TrainedGroup, list[_Job]]], following: int | None
) -> list[Arrival]:
    """``_update`` in a buffer, while unit ``following`` is read, if there is one."""
    where = store.open(unit.index)
    if following is not None:
        store.prefetch(following)
    arrivals = _update(unit, link, flat_groups, where)
    for arrival in arrivals:
        arrival.synchronize()  # a master that is sent as it is lies in the buffer
    store.release(unit.index)
    return arrivals


def _begin_disk(store: StateFile, first: int) -> None:
    store.begin()
    store.prefetch(first)


@torch.inference_mode(False)  # the forward that waits for it may be in that mode; what it writes must not be
def _update(
    unit: Unit, link: HostLink, flat_groups: list[tuple[TrainedGroup, list[_Job]]], where: Where | None = None
) -> list[Arrival]:
    """Update ``flat_groups`` and begin to send what has to be sent."""
    weights_on_host = not link.apart or (unit.placement.params and not unit.resident)
    arrivals: list[Arrival] = []
    for flat_group, jobs in flat_groups:
        if flat_group.plan.master_is_weight or (flat_group.weight_is_beside_master and weights_on_host):
            for job in jobs:
                job.run(None if flat_group.plan.master_is_weight else job.piece.weight, where)
        elif flat_group.dtype in ROUNDED and flat_group.dtype != flat_group.master.dtype:
            arrivals.append(_update_and_send(link, flat_group, jobs, where))
        else:
            for job in jobs:
                job.run(None, where)
            masters = [job.piece.tensor if where is None else where(job.piece.tensor) for job in jobs]
            arrivals.append(link.send([(m.view(-1), job.piece.weight) for m, job in zip(masters, jobs, strict=True)]))
    return arrivals


def _update_and_send(link: HostLink, flat_group: TrainedGroup, jobs: list[_Job], where: Where | None) -> Arrival:
    """The update writes rounded weights into a staging buffer, and those go to the device: half the bytes of a master."""
    assert flat_group.master is not None
    place, rounded = link.rounding_place(flat_group.master.numel(), flat_group.dtype)
    pairs = []
    for job in jobs:
        part = rounded[job.piece.low : job.piece.low + job.piece.tensor.numel()]
        job.run(part, where)
        pairs.append((part, job.piece.weight))
    return link.send(pairs, place)
