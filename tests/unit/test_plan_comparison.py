"""zerorun-plan --compare: a file is what zerorun makes of it, and what is not counted of it is named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from covering import by_day
from test_plan_search import MIXTRAL, OLMO_7B, OLMO_70B
from test_planner import LLAMA_8B

import zerorun
from zerorun.errors import ConfigError, DoesNotFitError
from zerorun.planner import cli
from zerorun.planner.answer import RunPlan
from zerorun.planner.candidate import KernelGeneration
from zerorun.planner.comparison import Comparison, compared
from zerorun.planner.footprint import footprints
from zerorun.planner.hardware import GB, Cluster, cluster_of
from zerorun.planner.model_configs import shape_of
from zerorun.planner.search import Goal
from zerorun.planner.step_time import StepModel

BF16: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
PIPELINE = {**BF16, "gradient_accumulation_steps": 32, "zero_optimization": {"stage": 1}}
# As in the files that come with Hugging Face's Trainer.
TRAINER: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return zerorun.plan_run(LLAMA_8B, "64xH100", {"sequence": 4096, "batch": 1024})


def given(plan: RunPlan, folder: Path, content: dict[str, Any]) -> Comparison:
    path = folder / "ds.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return compared(path, plan)


def random_question(chance: random.Random) -> RunPlan:
    """A plan of something; it is drawn anew if nothing fits."""
    shape = chance.choice([OLMO_7B, OLMO_70B, shape_of(LLAMA_8B), shape_of(MIXTRAL)])
    gpus, sequence = chance.choice([1, 2, 3, 4, 8, 16, 24, 64]), chance.choice([2048, 8192, 16384])
    table = cluster_of(f"{gpus}x{chance.choice(['A100-40', 'A100-80', 'H100', 'RTX4090', 'B200'])}")
    goal = Goal(
        sequence=sequence,
        batch=gpus * chance.choice([1, 8, 12]),
        precision=chance.choice(["bf16", "bf16-pure", "fp16", "fp32", "fp8"]),
        kernels=chance.choice([KernelGeneration.FLASH, KernelGeneration.FUSED]),
        offload=chance.random() < 0.7,
    )
    disk = chance.choice([0.0, 6 * GB])
    try:
        return zerorun.plan_run(
            shape, Cluster(table.gpu, gpus, 8, table.nics, chance.choice([1e11, 2e12]), disk=disk), goal
        )
    except DoesNotFitError:
        return random_question(chance)


@pytest.mark.parametrize("seed", by_day(range(40), 0, 1, 2, 3))
def test_a_plan_is_as_fast_as_itself(seed: int, tmp_path: Path) -> None:
    """What is written and read again is the same candidate, of which all keys count."""
    plan = random_question(random.Random(seed))
    found = given(plan, tmp_path, plan.config)
    assert found.given.candidate == plan.best.candidate
    assert found.ratio == 1.0 and found.fits
    assert found.given.memory == plan.best.memory
    assert found.not_counted == {}


def test_auto_means_what_zerorun_makes_of_it(plan: RunPlan, tmp_path: Path) -> None:
    """bf16, one sequence at a time, and the batch of the question, as in a file that says so."""
    found = given(plan, tmp_path, TRAINER)
    assert found.given.candidate == given(plan, tmp_path, {**BF16, "zero_optimization": {"stage": 3}}).given.candidate
    assert found.given.candidate.precision == "bf16" and found.given.candidate.batch == 1024
    assert found.not_counted == {}


def test_batches_are_those_of_the_file(plan: RunPlan, tmp_path: Path) -> None:
    content = {"train_batch_size": 2048, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    candidate = given(plan, tmp_path, content).given.candidate
    assert (candidate.micro_batch, candidate.accumulation, candidate.batch) == (8, 4, 2048)


def test_groups_that_divide_states_are_those_of_the_file(plan: RunPlan, tmp_path: Path) -> None:
    for zero, shard in (
        ({"stage": "HYBRID_SHARD"}, 8),
        ({"stage": 3, "mics_shard_size": 4}, 4),
        ({"stage": 2, "shard_degree": 16}, 16),
        ({"stage": 3}, 64),
        ({"stage": 0}, 1),
    ):
        found = given(plan, tmp_path, {**BF16, "zero_optimization": zero})
        assert found.given.candidate.shard == shard and found.not_counted == {}, zero


def test_schedules_keep_and_wait_as_they_do(plan: RunPlan, tmp_path: Path) -> None:
    """GPipe keeps all micro-batches, the naive order one; the first stages of four, with 32 micro-batches."""
    found = {
        schedule: given(plan, tmp_path, {**PIPELINE, "pipeline": {"stages": 4, "schedule": schedule}})
        for schedule in ("1f1b", "gpipe", "naive", "zero_bubble")
    }
    kept = {
        schedule: footprints(plan.shape, one.given.candidate)[0].activations for schedule, one in found.items()
    }  # on the first stage, which has no logits
    assert kept["gpipe"] == pytest.approx(8 * kept["1f1b"], rel=0.01)
    assert kept["naive"] == pytest.approx(kept["1f1b"] / 4, rel=0.01)
    seconds = {schedule: one.given.step.seconds for schedule, one in found.items()}
    assert seconds["zero_bubble"] < seconds["1f1b"] <= seconds["gpipe"] < 1.1 * seconds["1f1b"]
    assert 3 < seconds["naive"] / seconds["1f1b"] < 4
    assert "4 stages in gpipe order" in "\n".join(found["gpipe"].page()) and not found["gpipe"].fits
    for one in found.values():  # the closed form is near
        closed = StepModel(plan.shape, one.given.candidate, plan.cluster, plan.calibration).step()
        assert closed.seconds == pytest.approx(one.given.step.seconds, rel=0.03)


def test_blocks_that_run_again_are_counted(plan: RunPlan, tmp_path: Path) -> None:
    """One of two blocks, of three, of four: less is computed again, and more is kept."""
    found = [
        given(plan, tmp_path, {**PIPELINE, "activation_checkpointing": {"policy": "every_n", "every_n": every}}).given
        for every in (1, 2, 3, 4)
    ]
    assert found == sorted(found, key=lambda one: -one.step.seconds)
    assert found == sorted(found, key=lambda one: one.memory.activations)
    whole = given(plan, tmp_path, {**PIPELINE, "activation_checkpointing": {"policy": "full"}}).given
    assert found[0].step == whole.step


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"train_batch_size": 1000, "bf16": {"enabled": True}}, "train_batch_size = 1000"),
        ({"zero_optimization": {"stage": 3, "shard_degree": 7}}, "shard_degree = 7: must divide the 64"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, "zero_hpz_partition_size = 3: must divide"),
        (
            {"zero_optimization": {"stage": "HYBRID_SHARD"}, "tensor_parallel": {"size": 16}},
            "shard_degree = 8: must divide",
        ),
        ({"zero_optimization": {"stage": "auto"}}, 'stage = "auto": cannot be decided'),
        ({"tensor_parallel": {"size": 64}}, "tensor_parallel.size = 64: does not divide 32 heads"),
        ({"tensor_parallel": {"size": 3}}, "tensor_parallel.size = 3: 64 ranks are no multiple"),
        ({"pipeline": {"stages": 64}}, "pipeline.stages = 64: 64 parts have fewer than one of the 32 blocks"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, "autoep_size = 4: does not go with 1 experts"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
            'offload_optimizer.device = "nvme": .* give --disk',
        ),
    ],
)
def test_what_zerorun_refuses_is_refused(plan: RunPlan, tmp_path: Path, content: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        given(plan, tmp_path, content if "train_batch_size" in content else {**BF16, **content})


def test_what_is_not_counted_is_named(plan: RunPlan, tmp_path: Path) -> None:
    """And nothing else: not what has no effect, is switched off, or changes neither time nor memory."""
    content = {
        **BF16,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "ratio": 0.4, "buffer_count": 7},
            "offload_param": {"device": "nvme", "nvme_path": "/x"},
            "stage3_prefetch_bucket_size": 1e9,
            "overlap_param_gather": True,
        },
        "optimizer": {"type": "Adam8bit", "params": {"lr": 1e-3}},
        "activation_checkpointing": {"policy": "full", "cpu_checkpointing": True, "profile": True},
        "compile": {"backend": "aot_eager"},
        "fp8": {"recipe": "tensorwise"},
        "torch_autocast": {"dtype": "fp16"},
        "gradient_clipping": 0.3,
        "seed": 5,
        "checkpoint": {"dir": "/x", "every_steps": 9},
    }
    found = given(plan, tmp_path, content)
    assert found.not_counted == {
        "optimizer.type": "Adam8bit",
        "activation_checkpointing.cpu_checkpointing": True,
        "zero_optimization.offload_optimizer.ratio": 0.4,
        "zero_optimization.offload_param.device": "nvme",
        "zero_optimization.stage3_prefetch_bucket_size": 1_000_000_000,
    }
    assert "  not counted: optimizer.type = 'Adam8bit', activation_checkpointing.cpu_checkpointing = True, " in "\n".join(
        found.page()
    )
    pure = {"enabled": True, "bf16_master_weights_and_grads": True}
    assert given(plan, tmp_path, {**BF16, "bf16": pure}).not_counted == {"bf16.bf16_optimizer_states": False}
    shared = given(plan, tmp_path, {**BF16, "tensor_parallel": {"size": 16}}).not_counted
    assert shared == {"tensor_parallel.size, with heads of keys on several ranks": 16}


def test_json_has_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    disks = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**BF16, "zero_optimization": disks}))
    command = ["--model", str(tmp_path / "config.json"), "--gpus", "8xH100", "--compare", str(path)]
    assert cli.main(command) == 2
    assert "give --disk" in capsys.readouterr().err
    assert cli.main([*command, "--json", "--disk", "12"]) == 0
    found = json.loads(capsys.readouterr().out)["comparison"]
    assert found["file"] == str(path) and found["time_ratio"] > 1 and found["fits"] is True
    assert found["config"]["zero_optimization"]["offload_optimizer"]["device"] == "nvme"
    assert found["not_counted"] == {}
