"""Full values of a sharded model: zero.Init, GatheredParameters, gradients, masters and moments by name, destroy."""

from __future__ import annotations

import copy
import gc
import io
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, Gpt, Place, reset, token_loss, tokens
from quantised import build as quantised_model
from safetensors.torch import load_file
from test_parallel_matrix import batch_of
from test_parallel_matrix import build as build_divided
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from training import make_config, make_engine, read_slowly, shared_topology

import zerorun
from zerorun.deepspeed.engine_names import load_module_state_dict, module_state_dict
from zerorun.deepspeed.parameters import GatheredBlock, show_placeholders
from zerorun.distributed.layout import ALIGNMENT
from zerorun.errors import CheckpointError, ModelError, ReleasedParameterError, ZerorunError
from zerorun.ops.aio import AsyncFile
from zerorun.zero import GatheredParameters, Init
from zerorun.zero.init import part_of
from zerorun.zero.placeholders import UnsavedPlaceholder


class OwnInit(nn.Module):
    """Initialisation in the children, in the parent's apply, by name, through .data, and of a part of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 24)) for _ in range(4))
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.rand(5), persistent=False)
        self.apply(self._init)
        for name, param in self.named_parameters():
            if name.endswith("1.weight"):
                nn.init.normal_(param, std=0.1)
        self.blocks[1][0].bias.data.add_(3.0)
        with torch.no_grad():
            self.blocks[2][0].weight[3].fill_(7.0)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def build_partitioned(stage: int) -> dict[str, Any]:
    torch.manual_seed(3)
    expected = OwnInit()
    after = torch.rand(1)
    torch.manual_seed(3)
    peak = [0]
    with Init() as init:
        partition = init._partition_all

        def counted() -> None:
            peak[0] = max(peak[0], sum(param.numel() for param in init._whole_now))
            partition()

        init._partition_all = counted  # type: ignore[method-assign]
        model = OwnInit()
    assert torch.equal(torch.rand(1), after), "other random numbers were drawn"
    released = all(bool(param.isnan().all()) for param in model.parameters())
    engine = zerorun.initialize(model, make_config(stage), topology=shared_topology())
    found = engine.state_dict()
    same = all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
    buffers = torch.equal(model.table, expected.table)
    engine.destroy()
    return {"same": same, "buffers": buffers, "released": released, "peak": peak[0]}


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (3, 3), (2, 0)])
def test_init_gives_the_values_it_would_give_without(world: int, stage: int) -> None:
    largest_module = 24 * 48 + 48
    for found in run_ranks(world, build_partitioned, stage):
        assert found == {"same": True, "buffers": True, "released": True, "peak": largest_module}


class OfMegatron(nn.Module):
    """Parameters with attributes, as Megatron's layers have them, one of which has a method's name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.gain = nn.Parameter(torch.rand(()).expand(6))
        self.register_buffer("shift", torch.rand(6))
        for tensor in [*self.parameters(), *self.buffers()]:
            tensor.stride = 1  # type: ignore[method-assign, assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.gain + self.shift  # type: ignore[no-any-return]


def train_attributes(stage: int, init: bool) -> tuple[dict[str, torch.Tensor], list[Any]]:
    torch.manual_seed(3)
    with Init() if init else nullcontext():
        model = OfMegatron()
    engine = zerorun.initialize(model, make_config(stage, optimizer="SGD"), topology=shared_topology())
    for step in range(2):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        engine.backward(engine(x).square().mean())
        engine.step()
    weights = engine.state_dict()
    engine.destroy()
    return weights, [tensor.stride for tensor in [*model.parameters(), *model.buffers()]]


@pytest.mark.each_value
@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize("stage", [3, 0, 1, 2])
def test_an_attribute_of_a_parameter_may_have_the_name_of_a_method(stage: int, init: bool) -> None:
    """Megatron's column-parallel layers say ``bias.stride = 1``; where strides were asked for, that number was called."""
    torch.manual_seed(3)
    model = OfMegatron()
    model.gain = nn.Parameter(model.gain.detach().clone())  # elements of their own can be updated
    optimizer = torch.optim.SGD(model.parameters(), **make_config(stage, optimizer="SGD")["optimizer"]["params"])
    for step in range(2):
        batches = [torch.randn(2, 6, generator=torch.Generator().manual_seed(2 * step + rank)) for rank in range(2)]
        (sum(model(x).square().mean() for x in batches) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    for weights, attributes in run_ranks(2, train_attributes, stage, init):
        assert attributes == [1] * 6
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    """Some other layers, so that what was made before is released."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)


def parametrized(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Layers that are changed at once, after others, and twice."""
    layers = nn.Sequential(wrap(nn.Linear(8, 8)), Block(), nn.Linear(8, 6), Block())
    wrap(layers[2])
    wrap(layers[1].up)
    Block()
    return layers


def extra_parameters() -> nn.Module:
    """Parameters that are registered late, made of others, and written to by one of their names afterwards."""
    model: Any = Block()
    model.tail = Block()
    model.late = nn.Parameter(torch.rand(5))
    model.of_data = nn.Parameter(model.up.weight.data)
    model.of_detached = nn.Parameter(model.down.weight.detach())
    model.of_parameter = nn.Parameter(model.tail.up.weight)
    model.rows = nn.Parameter(model.tail.down.weight[2:5].detach())
    model.turned = nn.Parameter(model.down.weight.T)
    model.turned_data = nn.Parameter(model.tail.down.weight.data.t())
    model.expanded = nn.Parameter(torch.rand(()).expand(7))
    model.more = Block()
    nn.init.ones_(model.up.weight)  # seen by of_data, too
    with torch.no_grad():
        model.of_detached[1] = 5.0
        model.rows.mul_(3.0)
        model.turned.add_(1.0)
        model.tail.down.weight.add_(model.tail.down.weight, alpha=2.0)
    Block()
    nn.init.uniform_(model.of_parameter)
    return model


def parameters_of_one_tensor() -> nn.Module:
    """Slices of one tensor, which partly overlap; a channels-last weight; what was left of a layer that is gone."""
    flat, model = torch.rand(40), nn.Module()
    model.register_parameter("first", nn.Parameter(flat[:20]))
    model.register_parameter("middle", nn.Parameter(flat[10:30].view(4, 5)))
    model.register_parameter("last", nn.Parameter(flat[32:]))
    model.convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    gone = nn.Linear(6, 6)
    Block()
    taken = nn.Parameter(gone.weight)
    del gone.weight
    Block()
    model.register_parameter("taken", taken)
    del taken
    Block()
    flat[12:14] = 9.0
    del flat
    Block()
    with torch.no_grad():
        model.middle.mul_(2.0)
        model.first.sub_(model.last.sum())
        model.convolution.weight[:, 1].add_(1.0)
    return model


def views_written_to_later() -> nn.Module:
    """Writes to tensors that look at a parameter which was released since; functions of several modules' parameters."""
    model = nn.ModuleList(Block() for _ in range(3))
    data, row = model[0].up.weight.data, model[1].up.weight.detach()[2]
    Block()
    data.fill_(2.0)
    row += 1.0
    with torch.no_grad():
        model[2].up.weight.copy_(model[0].up.weight + model[1].up.weight)
        model[2].down.weight.copy_(model[0].up.weight.T)
        torch.nn.utils.vector_to_parameters(
            torch.rand(8 + 8 * 12 + 12), [model[0].down.bias, model[1].down.weight, model[1].up.bias]
        )
    model[1].up.bias.data.copy_(model[2].up.bias.data)
    model[0].double().float()
    return model


def values_that_are_set() -> nn.Module:
    """By ``set_``, which no mode sees: that of a parametrized weight, before, after and without another use of it."""
    model: Any = nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(3))
    for layer in model:
        layer.weight = torch.rand(8, 8)
        Block()
    with torch.no_grad():
        model[0].parametrizations.weight.original1.mul_(2.0)
        model[2].bias.set_(torch.rand(8))
    return model


def in_one_block(build: Callable[[], nn.Module], enabled: bool) -> nn.Module:
    with Init(enabled=enabled):
        return build()


def in_two_blocks(enabled: bool) -> nn.Module:
    with Init(enabled=enabled):
        model: Any = Block()
    with Init(enabled=enabled), Init(enabled=enabled):
        model.more = Block()
        nn.init.normal_(model.up.weight)
        model.down.bias = model.more.down.bias
        model.copied = nn.Parameter(model.down.weight)
    with Init(enabled=enabled):
        Init(model.more, enabled=enabled)
        model.up.bias.data[3] = 4.0
    return model


