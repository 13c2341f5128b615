"""A device decides by itself whether a step is applied, and the program learns of it later: nothing else may differ.

Every run is made on the simulated device, where the program looks at the outcome of a step one step later, and on the CPU,
where it decides at once. Weights, optimizer states, schedules, counts and errors have to be the same in the end.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_parallel_matrix as parallel
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import Case, Gpt, Place
from races import looking_for_races
from simulation import simulated_device
from test_bad_input import attempt
from training import make_config, make_engine, merged

import zerorun
from zerorun.distributed.device import Reading
from zerorun.engine.engine import COMPARED_STEPS
from zerorun.errors import StepError

CASE = Case("plain", lambda: Gpt(2))
SKIPPED = (True, False, True, True, False, True, False, False)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},  # whose first step is another one
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "Adagrad": {"lr": 0.02, "lr_decay": 0.1, "initial_accumulator_value": 0.5},
    "AdamSAGE": {"lr": 3e-3, "eps": 1e-2, "weight_decay": 0.1},
    "Sophia": {"lr": 1e-3, "bs": 64},
    "Muon": {"lr": 0.02, "weight_decay": 0.1},
    "AdamW8bit": {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1, "min_8bit_size": 0, "fp32_embeddings": False},
}
SCHEDULES: dict[str, Any] = {
    "WarmupDecayLR": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}},
    "OneCycle": {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "cycle_momentum": True},
    },
    "none": None,
}


def configuration(
    stage: int, precision: str, optimizer: str = "AdamW", schedule: str = "none", **more: Any
) -> dict[str, Any]:
    """The limit is never reached: the norm of a device is rounded in another way."""
    config = make_config(stage, clip=1e6, precision=precision, **more)
    config["optimizer"] = {"type": optimizer, "params": OPTIMIZERS[optimizer]}
    if SCHEDULES[schedule] is not None:
        config["scheduler"] = SCHEDULES[schedule]
    if precision == "fp16":
        config["fp16"] |= {"hysteresis": 1, "loss_scale_window": 2}
    return config


def last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def step(engine: zerorun.Engine, number: int, bad: bool = False, weight: torch.Tensor | None = None) -> None:
    """``bad``: a finite loss with an infinite gradient, on the last rank."""
    loss = CASE.loss(engine, Place(dist.get_rank(), number))
    if bad and last_rank():
        loss = loss + (engine.module.norm.bias.float() * 0.0).sqrt().sum()
    engine.backward(loss, weight=weight)
    engine.step()


def look(engine: zerorun.Engine) -> dict[str, Any]:
    """What a loop can find out."""
    assert engine.optimizer is not None
    states, whole = engine.optimizer.state, dist.get_world_size() == 1  # shards are cut at other places on the CPU
    return {
        "norm": engine.get_global_grad_norm(),
        "applied": engine.was_step_applied(),
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "overflow": engine.optimizer.overflow,
        "scale": engine.loss_scale,
        "rates": engine.get_lr(),
        "momenta": engine.get_mom(),
        "states": [{k: v.clone() for k, v in state.items() if whole or v.dim() == 0} for state in states.values()],
    }


def run(config: dict[str, Any], planted: tuple[bool, ...], each: bool) -> list[Any]:
    """``each``: look after each step, and not only in the end."""
    engine = make_engine(CASE, config)
    found: list[Any] = []
    for number, bad in enumerate(planted):
        step(engine, number, bad)
        if each:
            found.append(look(engine))
    found += [look(engine), engine.state_dict()]
    engine.destroy()
    return found


def run_both(config: dict[str, Any], planted: tuple[bool, ...], each: bool) -> tuple[list[Any], list[Any]]:
    with simulated_device():
        deferred = run(config, planted, each)
    return deferred, run(config, planted, each)


def same(one: Any, other: Any) -> bool:
    """The same bits, but for norms."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ("bf16", "fp16"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("each", (False, True))
@pytest.mark.parametrize("world", (1, 2))
def test_skipped_steps_leave_no_trace(
    precision: str, stage: int, optimizer: str, schedule: str, each: bool, world: int
) -> None:
    config = configuration(stage, precision, optimizer, schedule)
    for deferred, at_once in run_ranks(world, run_both, config, SKIPPED, each):
        assert len(deferred) == len(at_once) == (len(SKIPPED) if each else 0) + 2
        for number, (one, other) in enumerate(zip(deferred, at_once, strict=True)):
            different = [key for key in other if not same(one[key], other[key])]
            assert not different, f"after step {number}: {different}: {[(one[k], other[k]) for k in different][:2]}"


