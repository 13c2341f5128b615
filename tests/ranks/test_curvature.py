"""Sophia's curvature: backwards against other labels, which feed the optimizer and are no part of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, Case, Place, token_loss, tokens
from test_offload import PLACES
from test_tensor_parallel import VOCABULARY, Model
from torch import nn
from torch.nn import functional
from training import finish, make_config, make_engine, read_slowly

import zerorun
from zerorun.errors import ConfigError, ModelError, NonFiniteError, StepError
from zerorun.log import logger
from zerorun.tensor_parallel.collectives import make_region
from zerorun.tensor_parallel.layers import ColumnParallelLinear
from zerorun.zero.gradients import safe_get_full_grad
from zerorun.zero.value_access import safe_get_full_optimizer_state

STEPS, INTERVAL = 5, 2
CLIP = 0.2
SOPHIA = reference.OPTIMIZERS["Sophia"][1]


def raised(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The text of the error, without its frames, which would keep the engine."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


def curvature_loss(case: Case, model: Any, place: Place) -> torch.Tensor:
    """Against labels that stand for sampled ones: other samples of the case."""
    return case.loss(model, Place(place.rank, place.step + 50, place.micro))


def in_one_process(case: Case, world: int, accumulation: int, estimates: int | None = None) -> reference.Result:
    """All ranks' micro-batches in one batch. ``estimates``: micro-batches of an estimate, if not all of a step."""
    module = case.build()
    optimizer = reference.make_optimizer(module, "Sophia", case.groups)
    assert isinstance(optimizer, reference.Sophia)
    trained = [param for group in optimizer.param_groups for param in group["params"]]
    result = reference.Result()
    for step in range(STEPS):
        if step % INTERVAL == 0:
            micros = range(estimates or accumulation)
            for place in [Place(rank, step, micro) for micro in micros for rank in range(world)]:
                (curvature_loss(case, module, place) / (world * len(micros))).backward()
            optimizer.take_curvature()
        total = 0.0
        for place in [Place(rank, step, micro) for micro in range(accumulation) for rank in range(world)]:
            loss = case.loss(module, place) / (world * accumulation)
            loss.backward()
            total += loss.item()
        result.losses.append(total)
        result.norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    result.weights = reference.weights_of(module)
    return result


