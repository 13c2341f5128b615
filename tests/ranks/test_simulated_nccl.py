"""The branch for NCCL gives the run of one process, on the simulated device: calls in order, no tags, sends that wait.

Each rank's collectives are written down, and have to be the same on all ranks of a group.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import test_pipeline
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, Place
from reference import Result, differences, train_reference
from simulation import refuse_different_calls, simulated_device
from training import make_config, make_engine, train

import zerorun
from zerorun.distributed import waits
from zerorun.distributed.simulated import DEVICE
from zerorun.distributed.transport.nccl import Nccl
from zerorun.distributed.transport.simulated_nccl import group_of
from zerorun.distributed.transport.statistics import CommunicationStatistics, Pending
from zerorun.errors import OrderError
from zerorun.pipeline.p2p import ACTIVATIONS, GRADIENTS

STEPS = 2
SETTINGS: dict[str, Any] = {
    "world": (4, 2, 3, 8),
    "stage": (3, 2, 1, 0),
    "degree": ("all", "half"),
    "accumulation": (1, 2),
    "model": ("plain", "tied", "moe", "checkpoint_reentrant"),
}
ROWS = [values for values in product(*SETTINGS.values()) if values[0] != 3 or values[2] == "all"]


def train_by_nccl(model: str, config: dict[str, Any]) -> tuple[Result, set[str]]:
    """The run, and the operations that were used."""
    with simulated_device() as calls:
        result = train(CASES[model], config, STEPS)
        refuse_different_calls(calls)
        return result, {call[0] for made in calls.values() for call in made}


@cache
def reference(model: str, world: int, accumulation: int, optimizer: str) -> Result:
    return train_reference(
        CASES[model], world_size=world, steps=STEPS, accumulation=accumulation, clip=0.5, optimizer=optimizer
    )


@pytest.mark.each_value  # the pairs of most of them come in test_simulated_device.py
@pytest.mark.parametrize(tuple(SETTINGS), ROWS)
def test_every_stage_equals_one_process(world: int, stage: int, degree: str, accumulation: int, model: str) -> None:
    config = make_config(stage, accumulation=accumulation, clip=0.5)
    shards = config["zero_optimization"]["shard_degree"] = world if degree == "all" else world // 2
    found = run_ranks(world, train_by_nccl, model, config)
    wanted = reference(model, world, accumulation, "AdamW")
    for rank, (result, used) in enumerate(found):
        assert not differences(result, wanted), f"rank {rank}"
        assert {"reduce_scatter", "all_gather"} <= used or shards == 1 or stage == 0


class Whole(torch.optim.AdamW):
    """Of this class nobody knows that it works element by element, so parameters stay whole."""


def train_whole(stage: int) -> Result:
    case = CASES["plain"]
    with simulated_device() as calls:
        how = {"lr": 3e-3, "eps": 1e-4, "weight_decay": 0.1}
        result = train(case, make_config(stage, clip=0.5), STEPS, optimizer=lambda params: Whole(params, **how))
        refuse_different_calls(calls)
    return result


@pytest.mark.parametrize("stage", by_day((1, 2, 3), 3))
def test_shards_of_different_sizes(stage: int) -> None:
    """Ranks that chose an operation from the size of their own shard would choose different ones."""
    for rank, result in enumerate(run_ranks(4, train_whole, stage)):
        assert not differences(result, reference("plain", 4, 1, "AdamW")), f"rank {rank}"


def train_with_spoilt_slots() -> tuple[Result, int]:
    """Before each gather into a shared slot nothing of use is there. Returns how many of these there were, too."""
    gathers, real = 0, Nccl._all_gather

    def spoilt(
        self: Nccl, full: torch.Tensor, bounds: Sequence[int], label: str, source: torch.Tensor | None, until_given: bool
    ) -> Pending:
        nonlocal gathers
        if source is not None:
            gathers += 1
            full.fill_(float("nan"))
        return real(self, full, bounds, label, source, until_given)

    with simulated_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nccl, "_all_gather", spoilt)
        return train(CASES["plain"], make_config(3, clip=0.5), STEPS), gathers


def test_shards_are_sent_from_where_they_lie() -> None:
    """Nobody copies them into the slot first: they come there with the others."""
    for result, gathers in run_ranks(4, train_with_spoilt_slots):
        assert not differences(result, reference("plain", 4, 1, "AdamW"))
        assert gathers >= 2 * STEPS  # a forward and a backward each


def step_in_another_order(stage: int) -> tuple[str, bool]:
    """Rank 1 means another unit than the others, of the same size. Returns the error, and if the weights stayed."""
    case = CASES["plain"]
    with simulated_device():
        engine = make_engine(case, make_config(stage))

        def step() -> None:
            engine.backward(case.loss(engine, Place(dist.get_rank(), 0)))
            engine.step()

        step()
        before, error = engine.state_dict(), ""
        order = engine.comm.statistics.order
        if dist.get_rank() == 1:
            order.note("one: gather parameters")
            order.note("two: gather parameters")
        else:
            order.note("two: gather parameters")
            order.note("one: gather parameters")
        try:
            step()
        except OrderError as found:
            error = str(found)
        after = engine.state_dict()
        engine.destroy()
    return error, all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("stage", (1, 3))
def test_another_order_is_an_error_that_names_it(stage: int) -> None:
    for error, stayed in run_ranks(3, step_in_another_order, stage):
        assert stayed and re.search(r"number \d+ was 'two: .*' on rank 0 and 'one: .*' on rank 1.*Remedy", error)


# -- pipelines ---------------------------------------------------------------------------------------------------------


def train_pipeline(
    layers: int, stages: int, config: dict[str, Any], chunks: int
) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """The run, and the operations of each process group of two neighbours."""
    with simulated_device() as calls:
        result = test_pipeline.train(layers, stages, config, chunks)
        refuse_different_calls(calls)
        made = [{call[0] for call in found} for found in calls.values()]
        return result, [tuple(found) for found in made if {"send", "receive"} & found]


@pytest.mark.parametrize(
    ("schedule", "stage", "world", "stages"),
    by_day(
        (
            *(
                ("1f1b", 1, 2, 2),
                ("gpipe", 2, 2, 2),
                ("interleaved", 3, 2, 2),
                ("zero_bubble", 0, 2, 2),
                ("naive", 1, 2, 2),
            ),
            *(("1f1b", 3, 4, 2), ("interleaved", 1, 3, 3), ("zero_bubble", 2, 4, 4), ("1f1b", 2, 4, 4), ("gpipe", 0, 3, 3)),
            *(("gpipe", 1, 4, 4), ("interleaved", 2, 4, 4), ("naive", 3, 4, 4)),
        ),
        *(("1f1b", 3, 4, 2), ("interleaved", 1, 3, 3)),
    ),
)
def test_pipelines_equal_one_process(schedule: str, stage: int, world: int, stages: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    layers = max(5, stages * chunks)
    config = make_config(stage, accumulation=4, clip=0.5, pipeline={"schedule": schedule, "chunks": chunks})
    found = run_ranks(world, train_pipeline, layers, stages, config, chunks)
    test_pipeline.compare([result for result, _ in found], test_pipeline.reference(layers, world // stages, 4, 0.5))
    for _, used in found:
        assert used and all(len(operations) == 1 for operations in used), "a group goes one way"


def exchange_tensors_of_the_host() -> list[float]:
    """A layer may give the next stage a tensor that it left in host memory: it arrives on the device, by the link."""
    from zerorun.distributed.transport.connect import connect_links
    from zerorun.distributed.transport.gloo import Gloo
    from zerorun.pipeline.p2p import PointToPoint, links_of

    topology = zerorun.Topology.create(2, dist.get_rank(), pipe=2, device_type="cpu")
    with simulated_device():
        host, statistics, other = torch.device("cpu"), CommunicationStatistics(), 1 - dist.get_rank()
        transport = Gloo("pipe", topology.group("pipe"), dist.get_rank(), 2, host, statistics)
        links = connect_links("pipe", links_of(2, 2), topology, DEVICE, statistics)
        p2p = PointToPoint(transport, lambda message, label, peer: message.result(60), DEVICE, links)
        found = []
        for step in range(3):  # both ways at once, in either sort
            for sort in (ACTIVATIONS, GRADIENTS):
                p2p.send({"x": torch.full((2, 3), 1.0 + step), "n": step}, other, sort)
            for sort in (GRADIENTS, ACTIVATIONS):
                found.append(float(p2p.receive(other, sort)["x"].sum()))
        p2p.finish()
        assert len(links) == 4
    topology.close()
    return found


def test_messages_of_both_sorts_go_both_ways_at_once() -> None:
    for found in run_ranks(2, exchange_tensors_of_the_host):
        assert found == [6.0, 6.0, 12.0, 12.0, 18.0, 18.0]


class WaitsDuring:
    """Passes calls on, and notes for what the program waits meanwhile."""

    def __init__(self, calls: Any) -> None:
        self._calls, self.noted = calls, list[list[str]]()

    def __getattr__(self, name: str) -> Any:
        self.noted.append([entry.what for entry in waits.watch.open.values()])
        return getattr(self._calls, name)


def waits_for_collectives() -> list[list[str]]:
    rank = dist.get_rank()
    with simulated_device():
        nccl = Nccl("shard", dist.group.WORLD, rank, 2, DEVICE, CommunicationStatistics())
        calls = nccl.__dict__["calls"] = WaitsDuring(nccl.calls)
        for label in ("first", "second"):
            nccl.all_gather(torch.zeros(4), (0, 2, 4), label).wait()
    return calls.noted


def test_the_first_collective_is_a_wait_with_a_name() -> None:
    """NCCL connects ranks there, and the program goes on when all have come."""
    assert run_ranks(2, waits_for_collectives) == [[["first"], []]] * 2


def exchange(dtype: torch.dtype) -> list[list[int]]:
    """What comes by gathers of equal and other shards, by an all-to-all and a message. Rank r gives bytes of r + 1."""
    rank, found = dist.get_rank(), []

    def own(numel: int) -> torch.Tensor:
        return torch.full((numel * dtype.itemsize,), rank + 1, dtype=torch.uint8).view(dtype)

    with simulated_device():
        nccl = Nccl("shard", dist.group.WORLD, rank, 2, DEVICE, CommunicationStatistics())
        for bounds in ((0, 2, 4), (0, 3, 4)):
            full = torch.zeros(4, dtype=dtype)
            nccl.all_gather(full, bounds, "gather", own(bounds[rank + 1] - bounds[rank])).wait()
            found.append(full)
        came = [torch.zeros(2, dtype=dtype) for _ in range(2)]
        nccl.all_to_all([own(2), own(2)], came, "to all").wait()
        found.append(came[1 - rank])
        message = torch.zeros(2, dtype=dtype)
        work = nccl.send(own(2), 1, 0) if rank == 0 else nccl.receive(message, 0, 0)
        work.wait()
        found.append(own(2) if rank == 0 else message)
    return [flat.view(torch.uint8)[:: dtype.itemsize].tolist() for flat in found]


@pytest.mark.parametrize("dtype", (torch.int16, torch.uint64, torch.float8_e8m0fnu, torch.complex64, torch.float32))
def test_what_is_not_added_up_may_have_any_dtype(dtype: torch.dtype) -> None:
    """Of frozen weights, buffers and activations; NCCL knows some."""
    for rank, found in enumerate(run_ranks(2, exchange, dtype)):
        assert found == [[1, 1, 2, 2], [1, 1, 1, 2], [2 - rank] * 2, [1, 1]]


def sum_of(dtype: torch.dtype) -> str:
    with simulated_device(), pytest.raises(ValueError, match="NCCL knows no") as raised:
        group_of(dist.group.WORLD).allreduce([torch.ones(2, dtype=dtype)])  # type: ignore[arg-type]
    return str(raised.value)


def test_the_simulation_refuses_dtypes_as_nccl_does() -> None:
    assert run_ranks(1, sum_of, torch.int16) == ["NCCL knows no torch.int16"]


def memory_of_a_call() -> tuple[bool, bool]:
    """Whether what was sent is still there when the call is over, and when it was waited for. Nobody else keeps it."""
    with simulated_device():
        group = dist.group.WORLD
        assert group is not None
        full, own = torch.ones(16), torch.empty(8)
        sent = weakref.ref(full)
        work = group_of(group)._reduce_scatter_base(own, full, None)
        del full
        while not work.is_completed():
            time.sleep(1e-3)
        time.sleep(0.05)  # the thread that has made the call lets go of it
        after_call = sent() is not None
        work.wait()
        return after_call, sent() is not None


def test_buffers_stay_until_the_call_is_waited_for() -> None:
    """As those of NCCL do; else memory that a transfer is reading is given back to the computation."""
    assert run_ranks(2, memory_of_a_call) == [(True, False)] * 2
