"""Stage 3 on one host: ranks read each other's shards without waiting for one another, and always the newest values."""

from __future__ import annotations

import copy
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import patience, run_ranks, start_ranks
from models import CASES, Place
from torch import nn
from training import make_config, make_engine

import zerorun
from zerorun.errors import OrderError
from zerorun.zero import value_access

CASE = CASES["plain"]
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def forward(engine: zerorun.Engine) -> torch.Tensor:
    """The same on all ranks."""
    with torch.no_grad():
        return CASE.loss(engine, Place(0, 0, 0)).detach()


def step(engine: zerorun.Engine) -> None:
    engine.backward(CASE.loss(engine, Place(dist.get_rank(), 0, 0)))
    engine.step()


def exchanges(engine: zerorun.Engine) -> int:
    """How many the ranks that shard have made with one another so far."""
    memory = engine.comm.dense.shard.memory
    assert memory is not None
    return memory._number


# -- nobody waits ------------------------------------------------------------------------------------------------


def count_exchanges() -> list[int]:
    engine = make_engine(CASE, make_config(3))
    counts = []
    for _ in range(3):
        before = exchanges(engine)
        forward(engine)
        counts.append(exchanges(engine) - before)
    step(engine)
    before = exchanges(engine)
    forward(engine)
    counts.append(exchanges(engine) - before)
    engine.destroy()
    return counts


@pytest.mark.parametrize("world", (2, 4))
def test_a_forward_needs_an_exchange_only_after_a_step(world: int) -> None:
    """The first forward has another one for the order of units, on which ranks agree, not through this memory."""
    for counts in run_ranks(world, count_exchanges):
        assert counts == [1, 0, 0, 1]


def differences_of_whole_matrices() -> tuple[list[float], int]:
    """(From the module itself, of units that are a matrix each, which lies on one rank whole; how many lie on this one.)"""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    plain, x = copy.deepcopy(module), torch.ones(2, 8)
    config = make_config(3) | {"optimizer": {"type": "Adafactor", "params": {"foreach": True}}}  # wants whole ones
    engine = zerorun.initialize(module, config)
    parts = sum(flat_group.shard.numel() > 0 for unit in engine.units for flat_group in unit.flat_groups)
    found = []
    with torch.no_grad():
        for _ in range(2):
            found.append(float((engine(x).cpu() - plain(x)).abs().max()))
    engine.destroy()
    return found, parts


@pytest.mark.parametrize("world", (2, 4))
def test_ranks_without_a_part_of_a_unit_gather_it_too(world: int) -> None:
    differences, parts = zip(*run_ranks(world, differences_of_whole_matrices), strict=True)
    assert differences == ([0.0, 0.0],) * world
    assert sum(parts) == 3


def run_ahead(file: str) -> float:
    """Rank 0 goes through a forward while rank 1 does nothing."""
    engine = make_engine(CASE, make_config(3))
    forward(engine)
    done = Path(file)
    deadline = time.monotonic() + 20 * patience()
    while dist.get_rank() == 1 and not done.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    loss = float(forward(engine))
    assert dist.get_rank() == 0 or done.exists()
    done.touch()
    step(engine)
    engine.destroy()
    return loss


def test_a_rank_may_run_ahead(tmp_path: Path) -> None:
    first, second = run_ranks(2, run_ahead, str(tmp_path / "rank 0 is through"))
    assert first == second


# -- values are the newest ---------------------------------------------------------------------------------------


def by_step(engine: zerorun.Engine, slow: Callable[[], None]) -> None:
    assert engine.optimizer is not None
    engine.optimizer.register_step_post_hook(lambda *args: slow())
    step(engine)


def by_gathered_parameters(engine: zerorun.Engine, slow: Callable[[], None]) -> None:
    params = [param for name, param in engine.module.named_parameters() if "blocks" in name]
    with slow_stores(slow), zerorun.zero.GatheredParameters(params, modifier_rank=1):
        for param in params if dist.get_rank() == 1 else ():
            with torch.no_grad():
                param.mul_(1.5)


def by_safe_access(engine: zerorun.Engine, slow: Callable[[], None]) -> None:
    params = [param for name, param in engine.module.named_parameters() if "blocks" in name]
    with slow_stores(slow):
        for param in params:
            value = value_access.safe_get_full_fp32_param(param)
            assert value is not None
            value_access.safe_set_full_fp32_param(param, value * 1.5)


@contextmanager
def slow_stores(slow: Callable[[], None]) -> Iterator[None]:
    """New values of parameters are stored after ``slow()``."""
    usual = value_access.store_owned

    def store(*args: Any) -> None:
        slow()
        usual(*args)

    value_access.store_owned = store
    try:
        yield
    finally:
        value_access.store_owned = usual


CHANGES = {"step": by_step, "GatheredParameters": by_gathered_parameters, "safe access": by_safe_access}


def change(name: str, late: int, config: dict[str, Any]) -> tuple[list[float], float]:
    """Losses after three changes in which rank ``late`` is slow, and what a fresh module with these weights gives."""
    engine = make_engine(CASE, config)
    losses = [float(forward(engine))]
    for _ in range(3):
        CHANGES[name](engine, lambda: time.sleep(0.004 if dist.get_rank() == late else 0))
        losses += [float(forward(engine)) for _ in range(2)]
    weights = engine.state_dict()
    engine.destroy()
    plain = CASE.build()
    plain.load_state_dict(weights)
    return losses, float(forward(plain))  # type: ignore[arg-type]


