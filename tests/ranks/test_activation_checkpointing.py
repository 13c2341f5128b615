"""Gradient checkpointing changes nothing but memory: losses, norms and weights are those of the plain run, bit for bit.

With dropout, at all stages, policies and cuts into units, with kept tensors on the device and in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering import by_day
from harness import run_ranks
from models import CASES, LENGTH, VOCAB, WIDTH, Block, Case, Gpt, Place, token_loss, tokens
from reference import Result
from torch import nn
from training import make_config, make_engine, run_steps, shared_topology, train

import zerorun
from zerorun.activations import blocks, checkpointed_call, host_pool
from zerorun.activations.blocks import BlockForward

POLICIES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "every_n": {"policy": "every_n", "every_n": 2},
    "selective": {"policy": "selective"},
    "full in host memory": {"policy": "full", "cpu_checkpointing": True},
    "every 3rd in host memory": {"policy": "every_n", "every_n": 3, "cpu_checkpointing": True},
    "selective in host memory": {"policy": "selective", "cpu_checkpointing": True},
}
# Of these, where the others would tell nothing new by day.
FEW = ("full", "selective", "every 3rd in host memory")
few_by_day = pytest.mark.parametrize("policies", by_day(("few", "all"), "few"))
UNITS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "groups": {"unit_policy": "by_block_group", "unit_block_count": 2},
    "layers": {"unit_policy": ["Linear"]},
    "sized": {"unit_policy": "size_based", "unit_numel": 600},
}
STEPS = 2
# By day: a recomputation meets frozen and shared parameters, branches, blocks that run twice, checkpoints of the model.
MODELS = ("frozen", "repeated", "checkpoint_groups")  # by day


class DropBlock(Block):
    """Dropout in the attention, after it, and after the MLP."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).chunk(3, -1)
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1 * self.training)
        x = x + F.dropout(self.out(attended), 0.2, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.2, self.training)


DROPOUT = Case("dropout", lambda: Gpt(5, DropBlock))


def sections_of(policies: str) -> list[dict[str, Any]]:
    """None, and "few" or "all" of the policies."""
    return [{}, *(POLICIES[name] for name in (FEW if policies == "few" else POLICIES))]


@contextmanager
def everything_is_large() -> Iterator[None]:
    """The test models' tensors would all stay: they are small."""
    before, host_pool.SMALL_BYTES = host_pool.SMALL_BYTES, 1
    try:
        yield
    finally:
        host_pool.SMALL_BYTES = before


def assert_same_bits(found: Result, wanted: Result, what: object) -> None:
    assert found.losses == wanted.losses, what
    assert found.norms == wanted.norms, what
    assert found.weights.keys() == wanted.weights.keys()
    assert not [name for name in found.weights if not torch.equal(found.weights[name], wanted.weights[name])], what


# -- the same bits -----------------------------------------------------------------------------------------------


def train_seeded(case: Case, config: dict[str, Any]) -> Result:
    torch.manual_seed(100 + dist.get_rank())
    with everything_is_large():
        return train(case, config, STEPS)


def train_dropout(stage: int, units: dict[str, Any], precision: str, sections: list[dict[str, Any]]) -> list[Result]:
    base = make_config(stage, accumulation=2, clip=0.5, precision=precision, zero_optimization=units)
    return [train_seeded(DROPOUT, {**base, "activation_checkpointing": section}) for section in sections]


@pytest.mark.parametrize(("stage", "units"), by_day(product(range(4), ("blocks", "groups")), (3, "groups")))
def test_dropout_and_accumulation(stage: int, units: str) -> None:
    sections = [{}, *POLICIES.values()]
    for results in run_ranks(2, train_dropout, stage, UNITS[units], "fp32", sections):
        for section, result in zip(sections, results, strict=True):
            assert_same_bits(result, results[0], section)


@pytest.mark.nightly  # by day: test_dropout_and_accumulation; test_settings.py cuts in other places
@few_by_day
@pytest.mark.parametrize(("stage", "units"), list(product(range(4), ("layers", "sized"))))
def test_units_inside_the_blocks(stage: int, units: str, policies: str) -> None:
    """The same but for the order of sums: a recomputation visits them all, so their first gradients come late."""
    sections = sections_of(policies)
    for results in run_ranks(2, train_dropout, stage, UNITS[units], "fp32", sections):
        for section, result in zip(sections, results, strict=True):
            assert result.losses == pytest.approx(results[0].losses, rel=1e-6), section
            assert result.norms == pytest.approx(results[0].norms, rel=1e-6), section