# -- errors ------------------------------------------------------------------------------------------------------------


def bad_gradient(engine: zerorun.Engine, number: int) -> None:
    step(engine, number, bad=True)


def bad_loss(engine: zerorun.Engine, number: int) -> None:
    loss = CASE.loss(engine, Place(dist.get_rank(), number))
    engine.backward(loss * float("nan") if last_rank() else loss)
    engine.step()


def no_weight(engine: zerorun.Engine, number: int) -> None:
    step(engine, number, weight=torch.zeros(()))


def negative_weight(engine: zerorun.Engine, number: int) -> None:
    step(engine, number, weight=torch.tensor(-3.0 if last_rank() else 1.0))


def mean_of_nothing(engine: zerorun.Engine, number: int) -> None:
    loss, count = CASE.loss(engine, Place(dist.get_rank(), number)), torch.tensor(0.0 if last_rank() else 1.0)
    engine.backward(loss * count / count, weight=count)
    engine.step()


Planted = Callable[[zerorun.Engine, int], None]
ERRORS: dict[Planted, tuple[str, str]] = {
    bad_gradient: ("NonFiniteError", "gradients are NaN or infinite at step 3 in 'norm.bias'."),
    bad_loss: ("NonFiniteError", "the loss is NaN or infinite at step 3, first on rank 1 in micro-batch 0 of this step."),
    no_weight: ("StepError", "the weights of all losses of this step are zero on all ranks"),
    negative_weight: ("StepError", "must be finite and not negative, got -3.0. It is that of micro-batch 0 on rank 1."),
    mean_of_nothing: ("NonFiniteError", "Rank 1 gave micro-batch 0 a weight of 0 and a loss that is not finite"),
}


def fail(stage: int, planted: Planted, ask: str) -> dict[str, Any]:
    """Two good steps, one that fails, and what follows. ``ask``: which rank looks at the norm before it does."""
    weighted = planted in (no_weight, negative_weight, mean_of_nothing)
    weight = torch.ones(()) if weighted else None
    with simulated_device():
        engine = make_engine(CASE, configuration(stage, "fp32", schedule="WarmupDecayLR"))
        for number in range(2):
            step(engine, number, weight=weight)
        before, rates = engine.state_dict(), engine.get_lr()
        planted(engine, 2)  # says nothing yet
        if ask in ("all ranks", f"rank {dist.get_rank()}"):
            engine.get_global_grad_norm()
        found: dict[str, Any] = {"counted": engine.global_steps}
        found["error"] = attempt(lambda: step(engine, 3, weight=weight))
        after = engine.state_dict()
        found["unchanged"] = same(before, after) and rates == engine.get_lr()
        found["counts"] = engine.global_steps, engine.skipped_steps
        for number in (4, 5):
            step(engine, number, weight=weight)
        found["weights"] = engine.state_dict()
        engine.destroy()
        engine = make_engine(CASE, configuration(stage, "fp32", schedule="WarmupDecayLR"))
        for number in (0, 1, 4, 5):
            step(engine, number, weight=weight)
        found["wanted"] = engine.state_dict()
        engine.destroy()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("planted", ERRORS, ids=lambda planted: planted.__name__)
@pytest.mark.parametrize("stage", (0, 2, 3))
@pytest.mark.parametrize("ask", ("nobody", "rank 0", "rank 1", "all ranks"))
def test_an_error_comes_one_step_later_on_all_ranks(planted: Planted, stage: int, ask: str) -> None:
    """And neither the step that failed nor the one that ends with the error has changed anything."""
    kind, text = ERRORS[planted]
    for found in run_ranks(2, fail, stage, planted, ask):
        assert found["counted"] == 3  # the same on all ranks, whichever knows already
        assert found["error"][0] == kind and text in found["error"][1]
        assert found["unchanged"]
        assert found["counts"] == ((3, 1) if planted in (bad_gradient, mean_of_nothing) else (2, 0))
        assert same(found["weights"], found["wanted"])


