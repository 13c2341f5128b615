"""What scripts say about units: parameters that modules elsewhere use, and modules that are gathered whole."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import VOCAB, WIDTH, Case, Expert, Gpt, Mlp, token_loss, tokens
from reference import Result, differences, train_reference
from torch import nn
from torch.nn.functional import linear
from training import make_config, make_engine, train

from zerorun import zero
from zerorun.errors import ConfigError, ModelError, ReleasedParameterError

STEPS = 2


class Borrower(Mlp):
    """A block that also uses the weight of ``lender``, a block before or after it."""

    lender: tuple[Mlp, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.lender[0].up.weight
        return super().forward(x) + 0.3 * linear(torch.tanh(linear(x, weight)), weight.t())


class Lending(Gpt):
    def __init__(self, borrower: int, lender: int, *, registered: bool) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Borrower() if i == borrower else Mlp() for i in range(3))
        block: Any = self.blocks[borrower]
        block.lender = (self.blocks[lender],)
        if registered:
            zero.register_external_parameter(block, block.lender[0].up.weight)


def lending(borrower: int, lender: int, *, registered: bool = True) -> Case:
    return Case("lending", lambda: Lending(borrower, lender, registered=registered), classes=("Mlp", "Borrower"))


def train_lending(borrower: int, lender: int, stage: int, registered: bool) -> Result:
    config = make_config(stage, accumulation=2, zero_optimization={"unit_policy": ["Mlp", "Borrower"]})
    return train(lending(borrower, lender, registered=registered), config, STEPS)


@cache
def one_process(borrower: int, lender: int) -> Result:
    return train_reference(lending(borrower, lender), world_size=2, steps=STEPS, accumulation=2)


@pytest.mark.each_value
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
@pytest.mark.parametrize(("borrower", "lender"), [(2, 0), (0, 2)])
def test_registered_parameters_may_be_used_anywhere(stage: int, borrower: int, lender: int) -> None:
    for found in run_ranks(2, train_lending, borrower, lender, stage, True):
        assert not differences(found, one_process(borrower, lender))


@pytest.mark.each_value
@pytest.mark.parametrize("stage", [2, 1, 0])
@pytest.mark.parametrize(("borrower", "lender"), [(2, 0), (0, 2)])
def test_below_stage_3_nobody_has_to_register(stage: int, borrower: int, lender: int) -> None:
    for found in run_ranks(2, train_lending, borrower, lender, stage, False):
        assert not differences(found, one_process(borrower, lender))


def use_unregistered(borrower: int, lender: int) -> None:
    case = lending(borrower, lender, registered=False)
    engine = make_engine(case, make_config(3, zero_optimization={"unit_policy": ["Mlp", "Borrower"]}))
    with pytest.raises(ReleasedParameterError, match=rf"blocks\.{lender}\.up\.weight"):
        token_loss(engine, torch.zeros(2, 9, dtype=torch.long))
    block: Any = engine.module.blocks[borrower]
    with pytest.raises(ModelError, match="before initialize"):
        zero.register_external_parameter(block, block.lender[0].up.weight)
    engine.destroy()


@pytest.mark.parametrize(("borrower", "lender"), [(2, 0), (0, 2)])
def test_at_stage_3_an_error_names_what_is_not_registered(borrower: int, lender: int) -> None:
    run_ranks(2, use_unregistered, borrower, lender)


# -- leaves ------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A layer of experts, of which each rank runs another one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 5)
        self.experts = nn.ModuleList(Expert() for _ in range(5))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate = self.router(x).softmax(-1)[..., expert : expert + 1]
        return x + gate * self.experts[expert](x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.layer = Experts()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, expert: int) -> torch.Tensor:
        x = self.blocks[0](self.embed(ids))
        return self.head(self.blocks[1](self.layer(x, expert)))


def marked() -> nn.Module:
    model = Mixture()
    zero.set_z3_leaf_modules(model, [Experts])
    return model


def mixture(make: type[nn.Module] | Any) -> Case:
    return Case("mixture", make, lambda m, p: token_loss(m, tokens(p), expert=(p.rank + 2 * p.step) % 5))


HOW: dict[str, tuple[Any, dict[str, Any]]] = {
    "marked": (marked, {}),
    "class": (Mixture, {"classes": ["Experts"]}),
    "name": (Mixture, {"names": ["layer"]}),
    "end of the name": (Mixture, {"name_suffixes": ["ayer"]}),
}


def train_mixture(how: str, stage: int) -> tuple[Result, list[str], list[str]]:
    make, section = HOW[how]
    config = make_config(stage, accumulation=2, zero_optimization={"leaf_module": section})
    found = train(mixture(make), config, STEPS)
    engine, without = make_engine(mixture(make), config), make_engine(mixture(Mixture), make_config(stage))
    assert sum(len(flat_group.params) for flat_group in engine.units[-1].flat_groups) == 2 + 5 * 4
    assert zero.get_z3_leaf_modules(engine.module) == [engine.module.layer]
    names = [unit.name for unit in engine.units]
    others = [unit.name for unit in without.units]
    if how != "marked" and stage == 3:
        with pytest.raises(ModelError, match="before"):
            zero.set_z3_leaf_modules(without.module, [Experts])
    engine.destroy()
    without.destroy()
    return found, names, others


@pytest.mark.each_value
@pytest.mark.parametrize("stage", [3, 2])
@pytest.mark.parametrize("how", HOW)
def test_experts_in_a_leaf_equal_one_process(how: str, stage: int) -> None:
    wanted = train_reference(mixture(Mixture), world_size=2, steps=STEPS, accumulation=2)
    for found, names, others in run_ranks(2, train_mixture, how, stage):
        assert names == ["root", "blocks.0", "blocks.1", "layer"]
        assert others == ["root", "blocks.0", "blocks.1", *(f"layer.experts.{i}" for i in range(5))]
        assert not differences(found, wanted)


def refuse_a_list() -> None:
    config = make_config(3, zero_optimization={"leaf_module": {"names": ["layer.experts"]}})
    with pytest.raises(ConfigError, match="no forward"):
        make_engine(mixture(Mixture), config)


def test_a_list_cannot_be_a_leaf() -> None:
    run_ranks(1, refuse_a_list)
