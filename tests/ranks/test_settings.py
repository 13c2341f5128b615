"""What must not matter, does not: units, look-ahead and overlap, the form of the training loop, and what runs between.

Bitwise where the arithmetic is the same, to 1e-6 of plain PyTorch where the order of sums differs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering import by_day
from harness import run_ranks
from models import CASES, WIDTH, Case, Gpt, Mlp, Place, reset, token_loss, tokens
from reference import OPTIMIZERS, Result, differences, distance, train_reference, weights_of
from torch import nn
from training import finish, global_mean, make_config, make_engine, run_steps, shared_topology, train

import zerorun
from zerorun.errors import StepError
from zerorun.zero import safe_get_full_grad

STEPS = 2
STAGES = range(4)
every_stage = pytest.mark.parametrize("stage", by_day(STAGES, 0, 3))


def assert_same_bits(found: Result, wanted: Result, what: object) -> None:
    assert found.losses == wanted.losses, what
    assert found.norms == wanted.norms, what
    assert_same_weights(found.weights, wanted.weights, what)


def assert_same_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: object) -> None:
    assert found.keys() == wanted.keys()
    unequal = [name for name in found if not torch.equal(found[name], wanted[name])]
    assert not unequal, f"{what}: {unequal}"


# -- units, look-ahead, overlap, buckets -------------------------------------------------------------------------

UNITS: tuple[dict[str, Any], ...] = (
    {},
    {"unit_policy": "by_block_group", "unit_block_count": 1},
    {"unit_policy": "by_block_group", "unit_block_count": 3},
    {"unit_policy": "by_block_group", "unit_block_count": 100},
    {"unit_policy": "size_based", "unit_numel": 1},
    {"unit_policy": "size_based", "unit_numel": 1000},
    {"unit_policy": "size_based", "unit_numel": 10**9},
    {"unit_policy": "by_block_and_size", "unit_numel": 500},
    {"unit_policy": ["Block"]},
    {"unit_policy": ["Linear"]},
    {"unit_policy": ["Linear", "Embedding", "LayerNorm"]},
)
TIMING: tuple[dict[str, Any], ...] = (
    {},
    {"overlap_comm": True},
    {"overlap_comm": False},
    {"reduce_bucket_size": 1, "allgather_bucket_size": 1},
    {"reduce_bucket_size": 10**10, "allgather_bucket_size": 10**10},
)
LOOK_AHEAD: tuple[dict[str, Any], ...] = (
    *({"stage3_prefetch_bucket_size": size} for size in (0, 1, 5000, 10**9)),
    {"stage3_prefetch_bucket_size": 10**9, "overlap_comm": False},
    {"stage3_max_live_parameters": 0},
    {"stage3_prefetch_bucket_size": 10**9, "stage3_max_live_parameters": 9000},
)


def train_variants(model: str, configs: list[dict[str, Any]]) -> list[Result]:
    return [train(CASES[model], config, STEPS) for config in configs]


@pytest.mark.each_value
@pytest.mark.parametrize("stage", by_day((0, 2, 3), 3))
@pytest.mark.parametrize("model", by_day(("plain", "tied"), "tied"))
def test_the_cut_into_units_changes_nothing(stage: int, model: str) -> None:
    """Not a bit of losses and weights. The norm is a sum over units: its order may change its last digits.

    With accumulation, a stage-2 model of one unit keeps whole gradients and reduces them once, which rounds otherwise.
    """
    configs = [make_config(stage, zero_optimization=units) for units in UNITS]
    results = run_ranks(2, train_variants, model, configs)[0]
    for units, result in zip(UNITS, results, strict=True):
        assert result.losses == results[0].losses, units
        assert result.norms == pytest.approx(results[0].norms, rel=1e-6), units
        assert_same_weights(result.weights, results[0].weights, units)


@pytest.mark.each_value
@pytest.mark.parametrize("stage", by_day((1, 2, 3), 3))
@pytest.mark.parametrize("model", by_day(("plain", "checkpoint_groups", "branch", "repeated_apart"), "branch"))
def test_overlap_and_buckets_change_nothing(stage: int, model: str) -> None:
    variants = TIMING + (LOOK_AHEAD if stage == 3 else ())
    configs = [make_config(stage, accumulation=2, clip=0.5, zero_optimization=variant) for variant in variants]
    results = run_ranks(2, train_variants, model, configs)[0]
    for variant, result in zip(variants, results, strict=True):
        assert_same_bits(result, results[0], variant)


def slots(variants: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """(elements of a block, blocks, slots that they share) under each variant."""
    found = []
    for variant in variants:
        engine = make_engine(CASES["plain"], make_config(3, zero_optimization=variant))
        sharing = [unit for unit in engine.plan.units if not unit.resident]
        numels = {sum(e.numel for group in unit.flat_groups for e in group.layout.entries) for unit in sharing}
        found.append((max(numels), len(sharing), engine.plan.param_slots.count))
        engine.destroy()
    return found


def test_the_bucket_size_says_how_far_ahead_units_are_gathered() -> None:
    """As many slots as whole blocks fit into it, or begin in it, and one for the block in use."""
    size, blocks, by_default = run_ranks(3, slots, [{}])[0][0]
    wanted = {0: 1, 1: 2, size: 2, size + 1: 3, 10**9: blocks}
    found = run_ranks(3, slots, [{"stage3_prefetch_bucket_size": ahead} for ahead in wanted])[0]
    assert by_default == 2
    assert [count for _, _, count in found] == list(wanted.values())


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("degree", by_day((1, 2, 4), 2, 4))
def test_shard_degree_changes_nothing(degree: int, precision: str) -> None:
    configs = [
        make_config(stage, clip=0.5, precision=precision, zero_optimization={"shard_degree": degree}) for stage in (1, 2, 3)
    ]
    by_rank = run_ranks(4, train_variants, "plain", configs)
    for results in by_rank:
        for stage, result in zip((1, 2, 3), results, strict=True):
            assert_same_bits(result, by_rank[0][0], f"stage {stage}")
    if precision == "fp32":
        wanted = train_reference(CASES["plain"], world_size=4, steps=STEPS, clip=0.5)
        assert not differences(by_rank[0][0], wanted)


# -- precision of sums -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", by_day(range(4), 3))
def test_reduction_is_in_fp32_unless_asked_otherwise(stage: int) -> None:
    base = {"precision": "bf16", "clip": 0.5, "accumulation": 3}  # sums of gradients have more digits than bf16
    configs = [
        make_config(stage, **base),
        make_config(stage, **base, communication_data_type="fp32"),
        make_config(stage, **base, communication_data_type="bf16"),
    ]
    default, fp32, bf16 = run_ranks(3, train_variants, "plain", configs)[0]
    assert_same_bits(default, fp32, "default and fp32")
    # At stages 2 and 3 what is sent is one micro-batch's gradient, which has no more digits; sums are in fp32 all the same.
    assert (bf16.norms != fp32.norms) == (stage < 2)
    assert bf16.norms == pytest.approx(fp32.norms, rel=0.02)
    assert bf16.losses == pytest.approx(fp32.losses, rel=0.02)


class Accumulator(nn.Module):
    """Its gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def accumulate_tiny(stage: int) -> list[float]:
    config = make_config(stage, accumulation=257, precision="bf16", optimizer="SGD")
    engine = zerorun.initialize(Accumulator(), config, topology=shared_topology())
    for micro in range(257):
        engine.backward(engine(torch.full((64,), 1.0 if micro == 0 else 2.0**-9)))
        if micro < 256:
            engine.step()
    found = safe_get_full_grad(engine.module.weight)
    assert found is not None
    engine.step()
    engine.destroy()
    return (found * 257).unique().tolist()


