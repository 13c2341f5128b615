"""Optimizers whose classes know nothing of bf16, with masters and states in it: they step fp32 copies, which are
rounded."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import own_optimizers
import pytest
import torch
from covering import by_day
from harness import run_ranks
from own_optimizers import OneLength
from test_training_in_bf16 import KINDS, STEPS, Llama, assert_same, config_of, loss_of, net, steps
from torch import nn
from training import merged, shared_topology, take_steps

import zerorun
from zerorun.errors import ConfigError
from zerorun.ops.rounding import MasterFormat, Origin, by_chance, join
from zerorun.optim import in_fp32
from zerorun.optim.adafactor import Adafactor
from zerorun.optim.lamb import Lamb

SOFTSIGN, UNIT_ROWS = "own_optimizers.Softsign", "own_optimizers.UnitRows"
# Name -> (the class, its arguments).
RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "RAdam": (torch.optim.RAdam, {"lr": 1e-2, "betas": (0.5, 0.6)}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
    SOFTSIGN: (own_optimizers.Softsign, {"lr": 0.02}),
    UNIT_ROWS: (own_optimizers.UnitRows, {"lr": 0.02}),
    "Lamb": (Lamb, {"lr": 1e-2, "weight_decay": 0.1}),
    "Adafactor": (Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
}
SUMS = ("Lamb", "Adafactor")  # over ranks, whose order rounds
Found = dict[str, torch.Tensor]


def config(stage: int, kind: str, rule: str, **changes: Any) -> dict[str, Any]:
    found = config_of(stage, kind, gradient_clipping=0.0, **changes)
    return {**found, "optimizer": {"type": rule, "params": RULES[rule][1]}}


def plain(rule: str, kind: str) -> tuple[list[float], Found]:
    """(losses, values of masters and states) of one process: all is in fp32, and rounded after each step."""
    section, model = KINDS[kind][0], net()
    pure, states_too = "bf16_master_weights_and_grads" in section, "bf16_optimizer_states" in section
    form = MasterFormat.FP32 if not pure else MasterFormat.BF16
    form = MasterFormat.KAHAN if section.get("rounding") == "kahan" else form
    form = MasterFormat.REMAINDER if "store_param_remainders" in section else form
    chance = section.get("rounding") != "nearest" and (pure or states_too)
    names = dict(model.named_parameters())
    wide = {name: param.detach().clone() for name, param in names.items()}
    model = model.bfloat16()

    def keep(name: str) -> None:
        master, rest = form.parts(wide[name].reshape(-1))
        wide[name].copy_(join(master, rest).view_as(wide[name]))
        names[name].data.copy_(master.view_as(wide[name]))

    def rounded(value: torch.Tensor, origin: Origin, step: int, purpose: str = "") -> torch.Tensor:
        noise = origin.noise(step, purpose).of(0, 0, value.numel(), value.device)
        flat = value.reshape(-1)
        return (by_chance(flat, noise) if chance else flat.bfloat16()).view(value.shape)

    for name in names:
        keep(name)
    optimizer, losses = RULES[rule][0](list(wide.values()), **RULES[rule][1]), []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        for name, param in names.items():
            assert param.grad is not None
            wide[name].grad, param.grad = param.grad.float(), None
        optimizer.step()
        for name, value in wide.items():
            if form is MasterFormat.BF16:
                value.copy_(rounded(value, Origin(0, value.numel(), name, seed=3), step + 1))
            keep(name)
            for key, state in optimizer.state[value].items() if states_too else ():
                if isinstance(state, torch.Tensor) and state.dim():
                    alike = state.numel() == value.numel()
                    origin = Origin(0, state.numel(), name if alike else f"{name} {key}", seed=3)
                    state.copy_(rounded(state, origin, step + 1, f"state {key}"))
        losses.append(loss.item())
    found = {f"master {name}": value.clone() for name, value in wide.items()}
    for name, value in wide.items():
        for key, state in optimizer.state[value].items():
            if isinstance(state, torch.Tensor) and state.shape == value.shape:
                found[f"{key} {name}"] = state.clone()
    return losses, found


def values_of(engine: zerorun.Engine) -> Found:
    found = {}
    for name, param in engine.module.named_parameters():
        found[f"master {name}"] = zerorun.zero.safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq", "velocity", "square_avg", "momentum_buffer"):
            state = zerorun.zero.safe_get_full_optimizer_state(param, key)
            if state is not None:
                found[f"{key} {name}"] = state.view(param.shape)
    return found


def train(config: dict[str, Any], most: int) -> dict[str, Any]:
    """``most``: elements that are taken at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_fp32, "_MOST", most)
        engine = zerorun.initialize(net(), config, topology=shared_topology())
        losses = steps(engine)
    found = {"losses": losses, "values": values_of(engine), "report": engine.memory_report()}
    engine.destroy()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("ranks", "stage", "offload"), [(1, 0, False), (2, 0, False), (2, 1, True), (2, 2, False), (2, 3, False), (2, 3, True)]
)
def test_as_in_one_process_and_bytes_as_estimated(rule: str, kind: str, ranks: int, stage: int, offload: bool) -> None:
    """Bit for bit; with sums over ranks, but for their order."""
    section = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    wanted = config(stage, kind, rule, zero_optimization=section)
    losses, values = plain(rule, kind)
    estimate = zerorun.estimate_memory(net(), wanted, ranks, device="cpu", ranks_per_node=ranks)
    found = run_ranks(ranks, train, wanted, 1000)
    for rank in found:
        if ranks > 1 and rule in SUMS:
            assert rank["losses"] == pytest.approx(losses, rel=1e-3)
        else:
            assert rank["losses"] == losses
    own = found[0]["values"]
    for name, value in values.items():
        if name in own:
            apart = float((own[name] - value).norm() / value.norm().clamp(min=1e-6))
            assert apart <= (4e-3 if ranks > 1 and rule in SUMS else 0.0), (name, apart)
    assert {f"master {name}" for name, _ in net().named_parameters()} <= own.keys() & values.keys()
    heaviest = max(found, key=lambda rank: sum(rank["report"].values()))
    assert {key: size for key, size in heaviest["report"].items() if size} == {
        key: size for key, size in estimate.kinds.items() if size
    }


