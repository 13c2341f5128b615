"""Right results: every collective that the engine uses, in every dtype, and the engine's own.

Values are compared exactly.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product

import torch

from zerorun.distributed.layout import build_layout
from zerorun.distributed.topology import Topology
from zerorun.distributed.transport import world
from zerorun.distributed.transport.communicator import Channels, Communicator
from zerorun.watch.launch_environment import ranks_here

from .reporter import Reporter

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMELS = (17, 30011)  # odd; one message, and several of every transport's own pieces
_PEER_MEMORY = "ZERORUN_PEER_MEMORY"
# At most this many ranks have anything but 0 at one place, so that sums of 1 to 3 are exact in bf16 (8 bits) and uint8.
_MOST_SUMMANDS = 64
# In dtypes that have the room, values that a detour over 32 bits would change.
_WIDE = {torch.float64: 2**33 + 1, torch.int64: 2**33 + 1}

Outcome = tuple[torch.Tensor, torch.Tensor]  # what came out, what must come out


def check_all(reporter: Reporter, device: torch.device, wire: torch.device) -> None:
    """Every check on every rank; says what is wrong, and what the ranks' transport is.

    ``wire``: where torch's collectives have their buffers, ``device``: where the engine has its own.
    """
    for dtype in DTYPES:
        for name, run in COLLECTIVES.items():
            _check(reporter, f"{name} {_short(dtype)}", partial(run, wire, dtype))
    _check_objects(reporter)
    _check_engine(reporter, device)


def _check(reporter: Reporter, name: str, outcomes: Callable[[], Iterator[Outcome]]) -> None:
    with reporter.check(name):
        wrong = [text for got, want in outcomes() if (text := compare(_spoiled(reporter, name, got), want))]
    reporter.say(checked=name, wrong=wrong[0] if wrong else None)


def _spoiled(reporter: Reporter, name: str, got: torch.Tensor) -> torch.Tensor:
    if reporter.spoils(name) and got.numel():
        got[0] += 1
    return got


def compare(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Where ``got`` is not ``want``, in words; None if it is."""
    if torch.equal(got, want):
        return None
    differing = (got != want).nonzero().flatten()
    at = int(differing[0])
    return f"{len(differing)} of {got.numel()} elements; element {at} is {got[at].item()}, must be {want[at].item()}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- values ------------------------------------------------------------------------------------------------------------


