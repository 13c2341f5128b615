"""``layer.forward(x)`` and other methods have the weights as ``layer(x)`` has, and the model is left as it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import WIDTH, Block, Case, Gpt, Mlp, Place, token_loss, tokens
from reference import Result, differences, train_reference
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import make_config, make_engine, run_steps, train

from zerorun.errors import ModelError, StepError

STEPS = 3


class Direct(Gpt):
    """Calls all of its modules by ``forward``."""

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x

    def forward(self, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.head.forward(self.norm.forward(self.run(self.embed.forward(ids))))


class DirectCheckpointed(Direct):
    """Recomputes its blocks by itself, by their ``forward``."""

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block.forward, x, use_reentrant=False)
        return x


class Recursive(Block):
    """Calls its own ``forward`` for the two halves of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return super().forward(x)
        return torch.cat([self.forward(part) for part in x.split(1)])


class WithMethods(Block):
    """Has other methods beside ``forward``, which use its modules and, directly, a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self.gain)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.norm1(self.scaled(x)).mean(-1, keepdim=True))


class Scored(Gpt):
    """Calls its blocks, and another method of each: before it, after it, or when others have run."""

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        x = x * self.blocks[-1].score(x)
        for block in self.blocks:
            x = block(x)
            x = x + block.score(x)
        return x * self.blocks[0].score(x)


class Stepped(Gpt):
    """Never calls its blocks, only a method of each."""

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for block in self.blocks:
            x = x * block.score(x)
        return x


class Pair(nn.Module):
    """A reversible block: y1 = x1 + f(x2), y2 = x2 + g(y1)."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Mlp(), Mlp()

    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)

    def undone(self, y1: torch.Tensor, y2: torch.Tensor, d1: torch.Tensor, d2: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What went in, and its gradients, from what came out. Gradients of parameters are made on the way."""
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            again = self.g(y1)
            again.backward(d2)
        assert y1.grad is not None
        x2, d1 = y2 - again.detach(), d1 + y1.grad
        with torch.enable_grad():
            x2.requires_grad_()
            again = self.f(x2)
            again.backward(d1)
        assert x2.grad is not None
        return y1.detach() - again.detach(), x2.detach(), d1, d2 + x2.grad


class _Reversed(torch.autograd.Function):
    """Runs blocks and keeps only what the last one returns, as Reformer does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: nn.ModuleList) -> torch.Tensor:
        parts = x.chunk(2, -1)
        for block in blocks:
            parts = block(*parts)
        ctx.blocks, ctx.parts = blocks, parts
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        state = (*ctx.parts, *grad.chunk(2, -1))
        for block in reversed(ctx.blocks):
            state = block.undone(*state)
        return torch.cat(state[2:], -1), None


class Reversible(Gpt):
    def __init__(self) -> None:
        super().__init__(3, Pair)

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        first, second = _Reversed.apply(torch.cat([x, x], -1), self.blocks).chunk(2, -1)  # type: ignore[no-untyped-call]
        return first + second


def _of_the_module(model: Any, place: Place) -> torch.Tensor:
    """The loss of ``model.module.forward`` if ``model`` is an engine."""
    return token_loss(getattr(model, "module", model).forward, tokens(place))


def _of_parts(model: Any, place: Place) -> torch.Tensor:
    """The loss of the module's parts, called one after the other by the script."""
    module = getattr(model, "module", model)
    return token_loss(lambda ids: module.head(module.norm(module.run(module.embed(ids)))), tokens(place))


def _of_the_root(model: Any, place: Place) -> torch.Tensor:
    """The loss of parts that are in no block."""
    module = getattr(model, "module", model)
    return token_loss(lambda ids: module.head(module.embed(ids)), tokens(place))


CASES = {
    case.name: case
    for case in (
        Case("direct", Direct),
        Case("tied", lambda: Direct(3, tied=True)),
        Case("checkpointed", DirectCheckpointed),
        Case("recursive", lambda: Direct(3, Recursive)),
        Case("of_the_module", Direct, _of_the_module),
        Case("of_parts", Direct, _of_parts),
        Case("scored", lambda: Scored(3, WithMethods), classes=("WithMethods",)),
        Case("stepped", lambda: Stepped(3, WithMethods), classes=("WithMethods",)),
        Case("reversible", Reversible, classes=("Pair",)),
        Case("of_the_root", Gpt, _of_the_root),
    )
}
POLICIES: dict[str, dict[str, Any]] = {
    "by_block": {},
    "groups": {"unit_policy": "by_block_group", "unit_block_count": 2},
    "sized": {"unit_policy": "by_block_and_size", "unit_numel": 100},
}


