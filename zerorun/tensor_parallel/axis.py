"""Axis: collectives of activations between the ranks of one axis. All but one block, and give every rank the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NoReturn, Protocol

import torch

from ..distributed.topology import Topology
from ..distributed.transport.connect import connect_axis
from ..distributed.transport.statistics import CommunicationStatistics
from ..distributed.transport.transport import Transport
from ..errors import ReleasedParameterError
from ..plan.replaced_forwards import uncompiled


class UnderWay(Protocol):
    """A collective that has begun."""

    def wait(self) -> None:
        """Return when its results are there."""
        ...


class Axis(Protocol):
    """The axis, seen from rank ``rank`` of ``size``. A tensor passed in must not change until all ranks made the call."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        """Return the sum over ranks, as a new tensor."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int, bounds: Sequence[int], label: str) -> torch.Tensor:
        """Return the ranks' tensors concatenated along ``dim``, where rank r has ``bounds[r] .. bounds[r + 1]``."""
        ...

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, bounds: Sequence[int], label: str) -> torch.Tensor:
        """Return this rank's part, along ``dim``, of the sum over ranks."""
        ...

    def all_to_all(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], label: str) -> UnderWay:
        """Begin to send each rank its flat tensor of ``sent``, and to fill ``received`` with those of all ranks."""
        ...

    def broadcast(self, tensor: torch.Tensor, label: str) -> None:
        """Overwrite ``tensor`` with that of rank 0, in place."""
        ...


class TransportAxis:
    """An axis whose ranks are processes."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size

    def __deepcopy__(self, memo: dict[int, Any]) -> TransportAxis:
        return self  # copies of a module talk to the same ranks

    def __reduce__(self) -> NoReturn:
        raise ReleasedParameterError(
            "a module whose layers or sequences are divided over ranks can neither be pickled nor saved by torch.save: it "
            "would be found without the other ranks. Remedy: save engine.state_dict(), or call engine.destroy() first, on "
            "all ranks."
        )

    @uncompiled
    def all_reduce(self, tensor: torch.Tensor, label: str) -> torch.Tensor:
        return self.transport.sum_of(_flat(tensor), label).view(tensor.shape)

    @uncompiled
    def all_gather(self, tensor: torch.Tensor, dim: int, bounds: Sequence[int], label: str) -> torch.Tensor:
        dim %= tensor.dim()
        row = prod(tensor.shape[:dim] + tensor.shape[dim + 1 :])  # this rank's own part may be empty
        flat = torch.empty(row * bounds[-1], dtype=tensor.dtype, device=tensor.device)
        flat_bounds = [row * bound for bound in bounds]
        self.transport.all_gather(flat, flat_bounds, label, _flat(tensor)).wait()
        parts = [
            flat[row * low : row * high].view(*tensor.shape[:dim], high - low, *tensor.shape[dim + 1 :])
            for low, high in pairwise(bounds)
        ]
        return torch.cat(parts, dim) if any(size > 1 for size in tensor.shape[:dim]) else _joined(flat, parts, dim)

    @uncompiled
    def reduce_scatter(self, tensor: torch.Tensor, dim: int, bounds: Sequence[int], label: str) -> torch.Tensor:
        dim %= tensor.dim()
        parts = [tensor.narrow(dim, low, high - low) for low, high in pairwise(bounds)]
        flat = torch.cat([_flat(part) for part in parts])
        row = tensor.numel() // max(tensor.shape[dim], 1)
        out = torch.empty(parts[self.rank].numel(), dtype=tensor.dtype, device=tensor.device)
        flat_bounds = [row * bound for bound in bounds]
        self.transport.reduce_scatter(flat, flat_bounds, out, label, accumulate=False, wire_dtype=flat.dtype).wait()
        return out.view(parts[self.rank].shape)

    @uncompiled
    def all_to_all(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], label: str) -> UnderWay:
        return self.transport.all_to_all(sent, received, label, until_given=False)

    @uncompiled
    def broadcast(self, tensor: torch.Tensor, label: str) -> None:
        self.transport.broadcast(tensor, label)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)


def _joined(flat: torch.Tensor, parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Join ``parts`` without a copy, because they are already in order, one after the other, in ``flat``."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return flat.view(shape)


def make_axis(topology: Topology, device: torch.device, name: str = "tensor") -> TransportAxis:
    """Return the axis ``name`` of ``topology``. All ranks must call this.

    The axis is made once: layers and engines over one topology share it and its statistics.
    """
    axis: TransportAxis | None = topology.shared.get(f"{name} axis")
    if axis is None:
        ranks = topology.ranks_along(name)
        group = topology.group(name) if len(ranks) > 1 else None
        transport = connect_axis(name, group, ranks.index(topology.rank), len(ranks), device, CommunicationStatistics())
        axis = topology.shared[f"{name} axis"] = TransportAxis(transport)
    return axis
