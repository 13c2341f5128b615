"""Plans of tensor parallelism: names, heads, what is refused, and plans for models that ship none."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from harness import patience, start_script
from torch import nn
from torch.nn import functional

from zerorun import log
from zerorun.errors import ModelError
from zerorun.tensor_parallel import infer, infer_plan, make_plan, parallelize
from zerorun.tensor_parallel.collectives import Region
from zerorun.tensor_parallel.describe import bytes_per_rank, describe
from zerorun.tensor_parallel.heads import Heads
from zerorun.tensor_parallel.parallelized import plan_of
from zerorun.tensor_parallel.planning import own_plan
from zerorun.tensor_parallel.thread_ranks import ThreadAxis, on_threads

SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MLP = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}


def llama(**changes: Any) -> nn.Module:
    config: dict[str, Any] = {**SIZES, **TOKENS, "intermediate_size": 40, "num_key_value_heads": 2, **changes}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Fused query, key and value in one of three layouts."""

    def __init__(self, layout: str, heads: int = 4, key_value_heads: int = 4) -> None:
        super().__init__()
        self.layout, self.num_heads, self.num_kv_heads = layout, heads, key_value_heads
        self.qkv = nn.Linear(32, 8 * (heads + 2 * key_value_heads))
        self.out = nn.Linear(8 * heads, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        qkv, groups = self.qkv(x), self.num_heads // self.num_kv_heads
        if self.layout == "heads in turn":
            q, k, v = qkv.view(b, s, self.num_kv_heads, groups + 2, 8).split([groups, 1, 1], 3)
            q = q.flatten(2, 3).transpose(1, 2)
            k, v = (part.squeeze(3).transpose(1, 2) for part in (k, v))
        else:
            lengths = [8 * self.num_heads, 8 * self.num_kv_heads, 8 * self.num_kv_heads]
            q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in qkv.split(lengths, -1))
            if self.layout == "values summed":  # what one head gives depends on the others
                v = v + v.sum(1, keepdim=True)
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), Attention(*args)
        self.fc1, self.fc2 = nn.Linear(32, 50), nn.Linear(50, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.fc2(functional.gelu(self.fc1(x)))  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.token = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block(*args) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        return x  # type: ignore[no-any-return]


def divides_embedding(model: Any) -> bool:
    """The plan of transformers before 5.21 leaves it whole."""
    return "model.embed_tokens" in model._tp_plan


# -- names and arithmetic ------------------------------------------------------------------------------------------


def test_a_plan_is_data_in_the_order_of_the_model() -> None:
    model = llama()
    before = [type(module) for module in model.modules()]
    plan = make_plan(model, None, 2)
    names = [entry.name for entry in plan.entries]
    first, styles = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"], {"colwise", "rowwise", "colwise_gather_output"}
    if divides_embedding(model):
        first, styles = ["model.embed_tokens", *first], {*styles, "embedding_rowwise"}
    assert names[: len(first)] == first
    assert names[-1] == "lm_head" and len(names) == 12 + len(first)
    assert {entry.style for entry in plan.entries} == styles
    assert [type(module) for module in model.modules()] == before


def test_patterns_stand_for_whole_parts_of_names() -> None:
    model = llama()
    assert len(make_plan(model, MLP, 2).entries) == 4
    one = {pattern.replace("*", "1"): style for pattern, style in MLP.items()}
    assert [entry.owner for entry in make_plan(model, one, 2).entries] == ["model.layers.1.mlp"] * 2
    with pytest.raises(ModelError, match=r"pattern 'layers\.\*\.mlp\.up_proj' matches no module"):
        make_plan(model, {"layers.*.mlp.up_proj": "colwise", **MLP}, 2)


def test_older_models_have_the_plan_of_their_base() -> None:
    class Config:
        base_model_tp_plan: dict[str, str] = {"layers.*.up": "colwise"}  # noqa: RUF012

    model = nn.Module()
    model.config, model.base_model_prefix, model.model = Config(), "model", nn.Module()  # type: ignore[assignment]
    assert own_plan(model) == {"model.layers.*.up": "colwise"}


@pytest.mark.parametrize(
    ("key_value", "size", "local"), [(8, 2, Heads(4, 4)), (2, 2, Heads(4, 1)), (2, 4, Heads(2, 1)), (1, 8, Heads(1, 1))]
)
def test_heads_of_one_rank(key_value: int, size: int, local: Heads) -> None:
    heads = Heads(8, key_value)
    assert heads.problem("attention", size) is None
    assert heads.local(size) == local


def test_key_value_heads_that_several_ranks_use() -> None:
    plan = make_plan(llama(), None, 4)
    key = next(entry for entry in plan.entries if entry.leaf == "k_proj")
    assert [key.used(rank, 4) for rank in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    groups = next(a for a in plan.attributes if a.name == "num_key_value_groups")
    assert (groups.whole, groups.local) == (2, (1, 1, 1, 1))


def test_sizes_in_words_and_bytes() -> None:
    model = llama()
    plan = make_plan(model, None, 2)
    lines = describe(model, plan).splitlines()
    assert "model.layers.*.mlp.down_proj: rowwise, 2 x [32, 40] -> [32, 20]" in lines
    whole = sum(param.numel() for param in model.parameters()) * 4
    stay = 5 * 32 * 4 + (0 if divides_embedding(model) else model.model.embed_tokens.weight.nbytes)
    assert bytes_per_rank(model, plan) == [(whole - stay) // 2 + stay] * 2
    assert "2 heads used by 4 ranks" in describe(model, make_plan(model, None, 4))


# -- what is refused -----------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_is_told_at_once() -> None:
    wrong = {**MLP, "model.nothing": "colwise", "model.norm": "rowwise", "model.embed_tokens": "sideways"}
    with pytest.raises(ModelError) as caught:
        make_plan(llama(), wrong, 2)
    text = str(caught.value)
    assert "3 problems" in text and text.count("Remedy:") == 3
    assert "'model.nothing' matches no module" in text
    assert "model.norm is a LlamaRMSNorm, and style 'rowwise' is for an nn.Linear" in text
    assert "style 'sideways' is not known" in text and "colwise_gather_output" in text


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, r"4 query heads, which tensor_parallel.size 3 does not divide. Remedy: use a size of \[1, 2, 4\]"),
        (
            {"num_attention_heads": 12, "hidden_size": 48, "num_key_value_heads": 4},
            6,
            r"4 key-value heads, which tensor_parallel.size 6 neither divides nor .* a size of \[1, 2, 4, 12\]",
        ),
    ],
)
def test_heads_that_do_not_divide(changes: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make_plan(llama(**changes), None, size)


def test_columns_and_rows_belong_together() -> None:
    model = llama()
    up, down = MLP
    with pytest.raises(ModelError, match=r"up_proj \(colwise\) has columns .* that no row-parallel layer near it joins"):
        make_plan(model, {up: "colwise"}, 2)
    with pytest.raises(ModelError, match=r"down_proj \(rowwise\) needs an input that is divided"):
        make_plan(model, {down: "rowwise"}, 2)
    with pytest.raises(ModelError, match=r"down_proj \(rowwise\) has 40 input columns, .* have \[20\]"):
        make_plan(model, {up: "packed_colwise", down: "rowwise"}, 2)
    assert make_plan(model, {up: "colwise_gather_output", down: "rowwise_split_input"}, 2).entries


def test_norms_of_heads_are_not_forgotten() -> None:
    config = transformers.Qwen3Config(**SIZES, **TOKENS, intermediate_size=40, num_key_value_heads=2, head_dim=8)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    plan = own_plan(model)
    assert make_plan(model, plan, 2) == make_plan(model, None, 2)
    del plan["model.layers.*.self_attn.q_norm"]
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_norm works on heads .* add it as replicated_with_grad"):
        make_plan(model, plan, 2)


def test_no_plan_and_no_ranks() -> None:
    with pytest.raises(ModelError, match="infer_plan"):
        make_plan(Stack("blocks"), None, 2)
    with pytest.raises(ModelError, match="pass topology"):
        parallelize(llama())


def test_a_model_is_divided_once() -> None:
    def work(axis: ThreadAxis) -> None:
        model, region = llama(), Region(axis)
        parallelize(model, region=region)
        with pytest.raises(ModelError, match="divided over tensor-parallel ranks already"):
            parallelize(model, region=region)

    on_threads(2, work)


def test_adapters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES, **TOKENS, intermediate_size=40))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ModelError, match=r"q_proj has an adapter .*merge_and_unload"):
        make_plan(adapted, {"base_model.model.model.layers.*.mlp.up_proj": "colwise"}, 2)


