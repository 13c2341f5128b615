"""What is worth a word after the first steps, said once: labels of different numbers, parameters that nothing reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from mixtures import make
from models import CASES, Gpt, Place
from test_parallel_matrix import build
from torch import nn
from training import make_config, make_engine, shared_topology

import zerorun
from zerorun.engine import accumulation as micro_batches
from zerorun.engine import pipeline_engine, step_outcomes
from zerorun.engine.pipeline_engine import PipelineEngine
from zerorun.pipeline.module import PipelineModule
from zerorun.zero import sharded_optimizer

STEPS = sharded_optimizer.WATCHED_STEPS


class Labelled(nn.Module):
    """Returns its loss, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Gpt()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())


def said(module: Any, act: Any, function: str = "warn_once") -> list[Any]:
    """What ``act`` has ``module`` warn of: what it gives to ``function``."""
    found: list[Any] = []
    usual = getattr(module, function)
    setattr(module, function, found.append)
    try:
        act()
    finally:
        setattr(module, function, usual)
    return found


def train_on_labels(form: str, counts: tuple[int, ...], accumulation: int) -> list[str]:
    engine = zerorun.initialize(Labelled(), make_config(1, accumulation=accumulation), topology=shared_topology())

    def act() -> None:
        for count in counts:
            labels = torch.full((2, 8), micro_batches.IGNORED)
            labels.view(-1)[:count] = 1
            loss = engine(torch.zeros(2, 8, dtype=torch.long), labels=labels)
            if form == "plain":
                loss.backward()
            else:
                engine.backward(loss, **{"weight": {"weight": count}, "sum": {"scale_wrt_gas": False}}.get(form, {}))
            engine.step()

    found = said(micro_batches, act)
    engine.zero_grad()
    engine.destroy()
    return found


@pytest.mark.parametrize("form", ("mean", "plain", "weight", "sum"))
def test_means_of_means_are_pointed_out(form: str) -> None:
    different = run_ranks(2, train_on_labels, form, (16, 16, 9, 3), 2)
    for found in different:
        assert len(found) == (form in ("mean", "plain"))
        assert all("between 9 and 16 labels" not in text and "between 3 and 16 labels" in text for text in found)
    assert run_ranks(2, train_on_labels, form, (9, 9, 9, 9), 2) == [[], []]
    assert run_ranks(1, train_on_labels, form, (16, 9, 3, 1), 1) == [[]]  # one micro-batch is its own mean


def train_in_stages(counts: tuple[int, ...], accumulation: int, given: dict[str, Any]) -> list[str]:
    """As ``train_on_labels``, a Hugging Face model in two stages. ``given``: what micro-batches have besides."""
    config = make_config(1, accumulation=accumulation)
    engine = zerorun.initialize(make("mixtral"), {**config, "pipeline": {"stages": 2}})
    assert isinstance(engine, PipelineEngine)
    batches = []
    for count in counts:
        labels = torch.full((2, 8), micro_batches.IGNORED)
        labels.view(-1)[:count] = 1
        batches.append({"input_ids": torch.zeros_like(labels), "labels": labels, **given})

    def act() -> None:
        engine.eval_batch(iter([{**batches[0], "labels": torch.ones_like(labels)}] * accumulation))  # it counts nothing
        for step in range(0, len(counts), accumulation):
            engine.train_batch(iter(batches[step : step + accumulation]))

    found = said(micro_batches, act)
    engine.destroy()
    return found


def test_means_of_means_in_a_pipeline_are_pointed_out_on_rank_zero() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test]'")
    found = run_ranks(2, train_in_stages, (12, 9, 3, 3), 2, {})
    assert len(found[0]) == 1 and found[1] == found[0]
    assert "between 9 and 12 labels" in found[0][0]
    assert "num_items_in_batch" in found[0][0] and "backward" not in found[0][0]
    assert run_ranks(2, train_in_stages, (9, 9), 2, {}) == [[], []]
    assert run_ranks(2, train_in_stages, (12, 9), 2, {"num_items_in_batch": 10.5}) == [[], []]  # the remedy


def train_for_a_while(model: str, steps: int) -> list[str]:
    case = CASES[model]
    engine = make_engine(case, make_config(2))

    def act() -> None:
        for step in range(steps):
            engine.backward(case.loss(engine, Place(0, step, 0)))
            engine.step()

    found = said(sharded_optimizer, act)
    engine.destroy()
    return found


