"""zerorun verify finds each of these planted bugs at its own name: the first value that it makes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from verified import PLAN, config, tensor, verify

from zerorun.data import EpochSampler
from zerorun.engine.accumulation import Accumulation
from zerorun.pipeline.p2p import ACTIVATIONS, GRADIENTS, PointToPoint
from zerorun.tensor_parallel import collectives, layers, parallelized, random
from zerorun.zero.flat_group import TrainedGroup
from zerorun.zero.norm import Summary
from zerorun.zero.sharded_model import ShardedModel
from zerorun.zero.sharded_optimizer import ShardedOptimizer
from zerorun.zero.unit import Unit

Bug = Callable[[], AbstractContextManager[Any]]


def around(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Replace the function ``name`` of ``owner`` by what ``make`` makes of it."""
    return patch.object(owner, name, make(getattr(owner, name)))


def is_block(group: Any, number: int) -> bool:
    return bool(group.names[0].startswith(f"blocks.{number}."))


def reduced_twice() -> AbstractContextManager[Any]:
    def make(ends: Any) -> Any:
        def twice(group: TrainedGroup) -> None:
            ends(group)
            if is_block(group, 1):
                group.grad_shard.mul_(2)

        return twice

    return around(TrainedGroup, "reduction_ends", make)


def gradient_of_one_rank_is_lost() -> AbstractContextManager[Any]:
    def make(accumulate: Any) -> Any:
        def lost(group: TrainedGroup) -> None:
            accumulate(group)
            if is_block(group, 2) and dist.get_rank() == 1:
                group.grad_views[0].zero_()

        return lost

    return around(TrainedGroup, "accumulate", make)


def one_element_is_not_reduced() -> AbstractContextManager[Any]:
    def make(ends: Any) -> Any:
        def off_by_one(group: TrainedGroup) -> None:
            ends(group)
            if is_block(group, 0):
                group.grad_shard[3] = 0

        return off_by_one

    return around(TrainedGroup, "reduction_ends", make)


def mean_of_means() -> AbstractContextManager[Any]:
    return around(Accumulation, "unscale", lambda unscale: lambda *given: 2 * unscale(*given))


def local_norm() -> AbstractContextManager[Any]:
    """Clips by the norm of a rank's own shard."""

    def make(decide: Any) -> Any:
        def local(summary: Summary, *given: Any) -> Any:
            return decide(replace(summary, sums=[summary.sums[0] * 0.4, *summary.sums[1:]]), *given)

        return local

    return around(Summary, "decide", make)


def stale_slot() -> AbstractContextManager[Any]:
    """Rank 1 does not gather unit 3, and computes with what its slot held."""

    def make(start: Any) -> Any:
        def stale(unit: Unit, comm: Any, phase: str) -> None:
            start(unit, comm, phase)
            if unit.index == 3 and dist.get_rank() == 1:
                unit.finish_gather()
                unit.flat_groups[0].views[0].mul_(1.5)

        return stale

    return around(Unit, "start_gather", make)


def not_published() -> AbstractContextManager[Any]:
    """The other ranks' new values do not come."""
    return patch.object(ShardedModel, "publish", lambda model: model.runtime.gathers.evict_all())


def updated_twice() -> AbstractContextManager[Any]:
    def make(update: Any) -> Any:
        def twice(optimizer: ShardedOptimizer, pieces: Any, coefficient: Any) -> None:
            update(optimizer, pieces, coefficient)
            if dist.get_rank() == 1:
                update(optimizer, pieces[:1], coefficient)

        return twice

    return around(ShardedOptimizer, "_update_now", make)


def last_element_stays() -> AbstractContextManager[Any]:
    def make(update: Any) -> Any:
        def shorter(optimizer: ShardedOptimizer, pieces: Any, coefficient: Any) -> None:
            before = [piece.tensor.view(-1)[-1].clone() for piece in pieces]
            update(optimizer, pieces, coefficient)
            for piece, value in zip(pieces, before, strict=True):
                piece.tensor.view(-1)[-1] = value

        return shorter

    return around(ShardedOptimizer, "_update_now", make)


def other_group() -> AbstractContextManager[Any]:
    """The second parameter group is trained with the settings of the first."""

    def make(init: Any) -> Any:
        def same(self: Any, optimizer: Any, *given: Any, **options: Any) -> None:
            for group in optimizer.param_groups:
                group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
            init(self, optimizer, *given, **options)

        return same

    return around(ShardedOptimizer, "__init__", make)


def rounded_masters() -> AbstractContextManager[Any]:
    """In bf16, what rounding takes away is lost."""

    def make(write_back: Any) -> Any:
        def rounded(optimizer: ShardedOptimizer, only: Any = None) -> None:
            write_back(optimizer)
            for piece in optimizer.pieces:
                piece.tensor.view(-1).copy_(piece.weight.view(-1))

        return rounded

    return around(ShardedOptimizer, "write_back", make)


def no_clipping() -> AbstractContextManager[Any]:
    return around(
        Summary, "decide", lambda decide: lambda summary, unscale, limit, stream: decide(summary, unscale, 0.0, stream)
    )


def half_the_loss() -> AbstractContextManager[Any]:
    def make(take: Any) -> Any:
        return lambda *given, **options: (lambda mode, value: (mode, value / 2))(*take(*given, **options))

    return around(Accumulation, "take_loss", make)


def sampler_off_by_one() -> AbstractContextManager[Any]:
    def make(init: Any) -> Any:
        def shifted(self: EpochSampler, *given: Any) -> None:
            init(self, *given)
            self.rank = (self.rank + 1) % self.ranks

        return shifted

    return around(EpochSampler, "__init__", make)


