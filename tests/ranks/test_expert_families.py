"""Experts that are spread over ranks, at every stage: equal to one process, in losses, norms, gradients and weights.

The wrong numbers of others that this would catch: expert gradients times the degree (DeepSpeed #5618, #6545, PyTorch
#160285, Megatron-LM #5956) or times tensor ranks (DeepSpeed #8064); a norm that is a mean, or one of each group (DeepSpeed
#8475, NeMo Automodel #3816, Megatron-LM #5916); experts without tokens that skip their weight decay (Automodel #2995).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import moe
import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from mixtures import make
from models import Place
from races import looking_for_races
from reference import OPTIMIZERS, Result, differences, distance
from safetensors.torch import load_file
from simulation import simulated_device
from test_expert_training import config_of as experts_over
from test_expert_training import loss_of as mixture_loss
from torch import nn
from training import PLACES, counted_collectives, make_config, merged, placed

import zerorun
from zerorun.distributed.replication import Family
from zerorun.errors import ModelError, ReleasedParameterError
from zerorun.plan.byte_ledger import planned_bytes
from zerorun.plan.step_collectives import step_collectives
from zerorun.plan.written_plan import as_table, from_json, to_json
from zerorun.zero import (
    GatheredParameters,
    full_gradients,
    gradient_norms,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)

STEPS = 2
WIDE = 4096  # hidden elements of an expert: then shards are mapped, and gradients summed where autograd leaves them


@dataclass(frozen=True)
class Setting:
    """``messages``: ranks do not read each other's memory. ``own``: the optimizer is torch's class."""

    accumulation: int = 1
    clip: float = 0.3  # active
    optimizer: str = "AdamW"
    few: bool = False  # all tokens go to the first experts
    skips: bool = False  # in step 1 all expert groups but the first leave the experts of one block out
    hidden: int = 10
    messages: bool = False
    own: bool = False

    def ways(self, place: Place, places: int) -> dict[str, bool]:
        """``places``: of an expert group on the data axis."""
        return {"few": self.few, "skip": self.skips and place.step == 1 and place.rank >= places}


SETTINGS = {
    "plain": Setting(),
    "accumulated": Setting(accumulation=2, optimizer="SGD", messages=True),
    "few": Setting(accumulation=2, clip=0.0, few=True),
    "skipped": Setting(optimizer="SGD", few=True, skips=True, own=True),
    "own": Setting(skips=True, own=True),
    "wide": Setting(hidden=WIDE, accumulation=2),
}


@dataclass
class Run(Result):
    """``gradients``: of the last step, by name. ``rounding``: how far those of one process in fp32 are from them."""

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)


def reference(setting: Setting, world: int, places: int) -> Run:
    """In fp64, so that what differs is the rounding of the ranks alone."""
    found, rounded = (one_process(setting, world, places, dtype) for dtype in (torch.float64, torch.float32))
    found.rounding = {name: distance(rounded.gradients[name], wanted) for name, wanted in found.gradients.items()}
    return found


def one_process(setting: Setting, world: int, places: int, dtype: torch.dtype) -> Run:
    model, found = moe.build(setting.hidden).to(dtype), Run()
    kind, params = OPTIMIZERS[setting.optimizer]
    optimizer = kind(model.parameters(), **params)
    count = world * setting.accumulation
    for step in range(STEPS):
        total = 0.0
        for micro in range(setting.accumulation):
            for rank in range(world):
                place = Place(rank, step, micro)
                loss = moe.loss_of(model, place, **setting.ways(place, places)) / count
                loss.backward()
                total += loss.item()
        found.losses.append(total)
        found.gradients = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        found.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), setting.clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    found.weights = {name: value.detach() for name, value in model.named_parameters()}
    return found


@contextlib.contextmanager
def by_messages(wanted: bool) -> Iterator[None]:
    """Engines made in the block do not read other ranks' memory, if that is ``wanted``."""
    with pytest.MonkeyPatch.context() as patch:
        if wanted:
            patch.setitem(os.environ, "ZERORUN_PEER_MEMORY", "0")
        yield


