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


class AdamSAGE(torch.optim.Optimizer):
    """Liang et al., ICLR 2022: AdamW, times |I - J| / (J + eps^2) with I = |weight * gradient| and J its average."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], beta3: float, eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "beta3": beta3, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), beta3, eps = group["betas"], group["beta3"], group["eps"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"step": 0} | {key: torch.zeros_like(param) for key in ("m", "v", "average")}
                state["step"] += 1
                sensitivity = (param * param.grad).abs()
                for key, beta, value in (
                    ("m", beta1, param.grad),
                    ("v", beta2, param.grad.square()),
                    ("average", beta3, sensitivity),
                ):
                    state[key].mul_(beta).add_(value, alpha=1 - beta)
                m, v, average = (
                    state[key] / (1 - beta ** state["step"])
                    for key, beta in (("m", beta1), ("v", beta2), ("average", beta3))
                )
                update = m / (v.sqrt() + eps) * (sensitivity - average).abs() / (average + eps**2)
                param.sub_(group["lr"] * (update + group["weight_decay"] * param))


class Sophia(torch.optim.Optimizer):
    """Sophia-G: Liu et al. 2023, arXiv:2305.14342, Alg. 3, in the parametrization of its authors' code."""

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], rho: float, bs: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho, "bs": bs, "weight_decay": weight_decay})

    def _state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        if not self.state[param]:
            self.state[param] |= {"exp_avg": torch.zeros_like(param), "hessian": torch.zeros_like(param)}
        return self.state[param]

    @torch.no_grad()
    def take_curvature(self) -> None:
        """From gradients of the mean loss against sampled labels, which are dropped."""
        for group in self.param_groups:
            beta2 = group["betas"][1]
            for param in group["params"]:
                if param.grad is not None:
                    self._state(param)["hessian"].mul_(beta2).add_(param.grad.square(), alpha=1 - beta2)
                    param.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, _) = group["lr"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self._state(param)
                param.mul_(1 - lr * group["weight_decay"])
                m = state["exp_avg"].mul_(beta1).add_(param.grad, alpha=1 - beta1)
                ratio = (m.abs() / (group["rho"] * group["bs"] * state["hessian"] + 1e-15)).clamp(max=1)
                param.sub_(lr * m.sign() * ratio)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    # eps keeps Adam from magnifying the rounding of gradients that are nearly zero.
    "AdamW": (torch.optim.AdamW, {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}),
    "Adam": (torch.optim.AdamW, {"lr": 3e-3, "eps": 1e-4}),  # whose weight decay is decoupled, as DeepSpeed's is
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-4}),
    "Lion": (Lion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    # eps keeps the ratio of sensitivities from magnifying the rounding of gradients that are nearly zero.
    "AdamSAGE": (
        AdamSAGE,
        {"lr": 3e-3, "betas": (0.9, 0.999), "beta3": 0.75, "eps": 1e-2, "weight_decay": 0.1},
    ),
    # Without a curvature of its own it would only follow signs: see test_curvature.py.
    "Sophia": (Sophia, {"lr": 1e-3, "betas": (0.9, 0.95), "rho": 0.04, "bs": 64, "weight_decay": 0.1}),
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
