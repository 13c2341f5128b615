"""Sequences that ranks divide: losses, norms, gradients and weights are those of one process, at every stage."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contexts import BATCH, BATCHES, MODELS, batch_of, build, llama, padded, plain
from covering import by_day
from harness import run_ranks
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training import make_config, merged

import zerorun
from zerorun.context_parallel import attention
from zerorun.context_parallel.shard_loss import InModel
from zerorun.errors import ModelError
from zerorun.zero import safe_get_full_grad

STEPS = 2


# -- one process, and many ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """``ranks``: data-parallel ones; ``context`` of them divide each sequence."""

    model: str = "llama"
    batch: str = "plain"
    stage: int = 1
    context: int = 2
    ranks: int = 2
    accumulation: int = 1
    method: str = "auto"
    optimizer: str = "AdamW"
    weighted: bool = False
    unlabelled: bool = False  # no target counts in the first micro-batch of each step
    tensor: int = 1
    pipe: int = 1
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def world(self) -> int:
        return self.ranks * self.tensor * self.pipe

    @property
    def batches(self) -> int:
        return self.ranks // self.context

    @property
    def config(self) -> dict[str, Any]:
        config = make_config(self.stage, accumulation=self.accumulation, clip=0.5, optimizer=self.optimizer)
        sizes = {"sequence_parallel_size": self.context, "context_parallel": {"method": self.method}}
        sizes |= {"tensor_parallel": {"size": self.tensor}, "pipeline": {"stages": self.pipe}}
        return merged(merged(config, sizes), dict(self.changes))


def micro_batch(training: Training, step: int, micro: int, rank: int) -> dict[str, Any]:
    batch = batch_of(training.batch, step, micro, rank)
    if training.unlabelled and micro == 0:
        batch["labels"][:] = -100
    return batch


def weight_of(batch: dict[str, Any]) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def reference(training: Training) -> dict[str, Any]:
    from reference import OPTIMIZERS

    model = build(training.model).train()
    kind, options = OPTIMIZERS[training.optimizer]
    optimizer = kind(model.parameters(), **options)
    norms, losses, gradients = [], [], {}
    for step in range(STEPS):
        places = itertools.product(range(training.accumulation), range(training.batches))
        batches = [micro_batch(training, step, micro, rank) for micro, rank in places]
        weights = [float(weight_of(batch)) if training.weighted else 1.0 for batch in batches]
        total = 0.0
        for batch, weight in zip(batches, weights, strict=True):
            loss = model(**batch).loss * weight / sum(weights)
            loss.backward()
            total += loss.item() if weight else 0.0
        losses.append(total)
        gradients = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": found}


def train(training: Training, model: nn.Module | None = None) -> dict[str, Any]:
    """``model``: if not that of ``training``."""
    return train_by(zerorun.initialize(model or build(training.model).train(), training.config), training)


def train_by(engine: Any, training: Training) -> dict[str, Any]:
    """Train by a new engine, which is destroyed."""
    topology = engine.topology
    assert engine.train_batch_size() == 2 * training.accumulation * training.batches
    norms, losses, gradients = [], [], {}
    for step in range(STEPS):
        rank = topology.data_parallel_rank
        batches = [micro_batch(training, step, micro, rank) for micro in range(training.accumulation)]
        if training.pipe > 1:
            losses.append(float(engine.train_batch(iter(batches))))
        else:
            total, gradients = one_step(engine, batches, weighted=training.weighted)
            losses.append(total)
        norms.append(engine.get_global_grad_norm())
    if training.pipe == 1:
        sent = "tensor: cross-entropy" in engine.communication_report()
        assert sent is bool(dict(training.changes).get("tensor_parallel", {}).get("vocab_parallel_loss"))
    module = engine.module
    engine.destroy()
    weights = {name: value.detach().clone() for name, value in module.named_parameters(remove_duplicate=False)}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def one_step(
    engine: zerorun.Engine, batches: list[dict[str, Any]], *, weighted: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss of a step, and its gradients before clipping."""
    sums, gradients = torch.zeros(2, dtype=torch.float64), {}
    for batch in batches:
        loss = engine(**batch).loss
        weight = weight_of(batch) if weighted else None
        share = 1.0 if weight is None else float(weight)
        assert bool(loss.isnan()) is (share == 0)
        sums += torch.tensor([loss.item() * share if share else 0.0, share])
        engine.backward(loss, weight=weight)
        if engine.is_gradient_accumulation_boundary():
            gradients = {name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()}
        engine.step()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]), gradients


