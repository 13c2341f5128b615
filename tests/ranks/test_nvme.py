"""Masters and moments on a disk: what is where, disks that are too small, and disks that fill up during training."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import run_ranks
from small_disk import run_on_small_disk
from test_offload import PLACES, SMALL, ledgers
from torch import nn
from training import make_config, make_engine

import zerorun
from zerorun.errors import ConfigError, SwapError
from zerorun.ops.aio import AsyncFile
from zerorun.ops.single_pass import SinglePassOptimizer
from zerorun.zero import disks
from zerorun.zero.offload import nvme

SETUP = """
import os, sys, torch, zerorun
from pathlib import Path
from torch import nn
from zerorun.errors import CheckpointError, SwapError
from zerorun.ops.aio import AsyncFile

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

config = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "states"}},
}

def train(engine):
    engine.backward(engine(torch.ones(1, 256)).square().mean())
    engine.step()
"""

TOO_SMALL = (
    SETUP
    + """
module = model()
before = {name: value.clone() for name, value in module.state_dict().items()}
try:
    zerorun.initialize(module, config)
except SwapError as error:
    print(error)
assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
train(zerorun.initialize(module, config))
print(os.listdir("states"))
"""
)


@pytest.mark.nightly  # by day tests/unit/test_swap.py
def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """8 x 65,792 parameters with master and two moments are 6.02 MiB. The model can be used afterwards."""
    told, left = run_on_small_disk(TOO_SMALL, tmp_path, mebibytes=4).splitlines()
    assert "nvme_path = 'states': the disk is too small" in told
    assert "take 6.03 MiB" in told
    assert "4.00 MiB" in told
    assert "Remedy: nvme_path on a larger disk" in told
    assert left == "[]"


def make_on_disks(folder: str, free: int, together: bool, full: bool) -> str:
    """What is said of masters and moments in one folder and parameters in another; empty if there is room.

    ``free``: bytes of each disk. ``together``: both are on one. ``full``: nothing can be allocated in the end.
    """
    usage = shutil.disk_usage

    def of_disk(path: Path) -> Any:
        return SimpleNamespace(free=free) if str(path).startswith(folder) else usage(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme.shutil, "disk_usage", of_disk)
        if not together:
            patch.setattr(disks, "disk_of", hash)
        if full:

            def refuse(self: AsyncFile, nbytes: int) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(AsyncFile, "allocate", refuse)
        places = {key: {"device": "nvme", "nvme_path": f"{folder}/{key}"} for key in ("offload_optimizer", "offload_param")}
        config = make_config(3, precision="bf16", zero_optimization=places)
        torch.manual_seed(0)
        try:
            zerorun.initialize(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), config).destroy()
        except SwapError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("mebibytes", "together", "full"), [(6.5, True, False), (6.5, False, False), (7.5, True, False), (7.5, True, True)]
)
def test_two_folders_of_one_disk_share_its_room(mebibytes: float, together: bool, full: bool, tmp_path: Path) -> None:
    """Of 8 x 65,792 parameters masters and two moments take 6.02 MiB, and weights in bf16 one more."""
    free = int(mebibytes * 2**20)
    for told in run_ranks(2, make_on_disks, str(tmp_path), free, together, full):
        if together and (mebibytes < 7 or full):
            assert "the disk is too small" in told and "All ranks of this machine together take 7.0" in told, told
            assert "in all folders of this disk" in told and "Remedy: nvme_path on a larger disk" in told
        else:
            assert told == ""


FILLS_UP = (
    SETUP
    + """
AsyncFile.allocate = lambda self, nbytes: os.truncate(self._cached, nbytes)  # as file systems do that allocate late
engine = zerorun.initialize(model(), config)
engine.save_checkpoint("../checkpoints")
saved = engine.state_dict()
with open("filler", "wb", buffering=0) as filler:
    try:
        while True:
            filler.write(bytes(1 << 16))
    except OSError:
        pass
try:
    for _ in range(3):
        train(engine)
except SwapError as error:
    print(error)
try:
    engine.save_checkpoint("../checkpoints", tag="lost")
except CheckpointError as error:
    print("ENOSPC" in str(error), os.listdir("../checkpoints"))