def sophia_config(stage: int, accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    config = make_config(stage, accumulation=accumulation, clip=CLIP, optimizer="Sophia", **changes)
    config["optimizer"] = {"type": "SophiaG", "params": {**SOPHIA, "update_interval": INTERVAL}}
    return config


def step_with_curvature(engine: zerorun.Engine, case: Case, step: int, order: str) -> float:
    """A step whose curvature comes before its micro-batches, between them, or after them, as far as it is due."""
    rank, count, total = dist.get_rank(), engine.gradient_accumulation_steps(), 0.0
    due = engine.is_curvature_due()
    assert due == (step % INTERVAL == 0)
    for micro in range(count if due and order == "before" else 0):
        assert engine.is_curvature_due()
        engine.backward(curvature_loss(case, engine, Place(rank, step, micro)), curvature=True)
    assert engine.is_curvature_due() == (due and order != "before")  # at once, and not when the step ends
    for micro in range(count):
        loss = case.loss(engine, Place(rank, step, micro))
        if due and order == "between":  # with another forward between a forward and its backward
            engine.backward(curvature_loss(case, engine, Place(rank, step, micro)), curvature=True)
        engine.backward(loss)
        if due and order == "after":
            engine.backward(curvature_loss(case, engine, Place(rank, step, micro)), curvature=True)
        total += loss.item() / count
        engine.step()
    assert not (due and engine.is_curvature_due())
    return total


def train(model: str, config: dict[str, Any], order: str) -> reference.Result:
    engine, result = make_engine(CASES[model], config), reference.Result()
    for step in range(STEPS):
        result.losses.append(step_with_curvature(engine, CASES[model], step, order))
        norm = engine.get_global_grad_norm()
        assert norm is not None
        result.norms.append(norm)
        assert (engine.global_steps, engine.micro_steps) == (step + 1, (step + 1) * engine.gradient_accumulation_steps())
    finish(engine, result)
    return result


@pytest.mark.each_value
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("place", ["device", "optimizer", "disk"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("order", ["before", "between", "after"])
@pytest.mark.parametrize("model", ["plain", "unused_alternating", "two_groups"])
def test_curvature_over_ranks_is_that_of_the_whole_batch(
    model: str, order: str, accumulation: int, place: str, world: int, stage: int
) -> None:
    wanted = in_one_process(CASES[model], world, accumulation)
    config = sophia_config(stage, accumulation, zero_optimization=PLACES.get(place, {}) if stage else {})
    for found in run_ranks(world, train, model, config, order):
        assert reference.differences(found, wanted, 3e-6) == []


def fewer(stage: int) -> reference.Result:
    """An estimate of one micro-batch, in steps of three."""
    case, engine, result = CASES["plain"], make_engine(CASES["plain"], sophia_config(stage, 3)), reference.Result()
    for step in range(STEPS):
        total = 0.0
        for micro in range(3):
            if micro == 1 and engine.is_curvature_due():
                engine.backward(curvature_loss(case, engine, Place(dist.get_rank(), step, 0)), curvature=True)
            loss = case.loss(engine, Place(dist.get_rank(), step, micro))
            engine.backward(loss)
            engine.step()
            total += loss.item() / 3
        result.losses.append(total)
        result.norms.append(engine.get_global_grad_norm() or 0.0)
    finish(engine, result)
    return result


@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 2))
def test_an_estimate_of_fewer_micro_batches_ends_with_the_step(stage: int) -> None:
    wanted = in_one_process(CASES["plain"], 2, 3, estimates=1)
    for found in run_ranks(2, fewer, stage):
        assert reference.differences(found, wanted, 3e-6) == []


def weighted(stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The curvature of losses with weights, and the square of the gradient of their mean."""
    engine = make_engine(CASES["plain"], sophia_config(stage, 2))
    weights = [[3.0, 1.0], [5.0, 0.0]]
    for micro, weight in enumerate(weights[dist.get_rank()]):
        loss = CASES["plain"].loss(engine, Place(dist.get_rank(), 0, micro))
        engine.backward(loss, weight=torch.tensor(weight), curvature=True)
    hessian = safe_get_full_optimizer_state(engine.module.head.weight, "hessian")
    engine.destroy()
    module, total = CASES["plain"].build(), 0.0
    for rank, row in enumerate(weights):
        for micro, weight in enumerate(row):
            (CASES["plain"].loss(module, Place(rank, 0, micro)) * weight).backward()
            total += weight
    assert hessian is not None
    return hessian, (1 - SOPHIA["betas"][1]) * (module.head.weight.grad / total) ** 2


@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 1))
def test_losses_count_by_their_weights(stage: int) -> None:
    for found, wanted in run_ranks(2, weighted, stage):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-12)


def reload(stage: int, folder: str) -> list[Any]:
    """Run from step 2, with half of an estimate before the last load: uninterrupted, and after loads of it."""
    case = CASES["plain"]
    engine, found = make_engine(case, sophia_config(stage, 2)), []
    for step in range(2):
        step_with_curvature(engine, case, step, "before")
    engine.save_checkpoint(folder)
    for _ in range(3):
        losses = [step_with_curvature(engine, case, step, "before") for step in (2, 3)]
        found.append((losses, engine.state_dict(exact=True)))
        engine.load_checkpoint(folder)
        engine.backward(curvature_loss(case, engine, Place(dist.get_rank(), 9, 0)), curvature=True)
        engine.load_checkpoint(folder)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 2))
def test_an_engine_takes_the_estimates_of_what_it_loads(stage: int, tmp_path: Path) -> None:
    for (losses, weights), *others in run_ranks(2, reload, stage, str(tmp_path)):
        for again, same in others:
            assert again == losses
            assert all(torch.equal(value, same[name]) for name, value in weights.items())


# -- nothing else changes ----------------------------------------------------------------------------------------------


def with_and_without(stage: int, place: str, plain: bool) -> tuple[list[torch.Tensor], list[Any]]:
    """Gradients and counts before and after a curvature between two micro-batches of three."""
    config = sophia_config(stage, 3, zero_optimization=PLACES.get(place, {}) if stage else {})
    engine, case = make_engine(CASES["unused_on_one_rank"], config), CASES["unused_on_one_rank"]
    grads: list[torch.Tensor] = []
    counts: list[Any] = []

    def look(number: int) -> None:
        if not plain:  # reading reduces what is accumulated
            grads.extend(grad for param in engine.module.parameters() if (grad := safe_get_full_grad(param)) is not None)
        accumulation = engine.accumulation
        counts.append((number, engine.micro_steps, engine.global_steps, accumulation.backwards, accumulation.is_boundary))

    for micro in range(3):
        engine.backward(case.loss(engine, Place(dist.get_rank(), 0, micro)))
        if micro < 2:
            look(micro)
            engine.backward(curvature_loss(case, engine, Place(dist.get_rank(), 0, micro)), curvature=True)
            look(micro)
        engine.step()
    counts.append(engine.get_global_grad_norm())
    engine.destroy()
    return grads, counts


@pytest.mark.each_value
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("place", ["device", "optimizer"])
@pytest.mark.parametrize("plain", [False, True])
def test_gradients_and_counts_stay(stage: int, place: str, plain: bool) -> None:
    for grads, counts in run_ranks(2, with_and_without, stage, place, plain):
        quarter = len(grads) // 4
        for before, after in ((0, 1), (2, 3)):
            pairs = zip(grads[before * quarter :][:quarter], grads[after * quarter :][:quarter], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)
        assert counts[0] == counts[1] and counts[2] == counts[3]


def train_by_signs(stage: int, curvature: bool, late: bool = False) -> reference.Result:
    """With a rho of 0 the curvature does not count, so that all else must be the same bits.

    ``late``: the last rank is slow to read what the others have for it.
    """
    config = sophia_config(stage, 2)
    config["optimizer"]["params"]["rho"] = 0.0
    engine, result, case = make_engine(CASES["unused_alternating"], config), reference.Result(), CASES["unused_alternating"]
    if late and dist.get_rank() == dist.get_world_size() - 1:
        read_slowly(engine.comm.dense.shard.memory, 0.01)
    for step in range(3):
        for micro in range(2):
            loss = case.loss(engine, Place(dist.get_rank(), step, micro))
            engine.backward(loss)
            if curvature:
                engine.backward(curvature_loss(case, engine, Place(dist.get_rank(), step, micro)), curvature=True)
            engine.step()
            result.losses.append(loss.item())
        result.norms.append(engine.get_global_grad_norm() or 0.0)
    finish(engine, result)
    return result


def both_ways(stage: int) -> list[reference.Result]:
    return [train_by_signs(stage, curvature, late=curvature) for curvature in (False, True)]


@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 0))
def test_a_curvature_between_micro_batches_changes_no_bit(stage: int) -> None:
    for without, with_ in run_ranks(2, both_ways, stage):
        assert (with_.losses, with_.norms) == (without.losses, without.norms)
        assert all(torch.equal(value, without.weights[name]) for name, value in with_.weights.items())


# -- fp16 --------------------------------------------------------------------------------------------------------------


def overflowing(stage: int, place: str) -> dict[str, Any]:
    """Of three estimates the second overflows on one rank; and a step does."""
    config = sophia_config(
        stage, precision="fp16", fp16={"hysteresis": 1}, zero_optimization=PLACES.get(place, {}) if stage else {}
    )
    engine, case = make_engine(CASES["plain"], config), CASES["plain"]
    found: list[Any] = []
    for step in range(3):
        before = safe_get_full_optimizer_state(engine.module.head.weight, "hessian") if step else None
        bad = 1e30 if step == 1 and dist.get_rank() == 1 else 1.0
        engine.backward(curvature_loss(case, engine, Place(dist.get_rank(), step)) * bad, curvature=True)
        after = safe_get_full_optimizer_state(engine.module.head.weight, "hessian")
        found.append((before, after, engine.loss_scale))
        engine.backward(case.loss(engine, Place(dist.get_rank(), step)) * (1e30 if step == 0 else 1.0))
        engine.step()
    skipped = engine.skipped_steps
    engine.destroy()
    return {"found": found, "skipped": skipped}


@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 0, 3))
@pytest.mark.parametrize("place", by_day(("device", "optimizer", "disk"), "device"))
def test_an_estimate_that_overflows_is_left_out(stage: int, place: str) -> None:
    for result in run_ranks(2, overflowing, stage, place):
        (_, first, scale), (before, same, lower), (_, third, _) = result["found"]
        assert result["skipped"] == 1 and lower == scale / 2
        assert torch.equal(before, first) and torch.equal(same, before) and not torch.equal(third, same)
        wanted = unscaled_square()
        assert reference.distance(first, wanted) < 2e-2  # gradients in fp16


def unscaled_square() -> torch.Tensor:
    module = CASES["plain"].build()
    for rank in range(2):
        (curvature_loss(CASES["plain"], module, Place(rank)) / 2).backward()
    return (1 - SOPHIA["betas"][1]) * module.head.weight.grad**2


def not_finite(stage: int) -> str:
    engine = make_engine(CASES["plain"], sophia_config(stage))
    loss = curvature_loss(CASES["plain"], engine, Place(dist.get_rank()))
    bad = loss * (float("nan") if dist.get_rank() else 1.0)
    text = raised(NonFiniteError, lambda: engine.backward(bad, curvature=True))
    engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank())))  # training can go on
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()
    return text


def test_a_curvature_that_is_not_finite_is_an_error_on_all_ranks() -> None:
    for text in run_ranks(2, not_finite, 2):
        assert "gradients of the curvature are NaN or infinite at step 1" in text


# -- tensor parallelism, and sampling ----------------------------------------------------------------------------------


def tokens_at(step: int, rank: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_at(model: Any, step: int, rank: int) -> torch.Tensor:
    ids = tokens_at(step, rank)
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def tensor_parallel(stage: int) -> dict[str, torch.Tensor]:
    topology = zerorun.Topology.create(dist.get_world_size(), dist.get_rank(), tensor=2, device_type="cpu")
    model = Model(make_region(topology, torch.device("cpu")))
    engine = zerorun.initialize(model, sophia_config(stage), topology=topology)
    for step in range(STEPS):
        if engine.is_curvature_due():
            engine.backward(loss_at(engine, step + 50, topology.data_parallel_rank), curvature=True)
        engine.backward(loss_at(engine, step, topology.data_parallel_rank))
        engine.step()
    weights = engine.state_dict()
    engine.destroy()
    topology.close()
    return weights


@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 1, 3))
def test_curvature_of_divided_layers(stage: int) -> None:
    module = Model(None)
    optimizer = reference.Sophia(module.parameters(), **SOPHIA)
    for step in range(STEPS):
        if step % INTERVAL == 0:
            (sum(loss_at(module, step + 50, rank) for rank in range(2)) / 2).backward()
            optimizer.take_curvature()
        (sum(loss_at(module, step, rank) for rank in range(2)) / 2).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_ranks(4, tensor_parallel, stage):
        torch.testing.assert_close(weights, dict(module.state_dict()), rtol=3e-6, atol=3e-6)


CLASSES, ROWS = 11, 40_000


def whole_logits() -> torch.Tensor:
    """[2, ROWS / 2, CLASSES]: all rows alike; some classes cannot come."""
    row = torch.tensor([0.3, -1.0, 2.0, -torch.inf, 0.0, 1.5, -3.0, 0.7, -torch.inf, 1.0, -0.5])
    return row.expand(2, ROWS // 2, CLASSES)


def sample_divided(tensor: int) -> dict[str, Any]:
    topology = zerorun.Topology.create(dist.get_world_size(), dist.get_rank(), tensor=tensor, device_type="cpu")
    region = make_region(topology, torch.device("cpu"))
    model = nn.Sequential(ColumnParallelLinear(4, 8, region=region, gather_output=True))
    engine = zerorun.initialize(model, make_config(1), topology=topology)
    own = whole_logits().tensor_split(tensor, -1)[topology.tensor_rank]
    torch.manual_seed(3 + topology.tensor_rank)  # as a script might leave them
    drawn = [zerorun.sampled_labels(own, CLASSES), zerorun.sampled_labels(whole_logits())]
    torch.manual_seed(3 + topology.tensor_rank)
    again = zerorun.sampled_labels(own, CLASSES)
    errors = []
    for given, vocabulary in ((own, CLASSES + 5), (own + 3 * topology.tensor_rank, None)):
        errors.append(
            raised(ModelError, lambda given=given, vocabulary=vocabulary: zerorun.sampled_labels(given, vocabulary))
        )
    engine.destroy()
    place = topology.data_parallel_rank
    topology.close()
    return {"drawn": drawn, "again": again, "place": place, "errors": errors}


@pytest.mark.parametrize(("world", "tensor"), by_day(((2, 2), (3, 3), (4, 2)), (3, 3), (4, 2)))
def test_labels_are_the_same_on_all_tensor_ranks_and_whole(world: int, tensor: int) -> None:
    """As if one rank had all classes: the same labels for the same seed, and others on other data-parallel ranks."""
    results = run_ranks(world, sample_divided, tensor)
    torch.manual_seed(3)
    whole = zerorun.sampled_labels(whole_logits())
    for result in results:
        first = next(other for other in results if other["place"] == result["place"])
        assert all(map(torch.equal, result["drawn"], first["drawn"]))
        assert torch.equal(result["again"], result["drawn"][0])
        assert torch.equal(result["drawn"][0], whole) == (result["place"] == 0)
        assert "pass the number of all classes" in result["errors"][0].replace("Pass", "pass")
        assert "no vocabulary" in result["errors"][1]
    assert_distributed(whole)
    assert_distributed(results[-1]["drawn"][1])


def assert_distributed(labels: torch.Tensor) -> None:
    """By Pearson's test of 8 degrees of freedom, at 1 in 10,000; classes that cannot come never do."""
    wanted = whole_logits()[0, 0].softmax(0) * ROWS
    counts = torch.bincount(labels.flatten(), minlength=CLASSES)
    assert labels.shape == (2, ROWS // 2) and labels.dtype == torch.int64
    assert counts[wanted == 0].sum() == 0
    possible = wanted > 0
    assert float(((counts - wanted)[possible] ** 2 / wanted[possible]).sum()) < 31.8


def loop(stage: int) -> list[float]:
    """The loop of the manual, whose phases are measured: labels are drawn, and the loss falls."""
    engine = make_engine(CASES["plain"], sophia_config(stage, wall_clock_breakdown=True, steps_per_print=2))
    losses = []
    torch.manual_seed(0)
    for _ in range(12):
        ids = tokens(Place(dist.get_rank()))
        if engine.is_curvature_due():
            logits = engine(ids[:, :-1])
            labels = zerorun.sampled_labels(logits)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            engine.backward(loss, curvature=True)
        loss = token_loss(engine, ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


def test_sampled_labels_train() -> None:
    for losses in run_ranks(2, loop, 3):
        assert losses[-1] < losses[0]


def without_curvature() -> list[str]:
    """What is logged in as many steps as two estimates are due in, and in some more."""
    engine, found = make_engine(CASES["plain"], sophia_config(1)), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    for step in range(2 * INTERVAL + 3):
        engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), step)))
        found.append(f"step {step}")
        engine.step()
    logger.removeHandler(handler)
    engine.destroy()
    return [text for text in found if text.startswith(("step", "Sophia"))]


