"""Gradients between backward and step: whole, by part, and their norms, beside those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import patience, run_ranks, start_ranks
from models import CASES, Place
from reference import distance
from test_parallel_matrix import batch_of, build
from torch import nn
from training import make_config, make_engine, merged

import zerorun
from zerorun.errors import ModelError
from zerorun.zero import (
    full_gradients,
    gradient_norms,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from zerorun.zero import safe_get_local_fp32_param as local_master
from zerorun.zero import safe_get_local_optimizer_state as local_state

MODELS = ("plain", "tied", "lora", "unused_on_one_rank", "branch", "repeated_apart")


def reference(model: str, world: int) -> dict[str, torch.Tensor]:
    """Of the mean over ranks and two micro-batches."""
    module = CASES[model].build()
    for micro in range(2):
        for rank in range(world):
            (CASES[model].loss(module, Place(rank, 0, micro)) / (2 * world)).backward()
    return {name: param.grad for name, param in module.named_parameters() if param.grad is not None}


def look(model: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(CASES[model], config)
    assert list(full_gradients(engine.module)) == []
    for micro in range(2):
        engine.backward(CASES[model].loss(engine, Place(dist.get_rank(), 0, micro)))
        if micro == 0:
            engine.step()
    params = {name: param for name, param in engine.module.named_parameters() if param.requires_grad}
    found: dict[str, Any] = {"norms": gradient_norms(engine.module)}
    before = gathers(engine)
    found["whole"] = dict(full_gradients(engine.module))
    found["gathers"] = gathers(engine) - before, sum(len(unit.trainable) for unit in engine.units)
    found["single"] = {name: safe_get_full_grad(param) for name, param in params.items()}
    found["parts"] = {name: safe_get_local_grad(param) for name, param in params.items()}
    found["masters"] = {name: local_master(param) for name, param in params.items()}
    assert all(local_state(param, "exp_avg") is None for param in params.values())
    engine.step()
    found["moments"] = {name: local_state(param, "exp_avg") for name, param in params.items()}
    assert list(full_gradients(engine.module)) == []
    assert gradient_norms(engine.module) == {}
    found["values"] = {name: value.view(-1) for name, value in engine.state_dict().items()}
    found["masters"] = {name: value.clone() for name, value in found["masters"].items()}
    engine.destroy()
    return found


def gathers(engine: zerorun.Engine) -> int:
    return sum(traffic["calls"] for label, traffic in engine.communication_report().items() if "on request" in label)


@pytest.mark.each_value
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_one_process(model: str, stage: int) -> None:
    world = (1, 2, 3, 4)[(MODELS.index(model) + stage) % 4]
    degree = {"zero_optimization": {"shard_degree": 2}} if world == 4 and stage else {}
    ranks = run_ranks(world, look, model, make_config(stage, accumulation=2, clip=0.5, **degree))
    expected = reference(model, world)
    together = ranks[: 2 if degree else world]  # have all parts between them
    for found in ranks:
        assert found["whole"].keys() == found["norms"].keys() == found["single"].keys()
        for name, gradient in found["whole"].items():
            assert distance(gradient, expected.get(name, torch.zeros(gradient.shape))) < 1e-6
            assert found["norms"][name] == pytest.approx(float(gradient.double().norm()), rel=1e-6)
            assert torch.equal(found["single"][name], gradient)
            assert torch.equal(joined(together, "parts", name, stage), gradient.view(-1))
            assert torch.equal(joined(together, "masters", name, stage), found["values"][name])
        sent, flat_groups = found["gathers"]
        assert sent == (0 if stage == 0 or world == 1 else flat_groups)


def joined(ranks: list[dict[str, Any]], kind: str, name: str, stage: int) -> torch.Tensor:
    return ranks[0][kind][name] if stage == 0 else torch.cat([found[kind][name] for found in ranks])


def test_moments_are_there_by_part() -> None:
    whole = run_ranks(2, look, "tied", make_config(0, accumulation=2))[0]["moments"]
    ranks = run_ranks(2, look, "tied", make_config(3, accumulation=2))
    assert all(distance(joined(ranks, "moments", name, 3), value) < 1e-6 for name, value in whole.items())
    assert all(value.any() for value in whole.values())


# -- weighted losses ---------------------------------------------------------------------------------------------


def look_at_weighted(precision: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Rank 0's loss weighs 1, rank 1's 3."""
    engine = make_engine(CASES["plain"], make_config(2, precision=precision))
    loss = CASES["plain"].loss(engine, Place(dist.get_rank(), 0, 0))
    engine.backward(loss, weight=1.0 + 2.0 * dist.get_rank())
    found = gradient_norms(engine.module), dict(full_gradients(engine.module))
    engine.zero_grad()
    engine.destroy()
    return found


