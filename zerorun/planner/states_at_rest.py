"""States at rest: bytes of parameters, gradients, master, moments and slots, by the layouts of zerorun's own plan.

They are what ``zerorun.estimate_memory`` says on a GPU, to the byte, for Hugging Face models with AdamW and the keys of
``candidate_config``. Blocks of a kind are equal, so it takes no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..distributed.layout import Layout, aligned_bytes, build_layout
from ..plan.stage_policy import STAGES, Policy
from .candidate import RunCandidate
from .model_shape import ModelShape, Weight

_SLOTS = 2  # shared by units, for parameters (one in use, one on its way) and for gradients
_NUMBER = 4  # bytes of a number in a buffer of the model, or in a file
_IN_FILES, _BUFFERS, _PAGE = 3, 3, 4096  # master and two moments; buffers that these are updated in; bytes


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
    states: str  # the prefix of the kinds of master and moments: where they are
    offload_params: bool
    second: int
    divides_rows: bool

    @classmethod
    def of(cls, c: RunCandidate) -> Placed:
        """Return that of a candidate."""
        degrees = c.tensor, c.pipe, c.expert, c.stage, c.shard, c.divided, c.expert_divided
        states = "disk " if c.states_on_disk else "host " if c.offload_optimizer else ""
        return cls(*degrees, c.precision, states, c.offload_params, c.second, c.sequence_parallel)

    @property
    def sizes(self) -> ElementSizes:
        return _SIZES.get(self.precision, _MIXED)

    @property
    def policy(self) -> Policy:
        """The row of the stage, as plan/make_plan.py chooses it."""
        if self.shard > 1:
            return STAGES[self.stage]
        row = STAGES[min(self.stage, 1)]
        return Policy(row.stage, row.shard_optimizer, self.stage >= 2 and bool(self.states), self.offload_params)

    @property
    def copies(self) -> int:
        """How many second copies of the weights the ranks that divide the states have; 0 if there are none."""
        return self.shard // self.second if 1 < self.second < self.shard else 0


@dataclass(frozen=True)
class AtRest:
    """Bytes on one stage. ``kinds``: as ``engine.memory_report()`` names them; ``made``: gradients on their way.

    ``host``, ``disk``, ``device``: of all kinds there; ``device`` with those gradients.
    """

    kinds: dict[str, int]
    made: int
    host: int
    disk: int
    device: int

    @classmethod
    def of(cls, kinds: dict[str, int], made: int) -> AtRest:
        """Add up ``kinds``."""
        host, disk = (sum(n for kind, n in kinds.items() if kind.startswith(where)) for where in ("host", "disk"))
        return cls(kinds, made, host, disk, sum(kinds.values()) - host - disk + made)


class _Unit(NamedTuple):
    """The flat groups of ``times`` equal units. ``shares``: they share slots. ``spread``: the groups of spread experts."""

    groups: tuple[Layout, ...]
    times: int
    shares: bool
    spread: tuple[Layout, ...] = ()

    @property
    def made(self) -> int:
        """The elements of the gradients that autograd makes in it."""
        return sum(layout.numel - layout.padding for layout in self.groups)


@lru_cache(maxsize=1 << 14)
def at_rest(shape: ModelShape, placed: Placed, rank: int, blocks: tuple[int, ...]) -> AtRest:
    """Return the bytes on the stage ``rank``. ``blocks``: how many of each kind it has."""
    units = [*_ends(shape, placed, rank)]
    for kind, count in zip(shape.kinds, blocks, strict=True):
        if count:
            groups = _groups(kind.block, placed)
            spread = tuple(layout for layout, of_experts in groups if of_experts)
            units.append(_Unit(tuple(layout for layout, _ in groups), count, shares=True, spread=spread))
    corrected = sum(count * kind.experts for kind, count in zip(shape.kinds, blocks, strict=True) if kind.corrected)
    kinds, made = _held(placed, units)
    return AtRest.of({**kinds, "buffers": shape.rotary + corrected * _NUMBER}, made)


def _ends(shape: ModelShape, placed: Placed, rank: int) -> Iterator[_Unit]:
    """Yield what is no block. Stages at both ends have a tied weight, in a flat group of its own."""
    first, last = rank == 0, rank == placed.pipe - 1
    outside = [[*(shape.before if first else ()), *(shape.after if last else ())]]
    if shape.tied and placed.pipe > 1 and (first or last):
        outside = [[shape.before[0]], [weight for weight in outside[0] if weight is not shape.before[0]]]
    for weights in outside:
        if weights:
            yield _Unit(tuple(layout for layout, _ in _groups(tuple(weights), placed)), 1, shares=False)


def _groups(weights: tuple[Weight, ...], placed: Placed) -> list[tuple[Layout, bool]]:
    """Return the layouts of a unit, and which are those of spread experts.

    The others are of what tensor ranks divide, of what each of them has, and of what they have summands for.
    """
    kinds: dict[tuple[bool, bool, bool], list[Weight]] = {}
    for weight in weights:
        spread = weight.expert and placed.expert > 1
        summed = placed.tensor > 1 and (weight.summed == "always" or (weight.summed == "rows" and placed.divides_rows))
        copied = placed.tensor > 1 and weight.divided is None and not spread
        kinds.setdefault((spread, summed, copied), []).append(weight)
    found = []
    for (spread, *_), own in kinds.items():
        expert, divided = (placed.expert, placed.expert_divided) if spread else (1, placed.divided)
        found.append((_layout(tuple(own), placed.tensor, expert, divided), spread))
    return found


@lru_cache(maxsize=1 << 14)
def _layout(weights: tuple[Weight, ...], tensor: int, expert: int, degree: int) -> Layout:
    return build_layout([weight.name for weight in weights], [weight.on_rank(tensor, expert) for weight in weights], degree)


def _held(placed: Placed, units: Sequence[_Unit]) -> tuple[dict[str, int], int]:
    """Return the bytes by kind, and those of gradients that autograd has made: see zerorun/plan/make_plan.py."""
    kinds: Counter[str] = Counter()
    for unit in units:
        for layout in unit.groups:
            for kind, nbytes in (*_weights(placed, unit, layout), *_states(placed, unit, layout)):
                kinds[kind] += unit.times * nbytes
    kinds["slots"] += _shared_slots(placed, [unit for unit in units if unit.shares])
    if placed.states:
        kinds["host staging"] = _staging(placed, units)
    late = sum(unit.made for unit in units if not unit.shares)
    made = late + max((unit.made for unit in units if unit.shares), default=0)
    return dict(kinds), made * placed.sizes.parameter


def _weights(placed: Placed, unit: _Unit, layout: Layout) -> Iterator[tuple[str, int]]:
    """Yield (kind, bytes) of parameters. Shards are in host memory only where they are not a part of a whole buffer."""
    policy, size, shard = placed.policy, placed.sizes.parameter, layout.shard_numel(0)
    if not policy.share_param_slots:
        yield "parameters", layout.numel * size
        return
    host = "host " if placed.offload_params and unit.shares else ""
    yield f"{host}parameters", shard * size
    if not unit.shares:
        yield "slots", (layout.numel - shard) * size
    elif layout not in unit.spread:
        yield f"{host}parameters", placed.copies * shard * size


def _states(placed: Placed, unit: _Unit, layout: Layout) -> Iterator[tuple[str, int]]:
    """Yield (kind, bytes) of gradients, master and moments."""
    policy, size, shard = placed.policy, placed.sizes, layout.shard_numel(0)
    owned = shard if policy.shard_optimizer else layout.numel
    beside = placed.states != "disk " and bool(placed.states) == (placed.offload_params and unit.shares)
    yield f"{placed.states}master", owned * (size.master or (0 if beside else size.parameter))
    yield f"{placed.states}moments", _updated(layout, owned) * size.moments
    if not (unit.shares and policy.share_grad_slots):
        yield "slots" if policy.share_grad_slots else "gradients", layout.numel * size.gradient
    if placed.states:
        yield "host gradients", shard * size.gradient
    elif policy.share_grad_slots:
        yield "gradients", shard * size.gradient


def _staging(placed: Placed, units: Sequence[_Unit]) -> int:
    """Return the bytes of buffers between device, host and disk: see StagingPlan, and [Note: three buffers] in nvme.py."""
    size = placed.sizes
    largest = max(layout.shard_numel(0) for unit in units for layout in unit.groups)
    found = 2 * largest * (size.gradient + (size.parameter if size.parameter < size.master else 0))
    if placed.states != "disk ":
        return found
    rooms = [sum(_IN_FILES * aligned_bytes(layout.shard_numel(0) * _NUMBER) for layout in unit.groups) for unit in units]
    return found + _BUFFERS * -(-max(rooms) // _PAGE) * _PAGE


def _updated(layout: Layout, owned: int) -> int:
    """Return the elements of moments of the first ``owned`` elements: they have no padding at the end."""
    return max(min(entry.end, owned) for entry in layout.entries if entry.offset < owned)


def _shared_slots(placed: Placed, units: Sequence[_Unit]) -> int:
    """Return the bytes of the slots that ``units`` share. Experts that no other rank has need none for parameters."""
    policy, size, found = placed.policy, placed.sizes, 0
    if policy.share_param_slots and units:
        host = placed.offload_params
        gathered = [[layout.numel for layout in unit.groups if host or layout.degree > 1] for unit in units]
        count = min(_SLOTS, sum(unit.times for unit in units))
        found += count * max(sum(aligned_bytes(numel * size.parameter) for numel in numels) for numels in gathered)
    if policy.share_grad_slots and units:
        reduced = [[layout.numel for layout in unit.groups] for unit in units]
        found += _SLOTS * max(sum(aligned_bytes(numel * size.gradient) for numel in numels) for numels in reduced)
    return found