PLAIN_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": partial(parametrized, nn.utils.parametrizations.weight_norm),
    "spectral_norm": partial(parametrized, nn.utils.parametrizations.spectral_norm),
    "orthogonal": partial(parametrized, nn.utils.parametrizations.orthogonal),
    "old_weight_norm": partial(parametrized, nn.utils.weight_norm),
    "old_spectral_norm": partial(parametrized, nn.utils.spectral_norm),
    "extra_parameters": extra_parameters,
    "parameters_of_one_tensor": parameters_of_one_tensor,
    "views_written_to_later": views_written_to_later,
    "values_that_are_set": values_that_are_set,
}
BUILDERS: dict[str, Callable[[bool], nn.Module]] = {
    **{name: partial(in_one_block, build) for name, build in PLAIN_BUILDERS.items()},
    "two_blocks": in_two_blocks,
}


def build_from_others(name: str) -> list[str]:
    """What differs from the model built without Init."""
    torch.manual_seed(3)
    expected = {key: value.clone() for key, value in BUILDERS[name](False).state_dict().items()}
    after = torch.rand(1)
    torch.manual_seed(3)
    model = BUILDERS[name](True)
    problems = [] if torch.equal(torch.rand(1), after) else ["random numbers"]
    problems += [f"{key} is whole" for key, param in model.named_parameters() if part_of(param) is None]
    engine = zerorun.initialize(model, make_config(3), topology=shared_topology())
    found = engine.state_dict()
    problems += sorted(found.keys() ^ expected.keys())
    problems += [key for key, value in expected.items() if not torch.equal(found[key], value)]
    engine.destroy()
    return problems


@pytest.mark.each_value
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", BUILDERS)
def test_init_gives_parameters_made_of_others_their_values(name: str, world: int) -> None:
    assert run_ranks(world, build_from_others, name) == [[]] * world


def edit(stage: int) -> list[str]:
    """Edit one weight by GatheredParameters; what differs from editing it in a plain model."""
    torch.manual_seed(0)
    model = Gpt()
    name, weight = next((n, p) for n, p in model.named_parameters() if "blocks" in n and p.dim() == 2)
    engine = zerorun.initialize(model, make_config(stage), topology=shared_topology())
    with GatheredParameters([weight]):
        shape = tuple(weight.shape)
    with GatheredParameters((p for p in [weight]), modifier_rank=1):
        if dist.get_rank() == 1:
            weight.data.copy_(torch.arange(weight.numel()).view(shape) / 7)
    wanted = torch.arange(math.prod(shape)).view(shape) / 7
    problems = []
    master = zerorun.zero.safe_get_full_fp32_param(weight)
    if master is None or not torch.equal(master, wanted):
        problems.append("master")
    if not torch.equal(engine.state_dict()[name], wanted):
        problems.append("state_dict")
    try:
        with GatheredParameters(weight):
            weight.data.zero_()
        problems.append("a change without modifier_rank went unnoticed")
    except ReleasedParameterError as error:
        if name not in str(error):
            problems.append("the error names no parameter")
    with GatheredParameters([nn.Parameter(torch.ones(3)), None]), GatheredParameters(weight, enabled=False):
        pass
    with GatheredParameters([weight, None], modifier_rank=0), GatheredParameters(None):  # a layer without a bias
        pass
    engine.destroy()
    return problems


@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_parameters(stage: int) -> None:
    assert run_ranks(2, edit, stage) == [[], []]


def raising(weight: nn.Parameter) -> None:
    raise ArithmeticError("of the script")


def reshaping(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(3, 3)


BAD_BLOCKS: list[tuple[type[Exception], Callable[[nn.Parameter], None]]] = [
    (ArithmeticError, raising),
    (ModelError, reshaping),
]


def trained_around_bad_blocks(stage: int, precision: str, kind: Callable[..., Any], bad: bool) -> Any:
    """Weights on this rank after a step, ``bad`` blocks that end in errors after an edit of rank 0, and a step."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage, precision=precision), topology=shared_topology())
    if kind is GatheredBlock:
        show_placeholders(engine)
    params = list(engine.module.parameters())
    for step in range(2):
        engine.backward(token_loss(engine, tokens(Place(dist.get_rank(), step))))
        engine.step()
        for error, then in BAD_BLOCKS if bad and step == 0 else []:
            with pytest.raises(error), torch.no_grad(), kind(params, modifier_rank=0):
                for param in params if dist.get_rank() == 0 else ():
                    param.add_(5.0)
                then(params[-1])
    weights = engine.state_dict()
    engine.destroy()
    return weights


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [GatheredParameters, GatheredBlock])
def test_a_block_that_ends_in_an_error_leaves_no_trace(kind: Any, stage: int, precision: str) -> None:
    """A rank's half-done edit of what it keeps whole must not stay there: ranks would train different models."""
    expected = run_ranks(2, trained_around_bad_blocks, stage, precision, kind, False)[0]
    for weights in run_ranks(2, trained_around_bad_blocks, stage, precision, kind, True):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(expected[name], value) for name, value in weights.items())


def step_after_an_edit(stage: int, load: str, folder: str) -> list[str]:
    """What is said of an edit in a block for reading, and then of a step; "" if nothing, as of a step after ``load``."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage), topology=shared_topology())
    engine.save_checkpoint(folder)
    whole, weight, told = engine.state_dict(), engine.module.head.weight, []

    def edit() -> None:
        with torch.no_grad(), GatheredParameters([weight]):
            weight.add_(5.0)

    def overwrite() -> None:
        with torch.no_grad(), GatheredParameters([weight], modifier_rank=0):
            weight.copy_(whole["head.weight"])

    loads = {
        "load_checkpoint": partial(engine.load_checkpoint, folder),
        "load_state_dict": lambda: engine.module.head.load_state_dict({"weight": whole["head.weight"]}),
        "modifier_rank": overwrite,
    }

    def step() -> None:
        engine.backward(token_loss(engine, tokens(Place(dist.get_rank(), 0))))
        engine.step()

    for act in (edit, step, loads[load], step):
        try:
            act()
        except ZerorunError as error:
            told.append(str(error))
        else:
            told.append("")
    engine.destroy()
    return told


@pytest.mark.parametrize(
    ("stage", "how"), [(0, "load_state_dict"), (1, "modifier_rank"), (2, "load_state_dict"), (3, "load_checkpoint")]
)
def test_an_edit_in_a_block_for_reading_is_an_error_until_weights_are_loaded(stage: int, how: str, tmp_path: Path) -> None:
    """Nobody has a copy of what it was, and other ranks may not have made the same one."""
    for edit, step, load, again in run_ranks(2, step_after_an_edit, stage, how, str(tmp_path)):
        assert "modifier_rank=0" in edit
        assert "'head.weight'" in step and "without modifier_rank" in step and "load_state_dict()" in step
        assert (load, again) == ("", "")


def stepped(engine: Any, step: int) -> None:
    engine.backward(token_loss(engine, tokens(Place(dist.get_rank(), step))))
    engine.step()


def given_new_values(how: str, engine: Any, folder: str) -> None:
    """Give the weights new values by others than a block of GatheredParameters."""
    if how == "step":
        for step in range(2):
            stepped(engine, step)
    elif how == "load_checkpoint":
        engine.load_checkpoint(folder)
    else:
        for param in engine.module.parameters():
            whole = zerorun.zero.safe_get_full_fp32_param(param) + 1.0
            if how == "safe_set_full_fp32_param":
                zerorun.zero.safe_set_full_fp32_param(param, whole)
            else:
                zerorun.zero.safe_set_local_fp32_param(param, zerorun.zero.safe_get_local_fp32_param(param) + 1.0)


def new_values_in_a_block(stage: int, settings: dict[str, Any], how: str, modifier: int | None, folder: str) -> list[str]:
    """What differs from the same without a block: weights, what the block shows of them, and weights after a next step."""
    states: list[dict[str, torch.Tensor]] = []
    for inside in (False, True):
        torch.manual_seed(0)
        engine = zerorun.initialize(Gpt(), make_config(stage, **settings), topology=shared_topology())
        stepped(engine, 5)
        if how == "load_checkpoint" and not inside:
            engine.save_checkpoint(folder)
            stepped(engine, 6)
        named = dict(engine.module.named_parameters())
        with GatheredParameters(named.values(), modifier, enabled=inside):
            given_new_values(how, engine, folder)
            shown = {name: param.detach().clone() for name, param in named.items()} if inside else {}
        states.append(engine.state_dict())
        if inside:
            states.append(shown)
        stepped(engine, 7)
        states.append(engine.state_dict())
        engine.destroy()
    expected, then, found, shown, then_found = states[0], states[1], *states[2:]
    assert shown.keys() == named.keys()
    found_of = {"weights": (expected, found), "shown": (expected, shown), "of the next step": (then, then_found)}
    return [f"{what}: {n}" for what, (a, b) in found_of.items() for n in b if not torch.equal(a[n], b[n].cpu())]


WAYS = ["step", "load_checkpoint", "safe_set_full_fp32_param", "safe_set_local_fp32_param"]
BF16 = {"precision": "bf16"}
BLOCKS_OF = [{}, BF16, {**BF16, "bf16": {"store_param_remainders": True}}]


@pytest.mark.each_value
@pytest.mark.parametrize("modifier", [None, 1])
@pytest.mark.parametrize("settings", BLOCKS_OF)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", WAYS)
def test_steps_and_loads_inside_a_block_are_not_undone(
    how: str, stage: int, settings: dict[str, Any], modifier: int | None, tmp_path: Path
) -> None:
    """Its masters and moments are those of after the step, so the weights must be, too; nobody has edited anything."""
    for differing in run_ranks(2, new_values_in_a_block, stage, settings, how, modifier, str(tmp_path)):
        assert not differing


def edited_around_new_values(stage: int, modifier: int | None, first: bool, how: str, folder: str) -> list[Any]:
    """What is said of a block in which rank 1 edits a weight before (``first``) or after; which weights are as if not."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage), topology=shared_topology())
    weight, told = engine.module.head.weight, ""
    stepped(engine, 5)
    if how == "load_checkpoint":
        engine.save_checkpoint(folder)
        stepped(engine, 6)

    def edit() -> None:
        with torch.no_grad():
            weight.copy_(torch.full_like(weight, 0.25)) if dist.get_rank() == 1 else None

    try:
        with GatheredParameters(list(engine.module.parameters()), modifier):
            for act in (edit, partial(given_new_values, how, engine, folder))[:: 1 if first else -1]:
                act()
    except ReleasedParameterError as error:
        told = str(error)
    found = engine.state_dict()["head.weight"].clone()
    engine.destroy()
    return [told, found]


