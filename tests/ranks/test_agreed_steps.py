"""What one rank alone finds wrong in a step, all ranks refuse: none goes on with weights that others do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from test_bad_input import attempt
from test_foreign_values import build as plain_model
from test_foreign_values import data
from torch import nn
from training import make_config

import zerorun
from zerorun import log
from zerorun.errors import PipelineError
from zerorun.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_update_full_grad_vectorized,
)


class Fails(torch.optim.SGD):
    """An optimizer of a script, which fails once on rank 1."""

    armed = False

    def step(self, closure: Any = None) -> Any:
        if Fails.armed and dist.get_rank() == 1:
            Fails.armed = False
            raise ValueError("planted")
        return super().step(closure)


def pipeline(**given: Any) -> zerorun.Engine:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(5)]
    layers[3].requires_grad_(False)
    model = zerorun.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = make_config(1, optimizer="SGD", gradient_clipping=0.0, pipeline={"stages": 2})
    if given:
        del config["optimizer"]
    return zerorun.initialize(model, config, **given)


def batch(number: int) -> Any:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
    return iter([(x, x)] * 9)


def weights(engine: zerorun.Engine) -> list[torch.Tensor]:
    return [param.detach().clone() for param in engine.module.parameters()]


def thawed() -> tuple[tuple[str, str], bool, bool]:
    """What is said where one stage has a layer that was frozen, whether weights stay, and whether a step follows."""
    engine = pipeline()
    engine.train_batch(batch(0))
    before = weights(engine)
    engine.module.requires_grad_(True)
    said = attempt(lambda: engine.train_batch(batch(1)))
    stayed = all(map(torch.equal, before, weights(engine)))
    for name, param in engine.module.named_parameters():
        param.requires_grad_("3." not in name)
    engine.train_batch(batch(1))
    return said, stayed, engine.global_steps == 2


def test_a_stage_takes_no_step_that_another_refuses() -> None:
    for rank, ((kind, text), stayed, goes_on) in enumerate(run_ranks(2, thawed)):
        assert kind == "StepError" and "'3.weight' and 1 more requires a gradient now" in text
        assert text.startswith("rank 1: ") == (rank == 0) and stayed and goes_on


def failing(action: Callable[[], Any]) -> str:
    """The text of the ValueError that ``action`` raises, on rank 1 alone."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def broken_off() -> tuple[str, tuple[str, str], bool]:
    """What an optimizer says that fails, what the next step says, and whether a load mends it."""
    engine = pipeline(optimizer=lambda params: Fails(params, lr=0.1))
    engine.train_batch(batch(0))
    whole, Fails.armed = engine.state_dict(), True
    first = failing(lambda: engine.train_batch(batch(1)))
    second = attempt(lambda: engine.train_batch(batch(2)))
    engine.load_state_dict(whole)
    return first, second, float(engine.train_batch(batch(3))) > 0


def test_no_step_follows_an_update_that_failed_on_one_stage() -> None:
    for rank, (first, (kind, text), mended) in enumerate(run_ranks(2, broken_off)):
        assert first == ("planted" if rank else "")
        assert kind == "StepError" and "an update failed midway, with ValueError: planted" in text and mended


def unread(batch_fn: bool) -> tuple[str, float]:
    """What is said of data that the last stage cannot read, and the loss of the next batch."""
    engine, armed = pipeline(), [True]

    def fail(value: Any) -> Any:
        if dist.get_rank() == 1 and armed.pop():
            raise OSError("planted")
        return value

    if batch_fn:
        engine.set_batch_fn(fail)
    with pytest.raises((OSError, PipelineError)) as caught:
        engine.train_batch(batch(0) if batch_fn else (fail(value) for value in batch(0)))
    armed[:] = [False] * 99
    return f"{caught.type.__name__}: {caught.value}", float(engine.train_batch(batch(1)))


@pytest.mark.parametrize("batch_fn", (False, True))
def test_data_that_one_stage_cannot_read_is_left_out_by_all(batch_fn: bool) -> None:
    (first, loss), (last, other) = run_ranks(2, unread, batch_fn)
    assert last == "OSError: planted" and loss == other
    assert first.startswith("PipelineError: rank 1 could not read its micro-batches: OSError: planted. All stages have")


