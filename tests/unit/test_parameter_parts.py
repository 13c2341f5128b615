"""Optimizers that are told of parts: ranks that have any stretches of parameters do what one does that has them whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from math import prod
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from zerorun.distributed.tensor_shard import TensorShard, even_range, fused_ranges
from zerorun.optim.adafactor import Adafactor
from zerorun.optim.lamb import Lamb
from zerorun.optim.parameter_parts import Part, PartsOptimizer, StateRange

STEPS = 3
SHAPES = ((7, 5), (3, 4, 6), (9,), (1, 8), (6, 1), (2, 3, 3, 2), (), (4, 0), (12, 4))
CHOICES = {
    "lamb": (Lamb, {"lr": 0.02, "weight_decay": 0.1}),
    "adafactor": (Adafactor, {"lr": 0.05, "weight_decay": 0.1}),
    "adafactor, upwards": (Adafactor, {"lr": 0.05, "maximize": True, "eps": (1e-3, 1e-2), "d": 1.5}),
}


class Together:
    """Sums over ranks that are threads of this process."""

    device = torch.device("cpu")

    def __init__(self, ranks: int) -> None:
        self.given: list[list[Tensor]] = [[] for _ in range(ranks)]
        self.barrier = Barrier(ranks, timeout=60)

    def of(self, rank: int) -> Callable[[Tensor, Sequence[int], str], Tensor]:
        def total(flat: Tensor, sizes: Sequence[int], label: str) -> Tensor:
            assert flat.numel() == sum(sizes)
            number = len(self.given[rank])
            self.given[rank].append(flat)
            self.barrier.wait()
            return torch.stack([given[number] for given in self.given]).sum(0)

        total.device = self.device  # type: ignore[attr-defined]
        return total


def values(seed: int) -> Iterator[list[Tensor]]:
    """The parameters, and then their gradients in each step."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield [torch.randn(shape, generator=generator) for shape in SHAPES]


def shard_of(shape: tuple[int, ...], rng: random.Random, rank: int, size: int) -> TensorShard | None:
    """How ``size`` tensor ranks divide a parameter, the same way on each; None: not at all."""
    dim = rng.randrange(-1, len(shape)) if size > 1 else -1
    if dim < 0:
        return None
    length = shape[dim]
    fused = rng.random() < 0.5 and length >= 3
    return TensorShard(
        shape, dim, fused_ranges((length - 2, 2), rank, size) if fused else (even_range(length, rank, size),)
    )


