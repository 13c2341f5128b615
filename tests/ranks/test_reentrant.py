"""Forwards within forwards: modules that call themselves, and trainers whose training step is the model's forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import distance
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import make_config

import zerorun

STEPS = 2


class Recursive(nn.Module):
    """A block that calls itself, and reads its own weights again after that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = x + torch.tanh(self.up(x))
        return self.down(self(x, depth - 1) if depth else x)


class Energy(nn.Module):
    """A block that differentiates within its forward, and reads its own weights before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()  # in evaluation
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(torch.tanh(self.up(x)).square().sum(), x, create_graph=True)
        return x - 0.1 * self.down(slope)


class Fails(nn.Module):
    """A block that the model tries first with an argument that it refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, refuse: bool = False) -> torch.Tensor:
        y = self.layer(x)
        if refuse:
            raise ValueError("refused")
        return x + torch.tanh(y)


class Model(nn.Module):
    """``turns``: how often the model's forward calls the model."""

    def __init__(self, block: type[nn.Module], recompute: bool = False, turns: int = 0) -> None:
        super().__init__()
        self.recompute, self.turns = recompute, turns
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, turn: int | None = None) -> torch.Tensor:
        turn = self.turns if turn is None else turn
        if turn:
            x = self(x, turn - 1)
        for block in self.blocks:
            if isinstance(block, Fails):
                with contextlib.suppress(ValueError):
                    block(x, refuse=True)
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        """As a LightningModule has it: the model is called within its own forward."""
        return self(x).square().mean()

    def penalised_step(self, x: torch.Tensor) -> torch.Tensor:
        """A backward in the forward, between two calls of the model."""
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return self(x + 0.1 * slope.detach()).square().mean() + slope.square().mean()


def redirected(call: Callable[..., Any], module: nn.Module, method: str, *args: Any) -> Any:
    """Run ``method`` of ``module`` as its forward, as trainers do to have the hooks of ``call`` around it."""
    forward = module.forward

    def stand_in(*args: Any) -> Any:
        module.forward = forward  # type: ignore[method-assign]
        return getattr(module, method)(*args)

    module.forward = stand_in  # type: ignore[method-assign]
    return call(*args)


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()


def loss_of(call: Callable[..., Any], module: nn.Module, method: str, x: torch.Tensor) -> torch.Tensor:
    return redirected(call, module, method, x) if method else call(x).square().mean()


def build(*shape: Any) -> Model:
    torch.manual_seed(0)
    return Model(*shape)


def reference(world: int, method: str, shape: tuple[Any, ...]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    module = build(*shape)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses: list[list[float]] = []
    for step in range(STEPS):
        losses.append([])
        for rank in range(world):
            loss = loss_of(module, module, method, data(rank, step))
            (loss / world).backward()
            losses[-1].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in module.state_dict().items()}


def train(stage: int, method: str, shape: tuple[Any, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = zerorun.initialize(build(*shape), make_config(stage, optimizer="SGD"))
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, engine.module, method, data(dist.get_rank(), step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        evaluated = engine(data(0, 0))
    found = engine.state_dict()
    engine.destroy()
    assert torch.isfinite(evaluated).all()
    return losses, found


SHAPES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "the root calls itself": ("", (Fails, False, 2)),
    "the root calls itself, recomputed": ("", (Fails, True, 2)),
    "a block calls itself": ("", (Recursive, False)),
    "a block calls itself, recomputed": ("", (Recursive, True)),
    "the training step is the forward": ("training_step", (Fails, False)),
    "the training step is the forward, recomputed": ("training_step", (Recursive, True)),
    "a backward in the forward": ("penalised_step", (Recursive, False)),
    "a backward in a block": ("", (Energy, False)),
    "a backward in a block, within a training step": ("training_step", (Energy, False)),
}


@pytest.mark.each_value
@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), (2, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("name", SHAPES)
def test_forwards_within_forwards_equal_one_process(name: str, world: int, stage: int) -> None:
    method, shape = SHAPES[name]
    losses, weights = reference(world, method, shape)
    for rank, (found, state) in enumerate(run_ranks(world, train, stage, method, shape)):
        assert found == pytest.approx([row[rank] for row in losses], rel=1e-5)
        assert max(distance(state[key], value) for key, value in weights.items()) < 1e-6


def optimize_by_hand(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Manual optimization: the training step, which is the forward, calls backward and step itself."""
    module = build(Fails)
    engine = zerorun.initialize(module, make_config(stage, optimizer="SGD"))
    losses: list[float] = []

    def step_by_hand(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            loss = module(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return loss

    module.step_by_hand = step_by_hand  # type: ignore[assignment]
    for step in range(STEPS):
        redirected(engine, module, "step_by_hand", data(0, step))
    found = engine.state_dict()
    engine.destroy()
    return losses, found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_backward_and_step_within_the_forward(stage: int) -> None:
    module = build(Fails)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        for _ in range(2):
            loss = module(data(0, step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    for found, state in run_ranks(2, optimize_by_hand, stage):
        assert found == pytest.approx(losses, rel=1e-5)
        assert max(distance(state[key], value) for key, value in module.state_dict().items()) < 1e-6


def norm_in(precision: str) -> float:
    """Of the gradient of a plain backward, where the model's forward calls the engine."""
    module = build(Fails)
    engine = zerorun.initialize(module, make_config(1, precision=precision))
    module.own_step = lambda x: engine(x).float().square().mean()  # type: ignore[assignment]
    redirected(engine, module, "own_step", data(dist.get_rank(), 0)).backward()
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    assert norm is not None
    return norm


def test_a_loss_is_scaled_once_where_the_engine_is_called_in_itself() -> None:
    assert run_ranks(2, norm_in, "fp16") == pytest.approx(run_ranks(2, norm_in, "fp32"), rel=0.02)