def compare(found: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    for result in found:
        for kind in ("losses", "norms"):
            torch.testing.assert_close(torch.tensor(result[kind]), torch.tensor(expected[kind]), rtol=tolerance, atol=0)
        for kind in ("gradients", "weights"):
            largest = max([1.0, *(float(value.abs().max()) for value in expected[kind].values())])
            for name, value in result[kind].items():
                torch.testing.assert_close(value, expected[kind][name], rtol=tolerance, atol=2 * tolerance * largest)
    assert {name for result in found for name in result["weights"]} == set(expected["weights"])


_OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
_FULL: tuple[tuple[str, Any], ...] = (("activation_checkpointing", {"policy": "full"}),)
_DIVIDED_LOGITS: tuple[tuple[str, Any], ...] = (("tensor_parallel", {"vocab_parallel_loss": True}),)
CASES = {
    "stage 0, odd": Training(stage=0, batch="padded"),  # DeepSpeed #7833: it has no stage 0
    # ALST's documented loop; DeepSpeed #5248, #5555, Megatron-LM #673.
    "stage 1, doubled": Training("llama, eager", stage=1, batch="counted", optimizer="SGD"),
    "stage 2, four": Training(stage=2, context=4, ranks=4, batch="packed", method="ulysses"),
    "stage 3, two batches": Training("mixtral", stage=3, ranks=4, batch="padded", accumulation=2),
    "tensor": Training(tensor=2, batch="padded"),
    "pipe": Training("gpt2", pipe=2, batch="padded", accumulation=2),
    "no targets": Training(accumulation=2, weighted=True, unlabelled=True),
    "no targets, divided logits": Training(
        context=1, ranks=1, tensor=2, changes=_DIVIDED_LOGITS, accumulation=2, weighted=True, unlabelled=True
    ),
    "no targets, both": Training(
        stage=3, tensor=2, changes=_DIVIDED_LOGITS, accumulation=2, weighted=True, unlabelled=True
    ),
    # For the night.
    "offload, recomputed": Training(
        "deepseek", stage=3, changes=(("zero_optimization", _OFFLOAD), *_FULL), weighted=True, batch="padded"
    ),
    "kept on the host": Training(changes=(("activation_checkpointing", {"policy": "full", "cpu_checkpointing": True}),)),
    "hybrid": Training(
        stage=3,
        ranks=4,
        changes=(("zero_optimization", {"shard_degree": 2}),),
        batch="padded",
        weighted=True,
        accumulation=2,
    ),
    "short": Training("qwen3_moe", stage=2, context=4, ranks=4, batch="short"),
    "sinks": Training("gpt_oss", stage=3, context=4, ranks=4, batch="packed", method="ulysses"),
    "divided logits": Training(stage=3, tensor=2, changes=_DIVIDED_LOGITS, batch="padded"),
    "no targets, whole logits": Training("granite", stage=3, accumulation=2, weighted=True, unlabelled=True),
    "zero bubble": Training(
        stage=2, pipe=2, accumulation=2, batch="padded", changes=(*_FULL, ("pipeline", {"schedule": "zero_bubble"}))
    ),
    "compiled": Training(changes=(("compile", {"enabled": True, "backend": "eager"}),), batch="padded"),
    "compiled, recomputed": Training(
        stage=3, changes=(("compile", {"enabled": True, "backend": "eager"}), *_FULL), method="ulysses"
    ),
    "tensor and pipe": Training(stage=3, tensor=2, pipe=2, accumulation=2, batch="packed"),
}
MATRIX = tuple(itertools.product(range(4), ((2, 2), (2, 4), (4, 4)), ((1, 1), (2, 1), (1, 2))))
for _number, (_stage, (_context, _ranks), (_tensor, _pipe)) in enumerate(MATRIX):
    _models = [name for name in MODELS if _pipe == 1 or name != "mixtral"]  # whose loss needs all layers
    _name, _batch = _models[_number % len(_models)], tuple(BATCHES)[_number % len(BATCHES)]
    if not (_tensor > 1 and _name in ("llama, 3 of 6 heads", "gpt_oss")):
        CASES[f"{_stage} {_context} of {_ranks}, {_tensor} x {_pipe}"] = Training(
            _name, _batch, _stage, _context, _ranks, accumulation=_pipe, tensor=_tensor, pipe=_pipe
        )


@pytest.mark.parametrize("which", by_day(CASES, *tuple(CASES)[1:7]))
def test_equals_one_process(which: str) -> None:
    training = CASES[which]
    compare(run_ranks(training.world, train, training), reference(training))


@pytest.mark.nightly
def test_a_sum_is_that_of_batches_not_of_ranks() -> None:
    """Two batches, each on two ranks: the sum of gradients is twice their mean."""
    training = Training(ranks=4, batch="padded", changes=(("gradient_allreduce_op", "sum"),))
    found, expected = run_ranks(4, train, training), reference(training)
    assert found[0]["norms"][0] == pytest.approx(2 * expected["norms"][0], rel=1e-6)


def replaced_in(model: nn.Module) -> set[str]:
    """The modules of ``model`` that have a forward, or a loss function, of their own."""
    return {name for name, part in model.named_modules() if {"forward", "_loss_function"} & {*vars(part)}}


def destroyed_again(training: Training) -> dict[str, Any]:
    """An engine is destroyed once more, as by a ``finally``, when its model has got another one."""
    first = zerorun.initialize(build(training.model).train(), training.config)
    first.destroy()
    second = zerorun.initialize(first.module, training.config)
    before = replaced_in(second.module)
    assert before
    first.destroy()
    assert replaced_in(second.module) == before
    return train_by(second, training)


AGAIN = {
    "sequences": Training(),
    "layers": Training(context=1, ranks=1, tensor=2, changes=_DIVIDED_LOGITS),
    "split backwards": Training(
        context=1, ranks=1, pipe=2, accumulation=2, changes=(("pipeline", {"schedule": "zero_bubble"}),)
    ),
}


@pytest.mark.parametrize("which", AGAIN)
def test_an_engine_that_is_destroyed_again_changes_nothing(which: str) -> None:
    compare(run_ranks(AGAIN[which].world, destroyed_again, AGAIN[which]), reference(AGAIN[which]))


def test_pipeline_stages_refuse_another_loss_function_since() -> None:
    """The last stage alone raises: the launcher ends the others."""
    model = build(Training("gpt2").model)
    division: Any = SimpleNamespace(in_stages=True, way=SimpleNamespace(divides=lambda module: True))
    loss: Any = SimpleNamespace(is_asked=False)
    forward, ids = InModel(model, division, loss), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ModelError, match=r"sequence_parallel_size.* leave loss_function as it was"):
        forward(input_ids=ids, labels=ids)


