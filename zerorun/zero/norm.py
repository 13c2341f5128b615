"""The norm of a step's gradient, and the decision that follows from it: the coefficient of the update, or none.

[Note: nobody waits for the norm]
The update needs the norm for clipping, and to leave the weights alone where gradients are not finite. A program that asks a
GPU for it waits until the backward is done, and then the GPU waits until the program has given it new work. So where the
update runs on the device, ranks sum their squares on the device, too, and the coefficient is computed there. The kernels
read it from memory, and write nothing if it is NaN. The program goes on as if the step had been applied. It reads the
outcome before the next update, when that has long been known, or when somebody asks, and takes back what was in vain.

The program decides by itself, at once, on CPUs, where optimizer states are in host memory, and with optimizers that cannot
leave the decision to the device.

[Note: one sum for what is alike]
What a script must do alike, on all ranks of a pipeline stage and to all copies of a tied parameter, is compared in the sum
that ranks make in each step anyway. Of n that must be alike, the first adds (n - 1) times a checksum of what it has, and
the others each take theirs off. The sum is 0 if all are alike, however many stages and copies there are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ..distributed.device import CopyStream, Reading
from ..distributed.transport.communicator import Communicator
from ..distributed.waits import waiting
from ..plan.step_collectives import NORM
from .unit import Unit

Sums = torch.Tensor | list[float]
_WHAT = "the norm of the gradients: on a GPU, for every collective before it"
_BITS = 0xFFFFFF  # of checksums, so that their sums over all ranks are exact in fp64
_ROUNDING = 1e-12  # of sums in fp64, relative


@dataclass(frozen=True)
class UnreadLosses:
    """The losses of a rank's micro-batches of one step that are on a device, where the program does not look at them.

    ``marks``: an fp64 scalar for each, NaN if the loss or its weight is of no use, and else 0. ``weights``: with which they
    came, fp64 scalars; 1 for a loss that has none.
    """

    marks: Sequence[torch.Tensor] = ()
    weights: Sequence[torch.Tensor] = ()


class Alike(NamedTuple):
    """What must be the same on all ranks that have it; None where a rank has none, as a pipeline stage without a loss.

    ``divisor``: by which gradients are divided, 0 if losses come with weights. ``losses``: how many are averaged.
    """

    divisor: int | None
    losses: int | None


class Differing(NamedTuple):
    """Which of ``Alike`` is not the same."""

    divisor: bool = False
    losses: bool = False


ALL_ALIKE = Differing()


class StageState(NamedTuple):
    """What all ranks of a pipeline stage must have alike in a step: treated otherwise by a script, they go apart.

    ``rates``: those of the optimizer's groups, rounded. ``writes``: how often scripts have written to parameters.
    ``frozen``: how many parameters they have frozen.
    """

    rates: tuple[str, ...]
    writes: int
    frozen: int


@dataclass(frozen=True)
class Told:
    """What a rank tells the others before an update. ``bad_losses``: how many were NaN or infinite.

    ``weight``: the sum of those that losses came with. ``loss``: the sum of losses, which must be that of all ranks of its
    tensor group. ``wishes``: what else ranks want to add up; as many on every rank. ``alike``: what is compared.
    ``data``: a checksum of what this rank has read, None if there is none to compare. ``unread``: losses that are not
    counted in ``bad_losses``, and weights that are not in ``weight``. ``must_know``: this rank must know the outcome at
    once. ``observed``: if ranks want to know the loss of the step, fp64 [2] on the device: the sum of this rank's losses,
    and what the sum over ranks is to be divided by.
    """

    bad_losses: int = 0
    weight: float = 0.0
    loss: float = 0.0
    wishes: Sequence[int] = ()
    alike: Alike | None = None
    data: int | None = None
    unread: UnreadLosses = UnreadLosses()
    must_know: bool = False
    observed: torch.Tensor | None = None


@dataclass(frozen=True)
class OwnNumbers:
    """What this rank adds to the sums: fp64 [3], or [5] with those that it observed, see ``Summary``. On the device, if
    that queues.

    ``norms`` [n]: of the gradients of ``names``, or of their parts here, as far as they are on the device.
    """

    sums: torch.Tensor
    norms: torch.Tensor
    names: Sequence[str]

    @classmethod
    def of(cls, units: Sequence[Unit], device: torch.device, told: Told, *, counts: bool) -> OwnNumbers:
        """From the reduced gradients of ``units``. Waits for nothing. ``counts``: False if another rank has these losses.

        The shards that count cover each element once; at stage 0 each rank sums its shard, too, so that all stages add the
        same numbers in the same order.
        """
        counted = [group for unit in units for group in unit.trainable if group.plan.counted]
        on_device = [group for group in counted if group.host_grad is None]
        pieces = [piece for group in on_device for piece in group.grad_pieces]
        names = [group.names[piece.entry] for group in on_device for piece in group.pieces]
        norms = _stacked(torch._foreach_norm(pieces, 2, dtype=torch.float64) if pieces else [], device)
        square_sum = norms.square().sum()
        if len(on_device) < len(counted):
            square_sum = square_sum + square_sum_on_host(units, offloaded_only=True)  # nothing waits while it goes up
        marks, weights = (_stacked(values, device) for values in (told.unread.marks, told.unread.weights))
        bad = marks.isnan().logical_and_(weights)  # a mean of nothing, whose weight is 0, is no bad loss
        sums = torch.stack([square_sum, weights.sum() if counts else torch.zeros_like(square_sum), bad.sum().double()])
        if told.observed is not None:
            sums = torch.cat([sums, told.observed if counts else torch.zeros_like(told.observed)])
        return cls(sums, norms, names)

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradient is NaN or infinite here. Waits for the device."""
        pairs = zip(self.names, self.norms.tolist(), strict=True)
        return list(dict.fromkeys(name for name, norm in pairs if not math.isfinite(norm)))


