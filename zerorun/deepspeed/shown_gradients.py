"""``param.grad`` between backward and step, where DeepSpeed leaves something there: made when it is read.

Gradients lie in flat buffers, as sums over ranks and micro-batches. At stage 0 every rank has them whole after the last
backward of a step, and at stages 0 and 1 its own ones before. ``param.grad`` is made of these, averaged and without the
loss scale, as ``safe_get_full_grad`` has them; before the last backward it is this rank's average over micro-batches, in
which those to come are missing. It is a copy, which refuses to be written to. A rank may read it alone. Elsewhere it is
None, as in DeepSpeed.
"""

from __future__ import annotations

from typing import Any

import torch

from ..engine.engine import Engine
from ..engine.param_grad import CHANGED, ParamGrad, group_with_gradient
from ..errors import StepError
from ..pipeline.pipelined import Pipelined
from ..zero.offloaded_states import GRADIENTS
from ..zero.sharded_model import ParameterHome

_READS = ("__index__", "__int__", "__invert__", "__iter__")  # and no operators in place


class ReadGradient(torch.Tensor):
    """A gradient that is a copy. To change it in place raises StepError: the step would not see it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name not in _READS)
        changed = args[0] if name.startswith("_foreach_") else args[:1]
        if (in_place or name == "__setitem__") and any(isinstance(tensor, cls) for tensor in changed):
            raise StepError(f"{name} of param.grad, which is a copy here: the step would not see it. {CHANGED}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            views = isinstance(result, torch.Tensor) and isinstance(args[0], cls)
            if views and result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr():
                return result.as_subclass(cls)
        return result


def show_gradients(engine: Engine) -> None:
    """Let ``param.grad`` of the engine's parameters be what its stage has, if that is 0 or 1."""
    trains_by_loop = engine.sharded is not None and not isinstance(engine.module, Pipelined)
    if trains_by_loop and engine.config.zero_optimization.stage <= 1:
        engine.runtime.keep([ParamGrad(engine, _kept)])


def _kept(engine: Engine, home: ParameterHome) -> torch.Tensor | None:
    """The copy of what this rank has of the gradient; None if it has none, or a part of a reduced one."""
    group = group_with_gradient(home)
    if group is None or (group.reduced and not group.plan.owns_everything):
        return None
    cut = engine.topology.context > 1 and not group.reduced  # other ranks have gradients from other rows
    if home.entry in group.late or group.plan.replication.sums or engine.accumulation.is_weighted or cut:
        raise StepError(
            f"the gradient of {home.name!r} is not complete on this rank: losses have weights, it came after its turn in "
            "the backward, or other ranks have summands of it. Remedy: safe_get_full_grad(param) on all ranks."
        )
    engine.sharded_model.bring_back(*GRADIENTS)
    engine.runtime.reducer.finish()
    factor = float(engine.accumulation.unscale(0.0))
    if not group.reduced and engine.config.gradient_allreduce_op == "mean":
        factor *= engine.topology.data_size
    return (group.grad_views[home.entry] * factor).to(group.dtype).as_subclass(ReadGradient)