class Scaled(nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight) * 3


class Scaling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


@pytest.mark.parametrize(("layer", "style"), [(Scaled(6, 4), "embedding_rowwise"), (Scaling(4, 6), "colwise")])
def test_layers_that_compute_in_their_own_way_are_refused(layer: nn.Module, style: str) -> None:
    with pytest.raises(ModelError, match=rf"0 is a {type(layer).__name__}, and style '{style}' is for"):
        make_plan(nn.Sequential(layer), {"0": style}, 2)


def test_attention_of_torch_is_refused() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
    with pytest.raises(ModelError, match=r"nn\.MultiheadAttention uses their weights"):
        make_plan(model, {"layers.*.self_attn.out_proj": "rowwise_split_input"}, 2)


def test_what_a_tie_leaves_open_is_refused() -> None:
    model = Stack("blocks")
    model.other = model.blocks[0].fc1
    model.free = nn.Module()
    model.free.weight = model.blocks[0].fc1.weight  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"free\.weight is the same parameter as one of blocks\.0\.fc1"):
        make_plan(model, {"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MixtralConfig", r"mlp\.experts \(moe_tp_experts\): sequence parallelism cannot be done"),
        ("Olmo2Config", r"self_attn has layers that are not in the plan beside .*q_proj \(colwise_gather_output\)"),
        (
            "OPTConfig",
            r"layers\.0\) with a part .* cannot be run when it is divided .*reshapes what is divided along the",
        ),
        (
            "BioGptConfig",
            r"BioGptForCausalLM leaves out blocks at random \(layerdrop = 0\.3\).* Remedy: .* sequence_parallel=False",
        ),
        ("BartConfig", r"BartForCausalLM leaves out blocks at random \(layerdrop = 0\.2\)"),
    ],
)
def test_sequence_parallelism_is_refused(name: str, message: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES, **TOKENS, **OTHER[name]))

    def work(axis: ThreadAxis) -> Any:
        parallelize(copy.deepcopy(model), region=Region(axis), sequence_parallel=True)

    with pytest.raises(ModelError, match=message):
        on_threads(2, work)


