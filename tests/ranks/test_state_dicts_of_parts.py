"""state_dict() and load_state_dict() of modules inside a sharded model, and what editing one weight does to the others."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import by_day
from harness import run_ranks
from test_foreign_values import Layers, build
from test_parallel_access import attempt, engine_of
from torch import nn
from training import PLACES, make_config, merged, placed

import zerorun
from zerorun.deepspeed.parameters import GatherReplacedLayerParams, give_values, show_placeholders
from zerorun.zero import GatheredParameters
from zerorun.zero.placeholders import UnsavedPlaceholder

LR = 0.05
MASTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "bf16 alone": ("bf16", {"bf16_master_weights_and_grads": True}),
    "Kahan": ("bf16", {"bf16_master_weights_and_grads": True, "rounding": "kahan"}),
    "remainders": ("bf16", {"store_param_remainders": True}),
}


def data() -> torch.Tensor:
    """The same on every rank, so that one process is the reference."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def engine_in(place: str, masters: str, folder: Path, lr: float = LR) -> zerorun.Engine:
    stage, zero = placed(place, folder)
    precision, section = MASTERS[masters]
    config = make_config(stage, precision=precision, optimizer="SGD", zero_optimization=zero)
    changes: dict[str, Any] = {"optimizer": {"params": {"lr": lr, "momentum": 0.0, "weight_decay": 0.0}}}
    return zerorun.initialize(build(), merged(config, changes | ({precision: section} if section else {})))


def steps(engine: zerorun.Engine, count: int) -> None:
    for _ in range(count):
        engine.backward(engine(data().to(next(engine.module.parameters()).dtype)).float())
        engine.step()


def other_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {name: torch.randn(value.shape, generator=generator) for name, value in build().blocks[1].state_dict().items()}