def square_sum_on_host(units: Sequence[Unit], *, offloaded_only: bool = False) -> float:
    """Of this rank's reduced gradients, which are in host memory, or as far as they are."""
    total = torch.zeros((), dtype=torch.float64)
    for group in (group for unit in units for group in unit.trainable if group.plan.counted):
        if group.host_grad is not None or not offloaded_only:
            total = group.local_square_sum() + total
    return float(total)


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
        leads = topology.same_batch_rank == 0
        other = told.loss * (topology.same_batch - 1 if leads else -1)  # the sum is 0 if the losses are the same
        own = [0.0, 0.0, 0.0] if by_device else self._read_own(told)
        known = [own[0], own[1] + told.weight * first, own[2] + told.bad_losses, *own[3:]]
        flags = [len(late), unused, other, abs(other), told.must_know]
        compared = told.alike or ()
        alike = [float(part) for x in (*compared, told.data) for part in ((0, 0, 0) if x is None else (1, x, x * x))]
        total = self._sum([*known, *flags, *told.wishes, *alike, *self._comm.told_order()])
        found, rest = (part.tolist() for part in total.tensor_split([len(known)]))
        late_sum, unused_sum, others, scale, must_know, *more = rest
        if late_sum:
            reduce_late()
            if not by_device:
                found[0] = float(self._sum(self._read_own(told)[:1])[0])
        wishes = tuple(int(more.pop(0)) for _ in told.wishes)
        differing = Differing(*(_differ(*(more.pop(0) for _ in range(3))) for _ in compared))
        readers, *checksums = (more.pop(0) for _ in range(3))
        same_data = readers == topology.world_size and not _differ(readers, *checksums)
        self._comm.refuse_other_order(more)
        apart = abs(others) / scale if scale else 0.0
        sums, here = self._by_device(told, found, bool(must_know)) if by_device else (found, None)
        return Summary(sums, here, unused_sum > 0, apart, wishes, differing, same_data)

    def _by_device(self, told: Told, known: list[float], must_know: bool) -> tuple[Sums, OwnNumbers | None]:
        """The sums of all ranks' own numbers, with what is ``known``: on the device, unless some rank ``must_know``."""
        here = self._own(told)
        sums = self._comm.sum_on_device(here.sums, NORM)
        for number, value in zip(sums, known, strict=False):  # only the device knows the losses
            if value:
                number += value
        return (self._read(sums), None) if must_know else (sums, here)

    def _own(self, told: Told) -> OwnNumbers:
        return OwnNumbers.of(self._units, self._comm.device, told, counts=self._comm.topology.tensor_rank == 0)

    def _read_own(self, told: Told) -> list[float]:
        """``OwnNumbers.sums``, waited for. A CPU's program knows the losses, and has told of them."""
        if self._comm.queues:
            return self._read(self._own(told).sums)
        observed = [] if told.observed is None else (told.observed * (self._comm.topology.tensor_rank == 0)).tolist()
        return [square_sum_on_host(self._units), 0.0, 0.0, *observed]

    def _read(self, numbers: torch.Tensor) -> list[float]:
        with waiting(_WHAT):
            return self.copies.read(numbers).wait()

    def _sum(self, numbers: Sequence[float]) -> torch.Tensor:
        return self._comm.control.sum(torch.tensor(numbers, dtype=torch.float64))


