"""How long a collective may take: all process groups of engines have the limit of the process group of all ranks.

Only saving has a group with a longer one, since a disk may take its time (checkpoint/ranks.py).

torch gives every group that is made later a default of its own (1,800 s with gloo, 600 s with NCCL alone), whatever the
first one was told. With NCCL the limit is that of its watchdog, which ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

DEFAULT = timedelta(seconds=1800)


def time_limit() -> timedelta:
    """Return the limit of the process group of all ranks; DEFAULT if there is none, or it does not tell."""
    world = dist.group.WORLD
    backends = [] if world is None else [world._get_backend(device) for device in world._device_types]
    return max(filter(None, map(_limit_of, backends)), default=DEFAULT)


def _limit_of(backend: Any) -> timedelta | None:
    try:
        limit: timedelta = backend.options._timeout
    except (AttributeError, RuntimeError):  # other backends than gloo and NCCL need not have any options
        return None
    return limit


def set_time_limit(groups: Iterable[dist.ProcessGroup], limit: timedelta) -> None:
    """Set the limit of ``groups``, for collectives that begin later. Backends other than gloo and NCCL keep theirs."""
    for group in groups:
        backends = [group._get_backend(device) for device in group._device_types]
        if any(hasattr(backend, "_set_default_timeout") for backend in backends):
            c10d._set_pg_timeout(limit, group)
