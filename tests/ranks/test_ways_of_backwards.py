"""Backwards that come to a unit by other ways than a tensor that its forward returns, or that none of its hooks sees."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerorun
from zerorun import log
from zerorun.errors import ModelError, StepError
from zerorun.zero.placeholders import tensors_held_by

WIDTH, BLOCKS, STEPS, RATE = 8, 5, 3, 0.1


@dataclass
class Fields:
    h: Any  # a tensor, or more of them


class Attributes:
    def __init__(self, h: torch.Tensor) -> None:
        self.h, self.itself = h, [self]


class Slots:
    __slots__ = ("inner",)

    def __init__(self, h: torch.Tensor) -> None:
        self.inner = Attributes(h)

    @property
    def h(self) -> torch.Tensor:
        return self.inner.h


def into_dict(block: Block, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    given["h"] = block.apply_to(given["h"])
    return given


def into_list(block: Block, given: list[torch.Tensor]) -> list[torch.Tensor]:
    given.append(block.apply_to(given[-1]))
    return given


def into_fields(block: Block, given: Fields) -> Fields:
    given.h = block.apply_to(given.h)
    return given


def deep_fields(block: Block, given: Any) -> Fields:
    """As deep as dataclasses may be."""
    x = given if isinstance(given, torch.Tensor) else given.h.h.h.h.h
    return Fields(Fields(Fields(Fields(Fields(block.apply_to(x))))))


def into_what_it_was_given(block: Block, given: dict[str, torch.Tensor]) -> None:
    given["h"] = block.apply_to(given["h"])


def in_place(block: Block, x: torch.Tensor) -> torch.Tensor:
    x += block.apply_to(torch.relu(x))
    return x


def unchanged_beside(block: Block, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x, first = given
    return block.apply_to(x), first


class Kept:
    """A cache, which each block fills further, and returns."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h, self.keys = h, list[torch.Tensor]()


def into_cache(block: Block, given: Kept) -> tuple[torch.Tensor, Kept]:
    given.keys.append(block.layer(given.h))
    given.h = given.h + torch.tanh(given.keys[-1])
    return given.h, given


def view_that_is_changed_later(block: Block, x: torch.Tensor) -> torch.Tensor:
    """As a linear layer makes of sequences, and an activation behind it changes in place."""
    out = block.layer(x.mul_(2))
    return out.view(out.shape)  # type: ignore[no-any-return]


def view_beside(block: Block, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x, before = given
    return block.apply_to(x + before), x.view(x.shape)


def identity(value: Any) -> Any:
    return value


# The forward of a block, what its input is made of, and how the output is read. Who returns None has changed the input.
Form = tuple[Callable[[Any, Any], Any], Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
FORMS: dict[str, Form] = {
    "a tensor": (lambda block, x: block.apply_to(x), identity, identity),
    "a dict": (into_dict, lambda h: {"h": h}, lambda out: out["h"]),
    "a list": (into_list, lambda h: [h], lambda out: out[-1]),
    "fields": (into_fields, Fields, lambda out: out.h),
    "fields in fields": (deep_fields, identity, lambda out: out.h.h.h.h.h),
    "nothing": (into_what_it_was_given, lambda h: {"h": h}, lambda out: out["h"]),
    "in place": (in_place, identity, identity),
    "attributes": (lambda block, given: Attributes(block.apply_to(given.h)), Attributes, lambda out: out.h),
    "slots": (lambda block, given: (Slots(block.apply_to(given[0].h)),), lambda h: (Slots(h),), lambda out: out[0].h),
    "a cache": (lambda block, given: into_cache(block, given[1]), lambda h: (h, Kept(h)), lambda out: out[0]),
    "a view": (view_that_is_changed_later, identity, identity),
    "a view beside": (view_beside, lambda h: (h, h), lambda out: out[0] + out[1]),
    "unchanged beside": (unchanged_beside, lambda h: (h, h), lambda out: out[0] + out[1]),
}


class Block(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.layer = form, nn.Linear(WIDTH, WIDTH)

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))

    def forward(self, given: Any) -> Any:
        return FORMS[self.form][0](self, given)


class Stack(nn.Module):
    def __init__(self, form: str, recompute: bool = False) -> None:
        super().__init__()
        self.form, self.recompute = form, recompute
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(form) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, pack, unpack = FORMS[self.form]
        given = pack(self.first(x))
        for block in self.blocks:
            out = checkpoint(block, given, use_reentrant=False) if self.recompute else block(given)
            given = given if out is None else out
        return self.head(unpack(given))


def batches() -> torch.Tensor:
    """[steps, ranks, samples, width]."""
    return torch.randn(STEPS, dist.get_world_size(), 2, WIDTH, generator=torch.Generator().manual_seed(1))


def begin(module: nn.Module, stage: int, **changes: Any) -> tuple[zerorun.Engine, nn.Module, torch.optim.Optimizer]:
    """An engine, and the same model with the same optimizer in one process."""
    alone = copy.deepcopy(module)
    sgd = {"type": "SGD", "params": {"lr": RATE}}
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "optimizer": sgd, **changes}
    engine = zerorun.initialize(module, {**config, "zero_optimization": {"stage": stage}})
    return engine, alone, torch.optim.SGD(alone.parameters(), lr=RATE)


