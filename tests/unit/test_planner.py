"""The planner's model of a step: published runs, and what must hold whatever the constants are."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import patience
from hypothesis import given, settings
from hypothesis import strategies as st

from zerorun.errors import ConfigError
from zerorun.planner import cli
from zerorun.planner.calibration import Calibration, Constants, calibration_of, fitted, save_local
from zerorun.planner.candidate import KernelGeneration, RunCandidate
from zerorun.planner.hardware import GB, GPUS, LOCAL, Cluster, cluster_of
from zerorun.planner.links import RankGroup, all_reduce_seconds, bandwidth, exchange_seconds, gather_seconds
from zerorun.planner.model_configs import read_shape, shape_of
from zerorun.planner.model_shape import ModelShape
from zerorun.planner.published_runs import PublishedRun, published_runs
from zerorun.planner.search import Goal
from zerorun.planner.step_time import StepModel, step_time

ROOT = Path(__file__).parents[2]
RUNS = Path(__file__).parent / "data" / "published_runs.csv"
SMALL = ModelShape(24, 2048, 16, 16, 128, 8192, 3, 50304)
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama", "tie_word_embeddings": False}


QWEN3_235B = {"model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536}
QWEN3_235B |= {"num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
QWEN3_235B |= {"vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048}
DEEPSEEK_V3 |= {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280}
DEEPSEEK_V3 |= {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3}
DEEPSEEK_V3 |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
DEEPSEEK_V3 |= {"v_head_dim": 128, "tie_word_embeddings": False}


def runs() -> list[PublishedRun]:
    return [*published_runs(RUNS)]


def seconds(shape: ModelShape, candidate: RunCandidate, cluster: Cluster, calibration: Calibration | None = None) -> float:
    return step_time(shape, candidate, cluster, calibration or fitted()).seconds


# -- published runs ----------------------------------------------------------------------------------------------


def test_published_runs_are_predicted() -> None:
    errors = sorted(
        abs(run.predicted(fitted()) / (run.tokens_per_s_gpu or 0) - 1) for run in runs() if not run.fields["cell"]
    )
    assert len(errors) == 20
    assert errors[len(errors) // 2] < 0.06
    assert errors[-3] < 0.12


def test_the_fastest_of_measured_configurations_is_predicted_to_be() -> None:
    cell = [run for run in runs() if run.fields["cell"].startswith("8.86B")]
    assert max(cell, key=lambda run: run.predicted(fitted())) == max(cell, key=lambda run: run.tokens_per_s_gpu or 0)


def test_the_fit_has_few_numbers() -> None:
    assert len(Constants.__dataclass_fields__) == 12
    assert all(key.split("/")[1] in {kernels.value for kernels in KernelGeneration} for key in fitted().efficiencies)
    assert fitted().median < 0.05
    assert fitted().p90 < 0.15
    assert not fitted().has(GPUS["L40S"], KernelGeneration.FLASH)  # nobody published a run that could be used


def test_nine_of_ten_runs_are_in_their_range() -> None:
    """By generations of kernels, on one node and on several; and where nothing was measured, the range is wider."""
    calibration, inside = fitted(), []
    for key, found in calibration.ratios.items():
        family, generation = key.split("/")
        gpu, kernels = next(gpu for gpu in GPUS.values() if gpu.family == family), KernelGeneration(generation)
        for nodes, ratio in found:
            low, high = calibration.spread(gpu, kernels, nodes)
            assert 0.6 < low < 1 < high < 1.4
            inside.append((generation, nodes > 1, low <= ratio <= high))
    assert len(inside) == 189
    for kind in {(generation, several) for generation, several, _ in inside}:
        own = [found for generation, several, found in inside if (generation, several) == kind]
        assert sum(own) >= 0.9 * len(own) or len(own) < 20, kind
    assert sum(found for *_, found in inside) >= 0.9 * len(inside)
    near, far, unknown = (
        calibration.spread(GPUS[name], KernelGeneration.FLASH, nodes)
        for name, nodes in (("H100", 8), ("H100", 4096), ("L40S", 8))
    )
    assert far[0] < near[0] and far[1] > near[1]
    assert unknown == (1 - calibration.held_out[1], 1 + calibration.held_out[1])


def test_the_command_writes_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "predicted.csv"
    assert cli.main(["--predict", str(RUNS), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"23 runs of {RUNS}: predictions are in {out}\n"
    with open(out, encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    assert [row["id"] for row in rows] == [run.id for run in runs()]
    assert all(30 < float(row["tokens_per_s_gpu"]) < 60000 for row in rows)


def test_the_planner_needs_no_torch() -> None:
    code = "import sys, zerorun.planner.cli, zerorun.planner.step_time; print(sorted({'torch', 'numpy'} & {*sys.modules}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "[]\n"


def test_runs_on_other_accelerators_are_left_out(tmp_path: Path) -> None:
    lines = RUNS.read_text(encoding="utf-8").splitlines()
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([*lines[:2], lines[2].replace("A100-40", "TPU-v5p"), lines[3]]), encoding="utf-8")
    assert [run.id for run in published_runs(path)] == ["lf055"]


def test_a_row_that_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = RUNS.read_text(encoding="utf-8").splitlines()
    path, out = tmp_path / "runs.csv", tmp_path / "out.csv"
    good = dict(zip(lines[1].split(","), lines[2].split(","), strict=False))
    wrong = {
        "layers": ("many", "is no finite number"),
        "hidden": ("3.5", "is no whole number from 1 on"),
        "vocab": ("-3", "is no whole number from 1 on"),
        "seq": ("nan", "is no finite number"),
        "kv_heads": ("3", "does not divide 32 heads"),
        "zero": ("7", "is no stage"),
        "precision": ("int3", "is not known. Remedy: use bf16, bf16-pure"),
        "offload": ("optimizer:nvme", "is not known. Remedy: use none, optimizer:cpu"),
        "nic_gbps_per_node": ("0", "is not above 0"),
        "gpus": ("9", "are not the 1 x 1 x 1 x 8 tensor ranks, context ranks, stages and replicas"),
    }
    rows = [good, *({**good, "id": f"bad {key}", key: value} for key, (value, _) in wrong.items())]
    text = "\n".join([lines[1], *(",".join(row.values()) for row in rows)])
    path.write_text(text, encoding="utf-8")
    assert cli.main(["--predict", str(path), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert f"{len(wrong)} problems" in said and not out.exists()  # one for each row
    for key, (value, reason) in wrong.items():
        shown = value if key in ("zero", "kv_heads", "gpus") else f'"{value}"'
        assert f"row bad {key}: {key} = {shown}: {reason}" in said
    path.write_text("id,gpu\n1,H100\n")
    assert cli.main(["--predict", str(path), "--out", str(out)]) == 2
    assert "row 1: nic_gbps_per_node = null: is missing" in capsys.readouterr().err
    path.write_bytes(b"\xc5\x00\x01")
    assert cli.main(["--predict", str(path), "--out", str(out)]) == 2
    assert "is no table: 'utf-8' codec can't decode" in capsys.readouterr().err


# -- models and clusters -----------------------------------------------------------------------------------------


def test_shapes_have_the_parameters_of_their_models() -> None:
    assert shape_of(LLAMA_8B).parameters == 8_030_261_248
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    assert shape_of(gpt2).parameters == 124_439_808
    mixtral = {**LLAMA_8B, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert shape_of(mixtral).parameters == 46_702_792_704
    assert shape_of(mixtral).used_parameters == 12_748_849_152
    assert shape_of(QWEN3_235B).parameters == 235_093_634_560
    deepseek = shape_of(DEEPSEEK_V3)
    assert deepseek.parameters == 671_026_404_352
    assert deepseek.used_parameters == pytest.approx(37e9, rel=0.02)  # as its authors say


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("model_type", "jamba", 'model_type = "jamba": of mixtures, blocks are known of deepseek_v2, '),
        ("decoder_sparse_step", 2, r"decoder_sparse_step = 2: blocks \[0, 2, .* have no experts"),
        ("mlp_only_layers", [5], r"mlp_only_layers = \[5\]: blocks \[5\] have no experts"),
        ("moe_layer_freq", 2, "moe_layer_freq = 2: not every block has experts"),
    ],
)
def test_mixtures_whose_blocks_are_not_known_are_refused(key: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        shape_of({**QWEN3_235B, key: value})


def test_rows_of_mixtures_are_read(tmp_path: Path) -> None:
    """The ranks with different experts, and what a block has beside experts."""
    lines = RUNS.read_text(encoding="utf-8").splitlines()
    names, row = lines[1].split(","), dict(zip(lines[1].split(","), lines[4].split(","), strict=False))
    assert row["moe"] == "" and row["ep"] == "1"
    row |= {"moe": '"256 experts, top 8, 1 shared; first 3 layers dense 18432; MLA"', "ep": "64", "layers": "61"}
    row |= {
        "hidden": "7168",
        "heads": "128",
        "kv_heads": "128",
        "ffn": "2048",
        "ffn_mats": "3",
        "vocab": "129280",
        "tied": "0",
    }
    (tmp_path / "runs.csv").write_text("\n".join([lines[1], ",".join(row[name] for name in names)]), encoding="utf-8")
    (run,) = published_runs(tmp_path / "runs.csv")
    assert run.candidate.expert == 64
    assert run.shape.parameters == pytest.approx(671e9, rel=0.001)
    alone = replace(run.candidate, expert=1)
    assert run.step_time(fitted()).causes["rows to experts"] > 0
    assert step_time(run.shape, alone, run.cluster, fitted()).causes["rows to experts"] == 0


def test_bad_input_is_told(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 8}', encoding="utf-8")
    with pytest.raises(ConfigError, match="num_hidden_layers = null: is not in the configuration of the model"):
        read_shape(path)
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_shape(path)
    for text, reason in (
        ("384H100", "is no number of GPUs"),
        ("²xH100", "is no number of GPUs"),
        ("99999999999999xH100", "is no number of GPUs up to 1,048,576"),
        ("8xV100", "is not in the table of GPUs"),
        ("12xH100", "does not fill nodes of 8 GPUs"),
    ):
        with pytest.raises(ConfigError, match=reason):
            cluster_of(text)
    assert cluster_of("384xh100").nodes == 48
    assert cluster_of("16xA100-40", nics_gbps=400).nics == 50 * GB


@pytest.mark.parametrize(
    "argument",
    [
        *(
            "--failure-hours=inf",
            "--failure-hours=0",
            "--nics=0",
            "--host-memory=-1",
            "--tokens=-1e9",
            "--tokens=nan",
            "--price=-2",
        ),
        "--host-memory=-1",
        *("--days=-3", "--days=nan", "--disk=-5", "--disk=inf", "--batch=0", "--sequence=1.5", "--gpus-per-node=0"),
    ],
)
def test_arguments_that_are_no_numbers_are_told(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--model", "config.json", "--gpus", "16xH100", argument])
    assert ended.value.code == 2
    name, value = argument.split("=")
    assert f"argument {name}: '{value}' is not " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("goal", "reason"),
    [
        ({"tokens": -1.0}, r"goal\.tokens = -1.0: is no finite number from 0 on"),
        ({"days": float("nan")}, r"goal\.days = NaN: is no finite number from 0 on"),
        ({"failure_hours": float("inf")}, r"goal\.failure_hours = Infinity: is no finite number above 0"),
        ({"sequence": 0, "batch": True}, r"goal\.sequence = 0: is no whole .*\n.*goal\.batch = true: is no whole"),
        ({"precision": "int3"}, r"goal\.precision = \"int3\": is not known"),
    ],
)
def test_goals_that_are_no_numbers_are_told(goal: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Goal(**goal)


def test_clusters_that_are_no_numbers_are_told() -> None:
    with pytest.raises(ConfigError, match=r"gpus = 0: is no whole.*\n.*nics = 0.0: is no finite.*\n.*disk = -1.0: is no"):
        Cluster(GPUS["H100"], 0, nics=0.0, disk=-1.0)


# -- this machine ------------------------------------------------------------------------------------------------


def test_a_machine_that_was_measured_can_be_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block that was measured is predicted to take what it took, and so is an update."""
    from zerorun.planner import this_machine

    took = iter([0.1, 0.02, 0.01, 0.05, 1e-4, 0.1, 6e-3, 0.9, this_machine._UPDATED * 2e-9])
    monkeypatch.setattr(this_machine._Clock, "seconds", lambda self, run: next(took))
    monkeypatch.setattr(this_machine, "_ON_CPU", replace(this_machine._ON_CPU, matrices=(8, 16, 1024)))
    monkeypatch.setenv("ZERORUN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ZERORUN_DEVICE", "cpu")
    with pytest.raises(ConfigError, match="run zerorun-plan --calibrate --ranks 1"):
        cluster_of("1xlocal")
    assert cli.main(["--calibrate"]) == 0
    out, _ = capsys.readouterr()
    assert "matrix products in fp32 0.215 TFLOP/s" in out and str(tmp_path) in out
    cluster, sizes = cluster_of("1xlocal"), this_machine._ON_CPU
    model = StepModel(
        sizes.shape, RunCandidate(1, sequence=sizes.sequence, precision="fp32"), cluster, calibration_of(cluster.gpu)
    )
    assert model.block.forward + model.block.backward == pytest.approx(0.9 / 6)
    numel = 6 * sizes.shape.block_weights + 2 * sizes.shape.vocab * 512
    assert model.update_seconds() == pytest.approx(2e-9 * numel)
    with pytest.raises(ConfigError, match="not been measured with 2 ranks"):
        cluster_of("2xlocal")
    (tmp_path / "model.json").write_text(json.dumps({**LLAMA_8B, "num_hidden_layers": 1, "vocab_size": 1000}))
    assert cli.main(["--model", str(tmp_path / "model.json"), "--gpus", "1xlocal", "--precision", "fp32"]) == 0
    assert "on 1 local, fp32" in capsys.readouterr().out


