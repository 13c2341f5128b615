"""Unmodified Hugging Face models, split: the stages, run one after the other, are the whole model bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from covering import by_day
from pipelining import gathered, run
from torch import Tensor, nn

from zerorun.errors import ModelError, PipelineError
from zerorun.pipeline import pretrained_proof
from zerorun.pipeline.split_pretrained import PretrainedPipeline, split_pretrained

transformers = pytest.importorskip("transformers")

BLOCKS, VOCAB = 3, 48
SIZES = {"num_hidden_layers": BLOCKS, "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"intermediate_size": 40, "num_key_value_heads": 2, "max_position_embeddings": 32}
GEMMA = {
    **GROUPED,
    "head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "tie_word_embeddings": False},
    "llama tied": {**GROUPED, "tie_word_embeddings": True},
    "gpt2": {"n_positions": 32},
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": {**GROUPED, "sliding_window": 3},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt_neox": {"intermediate_size": 40, "max_position_embeddings": 32},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 32, "max_position_embeddings": 32},
    "opt projected": {"ffn_dim": 40, "word_embed_proj_dim": 16, "max_position_embeddings": 32},
    "bloom": {},
    "falcon": {"alibi": False},
    "phi": {"intermediate_size": 40, "max_position_embeddings": 32},
    "phi3": GROUPED,
    "stablelm": GROUPED,
    "olmo2": GROUPED,
    "cohere": {**GROUPED, "logit_scale": 0.3},
    "granite": {**GROUPED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "starcoder2": GROUPED,
    "gptj": {"rotary_dim": 4, "n_positions": 32},
    "mixtral": {**GROUPED, "num_local_experts": 3},
}
FEW = ["llama", "llama tied", "gpt2", "gemma2", "opt projected"]


def make_model(name: str, **changes: Any) -> Any:
    settings = {**SIZES, **IDS, **MODELS.get(name, {}), **changes}
    config = transformers.AutoConfig.for_model(name.split()[0], **settings)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for param in model.parameters():  # biases and norms that are not all alike
            param.add_(0.1 * torch.randn_like(param))
    return model


def batch(padded: bool = False, rows: int = 2, length: int = 7) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows * length)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    given = {"input_ids": ids, "labels": ids.clone()}
    given["labels"][0, :2] = -100
    if padded:
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        given["attention_mask"] = mask
    return given


def split(model: nn.Module, stages: int, **options: Any) -> list[PretrainedPipeline]:
    """What each stage's process would have."""
    return [split_pretrained(copy.deepcopy(model), stages, stage, **options) for stage in range(stages)]


def assert_like_the_whole(model: Any, stages: list[PretrainedPipeline], given: dict[str, Any]) -> None:
    model.zero_grad()
    for stage in stages:
        stage.zero_grad()
    loss = model(**given).loss
    loss.backward()
    assert torch.equal(run(stages, given), loss.detach())
    wanted = {name: param.grad for name, param in model.named_parameters()}
    found = gathered(stages, lambda param: param.grad)
    assert sorted(found) == sorted(wanted) == sorted(stages[-1].parameter_names())
    for name, gradient in wanted.items():
        other = found[name]
        assert (other is None) == (gradient is None), name
        assert gradient is None or torch.equal(other, gradient), name


@pytest.mark.parametrize(
    "name", by_day(sorted(MODELS), "llama tied", "opt projected", "gemma2", "mixtral", "falcon", "olmo2")
)
def test_stages_are_the_whole_model_bit_for_bit(name: str) -> None:
    model = make_model(name)
    model.eval()
    for count, chunks in ((3, 1), (2, 2), (2, 1), (1, 1)) if name == "llama tied" else ((3, 1), (2, 2)):
        stages = split(model, count, chunks=chunks)
        assert_like_the_whole(model, stages, batch())
        assert_like_the_whole(model, stages, batch(padded=True, rows=3, length=5))  # shapes may change


@pytest.mark.parametrize("name", FEW)
def test_dropout_is_drawn_as_in_the_whole_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # OPT of transformers before 5.21 draws a number for each layer, although it drops none.
    monkeypatch.setattr(torch, "rand", lambda *shape, **how: torch.ones(()))
    rates = {"attention_dropout": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "dropout": 0.2}
    model = make_model(name, **rates).train()
    stages = split(model, 3)
    torch.manual_seed(5)
    wanted = model(**batch()).loss
    torch.manual_seed(5)
    assert torch.equal(run(stages, batch()), wanted.detach())


