"""The optimizer after initialize(): groups that a script adds are refused, and schedules that were made for it count."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from test_bad_input import attempt
from test_foreign_values import build, data, step
from torch import nn
from torch.optim import lr_scheduler
from training import make_config

import zerorun
from zerorun import log
from zerorun.errors import ModelError

REFUSED = "optimizer.add_param_group() was called after initialize()"


# -- groups ------------------------------------------------------------------------------------------------------


def add_a_group(kind: str, stage: int, offloaded: bool) -> tuple[tuple[str, str], bool]:
    """What is said to it, and whether training goes on as it would without it."""
    weights = []
    for adds in (True, False):
        model = build()
        zero = {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offloaded else {})
        config = make_config(stage, zero_optimization=zero, optimizer="SGD" if kind == "SGD" else "AdamW")
        given = torch.optim.RMSprop(model.parameters(), lr=0.01) if kind == "torch's" else None
        engine = zerorun.initialize(model, config, optimizer=given)
        assert engine.optimizer is not None
        optimizer, other = engine.optimizer, nn.Parameter(torch.ones(()))
        step(engine)
        if adds:
            answer = attempt(lambda: optimizer.add_param_group({"params": [other]}))  # noqa: B023
        step(engine)
        weights.append(engine.state_dict())
        assert other.item() == 1.0 and len(optimizer.param_groups) == 1
        engine.destroy()
    with_it, without = weights
    return answer, all(torch.equal(value, without[name]) for name, value in with_it.items())


@pytest.mark.parametrize(("kind", "stage", "offloaded"), (("AdamW", 1, False), ("SGD", 2, True), ("torch's", 0, False)))
def test_groups_that_are_added_later_are_refused(kind: str, stage: int, offloaded: bool) -> None:
    for (name, text), same in run_ranks(2, add_a_group, kind, stage, offloaded):
        assert name == "StepError" and text.startswith(REFUSED) and "Remedy" in text
        assert same


def change_the_lists(how: str, stage: int, device: str) -> tuple[tuple[str, str], bool]:
    """What the next step says to it, and whether training goes on with the lists as they were."""
    weights = []
    for changes in (True, False):
        model = build()
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.5}, {"params": others}]
        zero = {"stage": stage, "offload_optimizer": {"device": device}}
        config = make_config(stage, zero_optimization=zero, optimizer="AdamW")
        engine = zerorun.initialize(model, config, model_parameters=groups)
        assert engine.optimizer is not None
        held = engine.optimizer.param_groups
        step(engine)
        if changes:
            whole, lists = list(held), [list(group["params"]) for group in held]
            if how == "move":
                held[0]["params"].append(held[1]["params"].pop())
            else:
                held.pop()
            answer = attempt(lambda: step(engine))  # noqa: B023
            held[:] = whole
            for group, own in zip(held, lists, strict=True):
                group["params"] = own
        step(engine)
        weights.append(engine.state_dict())
        engine.destroy()
    with_it, without = weights
    return answer, all(torch.equal(value, without[name]) for name, value in with_it.items())


@pytest.mark.parametrize(("how", "stage", "device"), (("move", 3, "none"), ("move", 0, "none"), ("pop", 2, "cpu")))
def test_changed_lists_of_parameters_are_refused(how: str, stage: int, device: str) -> None:
    """A tensor has parts of several parameters: one that was moved to another group took them all along."""
    for (name, text), same in run_ranks(2, change_the_lists, how, stage, device):
        assert name == "StepError" and text.startswith("the lists of parameters in optimizer.param_groups were changed")
        assert "Remedy" in text and same


def kept_and_copied(own: bool) -> list[Any]:
    """States can be saved and loaded, torch's optimizers copied and pickled; none keeps the engine."""
    model = build()
    given = torch.optim.RMSprop(model.parameters(), lr=0.01) if own else None
    engine = zerorun.initialize(model, make_config(1), optimizer=given)
    step(engine)
    optimizer: Any = engine.optimizer
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(engine)
    found: list[Any] = []
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))) if own else ():
        copied.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        found.append(len(copied.param_groups))
    seen = weakref.ref(engine)
    engine.destroy()
    del engine
    gc.collect()
    found.append(seen() is None)
    found.append(attempt(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}))[0])
    return found


@pytest.mark.parametrize("own", (False, True))
def test_the_optimizer_is_kept_and_copied_as_before(own: bool) -> None:
    assert run_ranks(2, kept_and_copied, own) == [[*([2, 2] if own else []), True, "StepError"]] * 2


# -- schedules ---------------------------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """Shows what it wraps, as accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.defaults = optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups


