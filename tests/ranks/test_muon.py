"""Muon: equal to torch.optim.Muon and AdamW in one process, however the model is divided."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, VOCAB, WIDTH, Place
from reference import Result, differences, train_reference
from test_estimate import Deep, observe
from test_parallel_matrix import VOCABULARY, batch_of, build, compare, data_of, one_step
from test_parallel_matrix import reference as parallel_reference
from test_parallel_matrix import train as parallel_train
from test_simulated_device import look, train_both
from torch import nn
from training import finish, make_config, make_engine, merged, shared_topology, train

import zerorun
from zerorun.optim.muon import orthogonalized
from zerorun.plan.matrix_exchange import FROM_OWNERS, TO_OWNERS
from zerorun.plan.step_collectives import step_collectives
from zerorun.zero import matrix_updates

STEPS = 4
ADAM = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
PARAMS = {"lr": 0.02, "adam_lr": 2e-3, "weight_decay": 0.1, "eps": 1e-4, "ns_dtype": "fp32"}


class PlainMuon(torch.optim.Optimizer):
    """torch's Muon, in fp32, and its AdamW for the rest. Matrices are those without a side that is in ``apart``."""

    def __init__(self, params: Any, lr: float = 0.02, *, apart: tuple[int, ...] = (VOCAB,), **unused: Any) -> None:
        params = list(params)
        super().__init__(params, {})
        matrices = [param for param in params if param.dim() == 2 and not {*apart} & {*param.shape}]
        others = [param for param in params if all(param is not matrix for matrix in matrices)]
        how = {"lr": lr, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
        self.both = [torch.optim.Muon(matrices, **how), torch.optim.AdamW(others, **ADAM)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rounds, torch.Tensor.bfloat16 = torch.Tensor.bfloat16, torch.Tensor.clone  # type: ignore[method-assign, assignment]
        try:
            for optimizer in self.both:
                optimizer.step()
        finally:
            torch.Tensor.bfloat16 = rounds  # type: ignore[method-assign]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(reference.OPTIMIZERS, "Muon", (PlainMuon, PARAMS))
    return


def config_of(stage: int, *, accumulation: int = 2, params: Any = (), **changes: Any) -> dict[str, Any]:
    given = make_config(stage, accumulation=accumulation, clip=0.5, **changes)
    return {**given, "optimizer": {"type": "Muon", "params": {**PARAMS, **dict(params)}}}


def train_muon(case: str, config: dict[str, Any]) -> Result:
    return train(CASES[case], config, STEPS)


ZERO: dict[str, dict[str, Any]] = {
    "on the device": {},
    "in host memory": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "partly": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "on a disk": {"offload_optimizer": {"device": "nvme"}},
}
ROWS = [
    (3, "on the device"),
    (2, "on a disk"),
    (1, "partly"),
    (0, "on the device"),
    (3, "in host memory"),
    (3, "on a disk"),
]


@pytest.mark.each_value
@pytest.mark.parametrize("world", [2, 3, 4, 1])
@pytest.mark.parametrize("case", ["plain", "tied", "unused_alternating_steps"])
@pytest.mark.parametrize(("stage", "where"), ROWS)
@pytest.mark.usefixtures("plain")
def test_deepspeed_8441_equals_one_process(stage: int, where: str, case: str, world: int, tmp_path: Path) -> None:
    """At stage 0, too, where DeepSpeed's update is that of SGD."""
    zero = deepcopy(ZERO[where])
    if where == "on a disk":
        zero["offload_optimizer"]["nvme_path"] = str(tmp_path)
    config = config_of(stage, zero_optimization=zero)
    wanted = train_reference(CASES[case], world_size=world, steps=STEPS, accumulation=2, clip=0.5, optimizer="Muon")
    for found in run_ranks(world, train_muon, case, config):
        assert not differences(found, wanted, 1e-5)


# Attention stays whole, and 128 columns are divided by 3.
MLP = {"transformer.h.*.mlp.c_fc": "colwise", "transformer.h.*.mlp.c_proj": "rowwise"}
# Model, stage, tensor, pipe, data, further keys.
PARTS: dict[str, tuple[str, int, int, int, int, dict[str, Any]]] = {
    "tensor, sharded": ("llama", 3, 2, 1, 2, {}),
    "tensor, whole": ("gpt2", 0, 2, 1, 2, {}),
    "tensor, alone": ("llama", 1, 2, 1, 1, {}),
    "stages": ("gpt2", 2, 1, 2, 2, {}),
    "both": ("llama", 1, 2, 2, 1, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "uneven, and whole": ("gpt2", 3, 3, 1, 1, {"tensor_parallel": {"plan": MLP}}),
}


def gpt2_apart(params: Any) -> torch.optim.Optimizer:
    """The 16 positions of GPT-2 are an embedding, too."""
    return PlainMuon(params, apart=(VOCABULARY, 16))


def llama_apart(params: Any) -> torch.optim.Optimizer:
    return PlainMuon(params, apart=(VOCABULARY,))


APART = {"gpt2": gpt2_apart, "llama": llama_apart}


@pytest.mark.parametrize("which", by_day(PARTS, "uneven, and whole"))
def test_megatron_6380_a_divided_model_equals_one_process(which: str) -> None:
    """An update by blocks of tensor ranks would be another one."""
    name, stage, tensor, pipe, data, changes = PARTS[which]
    config = config_of(stage, accumulation=2, **changes)
    found = run_ranks(tensor * pipe * data, parallel_train, name, tensor, pipe, config)
    compare(found, parallel_reference(name, data, 2, optimizer_of=APART[name]), 1e-5)


def sent_and_held(name: str, tensor: int, pipe: int, config: dict[str, Any]) -> tuple[Any, ...]:
    """Of the third step, what goes to owners and back, as (calls, bytes): counted, and planned. Then what is held."""
    degrees = {"tensor_parallel": {"size": tensor}, "pipeline": {"stages": pipe}}
    engine = zerorun.initialize(build(name), merged(config, degrees))
    data = data_of(engine.topology.data_parallel_rank, 3 * 2)
    counted = []
    for _ in range(3):
        one_step(engine, data, 2, pipe)
        report = engine.communication_report()
        counted.append([(report[label]["calls"], report[label]["bytes"]) for label in (TO_OWNERS, FROM_OWNERS)])
    steps = [[(c - c0, b - b0) for (c0, b0), (c, b) in zip(*pair, strict=True)] for pair in pairwise(counted)]
    calls = step_collectives(engine.plan)
    own = [[call.bytes for call in calls if call.label == label] for label in (TO_OWNERS, FROM_OWNERS)]
    held = engine.memory_report()["slots"], engine.sharded.buffer_bytes
    exchange = engine.plan.matrices
    engine.destroy()
    return steps, [(len(sizes), sum(sizes)) for sizes in own], held, exchange


@pytest.mark.parametrize("which", ["tensor, whole", "uneven, and whole"])
def test_what_is_sent_is_planned(which: str) -> None:
    name, stage, tensor, pipe, data, changes = PARTS[which]
    config = config_of(stage, accumulation=2, **changes)
    found = run_ranks(tensor * pipe * data, sent_and_held, name, tensor, pipe, config)
    owners = [[(m.name, m.owner) for m in exchange.matrices] for *_, exchange in found]
    assert owners[1:] == owners[:-1]
    assert len({m.owner for *_, exchange in found for m in exchange.matrices}) == len(found)
    for steps, planned, (_, buffers), exchange in found:
        assert steps == [planned] * 2
        assert buffers == exchange.bytes


# -- what a step does, and when -------------------------------------------------------------------------------------------

BF16 = {"ns_dtype": "bf16"}


def train_all(configs: list[dict[str, Any]]) -> list[tuple[Result, list[int]]]:
    """By configuration, the result, and how many matrices this rank has orthogonalized in each step."""
    found, count = [], [0]

    def counted(*given: Any) -> torch.Tensor:
        count[0] += 1
        return orthogonalized(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_updates, "orthogonalized", counted)
        for config in configs:
            engine, result, counts = make_engine(CASES["plain"], config), Result(), []
            for step in range(2):
                count[0] = 0
                for micro in range(engine.gradient_accumulation_steps()):
                    engine.backward(CASES["plain"].loss(engine, Place(dist.get_rank(), step, micro)))
                    engine.step()
                counts.append(count[0])
            finish(engine, result)
            found.append((result, counts))
    return found


@pytest.mark.parametrize("world", by_day([2, 3], 3))
def test_deepspeed_8443_torchtitan_3353_each_matrix_is_orthogonalized_once_in_a_step(world: int) -> None:
    """Not once in a micro-batch, and not on every rank; with the same bits everywhere."""
    offload = {"offload_optimizer": {"device": "cpu"}}
    settings: list[dict[str, Any]] = [{"stage": stage} for stage in (0, 1, 2, 3)]
    settings += [{"stage": 3, "zero_optimization": offload}, {"stage": 2, "zero_optimization": {"shard_degree": 1}}]
    configs = [config_of(**row, accumulation=3, precision="bf16", params=BF16) for row in settings]
    ranks = run_ranks(world, train_all, configs)
    first = ranks[0][0][0]
    for number, row in enumerate(settings):
        replicas = world if "shard_degree" in row.get("zero_optimization", {}) else 1
        for rank in ranks:
            found, _ = rank[number]
            assert found.losses == first.losses
            assert all(torch.equal(found.weights[name], value) for name, value in first.weights.items()), row
        assert [sum(counts) for counts in zip(*(rank[number][1] for rank in ranks), strict=True)] == [16 * replicas] * 2


MASTERS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16_master_weights_and_grads": True},
    "Kahan": {"bf16_master_weights_and_grads": True, "rounding": "kahan"},
    "remainders": {"store_param_remainders": True},
}


def masters_everywhere(kinds: list[str]) -> list[list[Result]]:
    """For each kind of masters, what all places of states come to; then the same with fp32 masters at one of them."""
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
    rows: list[dict[str, Any]] = [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, **offload}]
    keys = [*(MASTERS[kind] for kind in kinds), {}]
    given = [[{**config_of(**row, accumulation=1, precision="bf16"), "seed": 3} for row in rows] for _ in kinds] + [
        [config_of(3, accumulation=1, precision="bf16")]
    ]
    return [
        [train(CASES["plain"], {**config, "bf16": {**config["bf16"], **more}}, STEPS) for config in configs]
        for more, configs in zip(keys, given, strict=True)
    ]


@pytest.mark.nightly  # by day: test_training_in_bf16.py, and test_muon.py on devices
@pytest.mark.parametrize("kinds", [["bf16"], ["Kahan", "remainders"]])
def test_masters_in_bf16_have_the_same_bits_wherever_they_are(kinds: list[str]) -> None:
    for *found, (wide,) in run_ranks(2, masters_everywhere, kinds):
        for places in found:
            for other in places:
                assert other.losses == places[0].losses
                assert all(torch.equal(value, places[0].weights[name]) for name, value in other.weights.items())
            assert places[0].losses == pytest.approx(wide.losses, rel=5e-3)


def fused(module: nn.Module) -> list[dict[str, Any]]:
    together = [param for name, param in module.named_parameters() if "qkv" in name]
    others = [param for name, param in module.named_parameters() if "qkv" not in name]
    return [{"params": together, "use_muon": True, "ns_parts": [WIDTH] * 3}, {"params": others}]


def train_fused(configs: list[dict[str, Any]]) -> list[Result]:
    case = replace(CASES["plain"], groups=fused)
    return [train(case, config, 3) for config in configs] + [train(CASES["plain"], configs[0], 3)]


def test_parts_of_matrices_are_orthogonalized_apart() -> None:
    configs = [config_of(3), config_of(0), config_of(2, zero_optimization={"shard_degree": 1})]
    for found, *same, together in run_ranks(2, train_fused, configs):
        for other in same:
            assert not differences(other, found, 2e-6)
        assert "weight blocks.0.qkv.weight" in str(differences(together, found, 1e-3))


def test_gram_goes_the_same_way() -> None:
    standard, gram = (
        config_of(2, precision="bf16", params={**BF16, "ns_method": method}) for method in ("standard", "gram")
    )
    for (one, _), (other, _) in run_ranks(2, train_all, [standard, gram]):
        assert not differences(other, one, 0.02)
        assert differences(other, one, 1e-7)


@pytest.mark.usefixtures("plain")
def test_deepspeed_7776_gradients_are_clipped_before_the_momentum() -> None:
    """The direction of one gradient does not change with its size, but that of a sum of large and small ones does."""
    wanted = train_reference(CASES["plain"], world_size=2, steps=STEPS, accumulation=2, clip=0.05, optimizer="Muon")
    config = {**config_of(2), "gradient_clipping": 0.05}
    unclipped = {**config_of(2), "gradient_clipping": 0.0}
    found = run_ranks(2, train_muon, "plain", config)
    assert not differences(found[0], wanted, 1e-5)
    assert differences(run_ranks(2, train_muon, "plain", unclipped)[0], wanted, 1e-3)


@pytest.mark.parametrize(("stage", "offload"), by_day([(0, "none"), (3, "none"), (2, "cpu")], (2, "cpu")))
def test_on_a_device(stage: int, offload: str) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}} if offload == "cpu" else {}
    config = config_of(stage, precision="bf16", zero_optimization=zero, params=BF16)
    for found, on_cpu in run_ranks(2, train_both, config):
        assert not differences(found, on_cpu, 1e-5)
    for races in run_ranks(2, look, config):
        assert not races, "\n".join(races)


