"""The loss scale: once inside each engine, on whatever way a gradient comes; beside one process in fp64, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from simulation import simulated_device
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import make_config, shared_topology
from transformers.modeling_outputs import CausalLMOutputWithPast

import zerorun
from zerorun.errors import StepError
from zerorun.zero import safe_get_full_grad

WIDTH = 4


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: Any


@dataclass(frozen=True)
class Record:
    loss: torch.Tensor
    logits: Any


OUTPUTS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "dict in a list": lambda loss, logits: [{"loss": loss}, [logits]],
    "named tuple": Pair,
    "frozen dataclass": Record,
    "of Hugging Face": lambda loss, logits: CausalLMOutputWithPast(loss=loss, hidden_states=logits),
}


def loss_in(output: Any) -> torch.Tensor:
    found = output[0] if isinstance(output, list) else output
    loss: torch.Tensor = found["loss"] if isinstance(found, dict) else found.loss
    return loss


class Layers(nn.Module):
    """Layers with a power of two in each row, so that nothing is rounded in fp16. ``kind``: of OUTPUTS; else a tensor."""

    def __init__(self, seed: int, kind: str = "", bad: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.kind, self.bad = kind, bad
        draw = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            factors = 2.0 ** torch.randint(-1, 1, (WIDTH, 1), generator=draw)
            layer.weight.data = torch.eye(WIDTH)[torch.randperm(WIDTH, generator=draw)] * factors

    def forward(self, x: torch.Tensor) -> Any:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        if self.bad:
            x.register_hook(fail)
        return OUTPUTS[self.kind](mean_square(x), tuple(states)) if self.kind else x


def fail(grad: torch.Tensor) -> None:
    raise ArithmeticError("planted")


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean()


def given(rank: int) -> torch.Tensor:
    return torch.randint(-2, 3, (2, WIDTH), generator=torch.Generator().manual_seed(rank)).double()


def engine_of(model: nn.Module, stage: int, scale: float, **changes: Any) -> zerorun.Engine:
    """``scale``: the loss scale of fp16; 0: fp32."""
    precision = {"fp16": {"enabled": True, "loss_scale": scale}} if scale else {}
    config = make_config(stage, optimizer="SGD", **precision, **changes)
    return zerorun.initialize(model, config, topology=shared_topology())


def gradients(models: Sequence[nn.Module]) -> list[torch.Tensor]:
    found = (safe_get_full_grad(param) for model in models for param in model.parameters())
    return [grad.double().cpu() for grad in found if grad is not None]


Loss = Callable[[Sequence[Any], torch.Tensor], torch.Tensor]


def wanted(models: Sequence[nn.Module], loss_of: Loss) -> list[torch.Tensor]:
    """The gradients of one process in fp64, over the data of all ranks."""
    for model in models:
        model.double()
    for rank in range(dist.get_world_size()):
        (loss_of(models, given(rank)) / dist.get_world_size()).backward()
    return [param.grad for model in models for param in model.parameters() if param.grad is not None]


def equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return bool(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def backward(how: str, loss: torch.Tensor, engines: Sequence[zerorun.Engine]) -> None:
    if how == "plain":
        loss.backward()
    elif how == "scale":
        engines[0].scale(loss).backward()
    else:
        engines[["first", "last"].index(how) * (len(engines) - 1)].backward(loss)


def compare(
    builds: Sequence[Callable[[], nn.Module]], loss_of: Loss, stage: int, scales: Sequence[float], ways: Sequence[str]
) -> dict[str, bool]:
    expected = wanted([build() for build in builds], loss_of)
    engines = [engine_of(build(), stage, scale) for build, scale in zip(builds, scales, strict=True)]
    found = {}
    for how in ways:
        backward(how, loss_of(engines, given(dist.get_rank()).float().to(engines[0].device)), engines)
        found[how] = equal(gradients([engine.module for engine in engines]), expected)
        for engine in engines:
            engine.zero_grad()
    for engine in engines:
        engine.destroy()
    return found


# -- one engine ---------------------------------------------------------------------------------------------------


def outputs(stage: int) -> dict[str, dict[str, bool]]:
    return {kind: output_of(kind, stage) for kind in OUTPUTS}


def output_of(kind: str, stage: int) -> dict[str, bool]:
    def loss_of(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        output = models[0](x)
        assert type(output) is type(OUTPUTS[kind](x, ()))
        return loss_in(output)

    return compare([lambda: Layers(1, kind)], loss_of, stage, [8.0], ["plain", "first", "scale"])


@pytest.mark.parametrize("stage", by_day(range(4), 0, 3))
def test_losses_that_come_with_what_they_were_computed_from(stage: int) -> None:
    for found in run_ranks(2, outputs, stage):
        assert set(found) == set(OUTPUTS)
        assert all(all(of_kind.values()) for of_kind in found.values()), found


def again(stage: int) -> dict[str, dict[str, bool]]:
    def twice(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        return mean_square(models[0](models[0](x)))

    def changed(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        y = models[0](x)
        y.mul_(2)
        return mean_square(y + models[0](x))

    def no_mean(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        loss = loss_in(models[0](x))
        loss /= 2
        return loss

    found = {"twice": compare([lambda: Layers(1)], twice, stage, [8.0], ["plain", "first", "scale"])}
    found["in place"] = compare([lambda: Layers(1)], changed, stage, [8.0], ["plain", "first"])
    found["loss in place"] = compare([lambda: Layers(1, "dict")], no_mean, stage, [8.0], ["plain", "first"])
    return found


@pytest.mark.parametrize("stage", by_day(range(4), 0, 3))
def test_outputs_that_are_inputs_or_written_to(stage: int) -> None:
    for found in run_ranks(2, again, stage):
        assert all(all(of_kind.values()) for of_kind in found.values()), found


class Squares(nn.Module):
    """Its gradient of the input depends on the weights, and on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square()


