"""Optimizers that zerorun does not know, as users write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Own(torch.optim.Optimizer):
    """Moves each parameter by ``direction`` of its momentum."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", 0) + 1
                    old = state.setdefault("velocity", torch.zeros_like(param))
                    old.mul_(group["momentum"]).add_(param.grad)
                    param.sub_(self.direction(param, old), alpha=group["lr"])

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        raise NotImplementedError


class Softsign(Own):
    """Element by element."""

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        return velocity / (1 + velocity.abs())


class OfVectors(Own):
    """Element by element, but in another way for parameters with one dimension."""

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        return velocity + 0.1 * param if param.dim() > 1 else velocity


class OfLarge(Own):
    """In another way from 4,096 elements on, as 8-bit optimizers are."""

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        return velocity.sign() if param.numel() >= 4096 else velocity


class UnitRows(Own):
    """By rows of a matrix."""

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        return velocity / (velocity.norm(dim=-1, keepdim=True) + 1e-3)


class Noisy(Own):
    """With noise, which would be another on each rank."""

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        return velocity + 0.1 * torch.randn(velocity.numel()).view_as(velocity)


class OneLength(Own):
    """All parameters together."""

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        grads = [other.grad for group in self.param_groups for other in group["params"] if other.grad is not None]
        return velocity / torch.stack([grad.norm() for grad in grads]).norm()


class ByPlace(Own):
    """By the place of a parameter in its group."""

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        (place,) = (n for group in self.param_groups for n, other in enumerate(group["params"]) if other is param)
        return velocity * (1 + place)


class AsksOthers(Own):
    """Divides the work over ranks by itself, as Keller Jordan's Muon does."""

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        torch.distributed.broadcast(velocity, 0)
        return velocity


class Keyed(Own):
    """With rates of single parameters in a table of its own."""

    def __init__(self, params: Any, rates: dict[Tensor, float], **settings: Any) -> None:
        super().__init__(params, **settings)
        self.rates = rates

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        return velocity * self.rates.get(param, 1.0)


class OwnStates(Own):
    """Element by element, with a state that no piece of a parameter can have a piece of."""

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        self.state[param]["history"] = velocity.new_zeros(7)
        return velocity


class ListedStates(Own):
    """With tensors in a list, as some keep the factors of a preconditioner."""

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        self.state[param]["factors"] = [velocity.new_ones(3), velocity.new_ones(5)]
        return velocity


class DecaysMatrices(Own):
    """Element by element, until a script lets it decay what has more than one dimension."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.5, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, momentum)
        for group in self.param_groups:
            group.setdefault("weight_decay", weight_decay)

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        (group,) = (group for group in self.param_groups if any(other is param for other in group["params"]))
        decay = group["weight_decay"] if param.dim() > 1 else 0
        return velocity + decay * param if decay else velocity


class AfterWarmUp(Own):
    """By norms of parameters, but for the first steps."""

    warm = 40

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        return velocity if self.state[param]["count"] <= self.warm else velocity / velocity.norm()


class Switched(Own):
    """Element by element, as long as its groups do not say ``by = "rows"``. It counts steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.5, by: str = "elements") -> None:
        super().__init__(params, lr, momentum)
        for group in self.param_groups:
            group.update(by=by, steps=0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
        super().step()

    def direction(self, param: Tensor, velocity: Tensor) -> Tensor:
        by_rows = self.param_groups[0]["by"] == "rows"
        return velocity / (velocity.norm(dim=-1, keepdim=True) + 1e-3) if by_rows else velocity


class AnyKeywords(Softsign):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)


not_an_optimizer = torch.zeros(1)
