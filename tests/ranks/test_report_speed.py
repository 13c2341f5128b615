"""What the live check says of speed, from given times: the numbers are computed from them, whatever the machine does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from zerorun.distributed.transport.process_group import init_distributed
from zerorun.report import speed
from zerorun.report.reporter import Reporter

CPU = torch.device("cpu")


class Kept(Reporter):
    """Keeps what it is to say."""

    def say(self, **message: Any) -> None:
        told.append(message)


told: list[dict[str, Any]] = []


def tell_pair() -> list[dict[str, Any]]:
    """Each rank is a host. A ping of nothing takes 4 ms, one with bytes 12 ms, there and back."""
    init_distributed(CPU)
    told.clear()
    real = speed._ping

    def ping(peer: int, size: int, device: torch.device) -> float:
        real(peer, size, device)
        return 0.012 if size else 0.004

    speed._ping = ping
    try:
        speed.pairs(Kept(), CPU, dist.get_rank(), quick=False)
    finally:
        speed._ping = real
    return [message["pair"] for message in told if "pair" in message]


def test_a_message_travels_one_way_in_half_of_a_ping() -> None:
    first, second = run_ranks(2, tell_pair)
    assert second == []
    (pair,) = first
    assert (pair["hosts"], pair["latency_us"], pair["sure"]) == ((0, 1), pytest.approx(2000), True)
    assert pair["gb_per_s"] == pytest.approx((4 << 20) / 0.010 / 1e9)


def tell_sizes() -> list[dict[str, Any]]:
    """Every collective takes a millisecond."""
    init_distributed(CPU)
    told.clear()
    real = speed._time
    speed._time = lambda operation, wire: 0.001
    try:
        speed.sizes(Kept(), CPU, CPU, quick=True)
    finally:
        speed._time = real
    return [message["size"] for message in told if "size" in message]


def test_bus_bandwidths_are_those_of_the_nccl_tests() -> None:
    """Of an ideal ring of four ranks each link carries 3/4 of the buffer, twice for an all-reduce."""
    first, *others = run_ranks(4, tell_sizes)
    assert not any(others)
    largest = {found["name"]: found for found in first}  # sizes ascend
    for name, share in (("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75)):
        assert largest[name]["us"] == pytest.approx(1000)
        assert largest[name]["bus_gb_per_s"] == pytest.approx(share * largest[name]["bytes"] / 0.001 / 1e9)
