"""Access to the values of a sharded model: state dicts, whole weights, and masters and moments by parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..distributed.agreement import agree
from ..distributed.same_data import compare
from ..errors import ModelError, OrderError, StepError
from ..ops.state_format import keep_state, wide_state
from ..optim.parameter_parts import PartsOptimizer
from ..plan.parameter_kinds import follow_memory, followers, rebuilt
from .flat_group import FlatGroup, TrainedGroup, fresh_gradient, rounded, set_gradient, take_weight
from .offloaded_states import MASTERS, MOMENTS, WEIGHTS, StateKind
from .optimizer_pieces import OptimizerPiece
from .runtime import MADE_BY, Runtime, weights_edited
from .sharded_model import ParameterHome, ShardedModel, find, model_of, without_edits
from .unit import Unit, finish_updates


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


def flat_weights(runtime: Runtime, unit: Unit, flat_group: FlatGroup) -> torch.Tensor:
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
    weights = flat_weights(model.runtime, unit, flat_group)
    if not isinstance(flat_group, TrainedGroup) or not flat_group.has_more_than_weights:
        return weights
    finish_updates([unit])  # a disk may still be writing them
    model.bring_back(MASTERS)
    full = gathered(model, flat_group, flat_group.exact, unit.name)
    return torch.where(rounded(flat_group.plan, full) == weights, full, weights)


def full_state_dict(model: ShardedModel, *, keep: bool = True, exact: bool = False) -> dict[str, torch.Tensor]:
    """Return the module's state dict with full CPU tensors, made one unit at a time. Collective at stage 3.

    What is no tensor, as the extra state of a module may be, stays as it is. Without ``keep`` this rank only takes part,
    and gets {}. ``exact``: weights are those of their fp32 masters. It is collective at each stage above 0. Raises
    ModelError if a script has given a parameter another tensor.
    """
    model.runtime.guard.refuse_replaced()
    with without_edits(model):
        return _full_state_dict(model, keep, exact)


def _full_state_dict(model: ShardedModel, keep: bool, exact: bool) -> dict[str, torch.Tensor]:
    values: dict[int, torch.Tensor] = {}
    for unit in model.units:
        for flat_group in unit.flat_groups:
            flat = _exact(model, unit, flat_group) if exact else flat_weights(model.runtime, unit, flat_group)
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
            finish_updates([home.unit])  # as in _exact
            self._model.bring_back(MASTERS, WEIGHTS)
            self._flats[key] = gathered(self._model, flat_group, flat_group.exact, home.unit.name)
        elif key not in self._flats:
            self._flats[key] = flat_weights(self._model.runtime, home.unit, flat_group)
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
    runtime.guard.take_in_replaced(runtime.units)
    for block in model.blocks:
        block.note_edits(model)
    for unit in model.units:
        for flat_group in unit.flat_groups:
            flat = _exact(model, unit, flat_group) if exact else flat_weights(runtime, unit, flat_group)
            for entry, param in zip(flat_group.layout.entries, flat_group.params, strict=True):
                dtype = flat_group.plan.given_dtype if as_given else flat.dtype
                param.data = flat[entry.offset : entry.end].view(entry.shape).to(dtype, copy=True)
                if fresh_gradient(param) is not None:
                    set_gradient(param, None)
    for layer in followers(model.module):
        follow_memory(layer)
    runtime.comm.fence()
    runtime.comm.control.barrier()  # other ranks may still be checking whether this one has settled
    runtime.remove_hooks()
    model.forget()


def find_released_use(loss: torch.Tensor, runtime: Runtime) -> tuple[str, str] | None:
    """Return (parameter, unit) of a parameter in the graph of ``loss`` that was read outside its unit's forward, or None.

    There, the parameter was a placeholder. The nodes of a backward that built a graph do not tell where they read one: once
    there was such a backward, the answer is None.
    """
    homes = {
        id(param): (name, unit)
        for unit in runtime.units
        if not unit.resident and not runtime.gradient_hooks.differentiates
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


def store_weight(model: ShardedModel, home: ParameterHome, value: torch.Tensor, *, exactly: bool) -> None:
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
        weights_edited(model.runtime, home.unit)


def keep_owned(home: ParameterHome, flat_group: TrainedGroup, values: torch.Tensor) -> None:
    """Let the master at ``home`` have what ``values`` [owned] have for it; they may be ``exact`` itself."""
    run = flat_group.plan.owned_run(home.entry)
    if run is not None:
        flat_group.keep_exact(values[run.offset : run.offset + run.numel], run.offset)


def refuse_copies(home: ParameterHome) -> None:
    """Raise ModelError for a parameter that several pipeline stages have: its copies would get different values."""
    if any(axis != "tensor" for axis in home.flat_group.plan.replication.sums):
        raise ModelError(
            f"{home.name!r} is tied to a parameter of another pipeline stage, which would not change "
            "with it. Remedy: change it before initialize(), or in a checkpoint."
        )


# -- by parameter ------------------------------------------------------------------------------------------------

_NO_STATE, _HAS_STATE, _OTHER_SHAPE = range(3)  # what ranks tell each other of a state; the most counts


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
    part = agree(lambda: part_of_value(model, home, value, "safe_set_full_fp32_param"), model.comm.control.data_values)
    store_weight(model, home, part, exactly=True)
    for block in model.blocks:
        block.show_new(model, param)


def safe_get_full_optimizer_state(param: torch.Tensor, key: str) -> torch.Tensor | None:
    """Return the full optimizer state ``key`` (such as "exp_avg") of ``param``, in its shape. All ranks must call it.

    None if no engine optimizes ``param`` or if it has no such state, as before the first step that updates it. Raises
    ModelError if the state has another shape.
    """
    found = find(param, MOMENTS, MASTERS)
    if found is None or found[0].optimizer is None or found[1].flat_group.master is None:
        return None
    model, home = found
    compare_request(model, "safe_get_full_optimizer_state", [f"{key!r} of {home.name!r}"])
    flat = _agreed_state(model, home, key)
    if flat is None:
        return None
    part = entry_view(home, gathered(model, home.flat_group, flat, home.unit.name)).clone()
    return model.parts.whole(param, part)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Set the optimizer state ``key`` of ``param`` to ``value``. All ranks must call it with the same full value.

    Raises ModelError as ``safe_set_full_fp32_param`` does and if no engine optimizes ``param``, and StepError if it has no
    such state, because no step has updated it yet or because the optimizer has none of this name for it. Nothing is changed
    then.
    """
    function = "safe_set_full_optimizer_state"
    model, home, flat_group = trained(param, function)
    part = agree(lambda: part_of_value(model, home, value, function), model.comm.control.data_values)
    compare_request(model, function, [f"{key!r} of {home.name!r}"])
    flat = _agreed_state(model, home, key)
    if flat is None:
        raise no_state(home, key, function)
    store_owned(flat_group, home.entry, flat, part)
    write_state(model, home, key, flat)