@pytest.mark.each_value
@pytest.mark.parametrize("bounds", [[0, 1, 2, 5], [0, 1, 4, 5], [0, 4, 4, 5], [0, 3, 4, 5], [0, 1, 1, 5]])
@pytest.mark.parametrize("name", FEW)
def test_any_cut_will_do(name: str, bounds: list[int]) -> None:
    model = make_model(name).eval()
    stages = split(model, 3, partition_method=bounds)
    assert [stage.partitions() for stage in stages] == [tuple(bounds)] * 3
    assert_like_the_whole(model, stages, batch(padded=True))


def test_stages_have_only_their_own_parameters_under_the_models_names() -> None:
    model = make_model("gpt2")
    stages = split(model, 3, partition_method=[2, 1, 2])
    names = [[name.removeprefix("transformer.").split(".")[0] for name, _ in stage.named_parameters()] for stage in stages]
    assert [list(dict.fromkeys(own)) for own in names] == [["wte", "wpe", "h"], ["h"], ["h", "ln_f", "lm_head"]]
    merged: dict[str, Tensor] = {}
    for index, stage in enumerate(stages):
        assert all(f".h.{index}." in name for name in stage.state_dict() if ".h." in name)
        merged |= stage.state_dict()
    wanted = model.state_dict()
    assert sorted(merged) == sorted(wanted)
    assert all(torch.equal(merged[name], value) for name, value in wanted.items())
    assert stages[0].parameter_names() == [name for name, _ in model.named_parameters()]
    tie = stages[1].ties()
    assert [(t.name, t.parts, t.local_names) for t in tie] == [
        ("transformer.wte.weight", (0, 2), ("transformer.wte.weight", "lm_head.weight"))
    ]


def test_a_tied_head_on_the_same_stage_is_one_parameter() -> None:
    stage = split_pretrained(make_model("llama tied"), 1, 0, chunks=2)
    assert stage.get_parameter("lm_head.weight") is stage.get_parameter("model.embed_tokens.weight")
    assert [tie.parts for tie in stage.ties()] == [(0, 1)]


def test_keywords_and_embeddings_reach_every_stage() -> None:
    model = make_model("llama").eval()
    stages = split(model, 3)
    given = batch()
    given["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)
    assert_like_the_whole(model, stages, given)
    embedded = {"inputs_embeds": model.get_input_embeddings()(given.pop("input_ids")).detach(), **given}
    assert torch.equal(run(stages, embedded), model(**embedded).loss)
    assert torch.equal(run(stages, {**batch(), "num_items_in_batch": 3}), model(**batch(), num_items_in_batch=3).loss)


@pytest.mark.parametrize("name", ["llama tied", "gpt2"])
def test_the_models_own_checkpointing_recomputes_with_many_micro_batches_on_the_way(name: str) -> None:
    model = make_model(name).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    stages = split(model, 2)
    for stage in stages:
        stage.whole_model.gradient_checkpointing_enable()
        stage.train()
    given = [batch(), batch(padded=True), batch(rows=3)]
    losses = [model(**one).loss for one in given]
    sum(losses).backward()
    sent = [stages[0](stages[0].inputs_of(one)) for one in given]
    for one, value in zip(given, sent, strict=True):
        arrived = {**value, "hidden_states": value["hidden_states"].detach().requires_grad_()}
        stages[1].loss_of(stages[1](arrived, 0, one), one).backward()
        value["hidden_states"].backward(arrived["hidden_states"].grad)
    found = gathered(stages, lambda param: param.grad)
    for key, param in model.named_parameters():
        torch.testing.assert_close(found[key], param.grad, rtol=1e-5, atol=1e-6)


def test_sequence_classification_finds_its_last_tokens() -> None:
    config = transformers.AutoConfig.for_model("llama", **SIZES, **IDS, **MODELS["llama"], num_labels=3)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    given = batch(padded=True)
    given["input_ids"][0, -3:] = 0
    given["labels"] = torch.tensor([2, 0])
    assert_like_the_whole(model, split(model, 2), given)


TRIED = ("llama tied", "gpt2", "gemma3_text", "opt projected", "gpt_neox", "mixtral")


@pytest.mark.parametrize("name", by_day(TRIED, "llama tied", "gemma3_text", "mixtral"))
def test_a_large_model_is_tried_by_a_small_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(name.split()[0], **{**MODELS[name], "num_hidden_layers": 3})
        model = transformers.AutoModelForCausalLM.from_config(config)
    stage = split_pretrained(model, 2, 1)
    assert {param.device.type for param in stage.parameters()} == {"meta"}
    assert pretrained_proof.specimen(model) is not model
    monkeypatch.setattr(pretrained_proof, "LARGEST", 10)
    small = make_model(name).eval()
    assert_like_the_whole(small, split(small, 2), batch(padded=True))


def test_splitting_leaves_modes_and_random_numbers_alone() -> None:
    model = make_model("gpt2").train()
    model.transformer.h[0].eval()
    torch.manual_seed(9)
    wanted = torch.rand(3)
    torch.manual_seed(9)
    stage = split_pretrained(model, 2, 0)
    assert torch.equal(torch.rand(3), wanted)
    assert stage.training
    assert not stage.whole_model.transformer.h[0].training
    assert stage.eval().whole_model.training is False


def test_copies_of_a_stage_are_stages() -> None:
    model = make_model("llama tied").eval()
    stages = [copy.deepcopy(stage) for stage in split(model, 2)]
    assert_like_the_whole(model, stages, batch())
    stages = [stage.double() for stage in stages]
    assert torch.equal(run(stages, batch()), model.double()(**batch()).loss)


class Leaky(transformers.LlamaForCausalLM):
    """Adds the embedding again after the blocks: the later stages do not have it."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        logits = output.logits + self.model.embed_tokens(input_ids).mean()
        loss = None if labels is None else logits.square().mean()
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class Remembering(transformers.LlamaForCausalLM):
    """The last block reads what the first one left: seen only by comparing numbers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        kept: list[Tensor] = []
        first, last = self.model.layers[0], self.model.layers[-1]
        first.register_forward_hook(lambda _module, _args, output: kept.append(output))
        last.register_forward_hook(lambda _module, _args, output: output + kept.pop() if kept else output)


def encoder_decoder() -> Any:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **IDS))


