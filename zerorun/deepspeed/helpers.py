"""Small functions that scripts import from DeepSpeed."""

from __future__ import annotations

import enum
import logging
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..distributed.device import default_device, on_host
from ..log import is_rank_zero, own_rank, script_logger, warn_once
from ..watch.launch_environment import launched, local_rank
from .accelerator import get_accelerator

DeepSpeedOptimizer = torch.optim.Optimizer  # engine.optimizer is one of torch's; it shards, and wraps nothing
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK, CROSS_SIZE = "CROSS_RANK", "CROSS_SIZE"
_GIB = 1 << 30


class OffloadDeviceEnum(str, enum.Enum):
    """Where offload may put things."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Put into the environment, in torchrun's variables, what mpirun or srun has said about this rank's place.

    MASTER_ADDR has to be there already, unless srun tells it. ``verbose`` has no effect.
    """
    for name, value in {"MASTER_PORT": str(distributed_port), **launched(os.environ)}.items():
        os.environ.setdefault(name, value)


# -- logging -----------------------------------------------------------------------------------------------------


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on the given ranks; on all of them for None or [-1]."""
    if ranks is None or -1 in ranks or own_rank() in ranks:
        script_logger.log(level, "%s", message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` as ``log_dist`` does, the first time it is given."""
    if message not in _logged:
        _logged.add(message)
        log_dist(message, ranks, level)


_logged: set[str] = set()


def warning_once(message: str, *args: Any) -> None:
    """Log a warning on rank 0, the first time it is given."""
    warn_once(message % args if args else message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger, by default of ``deepspeed.logger``: "debug", "info", "warning", "error" or "critical".

    Raises ValueError for another word.
    """
    level = logging.getLevelName(log_level_str.upper())
    if not isinstance(level, int):
        raise ValueError(f"{log_level_str!r} is not a level of logging. Remedy: debug, info, warning, error or critical.")
    (custom_logger or script_logger).setLevel(level)


def see_memory_usage(message: str, force: bool = False) -> None:
    """If ``force``, log ``message`` with the memory of rank 0's device and of its host, in GiB."""
    if not force or not is_rank_zero():
        return
    accelerator, host = get_accelerator(), psutil.virtual_memory()
    used = ""
    if not on_host(default_device()):
        now, most = accelerator.memory_allocated(), accelerator.max_memory_allocated()
        used = f"device {now / _GIB:.2f} GiB, most {most / _GIB:.2f}; "
    script_logger.info(
        "%s: %shost %.2f of %.2f GiB (%.0f %%)", message, used, host.used / _GIB, host.total / _GIB, host.percent
    )


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> str | None:
    """Log what the newest engine has sent, on rank 0, and how fast if ``comms_logger`` is on. All ranks may call it.

    With ``return_dict``, return the text.
    """
    from .entry import newest_engine  # entry makes engines, which most scripts that import this module never do

    engine = newest_engine()
    report = {} if engine is None else engine.communication_report()
    observer = None if engine is None else engine.observer
    text = str(report or "") if observer is None else observer.communication_table(report)
    if is_rank_zero() and text:
        script_logger.info("%s", text)
    return text if return_dict else None


# -- tensors -----------------------------------------------------------------------------------------------------


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return ``item`` with its tensors on ``device``, in nested dicts and lists; with a criterion, those it chooses."""
    if isinstance(item, torch.Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, dict):
        return {key: move_to_device(value, device, criterion_func) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        moved = [move_to_device(value, device, criterion_func) for value in item]
        return moved if isinstance(item, list) else tuple(moved)
    return item


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return ``item`` with copies of its tensors on ``device``, for torch.save, which writes all that views are of.

    What is one tensor under two names stays so, unlike in DeepSpeed: trainers would write tied weights twice.
    """
    return _clone(item, device, {})


def _clone(item: Any, device: Any, copies: dict[Any, torch.Tensor]) -> Any:
    """``copies``: what has been copied, by the memory that it is."""
    if isinstance(item, torch.Tensor):
        has_memory = type(item) in (torch.Tensor, torch.nn.Parameter) and item.numel() > 0 and not item.is_meta
        place = (item.data_ptr(), item.shape, item.stride(), item.dtype, item.device) if has_memory else id(item)
        if place not in copies:
            copies[place] = item.detach().to(device, copy=True)
        return copies[place]
    if isinstance(item, dict):
        return type(item)({key: _clone(value, device, copies) for key, value in item.items()})
    if isinstance(item, (list, tuple)):
        cloned = [_clone(value, device, copies) for value in item]
        return cloned if isinstance(item, list) else tuple(cloned)
    return item


@contextmanager
def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:
    """In the block, modules are made on ``device`` with parameters of ``dtype``; on "meta" they take no memory."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def zero_wrapper_for_fp_tensor_constructor(function: Any, target_fp_dtype: Any = None, target_device: Any = None) -> Any:
    """Return ``function``: ``zero.Init`` leaves constructors alone. transformers replaces this to be sure of it."""
    return function


def instrument_w_nvtx(function: Any) -> Any:
    """Return ``function``, to be shown under its name in profiles."""
    return torch.profiler.record_function(function.__qualname__)(function)


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# -- deepspeed.comm, beyond torch.distributed --------------------------------------------------------------------


def get_local_rank() -> int:
    """This rank's number on its host."""
    return local_rank()


def get_world_group() -> dist.ProcessGroup | None:
    """The process group of all ranks."""
    return dist.group.WORLD


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """Make a device mesh. All ranks must call it."""
    kind = "cpu" if on_host(default_device()) else "cuda"
    return init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)


# -- operators: whether they could be built, which is asked before a test or an option is offered -------------------


class AsyncIOBuilder:
    """The reading and writing of disks, which zerorun has built in. It is asked for and never loaded."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """True: ``zero_optimization.offload_optimizer.device`` may be "nvme"."""
        return True

    def load(self, verbose: bool = True) -> Any:
        """Raise NotImplementedError: there is no handle to read and write by."""
        raise NotImplementedError(
            "zerorun reads and writes disks by itself, and has no handles for it. Remedy: name the disk in "
            "zero_optimization.offload_optimizer and offload_param."
        )


COMPATIBLE_OPS = {AsyncIOBuilder.NAME: True}
