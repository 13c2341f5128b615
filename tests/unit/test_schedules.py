"""Learning-rate schedules: values against DeepSpeed's formulas, worked out by hand, and the errors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from zerorun import log
from zerorun.errors import ConfigError, ModelError
from zerorun.optim.lr_schedules import (
    FORMULAS,
    LRRangeTest,
    LRSchedule,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_formula,
    build_schedule,
    step_reversibly,
)


def make_sgd(*lrs: float, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(2)], "lr": lr} for lr in lrs or (0.1,)], lr=0.1, momentum=momentum)


def make_adam(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.zeros(2)], "lr": lr} for lr in lrs or (0.1,)])


def trace(formula: Any, first: int, last: int, base_lr: float = 0.1) -> list[float]:
    return [formula.lr_at(i, base_lr, 0) for i in range(first, last + 1)]


def problem_of(error: ConfigError, key: str) -> Any:
    found = [problem for problem in error.problems if problem.key == key]
    assert len(found) == 1, f"{key} not in {[problem.key for problem in error.problems]}"
    return found[0]


def test_linear_warmup_reaches_max_after_n_plus_one_steps() -> None:
    formula = WarmupLR(warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear")
    assert trace(formula, -1, 6) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_log_warmup_is_the_default() -> None:
    formula = WarmupLR(warmup_max_lr=2.0, warmup_num_steps=8)
    # ln(i+1)/ln 8: 0, 1/3, log8(3), 2/3, log8(5), log8(6), log8(7), 1
    thirds = [0.0, 0.0, 1 / 3, 0.5283208, 2 / 3, 0.7739760, 0.8616542, 0.9357850, 1.0, 1.0]
    assert trace(formula, -1, 8) == pytest.approx([2 * share for share in thirds], rel=1e-6)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_first_two_optimizer_steps_run_at_the_minimum(kind: str) -> None:
    optimizer = make_sgd(0.1)
    params = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": kind}
    schedule = build_schedule("WarmupLR", params, optimizer)
    used = []
    for _ in range(3):
        used.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert used[:2] == [0.001, 0.001]
    assert used[2] > 0.001


@pytest.mark.parametrize("steps", [1, 2])
def test_warmup_lasts_at_least_two_steps(steps: int) -> None:
    formula = WarmupLR(warmup_max_lr=1.0, warmup_num_steps=steps, warmup_type="linear")
    assert trace(formula, -1, 2) == pytest.approx([0.0, 0.0, 0.5, 1.0])


def test_no_warmup_starts_at_the_maximum() -> None:
    assert trace(WarmupLR(warmup_num_steps=0), -1, 1) == [0.1, 0.1, 0.1]
    decay = WarmupDecayLR(total_num_steps=4, warmup_num_steps=0, warmup_max_lr=1.0)
    assert trace(decay, -1, 5) == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    cosine = WarmupCosineLR(total_num_steps=2, warmup_num_steps=0, cos_min_ratio=0.0)
    assert trace(cosine, -1, 2, base_lr=1.0) == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=1e-15)


def test_warmup_decay() -> None:
    formula = WarmupDecayLR(total_num_steps=8, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    assert trace(formula, -1, 9) == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0, 0])


def test_warmup_decay_goes_down_to_the_minimum_and_its_maximum_defaults_to_a_thousandth() -> None:
    formula = WarmupDecayLR(total_num_steps=4, warmup_min_lr=0.0001, warmup_num_steps=2)
    assert formula.lr_at(2, 0.1, 0) == pytest.approx(0.001)
    assert formula.lr_at(4, 0.1, 0) == pytest.approx(0.0001)


def test_warmup_decay_with_less_total_than_warmup_ends_at_the_minimum() -> None:
    formula = WarmupDecayLR(total_num_steps=3, warmup_max_lr=1.0, warmup_num_steps=5, warmup_type="linear")
    assert trace(formula, 3, 6) == pytest.approx([0.6, 0.8, 0.0, 0.0])


def test_warmup_cosine() -> None:
    formula = WarmupCosineLR(
        total_num_steps=8, warmup_min_ratio=0.2, warmup_num_steps=4, cos_min_ratio=0.1, warmup_type="linear"
    )
    warm = [0.0, 0.2, 0.4, 0.6, 0.8]
    quarter, half, three = math.cos(math.pi / 4), 0.0, math.cos(3 * math.pi / 4)
    cold = [0.1 + 0.9 * (1 + cosine) / 2 for cosine in (quarter, half, three)] + [0.1, 0.1, 0.1]
    assert trace(formula, -1, 9, base_lr=2.0) == pytest.approx([2 * ratio for ratio in warm + cold])


def test_one_cycle_goes_up_down_and_decays() -> None:
    formula = OneCycle(
        cycle_min_lr=0.1,
        cycle_max_lr=0.5,
        cycle_first_step_size=4,
        cycle_second_step_size=2,
        decay_step_size=2,
        decay_lr_rate=1.0,
        decay_mom_rate=0.1,
    )
    up_down = [0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1]
    assert trace(formula, -1, 5) == pytest.approx(up_down)
    assert trace(formula, 6, 8) == pytest.approx([0.1 / 1.5, 0.1 / 2, 0.1 / 2.5])
    momenta = [formula.momentum_at(i, 0) for i in range(-1, 8)]
    assert momenta == pytest.approx([0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9 * 1.05, 0.9 * 1.1])


def test_one_cycle_without_decay_stays_at_the_ends() -> None:
    formula = OneCycle(cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=2, decay_lr_rate=1.0)
    assert trace(formula, 3, 9) == pytest.approx([0.1] * 7)
    assert formula.momentum_at(9, 0) == 0.9


def test_one_cycle_stairs() -> None:
    formula = OneCycle(
        cycle_min_lr=0.0,
        cycle_max_lr=1.0,
        cycle_first_step_size=4,
        cycle_first_stair_count=2,
        cycle_second_step_size=3,
        cycle_second_stair_count=1,
    )
    assert trace(formula, -1, 6) == pytest.approx([0, 0, 0.5, 0.5, 1.0, 0, 0, 0])


def test_lr_range_test() -> None:
    straight = LRRangeTest(lr_range_test_min_lr=0.5, lr_range_test_step_size=2, lr_range_test_step_rate=2.0)
    assert trace(straight, -1, 3) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5])
    stairs = LRRangeTest(lr_range_test_min_lr=0.5, lr_range_test_step_size=2, lr_range_test_staircase=True)
    assert trace(stairs, -1, 3) == pytest.approx([0.5, 0.5, 1.0, 1.0, 1.5])


def test_construction_sets_the_rates_of_every_group() -> None:
    optimizer = make_sgd(0.1, 0.2)
    schedule = build_schedule("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, optimizer)
    assert schedule.optimizer is optimizer
    assert schedule.get_last_lr() == [0.0, 0.0]
    traced = []
    for _ in range(3):
        schedule.step()
        assert schedule.get_lr() == schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        traced.append(schedule.get_last_lr())
    assert traced == [[0.0, 0.0], [0.05, 0.1], [0.1, 0.2]]


def test_lists_per_parameter_group() -> None:
    params = {"warmup_min_lr": [0.0, 1.0], "warmup_max_lr": [1, 3], "warmup_num_steps": 2, "warmup_type": "linear"}
    schedule = build_schedule("WarmupLR", params, make_sgd(0.1, 0.1))
    schedule.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5, 2.0]
    with pytest.raises(ConfigError) as caught:
        build_schedule("WarmupLR", params, make_sgd(0.1, 0.1, 0.1))
    assert "3 parameter groups" in problem_of(caught.value, "scheduler.params.warmup_min_lr").reason
    assert problem_of(caught.value, "scheduler.params.warmup_max_lr")


PARAMS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 3},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 3, "decay_step_size": 2},
    "LRRangeTest": {"lr_range_test_step_size": 3},
}


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_state_round_trip_sets_the_rates_at_once(name: str) -> None:
    first = build_schedule(name, PARAMS[name], make_adam(0.3, 0.5))
    for _ in range(5):
        first.step()
    assert first.state_dict() == {"last_batch_iteration": 4}
    second = build_schedule(name, PARAMS[name], make_adam(0.3, 0.5))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for _ in range(4):
        for ours, theirs in zip(first.optimizer.param_groups, second.optimizer.param_groups, strict=True):
            assert (ours["lr"], ours["betas"]) == (theirs["lr"], theirs["betas"])
        first.step()
        second.step()
    third = build_schedule(name, {**PARAMS[name], "last_batch_iteration": 8}, make_adam(0.3, 0.5))
    assert third.get_last_lr() == first.get_last_lr()


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_names_may_differ_in_case(name: str) -> None:
    assert isinstance(build_formula(name.upper(), PARAMS[name]), FORMULAS[name])


def test_one_cycle_momentum_of_adam_and_of_sgd() -> None:
    adam = make_adam()
    schedule = build_schedule("OneCycle", PARAMS["OneCycle"], adam)
    assert adam.param_groups[0]["betas"] == (0.8, 0.99) and schedule.get_mom() == [(0.9, 0.99)]
    schedule.step()
    assert schedule.get_mom() == [adam.param_groups[0]["betas"]]
    assert adam.param_groups[0]["betas"] == pytest.approx((0.9 - 0.1 / 3, 0.99))
    sgd = make_sgd(momentum=0.5)
    told = build_schedule("OneCycle", {**PARAMS["OneCycle"], "cycle_momentum": True}, sgd)
    assert told.get_mom() == [0.9] and sgd.param_groups[0]["momentum"] == 0.8
    told.step()
    assert sgd.param_groups[0]["momentum"] == pytest.approx(0.9 - 0.1 / 3)


def test_one_cycle_leaves_the_momentum_of_sgd_alone_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed cycles betas only. A file that trained there with SGD trained with another momentum here."""
    sgd = make_sgd(momentum=0.5)
    told: list[str] = []
    monkeypatch.setattr("zerorun.optim.lr_schedules.info_once", told.append)
    schedule = build_schedule("OneCycle", PARAMS["OneCycle"], sgd)
    build_schedule("OneCycle", {**PARAMS["OneCycle"], "cycle_momentum": True}, make_sgd(momentum=0.5))
    assert schedule.get_mom() == [0.5]
    for _ in range(9):
        assert sgd.param_groups[0]["momentum"] == 0.5
        schedule.step()
    stays, cycles = told
    assert 'momentum stays, as in DeepSpeed; "cycle_momentum": true' in stays
    assert "the optimizer's momentum cycles; DeepSpeed cycles betas only" in cycles


