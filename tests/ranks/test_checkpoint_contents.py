"""What is in a checkpoint, who can read it, what saving and loading cost in memory, and what is refused."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES, Case, Gpt, Place
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import make_config, make_engine
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import zerorun
from zerorun.checkpoint import gather, ranks
from zerorun.checkpoint import save as saving
from zerorun.checkpoint.cli import export
from zerorun.checkpoint.cli.verify import check
from zerorun.checkpoint.manifest import MANIFEST, read_manifest
from zerorun.errors import CheckpointError, ModelError, StepError
from zerorun.zero.placeholders import tensors_in

PLAIN, LORA, FROZEN = CASES["plain"], CASES["lora"], CASES["frozen"]


def train(engine: zerorun.Engine, case: Case, count: int, begin: int = 0) -> list[float]:
    losses = []
    for step in range(begin, begin + count):
        loss = case.loss(engine, Place(dist.get_rank(), step, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Peak(TorchDispatchMode):
    """Counts the bytes of tensor memory that is made inside, at its most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs or {}])}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if tensor.is_meta or storage._cdata in before or storage._cdata in self._known:
                continue
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


# -- who can read it ---------------------------------------------------------------------------------------------


def llama() -> LlamaForCausalLM:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(5)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=4))


def train_huggingface(folder: str, kind: str, stage: int, precision: str) -> dict[str, torch.Tensor]:
    model = llama() if kind == "llama" else gpt2()
    engine = zerorun.initialize(model, make_config(stage, precision=precision))
    for step in range(3):
        ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(folder, tag="mid")
    engine.export(Path(folder) / "exported", dtype="fp32")
    weights = engine.state_dict()
    engine.destroy()
    return weights


