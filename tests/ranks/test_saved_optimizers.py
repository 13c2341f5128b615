"""What optimizers of the script's own keep is saved and comes back, or is refused before any step is lost."""

from __future__ import annotations

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
