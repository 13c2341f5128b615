"""DeepSpeed's classes of learning-rate schedules, for scripts that make them: zerorun's schedule, with their signatures."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..config.parse import check_keywords
from ..optim.lr_schedules import FORMULAS, LRSchedule, build_formula

WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
ONE_CYCLE, LR_RANGE_TEST = "OneCycle", "LRRangeTest"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
# WARMUP_MIN_LR = "warmup_min_lr" and so on, for each parameter of each schedule.
globals().update({field.name.upper(): field.name for formula in FORMULAS.values() for field in fields(formula)})

# The order in which DeepSpeed's constructors take what the schedules need; then come the fields in their own order.
_FIRST = {WARMUP_DECAY_LR: ("total_num_steps",), WARMUP_COSINE_LR: ("total_num_steps",)}


class _ScheduleClass(type):
    """The kind of these classes: a schedule that the engine has made from the file is an instance, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, LRSchedule) and isinstance(instance.formula, FORMULAS[cls.__name__])


def _schedule_class(name: str) -> type[LRSchedule]:
    """Make the class ``name``: clients know schedules by the names of their classes."""
    first = _FIRST.get(name, ())
    order = [*first, *(field.name for field in fields(FORMULAS[name]) if field.name not in first)]

    def __init__(self: LRSchedule, optimizer: Any, *values: Any, last_batch_iteration: int = -1, **params: Any) -> None:
        named = {**dict(zip((*order, "last_batch_iteration"), values, strict=False)), **params}
        last = named.pop("last_batch_iteration", last_batch_iteration)
        formula = build_formula(name, check_keywords("scheduler", name, named))
        assert formula is not None
        LRSchedule.__init__(self, getattr(optimizer, "optimizer", optimizer), formula, last)

    text = f"The schedule {name}: ``{name}(optimizer, {', '.join(order)})``. Raises ConfigError for what it cannot use."
    made: Any = _ScheduleClass(name, (LRSchedule,), {"__init__": __init__, "__doc__": text, "__module__": __name__})
    return made


WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest = (
    _schedule_class(name) for name in (WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR, ONE_CYCLE, LR_RANGE_TEST)
)