@pytest.mark.each_value
@pytest.mark.parametrize("how", ["step", "load_checkpoint"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_edit_before_a_step_in_its_block_is_an_error_on_all_ranks(
    stage: int, first: bool, how: str, tmp_path: Path
) -> None:
    """What a step begins with are the shards; and an edit after it is one of the new values."""
    answers = run_ranks(2, edited_around_new_values, stage, 1, first, how, str(tmp_path))
    assert torch.equal(answers[0][1], answers[1][1])
    assert bool((answers[0][1] == 0.25).all()) is not first
    for told, _ in answers:
        assert ("leave the block before step()" in told) is first
    assert ("head.weight" in answers[1][0]) is first


def part_set_in_a_block(stage: int, settings: dict[str, Any]) -> list[set[float]]:
    """By how much a weight that a rank changes in a block has grown, and a bias beside it whose parts are set there."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage, **settings), topology=shared_topology())
    layer = engine.module.blocks[0].down
    with GatheredParameters([layer.weight, layer.bias], 0):
        layer.weight.data.fill_(1.0)
    with GatheredParameters([layer.weight, layer.bias], 0):
        if dist.get_rank() == 0:
            layer.weight.data.add_(1.0)
        zerorun.zero.safe_set_local_fp32_param(
            layer.bias, torch.full_like(zerorun.zero.safe_get_local_fp32_param(layer.bias), 3.0)
        )
    states = [engine.state_dict(exact=exact) for exact in (False, True)]
    found = [state[f"blocks.0.down.{name}"] for state in states for name in ("weight", "bias")]
    engine.destroy()
    return [set(value.flatten().tolist()) for value in found]


@pytest.mark.each_value
@pytest.mark.parametrize("settings", [{}, BF16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parts_that_are_set_in_a_block_leave_its_edits_of_others(stage: int, settings: dict[str, Any]) -> None:
    """All parameters of the flat group were gathered anew, half of them from a rank that had not edited them."""
    assert run_ranks(2, part_set_in_a_block, stage, settings) == [[{2.0}, {3.0}, {2.0}, {3.0}]] * 2


def saved_in_a_block(stage: int, settings: dict[str, Any], folder: str) -> dict[str, set[float]]:
    """The values of a weight, by where they were read, that rank 0 has changed from 1 to 2 in a block before."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage, **settings), topology=shared_topology())
    name, weight, found = "blocks.0.down.weight", engine.module.blocks[0].down.weight, {}
    with GatheredParameters(weight, 0):
        weight.data.fill_(1.0)
    with GatheredParameters(weight, 0):
        weight.data.add_(1.0 - dist.get_rank())
        engine.save_checkpoint(folder)
        engine.export(f"{folder}/exported")
        for exact in (False, True):
            found[f"state_dict({exact})"] = engine.state_dict(exact=exact)[name]
        assert bool((weight == 2.0 - dist.get_rank()).all()), "the block does not show its changes any more"
    found["after"] = engine.state_dict(exact=True)[name]
    files = [load_file(file) for file in Path(folder, "exported").glob("*.safetensors")]
    found["exported"] = next(file[name] for file in files if name in file)
    engine.load_checkpoint(folder)
    found["loaded"] = engine.state_dict(exact=True)[name]
    engine.destroy()
    return {where: set(value.flatten().tolist()) for where, value in found.items()}


@pytest.mark.each_value
@pytest.mark.parametrize("settings", [{}, BF16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_saved_in_a_block_has_none_of_its_changes(stage: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """It had those in the part of the rank that had made them, or none, or all, by stage."""
    for found in run_ranks(2, saved_in_a_block, stage, settings, str(tmp_path)):
        assert found.pop("after") == {2.0}
        assert found == {where: {1.0} for where in found}


class Peeking(torch.optim.SGD):
    """It has a method that torch's optimizers do not have, and its step may fail."""

    fails = False

    def eval(self) -> int:
        return len(self.param_groups)

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("the optimizer's own")
        return super().step(closure)


def edited_where_nothing_comes(stage: int, how: str) -> list[float]:
    """The least and the largest element of a weight that rank 1 has changed before what brings no new values."""
    torch.manual_seed(0)
    model = Gpt()
    optimizer = Peeking(model.parameters(), lr=0.1)
    engine = zerorun.initialize(model, make_config(stage), optimizer=optimizer, topology=shared_topology())
    weight = engine.module.head.weight
    stepped(engine, 5)
    block = GatheredParameters([weight], 1)
    with block, block if how == "entered twice" else nullcontext():
        if dist.get_rank() == 1:
            weight.data.fill_(0.25)
        if how == "eval":
            optimizer.eval()
        elif how == "failing step":
            optimizer.fails = True
            with pytest.raises(ArithmeticError):
                stepped(engine, 6)
            optimizer.fails = False
    found = engine.state_dict()["head.weight"]
    with GatheredParameters([weight], 1):  # which the block before does not hold any more
        assert torch.equal(weight.detach(), found)
    engine.destroy()
    return [found.min().item(), found.max().item()]


@pytest.mark.each_pair
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("how", ["eval", "failing step", "entered twice"])
def test_edits_count_where_no_new_values_come(stage: int, how: str) -> None:
    """They were noted, and undone, for a method of the optimizer that changes nothing, or a step that fails."""
    assert run_ranks(2, edited_where_nothing_comes, stage, how) == [[0.25, 0.25]] * 2


def edited_behind_an_inner_end(stage: int) -> float:
    engine = zerorun.initialize(Gpt(), make_config(stage), topology=shared_topology())
    weight = dict(engine.module.named_parameters())["head.weight"]
    block = GatheredParameters([weight], 0)
    with block:
        with block:
            pass
        if dist.get_rank() == 0:
            weight.data.fill_(0.25)
    found = engine.state_dict()["head.weight"]
    assert not engine.sharded_model.blocks
    engine.destroy()
    return float((found == 0.25).float().mean())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_block_that_is_entered_again_ends_with_its_last_end(stage: int) -> None:
    assert run_ranks(2, edited_behind_an_inner_end, stage) == [1.0, 1.0]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_edit_before_a_load_in_a_block_for_reading_is_an_error(stage: int, tmp_path: Path) -> None:
    """Though at stage 0 no copy of the value is there to compare with after the load."""
    answers = run_ranks(2, edited_around_new_values, stage, None, True, "load_checkpoint", str(tmp_path))
    assert torch.equal(answers[0][1], answers[1][1])
    assert not answers[0][0]
    assert "'head.weight'" in answers[1][0] and "modifier_rank=0" in answers[1][0]


def passes_in_a_block(stage: int, settings: dict[str, Any], modifier: int | None) -> list[str]:
    """What is wrong with values, state dicts, copies and losses around passes in a block, and with edits between them."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage, **settings), topology=shared_topology())
    stepped(engine, 5)
    named, ids = dict(engine.module.named_parameters()), tokens(Place(dist.get_rank(), 6))

    def loss() -> float:
        with torch.no_grad():
            return float(token_loss(engine, ids))

    def edit(factor: float) -> None:
        for param in named.values() if modifier is not None else ():
            param.data.mul_(factor)

    expected, losses = engine.state_dict(), [loss()]
    with GatheredParameters(list(named.values()), modifier):
        losses.append(loss())
        copies = [{n: p.detach().clone() for n, p in named.items()}, engine.module.state_dict()]
        copies.append(copy.deepcopy(engine.module).state_dict())
        wrong = [n for values in copies for n, value in values.items() if not torch.equal(value.cpu(), expected[n])]
        edit(1.5)
        losses += [loss(), loss()]
        engine.backward(token_loss(engine, ids))  # what comes after it must not be lost
        edit(0.5)
        expected = {n: p.detach().clone() for n, p in named.items()}
    found = engine.state_dict()
    wrong += [f"{n} at the end" for n, value in expected.items() if not torch.equal(found[n], value.cpu())]
    with GatheredParameters(list(named.values()), modifier):
        edit(2.0)
        losses.append(loss())
    losses.append(loss())
    wrong += ["loss"] * (losses[0] != losses[1] or len(set(losses[2:])) != 1)
    wrong += ["loss without the edits"] * ((losses[1] == losses[2]) is not (modifier is None))
    engine.step()
    engine.destroy()
    return wrong


OF_PASSES = [
    {},
    BF16,
    {"activation_checkpointing": {"policy": "full"}},
    {"zero_optimization": {"offload_param": {"device": "cpu"}}},
]


@pytest.mark.each_value
@pytest.mark.parametrize("modifier", [None, 1])
@pytest.mark.parametrize("settings", OF_PASSES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_passes_in_a_block_leave_its_values_and_see_what_it_has_changed(
    stage: int, settings: dict[str, Any], modifier: int | None
) -> None:
    """At stage 3 they left NaN, so that what was saved then was NaN, and computed with the values of before."""
    if stage < 3 and "zero_optimization" in settings:  # for stage 3 alone
        settings = {}
    assert run_ranks(2, passes_in_a_block, stage, settings, modifier) == [[], []]


class Normed(nn.Linear):
    """Looks at its own weight in a block, and goes on with it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with GatheredParameters(self.weight):
            norm = float(self.weight.detach().norm())
        return super().forward(x) / norm


def blocks_in_a_forward(stage: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Normed(4, 4) for _ in range(3)))
    engine = zerorun.initialize(model, make_config(stage), topology=shared_topology())
    for number in range(3):
        engine.backward(engine(torch.full((2, 4), number + 1.0)).square().mean())
        engine.step()
    found = engine.state_dict()
    engine.destroy()
    return found


def test_a_layer_may_open_a_block_in_its_forward() -> None:
    """At its end the layer had NaN in place of the weight that it runs with."""
    expected = run_ranks(2, blocks_in_a_forward, 0)[0]
    for found in run_ranks(2, blocks_in_a_forward, 3):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


class Halving(nn.Linear):
    """Halves the weight of ``of``, another layer or itself, in its forward."""

    how, of = "", (None,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.of[0] or self).weight
        if self.how == "block":
            with GatheredParameters(weight, modifier_rank=0):
                weight.data.mul_(0.5)
        elif self.how == "full":
            zerorun.zero.safe_set_full_fp32_param(weight, zerorun.zero.safe_get_full_fp32_param(weight) * 0.5)
        elif self.how == "local":
            zerorun.zero.safe_set_local_fp32_param(weight, zerorun.zero.safe_get_local_fp32_param(weight) * 0.5)
        return super().forward(x)


def edited_in_a_forward(stage: int, how: str) -> dict[str, torch.Tensor]:
    """Weights and losses where a layer changes itself, and one the next, which may have been gathered for its turn."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Halving(4, 4) for _ in range(5)))
    engine = zerorun.initialize(model, make_config(stage), topology=shared_topology())
    model[1].how = model[2].how = how
    model[2].of = (model[3],)
    losses = []
    for number in range(3):
        losses.append(engine.backward(engine(torch.full((2, 4), number + 1.0)).square().mean()).detach())
        engine.step()
        with torch.no_grad():
            losses.append(engine(torch.full((2, 4), number + 1.0)).square().mean())
    found = {**engine.state_dict(), "losses": torch.stack([loss.detach() for loss in losses])}
    engine.destroy()
    return found


@pytest.mark.parametrize("how", ["block", "full", "local"])
def test_a_layer_may_change_weights_in_its_forward(how: str) -> None:
    """At stage 3 what was running, or gathered for its turn, went on with NaN."""
    expected = run_ranks(2, edited_in_a_forward, 0, how)[0]
    for found in run_ranks(2, edited_in_a_forward, 3, how):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class WrittenLate:
    """A write that begins when somebody waits for it."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin = begin

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._begin().wait()


def exact_weights_on_a_slow_disk(folder: str) -> list[str]:
    """Which masters differ from those that are read when the disk has written all."""
    torch.manual_seed(0)
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    write = AsyncFile.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncFile, "write", lambda *args: WrittenLate(partial(write, *args)))
        engine = zerorun.initialize(Gpt(), make_config(3, **BF16, zero_optimization=disk), topology=shared_topology())
        stepped(engine, 0)
        found = engine.state_dict(exact=True)
        engine.sharded_model.finish_updates()
        expected = engine.state_dict(exact=True)
        engine.destroy()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def test_exact_weights_wait_for_the_disk(tmp_path: Path) -> None:
    """They were those of before the last step, or half of them, where the disk was still writing."""
    assert run_ranks(2, exact_weights_on_a_slow_disk, str(tmp_path)) == [[], []]


def destroyed_in_a_block(stage: int, modifier: int | None, edits: bool, anew: bool) -> list[Any]:
    """What is said of a block in which rank 1 may edit before destroy(); weights that changed; one of the next engine."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage), topology=shared_topology())
    model, told = engine.module, ""
    stepped(engine, 5)
    before = engine.state_dict()
    try:
        with GatheredParameters(list(model.parameters()), modifier):
            if edits and dist.get_rank() == 1:
                model.head.weight.data.fill_(0.25)
            engine.destroy()
            differing = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
            if anew:
                engine = zerorun.initialize(model, make_config(stage), topology=shared_topology())
                stepped(engine, 6)
    except ReleasedParameterError as error:
        told = str(error)
    if not anew:
        differing += [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
        engine = zerorun.initialize(model, make_config(stage), topology=shared_topology())
        stepped(engine, 6)
    stepped(engine, 7)
    found = engine.state_dict()["head.weight"].clone()
    engine.destroy()
    return [told, differing, found]


@pytest.mark.each_value
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize(("modifier", "edits"), [(None, False), (1, False), (1, True)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_destroy_in_a_block_gives_the_weights_back(stage: int, modifier: int | None, edits: bool, anew: bool) -> None:
    """The block's end took the parameters for the engine's still, and gave them what stands for released ones: NaN."""
    answers = run_ranks(2, destroyed_in_a_block, stage, modifier, edits, anew)
    assert torch.equal(answers[0][2], answers[1][2])
    assert bool(answers[0][2].isfinite().all())
    for told, differing, _ in answers:
        assert not differing
        assert bool(told) is edits
        if edits:
            assert "leave the block before" in told and "destroy()" in told
    if edits:
        assert "head.weight" in answers[1][0]


@pytest.mark.parametrize("modifier", [None, 0])
@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_is_not_made_in_a_block_with_its_parameters(stage: int, modifier: int | None) -> None:
    for told, kept in run_ranks(2, made_in_a_block, stage, modifier):
        assert "'0.weight'" in told and "leave the block before" in told
        assert kept == (0.25 if modifier == 0 else 1.0)


def made_in_a_block(stage: int, modifier: int | None) -> tuple[str, float]:
    """The error of initialize() in a block of a model made in ``Init``, and a weight of the engine made after it."""
    with Init():
        model = nn.Sequential(nn.Linear(4, 4))
        nn.init.ones_(model[0].weight)
    with GatheredParameters(list(model.parameters()), modifier):
        with pytest.raises(ModelError) as found:
            zerorun.initialize(model, make_config(stage), topology=shared_topology())
        if modifier is not None:
            model[0].weight.data.fill_(0.25 + dist.get_rank())
    engine = zerorun.initialize(model, make_config(stage), topology=shared_topology())
    weight = engine.state_dict()["0.weight"]
    engine.destroy()
    assert len(set(weight.flatten().tolist())) == 1
    return str(found.value), weight[0, 0].item()


def blocks_in_blocks(stage: int, outer: int | None, inner: int | None, kind: Callable[..., Any]) -> tuple[str, list[Any]]:
    """The error of a block with ``inner`` in one with ``outer``, where each rank would edit; a weight after it, by rank."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage), topology=shared_topology())
    if kind is GatheredBlock:
        show_placeholders(engine)
    weight, bias, told = engine.module.head.weight, engine.module.blocks[0].down.bias, ""
    try:
        with torch.no_grad(), kind([weight], outer):
            with kind([bias], 1):  # which the outer block has not
                bias.fill_(dist.get_rank() + 3.0)
            with kind([weight, bias], inner):
                weight.fill_(dist.get_rank() + 3.0)
    except ModelError as error:
        told = str(error)
    found = engine.state_dict()
    stepped(engine, 0)
    engine.destroy()
    assert bool((found["blocks.0.down.bias"] == 4.0).all())
    return told, [found["head.weight"].min().item(), found["head.weight"].max().item()]


@pytest.mark.each_pair
@pytest.mark.parametrize("kind", [GatheredParameters, GatheredBlock])
@pytest.mark.parametrize(("outer", "inner"), [(0, 1), (None, 1), (1, 1), (1, None)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_block_in_a_block_keeps_its_edits_or_is_refused(
    stage: int, outer: int | None, inner: int | None, kind: Any
) -> None:
    """The outer one has the value, and stores that of its own rank, or none."""
    answers = run_ranks(2, blocks_in_blocks, stage, outer, inner, kind)
    if kind is GatheredBlock and stage < 3 and outer is None:  # where each rank's edits stay as they are, as in DeepSpeed
        assert [told for told, _ in answers] == ["", ""]
        assert [values for _, values in answers] == [[3.0, 3.0], [4.0, 4.0]]
        return
    for told, values in answers:
        if outer == 1:
            assert (told, values) == ("", [4.0, 4.0])
        else:
            assert "'head.weight'" in told and "modifier_rank = 1" in told and "leave the outer block" in told
            assert "down.bias" not in told
            assert -1.0 < values[0] < values[1] < 1.0


def blocks_in_blocks_before_the_engine(outer: int | None) -> str:
    with Init():
        layer = nn.Linear(4, 4)
    with pytest.raises(ModelError) as found, GatheredParameters(layer.weight, outer):
        before = layer.weight.detach().clone()
        with GatheredParameters(layer.parameters(), 1):
            layer.weight.data.add_(1.0)
    with GatheredParameters(layer.parameters(), 1):
        assert torch.equal(layer.weight, before)
    return str(found.value)


@pytest.mark.parametrize("outer", [None, 0])
def test_a_block_in_a_block_before_the_engine_is_refused(outer: int | None) -> None:
    for told in run_ranks(2, blocks_in_blocks_before_the_engine, outer):
        assert "of shape (4, 4)" in told and "leave the outer block" in told


def merged_and_unmerged(stage: int, precision: str) -> tuple[bool, bool]:
    """Whether a rounding that is left in a block of the mode is dropped, in place and not; and whether training goes on."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage, precision=precision), topology=shared_topology())
    show_placeholders(engine)
    params = list(engine.module.parameters())
    before = engine.state_dict()
    with torch.no_grad(), GatheredBlock([*params, None]):
        for number, param in enumerate(params):
            param.data = param.data + 1.0 if number % 2 else param.data.add_(1.0)
    after = engine.state_dict()
    engine.backward(token_loss(engine, tokens(Place(dist.get_rank(), 0))))
    engine.step()
    dropped = all(torch.equal(before[name], value) for name, value in after.items())
    kept = all(torch.equal(before[name] + 1.0, value) for name, value in after.items() if name in before)
    engine.destroy()
    return dropped, kept


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_in_the_mode_changes_without_modifier_rank_are_no_error(world: int, stage: int, precision: str) -> None:
    """As in DeepSpeed: at stage 3 the shards' values come back, on one rank too; below, nothing is done to them."""
    assert run_ranks(world, merged_and_unmerged, stage, precision) == [(stage == 3, stage < 3)] * world


def trained_from(stage: int, precision: str, loaded: bool) -> dict[str, torch.Tensor]:
    """The weights after a step from the same ones, which the model had from the start, or which were ``loaded``."""
    torch.manual_seed(1)
    model, other = Gpt().bfloat16().float(), Gpt()  # values that weights have in both precisions
    wanted = model.state_dict()
    model = other if loaded else model
    config = make_config(stage, precision=precision)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu" if stage == 2 else "none"}
    engine = zerorun.initialize(model, config, topology=shared_topology())
    show_placeholders(engine)
    if loaded:
        before = engine.state_dict()
        load_module_state_dict(engine, module_state_dict(engine))  # at stage 3 placeholders, and nothing changes
        assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
        first, second = (dict(list(wanted.items())[half::2]) for half in (0, 1))
        with pytest.raises(RuntimeError, match="Missing key"):
            load_module_state_dict(engine, {"module": {}})
        load_module_state_dict(engine, {"module": first}, allowed_missing_keys=second)
        with pytest.raises(CheckpointError, match="only one of the model and the dict"):
            load_module_state_dict(engine, second, allowed_missing_keys=[])
        load_module_state_dict(engine, second, strict=False)
    engine.backward(token_loss(engine, tokens(Place(dist.get_rank(), 0))))
    engine.step()
    weights = engine.state_dict()
    engine.destroy()
    return weights


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_mode_loads_weights_into_an_engine(stage: int, precision: str) -> None:
    """As if the model had had them from the start: also masters, and at stage 3 the shards."""
    expected = run_ranks(2, trained_from, stage, precision, False)
    found = run_ranks(2, trained_from, stage, precision, True)
    for rank in (0, 1):
        assert all(torch.equal(expected[0][name], value) for name, value in found[rank].items())


def saved_after_a_cast(folder: str) -> tuple[list[str], str, bool]:
    """Kinds of a state dict before initialize(), what saving a layer says, and whether a block has its values."""
    with zerorun.zero.Init():
        model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8))
    model[0].to(torch.float32)
    kinds = [type(value).__name__ for value in model.state_dict().values()]
    with pytest.raises(ReleasedParameterError) as caught:
        torch.save(model[0].state_dict(), f"{folder}/x")
    with zerorun.zero.GatheredParameters(list(model.parameters())):
        whole = not any(bool(value.isnan().any()) for value in model.state_dict().values())
    return kinds, str(caught.value), whole


def test_a_cast_after_init_makes_no_weights_of_placeholders(tmp_path: Path) -> None:
    """As axolotl casts norms and embeddings: a file of NaN was written without a word."""
    for kinds, said, whole in run_ranks(2, saved_after_a_cast, str(tmp_path)):
        assert kinds == ["UnsavedPlaceholder"] * 4 and "Remedy" in said and whole


AFTER_INIT: dict[str, Callable[[nn.Module], Any]] = {
    "scaled": lambda model: [setattr(param, "data", param.data * 2) for param in model.parameters()],
    "from a vector": lambda model: vector_to_parameters(2 * parameters_to_vector(model.parameters()), model.parameters()),
    "cast": lambda model: [setattr(param, "data", param.data.double()) for param in model.parameters()],
    "laid out": lambda model: model.to(memory_format=torch.channels_last),
}


def changed_after_init() -> dict[str, tuple[bool, str]]:
    """For each of AFTER_INIT: whether the values are those of Init, and the error."""
    found = {}
    for name, change in AFTER_INIT.items():
        torch.manual_seed(0)
        with zerorun.zero.Init():
            model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 2))
        torch.manual_seed(0)
        expected = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 2)).state_dict()
        change(model)
        try:
            engine = zerorun.initialize(model, make_config(3), topology=shared_topology())
        except ModelError as error:
            found[name] = False, str(error)
            continue
        same = all(torch.equal(value.float(), expected[key]) for key, value in engine.state_dict().items())
        found[name] = same, ""
        engine.destroy()
    return found


