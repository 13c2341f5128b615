"""``param.grad`` between a backward and the step: what a script finds and is told, with and without the DeepSpeed mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import CASES, Place
from torch import nn
from training import make_config, make_engine

import zerorun
from zerorun import log
from zerorun.deepspeed.entry import initialize as initialize_as_deepspeed
from zerorun.deepspeed.shown_gradients import show_gradients
from zerorun.errors import StepError
from zerorun.pipeline.module import PipelineModule
from zerorun.zero import safe_get_full_grad

Gradients = dict[str, "torch.Tensor | None"]


def grads(module: nn.Module) -> Gradients:
    return {
        name: None if param.grad is None else param.grad.detach().clone().as_subclass(torch.Tensor)
        for name, param in module.named_parameters()
    }


def look(model: str, config: dict[str, Any]) -> list[Gradients]:
    """After each of two micro-batches of two steps, and after the steps. Only the first rank looks in the first one."""
    before = "grad" in vars(nn.Parameter)
    engine = make_engine(CASES[model], config)
    show_gradients(engine)
    found = []
    for step in range(2):
        for micro in range(2):
            engine.backward(CASES[model].loss(engine, Place(dist.get_rank(), step, micro)))
            if step or dist.get_rank() == 0:
                found.append(grads(engine.module))
            if micro == 1 and step:
                found.append({name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()})
            engine.step()
        found.append(grads(engine.module))
    engine.destroy()
    assert ("grad" in vars(nn.Parameter)) == before
    return found[-4:] if dist.get_rank() else found


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ("fp32", "fp16", "bf16"))
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("model", ("plain", "tied"))
def test_it_is_what_deepspeed_has(model: str, stage: int, precision: str) -> None:
    """At stage 0 the average, at stage 1 this rank's own before the last micro-batch, else None. After a step: None."""
    first, second = run_ranks(2, look, model, make_config(stage, accumulation=2, precision=precision))
    assert all(value is None for gradients in (first[2], first[-1], second[-1]) for value in gradients.values())
    own, last, full = (
        dict(zip(("first", "second"), pair, strict=True)) for pair in zip(first[3:6], second[:3], strict=True)
    )
    close = partial(torch.testing.assert_close, rtol=0.0 if precision == "fp32" else 1e-2, atol=1e-6)
    for name, whole in full["first"].items():
        values = own["first"][name], own["second"][name]
        if stage > 1:
            assert values == (None, None)
        else:
            assert not torch.equal(*values) and values[0].dtype == getattr(torch, DTYPES[precision])
        for rank in ("first", "second"):
            assert (last[rank][name] is None) == (stage > 0)
            if stage == 0:
                close(last[rank][name].float(), whole)


DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def write(stage: int) -> list[str]:
    engine = make_engine(CASES["plain"], make_config(stage))
    show_gradients(engine)
    engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 0, 0)))
    param = next(engine.module.parameters())
    written = (
        lambda: nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3),
        lambda: param.grad.mul_(2),
        lambda: param.grad.data.mul_(2),
        lambda: param.grad.view(-1).__setitem__(0, 1.0),
        lambda: setattr(param, "grad", torch.zeros_like(param)),
    )
    total = 0.0
    for other in engine.module.parameters():
        total += other.grad.norm() ** 2  # type: ignore[union-attr]
    assert type(total) is torch.Tensor and float(total) > 0 and bool(torch.isfinite(param.grad).all())
    said = []
    for action in written:
        with pytest.raises(StepError) as caught:
            action()
        said.append(str(caught.value))
    engine.zero_grad()
    engine.destroy()
    return said


def test_what_the_step_would_not_see_is_refused() -> None:
    assert all("Remedy: safe_set_full_grad" in text for text in run_ranks(1, write, 0)[0])


class ByHand(torch.autograd.Function):
    """A linear layer whose backward gives the weight its gradient by itself, in two parts, as axolotl's TiledMLP does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return nn.functional.linear(x, layer.weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,), weight = ctx.saved_tensors, ctx.layer.weight
        for rows, grad in zip(x.chunk(2), grads[0].chunk(2), strict=True):
            before = weight.grad
            weight.grad = grad.T @ rows if before is None else before + grad.T @ rows
        return grads[0] @ weight, None


class HasByHand(nn.Module):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand, self.first, self.last = by_hand, nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return (ByHand.apply(y, self.last) if self.by_hand else self.last(y)).square().mean()  # type: ignore[no-any-return]


def trained_by_hand(stage: int) -> float:
    """The largest difference of weights between that layer and torch's."""
    found = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        engine = zerorun.initialize(HasByHand(by_hand), make_config(stage, accumulation=2))
        show_gradients(engine)
        for step in range(4):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            engine.backward(engine(x))
            engine.step()
        found.append(engine.state_dict())
        engine.destroy()
    return max(float((value - found[1][name]).abs().max()) for name, value in found[0].items())


@pytest.mark.parametrize("stage", (0, 1))
def test_a_backward_may_set_it(stage: int) -> None:
    assert max(run_ranks(2, trained_by_hand, stage)) < 1e-6