class Positions(nn.Module):
    """An attention and an MLP, between which ``mixed`` is called with hidden states."""

    def __init__(self, mixed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(32), Attention("blocks")
        self.up, self.down, self.mixed = nn.Linear(32, 64), nn.Linear(64, 32), mixed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.mixed(hidden))))


MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the token before": lambda hidden: hidden + torch.nn.functional.pad(hidden, (0, 0, 1, -1)),
    "the mean": lambda hidden: hidden + hidden.mean(1, keepdim=True),
    "a sum over tokens": lambda hidden: hidden.cumsum(1),
    "its place": lambda hidden: hidden + torch.arange(hidden.shape[1]).view(1, -1, 1),
    "each token alone": torch.tanh,
}


@pytest.mark.parametrize("mixed", MIXED)
def test_functions_that_look_along_a_divided_sequence_are_refused(mixed: str) -> None:
    """No name of a class tells of them: the losses were wrong, without a word."""
    model = nn.Module()
    model.embed, model.blocks = nn.Embedding(7, 32), nn.ModuleList(Positions(MIXED[mixed]) for _ in range(2))
    model.forward = lambda ids: model.blocks[1](model.blocks[0](model.embed(ids)))  # type: ignore[assignment]
    assert plan_of(model, None, 2).entries
    if mixed == "each token alone":
        assert plan_of(model, None, 2, sequence_parallel=True).entries
        return
    with pytest.raises(ModelError, match=r"Positions \(blocks\.0\) with a part of the sequence .* differs in the output"):
        plan_of(model, None, 2, sequence_parallel=True)


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda hidden: hidden,
    "a copy": lambda hidden: hidden.clone(),
    "the mean": lambda hidden: hidden + hidden.mean(1, keepdim=True),
    "in place": lambda hidden: hidden.add_(hidden.mean(1, keepdim=True)),
}


