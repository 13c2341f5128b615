"""The device of a rank, a GPU or the CPU: everything that differs between the two is here.

Outside of zerorun.ops, only this file uses torch.cuda. On a CPU there are no streams: a copy is done when its call returns,
and waiting for it returns at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import sys
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import TopologyError
from ..watch.launch_environment import local_rank
from . import simulated

GPU, CPU = "cuda", "cpu"  # as torch.device.type has them
# TFLOPS of dense 16-bit matrix products, from data sheets. The first whose words are in a GPU's name.
_PEAKS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100": 989, "H800": 989, "A100": 312, "A800": 312, "L40S": 362}
_PEAKS |= {"L40": 181, "L4": 121, "A40": 150, "A10": 125, "V100": 125, "T4": 65, "RTX 4090": 165, "RTX 3090": 71}
_LARGE_BYTES = 1 << 20  # of pinned memory; for less, twice the size does not matter


def default_device() -> torch.device:
    """Return the device of this rank: its GPU, by LOCAL_RANK or what it is to srun and mpirun; the CPU if there is none.

    ZERORUN_DEVICE overrides it: "cpu", "cuda" for the GPU of this rank, "cuda:1", or "simulated" (see simulated.py). Raises
    TopologyError for another value and for a GPU that is not there.
    """
    wanted = os.environ.get("ZERORUN_DEVICE")
    if wanted == simulated.NAME:
        return simulated.DEVICE
    try:
        device = torch.device(wanted or (GPU if gpu_count() else CPU))
    except RuntimeError as error:
        raise _no_such_device(wanted, "which is no device") from error
    if device.type not in (CPU, GPU):
        raise _no_such_device(wanted, "which zerorun does not support")
    return device_of_rank(device)


def device_of_rank(device: torch.device) -> torch.device:
    """Return ``device``, or this rank's GPU for one without an index. Raises TopologyError for a GPU that is not there."""
    if not on_gpu(device):
        return device
    gpus = gpu_count()
    if device.index is None and gpus:
        return torch.device(GPU, local_rank() % gpus)
    if device.index is None or device.index >= gpus:
        raise _no_such_device(str(device), f"but this process sees {gpus or 'no'} GPU{'s' if gpus > 1 else ''}")
    return device


def _no_such_device(wanted: str | None, reason: str) -> TopologyError:
    return TopologyError(
        f"the device (ZERORUN_DEVICE) is {wanted!r}, {reason}. Remedy: unset ZERORUN_DEVICE, or use cpu, cuda or cuda:0."
    )


def gpu_count() -> int:
    """How many GPUs this process can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def on_gpu(where: torch.device | torch.Tensor) -> bool:
    """Return True for a GPU, and for a tensor in its memory."""
    return _type_of(where) == GPU


def on_host(where: torch.device | torch.Tensor) -> bool:
    """Return True for the CPU, and for a tensor in host memory, whose values can be read without waiting."""
    return _type_of(where) == CPU and where != simulated.DEVICE


def is_simulated(device: torch.device) -> bool:
    """Return True for the simulated device. Its tensors are ordinary tensors in host memory."""
    return device == simulated.DEVICE


def queues(device: torch.device) -> bool:
    """Return True if ``device`` does its work asynchronously: for a GPU, and for the simulated device."""
    return on_gpu(device) or is_simulated(device)


def holds(device: torch.device, tensor: torch.Tensor) -> bool:
    """Return True if ``tensor`` is on ``device``."""
    return tensor.device == device or (is_simulated(device) and on_host(tensor))


def _type_of(where: torch.device | torch.Tensor) -> str:
    return (where.device if isinstance(where, torch.Tensor) else where).type


def select(device: torch.device) -> None:
    """Make ``device`` the one that "cuda" means in this process, where collectives go before computation."""
    if on_gpu(device):
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # of NCCL's streams; torch reads it for each communicator
        torch.cuda.set_device(device)


def gpus_have_fp8() -> bool:
    """True if the GPU of this process multiplies in fp8. Of other makers than NVIDIA, their own library says so."""
    return torch.version.cuda is None or torch.cuda.get_device_capability() >= (8, 9)


def gpus_here() -> list[torch.device]:
    """The GPU that "cuda" means in this process, if there is one. The call initialises CUDA."""
    return [torch.device(GPU, torch.cuda.current_device())] if torch.cuda.is_available() else []


def gpus_in_use() -> list[torch.device]:
    """The GPU that "cuda" means, if this process has used one or makes its tensors there. Else CUDA stays uninitialised."""
    return gpus_here() if torch.cuda.is_initialized() or on_gpu(torch.get_default_device()) else []


def is_in_use() -> bool:
    """True if this process has used a GPU: forks of it cannot."""
    return torch.cuda.is_initialized()


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all work that it was given."""
    if on_gpu(device):
        torch.cuda.synchronize(device)


