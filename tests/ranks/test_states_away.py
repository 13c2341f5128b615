"""States that are away from the device for a while: training goes on bit for bit, and reports say where they are."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import CASES, Place
from races import looking_for_races
from reference import Result
from simulation import simulated_device
from training import finish, make_config, make_engine, shared_topology

import zerorun
from zerorun import zero
from zerorun.errors import ReleasedParameterError, StepError
from zerorun.plan.byte_ledger import total_of
from zerorun.zero.offloaded_states import StateKind

CASE, STEPS, ACCUMULATION = CASES["plain"], 3, 2
KINDS = [kind.value for kind in StateKind]
PLACES: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "params": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
LOWEST = {"none": 0, "cpu": 1, "params": 3}
ROWS = [
    row
    for row in itertools.product((3, 2, 1, 0), ("bf16", "fp32", "fp16"), PLACES, (2, 1), ("reload", "by itself", "behind"))
    if row[0] >= LOWEST[row[2]]
]
Leave = Callable[[zerorun.Engine, int, int], None]


def run(config: dict[str, Any], between: Leave | None = None) -> Result:
    """``between`` is called after each micro-batch's backward and before its step, and after the step (micro -1)."""
    engine = make_engine(CASE, config)
    result = Result()
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            loss = CASE.loss(engine, Place(dist.get_rank(), step, micro))
            engine.backward(loss)
            result.losses.append(loss.item())
            if between is not None:
                between(engine, step, micro)
            engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None
        result.norms.append(norm)
        if between is not None:
            between(engine, step, -1)
    finish(engine, result)
    return result


def away_and_back(engine: zerorun.Engine, how: str, kinds: list[str] | None = None) -> None:
    """Everything leaves. The device has next to nothing then, and afterwards what it had before."""
    before, kept_before = engine.memory_report(), total_of(engine.memory_report(), "host")
    engine.offload_states(kinds, pin_memory=how != "reload", non_blocking=how == "behind")
    engine.empty_partition_cache()
    report = engine.memory_report()
    if kinds is None:
        held = {kind: size for kind, size in report.items() if kind in ("parameters", "gradients", "master", "moments")}
        assert not any(held.values()), held
        assert report["slots"] == engine.comm.buffer_bytes
        assert total_of(report, "host") - kept_before <= total_of(before, "device")
    if how != "by itself":
        engine.reload_states(non_blocking=how == "behind")
        after = engine.memory_report()
        assert {kind: size for kind, size in after.items() if kind != "host staging"} == {
            kind: size for kind, size in before.items() if kind != "host staging"
        }


def both(config: dict[str, Any], how: str) -> tuple[Result, Result]:
    with simulated_device():
        return run(config), run(config, lambda engine, step, micro: away_and_back(engine, how))


def assert_same(found: Result, plain: Result) -> None:
    assert found.losses == plain.losses
    assert found.norms == plain.norms
    assert all(torch.equal(found.weights[name], value) for name, value in plain.weights.items())


def settings(stage: int, precision: str, place: str, shards: int = 2) -> dict[str, Any]:
    zero_section = {**PLACES[place], "shard_degree": shards} if shards == 1 and stage else PLACES[place]
    return make_config(stage, accumulation=ACCUMULATION, clip=0.5, precision=precision, zero_optimization=zero_section)


@pytest.mark.each_value
@pytest.mark.parametrize(("stage", "precision", "place", "shards", "how"), ROWS)
def test_training_goes_on_bit_for_bit(stage: int, precision: str, place: str, shards: int, how: str) -> None:
    for plain, found in run_ranks(2, both, settings(stage, precision, place, shards), how):
        assert_same(found, plain)


