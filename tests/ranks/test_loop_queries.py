"""What loops written for DeepSpeed ask an engine, by DeepSpeed's names."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, Place
from reference import Result, differences, make_optimizer, weights_of
from torch import nn
from training import make_config, make_engine, placed

import zerorun
from zerorun import log
from zerorun.config.parse import EffectiveValue
from zerorun.deepspeed.engine_names import load_checkpoint, save_checkpoint
from zerorun.errors import ConfigError, StepError

SETTINGS = (
    *("zero_optimization", "zero_optimization_stage", "zero_optimization_partition_gradients"),
    *("zero_optimization_partition_weights", "fp16_enabled", "bfloat16_enabled", "gradient_clipping"),
    *("autotp_size", "steps_per_print", "wall_clock_breakdown", "get_lr", "get_mom"),
)


def ask(stage: int, precision: str, optimizer: str, changes: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """(the answers, what they should be of each parameter group)."""
    config = make_config(stage, accumulation=3, clip=0.5, precision=precision, optimizer=optimizer, **changes)
    engine = make_engine(CASES["plain"], config)
    ranks = engine.global_rank, engine.local_rank, engine.world_size, engine.dp_world_size, str(engine.device)
    batch = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    assert ranks == (dist.get_rank(), dist.get_rank(), 2, 2, "cpu")
    assert batch == (12, 2, 3)
    answers = {name: getattr(engine, name)() for name in SETTINGS}
    assert engine.effective_config()["zero_optimization.stage"] == EffectiveValue(stage, "file", None)
    assert engine.effective_config()["train_batch_size"].value == 12
    groups = [(group["lr"], group.get("betas", group.get("momentum"))) for group in engine.optimizer.param_groups]
    engine.destroy()
    return answers, groups


@pytest.mark.parametrize("stage", range(4))
def test_ranks_sizes_and_settings(stage: int) -> None:
    precision, optimizer = ("fp32", "fp16", "bf16", "fp32")[stage], ("AdamW", "SGD")[stage % 2]
    changes = {"steps_per_print": 7} if stage else {}
    for answers, groups in run_ranks(2, ask, stage, precision, optimizer, changes):
        assert answers == {
            "zero_optimization": stage > 0,
            "zero_optimization_stage": stage,
            "zero_optimization_partition_gradients": stage > 1,
            "zero_optimization_partition_weights": stage > 2,
            "fp16_enabled": precision == "fp16",
            "bfloat16_enabled": precision == "bf16",
            "gradient_clipping": 0.5,
            "autotp_size": 0,
            "steps_per_print": 7 if stage else math.inf,
            "wall_clock_breakdown": False,
            "get_lr": [lr for lr, _ in groups],
            "get_mom": [momentum for _, momentum in groups],
        }


# -- batches that grow -------------------------------------------------------------------------------------------

RAMP = ((1, 0), (1, 1), (3, 2), (2, 3))  # (micro-batches, step)


def plain_ramp() -> Result:
    case, result = CASES["plain"], Result()
    module = case.build()
    stepper = make_optimizer(module, "AdamW", None)
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 2, 0.5)
    for count, step in RAMP:
        for micro in range(count):
            for rank in range(2):
                (case.loss(module, Place(rank, step, micro)) / (2 * count)).backward()
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf"))))
        stepper.step()
        stepper.zero_grad()
        schedule.step(7)  # the epoch: 7 // 2 halves
    result.weights = weights_of(module)
    return result


def sizes_in_force(engine: zerorun.Engine) -> tuple[int, ...]:
    """As ``get_batch_info``, by ``effective_config``."""
    found, names = engine.effective_config(), ("train_batch_size", "train_micro_batch_size_per_gpu")
    return tuple(found[name].value for name in (*names, "gradient_accumulation_steps"))


def ramp(stage: int, folder: str) -> tuple[Result, list[int]]:
    engine = make_engine(
        CASES["plain"], make_config(stage), lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)
    )
    result, samples = Result(), []
    for count, step in RAMP:
        engine.set_train_batch_size(4 * count)
        assert engine.get_batch_info() == sizes_in_force(engine) == (4 * count, 2, count)
        for micro in range(count):
            engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), step, micro)))
            if micro == 1:
                engine.allreduce_gradients()  # does no harm at any time
            if count > 1:
                with pytest.raises(StepError, match="backwards of a step"):
                    engine.set_train_micro_batch_size(1)
            engine.step(lr_kwargs={"epoch": 7})
        norm = engine.get_global_grad_norm()
        assert norm is not None
        result.norms.append(norm)
        samples.append(engine.global_samples)
    with pytest.raises(ConfigError, match="does not hold"):
        engine.set_train_batch_size(6)
    engine.save_checkpoint(folder)
    engine.set_train_micro_batch_size(1)
    assert engine.get_batch_info() == sizes_in_force(engine) == (4, 1, 2)
    log._warned.clear()
    engine.load_checkpoint(folder)
    told = [text for text in log._warned if "4 samples from here on (train_batch_size), and had 8 in the run" in text]
    assert len(told) == 1, log._warned
    samples.append(engine.global_samples)
    result.weights = engine.state_dict()
    loader = engine.deepspeed_io([*range(8)], batch_size=2, num_local_io_workers=0)
    engine.set_dataloader(loader)
    assert engine.training_dataloader is engine.dataloader is loader and len(loader) == 2
    assert not engine.is_compiled
    engine.destroy()
    return result, samples


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "stage", [0, 2, pytest.param(1, marks=pytest.mark.nightly), pytest.param(3, marks=pytest.mark.nightly)]
)
def test_batches_may_grow_between_steps(stage: int, tmp_path: Any) -> None:
    for found, samples in run_ranks(2, ramp, stage, str(tmp_path)):
        assert not differences(found, plain_ramp())
        assert samples == [4, 8, 20, 28, 28]


def unmanaged() -> list[int]:
    engine = make_engine(CASES["plain"], make_config(2, accumulation=4, managed_gradient_accumulation=False))
    assert not engine.managed_gradient_accumulation() and engine.get_batch_info() == (16, 2, 4)
    samples = []
    for step, count in enumerate((2, 5, 1)):
        for micro in range(count):
            loss = CASES["plain"].loss(engine, Place(dist.get_rank(), step, micro))
            engine.backward(loss / count, scale_wrt_gas=False)
        engine.step()
        samples.append(engine.global_samples)
    engine.destroy()
    return samples


def test_samples_of_steps_that_the_loop_accumulates() -> None:
    """They are those of the backwards that there were, and not of the file's batch."""
    assert run_ranks(2, unmanaged) == [[8, 28, 32]] * 2