def test_how_many_are_taken_at_a_time_makes_no_difference() -> None:
    for rule, most in (("RAdam", 1 << 22), ("RAdam", 48), ("Lamb", 1 << 22), ("Lamb", 1), (SOFTSIGN, 48)):
        found = run_ranks(1, train, config(1, "8 bytes", rule), most)[0]
        assert_same(found["values"], {k: v for k, v in plain(rule, "8 bytes")[1].items() if k in found["values"]})


@pytest.mark.parametrize("rule", SUMS)
def test_sums_over_ranks_are_of_all_that_are_taken(rule: str) -> None:
    together, apart = (run_ranks(2, train, config(2, "8 bytes", rule), most)[0]["values"] for most in (1 << 22, 1))
    assert_same(together, apart)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_and_go_on(config: dict[str, Any], folder: str, load: bool) -> tuple[Found, Found]:
    engine = zerorun.initialize(net(), config)
    if load:
        engine.load_checkpoint(folder, "here")
    else:
        steps(engine, 0, 2)
        engine.save_checkpoint(folder, "here")
    then = values_of(engine)
    steps(engine, 2, 2)
    found = values_of(engine)
    engine.destroy()
    return then, found


@pytest.mark.parametrize("rule", by_day(tuple(RULES), "Adafactor"))
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_been(rule: str, tmp_path: Path) -> None:
    """Also the number of the update, from which chance follows, for classes that do not count."""
    kind = "8 bytes"
    then, after = run_ranks(2, save_and_go_on, config(2, kind, rule), str(tmp_path), False)[0]
    again = run_ranks(2, save_and_go_on, config(2, kind, rule), str(tmp_path), True)[0]
    assert_same(again[0], then)
    assert_same(again[1], after)
    for ranks, stage in ((1, 0), (2, 3)):
        other = run_ranks(ranks, save_and_go_on, config(stage, kind, rule), str(tmp_path), True)[0]
        assert_same(other[0], then)
        if rule not in SUMS:
            assert_same(other[1], after)


