"""Topology: the degrees of the four mesh axes, the ranks along each, and the process groups made from them.

[Note: four axes]
Ranks are numbered row-major over ``pipe x replicate x shard x tensor``: the ranks of a tensor group are neighbours, because
they communicate most and should share a host; pipeline stages are farthest apart, because they communicate least.
Data-parallel ranks (axis "data") are ``replicate x shard``; together they see the whole batch. "model" is
``pipe x tensor``: the ranks that hold one copy of the model's layers between them. "replica" is ``pipe x shard x tensor``:
the ranks that hold one copy of all states between them; "stage", ``shard x tensor``, those of one pipeline stage.

``python -m zerorun.topology --world-size 64 --tensor 8 --pipe 2`` prints the picture of a topology.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config.degrees import degrees_for_experts, divisors
from ..config.parse import load_config
from ..errors import ConfigError, TopologyError
from ..log import print_lines, warn_once
from .mesh_places import Places, view_of, views_in_use
from .process_topology import PipeModelDataParallelTopology, ProcessTopology
from .topology_picture import draw
from .waits import set_time_limit, time_limit, waiting

AXES = ("pipe", "replicate", "shard", "tensor")
_MEMBERS: dict[str, tuple[str, ...]] = {axis: (axis,) for axis in AXES}
_MEMBERS |= {
    "data": ("replicate", "shard"),
    "model": ("pipe", "tensor"),
    "replica": ("pipe", "shard", "tensor"),
    "stage": ("shard", "tensor"),
}


class Coordinate(NamedTuple):
    """Where a rank is on each axis."""

    pipe: int
    replicate: int
    shard: int
    tensor: int


@dataclass(frozen=True)
class Topology(Places):
    """``pipe x replicate x shard x tensor`` ranks, seen from ``rank``; see [Note: four axes].

    Wherever an ``axis`` is asked for, it is one of pipe, replicate, shard, tensor, data, model, replica, stage, or of
    batch, context, expert, expert_shard, expert_replicate, expert_data. Look-ups need no process group and raise
    TopologyError for what does not exist; their cost grows only with the answer's length.
    """

    ranks_per_host: int | None = field(default=None, compare=False)  # where known
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)  # over the axes of more than one rank
    shared: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # by all engines on it
    _made: dict[str, dist.ProcessGroup | None] = field(default_factory=dict, init=False, compare=False, repr=False)

    # -- look-ups ------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> ProcessTopology:
        """The numbering of ranks over the four axes."""
        return ProcessTopology(AXES, [self.pipe, self.replicate, self.shard, self.tensor])

    @property
    def process_topology(self) -> ProcessTopology:
        """The same ranks over DeepSpeed's axes pipe, data, model."""
        return PipeModelDataParallelTopology(self.pipe, self.tensor, self.data_size)

    def _view(self, axis: str) -> tuple[ProcessTopology, tuple[str, ...]]:
        """Return a numbering of all ranks, and those of its axes that ``axis`` stands for."""
        return view_of(self, axis) or (self.ranks, _members(axis))

    def size(self, axis: str) -> int:
        """The number of ranks in a group along ``axis``."""
        ranks, members = self._view(axis)
        return prod(map(ranks.get_dim, members))

    def coordinate(self, rank: int | None = None) -> Coordinate:
        """Return the coordinate of ``rank``, or of this rank."""
        return Coordinate(*self.ranks.get_coord(self.rank if rank is None else rank))

    def rank_at(self, **coords: int) -> int:
        """Return the rank at ``coords``; on axes that are not given, this rank's index is used."""
        return self.ranks.get_rank(**{**self.coordinate()._asdict(), **coords})

    def filter_match(self, **coords: int) -> tuple[int, ...]:
        """Return all ranks at ``coords``, ascending; on axes that are not given, any index matches."""
        return tuple(self.ranks.filter_match(**coords))

    def ranks_along(self, axis: str, rank: int | None = None) -> tuple[int, ...]:
        """Return the group along ``axis`` that contains ``rank``, or this rank: global ranks, ascending."""
        ranks, members = self._view(axis)
        return tuple(ranks.ranks_along(self.rank if rank is None else rank, *members))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups along ``axis``, ordered by their first rank. They partition the ranks."""
        ranks, members = self._view(axis)
        return tuple(map(tuple, ranks.lists_along(*members)))

    def describe(self, ranks_per_host: int | None = None) -> str:
        """A picture of all ranks in a few lines, and the first group of each axis."""
        return draw(self.ranks, ranks_per_host, {axis: self.ranks_along(axis, 0) for axis in views_in_use(self)})

    # -- process groups ------------------------------------------------------------------------------------------

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of this rank along ``axis``.

        ``create`` makes the groups along pipe, replicate, shard and tensor that have more than one rank. Any group that
        differs from these is made by the first call that asks for it: all ranks of the world must make that call, in the
        same order. Raises TopologyError without groups, and for pipe or tensor of degree 1: there is nobody to talk to.
        """
        mesh, size = _mesh_of(self), self.size(axis)
        if axis not in _MEMBERS:
            along = self.ranks_along(axis)
            axis = next((same for same in (*AXES, "data") if self.ranks_along(same) == along), axis)
        if size == 1 and axis in ("pipe", "tensor"):
            raise TopologyError(
                f"there is no process group along {axis!r}, because its degree is 1. "
                f"Remedy: skip what needs it if topology.{axis} is 1, or use topology.own_group()."
            )
        if size == self.world_size:
            return everyone()
        if size == 1:
            return self.own_group()
        wide = [member for member in _MEMBERS.get(axis, ()) if self.size(member) > 1]
        if len(wide) == 1:
            return mesh.get_group(wide[0])
        return cast(dist.ProcessGroup, self._make("_".join(wide) or axis, self.groups(axis)))

    def own_group(self) -> dist.ProcessGroup:
        """Return a process group of this rank alone. The first call makes it: all ranks must call, in the same order."""
        _mesh_of(self)
        if self.world_size == 1:
            return everyone()
        return cast(dist.ProcessGroup, self._make("own", tuple((rank,) for rank in range(self.world_size))))

    def _make(self, name: str, groups: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """Return the process group of that one of ``groups`` which contains this rank; None if none does."""
        if name not in self._made:
            self._made[name], _ = dist.new_subgroups_by_enumeration(
                [list(ranks) for ranks in groups], timeout=time_limit(), backend=_backend(), group_desc=f"zerorun_{name}"
            )
        return self._made[name]

    def close(self) -> None:
        """Destroy the process groups. Every rank must call it, and nothing may use the groups afterwards."""
        if self.mesh is not None:
            kept = (None, dist.group.WORLD, *_everyone.values())
            for group in (*self.mesh.get_all_groups(), *self._made.values()):
                if group not in kept:
                    dist.destroy_process_group(group)
        self.forget_groups()

    def forget_groups(self) -> None:
        """Drop the process groups without destroying them, for when all of them end anyway."""
        self._made.clear()
        self.shared.clear()
        object.__setattr__(self, "mesh", None)

    # -- making one ----------------------------------------------------------------------------------------------

    @classmethod
    def plan(
        cls,
        world_size: int,
        rank: int = 0,
        *,
        shard_degree: int | None = None,
        pipe: int = 1,
        tensor: int = 1,
        context: int = 1,
        expert: int = 1,
        ranks_per_host: int | None = None,
    ) -> Topology:
        """A topology without process groups, for estimates and pictures. Raises TopologyError for degrees that do not fit.

        ``shard_degree``: None means all data-parallel ranks. With ``ranks_per_host``, checks that hosts do not cut a tensor
        group, and warns if tensor groups span several whole hosts.
        """
        data = _data_parallel(world_size, pipe, tensor)
        shard = data if shard_degree is None else shard_degree
        _check_shard(shard, data, world_size, pipe, tensor)
        _check_context(context, data)
        _check_expert(expert, data, shard, tensor)
        if not 0 <= rank < world_size:
            raise TopologyError(f"rank {rank} lies outside the world size {world_size}. Remedy: use 0 to {world_size - 1}.")
        if ranks_per_host is not None:
            _check_hosts(tensor, ranks_per_host, world_size)
        return cls(data // shard, shard, rank, pipe, tensor, context, expert, ranks_per_host)

    @classmethod
    def create(
        cls,
        world_size: int,
        rank: int,
        *,
        shard_degree: int | None = None,
        device_type: str,
        pipe: int = 1,
        tensor: int = 1,
        context: int = 1,
        expert: int = 1,
        ranks_per_host: int | None = None,
    ) -> Topology:
        """Call ``plan``, then make the groups. Every rank must call it. Raises TopologyError before any group is made."""
        views = {"context": context, "expert": expert}
        planned = cls.plan(
            world_size, rank, shard_degree=shard_degree, pipe=pipe, tensor=tensor, **views, ranks_per_host=ranks_per_host
        )
        return planned.open(device_type)

    @classmethod
    def from_process_topology(
        cls,
        processes: ProcessTopology,
        rank: int,
        *,
        shard_degree: int | None = None,
        ranks_per_host: int | None = None,
        device_type: str | None = None,
    ) -> Topology:
        """Return the topology that numbers ranks as ``processes`` does, over any of the axes pipe, data and model.

        Without ``device_type`` it has no process groups; with it, every rank must call this. Raises TopologyError for
        other axes of several ranks, and for an order of axes that gives ranks other places than pipe, data, model would.
        """
        order = ["pipe", "data", "model"]
        wide = [axis for axis in processes.get_axis_names() if processes.get_dim(axis) > 1]
        unknown = [axis for axis in wide if axis not in order]
        if unknown:
            raise TopologyError(f"{processes!r} has the axis {unknown[0]!r}. Remedy: use only pipe, data and model.")
        if wide != sorted(wide, key=order.index):
            raise TopologyError(
                f"{processes!r} numbers ranks along {wide[-1]} first, but ranks rise fastest along model, then data, "
                f"then pipe. Remedy: give the axes in the order {', '.join(sorted(wide, key=order.index))}."
            )
        pipe, tensor = max(processes.get_dim("pipe"), 1), max(processes.get_dim("model"), 1)
        planned = cls.plan(
            processes.world_size(), rank, shard_degree=shard_degree, pipe=pipe, tensor=tensor, ranks_per_host=ranks_per_host
        )
        return planned if device_type is None else planned.open(device_type)

    def open(self, device_type: str) -> Topology:
        """Return this topology with process groups along all axes that have more than one rank. Every rank must call it.

        A group of all ranks is the default group. Raises TopologyError if the job has another number of ranks.
        """
        if dist.is_initialized() and dist.get_world_size() != self.world_size:
            raise TopologyError(
                f"the topology has {self.world_size} ranks, but torch.distributed runs {dist.get_world_size()}. "
                "Remedy: make it for all ranks of the job."
            )
        names = tuple(axis for axis in AXES if self.size(axis) > 1) or ("shard",)
        sizes, backend = tuple(map(self.size, names)), _backend()
        override: Any = None if backend is None else dict.fromkeys(names, backend)
        with waiting("the process groups of the topology"):
            mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names, backend_override=override)
        set_time_limit(mesh.get_all_groups(), time_limit())
        return replace(self, mesh=mesh)


def subgroup(topology: Topology, axis: str, places: Sequence[int], name: str = "") -> dist.ProcessGroup | None:
    """Return the process group ``name`` of the ranks at ``places`` along ``axis``; None if this rank is not among them.

    The first call makes it: all ranks must call, in the same order. Raises TopologyError without process groups.
    """
    _mesh_of(topology)
    chosen = tuple(tuple(sorted(ranks[place] for place in places)) for ranks in topology.groups(axis))
    return topology._make(f"{axis} {places} {name}", chosen)


def neighbours(topology: Topology, axis: str, count: int) -> dist.ProcessGroup | None:
    """Return the process group of those ``count`` neighbours along ``axis`` of which this rank is one.

    The first call makes it: all ranks must call, in the same order. Raises TopologyError without process groups.
    """
    _mesh_of(topology)
    chosen = (ranks[first : first + count] for ranks in topology.groups(axis) for first in range(0, len(ranks), count))
    return topology._make(f"{axis} by {count}", tuple(chosen))


def limit_time(topology: Topology, limit: timedelta) -> None:
    """Let a collective take ``limit``, in the groups of ``topology`` and in that of all ranks. All ranks must do so."""
    groups = [] if topology.mesh is None else [*topology.mesh.get_all_groups(), *topology._made.values()]
    groups += [dist.group.WORLD, *_everyone.values()]
    set_time_limit([group for group in groups if group is not None], limit)


def _mesh_of(topology: Topology) -> DeviceMesh:
    if topology.mesh is None:
        raise TopologyError(
            "this Topology has no process groups: it was made without, or has been closed. Remedy: use Topology.create()."
        )
    return topology.mesh


_everyone: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def everyone() -> dist.ProcessGroup:
    """Return a process group of all ranks that serves host memory as well as devices.

    It is the default group, unless a script made that one for GPUs only; then the first call makes another one, and all
    ranks must make that call. Raises TopologyError before torch.distributed is initialised.
    """
    world = dist.group.WORLD
    if world is None:
        raise TopologyError("torch.distributed is not initialised. Remedy: call zerorun.init_distributed() first.")
    backend = _backend()
    if backend is None:
        return world
    if world not in _everyone:
        _everyone[world] = dist.new_group(timeout=time_limit(), backend=backend, group_desc="zerorun_everyone")
    return _everyone[world]


def forget_everyone() -> None:
    """Drop the group of all ranks without destroying it, for when torch.distributed ends."""
    _everyone.clear()


def _backend() -> str | None:
    """Return the backend for new process groups; None, that of the default group, if it serves tensors in host memory."""
    kept = str(dist.get_backend_config())
    return None if "cpu:" in kept else f"cpu:gloo,{kept}"


# -- checks ------------------------------------------------------------------------------------------------------


def _members(axis: str) -> tuple[str, ...]:
    if axis not in _MEMBERS:
        raise TopologyError(f"there is no axis {axis!r}. Remedy: use one of {', '.join(_MEMBERS)}.")
    return _MEMBERS[axis]


def _data_parallel(world_size: int, pipe: int, tensor: int) -> int:
    """Return the data-parallel size. Raises TopologyError if ``pipe * tensor`` does not divide ``world_size``."""
    for name, degree in (("world size", world_size), ("pipe degree", pipe), ("tensor degree", tensor)):
        if degree < 1:
            raise TopologyError(f"the {name} is {degree}. Remedy: use at least 1.")
    model = pipe * tensor
    if world_size % model == 0:
        return world_size // model
    remedies = [f"start {model} ranks or a multiple"]
    if world_size % tensor == 0:
        remedies.append(f"use a pipe degree of {_any(divisors(world_size // tensor))}")
    if world_size % pipe == 0:
        remedies.append(f"use a tensor degree of {_any(divisors(world_size // pipe))}")
    if len(remedies) == 1:
        remedies.append(f"use degrees whose product is {_any(divisors(world_size))}")
    raise TopologyError(
        f"pipe {pipe} x tensor {tensor} = {model} ranks for one copy of the model, which does not divide the world size "
        f"{world_size}. Remedy: {', or '.join(remedies)}."
    )


def _check_shard(shard: int, data: int, world_size: int, pipe: int, tensor: int) -> None:
    if shard >= 1 and data % shard == 0:
        return
    whence = f" (world size {world_size} / pipe {pipe} / tensor {tensor})" if pipe * tensor > 1 else ""
    raise TopologyError(
        f"shard degree {shard} does not divide the {data} data-parallel ranks{whence}. "
        f"Remedy: set zero_optimization.shard_degree to one of {divisors(data)}."
    )


def _check_context(context: int, data: int) -> None:
    if context < 1 or data % context:
        raise TopologyError(
            f"{context} ranks are to divide each sequence, which does not divide the {data} data-parallel ranks. "
            f"Remedy: set sequence_parallel_size to one of {divisors(data)}."
        )


def _check_expert(expert: int, data: int, shard: int, tensor: int) -> None:
    """Raise TopologyError unless groups of ``expert`` ranks fill the stage, and cut the shard axis evenly or fill it."""
    if expert == 1:
        return
    fitting = degrees_for_experts(data, shard, tensor)
    if expert not in fitting:
        over = f" x {tensor} tensor ranks" if tensor > 1 else ""
        raise TopologyError(
            f"experts cannot be spread over {expert} of the {data} data-parallel ranks{over}, {shard} of which divide the "
            f"states: groups of that many do not fit. Remedy: set expert_parallel.autoep_size to {_any(fitting)}."
        )


def _check_hosts(tensor: int, ranks_per_host: int, world_size: int) -> None:
    """Raise TopologyError if a tensor group begins on one host and ends on another; only warn if it fills whole hosts."""
    if ranks_per_host < 1:
        raise TopologyError(f"a host has {ranks_per_host} ranks. Remedy: use at least 1.")
    if world_size <= ranks_per_host or ranks_per_host % tensor == 0:
        return
    remedy = f"Remedy: use a tensor degree of {_any(divisors(ranks_per_host))}"
    if tensor % ranks_per_host == 0:
        warn_once(
            f"tensor groups of {tensor} ranks span {tensor // ranks_per_host} hosts of {ranks_per_host} ranks, so that "
            f"every layer waits for the network between them. {remedy}."
        )
        return
    cut = ranks_per_host // tensor * tensor
    raise TopologyError(
        f"tensor degree {tensor} splits unevenly over hosts of {ranks_per_host} ranks: the group of ranks {cut} to "
        f"{cut + tensor - 1} would lie on more than one. {remedy}, or start a multiple of {tensor} ranks on each host."
    )


def _any(numbers: Sequence[int]) -> str:
    """``1, 2 or 4``."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


# -- command line ------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Print the picture of a topology. Starts no processes. Returns the exit status: 2 for degrees that do not fit."""
    parser = argparse.ArgumentParser(prog="python -m zerorun.topology", description=main.__doc__)
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("--config", help="a configuration, of which the degrees are taken that are not given")
    parser.add_argument("--pipe", type=int, help="pipeline stages")
    parser.add_argument("--tensor", type=int, help="ranks that divide each layer")
    parser.add_argument("--shard", type=int, help="ranks that divide the states; default: all data-parallel ranks")
    parser.add_argument("--context", type=int, help="ranks that divide each sequence")
    parser.add_argument("--expert", type=int, help="ranks with different experts")
    parser.add_argument("--ranks-per-host", type=int, help="shows hosts, and checks that tensor groups fit into them")
    args = parser.parse_args(argv)
    try:
        config = load_config(args.config or {})
        planned = Topology.plan(
            args.world_size,
            shard_degree=args.shard or config.zero_optimization.shard_degree,
            pipe=args.pipe or config.pipeline.stages,
            tensor=args.tensor or config.tensor_parallel.size,
            context=args.context or config.sequence_parallel_size or 1,
            expert=args.expert or config.expert_parallel.size,
            ranks_per_host=args.ranks_per_host,
        )
    except (ConfigError, TopologyError) as error:
        print(error, file=sys.stderr)
        return 2
    print_lines(planned.describe(args.ranks_per_host).splitlines())
    return 0


if __name__ == "__main__":
    sys.exit(main())
