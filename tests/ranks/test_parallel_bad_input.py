"""Bad input to tensor and pipeline parallelism: one clear error on all ranks, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_parallel_matrix import batch_of, build, data_of
from test_pipeline import batch_of as pair_of
from test_pipeline import build as build_layers
from torch import nn
from training import make_config

import zerorun
from zerorun.distributed.process_topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from zerorun.errors import ZerorunError
from zerorun.pipeline.module import PipelineModule
from zerorun.pipeline.split_pretrained import split_pretrained
from zerorun.tensor_parallel.collectives import make_region
from zerorun.tensor_parallel.layers import ColumnParallelLinear


def attempt(act: Callable[[], Any]) -> tuple[str, str]:
    try:
        act()
    except (ZerorunError, StopIteration) as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def initialize_with(model: str, changes: dict[str, Any]) -> tuple[str, str]:
    """At once: nothing of a model that is refused may be changed, and no process group be made."""
    module = build(model)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    groups = len(dist.distributed_c10d._world.pg_map)
    found = attempt(lambda: zerorun.initialize(module, {**make_config(1), **changes}))
    assert len(dist.distributed_c10d._world.pg_map) == groups
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert module(**batch_of(0, 0, 0)).loss > 0
    return found


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("world", "model", "changes", "kind", "words"),
    (
        (3, "llama", {"tensor_parallel": {"size": 2}}, "ConfigError", ("tensor_parallel.size", "3 ranks", "multiple of 2")),
        (2, "gpt2", {"pipeline": {"stages": 4}}, "ConfigError", ("pipeline.stages", "2 ranks", "multiple of 4")),
        (
            3,
            "llama",
            {"tensor_parallel": {"size": 3}},
            "ModelError",
            ("4 query heads", "tensor_parallel.size 3", "[1, 2, 4]"),
        ),
        (
            2,
            "llama",
            {"tensor_parallel": {"size": 2, "plan": {"model.layers.*.attention": "colwise"}}},
            "ModelError",
            ("model.layers.*.attention", "matches no module"),
        ),
        (
            2,
            "llama",
            {"tensor_parallel": {"size": 2, "plan": {"model.norm": "colwise"}}},
            "ModelError",
            ("model.norm", "LlamaRMSNorm", "nn.Linear or Conv1D"),
        ),
        (
            2,
            "llama",
            {"tensor_parallel": {"size": 2, "plan": {"lm_head": "sideways"}}},
            "ModelError",
            ("'sideways' is not known", "colwise"),
        ),
        (2, "gpt2", {"pipeline": {"stages": 2, "partition": [1, 1]}}, "PipelineError", ("partition",)),
        (2, "gpt2", {"pipeline": {"stages": 2, "partition": "type:Nothing"}}, "PipelineError", ("Nothing", "GPT2Block")),
    ),
)
def test_refused_before_anything_is_changed(
    world: int, model: str, changes: dict[str, Any], kind: str, words: tuple[str, ...]
) -> None:
    found = run_ranks(world, initialize_with, model, changes)
    for raised, message in found:
        assert raised == kind, message
        for word in words:
            assert word in message
        assert "Remedy" in message or "Use" in message or "Start" in message


def too_many_stages() -> tuple[str, str]:
    return attempt(lambda: build_layers(0, num_stages=3))


def test_more_stages_than_layers() -> None:
    for kind, message in run_ranks(3, too_many_stages):
        assert kind == "PipelineError"
        assert "2 layers" in message
        assert "3" in message


def partition_first() -> list[tuple[str, str]]:
    with zerorun.zero.Init():
        model, other = build("gpt2"), build("gpt2")
    topology = zerorun.Topology.create(2, dist.get_rank(), tensor=2, device_type="cpu")
    region = make_region(topology, torch.device("cpu"))

    def inside(make: Callable[[], Any]) -> None:
        with zerorun.zero.Init():
            make()

    part = split_pretrained(other, 2, dist.get_rank())
    found = [
        attempt(lambda: zerorun.initialize(part, {**make_config(3), "pipeline": {"stages": 2}})),
        attempt(lambda: zerorun.tensor_parallel.parallelize(model, region=region)),
        attempt(lambda: inside(lambda: zerorun.initialize(model, {**make_config(3), "tensor_parallel": {"size": 2}}))),
        attempt(lambda: inside(lambda: ColumnParallelLinear(4, 4, region=region))),
        attempt(lambda: inside(lambda: build_layers(4, num_stages=2))),
    ]
    topology.close()
    return found


def test_models_that_are_partitioned_already() -> None:
    for found in run_ranks(2, partition_first):
        for kind, message in found:
            assert kind == "ModelError"
            assert "zerorun.zero.Init partitions" in message


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": x, "odd": {"inner": iter([1])}}


def send_odd() -> tuple[str, str]:
    layers = [nn.Linear(4, 4), Odd(), lambda value: value["x"], nn.Linear(4, 1)]
    module = PipelineModule(layers, num_stages=2, loss_fn=lambda out, labels: out.mean(), partition_method="uniform")
    engine = zerorun.initialize(module, make_config(1))
    found = attempt(lambda: engine.train_batch(iter([(torch.ones(2, 4), None)])))
    engine.destroy()
    return found


def test_what_cannot_cross_is_named_on_both_sides() -> None:
    for kind, message in run_ranks(2, send_odd):
        assert kind == "PipelineError"
        assert "list_iterator (at ['odd']['inner']), which cannot be sent" in message


def cut_in_different_places() -> tuple[str, str]:
    """As by times that each rank has measured by itself."""
    layers = [nn.Linear(4, 4) for _ in range(6)]
    sizes = [4, 2] if dist.get_rank() == 0 else [2, 4]
    module = PipelineModule(layers, num_stages=2, loss_fn=lambda out, labels: out.mean(), partition_method=sizes)
    return attempt(lambda: zerorun.initialize(module, {**make_config(0), "pipeline": {"stages": 2}}))


def test_ranks_that_cut_in_different_places_are_told() -> None:
    """Else layers 2 and 3 would be on both stages, and nobody would know."""
    for kind, text in run_ranks(2, cut_in_different_places):
        assert kind == "ModelError"
        assert "rank 1 cuts the pipeline's layers at [0, 2, 6], and rank 0 at [0, 4, 6]. Remedy:" in text


def different_data() -> tuple[str, str]:
    engine = zerorun.initialize(build("llama"), {**make_config(1), "tensor_parallel": {"size": 2}})
    batch = batch_of(0, 0, dist.get_rank())

    def act() -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    found = attempt(act)
    weights = engine.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in build("llama").state_dict().items())
    engine.destroy()
    return found


def test_tensor_ranks_with_different_data_are_told() -> None:
    for kind, message in run_ranks(2, different_data):
        assert kind == "StepError"
        assert "ranks 0 and 1 were given different data at step 1" in message
        assert "engine.topology.data_parallel_rank" in message


def one_batch_apart(keys: dict[str, Any], part: str) -> list[tuple[str, str]]:
    """Whether ranks of one tensor group notice that ``part`` of the second batch differs, its shape included."""
    engine = zerorun.initialize(build("llama"), {**make_config(1), "tensor_parallel": {"size": 2, **keys}})
    found = []
    for step in range(2):
        batch = {**batch_of(step, 0, 0), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
        if step and dist.get_rank() == 1:
            batch = {n: v[:, :5] for n, v in batch.items()} if part == "shape" else batch
            if part != "shape":
                batch[part] = batch[part].clone()
                batch[part][1, -1] = 0

        def act(batch: dict[str, torch.Tensor] = batch) -> None:
            engine.backward(engine(**batch).loss)
            engine.step()

        found.append(attempt(act))
    engine.destroy()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("keys", ({}, {"vocab_parallel_loss": True}, {"sequence_parallel": True}))
@pytest.mark.parametrize("part", ("labels", "attention_mask", "shape"))
def test_any_difference_between_tensor_ranks_is_told(keys: dict[str, Any], part: str) -> None:
    for first, second in run_ranks(2, one_batch_apart, keys, part):
        assert not first[0]
        assert second[0] == "StepError"
        assert "ranks 0 and 1 were given different data at step 2" in second[1]


def different_stages() -> tuple[str, str]:
    engine = zerorun.initialize(build("gpt2"), {**make_config(1), "pipeline": {"stages": 2}})
    assert attempt(lambda: engine.train_batch(iter([batch_of(0, 0, 0)])))[0] == ""
    before = {name: param.clone() for name, param in engine.module.named_parameters()}
    found = attempt(lambda: engine.train_batch(iter([batch_of(0, 0, dist.get_rank())])))
    assert all(torch.equal(param, before[name]) for name, param in engine.module.named_parameters())
    assert attempt(lambda: engine.train_batch(iter([batch_of(0, 0, 0)])))[0] == ""  # it goes on
    engine.destroy()
    return found


def test_stages_with_different_data_are_told() -> None:
    for kind, message in run_ranks(2, different_stages):
        assert kind == "PipelineError"
        assert "ranks 0 and 1 read different labels at step 2" in message


def different_inputs() -> tuple[str, str]:
    """On the tensor ranks of the first stage; the labels are the same."""
    degrees = {"tensor_parallel": {"size": 2}, "pipeline": {"stages": 2}}
    engine = zerorun.initialize(build("gpt2"), {**make_config(1), **degrees})
    batch = {**batch_of(0, 0, engine.topology.tensor_rank), "labels": batch_of(0, 0, 0)["labels"]}
    found = attempt(lambda: engine.train_batch(iter([batch])))
    engine.destroy()
    return found


def test_tensor_ranks_of_a_stage_with_different_inputs_are_told() -> None:
    for kind, message in run_ranks(4, different_inputs):
        assert kind == "PipelineError"
        assert "ranks 0 and 1 read different inputs at step 1" in message


def run_as_if_whole() -> list[tuple[str, str]]:
    engine = zerorun.initialize(build("gpt2"), {**make_config(1), "pipeline": {"stages": 2}})
    whole = engine.module.whole_model
    ids = torch.ones(1, 3, dtype=torch.int64)
    found = [attempt(lambda: whole(ids)), attempt(lambda: whole.generate(ids, max_new_tokens=2, do_sample=False))]
    with pytest.raises(AttributeError, match="another pipeline stage"):
        _ = (whole.lm_head if dist.get_rank() == 0 else whole.transformer.wte).weight
    engine.destroy()
    return found


def test_a_stage_does_not_run_as_if_it_were_the_model() -> None:
    for found in run_ranks(2, run_as_if_whole):
        for kind, message in found:
            assert kind == "PipelineError"
            assert "cut into pipeline stages" in message


def run_out_of_data() -> list[tuple[str, str]]:
    engine = zerorun.initialize(build("gpt2"), {**make_config(2, accumulation=3), "pipeline": {"stages": 3}})
    data = iter(list(data_of(0, 3))[:4])
    engine.train_batch(data)
    calls: list[Callable[[], Any]] = [
        lambda: engine.train_batch(data),
        lambda: engine(batch_of(0, 0, 0)),
        lambda: engine.backward(torch.zeros(())),
        engine.step,
        lambda: engine.train_batch(),
    ]
    found = [attempt(call) for call in calls]
    engine.train_batch(data_of(0, 3))  # it goes on
    engine.destroy()
    return found


def test_ends_and_misuse_of_a_pipeline() -> None:
    for ended, *misused, no_data in run_ranks(3, run_out_of_data):
        assert ended[0] == "StopIteration"
        assert [kind for kind, _ in misused] == ["PipelineError"] * 3
        assert all("engine.train_batch(data_iter)" in message for _, message in misused)
        assert no_data[0] == "PipelineError"
        assert "need an iterator over micro-batches on the first and the last stage" in no_data[1]


def wrong_calls() -> list[tuple[str, str]]:
    stages = dist.get_world_size()
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    module = PipelineModule(layers, num_stages=stages, partition_method="uniform", loss_fn=lambda out, labels: out.square())
    engine = zerorun.initialize(module, make_config(1))
    batch = (torch.ones(2, 4), None)
    found = [attempt(lambda: engine.train_batch([batch]))]  # type: ignore[arg-type]
    _, logits = engine.eval_batch(iter([batch]), compute_loss=False, return_logits=True)
    assert len(logits) == engine.is_last_stage()
    if stages == 1:  # else one stage raises, and the launcher ends the others
        found.append(attempt(lambda: engine.eval_batch(iter([batch]))))
    engine.destroy()
    return found


@pytest.mark.parametrize("ranks", (1, 2))
def test_losses_that_are_no_scalar_and_data_that_is_no_iterator(ranks: int) -> None:
    for (kind, message), *evaluated in run_ranks(ranks, wrong_calls):
        assert kind == "PipelineError"
        assert "no iterator" in message
        assert [error for error, _ in evaluated] == ["PipelineError"] * (ranks == 1)
        assert all("must be a scalar, got (2, 4)" in text for _, text in evaluated)


def evaluate() -> tuple[float, float, int, list[float]]:
    torch.manual_seed(0)
    engine = zerorun.initialize(build_layers(4, num_stages=2), make_config(3, accumulation=2))
    batches = [pair_of(0, micro, engine.topology.data_parallel_rank) for micro in range(4)]
    loss, logits = engine.eval_batch(iter(batches), return_logits=True, num_micro_batches=4)
    again = engine.eval_batch(iter(batches), num_micro_batches=4)
    single = engine.eval_batch(iter(batches), reduce_output=None, num_micro_batches=4)
    engine.destroy()
    return float(loss), float(again), len(logits), [float(value) for value in single]


def test_evaluation_equals_one_process() -> None:
    model = build_layers(4, num_stages=1)
    with torch.no_grad():
        losses = [
            [float(model.loss_of(model(pair_of(0, micro, rank)[0]), pair_of(0, micro, rank))) for micro in range(4)]
            for rank in (0, 1)
        ]
    mean = sum(map(sum, losses)) / 8
    found = run_ranks(4, evaluate)
    for rank, (loss, again, count, single) in enumerate(found):
        assert loss == again == pytest.approx(mean, rel=1e-6)
        assert count == (4 if rank >= 2 else 0)
        assert single == pytest.approx(losses[rank - 2] if rank >= 2 else [], rel=1e-6)


def give_too_little() -> list[tuple[str, str]]:
    data = [pair_of(0, 0, sample)[0][0] for sample in range(3)]
    config = make_config(1, train_micro_batch_size_per_gpu=8, dataloader_drop_last=True)
    module = build_layers(2, num_stages=2)
    engine = zerorun.initialize(module, config, training_data=[(sample, sample) for sample in data])
    found = [attempt(engine.train_batch)]
    engine.set_dataloader([pair_of(0, 0, 0)] if dist.get_rank() == 0 else [])
    found += [attempt(engine.train_batch), attempt(lambda: engine.eval_batch(data_of(0, 1), reduce_output="sum"))]
    engine.set_dataloader([pair_of(0, 0, 0)])
    losses = [float(engine.train_batch()) for _ in range(2)]  # of one micro-batch, which is repeated
    assert losses[1] < losses[0]
    engine.destroy()
    return found


def test_data_without_a_micro_batch_is_told_on_all_stages() -> None:
    first, last = run_ranks(2, give_too_little)
    for found in (first, last):
        assert [kind for kind, _ in found] == ["PipelineError"] * 3
        assert "reduce_output='sum'" in found[2][1]
    assert all("no micro-batch for this rank" in message for _, message in (first[0], *last[:2]))
    assert "another stage got none" in first[1][1]


def freeze(kind: str) -> tuple[tuple[str, str], list[float], dict[str, torch.Tensor]]:
    """One name of a tied table; all names; or another dtype under one name."""
    module = build_layers(2, num_stages=2)
    for name, param in module.named_parameters():
        if name == "0.weight" and kind == "another dtype":
            param.data = param.data.double()
        elif name in (("0.weight", "3.weight") if kind == "all" else ("0.weight",)):
            param.requires_grad_(False)
    engines: list[Any] = []
    found = attempt(lambda: engines.append(zerorun.initialize(module, make_config(1, optimizer="SGD", accumulation=2))))
    losses = []
    for engine in engines:
        if kind == "all":  # the stages of others would wait for each other
            losses = [float(engine.train_batch(iter([pair_of(step, micro, 0) for micro in range(2)]))) for step in range(2)]
        engine.destroy()
    return found, losses, {name: param.detach().clone() for name, param in module.named_parameters()}


@pytest.mark.parametrize("kind", ("one", "another dtype"))
def test_copies_of_a_tied_parameter_that_differ_are_named(kind: str) -> None:
    words = ("0.weight (frozen", "3.weight (trained") if kind == "one" else ("torch.float64", "torch.float32")
    for (error, message), *_ in run_ranks(2, freeze, kind):
        assert error == "ModelError"
        assert all(word in message for word in ("0.weight is one parameter of several pipeline stages", *words))


def group(kind: str) -> tuple[str, str]:
    """The first copy of a tied table is in another group, or in none."""
    module = build_layers(2, num_stages=2)
    table = [param for name, param in module.named_parameters() if name == "0.weight"]
    groups = [{"params": [param for param in module.parameters() if param not in set(table)]}]
    if kind == "as good":
        groups[0]["weight_decay"] = 0.0
        groups.append({"params": table, "weight_decay": 0})
    elif kind != "none":
        groups.append({"params": table, "weight_decay": 0.5})
    if kind == "frozen":
        for name in ("0.weight", "3.weight"):
            if name in dict(module.named_parameters()):
                module.get_parameter(name).requires_grad_(False)

    def step() -> None:
        engine = zerorun.initialize(module, make_config(1), model_parameters=groups)
        engine.train_batch(iter([pair_of(0, 0, 0)]))

    return attempt(step)


@pytest.mark.parametrize("kind", ("frozen", "as good"))
def test_groups_by_which_copies_of_a_tied_parameter_stay_equal_are_taken(kind: str) -> None:
    assert run_ranks(2, group, kind) == [("", "nothing was raised")] * 2


@pytest.mark.parametrize(
    ("kind", "words"),
    (
        ("another", ("0.weight (weight_decay: 0.5)", "3.weight (weight_decay: None)")),
        ("none", ("0.weight (in a parameter group: no)", "3.weight (in a parameter group: yes)")),
    ),
)
def test_copies_of_a_tied_parameter_in_unlike_groups_are_named(kind: str, words: tuple[str, ...]) -> None:
    for error, message in run_ranks(2, group, kind):
        assert error == "ModelError"
        assert all(word in message for word in ("0.weight is one parameter of several pipeline stages", *words))


def treat(kind: str, names: tuple[str, ...]) -> tuple[list[tuple[str, str]], list[bool], list[str]]:
    """Step three times, and before the second treat copies of a tied table that have one of ``names``.

    Returns (errors, whether each step has left the weights alone, warnings).
    """
    said: list[str] = []
    module = build_layers(2, num_stages=2)
    engine = zerorun.initialize(module, make_config(1, optimizer="SGD", accumulation=2))
    found, kept = [], []
    with mock.patch("zerorun.engine.step_outcomes.warn_once", said.append):
        for step in range(3):
            for name in names if step == 1 else ():
                param = dict(engine.module.named_parameters()).get(name)
                if param is not None and kind == "freeze":
                    param.requires_grad_(False)
                elif param is not None and kind == "write":
                    with torch.no_grad():
                        param.mul_(0.5)
                elif param is not None and kind == "hook":
                    param.register_hook(lambda gradient: gradient * 0.5)
                elif param is not None and kind == "rate":
                    engine.optimizer.param_groups[0]["lr"] *= 2
            before = [param.detach().clone() for param in engine.module.parameters()]
            data = iter([pair_of(step, micro, 0) for micro in range(2)])
            found.append(attempt(lambda data=data: engine.train_batch(data)))
            kept.append(all(map(torch.equal, before, engine.module.parameters())))
    engine.destroy()
    return found, kept, said


@pytest.mark.parametrize(
    ("kind", "words"),
    (
        ("freeze", ("'0.weight' on stage 0 (frozen)", "'3.weight' on stage 1 (trained)")),
        ("write", ("'0.weight' on stage 0 (written to in place", "'3.weight' on stage 1 (not written to)")),
        ("rate", ("'0.weight' on stage 0 (lr=", "'3.weight' on stage 1 (lr=")),
    ),
)
def test_a_step_for_which_copies_of_a_tied_parameter_were_treated_unlike_is_not_taken(
    kind: str, words: tuple[str, ...]
) -> None:
    for found, kept, said in run_ranks(2, treat, kind, ("0.weight",)):
        (first, _), (error, message), (third, _) = found
        assert (first, error, third) == ("", "StepError", "" if kind == "write" else "StepError")
        assert kept == [False, True, kind != "write"]
        assert all(word in message for word in ("'0.weight' is one parameter of several pipeline stages", *words))
        assert not said


@pytest.mark.parametrize("kind", ("freeze", "write", "hook", "rate"))
def test_copies_of_a_tied_parameter_that_are_treated_alike_are_as_any_other(kind: str) -> None:
    for found, kept, said in run_ranks(2, treat, kind, ("0.weight", "3.weight")):
        assert [error for error, _ in found] == ["", "", ""]
        assert kept == [False, False, False]
        assert not said


def test_hooks_on_one_copy_of_a_tied_parameter_are_told_once() -> None:
    for found, kept, said in run_ranks(2, treat, "hook", ("0.weight",)):
        assert [error for error, _ in found] == ["", "", ""]
        assert kept == [False, False, False]
        assert len(said) == 1 and "'0.weight' on stage 0 (1 hooks), '3.weight' on stage 1 (0 hooks)" in said[0]


def test_a_tied_parameter_that_is_frozen_stays_as_in_one_process() -> None:
    model, losses = build_layers(2, num_stages=1), []
    model.get_parameter("0.weight").requires_grad_(False)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.05, momentum=0.9)
    for step in range(2):
        pairs = [pair_of(step, micro, 0) for micro in range(2)]
        loss = torch.stack([model.loss_of(model(pair[0]), pair) for pair in pairs]).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(model.named_parameters(remove_duplicate=False))
    for (error, message), found, weights in run_ranks(2, freeze, "all"):
        assert not error, message
        assert found == pytest.approx(losses, rel=1e-6)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-6, atol=1e-6)


def of_axes(topology: ProcessTopology, tensor: int, marked: bool = False) -> tuple[PipelineModule, dict[str, Any]]:
    """A pipeline of one stage whose layers ``tensor`` ranks divide by a plan. ``marked``: Megatron's mark of parts."""
    torch.manual_seed(5)
    layers = [nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)]
    layers[0].weight.model_parallel = marked  # type: ignore[assignment]
    module = PipelineModule(layers, topology=topology, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    plan = {"0": "colwise", "2": "rowwise"}
    return module, make_config(1, tensor_parallel={"size": tensor, "plan": plan} if tensor > 1 else {})


class NamedAxes:
    """A class of the script's own, with the names that DeepSpeed's has."""

    def __init__(self, processes: ProcessTopology) -> None:
        self.get_axis_names, self.get_dim = processes.get_axis_names, processes.get_dim
        self.get_coord = processes.get_coord


def axes_of_the_script() -> list[tuple[str, str]]:
    halves = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    cases = [
        of_axes(halves, 1),
        of_axes(halves, 1, marked=True),
        of_axes(halves, 2, marked=True),
        of_axes(NamedAxes(halves), 1),  # type: ignore[arg-type]
        of_axes(PipeDataParallelTopology(1, 2), 2),
        of_axes(ProcessTopology(["pipe", "expert"], [1, 2]), 1),
        of_axes(PipeDataParallelTopology(1, 4), 1),
    ]
    found = []
    for module, config in cases:
        before = {name: value.clone() for name, value in module.state_dict().items()}
        found.append(attempt(lambda module=module, config=config: zerorun.initialize(module, config)))  # type: ignore[misc]
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module, _ = of_axes(halves, 1)
    with_batch = {**make_config(1), "train_batch_size": 2}  # told of the axis first, and not of this number
    return [*found, attempt(lambda: zerorun.initialize(module, with_batch))]


def test_other_axes_than_the_engines_are_refused() -> None:
    """Each rank's own half of a layer was trained as one model of data-parallel ranks, with rank 0's half everywhere."""
    for found in run_ranks(2, axes_of_the_script):
        *ours, unknown, ranks, batch = found
        for size, (kind, message) in zip((1, 1, 2, 1, 2, 1), [*ours, batch], strict=True):
            assert kind == "TopologyError"
            assert f"tensor_parallel.size is {size}" in message and "'model' has degree" in message
            assert "Remedy: name one degree in both places, and give whole layers" in message
        assert "parameters are parts" in ours[2][1] and "parameters are parts" not in ours[0][1]
        assert "axis 'model' has degree 2" in ours[0][1] and "axis 'model' has degree 1" in ours[4][1]
        assert unknown[0] == "TopologyError" and "'expert'" in unknown[1]
        assert ranks[0] == "TopologyError" and "has 4 ranks, and the job has 2. Remedy" in ranks[1]


def axes_that_agree(model: int) -> dict[str, torch.Tensor]:
    """``model``: how many of the two ranks divide layers; a mark says nothing where that is one."""
    axes = ["pipe", "data", "model", "slice"]
    module, config = of_axes(ProcessTopology(axes, [1, 2 // model, model, 1]), model, marked=model == 1)
    engine = zerorun.initialize(module, config)
    for step in range(2):
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        engine.train_batch(iter([(inputs, inputs)]))
    weights: dict[str, torch.Tensor] = engine.state_dict()
    engine.destroy()
    return weights


@pytest.mark.parametrize("model", (1, 2))
def test_axes_that_are_the_engines_train_as_one_process(model: int) -> None:
    module, config = of_axes(PipeDataParallelTopology(1, 1), 1)
    optimizer = torch.optim.AdamW(module.parameters(), **config["optimizer"]["params"])
    for step in range(2):
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        nn.functional.mse_loss(module(inputs), inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_ranks(2, axes_that_agree, model):
        for name, value in module.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