@contextlib.contextmanager
def engine_of(config: dict[str, Any], setting: Setting, expert: int, tensor: int = 1) -> Iterator[zerorun.Engine]:
    degrees = {"shard_degree": config["zero_optimization"].get("shard_degree"), "expert": expert, "tensor": tensor}
    with by_messages(setting.messages):
        topology = zerorun.Topology.create(dist.get_world_size(), dist.get_rank(), device_type="cpu", **degrees)
        kind, params = OPTIMIZERS[setting.optimizer]
        options = {"optimizer": partial(kind, **params)} if setting.own else {}
        model = moe.spread(moe.build(setting.hidden), topology)
        engine = zerorun.initialize(model, config, topology=topology, **options)
    yield engine
    engine.destroy()
    topology.close()


def train(config: dict[str, Any], setting: Setting, expert: int, tensor: int = 1) -> Run:
    found = Run()
    with engine_of(config, setting, expert, tensor) as engine:
        for step in range(STEPS):
            total = take_micro_batches(engine, setting, step)
            if step + 1 == STEPS:
                found.gradients = dict(full_gradients(engine.module))
                norms = gradient_norms(engine.module)
                wanted = {n: float(g.double().norm()) for n, g in found.gradients.items()}
                assert norms == pytest.approx(wanted, rel=1e-6), {n: (norms[n], wanted[n]) for n in norms}
            engine.step()
            dist.all_reduce(total)
            found.losses.append(float(total) / dist.get_world_size())
            found.norms.append(engine.get_global_grad_norm() or 0.0)
        found.weights = engine.state_dict()
    return found


