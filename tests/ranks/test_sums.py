"""Optimizers that go by sums, on flat shards: equal to their formulas on whole parameters in one process.

However the model is divided. Given 1-D slices as if they were parameters, Adafactor has stopped learning elsewhere
(DeepSpeed's pull request 2152, pytorch#109581).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from harness import run_ranks
from models import CASES
from reference import Result, differences, train_reference
from training import make_config, train

from zerorun.optim.lamb import Lamb

STEPS = 4
LAMB = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1, "max_coeff": 2.0, "min_coeff": 0.05}


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


# eps keeps Adafactor from magnifying the rounding of gradients that are nearly zero.
ADAFACTOR = {"lr": 0.05, "eps": (1e-3, 1e-3), "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Lamb": (PlainLamb, LAMB),
    "Adafactor": (torch.optim.Adafactor, ADAFACTOR),
}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, optimizer in OPTIMIZERS.items():
        monkeypatch.setitem(reference.OPTIMIZERS, name, optimizer)


def config_of(optimizer: str, stage: int, **changes: Any) -> dict[str, Any]:
    config = make_config(stage, accumulation=2, clip=0.5, **changes)
    return {**config, "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer][1]}}


def train_case(case: str, config: dict[str, Any]) -> Result:
    return train(CASES[case], config, STEPS)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (0, {}),
    "1": (1, {}),
    "2 offloaded": (2, OFFLOAD),
    "3": (3, {}),
    "3 offloaded": (3, OFFLOAD),
    "3 half offloaded": (3, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    "2 hybrid": (2, {"shard_degree": 2}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("world", [4, 2])
@pytest.mark.parametrize("case", ["plain", "unused_alternating_steps", "tied", "two_groups"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("plain")
def test_equals_one_process(way: str, optimizer: str, case: str, world: int) -> None:
    stage, zero = WAYS[way]
    wanted = train_reference(CASES[case], world_size=world, steps=STEPS, accumulation=2, clip=0.5, optimizer=optimizer)
    for found in run_ranks(world, train_case, case, config_of(optimizer, stage, zero_optimization=zero)):
        assert not differences(found, wanted)


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
