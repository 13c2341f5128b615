"""estimate_memory on models that no machine here could hold: the published tables, and that it allocates nothing."""

from __future__ import annotations

import copy
import json
from itertools import product
from typing import Any

import pytest
import torch
from covering import by_day
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerorun
from zerorun.errors import ConfigError, TopologyError
from zerorun.log import in_bytes
from zerorun.model_setup.checked_arguments import take_in
from zerorun.plan.byte_ledger import planned_bytes, with_states
from zerorun.plan.make_plan import make_plan, planned_topology
from zerorun.plan.optimizer_states import OptimizerStates

GB = 10**9


def config(stage: int = 0, precision: str = "bf16", optimizer: str = "AdamW", **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4}},
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
    }


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Block(nn.Module):
    """Attention with ``kv`` dimensions of keys, and an MLP of ``inner`` dimensions, gated or not. ``gains``: norms."""

    def __init__(self, width: int, kv: int, inner: int, *, gated: bool = True, gains: int = 2) -> None:
        super().__init__()
        self.query, self.out = linear(width, width), linear(width, width)
        self.key, self.value = linear(width, kv), linear(width, kv)
        self.up, self.down = linear(width, inner), linear(inner, width)
        if gated:
            self.gate = linear(width, inner)
        self.norms = nn.ParameterList(nn.Parameter(torch.empty(width)) for _ in range(gains))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int, *, tied: bool = False, **block: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, **block) for _ in range(layers))
        self.head = linear(width, vocabulary)
        if tied:
            self.head.weight = self.embed.weight


def on_meta(make: Any, *args: Any, **kwargs: Any) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = make(*args, **kwargs)
    return module


def blocks_of(count: int, width: int) -> nn.Module:
    """``count`` square weights in a list."""
    return on_meta(lambda: nn.ModuleDict({"blocks": nn.ModuleList(linear(width, width) for _ in range(count))}))


# OLMo 1B and 7B (arXiv:2402.00838) and Llama 2 70B's shape for the third; Falcon 40B (arXiv:2311.16867); Llama 3.1 405B.
OLMO = {
    1: {"layers": 16, "width": 2048, "vocabulary": 50304, "kv": 2048, "inner": 8192, "gains": 0, "tied": True},
    7: {"layers": 32, "width": 4096, "vocabulary": 50304, "kv": 4096, "inner": 11008, "gains": 0},
    70: {"layers": 80, "width": 8192, "vocabulary": 32000, "kv": 1024, "inner": 28672},
}
FALCON = {"layers": 60, "width": 8192, "vocabulary": 65024, "kv": 512, "inner": 32768, "gated": False, "gains": 4}
LLAMA_405B = {"layers": 126, "width": 16384, "vocabulary": 128256, "kv": 1024, "inner": 53248}


# -- the published tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_table_of_the_zero_paper(stage: int, expected: float) -> None:
    """7.5B parameters on 64 ranks (Rajbhandari et al. 2020, arXiv:1910.02054, Fig. 1).

    The paper counts 2 bytes for a gradient where zerorun sums in fp32, and no slots.
    """
    estimate = zerorun.estimate_memory(blocks_of(75, 10_000), config(stage, "fp16"), 64, device="cuda")
    assert estimate.parameters == 7_500_000_000
    kinds = estimate.kinds
    papers = kinds["parameters"] + kinds["gradients"] / 2 + kinds["master"] + kinds["moments"]
    assert round(papers / GB, 1) == expected


@pytest.mark.parametrize(("billions", "expected"), [(1, 14), (7, 98), (70, 980)])
def test_fourteen_bytes_for_a_parameter(billions: int, expected: int) -> None:
    """bf16 weights, fp32 masters and Adam's moments: 14, 98 and 980 GB for models of the nominal sizes."""
    estimate = zerorun.estimate_memory(on_meta(Decoder, **OLMO[billions]), config(), 1, device="cuda")
    states = sum(estimate.kinds[kind] for kind in ("parameters", "master", "moments"))
    assert states / estimate.parameters == pytest.approx(14, rel=1e-3)
    assert states / estimate.parameters * billions == pytest.approx(expected, rel=1e-3)
    assert estimate.parameters == pytest.approx(billions * GB, rel=0.2)  # the shape is that of the name


def test_falcon_40b() -> None:
    """720 GB is 18 bytes for a parameter: gradients in fp32. With 2 bytes for them it would be 640."""
    estimate = zerorun.estimate_memory(on_meta(Decoder, **FALCON, tied=True), config(), 1, device="cuda")
    assert estimate.parameters == pytest.approx(40 * GB, rel=0.05)
    held = estimate.device_bytes / estimate.parameters
    assert held * 40 == pytest.approx(720, rel=1e-3)
    assert held * 40 - 2 * 40 == pytest.approx(640, rel=1e-3)


# -- nothing is allocated ----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest storage that an operation makes outside of the meta device, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return out


