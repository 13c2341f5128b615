"""Tensor parallelism on ranks: every stage gives the run of one process, in losses, norms and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.nn import functional
from training import make_config

import zerorun
from zerorun.tensor_parallel.collectives import Region, make_region
from zerorun.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 17, 12, 5, 2, 3


class Block(nn.Module):
    """``region``: None for ordinary layers."""

    def __init__(self, region: Region | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        if region is None:
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        else:
            self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, region=region)
            self.down = RowParallelLinear(4 * WIDTH, WIDTH, region=region)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, region: Region | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = (
            nn.Embedding(VOCABULARY, WIDTH) if region is None else VocabParallelEmbedding(VOCABULARY, WIDTH, region=region)
        )
        self.blocks = nn.ModuleList(Block(region) for _ in range(3))
        if region is None:
            self.head = nn.Linear(WIDTH, VOCABULARY)
        else:
            self.head = ColumnParallelLinear(WIDTH, VOCABULARY, region=region, gather_output=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def tokens_of(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def reference(data: int, accumulation: int, clip: float) -> dict[str, Any]:
    model = Model(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.1)
    norms, losses = [], []
    for step in range(STEPS):
        batches = [tokens_of(step, micro, rank) for micro in range(accumulation) for rank in range(data)]
        found = torch.stack([loss_of(model(tokens[:, :-1]), tokens) for tokens in batches])
        found.mean().backward()
        losses.append(float(found.mean()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {n: v.detach() for n, v in model.state_dict().items()}}


def train(stage: int, tensor: int, accumulation: int, clip: float, changes: dict[str, Any]) -> dict[str, Any]:
    topology = zerorun.Topology.create(
        dist.get_world_size(),
        dist.get_rank(),
        tensor=tensor,
        device_type="cpu",
        shard_degree=changes.get("zero_optimization", {}).get("shard_degree"),
    )
    model = Model(make_region(topology, torch.device("cpu")))
    engine = zerorun.initialize(
        model, make_config(stage, accumulation=accumulation, clip=clip, **changes), topology=topology
    )
    norms, losses = [], []
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            tokens = tokens_of(step, micro, topology.data_parallel_rank)
            loss = loss_of(engine(tokens[:, :-1]).float(), tokens)
            total += float(loss)
            engine.backward(loss)
            engine.step()
        losses.append(total / accumulation)
        norms.append(engine.get_global_grad_norm())
    weights = engine.state_dict()
    traffic = engine.communication_report()
    engine.destroy()
    topology.close()
    return {"losses": losses, "norms": norms, "weights": weights, "traffic": traffic, "rank": topology.data_parallel_rank}


def compare(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    ranks = {result["rank"]: result["losses"] for result in found}
    means = [sum(column) / len(column) for column in zip(*ranks.values(), strict=True)]
    torch.testing.assert_close(torch.tensor(means), torch.tensor(expected["losses"]), rtol=1e-6, atol=0)
    for result in found:
        torch.testing.assert_close(torch.tensor(result["norms"]), torch.tensor(expected["norms"]), rtol=1e-6, atol=0)
        torch.testing.assert_close(result["weights"], expected["weights"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize(("world", "tensor"), ((2, 2), (3, 3), (4, 2), (4, 4)))
def test_equals_one_process(stage: int, world: int, tensor: int) -> None:
    accumulation, clip = (3, 0.0) if world == 2 else (1, 0.5)
    found = run_ranks(world, train, stage, tensor, accumulation, clip, {})
    compare(found, reference(world // tensor, accumulation, clip))


@pytest.mark.parametrize("stage", (1, 3))
def test_hybrid_sharding_and_offload(stage: int) -> None:
    changes: dict[str, Any] = {"zero_optimization": {"shard_degree": 2, "offload_optimizer": {"device": "cpu"}}}
    compare(run_ranks(8, train, stage, 2, 1, 0.5, changes), reference(4, 1, 0.5))
