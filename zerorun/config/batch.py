"""Batch arithmetic: ``train = micro · accumulation · data_parallel``, from whichever of the first three are given.

All sizes count samples, except ``accumulation`` (micro-batches per optimizer step) and ``data_parallel`` (ranks that
see different data: the world size divided by the tensor, pipeline and context degrees).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zerorun.errors import ConfigError, ConfigProblem, in_json

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_AUTO = "auto"
_EQUATION = f"{_TRAIN} = {_MICRO} × {_ACCUMULATION} × data-parallel size"


@dataclass(frozen=True)
class Batch:
    """One consistent set of sizes. ``train == micro * accumulation * data_parallel_size`` always holds."""

    train: int  # samples per optimizer step, over all ranks
    micro: int  # samples per forward on one rank
    accumulation: int  # micro-batches per optimizer step
    data_parallel_size: int  # ranks
    derived: tuple[str, ...]  # the config keys that were computed here


def resolve_batch(
    train: int | None,
    micro: int | None,
    accumulation: int | None,
    data_parallel_size: int,
    origins: Mapping[str, str] | None = None,
) -> Batch:
    """Fill in the sizes that are None, or raise :class:`ConfigError` with the nearest choices that would fit.

    ``origins`` maps a config key to the origin of its value, for the message; a key that is not in it is "given".
    """
    given = {_TRAIN: train, _MICRO: micro, _ACCUMULATION: accumulation}
    problems = _not_positive({**given, "data_parallel_size": data_parallel_size})
    if problems:
        raise ConfigError(problems, "batch sizes")
    if train is None and micro is None:
        auto = [key for key in (_MICRO, _TRAIN) if (origins or {}).get(key) == _AUTO]
        raise ConfigError([_nothing_given(auto)], "batch sizes")
    filled = _fill(train, micro, accumulation, data_parallel_size)
    if filled is None:
        raise ConfigError([_inconsistent(given, data_parallel_size, origins or {})], "batch sizes")
    derived = tuple(key for key, value in given.items() if value is None)
    return Batch(*filled, data_parallel_size, derived)


def _not_positive(values: dict[str, int | None]) -> list[ConfigProblem]:
    remedy = "Use a whole number of at least 1."
    return [
        ConfigProblem(key, value, "a batch size must be a whole number of at least 1.", remedy)
        for key, value in values.items()
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1)
    ]


def _nothing_given(auto: list[str]) -> ConfigProblem:
    """Make the problem that no size is given. ``auto``: the keys that say "auto"."""
    remedy = f"Give {_MICRO}, the number of samples that one rank takes at a time; the other sizes follow."
    if not auto:
        reason = f"{_TRAIN} or {_MICRO} must be given: {_EQUATION} cannot be solved without one of them."
        return ConfigProblem(_MICRO, None, reason, remedy)
    says = f"{' and '.join(auto)} {'says' if len(auto) == 1 else 'say'} {in_json(_AUTO)}"
    reason = f"{says}, which a Trainer replaces by its own batch size. Nobody has: {_EQUATION} must be given one of them."
    how = "The command python -m zerorun.config takes --micro-batch."
    return ConfigProblem(auto[0], _AUTO, reason, f"{remedy} {how}")


def _fill(train: int | None, micro: int | None, accumulation: int | None, ranks: int) -> tuple[int, int, int] | None:
    """Return (train, micro, accumulation), or None if no whole numbers fit the given values."""
    if train is None:
        assert micro is not None
        accumulation = accumulation or 1
        return micro * accumulation * ranks, micro, accumulation
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * ranks)
    elif accumulation is None:
        accumulation = train // (micro * ranks)
    return (train, micro, accumulation) if micro * accumulation * ranks == train else None


def _inconsistent(given: dict[str, int | None], ranks: int, origins: Mapping[str, str]) -> ConfigProblem:
    """Make the problem: the equation with its four values and their origins, and the nearest values that make it true."""
    parts = []
    for key, value in given.items():
        origin = "not given" if value is None else origins.get(key, "given")
        parts.append(f"{key} {'?' if value is None else value} ({origin})")
    parts.append(f"data-parallel size {ranks} ({origins.get('data_parallel_size', 'given')})")
    reason = f"{_EQUATION} does not hold for whole numbers: {', '.join(parts)}."
    choices = _choices(given[_TRAIN] or 0, given[_MICRO], given[_ACCUMULATION], ranks)
    return ConfigProblem(_TRAIN, given[_TRAIN], reason, "Use " + ", or ".join(choices) + ".")


def _choices(train: int, micro: int | None, accumulation: int | None, ranks: int) -> list[str]:
    """Return changes of one value that make the equation solvable. The change that keeps most of the request is first."""
    choices = []
    if micro is not None and accumulation is not None:
        if train % (micro * ranks) == 0:
            choices.append(f"{_ACCUMULATION} {train // (micro * ranks)}")
        if train % (accumulation * ranks) == 0:
            choices.append(f"{_MICRO} {train // (accumulation * ranks)}")
        choices.append(f"{_TRAIN} {micro * accumulation * ranks}")
        return choices
    known = micro or accumulation or 1
    step = known * ranks
    below, above = train // step * step, (train // step + 1) * step
    choices.append(f"{_TRAIN} " + " or ".join(str(size) for size in (below, above) if size))
    if train % ranks == 0 and known > 1:
        nearest = _nearest_divisors(train // ranks, known)
        key = _MICRO if micro is not None else _ACCUMULATION
        choices.append(f"{key} " + " or ".join(str(size) for size in nearest))
    return choices


def _nearest_divisors(number: int, near: int) -> list[int]:
    """Return the divisors of ``number`` just below and just above ``near``, searching no further than 10,000 away."""
    top = min(near, number)
    below = next((size for size in range(top, max(0, top - 10_000), -1) if number % size == 0), 1)
    above = next((size for size in range(near, min(number, near + 10_000) + 1) if number % size == 0), below)
    return sorted({below, above})
