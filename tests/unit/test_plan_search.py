"""zerorun-plan: the questions that people ask before a run, and what must hold for all of them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from mixtures import ids_of, make
from test_planner import DEEPSEEK_V3, LLAMA_8B, QWEN3_235B

import zerorun
from zerorun.config import load_config
from zerorun.errors import ConfigError, DoesNotFitError
from zerorun.log import in_bytes
from zerorun.pipeline import cli as schedule
from zerorun.plan.make_plan import planned_topology
from zerorun.planner import cli
from zerorun.planner.calibration import calibration_of, fitted
from zerorun.planner.candidate import GATHERS, REDUCTIONS, TENSOR, KernelGeneration, RunCandidate, candidate_config
from zerorun.planner.footprint import CONTEXT, footprint, footprints
from zerorun.planner.hardware import GB, GPUS, Cluster, cluster_of
from zerorun.planner.memory_picture import step_picture
from zerorun.planner.model_configs import shape_of
from zerorun.planner.model_shape import ModelShape
from zerorun.planner.search import Goal, Timed, degrees, fits, fitting, has_blocks_everywhere, least_gpus, search
from zerorun.planner.step_time import StepModel, StepTime, step_time

# OLMo 1B and 7B (arXiv:2402.00838), Llama 2 70B's shape, Falcon 40B (arXiv:2311.16867), Llama 3.1 405B, and one of 10B.
OLMO_1B = ModelShape(16, 2048, 16, 16, 128, 8192, 3, 50304, True, gains=0, final_gains=0)
OLMO_7B = ModelShape(32, 4096, 32, 32, 128, 11008, 3, 50304, gains=0, final_gains=0)
OLMO_70B = ModelShape(80, 8192, 64, 8, 128, 28672, 3, 32000)
FALCON_40B = ModelShape(60, 8192, 128, 8, 64, 32768, 2, 65024, True, gains=4, final_gains=2)
LLAMA_405B = ModelShape(126, 16384, 128, 8, 128, 53248, 3, 128256)
GPT2 = {"model_type": "gpt2", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 50257}
GPT2 |= {"n_positions": 1024}
MIXTRAL = {**LLAMA_8B, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
OF_10B = ModelShape(40, 4608, 36, 36, 128, 12288, 3, 50304)


@pytest.mark.parametrize(
    ("shape", "gpu", "precision", "alone", "with_offload"),
    [
        (OLMO_1B, "A100-40", "bf16", 1, 1),
        (OLMO_7B, "A100-40", "bf16", 4, 1),
        (OLMO_7B, "H100", "bf16", 2, 1),
        (OLMO_70B, "A100-40", "bf16", 64, 8),
        (OLMO_70B, "H100", "bf16", 32, 2),
        (FALCON_40B, "A100-40", "bf16", 32, 4),
        (FALCON_40B, "H100", "bf16", 16, 2),
        (OF_10B, "H100", "bf16", 4, 1),
        (OF_10B, "H100", "bf16-pure", 2, 1),  # 8 bytes for each parameter: 85 GB
        (OF_10B, "H200", "bf16-pure", 1, 1),
    ],
)
def test_will_it_fit_on_one_and_how_many_are_needed(
    shape: ModelShape, gpu: str, precision: str, alone: int, with_offload: int
) -> None:
    cluster = cluster_of(f"8x{gpu}")
    found = [least_gpus(shape, cluster, Goal(2048, precision=precision, offload=offload)) for offload in (False, True)]
    assert found == [alone, with_offload]


@pytest.mark.parametrize(("gpus", "mfu"), [(8192, 0.43), (16384, 0.41)])
def test_llama_405b_is_planned_as_it_was_trained(gpus: int, mfu: float) -> None:
    """Tensor ranks x stages of the Llama 3 report (arXiv:2407.21783, table 4) with a runtime that hides what theirs did.

    On 8,192 GPUs half of the blocks are computed again here, and were not there: 39.6 % in place of 43 %.
    """
    begun, cluster = time.process_time(), cluster_of(f"{gpus}xH100")
    goal = Goal(8192, 2048, kernels=KernelGeneration.FUSED, hides=frozenset((REDUCTIONS, GATHERS, TENSOR)))
    found = search(LLAMA_405B, cluster, goal)
    assert time.process_time() - begun < 5
    best = next(one for one in found[:5] if (one.candidate.tensor, one.candidate.pipe) == (8, 16))
    flops = best.tokens_per_second * LLAMA_405B.flops_per_token(8192)
    assert flops / (gpus * cluster.gpu.peak) == pytest.approx(mfu, abs=0.035)


def test_384_h100s_for_a_trillion_tokens() -> None:
    plan = zerorun.plan_run(LLAMA_8B, "384xH100", {"sequence": 8192, "tokens": 1e12, "price": 2.0})
    assert plan.best.candidate.world == 384
    assert 0.3 < plan.mfu < 0.5
    assert plan.as_json()["cost"] == pytest.approx(2 * plan.as_json()["days"] * 24 * 384)
    assert plan.seconds == pytest.approx(1e12 / plan.tokens_per_second / plan.goodput)
    assert all(fits(one.memory, plan.cluster) for one in (plan.best, *plan.others))
    assert plan.best.step.seconds <= min(one.step.seconds for one in plan.others)
    between, saved = 50_700 * 3600 / 384, plan.save_every
    lost = between / saved * 10 + saved / 2 + 300  # saves, and after a failure half of what is between two and the restart
    assert plan.goodput == pytest.approx(1 - lost / between)
    loaded = load_config(plan.config)
    assert loaded.zero_optimization.stage == plan.best.candidate.stage
    assert (
        loaded.checkpoint.every_minutes == round((2 * 10 * 50_700 * 3600 / 384) ** 0.5 / 60)
        and loaded.checkpoint.asynchronous
    )
    often = zerorun.plan_run(LLAMA_8B, "384xH100", {"sequence": 8192, "failure_hours": 50_700 / 4})
    assert often.save_every == pytest.approx(plan.save_every / 2) and often.goodput < plan.goodput
    never = zerorun.plan_run(LLAMA_8B, "384xH100", {"failure_hours": 10.0, "tokens": 1e12, "days": 9.0})
    assert never.goodput == 0 and never.as_json()["days"] is None and never.for_deadline is None
    assert "  the run does not get on: one of the GPUs fails every 94 s, and a restart takes 300 s" in never.page()
    with pytest.raises(ConfigError, match=r"goal\.failure_hours = 0"):
        zerorun.plan_run(LLAMA_8B, "384xH100", {"failure_hours": 0})


def test_split_backwards_fill_bubbles() -> None:
    """The bubble is the formula's and the schedule's; what is planned can be loaded. More activations are kept."""
    found = search(OLMO_70B, cluster_of("64xH100"), Goal(4096, 256))
    pairs = 0
    for one in found[:50]:
        plain = next((other for other in found if other.candidate == replace(one.candidate, order="1f1b")), None)
        if one.candidate.zero_bubble and plain is not None:
            closed, simulated = (step.causes["pipeline bubble"] for step in (_closed(one), one.step))
            assert simulated == pytest.approx(closed, rel=0.2) and simulated < _closed(plain).causes["pipeline bubble"]
            last = [footprints(OLMO_70B, each.candidate)[plain.candidate.pipe - 1].activations for each in (one, plain)]
            assert last[0] > last[1]
            assert load_config(candidate_config(one.candidate)).pipeline.schedule == "zero_bubble"
            pairs += 1
    assert pairs


def _closed(one: Timed) -> StepTime:
    cluster = cluster_of("64xH100")
    return step_time(OLMO_70B, one.candidate, cluster, calibration_of(cluster.gpu))


@pytest.mark.nightly
@pytest.mark.parametrize("gpus", ("16xA100-40", "64xH100"))
def test_better_clusters_never_plan_worse(gpus: str) -> None:
    cluster, goal = cluster_of(gpus), Goal(2048, 256)
    base = search(OLMO_7B, cluster, goal)
    speed = base[0].tokens_per_second
    more = replace(cluster, gpu=replace(cluster.gpu, memory=1.5 * cluster.gpu.memory))
    assert search(OLMO_7B, more, goal)[0].tokens_per_second >= speed
    assert least_gpus(OLMO_7B, more, goal) <= (least_gpus(OLMO_7B, cluster, goal) or 0)  # type: ignore[operator]
    assert search(OLMO_7B, replace(cluster, nics=4 * cluster.nics), goal)[0].tokens_per_second >= speed
    assert search(OLMO_7B, replace(cluster, gpus=2 * cluster.gpus), goal)[0].tokens_per_second >= speed
    assert base == sorted(base[:50], key=lambda one: one.step.seconds) + base[50:]


SHAPES = {"1B": OLMO_1B, "7B": OLMO_7B, "70B": OLMO_70B, "40B": FALCON_40B}
GPU_NAMES = ("A100-40", "A100-80", "H100", "H200", "L40S", "RTX4090")


def random_question(chance: random.Random, names: Sequence[str]) -> tuple[ModelShape, Cluster, Goal]:
    gpus, shape = chance.choice([1, 2, 3, 4, 5, 7, 8]), SHAPES[chance.choice(names)]
    cluster = replace(cluster_of(f"{gpus}x{chance.choice(GPU_NAMES)}"), disk=chance.choice([0.0, 3 * GB, 100 * GB]))
    batch = chance.choice([0, gpus * 8, gpus * 64])
    return shape, cluster, Goal(chance.choice([2048, 4096, 8192, 16384]), batch, offload=chance.random() < 0.8)


@pytest.mark.parametrize("seed", by_day(range(60), 1))
def test_more_memory_is_never_slower(seed: int) -> None:
    chance = random.Random(seed)
    shape, cluster, goal = random_question(chance, [*SHAPES])
    before = inf
    for factor in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0):
        more = replace(cluster, gpu=replace(cluster.gpu, memory=factor * cluster.gpu.memory))
        try:
            (best, *_) = search(shape, more, goal)
        except DoesNotFitError:
            assert before == inf
            continue
        assert best.step.seconds <= before * (1 + 1e-9), factor
        before = best.step.seconds


@pytest.mark.parametrize("seed", by_day(range(40), 23, 27))
def test_nothing_that_fits_is_faster(seed: int) -> None:
    """All placements with all that may be computed again, one by one."""
    chance = random.Random(seed)
    shape, cluster, goal = random_question(chance, ["1B", "7B"])
    calibration, fastest = calibration_of(cluster.gpu), inf
    for candidate in degrees(shape, cluster, goal):
        for host, params, disk in product((False, True), repeat=3):
            if (
                host > goal.offload * candidate.stage
                or params > host * (candidate.stage == 3)
                or disk > host * cluster.disk
            ):
                continue
            if candidate.replicas == 1 and candidate.stage > 1 and (not host or params != (candidate.stage == 3)):
                continue  # it has nothing to divide
            if host and candidate.second > 1:
                continue
            if candidate.sequence_parallel and not has_blocks_everywhere(shape, candidate):
                continue
            placed = replace(candidate, offload_optimizer=host, offload_params=params, states_on_disk=disk)
            for checkpointing in ("none", "selective", "full"):
                one = replace(placed, checkpointing=checkpointing)
                if fits(footprint(shape, one), cluster):
                    fastest = min(fastest, step_time(shape, one, cluster, calibration).seconds)
    found = [step_time(shape, one, cluster, calibration).seconds for one, _ in fitting(shape, cluster, goal)]
    assert min(found, default=inf) == fastest


@pytest.mark.parametrize("seed", by_day(range(40), 0, 1, 2))
def test_a_page_does_not_contradict_itself(seed: int) -> None:
    """What is planned for these GPUs needs no more GPUs, neither to fit nor to be done in as many days."""
    chance = random.Random(seed)
    shape, per_node = SHAPES[chance.choice([*SHAPES])], chance.choice([1, 4, 6, 8])
    gpus = chance.choice([1, 2, 3, 5]) * per_node
    batch = chance.choice([0, 1, 2, 3, 4]) * gpus or chance.choice([0, 6])
    goal = {"batch": batch, "offload": chance.random() < 0.5, "offload_params": False, "tokens": 1e9}
    try:
        plan = zerorun.plan_run(shape, cluster_of(f"{gpus}xH100", per_node=per_node), goal)
    except DoesNotFitError:
        return
    least = plan.least[plan.best.candidate.offload_optimizer]
    assert least is not None and least <= gpus
    days = plan.as_json()["days"] * (1 + 1e-9)
    again = zerorun.plan_run(shape, plan.cluster, {**goal, "days": days})
    assert again.for_deadline is not None and again.for_deadline <= gpus


def test_a_deadline_counts_batches_and_failures() -> None:
    """A step of 8 sequences is no work for 16 GPUs, and what failures cost is time."""
    usual: dict[str, float] = {"tokens": 1e10, "batch": 64}
    alone = zerorun.plan_run(OLMO_1B, "8xH100", usual)
    usual["days"] = 1.2 * alone.seconds / 86400
    often = {"failure_hours": 4.0}  # half an hour between failures: a third of the time is lost
    found = [
        zerorun.plan_run(OLMO_1B, "8xH100", {**usual, **more}).for_deadline
        for more in ({}, often, {"batch": 8}, {"batch": 8, "days": usual["days"] / 2})
    ]
    assert found == [8, 16, 8, None]
    assert zerorun.plan_run(OLMO_7B, "1xH100", {"tokens": 1e9, "days": 30.0}).for_deadline == 1


@pytest.mark.parametrize("precision", by_day(("bf16", "bf16-pure", "fp16", "fp32", "fp8"), "fp8"))
def test_zerorun_loads_what_is_planned(precision: str) -> None:
    """Long sequences, so that all degrees come."""
    cluster, found = cluster_of("16xH100"), []
    for kernels in (KernelGeneration.FLASH, KernelGeneration.FUSED):
        goal = Goal(16384, 32, precision=precision, kernels=kernels)
        found += [candidate for candidate, _ in fitting(shape_of(LLAMA_8B), cluster, goal)]
    assert max(one.context for one in found) > 1
    assert {one.checkpointing for one in found} == {"none", "selective", "every_n", "full"}
    for candidate in found[::25]:
        config = load_config(candidate_config(candidate))
        assert config.zero_optimization.stage == candidate.stage
        assert config.train_micro_batch_size_per_gpu == candidate.micro_batch


# Half of the experts of a block of DeepSeek-V3 are 5.6 billion parameters: their slots alone take 68 GB.
DEGREES = {"mixtral": (MIXTRAL, {2, 4, 8}), "qwen3": (QWEN3_235B, {2, 4, 8}), "deepseek": (DEEPSEEK_V3, {4, 8, 16})}


@pytest.mark.parametrize("model", by_day(DEGREES, "mixtral"))
def test_experts_are_spread_in_all_ways_that_fit(model: str) -> None:
    values, degrees = DEGREES[model]
    shape, cluster = shape_of(values), cluster_of("64xH100")
    found = [candidate for candidate, _ in fitting(shape, cluster, Goal(4096, 128))]
    assert {one.expert for one in found} >= degrees
    assert not any(one.sequence_parallel for one in found)
    for candidate in found[::200]:
        config = load_config(candidate_config(candidate))
        topology = planned_topology(config, candidate.world, cluster.per_node)
        assert (topology.expert, topology.tensor) == (candidate.expert, candidate.tensor)
        if candidate.expert > 1:
            assert topology.size("expert_shard") == candidate.expert_divided


def test_a_planned_mixture_is_trained(tmp_path: Path) -> None:
    """The plan of a mixture with spread experts, from its config.json, trains a small one of its kind on 2 ranks."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**MIXTRAL, "num_hidden_layers": 4}))
    plan = zerorun.plan_run(path, "2xH100", {"batch": 4})
    assert plan.best.candidate.expert == 2 and "experts over 2" in "\n".join(plan.page())
    assert not plan.calibrated and plan.spread[0] < 0.6 and plan.spread[1] > 2  # of four runs that nothing was fitted to
    config = {key: value for key, value in plan.config.items() if key != "checkpoint"}
    assert all(0 < loss < 20 for loss in run_ranks(2, train_mixture, config))


