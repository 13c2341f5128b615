"""A module that engines have which nobody has any more is given back where it is needed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from ..distributed.transport.world import gather_values
from ..errors import ModelError
from ..zero.sharded_model import ShardedModel, models_in

T = TypeVar("T")


def taking_over(module: nn.Module, make: Callable[[], T], *, untrained: bool = False) -> T:
    """Return what ``make`` does with ``module``, which engines that nobody has any more give back if it is refused.

    ``make`` raises a ModelError on all ranks alike. ``untrained``: an engine without an optimizer gives it back, too, if
    ``module`` is its whole model. Somebody may have that engine: it goes on as a call of the module.
    """
    try:
        return make()
    except ModelError:
        if not _given_back(module, untrained=untrained):
            if isinstance(module, nn.Module):  # else that is what was refused
                _refuse_dropped_pipeline(module)
            raise
    return make()


def _given_back(module: nn.Module, *, untrained: bool) -> bool:
    """Give ``module`` back, see ``taking_over``. All ranks must call it, and it ends alike on all.

    False, without a change, if there is no engine, if one is needed, or if its weights are of no use.
    """
    models = models_in(module) if isinstance(module, nn.Module) else []  # kept: their own modules may be garbage
    gc.collect()  # a trainer that is in a cycle with its engine may have been collected on some ranks only
    mine = [(model.number, _is_free(model, untrained=untrained and model.module is module)) for model in models]
    found = gather_values(mine)
    if not mine or any(theirs != mine for theirs in found) or not all(is_free for _, is_free in mine):
        return False
    for model in models:
        if (owner := model.ownership.owner) is not None:
            owner.give_back(model)
    return True


def _is_free(model: ShardedModel, *, untrained: bool) -> bool:
    owner = model.ownership.owner
    if owner is None or model.half_loaded.spoils_weights:
        return False
    if model.comm.topology.pipe > 1:  # its last batch may have failed on the way, so that other stages still wait
        return False
    return owner.is_gone() or (untrained and not owner.has_trained())


def _refuse_dropped_pipeline(module: nn.Module) -> None:
    """Raise ModelError if ``module`` has an engine of pipeline stages that nobody can call ``destroy()`` of any more."""
    for model in models_in(module) if isinstance(module, nn.Module) else []:
        owner = model.ownership.owner
        if owner is not None and owner.is_gone() and model.comm.topology.pipe > 1:
            raise ModelError(
                "the model belongs to an engine of pipeline stages that the script has dropped, and whose last batch may "
                "be unfinished on other stages. Remedy: build the model anew; or keep the engine, and call its destroy() "
                "on all ranks before."
            ) from None