@contextmanager
def unproven(bug: AbstractContextManager[Any]) -> Iterator[None]:
    """``bug``, without the proof by which initialize() would refuse it."""
    with patch.object(parallelized, "prove_given", lambda *given: None), bug:
        yield


def layer_not_summed() -> AbstractContextManager[Any]:
    """The second row-parallel layer of each block gives a rank's summand."""

    def make(forward: Any) -> Any:
        def unreduced(layer: Any, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != 16:
                return forward(layer, x)
            layer.region.forget()
            return layers._product(layer, x, layer.weight, layer.bias)

        return unreduced

    return unproven(around(layers.RowParallelLinear, "forward", make))


def input_gradient_not_summed() -> AbstractContextManager[Any]:
    return unproven(patch.object(collectives._Enter, "backward", staticmethod(lambda ctx, grad: (grad, None))))


def same_dropout() -> AbstractContextManager[Any]:
    return patch.object(random, "region_seed", lambda drawn, rank: drawn)


def other_dropout_outside() -> AbstractContextManager[Any]:
    """Ranks leave a region with different states."""

    def make(leave: Any) -> Any:
        def apart(streams: Any) -> None:
            leave(streams)
            torch.rand(dist.get_rank())

        return apart

    return around(random.Streams, "leave", make)


def summands_not_summed() -> AbstractContextManager[Any]:
    return patch.object(ShardedModel, "_sum_over_model_axes", lambda model: None)


def message(sort: str, change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    def make(receive: Any) -> Any:
        return lambda p2p, peer, which: change(receive(p2p, peer, which)) if which == sort else receive(p2p, peer, which)

    return around(PointToPoint, "receive", make)


def activations_changed() -> AbstractContextManager[Any]:
    return message(ACTIVATIONS, lambda value: value.roll(1, 0).detach().requires_grad_(value.requires_grad))


def gradients_changed() -> AbstractContextManager[Any]:
    return message(GRADIENTS, lambda found: [None if one is None else one * 0.5 for one in found])


@dataclass(frozen=True)
class Planted:
    """A bug, what is verified with it, and the words of the report's line "point"."""

    bug: Bug
    task: str
    raw: dict[str, Any]
    kind: str
    name: str
    ranks: int = 2


UPDATED, REDUCED, LOCAL = "weight after the update", "gradient after its reduction", "gradient before its reduction"
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
PLANTED = [
    Planted(stale_slot, "gpt", config(3), "weight, as the forward reads it", "blocks.2."),
    Planted(mean_of_means, "gpt", config(2, 2), "norm of the gradients", "norm"),
    Planted(layer_not_summed, "gpt", config(1, **tensor(plan=PLAN)), "output of module", "blocks.0.down"),
    Planted(reduced_twice, "gpt", config(2), REDUCED, "blocks.1."),
    Planted(reduced_twice, "gpt", config(2, **OFFLOAD), REDUCED, "blocks.1."),
    Planted(gradient_of_one_rank_is_lost, "gpt", config(3, 2), REDUCED, "blocks.2."),
    Planted(one_element_is_not_reduced, "gpt", config(1), REDUCED, "blocks.0."),
    Planted(local_norm, "gpt", config(2), "norm of the gradients", "norm"),
    Planted(no_clipping, "gpt", config(1, clip=0.05, optimizer="SGD"), UPDATED, ""),
    Planted(not_published, "gpt", config(1), "weight, as the forward reads it", ""),
    Planted(updated_twice, "own_optimizer", config(2), UPDATED, ""),
    Planted(last_element_stays, "gpt", config(3), UPDATED, ""),
    Planted(other_group, "two_groups", config(2), UPDATED, ""),
    Planted(rounded_masters, "own_optimizer", config(1, precision="bf16"), UPDATED, ""),
    Planted(half_the_loss, "tied", config(0), LOCAL, "norm."),
    Planted(sampler_off_by_one, "from_dataset", config(1), "input", ""),
    Planted(input_gradient_not_summed, "gpt", config(1, **tensor(plan=PLAN)), LOCAL, "blocks.2.norm2"),
    Planted(same_dropout, "dropping", config(1, **tensor(plan=PLAN)), "dropout", "blocks.0"),
    Planted(other_dropout_outside, "dropping", config(1, **tensor(plan=PLAN)), "dropout", "blocks."),
    Planted(summands_not_summed, "llama", config(1, **tensor(sequence_parallel=True)), REDUCED, "norm"),
    Planted(summands_not_summed, "llama", config(1, 2, pipeline={"stages": 2}), REDUCED, "embed_tokens"),
    Planted(activations_changed, "layers", config(1, 2), "output of module", "3"),
    Planted(gradients_changed, "layers", config(1, 2), LOCAL, "1.|2."),
]
BY_DAY = 2


def verify_with_bug(number: int) -> tuple[bool, str]:
    planted = PLANTED[number]
    with planted.bug():
        return verify(planted.task, planted.raw)


def row(number: int) -> Any:
    marks = () if number < BY_DAY else pytest.mark.nightly
    return pytest.param(number, id=f"{PLANTED[number].bug.__name__}-{number}", marks=marks)


@pytest.mark.parametrize("number", [row(number) for number in range(len(PLANTED))])
def test_a_planted_bug_is_found_at_its_own_name(number: int) -> None:
    planted = PLANTED[number]
    found = run_ranks(planted.ranks, verify_with_bug, number)
    equal, text = found[0]
    assert not equal, text
    line = next(line for line in text.splitlines() if line.startswith("  point"))
    kind, _, name = line.removeprefix("  point").strip().partition(": ")
    assert kind == planted.kind, text
    assert any(part in name for part in planted.name.split("|")), text
    assert all(other == (equal, text) for other in found)
