"""Traces: valid for Perfetto, with every collective that the plan says, on tracks whose spans nest, by one clock."""

from __future__ import annotations

import contextlib
import json
import mmap
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import test_pipeline as pipeline
import torch.distributed as dist
from harness import patience, run_ranks
from models import CASES, Place
from simulation import simulated_device
from training import make_config

import zerorun
from zerorun.distributed.transport import world
from zerorun.errors import StepError
from zerorun.monitors.step_trace import TraceEvent, as_json
from zerorun.plan.step_collectives import Collective, step_collectives
from zerorun.watch.board import PAGE, ask_trace, board
from zerorun.zero.sharded_model import ShardedModel

CASE = CASES["plain"]
STEPS, ACCUMULATION = 2, 2
night = pytest.mark.nightly


def train(config: dict[str, Any], path: Path, simulated: bool) -> tuple[list[Collective], list[str]]:
    """Trace STEPS steps; return what the plan says of a step, and the names of the units."""
    with simulated_device() if simulated else contextlib.nullcontext():
        engine = zerorun.initialize(CASE.build(), config)
        watch, kind = engine.comm.statistics.watch, type(engine.sharded_model)
        for step in range(3 + STEPS):
            if step == 2:  # the order of units is known by then
                engine.trace(path, steps=STEPS)
                with pytest.raises(StepError, match="an earlier trace is not over"):
                    engine.trace(path)
            for micro in range(engine.gradient_accumulation_steps()):
                engine.backward(CASE.loss(engine, Place(dist.get_rank(), step, micro)))
                engine.step()
        assert (engine.comm.statistics.watch, type(engine.sharded_model)) == (watch, kind), "all is as before"
        assert not {"enter", "wait_begins", "wait_ends"} & set(vars(board))
        found = step_collectives(engine.plan), [unit.name for unit in engine.units]
        engine.destroy()
        return found


def events_of(path: Path) -> dict[int, list[dict[str, Any]]]:
    """The events of each rank by time; the file is a Chrome trace whose spans nest on each track."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[int, int], str] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "M":
            names[event["pid"], event.get("tid", -1)] = event["args"]["name"]
        else:
            assert event["ph"] in "Xi" and event["ts"] >= 0 and isinstance(event["tid"], int)
            assert event["ph"] == "i" or event["dur"] >= 0
            found[event["pid"]].append(event)
    for rank, events in found.items():
        events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
        assert names[rank, -1].startswith(f"rank {rank} on ")
        ends: dict[int, list[int]] = defaultdict(list)
        for event in events:
            assert names[rank, event["tid"]].split()[0] == event["cat"]
            if event["ph"] == "X":
                begun, end = round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"]))
                around = ends[event["tid"]]
                while around and around[-1] <= begun:
                    around.pop()
                assert not around or end <= around[-1], event
                around.append(end)
    return found


def labels(events: list[dict[str, Any]], ph: str, *cats: str) -> list[str]:
    return [event["name"] for event in events if event["ph"] == ph and event["cat"] in cats]


@pytest.mark.parametrize(
    ("stage", "simulated", "more"),
    [
        (3, False, {}),
        (1, True, {}),
        pytest.param(0, False, {}, marks=night),
        pytest.param(2, False, {"wall_clock_breakdown": True}, marks=night),
        pytest.param(3, True, {"wall_clock_breakdown": True}, marks=night),
    ],
)
def test_a_trace_has_what_the_plan_says(tmp_path: Path, stage: int, simulated: bool, more: dict[str, Any]) -> None:
    path = tmp_path / "trace.json"
    told = run_ranks(2, train, make_config(stage, accumulation=ACCUMULATION, **more), path, simulated)
    traced = events_of(path)
    assert sorted(traced) == [0, 1]
    for rank, (collectives, units) in enumerate(told):
        events = traced[rank]
        issued = [Collective(event["name"], event["args"]["bytes"]) for event in events if event["ph"] == "i"]
        assert issued == STEPS * collectives
        moved = Counter(labels(events, "X", "gather", "reduce"))
        assert moved == Counter(label for label in labels(events, "i", "gather", "reduce"))
        computed = Counter(labels(events, "X", "computation"))
        for unit in units[1:]:
            assert computed[f"{unit}: forward"] == computed[f"{unit}: backward"] == STEPS * ACCUMULATION
        back = [event for event in events if event["name"].endswith(": backward") and event["cat"] == "computation"]
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-3 for one, other in pairwise(back))
        assert [computed[verb] for verb in ("reduce", "norm", "update", "publish")] == 4 * [STEPS]
        phases = Counter(labels(events, "X", "program"))
        assert [phases[phase] for phase in ("forward", "backward", "update")] == 3 * [STEPS * ACCUMULATION]


def train_pipeline(config: dict[str, Any], path: Path, simulated: bool) -> None:
    with simulated_device() if simulated else contextlib.nullcontext():
        engine = zerorun.initialize(pipeline.build(4, num_stages=2), config)
        data = pipeline.data_of(engine.topology.data_parallel_rank, ACCUMULATION)
        engine.train_batch(data)
        engine.trace(path, steps=1)
        engine.train_batch(data)
        engine.destroy()


@night
@pytest.mark.parametrize("simulated", [False, True])
def test_a_trace_has_the_actions_of_a_pipeline(tmp_path: Path, simulated: bool) -> None:
    path = tmp_path / "trace.json"
    run_ranks(4, train_pipeline, make_config(1, accumulation=ACCUMULATION), path, simulated)
    for events in events_of(path).values():
        assert Counter(labels(events, "X", "pipeline")) == {"forward": ACCUMULATION, "backward": ACCUMULATION}
        phases = Counter(labels(events, "X", "program"))
        assert (phases["forward"], phases["backward"], phases["update"]) == (ACCUMULATION, ACCUMULATION, 1)


def asked_from_outside(config: dict[str, Any], folder: Path) -> list[int]:
    """Rank 0's board is asked, in a micro-batch between two steps, once while there is a trace already."""
    engine, page = zerorun.initialize(CASE.build(), config), mmap.mmap(-1, PAGE)
    board.go_on_at(page)
    traced = []
    for step in range(6):
        for micro in range(ACCUMULATION):
            if (step, micro) in ((1, 1), (2, 0)) and dist.get_rank() == 0:
                ask_trace(page, STEPS, str(folder / f"at {step}.json"))
            engine.backward(CASE.loss(engine, Place(dist.get_rank(), step, micro)))
            engine.step()
        traced.append(engine._trace is not None)
    engine.destroy()
    return traced


