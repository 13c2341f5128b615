"""Copies in memory: whole on two hosts or not there, and loaded bit for bit, with or without the host that made them.

Ranks of one machine stand for hosts: each has a folder of its own, as the supervisors of several hosts would make them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from covering import by_day
from harness import run_ranks
from torch import nn

import zerorun
from zerorun.checkpoint import memory_copies
from zerorun.checkpoint.kept_parts import BLOCK_BYTES, records_in
from zerorun.checkpoint.memory_copies import MemoryCopies, partners
from zerorun.distributed.wire import decode
from zerorun.errors import DoesNotFitError
from zerorun.launcher import copy_keeper

WIDTH = 24


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([0], [0]),
        ([0, 0, 0], [0, 1, 2]),
        ([0, 1], [1, 0]),
        ([0, 0, 2, 2], [2, 3, 0, 1]),
        ([0, 0, 2, 2, 4], [2, 3, 4, 4, 0]),  # hosts with fewer ranks take more
        ([0, 1, 2], [1, 2, 0]),
    ],
)
def test_each_rank_has_a_partner_on_another_host(places: list[int], expected: list[int]) -> None:
    assert partners(places) == expected


def own_rank() -> int:
    return int(os.environ["RANK"])


def model_of(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 37), nn.Dropout(0.1), nn.ReLU(), nn.Linear(37, width))


def make(
    folder: Path, stage: int, seed: int, width: int = WIDTH, number: int | None = 0, **checkpoint: Any
) -> zerorun.Engine:
    """The engine ``number`` of a start, or the next one, on a rank whose host keeps copies in ``folder``."""
    if number is not None:
        copy_keeper.engine_folders = copy_keeper.EngineFolders(number)
    rank = own_rank()
    own = folder / f"host{rank}"
    own.mkdir(parents=True, exist_ok=True)
    os.environ["ZERORUN_KEEPER"] = str(own)
    torch.manual_seed(seed + rank)
    model = model_of(width)
    nn.init.ones_(model[0].bias).requires_grad_(False)  # copies have the checksum of what is frozen
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
        "checkpoint": {"in_memory": {"every_steps": 1}, **checkpoint},
    }
    return zerorun.initialize(model, config)


def train(engine: zerorun.Engine, steps: int, width: int = WIDTH) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.randn(2, width)).float().square().mean())
        engine.step()


def digest(engine: zerorun.Engine) -> str:
    """Of weights, masters, states, schedule and the next random number."""
    found = hashlib.sha256(repr((engine.global_steps, engine.get_lr())).encode())
    inventory = engine.checkpointer.inventory
    for part in [*inventory.weights(), *inventory.optimizer_state()[0]]:
        found.update(part.tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def kept(folder: str) -> dict[int, list[int]]:
    """Rank -> steps of what there is of it on this rank's host."""
    found: dict[int, list[int]] = {}
    for _, record in records_in(Path(folder) / f"host{own_rank()}" / "0"):
        found.setdefault(record.rank, []).append(record.step)
    return {rank: sorted(steps) for rank, steps in sorted(found.items())}


def interrupted(folder: str, stage: int, lost: int) -> None:
    """Five steps and three are eight, also if the host of rank ``lost`` has lost its memory in between."""
    engine = make(Path(folder) / "whole", stage, seed=3)
    train(engine, 8)
    expected = digest(engine)
    engine.destroy()
    engine = make(Path(folder), stage, seed=3)
    train(engine, 5)
    engine.destroy()
    torch.distributed.barrier()
    if own_rank() == lost:
        shutil.rmtree(Path(folder) / f"host{own_rank()}")
    torch.distributed.barrier()
    engine = make(Path(folder), stage, seed=99)
    assert engine.global_steps == 5
    train(engine, 3)
    assert digest(engine) == expected
    engine.destroy()


@pytest.mark.each_value
@pytest.mark.parametrize("lost", by_day((-1, 0, 2), -1, 0))
@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 0, 3))
def test_goes_on_bit_for_bit(stage: int, lost: int, tmp_path: Path) -> None:
    run_ranks(3, interrupted, str(tmp_path), stage, lost)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(37))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.running_mean.lerp_(values.detach().float().mean(0), 0.1)
        return values - self.running_mean.to(values.dtype)


def with_statistics(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 37), Centred(), nn.ReLU(), nn.Linear(37, width))


