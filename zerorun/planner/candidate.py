"""Candidate: one way to run a model on a cluster, as the JSON file and the launcher would say it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# What a runtime hides behind the computation.
REDUCTIONS, GATHERS, TENSOR = "reductions", "gathers", "tensor"


class KernelGeneration(str, Enum):
    """Generations of kernels: what they fuse, and how attention works."""

    UNFUSED = "unfused"  # attention writes its scores to memory
    FLASH = "flash"  # fused attention between eager modules
    FUSED = "fused"  # compiled modules, or one kernel for each of their parts, and the newest attention


@dataclass(frozen=True)
class RunCandidate:
    """Degrees, stage and batch. ``data``: replicas of the model; ``shard``: ranks that divide the states.

    ``chunks``: parts of the model on each of ``pipe`` stages; ``zero_bubble``: the schedule splits backwards.
    ``sequence``: tokens; ``micro_batch``: sequences of a replica; ``accumulation``: micro-batches of a step.
    ``checkpointing``: none, selective, every_n (every second block) or full. ``precision``: fp32, bf16, fp16, bf16-pure,
    fp8 or mxfp8. ``sequence_parallel``: tensor ranks divide rows between the layers that they divide. ``wire_bytes``: of a
    gradient where it is reduced. ``reduces_once``: at stages 2 and 3 gradients are reduced once in a step, not for each
    micro-batch. ``hides``: what goes on behind the computation.
    """

    data: int
    tensor: int = 1
    pipe: int = 1
    chunks: int = 1
    zero_bubble: bool = False
    context: int = 1
    stage: int = 0
    shard: int = 1
    sequence: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: str = "none"
    offload_optimizer: bool = False
    precision: str = "bf16"
    sequence_parallel: bool = False
    kernels: KernelGeneration = KernelGeneration.FLASH
    wire_bytes: int = 4
    reduces_once: bool = False
    hides: frozenset[str] = frozenset((REDUCTIONS, GATHERS))

    @property
    def schedule(self) -> str:
        """The pipeline's, by its name in the configuration."""
        return "interleaved" if self.chunks > 1 else "zero_bubble" if self.zero_bubble else "1f1b"

    @property
    def world(self) -> int:
        """Ranks, in all."""
        return self.data * self.tensor * self.pipe * self.context

    @property
    def batch(self) -> int:
        """Sequences of a step, in all."""
        return self.micro_batch * self.accumulation * self.data

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.sequence // self.context
