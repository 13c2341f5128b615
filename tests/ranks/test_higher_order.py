"""Gradients of gradients: penalties on gradients, as critics of GANs have them, beside one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import distance
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training import make_config

import zerorun
from zerorun.errors import NonFiniteError

STEPS = 2


class Critic(nn.Module):
    """Residual blocks whose operations save weights as they are (convolution, norm) and as views (linear)."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh()) for _ in range(5)
        )
        self.head = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.head(x).squeeze()


Model = Callable[[torch.Tensor], torch.Tensor]


def wasserstein(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Gulrajani et al. 2017, arXiv:1704.00028: other units are visited before the input's gradient is differentiated."""
    fake = model(x + 1)
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return fake.mean() - model(x).mean() + (gradient.norm(2, 1) - 1).square().mean()


def zero_centred(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Mescheder et al. 2018, arXiv:1801.04406: nothing but the penalty."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.square().sum(1).mean()


def first_order(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    found = model(x)
    (gradient,) = torch.autograd.grad(found.sum(), x, retain_graph=True)
    return F.softplus(found).mean() * float(gradient.norm())


def failing(model: Model, x: torch.Tensor) -> torch.Tensor:
    """A script that goes on after an exception in autograd."""
    start = x.clone().requires_grad_()
    given = start * 1
    handle = given.register_hook(planted)
    found = model(given)
    with pytest.raises(ValueError, match="planted"):
        torch.autograd.grad(found.sum(), start, retain_graph=True)
    handle.remove()
    return F.softplus(found).mean()


def planted(gradient: torch.Tensor) -> None:
    raise ValueError("planted")


def of_weights(model: Model, x: torch.Tensor) -> torch.Tensor:
    """A penalty on the gradients of weights, which reads weights of their unit again."""
    module = model.module if isinstance(model, zerorun.Engine) else model
    loss = F.softplus(model(x)).mean()
    gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)  # type: ignore[attr-defined]
    return loss + 0.1 * torch.stack([grad.square().sum() for grad in gradients]).sum()


LOSSES = (wasserstein, zero_centred, first_order, of_weights)


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(distance(found[name], wanted[name]) for name in wanted)


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 12, generator=torch.Generator().manual_seed(10 * step + rank))


def build(recompute: bool) -> Critic:
    torch.manual_seed(0)
    return Critic(recompute)


def reference(loss: Callable[..., torch.Tensor], world: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, losses = build(recompute=False), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        found = torch.stack([loss(model, data(rank, step)) for rank in range(world)]).mean()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found.detach()))
    return model.state_dict(), losses


def train(loss: Callable[..., torch.Tensor], stage: int, recompute: bool) -> dict[str, Any]:
    config = make_config(stage, optimizer="SGD")
    config["optimizer"]["params"] = {"lr": 0.1}
    engine = zerorun.initialize(build(recompute), config)
    losses = []
    for step in range(STEPS):
        losses.append(engine.backward(loss(engine, data(dist.get_rank(), step))))
        engine.step()
    found = {"weights": engine.state_dict(), "losses": losses}
    engine.destroy()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("world", (1, 2, 3))
def test_penalties_on_gradients_train_as_in_one_process(
    loss: Callable[..., torch.Tensor], world: int, recompute: bool
) -> None:
    weights, losses = reference(loss, world)
    for stage in range(4):
        answers = run_ranks(world, train, loss, stage, recompute)
        for found in answers:
            assert apart(found["weights"], weights) < 1e-5  # fp32, through three evaluations and two backwards
        mean = torch.tensor([[float(value) for value in found["losses"]] for found in answers]).mean(0)
        assert torch.allclose(mean, torch.tensor(losses), rtol=1e-5, atol=1e-7)