class Between(nn.Module):
    """Two blocks, and what is done between them if ``active``."""

    active = True

    def __init__(self, between: str) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(7, 32), nn.ModuleList(Positions(torch.tanh) for _ in range(2))
        self.between = BETWEEN[between]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](self.embed(ids))
        return self.blocks[1](self.between(hidden) if self.active else hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("later", (False, True))
def test_what_a_model_does_between_blocks_of_a_divided_sequence_is_refused(between: str, later: bool) -> None:
    whole, ids = Between(between), torch.arange(10).view(2, 5) % 7

    def work(axis: ThreadAxis) -> torch.Tensor:
        mine, region = copy.deepcopy(whole), Region(axis)
        parallelize(mine, region=region, sequence_parallel=True)
        found = []
        for mine.active in (not later, True):
            found.append(mine(ids) - whole(ids))
        return torch.stack(found)

    if between in ("nothing", "a copy"):
        assert all(float(found.abs().max()) < 1e-5 for found in on_threads(2, work))
        return
    with pytest.raises(ModelError, match=r"a Positions does not get what the block before it gives\. Remedy"):
        on_threads(2, work)


def test_a_copy_of_what_is_not_a_number_is_one() -> None:
    """The error of a loss that is NaN was hidden by one of the model."""
    mine, ids = Between("a copy"), torch.arange(10).view(2, 5) % 7

    def work(axis: ThreadAxis) -> torch.Tensor:
        copied, region = copy.deepcopy(mine), Region(axis)
        parallelize(copied, region=region, sequence_parallel=True)
        with torch.no_grad():
            copied.embed.weight[1, 3] = torch.nan
        return copied(ids)  # type: ignore[no-any-return]

    assert all(bool(found.isnan().any()) for found in on_threads(2, work))


class Shortened(nn.Module):
    """Pooled tokens after those of its blocks that ``used`` names."""

    used = slice(None)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(7, 32), nn.ModuleList(Positions(torch.tanh) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks[self.used]:
            hidden = block(hidden)
        return hidden.mean(1)  # type: ignore[no-any-return]


def test_a_divided_sequence_needs_the_blocks_that_divide_and_join_it() -> None:
    whole, ids = Shortened(), torch.arange(12).view(2, 6) % 7

    def work(axis: ThreadAxis) -> torch.Tensor:
        mine, region = copy.deepcopy(whole), Region(axis)
        parallelize(mine, region=region, sequence_parallel=True)
        mine(torch.cat([ids, ids], 1))  # so that the whole of what comes next is as long as a part of this
        for mine.used, said in ((slice(0, 2), "left out the last block"), (slice(1, 3), "without the first block")):
            with pytest.raises(ModelError, match=f"{said}.* Remedy: call all blocks in each forward"):
                mine(ids)
            assert region.given is None  # no tensor is kept
        mine.used = slice(0, 3, 2)
        return mine(ids)

    whole_found = on_threads(2, work)
    whole.used = slice(0, 3, 2)
    for found in whole_found:
        torch.testing.assert_close(found, whole(ids))


OTHER: dict[str, dict[str, Any]] = {
    "Olmo2Config": {"intermediate_size": 40, "num_key_value_heads": 2},
    "MixtralConfig": {"intermediate_size": 48, "num_key_value_heads": 2},
    "OPTConfig": {"ffn_dim": 40, "word_embed_proj_dim": 32},
    "BioGptConfig": {"intermediate_size": 40, "layerdrop": 0.3},
    "BartConfig": {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40, "decoder_layerdrop": 0.2},
}


def test_layers_with_parameters_need_a_plan_for_sequence_parallelism() -> None:
    plan = {"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}
    with pytest.raises(ModelError, match=r"blocks\.0\.attention\.qkv \(Linear\) has parameters and is not in the plan"):
        on_threads(2, lambda axis: parallelize(Stack("blocks"), plan, region=Region(axis), sequence_parallel=True))


# -- plans for models that ship none -------------------------------------------------------------------------------


@pytest.mark.parametrize("key_value_heads", (4, 2))
@pytest.mark.parametrize(("layout", "style"), [("blocks", "fused_colwise"), ("heads in turn", "colwise")])
def test_the_layout_of_fused_layers_is_found_out(layout: str, style: str, key_value_heads: int) -> None:
    plan = infer_plan(Stack(layout, 4, key_value_heads), 2)
    assert plan == {
        "blocks.*.attention.qkv": style,
        "blocks.*.attention.out": "rowwise",
        "blocks.*.fc1": "colwise",
        "blocks.*.fc2": "rowwise",
    }


def test_on_the_meta_device_too() -> None:
    with torch.device("meta"):
        model = Stack("heads in turn")
    assert infer_plan(model, 2)["blocks.*.attention.qkv"] == "colwise"


def test_blocks_of_which_none_is_like_the_other() -> None:
    model = Stack("blocks")
    model.blocks[1] = Block("heads in turn")
    model.blocks[1].fc1, model.blocks[1].fc2 = nn.Linear(32, 30), nn.Linear(30, 32)
    plan = infer_plan(model, 2)
    assert (plan["blocks.0.attention.qkv"], plan["blocks.1.attention.qkv"]) == ("fused_colwise", "colwise")


def test_what_cannot_be_proven_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no plan can be inferred for Block \(blocks\.0\) over 2 ranks.*\n.*differs in"):
        infer_plan(Stack("values summed"), 2)
    with pytest.raises(ModelError, match=r"4 query heads, which tensor_parallel.size 3 does not divide"):
        infer_plan(Stack("blocks"), 3)
    with pytest.raises(ModelError, match="no plan can be inferred for TransformerEncoderLayer"):
        infer_plan(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), 2), 2)
    bloom = transformers.BloomConfig(**TOKENS, vocab_size=50, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(ModelError, match=r"no plan can be inferred for BloomBlock \(transformer\.h\.0\)"):
        infer_plan(transformers.AutoModelForCausalLM.from_config(bloom), 2)
    with pytest.raises(ModelError, match="it has no linear layers"):
        infer_plan(nn.Conv2d(3, 3, 1), 2)
    with pytest.raises(ModelError, match=r"Sequential \(the whole model\): its layers are of no known structure"):
        infer_plan(nn.Sequential(nn.Linear(3, 3)), 2)
    softmax = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 4))
    with pytest.raises(ModelError, match=r"Sequential \(the whole model\) over 2 ranks.*\n.*differs in"):
        infer_plan(softmax, 2)