# -- checkpoints ---------------------------------------------------------------------------------------------------------

CELLS = [(2, 1, 1, 3), (1, 1, 3, 2), (1, 2, 1, 1), (1, 1, 1, 0), (2, 1, 2, 1)]  # tensor, pipe, data, stage


def go_on(cell: tuple[int, ...], folder: str, loads: bool) -> list[float]:
    """Train for two steps and save, or load, and train for two more; of each the same 6 micro-batches."""
    tensor, pipe, data, stage = cell
    degrees = {"tensor_parallel": {"size": tensor}, "pipeline": {"stages": pipe}}
    engine: Any = zerorun.initialize(build("llama"), merged(config_of(stage, accumulation=12 // data), degrees))
    if loads:
        path, _ = engine.load_checkpoint(folder, "here")
        assert path is not None
    else:
        steps_of(engine, 0, pipe)
        engine.save_checkpoint(folder, "here")
    losses = steps_of(engine, 2, pipe)
    engine.destroy()
    return losses


def steps_of(engine: Any, begin: int, pipe: int) -> list[float]:
    accumulation, rank = engine.gradient_accumulation_steps(), engine.topology.data_parallel_rank
    numbers = ((step, rank * accumulation + micro) for step in (begin, begin + 1) for micro in range(accumulation))
    data = (batch_of(step, number, 0) for step, number in numbers)
    return [one_step(engine, data, accumulation, pipe) for _ in range(2)]


@pytest.mark.parametrize(("saved", "loaded"), by_day(product(CELLS, CELLS), (CELLS[3], CELLS[4])))
def test_a_checkpoint_goes_on_anywhere(saved: tuple[int, ...], loaded: tuple[int, ...], tmp_path: Path) -> None:
    wanted = run_ranks(prod(saved[:3]), go_on, saved, str(tmp_path), False)[0]
    found = run_ranks(prod(loaded[:3]), go_on, loaded, str(tmp_path), True)[0]
    assert found == pytest.approx(wanted, rel=1e-5)


# -- the optimizers of others --------------------------------------------------------------------------------------------


def torchs_own(stage: int) -> Result:
    """torch's Muon, as it is, which takes nothing but matrices."""
    case = CASES["plain"]
    module = case.build()
    for name, param in module.named_parameters():
        param.requires_grad_(param.dim() == 2 and "blocks" in name)
    client = torch.optim.Muon([param for param in module.parameters() if param.requires_grad], lr=0.02)
    config = {key: value for key, value in config_of(stage).items() if key != "optimizer"}
    engine, result = zerorun.initialize(module, config, optimizer=client, topology=shared_topology()), Result()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        for step, micro in product(range(3), range(2)):
            engine.backward(case.loss(engine, Place(dist.get_rank(), step, micro)))
            engine.step()
    finish(engine, result)
    return result


def test_torchs_own_object_gets_whole_matrices() -> None:
    one, three = (run_ranks(2, torchs_own, stage)[0] for stage in (0, 3))
    assert not differences(three, one, 1e-6)


# -- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "world", "offload", "masters"), [(3, 2, False, "bf16"), (1, 3, True, "")])
def test_ranks_hold_the_same_and_as_much_as_estimated(stage: int, world: int, offload: bool, masters: str) -> None:
    """Shards are even, and so are the buffers. What AdamW updates has a state more, and is not divided by its kind."""
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    config = config_of(stage, accumulation=1, precision="bf16", zero_optimization=zero, params=BF16)
    config["bf16"] = {**config["bf16"], **MASTERS.get(masters, {})}
    reports = run_ranks(world, observe, 256, config, False)
    totals = [sum(report[0].values()) for report in reports]
    assert max(totals) <= 1.01 * sum(totals) / world
    with torch.device("meta"):
        module = Deep(256)
    estimate = zerorun.estimate_memory(module, config, world, device="cpu", transport=reports[0][3])
    assert dict(estimate.kinds) == reports[totals.index(max(totals))][0]
