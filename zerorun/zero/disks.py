"""Disks: files for what the plan puts on disks. All ranks check for room before any of them allocates it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ..config.parse import Config
from ..log import in_bytes, info_once
from ..plan.sharding_plan import DiskPlan
from ..watch.launch_environment import ranks_here
from .offload.host_link import Disk
from .offload.nvme import StateFile, disk_of, file_bytes, mapped_file, require_room

T = TypeVar("T")
Agree = Callable[[Callable[[], T]], T]  # calls a function on all ranks, and raises on all ranks alike


def open_disk(plan: DiskPlan | None, config: Config, agree: Agree[Disk | None]) -> Disk | None:
    """Make the files of this rank; None if nothing is kept on a disk.

    Raises SwapError, on all ranks alike, if a folder cannot be used or has no room for all ranks of this node.
    """
    if plan is None:
        return None
    files = _Files(plan, config)
    agree(files.require)
    disk = agree(files.open)
    for folder in files.folders:
        size = in_bytes(files.bytes_in(folder))
        info_once(f"offload to files without names in {folder.absolute()}: {size} of each rank")
    return disk


@dataclass(frozen=True)
class _Files:
    """The files that ``plan`` asks for, in the folders of ``config``."""

    plan: DiskPlan
    config: Config

    @property
    def states_folder(self) -> Path | None:
        """The folder for masters and optimizer states; None if they are not kept on a disk."""
        section = self.config.zero_optimization.offload_optimizer
        return _folder(section.nvme_path) if self.plan.states is not None else None

    @property
    def params_folder(self) -> Path | None:
        """The folder for parameter shards; None if they are not kept on a disk."""
        section = self.config.zero_optimization.offload_param
        return _folder(section.nvme_path) if section.device == "nvme" else None

    @property
    def folders(self) -> list[Path]:
        """All folders that are used, each once."""
        return [folder for folder in dict.fromkeys((self.states_folder, self.params_folder)) if folder is not None]

    def bytes_in(self, folder: Path) -> int:
        """Return the bytes that this rank keeps in ``folder``."""
        kept = self.plan.masters, self.plan.states or 0, self.plan.format
        states = file_bytes(*kept) if folder == self.states_folder else 0
        return states + (self.plan.param_bytes if folder == self.params_folder else 0)

    def node_bytes(self, folder: Path) -> int:
        """Return the bytes that all ranks of this node together keep on the disk of ``folder``, in whichever folders."""
        disk = disk_of(folder)
        return _local_ranks() * sum(self.bytes_in(other) for other in self.folders if disk_of(other) == disk)

    def require(self) -> None:
        """Raise SwapError if a disk has no room for all ranks of this node together."""
        for folder in self.folders:
            require_room(folder, self.node_bytes(folder))

    def open(self) -> Disk:
        """Make the files."""
        states = params = None
        if self.states_folder is not None:
            kept = self.plan.masters, self.plan.states or 0, self.plan.format
            states = StateFile(self.states_folder, *kept, node_bytes=self.node_bytes(self.states_folder))
        if self.params_folder is not None:
            size, together = self.plan.param_bytes, self.node_bytes(self.params_folder)
            empty = torch.empty(0, dtype=torch.uint8)
            params = mapped_file(self.params_folder, size, node_bytes=together) if size else empty
        return Disk(states, params)


def _local_ranks() -> int:
    return ranks_here(dist.get_world_size() if dist.is_initialized() else 1)


def _folder(path: str | None) -> Path:
    return Path(path or "").expanduser()