def largest_difference(engine: zerorun.Engine, alone: nn.Module) -> float:
    found, wanted = engine.state_dict(), alone.state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


def trained(form: str, stage: int, recompute: bool) -> float:
    torch.manual_seed(0)
    return difference_after_training(Stack(form, recompute), stage)


def difference_after_training(module: nn.Module, stage: int) -> float:
    engine, alone, optimizer = begin(module, stage)
    for step in batches():
        engine.backward(engine(step[dist.get_rank()]).square().mean())
        engine.step()
        torch.stack([alone(x).square().mean() for x in step]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = largest_difference(engine, alone)
    engine.destroy()
    return found


# From which torch cannot recompute.
CHANGE_THEIR_INPUT = ("a dict", "a list", "fields", "nothing", "in place", "a cache", "a view")
ROWS = [(form, stage, False) for form in FORMS for stage in (2, 3)]
ROWS += [(form, stage, True) for form in FORMS for stage in (2, 3) if form not in CHANGE_THEIR_INPUT]


@pytest.mark.parametrize(
    ("form", "stage", "recompute"), by_day(ROWS, *((form, 3, False) for form in FORMS), ("attributes", 3, True))
)
def test_what_a_forward_makes_is_seen_wherever_it_puts_it(form: str, stage: int, recompute: bool) -> None:
    assert max(run_ranks(2, trained, form, stage, recompute)) < 1e-6


ELSEWHERE: list[torch.Tensor] = []
KEEPERS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "an attribute": lambda block, loss: setattr(block, "loss", loss),
    "a list": lambda block, loss: setattr(block, "losses", [{"kept": loss}]),
    "of a part": lambda block, loss: setattr(block.layer, "loss", loss),
    "elsewhere": lambda block, loss: ELSEWHERE.append(loss),
}


class KeepsALoss(nn.Module):
    """Its loss is of a layer that its output needs as well, or else of one of its own. ``local``: others bring nothing."""

    def __init__(self, keeper: str, shares: bool, local: bool) -> None:
        super().__init__()
        self.layer, self.beside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keeper, self.shares, self.local = keeper, shares, local

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x))
        KEEPERS[self.keeper](self, (self.layer if self.shares else self.beside)(y).square().mean())
        return y.detach() if self.local else y


def losses_kept_by(module: nn.Module) -> torch.Tensor:
    kept = [tensor for part in module.modules() for tensor in tensors_held_by(vars(part)) if tensor.grad_fn is not None]
    total = sum([*kept, *ELSEWHERE])
    ELSEWHERE.clear()
    assert isinstance(total, torch.Tensor)
    return total


