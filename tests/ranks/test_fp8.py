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
import torch
from covering import by_day
from harness import run_ranks
from models import CASES, Case, Gpt, Place
from reference import Result, differences, train_reference
from simulation import simulated_device
from test_parallel_matrix import build, compare, reference
from test_parallel_matrix import train as train_in_parts
from test_simulated_device import look
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from training import counted_collectives, finish, make_config, make_engine, run_steps, shared_topology, train

import zerorun
from zerorun.distributed.float8_codes import Float8Cast
from zerorun.distributed.layout import build_layout
from zerorun.errors import ConfigError, ModelError
from zerorun.model_setup.checked_arguments import take_in
from zerorun.plan.make_plan import make_plan, planned_topology
from zerorun.plan.step_collectives import LARGEST, step_collectives
from zerorun.verify.summation_order import PermutedSums, backwards

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
        ("rowwise", 2, ["stage 2", "offload", "recomputed"]),  # and 0 and 3 by the section, above
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
        patch.setattr("zerorun.model_setup.float8.CPU", "another")
        patch.setattr("zerorun.model_setup.float8.gpus_have_fp8", lambda: False)
        return refused({}, 32)


def odd_tokens() -> str:
    module = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))
    convert_to_float8_training(module, config=Float8LinearConfig.from_recipe_name("rowwise"))  # as on GPUs
    engine = zerorun.initialize(module, make_config(3), topology=shared_topology())
    with pytest.raises(ModelError) as error:
        engine(torch.ones(3, 4, 32))
    engine.destroy()
    return str(error.value)


def refusals() -> list[str]:
    divided = {"size": 2, "plan": {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}}
    return [
        refused({}, 24),
        refused({}, 48, tensor_parallel=divided),
        refused({"filter_fqns": ["lm_head"]}, 32),
        refused({"filter_fqns": ["blocks"]}, 32),
        refused({"recipe": "delayed"}, 32),
        refused({"enable_fsdp_float8_all_gather": True}, 32),
        without_torchao(),
        without_fp8(),
        odd_tokens(),
    ]


def test_what_cannot_be_is_refused_with_a_remedy_and_the_model_stays() -> None:
    """ao#571, ao#3111: kernels give up in the first step on sides that are no multiples of 16."""
    odd, part, nothing, all_out, recipe, rows, missing, device, tokens = run_ranks(2, refusals)[0]
    assert "'blocks.0.0' a rank has [24, 16], and 3 others" in odd and '"filter_fqns": ["0", "2"]' in odd
    assert "'blocks.0.0' a rank has [24, 16]" in part
    assert "fp8.filter_fqns" in nothing and "'lm_head'" in nothing
    assert "filter_fqns leaves all out" in all_out
    assert "fp8.recipe" in recipe and "rowwise_with_gw_hp" in recipe
    assert "fp8.enable_fsdp_float8_all_gather" in rows and '"tensorwise"' in rows
    assert "zerorun[fp8]" in missing
    assert "of [32, 32], gets an input of [3, 4, 32]: 12 tokens" in tokens and "rowwise_with_gw_hp" in tokens
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


GATHERED: dict[str, dict[str, Any]] = {
    "plain": {},
    "ahead": {"stage3_prefetch_bucket_size": 5000},
    "all in host memory": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "second copy": {"zero_hpz_partition_size": 2},
}


def gathering(place: str, gathers: bool, **changes: Any) -> dict[str, Any]:
    fp8 = {"enabled": True, "recipe": "tensorwise", "enable_fsdp_float8_all_gather": gathers}
    return make_config(3, fp8=fp8, zero_optimization=GATHERED[place], **changes)


def with_and_without(rows: list[tuple[str, str, str]], swap: bool) -> list[tuple[Result, Result, Result, bool]]:
    """(gathered in fp8; the same on the simulated device; gathered as they are; bytes as planned), for each row."""
    found = []
    case = case_of("tensorwise") if swap else CASES["plain"]
    for place, precision, policy in rows:
        more = {"accumulation": 2, "precision": precision, "activation_checkpointing": {"policy": policy}}
        engine = make_engine(case, gathering(place, True, **more))
        assert "weights of layers in fp8 float8_e4m3fn" in engine.describe()
        with pytest.raises(ConfigError, match=r"fp8\.enable_fsdp_float8_all_gather"):
            engine.verify(torch.arange(6).view(1, 6))
        coded, planned = evaluated(case, engine)
        with simulated_device():
            simulated, _ = evaluated(case, make_engine(case, gathering(place, True, **more)))
        exact, _ = evaluated(case, make_engine(case, gathering(place, False, **more)))
        found.append((coded, simulated, exact, planned))
    return found


def evaluated(case: Case, engine: zerorun.Engine) -> tuple[Result, bool]:
    """Train, and add the loss of an evaluation to those of training. And whether the last step has sent what is planned."""
    result = run_steps(engine, case, STEPS - 1)
    with counted_collectives() as calls:
        last = run_steps(engine, case, 1, first=STEPS - 1)
    result.losses += last.losses
    result.norms += last.norms
    planned = calls == step_collectives(engine.plan)
    engine.eval()
    with torch.no_grad():
        result.losses.append(case.loss(engine, Place(9)).item())
    finish(engine, result)
    return result, planned


