"""Optimizers that go by sums, on flat shards: equal to their formulas on whole parameters in one process.

However the model is divided. Given 1-D slices as if they were parameters, Adafactor has stopped learning elsewhere
(DeepSpeed's pull request 2152, pytorch#109581).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from contextlib import nullcontext
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import reference
import test_parallel_matrix as parallel
import torch
from covering import by_day
from harness import run_ranks
from models import CASES
from reference import Result, differences, distance, train_reference
from safetensors.torch import load_file
from simulation import refuse_different_calls, simulated_device
from training import finish, make_config, make_engine, run_steps, train

import zerorun
from zerorun.deepspeed.kernel_names import FusedLamb
from zerorun.errors import ModelError
from zerorun.optim.lamb import Lamb
from zerorun.plan.step_collectives import step_collectives
from zerorun.zero.value_access import safe_get_full_optimizer_state

STEPS = 3
LAMB = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1, "max_coeff": 2.0, "min_coeff": 0.05}


class PlainLamb(torch.optim.Optimizer):
    """The formulas, in fp64 and one parameter after the other."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"bias_correction": True, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, grad = self.state[param], param.grad.double()
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * grad
                v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * grad * grad
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * param.double()
                length, asked = float(param.double().norm()), float(update.norm())
                ratio = min(max(length / asked, group["min_coeff"]), group["max_coeff"]) if length and asked else 1.0
                if group["bias_correction"]:
                    ratio *= math.sqrt(1 - beta2**t) / (1 - beta1**t)
                param.copy_(param.double() - lr * ratio * update)


# eps keeps Adafactor from magnifying the rounding of gradients that are nearly zero.
ADAFACTOR = {"lr": 0.05, "eps": (1e-3, 1e-3), "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Lamb": (PlainLamb, LAMB),
    "Adafactor": (torch.optim.Adafactor, ADAFACTOR),
}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, optimizer in OPTIMIZERS.items():
        monkeypatch.setitem(reference.OPTIMIZERS, name, optimizer)


