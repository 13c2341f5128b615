"""Answer: what is said of a planned run, as lines and as JSON, and the configuration that zerorun itself loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, isinf, sqrt
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConfigProblem, DoesNotFitError
from ..log import counted, in_bytes
from ..pipeline.schedule.schedules import ZERO_BUBBLE
from .calibration import Calibration, calibration_of
from .candidate import RunCandidate, candidate_config
from .hardware import GB, Cluster, cluster_of
from .links import RankGroup
from .model_configs import read_shape, shape_of
from .model_shape import ModelShape
from .search import Goal, Timed, least_gpus, on_node, search, sizes_up_to
from .step_time import RankFamily, StepModel

_NEXT = 5  # configurations that are shown beside the best one
_STALL, _RESTART = 10.0, 300.0  # seconds of a save that is seen, and of a restart from the disk
_DAY = 86400.0
_MOST_GPUS, _MOST_MFU = 1 << 17, 1.1  # more than fp8 has reached
_LEAST_GOODPUT = 0.1  # below which a run does not get on


@dataclass(frozen=True)
class FailureModel:
    """What interruptions cost that come every ``between`` seconds."""

    between: float

    @classmethod
    def of(cls, goal: Goal, gpus: int) -> FailureModel:
        return cls(goal.failure_hours * 3600 / gpus)

    @property
    def save_every(self) -> float:
        """Seconds between saves at which the least is lost: the root of 2 x stall x time between failures.

        At least a minute, and at most a day.

        J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
        """
        return min(max(60.0, sqrt(2 * _STALL * self.between)), _DAY)

    @property
    def goodput(self) -> float:
        """The part of the time that is not lost to saves, repeated steps and restarts.

        It is an approximation for failures that are far apart. Where it leaves less than a tenth, it is 0.
        """
        found = 1 - _STALL / self.save_every - (self.save_every / 2 + _RESTART) / self.between
        return found if found >= _LEAST_GOODPUT else 0.0


@dataclass(frozen=True)
class RunPlan:
    """The fastest configuration of a model on a cluster, and what it means. ``others``: the next ones.

    ``fitting``: how many configurations fit, of those that are not certainly slower than another. ``least``: the least GPUs
    that fit, without and with optimizer states in host memory. ``for_deadline``: GPUs for ``goal.days``; None if no number
    does.
    """

    shape: ModelShape
    cluster: Cluster
    goal: Goal
    calibration: Calibration
    best: Timed
    others: tuple[Timed, ...]
    fitting: int
    least: tuple[int | None, int | None]
    for_deadline: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, as in a JSON file. It saves as often as is best, and goes on by itself."""
        saves = {
            "dir": "checkpoints",
            "auto_resume": True,
            "every_minutes": round(self.save_every / 60),
            "asynchronous": True,
        }
        return {**candidate_config(self.best.candidate), "checkpoint": saves}

    @property
    def calibrated(self) -> bool:
        """True if runs with such kernels on such GPUs were fitted, which none of mixtures was."""
        return self.shape.experts == 1 and self.calibration.has(self.cluster.gpu, self.goal.kernels)

    @property
    def spread(self) -> tuple[float, float]:
        """By what factors a measured speed may differ: 9 of 10 runs did not by more, and no run of mixtures did."""
        if self.shape.experts > 1:
            return self.calibration.mixtures
        return self.calibration.spread(self.cluster.gpu, self.goal.kernels, self.cluster.nodes)

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.best.tokens_per_second

    @property
    def mfu(self) -> float:
        """Model FLOPs per second, as a part of the data sheet's bf16 peak: causal attention, nothing recomputed."""
        flops = self.shape.flops_per_token(self.goal.sequence)
        return self.tokens_per_second * flops / (self.cluster.gpus * self.cluster.gpu.peak)

    @property
    def seconds(self) -> float:
        """Of the whole run, with what failures cost; 0 if its tokens are not known, infinite if it does not get on."""
        return _seconds(self.goal, self.best, self.failures)

    @property
    def failures(self) -> FailureModel:
        """What interruptions of these GPUs cost."""
        return FailureModel.of(self.goal, self.cluster.gpus)

    @property
    def save_every(self) -> float:
        """Seconds between saves."""
        return self.failures.save_every

    @property
    def goodput(self) -> float:
        """The part of the time that is not lost to saves, repeated steps and restarts; 0 if the run does not get on."""
        return self.failures.goodput

    @property
    def links(self) -> dict[str, float]:
        """Bytes that a GPU sends in a step, by link and cause."""
        return link_bytes(StepModel(self.shape, self.best.candidate, self.cluster, self.calibration))

    def as_json(self) -> dict[str, Any]:
        """Return all figures. Bytes, seconds; ``config`` is the configuration."""
        return {
            "config": self.config,
            "gpus": self.cluster.gpus,
            "gpu": self.cluster.gpu.name,
            "parameters": self.shape.parameters,
            "step_seconds": self.best.step.seconds,
            "causes": self.best.step.causes,
            "binding": self.best.step.binding,
            "micro_batch_seconds": {"forward": self.best.step.forward, "backward": self.best.step.backward},
            "tokens_per_second": self.tokens_per_second,
            "spread": self.spread,
            "calibrated": self.calibrated,
            "mfu": self.mfu,
            "memory": {**self.best.memory.kinds, "activations": self.best.memory.activations},
            "needed_bytes": self.best.memory.needed(self.cluster.gpu),
            "node_host_bytes": on_node(self.best.memory, self.cluster),
            "sent_bytes": self.links,
            **self._whole_run,
            "save_every_seconds": self.save_every,
            "goodput": self.goodput,
            "least_gpus": self.least[0],
            "least_gpus_with_offload": self.least[1],
            "gpus_for_deadline": self.for_deadline,
            "others": [
                {"config": candidate_config(one.candidate), "step_seconds": one.step.seconds} for one in self.others
            ],
        }

    @property
    def _whole_run(self) -> dict[str, float | None]:
        """Days, GPU-hours and cost; None if the run does not get on."""
        hours = self.seconds / 3600 * self.cluster.gpus
        found = {"days": self.seconds / _DAY, "gpu_hours": hours, "cost": hours * self.goal.price}
        return dict.fromkeys(found) if isinf(self.seconds) else {**found}

    def page(self) -> Iterator[str]:
        """Yield the lines to print."""
        goal, cluster, best = self.goal, self.cluster, self.best
        low, high = self.spread
        speed = self.tokens_per_second / cluster.gpus
        yield f"{self.shape.parameters:,} parameters on {cluster.gpus} {cluster.gpu.name}, {goal.precision}"
        yield f"  the fastest that fits: {named(best.candidate)}"
        yield f"  a step of {best.candidate.batch:,} x {goal.sequence:,} tokens takes {best.step.seconds:.3g} s"
        yield f"  {speed:,.0f} tokens/s and GPU ({speed * low:,.0f} to {speed * high:,.0f}), MFU {self.mfu:.1%}"
        if not self.calibrated:
            lacking = f"is no published run with {goal.kernels.value} kernels on {cluster.gpu.name}"
            few = "are too few published runs of mixtures of experts to fit"
            yield f"  not calibrated: there {few if self.shape.experts > 1 else lacking}"
        yield from self._until_the_end()
        yield from self._sizes()
        yield "where the time goes"
        for cause, seconds in sorted(best.step.causes.items(), key=lambda item: -item[1]):
            if seconds > 0.001 * best.step.seconds:
                yield f"  {cause:<26}{seconds:>9.3g} s{seconds / best.step.seconds:>8.1%}"
        yield f"  {best.step.binding} binds, apart from the products"
        yield "where the memory goes, on the GPU that needs the most"
        kinds = {**best.memory.kinds, "gradients on their way": best.memory.made, "activations": best.memory.activations}
        yield from (f"  {kind:<26}{in_bytes(size):>11}" for kind, size in kinds.items() if size)
        spare = "with the process and spare" if cluster.gpu.is_host else "with CUDA, NCCL and spare"
        yield f"  {spare:<26}{in_bytes(best.memory.needed(cluster.gpu)):>11} of {in_bytes(cluster.gpu.memory)}"
        on_host = on_node(best.memory, cluster)
        if on_host and not cluster.gpu.is_host:
            yield f"  {'host memory of a node':<26}{in_bytes(on_host):>11} of {in_bytes(cluster.host_memory)}"
        sent = {what: size for what, size in self.links.items() if size}
        if sent:
            yield "what a GPU sends in a step"
            yield from (f"  {what:<40}{size / GB:>9.3g} GB" for what, size in sent.items())
        yield from self._picture()
        yield f"the next of {counted(self.fitting, 'configuration')} that fit and are not certainly slower"
        yield from (
            f"  {one.step.seconds / best.step.seconds:>5.2f} x the time: {named(one.candidate)}" for one in self.others
        )

    def _until_the_end(self) -> Iterator[str]:
        """Yield what is said of the whole run."""
        goal, failures = self.goal, self.failures
        if not failures.goodput:
            fails = f"one of the GPUs fails every {failures.between:,.0f} s"
            yield f"  the run does not get on: {fails}, and a restart takes {_RESTART:.0f} s"
            return
        if goal.tokens:
            hours = self.seconds / 3600 * self.cluster.gpus
            price = f", {hours * goal.price:,.0f} at {goal.price:g} a GPU-hour" if goal.price else ""
            yield f"  {goal.tokens:.3g} tokens: {self.seconds / _DAY:.3g} days with failures, {hours:,.0f} GPU-hours{price}"
        every = failures.save_every / 60
        yield f"  save every {every:.0f} minutes: then {failures.goodput:.1%} of the time is not lost to failures"

    def _picture(self) -> Iterator[str]:
        """Yield the command that draws the step of a pipeline."""
        c, step = self.best.candidate, self.best.step
        if c.pipe > 1:
            kind = f"{c.schedule} --chunks {c.chunks}" if c.chunks > 1 else c.schedule
            times = f"{step.forward:.4g} {step.backward / 2:.4g} {step.backward / 2:.4g}"
            yield "its step is drawn by"
            stages = f"--stages {c.pipe} --micro-batches {c.accumulation}"
            yield f"  zerorun-schedule {stages} --kind {kind} --times {times} --svg step.svg"

    def _sizes(self) -> Iterator[str]:
        alone, beside = (f"{gpus} {self.cluster.gpu.name}" if gpus else "none" for gpus in self.least)
        yield f"  the least that fits: {alone}; with optimizer states in host memory: {beside}"
        if self.goal.days:
            found = counted(self.for_deadline, "GPU") if self.for_deadline else f"not even {_MOST_GPUS:,} GPUs do"
            yield f"  for {self.goal.days:g} days: {found}"


