"""How long a collective may take is one setting: every process group of an engine has it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import patience, run_ranks, start_ranks, start_script
from models import CASES
from training import make_config, make_engine

import zerorun
from zerorun.distributed.transport.message_waits import Waiter
from zerorun.distributed.waits import set_time_limit

SCRIPT = """
import atexit, sys, time, torch, torch.distributed as dist, zerorun

zerorun.init_distributed("cpu")
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
          "zero_optimization": {"stage": 2}, "communication_timeout_s": 2}
engine = zerorun.initialize(torch.nn.Linear(4, 4), config)
for step in range(2):
    if step and dist.get_rank():
        time.sleep(1000)
    if step:
        begun = time.monotonic()
        atexit.register(lambda: print(time.monotonic() - begun, flush=True))
    engine.backward(engine(torch.ones(1, 4)).mean())
    engine.step()
"""


FAKE = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from zerorun.distributed.waits import set_time_limit, time_limit

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
print(time_limit())
set_time_limit([dist.group.WORLD], time_limit())
"""


def seconds_of(group: dist.ProcessGroup) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def limits(config: dict[str, Any], open_before: bool) -> list[float]:
    """Seconds of the groups of an engine with two axes, in a job whose process group was made with 77 s."""
    assert dist.group.WORLD is not None
    set_time_limit([dist.group.WORLD], timedelta(seconds=77))
    topology = None
    if open_before:
        topology = zerorun.Topology.create(4, dist.get_rank(), shard_degree=2, device_type="cpu")
        topology.own_group()
    engine = make_engine(CASES["plain"], config, topology=topology)
    found = [engine.topology.group(axis) for axis in ("shard", "replicate", "data")]
    found += [engine.topology.own_group(), dist.group.WORLD]
    answer = [*map(seconds_of, found)]
    engine.destroy()
    if topology is not None:
        topology.close()
    return answer


@pytest.mark.parametrize("open_before", (False, True))
@pytest.mark.parametrize("given", (None, 5.5))
def test_all_groups_have_the_limit_of_the_world_or_of_the_configuration(given: float | None, open_before: bool) -> None:
    config = make_config(2) | ({} if given is None else {"communication_timeout_s": given})
    config["zero_optimization"]["shard_degree"] = 2
    for found in run_ranks(4, limits, config, open_before):
        assert set(found) == {given or 77.0}


def wait_for_a_message() -> str:
    """The error of rank 1, to which nothing is sent."""
    assert dist.group.WORLD is not None
    set_time_limit([dist.group.WORLD], timedelta(seconds=1))
    waiter = Waiter()
    if dist.get_rank() == 0:
        return ""
    work = dist.irecv(torch.empty(1), 0)
    assert work is not None
    error = waiter.begin(work).exception(20)
    return type(error).__name__


@pytest.mark.parametrize("peer_memory", by_day(("0", "1"), "1"))
def test_a_rank_that_does_not_come_is_an_error_after_that_time(peer_memory: str) -> None:
    with start_ranks(2, SCRIPT, ZERORUN_PEER_MEMORY=peer_memory) as (waits, _):
        code, said, errors = waits.finish(60 * patience())
        assert code == 1
        assert "OrderError" in errors
        assert float(said) >= 2.0


def test_a_message_that_does_not_come_is_an_error_after_that_time() -> None:
    """Of a pipeline, which waits for messages on threads."""
    assert run_ranks(2, wait_for_a_message) == ["", "RuntimeError"]


def test_a_backend_that_tells_no_limit_has_the_default() -> None:
    code, said, errors = start_script(FAKE).finish(60 * patience())
    assert (code, said) == (0, "0:30:00\n"), errors
