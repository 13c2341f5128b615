"""Verification: trains a task as configured and in one process, and compares the records.

[Note: what is compared with what]
Ranks that only shard, offload or recompute add up the same numbers in the same order, so a run at stage 0 on the same
ranks, with nothing offloaded or recomputed, has the same bits. (If gradients are accumulated, stages 2 and 3 add them up in
another order than 0 and 1: then stage 2 stands in for stage 0.) That run says nothing of the other axes, so the run as
configured is compared with one process, too, within the rounding that other orders of summation bring.

Every rank runs the reference by itself, so nothing of it has to be sent, and ranks tell each other only what differs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from ..config.parse import Config
from ..config.source import read_source
from ..distributed.device import default_device, queues
from ..distributed.same_data import checksum
from ..distributed.tensor_shard import TensorShard
from ..distributed.topology import Topology
from ..distributed.transport.process_group import init_distributed
from ..distributed.transport.world import gather_values
from ..errors import ConfigError, ConfigProblem, ModelError
from ..model_setup.checked_arguments import take_in
from ..model_setup.job_topology import topology_of_job
from ..pipeline.pipelined import Pipelined
from ..pipeline.stages import in_one_piece
from ..plan.make_plan import compute_dtype, wire_dtype
from ..plan.units import repeated_blocks
from ..watch.launch_environment import ranks_here
from . import sharded, unsharded
from .explain import axis_at, described, first_of_ranks
from .records import Kind, Mismatch, Point, Records, Tolerances, Value, differences
from .sharded import Initialize, ShardedRun
from .summation_order import PermutedSums, backwards, interleaved
from .task import RunSetting, Sizes, TrainingTask, make, shorten

# What has no influence on what is computed, writes files, or would hide modules from hooks.
_LEFT_OUT = (
    "tensorboard",
    "csv_monitor",
    "wandb",
    "comet",
    "flops_profiler",
    "wall_clock_breakdown",
    "comms_logger",
    "checkpoint",
    "compile",
    "steps_per_print",
)
_OF_RANKS = (
    "zero_optimization",
    "pipeline",
    "tensor_parallel",
    "sequence_parallel_size",
    "context_parallel",
    "expert_parallel",
    "activation_checkpointing",
    "train_batch_size",
)
_COPIES = 20  # of the parameters, in fp32, that a verification needs on each rank: runs and records
_SHARE = 0.6  # of the memory that is free
_FEWEST_BLOCKS = 2
Gradients = dict[int, dict[str, list[Value]]]  # pieces, by step and name


@dataclass(frozen=True)
class Conclusion:
    """``text`` to be printed, and whether the run as configured is ``equal`` to the reference."""

    equal: bool
    text: str


class Verification:
    """One verification of what ``function`` gives. All ranks make it alike.

    ``count``: how many blocks of the model are verified; None: as many as fit.
    """

    def __init__(
        self, function: Callable[[], Any], config: Any, initialize: Initialize, steps: int, count: int | None, seed: int
    ) -> None:
        self._function, self._initialize, self._seed = function, initialize, seed
        self.device = default_device()
        init_distributed(self.device)
        self._raw = {key: value for key, value in read_source(config)[0].items() if key not in _LEFT_OUT}
        task = make(function, seed)
        world = dist.get_world_size()
        given = (task.options.get("optimizer"), task.options.get("model_parameters"), world, None)
        self.config, _ = take_in(task.model, self._raw, None, *given, "lr_scheduler" in task.options)
        refuse_lossy(self.config)
        self.topology = topology_of_job(self.config)
        self.sizes = Sizes(
            steps,
            self.config.gradient_accumulation_steps,
            self.topology.data_parallel_size,
            self.topology.data_parallel_rank,
            self.config.train_micro_batch_size_per_gpu,
        )
        self.batches = task.dealt(self.sizes, shuffle=self.config.dataloader.shuffle, seed=self.config.seed or 0)
        if len({*gather_values(checksum(self.batches))}) > 1:
            raise ModelError(
                "the function gives other batches on other ranks. Remedy: let it give the same on all, those of all ranks; "
                "they are dealt to the ranks here."
            )
        self.count, self.note = count, ""
        if count is None and not isinstance(task.model, Pipelined):
            self.count = _what_fits(task.model)

    def _make(self) -> TrainingTask:
        task = make(self._function, self._seed)
        if self.count is not None:
            taken = shorten(task.model, self.count)
            self.note = f", with {self.count} blocks ({taken} left out)" if taken else ""
        return task

    def run(self) -> Conclusion:
        """Train, compare, and say what was found. All ranks must call it."""
        with in_one_piece():
            blocks = {name for name, _ in repeated_blocks(self._make().model)}
        if self.topology.same_batch > 1:
            blocks = set()  # a block may begin inside of what ranks divide, where they draw numbers of their own
        found = self._configured(self._raw, blocks)
        problems = [(one, "in one process") for one in self._dropouts(found)]
        compared = 0
        plain = self._plain_stage()
        if plain is not None:
            same = self._configured(plain, blocks).records
            wrong, compared = differences(found.records, same, self.topology.rank, None)
            problems += [(one, f"at stage {plain['zero_optimization']['stage']} on the same ranks") for one in wrong]
            del same
        instead = _gathered(found.sent)
        with in_one_piece(), _as_one_process():
            reference = self._reference(blocks, instead)
            permuted = [self._reference(blocks, instead, PermutedSums(order)) for order in (backwards, interleaved)]
        epsilon = torch.finfo(compute_dtype(self.config) or self._autocast() or torch.float32).eps
        tolerances = Tolerances(reference, permuted, epsilon)
        wrong, count = differences(found.records, reference, self.topology.rank, tolerances)
        problems = [(one, "in one process") for one in wrong] + problems
        verdict = self._verdict(problems, (count, compared), found.divided)
        if found.error is None:
            return verdict
        if verdict.equal:
            raise found.error
        ended = f"the run as configured raised {type(found.error).__name__}: {found.error}"
        return Conclusion(False, f"{verdict.text}\n  ended    {ended}")

    def _autocast(self) -> torch.dtype | None:
        section = self.config.torch_autocast
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(section.dtype) if section.enabled else None

    # -- runs ----------------------------------------------------------------------------------------------------

    def _setting(self, config: dict[str, Any], blocks: set[str]) -> RunSetting:
        return RunSetting(self._make(), config, self.sizes, self.batches, blocks, self._seed)

    def _configured(self, config: dict[str, Any], blocks: set[str]) -> ShardedRun:
        return sharded.run(self._setting(config, blocks), self._initialize, drops=self.topology.same_batch == 1)

    def _reference(self, blocks: set[str], instead: Gradients, permuted: PermutedSums | None = None) -> Records:
        alone = {key: value for key, value in self._raw.items() if key not in _OF_RANKS}
        alone["train_micro_batch_size_per_gpu"] = self.sizes.micro_batch
        alone["gradient_accumulation_steps"] = self.sizes.accumulation
        setting = self._setting(alone, blocks)
        with nullcontext() if self.topology.same_batch == 1 else sharded.without_dropout(None, None):
            return unsharded.run(setting, self.device, instead, permuted=permuted)

    def _plain_stage(self) -> dict[str, Any] | None:
        """Return the configuration whose run has the same bits, see the note at the top; None if it is the same one."""
        zero, topology = self.config.zero_optimization, self.topology
        stage = 2 if self.sizes.accumulation > 1 and zero.stage >= 2 else 0
        plain: dict[str, Any] = {"stage": stage}
        if topology.replicate > 1 and zero.stage:
            plain = {"stage": max(stage, 1), "shard_degree": topology.shard}
        moved = {zero.offload_optimizer.device, zero.offload_param.device} != {"none"}
        recomputed = self.config.activation_checkpointing.policy != "none"
        if queues(self.device) or not (plain["stage"] != zero.stage or moved or recomputed):
            return None  # kernels of a GPU may add up in any order
        kept = {key: value for key, value in self._raw.items() if key != "activation_checkpointing"}
        return {**kept, "zero_optimization": plain}

    # -- what they tell ------------------------------------------------------------------------------------------

    def _dropouts(self, found: ShardedRun) -> list[Mismatch]:
        if self.topology.same_batch == 1:
            return []
        every, wrong = gather_values(dict(found.draws.found)), list[tuple[str, bool]]()
        for axis in ("tensor", "context"):
            wrong += found.draws.wrong([every[rank] for rank in self.topology.ranks_along(axis)])
        when, rank = (0, 0, 0, 0, 0), self.topology.rank
        return [
            Mismatch(Point(0, Kind.DROPOUT, name), when, rank, 0, 0, 0, float(alike), 0.0, 0.0, 0.0)
            for name, alike in wrong
        ]

    def _verdict(
        self, problems: list[tuple[Mismatch, str]], counts: tuple[int, int], divided: Collection[str]
    ) -> Conclusion:
        mine = min(problems, key=lambda pair: pair[0].when, default=None)
        text = ""
        if mine is not None:
            point = mine[0].point
            axis = axis_at(point.kind, self.config, self.topology, divided=point.name in divided)
            about: dict[str, Any] = {"topology": self.topology, "steps": self.sizes.steps, "more": len(problems) - 1}
            text = described(mine[0], axis, mine[1], **about) + self.note
        first, told = first_of_ranks(mine[0] if mine is not None else None, text, counts)
        if first:
            return Conclusion(False, first)
        points, bits = map(sum, zip(*told, strict=True))
        steps = f"{self.sizes.steps} steps on {_ranks(self.topology)} and in one process"
        text = f"zerorun verify: equal{self.note}: {steps}, {points:,} values"
        text += f"; {bits:,} of them bit for bit as at a lower stage on the same ranks" if bits else ""
        return Conclusion(True, text + ("; dropout compared apart" if self.topology.same_batch > 1 else ""))


@contextlib.contextmanager
def _as_one_process() -> Iterator[None]:
    """Let a model that asks for its rank in this block find that it is alone."""
    rank, size = dist.get_rank, dist.get_world_size
    dist.get_rank, dist.get_world_size = (lambda group=None: 0), (lambda group=None: 1)
    try:
        yield
    finally:
        dist.get_rank, dist.get_world_size = rank, size


def _gathered(sent: Records) -> Gradients:
    """Return the pieces that all ranks send, by step and name."""
    told = [
        (
            point.step,
            point.name,
            value.tensor,
            value.start,
            None if value.shard is None else tuple(vars(value.shard).values()),
        )
        for point, value in sent.items()
    ]
    found: Gradients = {}
    for step, name, tensor, start, shard in itertools.chain.from_iterable(gather_values(told)):
        part = None if shard is None else TensorShard(*shard)
        found.setdefault(step, {}).setdefault(name, []).append(Value(tensor, start=start, shard=part))
    return found


def _ranks(topology: Topology) -> str:
    axes = ("data_parallel_size", "context", "expert", "tensor", "pipe")
    found = [f"{name.split('_')[0]} {getattr(topology, name)}" for name in axes if getattr(topology, name) > 1]
    return f"{topology.world_size} ranks" + (f" ({', '.join(found)})" if found else "")


def _what_fits(model: nn.Module) -> int | None:
    """Return how many blocks of each list fit into memory together with the records; None if all do."""
    free = min(gather_values(psutil.virtual_memory().available * _SHARE / ranks_here(dist.get_world_size())))
    needed = 4 * _COPIES * sum(param.numel() for param in model.parameters())
    if needed <= free:
        return None
    lists: dict[str, int] = {}
    inside = 0
    for name, block in repeated_blocks(model):
        lists[name.rpartition(".")[0]] = lists.get(name.rpartition(".")[0], 0) + 1
        inside += 4 * _COPIES * sum(param.numel() for param in block.parameters())
    longest = max(lists.values(), default=0)
    if not longest:
        return None
    return max(_FEWEST_BLOCKS, int((free - (needed - inside)) / (inside / longest)))


_LOSSY = {
    "zero_quantized_weights": 3,
    "zero_quantized_nontrainable_weights": 3,
    "zero_quantized_gradients": 1,
}  # from this stage on


def refuse_lossy(config: Config) -> None:
    """Raise ConfigError if ``config`` lets ranks compute with, or send, rounded values: nothing could be verified."""
    zero = config.zero_optimization
    found = [key for key, stage in _LOSSY.items() if getattr(zero, key) and zero.stage >= stage]
    wrong: dict[str, Any] = {f"zero_optimization.{key}": True for key in found}
    wire, computed = wire_dtype(config), compute_dtype(config) or torch.float32
    if torch.finfo(wire).eps > torch.finfo(computed).eps:
        wrong["communication_data_type"] = config.communication_data_type
    if config.fp8.enabled and config.fp8.enable_fsdp_float8_all_gather and zero.stage == 3:
        wrong["fp8.enable_fsdp_float8_all_gather"] = True  # layers read other values, though they make the same of them
    reason = "ranks compute with rounded values then, and one process does not: no value could be compared."
    remedy = "Leave it out for the verification; what it changes is in docs/configuration.md."
    if wrong:
        raise ConfigError([ConfigProblem(key, value, reason, remedy) for key, value in wrong.items()])
