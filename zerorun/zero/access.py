"""Access to the values of a sharded model: state dicts, GatheredParameters, and masters and moments by parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from types import TracebackType
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from ..distributed.same_data import compare
from ..errors import ModelError, OrderError, ReleasedParameterError
from ..log import listed
from ..ops.state_format import keep_state, wide_state
from ..optim.parts import PartsOptimizer
from ..plan.weights import follow_memory, followers, inside, named_members, rebuilt
from .away import MASTERS, MOMENTS, WEIGHTS, StateKind
from .flat_group import FlatGroup, TrainedGroup, fresh_gradient, rounded, take_weight
from .init import Held, Init, divide_again, hold, take_values
from .runtime import MADE_BY, Runtime
from .sharded_model import ParameterHome, ShardedModel, find, model_of
from .unit import Unit


def compare_request(model: ShardedModel, function: str, wanted: Sequence[str]) -> None:
    """Raise OrderError, on all ranks of this pipeline stage alike, unless they all call ``function`` for ``wanted``."""
    comm, problem = model.comm, f"{function}(...) was called for different parameters on different ranks"
    compare(problem, [f"a call of {function}", *wanted], comm.stage_gather, comm.control.data_values)


def gathered(model: ShardedModel, flat_group: FlatGroup, owned: torch.Tensor, what: str) -> torch.Tensor:
    """Return the flat buffer [numel] made from every rank's ``owned`` [owned]. Collective unless a rank owns everything."""
    owned = owned.to(model.comm.device)
    if flat_group.plan.owns_everything or flat_group.layout.degree == 1:
        return owned
    full = torch.empty(flat_group.layout.numel, dtype=owned.dtype, device=owned.device)
    channels = model.comm.of(flat_group.plan.family)
    channels.shard.all_gather(full, flat_group.layout.bounds, f"{what}: all-gather on request", owned).wait()
    model.comm.fence()  # the script may write to parameters next, which other ranks may still be reading
    return full


def entry_view(home: ParameterHome, flat: torch.Tensor) -> torch.Tensor:
    entry = home.flat_group.layout.entries[home.entry]
    return flat[entry.offset : entry.end].view(entry.shape)


def _weights(runtime: Runtime, unit: Unit, flat_group: FlatGroup) -> torch.Tensor:
    """Return the flat compute-dtype parameters [numel] of a flat group. Collective for units that share slots."""
    unit.updated()
    runtime.made.states.bring_back(WEIGHTS)
    if flat_group.plan.resident:
        return flat_group.full
    full = torch.empty(flat_group.layout.numel, dtype=flat_group.dtype, device=runtime.comm.device)
    unit.gather_into(runtime.comm, flat_group, full, "on request").wait()
    runtime.comm.fence()  # as in gathered()
    return full


def _exact(model: ShardedModel, unit: Unit, flat_group: FlatGroup) -> torch.Tensor:
    """Return the flat parameters [numel] with the digits that masters have and weights lack. Collective above stage 0.

    A weight that the script has changed by itself, as averages of weights do, counts and not its master.
    """
    weights = _weights(model.runtime, unit, flat_group)
    if not isinstance(flat_group, TrainedGroup) or not flat_group.has_more_than_weights:
        return weights
    model.bring_back(MASTERS)
    full = gathered(model, flat_group, flat_group.exact, unit.name)
    return torch.where(rounded(flat_group.plan, full) == weights, full, weights)


def full_state_dict(model: ShardedModel, *, keep: bool = True, exact: bool = False) -> dict[str, torch.Tensor]:
    """Return the module's state dict with full CPU tensors, made one unit at a time. Collective at stage 3.

    What is no tensor, as the extra state of a module may be, stays as it is. Without ``keep`` this rank only takes part,
    and gets {}. ``exact``: weights are those of their fp32 masters. It is collective at each stage above 0.
    """
    values: dict[int, torch.Tensor] = {}
    for unit in model.units:
        for flat_group in unit.flat_groups:
            flat = _exact(model, unit, flat_group) if exact else _weights(model.runtime, unit, flat_group)
            for entry, param in zip(flat_group.layout.entries, flat_group.params, strict=True):
                part = flat[entry.offset : entry.end].view(entry.shape)
                whole = model.parts.whole(param, part)
                if keep:
                    values[id(param)] = whole.to("cpu", copy=True)
    if not keep:
        return {}
    found = model.runtime.guard.own_state_dict(model.module)

    def value_of(tensor: torch.Tensor) -> torch.Tensor:
        return values[id(tensor)] if id(tensor) in values else tensor.detach().to("cpu", copy=True)

    return {name: rebuilt(value, value_of) if torch.is_tensor(value) else value for name, value in found.items()}