def scale_after(planted: Planted) -> tuple[float, tuple[str, str], float]:
    """(loss scale before, the error of the planted step, loss scale after that)"""
    weight = torch.ones(())
    with simulated_device():
        engine = make_engine(CASE, configuration(1, "fp16"))
        step(engine, 0, weight=weight)
        before = engine.loss_scale
        planted(engine, 1)
        error = attempt(lambda: step(engine, 2, weight=weight))
        after = engine.loss_scale
        engine.destroy()
    return before, error, after


@pytest.mark.parametrize("planted", (no_weight, negative_weight), ids=lambda planted: planted.__name__)
def test_a_loss_of_no_use_is_no_overflow(planted: Planted) -> None:
    """Whether or not the host has known before the update, in fp16 the loss scale stays what it was."""
    for before, error, after in run_ranks(2, scale_after, planted):
        assert error[0] == ERRORS[planted][0]
        assert before == after


def until_the_end(config: dict[str, Any]) -> tuple[int, tuple[str, str]]:
    """(how many steps came before the error, the error), where no step has finite gradients."""
    done = 0
    with simulated_device():
        engine = make_engine(CASE, config)

        def loop() -> None:
            nonlocal done
            for number in range(9):
                step(engine, number, bad=True)
                done += 1

        answer = attempt(loop)
        engine.destroy()
    return done, answer


def test_bf16_names_the_rank_of_the_third_skipped_step() -> None:
    for done, (kind, text) in run_ranks(2, until_the_end, configuration(3, "bf16")):
        assert (done, kind) == (3, "NonFiniteError")
        assert "in 'norm.bias', first in parameter 'norm.bias' on rank 1 in micro-batch 0 of this step." in text


def test_fp16_ends_at_the_smallest_scale() -> None:
    """2 -> 1 in the first step; the second has no answer, of which the third tells."""
    config = configuration(1, "fp16")
    config["fp16"] |= {"initial_scale_power": 1, "min_loss_scale": 1}
    for done, (kind, text) in run_ranks(2, until_the_end, config):
        assert (done, kind) == (2, "LossScaleError")
        assert "first in parameter 'norm.bias' on rank 1" in text


def save_what_failed(folder: Path) -> tuple[tuple[str, str], int, bool]:
    with simulated_device():
        engine = make_engine(CASE, configuration(1, "fp32"))
        step(engine, 0)
        engine.save_checkpoint(folder)
        step(engine, 1, bad=True)
        answer = attempt(lambda: engine.save_checkpoint(folder))
        step(engine, 2, bad=True)
        engine.load_checkpoint(folder)  # nobody needs to know any more
        step(engine, 3)
        found = engine.global_steps, engine.was_step_applied()
        step(engine, 4, bad=True)
        last = attempt(engine.destroy)
    assert last[0] == "NonFiniteError"
    return answer, *found


def test_no_checkpoint_of_a_step_that_failed(tmp_path: Path) -> None:
    for (kind, text), steps, applied in run_ranks(2, save_what_failed, tmp_path):
        assert (kind, steps, applied) == ("NonFiniteError", 2, True)
        assert "at step 2 in 'norm.bias'" in text


# -- between a step and its outcome ------------------------------------------------------------------------------------


def rates_are_those_of_steps_applied() -> bool:
    """Whoever asks for rates learns of the step that was skipped."""
    engine = make_engine(CASE, configuration(1, "bf16", schedule="WarmupDecayLR"))
    assert engine.optimizer is not None
    step(engine, 0)
    step(engine, 1)
    rates = engine.get_lr()
    step(engine, 2, bad=True)
    found = engine.get_lr()
    step(engine, 3, bad=True)
    packed = engine.optimizer.state_dict()
    kept = packed["param_groups"][0]["lr"], {int(state["step"]) for state in packed["state"].values()}
    engine.destroy()
    return found == rates and kept == (rates[0], {2})


def weights_are_read_at_once() -> bool:
    """The script may use a tensor again."""
    norms = []
    for again in (True, False):
        engine = make_engine(CASE, configuration(1, "fp32", gradient_accumulation_steps=2))
        buffer = torch.zeros((), dtype=torch.float64)
        for micro, weight in enumerate((1.0, 5.0)):
            buffer.fill_(weight)
            loss = CASE.loss(engine, Place(dist.get_rank(), 0, micro))
            engine.backward(loss, weight=buffer if again else buffer.clone())
            engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.destroy()
    return norms[0] == norms[1]


