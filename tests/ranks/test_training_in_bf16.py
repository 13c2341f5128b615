"""Masters, gradients and optimizer states in bf16: the same bits at every stage, on any number of ranks and wherever states
are, in memory as estimated; checkpoints between all of these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from torch import nn
from training import make_config, merged, shared_topology

import zerorun
from zerorun.ops.rounding import MasterFormat, Origin, join
from zerorun.ops.single_pass import Adam
from zerorun.ops.state_format import StateFormat

STEPS = 4
PARAMS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
PURE = {"bf16_master_weights_and_grads": True}
STATES = {"bf16_optimizer_states": True}

# What is kept in bf16 -> keys of the section, bytes per parameter of master and weight, gradient, and states.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "8 bytes": ({**PURE, **STATES}, (2, 2, 4)),
    "8 bytes, nearest": ({**PURE, **STATES, "rounding": "nearest"}, (2, 2, 4)),
    "10 bytes, Kahan": ({**PURE, **STATES, "rounding": "kahan"}, (4, 2, 4)),
    "12 bytes, masters and gradients": (PURE, (2, 2, 8)),
    "14 bytes, states": (STATES, (6, 4, 4)),
    "16 bytes, remainders": ({"store_param_remainders": True}, (4, 4, 8)),
    "12 bytes, remainders and states": ({"store_param_remainders": True, **STATES}, (4, 4, 4)),
}


class Net(nn.Module):
    """Sizes that no number of ranks divides, and a weight that two modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 51), nn.Tanh(), nn.Linear(51, 24)) for _ in range(3))
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net() -> nn.Module:
    torch.manual_seed(5)
    return Net()


def loss_of(model: Any, step: int) -> torch.Tensor:
    """The same on every rank, so that the mean over two or four ranks has the bits of one."""
    ids = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def config_of(stage: int, kind: str, **changes: Any) -> dict[str, Any]:
    own = {"optimizer": {"type": "AdamW", "params": PARAMS}, "bf16": {"enabled": True, **KINDS[kind][0]}, "seed": 3}
    return merged(merged(make_config(stage), own), changes)


def steps(engine: zerorun.Engine, first: int = 0, count: int = STEPS) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plain(kind: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Training in one process, parameter by parameter: (losses, weights, values of masters)."""
    section, model = KINDS[kind][0], net()
    pure, remainders = "bf16_master_weights_and_grads" in section, "store_param_remainders" in section
    nearest, kahan = (section.get("rounding") == name for name in ("nearest", "kahan"))
    names = dict(model.named_parameters())
    masters = {name: param.detach().clone() for name, param in names.items()}
    rests: dict[str, torch.Tensor | None] = dict.fromkeys(names)
    model = model.bfloat16()
    if pure or remainders:
        form = MasterFormat.REMAINDER if remainders else MasterFormat.KAHAN if kahan else MasterFormat.BF16
        for name, value in masters.items():
            own, rest = form.parts(value.reshape(-1))
            masters[name], rests[name] = own.view(value.shape), rest
            names[name].data.copy_(masters[name])
    optimizer = Adam(list(masters.values()), **PARAMS)
    for name, master in masters.items():
        optimizer.formats[master] = StateFormat.BF16 if "bf16_optimizer_states" in section else StateFormat.FP32
        if rests[name] is not None:
            optimizer.rests[master] = rests[name]
        if not nearest and (pure or "bf16_optimizer_states" in section):
            optimizer.origins[master] = (Origin(0, master.numel(), name, seed=3),)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        for name, param in names.items():
            assert param.grad is not None
            optimizer.gradients[masters[name]] = param.grad
        optimizer.step()
        for name, param in names.items():
            param.data.copy_(masters[name])
            param.grad = None
        losses.append(loss.item())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    exact = {name: join(master.reshape(-1), rests[name]).view(master.shape) for name, master in masters.items()}
    return losses, weights, exact


def states_of(engine: zerorun.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in engine.module.named_parameters():
        found[f"master {name}"] = zerorun.zero.safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} {name}"] = zerorun.zero.safe_get_full_optimizer_state(param, key)
    return found


def train(config: dict[str, Any]) -> dict[str, Any]:
    engine = zerorun.initialize(net(), config, topology=shared_topology(config["zero_optimization"].get("shard_degree")))
    losses = steps(engine)
    found = {
        "losses": losses,
        "states": states_of(engine),
        "report": engine.memory_report(),
        "weights": engine.state_dict(),
        "described": engine.describe(),
    }
    engine.destroy()
    return found


ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    **{f"stage {stage}, offload": (stage, {"offload_optimizer": {"device": "cpu"}}) for stage in (1, 2, 3)},
    "stage 3, offload all": (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "stage 2, disk": (2, {"offload_optimizer": {"device": "nvme", "nvme_path": "?"}}),
    "stage 3, disk": (3, {"offload_optimizer": {"device": "nvme", "nvme_path": "?"}}),
    "stage 3, hybrid": (3, {"shard_degree": 2}),
}


def settings(row: str, kind: str, folder: Path) -> dict[str, Any]:
    stage, changes = ROWS[row]
    config = config_of(stage, kind, gradient_clipping=0.0, zero_optimization=changes)
    if "disk" in row:
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder)
    return config


@pytest.mark.each_value
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_same_bits_as_in_one_process_torchtune_2254(row: str, kind: str, ranks: int, tmp_path: Path) -> None:
    """Noise goes by positions in whole parameters, and never by what a rank has of them."""
    if "hybrid" in row:
        ranks = 4
    losses, weights, exact = plain(kind)
    config = settings(row, kind, tmp_path)
    estimate = zerorun.estimate_memory(net(), config, ranks, device="cpu", ranks_per_node=ranks)
    found = run_ranks(ranks, train, config)
    for rank in found:
        assert rank["losses"] == losses
        for name, value in weights.items():
            assert torch.equal(rank["weights"][name], value), name
    for name, value in exact.items():
        assert torch.equal(found[0]["states"][f"master {name}"], value), name
    heaviest = max(found, key=lambda rank: sum(rank["report"].values()))
    assert {key: size for key, size in heaviest["report"].items() if size} == {
        key: size for key, size in estimate.kinds.items() if size
    }
    assert sum(heaviest["report"].values()) <= 1.01 * sum(sum(rank["report"].values()) for rank in found) / ranks
