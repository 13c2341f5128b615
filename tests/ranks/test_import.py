"""Checkpoints of DeepSpeed and of torch.distributed.checkpoint, made by these on 2 ranks, are read to the last bit.

Run as a program, by 2 ranks, this file is what makes those of DeepSpeed, with what its own functions say of the values.
"""

from __future__ import annotations

import argparse
import copyreg
import importlib.util
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from harness import patience, run_ranks, start_ranks
from torch import nn
from torch.distributed.checkpoint import metadata
from training import make_config

import zerorun
from zerorun.checkpoint import foreign
from zerorun.checkpoint.cli import main as main_command
from zerorun.checkpoint.foreign import ForeignCheckpoint, match_groups
from zerorun.checkpoint.importers.from_dcp import read_dcp
from zerorun.checkpoint.importers.from_deepspeed import read_deepspeed
from zerorun.errors import CheckpointError

STEPS, ACCUMULATION = 3, 2
MOMENTS = ("exp_avg", "exp_avg_sq")
FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
# name: (stage, dtype, zero_optimization, other configuration, whether the optimizer is of FusedAdam's class, whether it
# runs not only at night)
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], bool, bool]] = {
    "0 fp32": (0, "fp32", {}, {}, False, False),
    "0 bf16": (0, "bf16", {}, {}, False, False),
    "0 bf16 fused": (0, "bf16", {}, {}, True, False),
    "0 fp16 fused": (0, "fp16", {}, {}, True, True),
    "1 fp32": (1, "fp32", {}, {}, True, True),
    "1 fp32 adam": (1, "fp32", {}, {}, False, False),
    "1 bf16": (1, "bf16", {}, {}, False, True),
    "1 bf16 optimizer": (1, "bf16", {}, FP32_ACCUMULATION, False, True),
    "2 fp32": (2, "fp32", {}, {"checkpoint": {"serialization": False}}, False, True),
    "2 fp32 round robin": (2, "fp32", {"round_robin_gradients": True}, {}, False, True),
    "2 bf16 aligned": (2, "bf16", {"parameter_alignment": True}, {}, False, True),
    "2 bf16 elastic": (2, "bf16", {"elastic_checkpoint": True}, {}, False, True),
    "2 fp16": (2, "fp16", {}, {}, False, True),
    "3 fp32": (3, "fp32", {"stage3_param_persistence_threshold": 6}, {}, False, True),
    "3 bf16 sub-groups": (3, "bf16", {"sub_group_size": 40}, {}, False, True),
    "3 fp16": (3, "fp16", {}, {}, False, True),
}
BY_NAME = ("2 bf16 aligned", "3 fp32")  # whose files have members of enumerations as Debian 12's Python writes them
at_night = partial(pytest.param, marks=pytest.mark.nightly)
EVERY_CASE = [name if often else at_night(name) for name, (*_, often) in CASES.items()]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Odd sizes, so that padding matters; a tied and a frozen layer, a parameter of one element, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.tensor([1.5, 0.5, 1.0]))
        self.register_buffer("count", torch.tensor(7))
        self.embed = nn.Embedding(13, 7)
        self.first = nn.Linear(7, 11)
        self.frozen = nn.Linear(11, 5).requires_grad_(False)
        self.last = nn.Linear(5, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.embed(ids) * self.gain))
        return self.head(self.last(torch.tanh(self.frozen(x)))).float()


