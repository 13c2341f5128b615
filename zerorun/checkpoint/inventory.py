"""Inventory: every tensor of a model in training by name, and which elements of it this rank holds.

Names are those of ``module.state_dict()``, without what torch.compile puts in them. A tied tensor has one name, the
first; the others are its aliases. Shapes are those of whole tensors, even if this rank's layers have only a part of them.
In place of a wrapper (plan/parameter_kinds.py) stand the tensors that it consists of, named after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..distributed.device import on_host
from ..distributed.tensor_shard import TensorShard
from ..distributed.topology import Topology
from ..distributed.transport.communicator import Communicator
from ..errors import CheckpointError
from ..ops.rounding import join
from ..ops.state_format import BLOCK, SCALE, Blocks, held, is_scale
from ..optim.parameter_parts import PartsOptimizer, StateRange
from ..plan.parameter_kinds import inner_tensors, inside, packed_buffers
from ..plan.sharding_plan import ParameterRun
from ..plan.units import stored_name
from ..zero.flat_group import FlatGroup
from ..zero.optimizer_pieces import OptimizerPiece
from ..zero.sharded_model import Parts, ShardedModel
from ..zero.sharded_optimizer import ShardedOptimizer
from ..zero.unit import Unit
from .files import is_plain
from .quantised_states import keeps_blocks, scale_shape, scale_shard
from .ranks import leads_stage
from .tensorfile import dtype_code
from .write_plan import MASTER, MODEL, OPTIMIZER, RESIDUAL, Rest, Row


@dataclass(frozen=True)
class Subject:
    """What is saved or loaded: ``module``, which is the module of ``model`` or a part of it."""

    module: nn.Module
    model: ShardedModel

    @property
    def units(self) -> list[Unit]:
        return self.model.units

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        return self.model.optimizer

    @property
    def comm(self) -> Communicator:
        return self.model.comm

    @property
    def topology(self) -> Topology:
        return self.model.comm.topology

    @property
    def parts(self) -> Parts:
        return self.model.parts


@dataclass(frozen=True)
class SavedParameter:
    """Where a parameter is kept. ``shard``: the part of it that this rank and those it shards with have (None: all)."""

    unit: Unit
    flat_group: FlatGroup
    entry: int
    shard: TensorShard | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return tuple(self.flat_group.layout.entries[self.entry].shape) if self.shard is None else self.shard.shape

    @property
    def numel(self) -> int:
        """The number of elements in the unit: those of ``shard``, if there is one."""
        return self.flat_group.layout.entries[self.entry].numel

    def part_of_full(self, full: torch.Tensor) -> torch.Tensor:
        """This parameter's elements of a flat buffer [numel of the flat group]."""
        place = self.flat_group.layout.entries[self.entry]
        return full[place.offset : place.end]


@dataclass
class TensorPart:
    """Elements, from ``start`` on, of the flattened tensor ``name`` of ``set``, as a 1-D view of the memory they are in.

    With a ``shard``, they are elements of that part of the tensor, flattened. With a ``rest``, the elements are those in
    fp32 for which the two together stand (ops/rounding.py).
    """

    set: str
    name: str
    start: int
    tensor: torch.Tensor  # [n]
    shape: tuple[int, ...]  # of the whole tensor
    shard: TensorShard | None = None
    rounded: torch.dtype | None = None  # the set "model" gets a copy of it in this dtype
    rest: torch.Tensor | None = None  # [n]

    @property
    def dtype(self) -> torch.dtype:
        """That of the elements."""
        return self.tensor.dtype if self.rest is None else torch.float32

    def row(self) -> Row:
        code = dtype_code(self.dtype, self.name)
        rounded = dtype_code(self.rounded, self.name) if self.rounded is not None else ""
        address = self.tensor.data_ptr() if on_host(self.tensor) else 0
        rest = Rest(dtype_code(self.rest.dtype, self.name), self.rest.data_ptr()) if self.rest is not None else None
        numel = self.tensor.numel()
        return Row(self.set, self.name, self.start, numel, code, self.shape, address, rounded, self.shard, rest)

    def joined(self) -> TensorPart:
        """The same part in one tensor, a copy in host memory if it was in two."""
        return self if self.rest is None else replace(self, tensor=join(self.tensor, self.rest).cpu(), rest=None)


