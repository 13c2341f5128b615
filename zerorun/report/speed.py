"""How fast: each rank's own computing, each pair of hosts, and collectives against the size of messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median_low

import torch

from zerorun.distributed.device import host_empty, on_gpu, on_host, synchronize
from zerorun.distributed.topology import Topology
from zerorun.distributed.transport import world
from zerorun.distributed.transport.communicator import Communicator

from .reporter import PAIR, Reporter

# The best of some stretches: short enough to pass between what others do now and then, and longer than the period (100 ms)
# in which the kernel allots a container its share of a processor, so that what is always slow is seen.
STRETCHES, STRETCH_SECONDS = 5, 0.12
COMPUTE_ROUNDS, ALIKE = 4, 1.2  # times the median
MATMUL_NUMEL, MATMUL_NUMEL_GPU = 384, 4096  # rows and columns
COPY_BYTES = 64 << 20  # between host and device
MOST_HOSTS_IN_PAIRS = 16  # more: a ring, and the first host to all
PINGS, REPEATS = 15, 6  # the best counts
PROBE_BYTES, PAIR_BYTES = 256 << 10, 4 << 20
PROBE_IS_SLOW_SECONDS = 0.02
SIZES = tuple(8 << shift for shift in range(0, 22, 3))  # bytes: 8 .. 16 MiB
QUICK_BYTES = 256 << 10
SIZE_SECONDS = 0.04  # for one size of one collective
TOO_SLOW_SECONDS = 1.0  # sizes that will take longer are left out
_MOST_REPEATS = 50
_STOP = -1


# -- computing ---------------------------------------------------------------------------------------------------------


def compute(reporter: Reporter, device: torch.device, wire: torch.device) -> None:
    """The time of a matrix product: a rank's own work, in which it waits for nobody.

    On one processor core: the threads of a product wait for each other, and would make much of a little disturbance. When
    ranks differ they measure again: what lasts is told, not what came by.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dtype = torch.float32 if on_host(device) else torch.bfloat16
    numel = MATMUL_NUMEL_GPU if on_gpu(device) else MATMUL_NUMEL
    left, right = (torch.ones(numel, numel, dtype=dtype, device=device) for _ in range(2))
    stretches = []
    for _ in range(COMPUTE_ROUNDS):
        with reporter.check("computing"):
            torch.mm(left, right)
            stretches += [_stretch(left, right, reporter.slowness()) for _ in range(STRETCHES)]
        best = min(wall for wall, _ in stretches)
        with reporter.check("comparing the times"):
            times = world.all_gather(torch.tensor([best], dtype=torch.float64, device=wire), "comparing the times")
            found = [float(other.item()) for other in times]
        if max(found) < ALIKE * median_low(found):
            break
    torch.set_num_threads(threads)
    speeds = {"matmul_ms": best * 1e3, "tflop_per_s": 2e-12 * numel**3 / best}
    if on_host(device):
        speeds["processor_ms"] = min(busy for _, busy in stretches) * 1e3
    if on_gpu(device):
        with reporter.check("copying between host and device"):
            speeds.update(_copies(device))
    reporter.say(compute=speeds)


def _stretch(left: torch.Tensor, right: torch.Tensor, slowness: float) -> tuple[float, float]:
    """Mean seconds of a product over STRETCH_SECONDS: (by the clock, in which this thread had a processor)."""
    synchronize(left.device)
    count, debt, start, busy = 0, 0.0, time.perf_counter(), time.thread_time()
    while (taken := time.perf_counter() - start) < STRETCH_SECONDS:
        debt += slowness  # products for which one is counted
        while debt >= 1:
            torch.mm(left, right)
            debt -= 1
        synchronize(left.device)
        count += 1
    return taken / count, (time.thread_time() - busy) / count


