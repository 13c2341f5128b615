"""What a load that fails leaves behind, and weights that a checkpoint leaves out: no mixture trains on without a word."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from torch import nn
from training import make_config

import zerorun
from zerorun.errors import CheckpointError, DamagedError, ModelError


class Layers(nn.Module):
    """A frozen layer, and two that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.base(values))))


class Wide(Layers):
    """The same with files of several blocks: damage in the last one is found only when the others have been read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 800), nn.Linear(800, 800)


def make(seed: int, config: dict[str, Any], build: Callable[[], nn.Module] = Layers, **given: Any) -> zerorun.Engine:
    torch.manual_seed(seed)
    return zerorun.initialize(build(), config, **given)


def train(engine: zerorun.Engine, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = engine(torch.randn(2, 6, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def spoil(path: Path, pattern: str) -> None:
    """Change one bit of the last of these files. All ranks must call it."""
    dist.barrier()
    if dist.get_rank() == 0:
        file = sorted(path.glob(pattern))[-1]
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    dist.barrier()


# -- half loaded -------------------------------------------------------------------------------------------------------


def fail_to_load(folder: str, stage: int, pattern: str) -> tuple[list[float], list[float]]:
    """(losses of the uninterrupted run, those after a load that failed and one that did not)."""
    config = make_config(stage)
    engine = make(0, config, Wide)
    train(engine, 0, 3)
    engine.save_checkpoint(folder, "whole")
    engine.save_checkpoint(folder, "damaged")
    expected = train(engine, 3, 3)
    engine.destroy()
    spoil(Path(folder, "damaged"), pattern)
    engine = make(5, config, Wide)
    with pytest.raises(DamagedError):
        engine.load_checkpoint(folder, "damaged")
    for refused in (
        lambda: train(engine, 3, 1),
        lambda: engine.save_checkpoint(folder, "mixture"),
        lambda: engine.export(Path(folder, "export")),
        lambda: engine.save_16bit_model(Path(folder, "whole weights")),
        lambda: train(engine, 3, 1),
    ):
        with pytest.raises(CheckpointError, match=r"damaged failed midway, in .* neither as it was"):
            refused()
    with pytest.raises(CheckpointError, match="no checkpoint 'nowhere'"):  # which mends nothing
        engine.load_checkpoint(folder, "nowhere")
    with pytest.raises(CheckpointError, match="failed midway"):
        train(engine, 3, 1)
    engine.load_checkpoint(folder, "whole")
    found = train(engine, 3, 3)
    engine.destroy()
    return expected, found


@pytest.mark.parametrize(("stage", "pattern"), [(1, "model-*"), (3, "optimizer.exp_avg-*"), (3, "model-*")])
def test_half_of_a_damaged_checkpoint_does_not_train_on(stage: int, pattern: str, tmp_path: Path) -> None:
    for expected, found in run_ranks(2, fail_to_load, str(tmp_path), stage, pattern):
        assert found == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "latest", "whole"]


def fail_and_destroy(folder: str) -> None:
    engine = make(0, make_config(1), Wide)
    engine.save_checkpoint(folder, "one")
    spoil(Path(folder, "one"), "model-*")
    with pytest.raises(DamagedError):
        engine.load_checkpoint(folder)
    engine.destroy()  # its error has been told


def test_an_engine_that_is_half_loaded_can_be_given_up(tmp_path: Path) -> None:
    run_ranks(2, fail_and_destroy, str(tmp_path))


def fail_to_resume(folder: str) -> None:
    engine = make(0, make_config(1), Wide)
    engine.save_checkpoint(folder, "one")
    engine.destroy()
    spoil(Path(folder, "one"), "model-*")
    model, config = Wide(), make_config(1, checkpoint={"dir": folder, "auto_resume": True})
    with pytest.raises(DamagedError):
        zerorun.initialize(model, config)
    with pytest.raises(ModelError, match=r"belongs to an engine already.* build the model anew"):
        zerorun.initialize(model, make_config(1))


def test_a_model_that_is_half_resumed_is_not_given_back(tmp_path: Path) -> None:
    """It would train on, as if nothing had been."""
    run_ranks(2, fail_to_resume, str(tmp_path))


def refuse_before(folder: str) -> tuple[list[float], list[float]]:
    """(losses without a load, those after loads that were refused before they changed anything)."""
    engine = make(0, make_config(1))
    train(engine, 0, 1)
    engine.save_checkpoint(folder, "adam")
    engine.destroy()
    engine = make(0, make_config(1, optimizer="SGD"))
    expected = train(engine, 0, 3)
    engine.destroy()
    engine = make(0, make_config(1, optimizer="SGD"))
    with pytest.raises(CheckpointError, match="was saved with the optimizer Adam"):
        engine.load_checkpoint(folder)
    found = train(engine, 0, 3)
    engine.destroy()
    return expected, found


def test_a_load_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    for expected, found in run_ranks(2, refuse_before, str(tmp_path)):
        assert found == expected


class Stubborn(torch.optim.lr_scheduler.LambdaLR):
    """A schedule that cannot be loaded on rank 1."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 1.0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("not that one")
        super().load_state_dict(state_dict)


