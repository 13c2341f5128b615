"""Sequences that threads divide inside unmodified models: losses and gradients are those of the whole model."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from contexts import BATCHES, MODELS, SIZES, batch_of, build, llama
from covering import by_day
from torch import nn
from torch.nn import functional

import zerorun
from zerorun.context_parallel import attention, divided_model
from zerorun.context_parallel.attention import AUTO, GATHER, ULYSSES
from zerorun.context_parallel.attention_exchange import fits
from zerorun.context_parallel.divisible_models import Divided, inner_model, refuse_heads, way_of
from zerorun.context_parallel.sequence_rows import Rows
from zerorun.errors import ConfigError, ModelError
from zerorun.tensor_parallel.thread_ranks import ThreadAxis, on_threads

# A model and a batch -> ranks and method, for the day: each pair of a model and a batch, of a batch and ranks comes once.
CHOICES = ((2, GATHER), (3, AUTO), (4, ULYSSES), (4, AUTO), (2, ULYSSES))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def whole(name: str, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = build(name).train()
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def divided(name: str, batch: dict[str, Any], ranks: int, method: str) -> list[dict[str, torch.Tensor]]:
    way = way_of(build(name), method)
    models = [build(name).train() for _ in range(ranks)]

    def work(axis: ThreadAxis) -> dict[str, torch.Tensor]:
        model = models[axis.rank]
        divided = Divided(model, way, axis, method)
        loss = model(**batch).loss
        loss.backward()
        divided.remove()
        found = {name: axis.all_reduce(grad, "test") / ranks for name, grad in gradients(model).items()}
        return {"loss": loss.detach(), **found}

    return on_threads(ranks, work)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """To 1e-6 of the largest gradient: some, as those of keys, are small differences of large numbers."""
    largest = max(float(value.abs().max()) for value in wanted.values())
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-6, atol=1e-6 * largest, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "method"),
    by_day(
        [(*pair, *choice) for pair in itertools.product(MODELS, BATCHES) for choice in (*CHOICES, (4, GATHER))],
        *((*pair, *CHOICES[at % 5]) for at, pair in enumerate(itertools.product(MODELS, BATCHES)) if at % 3 == 0),
        ("qwen3_moe", "short", 4, GATHER),
    ),
)
def test_equals_the_whole_model(name: str, kind: str, ranks: int, method: str) -> None:
    config: Any = build(name).config
    heads = config.num_attention_heads
    if method == ULYSSES and not fits(heads, getattr(config, "num_key_value_heads", None) or heads, ranks):
        method = AUTO
    batch = batch_of(kind, 0, 0, 0)
    wanted = whole(name, batch)
    for found in divided(name, batch, ranks, method):
        assert_same(found, wanted)


def test_the_mask_without_a_tensor_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """That which a GPU's kernels take."""
    monkeypatch.setattr(attention, "on_gpu", lambda where: True)
    batch = batch_of("plain", 0, 0, 0)
    for found in divided("llama", batch, 3, GATHER):
        assert_same(found, whole("llama", batch))


@pytest.mark.parametrize(("length", "ranks"), [(12, 3), (13, 4), (4, 4)])
def test_all_rows_of_a_mask_are_in_one_line(length: int, ranks: int) -> None:
    for rank in range(ranks):
        rows = Rows(length, ThreadAxis(rank, ranks, None))  # type: ignore[arg-type]
        mask = attention.backwards(rows, torch.float32)
        assert mask.untyped_storage().nbytes() == 4 * (rows.count - 1 + rows.end)
        seen = torch.arange(rows.begin, rows.end)[:, None] >= torch.arange(rows.end)
        assert torch.equal(mask[0, 0].flip(-1) == 0, seen)


def test_a_last_rank_without_labels_adds_nothing() -> None:
    """accelerate #3817: a mean over no label is NaN."""
    batch = batch_of("plain", 0, 0, 0)
    batch["labels"][:, 3:] = -100
    for found in divided("llama", batch, 4, AUTO):
        assert_same(found, whole("llama", batch))


