"""Styles of a plan that need hooks, not layers: inputs of a module enter the region, or its output is summed over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .axis import Axis
from .collectives import enter_alone, leave_alone
from .styles import Assignment


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
