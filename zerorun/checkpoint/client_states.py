"""Client states: what a script keeps in a checkpoint beside the training. Each rank gets its own back, if they differ.

As a rule all ranks give the same, or rank 0 alone gives one: then that of rank 0 is stored, and all ranks get it. What
another rank gives otherwise is stored beside it. It is loaded only where the ranks are laid out as they were.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from ..distributed.topology import Topology
from ..log import is_rank_zero, logger
from .json_values import encode
from .manifest import Manifest
from .ranks import Ranks, attempt, is_by_rank
from .tensorfile import tensor_sum


def encode_own(state: Mapping[str, Any], ranks: Ranks) -> tuple[Any, dict[str, torch.Tensor]]:
    """(``state`` as plain values, the tensors that they refer to); (None, {}) if it is that of rank 0. Collective.

    A rank that gives nothing has that of rank 0. Raises CheckpointError on all ranks if a state cannot be stored.
    """
    found, problem = attempt(lambda: _sum(state) if state else None)
    sums = ranks.gather_unless(problem, found)
    if sums[ranks.rank] in (None, sums[0]):
        return None, {}
    tensors: dict[str, torch.Tensor] = {}
    return encode(dict(state), tensors, f"client_state.{ranks.rank}"), tensors


def client_state_of(manifest: Manifest, topology: Topology) -> Any:
    """As plain values: this rank's own if the ranks are laid out as they were and it gave one, else that of rank 0."""
    by_rank, own = manifest.client_states, None
    if by_rank is not None and is_by_rank(topology, manifest.layout, len(by_rank)):
        own = by_rank[topology.rank]
    elif by_rank is not None and is_rank_zero():
        logger.info("all ranks get the client_state of rank 0: others gave their own, and now there are other ranks.")
    return manifest.client_state if own is None else own


def _sum(state: Mapping[str, Any]) -> int:
    """The CRC-32 of all values."""
    tensors: dict[str, torch.Tensor] = {}
    total = zlib.crc32(json.dumps(encode(dict(state), tensors, "client_state"), sort_keys=True).encode())
    for tensor in tensors.values():
        total = tensor_sum(tensor, zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), total))
    return total
