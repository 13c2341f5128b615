"""Models divided by plans, on threads: loss and all whole gradients equal to the undivided model's, and bytes exchanged."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from covering import by_day
from torch import nn
from torch.nn import functional

from zerorun.distributed.tensor_shard import partial_of, shards_of
from zerorun.errors import ModelError, VocabularyError
from zerorun.tensor_parallel import infer_plan, parallelize
from zerorun.tensor_parallel.collectives import Region
from zerorun.tensor_parallel.layers import whole_of
from zerorun.tensor_parallel.thread_ranks import ThreadAxis, on_threads

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
VOCABULARY, TOKENS = 51, 7
PLAIN: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON: dict[str, Any] = {
    **PLAIN,
    "hidden_size": 32,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
OLD: dict[str, Any] = {**PLAIN, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "attn_pdrop": 0, "resid_pdrop": 0}
THREE: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}


def configuration(name: str) -> Any:
    t = transformers
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**COMMON),
        "llama, tied": lambda: t.LlamaConfig(**COMMON, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        "llama, 3 key-value heads": lambda: t.LlamaConfig(**{**COMMON, **THREE}),
        "qwen2": lambda: t.Qwen2Config(**COMMON),
        "qwen3": lambda: t.Qwen3Config(**COMMON, head_dim=8),
        "mistral": lambda: t.MistralConfig(**COMMON),
        "gemma2": lambda: t.Gemma2Config(**COMMON, head_dim=8, query_pre_attn_scalar=8),
        "phi3": lambda: t.Phi3Config(**COMMON),
        "gpt2": lambda: t.GPT2Config(**PLAIN, **GPT2, embd_pdrop=0),
        "gpt-neox": lambda: t.GPTNeoXConfig(**OLD, intermediate_size=42),
        "opt": lambda: t.OPTConfig(**OLD, ffn_dim=42, word_embed_proj_dim=32, dropout=0),
        "bert": lambda: t.BertConfig(**OLD, intermediate_size=42, is_decoder=True),
        "persimmon": lambda: t.PersimmonConfig(**{**COMMON, "num_key_value_heads": 4}),
        "mixtral": lambda: t.MixtralConfig(**{**COMMON, "intermediate_size": 48}, num_local_experts=4),
        "qwen2-moe": lambda: t.Qwen2MoeConfig(**COMMON, **MOE, shared_expert_intermediate_size=24),
        "qwen3-moe": lambda: t.Qwen3MoeConfig(**COMMON, **MOE, head_dim=8),
        "deepseek-v2": lambda: t.DeepseekV2Config(
            **{**COMMON, "num_key_value_heads": 4}, **LATENT, q_lora_rank=16, n_routed_experts=4, n_shared_experts=1,
            num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1, n_group=1, topk_group=1,
        ),
    }  # fmt: skip
    return makers[name]()


def make(name: str, **changes: Any) -> nn.Module:
    """A model with random values everywhere: no bias is zero, no norm one."""
    torch.manual_seed(0)
    if name == "example":
        from train_gpt import GPT

        model: nn.Module = GPT(2, 32, 4, 32)
    else:
        config = configuration(name)
        for key, value in changes.items():
            setattr(config, key, value)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model.eval()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3] = -100
    return ids, labels


def loss_of(model: nn.Module, **kwargs: Any) -> torch.Tensor:
    ids, labels = batch()
    if hasattr(model, "config"):
        return model(input_ids=ids, labels=labels, use_cache=False, **kwargs).loss  # type: ignore[no-any-return]
    return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def whole_gradients(model: nn.Module, axis: ThreadAxis) -> dict[str, torch.Tensor]:
    shards, partial, found = shards_of(model), partial_of(model), gradients(model)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if id(param) in shards:
            found[name] = whole_of(found[name], shards[id(param)], axis)
        elif id(param) in partial:
            found[name] = axis.all_reduce(found[name], "test: partial")
    return found


def check(model: nn.Module, size: int, plan: Any = None, arguments: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Train once whole and once divided; returns rank 0's Axis, and bytes by label of forward and backward."""
    expected_loss = loss_of(model, **(arguments or {}))
    expected_loss.backward()
    expected = copy.deepcopy(gradients(model))
    values, classes = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    model.zero_grad()

    def work(axis: ThreadAxis) -> Any:
        mine = copy.deepcopy(model)
        done = parallelize(mine, plan, region=Region(axis), **kwargs)
        axis.sent.clear()
        loss = loss_of(mine, **(arguments or {}))
        loss.backward()
        sent = dict(axis.sent)
        found = whole_gradients(mine, axis)
        done.undo()
        assert [type(module) for module in mine.modules()] == classes
        torch.testing.assert_close(mine.state_dict(), values, rtol=0, atol=0)
        again = loss_of(mine, **(arguments or {}))
        return loss.detach(), found, again.detach(), sent, done.describe()

    results = on_threads(size, work)
    for loss, found, again, _, _ in results:
        torch.testing.assert_close(loss, expected_loss.detach())
        torch.testing.assert_close(again, expected_loss.detach())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close = torch.allclose(found[name], value, rtol=1e-4, atol=2e-6)
            assert close, f"{name}: {(found[name] - value).abs().max()} of {value.abs().max()}"
    return results[0]