def an_engine_ends_with_its_optimizer_kept() -> bool:
    engine = make_engine(CASE, configuration(1, "bf16"))
    step(engine, 0)
    optimizer, seen = engine.optimizer, weakref.ref(engine)
    engine.destroy()
    del engine
    gc.collect()
    return optimizer is not None and seen() is None


def an_interrupted_wait_is_waited_again() -> bool:
    engine = make_engine(CASE, configuration(1, "bf16"))
    step(engine, 0)
    step(engine, 1, bad=True)
    real, calls = Reading.wait, []

    def wait(self: Reading) -> list[float]:
        calls.append(0)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reading, "wait", wait)
        with pytest.raises(KeyboardInterrupt):
            engine.get_global_grad_norm()
        found = engine.skipped_steps, engine.was_step_applied()
    engine.destroy()
    return found == (1, False)


def a_save_in_between_drops_nothing() -> bool:
    """It is refused for the step that has begun, before the error of the one before is told."""
    engine = make_engine(CASE, configuration(1, "fp32", gradient_accumulation_steps=2))
    for micro in (0, 1):
        loss = CASE.loss(engine, Place(dist.get_rank(), 0, micro))
        engine.backward(loss * float("nan"))
        engine.step()
    engine.backward(CASE.loss(engine, Place(dist.get_rank(), 1, 0)))
    engine.step()
    kind, text = attempt(lambda: engine.save_checkpoint("nowhere"))
    engine.zero_grad()
    last = attempt(engine.destroy)
    return kind == "StepError" and "in the middle of a step" in text and last[0] == "NonFiniteError"


def other_weights_are_refused() -> bool:
    engine = make_engine(CASE, configuration(1, "fp32"))
    found = []
    for weight in (torch.tensor(1.0 + 2.0j), torch.ones(2)):
        found.append(attempt(partial(step, engine, 0, weight=weight)))
    engine.zero_grad()
    engine.destroy()
    return all(kind == "StepError" and "must be a number" in text for kind, text in found)


def an_export_is_told() -> bool:
    engine = make_engine(CASE, configuration(1, "fp32"))
    step(engine, 0, bad=True)
    kind, _ = attempt(lambda: engine.export("nowhere"))
    engine.destroy()
    return kind == "NonFiniteError"


BETWEEN = (
    rates_are_those_of_steps_applied,
    weights_are_read_at_once,
    an_engine_ends_with_its_optimizer_kept,
    an_interrupted_wait_is_waited_again,
    a_save_in_between_drops_nothing,
    other_weights_are_refused,
    an_export_is_told,
)


def on_simulated(what: Callable[[], bool]) -> bool:
    with simulated_device():
        return what()


@pytest.mark.parametrize("what", BETWEEN, ids=lambda what: what.__name__)
def test_between_a_step_and_its_outcome(what: Callable[[], bool]) -> None:
    assert run_ranks(2, on_simulated, what) == [True] * 2


def schedule_ends() -> list[Any]:
    """A schedule that raises after an update that was made: its third step, on the simulated device and on the CPU."""
    found = []
    for place in (simulated_device(), nullcontext()):
        with place:
            config = configuration(1, "fp32")
            config["scheduler"] = {"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": 2}}
            engine = make_engine(CASE, config)
            step(engine, 0)
            step(engine, 1)
            with pytest.raises(StepError, match="Tried to step 3 times"):
                step(engine, 2)
            found.append((engine.was_step_applied(), engine.global_steps, engine.get_global_grad_norm()))
            engine.destroy()
    return found


def test_an_error_of_a_schedule_loses_no_outcome() -> None:
    for there, here in run_ranks(2, schedule_ends):
        assert here[:2] == (True, 3) and same(there, here)


# -- who decides -------------------------------------------------------------------------------------------------------