def smoothed(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **ignored: Any) -> torch.Tensor:
    """A loss function of a script."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("name", ("llama", "granite"))
def test_another_loss_function_since_is_given_whole_logits(name: str) -> None:
    """And stays when the division is taken back."""
    batch, way = batch_of("plain", 0, 0, 0), way_of(build(name), AUTO)
    alone: Any = build(name).train()
    alone.loss_function = smoothed
    alone(**batch).loss.backward()
    models: list[Any] = [build(name).train() for _ in range(2)]

    def work(axis: ThreadAxis) -> dict[str, torch.Tensor]:
        model = models[axis.rank]
        divided = Divided(model, way, axis, AUTO)
        model.loss_function = smoothed
        loss = model(**batch).loss
        loss.backward()
        divided.remove()
        assert model.loss_function is smoothed
        found = {name: axis.all_reduce(grad, "test") / 2 for name, grad in gradients(model).items()}
        return {"loss": loss.detach(), **found}

    for found in on_threads(2, work):
        assert_same(found, {"loss": alone(**batch).loss.detach(), **gradients(alone)})


@pytest.mark.parametrize("hook", (lambda *given: given[-1] / 2, lambda *given: None), ids=("halves", "reads"))
def test_hooks_on_the_head_since_are_given_logits(hook: Any) -> None:
    """In training they were given a number, and what they returned was taken for the sum of losses."""
    batch, way = batch_of("plain", 0, 0, 0), way_of(build("llama"), AUTO)
    alone: Any = build("llama").train()
    alone.lm_head.register_forward_hook(hook)
    wanted = alone(**batch).loss
    wanted.backward()
    models: list[Any] = [build("llama").train() for _ in range(2)]

    def work(axis: ThreadAxis) -> dict[str, torch.Tensor]:
        model, shapes = models[axis.rank], []
        divided = Divided(model, way, axis, AUTO)
        model(**batch).loss.detach()
        model.lm_head.register_forward_hook(hook)
        model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(output.shape))
        loss = model(**batch).loss
        loss.backward()
        divided.remove()
        assert len(shapes[0]) == 3
        found = {name: axis.all_reduce(grad, "test") / 2 for name, grad in gradients(model).items()}
        return {"loss": loss.detach(), **found}

    for found in on_threads(2, work):
        assert_same(found, {"loss": wanted.detach(), **gradients(alone)})


def of_many_forwards(model: Any, reentrant: bool) -> dict[str, torch.Tensor]:
    """Gradients of forwards that differ in all that the blocks' hooks may remember; others come before the backward."""
    from transformers import DynamicCache

    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    lengths = {length: batch_of("plain", 0, 0, 0)["input_ids"][:, :length] for length in (1, 5, 8, 12)}
    total = model(lengths[8], labels=lengths[8]).loss
    for length, cache in ((12, None), (5, DynamicCache(config=model.config)), (1, None)):
        total = total + 0.01 * model(lengths[length], past_key_values=cache).logits.square().sum()
    model.eval()
    model.generate(lengths[5], max_new_tokens=2, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        model(lengths[1])
    model.train()
    total.backward()
    return {"loss": total.detach(), **gradients(model)}


@pytest.mark.parametrize(
    ("name", "reentrant"),
    by_day(itertools.product(("llama", "gpt2", "mixtral"), (False, True)), ("gpt2", True), ("llama", False)),
)
def test_blocks_that_the_model_recomputes_are_those_of_their_forward(name: str, reentrant: bool) -> None:
    """With labels and without, other lengths, one that is not divided, one with a cache, generation and an evaluation."""
    wanted, way = of_many_forwards(build(name).train(), reentrant), way_of(build(name), AUTO)
    models = [build(name).train() for _ in range(2)]

    def work(axis: ThreadAxis) -> dict[str, torch.Tensor]:
        divided = Divided(models[axis.rank], way, axis, AUTO)
        found = of_many_forwards(models[axis.rank], reentrant)
        divided.remove()
        loss = found.pop("loss")
        return {"loss": loss, **{name: axis.all_reduce(grad, "test") / 2 for name, grad in found.items()}}

    for found in on_threads(2, work):
        assert_same(found, wanted)


@pytest.mark.parametrize("between", ("another length", "a cache", "a short one"))
def test_a_recomputed_block_that_cannot_know_its_forward_is_an_error(between: str) -> None:
    """GPTBigCode tells its blocks nothing, unless there is a mask."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    config = GPTBigCodeConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    models = [GPTBigCodeForCausalLM(config).train() for _ in range(2)]
    way = way_of(models[0], AUTO)

    def work(axis: ThreadAxis) -> None:
        model = models[axis.rank]
        divided = Divided(model, way, axis, AUTO)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = batch_of("plain", 0, 0, 0)["input_ids"]
        for length in (12, 1):  # one that is not divided, too
            model(ids[:, :length]).logits.sum().backward()
        loss = model(ids, labels=ids).loss
        if between == "another length":
            loss = loss + model(ids[:, :8], labels=ids[:, :8]).loss
        else:
            with torch.no_grad():
                model(ids[:, : 5 if between == "a cache" else 1], use_cache=between == "a cache")
        with pytest.raises(ModelError, match=r"neither positions nor a mask .* Remedy: give the model an attention_mask"):
            loss.backward()
        divided.remove()

    on_threads(2, work)


def decoded(model: Any) -> torch.Tensor:
    """Logits by hand: a prompt, and then a token at a time, with the keys and values of what came before."""
    ids = batch_of("plain", 0, 0, 0)["input_ids"]
    with torch.no_grad():
        output = model.eval()(ids[:, :8], use_cache=True)
        found = [output.logits]
        for at in (8, 9):
            output = model(ids[:, at : at + 1], past_key_values=output.past_key_values, use_cache=True)
            found.append(output.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", by_day(MODELS, "llama", "gpt2"))
def test_decoding_by_hand_runs_whole(name: str) -> None:
    """Without use_cache an evaluation is divided. It then has no cache, and an attempt to use it says why."""
    wanted, way = decoded(build(name)), way_of(build(name), AUTO)
    models = [build(name).eval() for _ in range(2)]
    ids = batch_of("plain", 0, 0, 0)["input_ids"]

    def work(axis: ThreadAxis) -> torch.Tensor:
        model = models[axis.rank]
        divided = Divided(model, way, axis, AUTO)
        found = decoded(model)
        assert divided.division.rows is None
        with torch.no_grad():
            cache = model(ids).past_key_values
        assert divided.division.rows is not None
        with pytest.raises(ModelError, match=r"returns no keys and values for the next one.* Remedy: .* use_cache=True"):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(ModelError, match="no keys and values"):
            cache[0]
        assert type(copy.deepcopy(cache)) is type(cache)
        divided.remove()
        return found

    for found in on_threads(2, work):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_trained_prefix_is_told_to_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import DynamicCache

    said: list[str] = []
    monkeypatch.setattr(divided_model, "info_once", said.append)
    model = build("llama").train()
    ids = batch_of("plain", 0, 0, 0)["input_ids"]
    divided = Divided(model, way_of(build("llama"), AUTO), ThreadAxis(0, 2, None), AUTO)  # type: ignore[arg-type]
    model(ids, past_key_values=DynamicCache())
    divided.remove()
    assert len(said) == 1
    assert "is not divided: each rank runs it whole" in said[0]


@pytest.mark.nightly  # by day the tests above
def test_a_model_with_adapters_is_divided_inside() -> None:
    """PEFT calls the forward of the model that it wraps, not the model."""
    peft = pytest.importorskip("peft")
    models = [peft.get_peft_model(build("llama"), peft.LoraConfig(init_lora_weights=False)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    batch, way = batch_of("padded", 0, 0, 0), way_of(models[0], AUTO)

    def work(axis: ThreadAxis) -> dict[str, torch.Tensor]:
        model = models[1 + axis.rank]
        divided = Divided(inner_model(model), way, axis, AUTO)
        loss = model(**batch).loss
        loss.backward()
        divided.remove()
        return {"loss": loss.detach(), **{n: axis.all_reduce(g, "test") / 2 for n, g in gradients(model).items()}}

    loss = models[0](**batch).loss
    loss.backward()
    for found in on_threads(2, work):
        assert_same(found, {"loss": loss.detach(), **gradients(models[0])})


def refused(model: nn.Module) -> str:
    with pytest.raises(ModelError) as error:
        way_of(model, AUTO)
    return str(error.value)


def test_linear_attention_is_refused() -> None:
    """accelerate #4177: it would begin anew on each rank."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    keys = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **keys, num_experts=4, head_dim=8))
    assert "Qwen3NextForCausalLM cannot be divided: it has layers of linear_attention" in refused(model)


def test_alibi_is_refused() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4))
    assert "biases by the distance of tokens (ALiBi)" in refused(model)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "sequence_parallel_size": 2}
    with pytest.raises(ModelError, match="ALiBi"):  # nor is it estimated
        zerorun.estimate_memory(model, config, 2, device="cuda")
    assert zerorun.estimate_memory(llama(), config, 2, device="cuda").world_size == 2