def test_a_model_without_blocks_is_one_block() -> None:
    """On token ids or on numbers, whatever comes out."""
    layers = (nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 3))
    assert infer_plan(nn.Sequential(*layers), 2) == {"0": "colwise", "2": "rowwise"}
    plan = infer_plan(nn.Sequential(nn.Embedding(9, 6), *layers), 4)
    assert plan == {"1": "colwise", "3": "rowwise"}


def test_a_given_plan_with_the_wrong_layout_is_refused() -> None:
    model = Stack("blocks")
    plan = {"blocks.*.attention.qkv": "colwise", "blocks.*.attention.out": "rowwise"}
    with pytest.raises(ModelError, match=r"Block \(blocks\.0\), divided by the plan over 2 ranks, differs in the output"):
        on_threads(2, lambda axis: parallelize(copy.deepcopy(model), plan, region=Region(axis)))


def test_a_given_plan_with_lengths() -> None:
    model = Stack("blocks", 4, 2).eval()
    ids = torch.arange(14).view(2, 7)
    expected = model(ids)
    qkv = {"style": "fused_colwise", "lengths": [32, 16, 16]}
    plan: Any = {"blocks.*.attention.qkv": qkv, "blocks.*.attention.out": "rowwise"}

    def work(axis: ThreadAxis) -> torch.Tensor:
        mine = copy.deepcopy(model)
        parallelize(mine, plan, region=Region(axis))
        return mine(ids)  # type: ignore[no-any-return]

    for found in on_threads(2, work):
        torch.testing.assert_close(found, expected)
    qkv["lengths"] = [32, 16, 8]
    with pytest.raises(ModelError, match=r"blocks of \[32, 16, 8\] columns are not the 64"):
        make_plan(model, plan, 2)
    with pytest.raises(ModelError, match=r"2 key-value heads, fewer than tensor_parallel.size 4"):
        make_plan(model, {**plan, "blocks.*.attention.qkv": "fused_colwise"}, 4)


