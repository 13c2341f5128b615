"""AdamSAGE and Sophia over ranks: the run of one process, and states that cross from one layout of ranks to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, Place
from reference import OPTIMIZERS as REFERENCES
from reference import AdamSAGE, Result, differences, train_reference
from test_curvature import curvature_loss, loss_at, sophia_config
from test_offload import PLACES
from test_tensor_parallel import Model
from training import make_config, make_engine, train

import zerorun
from zerorun.tensor_parallel.collectives import make_region
from zerorun.zero.value_access import safe_get_full_optimizer_state

STEPS = 3
CASE = CASES["plain"]


def trained(model: str, config: dict[str, Any]) -> Result:
    return train(CASES[model], config, STEPS)


@pytest.mark.each_value
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("place", ["device", "optimizer", "disk"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model", ["plain", "unused_alternating", "lora"])
def test_sage_equals_one_process(model: str, accumulation: int, place: str, world: int, stage: int) -> None:
    wanted = train_reference(
        CASES[model], world_size=world, steps=STEPS, accumulation=accumulation, clip=0.3, optimizer="AdamSAGE"
    )
    where = PLACES.get(place, {}) if stage else {}
    config = make_config(stage, accumulation=accumulation, clip=0.3, optimizer="AdamSAGE", zero_optimization=where)
    for found in run_ranks(world, trained, model, config):
        assert differences(found, wanted, 3e-6) == []


def divided(stage: int) -> dict[str, torch.Tensor]:
    topology = zerorun.Topology.create(dist.get_world_size(), dist.get_rank(), tensor=2, device_type="cpu")
    model = Model(make_region(topology, torch.device("cpu")))
    engine = zerorun.initialize(model, make_config(stage, optimizer="AdamSAGE"), topology=topology)
    for step in range(STEPS):
        engine.backward(loss_at(engine, step, topology.data_parallel_rank))
        engine.step()
    weights = engine.state_dict()
    engine.destroy()
    topology.close()
    return weights


@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 2))
def test_sage_of_divided_layers(stage: int) -> None:
    module = Model(None)
    optimizer = AdamSAGE(module.parameters(), **REFERENCES["AdamSAGE"][1])
    for step in range(STEPS):
        (sum(loss_at(module, step, rank) for rank in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_ranks(4, divided, stage):
        torch.testing.assert_close(weights, dict(module.state_dict()), rtol=3e-6, atol=3e-6)


# -- checkpoints -------------------------------------------------------------------------------------------------------

States = dict[str, torch.Tensor]
OF = {"AdamSAGE": ("exp_avg", "exp_avg_sq", "exp_avg_sensitivity"), "Sophia": ("exp_avg", "hessian")}


def made(optimizer: str, stage: int, place: str) -> zerorun.Engine:
    where = PLACES.get(place, {}) if stage else {}
    if optimizer == "Sophia":
        return make_engine(CASE, sophia_config(stage, zero_optimization=where))
    return make_engine(CASE, make_config(stage, optimizer=optimizer, zero_optimization=where))


def one_step(engine: zerorun.Engine, step: int) -> None:
    """All ranks have the same samples, so that their number does not matter."""
    if engine.is_curvature_due():
        engine.backward(curvature_loss(CASE, engine, Place(0, step)), curvature=True)
    engine.backward(CASE.loss(engine, Place(0, step)))
    engine.step()


def states_of(engine: zerorun.Engine, optimizer: str) -> States:
    found = {}
    for name, param in engine.module.named_parameters():
        for key in OF[optimizer]:
            state = safe_get_full_optimizer_state(param, key)
            assert state is not None
            found[f"{name}: {key}"] = state.clone()
    return found


def saved(folder: str, optimizer: str, stage: int, place: str) -> tuple[States, States]:
    engine = made(optimizer, stage, place)
    for step in range(3):
        one_step(engine, step)
    states = states_of(engine, optimizer)
    engine.save_checkpoint(folder)
    one_step(engine, 3)
    weights = engine.state_dict()
    engine.destroy()
    return states, weights


def loaded(folder: str, optimizer: str, stage: int, place: str) -> tuple[States, States]:
    engine = made(optimizer, stage, place)
    engine.load_checkpoint(folder)
    states = states_of(engine, optimizer)
    one_step(engine, 3)
    weights = engine.state_dict()
    engine.destroy()
    return states, weights


@pytest.mark.parametrize("optimizer", by_day(OF, "Sophia"))
@pytest.mark.parametrize(
    ("world", "stage", "place"),
    by_day(((3, 3, "device"), (1, 0, "device"), (3, 1, "disk"), (2, 2, "optimizer")), (3, 3, "device")),
)
def test_states_cross_from_2_ranks_to_others(optimizer: str, world: int, stage: int, place: str, tmp_path: Path) -> None:
    """Saved on 2 ranks at stage 2: the same bits, and the same next step."""
    states, weights = run_ranks(2, saved, str(tmp_path), optimizer, 2, "device")[0]
    assert all(value.any() for name, value in states.items() if name.startswith("head"))
    for found, after in run_ranks(world, loaded, str(tmp_path), optimizer, stage, place):
        assert found.keys() == states.keys()
        assert all(torch.equal(found[name], states[name]) for name in states)
        torch.testing.assert_close(after, weights, rtol=3e-6, atol=3e-6)
