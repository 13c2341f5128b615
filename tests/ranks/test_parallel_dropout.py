"""Dropout in Hugging Face models over tensor ranks and stages equals one process that draws from the same streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from test_parallel_matrix import STEPS, VOCABULARY, compare, data_of, one_step, reference
from torch import nn
from training import make_config, merged

import zerorun
from zerorun.errors import StepError
from zerorun.tensor_parallel.random import region_seed

ACCUMULATION, LAYERS, TENSOR = 2, 4, 2
# Where a region begins: before the first of these in a block's attention, and in its other half.
ATTENTION, OTHER = ("attn.c_attn", "self_attn.q_proj"), ("mlp.c_fc", "mlp.gate_proj")


def gpt2() -> nn.Module:
    """Dropout of embeddings and residuals outside of regions, of attention inside."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.3))


def llama() -> nn.Module:
    """Each rank has 2 heads of queries and 1 of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.3, tie_word_embeddings=True)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama}


def build(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[name]().train()


def train(name: str, pipe: int, changes: dict[str, Any]) -> dict[str, Any]:
    degrees = {"tensor_parallel": {"size": TENSOR}, "pipeline": {"stages": pipe, "partition": cut_of(pipe)}}
    engine = zerorun.initialize(
        build(name), merged(make_config(3, accumulation=ACCUMULATION, clip=0.5), merged(degrees, changes))
    )
    data, losses, norms = data_of(0, ACCUMULATION), [], []
    torch.manual_seed(7)
    for _ in range(STEPS):
        losses.append(one_step(engine, data, ACCUMULATION, pipe))
        norms.append(engine.get_global_grad_norm())
    module = engine.module
    engine.destroy()
    weights = {name: value.detach().clone() for name, value in module.named_parameters(remove_duplicate=False)}
    return {"losses": losses, "norms": norms, "weights": weights}


def cut_of(pipe: int) -> list[int] | str:
    """The embedding and the head count as a layer each."""
    return [1 + LAYERS // 2, LAYERS // 2 + 1] if pipe == 2 else "best"


# -- one process -------------------------------------------------------------------------------------------------


class SameStreams:
    """Lets a whole model draw what each tensor rank of each stage draws. ``drawn``: the number that a region began with."""

    def __init__(self, model: nn.Module, pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.drawn = 0
        for name, module in model.named_modules():
            if name.endswith(ATTENTION + OTHER):
                module.register_forward_pre_hook(self.begin)
        self.attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", self.attend_by_rank)
        if pipe == 2:
            self.elsewhere = torch.Generator().manual_seed(7).get_state()  # of the stage that does not run
            blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
            blocks[LAYERS // 2].register_forward_pre_hook(self.swap)
            model.register_forward_hook(self.swap)

    def begin(self, *ignored: Any) -> None:
        self.drawn = int(torch.randint(2**63 - 1, (), dtype=torch.int64))

    def swap(self, *ignored: Any) -> None:
        here = torch.get_rng_state()
        torch.set_rng_state(self.elsewhere)
        self.elsewhere = here

    def attend_by_rank(self, module: Any, *heads: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, None]:
        """``heads``: queries, keys and values [batch, heads, length, width], and the mask."""
        outside, parts, mask = torch.get_rng_state(), [], heads[3:]
        for rank, own in enumerate(zip(*(tensor.chunk(TENSOR, 1) for tensor in heads[:3]), strict=True)):
            torch.manual_seed(region_seed(self.drawn, rank))
            parts.append(self.attend(module, *own, *mask, **keywords)[0])
        torch.set_rng_state(outside)
        return torch.cat(parts, 2), None


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpointing": {"policy": "full"}},
}


@pytest.mark.each_value
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("pipe", (1, 2))
@pytest.mark.parametrize("name", MODELS)
def test_dropout_equals_one_process(name: str, pipe: int, changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_with_streams(name: str) -> nn.Module:
        model = build(name)
        SameStreams(model, pipe, monkeypatch)
        torch.manual_seed(7)
        return model

    expected = reference(name, 1, ACCUMULATION, build_with_streams)
    compare(run_ranks(TENSOR * pipe, train, name, pipe, CHANGES[changes]), expected)


def drift(name: str, pipe: int) -> list[str]:
    """What a step says after one rank alone has drawn a number, and the next one, with numbers that are the same again."""
    degrees = {"tensor_parallel": {"size": TENSOR}, "pipeline": {"stages": pipe}}
    engine = zerorun.initialize(build(name), merged(make_config(1), degrees))
    data, told = data_of(0, 2), []
    for step in range(3):
        torch.manual_seed(7)
        if step == 1 and engine.topology.rank == 0:
            torch.rand(1)
        before = [value.clone() for value in engine.state_dict().values()]
        try:
            one_step(engine, data, 1, pipe)
            told.append("")
        except StepError as error:
            told.append(str(error))
            assert all(torch.equal(a, b) for a, b in zip(before, engine.state_dict().values(), strict=True))
    engine.destroy()
    return told


@pytest.mark.parametrize(("name", "pipe", "is_told"), (("gpt2", 1, True), ("gpt2", 2, True), ("llama", 1, False)))
def test_tensor_ranks_that_would_drop_other_elements_are_told(name: str, pipe: int, is_told: bool) -> None:
    """Their losses are the same, since they put logits together. Llama drops in regions only, where ranks differ anyway."""
    for first, second, third in run_ranks(TENSOR * pipe, drift, name, pipe):
        assert first == third == ""
        assert ("had different losses or random numbers at step 2" in second) == is_told