def statistics_interrupted(folder: str, lost: int) -> None:
    """Buffers that differ between ranks come back to each, also if the host of rank ``lost`` has lost its memory."""
    with patch.object(sys.modules[__name__], "model_of", with_statistics):
        engine = make(Path(folder), 3, seed=3)
        train(engine, 5)
        expected = engine.module[1].running_mean.clone()
        engine.destroy()
        torch.distributed.barrier()
        if own_rank() == lost:
            shutil.rmtree(Path(folder) / f"host{own_rank()}")
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, expected.tolist())
        assert found[0] != found[1] != found[2]
        engine = make(Path(folder), 3, seed=99)
        assert engine.global_steps == 5
        assert torch.equal(engine.module[1].running_mean, expected)
        engine.destroy()


@pytest.mark.parametrize("lost", (-1, 1))
def test_buffers_of_each_rank_come_back(lost: int, tmp_path: Path) -> None:
    run_ranks(3, statistics_interrupted, str(tmp_path), lost)


def with_a_teacher(width: int) -> nn.Sequential:
    frozen = [nn.Linear(37, 37, bias=False).requires_grad_(False) for _ in range(2)]
    nn.init.eye_(frozen[1].weight)
    return nn.Sequential(nn.Linear(width, 37), *frozen, nn.ReLU(), nn.Linear(37, width))


def teacher_interrupted(folder: str, stage: int, hosts_lost: list[int]) -> None:
    """What is frozen and changed by the script comes back, also from the copy that a start makes of what it has loaded."""

    def train_and_average(steps: int) -> None:
        for _ in range(steps):
            engine.backward(engine(torch.randn(2, WIDTH)).float().square().mean())
            with torch.no_grad(), zerorun.zero.GatheredParameters(list(engine.module[1].parameters()), modifier_rank=0):
                engine.module[1].weight.lerp_(torch.eye(37).bfloat16(), 0.25)
            engine.step()

    with patch.object(sys.modules[__name__], "model_of", with_a_teacher):
        engine = make(Path(folder) / "whole", stage, seed=3)
        train_and_average(8)
        expected = digest(engine)
        engine.destroy()
        engine = make(Path(folder), stage, seed=3)
        train_and_average(5)
        engine.memory_copies.settle()
        kept_here = [record for _, record in records_in(Path(folder) / f"host{own_rank()}" / "0")]
        named = {part.name for record in kept_here for part in decode(record.layout).parts}
        assert "2.weight" not in named  # of what does not change there are checksums
        for away in hosts_lost:
            engine.destroy()
            torch.distributed.barrier()
            if own_rank() == away:
                shutil.rmtree(Path(folder) / f"host{own_rank()}")
            torch.distributed.barrier()
            engine = make(Path(folder), stage, seed=99)
            assert engine.global_steps == 5
        train_and_average(3)
        assert digest(engine) == expected
        engine.destroy()


@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 0, 3))
def test_a_teacher_that_follows_comes_back(stage: int, tmp_path: Path) -> None:
    run_ranks(3, teacher_interrupted, str(tmp_path), stage, [-1, 1, 0])


def host_by_host(folder: str) -> None:
    """Each start finds the memory of another host lost, and ends before it has made a step."""
    engine = make(Path(folder) / "whole", 3, seed=3)
    train(engine, 7)
    expected = digest(engine)
    engine.destroy()
    engine = make(Path(folder), 3, seed=3)
    train(engine, 5)
    engine.destroy()
    size = torch.distributed.get_world_size()
    for lost in range(size):
        torch.distributed.barrier()
        if own_rank() == lost:
            shutil.rmtree(Path(folder) / f"host{own_rank()}")
        torch.distributed.barrier()
        engine = make(Path(folder), 3, seed=99)
        assert engine.global_steps == 5
        if lost < size - 1:
            engine.destroy()
            torch.distributed.barrier()
            assert kept(folder) == {rank: [5] for rank in sorted((own_rank(), (own_rank() - 1) % size))}
            files = list((Path(folder) / f"host{own_rank()}" / "0").iterdir())
            assert len(files) == 4, files  # parts and records of two ranks: nothing of the start before
    train(engine, 2)
    assert digest(engine) == expected
    engine.destroy()


def test_hosts_are_lost_one_after_the_other(tmp_path: Path) -> None:
    run_ranks(3, host_by_host, str(tmp_path))


