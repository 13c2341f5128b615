"""``deepspeed.checkpointing``: what models written for Megatron ask of it beside ``checkpoint`` itself."""

from __future__ import annotations

from typing import Any

import torch

from ..activations import checkpointing
from ..activations.random_streams import MODEL_PARALLEL, RandomStreams, device_generator, streams
from ..config.deepspeed_leniency import as_deepspeed_reads
from ..zero.sharded_model import newest_topology
from .mpu import method_of_tensor_ranks

_CUDA_RNG_STATE_TRACKER = streams
_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL
_BEYOND_DATA_PARALLEL = 2718  # between the seed of a rank and that of its stream, as in Megatron-LM

_mpu: Any = None


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set up ``checkpoint`` as ``zerorun.checkpointing.configure`` does. ``mpu_`` tells tensor ranks apart, for seeds.

    None leaves that of before.
    """
    global _mpu
    _mpu = _mpu if mpu_ is None else mpu_
    source = as_deepspeed_reads(deepspeed_config)
    checkpointing.configure(deepspeed_config=source, checkpoint_in_cpu=checkpoint_in_cpu)


def get_cuda_rng_tracker() -> RandomStreams:
    """The streams of random numbers of this rank."""
    return streams


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator alike on tensor ranks, and begin a stream that differs from one of them to the next.

    Streams that there were are forgotten. Tensor ranks are those of the mpu that ``configure`` was given, or else of the
    newest engine; where there is neither, there are none.
    """
    device_generator().manual_seed(seed)
    streams.reset()
    streams.add(MODEL_PARALLEL, seed + _BEYOND_DATA_PARALLEL + _tensor_rank())


def _tensor_rank() -> int:
    asked = method_of_tensor_ranks(_mpu, "rank")
    if asked is not None:
        return int(asked())
    topology = newest_topology()
    return 0 if topology is None else topology.tensor_rank


def _set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1) -> None:
    """Let the device's generator go on from ``new_state``. ``device`` has no effect: a rank has one."""
    device_generator().set_state(new_state)