def no_state(home: ParameterHome, key: str, function: str) -> StepError:
    """The error of a ``function`` that is to set a state ``key`` that the parameter at ``home`` does not have."""
    return StepError(
        f"{function}(...): the optimizer has no state {key!r} of {home.name!r}. Remedy: call it after the first step() "
        "that updates the parameter, with a name that the optimizer uses for it, such as AdamW's 'exp_avg'."
    )


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

    It does not wait for other ranks. None if no engine optimizes ``param`` or if it has no such state here; a rank that has
    nothing of it goes by others of its unit and parameter group. Raises ModelError if the state has another shape.
    """
    found = find(param, MOMENTS, MASTERS)
    if found is None or found[0].optimizer is None or found[1].flat_group.master is None:
        return None
    model, home = found
    flat, known = owned_state(model, home, key)
    if home.flat_group.plan.owned_run(home.entry) is None:
        known = bool(_near_pieces_with(model, home, key))
    return owned_part(home, flat) if known else None


def owned_part(home: ParameterHome, owned: torch.Tensor) -> torch.Tensor:
    """Return a view of the part of ``owned`` [owned] that belongs to the parameter at ``home``, flat and maybe empty."""
    run = home.flat_group.plan.owned_run(home.entry)
    return owned[:0] if run is None else owned[run.offset : run.offset + run.numel]


def owned_state(model: ShardedModel, home: ParameterHome, key: str) -> tuple[torch.Tensor, bool]:
    """Return (state ``key`` of what this rank owns of the parameter at ``home``, whether it has such a state here).

    The first is [owned] of the flat group, with zeros for others. Raises ModelError if the state has another shape.
    """
    assert model.optimizer is not None
    assert home.flat_group.master is not None
    if isinstance(model.optimizer.optimizer, PartsOptimizer) and key in model.optimizer.optimizer.factors:
        raise ModelError(f"optimizer state {key!r} has not the shape of its parameter, but rows or columns of it.")
    flat = torch.zeros_like(home.flat_group.master, dtype=torch.float32)
    known = False
    for piece in _near_pieces_with(model, home, key):
        if any(run.entry == home.entry for run in piece.runs):
            state = wide_state(model.optimizer.optimizer.state[piece.tensor], key)
            if state.shape != piece.tensor.shape:
                raise _other_shape(home, key, f", but {list(state.shape)}")
            flat[piece.low : piece.low + state.numel()].view(state.shape).copy_(state)  # the state may be a wrapper
            known = True
    return flat, known


def _near_pieces_with(model: ShardedModel, home: ParameterHome, key: str) -> list[OptimizerPiece]:
    """The pieces of the flat group and the parameter group of ``home`` that have a state ``key`` on this rank."""
    assert model.optimizer is not None
    states, group = model.optimizer.optimizer.state, home.flat_group.plan.optimizer_groups[home.entry]
    near = [p for p in model.optimizer.pieces if p.flat_group is home.flat_group and p.group == group]
    return [piece for piece in near if states.get(piece.tensor, {}).get(key) is not None]


def _agreed_state(model: ShardedModel, home: ParameterHome, key: str) -> torch.Tensor | None:
    """Return ``owned_state`` if the parameter at ``home`` has such a state on any rank, and None otherwise. Collective.

    Raises ModelError on all ranks if the state has another shape on any.
    """
    try:
        (flat, known), problem = owned_state(model, home, key), None
    except ModelError as error:
        flat, known, problem = torch.empty(0), False, error
    if 0 in _whole_shape(model, home):  # no rank has anything of it
        known = bool(_near_pieces_with(model, home, key))
    answer = _OTHER_SHAPE if problem is not None else _HAS_STATE if known else _NO_STATE
    most = max(int(told) for told in model.comm.stage_gather(torch.tensor([answer])))
    if most == _OTHER_SHAPE:
        raise problem or _other_shape(home, key, " on another rank")
    return flat if most == _HAS_STATE else None


def _other_shape(home: ParameterHome, key: str, how: str) -> ModelError:
    return ModelError(
        f"optimizer state {key!r} of {home.name!r} has not the shape of its parameter{how}. Remedy: read it from "
        "engine.optimizer.state, on the rank that updates the parameter."
    )


def _whole_shape(model: ShardedModel, home: ParameterHome) -> tuple[int, ...]:
    """The shape of the whole parameter, of which this rank may have a tensor-parallel part."""
    shard = model.parts.shards.get(id(home.flat_group.params[home.entry]))
    return tuple(home.flat_group.layout.entries[home.entry].shape if shard is None else shard.shape)


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
    refuse_other_shape(home.name, _whole_shape(model, home), value, function)
    return model.parts.part(home.flat_group.params[home.entry], value.detach())


def refuse_other_shape(name: str, whole: Sequence[int], value: object, function: str) -> None:
    """Raise ModelError, which names ``function``, unless ``value`` is a tensor of the shape ``whole``."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(whole):
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(
            f"{function}(...): the value for {name!r} is {given}, and not a tensor of shape {tuple(whole)}. Remedy: "
            "give the whole value, in its shape, on every rank."
        )


def trained(param: torch.Tensor, function: str) -> tuple[ShardedModel, ParameterHome, TrainedGroup]:
    """``managed``, with its flat group. Raises ModelError if it is frozen, or if several pipeline stages have it."""
    model, home = managed(param, function)
    if not isinstance(home.flat_group, TrainedGroup):
        raise ModelError(
            f"{function}(...): {home.name!r} is frozen, or in no parameter group of the optimizer: it has no gradient "
            "and no state. Remedy: let it require a gradient, and give it to the optimizer, before initialize()."
        )
    refuse_copies(home)
    return model, home, home.flat_group