def pattern(rank: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[numel] of this rank: 1, 2 or 3, or 0 where other ranks have their turn; wide dtypes get wide values."""
    stride = -(-world.size() // _MOST_SUMMANDS)
    index = torch.arange(numel, device=device) + rank
    values = torch.where(index % stride == 0, index // stride % 3 + 1, 0)
    return (values * _WIDE.get(dtype, 1)).to(dtype)


def total(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[numel] the sum of all ranks' patterns."""
    summed = torch.zeros(numel, dtype=torch.int64, device=device)
    for rank in range(world.size()):
        summed += pattern(rank, numel, torch.int64, device) // _WIDE[torch.int64]
    return (summed * _WIDE.get(dtype, 1)).to(dtype)


# -- torch's collectives -----------------------------------------------------------------------------------------------


def _all_reduce(device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    for numel in NUMELS:
        buffer = pattern(world.rank(), numel, dtype, device)
        world.all_reduce(buffer, "all_reduce")
        yield buffer, total(numel, dtype, device)


def _all_gather(device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    size = world.size()
    for numel in NUMELS:
        full = torch.zeros(numel * size, dtype=dtype, device=device)
        want = torch.cat([pattern(rank, numel, dtype, device) for rank in range(size)])
        world.all_gather_in_one(full, pattern(world.rank(), numel, dtype, device))
        yield full, want
        yield torch.cat(world.all_gather(pattern(world.rank(), numel, dtype, device), "all_gather")), want


def _reduce_scatter(device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    rank, size = world.rank(), world.size()
    for numel in NUMELS:
        own = torch.zeros(numel, dtype=dtype, device=device)
        full = pattern(rank, numel * size, dtype, device)
        world.reduce_scatter(full, own)
        yield own, total(numel * size, dtype, device)[numel * rank : numel * (rank + 1)]


def _broadcast(device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    size = world.size()
    for source, numel in product({0, size - 1}, NUMELS):
        buffer = pattern(world.rank(), numel, dtype, device)
        world.broadcast(buffer, source, "broadcast")
        yield buffer, pattern(source, numel, dtype, device)


def _send_and_receive(device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    """Everyone to the next rank, all at a time."""
    rank, size = world.rank(), world.size()
    for numel in NUMELS if size > 1 else ():
        came = torch.zeros(numel, dtype=dtype, device=device)
        mine = pattern(rank, numel, dtype, device)
        world.pass_on(mine, came)
        yield came, pattern((rank - 1) % size, numel, dtype, device)


COLLECTIVES: dict[str, Callable[[torch.device, torch.dtype], Iterator[Outcome]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "send and receive": _send_and_receive,
}


def _check_objects(reporter: Reporter) -> None:
    size = world.size()
    with reporter.check("barrier"):
        world.barrier("barrier")
    reporter.say(checked="barrier", wrong=None)
    with reporter.check("gather_values"):
        found = world.gather_values({"rank": world.rank()})
    wrong = None if found == [{"rank": rank} for rank in range(size)] else f"it is {str(found)[:200]}"
    reporter.say(checked="gather_values", wrong=wrong)


# -- the engine's own --------------------------------------------------------------------------------------------------


def _check_engine(reporter: Reporter, device: torch.device) -> None:
    """zerorun's collectives over each topology; with and without peer memory where it is in force."""
    size, local = world.size(), ranks_here(world.size())
    degrees = [size]
    locals_seen = world.gather_values(local)
    if len(set(locals_seen)) == 1 and 1 < local < size:
        degrees.append(local)
    transport = ""
    for degree in degrees:
        with reporter.check(f"zerorun groups of {degree}"):
            topology = Topology.create(size, world.rank(), shard_degree=degree, device_type=device.type)
            communicator = Communicator(topology, device)
        transport = communicator.transport  # that of the last: the ranks of one host
        _check_communicator(reporter, communicator, transport)
        if communicator.reads_peers:
            with _without_peer_memory(), reporter.check(f"zerorun groups of {degree}, sending"):
                communicator = Communicator(topology, device)
            _check_communicator(reporter, communicator, communicator.transport)
    if degrees[-1] == local > 1:
        reporter.say(transport=transport)


@contextlib.contextmanager
def _without_peer_memory() -> Iterator[None]:
    before = os.environ.get(_PEER_MEMORY)
    os.environ[_PEER_MEMORY] = "0"
    try:
        yield
    finally:
        del os.environ[_PEER_MEMORY]
        if before is not None:
            os.environ[_PEER_MEMORY] = before


def _check_communicator(reporter: Reporter, communicator: Communicator, transport: str) -> None:
    degree = communicator.topology.shard
    for dtype in WIRE_DTYPES:
        channels = Channels(communicator.dense.shard, communicator.dense.replicate, dtype)
        tail = f"{_short(dtype)} by {transport}, {degree} ranks"
        _check(reporter, f"zerorun all_gather {tail}", partial(_gathered, communicator, channels, dtype))
        _check(reporter, f"zerorun reduce_scatter {tail}", partial(_scattered, communicator, channels))


def _bounds(degree: int) -> list[Sequence[int]]:
    """Equal shards, and those of parameters that must stay whole."""
    shapes = [(3000,), (40, 50), (17,), (900,)]
    names = [str(index) for index in range(len(shapes))]
    return [build_layout(names, shapes, degree, whole=whole).bounds for whole in (False, True)]


def _gathered(communicator: Communicator, channels: Channels, dtype: torch.dtype) -> Iterator[Outcome]:
    topology, device = communicator.topology, communicator.device
    for bounds in _bounds(topology.shard):
        want = torch.cat(
            [
                pattern(topology.replicate_rank * topology.shard + rank, high - low, dtype, device)
                for rank, (low, high) in enumerate(pairwise(bounds))
            ]
        )
        full = torch.zeros(bounds[-1], dtype=dtype, device=device)
        own = slice(bounds[topology.shard_rank], bounds[topology.shard_rank + 1])
        full[own] = want[own]
        channels.shard.all_gather(full, bounds, "report").wait()
        communicator.fence()
        yield full, want


def _scattered(communicator: Communicator, channels: Channels) -> Iterator[Outcome]:
    topology, device = communicator.topology, communicator.device
    for bounds, accumulate in product(_bounds(topology.shard), (False, True)):
        full = pattern(topology.rank, bounds[-1], torch.float32, device)
        own = slice(bounds[topology.shard_rank], bounds[topology.shard_rank + 1])
        out = torch.full_like(full[own], 5.0)
        channels.reduce_scatter(full, bounds, out, "report", accumulate=accumulate).wait()
        communicator.fence()
        yield out, total(bounds[-1], torch.float32, device)[own] + (5.0 if accumulate else 0.0)