def train_on(model: str, config: dict[str, Any]) -> Result:
    return train(CASES[model], config, STEPS)


@pytest.mark.each_value
@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("stage", (3, 2, 1, 0))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recompute", ("none", "full", "selective"))
@pytest.mark.parametrize("world", (2, 3))
def test_equals_one_process(model: str, stage: int, policy: str, recompute: str, world: int) -> None:
    section = {"activation_checkpointing": {"policy": recompute}}
    config = make_config(stage, clip=0.5, accumulation=2, zero_optimization=POLICIES[policy], **section)
    wanted = train_reference(CASES[model], world_size=world, steps=STEPS, accumulation=2, clip=0.5)
    for rank, result in enumerate(run_ranks(world, train_on, model, config)):
        assert not differences(result, wanted), f"rank {rank}"


class Failing(Block):
    """Raises if a number is none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.flatten()[0].isnan():
            raise ValueError("not a number")
        return super().forward(x)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm2(self.forward(x))


def after_an_error() -> tuple[list[float], list[float]]:
    """The losses of two steps between which a block has raised, called in three ways; those without it."""
    case, found = Case("failing", lambda: Direct(2, Failing)), []
    for fails in (True, False):
        engine = make_engine(case, make_config(3))
        losses = run_steps(engine, case, 1).losses
        block = engine.module.blocks[1]
        for call in (block, block.forward, block.normed) if fails else ():
            with pytest.raises(ValueError, match="not a number"):
                call(torch.full((1, 6, 16), torch.nan))
        found.append(losses + run_steps(engine, case, 1, first=1).losses)
        engine.destroy()
    return found[0], found[1]


def test_an_error_leaves_nothing() -> None:
    for failed, usual in run_ranks(2, after_an_error):
        assert failed == usual


class Borrowing(Block):
    """Has a method that calls another block."""

    def borrow(self, x: torch.Tensor, other: nn.Module) -> torch.Tensor:
        return self.norm1(other(x)) + self.norm2(x)


def borrowed(stage: int) -> str:
    """What is said of units that are entered in one another."""
    engine = make_engine(Case("borrowing", lambda: Direct(3, Borrowing)), make_config(stage))
    first, *_, last = engine.module.blocks
    try:
        return f"{first.borrow(torch.ones(1, 6, 16), last).isnan().any()}"
    except ModelError as error:
        return str(error)
    finally:
        engine.destroy()


@pytest.mark.parametrize(("stage", "told"), ((3, "was entered while unit 'blocks.0' is running"), (2, "False")))
def test_a_method_that_calls_another_unit(stage: int, told: str) -> None:
    assert all(told in found for found in run_ranks(2, borrowed, stage))


def compiled() -> list[list[float]]:
    """The losses of a model whose blocks call a method of theirs, as written and compiled."""
    case, found = CASES["scored"], []
    for compiles in (False, True):
        engine = make_engine(case, make_config(3))
        if compiles:
            engine.compile(backend="eager")
        found.append(run_steps(engine, case, STEPS).losses)
        engine.destroy()
        torch._dynamo.reset()
    return found


def test_compiled_blocks_with_other_methods() -> None:
    for usual, found in run_ranks(2, compiled):
        assert found == pytest.approx(usual, rel=1e-6)


class Once:
    """Stands for another forward in one call, as Lightning lets an engine run its training step, and calls parts only."""

    def __init__(self, module: Any) -> None:
        self.module, self.usual = module, module.forward

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self.module.forward = self.usual
        return self.module.head(self.module.norm(self.module.run(self.module.embed(ids))))


def redirected() -> list[float]:
    """The sums of logits of three calls: of the engine, of one that is redirected, and of the module's forward."""
    engine, ids = make_engine(Case("direct", Direct), make_config(3)), tokens(Place())[:, :-1]
    with torch.no_grad():
        found = [float(engine(ids).sum())]
        engine.module.forward = Once(engine.module)
        found += [float(engine(ids).sum()), float(engine.module.forward(ids).sum())]
    engine.destroy()
    return found


