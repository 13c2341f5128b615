"""The transports, behind their one interface: the same calls give the same results, and cost the bytes that are counted.

NCCL's is tried over gloo, which has all the calls that it makes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from zerorun.distributed.transport.connect import connect_axis
from zerorun.distributed.transport.gloo import Gloo
from zerorun.distributed.transport.nccl import Nccl
from zerorun.distributed.transport.statistics import CommunicationStatistics
from zerorun.distributed.transport.through_host import ThroughHost
from zerorun.distributed.transport.transport import Transport

CPU = torch.device("cpu")
EVEN = {2: (0, 6, 12), 3: (0, 4, 8, 12), 4: (0, 3, 6, 9, 12)}
# With 4 ranks some have a part of the size that all would have if they were of one size, and others have not.
UNEVEN = {2: [(0, 12, 12)], 3: [(0, 5, 5, 12)], 4: [(0, 5, 9, 12, 12), (0, 3, 5, 9, 12), (0, 0, 0, 0, 12)]}


def made(kind: str) -> Transport:
    place = ("test", dist.group.WORLD, dist.get_rank(), dist.get_world_size(), CPU, CommunicationStatistics())
    if kind == "nccl":
        return Nccl(*place)
    if kind == "gloo":
        return Gloo(*place)
    os.environ["ZERORUN_PEER_MEMORY"] = "1"
    found = connect_axis(*place)
    assert found.name == "peer memory"
    return ThroughHost(found, CPU) if kind == "through host" else found


def values(rank: int) -> torch.Tensor:
    """[12], exact in bf16, as are their sums."""
    return torch.arange(12.0) * (rank + 1) - 3


def total(size: int) -> torch.Tensor:
    return torch.stack([values(rank) for rank in range(size)]).sum(0)


def check(kind: str) -> dict[str, tuple[int, int]]:
    """Tries everything on this rank; returns calls and bytes sent by label."""
    transport, rank, size = made(kind), dist.get_rank(), dist.get_world_size()
    everything = total(size)
    for bounds in (EVEN[size], *UNEVEN[size]):
        own = slice(bounds[rank], bounds[rank + 1])
        gathered, source = torch.full((12,), -1.0), everything[own].clone()
        transport.all_gather(gathered, bounds, "gather", source, until_given=True).wait()
        assert torch.equal(gathered, everything)
        for wire in (torch.float32, torch.bfloat16):
            for accumulate in (False, True):
                full, out = values(rank), torch.full((bounds[rank + 1] - bounds[rank],), 2.0)
                transport.reduce_scatter(full, bounds, out, "scatter", accumulate=accumulate, wire_dtype=wire).wait()
                assert torch.equal(out, everything[own] + 2.0 * accumulate)
        full = values(rank)
        transport.reduce_scatter(full, bounds, full[own], "scatter", accumulate=False, wire_dtype=torch.float32).wait()
        assert torch.equal(full[own], everything[own])
    for wire in (None, torch.bfloat16):
        buffer = values(rank)
        transport.all_reduce(buffer, "reduce", wire)
        assert torch.equal(buffer, everything)
        buffer = torch.full((12,), -1.0)
        first = transport.all_gather(buffer, EVEN[size], "before", everything[EVEN[size][rank] : EVEN[size][rank + 1]])
        transport.sum_after(first, buffer, "after", wire or torch.float32).wait()
        assert torch.equal(buffer, everything * size)
    flat = values(rank)
    assert torch.equal(transport.sum_of(flat, "sum"), everything) and torch.equal(flat, values(rank))
    told = torch.full((3, 2), rank, dtype=torch.bfloat16)
    transport.broadcast(told, "broadcast", size - 1)
    assert told.eq(size - 1).all()
    came = torch.empty(12)
    works = [transport.receive(came, (rank - 1) % size, 7), transport.send(values(rank), (rank + 1) % size, 7)]
    for work in works:
        work.wait()
    assert torch.equal(came, values((rank - 1) % size))
    transport.fence()
    return {label: (entry.calls, entry.bytes) for label, entry in transport.statistics.traffic.items()}


@pytest.mark.parametrize("size", (2, 3, 4))
def test_all_give_the_same(size: int) -> None:
    gloo, same_host, through_host, nccl = (
        run_ranks(size, check, kind) for kind in ("gloo", "same host", "through host", "nccl")
    )
    assert gloo == same_host == through_host
    assert all(found.keys() == gloo[0].keys() for found in nccl)


@pytest.mark.parametrize("kind", ("gloo", "through host", "nccl"))
def test_one_rank_sends_nothing(kind: str) -> None:
    """An axis of one rank needs no process group, and rounds nothing, as nothing is on the wire."""
    place = ("test", None, 0, 1, CPU, CommunicationStatistics())
    makers: dict[str, Callable[[], Transport]] = {
        "gloo": lambda: Gloo(*place),
        "through host": lambda: ThroughHost(Gloo(*place), CPU),
        "nccl": lambda: Nccl(*place),
    }
    transport, bounds = makers[kind](), (0, 12)
    full, gathered, out = values(0) / 3, torch.zeros(12), torch.zeros(12)
    transport.all_gather(gathered, bounds, "gather", full).wait()
    transport.reduce_scatter(full, bounds, out, "scatter", accumulate=True, wire_dtype=torch.bfloat16).wait()
    transport.all_reduce(full, "reduce")
    transport.broadcast(full, "broadcast")
    for found in (full, gathered, out, transport.sum_of(full, "sum")):
        assert torch.equal(found, values(0) / 3)
    assert not torch.equal(full, full.bfloat16().float())
    assert not transport.statistics.traffic


def come_last() -> list[float]:
    """Rank 0 comes when rank 1 has begun, and does not look at what others offer."""
    transport, rank = made("peer memory"), dist.get_rank()
    sent, received = [torch.full((1,), 10.0 * rank + peer) for peer in range(2)], [torch.zeros(1), torch.zeros(1)]
    if rank == 0:
        dist.barrier()
    begun = transport.all_to_all(sent, received, "rows", until_given=False)
    if rank == 0:
        begun.wait()
    else:
        dist.barrier()
    dist.barrier()
    begun.wait()
    return [float(flat) for flat in received]


def test_who_comes_last_does_not_wait_for_readers() -> None:
    assert run_ranks(2, come_last) == [[0.0, 10.0], [1.0, 11.0]]
