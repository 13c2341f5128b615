"""PipelineModule: its stages, run one after the other in one process, are the whole model bit for bit."""

from __future__ import annotations

import copy
import functools
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelining import gathered, run
from torch import Tensor, nn

from zerorun import LayerSpec, PipelineModule, TiedLayerSpec
from zerorun.distributed.device import Clock
from zerorun.errors import PipelineError
from zerorun.pipeline.executor import Executor
from zerorun.pipeline.schedule.schedules import make_schedule

VOCAB, WIDTH, LENGTH = 11, 8, 5


class Embed(nn.Module):
    """Token ids and a mask or None -> a dict: masks, None, numbers and names go on to the next layers."""

    def __init__(self, vocab: int = VOCAB, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)

    def forward(self, value: Any) -> dict[str, Any]:
        ids, mask = value
        return {"hidden": self.words(ids), "mask": mask, "nothing": None, "scale": 0.5, "names": ("a", [1, 2])}


class Mix(nn.Module):
    """A block that reads the mask. The mask may be missing."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        hidden = value["hidden"] + value["scale"] * torch.tanh(self.inner(value["hidden"]))
        if value["mask"] is not None:
            hidden = hidden.masked_fill(value["mask"][..., None], 0.0)
        return {**value, "hidden": hidden}


def relu(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "hidden": F.relu(value["hidden"])}


def only_hidden(value: dict[str, Any]) -> Tensor:
    return value["hidden"]


def logits_of(embed: Embed, hidden: Tensor) -> Tensor:
    return F.linear(hidden, embed.words.weight)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def model_layers() -> list[Any]:
    """7 layers, an embedding that is the head as well, and two layers without parameters."""
    return [
        TiedLayerSpec("embed", Embed, tied_weight_attr="words.weight"),
        LayerSpec(Mix),
        relu,
        LayerSpec(Mix, WIDTH),
        LayerSpec(Mix, width=WIDTH),
        only_hidden,
        TiedLayerSpec("embed", Embed, forward_fn=logits_of, tied_weight_attr=["words.weight"]),
    ]


def batch(seed: int = 0, masked: bool = True) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(VOCAB, (2, 3, LENGTH), generator=generator)
    return (ids, torch.rand(3, LENGTH, generator=generator) < 0.3 if masked else None), labels


def make_stages(stages: int, layers: Callable[[], Sequence[Any]] = model_layers, **options: Any) -> list[PipelineModule]:
    """What each stage's process would build."""
    made = []
    for stage in range(stages):
        torch.manual_seed(3)
        made.append(PipelineModule(layers(), stages, loss_fn=loss_of, stage=stage, **options))
    return made


def assert_like_one_stage(stages: list[PipelineModule], whole: PipelineModule, given: Any) -> None:
    for module in (*stages, whole):
        module.zero_grad()
    expected = run([whole], given)
    assert torch.equal(run(stages, given), expected)
    wanted, found = gathered([whole], lambda param: param.grad), gathered(stages, lambda param: param.grad)
    assert sorted(found) == sorted(wanted) == sorted(whole.parameter_names())
    for name, gradient in wanted.items():
        other = found[name]
        assert (other is None) == (gradient is None), name
        assert gradient is None or other is None or torch.equal(other, gradient), name


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("count", "chunks"), [(1, 1), (2, 1), (3, 1), (4, 1), (7, 1), (2, 2), (3, 2), (1, 3)])
def test_stages_are_the_whole_model_bit_for_bit(count: int, chunks: int, masked: bool) -> None:
    whole = make_stages(1)[0]
    assert_like_one_stage(make_stages(count, chunks=chunks), whole, batch(masked=masked))


def test_the_whole_model_is_its_layers_one_after_the_other() -> None:
    whole = make_stages(1)[0]
    parts = [whole.get_submodule(str(index)) for index in (0, 1, 3, 4)]
    inputs, labels = batch()
    value = parts[2](relu(parts[1](parts[0](inputs))))
    logits = F.linear(only_hidden(parts[3](value)), parts[0].words.weight)  # type: ignore[attr-defined, arg-type]
    assert torch.equal(whole.loss_of(whole(whole.inputs_of((inputs, labels))), (inputs, labels)), loss_of(logits, labels))


