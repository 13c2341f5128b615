"""The sharded model: parameters, gradients and optimizer of one engine, and the four verbs of a step."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from ..distributed.tensor_shard import TensorShard
from ..distributed.topology import Topology
from ..distributed.transport.communicator import Communicator
from ..errors import CheckpointError, ModelError, ReleasedParameterError, StepError, ZerorunError
from ..log import listed
from ..plan.parameter_kinds import named_members
from .flat_group import FlatGroup
from .norm import Decision, Norm, Summary, Told
from .offloaded_states import GRADIENTS, WEIGHTS, StateKind
from .optimizer_pieces import owned_gradient
from .runtime import Runtime, runtimes_in
from .sharded_optimizer import ShardedOptimizer
from .tied_copies import TiedCopy
from .unit import Unit, finish_updates, links_of


class StepLoads(Protocol):
    """Counts what each expert gets. ``last``: in the last step, by layer, as far as this rank has sent it."""

    last: dict[str, list[int]]

    def end_step(self) -> None:
        """A step is over."""
        ...


class ForwardDraws(Protocol):
    """What a forward draws that all ranks with the same batch must draw alike."""

    def mark(self) -> float:
        """A number that stands for it, where the forward ends; 0 if nothing was drawn."""
        ...


class Parts(Protocol):
    """Converts between this rank's part of a parameter and the whole, where ranks divide layers. ``whole`` is collective.

    ``shards``: id(parameter) -> what of it is here, of divided ones. ``copies``: this stage's name of a parameter that an
    earlier pipeline stage has, too -> its name there. ``tied``: this stage's copies of parameters that others have, too.
    """

    shards: dict[int, TensorShard]
    copies: dict[str, str]
    tied: list[TiedCopy]

    @property
    def loads(self) -> StepLoads | None:
        """The loads of experts that are spread over ranks; None if there are none."""
        ...

    def whole(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor: ...

    def part(self, param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor: ...

    def take(self, whole: torch.Tensor, tensor_rank: int) -> None:
        """Replace ``whole``, in place, by the value that ``tensor_rank`` has. Collective."""
        ...

    def of_same_batch(self, number: int) -> list[int]:
        """The ``number`` that each rank with the same batch passes, by its place among them. Collective."""
        ...

    def common_draws(self, device: torch.device) -> ForwardDraws:
        """What a forward that begins now draws, which must be alike on all ranks with the same batch."""
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


class HalfLoaded:
    """What loads have begun to change and not finished: the model is neither as it was nor as saved. On all ranks alike.

    And what a script, or an update that failed, has changed where ranks may differ since.
    """

    def __init__(self) -> None:
        self._update_error = ""  # of this rank
        self._begun: dict[str, str] = {}  # what, such as "weights" -> where it was being loaded from
        self._edited: set[str] = set()  # names of parameters

    @contextmanager
    def loading(self, source: object, *what: str) -> Iterator[None]:
        """The block changes ``what`` to what ``source`` has. If it fails, that is half loaded until another load of it."""
        self._begun.update(dict.fromkeys(what, str(source)))
        yield
        for name in what:
            del self._begun[name]
        if "weights" in what:
            self._edited.clear()
            self._update_error = ""

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The block updates weights. An error of the script's code in it, as of a hook, may leave them changed by half."""
        try:
            yield
        except ZerorunError:  # raised before anything has changed
            raise
        except BaseException as error:
            self._update_error = f"{type(error).__name__}: {error}"
            raise

    def has(self, what: str) -> bool:
        """True if ``what``, such as "weights", is half loaded."""
        return what in self._begun

    @property
    def spoils_weights(self) -> bool:
        """True if the weights are half loaded, or if ranks may differ by an edit."""
        return self.has("weights") or bool(self._edited or self._update_error)

    def edit(self, name: str) -> None:
        """A script has changed the parameter ``name`` on this rank, and maybe not on others."""
        self._edited.add(name)

    def overwrite(self, name: str) -> None:
        """The parameter ``name`` gets another value on all ranks."""
        self._edited.discard(name)

    def refuse(self) -> None:
        """Raise CheckpointError if anything is half loaded, and ReleasedParameterError if ranks may differ by an edit.

        Raises StepError if an update failed midway.
        """
        if self._update_error:
            raise StepError(
                f"an update failed midway, with {self._update_error}: weights and states of this rank may be changed "
                "by half, and those of others whole. Remedy: correct what failed, an optimizer or a hook of one, and load "
                "a checkpoint, or begin again with a new model and a new engine."
            )
        if self._edited:
            raise ReleasedParameterError(
                f"{listed(sorted(map(repr, self._edited)))} of this rank: changed inside GatheredParameters(...) without "
                "modifier_rank, so that ranks may have different weights. Remedy: give all ranks the same values, by "
                "load_checkpoint(), by load_state_dict(), or in a block with modifier_rank=0."
            )
        if self._begun:
            what, source = " and ".join(self._begun), next(iter(self._begun.values()))
            raise CheckpointError(
                f"loading {source} failed midway, in {what}: the model is neither as it was nor as that was saved. Remedy: "
                "load a checkpoint that is whole, or begin again with a new model and a new engine."
            )


