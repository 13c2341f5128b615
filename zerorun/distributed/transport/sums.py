"""Sums of what ranks have sent, always in ascending order of ranks and in fp32, and the buffers to receive into.

So every run and every stage has the same bits. The sum of squares of what a rank has, before ranks sum it, is here, too.
"""

from __future__ import annotations

import torch

from ..device import CPU
from ..layout import aligned_bytes

# Elements that a sum reads from a peer at a time: few enough to be in the processor's cache when they are added.
STRETCH = 262144
# Elements summed in fp32 before the sum goes on in fp64: keeps the relative error near 1e-7 for tensors of any size.
_ROW = 4096


class BufferPool:
    """Scratch buffers that are used again and again, so that the steady state allocates nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []
        self.bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of ``numel`` elements; contents undefined. Give it back with ``give``."""
        size = numel * dtype.itemsize
        best = best_fit([buffer.numel() for buffer in self._free], size)
        if best is not None:
            return self._free.pop(best)[:size].view(dtype)
        buffer = torch.empty(aligned_bytes(size), dtype=torch.uint8, device=self._device)
        self.bytes += buffer.numel()
        return buffer[:size].view(dtype)

    def give(self, view: torch.Tensor) -> None:
        """Return a buffer taken before."""
        storage = view.untyped_storage()
        self._free.append(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))


class PoolSizes:
    """What a BufferPool on which this is tried would have, with the bytes of a buffer in its place."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> int:
        """The bytes of the buffer that would be taken. Give it back with ``give``."""
        size = numel * dtype.itemsize
        best = best_fit(self._free, size)
        if best is not None:
            return self._free.pop(best)
        made = aligned_bytes(size)
        self.bytes += made
        return made

    def give(self, made: int) -> None:
        """Return a buffer taken before."""
        self._free.append(made)


def best_fit(free: list[int], size: int) -> int | None:
    """Return the index of the smallest of ``free`` that has ``size`` bytes, the first of several; None if none has."""
    fitting = [(bytes, index) for index, bytes in enumerate(free) if bytes >= size]
    return min(fitting)[1] if fitting else None


class Stretches:
    """Where a sum puts what it reads of each peer, a stretch at a time. They are as large as the largest has been.

    Sums are carried out when the peers have come, in any order: what they need must not depend on it.
    """

    def __init__(self, peers: int) -> None:
        self._peers = peers
        self._buffers: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """[numel] for each peer; contents undefined. Valid until it is called again."""
        if not self._buffers or self._buffers[0].numel() < min(STRETCH, numel) * dtype.itemsize:
            size = stretch_bytes(numel, dtype)
            self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(self._peers)]
        return [buffer[: numel * dtype.itemsize].view(dtype) for buffer in self._buffers]


def stretch_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of the buffer for one peer, for a sum of which this rank gets ``numel`` elements."""
    return aligned_bytes(min(STRETCH, numel) * dtype.itemsize)


def store(value: torch.Tensor, out: torch.Tensor, accumulate: bool, factor: float = 1.0) -> None:
    """Set ``out`` to ``value`` times ``factor``, or add it."""
    if accumulate:
        out.add_(value, alpha=factor)
    elif factor != 1.0:
        torch.mul(value, factor, out=out)
    elif value.data_ptr() != out.data_ptr():
        out.copy_(value)


def sum_in_rank_order(parts: list[torch.Tensor], out: torch.Tensor, accumulate: bool) -> None:
    """``out`` (+)= parts[0] + parts[1] + ..., added in this order in fp32. Overwrites received parts as scratch.

    At most one part is this rank's own, and it may be ``out`` itself: it is never used as scratch.
    """
    if len(parts) == 1:
        store(parts[0], out, accumulate)
        return
    if len(parts) == 2 and not accumulate:
        torch.add(parts[0], parts[1], out=out)
        return
    received = parts[0] if parts[0].data_ptr() != out.data_ptr() else parts[1]
    if received.dtype == torch.float32:
        scratch = torch.add(parts[0], parts[1], out=received)
    else:
        scratch = parts[0].float().add_(parts[1])
    for part in parts[2:]:
        scratch.add_(part)
    store(scratch, out, accumulate)


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares of ``flat`` [numel]: fp64 scalar on its device. NaN or inf if any element is."""
    whole = flat.numel() // _ROW * _ROW
    total = torch.linalg.vector_norm(flat[whole:]).double().square()
    if whole:
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
        total = total + rows.double().square().sum()
    if total.device.type == CPU and not torch.isfinite(total):  # squares of finite numbers above 1.8e19 are not, in fp32
        total = torch.stack([stretch.double().square().sum() for stretch in flat.split(STRETCH)]).sum()
    return total