@pytest.mark.parametrize(("precision", "error"), (("fp32", 1e-6), ("fp16", 1e-2)))
def test_gradients_of_weighted_losses_have_neither_weight_nor_scale(precision: str, error: float) -> None:
    model = CASES["plain"].build()
    for rank, share in ((0, 0.25), (1, 0.75)):
        (CASES["plain"].loss(model, Place(rank, 0, 0)) * share).backward()
    for norms, gradients in run_ranks(2, look_at_weighted, precision):
        for name, param in model.named_parameters():
            assert param.grad is not None
            assert distance(gradients[name], param.grad) < error, name
            assert norms[name] == pytest.approx(float(gradients[name].double().norm()), rel=1e-6), name


# -- divided layers ----------------------------------------------------------------------------------------------


def look_at_divided(stage: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    engine = zerorun.initialize(build("llama"), merged(make_config(stage), {"tensor_parallel": {"size": 2}}))
    engine.backward(engine(**batch_of(engine.topology.data_parallel_rank, 0, 0)).loss)
    found = gradient_norms(engine.module), dict(full_gradients(engine.module))
    engine.zero_grad()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_gradients_of_divided_layers_are_whole(stage: int) -> None:
    model = build("llama")
    for rank in range(2):
        (model(**batch_of(rank, 0, 0)).loss / 2).backward()
    expected = {name: param.grad for name, param in model.named_parameters()}
    for norms, gradients in run_ranks(4, look_at_divided, stage):
        assert gradients.keys() == norms.keys() == expected.keys()
        for name, gradient in gradients.items():
            assert distance(gradient, expected[name]) < 1e-6, name  # type: ignore[arg-type]
            assert norms[name] == pytest.approx(float(gradient.double().norm()), rel=1e-6), name


# -- mistakes ----------------------------------------------------------------------------------------------------

SCRIPT = """
import importlib, os, sys, time, torch, zerorun
from torch import nn
from zerorun.zero import gathers, gradients

for module in (gathers, gradients):  # which read the variable when they are imported
    importlib.reload(module)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(4)))
engine = zerorun.initialize(model, {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
                                    "zero_optimization": {"stage": int(sys.argv[1])}})
engine.backward(engine(torch.ones(2, 8)).square().mean())
if os.environ["RANK"] == "0":
    zerorun.zero.safe_get_full_grad(next(model.parameters()))
time.sleep(100)
"""


@pytest.mark.parametrize("stage", by_day((0, 3), 3))
def test_one_rank_alone_gets_an_error(stage: int) -> None:
    with start_ranks(2, SCRIPT, str(stage), ZERORUN_ORDER_TIMEOUT_S="2") as (first, _):
        code, _, errors = first.finish(60 * patience())
    assert code != 0
    assert "OrderError: gradients were asked for on rank 0, and not on all other ranks within 2 s. Remedy:" in errors


def test_modules_of_nobody_have_none() -> None:
    with pytest.raises(ModelError, match="not managed by any"):
        gradient_norms(nn.Linear(2, 2))


# -- edits between backward and step -----------------------------------------------------------------------------


def edited(gradient: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Something that depends on all elements, and on their places."""
    return gradient - gradient.mean() + 1e-3 * torch.arange(gradient.numel(), device=gradient.device).view(gradient.shape)


def edit_by_parts(params: list[torch.Tensor]) -> None:
    for param in params:
        whole = safe_get_full_grad(param)
        assert whole is not None
        safe_set_full_grad(param, edited(whole, param))
    for param in params:  # and once more what is there already, by parts
        part = safe_get_local_grad(param)
        assert part is not None
        safe_set_local_grad(param, part.clone())


def edit_gradients(config: dict[str, Any], at_once: bool) -> dict[str, torch.Tensor]:
    """Two steps of two micro-batches, whose gradients are edited before each update."""
    engine = make_engine(CASES["plain"], config)
    for step in range(2):
        for micro in range(2):
            engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), step, micro)))
            if micro == 0:
                engine.step()
        params = list(engine.module.parameters())
        if at_once:
            safe_update_full_grad_vectorized(params, edited)
        else:
            edit_by_parts(params)
        engine.step()
    found = engine.state_dict()
    engine.destroy()
    return found


def edited_by_one_process(world: int, clip: float, after: int = 1) -> dict[str, torch.Tensor]:
    module = CASES["plain"].build()
    optimizer = torch.optim.SGD(
        module.parameters(), lr=0.05, momentum=0.9
    )  # Adam would magnify what rounding does to zeros
    for step in range(2):
        for micro in range(2):
            for rank in range(world):
                (CASES["plain"].loss(module, Place(rank, step, micro)) / (2 * world)).backward()
            for param in module.parameters() if micro == after else ():
                assert param.grad is not None
                param.grad = edited(param.grad, param)
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in module.state_dict().items()}


def edit_in_between(config: dict[str, Any], stepped: bool) -> dict[str, torch.Tensor]:
    """Gradients are edited after the first of two micro-batches, before its step() or after it."""
    engine = make_engine(CASES["plain"], config)
    for step in range(2):
        for micro in range(2):
            engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), step, micro)))
            if micro == 0 and stepped:
                engine.step()
            if micro == 0:
                safe_update_full_grad_vectorized(list(engine.module.parameters()), edited)
            if micro == 1 or not stepped:
                engine.step()
    found = engine.state_dict()
    engine.destroy()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("stepped", (False, True))
@pytest.mark.parametrize(("stage", "offload"), ((3, "none"), (2, "cpu"), (1, "none"), (0, "none"), (1, "cpu"), (2, "none")))
def test_gradients_may_be_edited_before_the_last_micro_batch(stage: int, offload: str, stepped: bool) -> None:
    """Those of later micro-batches are added to what was set."""
    config = make_config(stage, accumulation=2, clip=0.5, zero_optimization={"offload_optimizer": {"device": offload}})
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    wanted = edited_by_one_process(2, 0.5, after=0)
    for found in run_ranks(2, edit_in_between, config, stepped):
        for name, value in wanted.items():
            assert distance(found[name], value) < 1e-6, name


@pytest.mark.each_value
@pytest.mark.parametrize("at_once", (False, True))
@pytest.mark.parametrize("offload", ("none", "cpu"))
@pytest.mark.parametrize("stage", by_day(range(4), 1, 3))
def test_edited_gradients_are_those_that_count(stage: int, offload: str, at_once: bool) -> None:
    """For the norm, clipping and the update, as where one process edits ``param.grad``."""
    if offload == "cpu" and stage == 0:
        return
    config = make_config(stage, accumulation=2, clip=0.5)
    config["zero_optimization"]["offload_optimizer"] = {"device": offload}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    wanted = edited_by_one_process(2, 0.5)
    for found in run_ranks(2, edit_gradients, config, at_once):
        for name, value in wanted.items():
            assert distance(found[name], value) < 1e-6, name


def edit_in_fp16(stage: int) -> bool:
    """What is set is what is got, whatever the loss scale."""
    engine = make_engine(CASES["plain"], make_config(stage, precision="fp16"))
    engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 0, 0)))
    param = next(engine.module.parameters())
    value = torch.linspace(-1, 1, param.numel()).view(param.shape)
    safe_set_full_grad(param, value)
    found = safe_get_full_grad(param)
    assert found is not None
    engine.destroy()
    return torch.allclose(found, value, atol=1e-6)


@pytest.mark.parametrize("stage", (1, 3))
def test_edits_know_the_loss_scale(stage: int) -> None:
    assert all(run_ranks(2, edit_in_fp16, stage))


def edit_states(stage: int) -> dict[str, Any]:
    engine = make_engine(CASES["plain"], make_config(stage))
    engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 0, 0)))
    engine.step()
    param = next(engine.module.parameters())
    master, moment = local_master(param), local_state(param, "exp_avg")
    assert master is not None and moment is not None
    safe_set_local_fp32_param(param, torch.full_like(master, 0.5))
    safe_set_local_optimizer_state(param, torch.full_like(moment, 0.25), "exp_avg")
    moment = local_state(param, "exp_avg")
    found = {"weights": next(iter(engine.state_dict().values())), "moment": moment.clone() if moment is not None else None}
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_parts_of_masters_and_states_can_be_set(stage: int) -> None:
    for found in run_ranks(2, edit_states, stage):
        assert torch.equal(found["weights"], torch.full_like(found["weights"], 0.5))
        assert found["moment"] is None or torch.equal(found["moment"], torch.full_like(found["moment"], 0.25))


def mistakes() -> list[str]:
    engine = make_engine(CASES["plain"], make_config(1))
    param, said = next(engine.module.parameters()), []
    for attempt in (
        lambda: safe_set_full_grad(torch.zeros(2), torch.zeros(2)),
        lambda: safe_set_full_grad(param, torch.zeros(2)),
        lambda: safe_set_full_grad(param, torch.zeros_like(param)),
        lambda: safe_set_local_optimizer_state(param, torch.zeros(10**6), "exp_avg"),
    ):
        try:
            attempt()
            said.append("nothing")
        except zerorun.ZerorunError as error:
            said.append(f"{type(error).__name__} {error}")
    engine.destroy()
    return said


def test_edits_that_cannot_be() -> None:
    for stranger, shape, none, length in run_ranks(2, mistakes):
        assert stranger.startswith("ModelError") and "not a parameter of any zerorun engine" in stranger
        assert shape.startswith("ModelError") and "not a tensor of shape" in shape
        assert none.startswith("StepError") and "between backward() and step()" in none
        assert length.startswith("ModelError") and "this rank's part has" in length
        assert all("Remedy: " in text for text in (stranger, shape, none, length))


def set_in_other_shapes(stage: int, precision: str) -> tuple[list[str], list[tuple[int, ...]], int]:
    """What is said of each value; the shape of the parameter; how many elements of it a refused value has changed."""
    engine = make_engine(CASES["plain"], make_config(stage, precision=precision))
    engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), 0, 0)))
    engine.step()
    param = next(p for p in engine.module.parameters() if p.dim() == 2 and p.shape[0] != p.shape[1])
    rows, columns = param.shape

    def values() -> list[torch.Tensor]:
        found = safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg")
        return [value for value in (*found, *engine.state_dict().values()) if value is not None]

    shapes, said = [(columns, rows), (2 * rows, columns), (rows * columns * 3 // 4,), (1,)], []
    before = values()
    for value in [torch.full(shape, 7.0) for shape in shapes]:
        for attempt in (
            lambda value=value: safe_set_full_fp32_param(param, value),
            lambda value=value: safe_set_full_optimizer_state(param, value, "exp_avg"),
        ):
            try:
                attempt()
                said.append("nothing")
            except Exception as error:  # whatever it is, all ranks are to say the same
                said.append(f"{type(error).__name__} {error}")
    changed = sum(int((now != old).sum()) for now, old in zip(values(), before, strict=True))
    engine.destroy()
    return said, shapes, changed


@pytest.mark.parametrize(("stage", "precision"), ((1, "bf16"), (2, "fp32"), (3, "fp32")))
def test_values_in_other_shapes_change_nothing_and_are_refused_on_all_ranks(stage: int, precision: str) -> None:
    found = run_ranks(2, set_in_other_shapes, stage, precision)
    assert found[0] == found[1]
    said, shapes, changed = found[0]
    assert changed == 0
    for number, text in enumerate(said):
        function = ("safe_set_full_fp32_param", "safe_set_full_optimizer_state")[number % 2]
        assert text.startswith(f"ModelError {function}(...): ") and f"is {shapes[number // 2]}, and not" in text, text
