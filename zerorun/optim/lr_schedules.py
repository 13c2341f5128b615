"""Learning-rate schedules with DeepSpeed's names and formulas, as pure functions of completed optimizer steps.

A *formula* is a frozen dataclass of numbers. ``lr_at(i, base_lr, group)`` gives the learning rate that is in force
after ``i + 1`` completed optimizer steps: ``i`` is DeepSpeed's ``last_batch_iteration``, -1 at construction and 0
after the first ``step()``. The lr of the very first optimizer step is therefore ``lr_at(-1)``, and that of the second
``lr_at(0)``; with a warm-up both are ``warmup_min_lr``. All lengths are in optimizer steps, all rates in the
optimizer's own lr unit.

An :class:`LRSchedule` writes those numbers into the parameter groups of an optimizer; its state is one integer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from zerorun.errors import ConfigError, ConfigProblem, ModelError
from zerorun.log import info_once, warn_once

PerGroup = float | tuple[float, ...]  # one value for all parameter groups, or one for each


class Formula(Protocol):
    """A pure function from completed optimizer steps to the learning rate of a parameter group."""

    def lr_at(self, i: int, base_lr: float, group: int) -> float:
        """Return the learning rate after ``i + 1`` completed steps of group ``group``, which was built with ``base_lr``."""
        ...


class HasParamGroups(Protocol):
    """What a schedule needs of an optimizer: any wrapper with torch's ``param_groups`` can be used."""

    param_groups: list[dict[str, Any]]


def _of_group(value: float | tuple[float, ...], group: int) -> float:
    return value[group] if isinstance(value, tuple) else value


def _warmup_length(steps: int) -> int:
    """DeepSpeed warms up over at least 2 steps (it divides by log N); 0 means no warm-up at all."""
    return max(2, steps) if steps else 0


def _warmup_fraction(i: int, length: int, kind: str) -> float:
    """Return the fraction of the way from the lowest to the highest lr, in [0, 1). Only for ``i < length``."""
    if i < 0:
        return 0.0
    return i / length if kind == "linear" else math.log(i + 1) / math.log(length)