def named(candidate: RunCandidate) -> str:
    """Return the degrees of ``candidate`` in words."""
    c = candidate
    parts = [f"stage {c.stage}"]
    parts += [f"{c.shard} shards" if c.stage and c.shard != c.data * c.context else ""]
    parts += [f"{c.tensor} tensor" if c.tensor > 1 else "", f"{c.context} context" if c.context > 1 else ""]
    parts += [f"experts over {c.expert}" if c.expert > 1 else ""]
    orders = {"1f1b": "", ZERO_BUBBLE: " without bubbles"}
    kind = f" x {c.chunks} chunks" if c.chunks > 1 else orders.get(c.order, f" in {c.order} order")
    parts += [f"{c.pipe} stages{kind}" if c.pipe > 1 else ""]
    parts += [counted(c.data, "replica"), f"micro-batch {c.micro_batch} x {c.accumulation}"]
    parts += [f"{c.checkpointing} checkpointing" if c.checkpointing != "none" else ""]
    parts += [f"second copies on {c.second}" if c.second > 1 else ""]
    place = "on disks" if c.states_on_disk else "in host memory"
    parts += [f"optimizer {place}" if c.offload_optimizer else "", "parameters in host memory" if c.offload_params else ""]
    return ", ".join(part for part in parts if part)