@dataclass
class Contents:
    """The tensors and the extra state of a module, or of the modules of all pipeline stages together."""

    shapes: dict[str, tuple[int, ...]]  # of parameters and buffers, in the model's order
    aliases: dict[str, str]  # other names of tied tensors
    extra: list[str]  # names of what modules return from get_extra_state


def together(stages: Iterable[Contents | None]) -> Contents:
    """The contents of the model that has all of ``stages``. A tensor that several stages have stands with the first."""
    whole = Contents({}, {}, [])
    for stage in stages:
        if stage is not None:
            whole.shapes.update(stage.shapes)
            whole.aliases.update(stage.aliases)
            whole.extra += stage.extra
    return whole


@dataclass(frozen=True)
class Beside:
    """What a module has beside parameters, at one instant."""

    buffers: dict[str, torch.Tensor]  # persistent ones by name
    extra: dict[str, Any]  # what modules return from get_extra_state, by name
    aliases: dict[str, str]  # other names of buffers that are the same tensor


@dataclass
class Inventory:
    """What a checkpoint of this model must hold. An engine makes it once, when it is created."""

    subject: Subject
    homes: dict[str, SavedParameter] = field(default_factory=dict)  # parameters, in the order of the state dict
    aliases: dict[str, str] = field(default_factory=dict)  # other names of tied parameters
    apart: dict[str, torch.Tensor] = field(default_factory=dict)  # what is in no unit
    settings: list[frozenset[str]] = field(default_factory=list)  # the keys of each parameter group of the optimizer
    _parameters: set[int] = field(default_factory=set)  # ids of all parameters, and of buffers that count as such
    _named: dict[str, nn.Parameter] = field(default_factory=dict)  # those of the module

    @classmethod
    def of(cls, subject: Subject) -> Inventory:
        made = cls(subject)
        if subject.optimizer is not None:
            made.settings += map(frozenset, subject.optimizer.optimizer.param_groups)
        shards, copies = subject.parts.shards, subject.parts.copies
        by_id = {
            id(param): SavedParameter(unit, flat_group, entry, shards.get(id(param)))
            for unit in subject.units
            for flat_group in unit.flat_groups
            for entry, param in enumerate(flat_group.params)
        }
        names: dict[int, str] = {}
        made._named.update(subject.module.named_parameters(remove_duplicate=False))
        for name, param in (*made._named.items(), *packed_buffers(subject.module).items()):
            made._parameters.add(id(param))
            for path, tensor in inside(param):
                stored = stored_name(name + path)
                if id(tensor) not in names:
                    names[id(tensor)] = copies.get(stored, stored)
                    if id(tensor) in by_id:
                        made.homes[names[id(tensor)]] = by_id[id(tensor)]
                    else:
                        made.apart[names[id(tensor)]] = tensor
                if stored != names[id(tensor)]:
                    made.aliases[stored] = names[id(tensor)]
        return made

    def forget(self) -> None:
        """Let go of all parameters."""
        for found in (self.homes, self.aliases, self.apart, self._parameters, self._named):
            found.clear()

    # -- what there is -------------------------------------------------------------------------------------------

    def beside(self) -> Beside:
        """What there is beside parameters now: scripts may tie buffers later, or let them be two again."""
        everything = self.subject.model.runtime.guard.own_state_dict(self.subject.module)
        made = Beside({}, {}, {})
        seen: dict[int, str] = {}
        for name, value in everything.items():
            stored = stored_name(name)
            if id(value) in self._parameters or stored in self.homes or stored in self.aliases:
                continue
            if not isinstance(value, torch.Tensor) or stored.endswith("_extra_state"):
                made.extra[stored] = value
            elif id(value) in seen:
                made.aliases[stored] = seen[id(value)]
            else:
                seen[id(value)], made.buffers[stored] = stored, value.detach().resolve_conj().resolve_neg()
        return made

    def replaced(self) -> list[str]:
        """The names of parameters that are in the module only now, or are there no longer. They may have other names."""
        now = dict(self.subject.module.named_parameters(remove_duplicate=False))
        both = {id(param) for param in now.values()} & {id(param) for param in self._named.values()}
        others = {name for named in (now, self._named) for name, param in named.items() if id(param) not in both}
        return sorted(map(stored_name, others))

    def kept_apart(self) -> dict[str, torch.Tensor]:
        """By name, the tensors of which the parameters that stay apart consist. They are not copies."""
        return {name: tensor.detach() for name, tensor in self.apart.items()}

    def contents(self) -> Contents:
        """The contents of this rank's module."""
        beside = self.beside()
        shapes = {name: home.shape for name, home in self.homes.items()}
        shapes |= {name: tuple(inner.shape) for name, inner in self.kept_apart().items()}
        shapes |= {name: tuple(buffer.shape) for name, buffer in beside.buffers.items()}
        return Contents(shapes, {**self.aliases, **beside.aliases}, list(beside.extra))

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return name -> shape, dtype, and whether it is trained, for every parameter. The caller may fill in the group.

        The entries of parameters that must never be cast have ``packed``, too.
        """
        found: dict[str, dict[str, Any]] = {
            name: {
                "shape": list(home.shape),
                "dtype": dtype_code(home.flat_group.dtype, name),
                "trainable": home.flat_group.trainable,
                "group": None,
            }
            for name, home in self.homes.items()
        }
        for name, inner in self.kept_apart().items():
            shape, code = list(inner.shape), dtype_code(inner.dtype, name)
            found[name] = {"shape": shape, "dtype": code, "trainable": False, "group": None, "packed": True}
        for name, home in self.homes.items():
            if home.flat_group.plan.packed:
                found[name]["packed"] = True
        return found

    def groups(self) -> dict[str, int]:
        """Return name -> optimizer group, for the parameters that this rank updates, and trained ones without elements."""
        found = {}
        for name, home in self.homes.items():
            plan = home.flat_group.plan
            if plan.trainable and (0 in home.shape or plan.owned_run(home.entry) is not None):
                found[name] = plan.optimizer_groups[home.entry]
        return found

    def _pieces(self) -> list[OptimizerPiece]:
        return self.subject.optimizer.pieces if self.subject.optimizer is not None else []

    # -- what this rank holds ------------------------------------------------------------------------------------

    def weights(self, *, frozen: bool = True) -> Iterator[TensorPart]:
        """The weights and masters that this rank holds; only those of trainable parameters, unless ``frozen``."""
        self.subject.model.make_ready()
        for name, home in self.homes.items():
            flat_group = home.flat_group
            if 0 in home.shape:  # it has no elements, so no shard has a part of it
                yield TensorPart(MODEL, name, 0, torch.empty(0, dtype=flat_group.dtype), home.shape)
            elif home.numel == 0:  # other tensor-parallel ranks have all of it
                continue
            elif flat_group.trainable:
                yield from _trainable_parts(name, home)
            elif frozen:
                yield from frozen_parts(name, home)
        if frozen:
            yield from self.parts_apart()

    def frozen_weights(self) -> Iterator[TensorPart]:
        """The weights that this rank holds of what is not trained."""
        self.subject.model.make_ready()
        for name, home in self.homes.items():
            if not home.flat_group.trainable and home.numel:
                yield from frozen_parts(name, home)
        yield from self.parts_apart()

    def parts_apart(self) -> Iterator[TensorPart]:
        """What stays apart, on the first rank of a pipeline stage only: all ranks of the stage have the same."""
        return self.buffer_parts(self.kept_apart())

    def residuals(self) -> Iterator[TensorPart]:
        """What coding has left out of gradients that this rank has sent."""
        for name, residual in self.subject.model.runtime.reducer.residuals().items():
            yield TensorPart(RESIDUAL, name, 0, residual, tuple(residual.shape))

    def buffer_parts(self, buffers: dict[str, torch.Tensor]) -> Iterator[TensorPart]:
        """The parts of ``buffers`` on the first rank of a pipeline stage, whose values count; none on other ranks."""
        for name, value in buffers.items() if leads_stage(self.subject.topology) else ():
            yield TensorPart(MODEL, name, 0, value.contiguous().reshape(-1), tuple(value.shape))

    def optimizer_state(self) -> tuple[list[TensorPart], dict[str, dict[str, Any]]]:
        """(state tensors of this rank, scalar states: key -> name -> value)."""
        self.subject.model.make_ready()
        parts: list[TensorPart] = []
        scalars: dict[str, dict[str, Any]] = {}
        if self.subject.optimizer is None:
            return parts, scalars
        names = {(id(home.flat_group), home.entry): name for name, home in self.homes.items()}
        optimizer = self.subject.optimizer.optimizer
        states = optimizer.state  # once: an access waits for the updates of all units
        for piece in self._pieces():
            state = states.get(piece.tensor, {})
            members = [(names[id(piece.flat_group), run.entry], run) for run in piece.runs]
            for key, value in state.items():
                refuse_state_name(key)
                if is_scale(key, state):
                    continue
                refuse_state_name(key, of_tensor=isinstance(value, torch.Tensor) and value.dim() > 0)
                if isinstance(state_of := held(state, key), Blocks):
                    parts += _block_parts(f"{OPTIMIZER}{key}", state_of, members, self.homes)
                    continue
                ranges = ranges_of(optimizer, piece, key)
                if ranges is not None:
                    parts += _range_parts(f"{OPTIMIZER}{key}", value, members[0][0], ranges)
                elif isinstance(value, torch.Tensor) and value.dim() > 0:
                    for path, inner in inner_tensors(value):
                        parts += _state_parts(f"{OPTIMIZER}{key}{path}", inner, piece, members, self.homes)
                else:
                    scalars.setdefault(key, {}).update((name, value) for name, _ in members)
        return parts, scalars


def refuse_state_name(key: object, *, of_tensor: bool = False) -> None:
    """Raise CheckpointError if a checkpoint cannot have an optimizer's state of this name.

    That of a tensor is part of the names of files, and what follows a dot is part of a wrapped tensor.
    """
    if not isinstance(key, str):
        reason = f"it is a {type(key).__name__}, and names in a checkpoint are text"
    elif of_tensor and (not is_plain(f"{OPTIMIZER}{key}") or "." in key):
        reason = "names of tensors are parts of names of files, in which '/' and '.' mean something else"
    else:
        return
    raise CheckpointError(
        f"the optimizer's state {key!r:.80} cannot be saved by this name: {reason}. Remedy: an optimizer that calls it by "
        "a word, such as state[parameter]['exp_avg']."
    )


def _trainable_parts(name: str, home: SavedParameter) -> Iterator[TensorPart]:
    """The master elements that this rank updates, and the weights if those cannot be computed from the master."""
    flat_group, run = home.flat_group, home.flat_group.plan.owned_run(home.entry)
    if run is None:
        return
    assert flat_group.master is not None
    cut = slice(run.offset, run.offset + run.numel)
    owned = flat_group.master[cut]
    if flat_group.rest is not None:
        rest = flat_group.rest[cut]
        yield TensorPart(MASTER, name, run.start, owned, home.shape, home.shard, flat_group.dtype, rest)
    elif flat_group.dtype == owned.dtype:
        yield TensorPart(MODEL, name, run.start, owned, home.shape, home.shard)
    elif flat_group.dtype.itemsize < owned.element_size():  # weights are masters, rounded
        yield TensorPart(MASTER, name, run.start, owned, home.shape, home.shard, flat_group.dtype)
    else:
        yield TensorPart(MASTER, name, run.start, owned, home.shape, home.shard)
        yield from frozen_parts(name, home)


def frozen_parts(name: str, home: SavedParameter) -> Iterator[TensorPart]:
    """The elements of the weight that this rank holds: all of them if its unit is resident."""
    flat_group = home.flat_group
    if flat_group.plan.resident:
        yield TensorPart(MODEL, name, 0, home.part_of_full(flat_group.full), home.shape, home.shard)
        return
    piece = flat_group.plan.shard_piece(home.entry)
    if piece is not None:
        part = flat_group.shard[piece.shard_start : piece.shard_start + piece.numel]
        yield TensorPart(MODEL, name, piece.start, part, home.shape, home.shard)


def ranges_of(optimizer: torch.optim.Optimizer, piece: OptimizerPiece, key: str) -> tuple[StateRange, ...] | None:
    """What of the stored state ``key`` the state of ``piece`` is, for states of parts that have not one value for each of
    its elements."""
    if not isinstance(optimizer, PartsOptimizer) or key not in optimizer.factors:
        return None
    return optimizer.state_ranges(key, optimizer.part_of(piece.tensor))


def _range_parts(kind: str, value: torch.Tensor, name: str, ranges: Iterable[StateRange]) -> Iterator[TensorPart]:
    flat = value.detach().reshape(-1)
    for part in ranges:
        if part.saves:
            tensor = flat[part.offset : part.offset + part.numel]
            yield TensorPart(kind, name, part.start, tensor, part.shape, part.shard)


def _block_parts(
    kind: str, state: Blocks, members: list[tuple[str, ParameterRun]], homes: dict[str, SavedParameter]
) -> Iterator[TensorPart]:
    """The codes and scales of a state in blocks; values where blocks of this rank are none of the whole parameter."""
    for name, run in members:
        home, end = homes[name], run.offset + run.numel
        codes, scale = state.codes.view(-1)[run.offset : end], state.scale[run.offset // BLOCK : -(-end // BLOCK)]
        if keeps_blocks(home.shard):
            beside = scale_shard(home.shard) if home.shard is not None else None
            yield TensorPart(kind, name, run.start, codes, home.shape, home.shard)
            yield TensorPart(kind + SCALE, name, run.start // BLOCK, scale, scale_shape(home.shape), beside)
        else:
            wide = Blocks(codes, scale, state.signed).wide()
            yield TensorPart(kind, name, run.start, wide, home.shape, home.shard)


def _state_parts(
    kind: str,
    value: torch.Tensor,
    piece: OptimizerPiece,
    members: list[tuple[str, ParameterRun]],
    homes: dict[str, SavedParameter],
) -> Iterator[TensorPart]:
    flat, (first, run), home = value.detach().reshape(-1), members[0], homes[members[0][0]]
    if value.shape == piece.tensor.shape:
        for name, run in members:
            part = flat[run.offset : run.offset + run.numel]
            yield TensorPart(kind, name, run.start, part, homes[name].shape, homes[name].shard)
    elif len(members) == 1 and run.numel == home.numel and home.shard is None:  # rows or columns of a whole parameter
        yield TensorPart(kind, first, 0, flat, tuple(value.shape))
    else:
        raise CheckpointError(
            f"the optimizer's state {kind.removeprefix(OPTIMIZER)!r} of {first!r} has shape {tuple(value.shape)}, "
            "not that of what it belongs to, so it cannot be stored by parameter. Remedy: use an optimizer whose state "
            "has the shape of its parameters."
        )
