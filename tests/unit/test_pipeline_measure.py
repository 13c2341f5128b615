"""Measured layers: a slow one takes longest, a large one has most bytes, and a cut made from it balances them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from harness import patience
from torch import Tensor, nn

from zerorun import LayerSpec, PipelineModule, TiedLayerSpec
from zerorun.pipeline.measure import measure_layers
from zerorun.pipeline.partition import Measured


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return value * self.scale


def head(module: nn.Embedding, value: Tensor) -> Tensor:
    return value @ module.weight.T


def test_a_list_is_measured_layer_by_layer() -> None:
    long = 0.02 * patience()  # for others may be in the way of the layers that take no time
    layers: list[Any] = [
        TiedLayerSpec("t", nn.Embedding, 50, 8),
        LayerSpec(Slow, long),
        torch.tanh,
        Slow(long / 4),
        nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)),
        TiedLayerSpec("t", nn.Embedding, 50, 8, forward_fn=head),
    ]
    seconds, sizes = measure_layers(layers, torch.zeros(2, 5, dtype=torch.int64))
    assert long <= seconds[1] < 2 * long
    assert max(seconds[:1] + seconds[2:]) < seconds[1]
    assert seconds[3] > max(seconds[0], seconds[2])
    assert sizes[0] >= 4 * 50 * 8
    assert sizes[4] > 4 * (2 * 8 * 64 + 64 + 8) + 4 * 10 * 64  # the middle of the two is kept
    module = PipelineModule(layers, 2, stage=0, partition_method=Measured(seconds, sizes, sum(sizes)))
    assert module.partitions()[1] in (1, 2)
    assert all(param.grad is None for param in layers[3].parameters())


def test_a_pretrained_model_is_measured_block_by_block() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=16, n_head=2, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.ones(2, 6, dtype=torch.int64)
    seconds, sizes = measure_layers(model, {"input_ids": ids, "labels": ids})
    assert len(seconds) == len(sizes) == 5
    assert min(seconds) > 0
    blocks = [sum(4 * param.numel() for param in block.parameters()) for block in model.transformer.h]
    assert all(size > block for size, block in zip(sizes[1:4], blocks, strict=True))
    assert sizes[1] == sizes[2] == sizes[3]
    assert all(param.grad is None for param in model.parameters())