@dataclass(frozen=True)
class Summary:
    """What every rank knows before an update. Sums are over all data-parallel ranks.

    ``sums`` [3 or 5]: of the squares of all gradient elements, before unscaling and averaging; of the weights that losses
    came with; of the bad losses; and of what ranks ``observed``. ``own``: this rank's part, if they are
    on the device, in fp64, which then decides. ``unused``: some parameter had no gradient on some rank. ``apart``: relative
    difference of losses that should be equal, those of ranks with the same batch. ``wishes``: the sums of those that
    ranks told. ``differing``: what of ``Alike`` is not. ``same_data``: all ranks have told of data, and of the same.
    """

    sums: Sums
    own: OwnNumbers | None
    unused: bool
    apart: float = 0.0
    wishes: tuple[int, ...] = ()
    differing: Differing = ALL_ALIKE
    same_data: bool = False

    @property
    def deferred(self) -> bool:
        """True if the device decides."""
        return self.own is not None

    @property
    def bad_losses(self) -> int:
        """How many losses were NaN or infinite, as far as the program knows already."""
        return 0 if isinstance(self.sums, torch.Tensor) else int(self.sums[2])

    @property
    def weight(self) -> torch.Tensor | float:
        """The sum of weights."""
        return self.sums[1]

    def decide(self, unscale: torch.Tensor | float, limit: float, stream: CopyStream) -> Decision:
        """Clip to a norm of ``limit``, or not at all if that is 0. ``unscale``: from accumulated to averaged gradients."""
        if isinstance(self.sums, torch.Tensor):
            return self._leave_to_device(self.sums, unscale, limit, stream)
        square_sum, weight, bad, *observed = self.sums
        norm = math.sqrt(square_sum) * float(unscale)
        clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        return Decision(clip * float(unscale), Outcome(norm, math.isfinite(norm), weight, int(bad), tuple(observed)))

    def _leave_to_device(
        self, sums: torch.Tensor, unscale: torch.Tensor | float, limit: float, stream: CopyStream
    ) -> Decision:
        """The same, by the device; NaN stands for no update, and for the norm that there is then."""
        norm = sums[0].sqrt() * unscale
        clip = (torch.full_like(norm, limit) / (norm + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(norm)
        coefficient = (clip * unscale).float()
        applies = (sums[2] == 0).logical_and_(norm < math.inf).logical_and_(coefficient < math.inf)
        found = torch.where(applies, torch.stack([norm, coefficient.double()]), math.nan)
        return Decision(found[1].float(), stream.read(torch.cat([found[:1], sums])))


@dataclass(frozen=True)
class Decision:
    """What becomes of a step. ``coefficient``: of the update. A tensor is read by the device: NaN if there is none."""

    coefficient: torch.Tensor | float
    _found: Reading | Outcome

    @cached_property
    def outcome(self) -> Outcome:
        """Waits for the device, unless the program has decided."""
        if isinstance(self._found, Outcome):
            return self._found
        with waiting(_WHAT):
            norm, _, weight, bad_losses, *observed = self._found.wait()
        return Outcome(norm, math.isfinite(norm), weight, int(bad_losses), tuple(observed))


@dataclass(frozen=True)
class Outcome:
    """What has come of a step. ``norm``: the 2-norm of its averaged, unclipped gradient; ``finite`` if it was applied."""

    norm: float
    finite: bool
    weight: float
    bad_losses: int
    observed: tuple[float, ...] = ()

    @property
    def loss(self) -> float | None:
        """The mean loss over micro-batches and data-parallel ranks; None if nobody wanted to know, or no rank told one."""
        return self.observed[0] / self.observed[1] if self.observed and self.observed[1] else None


def summand(what: object, *, first: bool, count: int) -> int:
    """What one of ``count`` adds to a sum that is 0 if ``what`` is alike on all. See [Note: one sum for what is alike]."""
    code = zlib.crc32(repr(what).encode()) & _BITS
    return code * (count - 1) if first else -code


def _differ(count: float, total: float, squares: float) -> bool:
    """Whether numbers with these sums differ: if not, the square of their sum is ``count`` times the sum of squares."""
    return abs(count * squares - total * total) > _ROUNDING * total * total


def _stacked(values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.stack(list(values)) if values else torch.zeros(0, dtype=torch.float64, device=device)
