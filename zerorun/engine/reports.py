"""The parts of an engine, the reports that it gives about itself, and what training loops ask by DeepSpeed's names."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import nn

from ..config.parse import Config, EffectiveValue
from ..distributed.topology import Topology
from ..distributed.transport.communicator import Communicator
from ..errors import ModelError
from ..log import in_bytes, info_once
from ..ops.rounding import MasterFormat
from ..ops.state_format import StateFormat
from ..optim.loss_scaler import DTYPES
from ..plan.replaced_forwards import uncompiled
from ..plan.sharding_plan import ShardingPlan
from ..watch.board import Phase, during
from ..watch.launch_environment import local_rank
from ..zero.memory_report import memory_by_kind
from ..zero.runtime import Runtime
from ..zero.sharded_model import ShardedModel
from ..zero.sharded_optimizer import ShardedOptimizer
from ..zero.unit import Unit
from ..zero.value_access import full_state_dict
from .accumulation import Accumulation


class Reports:
    """The part of an engine that answers questions and changes nothing."""

    module: nn.Module
    config: Config
    topology: Topology
    sharded_model: ShardedModel
    accumulation: Accumulation

    @property
    def plan(self) -> ShardingPlan:
        """The plan of what this rank holds and sends."""
        return self.sharded_model.runtime.plan

    @property
    def units(self) -> list[Unit]:
        """The units, each unsharded and reduced as a whole, in the order of the forward; the first is the root."""
        return self.sharded_model.units

    @property
    def runtime(self) -> Runtime:
        """The runtime, which carries the plan out: hooks, gathers, reductions."""
        return self.sharded_model.runtime

    @property
    def sharded(self) -> ShardedOptimizer | None:
        """The optimizer over this rank's shards; None if the engine has no optimizer."""
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
        """The dtype of parameters and activations; None if they keep the dtypes of the module."""
        return self.plan.compute_dtype

    @uncompiled
    @during(Phase.WHOLE_WEIGHTS)
    def state_dict(self, *, exact: bool = False) -> dict[str, torch.Tensor]:
        """Return the full weights of all pipeline stages, by the model's names, in CPU memory. All ranks must call it.

        They have the dtype that the model computes in; with ``exact``, those that have fp32 masters have their values.
        """
        return self.comm.control.of_all_stages(full_state_dict(self.sharded_model, exact=exact))

    def memory_report(self) -> dict[str, int]:
        """Return the bytes that this rank holds, by kind: parameters, gradients, master, moments, slots, buffers."""
        self.sharded_model.finish_updates()
        return memory_by_kind(self.module, self.runtime, self.sharded)

    def expert_load(self) -> dict[str, list[int]]:
        """Return how many rows each expert got in the last step, by layer, over all ranks and micro-batches.

        A row counts for each of the experts that are chosen for it. {} if no experts are spread over ranks. All ranks must
        call it.
        """
        loads = self.sharded_model.parts.loads
        if loads is None:
            return {}
        from ..expert_parallel.rows_per_expert import added_up  # already imported if experts are spread

        return added_up(self.comm.control.values(loads.last))

    def effective_config(self) -> dict[str, EffectiveValue]:
        """Return the settings in force, by dotted key: value, source ("file", "auto", "derived", "default"), and a note.

        If a key of the file has no effect in this run, its note gives the reason. Batch sizes are those of the next step.
        """
        found, batch = self.config.effective(), self.accumulation.batch
        sizes = {
            "train_batch_size": batch.train,
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
        }
        note = "the training loop has changed it."
        changed = {key: size for key, size in sizes.items() if size != found[key].value}
        return found | {key: EffectiveValue(size, "derived", note) for key, size in changed.items()}

    def communication_report(self) -> dict[str, dict[str, int]]:
        """Return the calls made and bytes sent by this rank so far, by label (unit and phase)."""
        found = dict(self.comm.traffic)
        for axis in self.comm.model_axes.values():
            found.update(axis.statistics.traffic)
        return {label: {"calls": t.calls, "bytes": t.bytes} for label, t in sorted(found.items())}

    def describe(self) -> str:
        """The layout in a few lines: stage, units, bytes by kind, dtypes."""
        held = {kind: size for kind, size in self.memory_report().items() if size}
        kinds = ", ".join(f"{kind} {in_bytes(size)}" for kind, size in held.items())
        states = "" if any("moments" in kind for kind in held) else ", before optimizer states"
        compute = str(self.compute_dtype or torch.float32).removeprefix("torch.")
        wire = str(self.comm.wire_dtype).removeprefix("torch.")
        groups = self.runtime.plan.flat_groups
        coded = any(group.coded and group.float8 is None for group in groups)
        casts = sorted({group.float8.format for group in groups if group.float8 is not None})
        bits = " and then ".join(f"int{hop.bits}" for hop in self.runtime.plan.hops)
        sent = f"gradients on the wire {wire}{f', of matrices {bits} in blocks' if bits else ''}"
        sent += ", weights of matrices int8 in blocks" * coded
        near = next((group.secondary.size for group in self.runtime.plan.flat_groups if group.secondary is not None), 0)
        sent += f", weights from a second copy on each {near} ranks" if near else ""
        sent += f", weights of layers in fp8 {' and '.join(casts)}" if casts else ""
        stage, topology = self.config.zero_optimization.stage, self.topology
        degrees = f"{topology.pipe} stages x {topology.tensor} tensor x " if topology.pipe * topology.tensor > 1 else ""
        degrees += f"{topology.context} context in " if topology.context > 1 else ""
        return (
            f"stage {stage}, {degrees}{topology.replicate} x {topology.shard} data-parallel ranks, "
            f"{len(self.units)} units; "
            f"compute {compute}, {self._masters()}, {sent}{self._states()}; "
            f"per rank{states}: {kinds}"
        )

    def _masters(self) -> str:
        """What is to be said of masters and of the gradients that are added up."""
        section, kept = self.config.bf16, {group.master_format for group in self.plan.trainable}
        gradients = str(DTYPES[self.config.gradient_dtype]).removeprefix("torch.")
        if kept <= {MasterFormat.FP32}:
            return f"master, accumulation and sums {gradients}"
        master = f"bfloat16 rounded {section.rounding}"
        if MasterFormat.REMAINDER in kept:
            master = "float32 as bfloat16 and 16-bit remainders"
        return f"master {master}, accumulation {gradients}, sums float32"

    def _states(self) -> str:
        """What is to be said of the formats of optimizer states, with a comma; "" if all are fp32."""
        found: Counter[str] = Counter()
        for group in self.plan.trainable:
            for entry, format in zip(group.layout.entries, group.state_formats, strict=True):
                found[format.value] += entry.numel
        shown = " and ".join(f"{format} for {numel:,} elements" for format, numel in sorted(found.items()))
        rounding = "nearest" if self.config.bf16.rounding == "nearest" else "stochastic"
        how = f" rounded {rounding}" if StateFormat.BF16.value in found else ""
        return f", optimizer states {shown}{how}" if found.keys() - {StateFormat.FP32.value} else ""

    def announce(self) -> None:
        """Log what ``describe`` returns, once, on rank 0."""
        info_once(self.describe())


class LoopQueries:
    """Queries that are answered from what the engine was made from. No rank waits for another."""

    config: Config
    topology: Topology
    sharded_model: ShardedModel

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the engine, for scripts that move it to its own device. Raises ModelError for another device or dtype."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        own, trains_in = self.sharded_model.comm.device, self.sharded_model.runtime.plan.compute_dtype or torch.float32
        is_own = device is None or (device.type == own.type and (own.index is None or device.index in (None, own.index)))
        if not is_own:
            raise ModelError(
                f"engine.to({str(device)!r}): the engine is on {own}, and its weights, gradients and states lie in buffers "
                "that cannot move. Remedy: leave the call out; ZERORUN_DEVICE=cpu makes engines on the CPU, and "
                "engine.offload_states() frees the device for a while."
            )
        if dtype not in (None, trains_in):
            raise ModelError(
                f"engine.to({dtype}): the engine trains in {trains_in}. Remedy: leave the call out, and write "
                '"bf16" or "fp16" in the file for another precision.'
            )
        return self

    # -- ranks ---------------------------------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """This rank's number in the world."""
        return self.topology.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its host, as set by the launcher; 0 without a launcher."""
        return local_rank()

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