# -- zero_grad ---------------------------------------------------------------------------------------------------


def plain_step(steps: Sequence[int], accumulation: int) -> Result:
    """Updates of one process, from all micro-batches of these steps."""
    case, result = CASES["plain"], Result()
    module = case.build()
    stepper = make_optimizer(module, "SGD", None)
    for step in steps:
        for micro in range(accumulation):
            for rank in range(2):
                (case.loss(module, Place(rank, step, micro)) / (2 * accumulation)).backward()
        result.norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf"))))
        stepper.step()
        stepper.zero_grad()
    result.weights = weights_of(module)
    return result


def refused_verify(engine: Any, folder: str) -> None:
    with pytest.raises(StepError, match="step that has begun"):
        engine.verify(None, lambda model, batch: None)


# What happens in the middle of a step; and whether the step goes on.
IN_THE_MIDDLE: dict[str, tuple[Callable[[Any, str], Any], bool]] = {
    "zero_grad": (lambda engine, folder: engine.zero_grad(counted=True), False),
    "load": (lambda engine, folder: engine.load_checkpoint(folder), False),
    "verify": (refused_verify, True),
}


def interrupted(what: str, stage: int, accumulation: int, folder: str) -> tuple[Result, list[bool], int]:
    """Three steps; ``what`` happens after the first micro-batch of the second. Also which step() calls update."""
    case, result, ends = CASES["plain"], Result(), list[bool]()
    engine = make_engine(case, make_config(stage, accumulation=accumulation, optimizer="SGD"))

    def micro_batches(step: int, first: int = 0, count: int = accumulation) -> None:
        for micro in range(first, count):
            engine.backward(case.loss(engine, Place(dist.get_rank(), step, micro)))
            ends.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            if ends[-1]:
                result.norms.append(engine.get_global_grad_norm() or 0.0)

    micro_batches(0)
    engine.save_checkpoint(folder)
    micro_batches(1, count=1)
    happens, goes_on = IN_THE_MIDDLE[what]
    happens(engine, folder)
    micro_batches(1, first=int(goes_on))
    micro_batches(2)
    result.weights = engine.state_dict()
    engine.destroy()
    return result, ends, engine.global_samples


