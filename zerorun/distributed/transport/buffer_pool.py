"""Scratch buffers of reductions."""

from __future__ import annotations

import torch

# Elements that a sum reads from a peer at a time: few enough to be in the processor's cache when they are added.
STRETCH = 262144


class BufferPool:
    """Scratch buffers that are used again and again, so that the steady state allocates nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []
        self.bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of ``numel`` elements; contents undefined. Give it back with ``give``."""
        size = numel * dtype.itemsize
        best = -1
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= size and (best < 0 or buffer.numel() < self._free[best].numel()):
                best = index
        if best >= 0:
            return self._free.pop(best)[:size].view(dtype)
        buffer = torch.empty(-(-size // 64) * 64, dtype=torch.uint8, device=self._device)
        self.bytes += buffer.numel()
        return buffer[:size].view(dtype)

    def give(self, view: torch.Tensor) -> None:
        """Return a buffer taken before."""
        storage = view.untyped_storage()
        self._free.append(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))