@pytest.mark.parametrize("rule", by_day(tuple(RULES), "RAdam"))
def test_checkpoints_go_to_fp32_and_back(rule: str, tmp_path: Path) -> None:
    wide = {**config(1, "8 bytes", rule), "bf16": {"enabled": True}}
    for source, target in ((config(1, "8 bytes", rule), wide), (wide, config(3, "8 bytes", rule))):
        folder = str(tmp_path / str(source["zero_optimization"]["stage"] + ("bf16_optimizer_states" in source["bf16"])))
        then, _ = run_ranks(2, save_and_go_on, source, folder, False)[0]
        found, after = run_ranks(2, save_and_go_on, target, folder, True)[0]
        for name, value in then.items():
            assert torch.equal(found[name], value if target is wide else value.bfloat16().float()), name
        assert all(torch.isfinite(value).all() for value in after.values())


# -- tensor ranks ------------------------------------------------------------------------------------------------------


def on_tensor_ranks(config: dict[str, Any]) -> list[float]:
    torch.manual_seed(6)
    engine = zerorun.initialize(Llama(), config)
    losses = take_steps(engine, loss_of, 0, STEPS)
    norm = engine.module.norm.weight.detach().clone()
    engine.destroy()
    return [*losses, *norm.float().tolist()]


@pytest.mark.parametrize("rule", ["RAdam", "Lamb", "Adafactor"])
def test_tensor_ranks(rule: str) -> None:
    """Replicas stay equal, and losses are those of one process but for the order of sums."""
    own = config(1, "8 bytes", rule)
    divided = merged(own, {"tensor_parallel": {"size": 2, "plan": {"up": "colwise", "down": "rowwise"}}})
    (alone,) = run_ranks(1, on_tensor_ranks, own)
    found = run_ranks(2, on_tensor_ranks, divided)
    assert found[0] == found[1] and found[0][:STEPS] == pytest.approx(alone[:STEPS], rel=3e-3)


# -- what an optimizer keeps by itself, and refusals ---------------------------------------------------------------------


class Counting(own_optimizers.Softsign):
    """Has a number of its own, and one in its groups."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["lr"] = 0.02 / self.steps
        inspect.unwrap(own_optimizers.Softsign.step)(self)  # torch has a class that was made call the hooks, this one, too


def counted(config: dict[str, Any]) -> tuple[int, int, int, list[bool]]:
    model, seen = net(), []
    optimizer = Counting(model.parameters())
    engine = zerorun.initialize(model, config, optimizer=optimizer)
    optimizer.register_step_post_hook(lambda *given: seen.append(True))
    steps(engine)
    states = [value for states in optimizer.state.values() for value in states.values() if isinstance(value, torch.Tensor)]
    found = optimizer.steps, optimizer.param_groups[0]["calls"], len({state.dtype for state in states}), seen
    engine.destroy()
    return found


def test_an_optimizer_of_the_client_counts_and_calls_hooks_once() -> None:
    own = config(1, "8 bytes", "RAdam")
    del own["optimizer"]
    for ranks in (1, 2):
        for found in run_ranks(ranks, counted, own):
            assert found == (STEPS, STEPS, 1, [True] * STEPS)


class Averaging(own_optimizers.Softsign):
    def train(self) -> None: ...

    def eval(self) -> None: ...


class Coded(own_optimizers.Softsign):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["codes"] = torch.zeros_like(param, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "optimizer", "match"),
    [
        (Averaging, "bf16_master_weights_and_grads", "its train\\(\\) and eval\\(\\) change masters"),
        (Coded, "bf16_optimizer_states", "keeps states in uint8 by itself"),
        (OneLength, "bf16_master_weights_and_grads", "depends on others"),
    ],
)
def test_what_stays_refused_says_why(kind: type[torch.optim.Optimizer], optimizer: str, match: str) -> None:
    model: nn.Module = net()
    wanted = merged(config(0, "8 bytes", "RAdam"), {})
    wanted["bf16"] = {"enabled": True, optimizer: True}
    del wanted["optimizer"]
    with pytest.raises(ConfigError, match=f"(?s)bf16.{optimizer}.*{kind.__name__} cannot.*{match}.*Remedy"):
        zerorun.estimate_memory(model, wanted, 1, device="cpu", optimizer=kind(model.parameters()))