@pytest.mark.parametrize(
    ("kind", "stage", "precision"),
    by_day((("llama", 3, "bf16"), ("gpt2", 2, "fp32"), ("gpt2", 3, "fp16")), ("llama", 3, "bf16")),
)
def test_a_mid_training_checkpoint_is_a_hugging_face_model(kind: str, stage: int, precision: str, tmp_path: Path) -> None:
    weights = run_ranks(2, train_huggingface, str(tmp_path), kind, stage, precision)[0]
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "mid", dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, value in loaded.state_dict().items():
        assert value.dtype == weights[name].dtype, name
        assert torch.equal(value, weights[name]), name
    assert AutoModel.from_pretrained(tmp_path / "mid") is not None
    plain: dict[str, torch.Tensor] = {}
    index = json.loads((tmp_path / "mid" / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        plain |= safetensors.torch.load_file(tmp_path / "mid" / file)
    assert plain.keys() == index["weight_map"].keys()
    assert all(torch.equal(value, weights[name]) for name, value in plain.items())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype="auto").state_dict()
    rounded = {name: value.to(weights[name].dtype) for name, value in exported.items()}
    assert {value.dtype for value in exported.values()} == {torch.float32}
    assert all(torch.equal(value, weights[name]) for name, value in rounded.items())


@pytest.mark.parametrize("stage", by_day((0, 3), 3))
def test_plain_tied_frozen_and_lora_models_are_exported(stage: int, tmp_path: Path) -> None:
    for name in ("plain", "tied", "frozen", "lora"):
        weights = run_ranks(2, export_case, name, stage, str(tmp_path / name))[0]
        module = CASES[name].build()
        for value in module.parameters():
            nn.init.zeros_(value)
        zerorun.load_pretrained(module, tmp_path / name)
        assert all(torch.equal(value, weights[key]) for key, value in module.state_dict().items()), name


def export_case(name: str, stage: int, folder: str) -> dict[str, torch.Tensor]:
    engine = make_engine(CASES[name], make_config(stage))
    train(engine, CASES[name], 2)
    engine.export(folder)
    weights = engine.state_dict()
    engine.destroy()
    return weights


def export_changed(folder: str) -> None:
    engine = make_engine(PLAIN, make_config(1))
    del engine.checkpointer.inventory.homes["head.weight"]
    with pytest.raises(CheckpointError, match=r"head\.weight.*Nothing was written"):
        engine.export(folder)
    assert not Path(folder).exists()
    engine.destroy()


def save_replaced(folder: str, stage: int) -> None:
    """A layer that is put into the model after initialize(): no rank trains it."""
    engine = make_engine(PLAIN, make_config(stage))
    train(engine, PLAIN, 1)
    engine.module.head = nn.Linear(engine.module.head.in_features, engine.module.head.out_features, bias=False)
    for write in (engine.save_checkpoint, engine.export):
        with pytest.raises(CheckpointError, match=r"changed since initialize\(\): head\.weight\. .*Nothing was written"):
            write(folder)
    assert not Path(folder).exists()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_of_after_the_start_is_not_saved_as_the_one_before(stage: int, tmp_path: Path) -> None:
    run_ranks(2, save_replaced, str(tmp_path / "out"), stage)


def test_an_export_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    run_ranks(2, export_changed, str(tmp_path / "out"))


# -- pretrained weights ------------------------------------------------------------------------------------------


def build_in(how: str) -> nn.Module:
    if how == "init":
        with zerorun.zero.Init():
            return Gpt(8, tied=True)
    if how == "meta":
        with torch.device("meta"):
            return Gpt(8, tied=True)
    return Gpt(8, tied=True)


def load_in(how: str, folder: str, stage: int) -> tuple[dict[str, torch.Tensor], int]:
    """(weights, most bytes of tensors made while loading)."""
    torch.manual_seed(100)
    model = build_in("plain" if how == "engine" else how)
    engine = zerorun.initialize(model, make_config(stage)) if how == "engine" else None
    with Peak() as peak:
        zerorun.load_pretrained(model, folder)
    engine = engine or zerorun.initialize(model, make_config(stage))
    weights = engine.state_dict()
    engine.destroy()
    return weights, peak.most


def load_inside(folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(100)
    with zerorun.zero.Init():
        model = Gpt(8, tied=True)
        zerorun.load_pretrained(model, folder)
    engine = zerorun.initialize(model, make_config(3))
    weights = engine.state_dict()
    engine.destroy()
    return weights


def test_pretrained_weights_inside_of_init(tmp_path: Path) -> None:
    """Looking at a parameter in there makes it whole: not while it is being filled."""
    torch.manual_seed(3)
    expected = Gpt(8, tied=True).state_dict()
    del expected["head.weight"]
    safetensors.torch.save_file(expected, tmp_path / "model.safetensors")
    for weights in run_ranks(2, load_inside, str(tmp_path)):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.parametrize("world", by_day((1, 2, 4), 2))
def test_pretrained_weights_stream_into_place(world: int, tmp_path: Path) -> None:
    """Peak per rank: its shard and one tensor. The file is in another dtype, so that every tensor is cast."""
    torch.manual_seed(3)
    module = Gpt(8, tied=True)
    expected = {name: value.to(torch.bfloat16) for name, value in module.state_dict().items()}
    del expected["head.weight"]
    safetensors.torch.save_file(expected, tmp_path / "model.safetensors")
    shard = sum(4 * -(-value.numel() // world) for value in expected.values())
    largest = 4 * max(value.numel() for value in expected.values())
    for how in ("plain", "init", "meta", "engine"):
        weights, most = run_ranks(world, load_in, how, str(tmp_path), 3)[0]
        assert all(torch.equal(weights[name], value.float()) for name, value in expected.items()), how
        if how != "engine":
            assert most <= (shard if how == "meta" else 0) + largest, (how, most, shard, largest)


def load_untied(folder: str, same: bool) -> list[str]:
    """What loads into a tied model say of files with two tensors: all values are the ``same``, or all but the last."""
    untied = Gpt(4)
    untied.head.weight.data.copy_(untied.embed.weight.data)
    if not same:
        untied.head.weight.data[-1, -1] += 1
    engine = zerorun.initialize(untied, make_config(3))
    path, expected = engine.save_checkpoint(folder), engine.state_dict()
    engine.export(Path(folder) / "weights")
    engine.destroy()
    said = []
    for loads in ("checkpoint", "engine", "plain", "part"):
        for strict in (True, False):
            with zerorun.zero.Init(enabled=loads == "part"):
                model = Gpt(4, tied=True)
            engine = zerorun.initialize(model, make_config(3)) if loads in ("checkpoint", "engine") else None
            try:
                if loads == "checkpoint":
                    engine.load_checkpoint(path, strict=strict)
                else:
                    zerorun.load_pretrained(model, Path(folder) / "weights", strict=strict)
            except CheckpointError as error:
                said.append(str(error))
                if engine is not None:
                    engine.destroy()
                continue
            engine = engine or zerorun.initialize(model, make_config(3))
            weights = engine.state_dict()
            assert all(torch.equal(weights[name], expected[name]) for name in weights if name != "head.weight"), loads
            engine.destroy()
    return said


@pytest.mark.parametrize("same", [True, False])
def test_two_values_of_what_is_one_tensor_here(same: bool, tmp_path: Path) -> None:
    """Of an untied head and embedding, one would be lost without a word."""
    for said in run_ranks(2, load_untied, str(tmp_path / "out"), same):
        assert len(said) == (0 if same else 4)
        assert all("other values of 'head.weight' than of 'embed.weight'" in line for line in said)


def bert(value: float) -> BertModel:
    config = BertConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = BertModel(config)
    model.embeddings.LayerNorm.weight.data.fill_(value)
    return model


def load_renamed(folder: str, loads: str) -> list[str]:
    """What loads say of files that have a tensor under the name of long ago and under that of now."""
    said = []
    for other in (3.0, 4.0):
        weights = {**bert(3.0).state_dict(), "embeddings.LayerNorm.gamma": torch.full((8,), other)}
        if dist.get_rank() == 0:
            safetensors.torch.save_file(weights, Path(folder) / "model.safetensors")
        dist.barrier()
        model = bert(1.0)
        engine = zerorun.initialize(model, make_config(3)) if loads == "engine" else None
        try:
            zerorun.load_pretrained(model, folder)
        except CheckpointError as error:
            said.append(str(error))
        engine = engine or zerorun.initialize(model, make_config(3))
        found = engine.state_dict()["embeddings.LayerNorm.weight"]
        assert torch.equal(found, torch.full((8,), 3.0 if other == 3.0 else 1.0)), other
        engine.destroy()
        dist.barrier()
    return said


@pytest.mark.parametrize("loads", ["plain", "engine"])
def test_a_tensor_under_its_old_and_its_new_name(loads: str, tmp_path: Path) -> None:
    """They were taken for two halves of it."""
    for said in run_ranks(2, load_renamed, str(tmp_path), loads):
        assert len(said) == 1
        assert "other values of 'embeddings.LayerNorm.gamma' than of 'embeddings.LayerNorm.weight'" in said[0]


class Sharing(nn.Module):
    """Two modules have one buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_buffer("scale", torch.full((3,), value))
        self.second.register_buffer("scale", self.first.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_buffer_that_two_modules_share_is_read_for_both(tmp_path: Path) -> None:
    engine = zerorun.initialize(Sharing(1.0), make_config(3))
    engine.export(tmp_path / "out")
    engine.destroy()
    model = Sharing(2.0)
    zerorun.load_pretrained(model, tmp_path / "out")
    assert torch.equal(model.first.scale, torch.ones(3))
    assert model.second.scale is model.first.scale


def test_buffers_keep_their_memory(tmp_path: Path) -> None:
    """Whoever has one, or a view of it, would go on with the old values."""
    model = Sharing(1.0)
    model.register_buffer("wide", torch.ones(1).expand(4))
    safetensors.torch.save_file({k: v.clone() + 1 for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    kept, view = model.first.scale, model.second.scale[1:]
    zerorun.load_pretrained(model, tmp_path)
    assert model.first.scale is kept and torch.equal(kept, torch.full((3,), 2.0))
    assert torch.equal(view, torch.full((2,), 2.0))
    assert torch.equal(model.wide, torch.full((4,), 2.0))


class Counting(nn.Linear):
    """A layer with a state that is no tensor."""

    seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "values": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"] + int(state["values"].sum())


def load_counting(folder: str, how: str) -> int:
    engine = zerorun.initialize(nn.Sequential(nn.Linear(4, 4), Counting(4, 4)), make_config(3))
    engine.module[1].seen = 5
    path = engine.save_checkpoint(folder)
    engine.destroy()
    with zerorun.zero.Init(enabled=how == "init"):
        model = nn.Sequential(nn.Linear(4, 4), Counting(4, 4))
    engine = zerorun.initialize(model, make_config(3)) if how == "engine" else None
    zerorun.load_pretrained(model, path)
    if engine is not None:
        engine.destroy()
    found: int = model[1].seen
    return found


class Telling(Counting):
    """It tells of its state and takes none back."""

    set_extra_state = nn.Module.set_extra_state


def test_extra_states_that_a_checkpoint_lacks_or_a_class_does_not_take_stay(tmp_path: Path) -> None:
    engine = zerorun.initialize(nn.Sequential(Counting(4, 4), nn.Linear(4, 4)), make_config(0))
    engine.module[0].seen = 5
    path = engine.save_checkpoint(tmp_path)
    engine.destroy()
    model = nn.Sequential(Telling(4, 4), Counting(4, 4))
    model[0].seen = model[1].seen = 1
    zerorun.load_pretrained(model, path)
    assert model[0].seen == model[1].seen == 1


@pytest.mark.parametrize("how", ["plain", "init", "engine"])
def test_pretrained_modules_get_their_extra_state_back(how: str, tmp_path: Path) -> None:
    assert run_ranks(2, load_counting, str(tmp_path), how) == [15, 15]


def test_an_export_says_that_it_has_no_extra_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = zerorun.initialize(nn.Sequential(Counting(4, 4)), make_config(1))
    path = engine.save_checkpoint(tmp_path)
    engine.export(tmp_path / "out")
    engine.destroy()
    told = "without what modules return from get_extra_state(), which is no weight: '0._extra_state'"
    assert sum(told in record.getMessage() for record in caplog.records) == 1
    arguments = argparse.Namespace(dir=path, tag=None, out=tmp_path / "more", dtype=None, max_shard_size=1 << 30)
    assert f"note: {told}" in list(export.run(arguments)[1])


def save_untied(folder: str, shared: bool) -> list[list[float]]:
    """The first elements of two buffers after loads of a save while they were one, and of one while they were two."""
    model = Sharing(1.0)
    if not shared:
        model.second.scale = torch.full((3,), 2.0)
    engine = zerorun.initialize(model, make_config(3))
    engine.save_checkpoint(folder, tag="first")
    model.second.scale = torch.full((3,), 2.0) if shared else model.first.scale
    engine.save_checkpoint(folder, tag="second")
    engine.destroy()
    found = []
    for tag in ("first", "second"):
        model = Sharing(5.0)
        model.second.scale = torch.full((3,), 6.0)
        engine = zerorun.initialize(model, make_config(3))
        engine.load_checkpoint(folder, tag=tag)
        found.append([model.first.scale[0].item(), model.second.scale[0].item()])
        engine.destroy()
    return found


@pytest.mark.parametrize("shared", [True, False])
def test_buffers_that_are_made_two_or_one_later(shared: bool, tmp_path: Path) -> None:
    for found in run_ranks(2, save_untied, str(tmp_path), shared):
        assert found == ([[1, 1], [1, 2]] if shared else [[1, 2], [1, 1]])


def test_pretrained_weights_may_lack_what_is_named(tmp_path: Path) -> None:
    weights = Gpt(2).state_dict()
    del weights["head.weight"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    model = Gpt(2)
    with pytest.raises(CheckpointError, match=r"lacks 'head\.weight'.*allow_missing"):
        zerorun.load_pretrained(model, tmp_path)
    with pytest.raises(CheckpointError, match="allow_missing = 3: it must be names"):
        zerorun.load_pretrained(model, tmp_path, allow_missing=3)  # type: ignore[arg-type]
    zerorun.load_pretrained(model, tmp_path, allow_missing="head.*")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())


# -- saving on one rank ------------------------------------------------------------------------------------------


def save_late(folder: str, first: bool) -> list[str]:
    """What rank 0 says while rank 1 does not come."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerorun").addHandler(handler)
    before, ranks._MEET_S = ranks._MEET_S, 0.2
    engine = make_engine(PLAIN, make_config(1))
    try:
        if not first:
            engine.save_checkpoint(folder, tag="first")
        heard.clear()
        time.sleep(1.0 * dist.get_rank())
        engine.save_checkpoint(folder)
        return [line for line in heard if "waited" in line]
    finally:
        ranks._MEET_S = before
        logging.getLogger("zerorun").removeHandler(handler)
        engine.destroy()


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_waits_alone_says_what_for(tmp_path: Path, first: bool) -> None:
    """Also in the first save of an engine, which waits before it has a process group of its own."""
    early, late = run_ranks(2, save_late, str(tmp_path), first)
    assert [line.partition(" has ")[0] for line in early] == ["rank 0"]
    assert "save_checkpoint()" in early[0]
    assert late == []


# -- frozen weights ----------------------------------------------------------------------------------------------


def save_trainable(folder: str) -> tuple[list[float], int]:
    engine = make_engine(LORA, make_config(3))
    train(engine, LORA, 2)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    losses = train(engine, LORA, 2, 2)
    engine.destroy()
    return losses, sum(file.stat().st_size for file in Path(folder).glob("*/model-*.safetensors"))


def load_trainable(folder: str, spoil: bool) -> list[float] | str:
    module = LORA.build()
    if spoil:
        next(param for param in module.parameters() if not param.requires_grad).data[0] += 1
    engine = zerorun.initialize(module, make_config(1))
    try:
        engine.load_checkpoint(folder)
        return train(engine, LORA, 2, 2)
    except CheckpointError as error:
        return str(error)
    finally:
        engine.runtime.forget()
        engine.destroy()


def test_trainable_weights_alone(tmp_path: Path) -> None:
    losses, size = run_ranks(2, save_trainable, str(tmp_path))[0]
    module = LORA.build()
    trainable = sum(4 * param.numel() for param in module.parameters() if param.requires_grad)
    assert size < trainable + 4096 < sum(4 * param.numel() for param in module.parameters())
    assert run_ranks(2, load_trainable, str(tmp_path), False)[0] == losses
    assert "was trained with other frozen weights" in run_ranks(2, load_trainable, str(tmp_path), True)[1]


def save_rounded(folder: str) -> dict[str, torch.Tensor]:
    engine = zerorun.initialize(Gpt(), make_config(3, precision="bf16"))
    train(engine, PLAIN, 2)
    engine.save_checkpoint(folder)
    exact = engine.state_dict(exact=True)
    engine.destroy()
    return exact


def load_untrained(folder: str, stage: int, frozen: bool, precision: str) -> dict[str, torch.Tensor]:
    """The weights of an engine that trains nothing of them, or with ``frozen`` only the first one."""
    module, config = Gpt(), make_config(stage, precision=precision)
    if frozen:
        for param in list(module.parameters())[1:]:
            param.requires_grad_(False)
    else:
        del config["optimizer"]
    engine = zerorun.initialize(module, config)
    engine.load_checkpoint(folder, load_module_only=True)
    found = engine.state_dict()
    engine.destroy()
    return found


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_that_are_not_trained_have_the_digits_of_masters(stage: int, frozen: bool, tmp_path: Path) -> None:
    """If they are kept in fp32; in bf16 they are as they were."""
    exact = run_ranks(2, save_rounded, str(tmp_path))[0]
    assert any(not torch.equal(value, value.bfloat16().float()) for value in exact.values())
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for found in run_ranks(2, load_untrained, str(tmp_path), stage, frozen, precision):
            assert all(torch.equal(value.to(dtype), exact[name].to(dtype)) for name, value in found.items())


class WithNothing(nn.Module):
    """One of its parameters has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.nothing = nn.Linear(4, 4), nn.Parameter(torch.empty(0, 4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values) + self.nothing.sum()


def engine_with_nothing(stage: int) -> zerorun.Engine:
    torch.manual_seed(stage)
    return zerorun.initialize(WithNothing(), make_config(stage, precision="bf16"))


def save_nothing(folder: str) -> None:
    for stage in (0, 3):
        engine = engine_with_nothing(stage)
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        engine.save_checkpoint(Path(folder) / f"{dist.get_world_size()} ranks, stage {stage}", tag="here")
        engine.destroy()


def load_nothing(folder: str) -> list[str]:
    """What is said of each checkpoint that cannot be loaded at some stage."""
    said = []
    for stage in (0, 3):
        engine = engine_with_nothing(stage)
        for path in sorted(Path(folder).iterdir()):
            try:
                engine.load_checkpoint(path)
            except CheckpointError as error:
                said.append(str(error))
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        moment = zerorun.zero.safe_get_full_optimizer_state(engine.module.nothing, "exp_avg")
        assert moment is not None and moment.shape == (0, 4)
        zerorun.zero.safe_set_full_optimizer_state(engine.module.nothing, moment, "exp_avg")
        engine.destroy()
    return said


def test_parameters_without_elements_load_in_every_layout(tmp_path: Path) -> None:
    """All layouts write the same of them, and load what versions wrote that knew them in no parameter group."""
    for world in (1, 2):
        run_ranks(world, save_nothing, str(tmp_path))
    found = []
    for path in sorted(tmp_path.iterdir()):
        assert not check(path / "here").problems
        manifest = read_manifest(path / "here")
        assert manifest.optimizer is not None
        found.append((manifest.parameters, manifest.optimizer["scalars"]))
    assert all(one == found[0] for one in found)
    groups = {name: entry["group"] for name, entry in found[0][0].items()}
    assert groups == {"linear.weight": 0, "linear.bias": 0, "nothing": 0}
    older = shutil.copytree(tmp_path / "2 ranks, stage 3", tmp_path / "older")
    manifest = read_manifest(older / "here")
    manifest.parameters["nothing"]["group"] = None
    (older / "here" / MANIFEST).write_text(manifest.to_text())
    for world in (1, 2):
        assert run_ranks(world, load_nothing, str(tmp_path)) == [[]] * world


# -- disks of their own ------------------------------------------------------------------------------------------


def save_apart(folder: str) -> list[float]:
    engine = make_engine(PLAIN, make_config(3))
    train(engine, PLAIN, 2)
    path = engine.save_checkpoint(Path(folder) / f"disk{dist.get_rank()}")
    assert path.is_dir()
    losses = train(engine, PLAIN, 2, 2)
    engine.destroy()
    return losses


def load_apart(folder: str, swap: bool) -> list[float]:
    torch.manual_seed(99)
    engine = make_engine(PLAIN, make_config(2))
    disk = (dist.get_rank() + int(swap)) % dist.get_world_size()
    path, _ = engine.load_checkpoint(Path(folder) / f"disk{disk}")
    assert path is not None
    losses = train(engine, PLAIN, 2, 2)
    engine.destroy()
    return losses


@pytest.mark.parametrize("swap", by_day((False, True), True))
def test_every_rank_has_a_disk_of_its_own(swap: bool, tmp_path: Path) -> None:
    """No shared file system: each disk holds its own files, all can be loaded together, in any order of the nodes."""
    expected = run_ranks(3, save_apart, str(tmp_path))
    files = [{file.name for file in (tmp_path / f"disk{rank}" / "global_step2").glob("model-*")} for rank in range(3)]
    assert all(files)
    assert not files[0] & files[1]
    assert run_ranks(3, load_apart, str(tmp_path), swap) == expected


def load_where_nothing_is(folder: str) -> list[float]:
    engine = make_engine(PLAIN, make_config(3))
    place = Path(folder) / "disk0" if dist.get_rank() == 0 else Path(folder) / "empty"
    path, _ = engine.load_checkpoint(place)
    assert path is not None
    losses = train(engine, PLAIN, 2, 2)
    engine.destroy()
    return losses


def save_on_one(folder: str) -> list[float]:
    engine = make_engine(PLAIN, make_config(3))
    train(engine, PLAIN, 2)
    engine.save_checkpoint(Path(folder) / "disk0")
    losses = train(engine, PLAIN, 2, 2)
    engine.destroy()
    return losses


def test_a_new_node_has_no_files_at_all(tmp_path: Path) -> None:
    expected = run_ranks(2, save_on_one, str(tmp_path))
    assert run_ranks(2, load_where_nothing_is, str(tmp_path)) == expected


# -- data --------------------------------------------------------------------------------------------------------


def stateful(folder: str) -> tuple[list[list[int]], list[list[int]]]:
    """(batches after the save, batches after loading it into another engine)."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def engine_and_batches() -> tuple[zerorun.Engine, Any]:
        samples = list(range(100 * dist.get_rank(), 100 * dist.get_rank() + 20))
        loader = StatefulDataLoader(samples, batch_size=3, shuffle=True)
        config = make_config(1) | {"train_micro_batch_size_per_gpu": 3}
        engine, _, found, _ = zerorun.initialize(PLAIN.build(), config, training_data=loader)
        assert found is loader
        return engine, found

    engine, loader = engine_and_batches()
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    engine.save_checkpoint(folder)
    expected = [batch.tolist() for batch in batches]
    engine.destroy()
    engine, loader = engine_and_batches()
    engine.load_checkpoint(folder)
    found = [batch.tolist() for batch in loader]
    engine.destroy()
    return expected, found


def stateful_elsewhere(folder: str) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(range(20), batch_size=2)
    engine = zerorun.initialize(PLAIN.build(), make_config(1), training_data=loader)
    with pytest.raises(CheckpointError, match="has no data state"):
        engine.load_checkpoint(folder)
    engine.load_checkpoint(folder, allow_missing=["data"])
    assert next(iter(loader)).tolist() == [0, 1], "it has the position of another rank"
    engine.destroy()


def test_a_loader_that_knows_its_position(tmp_path: Path) -> None:
    for expected, found in run_ranks(2, stateful, str(tmp_path)):
        assert len(expected) == 5
        assert found == expected
    run_ranks(3, stateful_elsewhere, str(tmp_path))


def plain_loader() -> None:
    with pytest.raises(ModelError, match="training_data is a DataLoader"):
        zerorun.initialize(PLAIN.build(), make_config(1), training_data=torch.utils.data.DataLoader(range(4)))


def test_a_loader_without_a_position_is_refused() -> None:
    run_ranks(1, plain_loader)


# -- memory ------------------------------------------------------------------------------------------------------


def measure(folder: str, stage: int) -> tuple[int, int, int, int]:
    """(most bytes made by saving, by loading; this rank's state, the largest tensor)."""
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    engine = zerorun.initialize(module, make_config(stage, precision="bf16"))
    engine.backward(engine(torch.ones(2, 256)).float().square().mean())
    engine.step()
    engine.save_checkpoint(folder, tag="warm")
    with Peak() as save:
        engine.save_checkpoint(folder)
    with Peak() as load:
        engine.load_checkpoint(folder)
    state = sum(part.tensor.nbytes for part in engine.checkpointer.inventory.weights())
    state += sum(part.tensor.nbytes for part in engine.checkpointer.inventory.optimizer_state()[0])
    engine.destroy()
    return save.most, load.most, state, 4 * 256 * 256


def pieces_of_a_device(folder: str) -> tuple[int, int, bool]:
    """(most elements that come to host memory at once, those of the largest tensor, whether what was saved is loaded)"""
    module = nn.Linear(1500, 1500)
    engine = zerorun.initialize(module, make_config(1))
    sizes: list[int] = []

    def noted(piece: torch.Tensor) -> torch.Tensor:
        sizes.append(piece.numel())
        return piece.clone()

    usual, gather._on_host = gather._on_host, noted
    try:
        engine.save_checkpoint(folder)
    finally:
        gather._on_host = usual
    saved = {name: value.clone() for name, value in engine.state_dict().items()}
    with zerorun.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        module.weight.data.zero_()
    engine.load_checkpoint(folder)
    same = all(torch.equal(value, saved[name]) for name, value in engine.state_dict().items())
    engine.destroy()
    return max(sizes), 1500 * 1500, same


def test_what_is_on_a_device_comes_to_host_memory_in_pieces(tmp_path: Path) -> None:
    ((most, largest, same),) = run_ranks(1, pieces_of_a_device, str(tmp_path))
    assert most == 1 << 20 < largest  # 4 MiB
    assert same


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_of_saving_and_loading(stage: int, tmp_path: Path) -> None:
    """New memory for saving: one tensor. For loading: one tensor; moments take the place of the old ones."""
    messages = 300_000  # bytes: random numbers of all ranks, and what ranks tell each other
    for save, load, state, largest in run_ranks(2, measure, str(tmp_path), stage):
        assert save <= largest + messages
        assert load <= largest + messages
        assert state > 3 * (largest + messages)


# -- what is refused ---------------------------------------------------------------------------------------------


def given_by(rank: int, what: str) -> dict[str, Any] | None:
    """The client state that ``rank`` gives."""
    if what == "own":
        return {"seen": torch.full((3,), rank), "places": [rank, {"of": torch.arange(rank)}]}
    return {"seen": torch.full((3,), 7)} if what == "same" or rank == 0 else None


def client_states(folder: str, what: str, asynchronous: bool) -> dict[str, Any]:
    engine = make_engine(PLAIN, make_config(3))
    train(engine, PLAIN, 1)
    given = given_by(dist.get_rank(), what)
    engine.save_checkpoint(folder, client_state=given, asynchronous=asynchronous)
    if given is not None and asynchronous:
        given["seen"].fill_(-1)  # what is saved is what was given
    engine.wait_for_checkpoint()
    found = engine.load_checkpoint(folder)[1]
    engine.destroy()
    return found


def client_state_elsewhere(folder: str) -> dict[str, Any]:
    engine = make_engine(PLAIN, make_config(1))
    found = engine.load_checkpoint(folder)[1]
    engine.destroy()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("asynchronous", (False, True))
@pytest.mark.parametrize("what", ("own", "same", "of the first"))
def test_each_rank_gets_its_own_client_state_back(what: str, asynchronous: bool, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(3, client_states, str(tmp_path), what, asynchronous)):
        expected = given_by(rank if what == "own" else 0, what)
        assert repr(found) == repr(expected)
    stored = read_manifest(tmp_path / "global_step1").client_states
    assert (stored is not None) == (what == "own")
    for found in run_ranks(2, client_state_elsewhere, str(tmp_path)):
        assert repr(found) == repr(given_by(0, what))


def give_much(folder: str) -> int:
    """Bytes of tensors that a rank makes to save what rank 0 gives, 4 MB."""
    engine = make_engine(PLAIN, make_config(1))
    state = {"average": torch.zeros(1_000_000)} if dist.get_rank() == 0 else None
    engine.save_checkpoint(folder, "before")
    with Peak() as peak:
        engine.save_checkpoint(folder, client_state=state)
    engine.destroy()
    return peak.most


def test_a_client_state_stays_on_the_rank_that_writes_it(tmp_path: Path) -> None:
    first, *others = run_ranks(3, give_much, str(tmp_path))
    assert max(first, *others) < 500_000


def refusals(folder: str) -> None:
    engine = make_engine(PLAIN, make_config(1, accumulation=2))
    with pytest.raises(CheckpointError, match="need a directory"):
        engine.save_checkpoint("")
    with pytest.raises(CheckpointError, match="tag = 'a/b'"):
        engine.save_checkpoint(folder, tag="a/b")
    with pytest.raises(TypeError, match="save_dirr"):
        engine.save_checkpoint(save_dirr=folder)
    engine.backward(PLAIN.loss(engine, Place(dist.get_rank(), 0, 0)))
    engine.step()
    with pytest.raises(StepError, match="middle of a step"):
        engine.save_checkpoint(folder)
    engine.backward(PLAIN.loss(engine, Place(dist.get_rank(), 0, 1)))
    engine.step()
    with pytest.raises(CheckpointError, match=r"client_state\.args is a .*without pickle"):
        engine.save_checkpoint(folder, client_state={"args": object()})
    assert engine.load_checkpoint(Path(folder) / "nowhere") == (None, {})
    engine.save_checkpoint(save_dir=folder, tag="here", client_state={"x": torch.arange(3), 7: (1, {2})})
    with pytest.raises(CheckpointError, match=r"no checkpoint 'there' in .* There are here"):
        engine.load_checkpoint(folder, tag="there")
    path, client = engine.load_checkpoint(load_dir=folder, load_module_strict=True)
    assert path == Path(folder) / "here"
    assert client.keys() == {"x", 7}
    assert client["x"].tolist() == [0, 1, 2]
    assert client[7] == (1, {2})
    engine.destroy()
    other = make_engine(CASES["tied"], make_config(1))
    with pytest.raises(CheckpointError, match="beside what the model has"):
        other.load_checkpoint(folder)
    other.destroy()
    wider = Case("wider", lambda: Gpt(4, lambda: nn.Linear(16, 16)))
    bigger = make_engine(wider, make_config(1))
    with pytest.raises(CheckpointError, match=r"lacks 'blocks\.0\.weight'"):
        bigger.load_checkpoint(folder)
    bigger.destroy()
    sgd = make_engine(PLAIN, make_config(1, optimizer="SGD"))
    with pytest.raises(CheckpointError, match="optimizer Adam, and this run has SGD"):
        sgd.load_checkpoint(folder)
    sgd.load_checkpoint(folder, load_optimizer=False)
    sgd.destroy()


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(2, refusals, str(tmp_path))


def lose_a_file(folder: str) -> str:
    """Rank 1's file is gone when the leader of the directory, rank 0, looks for it."""
    engine = make_engine(PLAIN, make_config(3))
    train(engine, PLAIN, 1)
    write = saving.write_tensors

    def lose(plan: Any, collector: Any, rank: int, target: Any) -> Any:
        records = write(plan, collector, rank, target)
        if rank == 1:
            (target.temporary / next(iter(records))).unlink()
        return records

    saving.write_tensors = lose  # type: ignore[assignment]
    try:
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder)
    finally:
        saving.write_tensors = write  # type: ignore[assignment]
    engine.destroy()
    return str(caught.value)


def test_a_file_that_another_rank_wrote_and_that_is_gone_is_noticed(tmp_path: Path) -> None:
    for message in run_ranks(2, lose_a_file, str(tmp_path)):
        assert "was written, but cannot be found" in message
    assert not any(tmp_path.iterdir())


def asynchronous(folder: str) -> tuple[list[float], list[float]]:
    engine = make_engine(PLAIN, make_config(3, precision="bf16"))
    train(engine, PLAIN, 2)
    engine.save_checkpoint(folder, asynchronous=True)
    losses = train(engine, PLAIN, 3, 2)  # weights change while the checkpoint is written
    engine.save_checkpoint(folder, asynchronous=True, tag="later")
    engine.wait_for_checkpoint()
    engine.load_checkpoint(folder, "global_step2")
    again = train(engine, PLAIN, 3, 2)
    engine.destroy()
    return losses, again


def test_an_asynchronous_save_is_of_the_instant_of_the_call(tmp_path: Path) -> None:
    for losses, again in run_ranks(2, asynchronous, str(tmp_path)):
        assert losses == again


class Spectral(nn.Module):
    """Its buffer is one that torch conjugates where it is read, also after a forward."""

    def __init__(self, values: list[complex]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("spectrum", torch.tensor(values).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.spectrum = (self.spectrum * 1j).conj()
        return self.layer(x)


def spectra(folder: str) -> list[torch.Tensor]:
    config = make_config(3)
    engine = zerorun.initialize(Spectral([1 + 2j, 3 - 1j]), config)
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    engine.save_checkpoint(folder)
    found = [engine.module.spectrum.clone(), engine.state_dict()["spectrum"].clone()]
    engine.destroy()
    engine = zerorun.initialize(Spectral([0j, 0j]), config)
    engine.load_checkpoint(folder)
    found.append(engine.module.spectrum.clone())
    engine.destroy()
    return [torch.view_as_real(value.resolve_conj()) for value in found]


def test_buffers_that_torch_conjugates_later_come_back(tmp_path: Path) -> None:
    wanted = torch.view_as_real((torch.tensor([1 - 2j, 3 + 1j]) * 1j).conj().resolve_conj())
    for found in run_ranks(2, spectra, str(tmp_path)):
        for value in found:
            assert torch.equal(value, wanted)