def fail_on_one(folder: str) -> None:
    torch.manual_seed(0)
    module = Layers()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    config = {key: value for key, value in make_config(1).items() if key != "optimizer"}
    engine = zerorun.initialize(module, config, optimizer=optimizer, lr_scheduler=Stubborn(optimizer))
    engine.save_checkpoint(folder)
    with pytest.raises(CheckpointError, match="rank 1: ValueError: not that one"):
        engine.load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="failed midway, in counters"):
        train(engine, 0, 1)
    engine.destroy()


def test_what_one_rank_cannot_load_fails_all(tmp_path: Path) -> None:
    run_ranks(2, fail_on_one, str(tmp_path))


class Thawed(Layers):
    """All of it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True)


def load_thawed(folder: str, stage: int) -> list[Any]:
    """What is refused, by name; then the steps that moments have taken, by group of layers."""
    engine = make(0, make_config(stage))
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = make(5, make_config(stage), Thawed)
    before = engine.state_dict()
    with pytest.raises(
        CheckpointError, match=r"has no optimizer state, since they were frozen .* 'base\.weight', 'base\.bias'"
    ):
        engine.load_checkpoint(folder)
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    with pytest.raises(CheckpointError, match=r"when it was saved, for 'base\.bias'\. Remedy"):
        engine.load_checkpoint(folder, allow_missing=["base.weight"])
    engine.load_checkpoint(folder, allow_missing=["base.*"])
    losses = train(engine, 3, 2)
    engine.load_checkpoint(folder, load_optimizer=False)
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", by_day((0, 2, 3), 3))
def test_moments_of_what_was_frozen_begin_afresh_only_if_asked(stage: int, tmp_path: Path) -> None:
    run_ranks(2, load_thawed, str(tmp_path), stage)


SCHEDULES = {
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100),
    "steps": partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "exponential": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),  # its state is a part of that of steps
}


def other_schedule(folder: str, kinds: list[str]) -> None:
    """Neither schedule goes on from the state of the other, and the engine trains on after the error."""
    for kind, tag in zip(kinds, ("before", None), strict=True):
        if kind == "warmup":
            warmup = {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}
            engine = make(0, make_config(1, scheduler=warmup))
        else:
            engine = make(0, make_config(1), lr_scheduler=SCHEDULES[kind])
        if tag is not None:
            train(engine, 0, 3)
            engine.save_checkpoint(folder, tag)
            engine.load_checkpoint(folder)
            engine.destroy()
    rate = engine.get_lr()
    with pytest.raises(CheckpointError, match=r"another kind of schedule than this run's .* load_scheduler=False"):
        engine.load_checkpoint(folder)
    train(engine, 0, 1)
    for allowed in ({"load_scheduler": False}, {"allow_missing": ["scheduler"]}):
        engine.load_checkpoint(folder, **allowed)  # type: ignore[arg-type]
        assert engine.global_steps == 3
    train(engine, 3, 1)
    assert engine.get_lr() != rate
    engine.destroy()


@pytest.mark.parametrize("kinds", (["cosine", "warmup"], ["warmup", "cosine"], ["steps", "exponential"]))
def test_a_schedule_of_another_kind_is_refused_before_anything_changes(kinds: list[str], tmp_path: Path) -> None:
    run_ranks(2, other_schedule, str(tmp_path), kinds)


def rates(engine: zerorun.Engine, first: int, count: int) -> list[Any]:
    """The rate and the momentum of each of ``count`` steps."""
    found = []
    for step in range(first, first + count):
        (group,) = engine.optimizer.param_groups
        found.append((float(group["lr"]), group["betas"][0]))
        train(engine, step, 1)
    return found


# Schedules that go on from the rate of the group, and those that let momentum cycle as well.
BEGUN_ANEW: dict[str, dict[str, Any]] = {
    "CosineAnnealingLR": {"T_max": 4},
    "PolynomialLR": {"total_iters": 4},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3},
}


def begin_schedule_anew(folder: str, kind: str) -> tuple[list[Any], list[Any], list[Any]]:
    """(rates from the start, those of a new engine after a load without the schedule, and of one that has trained)."""
    config = make_config(1, scheduler={"type": kind, "params": BEGUN_ANEW[kind]})
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    engine = make(0, config)
    whole = rates(engine, 0, 4)
    engine.optimizer.param_groups[0]["weight_decay"] = 0.25  # no setting of the schedule: it comes from the checkpoint
    engine.save_checkpoint(folder)
    whole += rates(engine, 4, 2)
    engine.destroy()
    engine = make(0, config)
    engine.load_checkpoint(folder, load_scheduler=False)
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0.25
    anew = rates(engine, 4, 2)
    engine.load_checkpoint(folder, load_scheduler=False)
    anew += rates(engine, 4, 2)
    engine.load_checkpoint(folder)
    gone_on = rates(engine, 4, 2)
    engine.destroy()
    return whole, anew, gone_on


@pytest.mark.parametrize("kind", BEGUN_ANEW)
def test_a_schedule_that_is_not_loaded_starts_from_the_beginning(kind: str, tmp_path: Path) -> None:
    """In an engine that has trained, it goes on from where it is."""
    for whole, anew, gone_on in run_ranks(1, begin_schedule_anew, str(tmp_path), kind):
        assert anew == whole[:4] and gone_on == whole[4:]


class Slowing(torch.optim.SGD):
    """Divides the rate by what its steps add to groups and to its state."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload, operator]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / (group["steps"] + self.state["steps"]))  # type: ignore[index]


