"""Muon: equal to torch.optim.Muon and AdamW in one process, however the model is divided."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from harness import run_ranks
from models import CASES, VOCAB
from reference import Result, differences, train_reference
from test_parallel_matrix import VOCABULARY, build, compare, data_of, one_step
from test_parallel_matrix import reference as parallel_reference
from test_parallel_matrix import train as parallel_train
from training import make_config, merged, train

import zerorun
from zerorun.plan.matrices import FROM_OWNERS, TO_OWNERS
from zerorun.plan.step import step_collectives

STEPS = 10
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
    "two replicas": {"shard_degree": 2},
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
def test_equals_one_process(stage: int, where: str, case: str, world: int, tmp_path: Path) -> None:
    """At stage 0, too, where DeepSpeed's update is that of SGD (deepspeed_8441)."""
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


@pytest.mark.parametrize("which", PARTS)
def test_a_divided_model_equals_one_process(which: str) -> None:
    """An update by blocks of tensor ranks would be another one (megatron_6380)."""
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


@pytest.mark.parametrize("which", ["tensor, whole", "tensor, sharded", "uneven, and whole"])
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
