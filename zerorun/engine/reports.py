"""What an engine consists of, and tells about itself."""

from __future__ import annotations

import torch
from torch import nn

from ..config.parse import Config, EffectiveValue
from ..distributed.topology import Topology
from ..distributed.transport.communicator import Communicator
from ..log import in_bytes, info_once
from ..plan.sharding_plan import ShardingPlan
from ..zero.access import full_state_dict
from ..zero.memory_report import memory_by_kind
from ..zero.runtime import Runtime
from ..zero.sharded_model import ShardedModel
from ..zero.sharded_optimizer import ShardedOptimizer
from ..zero.unit import Unit


class Reports:
    """The part of an engine that changes nothing."""

    module: nn.Module
    config: Config
    topology: Topology
    sharded_model: ShardedModel

    @property
    def plan(self) -> ShardingPlan:
        """What this rank holds and sends, as it was planned."""
        return self.sharded_model.runtime.plan

    @property
    def units(self) -> list[Unit]:
        """What is gathered and reduced together, in the order of the forward; the first is the root."""
        return self.sharded_model.units

    @property
    def runtime(self) -> Runtime:
        """What carries the plan out: hooks, gathers, reductions."""
        return self.sharded_model.runtime

    @property
    def sharded(self) -> ShardedOptimizer | None:
        """The optimizer over this rank's shards; None without one."""
        return self.sharded_model.optimizer

    @property
    def comm(self) -> Communicator:
        """The collectives of this engine."""
        return self.sharded_model.comm

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        return self.comm.device

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Of parameters and activations; None: as the module has them."""
        return self.plan.compute_dtype

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The full weights under the model's own names, of all pipeline stages, in CPU memory. All ranks must call it."""
        return self.comm.control.of_all_stages(full_state_dict(self.sharded_model))

    def memory_report(self) -> dict[str, int]:
        """Bytes that this rank holds by kind: parameters, gradients, master, moments, slots, buffers."""
        self.sharded_model.finish_updates()
        return memory_by_kind(self.module, self.runtime, self.sharded)

    def effective_config(self) -> dict[str, EffectiveValue]:
        """What is in force, by dotted key: the value, its source ("file", "auto", "derived", "default"), and a note.

        The note of a key of the file that has no effect in this run is the reason.
        """
        return self.config.effective()

    def communication_report(self) -> dict[str, dict[str, int]]:
        """Calls and bytes sent by this rank so far, by label (unit and phase)."""
        found = dict(self.comm.traffic)
        for axis in self.comm.model_axes.values():
            found.update(axis.statistics.traffic)
        return {label: {"calls": t.calls, "bytes": t.bytes} for label, t in sorted(found.items())}

    def describe(self) -> str:
        """The layout in a few lines: stage, units, bytes by kind, dtypes."""
        held = {kind: size for kind, size in self.memory_report().items() if size}
        kinds = ", ".join(f"{kind} {in_bytes(size)}" for kind, size in held.items())
        compute = str(self.compute_dtype or torch.float32).removeprefix("torch.")
        wire = str(self.comm.wire_dtype).removeprefix("torch.")
        stage, topology = self.config.zero_optimization.stage, self.topology
        degrees = f"{topology.pipe} stages x {topology.tensor} tensor x " if topology.pipe * topology.tensor > 1 else ""
        return (
            f"stage {stage}, {degrees}{topology.replicate} x {topology.shard} data-parallel ranks, "
            f"{len(self.units)} units; "
            f"compute {compute}, master, accumulation and sums float32, gradients on the wire {wire}; "
            f"per rank, before optimizer states: {kinds}"
        )

    def announce(self) -> None:
        """Say on rank 0 what ``describe`` tells, once."""
        info_once(self.describe())
