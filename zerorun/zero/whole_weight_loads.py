"""Loading a full state dict into a sharded model: each rank takes its own shards of the values, one parameter at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from ..distributed.agreement import agree, first_other
from ..distributed.same_data import checksum
from ..errors import CheckpointError, ZerorunError
from ..log import listed
from ..plan.parameter_kinds import inside
from .load_hooks import run_hooks_after, tell_of_hooks, without_hooks_after
from .placeholders import UnsavedPlaceholder
from .sharded_model import ShardedModel
from .value_access import part_of_value, refuse_other_shape, store_weight


@dataclass(frozen=True)
class _Plan:
    """What a rank is to do."""

    members: list[tuple[torch.Tensor, torch.Tensor]]  # what units have, and this rank's part of what it gets
    rest: dict[str, Any]  # buffers and extra state, by name; they may be others on each rank, as statistics are
    sums: dict[str, int | None]  # checksums of values for parameters


def load_full_state_dict(model: ShardedModel, weights: Mapping[str, Any], *, strict: bool) -> _IncompatibleKeys:
    """Let the module have ``weights``, as ``full_state_dict`` returns them. All ranks must give it the same.

    Returns names that only the model has, and those that only ``weights`` has; a tied one that is there is no missing one.

    Masters have the digits of values that are wider than the weights; elsewhere they keep those that weights lack, where a
    weight stays the same. Raises CheckpointError for names of another model, and for weights that were quantised with other
    scales or are seen to be others on some ranks, and ModelError for values of another shape, on all ranks alike. Nothing
    is changed then.
    """
    own = model.runtime.guard.own_state_dict(model.module)
    gather = model.comm.control.values
    agree(lambda: _refuse_other_kinds(weights), gather)
    differing = _differing_names(own, weights, gather)

    def plan_alone() -> _Plan:
        with _told("Nothing was loaded."):
            return _planned(model, own, weights, differing, strict=strict)

    plan = agree(plan_alone, gather)
    _refuse_other_values(plan.sums, gather)
    model.make_ready()
    what = "some weights" if differing.missing_keys else "weights"  # what ranks may have edited otherwise stays so
    with model.half_loaded.loading("a state dict", what):
        for tensor, value in plan.members:
            wider = value.is_floating_point() and value.dtype.itemsize > tensor.dtype.itemsize
            store_weight(model, model.homes[id(tensor)], value.to(model.comm.device), exactly=wider)
            for block in model.blocks:
                block.show_new(model, tensor)
        agree(lambda: _load_rest(model, plan.rest), gather)
    return differing


def _load_rest(model: ShardedModel, rest: dict[str, Any]) -> None:
    tell_of_hooks(model.module, "load_state_dict()")
    with _told("Weights are loaded, and what is beside them by half."):
        with without_hooks_after(model.module):
            torch.nn.Module.load_state_dict(model.module, rest, strict=False)
        run_hooks_after(model.module, "load_state_dict()", model)


@contextmanager
def _told(after: str) -> Iterator[None]:
    """Raise CheckpointError for an error of the script's code in the block, so that all ranks are told of it."""
    try:
        yield
    except ZerorunError:
        raise
    except Exception as error:
        raise CheckpointError(f"load_state_dict(): {type(error).__name__}: {error}. {after}") from error


def _refuse_other_kinds(weights: object) -> None:
    """Raise CheckpointError for what is no dict, such as the None that ranks have where one alone has read a file."""
    if not isinstance(weights, Mapping):
        raise CheckpointError(
            f"load_state_dict(): the weights are {type(weights).__name__}, and no dict. Nothing was loaded. Remedy: give "
            "all ranks the same weights, reading the file on each."
        )


def _planned(
    model: ShardedModel, own: Mapping[str, Any], weights: Mapping[str, Any], differing: _IncompatibleKeys, *, strict: bool
) -> _Plan:
    if strict:
        _refuse_other_names(differing)
    buffers = dict(model.module.named_buffers(remove_duplicate=False))
    plan = _Plan([], {}, {})
    for name in (name for name in own if name in weights):
        value = weights[name]  # once: it may be read from a file
        members = list(_members(model, name, own[name], value))
        if members:
            plan.members.extend(members)
            plan.sums[name] = checksum([inner for _, inner in inside(value)])
        elif name in buffers or name.endswith(_EXTRA_STATE_KEY_SUFFIX):
            if name in buffers:
                refuse_other_shape(name, buffers[name].shape, value, "load_state_dict")
            plan.rest[name] = value
        else:
            _refuse_other_scales(name, own[name], value)
    return plan