@pytest.mark.each_value
@pytest.mark.parametrize("world_size", by_day((8, 16384), 8))
@pytest.mark.parametrize("device", by_day(("cuda", "cpu"), "cuda"))
def test_405b_allocates_nothing(device: str, world_size: int) -> None:
    module = on_meta(Decoder, **LLAMA_405B)
    placed = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    with Largest() as largest:
        estimate = zerorun.estimate_memory(module, config(3, **placed), world_size, device=device)
    assert largest.bytes <= 2**20
    assert estimate.parameters == pytest.approx(405 * GB, rel=0.005)
    # Masters, gradients and moments, and the shards of the blocks; embedding and head have slots of their own.
    blocks = estimate.parameters - 2 * 128256 * 16384
    states = estimate.host_bytes - estimate.kinds.get("host staging", 0)
    assert states == pytest.approx((16 * estimate.parameters + 2 * blocks) / world_size, rel=1e-3)


def test_a_real_model_stays_as_it_is() -> None:
    module = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)))
    optimizer = torch.optim.RMSprop(module.parameters(), lr=1e-3, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which puts a step of its own on the optimizer
    before = [(param, param.data_ptr(), param.clone()) for param in module.parameters()]
    settings = copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups])
    plain = {key: value for key, value in config(2, "fp32").items() if key != "optimizer"}
    estimate = zerorun.estimate_memory(module, plain, 2, optimizer=optimizer, device="cpu")
    assert estimate.kinds["moments"] == pytest.approx(2 * 4 * 3 * 420 / 2, rel=0.2)  # square_avg and momentum_buffer
    assert not optimizer.state
    assert settings == [{**group, "params": None} for group in optimizer.param_groups]
    assert all(now is param for now, (param, _, _) in zip(module.parameters(), before, strict=True))
    assert all(param.data_ptr() == address and torch.equal(param, value) for param, address, value in before)


# -- optimizers --------------------------------------------------------------------------------------------------


STATES = {"SGD": 0, "Lion": 1, "Adagrad": 1, "AdamW": 2, "Adamax": 2, "RMSprop": 1, "AdamSAGE": 3, "Sophia": 2}


@pytest.mark.parametrize(("optimizer", "states"), STATES.items())
def test_states_by_optimizer(optimizer: str, states: int) -> None:
    chosen = config(1, optimizer=optimizer)
    chosen["optimizer"]["params"] |= {"bs": 4096} if optimizer == "Sophia" else {}
    estimate = zerorun.estimate_memory(blocks_of(2, 1024), chosen, 4, device="cpu")
    assert estimate.kinds["moments"] == states * 4 * 2 * 1024**2 // 4


def test_factored_states() -> None:
    """Adafactor keeps a number for each row and column of a matrix: on a rank its own rows, and all columns.

    torch's is asked for by the keyword foreach. It is given whole matrices: a unit of one is whole on the first rank.
    """
    given = config(1, optimizer="Adafactor")
    estimate = zerorun.estimate_memory(blocks_of(4, 512), given, 2, device="cpu")
    assert estimate.kinds["moments"] == 4 * (256 + 512) * 4
    given["optimizer"]["params"] = {"foreach": True}
    assert zerorun.estimate_memory(blocks_of(4, 512), given, 2, device="cpu").kinds["moments"] == 4 * 2 * 4 * 512


@pytest.mark.parametrize("optimizer", by_day(("Adafactor", "Lamb", "AdamW"), "Adafactor"))
def test_ranks_hold_equally_much(optimizer: str) -> None:
    """Also with optimizers that go by sums: at most 1 % more than the mean."""
    for stage, ranks in product((1, 2, 3), (2, 3, 8, 64)):
        given = config(stage, optimizer=optimizer)
        module = on_meta(Decoder, 2, 512, 4096, kv=128, inner=1376)
        wanted, raw = take_in(module, given, None, None, None, ranks)
        states = OptimizerStates(raw, torch.device("cpu"))
        found = []
        for rank in range(ranks):
            plan = make_plan(module, wanted, raw, planned_topology(wanted, ranks, 8, rank), "nccl", "cuda")
            found.append(sum(planned_bytes(with_states(plan, states)).values()))
        assert max(found) <= 1.01 * sum(found) / ranks, (stage, ranks)
        estimate = zerorun.estimate_memory(module, given, ranks, device="cuda", transport="nccl")
        assert sum(estimate.kinds.values()) == max(found)