def load_the_start(folder: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    module, config = Layers(), make_config(1)
    del config["optimizer"]
    optimizer = Slowing([{"params": list(module.parameters()), "lr": 0.1, "name": "all"}])
    engine = zerorun.initialize(module, config, optimizer=optimizer)
    engine.save_checkpoint(folder)
    losses = train(engine, 0, 3)
    engine.load_checkpoint(folder)
    assert engine.optimizer.param_groups[0]["name"] == "all"
    again = train(engine, 0, 3)
    engine.destroy()
    return losses, again


def test_what_steps_have_added_goes_with_a_load_of_the_start(tmp_path: Path) -> None:
    for losses, again in run_ranks(1, load_the_start, str(tmp_path)):
        assert losses == again


def samples(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 6, generator=torch.Generator().manual_seed(count)))


def load_beside_other_data(folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(the first batches of the other data without a load, those after one that begins with it anew)."""
    config = make_config(1)
    engine = make(0, config, training_data=samples(16))
    for values in itertools.islice(engine.dataloader, 2):
        engine.backward(engine(values).square().mean())
        engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    expected = engine.state_dict()
    engine.destroy()
    engine = make(5, config, training_data=samples(20))
    before = engine.state_dict()
    for keywords in ({}, {"load_optimizer_states": False, "load_lr_scheduler_states": False}):
        with pytest.raises(CheckpointError, match=r"length was 16 .* is 20 now: .* pass allow_missing=\["):
            engine.load_checkpoint(folder, **keywords)
        assert engine.global_steps == 0
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    unloaded = list(itertools.islice(engine.dataloader, 2))
    engine.destroy()
    engine = make(5, config, training_data=samples(20))
    assert engine.load_checkpoint(folder, load_module_only=True)[1] == {"epoch": 3}
    assert engine.load_checkpoint(folder, allow_missing=["data"])[1] == {"epoch": 3}
    assert engine.global_steps == 2
    assert all(torch.equal(value, expected[name]) for name, value in engine.state_dict().items())
    loaded = list(itertools.islice(engine.dataloader, 2))
    engine.destroy()
    return unloaded, loaded


def test_a_checkpoint_goes_on_with_other_data_only_if_asked(tmp_path: Path) -> None:
    for unloaded, loaded in run_ranks(2, load_beside_other_data, str(tmp_path)):
        assert torch.equal(torch.stack(unloaded), torch.stack(loaded))


FOREIGN = {"import-deepspeed": "zero_pp_rank_0_mp_rank_00_model_states.pt", "import-dcp": ".metadata"}


def load_foreign(folder: str, command: str, tag: str | None) -> None:
    engine = make(0, make_config(3))
    with pytest.raises(CheckpointError, match=rf"format of its own. Remedy: zerorun-checkpoint {command} ") as told:
        engine.load_checkpoint(folder, tag)
    assert not isinstance(told.value, DamagedError)
    train(engine, 0, 1)
    engine.destroy()


@pytest.mark.parametrize("command", FOREIGN)
@pytest.mark.parametrize("where", ("named", "latest", "itself"))
def test_a_checkpoint_of_another_runtime_is_told_from_a_damaged_one(command: str, where: str, tmp_path: Path) -> None:
    place = tmp_path if where == "itself" else tmp_path / "step_3"
    place.mkdir(exist_ok=True)
    (place / FOREIGN[command]).write_bytes(b"")
    if where == "latest":
        (tmp_path / "latest").write_text("step_3")
    run_ranks(2, load_foreign, str(tmp_path), command, "step_3" if where == "named" else None)


# -- frozen weights that were left out -----------------------------------------------------------------------------------


def save_trained(folder: str, precision: str) -> None:
    engine = make(0, make_config(1, precision=precision))
    train(engine, 0, 2)
    engine.save_checkpoint(folder, "adapted", exclude_frozen_parameters=True)
    engine.destroy()


def change_behind_a_save(folder: str) -> None:
    """Frozen weights that change while a checkpoint without them is written, and are then as they were."""
    engine = make(0, make_config(1))
    train(engine, 0, 1)
    hold = threading.Event()
    engine.checkpointer.saver._write = held_back(hold, engine.checkpointer.saver._write)  # type: ignore[method-assign]
    engine.save_checkpoint(folder, exclude_frozen_parameters=True, asynchronous=True)
    weight = engine.module.get_submodule("base").weight
    assert isinstance(weight, torch.Tensor)
    with zerorun.zero.GatheredParameters(weight, modifier_rank=0):
        before = weight.detach().clone()
        weight.data.add_(1.0)
    hold.set()
    engine.wait_for_checkpoint()
    with zerorun.zero.GatheredParameters(weight, modifier_rank=0):
        weight.data.copy_(before)
    engine.load_checkpoint(folder)
    engine.destroy()


def held_back(hold: threading.Event, write: Callable[..., Path]) -> Callable[..., Path]:
    def wait(*arguments: Any) -> Path:
        hold.wait(20)
        return write(*arguments)

    return wait


def test_checksums_are_of_the_instant_of_the_call(tmp_path: Path) -> None:
    run_ranks(2, change_behind_a_save, str(tmp_path))


def load_over(folder: str, seed: int, how: str, strict: bool) -> tuple[str, bool]:
    """(the error, or empty; whether the first trained layer has the values of the checkpoint)."""
    torch.manual_seed(seed)
    path, sharded = Path(folder, "adapted"), how in ("engine", "fp32", "bf16")
    engine = None
    if how == "Init":
        with zerorun.zero.Init():
            module = Layers()
    else:
        module = Layers()
    if sharded:
        engine = zerorun.initialize(module, make_config(3, precision="fp32" if how == "engine" else how))
    before = _second_bias(module, engine)
    try:
        if how in ("fp32", "bf16") and engine is not None:
            engine.load_checkpoint(folder, strict=strict)
        else:
            zerorun.load_pretrained(module, path, strict=strict)
        error = ""
    except CheckpointError as caught:
        error = str(caught)
    changed = not torch.equal(before, _second_bias(module, engine))
    if engine is not None:
        engine.destroy()
    return error, changed


def _second_bias(module: nn.Module, engine: zerorun.Engine | None) -> torch.Tensor:
    if engine is not None:
        return engine.state_dict()["second.bias"]
    with zerorun.zero.GatheredParameters([module.second.bias]):
        return module.second.bias.detach().clone()


@pytest.mark.parametrize("how", ["plain", "Init", "engine", "fp32", "bf16"])
def test_a_checkpoint_without_its_base_is_refused_over_another(how: str, tmp_path: Path) -> None:
    """Saved in fp32, and for the two ways of the engine in bf16."""
    run_ranks(2, save_trained, str(tmp_path), "bf16" if how in ("fp32", "bf16") else "fp32")
    for error, changed in run_ranks(2, load_over, str(tmp_path), 0, how, True):
        assert (error, changed) == ("", True)
    for error, changed in run_ranks(2, load_over, str(tmp_path), 7, how, True):
        assert "was trained with other frozen weights; they differ in 'base." in error
        assert not changed
    for error, changed in run_ranks(2, load_over, str(tmp_path), 7, how, False):
        assert (error, changed) == ("", True)


def test_a_base_in_fewer_bits_is_not_refused(tmp_path: Path) -> None:
    """What bf16 has does not tell whether the fp32 values that it was rounded from are the same: a warning says so."""
    run_ranks(2, save_trained, str(tmp_path), "fp32")
    for error, changed in run_ranks(2, load_over, str(tmp_path), 0, "bf16", True):
        assert (error, changed) == ("", True)


# -- into what model ---------------------------------------------------------------------------------------------------


class Counting(nn.Linear):
    """A layer with a state of its own."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Compiled(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.second = torch.compile(Counting(6, 6), backend="eager")


def save_compiled(folder: str) -> int:
    engine = make(0, make_config(1), Compiled)
    engine.module.second._orig_mod.count = 7
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = make(1, make_config(1), Compiled)
    engine.load_checkpoint(folder)
    found: int = engine.module.second._orig_mod.count
    engine.destroy()
    return found


def test_the_state_of_a_compiled_layer_comes_back(tmp_path: Path) -> None:
    assert run_ranks(1, save_compiled, str(tmp_path)) == [7]


def pretrained_in_other_orders(folder: str) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 2))

    torch.manual_seed(0)
    expected = build().state_dict()
    engine = make(0, make_config(0), build)
    path = engine.save_checkpoint(folder)
    engine.destroy()
    model = build().to(memory_format=torch.channels_last)
    model[1].weight = nn.Parameter(torch.randn(4, 2).t())
    zerorun.load_pretrained(model, path)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not model[1].weight.is_contiguous()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_weights_come_into_parameters_of_any_memory_format(tmp_path: Path) -> None:
    run_ranks(1, pretrained_in_other_orders, str(tmp_path))