@pytest.mark.parametrize("kept", ["[]", '{"1": 3}', '{"1": {"gpu": {}}}', "null", "{"])
def test_what_another_version_measured_is_measured_again(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERORUN_CACHE_DIR", str(tmp_path))
    (tmp_path / "planner.json").write_text(kept)
    with pytest.raises(ConfigError, match="run zerorun-plan --calibrate --ranks 1"):
        cluster_of("1xlocal")
    save_local(replace(GPUS["H100"], name=LOCAL, is_host=True), 0.5, 1e-3, 1e-9)
    assert 0 < cluster_of("1xlocal").host_memory < 2**60  # what this machine has


@pytest.mark.nightly
def test_ranks_measure_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerorun.planner.cli", "--calibrate", "--ranks", "2"]
    environment = {**os.environ, "ZERORUN_CACHE_DIR": str(tmp_path), "ZERORUN_DEVICE": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300 * patience(), check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "a gather takes" in done.stdout
        and "a sum over ranks takes" in done.stdout
        and "plan with --gpus 2xlocal" in done.stdout
    )


# -- links -------------------------------------------------------------------------------------------------------


def test_a_group_has_its_share_of_the_cards() -> None:
    cluster = cluster_of("32xH200")
    whole, one_each = RankGroup.of(cluster, 32, 1), RankGroup.of(cluster, 4, 8)
    assert (whole.near, whole.nodes) == (8, 4)
    assert (one_each.near, one_each.nodes) == (1, 4)
    assert bandwidth(cluster, whole) == pytest.approx(360 * GB)  # NVLink; 365 GB/s were measured on such nodes
    assert bandwidth(cluster, one_each) == pytest.approx(46 * GB)
    assert bandwidth(replace(cluster, nics=100 * GB), whole) == pytest.approx(92 * GB)
    assert RankGroup.of(cluster_of("64xGB200"), 64, 1).nodes == 1  # NVLink joins 72


@given(st.integers(0, 9), st.integers(0, 3), st.floats(1, 1e10))
def test_collectives_grow_with_bytes_and_shrink_with_links(doublings: int, apart: int, nbytes: float) -> None:
    cluster = cluster_of("4096xH100")
    faster = replace(cluster, nics=2 * cluster.nics, gpu=replace(cluster.gpu, nvlink=2 * cluster.gpu.nvlink))
    group = RankGroup.of(cluster, 2**doublings, 2**apart)
    for collective in (gather_seconds, all_reduce_seconds, exchange_seconds):
        assert collective(cluster, group, nbytes) <= collective(cluster, group, 2 * nbytes)
        assert collective(faster, group, nbytes) <= collective(cluster, group, nbytes)
    assert all_reduce_seconds(cluster, group, nbytes) <= 2 * gather_seconds(cluster, group, nbytes) + 1e-12


def test_a_sum_takes_what_was_measured() -> None:
    """Inside a node; between nodes it is made of what cards send."""
    cluster = cluster_of("32xH100")
    measured = replace(cluster, gpu=replace(cluster.gpu, latency=1e-5, sum_latency=1e-4, sum_rate=GB))
    near, far = RankGroup.of(cluster, 4, 1), RankGroup.of(cluster, 4, 8)
    assert all_reduce_seconds(measured, near, 1e9) == pytest.approx(1e-4 + 2 * 0.75)
    assert all_reduce_seconds(measured, far, 1e9) == pytest.approx(2e-5 + 2 * 0.75 / 46, rel=1e-3)


def test_rows_go_to_all_ranks_at_once() -> None:
    """On one node over NVLink; over 4 nodes three quarters of them over the ranks' own cards."""
    cluster, rows = cluster_of("64xH100"), 1e9
    near, far = (exchange_seconds(cluster, RankGroup.of(cluster, size, 1), rows) for size in (8, 32))
    assert near == pytest.approx(rows * 7 / 8 / (360 * GB), rel=0.01)
    assert far == pytest.approx(rows * 3 / 4 / (46 * GB), rel=0.01)
    assert exchange_seconds(cluster, RankGroup.of(cluster, 1, 1), rows) == 0.0


# -- steps -------------------------------------------------------------------------------------------------------


def pipeline_of(gathers: Sequence[float], computes: Sequence[float], slots: int) -> float:
    """[Note: streams] of step_time.py, block by block."""
    gathered, computed = [0.0], [0.0]
    for number, (gather, compute) in enumerate(zip(gathers, computes, strict=True)):
        free = computed[max(number + 1 - slots, 0)]
        gathered.append(max(gathered[-1], free) + gather)
        computed.append(max(computed[-1], gathered[-1]) + compute)
    return computed[-1]


@pytest.mark.parametrize("nics", [400 * GB, 40 * GB, 4 * GB])
def test_the_period_is_that_of_the_recurrence(nics: float) -> None:
    """With nothing to pay for what is hidden, blocks take as long as the recurrence says, block by block."""
    calibration = replace(fitted(), constants=replace(fitted().constants, interference=0.0))
    candidate = RunCandidate(64, stage=3, shard=64, micro_batch=4, reduces_once=True)
    model = StepModel(SMALL, candidate, Cluster(GPUS["H100"], 64, 8, nics), calibration)
    gather = gather_seconds(model.cluster, model.shard_group, 2 * SMALL.block_weights)
    exact = pipeline_of([gather] * 24, [model.block.forward] * 24, 2) + pipeline_of(
        [gather] * 24, [model.block.backward] * 24, 2
    )
    closed = 24 * model.block.seconds + model.exposed_in_micro_batch
    assert closed == pytest.approx(exact, rel=0.03)


candidates = st.builds(
    lambda tensor, pipe, data, stage, micro, accumulation, checkpointing, kernels: RunCandidate(
        data=8 // tensor * data,
        tensor=tensor,
        pipe=pipe,
        stage=stage,
        shard=8 // tensor * data if stage else 1,
        micro_batch=micro,
        accumulation=accumulation,
        checkpointing=checkpointing,
        kernels=kernels,
    ),
    *(st.sampled_from(values) for values in ([1, 2, 8], [1, 2, 6], [1, 4], [0, 1, 2, 3], [1, 4], [1, 16])),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(list(KernelGeneration)),
)


@settings(deadline=None, max_examples=60)
@given(candidates, st.sampled_from(sorted(GPUS)))
def test_better_hardware_is_never_slower(candidate: RunCandidate, name: str) -> None:
    cluster = Cluster(GPUS[name], candidate.world, min(8, candidate.world))
    base = seconds(SMALL, candidate, cluster)
    for better in ("hbm", "nvlink", "peak", "matmul", "host_link"):
        gpu = replace(cluster.gpu, **{better: 1.5 * getattr(cluster.gpu, better)})
        assert seconds(SMALL, candidate, replace(cluster, gpu=gpu)) <= base * (1 + 1e-9), better
    assert seconds(SMALL, candidate, replace(cluster, nics=2 * cluster.nics)) <= base * (1 + 1e-9)
    assert seconds(replace(SMALL, layers=SMALL.layers + 6), candidate, cluster) > base
    assert seconds(SMALL, replace(candidate, checkpointing="full"), cluster) >= base
    assert all(value >= -1e-12 for value in step_time(SMALL, candidate, cluster, fitted()).causes.values())


def test_what_spread_experts_cost_and_spare() -> None:
    """Rows are sent, but weights of experts are not; and a rank's experts have more rows each, for the same FLOPs."""
    shape, cluster, calibration = shape_of(QWEN3_235B), cluster_of("64xH100"), fitted()
    base = RunCandidate(64, stage=3, shard=64, sequence=4096)
    alone, spread = (StepModel(shape, replace(base, expert=expert), cluster, calibration) for expert in (1, 8))
    assert spread.block.rows > alone.block.rows == 0.0
    assert spread.block.work[0].products < alone.block.work[0].products
    assert sum(family.numel for family in spread.families) < 0.2 * alone.families[0].numel
    assert spread.families[1].shards == RankGroup(8, 1)  # one rank in each node has these experts
    assert spread.exposed_in_micro_batch < alone.exposed_in_micro_batch
    far = StepModel(shape, replace(base, expert=64), replace(cluster, nics=cluster.nics / 4), calibration)
    assert far.block.rows > 4 * spread.block.rows
    # Half of the tokens' rows on each of two tensor ranks, of which both have different experts.
    tensor = StepModel(shape, replace(base, data=32, shard=32, tensor=2, expert=8), cluster, calibration)
    assert tensor.block.rows == pytest.approx(spread.block.rows / 2, rel=0.1)


def test_shared_experts_hide_rows() -> None:
    shape, cluster, base = shape_of(DEEPSEEK_V3), cluster_of("64xH100"), RunCandidate(64, sequence=4096, expert=8)
    bare = replace(shape, shared_ffn=0)
    hidden, seen = (StepModel(one, base, cluster, fitted()).block.rows for one in (shape, bare))
    assert 0 < hidden < seen


def test_blocks_are_divided_as_evenly_as_they_can_be() -> None:
    def stages(layers: int, pipe: int, head: float) -> float:
        model = StepModel(replace(SMALL, layers=layers), RunCandidate(1, pipe=pipe), cluster_of("8xH100"), fitted())
        return model.period(head * model.block.seconds) / model.block.seconds

    assert stages(24, 4, 0.0) == pytest.approx(6)
    assert stages(24, 4, 0.5) == pytest.approx(6.5)  # the last stage has the head beside its six
    assert stages(24, 4, 1.5) == pytest.approx(7)  # it has five, and two others have seven
    assert stages(23, 4, 1.0) == pytest.approx(6)
    assert stages(24, 1, 2.0) == pytest.approx(26)


def test_an_update_in_host_memory_takes_what_the_node_can_move() -> None:
    candidate: Any = RunCandidate(8, stage=3, shard=8, offload_optimizer=True)
    cluster = cluster_of("8xH200")
    slow = replace(cluster, host_bandwidth=cluster.host_bandwidth / 2)
    more = seconds(SMALL, candidate, slow) - seconds(SMALL, candidate, cluster)
    assert more == pytest.approx(28 * SMALL.parameters / (0.8 * cluster.host_bandwidth), rel=0.01)
