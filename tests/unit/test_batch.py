"""Batch arithmetic: every combination of given sizes, and errors that say how to mend them."""

from __future__ import annotations

import itertools
import re

import pytest

from zerorun.config.batch import resolve_batch
from zerorun.errors import ConfigError


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "expected"),
    [
        (64, 4, 2, (64, 4, 2)),
        (64, 4, None, (64, 4, 2)),
        (64, None, 2, (64, 4, 2)),
        (None, 4, 2, (64, 4, 2)),
        (64, None, None, (64, 8, 1)),
        (None, 4, None, (32, 4, 1)),
    ],
)
def test_fills_in_what_is_missing(
    train: int | None, micro: int | None, accumulation: int | None, expected: tuple[int, int, int]
) -> None:
    batch = resolve_batch(train, micro, accumulation, 8)
    assert (batch.train, batch.micro, batch.accumulation) == expected
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = (train, micro, accumulation)
    assert batch.derived == tuple(name for name, value in zip(names, given, strict=True) if value is None)


@pytest.mark.parametrize("accumulation", [None, 4])
def test_needs_train_or_micro(accumulation: int | None) -> None:
    with pytest.raises(ConfigError, match="must be given"):
        resolve_batch(None, None, accumulation, 8)


def test_the_equation_holds_for_every_combination() -> None:
    sizes = (None, 1, 3, 4, 24, 96)
    for train, micro, accumulation, ranks in itertools.product(sizes, sizes, sizes, (1, 2, 3, 8)):
        try:
            batch = resolve_batch(train, micro, accumulation, ranks)
        except ConfigError:
            continue
        assert batch.train == batch.micro * batch.accumulation * ranks
        for given, actual in ((train, batch.train), (micro, batch.micro), (accumulation, batch.accumulation)):
            assert given in (None, actual)


def test_error_shows_values_origins_and_choices() -> None:
    origins = {"train_batch_size": "file", "data_parallel_size": "ranks"}
    with pytest.raises(ConfigError) as caught:
        resolve_batch(100, 4, None, 8, origins)
    (problem,) = caught.value.problems
    assert problem.key == "train_batch_size"
    assert "train_batch_size 100 (file)" in problem.reason
    assert "gradient_accumulation_steps ? (not given)" in problem.reason
    assert "data-parallel size 8 (ranks)" in problem.reason
    assert "train_batch_size 96 or 128" in problem.remedy


_SHORT = {
    "train_batch_size": "train",
    "train_micro_batch_size_per_gpu": "micro",
    "gradient_accumulation_steps": "accumulation",
}


def test_every_proposed_choice_works() -> None:
    sizes = (None, 1, 3, 5, 8, 20, 64)
    tried = 0
    for train, micro, accumulation, ranks in itertools.product(sizes[1:], sizes, sizes, (1, 3, 8)):
        given = {"train": train, "micro": micro, "accumulation": accumulation}
        try:
            resolve_batch(**given, data_parallel_size=ranks)
        except ConfigError as error:
            remedy = error.problems[0].remedy
            for key, numbers in re.findall(r"([a-z_]+) (\d+(?: or \d+)*)", remedy):
                for number in numbers.split(" or "):
                    resolve_batch(**{**given, _SHORT[key]: int(number)}, data_parallel_size=ranks)
                    tried += 1
    assert tried > 300


def test_fewer_samples_than_ranks() -> None:
    with pytest.raises(ConfigError, match="train_batch_size 8"):
        resolve_batch(1, None, None, 8)


@pytest.mark.parametrize("wrong", [0, -4, True, 2.0])
def test_refuses_sizes_that_are_not_positive_whole_numbers(wrong: object) -> None:
    with pytest.raises(ConfigError, match="at least 1") as caught:
        resolve_batch(wrong, 0, None, 0)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3


def test_huge_sizes_answer_at_once() -> None:
    with pytest.raises(ConfigError):
        resolve_batch(2**62, 2**61 - 1, None, 8)
