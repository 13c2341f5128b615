"""The norm of a step's gradient, and the decision that follows from it: the coefficient of the update, or none.

[Note: nobody waits for the norm]
The update needs the norm for clipping, and to leave the weights alone where gradients are not finite. A program that asks a
GPU for it waits until the backward is done, and then the GPU waits until the program has given it new work. So where the
update runs on the device, ranks sum their squares on the device, too, and the coefficient is computed there. The kernels
read it from memory, and write nothing if it is NaN. The program goes on as if the step had been applied. It reads the
outcome before the next update, when that has long been known, or when somebody asks, and takes back what was in vain.

The program decides by itself, at once, on CPUs, where optimizer states are in host memory, and with optimizers that cannot
leave the decision to the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property

import torch

from ..distributed.device import CopyStream, Reading, queues
from ..distributed.transport.communicator import Communicator
from ..distributed.waits import waiting
from ..plan.step import NORM
from .unit import Unit

_WHAT = "the norm of the gradients: on a GPU, for every collective before it"


@dataclass(frozen=True)
class UnreadLosses:
    """The losses of a rank's micro-batches of one step that are on a device, where the program does not look at them.

    ``marks``: an fp64 scalar for each, NaN if the loss or its weight is of no use, and else 0. ``weights``: with which they
    came, fp64 scalars; 1 for a loss that has none.
    """

    marks: Sequence[torch.Tensor] = ()
    weights: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class Told:
    """What a rank tells the others before an update. ``bad_losses``: how many were NaN or infinite.

    ``weight``: the sum of those that losses came with. ``loss``: the sum of losses, which must be that of all ranks of its
    tensor group. ``wishes``: what else ranks want to know of each other; as many on every rank. ``unread``: losses that are
    not counted in ``bad_losses``, and weights that are not in ``weight``. ``must_know``: this rank must know the outcome at
    once.
    """

    bad_losses: int = 0
    weight: float = 0.0
    loss: float = 0.0
    wishes: Sequence[bool] = ()
    unread: UnreadLosses = UnreadLosses()
    must_know: bool = False


@dataclass(frozen=True)
class OwnNumbers:
    """What this rank adds to the sums: fp64 [3], see ``Summary``. On the device, if that queues.

    ``norms`` [n]: of the gradients of ``names``, or of their parts here, as far as they are on the device.
    """

    sums: torch.Tensor
    norms: torch.Tensor
    names: Sequence[str]

    @classmethod
    def of(cls, units: Sequence[Unit], device: torch.device, unread: UnreadLosses, *, counts: bool) -> OwnNumbers:
        """From the reduced gradients of ``units``. Waits for nothing. ``counts``: False if another rank has these losses.

        The shards of one shard group cover each element once; at stage 0 each rank sums its shard, too, so that all stages
        add the same numbers in the same order.
        """
        on_host, pieces, names = torch.zeros((), dtype=torch.float64), list[torch.Tensor](), list[str]()
        for flat_group in (flat_group for unit in units for flat_group in unit.trainable):
            if flat_group.plan.replication.counted:
                if queues(device) and flat_group.host_grad is None:
                    pieces += flat_group.grad_pieces
                    names += [flat_group.names[piece.entry] for piece in flat_group.pieces]
                else:
                    on_host = flat_group.local_square_sum() + on_host
        norms = _stacked(torch._foreach_norm(pieces, 2, dtype=torch.float64) if pieces else [], device)
        square_sum = norms.square().sum()
        if not queues(device):
            square_sum = on_host
        elif bool(on_host):  # a number on its way up, for which nothing waits
            square_sum = square_sum + float(on_host)
        marks, weights = (_stacked(values, device) for values in (unread.marks, unread.weights))
        bad = marks.isnan().logical_and_(weights)  # a mean of nothing, whose weight is 0, is no bad loss
        sums = torch.stack([square_sum, weights.sum() if counts else torch.zeros_like(square_sum), bad.sum().double()])
        return cls(sums, norms, names)

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradient is NaN or infinite here. Waits for the device."""
        pairs = zip(self.names, self.norms.tolist(), strict=True)
        return list(dict.fromkeys(name for name, norm in pairs if not math.isfinite(norm)))


