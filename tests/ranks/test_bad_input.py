"""Mistakes give one clear error, the same on all ranks, and no hang."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import Gpt
from torch import nn
from training import make_config, shared_topology

import zerorun
from zerorun import log
from zerorun.deepspeed.entry import initialize as initialize_as_deepspeed
from zerorun.errors import (
    ConfigError,
    ModelError,
    NonFiniteError,
    ReleasedParameterError,
    StepError,
    TopologyError,
    ZerorunError,
)


def attempt(action: Callable[[], Any]) -> tuple[str, str]:
    """(name of the zerorun error that ``action`` raises, its text)."""
    try:
        action()
    except ZerorunError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def make(config: dict[str, Any] | None = None, model: nn.Module | None = None, **options: Any) -> zerorun.Engine:
    model = model if model is not None else Gpt()
    return zerorun.initialize(model, config or make_config(3), topology=shared_topology(), **options)


def half_migrated() -> list[str]:
    """What is said where an optimizer has some of the parameters, and where step() is never called."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerorun.model_setup.checked_arguments.info_once", said.append)
        patch.setattr("zerorun.engine.accumulation.warn_once", said.append)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        config = {key: value for key, value in make_config(1).items() if key != "optimizer"}
        engine = zerorun.initialize(model, config, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
        for _ in range(40):
            engine.backward(engine(torch.ones(2, 4)).sum())
        engine.destroy()
    return said


def test_a_loop_that_is_migrated_by_half_is_told() -> None:
    for groups, step in run_ranks(2, half_migrated):
        assert (
            "2 of 4 parameters that require a gradient are in no group of the optimizer: '0.weight', '0.bias'. They do not"
            in groups
        )
        assert "8 backwards, and engine.step() has not been called yet" in step


def clipped_by_torch() -> list[Any]:
    """What calls of torch's own functions come to: another norm, values, the engine's norm, and another model's."""
    engine, other = make(make_config(2, clip=0.5)), nn.Linear(2, 2)
    params, norm = list(engine.module.parameters()), nn.utils.clip_grad_norm_
    engine.backward(engine(ids()).sum())
    other(torch.ones(1, 2)).sum().backward()
    found: list[Any] = [attempt(lambda: norm(engine.module.parameters(), max_norm=0.25))]
    found.append(attempt(lambda: nn.utils.clip_grad_value_(params[0], 1.0)))
    found.append(attempt(lambda: norm(params, 0.5, norm_type=1)))
    found.append(attempt(lambda: (norm(params, 0.5), norm(params, torch.inf))))
    found.append([message for message in log._warned if "clip_grad_norm_" in message])
    found.append(float(norm((param for param in other.parameters()), 1e-3)) > 1e-3 > float(other.weight.grad.norm()) / 1.01)
    engine.step()
    engine.destroy()
    return [*found, nn.utils.clip_grad_norm_ is norm]


def test_a_loop_that_clips_by_itself_is_told() -> None:
    """The call did nothing, without a word: a loop that was migrated by half trained with another norm, or unclipped."""
    for other, values, another_norm, same, warned, clips, stays in run_ranks(2, clipped_by_torch):
        assert other[0] == values[0] == another_norm[0] == "StepError"
        assert "clips to a norm of 0.5" in other[1] and 'set "gradient_clipping": 0.25' in other[1]
        assert "clip values by safe_get_full_grad()" in values[1]
        assert same == ("nothing", "") and len(warned) == 2 and "engine.get_global_grad_norm()" in warned[0]
        assert clips and not stays, "other models are clipped as ever, and torch has its functions back in the end"


def shortened() -> list[str]:
    make(model=nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 2))).destroy()
    return [message for message in log._warned if "'0' have max_norm" in message]


@pytest.mark.parametrize("world", [1, 2])
def test_rows_that_ranks_shorten_by_themselves_are_told(world: int) -> None:
    """Loss and gradients look right, and weights are others than in one process."""
    assert [len(told) for told in run_ranks(world, shortened)] == [world - 1] * world