class OpenBlock(Protocol):
    """A block in which a script has full values of parameters, and may change them."""

    def note_edits(self, model: ShardedModel) -> None:
        """The weights of ``model`` may get new values from others than this block. All ranks must call it."""
        ...

    def put_back(self, model: ShardedModel) -> None:
        """The weights of ``model`` have got all new values that they get since ``note_edits``, or none."""
        ...

    def set_edits_aside(self, model: ShardedModel) -> bool:
        """Let ``model`` be as before the changes that this block stores at its end. If True, ``put_back`` must follow."""
        ...

    def show_new(self, model: ShardedModel, param: torch.Tensor | None = None) -> None:
        """The weights of ``model``, or that of ``param`` alone, have got new values. Collective."""
        ...

    def let_go(self, model: ShardedModel) -> None:
        """The parameters of ``model`` are ordinary ones from now on, since ``note_edits``. Collective."""
        ...


class Owner(Protocol):
    """The engine of a sharded model, or what is left of one that is gone. It gives the module back."""

    def is_gone(self) -> bool:
        """True if nobody has the engine any more."""
        ...

    def has_trained(self) -> bool:
        """True unless the engine is there and has no optimizer."""
        ...

    def give_back(self, model: ShardedModel) -> None:
        """Let the module of ``model`` be as it was given, with the weights of now. Collective."""
        ...