def test_inferring_changes_nothing() -> None:
    model = Stack("blocks").train()
    values, draws = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    infer_plan(model, 2)
    assert model.training and model.blocks[0].training
    assert torch.equal(draws, torch.get_rng_state())
    torch.testing.assert_close(model.state_dict(), values, rtol=0, atol=0)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_dry_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'examples')!r})\n"
        "from train_gpt import GPT\ndef make():\n    return GPT(2, 32, 4, 16)\n"
    )
    program = f"import os, runpy, sys; os.chdir({str(tmp_path)!r}); sys.path[0] = ''\n"
    program += "runpy.run_module('zerorun.tensor_parallel', run_name='__main__', alter_sys=True)"
    ended = [
        start_script(program, "--size", "2", "--dry-run", "--model", model).finish(60 * patience())
        for model in ("mine:make", "mine:other")
    ]
    (code, said, _), (failed, _, errors) = ended
    assert code == 0
    assert "blocks.*.qkv: fused_colwise, 2 x [96, 32] -> [48, 32]" in said
    assert "bytes of parameters: " in said
    assert failed == 2 and "has no attribute 'other'. Remedy:" in errors


# -- given plans are tried out -------------------------------------------------------------------------------------


class Looking(nn.Module):
    """Between its layers something looks at all columns, or uses a whole parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.dropout = 0.5
        if kind == "parameter":
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        between = self.up(x)
        if self.kind == "softmax":
            between = between.softmax(-1)
        elif self.kind == "parameter":
            between = between * self.scale
        elif self.kind == "in training" and self.training:
            between = functional.dropout(between - between.mean(-1, keepdim=True), self.dropout)
        elif self.kind == "dropout":
            between = functional.dropout(between, self.dropout, self.training)
        return x + self.down(between)


class LookingModel(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Looking(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


PAIR = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@pytest.mark.parametrize(
    ("kind", "what"),
    (
        *(("softmax", "the output"), ("parameter", "the gradient of scale")),
        ("in training", "the output, in training"),
    ),
)
def test_a_given_plan_that_a_block_looks_across_is_refused(kind: str, what: str) -> None:
    with pytest.raises(ModelError, match=rf"Looking \(blocks.0\).*differs in {what}.*leave out"):
        plan_of(LookingModel(kind), PAIR, 2)


@pytest.mark.parametrize("kind", ("nothing", "dropout"))
def test_a_given_plan_that_is_right_is_taken(kind: str) -> None:
    assert len(plan_of(LookingModel(kind), PAIR, 2).entries) == 4


def test_a_given_plan_that_cannot_be_tried_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be wrong, and nothing else would say so."""

    class OfTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([TakesTwo("softmax")])

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](x, y)  # type: ignore[no-any-return]

    class TakesTwo(Looking):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x) + y

    monkeypatch.setattr(log, "_warned", set())
    assert len(plan_of(OfTwo(), PAIR, 2).entries) == 2
    assert any("TakesTwo (blocks.0) cannot be run on" in text and "taken as given" in text for text in log._warned)