@pytest.mark.each_value
@pytest.mark.parametrize("changes", ({}, OFFLOADED), ids=("device", "offloaded"))
@pytest.mark.parametrize("late", (0, 1))
@pytest.mark.parametrize("name", tuple(CHANGES))
def test_gathers_see_what_was_changed_last(name: str, late: int, changes: dict[str, Any]) -> None:
    first, second = run_ranks(2, change, name, late, make_config(3, optimizer="SGD", **changes))
    assert first == second
    losses, expected = first
    assert losses[1::2] == losses[2::2]
    assert losses[-1] == expected
    assert len(set(losses)) == 4


def load(folder: str, late: int) -> list[float]:
    engine = make_engine(CASE, make_config(3))
    losses = [float(forward(engine))]
    engine.save_checkpoint(folder)
    step(engine)
    losses.append(float(forward(engine)))
    if dist.get_rank() == late:
        time.sleep(0.1)
    engine.load_checkpoint(folder)
    losses.append(float(forward(engine)))
    engine.destroy()
    return losses


@pytest.mark.parametrize("late", (0, 1))
def test_gathers_see_what_was_loaded(late: int, tmp_path: Path) -> None:
    for losses in run_ranks(2, load, str(tmp_path / str(late)), late):
        assert losses[0] == losses[2] != losses[1]


# -- mistakes ----------------------------------------------------------------------------------------------------


def one_forward_more(steps_before: int) -> str:
    engine = make_engine(CASE, make_config(3))
    for _ in range(steps_before):
        forward(engine)
        step(engine)
    forward(engine)
    if dist.get_rank() == 0:
        forward(engine)
    told = ""
    try:
        step(engine)
    except OrderError as error:
        told = str(error)
    engine.destroy()
    return told


@pytest.mark.parametrize("steps_before", (0, 1))
def test_a_forward_on_one_rank_only_is_told(steps_before: int) -> None:
    """Before the update: with other transports the rank would wait for an answer."""
    for told in run_ranks(2, one_forward_more, steps_before):
        assert "equally often" in told


# -- ends --------------------------------------------------------------------------------------------------------

SCRIPT = """
import gc, os, sys, time, torch, zerorun
from torch import nn
torch.set_num_threads(1)
ending, rank = sys.argv[1], int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256)) for _ in range(4)))
engine = zerorun.initialize(model, {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
                                    "zero_optimization": {"stage": 3, "unit_policy": ["Linear"]}})
for step in range(2):
    engine.backward(engine(torch.ones(2, 256)).square().mean())
    engine.step()
with torch.no_grad():
    engine(torch.ones(2, 256))
    if rank == 1:
        if ending == "killed":
            os.kill(os.getpid(), 9)
        for layer in engine.module:
            layer.register_forward_pre_hook(lambda *args: time.sleep(0.3))
    value = float(engine(torch.ones(2, 256)).double().sum())
if ending == "dropped":
    del engine, model
    gc.collect()
    others = [torch.full((256, 128), 7.0) for _ in range(200)]
    time.sleep(3 * (1 - rank))
sys.stdout.write(f"{value!r}\\n")
"""


@pytest.mark.parametrize("ending", by_day(("ended", "dropped"), "ended"))
def test_a_rank_that_is_done_waits_for_those_who_still_read(ending: str) -> None:
    with start_ranks(2, SCRIPT, ending) as scripts:
        (code, first, errors), (other, second, more) = [script.finish(60 * patience()) for script in scripts]
    assert "Error" not in errors + more
    assert code == other == 0
    assert first == second != ""


def test_a_rank_that_is_killed_is_noticed() -> None:
    with start_ranks(2, SCRIPT, "killed") as (first, second):
        assert second.finish(60 * patience())[0] == -signal.SIGKILL
        first.finish(30 * patience())  # it may have read all before the other ended


LEAVING = """
import atexit, os, sys, time
atexit.register(time.sleep, 1.0)  # comes after what zerorun does at the end
import torch, zerorun
torch.set_num_threads(1)
stage, call, rank = int(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16)) for _ in range(4)))
engine = zerorun.initialize(model, {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
                                    "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}})
for batch in range(9):
    if rank == 1 and batch == (5 if call == "step" else 6):
        sys.exit(0)
    if batch == 6 and call == "save_checkpoint":
        engine.save_checkpoint(sys.argv[3])
    try:
        engine.backward(engine(torch.ones(2, 16)).square().mean())
        engine.step()
    except RuntimeError:
        if call != "catches":
            raise
"""


@pytest.mark.parametrize(
    ("stage", "call"),
    by_day(product((1, 2, 3), ("step", "save_checkpoint")), (1, "step"), (1, "save_checkpoint"), (3, "step")),
)
def test_a_rank_whose_script_ends_before_the_others_is_named(stage: int, call: str, tmp_path: Path) -> None:
    """Others are not told to look for an error: it had none."""
    with start_ranks(2, LEAVING, str(stage), call, str(tmp_path)) as (first, second):
        assert second.finish(60 * patience())[0] == 0
        code, _, errors = first.finish(60 * patience())
    assert code == 1
    told = (
        "rank 0: another rank takes no part in it: rank 1 has come to the end of its script. "
        "Remedy: let all ranks make the same calls of the engine, those that save and evaluate, too; "
    )
    assert told in errors


def test_a_script_that_catches_what_ranks_have_to_say_is_told_at_its_end(tmp_path: Path) -> None:
    """It may mean a lack of memory, and end as if all had gone well."""
    with start_ranks(2, LEAVING, "1", "catches", str(tmp_path)) as (first, second):
        ends = [script.finish(60 * patience()) for script in (second, first)]
    assert [code for code, *_ in ends] == [0, 0]
    assert "it has caught an error of zerorun" not in ends[0][2]
    assert "it has caught an error of zerorun" in ends[1][2] and "catch torch.OutOfMemoryError" in ends[1][2]