def take_micro_batches(engine: zerorun.Engine, setting: Setting, step: int) -> torch.Tensor:
    """All backwards of a step. Returns the mean loss of this rank."""
    total = torch.zeros(1)
    for micro in range(setting.accumulation):
        place = Place(engine.topology.data_parallel_rank, step, micro)
        places = max(engine.topology.expert // engine.topology.tensor, 1)
        loss = moe.loss_of(engine, place, **setting.ways(place, places))
        engine.backward(loss)
        total += loss.detach() / setting.accumulation
        if micro + 1 < setting.accumulation:
            engine.step()
    return total


def compare(runs: list[Run], expected: Run) -> None:
    for run in runs:
        assert not differences(run, expected)
        assert run.gradients.keys() == expected.gradients.keys()
        off = {name: distance(run.gradients[name], wanted) for name, wanted in expected.gradients.items()}
        assert all(value < 1e-6 + expected.rounding[name] for name, value in off.items()), (off, expected.rounding)


def config_of(place: str, setting: Setting, folder: Path, **changes: Any) -> dict[str, Any]:
    stage, keys = placed(place, folder)
    config = make_config(
        stage, accumulation=setting.accumulation, clip=setting.clip, optimizer=setting.optimizer, **changes
    )
    return merged(config, {"zero_optimization": keys})


DEGREES = ((2, 2), (3, 3), (4, 1), (4, 2), (4, 4))  # ranks, and those with different experts
ROWS = [
    (*degrees, place, name)
    for degrees in DEGREES
    for place in PLACES
    for name in SETTINGS
    if not ("hybrid" in place and degrees[0] < 4) and not ("disk" in place and SETTINGS[name].own)
]
BY_DAY = (
    (2, 2, "stage 0", "few"),
    (2, 2, "stage 2", "plain"),
    (2, 2, "stage 3, disk", "plain"),
    (3, 3, "stage 1, offload", "skipped"),
    (4, 2, "stage 1", "skipped"),
    (4, 4, "stage 3, hybrid", "own"),
)


@pytest.mark.parametrize(("world", "expert", "place", "name"), by_day(ROWS, *BY_DAY))
def test_spread_experts_train_as_in_one_process(tmp_path: Path, world: int, expert: int, place: str, name: str) -> None:
    setting = SETTINGS[name]
    config = config_of(place, setting, tmp_path)
    compare(run_ranks(world, train, config, setting, expert), reference(setting, world, expert))


DIVIDED = [
    (*degrees, place)
    for degrees in ((2, 2, 2), (4, 2, 2), (4, 2, 4))
    for place in PLACES
    if "hybrid" not in place or degrees[0] > degrees[1]  # else there is one shard
]


@pytest.mark.parametrize(("world", "tensor", "expert", "place"), by_day(DIVIDED, (2, 2, 2, "stage 3")))
def test_tensor_ranks_have_experts_of_their_own(world: int, tensor: int, expert: int, place: str, tmp_path: Path) -> None:
    """Each token is counted once, although tensor ranks have the same tokens."""
    setting = Setting(skips=world > expert)
    config = config_of(place, setting, tmp_path)
    if "hybrid" in place:
        config["zero_optimization"]["shard_degree"] = 1
    places = max(expert // tensor, 1)
    compare(run_ranks(world, train, config, setting, expert, tensor), reference(setting, world // tensor, places))


@pytest.mark.parametrize("precision", by_day(("bf16", "fp16"), "bf16"))
@pytest.mark.parametrize("stage", by_day(range(4), 3))
@pytest.mark.parametrize("expert", by_day((2, 4), 2))
def test_in_16_bits(precision: str, stage: int, expert: int, tmp_path: Path) -> None:
    setting, places = Setting(), ("stage 0", "stage 1", "stage 2", "stage 3")
    config = config_of(places[stage], setting, tmp_path, precision=precision)
    expected = reference(setting, 4, expert)
    for run in run_ranks(4, train, config, setting, expert):
        assert run.losses == pytest.approx(expected.losses, rel=0.02)
        assert run.norms == pytest.approx(expected.norms, rel=0.05)


def on_the_simulated_device(config: dict[str, Any], setting: Setting, expert: int, looks: bool) -> Run:
    with simulated_device(), looking_for_races() if looks else contextlib.nullcontext():
        return train(config, setting, expert)


DEVICES = [
    (*degrees, place)
    for degrees in ((2, 2, False), (4, 2, True), (4, 4, True))
    for place in PLACES
    if "disk" not in place and ("hybrid" not in place or degrees[0] > 2)
]


@pytest.mark.parametrize(("world", "expert", "looks", "place"), by_day(DEVICES, (2, 2, False, "stage 3")))
def test_nothing_is_too_early_on_a_device(world: int, expert: int, looks: bool, place: str, tmp_path: Path) -> None:
    """Gathers and sums of both families go on behind the computation; what is not written yet is NaN."""
    setting = SETTINGS["accumulated"]
    config = config_of(place, setting, tmp_path)
    found = run_ranks(world, on_the_simulated_device, config, setting, expert, looks, timeout_s=180.0)
    compare(found, reference(setting, world, expert))


# -- what the plan says ------------------------------------------------------------------------------------------


def account(config: dict[str, Any], setting: Setting, expert: int) -> str:
    """What is held and sent in a step, where that is not what the plan says."""
    with engine_of(config, setting, expert) as engine:
        for step in range(3):
            with counted_collectives() as calls:
                take_micro_batches(engine, setting, step)
                engine.step()
        engine.comm.fence()
        plan = engine.runtime.plan
        sent = [call for call in calls if not call.label.startswith("experts:")]
        assert sent == step_collectives(plan)
        assert _without_moments(engine.memory_report()) == _without_moments(planned_bytes(plan))
        assert from_json(to_json(plan)) == plan
        experts = [group for group in plan.units[1].flat_groups if group.family is Family.EXPERT]
        if experts[0].layout.degree == 1 and plan.shares_params and not plan.units[1].placement.params:
            assert plan.param_slots.nbytes < sum(group.gradient_bytes for group in experts)  # they are whole all the time
        return as_table(plan)


def _without_moments(ledger: dict[str, int]) -> dict[str, int]:
    """The plan of an engine does not know them."""
    return {kind: size for kind, size in ledger.items() if not kind.endswith("moments")}


@pytest.mark.parametrize("name", by_day(("plain", "accumulated", "wide"), "wide"))
@pytest.mark.parametrize("place", by_day(PLACES, "stage 3"))
@pytest.mark.parametrize("expert", by_day((2, 4), 4))
def test_the_plan_says_what_is_held_and_sent(expert: int, place: str, name: str, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    tables = run_ranks(4, account, config_of(place, setting, tmp_path), setting, expert)
    assert all(f"{expert} with different experts" in table and "experts of this rank" in table for table in tables)


def refusal(kind: str) -> str:
    config = make_config(1, optimizer="AdamW") | {"optimizer": {"type": kind, "params": {"lr": 1e-3}}}
    with pytest.raises(ModelError) as caught, engine_of(config, Setting(), 2):
        pass
    return str(caught.value)


@pytest.mark.parametrize("kind", ("Lamb", "Adafactor", "Muon"))
def test_optimizers_that_look_at_more_than_elements_are_refused(kind: str) -> None:
    for text in run_ranks(2, refusal, kind):
        assert text.startswith(kind) and "blocks.0.experts." in text and "Remedy: " in text


# -- access ------------------------------------------------------------------------------------------------------


def edit(config: dict[str, Any], expert: int) -> None:
    """What the functions by parameter give of spread experts is whole, and what they take reaches the rank that has it."""
    with engine_of(config, Setting(), expert) as engine:
        take_micro_batches(engine, Setting(), 0)
        experts = engine.module.blocks[1].experts
        gradient = safe_get_full_grad(experts.up)
        assert gradient is not None and gradient.shape == (moe.EXPERTS, 10, 16)
        safe_set_full_grad(experts.up, torch.zeros_like(gradient))
        before = engine.state_dict()["blocks.1.experts.up"]
        engine.step()
        with pytest.raises(ReleasedParameterError, match=r"engine\.state_dict\(\)"):
            engine.module.state_dict()
        decayed = engine.state_dict()["blocks.1.experts.up"]
        torch.testing.assert_close(decayed, before * (1 - 3e-3 * 0.1))  # without a gradient only the decay is left
        assert float(safe_get_full_optimizer_state(experts.up, "exp_avg").abs().max()) == 0.0
        with GatheredParameters([experts.down, engine.module.head.weight], modifier_rank=1):
            if dist.get_rank() == 1:
                experts.down.data[-1] = 7.0
        safe_set_full_fp32_param(experts.bias, torch.full((moe.EXPERTS, 10), 3.0))
        found = engine.state_dict()
        assert bool((found["blocks.1.experts.down"][-1] == 7.0).all()) and not bool((found["head.weight"] == 7.0).any())
        assert bool((found["blocks.1.experts.bias"] == 3.0).all())
        assert torch.equal(safe_get_full_fp32_param(experts.down), found["blocks.1.experts.down"])


@pytest.mark.parametrize("place", by_day(PLACES, "stage 3, hybrid"))
@pytest.mark.parametrize("expert", by_day((2, 4), 2))
def test_spread_experts_are_whole_by_name(expert: int, place: str, tmp_path: Path) -> None:
    run_ranks(4, edit, config_of(place, Setting(), tmp_path), expert)


# -- checkpoints -------------------------------------------------------------------------------------------------


def everything(engine: zerorun.Engine) -> dict[str, torch.Tensor]:
    """Whole masters and Adam states, by name."""
    found = engine.state_dict()
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = safe_get_full_optimizer_state(param, key)
            assert state is not None
            found[f"{name}/{key}"] = state
        master = safe_get_full_fp32_param(param)
        assert master is not None
        found[f"{name}/master"] = master
    return found


@dataclass(frozen=True)
class Cell:
    world: int
    expert: int
    place: str
    tensor: int = 1
    precision: str = "fp32"

    def config(self, folder: Path) -> dict[str, Any]:
        setting = Setting(accumulation=4 * self.tensor // self.world)
        return config_of(self.place, setting, folder, precision=self.precision)


def four_micro_batches(engine: zerorun.Engine, step: int) -> float:
    """A step of the same data on any number of ranks. Returns the mean loss."""
    count, rank, total = engine.gradient_accumulation_steps(), engine.topology.data_parallel_rank, torch.zeros(1)
    for micro in range(count):
        loss = moe.loss_of(engine, Place(rank * count + micro, step))
        engine.backward(loss)
        engine.step()
        total += loss.detach() / count
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def save(config: dict[str, Any], cell: Cell, folder: str) -> tuple[dict[str, torch.Tensor], float]:
    with engine_of(config, Setting(), cell.expert, cell.tensor) as engine:
        for step in range(2):
            four_micro_batches(engine, step)
        engine.save_checkpoint(folder, "here")
        return everything(engine), four_micro_batches(engine, 2)


def load(config: dict[str, Any], cell: Cell, folder: str) -> tuple[dict[str, torch.Tensor], float]:
    with engine_of(config, Setting(), cell.expert, cell.tensor) as engine:
        four_micro_batches(engine, 5)  # so that there is something to overwrite
        assert engine.load_checkpoint(folder, "here")[0] is not None
        found = everything(engine), four_micro_batches(engine, 2)
        dist.barrier()
        return found


CELLS = (
    Cell(2, 2, "stage 3"),
    Cell(4, 4, "stage 3, hybrid"),  # the ranks of a shard group have not all experts
    Cell(4, 2, "stage 2"),
    Cell(1, 1, "stage 0"),
    Cell(4, 2, "stage 3, hybrid"),
    Cell(4, 2, "stage 1", tensor=2),
    Cell(2, 2, "stage 3, disk"),
    Cell(4, 4, "stage 0"),
    Cell(4, 4, "stage 3, offload all"),
    Cell(4, 4, "stage 3", tensor=2),
)


@pytest.mark.parametrize(
    ("source", "target"),
    by_day([(a, b) for a in CELLS for b in CELLS if a is not b], (CELLS[5], CELLS[4])),
)
def test_checkpoints_cross_degrees_bit_for_bit(source: Cell, target: Cell, tmp_path: Path) -> None:
    """Weights, masters and the Adam states of each expert (DeepSpeed #8147), at another degree and number of ranks."""
    (saved, loss), *_ = run_ranks(source.world, save, source.config(tmp_path), source, str(tmp_path))
    for found, again in run_ranks(target.world, load, target.config(tmp_path), target, str(tmp_path)):
        torch.testing.assert_close(found, saved, rtol=0, atol=0)
        assert again == pytest.approx(loss, rel=1e-6)
    stored: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "here").glob("model-*.safetensors"):
        stored |= load_file(file)
    torch.testing.assert_close(stored, {name: saved[name] for name in stored}, rtol=0, atol=0)
    assert {name for name in saved if "/" not in name} == set(stored)


# -- models of Hugging Face --------------------------------------------------------------------------------------


def observe(config: dict[str, Any]) -> tuple[dict[str, int], str]:
    engine = zerorun.initialize(make("mixtral"), config)
    for step in range(2):
        engine.backward(mixture_loss(engine, engine.topology.data_parallel_rank, step, 0))
        engine.step()
    found = engine.memory_report(), engine.comm.transport
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "degrees"), by_day(((3, (4, 1)), (1, (2, 1)), (0, (2, 2)), (3, (2, 2))), (3, (2, 2))))
def test_memory_is_what_the_estimate_says(stage: int, degrees: tuple[int, int]) -> None:
    config = experts_over(stage, degrees[0], tensor_parallel={"size": degrees[1]})
    reports = run_ranks(4, observe, config)
    with torch.device("meta"):
        model = make("mixtral")
    estimate = zerorun.estimate_memory(model, config, 4, ranks_per_node=4, device="cpu", transport=reports[0][1])
    held = {kind: max(kinds.get(kind, 0) for kinds, _ in reports) for kind in estimate.kinds}
    assert {kind: size for kind, size in estimate.kinds.items() if size} == {k: size for k, size in held.items() if size}
    assert estimate.device_bytes == max(sum(kinds.values()) for kinds, _ in reports)


def steps_of_a_mixture(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = zerorun.initialize(make("mixtral"), config)
    for step in range(2):
        engine.backward(mixture_loss(engine, engine.topology.data_parallel_rank, step, 0))
        engine.step()
    found = engine.state_dict()
    engine.destroy()
    return found


def test_muon_updates_the_matrices_beside_spread_experts() -> None:
    """Experts have three dimensions, and go by AdamW."""
    optimizer = {"type": "Muon", "params": {"lr": 1e-3}}
    spread, whole = ({**experts_over(stage, size), "optimizer": optimizer} for stage, size in ((3, 2), (1, 1)))
    expected = run_ranks(2, steps_of_a_mixture, whole)[0]
    for found in run_ranks(2, steps_of_a_mixture, spread):
        off = {name: distance(found[name], wanted) for name, wanted in expected.items()}
        assert max(off.values()) < 1e-4, off  # directions are found in bf16; two steps move weights by 1e-2


def save_mixture(config: dict[str, Any], folder: str) -> dict[str, torch.Tensor]:
    with zerorun.zero.Init():
        model = make("gpt-oss")
    engine = zerorun.initialize(model, config)
    engine.backward(mixture_loss(engine, engine.topology.data_parallel_rank, 0, 0))
    engine.step()
    engine.save_checkpoint(folder, "here")
    engine.export(Path(folder) / "exported")
    found = engine.state_dict()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day((3, 2), 3))
def test_checkpoints_of_spread_experts_open_in_transformers(stage: int, tmp_path: Path) -> None:
    """Built inside Init, too."""
    weights = run_ranks(2, save_mixture, experts_over(stage, 2), str(tmp_path))[0]
    from transformers import AutoModelForCausalLM

    for saved in ("exported", "here"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / saved).state_dict()
        torch.testing.assert_close({key: again[key] for key in weights}, weights, rtol=0, atol=0)
