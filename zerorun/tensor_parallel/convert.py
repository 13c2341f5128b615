"""Divides the layers of a model by a plan, and returns the functions that join them again.

Some styles need hooks, not layers: inputs of a module enter the region, or its output is summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .axis import Axis
from .collectives import Region, enter_alone, forward_outside, leave_alone
from .layers import divide, join, make_column_parallel, make_row_parallel, make_vocab_parallel, restore, use_columns
from .styles import COLUMN, HOOKED, Assignment, ParallelPlan


def convert(model: nn.Module, plan: ParallelPlan, region: Region) -> list[Callable[[], None]]:
    """Divide ``model`` by ``plan``, which was made for it, without exchanging values between ranks.

    Return the functions that undo this, to be called from the last to the first.
    """
    rank, undo = region.axis.rank, [forward_outside(model, region)]
    for entry in plan.entries:
        undo.append(
            _convert_parameter(model, entry, plan, region) if entry.parameter else _convert(model, entry, plan, region)
        )
    for attribute in plan.attributes:
        owner = model.get_submodule(attribute.owner)
        setattr(owner, attribute.name, attribute.local[rank])
        undo.append(partial(setattr, owner, attribute.name, attribute.whole))
    return undo


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _convert(model: nn.Module, entry: Assignment, plan: ParallelPlan, region: Region) -> Callable[[], None]:
    module, rank = model.get_submodule(entry.name), region.axis.rank
    if entry.style in HOOKED:
        handles = hook(module, entry, region.axis)
        return partial(_remove, handles)
    if entry.style == "replicated_with_grad_allreduce":
        return _mark_partial(module, tuple(name for name, _ in module.named_parameters(recurse=False)))
    if entry.style not in (*COLUMN, "rowwise", "rowwise_split_input", "embedding_rowwise"):
        return lambda: None
    if entry.shared_heads:
        use_columns(module, region, entry.used(rank, plan.size))
    elif entry.style in COLUMN:
        gather = entry.style == "colwise_gather_output"
        make_column_parallel(module, region, entry.own(rank, plan.size), gather_output=gather)
    elif entry.style == "embedding_rowwise":
        make_vocab_parallel(module, region)
    else:
        split = entry.style == "rowwise_split_input"
        make_row_parallel(module, region, entry.own(rank, plan.size), split_input=split)
    if entry.style in COLUMN:
        module.around = (model.get_submodule(entry.owner),)  # type: ignore[assignment]  # in a tuple, it is no submodule
    return partial(restore, module)


def _convert_parameter(model: nn.Module, entry: Assignment, plan: ParallelPlan, region: Region) -> Callable[[], None]:
    """Convert one parameter; its module keeps its class."""
    owner: Any = model.get_submodule(entry.owner)
    if entry.style == "replicated_with_grad_allreduce":
        return _mark_partial(owner, (entry.leaf,))
    if not entry.lengths:
        return lambda: None
    shard = divide(owner._parameters[entry.leaf], entry.dim, entry.own(region.axis.rank, plan.size), region)
    owner.tensor_shards = {**getattr(owner, "tensor_shards", {}), entry.leaf: shard}

    def undo() -> None:
        join(owner, region.axis)
        owner.__dict__.pop("tensor_shards", None)

    return undo


def _mark_partial(module: Any, names: tuple[str, ...]) -> Callable[[], None]:
    had = vars(module).get("partial_gradients")
    module.partial_gradients = (*(had or ()), *names)

    def undo() -> None:
        if had is None:
            vars(module).pop("partial_gradients", None)
        else:
            module.partial_gradients = had

    return undo


def hook(module: nn.Module, entry: Assignment, axis: Axis) -> list[RemovableHandle]:
    """Let ``module`` compute as the style of ``entry`` says."""

    def enter_all(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Hidden states and router weights must both enter: each rank computes only a summand of their gradients.
        return tuple(entered(arg) for arg in args), {name: entered(arg) for name, arg in kwargs.items()}

    def entered(value: Any) -> Any:
        return enter_alone(value, axis) if isinstance(value, torch.Tensor) and value.requires_grad else value

    def sum_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return None if output is None else leave_alone(output, axis)

    def divide_input(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return (args[0] / axis.size, *args[1:])

    def enter_rotary(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        latent, rotary = output.split(list(entry.lengths), -1)
        return torch.cat([latent, enter_alone(rotary, axis)], -1)

    if entry.style == "moe_tp_experts":
        return [
            module.register_forward_pre_hook(enter_all, with_kwargs=True),
            module.register_forward_hook(sum_output),
        ]
    if entry.style == "all_reduce":
        return [module.register_forward_hook(sum_output)]
    if entry.style == "moe_identity_expert":
        return [module.register_forward_pre_hook(divide_input)]
    return [module.register_forward_hook(enter_rotary)]