def test_a_part_may_have_no_parameters_and_one_may_have_no_layers() -> None:
    whole = make_stages(1)[0]
    for method in ([2, 1, 2, 2], [0, 2, 0, 5], [1, 1, 3, 2], [0, 0, 7, 0], [7, 0, 0, 0]):
        stages = make_stages(4, partition_method=method)
        assert stages[0].partitions()[-1] == 7
        assert_like_one_stage(stages, whole, batch())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_models_cut_anywhere_are_the_whole_model(data: st.DataObject) -> None:
    count, chunks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    kinds = data.draw(st.lists(st.sampled_from(["mix", "relu", "shared"]), min_size=0, max_size=8))
    shared = Mix()
    middle = {"mix": LayerSpec(Mix), "relu": relu, "shared": shared}

    def layers() -> list[Any]:
        everything = model_layers()
        return [everything[0], *(middle[kind] for kind in kinds), *everything[5:]]

    inner = sorted(
        data.draw(st.lists(st.integers(0, len(kinds) + 3), min_size=count * chunks - 1, max_size=count * chunks - 1))
    )
    stages = make_stages(count, layers, chunks=chunks, partition_method=[0, *inner, len(kinds) + 3])
    stages = [copy.deepcopy(stage) for stage in stages]  # as in processes of their own
    whole = make_stages(1, layers)[0]
    for module in (*stages, whole):
        module.zero_grad()
    given = batch(masked=data.draw(st.booleans()))
    expected = run([whole], given)
    assert torch.equal(run(stages, given), expected)
    found = gathered(stages, lambda param: param.grad)
    for name, gradient in gathered([whole], lambda param: param.grad).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"seed_layers": True}, {"seed_layers": True, "seed_fn": torch.manual_seed}])
def test_values_do_not_depend_on_the_stages(options: dict[str, Any]) -> None:
    whole = gathered(make_stages(1, **options), lambda param: param.detach())
    for count, chunks in ((2, 1), (4, 1), (2, 2)):
        stages = make_stages(count, chunks=chunks, **options)
        merged: dict[str, Tensor] = {}
        for stage in stages:
            merged |= stage.state_dict()
        for name, value in whole.items():
            assert value is not None
            assert torch.equal(merged[name], value), name
        assert torch.equal(merged["6.words.weight"], merged["0.words.weight"])


def test_seeded_layers_have_the_values_of_their_seed() -> None:
    module = make_stages(1, seed_layers=True, base_seed=50)[0]
    torch.manual_seed(53)
    assert torch.equal(module.get_parameter("3.inner.weight"), Mix().inner.weight)


def test_building_leaves_the_same_random_numbers_on_every_stage() -> None:
    following = []
    for stage in range(3):
        torch.manual_seed(3)
        PipelineModule(model_layers(), 3, stage=stage)
        following.append(torch.rand(4))
    assert torch.equal(following[0], following[1])
    assert torch.equal(following[0], following[2])


def test_two_models_made_after_one_another_differ() -> None:
    torch.manual_seed(0)
    first, second = (PipelineModule([LayerSpec(Mix)] * 2, 1) for _ in range(2))
    assert not torch.equal(first.get_parameter("0.inner.weight"), second.get_parameter("0.inner.weight"))
    assert not torch.equal(first.get_parameter("0.inner.weight"), first.get_parameter("1.inner.weight"))


def test_only_local_layers_are_built_for_real() -> None:
    real: list[int] = []

    class Watched(nn.Linear):
        def __init__(self, index: int) -> None:
            super().__init__(4, 4)
            if self.weight.device.type != "meta":
                real.append(index)

    PipelineModule([LayerSpec(Watched, index) for index in range(6)], 3, stage=1, partition_method="uniform")
    assert real == [2, 3]


def test_a_layer_that_cannot_be_built_on_meta_is_built_to_be_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.scale = self.weight.abs().max().item()

    with caplog.at_level(logging.DEBUG, "zerorun"):
        module = PipelineModule([LayerSpec(Reads), LayerSpec(Mix)], 2, stage=1)
    assert "layer 0, Reads(), is built for real" in caplog.text
    assert module.parameter_names() == ["0.weight", "0.bias", "1.inner.weight", "1.inner.bias"]


