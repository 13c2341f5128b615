"""Footprint: the bytes that a candidate takes on the rank that holds the most.

What lies still is in states_at_rest.py, and is what ``zerorun.estimate_memory`` says. Activations of a block are those that
``checkpointing.kept_bytes`` finds for Llama's: 20 bytes per token for each element of the width, 4 for each of the keys, 4
for each inner element and matrix. Fused kernels keep what their products need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import prod

from ..pipeline.partition import LayerFacts, bounds_of
from ..pipeline.schedule.schedules import INTERLEAVED, ZERO_BUBBLE
from .candidate import KernelGeneration, RunCandidate
from .hardware import Gpu
from .model_shape import ModelShape
from .states_at_rest import AtRest, Placed, at_rest

# Bytes of activations per token, for each element: of the width (in rows, and in heads), of the keys, of inner layers.
_EAGER, _FUSED = (16, 4, 4, 4), (8, 4, 4, 2)
_ROW = 4  # the same for each element of a row of an expert: one has come to it, another one went back
_NARROW = 4  # the same for each element of a narrow vector: as it is, and after its norm
_LOGIT = 12  # bytes for each logit: in 2 bytes, in fp32, and its gradient
_KEPT_SHARE = 0.4  # of what "full" frees, kept by "selective"
CONTEXT = 2.5 * 2**30  # bytes that CUDA and NCCL take
_PROCESS = 0.5 * 2**30  # the same of Python and PyTorch, where a rank is on a CPU
_SPARE = 1.05


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank. ``rest``: of what lies still."""

    rest: AtRest
    activations: int

    @property
    def kinds(self) -> dict[str, int]:
        return self.rest.kinds

    @property
    def made(self) -> int:
        return self.rest.made

    @property
    def host(self) -> int:
        return self.rest.host

    @property
    def disk(self) -> int:
        return self.rest.disk

    @property
    def device(self) -> int:
        """The device's peak in a step, without what CUDA and NCCL take."""
        return self.rest.device + self.activations

    def needed(self, gpu: Gpu) -> float:
        """Return the bytes that a ``gpu`` should have."""
        return needed(gpu, self.device, self.host)


def needed(gpu: Gpu, device: int, host: int) -> float:
    """Return the bytes that a ``gpu`` should have for a rank's bytes: with CUDA, NCCL and 5 % to spare.

    The memory of a CPU is the host's: what is moved to the ``host`` stays in it.
    """
    return (device + (host if gpu.is_host else 0)) * _SPARE + context(gpu)


def context(gpu: Gpu) -> float:
    """Return the bytes that a rank takes before it has a model."""
    return _PROCESS if gpu.is_host else CONTEXT


def footprint(shape: ModelShape, candidate: RunCandidate) -> Footprint:
    """Return the footprint of the stage that takes the most. Raises PipelineError if there are too few layers."""
    return heaviest(footprints(shape, candidate))[1]


def heaviest(found: Mapping[int, Footprint]) -> tuple[int, Footprint]:
    """Return the stage that takes the most, with its footprint."""
    return max(found.items(), key=lambda item: item[1].device)


def footprints(shape: ModelShape, candidate: RunCandidate) -> dict[int, Footprint]:
    """Return those of the stages that may take the most, by their numbers."""
    kept = peaks(shape, candidate)
    return {rank: Footprint(rest, kept[rank]) for rank, rest in states(shape, candidate).items()}


def states(shape: ModelShape, candidate: RunCandidate) -> dict[int, AtRest]:
    """Return what lies still on the stages of ``footprints``, by their numbers."""
    placed, blocks = Placed.of(candidate), blocks_of_stages(shape, candidate.pipe, candidate.chunks)
    stages = _different(shape, candidate.pipe, candidate.chunks)
    return {rank: at_rest(shape, placed, rank, blocks[rank]) for rank in stages}


def peaks(shape: ModelShape, candidate: RunCandidate) -> dict[int, int]:
    """Return the bytes of activations on the stages of ``footprints``, by their numbers. Where states are changes none."""
    blocks = blocks_of_stages(shape, candidate.pipe, candidate.chunks)
    stages = _different(shape, candidate.pipe, candidate.chunks)
    return {rank: _peak(candidate, activations(shape, candidate, rank), rank, sum(blocks[rank])) for rank in stages}


@cache
def _different(shape: ModelShape, pipe: int, chunks: int) -> list[int]:
    """Return the stages that may take the most: the first and the last, and of those between the first of each size."""
    cut = blocks_of_stages(shape, pipe, chunks)
    found: dict[tuple[tuple[int, ...], int], int] = {}
    for rank in range(pipe):
        kind = (cut[rank], rank if rank in (0, pipe - 1) else -1)
        found.setdefault(kind, rank)
    return sorted(found.values())


