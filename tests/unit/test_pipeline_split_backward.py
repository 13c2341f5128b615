"""Split backward: the gradients of inputs come at once, those of weights later, and both are those of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers.pytorch_utils import Conv1D

from zerorun.pipeline.split_backward import SplitLayers, WeightGradients
from zerorun.tensor_parallel.collectives import Region
from zerorun.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    make_column_parallel,
    make_row_parallel,
)
from zerorun.tensor_parallel.thread_ranks import on_threads


def model() -> nn.Module:
    torch.manual_seed(0)
    frozen = nn.Linear(6, 6)
    frozen.weight.requires_grad_(False)
    shared = nn.Linear(6, 6, bias=False)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), Conv1D(6, 6), nn.LayerNorm(6), frozen, shared, nn.Tanh(), shared)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_weights_wait_and_inputs_do_not(dtype: torch.dtype) -> None:
    plain, x = model().to(dtype), torch.randn(3, 2, 4, dtype=dtype, requires_grad=True)
    split, own = copy.deepcopy(plain), x.detach().clone().requires_grad_()
    later = WeightGradients()
    layers = SplitLayers(split, later)
    for _ in range(2):
        plain(x).square().sum().backward()
        split(own).square().sum().backward()
    torch.testing.assert_close(own.grad, x.grad)
    assert split[0].weight.grad is None
    assert split[0].bias.grad is not None
    jobs = later.take()
    assert len(jobs) == 2 * 4  # two layers, and one that is used twice, in two backwards
    for job in jobs:
        job()
    for mine, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, theirs.grad)
    layers.remove()
    split.zero_grad()
    split(own).sum().backward()
    assert not later.take()
    assert split[0].weight.grad is not None


def test_without_gradients_nothing_is_kept() -> None:
    split, later = model(), WeightGradients()
    SplitLayers(split, later)
    with torch.no_grad():
        split(torch.ones(1, 4))
    assert not later.take()


def test_divided_layers_take_part() -> None:
    def work(axis: object) -> None:
        torch.manual_seed(0)
        region = Region(axis)  # type: ignore[arg-type]
        pair = nn.Sequential(ColumnParallelLinear(4, 6, region=region), RowParallelLinear(6, 4, region=region)).eval()
        later = WeightGradients()
        SplitLayers(pair, later)
        x = torch.ones(2, 4)
        pair(x).square().sum().backward()
        assert pair[0].weight.grad is None
        for job in later.take():
            job()
        found = [param.grad for param in pair.parameters()]
        pair.zero_grad()
        for layer in pair:
            layer.weight_gradients = None  # type: ignore[assignment]
        pair(x).square().sum().backward()
        torch.testing.assert_close(found, [param.grad for param in pair.parameters()])

    on_threads(1, work)


def log(calls: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def halve(grad: torch.Tensor) -> torch.Tensor:
        calls.append(grad.clone())
        return grad / 2

    return halve


def log_accumulated(calls: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    return lambda param: calls.append(param.grad.clone())  # type: ignore[union-attr]


def plain_and_split(axis: Any) -> tuple[nn.Sequential, nn.Sequential, WeightGradients]:
    """Two layers as torch has them, and with put-off gradients; these are divided along ``axis``, if there is one."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    split, later = copy.deepcopy(plain), WeightGradients()
    if axis is not None:
        region = Region(axis)
        make_column_parallel(split[0], region, ((0, 6),))
        make_row_parallel(split[2], region, ((0, 6),))
    SplitLayers(split, later)
    return plain, split, later


@pytest.mark.parametrize("divided", (False, True))
def test_hooks_of_weights_get_the_gradients_of_torch(divided: bool) -> None:
    """Hooks change gradients, and see what is accumulated; later ones are taken away, and weights wait again."""

    def work(axis: object) -> None:
        plain, split, later = plain_and_split(axis if divided else None)
        seen: list[list[torch.Tensor]] = [[], []]
        handles = []
        for calls, net in zip(seen, (plain, split), strict=True):
            for param in net.parameters():
                handles.append(param.register_hook(log(calls)))
            handles.append(net[2].weight.register_post_accumulate_grad_hook(log_accumulated(calls)))
        for _ in range(2):
            for net in (plain, split):
                net(torch.ones(3, 4)).square().sum().backward()
        assert not later.take()
        torch.testing.assert_close(seen[1], seen[0])
        torch.testing.assert_close([p.grad for p in split.parameters()], [p.grad for p in plain.parameters()])
        for handle in handles:
            handle.remove()
        split(torch.ones(3, 4)).square().sum().backward()
        assert len(later.take()) == 2

    on_threads(1, work)


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


@pytest.mark.parametrize("divided", (False, True))
@pytest.mark.parametrize("pruned", (False, True))
def test_weights_that_are_computed_from_others_from_now_on_reach_them(pruned: bool, divided: bool) -> None:
    def work(axis: object) -> None:
        plain, split, later = plain_and_split(axis if divided else None)
        for net in (plain, split):
            net(torch.ones(3, 4)).square().sum().backward()
        assert len(later.take()) == 2
        for net in (plain, split):
            net.zero_grad()
            if pruned:
                prune.l1_unstructured(net[2], "weight", amount=0.3)
            else:
                parametrize.register_parametrization(net[2], "weight", Half())
            net(torch.ones(3, 4)).square().sum().backward()
        (job,) = later.take()
        job()
        found = dict(split.named_parameters())
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name].grad, param.grad, msg=name)

    on_threads(1, work)