def test_what_is_computed_from_placeholders_is_not_taken_for_a_cast() -> None:
    """Both are nothing but NaN: ``param.data = param.data * 2`` had no effect, without a word."""
    for found in run_ranks(2, changed_after_init):
        assert found["cast"] == found["laid out"] == (True, "")
        for name in ("scaled", "from a vector"):
            assert "'0.weight' was changed after its zerorun.zero.Init block" in found[name][1]


def loaded_after_init() -> tuple[str, bool, bool]:
    """What load_state_dict() says of placeholders, and whether it loads where the values are, and without copying."""
    values = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    with zerorun.zero.Init():
        gathered, assigned = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    with pytest.raises(ReleasedParameterError) as caught:
        gathered.load_state_dict(values)
    with zerorun.zero.GatheredParameters(list(gathered.parameters()), modifier_rank=0):
        gathered.load_state_dict(values)
    assigned.load_state_dict(values, assign=True)
    loaded = []
    for model in (gathered, assigned):
        engine = zerorun.initialize(model, make_config(3), topology=shared_topology())
        loaded.append(all(torch.equal(value, values[name]) for name, value in engine.state_dict().items()))
        engine.destroy()
    return str(caught.value), *loaded


def test_placeholders_say_how_a_state_dict_is_loaded() -> None:
    """torch would speak of elements that refer to a single memory location, once for each parameter, and advise clone()."""
    for said, gathered, assigned in run_ranks(2, loaded_after_init):
        assert (
            said.startswith("parameter '0.weight' cannot be loaded: since its zerorun.zero.Init block") and "Remedy" in said
        )
        assert gathered and assigned