def test_one_cycle_says_when_a_momentum_has_grown_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_warned", set())
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 1, "decay_step_size": 1}
    schedule = LRSchedule(make_adam(0.1), OneCycle(**cycle, decay_mom_rate=0.1))
    said = []
    for _ in range(6):
        schedule.step()
        said.append(len(log._warned))
    assert said == [0, 0, 0, 1, 1, 1]  # 0.9, after the cycle 0.99, and then 1.08
    assert "averages of gradients diverge" in next(iter(log._warned))


def test_one_cycle_has_a_momentum_for_each_group() -> None:
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    adam = torch.optim.AdamW([{"params": [param]} for param in params], lr=1.0)
    momenta = {"cycle_min_mom": [0.8, 0.5], "cycle_max_mom": [0.9, 0.8]}
    schedule = build_schedule("OneCycle", {**PARAMS["OneCycle"], **momenta}, adam)
    assert [group["betas"][0] for group in adam.param_groups] == [0.8, 0.5]
    schedule.step()
    assert [group["betas"][0] for group in adam.param_groups] == pytest.approx([0.9 - 0.1 / 3, 0.8 - 0.3 / 3])
    with pytest.raises(ConfigError, match="has 3 entries but the optimizer has 2 parameter groups"):
        build_schedule("OneCycle", {**PARAMS["OneCycle"], "cycle_max_mom": [0.9, 0.9, 0.9]}, adam)
    with pytest.raises(ConfigError, match="has 1 entries"):
        LRSchedule(adam, OneCycle(cycle_min_lr=(0.1,), cycle_max_lr=0.2))


