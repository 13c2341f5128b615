"""Collectives that the script makes by itself are on the board, do what they did, and cost no break of a compiled graph."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from harness import run_ranks

from zerorun.distributed import script_calls
from zerorun.distributed.script_calls import show_script_calls
from zerorun.distributed.transport import world
from zerorun.distributed.transport.gloo import Gloo
from zerorun.distributed.transport.statistics import CommunicationStatistics
from zerorun.watch.board import ALL, Span, board


@contextmanager
def noted() -> Iterator[tuple[list[Any], list[Any]]]:
    """(waits, sizes) that are shown meanwhile, as the board is told of them."""
    usual = {name: getattr(dist, name) for name in script_calls._SIZED}
    waits: list[tuple[str, Span, int]] = []
    sizes: list[tuple[str, Span, int, int]] = []
    board.__dict__ |= {"wait_begins": lambda *wait: waits.append(wait), "wait_ends": lambda label: None}
    board.__dict__["note_size"] = lambda *note: sizes.append(note)
    show_script_calls()
    show_script_calls()
    try:
        yield waits, sizes
    finally:
        for name in ("wait_begins", "wait_ends", "note_size"):
            del board.__dict__[name]
        for name, function in usual.items():
            setattr(dist, name, function)
        script_calls._numbers.clear()


def calls() -> tuple[list[Any], list[Any]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 2])
    with noted() as (waits, sizes):
        for _ in range(2):
            total = torch.ones(3, dtype=torch.float64)
            dist.all_reduce(total, dist.ReduceOp.SUM)
            assert total.eq(size).all()
        work = dist.all_reduce(total, async_op=True)
        work.wait()
        everything = torch.empty(size * 2)
        dist.all_gather_into_tensor(everything, torch.full((2,), float(rank)))
        assert everything.tolist() == [float(other) for other in range(size) for _ in range(2)]
        parts = [torch.empty(1) for _ in range(size)]
        dist.all_gather(tensor=torch.full((1,), float(rank)), tensor_list=parts)
        dist.broadcast(total, 1, group=dist.group.WORLD)
        dist.barrier()
        names: list[Any] = [None] * size
        dist.all_gather_object(names, rank)
        assert names == list(range(size))
        if rank != 1:
            dist.all_reduce(total, group=pair)
            assert total.eq(2 * size**2).all()
        world.barrier("of zerorun")  # is shown as zerorun says
        beside = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
        beside.start()
        beside.join()
    return waits, sizes


def test_waits_and_sizes_are_shown() -> None:
    first, second, third = run_ranks(3, calls)
    assert first == third
    own = ("all_reduce of the script", (0, 2, 2), 1)
    waits = [
        ("all_reduce of the script", ALL, 1),
        ("all_reduce of the script", ALL, 2),
        ("all_gather_into_tensor of the script", ALL, 1),
        ("all_gather of the script", ALL, 1),
        ("broadcast of the script", ALL, 1),
        ("barrier of the script", ALL, 1),
        ("all_gather_object of the script", ALL, 1),
        own,
        ("of zerorun", ALL, 0),
    ]
    sizes = [
        ("all_reduce of the script", ALL, 1, 24),
        ("all_reduce of the script", ALL, 2, 24),
        ("all_reduce of the script", ALL, 3, 24),
        ("all_gather_into_tensor of the script", ALL, 1, 8),
        ("all_gather of the script", ALL, 1, 12),  # all of it: with NCCL ranks may have parts of different sizes
        ("broadcast of the script", ALL, 1, 24),
        (*own, 24),
    ]
    assert first == (waits, sizes)
    assert second == ([wait for wait in waits if wait != own], [size for size in sizes if size != (*own, 24)])


def two_engines() -> list[int]:
    """The numbers that an engine notes, and another one."""
    found = []
    for _ in range(2):
        with noted() as (_, sizes):
            place = ("test", dist.group.WORLD, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
            transport = Gloo(*place, CommunicationStatistics())
            transport.all_reduce(torch.ones(4), "sum")
        found += [number for _, _, number, _ in sizes]
        assert [size for *_, size in sizes] == [16, 16]
    return found


def test_engines_do_not_share_numbers() -> None:
    """Two of one model make collectives of the same names and other sizes, which must not be taken for one another."""
    first, second = run_ranks(2, two_engines)
    assert first == second and len(set(first)) == 4


def compiled() -> tuple[list[float], int]:
    def step(values: torch.Tensor) -> torch.Tensor:
        doubled = values * 2
        dist.all_reduce(doubled)
        return doubled + 1

    with noted() as (waits, _):
        fast: Callable[[torch.Tensor], torch.Tensor] = torch.compile(step, backend="aot_eager", fullgraph=True)
        return fast(torch.ones(2)).tolist(), len(waits)


def test_a_compiled_graph_is_not_broken() -> None:
    """Nor is anything shown of it: its collectives are a part of the graph."""
    assert run_ranks(2, compiled, timeout_s=120) == [([5.0, 5.0], 0)] * 2


def late() -> tuple[float, float]:
    """(seconds that the wait for the other rank took, seconds that this rank was busy in the script)."""
    with noted():
        for name in ("wait_begins", "wait_ends"):
            del board.__dict__[name]
        before = board.enter(1)
        board._busy[1] = 0
        begun = time.monotonic()
        if dist.get_rank() == 1:
            time.sleep(1.0)
        dist.all_reduce(torch.ones(1))
        took = time.monotonic() - begun
        board.enter(before)
        busy = board._busy[1] / 1e9
        board.__dict__ |= {"wait_begins": None, "wait_ends": None}
    return took, busy


def test_who_waits_for_a_slow_rank_is_not_taken_for_one() -> None:
    """Such as for the mean of losses, which many scripts make in each step."""
    (took, busy), (_, worked) = run_ranks(2, late)
    assert took > 0.9 and busy < took / 2 and worked > 0.9