def test_a_trace_can_be_asked_for_from_outside(tmp_path: Path) -> None:
    """By ``zerorun --trace``: all ranks begin it after the same step. Where it cannot be written, training goes on."""
    found = run_ranks(2, asked_from_outside, make_config(2, accumulation=ACCUMULATION), tmp_path)
    assert found == 2 * [[False, True, True, False, False, False]]
    assert [path.name for path in tmp_path.iterdir()] == ["at 1.json"]
    for events in events_of(tmp_path / "at 1.json").values():
        phases = Counter(labels(events, "X", "program"))
        assert [phases[phase] for phase in ("forward", "backward")] == 2 * [STEPS * ACCUMULATION]
    run_ranks(1, asked_from_outside, make_config(2, accumulation=ACCUMULATION), tmp_path / "none")


def interrupted(config: dict[str, Any], path: Path) -> None:
    engine = zerorun.initialize(CASE.build(), config)
    with pytest.raises(StepError, match="nothing to trace"):
        engine.trace(path, steps=0)
    engine.trace(path, steps=100)
    engine.backward(CASE.loss(engine, Place(dist.get_rank(), 0, 0)))
    engine.step()
    engine.destroy()
    assert type(engine.sharded_model) is ShardedModel


def test_a_trace_that_is_not_over_is_written_at_the_end(tmp_path: Path) -> None:
    run_ranks(1, interrupted, make_config(1), tmp_path / "trace.json")
    assert "update" in labels(events_of(tmp_path / "trace.json")[0], "X", "program")


# -- one clock -------------------------------------------------------------------------------------------------------


def test_clocks_of_other_hosts_are_taken_into_account(tmp_path: Path) -> None:
    parts = [[TraceEvent("gather", "g", 1000, 500, {})], [TraceEvent("gather", "g", 9_001_200, 300, {})]]
    (tmp_path / "t").write_text(as_json(parts, ["rank 0 on a", "rank 1 on b"], [0, 9_000_000]))
    assert [events[0]["ts"] for events in events_of(tmp_path / "t").values()] == [0.0, 0.2]


def test_what_overlaps_is_side_by_side(tmp_path: Path) -> None:
    spans = [
        ("gather", 0, 10),
        ("gather", 5, 10),
        ("gather", 6, 2),
        ("gather", 12, 3),
        ("program", 0, 9),
        ("program", 1, 8),
    ]
    events = sorted((TraceEvent(track, track, at, ns, {}) for track, at, ns in spans), key=lambda e: (e.begun, -e.ns))
    (tmp_path / "t").write_text(as_json([events], ["rank 0 on a"], [0]))
    found = events_of(tmp_path / "t")[0]
    assert len({event["tid"] for event in found if event["cat"] == "gather"}) == 3
    assert len({event["tid"] for event in found if event["cat"] == "program"}) == 1


def ahead() -> dict[int, int]:
    real = world.monotonic_ns
    world.monotonic_ns = lambda: real() + 5 * 10**9 * dist.get_rank()  # type: ignore[assignment]
    try:
        return world.nanoseconds_ahead([1])
    finally:
        world.monotonic_ns = real  # type: ignore[assignment]


def test_how_far_a_clock_is_ahead_is_measured() -> None:
    found = run_ranks(2, ahead)[0]
    assert found[0] == 0 and abs(found[1] - 5 * 10**9) < 0.5e9 * patience()
