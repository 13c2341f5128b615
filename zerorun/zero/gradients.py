"""Gradients between the last backward of a step and step(): whole ones, this rank's parts, and norms by parameter.

All are averaged, unscaled and not clipped, in fp32, and None, empty or left out where there are none. All ranks must call
these functions: gradients may have come late on another rank, and the weights of losses are summed over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from ..distributed.same_data import fingerprint
from ..distributed.transport.sums import square_sum
from ..errors import ModelError, OrderError, RankLeftError
from .flat_group import TrainedGroup
from .gathers import IN_TIME, ORDER_TIMEOUT_S
from .offloaded_states import GRADIENTS
from .optimizer_pieces import owned_gradient
from .sharded_model import ParameterHome, ShardedModel, find, model_of
from .unit import Unit
from .value_access import compare_request, entry_view, gathered, owned_part


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The full gradient of ``param``, in its shape; None if no engine optimizes it. One all-gather of its unit."""
    found = _reduced(param, "safe_get_full_grad")
    if found is None:
        return None
    model, home, flat_group = found
    return whole_gradient(model, home, gathered_gradients(model, home.unit, flat_group), model.gradient_factor())


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of the gradient of ``param``, flat and maybe empty; None if no engine optimizes it.

    The parts of the ranks of a shard group are the gradient, end to end; at stage 0 every rank has all of it.
    """
    found = _reduced(param, "safe_get_local_grad")
    if found is None:
        return None
    model, home, flat_group = found
    return owned_part(home, _summed(model, flat_group)) * model.gradient_factor()


def full_gradients(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full gradient) of every trained parameter, for all ranks to go through to the end. One all-gather per unit.

    Raises ModelError if no engine manages ``module``.
    """
    model = _managed(module)
    reduce_all(model, "full_gradients")
    factor = model.gradient_factor()  # once: ranks may have to add up the weights of their losses for it
    for unit in model.units:
        for flat_group in unit.trainable:
            if flat_group.reduced:
                flat = gathered_gradients(model, unit, flat_group)
                for entry, name in enumerate(flat_group.names):
                    yield name, whole_gradient(model, ParameterHome(unit, flat_group, entry), flat, factor)


def not_finite(units: list[Unit]) -> list[str]:
    """Names of the parameters whose reduced gradient is NaN or infinite in this rank's part. Waits for the device."""
    found: dict[str, None] = {}
    for flat_group in (flat_group for unit in units for flat_group in unit.trainable):
        gradient = owned_gradient(flat_group)
        if not bool(torch.isfinite(gradient).all()):
            for run in flat_group.plan.owned_runs():
                if not bool(torch.isfinite(gradient[run.offset : run.offset + run.numel]).all()):
                    found[flat_group.names[run.entry]] = None
    return list(found)


def gradient_norms(module: nn.Module) -> dict[str, float]:
    """The 2-norm of the gradient of every trained parameter, by name. Nothing is gathered: ranks add sums of squares.

    Raises ModelError if no engine manages ``module``.
    """
    model = _managed(module)
    reduce_all(model, "gradient_norms")
    comm = model.comm
    flat_groups = [flat_group for unit in model.units for flat_group in unit.trainable if flat_group.reduced]
    own = {n: v for group in flat_groups for n, v in zip(group.names, _square_sums(model, group), strict=True)}
    names = sorted(own)  # tensor ranks may have them in other flat groups
    squares = [own[name] for name in names]
    total = comm.control.data_sum(torch.stack(squares).cpu() if squares else torch.zeros(0, dtype=torch.float64))
    if comm.topology.tensor > 1:
        comm.sum_over_axis([total], "tensor")
    factor, totals = abs(model.gradient_factor()), dict(zip(names, total.tolist(), strict=True))
    return {name: math.sqrt(totals[name]) * factor for name in own}


def _square_sums(model: ShardedModel, flat_group: TrainedGroup) -> list[torch.Tensor]:
    """By parameter, of the elements that this rank is to count: fp64 scalars."""
    gradient = _summed(model, flat_group)
    sums = [torch.zeros((), dtype=torch.float64, device=gradient.device)] * len(flat_group.names)
    if flat_group.plan.counted and not (flat_group.plan.owns_everything and flat_group.plan.shard_rank):
        for run in flat_group.plan.owned_runs():
            sums[run.entry] = square_sum(gradient[run.offset : run.offset + run.numel])
    return sums


def _summed(model: ShardedModel, flat_group: TrainedGroup) -> torch.Tensor:
    """What this rank owns of the gradient [owned], to read only; summed over the other axes where ranks have summands."""
    owned = owned_gradient(flat_group)
    if flat_group.plan.replication.sums:
        owned = owned.clone()
    for axis in flat_group.plan.replication.sums:
        model.comm.sum_over_axis([owned], axis)
    return owned


def gathered_gradients(model: ShardedModel, unit: Unit, flat_group: TrainedGroup) -> torch.Tensor:
    """The gradients of a flat group, scaled as the losses were: [numel], to read only."""
    return gathered(model, flat_group, _summed(model, flat_group), unit.name)


def whole_gradient(model: ShardedModel, home: ParameterHome, flat: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor`` times the gradient of the parameter at ``home``, of what ``_gathered`` gives for its flat group."""
    return model.parts.whole(home.flat_group.params[home.entry], entry_view(home, flat) * factor)


def _managed(module: nn.Module) -> ShardedModel:
    model = model_of(module)
    if model is None:
        raise ModelError("the module is not managed by any zerorun engine. Remedy: give it to zerorun.initialize() first.")
    return model


def _reduced(param: torch.Tensor, function: str) -> tuple[ShardedModel, ParameterHome, TrainedGroup] | None:
    """Where ``param`` is, with its reduced gradient there; None if it has none."""
    found = find(param)
    if found is None or not isinstance(found[1].flat_group, TrainedGroup):
        return None
    reduce_all(found[0], function, repr(found[1].name))
    return (*found, found[1].flat_group) if found[1].flat_group.reduced else None


def reduce_all(model: ShardedModel, function: str, *wanted: str) -> None:
    """Let all gradients be reduced, and where the optimizer is. Raises OrderError if other ranks do not ask for it.

    Those that wait for the last backward of the step (stages 0 and 1) are reduced now, so that all stages answer alike.
    """
    asked = torch.cat([torch.tensor([len(model.runtime.reducer.late)]), fingerprint([function, *wanted])])
    try:
        answers = model.comm.control.data_gather(asked, ORDER_TIMEOUT_S, function)
    except RankLeftError:
        raise
    except OrderError as error:
        raise OrderError(
            f"gradients were asked for on rank {model.comm.topology.rank}, and not on all other ranks "
            f"{IN_TIME}. Remedy: call the functions of zerorun.zero on all ranks, and use the result on one."
        ) from error
    if len({int(theirs) for _, theirs in answers}) > 1:
        compare_request(model, function, wanted)
    model.bring_back(*GRADIENTS)
    model.runtime.reducer.reduce_accumulated()
    if any(int(late) for late, _ in answers):
        model.reduce_late()
    model.finish_reductions()
