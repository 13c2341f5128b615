"""What a script writes to parameters outside of blocks counts as in plain PyTorch, or is an error, and is never dropped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from simulation import simulated_device
from test_bad_input import attempt
from torch import nn
from torch.nn.utils import prune
from training import make_config, merged

import zerorun
from zerorun import log
from zerorun.deepspeed.entry import initialize as initialize_as_deepspeed
from zerorun.zero.parameter_guards import LOOKING_STEPS

STEPS = 3


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def engine_of(model: nn.Module, stage: int, precision: str = "fp32", **changes: Any) -> zerorun.Engine:
    return zerorun.initialize(model, make_config(stage, precision=precision, optimizer="SGD", **changes))


def dtype_of(engine: zerorun.Engine) -> torch.dtype:
    return next(iter(engine.module.parameters())).dtype


def train(engine: zerorun.Engine, step: int) -> float:
    loss = engine(batch(dist.get_rank(), step, dtype_of(engine))).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


# -- frozen weights that get new tensors -------------------------------------------------------------------------------


class Momentum(nn.Module):
    """An encoder, and a frozen one that follows it in each forward in training."""

    def __init__(self, follow: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        self.query = layers()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.follow = follow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
                self.follow(query, key)
            target = self.key(x)
        return self.query(x) - 2.0 * target


def by_tensor(query: nn.Parameter, key: nn.Parameter) -> None:
    key.data = key.data * 0.75 + query.data * 0.25


def in_place(query: nn.Parameter, key: nn.Parameter) -> None:
    key.mul_(0.75).add_(query * 0.25)


def follow(stage: int, precision: str, how: Callable[..., None], folder: Path) -> tuple[list[float], dict[str, Any]]:
    """Losses, and weights that are saved right after a tensor was given, as another engine loads them."""
    engine = engine_of(Momentum(how), stage, precision)
    losses = [train(engine, step) for step in range(STEPS)]
    module = engine.module
    query, key = module.query[0].weight, module.key[0].weight
    module.follow(query, key)
    shown = engine.state_dict()
    engine.save_checkpoint(folder)
    for load in (lambda: engine.load_checkpoint(folder), lambda: engine.load_state_dict(shown)):
        module.follow(query, key)
        load()
        assert all(torch.equal(shown[name], value) for name, value in engine.state_dict().items())
    module.follow(query, key)
    newest = key.clone()
    engine.destroy()
    assert torch.equal(key, newest)
    other = engine_of(Momentum(how), stage, precision)
    other.load_checkpoint(folder)
    loaded = other.state_dict()
    other.destroy()
    assert all(torch.equal(shown[name], value) for name, value in loaded.items())
    return losses, loaded


@pytest.mark.parametrize(
    ("stage", "precision"),
    by_day([(s, p) for s in (0, 1, 2) for p in ("fp32", "bf16")], (0, "bf16"), (1, "fp32"), (2, "bf16")),
)
def test_a_frozen_weight_may_be_given_another_tensor(stage: int, precision: str, tmp_path: Path) -> None:
    """Momentum encoders, as MoCo's: `param_k.data = param_k.data * m + param_q.data * (1 - m)`."""
    given = run_ranks(2, follow, stage, precision, by_tensor, tmp_path / "given")
    written = run_ranks(2, follow, stage, precision, in_place, tmp_path / "written")
    for (losses, weights), (same, others) in zip(given, written, strict=True):
        assert losses == same
        assert all(torch.equal(value, others[name]) for name, value in weights.items())
    if precision == "fp32":
        for step in range(STEPS):
            assert sum(losses[step] for losses, _ in given) / 2 == pytest.approx(plain_losses()[step], abs=1e-6)