def after_a_refused_load() -> list[list[str]]:
    """The names of weights that a dict with one wrong name, or a value in a wrong shape, has changed."""
    engine = make_engine(CASES["plain"], make_config(3))
    show_placeholders(engine)
    before, found = engine.state_dict(), []
    last = list(before)[-1]
    for wrong in ({"nonsense": torch.ones(1)}, {last: torch.ones(3, 3, 3)}):
        with pytest.raises(RuntimeError):
            load_module_state_dict(engine, {**{name: value + 1 for name, value in before.items()}, **wrong})
        found.append([name for name, value in engine.state_dict().items() if not torch.equal(value, before[name])])
    engine.destroy()
    return found


def test_a_load_that_is_refused_in_the_mode_changes_nothing_at_stage_3() -> None:
    """What each rank has whole got the new values, and the rest kept theirs."""
    assert run_ranks(2, after_a_refused_load) == [[[], []]] * 2


def loaded_quantised(kind: str, stage: int) -> None:
    """Loads weights, placeholders and names of another model into quantised layers. They are frozen."""
    wanted, config = quantised_model(kind, seed=1).state_dict(), make_config(stage)
    engine = zerorun.initialize(quantised_model(kind), config, topology=shared_topology())
    show_placeholders(engine)
    before, shown = engine.state_dict(), module_state_dict(engine)
    load_module_state_dict(engine, shown)
    placeholders = [name for name, value in shown.items() if isinstance(value, UnsavedPlaceholder)]
    assert any("base" in name for name in placeholders) == (stage == 3)  # those of quantised layers, too
    for stranger in (shown[name] for name in placeholders[:1]):
        load_module_state_dict(engine, {"elsewhere": stranger}, strict=False)
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"elsewhere"'):
            load_module_state_dict(engine, {**shown, "elsewhere": stranger})
        with pytest.raises(CheckpointError, match="elsewhere: only one of the model and the dict"):
            load_module_state_dict(engine, {**shown, "elsewhere": stranger}, allowed_missing_keys=[])
        name, other = placeholders[0], torch.empty(3).as_subclass(UnsavedPlaceholder)
        with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
            load_module_state_dict(engine, {**shown, name: other})
    assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
    load_module_state_dict(engine, wanted)
    assert all(torch.equal(wanted[name], value) for name, value in engine.state_dict().items())
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["buffers", "integers"])
def test_the_mode_loads_quantised_weights_into_an_engine(kind: str, stage: int) -> None:
    """Those in buffers are divided as parameters are; a KeyError came of their placeholders."""
    run_ranks(2, loaded_quantised, kind, stage)