@pytest.mark.nightly  # by day: test_simulated_device.py has each precision with each policy
@few_by_day
@pytest.mark.parametrize("world", (1, 3))
@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
def test_other_numbers_of_ranks_and_precisions(world: int, precision: str, policies: str) -> None:
    sections = sections_of(policies)
    for results in run_ranks(world, train_dropout, 3, {}, precision, sections):
        for section, result in zip(sections, results, strict=True):
            assert_same_bits(result, results[0], section)


def train_model(model: str, stage: int, sections: list[dict[str, Any]]) -> list[Result]:
    base = make_config(stage, accumulation=2, clip=0.5)
    return [train_seeded(CASES[model], {**base, "activation_checkpointing": section}) for section in sections]


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("model", by_day(CASES, *MODELS))
def test_every_model(model: str, stage: int) -> None:
    """Frozen and shared parameters, branches, blocks that run twice, two forwards, checkpoints inside checkpoints."""
    sections = [{}, POLICIES["full"], POLICIES["selective in host memory"]]
    for results in run_ranks(2, train_model, model, stage, sections):
        for section, result in zip(sections, results, strict=True):
            assert_same_bits(result, results[0], section)


# -- what blocks take and give -----------------------------------------------------------------------------------


class Fancy(nn.Module):
    """Takes keywords, containers, flags and None; gives a tuple with a dict in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], *, name: str, extra: Any = None, masks: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        assert name == "fancy"
        assert extra is None
        cos, sin = rotary
        y = self.a(x) * cos + torch.relu_(self.b(x)) * sin
        y = y.masked_fill(masks["mask"], 0.0)
        return x + F.dropout(y, 0.3, self.training), {"half": y * 0.5, "name": name}


class FancyGpt(Gpt):
    def __init__(self) -> None:
        super().__init__(4, Fancy)

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        angles = torch.arange(LENGTH, dtype=x.dtype).view(1, -1, 1)
        masks = {"mask": torch.zeros(1, LENGTH, 1, dtype=torch.bool).index_fill_(1, torch.tensor([2]), True)}
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, more = block(x, rotary=(angles.cos(), angles.sin()), name="fancy", masks=masks)
            total = total + more["half"]
        return x + total


def train_fancy(stage: int, sections: list[dict[str, Any]]) -> list[Result]:
    case, base = Case("fancy", FancyGpt), make_config(stage)
    return [train_seeded(case, {**base, "activation_checkpointing": section}) for section in sections]


@pytest.mark.parametrize("stage", by_day((0, 3), 3))
def test_keywords_containers_and_tuples(stage: int) -> None:
    sections = [{}, *POLICIES.values()]
    for results in run_ranks(2, train_fancy, stage, sections):
        for section, result in zip(sections, results, strict=True):
            assert_same_bits(result, results[0], section)


# -- when it is used ---------------------------------------------------------------------------------------------


def count_calls(stage: int, section: dict[str, Any]) -> dict[str, Any]:
    """How many checkpoints a forward makes in which mode, and what destroy() leaves."""
    engine = make_engine(CASES["plain"], make_config(stage, activation_checkpointing=section))
    module, made = engine.module, []
    original = checkpointed_call.torch_checkpoint

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return original(*args, **kwargs)

    def forward() -> int:
        made.clear()
        engine(tokens(Place(dist.get_rank()))[:, :-1])
        return len(made)

    checkpointed_call.torch_checkpoint = counting
    try:
        found: dict[str, Any] = {"train": forward()}
        with torch.no_grad():
            found["no_grad"] = forward()
        engine.eval()
        found["eval"] = forward()
        engine.train()
        found["train again"] = forward()
    finally:
        checkpointed_call.torch_checkpoint = original
    forwards = [(block.forward, getattr(block.forward, "inner", None)) for block in module.blocks]
    found["replaced"] = sum(any(isinstance(each, BlockForward) for each in pair) for pair in forwards)
    found["configured"] = zerorun.checkpointing.is_configured()
    engine.destroy()
    found["left"] = sum("forward" in vars(block) for block in module.blocks)
    found["configured after"] = zerorun.checkpointing.is_configured()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize(
    ("section", "calls"),
    [
        ({"policy": "full"}, 4),
        ({"policy": "every_n"}, 2),
        ({"policy": "every_n", "every_n": 3}, 2),
        ({}, 0),
        ({"partition_activations": False, "cpu_checkpointing": False}, 0),
        ({"cpu_checkpointing": True}, 0),
    ],
)
def test_only_training_is_checkpointed(stage: int, section: dict[str, Any], calls: int) -> None:
    for found in run_ranks(2, count_calls, stage, section):
        assert found == {
            "train": calls,
            "no_grad": 0,
            "eval": 0,
            "train again": calls,
            "replaced": calls,
            "configured": section.get("policy") is not None or section.get("cpu_checkpointing", False),
            "left": 0,
            "configured after": False,
        }


def gathers(sections: list[dict[str, Any]], units: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for section in sections:
        config = make_config(3, zero_optimization=units, activation_checkpointing=section)
        engine = make_engine(CASES["plain"], config)
        run_steps(engine, CASES["plain"], 3)
        found.append(engine.communication_report())
        engine.destroy()
    return found


def test_a_recomputation_gathers_nothing_more() -> None:
    """The unit is gathered for its backward in any case."""
    for plain, *others in run_ranks(2, gathers, [{}, *POLICIES.values()], {}):
        for other in others:
            assert other == plain


def train_compiled(sections: list[dict[str, Any]]) -> list[Result]:
    base = make_config(3, accumulation=2, compile={"enabled": True, "backend": "eager"})
    return [train_seeded(CASES["plain"], {**base, "activation_checkpointing": section}) for section in sections]


@pytest.mark.nightly  # by day: test_compile.py
def test_with_compiled_blocks() -> None:
    sections = [{}, POLICIES["full"], POLICIES["full in host memory"]]
    for results in run_ranks(2, train_compiled, sections, timeout_s=240):
        for section, result in zip(sections, results, strict=True):
            assert_same_bits(result, results[0], section)


# -- host memory -------------------------------------------------------------------------------------------------


def copies_by_step(section: dict[str, Any]) -> list[Any]:
    """[counts of the pool after each step]: (buffers, copies out, copies in, late groups)."""
    import dataclasses

    with everything_is_large():
        engine = make_engine(DROPOUT, make_config(3, activation_checkpointing=section))
        forward = engine.module.blocks[0].forward.inner
        assert isinstance(forward, BlockForward)
        assert forward._pool is not None
        found = []
        for _ in range(4):
            run_steps(engine, DROPOUT, 1)
            found.append(dataclasses.astuple(forward._pool.counts))
        engine.destroy()
    return found


def test_host_buffers_are_reused_and_fetched_early() -> None:
    for steps in run_ranks(2, copies_by_step, POLICIES["full in host memory"]):
        buffers, buffer_bytes, out_copies, out_bytes, in_copies, late = steps[0]
        assert (buffers, out_copies, in_copies, late) == (5, 5, 5, 1)  # one input for each block; the last is not early
        assert buffer_bytes == out_bytes == 5 * 2 * LENGTH * WIDTH * 4
        assert steps[3] == (5, buffer_bytes, 20, 4 * out_bytes, 20, 4)
    for steps in run_ranks(2, copies_by_step, POLICIES["selective in host memory"]):
        assert steps[3][0] == steps[1][0] > 5, "buffers are allocated after the first step that keeps anything"
        assert steps[3][2] - steps[2][2] == steps[3][4] - steps[2][4] > 5, "what is copied out comes back once"
        assert steps[3][5] == 4


# -- models that checkpoint themselves ---------------------------------------------------------------------------


class ByHand(Gpt):
    """Calls the public function, as a script for DeepSpeed does."""

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for block in self.blocks:
            x = zerorun.checkpointing.checkpoint(block, x)
        return x


def train_by_hand(stage: int) -> list[Any]:
    case, plain = Case("by hand", lambda: ByHand(4, DropBlock)), Case("plain", lambda: Gpt(4, DropBlock))
    base = make_config(stage, accumulation=2)
    results: list[Any] = [train_seeded(plain, base), train_seeded(case, base)]
    in_host = {**base, "activation_checkpointing": {"cpu_checkpointing": True}}
    made: list[host_pool.HostPool] = []

    class Noted(host_pool.HostPool):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            made.append(self)

    original, zerorun.engine.initialize.HostPool = zerorun.engine.initialize.HostPool, Noted
    try:
        results.append(train_seeded(case, in_host))
    finally:
        zerorun.engine.initialize.HostPool = original
    return [*results, made[0].counts.out_copies]


@pytest.mark.parametrize("stage", by_day((0, 2, 3), 3))
def test_calls_in_the_model_follow_the_section(stage: int) -> None:
    for plain, by_hand, in_host, copies in run_ranks(2, train_by_hand, stage):
        assert_same_bits(by_hand, plain, "by hand")
        assert_same_bits(in_host, plain, "in host memory")
        assert copies == 4 * 2 * STEPS


# -- Hugging Face ------------------------------------------------------------------------------------------------

HUGGING_FACE = ("gpt2", "qwen2-moe", "t5", "llama", "bert", "bart", "vit", "gemma2")


def train_hugging_face(
    name: str, stage: int, section: dict[str, Any], own: bool = False, cached: bool = True
) -> tuple[list[float], int]:
    """(losses, checkpoints made). ``own``: the model checkpoints itself. ``cached``: it fills its cache, its default."""
    from test_huggingface import batch, build

    made = []
    original = blocks.run

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return original(*args, **kwargs)

    model = build(name)
    model.config.use_cache = cached
    if own:
        model.gradient_checkpointing_enable()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.1
    config = make_config(stage, accumulation=2, activation_checkpointing=section)
    torch.manual_seed(7)
    blocks.run = counting
    try:
        with everything_is_large():
            engine = zerorun.initialize(model, config, topology=shared_topology())
            losses = []
            for step in range(4):
                loss = engine(**batch(name, step)).loss
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            engine.destroy()
    finally:
        blocks.run = original
    return losses, len(made)


@pytest.mark.parametrize("name", by_day(HUGGING_FACE, "gpt2"))
def test_hugging_face_models_with_their_caches(name: str) -> None:
    """use_cache is on by default, so decoders collect keys and values in training, too. Checkpointed, they do not.

    Keys that are read from a cache have other strides than without one, which some processors round in another way. So the
    same bits are expected of a model without a cache; T5 cannot be told to have none.
    """
    tolerance = 1e-6 if name == "t5" else 0.0
    pytest.importorskip("transformers")
    for stage in (0, 3):
        (plain, none), _ = run_ranks(2, train_hugging_face, name, stage, {}, False, False)
        assert none == 0
        for section in ("full", "every_n", "selective in host memory"):
            for losses, made in run_ranks(2, train_hugging_face, name, stage, POLICIES[section]):
                assert losses == pytest.approx(plain, rel=tolerance, abs=0)
                assert made > 0


def test_a_model_that_checkpoints_itself_keeps_doing_so() -> None:
    pytest.importorskip("transformers")
    for stage in (0, 3):
        (plain, _), _ = run_ranks(2, train_hugging_face, "llama", stage, {}, False, False)
        for losses, made in run_ranks(2, train_hugging_face, "llama", stage, POLICIES["full"], True):
            assert losses == plain
            assert made == 0


# -- the loss ----------------------------------------------------------------------------------------------------


class LossInside(Gpt):
    """Computes its loss by the chunked operation; ``weight`` is a parameter of a unit that this module uses."""

    def __init__(self, chunked: bool) -> None:
        super().__init__(3)
        self.chunked = chunked
        self.head = Head(chunked)

    def forward(self, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.head(self.norm(self.run(self.embed(ids[:, :-1]))), ids[:, 1:])


class Head(nn.Module):
    def __init__(self, chunked: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.chunked = (
            nn.Parameter(torch.empty(VOCAB, WIDTH)),
            nn.Parameter(torch.empty(VOCAB)),
            chunked,
        )

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.chunked:
            return zerorun.ops.linear_cross_entropy(hidden, self.weight, target, self.bias, chunk=5)
        return F.cross_entropy(F.linear(hidden, self.weight, self.bias).flatten(0, 1).float(), target.flatten())


def train_loss_inside(stage: int, precision: str, units: dict[str, Any]) -> list[Result]:
    config = make_config(stage, accumulation=2, precision=precision, optimizer="SGD", zero_optimization=units)
    loss = lambda model, place: model(tokens(place))  # noqa: E731
    return [
        train_seeded(Case("loss inside", lambda chunked=chunked: LossInside(chunked), loss), config)
        for chunked in (False, True)
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("units", ({}, {"unit_policy": ["Block", "Head"]}))
def test_chunked_loss_in_a_module(stage: int, precision: str, units: dict[str, Any]) -> None:
    tolerance = 2e-6 if precision == "fp32" else 0.02
    for whole, chunked in run_ranks(2, train_loss_inside, stage, precision, units):
        assert chunked.losses == pytest.approx(whole.losses, rel=tolerance)
        assert chunked.norms == pytest.approx(whole.norms, rel=tolerance)


def test_two_forwards_and_evaluation_between() -> None:
    for result, wanted in run_ranks(2, train_between):
        assert_same_bits(result, wanted, "evaluation between forward and backward")


def train_between() -> list[Result]:
    def loss(model: Any, place: Place) -> torch.Tensor:
        first = token_loss(model, tokens(place))
        with torch.no_grad():
            token_loss(model, tokens(place, salt=2))
        return first + token_loss(model, tokens(place, salt=1))

    case = Case("between", lambda: Gpt(4, DropBlock), loss)
    return [
        train_seeded(case, make_config(3, activation_checkpointing=section))
        for section in (POLICIES["selective in host memory"], {})
    ]
