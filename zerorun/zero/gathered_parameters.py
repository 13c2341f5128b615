"""GatheredParameters: a block in which a script has the whole values of parameters, and may change them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from types import TracebackType
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from ..errors import ModelError, ReleasedParameterError
from ..log import listed, logger
from ..plan.parameter_kinds import inside, named_members
from .init import Held, Init, divide_again, hold, take_values
from .sharded_model import ParameterHome, ShardedModel, find
from .value_access import compare_request, entry_view, flat_weights, refuse_copies, store_weight


class Shown(NamedTuple):
    """A parameter that has its full value inside a block.

    ``is_own``: ``value`` is the one tensor that this rank has of it. ``before``: a copy of it, if an error is to bring it
    back.
    """

    model: ShardedModel
    home: ParameterHome
    param: nn.Parameter
    value: torch.Tensor
    checksum: tuple[float, float]
    is_own: bool
    before: torch.Tensor | None

    @property
    def is_edited(self) -> bool:
        """True if the script has changed what the rank goes on with."""
        return self.is_own and _checksum(self.value) != self.checksum


_open: WeakSet[GatheredParameters] = WeakSet()


class GatheredParameters:
    """Give the parameters their full values inside the block, on every rank. All ranks must enter it.

    Parameters that are divided over tensor-parallel ranks are whole as well; layers cannot run with them in the block.

    ``params``: one parameter or an iterable, in any order; parameters that belong neither to an engine nor to ``Init`` are
    left alone, and None, which stands for a bias that a layer has not, is passed over. ``fwd_module`` has no effect:
    forwards in the block find the values in any case. With ``modifier_rank``, a rank of the world, the values of that rank
    are kept when the block ends. Without it, the block is for reading: it raises ReleasedParameterError at its end if a
    value was changed, because ranks could differ. Raises OrderError, on all ranks alike, if they were given different
    parameters, and ModelError if a shape was changed. With ``modifier_rank``, raises ModelError if another pipeline stage
    also has the parameter, if that rank is on a stage that does not have it, or if the block is inside another one that has
    the parameter with another ``modifier_rank`` or without one.

    After any of these errors, and after one that was raised in the block, the values are those of before: for that, blocks
    with ``modifier_rank`` copy each value once. Without it, what was changed in place of a parameter that this rank keeps
    whole stays so, and until it gets a value the next step or save raises ReleasedParameterError. An error in the block is
    to be raised on all ranks, or to end the program: ranks that go on wait at the end of the block for the others. A
    block inside another one that has the same parameters undoes nothing: the end of the outer one decides.

    A step, a load or destroy() inside the block counts: the block shows the new values from then on. What a block had
    changed before that is not kept, and its end raises ReleasedParameterError, with ``modifier_rank`` on all ranks alike.

    With ``modifier_rank``, what a save, an export or ``engine.state_dict()`` inside the block has are the weights of before
    it, on all ranks and at every stage, and a warning says so: the block stores its changes at its end.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        chosen = [params] if params is None or isinstance(params, torch.Tensor) else list(params)
        present = [param for param in chosen if isinstance(param, torch.Tensor)] if enabled else []
        self._params = [tensor for param in present for _, tensor in inside(param)]
        self._modifier_rank = modifier_rank
        self._held: list[Shown] = []
        self._lost: list[tuple[ShardedModel, str]] = []  # what was changed before a step or a load in the block, by name
        self._undone: list[tuple[Shown, torch.Tensor]] = []  # what was changed, while a step or a load may bring new values
        self._has_shown_new = False
        self._dropped: list[str] = []  # what was changed before destroy() in the block, by name
        self._unsettled: list[tuple[Held, tuple[float, float]]] = []  # made inside Init, and in no engine yet
        self._being_made: list[torch.Tensor] = []  # made in an Init block that is still open: whole by turns
        self._entered = 0  # how often: the last end of all is the block's

    def __enter__(self) -> None:
        if self._entered:
            self._entered += 1
            return
        self._refuse_nested()
        if Init.outermost is not None:
            self._being_made = Init.outermost.hold(self._params)
        else:
            self._unsettled = [(held, _checksum(held.param)) for held in hold(self._params)]
        found = self._managed()
        if self._modifier_rank is not None:
            for model, home in found:
                refuse_copies(home)
                _refuse_other_stage(model, home, self._modifier_rank)
        for model, members in groupby(found, lambda pair: pair[0]):
            exchanges = model.runtime.plan.shares_params or bool(model.parts.shards) or self._modifier_rank is not None
            if exchanges:
                compare_request(model, "GatheredParameters", [repr(home.name) for _, home in members])
        self._held += self._show(found)
        for model in {id(model): model for model, _ in found}.values():
            model.blocks.append(self)
        _open.add(self)
        self._entered = 1

    def _refuse_nested(self) -> None:
        """Raise ModelError for parameters of another block that would not keep what this one changes."""
        wanted = {id(param) for param in self._params}
        for block in _open if self._modifier_rank is not None else ():
            if block._modifier_rank == self._modifier_rank:
                continue
            names = [repr(s.home.name) for s in block._held if id(s.param) in wanted and not block._leaves_edits(s.model)]
            names += [f"of shape {tuple(h.param.shape)}" for h, _ in block._unsettled if id(h.param) in wanted]
            if names:
                outer = "no modifier_rank" if block._modifier_rank is None else f"modifier_rank = {block._modifier_rank}"
                raise ModelError(
                    f"GatheredParameters(...) with modifier_rank = {self._modifier_rank} inside a block with {outer}, "
                    f"which also has the parameters {listed(names)}: its end would drop what the inner block changes. "
                    "Remedy: leave the outer block before, or give both the same modifier_rank."
                )

    def _show(self, found: Iterable[tuple[ShardedModel, ParameterHome]]) -> Iterator[Shown]:
        """Give the parameters at ``found`` their full values. Collective."""
        flats: dict[int, torch.Tensor] = {}
        for model, home in found:
            managed = home.flat_group.params[home.entry]
            key = id(home.flat_group)
            if key not in flats:
                flats[key] = flat_weights(model.runtime, home.unit, home.flat_group)
            view = entry_view(home, flats[key])
            value = model.parts.whole(managed, view)
            # Where the master itself is shown, what it was before tells which of its elements the block has changed.
            compares = self._modifier_rank is not None and home.flat_group.rest is not None
            is_own = home.unit.resident and value is view and not compares
            if not is_own:
                value = value.clone()
                home.flat_group.keep(home.entry, value)
            before = value.clone() if is_own and self._is_copied(model) else None
            model.runtime.guard.held.add(id(managed))
            if id(managed) in model.parts.shards:
                model.runtime.guard.joined[id(managed)] = repr(home.name)
            yield Shown(model, home, managed, value, _checksum(value), is_own, before)

    def _managed(self) -> list[tuple[ShardedModel, ParameterHome]]:
        """Return the homes of the parameters that an engine has and no block holds, each once, in the order of units."""
        found = {id(p): where for p in self._params if (where := find(p)) and id(p) not in where[0].runtime.guard.held}
        return sorted(found.values(), key=lambda pair: (pair[0].number, pair[1].place))

    def note_edits(self, model: ShardedModel) -> None:
        """The weights of ``model`` may get new values from others than this block, which begin without what it has changed.

        Either ``show_new`` or ``put_back`` follows.
        """
        for shown in (shown for shown in self._held if shown.model is model):
            now = shown.param.detach()
            if now.shape == shown.value.shape and not self._is_lost(shown, now):
                continue
            self._undone.append((shown, now.clone()))
            self._undo(shown)

    def put_back(self, model: ShardedModel) -> None:
        """The weights of ``model`` have got no new values since ``note_edits``: what this block has changed counts."""
        for shown, edit in (undone for undone in self._undone if undone[0].model is model):
            if shown.is_own and shown.value.shape == edit.shape:
                with torch.no_grad():
                    shown.value.copy_(edit)
        self._undone = [undone for undone in self._undone if undone[0].model is not model]

    def set_edits_aside(self, model: ShardedModel) -> bool:
        """Let ``model`` be as before what this block stores at its end. If True, ``put_back`` must follow."""
        if self._modifier_rank is None or any(undone[0].model is model for undone in self._undone):
            return False
        self.note_edits(model)
        names = [repr(shown.home.name) for shown, _ in self._undone if shown.model is model]
        if names and model.comm.topology.rank == self._modifier_rank:
            logger.warning(
                "a save, an export or engine.state_dict() inside GatheredParameters(..., modifier_rank=%d), which has "
                "changed %s: it has the weights of before the block, whose end stores the changes. Remedy: leave the block "
                "before.",
                self._modifier_rank,
                listed(names),
            )
        return bool(names)

    def show_new(self, model: ShardedModel, param: torch.Tensor | None = None) -> None:
        """The weights of ``model``, or that of ``param`` alone, have got new values from others than this block."""
        stale = [shown for shown in self._held if shown.model is model and (param is None or shown.param is param)]
        for shown in stale:
            _let_go(shown.home)
        new = {id(shown.param): shown for shown in self._show((model, shown.home) for shown in stale)}
        self._held = [new.get(id(shown.param), shown) for shown in self._held]
        self._lost += [(model, shown.home.name) for shown, _ in self._undone if id(shown.param) in new]
        self._undone = [undone for undone in self._undone if id(undone[0].param) not in new]
        self._has_shown_new = True

    def let_go(self, model: ShardedModel) -> None:
        """The parameters of ``model`` are ordinary ones, which this block has nothing to do with any more. Collective."""
        lost = [name for of, name in self._lost if of is model]
        lost += [shown.home.name for shown, _ in self._undone if shown.model is model]
        self._dropped += self._of_all_ranks(model, lost)
        self._held = [shown for shown in self._held if shown.model is not model]
        self._lost = [(of, name) for of, name in self._lost if of is not model]
        self._undone = [undone for undone in self._undone if undone[0].model is not model]

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered -= 1
        if self._entered:
            return
        edited, reshaped = self._release_unsettled(keep=kind is None), self._reshaped() if kind is None else []
        lost = self._lost_anywhere() if kind is None else []
        for model in {id(shown.model): shown.model for shown in self._held}.values():
            model.blocks.remove(self)
        _open.discard(self)
        for shown in self._held:
            model, home, param, value = shown[:4]
            model.runtime.guard.held.discard(id(param))
            model.runtime.guard.joined.pop(id(param), None)
            now = param.detach()
            if reshaped or (lost and self._modifier_rank is not None) or kind is not None:
                self._undo(shown)  # no new values are kept
            elif self._modifier_rank is not None:
                fresh = now.to(value).contiguous()
                _take_from(model, self._modifier_rank, fresh)
                store_weight(model, home, model.parts.part(param, fresh), exactly=False)
            elif self._is_lost(shown, now):
                edited.append(home.name)
                self._undo(shown)
            _let_go(home)
            model.runtime.guard.forget_writes(param)
        self._held, self._lost, self._dropped, self._has_shown_new = [], [], [], False
        if reshaped:
            raise ModelError(
                f"shapes were changed inside GatheredParameters(...): {', '.join(reshaped)}. These parameters are as "
                "before. Remedy: change shapes before initialize()."
            )
        if lost and self._modifier_rank is not None:
            raise ReleasedParameterError(
                f"parameters {listed(lost)} were changed inside GatheredParameters(..., modifier_rank="
                f"{self._modifier_rank}), and a step, a load or destroy() came after that in the same block, whose values "
                "stay. No change of the block is kept. Remedy: leave the block before step(), train_batch(), "
                "load_checkpoint() or destroy(), and before an initialize() that takes the module over."
            )
        if edited or lost:
            self._refuse([*lost, *edited])

    def _is_lost(self, shown: Shown, now: torch.Tensor) -> bool:
        """Whether a value, which is ``now``, was changed, and the change is not kept where the block stores no values."""
        if _checksum(now) == shown.checksum:
            return False
        return self._modifier_rank is not None or not self._keeps(shown.model, shown.home, shown.param, now)

    def _undo(self, shown: Shown) -> None:
        """Let a parameter have the value of before. What cannot be undone is an error at the next step, save or load."""
        if shown.is_edited and shown.before is not None:
            with torch.no_grad():
                shown.value.copy_(shown.before)
        elif shown.is_edited:
            self._spoil(shown)

    # -- what DeepSpeed does otherwise, without modifier_rank (see deepspeed/parameters.py) ------------------------------

    def _is_copied(self, model: ShardedModel) -> bool:
        """Whether an error brings back what this rank keeps whole. Whoever only reads is spared a copy of all."""
        return self._modifier_rank is not None

    def _spoil(self, shown: Shown) -> None:
        """An edit stays that other ranks may not have made."""
        shown.model.half_loaded.edit(shown.home.name)

    def _keeps(self, model: ShardedModel, home: ParameterHome, param: nn.Parameter, now: torch.Tensor) -> bool:
        """Whether the values ``now``, which were changed in the block, are kept."""
        return False

    def _leaves_edits(self, model: ShardedModel) -> bool:
        """Whether this block leaves parameters of ``model`` to each rank, as the script has changed them there."""
        return False

    def _refuse(self, edited: list[str]) -> None:
        """Raise for parameters whose new values are not kept."""
        raise ReleasedParameterError(
            f"parameters {edited} were changed inside GatheredParameters(...) without modifier_rank, so the change "
            "would be lost or differ between ranks. Remedy: pass modifier_rank=0 and change them on that rank."
        )

    def _reshaped(self) -> list[str]:
        """Return descriptions of the parameters whose shapes were changed in the block.

        With ``modifier_rank``, all ranks of the stage return some if any rank has one, because values would be sent.
        """
        found: list[str] = []
        for model, members in groupby(self._held, lambda shown: shown.model):
            changed = [
                f"{home.name!r} from {tuple(value.shape)} to {tuple(now.shape)}"
                for _, home, param, value, *_ in members
                if (now := param.detach()).shape != value.shape
            ]
            found += self._of_all_ranks(model, changed)
        return found

    def _lost_anywhere(self) -> list[str]:
        """Return which changes were lost to what came after them in the block, on all ranks as ``_reshaped`` does."""
        found = list(self._dropped)
        for model, _ in groupby(self._held if self._has_shown_new else [], lambda shown: shown.model):
            found += self._of_all_ranks(model, [name for of, name in self._lost if of is model])
        return list(dict.fromkeys(found))

    def _of_all_ranks(self, model: ShardedModel, found: list[str]) -> list[str]:
        """Return ``found``; with ``modifier_rank``, something on all ranks of the stage if any rank has found something."""
        if self._modifier_rank is None:
            return found
        anywhere = any(map(int, model.comm.stage_gather(torch.tensor([len(found)]))))
        return found or ["those of other ranks"] * anywhere

    def _release_unsettled(self, *, keep: bool) -> list[str]:
        """Partition again the parameters that no engine has yet. Return those changed without ``modifier_rank``."""
        unsettled, self._unsettled = self._unsettled, []
        being_made, self._being_made = self._being_made, []
        if keep and self._modifier_rank is not None:
            take_values(being_made, self._modifier_rank)
            divide_again([held for held, _ in unsettled], self._modifier_rank)
            return []
        changed = [held for held, checksum in unsettled if keep and _checksum(held.param) != checksum]
        edited = [f"of shape {tuple(held.param.shape)}" for held in changed]
        for held, _ in unsettled:
            held.put_back()
        return edited