def what_comes_back(stage: int, precision: str) -> None:
    """Each way of using states brings back what it needs, and no more."""
    with simulated_device():
        engine = make_engine(CASE, settings(stage, precision, "none"))
        place = Place(dist.get_rank(), 0, 0)

        def away() -> set[str]:
            return {kind for kind in KINDS if engine.runtime.made.states.is_away(StateKind(kind))}

        def train() -> None:
            for _ in range(ACCUMULATION):
                engine.backward(CASE.loss(engine, place))
                engine.step()

        train()
        weights = engine.state_dict()
        param = next(engine.module.parameters())
        master, moment = zero.safe_get_full_fp32_param(param), zero.safe_get_full_optimizer_state(param, "exp_avg")
        assert master is not None and moment is not None
        with torch.no_grad():
            expected = CASE.loss(engine, place)
        not_weights = set(KINDS) - {"lp_params"}

        engine.offload_states()
        assert away() == set(KINDS)
        assert all(p.isnan().all() for p in engine.module.parameters())  # loud, and no crash
        with pytest.raises(ReleasedParameterError, match="a copy or a pickle"):
            copy.deepcopy(engine.module)
        assert engine.sharded is not None
        shown = engine.sharded.optimizer.param_groups[0]["params"][0]
        assert shown.isfinite().all() and engine.sharded.optimizer.state[shown]["exp_avg"].isfinite().all()
        with torch.inference_mode():
            assert torch.equal(CASE.loss(engine, place), expected)
        assert away() == not_weights
        engine.offload_states()
        with zero.GatheredParameters(list(engine.module.parameters())):
            assert torch.equal(param.detach().cpu(), weights[next(iter(dict(engine.module.named_parameters())))])
            with pytest.raises(StepError, match="inside GatheredParameters"):
                engine.offload_states()
        assert away() == not_weights
        engine.offload_states()
        assert all(torch.equal(value, weights[name]) for name, value in engine.state_dict().items())
        assert away() == not_weights
        engine.offload_states()
        again = zero.safe_get_full_fp32_param(param)
        assert again is not None and torch.equal(again, master)
        found = zero.safe_get_full_optimizer_state(param, "exp_avg")
        assert found is not None and torch.equal(found, moment)
        assert away() == {"lp_grads", "contiguous_grad_buffer"}
        engine.offload_states(["optim_states", "hp_params"])
        engine.backward(CASE.loss(engine, place))
        assert away() == {"optim_states", "hp_params"}
        engine.step()
        engine.offload_states()
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())  # type: ignore[union-attr]
        assert not away()
        train()
        engine.destroy()


OTHER_ROWS = ((0, "bf16"), (1, "bf16"), (3, "fp32"))


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(3, "bf16"), (2, "fp32"), *(pytest.param(*row, marks=pytest.mark.nightly) for row in OTHER_ROWS)],
)
def test_what_is_needed_comes_back(stage: int, precision: str) -> None:
    run_ranks(2, what_comes_back, stage, precision)


def saves_while_away(folder: str) -> tuple[Result, Result]:
    config = settings(3, "bf16", "none")

    def between(engine: zerorun.Engine, step: int, micro: int) -> None:
        if (step, micro) == (0, -1):
            engine.offload_states()
            engine.save_checkpoint(folder)
            engine.offload_states()
            engine.load_checkpoint(folder)
        elif (step, micro) == (1, -1):
            engine.offload_states()  # and destroyed in the end, or trained on

    with simulated_device():
        return run(config), run(config, between)


def test_checkpoints_while_states_are_away(tmp_path: Any) -> None:
    for plain, found in run_ranks(2, saves_while_away, str(tmp_path)):
        assert_same(found, plain)


def refusals() -> None:
    engine = make_engine(CASE, settings(3, "fp32", "none"), topology=shared_topology())
    with pytest.raises(StepError, match="choose from"):
        engine.offload_states(["weights"])
    with pytest.raises(StepError, match="host memory only"):
        engine.offload_states(device="nvme")
    before = engine.memory_report()
    engine.offload_states()  # a CPU's memory is the host's: nothing happens
    engine.empty_partition_cache()
    assert engine.memory_report() == before
    engine.reload_states()
    engine.destroy()


def test_refusals_and_cpus() -> None:
    run_ranks(1, refusals)


def look(config: dict[str, Any], how: str) -> list[str]:
    with simulated_device(), looking_for_races() as races:
        run(config, lambda engine, step, micro: away_and_back(engine, how))
    return list(races.found)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_there_are_no_races_with_states_that_move(stage: int) -> None:
    for found in run_ranks(2, look, settings(stage, "bf16", "none"), "behind"):
        assert not found, "\n".join(found)