def clipped_in_the_mode() -> list[str]:
    engine = initialize_as_deepspeed(model=Gpt(), config=make_config(2, clip=0.5))[0]
    engine.backward(engine(ids()).sum())
    nn.utils.clip_grad_norm_(engine.module.parameters(), 0.25)
    engine.step()
    engine.destroy()
    return [message for message in log._warned if 'set "gradient_clipping": 0.25' in message]


def test_in_the_mode_it_is_told_that_a_loop_clips_by_itself() -> None:
    """DeepSpeed does nothing there, either, and says nothing."""
    assert [len(warned) for warned in run_ranks(2, clipped_in_the_mode)] == [1, 1]


def wrapped() -> tuple[tuple[str, str], tuple[str, str]]:
    model = torch.nn.parallel.DistributedDataParallel(Gpt())
    return attempt(lambda: make(model=model)), attempt(lambda: make(model=nn.Sequential(model)))


def test_a_model_that_sums_its_gradients_is_refused() -> None:
    """They were as many times too large as there are ranks, without a word."""
    for whole, part in run_ranks(2, wrapped):
        assert whole[0] == part[0] == "ModelError" and "the model is wrapped in DistributedDataParallel" in whole[1]
        assert "its module '0' is wrapped" in part[1] and "Remedy: give initialize() the model without it" in part[1]


def ids() -> torch.Tensor:
    return torch.zeros(2, 4, dtype=torch.long)


# -- each returns (error name, text) on its rank -----------------------------------------------------------------


def missing_config() -> tuple[str, str]:
    return attempt(lambda: zerorun.initialize(Gpt()))


def unknown_key_on_one_rank() -> tuple[str, str]:
    config = make_config(1)
    if dist.get_rank() == 1:
        config["zero_optimization"]["stagee"] = 2
    return attempt(lambda: make(config))


def different_configs() -> tuple[str, str]:
    """Rank 0 gives no ``gradient_clipping``, and has a note that says what the default is."""
    clip = {"gradient_clipping": 0.5} if dist.get_rank() else {}
    return attempt(lambda: make({key: value for key, value in make_config(1).items() if key != "gradient_clipping"} | clip))


def different_models() -> tuple[str, str]:
    model = Gpt()
    if dist.get_rank() == 1:
        model.extra = nn.Linear(3, 3)
    return attempt(lambda: make(model=model))


def different_topologies() -> tuple[str, str]:
    topology = zerorun.Topology.plan(2, dist.get_rank(), shard_degree=1 + dist.get_rank())
    return attempt(lambda: zerorun.initialize(Gpt(), make_config(1), topology=topology))


def folder_of_another_engine() -> tuple[str, str]:
    config = make_config(3) | {"checkpoint": {"dir": "of two"}}  # in which nothing is saved
    for _ in range(2):  # one after the other is well
        engine = make(config)
        told = attempt(lambda: make(config))
        engine.destroy()
    return told


def scripted_module() -> tuple[str, str]:
    return attempt(lambda: make(model=nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))))


def parameters_without_shapes() -> tuple[str, str]:
    return attempt(lambda: make(model=nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))))


def not_a_module() -> tuple[str, str]:
    return attempt(lambda: zerorun.initialize("model", make_config(1)))  # type: ignore[arg-type]


def foreign_parameters() -> tuple[str, str]:
    return attempt(lambda: make(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)))


def no_trainable_parameter() -> tuple[str, str]:
    return attempt(lambda: make(model=Gpt().requires_grad_(False)))


def used_optimizer() -> tuple[str, str]:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    model(ids()).sum().backward()
    optimizer.step()
    return attempt(lambda: make(model=model, optimizer=optimizer))


def strings_as_parameters() -> tuple[str, str]:
    return attempt(lambda: make(model_parameters=["blocks.0.up.weight"]))


def names_as_parameters() -> tuple[str, str]:
    model = Gpt()
    return attempt(lambda: make(model=model, model_parameters=dict(model.named_parameters())))


