"""Calls of torch's ``clip_grad_norm_`` and ``clip_grad_value_`` with parameters of an engine: a script is told.

Gradients lie in flat buffers, and ``param.grad`` is None. These functions pass over such parameters without a word: a loop
in which the call was left would train with the engine's clipping, or none. They are wrapped while there is an engine, where
scripts find them in ``torch.nn.utils``; whoever has imported one of them by name before that has torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from ..errors import StepError
from ..log import warn_once
from ..zero.sharded_model import ShardedModel, home_of

_OWN: dict[str, Callable[..., Any]] = {name: getattr(clip_grad, name) for name in ("clip_grad_norm_", "clip_grad_value_")}
_limits = WeakKeyDictionary[ShardedModel, float]()  # the norm to which each engine clips


class ClipCalls:
    """Tells of calls with parameters of ``model``, whose engine clips to a norm of ``limit``, until it is removed."""

    def __init__(self, model: ShardedModel, limit: float) -> None:
        self._model = ref(model)
        if not _limits:
            _put({name: _told(function) for name, function in _OWN.items()})
        _limits[model] = limit

    def remove(self) -> None:
        model = self._model()
        if model is not None:
            _limits.pop(model, None)
        if not _limits:
            _put(_OWN)


def _put(functions: dict[str, Callable[..., Any]]) -> None:
    for module in (utils, clip_grad):
        for name, function in functions.items():
            setattr(module, name, function)


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _tell(function, parameters, *args, **kwargs)
        return function(parameters, *args, **kwargs)

    return call


def _tell(function: Callable[..., Any], parameters: Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Raise StepError if one of ``parameters`` is an engine's. Warn where that clips to the same norm, or none is to be."""
    homes = (home_of(param) for param in parameters if param.grad is None)  # the DeepSpeed mode has something there
    model = next((home[0] for home in homes if home is not None and home[0] in _limits), None)
    if model is None:
        return
    limit = _limits[model]
    is_norm = function.__name__ == "clip_grad_norm_"
    wanted = args[0] if args else next((kwargs[key] for key in ("max_norm", "clip_value") if key in kwargs), None)
    is_l2 = kwargs.get("norm_type", args[1] if len(args) > 1 else 2) == 2
    is_same = is_norm and (wanted == math.inf or (wanted == limit and is_l2))
    has = f"clips to a norm of {limit:g}" if limit else "does not clip"
    problem = (
        f"{function.__name__}({wanted}) of torch does nothing with parameters of an engine, whose gradients are not in "
        f"param.grad: engine.step() {has}, as gradient_clipping of the configuration says. Remedy: leave the call out"
    )
    if is_norm:
        problem += "" if is_same else f', and set "gradient_clipping": {wanted}'
        problem += ". The norm is engine.get_global_grad_norm(), after the step."
    else:
        problem += ", and clip to a norm; or clip values by safe_get_full_grad() and safe_set_full_grad()."
    if not is_same and not model.runtime.guard.is_lenient:
        raise StepError(problem)
    warn_once(problem)
