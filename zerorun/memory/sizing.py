"""Sizing: the bytes of one rank before anything is allocated, from a plan's units on the meta device.

[Note: one source of truth]
The units are made by the builder that makes the real ones, and counted by the ledger that counts those. What is left to
predict here is what has no unit: the states of the optimizer (moments.py), the buffers into which reductions receive
(receiving.py), and the order in which memory comes and goes while units are built.

[Note: where memory is]
``device`` is the rank's accelerator and ``host`` the memory of its node. A rank on a CPU has only the latter: there both
are one, and its peak is that of their sum, ``both``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from ..config.parse import Config
from ..distributed.layout import Layout
from ..distributed.replication import ALONE, Replication
from ..distributed.topology import Topology
from ..distributed.transport.channel import NCCL, PEER_MEMORY
from ..optim.requested import RawOptimizer
from ..zero.disks import state_count
from ..zero.flat_group import FlatGroup
from ..zero.ledger import count_bytes
from ..zero.offload.nvme import buffer_bytes
from ..zero.optimizer_states import Moments
from ..zero.pieces import OptimizerPiece, build_pieces
from ..zero.plan import ShardingPlan, TransportTraits, make_plan, wire_dtype
from ..zero.runtime import MAX_REDUCING
from ..zero.unit import Unit
from .receiving import Receiving


@dataclass(frozen=True)
class Bytes:
    """Bytes on the device and in host memory."""

    device: int = 0
    host: int = 0

    @property
    def both(self) -> int:
        return self.device + self.host

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.device - other.device, self.host - other.host)


@dataclass(frozen=True)
class Peak:
    """The highest of each; not at the same time."""

    device: int
    host: int
    both: int


@dataclass(frozen=True)
class Holding:
    """What a parameter occupies before units are built. ``put_together``: its full size if that is a part of it, else 0."""

    now: Bytes
    put_together: int = 0


Held = Callable[[nn.Parameter], Holding]


class Sizing:
    """The memory of rank ``topology.rank``. ``config`` is resolved; nothing of ``model`` and ``raw`` is touched."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        raw: RawOptimizer,
        topology: Topology,
        transport: str,
        device_type: str,
        replication_of: Callable[[nn.Parameter], Replication] = lambda param: ALONE,
    ) -> None:
        """``transport``: NCCL, GLOO or PEER_MEMORY of comm.py. ``device_type``: of the ranks' devices, "cpu" or "cuda"."""
        self._model, self._raw = model, raw
        self._topology, self._transport, self._wire = topology, transport, wire_dtype(config)
        plan = make_plan(model, config, raw, topology, self._exchange(device_type))
        plan.builder.replication_of = replication_of
        self.units, *self._pools = plan.builder.build(plan.specs)
        self._staging = plan.builder.staging_bytes + _disk_buffers(plan, raw)
        self._policy, self._overlap = plan.builder.policy, plan.overlap

    def _exchange(self, device_type: str) -> TransportTraits:
        """As Communicator has it."""
        reads_peers = self._transport == PEER_MEMORY and self._topology.shard > 1
        direct = reads_peers and self._topology.replicate == 1 and device_type == "cpu"
        return TransportTraits(reads_peers, direct and self._wire == torch.float32, apart=device_type != "cpu")

    @cached_property
    def pieces(self) -> list[OptimizerPiece]:
        """What the optimizer of this rank updates."""
        if not self._raw.groups:
            return []
        return build_pieces(self.units, lambda param: self._raw.group_of[id(param)], whole=self._raw.whole)

    @cached_property
    def received(self) -> int:
        """Bytes of the buffers into which reductions receive; host memory, also where the device is none."""
        if self._transport == NCCL:
            return 0
        direct = self._transport == PEER_MEMORY
        receiving = Receiving(self._topology, self._wire, reads_peers=direct, overlap=self._overlap)
        return receiving.pool_bytes(self.units)

    def kinds(self, moments: Moments | None = None) -> dict[str, int]:
        """The ledger after a step; without ``moments``, before the first one but with all buffers."""
        shared = sum(pool.bytes for pool in self._pools) + self.received
        found = moments.sizes() if moments is not None else ()
        return count_bytes(self._model, self.units, self._policy, shared, found, self._staging)

    def gradients_in_backward(self) -> int:
        """Bytes of gradients that autograd has made and no slot has taken, at most: those of units that are reduced when
        the backward is over, and of the largest other unit; unpacked ones stay until their reduction is over."""
        late, largest = 0, 0
        for unit in self.units:
            made = sum(_numel(flat_group.layout) * flat_group.dtype.itemsize for flat_group in unit.trainable)
            if unit.deferred:
                late += made
                continue
            kept = 0
            if any(flat_group.unpacked for flat_group in unit.trainable):
                slots = len(self._pools[1].buffers) if unit.placement.optimizer else 0
                slots = slots or MAX_REDUCING
                kept = min(slots, MAX_REDUCING) if self._overlap else 0
            largest = max(largest, made * (1 + kept))
        return late + largest

    def start_up(self, held: Held) -> Peak:
        """The peak while units are built, beginning with what the parameters occupy as ``held``."""
        live = sum((held(param).now for param in self._model.parameters()), Bytes())
        live += Bytes(sum(pool.bytes for pool in self._pools))
        steps = [live]
        for unit in self.units:
            for flat_group in unit.flat_groups:
                values = Bytes(flat_group.layout.numel * flat_group.params[0].dtype.itemsize)
                adopted = unit.resident and flat_group.params[0].dtype == flat_group.dtype
                for holding in map(held, flat_group.params):  # parts go when they are put together
                    steps.append(live + values + Bytes(holding.put_together))
                    live -= holding.now if holding.put_together else Bytes()
                live += _kept(unit, flat_group)
                steps.append(live if adopted else live + values)
                live -= sum((h.now for h in map(held, flat_group.params) if not h.put_together), Bytes())
            live += _gradients(unit, apart=self._policy.share_grad_slots)
            steps.append(live)
        return Peak(*(max(getattr(step, place) for step in steps) for place in ("device", "host", "both")))

    def never_written(self) -> int:
        """Bytes of gradient slots that stay untouched as long as ranks sum gradients where autograd leaves them."""
        total, shared = 0, self._pools[1].bytes
        for unit in self.units:
            for flat_group in unit.trainable:
                if flat_group.unpacked and unit.grad_slot < 0 and flat_group.grad_full is not None:
                    total += (
                        flat_group.layout.numel - (flat_group.high - flat_group.low)
                    ) * flat_group.grad_full.element_size()
        return total + (shared if any(s.unpacked for unit in self.units for s in unit.trainable) else 0)


