"""The global gradient norm: every element once, whatever the stage."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .unit import Unit

# Elements summed in fp32 before the sum goes on in fp64: keeps the relative error near 1e-7 for shards of any size.
_ROW = 4096


def local_square_sum(units: Iterable[Unit]) -> torch.Tensor:
    """Sum of squares of this rank's reduced gradient shards: fp64 scalar on their device. NaN or inf if any element is.

    The shards of one shard group cover each element once; at stage 0 each rank sums its shard, too, so that all stages
    add the same numbers in the same order.
    """
    total: torch.Tensor | None = None
    for unit in units:
        for segment in unit.trainable:
            shard = segment.grad_shard if segment.host_grad is None else segment.host_grad
            assert shard is not None
            part = _square_sum(shard)
            total = part if total is None else total + part.to(total.device)
    return total if total is not None else torch.zeros((), dtype=torch.float64)


def _square_sum(flat: torch.Tensor) -> torch.Tensor:
    whole = flat.numel() // _ROW * _ROW
    total = torch.linalg.vector_norm(flat[whole:]).double().square()
    if whole:
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
        total = total + rows.double().square().sum()
    return total
