"""Sums for an optimizer over the ranks that have parts of the same parameters: see [Note: the same bits]."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..distributed.transport.communicator import Communicator
from ..distributed.transport_kinds import NCCL
from ..plan.sharding_plan import ShardingPlan
from ..plan.step_collectives import hops


class PartSums:
    """The sums of one engine. Numbers are on its device: NCCL moves no others."""

    def __init__(self, plan: ShardingPlan, comm: Communicator) -> None:
        self._comm, self._hops = comm, hops(plan)
        copies = [axis for axis in comm.model_axes if axis != "tensor"] if plan.transport == NCCL and self._hops else []
        # Axis of pipeline stages that have copies of parameters -> the numbers of these parameters in the plan's parts.
        self._tied = {axis: members for axis in copies if (members := _members(plan, axis))}

    @property
    def device(self) -> torch.device:
        return self._comm.device

    def __call__(self, flat: torch.Tensor, sizes: Sequence[int], label: str) -> torch.Tensor:
        """The sum of ``flat`` [sum of sizes] fp32, which is overwritten."""
        topology = self._comm.topology
        for hop in self._hops:
            if hop.first_only and getattr(topology, f"{hop.axis}_rank"):
                flat.zero_()
            self._comm.sum_over_axis([flat], hop.axis, label + hop.suffix)
        for axis, members in self._tied.items():
            views = flat.split(list(sizes))
            tied = [views[number] for number in members]
            if self._comm.model_axes[axis].rank:
                torch._foreach_zero_(tied)
            self._comm.sum_over_axis(tied, axis, f"{label} from the first stage")
        return flat


def _members(plan: ShardingPlan, axis: str) -> list[int]:
    """The numbers of the parts of parameters of which other ranks along ``axis`` have copies."""
    groups = [group for group in plan.trainable if axis in group.replication.sums]
    names = {entry.name for group in groups for entry in group.layout.entries}
    return [number for number, part in enumerate(plan.parts) if part.name in names]
