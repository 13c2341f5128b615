"""Small models, each with one trait that sharding could get wrong, and their losses for one micro-batch.

A ``Case`` builds the module and says how its loss is computed from any callable that behaves like the module: the
engine or, in the reference, the module itself. Rank and step are given as numbers, so that one process can play all ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, LENGTH, MICRO = 40, 16, 6, 2
BLOCKS = 4


@dataclass(frozen=True)
class Place:
    """Where in the training a micro-batch is."""

    rank: int = 0
    step: int = 0
    micro: int = 0


def tokens(place: Place, salt: int = 0) -> torch.Tensor:
    """[MICRO, LENGTH + 1] token ids, different at every place."""
    seed = 1 + salt + 10 * (place.micro + 10 * (place.rank + 10 * place.step))
    return torch.randint(VOCAB, (MICRO, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def token_loss(model: Callable[..., torch.Tensor], ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Mean cross-entropy of the next token, computed in the dtype of the reference or fp32."""
    logits = model(ids[:, :-1], **kwargs)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Block(nn.Module):
    """Attention and MLP, as in a GPT."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias for keys: it cancels in the softmax, and its gradient would be nothing but rounding.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mlp(nn.Module):
    """A cheap block: one hidden layer. 37 hidden elements make shards that need padding."""

    def __init__(self, hidden: int = 37) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Gpt(nn.Module):
    """Embedding, blocks, norm, head. Subclasses change how the blocks run."""

    def __init__(self, blocks: int = BLOCKS, make: Callable[[], nn.Module] = Block, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.head(self.norm(self.run(self.embed(ids), **kwargs)))


class LoraLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank part."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.empty(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Lora(Gpt):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(3, **kwargs)
        self.requires_grad_(False)
        for block in self.blocks:
            block.qkv, block.down = LoraLinear(block.qkv), LoraLinear(block.down)


class Extra(Mlp):
    """A block with parameters that not every forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.empty(5))

    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x)
        return x + self.extra(x) * self.scale.sum() if use else x


