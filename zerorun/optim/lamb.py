"""LAMB (You et al. 2020, arXiv:1904.00962), with the formulas of DeepSpeed's FusedLamb."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zerorun.distributed.transport.sums import square_sum

from .parameter_parts import Part, PartsOptimizer, SumOfParts

_NORMS = "optimizer: norms of parameters and updates"


class Lamb(PartsOptimizer):
    """Adam's direction, with a step that is as long as the norm of the parameter asks for.

    The direction of a parameter is u = m / (sqrt(v) + eps) + weight_decay * p, with uncorrected moments m, v. It moves by
    -lr * c * r * u, where r = |p| / |u| within [min_coeff, max_coeff] (1 if one of the norms is 0), and c corrects the bias
    of both moments: sqrt(1 - beta2^t) / (1 - beta1^t), or 1 without ``bias_correction``.

    Norms are those of whole parameters: ranks that have parts of one sum two squares for it, in one message for all.
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
        batches = [(group, step, params, self._directions(group, step, params)) for group, step, params in self._batches()]
        squares: dict[Tensor, Tensor] = {}
        for _, _, params, directions in batches:
            pairs = zip(*(_square_sums(tensors) for tensors in (params, directions)), strict=True)
            squares |= {param: torch.stack(pair) for param, pair in zip(params, pairs, strict=True)}
        squares |= self.sums({p: own for p, own in squares.items() if self.part_of(p).is_shared}, _pair_of, _NORMS)
        for group, step, params, directions in batches:
            self._move(group, step, params, directions, torch.stack([squares[param] for param in params]).sqrt_())
        return loss

    def _batches(self) -> Iterator[tuple[dict[str, Any], int, list[Tensor]]]:
        """Count a step of each parameter with a gradient. Yield (group, step, its parameters): an update of them is one
        call."""
        for group in self.param_groups:
            alike: dict[tuple[int, torch.device], list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state |= {"step": 0, "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                    state["step"] += 1
                    alike.setdefault((int(state["step"]), param.device), []).append(param)
            for (step, _), params in alike.items():
                yield group, step, params

    def _directions(self, group: dict[str, Any], step: int, params: list[Tensor]) -> list[Tensor]:
        """Average the moments, and return the directions, in the memory of the gradients if they may be spent."""
        (beta1, beta2), eps = group["betas"], group["eps"]
        found = [self.spent_gradient(param).view(param.shape) for param in params]
        first, second = ([self.state[param][key] for param in params] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(first, found, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, found, found, 1 - beta2)
        torch._foreach_copy_(found, second)
        if group["eps_inside_sqrt"]:
            torch._foreach_add_(found, eps)
            torch._foreach_sqrt_(found)
        else:
            torch._foreach_sqrt_(found)
            torch._foreach_add_(found, eps)
        torch._foreach_reciprocal_(found)
        torch._foreach_mul_(found, first)
        if group["weight_decay"]:
            torch._foreach_add_(found, params, alpha=group["weight_decay"])
        return found

    def _move(
        self, group: dict[str, Any], step: int, params: list[Tensor], directions: list[Tensor], norms: Tensor
    ) -> None:
        """``norms`` [parameters, 2]: of the whole parameters and of their directions."""
        (beta1, beta2), (lengths, asked) = group["betas"], norms.unbind(1)
        ratios = (lengths / asked).clamp(group["min_coeff"], group["max_coeff"])
        ratios = torch.where((lengths > 0) & (asked > 0), ratios, 1.0)
        correction = (1 - beta2**step) ** 0.5 / (1 - beta1**step) if group["bias_correction"] else 1.0
        torch._foreach_mul_(directions, list((ratios * (-group["lr"] * correction)).unbind()))
        torch._foreach_add_(params, directions)

    # -- what plans know before there is an optimizer --------------------------------------------------------------

    @staticmethod
    def planned_sums(parts: Sequence[Part]) -> tuple[SumOfParts, ...]:
        numel = sum(map(_pair_of, parts))
        return (SumOfParts(_NORMS, numel),) if numel else ()

    @staticmethod
    def state_numels(part: Part) -> dict[str, int]:
        return {"exp_avg": part.numel, "exp_avg_sq": part.numel}


def _pair_of(part: Part) -> int:
    return 2 if part.is_shared else 0


def _square_sums(tensors: list[Tensor]) -> list[Tensor]:
    """The sums of squares of ``tensors``, fp32 scalars."""
    return [square_sum(tensor.reshape(-1)).float() for tensor in tensors]
