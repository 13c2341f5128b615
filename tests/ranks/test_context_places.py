"""Divided sequences in other places: 16 bits, recomputation by Hugging Face, the simulated device, and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from contexts import batch_of, build
from covering import by_day
from harness import run_ranks
from races import looking_for_races
from simulation import simulated_device
from test_context import Training, compare, one_step, reference, train

import zerorun

BF16: tuple[tuple[str, Any], ...] = (("bf16", {"enabled": True}),)
FP16: tuple[tuple[str, Any], ...] = (("fp16", {"enabled": True, "initial_scale_power": 8}),)


@pytest.mark.parametrize(
    ("changes", "stage", "method"),
    by_day(
        [
            (changes, stage, method)
            for changes in (BF16, FP16)
            for stage in (0, 1, 2, 3)
            for method in ("ulysses", "gather")
        ],
        (BF16, 3, "ulysses"),
        (FP16, 1, "gather"),
    ),
)
def test_in_16_bits(changes: tuple[tuple[str, Any], ...], stage: int, method: str) -> None:
    """What one rank comes to in 16 bits, as far as these round sums in another order."""
    training = Training(stage=stage, batch="padded", method=method, changes=changes, optimizer="SGD")
    alone = Training(stage=stage, batch="padded", context=1, ranks=1, changes=changes, optimizer="SGD")
    (expected,) = run_ranks(1, train, alone)
    for found in run_ranks(2, train, training):
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)
        assert found["norms"] == pytest.approx(expected["norms"], rel=2e-2)


def test_no_step_is_skipped_for_a_micro_batch_without_targets_in_fp16() -> None:
    """Its loss is NaN, and its gradients are 0: a loop gives it the weight 0."""
    training = Training(accumulation=2, weighted=True, unlabelled=True, changes=FP16, optimizer="SGD")
    alone = replace(training, context=1, ranks=1)
    (expected,) = run_ranks(1, train, alone)
    for found in run_ranks(2, train, training):
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)
        assert found["norms"] == pytest.approx(expected["norms"], rel=2e-2)


def recomputed_by_the_model(training: Training, reentrant: bool) -> dict[str, Any]:
    model = build(training.model).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return train(training, model)


@pytest.mark.parametrize(
    ("model", "method", "reentrant", "stage"),
    by_day(
        product(("llama", "gpt2"), ("ulysses", "gather"), (False, True), (1, 3)),
        ("llama", "ulysses", False, 3),
        ("gpt2", "gather", True, 1),
    ),
)
def test_recomputed_by_hugging_face(model: str, method: str, reentrant: bool, stage: int) -> None:
    training = Training(model, stage=stage, batch="padded", method=method)
    compare(run_ranks(2, recomputed_by_the_model, training, reentrant), reference(training))


def on_the_simulated_device(training: Training) -> tuple[dict[str, Any], list[str]]:
    """(what training comes to, the races of its steps)"""
    with simulated_device():
        found = train(training)
    with simulated_device(), looking_for_races() as races:
        engine = zerorun.initialize(build(training.model).train(), training.config)
        for step in range(2):
            engine.backward(engine(**batch_of(training.batch, step, 0, 0)).loss)
            engine.step()
        engine.destroy()
    return found, list(races.found)


@pytest.mark.parametrize(
    ("method", "stage", "batch"),
    by_day(
        [(method, stage, batch) for method in ("ulysses", "gather") for stage in (1, 3) for batch in ("padded", "packed")],
        ("gather", 3, "padded"),
    ),
)
def test_on_the_simulated_device(method: str, stage: int, batch: str) -> None:
    training = Training(stage=stage, batch=batch, method=method)
    results = run_ranks(2, on_the_simulated_device, training)
    compare([found for found, _ in results], reference(training))
    assert [races for _, races in results] == [[], []]


def save(training: Training, folder: str) -> dict[str, torch.Tensor]:
    engine = zerorun.initialize(build(training.model).train(), training.config)
    one_step(engine, [batch_of("padded", 0, 0, engine.topology.data_parallel_rank)], weighted=False)
    engine.save_checkpoint(folder)
    found = engine.state_dict()
    engine.destroy()
    return found


def draw_after_loading(training: Training, folder: str) -> float:
    """The next number after a load, on a rank with a seed of its own."""
    engine = zerorun.initialize(build(training.model).train(), training.config)
    torch.manual_seed(10 + engine.topology.rank)
    engine.load_checkpoint(folder)
    engine.destroy()
    return torch.rand(()).item()


def test_random_numbers_are_by_rank_only_for_the_same_division(tmp_path: Any) -> None:
    """Ranks of a sequence draw the same numbers; as ranks of their own they would drop the same elements for ever."""
    run_ranks(2, save, Training(stage=1), str(tmp_path))
    for context, alike in ((2, True), (1, False)):
        first, second = run_ranks(2, draw_after_loading, Training(stage=1, context=context, ranks=2), str(tmp_path))
        assert (first == second) == alike


def go_on(training: Training, folder: str) -> tuple[dict[str, torch.Tensor], float]:
    """(weights as loaded, the loss of a step after it)"""
    engine = zerorun.initialize(build(training.model).train(), training.config)
    engine.load_checkpoint(folder)
    found = engine.state_dict()
    loss, _ = one_step(engine, [batch_of("padded", 1, 0, engine.topology.data_parallel_rank)], weighted=False)
    engine.destroy()
    return found, loss


@pytest.mark.parametrize(("stage", "other"), by_day([(1, 3), (3, 1), (3, 0)], (3, 1)))
def test_checkpoints_cross_divisions(stage: int, other: int, tmp_path: Any) -> None:
    """Of one sequence over 2 ranks, to one process, 4 ranks, and 2 again."""
    saved, *_ = run_ranks(2, save, Training(stage=stage), str(tmp_path))
    losses = []
    for ranks, context in ((1, 1), (4, 4), (2, 2)):
        for weights, loss in run_ranks(ranks, go_on, Training(stage=other, context=context, ranks=ranks), str(tmp_path)):
            assert all(torch.equal(weights[name], value) for name, value in saved.items())
            losses.append(loss)
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)
