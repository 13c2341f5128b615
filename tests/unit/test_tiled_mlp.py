"""A layer on parts of a sequence, one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zerorun.activations.checkpointing import kept_bytes
from zerorun.deepspeed.tiled_mlp import TiledMLP


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def tiled(mlp: Mlp, x: torch.Tensor, shards: int) -> torch.Tensor:
    return TiledMLP.apply(Mlp.forward, mlp, x, shards, list(mlp.parameters()))


@pytest.mark.parametrize("shape", ((2, 10, 8), (10, 8)))
@pytest.mark.parametrize("shards", (1, 3, 64))
def test_it_is_the_layer(shape: tuple[int, ...], shards: int) -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(), torch.randn(shape, requires_grad=True)
    given = [x, *mlp.parameters()]
    wanted, found = mlp(x), tiled(mlp, x, shards)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    of_wanted, of_found = (torch.autograd.grad(y.square().sum(), given) for y in (wanted, found))
    for a, b in zip(of_found, of_wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_parameter_has_its_gradient_once() -> None:
    """At stages 2 and 3 it is reduced when it is there."""
    mlp, seen = Mlp(), []
    for param in mlp.parameters():
        param.register_post_accumulate_grad_hook(seen.append)
    tiled(mlp, torch.randn(2, 10, 8), 5).sum().backward()
    assert len(seen) == 4


def test_what_is_inside_is_not_kept() -> None:
    mlp, x = Mlp(), torch.randn(4, 64, 8, requires_grad=True)
    inside = 4 * 64 * 64 * 4  # the output of tanh
    whole, parts = (kept_bytes(call, x, policy="none") for call in (mlp, lambda x: tiled(mlp, x, 4)))
    assert whole > inside > 4 * parts
