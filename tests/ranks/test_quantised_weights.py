"""Weights that other packages have quantised: frozen ones train alike at every stage, trainable ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import Gpt, Place, reset
from quantised import KINDS, LR, SHARDED, build, case, plain_losses
from safetensors.torch import load_file
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from training import make_config, shared_topology

import zerorun
from zerorun.errors import CheckpointError, ModelError, ReleasedParameterError
from zerorun.plan.parameter_kinds import inner_tensors, inside, named_members, scale_bytes, stored_bytes
from zerorun.zero.init import part_of

STEPS = 2


OFFLOADED = {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}


def engine_of(kind: str, stage: int, precision: str, seed: int = 0, **changes: Any) -> zerorun.Engine:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config = make_config(stage, precision=precision, **changes)
    make = lambda params: torch.optim.AdamW(params, lr=LR)  # noqa: E731
    return zerorun.initialize(build(kind, dtype, seed), config, optimizer=make, topology=shared_topology())


def losses_of(engine: zerorun.Engine, kind: str, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        loss = case(kind).loss(engine, Place(dist.get_rank(), step))
        engine.backward(loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            case(kind).loss(engine, Place(dist.get_rank(), step))
        engine.train()
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, loss.item())
        losses.append(sum(values) / len(values))
    return losses


def train_at(kind: str, stage: int, precision: str, **changes: Any) -> list[float]:
    engine = engine_of(kind, stage, precision, **changes)
    losses = losses_of(engine, kind, STEPS)
    engine.destroy()
    return losses


def train_everywhere(kind: str, precision: str) -> list[list[float]]:
    return [*(train_at(kind, stage, precision) for stage in range(4)), train_at(kind, 3, precision, **OFFLOADED)]


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", by_day(KINDS, "nf4 in bf16", "int8"))
def test_frozen_quantised_weights_train_as_without_zerorun(kind: str, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    wanted = plain_losses(kind, dtype, 2, STEPS)
    assert abs(wanted[0] - wanted[-1]) > 0.01
    found = run_ranks(2, train_everywhere, kind, precision)[0]
    assert found[0] == pytest.approx(wanted, rel=3e-6 if precision == "fp32" else 3e-4)  # which adds gradients in bf16
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=1e-6)


def test_frozen_numbers_of_8_bits_and_their_scales_keep_their_dtypes() -> None:
    """In bf16, to which other frozen weights are cast."""
    wanted = plain_losses("float8", torch.bfloat16, 2, STEPS)
    for found in run_ranks(2, train_at, "float8", 3, "bf16"):
        assert found == pytest.approx(wanted, rel=3e-4)


def save_and_load(folder: str, kind: str, trainable_only: bool) -> tuple[list[float], list[float], dict[str, Any]]:
    """Go on from a checkpoint of stage 3 at stage 1, which went another way before."""
    engine = engine_of(kind, 3, "bf16")
    losses_of(engine, kind, 2)
    engine.save_checkpoint(folder, trainable_only=trainable_only)
    engine.export(f"{folder}/export", "fp32")
    wanted, kept = losses_of(engine, kind, 2, first=2), engine.state_dict()
    engine.destroy()
    engine = engine_of(kind, 1, "bf16")
    losses_of(engine, kind, 1, first=7)
    engine.load_checkpoint(folder)
    found = losses_of(engine, kind, 2, first=2)
    engine.destroy()
    return wanted, found, kept


@pytest.mark.each_value
@pytest.mark.parametrize("trainable_only", [False, True])
@pytest.mark.parametrize(
    "kind", by_day(("nf4 in fp16", "int8", "torchao int8", "torchao nf4"), "nf4 in fp16", "torchao nf4")
)
def test_checkpoints_hold_quantised_weights_as_they_are(tmp_path: Path, kind: str, trainable_only: bool) -> None:
    wanted, found, kept = run_ranks(2, save_and_load, str(tmp_path), kind, trainable_only)[0]
    assert found == pytest.approx(wanted, rel=1e-6)
    exported = {}
    for file in (tmp_path / "export").glob("*.safetensors"):
        exported |= load_file(file)
    plain = build(kind, torch.bfloat16).blocks[0].qkv.base
    name = "blocks.0.qkv.base.weight"
    for path, inner in inner_tensors(plain.weight):
        assert torch.equal(as_plain(exported[name + path]), as_plain(inner))
    assert exported["blocks.0.up.weight"].dtype == torch.float32
    assert torch.equal(as_plain(kept[name]), as_plain(plain.weight))


def as_plain(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([inner.reshape(-1).view(torch.uint8) for _, inner in inner_tensors(weight)])


def used_before_and_after(stage: int, used: bool) -> tuple[list[float], list[float], bool]:
    """Losses with an engine and after it, and whether layers read the memory of their weights. ``used``: before it, too."""
    module = build("int8", torch.bfloat16)
    if used:  # then bitsandbytes keeps its reference elsewhere
        case("int8").loss(module.to(torch.bfloat16), Place())
    make = lambda params: torch.optim.AdamW(params, lr=LR)  # noqa: E731
    engine = zerorun.initialize(module, make_config(stage, precision="bf16"), optimizer=make, topology=shared_topology())
    losses_of(engine, "int8", 2)
    place = Place(dist.get_rank(), 9)
    with torch.no_grad():
        found = [case("int8").loss(engine, place).item()]
        engine.destroy()
        after = [case("int8").loss(module, place).item()]
    layers = [block.qkv.base for block in module.blocks]
    return found, after, all(layer.state.CB.data_ptr() == layer.weight.data_ptr() for layer in layers)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("stage", by_day((1, 3), 3))
def test_int8_layers_follow_their_weights(stage: int, used: bool) -> None:
    for found, after, follows in run_ranks(2, used_before_and_after, stage, used):
        assert found == after and follows


def load_into_another(folder: str) -> str:
    def engine_with(offset: float) -> zerorun.Engine:
        module = build("nf4 in fp16")
        for block in module.blocks:
            block.qkv.base.weight.quant_state.offset = torch.tensor(offset)
        return zerorun.initialize(module, make_config(1), topology=shared_topology())

    engine = engine_with(0.25)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = engine_with(0.75)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder)
    engine.destroy()
    return str(error.value)


def test_scales_that_cannot_be_set_are_an_error(tmp_path: Path) -> None:
    """Part of them is in a number that the layer keeps to itself."""
    assert "packed weights would be read wrongly" in run_ranks(2, load_into_another, str(tmp_path))[0]


def look_at_packed(kind: str) -> list[bool]:
    """Whether values are right in GatheredParameters: made inside Init, in an engine, and after it."""
    wanted = as_plain(build(kind, torch.bfloat16).blocks[0].qkv.base.weight)
    with zerorun.zero.Init():
        module = build(kind, torch.bfloat16)
    made = module.blocks[0].qkv.base.weight

    def read() -> bool:
        with zerorun.zero.GatheredParameters(made):
            return torch.equal(as_plain(made), wanted)

    found = [all(part_of(inner) is not None for _, inner in inside(made)), read()]
    state = module.state_dict()
    with pytest.raises(ReleasedParameterError):
        state["blocks.0.qkv.base.weight"].clone()
    make = lambda params: torch.optim.AdamW(params, lr=LR)  # noqa: E731
    engine = zerorun.initialize(module, make_config(3, precision="bf16"), optimizer=make, topology=shared_topology())
    found.append(read())
    losses_of(engine, kind, 1)
    found.append(read())
    engine.destroy()
    return [*found, torch.equal(as_plain(made), wanted)]


@pytest.mark.parametrize("kind", by_day(("nf4 in fp16", "torchao nf4", "wrapper"), "wrapper"))
def test_packed_weights_may_be_read_though_they_look_like_nan(kind: str) -> None:
    for found in run_ranks(2, look_at_packed, kind):
        assert found == [True] * 5


class _Opaque(torch.Tensor):
    """Acts for itself, and does not say what it consists of."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (3,)) if "detach" in str(func) else NotImplemented


