"""LAMB: equal to the formulas, parameter by parameter in one process, however the model is divided."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from harness import run_ranks
from models import CASES
from reference import Result, differences, train_reference
from training import make_config, make_engine, shared_topology, train

from zerorun.errors import ModelError
from zerorun.optim.lamb import Lamb

STEPS = 4
PARAMS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1, "max_coeff": 2.0, "min_coeff": 0.05}


class PlainLamb(torch.optim.Optimizer):
    """The formulas, in fp64 and one parameter after the other."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"bias_correction": True, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad.double()
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * grad
                v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * grad * grad
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * param.double()
                ratio = float(param.double().norm() / update.norm())
                ratio = min(max(ratio, group["min_coeff"]), group["max_coeff"])
                if group["bias_correction"]:
                    ratio *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
                param.copy_(param.double() - lr * ratio * update)


def config_of(stage: int, **changes: Any) -> dict[str, Any]:
    return {**make_config(stage, accumulation=2, clip=0.5, **changes), "optimizer": {"type": "Lamb", "params": PARAMS}}


def train_lamb(case: str, config: dict[str, Any]) -> Result:
    return train(CASES[case], config, STEPS)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reference.OPTIMIZERS, "Lamb", (PlainLamb, PARAMS))


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.each_value
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ["plain", "unused_alternating_steps"])
@pytest.mark.parametrize(("stage", "offload"), [(3, False), (2, True), (1, False), (0, False), (3, True)])
@pytest.mark.usefixtures("plain")
def test_equals_one_process(stage: int, offload: bool, case: str, world: int) -> None:
    config = config_of(stage, zero_optimization=OFFLOAD if offload else {})
    wanted = train_reference(CASES[case], world_size=world, steps=STEPS, accumulation=2, clip=0.5, optimizer="Lamb")
    for found in run_ranks(world, train_lamb, case, config):
        assert not differences(found, wanted)


def refuse_tensor_ranks() -> None:
    config = {**config_of(1), "tensor_parallel": {"size": 2}}
    with pytest.raises(ModelError, match="Lamb needs whole parameters"):
        make_engine(CASES["plain"], config, topology=shared_topology(tensor=2))


def test_tensor_ranks_have_parts_only() -> None:
    run_ranks(2, refuse_tensor_ranks)


def test_settings() -> None:
    """A parameter of zeros moves by its plain direction, and the bias is corrected unless it is not to be."""
    for corrected in (True, False):
        weight = torch.zeros(3, requires_grad=True)
        weight.grad = torch.tensor([1.0, -2.0, 4.0])
        Lamb([weight], lr=0.5, betas=(0.9, 0.99), eps=0.0, bias_correction=corrected).step()
        length = 0.5 * (1.0 if corrected else 0.1 / math.sqrt(0.01))
        torch.testing.assert_close(weight.detach(), torch.tensor([-length, length, -length]))
    with pytest.raises(ValueError, match="min_coeff"):
        Lamb([weight], min_coeff=2.0, max_coeff=1.0)
    with pytest.raises(ValueError, match="out of range"):
        Lamb([weight], betas=(1.0, 0.9))