def buffers_outside_a_block() -> None:
    engine = zerorun.initialize(quantised_model("buffers"), make_config(3), topology=shared_topology())
    name = next(name for name, _ in engine.module.named_buffers() if name.endswith("qweight"))
    with pytest.raises(ReleasedParameterError, match=f"has a value for '{name}'"):
        engine.module.load_state_dict({name: torch.zeros(1)}, strict=False)
    engine.destroy()


def test_a_load_into_placeholders_of_buffers_is_refused() -> None:
    """Before anything is loaded; torch's own error spoke of memory locations."""
    run_ranks(2, buffers_outside_a_block)


def trained_on_tensor_ranks(model: str, stage: int, loaded: bool) -> dict[str, torch.Tensor]:
    """The weights after a step from the same ones, which the model had from the start, or which were ``loaded``."""
    module = build_divided(model).bfloat16().float()  # values that weights have in both precisions
    other = reset(copy.deepcopy(module), seed=7).bfloat16().float()  # masters keep digits where a weight stays the same
    wanted = {name: value.clone() for name, value in module.state_dict().items()}
    config = make_config(stage, precision="bf16", tensor_parallel={"size": 2})
    engine = zerorun.initialize(other if loaded else module, config)
    show_placeholders(engine)
    if loaded:
        before, divided = engine.state_dict(), engine.sharded_model.parts.shards
        name = next(name for name, param in engine.module.named_parameters() if id(param) in divided)
        part = dict(engine.module.named_parameters())[name]
        for wrong in (torch.zeros(part.shape), torch.zeros(3)):  # what this rank has, and of another model
            with pytest.raises(CheckpointError, match=f"the value for '{re.escape(name)}' is .*Nothing was loaded"):
                load_module_state_dict(engine, {"module": {name: wrong}}, strict=False)
        with pytest.raises(CheckpointError, match="elsewhere: only one of the model and the dict"):
            load_module_state_dict(engine, {**wanted, "elsewhere": wanted[name]}, allowed_missing_keys=[])
        assert all(torch.equal(before[name], value) for name, value in engine.state_dict().items())
        load_module_state_dict(engine, {"module": wanted})
    engine.backward(engine(**batch_of(0, 0, 0)).loss)
    engine.step()
    weights = engine.state_dict()
    engine.destroy()
    return weights


@pytest.mark.each_value
@pytest.mark.parametrize("model", ("llama", "gpt2"))
@pytest.mark.parametrize("stage", (1, 3))
def test_the_mode_loads_whole_weights_where_tensor_ranks_divide_them(model: str, stage: int) -> None:
    """Each rank takes its part, and only of what is whole."""
    expected = run_ranks(4, trained_on_tensor_ranks, model, stage, False)
    found = run_ranks(4, trained_on_tensor_ranks, model, stage, True)
    for rank in range(4):
        assert all(torch.equal(expected[0][name], value) for name, value in found[rank].items())


def edited_before_the_engine() -> list[bool]:
    with Init():
        layer = nn.Linear(4, 4)
    with GatheredBlock(layer.parameters()):
        before = layer.weight.detach().clone()
        layer.weight.data.add_(1.0)
    with GatheredParameters(layer.weight):
        return [torch.equal(layer.weight, before)]