class WholeValues:
    """Full values of the parameters of ``module``, which an engine manages, read layer by layer. Collective."""

    def __init__(self, module: nn.Module) -> None:
        model = model_of(module)
        assert model is not None
        self._model: ShardedModel = model
        self._flats: dict[tuple[int, bool], torch.Tensor] = {}  # by flat group, because neighbouring parameters share one

    def value(self, param: torch.Tensor, *, master: bool = False) -> torch.Tensor:
        """Return ``param`` in its shape, on the engine's device; with ``master``, its fp32 master if it has one.

        The value must not be written to. It is valid until ``forget_all_but`` is called without ``param``.
        """
        home = self._model.homes[id(param)]
        flat_group = home.flat_group
        key = id(flat_group), master and flat_group.master is not None
        if key not in self._flats and isinstance(flat_group, TrainedGroup) and key[1]:
            self._model.bring_back(MASTERS, WEIGHTS)
            self._flats[key] = gathered(self._model, flat_group, flat_group.exact, home.unit.name)
        elif key not in self._flats:
            self._flats[key] = _weights(self._model.runtime, home.unit, flat_group)
        return self._model.parts.whole(param, entry_view(home, self._flats[key]))

    def forget_all_but(self, params: Iterable[torch.Tensor]) -> None:
        """Free the memory of all flat groups that contain none of ``params``."""
        needed = {id(self._model.homes[id(param)].flat_group) for param in params}
        self._flats = {key: flat for key, flat in self._flats.items() if key[0] in needed}


def restore_module(model: ShardedModel, *, exact: bool = False, as_given: bool = False) -> None:
    """Give the parameters full values in memory of their own, and remove the hooks. Collective.

    ``exact``: those that have fp32 masters become fp32, with the values of these. ``as_given``: then all get the dtype
    that they came in.
    """
    runtime = model.runtime
    with contextlib.suppress(OrderError):  # that ranks went different ways was raised before, or does no harm any more
        runtime.comm.fence()
    for block in model.blocks:
        block.note_edits(model)
    for unit in model.units:
        for flat_group in unit.flat_groups:
            flat = _exact(model, unit, flat_group) if exact else _weights(runtime, unit, flat_group)
            for entry, param in zip(flat_group.layout.entries, flat_group.params, strict=True):
                dtype = flat_group.plan.given_dtype if as_given else flat.dtype
                param.data = flat[entry.offset : entry.end].view(entry.shape).to(dtype, copy=True)
                if fresh_gradient(param) is not None:
                    param.grad = None
    for layer in followers(model.module):
        follow_memory(layer)
    runtime.comm.fence()
    runtime.comm.control.barrier()  # other ranks may still be checking whether this one has settled
    runtime.remove_hooks()
    model.forget()


def find_released_use(loss: torch.Tensor, units: list[Unit]) -> tuple[str, str] | None:
    """Return (parameter, unit) of a parameter in the graph of ``loss`` that was read outside its unit's forward, or None.

    There, the parameter was a placeholder.
    """
    homes = {
        id(param): (name, unit)
        for unit in units
        if not unit.resident
        for flat_group in unit.flat_groups
        for name, param in zip(flat_group.names, flat_group.params, strict=True)
    }
    seen, stack = set(), [(loss.grad_fn, 0)]  # (node, index of the unit whose forward made it, as far as is known)
    while stack and homes:
        node, inside = stack.pop()
        if node is None or (node, inside) in seen:
            continue
        seen.add((node, inside))
        inside = node.metadata.get(MADE_BY, inside)  # type: ignore[attr-defined]
        name, unit = homes.get(id(getattr(node, "variable", None)), ("", None))
        if unit is not None and unit.index != inside:
            return name, unit.name
        stack.extend((parent, inside) for parent, _ in node.next_functions)
    return None


# -- editing -----------------------------------------------------------------------------------------------------


