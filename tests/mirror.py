"""A process group of one process: every other rank does what this one does, with the same numbers.

So a rank of any number can be run alone, and what it does be counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from zerorun.distributed.transport import nccl
from zerorun.distributed.transport.communicator import Channels
from zerorun.distributed.transport.process_group import shutdown

NAME = "mirror"


class Done(dist.Work):
    """Nothing is left to do."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Mirror(dist.ProcessGroup):
    """The calls that zerorun makes, for tensors in host memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        with _disable_current_modes():
            torch._foreach_mul_(tensors, self._size)
        return Done()

    def allgather(self, found: list[list[torch.Tensor]], mine: list[torch.Tensor], opts: Any = None) -> dist.Work:
        with _disable_current_modes():
            torch._foreach_copy_(found[0], mine * self._size)
        return Done()

    def _allgather_base(self, full: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        with _disable_current_modes():
            full.view(self._size, -1).copy_(own.clone())
        return Done()

    def _reduce_scatter_base(self, own: torch.Tensor, full: torch.Tensor, opts: Any = None) -> dist.Work:
        with _disable_current_modes():
            own.copy_(full.view(self._size, -1)[self._rank] * self._size)
        return Done()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        return Done()


@contextlib.contextmanager
def mirrored(rank: int, size: int) -> Iterator[None]:
    """In the block this process is ``rank`` of ``size``, and its transport is NCCL's. A group that it is in, it leaves.

    Its own values are those that count, as those of the first rank do: nobody sends it others.
    """
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, Mirror, devices=["cpu"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "group_of", lambda group: group)
        patch.setattr(Channels, "is_first", True)
        try:
            yield
        finally:
            dist.destroy_process_group()