def link_bytes(model: StepModel) -> dict[str, float]:
    """Return the bytes that a GPU of the fullest stage sends in a step, by what they are and the link that they need."""
    c, shape = model.candidate, model.shape
    blocks, micro = -(-shape.layers // c.pipe), c.accumulation
    activations = c.tokens * shape.hidden * 2
    tensor, rows = model.group(c.tensor, 1), model.group(c.expert, 1)
    sent = (2 + c.rerun) * micro * blocks * activations
    found = {
        ("tensor ranks", tensor): 4 * sent * (c.tensor - 1) / c.tensor,
        ("rows to experts", rows): 2 * sent * shape.used_experts / c.tensor * (c.expert - 1) / c.expert,
    }
    spread = (shape.layers - shape.dense_layers) * shape.expert_weights if c.expert > 1 else 0
    numels = (shape.parameters - spread) / c.pipe / c.tensor, spread / c.pipe / c.expert
    names = ("parameters", "gradients", "sums"), ("experts", "experts", "sums of experts")
    for family, numel, called in zip(model.families, numels, names, strict=False):
        found |= _of_family(c, family, numel, called)
    inside = "memory" if model.cluster.gpu.is_host else "NVLink"
    named = {f"{what}, {inside if group.nodes == 1 else 'network'}": size for (what, group), size in found.items()}
    named["messages of stages"] = (c.pipe > 1) * 2 * c.chunks * micro * activations / c.tensor
    return named


def _of_family(
    c: RunCandidate, family: RankFamily, numel: float, called: tuple[str, str, str]
) -> dict[tuple[str, RankGroup], float]:
    """Return the bytes of ``numel`` parameters that a rank sends in a step, by what they are and between which ranks."""
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * c.accumulation}[c.stage]
    reductions = c.accumulation if c.stage >= 2 else 1
    shards, copies = family.shards, family.copies
    others = (shards.size - 1) / shards.size
    return {
        (f"gathers of {called[0]}", shards): gathers * numel * 2 * others,
        (f"reductions of {called[1]}", shards): reductions * numel * c.wire_bytes * others,
        (f"{called[2]} over replicas", copies): 2 * reductions * numel / shards.size * c.wire_bytes * (1 - 1 / copies.size),
    }


