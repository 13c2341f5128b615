"""zerorun verify says nothing of runs that equal one process: 30 configurations of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import patience, run_ranks, start_ranks
from verified import PLAN, config, tensor, verify

OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
RECOMPUTE = {"activation_checkpointing": {"policy": "full"}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
PIPE = {"pipeline": {"stages": 2}}


def optimizer(name: str) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 3e-3, "eps": 1e-4}}}


# (task, ranks, configuration); the first ones run by day.
CLEAN: list[tuple[str, int, dict[str, Any]]] = [
    ("dropping", 2, config(3, 2, **RECOMPUTE)),
    ("dropping", 2, config(1, **tensor(plan=PLAN))),
    ("layers", 2, config(1, 2)),
    ("llama", 2, config(3, 2, sequence_parallel_size=2)),
    ("llama", 4, config(2, **tensor(), sequence_parallel_size=2)),
    ("llama", 4, config(1, 2, **PIPE, sequence_parallel_size=2)),
    ("mixtral", 2, config(2, 2, **EXPERTS)),
    ("mixtral", 4, config(3, **EXPERTS, sequence_parallel_size=2)),
    ("mixtral", 4, config(1, **tensor(), **EXPERTS)),
    ("gpt", 1, config(0)),
    ("gpt", 2, config(0)),
    ("gpt", 2, config(1, 2)),
    ("gpt", 2, config(2, 2)),
    ("gpt", 3, config(3)),
    ("gpt", 4, config(3, zero_optimization={"shard_degree": 2})),
    ("gpt", 2, config(3, precision="bf16")),
    ("gpt", 2, config(2, precision="fp16")),
    ("gpt", 2, config(3, precision="bf16", bf16={"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True})),
    ("gpt", 2, config(1, 2, precision="bf16", bf16={"store_param_remainders": True, "bf16_optimizer_states": True})),
    ("gpt", 2, {**config(3, precision="bf16", bf16={"bf16_master_weights_and_grads": True}), **optimizer("RAdam")}),
    ("gpt", 2, {**config(2, precision="bf16", bf16={"bf16_optimizer_states": True}), **optimizer("Lamb")}),
    ("gpt", 2, config(3, torch_autocast={"enabled": True})),
    ("gpt", 2, config(2, torch_autocast={"enabled": True, "dtype": "fp16"})),
    ("llama", 2, config(1, 2, **PIPE, torch_autocast={"enabled": True, "dtype": "fp16"})),
    ("gpt", 2, config(2, **OFFLOAD)),
    ("gpt", 2, config(3, 2, **OFFLOAD)),
    ("gpt", 2, config(1, clip=0.0, optimizer="SGD")),
    ("gpt", 2, config(1, zero_optimization={"overlap_param_gather": True})),
    ("gpt", 2, config(1, **tensor(plan=PLAN))),
    ("gpt", 4, config(3, **tensor(plan=PLAN))),
    ("tied", 2, config(3)),
    ("tied", 2, config(2, optimizer="Lion")),
    ("dropping", 2, config(0)),
    ("llama", 2, config(1, **tensor())),
    ("from_dataset", 2, config(2, 2)),
    ("from_dataset", 2, config(0, dataloader={"shuffle": False})),
    ("two_groups", 2, config(3)),
    ("own_optimizer", 2, config(2)),
    ("layers", 4, config(1, 2)),
    ("llama", 2, config(1, 2, **PIPE)),
    ("llama", 4, config(1, 2, **PIPE, **tensor())),
    ("llama", 2, config(1, **tensor(sequence_parallel=True))),
    ("lora", 2, config(3)),
    ("mixtral", 2, config(3)),
    ("mixtral", 2, config(1, **tensor())),
    ("mixtral", 4, config(3, sequence_parallel_size=2)),
]
BY_DAY = 3


def row(index: int, given: tuple[str, int, dict[str, Any]]) -> Any:
    return pytest.param(*given, id=f"{given[0]}-{index}", marks=() if index < BY_DAY else pytest.mark.nightly)


@pytest.mark.parametrize(("task", "ranks", "raw"), [row(index, given) for index, given in enumerate(CLEAN)])
def test_equal_runs_are_called_equal(task: str, ranks: int, raw: dict[str, Any]) -> None:
    found = run_ranks(ranks, verify, task, raw)
    assert found[0][0], found[0][1]
    assert len({text for _, text in found}) == 1


# A function whose loss, or whose model, raises; then the command, and its exit status.
BROKEN = """
import json, os, sys
from types import ModuleType
import torch
from zerorun.verify.__main__ import main

def own():
    def loss(model, batch):
        raise KeyError("labels")
    return torch.nn.Linear(4, 1), [torch.ones(2, 4) for _ in range(24)], loss

def shapes():
    return torch.nn.Linear(4, 1), [torch.ones(2, 5) for _ in range(24)], lambda model, batch: model(batch).mean()

broken = sys.modules["broken"] = ModuleType("broken")
broken.own, broken.shapes = own, shapes
os.environ["ZERORUN_DEVICE"] = "cpu"
sys.exit(main(["broken:" + sys.argv[1], "--config", sys.argv[2]]))
"""


@pytest.mark.parametrize(
    ("function", "told"), [("own", "raised KeyError: 'labels'"), ("shapes", "raised RuntimeError: mat1 and mat2")]
)
def test_a_loss_that_raises_is_no_difference(function: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(2)))
    with start_ranks(2, BROKEN, function, str(tmp_path / "ds.json")) as scripts:
        ended = [script.finish(60 * patience()) for script in scripts]
    assert [code for code, _, _ in ended] == [2, 2], ended
    for rank, (_, _, errors) in enumerate(ended):
        assert "Traceback" in errors
        assert f"zerorun verify: the model or the loss {told}" in errors
        assert f"on rank {rank}. Nothing was compared. Remedy: " in errors
