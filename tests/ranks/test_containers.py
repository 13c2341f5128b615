"""What is never called is no unit, and what reads a released parameter is named: in training and in evaluation."""

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
from training import make_config, shared_topology

import zerorun
from zerorun.errors import ConfigError, ReleasedParameterError
from zerorun.plan.units import UnitPolicy, choose_units, repeated_blocks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Other(Layer):
    """Another class with the same forward."""


class Holder(nn.Module):
    """Holds modules and a weight, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first, self.second = Layer(), Other()


def lists() -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleList([Layer(), Other()]) for _ in range(3))


def dicts() -> nn.ModuleList:
    return nn.ModuleList(nn.ModuleDict({"a": Layer(), "b": nn.ModuleList([Other()])}) for _ in range(3))


def holders() -> nn.ModuleList:
    return nn.ModuleList(Holder() for _ in range(3))


class Model(nn.Module):
    def __init__(self, build: Callable[[], nn.ModuleList]) -> None:
        super().__init__()
        self.inside = build()
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for member in self.inside:
            if isinstance(member, Holder):
                x = member.second(member.first(x)) * member.scale
            elif isinstance(member, nn.ModuleDict):
                x = member["b"][0](member["a"](x))
            else:
                for layer in member:
                    x = layer(x)
        return self.head(x)


def build(which: Callable[[], nn.ModuleList]) -> Model:
    torch.manual_seed(0)
    return Model(which)


@pytest.mark.parametrize(
    ("which", "first", "second"), [(lists, "0", "1"), (dicts, "a", "b.0"), (holders, "first", "second")]
)
def test_units_are_what_is_called(which: Callable[[], nn.ModuleList], first: str, second: str) -> None:
    names = [f"inside.{index}.{part}" for index in range(3) for part in (first, second)]
    assert [name for name, _ in repeated_blocks(build(which))] == names
    policies = [UnitPolicy("size_based", numel=72), UnitPolicy("by_block_and_size", numel=64), UnitPolicy("by_block_group")]
    for policy in policies:
        for spec in choose_units(build(which), policy):
            assert all(type(module).forward is not nn.Module.forward for module in spec.modules), spec.name


def test_a_class_that_is_never_called_is_refused_as_a_unit() -> None:
    with pytest.raises(ConfigError, match=r"(?s)'inside\.0' is of this class, which has no forward.*\['Layer', 'Other'\]"):
        choose_units(build(holders), UnitPolicy("classes", classes=("Holder",)))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def train(which: Callable[[], nn.ModuleList]) -> tuple[torch.Tensor, list[float], dict[str, torch.Tensor]]:
    engine = zerorun.initialize(build(which), make_config(3, optimizer="SGD"), topology=shared_topology())
    with torch.no_grad():
        first = engine(batch(0, 0))
    losses = []
    for step in range(3):
        loss = engine(batch(dist.get_rank(), step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = engine.state_dict()
    engine.destroy()
    return first, losses, found


@pytest.mark.parametrize("which", [lists, dicts, holders])
def test_containers_without_a_forward_train_at_stage_3(which: Callable[[], nn.ModuleList]) -> None:
    module = build(which)
    first = module(batch(0, 0)).detach()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(3):
        both = [module(batch(rank, step)).square().mean() for rank in range(2)]
        (sum(both) / 2).backward()  # type: ignore[union-attr]
        losses.append([loss.item() for loss in both])
        optimizer.step()
        optimizer.zero_grad()
    for rank, (evaluated, found, state) in enumerate(run_ranks(2, train, which)):
        assert distance(evaluated, first) < 1e-6
        assert found == pytest.approx([row[rank] for row in losses], rel=1e-5)
        assert max(distance(state[key], value) for key, value in module.state_dict().items()) < 1e-6


class Careless(nn.Module):
    """Reads weights of blocks that are not running, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor, careful: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        last = self.blocks[3].linear
        if careful:
            return x + torch.zeros_like(last.weight)[0] + last.weight.new_zeros(8).to(last.weight.dtype)
        if self.how == "function":
            return F.linear(x, last.weight)
        if self.how == "view":
            return x + self.blocks[1].linear.weight.t()[0].view(2, 4).reshape(8)
        if self.how == "child":  # the block's child has a forward, but its hooks are the block's
            return self.blocks[2].linear(x)
        return torch.where(x > -100, x, last.bias.detach().clone())  # which no output shows


def evaluate(how: str, stage: int, grad: bool) -> tuple[str, bool]:
    """(the error, whether the engine goes on as before)."""
    engine = zerorun.initialize(Careless(how), make_config(stage), topology=shared_topology())
    error = ""
    with torch.set_grad_enabled(grad):
        try:
            engine(batch(0, 0))
        except ReleasedParameterError as found:
            error = str(found)
        again = engine(batch(0, 0), careful=True)
    finite = bool(torch.isfinite(again).all())
    engine.destroy()
    return error, finite


READS = {
    "function": "'blocks.3.linear.weight'",
    "view": "'blocks.1.linear.weight'",
    "child": "'blocks.2.linear.bias'",
    "nothing shows it": "'blocks.3.linear.bias'",
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("how", READS)
def test_the_first_reader_of_a_released_parameter_is_named(how: str, grad: bool) -> None:
    for error, finite in run_ranks(2, evaluate, how, 3, grad):
        assert READS[how] in error
        assert "outside the forward of its unit" in error
        assert finite
    assert run_ranks(2, evaluate, how, 2, grad) == [("", True)] * 2


def evaluate_later() -> list[str]:
    """A branch that reads a released parameter only after some evaluations."""
    engine: Any = zerorun.initialize(Careless("function"), make_config(3), topology=shared_topology())
    errors = []
    with torch.no_grad():
        for careful in (True, True, False, False):
            try:
                engine(batch(0, 0), careful=careful)
                errors.append("")
            except ReleasedParameterError as found:
                errors.append(str(found))
    engine.destroy()
    return errors


def test_a_later_nan_is_looked_into() -> None:
    for errors in run_ranks(2, evaluate_later):
        assert errors[:3] == ["", "", ""]
        assert "'blocks.3.linear.weight'" in errors[3]