@pytest.mark.parametrize(
    ("ranks", "rows", "swap"),
    [
        (3, [("all in host memory", "bf16", "full")], False),
        pytest.param(3, [("ahead", "fp32", "full")], False, marks=pytest.mark.nightly),
        pytest.param(
            2, [("plain", "bf16", "none"), ("all in host memory", "fp32", "full")], True, marks=pytest.mark.nightly
        ),
        pytest.param(4, [("second copy", "bf16", "none"), ("ahead", "fp32", "selective")], True, marks=pytest.mark.nightly),
    ],
)
def test_gathers_in_fp8_change_no_bit(ranks: int, rows: list[tuple[str, str, str]], swap: bool) -> None:
    """ao#3982: with three ranks, shards end within rows. torchtitan#3123: gathers in 16 bits in spite of the key."""
    for results in run_ranks(ranks, with_and_without, rows, swap):
        for coded, simulated, exact, planned in results:
            assert planned
            assert differences(simulated, coded, EXACT) == []
            assert coded.losses == exact.losses
            assert coded.norms == pytest.approx(exact.norms, rel=EXACT)  # whose squares are added in another order
            assert all(torch.equal(value, exact.weights[name]) for name, value in coded.weights.items())


def in_fp8_by_tensors(name: str) -> nn.Module:
    return swapped(build(name), "tensorwise")


@pytest.mark.nightly
def test_gathers_in_fp8_of_divided_layers_change_no_bit() -> None:
    """By the scale of the part that a tensor rank has, as its layer casts it. By day, shards of whole layers do it."""
    found = []
    for gathers in (True, False):
        config = gathering("plain", gathers, accumulation=2, precision="bf16")
        found.append(run_ranks(4, train_in_parts, "llama", 2, 1, config, in_fp8_by_tensors))
    for coded, exact in zip(*found, strict=True):
        assert coded["losses"] == exact["losses"]
        assert all(torch.equal(value, exact["weights"][name]) for name, value in coded["weights"].items())


def races(place: str) -> list[str]:
    return look(gathering(place, True), CASES["plain"])


@pytest.mark.nightly  # by day: test_gathers_in_fp8_change_no_bit
@pytest.mark.parametrize("place", by_day(("plain", "all in host memory"), "all in host memory"))
def test_gathers_in_fp8_have_no_races(place: str) -> None:
    assert run_ranks(2, races, place) == [[], []]


def planned_bytes(gathers: bool) -> tuple[int, int, int]:
    """(sent in gathers, codes held, sent to tell the largest weights) on a rank of 64 GPUs."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(4)))
    swap = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(model, config=swap)
    config = gathering("plain", gathers, precision="bf16") | {"train_micro_batch_size_per_gpu": 1}
    config["zero_optimization"]["overlap_comm"] = True
    wanted, raw = take_in(model, config, None, None, None, 64)
    plan = make_plan(model, wanted, raw, planned_topology(wanted, 64, 8), "nccl", "cuda")
    calls = step_collectives(plan)
    held = sum(buffer.bytes for group in plan.flat_groups for buffer in group.buffers if buffer.tensor == "coded")
    sent = sum(call.bytes for call in calls if "all-gather for" in call.label)
    return sent, held, sum(call.bytes for call in calls if call.label == LARGEST)


def test_gathers_in_fp8_send_a_byte_for_each_weight() -> None:
    matrix, vectors, visits = 512 * 512, 64 * 32, 4 + 2  # two slots still have their units when backward begins
    assert planned_bytes(True) == (visits * 63 * (matrix + 2 * vectors) // 64, 4 * matrix // 64, 63 * 4 * 4)
    assert planned_bytes(False) == (visits * 63 * 2 * (matrix + vectors) // 64, 0, 0)


def test_products_in_fp8_are_verified_with_sums_in_another_order() -> None:
    layer, x = swapped(Gpt(1)).blocks[0].up, torch.randn(6, 16, requires_grad=True)
    plain = layer(x)
    plain.sum().backward()
    wanted = [plain.detach(), layer.weight.grad, x.grad]
    layer.weight.grad = x.grad = None
    turned = []
    with PermutedSums(lambda tensor, dim: turned.append(type(tensor)) or backwards(tensor, dim)):
        permuted = layer(x)
        permuted.sum().backward()
    for found, expected in zip([permuted.detach(), layer.weight.grad, x.grad], wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(turned) >= 6 and set(turned) == {torch.Tensor}  # both factors of three products


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("power_of_2", (False, True))
def test_what_is_decoded_is_cast_to_the_same_codes(dtype: torch.dtype, power_of_2: bool) -> None:
    """By torchao's own functions, for weights of many magnitudes, also if all are 0."""
    layout, generator = build_layout(["w"], [(40, 48)], 3), torch.Generator().manual_seed(0)
    cast = Float8Cast("float8_e4m3fn", power_of_2)
    for power in range(-9, 9):
        spread = torch.randn(1920, generator=generator).mul(3).exp() * 10.0**power * (power < 8)
        weight = (torch.randn(1920, generator=generator) * spread).to(dtype)
        full = torch.zeros(layout.numel, dtype=dtype)
        full[:1920] = weight
        coded, largest = torch.zeros(layout.numel, dtype=torch.uint8), weight.abs().max().float().view(1)
        for rank in range(3):
            part = slice(layout.bounds[rank], layout.bounds[rank + 1])
            cast.encode(full[part], layout.pieces(rank), largest, coded[part])
        decoded = torch.empty_like(full)
        cast.decode(coded, layout, largest, decoded)
        for seen in (weight, decoded[:1920]):
            scale = tensor_to_scale(seen, cast.dtype, round_scales_to_power_of_2=power_of_2)
            codes = to_fp8_saturated(seen.float() * scale, cast.dtype)
            assert torch.equal(codes.view(torch.uint8), coded[:1920])