def parameters_and_groups() -> tuple[str, str]:
    model = Gpt()
    first, *rest = model.parameters()
    return attempt(lambda: make(model=model, model_parameters=[first, {"params": rest}]))


def one_parameter() -> tuple[str, str]:
    model = Gpt()
    return attempt(lambda: make(model=model, model_parameters=next(model.parameters())))


def strings_in_a_group() -> tuple[str, str]:
    return attempt(lambda: make(model_parameters=[{"params": ["weight"]}]))


def optimizer_callable_without_result() -> tuple[str, str]:
    return attempt(lambda: make(optimizer=lambda params: None))  # type: ignore[arg-type, return-value]


def failing_optimizer_callable() -> tuple[str, str]:
    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        if dist.get_rank() == 1:
            raise KeyError("lr")
        return torch.optim.SGD(params)

    return attempt(lambda: make(optimizer=build))


def scheduler_without_optimizer() -> tuple[str, str]:
    config = make_config(3)
    del config["optimizer"]
    build = torch.optim.lr_scheduler.ConstantLR
    return attempt(lambda: make(config, lr_scheduler=lambda optimizer: build(optimizer)))


def scheduler_that_is_none() -> tuple[str, str]:
    return attempt(lambda: make(lr_scheduler=0.1))


def failing_scheduler_callable() -> tuple[str, str]:
    return attempt(lambda: make(lr_scheduler=torch.optim.lr_scheduler.StepLR))  # which needs a step size


def schedule_of_another_optimizer() -> tuple[str, str]:
    model = Gpt()
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    return attempt(lambda: make(model=model, lr_scheduler=schedule))


def schedule_of_an_optimizer_made_anew() -> tuple[str, str]:
    model = Gpt()
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=1.0), 1)
    return attempt(lambda: make(model=model, lr_scheduler=schedule, optimizer=torch.optim.SGD))


def tied_by_memory() -> tuple[str, str]:
    model = Gpt()
    model.head.weight.data = model.embed.weight.data
    before = [param.data_ptr() for param in model.parameters()]
    answer = attempt(lambda: make(model=model))
    assert before == [param.data_ptr() for param in model.parameters()]
    return answer


def tied_by_memory_on_one_rank() -> tuple[str, str]:
    model = Gpt()
    if dist.get_rank() == 1:
        model.head.weight = nn.Parameter(model.embed.weight.detach())
    return attempt(lambda: make(model=model))


class Filter(nn.Module):
    """A filter of frequencies, whose gains are complex numbers or, as ``real``, pairs of them."""

    def __init__(self, *, real: bool = False) -> None:
        super().__init__()
        gains = torch.full((3,), 0.5 + 0.25j)
        self.gain = nn.Parameter(torch.view_as_real(gains) if real else gains)
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.gain if self.gain.is_complex() else torch.view_as_complex(self.gain)
        return torch.fft.irfft(torch.fft.rfft(self.first(x)) * gain, n=4)


def complex_parameter() -> tuple[str, str]:
    return attempt(lambda: make(model=Filter()))


def complex_parameter_made_in_init() -> tuple[str, str]:
    with zerorun.zero.Init():
        model = Filter()
    return attempt(lambda: make(model=model, optimizer=lambda params: torch.optim.SGD(params, lr=0.0)))


def number_as_training_data() -> tuple[str, str]:
    return attempt(lambda: make(training_data=3))


def other_lengths_of_training_data() -> tuple[str, str]:
    return attempt(lambda: make(training_data=list(range(32 - dist.get_rank()))))


class WithoutLength(list[int]):
    def __len__(self) -> int:
        return int(None) if dist.get_rank() == 1 else 32  # type: ignore[call-overload]


def failing_length_on_one_rank() -> tuple[str, str]:
    return attempt(lambda: make(training_data=WithoutLength()))