def test_an_encoder_and_a_decoder_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4))
    assert "an encoder-decoder model attends from one sequence to another" in refused(model)


def test_a_last_block_that_joins_sequences_must_not_be_left_out() -> None:
    model: Any = build("gpt2")
    model.transformer.layerdrop = 0.3
    assert "layerdrop = 0.3 leaves out blocks at random, also the last one" in refused(model)


@pytest.mark.parametrize("kind", ("Hubert", "ViT"))
def test_models_without_an_embedding_of_tokens_are_refused(kind: str) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(hidden_size=32, intermediate_size=48, num_attention_heads=4)
    model = getattr(transformers, f"{kind}Model")(config)
    assert f"{kind}Model cannot be divided: it has no embedding of tokens" in refused(model)


def test_other_models_are_refused() -> None:
    assert "Linear cannot be divided: it is no model of transformers" in refused(nn.Linear(2, 2))


class Mixing(nn.Module):
    """Adds to each token what the one before it is: nothing by which one could tell it is there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + x.roll(1, 1))


def test_what_mixes_tokens_is_found_by_trying() -> None:
    model: Any = llama()
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    assert "a small copy of it, over 2 ranks, gives another value for the loss" in refused(model)


def test_heads_that_do_not_fit_are_named() -> None:
    with pytest.raises(ModelError, match="4 context ranks cannot divide 6 heads of queries and 3 of keys and values"):
        divided("llama, 3 of 6 heads", batch_of("plain", 0, 0, 0), 4, ULYSSES)
    with pytest.raises(
        ConfigError, match=r'context_parallel.method = "ulysses": 2 tensor x 4 context ranks cannot divide 4'
    ):
        refuse_heads(llama(), 2, 4)