def of_two_engines(folder: str) -> None:
    """Two that train in turns, of one shape, and one after them: the next start has each of the two as it was."""
    engines = [make(Path(folder), 3, seed=number, number=number) for number in range(2)]
    train(engines[0], 3)
    train(engines[1], 2)
    train(engines[0], 1)
    expected = []
    for engine in engines:
        expected.append((engine.global_steps, digest(engine)))
        engine.destroy()
    third = make(Path(folder), 3, seed=7, number=2)
    assert third.global_steps == 0
    third.destroy()
    found = []
    for number in range(2):
        engine = make(Path(folder), 3, seed=99, number=number)
        found.append((engine.global_steps, digest(engine)))
        engine.destroy()
    assert found == expected
    assert [steps for steps, _ in found] == [4, 2]


def test_engines_of_one_job_do_not_take_each_other_s_copies(tmp_path: Path) -> None:
    run_ranks(2, of_two_engines, str(tmp_path))


def in_turns(folder: str, passes: int, ahead: tuple[int, int]) -> tuple[list[int], bool, int]:
    """The steps that two engines go on from after ``passes`` and ``ahead`` steps of each more, and the warnings about it.

    And whether they have what they had at the end of the last pass: one learns from the other in the same loop.
    """

    def start(place: Path) -> list[zerorun.Engine]:
        copy_keeper.engine_folders = copy_keeper.EngineFolders()
        return [make(place, 3, seed=number, number=None) for number in range(2)]

    def step(first: zerorun.Engine, engine: zerorun.Engine) -> None:
        batch = torch.randn(2, WIDTH)
        engine.backward((engine(batch).float() - first(batch).float().detach()).square().mean() + engine(batch).mean())
        engine.step()

    engines, own = start(Path(folder)), f"host{own_rank()}"
    for _ in range(passes):
        for engine in engines:
            step(engines[0], engine)
    expected = [digest(engine) for engine in engines]
    for engine, steps in zip(engines, ahead, strict=True):
        for _ in range(steps):
            step(engines[0], engine)
    for engine in engines:
        engine.memory_copies.wait()  # type: ignore[union-attr]
    torch.distributed.barrier()
    shutil.copytree(Path(folder, own), Path(folder, "crashed", own))
    for engine in engines:
        engine.destroy()
    with patch.object(memory_copies.logger, "warning") as warning:
        engines = start(Path(folder, "crashed"))
    found = [engine.global_steps for engine in engines], [digest(engine) for engine in engines] == expected
    for engine in engines:
        engine.destroy()
    return *found, sum("in the midst" in call.args[0] for call in warning.call_args_list)


@pytest.mark.parametrize(
    ("passes", "ahead", "steps", "same", "told"),
    [
        (3, (0, 0), [3, 3], True, 0),
        (3, (1, 0), [3, 3], True, 0),
        (3, (1, 1), [4, 4], False, 0),
        (3, (0, 1), [3, 3], True, 0),  # the second makes a step more than once in a pass
        (3, (2, 0), [5, 3], False, 2),  # the end of the pass is no longer in memory
        (0, (1, 0), [1, 0], False, 1),  # there is no copy of a whole pass yet
    ],
)
def test_engines_that_take_turns_go_on_from_one_pass(
    passes: int, ahead: tuple[int, int], steps: list[int], same: bool, told: int, tmp_path: Path
) -> None:
    first, second = run_ranks(2, in_turns, str(tmp_path), passes, ahead)
    assert first == (steps, same, told)
    assert second == (steps, same, 0)


def kept_until(folder: str) -> bool:
    """Whether an engine that steps waits for the copy of another one first: then it forgets its own of the pass before."""
    engines = [make(Path(folder), 0, seed=number, number=number) for number in range(2)]
    for engine in engines:
        train(engine, 1)
    copies = engines[1].memory_copies
    with patch.object(type(copies), "wait", autospec=True, side_effect=type(copies).wait) as waited:
        train(engines[0], 1)
    for engine in engines:
        engine.destroy()
    return any(call.args[0] is copies for call in waited.call_args_list)


def test_a_copy_is_kept_until_those_of_its_pass_are_whole(tmp_path: Path) -> None:
    assert run_ranks(1, kept_until, str(tmp_path)) == [True]


