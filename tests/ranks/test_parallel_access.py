"""Parameters of divided models and of stages, looked at and changed: right on all ranks, or refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import patience, run_ranks, start_ranks
from test_parallel_matrix import batch_of, build
from torch import nn
from training import make_config, merged

import zerorun
from zerorun.errors import ReleasedParameterError, StepError, ZerorunError
from zerorun.zero import GatheredParameters


def attempt(act: Callable[[], Any]) -> tuple[str, str]:
    try:
        act()
    except ZerorunError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def engine_of(stage: int, tensor: int, pipe: int, model: str = "llama", **more: Any) -> Any:
    degrees = {"tensor_parallel": {"size": tensor}, "pipeline": {"stages": pipe}}
    return zerorun.initialize(build(model), merged(merged(make_config(stage), degrees), more))


def change(module: nn.Module, modifier: int, changing: bool) -> None:
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        param = module.get_parameter(name)
        with GatheredParameters(param, modifier_rank=modifier):
            if changing:
                param.data.mul_(torch.linspace(0.5, 2, param.numel()).view(param.shape))


def change_divided(stage: int, modifier: int) -> tuple[float, dict[str, torch.Tensor]]:
    engine = engine_of(stage, 2, 1)
    change(engine.module, modifier, dist.get_rank() == modifier)
    loss = engine(**batch_of(0, 0, 0)).loss.item()
    weights = engine.state_dict()
    engine.destroy()
    return loss, weights


@pytest.mark.each_value
@pytest.mark.parametrize("stage", (1, 3))
@pytest.mark.parametrize("modifier", (0, 3))
def test_one_rank_changes_parameters_of_a_divided_model(stage: int, modifier: int) -> None:
    model = build("llama")
    with torch.no_grad():
        for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight"):
            param = model.get_parameter(name)
            param.mul_(torch.linspace(0.5, 2, param.numel()).view(param.shape))
    expected = model(**batch_of(0, 0, 0)).loss.item()
    for loss, weights in run_ranks(4, change_divided, stage, modifier):
        assert loss == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=0, atol=0)


def pass_in_a_block(stage: int) -> tuple[tuple[str, str], bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = {"0": "colwise", "2": "rowwise"}
    engine = zerorun.initialize(model, make_config(stage, tensor_parallel={"size": 2, "plan": plan}))
    before = engine(torch.ones(2, 8)).detach()
    with GatheredParameters(list(engine.module.parameters())):
        told = attempt(lambda: engine.module(torch.ones(2, 8)))
    with GatheredParameters([engine.module[2].bias]):  # which each rank has
        same = torch.equal(engine(torch.ones(2, 8)), before)
    engine.destroy()
    return told, same


@pytest.mark.parametrize("stage", (1, 3))
def test_divided_layers_do_not_run_with_whole_parameters(stage: int) -> None:
    """Where no shape was wrong, the sum over ranks was twice what it should be."""
    for told, same in run_ranks(2, pass_in_a_block, stage):
        assert told[0] == "ModelError" and "'0.weight'" in told[1] and "leave the block before" in told[1]
        assert same


def partly_frozen(model: str, seed: int) -> nn.Module:
    module, chosen = build(model), torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.requires_grad_(bool(torch.rand((), generator=chosen) < 0.5))
    return module


def look_at_partly_frozen(model: str, stage: int) -> None:
    for seed in range(6):
        expected = {name: param.detach().clone() for name, param in build(model).named_parameters()}
        module = partly_frozen(model, seed)
        config = merged(make_config(stage), {"tensor_parallel": {"size": 2, "vocab_parallel_loss": seed % 2 == 1}})
        engine = zerorun.initialize(module, config)
        with GatheredParameters(list(module.parameters())):
            torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=0)
        found = engine.state_dict()
        torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=0, atol=0)
        engine.destroy()
        torch.testing.assert_close(dict(module.named_parameters()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("model", by_day(("llama", "gpt2"), "gpt2"))
@pytest.mark.parametrize("stage", by_day((0, 3), 3))
def test_ranks_ask_for_whole_values_in_the_same_order_whatever_is_frozen(model: str, stage: int) -> None:
    """Only rank 0 counts whole parameters in the norm, and still it must tell them from divided ones as others do."""
    run_ranks(4, look_at_partly_frozen, model, stage)


def change_on_stages() -> list[tuple[str, str]]:
    engine = engine_of(1, 1, 2)
    rank, module = dist.get_rank(), engine.module
    table = next(param for name, param in module.named_parameters() if "embed" in name or "lm_head" in name)
    norm = next(param for name, param in module.named_parameters() if "layernorm" in name)
    found = [
        attempt(lambda: GatheredParameters(table, modifier_rank=rank).__enter__()),
        attempt(lambda: zerorun.zero.safe_set_full_fp32_param(table, torch.zeros(table.shape))),
        attempt(lambda: GatheredParameters(norm, modifier_rank=1 - rank).__enter__()),
    ]
    with GatheredParameters(norm, modifier_rank=rank):
        norm.data.fill_(0.25)
    assert torch.equal(norm, torch.full_like(norm, 0.25))
    engine.destroy()
    return found


def test_what_other_stages_would_not_hear_of_is_refused() -> None:
    for tied, also_tied, elsewhere in run_ranks(2, change_on_stages):
        assert tied[0] == also_tied[0] == elsewhere[0] == "ModelError"
        assert "tied to a parameter of another pipeline stage" in tied[1]
        assert "tied to a parameter of another pipeline stage" in also_tied[1]
        assert "give a rank of that stage" in elsewhere[1]


def save_a_part(tensor: int, pipe: int, folder: str) -> str:
    engine = engine_of(1, tensor, pipe)
    whole = engine.module.whole_model if pipe > 1 else engine.module
    with pytest.raises(ReleasedParameterError) as first:
        engine.module.state_dict()
    with pytest.raises(ReleasedParameterError):
        whole.save_pretrained(folder)
    assert engine.state_dict().keys() == build("llama").state_dict().keys()
    engine.destroy()
    return str(first.value)


@pytest.mark.parametrize(("tensor", "pipe"), ((2, 1), (1, 2)))
def test_a_part_is_not_saved_as_the_model(tensor: int, pipe: int, tmp_path: Path) -> None:
    for text in run_ranks(2, save_a_part, tensor, pipe, str(tmp_path)):
        assert "parts of the model" in text
        assert "engine.state_dict()" in text


def pickle_a_part(keys: dict[str, Any]) -> str:
    engine = zerorun.initialize(build("llama"), merged(make_config(0), keys))
    with pytest.raises(ReleasedParameterError) as found:
        torch.save(engine.module, io.BytesIO())
    engine.destroy()
    torch.save(engine.module, io.BytesIO())
    return str(found.value)


@pytest.mark.parametrize("keys", ({"tensor_parallel": {"size": 2}}, {"sequence_parallel_size": 2}))
def test_a_part_is_not_pickled_as_the_model(keys: dict[str, Any]) -> None:
    for text in run_ranks(2, pickle_a_part, keys):
        assert "Remedy: save engine.state_dict()" in text


def optimizers_of_whole_parameters() -> list[tuple[str, str]]:
    from transformers.optimization import Adafactor

    def make(params: Any) -> Any:
        return Adafactor(params, lr=1e-3, relative_step=False, scale_parameter=False)

    def make_used(params: Any) -> Any:
        optimizer, first = torch.optim.Adagrad(params, lr=0.1), params[0]
        first.grad = torch.ones_like(first)
        optimizer.step()
        return optimizer

    config = {key: value for key, value in make_config(1).items() if key != "optimizer"}
    divided = {**config, "tensor_parallel": {"size": 2}}
    return [
        attempt(lambda: zerorun.initialize(build("llama"), divided, optimizer=make)),
        attempt(lambda: zerorun.initialize(build("llama"), config, optimizer=make_used)),
    ]


def test_optimizers_that_cannot_do_are_refused() -> None:
    for factored, used in run_ranks(2, optimizers_of_whole_parameters):
        assert factored[0] == used[0] == "ModelError"
        assert "Adafactor needs whole parameters" in factored[1]
        assert "has been used before" in used[1] and "fresh optimizer" in used[1]


class Counting(nn.Module):
    """Hands on a state that it changes in place each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        self.state.add_(1)
        return self.linear(x), self.state


