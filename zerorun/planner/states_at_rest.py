"""States at rest: bytes of parameters, gradients, master, moments and slots, by the layouts of zerorun's own plan.

They are what ``zerorun.estimate_memory`` says on a GPU, to the byte, for Hugging Face models with AdamW and the keys of
``candidate_config``. Blocks of a kind are equal, so it takes no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..distributed.layout import Layout, aligned_bytes, build_layout
from ..plan.policy import STAGES, Policy
from .candidate import RunCandidate
from .model_shape import ModelShape, Weight

_SLOTS = 2  # shared by units, for parameters (one in use, one on its way) and for gradients
_NUMBER = 4  # bytes of a number in a buffer


@dataclass(frozen=True)
class ElementSizes:
    """Bytes of each element: of a parameter, a gradient, the master (0: there is none) and the moments."""

    parameter: int
    gradient: int
    master: int
    moments: int


_SIZES = {"fp32": ElementSizes(4, 4, 0, 8), "bf16-pure": ElementSizes(2, 2, 0, 4)}
_MIXED = ElementSizes(2, 4, 4, 8)


class Placed(NamedTuple):
    """What decides on what lies still. ``divided``, ``expert_divided``: the ranks that flat buffers are laid out for."""

    tensor: int
    pipe: int
    expert: int
    stage: int
    shard: int
    divided: int
    expert_divided: int
    precision: str
    offload: bool
    divides_rows: bool

    @classmethod
    def of(cls, c: RunCandidate) -> Placed:
        """Return that of a candidate."""
        degrees = c.tensor, c.pipe, c.expert, c.stage, c.shard, c.divided, c.expert_divided
        return cls(*degrees, c.precision, c.offload_optimizer, c.sequence_parallel)

    @property
    def sizes(self) -> ElementSizes:
        return _SIZES.get(self.precision, _MIXED)

    @property
    def policy(self) -> Policy:
        """The row of the stage, as plan/make.py chooses it."""
        if self.shard > 1:
            return STAGES[self.stage]
        row = STAGES[min(self.stage, 1)]
        return Policy(row.stage, row.shard_optimizer, self.stage >= 2 and self.offload, row.share_param_slots)


class _Unit(NamedTuple):
    """The flat groups of ``times`` equal units. ``shares``: they share slots."""

    groups: tuple[Layout, ...]
    times: int
    shares: bool

    @property
    def made(self) -> int:
        """The elements of the gradients that autograd makes in it."""
        return sum(layout.numel - layout.padding for layout in self.groups)


@lru_cache(maxsize=1 << 14)
def at_rest(shape: ModelShape, placed: Placed, rank: int, blocks: tuple[int, ...]) -> tuple[dict[str, int], int]:
    """Return the bytes by kind on the stage ``rank``, and those of gradients that autograd has made.

    ``blocks``: how many of each kind it has. Kinds are named as ``engine.memory_report()`` does.
    """
    units = [*_ends(shape, placed, rank)]
    units += [
        _Unit(_groups(kind.block, placed), count, shares=True)
        for kind, count in zip(shape.kinds, blocks, strict=True)
        if count
    ]
    corrected = sum(count * kind.experts for kind, count in zip(shape.kinds, blocks, strict=True) if kind.corrected)
    kinds, made = _held(placed, units)
    return {**kinds, "buffers": shape.rotary + corrected * _NUMBER}, made


def _ends(shape: ModelShape, placed: Placed, rank: int) -> Iterator[_Unit]:
    """Yield what is no block. Stages at both ends have a tied weight, in a flat group of its own."""
    first, last = rank == 0, rank == placed.pipe - 1
    outside = [[*(shape.before if first else ()), *(shape.after if last else ())]]
    if shape.tied and placed.pipe > 1 and (first or last):
        outside = [[shape.before[0]], [weight for weight in outside[0] if weight is not shape.before[0]]]
    for weights in outside:
        if weights:
            yield _Unit(_groups(tuple(weights), placed), 1, shares=False)


def _groups(weights: tuple[Weight, ...], placed: Placed) -> tuple[Layout, ...]:
    """Return the layouts of a unit: of what all replicas have, what tensor ranks have summands for, and spread experts."""
    kinds: dict[tuple[bool, bool], list[Weight]] = {}
    for weight in weights:
        spread = weight.expert and placed.expert > 1
        summed = placed.tensor > 1 and (weight.summed == "always" or (weight.summed == "rows" and placed.divides_rows))
        kinds.setdefault((spread, summed), []).append(weight)
    return tuple(
        _layout(tuple(own), placed.tensor, *((placed.expert, placed.expert_divided) if spread else (1, placed.divided)))
        for (spread, _), own in kinds.items()
    )


@lru_cache(maxsize=1 << 14)
def _layout(weights: tuple[Weight, ...], tensor: int, expert: int, degree: int) -> Layout:
    return build_layout([weight.name for weight in weights], [weight.on_rank(tensor, expert) for weight in weights], degree)


def _held(placed: Placed, units: Sequence[_Unit]) -> tuple[dict[str, int], int]:
    """Return the bytes by kind, and those of gradients that autograd has made: see zerorun/plan/make.py."""
    policy, size = placed.policy, placed.sizes
    kinds = dict.fromkeys(("parameters", "gradients", "master", "moments", "slots"), 0)
    host = "host " if placed.offload else ""
    kinds |= dict.fromkeys((f"{host}{kind}" for kind in ("gradients", "master", "moments")), 0)
    master = size.master or (size.parameter if placed.offload else 0)
    for unit in units:
        for layout in unit.groups:
            shard, times = layout.shard_numel(0), unit.times
            owned = shard if policy.shard_optimizer else layout.numel
            shares_grads = unit.shares and policy.share_grad_slots
            if policy.share_param_slots:
                kinds["parameters"] += times * shard * size.parameter
                kinds["slots"] += 0 if unit.shares else times * (layout.numel - shard) * size.parameter
            else:
                kinds["parameters"] += times * layout.numel * size.parameter
            kinds[f"{host}master"] += times * owned * master
            kinds[f"{host}moments"] += times * _updated(layout, owned) * size.moments
            if not shares_grads:
                kinds["slots" if policy.share_grad_slots else "gradients"] += times * layout.numel * size.gradient
            if placed.offload or policy.share_grad_slots:
                kinds[f"{host}gradients"] += times * shard * size.gradient
    kinds["slots"] += _shared_slots(placed, [unit for unit in units if unit.shares])
    if placed.offload:
        largest = max(layout.shard_numel(0) for unit in units for layout in unit.groups)
        rounded = size.parameter if size.parameter < master else 0
        kinds["host staging"] = 2 * largest * (size.gradient + rounded)
    late = sum(unit.made for unit in units if not unit.shares)
    return kinds, (late + max((unit.made for unit in units if unit.shares), default=0)) * size.parameter


def _updated(layout: Layout, owned: int) -> int:
    """Return the elements of moments of the first ``owned`` elements: they have no padding at the end."""
    return max(min(entry.end, owned) for entry in layout.entries if entry.offset < owned)


def _shared_slots(placed: Placed, units: Sequence[_Unit]) -> int:
    """Return the bytes of the slots that ``units`` share. Experts that no other rank has need none for parameters."""
    policy, size, found = placed.policy, placed.sizes, 0
    if policy.share_param_slots and units:
        gathered = [[layout.numel for layout in unit.groups if layout.degree > 1] for unit in units]
        count = min(_SLOTS, sum(unit.times for unit in units))
        found += count * max(sum(aligned_bytes(numel * size.parameter) for numel in numels) for numels in gathered)
    if policy.share_grad_slots and units:
        reduced = [[layout.numel for layout in unit.groups] for unit in units]
        found += _SLOTS * max(sum(aligned_bytes(numel * size.gradient) for numel in numels) for numels in reduced)
    return found
