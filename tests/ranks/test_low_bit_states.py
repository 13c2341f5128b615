"""Optimizers of other packages that keep their states in few bits: counted as they are, saved and loaded exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from harness import run_ranks
from safetensors.torch import load_file
from torch import nn
from torchao import optim
from training import make_config, shared_topology

import zerorun
from zerorun.errors import CheckpointError
from zerorun.plan.weights import stored_bytes

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torchao 8 bits": (optim.AdamW8bit, {}),
    "torchao 4 bits": (optim.AdamW4bit, {}),
    "bitsandbytes": (bnb.optim.AdamW8bit, {}),
    "torchao 8 bits in other blocks": (optim.AdamW8bit, {"block_size": 128}),
}


def engine_of(kind: str, stage: int) -> zerorun.Engine:
    """Parameters of which some are too small for few bits, one is not a multiple of a block, and one is large."""
    build, settings = KINDS[kind]
    return zerorun.initialize(
        model(),
        make_config(stage),
        optimizer=lambda params: build(params, lr=1e-2, **settings),
        topology=shared_topology(),
    )


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(33, 128), nn.Tanh(), nn.Linear(128, 136), nn.Tanh(), nn.Linear(136, 33))


def steps(engine: zerorun.Engine, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        inputs = torch.randn(4, 33, generator=torch.Generator().manual_seed(step)).to(engine.device)
        loss = (engine(inputs) - inputs).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def states_of(engine: zerorun.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in engine.module.named_parameters():
        value = zerorun.zero.safe_get_full_optimizer_state(param, "exp_avg")
        assert value is not None
        found[name] = value
    return found


def save_and_go_on(folder: str, kind: str) -> dict[str, Any]:
    torch.compiler.set_stance("force_eager")  # compilation takes minutes, and is not what is tested
    try:
        engine = engine_of(kind, 1)
        losses = steps(engine, 0, 2)
        engine.save_checkpoint(folder)
        states = states_of(engine) if "torchao" in kind else {}
        assert engine.sharded is not None
        kept = engine.sharded.optimizer.state.values()
        held = sum(stored_bytes(v) for state in kept for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
        report = engine.memory_report()["moments"]
        losses += steps(engine, 2, 2)
        engine.destroy()
        engine = engine_of(kind, 3)
        engine.load_checkpoint(folder)
        resumed = steps(engine, 2, 2)
        engine.destroy()
        return {"losses": losses, "resumed": resumed, "states": states, "held": held, "report": report}
    finally:
        torch.compiler.set_stance("default")


def load_alone(folder: str, kind: str) -> Any:
    torch.compiler.set_stance("force_eager")
    try:
        engine = engine_of(kind, 0)
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            return str(error)
        else:
            return states_of(engine) if "torchao" in kind else None
        finally:
            engine.destroy()
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("kind", ["torchao 8 bits", "torchao 4 bits", "bitsandbytes"])
def test_low_bit_states_are_counted_saved_and_loaded(tmp_path: Path, kind: str) -> None:
    ranks = run_ranks(2, save_and_go_on, str(tmp_path), kind)
    for rank in ranks:
        assert rank["resumed"] == rank["losses"][2:]
        assert rank["report"] == rank["held"]
    build, settings = KINDS[kind]
    made = model()
    estimate = zerorun.estimate_memory(
        made, make_config(1), 2, device="cpu", optimizer=build(made.parameters(), lr=1e-2, **settings)
    )
    assert estimate.kinds["moments"] == max(rank["report"] for rank in ranks)
    alone = run_ranks(1, load_alone, str(tmp_path), kind)[0]
    for name, value in ranks[0]["states"].items():
        assert torch.equal(alone[name], value)
    if kind == "torchao 8 bits":
        codes = load_file(next(tmp_path.glob("*/optimizer.exp_avg.codes-*.safetensors")))
        assert codes["2.weight"].shape == (136, 128) and codes["2.weight"].dtype == torch.uint8
        error = run_ranks(1, load_alone, str(tmp_path), "torchao 8 bits in other blocks")[0]
        assert "optimizer.exp_avg.scale of '2.weight'" in error and "load_optimizer=False" in error