def store_owned(flat_group: FlatGroup, entry: int, owned: torch.Tensor, value: torch.Tensor) -> None:
    """Write this rank's part of ``value`` (a full parameter) into ``owned``."""
    flat = value.reshape(-1)
    if owned.numel() == flat_group.layout.numel:
        place = flat_group.layout.entries[entry]
        owned[place.offset : place.end].copy_(flat)
        return
    piece = flat_group.plan.shard_piece(entry)
    if piece is not None:
        part = flat[piece.start : piece.start + piece.numel]
        owned[piece.shard_start : piece.shard_start + piece.numel].copy_(part)


def _store_weight(model: ShardedModel, home: ParameterHome, value: torch.Tensor, *, exactly: bool) -> None:
    """Let the weight at ``home`` be ``value``. ``exactly``: and the master, too; otherwise only where weights change."""
    flat_group = home.flat_group
    model.half_loaded.overwrite(home.name)
    model.bring_back()
    model.comm.fence()
    if isinstance(flat_group, TrainedGroup) and flat_group.has_more_than_weights:
        if exactly:
            exact = flat_group.exact  # of the others
            store_owned(flat_group, home.entry, exact, value)
            keep_owned(home, flat_group, exact)
        else:
            take_weight(flat_group, home.entry, value)
    weight = rounded(flat_group.plan, value)
    if home.unit.resident:
        entry_view(home, flat_group.full).copy_(weight)
    else:
        store_owned(flat_group, home.entry, flat_group.shard, weight)
        if model.runtime.gathers.holds(home.unit):
            model.runtime.gathers.evict(home.unit.param_slot)


def keep_owned(home: ParameterHome, flat_group: TrainedGroup, values: torch.Tensor) -> None:
    """Let the master at ``home`` have what ``values`` [owned] have for it; they may be ``exact`` itself."""
    run = flat_group.plan.owned_run(home.entry)
    if run is not None:
        flat_group.keep_exact(values[run.offset : run.offset + run.numel], run.offset)


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
    to be raised on all ranks, or to end the program: ranks that go on wait at the end of the block for the others.

    A step, a load or destroy() inside the block counts: the block shows the new values from then on. What a block had
    changed before that is not kept, and its end raises ReleasedParameterError, with ``modifier_rank`` on all ranks alike.
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

    def __enter__(self) -> None:
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
        self._held += self._show(found)  # a block may be entered again while it is open, and then holds nothing more
        for model in {id(model): model for model, _ in found}.values():
            model.blocks.append(self)
        _open.add(self)

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
                flats[key] = _weights(model.runtime, home.unit, home.flat_group)
            view = entry_view(home, flats[key])
            value = model.parts.whole(managed, view)
            # Where the master itself is shown, what it was before tells which of its elements the block has changed.
            compares = self._modifier_rank is not None and home.flat_group.rest is not None
            is_own = home.unit.resident and value is view and not compares
            if not is_own:
                value = value.clone()
                managed.data = value
            before = value.clone() if is_own and self._is_copied(model) else None
            model.runtime.guard.held.add(id(managed))
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
            now = _value_now(shown.home, shown.param, shown.value)
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

    def show_new(self, model: ShardedModel, param: torch.Tensor | None = None) -> None:
        """The weights of ``model``, or that of ``param`` alone, have got new values from others than this block."""
        stale = [shown for shown in self._held if shown.model is model and (param is None or shown.param is param)]
        for shown in stale:
            shown.param.data = _own_value(shown.home)
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
        edited, reshaped = self._release_unsettled(keep=kind is None), self._reshaped() if kind is None else []
        lost = self._lost_anywhere() if kind is None else []
        for model in {id(shown.model): shown.model for shown in self._held}.values():
            model.blocks.remove(self)
        _open.discard(self)
        for shown in self._held:
            model, home, param, value = shown[:4]
            model.runtime.guard.held.discard(id(param))
            now = _value_now(home, param, value)
            if reshaped or (lost and self._modifier_rank is not None) or kind is not None:
                self._undo(shown)  # no new values are kept
            elif self._modifier_rank is not None:
                fresh = now.to(value).contiguous()
                _take_from(model, self._modifier_rank, fresh)
                _store_weight(model, home, model.parts.part(param, fresh), exactly=False)
            elif self._is_lost(shown, now):
                edited.append(home.name)
                self._undo(shown)
            param.data = _own_value(home)
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
                "load_checkpoint() or destroy()."
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
                if (now := _value_now(home, param, value)).shape != value.shape
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
    names = {id(tensor): name for name, tensor in named_members(module)}
    found = [repr(names[id(h.param)]) for block in _open for h, _ in block._unsettled if id(h.param) in names]
    if found:
        raise ModelError(
            f"initialize() inside a block of GatheredParameters(...) that has the parameters {listed(found)}. Remedy: "
            "leave the block before; what it changes with modifier_rank is kept. After initialize(), open another one."
        )


