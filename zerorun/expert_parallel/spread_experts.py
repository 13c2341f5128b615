"""Spreads the experts of a model over ranks, in place, and joins them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..distributed.tensor_shard import TensorShard
from ..tensor_parallel.axis import Axis
from ..tensor_parallel.layers import join, take_part
from ..zero.init import part_of
from .deferred_tensor import looked_at
from .dispatch import Dispatch
from .known_experts import COUNTS, Experts


def spread(found: Sequence[Experts], axis: Axis, tensor: Axis | None = None) -> list[Callable[[], None]]:
    """Leave each rank of ``axis`` as many of the experts ``found``, and let them send one another rows.

    All take the values of rank 0 first; parameters on the meta device are divided in shape only. ``tensor``: the tensor
    ranks, if there are several, which are among those of ``axis``. Return the functions that undo this, to be called from
    the last to the first, on all ranks.
    """
    return [_spread(experts, axis, tensor) for experts in found]


def _spread(experts: Experts, axis: Axis, tensor: Axis | None) -> Callable[[], None]:
    module: Any = experts.module
    local = experts.count // axis.size
    ranges = ((axis.rank * local, (axis.rank + 1) * local),)
    before = vars(module).get("forward")
    dispatch = module.forward = Dispatch(experts, axis, tensor)
    module.tensor_shards = {}
    for name in experts.own:
        param = module._parameters[name]
        shard = module.tensor_shards[name] = TensorShard(tuple(param.shape), 0, ranges, "expert")
        if not param.is_meta and part_of(param) is None:
            axis.broadcast(param.data, "experts: whole weights")
        take_part(param, shard)
    counts = [name for name in COUNTS if vars(module).get(name) == experts.count]
    for name in counts:
        setattr(module, name, local)
    put_beside = _put_beside(experts, dispatch)
    return partial(_join, module, axis, dict.fromkeys(counts, experts.count), before, put_beside)


def _put_beside(experts: Experts, dispatch: Dispatch) -> Callable[[], None]:
    """Let shared experts be computed while rows are on their way. Return the function that undoes this."""
    handles, before = [], {module: vars(module).get("forward") for module in dispatch.shared}
    for module, forward in dispatch.shared.items():
        module.forward = forward  # type: ignore[assignment]
        parts = [part for part in module.children() if next(part.parameters(), None) is not None]
        handles += [part.register_forward_pre_hook(dispatch.go_on) for part in parts[-1:]]
    if dispatch.shared:  # whoever looks at what the block returns gets a tensor
        handles.append(experts.block.register_forward_hook(_look, prepend=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for module, forward in before.items():
            _set_forward(module, forward)

    return undo


def _look(module: nn.Module, args: Any, output: Any) -> Any:
    return None if torch.compiler.is_compiling() else looked_at(output)


def _set_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Give a module back the forward that it had; None: that of its class."""
    del module.forward
    if forward is not None:
        module.forward = forward  # type: ignore[method-assign]


def _join(
    module: nn.Module,
    axis: Axis,
    counts: dict[str, int],
    forward: Callable[..., Any] | None,
    undo_beside: Callable[[], None],
) -> None:
    undo_beside()
    join(module, axis)
    for name, count in counts.items():
        setattr(module, name, count)
    del module.tensor_shards
    _set_forward(module, forward)