def by_the_mask_of_a_gpu(training: Training) -> dict[str, Any]:
    """The mask that names itself, as on a GPU, in a forward that is looked at."""
    there, attention.on_gpu = attention.on_gpu, lambda tensor: True  # type: ignore[assignment]
    try:
        with FlopCounterMode(display=False):
            return train(training)
    finally:
        attention.on_gpu = there


def test_the_mask_of_a_gpu_equals_one_process() -> None:
    training = Training(method="gather", batch="plain")
    compare(run_ranks(2, by_the_mask_of_a_gpu, training), reference(training))


# -- bytes -------------------------------------------------------------------------------------------------------


def traffic(method: str, heads: int, key_heads: int, length: int) -> dict[str, int]:
    """Bytes by label of one forward and backward, as one block sends."""
    torch.manual_seed(5)
    model = llama(num_attention_heads=heads, num_key_value_heads=key_heads, hidden_size=8 * heads, num_hidden_layers=2)
    config = {"sequence_parallel_size": dist.get_world_size(), "context_parallel": {"method": method}}
    engine = zerorun.initialize(model, merged(make_config(0), config))
    engine.backward(engine(**plain(torch.Generator().manual_seed(0), length)).loss)
    engine.step()
    found = {label: numbers["bytes"] for label, numbers in engine.communication_report().items()}
    engine.destroy()
    return {label: count // 2 for label, count in found.items() if label.startswith("context: ") and "loss" not in label}


@pytest.mark.parametrize(
    ("ranks", "method", "heads", "key_heads"),
    by_day(
        itertools.product((2, 4), ("ulysses", "gather", "auto"), (4,), (1, 2, 4)),
        (4, "ulysses", 4, 2),
        (2, "auto", 4, 4),
        (4, "auto", 4, 4),
    ),
)
def test_bytes_are_those_of_the_formulas(ranks: int, method: str, heads: int, key_heads: int) -> None:
    """Per layer: (P-1)/P^2 * B*S*D * 2(h + max(k, P)) each way, or (P-1)/P * B*S*D * 2k; "auto" takes the smaller one."""
    length, width, size = 16, 8, 4
    whole = BATCH * length * width * size
    by_heads = (ranks - 1) * whole * 2 * (heads + max(key_heads, ranks)) // ranks**2
    by_rows = (ranks - 1) * whole * 2 * key_heads // ranks
    wanted = {"ulysses": by_heads, "gather": by_rows, "auto": min(by_heads, by_rows)}[method]
    for found in run_ranks(ranks, traffic, method, heads, key_heads, length):
        for way in ("forward", "backward"):
            assert sum(count for label, count in found.items() if label.endswith(way)) == wanted, found


# -- other calls than a step -------------------------------------------------------------------------------------


def other_calls(stage: int) -> None:
    """Evaluation, a loss of one's own from logits, generation, and two lengths before their backward."""
    expected, engine = build("mixtral").train(), None
    engine = zerorun.initialize(build("mixtral").train(), Training(stage=stage).config)
    batch = padded(torch.Generator().manual_seed(3))
    unlabelled = {name: value for name, value in batch.items() if name != "labels"}
    close = {"rtol": 1e-5, "atol": 1e-5}

    engine.eval()
    with torch.no_grad():
        found, wanted = engine(**batch), expected.eval()(**batch)
        torch.testing.assert_close(found.loss, wanted.loss, **close)
        torch.testing.assert_close(found.logits, wanted.logits, **close)
        torch.testing.assert_close(found.router_logits[1], wanted.router_logits[1], **close)
        hidden = [model(**batch, output_hidden_states=True).hidden_states for model in (engine, expected)]
        for ours, theirs in zip(*hidden, strict=True):
            torch.testing.assert_close(ours, theirs, **close)
        if stage < 3:
            ids = batch["input_ids"][:, :4]
            options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(engine.module.generate(ids, **options), expected.generate(ids, **options))
    engine.train()
    expected.train()

    found = engine(**batch)
    with pytest.raises(zerorun.errors.ModelError, match="leave labels out of the call"):
        found.logits[..., :-1, :]
    losses = []
    for model in (engine, expected):
        own = model(**unlabelled).logits.float()
        other = model(**plain(torch.Generator().manual_seed(4), 5)).loss  # of another length, before the backward
        losses.append(nn.functional.cross_entropy(own[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()) + other)
    torch.testing.assert_close(*losses, **close)
    engine.backward(losses[0])
    losses[1].backward()
    for name, param in expected.named_parameters():
        torch.testing.assert_close(safe_get_full_grad(engine.module.get_parameter(name)), param.grad, **close)
    engine.step()
    module = engine.module
    engine.destroy()
    assert "forward" not in vars(module)
    module(**batch).loss.backward()


@pytest.mark.parametrize("stage", by_day((0, 1, 2, 3), 2))
def test_other_calls_equal_one_process(stage: int) -> None:
    run_ranks(2, other_calls, stage)


def with_other_data() -> None:
    engine = zerorun.initialize(build("llama"), Training().config)
    ids = torch.full((2, 8), 1 + dist.get_rank())
    with pytest.raises(zerorun.errors.StepError, match=r"ranks 0 and 1 were given different data .* divide the same seq"):
        engine(input_ids=ids, labels=ids)
    engine.destroy()


def test_other_data_in_a_context_group_is_an_error() -> None:
    run_ranks(2, with_other_data)
