"""Footprint: the bytes that a candidate takes on the rank that holds the most, by the layouts of zerorun's own plan.

What lies still (parameters, gradients, master, moments, slots) is what ``zerorun.estimate_memory`` says on a GPU, to the
byte, for Hugging Face models with AdamW and the keys of ``candidate_config``. Blocks are equal, so it takes no time.

Activations of a block are those that ``checkpointing.kept_bytes`` finds for Llama's: 20 bytes per token for each element of
the width, 4 for each of the keys, 4 for each inner element and matrix. Fused kernels keep what their products need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ..distributed.layout import Layout, aligned_bytes, build_layout
from ..pipeline.partition import LayerFacts, bounds_of
from ..plan.policy import STAGES, Policy
from .candidate import KernelGeneration, RunCandidate
from .model_shape import ModelShape, Weight

_SLOTS = 2  # shared by units, for parameters (one in use, one on its way) and for gradients
# Bytes of activations per token, for each element: of the width (in rows, and in heads), of the keys, of inner layers.
_EAGER, _FUSED = (16, 4, 4, 4), (8, 4, 4, 2)
_LOGIT = 12  # bytes for each logit: in 2 bytes, in fp32, and its gradient
_KEPT_SHARE = 0.4  # of what "full" frees, kept by "selective"
CONTEXT = 2.5 * 2**30  # bytes that CUDA and NCCL take
_SPARE = 1.05


@dataclass(frozen=True)
class ElementSizes:
    """Bytes of each element: of a parameter, a gradient, the master (0: there is none) and the moments."""

    parameter: int
    gradient: int
    master: int
    moments: int


_SIZES = {"fp32": ElementSizes(4, 4, 0, 8), "bf16-pure": ElementSizes(2, 2, 0, 4)}
_MIXED = ElementSizes(2, 4, 4, 8)


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank. ``kinds``: as ``engine.memory_report()`` names them; ``made``: gradients on their way."""

    kinds: dict[str, int] = field(default_factory=dict)
    made: int = 0
    activations: int = 0

    @property
    def host(self) -> int:
        return sum(size for kind, size in self.kinds.items() if kind.startswith("host"))

    @property
    def device(self) -> int:
        """The device's peak in a step, without what CUDA and NCCL take."""
        return sum(self.kinds.values()) - self.host + self.made + self.activations

    @property
    def needed(self) -> float:
        """The bytes that a GPU should have: with CUDA, NCCL and 5 % to spare."""
        return self.device * _SPARE + CONTEXT


def footprint(shape: ModelShape, candidate: RunCandidate) -> Footprint:
    """Return the footprint of the stage that takes the most. Raises PipelineError if there are too few layers."""
    return heaviest(footprints(shape, candidate))[1]


def heaviest(found: Mapping[int, Footprint]) -> tuple[int, Footprint]:
    """Return the stage that takes the most, with its footprint."""
    return max(found.items(), key=lambda item: item[1].device)


def footprints(shape: ModelShape, candidate: RunCandidate) -> dict[int, Footprint]:
    """Return those of the stages that may take the most, by their numbers."""
    return {rank: _of_stage(shape, candidate, rank) for rank in _different(shape, candidate)}


def _different(shape: ModelShape, candidate: RunCandidate) -> list[int]:
    """Return the stages that may take the most: the first and the last, and of those between the first of each size."""
    cut = layers_of_stages(shape, candidate.pipe, candidate.chunks)
    found: dict[tuple[int, int], int] = {}
    for rank in range(candidate.pipe):
        kind = (cut[rank], rank if rank in (0, candidate.pipe - 1) else -1)
        found.setdefault(kind, rank)
    return sorted(found.values())


