"""Disks: room for what the configuration puts on one, asked for by all ranks before any of them begins."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from .config import Config
from .errors import ConfigError, ConfigProblem
from .intake import RawOptimizer
from .ops.single_pass import SinglePassOptimizer
from .optim import build_optimizer
from .plan import Plan
from .zero.placement import Disk
from .zero.swap import StateFile, file_bytes, mapped_file, require_room

T = TypeVar("T")
Agree = Callable[[Callable[[], T]], T]  # calls on all ranks, and raises on all alike


def open_disk(plan: Plan, config: Config, raw: RawOptimizer, agree: Agree[Disk | None]) -> Disk | None:
    """The files of this rank; None if nothing is to lie on a disk.

    Raises ConfigError for an optimizer that cannot work there, SwapError for a folder that cannot be used or has not the
    room for all ranks of this node; on all ranks alike.
    """
    zero = config.zero_optimization
    if "nvme" not in (zero.offload_optimizer.device, zero.offload_param.device):
        return None
    wants: list[_Wants] = []

    def ask() -> None:
        wants.append(_wants(plan, config, raw))
        wants[0].require()

    agree(ask)
    return agree(wants[0].open)


@dataclass
class _Wants:
    """``units``: as for StateFile. ``params``: bytes. Folders are None where nothing is wanted."""

    states_folder: Path | None
    units: dict[int, list[int]]
    states: int
    params_folder: Path | None
    params: int

    def require(self) -> None:
        """Raise SwapError if the ranks of this node do not find room together."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed: defaultdict[Path, int] = defaultdict(int)
        if self.states_folder is not None:
            needed[self.states_folder] += ranks * file_bytes(self.units, self.states)
        if self.params_folder is not None:
            needed[self.params_folder] += ranks * self.params
        for folder, size in needed.items():
            require_room(folder, size)

    def open(self) -> Disk:
        """Make the files."""
        states = params = None
        if self.states_folder is not None:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            node = ranks * file_bytes(self.units, self.states)
            states = StateFile(self.states_folder, self.units, self.states, node_bytes=node)
        if self.params_folder is not None:
            params = mapped_file(self.params_folder, self.params) if self.params else torch.empty(0, dtype=torch.uint8)
        return Disk(states, params)


def _wants(plan: Plan, config: Config, raw: RawOptimizer) -> _Wants:
    optimizer, param = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    units: dict[int, list[int]] = {}
    states_folder = params_folder = None
    states = params = 0
    if optimizer.device == "nvme" and raw.groups:
        states_folder, states = Path(optimizer.nvme_path or ""), state_count(raw)
        units = plan.builder.disk_units(plan.specs)
    if param.device == "nvme":
        params_folder, params = Path(param.nvme_path or ""), plan.builder.disk_params(plan.specs)
    return _Wants(states_folder, units, states, params_folder, params)


def state_count(raw: RawOptimizer) -> int:
    """States of a parameter. Raises ConfigError unless the optimizer is one that updates in a single pass."""
    tried: torch.optim.Optimizer | None = raw.optimizer
    if tried is None:
        tiny = [{**group, "params": [torch.zeros(1)]} for group in raw.groups]
        tried = build_optimizer(raw.name, raw.params, tiny)
    if isinstance(tried, SinglePassOptimizer):
        return tried.state_count()
    problem = ConfigProblem(
        "zero_optimization.offload_optimizer.device",
        "nvme",
        f"{type(tried).__name__} has no update that works unit by unit on what a disk holds.",
        'Name Adam, AdamW, Adagrad, Lion or SGD as optimizer.type in the configuration, or set device to "cpu".',
    )
    raise ConfigError([problem])