def test_weights_that_are_computed_are_refused() -> None:
    model = LookingModel("nothing")
    nn.utils.parametrizations.weight_norm(model.blocks[0].up)  # type: ignore[union-attr, arg-type]
    with pytest.raises(ModelError, match=r"blocks\.0\.up .*weight is a parameter, and not computed"):
        make_plan(model, PAIR, 2)


# -- blocks of one class that compute differently ----------------------------------------------------------------------


class Across(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1)


class Mixed(nn.Module):
    """A block whose middle works on each column by itself, unless it is ``told`` otherwise."""

    def __init__(self, place: int, told: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm_type, self.wide, self.number, self.rate = "none", False, 0, 0.1 * place
        self.act: nn.Module = Across() if told == "module" else nn.Tanh()
        self.function: Any = functools.partial(torch.softmax, dim=-1) if told == "partial" else torch.tanh
        self.inner: Any = (lambda x: x.softmax(-1)) if told == "function" else (lambda x: x * self.rate)
        self.steps = [torch.relu, functional.softmax] if told == "list" else [torch.relu]
        self.chosen = self.across if told == "method" else self.along
        self.place = place
        self.options = SimpleNamespace(across=told == "object")
        if told in ("norm_type", "wide", "number"):
            setattr(self, told, {"norm_type": "softmax", "wide": True, "number": 3}[told])
        if told == "hook":
            self.act.register_forward_hook(lambda module, args, output: output.softmax(-1))
        if told == "forward":
            self.forward = self.other_forward  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.chosen(self.act(self.up(x)))
        for step in (self.function, self.inner, *self.steps):
            h = step(h, -1) if step is functional.softmax else step(h)
        looks = self.norm_type == "softmax" or self.wide or self.number or self.options.across
        return x + self.down(self.across(h) if looks else h)  # type: ignore[no-any-return]

    def other_forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.across(self.up(x)))  # type: ignore[no-any-return]

    def along(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def across(self, h: torch.Tensor) -> torch.Tensor:
        return h.softmax(-1)


class MixedStack(nn.Module):
    def __init__(self, *told: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed(place, each) for place, each in enumerate(told))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


WAYS = ("module", "partial", "function", "list", "method", "object", "norm_type", "wide", "number", "hook", "forward")


@pytest.mark.parametrize("told", WAYS)
def test_each_block_that_computes_in_another_way_is_tried_out(told: str) -> None:
    model, given = MixedStack("", "", told), {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    with pytest.raises(ModelError, match=r"Mixed \(blocks.2\).*differs in the output"):
        plan_of(model, given, 2)
    with pytest.raises(ModelError, match=r"(?s)Mixed \(blocks.2\).*differs in the output"):
        infer_plan(model, 2)
    fits = {f"blocks.{place}.{own}": style for place in range(2) for own, style in (("up", "colwise"), ("down", "rowwise"))}
    assert len(plan_of(model, fits, 2).entries) == 4


def test_blocks_that_differ_in_their_place_and_rates_alone_are_tried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    prove = infer._prove
    monkeypatch.setattr(infer, "_prove", lambda trials, name: (tried.append(name), prove(trials, name))[1])
    assert infer_plan(MixedStack(*[""] * 5), 2) == {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    assert tried == ["blocks.0", "blocks.1"]  # the rate of the first is 0


def test_blocks_that_a_given_plan_divides_in_other_ways_are_each_tried_out() -> None:
    model = Stack("blocks", 4, 4)
    right = {"blocks.*.attention.out": "rowwise", "blocks.0.attention.qkv": "fused_colwise"}
    plan_of(model, {**right, "blocks.1.attention.qkv": "fused_colwise"}, 2)
    with pytest.raises(ModelError, match=r"blocks.1.*differs"):
        plan_of(model, {**right, "blocks.1.attention.qkv": "colwise"}, 2)


# -- large blocks --------------------------------------------------------------------------------------------------

# Models whose plans are inferred, by what the fields that make them wide are called. None has values.
WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 4096, "n_layer": 3, "n_head": 32},
    "gpt_bigcode": {"n_embd": 4096, "n_layer": 2, "n_head": 32, "multi_query": False},
    "gpt_neo": {"hidden_size": 4096, "num_layers": 2, "num_heads": 32, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"n_embd": 4096, "n_layer": 2, "n_head": 16},
    "persimmon": {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "intermediate_size": 16384},
    "stablelm": {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8},
}
NARROW: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 96, "vocab_size": 64}