def cancel(stage: int) -> tuple[list[str], bool]:
    """What is said of None after each of two micro-batches; and whether None at other times changes nothing."""
    case, said, weights = CASES["plain"], list[str](), []
    for cleans in (False, True):
        engine = make_engine(case, make_config(stage, accumulation=2))
        show_gradients(engine)
        params = list(engine.module.parameters())

        def clean(params: list[nn.Parameter] = params, engine: Any = engine, cleans: bool = cleans) -> None:
            for param in params if cleans else ():
                param.grad = None
            if cleans:
                engine.module.zero_grad(set_to_none=True)

        for step in range(2):
            for micro in range(2):
                clean()
                engine.backward(case.loss(engine, Place(dist.get_rank(), step, micro)))
                if cleans and step:
                    for param in (params[0], params[-1]):
                        with pytest.raises(StepError) as caught:
                            param.grad = None
                        said.append(str(caught.value))
                engine.step()
            clean()
        weights.append([value for _, value in sorted(engine.state_dict().items())])
        engine.backward(case.loss(engine, Place(dist.get_rank(), 2, 0)))
        engine.destroy()
        clean()
    return said, all(map(torch.equal, *weights))


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (0, 1))
@pytest.mark.parametrize("world", (1, 2))
def test_a_gradient_that_is_cancelled_is_no_secret(world: int, stage: int) -> None:
    """As DINO's cancel_gradients_last_layer does it: the layer moved all the same. Elsewhere None is harmless."""
    for said, same in run_ranks(world, cancel, stage):
        assert same and len(said) == 4
        assert all("set to None between backward and step" in text and "with zeros" in text for text in said)


# -- without the mode ------------------------------------------------------------------------------------------------


def told() -> list[str]:
    return [message for message in log._warned if message.startswith("param.grad of ")]


def read_in_a_loop(config: dict[str, Any]) -> list[list[str]]:
    """What was said by and by. All reads are of every parameter."""
    engine = make_engine(CASES["plain"], config)
    params, said = list(engine.module.parameters()), []
    for micro in range(2):
        assert all(param.grad is None for param in params)
        engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 0, micro)))
        torch.optim.SGD(params).zero_grad()
        said.append(told())
        if micro == 1:
            assert all(param.grad is None for param in params)
            said.append(told())
        engine.step()
    assert all(param.grad is None for param in params)
    engine.destroy()
    assert "grad" not in vars(nn.Parameter)
    return [*said, told()]


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("stage", range(4))
def test_a_script_that_reads_none_is_told_once(stage: int, precision: str) -> None:
    """`if param.grad is not None: param.grad.clamp_(...)` did nothing, without a word. Torch itself may look."""
    for first, second, third, last in run_ranks(2, read_in_a_loop, make_config(stage, accumulation=2, precision=precision)):
        assert (first, second) == ([], []) and third == last
        assert len(last) == 1 and "Remedy: safe_get_full_grad(param)" in last[0]


def set_in_a_loop(config: dict[str, Any]) -> tuple[list[str], bool]:
    """What is said of a value and of None after a backward; and whether zeros before each backward change nothing."""
    case, said, weights = CASES["plain"], list[str](), []
    for sets in (False, True):
        engine = make_engine(case, config)
        params = list(engine.module.parameters())
        for step in range(2):
            for param in params if sets else ():
                param.grad = torch.zeros_like(param)
            engine.backward(case.loss(engine, Place(dist.get_rank(), step, 0)))
            for value in (torch.ones_like(params[0]), None) if sets else ():
                with pytest.raises(StepError) as caught:
                    params[0].grad = value
                said.append(str(caught.value))
            engine.step()
        weights.append([value for _, value in sorted(engine.state_dict().items())])
        engine.destroy()
    return said, all(map(torch.equal, *weights))


@pytest.mark.parametrize("stage", (0, 1, 2))
def test_what_is_set_after_a_backward_is_refused(stage: int) -> None:
    """It was added to the engine's gradient. Zeros before a backward are what it adds to, as in plain PyTorch."""
    for said, same in run_ranks(2, set_in_a_loop, make_config(stage)):
        assert same and len(said) == 4
        assert all("set by hand: the step" in text for text in said[::2])
        assert all("set to None between backward and step" in text for text in said[1::2])


def as_in_deepspeed(stage: int) -> list[str]:
    engine, *_ = initialize_as_deepspeed(model=CASES["plain"].build(), config=make_config(stage))
    engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 0, 0)))
    for param in engine.module.parameters():
        assert param.grad is None
        param.grad = None
    engine.step()
    engine.destroy()
    return told()


def zero_a_layer() -> list[list[str]]:
    engine = make_engine(CASES["plain"], make_config(1))
    layer = next(module for module in engine.module.modules() if isinstance(module, nn.Linear))
    layer.zero_grad()
    engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 0, 0)))
    engine.module.zero_grad()  # is the engine's
    before = told()
    engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 0, 0)))
    layer.zero_grad()
    return [before, told()]


def test_zero_grad_of_a_part_of_a_model_is_told() -> None:
    for before, after in run_ranks(2, zero_a_layer):
        assert before == [] and len(after) == 1


@pytest.mark.parametrize("stage", (2, 3))
def test_deepspeed_says_nothing_of_it(stage: int) -> None:
    assert run_ranks(2, as_in_deepspeed, stage) == [[], []]


def stages_of_linear_layers(in_the_mode: bool) -> list[float]:
    torch.manual_seed(0)
    module = PipelineModule([nn.Linear(4, 4) for _ in range(4)], num_stages=2, loss_fn=lambda out, _: out.square().mean())
    config = make_config(1, accumulation=4, pipeline={"schedule": "zero_bubble"})
    engine = initialize_as_deepspeed(model=module, config=config)[0] if in_the_mode else zerorun.initialize(module, config)
    losses = []
    for step in range(3):
        rows = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(step))
        losses.append(float(engine.train_batch(iter([(row, None) for row in rows]))))
    engine.destroy()
    return losses


def test_a_split_backward_sets_it() -> None:
    """Zero bubble computes gradients of weights apart from a backward. In the mode it met copies."""
    native, mode = (run_ranks(2, stages_of_linear_layers, in_the_mode) for in_the_mode in (False, True))
    assert native == mode
