"""Checks that ranks make together: where one of them finds an error, all raise it, and none goes on to wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .. import errors

T = TypeVar("T")
V = TypeVar("V")


def agree(check: Callable[[], T], gather: Callable[[Any], list[Any]]) -> T:
    """Return what ``check`` returns on this rank. All ranks must call it. ``gather`` returns their values, by rank.

    Where it raises a ZerorunError on any rank, all ranks raise one: theirs, or one of the class and with the text of the
    first that has any. Another kind of error is raised at once: ranks that wait then are told that this one has ended.
    """
    return agree_and_tell(lambda: (check(), None), gather)[0]


def agree_and_tell(check: Callable[[], tuple[T, V]], gather: Callable[[Any], list[Any]]) -> tuple[T, list[V]]:
    """``agree`` for a check that returns (a result, what to tell): the result, and what all ranks tell, by rank."""
    checked: list[tuple[T, V]] = []
    problem: errors.ZerorunError | None = None
    try:
        checked.append(check())
    except errors.ZerorunError as error:
        problem = error
    found = gather(((type(problem).__name__, str(problem)) if problem else None, checked[0][1] if checked else None))
    if problem is not None:
        raise problem
    for rank, (failed, _) in enumerate(found):
        if failed is not None:
            raise _same_error(failed[0], f"rank {rank}: {failed[1]}")
    return checked[0][0], [told for _, told in found]


def first_other(found: Sequence[Any]) -> int | None:
    """The first rank whose value, of those ``found`` by rank, is not rank 0's; None if all are the same."""
    return next((rank for rank, value in enumerate(found) if value != found[0]), None)


def _same_error(name: str, text: str) -> errors.ZerorunError:
    """Make an error of the class of this name in errors.py."""
    kind = vars(errors)[name]
    return errors.ConfigError.saying(text) if issubclass(kind, errors.ConfigError) else kind(text)
