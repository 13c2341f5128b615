"""Plans without ranks: for any rank of any world, as JSON, as a table, and from the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from training import make_config

from zerorun.errors import TopologyError
from zerorun.model_setup.checked_arguments import take_in
from zerorun.plan.__main__ import main
from zerorun.plan.byte_ledger import planned_bytes, with_states
from zerorun.plan.make_plan import make_plan, planned_topology
from zerorun.plan.optimizer_states import OptimizerStates
from zerorun.plan.sharding_plan import ShardingPlan
from zerorun.plan.step_collectives import step_collectives
from zerorun.plan.written_plan import as_table, from_json, to_json

MODELS = """
import torch
from torch import nn

def net():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

def nothing():
    return None

def breaks():
    return {}["weights"]

def leaves():
    raise SystemExit(0)

def talks():
    print("made")
    return net()
"""


def plan_of(
    config: dict[str, Any], world: int, rank: int = 0, transport: str = "nccl", device: str = "cuda"
) -> ShardingPlan:
    with torch.device("meta"):
        model = CASES["plain"].build()
    wanted, raw = take_in(model, config, None, None, None, world)
    plan = make_plan(model, wanted, raw, planned_topology(wanted, world, 8, rank), transport, device)
    return with_states(plan, OptimizerStates(raw, torch.device("cpu")))


CONFIGS = {
    "stage 0": make_config(0),
    "stage 3 in bf16": make_config(3, precision="bf16", accumulation=2),
    "hybrid": make_config(3, zero_optimization={"shard_degree": 4}),
    "whole parameters": make_config(2) | {"optimizer": {"type": "Adafactor", "params": {"foreach": True}}},
    "parts": make_config(2) | {"optimizer": {"type": "Adafactor", "params": {}}},
    "on disk": make_config(3, zero_optimization={"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("transport", ["nccl", "peer memory"])
def test_json_gives_an_equal_plan(name: str, transport: str) -> None:
    plan = plan_of(CONFIGS[name], 8, 5, transport, "cuda" if transport == "nccl" else "cpu")
    found = from_json(to_json(plan))
    assert found == plan
    assert planned_bytes(found) == planned_bytes(plan)
    assert step_collectives(found) == step_collectives(plan)
    assert json.loads(to_json(plan, indent=2))["topology"]["rank"] == 5


@pytest.mark.parametrize("stage", [1, 3])
def test_every_rank_of_16384_has_a_plan(stage: int) -> None:
    """The shards of all ranks are the flat buffers, once."""
    world, config = 16384, make_config(stage)
    plans = [plan_of(config, world, rank) for rank in (0, 1, world // 2, world - 1)]
    for groups in zip(*(plan.flat_groups for plan in plans), strict=True):
        assert len({group.layout for group in groups}) == 1
        layout = groups[0].layout
        assert sum(layout.shard_numel(rank) for rank in range(world)) == layout.numel
        assert groups[0].low == 0
        assert groups[-1].high == layout.numel
    assert {plan.topology.rank for plan in plans} == {0, 1, world // 2, world - 1}


def test_ranks_beyond_the_world_have_none() -> None:
    with pytest.raises(TopologyError, match="rank 8 lies outside"):
        plan_of(make_config(3), 8, 8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "planned_models.py").write_text(MODELS)
    (tmp_path / "breaks_at_import.py").write_text("absent")
    (tmp_path / "leaves_at_import.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "ds.json").write_text(json.dumps(make_config(3, precision="bf16")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("planned_models", None)


def run(*more: str, model: str = "planned_models:net", world: str = "64") -> int:
    return main(["--model", model, "--config", "ds.json", "--world-size", world, *more])


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    shown = capsys.readouterr().out
    for words in ("rank 0 of 64", "1 replicas x 64 shards", "bfloat16, trained", "moments", "0: all-gather for forward"):
        assert words in shown, shown


def test_the_command_gives_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--rank", "63", "--json") == 0
    plan = from_json(capsys.readouterr().out)
    assert plan.topology.rank == 63
    assert plan.states is not None
    assert "rank 63 of 64" in as_table(plan)


def test_what_a_model_prints_is_not_in_the_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", model="planned_models:talks") == 0
    out, err = capsys.readouterr()
    assert from_json(out).topology.world_size == 64
    assert err.startswith("made\n")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "planned_models:nothing"}, ("planned_models:nothing", "NoneType", "Remedy")),
        ({"model": "planned_models:breaks"}, ("planned_models:breaks raised KeyError: 'weights'", "meta", "Remedy")),
        (
            {"model": "breaks_at_import:net"},
            ("breaks_at_import", "raised NameError: name 'absent' is not defined", "Remedy"),
        ),
        ({"model": "planned_models:leaves"}, ("planned_models:leaves raised SystemExit: 0", "Remedy")),
        ({"model": "leaves_at_import:net"}, ("leaves_at_import ended the program by sys.exit(0)", "__main__")),
        ({"model": "nowhere:net"}, ("nowhere", "module:function")),
        ({"model": "./planned_models.py:net"}, ("without folders and .py", "give planned_models:net")),
        ({"model": "models/gpt:net"}, ("without folders and .py", "give models.gpt:net")),
        ({"world": "0"}, ("--world-size 0", "at least 1")),
    ],
)
def test_bad_arguments(
    folder: Path, capsys: pytest.CaptureFixture[str], more: dict[str, str], words: tuple[str, ...]
) -> None:
    assert run(**more) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
