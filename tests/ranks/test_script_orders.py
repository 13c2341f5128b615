"""What a script passes may come out of a set: no order of it reaches the wire, and different contents are a named error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_bad_input import attempt
from test_foreign_values import Layers, build, data, step
from torch import nn
from training import make_config

import zerorun
from zerorun.zero import GatheredParameters, Init

EQUAL, UNEQUAL = [(4, 4)] * 4, [(4, 4), (3,), (5, 2), (7, 7)]


def in_own_order(items: list[Any]) -> list[Any]:
    """As out of a set: in another order on each rank, and one twice."""
    turned = items[dist.get_rank() :] + items[: dist.get_rank()]
    return [*(reversed(turned) if dist.get_rank() % 2 else turned), items[0]]


def numbered(shapes: list[tuple[int, ...]]) -> nn.ParameterList:
    """Partitioned parameters, the i-th of which is full of -i."""
    with Init():
        return nn.ParameterList(nn.Parameter(torch.full(shape, -float(index))) for index, shape in enumerate(shapes))


def values(params: list[nn.Parameter]) -> list[list[float]]:
    """The different elements of each, as this rank sees them."""
    with GatheredParameters(in_own_order(params)):
        return [param.unique().tolist() for param in params]


def fill_in_own_order(params: list[nn.Parameter], modifier: int = 0) -> list[list[float]]:
    before = values(params)
    with GatheredParameters(in_own_order(params), modifier_rank=modifier):
        if dist.get_rank() == modifier:
            for index, param in enumerate(params):
                nn.init.constant_(param, float(index))
    return before + values(params)


def before_the_engine(shapes: list[tuple[int, ...]], modifier: int) -> list[list[float]]:
    return fill_in_own_order(list(numbered(shapes)), modifier)


@pytest.mark.parametrize("shapes", (EQUAL, UNEQUAL))
@pytest.mark.parametrize(("world", "modifier"), [(2, 0), (3, 2)])
def test_parameters_of_init_are_gathered_in_any_order(world: int, modifier: int, shapes: list[tuple[int, ...]]) -> None:
    wanted = [[-float(i)] for i in range(4)] + [[float(i)] for i in range(4)]
    assert run_ranks(world, before_the_engine, shapes, modifier) == [wanted] * world


def with_the_engine(stage: int, parallel: dict[str, Any]) -> list[list[float]]:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    engine = zerorun.initialize(model, make_config(stage, **parallel))
    found = fill_in_own_order(list(model.parameters()), 1)[4:]
    engine.destroy()
    return found


TENSOR = {"tensor_parallel": {"size": 2, "plan": {"0": "colwise", "1": "rowwise"}}}


@pytest.mark.parametrize(("stage", "parallel"), [(0, {}), (2, {}), (3, {}), (3, TENSOR)])
def test_an_engines_parameters_are_gathered_in_any_order(stage: int, parallel: dict[str, Any]) -> None:
    assert run_ranks(2, with_the_engine, stage, parallel) == [[[float(index)] for index in range(4)]] * 2


def own_parameter(params: list[nn.Parameter]) -> nn.Parameter:
    return params[dist.get_rank()]


def of_init() -> tuple[str, str]:
    params = list(numbered(EQUAL))
    answer = attempt(lambda: GatheredParameters([own_parameter(params), params[3]]).__enter__())
    return answer if values(params) == [[-float(i)] for i in range(4)] else ("wrong", "")


def asked_of_engine(ask: Callable[[nn.Parameter], Any], stage: int) -> tuple[str, str]:
    engine = zerorun.initialize(build(), make_config(stage))
    step(engine)
    engine.backward(engine(data()))
    answer = attempt(lambda: ask(own_parameter([block.weight for block in engine.module.blocks])))
    engine.zero_grad()
    engine.destroy()
    return answer


def gather(param: nn.Parameter) -> None:
    with GatheredParameters(param):
        pass


def edit(param: nn.Parameter) -> None:
    with GatheredParameters(param, modifier_rank=0):
        pass


def moment(param: nn.Parameter) -> None:
    zerorun.zero.safe_get_full_optimizer_state(param, "exp_avg")


def another_function(param: nn.Parameter) -> None:
    if dist.get_rank():
        zerorun.zero.safe_get_full_grad(param)
    else:
        zerorun.zero.gradient_norms(nn.ParameterList([param]))


ASKED: list[tuple[Callable[[nn.Parameter], Any], int]] = [
    (gather, 3),
    (edit, 1),
    (zerorun.zero.safe_get_full_fp32_param, 1),
    (moment, 0),
    (zerorun.zero.safe_get_full_grad, 2),
    (another_function, 3),
]


@pytest.mark.parametrize(("ask", "stage"), ASKED)
def test_different_parameters_are_refused_on_all_ranks(ask: Callable[[nn.Parameter], Any], stage: int) -> None:
    answers = run_ranks(2, asked_of_engine, ask, stage)
    for kind, text in answers:
        assert kind == "OrderError"
        assert "on different ranks: rank 0 has" in text
        assert "blocks.0.weight" in text or ask is another_function
        assert "Remedy" in text


def test_different_parameters_of_init_are_refused_on_all_ranks() -> None:
    for kind, text in run_ranks(2, of_init):
        assert kind == "OrderError"
        assert "different parameters" in text
        assert "partitioned as number" in text


def reshape_on_one_rank(managed: bool) -> tuple[str, str]:
    """Other ranks would wait for values, or get those of another shape."""
    model = build() if managed else numbered(EQUAL)
    engine = zerorun.initialize(model, make_config(3)) if managed else None
    params = list(model.parameters())

    def action() -> None:
        with GatheredParameters(params, modifier_rank=0):
            if dist.get_rank() == 0:
                params[1].data = torch.ones(2)

    answer, shape = attempt(action), params[1].shape
    if engine is not None:
        engine.destroy()
    return answer if shape != (2,) else ("kept", "")


@pytest.mark.parametrize("managed", (False, True))
def test_shapes_that_one_rank_changes_are_refused_on_all(managed: bool) -> None:
    for kind, text in run_ranks(2, reshape_on_one_rank, managed):
        assert kind == ("ModelError" if managed else "OrderError")
        assert "shapes" in text


class Named(nn.Module):
    """Layers and buffers that are made in another order on each rank, and registered in one, or not."""

    def __init__(self, widths: tuple[int, ...], ordered: bool) -> None:
        super().__init__()
        made = {index: nn.Linear(widths[index], 4) for index in in_own_order(list(range(len(widths))))}
        for index in sorted(made) if ordered else made:
            self.add_module(f"layer{index}", made[index])


class Buffered(Layers):
    def __init__(self) -> None:
        super().__init__()
        for index in in_own_order(list(range(4))):
            self.register_buffer(f"table{index}", torch.full((index + 1,), float(index)))


def made_in_own_order(widths: tuple[int, ...]) -> tuple[str, str]:
    def action() -> None:
        with Init():
            model = Named(widths, ordered=True)
        zerorun.initialize(model, make_config(3))

    return attempt(action)


@pytest.mark.parametrize("widths", ((4, 4, 4), (4, 4, 6)))
def test_parameters_made_in_another_order_are_refused(widths: tuple[int, ...]) -> None:
    """Of one shape the values were exchanged already; they must not be trained."""
    for kind, text in run_ranks(2, made_in_own_order, widths):
        assert kind == ("ModelError" if widths == (4, 4, 4) else "OrderError")
        assert "zerorun.zero.Init" in text
        assert "set" in text


class Swapped(nn.Module):
    """Parameters of one shape, which are registered in another order on each rank."""

    def __init__(self) -> None:
        super().__init__()
        for name in in_own_order(["first", "second", "third"])[:-1]:
            self.register_parameter(name, nn.Parameter(torch.zeros(4)))


def registered_in_own_order() -> tuple[str, str]:
    def action() -> None:
        with Init():
            Swapped()

    return attempt(action)


def test_parameters_of_one_shape_are_told_apart_by_their_names() -> None:
    """They were given each other's values, which no rank noticed."""
    for kind, text in run_ranks(2, registered_in_own_order):
        assert kind == "OrderError"
        assert "'second' of a Swapped" in text
        assert "'third' of a Swapped" in text