def refuse_open_blocks(module: nn.Module) -> None:
    """Raise ModelError if a block of GatheredParameters is open that has parameters of ``module``, made in ``Init``.

    An engine would take values that the block's end drops, and its end would take the engine's parameters for its own.
    """
    if not _open:
        return
    names = {id(tensor): name for name, tensor in named_members(module)}
    found = [repr(names[id(h.param)]) for block in _open for h, _ in block._unsettled if id(h.param) in names]
    if found:
        raise ModelError(
            f"initialize() inside a block of GatheredParameters(...) that has the parameters {listed(found)}. Remedy: "
            "leave the block before; what it changes with modifier_rank is kept. After initialize(), open another one."
        )


def _let_go(home: ParameterHome) -> None:
    """Let the parameter at ``home`` be what it is outside of blocks."""
    home.flat_group.let_go(home.entry, unsharded=home.unit.unsharded)


def _take_from(model: ShardedModel, rank: int, whole: torch.Tensor) -> None:
    """Overwrite ``whole`` with the one of ``rank``, a rank of the world, on all ranks of its pipeline stage."""
    comm = model.comm
    data = comm.topology.ranks_along("data", comm.topology.rank_at(tensor=0))
    source = comm.topology.coordinate(rank)
    number = data.index(comm.topology.rank_at(**{**source._asdict(), "tensor": 0}))
    comm.control.data_broadcast(whole, number, "edited parameters")
    model.parts.take(whole, source.tensor)


def _refuse_other_stage(model: ShardedModel, home: ParameterHome, rank: int) -> None:
    topology = model.comm.topology
    if topology.coordinate(rank).pipe != topology.pipe_rank:
        raise ModelError(
            f"modifier_rank = {rank} has no {home.name!r}, which is on pipeline stage "
            f"{topology.pipe_rank}. Remedy: give a rank of that stage, {topology.filter_match(pipe=topology.pipe_rank)[0]} "
            "for one, and change the parameter there."
        )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by size in bytes


def _checksum(value: torch.Tensor) -> tuple[float, float]:
    """Return a checksum of the bits, because packed values may read as NaN, which equals nothing."""
    bits = value.detach().contiguous().reshape(-1).view(_INTEGERS[min(value.element_size(), 4)])
    wide = bits.double()
    weights = torch.arange(1, wide.numel() + 1, dtype=torch.float64, device=wide.device)
    return float(wide.sum()), float(torch.dot(wide, weights))
