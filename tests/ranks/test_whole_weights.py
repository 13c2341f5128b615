"""Whole weights on one rank, as trainers ask for them, and in a file of torch.save."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from models import CASES
from small_disk import run_on_small_disk
from torch import nn
from training import make_config, make_engine, run_steps

import zerorun
from zerorun.errors import CheckpointError

Weights = dict[str, torch.Tensor]
GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}


def slowly(found: Any, path: Any, save: Any = torch.save) -> None:
    time.sleep(0.3)
    save(found, path)


def in_one_place(stage: int, folder: Path) -> tuple[Weights, Weights | None, Weights | None, bool, Weights]:
    """(``state_dict``, whole weights, those that are trained, whether it is said to be saved, what the file has then)."""
    engine = make_engine(CASES["frozen"], make_config(stage, precision="bf16", zero_optimization=GATHERED))
    run_steps(engine, CASES["frozen"], 1)
    return asked_of(engine, folder)


def in_stages(stage: int, folder: Path) -> tuple[Weights, Weights | None, Weights | None, bool, Weights]:
    """The same of a pipeline; each stage has a frozen layer."""
    layers = [nn.Linear(8, 8) for _ in range(4)]
    for layer in layers[::2]:
        layer.requires_grad_(False)
    model = zerorun.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = make_config(stage, precision="bf16", zero_optimization=GATHERED, pipeline={"stages": 2})
    return asked_of(zerorun.initialize(model, config), folder)


def asked_of(engine: Any, folder: Path) -> tuple[Weights, Weights | None, Weights | None, bool, Weights]:
    all_weights = engine.state_dict()
    whole = engine.consolidated_state_dict()
    # It is trained, though it is frozen for now, as adapters of peft are while another one is active.
    next(param for param in engine.module.parameters() if param.requires_grad).requires_grad_(False)
    trained = engine.consolidated_state_dict(exclude_frozen_parameters=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", slowly)
        said = engine.save_16bit_model(folder / "new", exclude_frozen_parameters=True)
    saved = torch.load(folder / "new" / "pytorch_model.bin")  # at once, on every rank
    dist.barrier()
    engine.destroy()
    return all_weights, whole, trained, said, saved


def check(found: list[Any], frozen: set[str]) -> None:
    for rank, (all_weights, whole, trained, said, saved) in enumerate(found):
        assert said
        wanted = {name: value for name, value in all_weights.items() if name not in frozen}
        assert frozen and wanted and frozen < all_weights.keys()
        assert same(saved, wanted)
        if rank:
            assert whole is trained is None
        else:
            assert same(whole, all_weights) and same(trained, wanted)
            assert all(value.dtype == torch.bfloat16 for value in whole.values() if value.is_floating_point())


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 1, 3))
def test_rank_0_has_them_and_the_file_is_there_for_all(stage: int, tmp_path: Path) -> None:
    frozen = {name for name, param in CASES["frozen"].build().named_parameters() if not param.requires_grad}
    check(run_ranks(2, in_one_place, stage, tmp_path), frozen)


@pytest.mark.parametrize("stage", by_day((0, 1), 1))
def test_those_of_all_stages_of_a_pipeline(stage: int, tmp_path: Path) -> None:
    found = run_ranks(2, in_stages, stage, tmp_path)
    check(found, {"0.weight", "0.bias", "2.weight", "2.bias"})


# -- extra state, and files that cannot be written -----------------------------------------------------------------------


class Counting(nn.Linear):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": 3, "names": ["a"]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        pass


def with_extra_state(stage: int, pipelined: bool, folder: Path) -> list[Any]:
    layers = [nn.Linear(8, 8), Counting(8, 8)]
    config = make_config(stage, zero_optimization=GATHERED)
    module: nn.Module = nn.Sequential(*layers)
    if pipelined:
        module = zerorun.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
        config["pipeline"] = {"stages": 2}
    engine = zerorun.initialize(module, config)
    whole = engine.consolidated_state_dict()
    engine.save_16bit_model(folder)
    found = [engine.state_dict(), torch.load(folder / "pytorch_model.bin"), *([whole] if whole is not None else [])]
    dist.barrier()
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "pipelined"), [(1, False), (3, False), (1, True)])
def test_what_is_no_tensor_is_as_in_torch(stage: int, pipelined: bool, tmp_path: Path) -> None:
    for found in run_ranks(2, with_extra_state, stage, pipelined, tmp_path):
        for weights in found:
            assert list(weights) == ["0.weight", "0.bias", "1.weight", "1.bias", "1._extra_state"]
            assert weights["1._extra_state"] == {"calls": 3, "names": ["a"]}


FULL = """
import torch, zerorun
from zerorun.deepspeed.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert
from pathlib import Path
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
engine = zerorun.initialize(torch.nn.Linear(1000, 1000), config)
engine.save_checkpoint("kept")
kept = sorted(path.name for path in Path("kept").rglob("*"))
for write in (lambda: engine.save_16bit_model("kept"), lambda: convert("kept", "kept"),
              lambda: convert("kept", "kept", safe_serialization=True)):
    try:
        write()
    except zerorun.errors.CheckpointError as error:
        print(error)
    assert sorted(path.name for path in Path("kept").rglob("*")) == kept
"""


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    """torch.save says what it has not written instead, and half a file stayed of zero_to_fp32."""
    said = run_on_small_disk(FULL, tmp_path, mebibytes=6).splitlines()
    assert len(said) == 3 and all("No space left on device" in line for line in said), said
    assert all("MiB are free). Remedy: make room" in line for line in said[:2]), said


def unwritable(folder: Path) -> list[str]:
    engine = make_engine(CASES["plain"], make_config(1))
    errors = []
    engine.save_16bit_model(folder)
    before = (folder / "pytorch_model.bin").read_bytes()
    dist.barrier()
    with pytest.raises(CheckpointError, match="need a directory"):
        engine.save_16bit_model(None if dist.get_rank() == 1 else folder)  # type: ignore[arg-type]

    def full(found: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", full)
        for place in (folder, folder / "pytorch_model.bin"):
            with pytest.raises(CheckpointError) as caught:
                engine.save_16bit_model(place)
            errors.append(str(caught.value))
    assert (folder / "pytorch_model.bin").read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["pytorch_model.bin"]
    run_steps(engine, CASES["plain"], 1)  # ranks are still in step
    engine.destroy()
    return errors


def test_a_file_that_cannot_be_written_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    for full, occupied in run_ranks(2, unwritable, tmp_path):
        assert "pytorch_model.bin: No space left on device" in full
        assert "pytorch_model.bin is a file. Remedy: pass a directory" in occupied


class WithoutBase(nn.Module):
    """Its state dict has a part of its weights, as that of TRL's value heads on a model with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x)).mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"head.{name}": value for name, value in self.head.state_dict(*args, **kwargs).items()}


def names_beside_its_own(stage: int) -> list[list[str]]:
    engine = zerorun.initialize(WithoutBase(), make_config(stage))
    found = [sorted(engine.state_dict()), sorted(engine.consolidated_state_dict() or {})]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day((1, 3), 3))
def test_a_class_that_leaves_weights_out_loses_none(stage: int) -> None:
    """They were missing without a word. Checkpoints have them in any case."""
    names = ["base.bias", "base.weight", "head.bias", "head.weight"]
    assert run_ranks(2, names_beside_its_own, stage) == [[names, names], [names, []]]
