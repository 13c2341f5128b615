"""LAMB (You et al. 2020, arXiv:1904.00962), with the formulas of DeepSpeed's FusedLamb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """Adam's direction, with a step that is as long as the norm of the parameter asks for.

    The direction of a parameter is u = m / (sqrt(v) + eps) + weight_decay * p, with uncorrected moments m, v. It moves by
    -lr * c * r * u, where r = |p| / |u| within [min_coeff, max_coeff] (1 if one of the norms is 0), and c corrects the bias
    of both moments: sqrt(1 - beta2^t) / (1 - beta1^t), or 1 without ``bias_correction``.

    Norms are those of whole parameters, so a ZeRO shard has whole parameters, too.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        """``eps_inside_sqrt``: the divisor is sqrt(v + eps). Raises ValueError for numbers out of range."""
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(f"min_coeff must be between 0 and max_coeff: {min_coeff}, {max_coeff}")
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"out of range: lr {lr}, eps {eps}, weight_decay {weight_decay}, or betas {betas}")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, {**defaults, "eps_inside_sqrt": eps_inside_sqrt, "max_coeff": max_coeff, "min_coeff": min_coeff}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters that have a gradient. ``closure`` computes the loss anew, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_step: dict[int, list[Tensor]] = {}  # with others, after the same number of steps, an update is one call
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                    state["step"] += 1
                    by_step.setdefault(int(state["step"]), []).append(param)
            for step, params in by_step.items():
                self._update(group, step, params)
        return loss

    def _update(self, group: dict[str, Any], step: int, params: list[Tensor]) -> None:
        (beta1, beta2), eps = group["betas"], group["eps"]
        grads = [param.grad for param in params if param.grad is not None]
        first, second = ([self.state[param][key] for param in params] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        if group["eps_inside_sqrt"]:
            divisors = torch._foreach_add(second, eps)
            torch._foreach_sqrt_(divisors)
        else:
            divisors = torch._foreach_sqrt(second)
            torch._foreach_add_(divisors, eps)
        updates = torch._foreach_div(first, divisors)
        del divisors
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        lengths, asked = torch.stack(torch._foreach_norm(params)), torch.stack(torch._foreach_norm(updates))
        ratios = (lengths / asked).clamp(group["min_coeff"], group["max_coeff"])
        ratios = torch.where((lengths > 0) & (asked > 0), ratios, 1.0)
        correction = (1 - beta2**step) ** 0.5 / (1 - beta1**step) if group["bias_correction"] else 1.0
        torch._foreach_mul_(updates, list((ratios * (-group["lr"] * correction)).unbind()))
        torch._foreach_add_(params, updates)
