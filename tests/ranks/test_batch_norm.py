"""BatchNorm: a note that statistics are each rank's own; and its remedy, SyncBatchNorm, beside one process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import distance
from torch import nn
from torch.distributed.nn.functional import all_reduce
from training import make_config, shared_topology

import zerorun
from zerorun import log

STEPS = 3


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def synchronised(self: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    """SyncBatchNorm's forward in training, in operations that a CPU has: torch's own are made for GPUs only."""
    dims, count = [d for d in range(x.dim()) if d != 1], x.numel() // x.shape[1] * dist.get_world_size()
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    mean = all_reduce(x.sum(dims)) / count
    variance = all_reduce((x - mean.view(shape)).square().sum(dims)) / count
    with torch.no_grad():
        self.running_mean.lerp_(mean, self.momentum)  # type: ignore[union-attr,arg-type]
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)  # type: ignore[union-attr,arg-type]
        self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
    scaled = (x - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
    return scaled * self.weight.view(shape) + self.bias.view(shape)


def build() -> Normed:
    torch.manual_seed(0)
    return Normed()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


def train(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    usual, nn.SyncBatchNorm.forward = nn.SyncBatchNorm.forward, synchronised  # type: ignore[method-assign]
    try:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(build())
        engine = zerorun.initialize(model, make_config(stage, optimizer="SGD"), topology=shared_topology())
        losses = []
        for step in range(STEPS):
            loss = engine(batch(dist.get_rank(), step)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found = engine.state_dict()
        engine.destroy()
    finally:
        nn.SyncBatchNorm.forward = usual  # type: ignore[method-assign]
    return losses, found


@pytest.mark.parametrize("stage", range(4))
def test_sync_batch_norm_equals_one_process_that_sees_all_samples(stage: int) -> None:
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        both = module(torch.cat([batch(rank, step) for rank in range(2)])).square().flatten(1).mean(1).view(2, -1).mean(1)
        both.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(both.tolist())
    for rank, (found, state) in enumerate(run_ranks(2, train, stage)):
        assert found == pytest.approx([row[rank] for row in losses], rel=1e-5)
        assert max(distance(state[name].float(), value.float()) for name, value in module.state_dict().items()) < 1e-5


def notes_of(how: str) -> list[str]:
    model = build()
    if how == "eval":
        model.eval()
    if how == "converted":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if how == "none":
        model = nn.Sequential(nn.Linear(2, 2))  # type: ignore[assignment]
    log._warned.clear()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    log.logger.addHandler(handler)
    try:
        topology: Any = shared_topology()
        zerorun.initialize(model, make_config(1), topology=topology).destroy()
    finally:
        log.logger.removeHandler(handler)
    return [record.getMessage() for record in records if "BatchNorm" in record.getMessage()]


@pytest.mark.parametrize(
    ("how", "world", "count"), [("", 2, 1), ("", 1, 0), ("eval", 2, 0), ("converted", 2, 0), ("none", 2, 0)]
)
def test_statistics_of_each_rank_are_noted_once(how: str, world: int, count: int) -> None:
    found = run_ranks(world, notes_of, how)
    assert [len(notes) for notes in found] == [count, *[0] * (world - 1)]
    for note in found[0]:
        assert "'blocks.0.1'" in note and "convert_sync_batchnorm(model)" in note