def given_by_one(stage: int) -> tuple[list[str], bool]:
    """What the mode says of a dict that rank 0 alone has, or has otherwise, and whether nothing is loaded."""
    engine = make_engine(CASES["plain"], make_config(stage))
    before, said = engine.state_dict(), []
    new = {name: value + 1 for name, value in before.items()}
    for other in (None, {}, {name: value[:1] for name, value in new.items()}):
        with pytest.raises(CheckpointError) as caught:
            load_module_state_dict(engine, new if dist.get_rank() == 0 else other, strict=False)  # type: ignore[arg-type]
        said.append(str(caught.value))
    after = engine.state_dict()
    return said, all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("stage", (0, 2, 3))
def test_in_the_mode_all_ranks_load_one_dict(stage: int) -> None:
    for said, unchanged in run_ranks(2, given_by_one, stage):
        assert unchanged and all("rank 1 gives no dict, or another one than rank 0. Nothing was loaded" in s for s in said)


def test_in_the_mode_changes_before_the_engine_are_dropped() -> None:
    assert run_ranks(2, edited_before_the_engine) == [[True]] * 2


def write_to_parameters(stage: int, late: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Halve all weights after every step, and a master's copy, as loops may. ``late``: rank 1 is slow to read rank 0."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage), topology=shared_topology())
    if late and dist.get_rank() == 1:
        read_slowly(engine.comm.dense.shard.memory, 0.005)
    params = list(engine.module.parameters())
    masters = []
    for step in range(2):
        engine.backward(token_loss(engine, tokens(Place(dist.get_rank(), step))))
        engine.step()
        with torch.no_grad():
            for param in params if stage < 3 else ():
                param.mul_(0.5)
        for param in params:
            masters.append(zerorun.zero.safe_get_full_fp32_param(param))
            with GatheredParameters(param, modifier_rank=0):
                if dist.get_rank() == 0:
                    param.data.mul_(2.0)
    weights = list(engine.state_dict().values())
    engine.destroy()
    return masters, weights  # type: ignore[return-value]


@pytest.mark.parametrize("stage", by_day((1, 2, 3), 3))
def test_scripts_may_write_while_others_are_late(stage: int) -> None:
    """A rank that is done with a gather must not change what a slower one has still to read."""
    expected = run_ranks(2, write_to_parameters, stage, False)
    found = run_ranks(2, write_to_parameters, stage, True)
    for rank in (0, 1):
        for kind in (0, 1):
            pairs = zip(found[rank][kind], expected[0][kind], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), ("masters", "weights")[kind]


def inspect(stage: int, precision: str) -> dict[str, list[float]]:
    torch.manual_seed(0)
    model = Gpt()
    engine = zerorun.initialize(model, make_config(stage, precision=precision), topology=shared_topology())
    names = [name for name, _ in engine.module.named_parameters()]
    params = dict(engine.module.named_parameters())
    shapes = {name: value.shape for name, value in engine.state_dict().items()}
    found: dict[str, list[float]] = {}
    for step in range(2):
        engine.backward(token_loss(engine, tokens(Place(dist.get_rank(), step))))
        for name in names:
            gradient = zerorun.zero.safe_get_full_grad(params[name])
            assert gradient is not None
            assert gradient.shape == shapes[name]
            found[f"{name} gradient {step}"] = gradient.flatten().tolist()[:5]
        engine.step()
        assert zerorun.zero.safe_get_full_grad(params[names[0]]) is None
        for name in names:
            moment = zerorun.zero.safe_get_full_optimizer_state(params[name], "exp_avg")
            assert moment is not None
            found[f"{name} moment {step}"] = moment.flatten().tolist()[:5]
    moment = torch.ones_like(moment)
    zerorun.zero.safe_set_full_optimizer_state(params[name], moment, "exp_avg")
    assert torch.equal(zerorun.zero.safe_get_full_optimizer_state(params[name], "exp_avg"), moment)  # type: ignore[arg-type]
    zerorun.zero.safe_set_full_fp32_param(params[name], moment)
    assert torch.equal(engine.state_dict()[name].float(), moment)
    assert zerorun.zero.safe_get_full_grad(torch.ones(2)) is None
    engine.destroy()
    return found


@pytest.mark.parametrize(("precision", "world"), by_day((("fp32", 3), ("bf16", 2)), ("fp32", 3)))
def test_gradients_and_moments_by_name_are_the_same_at_every_stage(precision: str, world: int) -> None:
    first = run_ranks(world, inspect, 0, precision)
    assert all(found == first[0] for found in first)
    for stage in (2, 3):
        assert run_ranks(world, inspect, stage, precision) == first


class SomeStates(nn.Module):
    """A matrix and two vectors, a vector that is not used, and a frozen one, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.unused = nn.LayerNorm(8), nn.Linear(8, 8, bias=False), nn.Parameter(torch.zeros(8))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(values))


class RowsOfStates(torch.optim.Optimizer):
    """It keeps a state for matrices alone, in another shape."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            if param.dim() > 1:
                self.state[param]["rows"] = param.grad.norm(dim=-1)
            param.sub_(param.grad / (1 + param.grad.norm()))


def answer(act: Callable[[], Any]) -> str:
    """What came of a call, the same on all ranks."""
    try:
        found = act()
        text = "None" if found is None else str(bool((found != 0).any()))
    except ZerorunError as error:
        text = f"{type(error).__name__} {error}"
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, text)
    assert len({answer.split(" parameter")[0] for answer in said}) == 1, said  # one of them may know the shape as well
    return text


def states_it_lacks(stage: int, kind: str) -> tuple[dict[tuple[str, str], tuple[str, str]], int]:
    """What comes of asking for a state, and then of setting it, by key and parameter; of how many this rank has nothing."""
    torch.manual_seed(0)
    model, config, given = SomeStates(), make_config(stage), {}
    config["optimizer"] = {"type": kind, "params": {"lr": 0.01}}
    if kind == "own":
        del config["optimizer"]
        given["optimizer"] = RowsOfStates(model.parameters())
    elif kind == "Muon":
        vectors = [param for param in model.parameters() if param.dim() == 1]
        groups = [{"params": [model.linear.weight], "use_muon": True}, {"params": vectors, "use_muon": False}]
        given["model_parameters"] = groups
    engine = zerorun.initialize(model, config, **given)
    zero, found, nothing = zerorun.zero, {}, 0
    engine.backward(engine(torch.linspace(-1, 2, 16).view(2, 8).cos()).square().sum())
    engine.step()
    whole = {name: value.shape for name, value in engine.state_dict().items()}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "momentum_buffer", "rows") if param.requires_grad else ():
            got = answer(partial(zero.safe_get_full_optimizer_state, param, key))
            size = zero.safe_get_local_fp32_param(param).numel()
            nothing += not size
            if not got.startswith("ModelError"):
                local = zero.safe_get_local_optimizer_state(param, key)
                assert (local is not None) == (got != "None") if size else local is None or not local.numel(), (name, key)
            value = torch.full(whole[name], 3.0)
            found[key, name] = got, answer(partial(zero.safe_set_full_optimizer_state, param, value, key))
            if got == "True":
                assert torch.equal(zero.safe_get_full_optimizer_state(param, key), value)
    frozen = engine.module.frozen
    with pytest.raises(ModelError, match="'frozen' is frozen"):
        zero.safe_set_full_optimizer_state(frozen, torch.zeros(8), "exp_avg")
    assert zero.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    engine.destroy()
    return found, nothing


@pytest.mark.parametrize(
    ("world", "stage", "kind"), [(2, 3, "Muon"), (2, 1, "own"), (2, 2, "AdamW"), (2, 0, "Muon"), (1, 2, "own")]
)
def test_states_that_a_parameter_lacks_are_not_made_up(world: int, stage: int, kind: str) -> None:
    """Others of its flat group may have them. All ranks are told the same, those that have nothing of it as well."""
    vectors, matrices = {"norm.weight", "norm.bias"}, {"linear.weight"}
    muon = {"exp_avg": vectors, "momentum_buffer": matrices}
    has: dict[str, dict[str, set[str]]] = {"AdamW": {"exp_avg": vectors | matrices}, "Muon": muon, "own": {}}
    results = run_ranks(world, states_it_lacks, stage, kind)
    assert any(nothing for _, nothing in results) == (world > 1 and stage > 0)
    for found, _ in results:
        for (key, name), (got, came) in found.items():
            if name in has[kind].get(key, ()):
                assert (got, came) == ("True", "None")
            elif (kind, key, name) == ("own", "rows", "linear.weight"):
                assert got.startswith(f"ModelError optimizer state 'rows' of '{name}'"), got
                assert came == got
            else:
                assert got == "None", (key, name)
                asked = f"StepError safe_set_full_optimizer_state(...): the optimizer has no state '{key}' of '{name}'"
                assert came.startswith(asked), came
                assert "Remedy: " in came