def failing_evaluation() -> tuple[str, str]:
    """What a loss function says that fails in an evaluation, and what the batch after it says, on the last stage."""
    layers = [nn.Linear(8, 8) for _ in range(4)]
    armed = [True]

    def loss(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if armed:
            raise ValueError("planted")
        return (out - labels).square().mean()

    model = zerorun.PipelineModule(layers, num_stages=2, loss_fn=loss)
    engine = zerorun.initialize(model, make_config(1, pipeline={"stages": 2}))
    if dist.get_rank() == 0:
        return failing(lambda: engine.eval_batch(batch(0), reduce_output=None)), ""
    first = failing(lambda: engine.eval_batch(batch(0), reduce_output=None))
    armed.clear()
    return first, attempt(lambda: engine.train_batch(batch(1)))[1]


def test_no_batch_follows_one_that_failed_on_its_way() -> None:
    """Stages are at different places: the next sum of one was another than that which the other waited for."""
    _, (first, second) = run_ranks(2, failing_evaluation)
    assert (
        first == "planted" and "an earlier batch failed on its way through the pipeline, with ValueError: planted" in second
    )


def own_rate(engine: zerorun.Engine, key: str, scale: float) -> None:
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        old = group[key]
        group[key] = tuple(value * scale for value in old) if isinstance(old, tuple) else old * scale


def differing(stage: int, way: str) -> tuple[tuple[str, str], bool, bool]:
    """What is said where ranks take steps of different kinds, whether weights stay, and whether a step follows."""
    engine = zerorun.initialize(plain_model(), make_config(stage))
    rank = dist.get_rank()

    def step(**given: Any) -> None:
        loss = engine(data()).square().mean()
        engine.backward(loss, **given)
        engine.step()

    step()
    before = engine.state_dict()
    changed = way if way in ("lr", "betas", "weight_decay") else ""
    if changed and rank:
        own_rate(engine, changed, 0.5)
    if way == "whole lr":
        engine.optimizer.param_groups[0]["lr"] = 1 + rank
    given: dict[str, Any] = {"weight": (3, None)[rank]} if way == "weights" else {}
    said = attempt(lambda: step(**given))
    after = engine.state_dict()
    stayed = all(torch.equal(value, after[name]) for name, value in before.items())
    if changed and rank:
        own_rate(engine, changed, 2.0)
    if way == "whole lr":
        engine.optimizer.param_groups[0]["lr"] = 1
    step()
    return said, stayed, engine.global_steps == 2


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("lr", "the optimizer of rank 1 has [0.0015] as 'lr' of its groups, and that of rank 0 [0.003]"),
        ("whole lr", "the optimizer of rank 1 has [2] as 'lr' of its groups, and that of rank 0 [1]"),
        ("betas", "the optimizer of rank 1 has [0.45, 0.4995] as 'betas' of its groups, and that of rank 0 [0.9, 0.999]"),
        ("weight_decay", "rank 1 has [0.05] as 'weight_decay' of its groups, and that of rank 0 [0.1]"),
        ("weights", "divide the gradients of this step by different numbers"),
    ],
)
@pytest.mark.each_value
@pytest.mark.parametrize("stage", (0, 1, 3))
def test_steps_of_ranks_are_of_one_kind(stage: int, way: str, words: str) -> None:
    for (kind, text), stayed, goes_on in run_ranks(2, differing, stage, way):
        assert kind == "StepError" and words in text, text
        assert stayed and goes_on


def warned(*words: str) -> int:
    return sum(all(word in text for word in words) for text in log._warned)


def leave_out_steps(stage: int, left_out: int, weighted: bool) -> list[int]:
    """How many warn of it after each step: rank 1 leaves out step() after some micro-batches of the second one."""
    engine = zerorun.initialize(plain_model(), make_config(stage, gradient_accumulation_steps=2))
    given: dict[str, Any] = {"weight": 1} if weighted else {}
    found = []
    for number in range(3):
        for _ in range(left_out if number == 1 and dist.get_rank() == 1 else 0):
            engine.backward(engine(data()).square().mean(), **given)
        for _ in range(2):
            engine.backward(engine(data()).square().mean(), **given)
            engine.step()
        found.append(warned("rank 1 has called backward() 4 times for this step, and rank 0 2 times", "weight=..."))
    return found


@pytest.mark.parametrize("stage", by_day((0, 1), 0))
def test_a_rank_that_leaves_out_a_step_is_told(stage: int) -> None:
    """Its gradients counted twice, without a word. With weights they count as the script says."""
    assert run_ranks(2, leave_out_steps, stage, 2, False) == [[0, 1, 1]] * 2
    assert run_ranks(2, leave_out_steps, stage, 0, False) == [[0, 0, 0]] * 2
    assert run_ranks(2, leave_out_steps, stage, 2, True) == [[0, 0, 0]] * 2


def freeze_head(stage: int, everywhere: bool) -> int:
    """How many warn of parameters that are frozen, in the second of three steps, on rank 1 or everywhere."""
    engine = zerorun.initialize(plain_model(), make_config(stage))
    for number in range(3):
        for param in list(engine.module.parameters())[-2:] if everywhere or dist.get_rank() else ():
            param.requires_grad_(number != 1)
        engine.backward(engine(data()).square().mean())
        engine.step()
    return warned("rank 1 has frozen 2 parameters that others train (", "and rank 0 0.")