@dataclass(frozen=True, kw_only=True)
class WarmupLR:
    """lr = min + (max - min) g, where g = ln(i+1)/ln N (``log``) or i/N (``linear``) for i < N, then 1.

    If ``warmup_max_lr`` is None, it is the lr that each parameter group was built with. N = max(2, ``warmup_num_steps``).
    """

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None
    warmup_num_steps: int = 1000
    warmup_type: Literal["log", "linear"] = "log"

    def lr_at(self, i: int, base_lr: float, group: int) -> float:
        low = _of_group(self.warmup_min_lr, group)
        high = base_lr if self.warmup_max_lr is None else _of_group(self.warmup_max_lr, group)
        length = _warmup_length(self.warmup_num_steps)
        warming = bool(length) and i < length
        share = _warmup_fraction(i, length, self.warmup_type) if warming else self._after_warmup(i, length)
        return low + (high - low) * share

    def _after_warmup(self, i: int, length: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """:class:`WarmupLR`, then a straight line: g = (T - i) / max(1, T - N), not below 0, reaching 0 at i = T."""

    total_num_steps: int
    warmup_max_lr: PerGroup | None = 0.001

    def _after_warmup(self, i: int, length: int) -> float:
        left = (self.total_num_steps - i) / max(1, self.total_num_steps - length)
        return min(1.0, max(0.0, left))  # above 1 only for i = -1 without a warm-up


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR:
    """The group's own lr times a ratio: from ``warmup_min_ratio`` up to 1, then a half cosine to ``cos_min_ratio``.

    The cosine is (1 + cos(pi p)) / 2 with p = min(1, (i - N + 1) / max(1, T - N)). With a warm-up, the lr before
    the first ``step()`` is 0 whatever ``warmup_min_ratio`` is, as in DeepSpeed.
    """

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: Literal["log", "linear"] = "log"

    def lr_at(self, i: int, base_lr: float, group: int) -> float:
        length = _warmup_length(self.warmup_num_steps)
        if length and i < length:
            if i < 0:
                return 0.0
            share = _warmup_fraction(i, length, self.warmup_type)
            return base_lr * (self.warmup_min_ratio + (1 - self.warmup_min_ratio) * share)
        progress = min(1.0, (i - length + 1) / max(1, self.total_num_steps - length))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return base_lr * (self.cos_min_ratio + (1 - self.cos_min_ratio) * cosine)


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    """One triangle of lr from min up to max and back, then lr = min / (1 + rate k / decay_step_size).

    Momentum runs the other way: from ``cycle_max_mom`` down to ``cycle_min_mom`` and back, then grows by
    (1 + decay_mom_rate k / decay_step_size). A stair count cuts a half cycle into that many flat stairs.
    ``decay_step_size`` 0 means no decay. ``cycle_momentum`` None: only betas cycle, and the momentum of SGD and its like
    stays, as in DeepSpeed; with True that cycles as well. Smith 2018, arXiv:1803.09820.
    """

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool | None = None
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: float = 0.0

    def lr_at(self, i: int, base_lr: float, group: int) -> float:
        low, high = _of_group(self.cycle_min_lr, group), _of_group(self.cycle_max_lr, group)
        if i < self._length():
            return low + (high - low) * self._height(i + 1)
        return low / (1 + self.decay_lr_rate * self._decay_intervals(i))

    def cycles(self, key: str | None) -> bool:
        """Whether what a group has under ``key``, "betas" or "momentum", goes up and down; None: it has neither."""
        return key is not None and bool(self.cycle_momentum if self.cycle_momentum is not None else key == "betas")

    def momentum_at(self, i: int, group: int) -> float:
        """Return the momentum (``betas[0]`` of Adam-like optimizers) of ``group`` after ``i + 1`` completed steps."""
        low, high = _of_group(self.cycle_min_mom, group), _of_group(self.cycle_max_mom, group)
        if i < 0:
            return low  # DeepSpeed starts there, although the cycle itself starts at the maximum
        if i < self._length():
            return high - (high - low) * self._height(i + 1)
        return high * (1 + self.decay_mom_rate * self._decay_intervals(i))

    def _second(self) -> int:
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    def _length(self) -> int:
        return self.cycle_first_step_size + self._second()

    def _decay_intervals(self, i: int) -> float:
        return (i - self._length() + 1) / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self, steps: int) -> float:
        """Return the triangle's height, 0 to 1, after ``steps`` completed steps. Integers make the stairs exact."""
        place = steps % self._length()
        if place <= self.cycle_first_step_size:
            done, half, stairs = place, self.cycle_first_step_size, self.cycle_first_stair_count
        else:
            done, half, stairs = self._length() - place, self._second(), self._second_stairs()
        return (done * stairs // half) / stairs if stairs else done / half

    def _second_stairs(self) -> int:
        count = self.cycle_second_stair_count
        return self.cycle_first_stair_count if count is None else count


@dataclass(frozen=True, kw_only=True)
class LRRangeTest:
    """lr = min (1 + rate (i + 1) / size), the quotient floored if ``staircase``. Smith 2018, arXiv:1803.09820."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def lr_at(self, i: int, base_lr: float, group: int) -> float:
        size = self.lr_range_test_step_size
        interval = (i + 1) // size if self.lr_range_test_staircase else (i + 1) / size
        return _of_group(self.lr_range_test_min_lr, group) * (1 + self.lr_range_test_step_rate * interval)


FORMULAS: dict[str, type] = {
    formula.__name__: formula for formula in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


class LRSchedule:
    """Writes a formula's learning rates (and momenta) into an optimizer's groups, once per completed step.

    The rates that the groups have at construction are the formula's ``base_lr``. The rates depend only on the number of
    calls of ``step()``: call it once per applied optimizer step, on every rank alike. Raises ConfigError for lists that do
    not have an entry for each group.
    """

    def __init__(self, optimizer: HasParamGroups, formula: Formula, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.formula = formula
        self.last_batch_iteration = last_batch_iteration
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._momentum_keys = [_momentum_key(group) for group in optimizer.param_groups]
        if problems := _length_problems(formula, len(self.base_lrs)):
            raise ConfigError(problems)
        if isinstance(formula, OneCycle):
            _tell_momentum(formula, self._momentum_keys)
        self._apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count one completed optimizer step and set the rates for the next one.

        ``last_batch_iteration``: instead, set those after so many completed steps and one more.
        """
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else int(last_batch_iteration)
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the formula's learning rate of each group for the number of steps counted so far."""
        return [self.formula.lr_at(self.last_batch_iteration, lr, group) for group, lr in enumerate(self.base_lrs)]

    def get_last_lr(self) -> list[float]:
        """Return the learning rates written last, one per parameter group."""
        return list(self._last_lr)

    def get_mom(self) -> list[Any]:
        """Return ``betas`` or ``momentum`` of each group; 0 for a group that has neither.

        Before the first step a cycling momentum is said to be the highest, as in DeepSpeed, though groups have the lowest.
        """
        formula = self.formula
        found = [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]
        if isinstance(formula, OneCycle) and self.last_batch_iteration < 0:
            for number, key in enumerate(self._momentum_keys):
                high = _of_group(formula.cycle_max_mom, number)
                if formula.cycles(key):
                    found[number] = (high, 0.99) if key == "betas" else high
        return found

    def cycled(self, group: int) -> str | None:
        """The key, "betas" or "momentum", of what goes up and down in the group of this number; None: nothing does."""
        key = self._momentum_keys[group]
        return key if isinstance(self.formula, OneCycle) and self.formula.cycles(key) else None

    def state_dict(self) -> dict[str, int]:
        """Return the one integer that a checkpoint needs."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after ``state["last_batch_iteration"] + 1`` completed steps; the rates are set at once."""
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._apply()

    def _apply(self) -> None:
        groups = self.optimizer.param_groups
        if len(groups) != len(self.base_lrs):
            raise ModelError(
                f"the optimizer has {len(groups)} parameter groups but its schedule was built for "
                f"{len(self.base_lrs)}. Add parameter groups before the schedule is built."
            )
        self._last_lr = self.get_lr()
        for group, lr in zip(groups, self._last_lr, strict=True):
            _assign(group, "lr", lr)
        if isinstance(self.formula, OneCycle):
            self._apply_momentum(self.formula)

    def _apply_momentum(self, formula: OneCycle) -> None:
        for number, (group, key) in enumerate(zip(self.optimizer.param_groups, self._momentum_keys, strict=True)):
            momentum = formula.momentum_at(self.last_batch_iteration, number)
            if not formula.cycles(key):
                continue
            if momentum >= 1:
                warn_once(
                    f"scheduler OneCycle: decay_mom_rate {formula.decay_mom_rate} has let the optimizer's {key} grow to 1, "
                    "as in DeepSpeed: averages of gradients diverge. Remedy: a smaller decay_mom_rate, or 0."
                )
            if key == "betas":
                group["betas"] = (momentum, 0.99)  # DeepSpeed fixes the second beta at 0.99
            else:
                group["momentum"] = momentum


def step_reversibly(scheduler: Any, optimizer: HasParamGroups, **kwargs: Any) -> Callable[[], None]:
    """Step ``scheduler`` with ``kwargs``. Return a function that undoes it, in the schedule and in ``optimizer``'s groups.

    What the script has changed since then stays as it is.
    """
    state, groups = deepcopy(scheduler.state_dict()), _settings(optimizer)
    scheduler.step(**kwargs)
    state_after, groups_after = deepcopy(scheduler.state_dict()), _settings(optimizer)

    def go_back() -> None:
        now = _settings(optimizer)
        if _same(scheduler.state_dict(), state_after):
            scheduler.load_state_dict(state)
        for group, found, before, after in zip(optimizer.param_groups, now, groups, groups_after, strict=False):
            for key, value in after.items():
                if not _same(found.get(key), value):
                    group[key] = found[key]  # loading the schedule has set it
                elif isinstance(group[key], Tensor):
                    group[key].copy_(before[key])
                else:
                    group[key] = before[key]

    return go_back


def _settings(optimizer: HasParamGroups) -> list[dict[str, Any]]:
    """Copies of what the groups have besides parameters."""
    return [
        {k: deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")} for group in optimizer.param_groups
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _momentum_key(group: dict[str, Any]) -> str | None:
    """Return the key under which a group keeps its momentum; None for an SGD group without momentum."""
    if "betas" in group:
        return "betas"
    return "momentum" if group.get("momentum") else None


def _tell_momentum(formula: OneCycle, keys: list[str | None]) -> None:
    """Say what cycles besides the lr, where a reader of the file might expect something else."""
    if formula.cycle_momentum and not any(keys):
        warn_once("scheduler OneCycle: cycle_momentum has no effect, the optimizer has neither betas nor momentum")
    elif formula.cycle_momentum and "momentum" in keys:
        info_once(
            "scheduler OneCycle: cycle_momentum is given, so the optimizer's momentum cycles; DeepSpeed cycles betas only."
        )
    elif formula.cycle_momentum is None and "momentum" in keys:
        info_once('scheduler OneCycle: the optimizer\'s momentum stays, as in DeepSpeed; "cycle_momentum": true cycles it.')


def _assign(group: dict[str, Any], key: str, value: float) -> None:
    """Set a group's number. A tensor is filled in place, because captured graphs keep a reference to it."""
    if hasattr(group[key], "fill_"):
        group[key].fill_(value)
    else:
        group[key] = value


def build_formula(type: str, params: dict[str, Any]) -> Formula | None:
    """Return the formula for one of DeepSpeed's five names, or None for any other name. ``params`` are checked ones."""
    names = {name.lower(): name for name in FORMULAS}
    name = names.get(type.lower())
    if name is None:
        return None
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    formula: Formula = FORMULAS[name](**given)
    total, warmup = getattr(formula, "total_num_steps", None), getattr(formula, "warmup_num_steps", 0)
    if total is not None and total < warmup:
        warn_once(f"scheduler {name}: total_num_steps {total} is less than warmup_num_steps {warmup}")
    return formula


def build_schedule(type: str, params: dict[str, Any], optimizer: Any) -> Any:
    """Make an :class:`LRSchedule` for DeepSpeed's five names, else the ``torch.optim.lr_scheduler`` class of that name.

    ``params`` are the keywords of the formula (plus ``last_batch_iteration``) or of the torch class, as the configuration
    has checked them. Raises :class:`ConfigError` with keys ``scheduler.params.<name>`` for what only the optimizer tells.
    """
    formula = build_formula(type, {key: value for key, value in params.items() if key != "last_batch_iteration"})
    if formula is None:
        return _build_torch(type, params, optimizer)
    return LRSchedule(optimizer, formula, params.get("last_batch_iteration", -1))


def try_schedule(type: str, params: dict[str, Any], optimizer: Any) -> None:
    """Make the schedule, and take its first step: torch uses some values only there.

    ``optimizer`` stands in for the one that will have it, and is of no use afterwards. Raises ConfigError.
    """
    schedule = build_schedule(type, params, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has taken no step
        try:
            schedule.step()
        except Exception as error:
            raise ConfigError([_torch_problem(_name_in_torch(type), params, error)]) from error


def _length_problems(formula: Any, groups: int) -> list[ConfigProblem]:
    """Return a problem for each list in ``formula`` that does not have one entry per parameter group."""
    return [
        ConfigProblem(
            f"scheduler.params.{field.name}",
            list(value),
            f"has {len(value)} entries but the optimizer has {groups} parameter groups.",
            "Give one number, or one per parameter group.",
        )
        for field in fields(formula)
        if isinstance(value := getattr(formula, field.name), tuple) and len(value) != groups
    ]


def _build_torch(type: str, params: dict[str, Any], optimizer: Any) -> Any:
    """Make an instance of ``torch.optim.lr_scheduler.<type>``, and turn its errors into configuration problems."""
    name = _name_in_torch(type)
    try:
        return getattr(torch.optim.lr_scheduler, name)(optimizer, **params)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError([_torch_problem(name, params, error)]) from error


def _name_in_torch(type: str) -> str:
    """The spelling of torch; ``type`` itself for another name."""
    return next((item for item in torch.optim.lr_scheduler.__all__ if item.lower() == type.lower()), type)


def _torch_problem(name: str, params: dict[str, Any], error: Exception) -> ConfigProblem:
    """Blame the parameter that the message names, if it names exactly one."""
    named = [key for key in params if key in str(error)]
    reason = f"torch.optim.lr_scheduler.{name} refused it: {error}."
    if len(named) == 1:
        return ConfigProblem(f"scheduler.params.{named[0]}", params[named[0]], reason, "Correct the value.")
    return ConfigProblem("scheduler.params", params, reason, "Correct the parameters.")