def masters_of(engine: zerorun.Engine) -> dict[str, torch.Tensor]:
    found = {name: zerorun.zero.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    return {name: value for name, value in found.items() if value is not None}


# -- loading -----------------------------------------------------------------------------------------------------


def load_a_part(place: str, masters: str, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(weights after two steps, the load, and two steps more; masters of the part after the load)"""
    engine = engine_in(place, masters, folder)
    steps(engine, 2)
    module: Any = engine.module
    module.blocks[1].load_state_dict(other_values())
    loaded = {name: value for name, value in masters_of(engine).items() if name.startswith("blocks.1.")}
    steps(engine, 2)
    weights = engine.state_dict()
    engine.destroy()
    return weights, loaded


@pytest.mark.each_value
@pytest.mark.parametrize("place", [place for place in PLACES if "stage 3" not in place])
@pytest.mark.parametrize("masters", MASTERS)
def test_a_part_that_is_loaded_is_trained_from_there(place: str, masters: str, tmp_path: Path) -> None:
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for number in range(4):
        if number == 2:
            plain.blocks[1].load_state_dict(other_values())
        plain(data()).backward()
        optimizer.step()
        optimizer.zero_grad()
    error = 1e-6 if masters == "fp32" else 3e-2
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(masters, torch.bfloat16)
    for weights, loaded in run_ranks(2, load_a_part, place, masters, tmp_path):
        for name, value in other_values().items():
            assert torch.equal(loaded[f"blocks.1.{name}"], value.to(dtype).float())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name].float(), value, rtol=error, atol=error)


# -- masters of what was not changed -----------------------------------------------------------------------------


def edit_a_weight(place: str, masters: str, how: str, folder: Path) -> list[str]:
    """Let an element of a bias become 3. The parameters whose masters are others than they should be after that."""
    engine = engine_in(place, masters, folder)
    module: Any = engine.module
    steps(engine, 3)
    before = masters_of(engine)
    bias = module.blocks[1].bias
    if how == "block":
        with GatheredParameters(list(module.parameters()), modifier_rank=1):
            if torch.distributed.get_rank() == 1:
                bias.data[2] = 3.0
    else:
        part = module if how == "module" else module.blocks[1]
        state = {name: value.clone() for name, value in part.state_dict().items()}
        state["blocks.1.bias" if how == "module" else "bias"][2] = 3.0
        part.load_state_dict(state)
    after = masters_of(engine)
    before["blocks.1.bias"][2] = 3.0
    weights = engine.state_dict()
    problems = [name for name, value in before.items() if not torch.equal(after[name], value)]
    if float(weights["blocks.1.bias"][2]) != 3.0:
        problems.append("the weight")
    engine.destroy()
    return problems


EDITS = [
    (place, masters, how)
    for place in ("stage 0", "stage 1", "stage 2, offload", "stage 3", "stage 3, offload all")
    for masters in MASTERS
    for how in ("block", "module", "part")
    if how == "block" or "stage 3" not in place
]
DAILY = [
    ("stage 0", "Kahan", "block"),
    ("stage 0", "bf16", "part"),
    ("stage 1", "remainders", "part"),
    ("stage 1", "remainders", "block"),
    ("stage 1", "bf16", "block"),
    ("stage 1", "Kahan", "module"),
    ("stage 2, offload", "remainders", "module"),
    ("stage 2, offload", "fp16", "module"),
    ("stage 3", "remainders", "block"),
    ("stage 3, offload all", "bf16", "block"),
]


@pytest.mark.parametrize(("place", "masters", "how"), by_day(EDITS, *DAILY))
def test_masters_of_what_was_not_changed_keep_their_digits(place: str, masters: str, how: str, tmp_path: Path) -> None:
    assert run_ranks(2, edit_a_weight, place, masters, how, tmp_path) == [[], []]


# -- saving ------------------------------------------------------------------------------------------------------


def save_parts(masters: str, folder: Path) -> list[str]:
    """What is wrong with the state dicts of modules at stage 3."""
    engine = engine_in("stage 3", masters, folder)
    steps(engine, 1)
    expected = engine.state_dict()
    module: Any = engine.module
    problems = []
    for name in ("", "blocks", "blocks.1"):
        asked = module.get_submodule(name)
        kind, text = attempt(lambda asked=asked: torch.save(asked.state_dict(), io.BytesIO()))
        if kind != "ReleasedParameterError" or "placeholders" not in text or (name or "the module") not in text:
            problems.append(f"{name}: {kind} {text}")
        with GatheredParameters(asked.parameters()):
            found = asked.state_dict(prefix=f"{name}." if name else "")
            problems += [key for key, value in found.items() if not torch.equal(value, expected[key])]
    kind, _ = attempt(lambda: nn.Module.state_dict(module.blocks[0]))
    engine.destroy()
    if kind != "ReleasedParameterError":
        problems.append("by the class")
    if not all(torch.equal(value, expected[f"blocks.{name}"]) for name, value in module.blocks.state_dict().items()):
        problems.append("after destroy()")
    return problems


@pytest.mark.parametrize("masters", ("fp32", "bf16"))
def test_state_dicts_of_parts_have_no_placeholders(masters: str, tmp_path: Path) -> None:
    assert run_ranks(2, save_parts, masters, tmp_path) == [[], []]


def load_outside_a_block(name: str) -> list[str]:
    """What is wrong with loads at stage 3 of the module ``name``, outside of a block and, as the error says, inside one."""
    engine = zerorun.initialize(build(), make_config(3))
    module: Any = engine.module
    asked, before = module.get_submodule(name), engine.state_dict()
    state = {key.removeprefix(f"{name}."): value + 1.0 for key, value in before.items() if key.startswith(name)}
    first = next(key for key, _ in asked.named_parameters() if key.startswith("blocks" if not name else ""))
    kind, text = attempt(lambda: asked.load_state_dict(state))
    problems = []
    if kind != "ReleasedParameterError" or repr(first) not in text or "modifier_rank=0" not in text:
        problems.append(f"{kind} {text}")
    problems += [key for key, value in engine.state_dict().items() if not torch.equal(value, before[key])]
    asked.load_state_dict({}, strict=False)  # nothing for a placeholder
    with GatheredParameters(list(asked.parameters()), modifier_rank=0):
        asked.load_state_dict(state)
    for key, value in engine.state_dict().items():
        if not torch.equal(value, before[key] + (1.0 if key.startswith(name) else 0.0)):
            problems.append(f"{key} inside a block")
    engine.destroy()
    return problems


@pytest.mark.parametrize("name", ("", "blocks.1"))
def test_a_load_into_placeholders_is_refused(name: str) -> None:
    """Before anything is loaded; torch's own error spoke of memory locations."""
    assert run_ranks(2, load_outside_a_block, name) == [[], []]


def copied_and_pickled(stage: int) -> list[bool]:
    engine = zerorun.initialize(build(), make_config(stage, precision="bf16"))
    steps(engine, 1)
    layers: Any = engine.module
    assert isinstance(layers, Layers)
    file = io.BytesIO()
    torch.save(layers.head, file)
    file.seek(0)
    masters = masters_of(engine)
    found = []
    for other in (copy.deepcopy(layers.head), torch.load(file, weights_only=False)):
        right = torch.equal(other.weight, layers.head.weight)
        other.load_state_dict({name: torch.zeros_like(value) for name, value in other.state_dict().items()})
        found.append(right and not other.weight.any() and bool(layers.head.weight.any()))
    after = masters_of(engine)
    engine.destroy()
    return [*found, all(torch.equal(after[name], value) for name, value in masters.items())]


@pytest.mark.parametrize("stage", (0, 2))
def test_copies_of_layers_are_layers_without_an_engine(stage: int) -> None:
    assert run_ranks(2, copied_and_pickled, stage) == [[True] * 3] * 2


def follow_by_a_copy(place: str, masters: str, folder: Path) -> list[str]:
    """What is wrong with a copy and a pickle of the whole model, made between two steps as for an average of weights."""
    engine = engine_in(place, masters, folder)
    steps(engine, 1)
    expected, whole, problems = engine.state_dict(), engine.module, []
    if "stage 3" in place:
        names = dict(whole.named_parameters())
        for held in (whole, list(whole.parameters()), names):
            for make in (copy.deepcopy, pickle.dumps, lambda it: torch.save(it, io.BytesIO())):
                kind, text = attempt(partial(make, held))
                if kind != "ReleasedParameterError" or "GatheredParameters" not in text:
                    problems.append(f"{kind} {text}")
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            kind, text = attempt(partial(make, engine))
            if kind != "StepError" or "save_checkpoint" not in text:
                problems.append(f"{kind} {text}")
    with GatheredParameters(list(whole.parameters())):
        for made in (
            pickle.loads(pickle.dumps(dict(whole.named_parameters()))),
            copy.deepcopy(dict(whole.named_parameters())),
        ):
            problems += [name for name, param in made.items() if vars(param) or not torch.equal(param, expected[name])]
        file = io.BytesIO()
        torch.save(whole, file)
        file.seek(0)
        averaged = torch.optim.swa_utils.AveragedModel(whole)
        twins = [copy.deepcopy(whole), averaged.module, torch.load(file, weights_only=False)]
    outputs = []
    for twin in twins:
        outputs.append(twin(data().to(next(twin.parameters()).dtype)))
        outputs[-1].backward()
        problems += [name for name, param in twin.named_parameters() if param.grad is None]
    steps(engine, 1)
    for twin in twins:
        problems += [name for name, value in twin.state_dict().items() if not torch.equal(value, expected[name])]
        problems += ["another output"] * (not torch.equal(twin(data().to(next(twin.parameters()).dtype)), outputs[0]))
    engine.destroy()
    return problems


@pytest.mark.each_value
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("masters", ("fp32", "bf16"))
def test_copies_of_the_whole_model_are_models_without_an_engine(place: str, masters: str, tmp_path: Path) -> None:
    assert run_ranks(2, follow_by_a_copy, place, masters, tmp_path) == [[], []]


def parts_of_divided_layers() -> list[tuple[str, str]]:
    engine = engine_of(1, 2, 1)
    layer = engine.module.model.layers[0]
    found = [attempt(layer.mlp.state_dict), attempt(layer.input_layernorm.state_dict)]
    with GatheredParameters(layer.mlp.parameters()):
        found.append(attempt(layer.mlp.state_dict))
    engine.destroy()
    return found


def test_state_dicts_of_divided_layers_have_no_parts() -> None:
    for divided, whole, in_a_block in run_ranks(2, parts_of_divided_layers):
        assert divided[0] == "ReleasedParameterError" and "parts of the model" in divided[1]
        assert not whole[0] and not in_a_block[0]


def state_dict_of_the_mode(stage: int, folder: Path) -> dict[str, Any]:
    """What the DeepSpeed mode shows of divided layers, what saving it says, and what its block over them has and keeps."""
    engine = engine_of(stage, 2, 1)
    show_placeholders(engine)
    model, before = engine.module, engine.state_dict()
    state = model.state_dict()
    divided = [name for name, value in state.items() if isinstance(value, UnsavedPlaceholder)]
    found: dict[str, Any] = {
        "shapes": [(name, value.shape) for name, value in state.items()] == [(n, v.shape) for n, v in before.items()],
        "divided": divided,
        "saved": [attempt(lambda: torch.save(state, folder / "x")), attempt(lambda: model.save_pretrained(folder))],
    }
    found["others"] = all(torch.equal(state[name], before[name]) for name in before if name not in divided)
    weight = model.model.layers[0].mlp.down_proj.weight
    name = "model.layers.0.mlp.down_proj.weight"
    with GatherReplacedLayerParams([weight], model):
        found["whole"] = torch.equal(weight, before[name]) and torch.equal(model.state_dict()[name], before[name])
        with torch.no_grad():
            weight.mul_(2.0)
    found["kept"] = torch.equal(engine.state_dict()[name], before[name] * (1 if stage == 3 else 2))
    with GatherReplacedLayerParams([weight], model, enabled=False):
        found["off"] = isinstance(model.state_dict()[name], UnsavedPlaceholder)
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (3, 4)])
def test_the_mode_shows_placeholders_of_divided_layers(stage: int, ranks: int, tmp_path: Path) -> None:
    """OpenRLHF asks a model for its names when it saves it; DeepSpeed has parts there."""
    for found in run_ranks(ranks, state_dict_of_the_mode, stage, tmp_path):
        assert found["shapes"] and found["others"] and found["whole"] and found["kept"] and found["off"]
        assert "model.layers.0.mlp.down_proj.weight" in found["divided"]
        assert ("model.layers.1.input_layernorm.weight" in found["divided"]) == (stage == 3)
        for told in found["saved"]:
            assert told[0] == "ReleasedParameterError" and "engine.state_dict()" in told[1]
    assert not list(tmp_path.glob("*.safetensors"))