def test_built_modules_keep_their_values_and_their_ties_are_found() -> None:
    shared = nn.Linear(4, 4)
    head = nn.Linear(4, 4, bias=False)
    head.weight = shared.weight
    first = nn.Sequential(nn.Linear(4, 4), nn.Sequential(shared))
    again = nn.ModuleDict({"deep": shared})
    layers = nn.Sequential(first, nn.ReLU(), head, nn.Linear(4, 4), again)
    modules = [PipelineModule(layers, 3, stage=stage, partition_method=[2, 2, 1]) for stage in range(3)]
    for module in modules:
        ties = {tie.name: tie for tie in module.ties()}
        assert sorted(ties) == ["0.1.0.bias", "0.1.0.weight"]
        assert ties["0.1.0.weight"].parts == (0, 1, 2)
        assert ties["0.1.0.weight"].local_names == ("0.1.0.weight", "2.weight", "4.deep.weight")
        assert ties["0.1.0.bias"].parts == (0, 2)
        assert module.parameter_names() == [name for name, _ in layers.named_parameters()]
    assert modules[2].get_parameter("4.deep.weight") is shared.weight


def test_a_tie_inside_one_part_is_no_tie_between_parts() -> None:
    module = PipelineModule(model_layers(), 1)
    assert module.ties() == []
    assert module.get_parameter("6.words.weight") is module.get_parameter("0.words.weight")
    interleaved = PipelineModule(model_layers(), 1, chunks=2)
    assert [tie.parts for tie in interleaved.ties()] == [(0, 1)]


def test_layers_of_one_key_may_be_of_different_classes() -> None:
    def layers() -> list[Any]:
        return [
            TiedLayerSpec("t", nn.Embedding, VOCAB, WIDTH),
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            TiedLayerSpec("t", nn.Linear, WIDTH, VOCAB),  # its bias is its own
        ]

    stages = [PipelineModule(layers(), 3, stage=stage, seed_layers=True) for stage in range(3)]
    assert stages[2].ties()[0].local_names == ("0.weight", "2.weight")
    assert torch.equal(stages[2].get_parameter("2.weight"), stages[0].get_parameter("0.weight"))
    assert sorted(stages[0].parameter_names()) == ["0.weight", "1.bias", "1.weight", "2.bias"]


class EmbedOfMegatron(Embed):
    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.words.weight

    @property
    def doubled(self) -> Tensor:
        return 2 * self.words.weight

    @property
    def width(self) -> int:
        return WIDTH


def test_a_property_that_returns_a_parameter_may_be_tied() -> None:
    """As in GPT-NeoX. It is the tie of the parameter's own path, in values, gradients and names."""

    def made(path: str, count: int) -> list[PipelineModule]:
        layers = model_layers()
        for index in (0, -1):
            layers[index] = TiedLayerSpec(
                "embed", EmbedOfMegatron, tied_weight_attr=path, forward_fn=layers[index].forward_fn
            )
        stages = range(count)
        return [PipelineModule(layers, count, stage=stage, seed_layers=True, loss_fn=loss_of) for stage in stages]

    whole, stages = made("words.weight", 1)[0], made("word_embeddings_weight", 2)
    assert stages[0].ties() == stages[1].ties() == made("words.weight", 2)[0].ties() != []
    assert_like_one_stage(stages, whole, batch())
    for wrong in ("doubled", "width", "words", "words.nothing", "nothing.at.all"):
        with pytest.raises(PipelineError, match=f"no parameter '{wrong}' to tie.*words.weight.*Remedy: name one of these"):
            made(wrong, 1)


class Settings:
    def __repr__(self) -> str:
        return f"Settings({'x' * 4000})"


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        (TiedLayerSpec("k", nn.Linear, 3, 3, device=None, tied_weight_attr="w"), "tied_weight_attr"),
        (LayerSpec(nn.Linear, Settings(), "y" * 4000, bias=[Settings()] * 40), "correct its arguments"),
    ],
)
def test_long_arguments_do_not_hide_what_a_message_says(spec: LayerSpec, remedy: str) -> None:
    spec.module_kwargs.setdefault("bias", Settings())
    with pytest.raises(PipelineError, match=f"Remedy: .*{remedy}") as caught:
        build([spec])
    assert str(caught.value).startswith("layer 0, Linear(") and "Settings(xxx" in str(caught.value)
    assert str(caught.value).index("key 'k'" if "tied" in remedy else "cannot be built") < 600


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_recomputed_layers_give_the_same_gradients_and_keep_less(interval: int) -> None:
    whole = make_stages(1)[0]
    stages = make_stages(2, activation_checkpoint_interval=interval)
    assert_like_one_stage(stages, whole, batch())
    calls = 0

    class Counting(Mix):
        def forward(self, value: dict[str, Any]) -> dict[str, Any]:
            nonlocal calls
            calls += 1
            return super().forward(value)

    def layers() -> list[Any]:
        return [LayerSpec(Embed), LayerSpec(Counting), relu, LayerSpec(Counting), only_hidden]

    module = PipelineModule(layers(), 1, activation_checkpoint_interval=interval)
    module(batch()[0]).sum().backward()
    assert calls == 4
    assert module.activation_checkpoint_interval == interval
    module.set_checkpoint_interval(0)
    module(batch()[0]).sum().backward()
    assert calls == 6 and module.activation_checkpoint_interval == 0
    module.activation_checkpoint_interval = interval
    module(batch()[0]).sum().backward()
    assert calls == 10


