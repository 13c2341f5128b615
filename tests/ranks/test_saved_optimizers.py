"""What optimizers of the script's own keep is saved and comes back, or is refused before any step is lost."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from training import make_config

import zerorun
from zerorun.errors import CheckpointError, ModelError
from zerorun.log import logger


class Odd(torch.optim.Optimizer):
    """Momentum, divided by a number that it keeps in some way: ``keeps`` says in which."""

    def __init__(self, params: Any, keeps: str) -> None:
        super().__init__(params, {"lr": 0.05})
        self.keeps, self.count = keeps, 0

    def state_dict(self) -> dict[str, Any]:
        more = {"count": self.count} if self.keeps == "its own state_dict" else {}
        more |= {"largest": torch.ones(2)} if self.keeps == "a tensor in its state_dict" else {}
        return super().state_dict() | more

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict.get("count", 0)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})

    def number(self, state: dict[Any, Any]) -> float:
        if self.keeps == "a list":
            state.setdefault("history", []).append(len(state.get("history", ())))
            return float(len(state["history"]))
        if self.keeps == "a number for all":
            return float(self.state["all"]["steps"])
        if self.keeps == "a tensor for all":
            return float(self.state["all"])
        return float(self.count) if self.keeps == "its own state_dict" else 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        if self.keeps == "a number for all":
            self.state["all"] = {"steps": self.state.get("all", {"steps": 0})["steps"] + 1}  # type: ignore[index]
        if self.keeps == "a tensor for all":
            self.state["all"] = self.state.get("all", torch.zeros(())) + 1  # type: ignore[index, assignment]
        names = {"a slash": "a/b", "a dot": "exp.avg", "a number": 7, "a tuple": ("a", "b")}
        name: Any = names.get(self.keeps, "velocity")
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    velocity = state.setdefault(name, torch.zeros_like(param))
                    velocity.mul_(0.9).add_(param.grad)
                    param.sub_(velocity / self.number(state), alpha=group["lr"])


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))


def make(seed: int, stage: int, optimizer_of: Any) -> zerorun.Engine:
    torch.manual_seed(seed)
    module = Net()
    config = {key: value for key, value in make_config(stage).items() if key != "optimizer"}
    return zerorun.initialize(module, config, optimizer=optimizer_of(module))


def train(engine: zerorun.Engine, first: int, count: int) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(2, 6, generator=generator)).square().mean())
        engine.step()


def odd(keeps: str) -> Any:
    def build(module: nn.Module) -> Odd:
        matrices = [param for param in module.parameters() if param.dim() > 1]
        vectors = [param for param in module.parameters() if param.dim() < 2]
        return Odd([{"params": matrices}, {"params": vectors, "lr": 0.1}], keeps)

    return build


def save_and_go_on(folder: str, keeps: str, stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights of the uninterrupted run, and of one that was loaded."""
    engine = make(0, stage, odd(keeps))
    train(engine, 0, 3)
    engine.save_checkpoint(folder)
    train(engine, 3, 3)
    expected = engine.state_dict()
    engine.destroy()
    engine = make(9, stage, odd(keeps))
    engine.load_checkpoint(folder)
    train(engine, 3, 3)
    found = engine.state_dict()
    engine.destroy()
    return expected, found


KEPT = ("a list", "a number for all", "a tensor for all", "its own state_dict")


@pytest.mark.parametrize(("keeps", "stage"), [(keeps, 1 + 2 * (index % 2)) for index, keeps in enumerate(KEPT)])
def test_what_an_optimizer_keeps_beside_tensors_comes_back(keeps: str, stage: int, tmp_path: Path) -> None:
    for expected, found in run_ranks(2, save_and_go_on, str(tmp_path), keeps, stage):
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def refused(keeps: str) -> None:
    with pytest.raises(ModelError, match=r"(the optimizer's state|of the optimizer) .* Remedy: an optimizer that"):
        make(0, 1, odd(keeps))


