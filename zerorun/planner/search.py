"""Search: the configurations of a model on a cluster that fit, and which of them is fastest.

[Note: dominance]
At equal degrees and micro-batches, keeping activations is never slower than computing them again, and states on the device
are never slower than elsewhere, nor are states in host memory than on disks. Of what differs in one of the two only, the
first that fits is timed. What computes more again and has states nearer is neither slower nor faster for certain: each
placement is looked at for as long as less is computed again than with those that are never slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..config.degrees import degrees_for_experts, divisors
from ..errors import ConfigError, ConfigProblem, DoesNotFitError
from ..pipeline.schedule.schedules import ZERO_BUBBLE
from .calibration import Calibration, calibration_of
from .candidate import GATHERS, PRECISIONS, REDUCTIONS, KernelGeneration, RunCandidate
from .footprint import Footprint, heaviest, layers_of_stages, needed, peaks, states
from .hardware import Cluster
from .model_shape import ModelShape
from .number_checks import not_finite, not_whole
from .step_time import StepModel, StepTime

_LARGEST_MICRO_BATCH = 64  # sequences
_CHUNKS = (1, 2, 3, 4, 6, 8)
_MOST_GPUS = 1 << 15  # that are looked at for the least that fits
_LONG = 16384  # tokens from which on sequences are divided
_FP8_SIDE = 16  # of which fp8 needs multiples (plan/float8_layers.py, which imports torch)
_NOT_LINEAR = ("router", "router bias", "down bias")  # of experts: parameters
# What is computed again, the least first. A compiled block does not show its single operations.
_ORDER, _COMPILED_ORDER = ("none", "selective", "full"), ("none", "every_n", "full")


@dataclass(frozen=True)
class Goal:
    """What the run should be. ``batch``: sequences of a step; 0: about 4 million tokens, a multiple of the GPUs.

    ``precision``, ``kernels``, ``hides``: as of a RunCandidate. ``offload``: optimizer states may be in host memory, and
    ``offload_params``: parameters of stage 3, too.
    ``tokens``: of the whole run, 0 if not known. ``price``: of a GPU-hour. ``days``: the deadline, 0 for none.
    ``failure_hours``: GPU-hours between failures; Llama 3 had 466 in 54 days on 16,384 GPUs.
    """

    sequence: int = 4096
    batch: int = 0
    precision: str = "bf16"
    kernels: KernelGeneration = KernelGeneration.FLASH
    hides: frozenset[str] = frozenset((REDUCTIONS, GATHERS))
    offload: bool = True
    offload_params: bool = True
    tokens: float = 0.0
    price: float = 0.0
    days: float = 0.0
    failure_hours: float = 50_700.0

    def __post_init__(self) -> None:
        amounts = {f"goal.{name}": getattr(self, name) for name in ("tokens", "price", "days")}
        problems = [
            *not_whole({"goal.sequence": self.sequence}, 1),
            *not_whole({"goal.batch": self.batch}, 0),
            *not_finite(amounts, may_be_0=True),
            *not_finite({"goal.failure_hours": self.failure_hours}, may_be_0=False),
        ]
        for name, known in (("precision", PRECISIONS), ("kernels", (*KernelGeneration,))):
            if getattr(self, name) not in known:
                remedy = f"use {', '.join(known)}."
                problems.append(ConfigProblem(f"goal.{name}", getattr(self, name), "is not known.", remedy))
        if problems:
            raise ConfigError(problems, "goal")

    def batch_on(self, gpus: int) -> int:
        """Return the sequences of a step."""
        return self.batch or max(1, round((4 << 20) / self.sequence / gpus)) * gpus


@dataclass(frozen=True)
class Timed:
    """A candidate that fits, with its time and its memory."""

    candidate: RunCandidate
    step: StepTime
    memory: Footprint

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.candidate.batch * self.candidate.sequence / self.step.seconds


def search(
    shape: ModelShape, cluster: Cluster, goal: Goal, calibration: Calibration | None = None, simulated: int = 50
) -> list[Timed]:
    """Return what fits, the fastest first. The schedules of the first ``simulated`` are simulated, and of all that may be
    faster than these.

    Raises DoesNotFitError if nothing does, and ConfigError for sequences that the model does not take.
    """
    _refuse_long_sequences(shape, goal)
    calibration = calibration or calibration_of(cluster.gpu)
    found = []
    for candidate, memory in fitting(shape, cluster, goal):
        found.append(Timed(candidate, StepModel(shape, candidate, cluster, calibration).step(), memory))
    if not found:
        raise DoesNotFitError(
            f"no configuration of {cluster.gpus} {cluster.gpu.name} fits {shape.parameters:,} parameters with sequences of "
            f"{goal.sequence} tokens and a batch of {goal.batch_on(cluster.gpus)}. Remedy: more GPUs, GPUs with more "
            "memory, more host memory for offload, shorter sequences, or a batch that more degrees divide."
        )
    found.sort(key=lambda one: one.step.seconds)
    best: list[Timed] = []
    for number, one in enumerate(found):
        if number >= simulated and one.step.seconds >= min(other.step.seconds for other in best):
            break
        best.append(replace(one, step=StepModel(shape, one.candidate, cluster, calibration).simulated()))
    return sorted(best, key=lambda one: one.step.seconds) + found[len(best) :]


def fitting(shape: ModelShape, cluster: Cluster, goal: Goal) -> Iterator[tuple[RunCandidate, Footprint]]:
    """Yield the candidates that fit and are not dominated. See [Note: dominance]."""
    for candidate in degrees(shape, cluster, goal):
        if candidate.sequence_parallel and not has_blocks_everywhere(shape, candidate):
            continue
        yield from _placed(shape, cluster, candidate, _placements(candidate, cluster, goal))


def _placed(
    shape: ModelShape, cluster: Cluster, candidate: RunCandidate, placements: Iterable[RunCandidate]
) -> Iterator[tuple[RunCandidate, Footprint]]:
    """Yield those of the ``placements`` of ``candidate`` that fit and are not dominated.

    Each is with the least that it computes again.
    """
    found: list[tuple[RunCandidate, int]] = []
    order = _COMPILED_ORDER if candidate.kernels is KernelGeneration.FUSED else _ORDER
    kept: dict[str, dict[int, int]] = {}  # peaks of activations, which are the same for all placements
    for placed in placements:
        rest = states(shape, placed)
        if max(needed(cluster.gpu, lying.device, lying.host) for lying in rest.values()) > cluster.gpu.memory:
            continue  # whatever is computed again
        dominated = min((again for other, again in found if _never_slower(other, placed)), default=len(order))
        for again, checkpointing in enumerate(order[:dominated]):
            if checkpointing not in kept:
                kept[checkpointing] = peaks(shape, replace(candidate, checkpointing=checkpointing))
            peak = kept[checkpointing]
            memory = heaviest({rank: Footprint(lying, peak[rank]) for rank, lying in rest.items()})[1]
            if fits(memory, cluster):
                found.append((placed, again))
                yield replace(placed, checkpointing=checkpointing), memory
                break


def _never_slower(one: RunCandidate, other: RunCandidate) -> bool:
    """True if states of ``one`` are where they are never slower than those of ``other``. See [Note: dominance]."""
    nearer = one.states_on_disk <= other.states_on_disk and one.offload_params == other.offload_params
    return nearer or not one.offload_optimizer


def _placements(candidate: RunCandidate, cluster: Cluster, goal: Goal) -> Iterator[RunCandidate]:
    """Yield where states and parameters may be, each before those that it dominates. See [Note: dominance].

    One replica has nothing to divide: it is at stage 2 for gradients that leave the device, at 3 for parameters that do.
    A CPU has no other host memory than its own, and disks alone make room.
    """
    alone = candidate.replicas == 1
    if not alone or candidate.stage < 2:
        yield candidate
    if not goal.offload or not candidate.stage or candidate.second > 1:
        return
    host = replace(candidate, offload_optimizer=True)
    places = [] if alone and candidate.stage == 3 else [host]
    if candidate.stage == 3 and goal.offload_params:
        places.append(replace(host, offload_params=True))
    if not cluster.gpu.is_host:
        yield from places
    if cluster.disk and candidate.precision != "bf16-pure":
        yield from (replace(one, states_on_disk=True) for one in places)


def has_blocks_everywhere(shape: ModelShape, candidate: RunCandidate) -> bool:
    """True if each stage has a block. Where one has none, tensor ranks have no rows to divide, and zerorun refuses it."""
    return min(layers_of_stages(shape, candidate.pipe, candidate.chunks)) > 0


def fits(memory: Footprint, cluster: Cluster) -> bool:
    """True if the device and the node's host memory have room."""
    room = memory.needed(cluster.gpu) <= cluster.gpu.memory
    return room and (cluster.gpu.is_host or on_node(memory, cluster) <= cluster.host_memory)


