"""zero.TiledLinear: the same as nn.Linear, and at stage 3 no more of it is unsharded at once than tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

import zerorun
from zerorun.errors import ModelError
from zerorun.zero import Init, TiledLinear

SPLITS = ((1, 1), (1, 3), (3, 1), (3, 2))


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize(("inside", "outside"), SPLITS)
def test_it_computes_what_linear_does(inside: int, outside: int, bias: bool) -> None:
    """Also with 10 features in 3 tiles; the gradients are those of the parts."""
    whole = nn.Linear(10, 8, bias)
    tiled = TiledLinear(10, 8, bias, inside, outside, init_linear=whole)
    given = torch.randn(4, 10)
    for layer in (whole, tiled):
        layer(given).square().sum().backward()
    torch.testing.assert_close(tiled(given), whole(given))
    assert whole.weight.grad is not None
    rows = [torch.cat([tile.weight.grad for tile in row], 1) for row in tiled.linears]  # type: ignore[union-attr]
    torch.testing.assert_close(torch.cat(rows), whole.weight.grad)
    assert sum(param.numel() for param in tiled.parameters()) == sum(param.numel() for param in whole.parameters())


def test_parts_in_and_out() -> None:
    tiled = TiledLinear(10, 8, True, 3, 2, input_is_already_split=True, combine_out_splits=False)
    given = torch.randn(4, 10)
    outputs = tiled(torch.split(given, [4, 3, 3], -1))
    tiled.combine_out_splits = True
    torch.testing.assert_close(torch.cat(outputs, -1), tiled(given))
    assert [output.shape[-1] for output in outputs] == [4, 4]
    assert tiled.in_parts == [0, 4, 7, 10] and tiled.out_parts == [0, 4, 8]


def test_initial_values_are_as_large_as_those_of_the_whole() -> None:
    tiled = TiledLinear(400, 300, in_splits=4, out_splits=3)
    assert all(0.045 < param.abs().max() <= 0.05 for param in tiled.parameters())
    custom = TiledLinear(8, 6, in_splits=2, dtype=torch.float64)
    assert {param.dtype for param in custom.parameters()} == {torch.float64}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match=r"out_splits = 9: a layer has 1 to 8 tiles"):
        TiledLinear(10, 8, out_splits=9)
    with pytest.raises(ModelError, match=r"10 x 7, not 10 x 8"):
        TiledLinear(10, 8).copy_params_from(nn.Linear(10, 7))
    with pytest.raises(ModelError, match="one of the two layers has a bias"):
        TiledLinear(10, 8, bias=False).copy_params_from(nn.Linear(10, 8))


def train(stage: int, tiled: bool) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    """Losses, bytes of the slots for parameters, and weights."""
    torch.manual_seed(5)
    whole, head = nn.Linear(32, 96), nn.Linear(96, 1)
    with Init(enabled=stage == 3):
        layer = TiledLinear(32, 96, True, 2, 3) if tiled else nn.Linear(32, 96)
    if isinstance(layer, TiledLinear):
        layer.copy_params_from(whole)
    else:
        layer = whole
    model = nn.Sequential(layer, nn.Tanh(), head)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine = zerorun.initialize(model, config)
    slots = engine.memory_report()["slots"]
    losses = []
    for step in range(3):
        given = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = engine(given).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    names = dict(engine.state_dict())
    engine.destroy()
    return losses, slots, names


@pytest.mark.parametrize("stage", (1, 3))
def test_it_trains_as_linear_does(stage: int) -> None:
    """At stage 3 two tiles have slots at once, and not the layer."""
    whole, room, _ = run_ranks(2, train, stage, False)[0]
    tiled, less, names = run_ranks(2, train, stage, True)[0]
    assert tiled == pytest.approx(whole, abs=1e-6)
    assert names["0.linears.2.0.weight"].shape == (32, 16)
    assert stage == 1 or less < room / 2, (less, room)