class Clock:
    """Moments of the work of ``device``. A GPU notes them when it comes to them, and nobody waits."""

    def __init__(self, device: torch.device) -> None:
        self._has_events = on_gpu(device)

    def now(self) -> Any:
        """This moment."""
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        """True if it is over."""
        return not self._has_events or bool(moment.query())

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one moment to another. Both must have passed."""
        return float(first.elapsed_time(second)) / 1e3 if self._has_events else second - first


# -- memory ------------------------------------------------------------------------------------------------------------


def host_empty(numel: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Return a tensor [numel] in host memory. ``pinned``: a GPU can read and write it while the program goes on.

    torch's allocator of pinned memory rounds up to a power of two, so that a shard could take twice its bytes. A large
    tensor is therefore a mapping of its own, which CUDA pins. Nothing tracks which copies use it: its owner must keep it
    until they are done.
    """
    flat = _pinned(numel, dtype) if pinned and torch.cuda.is_available() else torch.empty(numel, dtype=dtype)
    if pinned:
        simulated.observer().pin(flat)
    return flat


def _pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    if numel * dtype.itemsize >= _LARGE_BYTES:
        mapped = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_DONTFORK)  # after a fork, the first to write would get other pages than the device has
        # Its owner, as Python would unmap the memory before it tells of the end of ``mapped``: it ends before that.
        owner = (ctypes.c_char * len(mapped)).from_buffer(mapped)
        flat = torch.frombuffer(owner, dtype=dtype)
        if _register(flat, owner):
            return flat
    return torch.empty(numel, dtype=dtype, pin_memory=True)


def pin(flat: torch.Tensor) -> None:
    """Let a GPU read and write the memory of ``flat``, a mapping, while the program goes on, if that can be had."""
    if torch.cuda.is_available():
        _register(flat, flat.untyped_storage())
    simulated.observer().pin(flat)


def _register(flat: torch.Tensor, owner: object) -> bool:
    """Let CUDA pin the memory of ``flat`` for as long as ``owner`` lives. False if it does not."""
    cuda, address = torch.cuda.cudart(), flat.data_ptr()
    done = int(cuda.cudaHostRegister(address, flat.nbytes, 0)) == 0
    if done:
        weakref.finalize(owner, cuda.cudaHostUnregister, address).atexit = False
    else:
        with contextlib.suppress(RuntimeError):  # CUDA keeps the error until it has told it to the next that asks
            torch.ones(1, device=GPU)
    return done


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU's memory that this process could still get; None for a CPU, whose memory is the host's."""
    if not on_gpu(device):
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def give_back_unused(device: torch.device) -> None:
    """Let other processes have the memory of a GPU that torch's allocator keeps and nobody uses."""
    if on_gpu(device):
        torch.cuda.empty_cache()


def most_used_bytes(device: torch.device) -> int:
    """The most bytes that this process has held so far: of a GPU's memory, or of the host's."""
    if on_gpu(device):
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_flops(device: torch.device) -> float | None:
    """The dense 16-bit operations per second that a GPU's data sheet promises; None for one that is not known here."""
    name = torch.cuda.get_device_properties(device).name if on_gpu(device) else ""
    return next((1e12 * peak for word, peak in _PEAKS.items() if word in name), None)


def name_of(device: torch.device, otherwise: str) -> str:
    """Return a GPU's UUID, which is the same in all processes; ``otherwise`` for a CPU, or if torch does not tell."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", otherwise)) if on_gpu(device) else otherwise


# -- random numbers ----------------------------------------------------------------------------------------------------


def gpu_generator(device: torch.device) -> torch.Generator:
    """The default generator of a GPU."""
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def generators(device: torch.device) -> list[torch.Generator]:
    """The default generators that a rank with this device draws from: the CPU's, then that of its GPU."""
    return [torch.default_generator, *([gpu_generator(device)] if on_gpu(device) else [])]