def of_a_program(folder: str) -> None:
    """What a rank starts is another run: it may not find the copies of this one. Nor may a forked process."""
    os.environ["ZERORUN_KEEPER"] = folder
    zerorun.init_distributed()
    assert "ZERORUN_KEEPER" not in os.environ and copy_keeper.own_folder() == folder
    if (child := os.fork()) == 0:
        os._exit(int(copy_keeper.own_folder() is not None))
    assert os.waitpid(child, 0)[1] == 0
    engine = make(Path(folder), 0, seed=3)
    assert "ZERORUN_KEEPER" not in os.environ
    train(engine, 1)
    engine.destroy()
    assert kept(folder) == {0: [1]}


def test_a_program_that_a_rank_starts_does_not_take_its_copies(tmp_path: Path) -> None:
    run_ranks(1, of_a_program, str(tmp_path))


def failing(folder: str, point: str) -> dict[int, list[int]]:
    """The copy of step 5 fails on rank 1 at ``point``. What there is after it; then training goes on."""
    engine = make(Path(folder), 3, seed=3)
    train(engine, 4)
    copies = engine.memory_copies
    assert copies is not None
    copies.settle()

    def check(reached: str) -> None:
        if reached == point and own_rank() == 1:
            raise OSError(28, "No space left on device", str(folder))

    copies.checkpointer.check_point = check
    train(engine, 1)
    copies.settle()
    found = kept(folder)
    copies.checkpointer.check_point = lambda reached: None
    own, aside = f"host{own_rank()}", Path(folder) / "aside"  # a start writes where it finds copies
    shutil.copytree(Path(folder) / own, aside / own)
    torch.distributed.barrier()
    again = make(aside, 3, seed=99)
    assert again.global_steps == (4 if point == "write" else 5)  # what is whole is loaded, although it was not confirmed
    again.destroy()
    train(engine, 1)
    engine.destroy()
    again = make(Path(folder), 3, seed=99)
    assert again.global_steps == 6
    again.destroy()
    return found


@pytest.mark.parametrize(
    ("point", "expected"),
    [("write", [{0: [4, 5], 1: [4]}, {0: [4, 5], 1: [4]}]), ("record", [{0: [4, 5], 1: [4, 5]}, {0: [4], 1: [4]}])],
)
def test_a_copy_that_fails_leaves_the_one_before_and_training_goes_on(
    point: str, expected: list[dict[int, list[int]]], tmp_path: Path
) -> None:
    assert run_ranks(2, failing, str(tmp_path), point) == expected


def leave(folder: str) -> None:
    engine = make(Path(folder), 3, seed=3)
    train(engine, 4)
    engine.destroy()


def shrunk(folder: str) -> tuple[int, float]:
    engine = make(Path(folder), 3, seed=99)
    total = sum(float(value.double().abs().sum()) for value in engine.state_dict().values())
    step = engine.global_steps
    engine.destroy()
    return step, total


def test_fewer_ranks_go_on_from_what_is_left(tmp_path: Path) -> None:
    """The third host is lost, and nobody takes its place: its files come from the first one."""
    run_ranks(3, leave, str(tmp_path))
    whole = run_ranks(3, shrunk, str(tmp_path))
    shutil.rmtree(tmp_path / "host2")
    assert run_ranks(2, shrunk, str(tmp_path)) == whole[:2]
    assert whole[0][0] == 4


def beside_a_disk(folder: str) -> tuple[int, int]:
    """The step that a start begins at, if the checkpoint on disk is older than the copy, and if it is newer."""
    disk = {"dir": f"{folder}/disk", "auto_resume": True, "every_steps": 3, "keep_last": 1}
    engine = make(Path(folder), 3, seed=3, **disk)
    train(engine, 4)
    engine.destroy()
    found = []
    for steps in (2, 0):
        engine = make(Path(folder), 3, seed=99, **disk)
        found.append(engine.global_steps)
        train(engine, steps)
        engine.destroy()
        torch.distributed.barrier()
        if steps:  # the copies of steps 5 and 6 are gone, and there is a checkpoint of step 6
            shutil.rmtree(Path(folder) / f"host{own_rank()}")
        torch.distributed.barrier()
    return found[0], found[1]


def test_the_newer_of_memory_and_disk_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(2, beside_a_disk, str(tmp_path)) == [(4, 6)] * 2