def schedule_on_one_rank() -> tuple[str, str]:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    return attempt(lambda: make(lr_scheduler=schedule if dist.get_rank() == 0 else None))


def generator_as_training_data_on_one_rank() -> tuple[str, str]:
    return attempt(lambda: make(training_data=iter([1]) if dist.get_rank() == 1 else [1, 2]))


def lbfgs() -> tuple[str, str]:
    model = Gpt()
    return attempt(lambda: make(model=model, optimizer=torch.optim.LBFGS(model.parameters())))


def meta_parameters() -> tuple[str, str]:
    with torch.device("meta"):
        model = Gpt()
    return attempt(lambda: make(model=model))


def write_to_a_placeholder(write: Callable[[nn.Parameter], Any]) -> tuple[str, str]:
    with zerorun.zero.Init():
        model = Gpt()
    write(model.blocks[1].norm1.weight)
    return attempt(lambda: make(model=model))


def filled_after_init() -> tuple[str, str]:
    return write_to_a_placeholder(lambda param: nn.init.constant_(param, 3.0))


def filled_after_init_on_one_rank() -> tuple[str, str]:
    return write_to_a_placeholder(lambda param: param.data.fill_(3.0) if dist.get_rank() == 1 else None)


def replaced_after_init() -> tuple[str, str]:
    def write(param: nn.Parameter) -> None:
        param.data = torch.ones(param.shape)

    return write_to_a_placeholder(write)


def made_of_a_placeholder() -> tuple[str, str]:
    with zerorun.zero.Init():
        model = Gpt()
    model.copied = nn.Parameter(model.blocks[0].up.weight)
    return attempt(lambda: make(model=model))


def of_another_engine() -> tuple[str, str]:
    return with_engine(lambda engine: make(model=engine.module))


def unknown_unit_class() -> tuple[str, str]:
    return attempt(lambda: make(make_config(3, zero_optimization={"unit_policy": ["Blok"]})))


def with_engine(action: Callable[[zerorun.Engine], Any], **config: Any) -> tuple[str, str]:
    engine = make(make_config(3, **config))
    result = attempt(lambda: action(engine))
    engine.zero_grad()
    engine.destroy()
    return result


def step_without_backward() -> tuple[str, str]:
    return with_engine(lambda engine: engine.step())


def step_twice() -> tuple[str, str]:
    def action(engine: zerorun.Engine) -> None:
        engine.backward(engine(ids()).mean())
        engine.step()
        engine.step()

    return with_engine(action)


def frozen_at_first() -> tuple[str, str]:
    model = Gpt()
    model.blocks[1].requires_grad_(False)
    engine = make(make_config(3), model=model)
    weights = engine.state_dict()

    def action() -> None:
        model.blocks[1].requires_grad_(True)
        engine.backward(engine(ids()).mean())
        engine.step()

    result = attempt(action)
    assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())
    engine.destroy()
    return result


class Adapted(nn.Module):
    """A linear layer and what is added to it, as adapters are."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.adapters = nn.ModuleDict()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((adapter(x) for adapter in self.adapters.values()), self.layer(x))


def changed_later(change: Callable[[Gpt], None], stage: int = 3) -> tuple[str, str]:
    """Train a model whose layers may have adapters, which is changed after a step. Weights may not change any more."""
    model = Gpt()
    for block in model.blocks:
        block.down = Adapted(block.down)
    engine = make(make_config(stage), model=model)

    def step() -> None:
        engine.backward(engine(ids()).mean())
        engine.step()

    step()
    change(model)
    weights = engine.state_dict()
    result = attempt(step)
    assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())
    engine.destroy()
    return result


def adapter_added_later() -> tuple[str, str]:
    """In place of all else that is trained, as PEFT's set_adapter() does."""

    def change(model: Gpt) -> None:
        model.requires_grad_(False)
        for block in model.blocks:
            block.down.adapters["new"] = nn.Linear(block.down.layer.in_features, block.down.layer.out_features)

    return changed_later(change)