def _copies(device: torch.device) -> dict[str, float]:
    """GB/s between pinned host memory and the device."""
    host = host_empty(COPY_BYTES, torch.uint8, pinned=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    found = {}
    for name, target, source in (("to_device_gb_per_s", there, host), ("from_device_gb_per_s", host, there)):
        times = []
        for _ in range(4):
            synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronize(device)
            times.append(time.perf_counter() - start)
        found[name] = COPY_BYTES / min(times) / 1e9
    return found


# -- pairs of hosts ----------------------------------------------------------------------------------------------------


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` hosts in rounds in which no host is twice; of very many hosts a ring and a star."""
    if count > MOST_HOSTS_IN_PAIRS:
        ring = [(host, host + 1) for host in range(count - 1)]
        return [ring[::2], ring[1::2], [(0, count - 1)], *([(0, host)] for host in range(2, count - 1))]
    places = [*range(count), *([-1] if count % 2 else [])]  # -1: whoever meets it rests
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in met if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def pairs(reporter: Reporter, device: torch.device, node: int, *, quick: bool) -> None:
    """The latency and bandwidth between the first ranks of each pair of hosts. ``device``: where buffers lie."""
    mine = torch.tensor([node], device=device)
    found = [int(other.item()) for other in world.all_gather(mine, "the numbers of hosts")]
    leaders = [found.index(number) for number in sorted(set(found))]
    for meeting in rounds(len(leaders)) if len(leaders) > 1 else []:
        for first, second in meeting:
            if world.rank() in (leaders[first], leaders[second]):
                _meet(reporter, device, (first, second), (leaders[first], leaders[second]), quick=quick)
        with reporter.check("barrier between pairs of hosts"):
            world.barrier("barrier between pairs of hosts")


def _meet(reporter: Reporter, device: torch.device, hosts: tuple[int, int], ranks: tuple[int, int], *, quick: bool) -> None:
    with reporter.check(f"{PAIR}{hosts[0]} {hosts[1]}"):
        if world.rank() == ranks[1]:
            _echo(ranks[0], device)
            return
        pings = [_ping(ranks[1], 0, device) for _ in range(3)]
        pings = [_ping(ranks[1], 0, device) for _ in range(PINGS if min(pings) < 0.05 else 3)]
        latency, size = min(pings) / 2, PROBE_BYTES
        taken = min(_ping(ranks[1], size, device) for _ in range(REPEATS))
        if taken < PROBE_IS_SLOW_SECONDS and not quick:
            size = PAIR_BYTES
            taken = min(_ping(ranks[1], size, device) for _ in range(REPEATS))
        world.send(torch.tensor([_STOP], device=device), ranks[1])
    sure = size == PAIR_BYTES or taken > PROBE_IS_SLOW_SECONDS  # a short message says little of a fast network
    speed = size / max(taken - latency, 1e-9) / 1e9
    reporter.say(pair={"hosts": hosts, "latency_us": latency * 1e6, "gb_per_s": speed, "sure": sure})


def _ping(peer: int, size: int, device: torch.device) -> float:
    """Seconds until ``peer`` has answered ``size`` bytes."""
    head, payload = torch.tensor([size], device=device), torch.zeros(size, dtype=torch.uint8, device=device)
    synchronize(device)
    start = time.perf_counter()
    world.send(head, peer)
    if size:
        world.send(payload, peer)
    world.receive(head, peer)
    synchronize(device)
    return time.perf_counter() - start


def _echo(peer: int, device: torch.device) -> None:
    """Answer pings until told to stop."""
    head = torch.zeros(1, dtype=torch.int64, device=device)
    payload = torch.zeros(PAIR_BYTES, dtype=torch.uint8, device=device)
    while True:
        world.receive(head, peer)
        size = int(head.item())
        if size == _STOP:
            return
        if size:
            world.receive(payload[:size], peer)
        world.send(head, peer)


# -- sizes of messages -------------------------------------------------------------------------------------------------


def sizes(reporter: Reporter, device: torch.device, wire: torch.device, *, quick: bool) -> None:
    """The time of each collective for each size, as the engine makes them: all-reduce torch's, the others zerorun's.

    Sizes and bus bandwidths are those of the NCCL tests: the whole buffer's, and what an ideal ring has on each link.
    """
    world_size = world.size()
    if world_size == 1:
        return
    with reporter.check("groups for the sizes"):
        topology = Topology.create(world_size, world.rank(), device_type=device.type)
        communicator = Communicator(topology, device)
    for name, trips in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)):
        for size_bytes in SIZES:
            if quick and size_bytes > QUICK_BYTES:
                break
            with reporter.check(f"{name} of {size_bytes} bytes"):
                numel = -(-size_bytes // 4 // world_size) * world_size  # as many for each rank
                seconds = _time(_operation(name, communicator, wire, numel), wire)
            if world.rank() == 0:
                bandwidth = trips * (world_size - 1) / world_size * numel * 4 / seconds / 1e9
                reporter.say(size={"name": name, "bytes": size_bytes, "us": seconds * 1e6, "bus_gb_per_s": bandwidth})
            if seconds * 8 > TOO_SLOW_SECONDS:
                break
    with reporter.check("quiet after the sizes"):
        communicator.fence()


def _operation(name: str, communicator: Communicator, wire: torch.device, numel: int) -> Callable[[], object]:
    size, rank = world.size(), world.rank()
    buffer = torch.zeros(numel, device=wire if name == "all_reduce" else communicator.device)
    if name == "all_reduce":
        return lambda: world.all_reduce(buffer, "report")
    channels, step = communicator.dense, numel // size
    bounds = [step * index for index in range(size + 1)]
    if name == "all_gather":
        return lambda: channels.shard.all_gather(buffer, bounds, "report").wait()
    out = torch.zeros_like(buffer[bounds[rank] : bounds[rank + 1]])
    return lambda: channels.reduce_scatter(buffer, bounds, out, "report", accumulate=False).wait()


def _time(operation: Callable[[], object], wire: torch.device) -> float:
    """Seconds of one call: the mean of several, of the rank that took longest. The same on all ranks."""
    first = _agreed(world.seconds_of(operation, 1, wire), wire)
    if first > TOO_SLOW_SECONDS:
        return first
    count = max(2, min(_MOST_REPEATS, int(SIZE_SECONDS / max(first, 1e-6))))
    return _agreed(world.seconds_of(operation, count, wire), wire)


def _agreed(seconds: float, wire: torch.device) -> float:
    """The largest of all ranks' ``seconds``."""
    value = torch.tensor([seconds], dtype=torch.float64, device=wire)
    world.all_reduce(value, "the longest time", largest=True)
    return float(value.item())