def given_up(folder: str) -> tuple[list[int], bool]:
    """Where starts begin after one that has gone back from step 6 to step 3, and whether each has its state."""
    engine = make(Path(folder), 3, seed=3)
    train(engine, 3)
    engine.save_checkpoint(f"{folder}/disk")
    train(engine, 3)
    engine.load_checkpoint(f"{folder}/disk")
    begun, same = [], True
    for steps in (0, 1, 0):
        train(engine, steps)
        before = digest(engine)
        engine.destroy()
        engine = make(Path(folder), 3, seed=99)
        begun.append(engine.global_steps)
        same = same and digest(engine) == before
    engine.destroy()
    return begun, same


def test_steps_that_the_script_has_given_up_do_not_come_back(tmp_path: Path) -> None:
    """Their copies have more steps than that which is right, or as many."""
    assert run_ranks(2, given_up, str(tmp_path)) == [([3, 4, 4], True)] * 2


def given_up_with_a_disk(folder: str) -> list[int]:
    """Where starts begin, with a checkpoint of step 6 that was given up for one of step 3: with copies, and without."""
    disk = {"dir": f"{folder}/disk", "auto_resume": True, "every_steps": 3}
    engine, found = make(Path(folder), 3, seed=3, **disk), []
    train(engine, 7)
    engine.load_checkpoint(f"{folder}/disk", "global_step3")
    train(engine, 1)
    for _ in range(2):
        engine.destroy()
        torch.distributed.barrier()
        engine = make(Path(folder), 3, seed=99, **disk)
        found.append(engine.global_steps)
        assert engine.memory_copies is not None
        engine.memory_copies.wait()  # it copies what it has loaded
        torch.distributed.barrier()
        shutil.rmtree(Path(folder) / f"host{own_rank()}")
    engine.destroy()
    return found


def test_a_checkpoint_that_was_given_up_does_not_come_before_a_copy(tmp_path: Path) -> None:
    """It has more steps than the copy. Where there is none, it is the last that is known."""
    assert run_ranks(2, given_up_with_a_disk, str(tmp_path)) == [[4, 6]] * 2


def damaged_on_disk(folder: str) -> tuple[int, int]:
    """Where a start begins if the newest checkpoint, of step 6, is damaged: with a copy of step 4, and without it."""
    disk = {"dir": f"{folder}/disk", "auto_resume": True, "in_memory": {"every_steps": 4}}
    engine = make(Path(folder), 3, seed=3, **disk)
    for steps in (2, 4):
        train(engine, steps)
        engine.save_checkpoint(f"{folder}/disk")
    engine.destroy()
    if own_rank() == 0:
        damaged = next(Path(folder, "disk", "global_step6").glob("*.safetensors"))
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 255
        damaged.write_bytes(content)
    torch.distributed.barrier()
    found = []
    for _ in range(2):
        engine = make(Path(folder), 3, seed=99, **disk)
        found.append(engine.global_steps)
        engine.destroy()
        torch.distributed.barrier()
        shutil.rmtree(Path(folder) / f"host{own_rank()}")
    return found[0], found[1]


def test_a_copy_in_memory_comes_before_an_older_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(2, damaged_on_disk, str(tmp_path)) == [(4, 2)] * 2


def room_of_a_start_before(folder: str) -> int:
    """The step at which a start begins that finds the host's memory full: with the copies of the one before."""
    engine = make(Path(folder), 3, seed=3)
    train(engine, 2)
    engine.destroy()
    with patch("shutil.disk_usage", return_value=SimpleNamespace(free=1024)):
        engine = make(Path(folder), 3, seed=99)
    begun = engine.global_steps
    engine.destroy()
    return begun


def test_copies_of_a_start_before_make_room(tmp_path: Path) -> None:
    assert run_ranks(2, room_of_a_start_before, str(tmp_path)) == [2] * 2


def too_large(folder: str) -> str:
    """Why copies do not fit, where the host has a kilobyte for them."""
    with patch("shutil.disk_usage", return_value=SimpleNamespace(free=1024)), pytest.raises(DoesNotFitError) as caught:
        make(Path(folder), 3, seed=3)
    return str(caught.value)


def test_copies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for text in run_ranks(2, too_large, str(tmp_path)):
        assert "checkpoint.in_memory.every_steps = 1: the copies of the" in text and "which has 1.0 KiB free" in text


def measured_copies(folder: str) -> int:
    """The bytes of this rank's host after two steps: its own, and those of the other rank."""
    engine = make(Path(folder), 3, seed=3, width=4096)
    train(engine, 2, width=4096)
    engine.destroy()
    return sum(path.stat().st_size for path in Path(folder).glob(f"host{own_rank()}/*/*.parts"))