def adapter_added_to_what_is_trained() -> tuple[str, str]:
    def change(model: Gpt) -> None:
        layer = model.blocks[1].down.layer
        model.blocks[1].down.adapters["new"] = nn.Linear(layer.in_features, layer.out_features)

    return changed_later(change, stage=1)


def parameter_replaced_later() -> tuple[str, str]:
    def change(model: Gpt) -> None:
        model.blocks[1].down.layer.bias = nn.Parameter(torch.ones(model.blocks[1].down.layer.out_features))

    return changed_later(change, stage=0)


def direct_optimizer_step() -> tuple[str, str]:
    def action(engine: zerorun.Engine) -> None:
        engine.backward(engine(ids()).mean())
        assert engine.optimizer is not None
        engine.optimizer.step()

    return with_engine(action)


def loss_not_scalar() -> tuple[str, str]:
    return with_engine(lambda engine: engine.backward(engine(ids())))


def loss_without_graph() -> tuple[str, str]:
    return with_engine(lambda engine: engine.backward(torch.ones(())))


def step_in_no_sync() -> tuple[str, str]:
    def action(engine: zerorun.Engine) -> None:
        with engine.no_sync():
            engine.backward(engine(ids()).mean())
            engine.step()

    return with_engine(action)


def step_after_an_inner_no_sync() -> tuple[str, str]:
    def action(engine: zerorun.Engine) -> None:
        with engine.no_sync():
            with engine.no_sync():
                engine.backward(engine(ids()).mean())
            engine.step()

    return with_engine(action)


def nan_loss_on_one_rank() -> tuple[str, str]:
    def action(engine: zerorun.Engine) -> None:
        before = engine.state_dict()
        loss = engine(ids()).mean()
        engine.backward(loss * float("nan") if dist.get_rank() == 1 else loss)
        try:
            engine.step()
        finally:
            after = engine.state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before)

    return with_engine(action)


def weight_outside_its_unit() -> tuple[str, str]:
    class Peeking(Gpt):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * self.never[0].weight.sum()

    model = Peeking()
    model.never = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    engine = make(model=model)
    result = attempt(lambda: engine.backward(engine(ids()).mean()))
    engine.zero_grad()
    engine.destroy()
    return result


def state_dict_of_the_module() -> tuple[str, str]:
    return with_engine(lambda engine: engine.module.state_dict())