class OwnSchedule:
    """A schedule of a client, for any optimizer. ``optimizer``: as its attribute."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = Wrapper(optimizer)

    def step(self) -> None:
        """Halve all rates."""
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, 0.5)


def in_sequence(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.SequentialLR(optimizer, [halved(optimizer), halved(optimizer)], [9])


SCHEDULES: tuple[Callable[[torch.optim.Optimizer], Any], ...] = (halved, in_sequence, OwnSchedule)


def rates(make: Callable[[torch.optim.Optimizer], Any], takes: str) -> list[float]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = make_config(1, optimizer="SGD")
    if takes == "an instance":
        engine = zerorun.initialize(model, config, optimizer=optimizer, lr_scheduler=make(optimizer))
    else:
        config["optimizer"]["params"] = {"lr": 1.0}
        engine = zerorun.initialize(model, config, lr_scheduler=make)
    found = []
    assert engine.optimizer is not None
    for _ in range(3):
        step(engine)
        found.append(engine.optimizer.param_groups[0]["lr"])
    engine.destroy()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("make", SCHEDULES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("takes", ("an instance", "a callable"))
def test_schedules_of_the_optimizer_count(make: Callable[[torch.optim.Optimizer], Any], takes: str) -> None:
    assert run_ranks(2, rates, make, takes) == [[0.5, 0.25, 0.125]] * 2


def saved_without_a_state(folder: str) -> tuple[list[float], list[float], int]:
    """(rates of an uninterrupted run, those after a load into a new engine, warnings)"""
    config, found = make_config(1, optimizer="SGD"), []
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}
    log._warned.clear()
    engine = zerorun.initialize(build(), config, lr_scheduler=OwnSchedule)
    step(engine)
    engine.save_checkpoint(folder)
    for _ in range(2):
        assert engine.optimizer is not None
        rates = []
        for _ in range(2):
            step(engine)
            rates.append(engine.optimizer.param_groups[0]["lr"])
        found.append(rates)
        engine.destroy()
        engine = zerorun.initialize(build(), config, lr_scheduler=OwnSchedule)
        engine.load_checkpoint(folder)
    engine.destroy()
    return found[0], found[1], sum("no state of lr_scheduler=OwnSchedule" in text for text in log._warned)


def test_a_schedule_without_a_state_is_told_of_in_a_save(tmp_path: Path) -> None:
    """The rates of groups are in the checkpoint, so that one which multiplies these goes on."""
    assert run_ranks(2, saved_without_a_state, str(tmp_path)) == [([0.25, 0.125], [0.25, 0.125], 1)] * 2


ONE_CYCLE = {"max_lr": 0.5, "total_steps": 2, "cycle_momentum": False}


def beyond_the_end(stage: int) -> tuple[tuple[str, str], dict[str, torch.Tensor]]:
    """What a step says for which the schedule has no rate, and the weights after that and two more with its last one."""
    config = make_config(stage, optimizer="SGD", scheduler={"type": "OneCycleLR", "params": ONE_CYCLE})
    config["optimizer"]["params"] = {"lr": 0.1}
    engine = zerorun.initialize(build(), config)
    for _ in range(2):
        step(engine)
    answer = attempt(lambda: step(engine))
    assert engine.was_step_applied() and engine.global_steps == 3
    engine.lr_scheduler = None
    for _ in range(2):
        step(engine)
    weights = engine.state_dict()
    engine.destroy()
    return answer, weights


def plainly_beyond_the_end() -> dict[str, torch.Tensor]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.OneCycleLR(optimizer, **ONE_CYCLE)
    for number in range(5):
        optimizer.zero_grad()
        (sum(model(data(rank)) for rank in range(2)) / 2).backward()
        optimizer.step()
        if number < 2:
            schedule.step()
    return model.state_dict()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("stage", (1, 3))
def test_a_schedule_that_ends_too_early_says_so_after_the_update(stage: int) -> None:
    wanted = plainly_beyond_the_end()
    for (kind, text), weights in run_ranks(2, beyond_the_end, stage):
        assert kind == "StepError"
        for word in ("OneCycleLR", "after the weights were updated", "Tried to step 3 times", "engine.lr_scheduler = None"):
            assert word in text
        for name, weight in wanted.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


# -- states that are there from the start --------------------------------------------------------------------------

ADAGRAD = {"lr": 0.05, "initial_accumulator_value": 0.5}


def adagrad_steps(engine_of: str, stage: int) -> tuple[list[torch.Tensor], str]:
    """Weights after three steps of Adagrad, in torch alone or by an engine, and what refuses them. Groups differ."""
    torch.manual_seed(8)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(3, 4, 6)
    groups: list[dict[str, Any]] = [
        {"params": [*model[0].parameters()], "initial_accumulator_value": 2.0},
        {"params": [*model[2].parameters()], "lr": 0.1},
    ]
    if engine_of == "torch":
        optimizer = torch.optim.Adagrad(groups, **ADAGRAD)
        for batch in x:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return list(model.state_dict().values()), ""
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "zero_optimization": {"stage": stage}}
    own: Any = {"optimizer": torch.optim.Adagrad(groups, **ADAGRAD)}
    if engine_of == "name":
        config["optimizer"], own = {"type": "Adagrad", "params": ADAGRAD}, {"model_parameters": groups}
    elif engine_of == "name, torch's":
        config["optimizer"], own = {"type": "Adagrad", "params": {**ADAGRAD, "fused": False}}, {"model_parameters": groups}
    elif engine_of == "object, offloaded":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    try:
        engine = zerorun.initialize(model, config, **own)
    except ModelError as error:
        return [], str(error)
    for batch in x:
        engine.backward(engine(batch).square().mean())
        engine.step()
    weights = list(engine.state_dict().values())
    engine.destroy()
    return weights, ""


WAYS = [(way, stage) for way in ("name", "name, torch's", "object") for stage in (0, 1, 3)] + [("object, offloaded", 2)]


@pytest.mark.parametrize(("engine_of", "stage"), WAYS)
def test_adagrad_equals_torch_s(engine_of: str, stage: int) -> None:
    ((wanted, _),) = run_ranks(1, adagrad_steps, "torch", 0)
    for found, refused in run_ranks(2, adagrad_steps, engine_of, stage):
        if "object" in engine_of and torch.__version__ < "2.12":
            assert f"Adagrad of torch {torch.__version__} makes its state for whole parameters" in refused
            continue
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