def on_node(memory: Footprint, cluster: Cluster) -> int:
    """Return the bytes of host memory that the ranks of a node take."""
    return memory.host * min(cluster.per_node, cluster.gpus)


def degrees(shape: ModelShape, cluster: Cluster, goal: Goal) -> Iterator[RunCandidate]:
    """Yield all degrees, stages and micro-batches that divide what they have to divide, and that zerorun takes.

    Raises ConfigError if zerorun does not take the precision.
    """
    _refuse_fp8(shape, goal)
    batch, gpus = goal.batch_on(cluster.gpus), cluster.gpus
    inside = cluster.per_node
    for tensor in divisors(inside):
        if gpus % tensor or not _divides(shape, tensor) or (goal.precision == "fp8" and odd_layer(shape, tensor)):
            continue
        for pipe in divisors(gpus // tensor):
            if pipe > shape.layers or (pipe > 1 and "stages" in shape.cannot):
                break
            divides_sequences = goal.sequence >= _LONG and "context" not in shape.cannot
            for context in divisors(inside // tensor) if divides_sequences else (1,):
                data = gpus // (tensor * pipe * context)
                if gpus % (tensor * pipe * context) or shape.heads % (tensor * context) or batch % data:
                    continue
                base = RunCandidate(
                    data=data,
                    tensor=tensor,
                    pipe=pipe,
                    context=context,
                    sequence=goal.sequence,
                    precision=goal.precision,
                    # Elsewhere sequences are divided already, or it is not known what blocks do with rows.
                    sequence_parallel=tensor > 1 and context == 1 and shape.experts == 1 and "rows" not in shape.cannot,
                    kernels=goal.kernels,
                    hides=goal.hides,
                    wire_bytes=2 if goal.precision == "bf16-pure" else 4,
                )
                yield from _stages(shape, cluster, goal, base, batch // data)


def _refuse_long_sequences(shape: ModelShape, goal: Goal) -> None:
    """Raise ConfigError for sequences with more tokens than the model has positions in its table."""
    if 0 < shape.positions < goal.sequence:
        reason = f"is more than the {shape.positions:,} positions that the model has a table of."
        remedy = "use at most as many (--sequence), or write more of them into the configuration of the model."
        raise ConfigError([ConfigProblem("goal.sequence", goal.sequence, reason, remedy)], "goal")


def _refuse_fp8(shape: ModelShape, goal: Goal) -> None:
    """Raise ConfigError if the layers of ``shape`` should multiply in fp8 and cannot."""
    odd = odd_layer(shape, 1)
    if goal.precision == "fp8" and ("fp8" in shape.cannot or odd):
        reason = "is for nn.Linear, which the linear layers of the model are not."
        if odd:
            reason = f"needs sides that are multiples of {_FP8_SIDE}, and {odd!r} has others."
        raise ConfigError([ConfigProblem("goal.precision", "fp8", reason, "use bf16.")], "goal")


def odd_layer(shape: ModelShape, tensor: int) -> str:
    """Return the name of a linear layer of which a tensor rank has a part that fp8 cannot multiply; "" if there is none."""
    for kind in shape.kinds:
        for weight in kind.block:
            linear = len(weight.shape) == 2 and not weight.expert and weight.name not in _NOT_LINEAR
            if linear and any(side % _FP8_SIDE for side in weight.on_rank(tensor)):
                return weight.name
    return ""


def _divides(shape: ModelShape, tensor: int) -> bool:
    """True if tensor ranks can divide all of a block."""
    if tensor > 1 and (shape.whole or "tensor" in shape.cannot):
        return False
    widths = [width for kind in shape.kinds for width in (kind.ffn, kind.shared_ffn)]
    return not any(width % tensor for width in (shape.heads, shape.kv_heads, *widths))


def _stages(shape: ModelShape, cluster: Cluster, goal: Goal, base: RunCandidate, own: int) -> Iterator[RunCandidate]:
    """Yield ``base`` with stages, shard degrees, micro-batches and chunks. ``own``: sequences of a replica and step."""
    replicas = base.replicas
    near = cluster.per_node // base.tensor
    hybrid = [near] if 1 < near < replicas and replicas % near == 0 and not near % base.context else []
    micro = 1
    while micro <= min(own, _LARGEST_MICRO_BATCH):
        if own % micro == 0:
            for chunks in _chunks(shape, base.pipe, own // micro):
                batch = replace(base, micro_batch=micro, accumulation=own // micro, chunks=chunks)
                splits = 1 < base.pipe <= batch.accumulation and chunks == 1
                for one in (batch, replace(batch, order=ZERO_BUBBLE)) if splits else (batch,):
                    yield from _experts(shape, one)
                    for stage in (1, 2, 3) if replicas > 1 or goal.offload else (1,):
                        for shard in (replicas, *hybrid):
                            yield from _experts(shape, replace(one, stage=stage, shard=shard))
                    if hybrid and base.context == 1:  # a second copy of the weights in each node
                        yield from _experts(shape, replace(one, stage=3, shard=replicas, second=near))
        micro *= 2


def _experts(shape: ModelShape, candidate: RunCandidate) -> Iterator[RunCandidate]:
    """Yield ``candidate`` with its experts on each rank, and spread over ranks in all ways that fit."""
    if shape.experts == 1:
        yield candidate
        return
    for degree in expert_degrees(shape.experts, candidate):
        yield replace(candidate, expert=degree)


def expert_degrees(experts: int, candidate: RunCandidate) -> list[int]:
    """Return the numbers of ranks over which ``experts`` of a block can be spread."""
    fitting_ranks = degrees_for_experts(candidate.replicas, candidate.divided, candidate.tensor)
    return [degree for degree in fitting_ranks if experts % degree == 0]


def _chunks(shape: ModelShape, pipe: int, micro_batches: int) -> list[int]:
    if pipe == 1 or micro_batches % pipe:
        return [1]
    return [v for v in _CHUNKS if v == 1 or shape.layers >= pipe * v]


def sizes_up_to(most: int, cluster: Cluster, factors: tuple[int, ...]) -> list[int]:
    """Return numbers of GPUs, ascending: parts of one node, whole nodes, and that of ``cluster``.

    They are the powers of 2 in a node, and ``factors`` times powers of 2 of nodes.
    """
    powers = [1 << power for power in range(most.bit_length())]
    parts = [count for count in powers if count < cluster.per_node]
    nodes = {factor * power for factor in factors for power in powers}
    whole = [count * cluster.per_node for count in nodes if count * cluster.per_node <= most]
    return sorted({*parts, *whole, cluster.gpus})


def least_gpus(shape: ModelShape, cluster: Cluster, goal: Goal) -> int | None:
    """Return the least number of GPUs that fits; None if there is none. See ``sizes_up_to``.

    Each has one sequence, or a step has those of the goal, if they are fewer. Parameters stay on the GPUs.
    """
    for gpus in sizes_up_to(_MOST_GPUS, cluster, (1,)):
        for batch in {gpus, min(goal.batch or gpus, gpus)}:
            states = replace(goal, batch=batch, offload_params=False)
            if any(True for _ in fitting(shape, replace(cluster, gpus=gpus, disk=0.0), states)):
                return gpus
    return None