def of_kind(kind: str, device: str = "meta", **more: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **{**WIDE[kind], "vocab_size": 64, **more})
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The parameters of the blocks that are tried out."""
    found: list[int] = []
    real = infer.difference

    def noted(block: nn.Module, *args: Any, **how: bool) -> str | None:
        found.append(sum(param.numel() for param in block.parameters()))
        return real(block, *args, **how)

    monkeypatch.setattr(infer, "difference", noted)
    return found


@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in WIDE), ("gpt2", 8), ("stablelm", 4), ("stablelm", 16)])
def test_a_large_block_is_tried_on_a_small_copy(kind: str, size: int, tried: list[int]) -> None:
    """With the plan of a real model that is small itself, where real ranks could have tried it."""
    made = plan_of(of_kind(kind), None, size)
    assert tried and max(tried) < 1_000_000
    assert made.tried_bytes < 100_000_000
    tried.clear()
    narrow = {
        **NARROW,
        "num_attention_heads": 16,
        "hidden_size": 128,
        "num_key_value_heads": 8 if kind == "stablelm" else 16,
    }
    narrow |= {"rotary_dim": 8} if kind == "gptj" else {}
    assert {entry.name: entry.style for entry in plan_of(of_kind(kind, "cpu", **narrow), None, size).entries} == {
        entry.name: entry.style for entry in made.entries
    }


def test_what_depends_on_sizes_is_checked_on_the_large_model(tried: list[int]) -> None:
    with pytest.raises(ModelError, match=r"has 32 query heads, which tensor_parallel.size 3 does not divide"):
        infer_plan(of_kind("gpt2"), 3)
    with pytest.raises(ModelError, match=r"has 20 key-value heads, which tensor_parallel.size 8 neither divides"):
        infer_plan(of_kind("stablelm", num_attention_heads=40, hidden_size=5120, num_key_value_heads=20), 8)
    assert not tried


class OtherMLP(nn.Module):
    """Looks at all columns between two layers that are called as in GPT-2."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.c_fc, self.c_proj = mlp.c_fc, mlp.c_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.c_fc(x).softmax(-1))  # type: ignore[no-any-return]


def test_a_block_that_was_changed_by_hand_is_tried_itself(tried: list[int]) -> None:
    """Its configuration makes another one."""
    model: Any = of_kind("gpt2", "cpu", n_embd=384, n_head=4)
    assert len(infer_plan(model, 2)) == 6 and tried == [tried[0]] and tried[0] < 1_000_000 < 12 * 384**2
    tried.clear()
    model.transformer.h[1].mlp = OtherMLP(model.transformer.h[1].mlp)
    with pytest.raises(ModelError, match=r"(?s)GPT2Block \(transformer\.h\.1\).*differs in"):
        infer_plan(model, 2)
    assert max(tried) > 1_000_000


def test_a_given_plan_for_large_blocks_is_tried_on_a_small_copy(tried: list[int]) -> None:
    model = of_kind("gpt2")
    wrong = {"transformer.h.*.attn.c_attn": "colwise", "transformer.h.*.attn.c_proj": "rowwise"}
    with pytest.raises(ModelError, match=r"GPT2Block \(transformer\.h\.0\), divided by the plan over 2 ranks, differs in"):
        plan_of(model, wrong, 2)
    assert max(tried) < 1_000_000
    # The copy has blocks of other lengths.
    small = of_kind("gpt2", n_embd=384, n_head=4)
    given: Any = {**wrong, "transformer.h.*.attn.c_attn": {"style": "fused_colwise", "lengths": [384] * 3}}
    tried.clear()
    assert plan_of(small, given, 2).tried_bytes > 4 * 12 * 384**2
    assert min(tried) > 1_000_000
