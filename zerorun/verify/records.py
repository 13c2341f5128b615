"""Records: the values at named points of a run, and the first of them that differs from another run.

[Note: tolerances]
Ranks add up in another order than one process, and rounding follows the order. So the reference is run again with its
sums permuted, and ``FACTOR`` times what that changes is allowed: at a point, or, where luck has left that point alone, at
half of the points of its kind in that step. A unit of rounding is always allowed; tokens and labels may not differ at all.

An optimizer such as Adam magnifies the rounding of gradients that are nearly 0 to whole updates, other ones in each run. So
once the gradients of a step have been compared, the reference goes on with those of the run as configured: then its weights
may differ by units of rounding only, and what differs in a later step has its cause there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median

import torch

from ..distributed.tensor_shard import TensorShard

FACTOR = 8.0
KEPT = 1 << 20  # elements of an activation that are kept, spread over it


class Kind(Enum):
    """What a point is, in words for the report."""

    INPUT = "input"
    WEIGHT = "weight, as the forward reads it"
    DROPOUT = "dropout"
    OUTPUT = "output of module"
    LOSS = "loss"
    GRADIENT = "gradient before its reduction"
    REDUCED = "gradient after its reduction"
    NORM = "norm of the gradients"
    UPDATED = "weight after the update"


@dataclass(frozen=True)
class Point:
    """A place in a training run. ``micro``: the micro-batch, or -1 for a step. ``call``: of a module in a micro-batch."""

    step: int
    kind: Kind
    name: str
    micro: int = -1
    call: int = 0


@dataclass(frozen=True)
class Value:
    """What a rank has at a point: ``tensor`` in host memory.

    It is the elements from ``start`` on of a flat parameter, or of this rank's part ``shard`` of it. ``when``: sorts points
    by the time at which they came.
    """

    tensor: torch.Tensor
    when: tuple[int, ...] = ()
    start: int = 0
    shard: TensorShard | None = None

    def of(self, whole: torch.Tensor, kind: Kind) -> torch.Tensor | None:
        """Return the elements of ``whole``, a tensor or this rank's part of it, that belong here; None if shapes differ."""
        shard = self.shard
        if shard is None and kind is Kind.OUTPUT and whole.shape != self.tensor.shape:
            return None
        if shard is not None and tuple(whole.shape) == shard.shape != shard.local_shape:
            whole = shard.cut(whole)
        part = whole.reshape(-1)[self.start : self.start + self.tensor.numel()]
        return part if part.numel() == self.tensor.numel() else None

    def places(self, wrong: torch.Tensor) -> torch.Tensor:
        """Return where in the whole parameter the elements at ``wrong`` [n] are."""
        shard = self.shard
        if shard is None:
            return wrong + self.start
        return shard.cut(torch.arange(shard.numel).view(shard.shape)).reshape(-1)[wrong + self.start]


Records = dict[Point, Value]