def train_mixture(config: dict[str, Any]) -> float:
    engine, *_ = zerorun.initialize(model=make("mixtral"), config=config)
    assert engine.topology.expert == 2
    for micro in range(config["gradient_accumulation_steps"]):
        ids = ids_of(dist.get_rank() + 2 * micro, 6)[: config["train_micro_batch_size_per_gpu"]]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    return float(loss)


def test_parameters_and_disks_are_looked_at_when_nothing_faster_fits() -> None:
    """7B on two GPUs of 24 GB: its states are 12 bytes for each parameter, and on disks where they do not fit elsewhere."""
    goal, small = Goal(2048, 8), replace(cluster_of("2xRTX4090"), host_memory=100e9)
    with pytest.raises(DoesNotFitError):
        search(OLMO_7B, small, goal)
    on_disk = search(OLMO_7B, replace(small, disk=6 * GB), goal)
    assert all(one.candidate.states_on_disk and one.memory.disk > 5.6 * OLMO_7B.parameters for one in on_disk)
    slower = search(OLMO_7B, replace(small, disk=3 * GB), goal)
    assert slower[0].step.causes["update"] == pytest.approx(24 * OLMO_7B.parameters / (3 * GB), rel=0.2)
    in_host = search(OLMO_7B, replace(small, host_memory=400e9, disk=6 * GB), goal)
    assert not any(one.candidate.states_on_disk for one in in_host)
    assert in_host[0].step.seconds < on_disk[0].step.seconds
    assert load_config(candidate_config(on_disk[0].candidate)).zero_optimization.offload_optimizer.device == "nvme"
    tight = replace(small, host_memory=400e9, gpu=replace(small.gpu, memory=12e9))
    assert {one.candidate.offload_params for one in search(OLMO_7B, tight, goal)} == {True}


