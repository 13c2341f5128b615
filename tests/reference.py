"""The reference: plain PyTorch in one process, over the micro-batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from models import Case, Place
from torch import nn


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675, Alg. 2, as it is written there."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                    direction = torch.sign(beta1 * momentum + (1 - beta1) * param.grad)
                    param.sub_(lr * (direction + decay * param))
                    momentum.mul_(beta2).add_(param.grad, alpha=1 - beta2)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    # eps keeps Adam from magnifying the rounding of gradients that are nearly zero.
    "AdamW": (torch.optim.AdamW, {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}),
    "Adam": (torch.optim.AdamW, {"lr": 3e-3, "eps": 1e-4}),  # whose weight decay is decoupled, as DeepSpeed's is
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-4}),
    "Lion": (Lion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
}


@dataclass
class Result:
    """What a training run leaves: per-step global mean losses and gradient norms, and the final weights by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def make_optimizer(module: nn.Module, kind: str, groups: Callable[[nn.Module], Any] | None) -> torch.optim.Optimizer:
    build, params = OPTIMIZERS[kind]
    chosen = groups(module) if groups else [param for param in module.parameters() if param.requires_grad]
    return build(chosen, **params)


def train_reference(
    case: Case,
    *,
    world_size: int,
    steps: int,
    accumulation: int = 1,
    clip: float = 0.0,
    optimizer: str = "AdamW",
    dtype: torch.dtype = torch.float32,
) -> Result:
    """Train on the mean over all ranks and micro-batches."""
    module = case.build().to(dtype)
    stepper = make_optimizer(module, optimizer, case.groups)
    trained = [param for group in stepper.param_groups for param in group["params"]]
    result = Result()
    count = world_size * accumulation
    for step in range(steps):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(world_size):
                loss = case.loss(module, Place(rank, step, micro))
                (loss / count).backward()
                total += loss.item() / count
        result.losses.append(total)
        result.norms.append(float(nn.utils.clip_grad_norm_(trained, clip or float("inf"))))
        stepper.step()
        stepper.zero_grad()
    result.weights = weights_of(module)
    return result


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """||found - wanted|| / ||wanted||, in fp64."""
    wanted = wanted.double()
    norm = float(wanted.norm())
    return float((found.double() - wanted).norm()) / norm if norm else float(found.double().norm())


def differences(found: Result, wanted: Result, tolerance: float = 1e-6) -> list[str]:
    """What differs by more than ``tolerance``, relatively: losses, norms, and each weight by its norm."""
    problems = []
    for kind, ours, theirs in (("loss", found.losses, wanted.losses), ("norm", found.norms, wanted.norms)):
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not abs(a - b) <= tolerance * abs(b):
                problems.append(f"{kind} of step {step}: {a!r} instead of {b!r} ({abs(a - b) / abs(b):.1e})")
    if found.weights.keys() != wanted.weights.keys():
        problems.append(f"names differ: {sorted(found.weights.keys() ^ wanted.weights.keys())}")
    for name in found.weights.keys() & wanted.weights.keys():
        off = distance(found.weights[name], wanted.weights[name])
        if not off <= tolerance:
            problems.append(f"weight {name}: {off:.1e}")
    return problems
