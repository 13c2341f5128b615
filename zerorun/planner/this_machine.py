"""Measuring this machine: what the kernels of a block take here, for GPUs of which no run was published, and for CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from ..distributed.device import default_device, free_bytes, gpu_count, host_empty, on_gpu, synchronize
from .calibration import fitted, save_local
from .candidate import KernelGeneration, RunCandidate
from .hardware import LOCAL, Gpu
from .kernels import HBM, KernelModel
from .links import NVLINK
from .model_shape import ModelShape

_STRETCHES = 5  # of each measurement; the best counts, as others may use the machine
_LIMITS = 0.2, 1.5  # of an efficiency that can be meant


@dataclass(frozen=True)
class _Sizes:
    """Of what is measured: matrices, bytes that are copied, and a block with its tokens."""

    matrices: tuple[int, ...]
    copied: int
    shape: ModelShape
    sequence: int


_ON_CPU = _Sizes((256, 512, 1024), 64 << 20, ModelShape(1, 512, 8, 8, 64, 1536, 3, 1000), 512)
_ON_GPU = _Sizes((4096, 8192), 1 << 30, ModelShape(1, 4096, 32, 32, 128, 11008, 3, 1000), 4096)


@dataclass(frozen=True)
class MeasuredMachine:
    """``products``: FLOPs per second of matrix products in ``precision``. ``efficiency``: of these, that a block reaches.

    ``gpu``: the device, or the CPU as if it were a GPU. ``host``: seconds in which the host issues a block.
    """

    gpu: Gpu
    precision: str
    products: float
    efficiency: float
    host: float


class _TrialBlock(nn.Module):
    """A block of a decoder, as an eager module."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.hidden
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, shape.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.ffn, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        inner = self.norms[1](x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


def measure() -> MeasuredMachine:
    """Measure the default device, and keep what was found for ``--gpus Nxlocal``. Takes less than a minute."""
    device = default_device()
    sizes = _ON_GPU if on_gpu(device) else _ON_CPU
    dtype = torch.bfloat16 if on_gpu(device) else torch.float32
    products = max(2.0 * n**3 / _best(_product(n, dtype, device), device) for n in sizes.matrices)
    rate = products if on_gpu(device) else 2 * products  # the model halves it for fp32
    memory = 2 * sizes.copied / _best(_copy(sizes.copied, device, device), device) / HBM
    link = sizes.copied / _best(_copy(sizes.copied, torch.device("cpu"), device), device)
    gpu = Gpu(
        name=LOCAL,
        peak=rate,
        matmul=rate,
        fp8=1.0,
        memory=float(free_bytes(device) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        hbm=memory,
        nvlink=(_between_gpus(sizes.copied) if on_gpu(device) else memory / 4) / NVLINK,
        multiprocessors=1,  # waves of tiles are in what is measured
        attention=(_attention(sizes, dtype, device) / rate,) * 2,
        nics=memory / 4,
        host_link=link,
    )
    host = _best(_step(replace(sizes.shape, hidden=64, ffn=64), 8, dtype, device), device)
    constants = replace(fitted().constants, host=host)
    precision = "bf16" if on_gpu(device) else "fp32"
    candidate = RunCandidate(1, sequence=sizes.sequence, precision=precision)
    forward, backward = KernelModel(gpu, KernelGeneration.FLASH, 1.0, constants).block(sizes.shape, candidate)
    work = forward + backward
    left = _best(_step(sizes.shape, sizes.sequence, dtype, device), device) - work.attention - work.traffic
    efficiency = min(max(work.products / left if left > 0 else _LIMITS[1], _LIMITS[0]), _LIMITS[1])
    save_local(gpu, efficiency, host)
    return MeasuredMachine(gpu, precision, products, efficiency, host)


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of a call, after one that does not count."""
    found = []
    for _ in range(_STRETCHES + 1):
        synchronize(device)
        begun = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - begun)
    return min(found[1:])


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


def _between_gpus(nbytes: int) -> float:
    """Return the bytes per second from one GPU to another; of the device's own memory if there is only one."""
    second = torch.device("cuda", min(1, gpu_count() - 1))
    return nbytes / _best(_copy(nbytes, torch.device("cuda", 0), second), second)


def _attention(sizes: _Sizes, dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOPs per second of causal attention, forward and backward together."""
    shape, length = sizes.shape, sizes.sequence
    q, k, v = (
        torch.randn(1, shape.heads, length, shape.head_dim, device=device).to(dtype).requires_grad_() for _ in range(3)
    )
    flops = 3.5 * 2.0 * length * length * shape.heads * shape.head_dim
    return flops / _best(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward(), device)


def _step(shape: ModelShape, tokens: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    block = _TrialBlock(shape).to(device=device, dtype=dtype)
    given = torch.randn(1, tokens, shape.hidden, device=device).to(dtype).requires_grad_()
    return lambda: block(given).sum().backward()