@pytest.mark.parametrize("stage", by_day((0, 1, 3), 0, 3))
def test_parameters_that_one_rank_has_frozen_are_told(stage: int) -> None:
    """Its data had no part in their gradients, without a word."""
    assert run_ranks(2, freeze_head, stage, False) == [1, 1]
    assert run_ranks(2, freeze_head, stage, True) == [0, 0]


class FailsInTrial(torch.optim.SGD):
    """An optimizer of a script that fails on rank 1 where initialize() tries what it needs."""

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("planted")
        return super().step(closure)


def begin_with_one_that_fails() -> tuple[str, str]:
    model = plain_model()
    return attempt(
        lambda: zerorun.initialize(model, without_optimizer(), optimizer=FailsInTrial(model.parameters(), lr=0.1))
    )


def without_optimizer() -> dict[str, Any]:
    config = make_config(1)
    del config["optimizer"]
    return config


def test_an_optimizer_that_fails_on_one_rank_is_told_before_anything_is_divided() -> None:
    """The parts were others on each rank, and the first collective failed for their sizes."""
    for kind, text in run_ranks(2, begin_with_one_that_fails):
        assert kind == "ModelError" and "'trial of FailsInTrial: it updates whole parameters'" in text, text


def write_to_head(stage: int, way: str) -> int:
    """How many warn of a write to a parameter that is always whole here."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model.head = nn.Linear(8, 4)
    engine = zerorun.initialize(model, make_config(stage))
    rank, head = dist.get_rank(), model.head.weight
    for number in range(2):
        if number == 1 and way == "block":
            with GatheredParameters(head, modifier_rank=1), torch.no_grad():
                if rank == 1:
                    head.fill_(1.0)
        elif number == 1 and (way == "all" or rank == 1):
            with torch.no_grad():
                head[0].fill_(1.0)
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    return warned("rank 1 has written in place to parameters 1 times", "rank 0 0 times ('head.weight')")


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize(("way", "warns"), (("alone", 1), ("all", 0), ("block", 0)))
def test_a_write_on_one_rank_is_told(stage: int, way: str, warns: int) -> None:
    """The other ranks had other weights from there on, or a part of them, without a word."""
    assert run_ranks(2, write_to_head, stage, way) == [warns] * 2


def treat_a_rank_of_a_stage(way: str) -> tuple[tuple[str, str], bool, list[str]]:
    """What is said, whether weights stay, and the warnings, where rank 3 alone, of the second stage, does something."""
    torch.manual_seed(0)
    model = zerorun.PipelineModule([nn.Linear(8, 8) for _ in range(4)], num_stages=2, loss_fn=nn.functional.mse_loss)
    engine = zerorun.initialize(model, make_config(1, optimizer="SGD", pipeline={"stages": 2}))
    engine.train_batch(batch(0))
    before, last = weights(engine), list(engine.module.parameters())[-1]
    for number in range(2):
        if dist.get_rank() == 3 and way == "rate" and number == 0:
            own_rate(engine, "lr", 0.5)
        elif dist.get_rank() == 3 and way == "write":
            with torch.no_grad():
                last.mul_(1.0)
        elif dist.get_rank() == 3 and way == "freeze":
            last.requires_grad_(False)
        elif way == "cross" and dist.get_rank() in (0, 3) and number == 0:
            own_rate(engine, "lr", 0.5)
        elif way == "by stage":
            own_rate(engine, "lr", 1.0 + engine.topology.pipe_rank)
        said = attempt(lambda number=number: engine.train_batch(batch(1 + number)))
    stayed = all(map(torch.equal, before, weights(engine)))
    return said, stayed, [text for text in log._warned if "Remedy" in text and text.startswith("rank ")]


@pytest.mark.parametrize(
    ("way", "error", "warning"),
    (
        ("rate", "the optimizer of rank 3 has [0.025] as 'lr' of its groups, and that of rank 2 [0.05]", ""),
        ("cross", "the optimizer of rank 1 has [0.05] as 'lr' of its groups, and that of rank 0 [0.025]", ""),
        ("write", "", "rank 3 has written in place to parameters 1 times since the last step, and rank 2 0 times ("),
        ("freeze", "", "rank 3 has frozen 1 parameters that others train ('"),
        ("by stage", "", ""),
    ),
)
def test_what_one_rank_of_a_pipeline_stage_does_alone_is_told(way: str, error: str, warning: str) -> None:
    """Only stages were told apart there, so replicas of one went on with other weights, without a word."""
    for (kind, text), stayed, warnings in run_ranks(4, treat_a_rank_of_a_stage, way):
        assert kind == ("StepError" if error else "nothing") and error in text and stayed == bool(error), text
        assert len(warnings) == bool(warning) and all(words.startswith(warning) for words in warnings), warnings


def apart_in_a_pipeline(way: str) -> tuple[str, str]:
    engine, rank = pipeline(), dist.get_rank()
    engine.train_batch(batch(0))
    if way == "evaluates" and rank == 1:
        return attempt(lambda: engine.eval_batch(batch(1)))
    micro_batches = list(batch(1))[: 0 if way == "ended" and rank == 1 else 9]
    if way == "over":
        micro_batches = []
    try:
        return attempt(lambda: engine.train_batch(iter(micro_batches)))
    except StopIteration as error:
        return "StopIteration", str(error)


@pytest.mark.parametrize(
    ("way", "kind", "words"),
    [
        ("evaluates", "PipelineError", "train_batch() was called on rank 0, and eval_batch() on rank 1, at step 2"),
        ("ended", "StopIteration", "the data of rank 1 has ended, and that of other ranks has not"),
        ("over", "StopIteration", "the data has ended. Remedy"),
    ],
)
def test_stages_that_do_not_do_the_same_are_named(way: str, kind: str, words: str) -> None:
    for found, text in run_ranks(2, apart_in_a_pipeline, way):
        assert found == kind and words in text, text


def other_optimizers(kind: str) -> tuple[str, str]:
    model, rank = plain_model(), dist.get_rank()
    classes = (torch.optim.AdamW, torch.optim.Adam) if kind == "class" else (torch.optim.AdamW,) * 2
    optimizer = classes[rank](model.parameters(), lr=0.01, weight_decay=0.1 * (1 + rank * (kind == "setting")))
    config = make_config(0)
    del config["optimizer"]
    return attempt(lambda: zerorun.initialize(model, config, optimizer=optimizer))


@pytest.mark.parametrize(("kind", "words"), [("class", "group 0 of Adam:"), ("setting", "'weight_decay': 0.2")])
def test_optimizers_of_ranks_are_alike(kind: str, words: str) -> None:
    for name, text in run_ranks(2, other_optimizers, kind):
        assert name == "ModelError" and words in text, text


def set_alone(stage: int) -> tuple[list[tuple[str, str]], bool]:
    """What is said of a value that rank 0 alone has, and whether nothing changes."""
    engine = zerorun.initialize(plain_model(), make_config(stage))
    engine.backward(engine(data()).square().mean())
    engine.step()
    param = next(iter(engine.module.parameters()))
    value = torch.ones(param.shape) if dist.get_rank() == 0 else None
    before = safe_get_full_fp32_param(param)
    said = [attempt(lambda: safe_set_full_fp32_param(param, value))]  # type: ignore[arg-type]
    said.append(attempt(lambda: safe_set_full_optimizer_state(param, value, "exp_avg")))  # type: ignore[arg-type]
    engine.backward(engine(data()).square().mean())
    said.append(attempt(lambda: safe_set_full_grad(param, value)))  # type: ignore[arg-type]
    local = torch.ones_like(safe_get_local_fp32_param(param)) if dist.get_rank() == 0 else None
    said.append(attempt(lambda: safe_set_local_fp32_param(param, local)))  # type: ignore[arg-type]
    said.append(attempt(lambda: safe_set_local_grad(param, local)))  # type: ignore[arg-type]
    after = safe_get_full_fp32_param(param)
    assert before is not None and after is not None
    return said, torch.equal(before, after)


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_a_value_that_one_rank_lacks_is_set_on_none(stage: int) -> None:
    for said, stayed in run_ranks(2, set_alone, stage):
        assert stayed and all(kind == "ModelError" and "NoneType" in text for kind, text in said), said


def updated_alone(stage: int) -> tuple[tuple[str, str], bool]:
    """What is said of an update of gradients that fails on rank 1, and whether a step follows its remedy."""
    engine = zerorun.initialize(plain_model(), make_config(stage))
    engine.backward(engine(data()).square().mean())

    def halved(gradient: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("planted")
        return gradient / 2

    said = attempt(lambda: safe_update_full_grad_vectorized(engine.module.parameters(), halved))
    engine.zero_grad()
    engine.backward(engine(data()).square().mean())
    engine.step()
    return said, engine.global_steps == 1


@pytest.mark.parametrize("stage", (0, 3))
def test_an_update_of_gradients_that_fails_on_one_rank_fails_on_all(stage: int) -> None:
    for (kind, text), goes_on in run_ranks(2, updated_alone, stage):
        assert kind == "StepError" and "update_func failed for" in text and "ValueError: planted" in text and goes_on, text