def only_on_one(loss: Callable[..., torch.Tensor], stage: int) -> float:
    """How far weights get from those of one process, where rank 1 alone asks for gradients of its input."""
    config = make_config(stage, optimizer="SGD", gradient_accumulation_steps=2, gradient_clipping=0.0)
    engine, alone = zerorun.initialize(build(recompute=False), config), build(recompute=False)
    optimizer = torch.optim.SGD(alone.parameters(), **config["optimizer"]["params"])

    def loss_of(model: Model, rank: int, number: int) -> torch.Tensor:
        return (loss if rank else usual)(model, data(rank, number))

    for step in range(2 * STEPS):
        loss_of(engine, dist.get_rank(), step).backward()
        engine.step()
        for rank in range(2):
            (loss_of(alone, rank, step) / 4).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    found = engine.state_dict()
    engine.destroy()
    return max(float((found[name] - value).abs().max()) for name, value in alone.state_dict().items())


def usual(model: Model, x: torch.Tensor) -> torch.Tensor:
    return F.softplus(model(x)).mean()


@pytest.mark.each_value
@pytest.mark.parametrize("loss", (zero_centred, first_order, failing))
@pytest.mark.parametrize("stage", (0, 1, 2))
def test_gradients_of_inputs_are_no_matter_of_other_ranks(stage: int, loss: Callable[..., torch.Tensor]) -> None:
    """Where each has all weights, as in DistributedDataParallel. The backward of one rank waited for that of another."""
    assert max(run_ranks(2, only_on_one, loss, stage)) < 1e-6


def with_some_frozen(stage: int) -> dict[str, torch.Tensor]:
    engine = zerorun.initialize(build(recompute=False), make_config(stage, optimizer="SGD"))
    engine.module.blocks[1][2].weight.requires_grad_(False)
    for step in range(2):
        engine.backward(zero_centred(engine, data(dist.get_rank(), step)))
        engine.step()
    found = engine.state_dict()
    engine.destroy()
    return found


def test_penalties_train_what_is_not_frozen_meanwhile() -> None:
    usual = run_ranks(2, with_some_frozen, 0)[0]
    for found in run_ranks(2, with_some_frozen, 3):
        assert apart(found, usual) < 1e-5


def through_the_step(stage: int) -> dict[str, torch.Tensor]:
    """``loss.backward(create_graph=True)``: the engine keeps the gradients' values, not their graph."""
    engine = zerorun.initialize(build(recompute=False), make_config(stage, optimizer="SGD"))
    for step in range(2):
        engine(data(dist.get_rank(), step)).mean().backward(create_graph=step == 0)
        engine.step()
    found = engine.state_dict()
    assert all(
        not value.requires_grad for unit in engine.units for s in unit.trainable for value in (s.grad_full, s.grad_shard)
    )
    engine.destroy()
    return found


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_graph_of_gradients_is_not_kept() -> None:
    usual = run_ranks(2, through_the_step, 0)[0]
    for stage in (1, 2, 3):
        for found in run_ranks(2, through_the_step, stage):
            assert apart(found, usual) < 1e-6


def with_bad_data(loss: Callable[..., torch.Tensor], precision: str, bad: float) -> tuple[str, int]:
    """What is said of a step whose data has ``bad``, and how many steps were skipped."""
    config = make_config(3, precision=precision, optimizer="SGD")
    engine = zerorun.initialize(build(recompute=False), config)
    try:
        for step in range(3):
            given = data(dist.get_rank(), step)
            given[0, 0] = bad if step == 1 else given[0, 0]
            engine.backward(loss(engine, given.to(torch.float16 if precision == "fp16" else torch.float32)).float())
            engine.step()
        said = ""
    except NonFiniteError as error:
        said = str(error)
    skipped = engine.skipped_steps
    engine.destroy()
    return said, skipped


@pytest.mark.parametrize("loss", (wasserstein, of_weights, usual))
def test_a_loss_that_is_nan_is_told_as_such(loss: Callable[..., torch.Tensor]) -> None:
    """At stage 3 it was told as a parameter that is used where only its placeholder is, and fp16 ended at an overflow."""
    for said, skipped in run_ranks(2, with_bad_data, loss, "fp32", float("nan")):
        assert "the loss is NaN or infinite" in said and skipped == 0
    if loss is not of_weights:  # gradients of weights have the loss scale there
        for said, skipped in run_ranks(2, with_bad_data, loss, "fp16", float("inf")):
            assert (said, skipped) == ("", 1)
