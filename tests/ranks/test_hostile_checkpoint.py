"""A checkpoint whose checksums are right and whose values are not: one error on all ranks, and the run is as it was."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from training import make_config

import zerorun
from zerorun.checkpoint.manifest import MANIFEST
from zerorun.errors import CheckpointError

CHANGES: dict[str, dict[str, Any]] = {
    "client state": {"client_state": {"x": {"$": "tensor", "name": "gone"}}},
    "function": {"client_state": {"$": "dtype", "name": "load"}},
    "schedule": {"scheduler": {"$": "set", "items": [{}]}},
    "data": {"data": [{"$": "float", "value": "much"}] * 2},
    "random numbers": {"rng": [{"$": "device", "name": "abacus"}] * 2},
    "groups": {"optimizer": {"type": "Adam", "groups": [{"lr": {"$": "bytes"}}], "scalars": {}}},
    "scalars": {
        "optimizer": {
            "type": "Adam",
            "groups": [{"lr": 1.0}],
            "scalars": {"step": [{"value": "much", "dtype": "float32", "names": ["weight"]}]},
        }
    },
}


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    content = {**json.loads((path / MANIFEST).read_text())["content"], **changes}
    crc = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    (path / MANIFEST).write_text(json.dumps({"crc32": f"{crc:08x}", "content": content}))


def load_all(folder: str) -> None:
    engine = zerorun.initialize(nn.Linear(4, 4), make_config(2))
    engine.save_checkpoint(folder, tag="t")
    path, leads = Path(folder) / "t", dist.get_rank() == 0
    good = json.loads((path / MANIFEST).read_text())["content"]

    def spoil(changes: dict[str, Any]) -> None:
        dist.barrier()
        if leads:
            rewrite(path, {**good, **changes})
        dist.barrier()

    def now() -> Any:
        weights = [param.tolist() for param in engine.module.parameters()]
        hyper = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
        return weights, hyper, engine.global_steps, random.getstate(), torch.get_rng_state().tolist()

    before = now()
    for name, changes in CHANGES.items():
        spoil(changes)
        with pytest.raises(CheckpointError):
            engine.load_checkpoint(folder, "t")
        assert now() == before, f"{name} has changed the run"
    spoil({"rng": [{"torch": 1}] * 2})
    state = torch.get_rng_state()
    with pytest.raises(CheckpointError, match="random number generators"):
        engine.load_checkpoint(folder, "t")
    assert torch.equal(torch.get_rng_state(), state)
    spoil({"counters": {"global_steps": 5, "train": 7, "module": 8, "_checkpointer": 9}})
    assert engine.load_checkpoint(folder, "t")[0] == path
    assert engine.global_steps == 5
    assert callable(engine.train), "a counter has replaced a method"
    assert isinstance(engine.module, nn.Module)
    engine.destroy()


def test_values_of_a_hostile_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, load_all, str(tmp_path))
