"""Comparison: the time and the memory of a configuration file on the cluster of a plan, and what of it does not count.

The file is read as zerorun reads it for so many ranks, so that what zerorun refuses is refused here. What counts is what
``candidate_config`` says of the candidate that was made of it: each other key with an effect is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.fields import Inert, OnlyStages, Section
from ..config.parse import ModelFacts, data_parallel_degree, load_config, resolve, with_values
from ..config.schema import Config, flatten
from ..errors import ConfigError, ConfigProblem
from ..log import in_bytes
from .answer import RunPlan, named
from .candidate import KernelGeneration, RunCandidate, candidate_config
from .footprint import footprint
from .hardware import Cluster
from .model_shape import ModelShape
from .search import Goal, Timed, expert_degrees, fits, has_blocks_everywhere, odd_layer, on_node
from .step_time import StepModel

_ZERO = "zero_optimization."
_PREFETCH, _MOST_LIVE = f"{_ZERO}stage3_prefetch_bucket_size", f"{_ZERO}stage3_max_live_parameters"
# Keys that change neither the time of a step nor its memory by what a plan shows, and sections of such keys.
_WITHOUT_BEARING = (
    "checkpoint.",
    "comet.",
    "csv_monitor.",
    "dataloader.",
    "scheduler.",
    "tensorboard.",
    "timers.",
    "wandb.",
    "communication_timeout_s",
    "context_parallel.in_evaluation",
    "data_parallel_size",
    "dataloader_drop_last",
    "gradient_allreduce_op",
    "gradient_clipping",
    "hang_timeout_s",
    "seed",
    "steps_per_print",
    "bf16.check_grad_overflow",
    "fp16.loss_scale",
    "fp16.initial_scale_power",
    "fp16.hysteresis",
    "fp16.consecutive_hysteresis",
    "fp16.min_loss_scale",
    "zero_optimization.ignore_unused_parameters",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
)
# Keys that count by another one, or in a way that the configuration of a candidate does not say.
_COUNTED = (
    "optimizer.",
    "train_batch_size",
    "gradient_accumulation_steps",
    "communication_data_type",
    "expert_parallel.enabled",
    "context_parallel.size",
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp_size",
    "tensor_parallel.tp.",
    "zero_optimization.hybrid_shard",
    "zero_optimization.mics_shard_size",
    "zero_optimization.overlap_param_gather",
    "zero_optimization.zero_hpz_partition_size",
    _PREFETCH,
    _MOST_LIVE,
)
_ADAMS = ("adam", "adamw")


@dataclass(frozen=True)
class Comparison:
    """The file ``path`` beside a plan. ``not_counted``: its keys whose effect neither time nor memory shows."""

    path: str
    given: Timed
    plan: RunPlan
    not_counted: dict[str, Any]

    @property
    def ratio(self) -> float:
        """The time for a sequence, in terms of that of the best configuration."""
        given, best = self.given, self.plan.best
        return given.step.seconds / given.candidate.batch / (best.step.seconds / best.candidate.batch)

    @property
    def fits(self) -> bool:
        return fits(self.given.memory, self.plan.cluster)

    def as_json(self) -> dict[str, Any]:
        """Return all figures, as RunPlan does."""
        return {
            "file": self.path,
            "config": candidate_config(self.given.candidate),
            "time_ratio": self.ratio,
            "step_seconds": self.given.step.seconds,
            "causes": self.given.step.causes,
            "needed_bytes": self.given.memory.needed(self.plan.cluster.gpu),
            "node_host_bytes": on_node(self.given.memory, self.plan.cluster),
            "fits": self.fits,
            "not_counted": self.not_counted,
        }

    def page(self) -> Iterator[str]:
        """Yield the lines to print."""
        gpu, on_host = self.plan.cluster.gpu, on_node(self.given.memory, self.plan.cluster)
        memory = f"{in_bytes(self.given.memory.needed(gpu))} of {in_bytes(gpu.memory)}"
        if on_host and not gpu.is_host:
            memory += f" and, of a node's host memory, {in_bytes(on_host)} of {in_bytes(self.plan.cluster.host_memory)}"
        yield f"{self.path}: {named(self.given.candidate)}"
        yield f"  {self.ratio:.2f} x the time for a sequence; needs {memory}{'' if self.fits else ': too much'}"
        if self.not_counted:
            yield f"  not counted: {', '.join(f'{key} = {value!r}' for key, value in self.not_counted.items())}"


def compared(path: str | Path, plan: RunPlan) -> Comparison:
    """Return the configuration in the file ``path``, on the cluster of ``plan``.

    Raises ConfigError if zerorun would not take it for these GPUs, or if it is not planned.
    """
    config = _resolved(load_config(path), plan.shape, plan.cluster)
    candidate = _candidate(config, plan.cluster, plan.goal)
    problems = [*_not_planned(candidate, plan.shape, plan.cluster)]
    if problems:
        raise ConfigError(problems, str(path))
    model = StepModel(plan.shape, candidate, plan.cluster, plan.calibration)
    timed = Timed(candidate, model.simulated(), footprint(plan.shape, candidate))
    return Comparison(str(path), timed, plan, dict(_not_counted(config, candidate, plan.shape, plan.cluster)))


def _resolved(config: Config, shape: ModelShape, cluster: Cluster) -> Config:
    """Return ``config`` as zerorun resolves it on these GPUs, with groups that divide states as a number of ranks."""
    zero = config.zero_optimization
    if zero.stage and zero.hybrid_shard and zero.shard_degree is None:  # the ranks of a node
        config = with_values(config, {f"{_ZERO}shard_degree": min(cluster.per_node, cluster.gpus)})
    return resolve(
        config,
        data_parallel_size=data_parallel_degree(config, cluster.gpus),
        model_facts=ModelFacts(hidden_size=shape.hidden),
        micro_batch_hint=1,
        optimizer_given=True,
        scheduler_given=True,
    )


def _candidate(config: Config, cluster: Cluster, goal: Goal) -> RunCandidate:
    """Return what ``config`` runs. Where it tells neither batch nor accumulation, a step has the batch of ``goal``."""
    zero, tensor, context = config.zero_optimization, config.tensor_parallel.size, config.sequence_parallel_size or 1
    data, micro = data_parallel_degree(config, cluster.gpus), config.train_micro_batch_size_per_gpu
    told = "file" in (config.sources["train_batch_size"], config.sources["gradient_accumulation_steps"])
    batch = goal.batch_on(cluster.gpus)
    shard = (zero.shard_degree or data * context) if zero.stage else 1
    second = zero.zero_hpz_partition_size if zero.stage == 3 else 1
    eager = KernelGeneration.FLASH if goal.kernels is KernelGeneration.FUSED else goal.kernels
    on_wire = config.communication_data_type or config.gradient_dtype
    return RunCandidate(
        data=data,
        tensor=tensor,
        pipe=config.pipeline.stages,
        chunks=config.pipeline.chunks,
        order=config.pipeline.schedule if config.pipeline.chunks == 1 else RunCandidate.order,
        context=context,
        expert=config.expert_parallel.size,
        stage=zero.stage,
        shard=shard,
        sequence=goal.sequence,
        micro_batch=micro,
        accumulation=config.gradient_accumulation_steps if told else max(1, batch // (micro * data)),
        checkpointing=config.activation_checkpointing.policy,
        every=config.activation_checkpointing.every_n,
        offload_optimizer=not zero.offload_optimizer.is_off(),
        offload_params=not zero.offload_param.is_off(),
        states_on_disk=zero.offload_optimizer.device == "nvme",
        second=second if second < shard else 1,
        precision=_precision(config),
        sequence_parallel=tensor > 1 and config.tensor_parallel.sequence_parallel,
        kernels=KernelGeneration.FUSED if config.compile.enabled else eager,
        wire_bytes=4 if on_wire == "fp32" else 2,
        hides=goal.hides,
    )


def _precision(config: Config) -> str:
    if config.bf16.enabled:
        return "bf16-pure" if config.gradient_dtype == "bf16" else "fp8" if config.fp8.enabled else "bf16"
    return "fp16" if config.fp16.enabled else "fp32"


# -- what is refused ---------------------------------------------------------------------------------------------


def _not_planned(c: RunCandidate, shape: ModelShape, cluster: Cluster) -> Iterator[ConfigProblem]:
    if c.states_on_disk and not cluster.disk:
        reason = "takes the time of a node's disks, and how fast they are is not known."
        remedy = "give --disk, in gigabytes per second (Cluster.disk)."
        yield ConfigProblem(f"{_ZERO}offload_optimizer.device", "nvme", reason, remedy)
    if c.states_on_disk and c.precision == "bf16-pure":
        reason = "keeps masters on disks, and bf16_master_weights_and_grads has none."
        yield ConfigProblem(f"{_ZERO}offload_optimizer.device", "nvme", reason, 'use "cpu".')
    yield from _not_divided(c, shape)
    yield from _refused(c, shape)
    parts = c.pipe * c.chunks
    if parts > shape.layers:
        reason = f"{parts} parts have fewer than one of the {shape.layers} blocks each."
        yield ConfigProblem("pipeline.stages", c.pipe, reason, "use fewer stages or chunks.")
    elif c.sequence_parallel and not has_blocks_everywhere(shape, c):
        reason = "a stage without a block has no rows for tensor ranks to divide."
        yield ConfigProblem("tensor_parallel.sequence_parallel", True, reason, "use fewer stages, or set it to false.")
    if c.expert not in expert_degrees(shape.experts, c):
        reason = f"does not go with {shape.experts} experts in a block and {c.replicas} replicas."
        yield ConfigProblem("expert_parallel.autoep_size", c.expert, reason, "change it.")


def _not_divided(c: RunCandidate, shape: ModelShape) -> Iterator[ConfigProblem]:
    """Yield what tensor ranks cannot divide."""
    key = "tensor_parallel.size"
    if c.tensor > 1 and shape.whole:
        reason = "by the model's own plan tensor ranks leave attention or shared experts whole, which is not planned."
        yield ConfigProblem(key, c.tensor, reason, "use 1.")
    elif shape.heads % c.tensor:
        yield ConfigProblem(key, c.tensor, f"does not divide {shape.heads} heads.", "use a divisor of the heads.")
    elif shape.kv_heads % c.tensor and c.tensor % shape.kv_heads:
        reason = f"neither divides {shape.kv_heads} heads of keys nor is a multiple of them."
        yield ConfigProblem(key, c.tensor, reason, "use a divisor of the heads of keys.")


def _refused(c: RunCandidate, shape: ModelShape) -> Iterator[ConfigProblem]:
    """Yield what zerorun would refuse for the kind of model."""
    used: dict[str, tuple[str, Any, bool, str]] = {
        "tensor": ("tensor_parallel.size", c.tensor, c.tensor > 1, "use 1."),
        "rows": ("tensor_parallel.sequence_parallel", True, c.sequence_parallel, "set it to false."),
        "stages": ("pipeline.stages", c.pipe, c.pipe > 1, "use 1."),
        "context": ("sequence_parallel_size", c.context, c.context > 1, "remove the key."),
        "fp8": ("fp8.enabled", True, c.precision == "fp8", "remove the section."),
    }
    for feature, (key, value, is_used, remedy) in used.items():
        if is_used and feature in shape.cannot:
            yield ConfigProblem(key, value, "is not for models of this kind: zerorun refuses it.", remedy)
    odd = odd_layer(shape, c.tensor) if c.precision == "fp8" else ""
    if odd:
        reason = f"needs sides that are multiples of 16, and of {odd!r} a rank has others."
        yield ConfigProblem("fp8.enabled", True, reason, "use fewer tensor ranks, or remove the section.")


# -- what does not count -----------------------------------------------------------------------------------------


def _not_counted(config: Config, c: RunCandidate, shape: ModelShape, cluster: Cluster) -> Iterator[tuple[str, Any]]:
    """Yield the keys, with values, that have an effect and that the configuration of the candidate does not have."""
    wanted = flatten(_resolved(load_config(candidate_config(c)), shape, cluster).as_dict())
    found = flatten(config.as_dict())
    if config.optimizer is not None and config.optimizer.type.lower() not in _ADAMS:
        yield "optimizer.type", config.optimizer.type
    for key in sorted(found.keys() | wanted.keys()):
        value, counted = found.get(key), wanted.get(key)
        if value == counted or key.startswith((*_WITHOUT_BEARING, *_COUNTED)) or not _has_effect(config, key):
            continue
        if key == f"{_ZERO}overlap_comm" and value:  # as if it were not given
            continue
        yield key, value
    if c.stage == 3 and not _gathers_one_ahead(config, shape.block_weights // c.tensor):
        yield from ((key, found[key]) for key in (_PREFETCH, _MOST_LIVE) if config.sources.get(key) != "default")
    if c.tensor > shape.kv_heads:
        yield "tensor_parallel.size, with heads of keys on several ranks", c.tensor


def _has_effect(config: Config, key: str) -> bool:
    """True if something reads ``key`` in this run. ``config`` is resolved."""
    if any(note.key == key for note in config.notes):
        return False
    section: Any = config
    for name in key.split("."):
        if not isinstance(section, Section) or section.is_off():
            return isinstance(section, dict)
        field = next(own for own in type(section).model_fields if name in (own, type(section).model_fields[own].alias))
        marks = type(section).model_fields[field].metadata
        stage = config.zero_optimization.stage
        if any(isinstance(mark, Inert) or (isinstance(mark, OnlyStages) and stage not in mark.stages) for mark in marks):
            return False
        section = getattr(section, field)
    return True


def _gathers_one_ahead(config: Config, largest: int) -> bool:
    """True if one unit is gathered before it is needed, which is what is planned. ``largest``: elements of a unit.

    See _slot_count in plan/make_plan.py.
    """
    zero, given = config.zero_optimization, {key for key in (_PREFETCH, _MOST_LIVE) if config.sources[key] != "default"}
    ahead = -(-zero.prefetch_bucket_size // largest) if _PREFETCH in given else 1
    most = max(zero.max_live_parameters // largest - 1, 0) if _MOST_LIVE in given else ahead
    return min(ahead, most) == 1
