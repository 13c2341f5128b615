"""Disks: room for what the configuration puts on one, asked for by all ranks before any of them begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ..config.parse import Config
from ..errors import ConfigError, ConfigProblem
from ..log import in_bytes, info_once
from ..ops.single_pass import SinglePassOptimizer
from ..optim.optimizers import build_optimizer
from ..optim.requested import RawOptimizer
from .offload.nvme import StateFile, file_bytes, mapped_file, require_room
from .offload.placement import Disk
from .plan import ShardingPlan

T = TypeVar("T")
Agree = Callable[[Callable[[], T]], T]  # calls on all ranks, and raises on all alike


def open_disk(plan: ShardingPlan, config: Config, raw: RawOptimizer, agree: Agree[Disk | None]) -> Disk | None:
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
    disk = agree(wants[0].open)
    for folder in wants[0].folders:
        size = in_bytes(wants[0].bytes_in(folder))
        info_once(f"offload to files without names in {folder.absolute()}: {size} of each rank")
    return disk


@dataclass
class _Wants:
    """``units``: as for StateFile. ``params``: bytes. Folders are None where nothing is wanted."""

    states_folder: Path | None
    units: dict[int, list[int]]
    states: int
    params_folder: Path | None
    params: int

    def bytes_in(self, folder: Path) -> int:
        """That this rank puts there."""
        states = file_bytes(self.units, self.states) if folder == self.states_folder else 0
        return states + (self.params if folder == self.params_folder else 0)

    @property
    def folders(self) -> list[Path]:
        """All that something goes to, each once."""
        return [folder for folder in dict.fromkeys((self.states_folder, self.params_folder)) if folder is not None]

    def require(self) -> None:
        """Raise SwapError if the ranks of this node do not find room together."""
        for folder in self.folders:
            require_room(folder, _local_ranks() * self.bytes_in(folder))

    def open(self) -> Disk:
        """Make the files."""
        states = params = None
        if self.states_folder is not None:
            node = _local_ranks() * file_bytes(self.units, self.states)
            states = StateFile(self.states_folder, self.units, self.states, node_bytes=node)
        if self.params_folder is not None:
            params = mapped_file(self.params_folder, self.params) if self.params else torch.empty(0, dtype=torch.uint8)
        return Disk(states, params)


def _wants(plan: ShardingPlan, config: Config, raw: RawOptimizer) -> _Wants:
    optimizer, param = config.zero_optimization.offload_optimizer, config.zero_optimization.offload_param
    units: dict[int, list[int]] = {}
    states_folder = params_folder = None
    states = params = 0
    if optimizer.device == "nvme" and raw.groups:
        states_folder, states = _folder(optimizer.nvme_path), state_count(raw)
        units = plan.builder.disk_units(plan.specs)
    if param.device == "nvme":
        params_folder, params = _folder(param.nvme_path), plan.builder.disk_params(plan.specs)
    return _Wants(states_folder, units, states, params_folder, params)


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _folder(path: str | None) -> Path:
    return Path(path or "").expanduser()


def state_count(raw: RawOptimizer) -> int:
    """States of a parameter. Raises ConfigError unless the optimizer is one that updates in a single pass."""
    tried: torch.optim.Optimizer | None = raw.optimizer
    if tried is None:
        tiny = [{**group, "params": [torch.zeros(1)]} for group in raw.groups]
        tried = build_optimizer(raw.name, raw.params, tiny)
    if isinstance(tried, SinglePassOptimizer):
        return tried.state_count()
    name, key = type(tried).__name__, "zero_optimization.offload_optimizer.device"
    what = f"{name} as optimizer.type" if raw.optimizer is None else f"the {name} that was passed to initialize()"
    reason = f"{what} has no update that works unit by unit on what a disk holds."
    remedy = 'Name Adam, AdamW, Adagrad, Lion or SGD as optimizer.type in the configuration, or set device to "cpu".'
    raise ConfigError([ConfigProblem(key, "nvme", reason, remedy)])
