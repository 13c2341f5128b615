"""Access to the values of a sharded model: state dicts, GatheredParameters, masters and moments by parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from itertools import groupby
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..distributed.same_request import compare
from ..errors import ModelError, OrderError, ReleasedParameterError
from ..plan.weights import copied_to_cpu
from .flat_group import FlatGroup
from .init import Held, Init, divide_again, hold, take_values
from .runtime import MADE_BY, Runtime
from .sharded_model import ParameterHome, ShardedModel, find, model_of
from .unit import Unit


def compare_request(model: ShardedModel, function: str, wanted: Sequence[str]) -> None:
    """Raise OrderError, on all ranks of this pipeline stage alike, unless they all call ``function`` for ``wanted``."""
    comm, problem = model.comm, f"{function}(...) was called for different parameters on different ranks"
    compare(problem, [f"a call of {function}", *wanted], comm.stage_gather, comm.control.data_values)


def gathered(model: ShardedModel, flat_group: FlatGroup, owned: torch.Tensor, what: str) -> torch.Tensor:
    """The flat buffer [numel] made of every rank's ``owned`` [owned]. Collective unless this rank owns everything."""
    owned = owned.to(model.comm.device)
    if owned.numel() == flat_group.layout.numel:
        return owned
    full = torch.empty(flat_group.layout.numel, dtype=owned.dtype, device=owned.device)
    model.comm.all_gather(full, flat_group.layout.bounds, f"{what}: all-gather on request", owned).wait()
    model.comm.fence()  # the script may write to parameters next, which others read
    return full


def entry_view(home: ParameterHome, flat: torch.Tensor) -> torch.Tensor:
    entry = home.flat_group.layout.entries[home.entry]
    return flat[entry.offset : entry.end].view(entry.shape)


def _weights(runtime: Runtime, unit: Unit, flat_group: FlatGroup) -> torch.Tensor:
    """The flat compute-dtype parameters [numel] of a flat group. Collective for units that share slots."""
    unit.updated()
    if unit.resident:
        return flat_group.full
    full = torch.empty(flat_group.layout.numel, dtype=flat_group.dtype, device=runtime.comm.device)
    unit.gather_into(runtime.comm, flat_group, full, "on request").wait()
    runtime.comm.fence()  # as above
    return full


def full_state_dict(model: ShardedModel) -> dict[str, torch.Tensor]:
    """The module's state dict with full CPU tensors, one unit at a time. Collective at stage 3."""
    values: dict[int, torch.Tensor] = {}
    for unit in model.units:
        for flat_group in unit.flat_groups:
            flat = _weights(model.runtime, unit, flat_group)
            for entry, param in zip(flat_group.layout.entries, flat_group.params, strict=True):
                part = flat[entry.offset : entry.end].view(entry.shape)
                values[id(param)] = model.parts.whole(param, part).to("cpu", copy=True)
    with model.runtime.guard.allowing_state_dict():
        found = model.module.state_dict(keep_vars=True)
    return {n: values[id(t)] if id(t) in values else copied_to_cpu(t) for n, t in found.items()}


def guard_state_dict(module: nn.Module, runtime: Runtime, *, is_part: bool) -> Any:
    """Make plain ``module.state_dict()`` give full tensors or raise, never placeholders. Returns the hook's handle.

    ``is_part``: of a model that looks whole, this rank has only a part.
    """

    def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if (runtime.plan.shares_params or is_part) and not runtime.guard.state_dict_allowed:
            what = "parts of the model, of which other ranks have the rest" if is_part else "placeholders"
            where = "here" if is_part else "at stage 3"
            raise ReleasedParameterError(
                f"module.state_dict() {where} would hold {what}: no rank has the full weights. Remedy: call "
                "engine.state_dict(), or engine.export(dir) for a Hugging Face model, on all ranks."
            )

    return module.register_state_dict_pre_hook(before)


def adopt_loaded_weights(module: nn.Module, model: ShardedModel) -> Any:
    """Let ``module.load_state_dict()`` set masters, too, where they are not the weights. Returns the hook's handle."""

    def after(module: nn.Module, incompatible: Any) -> None:
        model.finish_updates()
        for unit in model.units:
            for flat_group in unit.trainable if unit.resident else ():
                if not flat_group.plan.master_is_weight:
                    flat_group.master.copy_(flat_group.weight)

    return module.register_load_state_dict_post_hook(after)