@pytest.mark.each_value
@pytest.mark.parametrize("accumulation", (2, 3))
@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize("what", IN_THE_MIDDLE)
def test_a_step_whose_gradients_are_dropped_begins_anew(what: str, stage: int, accumulation: int, tmp_path: Any) -> None:
    step = [False] * (accumulation - 1) + [True]
    for found, ends, samples in run_ranks(2, interrupted, what, stage, accumulation, str(tmp_path)):
        assert not differences(found, plain_step((0, 1, 2), accumulation))
        assert ends == [*step, *([] if IN_THE_MIDDLE[what][1] else [False]), *step, *step]
        assert samples == 3 * 4 * accumulation


def saved_in_the_middle(
    place: str, precision: str, counts: bool, asynchronous: bool, folder: str
) -> list[tuple[list[float], dict[str, torch.Tensor], int, dict[str, int]]]:
    """(losses, weights, warnings so far, counters at the end) of three runs, of four steps of three micro-batches.

    They are without saves, with one behind each micro-batch of the third step, and from the second of these on, in another
    engine. ``counts``: the script says where steps end, as accelerate does.
    """
    log._warned.clear()
    case, found = CASES["plain"], []
    stage, zero = placed(place, Path(folder))
    config = make_config(stage, accumulation=3, precision=precision, zero_optimization=zero)

    def run(first: int, *, saves: bool, loads: bool) -> None:
        engine, losses = make_engine(case, config), list[float]()
        if loads:
            assert load_checkpoint(engine, folder, "second")[0] is not None
            kept = json.loads(Path(folder, "second", "zerorun.json").read_text())["content"]["counters"]
            assert engine.micro_steps == 3 * engine.global_steps == kept["micro_steps"] == 6
        for step in range(first, 4):
            for micro in range(3):
                if counts:
                    engine.set_gradient_accumulation_boundary(micro == 2)
                loss = case.loss(engine, Place(dist.get_rank(), step, micro))
                engine.backward(loss)
                losses.append(loss.item())
                if saves and step == 2 and micro != 1:
                    save_checkpoint(engine, folder, "other", asynchronous=asynchronous)  # before step() has counted it
                engine.step()
                if saves and step == 2 and micro == 1:
                    save_checkpoint(engine, folder, "second", {"epoch": 1}, asynchronous=asynchronous)
                    assert engine.micro_steps == 8
        engine.wait_for_checkpoint()
        warned = sum("begins this step anew" in text for text in log._warned)
        found.append((losses, engine.state_dict(exact=True), warned, engine.counters()))
        engine.destroy()

    run(0, saves=False, loads=False)
    run(0, saves=True, loads=False)
    run(2, saves=False, loads=True)
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("counts", (False, True))
@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize(
    "place",
    by_day(
        ("stage 0", "stage 1", "stage 2", "stage 2, offload", "stage 3", "stage 3, disk"),
        *("stage 1", "stage 2, offload", "stage 3"),
    ),
)
def test_a_save_in_the_middle_of_a_step_changes_nothing(
    place: str, precision: str, counts: bool, asynchronous: bool, tmp_path: Any
) -> None:
    """In the DeepSpeed mode, as Trainer saves at the end of an epoch. Who loads begins the step anew, and ends alike."""
    given = place, precision, counts, asynchronous, str(tmp_path)
    for without, saving, loading in run_ranks(2, saved_in_the_middle, *given):
        assert saving[0] == without[0] and loading[0] == without[0][6:]
        assert saving[3] == loading[3] == without[3] and (without[2], saving[2]) == (0, 1)
        for weights in (saving[1], loading[1]):
            assert all(torch.equal(value, weights[name]) for name, value in without[1].items())


