"""engine.load_state_dict(): full values, as engine.state_dict() has returned them, go back into the shards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_expert_training
import test_quantised_weights
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from mixtures import make
from models import CASES, Gpt, Mlp
from quantised import SHARDED
from test_parallel_matrix import batch_of, build
from torch import nn
from training import PLACES, make_config, make_engine, merged, placed, run_steps

import zerorun
from zerorun.errors import CheckpointError, ModelError, ReleasedParameterError
from zerorun.plan.parameter_kinds import inner_tensors
from zerorun.zero.placeholders import UnsavedPlaceholder
from zerorun.zero.unit import Unit

Weights = dict[str, Any]
PRECISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "bf16 alone": ("bf16", {"bf16": {"bf16_master_weights_and_grads": True, "rounding": "nearest"}}),
    "remainders": ("bf16", {"bf16": {"store_param_remainders": True}}),
}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.0}}}  # no state: steps after a load are as before


def again(take: Callable[[], Any], engine: zerorun.Engine) -> tuple[Any, Any, Weights, Weights, Weights]:
    """What steps give, and what they give again after the weights of before were loaded; (weights then, and after each)."""
    best = engine.state_dict(exact=True)
    first, after = take(), engine.state_dict(exact=True)
    engine.load_state_dict(best)
    loaded = engine.state_dict(exact=True)
    second, after_again = take(), engine.state_dict(exact=True)
    engine.destroy()
    return first, second, {"best": best, "loaded": loaded}, after, after_again


def replayed(place: str, precision: str, folder: Path) -> tuple[Any, Any, Weights, Weights, Weights]:
    stage, zero = placed(place, folder)
    dtype, section = PRECISIONS[precision]
    settings = merged(make_config(stage, precision=dtype, optimizer="SGD", zero_optimization=zero), merged(SGD, section))
    engine = make_engine(CASES["frozen"], settings)
    run_steps(engine, CASES["frozen"], 2)
    return again(lambda: run_steps(engine, CASES["frozen"], 2), engine)


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def check(found: list[tuple[Any, Any, Weights, Weights, Weights]]) -> None:
    for first, second, weights, after, after_again in found:
        assert same(weights["best"], weights["loaded"]) and not same(weights["best"], after)
        assert first == second and same(after, after_again)


@pytest.mark.each_value
@pytest.mark.parametrize("precision", by_day(PRECISIONS, "fp32", "bf16"))
@pytest.mark.parametrize("place", by_day(PLACES, "stage 0", "stage 1", "stage 2", "stage 3", "stage 3, offload all"))
def test_weights_that_were_best_are_trained_on(place: str, precision: str, tmp_path: Path) -> None:
    """Bit for bit, and with the digits of fp32 masters."""
    check(run_ranks(4 if "hybrid" in place else 2, replayed, place, precision, tmp_path))


def with_and_without_digits(stage: int) -> list[bool]:
    """Masters after weights in bf16, which are those that there are, and after the same values in fp32."""
    engine = make_engine(CASES["frozen"], make_config(stage, precision="bf16"))
    run_steps(engine, CASES["frozen"], 1)
    exact, weights = engine.state_dict(exact=True), engine.state_dict()
    engine.load_state_dict(weights)
    found = [same(engine.state_dict(exact=True), exact)]
    wide = {name: weights[name].to(value.dtype) for name, value in exact.items()}
    engine.load_state_dict(wide)
    found += [same(exact, wide), same(engine.state_dict(exact=True), wide)]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", by_day(range(4), 1, 3))
def test_masters_keep_digits_that_nobody_has_given_others_for(stage: int) -> None:
    assert run_ranks(2, with_and_without_digits, stage) == [[True, False, True]] * 2


def replayed_in_parts(stage: int, tensor: int) -> tuple[Any, Any, Weights, Weights, Weights]:
    settings = merged(make_config(stage, optimizer="SGD", tensor_parallel={"size": tensor}), SGD)
    engine = zerorun.initialize(build("llama"), settings)

    def take() -> list[float]:
        losses = []
        for step in range(2):
            loss = engine(**batch_of(0, step, 0)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    return again(take, engine)


@pytest.mark.parametrize(("stage", "ranks"), by_day(((0, 2), (1, 2), (3, 4)), (1, 2), (3, 4)))
def test_each_tensor_rank_takes_its_part(stage: int, ranks: int) -> None:
    check(run_ranks(ranks, replayed_in_parts, stage, 2))


def in_stages(stage: int) -> zerorun.Engine:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = zerorun.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    return zerorun.initialize(model, merged(make_config(stage, optimizer="SGD", pipeline={"stages": 2}), SGD))


def replayed_in_stages(stage: int) -> tuple[Any, Any, Weights, Weights, Weights]:
    engine = in_stages(stage)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))

    def take() -> float:
        return float(engine.train_batch(iter([(x, x)] * 99)))

    return again(take, engine)


@pytest.mark.parametrize("stage", (1, 3))
def test_each_stage_takes_its_own(stage: int) -> None:
    check(run_ranks(2, replayed_in_stages, stage))


def refused_in_stages(stage: int) -> tuple[list[str], list[str], bool]:
    """What is said of weights that one stage alone cannot take, which names some weights lack, and whether none changed."""
    engine, said = in_stages(stage), []
    before = engine.state_dict()
    other = {name: value + 1 for name, value in before.items()}
    first, last = min(before), max(before)
    some = {name: value for name, value in before.items() if name != last}
    for wrong in ({**other, last: torch.zeros(3)}, {**some, first: other[first]}, {**other, "no.such": torch.ones(1)}):
        with pytest.raises((CheckpointError, ModelError)) as caught:
            engine.load_state_dict(wrong)
        said.append(str(caught.value))
    same_as_before = same(before, engine.state_dict())
    lacking = engine.load_state_dict(some, strict=False).missing_keys
    engine.destroy()
    return said, [name == last for name in lacking], same_as_before


@pytest.mark.parametrize("stage", (1, 3))
def test_what_one_stage_refuses_changes_none(stage: int) -> None:
    for rank, (said, lacking, same_as_before) in enumerate(run_ranks(2, refused_in_stages, stage)):
        shape, lacks, besides = said
        assert "is (3,), and not a tensor of shape (8, 8)" in shape and ("rank 1: " in shape) == (rank == 0)
        assert "lacks '3.weight'" in lacks and "has 'no.such' besides" in besides
        assert same_as_before and lacking == [True]


class Normed(nn.Module):
    """Has buffers, a state of its own, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.norm(self.embed(ids))).square().mean()

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class Lazy(dict[str, Any]):
    """Values that rank 1 cannot read."""

    def __getitem__(self, name: str) -> Any:
        if dist.get_rank() == 1 and name == "norm.bias":
            raise OSError("planted")
        return super().__getitem__(name)