class WholeValues:
    """Whole values of the parameters of ``module``, which an engine manages, asked for layer by layer. Collective."""

    def __init__(self, module: nn.Module) -> None:
        model = model_of(module)
        assert model is not None
        self._model: ShardedModel = model
        self._flats: dict[tuple[int, bool], torch.Tensor] = {}  # by flat group: neighbours are in one

    def value(self, param: torch.Tensor, *, master: bool = False) -> torch.Tensor:
        """``param`` in its shape, on the engine's device; with ``master`` what the optimizer has of it, if it has.

        Not to be written to. Valid until ``forget_all_but`` is called without it.
        """
        home = self._model.homes[id(param)]
        flat_group = home.flat_group
        key = id(flat_group), master and flat_group.master is not None
        if key not in self._flats and flat_group.master is not None and key[1]:
            self._flats[key] = gathered(self._model, flat_group, flat_group.master, home.unit.name)
        elif key not in self._flats:
            self._flats[key] = _weights(self._model.runtime, home.unit, flat_group)
        return self._model.parts.whole(param, entry_view(home, self._flats[key]))

    def forget_all_but(self, params: Iterable[torch.Tensor]) -> None:
        """Give the memory back of what is not together with any of ``params``."""
        needed = {id(self._model.homes[id(param)].flat_group) for param in params}
        self._flats = {key: flat for key, flat in self._flats.items() if key[0] in needed}


def restore_module(model: ShardedModel) -> None:
    """Give the parameters full values in memory of their own, and take the hooks away. Collective."""
    runtime = model.runtime
    with contextlib.suppress(OrderError):  # that ranks went different ways is told before, or does no harm any more
        runtime.comm.fence()
    for unit in model.units:
        for flat_group in unit.flat_groups:
            flat = _weights(runtime, unit, flat_group)
            for entry, param in zip(flat_group.layout.entries, flat_group.params, strict=True):
                param.data = flat[entry.offset : entry.end].view(entry.shape).clone()
                param.grad = None
    runtime.comm.fence()
    runtime.comm.control.barrier()  # others may still be looking whether this rank has settled
    runtime.remove_hooks()
    model.forget()


def find_released_use(loss: torch.Tensor, units: list[Unit]) -> tuple[str, str] | None:
    """(parameter, unit) of a parameter in the graph of ``loss`` that was read outside its unit's forward: a placeholder."""
    homes = {
        id(param): (name, unit)
        for unit in units
        if not unit.resident
        for flat_group in unit.flat_groups
        for name, param in zip(flat_group.names, flat_group.params, strict=True)
    }
    seen, stack = set(), [(loss.grad_fn, 0)]  # nodes, with the unit whose forward made them, as far as is known
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


def _store_owned(flat_group: FlatGroup, entry: int, owned: torch.Tensor, value: torch.Tensor) -> None:
    """Write the part of ``value`` (a full parameter) that this rank keeps into ``owned``."""
    flat = value.reshape(-1)
    if owned.numel() == flat_group.layout.numel:
        place = flat_group.layout.entries[entry]
        owned[place.offset : place.end].copy_(flat)
        return
    for piece in flat_group.layout.pieces(flat_group.plan.shard_rank):
        if piece.entry == entry:
            part = flat[piece.start : piece.start + piece.numel]
            owned[piece.shard_start : piece.shard_start + piece.numel].copy_(part)


def _store_weight(model: ShardedModel, home: ParameterHome, value: torch.Tensor) -> None:
    flat_group = home.flat_group
    model.comm.fence()
    if home.unit.resident:
        entry_view(home, flat_group.full).copy_(value)
    else:
        _store_owned(flat_group, home.entry, flat_group.shard, value)
        if model.runtime.gathers.holds(home.unit):
            model.runtime.gathers.evict(home.unit.param_slot)
    if flat_group.master is not None and not flat_group.plan.master_is_weight:
        _store_owned(flat_group, home.entry, flat_group.master, value)


