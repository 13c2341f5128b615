"""Optimizers of other packages that keep their states in few bits: counted as they are, saved and loaded exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from covering import by_day
from harness import run_ranks
from safetensors.torch import load_file
from torch import nn
from torchao import optim
from training import make_config, shared_topology

import zerorun
from zerorun.errors import CheckpointError
from zerorun.plan.parameter_kinds import stored_bytes

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


_KINDS = ("torchao 8 bits", "torchao 4 bits", "bitsandbytes")


@pytest.mark.parametrize("kind", by_day(_KINDS, *_KINDS[1:]))
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


STEPS = 3
OVERRIDES = {"0.weight": {"optim_bits": 32}, "2.weight": {"lr": 0.0}}


def overridden(module: nn.Module, bits: int) -> torch.optim.Optimizer:
    """An optimizer whose manager has settings for two weights, and those of an optimizer of before for some places."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    manager.index2config.update({(0, place): {"lr": 0.5} for place in (1, 3, 5)})
    manager.register_module_override(module[0], "weight", OVERRIDES["0.weight"])
    manager.override_config(module[2].weight, key_value_dict=dict(OVERRIDES["2.weight"]))
    return bnb.optim.AdamW(module.parameters(), lr=1e-2, optim_bits=bits)


def inputs_of(step: int) -> torch.Tensor:
    return torch.randn(4, 33, generator=torch.Generator().manual_seed(step))


def train_overridden(stage: int, precision: str, bits: int) -> tuple[dict[str, torch.Tensor], dict[Any, torch.dtype]]:
    """The weights after STEPS, and the dtypes of this rank's states, by shape."""
    module = model()
    config = make_config(stage, precision=precision)
    if precision == "bf16":
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": False}
    optimizer = overridden(module, bits)
    engine = zerorun.initialize(module, config, optimizer=optimizer, topology=shared_topology())
    steps(engine, 0, STEPS)
    dtypes = {tuple(param.shape): state["state1"].dtype for param, state in optimizer.state.items()}
    weights = engine.state_dict()
    engine.destroy()
    bnb.optim.GlobalOptimManager.get_instance().initialize()
    return weights, dtypes


@pytest.mark.parametrize(("stage", "bits"), [(3, 8), (1, 32), (0, 8)])
def test_overrides_of_single_parameters_are_followed(stage: int, bits: int) -> None:
    """As in one process. Places that the manager has of another optimizer are those of no parameter here."""
    plain = model()
    optimizer = overridden(plain, bits)
    optimizer.mng.index2config.clear()
    for step in range(STEPS):
        inputs = inputs_of(step)
        (plain(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    bnb.optim.GlobalOptimManager.get_instance().initialize()
    found = run_ranks(2, train_overridden, stage, "fp32", bits)
    kept = {shape: dtype for _, dtypes in found for shape, dtype in dtypes.items()}
    small = torch.uint8 if bits == 8 else torch.float32
    assert kept[128, 33] is torch.float32 and kept[136, 128] is small and kept[33, 136] is small
    for name, value in plain.state_dict().items():
        assert torch.equal(found[0][0][name], value), name
    assert torch.equal(found[0][0]["2.weight"], model()[2].weight)


def test_overrides_are_followed_where_masters_are_bf16() -> None:
    """There copies of the tensors are updated."""
    for weights, _ in run_ranks(2, train_overridden, 1, "bf16", 32):
        kept = [torch.equal(weights[name], value.bfloat16()) for name, value in model().state_dict().items()]
        assert kept == [name == "2.weight" for name in weights]