def beside_weights(stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = zerorun.initialize(Normed(), merged(make_config(stage, optimizer="SGD"), SGD))

    def step() -> None:
        engine.backward(engine(torch.arange(8)))
        engine.step()

    step()
    best, told = engine.state_dict(), {}
    step()
    changed = {name: value for name, value in best.items() if name != "head.weight"}  # as a file of safetensors has it
    engine.load_state_dict(changed)
    found = engine.state_dict()
    told["same"] = all(torch.equal(value, found[name]) for name, value in best.items() if torch.is_tensor(value))
    told["state"] = (engine.module.calls, float(engine.module.norm.num_batches_tracked))
    wrong: dict[str, Any] = {
        "lacks": {name: value for name, value in best.items() if name != "norm.weight"},
        "besides": {**best, "other": torch.ones(2)},
        "shape": {**best, "norm.weight": torch.zeros(9)},
        "kind": {**best, "embed.weight": [1.0]},
        "buffer": {**best, "embed.weight": best["embed.weight"] + 1, "norm.running_mean": torch.zeros(9)},
        "none": None if dist.get_rank() == 1 else best,
        "other": {} if dist.get_rank() == 1 else best,
        "values": {**best, "norm.weight": best["norm.weight"] + dist.get_rank()},
        "lazy": Lazy(best),
        "placeholder": {**best, "norm.bias": torch.zeros(8).as_subclass(UnsavedPlaceholder)},
    }
    for kind, given in wrong.items():
        try:
            engine.load_state_dict(given)
        except (CheckpointError, ModelError) as error:
            told[kind] = f"{type(error).__name__} {error}"
    after = engine.state_dict()
    told["unchanged"] = all(torch.equal(value, after[name]) for name, value in found.items() if torch.is_tensor(value))
    lacking, besides = engine.load_state_dict({"norm.weight": torch.full((8,), 3.0), "other": torch.ones(2)}, strict=False)
    told["names"] = ("embed.weight" in lacking, "norm.weight" in lacking, besides)
    told["some"] = float(engine.state_dict()["norm.weight"].sum())
    with zerorun.zero.GatheredParameters(engine.module.norm.weight):
        engine.load_state_dict({"norm.weight": torch.full((8,), 2.0)}, strict=False)
        told["in a block"] = float(engine.module.norm.weight.sum())
    engine.destroy()
    try:
        engine.load_state_dict(best)
    except CheckpointError as error:
        told["given back"] = str(error)
    return told


@pytest.mark.parametrize("stage", by_day(range(4), 1, 3))
def test_what_is_beside_weights_and_what_is_wrong(stage: int) -> None:
    for told in run_ranks(2, beside_weights, stage):
        assert told["same"] and told["unchanged"] and told["state"] == (1, 1.0)
        assert "CheckpointError" in told["lacks"] and "lacks 'norm.weight'. Nothing was loaded. Remedy" in told["lacks"]
        assert "has 'other' besides" in told["besides"] and "strict=False" in told["besides"]
        assert "'norm.weight' is (9,), and not a tensor of shape (8,)" in told["shape"]
        assert "'embed.weight' is list" in told["kind"]
        assert "the weights are NoneType, and no dict" in told["none"]
        assert "rank 1 gives other names than rank 0. Nothing was loaded" in told["other"]
        assert "ranks 0 and 1 give other values for 'norm.weight'. Nothing was loaded" in told["values"]
        assert "OSError: planted. Nothing was loaded" in told["lazy"]
        assert "'norm.running_mean' is (9,), and not a tensor of shape (8,)" in told["buffer"]
        assert "'norm.bias' is a placeholder" in told["placeholder"] and told["names"] == (True, False, ["other"])
        assert told["some"] == 24 and told["in a block"] == 16 and "has given its module back" in told["given back"]


class OfOneRank(Normed):
    """Whose extra state rank 1 cannot take."""

    def set_extra_state(self, state: int) -> None:
        if dist.get_rank() == 1:
            raise ValueError("planted")


def half_loaded(stage: int) -> tuple[str, str]:
    """What a load says whose extra state one rank refuses, and what the next step says."""
    engine = zerorun.initialize(OfOneRank(), merged(make_config(stage, optimizer="SGD"), SGD))
    said = []
    with pytest.raises(CheckpointError) as caught:
        engine.load_state_dict(engine.state_dict())
    said.append(str(caught.value))
    engine.backward(engine(torch.arange(8)))
    with pytest.raises(CheckpointError) as caught:
        engine.step()
    return said[0], str(caught.value)


@pytest.mark.parametrize("stage", (0, 3))
def test_what_fails_beside_weights_fails_on_all_ranks(stage: int) -> None:
    for loaded, stepped in run_ranks(2, half_loaded, stage):
        assert "ValueError: planted. Weights are loaded, and what is beside them by half" in loaded
        assert "failed midway" in stepped


def parts_of(weights: Weights) -> dict[str, torch.Tensor]:
    """The bytes of what is inside packed tensors, and of others: codes may read as NaN."""
    named = ((name, value) for name, value in weights.items() if torch.is_tensor(value))
    found = {name + path: inner for name, value in named for path, inner in inner_tensors(value)}
    return {name: inner.contiguous().view(-1).view(torch.uint8) for name, inner in found.items()}


def back(engine: zerorun.Engine, step: Callable[[], Any]) -> list[bool]:
    """Whether steps change the weights, and a load brings those of before back."""
    step()
    best = engine.state_dict()
    step()
    changed = not same(parts_of(best), parts_of(engine.state_dict()))
    engine.load_state_dict(best)
    found = [changed, same(parts_of(best), parts_of(engine.state_dict()))]
    step()
    engine.destroy()
    return found


def quantised(kind: str, stage: int) -> tuple[list[bool], str]:
    """Whether weights come back, and what is said of other scales, where these are entries of their own."""
    engine, said = test_quantised_weights.engine_of(kind, stage, "fp32"), ""
    weights = engine.state_dict()
    scales = [name for name in weights if name.endswith((".absmax", ".SCB"))]
    if scales:
        with pytest.raises(CheckpointError) as caught:
            engine.load_state_dict({**weights, scales[0]: weights[scales[0]] + 1})
        said = str(caught.value)
    return back(engine, lambda: test_quantised_weights.losses_of(engine, kind, 1)), said


@pytest.mark.parametrize("stage", by_day((1, 3), 3))
@pytest.mark.parametrize("kind", by_day(SHARDED, "nf4 in bf16", "int8", "wrapper"))
def test_packed_weights_are_loaded_as_they_are(kind: str, stage: int) -> None:
    for found, said in run_ranks(2, quantised, kind, stage):
        assert found == [True, True]
        assert not kind.startswith(("nf4", "int8")) or "by which a weight was quantised" in said


def with_experts(stage: int) -> list[bool]:
    engine = zerorun.initialize(make("mixtral"), test_expert_training.config_of(stage, 2))

    def step() -> None:
        engine.backward(test_expert_training.loss_of(engine, engine.topology.data_parallel_rank, 0, 0))
        engine.step()

    return back(engine, step)


@pytest.mark.parametrize("stage", by_day((1, 2, 3), 1, 3))
def test_each_rank_takes_its_experts(stage: int) -> None:
    assert run_ranks(2, with_experts, stage) == [[True, True]] * 2


def edits_beside_a_load() -> list[str]:
    """What a step says of an edit that ranks may not share, after a load of another weight, and after one of all."""
    engine = make_engine(CASES["frozen"], make_config(1))
    weights = engine.state_dict()
    names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
    param = dict(engine.module.named_parameters())[names[0]]
    with pytest.raises(ReleasedParameterError), zerorun.zero.GatheredParameters([param]), torch.no_grad():
        param.add_(1.0 + dist.get_rank())
    found = []
    for given in ({names[1]: weights[names[1]]}, weights):
        engine.load_state_dict(given, strict=False)
        try:
            run_steps(engine, CASES["frozen"], 1)
            found.append("")
        except ReleasedParameterError as error:
            found.append(str(error))
    engine.destroy()
    return found


def test_a_load_of_some_weights_says_nothing_of_others() -> None:
    for some, every in run_ranks(2, edits_beside_a_load):
        assert "changed inside GatheredParameters" in some and not every


def sent_for_a_load() -> dict[str, int]:
    """Bytes that this rank sends, by label."""
    engine = make_engine(CASES["frozen"], make_config(3))
    weights = engine.state_dict()
    before = engine.communication_report()
    engine.load_state_dict(weights)
    after = engine.communication_report()
    engine.destroy()
    sent = {label: entry["bytes"] - before.get(label, {"bytes": 0})["bytes"] for label, entry in after.items()}
    return {label: count for label, count in sent.items() if count}


def test_no_weights_are_sent() -> None:
    """Every rank has them, and takes its shards."""
    assert run_ranks(2, sent_for_a_load) == [{}, {}]


# -- hooks of the script -----------------------------------------------------------------------------------------------


class Hooked(Gpt):
    """A layer keeps a sum of its weight, made anew after each load, and another one could rename what it loads."""

    def __init__(self) -> None:
        super().__init__(3, Mlp)
        self.head = Renaming(self.embed.embedding_dim, 8)
        first = self.blocks[1].up
        first.sums = []
        first.register_load_state_dict_post_hook(_sum_up)
        self.head.register_load_state_dict_pre_hook(Hook())


class Hook:
    """An object that keeps something by the names that wrappers of functions have."""

    hook = func = None

    def __call__(self, *unused: Any) -> None:
        pass


class Renaming(nn.Linear):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)