def parts_of(seed: int, shards: int, rank: int, tensor: int) -> list[Part]:
    """The parts of rank ``rank`` of ``shards`` x ``tensor``."""
    found = []
    for number, shape in enumerate(SHAPES):
        shard = shard_of(shape, random.Random(f"{seed} {number}"), rank % tensor, tensor)
        local = prod(shape if shard is None else shard.local_shape)
        # Tensor ranks that all have a parameter may have cut it in different ways.
        cutter = random.Random(f"{seed} {number} {rank % tensor}")
        bounds = [0, *sorted(cutter.randint(0, local) for _ in range(shards - 1)), local]
        start, end = bounds[rank // tensor], bounds[rank // tensor + 1]
        cuts = tuple(bound for bound in sorted(set(bounds)) if 0 < bound < local) if tensor == 1 else None
        counted = shard is not None or rank % tensor == 0
        found.append(Part(str(number), shape, start, end - start, shard, cuts, counted))
    return found


def taken(part: Part, whole: Tensor) -> Tensor:
    """The elements of ``part``."""
    local = whole if part.shard is None else part.shard.cut(whole)
    return local.reshape(-1)[part.start : part.start + part.numel].clone()


def on_a_rank(
    kind: type[PartsOptimizer], settings: dict[str, Any], parts: list[Part], together: Any, seed: int
) -> tuple[PartsOptimizer, dict[int, Tensor]]:
    """Train the parts. Returns the optimizer, and the tensor for each part that has elements."""
    source = values(seed)
    mine = {number: taken(part, whole) for number, (part, whole) in enumerate(zip(parts, next(source), strict=True))}
    mine = {number: tensor for number, tensor in mine.items() if tensor.numel()}
    optimizer = kind([{"params": list(mine.values())}], **settings)
    optimizer.take_parts(parts, {tensor: number for number, tensor in mine.items()}, together)
    for _ in range(STEPS):
        gradients = next(source)
        for number, tensor in mine.items():
            tensor.grad = taken(parts[number], gradients[number])
        optimizer.step()
    return optimizer, mine


def in_one(kind: Any, settings: dict[str, Any], seed: int) -> tuple[Any, list[Tensor]]:
    source = values(seed)
    params = next(source)
    optimizer = kind([param for param in params if param.numel()], **settings)
    for _ in range(STEPS):
        for param, gradient in zip(params, next(source), strict=True):
            param.grad = gradient
        optimizer.step()
    return optimizer, params


def put(part: Part, ranges: Sequence[StateRange] | None, state: Tensor, whole: Tensor) -> None:
    """Write what ``part`` saves of a state into ``whole``, that of the whole parameter, where it is missing: NaN.

    Only tensor ranks may have it there already.
    """
    if ranges is None:
        ranges = [StateRange(0, part.start, part.numel, part.shape, part.shard)]
    for piece in (piece for piece in ranges if piece.saves):
        assert piece.shape == tuple(whole.shape)
        local = torch.full_like(whole if piece.shard is None else piece.shard.cut(whole), float("nan"))
        local.view(-1)[piece.start : piece.start + piece.numel] = state.view(-1)[piece.offset :][: piece.numel]
        found = local
        if piece.shard is not None:
            found = torch.full_like(whole, float("nan"))
            piece.shard.put(local, found)
        assert part.cuts is None or not (found.isfinite() & whole.isfinite()).any()
        whole.copy_(torch.where(found.isnan(), whole, found))


@pytest.mark.each_pair
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("tensor", (1, 2, 3))
@pytest.mark.parametrize("shards", (1, 2, 3, 5))
def test_parts_of_ranks_are_one_run(choice: str, tensor: int, shards: int) -> None:
    (kind, settings), ranks = CHOICES[choice], shards * tensor
    plain = torch.optim.Adafactor if kind is Adafactor else kind
    for seed in range(4):
        optimizer, wanted = in_one(plain, settings, seed)
        together, parts = Together(ranks), [parts_of(seed, shards, rank, tensor) for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as pool:
            jobs = [pool.submit(on_a_rank, kind, settings, parts[rank], together.of(rank), seed) for rank in range(ranks)]
        planned = kind.planned_sums(parts[0])
        assert all(kind.planned_sums(other) == planned for other in parts)
        assert [flat.numel() for flat in together.given[0]] == [each.numel for each in planned] * STEPS
        for rank, (found, mine) in enumerate(job.result() for job in jobs):
            for number, tensor_of_part in mine.items():
                part = parts[rank][number]
                torch.testing.assert_close(tensor_of_part, taken(part, wanted[number]), rtol=2e-6, atol=2e-7)
                sizes = {key: v.numel() for key, v in found.state[tensor_of_part].items() if torch.is_tensor(v) and v.dim()}
                assert sizes == kind.state_numels(part)
        _compare_states(optimizer, wanted, [job.result() for job in jobs], parts)


def _compare_states(
    optimizer: Any, wanted: list[Tensor], jobs: list[tuple[PartsOptimizer, dict[int, Tensor]]], parts: list[list[Part]]
) -> None:
    """What all ranks save is the state of the one process, without a gap."""
    for number, param in enumerate(wanted):
        for key, value in optimizer.state.get(param, {}).items():
            if torch.is_tensor(value) and value.dim():
                whole = torch.full_like(value, float("nan"))
                for rank, (found, mine) in enumerate(jobs):
                    if number in mine:
                        part = parts[rank][number]
                        ranges = found.state_ranges(key, part) if key in found.factors else None
                        put(part, ranges, found.state[mine[number]][key], whole)
                torch.testing.assert_close(whole, value, rtol=2e-6, atol=1e-12)


def test_only_what_is_cut_is_summed() -> None:
    """Of a matrix the columns, and the cut row; of a matrix that one rank has, and of whole rows, nothing more."""
    whole = Part("a", (6, 4), 0, 24)
    assert Adafactor.planned_sums([whole]) == Lamb.planned_sums([whole]) == ()
    inside, between = replace(whole, numel=10, cuts=(10,)), replace(whole, numel=8, cuts=(8,))
    assert [each.numel for each in Adafactor.planned_sums([inside, whole])] == [1 + 4 + 1, 1]
    assert [each.numel for each in Adafactor.planned_sums([between])] == [4 + 1, 1]
    batch = Part("b", (5, 3, 2), 0, 7, cuts=(7, 12))  # in the second matrix, and after it
    assert [each.numel for each in Adafactor.planned_sums([batch])] == [1 + 2 + 1, 1]
    assert [each.numel for each in Lamb.planned_sums([inside, batch, whole])] == [4]


def test_memory_of_states() -> None:
    """Rows go with their elements: ranks together have them once, but for those that are cut."""
    bounds = [0, 1000, 2000, 3000, 4096]
    parts = [Part("a", (64, 64), low, high - low, cuts=(1000, 2000, 3000)) for low, high in pairwise(bounds)]
    found = [Adafactor.state_numels(part) for part in parts]
    assert [each["row_var"] for each in found] == [16, 17, 16, 18]
    assert [each["col_var"] for each in found] == [64] * 4
    assert Adafactor.state_numels(Part("b", (9,), 3, 4, cuts=(3, 7))) == {"variance": 4}
    kernel = Part("c", (32, 16, 3, 3), 900, 1000, cuts=(900, 1900))
    assert Adafactor.state_numels(kernel) == {"row_var": 334, "col_var": 336}


def test_a_step_outside_of_an_engine_leaves_gradients_alone() -> None:
    for kind in (Adafactor, Lamb):
        weight = torch.randn(3, 4, requires_grad=True)
        weight.grad = torch.randn(3, 4)
        before = weight.grad.clone()
        empty = torch.zeros(0, 4, requires_grad=True)
        empty.grad = torch.zeros(0, 4)
        assert kind([weight, empty]).step(lambda: torch.tensor(2.0)) == 2.0
        assert torch.equal(weight.grad, before)


def test_settings_out_of_range() -> None:
    weight = torch.zeros(2, requires_grad=True)
    for wrong in ({"lr": -1.0}, {"beta2_decay": 0.5}, {"d": 0.5}, {"eps": (None, -1.0)}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Adafactor([weight], **wrong)