@pytest.mark.parametrize("keeps", ["a slash", "a dot", "a number", "a tuple", "a tensor in its state_dict"])
def test_what_cannot_be_saved_is_refused_at_the_start(keeps: str) -> None:
    run_ranks(1, refused, keeps)


class Late(Odd):
    """Has a state from the second step on that no checkpoint can have."""

    def number(self, state: dict[Any, Any]) -> float:
        if self.count > 1:
            state["a/b"] = torch.zeros_like(state["velocity"])
        return 1.0


def refused_late(folder: str) -> list[str]:
    engine = make(0, 1, lambda module: Late(module.parameters(), ""))
    train(engine, 0, 1)
    engine.save_checkpoint(folder, "one")
    train(engine, 1, 1)
    with pytest.raises(CheckpointError, match=r"state 'a/b' cannot be saved by this name"):
        engine.save_checkpoint(folder, "two")
    engine.load_checkpoint(folder)
    engine.destroy()
    return sorted(path.name for path in Path(folder).iterdir())


def test_what_cannot_be_saved_later_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    assert run_ranks(1, refused_late, str(tmp_path)) == [["latest", "one"]]


# -- groups ------------------------------------------------------------------------------------------------------------


def decayed(order: int) -> Any:
    def build(module: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [param for param in module.parameters() if param.dim() > 1], "weight_decay": 0.5, "lr": 0.1},
            {"params": [param for param in module.parameters() if param.dim() < 2], "weight_decay": 0.0, "lr": 0.001},
        ]
        return torch.optim.AdamW(groups[::order])

    return build


def swap_groups(folder: str) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(learning rate and decay of each group as they were made, and after a load that was refused)."""
    engine = make(0, 1, decayed(1))
    train(engine, 0, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = make(0, 1, decayed(-1))
    before = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
    with pytest.raises(CheckpointError, match=r"has '0\.weight' in parameter group 0, and this run's optimizer in group 1"):
        engine.load_checkpoint(folder)
    after = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]
    train(engine, 1, 1)
    engine.load_checkpoint(folder, load_optimizer=False)
    engine.destroy()
    return before, after


def test_hyperparameters_are_not_given_to_other_parameters(tmp_path: Path) -> None:
    for before, after in run_ranks(2, swap_groups, str(tmp_path)):
        assert before == after == [(0.001, 0.0), (0.1, 0.5)]


def told() -> list[str]:
    """The list of what the logger says of the updates from now on."""
    lines: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "updates as this run asks" in record.getMessage():
                lines.append(record.getMessage())

    logger.addHandler(Listening())
    return lines


def named(kind: str, params: dict[str, Any], stage: int) -> zerorun.Engine:
    torch.manual_seed(0)
    return zerorun.initialize(Net(), make_config(stage) | {"optimizer": {"type": kind, "params": params}})


def resume_otherwise(
    folder: str, kind: str, saved: dict[str, Any], resumed: dict[str, Any], stage: int
) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """(weights after two steps, a load and two more, the states that another save has, what was told)."""
    engine = named(kind, {"lr": 0.01} | saved, stage)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    lines = told()
    engine = named(kind, {"lr": 0.5} | resumed, stage)
    engine.load_checkpoint(folder)
    train(engine, 2, 2)
    weights, states = engine.state_dict(), {key for state in engine.optimizer.state.values() for key in state}
    engine.destroy()
    logger.handlers.pop()
    return weights, sorted(states), lines


def resumed_by_one_process(kind: str, saved: dict[str, Any], change: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same with torch's class, whose groups get ``change`` after two steps."""
    torch.manual_seed(0)
    module = Net()
    optimizer = getattr(torch.optim, kind)(module.parameters(), **{"lr": 0.01, "weight_decay": 0.0} | saved)
    for step in range(4):
        for group in optimizer.param_groups if step == 2 else ():
            group.update(change)
        optimizer.zero_grad()
        for rank in range(2):
            inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            (module(inputs).square().mean() / 2).backward()
        optimizer.step()
    return {name: value.detach() for name, value in module.state_dict().items()}