def _sum_up(layer: nn.Module, incompatible: Any) -> None:
    layer.sums.append((float(layer.weight.sum()), len(incompatible.missing_keys)))


def hooks_after(stage: int, folder: str) -> tuple[list[tuple[float, int]], float, list[str]]:
    """(what the hook has seen in five loads, the true sum, what was said)."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerorun").addHandler(handler)
    config = make_config(stage, precision="bf16")
    engine = zerorun.initialize(Hooked(), config)
    path, weights = engine.save_checkpoint(folder), engine.state_dict()
    engine.destroy()
    model = Hooked()
    zerorun.load_pretrained(model, path)
    found = list(model.blocks[1].up.sums)
    engine = zerorun.initialize(Hooked(), config)
    engine.load_checkpoint(path)
    zerorun.load_pretrained(engine.module, path)
    engine.load_state_dict(weights)
    engine.backward(engine(torch.arange(4)[None]).square().mean())
    engine.step()
    with zerorun.zero.GatheredParameters(list(engine.module.parameters())):
        engine.load_state_dict(weights)
    found += engine.module.blocks[1].up.sums
    engine.destroy()
    logging.getLogger("zerorun").removeHandler(handler)
    return found, float(weights["blocks.1.up.weight"].sum()), heard


@pytest.mark.parametrize("stage", (1, 3))
def test_hooks_after_a_load_run_where_weights_are_whole(stage: int, tmp_path: Path) -> None:
    for rank, (found, wanted, heard) in enumerate(run_ranks(2, hooks_after, stage, str(tmp_path))):
        assert len(found) == (5 if stage == 1 else 2)
        assert all(abs(value - wanted) < 0.1 and missing == 0 for value, missing in found)
        for how in ("a load", "load_state_dict()") if rank == 0 else ():
            assert any(how in line and "module 'blocks.1.up' (Linear) has a hook after" in line for line in heard) == (
                stage == 3
            )
            for what in ("Renaming._load_from_state_dict()", "a hook before load_state_dict() of a Renaming"):
                assert sum(line.startswith(f"{how}: {what} does not see the weights of 'head'") for line in heard) == 1


# -- the number of units ---------------------------------------------------------------------------------------------


def units_looked_at(stage: int, blocks: int, folder: Path) -> dict[str, int]:
    """How often a unit is asked for its update, or for tensors that the script has replaced, by what is done."""
    torch.manual_seed(0)
    engine = zerorun.initialize(Gpt(blocks, Mlp), make_config(stage))
    engine.backward(engine(torch.arange(8).view(2, 4)).square().mean())
    engine.step()
    weights, plain = engine.state_dict(), Gpt(blocks, Mlp).state_dict()
    done: dict[str, Callable[[], Any]] = {
        "state_dict": engine.state_dict,
        "load_state_dict": lambda: engine.load_state_dict(weights),
        "save": lambda: engine.save_checkpoint(str(folder)),
        "load": lambda: engine.load_checkpoint(str(folder)),
        "memory_report": engine.memory_report,
    }
    if stage < 3:
        done["of the module"] = lambda: engine.module.load_state_dict(plain)
    counts = dict.fromkeys(done, 0)
    for name, do in done.items():
        with pytest.MonkeyPatch.context() as patch:
            for method in ("updated", "replaced"):
                original = getattr(Unit, method)

                def counted(self: Unit, original: Callable[[Unit], Any] = original, name: str = name) -> Any:
                    counts[name] += 1
                    return original(self)

                patch.setattr(Unit, method, counted)
            do()
    engine.destroy()
    return counts


@pytest.mark.parametrize("stage", (1, 3))
def test_work_grows_with_the_number_of_units(stage: int, tmp_path: Path) -> None:
    """And not with its square, as where each of many modules asks for all of the model: hours for thousands of experts."""
    (few,) = run_ranks(1, units_looked_at, stage, 8, tmp_path / "few")
    (many,) = run_ranks(1, units_looked_at, stage, 32, tmp_path / "many")
    assert all(few.values())
    grown = {name: many[name] / few[name] for name in few}
    assert max(grown.values()) < 5, grown