class GatheredParameters:
    """Inside the block the given parameters have their full values, on every rank. All ranks must enter it.

    So have those that are divided over tensor-parallel ranks; layers cannot run with them.

    ``params``: one parameter or an iterable, in any order; those that neither an engine nor ``Init`` has taken are left
    alone. With ``modifier_rank``, a rank of the world, the values of that rank are kept when the block ends. Without, the
    block is for reading: raises ReleasedParameterError at its end if a value was changed, since ranks could differ. Raises
    OrderError, on all ranks alike, if they were given different parameters, and ModelError if another pipeline stage has
    the parameter, too, or ``modifier_rank`` is on one that has not.
    """

    def __init__(
        self, params: torch.Tensor | Iterable[torch.Tensor], modifier_rank: int | None = None, enabled: bool = True
    ) -> None:
        chosen = [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = chosen if enabled else []
        self._modifier_rank = modifier_rank
        self._held: list[tuple[ShardedModel, ParameterHome, nn.Parameter, torch.Tensor, tuple[float, float]]] = []
        self._unsettled: list[tuple[Held, tuple[float, float]]] = []  # of Init, which no engine has yet
        self._being_made: list[torch.Tensor] = []  # of Init, in its block: these are whole by turns

    def __enter__(self) -> None:
        if Init.outermost is not None:
            self._being_made = Init.outermost.hold(self._params)
        else:
            self._unsettled = [(held, _checksum(held.param)) for held in hold(self._params)]
        found = self._managed()
        if self._modifier_rank is not None:
            for model, home in found:
                _refuse_copies(home)
                _refuse_other_stage(model, home, self._modifier_rank)
        for model, members in groupby(found, lambda pair: pair[0]):
            exchanges = model.runtime.plan.shares_params or bool(model.parts.shards) or self._modifier_rank is not None
            if exchanges:
                compare_request(model, "GatheredParameters", [repr(home.name) for _, home in members])
        flats: dict[int, torch.Tensor] = {}
        for model, home in found:
            managed = home.flat_group.params[home.entry]
            key = id(home.flat_group)
            if key not in flats:
                flats[key] = _weights(model.runtime, home.unit, home.flat_group)
            view = entry_view(home, flats[key])
            value = model.parts.whole(managed, view)
            if not home.unit.resident or value is not view:
                value = value.clone()
                managed.data = value
            model.runtime.guard.held.add(id(managed))
            self._held.append((model, home, managed, value, _checksum(value)))

    def _managed(self) -> list[tuple[ShardedModel, ParameterHome]]:
        """Where those are that an engine has and no block holds: each once, in the order of the engine's units."""
        found = {id(p): where for p in self._params if (where := find(p)) and id(p) not in where[0].runtime.guard.held}
        return sorted(found.values(), key=lambda pair: (pair[0].number, pair[1].place))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        edited, reshaped = self._release_unsettled(keep=kind is None), self._reshaped() if kind is None else []
        for model, home, param, value, checksum in self._held:
            model.runtime.guard.held.discard(id(param))
            name, now = home.name, _value_now(home, param, value)
            if reshaped:
                pass  # nothing is kept
            elif kind is None and self._modifier_rank is not None:
                fresh = now.to(value).contiguous()
                _take_from(model, self._modifier_rank, fresh)
                _store_weight(model, home, model.parts.part(param, fresh))
            elif kind is None and _checksum(now) != checksum:
                edited.append(name)
            param.data = home.flat_group.views[home.entry] if home.unit.resident else home.flat_group.loud[home.entry]
        self._held = []
        if reshaped:
            raise ModelError(
                f"shapes were changed inside GatheredParameters(...): {', '.join(reshaped)}. These parameters are as "
                "before. Remedy: change shapes before initialize()."
            )
        if edited:
            raise ReleasedParameterError(
                f"parameters {edited} were changed inside GatheredParameters(...) without modifier_rank, so the change "
                "would be lost or differ between ranks. Remedy: pass modifier_rank=0 and change them on that rank."
            )

    def _reshaped(self) -> list[str]:
        """What the block has given other shapes; with ``modifier_rank``, on any rank, as its values would be sent."""
        found: list[str] = []
        for model, members in groupby(self._held, lambda held: held[0]):
            changed = [
                f"{home.name!r} from {tuple(value.shape)} to {tuple(now.shape)}"
                for _, home, param, value, _ in members
                if (now := _value_now(home, param, value)).shape != value.shape
            ]
            if self._modifier_rank is not None:
                anywhere = any(map(int, model.comm.stage_gather(torch.tensor([len(changed)]))))
                changed = changed or ["those of other ranks"] * anywhere
            found += changed
        return found

    def _release_unsettled(self, *, keep: bool) -> list[str]:
        """Partition again what an engine does not have yet; returns what was changed without ``modifier_rank``."""
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


def _value_now(home: ParameterHome, param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """``value``, that ``param`` was given for a block, or the tensor that the script has put in its place.

    Layers that ran inside the block have left their own.
    """
    own = (home.flat_group.views[home.entry], *home.flat_group.loud[home.entry : home.entry + 1])
    return value if param.data_ptr() in [tensor.data_ptr() for tensor in own] else param.detach()


def _take_from(model: ShardedModel, rank: int, whole: torch.Tensor) -> None:
    """Let ``whole`` be that of ``rank`` of the world, on all ranks of its pipeline stage, in place."""
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


def _refuse_copies(home: ParameterHome) -> None:
    """Raise ModelError for a parameter that several pipeline stages have: they would get different values."""
    if any(axis != "tensor" for axis in home.flat_group.plan.replication.sums):
        raise ModelError(
            f"{home.name!r} is tied to a parameter of another pipeline stage, which would not change "
            "with it. Remedy: change it before initialize(), or in a checkpoint."
        )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes


def _checksum(value: torch.Tensor) -> tuple[float, float]:
    """Of the bits: packed values may read as NaN, which equals nothing."""
    bits = value.detach().contiguous().reshape(-1).view(_INTEGERS[min(value.element_size(), 4)])
    wide = bits.double()
    weights = torch.arange(1, wide.numel() + 1, dtype=torch.float64, device=wide.device)
    return float(wide.sum()), float(torch.dot(wide, weights))


# -- by parameter ------------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The full fp32 master of ``param``, in its shape; None if no engine optimizes it. All ranks must call it."""
    found = find(param)
    if found is None or found[1].flat_group.master is None:
        return None
    model, home = found
    master = home.flat_group.master
    assert master is not None
    if master.numel() != home.flat_group.layout.numel or model.parts.shards:
        compare_request(model, "safe_get_full_fp32_param", [repr(home.name)])
    part = entry_view(home, gathered(model, home.flat_group, master, home.unit.name)).clone()
    return model.parts.whole(param, part)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the master and the weight of ``param`` to ``value`` (full, the same on all ranks, which must all call it)."""
    model, home = _managed(param)
    _refuse_copies(home)
    _store_weight(model, home, model.parts.part(param, value))


def safe_get_full_optimizer_state(param: torch.Tensor, key: str) -> torch.Tensor | None:
    """The full optimizer state ``key`` (such as "exp_avg") of ``param``, in its shape. All ranks must call it.

    None if no engine optimizes ``param`` or there is no state yet. Raises ModelError if the state has another shape.
    """
    found = find(param)
    if found is None or found[0].optimizer is None or found[1].flat_group.master is None:
        return None
    model, home = found
    compare_request(model, "safe_get_full_optimizer_state", [f"{key!r} of {home.name!r}"])
    flat, known = _owned_state(model, home.flat_group, key)
    if not any(model.comm.control.data_values(known)):
        return None
    part = entry_view(home, gathered(model, home.flat_group, flat, home.unit.name)).clone()
    return model.parts.whole(param, part)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Set the optimizer state ``key`` of ``param`` to ``value`` (full, the same on all ranks)."""
    model, home = _managed(param)
    _refuse_copies(home)
    flat, known = _owned_state(model, home.flat_group, key)
    if not known:
        return
    _store_owned(home.flat_group, home.entry, flat, model.parts.part(param, value))
    assert model.optimizer is not None
    for piece in model.optimizer.pieces:
        if piece.flat_group is home.flat_group:
            state = model.optimizer.optimizer.state[piece.tensor][key]
            state.copy_(flat[piece.low : piece.low + state.numel()].view(state.shape))


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the fp32 master of ``param``, flat and maybe empty: a view. None if no engine optimizes it."""
    found = find(param)
    if found is None or found[1].flat_group.master is None:
        return None
    return owned_part(found[1], found[1].flat_group.master)


def safe_get_local_optimizer_state(param: torch.Tensor, key: str) -> torch.Tensor | None:
    """This rank's part of the optimizer state ``key`` of ``param``, flat and maybe empty: a copy. Nobody waits for it.

    None if no engine optimizes ``param`` or this rank has no state yet. Raises ModelError if the state has another shape.
    """
    found = find(param)
    if found is None or found[0].optimizer is None or found[1].flat_group.master is None:
        return None
    flat, known = _owned_state(found[0], found[1].flat_group, key)
    return owned_part(found[1], flat) if known else None


def owned_part(home: ParameterHome, owned: torch.Tensor) -> torch.Tensor:
    """What ``owned`` [owned] of a flat group has of the parameter at ``home``: flat, a view, maybe empty."""
    for run in home.flat_group.plan.owned_runs():
        if run.entry == home.entry:
            return owned[run.offset : run.offset + run.numel]
    return owned[:0]


def _owned_state(model: ShardedModel, flat_group: FlatGroup, key: str) -> tuple[torch.Tensor, bool]:
    """(state ``key`` of what this rank owns of ``flat_group`` [owned], whether there is any)."""
    assert model.optimizer is not None
    assert flat_group.master is not None
    flat = torch.zeros_like(flat_group.master, dtype=torch.float32)
    known = False
    for piece in model.optimizer.pieces:
        state = model.optimizer.optimizer.state.get(piece.tensor, {}).get(key) if piece.flat_group is flat_group else None
        if state is None:
            continue
        if state.shape != piece.tensor.shape:
            raise ModelError(f"optimizer state {key!r} has shape {tuple(state.shape)}, not that of its parameter.")
        flat[piece.low : piece.low + state.numel()].view(state.shape).copy_(state)  # which may be a wrapper
        known = True
    return flat, known


def _managed(param: torch.Tensor) -> tuple[ShardedModel, ParameterHome]:
    found = find(param)
    if found is None:
        raise ModelError(f"a tensor of shape {tuple(param.shape)} is not a parameter of any zerorun engine.")
    return found
