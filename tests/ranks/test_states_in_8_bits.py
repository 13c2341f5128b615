"""Adam in 8 bits: the same bits at every stage, on any number of ranks and wherever states are, in memory as estimated."""

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
from zerorun.ops.single_pass import Adam8bit
from zerorun.ops.state_format import BLOCK, StateFormat, wide_state

STEPS = 4
PARAMS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}


class Body(nn.Module):
    """67 * 65 elements end within a block of 256; 96 * 64 at the end of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.odd, self.down = nn.Linear(64, 67), nn.Linear(67, 96), nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.odd(torch.tanh(self.up(x)))))


class Net(nn.Module):
    """An embedding that is large enough for 8 bits but for its role, blocks, and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(80, 64)
        self.blocks = nn.ModuleList(Body() for _ in range(2))
        self.head = nn.Linear(64, 80, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(tied: bool = False) -> nn.Module:
    torch.manual_seed(5)
    return Net(tied)


def loss_of(model: Any, step: int) -> torch.Tensor:
    """The same on every rank, so that the mean over ranks has the bits of one."""
    ids = torch.randint(80, (2, 9), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def config_of(stage: int, **changes: Any) -> dict[str, Any]:
    return merged(make_config(stage), merged({"optimizer": {"type": "AdamW8bit", "params": PARAMS}}, changes))


def steps(engine: zerorun.Engine, first: int = 0, count: int = STEPS) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plain(tied: bool = False) -> tuple[list[float], dict[str, torch.Tensor], Adam8bit, nn.Module]:
    """Training in one process, parameter by parameter."""
    model = net(tied)
    optimizer = Adam8bit(model.parameters(), **PARAMS)
    optimizer.formats[model.embed.weight] = StateFormat.FP32
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, optimizer, model


def states_of(engine: zerorun.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for key in ("exp_avg", "exp_avg_sq"):
        for name, param in engine.module.named_parameters():
            value = zerorun.zero.safe_get_full_optimizer_state(param, key)
            assert value is not None
            found[f"{key} {name}"] = value
    return found


def train(config: dict[str, Any], tied: bool) -> dict[str, Any]:
    engine = zerorun.initialize(
        net(tied), config, topology=shared_topology(config["zero_optimization"].get("shard_degree"))
    )
    losses = steps(engine)
    found = {
        "losses": losses,
        "states": states_of(engine),
        "report": engine.memory_report(),
        "weights": engine.state_dict(),
    }
    kept = [engine.sharded.optimizer.state[piece.tensor] for piece in engine.sharded.pieces]
    found["bytes"] = sum(v.nbytes for state in kept for v in state.values() if v.dim())
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


def settings(row: str, folder: Path) -> dict[str, Any]:
    stage, changes = ROWS[row]
    config = config_of(stage, zero_optimization=changes)
    if "disk" in row:
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder)
    return config


@pytest.mark.each_value
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_same_bits_as_in_one_process_ao_4912(row: str, ranks: int, tmp_path: Path) -> None:
    """Which states have 8 bits, and their blocks, go by whole parameters, and never by what a rank has of them."""
    if "hybrid" in row and ranks < 4:
        ranks = 4
    losses, weights, optimizer, model = plain()
    config = settings(row, tmp_path)
    estimate = zerorun.estimate_memory(net(), config, ranks, device="cpu", ranks_per_node=ranks)
    found = run_ranks(ranks, train, config, False)
    for rank in found:
        assert rank["losses"] == losses
        for name, value in weights.items():
            assert torch.equal(rank["weights"][name], value), name
    names = {id(param): name for name, param in model.named_parameters()}
    for param, states in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            wanted = wide_state(states, key)
            assert torch.equal(found[0]["states"][f"{key} {names[id(param)]}"], wanted)
    moments = {kind: size for kind, size in estimate.kinds.items() if kind.endswith("moments")}
    shown = {kind: max(rank["report"].get(kind, 0) for rank in found) for kind in moments}
    assert shown == moments and sum(moments.values()) == max(rank["bytes"] for rank in found)
    heaviest = max(found, key=lambda rank: rank["bytes"])
    assert {kind: heaviest["report"].get(kind, 0) for kind in estimate.kinds} == dict(estimate.kinds)


def test_embeddings_and_tied_heads_have_fp32_states() -> None:
    losses, weights, _, _ = plain(tied=True)
    found = run_ranks(2, train, config_of(3), True)[0]
    assert found["losses"] == losses
    assert all(torch.equal(found["weights"][name], value) for name, value in weights.items())


def test_bytes_of_states() -> None:
    """2 * 65/64 bytes for a parameter in blocks, 8 for others; 8 bits for embeddings, too, if that is asked for."""
    counts = {name: param.numel() for name, param in net().named_parameters()}
    for embeddings, least in ((True, 4096), (False, 4096), (False, 0)):
        config = config_of(0, optimizer={"params": {"fp32_embeddings": embeddings, "min_8bit_size": least}})
        kinds = zerorun.estimate_memory(net(), config, 1, device="cpu").kinds
        wanted = 0
        for name, numel in counts.items():
            small = numel < least or (embeddings and "embed" in name)
            blocks = -(-numel // BLOCK)
            wanted += 8 * numel if small else 2 * (BLOCK * blocks if numel % BLOCK else numel) + 8 * blocks
        assert abs(kinds["moments"] - wanted) <= 16 * 8 * len(counts)  # parameters in fp32 begin at multiples of 16
