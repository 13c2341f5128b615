"""Dropout where ranks divide sequences: each draws numbers of its own, from one seed, as often as one process drops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contexts import VOCABULARY, llama, plain
from harness import run_ranks
from reference import OPTIMIZERS
from torch import nn
from training import make_config, merged

import zerorun

DROPPED, TOKENS, WIDTH, STEPS = 0.25, 64, 32, 4


class Dropping(nn.Module):
    """Notes what a dropout layer inside a block drops."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(DROPPED)
        self.dropped: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dropped.append(self.dropout(torch.ones_like(x)) == 0)
        return self.dropout(self.inner(x))


def draw(tensor: int, policy: str) -> dict[str, Any]:
    model: Any = llama(attention_dropout=DROPPED, num_key_value_heads=4)
    layer = model.model.layers[1]
    layer.mlp = Dropping(layer.mlp)
    torch.manual_seed(3)
    config = {"sequence_parallel_size": 2, "tensor_parallel": {"size": tensor}, "seed": 1}
    if policy == "the model's own":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif policy in ("none", "full"):
        config |= {"activation_checkpointing": {"policy": policy}}
    engine = zerorun.initialize(model, merged(make_config(1), config))
    engine.train()
    if policy == "its block in evaluation":
        layer.eval()
        layer.mlp.dropout.train()
    before = torch.randint(1000, ())
    loss = engine(**plain(torch.Generator().manual_seed(0), TOKENS)).loss
    after = torch.randint(1000, ())
    engine.backward(loss)
    engine.step()
    first = layer.mlp.dropped
    found = {"dropped": first[0], "again": first[-1], "outside": (int(before), int(after)), "loss": loss.item()}
    place = engine.topology.context_rank
    engine.destroy()
    return {**found, "place": place}


@pytest.mark.parametrize(
    ("tensor", "policy"),
    [
        (1, "full"),
        (1, "the model's own"),
        (1, "its block in evaluation"),
        pytest.param(2, "none", marks=pytest.mark.nightly),
    ],
)
def test_ranks_of_a_context_drop_other_elements(tensor: int, policy: str) -> None:
    found = run_ranks(2 * tensor, draw, tensor, policy)
    assert len({result["outside"] for result in found}) == 1  # outside of blocks all draw the same
    assert len({result["loss"] for result in found}) == 1
    for result in found:
        share = result["dropped"].float().mean().item()
        spread = math.sqrt(DROPPED * (1 - DROPPED) / result["dropped"].numel())
        assert abs(share - DROPPED) < 4 * spread
        assert torch.equal(result["dropped"], result["again"])  # a recomputation drops the same
    rows = {result["place"]: result["dropped"] for result in found}
    both = (rows[0] & rows[1]).float().mean().item()
    assert both == pytest.approx(DROPPED**2, abs=4 * math.sqrt(DROPPED**2 / rows[0].numel()))


def opt() -> Any:
    """Leaves out blocks at random."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(5)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": 48, "init_std": 0.3}
    layers = {"num_hidden_layers": 6, "num_attention_heads": 4, "layerdrop": 0.4, "dropout": 0.0}
    return OPTForCausalLM(OPTConfig(**sizes, **layers, max_position_embeddings=32)).train()


def ran_in(model: Any, draws: bool) -> list[int]:
    """The numbers of the blocks that run, to which they are added; each ``draws`` as ranks do that divide its sequences."""
    ran: list[int] = []

    def note(number: int) -> None:
        ran.append(number)
        if draws:
            torch.randint(2**63 - 1, (), dtype=torch.int64)

    for number, layer in enumerate(model.model.decoder.layers):
        layer.register_forward_pre_hook(lambda *ignored, number=number: note(number))
    return ran


def drop_layers(policy: str) -> list[Any]:
    engine = zerorun.initialize(
        opt(), merged(make_config(1), {"sequence_parallel_size": 2, "activation_checkpointing": {"policy": policy}})
    )
    ran, found = ran_in(engine.module, False), []
    torch.manual_seed(2)
    for step in range(STEPS):
        ran.clear()
        loss = engine(**plain(torch.Generator().manual_seed(step), 12)).loss
        blocks = list(ran)
        engine.backward(loss)
        engine.step()
        found.append((blocks, loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    return found


@pytest.mark.parametrize("policy", ("none", "full"))
def test_ranks_leave_out_the_same_blocks_as_one_process(policy: str) -> None:
    model = opt()
    optimizer = OPTIMIZERS["AdamW"][0](model.parameters(), **OPTIMIZERS["AdamW"][1])
    ran, expected = ran_in(model, True), []
    torch.manual_seed(2)
    for step in range(STEPS):
        ran.clear()
        loss = model(**plain(torch.Generator().manual_seed(step), 12)).loss
        loss.backward()
        expected.append((list(ran), loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))))
        optimizer.step()
        optimizer.zero_grad()
    assert any(0 not in blocks for blocks, _, _ in expected)  # also the first one, where sequences are cut
    assert any(5 not in blocks for blocks, _, _ in expected)
    for found in run_ranks(2, drop_layers, policy):
        for (blocks, loss, norm), wanted in zip(found, expected, strict=True):
            assert blocks == wanted[0]
            assert (loss, norm) == pytest.approx(wanted[1:], rel=1e-5)


def means(size: int) -> torch.Tensor:
    """The mean gradient of the embedding over many draws of dropout."""
    model: Any = llama(attention_dropout=0.1)
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.1))
    engine = zerorun.initialize(model, merged(make_config(0), {"sequence_parallel_size": size}))
    engine.train()
    torch.manual_seed(7)
    losses = [engine(**plain(torch.Generator().manual_seed(0), 12)).loss.item() for _ in range(60)]
    dist.barrier()
    engine.destroy()
    return torch.tensor(losses)


@pytest.mark.nightly
def test_losses_have_the_mean_of_one_process() -> None:
    one, two = run_ranks(1, means, 1)[0], run_ranks(2, means, 2)[0]
    error = math.sqrt(float(one.var() + two.var()) / len(one))
    assert abs(float(one.mean() - two.mean())) < 4 * error
    assert 0.3 < float(two.std() / one.std()) < 3
