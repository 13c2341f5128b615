"""The breakdown of steps: each phase and each collective is timed once; what is hidden is told from what is waited for."""

from __future__ import annotations

import re
from collections import Counter
from itertools import repeat
from typing import Any

import pytest
import test_pipeline as pipeline
import torch
import torch.distributed as dist
from harness import run_ranks
from models import CASES, Place
from test_monitors import told
from training import make_config, make_engine

import zerorun
from zerorun.config.sections import CommsLogger
from zerorun.distributed.stopwatch import Interval, Stopwatch, covered
from zerorun.monitors.breakdown import PHASES, Breakdown, CommunicationTable, kind_of

CASE = CASES["plain"]
TIMED = {"wall_clock_breakdown": True, "steps_per_print": 100}


def counted(engine: zerorun.Engine, before: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """(how often each phase and collective was timed in the last step, the calls of the report)."""
    assert engine.observer is not None and engine.observer.watch is not None
    (*_, step) = engine.observer.watch.read()
    calls = {
        label: found["calls"] - before.get(label, {"calls": 0})["calls"]
        for label, found in engine.communication_report().items()
    }
    assert all(
        one.begun <= one.ended and (one.waited_from is None or one.begun <= one.waited_from <= one.ended) for one in step
    )
    return Counter(one.name for one in step), +Counter(calls)


def train(stage: int, **zero: Any) -> tuple[Counter[str], Counter[str]] | None:
    engine = make_engine(CASE, make_config(stage, accumulation=2, zero_optimization=zero, **TIMED))
    for step in range(3):
        before = engine.communication_report()
        for micro in range(2):
            engine.backward(CASE.loss(engine, Place(dist.get_rank(), step, micro)))
            engine.step()
    found = counted(engine, before) if dist.get_rank() == 0 else None
    assert (engine.observer is None) == (dist.get_rank() > 0)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_everything_is_timed_once(stage: int) -> None:
    found, _ = run_ranks(2, train, stage)
    assert found is not None
    timed, calls = found
    assert {name: timed.pop(name) for name in PHASES} == {name: 2 if name in PHASES[:2] else 1 for name in PHASES}
    assert timed == calls


def gathers(stages: int, evaluations: int) -> dict[str, int] | None:
    """The calls of a training step by kind, with so many evaluations before it; of a pipeline or at stage 3."""
    topology = zerorun.Topology.create(2, dist.get_rank(), pipe=stages, device_type="cpu")
    model = CASE.build() if stages == 1 else pipeline.build(4, topology=topology)
    config = make_config(3 if stages == 1 else 1, accumulation=2, **TIMED)
    engine, data = zerorun.initialize(model, config, topology=topology), repeat(pipeline.batch_of(0, 0, 0))
    for step in range(2):
        for _ in range(evaluations):
            if stages > 1:
                engine.eval_batch(data)
            else:
                with torch.no_grad():
                    engine(torch.zeros(1, 3, dtype=torch.long))
        if stages > 1:
            engine.train_batch(data)
        for micro in range(2 if stages == 1 else 0):
            engine.backward(CASE.loss(engine, Place(dist.get_rank(), step, micro)))
            engine.step()
    found = Breakdown()
    if engine.observer is not None and engine.observer.watch is not None:
        found.add(engine.observer.watch.read()[-1])
    engine.destroy()
    topology.close()
    return found.calls if dist.get_rank() == 0 else None


@pytest.mark.parametrize("stages", (1, 2))
def test_evaluation_counts_for_no_step(stages: int) -> None:
    """Its gathers and messages are no part of a step, as its forwards are not."""
    assert run_ranks(2, gathers, stages, 3)[0] == run_ranks(2, gathers, stages, 0)[0]


def train_replicas(codes: bool) -> tuple[Counter[str], Counter[str]] | None:
    return train(2, shard_degree=2, zero_quantized_gradients=codes)


@pytest.mark.parametrize("codes", (False, True))
def test_sums_over_replicas_are_timed_once(codes: bool) -> None:
    found, *_ = run_ranks(4, train_replicas, codes)
    assert found is not None
    timed, calls = found
    assert {name: count for name, count in timed.items() if name not in PHASES} == calls


def pipelined(schedule: str, accumulation: int) -> Counter[str] | None:
    config = make_config(1, accumulation=accumulation, pipeline={"schedule": schedule}, **TIMED)
    topology = zerorun.Topology.create(2, dist.get_rank(), pipe=2, device_type="cpu")
    engine = zerorun.initialize(pipeline.build(4, topology=topology), config, topology=topology)
    data = pipeline.data_of(0, accumulation)
    for _ in range(pipeline.STEPS):
        engine.train_batch(data)
    found = counted(engine, {})[0] if dist.get_rank() == 0 else None
    engine.destroy()
    topology.close()
    return found


@pytest.mark.parametrize(("schedule", "backwards"), (("1f1b", 3), ("zero_bubble", 6)))
def test_pipelines_are_timed(schedule: str, backwards: int) -> None:
    """The first stage sends three activations and receives three gradients; a split backward has two parts."""
    timed, _ = run_ranks(2, pipelined, schedule, 3)
    assert timed is not None
    assert (timed["forward"], timed["backward"], timed["norm"], timed["update"]) == (3, backwards, 1, 1)
    assert sum(times for label, times in timed.items() if label.startswith("pipeline: ")) >= 3


def gradients_of_the_next_stage() -> tuple[set[str], list[str]]:
    """(kinds of the waits for messages of the last step, rows of the table about them)."""
    config = make_config(1, accumulation=3, comms_logger={"enabled": True}, **TIMED)
    topology = zerorun.Topology.create(2, dist.get_rank(), pipe=2, device_type="cpu")
    engine = zerorun.initialize(pipeline.build(4, topology=topology), config, topology=topology)
    data, kinds, rows = pipeline.data_of(0, 3), set[str](), list[str]()
    for _ in range(2):
        engine.train_batch(data)
    if engine.observer is not None and engine.observer.watch is not None:
        (*_, step) = engine.observer.watch.read()
        kinds = {kind_of(one.name) for one in step if one.name.startswith("pipeline: gradients from")}
        table = CommunicationTable(engine.config.comms_logger)
        table.add(step)
        rows = table.lines(engine.communication_report())
    engine.destroy()
    topology.close()
    return kinds, rows


def test_the_wait_for_a_neighbours_gradients_is_a_message() -> None:
    """It is no reduction, and the table has it although this rank sends nothing then."""
    (kinds, rows), _ = run_ranks(2, gradients_of_the_next_stage)
    assert kinds == {"messages"}
    (row,) = [row for row in rows if row.startswith("pipeline: gradients from")]
    calls, *sent = row.split()[-5:-2]
    assert int(calls) >= 3 and sent == ["0", "bytes"]


def lines_of(changes: dict[str, Any]) -> list[str]:
    return told(make_config(2, accumulation=2, **changes), prefix="")


def test_lines() -> None:
    lines, others = run_ranks(2, lines_of, {"wall_clock_breakdown": True, "steps_per_print": 3})
    (line,) = [line for line in lines if line.startswith("mean of ")]
    number = r"\d+\.\d\d"
    phases = (
        rf"forward {number} ms; backward {number} ms; step {number} ms \(reduce {number}, norm {number}, update {number}"
    )
    kinds = "".join(rf"; {kind}: hidden {number} ms, waited for {number} ms" for kind in ("gather", "other", "reduce"))
    assert re.fullmatch(rf"mean of 2 steps before step 3: {phases}, publish {number}\){kinds}", line), line
    assert not any(line.startswith("mean of ") for line in others)


def test_communication_is_told() -> None:
    section = {"enabled": True, "verbose": True, "prof_all": False, "prof_ops": ["reduce_scatter_tensor"]}
    lines, others = run_ranks(2, lines_of, {"comms_logger": section})
    tables = [line for line in lines if line.startswith("collective ")]
    assert len(tables) == 1  # when the engine is destroyed
    rows = [row.split() for row in tables[0].splitlines()[1:]]
    assert rows and all("reduce-scatter" in row for row in tables[0].splitlines()[1:])
    assert all(float(row[-1]) > 0 and float(row[-3]) > 0 for row in rows)
    assert len([line for line in lines if "in flight, waited for" in line]) > 0
    assert not any(line.startswith("collective ") for line in others)


# -- arithmetic --------------------------------------------------------------------------------------------------------

STEP = [
    Interval("forward", 0, 10),
    Interval("block: all-gather for forward", 1, 9, 8),
    Interval("block 2: all-gather for forward", 3, 10, 9),
    Interval("backward", 10, 30),
    Interval("block: reduce-scatter gradients", 20, 40, 35),
    Interval("block: all-gather gradients", 40, 42, 40),
    Interval("norm", 42, 43),
    Interval("control", 42, 43, 42),
    Interval("pipeline: activations from pipeline stage 1", 5, 6, 5),
]


def test_what_is_hidden_and_what_is_waited_for() -> None:
    found = Breakdown()
    for _ in range(2):
        found.add(STEP)
    assert found.steps == 2
    assert found.flight == {"gather": 18, "reduce": 44, "other": 2, "messages": 2}
    assert found.waited == {"gather": 4, "reduce": 14, "other": 2, "messages": 2}
    assert found.calls == {"gather": 4, "reduce": 4, "other": 2, "messages": 2}
    assert found.milliseconds("forward", "backward") == 30_000
    assert "gather: hidden 7000.00 ms, waited for 2000.00 ms" in found.line()
    again = Breakdown()
    again.add([*STEP, Interval("block: all-gather for forward", 45, 49, 46), Interval("evaluation", 44, 50)])
    assert (again.calls["gather"], again.waited["gather"]) == (2, 2)
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert kind_of("block: reduce-scatter gradients over replicas") == "reduce"
    assert kind_of("gradients over pipe") == "reduce"


def test_bandwidths() -> None:
    table = CommunicationTable(CommsLogger(enabled=True))
    assert table.add(STEP) == []
    report = {"block: reduce-scatter gradients": {"calls": 4, "bytes": 20 * 10**9}, "never": {"calls": 2, "bytes": 8}}
    _, first, second, third = table.lines(report)
    assert first.split()[-6:] == ["4", "18.6", "GiB", "20000.00", "5000.00", "2"]
    assert second.split() == ["never", "2", "8", "bytes", "0.00", "0.00"]
    assert third.split()[-5:] == ["1", "0", "bytes", "1000.00", "1000.00"]  # a message that this rank has received


def test_all_reduces_are_chosen_by_name() -> None:
    """Labels of sums that say what is summed are chosen, too."""
    table = CommunicationTable(CommsLogger(enabled=True, prof_all=False, prof_ops=("all_reduce",)))
    sums = ["block: reduce-scatter gradients over replicas", "control", "gradients over pipe", "losses", "norm"]
    sums += ["tensor: all-reduce forward"]
    others = ["block: all-gather for forward", "block: reduce-scatter gradients", "pipeline: gradients to pipeline stage 1"]
    _, *rows = table.lines({label: {"calls": 1, "bytes": 8} for label in sums + others})
    assert [row[:48].strip() for row in rows] == sums


def test_steps_are_read_once_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, passed, time = Stopwatch(pipeline.torch.device("cpu")), 3, iter(range(100))
    monkeypatch.setattr(watch._clock, "now", lambda: next(time))
    monkeypatch.setattr(watch._clock, "has_passed", lambda moment: moment <= passed)
    for _ in range(2):
        with watch.during("forward"), watch.during("forward"):
            watch.add("gather", begun := watch.now(), begun)
        watch.end_step("norm")  # which has not come
        with watch.during("norm"):
            pass
        watch.end_step("norm")
        watch.end_step("norm")
    passed = 6
    (step,) = watch.read()
    assert step == [Interval("gather", 0, 1, 0), Interval("forward", -1, 2), Interval("norm", 3, 4)]
    assert watch.read() == []