CASES: dict[Callable[[], tuple[str, str]], tuple[type[ZerorunError], list[str]]] = {
    missing_config: (ConfigError, ["no configuration", "Remedy"]),
    unknown_key_on_one_rank: (ConfigError, ["zero_optimization.stagee", "stage"]),
    different_configs: (
        ConfigError,
        ["another configuration", "0.5  (file)', which rank 0 has not, or as the default. Remedy"],
    ),
    different_models: (ModelError, ["rank 1 has another model", "extra.weight"]),
    different_topologies: (TopologyError, ["another topology on rank 1", "shard=2", "Remedy"]),
    folder_of_another_engine: (ConfigError, ["checkpoint.dir", "another engine", "Remedy", "destroy()"]),
    scripted_module: (ModelError, ["its module '0' is a RecursiveScriptModule of torch.jit", "Remedy"]),
    parameters_without_shapes: (
        ModelError,
        ["'1.weight', '1.bias' have no shape", "Remedy: call the model once"],
    ),
    not_a_module: (ModelError, ["nn.Module", "str"]),
    foreign_parameters: (ModelError, ["group 0", "not a parameter of the model"]),
    no_trainable_parameter: (ModelError, ["no trainable parameter"]),
    used_optimizer: (ModelError, ["has been used", "fresh optimizer"]),
    strings_as_parameters: (ModelError, ["model_parameters", "str", "model.named_parameters()"]),
    names_as_parameters: (ModelError, ["model_parameters", "dict"]),
    parameters_and_groups: (ModelError, ["model_parameters", "dict among others"]),
    one_parameter: (ModelError, ["model_parameters", "Parameter"]),
    strings_in_a_group: (ModelError, ["model_parameters", "str"]),
    optimizer_callable_without_result: (ModelError, ["optimizer=<lambda> returned NoneType", "torch.optim.Optimizer"]),
    failing_optimizer_callable: (ModelError, ["optimizer=build", "KeyError: 'lr'"]),
    scheduler_without_optimizer: (ModelError, ["lr_scheduler=<lambda>", "there is none"]),
    scheduler_that_is_none: (ModelError, ["lr_scheduler", "step()", "float"]),
    failing_scheduler_callable: (ModelError, ["lr_scheduler=StepLR", "TypeError", "step_size"]),
    schedule_of_another_optimizer: (ModelError, ["lr_scheduler=StepLR", "the configuration's", "Remedy"]),
    schedule_of_an_optimizer_made_anew: (ModelError, ["lr_scheduler=StepLR", "that initialize() got", "Remedy"]),
    tied_by_memory: (ModelError, ["'embed.weight' and 'head.weight' share memory", "assign the Parameter itself"]),
    tied_by_memory_on_one_rank: (ModelError, ["'embed.weight' and 'head.weight' share memory", "Remedy"]),
    complex_parameter: (ModelError, ["'gain'", "complex64", "imaginary part", "view_as_complex"]),
    complex_parameter_made_in_init: (ModelError, ["'gain'", "complex64", "imaginary part", "Remedy"]),
    number_as_training_data: (ModelError, ["training_data", "__getitem__", "int"]),
    other_lengths_of_training_data: (ModelError, ["31 samples on rank 1", "32 on rank 0", "Remedy"]),
    failing_length_on_one_rank: (ModelError, ["len(training_data)", "WithoutLength", "TypeError", "Remedy"]),
    schedule_on_one_rank: (ModelError, ["rank 0 has an lr_scheduler", "rank 1 none", "Remedy"]),
    generator_as_training_data_on_one_rank: (ModelError, ["training_data", "list_iterator"]),
    lbfgs: (ModelError, ["LBFGS"]),
    meta_parameters: (ModelError, ["meta device", "zero.Init"]),
    filled_after_init: (ModelError, ["blocks.1.norm1.weight", "zerorun.zero.Init", "placeholder", "GatheredParameters"]),
    filled_after_init_on_one_rank: (ModelError, ["blocks.1.norm1.weight", "placeholder", "Remedy"]),
    replaced_after_init: (ModelError, ["blocks.1.norm1.weight", "placeholder", "Remedy"]),
    of_another_engine: (ModelError, ["belongs to an engine already", "destroy()"]),
    made_of_a_placeholder: (ModelError, ["copied", "zerorun.zero.Init", "inside a block"]),
    unknown_unit_class: (ConfigError, ["unit_policy", "Blok", "Block"]),
    step_without_backward: (StepError, ["without backward"]),
    step_twice: (StepError, ["without backward"]),
    frozen_at_first: (StepError, ["blocks.1.", "more", "was frozen", "Remedy"]),
    adapter_added_later: (StepError, ["blocks.0.down.adapters.new.weight", "and 7 more", "neither trained", "Remedy"]),
    adapter_added_to_what_is_trained: (StepError, ["blocks.1.down.adapters.new.weight", "neither trained", "Remedy"]),
    parameter_replaced_later: (StepError, ["blocks.1.down.layer.bias", "neither trained", "Remedy"]),
    direct_optimizer_step: (StepError, ["engine.step()"]),
    loss_not_scalar: (StepError, ["scalar", "mean()"]),
    loss_without_graph: (StepError, ["does not depend"]),
    step_in_no_sync: (StepError, ["no_sync"]),
    step_after_an_inner_no_sync: (StepError, ["no_sync"]),
    nan_loss_on_one_rank: (NonFiniteError, ["NaN", "rank 1", "micro-batch 0"]),
    weight_outside_its_unit: (ReleasedParameterError, ["never.0.weight", "unit 'never.0'", "GatheredParameters"]),
    state_dict_of_the_module: (ReleasedParameterError, ["engine.state_dict()"]),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_error_is_clear_and_the_same_on_all_ranks(case: Callable[[], tuple[str, str]]) -> None:
    kind, words = CASES[case]
    answers = run_ranks(2, case)
    assert {name for name, _ in answers} == {kind.__name__}
    for word in words:
        assert all(word in text for _, text in answers), (word, answers)


def train_beside_what_is_new(stage: int, adds: bool) -> dict[str, torch.Tensor]:
    """Weights after steps around which the module, and another one, may get parameters that nothing trains."""
    torch.manual_seed(0)
    model = Gpt()
    model.added = nn.ModuleList()
    engine, kept = make(make_config(stage), model), []
    for step in range(3):
        if adds:
            Gpt()
            model.added.append(nn.Linear(2, 2))  # which no forward runs
            model.register_parameter(f"frozen{step}", nn.Parameter(torch.ones(2), requires_grad=False))
            model.extra = nn.Parameter(torch.ones(2))
            model.extra.grad = torch.ones(2)
        engine.backward(engine(ids()).mean())
        if adds:
            kind, text = attempt(engine.step)
            assert (kind, "'extra'" in text) == ("StepError", True)
            kept.append(model.extra)  # by somebody else, with its gradient
            del model.extra  # as adapters are deleted: no hook tells
            engine.backward(engine(ids()).mean())
        engine.step()
    weights = {name: value for name, value in engine.state_dict().items() if name.startswith("blocks")}
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_added_and_not_trained_is_no_error(stage: int) -> None:
    """As adapters that are added and not active."""
    expected, found = (run_ranks(2, train_beside_what_is_new, stage, adds)[0] for adds in (False, True))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def filtered(stage: int) -> list[torch.Tensor]:
    """Weights after two steps of SGD: what the remedy leads to, without an engine at stage -1, and a frozen parameter."""
    torch.manual_seed(0)
    model, x = Filter(real=True), torch.randn(2, 4)
    model.frozen = nn.Parameter(torch.tensor([1 + 2j]), requires_grad=False)
    if stage < 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return list(model.state_dict().values())
    engine = make({**make_config(stage, optimizer="SGD"), "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}, model)
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        engine.step()
    weights = list(engine.state_dict().values())
    engine.destroy()
    return weights


@pytest.mark.parametrize("stage", [1, 3])
def test_complex_numbers_as_pairs_are_trained(stage: int) -> None:
    (wanted,) = run_ranks(1, filtered, -1)
    for found in run_ranks(2, filtered, stage):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def train_named(named: bool) -> list[torch.Tensor]:
    """The weights after a step of two groups, with and without the names of their parameters."""
    torch.manual_seed(0)
    model = Gpt()
    pairs = list(model.named_parameters())
    chosen: list[Any] = pairs if named else [param for _, param in pairs]
    groups = [{"params": chosen[:3], "lr": 0.5}, {"params": chosen[3:]}]
    weights = []
    for given, optimizer in ((chosen, None), (groups, None), (groups, torch.optim.AdamW)):
        engine = make(model=model, model_parameters=iter(given), optimizer=optimizer)
        engine.backward(engine(ids()).square().mean())
        engine.step()
        weights += list(engine.state_dict().values())
        engine.destroy()
    return weights


def test_named_parameters_are_parameters() -> None:
    plain, named = run_ranks(2, train_named, False)[0], run_ranks(2, train_named, True)[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, named, strict=True))


def frames_of_a_config_error() -> list[str]:
    try:
        zerorun.initialize(nn.Linear(2, 2), {"typo": 1})
    except ConfigError as error:
        return [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return []


def test_errors_of_the_configuration_have_no_tail_of_frames() -> None:
    """Of their own rank, or of another's: what is wrong is in the file."""
    assert run_ranks(2, frames_of_a_config_error) == [["frames_of_a_config_error", "told"]] * 2
