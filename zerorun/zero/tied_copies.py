"""Copies of one parameter that several pipeline stages have: what a script does to one of them it must do to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ..plan.replaced_forwards import is_own_hook
from .sharded_optimizer import rates_in


@dataclass(frozen=True)
class TiedCopy:
    """The copy of a parameter on ``stage``, one of the ``stages`` that have one.

    ``name``: that of the parameter in the model in one process. ``local``: that of the copy. ``group``: the number of its
    parameter group, None if no optimizer has it.
    """

    name: str
    local: str
    param: nn.Parameter
    stages: tuple[int, ...]
    stage: int
    group: int | None


class CopyState(NamedTuple):
    """How a script treats a copy in one step: what must be the same for all copies."""

    is_frozen: bool
    is_written: bool
    rates: str
    hooks: int


class UnlikeCopies(NamedTuple):
    """A parameter whose copies are treated in different ways. ``found``: in words. ``only_hooks``: not in any other way."""

    name: str
    found: str
    only_hooks: bool


def state_of(copy: TiedCopy, groups: Sequence[Mapping[str, Any]], *, is_written: bool) -> CopyState:
    """Return how ``copy`` is treated now. ``groups``: those of the optimizer. Waits for no device."""
    param = copy.param
    group = {} if copy.group is None else groups[copy.group]
    hooks = (*(param._backward_hooks or {}).values(), *(_late_hooks(param) or {}).values())
    others = sum(not is_own_hook(hook) for hook in hooks)
    rates = _in_text(group) if param.requires_grad else ""  # what is not updated has none
    return CopyState(not param.requires_grad, is_written, rates, others)


def _late_hooks(param: nn.Parameter) -> Mapping[int, Any] | None:
    return param._post_accumulate_grad_hooks  # type: ignore[attr-defined,no-any-return]


def _in_text(group: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value:.6g}" for key, value in rates_in(group))


def unlike_copies(told: Sequence[Sequence[tuple[str, str, int, CopyState]]]) -> list[UnlikeCopies]:
    """Return those parameters. ``told``: (name, name there, stage, state) of each copy, by rank."""
    copies: dict[str, dict[tuple[int, str], list[CopyState]]] = {}
    for name, local, stage, state in (entry for found in told for entry in found):
        states = copies.setdefault(name, {}).setdefault((stage, local), [])
        if state not in states:
            states.append(state)
    unlike = []
    for name, places in copies.items():
        ways = {state for states in places.values() for state in states}
        apart = [key for key, *values in zip(CopyState._fields, *ways, strict=True) if len(set(values)) > 1]
        if "is_frozen" in apart and "rates" in apart:  # which only says the same
            apart.remove("rates")
        if apart:
            words = [
                f"{local!r} on stage {stage} ({' or '.join(_in_words(state, apart) for state in states)})"
                for (stage, local), states in sorted(places.items())
            ]
            unlike.append(UnlikeCopies(name, ", ".join(words), apart == ["hooks"]))
    return unlike


def _in_words(state: CopyState, keys: Sequence[str]) -> str:
    words = {
        "is_frozen": "frozen" if state.is_frozen else "trained",
        "is_written": "written to in place since the last step" if state.is_written else "not written to",
        "rates": state.rates or "without rates",
        "hooks": f"{state.hooks} hooks",
    }
    return ", ".join(words[key] for key in keys)