def kept_losses(stage: int, keeper: str, shares: bool, local: bool = False) -> tuple[str | float, list[str]]:
    """The losses that blocks keep are added to the loss: the error, or the difference of weights; and the warnings."""
    torch.manual_seed(0)
    engine, alone, optimizer = begin(nn.Sequential(*(KeepsALoss(keeper, shares, local) for _ in range(BLOCKS))), stage)
    found: str | float
    try:
        for step in batches():
            out = engine(step[dist.get_rank()])
            engine.backward(out.square().mean() + losses_kept_by(engine.module))
            engine.step()
            torch.stack([alone(x).square().mean() + losses_kept_by(alone) for x in step]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = largest_difference(engine, alone)
    except ModelError as error:
        found = str(error)
    engine.destroy()
    torch.ones((), requires_grad=True).backward()  # torch keeps what was ready when a backward failed, until the next one
    return found, [text for text in log._warned if "after its output" in text]


@pytest.mark.parametrize("shares", (True, False))
def test_a_loss_that_a_block_keeps_counts(shares: bool) -> None:
    """A backward begins with it, before it comes to the outputs: at stage 3 the weights were those of another block."""
    assert max(found for found, _ in run_ranks(2, kept_losses, 2, "an attribute", shares)) < 1e-6
    for keeper in ("an attribute", "a list", "of a part"):
        for found, warnings in run_ranks(2, kept_losses, 3, keeper, shares):
            assert isinstance(found, float) and found < 1e-6 and not warnings, (keeper, found)
    assert max(found for found, _ in run_ranks(2, kept_losses, 3, "an attribute", shares, True)) < 1e-6


def test_a_loss_that_is_kept_where_nobody_looks_is_no_silent_error() -> None:
    for found, warnings in run_ranks(2, kept_losses, 3, "elsewhere", False):
        assert str(found).startswith("a backward needs weights of a unit") and "Remedy: keep it" in str(found)
        assert len(warnings) == 1 and "KeepsALoss computes something" in warnings[0] and "Remedy: keep it" in warnings[0]
    for found, warnings in run_ranks(2, kept_losses, 3, "elsewhere", True):
        assert str(found).startswith("a backward needs weights of a unit") and len(warnings) == 1


class Featured(nn.Module):
    """Keeps what it computes on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ELSEWHERE.append(torch.tanh(self.up(x)))
        self.feature = self.down(ELSEWHERE[-1])
        return x + self.feature


SEEN: list[torch.Tensor] = []  # by the hook of the script


def loss_with_feature(form: str, model: Any, block: Any, x: torch.Tensor) -> torch.Tensor:
    """Of what ``block``, the last but one, has made on the way, with or without the output of ``model``."""
    out = model(x)
    found = block.feature
    if form in ("a hook", "elsewhere"):
        found = SEEN[0] if form == "a hook" else ELSEWHERE[BLOCKS - 2]
    SEEN.clear()
    ELSEWHERE.clear()
    return found.square().mean() + (out.square().mean() if form == "both" else 0.0)  # type: ignore[no-any-return]


def features(stage: int, form: str, frozen: bool) -> str | float:
    """The error, or the difference of weights. ``frozen``: a layer before the blocks is trained, and they are not."""
    torch.manual_seed(0)
    module = nn.Sequential(*(Featured() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1))
    if frozen:
        module[1:].requires_grad_(False)
    engine, alone, optimizer = begin(module, stage)
    if form == "a hook":
        for model in (module, alone):
            model[BLOCKS - 2].up.register_forward_hook(lambda layer, args, output: SEEN.append(output))
    try:
        for step in batches():
            engine.backward(loss_with_feature(form, engine, module[BLOCKS - 2], step[dist.get_rank()]))
            engine.step()
            torch.stack([loss_with_feature(form, alone, alone[BLOCKS - 2], x) for x in step]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return largest_difference(engine, alone)
    except ModelError as error:
        return str(error)
    finally:
        SEEN.clear()
        ELSEWHERE.clear()
        engine.destroy()  # which is freed, though the blocks keep tensors with its hooks
        torch.ones((), requires_grad=True).backward()


@pytest.mark.parametrize("frozen", (False, True))
def test_a_loss_of_what_a_block_computes_on_the_way(frozen: bool) -> None:
    """As in distillation: a backward comes into the block, and to none of its outputs. The slot had others' weights."""
    for form in ("an attribute", "a hook", "both"):
        for stage in (2, 3):
            assert max(run_ranks(2, features, stage, form, frozen)) < 1e-6, (form, stage)
    for found in run_ranks(2, features, 3, "elsewhere", frozen):
        assert "a backward needs weights of a unit that are not on this rank" in str(found) and "Remedy: keep it" in str(
            found
        )


class Writes(nn.Module):
    """Sets a weight of its own in its first forward, as ActNorm does, or in each, as a codebook."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH), requires_grad=how != "frozen")
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "replaced":
                self.scale.data = self.scale.data / 2
            else:
                self.scale.mul_(0.5)
        return self.layer(x) * self.scale


def writes(how: str) -> str:
    engine, *_ = begin(nn.Sequential(*(Writes(how) for _ in range(BLOCKS))), 3)
    with pytest.raises(ModelError) as caught:
        engine(batches()[0, 0])
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("how", ("trained", "frozen", "replaced"))
def test_a_forward_that_writes_to_its_weights_is_refused_at_stage_3(how: str) -> None:
    """What it wrote was gone with the slot, without a word."""
    for said in run_ranks(2, writes, how):
        assert (
            said.startswith("the forward of unit '0' has written to '0.scale', parameters of its own") and "Remedy" in said
        )


def local_losses(stage: int) -> float:
    """Each block has a loss, and gives no gradients to the one before: the root unit gets none."""
    torch.manual_seed(0)
    engine, alone, optimizer = begin(nn.Sequential(*(KeepsALoss("an attribute", True, True) for _ in range(BLOCKS))), stage)
    for step in batches():
        engine(step[dist.get_rank()])
        engine.backward(losses_kept_by(engine.module))
        engine.step()
        losses = []
        for x in step:
            alone(x)
            losses.append(losses_kept_by(alone))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = largest_difference(engine, alone)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_losses_of_blocks_alone_are_a_backward(stage: int) -> None:
    """It ended in "step() without backward()"."""
    assert max(run_ranks(2, local_losses, stage)) < 1e-6


class InAThread(nn.Module):
    """Runs its layers in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            for layer in self.layers:
                x = pool.submit(layer, x).result()
        return x


def threaded(stage: int) -> float:
    torch.manual_seed(0)
    return difference_after_training(InAThread(), stage)


def test_blocks_may_run_in_a_thread() -> None:
    """The watch of the first pass was ended where it had not begun: an internal error."""
    assert max(run_ranks(2, threaded, 3)) < 1e-6


class Tempered(nn.Module):
    """Its temperature is used by the loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.log_t = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def penalty(module: nn.Module, stage: int) -> torch.Tensor:
    """Of parameters that no forward of this backward has used. At stage 3 those of layers are not there."""
    layers = sum(param.abs().sum() for param in module.body.parameters()) if stage < 3 else 0.0
    return (module.log_t - 1).square() + 0.01 * layers  # type: ignore[operator, no-any-return]


def penalised(stage: int, last: bool, accumulation: int, plain: bool) -> float:
    """``plain``: the penalty's own backward is called, of which the engine learns in the step."""
    torch.manual_seed(0)
    engine, alone, optimizer = begin(Tempered(), stage, gradient_accumulation_steps=accumulation)
    for step in batches():
        for _ in range(accumulation):
            loss, extra = engine(step[dist.get_rank()]).square().mean(), penalty(engine.module, stage)
            backwards = [partial(engine.backward, loss), extra.backward if plain else partial(engine.backward, extra)]
            for backward in backwards if last else reversed(backwards):
                backward()
            engine.step()
            for loss in (torch.stack([alone(x).square().mean() for x in step]).mean(), penalty(alone, stage)):
                (loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = largest_difference(engine, alone)
    engine.destroy()
    return found


@pytest.mark.each_pair
@pytest.mark.parametrize("plain", (True, False))
@pytest.mark.parametrize("accumulation", (1, 2))
@pytest.mark.parametrize("last", (True, False))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_backward_that_comes_to_no_forward_counts(stage: int, last: bool, accumulation: int, plain: bool) -> None:
    assert max(run_ranks(2, penalised, stage, last, accumulation, plain)) < 1e-6


# -- gradients of inputs alone ------------------------------------------------------------------------------------

INPUT_GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "grad": lambda loss, x: torch.autograd.grad(loss, x),
    "inputs": lambda loss, x: loss.backward(inputs=[x]),
}


def beside_steps(how: str, stage: int, folder: str) -> tuple[float, list[str]]:
    """Gradients of inputs before and in each step: the difference of weights, and what steps without any others say."""
    log._warned.clear()
    torch.manual_seed(0)
    engine, alone, optimizer = begin(TwoHeads(), stage, gradient_accumulation_steps=2)
    said = []

    def of_inputs() -> None:
        x = torch.ones(2, WIDTH, requires_grad=True)
        INPUT_GRADIENTS[how](engine(x)[0].mean(), x)

    for step in batches():
        of_inputs()
        engine.save_checkpoint(folder)
        engine.set_train_batch_size(engine.train_batch_size())
        engine.set_gradient_accumulation_boundary(True)
        with pytest.raises(StepError) as caught:
            engine.step()
        said.append(str(caught.value))
        for number in range(2):
            engine.set_gradient_accumulation_boundary(number == 1)
            of_inputs()
            engine.backward(engine(step[dist.get_rank()])[number].square().mean())
            engine.step()
        torch.stack([head.square().mean() / 2 for x in step for head in alone(x)]).mul(1 / 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = largest_difference(engine, alone)
    engine.destroy()
    return found, said


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("how", INPUT_GRADIENTS)
def test_gradients_of_inputs_are_no_part_of_a_step(how: str, stage: int, tmp_path: Any) -> None:
    for found, said in run_ranks(2, beside_steps, how, stage, str(tmp_path)):
        assert found < 1e-6
        assert said and all("no gradients of parameters since the last step()" in text for text in said), said


def untrue_warnings(stage: int) -> int:
    """Of steps with a penalty on the gradient of the input: that their two backwards were meant to be one update."""
    log._warned.clear()
    engine, *_ = begin(TwoHeads(), stage, gradient_accumulation_steps=2)
    x = torch.ones(2, WIDTH, requires_grad=True)
    for _ in range(2):
        y = engine(x)[0].square()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        engine.backward(y.mean() + slope.square().mean())
        engine.step()
    engine.destroy()
    return sum("counts as one of gradient_accumulation_steps" in text for text in log._warned)


@pytest.mark.parametrize("stage", (0, 3))
def test_the_gradient_for_a_penalty_is_no_micro_batch(stage: int) -> None:
    assert run_ranks(2, untrue_warnings, stage) == [0, 0]


class OnOneRank(nn.Module):
    """Only the layers ``own`` are trained, which rank 0 alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).requires_grad_(False)
        self.own = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        y = self.body(x)
        return self.own(y) if rank == 0 else y


def without_gradients(stage: int) -> float:
    """A plain backward leaves no gradients on rank 1."""
    torch.manual_seed(0)
    engine, alone, optimizer = begin(OnOneRank(), stage)
    for step in batches().requires_grad_():
        rank = dist.get_rank()
        engine(step[rank], rank).square().mean().backward()
        engine.step()
        torch.stack([alone(x, rank).square().mean() for rank, x in enumerate(step)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = largest_difference(engine, alone)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day(range(4), 0, 3))
def test_a_rank_without_gradients_takes_part_in_a_step(stage: int) -> None:
    assert max(run_ranks(2, without_gradients, stage)) < 1e-6


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.actor, self.critic = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.actor(hidden), self.critic(hidden)


def from_before(stage: int) -> str:
    """The error of a backward by a forward from before step()."""
    engine, *_ = begin(TwoHeads(), stage)
    first, second = engine(torch.ones(2, WIDTH))
    engine.backward(first.mean(), retain_graph=True)
    engine.step()
    try:
        engine.backward(second.mean())
    except StepError as error:
        return str(error)
    finally:
        engine.destroy()
    return "nothing"


@pytest.mark.parametrize("stage", (0, 3))
def test_a_forward_from_before_the_last_step_is_refused(stage: int) -> None:
    """torch says of such a backward that weights were modified by an inplace operation; zerorun's are views."""
    for text in run_ranks(2, from_before, stage):
        assert "by a forward from before the last step()" in text and "Remedy: run the forward again" in text
