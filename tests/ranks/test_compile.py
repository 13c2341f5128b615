"""engine.compile(): every unit's forward compiled, hooks outside the graphs, the same training as eager."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import Block, Gpt, Mlp, Place, token_loss, tokens
from simulation import simulated_device
from torch import nn
from training import make_config

import zerorun
from zerorun.pipeline.layer_spec import LayerSpec
from zerorun.pipeline.module import PipelineModule
from zerorun.plan.replaced_forwards import uncompiled

_compiled: list[Any] = []


def counting_backend(graph: Any, inputs: Any) -> Any:
    """Runs the graph as it is, and counts how many were made."""
    _compiled.append(graph)
    return graph.forward


WARM_UP = 2  # steps, of training and of evaluation, in which graphs are made
SETTINGS: dict[str, Any] = {
    "stage": (3, 2, 1, 0),
    "device": ("simulated", "cpu"),
    "precision": ("fp32", "bf16"),
    "policy": ("none", "full"),
    "accumulation": (1, 2),
}


def train(
    config: dict[str, Any], backend: Any, steps: int, device: str = "cpu", block: type[nn.Module] = Block
) -> tuple[list[float], list[int]]:
    """(losses of training and evaluation, graphs made after each step). After the warm-up a block that is compiled again
    is an error, as is one that is not a single graph."""
    torch._dynamo.reset()
    _compiled.clear()
    torch.manual_seed(0)
    losses, graphs = [], []
    with simulated_device() if device == "simulated" else nullcontext():
        engine = zerorun.initialize(Gpt(make=block), config)
        if backend is not None:
            engine.compile(backend=counting_backend if backend == "counting" else backend, fullgraph=True)
        for step in range(steps):
            with torch.compiler.set_stance("fail_on_recompile") if step >= WARM_UP else nullcontext():
                for micro in range(engine.gradient_accumulation_steps()):
                    loss = token_loss(engine, tokens(Place(dist.get_rank(), step, micro)))
                    engine.backward(loss)
                    engine.step()
                with torch.no_grad():
                    evaluated = token_loss(engine.eval(), tokens(Place(dist.get_rank(), step), salt=1))
            engine.train()
            losses += [float(loss.detach()), float(evaluated)]
            graphs.append(len(_compiled))
        engine.destroy()
    torch._dynamo.reset()
    return losses, graphs


@pytest.mark.parametrize(
    tuple(SETTINGS),
    by_day(product(*SETTINGS.values()), (3, "simulated", "bf16", "full", 2)),
)
def test_a_block_is_one_graph_which_is_made_once(
    stage: int, device: str, precision: str, policy: str, accumulation: int
) -> None:
    config = make_config(
        stage, clip=1.0, precision=precision, accumulation=accumulation, activation_checkpointing={"policy": policy}
    )
    eager = run_ranks(2, train, config, None, 4, device)
    for (losses, graphs), (expected, _) in zip(run_ranks(2, train, config, "counting", 4, device), eager, strict=True):
        assert losses == expected
        assert graphs == [2] * 4, "one for training and one for evaluation, which all blocks share"


def script_compiles(way: str, model: nn.Module, **options: Any) -> nn.Module:
    """``model``, compiled as scripts do it that do not use engine.compile()."""
    if way == "wrapped":
        return torch.compile(model, **options)
    if way == "in place":
        model.compile(**options)
    for index, block in enumerate(model.blocks):
        if way == "blocks":
            block.compile(**options)
        elif way == "wrapped blocks":
            model.blocks[index] = torch.compile(block, **options)
    return model


def train_compiled_by_the_script(config: dict[str, Any], way: str, backend: Any) -> tuple[list[float], list[float], int]:
    """(losses of training and evaluation, the same without compilation, graphs)."""
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        _compiled.clear()
        torch.manual_seed(0)
        model, losses = Gpt(), list[float]()
        how, _, when = way.partition(", ")
        options = {"backend": counting_backend if backend == "counting" else backend}
        first = script_compiles(how, model, **options) if compiles and when == "before" else model
        engine: Any = zerorun.initialize(first, config)
        if compiles and when == "after":
            script_compiles(how, model, **options)
        call = torch.compile(engine, **options) if compiles and how == "engine" else engine
        for step in range(3):
            loss = token_loss(call, tokens(Place(dist.get_rank(), step)))
            engine.backward(loss)
            engine.step()
            engine.eval()
            with torch.no_grad():
                evaluated = token_loss(call, tokens(Place(dist.get_rank(), step), salt=1))
            engine.train()
            losses += [float(loss.detach()), float(evaluated)]
        found.append((losses, len(_compiled)))
        engine.destroy()
    torch._dynamo.reset()
    (expected, none), (losses, graphs) = found
    assert none == 0
    return losses, expected, graphs


WAYS = (
    *(f"{how}, before" for how in ("wrapped", "in place", "blocks", "wrapped blocks")),
    *(f"{how}, after" for how in ("in place", "blocks", "engine")),
)


@pytest.mark.parametrize(
    ("way", "policy"),
    by_day(
        product(WAYS, ("none", "full", "selective")),
        ("wrapped, before", "none"),
        ("blocks, before", "full"),
        ("wrapped blocks, before", "full"),
    ),
)
def test_what_the_script_compiles_is_compiled_at_stage_3(way: str, policy: str) -> None:
    config = make_config(3, clip=1.0, activation_checkpointing={"policy": policy})
    for losses, expected, graphs in run_ranks(2, train_compiled_by_the_script, config, way, "counting"):
        assert losses == expected
        assert graphs >= 2 or policy == "selective", "one for training and one for evaluation, at least"


def a_step(engine: Any, way: str, ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """One step of training, and an evaluation, as a script writes them that compiles all of it. Returns both losses."""
    with engine.no_sync() if way == "two backwards" else nullcontext():
        loss = token_loss(engine, ids)
        if way == "plain":
            loss.backward()
        elif way == "scaled":
            engine.scale(loss).backward()
        else:
            engine.backward(loss)
    if way == "two backwards":
        engine.backward(token_loss(engine, others))
    engine.step()
    engine.zero_grad()
    engine.eval()
    with torch.no_grad():
        evaluated = token_loss(engine, others)
    engine.train()
    return torch.stack((loss.detach(), evaluated))


def train_by_whole_steps(
    config: dict[str, Any], way: str, compiles: bool
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """(losses of training and evaluation, weights, graphs of blocks) of steps that the script compiles, or does not."""
    torch._dynamo.reset()
    _compiled.clear()
    torch.manual_seed(0)
    engine: Any = zerorun.initialize(Gpt(), config)
    step = torch.compile(a_step, backend=counting_backend) if compiles else a_step
    losses = list[float]()
    for number in range(3):
        ids, others = (tokens(Place(dist.get_rank(), number), salt=salt) for salt in (0, 1))
        losses += step(engine, way, ids, others).tolist()
    weights = torch.compile(lambda: engine.state_dict(), backend=counting_backend)() if compiles else engine.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    engine.destroy()
    torch._dynamo.reset()
    return losses, weights, sum("scaled_dot_product_attention" in graph.code for graph in _compiled)


BACKWARDS = ("engine", "plain", "scaled", "two backwards")


@pytest.mark.parametrize(
    ("stage", "way", "precision", "policy"),
    by_day(
        product((3, 2, 1, 0), BACKWARDS, ("fp32", "fp16"), ("none", "full", "selective")),
        (3, "scaled", "fp16", "full"),
    ),
)
def test_a_script_may_compile_a_whole_step(stage: int, way: str, precision: str, policy: str) -> None:
    config = make_config(stage, clip=1.0, precision=precision, activation_checkpointing={"policy": policy})
    plain = run_ranks(2, train_by_whole_steps, config, way, False)
    for (losses, weights, graphs), (expected, others, _) in zip(
        run_ranks(2, train_by_whole_steps, config, way, True), plain, strict=True
    ):
        assert losses == expected
        assert all(torch.equal(weights[name], others[name]) for name in others)
        assert graphs >= 2 or policy == "selective", "one for training and one for evaluation, at least"


def train_divided_by_whole_steps(divided: str, compiles: bool) -> list[float]:
    """The losses of steps of a model whose layers, or whose stages, two ranks divide, as compiled by the script or not."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    if divided == "layers":
        plan = {"0": "colwise", "2": "rowwise"}
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
        engine: Any = zerorun.initialize(model, make_config(3, tensor_parallel={"size": 2, "plan": plan}))
    else:
        layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(3)]
        module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        engine = zerorun.initialize(module, make_config(1))

    def step(x: torch.Tensor) -> torch.Tensor:
        if divided == "stages":
            return engine.train_batch(iter([(x, x)]))  # type: ignore[no-any-return]
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.detach()  # type: ignore[no-any-return]

    call = torch.compile(step, backend=counting_backend) if compiles else step
    losses = [float(call(torch.full((2, 8), number + 1.0))) for number in range(3)]
    engine.destroy()
    torch._dynamo.reset()
    return losses