def joined(pieces: Iterable[Value], like: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, shaped as ``like``, of which ranks have these pieces."""
    whole = torch.zeros(like.shape, dtype=torch.float32)
    parts: dict[TensorShard | None, torch.Tensor] = {}
    for piece in pieces:
        shape = like.shape if piece.shard is None else piece.shard.local_shape
        part = parts.setdefault(piece.shard, whole if piece.shard is None else torch.zeros(shape))
        part.view(-1)[piece.start : piece.start + piece.tensor.numel()] = piece.tensor.reshape(-1)
    for shard, part in parts.items():
        if shard is not None:
            shard.put(part, whole)
    return whole


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``tensor`` in host memory, or of ``KEPT`` of its elements if it has many more."""
    tensor = tensor.detach()
    step = tensor.numel() // KEPT
    return (tensor.reshape(-1)[::step] if step > 1 else tensor).to("cpu", copy=True)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return |found - wanted| in fp64, flat. NaN and infinity equal themselves, and are infinitely far from all else."""
    a, b = found.reshape(-1).double(), wanted.reshape(-1).double()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs().nan_to_num(math.inf, math.inf))


def _most(found: torch.Tensor) -> float:
    return float(found.max()) if found.numel() else 0.0


def scale_of(wanted: torch.Tensor) -> float:
    """Return the largest magnitude in ``wanted``."""
    return _most(wanted.double().abs().nan_to_num(0.0, 0.0, 0.0))


class Tolerances:
    """How far values may be from ``reference``. ``permuted``: records of the same run with other orders of summation.

    ``epsilon``: the unit of rounding of the dtype that the model computes in.
    """

    def __init__(self, reference: Records, permuted: Iterable[Records], epsilon: float) -> None:
        self._epsilon = epsilon
        self._own: dict[Point, float] = defaultdict(float)
        pools: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        for records in permuted:
            for point, value in reference.items():
                if point not in records or not value.tensor.is_floating_point():
                    continue
                scale = scale_of(value.tensor)
                moved = _most(apart(records[point].tensor, value.tensor)) / scale if scale else 0.0
                self._own[point] = max(self._own[point], moved)
                pools[point.step, point.kind].append(moved)
        self._pooled = {key: median([one for one in found if one] or [0.0]) for key, found in pools.items()}

    def at(self, point: Point, wanted: torch.Tensor, dtype: torch.dtype) -> float:
        """Return what is allowed at ``point``, where the reference has ``wanted``. ``dtype``: of what is compared."""
        if not wanted.is_floating_point() or point.kind is Kind.INPUT:
            return 0.0
        unit = torch.finfo(dtype).eps if point.kind is Kind.UPDATED else self._epsilon
        moved = max(self._own[point], self._pooled.get((point.step, point.kind), 0.0), unit)
        return FACTOR * moved * scale_of(wanted)


@dataclass(frozen=True)
class Mismatch:
    """A point at which a run differs. ``first``, ``last``: the elements that do; the values are those at ``worst``."""

    point: Point
    when: tuple[int, ...]
    rank: int
    first: int
    last: int
    worst: int
    found: float
    wanted: float
    apart: float
    allowed: float


def counterpart(point: Point, wanted: Mapping[Point, Value]) -> Point | None:
    """Return the point of ``wanted`` that has what is expected at ``point``; None if there is none.

    The forward reads what the update before has written, or, if nothing was written, the initial value.
    """
    if point.kind is not Kind.WEIGHT:
        return point if point in wanted else None
    earlier = (Point(step, Kind.UPDATED, point.name) for step in range(point.step - 1, -2, -1))
    return next((at for at in earlier if at in wanted), None)


def differences(found: Records, wanted: Records, rank: int, tolerances: Tolerances | None) -> tuple[list[Mismatch], int]:
    """Return (the points at which ``found`` is further from ``wanted`` than allowed, how many points were compared).

    Without ``tolerances`` nothing may differ. Values that only one of the two runs has, or parts of them that cannot be
    told, are not compared.
    """
    problems, count = [], 0
    for point, value in found.items():
        at = counterpart(point, wanted)
        part = value.of(wanted[at].tensor, point.kind) if at is not None else None
        if at is None or part is None:
            continue
        count += 1
        off = apart(value.tensor, part.to(value.tensor.dtype))
        allowed = tolerances.at(at, wanted[at].tensor, value.tensor.dtype) if tolerances is not None else 0.0
        moved = _most(off)
        if moved <= allowed:
            continue
        wrong = (off > allowed).nonzero().view(-1)
        places, worst = value.places(wrong), int(off.argmax())
        values = (float(value.tensor.reshape(-1)[worst]), float(part[worst]))
        place = int(value.places(torch.tensor([worst]))[0])
        problems.append(
            Mismatch(point, value.when, rank, int(places.min()), int(places.max()), place, *values, moved, allowed)
        )
    return problems, count
