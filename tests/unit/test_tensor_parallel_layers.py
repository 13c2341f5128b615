"""Tensor-parallel layers on threads: equal to the ordinary layers they stand for, and the bytes they exchange."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from zerorun.distributed.tensor_shard import TensorShard, even_range, fused_ranges, partial_of, shards_of
from zerorun.errors import ModelError, VocabularyError
from zerorun.tensor_parallel.collectives import Region, gather_sequence, split_sequence
from zerorun.tensor_parallel.convert import convert as make_parallel
from zerorun.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    make_column_parallel,
    make_row_parallel,
    make_vocab_parallel,
    restore,
    use_columns,
    whole_of,
)
from zerorun.tensor_parallel.loss import vocab_parallel_cross_entropy
from zerorun.tensor_parallel.planning import make_plan
from zerorun.tensor_parallel.random import region_seed
from zerorun.tensor_parallel.thread_ranks import ThreadAxis, on_threads

WIDTH, HIDDEN, TOKENS = 12, 20, 7


class Mlp(nn.Module):
    """Gate and up get the same tensor."""

    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.gate, self.up, self.down = kind(HIDDEN, WIDTH), kind(HIDDEN, WIDTH), kind(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def linear(out: int, into: int) -> nn.Module:
    return nn.Linear(into, out)


def conv(out: int, into: int) -> nn.Module:
    layer = Conv1D(out, into)
    nn.init.normal_(layer.bias)
    return layer


def convert(mlp: Mlp, region: Region) -> None:
    own = (even_range(HIDDEN, region.axis.rank, region.axis.size),)
    make_column_parallel(mlp.gate, region, own)
    make_column_parallel(mlp.up, region, own)
    make_row_parallel(mlp.down, region, own)


def gradients(module: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


def whole(module: nn.Module, found: dict[str, torch.Tensor], axis: ThreadAxis) -> dict[str, torch.Tensor]:
    shards, params = shards_of(module), dict(module.named_parameters())
    partial = partial_of(module)
    made = {}
    for name, value in found.items():
        shard = shards.get(id(params[name]))
        if shard is not None:
            value = whole_of(value, shard, axis)
        elif id(params[name]) in partial:
            value = axis.all_reduce(value, "partial")
        made[name] = value
    return made


@pytest.mark.parametrize("size", (1, 2, 3, 4))
@pytest.mark.parametrize("kind", (linear, conv))
def test_column_then_row_equals_the_whole(kind: Callable[[int, int], nn.Module], size: int) -> None:
    torch.manual_seed(0)
    ordinary, x = Mlp(kind), torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    y = ordinary(x)
    expected = gradients(ordinary, (y * y).sum())

    def work(axis: ThreadAxis) -> Any:
        mine, own_x = copy.deepcopy(ordinary), x.detach().clone().requires_grad_()
        mine.zero_grad()
        kinds = [type(layer) for layer in mine.children()]
        convert(mine, Region(axis))
        assert all(isinstance(layer, kind) for layer, kind in zip(mine.children(), kinds, strict=True))
        out = mine(own_x)
        found = whole(mine, gradients(mine, (out * out).sum()), axis)
        sent = dict(axis.sent)
        for layer in mine.children():
            restore(layer)
        assert [type(layer) for layer in mine.children()] == kinds
        torch.testing.assert_close(mine.state_dict(), ordinary.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(mine(x), y)
        return out.detach(), own_x.grad, found, sent

    for out, grad, found, sent in on_threads(size, work):
        torch.testing.assert_close(out, y.detach())
        torch.testing.assert_close(grad, x.grad)
        torch.testing.assert_close(found, expected)
        once = 2 * 2 * TOKENS * WIDTH * (size - 1) // size * 4  # gate and up enter once, not twice
        assert (sent["tensor: all-reduce forward"], sent["tensor: all-reduce backward"]) == (once, once)


@pytest.mark.parametrize("size", (2, 3))
def test_layers_that_are_made_have_the_values_of_ordinary_ones(size: int) -> None:
    torch.manual_seed(0)
    table, first, second = nn.Embedding(11, WIDTH, padding_idx=3), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    states = torch.get_rng_state()
    indices = torch.tensor([[0, 3, 10, 5, 6]])
    expected = second(functional.gelu(first(table(indices))))
    weights = [table.weight, first.weight, first.bias, second.weight, second.bias]
    expected_gradients = torch.autograd.grad(expected.square().sum(), weights)
    lock = threading.Lock()

    def work(axis: ThreadAxis) -> Any:
        region = Region(axis)
        with lock:  # one default generator for all threads
            torch.manual_seed(0)
            parts: list[nn.Module] = [VocabParallelEmbedding(11, WIDTH, 3, region=region)]
            parts.append(ColumnParallelLinear(WIDTH, HIDDEN, region=region))
            parts.append(RowParallelLinear(HIDDEN, WIDTH, region=region))
            assert torch.equal(torch.get_rng_state(), states)
        model = nn.Sequential(*parts).eval()
        out = model[2](functional.gelu(model[1](model[0](indices))))
        return out, list(whole(model, gradients(model, out.square().sum()), axis).values())

    for out, found in on_threads(size, work):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(found, list(expected_gradients))


def test_gathered_output_and_split_input() -> None:
    torch.manual_seed(0)
    first, second, x = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH), torch.randn(3, WIDTH, requires_grad=True)
    expected = second(first(x))
    wanted = torch.autograd.grad(expected.square().sum(), [x, *first.parameters(), *second.parameters()])

    def work(axis: ThreadAxis) -> Any:
        pair, own_x, region = copy.deepcopy(nn.Sequential(first, second)), x.detach().clone().requires_grad_(), Region(axis)
        own = (even_range(11, axis.rank, axis.size),)
        make_column_parallel(pair[0], region, own, gather_output=True)
        make_row_parallel(pair[1], region, own, split_input=True)
        out = pair(own_x)
        found = whole(pair, gradients(pair, out.square().sum()), axis)
        return out, [own_x.grad, *found.values()]

    for out, found in on_threads(3, work):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(found, list(wanted))


def test_columns_that_several_ranks_use() -> None:
    """Fewer key-value heads than ranks: ranks 0 and 1 use the first, 2 and 3 the second."""
    torch.manual_seed(0)
    ordinary, x = nn.Linear(WIDTH, 8), torch.randn(5, WIDTH)
    scale = torch.randn(4, 4)
    y = ordinary(x).view(5, 2, 4).repeat_interleave(2, 1) * scale
    expected = gradients(ordinary, y.sum())

    def work(axis: ThreadAxis) -> Any:
        mine = copy.deepcopy(ordinary)
        mine.zero_grad()
        region = Region(axis)
        use_columns(mine, region, (axis.rank // 2 * 4, axis.rank // 2 * 4 + 4))
        out = region.leave((mine(x) * scale[axis.rank]).sum())
        return out, whole(mine, gradients(mine, out), axis)

    for out, found in on_threads(4, work):
        torch.testing.assert_close(out, y.sum())
        torch.testing.assert_close(found, expected)


def test_an_activation_that_is_not_divided_says_how_to_do_without() -> None:
    def work(axis: ThreadAxis) -> None:
        region = Region(axis)
        region.sequence_length = TOKENS
        message = r"shape \(2, 5, 12\) came where \[\.\.\., 7, width\] .* Remedy: sequence_parallel=False\."
        with pytest.raises(ModelError, match=message):
            region.leave(torch.zeros(2, 5, WIDTH))

    on_threads(2, work)


def test_sequence_parallelism_between_regions() -> None:
    """A norm between two regions sees a part of the sequence; its gradients are summands."""
    torch.manual_seed(0)
    norm, ordinary, x = nn.LayerNorm(WIDTH), Mlp(linear), torch.randn(2, TOKENS, WIDTH)
    y = ordinary(norm(x)) + x
    model = nn.ModuleList([norm, ordinary])
    expected = gradients(model, y.square().sum())

    def work(axis: ThreadAxis) -> Any:
        mine = copy.deepcopy(model)
        mine.zero_grad()
        region = Region(axis)
        region.sequence_length = TOKENS
        convert(mine[1], region)  # type: ignore[arg-type]
        mine[0].partial_gradients = ("weight", "bias")  # type: ignore[assignment]
        mine[1].down.partial_gradients = ("bias",)
        own = split_sequence(x, axis)
        out = gather_sequence(mine[1](mine[0](own)) + own, axis, TOKENS)
        return out, whole(mine, gradients(mine, out.square().sum()), axis)

    for out, found in on_threads(3, work):
        torch.testing.assert_close(out, y)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", (1, 2, 4))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_cross_entropy_equals_torch(reduction: str, size: int) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 10) * 4, torch.randint(10, (3, 5))
    targets[0, 0], logits[1, 1, 4] = -100, 300.0
    wanted = logits.clone().requires_grad_()
    expected = functional.cross_entropy(wanted.flatten(0, 1), targets.flatten(), reduction=reduction)
    (expected * 0.7).sum().backward()

    def work(axis: ThreadAxis) -> Any:
        low, high = even_range(10, axis.rank, size)
        own = logits[..., low:high].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(own, targets, axis, 10, reduction=reduction)
        (loss * 0.7).sum().backward()
        return loss, own.grad, (low, high), axis.sent

    for loss, grad, (low, high), sent in on_threads(size, work):
        torch.testing.assert_close(loss.flatten(), expected.flatten())
        torch.testing.assert_close(grad, wanted.grad[..., low:high])  # type: ignore[index]
        assert sent == {"tensor: cross-entropy": 3 * 15 * 4 * (size - 1)}


@pytest.mark.parametrize("weight", (0.0, 0.7))
def test_the_mean_over_no_target_is_that_of_torch(weight: float) -> None:
    logits, targets = torch.randn(3, 10), torch.full((3,), -100)
    wanted = logits.clone().requires_grad_()
    expected = functional.cross_entropy(wanted, targets)
    (expected * weight).backward()

    def work(axis: ThreadAxis) -> tuple[torch.Tensor, torch.Tensor | None]:
        own = logits[:, slice(*even_range(10, axis.rank, 2))].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(own, targets, axis, 10)
        (loss * weight).backward()
        return loss, own.grad

    for loss, grad in on_threads(2, work):
        assert expected.isnan() and loss.isnan()
        assert torch.equal(torch.cat([grad, grad], 1), wanted.grad)  # type: ignore[list-item, arg-type]


@pytest.mark.parametrize("outside", (10, 12, -1, -99))
def test_what_is_outside_the_vocabulary_is_an_error_on_all_ranks_as_in_one_process(outside: int) -> None:
    table, indices = nn.Embedding(10, 4), torch.tensor([[3, outside], [9, 0]])
    logits = torch.randn(4, 10)
    for whole in (lambda: table(indices), lambda: functional.cross_entropy(logits, indices.flatten())):
        with pytest.raises(IndexError):
            whole()

    def work(axis: ThreadAxis) -> None:
        mine, own = copy.deepcopy(table), even_range(10, axis.rank, 3)
        make_vocab_parallel(mine, Region(axis))
        with pytest.raises(IndexError, match=rf"token ids \[{outside}\] outside the vocabulary: there are 0 to 9. Remedy"):
            mine(indices)
        with pytest.raises(VocabularyError, match=rf"labels \[{outside}\] outside.*, and -100 for what does not count"):
            vocab_parallel_cross_entropy(logits[:, slice(*own)], indices.flatten(), axis, 10)

    on_threads(3, work)


def test_what_counts_as_ignored_is_not_outside_the_vocabulary() -> None:
    logits, targets = torch.randn(4, 10), torch.tensor([1, -7, 25, 9])

    def work(axis: ThreadAxis) -> torch.Tensor:
        own = logits[:, slice(*even_range(10, axis.rank, 2))]
        return torch.stack(
            [
                vocab_parallel_cross_entropy(own, targets.where(targets != other, known), axis, 10, ignore_index=known)
                for known, other in ((-7, 25), (25, -7))
            ]
        )

    kept = torch.tensor([0, 3])
    for losses in on_threads(2, work):
        torch.testing.assert_close(losses, functional.cross_entropy(logits[kept], targets[kept]).expand(2))


@pytest.mark.parametrize("option", ({"scale_grad_by_freq": True}, {"max_norm": 1.0}, {"sparse": True}))
def test_embeddings_that_look_at_whole_rows_or_their_uses_are_refused(option: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, **option))
    with pytest.raises(ModelError, match="scale_grad_by_freq"):
        make_plan(model, {"0": "embedding_rowwise"}, 2)
    with pytest.raises(ModelError, match="scale_grad_by_freq"):
        on_threads(2, lambda axis: make_vocab_parallel(copy.deepcopy(model[0]), Region(axis)))


def test_cross_entropy_refuses_whole_logits() -> None:
    with pytest.raises(ModelError, match=r"have 10 classes, but tensor rank 0 of 2 has 5 of 10"):
        on_threads(2, lambda axis: vocab_parallel_cross_entropy(torch.zeros(1, 10), torch.zeros(1).long(), axis, 10))


def test_tied_layers_are_divided_once() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
    head.weight = table.weight
    indices = torch.tensor([[1, 2, 10]])
    expected = head(table(indices))
    (wanted,) = torch.autograd.grad(expected.square().sum(), [table.weight])

    def work(axis: ThreadAxis) -> Any:
        pair, region = copy.deepcopy(nn.ModuleList([table, head])), Region(axis)
        make_vocab_parallel(pair[0], region)
        make_column_parallel(pair[1], region, (even_range(11, axis.rank, axis.size),), gather_output=True)
        assert pair[0].weight is pair[1].weight
        out = pair[1](pair[0](indices))
        return out, whole(pair, gradients(pair, out.square().sum()), axis)["0.weight"]

    for out, found in on_threads(2, work):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(found, wanted)


def test_every_tensor_rank_has_a_random_stream_of_its_own() -> None:
    """Other tests take the product's seeds for the reference, and would not see that all ranks draw alike."""
    seeds = [region_seed(drawn, rank) for drawn in (0, 1, 2**63 - 2) for rank in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_shares() -> None:
    whole_tensor = torch.arange(24).view(4, 6)
    shard = TensorShard((4, 6), 1, fused_ranges((2, 4), 1, 2))
    assert shard.ranges == ((1, 2), (4, 6))
    part = shard.cut(whole_tensor)
    assert part.shape == shard.local_shape == (4, 3)
    back = torch.zeros_like(whole_tensor)
    shard.put(part, back)
    assert torch.equal(back != 0, torch.isin(torch.arange(6), torch.tensor([1, 4, 5])).expand(4, 6) & (whole_tensor != 0))


@pytest.mark.parametrize("wrong", (nn.LayerNorm(4), nn.Conv2d(1, 1, 1)))
def test_only_linear_layers_are_divided(wrong: nn.Module) -> None:
    with pytest.raises(ModelError, match=r"nn\.Linear or Conv1D"):
        on_threads(1, lambda axis: make_column_parallel(wrong, Region(axis), ((0, 1),)))


def test_what_a_module_says_of_its_own_gradients_comes_back() -> None:
    """Marks of the user's stay when those of a plan are taken back, from the last to the first."""
    module: Any = nn.LayerNorm(4)
    module.partial_gradients = ("bias",)
    plan = make_plan(nn.Sequential(module), {"0": "replicated_with_grad_allreduce"}, 2)
    undo = on_threads(1, lambda axis: make_parallel(nn.Sequential(module), plan, Region(axis)))[0]
    assert module.partial_gradients == ("bias", "weight", "bias")
    for back in reversed(undo):
        back()
    assert module.partial_gradients == ("bias",)