def cycle(stage: int, times: int) -> tuple[int, bool]:
    """Growth of live tensors over create, train and destroy; whether the module is an ordinary one again."""
    counts = []
    for _ in range(times):
        torch.manual_seed(0)
        model = Gpt()
        engine = zerorun.initialize(model, make_config(stage), topology=shared_topology())
        engine.backward(token_loss(engine, tokens(Place(dist.get_rank()))))
        engine.step()
        engine.destroy()
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        plain = hooks == 0 and all(not p.isnan().any() for p in model.parameters())
        token_loss(model, tokens(Place())).backward()
        del engine, model
        gc.collect()
        counts.append(sum(isinstance(value, torch.Tensor) for value in gc.get_objects()))
    return counts[-1] - counts[1], plain


@pytest.mark.parametrize("stage", by_day((1, 3), 3))
def test_destroy_frees_everything(stage: int) -> None:
    assert run_ranks(2, cycle, stage, 6) == [(0, True)] * 2


def exact_weights(stage: int, sections: dict[str, Any]) -> list[str]:
    """Names of weights that are not their masters, where an engine gives exact ones: while it lives, and when it ends."""
    torch.manual_seed(0)
    model = Gpt()
    frozen, *_, changed = dict(model.named_parameters())
    model.get_parameter(frozen).requires_grad_(False)
    engine = zerorun.initialize(model, make_config(stage, precision="bf16", **sections), topology=shared_topology())
    for step in range(2):
        engine.backward(token_loss(engine, tokens(Place(dist.get_rank(), step))))
        engine.step()
    expected: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        expected[name] = engine.state_dict()[name] if name == frozen else zerorun.zero.safe_get_full_fp32_param(param).cpu()
    assert any((value != value.bfloat16()).any() for value in expected.values())
    if stage < 3:  # one element, which an average of weights has replaced, say; its master does not know
        model.get_parameter(changed).data.view(-1)[0] = 3.0
        expected[changed].view(-1)[0] = 3.0
    every, first = engine.state_dict(exact=True), engine.consolidated_state_dict(exact=True)
    assert (first is not None) == (dist.get_rank() == 0)
    engine.destroy(exact=True)
    states = [every, model.state_dict()] + ([first] if first is not None else [])

    def differs(name: str, value: torch.Tensor) -> bool:
        return any(state[name].dtype != value.dtype or not torch.equal(state[name].cpu(), value) for state in states)

    return [name for name, value in expected.items() if differs(name, value)]


OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
REMAINDERS = {"bf16": {"store_param_remainders": True}}


@pytest.mark.parametrize(
    ("world", "stage", "sections"), [(1, 0, {}), (2, 0, {}), (2, 1, {}), (3, 3, {}), (2, 2, OFFLOADED)]
)
def test_exact_weights_are_those_of_masters(world: int, stage: int, sections: dict[str, Any]) -> None:
    """Weights in bf16 have a part of the digits alone; where a script has changed a weight, it counts."""
    assert run_ranks(world, exact_weights, stage, sections) == [[]] * world


def average_after_steps(stage: int, precision: str) -> list[bool]:
    """A loop that reads parameters right after step(), as moving averages do, sees the values of that step."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(), make_config(stage, precision=precision), topology=shared_topology())
    found = []
    for step in range(3):
        engine.backward(token_loss(engine, tokens(Place(dist.get_rank(), step))))
        engine.step()
        seen = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        full = engine.state_dict()
        found.append(all(torch.equal(value, full[name]) for name, value in seen.items()))
    engine.destroy()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 1), (3, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_parameters_are_readable_right_after_a_step(precision: str, world: int, stage: int) -> None:
    assert run_ranks(world, average_after_steps, stage, precision) == [[True] * 3] * world


def test_alignment_is_one_cache_line() -> None:
    assert ALIGNMENT * torch.float32.itemsize == 64


def edit_before_the_engine(modifier: int | None) -> Any:
    with zerorun.zero.Init():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def edit() -> None:
        with zerorun.zero.GatheredParameters(model[1].parameters(), modifier_rank=modifier):
            if dist.get_rank() == 1:
                nn.init.constant_(model[1].weight, 0.5)
                model[1].bias.data = torch.arange(8.0)

    def shown() -> bool:
        with zerorun.zero.GatheredParameters(list(model.parameters())):
            return not any(param.isnan().any() for param in model.parameters())

    problem = ""
    try:
        edit()
    except zerorun.errors.ReleasedParameterError as error:
        problem = str(error)
    whole, released = shown(), bool(model[1].weight.isnan().all())
    engine = zerorun.initialize(model, make_config(3))
    found = engine.state_dict()
    engine.destroy()
    return problem, whole and released, found


@pytest.mark.parametrize("world", (2, 3))
def test_parameters_are_edited_between_init_and_initialize(world: int) -> None:
    """As scripts for DeepSpeed do it: outside the block that makes the model."""
    answers = run_ranks(world, edit_before_the_engine, 1)
    for problem, fine, found in answers:
        assert (problem, fine) == ("", True)
        assert torch.equal(found["1.weight"], torch.full((8, 8), 0.5))
        assert torch.equal(found["1.bias"], torch.arange(8.0))
    assert torch.equal(answers[0][2]["0.weight"], answers[1][2]["0.weight"])
    problems = [problem for problem, _, _ in run_ranks(world, edit_before_the_engine, None)]
    assert "of shape (8, 8)" in problems[1]
    assert "modifier_rank" in problems[1]


def saved_before_the_engine(how: str) -> tuple[str, list[Any], bool]:
    """(the error of saving, what a state dict shows of the weights, whether it is right where they are whole)."""
    torch.manual_seed(0)
    with torch.random.fork_rng():
        expected = Block().state_dict()
    if how == "existing":
        model = Block()
        Init(model)
    else:
        with Init():
            model = Block()
            inside = model.state_dict()
        assert all(torch.equal(inside[name], value) for name, value in expected.items())
    state = model.state_dict()
    shown = [(name, tuple(value.shape), value.dtype) for name, value in state.items()]
    problem = ""
    try:
        torch.save(state, io.BytesIO())
    except zerorun.errors.ReleasedParameterError as error:
        problem = str(error)
    with GatheredParameters(model.parameters()):
        right = all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    engine = zerorun.initialize(model, make_config(3))
    right = right and all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())
    engine.destroy()
    torch.save(model.state_dict(), io.BytesIO())
    return problem, shown, right


@pytest.mark.parametrize("how", ("block", "existing"))
def test_a_state_dict_before_the_engine_is_not_saved_as_placeholders(how: str) -> None:
    """A file would hold NaN in place of the weights that from_pretrained() has just read."""
    for problem, shown, right in run_ranks(2, saved_before_the_engine, how):
        assert "GatheredParameters(module.parameters())" in problem
        assert shown == [(name, tuple(value.shape), value.dtype) for name, value in Block().state_dict().items()]
        assert right


def trained_from_a_copy() -> str:
    with Init():
        model = Block()
    try:
        zerorun.initialize(copy.deepcopy(model), make_config(3)).destroy()
    except ModelError as error:
        return str(error)
    return ""


def test_a_copy_of_placeholders_is_refused() -> None:
    """As of a reference model, which is copied before the engine is made."""
    assert all("are NaN, as those of a copy" in problem for problem in run_ranks(2, trained_from_a_copy))


def made_in_bf16() -> list[Any]:
    with Init(dtype=torch.bfloat16, remote_device="cpu", mpu=None, config_dict_or_path={}):
        inside = nn.Linear(4, 4)
    found = [inside.weight.dtype, nn.Linear(2, 2).weight.dtype]
    try:
        with Init(dtype=torch.bfloat16):
            raise KeyError
    except KeyError:
        found.append(torch.get_default_dtype())
    with GatheredParameters(inside.weight, None, inside, True):
        found.append(tuple(inside.weight.shape))
    return found


def test_init_makes_parameters_of_the_dtype_it_is_told() -> None:
    """And outside the block all is as before, also if it ended with an error."""
    assert run_ranks(2, made_in_bf16) == [[torch.bfloat16, torch.float32, torch.float32, (4, 4)]] * 2
