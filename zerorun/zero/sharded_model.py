"""The sharded model: parameters, gradients and optimizer of one engine, and the four verbs of a step."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ..distributed.device import queues
from ..distributed.tensor_shard import TensorShard
from ..distributed.transport.communicator import Communicator
from ..distributed.waits import waiting
from .flat_group import FlatGroup, square_sum_at_once
from .pieces import owned_gradient
from .runtime import Runtime
from .sharded_optimizer import ShardedOptimizer
from .unit import Unit, finish_updates, links_of


class Parts(Protocol):
    """Converts between this rank's part of a parameter and the whole, where ranks divide layers. ``whole`` is collective.

    ``shards``: id(parameter) -> what of it is here, of divided ones. ``copies``: this stage's name of a parameter that an
    earlier pipeline stage has, too -> its name there.
    """

    shards: dict[int, TensorShard]
    copies: dict[str, str]

    def whole(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor: ...

    def part(self, param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor: ...

    def take(self, whole: torch.Tensor, tensor_rank: int) -> None:
        """Replace ``whole``, in place, by the value that ``tensor_rank`` has. Collective."""
        ...

    def of_tensor_ranks(self, number: int) -> list[int]:
        """The ``number`` that each tensor rank passes, by tensor rank. Collective."""
        ...

    def undo(self) -> None:
        """Make the model whole again. Collective."""
        ...


@dataclass(frozen=True)
class ParameterHome:
    """Where a parameter lies: entry number ``entry`` of ``flat_group``."""

    unit: Unit
    flat_group: FlatGroup
    entry: int

    @property
    def name(self) -> str:
        return self.flat_group.names[self.entry]

    @property
    def place(self) -> tuple[int, int, int]:
        """Identifies the parameter: equal on all ranks that have this part of the model, different for every parameter."""
        return self.unit.index, self.unit.flat_groups.index(self.flat_group), self.entry


@dataclass(frozen=True)
class Told:
    """What a rank tells the others before an update. ``bad_losses``: how many were NaN or infinite.

    ``weight``: the sum of those that losses came with. ``loss``: the sum of losses, which must be that of all ranks of its
    tensor group. ``wishes``: what else ranks want to know of each other; as many on every rank.
    """

    bad_losses: int = 0
    weight: float = 0.0
    loss: float = 0.0
    wishes: Sequence[bool] = ()


@dataclass(frozen=True)
class Summary:
    """What every rank knows about the gradients of a step. Sums are over all data-parallel ranks."""

    square_sum: float  # of all gradient elements, each once, before unscaling and averaging
    bad_losses: int  # losses that were NaN or infinite
    weight: float  # of the losses that came with one
    unused: bool  # some parameter had no gradient on some rank
    apart: float = 0.0  # relative difference of losses that should be equal, those of one tensor-parallel group
    wishes: tuple[int, ...] = ()  # for each of the wishes that ranks told: how many ranks have it

    @property
    def finite(self) -> bool:
        return math.isfinite(self.square_sum)


_numbers = itertools.count()  # of engines
_models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()


class ShardedModel:
    """A module whose parameters lie in flat buffers, of which each rank has a part.

    A step is ``reduce``, ``norm``, ``update`` and ``publish``, which all ranks call in this order.
    """

    def __init__(
        self, runtime: Runtime, optimizer: ShardedOptimizer | None, parts: Parts, gradient_factor: Callable[[], float]
    ) -> None:
        """``gradient_factor`` gives the factor from accumulated to averaged gradients; all ranks must call it."""
        self.runtime, self.optimizer, self.parts = runtime, optimizer, parts
        self.gradient_factor = gradient_factor
        self.number = next(_numbers)  # of the engine, the same on all ranks
        self.homes = {
            id(param): ParameterHome(unit, flat_group, entry)
            for unit in runtime.units
            for flat_group in unit.flat_groups
            for entry, param in enumerate(flat_group.params)
        }
        _models.add(self)

    @property
    def module(self) -> nn.Module:
        return self.runtime.module

    @property
    def units(self) -> list[Unit]:
        return self.runtime.units

    @property
    def comm(self) -> Communicator:
        return self.runtime.comm

    def forget(self) -> None:
        """Forget this model: its parameters belong to the module again."""
        _models.discard(self)

    def close(self) -> None:
        """Let go of units and optimizer: nothing is sharded any more."""
        self.optimizer = None
        self.units.clear()

    # -- a step --------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Give every rank the summed gradients of its shards, without those that came late on some rank."""
        self.runtime.reducer.reduce_accumulated()
        self._drain()
        if self.comm.topology.world_size > self.comm.topology.data_parallel_size:
            self._sum_over_model_axes()

    def norm(self, told: Told) -> Summary:
        """Agree on the norm in one small all-reduce. Only if gradients came late there are more. Raises OrderError."""
        topology, late = self.comm.topology, self.runtime.reducer.late
        unused = any(False in flat_group.used for unit in self.units for flat_group in unit.trainable)
        first = topology.tensor_rank == 0  # tensor ranks have the same losses, so one of them counts
        other = told.loss * (topology.tensor - 1 if first else -1)  # the sum is 0 if the losses are the same
        values = [self._square_sum(), len(late), unused, told.bad_losses, told.weight if first else 0.0, other, abs(other)]
        values += [*told.wishes, *self.comm.told_order()]
        total = self.comm.control.sum(torch.tensor(values, dtype=torch.float64))
        if total[1]:
            self.reduce_late()
            total[0] = self.comm.control.sum(torch.tensor([self._square_sum()], dtype=torch.float64))[0]
        square_sum, _, unused_sum, bad, weights, others, scale, *more = total.tolist()
        self.comm.refuse_other_order(more[len(told.wishes) :])
        counts = tuple(int(count) for count in more[: len(told.wishes)])
        apart = abs(others) / scale if scale else 0.0
        return Summary(square_sum / topology.replicate, int(bad), weights, unused_sum > 0, apart, counts)

    def update(self, coefficient: float, *, unused: bool) -> None:
        """Multiply the gradients by ``coefficient``, step the optimizer, and write the shards' new values.

        ``unused``: some parameter had no gradient on some rank; those that none had one for stay as they are.
        """
        assert self.optimizer is not None
        for unit in self.units:
            unit.finish_gather()  # nobody on this rank waited for it, but it may still read the shard
        self.optimizer.update(coefficient, unused=unused, order=self.runtime.gathers.forward_order())

    def publish(self) -> None:
        """The shards have new values: gather units with slots of their own, let go of what shared slots hold.

        Returns when that is done, on all ranks: loops that read parameters after step(), for a moving average say, must see
        new values, and those that write to them must not change what others have still to read.
        """
        self.runtime.gathers.evict_all()
        for unit in self.units:
            unit.has_new_values()
        resident = [unit for unit in self.units if unit.resident]
        if not self.runtime.plan.policy.shard_optimizer or self.comm.topology.shard == 1:
            for unit in resident:
                unit.updated()
            return
        for unit in resident:
            unit.start_gather(self.comm, "updated parameters")
        for unit in resident:
            unit.finish_gather()
        self.comm.fence()

    def forget_gradients(self) -> None:
        """Start the next step without gradients."""
        for unit in self.units:
            for flat_group in unit.flat_groups:
                flat_group.forget_gradients()
        self.runtime.forget()

    # -- what else takes time ------------------------------------------------------------------------------------

    def reduce_late(self) -> None:
        """Reduce the gradients that came late on any rank. All data-parallel ranks must call it.

        The next backward follows the order of this one.
        """
        self.runtime.gathers.agree_on_backward()
        self.runtime.reducer.reduce_late()
        self._drain()

    def finish_reductions(self) -> None:
        """Wait for all reductions in flight, and for what is on its way to host memory."""
        self.runtime.reducer.finish()
        self._drain()

    def finish_updates(self) -> None:
        """Wait for updates in the background. Afterwards masters, moments and weights may be used by anybody."""
        finish_updates(self.units)

    def _drain(self) -> None:
        """Wait for the gradients that are on their way to host memory."""
        for link in links_of([unit for unit in self.units if unit.placement.optimizer]):
            link.drain()

    def _sum_over_model_axes(self) -> None:
        """Sum over the other axes the gradients of which ranks have summands there. Late ones come first."""
        if self.comm.control.sum(torch.tensor([float(len(self.runtime.reducer.late))]))[0]:
            self.reduce_late()
        flat_groups = [flat_group for unit in self.units for flat_group in unit.trainable]
        for axis in self.comm.model_axes:
            members = [flat_group for flat_group in flat_groups if axis in flat_group.plan.replication.sums]
            if members:
                self.comm.sum_over_axis([owned_gradient(flat_group) for flat_group in members], axis)
            for flat_group in members:
                flat_group.gradient_changed()

    def _square_sum(self) -> float:
        """Of this rank's reduced gradient shards. NaN or inf if any element is.

        The shards of one shard group cover each element once; at stage 0 each rank sums its shard, too, so that all
        stages add the same numbers in the same order.
        """
        on_host, on_device = torch.zeros((), dtype=torch.float64), list[torch.Tensor]()
        for flat_group in (flat_group for unit in self.units for flat_group in unit.trainable):
            if flat_group.plan.replication.counted:
                if queues(self.comm.device) and flat_group.host_grad is None:
                    on_device.append(flat_group.grad_shard)
                else:
                    on_host = flat_group.local_square_sum() + on_host
        found = [on_host, *([square_sum_at_once(on_device)] if on_device else [])]
        with waiting("the sum of squares of the gradients: on a GPU, for every collective before it"):
            return sum(map(float, found))  # nothing is sent to the device first, which would be a second wait


def find(param: torch.Tensor) -> tuple[ShardedModel, ParameterHome] | None:
    """Where ``param`` lies, with updates finished; None if no engine has it."""
    for model in _models:
        home = model.homes.get(id(param))
        if home is not None and home.flat_group.params[home.entry] is param:
            model.finish_updates()
            return model, home
    return None


def model_of(module: nn.Module) -> ShardedModel | None:
    """The sharded model that ``module`` is, or is a part of; None if no engine manages it."""
    found = next((find(param) for param in module.parameters()), None)
    return found[0] if found is not None else None