def test_what_a_node_keeps_in_host_memory_is_told_beside_its_room(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.json").write_text(json.dumps(LLAMA_8B))
    asked = ["--model", str(tmp_path / "model.json"), "--gpus", "4xRTX4090", "--sequence", "2048", "--batch", "4"]
    assert cli.main([*asked, "--host-memory", "256"]) == 0
    plan = zerorun.plan_run(LLAMA_8B, replace(cluster_of("4xRTX4090"), host_memory=256e9), {"sequence": 2048, "batch": 4})
    taken = plan.as_json()["node_host_bytes"]
    assert 12 * plan.shape.parameters < taken == 4 * plan.best.memory.host < 256e9
    assert f"host memory of a node {in_bytes(taken):>15} of {in_bytes(256e9)}" in capsys.readouterr().out
    assert cli.main([*asked, "--host-memory", "64"]) == 2
    assert "more host memory" in capsys.readouterr().err


def test_the_memory_of_a_cpu_is_the_hosts() -> None:
    """States that are moved to host memory stay where they were, and there is no CUDA: only disks make room."""
    cpu = replace(cluster_of("2xRTX4090"), gpu=replace(GPUS["RTX4090"], is_host=True, memory=48e9))
    goal = Goal(512, 2, "fp32")
    with pytest.raises(DoesNotFitError):
        search(OLMO_7B, cpu, goal)
    assert all(one.candidate.states_on_disk for one in search(OLMO_7B, replace(cpu, disk=6 * GB), goal))
    resident = footprint(OLMO_7B, RunCandidate(2, stage=3, shard=2, sequence=512, precision="fp32"))
    moved = footprint(OLMO_7B, RunCandidate(2, stage=3, shard=2, sequence=512, precision="fp32", offload_optimizer=True))
    assert moved.needed(cpu.gpu) >= resident.needed(cpu.gpu)
    assert moved.needed(GPUS["RTX4090"]) < resident.needed(GPUS["RTX4090"])
    small = replace(cpu, gpu=replace(cpu.gpu, memory=2e9))
    assert search(shape_of(GPT2), small, Goal(128, 4, "fp32"))


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_sequences_are_as_long_as_the_table_of_positions(kind: str) -> None:
    shape, small = shape_of({**GPT2, "model_type": kind, "intermediate_size": 3072}), cluster_of("2xA100")
    assert search(shape, small, Goal(1024, 2))
    with pytest.raises(ConfigError, match=r"2048: is more than the 1,02. positions.*\n?.*--sequence"):
        search(shape, small, Goal(2048, 2))
    assert zerorun.plan_run(shape, small, {"batch": 2}).goal.sequence == 1024


def test_gradients_come_to_host_memory_in_every_micro_batch() -> None:
    """At stages 2 and 3, where states are there: behind the backward, if that is long enough. At stage 1 once in a step."""
    cluster, base = cluster_of("1xH100"), RunCandidate(1, sequence=2048, accumulation=8, stage=2, offload_optimizer=True)
    short = StepModel(OLMO_7B, base, cluster, fitted())
    moved = OLMO_7B.layers * OLMO_7B.block_weights * 4 / cluster.gpu.host_link
    assert 0.5 * moved < short.exposed_in_micro_batch < 1.5 * moved  # adding them up takes longer than copying
    long = StepModel(OLMO_7B, replace(base, micro_batch=16), cluster, fitted())
    assert long.exposed_in_micro_batch < 0.6 * short.exposed_in_micro_batch
    assert StepModel(OLMO_7B, replace(base, stage=1), cluster, fitted()).exposed_in_micro_batch == 0
    (best, *_) = search(OLMO_7B, cluster_of("1xA100-40"), Goal(2048, 64))
    assert best.candidate.stage > 1 and best.candidate.micro_batch > 1


def test_second_copies_of_weights_keep_gathers_inside_nodes() -> None:
    cluster, base = cluster_of("64xH100"), RunCandidate(64, stage=3, shard=64)
    near, far = (StepModel(OLMO_70B, replace(base, second=second), cluster, fitted()) for second in (8, 1))
    assert near.exposed_in_micro_batch < far.exposed_in_micro_batch
    assert near.exposed_in_step > far.exposed_in_step  # each copy is brought up to date once in a step
    memory = [footprint(OLMO_7B, model.candidate).kinds["parameters"] for model in (near, far)]
    assert memory[0] == pytest.approx(memory[1] + 2 * OLMO_7B.layers * OLMO_7B.block_weights / 8, rel=0.01)
    found = [one for one, _ in fitting(OLMO_7B, cluster_of("16xH100"), Goal(2048, 64))]
    assert {one.second * one.tensor for one in found if one.second > 1} == {8}  # a node


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(DoesNotFitError, match="no configuration of 8 A100-40 fits 405,853"):
        search(LLAMA_405B, cluster_of("8xA100-40"), Goal(8192))


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def test_the_page(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    out = str(tmp_path / "best.json")
    usual = ("--model", model, "--gpus", "16xH100", "--tokens", "1e11", "--price", "3", "--days", "50", "--write", out)
    page = run(capsys, *usual)
    assert page.startswith("8,030,261,248 parameters on 16 H100, bf16\n  the fastest that fits: stage ")
    for part in ("MFU ", "GPU-hours, ", "for 50 days: 4 GPUs", "the least that fits: 2 H100; "):
        assert part in page
    for part in ("matrix products", "binds", "where the memory goes", "what a GPU sends in a step", "x the time: "):
        assert part in page
    assert f"the configuration is in {out}" in page
    command = next(line.split()[1:-2] for line in page.splitlines() if line.startswith("  zerorun-schedule"))
    assert schedule.main(command) == 0
    capsys.readouterr()
    same = run(capsys, "--model", model, "--gpus", "16xH100", "--compare", out)
    assert "  1.00 x the time for a sequence; needs " in same
    figures: dict[str, Any] = json.loads(run(capsys, *usual, "--json"))
    assert figures["config"] == json.loads(Path(out).read_text(encoding="utf-8"))
    assert sum(figures["causes"].values()) == pytest.approx(figures["step_seconds"])
    assert figures["gpus_for_deadline"] == 4


def test_a_configuration_is_compared(capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, "zero_optimization": {"stage": 0}}')
    found = run(capsys, "--model", model, "--gpus", "8xH100", "--compare", str(path))
    assert f"{path}: stage 0, 8 replicas, micro-batch 4 x 32" in found
    assert "GiB of 79.1 GiB: too much" in found  # 18 bytes for each parameter
    path.write_text('{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"size": 3}}')
    kept = tmp_path / "kept.json"
    assert cli.main(["--model", model, "--gpus", "8xH100", "--compare", str(path), "--write", str(kept)]) == 2
    assert not kept.exists()
    assert "tensor_parallel.size = 3: 8 ranks are no multiple of 3 tensor ranks" in capsys.readouterr().err


def test_gpus_without_data_are_not_calibrated(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert "not calibrated: there is no published run with flash kernels on L40S" in run(
        capsys, "--model", model, "--gpus", "16xL40S"
    )


def test_bad_goals_and_models_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"goal\.seq = 5: is not known"):
        zerorun.plan_run(LLAMA_8B, "8xH100", {"seq": 5})
    with pytest.raises(ConfigError, match="does not tell its shape"):
        zerorun.plan_run(3, "8xH100")
    assert cli.main(["--model", "config.json"]) == 2
    assert "--gpus = null: is needed." in capsys.readouterr().err
    idle = ["--days", "3", "--price", "2", "--ranks", "5"]
    assert cli.main(["--model", "config.json", "--gpus", "8xH100", *idle]) == 2
    told = capsys.readouterr().err
    for key in (
        "--days = 3.0: it is about the whole run",
        "--price = 2.0: it is",
        "--ranks = 5: only --calibrate measures",
    ):
        assert key in told
    assert shape_of({**LLAMA_8B, "model_type": "mistral"}).parameters == 8_030_261_248


def test_a_link_is_as_fast_as_it_is_said_to_be(capsys: pytest.CaptureFixture[str], model: str) -> None:
    slow = json.loads(run(capsys, "--model", model, "--gpus", "16xH100", "--nics", "100", "--json"))
    fast = json.loads(run(capsys, "--model", model, "--gpus", "16xH100", "--json"))
    assert slow["step_seconds"] >= fast["step_seconds"]
    assert cluster_of("16xH100", nics_gbps=100).nics == 12.5 * GB


@pytest.mark.parametrize(
    ("shape", "gpus", "batch"), [(OLMO_7B, "8xH100", 64), (OLMO_70B, "64xH100", 64), (OLMO_1B, "1xA100-40", 8)]
)
def test_the_picture_ends_and_peaks_as_planned(shape: ModelShape, gpus: str, batch: int) -> None:
    plan = zerorun.plan_run(shape, gpus, {"batch": batch})
    stages: set[int] = set()
    for one in (plan.best, *plan.others):
        picture = step_picture(replace(plan, best=one))
        planned = one.memory.device + CONTEXT
        assert picture.peak <= 1.05 * planned  # for interleaved and zero-bubble schedules there is a formula
        assert one.candidate.schedule != "1f1b" or picture.peak == pytest.approx(planned)
        if picture.drawn == picture.micro_batches:
            assert picture.seconds == pytest.approx(one.step.seconds, rel=0.02 if one.candidate.pipe > 1 else 1e-6)
        assert all(before <= after for (before, _), (after, _) in pairwise(picture.moments))
        assert (picture.bars[0][1] > 0) == (picture.stage > 0)  # later stages wait for what the first sends
        stages.add(picture.stage)
        names, lengths = zip(*((name, end - begin) for name, begin, end in picture.bars), strict=True)
        backward = "weight gradient" if one.candidate.zero_bubble else "backward"
        assert names.count("forward") == names.count(backward) == picture.drawn * one.candidate.chunks
        assert min(lengths) > 0
    assert shape is not OLMO_70B or len(stages) > 2


def test_a_step_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    command = ["--model", str(tmp_path / "config.json"), "--gpus", "8xH100", "--picture"]
    assert cli.main([*command, str(tmp_path / "step.svg")]) == 0
    drawn = (tmp_path / "step.svg").read_text()
    assert all(word in drawn for word in ("optimizer states", "backward", "H100", "GiB"))
    assert cli.main([*command, str(tmp_path / "step.pdf")]) == 2
    assert "--picture" in capsys.readouterr().err and not (tmp_path / "step.pdf").exists()