def test_the_users_own_function_recomputes_only_what_may_be() -> None:
    ran: list[Any] = []

    def recompute(function: Callable[[Any], Any], value: Any) -> Any:
        ran.append(value)
        return function(value)

    options = {"activation_checkpoint_interval": 1, "activation_checkpoint_func": recompute}
    module = PipelineModule(model_layers(), 1, **options)
    module(batch()[0])
    assert module.activation_checkpoint_func is recompute
    assert len(ran) == 5  # not the two without parameters
    ran.clear()
    PipelineModule(model_layers(), 1, checkpointable_layers=["Mix"], **options)(batch()[0])
    assert len(ran) == 3


def test_a_loss_with_parameters_lies_on_the_last_stage() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, labels: Tensor) -> Tensor:
            return self.scale * (output - labels).square().mean()

    modules = [PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], 2, loss_fn=Scaled(), stage=stage) for stage in (0, 1)]
    assert [name for name, _ in modules[0].named_parameters()] == ["0.weight", "0.bias"]
    assert [name for name, _ in modules[1].named_parameters()] == ["1.weight", "1.bias", "loss_fn.scale"]
    assert modules[0].parameter_names()[-1] == "loss_fn.scale"


def test_without_a_loss_the_output_is_the_loss() -> None:
    module = PipelineModule([lambda pair: (pair[0] - pair[1]).sum()], 1)
    inputs = (torch.ones(3), torch.zeros(3))
    assert module.loss_of(module(module.inputs_of((inputs, None))), (inputs, None)) == 3


def test_the_stage_comes_from_the_topology() -> None:
    class Places:
        def get_dim(self, axis: str) -> int:
            return {"pipe": 3, "data": 2}.get(axis, 0)

        def get_coord(self, rank: int) -> Any:
            return SimpleNamespace(pipe=rank // 2, data=rank % 2)

    module = PipelineModule(model_layers(), topology=SimpleNamespace(pipe=3, pipe_rank=1))
    assert (module.stage, module.num_pipeline_stages()) == (1, 3)
    places = Places()
    module = PipelineModule(model_layers(), topology=places, stage=2)
    assert (module.stage, module.num_pipeline_stages(), module.topology()) == (2, 3, places)
    assert [module.stage_owner(layer) for layer in (0, 6)] == [0, 2]
    with pytest.raises(PipelineError, match="layer 7 does not exist"):
        module.stage_owner(7)


def test_without_a_topology_ranks_of_a_stage_are_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    found = []
    for rank in range(8):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        found.append(PipelineModule(model_layers(), 4).stage)
    assert found == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(PipelineError, match="does not divide the 8 ranks"):
        PipelineModule(model_layers(), 3)


def build(layers: Any = None, **options: Any) -> PipelineModule:
    return PipelineModule(layers if layers is not None else model_layers(), **{"num_stages": 1, **options})


class Parallel(nn.Sequential):
    def forward(self, value: Tensor) -> Tensor:
        return sum(layer(value) for layer in self)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerSpec(relu), "a class derived from nn.Module is needed"),
        (lambda: LayerSpec(Mix()), "a class derived from nn.Module is needed"),
        (lambda: LayerSpec(dict), "a class derived from nn.Module is needed"),
        (lambda: build([]), "the list of layers is empty"),
        (lambda: build([Mix, 3]), "layer 1 is 3, of type int"),
        (lambda: build(Mix()), "the layers are one Mix"),
        (lambda: build(Parallel(Mix())), "Parallel has a forward of its own"),
        (lambda: build([LayerSpec(nn.Linear, 3)]), r"layer 0, Linear\(3\), cannot be built: TypeError"),
        (
            lambda: build([TiedLayerSpec("k", nn.Linear, 3, 3, tied_weight_attr="w")]),
            "no parameter 'w' to tie.*weight, bias",
        ),
        (
            lambda: build([TiedLayerSpec("k", nn.Linear, 3, 3), TiedLayerSpec("k", nn.Linear, 4, 3)]),
            r"shape \(3, 4\) under the key 'k', whose first layer has the shape \(3, 3\)",
        ),
        (
            lambda: build(
                [
                    TiedLayerSpec("k", nn.Linear, 3, 3),
                    TiedLayerSpec("k", nn.Linear, 3, 3, tied_weight_attr=["weight", "bias"]),
                ]
            ),
            "ties 1 parameters",
        ),
        (lambda: build(num_stages=None), "needs num_stages or a topology"),
        (lambda: build(num_stages=2), "until the process group exists"),
        (lambda: build(num_stages=2, stage=2), "stage = 2 is none of the 2 stages"),
        (
            lambda: build(num_stages=2, topology=SimpleNamespace(pipe=4, pipe_rank=0)),
            "num_stages = 2, but the topology has 4",
        ),
        (lambda: build(num_stages=None, topology="pipe"), "has no pipe axis"),
        (lambda: build(num_stages=8, stage=0), "7 layers cannot be cut into 8 parts"),
        (lambda: build(num_stages=4, stage=0, chunks=2), "7 layers cannot be cut into 8 parts"),
        (lambda: build(chunks=0), "Remedy"),
        (lambda: build(activation_checkpoint_interval=-1), "activation_checkpoint_interval = -1"),
        (lambda: build().inputs_of(torch.ones(3)), r"a pair \(inputs, labels\), got Tensor"),
        (lambda: build().inputs_of((1, 2, 3)), r"a pair \(inputs, labels\), got 3 items"),
        (lambda: build()(batch()[0], 1), "chunk 1: this stage has 1"),
    ],
)
def test_bad_input_is_one_clear_error(make: Callable[[], Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # another test may have begun
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(PipelineError, match=f"(?s){message}.*Remedy|Remedy.*{message}" if message != "Remedy" else message):
        make()


def test_names_in_a_sequential_are_numbers() -> None:
    layers = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), second=nn.Linear(2, 2)))
    assert list(PipelineModule(layers, 2, stage=1).state_dict()) == ["1.weight", "1.bias"]


