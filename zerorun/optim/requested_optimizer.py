"""The optimizer that initialize() is asked for, before sharding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..ops.rounding import MasterFormat
from ..ops.state_format import StateFormat
from .optimizer_needs import Needs
from .parameter_parts import PartsOptimizer


@dataclass
class RawOptimizer:
    """The optimizer before sharding: an instance, or the name and parameters of one that is still to be made.

    ``group_of``: id(parameter) -> index of its group. ``whole``: the optimizer needs uncut parameters. ``parts``: its
    class, if it gets one tensor for each part of a parameter, and is told which it is. ``matrix_dtype``: in which Muon's
    matrices travel to their owners; None for other optimizers. ``formats``: id(parameter) -> the format of its states, of
    those that are not kept in fp32. ``master``: that of the values that are updated. ``seed``: of the chance by which both
    are rounded to bf16; None to round to nearest. ``divided_for``: the most that the optimizer may need of the parameters.
    """

    optimizer: torch.optim.Optimizer | None
    groups: list[dict[str, Any]]
    group_of: dict[int, int]
    name: str
    params: dict[str, Any]
    whole: bool
    parts: type[PartsOptimizer] | None = None
    matrix_dtype: torch.dtype | None = None
    formats: dict[int, StateFormat] = field(default_factory=dict)
    master: MasterFormat = MasterFormat.FP32
    seed: int | None = None
    divided_for: Needs = Needs.MODEL


def without_elsewhere(raw: RawOptimizer, model: nn.Module) -> RawOptimizer:
    """Return ``raw`` without the parameters that are no longer in ``model``, because they are on other stages."""
    here = {id(param) for param in model.parameters()}
    groups = [{**group, "params": [param for param in group["params"] if id(param) in here]} for group in raw.groups]
    kept = {key: group for key, group in raw.group_of.items() if key in here}
    formats = {key: format for key, format in raw.formats.items() if key in here}
    return replace(raw, groups=groups, group_of=kept, formats=formats)


class OptimizerAsGiven:
    """What an optimizer of the script's is before an engine takes it: its attributes, and what its groups have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._own = optimizer, dict(vars(optimizer))
        # Dicts stay the same objects, because others know them: the handle of a hook finds it there.
        tables = [value for value in self._own.values() if isinstance(value, dict) and value is not optimizer.state]
        self._tables = [(table, dict(table)) for table in tables]
        self._groups = [(group, {key: _kept(value) for key, value in group.items()}) for group in optimizer.param_groups]

    def put_back(self) -> None:
        """Let the optimizer be what it was, with its parameters and without states: those were let go of."""
        own = vars(self._optimizer)
        own.clear()
        own.update(self._own)
        for table, entries in (*self._tables, *self._groups):
            table.clear()
            table.update(entries)
        self._optimizer.state.clear()


def _kept(setting: Any) -> Any:
    return setting.clone() if torch.is_tensor(setting) else setting