def plain_losses() -> list[float]:
    """In one process, with the batches of both ranks as one."""
    model = Momentum(in_place)
    optimizer = torch.optim.SGD(model.query.parameters(), **make_config(optimizer="SGD")["optimizer"]["params"])
    losses = []
    for step in range(STEPS):
        loss = model(torch.cat([batch(rank, step) for rank in range(2)])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- trained ones that do ----------------------------------------------------------------------------------------------


def replaced(stage: int, folder: Path) -> list[tuple[str, str]]:
    engine = engine_of(layers(), stage)
    train(engine, 0)
    weight = engine.module[0].weight
    own, weight.data = weight.data, torch.ones(8, 8)
    found = [
        attempt(engine.state_dict),
        attempt(lambda: engine.save_checkpoint(folder)),
        attempt(lambda: engine.export(folder / "export")),
        attempt(lambda: engine(batch(0, 0))),
    ]
    weight.data = own
    found.append(attempt(lambda: engine.save_checkpoint(folder)))
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_replaces_a_trained_weight_is_not_dropped_by_a_save(stage: int, tmp_path: Path) -> None:
    """A script that puts averages into the place of weights, and saves them, saved the old ones."""
    for *errors, after in run_ranks(2, replaced, stage, tmp_path):
        for kind, text in errors:
            assert kind in ("ModelError", "CheckpointError")
            assert "parameter '0.weight' was given another tensor after initialize()" in text and "Remedy" in text
            assert "its dtype is what it was" in text and "set bf16" not in text
        assert after == ("nothing", "")


# -- writes in place, where a master has the values -----------------------------------------------------------------------

PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {"precision": "bf16"}),
    "stage 1": (1, {"precision": "bf16"}),
    "stage 2, fp16": (2, {"precision": "fp16"}),
    "stage 1, offload": (1, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "stage 2, offload from a device": (
        2,
        {"precision": "bf16", "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
    ),
    "stage 1, fp32, offload from a device": (1, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    "stage 2, disk": (2, {"precision": "bf16", "zero_optimization": {"offload_optimizer": {"device": "nvme"}}}),
}


def placed(place: str, folder: Path | None = None, **more: Any) -> zerorun.Engine:
    """``folder``: for states on a disk."""
    stage, changes = PLACES[place]
    if folder is not None and "disk" in place:
        more = {"zero_optimization": {"offload_optimizer": {"nvme_path": str(folder / "states")}}, **more}
    with simulated_device() if place.endswith("from a device") else nullcontext():
        return engine_of(layers(), stage, **merged(changes, more))


def written(place: str, after: int, write: Callable[[torch.Tensor], None], folder: Path) -> list[Any]:
    """Errors of a step and a save after a write to the last weight; and whether training goes on after a block."""
    engine = placed(place, folder)
    for step in range(after):
        train(engine, step)
    weight = engine.module[2].weight
    with torch.no_grad():
        write(weight)
    found: list[Any] = [attempt(lambda: engine.save_checkpoint(folder)), attempt(lambda: train(engine, 0))]
    with torch.no_grad(), zerorun.zero.GatheredParameters(weight, modifier_rank=0):
        weight.fill_(0.5)
    train(engine, 1)
    found.append(float(engine.state_dict()["2.weight"].float().mean()))
    engine.save_checkpoint(folder)
    engine.destroy()
    return found


def fill(weight: torch.Tensor) -> None:
    weight.fill_(7.0)


def clamp(weight: torch.Tensor) -> None:
    weight.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("place", "after", "write"),
    [
        *((place, 1, fill) for place in PLACES),
        ("stage 1", 1, clamp),  # the clipping of Wasserstein GANs
        ("stage 1", LOOKING_STEPS + 2, fill),  # torch counts it, and so it is still seen
    ],
)
def test_a_write_that_a_master_does_not_know_of_is_an_error(
    place: str, after: int, write: Callable[[torch.Tensor], None], tmp_path: Path
) -> None:
    """On all ranks, though one alone updates the weight: the next step brought the old values back, without a word."""
    for save, step, mean in run_ranks(2, written, place, after, write, tmp_path):
        assert save[0] == "CheckpointError" and step[0] == "ReleasedParameterError"
        for _, text in (save, step):
            assert "parameters were written to in place" in text and "Remedy: write in a block" in text
        assert mean == pytest.approx(0.5, abs=0.1)


def clipped(stage: int | None) -> Any:
    """The losses of a loop that clips weights after each step; None: in plain PyTorch, with the batches of both ranks."""
    model = layers()
    engine = None if stage is None else engine_of(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), **make_config(optimizer="SGD")["optimizer"]["params"])
    losses = []
    for step in range(STEPS):
        if engine is not None:
            losses.append(train(engine, step))
        else:
            loss = model(torch.cat([batch(rank, step) for rank in range(2)])).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for param in model.parameters():
            param.data.clamp_(-0.1, 0.1)
    if engine is not None:
        engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_writes_to_weights_that_are_their_own_masters_count(stage: int) -> None:
    both = run_ranks(2, clipped, stage)
    assert [sum(losses) / 2 for losses in zip(*both, strict=True)] == pytest.approx(clipped(None), abs=1e-6)