def _members(model: ShardedModel, name: str, own: Any, given: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (what units have of the entry ``own``, this rank's part of what it gets): itself, or tensors packed in it."""
    if isinstance(given, UnsavedPlaceholder):
        raise CheckpointError(
            f"load_state_dict(): the value for {name!r} is a placeholder, as module.state_dict() has at stage 3. Nothing "
            "was loaded. Remedy: give what engine.state_dict() returned."
        )
    tensors = dict(inside(own)) if isinstance(own, torch.Tensor) else {}
    values = dict(inside(given)) if isinstance(given, torch.Tensor) else {}
    for path, tensor in tensors.items():
        if id(tensor) in model.homes:
            value = values.get(path, given)
            yield tensor, part_of_value(model, model.homes[id(tensor)], value, "load_state_dict")


def _refuse_other_values(sums: Mapping[str, int | None], gather: Callable[[Any], list[Any]]) -> None:
    """Raise CheckpointError, on all ranks alike, if ranks give other values for a parameter: each would keep its own part.

    ``sums``: by the name of each parameter.
    """
    found = gather((checksum(list(sums)), checksum(list(sums.values()))))
    first = {of_names: rank for rank, (of_names, _) in reversed(list(enumerate(found)))}  # stages have their own names
    other = next((rank for rank, (of_names, values) in enumerate(found) if values != found[first[of_names]][1]), 0)
    one = first[found[other][0]]
    if other:
        told = gather(sums)
        name = next(name for name, value in told[other].items() if value != told[one].get(name))
        raise CheckpointError(
            f"load_state_dict(): ranks {one} and {other} give other values for {name!r}. Nothing was loaded. Remedy: give "
            "all ranks the same weights, reading the file on each."
        )


def _refuse_other_scales(name: str, own: Any, given: Any) -> None:
    """Raise CheckpointError unless ``given`` is what there is: it belongs to a weight that has been quantised before."""
    if isinstance(own, torch.Tensor) and isinstance(given, torch.Tensor):
        if own.shape == given.shape and torch.equal(own.cpu(), given.cpu()):
            return
    elif own == given:
        return
    raise CheckpointError(
        f"load_state_dict(): {name!r}, by which a weight was quantised, has another value in the model. Nothing was "
        "loaded. Remedy: load quantised weights before initialize()."
    )


def _differing_names(
    own: Mapping[str, Any], weights: Mapping[str, Any], gather: Callable[[Any], list[Any]]
) -> _IncompatibleKeys:
    """Of all ranks: a pipeline stage knows its own names. A tied one is there by its other name.

    Raises CheckpointError, on all ranks alike, if they give different names: some would keep what others replace.
    """
    given = {id(value) for name, value in own.items() if name in weights and isinstance(value, torch.Tensor)}
    missing = [name for name, value in own.items() if name not in weights and id(value) not in given]
    found = gather((list(own), missing, hashlib.sha256("\n".join(sorted(weights)).encode()).hexdigest()))
    other = first_other([names for _, _, names in found])
    if other is not None:
        raise CheckpointError(
            f"load_state_dict(): rank {other} gives other names than rank 0. Nothing was loaded. Remedy: give all ranks "
            "the same weights, reading the file on each."
        )
    known = {name for names, _, _ in found for name in names}
    return _IncompatibleKeys(sorted({name for _, names, _ in found for name in names}), sorted(weights.keys() - known))


def _refuse_other_names(differing: _IncompatibleKeys) -> None:
    """Raise CheckpointError if there are any."""
    missing, unexpected = differing
    found = [f"lacks {listed(list(map(repr, missing)))}"] if missing else []
    found += [f"has {listed(list(map(repr, unexpected)))} besides"] if unexpected else []
    if found:
        raise CheckpointError(
            f"load_state_dict(): the state dict {' and '.join(found)}. Nothing was loaded. Remedy: give what "
            "engine.state_dict() of this model returned, or strict=False for the names that both have."
        )