def refusals() -> list[str]:
    """What initialize() says of weights that it cannot train or keep."""

    def float8(module: nn.Module) -> None:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(module.blocks, config=config)

    def nf4(module: nn.Module) -> None:
        module.blocks[0].up = KINDS["nf4 in fp16"](module.blocks[0].up.weight.detach())
        module.blocks[0].up.weight.requires_grad_(True)

    def opaque(module: nn.Module) -> None:
        made = torch.Tensor._make_wrapper_subclass(_Opaque, (3,))
        module.register_parameter("extra", nn.Parameter(made, requires_grad=False))

    found = []
    for stage, change in ((0, float8), (3, float8), (3, nf4), (1, opaque)):
        module = reset(Gpt(2))
        change(module)
        with pytest.raises(ModelError) as error:
            zerorun.initialize(module, make_config(stage), topology=shared_topology())
        found.append(str(error.value))
        with pytest.raises(ModelError):
            zerorun.estimate_memory(module, make_config(stage), 2)
    return found


def test_what_could_not_train_is_refused_by_name() -> None:
    float8, sharded, nf4, opaque = run_ranks(2, refusals)[0]
    assert float8 == sharded
    assert "'blocks.0.qkv.weight' is a torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor" in float8
    assert "enable_fsdp_float8_all_gather=False" in float8
    assert "'blocks.0.up.weight' is a bitsandbytes.nn.modules.Params4bit and requires a gradient" in nf4
    assert "'extra'" in opaque and "__tensor_flatten__" in opaque


