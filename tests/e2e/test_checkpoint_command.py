"""zerorun-checkpoint: what it says of good and damaged checkpoints, what it writes; and the reader among the examples."""

from __future__ import annotations

import argparse
import ast
import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import fork_program, patience, run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from training import make_config, shared_topology

import zerorun
from zerorun.checkpoint import cli, offline, stream, tensorfile
from zerorun.checkpoint.cli import verify as cli_verify
from zerorun.checkpoint.foreign import ForeignCheckpoint, ForeignTensor
from zerorun.checkpoint.load import optimizer_kind
from zerorun.checkpoint.offline import write_foreign
from zerorun.checkpoint.tensorfile import BLOCK_BYTES
from zerorun.errors import CheckpointError
from zerorun.zero.value_access import safe_get_full_fp32_param, safe_get_full_optimizer_state

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "zerorun.checkpoint.cli")
BIN, EXAMPLE = ROOT / "bin" / "zerorun-checkpoint", ROOT / "examples" / "read_checkpoint.py"
TRAINED, FROZEN = ("embed.weight", "body.weight", "body.bias"), ("frozen.weight", "frozen.bias")
MOMENTS = ("exp_avg", "exp_avg_sq")
SETS = ("master", "model", "optimizer.exp_avg", "optimizer.exp_avg_sq", "state")


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("read_checkpoint", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


read: Callable[[str | Path], dict[str, Any]] = load_example().read


# -- checkpoints -------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A tied weight, a frozen layer, two buffers."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(40, 16), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.frozen(torch.tanh(self.body(self.embed(ids))))).float()


def make_engine(precision: str = "bf16", stage: int = 2, seed: int = 0) -> zerorun.Engine:
    torch.manual_seed(seed)
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-2}}
    config = make_config(stage, precision=precision, scheduler=scheduler)
    return zerorun.initialize(Net(), config, topology=shared_topology())