def count_on() -> float:
    torch.manual_seed(0)
    layers = [Counting(), lambda pair: pair[0] * pair[1]]
    module = zerorun.PipelineModule(
        layers, num_stages=dist.get_world_size(), loss_fn=lambda out, labels: out.square().mean()
    )
    engine = zerorun.initialize(module, make_config(0, accumulation=4))
    batches = [(torch.ones(2, 4), None)] * 4
    found = float(engine.train_batch(iter(batches)))
    engine.destroy()
    return found


def test_a_buffer_may_change_after_it_was_handed_on() -> None:
    assert run_ranks(2, count_on)[0] == pytest.approx(run_ranks(1, count_on)[0], rel=1e-6)


class Half(nn.Module):
    """One of its two layers is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(x)
        return found


def leave_out() -> bool:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Half()]
    module = zerorun.PipelineModule(layers, num_stages=2, loss_fn=lambda out, labels: out.square().mean())
    config = merged(make_config(1), {"zero_optimization": {"ignore_unused_parameters": False}})
    engine = zerorun.initialize(module, config)
    before = {name: param.clone() for name, param in engine.module.named_parameters()}
    with pytest.raises(StepError, match=r"unused\.weight"):
        engine.train_batch(iter([(torch.ones(2, 4), None)]))
    same = all(torch.equal(param, before[name]) for name, param in engine.module.named_parameters())
    engine.destroy()
    return same


def test_unused_parameters_of_one_stage_stop_all() -> None:
    assert run_ranks(2, leave_out) == [True, True]


FAILING = """
import torch
from torch import nn
import zerorun

def loss_of(out, labels):
    raise ValueError("a mistake in the loss")

zerorun.init_distributed()
module = zerorun.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=loss_of)
engine = zerorun.initialize(module, {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
try:
    engine.train_batch(iter([(torch.ones(2, 4), None)]))
finally:
    engine.destroy()
"""


def test_destroy_after_a_failure_does_not_wait() -> None:
    """The other stage waits for a gradient, and would never come to an agreement about the end."""
    with start_ranks(2, FAILING) as (_, last):
        code, _, errors = last.finish(60 * patience())
    assert code == 1
    assert "ValueError: a mistake in the loss" in errors
