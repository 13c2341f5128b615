"""Axis: collectives of activations between the ranks of the tensor axis. They block, and give every rank the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import torch

from ..distributed.topology import Topology
from ..distributed.transport.channel import Channel, CommunicationStatistics


class Axis(Protocol):
    """This is rank ``rank`` of ``size``. What a rank passes in must not change until all have called the same."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """The sum over ranks, as a new tensor."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int, bounds: Sequence[int], label: str) -> torch.Tensor:
        """The ranks' tensors one after the other along ``dim``, where rank r has ``bounds[r] .. bounds[r + 1]``."""
        ...

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, bounds: Sequence[int], label: str) -> torch.Tensor:
        """This rank's part along ``dim`` of the sum over ranks."""
        ...

    def broadcast(self, tensor: torch.Tensor, label: str) -> None:
        """Let ``tensor`` be that of rank 0, in place."""
        ...


class ChannelAxis:
    """The tensor axis of processes."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank, self.size = channel.rank, channel.size

    def __deepcopy__(self, memo: dict[int, Any]) -> ChannelAxis:
        return self  # copies of a module talk to the same ranks

    def all_reduce(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        return self.channel.sum_of(_flat(tensor), label).view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor, dim: int, bounds: Sequence[int], label: str) -> torch.Tensor:
        dim %= tensor.dim()
        row = prod(tensor.shape[:dim] + tensor.shape[dim + 1 :])  # this rank's own part may be empty
        flat = torch.empty(row * bounds[-1], dtype=tensor.dtype, device=tensor.device)
        flat_bounds = [row * bound for bound in bounds]
        self.channel.all_gather(flat, flat_bounds, label, _flat(tensor)).wait()
        parts = [
            flat[row * low : row * high].view(*tensor.shape[:dim], high - low, *tensor.shape[dim + 1 :])
            for low, high in pairwise(bounds)
        ]
        return torch.cat(parts, dim) if any(size > 1 for size in tensor.shape[:dim]) else _joined(flat, parts, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, bounds: Sequence[int], label: str) -> torch.Tensor:
        dim %= tensor.dim()
        parts = [tensor.narrow(dim, low, high - low) for low, high in pairwise(bounds)]
        flat = torch.cat([_flat(part) for part in parts])
        row = tensor.numel() // max(tensor.shape[dim], 1)
        out = torch.empty(parts[self.rank].numel(), dtype=tensor.dtype, device=tensor.device)
        self.channel.reduce_scatter(flat, [row * bound for bound in bounds], out, label)
        return out.view(parts[self.rank].shape)

    def broadcast(self, tensor: torch.Tensor, label: str) -> None:
        self.channel.broadcast(tensor, label)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)


def _joined(flat: torch.Tensor, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """``parts`` lie one after the other in ``flat`` as they should: nothing is copied."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return flat.view(shape)


def make_axis(topology: Topology, device: torch.device) -> ChannelAxis:
    """The tensor axis of ``topology``. All ranks must call it.

    It is made once: layers and engines over one topology share it, and its counts.
    """
    axis: ChannelAxis | None = topology.shared.get("tensor axis")
    if axis is None:
        group = topology.group("tensor") if topology.tensor > 1 else None
        channel = Channel("tensor", group, topology.tensor_rank, topology.tensor, device, CommunicationStatistics())
        axis = topology.shared["tensor axis"] = ChannelAxis(channel)
    return axis