class Ownership:
    """Whose a model is. ``owner``: None until its engine is made."""

    def __init__(self) -> None:
        self.owner: Owner | None = None

    def pass_to(self, owner: Owner) -> None:
        """``owner`` gives the module back from now on."""
        self.owner = owner


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
        self.before_update: list[Callable[[], None]] = []  # called when gradients are reduced and weights are as before
        self.half_loaded = HalfLoaded()
        self.ownership = Ownership()
        self.blocks: list[OpenBlock] = []  # that have parameters of this model, in the same order on all ranks
        self._norm = Norm(runtime.comm, runtime.units)
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

    def become(self, kind: type[ShardedModel]) -> None:
        """Take steps as ``kind`` does, which has the same fields."""
        self.__class__ = kind

    def forget(self) -> None:
        """Forget this model: its parameters belong to the module again. Collective."""
        for block in self.blocks:
            block.let_go(self)
        self.blocks.clear()
        _models.discard(self)

    def close(self) -> None:
        """Let go of units, parameters and optimizer, and free their buffers: nothing is sharded any more."""
        self.optimizer = None
        self.units.clear()
        self.homes.clear()
        self.runtime.reducer.close()
        for pool in (self.runtime.made.param_slots, self.runtime.made.grad_slots):
            pool.close()
        for family in {group.family for group in self.runtime.plan.flat_groups}:
            self.comm.of(family).shard.expose(())

    # -- a step --------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Give every rank the summed gradients of its shards, without those that came late on some rank.

        Late are also those of a loss that uses parameters outside of any forward, such as a penalty: no hook has seen them.
        """
        self.bring_back()
        self.runtime.reducer.look_for_late()
        self.runtime.reducer.reduce_accumulated()
        self._drain()
        if self.comm.topology.world_size > self.comm.topology.data_size:
            self._sum_over_model_axes()

    def norm(self, told: Told) -> Summary:
        """Agree on what ranks must know of each other before an update. Raises OrderError."""
        must_know = told.must_know or self.optimizer is None or not self.optimizer.reads_coefficient
        return self._norm.agree(replace(told, must_know=must_know), self.runtime.reducer.late, self.reduce_late)

    def decide(self, summary: Summary, unscale: torch.Tensor | float, limit: float) -> Decision:
        """Clip to a norm of ``limit``, or not at all if that is 0. ``unscale``: from accumulated to averaged gradients."""
        return summary.decide(unscale, limit, self._norm.copies)

    def update(self, coefficient: torch.Tensor | float, *, unused: bool) -> None:
        """Multiply the gradients by ``coefficient``, step the optimizer, and write the shards' new values.

        A tensor is an fp32 scalar that only the device reads; if it is NaN, nothing is written.

        ``unused``: some parameter had no gradient on some rank; those that none had one for stay as they are.
        """
        assert self.optimizer is not None
        for unit in self.units:
            unit.finish_gather()  # nobody on this rank waited for it, but it may still read the shard
        for look in self.before_update:
            look()
        self.optimizer.update(coefficient, unused=unused, order=self.runtime.gathers.forward_order())

    def publish(self) -> None:
        """The shards have new values: gather units with slots of their own, let go of what shared slots hold.

        Returns when that is done, on all ranks: loops that read parameters after step(), for a moving average say, must see
        new values, and those that write to them must not change what others have still to read. With
        ``overlap_param_gather`` loops do neither, and it goes on behind the next forward.
        """
        self.runtime.gathers.begin_anew()
        for unit in self.units:
            unit.has_new_values()
        self._gather_resident()
        for block in self.blocks:
            block.show_new(self)

    def _gather_resident(self) -> None:
        resident = [unit for unit in self.units if unit.resident]
        if not self.runtime.plan.policy.shard_optimizer or self.comm.topology.shard == 1:
            for unit in resident:
                unit.updated()
            return
        if self.runtime.plan.overlap_param_gather:
            self._publish_behind_forward()
            return
        for unit in resident:
            unit.start_gather_of_updated(self.comm)
        for unit in resident:
            unit.finish_gather()
        self.comm.fence(update=True)

    def _publish_behind_forward(self) -> None:
        """Gather in the order of the next forward, which waits for each unit when it needs it. The root is needed first."""
        order = [unit for unit in self.runtime.gathers.forward_order() if unit.resident]
        for unit in order:
            unit.start_gather_of_updated(self.comm)
        for unit in order:
            if unit.index:
                unit.finish_gather_later()
            else:
                unit.finish_gather()

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

    def reduce_accumulated(self) -> None:
        """Reduce the gradients that wait for the last backward of the step. All data-parallel ranks must call it."""
        self.bring_back(*GRADIENTS)
        self.runtime.reducer.reduce_accumulated()
        self.finish_reductions()

    def finish_reductions(self) -> None:
        """Wait for all reductions in flight, and for what is on its way to host memory."""
        self.runtime.reducer.finish()
        self._drain()

    def finish_updates(self) -> None:
        """Wait for updates in the background. Afterwards masters, moments and weights may be used by anybody."""
        finish_updates(self.units)

    # -- states that are away ------------------------------------------------------------------------------------

    def offload(self, kinds: Collection[StateKind], *, pinned: bool, wait: bool) -> None:
        """Move ``kinds`` from the device to host memory, see ``States.leave``. All data-parallel ranks must call it."""
        self.finish_reductions()
        self.finish_updates()
        if WEIGHTS in kinds:
            self.runtime.gathers.evict_all()
        self.runtime.made.states.leave(kinds, self.optimizer, pinned=pinned, wait=wait)

    def empty_slots(self) -> None:
        """Give back the memory of shared slots for parameters until the next pass. All data-parallel ranks must call it."""
        self.runtime.gathers.evict_all()
        self.runtime.made.states.empty_slots()

    def bring_back(self, *kinds: StateKind) -> None:
        """Bring back what is away of ``kinds``, or everything: somebody reads it, or writes to it."""
        if self.runtime.made.states.away:
            self.runtime.made.states.bring_back(*kinds)

    def make_ready(self, units: Sequence[Unit] | None = None) -> None:
        """Finish updates, bring back everything that is away, and take in what a script has put in a frozen one's place.

        ``units``: those that are to be ready, if not all. Hooks of single modules must not look at the whole model.
        """
        chosen = self.units if units is None else units
        finish_updates(chosen)
        self.bring_back()
        self.runtime.guard.take_in_replaced(chosen)

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


@contextmanager
def may_change(model: ShardedModel) -> Iterator[None]:
    """In the block, weights may get new values from others than the script. What it has changed counts if they do not."""
    for block in model.blocks:
        block.note_edits(model)
    try:
        yield
    finally:
        for block in model.blocks:
            block.put_back(model)


@contextmanager
def without_edits(model: ShardedModel) -> Iterator[None]:
    """In the block, weights are read as they are at every stage until blocks of scripts end, and store what was changed."""
    aside = [block for block in model.blocks if block.set_edits_aside(model)]
    try:
        yield
    finally:
        for block in aside:
            block.put_back(model)


def newest_topology() -> Topology | None:
    """The ranks of the engine that was made last; None if there is no engine."""
    newest = max(_models, key=lambda model: model.number, default=None)
    return None if newest is None else newest.comm.topology


def home_of(param: torch.Tensor) -> tuple[ShardedModel, ParameterHome] | None:
    """Where ``param`` lies; None if no engine has it."""
    for model in _models:
        home = model.homes.get(id(param))
        if home is not None and home.flat_group.params[home.entry] is param:
            return model, home
    return None


def is_trained(param: torch.Tensor) -> bool:
    """True if an engine trains ``param``, which may be frozen for now."""
    home = home_of(param)
    return home is not None and home[1].flat_group.trainable


def models_in(module: nn.Module) -> list[ShardedModel]:
    """The sharded models that have hooks in ``module``, or parameters of it, in the same order on all ranks."""
    runtimes = {id(runtime) for _, runtime in runtimes_in(module)}
    homes = (home_of(tensor) for _, tensor in named_members(module))
    runtimes |= {id(home[0].runtime) for home in homes if home is not None}
    return sorted((model for model in _models if id(model.runtime) in runtimes), key=lambda model: model.number)


def refuse_shared_parameters(module: nn.Module) -> None:
    """Raise ModelError if a parameter of ``module`` is one of another engine's model, frozen or not.

    An engine lets each parameter be a view of memory of its own. The other one would go on without it.
    """
    for name, param in module.named_parameters():
        found = home_of(param)
        if found is not None:
            frozen = "" if param.requires_grad else ", frozen,"
            raise ModelError(
                f"parameter {name!r}{frozen} is {found[1].name!r} of another engine's model, too, and each engine keeps "
                "its parameters in memory of its own. Remedy: before initialize(), give one model a copy (module.part = "
                "copy.deepcopy(module.part)); train what both change as one module, by one engine; or call destroy() of "
                "the other engine first, or drop it on all ranks, unless it is one of a pipeline."
            )


def find(param: torch.Tensor, *kinds: StateKind) -> tuple[ShardedModel, ParameterHome] | None:
    """``home_of``, with updates finished and ``kinds`` brought back."""
    found = home_of(param)
    if found is not None:
        found[0].finish_updates()
        if kinds:
            found[0].bring_back(*kinds)
    return found


def model_of(module: nn.Module) -> ShardedModel | None:
    """The sharded model that ``module`` is, or is a part of; None if no engine manages it."""
    found = next((find(tensor) for _, tensor in named_members(module)), None)
    return found[0] if found is not None else None