def plan_run(model: Any, cluster: Cluster | str, goal: Goal | Mapping[str, Any] | None = None) -> RunPlan:
    """Return the fastest configuration of ``model`` on ``cluster`` that fits into memory, without GPUs and ranks.

    ``model``: a ModelShape, a path to a ``config.json``, its contents, or a Hugging Face model. ``cluster``: "384xH100",
    or a Cluster. ``goal``: a Goal or its fields, such as ``{"sequence": 8192, "tokens": 1e12}``.
    Without "sequence", it is 4096, or as many tokens as the model has positions for.

    Raises ConfigError for what cannot be read, DoesNotFitError if nothing fits.
    """
    shape, cluster = _shape(model), cluster_of(cluster) if isinstance(cluster, str) else cluster
    goal = _goal(goal, shape)
    calibration = calibration_of(cluster.gpu)
    found = search(shape, cluster, goal, calibration)
    return RunPlan(
        shape,
        cluster,
        goal,
        calibration,
        found[0],
        tuple(_different(found)),
        len(found),
        (least_gpus(shape, cluster, replace(goal, offload=False)), least_gpus(shape, cluster, replace(goal, offload=True))),
        _for_deadline(shape, cluster, goal, calibration, found[0]) if goal.days and goal.tokens else None,
    )


def _different(found: Sequence[Timed]) -> Iterator[Timed]:
    """Yield the next ones that differ from those before in more than chunks and micro-batches."""
    seen: set[tuple[Any, ...]] = set()
    for one in found:
        c = one.candidate
        kind = (
            c.tensor,
            c.pipe,
            c.context,
            c.expert,
            c.stage,
            c.shard,
            c.second,
            c.offload_optimizer,
            c.offload_params,
            c.states_on_disk,
        )
        if kind not in seen and 0 < len(seen) <= _NEXT:
            yield one
        seen.add(kind)


def _shape(model: Any) -> ModelShape:
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, (str, Path)):
        return read_shape(model)
    values = model if isinstance(model, Mapping) else getattr(getattr(model, "config", None), "to_dict", lambda: None)()
    if values is None:
        remedy = "give a config.json, or a zerorun.planner.model_shape.ModelShape."
        raise ConfigError([ConfigProblem("model", type(model).__name__, "does not tell its shape.", remedy)])
    return shape_of(dict(values))


def _goal(goal: Goal | Mapping[str, Any] | None, shape: ModelShape) -> Goal:
    if isinstance(goal, Goal):
        return goal
    goal = goal or {}
    known = [field.name for field in fields(Goal)]
    unknown = [key for key in goal if key not in known]
    if unknown:
        remedy = f"use {', '.join(known)}."
        raise ConfigError([ConfigProblem(f"goal.{key}", goal[key], "is not known.", remedy) for key in unknown])
    most = shape.positions // 64 * 64 or shape.positions  # some tables have a few rows more
    return Goal(**{"sequence": min(Goal.sequence, most or Goal.sequence), **goal})


def _seconds(goal: Goal, best: Timed, failures: FailureModel) -> float:
    """Return the seconds of a whole run, with what failures cost; infinite if it does not get on."""
    return goal.tokens / best.tokens_per_second / failures.goodput if failures.goodput else inf


def _for_deadline(shape: ModelShape, cluster: Cluster, goal: Goal, calibration: Calibration, best: Timed) -> int | None:
    """Return the least number of GPUs with which the run is over in ``goal.days``; None if none is. See ``sizes_up_to``.

    ``best``: what was found for those of ``cluster``.
    """
    least = goal.tokens * shape.flops_per_token(goal.sequence) / (goal.days * _DAY * cluster.gpu.peak * _MOST_MFU)
    for gpus in sizes_up_to(_MOST_GPUS, cluster, (2, 3)):
        failures = FailureModel.of(goal, gpus)
        if gpus < least or not failures.goodput:
            continue
        try:
            found = best if gpus == cluster.gpus else search(shape, replace(cluster, gpus=gpus), goal, calibration)[0]
        except DoesNotFitError:
            continue
        if _seconds(goal, found, failures) <= goal.days * _DAY:
            return gpus
    return None