def state_dicts_beside_given_values() -> list[str]:
    """What the module's state dict has: while the script has all values, and after that."""
    engine = engine_in("stage 3", "bf16", Path())
    show_placeholders(engine)
    name = "blocks.1.weight"

    def has_values(wanted: dict[str, torch.Tensor] | None) -> str:
        value = engine.module.state_dict()[name]
        if isinstance(value, UnsavedPlaceholder):
            return "a placeholder"
        return "right" if wanted is not None and torch.equal(value, wanted[name]) else f"{value.numel()} elements"

    whole = give_values(engine)
    found = [has_values(whole)]
    steps(engine, 1)
    found.append(has_values(whole))
    whole = give_values(engine)
    found.append(has_values(whole))
    zerorun.zero.safe_set_full_fp32_param(engine.module.blocks[0].weight, torch.ones(8, 8))
    found.append(has_values(whole))
    whole = give_values(engine, exclude_frozen_parameters=True)
    found.append(has_values(whole))
    del whole
    found.append(has_values(None))
    engine.destroy()
    return found


def test_a_state_dict_has_values_that_the_script_has_just_got() -> None:
    """OpenRLHF gets all weights on rank 0, and lets peft, which asks the module, write a file before its own.

    Other ranks have nothing then, and write nothing.
    """
    first, other = run_ranks(2, state_dicts_beside_given_values)
    stale = "a placeholder"
    assert first == ["right", stale, "right", stale, "right", stale]
    assert other == ["0 elements", stale, "0 elements", stale, "0 elements", "0 elements"]


