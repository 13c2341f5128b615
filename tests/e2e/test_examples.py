"""The examples as a user starts them, with tiny models; those that others start like that are forked."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from harness import fork_program

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
LAUNCHER = ("-m", "zerorun.launcher.cli", "--nproc-per-node", "2")
TINY = ("--layers", "2", "--width", "32", "--heads", "2", "--context", "32")
TIMEOUT_S = 120  # several times what a quiet machine needs
PLOTS = ("matplotlib.pyplot", "matplotlib.backends.backend_agg", "tqdm", "psutil")  # what the examples import
PNG = b"\x89PNG\r\n\x1a\n"


def run(*command: str, folder: Path) -> str:
    """Run Python with ``command`` in ``folder`` and return its stdout; fails unless it exits with 0."""
    drop = ("ZERORUN_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    env |= {"ZERORUN_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


def train_gpt(config: str, steps: int = 5) -> tuple[str, ...]:
    script = str(ROOT / "examples" / "train_gpt.py")
    return (script, "--config", str(CONFIGS / f"{config}.json"), *TINY, "--steps", str(steps))


def losses(folder: Path) -> list[list[str]]:
    with open(folder / "loss.csv", newline="") as file:
        return list(csv.reader(file))


at_night = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.mark.nightly  # by day the tests below run the example, and those of ranks the stages and precisions
@pytest.mark.parametrize("config", ("zero0", "zero1", "zero2", "zero3", "bf16", "fp16"))
def test_train_gpt(tmp_path: Path, config: str) -> None:
    out = run(*LAUNCHER, *train_gpt(config), folder=tmp_path)
    assert "step 5/5: loss " in out
    assert out.splitlines()[-1].startswith("validation loss ")
    assert "nats/byte (uniform 5.545, start " in out
    results = tmp_path / "runs" / config
    rows = losses(results)
    assert rows[0] == ["step", "training_loss", "validation_loss"]
    assert [row[0] for row in rows[1:]] == ["0", "5"]
    assert (results / "loss.png").read_bytes().startswith(PNG)


@pytest.mark.nightly  # by day: test_train_hf; test_equivalence.py for what the stages give
def test_stage_and_world_size_change_nothing(tmp_path: Path) -> None:
    """One process at stage 0 and two at stage 3 see the same batches and get the same losses."""
    fork_program(1, *train_gpt("zero0"), "--out", "one", folder=tmp_path, modules=PLOTS)
    fork_program(2, *train_gpt("zero3"), "--out", "two", folder=tmp_path, modules=PLOTS)
    rows = {name: losses(tmp_path / name)[1:] for name in ("one", "two")}
    one, two = ([float(value) for row in found for value in row if value] for found in rows.values())
    assert two == pytest.approx(one, rel=1e-5)


def train_3d(folder: Path, tensor: int, stages: int, **pipeline: object) -> tuple[str, ...]:
    """The command for a configuration of its own, which differs from 3d.json in the degrees and in ``pipeline``."""
    config = json.loads((CONFIGS / "3d.json").read_text())
    config["tensor_parallel"]["size"] = tensor
    config["pipeline"] = {**config["pipeline"], "stages": stages, **pipeline}
    path = folder / f"{tensor}x{stages}.json"
    path.write_text(json.dumps(config))
    return (str(ROOT / "examples" / "train_3d.py"), "--config", str(path), *TINY, "--steps", "3", "--eval-every", "1")


@pytest.mark.nightly
def test_train_3d_on_eight_ranks_is_the_run_of_one(tmp_path: Path) -> None:
    """2 stages x 2 tensor ranks x 2 data-parallel ranks; the trace is one that zerorun-schedule draws."""
    one = run(*train_3d(tmp_path, 1, 1), "--out", "one", folder=tmp_path)
    assert "1 rank = " in one
    options = ("--out", "eight", "--record", "trace.json")
    out = run(*LAUNCHER[:-1], "8", *train_3d(tmp_path, 2, 2), *options, folder=tmp_path)
    assert out.startswith("8 ranks = pipe 2 x replicate 1 x shard 2 x tensor 2;")
    assert "step 3/3: loss " in out
    rows = {name: losses(tmp_path / name)[1:] for name in ("one", "eight")}
    single, divided = ([float(value) for row in found for value in row if value] for found in rows.values())
    assert len(single) == 4 + 3 + 4  # steps, training and validation losses
    assert divided == pytest.approx(single, rel=1e-5)
    drawn = run("-m", "zerorun.pipeline.cli", "--measured", "trace.json", "--svg", "run.svg", folder=tmp_path)
    assert "1f1b measured" in drawn
    assert "<svg" in (tmp_path / "run.svg").read_text()


def test_train_3d_takes_the_schedule_from_the_json(tmp_path: Path) -> None:
    """Interleaved: two parts of the four layers on each of two stages, and no tensor parallelism."""
    command = train_3d(tmp_path, 1, 2, schedule="interleaved", chunks=2, partition=[1, 1, 1, 1])
    out = fork_program(2, *command, folder=tmp_path, modules=PLOTS)
    assert out.startswith("2 ranks = pipe 2 x replicate 1 x shard 1 x tensor 1;")
    assert out.splitlines()[-1].startswith("validation loss ")


@pytest.mark.nightly
def test_exits_with_zero_every_time(tmp_path: Path) -> None:
    for _ in range(5):
        run(*LAUNCHER, *train_gpt("zero3", steps=2), folder=tmp_path)


@pytest.mark.nightly
def test_own_text_with_accumulation_and_progress_bar(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"all work and no play makes a dull boy. " * 200)
    config = (CONFIGS / "zero2.json").read_text().replace("{", '{"gradient_accumulation_steps": 2,', 1)
    (tmp_path / "accumulate.json").write_text(config)
    script = str(ROOT / "examples" / "train_gpt.py")
    env = "import os, runpy, sys; os.environ['ZERORUN_TTY'] = '1'; sys.argv = sys.argv[1:]; "
    command = ("-c", env + "runpy.run_path(sys.argv[0], run_name='__main__')", script, *TINY, "--steps", "2")
    out = run(*command, "--data", "text", "--config", "accumulate.json", folder=tmp_path)
    assert out.startswith("validation loss ")  # the bar is on stderr and replaces the lines
    assert (tmp_path / "runs" / "accumulate" / "loss.png").exists()


# Adapters are trained by day in ranks/test_adapters.py: their library takes seconds to import.
HF_RUNS = [("llama",), *map(at_night, (("llama", "--lora"), ("gpt2",), ("gpt2", "--lora"), ("qwen2",), ("qwen3",)))]


@pytest.mark.parametrize("names", HF_RUNS, ids="".join)
def test_train_hf(tmp_path: Path, names: tuple[str, ...]) -> None:
    architecture, *options = names
    for name in ("transformers", *(["peft"] if options else [])):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[test]'")
    script = str(ROOT / "examples" / "train_hf.py")
    common = ("--config", str(CONFIGS / "zero3.json"), "--architecture", architecture, *TINY)
    modules = ("transformers.models.llama.modeling_llama", *(["peft"] if options else []))
    out = fork_program(2, script, *common, "--steps", "3", *options, folder=tmp_path, modules=modules)
    assert "step 3/3: loss " in out
    trained, total = (int(word.replace(",", "")) for word in out.splitlines()[0].split() if word[0].isdigit())
    assert (trained < total / 2) == bool(options)


def test_train_moe(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[test]'")
    script = str(ROOT / "examples" / "train_moe.py")
    options = ("--config", str(CONFIGS / "moe.json"), *TINY, "--experts", "4", "--steps", "2", "--report-every", "1")
    modules = ("transformers.models.mixtral.modeling_mixtral", *PLOTS)
    out = fork_program(2, script, *options, folder=tmp_path, modules=modules)
    assert "step 2/2: loss " in out
    assert "model.layers.1.mlp.experts: 1,024 rows, the busiest expert has " in out  # 16 windows of 32 bytes, 2 for each
    assert (tmp_path / "expert_loads.png").read_bytes().startswith(PNG)


def offload(folder: Path, *options: str) -> str:
    """What the example says."""
    script = str(ROOT / "examples" / "offload.py")
    return fork_program(
        1, script, "--layers", "2", "--width", "64", "--steps", "3", "--disk", str(folder), *options, folder=folder
    )


def test_the_offloaded_run_of_the_example(tmp_path: Path) -> None:
    offload(tmp_path, "--run", "offloaded", "--result", "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert "refused" not in result
    assert len(result["losses"]) == 3


@pytest.mark.nightly  # four programs
def test_offload(tmp_path: Path) -> None:
    """A cap that all runs keep to; what is refused under a lower one is in tests/ranks/test_memory_check.py."""
    out = offload(tmp_path, "--memory-cap", "8G", "--out", "out")
    assert "losses are the same: True" in out
    assert "disk master" in out
    assert (tmp_path / "out" / "offload.png").stat().st_size > 10_000


@pytest.mark.nightly  # by day tests of ranks train on divided sequences
def test_long_context(tmp_path: Path) -> None:
    sizes = ("--lengths", "64", "128", "--ranks", "1", "2", "--layers", "2", "--width", "32")
    out = run(str(ROOT / "examples" / "long_context.py"), *sizes, folder=tmp_path)
    rows = [line.split() for line in out.splitlines()[1:3]]
    assert [row[0] for row in rows] == ["64", "128"]
    assert all(len(row) == 4 and float(row[2]) < float(row[1]) for row in rows)  # one loss, and less memory
    assert (tmp_path / "runs" / "long_context" / "longcontext.png").read_bytes().startswith(PNG)