def loaded_without_some(widths: tuple[int, ...], partly: bool, in_init: bool) -> list[torch.Tensor]:
    """Values of a model as from_pretrained() makes it: on the meta device, then from a file that lacks most of it."""
    torch.manual_seed(5)
    with Init(enabled=in_init):
        with torch.device("meta"):
            model = nn.ModuleList([Layers(), *(nn.Linear(width, 4) for width in widths)])
        first, *others = model
        for name, param in list(first.named_parameters()):
            module, _, attribute = name.rpartition(".")
            setattr(first.get_submodule(module), attribute, nn.Parameter(torch.full(param.shape, 3.0)))
        missing = [(layer, name) for layer in others for name, _ in layer.named_parameters()]
        for layer, name in in_own_order(missing)[:-1]:
            value = torch.empty_like(getattr(layer, name), device="cpu")
            setattr(layer, name, nn.Parameter(value))
        for layer in others[: 1 if partly else None]:
            layer.reset_parameters()
        for layer in others[1:] if partly else ():  # by what shares its memory
            for param in layer.parameters():
                param.data.copy_(torch.rand(param.shape))
    with GatheredParameters(model.parameters()):
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("widths", ((4, 4, 4), (4, 5, 6)))
@pytest.mark.parametrize(("world", "partly"), [(1, False), (2, False), (3, True)])
def test_what_a_file_lacks_is_made_in_any_order(world: int, widths: tuple[int, ...], partly: bool) -> None:
    """Transformers goes through a set of names, and makes an empty parameter for each."""
    expected = run_ranks(1, loaded_without_some, widths, partly, False)[0]
    for found in run_ranks(world, loaded_without_some, widths, partly, True):
        assert all(torch.equal(value, wanted) for value, wanted in zip(found, expected, strict=True))