def of_no_tokens(name: str) -> Any:
    return transformers.AutoConfig.for_model(name, hidden_size=32, intermediate_size=40, num_attention_heads=4)


def llama_config() -> Any:
    return transformers.AutoConfig.for_model("llama", **SIZES, **IDS, **MODELS["llama"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (encoder_decoder, "T5ForConditionalGeneration cannot be split.*encoder-decoder"),
        (lambda: Leaky(llama_config()), "Leaky cannot be split.*runs before the blocks and after them"),
        (lambda: Remembering(llama_config()), "Remembering cannot be split.*do not give the logits"),
        (lambda: make_model("opt", layerdrop=0.1), "layerdrop = 0.1 leaves out blocks at random"),
        (
            lambda: make_model("bart", decoder_layers=3, decoder_layerdrop=0.1),
            "BartForCausalLM .*layerdrop = 0.1 leaves out",
        ),
        (lambda: make_model("mixtral", output_router_logits=True), "config.output_router_logits"),
        (lambda: transformers.AutoModel.from_config(llama_config()), "LlamaModel cannot be split.*no logits"),
        (lambda: transformers.HubertForCTC(of_no_tokens("hubert")), "HubertForCTC .* it has no embedding of tokens"),
        (lambda: transformers.ViTModel(of_no_tokens("vit")), "ViTModel .* it has no embedding of tokens"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "Sequential is no transformers model"),
    ],
)
def test_what_is_not_certain_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ModelError, match=f"(?s){message}.*Remedy"):
        split_pretrained(make(), 2, 0)


def test_an_unused_parameter_has_no_stage() -> None:
    model = make_model("llama")
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"has the parameter extra\.weight"):
        split_pretrained(model, 2, 0)


def test_bad_input_is_one_clear_error() -> None:
    with pytest.raises(PipelineError, match="5 layers cannot be cut into 6 parts"):
        split_pretrained(make_model("gpt2"), 6, 0)
    with pytest.raises(PipelineError, match="stage = 2 is none of the 2 stages"):
        split_pretrained(make_model("gpt2"), 2, 2)
    with pytest.raises(PipelineError, match="first and the last part must not be empty"):
        split_pretrained(make_model("gpt2"), 2, 0, partition_method=[0, 5])
    first, last = split(make_model("gpt2"), 2)
    with pytest.raises(PipelineError, match="a dict of its keywords, got tuple"):
        first.inputs_of((1, 2))
    with pytest.raises(PipelineError, match="output_hidden_states in a batch"):
        first.inputs_of({**batch(), "output_hidden_states": True})
    unlabelled = {"input_ids": batch()["input_ids"]}
    with pytest.raises(PipelineError, match="computed no loss"):
        run([first, last], unlabelled)