def test_one_cycle_leaves_momentum_alone_when_told_to_or_when_there_is_none() -> None:
    adam, sgd = make_adam(), make_sgd()
    build_schedule("OneCycle", {**PARAMS["OneCycle"], "cycle_momentum": False}, adam).step()
    assert adam.param_groups[0]["betas"] == (0.9, 0.999)
    build_schedule("OneCycle", PARAMS["OneCycle"], sgd).step()
    assert sgd.param_groups[0]["momentum"] == 0.0


def test_a_tensor_lr_is_filled_in_place() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(2)], lr=torch.tensor(0.5), capturable=False, foreach=False)
    held = optimizer.param_groups[0]["lr"]
    schedule = LRSchedule(optimizer, WarmupLR(warmup_num_steps=2, warmup_type="linear"))
    assert held.item() == 0.0
    for _ in range(3):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.5


def test_a_group_added_later_is_an_error() -> None:
    optimizer = make_sgd()
    schedule = build_schedule("WarmupLR", {}, optimizer)
    optimizer.add_param_group({"params": [torch.zeros(2)]})
    with pytest.raises(ModelError, match="2 parameter groups"):
        schedule.step()


def test_torch_scheduler_by_name() -> None:
    optimizer = make_sgd(0.1, 0.2)
    schedule = build_schedule("StepLR", {"step_size": 2, "gamma": 0.5}, optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [0.05, 0.1]


@pytest.mark.parametrize(
    ("name", "params", "key", "part"),
    [
        ("LambdaLR", {"lr_lambda": [1, 2]}, "scheduler.params.lr_lambda", "refused"),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": -1}, "scheduler.params.total_steps", "refused"),
    ],
)
def test_errors_name_the_key(name: str, params: dict[str, Any], key: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_schedule(name, params, make_sgd())
    assert part in str(problem_of(caught.value, key))


# -- a step that is taken back ---------------------------------------------------------------------------------------


class Listing:
    """A schedule whose state is what it holds itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.seen = optimizer, list[int]()

    def step(self) -> None:
        self.seen.append(len(self.seen))
        self.optimizer.param_groups[0]["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


MAKERS: dict[str, Any] = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 9),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [2],
    ),
    "ours": lambda optimizer: LRSchedule(optimizer, OneCycle(cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=3)),
    "Listing": Listing,
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("tensor", (False, True))
def test_a_step_that_is_taken_back_was_never_made(maker: str, tensor: bool) -> None:
    def rates(skips: bool) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(2)], lr=torch.tensor(0.1) if tensor else 0.1, momentum=0.9)
        schedule, found = MAKERS[maker](optimizer), []
        for _ in range(4):
            optimizer.step()
            if skips:
                step_reversibly(schedule, optimizer)()
            step_reversibly(schedule, optimizer)
            found += [float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["momentum"]]
        return found

    assert rates(True) == rates(False)


@pytest.mark.parametrize("maker", ("StepLR", "ours", "Listing"))
def test_what_the_script_does_after_a_step_stays(maker: str) -> None:
    optimizer = make_sgd(0.1, 0.2)
    schedule = MAKERS[maker](optimizer)
    optimizer.step()
    go_back = step_reversibly(schedule, optimizer)
    optimizer.param_groups[1]["lr"] = 0.75
    if maker == "Listing":  # others do not allow it
        optimizer.add_param_group({"params": [torch.zeros(1)], "lr": 0.3})
    go_back()
    assert [group["lr"] for group in optimizer.param_groups[1:]] == [0.75, 0.3][: len(optimizer.param_groups) - 1]
    before = schedule.state_dict()
    go_back = step_reversibly(schedule, optimizer)
    schedule.load_state_dict(copy.deepcopy(before) | {"last_batch_iteration": 7})
    if maker == "ours":
        go_back()
        assert schedule.last_batch_iteration == 7


def test_a_loop_may_say_where_the_schedule_is() -> None:
    optimizer = make_adam(0.1)
    schedule = LRSchedule(optimizer, WarmupLR(warmup_max_lr=1.0, warmup_num_steps=10, warmup_type="linear"))
    schedule.step(4)
    assert schedule.get_last_lr() == schedule.get_lr() == [0.4]
    assert schedule.state_dict() == {"last_batch_iteration": 4}
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert schedule.get_mom() == [(0.9, 0.999)]