def grouped() -> tuple[str, str]:
    model = build()
    groups = [{"params": list(block.parameters()), "lr": 0.1 ** (i + 1)} for i, block in enumerate(model.blocks)]
    turned = groups[::-1] if dist.get_rank() else groups
    return attempt(lambda: zerorun.initialize(model, make_config(2), model_parameters=turned))


def test_groups_in_another_order_are_refused() -> None:
    for kind, text in run_ranks(2, grouped):
        assert kind == "ModelError"
        assert "group 2 of the optimizer" in text


def buffers() -> list[float]:
    engine = zerorun.initialize(Buffered(), make_config(1))
    found = [float(engine.module.get_buffer(f"table{index}").mean()) for index in range(4)]
    engine.destroy()
    return found


def test_buffers_in_another_order_keep_their_values() -> None:
    assert run_ranks(2, buffers) == [[0.0, 1.0, 2.0, 3.0]] * 2


def in_a_block_of_init() -> list[list[float]]:
    """There parameters become whole when a function gets them: in our order, too."""
    with Init():
        params = list(nn.ParameterList(nn.Parameter(torch.full(shape, float(i))) for i, shape in enumerate(UNEQUAL)))
        with torch.no_grad():
            torch._foreach_mul_(in_own_order(params)[:-1], 2.0)
    return values(params)


def test_a_function_of_many_parameters_in_init() -> None:
    assert run_ranks(2, in_a_block_of_init) == [[[0.0], [2.0], [4.0], [6.0]]] * 2


def edited_in_a_block_of_init(modifier: int) -> list[list[float]]:
    """By one rank alone, which no other may have to wait for."""
    with Init():
        layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(4))
        params = list(layers.parameters())
        with GatheredParameters(in_own_order(params), modifier_rank=modifier):
            if dist.get_rank() == modifier:
                for index, param in enumerate(params):
                    nn.init.constant_(param, float(index))
        layers.append(nn.Linear(3, 3))
    return values(params)


@pytest.mark.parametrize("modifier", (0, 1))
def test_one_rank_edits_in_a_block_of_init(modifier: int) -> None:
    assert run_ranks(2, edited_in_a_block_of_init, modifier) == [[[0.0], [1.0], [2.0], [3.0]]] * 2


def test_nothing_is_asked_of_others_where_nothing_is_managed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script that runs without a process group."""

    def no_group(*args: Any) -> int:
        raise AssertionError("there is no process group")

    monkeypatch.setattr(dist, "get_world_size", no_group)
    layer = nn.Linear(2, 2)
    with GatheredParameters(layer.parameters(), modifier_rank=0):
        nn.init.ones_(layer.weight)
    assert bool((layer.weight == 1).all())