def train(engine: zerorun.Engine, steps: int) -> None:
    for step in range(steps):
        ids = torch.randint(40, (8,), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.backward(nn.functional.cross_entropy(engine(ids), ids))
        engine.step()


def save_net(folder: str) -> None:
    """``run``: bf16, of steps 2 and 4; ``fp16``; ``partial``: trainable_only."""
    for name, precision, stage in (("run", "bf16", 2), ("fp16", "fp16", 1)):
        engine = make_engine(precision, stage)
        for _ in range(2):
            train(engine, 2)
            state = {"epoch": 3, "best": torch.arange(5.0), "worst": float("inf")}
            engine.save_checkpoint(Path(folder) / name, client_state=state)
        if name == "run":
            engine.save_checkpoint(Path(folder) / "partial", trainable_only=True)
        engine.destroy()


def save_gpt2(folder: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    model.transformer.wpe.weight.requires_grad_(False)
    engine = zerorun.initialize(model, make_config(3, precision="bf16"), topology=shared_topology())
    ids = torch.arange(16).view(2, 8)
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_net, str(folder))
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install -e '.[test]'")
    folder = tmp_path_factory.mktemp("gpt2")
    run_ranks(2, save_gpt2, str(folder), timeout_s=120)
    return folder / "global_step2"


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints of ``run`` that a test may damage."""
    return Path(shutil.copytree(saved / "run", tmp_path / "run"))


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process; (exit status, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main([str(arg) for arg in args])
        return status, *capsys.readouterr()

    return run


def flip(path: Path, at: int = -1) -> None:
    """Change one bit of a file, by default of its last byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a checkpoint in a way that its checksums do not tell, with those of its files made anew."""
    content = json.loads((path / "zerorun.json").read_text())["content"]
    change(content)
    for name in content["files"]:
        if (path / name).is_file():
            data = (path / name).read_bytes()
            blocks = [data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES)]
            content["files"][name] = {"bytes": len(data), "crc32": "".join(f"{zlib.crc32(block):08x}" for block in blocks)}
    crc = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    (path / "zerorun.json").write_text(json.dumps({"crc32": f"{crc:08x}", "content": content}))


def change_tensors(path: Path, kind: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of one set that are in its first file."""
    file = sorted(path.glob(f"{kind}-*.safetensors"))[0]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    rewrite(path, lambda content: None)


def refused(command: Command, *args: object) -> str:
    """The one line that the command says when it cannot be carried out."""
    status, out, err = command(*args)
    assert (status, out) == (2, "")
    assert err.startswith("zerorun-checkpoint: error: ")
    assert err.count("\n") == 1
    return err


# -- inspect -----------------------------------------------------------------------------------------------------


def test_inspect_says_what_is_there(saved: Path, command: Command) -> None:
    status, out, err = command("inspect", saved / "run")
    assert (status, err) == (0, "")
    words = [" ".join(line.split()) for line in out.splitlines()]
    assert [line for line in words if line.startswith(("global_step2 2", "global_step4 4"))] == [
        line for line in words if line.endswith("complete")
    ]
    for expected in (
        "counters global_steps 4, micro_steps 4, skipped_steps 0, global_samples 16",
        "layout world_size 2, stage 2, shard 2, replicate 1, train_batch_size 4, dtype bfloat16",
        "parameters 1,184 in 5 tensors, 912 of them trained",
        "model 7 2.4 kB 2",
        "embed.weight [40, 16] BF16 yes master F32, exp_avg F32, exp_avg_sq F32",
        "frozen.bias [16] BF16 no",
        "seen [] I64 buffer",
        "head.weight is embed.weight",
        "step 4 (3 parameters)",
        "scheduler last_batch_iteration 3",
        "loss scale none",
        "random numbers of 2 ranks",
        "client state best, epoch, worst",
    ):
        assert expected in words, (expected, out)
    assert "group 0, 3 parameters: lr " in out
    assert "betas [0.9, 0.95]" in out or "betas [0.9, 0.9" in out
    assert "all there, of the right sizes" in out


def test_inspect_of_one_checkpoint_and_of_a_tag(saved: Path, command: Command) -> None:
    direct = command("inspect", saved / "run" / "global_step2")[1]
    tagged = command("inspect", saved / "run", "--tag", "global_step2")[1]
    assert "Checkpoints in" not in direct
    assert direct in tagged


def test_inspect_json(saved: Path, command: Command) -> None:
    report = json.loads(command("inspect", "--json", saved / "fp16")[1])
    assert (report["format"], report["tag"], report["step"]) == (1, "global_step4", 4)
    assert report["layout"]["dtype"] == "float16"
    assert report["loss_scale"]["scale"] == 256.0
    assert {entry["name"]: entry["tensors"] for entry in report["sets"]}["master"] == 3
    tensors = {tensor["name"]: tensor for tensor in report["tensors"]}
    assert tensors["body.bias"]["sets"]["master"] == {"dtype": "F32", "shape": [16]}
    assert [tensor["kind"] for tensor in report["tensors"]] == ["parameter"] * 5 + ["buffer"] * 2
    assert report["optimizer"]["scalars"] == {"step": [{"value": 4.0, "parameters": 3}]}
    assert (report["files"]["problems"], report["client_state"]) == ([], ["best", "epoch", "worst"])
    assert [(entry["tag"], entry["complete"]) for entry in report["checkpoints"]] == [
        ("global_step2", True),
        ("global_step4", True),
    ]


def test_inspect_of_a_partial_checkpoint(saved: Path, command: Command) -> None:
    out = command("inspect", saved / "partial")[1]
    assert "2 frozen weights: saved with exclude_frozen_parameters" in out
    assert "(not stored)" in out


def test_inspect_describes_damaged_checkpoints_as_far_as_possible(run_dir: Path, command: Command) -> None:
    (run_dir / ".saving.global_step6").mkdir()
    (run_dir / "global_step4" / "master-00001-of-00002.safetensors").unlink()
    flip(run_dir / "global_step4" / "model-00001-of-00002.safetensors", 20)
    status, out, _ = command("inspect", run_dir)
    assert status == 0
    assert "NOT COMPLETE" in out
    assert "master-00001-of-00002.safetensors cannot be found" in out
    assert "model-00001-of-00002.safetensors is damaged: bytes 0.." in out
    assert ".saving.global_step6" in out
    flip(run_dir / "global_step4" / "zerorun.json", 300)
    report = json.loads(command("inspect", run_dir, "--json")[1])
    assert report["tag"] == "global_step2"
    assert sorted(entry["complete"] for entry in report["checkpoints"]) == [False, False, True]
    assert "global_step4" in refused(command, "inspect", run_dir, "--tag", "global_step4")


def test_inspect_of_what_export_made(saved: Path, gpt2: Path, tmp_path: Path, command: Command) -> None:
    for source, kind in ((saved / "run", "weights alone"), (gpt2, "the weights of GPT2LMHeadModel")):
        out = tmp_path / kind
        command("export", source, out, "--max-shard-size", "20kB")
        status, page, err = command("inspect", out)
        assert (status, err) == (0, "")
        assert kind in page
        assert "it is no checkpoint" in page
        report = json.loads(command("inspect", out, "--json")[1])
        found = {tensor["name"]: tensor for tensor in report["tensors"]}
        expected = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
        assert {name: entry["shape"] for name, entry in found.items()} == {n: list(v.shape) for n, v in expected.items()}
        assert {name: entry["bytes"] for name, entry in found.items()} == {n: v.nbytes for n, v in expected.items()}
        assert all(name in page for name in expected)
        assert report["files"]["problems"] == []
    first = sorted(out.glob("*.safetensors"))[0]
    first.write_bytes(b"no tensors")
    page = command("inspect", out)[1]
    assert f"{first.name} is no readable safetensors file" in page
    assert "model.safetensors.index.json: transformer.wte.weight" in page
    assert refused(command, "inspect", out, "--tag", "x")
    incomplete = shutil.copytree(saved / "run" / "global_step4", tmp_path / "lost")
    (incomplete / "zerorun.json").unlink()
    assert "files of a checkpoint that is not complete" in command("inspect", incomplete)[1]


# -- verify ------------------------------------------------------------------------------------------------------


def test_verify_of_good_checkpoints(saved: Path, gpt2: Path, command: Command) -> None:
    for args in ([saved / "run"], [saved / "run", "--all"], [saved / "partial"], [saved / "fp16", "--all"], [gpt2]):
        status, out, err = command("verify", *args)
        assert (status, err) == (0, ""), out
        assert out.count(": good (") == (2 if "--all" in args else 1)
    assert "5 sets" in command("verify", saved / "run")[1]
    assert command("verify", gpt2, "--all")[0] == 0


KINDS = [f"{kind}-00001-of-0000{1 if kind == 'state' else 2}.safetensors" for kind in SETS]
KINDS += ["model.safetensors.index.json", "optimizer.exp_avg.safetensors.index.json", "zerorun.json"]


@pytest.mark.parametrize("name", KINDS)
def test_verify_names_the_damaged_file(run_dir: Path, name: str, command: Command) -> None:
    path = run_dir / "global_step4" / name
    flip(path, 20 if name == "zerorun.json" else -1)
    status, out, _ = command("verify", run_dir)
    assert status == 1
    assert len(out.splitlines()) == 2, out
    where = "damaged" if name == "zerorun.json" else f": bytes 0..{path.stat().st_size} do not have the checksum"
    assert f"{name}" in out.splitlines()[1]
    assert where in out.splitlines()[1]
    assert command("verify", run_dir, "--tag", "global_step2")[0] == 0


def test_verify_names_every_damaged_file(run_dir: Path, command: Command) -> None:
    path = run_dir / "global_step4"
    flip(path / KINDS[0])
    size = (path / KINDS[1]).stat().st_size
    os.truncate(path / KINDS[1], size - 9)
    (path / KINDS[2]).unlink()
    with (path / KINDS[3]).open("ab") as file:
        file.write(b"more")
    status, out, _ = command("verify", path)
    assert status == 1
    assert f"{KINDS[1]}: has {size - 9} bytes instead of {size}: bytes {size - 9}..{size} are missing" in out
    for name, what in ((KINDS[0], "checksum"), (KINDS[2], "cannot be read: No such file"), (KINDS[3], "bytes instead of")):
        assert any(name in line and what in line for line in out.splitlines()), out
    assert len(out.splitlines()) == 5


def test_verify_names_byte_ranges(tmp_path: Path, command: Command) -> None:
    weight = torch.zeros(5 * BLOCK_BYTES // 4)
    path = write_foreign(foreign([("model", "w", weight)]), tmp_path, "big")
    assert command("verify", tmp_path)[0] == 0
    for block in (1, 2, 4):
        flip(path / "model-00001-of-00001.safetensors", block * BLOCK_BYTES + 7)
    expected = f"bytes {BLOCK_BYTES}..{3 * BLOCK_BYTES}, {4 * BLOCK_BYTES}..{5 * BLOCK_BYTES} do not have the checksum"
    assert expected in command("verify", tmp_path)[1]


def test_verify_names_what_interrupted_saves_left(run_dir: Path, command: Command) -> None:
    (run_dir / ".saving.global_step6").mkdir()
    (run_dir / "for_users").mkdir()
    assert command("verify", run_dir)[0] == 0
    assert "note: .saving.global_step6: a save that is going on, or was interrupted" in command("verify", run_dir)[1]
    (run_dir / "global_step2" / "zerorun.json").unlink()
    status, out, _ = command("verify", run_dir, "--all")
    assert status == 1
    assert "\nglobal_step2: incomplete: it has no zerorun.json\n" in out
    assert "for_users" not in out
    (run_dir / "latest").write_text("global_step2")
    status, out, _ = command("verify", run_dir)
    assert status == 1
    assert "global_step2 is no complete checkpoint" in out


def test_verify_of_a_later_version(run_dir: Path, command: Command) -> None:
    rewrite(run_dir / "global_step4", lambda content: content.update(schema=2))
    assert "has schema 2" in refused(command, "verify", run_dir)
    assert command("verify", run_dir, "--tag", "global_step2")[0] == 0


def drop_from_index(path: Path, content: dict[str, Any]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"]["body.bias"]
    index["weight_map"]["frozen.bias"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(index))


DISAGREEMENTS: dict[str, tuple[Callable[[Path, dict[str, Any]], object], str]] = {
    "shape": (lambda p, c: c["parameters"]["body.bias"].update(shape=[4]), "model: body.bias is BF16 [16], and BF16 [4]"),
    "dtype": (lambda p, c: c["parameters"]["body.bias"].update(dtype="F32"), "model: body.bias is BF16 [16], and F32 [16]"),
    "more": (
        lambda p, c: c["parameters"].update(other={"shape": [1], "dtype": "BF16", "trainable": True, "group": 0}),
        "model: the parameter other is missing",
    ),
    "less": (lambda p, c: c["parameters"].pop("body.bias"), "optimizer.exp_avg: body.bias is no parameter"),
    "master": (lambda p, c: c["parameters"]["frozen.bias"].update(group=0), "master: frozen.bias is missing"),
    "alias": (lambda p, c: c["aliases"].update(tied="nowhere"), "model: nowhere, which tied is tied to, is missing"),
    "reference": (lambda p, c: c["client_state"]["best"].update(name="lost"), "state: lost is missing"),
    "scalar": (
        lambda p, c: c["optimizer"]["scalars"]["step"][0]["names"].append("x"),
        "optimizer.step: x is no parameter",
    ),
    "no record": (lambda p, c: c["files"].pop(KINDS[1]), f"zerorun.json: {KINDS[1]} of the set model has no checksums"),
    "no index": (lambda p, c: c["files"].pop("model.safetensors.index.json"), "index model.safetensors.index.json is not"),
    "index": (drop_from_index, "and model.safetensors.index.json does not say so"),
    "place": (drop_from_index, "model.safetensors.index.json: frozen.bias is not in model-00001-of-00002.safetensors"),
    "index text": (lambda p, c: (p / "model.safetensors.index.json").write_text("{"), "index.json: is no index"),
    "header": (lambda p, c: (p / KINDS[1]).write_text("{" * 99), "is no readable safetensors file"),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_verify_sees_what_checksums_do_not(run_dir: Path, name: str, command: Command) -> None:
    change, expected = DISAGREEMENTS[name]
    path = run_dir / "global_step4"
    rewrite(path, partial(change, path))
    status, out, _ = command("verify", run_dir)
    assert status == 1
    assert expected in out


# -- export ------------------------------------------------------------------------------------------------------


def test_export_loads_with_transformers(gpt2: Path, tmp_path: Path, command: Command) -> None:
    from transformers import AutoModelForCausalLM

    stored = read(gpt2)["tensors"]
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        out = tmp_path / dtype
        status, said, _ = command("export", gpt2, out, "--dtype", dtype, "--max-shard-size", "30kB")
        assert status == 0
        assert said.startswith(f"{out}: 28 tensors")
        assert json.loads((out / "config.json").read_text())["dtype"] == str(torch_dtype).removeprefix("torch.")
        shards = sorted(out.glob("*.safetensors"))
        assert [shard.name for shard in shards] == [
            f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
        ]
        assert len(shards) > 1
        best = stored["model"] if dtype == "bf16" else {**stored["model"], **stored["master"]}
        best["lm_head.weight"] = best["transformer.wte.weight"]
        model = AutoModelForCausalLM.from_pretrained(out)
        assert model.dtype == torch_dtype
        for name, value in model.state_dict().items():
            assert torch.equal(value, best[name].to(torch_dtype)), name
        assert not list(tmp_path.glob(".saving.*"))
        assert (out / "generation_config.json").is_file()


def test_export_without_a_configuration(saved: Path, tmp_path: Path, command: Command) -> None:
    status, out, _ = command("export", saved / "run", tmp_path / "out", "--tag", "global_step2")
    assert status == 0
    assert "note: there is no config.json" in out
    stored = read(saved / "run" / "global_step2")["tensors"]["model"]
    found = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert found.keys() == stored.keys() - {"head.weight"}
    assert all(torch.equal(value, stored[name]) and value.dtype == stored[name].dtype for name, value in found.items())
    assert list(json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]) == list(found)


def test_export_says_what_became_infinite(saved: Path, run_dir: Path, tmp_path: Path, command: Command) -> None:
    for number in (1, 2):  # wherever body.bias is
        file = run_dir / "global_step4" / f"master-0000{number}-of-00002.safetensors"
        tensors = load_file(file)
        if "body.bias" in tensors:
            tensors["body.bias"][3] = 1e6
            save_file(tensors, file, {"format": "pt"})
    rewrite(run_dir / "global_step4", lambda content: None)
    out = command("export", run_dir, tmp_path / "out", "--dtype", "fp16")[1]
    assert "became infinite in body.bias" in out
    assert "body.weight" not in out


def test_export_appears_whole_or_not_at_all(
    saved: Path, run_dir: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine").touch()
    assert "here exists, and is left as it is" in refused(command, "export", saved / "run", tmp_path / "here")
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["mine"]
    what = "exclude_frozen_parameters: 2 frozen weights are not in it"
    assert what in refused(command, "export", saved / "partial", tmp_path / "out")
    flip(run_dir / "global_step4" / "model-00002-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors is damaged" in refused(command, "export", run_dir, tmp_path / "out")
    (run_dir / "global_step4" / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors cannot be found" in refused(command, "export", run_dir, tmp_path / "out")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "here")

    monkeypatch.setattr(stream.FileWriter, "write", full)
    assert "No space left on device" in refused(command, "export", saved / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "run"]


# -- diff --------------------------------------------------------------------------------------------------------


def test_diff_of_equal_checkpoints(saved: Path, run_dir: Path, command: Command) -> None:
    status, out, _ = command("diff", saved / "run", run_dir)
    assert status == 0
    assert out.endswith("equal\n")


def test_diff_of_two_steps(saved: Path, command: Command) -> None:
    status, out, _ = command("diff", saved / "run", saved / "run", "--tag-a", "global_step2")
    assert status == 1
    words = [" ".join(line.split()) for line in out.splitlines()]
    for expected in (
        next(line for line in words if line.startswith("model: 3 tensors alike, 4 differing by up to ")),
        "counters.global_steps 2 4",
        "scheduler.last_batch_iteration 1 3",
        "optimizer.step of embed.weight and 2 more 2.0 4.0",
    ):
        assert expected in words, out
    assert any(line.startswith("optimizer.groups[0].lr") for line in words)
    begin = next(index for index, line in enumerate(words) if line.startswith("master: 0 tensors alike"))
    order = [float(line.split()[-1]) for line in words[begin + 2 :][:3]]
    assert order == sorted(order, reverse=True)
    assert all(order)
    assert words[begin].endswith(f"relative {order[0]:.3g}")


def test_diff_finds_a_planted_difference(saved: Path, run_dir: Path, command: Command) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        tensors["embed.weight"].view(-1)[:3] += 0.125

    path = run_dir / "global_step4"
    change_tensors(path, "optimizer.exp_avg", plant)
    largest = read(path)["tensors"]["optimizer.exp_avg"]["embed.weight"].abs().max()
    status, out, _ = command("diff", saved / "run", path)
    assert status == 1
    assert f"embed.weight         3     0.125  {0.125 / largest:>8.3g}" in out
    assert "optimizer.exp_avg: 2 tensors alike, 1 differing by up to 0.125, relative " in out
    assert out.count("alike") == 1
    assert command("diff", saved / "run", path, "--tolerance", "1.1")[0] == 0
    assert command("diff", path, saved / "run", "--tolerance", "0.01")[0] == 1


def test_diff_of_names_forms_and_facts(saved: Path, run_dir: Path, command: Command) -> None:
    def change(content: dict[str, Any]) -> None:
        content["client_state"].update(epoch=4, new=[1, {"a": 2}])
        content["optimizer"]["groups"][0]["lr"] *= 1 + 1e-9
        content["parameters"]["body.bias"]["trainable"] = False
        content["optimizer"]["scalars"]["step"][0]["names"].remove("body.bias")

    path = run_dir / "global_step4"
    rewrite(path, change)
    status, out, _ = command("diff", saved / "run", path, "--tolerance", "1e-6")
    words = [" ".join(line.split()) for line in out.splitlines()]
    assert status == 1
    assert words[3:] == [
        "beside tensors A B",
        "client_state.epoch 3 4",
        "client_state.new[0] absent 1",
        "client_state.new[1].a absent 2",
        "trainable of body.bias True False",
        "optimizer.step of body.bias 4.0 absent",
    ]
    assert "optimizer.groups[0].lr" in command("diff", saved / "run", path)[1]
    words = [" ".join(line.split()) for line in command("diff", saved / "run", saved / "fp16")[1].splitlines()]
    assert {"of another form A B", "body.bias BF16 [16] F16 [16]"} <= set(words)
    out = command("diff", saved / "run", saved / "partial")[1]
    assert "only in A: frozen.weight, frozen.bias" in out
    assert "left out of B (frozen_base), with the checksums of the other's: 2 frozen weights" in out
    assert out.count("frozen") == 4  # and no line beside tensors for each of them


def test_diff_compares_what_was_left_out_by_checksum(saved: Path, tmp_path: Path, command: Command) -> None:
    partial = tmp_path / "partial"
    shutil.copytree(saved / "partial" / "global_step4", partial)
    assert command("diff", saved / "partial", partial)[:2] == (0, command("diff", saved / "partial", partial)[1])
    rewrite(partial, lambda content: content["frozen_base"]["frozen.bias"].update(crc32="0badcafe"))
    out = command("diff", partial, saved / "run")[1]
    assert "left out of A (frozen_base), with the checksums of the other's: 1 frozen weight\n" in out
    assert "frozen.bias BF16 crc32 0badcafe BF16 crc32" in " ".join(out.split())
    status, out, _ = command("diff", partial, saved / "partial")
    assert status == 1
    assert "frozen_base.frozen.bias" in out


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a lost file": (
        lambda path: (path / "master-00001-of-00002.safetensors").unlink(),
        ["master-00001-of-00002.safetensors cannot be found", "not compared, being damaged: embed.weight"],
    ),
    "a short file": (
        lambda path: os.truncate(path / "model-00001-of-00002.safetensors", 400),
        ["has 400 bytes instead of", "not compared, being damaged: embed.weight"],
    ),
    "a changed byte": (
        lambda path: flip(path / "optimizer.exp_avg-00001-of-00002.safetensors"),
        ["optimizer.exp_avg-00001-of-00002.safetensors is damaged", "not compared, being damaged: embed.weight"],
    ),
    "the index": (lambda path: (path / "model.safetensors.index.json").unlink(), ["index.json cannot be found"]),
    "the state": (
        lambda path: flip(path / "state-00001-of-00001.safetensors"),
        ["state-00001-of-00001.safetensors is damaged"],
    ),
    "the manifest": (lambda path: flip(path / "zerorun.json", 300), ["zerorun.json is damaged", "without a manifest"]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_diff_compares_what_is_not_damaged(saved: Path, run_dir: Path, name: str, command: Command) -> None:
    change, expected = DAMAGE[name]
    change(run_dir / "global_step4")
    for sides, letter in (((saved / "run", run_dir), "B"), ((run_dir, saved / "run"), "A")):
        status, out, err = command("diff", *(side / "global_step4" for side in sides))
        assert (status, err) == (1, ""), err
        assert f"{letter} is damaged; what can be read is compared:" in out
        assert all(text in out for text in expected), out
        assert "only in" not in out
        assert "differing" not in out
        assert ("what can be compared is equal" in out) == ("not compared" not in " ".join(expected))
    out = command("diff", saved / "run" / "global_step2", run_dir / "global_step4")[1]
    assert "differing by up to" in out
    assert ("counters.global_steps" in out) == (name != "the manifest")


@pytest.mark.parametrize("dtype", tensorfile._DTYPES.values(), ids=str)
def test_diff_of_every_dtype(tmp_path: Path, dtype: torch.dtype, command: Command) -> None:
    values = torch.tensor([1.0, 0.0, 1.0, 0.0]).to(dtype)
    other = torch.tensor([1.0, 0.0, 0.0, 0.0]).to(dtype)
    paths = [
        write_foreign(foreign([("model", "w", value)]), tmp_path, f"v{index}")
        for index, value in enumerate((values, other))
    ]
    assert command("diff", paths[0], paths[0])[0] == 0
    status, out, _ = command("diff", *paths)
    assert status == 1
    assert "  w                 1         1         1\n" in out


def test_diff_knows_nan_and_infinity_and_large_integers(tmp_path: Path, command: Command) -> None:
    nan, inf = float("nan"), float("inf")

    def write(name: str, *values: torch.Tensor) -> Path:
        return write_foreign(foreign([("model", f"w{i}", value) for i, value in enumerate(values)]), tmp_path, name)

    one = write("a", torch.tensor([nan, inf, 0.0, 2.0]), torch.tensor([nan, 1.0]), torch.tensor([2**60]))
    same = write("b", torch.tensor([-nan, inf, -0.0, 2.0]), torch.tensor([nan, 1.0]), torch.tensor([2**60]))
    other = write("c", torch.tensor([nan, inf, 1.0, 2.0]), torch.tensor([0.0, 1.0]), torch.tensor([2**60 + 1]))
    assert command("diff", one, same)[0] == 0
    out = command("diff", one, other)[1]
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("w")]
    assert rows == [["w1", "1", "inf", "inf"], ["w0", "1", "1", "0.5"], ["w2", "1", "0", "0"]]
    assert command("diff", one, other, "--tolerance", "0.5")[0] == 1


def test_diff_shows_twenty_or_all(tmp_path: Path, command: Command) -> None:
    def write(name: str, value: float) -> Path:
        tensors = [("model", f"w{index}", torch.full((2,), value + index)) for index in range(25)]
        return write_foreign(foreign(tensors), tmp_path, name)

    one, other = write("a", 1.0), write("b", 2.0)
    out = command("diff", one, other)[1]
    assert out.count("\n  w") == 20
    assert "and 5 more (--all lists them)" in out
    assert command("diff", one, other, "--all")[1].count("\n  w") == 25


# -- foreign checkpoints -----------------------------------------------------------------------------------------


def foreign(tensors: list[tuple[str, str, torch.Tensor]], **changes: Any) -> ForeignCheckpoint:
    """A checkpoint of ``tensors``: (set, name, value)."""
    made = ForeignCheckpoint(
        tensors=[ForeignTensor(kind, name, value.dtype, tuple(value.shape), lambda value=value: value)  # type: ignore[misc]
                 for kind, name, value in tensors],
        trainable={}, aliases={}, optimizer_type="", group_of={}, groups=[], scalars={}, counters={}, loss_scale=None,
        scheduler=None, client_state={}, notes=[],
    )  # fmt: skip
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def foreign_net() -> ForeignCheckpoint:
    """Net in bf16 with masters and moments, one of them in 16 bits, as others train."""
    torch.manual_seed(5)
    net = Net()
    masters = {name: param.detach() for name, param in net.named_parameters()}
    tensors = [("model", name, value.bfloat16()) for name, value in masters.items()]
    tensors += [("model", "seen", torch.tensor(9)), ("model", "scale", torch.ones(3))]
    tensors += [("master", name, masters[name]) for name in TRAINED]
    tensors += [("optimizer.exp_avg", name, torch.randn_like(masters[name]).bfloat16()) for name in TRAINED]
    tensors += [("optimizer.exp_avg_sq", name, torch.rand_like(masters[name])) for name in TRAINED]
    return foreign(
        tensors,
        trainable={name: name in TRAINED for name in masters},
        aliases={"head.weight": "embed.weight"},
        optimizer_type="AdamW",
        group_of=dict.fromkeys(TRAINED, 0),
        groups=[{"lr": 0.25, "betas": (0.8, 0.9), "eps": 1e-7, "weight_decay": 0.5, "fused": True}],
        scalars={"step": {"embed.weight": 7.0, "body.weight": 7.0, "body.bias": 5.0}},
        counters={"global_steps": 7, "micro_steps": 14, "skipped_steps": 2},
        scheduler={"last_batch_iteration": 6},
        client_state={"epoch": 2, "curve": torch.arange(3.0), "args": argparse.Namespace(a=1), "counts": range(3)},
    )


def load_foreign(folder: str, stage: int) -> dict[str, Any]:
    engine = make_engine(stage=stage, seed=1)
    path, client_state = engine.load_checkpoint(folder, allow_missing=("rng", "data"))
    assert path is not None
    found: dict[str, Any] = {"counters": engine.counters(), "client_state": client_state, "lr": engine.get_lr()}
    found["buffers"] = {name: value.clone() for name, value in engine.module.named_buffers()}
    for name, param in engine.module.named_parameters():
        found[f"master {name}"] = safe_get_full_fp32_param(param)
        for key in MOMENTS:
            found[f"{key} {name}"] = safe_get_full_optimizer_state(param, key)
    engine.save_checkpoint(Path(folder) / "again", tag=f"stage{stage}", client_state=client_state)
    train(engine, 1)
    engine.destroy()
    return found


def test_a_foreign_checkpoint_loads_into_an_engine(tmp_path: Path, command: Command) -> None:
    made = foreign_net()
    path = write_foreign(made, tmp_path, "global_step7")
    assert len(made.notes) == 1
    assert "client_state.counts is a builtins.range" in made.notes[0]
    assert (tmp_path / "latest").read_text() == "global_step7"
    assert command("verify", tmp_path, "--all")[0] == 0
    values = {(tensor.set, tensor.name): tensor.load() for tensor in made.tensors}
    for stage in (0, 3):
        found = run_ranks(2, load_foreign, str(tmp_path), stage)[0]
        assert found["counters"] == {**made.counters, "global_samples": 28}
        assert found["client_state"].keys() == {"epoch", "curve", "args"}
        assert int(found["buffers"]["seen"]) == 9
        assert torch.equal(found["buffers"]["scale"].float(), torch.ones(3))
        for name in TRAINED:
            assert torch.equal(found[f"master {name}"], values["master", name])
            for key in MOMENTS:
                assert torch.equal(found[f"{key} {name}"], values[f"optimizer.{key}", name].float())
        assert all(found[f"master {name}"] is None for name in FROZEN)
        out = command("diff", path, tmp_path / "again" / f"stage{stage}")[1]
        assert [line.split()[0] for line in out.splitlines()[3:]] == [
            "beside",
            "optimizer.groups[0].lr",  # the schedule's
            "counters.global_samples",
            "optimizer.groups[0].decoupled_weight_decay",  # those of torch's class, which keeps no such keys
            "optimizer.groups[0].bias_correction",
        ], out
    text = (path / "zerorun.json").read_text()
    assert '"type": "Adam"' in text
    assert "fused" not in text


def test_the_kinds_of_optimizers_are_those_of_loading() -> None:
    param = [nn.Parameter(torch.ones(2))]
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam):
        expected = optimizer_kind(kind(param))  # type: ignore[operator]
        assert ("Adam" if kind.__name__ in offline._ADAMS else kind.__name__) == expected


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "set": ({"tensors": [("optimizer/x", "w", torch.ones(1))]}, "the set of 'w' is 'optimizer/x'"),
    "no parameter": ({"tensors": [("master", "w", torch.ones(1))]}, "master 'w' is of no parameter"),
    "no weights": ({"trainable": {"v": True}}, "the parameter 'v' has no weights"),
    "alias": ({"aliases": {"a": "b"}}, "'a' is tied to 'b', which has no weights"),
    "group": ({"group_of": {"w": 0}}, "'w' is in group 0 of 0"),
    "scalar": ({"scalars": {"step": {"v": 1.0}}}, "the scalar 'step' is of 'v', which is no parameter"),
    "twice": ({"tensors": [("model", "w", torch.ones(1))] * 2}, "the set 'model' has 2 tensors 'w'"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_foreign_checkpoint_that_contradicts_itself(name: str, tmp_path: Path) -> None:
    changes, expected = CONTRADICTIONS[name]
    tensors = changes.get("tensors", [("model", "w", torch.ones(1))])
    made = foreign(tensors, **{key: value for key, value in changes.items() if key != "tensors"})
    with pytest.raises(CheckpointError, match=expected.replace("(", "\\(")):
        write_foreign(made, tmp_path / "out", "tag")
    assert not (tmp_path / "out").exists()


def test_a_foreign_tensor_that_is_not_what_was_announced(tmp_path: Path) -> None:
    made = foreign([("model", "w", torch.ones(2))])
    made.tensors = [ForeignTensor("model", "w", torch.float32, (3,), lambda: torch.ones(2))]
    with pytest.raises(CheckpointError, match="was expected to be"):
        write_foreign(made, tmp_path, "tag")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_import_dcp(tmp_path: Path, command: Command) -> None:
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW([param for param in net.parameters() if param.requires_grad], lr=0.5)
    net(torch.arange(8)).sum().backward()
    optimizer.step()
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": 1}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    status, out, err = command("import-dcp", tmp_path / "dcp", tmp_path / "out")
    assert (status, err) == (0, ""), err
    assert out.startswith(f"{tmp_path / 'out' / 'global_step1'}: ")
    found = read(tmp_path / "out" / "global_step1")
    assert found["aliases"] in ({"head.weight": "embed.weight"}, {"embed.weight": "head.weight"})
    for name, value in net.state_dict().items():
        assert torch.equal(found["tensors"]["model"][name], value)
    assert torch.equal(found["tensors"]["optimizer.exp_avg"]["body.bias"], optimizer.state[net.body.bias]["exp_avg"])
    assert command("verify", tmp_path / "out")[0] == 0
    assert "global_step1 exists" in refused(command, "import-dcp", tmp_path / "dcp", tmp_path / "out")
    assert ".metadata: no such file" in refused(command, "import-dcp", tmp_path / "out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_import_deepspeed_passes_arguments_on(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads is tested in tests/ranks/test_import.py, where DeepSpeed is installed."""
    given: list[Any] = []

    def read_deepspeed(*args: Any) -> ForeignCheckpoint:
        given.extend(args)
        return foreign([("model", "w", torch.ones(3))], counters={"global_steps": 5}, notes=["data_sampler: not known"])

    monkeypatch.setattr("zerorun.checkpoint.importers.from_deepspeed.read_deepspeed", read_deepspeed)
    (tmp_path / "names.json").write_text('[["w"]]')
    args = ["import-deepspeed", tmp_path, tmp_path / "out", "--tag", "T", "--names", tmp_path / "names.json"]
    status, out, _ = command(*args)
    assert (status, given) == (0, [tmp_path, "T", [["w"]]])
    assert "note: data_sampler: not known" in out
    assert read(tmp_path / "out" / "global_step5")["counters"]["global_steps"] == 5
    monkeypatch.undo()
    assert "model_states.pt" in refused(command, "import-deepspeed", tmp_path / "out", tmp_path / "other")


# -- how it ends -------------------------------------------------------------------------------------------------


def test_help_needs_no_torch() -> None:
    code = """
import sys
from zerorun.checkpoint.cli import main
for args in (["--help"], *([name, "--help"] for name in ("inspect", "verify", "export", "diff", "import-dcp"))):
    try:
        main(args)
    except SystemExit as end:
        assert end.code == 0
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60 * patience())
    assert done.stdout.endswith("False\n"), done.stderr
    assert "exit status: 0 done" in done.stdout


def test_the_shim() -> None:
    done = subprocess.run([sys.executable, str(BIN), "--version"], capture_output=True, text=True, timeout=60 * patience())
    assert (done.returncode, done.stdout) == (0, f"zerorun {zerorun.__version__}\n")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "frobnicate",
        "inspect",
        "verify --frobnicate",
        "verify a --tag b --all",
        "diff a",
        "diff a b --tolerance -1",
        "export a b --max-shard-size much",
        "export a b --dtype int",
        "import-dcp a b --names /no/such/file",
    ],
)
def test_a_command_that_cannot_be_meant(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2
    assert "usage: zerorun-checkpoint" in capsys.readouterr().err


def test_there_is_no_such_checkpoint(saved: Path, tmp_path: Path, command: Command) -> None:
    for name in ("inspect", "verify"):
        assert "there is no such directory" in refused(command, name, tmp_path / "nowhere")
        assert "there is no checkpoint in it" in refused(command, name, tmp_path)
        assert "global_step2, global_step4" in refused(command, name, saved / "run", "--tag", "global_step3")
        for tag in ("", ".", "..", "../run/global_step2"):
            assert "there is no checkpoint" in refused(command, name, saved / "run", "--tag", tag)
    assert "there is no checkpoint in it" in refused(command, "verify", tmp_path, "--all")
    assert "no such directory" in refused(command, "export", tmp_path / "nowhere", tmp_path / "out")
    assert "there is no checkpoint 'x'" in refused(command, "diff", saved / "run", saved / "run", "--tag-b", "x")
    assert "no such directory" in refused(command, "import-deepspeed", tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "file").touch()
    assert "no such directory" in refused(command, "inspect", tmp_path / "file")
    (tmp_path / ".saving.global_step2").mkdir()
    assert "There is: .saving.global_step2." in refused(command, "verify", tmp_path)


def test_what_cannot_be_written(saved: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").touch()
    assert "file: File exists" in refused(command, "export", saved / "run", tmp_path / "file" / "out")


def test_ctrl_c(saved: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_verify, "check", interrupted)
    assert command("verify", saved / "run") == (130, "", "")


def test_an_error_of_ours_is_not_taken_for_damage(saved: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_verify, "check", lambda path: 1 / 0)
    status, _, err = command("verify", saved / "run")
    assert status == 2
    assert "ZeroDivisionError" in err


@pytest.mark.nightly  # by day: test_process.py::test_a_command_that_nobody_reads_ends_in_no_traceback
def test_a_closed_pipe_is_no_error(saved: Path) -> None:
    process = subprocess.Popen([*COMMAND, "inspect", str(saved / "run")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60 * patience()) == 0
    process.stderr.close()


def test_names_cannot_move_the_cursor(tmp_path: Path, command: Command) -> None:
    write_foreign(foreign([("model", "\x1b[2Jw\n", torch.ones(1))]), tmp_path, "tag")
    out = command("inspect", tmp_path)[1]
    assert "\x1b" not in out
    assert "?[2Jw?" in out


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5e9), ("500mb", 5e8), ("2GiB", 2 << 30), ("1.5 kB", 1500), ("7", 7)])
def test_sizes(text: str, nbytes: int) -> None:
    assert cli.size(text) == nbytes


# -- the example -------------------------------------------------------------------------------------------------


def test_the_example_reads_all_without_zerorun(saved: Path) -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) <= 60
    tree = ast.walk(ast.parse(source))
    names = {name.name for node in tree if isinstance(node, ast.Import) for name in node.names}
    tree = ast.walk(ast.parse(source))
    names |= {str(node.module) for node in tree if isinstance(node, ast.ImportFrom)}
    assert names <= {"json", "sys", "zlib", "pathlib", "typing", "safetensors.torch", "torch"}
    found = read(saved / "run" / "global_step4")
    assert tuple(found["tensors"]) == SETS
    assert found["tensors"]["model"].keys() == {*TRAINED, *FROZEN, "seen", "scale", "head.weight"}
    for kind in SETS[:1] + SETS[2:4]:
        assert found["tensors"][kind].keys() == set(TRAINED)
    for name in TRAINED:
        assert torch.equal(found["tensors"]["master"][name].bfloat16(), found["tensors"]["model"][name])
    best = found["client_state"]["best"]["name"]
    assert torch.equal(found["tensors"]["state"][best], torch.arange(5.0))
    assert found["counters"] == {"global_steps": 4, "micro_steps": 4, "skipped_steps": 0, "global_samples": 16}


@pytest.mark.parametrize("name", KINDS)
def test_the_example_sees_damage(run_dir: Path, name: str) -> None:
    path = run_dir / "global_step4" / name
    flip(path, path.read_text().index(': 4,\n   "micro_steps"') + 2 if name == "zerorun.json" else -1)
    with pytest.raises(ValueError, match=name):
        read(run_dir / "global_step4")


def test_the_example_as_a_program(saved: Path, tmp_path: Path) -> None:
    lines = fork_program(1, str(EXAMPLE), str(saved / "run" / "global_step4"), folder=tmp_path).splitlines()
    assert lines[1:] == [
        "master: 3 tensors, 912 elements",
        "model: 8 tensors, 1828 elements",
        "optimizer.exp_avg: 3 tensors, 912 elements",
        "optimizer.exp_avg_sq: 3 tensors, 912 elements",
        lines[5],
        "optimizer.step: [(4.0, 3)] as (value, parameters)",
    ]