def penalties(stage: int) -> tuple[dict[str, bool], bool]:
    def penalty(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        y = models[0](x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().mean() + (y.sum(1) * slope[:, 0]).to(x.dtype).mean()

    def plain_and_kept(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = model(x)
        y.retain_grad()
        mean_square(y).backward()
        assert x.grad is not None and y.grad is not None
        return [x.grad.double().cpu(), y.grad.double().cpu()]

    found = compare([Squares], penalty, stage, [8.0], ["plain", "first", "scale"])
    engine, x = engine_of(Squares(), stage, 8.0), given(dist.get_rank())
    same = equal(plain_and_kept(engine, x.float().to(engine.device)), plain_and_kept(Squares().double(), x))
    engine.destroy()
    return found, same


@pytest.mark.parametrize("stage", by_day(range(4), 0, 3))
def test_gradients_of_inputs_and_outputs_are_not_scaled(stage: int) -> None:
    for found, same in run_ranks(2, penalties, stage):
        assert all(found.values()), found
        assert same


def after_an_exception(stage: int) -> bool:
    """A backward of a scaled loss ends in an exception, which the script catches; then a plain one."""

    def loss_of(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        return mean_square(models[0](x))

    expected = wanted([Layers(1)], loss_of)
    engine = engine_of(Layers(1, bad=True), stage, 8.0)
    x = given(dist.get_rank()).float().to(engine.device)
    with pytest.raises(ArithmeticError):
        engine.scale(loss_of([engine], x)).backward()
    engine.zero_grad()
    engine.module.bad = False
    loss_of([engine], x).backward()
    found = equal(gradients([engine.module]), expected)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", (0, 2))
def test_a_scaled_backward_that_fails_is_over(stage: int) -> None:
    assert all(run_ranks(2, after_an_exception, stage))


class Holder:
    """A class of the script's own, in which an engine finds no tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Held(Layers):
    def forward(self, x: torch.Tensor) -> Any:
        return Holder(super().forward(x))


class Recomputed(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


Ways = dict[str, Callable[[Any, torch.Tensor], torch.Tensor]]
NOT_PASSED: Ways = {
    "the module": lambda engine, x: getattr(engine, "module", engine)(x.to(next(engine.parameters()).dtype)).tensor,
    "an object": lambda engine, x: engine(x).tensor,
}


def not_passed(stage: int) -> dict[str, list[str] | bool]:
    """What a plain backward and a step say, whether weights stay, and whether the engine's backward is right after it."""
    found: dict[str, list[str] | bool] = {}
    for name, output in NOT_PASSED.items():

        def loss_of(models: Sequence[Any], x: torch.Tensor, output: Any = output) -> torch.Tensor:
            return mean_square(output(models[0], x))

        expected = wanted([Held(1)], loss_of)
        engine, x = engine_of(Held(1), stage, 8.0), given(dist.get_rank()).float()
        before, said = engine.state_dict(), []
        for run in (lambda: loss_of([engine], x).backward(), engine.step):  # noqa: B023
            with pytest.raises(StepError) as caught:
                run()
            said.append(str(caught.value))
        found[name] = said
        found[f"{name}, weights"] = all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())
        engine.zero_grad()
        engine.scale(loss_of([engine], x)).backward()
        found[f"{name}, scaled"] = equal(gradients([engine.module]), expected)
        engine.zero_grad()
        engine.backward(loss_of([engine], x))
        found[f"{name}, by the engine"] = equal(gradients([engine.module]), expected)
        engine.step()
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day(range(4), 0, 3))
def test_a_plain_backward_that_does_not_pass_the_border_is_refused(stage: int) -> None:
    for found in run_ranks(2, not_passed, stage):
        for name in NOT_PASSED:
            said = found.pop(name)
            assert isinstance(said, list)
            assert all("without the loss scale" in text and "Remedy: engine.zero_grad(" in text for text in said), said
        assert all(found.values()), found


def passed(stage: int) -> dict[str, bool]:
    """Plain backwards that are right: in recomputation, twice, to inputs alone, and without a loss scale."""

    def loss_of(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        return mean_square(models[0](x))

    def twice(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(models, x.clone().requires_grad_())
        if hasattr(models[0], "module"):
            (loss / 2).backward(retain_graph=True)
            return loss / 2
        return loss

    found = {f"twice {name}": same for name, same in compare([lambda: Layers(1)], twice, stage, [8.0], ["plain"]).items()}

    def recomputed(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        return loss_of(models, x.clone().requires_grad_())

    ways = ["plain", "first", "scale"]
    found |= compare([lambda: Recomputed(1)], recomputed, stage, [8.0], ways)
    engine, x = engine_of(Held(1), stage, 8.0), given(dist.get_rank()).float().requires_grad_()
    y = NOT_PASSED["the module"](engine, x)
    found["inputs"] = equal(torch.autograd.grad(y.sum(), x), torch.autograd.grad(Layers(1)(x).sum(), x))
    engine.zero_grad()
    engine.destroy()
    engine = engine_of(Held(1), stage, 1.0)
    NOT_PASSED["an object"](engine, given(dist.get_rank()).float()).square().mean().backward()
    found["no scale"] = equal(
        gradients([engine.module]), wanted([Held(1)], lambda models, x: mean_square(models[0](x).tensor))
    )
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day(range(4), 0, 3))
def test_plain_backwards_that_are_right_are_not_refused(stage: int) -> None:
    for found in run_ranks(2, passed, stage):
        assert all(found.values()), found


# -- two engines --------------------------------------------------------------------------------------------------


def through_both(stage: int, scales: Sequence[float]) -> dict[str, bool]:
    def loss_of(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        generator, critic = models
        y = generator(x)
        return mean_square(critic(y.to(torch.promote_types(y.dtype, torch.float32)))) + mean_square(y)

    ways = ["first", "last", "plain", "scale"]
    return compare([lambda: Layers(1), lambda: Layers(2)], loss_of, stage, scales, ways)


@pytest.mark.parametrize("scales", ((8.0, 16.0), (8.0, 0.0), (0.0, 16.0)), ids=str)
@pytest.mark.parametrize("stage", by_day(range(4), 1, 3))
def test_a_loss_through_two_engines(stage: int, scales: tuple[float, float]) -> None:
    for found in run_ranks(2, through_both, stage, scales):
        assert all(found.values()), found


def weighted(stage: int, scales: Sequence[float], trained: bool) -> tuple[bool, str]:
    """Micro-batches with the weights 1 and 3, given to one engine only, and then one without a weight."""
    weights = (1, 3)

    def loss_of(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        return mean_square(models[1](models[0](x)))

    def all_losses(models: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
        return sum(loss_of(models, x + n) * weight / 4 for n, weight in enumerate(weights))  # type: ignore[return-value]

    models = Layers(1), Layers(2)
    expected = wanted([models[0], models[1].requires_grad_(trained)], all_losses)
    made = Layers(1), Layers(2)
    engines = [engine_of(model, stage, scale, accumulation=2) for model, scale in zip(made, scales, strict=True)]
    made[1].requires_grad_(trained)  # as in a GAN, by turns
    x = given(dist.get_rank()).float().to(engines[0].device)
    for number, weight in enumerate(weights):
        engines[0].backward(loss_of(engines, x + number), weight=torch.tensor(weight, device=x.device))
    found, text = equal(gradients(made if trained else made[:1]), expected), ""
    made[1].requires_grad_()
    try:
        engines[1].backward(mean_square(engines[1](x)))
    except StepError as error:
        text = str(error)
    for engine in engines:
        engine.destroy()
    return found, text


@pytest.mark.parametrize("scales", ((0.0, 0.0), (8.0, 16.0)), ids=str)
@pytest.mark.parametrize("stage", by_day(range(4), 1, 2))
def test_a_weight_counts_in_all_engines_that_the_loss_went_through(stage: int, scales: tuple[float, float]) -> None:
    for found, text in run_ranks(2, weighted, stage, scales, True):
        assert found
        assert "called with a weight and then a loss to be averaged" in text


def weighted_on_a_device(stage: int) -> tuple[bool, str]:
    """A device keeps the weights; the program does not know them."""
    with simulated_device():
        return weighted(stage, (8.0, 16.0), True)


@pytest.mark.parametrize("stage", (1, 3))
def test_a_weight_on_a_device_counts_in_all_engines(stage: int) -> None:
    for found, text in run_ranks(2, weighted_on_a_device, stage):
        assert found
        assert "called with a weight and then a loss to be averaged" in text


def test_a_weight_does_not_count_in_an_engine_without_gradients() -> None:
    assert run_ranks(2, weighted, 1, (0.0, 0.0), False) == [(True, "")] * 2


def one_not_passed(stage: int, scales: Sequence[float]) -> tuple[str, bool]:
    """What a loss through two engines says, of which the second keeps its output from the border; and the first alone."""
    engines = [
        engine_of(build(seed), stage, scale) for build, seed, scale in zip((Layers, Held), (1, 2), scales, strict=True)
    ]
    x, text = given(dist.get_rank()).float(), ""
    try:
        engines[0].backward(mean_square(engines[1](engines[0](x).float()).tensor))
    except StepError as error:
        text = str(error)
    for engine in engines:
        engine.zero_grad()
    mean_square(engines[0](x)).backward()
    same = equal(gradients([engines[0].module]), wanted([Layers(1)], lambda models, x: mean_square(models[0](x))))
    for engine in engines:
        engine.destroy()
    return text, same


@pytest.mark.parametrize("scales", ((8.0, 16.0), (8.0, 0.0), (0.0, 16.0)), ids=str)
def test_a_loss_that_does_not_pass_the_border_of_one_of_two_engines_is_refused(scales: tuple[float, float]) -> None:
    for text, same in run_ranks(2, one_not_passed, 1, scales):
        assert "without the loss scale" in text
        assert same


def scaled_twice() -> tuple[list[str], bool]:
    engines = [engine_of(Layers(seed), 1, scale) for seed, scale in ((1, 8.0), (2, 16.0))]
    x, found = given(dist.get_rank()).float().to(engines[0].device), []
    errors = []  # kept, as a debugger does: their backwards are over all the same

    def losses() -> list[torch.Tensor]:
        return [mean_square(engine(x)) for engine in engines]

    for run in (
        lambda: engines[0].backward(engines[0].scale(losses()[0])),
        lambda: sum(engine.scale(loss) for engine, loss in zip(engines, losses(), strict=True)).backward(),
        lambda: sum(map(engines[0].scale, losses())).backward(),  # is right
    ):
        try:
            run()
            found.append("")
        except StepError as error:
            found.append(str(error))
            errors.append(error)
        for engine in engines:
            engine.zero_grad()
    sum(losses()).backward()
    same = equal(gradients([engines[1].module]), wanted([Layers(2)], lambda models, x: mean_square(models[0](x))))
    for engine in engines:
        engine.destroy()
    return found, same


def test_a_loss_that_is_scaled_twice_is_refused() -> None:
    for (twice, both, right), same in run_ranks(2, scaled_twice):
        assert same
        assert "twice, or parts of it by different ones (8, 8)" in twice
        assert "(16, 8)" in both or "(8, 16)" in both
        assert not right