def config_of(optimizer: str, stage: int, **changes: Any) -> dict[str, Any]:
    config = make_config(stage, accumulation=2, clip=0.5, **changes)
    return {**config, "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer][1]}}


def train_case(case: str, config: dict[str, Any]) -> Result:
    return train(CASES[case], config, STEPS)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "0": (0, {}),
    "1": (1, {}),
    "2 offloaded": (2, OFFLOAD),
    "3": (3, {}),
    "3 offloaded": (3, OFFLOAD),
    "3 half offloaded": (3, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    "2 hybrid": (2, {"shard_degree": 2}),
}


@pytest.mark.parametrize(
    ("way", "optimizer", "case", "world"),
    by_day(
        [
            (*row, world)
            for row in product(WAYS, OPTIMIZERS, ("plain", "unused_alternating_steps", "tied", "two_groups"))
            for world in (2, 3, 4)
            if world != 3 or row[0] != "2 hybrid"
        ],
        ("0", "Adafactor", "plain", 2),
        ("2 offloaded", "Adafactor", "unused_alternating_steps", 2),
        ("3", "Adafactor", "two_groups", 3),
        ("3", "Lamb", "tied", 4),
        ("3 half offloaded", "Adafactor", "tied", 3),
        ("2 hybrid", "Adafactor", "unused_alternating_steps", 4),
    ),
)
@pytest.mark.usefixtures("plain")
def test_equals_one_process(way: str, optimizer: str, case: str, world: int) -> None:
    stage, zero = WAYS[way]
    wanted = train_reference(CASES[case], world_size=world, steps=STEPS, accumulation=2, clip=0.5, optimizer=optimizer)
    for found in run_ranks(world, train_case, case, config_of(optimizer, stage, zero_optimization=zero)):
        assert not differences(found, wanted)


def test_settings() -> None:
    """A parameter of zeros moves by its plain direction, and the bias is corrected unless it is not to be."""
    for corrected in (True, False):
        weight = torch.zeros(3, requires_grad=True)
        weight.grad = torch.tensor([1.0, -2.0, 4.0])
        Lamb([weight], lr=0.5, betas=(0.9, 0.99), eps=0.0, bias_correction=corrected).step()
        length = 0.5 * (1.0 if corrected else 0.1 / math.sqrt(0.01))
        torch.testing.assert_close(weight.detach(), torch.tensor([-length, length, -length]))
    with pytest.raises(ValueError, match="min_coeff"):
        Lamb([weight], min_coeff=2.0, max_coeff=1.0)
    with pytest.raises(ValueError, match="out of range"):
        Lamb([weight], betas=(1.0, 0.9))


def train_object(stage: int) -> Result:
    config = config_of("Lamb", stage)
    del config["optimizer"]
    return train(CASES["plain"], config, STEPS, optimizer=lambda params: FusedLamb(params, **LAMB))


@pytest.mark.usefixtures("plain")
def test_an_object_of_the_program_equals_one_process() -> None:
    wanted = train_reference(CASES["plain"], world_size=3, steps=STEPS, accumulation=2, clip=0.5, optimizer="Lamb")
    for found in run_ranks(3, train_object, 3):
        assert not differences(found, wanted)


# -- tensor ranks and pipeline stages ----------------------------------------------------------------------------------

PARALLEL = by_day(
    [
        (name, optimizer, stage, tensor, pipe, data)
        for name in ("llama", "gpt2")
        for optimizer in OPTIMIZERS
        for stage in (0, 1, 2, 3)
        for tensor, pipe, data in ((2, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 2), (4, 1, 1))
    ],
    ("llama", "Adafactor", 3, 2, 1, 2),
    ("gpt2", "Lamb", 1, 2, 1, 2),
    ("gpt2", "Adafactor", 2, 1, 2, 2),
    ("llama", "Lamb", 0, 2, 2, 1),
)


@pytest.mark.parametrize(("name", "optimizer", "stage", "tensor", "pipe", "data"), PARALLEL)
def test_equals_one_process_on_tensor_ranks_and_stages(
    name: str, optimizer: str, stage: int, tensor: int, pipe: int, data: int
) -> None:
    config = config_of(optimizer, stage)
    found = run_ranks(tensor * pipe * data, parallel.train, name, tensor, pipe, config)
    kind, params = OPTIMIZERS[optimizer]
    parallel.compare(found, parallel.reference(name, data, 2, optimizer_of=lambda weights: kind(weights, **params)))
    values: dict[str, torch.Tensor] = {}
    for result in found:  # copies on other tensor ranks, stages and replicas are the same to the bit
        for key, value in result["weights"].items():
            assert torch.equal(values.setdefault(key, value), value), key


# -- what is sent ------------------------------------------------------------------------------------------------------


def sums_in(engine: Any) -> Counter[tuple[str, str]]:
    """Calls and bytes of the optimizer's sums so far: (label, calls or bytes) -> number."""
    report = engine.communication_report()
    chosen = {label: counts for label, counts in report.items() if label.startswith("optimizer: ")}
    return Counter({(label, key): number for label, counts in chosen.items() for key, number in counts.items()})


def sums_planned(engine: Any) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for call in step_collectives(engine.runtime.plan):
        if call.label.startswith("optimizer: "):
            found[call.label, "calls"] += 1
            found[call.label, "bytes"] += call.bytes
    return found


CUT = "unused_everywhere"  # its matrices of 37 columns are cut within rows, also on two ranks


def count_sums(optimizer: str, tensor: int, zero: dict[str, Any], nccl: bool) -> tuple[Any, Any, Result]:
    """(sums in the third step, those that are planned, the run)."""
    stage = zero.get("stage", 3)
    config = config_of(optimizer, stage, zero_optimization=zero)
    with simulated_device() if nccl else nullcontext({}) as calls:
        if tensor > 1:
            engine = zerorun.initialize(parallel.build("llama"), {**config, "tensor_parallel": {"size": tensor}})
            result, data = Result(), parallel.data_of(engine.topology.data_parallel_rank, 2)
            parallel.one_step(engine, data, 2, 1)
            before = sums_in(engine)
            parallel.one_step(engine, data, 2, 1)
            found, planned = sums_in(engine) - before, sums_planned(engine)
            engine.destroy()
        else:
            engine = make_engine(CASES[CUT], config)
            result = run_steps(engine, CASES[CUT], STEPS)
            found, planned = sums_in(engine), sums_planned(engine)
            found = Counter({key: number / STEPS for key, number in found.items()})
            finish(engine, result)
        refuse_different_calls(calls)
    return found, planned, result


HYBRID = {"shard_degree": 2}
SENT = [
    *(("Adafactor", 1, zero, nccl) for zero in ({}, HYBRID, OFFLOAD, {"stage": 0}) for nccl in (True, False)),
    *(("Lamb", 1, zero, nccl) for zero in ({}, HYBRID) for nccl in (True, False)),
    *((name, 2, zero, False) for name in OPTIMIZERS for zero in ({}, {"stage": 0})),
]


@pytest.mark.parametrize(
    ("optimizer", "tensor", "zero", "nccl"),
    by_day(SENT, ("Adafactor", 1, HYBRID, True), ("Adafactor", 1, OFFLOAD, True), ("Lamb", 1, {}, False), SENT[-2]),
)
@pytest.mark.usefixtures("plain")
def test_sums_are_sent_as_planned(optimizer: str, tensor: int, zero: dict[str, Any], nccl: bool) -> None:
    """One message for LAMB, two for Adafactor, over each axis; by the calls of NCCL, too."""
    wanted = train_reference(CASES[CUT], world_size=4, steps=STEPS, accumulation=2, clip=0.5, optimizer=optimizer)
    for found, planned, result in run_ranks(4, count_sums, optimizer, tensor, zero, nccl):
        assert found == planned
        axes = (zero.get("stage") != 0) + (tensor > 1) + (nccl and "shard_degree" in zero)
        assert len({label for label, _ in found}) == axes * (2 if optimizer == "Adafactor" else 1)
        assert not result.losses or not differences(result, wanted)


# -- learning ----------------------------------------------------------------------------------------------------------


class OnSlices(torch.optim.Adafactor):
    """torch's, given slices of flat buffers as if they were parameters."""

    elementwise = True


def learn(named: bool) -> list[float]:
    config = config_of("Adafactor", 2)
    if named:
        return train(CASES["plain"], config, 12).losses
    del config["optimizer"]
    return train(CASES["plain"], config, 12, optimizer=lambda params: OnSlices(params, **ADAFACTOR)).losses


@pytest.mark.nightly  # by day: test_equals_one_process
@pytest.mark.usefixtures("plain")
def test_deepspeed_pull_2152_pytorch_109581_adafactor_learns_on_shards() -> None:
    """Given slices, torch's class is another optimizer, whose steps are too short or too long, without an error."""
    wanted = train_reference(CASES["plain"], world_size=3, steps=12, accumulation=2, clip=0.5, optimizer="Adafactor")
    found, *_ = run_ranks(3, learn, True)
    assert found == pytest.approx(wanted.losses, rel=1e-5)
    slices, *_ = run_ranks(3, learn, False)
    assert abs(slices[-1] - wanted.losses[-1]) > 0.01


def train_in(precision: str, optimizer: str, way: str) -> Result:
    stage, zero = WAYS[way]
    return train(CASES["plain"], config_of(optimizer, stage, precision=precision, zero_optimization=zero), STEPS)


@functools.cache
def at_stage_0(precision: str, optimizer: str) -> Result:
    wanted: Result = run_ranks(4, train_in, precision, optimizer, "0")[0]
    return wanted


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", by_day((way for way in WAYS if way != "0"), "2 offloaded", "3"))
def test_precisions(way: str, optimizer: str, precision: str) -> None:
    """Every way is that of stage 0, but for the rounding of weights."""
    wanted = at_stage_0(precision, optimizer)
    for found in run_ranks(4, train_in, precision, optimizer, way):
        assert found.losses == pytest.approx(wanted.losses, rel=1e-3)
        assert all(distance(found.weights[name], value) < 2e-3 for name, value in wanted.weights.items())


# -- checkpoints -------------------------------------------------------------------------------------------------------

# tensor, pipe, data, stage
CELLS = ((2, 1, 2, 3), (1, 1, 3, 1), (2, 2, 1, 2), (1, 1, 1, 0), (1, 2, 2, 3), (1, 1, 4, 2))
WHOLE = {"foreach": True}  # asks for torch's own Adafactor, which is given whole matrices, as all were before


def engine_of(optimizer: str, cell: tuple[int, ...], more: dict[str, Any]) -> Any:
    tensor, pipe, data, stage = cell
    config = config_of(optimizer, stage, gradient_accumulation_steps=12 // data)
    config["optimizer"] = {"type": optimizer, "params": {**config["optimizer"]["params"], **more}}
    degrees = {"tensor_parallel": {"size": tensor}, "pipeline": {"stages": pipe}}
    return zerorun.initialize(parallel.build("llama"), {**config, **degrees})


def steps(engine: Any, begin: int, count: int, pipe: int) -> list[float]:
    """The same 12 micro-batches of every step, however many ranks share them."""
    accumulation, rank = engine.gradient_accumulation_steps(), engine.topology.data_parallel_rank
    places = product(range(begin, begin + count), range(accumulation))
    data = (parallel.batch_of(step, rank * accumulation + micro, 0) for step, micro in places)
    return [parallel.one_step(engine, data, accumulation, pipe) for _ in range(count)]


def save(optimizer: str, cell: tuple[int, ...], folder: str, more: dict[str, Any]) -> list[float]:
    engine = engine_of(optimizer, cell, more)
    steps(engine, 0, 2, cell[1])
    engine.save_checkpoint(folder, "here")
    losses = steps(engine, 2, 2, cell[1])
    engine.destroy()
    return losses


def load(optimizer: str, cell: tuple[int, ...], folder: str) -> list[float]:
    engine = engine_of(optimizer, cell, {})
    engine.load_checkpoint(folder, "here")
    engine.save_checkpoint(folder, "again")
    losses = steps(engine, 2, 2, cell[1])
    engine.destroy()
    return losses


def stored(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """The optimizer's states: (set, name of a parameter) -> value."""
    found = {}
    for file in folder.glob("optimizer.*.safetensors"):
        found |= {(file.name.split("-")[0], name): value for name, value in load_file(file).items()}
    return found


@pytest.mark.parametrize(
    ("optimizer", "saved", "loaded", "more"),
    by_day(
        [
            *((optimizer, one, other, {}) for optimizer in OPTIMIZERS for one in CELLS for other in CELLS),
            *(("Adafactor", one, other, WHOLE) for one in CELLS if one[0] == 1 for other in CELLS),
        ],
        ("Lamb", CELLS[5], CELLS[2], {}),
    ),
)
def test_checkpoints_load_in_any_division(
    optimizer: str, saved: tuple[int, ...], loaded: tuple[int, ...], more: dict[str, Any], tmp_path: Path
) -> None:
    """States are stored by parameter, in the shapes that torch gives them: what is loaded is what was saved, to the bit."""
    losses, *_ = run_ranks(prod(saved[:3]), save, optimizer, saved, str(tmp_path), more)
    for found in run_ranks(prod(loaded[:3]), load, optimizer, loaded, str(tmp_path)):
        assert found == pytest.approx(losses, rel=2e-6)
    before, after = stored(tmp_path / "here"), stored(tmp_path / "again")
    assert before.keys() == after.keys()
    assert len(before) > 40
    assert all(torch.equal(after[key], value) for key, value in before.items())


def ask_for_rows() -> list[str]:
    engine = make_engine(CASES["plain"], config_of("Adafactor", 3))
    texts = []
    for param in engine.module.parameters():
        try:
            safe_get_full_optimizer_state(param, "row_var")
        except ModelError as error:
            texts.append(str(error))
    engine.destroy()
    return texts


def test_rows_have_not_the_shape_of_a_parameter() -> None:
    for texts in run_ranks(2, ask_for_rows):
        assert texts
        assert set(texts) == {"optimizer state 'row_var' has not the shape of its parameter, but rows or columns of it."}