def zero_module(stage: int) -> tuple[Result, list[int], list[bool]]:
    """(the result of a step, the warnings at three places, what holds of copies and of the module after destroy())."""
    log._warned.clear()
    case, result, warned = CASES["plain"], Result(), list[int]()
    engine = make_engine(case, make_config(stage, accumulation=2, optimizer="SGD"))
    module = engine.module

    def loss(step: int, micro: int) -> torch.Tensor:
        return case.loss(engine, Place(dist.get_rank(), step, micro))

    def zero(*given: bool) -> None:
        module.zero_grad(*given)
        warned.append(sum("zero_grad() after step() has no effect" in text for text in log._warned))

    engine.backward(loss(5, 0))
    module.zero_grad()
    engine.backward(loss(5, 1))
    found = loss(0, 0)
    zero(False)
    engine.backward(found)
    engine.step()
    zero()
    engine.backward(loss(0, 1))
    with zerorun.zero.GatheredParameters(list(module.parameters())):
        written = io.BytesIO()
        torch.save(module, written)
        copies = [copy.deepcopy(module), torch.load(io.BytesIO(written.getvalue()), weights_only=False)]
    ordinary = []
    for copied in copies:
        for param in copied.parameters():
            param.grad = torch.ones_like(param)
        copied.zero_grad()
        ordinary.append(all(param.grad is None for param in copied.parameters()))
    engine.step()
    zero(True)
    result.norms.append(engine.get_global_grad_norm() or 0.0)
    result.weights = engine.state_dict()
    engine.destroy()
    return result, warned, [*ordinary, "zero_grad" not in vars(module)]


@pytest.mark.parametrize("stage", by_day(range(4), 0, 3))
def test_the_module_drops_gradients_that_no_step_has_counted(stage: int) -> None:
    for found, warned, ordinary in run_ranks(2, zero_module, stage):
        assert not differences(found, plain_step((0,), 2))
        assert warned == [0, 1, 1]
        assert ordinary == [True] * 3


def zero_before_each(of_module: bool, stage: int) -> Result:
    """Two steps of a loop that calls zero_grad() before each micro-batch, as loops for DeepSpeed do."""
    case, result = CASES["plain"], Result()
    engine = make_engine(case, make_config(stage, accumulation=2, optimizer="SGD"))
    for micro in range(4):
        (engine.module if of_module else engine).zero_grad()
        engine.backward(case.loss(engine, Place(dist.get_rank(), *divmod(micro, 2))))
        engine.step()
        if micro % 2:
            result.norms.append(engine.get_global_grad_norm() or 0.0)
    result.weights = engine.state_dict()
    engine.destroy()
    return result


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize("of_module", (False, True))
def test_zero_grad_before_each_micro_batch_keeps_those_of_the_step(of_module: bool, stage: int) -> None:
    for found in run_ranks(2, zero_before_each, of_module, stage):
        assert not differences(found, plain_step((0, 1), 2))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise MemoryError


def zero_after_failure(of: str, stage: int) -> Result:
    """Steps of a loop that leaves out micro-batches whose backward fails in the middle, which it drops as it can."""
    case, result = CASES["plain"], Result()
    engine = make_engine(case, make_config(stage, accumulation=2, optimizer="SGD"))
    middle = [module for module in engine.module.modules() if isinstance(module, nn.Linear)][1]

    def fail() -> None:
        handle = middle.register_forward_hook(lambda module, given, output: Fails.apply(output))
        found = case.loss(engine, Place(dist.get_rank(), 5, 0))
        handle.remove()
        with pytest.raises(MemoryError):
            engine.backward(found)
        {"module": engine.module, "optimizer": engine.optimizer, "engine": engine}[of].zero_grad()

    for step in range(2):
        fail()
        for micro in range(2):
            engine.backward(case.loss(engine, Place(dist.get_rank(), step, micro)))
            engine.step()
        result.norms.append(engine.get_global_grad_norm() or 0.0)
    result.weights = engine.state_dict()
    engine.destroy()
    return result


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize("of", ("module", "optimizer", "engine"))
def test_gradients_of_a_backward_that_failed_are_dropped(of: str, stage: int) -> None:
    for found in run_ranks(2, zero_after_failure, of, stage):
        assert not differences(found, plain_step((0, 1), 2))