class Picky(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("only on Tuesdays")


def test_an_optimizer_that_cannot_be_tried_is_named() -> None:
    plain = {key: value for key, value in config(1).items() if key != "optimizer"}
    estimate = zerorun.estimate_memory(blocks_of(2, 64), plain, 2, optimizer=Picky, device="cpu")
    assert estimate.kinds["moments"] == 0
    assert "only on Tuesdays" in str(estimate)


# -- the rest ----------------------------------------------------------------------------------------------------


def test_offload_moves_the_bytes() -> None:
    module = blocks_of(8, 1024)
    resident = zerorun.estimate_memory(module, config(2), 4, device="cuda")
    placed = zerorun.estimate_memory(module, config(2, offload_optimizer={"device": "cpu"}), 4, device="cuda")
    assert resident.host_bytes == 0
    assert resident.device_bytes - placed.device_bytes == placed.host_bytes - placed.kinds["host staging"]
    on_disk = {"offload_optimizer": {"device": "nvme", "nvme_path": "nowhere"}}
    moved = zerorun.estimate_memory(module, config(2, **on_disk), 4, device="cuda")
    assert moved.disk_bytes == moved.kinds["disk master"] + moved.kinds["disk moments"] == 3 * placed.kinds["host master"]
    assert moved.device_bytes == placed.device_bytes
    assert moved.host_bytes == placed.kinds["host gradients"] + moved.kinds["host staging"]
    assert placed.node_host_bytes >= 4 * placed.host_bytes
    assert placed.device_bytes == sum(size for kind, size in placed.kinds.items() if not kind.startswith("host"))


def test_it_prints_a_table() -> None:
    text = str(zerorun.estimate_memory(blocks_of(8, 1024), config(3), 16, device="cuda"))
    for words in ("stage 3, 16 ranks (8 on a node, nccl), 8,388,608 parameters", "moments", "MiB", "zero.Init()"):
        assert words in text


def test_it_says_what_slots_are_and_what_a_node_needs_with_init() -> None:
    model = Decoder(2, 64, 128, kv=64, inner=128)
    found = zerorun.estimate_memory(model, config(3), 16, device="cuda")
    assert "slots (units in use, embedding, head)" in str(found)
    assert found.node_host_with_init_bytes == 8 * max(found.host_bytes, found.start_up_with_init.host)
    assert found.node_host_with_init_bytes < found.node_host_bytes
    assert f"host memory of one node with zero.Init() {in_bytes(found.node_host_with_init_bytes):>15}" in str(found)


def test_activations_are_added_to_the_peak() -> None:
    module = blocks_of(2, 64)
    plain, given = (zerorun.estimate_memory(module, config(), 1, device="cuda", activation_bytes=n) for n in (0, 10**9))
    assert given.peak_bytes == plain.step_peak_bytes + 10**9


def test_wrong_input() -> None:
    module = blocks_of(2, 64)
    with pytest.raises(ConfigError):
        zerorun.estimate_memory(module, {**config(), "zero_optimisation": {}}, 2)
    with pytest.raises(TopologyError):
        zerorun.estimate_memory(module, config(), 0)
    with pytest.raises(TopologyError, match="pigeons"):
        zerorun.estimate_memory(module, config(), 2, transport="pigeons")
    with pytest.raises(ConfigError):
        zerorun.estimate_memory(module, config(3, shard_degree=3), 4)


def test_a_file_will_do(tmp_path: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config(1)))
    assert zerorun.estimate_memory(blocks_of(2, 64), path, 2).stage == 1


@pytest.mark.parametrize(("precision", "rounded"), (("bf16", 2), ("fp32", 0)))
def test_two_staging_buffers_hold_the_largest_unit_on_its_way(precision: str, rounded: int) -> None:
    """Gradients come down in fp32; weights go up rounded, or as the masters that they are."""
    model = on_meta(lambda: nn.ModuleDict({"blocks": nn.ModuleList(linear(64, width) for width in (64, 128, 64))}))
    offloaded = config(2, precision, offload_optimizer={"device": "cpu"})
    found = zerorun.estimate_memory(model, offloaded, 2, device="cuda").kinds
    assert found["host staging"] == 2 * (64 * 128 // 2) * (4 + rounded)
    assert "host staging" not in zerorun.estimate_memory(model, config(2, precision), 2, device="cuda").kinds


@pytest.mark.parametrize(("numel", "world", "part"), ((8, 4, 2), (9, 4, 3), (5, 4, 2), (1, 4, 1), (7, 1, 7)))
def test_init_leaves_every_rank_as_much_of_a_parameter(numel: int, world: int, part: int) -> None:
    """The parts of ``Init`` are equal: where the elements do not divide, the last ranks have padding."""
    from zerorun.memory.estimate import _held_in_parts
    from zerorun.memory.peaks import Bytes, Holding

    param = nn.Parameter(torch.empty(numel, device="meta"))
    assert _held_in_parts(param, "cpu", world) == Holding(Bytes(4 * part), put_together=4 * numel)


class Halves(nn.Module):
    """A block of which no small copy can be made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())  # type: ignore[no-any-return]


def test_trying_out_large_blocks_is_counted() -> None:
    """The two are one block, because there is no list of them: 14 times their weights, on each of two ranks."""
    with torch.device("meta"):
        model = nn.Sequential(Halves(512), Halves(512))
    weights = 4 * sum(param.numel() for param in model.parameters())
    wanted = {**config(stage=1, precision="fp32"), "tensor_parallel": {"size": 2}}
    inferred = zerorun.estimate_memory(model, wanted, 2, device="cuda")
    assert inferred.start_up.host == 15 * weights
    assert inferred.start_up_with_init.host == 14.5 * weights
    assert inferred.node_host_bytes >= 2 * inferred.start_up.host
    assert inferred.start_up.device < 2 * weights
