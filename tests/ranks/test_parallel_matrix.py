"""The matrix: stage x tensor x pipe x data x accumulation, of unmodified Hugging Face models, equals one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import by_day
from harness import run_ranks
from torch import nn
from training import make_config, merged

import zerorun

STEPS, BATCH, LENGTH, VOCABULARY = 2, 2, 6, 61


def llama() -> nn.Module:
    """Grouped-query attention, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def gpt2() -> nn.Module:
    """Fused queries, keys and values; Conv1D; learned positions; tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "gpt2": gpt2}


def build(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[name]()


def batch_of(step: int, micro: int, rank: int, lengths: Sequence[int] = (LENGTH,)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    ids = torch.randint(VOCABULARY, (BATCH, lengths[micro % len(lengths)]), generator=generator)
    return {"input_ids": ids, "labels": ids}


def data_of(rank: int, accumulation: int, lengths: Sequence[int] = (LENGTH,)) -> Iterator[dict[str, torch.Tensor]]:
    for step, micro in itertools.product(range(STEPS), range(accumulation)):
        yield batch_of(step, micro, rank, lengths)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, eps=1e-4, weight_decay=0.1)


def reference(
    name: str,
    data: int,
    accumulation: int,
    build: Callable[[str], nn.Module] = build,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = adamw,
    lengths: Sequence[int] = (LENGTH,),
) -> dict[str, Any]:
    model = build(name)
    optimizer = optimizer_of(model.parameters())
    norms, losses = [], []
    for step in range(STEPS):
        total = 0.0
        for micro, rank in itertools.product(range(accumulation), range(data)):
            loss = model(**batch_of(step, micro, rank, lengths)).loss / (accumulation * data)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}
    return {"losses": losses, "norms": norms, "weights": weights}


def train(
    name: str,
    tensor: int,
    pipe: int,
    config: dict[str, Any],
    build: Callable[[str], nn.Module] = build,
    lengths: Sequence[int] = (LENGTH,),
) -> dict[str, Any]:
    degrees = {"tensor_parallel": {"size": tensor}, "pipeline": {"stages": pipe}}
    engine = zerorun.initialize(build(name), merged(config, degrees))
    accumulation, topology = engine.gradient_accumulation_steps(), engine.topology
    data = data_of(topology.data_parallel_rank, accumulation, lengths)
    norms, losses = [], []
    for _ in range(STEPS):
        losses.append(one_step(engine, data, accumulation, pipe))
        norms.append(engine.get_global_grad_norm())
    module = engine.module
    engine.destroy()
    weights = {name: value.detach().clone() for name, value in module.named_parameters(remove_duplicate=False)}
    return {"losses": losses, "norms": norms, "weights": weights}


def one_step(engine: Any, data: Iterator[dict[str, torch.Tensor]], accumulation: int, pipe: int) -> float:
    if pipe > 1:
        return float(engine.train_batch(data))
    total = 0.0
    for _ in range(accumulation):
        loss = engine(**next(data)).loss
        total += loss.item() / accumulation
        engine.backward(loss)
        engine.step()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, total)
    return sum(found) / len(found)


def compare(found: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    seen = set()
    for result in found:
        for kind in ("losses", "norms"):
            torch.testing.assert_close(torch.tensor(result[kind]), torch.tensor(expected[kind]), rtol=tolerance, atol=0)
        for name, value in result["weights"].items():
            torch.testing.assert_close(value, expected["weights"][name], rtol=tolerance, atol=2 * tolerance)
            seen.add(name)
    assert seen == set(expected["weights"])


# Every pair of values comes together in one of these; the others are for the night.
PAIRWISE = {
    (0, 1, 2, 2, 1),
    (0, 2, 1, 1, 1),
    (0, 2, 3, 1, 4),
    (1, 1, 2, 1, 4),
    (1, 1, 3, 2, 1),
    (1, 2, 1, 1, 1),
    (2, 1, 3, 1, 4),
    (2, 2, 1, 1, 1),
    (2, 2, 2, 2, 1),
    (3, 1, 2, 1, 4),
    (3, 1, 3, 1, 1),
    (3, 2, 1, 2, 4),
    (3, 2, 2, 2, 4),
}
CELLS = by_day(
    (
        (name, *cell)
        for cell in itertools.product((0, 1, 2, 3), (1, 2), (1, 2, 3), (1, 2), (1, 4))
        if cell[1] * cell[2] > 1
        for name in MODELS
    ),
    *((tuple(MODELS)[index % 2], *cell) for index, cell in enumerate(sorted(PAIRWISE))),
)


@pytest.mark.parametrize(("name", "stage", "tensor", "pipe", "data", "accumulation"), CELLS)
def test_equals_one_process(name: str, stage: int, tensor: int, pipe: int, data: int, accumulation: int) -> None:
    config = make_config(stage, accumulation=accumulation, clip=0.5)
    found = run_ranks(tensor * pipe * data, train, name, tensor, pipe, config)
    compare(found, reference(name, data, accumulation))


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
BEYOND: dict[str, tuple[str, int, int, int, int, dict[str, Any]]] = {  # model, stage, tensor, pipe, data, further keys
    "sequence": ("llama", 3, 2, 1, 2, {"tensor_parallel": {"sequence_parallel": True}}),
    "sequence, pipeline": ("llama", 3, 2, 2, 2, {"tensor_parallel": {"sequence_parallel": True}}),
    "offload": ("llama", 3, 1, 2, 2, OFFLOAD),
    "offload, divided": ("llama", 3, 2, 2, 2, OFFLOAD),
    "recomputation": ("gpt2", 2, 2, 2, 1, {"activation_checkpointing": {"policy": "full"}}),
    "sequence, recomputed": (
        "llama",
        1,
        2,
        2,
        1,
        {"activation_checkpointing": {"policy": "full"}, "tensor_parallel": {"sequence_parallel": True}},
    ),
    "hybrid": ("llama", 3, 1, 2, 4, {"zero_optimization": {"shard_degree": 2}}),
    "gpipe": ("gpt2", 3, 2, 2, 1, {"pipeline": {"schedule": "gpipe"}}),
    "zero bubble": ("gpt2", 2, 2, 2, 2, {"pipeline": {"schedule": "zero_bubble"}}),
    "zero bubble, recomputed": (
        "llama",
        3,
        1,
        3,
        1,
        {"pipeline": {"schedule": "zero_bubble"}, "activation_checkpointing": {"policy": "full"}},
    ),
}


@pytest.mark.parametrize("which", by_day(BEYOND, "sequence", "offload", "hybrid", "zero bubble, recomputed"))
def test_what_goes_with_it_equals_one_process(which: str) -> None:
    name, stage, tensor, pipe, data, changes = BEYOND[which]
    config = merged(make_config(stage, accumulation=3, clip=0.5), changes)
    compare(run_ranks(tensor * pipe * data, train, name, tensor, pipe, config), reference(name, data, 3))


@pytest.mark.parametrize(
    ("name", "schedule", "lengths"),
    (
        ("llama", "interleaved", (4, 5, 6, 7)),
        pytest.param("gpt2", "1f1b", (4, 6), marks=pytest.mark.nightly),
        pytest.param("llama", "zero_bubble", (4, 5, 6, 7), marks=pytest.mark.nightly),
    ),
)
def test_sequences_of_several_lengths_are_divided_and_recomputed(
    name: str, schedule: str, lengths: tuple[int, ...]
) -> None:
    """A block that is recomputed belongs to an earlier micro-batch. A stage with two chunks divides and gathers in each."""
    pipeline = {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
    keys = {"tensor_parallel": {"sequence_parallel": True}, "activation_checkpointing": {"policy": "full"}}
    config = merged(make_config(1, accumulation=4, clip=0.5, pipeline=pipeline), keys)
    expected = reference(name, 1, 4, lengths=lengths)
    compare(run_ranks(4, train, name, 2, 2, config, build, lengths), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pipe", (1, 2))
@pytest.mark.parametrize(
    "keys", (("sequence_parallel",), ("vocab_parallel_loss",), ("sequence_parallel", "vocab_parallel_loss"))
)
def test_other_ways_to_divide_equal_one_process(name: str, pipe: int, keys: tuple[str, ...]) -> None:
    """Of a pipeline the last stage alone has the head, and the divided logits."""
    config = make_config(1, accumulation=2, clip=0.5, tensor_parallel=dict.fromkeys(keys, True))
    compare(run_ranks(2 * pipe, train, name, 2, pipe, config), reference(name, 1, 2))


def logits_of(pipe: int) -> tuple[float, list[torch.Tensor]]:
    """The loss and the logits of an evaluation, after a step."""
    degrees = {"tensor_parallel": {"size": 2, "vocab_parallel_loss": True}, "pipeline": {"stages": pipe}}
    engine = zerorun.initialize(build("llama"), make_config(1, clip=0.5, **degrees))
    one_step(engine, data_of(0, 1), 1, pipe)
    if pipe > 1:
        loss, outputs = engine.eval_batch(iter([batch_of(1, 0, 0)]), return_logits=True)
    else:
        with torch.no_grad():
            outputs = [engine.eval()(**batch_of(1, 0, 0))]
        loss = outputs[0].loss
    logits = [output.logits.clone() for output in outputs]
    module = getattr(engine.module, "whole_model", engine.module)
    engine.destroy()
    assert not {"forward", "_loss_function"} & {*vars(module)}
    return float(loss), logits


@pytest.mark.parametrize("pipe", (1, 2))
def test_logits_of_an_evaluation_are_whole(pipe: int) -> None:
    model = build("llama")
    optimizer = adamw(model.parameters())
    model(**batch_of(0, 0, 0)).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    with torch.no_grad():
        expected = model.eval()(**batch_of(1, 0, 0))
    found = run_ranks(2 * pipe, logits_of, pipe)
    assert [len(logits) for _, logits in found] == [0] * (2 * pipe - 2) + [1, 1]
    for loss, logits in found:
        assert loss == pytest.approx(float(expected.loss), rel=1e-5)
        for values in logits:
            torch.testing.assert_close(values, expected.logits, rtol=1e-4, atol=1e-5)


# By day the two stages and schedules that differ most, of which every bit can be compared.
SCHEDULED = (((1, "gpipe"), (3, "1f1b")), ((1, "gpipe"), (2, "1f1b"), (3, "zero_bubble")))


@pytest.mark.parametrize("precision", ("bf16", pytest.param("fp16", marks=pytest.mark.nightly)))
@pytest.mark.parametrize("rows", (SCHEDULED[0], pytest.param(SCHEDULED[1], marks=pytest.mark.nightly)))
@pytest.mark.parametrize("tensor", by_day((1, 2), 1))
def test_half_precision_has_the_same_bits_at_every_stage(
    tensor: int, rows: tuple[tuple[int, str], ...], precision: str
) -> None:
    """And at every schedule that adds gradients in the same order."""
    first: list[dict[str, Any]] | None = None
    for stage, schedule in rows:
        config = make_config(stage, accumulation=3, clip=0.5, precision=precision, pipeline={"schedule": schedule})
        found = run_ranks(4 * tensor, train, "llama", tensor, 2, config)
        first = first or found
        for mine, theirs in zip(found, first, strict=True):
            assert mine["losses"] == theirs["losses"], (stage, schedule)
            if schedule != "zero_bubble":  # which adds those of weights and of norms apart from each other
                assert mine["norms"] == theirs["norms"]
                torch.testing.assert_close(mine["weights"], theirs["weights"], rtol=0, atol=0)
    expected = reference("llama", 2, 3)
    assert first is not None
    assert first[0]["losses"] == pytest.approx(expected["losses"], rel=0.02)
    assert first[0]["norms"] == pytest.approx(expected["norms"], rel=0.05)
