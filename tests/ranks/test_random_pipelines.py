"""Random pipelines equal one process: any layers, cuts and shapes, masks and None on the way, stages without parameters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from training import make_config

import zerorun
from zerorun.pipeline.layer_spec import LayerSpec
from zerorun.pipeline.module import PipelineModule

WIDTH, STEPS = 6, 2


class Mix(nn.Module):
    """One layer of a random kind. Its value is {"x": [batch, length, width], ...}; other entries come and go."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("linear", "twice"):
            self.linear = nn.Linear(WIDTH, WIDTH)
        elif kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif kind == "frozen":
            self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        x = value["x"]
        if self.kind in ("linear", "frozen"):
            x = torch.tanh(self.linear(x))
        elif self.kind == "twice":
            x = x + self.linear(torch.relu(self.linear(x)))
        elif self.kind == "norm":
            x = self.norm(x)
        elif self.kind == "mask":
            return {**value, "mask": x.detach()[..., 0] > 0, "nothing": None}
        elif self.kind == "use":
            x = x * 0.5 if value.get("mask") is None else x * value["mask"].unsqueeze(-1)
        elif self.kind == "shorter":
            x, value = x[:, : max(x.shape[1] - 1, 1)], {key: item for key, item in value.items() if key != "mask"}
        elif self.kind == "aside":  # a second tensor with a graph, and one that is not used any more
            return {**value, "aside": (x.mean(1, keepdim=True), [x * 2, 3]), "x": x}
        elif self.kind == "add" and "aside" in value:
            x = x + value["aside"][0]
        return {**value, "x": x}


def scale(value: dict[str, Any]) -> dict[str, Any]:
    """A layer that is no module."""
    return {**value, "x": value["x"] * 1.5}


KINDS = ("linear", "twice", "norm", "frozen", "mask", "use", "shorter", "aside", "add", "function")


def build(kinds: list[str], **options: Any) -> PipelineModule:
    torch.manual_seed(2)
    layers: list[Any] = [scale if kind == "function" else LayerSpec(Mix, kind) for kind in kinds]
    return PipelineModule(
        layers, loss_fn=lambda value, labels: (value["x"].mean((1, 2)) - labels).square().mean(), **options
    )


def batches(seed: int, accumulation: int) -> Iterator[Any]:
    """Shapes differ from one micro-batch to the next."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(STEPS * accumulation):
        size = rng.randint(1, 3)
        x = torch.randn(size, rng.randint(1, 5), WIDTH, generator=generator)
        yield {"x": x, "mask": None}, torch.randn(size, generator=generator)


def train(
    kinds: list[str], cut: list[int], chunks: int, config: dict[str, Any], seed: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    stages = (len(cut) - 1) // chunks
    engine = zerorun.initialize(build(kinds, num_stages=stages, partition_method=cut, chunks=chunks), config)
    data = batches(seed, engine.gradient_accumulation_steps())
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    module = engine.module
    engine.destroy()
    return losses, {name: value.detach().clone() for name, value in module.named_parameters()}


def reference(kinds: list[str], accumulation: int, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, data, losses = build(kinds, num_stages=1), batches(seed, accumulation), []
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        total = 0.0
        for _ in range(accumulation):
            batch = next(data)
            loss = model.loss_of(model(model.inputs_of(batch)), batch) / accumulation
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach() for name, value in model.named_parameters()}


RANDOM: dict[str, st.SearchStrategy[Any]] = {
    "kinds": st.lists(st.sampled_from(KINDS), min_size=1, max_size=8),
    "stages": st.sampled_from((2, 3)),
    "accumulation": st.integers(1, 5),
    "stage": st.integers(0, 3),
    "schedule": st.sampled_from(("1f1b", "gpipe", "interleaved", "zero_bubble")),
    "cuts": st.randoms(use_true_random=False),
}
some = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@some
@given(**RANDOM)
def test_random_pipelines_equal_one_process(**random_: Any) -> None:
    check(**random_)


@pytest.mark.nightly
@settings(some, max_examples=25)
@given(**RANDOM)
def test_more_random_pipelines_equal_one_process(**random_: Any) -> None:
    check(**random_)


def check(kinds: list[str], stages: int, accumulation: int, stage: int, schedule: str, cuts: random.Random) -> None:
    kinds = ["linear", *kinds]
    chunks = 2 if schedule == "interleaved" else 1
    inner = sorted(cuts.randint(0, len(kinds)) for _ in range(stages * chunks - 1))
    seed = cuts.randint(0, 1000)
    config = make_config(stage, accumulation=accumulation, optimizer="SGD")
    config["pipeline"] = {"schedule": schedule, "chunks": chunks}
    losses, weights = reference(kinds, accumulation, seed)
    found = run_ranks(stages, train, kinds, [0, *inner, len(kinds)], chunks, config, seed)
    seen = set()
    for theirs, parts in found:
        torch.testing.assert_close(torch.tensor(theirs), torch.tensor(losses), rtol=2e-6, atol=1e-7)
        for name, value in parts.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)
        seen.update(parts)
    assert seen == set(weights)
