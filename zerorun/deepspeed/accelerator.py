"""``deepspeed.accelerator``: one object that answers for this rank's device, a GPU or the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import psutil
import torch

from ..distributed.device import default_device, on_host, synchronize
from ..watch.launch_environment import ranks_here, world_size_in


class Memory:
    """Bytes of memory: of a GPU as torch's allocator counts them; of a CPU, those of this process and its host."""

    _module: Any
    _on_host: bool

    def memory_allocated(self, device_index: Any = None) -> int:
        """Bytes in use now."""
        return psutil.Process().memory_info().rss if self._on_host else self._module.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: Any = None) -> int:
        """The most bytes that were in use. A CPU's is that of now."""
        return self.memory_allocated() if self._on_host else self._module.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: Any = None) -> int:
        """Bytes that torch's allocator has."""
        return self.memory_allocated() if self._on_host else self._module.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: Any = None) -> int:
        """The most bytes that torch's allocator has had. A CPU's are those of now."""
        return self.memory_allocated() if self._on_host else self._module.max_memory_reserved(device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        """Begin anew to look for the most bytes in use. Nothing on a CPU."""
        if not self._on_host:
            self._module.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: Any = None) -> dict[str, Any]:
        """The statistics of torch's allocator; {} on a CPU."""
        return {} if self._on_host else self._module.memory_stats(device_index)

    def total_memory(self, device_index: Any = None) -> int:
        """Bytes that the device has."""
        return psutil.virtual_memory().total if self._on_host else self._module.mem_get_info(device_index)[1]

    def available_memory(self, device_index: Any = None) -> int:
        """Bytes that could still be had."""
        return psutil.virtual_memory().available if self._on_host else self._module.mem_get_info(device_index)[0]

    def empty_cache(self) -> None:
        """Give back what torch's allocator keeps. Nothing on a CPU."""
        if not self._on_host:
            self._module.empty_cache()


class RandomNumbers:
    """The generators of random numbers."""

    _module: Any

    def random(self) -> Any:
        """The module torch.random."""
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        """Seed the generator of the device."""
        return self._module.manual_seed(seed) if hasattr(self._module, "manual_seed") else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices of this process."""
        return self._module.manual_seed_all(seed) if hasattr(self._module, "manual_seed_all") else torch.manual_seed(seed)

    def initial_seed(self) -> int:
        """The seed of the device's generator."""
        return int(getattr(self._module, "initial_seed", torch.initial_seed)())

    def get_rng_state(self, device_index: Any = None) -> torch.Tensor:
        """The state of the device's generator."""
        get = getattr(self._module, "get_rng_state", None)
        return torch.get_rng_state() if get is None else get() if device_index is None else get(device_index)

    def set_rng_state(self, new_state: torch.Tensor, device_index: Any = None) -> None:
        """Set the state of the device's generator."""
        put = getattr(self._module, "set_rng_state", None)
        if put is None:
            torch.set_rng_state(new_state)
        elif device_index is None:
            put(new_state)
        else:
            put(new_state, device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of one device."""
        of_gpus = getattr(self._module, "default_generators", None)
        return of_gpus[device_index] if of_gpus else torch.default_generator


# Name of a type of tensors -> its dtype.
_TENSORS = {
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32, "HalfTensor": torch.float16, "IntTensor": torch.int32, "LongTensor": torch.int64,
}  # fmt: skip


class Marks:
    """Ranges in a profile, work that waits for the device, and how the environment chooses devices."""

    _module: Any
    _on_host: bool

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        """Begin a range of NVTX, which profiles show. Nothing on a CPU. ``domain`` and ``category`` have no effect."""
        return None if self._on_host else self._module.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> Any:
        """End the range that began last. Nothing on a CPU."""
        return None if self._on_host else self._module.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call ``callback`` when the device is there: at once on a CPU, or where the GPU is in use already."""
        return callback() if self._on_host else self._module._lazy_call(callback)

    def visible_devices_envs(self) -> list[str]:
        """The variables by which a process is told which devices it sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Iterable[int]) -> None:
        """Write these variables into an environment."""
        current_env.update(dict.fromkeys(self.visible_devices_envs(), ",".join(map(str, local_accelerator_ids))))


class Accelerator(Memory, RandomNumbers, Marks):
    """The device of this rank, with the methods that clients of DeepSpeed call. Others raise AttributeError."""

    def __init__(self, kind: str) -> None:
        """``kind``: the type of the device, "cuda" or "cpu"."""
        self._kind, self._on_host = kind, kind == "cpu"
        self._name, self._communication_backend_name = kind, "gloo" if self._on_host else "nccl"
        self._module = torch.get_device_module(kind)

    def __getattr__(self, name: str) -> Any:
        """Look up on torch's module of the device what is not here: streams, events. And types of tensors, made there."""
        if name in _TENSORS:
            own = partial(torch.tensor, dtype=_TENSORS[name], device=self._kind)
            return getattr(torch, name) if self._on_host else own
        if name.startswith("_") or not hasattr(self._module, name):
            raise AttributeError(f"zerorun's accelerator, which is {self._kind}, has no {name!r}", name=name, obj=self)
        return getattr(self._module, name)

    # -- devices ---------------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """True: this rank can train on it."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """The name as torch.device takes it: "cuda", "cuda:1", or "cpu"."""
        return self._kind if device_index is None or self._on_host else f"{self._kind}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        """A block in which this device is the current one."""
        return nullcontext() if self._on_host or device_index is None else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make this device the current one."""
        if not self._on_host:
            self._module.set_device(device_index)

    def current_device(self) -> Any:
        """The number of the current GPU; "cpu" on a CPU, so that it can be given to ``tensor.to``."""
        return self._kind if self._on_host else self._module.current_device()

    def current_device_name(self) -> str:
        """The name of the current device, with its number."""
        return self._kind if self._on_host else f"{self._kind}:{self._module.current_device()}"

    def device_count(self) -> int:
        """GPUs that this process sees. On a CPU, the ranks of this host, as DeepSpeed counts them."""
        return ranks_here(world_size_in(os.environ)) if self._on_host else self._module.device_count()

    def synchronize(self, device_index: Any = None) -> None:
        """Wait until the device has done all work that it was given."""
        synchronize(torch.device(self.current_device_name()))

    def is_synchronized_device(self) -> bool:
        """True if work is done when a call returns, as on a CPU."""
        return self._on_host

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is on a device of this kind."""
        return tensor.device.type == self._kind

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor in pinned memory; as it is without a GPU."""
        return tensor if self._on_host else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is in pinned memory."""
        return tensor.is_pinned()

    # -- what it can do --------------------------------------------------------------------------------------------

    def communication_backend_name(self) -> str:
        """Which backend ranks exchange by: "nccl" or "gloo"."""
        return self._communication_backend_name

    def is_bf16_supported(self) -> bool:
        """True if bf16 can be computed in."""
        return self._on_host or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """True if fp16 can be computed in."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that can be trained in."""
        bf16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *bf16]

    def is_triton_supported(self) -> bool:
        """True if Triton's kernels run on it."""
        return not self._on_host


@cache
def get_accelerator() -> Accelerator:
    """The accelerator of this process. ``ZERORUN_DEVICE=cpu`` makes it the CPU where there is a GPU."""
    device = default_device()
    return Accelerator("cpu" if on_host(device) else device.type)