CASES = [
    *[(name, 2) for name in ("llama", "llama, tied", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "gpt-neox")],
    *[(name, 2) for name in ("opt", "bert", "persimmon", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2", "example")],
    *[(name, 4) for name in ("llama", "llama, tied", "qwen3", "gemma2", "phi3", "gpt2", "mixtral", "deepseek-v2")],
    ("llama, 3 key-value heads", 3),
    ("llama", 1),
]
BY_DAY = [case for case in CASES if case[1] != 2 or (case[0], 4) not in CASES]  # each model, and on 4 ranks if it can be


@pytest.mark.parametrize(("name", "size"), by_day(CASES, *BY_DAY))
def test_loss_and_gradients_equal_the_whole_model(name: str, size: int) -> None:
    check(make(name), size)


@pytest.mark.parametrize(
    ("name", "size"),
    by_day(
        [
            *[
                (name, 2)
                for name in ("llama", "llama, tied", "qwen3", "gemma2", "phi3", "gpt2", "gpt-neox", "bert", "example")
            ],
            *[(name, 4) for name in ("llama", "gpt2", "example")],
            ("llama, 3 key-value heads", 3),
        ],
        *[(name, 2) for name in ("llama, tied", "gemma2", "gpt-neox", "bert", "example")],
        ("gpt2", 4),
        ("llama, 3 key-value heads", 3),
    ),
)
def test_with_sequence_parallelism(name: str, size: int) -> None:
    check(make(name), size, sequence_parallel=True)


class Wrapped(nn.Module):
    """A Hugging Face model in one of the user's own, as reward models are made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers.LlamaModel(configuration("llama"))
        self.score = nn.Linear(32, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.score(self.inner(ids, use_cache=False).last_hidden_state)  # type: ignore[no-any-return]


@pytest.mark.parametrize("sequence_parallel", (False, True))
@pytest.mark.parametrize("kind", ("wrapped", "prompts"))
def test_a_model_inside_of_another_has_its_own_plan(kind: str, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = Wrapped() if kind == "wrapped" else peft.get_peft_model(make("llama"), prompts)  # type: ignore[arg-type]
    told = check(model.eval(), 2, sequence_parallel=sequence_parallel)[4]
    assert ".layers.*.mlp.up_proj: colwise, 2 x [42, 32] -> [21, 32]" in told


def test_outputs_of_which_ranks_would_have_parts_are_refused() -> None:
    """They were given without a word: half of the heads, or half of the sequence."""
    model = transformers.AutoModelForCausalLM.from_config(configuration("llama"), attn_implementation="eager").eval()
    ids, _ = batch()
    whole = model(ids, output_hidden_states=True).hidden_states

    def work(axis: ThreadAxis) -> None:
        for sequence_parallel in (False, True):
            mine = copy.deepcopy(model)
            done = parallelize(mine, region=Region(axis), sequence_parallel=sequence_parallel)
            for called in (mine, mine.model):
                with pytest.raises(ModelError, match=r"output_attentions cannot be had.*some of the heads"):
                    called(ids, output_attentions=True)
                if sequence_parallel:
                    with pytest.raises(ModelError, match=r"output_hidden_states cannot be had.*part of the sequence"):
                        called(ids, output_hidden_states=True)
            if not sequence_parallel:
                torch.testing.assert_close(mine(ids, output_hidden_states=True).hidden_states, whole)
            mine.config.output_attentions = True  # type: ignore[union-attr]
            with pytest.raises(ModelError, match="output_attentions"):
                mine(ids)
            mine(ids, output_attentions=False)
            done.undo()
            assert mine(ids).attentions[0].shape[1] == 4

    on_threads(2, work)


def test_head_and_loss_stay_divided() -> None:
    for name in ("llama", "llama, tied", "gemma2", "gpt2"):
        sent = check(make(name).train(), 2, vocab_parallel_loss=True)[3]
        assert sent["tensor: cross-entropy"] == 3 * 2 * TOKENS * 4
        assert "tensor: all-gather forward" not in sent
        check(make(name).train(), 2, arguments={"num_items_in_batch": torch.tensor(9)}, vocab_parallel_loss=True)
    check(make("llama").train(), 2, vocab_parallel_loss=True, sequence_parallel=True)


def whole_logits(model: Any) -> dict[str, torch.Tensor]:
    """What a causal model gives wherever it does not train on labels; a loss of one's own, and its gradients."""
    ids, labels = batch()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = {}
    with torch.no_grad():
        labelled = model.eval()(ids, None, labels=labels)
        found |= {"loss": labelled.loss, "labelled": labelled.logits, "unlabelled": model(ids).logits}
        found["as a tuple"] = model(ids, labels=labels, return_dict=False)[1]
        found["tokens"] = torch.cat([model.generate(ids, **options), model.train().generate(ids, **options)])
    own = model(ids).logits
    functional.cross_entropy(own[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    return {name: value.detach() for name, value in {**found, "in training": own}.items()}


@pytest.mark.parametrize("name", ("llama", "gpt2"))
@pytest.mark.parametrize("sequence_parallel", (False, True))
def test_logits_are_whole_but_in_training_on_labels(name: str, sequence_parallel: bool) -> None:
    whole, model = make(name), make(name)
    expected = whole_logits(whole)

    def work(axis: ThreadAxis) -> None:
        mine: Any = copy.deepcopy(model)
        done = parallelize(mine, region=Region(axis), sequence_parallel=sequence_parallel, vocab_parallel_loss=True)
        torch.testing.assert_close(whole_logits(mine), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(whole_gradients(mine, axis), gradients(whole), rtol=1e-4, atol=2e-6)
        ids, labels = batch()
        with pytest.raises(ModelError, match=r"vocab_parallel_loss.*leave labels out of the call"):
            mine.train()(ids, labels=labels).logits.argmax(-1)
        with pytest.raises(ModelError, match=r"vocab_parallel_loss.*leave labels out of the call"):
            mine(ids, labels=labels, return_dict=False)[1].argmax(-1)
        with pytest.raises(VocabularyError):
            mine(ids, labels=labels + VOCABULARY)
        assert mine(ids).logits.shape[-1] == VOCABULARY  # also after a forward that has failed
        done.undo()
        assert not {"forward", "_loss_function"} & {*vars(mine)}

    on_threads(2, work)


def twice(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * function(*args, **kwargs)

    return loss


def test_a_loss_that_has_the_name_of_the_common_one_is_refused() -> None:
    model: Any = make("llama").train()
    model.loss_function = twice(model.loss_function)
    assert model.loss_function.__name__ == "ForCausalLMLoss"
    check(model, 2)  # each rank computes it from whole logits
    refusal = r"tensor_parallel.vocab_parallel_loss = true.* LlamaForCausalLM is ForCausalLMLoss of test_.*Remedy: .* false"
    with pytest.raises(ModelError, match=refusal):
        on_threads(2, lambda axis: parallelize(copy.deepcopy(model), region=Region(axis), vocab_parallel_loss=True))


def test_another_loss_function_since_is_given_whole_logits() -> None:
    """And stays when the division is taken back."""
    model: Any = make("llama").train()
    whole = copy.deepcopy(model)
    whole.loss_function = twice(whole.loss_function)
    expected = loss_of(whole)
    expected.backward()

    def work(axis: ThreadAxis) -> Any:
        mine = copy.deepcopy(model)
        done = parallelize(mine, region=Region(axis), vocab_parallel_loss=True)
        mine.loss_function = whole.loss_function
        loss = loss_of(mine)
        loss.backward()
        found = whole_gradients(mine, axis)
        done.undo()
        assert mine.loss_function is whole.loss_function
        return loss.detach(), found

    for found in on_threads(2, work):
        torch.testing.assert_close(found, (expected.detach(), gradients(whole)), rtol=1e-4, atol=2e-6)


def test_a_model_for_speech_has_no_embedding_to_divide() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 16}
    cut = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_conv_pos_embeddings": 8}
    config = transformers.HubertConfig(**sizes, **cut, num_conv_pos_embedding_groups=2, ctc_loss_reduction="mean")
    model = transformers.HubertForCTC(config).eval()
    batch = {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 16, (2, 5))}

    whole = copy.deepcopy(model)
    expected = whole(**batch).loss
    expected.backward()

    def work(axis: ThreadAxis) -> Any:
        mine = copy.deepcopy(model)
        done = parallelize(mine, region=Region(axis))
        assert "attention.q_proj: colwise, 2 x [32, 32] -> [16, 32]" in done.describe()
        loss = mine(**batch).loss
        loss.backward()
        return loss.detach(), whole_gradients(mine, axis)

    for found in on_threads(2, work):
        torch.testing.assert_close(found, (expected.detach(), gradients(whole)), rtol=1e-4, atol=2e-6)


BODY = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


@pytest.mark.parametrize("size", (2, 4))
def test_bytes_of_a_layer(size: int) -> None:
    """Two all-reduces of [batch, sequence, width] forward and two backward, each 2 n (t - 1) / t elements (fp32)."""
    layers, elements = 2, 2 * TOKENS * 32
    sent = check(make("llama"), size, BODY)[3]
    once = layers * 2 * (2 * elements * (size - 1) // size) * 4
    assert sent == {"tensor: all-reduce forward": once, "tensor: all-reduce backward": once}


@pytest.mark.parametrize("size", (2, 4))
def test_bytes_of_a_layer_with_sequence_parallelism(size: int) -> None:
    """Four all-gathers and four reduce-scatters, each of n (t - 1) / t elements: as many bytes as without."""
    layers, model = 2, make("llama")
    expected = loss_of(model).detach()
    outer = 32 * 4  # one position, all columns, fp32

    def work(axis: ThreadAxis) -> Any:
        mine = copy.deepcopy(model)
        parallelize(mine, BODY, region=Region(axis), sequence_parallel=True)
        axis.sent.clear()
        loss = loss_of(mine)
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected)
        return axis.sent

    sent = on_threads(size, work)
    total = {label: sum(one[label] for one in sent) for label in sent[0]}
    of_regions = 2 * layers * 2 * TOKENS * outer * (size - 1)  # of all ranks, forward; backward the same
    at_the_ends = 2 * TOKENS * outer * (size - 1)  # gathered after the last block; its gradient's part before the first
    assert total["tensor: all-gather forward"] == of_regions + at_the_ends
    assert total["tensor: all-gather backward"] == of_regions + at_the_ends
    assert total["tensor: reduce-scatter forward"] == total["tensor: reduce-scatter backward"] == of_regions


@pytest.mark.parametrize("sequence_parallel", (False, True))
def test_recomputed_blocks(sequence_parallel: bool) -> None:
    """Gradient checkpointing runs blocks again in backward, out of order, when the last block has been left."""
    model = make("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    check(model, 2, sequence_parallel=sequence_parallel)


@pytest.mark.each_value
@pytest.mark.parametrize("lengths", ((6, 7), (7, 6), (5, 12), (2, 1)))
@pytest.mark.parametrize(("name", "reentrant"), (("llama", False), ("llama", True), ("gpt2", False)))
def test_recomputed_blocks_of_two_lengths(name: str, reentrant: bool, lengths: tuple[int, int]) -> None:
    """Two forwards and one backward, as in preference learning: blocks of the first are recomputed after the second."""
    model = make(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    if reentrant:
        model.enable_input_require_grads()  # type: ignore[operator]

    def train(mine: Any) -> None:
        batches = [torch.randint(VOCABULARY, (2, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
        good, bad = (mine(input_ids=ids, use_cache=False).logits.logsumexp(-1).mean() for ids in batches)
        (good * 2 - bad * bad).backward()

    whole = copy.deepcopy(model)
    train(whole)
    expected = gradients(whole)

    def work(axis: ThreadAxis) -> dict[str, torch.Tensor]:
        mine = copy.deepcopy(model)
        parallelize(mine, region=Region(axis), sequence_parallel=True)
        train(mine)
        return whole_gradients(mine, axis)

    for found in on_threads(2, work):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class TwoChunks(nn.Module):
    """Like a pipeline stage: what lies between its chunks is whole, and computed elsewhere."""

    chunks = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def modules_of(self, chunk: int) -> list[nn.Module]:
        return list(self.blocks)[2 * chunk : 2 * chunk + 2]

    def forward(self, x: torch.Tensor, chunk: int) -> torch.Tensor:
        for block in self.modules_of(chunk):
            x = block(x)
        return x


def test_sequences_are_divided_and_gathered_in_each_chunk_of_a_stage() -> None:
    torch.manual_seed(0)
    model, x = TwoChunks(), torch.randn(2, TOKENS, 8)

    def train(mine: nn.Module) -> torch.Tensor:
        between = mine(x, 0)
        assert between.shape == x.shape
        loss: torch.Tensor = mine(between.cumsum(1), 1).square().sum()
        loss.backward()
        return loss.detach()

    whole = copy.deepcopy(model)
    loss, expected = train(whole), gradients(whole)

    def work(axis: ThreadAxis) -> Any:
        mine = copy.deepcopy(model)
        parallelize(
            mine, {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, region=Region(axis), sequence_parallel=True
        )
        return train(mine), whole_gradients(mine, axis)

    for found in on_threads(3, work):
        torch.testing.assert_close(found, (loss, expected), rtol=1e-4, atol=1e-5)


def test_values_of_rank_zero_count_and_frozen_parameters_stay_so() -> None:
    model = make("llama")
    model.get_submodule("model.layers.0").requires_grad_(False)
    expected = loss_of(model)
    expected.backward()
    wanted = copy.deepcopy(gradients(model))
    model.zero_grad()
    frozen = [param.requires_grad for param in model.parameters()]

    def work(axis: ThreadAxis) -> Any:
        mine = copy.deepcopy(model)
        if axis.rank:
            for param in mine.parameters():
                nn.init.zeros_(param)
        parallelize(mine, region=Region(axis))
        loss = loss_of(mine)
        loss.backward()
        assert [param.requires_grad for param in mine.parameters()] == frozen
        return loss.detach(), whole_gradients(mine, axis)

    for loss, found in on_threads(2, work):
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_models_without_values(name: str) -> None:
    """On the meta device the shapes are cut, and undo gives them back."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(configuration(name))
    shapes = [param.shape for param in model.parameters()]

    def work(axis: ThreadAxis) -> Any:
        mine = copy.deepcopy(model)
        done = parallelize(mine, region=Region(axis))
        local = sum(param.numel() for param in mine.parameters())
        done.undo()
        assert [param.shape for param in mine.parameters()] == shapes
        return local

    whole = sum(param.numel() for param in model.parameters())
    assert all(whole * 0.45 < local < whole * 0.6 for local in on_threads(2, work))


def test_one_of_two_tied_layers_in_the_plan() -> None:
    """The other is divided in the way that must follow."""
    tied = make("llama, tied")
    for name, style in (("lm_head", "colwise_gather_output"), ("model.embed_tokens", "embedding_rowwise")):
        description = check(tied, 2, {name: style})[4]
        assert description.count("1 x [51, 32] -> [26, 32] [25, 32]") == 2


def test_embedding_and_head_of_a_plain_module() -> None:
    model = make("example")
    plan = {**infer_plan(model, 2), "token": "embedding_rowwise", "head": "colwise_gather_output"}
    assert len(plan) == 6
    check(model, 2, plan)


def test_copies_of_a_divided_model() -> None:
    model = make("llama")
    expected = loss_of(model).detach()

    def work(axis: ThreadAxis) -> torch.Tensor:
        mine = copy.deepcopy(model)
        parallelize(mine, region=Region(axis), sequence_parallel=True, vocab_parallel_loss=True)
        copied = copy.deepcopy(mine)
        axis.sent.clear()
        losses = [loss_of(copied).detach(), loss_of(copied.train()).detach()]
        assert axis.sent["tensor: cross-entropy"] == 3 * 2 * TOKENS * 4  # of the second
        return torch.stack(losses)

    for losses in on_threads(2, work):
        torch.testing.assert_close(losses, expected.expand(2))


def test_graphs_of_earlier_forwards_do_not_matter() -> None:
    model = make("llama")

    def work(axis: ThreadAxis) -> None:
        mine = copy.deepcopy(model)
        kept = [loss_of(mine)]
        kept[0].backward()
        done = parallelize(mine, region=Region(axis))
        kept.append(loss_of(mine))
        kept[1].backward()
        done.undo()
        loss_of(mine).backward()
        assert all(param.grad.shape == param.shape for param in mine.parameters() if param.grad is not None)

    on_threads(2, work)