@every_stage
def test_tiny_gradients_are_not_lost_in_the_sum(stage: int) -> None:
    """1 + 256 times 2^-9 is 1.5; accumulated in bf16 it would stay 1."""
    assert run_ranks(2, accumulate_tiny, stage)[0] == pytest.approx([1.5], rel=1e-6)


# -- losses with weights -----------------------------------------------------------------------------------------


def labels(place: Place) -> torch.Tensor:
    """[2, 6] targets with a random number of -100; one micro-batch of rank 0 has nothing else."""
    ids = tokens(place, salt=5)[:, 1:].contiguous()
    chosen = random.Random(f"{place}")
    kept = 0 if place.rank == 0 and place.micro == place.step else chosen.randint(1, ids.numel())
    ids.view(-1)[kept:] = -100
    return ids


def summed_loss(model: Callable[..., torch.Tensor], place: Place) -> tuple[torch.Tensor, int]:
    """(sum of the losses of the tokens that count, their number)."""
    wanted = labels(place)
    logits = model(tokens(place)[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, wanted.flatten(), ignore_index=-100, reduction="sum"), int((wanted >= 0).sum())


def train_weighted(stage: int, accumulation: int) -> Result:
    engine = make_engine(CASES["plain"], make_config(stage, accumulation=accumulation, optimizer="SGD", clip=1.0))
    result = Result()
    for step in range(2):
        for micro in range(accumulation):
            total, count = summed_loss(engine, Place(dist.get_rank(), step, micro))
            engine.backward(total / count if count else total * float("nan"), weight=count)  # as a mean over none
            engine.step()
        result.norms.append(engine.get_global_grad_norm() or 0.0)
    finish(engine, result)
    return result


def token_mean_reference(world_size: int, accumulation: int) -> Result:
    module = CASES["plain"].build()
    build, params = OPTIMIZERS["SGD"]
    optimizer, result = build(module.parameters(), **params), Result()
    for step in range(2):
        places = [Place(rank, step, micro) for rank in range(world_size) for micro in range(accumulation)]
        count = sum(int((labels(place) >= 0).sum()) for place in places)
        for place in places:
            (summed_loss(module, place)[0] / count).backward()
        result.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    result.weights = weights_of(module)
    return result


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize(
    ("world_size", "accumulation"), by_day([(1, 2), (1, 8), (2, 1), (2, 2), (2, 8), (4, 1), (4, 2), (4, 8)], (1, 8), (4, 2))
)
def test_weighted_losses_give_the_global_token_mean(world_size: int, accumulation: int, stage: int) -> None:
    result = run_ranks(world_size, train_weighted, stage, accumulation)[0]
    assert not differences(result, token_mean_reference(world_size, accumulation))


def step_with_zero_weights(stage: int) -> tuple[str, bool, float]:
    engine = make_engine(CASES["plain"], make_config(stage))
    before = engine.state_dict()
    place = Place(dist.get_rank())
    engine.backward(token_loss(engine, tokens(place)), weight=0)
    message = ""
    try:
        engine.step()
    except StepError as error:
        message = str(error)
    unchanged = all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.backward(token_loss(engine, tokens(place)), weight=3)
    engine.step()
    norm = engine.get_global_grad_norm() or 0.0
    engine.destroy()
    return message, unchanged, norm


@every_stage
def test_weights_that_are_all_zero_are_an_error(stage: int) -> None:
    wanted = train_reference(CASES["plain"], world_size=2, steps=1).norms[0]
    for message, unchanged, norm in run_ranks(2, step_with_zero_weights, stage):
        assert "zero on all ranks" in message
        assert unchanged
        assert norm == pytest.approx(wanted, rel=1e-6)  # the engine goes on afterwards


# -- forms of the loop -------------------------------------------------------------------------------------------


def run_dialect(dialect: str, stage: int, precision: str) -> Result:
    """Three micro-batches a step, for two steps, in one of the ways to say so."""
    managed = dialect not in ("step once", "no_sync, step once")
    config = make_config(stage, accumulation=3, clip=0.5, precision=precision, managed_gradient_accumulation=managed)
    engine, result = make_engine(CASES["plain"], config), Result()
    for step in range(2):
        total = 0.0
        for micro in range(3):
            last = micro == 2
            if dialect == "boundary":
                engine.set_gradient_accumulation_boundary(last)
            quiet = "no_sync" in dialect and not last
            with engine.no_sync() if quiet else contextlib.nullcontext():
                loss = token_loss(engine, tokens(Place(dist.get_rank(), step, micro)))
                total += loss.item() / 3
                if dialect == "loss.backward()":
                    loss.backward()
                elif dialect == "engine.scale":
                    engine.scale(loss).backward()
                elif dialect == "divided":
                    engine.backward(loss / 3, scale_wrt_gas=False)
                else:
                    engine.backward(loss)
            if managed or last:
                assert engine.is_gradient_accumulation_boundary() == last
                engine.step()
                assert engine.was_step_applied() == last
        result.losses.append(total)
        result.norms.append(engine.get_global_grad_norm() or 0.0)
    assert engine.global_steps == 2
    finish(engine, result)
    return result


def run_dialects(stage: int, precision: str) -> dict[str, Result]:
    names = (
        "step each time",
        "boundary",
        "step once",
        "loss.backward()",
        "engine.scale",
        "no_sync",
        "no_sync, step once",
        "divided",
    )
    return {name: run_dialect(name, stage, precision) for name in names}


@pytest.mark.each_value
@pytest.mark.parametrize("stage", by_day(range(4), 3))
@pytest.mark.parametrize("precision", by_day(("fp32", "fp16"), "fp16"))
def test_all_forms_of_the_loop_train_alike(stage: int, precision: str) -> None:
    results = run_ranks(2, run_dialects, stage, precision)[0]
    wanted = results["step each time"]
    divided = results.pop("divided")  # rounds once more
    if precision == "fp32":
        assert not differences(divided, wanted)
    for dialect, result in results.items():
        assert_same_bits(result, wanted, dialect)


def quiet_bytes(stage: int) -> int:
    """Bytes sent in two backwards inside no_sync, but for gathers."""
    engine = make_engine(CASES["plain"], make_config(stage, accumulation=3))

    def sent() -> int:
        return sum(entry["bytes"] for label, entry in engine.communication_report().items() if "reduce" in label)

    before = sent()
    with engine.no_sync():
        for micro in range(2):
            engine.backward(token_loss(engine, tokens(Place(dist.get_rank(), 0, micro))))
    found = sent() - before
    engine.zero_grad()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", (0, 1))
def test_no_sync_sends_nothing_where_gradients_are_whole(stage: int) -> None:
    assert run_ranks(2, quiet_bytes, stage) == [0, 0]


# -- several losses, several engines -----------------------------------------------------------------------------


def two_losses(logits: torch.Tensor, place: Place) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(logits.flatten(0, 1), tokens(place)[:, 1:].flatten()), logits.square().mean()


def train_two_backwards(stage: int, form: str) -> Result:
    engine, result = make_engine(CASES["plain"], make_config(stage, clip=0.5)), Result()
    for step in range(STEPS):
        place = Place(dist.get_rank(), step)
        first, second = two_losses(engine(tokens(place)[:, :-1]), place)
        if form == "one graph":
            engine.backward(first, retain_graph=True)
            engine.backward(second)
        else:
            engine.backward(first)
            engine.backward(two_losses(engine(tokens(place)[:, :-1]), place)[1])
        engine.step()
        result.losses.append(first.item() + second.item())
        result.norms.append(engine.get_global_grad_norm() or 0.0)
    finish(engine, result)
    return result


def two_losses_reference(world_size: int) -> Result:
    module, result = CASES["plain"].build(), Result()
    build, params = OPTIMIZERS["AdamW"]
    optimizer = build(module.parameters(), **params)
    for step in range(STEPS):
        total = 0.0
        for rank in range(world_size):
            place = Place(rank, step)
            loss = sum(two_losses(module(tokens(place)[:, :-1]), place)) / world_size
            loss.backward()
            total += loss.item()
        result.losses.append(total)
        result.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    result.weights = weights_of(module)
    return result


@pytest.mark.each_value
@every_stage
@pytest.mark.parametrize("form", ("one graph", "two graphs"))
def test_two_backwards_add_up(stage: int, form: str) -> None:
    result = run_ranks(2, train_two_backwards, stage, form)[0]
    assert not differences(result, two_losses_reference(2))


class Stack(nn.Module):
    """Vectors through three blocks and a linear layer."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.last = nn.Linear(WIDTH, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def noise(place: Place, salt: int) -> torch.Tensor:
    seed = 1 + salt + 10 * (place.rank + 10 * place.step)
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def discriminator_loss(generator: Any, judge: Any, place: Place) -> torch.Tensor:
    real, fake = noise(place, 1) + 1.0, generator(noise(place, 2)).detach()
    return F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()


def generator_loss(generator: Any, judge: Any, place: Place) -> torch.Tensor:
    return F.softplus(-judge(generator(noise(place, 3)))).mean()


def joint_loss(first: Any, second: Any, place: Place) -> torch.Tensor:
    middle = first(noise(place, 1))
    return second(middle).square().mean() + 0.1 * (middle - 1).square().mean()


def two_modules() -> tuple[nn.Module, nn.Module]:
    return reset(Stack(WIDTH), 1), reset(Stack(1), 2)


def prefixed(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"first.{name}": value for name, value in first.items()} | {
        f"second.{name}": value for name, value in second.items()
    }


def train_two_engines(kind: str, stages: tuple[int, int]) -> Result:
    first, second = (
        zerorun.initialize(module, make_config(stage), topology=shared_topology())
        for module, stage in zip(two_modules(), stages, strict=True)
    )
    result = Result()
    for step in range(STEPS):
        place = Place(dist.get_rank(), step)
        if kind == "gan":
            loss = discriminator_loss(first, second, place)
            second.backward(loss)
            second.step()
            loss = generator_loss(first, second, place)
            first.backward(loss)
            first.step()
            second.zero_grad()
        else:
            loss = joint_loss(first, second, place)
            first.backward(loss)
            first.step()
            second.step()
        result.losses.append(global_mean(loss.item()))
        result.norms += [first.get_global_grad_norm() or 0.0, second.get_global_grad_norm() or 0.0]
    result.weights = prefixed(first.state_dict(), second.state_dict())
    first.destroy()
    second.destroy()
    return result


def two_engines_reference(kind: str, world_size: int) -> Result:
    first, second = two_modules()
    build, params = OPTIMIZERS["AdamW"]
    optimizers = [build(module.parameters(), **params) for module in (first, second)]
    result = Result()

    def backward(loss_of: Callable[..., torch.Tensor], step: int) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [loss_of(first, second, Place(rank, step)) / world_size for rank in range(world_size)]
        for loss in losses:
            loss.backward()
        return sum(loss.item() for loss in losses)

    def norm(module: nn.Module) -> float:
        return float(nn.utils.clip_grad_norm_(module.parameters(), float("inf")))

    for step in range(STEPS):
        if kind == "gan":
            backward(discriminator_loss, step)
            second_norm = norm(second)
            optimizers[1].step()
            result.losses.append(backward(generator_loss, step))
            result.norms += [norm(first), second_norm]
            optimizers[0].step()
        else:
            result.losses.append(backward(joint_loss, step))
            result.norms += [norm(first), norm(second)]
            for optimizer in optimizers:
                optimizer.step()
    result.weights = prefixed(weights_of(first), weights_of(second))
    return result


@pytest.mark.each_value
@pytest.mark.parametrize("stages", ((0, 0), (1, 1), (2, 2), (3, 3), (3, 0), (1, 3)))
@pytest.mark.parametrize("kind", ("gan", "joint"))
def test_two_engines_in_one_program(kind: str, stages: tuple[int, int]) -> None:
    result = run_ranks(2, train_two_engines, kind, stages)[0]
    assert not differences(result, two_engines_reference(kind, 2))


# -- between the steps -------------------------------------------------------------------------------------------


def train_interrupted(stage: int) -> tuple[Result, Result]:
    """(undisturbed, with evaluation and forwards without a backward between the steps)."""
    case, config = CASES["plain"], make_config(stage, clip=0.5)
    calm = train(case, config, STEPS)
    engine, result = make_engine(case, config), Result()
    for step in range(STEPS):
        place = Place(dist.get_rank(), step)
        engine.eval()
        with torch.no_grad():
            for _ in range(step):
                case.loss(engine, place)
        engine.train()
        if step == 1:
            case.loss(engine, Place())  # dropped
        loss = case.loss(engine, place)
        engine.backward(loss)
        engine.step()
        result.losses.append(loss.item())
        result.norms.append(engine.get_global_grad_norm() or 0.0)
    finish(engine, result)
    return calm, result


@every_stage
def test_evaluation_between_steps_changes_nothing(stage: int) -> None:
    calm, interrupted = run_ranks(2, train_interrupted, stage)[0]
    assert_same_bits(interrupted, calm, "with evaluation")


def thawing_loss(model: Any, place: Place) -> torch.Tensor:
    """Block 1 is trained from step 2 on, block 2 in step 0 and from step 3 on."""
    for name, param in model.named_parameters():
        if name.startswith(("blocks.1.", "blocks.2.")):
            param.requires_grad_(place.step >= 2 if name.startswith("blocks.1.") else place.step in (0, 3, 4))
    return CASES["plain"].loss(model, place)


@pytest.mark.parametrize("stage", by_day(range(4), 1, 3))
def test_parameters_frozen_for_a_while_are_left_alone(stage: int) -> None:
    case = replace(CASES["plain"], loss=thawing_loss)
    expected = train_reference(case, world_size=2, steps=5, accumulation=2, clip=0.5)
    for result in run_ranks(2, train, case, make_config(stage, accumulation=2, clip=0.5), 5):
        assert differences(result, expected) == []


def gradients(model: str, stage: int) -> dict[str, torch.Tensor | None]:
    """Of the first step, after its second and last backward."""
    case = CASES[model]
    engine = make_engine(case, make_config(stage, accumulation=2))
    for micro in range(2):
        engine.backward(case.loss(engine, Place(dist.get_rank(), 0, micro)))
        if micro == 0:
            engine.step()
    found = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters() if p.requires_grad}
    engine.zero_grad()
    engine.destroy()
    return found


@pytest.mark.each_value
@every_stage
@pytest.mark.parametrize("model", ("plain", "tied", "checkpoint_groups", "repeated_apart", "moe"))
def test_gradients_can_be_read_before_the_step(stage: int, model: str) -> None:
    case = CASES[model]
    module = case.build()
    for rank in range(2):
        for micro in range(2):
            (case.loss(module, Place(rank, 0, micro)) / 4).backward()
    for found in run_ranks(2, gradients, model, stage):
        for name, param in module.named_parameters():
            value = found[name]
            assert value is not None, name
            wanted = param.grad if param.grad is not None else torch.zeros_like(param)
            assert distance(value, wanted) < 1e-6, name


# -- the schedule ------------------------------------------------------------------------------------------------

SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.01, "total_num_steps": 8}}


def rates(stage: int, accumulation: int) -> list[float]:
    case = Case("small", lambda: Gpt(1, Mlp))  # rates are those of any model
    engine = make_engine(case, make_config(stage, accumulation=accumulation, scheduler=SCHEDULE))
    found = []
    for step in range(8):
        for micro in range(accumulation):
            found.append(engine.get_lr()[0])
            engine.backward(case.loss(engine, Place(dist.get_rank(), step, micro)))
            engine.step()
    engine.destroy()
    return found


def test_the_schedule_counts_optimizer_steps_only() -> None:
    wanted = run_ranks(1, rates, 0, 1)[0]
    assert len(set(wanted)) > 3
    for world_size, accumulation, stage in ((1, 4, 1), (2, 4, 3), (4, 1, 2)):
        for found in run_ranks(world_size, rates, stage, accumulation):
            assert found == [rate for rate in wanted for _ in range(accumulation)], (world_size, accumulation)


def overflow_steps(stage: int) -> list[tuple[bool, float, float, bool, int]]:
    """For each step: applied?, rate after it, scale after it, weights changed?, skipped so far. Scale begins at 2^24."""
    config = make_config(stage, precision="fp16", scheduler=SCHEDULE, fp16={"initial_scale_power": 24, "hysteresis": 1})
    engine = make_engine(CASES["plain"], config)
    found = []
    for step in range(12):
        before = engine.state_dict()
        engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), step)))
        engine.step()
        changed = any(not torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        found.append((engine.was_step_applied(), engine.get_lr()[0], engine.loss_scale, changed, engine.skipped_steps))
    engine.destroy()
    return found


def test_skipped_steps_change_the_scale_and_nothing_else() -> None:
    by_stage = [run_ranks(2, overflow_steps, stage) for stage in STAGES]
    wanted = by_stage[0][0]
    assert all(found == wanted for results in by_stage for found in results)
    schedule = run_ranks(1, rates, 0, 1)[0]
    skipped = 0
    for number, (done, rate, scale, changed, count) in enumerate(wanted):
        skipped += not done
        assert (count, scale) == (skipped, 2.0 ** (24 - skipped))
        assert not changed or done
        assert rate == schedule[number + 1 - skipped]
    assert 3 < skipped < len(wanted) - 1, "the test must see overflows, and steps without"


def own_scheduler(stage: int) -> list[float]:
    """A scheduler that the program keeps to itself is not stepped by the engine."""
    case = Case("small", lambda: Gpt(1, Mlp))
    engine = make_engine(case, make_config(stage))
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    found = []
    for step in range(4):
        found.append(engine.get_lr()[0])
        engine.backward(case.loss(engine, Place(dist.get_rank(), step)))
        engine.step()
        if step % 2:
            scheduler.step()
    engine.destroy()
    return found


def test_a_scheduler_of_the_programs_own_is_left_alone() -> None:
    rate = OPTIMIZERS["AdamW"][1]["lr"]
    assert run_ranks(2, own_scheduler, 3)[0] == [rate, rate, rate / 2, rate / 2]


# -- the end of an engine ----------------------------------------------------------------------------------------


def hooks(module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        for kind, found in vars(part).items():
            if kind.endswith("_hooks") and found:
                yield f"{name or 'the root'}: {kind}"


def destroy_and_look(stage: int) -> tuple[list[str], list[str], bool]:
    """(hooks left, names in module.state_dict(), does the module train on by itself?)"""
    case = CASES["tied"]
    engine = make_engine(case, make_config(stage))
    module = engine.module
    run_steps(engine, case, 1)
    engine.destroy()
    left, names = list(hooks(module)), list(module.state_dict())
    case.loss(module, Place()).backward()
    trains = all(param.grad is not None and bool(param.grad.isfinite().all()) for param in module.parameters())
    return left, names, trains and module.head.weight is module.embed.weight


@every_stage
def test_destroy_leaves_an_ordinary_module(stage: int) -> None:
    for left, names, trains in run_ranks(2, destroy_and_look, stage):
        assert not left
        assert names == list(Gpt(3, tied=True).state_dict())
        assert trains


def counts_after_cycles(stage: int, cycles: int) -> list[tuple[int, int, int]]:
    """(threads, open files, live tensors) after each cycle of making, training and destroying an engine."""
    found = []
    for _ in range(cycles):
        engine = zerorun.initialize(CASES["plain"].build(), make_config(stage))
        run_steps(engine, CASES["plain"], 1)
        engine.destroy()
        del engine
        gc.collect()
        tensors = sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter))
        found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), tensors))
    return found


@pytest.mark.parametrize("stage", (1, 3))
def test_engines_can_be_made_again_and_again(stage: int) -> None:
    for found in run_ranks(2, counts_after_cycles, stage, 6):
        assert found[1] == found[-1], f"(threads, files, tensors) grow: {found}"