OTHERWISE: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "maximize": ("AdamW", {}, {"maximize": True}, {"maximize": True}),
    "maximize, where torch saved": ("AdamW", {"foreach": True}, {"maximize": True}, {"maximize": True}),
    "no maximize": ("AdamW", {"maximize": True}, {}, {"maximize": False}),
    "no amsgrad": ("AdamW", {"amsgrad": True}, {}, {"amsgrad": False}),
    "no amsgrad, for torch": ("AdamW", {"amsgrad": True}, {"foreach": True}, {"amsgrad": False}),
    "not centered": ("RMSprop", {"centered": True}, {}, {"centered": False}),
    "nesterov": ("SGD", {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"nesterov": True}),
    "the same": ("AdamW", {"amsgrad": True}, {"amsgrad": True}, {}),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_a_run_updates_as_it_asks_for_whatever_class_saved(case: str, tmp_path: Path) -> None:
    """Its formulas hold, and the rate comes from the checkpoint. States of other formulas are left out."""
    kind, saved, resumed, change = OTHERWISE[case]
    expected = resumed_by_one_process(kind, saved, change)
    found = run_ranks(2, resume_otherwise, str(tmp_path), kind, saved, resumed, 1 + len(change) * 2)
    for weights, states, _ in found:
        assert all(torch.allclose(weights[name], value, atol=1e-6) for name, value in expected.items())
        assert case == "the same" or not {"max_exp_avg_sq", "grad_avg"} & set(states)
    lines = found[0][2]
    assert len(lines) == len(change) and found[1][2] == []
    assert all(f"{key} {value} in parameter group 0 (saved with {not value})" in lines[0] for key, value in change.items())


def refuse_formula(folder: str, kind: str, saved: dict[str, Any], resumed: dict[str, Any]) -> tuple[str, bool]:
    """(what is said, whether all is as before)."""
    engine = named(kind, {"lr": 0.01} | saved, 2)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = named(kind, {"lr": 0.5} | resumed, 2)
    before = engine.state_dict()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    after, rates = engine.state_dict(), {group["lr"] for group in engine.optimizer.param_groups}
    same = all(torch.equal(after[name], value) for name, value in before.items()) and rates == {0.5}
    engine.load_checkpoint(folder, load_optimizer=False)
    train(engine, 2, 1)
    engine.destroy()
    return str(caught.value), same


@pytest.mark.parametrize(
    ("kind", "saved", "resumed", "key", "reason"),
    [
        ("AdamW", {}, {"amsgrad": True}, "amsgrad", "needs the state 'max_exp_avg_sq', which is not there"),
        ("RMSprop", {}, {"centered": True}, "centered", "needs the state 'grad_avg', which is not there"),
        ("SGD", {}, {"momentum": 0.9, "nesterov": True}, "nesterov", "needs momentum and no dampening; momentum 0"),
    ],
)
def test_formulas_that_need_what_is_not_there_are_refused_before_anything_changes(
    kind: str, saved: dict[str, Any], resumed: dict[str, Any], key: str, reason: str, tmp_path: Path
) -> None:
    found = run_ranks(2, refuse_formula, str(tmp_path), kind, saved, resumed)
    assert found[0] == found[1]
    said, same = found[0]
    assert same
    assert f"was saved with {key} False in parameter group 0" in said and f"{key} True, which {reason}" in said
    assert f"Remedy: set {key} to false in optimizer.params" in said and "load_optimizer=False" in said


def save_unreadable(folder: str) -> list[str]:
    engine = make(0, 1, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    engine.save_checkpoint(folder, "one")
    describe = engine.checkpointer._describe_optimizer
    engine.checkpointer._describe_optimizer = lambda tensors: {**describe(tensors), "type": None}
    with pytest.raises(CheckpointError, match=r"nothing was saved, since nothing could load it: .*optimizer is "):
        engine.save_checkpoint(folder, "two")
    engine.destroy()
    return sorted(path.name for path in Path(folder).iterdir())


def test_what_no_load_could_read_is_not_saved(tmp_path: Path) -> None:
    assert run_ranks(2, save_unreadable, str(tmp_path)) == [["latest", "one"]] * 2