TRAINED = [["embed.weight", "first.weight", "last.weight"], ["first.bias", "last.bias"], ["gain"]]
FROZEN = ["frozen.weight", "frozen.bias"]
BUFFERS = ["scale", "count"]
GROUP_OF = {name: group for group, names in enumerate(TRAINED) for name in names}
DECAY = [0.1, 0.0, 0.0]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    found = [{"params": [params[name] for name in names], "weight_decay": DECAY[g]} for g, names in enumerate(TRAINED)]
    found[2]["lr"] = 3e-3
    return found


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(13, (2, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: Callable[..., torch.Tensor], rank: int, step: int) -> torch.Tensor:
    ids = batch(rank, step)
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


# -- on the ranks of DeepSpeed -----------------------------------------------------------------------------------


def fused_adam(params: Any) -> torch.optim.Optimizer:
    """An optimizer of FusedAdam's class, for what DeepSpeed does with those, but without its compiled kernel."""
    from deepspeed.ops.adam import FusedAdam

    class Plain(FusedAdam):
        def __init__(self) -> None:
            defaults = {"lr": 1e-2, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
            torch.optim.Optimizer.__init__(self, params, defaults)
            self.set_grad_none = True

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group.setdefault("step", 0)
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    zeros = {key: torch.zeros_like(param.data) for key in MOMENTS}
                    state = self.state.setdefault(param, {}) or self.state[param]
                    state.update({} if state else {"step": 0, **zeros})
                    state["step"] += 1
                    state["exp_avg"].lerp_(param.grad, 0.1)
                    state["exp_avg_sq"].lerp_(param.grad**2, 0.01)
                    param.data -= group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)

    return Plain()


def own_values(engine: Any, model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """(master or moment, name) -> value, as DeepSpeed's own functions say; at stage 0, which they do not know, by hand."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    params = {name: param for name, param in model.named_parameters() if name in GROUP_OF}
    optimizer = engine.optimizer
    found = {}
    if engine.zero_optimization_stage():
        if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # it forgets all groups but the first
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        for name, param in params.items():
            found["master", name] = safe_get_full_fp32_param(param).clone()
            found.update({(key, name): safe_get_full_optimizer_state(param, key).clone() for key in MOMENTS})
        return found
    inner = getattr(optimizer, "optimizer", optimizer)
    for group, names in enumerate(TRAINED):
        sizes = [params[name].numel() for name in names]
        for place, name in enumerate(names):
            if hasattr(optimizer, "fp32_groups_flat"):
                owner = optimizer.fp32_groups_flat[group]
                cut = slice(sum(sizes[:place]), sum(sizes[: place + 1]))
            else:
                owner, cut = inner.param_groups[group]["params"][place], slice(None)
            values = {"master": owner.detach(), **{key: inner.state[owner][key] for key in MOMENTS}}
            found.update({(k, name): v.flatten()[cut].reshape(params[name].shape).clone() for k, v in values.items()})
    return found


@contextmanager
def members_by_name(*kinds: type) -> Iterator[None]:
    """Members of enumerations are pickled as by Python 3.11.0 to 3.11.3, which Debian 12 has: ``getattr(kind, name)``."""
    for kind in kinds:
        copyreg.pickle(kind, lambda member: (getattr, (type(member), member.name)))
    yield
    for kind in kinds:
        del copyreg.dispatch_table[kind]


def write_deepspeed(folder: Path, name: str) -> None:
    import deepspeed
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    stage, dtype, zero, other, fused, _ = CASES[name]
    torch.manual_seed(0)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}},
        **other,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 50, "hysteresis": 3}
    if not fused:
        config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True, "betas": [0.9, 0.99]}}
    optimizer = fused_adam(groups(model)) if fused else None
    engine = deepspeed.initialize(model=model, config=config, optimizer=optimizer, model_parameters=groups(model))[0]
    for step in range(STEPS * ACCUMULATION):
        engine.backward(train(engine, engine.global_rank, step))
        engine.step()
    values = own_values(engine, model)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        values.update({("model", key): param.detach().clone() for key, param in model.named_parameters()})
    values.update({("model", key): value.clone() for key, value in model.named_buffers()})
    mine = {"epoch": 3, "args": argparse.Namespace(depth=2), "rng": torch.arange(4), "path": Path("a/b")}
    import numpy

    mine["numpy"] = {"array": numpy.arange(3.0), "number": numpy.float64(1.5), "state": numpy.random.get_state()}
    with members_by_name(*([ZeroStageEnum, OffloadDeviceEnum] if name in BY_NAME else [])):
        engine.save_checkpoint(str(folder / name), client_state=mine)
    losses = []
    for step in range(STEPS * ACCUMULATION, (STEPS + 5) * ACCUMULATION):
        loss = train(engine, engine.global_rank, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    if engine.global_rank == 0:
        torch.save(values, folder / name / "values.pt")
        torch.save(everyone, folder / name / "losses.pt")
    engine.destroy()


def main(folder: Path, names: Sequence[str]) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # It looks whether an optimizer is of this class, and imports PyTorch's compiler with it, for seconds.
    muon: Any = SimpleNamespace(MuonWithAuxAdam=type("MuonWithAuxAdam", (), {}))
    sys.modules["deepspeed.runtime.zero.muon.muon_optimizer"] = muon
    # Or it compiles for a minute. The attribute deepspeed.comm.torch is PyTorch itself.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    type(get_accelerator()).is_fp16_supported = lambda self: True  # slow, but for the format's sake
    deepspeed.init_distributed("gloo")
    for name in names:
        write_deepspeed(folder, name)


# -- DeepSpeed ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepspeed_runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder with a checkpoint of every case that runs. One launch makes them all: importing DeepSpeed takes longest."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: pip install setuptools wheel, then --no-build-isolation deepspeed==0.19.8")
    folder = tmp_path_factory.mktemp("deepspeed")
    named = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    names = [name for name, (*_, often) in CASES.items() if often or name in named]
    program = f"""
import runpy, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
runpy.run_path({__file__!r}, run_name="__main__")
"""
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with start_ranks(2, program, str(folder), *names, **variables) as ranks:
        for rank in ranks:
            code, said, errors = rank.finish(240 * patience())
            assert code == 0, said[-3000:] + errors[-3000:]
    return folder


def load_all(checkpoint: ForeignCheckpoint) -> dict[tuple[str, str], torch.Tensor]:
    """(set without ``optimizer.``, name) -> value, checked against what is said of it."""
    found = {}
    for tensor in checkpoint.tensors:
        value = tensor.load()
        assert (value.dtype, tuple(value.shape)) == (tensor.dtype, tensor.shape), tensor
        assert value.is_contiguous()
        assert (tensor.set.removeprefix("optimizer."), tensor.name) not in found, "twice"
        found[tensor.set.removeprefix("optimizer."), tensor.name] = value
    return found


def assert_same(found: dict[tuple[str, str], torch.Tensor], expected: dict[tuple[str, str], torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def expected_values(folder: Path, name: str) -> dict[tuple[str, str], torch.Tensor]:
    values = torch.load(folder / name / "values.pt")
    if CASES[name][1] == "fp32":
        for key in GROUP_OF:
            assert torch.equal(values.pop(("master", key)), values["model", key]) or "round robin" in name, key
    return values


@pytest.mark.parametrize("name", EVERY_CASE)
def test_deepspeed_values(deepspeed_runs: Path, name: str) -> None:
    found, expected = load_all(read_deepspeed(deepspeed_runs / name)), expected_values(deepspeed_runs, name)
    if "round robin" in name:  # for which DeepSpeed's functions give one parameter's values as another's
        reference = expected_values(deepspeed_runs, "2 fp32")
        assert all(torch.allclose(found[key], reference[key], rtol=0, atol=1e-7) for key in reference)
        found = {key: value for key, value in found.items() if key[0] == "model"}
        expected = {key: value for key, value in expected.items() if key[0] == "model"}
    assert_same(found, expected)


@pytest.mark.parametrize("name", EVERY_CASE)
def test_deepspeed_facts(deepspeed_runs: Path, name: str) -> None:
    stage, dtype, _, _, fused, _ = CASES[name]
    found = read_deepspeed(deepspeed_runs / name)
    wrapped = stage == 0 and dtype != "fp32"  # DeepSpeed's wrappers take a step with no gradient to begin with
    assert found.trainable == {**dict.fromkeys(GROUP_OF, True), **dict.fromkeys(FROZEN, False)}
    assert found.aliases == {"head.weight": "embed.weight"}
    assert found.optimizer_type == ("" if fused else "AdamW")
    assert found.group_of == GROUP_OF
    assert found.scalars == {"step": dict.fromkeys(GROUP_OF, float(STEPS + wrapped))}
    counters = {"global_steps": STEPS, "skipped_steps": 0, "micro_steps": STEPS * ACCUMULATION}
    counters["global_samples"] = STEPS * ACCUMULATION * 2 * 2
    assert found.counters == counters
    assert found.scheduler == {"last_batch_iteration": STEPS - 1}
    assert list(found.client_state) == ["epoch", "args", "rng", "path", "numpy"]
    assert found.client_state["args"] == argparse.Namespace(depth=2)
    assert found.client_state["numpy"]["array"].tolist() == [0.0, 1.0, 2.0]
    assert all("params" not in group and "step" not in group for group in found.groups)
    if "elastic" in name:
        assert len(found.groups) == 3
        assert "elastic_checkpoint" in found.notes[0]
    else:
        assert [group["weight_decay"] for group in found.groups] == DECAY
        assert len({group["lr"] for group in found.groups}) == 1, "WarmupLR sets all alike"
    if dtype != "fp16":
        assert found.loss_scale is None
        return
    hysteresis = 1 if stage == 0 else 3  # stage 0 has none
    scale = {"scale": 1024.0, "dynamic": True, "window": 50, "hysteresis_left": hysteresis, "consecutive": False}
    assert found.loss_scale == {**scale, "minimum": 1.0, "steps": STEPS, "last_overflow": -1}


def go_on(folder: str, stage: int, dtype: str) -> list[float]:
    """The losses of the next 5 steps by zerorun, on this rank."""
    torch.manual_seed(1)
    model = Net()
    config = make_config(stage, precision=dtype, accumulation=ACCUMULATION, clip=1.0)  # DeepSpeed's default
    config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.99]}}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}}
    engine = zerorun.initialize(model, config, model_parameters=groups(model))
    path, client_state = engine.load_checkpoint(folder, allow_missing=["rng"])
    assert path is not None
    assert client_state["epoch"] == 3
    assert engine.global_steps == STEPS and engine.global_samples == STEPS * ACCUMULATION * 2 * 2
    losses = []
    for step in range(STEPS * ACCUMULATION, (STEPS + 5) * ACCUMULATION):
        loss = train(engine, dist.get_rank(), step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.each_value
@pytest.mark.parametrize("name", [at_night("1 fp32 adam"), "2 fp32", "3 fp32", "1 bf16 optimizer", "3 bf16 sub-groups"])
def test_training_goes_on_as_deepspeed_would(deepspeed_runs: Path, name: str, stage: int, tmp_path: Path) -> None:
    """The command imports the checkpoint; the next 5 losses are DeepSpeed's own."""
    assert main_command(["import-deepspeed", str(deepspeed_runs / name), str(tmp_path)]) == 0
    dtype = CASES[name][1]
    expected = torch.load(deepspeed_runs / name / "losses.pt")
    found = run_ranks(2, go_on, str(tmp_path), stage, dtype)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6 if dtype == "fp32" else 2e-3)  # DeepSpeed sums bf16 in bf16


def test_deepspeed_is_not_imported(deepspeed_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:  # by tests of other packages
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # so that importing it fails
    read_deepspeed(deepspeed_runs / "3 fp16")


@pytest.fixture
def spoiled(deepspeed_runs: Path, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Gives a copy of a case's checkpoint that a test may damage."""
    yield lambda name: Path(shutil.copytree(deepspeed_runs / name, tmp_path / "copy"))


def tag_folder(folder: Path) -> Path:
    return folder / f"global_step{STEPS}"


def refusal(read: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(*args)
    assert "Remedy:" in str(caught.value)
    return str(caught.value)


def test_deepspeed_tags(spoiled: Callable[[str], Path]) -> None:
    folder = spoiled("3 fp32")
    tag = tag_folder(folder).name
    sizes = {len(read_deepspeed(*args).tensors) for args in ((folder,), (folder, tag), (folder / tag,))}
    assert len(sizes) == 1
    assert "'global_step7'" in refusal(read_deepspeed, folder, "global_step7")
    (folder / "latest").write_text("global_step9")
    assert f"{folder / 'global_step9'}: no such folder" in refusal(read_deepspeed, folder)
    (folder / "latest").unlink()
    message = refusal(read_deepspeed, folder)
    assert str(folder / "latest") in message
    assert tag in message


@pytest.mark.parametrize("name", ["2 fp32 round robin", "3 bf16 sub-groups"])
@pytest.mark.parametrize("what", ["optim", "model"])
def test_deepspeed_damaged_and_missing_files(spoiled: Callable[[str], Path], name: str, what: str) -> None:
    folder = spoiled(name)
    path = sorted(tag_folder(folder).glob(f"*_{what}_states.pt"))[-1]
    path.write_bytes(path.read_bytes()[:-700])
    message = refusal(read_deepspeed, folder)
    assert f"{path}: cannot be read" in message
    path.unlink()
    message = refusal(read_deepspeed, folder)
    assert f"{path}: no such file" in message


def test_deepspeed_truncated_without_zip(spoiled: Callable[[str], Path]) -> None:
    folder = spoiled("2 fp32")
    path = sorted(tag_folder(folder).glob("*_optim_states.pt"))[-1]
    path.write_bytes(path.read_bytes()[:-7])
    assert f"{path}: cannot be read" in refusal(read_deepspeed, folder)


def test_deepspeed_files_of_two_runs(spoiled: Callable[[str], Path], deepspeed_runs: Path) -> None:
    folder = spoiled("1 bf16")
    path = sorted(tag_folder(folder).glob("*_optim_states.pt"))[-1]
    shutil.copy(sorted(tag_folder(deepspeed_runs / "2 bf16 aligned").glob("*_optim_states.pt"))[-1], path)
    assert f"{path}: written with another number of ranks or stage" in refusal(read_deepspeed, folder)


def test_deepspeed_other_parallelism(spoiled: Callable[[str], Path]) -> None:
    folder = spoiled("1 fp32")
    path = tag_folder(folder) / "mp_rank_00_model_states.pt"
    content = read_unsafely(path)
    for key, value, what in (
        ("mp_world_size", 2, "tensor parallelism"),
        ("checkpoint_parallel_dimensions", {"pp_degree": 2}, "pipeline parallelism"),
        ("num_experts", [4], "experts"),
    ):
        torch.save({**content, key: value}, path)
        assert what in refusal(read_deepspeed, folder)
    torch.save({"a": 1}, path)
    assert "not laid out as by DeepSpeed" in refusal(read_deepspeed, folder)


def read_unsafely(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=False)
    return found


class Evil:
    """What a pickle must not be able to do: here it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_deepspeed_pickles_run_nothing(spoiled: Callable[[str], Path], tmp_path: Path) -> None:
    folder = spoiled("1 fp32")
    path = tag_folder(folder) / "mp_rank_00_model_states.pt"
    content = read_unsafely(path)
    torch.save({**content, "mine": Net}, path)
    message = refusal(read_deepspeed, folder)
    assert str(path) in message
    assert f"names {Net.__module__}.Net" in message
    torch.save({**content, "mine": Evil(tmp_path / "made")}, path)
    assert "posix.mkdir" in refusal(read_deepspeed, folder)
    assert not (tmp_path / "made").exists()


# -- stage 0 by number, and names that do not say enough ---------------------------------------------------------


def one_file(folder: Path) -> tuple[Path, nn.Module, dict[str, Any]]:
    """What stage 0 stores in fp32: here of two layers of one shape, the second of which is trained."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    empty = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "lr_scheduler")
    content = {
        **dict.fromkeys(empty),
        "module": model.state_dict(),
        "buffer_names": [],
        "optimizer": optimizer.state_dict(),
        "ds_config": "config.json",
        **dict.fromkeys(("global_steps", "dp_world_size", "mp_world_size"), 1),
        "skipped_steps": 0,
    }
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    return folder, model, optimizer.state_dict()


def test_deepspeed_stage_0_asks_for_names(tmp_path: Path) -> None:
    folder, _, state = one_file(tmp_path)
    message = refusal(read_deepspeed, folder)
    assert "fit in more than one way" in message
    assert "`names`" in message
    found = read_deepspeed(folder, names=[["1.weight", "1.bias"]])
    assert found.trainable == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True}
    assert torch.equal(load_all(found)["exp_avg", "1.weight"], state["state"][0]["exp_avg"])
    assert found.counters == {"global_steps": 1, "skipped_steps": 0, "micro_steps": 1}
    assert any("gradient_accumulation_steps" in note for note in found.notes)
    for wrong in (["1.bias", "1.weight"], ["1.weight"], ["1.weight", "other"]):
        assert "names" in refusal(lambda wrong=wrong: read_deepspeed(folder, names=[wrong]))


def test_match_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"a": 2, "b": 3, "c": 2, "d": 1}

    def by_size(group: int, start: int, name: str) -> bool:
        return (group, start, sizes[name]) in ((0, 0, 2), (0, 2, 1), (1, 0, 3), (1, 3, 2))

    assert match_groups(sizes, [3, 5], by_size, "x") == [["a", "d"], ["b", "c"]]
    with pytest.raises(CheckpointError, match=r"x: .* do not fit"):
        match_groups(sizes, [4, 3], by_size, "x")
    with pytest.raises(CheckpointError, match="in more than one way"):
        match_groups(dict.fromkeys("abc", 1), [2], lambda *_: True, "x")
    monkeypatch.setattr(foreign, "_MOST_STATES", 1000)  # a tenth of a second's worth
    with pytest.raises(CheckpointError, match="in very many ways"):
        match_groups(dict.fromkeys(map(str, range(60)), 1), [1] * 30, lambda *_: True, "x")


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------


class Custom:
    """A class of the user's, which no reader can know."""


def write_dcp(folder: str) -> dict[tuple[str, str], torch.Tensor]:
    """Saves in all styles; returns the values. On every rank."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        get_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, mesh = Net(), init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for step in range(STEPS):
        train(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    weights, state = get_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    titan = {"lr_scheduler": scheduler, "train_state": {"step": torch.tensor(STEPS), "mine": Custom()}}
    dcp.save({"model": weights, "optimizer": state, "step": STEPS}, checkpoint_id=f"{folder}/nested")
    with members_by_name(metadata._MEM_FORMAT_ENCODING):
        dcp.save({"app": {"model": weights, "optim": state}}, checkpoint_id=f"{folder}/app")
    dcp.save({**get_model_state_dict(model), "optimizer": flat, **titan}, checkpoint_id=f"{folder}/flat")
    dotted = {f"model.{name}": value for name, value in weights.items()}
    dotted.update({f"optimizer.{key}": value for key, value in flat.items()})
    dcp.save({**dotted, "lr_scheduler": {"last_epoch": Custom()}}, checkpoint_id=f"{folder}/refused")
    dcp.save({**dotted, "step": STEPS}, checkpoint_id=f"{folder}/dotted")
    dcp.save({"model": weights, "optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/numbered")
    dcp.save(weights, checkpoint_id=f"{folder}/model")

    found = {}
    for name, param in [*model.named_parameters(), *model.named_buffers()]:
        kinds = {"model": param.detach(), **{key: optimizer.state[param][key] for key in MOMENTS if name in GROUP_OF}}
        for kind, value in kinds.items():
            found[kind, name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


@pytest.fixture(scope="module")
def dcp_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str], torch.Tensor]]:
    from harness import run_ranks

    folder = tmp_path_factory.mktemp("dcp")
    return folder, run_ranks(2, write_dcp, str(folder))[0]


@pytest.mark.parametrize("style", ["nested", "flat", "app", "dotted", "numbered", "model"])
def test_dcp(dcp_runs: tuple[Path, dict[tuple[str, str], torch.Tensor]], style: str) -> None:
    folder, values = dcp_runs
    found = read_dcp(folder / style)
    floats = {name: name in GROUP_OF for kind, name in values if kind == "model" and name != "count"}
    if style == "model":
        values = {key: value for key, value in values.items() if key[0] == "model"}
        values["model", "head.weight"] = values["model", "embed.weight"]  # nothing tells that it is tied
        assert (found.group_of, found.groups, found.scalars, found.counters, found.aliases) == ({}, [], {}, {}, {})
        assert found.trainable == dict.fromkeys([*floats, "head.weight"], True)
        assert_same(load_all(found), values)
        return
    assert_same(load_all(found), values)
    assert found.trainable == floats
    assert found.aliases == {"head.weight": "embed.weight"}
    assert found.optimizer_type == "AdamW"
    assert found.counters == {"global_steps": STEPS}
    assert found.scalars == {"step": dict.fromkeys(GROUP_OF, float(STEPS))}
    assert any("may be buffers: scale, frozen.weight, frozen.bias" in note for note in found.notes)
    decay = {name: found.groups[group]["weight_decay"] for name, group in found.group_of.items()}
    assert decay == {name: DECAY[group] for name, group in GROUP_OF.items()}
    assert {name: found.groups[group]["lr"] for name, group in found.group_of.items()}["gain"] == 3e-3
    assert (found.scheduler or {}).get("last_epoch") == (STEPS if style == "flat" else None)
    assert any("train_state.mine" in note and "Custom" in note for note in found.notes) == (style == "flat")


def test_dcp_bad_folders(dcp_runs: tuple[Path, Any], tmp_path: Path) -> None:
    assert f"{tmp_path / '.metadata'}: no such file" in refusal(read_dcp, tmp_path)
    message = refusal(read_dcp, dcp_runs[0] / "refused")
    assert "lr_scheduler.last_epoch" in message
    assert "Custom" in message
    folder = Path(shutil.copytree(dcp_runs[0] / "nested", tmp_path / "copy"))
    path = sorted(folder.glob("*.distcp"))[-1]
    path.write_bytes(path.read_bytes()[:-7])
    assert f"{path}: has " in refusal(read_dcp, folder)
    path.unlink()
    assert f"{path}: no such file" in refusal(read_dcp, folder)
    metadata = folder / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-99])
    assert f"{metadata}: cannot be read" in refusal(read_dcp, folder)
    metadata.write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    message = refusal(read_dcp, folder)
    assert f"{metadata}: " in message
    assert "posix.mkdir" in message
    assert not (tmp_path / "made").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_dcp_names_that_begin_with_model(tmp_path: Path) -> None:
    """As Hugging Face's do: the prefix belongs to the name, unless the optimizer has it without."""
    names = ["model.embed.weight", "head.weight"]
    weights = {name: torch.rand(2, 3) for name in names}
    state = {f"state.{name}.exp_avg": torch.rand(2, 3) for name in names}
    dcp.save({**weights, "optimizer": state}, checkpoint_id=tmp_path / "plain", no_dist=True)
    dcp.save({"model": weights, "optimizer": {"0": {"momentum": state}}}, checkpoint_id=tmp_path / "nested", no_dist=True)
    found = read_dcp(tmp_path / "plain")
    assert sorted(load_all(found)) == sorted((kind, name) for kind in ("exp_avg", "model") for name in names)
    found = read_dcp(tmp_path / "nested")
    assert sorted(tensor.name for tensor in found.tensors) == sorted(names)
    assert any("in a layout of no known program" in note for note in found.notes)
    assert not found.client_state
    dcp.save({"model": weights, "optimizer": {"param_groups": {"a": 1}}}, checkpoint_id=tmp_path / "odd", no_dist=True)
    read_dcp(tmp_path / "odd")
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path / "none", no_dist=True)
    assert "no tensors of a model" in refusal(read_dcp, tmp_path / "none")
    dcp.save({"model": weights, "optimizer": {"param_groups": [1, 2]}}, checkpoint_id=tmp_path / "bad", no_dist=True)
    assert "in a layout of no known program" in refusal(read_dcp, tmp_path / "bad")


def test_dcp_under_other_names(tmp_path: Path) -> None:
    """What nobody can know is asked for, and what is no part of the run is named, never left out without a word."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weights, ema = model.state_dict(), {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for name, content in {
        "net": {"net": weights, "opt": optimizer.state_dict(), "extra": torch.ones(3)},
        "two": {"generator": weights, "discriminator": ema},
        "ema": {"model": weights, "ema": ema, "optimizer2": optimizer.state_dict(), "iteration": 9},
    }.items():
        dcp.save(content, checkpoint_id=tmp_path / name, no_dist=True)
    for name in ("net", "two"):
        assert "pass --model KEY" in refusal(read_dcp, tmp_path / name)
    for found in (
        read_dcp(tmp_path / "net", model="net", optimizer="opt"),
        read_dcp(tmp_path / "two", model="generator"),
        read_dcp(tmp_path / "ema"),
    ):
        stored = {tensor.name: tensor.load() for tensor in found.tensors if tensor.set == "model"}
        assert all(torch.equal(stored[name], value) for name, value in weights.items())
        assert stored.keys() == weights.keys()
        kept = [note.rpartition("kept in client_state: ")[2] for note in found.notes if "client_state" in note]
        roots = {name.partition(".")[0] for name in found.client_state}
        assert {part.partition(" ")[0] for part in kept[0].split(", ")} == roots
        assert roots in ({"extra"}, {"discriminator"}, {"ema", "optimizer2", "iteration"})
    assert {tensor.set for tensor in read_dcp(tmp_path / "net", model="net", optimizer="opt").tensors} == {
        "model",
        "optimizer.exp_avg",
        "optimizer.exp_avg_sq",
    }


def test_dcp_damaged_inside(dcp_runs: tuple[Path, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dcp_runs[0] / "model", tmp_path / "copy"))
    for path in folder.glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    found = read_dcp(folder)
    assert "embed.weight cannot be read" in refusal(next(t for t in found.tensors if t.name == "embed.weight").load)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed keeps process groups, whose threads abort the end of the interpreter now and then
