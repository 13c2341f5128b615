"""Checks that ranks make together: where one of them finds an error, all raise it, and none goes on to wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .. import errors

T = TypeVar("T")
Told = tuple[str, str] | None  # the class and the text of what a rank has found


def agree(check: Callable[[], T], gather: Callable[[Told], list[Any]]) -> T:
    """Return what ``check`` returns on this rank. All ranks must call it. ``gather`` returns their values, by rank.

    Where it raises a ZerorunError on any rank, all ranks raise one: theirs, or one of the class and with the text of the
    first that has any. Another kind of error is raised at once: ranks that wait then are told that this one has ended.
    """
    result: list[T] = []
    problem: errors.ZerorunError | None = None
    try:
        result.append(check())
    except errors.ZerorunError as error:
        problem = error
    found = gather((type(problem).__name__, str(problem)) if problem else None)
    if problem is not None:
        raise problem
    for rank, told in enumerate(found):
        if told is not None:
            raise _same_error(told[0], f"rank {rank}: {told[1]}")
    return result[0]


def first_other(found: Sequence[Any]) -> int | None:
    """The first rank whose value, of those ``found`` by rank, is not rank 0's; None if all are the same."""
    return next((rank for rank, value in enumerate(found) if value != found[0]), None)


def _same_error(name: str, text: str) -> errors.ZerorunError:
    """Make an error of the class of this name in errors.py."""
    kind = vars(errors)[name]
    return errors.ConfigError.saying(text) if issubclass(kind, errors.ConfigError) else kind(text)