def test_a_forward_may_be_redirected_once() -> None:
    for usual, once, direct in run_ranks(2, redirected):
        assert usual == once == direct


def unseen(parts: bool, config: dict[str, Any]) -> str:
    """What step() says after the backward of a loss of parts alone, or one that no parameter of the engine is in."""
    case = CASES["of_the_root"]
    engine = make_engine(case, config)
    engine.backward(case.loss(engine, Place()) if parts else nn.Linear(4, 1)(torch.ones(1, 4)).sum())
    with pytest.raises(StepError) as told:
        engine.step()
    engine.destroy()
    return str(told.value)


def test_a_loss_of_another_model_is_no_backward() -> None:
    assert all("no gradients of parameters since" in told for told in run_ranks(2, unseen, False, make_config(3)))


def test_parts_alone_do_not_wait_for_updates_on_the_host() -> None:
    """So the weights that they have read may be those of before."""
    config = make_config(3, zero_optimization={"offload_optimizer": {"device": "cpu"}})
    assert all("no gradients of parameters since" in told for told in run_ranks(2, unseen, True, config))


class Doubled:
    """What a library may put around a forward."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.forward(x)


def left_behind(recompute: str) -> list[bool]:
    """Whether copies of a block are ordinary, the module is as before, and what somebody has put around a forward stays."""
    section = {"activation_checkpointing": {"policy": recompute}}
    case = Case("direct", Direct)
    engine, x = make_engine(case, make_config(0, **section)), torch.ones(1, 6, 16)
    blocks = engine.module.blocks
    twins = [copy.deepcopy(blocks[0]), pickle.loads(pickle.dumps(blocks[0]))]
    with torch.no_grad():
        found = [bool(twin.forward(x).equal(blocks[0](x))) for twin in twins]
        for twin in twins:
            twin.out.bias += 1
            found.append(not twin.forward(x).equal(blocks[0](x)))
        around = blocks[1].forward = Doubled(blocks[1].forward)
        doubled = blocks[1](x)
        engine.destroy()
        found += [bool(doubled.equal(blocks[1](x))), blocks[1].forward is around]
    del blocks[1].forward
    found.append(not any("forward" in vars(part) for part in engine.module.modules()))
    return found


def left_by_stage_3() -> list[str]:
    """What has methods of its own after engines, and whether a class's forward that came later was used meanwhile."""
    found, case = [], CASES["scored"]
    for policy in ("none", "full"):
        engine = make_engine(case, make_config(3, activation_checkpointing={"policy": policy}))
        run_steps(engine, case, 1)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(WithMethods, "forward", lambda self, x: x)
            block, x = engine.module.blocks[0], torch.ones(1, 6, WIDTH)
            found += [] if block(x).equal(x) and block.forward(x).equal(x) else ["the class's forward of before"]
        engine.destroy()
        found += [name for name, part in engine.module.named_modules() if {"forward", "score", "scaled"} & {*vars(part)}]
    return found


def test_nothing_is_left_by_stage_3() -> None:
    assert run_ranks(2, left_by_stage_3) == [[], []]


def hooked() -> list[float]:
    """How much more a block gives with a hook of the user's, called as a module and by its forward."""
    engine = make_engine(CASES["direct"], make_config(3))
    block, x = engine.module.blocks[0], torch.ones(1, 6, WIDTH)
    with torch.no_grad():
        usual = float(block(x).sum())
        handle = block.register_forward_hook(lambda module, args, output: 2 * output)
        found = [float(block(x).sum()) / usual, float(block.forward(x).sum()) / usual]
        handle.remove()
    engine.destroy()
    return found


def test_hooks_of_the_user_run_as_in_torch() -> None:
    for found in run_ranks(2, hooked):
        assert found == [2.0, 1.0]


@pytest.mark.parametrize("recompute", ("none", "full"))
def test_what_is_left(recompute: str) -> None:
    for found in run_ranks(2, left_behind, recompute):
        assert all(found), found