def test_the_estimate_knows_the_bytes(tmp_path: Path) -> None:
    """But for what fills the last block of each of the four files of a host."""
    found = run_ranks(2, measured_copies, str(tmp_path))
    model = model_of(4096)
    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2}
    config |= {"optimizer": {"type": "AdamW"}, "checkpoint": {"in_memory": {"every_steps": 1}}}
    estimate = zerorun.estimate_memory(model, config, 2, ranks_per_node=1, device="cpu")
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert estimate.copied_bytes == pytest.approx(4 * 12 * numel / 2, rel=0.05)  # flat buffers are padded
    assert 0.95 * estimate.copied_bytes < min(found) <= max(found) < estimate.copied_bytes + 4 * BLOCK_BYTES
    assert "copies in host memory" in str(estimate)
    without = {key: value for key, value in config.items() if key != "checkpoint"}
    assert zerorun.estimate_memory(model, without, 2, ranks_per_node=1, device="cpu").copied_bytes == 0


def damaged_on_the_way(folder: str) -> dict[int, list[int]]:
    """A byte is another one when rank 1 sends it. What is there afterwards."""
    engine = make(Path(folder), 3, seed=3)
    copies, checked = engine.memory_copies, MemoryCopies._checked
    assert copies is not None
    train(engine, 1)
    copies.settle()

    def spoiled(copies: MemoryCopies, captured: Any) -> tuple[bytes, torch.Tensor]:
        record, memory = checked(copies, captured)
        memory = memory.clone()
        memory[-1] ^= 1 if own_rank() == 1 else 0
        return record, memory

    with patch.object(MemoryCopies, "_checked", spoiled):
        train(engine, 1)
        copies.settle()
    found = kept(folder)
    engine.destroy()
    return found


def test_what_comes_is_compared(tmp_path: Path) -> None:
    assert run_ranks(2, damaged_on_the_way, str(tmp_path)) == [{0: [1, 2], 1: [1]}, {0: [1, 2], 1: [1, 2]}]


def damaged_in_memory(folder: str, hosts: int) -> tuple[int, bool]:
    """(step after a start that finds a byte changed in the newest parts of rank 1 on so many hosts, whether it goes on
    bit for bit)."""
    engine = make(Path(folder), 3, seed=3)
    train(engine, 3)
    assert engine.memory_copies is not None
    engine.memory_copies.settle()
    expected = digest(engine)
    for path, record in records_in(Path(folder) / f"host{own_rank()}" / "0"):
        if record.step == 3 and record.rank == 1 and own_rank() > 1 - hosts:
            changed = bytearray(path.read_bytes())
            changed[0] ^= 1
            path.write_bytes(changed)
    engine.destroy()
    torch.distributed.barrier()
    engine = make(Path(folder), 3, seed=99)
    found = engine.global_steps, digest(engine) == expected
    engine.destroy()
    return found


@pytest.mark.parametrize(("hosts", "expected"), [(1, (3, True)), (2, (0, False))])
def test_parts_that_are_damaged_on_one_host_come_from_the_other(
    hosts: int, expected: tuple[int, bool], tmp_path: Path
) -> None:
    assert run_ranks(2, damaged_in_memory, str(tmp_path), hosts) == [expected] * 2


def ten_steps(folder: str) -> int:
    """A start after ten steps, where the host of rank 0 still has the copy of step 9."""
    engine, host = make(Path(folder), 3, seed=3), Path(folder) / "host0" / "0"
    train(engine, 9)
    assert engine.memory_copies is not None
    engine.memory_copies.settle()
    if own_rank() == 0:
        old = {path.name: path.read_bytes() for path, record in records_in(host) if record.step == 9}
        assert old
        old |= {f"{Path(name).stem}.record": (host / f"{Path(name).stem}.record").read_bytes() for name in old}
    train(engine, 1)
    engine.destroy()
    if own_rank() == 0:
        for name, content in old.items():
            (host / name).write_bytes(content)
    torch.distributed.barrier()
    engine = make(Path(folder), 3, seed=99)
    step = engine.global_steps
    engine.destroy()
    return step


def test_the_copy_of_the_most_steps_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(2, ten_steps, str(tmp_path)) == [10, 10]
