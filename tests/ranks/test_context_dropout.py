"""Dropout where ranks divide sequences: each draws numbers of its own, from one seed, as often as one process drops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contexts import llama, plain
from harness import run_ranks
from torch import nn
from training import make_config, merged

import zerorun

DROPPED, TOKENS, WIDTH = 0.25, 64, 32


class Dropping(nn.Module):
    """Notes what a dropout layer inside a block drops."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(DROPPED)
        self.dropped: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dropped.append(self.dropout(torch.ones_like(x)) == 0)
        return self.dropout(self.inner(x))


def draw(tensor: int, policy: str) -> dict[str, Any]:
    model: Any = llama(attention_dropout=DROPPED, num_key_value_heads=4)
    layer = model.model.layers[1]
    layer.mlp = Dropping(layer.mlp)
    torch.manual_seed(3)
    config = {"sequence_parallel_size": 2, "tensor_parallel": {"size": tensor}, "seed": 1}
    config |= {"activation_checkpointing": {"policy": policy}}
    engine = zerorun.initialize(model, merged(make_config(1), config))
    engine.train()
    before = torch.randint(1000, ())
    loss = engine(**plain(torch.Generator().manual_seed(0), TOKENS)).loss
    after = torch.randint(1000, ())
    engine.backward(loss)
    engine.step()
    first = layer.mlp.dropped
    found = {"dropped": first[0], "again": first[-1], "outside": (int(before), int(after)), "loss": loss.item()}
    place = engine.topology.context_rank
    engine.destroy()
    return {**found, "place": place}


@pytest.mark.parametrize(("tensor", "policy"), [(1, "full"), pytest.param(2, "none", marks=pytest.mark.nightly)])
def test_ranks_of_a_context_drop_other_elements(tensor: int, policy: str) -> None:
    found = run_ranks(2 * tensor, draw, tensor, policy)
    assert len({result["outside"] for result in found}) == 1  # outside of blocks all draw the same
    assert len({result["loss"] for result in found}) == 1
    for result in found:
        share = result["dropped"].float().mean().item()
        spread = math.sqrt(DROPPED * (1 - DROPPED) / result["dropped"].numel())
        assert abs(share - DROPPED) < 4 * spread
        assert torch.equal(result["dropped"], result["again"])  # a recomputation drops the same
    rows = {result["place"]: result["dropped"] for result in found}
    both = (rows[0] & rows[1]).float().mean().item()
    assert both == pytest.approx(DROPPED**2, abs=4 * math.sqrt(DROPPED**2 / rows[0].numel()))


def means(size: int) -> torch.Tensor:
    """The mean gradient of the embedding over many draws of dropout."""
    model: Any = llama(attention_dropout=0.1)
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.1))
    engine = zerorun.initialize(model, merged(make_config(0), {"sequence_parallel_size": size}))
    engine.train()
    torch.manual_seed(7)
    losses = [engine(**plain(torch.Generator().manual_seed(0), 12)).loss.item() for _ in range(60)]
    dist.barrier()
    engine.destroy()
    return torch.tensor(losses)


@pytest.mark.nightly
def test_losses_have_the_mean_of_one_process() -> None:
    one, two = run_ranks(1, means, 1)[0], run_ranks(2, means, 2)[0]
    error = math.sqrt(float(one.var() + two.var()) / len(one))
    assert abs(float(one.mean() - two.mean())) < 4 * error
    assert 0.3 < float(two.std() / one.std()) < 3
