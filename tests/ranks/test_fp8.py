"""Linear layers that multiply in fp8, by torchao's Float8Linear: swapped by the user, or by the section ``fp8``.

With a scale for each row that is a power of 2, a row of a product does not depend on the other rows of its batch. So the
first loss and its gradients are those of one process, as without fp8. What the order of sums changes later may put some
value on the other side of what fp8 rounds, and then it is seen: it is as large as fp8's own errors.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from covering import by_day
from harness import run_ranks
from models import CASES, Case, Gpt
from reference import Result, differences, train_reference
from test_parallel_matrix import build, compare, reference
from test_parallel_matrix import train as train_in_parts
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from training import finish, make_config, make_engine, run_steps, shared_topology, train

import zerorun
from zerorun.errors import ConfigError

STEPS = 2
EXACT, AS_FP8 = 1e-6, 5e-3


def swapped(module: nn.Module, recipe: str = "rowwise") -> nn.Module:
    """``module`` with torchao's layers in its blocks, as a user would swap them."""
    blocks = module.blocks if isinstance(module, Gpt) else module.model.layers
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(blocks, config=config)
    return module


def case_of(recipe: str) -> Case:
    return Case(recipe, lambda: swapped(Gpt(), recipe))


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "offload": (3, OFFLOAD),
    "recomputed": (3, {"activation_checkpointing": {"policy": "full"}}),
    "ahead": (3, {"zero_optimization": {"overlap_comm": True}}),
}


def config_of(place: str, recipe: str | None = None) -> dict[str, Any]:
    """``recipe``: for the section, whose other names are those of torchtitan."""
    stage, more = PLACES[place]
    return make_config(
        stage, accumulation=2, **more, fp8={"enabled": recipe is not None, "recipe_name": recipe or "rowwise"}
    )


def train_everywhere(recipe: str, places: list[str]) -> list[Result]:
    """With layers that the user has swapped, also in a model made by zero.Init, and with those of the section."""
    found = [train(case_of(recipe), config_of(place), STEPS) for place in places]
    found += [train(CASES["plain"], config_of(place, recipe), STEPS) for place in ("stage 0", "stage 3")]
    values = case_of(recipe).build().state_dict()
    with zerorun.zero.Init():
        module = swapped(Gpt(), recipe)
    with zerorun.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        module.load_state_dict(values)
    engine = zerorun.initialize(module, config_of("stage 3"), topology=shared_topology())
    found.append(run_steps(engine, CASES["plain"], STEPS))
    finish(engine, found[-1])
    return found


@pytest.mark.parametrize(
    ("recipe", "ranks", "places"),
    [
        ("rowwise", 2, [*PLACES]),
        pytest.param("rowwise", 4, [*PLACES], marks=pytest.mark.nightly),
        pytest.param("rowwise_with_gw_hp", 2, [*PLACES], marks=pytest.mark.nightly),
        pytest.param("tensorwise", 2, [*PLACES], marks=pytest.mark.nightly),
    ],
)
def test_training_is_that_of_one_process_wherever_states_are(recipe: str, ranks: int, places: list[str]) -> None:
    expected = train_reference(case_of(recipe), world_size=ranks, steps=STEPS, accumulation=2)
    results = run_ranks(ranks, train_everywhere, recipe, places)
    for found in results[0]:
        assert differences(found, results[0][0], EXACT) == []
        assert differences(found, expected, AS_FP8) == []
        assert found.losses[0] == pytest.approx(expected.losses[0], rel=EXACT)
        assert found.norms[0] == pytest.approx(expected.norms[0], rel=EXACT)
    plain = train_reference(CASES["plain"], world_size=ranks, steps=1, accumulation=2)
    assert expected.norms[0] != pytest.approx(plain.norms[0], rel=1e-4)


@pytest.mark.parametrize(("tensor", "pipe", "data"), by_day(((2, 1, 2), (1, 2, 2), (2, 2, 1)), (2, 2, 1)))
def test_layers_that_are_divided_and_pipelines_train_as_one_process(tensor: int, pipe: int, data: int) -> None:
    """A tensor rank has scales of its part of a row, which are powers of 2: only the smallest values round otherwise."""
    config = make_config(3, accumulation=2, clip=0.5)
    found = run_ranks(tensor * pipe * data, train_in_parts, "llama", tensor, pipe, config, in_fp8)
    expected, plain = reference("llama", data, 2, in_fp8), reference("llama", data, 2)
    compare(found, expected, AS_FP8)
    for result in found:
        norm = result["norms"][0]
        assert 10 * abs(norm - expected["norms"][0]) < abs(norm - plain["norms"][0])