def _own_value(home: ParameterHome) -> torch.Tensor:
    """What the parameter at ``home`` shows outside of blocks, while its unit is not unsharded."""
    return home.flat_group.views[home.entry] if home.unit.resident else home.flat_group.loud[home.entry]


def _value_now(home: ParameterHome, param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Return ``value``, which ``param`` was given for a block, or the tensor by which the script has replaced it.

    If a layer ran inside the block, ``param`` shows its own view or placeholder again; then ``value`` counts.
    """
    own = (home.flat_group.views[home.entry], *home.flat_group.loud[home.entry : home.entry + 1])
    return value if param.data_ptr() in [tensor.data_ptr() for tensor in own] else param.detach()


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


def refuse_copies(home: ParameterHome) -> None:
    """Raise ModelError for a parameter that several pipeline stages have: its copies would get different values."""
    if any(axis != "tensor" for axis in home.flat_group.plan.replication.sums):
        raise ModelError(
            f"{home.name!r} is tied to a parameter of another pipeline stage, which would not change "
            "with it. Remedy: change it before initialize(), or in a checkpoint."
        )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by size in bytes


def _checksum(value: torch.Tensor) -> tuple[float, float]:
    """Return a checksum of the bits, because packed values may read as NaN, which equals nothing."""
    bits = value.detach().contiguous().reshape(-1).view(_INTEGERS[min(value.element_size(), 4)])
    wide = bits.double()
    weights = torch.arange(1, wide.numel() + 1, dtype=torch.float64, device=wide.device)
    return float(wide.sum()), float(torch.dot(wide, weights))


# -- by parameter ------------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return the full fp32 master of ``param``, in its shape; None if no engine optimizes it. All ranks must call it."""
    found = find(param, MASTERS, WEIGHTS)
    if found is None or not isinstance(found[1].flat_group, TrainedGroup):
        return None
    model, home = found
    master = found[1].flat_group.exact
    if not home.flat_group.plan.owns_everything or model.parts.shards:
        compare_request(model, "safe_get_full_fp32_param", [repr(home.name)])
    part = entry_view(home, gathered(model, home.flat_group, master, home.unit.name)).clone()
    return model.parts.whole(param, part)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the master and the weight of ``param`` to ``value``. All ranks must call it with the same full value.

    Raises ModelError if no engine has ``param``, if several pipeline stages have it, or if the shape is another; nothing is
    changed then.
    """
    model, home = managed(param, "safe_set_full_fp32_param")
    refuse_copies(home)
    _store_weight(model, home, part_of_value(model, home, value, "safe_set_full_fp32_param"), exactly=True)
    for block in model.blocks:
        block.show_new(model, param)


def safe_get_full_optimizer_state(param: torch.Tensor, key: str) -> torch.Tensor | None:
    """Return the full optimizer state ``key`` (such as "exp_avg") of ``param``, in its shape. All ranks must call it.

    None if no engine optimizes ``param`` or if there is no state yet. Raises ModelError if the state has another shape.
    """
    found = find(param, MOMENTS, MASTERS)
    if found is None or found[0].optimizer is None or found[1].flat_group.master is None:
        return None
    model, home = found
    compare_request(model, "safe_get_full_optimizer_state", [f"{key!r} of {home.name!r}"])
    flat, known = owned_state(model, home.flat_group, key)
    if not any(model.comm.control.data_values(known)):
        return None
    part = entry_view(home, gathered(model, home.flat_group, flat, home.unit.name)).clone()
    return model.parts.whole(param, part)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Set the optimizer state ``key`` of ``param`` to ``value`` (full, the same on all ranks).

    Does nothing on a rank that has no such state yet. Raises ModelError as ``safe_set_full_fp32_param`` does.
    """
    model, home = managed(param, "safe_set_full_optimizer_state")
    refuse_copies(home)
    part = part_of_value(model, home, value, "safe_set_full_optimizer_state")
    flat, known = owned_state(model, home.flat_group, key)
    if not known:
        return
    store_owned(home.flat_group, home.entry, flat, part)
    write_state(model, home, key, flat)


def write_state(model: ShardedModel, home: ParameterHome, key: str, owned: torch.Tensor) -> None:
    """Write what ``owned`` [owned] has for the parameter at ``home`` into its optimizer state ``key`` on this rank.

    States of other parameters stay as they are: in few bits, they would be rounded again.
    """
    assert model.optimizer is not None
    for piece in model.optimizer.pieces:
        states = model.optimizer.optimizer.state.get(piece.tensor, {}) if piece.flat_group is home.flat_group else {}
        for run in piece.runs if key in states else ():
            if run.entry == home.entry:
                low = piece.low + run.offset
                keep_state(states, key, owned[low : low + run.numel], run.offset)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return a view of this rank's part of the master of ``param``, flat and maybe empty; a copy if it is not kept in fp32.

    None if no engine optimizes ``param``.
    """
    found = find(param, MASTERS, WEIGHTS)
    if found is None or not isinstance(found[1].flat_group, TrainedGroup):
        return None
    return owned_part(found[1], found[1].flat_group.exact)


def safe_get_local_optimizer_state(param: torch.Tensor, key: str) -> torch.Tensor | None:
    """Return a copy of this rank's part of the optimizer state ``key`` of ``param``, flat and maybe empty.

    It does not wait for other ranks. None if no engine optimizes ``param`` or if this rank has no state yet. Raises
    ModelError if the state has another shape.
    """
    found = find(param, MOMENTS, MASTERS)
    if found is None or found[0].optimizer is None or found[1].flat_group.master is None:
        return None
    flat, known = owned_state(found[0], found[1].flat_group, key)
    return owned_part(found[1], flat) if known else None


def owned_part(home: ParameterHome, owned: torch.Tensor) -> torch.Tensor:
    """Return a view of the part of ``owned`` [owned] that belongs to the parameter at ``home``, flat and maybe empty."""
    run = home.flat_group.plan.owned_run(home.entry)
    return owned[:0] if run is None else owned[run.offset : run.offset + run.numel]


def owned_state(model: ShardedModel, flat_group: FlatGroup, key: str) -> tuple[torch.Tensor, bool]:
    """Return (state ``key`` of the elements of ``flat_group`` that this rank owns [owned], whether there is any)."""
    assert model.optimizer is not None
    assert flat_group.master is not None
    if isinstance(model.optimizer.optimizer, PartsOptimizer) and key in model.optimizer.optimizer.factors:
        raise ModelError(f"optimizer state {key!r} has not the shape of its parameter, but rows or columns of it.")
    flat = torch.zeros_like(flat_group.master, dtype=torch.float32)
    known = False
    for piece in model.optimizer.pieces:
        states = model.optimizer.optimizer.state.get(piece.tensor, {}) if piece.flat_group is flat_group else {}
        if states.get(key) is None:
            continue
        state = wide_state(states, key)
        if state.shape != piece.tensor.shape:
            raise ModelError(f"optimizer state {key!r} has shape {tuple(state.shape)}, not that of its parameter.")
        flat[piece.low : piece.low + state.numel()].view(state.shape).copy_(state)  # the state may be a wrapper
        known = True
    return flat, known


def managed(param: torch.Tensor, function: str) -> tuple[ShardedModel, ParameterHome]:
    """Where ``param`` lies, with all states there. Raises ModelError, which names ``function``, if no engine has it."""
    found = find(param, *StateKind)
    if found is None:
        raise ModelError(
            f"{function}(...): a tensor of shape {tuple(param.shape)} is not a parameter of any zerorun engine. Remedy: "
            "give a parameter of engine.module, and not a copy or a view of it."
        )
    return found


def part_of_value(model: ShardedModel, home: ParameterHome, value: torch.Tensor, function: str) -> torch.Tensor:
    """What this rank's tensor-parallel part of the parameter gets of ``value``, in its shape here.

    Raises ModelError, which names ``function``, if the value is not a tensor in the shape of the whole parameter: its parts
    on some ranks may fit all the same. To be called before anything is written.
    """
    param, here = home.flat_group.params[home.entry], home.flat_group.layout.entries[home.entry].shape
    shard = model.parts.shards.get(id(param))
    whole = shard.shape if shard is not None else here
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(whole):
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(
            f"{function}(...): the value for {home.name!r} is {given}, and not a tensor of shape {tuple(whole)}. Remedy: "
            "give the whole value, in the parameter's shape, on every rank."
        )
    return model.parts.part(param, value.detach())