def left_by_an_engine_of_the_mode(stage: int) -> bool:
    """Whether its module is still there when nobody has the engine any more."""
    engine = engine_in(f"stage {stage}", "bf16", Path())
    show_placeholders(engine)
    steps(engine, 1)
    give_values(engine)
    module = weakref.ref(engine.module)
    del engine
    gc.collect()
    return module() is not None


@pytest.mark.parametrize("stage", (1, 3))
def test_an_engine_of_the_mode_that_nobody_has_is_gone(stage: int) -> None:
    assert run_ranks(2, left_by_an_engine_of_the_mode, stage) == [False, False]


def given_values_of_divided_layers() -> list[bool]:
    """Below stage 3 tensor ranks have their parts whole, and change them without a word to others."""
    engine = engine_of(1, 2, 1)
    show_placeholders(engine)
    kept = give_values(engine)
    name = "model.layers.0.mlp.down_proj.weight"
    found = [isinstance(engine.module.state_dict()[name], UnsavedPlaceholder), kept is not None]
    engine.destroy()
    return found


def test_values_that_were_given_are_not_shown_where_they_may_have_changed() -> None:
    assert run_ranks(2, given_values_of_divided_layers) == [[True, True], [False, False]]  # on rank 1 they are empty


def load_whole_into_divided_layers(stage: int) -> tuple[tuple[str, str], list[str], list[str]]:
    """What a load of the whole state says; names that have changed by it; and those that a load in a block gave not."""
    engine = engine_of(stage, 2, 1)
    before = engine.state_dict()
    wanted = {name: value + 1.0 if value.is_floating_point() else value for name, value in before.items()}
    told = attempt(lambda: engine.module.load_state_dict(wanted))
    changed = [name for name, value in engine.state_dict().items() if not torch.equal(value, before[name])]
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.load_state_dict(wanted)
    missed = [name for name, value in engine.state_dict().items() if not torch.equal(value, wanted[name])]
    engine.destroy()
    return told, changed, missed


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_values_are_loaded_into_divided_layers_in_a_block(stage: int) -> None:
    """Torch told of a mismatch of sizes, after some values had been loaded."""
    for told, changed, missed in run_ranks(2, load_whole_into_divided_layers, stage):
        assert told[0] == "ReleasedParameterError" and "Nothing was loaded" in told[1] and "modifier_rank=0" in told[1]
        assert not changed and not missed


def layers_of_stages() -> list[tuple[str, str]]:
    engine = engine_of(1, 1, 2)
    model = engine.module.whole_model.model
    here = next(layer for layer in model.layers if list(layer.parameters()))
    found = [attempt(model.state_dict), attempt(model.layers.state_dict), attempt(here.state_dict)]
    engine.destroy()
    return found


def test_state_dicts_of_a_stage_say_that_layers_are_missing() -> None:
    for model, layers, here in run_ranks(2, layers_of_stages):
        assert model[0] == layers[0] == "ReleasedParameterError" and "parts of the model" in model[1]
        assert not here[0]
