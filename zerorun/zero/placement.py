"""Placement: what of a unit lies in host memory instead of on the device, and the copies between the two.

[Note: offload is a placement]
Nothing about the stages changes. The master weights, the moments and the reduced gradients of a unit are host tensors, and
so is, at stage 3, its shard of the parameters. The gradient is copied when its reduction is over, and added there when a
step has several; the update runs where its tensors are; the new weights are copied, rounded, into the shard. If the device
is the CPU the copies are made all the same: there is one path, and it is tested everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """``optimizer``: master, moments and reduced gradients are in host memory. ``params``: the shard is."""

    optimizer: bool = False
    params: bool = False

    @property
    def device_only(self) -> bool:
        return not (self.optimizer or self.params)


def place_units(numels: Sequence[int], *, optimizer: bool, ratio: float, params: bool) -> list[Placement]:
    """The placement of each unit, of ``numels`` trainable elements, the root first.

    ``ratio``: share of the optimizer's elements that goes to the host. The rest stays with the first units: their gradients
    come last in a backward, and their weights are needed first, so that hiding them is hardest. A unit is not cut, so the
    share is met to half of a unit.
    """
    stay, total, before = (1.0 - ratio) * sum(numels), sum(numels), 0
    placed = []
    for numel in numels:
        on_host = optimizer and (ratio == 1.0 or (ratio > 0.0 and total > 0 and before + numel / 2 >= stay))
        placed.append(Placement(on_host, params))
        before += numel
    return placed


class HostLink:
    """Copies between a device and host memory. On a GPU they are asynchronous, from and to pinned memory."""

    def __init__(self, device: torch.device, *, pinned: bool = True) -> None:
        self.device = device
        self._pinned = pinned and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fetched: list[tuple[torch.cuda.Event, torch.Tensor, torch.Tensor | None]] = []

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat host tensor."""
        return torch.empty(numel, dtype=dtype, pin_memory=self._pinned)

    def fetch(self, source: torch.Tensor, target: torch.Tensor, *, add: bool) -> None:
        """Begin to copy ``source`` from the device into the host tensor ``target``, or to add it. ``drain`` must follow.

        ``source`` may be written again by later work of the current stream.
        """
        if self._stream is None:
            target.add_(source) if add else target.copy_(source)
            return
        landing = self.empty(source.numel(), source.dtype) if add else target
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            landing.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        torch.cuda.current_stream(self.device).wait_event(event)
        self._fetched.append((event, target, landing if add else None))

    def drain(self) -> None:
        """Wait until everything that was fetched is in its place."""
        for event, target, landing in self._fetched:
            event.synchronize()
            if landing is not None:
                target.add_(landing)
        self._fetched.clear()