# -- parameters that nothing tells of ----------------------------------------------------------------------------------


def hidden_in(kind: str) -> tuple[list[Any], Any]:
    """(layers, loss_fn) in which the parameters of the first layer are used by something that does not say so."""
    first = nn.Linear(4, 4)
    view = first.weight.t()
    second: Any = {
        "closure": lambda x: first(x),
        "method": first.forward,
        "partial": functools.partial(torch.nn.functional.linear, weight=first),
        "default": lambda x, layer=first: layer(x),
        "callable": Reaches(first),
        "its method": Reaches(first).__call__,
        "by another method": functools.partial(Reaches.by_another_method, Reaches(first)),
        "slot": Slotted(first).use,
        "cached": functools.lru_cache(lambda x: first(x)),
        "weight": lambda x, weight=first.weight: x @ weight,
        "view": lambda x, weight=view: x @ weight,
        "list": lambda x, table=[{"first": (first,)}]: x @ table[0]["first"][0].weight,
        "global": by_a_global,
        "global of a global": lambda x: [by_a_global(part) for part in x],
        "Python module": lambda x: sys.modules[__name__] and THIS.ANY_LAYER.forward(x),
        "frozen layer": Reaches(first.requires_grad_(kind != "frozen layer")),
        "in a module": HidesIn(nn.Linear(4, 4), [first]),
        "in a spec": LayerSpec(HidesIn, nn.Linear(4, 4), [first]),
        "global in a module": UsesAGlobal(),
    }.get(kind, nn.Linear(4, 4))
    loss: Any = {
        "loss": lambda out, labels: first(out).sum(),
        "loss module": nn.Sequential(first),
        "in a loss": HidesIn(nn.Identity(), [first]),
        "global in a loss": lambda out, labels: by_a_global(out).sum(),
    }.get(kind)
    return [ANY_LAYER if kind == "global in a module" else first, second], loss


ANY_LAYER, THIS = nn.Linear(4, 4), sys.modules[__name__]


def by_a_global(x: Tensor) -> Tensor:
    return F.linear(x, ANY_LAYER.weight)


