"""The Lion optimizer, which torch.optim does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay. Chen et al. 2023, arXiv:2302.06675, Alg. 2.

    c = b1 m + (1 - b1) g;  p = p - lr (sign(c) + weight_decay p);  m = b2 m + (1 - b2) g.

    One state tensor per parameter, ``exp_avg`` (m). Since each element moves by ``lr`` whatever its gradient, the
    paper uses a learning rate 3 to 10 times smaller, and a decay as much larger, than for AdamW. The defaults are
    the paper's.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if not lr >= 0:
            raise ValueError(f"lr must be at least 0, got {lr}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {betas}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; the others and their momentum stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(params, [self._momentum(param) for param in params], group)
        return loss

    def _momentum(self, param: Tensor) -> Tensor:
        if param.grad is not None and param.grad.is_sparse:
            raise RuntimeError("Lion does not support sparse gradients")
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state["exp_avg"]

    @staticmethod
    def _update(params: list[Tensor], momenta: list[Tensor], group: dict[str, Any]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), group["betas"]
        direction = torch._foreach_mul(momenta, beta1)
        torch._foreach_add_(direction, grads, alpha=1 - beta1)
        torch._foreach_sign_(direction)
        if decay:
            torch._foreach_mul_(params, 1 - lr * decay)
        torch._foreach_add_(params, direction, alpha=-lr)
        torch._foreach_mul_(momenta, beta2)
        torch._foreach_add_(momenta, grads, alpha=1 - beta2)
