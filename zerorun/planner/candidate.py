"""Candidate: one way to run a model on a cluster, as the JSON file and the launcher would say it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..pipeline.schedule.schedules import INTERLEAVED, ZERO_BUBBLE

DISK = "/local_nvme"  # the folder of a node's disks that configurations name
PRECISIONS = ("bf16", "bf16-pure", "fp16", "fp32", "fp8")  # that can be planned
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

    ``chunks``: parts of the model on each of ``pipe`` stages; ``order``: their schedule, where each has one part.
    ``expert``: ranks with different experts, 1 if each has all; they are neighbours, tensor ranks among them.
    ``sequence``: tokens; ``micro_batch``: sequences of a replica; ``accumulation``: micro-batches of a step.
    ``checkpointing``: none, selective, every_n (one of ``every`` blocks) or full. ``precision``: fp32, bf16, fp16,
    bf16-pure, fp8 or mxfp8. ``sequence_parallel``: tensor ranks divide rows between the layers that they divide.
    ``wire_bytes``: of a gradient where it is reduced. ``reduces_once``: at stages 2 and 3 gradients are reduced once in a
    step, not for each micro-batch. With ``offload_optimizer``: ``offload_params``: shards of stage 3 are in host memory,
    too; ``states_on_disk``: master and moments are in files. ``second``: ranks that share a second copy of the weights, if
    they are several (hpZ). ``hides``: what goes on behind the computation. ``narrow_experts``: experts compute in fp8, too.
    """

    data: int
    tensor: int = 1
    pipe: int = 1
    chunks: int = 1
    order: str = "1f1b"
    context: int = 1
    expert: int = 1
    stage: int = 0
    shard: int = 1
    sequence: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: str = "none"
    every: int = 2
    offload_optimizer: bool = False
    offload_params: bool = False
    states_on_disk: bool = False
    second: int = 1
    precision: str = "bf16"
    sequence_parallel: bool = False
    kernels: KernelGeneration = KernelGeneration.FLASH
    wire_bytes: int = 4
    reduces_once: bool = False
    hides: frozenset[str] = frozenset((REDUCTIONS, GATHERS))
    narrow_experts: bool = False

    @property
    def schedule(self) -> str:
        """The pipeline's, by its name in the configuration."""
        return INTERLEAVED if self.chunks > 1 else self.order

    @property
    def zero_bubble(self) -> bool:
        """True if the schedule splits backwards."""
        return self.order == ZERO_BUBBLE

    @property
    def rerun(self) -> float:
        """The part of the blocks that run again in a backward, as a whole."""
        return {"full": 1.0, "every_n": 1 / self.every}.get(self.checkpointing, 0.0)

    @property
    def element(self) -> int:
        """Bytes of a weight or an activation where it is sent."""
        return 4 if self.precision == "fp32" else 2

    @property
    def replicas(self) -> int:
        """Ranks that sum the gradients of what is no expert."""
        return self.data * self.context

    @property
    def divided(self) -> int:
        """Ranks over which flat buffers are laid out: also at stage 0, where each has all of them."""
        return self.shard if self.stage else self.replicas

    @property
    def places(self) -> int:
        """How many of the replicas have different experts."""
        return max(self.expert // self.tensor, 1)

    @property
    def expert_divided(self) -> int:
        """Ranks over which the flat buffers of experts are laid out."""
        return max(self.divided // self.places, 1)

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


def candidate_config(candidate: RunCandidate) -> dict[str, object]:
    """Return the configuration of ``candidate``: what the JSON file says."""
    c = candidate
    zero: dict[str, object] = {"stage": c.stage}
    if c.stage and c.shard != c.replicas:
        zero["shard_degree"] = c.shard
    if c.offload_optimizer:
        there: dict[str, object] = {"device": "nvme", "nvme_path": DISK} if c.states_on_disk else {"device": "cpu"}
        zero["offload_optimizer"] = there
    if c.offload_params:
        zero["offload_param"] = {"device": "cpu"}
    if c.second > 1:
        zero["zero_hpz_partition_size"] = c.second
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
    if c.expert > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": c.expert}
    if c.context > 1:
        config["sequence_parallel_size"] = c.context
    if c.kernels is KernelGeneration.FUSED:
        config["compile"] = {"enabled": True}
    if c.checkpointing != "none":
        every = {"every_n": c.every} if c.checkpointing == "every_n" else {}
        config["activation_checkpointing"] = {"policy": c.checkpointing, **every}
    return config
