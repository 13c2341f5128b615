"""Measuring this machine: what the kernels of a block take here, for GPUs of which no run was published, and for CPUs.

Ranks on CPUs share cores and memory, so that each is slower than one alone: as many as will train measure at once.
``python -m zerorun.launcher.cli --standalone --nproc-per-node 4 -m zerorun.planner.this_machine`` is what --ranks 4
starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from zerorun.launcher.foreign_options import without_torchrun_defaults

from ..distributed.device import default_device, free_bytes, gpu_count, host_empty, on_gpu
from ..distributed.topology import Topology
from ..distributed.transport import world
from ..distributed.transport.communicator import Communicator
from ..distributed.transport.process_group import init_distributed
from ..errors import LaunchError
from ..memory.limits import node_room
from ..ops.single_pass import Adam
from .calibration import fitted, save_local
from .candidate import KernelGeneration, RunCandidate
from .hardware import GB, LOCAL, TB, Gpu, gpu_of, local_file, local_values
from .kernels import HBM, KernelModel
from .links import NVLINK
from .model_shape import ModelShape

_STRETCHES = 5  # of each measurement; the one in the middle counts
_STRETCH_SECONDS = 0.6  # so long that a core is as fast as in training
_UPDATED = 1 << 21  # elements that an update is measured with
_MESSAGES = 1 << 14, 1 << 24  # bytes that are gathered, for the time that each collective takes and for the rate
_BEFORE_SUM = 512  # rows and columns of a product that ranks compute before they add up
_LIMIT_SECONDS = 600
_LIMITS = 0.2, 1.5  # of an efficiency that can be meant


@dataclass(frozen=True)
class _Sizes:
    """Of what is measured: matrices, bytes that are copied, and blocks with their tokens.

    There are as many blocks that the caches of a core do not keep their weights, as they do not in training.
    """

    matrices: tuple[int, ...]
    copied: int
    shape: ModelShape
    sequence: int


_ON_CPU = _Sizes((256, 512, 1024), 64 << 20, ModelShape(6, 512, 8, 8, 64, 1536, 3, 1000), 512)
_ON_GPU = _Sizes((4096, 8192), 1 << 30, ModelShape(1, 4096, 32, 32, 128, 11008, 3, 1000), 4096)


class _TrialNorm(nn.Module):
    """As models write it: a kernel for each operation, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions (arXiv:2104.09864), as models write them. ``angles``: [length, width of a head]."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class _TrialBlock(nn.Module):
    """A block of a decoder, as an eager module."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.hidden
        self.norms = nn.ModuleList(_TrialNorm(width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norms[0](x)
        q, k, v = (part(inner).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv)
        angles = torch.zeros(q.shape[-2:], dtype=x.dtype, device=x.device)
        q, k = _turned(q, angles), _turned(k, angles)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        inner = self.norms[1](x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


def calibrate(ranks: int) -> Iterator[str]:
    """Measure this machine with ``ranks`` at once, and keep what was found. Takes about a minute. Yields lines on it.

    Raises LaunchError if several ranks do not come to an end.
    """
    if ranks == 1:
        measure(1)
    else:
        launcher = [sys.executable, "-m", "zerorun.launcher.cli", "--standalone"]
        command = [*launcher, "--nproc-per-node", str(ranks), "-m", __name__]
        environment = {**without_torchrun_defaults(os.environ), "PYTHONSAFEPATH": "1"}  # no queue.py of this folder
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
        if done.returncode:
            raise LaunchError(f"{ranks} ranks could not measure this machine: {done.stderr.strip()[-2000:]}")
    gpu, values = gpu_of(LOCAL, ranks), local_values(ranks)
    kind, rate = ("fp32", gpu.matmul / 2) if gpu.is_host else ("bf16", gpu.matmul)
    yield f"matrix products in {kind} {rate / TB:.3g} TFLOP/s, of which a block's reach {values['efficiency']:.2f}"
    yield f"attention {gpu.attention[0] * gpu.peak / TB:.3g} TFLOP/s, device memory {gpu.hbm * HBM / GB:.3g} GB/s"
    host, update = values["host"] * 1e3, values["update"] * 1e9
    yield f"the host takes {host:.3g} ms for a block, an update {update:.3g} ns for a parameter"
    if gpu.latency:
        yield f"a gather takes {gpu.latency * 1e6:.3g} us, and {gpu.nvlink * NVLINK / GB:.3g} GB/s"
        yield f"a sum over ranks takes {gpu.sum_latency * 1e6:.3g} us, and {gpu.sum_rate / GB:.3g} GB/s"
    yield f"kept in {local_file()}: plan with --gpus {ranks}x{LOCAL}"


def measure(ranks: int) -> None:
    """Measure the default device, on all ``ranks`` of the process group at once. The first one keeps what was found."""
    device = default_device()
    clock = _Clock(device, ranks)
    sizes = _ON_GPU if on_gpu(device) else _ON_CPU
    dtype = torch.bfloat16 if on_gpu(device) else torch.float32
    products = max(2.0 * n**3 / clock.seconds(_product(n, dtype, device)) for n in sizes.matrices)
    rate = products if on_gpu(device) else 2 * products  # the model halves it for fp32
    memory = 2 * sizes.copied / clock.seconds(_copy(sizes.copied, device, device)) / HBM
    gathers, sums = _links(clock, memory / 4, sizes.copied)
    gpu = Gpu(
        name=LOCAL,
        peak=rate,
        matmul=rate,
        fp8=1.0,
        memory=_memory(device, ranks),
        hbm=memory,
        nvlink=gathers.rate / NVLINK,
        multiprocessors=1,  # waves of tiles are in what is measured
        attention=(_attention(clock, sizes, dtype) / rate,) * 2,
        nics=memory / 4,
        host_link=sizes.copied / clock.seconds(_copy(sizes.copied, torch.device("cpu"), device)),
        latency=gathers.latency,
        sum_latency=sums.latency,
        sum_rate=sums.rate,
        processes=ranks,
        cores=0 if on_gpu(device) else len({core for cores in _cores_of_ranks(ranks) for core in cores}),
        is_host=not on_gpu(device),
    )
    blocks = sizes.shape.layers
    host = clock.seconds(_step(replace(sizes.shape, hidden=64, ffn=64), 8, dtype, device)) / blocks
    constants = replace(fitted().constants, host=host)
    precision = "bf16" if on_gpu(device) else "fp32"
    candidate = RunCandidate(1, sequence=sizes.sequence, precision=precision)
    forward, backward = KernelModel(gpu, KernelGeneration.FLASH, 1.0, constants).block(sizes.shape, candidate)
    work = forward + backward
    left = clock.seconds(_step(sizes.shape, sizes.sequence, dtype, device)) / blocks - work.attention - work.traffic
    efficiency = min(max(work.products / left if left > 0 else _LIMITS[1], _LIMITS[0]), _LIMITS[1])
    update = clock.seconds(_update(device)) / _UPDATED
    if ranks == 1 or world.rank() == 0:
        save_local(gpu, efficiency, host, update)


def _memory(device: torch.device, ranks: int) -> float:
    """Return the bytes that each of ``ranks`` can have: a GPU's, which it may share, or its part of this machine's."""
    if on_gpu(device):
        return float(free_bytes(device) or 0) / -(-ranks // gpu_count())
    return float(node_room() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / ranks


def _cores_of_ranks(ranks: int) -> list[list[int]]:
    """Return the cores that each rank may use."""
    own = sorted(os.sched_getaffinity(0))
    return world.gather_values(own) if ranks > 1 else [own]


class _Clock:
    """Times what all ranks do at once."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self.device, self.ranks = device, ranks

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of a call on the slowest rank, for which others wait. The first call does not count."""
        run()
        count = max(1, int(_STRETCH_SECONDS / self._slowest(world.seconds_of(run, 1, self.device))))
        return median(self._slowest(world.seconds_of(run, count, self.device)) for _ in range(_STRETCHES))

    def _slowest(self, seconds: float) -> float:
        return max(world.gather_values(seconds)) if self.ranks > 1 else seconds


@dataclass(frozen=True)
class _Measured:
    """What a collective takes: seconds without bytes, and bytes per second and rank, as a ring sends them."""

    latency: float = 0.0
    rate: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float], rounds: int, ranks: int) -> _Measured:
        """``seconds``: with _MESSAGES bytes. ``rounds`` of the ring."""
        moved = [rounds * size * (ranks - 1) / ranks for size in _MESSAGES]
        rate = (moved[1] - moved[0]) / max(seconds[1] - seconds[0], 1e-9)
        return cls(max(seconds[0] - moved[0] / rate, 1e-6), rate)


def _links(clock: _Clock, guess: float, nbytes: int) -> tuple[_Measured, _Measured]:
    """Return what a gather takes, and what a sum over ranks does."""
    if clock.ranks == 1:
        return _Measured(0.0, _between_gpus(clock, nbytes) if on_gpu(clock.device) else guess), _Measured()
    topology = Topology.create(clock.ranks, world.rank(), device_type=clock.device.type)
    communicator = Communicator(topology, clock.device)
    gathers = [clock.seconds(_gather(communicator, size // 4 // clock.ranks)) for size in _MESSAGES]
    # Tensor ranks compute between two sums, and do not end that at the same time.
    before = _product(_BEFORE_SUM, torch.float32, clock.device)
    computed = clock.seconds(before)
    sums = [clock.seconds(_after(before, _sum(communicator, size // 4))) - computed for size in _MESSAGES]
    communicator.fence()
    return _Measured.of(gathers, 1, clock.ranks), _Measured.of(sums, 2, clock.ranks)


def _gather(communicator: Communicator, part: int) -> Callable[[], object]:
    """``part``: elements of each rank."""
    bounds = [part * rank for rank in range(world.size() + 1)]
    buffer = torch.zeros(bounds[-1], device=communicator.device)
    return lambda: communicator.dense.shard.all_gather(buffer, bounds, "measuring").wait()


def _sum(communicator: Communicator, numel: int) -> Callable[[], object]:
    """As tensor ranks sum what they have computed."""
    buffer = torch.zeros(numel, device=communicator.device)
    return lambda: communicator.dense.shard.sum_of(buffer, "measuring")


def _after(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    def both() -> None:
        first()
        second()

    return both


def _product(n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return lambda: left @ right


def _copy(nbytes: int, source: torch.device, target: torch.device) -> Callable[[], object]:
    pinned = source.type != target.type
    given = (
        host_empty(nbytes, torch.uint8, pinned=True) if pinned else torch.zeros(nbytes, dtype=torch.uint8, device=source)
    )
    into = torch.empty(nbytes, dtype=torch.uint8, device=target)
    return lambda: into.copy_(given, non_blocking=True)


def _between_gpus(clock: _Clock, nbytes: int) -> float:
    """Return the bytes per second from one GPU to another; of the device's own memory if there is only one."""
    second = torch.device("cuda", min(1, gpu_count() - 1))
    return nbytes / clock.seconds(_copy(nbytes, clock.device, second))


def _attention(clock: _Clock, sizes: _Sizes, dtype: torch.dtype) -> float:
    """Return the FLOPs per second of causal attention, forward and backward together."""
    shape, length = sizes.shape, sizes.sequence
    q, k, v = (
        torch.randn(1, shape.heads, length, shape.head_dim, device=clock.device).to(dtype).requires_grad_()
        for _ in range(3)
    )
    flops = 3.5 * 2.0 * length * length * shape.heads * shape.head_dim
    return flops / clock.seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward())


def _step(shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    blocks = nn.Sequential(*(_TrialBlock(shape) for _ in range(shape.layers))).to(device=device, dtype=dtype)
    given = torch.randn(1, tokens, shape.hidden, device=device).to(dtype).requires_grad_()
    return lambda: blocks(given).sum().backward()


def _update(device: torch.device) -> Callable[[], object]:
    param = nn.Parameter(torch.zeros(_UPDATED, device=device))
    param.grad = torch.ones_like(param)
    return Adam([param], lr=1e-3).step


if __name__ == "__main__":
    init_distributed()
    measure(world.size())