class Unused(Gpt):
    """``use``: whether the odd blocks and the root use their extra parameters."""

    def __init__(self) -> None:
        super().__init__(4, Extra)
        self.root_extra = nn.Parameter(torch.empty(WIDTH))

    def run(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:  # type: ignore[override]
        for index, block in enumerate(self.blocks):
            x = block(x, use=use and index % 2 == 1)
        return x + self.root_extra if use else x


class Branch(Gpt):
    """Skips whole blocks: those whose bit in ``skip`` is set."""

    def __init__(self) -> None:
        super().__init__(5, Mlp)

    def run(self, x: torch.Tensor, skip: int = 0) -> torch.Tensor:  # type: ignore[override]
        for index, block in enumerate(self.blocks):
            if not skip >> index & 1:
                x = block(x)
        return x


class Expert(Mlp):
    def __init__(self) -> None:
        super().__init__(21)


class Moe(nn.Module):
    """Top-1 routing of whole micro-batches: ``expert`` is the winner, weighted by its routing probability."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.router = nn.Linear(WIDTH, 5)
        self.experts = nn.ModuleList(Expert() for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, expert: int) -> torch.Tensor:
        x = self.blocks[0](self.embed(ids))
        gate = self.router(x).softmax(-1)[..., expert : expert + 1]
        return self.head(self.blocks[1](x + gate * self.experts[expert](x)))


class Repeated(Gpt):
    """Runs its blocks in ``order``, some of them twice (as in ALBERT)."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__(max(order) + 1)
        self.order = order

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


class Checkpointed(Gpt):
    """Recomputes ``group`` blocks at a time."""

    def __init__(self, group: int, reentrant: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.group, self.reentrant = group, reentrant

    def run(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for start in range(0, len(self.blocks), self.group):
            part = self.blocks[start : start + self.group]

            def chain(x: torch.Tensor, part: Any = part) -> torch.Tensor:
                for block in part:
                    x = block(x)
                return x

            x = checkpoint(chain, x, use_reentrant=self.reentrant)
        return x


class LoraCheckpointed(Checkpointed, Lora):
    pass


def reset(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random values, biases included, that keep every norm away from zero, where relative errors mean nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            noise = torch.randn(param.shape, generator=generator) * (0.7 / WIDTH**0.5)
            is_gain = "norm" in name and name.endswith("weight")
            param.copy_(1.0 + noise if is_gain else noise)
    return module


def _freeze(module: nn.Module, seed: int) -> nn.Module:
    """Freeze a random third of the parameters; the embedding stays trainable."""
    chosen = random.Random(seed)
    for name, param in module.named_parameters():
        param.requires_grad_("embed" in name or chosen.random() > 0.35)
    return module


def _plain_loss(model: Any, place: Place) -> torch.Tensor:
    return token_loss(model, tokens(place))


def _two_forwards(model: Any, place: Place) -> torch.Tensor:
    return token_loss(model, tokens(place)) + 0.5 * token_loss(model, tokens(place, salt=1))


def _no_decay(module: nn.Module) -> list[dict[str, Any]]:
    params = [param for param in module.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.2},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


@dataclass(frozen=True)
class Case:
    """``classes``: module class names for the unit policy of that kind. ``groups``: parameter groups, if not one."""

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[Any, Place], torch.Tensor] = _plain_loss
    classes: tuple[str, ...] = ("Block",)
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None

    def build(self, seed: int = 0) -> nn.Module:
        """The module with the same values on every call."""
        return reset(self.make(), seed)


def _skip(place: Place) -> int:
    """Which of 5 blocks a rank skips in a step: never the same on two ranks, sometimes none."""
    return (0b00101, 0b01010, 0, 0b11000, 0b00011, 0b00110)[(2 * place.rank + place.step + place.micro) % 6]


CASES = {
    case.name: case
    for case in (
        Case("plain", Gpt),
        Case("tied", lambda: Gpt(3, tied=True)),
        Case("frozen", lambda: _freeze(Gpt(), 3)),
        Case("lora", Lora, classes=("LoraLinear",)),
        Case(
            "unused_on_one_rank",
            Unused,
            lambda model, place: token_loss(model, tokens(place), use=place.rank != 1),
            ("Extra",),
        ),
        Case("unused_everywhere", Unused, classes=("Extra",)),
        Case(
            "unused_alternating",
            Unused,
            lambda model, place: token_loss(model, tokens(place), use=(place.step + place.micro) % 2 == 1),
            ("Extra",),
        ),
        Case(
            "unused_alternating_steps",
            Unused,
            lambda model, place: token_loss(model, tokens(place), use=place.step % 2 == 0),
            ("Extra",),
        ),
        Case("branch", Branch, lambda model, place: token_loss(model, tokens(place), skip=_skip(place)), ("Mlp",)),
        Case(
            "moe",
            Moe,
            lambda model, place: token_loss(model, tokens(place), expert=(place.rank + 2 * place.step) % 5),
            ("Expert",),
        ),
        Case("repeated", lambda: Repeated((0, 0, 1, 1, 2))),
        Case("repeated_apart", lambda: Repeated((0, 1, 2, 0, 1, 2))),
        Case("two_forwards", Gpt, _two_forwards),
        Case("checkpoint_reentrant", lambda: Checkpointed(1, True)),
        Case("checkpoint", lambda: Checkpointed(1, False)),
        Case("checkpoint_groups_reentrant", lambda: Checkpointed(2, True, blocks=5)),
        Case("checkpoint_groups", lambda: Checkpointed(2, False, blocks=5)),
        Case("frozen_checkpoint_reentrant", lambda: _freeze(Checkpointed(2, True), 4)),
        Case("lora_checkpoint", lambda: LoraCheckpointed(1, False), classes=("Block",)),
        Case("two_groups", Gpt, groups=_no_decay),
    )
}