def in_fp8(name: str) -> nn.Module:
    return swapped(build(name))


def save_and_load(folder: str) -> list[Any]:
    """Go on at stage 1, by the section, from a checkpoint of stage 3 with swapped layers."""
    engine = make_engine(case_of("rowwise"), config_of("stage 3"))
    run_steps(engine, CASES["plain"], 1)
    engine.save_checkpoint(folder)
    kept = engine.state_dict()
    wanted = run_steps(engine, CASES["plain"], 1)
    engine.destroy()
    engine = make_engine(CASES["plain"], config_of("stage 1", "rowwise"))
    layer = engine.module.blocks[1].up
    seen = [type(layer) is Float8Linear, engine.effective_config()["fp8.enabled"].note]
    engine.load_checkpoint(folder)
    found = run_steps(engine, CASES["plain"], 1)
    plain = Gpt()
    plain.load_state_dict(kept)
    module = engine.module
    engine.destroy()
    ordinary = type(layer) is nn.Linear and vars(layer).keys() == vars(plain.blocks[1].up).keys()
    return [*seen, ordinary, "Float8" not in repr(module), found.losses == wanted.losses, found.norms == wanted.norms]


def test_checkpoints_and_models_are_as_without_fp8(tmp_path: Path) -> None:
    for is_float8, note, *rest in run_ranks(2, save_and_load, str(tmp_path)):
        assert is_float8 and all(rest), rest
        assert "16 linear layers" in note and "emulated" in note


def refused(changes: dict[str, Any], width: int, **config: Any) -> str:
    module = Gpt(2)
    module.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)) for _ in range(2))
    given = make_config(1, fp8={"enabled": True, **changes}, **config)
    with pytest.raises(ConfigError) as error:
        zerorun.initialize(module, given)
    assert not any(isinstance(layer, Float8Linear) for layer in module.modules())
    return str(error.value)


def without_torchao() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchao.float8", None)
        return refused({}, 32)


def without_fp8() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerorun.startup.float8.CPU", "another")
        patch.setattr("zerorun.startup.float8.gpus_have_fp8", lambda: False)
        return refused({}, 32)


def refusals() -> list[str]:
    divided = {"size": 2, "plan": {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}}
    return [
        refused({}, 24),
        refused({}, 48, tensor_parallel=divided),
        refused({"filter_fqns": ["lm_head"]}, 32),
        refused({"filter_fqns": ["blocks"]}, 32),
        refused({"recipe": "delayed"}, 32),
        without_torchao(),
        without_fp8(),
    ]


def test_what_cannot_be_is_refused_with_a_remedy_and_the_model_stays() -> None:
    """ao#571, ao#3111: kernels give up in the first step on sides that are no multiples of 16."""
    odd, part, nothing, all_out, recipe, missing, device = run_ranks(2, refusals)[0]
    assert "'blocks.0.0' a rank has [24, 16], and 3 others" in odd and '"filter_fqns": ["0", "2"]' in odd
    assert "'blocks.0.0' a rank has [24, 16]" in part
    assert "fp8.filter_fqns" in nothing and "'lm_head'" in nothing
    assert "filter_fqns leaves all out" in all_out
    assert "fp8.recipe" in recipe and "rowwise_with_gw_hp" in recipe
    assert "zerorun[fp8]" in missing
    assert "compute capability 8.9" in device and '"emulate": true' in device


def estimates() -> list[tuple[dict[str, int], dict[str, int]]]:
    found = []
    for place in ("stage 1", "stage 3"):
        module, config = CASES["plain"].build(), config_of(place, "rowwise")
        estimate = zerorun.estimate_memory(module, config, 2, device="cpu")
        assert not any(isinstance(layer, Float8Linear) for layer in module.modules())
        engine = zerorun.initialize(module, config, topology=shared_topology())
        run_steps(engine, CASES["plain"], 1)
        held = {kind: size for kind, size in engine.memory_report().items() if size}
        engine.destroy()
        found.append((held, {kind: size for kind, size in estimate.kinds.items() if size}))
    return found


def test_the_estimate_is_the_ledger() -> None:
    for held, estimated in run_ranks(2, estimates)[0]:
        assert held == estimated