@pytest.mark.parametrize("divided", ["layers", "stages"])
def test_a_script_may_compile_a_whole_step_of_a_divided_model(divided: str) -> None:
    expected = run_ranks(2, train_divided_by_whole_steps, divided, False)
    assert run_ranks(2, train_divided_by_whole_steps, divided, True) == expected


class Decorated(nn.Linear):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def test_functions_of_scripts_under_the_same_decorator_are_compiled() -> None:
    uncompiled(torch.no_grad()(lambda: None))
    torch._dynamo.reset()
    _compiled.clear()
    module = Decorated(2, 2)
    module.register_forward_hook(uncompiled(lambda *_: None))  # a graph ends before it: Python calls the forward
    torch.compile(module, backend=counting_backend)(torch.ones(2))
    torch._dynamo.reset()
    assert _compiled


@pytest.mark.nightly  # by day the graphs are counted, and run as they are: each kernel takes a C++ compiler seconds
@pytest.mark.parametrize("block", [Mlp, Block])
def test_inductor_at_stage_3(block: type[nn.Module]) -> None:
    eager = run_ranks(2, train, make_config(3, clip=1.0), None, 3, "cpu", block)
    for (losses, _), (expected, _) in zip(
        run_ranks(2, train, make_config(3, clip=1.0), "inductor", 3, "cpu", block, timeout_s=240.0), eager, strict=True
    ):
        assert losses == pytest.approx(expected, rel=1e-5)
