"""The largest magnitudes of weights that are gathered in fp8: each rank looks at its shards, and all tell each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..distributed.device import on_host, synchronize
from ..distributed.transport.communicator import Communicator
from ..plan.step import LARGEST
from .unit import Unit


def share_largest(units: Sequence[Unit], comm: Communicator) -> None:
    """Let the flat groups of ``units`` that are gathered in fp8 know the largest magnitude in each of their weights.

    It is one message for all weights. Updates in the background are waited for. All ranks of the shard axis must call it.
    """
    coded = [unit for unit in units if any(group.plan.float8 is not None for group in unit.flat_groups)]
    for unit in coded:
        unit.updated()
    groups = [group for unit in coded for group in unit.flat_groups if group.plan.float8 is not None]
    counts, ranks = [len(group.params) for group in groups], comm.topology.shard
    mine, table = (torch.empty(size * sum(counts), device=comm.device) for size in (1, ranks))
    for group, own in zip(groups, mine.split(counts), strict=True):
        own.copy_(group.largest_here())
    comm.dense.shard.all_gather(table, range(0, table.numel() + 1, mine.numel()), LARGEST, mine, until_given=True).wait()
    largest = table.view(ranks, -1).amax(0)
    if any(on_host(group.shard) for group in groups) and not on_host(comm.device):
        synchronize(comm.device)  # their codes are made on the host
    for group, own in zip(groups, largest.split(counts), strict=True):
        group.take_largest(own)