class Stubborn:
    """A schedule that cannot go back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1


def decided_at_once(why: str) -> tuple[tuple[str, str], tuple[str, str], int]:
    """What steps that fail say themselves, and how often a schedule has advanced."""
    options: dict[str, Any] = {"lr_scheduler": Stubborn} if why == "a schedule" else {}
    more = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if why == "offload" else {}
    config = configuration(1, "fp32", **more)
    if why == "another optimizer":
        config["optimizer"] = {"type": "RMSprop", "params": {"lr": 1e-3}}
    with simulated_device():
        engine = make_engine(CASE, config, **options)
        if why == "a hook on one rank" and last_rank():
            assert engine.optimizer is not None
            engine.optimizer.register_step_post_hook(lambda *_: None)
        step(engine, 0)
        answer = attempt(lambda: step(engine, 1, bad=True))
        loss = attempt(lambda: bad_loss(engine, 2))
        steps = getattr(engine.lr_scheduler, "steps", 1)
        engine.destroy()
    return answer, loss, steps


@pytest.mark.parametrize("why", ("offload", "another optimizer", "a hook on one rank", "a schedule"))
def test_the_program_decides_where_the_device_cannot(why: str) -> None:
    for (kind, text), (_, of_loss), steps in run_ranks(2, decided_at_once, why):
        assert (kind, steps) == ("NonFiniteError", 1)
        assert "at step 2 in 'norm.bias'." in text
        assert "the loss is NaN or infinite at step 3, first on rank 1 in micro-batch 0" in of_loss


# -- what it is for ----------------------------------------------------------------------------------------------------


def waits(config: dict[str, Any], weighted: bool) -> list[int]:
    """How often the program waits for the device in each of the last steps, for what that was given in this step."""
    found = []
    with simulated_device(), looking_for_races() as races:
        engine = make_engine(CASE, config)
        for number in range(6):
            races.begin_step()
            for _ in range(engine.gradient_accumulation_steps()):
                step(engine, number, weight=torch.tensor([2, 3][dist.get_rank() % 2]) if weighted else None)
            found.append(races.host_waits.total())
        engine.destroy()
        assert not races.found
    return found[3:]


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
@pytest.mark.parametrize("accumulation", (1, 2))
@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("shards", (1, 2))
def test_a_step_waits_for_nothing_of_its_own(
    stage: int, precision: str, accumulation: int, weighted: bool, shards: int
) -> None:
    zero = {"shard_degree": shards} if stage else {}
    config = configuration(stage, precision, zero_optimization=zero, gradient_accumulation_steps=accumulation)
    assert run_ranks(2, waits, config, weighted) == [[0, 0, 0]] * 2


def waits_divided(tensor: int, pipe: int, schedule: str) -> list[int]:
    """``waits`` where ranks have parts of the model, after the steps in which they compare data and losses."""
    config = configuration(1, "fp32", gradient_accumulation_steps=2, pipeline={"schedule": schedule})
    degrees = {"tensor_parallel": {"size": tensor}, "pipeline": {"stages": pipe}}
    found = []
    with simulated_device(), looking_for_races() as races:
        engine: Any = zerorun.initialize(parallel.build("llama"), merged(config, degrees))
        batch = list(parallel.data_of(engine.topology.data_parallel_rank, 2))[:2]
        for _ in range(COMPARED_STEPS + 2):
            races.begin_step()
            if pipe > 1:
                engine.train_batch(iter(batch))
            for inputs in batch if pipe == 1 else ():
                engine.backward(engine(**inputs).loss)
                engine.step()
            found.append(races.host_waits.total())
        engine.destroy()
        assert not races.found
    return found[COMPARED_STEPS:]


@pytest.mark.parametrize(
    ("tensor", "pipe", "schedule"),
    by_day(((2, 1, "1f1b"), (1, 2, "1f1b"), (1, 2, "zero_bubble")), (1, 2, "zero_bubble")),
)
def test_parts_of_a_model_wait_for_nothing_either(tensor: int, pipe: int, schedule: str) -> None:
    assert run_ranks(2, waits_divided, tensor, pipe, schedule) == [[0, 0]] * 2


def weigh(config: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    found = []
    for place in (simulated_device(), nullcontext()):
        with place:
            engine = make_engine(CASE, config)
            for number in range(3):
                step(engine, number, weight=torch.tensor(1 + number + dist.get_rank()))
            found.append([engine.get_global_grad_norm(), engine.state_dict()])
            engine.destroy()
    return found[0], found[1]


@pytest.mark.parametrize("precision", ("fp32", "bf16", "fp16"))
def test_weights_on_the_device_count_as_others_do(precision: str) -> None:
    for there, here in run_ranks(2, weigh, configuration(2, precision)):
        assert same(there, here)
