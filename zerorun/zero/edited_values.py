"""Edits: gradients, and this rank's parts of masters and moments, that a training loop replaces between steps.

[Note: an edited gradient]
What the functions take and give is averaged, unscaled and not clipped, as ``safe_get_full_grad`` returns it. What a rank
keeps is the sum over ranks and micro-batches, with the loss scale in it. So a value is divided by the factor between the
two and written to where the update and the norm read: the reduced gradients of this rank's part. The norm, clipping and the
search for overflows come later, in step(), and see the new values. A parameter that had no gradient on any rank has one
from then on, so that the optimizer does not pass over it.

Where several tensor-parallel ranks hold a whole parameter and a summand of its gradient each, the first one keeps the value
and the others keep zeros, because step() adds the summands up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

import torch

from ..distributed.agreement import agree
from ..errors import ModelError, StepError
from .flat_group import TrainedGroup
from .gradients import gathered_gradients, reduce_all, whole_gradient
from .optimizer_pieces import owned_gradient
from .runtime import weights_edited
from .sharded_model import ParameterHome, ShardedModel
from .value_access import (
    compare_request,
    entry_view,
    gathered,
    keep_owned,
    no_state,
    owned_part,
    owned_state,
    part_of_value,
    store_owned,
    trained,
    write_state,
)

UpdateFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# -- gradients ---------------------------------------------------------------------------------------------------


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the gradient of ``param`` by ``value``, in its full shape. All ranks must call it with the same value.

    ``value`` counts as ``safe_get_full_grad`` returns it: averaged over ranks and micro-batches, without a loss scale,
    before clipping. Call it after the last backward of a step: gradients of a later one are added. Raises ModelError if no
    engine trains ``param``, if several pipeline stages have it, or if the shape is another, and StepError if there is no
    gradient.
    """
    model, home, flat_group = trained(param, "safe_set_full_grad")
    part = agree(lambda: part_of_value(model, home, value, "safe_set_full_grad"), model.comm.control.data_values)
    _reduce(model, "safe_set_full_grad", repr(home.name))
    _refuse_none(flat_group, home, "safe_set_full_grad")
    _store_gradient(model, home, flat_group, part, model.gradient_factor())


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's part of the gradient of ``param`` by ``value``: flat, as long as ``safe_get_local_grad`` says.

    All ranks must call it, each with its own part, which may be empty. See ``safe_set_full_grad`` for what a value is, and
    for what is raised.
    """
    model, home, flat_group = trained(param, "safe_set_local_grad")
    place = owned_part(home, owned_gradient(flat_group))
    flat = agree(lambda: _local(home, place, value, "safe_set_local_grad"), model.comm.control.data_values)
    _reduce(model, "safe_set_local_grad", repr(home.name))
    _refuse_none(flat_group, home, "safe_set_local_grad")
    place.copy_(_summand(model, flat_group, flat.to(place) / model.gradient_factor()))
    flat_group.gradient_replaced(home.entry)


def safe_update_full_grad_vectorized(param_list: Iterable[torch.Tensor], update_func: UpdateFunction) -> None:
    """Replace the gradient of each of ``param_list`` by ``update_func(full gradient, parameter)``.

    One all-gather for a unit. All ranks must call it with the same parameters, and ``update_func`` must return the same on
    all of them. Parameters that require no gradient are passed over, and each is updated once. Raises what
    ``safe_set_full_grad`` raises, and StepError, on all ranks alike, where ``update_func`` fails on one: some gradients may
    be replaced then.
    """
    function = "safe_update_full_grad_vectorized"
    found = {id(param): trained(param, function) for param in param_list if param.requires_grad}
    ordered = sorted(found.values(), key=lambda place: (place[0].number, place[1].place))
    for model, of_model in groupby(ordered, lambda place: place[0]):
        members = list(of_model)
        _reduce(model, function, *(repr(home.name) for _, home, _ in members))
        for _, home, flat_group in members:
            _refuse_none(flat_group, home, function)
        factor = model.gradient_factor()
        for _, of_group in groupby(members, lambda place: id(place[2])):
            _update_group(model, [(home, flat_group) for _, home, flat_group in of_group], update_func, factor)


def _update_group(
    model: ShardedModel, members: list[tuple[ParameterHome, TrainedGroup]], update_func: UpdateFunction, factor: float
) -> None:
    """Update the gradients of some parameters of one flat group, which is gathered once."""
    first, flat_group = members[0]
    function = "safe_update_full_grad_vectorized"
    flat = gathered_gradients(model, first.unit, flat_group).clone()  # at stage 0 it is what is written to

    def update() -> None:
        for home, _ in members:
            gradient, param = whole_gradient(model, home, flat, factor), flat_group.params[home.entry]
            try:
                value = update_func(gradient, param)
            except Exception as error:  # other ranks must not go on to the next collective without this one
                raise StepError(
                    f"{function}(...): update_func failed for {home.name!r} with {type(error).__name__}: {error}. Some "
                    "gradients are replaced. Remedy: mend it, call engine.zero_grad(), and run the micro-batches again."
                ) from error
            _store_gradient(model, home, flat_group, part_of_value(model, home, value, function), factor)

    agree(update, model.comm.control.data_values)


def _store_gradient(
    model: ShardedModel, home: ParameterHome, flat_group: TrainedGroup, part: torch.Tensor, factor: float
) -> None:
    """Write what this rank owns of ``part``, a gradient in the shape that the parameter has here."""
    place = owned_gradient(flat_group)
    store_owned(flat_group, home.entry, place, _summand(model, flat_group, part.to(place) / factor))
    flat_group.gradient_replaced(home.entry)


def _reduce(model: ShardedModel, function: str, *wanted: str) -> None:
    """Let all gradients be reduced, and return when other ranks have read what this one is about to write to."""
    reduce_all(model, function, *wanted)
    model.comm.fence()


def _summand(model: ShardedModel, flat_group: TrainedGroup, value: torch.Tensor) -> torch.Tensor:
    """``value``, or zeros on the ranks whose gradients are to be added to it: see [Note: an edited gradient]."""
    first = not flat_group.plan.replication.sums or model.comm.topology.tensor_rank == 0
    return value if first else torch.zeros_like(value)


def _refuse_none(flat_group: TrainedGroup, home: ParameterHome, function: str) -> None:
    if not flat_group.reduced:
        raise StepError(
            f"{function}(...): {home.name!r} has no gradient yet, because no backward came since the last step(). Remedy: "
            "call it between backward() and step()."
        )


# -- this rank's part --------------------------------------------------------------------------------------------


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's part of the master and the weight of ``param`` by ``value``, flat and maybe empty.

    All ranks must call it, each with its own part: the weights are gathered anew where they are whole. The parts are those
    of ``safe_get_local_fp32_param``. Raises ModelError if no engine optimizes ``param``, if several pipeline stages have
    it, or if the number of elements is another.
    """
    function = "safe_set_local_fp32_param"
    model, home, flat_group = trained(param, function)
    own = owned_part(home, flat_group.master)
    flat = agree(lambda: _local(home, own, value, function), model.comm.control.data_values)
    compare_request(model, function, [repr(home.name)])
    model.comm.fence()  # others may still read the old values
    exact = flat_group.exact
    owned_part(home, exact).copy_(flat)
    keep_owned(home, flat_group, exact)
    if not flat_group.plan.master_is_weight:
        owned_part(home, flat_group.weight).copy_(owned_part(home, flat_group.master))
    home.unit.let_go_of_others()
    weights_edited(model.runtime, home.unit)
    if home.unit.resident and not flat_group.plan.owns_everything:
        whole = gathered(model, flat_group, flat_group.weight, home.unit.name)
        entry_view(home, flat_group.full).copy_(entry_view(home, whole))  # others may have edits of this rank, in a block
    model.comm.fence()
    for block in model.blocks:
        block.show_new(model, param)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, key: str) -> None:
    """Replace this rank's part of the optimizer state ``key`` of ``param`` by ``value``, flat and maybe empty.

    No rank waits for another. Raises ModelError as ``safe_set_local_fp32_param`` does, and StepError if ``param`` has no
    such state, because no step has updated it yet or because the optimizer has none of this name for it.
    """
    function = "safe_set_local_optimizer_state"
    model, home, flat_group = trained(param, function)
    flat = _local(home, owned_part(home, flat_group.master), value, function)
    owned, known = owned_state(model, home, key)
    if not known:
        if not flat.numel():
            return
        raise no_state(home, key, function)
    owned_part(home, owned).copy_(flat)
    write_state(model, home, key, owned)


# -- values ------------------------------------------------------------------------------------------------------


def _local(home: ParameterHome, place: torch.Tensor, value: torch.Tensor, function: str) -> torch.Tensor:
    """``value``, flat, where ``place`` is this rank's part."""
    if not isinstance(value, torch.Tensor) or value.numel() != place.numel():
        given = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ModelError(
            f"{function}(...): the value for {home.name!r} has {given}, and this rank's part has {place.numel()}. Remedy: "
            f"give a tensor like the one that {function.replace('_set_', '_get_')}(...) returns here."
        )
    return value.detach().reshape(-1)
