"""A small model with layers of experts, cut by hand, and exact on any number of ranks.

``spread`` gives each rank its experts. A layer then brings the tokens of all ranks of the expert axis together, and adds up
what the ranks' experts make of them: slow, and without any of the steps of zerorun.expert_parallel. In one process it is
plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from models import VOCAB, WIDTH, Place, reset, token_loss, tokens
from torch import nn

from zerorun.distributed.tensor_shard import TensorShard, even_range
from zerorun.distributed.topology import Topology
from zerorun.tensor_parallel.axis import TransportAxis, make_axis
from zerorun.tensor_parallel.collectives import make_region
from zerorun.tensor_parallel.layers import make_column_parallel

EXPERTS, CHOSEN = 12, 2


class _Together(torch.autograd.Function):
    """The rows [n, ...] of all places of the expert axis, one after the other; backward, the sum of what they get."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, experts: Experts) -> torch.Tensor:
        ctx.experts = experts
        return experts.put(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.experts.take(grad), None


class _Sum(torch.autograd.Function):
    """Of the ranks' summands for the rows of all places, those of this rank's place; backward, to all of them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, experts: Experts) -> torch.Tensor:
        ctx.experts = experts
        return experts.take(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.experts.put(grad), None


class Experts(nn.Module):
    """``forward(hidden [T, WIDTH], index [T, K], weights [T, K])``. Experts that get no token do not run."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, hidden, WIDTH))
        self.bias = nn.Parameter(torch.empty(EXPERTS, hidden))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, hidden))
        self.axis: TransportAxis | None = None
        self.tensor, self.first = (0, 1), 0

    def spread(self, topology: Topology, axis: TransportAxis) -> None:
        """Keep the experts of this rank."""
        low, high = even_range(EXPERTS, topology.expert_rank, topology.expert)
        self.axis, self.first, self.tensor = axis, low, (topology.tensor_rank, topology.tensor)
        self.tensor_shards = {}
        for name, param in self.named_parameters():
            shard = TensorShard(tuple(param.shape), 0, ((low, high),), "expert")
            self.tensor_shards[name], param.data = shard, shard.cut(param.data)

    def put(self, rows: torch.Tensor) -> torch.Tensor:
        """Tensor ranks have the same rows: each gives its own part of them."""
        assert self.axis is not None
        rank, tensors = self.tensor
        whole = rows.new_zeros(self.axis.size // tensors, *rows.shape)
        whole[self.axis.rank // tensors, rank::tensors] = rows[rank::tensors]
        return self.axis.all_reduce(whole.flatten(0, 1), "experts: put")

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.axis is not None
        places, total = self.axis.size // self.tensor[1], self.axis.all_reduce(rows, "experts: take")
        return total.unflatten(0, (places, -1))[self.axis.rank // self.tensor[1]].contiguous()

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.axis is None:
            return self.run(hidden, index, weights)
        together, weights = _Together.apply(hidden, self), _Together.apply(weights, self)
        return _Sum.apply(self.run(together, self.put(index.float()).long(), weights), self)

    def run(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = hidden * 0 + weights.sum() * 0  # so that the backwards of all ranks meet
        for number, up in enumerate(self.up.unbind()):
            chosen = index == self.first + number
            if bool(chosen.any()):
                found = torch.tanh(hidden @ up.T + self.bias[number]) @ self.down[number].T
                out = out + (weights * chosen).sum(-1, keepdim=True) * found
        return out


class MoeBlock(nn.Module):
    """A dense layer and a layer of experts, which ``skip`` leaves out. ``few``: all tokens go to the first experts."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts(hidden)

    def forward(self, x: torch.Tensor, few: bool, skip: bool) -> torch.Tensor:
        x = x + torch.tanh(self.mlp(self.norm(x)))
        if skip:
            return x
        rows = x.flatten(0, 1)
        logits = self.router(rows).masked_fill(few * (torch.arange(EXPERTS, device=x.device) >= CHOSEN), -100.0)
        weights, index = logits.softmax(-1).topk(CHOSEN)
        return x + self.experts(rows, index, weights).view(x.shape)


class MoeModel(nn.Module):
    """``skip``: the block in the middle leaves its experts out."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(MoeBlock(hidden) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, few: bool = False, skip: bool = False) -> torch.Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, few, skip and number == 1)
        return self.head(x)


def build(hidden: int = 10) -> nn.Module:
    """With the same values on every call."""
    model = reset(MoeModel(hidden), 3)
    for module in model.modules():
        if isinstance(module, Experts):
            module.down.data.mul_((10 / hidden) ** 0.5)
    return model


def spread(model: nn.Module, topology: Topology) -> nn.Module:
    """Let each rank of the expert axis keep its experts, and each tensor rank its columns of the other layers."""
    cpu = torch.device("cpu")
    blocks = [module for module in model.modules() if isinstance(module, MoeBlock)]
    for block in blocks if topology.expert > 1 else ():
        block.experts.spread(topology, make_axis(topology, cpu, "expert"))
    for block in blocks if topology.tensor > 1 else ():
        own = even_range(WIDTH, topology.tensor_rank, topology.tensor)
        make_column_parallel(block.mlp, make_region(topology, cpu), (own,), gather_output=True)
    return model


def loss_of(model: Any, place: Place, **kwargs: bool) -> torch.Tensor:
    return token_loss(model, tokens(place), **kwargs)
