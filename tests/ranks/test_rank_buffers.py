"""Buffers in checkpoints: each rank's own come back, and one that no file can hold fails all ranks alike."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from training import make_config

import zerorun
from zerorun.errors import CheckpointError


class Centred(nn.Module):
    """Subtracts a running mean of what this rank has seen, so that the mean decides the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("table", torch.arange(6.0))  # the same on all ranks
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(values.mean(0), 0.1)
        return self.out(self.norm(values - self.mean) * self.table)


def make(seed: int, stage: int, build: type[nn.Module] = Centred) -> zerorun.Engine:
    torch.manual_seed(seed)
    return zerorun.initialize(build(), make_config(stage))


def train(engine: zerorun.Engine, first: int, count: int) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(4, 6, generator=generator)).square().mean())
        engine.step()


def save_and_go_on(folder: str, stage: int, asynchronous: bool) -> tuple[dict[str, torch.Tensor], ...]:
    """The rank's weights and buffers: at the save, after the uninterrupted run, and after the one that was loaded."""
    engine = make(0, stage)
    train(engine, 0, 3)
    engine.save_checkpoint(folder, asynchronous=asynchronous)
    at_save = engine.state_dict()
    train(engine, 3, 3)
    expected = engine.state_dict()
    engine.destroy()
    engine = make(9, stage)
    engine.load_checkpoint(folder)
    train(engine, 3, 3)
    found = engine.state_dict()
    engine.destroy()
    return at_save, expected, found


def load_elsewhere(folder: str) -> dict[str, torch.Tensor]:
    engine = make(9, 1)
    engine.load_checkpoint(folder)
    found = engine.state_dict()
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "asynchronous"), [(1, True), (3, False)])
def test_each_rank_gets_its_own_buffers_back(stage: int, asynchronous: bool, tmp_path: Path) -> None:
    results = run_ranks(2, save_and_go_on, str(tmp_path), stage, asynchronous)
    for _, expected, found in results:
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name
    first, second = (at_save for at_save, _, _ in results)
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])
    kept = torch.tensor([path.name.startswith("buffer-") for path in tmp_path.glob("*/*.safetensors")])
    assert kept.sum() == 1  # of what differs only
    for found in run_ranks(1, load_elsewhere, str(tmp_path)):
        assert all(torch.equal(found[name], value) for name, value in first.items())
    for found in run_ranks(3, load_elsewhere, str(tmp_path)):
        assert all(torch.equal(found[name], value) for name, value in first.items())


class Unsavable(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))


def fail_to_save(folder: str) -> list[str]:
    errors: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerorun").addHandler(handler)
    engine = make(0, 1, Unsavable)
    logging.getLogger("zerorun").removeHandler(handler)
    warned = [error for error in errors if error.startswith("this model cannot be saved: tensor 'phases' has dtype")]
    assert len(warned) == (dist.get_rank() == 0)
    errors.clear()
    for asynchronous in (False, True):
        train(engine, 0, 1)
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder, asynchronous=asynchronous)
            engine.wait_for_checkpoint()
        errors.append(str(caught.value))
    train(engine, 0, 1)
    engine.destroy()
    return errors


def test_a_buffer_that_no_file_can_hold_fails_all_ranks(tmp_path: Path) -> None:
    for errors in run_ranks(2, fail_to_save, str(tmp_path)):
        for error in errors:
            assert error.startswith("rank 0: tensor 'phases' has dtype torch.complex128")
            assert "Remedy: keep it in another dtype" in error
    assert not list(tmp_path.glob("*"))


def two_stages(folder: str) -> list[str]:
    """Each stage has a buffer of its own, and no rank another value of it."""
    layers = [Unlike(index) for index in range(2)]
    config = make_config(1, pipeline={"stages": 2})
    module = zerorun.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    engine = zerorun.initialize(module, config)
    path = engine.save_checkpoint(folder)
    engine.destroy()
    dist.barrier()
    return sorted(file.name for file in path.glob("buffer*"))


class Unlike(nn.Linear):
    def __init__(self, index: int) -> None:
        super().__init__(6, 6)
        self.register_buffer(f"number{index}", torch.tensor(float(index)))


def test_buffers_are_compared_with_those_of_its_own_stage(tmp_path: Path) -> None:
    assert run_ranks(4, two_stages, str(tmp_path)) == [[]] * 4