# -- copies beside the computation -------------------------------------------------------------------------------------


def _streams(device: torch.device) -> Any:
    """Return the module with the streams of ``device``: torch.cuda or its simulation; None for a CPU."""
    return torch.cuda if on_gpu(device) else simulated if is_simulated(device) else None


@dataclass
class Arrival:
    """A copy under way. ``event`` marks its end; None if it is done."""

    event: torch.cuda.Event | simulated.Event | None = None

    def synchronize(self) -> None:
        """Wait for the copy."""
        if self.event is not None:
            self.event.synchronize()

    def wait(self) -> None:
        """Make later work of the current stream wait for the copy."""
        if self.event is not None:
            self.event.wait()


def empty_storage(tensor: torch.Tensor, read: Arrival) -> None:
    """Give back the memory behind ``tensor`` and all its views, which stay. ``read``: a copy that may still read it.

    The allocator of a GPU lets nobody have it before the copies that it was kept for are done.
    """
    if isinstance(read.event, simulated.Event):  # no allocator: the copy has to be done now, whoever waits for it
        read.event.stream.run_to(read.event.place)
    tensor.untyped_storage().resize_(0)


@dataclass
class Reading:
    """Numbers [n] on their way to the program."""

    _host: torch.Tensor
    _arrival: Arrival = field(default_factory=Arrival)

    def wait(self) -> list[float]:
        """Return the numbers. On a GPU, wait for what they are computed from."""
        self._arrival.synchronize()
        return list(self._host.tolist())


class CopyStream:
    """Copies that overlap the computation: on a GPU, in a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, _streams(device)
        self._stream = self._cuda.Stream(device) if self._cuda is not None else None

    def follow(self, read: torch.Tensor | None = None) -> None:
        """Make later copies wait for all work that the computation has been given so far.

        ``read``: a tensor of the computation whose memory must not be reused until the copies are done.
        """
        if self._stream is not None:
            self._stream.wait_stream(self._cuda.current_stream(self._device))
            if read is not None:
                _keep(read, self._stream)

    def lead(self, made: torch.Tensor | None = None) -> None:
        """Make later computation wait for all copies so far.

        ``made``: a tensor that was allocated among the copies and belongs to the computation from here on.
        """
        if self._stream is not None:
            current = self._cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            if made is not None:
                _keep(made, current)

    def synchronize(self) -> None:
        """Wait until all copies so far are done."""
        if self._stream is not None:
            self._stream.record_event().synchronize()

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager: work that its block begins goes to the stream of the copies."""
        return self._cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        """Begin to copy ``source`` to ``target``. On a CPU the copy is done on return."""
        with self.copying():
            target.copy_(source, non_blocking=self._stream is not None)
        return Arrival(self._stream.record_event() if self._stream is not None else None)

    def read(self, numbers: torch.Tensor) -> Reading:
        """Begin to read ``numbers`` [n] of the computation, which goes on."""
        if self._stream is None:
            return Reading(numbers)
        self.follow(read=numbers)
        host = host_empty(numbers.numel(), numbers.dtype, pinned=True)
        return Reading(host, self.copy(numbers, host))


def _keep(tensor: torch.Tensor, stream: Any) -> None:
    """Do not let the memory of ``tensor`` be reused before ``stream`` has done the work that it was given."""
    if isinstance(stream, simulated.SimulatedStream):
        simulated.keep(tensor, stream)
    else:
        tensor.record_stream(stream)


# -- what the report tells ---------------------------------------------------------------------------------------------


def describe_gpus() -> dict[str, Any]:
    """``devices`` by index; ``peer_access`` [from][to]; ``trouble``: why torch sees no GPU, None if it sees one."""
    count = gpu_count()
    if not count:
        return {"devices": [], "peer_access": [], "trouble": _trouble()}
    devices = []
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        capability = f"{found.major}.{found.minor}"
        devices.append({"name": found.name, "memory": found.total_memory, "capability": capability})
    access = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    return {"devices": devices, "peer_access": access, "trouble": None}


def _trouble() -> str | None:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).splitlines()[0]
    return "torch sees no GPU"


def nccl_version() -> str | None:
    """The version of the NCCL that torch brings; None if it has none."""
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def on_device(value: Any, device: torch.device) -> Any:
    """Return a batch, or anything else that holds tensors, with its tensors on ``device``."""
    return _pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)
