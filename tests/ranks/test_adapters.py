"""Models with adapters of PEFT: what is exported is what PEFT itself writes, of the adapter and of the merged model."""

from __future__ import annotations

import contextlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from test_checkpoint_contents import Peak
from training import make_config, shared_topology
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zerorun
from zerorun.checkpoint import cli
from zerorun.checkpoint.adapters import Adapters
from zerorun.deepspeed.parameters import copied_whole, give_values, show_placeholders
from zerorun.errors import CheckpointError
from zerorun.optim.loss_scaler import DTYPES
from zerorun.zero.value_access import safe_get_full_fp32_param

peft: Any = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")


def base(tied: bool = False, width: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=width, intermediate_size=width + 16, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adapted(kind: str) -> Any:
    """The base model with adapters, whose weights are not zero."""
    common = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    if kind == "prompt":
        model = peft.get_peft_model(base(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    elif kind == "injected":
        model = base()
        model.add_adapter(peft.LoraConfig(**common))
    elif kind == "wide":
        model = peft.get_peft_model(base(width=128), peft.LoraConfig(**common))
    elif kind == "patterns":
        patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"down_proj": 3}}
        model = peft.get_peft_model(base(), peft.LoraConfig(**common, **patterns, bias="lora_only"))
    elif kind == "dora":
        model = peft.get_peft_model(base(), peft.LoraConfig(**common, use_dora=True, modules_to_save=["lm_head"]))
    elif kind == "two":
        model = peft.get_peft_model(base(), peft.LoraConfig(**common))
        model.add_adapter("other", peft.LoraConfig(**{**common, "r": 2, "target_modules": ["o_proj", "q_proj"]}))
    else:
        assert kind == "tokens"
        model = peft.get_peft_model(base(tied=True), peft.LoraConfig(**common, trainable_token_indices=[3, 5]))
    generator = torch.Generator().manual_seed(2)
    for param in model.parameters():
        if param.requires_grad:
            param.data += 0.1 * torch.randn(param.shape, generator=generator)
    return model


def train(engine: zerorun.Engine, steps: int, begin: int = 0) -> list[float]:
    losses = []
    for step in range(begin, begin + steps):
        ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return tensors_of(path, "")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def config_in(folder: Path) -> dict[str, Any]:
    """PEFT writes sets as lists, in any order."""
    config = json.loads((folder / "adapter_config.json").read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()}


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def export(kind: str, stage: int, precision: str, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(the weights that were exported, the same with masters in place of those that are trained)."""
    engine = zerorun.initialize(adapted(kind), make_config(stage, precision=precision), topology=shared_topology())
    train(engine, 2)
    engine.export(Path(folder) / "adapter")
    if kind in UNMERGED:
        with pytest.raises(CheckpointError, match=UNMERGED[kind]):
            engine.export(Path(folder) / "merged", merge_adapter=True)
    else:
        engine.export(Path(folder) / "merged", merge_adapter=True)
        engine.export(Path(folder) / "wide", dtype="fp32", merge_adapter=True)
    weights = engine.state_dict()
    params = engine.module.named_parameters(remove_duplicate=False)
    masters = {name: safe_get_full_fp32_param(param) for name, param in params}
    losses = train(engine, 1, 2)
    engine.destroy()
    undisturbed = zerorun.initialize(adapted(kind), make_config(stage, precision=precision), topology=shared_topology())
    assert train(undisturbed, 3)[2:] == losses
    undisturbed.destroy()
    return weights, {**weights, **{name: value for name, value in masters.items() if value is not None}}


def save(kind: str, stage: int, folder: str) -> list[float]:
    """Losses after saving a whole checkpoint, and one without what is frozen."""
    engine = zerorun.initialize(adapted(kind), make_config(stage, precision="bf16"), topology=shared_topology())
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    train(engine, 2)
    engine.save_checkpoint(folder, "whole")
    engine.save_checkpoint(folder, "partial", exclude_frozen_parameters=True)
    engine.export(Path(folder) / "exported")
    losses = train(engine, 2, 2)
    engine.destroy()
    return losses


def resume(kind: str, stage: int, folder: str, spoil: bool) -> list[float]:
    model = adapted(kind)
    if spoil:
        next(param for param in model.parameters() if not param.requires_grad).data[0] += 1
    engine = zerorun.initialize(model, make_config(stage, precision="bf16"), topology=shared_topology())
    if spoil:
        with pytest.raises(CheckpointError, match=r"trained with other frozen weights.*strict=False"):
            engine.load_checkpoint(folder, "partial")
        kept = engine.state_dict()
        engine.load_checkpoint(folder, "partial", load_module_strict=False)
        changed = {name for name, value in engine.state_dict().items() if not torch.equal(value, kept[name])}
        assert changed == {name for name, param in adapted(kind).named_parameters() if param.requires_grad}
    else:
        engine.load_checkpoint(folder, "partial", load_module_strict=False)
    losses = train(engine, 2, 2)
    engine.destroy()
    return losses


@pytest.mark.parametrize("kind", by_day(("dora", "two"), "two"))
def test_a_checkpoint_without_frozen_parameters(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes on as if nothing had happened, and holds what PEFT needs."""
    losses = run_ranks(2, save, kind, 3, str(tmp_path))
    assert run_ranks(2, resume, kind, 1, str(tmp_path), False) == losses
    one = run_ranks(1, resume, kind, 3, str(tmp_path), False)[0]
    assert one == pytest.approx(losses[0], rel=0.1)
    run_ranks(2, resume, kind, 2, str(tmp_path), True)
    trained = {name for name, param in adapted(kind).named_parameters() if param.requires_grad}
    assert set(tensors_of(tmp_path / "partial", "model")) == trained
    for tag in ("whole", "partial"):
        assert cli.main(["export", str(tmp_path / tag), str(tmp_path / f"{tag}-out")]) == 0
        folders = ["", "other"] if kind == "two" and tag == "whole" else [""]
        kept = [name for name in files_in(tmp_path / "exported") if len(folders) == 2 or "/" not in name]
        assert files_in(tmp_path / f"{tag}-out") == kept
        for folder in folders:
            assert_same(tensors(tmp_path / f"{tag}-out" / folder), tensors(tmp_path / "exported" / folder))
    out, frozen = capsys.readouterr().out, f"{FROZEN[kind]} frozen weights"
    assert "adapters alone" in out
    assert ("without other: frozen" in out) == (kind == "two")
    for arguments, expected in (
        (["inspect", "partial"], [f"{frozen}: saved with exclude_frozen_parameters", "adapters", "default ("]),
        (["inspect", "exported"], ["adapters of PEFT", "LORA, r 4, alpha 8", "adapter_model.safetensors"]),
        (["verify", "partial"], [f"; {frozen} left out"]),
    ):
        assert cli.main([arguments[0], str(tmp_path / arguments[1])]) == 0
        out = capsys.readouterr().out
        assert all(text in out for text in expected), out
    assert cli.main(["diff", str(tmp_path / "whole"), str(tmp_path / "partial")]) == 1
    assert f"left out of B (frozen_base), with the checksums of the other's: {frozen}" in capsys.readouterr().out


def staged(stages: int, replicas: int) -> Any:
    changes = {"pipeline": {"stages": stages}}
    return zerorun.initialize(adapted("injected"), make_config(1, accumulation=4 // replicas, **changes))


def batches(engine: Any, steps: range) -> list[float]:
    """The same 4 micro-batches of every step, however they are shared."""
    count, first = engine.gradient_accumulation_steps(), engine.topology.data_parallel_rank
    losses = []
    for step in steps:
        found = []
        for micro in range(first * count, (first + 1) * count):
            ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(10 * step + micro))
            found.append({"input_ids": ids, "labels": ids})
        if engine.topology.pipe > 1:
            losses.append(engine.train_batch(iter(found)).item())
            continue
        for batch in found:
            engine.backward(engine(**batch).loss)
            engine.step()
        losses.append(0.0)
    return losses


def save_staged(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = staged(2, 1)
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    batches(engine, range(2))
    engine.save_checkpoint(folder, "partial", exclude_frozen_parameters=True)
    engine.export(Path(folder) / "exported")
    losses, weights = batches(engine, range(2, 4)), engine.state_dict()
    engine.destroy()
    return losses, weights


def resume_staged(folder: str, stages: int, replicas: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = staged(stages, replicas)
    engine.load_checkpoint(folder, "partial", load_module_strict=False)
    losses, weights = batches(engine, range(2, 4)), engine.state_dict()
    engine.destroy()
    return losses, weights


@pytest.mark.parametrize("times", by_day((1, 3), 1))
def test_adapters_in_a_pipeline(times: int, tmp_path: Path) -> None:
    """Each stage knows of its own layers only: the checkpoint and the export have those of all."""
    losses, weights = run_ranks(2, save_staged, str(tmp_path))[0]
    for world, stages in ((3, 3), (2, 1), (2, 2))[:times]:
        found, loaded = run_ranks(world, resume_staged, str(tmp_path), stages, world // stages)[0]
        torch.testing.assert_close(loaded, weights, rtol=0 if stages == 2 else 1e-5, atol=0 if stages == 2 else 1e-6)
        assert stages == 1 or found == pytest.approx(losses, rel=1e-6)
    assert cli.main(["export", str(tmp_path / "partial"), str(tmp_path / "out")]) == 0
    assert_same(tensors(tmp_path / "out"), tensors(tmp_path / "exported"))
    opened = peft.PeftModel.from_pretrained(base(), tmp_path / "exported")
    assert sum("lora" in name for name, _ in opened.named_parameters()) == len(tensors(tmp_path / "exported")) == 18


FROZEN = {"dora": 30, "two": 42}


def tensors_of(path: Path, kind: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob(f"{kind}*.safetensors"):
        found |= safetensors.torch.load_file(file)
    return found


def export_counted(folder: str) -> tuple[int, int, int]:
    """Most bytes of tensors that exporting makes: (the adapter, the merged model), and those of the base model."""
    engine = zerorun.initialize(adapted("wide"), make_config(3), topology=shared_topology())
    with Peak() as alone:
        engine.export(Path(folder) / "adapter")
    with Peak() as merged:
        engine.export(Path(folder) / "merged", merge_adapter=True)
    whole = sum(param.numel() * 4 for name, param in engine.module.named_parameters() if "lora" not in name)
    engine.destroy()
    return alone.most, merged.most, whole


def test_no_rank_has_the_whole_model_to_export_it(tmp_path: Path) -> None:
    for alone, merged, whole in run_ranks(2, export_counted, str(tmp_path)):
        assert alone < whole / 8
        assert merged < whole * 0.8  # half of it, one block, and one layer while it is merged


UNMERGED = dict.fromkeys(("prompt", "injected"), r"has adapters, and no merge_and_unload\(\).*PeftModel.from_pretrained")
CELLS = [
    ("patterns", 0, 1, "fp32"), ("patterns", 3, 2, "bf16"), ("dora", 3, 2, "fp32"), ("dora", 1, 2, "bf16"),
    ("two", 3, 2, "fp32"), ("tokens", 2, 2, "fp32"), ("tokens", 3, 1, "bf16"), ("prompt", 3, 2, "fp32"),
    ("injected", 3, 2, "fp32"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stage", "world", "precision"), by_day(CELLS, *CELLS[1::5]))
def test_an_export_is_what_peft_makes_of_it(kind: str, stage: int, world: int, precision: str, tmp_path: Path) -> None:
    """The adapter as ``save_pretrained`` writes it, the merged model as ``merge_and_unload`` of one process."""
    weights, masters = run_ranks(world, export, kind, stage, precision, str(tmp_path))[0]
    reference = adapted(kind).to(DTYPES[precision])
    reference.load_state_dict(weights)
    found, expected = tmp_path / "adapter", tmp_path / "expected"
    reference.save_pretrained(expected)
    assert files_in(found) == [name for name in files_in(expected) if name != "generation_config.json"]
    for folder in ("", "other") if kind == "two" else ("",):
        assert_same(tensors(found / folder), tensors(expected / folder))
        assert config_in(found / folder) == config_in(expected / folder)
    plain, ids = base(kind == "tokens").to(DTYPES[precision]), torch.arange(12)[None]
    opened = peft.PeftModel.from_pretrained(plain, found, autocast_adapter_dtype=False)
    assert torch.allclose(opened(ids).logits, reference(ids).logits)
    if kind in UNMERGED:
        return
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_same(merged.state_dict(), reference.merge_and_unload().state_dict())
    wide = adapted(kind)
    wide.load_state_dict(masters)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype="auto")
    assert_same(found.state_dict(), wide.merge_and_unload().state_dict())


def save_as_openrlhf(stage: int, folder: Path) -> None:
    """Peft writes what the module has on rank 0, while it has all weights."""
    engine = zerorun.initialize(adapted("patterns"), make_config(stage, precision="bf16"), topology=shared_topology())
    show_placeholders(engine)
    train(engine, 2)
    engine.export(folder / "expected")
    whole = give_values(engine)
    engine.module.save_pretrained(folder / "found", is_main_process=whole is not None)  # on all ranks, as accelerate has it
    if whole is not None:
        own = peft.get_peft_model_state_dict(engine.module, whole)
        torch.save(own, folder / "own.bin")
    engine.destroy()


@pytest.mark.parametrize("stage", by_day((2, 3), 3))
def test_peft_saves_on_rank_zero_while_it_has_all_weights(stage: int, tmp_path: Path) -> None:
    """So does OpenRLHF in the DeepSpeed mode, before it writes the weights that it has over peft's file."""
    run_ranks(2, save_as_openrlhf, stage, tmp_path)
    expected = tensors(tmp_path / "expected")
    assert expected
    assert_same(tensors(tmp_path / "found"), expected)
    assert_same(torch.load(tmp_path / "own.bin"), expected)


def with_saved_modules(inside: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a model whose head and embedding peft copies, to train and save them whole."""
    with zerorun.zero.Init() if inside else contextlib.nullcontext():
        model: Any = base()
    settings = peft.LoraConfig(
        r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"], task_type="CAUSAL_LM"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Parameter, "__deepcopy__", copied_whole)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, settings)
    engine = zerorun.initialize(model, make_config(3), topology=shared_topology())
    losses, weights = train(engine, 2), engine.state_dict()
    engine.destroy()
    return losses, weights


def test_peft_copies_modules_of_a_partitioned_model() -> None:
    """In the DeepSpeed mode, where it opens a block for parameters that are empty only: the copies were NaN."""
    for found, wanted in zip(*(run_ranks(2, with_saved_modules, inside) for inside in (True, False)), strict=True):
        assert found[0] == wanted[0]
        assert_same(found[1], wanted[1])


HOSTILE = [
    {"files": {"../../x": ""}}, {"files": {"/x": ""}}, {"files": {"a/b/c": ""}}, {"files": {"..": ""}}, {"files": {"": ""}},
    {"names": {"../adapter_model": {}}}, {"names": {"model": {}}}, {"names": {"adapter_model": ["a"]}}, {"names": None},
    {"computed": ["../../adapter_model"]}, {"computed": 3}, {"files": {"a\0": ""}},
]  # fmt: skip


@pytest.mark.parametrize("changes", HOSTILE, ids=str)
def test_a_checkpoint_cannot_say_where_files_go(changes: dict[str, Any]) -> None:
    files, names = {"b/adapter_config.json": "{}"}, {"b/adapter_model": {"x": "y"}}
    good = {"files": files, "names": names, "computed": ["adapter_model"]}
    assert Adapters.from_bytes(json.dumps(good).encode(), Path("it")).names == names
    with pytest.raises(CheckpointError, match=r"^it "):
        Adapters.from_bytes(json.dumps({**good, **changes}).encode(), Path("it"))
