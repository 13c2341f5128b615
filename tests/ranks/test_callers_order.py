"""No order of a list, dict or set of the script reaches the wire: it is another one on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from training import make_config, shared_topology

import zerorun
from zerorun.errors import ModelError, OrderError, ZerorunError
from zerorun.zero import GatheredParameters, Init, safe_get_full_fp32_param, safe_get_full_grad


class Heads(nn.Module):
    """Parameters of one shape and of others; two blocks, so that stage 3 has units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.heads = nn.ParameterList(nn.Parameter(torch.zeros(8)) for _ in range(4))
        self.odd = nn.Parameter(torch.zeros(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * sum(self.heads) + self.odd.sum()


def turned(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """As a set of tensors has them: in another order on each rank, and some twice."""
    shift = dist.get_rank() + 1
    return [*params[shift:], *params[:shift], params[dist.get_rank()]]


def chosen(model: nn.Module) -> list[nn.Parameter]:
    return [*model.heads, model.odd, *(block.weight for block in model.blocks)]  # type: ignore[union-attr,misc,list-item]


def fill(model: nn.Module, modifier: int) -> None:
    with GatheredParameters(turned(chosen(model)), modifier_rank=modifier):
        if dist.get_rank() == modifier:
            with torch.no_grad():
                for value, param in enumerate(chosen(model)):
                    param.fill_(float(value))


def values(model: nn.Module) -> list[set[float]]:
    with GatheredParameters(turned(chosen(model))):
        return [set(param.flatten().tolist()) for param in chosen(model)]


def edit(before: bool, stage: int, modifier: int) -> list[list[set[float]]]:
    with Init(enabled=before):
        model = Heads()
    found = []
    if before:
        fill(model, modifier)
        found.append(values(model))
    engine = zerorun.initialize(model, make_config(stage), topology=shared_topology())
    if not before:
        fill(engine.module, modifier)
    found.append(values(engine.module))
    engine.destroy()
    return found


@pytest.mark.parametrize(("world", "modifier"), [(2, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize(("before", "stage"), [(True, 3), (False, 3), (False, 1)])
def test_gathered_parameters_may_come_in_any_order(before: bool, stage: int, world: int, modifier: int) -> None:
    expected = [{float(value)} for value in range(7)]
    for found in run_ranks(world, edit, before, stage, modifier):
        assert all(each == expected for each in found)


def ask_for_others(before: bool) -> list[str]:
    with Init(enabled=before):
        model = Heads()
    engine = None if before else zerorun.initialize(model, make_config(3), topology=shared_topology())
    if engine is not None:
        engine.backward(engine(torch.ones(2, 8)).sum())
    block = model.blocks[dist.get_rank()]
    asked: list[Callable[[], Any]] = [
        lambda: GatheredParameters([model.blocks[0].bias, block.weight]).__enter__(),
        lambda: GatheredParameters(block.weight, modifier_rank=0).__enter__(),
    ]
    if engine is not None:
        asked += [lambda: safe_get_full_grad(block.weight), lambda: safe_get_full_fp32_param(block.weight)]
    messages = []
    for ask in asked:
        try:
            ask()
            messages.append("nothing")
        except OrderError as error:
            messages.append(str(error))
    if engine is not None:
        engine.destroy()
    return messages


@pytest.mark.parametrize("before", [True, False])
def test_other_parameters_on_other_ranks_are_refused(before: bool) -> None:
    first, second = run_ranks(2, ask_for_others, before)
    assert first == second
    for message in first:
        assert "Remedy: give the same parameters on all ranks; their order does not matter." in message
        assert ("of shape (8, 8)" if before else "'blocks.0.weight'") in message


def by_names(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups in the order of a set of names."""
    named = list(model.named_parameters())
    return [{"params": [param], "lr": 0.1} for _, param in (named if dist.get_rank() else reversed(named))]


class Mixed(nn.Module):
    """Members in another order on each rank; ``buffers``: those are buffers."""

    def __init__(self, buffers: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name in ("one", "two") if dist.get_rank() else ("two", "one"):
            value = torch.full((4,), float(len(name) + ord(name[0])))
            if buffers:
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value))


class Crossed(nn.Module):
    """Made in another order on each rank, and named alike."""

    def __init__(self) -> None:
        super().__init__()
        made: dict[str, nn.Module] = {}
        for name in ("one", "two") if dist.get_rank() else ("two", "one"):
            made[name] = nn.Linear(4, 4)
        self.one, self.two = made["one"], made["two"]


def initialize_with(what: str) -> str:
    with Init(enabled=what == "init"):
        model = {"parameters": lambda: Mixed(False), "buffers": lambda: Mixed(True), "init": Crossed}.get(what, Heads)()
    groups = by_names(model) if what == "groups" else None
    try:
        zerorun.initialize(model, make_config(3), model_parameters=groups, topology=shared_topology()).destroy()
    except ZerorunError as error:
        assert isinstance(error, ModelError)
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("parameters", "another model than rank 0: 'one (4,)"),
        ("buffers", "another model than rank 0: 'buffer one (4,)"),
        ("init", "another model than rank 0: 'one.weight (4, 4)"),
        ("groups", "another optimizer than rank 0: 'odd in group 0'"),
    ],
)
def test_a_model_in_another_order_is_refused(what: str, named: str) -> None:
    for message in run_ranks(2, initialize_with, what):
        assert f"rank 1 has {named}" in message
        assert "in the same order" in message