class MaySkip(nn.Module):
    """Gives its input back where it skips: then its weights have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        return x * 1 if skips else self.linear(x)


def counted_alike(folder: str) -> tuple[list[str], int, int]:
    """(what is refused after a micro-batch of which rank 1 has no gradients, samples by then, and after a like one)."""
    engine = zerorun.initialize(MaySkip(), make_config(2, accumulation=2))
    given, refused = torch.ones(2, 4, requires_grad=True), []

    def backward(*, skips: bool) -> None:
        engine(given, skips and dist.get_rank() == 1).sum().backward()

    backward(skips=True)
    engine.step()
    for call in (partial(engine.save_checkpoint, folder), partial(engine.set_train_batch_size, 8)):
        with pytest.raises(StepError) as told:
            call()
        refused.append(str(told.value)[:20])
    backward(skips=False)
    engine.step()
    first = engine.global_samples
    engine.set_gradient_accumulation_boundary(True)
    backward(skips=False)
    backward(skips=True)
    engine.step()
    second = engine.global_samples
    engine.destroy()
    return refused, first, second


def test_ranks_count_alike_where_one_has_no_gradients(tmp_path: Any) -> None:
    one, other = run_ranks(2, counted_alike, str(tmp_path))
    assert one == other
    assert one[1] > 0
    assert one[2] == 2 * one[1]


def leave_in_zero_grad(stage: int) -> tuple[list[int], bool]:
    """(warnings after zero_grad() behind an update and behind a backward, whether all gradients have counted)."""
    log._warned.clear()
    case, found = CASES["plain"], []
    weights = []
    for calls in (False, True):
        engine = make_engine(case, make_config(stage, accumulation=2, optimizer="SGD"))
        for micro in range(4):
            engine.backward(case.loss(engine, Place(dist.get_rank(), micro // 2, micro % 2)))
            engine.step()
            if calls and micro % 2:
                engine.optimizer.zero_grad()
                found.append(sum("optimizer.zero_grad() has no effect" in text for text in log._warned))
        if calls:
            engine.backward(case.loss(engine, Place(dist.get_rank(), 2, 0)))
            engine.optimizer.zero_grad(set_to_none=True)
            found.append(sum("gradients of 1 backward since" in text for text in log._warned))
            engine.zero_grad()
        weights.append({name: value.clone() for name, value in engine.state_dict().items()})
        engine.destroy()
    return found, all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("stage", (0, 3))
def test_the_optimizer_says_that_it_drops_no_gradients(stage: int) -> None:
    assert run_ranks(2, leave_in_zero_grad, stage) == [([0, 0, 1], True)] * 2


def ended_by_the_loop() -> list[int]:
    engine = make_engine(CASES["plain"], make_config(2, accumulation=4))
    samples = []
    for count in (4, 2, 4, 1):
        for micro in range(count):
            engine.set_gradient_accumulation_boundary(micro == count - 1)
            engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 0, micro)))
            if count == 4:
                engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 1, micro)) * 0)
            engine.step()
        samples.append(engine.global_samples)
    engine.destroy()
    return samples


def test_samples_of_steps_that_the_loop_ends() -> None:
    """A micro-batch counts for each backward, and never more of them than a step has: some loops call it twice for one."""
    assert run_ranks(2, ended_by_the_loop) == [[16, 24, 40, 44]] * 2


def steps_after_the_loop_stops_deciding() -> list[int]:
    engine = make_engine(CASES["plain"], make_config(1, accumulation=2))
    found = []
    for boundary in (True, None):
        engine.set_gradient_accumulation_boundary(boundary)
        for micro in range(4):
            engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 0, micro)))
            engine.step()
        found.append(engine.global_steps)
    engine.destroy()
    return found


def test_none_lets_the_engine_count_again() -> None:
    """As in DeepSpeed. It stood for False: no step was taken any more."""
    assert run_ranks(2, steps_after_the_loop_stops_deciding) == [[4, 6]] * 2
