"""Queries that a training loop makes about an engine's ranks, sizes and settings. The names are DeepSpeed's."""

from __future__ import annotations

import math
import os
from typing import Any

from ..config.parse import Config
from ..distributed.topology import Topology
from ..zero.sharded_model import ShardedModel


class LoopQueries:
    """Queries that are answered from what the engine was made from. No rank waits for another."""

    config: Config
    topology: Topology
    sharded_model: ShardedModel

    # -- ranks ---------------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """This rank's number in the world."""
        return self.topology.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its host, as set by the launcher; 0 without a launcher."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def world_size(self) -> int:
        """The number of ranks over all axes."""
        return self.topology.world_size

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks, which divide a batch between them."""
        return self.topology.data_parallel_size

    # -- settings ------------------------------------------------------------------------------------------------

    def zero_optimization(self) -> bool:
        """True if anything is partitioned: stage 1, 2 or 3."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.config.zero_optimization.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """True at stages 2 and 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """True at stage 3."""
        return self.zero_optimization_stage() >= 3

    def fp16_enabled(self) -> bool:
        """True if parameters are fp16."""
        return bool(self.config.fp16.enabled)

    def bfloat16_enabled(self) -> bool:
        """True if parameters are bf16."""
        return bool(self.config.bf16.enabled)

    def gradient_clipping(self) -> float:
        """The global 2-norm to which gradients are clipped; 0 means no clipping."""
        return self.config.gradient_clipping

    def autotp_size(self) -> int:
        """The number of ranks that divide each layer; 0 if none is divided."""
        return self.topology.tensor if self.topology.tensor > 1 else 0

    def steps_per_print(self) -> float:
        """Optimizer steps between two progress lines; infinity if none is printed."""
        return self.config.steps_per_print or math.inf

    def wall_clock_breakdown(self) -> bool:
        """True if the times of steps are printed."""
        return bool(self.config.wall_clock_breakdown)

    # -- optimizer -----------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[float | tuple[float, ...]]:
        """The momentum of each parameter group: its ``betas``, or its ``momentum``; 0 if it has neither."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self._groups()]

    def settle(self) -> None:
        """Learn what has come of the last step."""
        raise NotImplementedError

    def _groups(self) -> list[dict[str, Any]]:
        self.settle()
        sharded = self.sharded_model.optimizer
        return sharded.optimizer.param_groups if sharded is not None else []