def written_in_the_mode(place: str, folder: Path) -> list[str]:
    stage, changes = PLACES[place]
    engine = initialize_as_deepspeed(model=layers(), config=make_config(stage, optimizer="SGD", **changes))[0]
    engine.module[0].weight.data.fill_(7.0)
    train(engine, 0)
    told = [message for message in log._warned if "written to in place" in message]
    dropped = bool((engine.state_dict()["0.weight"] < 1).all())
    engine.save_checkpoint(str(folder))
    engine.destroy()
    return told if dropped else ["kept"]


def test_in_the_mode_it_is_a_warning(tmp_path: Path) -> None:
    """There the step drops it as in DeepSpeed. Each rank tells of what it updates."""
    told = run_ranks(2, written_in_the_mode, "stage 0", tmp_path)
    assert all(len(each) == 1 and "'0.weight'" in each[0] for each in told)


# -- masks ---------------------------------------------------------------------------------------------------------------


def prune_two(model: nn.Module) -> None:
    """Leave out a third of the first layer, and then a third of what both have."""
    prune.l1_unstructured(model[0], "weight", 0.3)
    prune.global_unstructured([(model[0], "weight"), (model[2], "weight")], pruning_method=prune.L1Unstructured, amount=0.3)


def pruned(stage: int | None) -> tuple[list[str], Any]:
    """What pruning outside of a block says at stage 3; the losses of training on, and the masks."""
    model, said = layers(), []
    if stage is None:
        sgd = torch.optim.SGD(model.parameters(), **make_config(optimizer="SGD")["optimizer"]["params"])
        prune_two(model)
        losses = []
        for step in range(STEPS):
            sgd.zero_grad()
            each = [model(batch(rank, step)).square().mean() for rank in range(2)]
            (sum(each) / 2).backward()
            sgd.step()
            losses.append([loss.item() for loss in each])
        return [], (losses, [mask.tolist() for mask in model.buffers()])
    engine = engine_of(model, stage)
    if stage == 3:
        said = [" ".join(attempt(lambda: prune_two(model))), *(name for name, _ in model.named_parameters())]
        with zerorun.zero.GatheredParameters(list(model.parameters())):
            prune_two(model)
    else:
        prune_two(model)
    losses = [train(engine, step) for step in range(STEPS)]
    return said, (losses, [mask.tolist() for mask in model.buffers()])


@pytest.mark.parametrize("stage", [2, 3])
def test_masks_are_made_from_values(stage: int) -> None:
    _, (plain, masks) = pruned(None)
    for rank, (said, (losses, found)) in enumerate(run_ranks(2, pruned, stage)):
        assert found == masks
        assert losses == pytest.approx([both[rank] for both in plain], rel=1e-6)
        if stage == 3:
            assert said[0].startswith("ReleasedParameterError parameter '0.weight' is pruned"), said
            assert sorted(said[1:]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