class Norm:
    """How ranks agree on the norm of a step. ``copies`` brings numbers from the device."""

    def __init__(self, comm: Communicator, units: Sequence[Unit]) -> None:
        self._comm, self._units = comm, units
        self.copies = CopyStream(comm.device)

    def agree(self, told: Told, late: Sized, reduce_late: Callable[[], None]) -> Summary:
        """Add up what ranks tell in one small all-reduce, or, where the device sums by itself, in two. All must call it.

        ``late``: the gradients that came late on this rank. If any did on any rank, all call ``reduce_late``, and there is
        one more. Raises OrderError.
        """
        topology, by_device = self._comm.topology, self._comm.sums_on_device
        unused = any(False in flat_group.used for unit in self._units for flat_group in unit.trainable)
        first = topology.tensor_rank == 0  # tensor ranks have the same losses, so one of them counts
        other = told.loss * (topology.tensor - 1 if first else -1)  # the sum is 0 if the losses are the same
        own = [0.0, 0.0, 0.0] if by_device else self._read_own(told)
        known = [own[0], own[1] + told.weight * first, own[2] + told.bad_losses]
        flags = [len(late), unused, other, abs(other), told.must_know]
        total = self._sum([*known, *flags, *told.wishes, *self._comm.told_order()])
        _, _, _, late_sum, unused_sum, others, scale, must_know, *more = total.tolist()
        if late_sum:
            reduce_late()
            if not by_device:
                total[0] = self._sum(self._read_own(told)[:1])[0]
        self._comm.refuse_other_order(more[len(told.wishes) :])
        wishes = tuple(int(count) for count in more[: len(told.wishes)])
        sums, here = self._by_device(told, total[:3], bool(must_know)) if by_device else (total[:3], None)
        sums[0].div_(topology.replicate)
        return Summary(sums, here, unused_sum > 0, abs(others) / scale if scale else 0.0, wishes)

    def _by_device(self, told: Told, known: torch.Tensor, must_know: bool) -> tuple[torch.Tensor, OwnNumbers | None]:
        """The sums of all ranks' own numbers, with what is ``known``: on the device, unless some rank ``must_know``."""
        here = self._own(told)
        sums = self._comm.sum_on_device(here.sums, NORM)
        for number, value in zip(sums, known.tolist(), strict=True):
            if value:
                number += value
        return (torch.tensor(self._read(sums), dtype=torch.float64), None) if must_know else (sums, here)

    def _own(self, told: Told) -> OwnNumbers:
        return OwnNumbers.of(self._units, self._comm.device, told.unread, counts=self._comm.topology.tensor_rank == 0)

    def _read_own(self, told: Told) -> list[float]:
        return self._read(self._own(told).sums)

    def _read(self, numbers: torch.Tensor) -> list[float]:
        with waiting(_WHAT):
            return self.copies.read(numbers).wait()

    def _sum(self, numbers: Sequence[float]) -> torch.Tensor:
        return self._comm.control.sum(torch.tensor(numbers, dtype=torch.float64))


@dataclass(frozen=True)
class Summary:
    """What every rank knows before an update. Sums are over all data-parallel ranks.

    ``sums`` [3]: fp64, of the squares of all gradient elements, each once, before unscaling and averaging; of the weights
    that losses came with; of the bad losses. ``own``: this rank's part, if they are on the device and the decision is left
    to it. ``unused``: some parameter had no gradient on some rank. ``apart``: relative difference of losses that should be
    equal, those of one tensor-parallel group. ``wishes``: for each of those that ranks told, how many ranks have it.
    """

    sums: torch.Tensor
    own: OwnNumbers | None
    unused: bool
    apart: float = 0.0
    wishes: tuple[int, ...] = ()

    @property
    def deferred(self) -> bool:
        """True if the device decides."""
        return self.own is not None

    @property
    def bad_losses(self) -> int:
        """How many losses were NaN or infinite, as far as the program knows already."""
        return 0 if self.deferred else int(self.sums[2])

    @property
    def weight(self) -> torch.Tensor | float:
        """The sum of weights."""
        return self.sums[1] if self.deferred else float(self.sums[1])

    def decide(self, unscale: torch.Tensor | float, limit: float, copies: CopyStream) -> Decision:
        """Clip to a norm of ``limit``, or not at all if that is 0. ``unscale``: from accumulated to averaged gradients."""
        norm = torch.where(self.sums[2] == 0, self.sums[0].sqrt() * unscale, math.nan)
        clip = (torch.full_like(norm, limit) / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
        coefficient = torch.where(norm < math.inf, clip * unscale, math.nan)
        numbers = torch.cat([norm.view(1), self.sums])
        if self.deferred:
            return Decision(coefficient.float(), copies.read(numbers))
        return Decision(float(coefficient), Reading(numbers))


@dataclass(frozen=True)
class Decision:
    """What becomes of a step. ``coefficient``: of the update; NaN: nothing is written. A tensor is read by the device."""

    coefficient: torch.Tensor | float
    _reading: Reading

    @cached_property
    def outcome(self) -> Outcome:
        """Waits for the device, unless the program has decided."""
        with waiting(_WHAT):
            norm, _, weight, bad_losses = self._reading.wait()
        return Outcome(norm, math.isfinite(norm), weight, int(bad_losses))


@dataclass(frozen=True)
class Outcome:
    """What has come of a step. ``norm``: the 2-norm of its averaged, unclipped gradient; ``finite`` if it was applied."""

    norm: float
    finite: bool
    weight: float
    bad_losses: int


def _stacked(values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.stack(list(values)) if values else torch.zeros(0, dtype=torch.float64, device=device)
