"""Streams of random numbers beside the default one, also by the names that models written for Megatron use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from zerorun.activations.checkpointing import checkpoint
from zerorun.activations.random_streams import RandomStreams, streams
from zerorun.checkpoint import random_state
from zerorun.deepspeed import checkpointing_names
from zerorun.errors import ModelError
from zerorun.pipeline.layer_builder import Builder
from zerorun.pipeline.layer_spec import LayerSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_streams() -> Iterator[None]:
    """Those of this process are as no program has touched them, before and after."""
    streams.reset()
    yield
    streams.reset()
    checkpointing_names._mpu = None


def numbers(from_stream: bool = False) -> list[float]:
    if not from_stream:
        return torch.rand(3).tolist()
    with streams.fork():
        return torch.rand(3).tolist()


def test_a_stream_and_the_default_generator_do_not_touch_each_other() -> None:
    torch.manual_seed(1)
    wanted = [numbers(), numbers()]
    torch.manual_seed(2)
    of_stream = [numbers(), numbers()]

    torch.manual_seed(1)
    streams.add("model-parallel-rng", 2)
    found = [numbers(), numbers(True), numbers(True), numbers()]
    assert [found[0], found[3]] == wanted and found[1:3] == of_stream


def test_a_stream_goes_on_after_an_error_in_its_block() -> None:
    streams.add("model-parallel-rng", 2)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(KeyError), streams.fork():
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    assert numbers(True) == torch.rand(6, generator=torch.Generator().manual_seed(2))[3:].tolist()


def gradients(call: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], list[float]]:
    """Those of two blocks that drop elements by the default generator and by a stream, and the numbers that follow."""
    torch.manual_seed(3)
    streams.reset()
    streams.add("model-parallel-rng", 4)
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def block(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with streams.fork():
            x = functional.dropout(layer(x), 0.5)
        return functional.dropout(x.tanh(), 0.5)

    x = torch.ones(8, 16, requires_grad=True)
    y = x
    for layer in layers:
        y = call(block, layer, y)
    return [*torch.autograd.grad(y.square().sum(), [x, *layers.parameters()])], numbers(True)


def test_a_checkpointed_call_draws_the_same_numbers_again() -> None:
    """Its second run must not go on where the stream is by then, and must not move it."""
    wanted, after = gradients(lambda block, *args: block(*args))
    found, after_twice = gradients(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and after_twice == after


def test_a_checkpoint_has_the_streams() -> None:
    assert "streams" not in random_state.capture(CPU)
    streams.add("a", 5)
    streams.add("b", 6)
    kept = random_state.capture(CPU)
    with streams.fork("b"):
        wanted = torch.rand(2).tolist()
    streams.reset()
    random_state.restore(kept, CPU)
    with streams.fork("b"):
        assert torch.rand(2).tolist() == wanted
    assert set(streams.get_states()) == {"a", "b"}


def test_states_are_those_of_when_they_were_asked_for() -> None:
    streams.add("model-parallel-rng", 5)
    kept = streams.get_states()
    wanted = numbers(True)
    streams.set_states(kept)
    assert numbers(True) == wanted


def test_names_that_are_there_and_names_that_are_not() -> None:
    own = RandomStreams()
    own.add("a", 1)
    with pytest.raises(ModelError, match=r"already a stream of random numbers called 'a'.*Remedy"):
        own.add("a", 2)
    with pytest.raises(ModelError, match=r"no stream of random numbers called 'b'; there are: 'a'\. Remedy"), own.fork("b"):
        pass


@pytest.mark.parametrize("kind", ("tensor_model", "slice", "model"))
def test_tensor_ranks_have_one_seed_and_a_stream_each(kind: str) -> None:
    """As in Megatron-LM, whose models ask for it by the name of ``model_parallel_cuda_manual_seed``."""
    for rank in (0, 3):
        checkpointing_names.configure(SimpleNamespace(**{f"get_{kind}_parallel_rank": lambda rank=rank: rank}))
        checkpointing_names.model_parallel_cuda_manual_seed(100)
        tracker = checkpointing_names.get_cuda_rng_tracker()
        assert numbers() == torch.rand(3, generator=torch.Generator().manual_seed(100)).tolist()
        with tracker.fork(checkpointing_names._MODEL_PARALLEL_RNG_TRACKER_NAME):
            assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(2818 + rank)))


def test_an_mpu_stays_until_another_comes() -> None:
    """Scripts call configure() again, for other settings."""
    checkpointing_names.configure(SimpleNamespace(get_model_parallel_rank=lambda: 2))
    checkpointing_names.configure(None, checkpoint_in_cpu=False)
    checkpointing_names.model_parallel_cuda_manual_seed(100)
    assert numbers(True) == torch.rand(3, generator=torch.Generator().manual_seed(2820)).tolist()


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        with streams.fork():
            nn.init.normal_(self.weight)


def drawn_by_layer(*indices: int) -> list[torch.Tensor]:
    builder = Builder([LayerSpec(Drawing) for _ in range(4)], lambda index: 10 + index, None)
    return [builder.layer(index).weight.detach() for index in indices]  # type: ignore[union-attr]


def test_layers_that_draw_from_a_stream_do_not_depend_on_stages() -> None:
    """Each layer has a seed of its own, whichever rank builds it; tensor ranks still differ, and the stream stays."""
    streams.add("model-parallel-rng", 0)
    before = streams.get_states()["model-parallel-rng"]
    whole, last = drawn_by_layer(0, 1, 2, 3), drawn_by_layer(2)
    assert torch.equal(last[0], whole[2]) and len({tuple(weight.tolist()) for weight in whole}) == 4
    assert torch.equal(streams.get_states()["model-parallel-rng"], before)
    streams.reset()
    streams.add("model-parallel-rng", 1)
    assert not torch.equal(drawn_by_layer(2)[0], last[0])


def test_without_an_mpu_there_is_one_tensor_rank() -> None:
    checkpointing_names.model_parallel_cuda_manual_seed(100)
    assert numbers(True) == torch.rand(3, generator=torch.Generator().manual_seed(2818)).tolist()
    checkpointing_names._set_cuda_rng_state(torch.Generator().manual_seed(7).get_state(), device=0)
    assert numbers() == torch.rand(3, generator=torch.Generator().manual_seed(7)).tolist()
