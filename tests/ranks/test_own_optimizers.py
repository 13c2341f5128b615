"""Optimizers of the user's by their names in the configuration: equal to one process, however the model is divided."""

from __future__ import annotations

from typing import Any

import own_optimizers
import pytest
import reference
import torch
from harness import run_ranks
from models import CASES
from reference import Result, differences, train_reference
from torch import nn
from training import make_config, make_engine, shared_topology, train

import zerorun
from zerorun.errors import ModelError, StepError

STEPS = 3
PARAMS = {"lr": 0.05, "momentum": 0.6}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def config_of(name: str, stage: int, **changes: Any) -> dict[str, Any]:
    optimizer = {"type": f"own_optimizers.{name}", "params": PARAMS}
    return {**make_config(stage, accumulation=2, clip=0.5, **changes), "optimizer": optimizer}


def train_own(case: str, config: dict[str, Any]) -> Result:
    return train(CASES[case], config, STEPS)


ROWS = [
    (name, stage, offload)
    for name in ("Softsign", "UnitRows", "OfVectors", "OneLength", "ByPlace")
    for stage, offload in ((3, False), (2, True), (1, False), (0, False), (3, True))
    if name not in ("OneLength", "ByPlace") or stage == 0  # from stage 1 on it is refused, see below
]


@pytest.mark.each_value
@pytest.mark.parametrize("case", ["plain", "unused_alternating_steps"])
@pytest.mark.parametrize(("name", "stage", "offload"), ROWS)
def test_equals_one_process(name: str, stage: int, offload: bool, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reference.OPTIMIZERS, name, (getattr(own_optimizers, name), PARAMS))
    config = config_of(name, stage, zero_optimization=OFFLOAD if offload else {})
    wanted = train_reference(CASES[case], world_size=2, steps=STEPS, accumulation=2, clip=0.5, optimizer=name)
    for found in run_ranks(2, train_own, case, config):
        assert not differences(found, wanted)


def held() -> tuple[int, list[int]]:
    engine = make_engine(CASES["plain"], config_of("Softsign", 3), topology=shared_topology())
    sizes = [param.numel() for group in engine.optimizer.param_groups for param in group["params"]]
    total = sum(param.numel() for param in CASES["plain"].build().parameters())
    engine.destroy()
    return total, sizes


def test_what_goes_by_elements_is_divided_evenly() -> None:
    (total, first), (_, second) = run_ranks(2, held)
    assert abs(sum(first) - sum(second)) <= 64 * len(first) and sum(first) + sum(second) >= total


def asked(stage: int) -> tuple[dict[str, float], dict[str, torch.Tensor], list[float]]:
    """(norms of gradients, masters that were edited, losses) of a model whose units are one matrix each."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    config = config_of("UnitRows", stage, zero_optimization={"unit_policy": ["Linear"]}, gradient_accumulation_steps=1)
    engine = zerorun.initialize(model, config, topology=shared_topology())
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
    losses = []
    for _ in range(2):
        losses.append(engine(x).square().mean())
        engine.backward(losses[-1])
        norms = zerorun.zero.gradient_norms(engine.module)
        engine.step()
    for param in engine.module.parameters():
        part = zerorun.zero.safe_get_local_fp32_param(param)
        assert part is not None
        zerorun.zero.safe_set_local_fp32_param(param, part * 2)
    losses.append(engine(x).square().mean())
    masters = {n: zerorun.zero.safe_get_full_fp32_param(param) for n, param in engine.module.named_parameters()}
    engine.destroy()
    return norms, masters, [loss.item() for loss in losses]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_units_that_one_rank_has_for_itself(stage: int) -> None:
    """It is asked for them, and what it has is counted, as if the others had some of it."""
    ((norms, masters, losses),) = run_ranks(1, asked, 0)
    for found in run_ranks(2, asked, stage):
        assert found[0] == pytest.approx(norms, rel=1e-5) and found[2] == pytest.approx(losses, rel=1e-5)
        for name, value in masters.items():
            torch.testing.assert_close(found[1][name], value)


def changed(stage: int, kind: str) -> list[torch.Tensor]:
    """Weights after steps of an optimizer that changes its ways in the second one; by one process at stage -1."""
    torch.manual_seed(5)
    model = nn.Linear(6, 4)
    settings = {"warm": 1} if kind == "AfterWarmUp" else {}
    own = type(kind, (getattr(own_optimizers, kind),), settings)
    optimizer = own(model.parameters(), **PARAMS)
    x = torch.randn(4, 3, 6)
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0, "zero_optimization": {"stage": stage}}
    engine = None
    if stage >= 0:
        engine = zerorun.initialize(model, config, optimizer=optimizer, topology=shared_topology())
    for count, batch in enumerate(x):
        if kind == "DecaysMatrices" and count:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        if engine is None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        else:
            engine.backward(engine(batch).square().mean())
            engine.step()
    weights = list((model if engine is None else engine).state_dict().values())
    if engine is not None:
        engine.destroy()
    return weights


@pytest.mark.parametrize("kind", ["DecaysMatrices", "AfterWarmUp"])
def test_what_changes_its_ways_later_equals_one_process(kind: str) -> None:
    (wanted,) = run_ranks(1, changed, -1, kind)
    for stage in (0, 1, 3):
        for found in run_ranks(2, changed, stage, kind):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def switch(stage: int) -> tuple[str, bool, list[float]]:
    """(the error, whether weights are as before the step, losses of steps around it) of a switch that is taken back."""
    torch.manual_seed(6)
    config = {**config_of("Switched", stage), "gradient_accumulation_steps": 1}
    engine, x, losses = zerorun.initialize(nn.Linear(6, 4), config, topology=shared_topology()), torch.randn(3, 6), []

    def train_on(by: str) -> None:
        engine.optimizer.param_groups[0]["by"] = by
        loss = engine(x).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()

    train_on("elements")
    before = engine.state_dict()
    with pytest.raises(StepError) as told:
        train_on("rows")
    same = all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    train_on("elements")
    train_on("elements")
    engine.destroy()
    return str(told.value), same, losses


@pytest.mark.parametrize("stage", [0, 3])
def test_a_switch_to_more_than_it_was_divided_for_is_an_error(stage: int) -> None:
    for text, same, losses in run_ranks(2, switch, stage):
        assert "'by' it looks at whole parameters" in text and same
        assert losses[0] > losses[1] == losses[2] > losses[3]


def refuse() -> None:
    with pytest.raises(ModelError, match=r"OneLength looks at all parameters together.*stage 1 on 2 ranks.*use stage 0"):
        make_engine(CASES["plain"], config_of("OneLength", 1), topology=shared_topology())
    with pytest.raises(ModelError, match=r"AsksOthers asks other ranks in its step\(\) \(c10d.broadcast_.*Remedy"):
        make_engine(CASES["plain"], config_of("AsksOthers", 1), topology=shared_topology())
    with pytest.raises(ModelError, match=r"the state 'factors' of ListedStates has tensors in a list.*state\[parameter\]"):
        make_engine(CASES["plain"], config_of("ListedStates", 1), topology=shared_topology())
    with pytest.raises(ModelError, match="UnitRows needs whole parameters"):
        config = {**config_of("UnitRows", 1), "tensor_parallel": {"size": 2}}
        make_engine(CASES["plain"], config, topology=shared_topology(tensor=2))


def test_what_cannot_be_divided_is_refused() -> None:
    run_ranks(2, refuse)