def test_parameters_that_nothing_reaches_are_named() -> None:
    assert run_ranks(2, train_for_a_while, "unused_everywhere", STEPS - 1) == [[], []]
    for found in run_ranks(2, train_for_a_while, "unused_everywhere", 2 * STEPS):
        assert len(found) == 1
        assert "got no gradient on any rank in the first 10 steps" in found[0]
        assert "blocks.1.extra.weight" in found[0] and "root_extra" in found[0] and "qkv" not in found[0]
    for found in run_ranks(2, train_for_a_while, "unused_alternating_steps", 2 * STEPS):  # odd blocks use all of theirs
        assert len(found) == 1 and found[0].startswith("6 parameters") and "blocks.1." not in found[0]
    assert run_ranks(2, train_for_a_while, "plain", 2 * STEPS) == [[], []]


def accumulate(calls: int) -> list[str]:
    """Four backwards in two optimizer steps; ``step()`` after every ``calls`` of them."""
    engine = make_engine(CASES["plain"], make_config(2, accumulation=2))

    def act() -> None:
        for micro in range(4):
            engine.backward(CASES["plain"].loss(engine, Place(0, 0, micro)))
            if micro % calls == calls - 1:
                engine.step()

    found = said(micro_batches, act)
    engine.zero_grad()
    engine.destroy()
    return found


def test_one_step_for_all_micro_batches_is_pointed_out() -> None:
    assert run_ranks(2, accumulate, 1) == [[], []]
    for found in run_ranks(2, accumulate, 2):
        assert "step() after 2 backwards counts as one of gradient_accumulation_steps = 2" in found[0]


# -- data of ranks ---------------------------------------------------------------------------------------------------


def train_on_rows(stage: int, tensor: int, divides: bool) -> list[str]:
    config = make_config(stage, accumulation=2, **({"tensor_parallel": {"size": tensor}} if tensor > 1 else {}))
    module = build("llama") if tensor > 1 else Gpt()
    engine = zerorun.initialize(module, config, topology=shared_topology(tensor=tensor))
    first = engine.topology.data_parallel_rank if divides else 0

    def act() -> None:
        for step in range(4):
            rows = torch.arange(16).view(2, 8) + first + step
            output = engine(rows)
            engine.backward(getattr(output, "logits", output).float().square().mean())
            engine.step()

    return said(step_outcomes, act)


def train_on_rows_in_stages(divides: bool) -> list[str]:
    module = PipelineModule([nn.Linear(4, 4) for _ in range(3)], num_stages=2, loss_fn=lambda out, _: out.square().mean())
    engine = zerorun.initialize(module, make_config(1, accumulation=2), topology=shared_topology(pipe=2))
    assert isinstance(engine, PipelineEngine)
    rank = engine.topology.data_parallel_rank if divides else 0

    def act() -> None:
        for step in range(2):
            rows = [(torch.full((2, 4), float(rank + 10 * micro + step)), None) for micro in range(2)]
            engine.eval_batch(iter([(torch.zeros(2, 4), None)] * 2))
            engine.train_batch(iter(rows))

    return said(pipeline_engine, act, "advise_own_data")


@pytest.mark.parametrize("divides", (False, True))
def test_ranks_of_pipelines_that_read_the_same_data_are_told(divides: bool) -> None:
    """Not of what they evaluate, which may be the same."""
    assert run_ranks(4, train_on_rows_in_stages, divides) == [[] if divides else [2]] * 4


@pytest.mark.parametrize(
    ("ranks", "stage", "tensor", "divides", "told"),
    [
        (1, 0, 1, False, 0),
        (2, 0, 1, False, 1),
        (2, 3, 1, True, 0),
        (3, 3, 1, False, 1),
        (2, 1, 2, False, 0),
        (4, 1, 2, True, 0),
        (4, 1, 2, False, 1),
    ],
)
def test_ranks_that_read_the_same_data_are_told(ranks: int, stage: int, tensor: int, divides: bool, told: int) -> None:
    """As where a loader has no sampler, and all ranks the same seed: N of them train as fast as one, and as well."""
    for found in run_ranks(ranks, train_on_rows, stage, tensor, divides):
        assert len(found) == told
        assert all(f"all {ranks // tensor} data-parallel ranks were given the same data" in text for text in found)