def other_scales() -> str:
    module = build("nf4 in fp16", seed=dist.get_rank())
    with pytest.raises(ModelError) as error:
        zerorun.initialize(module, make_config(1), topology=shared_topology())
    return str(error.value)


def test_scales_that_differ_between_ranks_are_refused() -> None:
    """Packed values become those of rank 0, and would be read with this rank's scales."""
    assert "another model than rank 0: 'blocks.0.qkv.base.weight.absmax" in run_ranks(2, other_scales)[0]


def evaluate_repacking(stage: int) -> str:
    module = build("nf4 in uint8")
    for block in module.blocks:
        block.qkv.base.register_forward_hook(lambda layer, *_: setattr(layer.weight, "data", layer.weight.data.clone()))
    engine = zerorun.initialize(module, make_config(stage), topology=shared_topology())
    with pytest.raises(ModelError) as error:
        case("nf4 in uint8").loss(engine, Place())
    engine.destroy()
    return str(error.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_layer_that_repacks_its_weight_is_an_error_at_once(stage: int) -> None:
    assert "support_avx512bf16_for_cpu = False" in run_ranks(2, evaluate_repacking, stage)[0]


def evaluate_where_layers_would_repack(stage: int) -> list[float]:
    """(the loss in evaluation, of layers that never repack, and of those that would on this CPU)."""
    losses = []
    for repacks in (False, True):
        module = build("nf4 in uint8")
        for block in module.blocks:
            block.qkv.base.support_avx512bf16_for_cpu = repacks
        engine = zerorun.initialize(module, make_config(stage), topology=shared_topology())
        engine.eval()
        with torch.no_grad():
            losses += [float(case("nf4 in uint8").loss(engine, Place())) for _ in range(2)]
        engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_no_layer_repacks_its_weight_for_the_cpu(stage: int) -> None:
    """bitsandbytes would, once and for all, in the first evaluation on a CPU with instructions for bf16."""
    assert len(set(run_ranks(2, evaluate_where_layers_would_repack, stage)[0])) == 1


def ledgers(kind: str) -> list[tuple[int, int, int]]:
    """(parameters in the ledger, estimated, both without scales, bytes of the packed ones) at stages 0 and 3."""
    found = []
    for stage in (0, 3):
        module = build(kind, torch.bfloat16, times=8)
        packed = sum(stored_bytes(tensor) for name, tensor in named_members(module) if ".base." in name)
        scales = scale_bytes(module)
        estimate = zerorun.estimate_memory(module, make_config(stage, precision="bf16"), 2, device="cpu")
        engine = zerorun.initialize(module, make_config(stage, precision="bf16"), topology=shared_topology())
        found.append((engine.memory_report()["parameters"] - scales, estimate.kinds["parameters"] - scales, packed))
        engine.destroy()
    return found


@pytest.mark.parametrize(
    "kind",
    by_day(
        ("nf4 in fp16", "int8", "torchao int8", "wrapper", "transposed wrapper", "integers", "buffers"),
        "wrapper",
        "buffers",
    ),
)
def test_the_ledger_counts_the_bytes_that_are_stored(kind: str) -> None:
    whole, sharded = run_ranks(2, ledgers, kind)[0]
    plain = sum(p.numel() * 2 for n, p in build(kind).named_parameters() if ".base." not in n)
    padding = 16 * 4 * len(list(named_members(build(kind))))
    packed = whole[2]
    assert padding < min(plain, packed) // 2, "then it cannot be told whether they are divided"
    assert (whole[0], sharded[0]) == (whole[1], sharded[1])
    assert plain + packed <= whole[0] <= plain + packed + padding
    kept = packed // 2 if kind in SHARDED else packed
    assert plain // 2 + kept <= sharded[0] <= plain // 2 + kept + padding


@pytest.mark.parametrize("kind", ["nf4 in fp16", "torchao int8"])
def test_packed_layers_cannot_be_divided(kind: str) -> None:
    assert "blocks.0.qkv.base is a Linear" in run_ranks(2, divide, kind)[0]


def divide(kind: str) -> str:
    config = make_config(1, tensor_parallel={"size": 2, "plan": {"blocks.*.qkv.base": "colwise_gather_output"}})
    with pytest.raises(ModelError) as error:
        zerorun.initialize(build(kind), config)
    return str(error.value)