class Reaches:
    """Is no module, and uses one."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.unused = layer, ANY_LAYER

    def __call__(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def by_another_method(self, x: Tensor) -> Tensor:
        return self(x)


class Slotted:
    __slots__ = ("layer",)

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    @classmethod
    def done(cls, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    @property
    def used(self) -> nn.Module:
        return self.layer

    def use(self, x: Tensor) -> Tensor:
        return self.done(self.used, x)


class HidesIn(nn.Module):
    """Uses the first layer of a list, which torch does not see."""

    def __init__(self, own: nn.Module, others: Sequence[nn.Module]) -> None:
        super().__init__()
        self.own, self.others = own, others

    def forward(self, x: Tensor, *ignored: Any) -> Tensor:
        return self.other()(self.own(x))  # type: ignore[no-any-return]

    def other(self) -> nn.Module:
        return self.others[0]


class UsesAGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return by_a_global(x)


HIDDEN = (
    *("closure", "method", "partial", "default", "loss", "loss module", "callable", "its method", "by another method"),
    *(
        "slot",
        "cached",
        "weight",
        "view",
        "list",
        "global",
        "global of a global",
        "Python module",
        "frozen layer",
        "in a module",
    ),
    *("in a spec", "global in a module", "in a loss", "global in a loss"),
)


@pytest.mark.parametrize("kind", HIDDEN)
def test_parameters_that_nothing_tells_of_are_refused(kind: str) -> None:
    layers, loss = hidden_in(kind)
    with pytest.raises(PipelineError, match=r"(uses a (Linear|Param|Tensor|param)|share a parameter).*Remedy"):
        PipelineModule(layers, num_stages=2, stage=0, loss_fn=loss, partition_method="uniform")
    PipelineModule(layers, num_stages=1, loss_fn=loss)  # where all of them are in one place


def mean_of(out: Any, labels: Any) -> Tensor:
    """Names an attribute as a global with parameters is named."""
    return F.mse_loss(torch.nn.functional.relu(out.ANY_LAYER), labels) + len(os.environ)


class Trainer:
    """Has layers, and a method that does not use them."""

    def __init__(self) -> None:
        self.layers, self.teacher, self.scale = [nn.Linear(2, 2) for _ in range(2)], nn.Linear(2, 2), 0.5
        self.teacher.requires_grad_(False)

    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * self.teacher(x)  # type: ignore[no-any-return]


def test_functions_may_hold_what_has_no_parameters_that_are_trained() -> None:
    activation, trainer = nn.GELU(), Trainer()
    function = functools.partial(trainer.scaled)
    layers = [trainer.layers[0], lambda x: activation(x), trainer.scaled, function, HidesIn(nn.ReLU(), trainer.layers)]
    PipelineModule([*layers, ANY_LAYER], num_stages=2, stage=1, partition_method=[5, 1], loss_fn=mean_of)


def test_a_module_given_to_a_spec_is_tied_to_the_layer_that_it_is() -> None:
    first = nn.Linear(4, 4, bias=False)
    layers = [first, LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Sequential, first), LayerSpec(nn.Sequential, first)]
    module = PipelineModule(layers, num_stages=2, stage=1, partition_method=[2, 2])
    assert [(tie.name, tie.parts, tie.local_names) for tie in module.ties()] == [
        ("0.weight", (0, 1), ("0.weight", "2.0.weight"))
    ]
    assert module.parameter_names() == ["0.weight", "1.weight", "1.bias"]


# -- after a failure ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", (1, 2))
def test_a_stage_that_failed_takes_no_other_batch(stages: int) -> None:
    """Its messages may be on their way still. Where there is no other stage, nothing stands in the way."""

    def fail(batch: Any) -> Any:
        raise ValueError("a mistake in the data")

    module: Any = SimpleNamespace(stage=0, is_first=lambda chunk: True, inputs_of=fail)
    p2p: Any = SimpleNamespace(expect=lambda *key: None) if stages > 1 else None
    nothing: Any = None
    clock = Clock(torch.device("cpu"))
    executor = Executor(module, nothing, p2p, [], nothing, nothing, lambda value: value, nothing, nothing, clock)
    schedule = make_schedule("gpipe", stages, 2)
    with pytest.raises(ValueError, match="a mistake in the data"):
        executor.run(schedule, [1, 2])
    assert executor.is_stuck == (stages > 1)
    again = (PipelineError, "an earlier batch failed") if stages > 1 else (ValueError, "a mistake in the data")
    with pytest.raises(again[0], match=again[1]):
        executor.run(schedule, [1, 2])