def test_a_loop_that_gives_no_curvature_is_told() -> None:
    texts = run_ranks(2, without_curvature)[0]
    assert [text[:4] for text in texts] == ["step"] * (2 * INTERVAL + 1) + ["Soph", "step", "step"]
    assert f"no curvature for over {2 * INTERVAL} steps" in texts[2 * INTERVAL + 1]


# -- what is refused ---------------------------------------------------------------------------------------------------


def misuse() -> list[str]:
    engine = make_engine(CASES["plain"], make_config(1))
    assert not engine.is_curvature_due()
    loss = CASES["plain"].loss(engine, Place())
    texts = [raised(StepError, lambda: engine.backward(loss, curvature=True))]
    engine.destroy()
    other = make_engine(CASES["plain"], sophia_config(1, 2))
    other.backward(CASES["plain"].loss(other, Place()), curvature=True)
    loss = CASES["plain"].loss(other, Place())
    texts.append(raised(StepError, lambda: other.backward(loss, weight=2.0, curvature=True)))
    other.destroy()
    return texts


def test_misuse() -> None:
    other, mixed = run_ranks(1, misuse)[0]
    assert "the optimizer is Adam. Remedy: leave it out" in other
    assert "different ways to average losses" in mixed


def pipelined() -> str:
    module = zerorun.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=functional.mse_loss)
    config = sophia_config(0)
    return raised(ModelError, lambda: zerorun.initialize(module, config))


def test_pipelines_are_refused() -> None:
    for text in run_ranks(2, pipelined):
        assert "SophiaG takes its curvature from backwards of their own" in text and "Remedy: use AdamW or Lion" in text


def test_the_number_of_tokens_is_needed() -> None:
    config = sophia_config(1)
    del config["optimizer"]["params"]["bs"]
    with pytest.raises(ConfigError, match=r"optimizer\.params\.bs.*train_batch_size times the length"):
        zerorun.estimate_memory(CASES["plain"].build(), config, 2)
    config["optimizer"]["params"]["bs"] = "auto"
    with pytest.raises(ConfigError, match=r"optimizer\.params\.bs.*Write a value"):
        zerorun.estimate_memory(CASES["plain"].build(), config, 2)