config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
again = zerorun.initialize(model(), config)
again.load_checkpoint("../checkpoints")
assert all(torch.equal(value, saved[name]) for name, value in again.state_dict().items())
train(again)
os._exit(0)
"""
)


@pytest.mark.nightly  # by day tests/unit/test_swap.py
def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """The error comes with the next thing that needs the states, and the last checkpoint is as it was."""
    told, checkpoints = run_on_small_disk(FILLS_UP, tmp_path, mebibytes=8).splitlines()
    assert "No space left on device (ENOSPC) while writing unit" in told
    assert "Checkpoints are not touched" in told
    assert checkpoints.startswith("True")
    assert "'lost'" not in checkpoints


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 1), (2, 3)])
def test_bytes_in_memory_fall_by_what_is_on_the_disk(world: int, stage: int, precision: str) -> None:
    """But for three buffers of the largest unit's states."""
    places = [PLACES["optimizer"], PLACES["disk"], *([PLACES["all on disk"]] if stage == 3 else [])]
    for found in run_ranks(world, ledgers, places, stage, precision):
        host, *disk = found
        for ledger in disk:
            assert ledger["disk moments"] == host["host moments"]
            assert ledger["disk master"] == host["host moments"] // 2
            assert ledger["host gradients"] == host["host gradients"]
            assert "host master" not in ledger
            assert "host moments" not in ledger
            assert ledger["host staging"] % 3 == 0
            assert ledger["host staging"] // 3 < (ledger["disk moments"] + ledger["disk master"]) * 0.6
        if stage == 3:
            assert disk[1]["disk parameters"] + disk[1]["parameters"] == host["parameters"]


def refused(optimizer: str, **params: Any) -> str:
    config = make_config(2, zero_optimization=PLACES["disk"])
    config["optimizer"] = {"type": optimizer, "params": {"lr": 1e-3, **params}}
    with pytest.raises(ConfigError) as caught:
        make_engine(SMALL, config)
    return str(caught.value)


def test_optimizers_that_cannot_work_on_a_disk() -> None:
    for text in run_ranks(2, refused, "RAdam"):
        assert "zero_optimization.offload_optimizer.device" in text
        assert "RAdam as optimizer.type has no update that works unit by unit" in text
        assert "Name Adam, AdamW, AdamW8bit, AdamSAGE, Adagrad, Lion, Muon, SGD or Sophia" in text


def refused_for_a_keyword() -> str:
    return refused("AdamW", amsgrad=True, fused=True)


def test_the_keyword_that_is_in_the_way_of_a_disk_is_named() -> None:
    for text in run_ranks(2, refused_for_a_keyword):
        assert "AdamW as optimizer.type has none with amsgrad" in text and "Remove amsgrad from optimizer.params" in text


def with_idle_keywords() -> list[torch.Tensor]:
    """Weights after two steps, with keywords that ask for nothing and states on a disk."""
    config = make_config(2, zero_optimization=PLACES["disk"])
    params = {"lr": 1e-2, "amsgrad": False, "maximize": False, "foreach": None, "fused": True}
    config["optimizer"] = {"type": "AdamW", "params": params}
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 8)
    groups = [{"params": [model.weight], "lr_mult": 1.0}, {"params": [model.bias], "initial_lr": 1e-2}]
    engine = zerorun.initialize(model, config, model_parameters=groups)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    assert isinstance(engine.optimizer, SinglePassOptimizer)
    weights = list(engine.state_dict().values())
    engine.destroy()
    return weights


def test_keywords_that_ask_for_nothing_are_not_in_the_way() -> None:
    torch.manual_seed(3)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    for weights in run_ranks(2, with_idle_keywords):
        torch.testing.assert_close(weights, list(model.state_dict().values()), rtol=1e-5, atol=1e-6)


STEPS_BEFORE, STEPS_AFTER = 2, 3


def with_momentum_later(stage: int, folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Weights of an SGD on a disk that is given momentum after some steps, and what is in memory.

    The last step is that of another engine, which has no momentum in its configuration, after a checkpoint.
    """
    config = make_config(stage, zero_optimization=PLACES["disk"])
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.05}}
    engine = None
    for step, x in enumerate(inputs()):
        if step == STEPS_BEFORE + STEPS_AFTER - 1 and engine is not None:
            engine.save_checkpoint(folder)
            engine.destroy()
            engine = None
        if engine is None:
            torch.manual_seed(3 + step)
            engine = zerorun.initialize(torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 5)), config)
            if step:
                engine.load_checkpoint(folder)
        if step == STEPS_BEFORE:
            engine.optimizer.param_groups[0]["momentum"] = 0.9
        engine.backward(engine(x).square().mean())
        engine.step()
    assert engine is not None
    found = engine.state_dict(), engine.memory_report()
    engine.destroy()
    return found


def inputs() -> torch.Tensor:
    return torch.randn(STEPS_BEFORE + STEPS_AFTER, 2, 40, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("stage", [1, 3])
def test_momentum_that_is_set_later_is_in_memory(stage: int, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, x in enumerate(inputs()):
        if step == STEPS_BEFORE:
            optimizer.param_groups[0]["momentum"] = 0.9
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for weights, memory in run_ranks(2, with_momentum_later, stage, tmp_path):
        torch.testing.assert_close(weights, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
        assert memory["disk master"] and memory["host moments"] and "disk moments" not in memory