@cache
def layers_of_stages(shape: ModelShape, pipe: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the number of blocks on each stage, cut as ``pipeline.partition`` "best" does."""
    ends = [prod(weight.shape) for weight in shape.before], [prod(weight.shape) for weight in shape.after]
    tied = prod(shape.before[0].shape) if shape.tied else 0
    sizes = [sum(ends[0]), *[shape.block_weights] * shape.layers, sum(ends[1]) + tied]
    if pipe == 1:
        return (shape.layers,)
    bounds = bounds_of("best", [LayerFacts("", size) for size in sizes], pipe * chunks, chunks)
    found = [0] * pipe
    for part, (start, end) in enumerate(pairwise(bounds)):
        found[part % pipe] += min(end, shape.layers + 1) - max(start, 1)
    return tuple(found)


class _Degrees(NamedTuple):
    """What decides on what lies still. ``degree``: of flat buffers."""

    tensor: int
    pipe: int
    stage: int
    shard: int
    degree: int
    precision: str
    offload: bool


def _of_stage(shape: ModelShape, candidate: RunCandidate, rank: int) -> Footprint:
    c, blocks = candidate, layers_of_stages(shape, candidate.pipe, candidate.chunks)[rank]
    degree = c.shard if c.stage else c.data
    degrees = _Degrees(c.tensor, c.pipe, c.stage, c.shard, degree, c.precision, c.offload_optimizer)
    kinds, made = _at_rest(shape, degrees, rank, blocks)
    return Footprint(kinds, made, _peak(c, activations(shape, c, rank), rank, blocks))


@lru_cache(maxsize=1 << 14)
def _at_rest(shape: ModelShape, degrees: _Degrees, rank: int, blocks: int) -> tuple[dict[str, int], int]:
    """Return the bytes by kind on the stage ``rank``, and those of gradients that autograd has made."""
    first, last = rank == 0, rank == degrees.pipe - 1
    outside = [[*(shape.before if first else ()), *(shape.after if last else ())]]
    if shape.tied and degrees.pipe > 1 and (first or last):  # both ends have the weight, in a flat group of its own
        outside = [[shape.before[0]], [weight for weight in outside[0] if weight is not shape.before[0]]]
    roots = [_layout(tuple(weights), degrees.tensor, degrees.degree) for weights in outside if weights]
    kinds, made = _held(degrees, roots, _layout(shape.block, degrees.tensor, degrees.degree), blocks)
    return {**kinds, "buffers": shape.rotary}, made


@lru_cache(maxsize=1 << 14)
def _layout(weights: tuple[Weight, ...], tensor: int, degree: int) -> Layout:
    return build_layout([weight.name for weight in weights], [weight.on_rank(tensor) for weight in weights], degree)


def _policy(degrees: _Degrees) -> Policy:
    if degrees.shard > 1:
        return STAGES[degrees.stage]
    row = STAGES[min(degrees.stage, 1)]
    shares = degrees.stage >= 2 and degrees.offload
    return Policy(row.stage, row.shard_optimizer, shares, row.share_param_slots)


def _held(degrees: _Degrees, roots: list[Layout], block: Layout, blocks: int) -> tuple[dict[str, int], int]:
    """Return the bytes by kind, and those of gradients that autograd has made: see zerorun/plan/make.py."""
    policy, size = _policy(degrees), _SIZES.get(degrees.precision, _MIXED)
    kinds = dict.fromkeys(("parameters", "gradients", "master", "moments", "slots"), 0)
    host = "host " if degrees.offload else ""
    kinds |= dict.fromkeys((f"{host}{kind}" for kind in ("gradients", "master", "moments")), 0)
    master = size.master or (size.parameter if degrees.offload else 0)
    for layout, times, shares in (*((root, 1, False) for root in roots), (block, blocks, True)):
        shard = layout.shard_numel(0)
        owned = shard if policy.shard_optimizer else layout.numel
        end = min(owned, layout.entries[-1].end)  # moments have no padding at the end
        shares_params, shares_grads = shares and policy.share_param_slots, shares and policy.share_grad_slots
        if policy.share_param_slots:
            kinds["parameters"] += times * shard * size.parameter
            kinds["slots"] += 0 if shares_params else times * (layout.numel - shard) * size.parameter
        else:
            kinds["parameters"] += times * layout.numel * size.parameter
        kinds[f"{host}master"] += times * owned * master
        kinds[f"{host}moments"] += times * end * size.moments
        if not shares_grads:
            kinds["slots" if policy.share_grad_slots else "gradients"] += times * layout.numel * size.gradient
        if degrees.offload or policy.share_grad_slots:
            kinds[f"{host}gradients"] += times * shard * size.gradient
    count = min(_SLOTS, max(blocks, 1))
    if policy.share_param_slots and blocks:
        kinds["slots"] += count * aligned_bytes(block.numel * size.parameter)
    if policy.share_grad_slots and blocks:
        kinds["slots"] += _SLOTS * aligned_bytes(block.numel * size.gradient)
    if degrees.offload:
        largest = max(layout.shard_numel(0) for layout in (*roots, block))
        rounded = size.parameter if size.parameter < master else 0
        kinds["host staging"] = 2 * largest * (size.gradient + rounded)
    made = [layout.numel - layout.padding for layout in (*roots, block)]
    return kinds, (sum(made[:-1]) + (made[-1] if blocks else 0)) * size.parameter


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of a micro-batch. ``block``: kept from a block's forward to its backward.

    ``passing``: what there is beside them, of a block that is recomputed or of logits.
    """

    block: float
    passing: float


def activations(shape: ModelShape, candidate: RunCandidate, rank: int) -> Activations:
    """Return those of the stage ``rank``."""
    c = candidate
    wide = 2 if c.precision == "fp32" else 1
    width, heads, keys, inner = _FUSED if c.kernels is KernelGeneration.FUSED else _EAGER
    rows = width * shape.hidden / (c.tensor if c.sequence_parallel else 1)
    used = shape.used_experts * shape.ffn * (shape.matrices - 1)
    inside = shape.head_dim * (heads * shape.heads + keys * shape.kv_heads) + inner * used
    whole, least = wide * (rows + inside / c.tensor), wide * 2.0 * shape.hidden
    parts = {"none": 1.0, "selective": _KEPT_SHARE, "every_n": 0.5, "full": 0.0}
    kept = least + parts[c.checkpointing] * (whole - least)
    again = whole - (least if c.checkpointing == "every_n" else kept)  # of the block that is being recomputed
    logits = _LOGIT * wide * shape.vocab / c.tensor if rank == c.pipe - 1 else 0.0
    return Activations(c.tokens * kept, c.tokens * max(again, logits))


def _peak(candidate: RunCandidate, found: Activations, rank: int, blocks: int) -> int:
    """Return the bytes of activations that the stage ``rank`` keeps at its peak.

    Of the zero-bubble schedule: as if all were kept until the gradients of weights are done.
    """
    c = candidate
    in_flight: float = min(c.accumulation, c.pipe - (0 if c.zero_bubble else rank))
    if c.chunks > 1:
        in_flight = min(c.accumulation, c.pipe + (c.pipe - 1 - 2 * rank) / c.chunks)
    return int(in_flight * blocks * found.block + found.passing)


def candidate_config(candidate: RunCandidate) -> dict[str, object]:
    """Return the configuration of ``candidate``: what the JSON file says."""
    c = candidate
    zero: dict[str, object] = {"stage": c.stage}
    if c.stage and c.shard != c.data * c.context:
        zero["shard_degree"] = c.shard
    if c.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": c.micro_batch,
        "gradient_accumulation_steps": c.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": zero,
    }
    if c.precision == "bf16-pure":
        config["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    elif c.precision in ("bf16", "fp8"):
        config["bf16"] = {"enabled": True}
    elif c.precision == "fp16":
        config["fp16"] = {"enabled": True}
    if c.precision == "fp8":
        config["fp8"] = {"enabled": True, "recipe": "rowwise"}
    if c.tensor > 1:
        config["tensor_parallel"] = {"size": c.tensor, "sequence_parallel": c.sequence_parallel}
    if c.pipe > 1:
        chunks = {"chunks": c.chunks} if c.chunks > 1 else {}
        config["pipeline"] = {"stages": c.pipe, "schedule": c.schedule, **chunks}
    if c.context > 1:
        config["sequence_parallel_size"] = c.context
    if c.kernels is KernelGeneration.FUSED:
        config["compile"] = {"enabled": True}
    if c.checkpointing != "none":
        every = {"every_n": 2} if c.checkpointing == "every_n" else {}
        config["activation_checkpointing"] = {"policy": c.checkpointing, **every}
    return config
