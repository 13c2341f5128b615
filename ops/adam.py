"""Adam and AdamW through torch's fused kernel, with nothing around it.

For GPUs that the kernel of triton_kernels.py cannot be compiled for; elsewhere single_pass.py takes its place.
``torch.optim`` runs the same kernel, but its first step imports the whole compiler front end: 75 MB of memory and about a
second for every process, and it looks at every tensor again in every step. A sharded step has one tensor for a unit, and
folds unscaling and clipping into the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, overload

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv:1412.6980); with ``decoupled``, AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101).

    State by parameter, as torch.optim.AdamW names it: ``step`` (0-dim fp32), ``exp_avg`` and ``exp_avg_sq``. fp32 on CPU
    or CUDA. ``coefficient`` multiplies all gradients of the next step; the gradients themselves are changed by it, too.
    """

    # torch's own wrapper imports torch._dynamo to switch itself off.
    add_param_group = cast(
        Any, getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group)
    )

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
    ) -> None:
        if not lr >= 0 or not eps >= 0 or not weight_decay >= 0:
            raise ValueError(f"lr, eps and weight_decay must be at least 0, got {lr}, {eps} and {weight_decay}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        super().__init__(params, defaults)
        self.coefficient = 1.0

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update([param for param in group["params"] if param.grad is not None], group)
        self.coefficient = 1.0
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        if not params:
            return
        states = [self.state[param] or self._start(param) for param in params]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        scale = None
        if self.coefficient != 1.0:  # the kernel divides by it
            scale = torch.full((), 1.0 / self.coefficient, dtype=torch.float32, device=params[0].device)
        kernel = torch._fused_adamw_ if group["decoupled"] else torch._fused_adam_
        kernel(
            params,
            [cast(Tensor, param.grad) for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=None,
        )

    def _start(self, param: Tensor) -> dict[str, Tensor]:
        state = self.state[param]
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
        return state