def _disk_buffers(plan: ShardingPlan, raw: RawOptimizer) -> int:
    """Bytes of the buffers in which what is on a disk is updated."""
    units = plan.builder.disk_units(plan.specs) if raw.groups else {}
    return buffer_bytes(units, state_count(raw)) if units else 0


def heaviest_rank(units: list[Unit]) -> int:
    """The shard that holds the most elements. Equal but for rounding, unless parameters are kept whole."""
    layouts = [flat_group.layout for unit in units for flat_group in unit.flat_groups]
    if all(layout.even for layout in layouts):
        return 0
    totals = [sum(layout.shard_numel(rank) for layout in layouts) for rank in range(layouts[0].degree)]
    return totals.index(max(totals))


def _numel(layout: Layout) -> int:
    return layout.numel - layout.padding


def _nbytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _kept(unit: Unit, flat_group: FlatGroup) -> Bytes:
    """Parameters and masters, without shared slots."""
    total = Bytes(_nbytes(flat_group.full) if unit.resident else 0)
    if not flat_group.shard_is_in_place:
        size = 0 if unit.placement.params_on_disk else _nbytes(flat_group.shard)
        total += Bytes(host=size) if unit.placement.params else Bytes(size)
    if not (flat_group.master_is_weight or unit.placement.states_on_disk):
        size = _nbytes(flat_group.master)
        total += Bytes(host=size) if unit.placement.optimizer else Bytes(size)
    return total


def _gradients(unit: Unit, *, apart: bool) -> Bytes:
    """Slots of the unit's own, and what it keeps of reduced gradients, if that lies ``apart`` or in host memory."""
    total = Bytes()
    for flat_group in unit.trainable:
        if unit.grad_slot < 0:
            total += Bytes(_nbytes(flat_group.grad_full))
        if flat_group.host_grad is not None:
            total += Bytes(host=_nbytes(flat_group.host_grad))
        elif apart:
            total += Bytes(_nbytes(flat_group.grad_shard))
    return total
