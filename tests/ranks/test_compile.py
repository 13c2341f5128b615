"""engine.compile(): every unit's forward compiled, hooks outside the graphs, the same training as eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import Gpt, Place, token_loss, tokens
from training import make_config, shared_topology

import zerorun

_compiled: list[Any] = []


def counting_backend(graph: Any, inputs: Any) -> Any:
    """Runs the graph as it is, and counts how many were made."""
    _compiled.append(graph)
    return graph.forward


def train(stage: int, backend: Any, steps: int) -> tuple[list[float], list[int]]:
    """(losses, graphs compiled after each step)."""
    torch._dynamo.reset()
    _compiled.clear()
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage, clip=1.0), topology=shared_topology())
    if backend is not None:
        engine.compile(backend=counting_backend if backend == "counting" else backend)
    losses, graphs = [], []
    for step in range(steps):
        loss = token_loss(engine, tokens(Place(dist.get_rank(), step)))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        graphs.append(len(_compiled))
    engine.destroy()
    torch._dynamo.reset()
    return losses, graphs


@pytest.mark.parametrize("stage", range(4))
def test_compiled_equals_eager_and_is_not_compiled_again(stage: int) -> None:
    eager = run_ranks(2, train, stage, None, 5)
    for (losses, graphs), (expected, _) in zip(run_ranks(2, train, stage, "counting", 5), eager, strict=True):
        assert losses == expected
        assert graphs[0] > 0, "nothing was compiled"
        assert graphs[-1] == graphs[1], "units were compiled again after the second step"


def test_inductor_at_stage_3() -> None:
    eager = run_ranks(2, train, 3, None, 3)
    for (losses, _), (expected, _) in zip(run_ranks(2, train, 3, "inductor", 3, timeout_s=240.0), eager, strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