@cache
def blocks_of_stages(shape: ModelShape, pipe: int, chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the number of blocks on each stage, by their kinds, cut as ``pipeline.partition`` "best" does."""
    counts = [kind.layers for kind in shape.kinds]
    if pipe == 1:
        return (tuple(counts),)
    ends = [prod(weight.shape) for weight in shape.before], [prod(weight.shape) for weight in shape.after]
    tied = prod(shape.before[0].shape) if shape.tied else 0
    sizes = [sum(ends[0]), *(kind.block_weights for kind in shape.kinds for _ in range(kind.layers)), sum(ends[1]) + tied]
    bounds = bounds_of("best", [LayerFacts("", size) for size in sizes], pipe * chunks, chunks)
    begins = [*accumulate(counts, initial=1)]  # the first layer is the embedding
    found = [[0] * len(counts) for _ in range(pipe)]
    for part, (start, end) in enumerate(pairwise(bounds)):
        for kind, (low, high) in enumerate(pairwise(begins)):
            found[part % pipe][kind] += max(0, min(end, high) - max(start, low))
    return tuple(map(tuple, found))


def layers_of_stages(shape: ModelShape, pipe: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the number of blocks on each stage."""
    return tuple(map(sum, blocks_of_stages(shape, pipe, chunks)))


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of a micro-batch. ``block``: kept from a block's forward to its backward.

    ``passing``: what there is beside them, of a block that is recomputed or of logits.
    """

    block: float
    passing: float


def activations(shape: ModelShape, candidate: RunCandidate, rank: int) -> Activations:
    """Return those of the stage ``rank``, in the mean of its blocks."""
    c, blocks = candidate, blocks_of_stages(shape, candidate.pipe, candidate.chunks)[rank]
    found = [(count, *_of_block(kind, c)) for kind, count in zip(shape.kinds, blocks, strict=True) if count]
    kept = sum(count * own for count, own, _ in found) / max(sum(blocks), 1)
    logits = _LOGIT * _wide(c) * shape.vocab / c.tensor if rank == c.pipe - 1 else 0.0
    return Activations(c.tokens * kept, c.tokens * max(logits, *(again for _, _, again in found), 0.0))


def _of_block(shape: ModelShape, candidate: RunCandidate) -> tuple[float, float]:
    """Return the bytes for each token that are kept of a block, and those of one that is being recomputed."""
    c = candidate
    whole, least = _whole_block(shape, c), _wide(c) * 2.0 * shape.hidden
    share = _KEPT_SHARE if c.checkpointing == "selective" else 1 - c.rerun
    kept = least + share * (whole - least)
    return kept, whole - (least if c.checkpointing == "every_n" else kept)


def _whole_block(shape: ModelShape, candidate: RunCandidate) -> float:
    """Return the bytes for each token that a block keeps.

    Of experts: the rows that have come and those that went back, for each expert of a token. Of narrow attention: the
    narrow vectors, before and after their norms. Tensor ranks have a part of the rows each if they have different experts.
    """
    c, wide = candidate, _wide(candidate)
    width, heads, keys, inner = _FUSED if c.kernels is KernelGeneration.FUSED else _EAGER
    rows = width * shape.hidden / (c.tensor if c.sequence_parallel else 1)
    attended = shape.head_dim * (heads * shape.heads + keys * shape.kv_heads)
    if shape.latent is not None:
        latent, half = shape.latent, heads // 2
        ends = half * shape.heads * (latent.plain + latent.rotary + latent.values)
        attended = ends + keys // 2 * shape.heads * (latent.plain + latent.rotary + latent.values)
        rows += _NARROW * (latent.queries + latent.keys + latent.rotary)
    inside = attended + inner * (shape.used_experts * shape.ffn + shape.shared_ffn) * (shape.matrices - 1)
    if shape.experts > 1:
        rows += _ROW * shape.used_experts * shape.hidden / (c.tensor if c.expert > 1 else 1)
    return wide * (rows + inside / c.tensor)


def _wide(candidate: RunCandidate) -> int:
    """How many times 2 bytes an element of activations has."""
    return 2 if candidate.precision == "fp32" else 1


def _peak(candidate: RunCandidate, found: Activations, rank: int, blocks: int) -> int:
    """Return the bytes of activations that the stage ``rank`` keeps at its peak.

    Of the zero-bubble schedule: as if all were kept until the gradients of weights are done.
    """
    c = candidate
    ahead: dict[str, float] = {
        "naive": 1,
        "gpipe": c.accumulation,
        "1f1b": c.pipe - rank,
        ZERO_BUBBLE: c.pipe,
        INTERLEAVED: c.pipe + (c.pipe - 1 - 2 * rank) / c.chunks,
    }
    in_flight = min(c.accumulation, ahead[c.schedule])
    return int(in_flight * blocks * found.block + found.passing)
