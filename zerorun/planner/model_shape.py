"""Model shape: a decoder by its numbers, and the parameters that follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from ..errors import ConfigError, ConfigProblem
from .number_checks import not_whole


@dataclass(frozen=True)
class Weight:
    """A parameter. ``divided``: the dimension that tensor ranks divide; None if each of them has all of it.

    ``expert``: it is that of all experts of a block, which are its first dimension. ``summed``: tensor ranks, which all
    have it, have summands of its gradient: "always", or if they divide "rows".
    """

    name: str
    shape: tuple[int, ...]
    divided: int | None = None
    expert: bool = False
    summed: str = ""

    def on_rank(self, tensor: int, expert: int = 1) -> tuple[int, ...]:
        """Return the shape that the first of ``tensor`` ranks has. ``expert``: ranks with different experts."""
        own, divided, ranks = list(self.shape), self.divided, tensor
        if self.expert and expert > 1:
            divided, ranks = 0, expert
        if divided is not None:
            own[divided] = -(-own[divided] // ranks)
        return tuple(own)


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose queries, keys and values are made from narrow vectors (DeepSeek-V2, arXiv:2405.04434).

    ``queries``, ``keys``: the widths of these vectors; 0 queries if they are made from hidden states. ``plain`` and
    ``rotary``: elements of a head of queries and keys without and with a position. ``values``: of a head of values.
    """

    queries: int
    keys: int
    plain: int
    rotary: int
    values: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder. ``ffn``: the width of one expert, if a block has several. ``matrices``: of an expert, 3 if it is gated.

    ``gains``: vectors of norms in a block. ``biases``: of layers: "qkv", "attention", "mlp" or "all". ``positions``: those
    of a table of positions. ``rotary``: bytes of buffers for rotary positions. ``normed``: queries and keys have a norm, of
    each "head", or of "all" heads together. ``sinks``: each head has a score of its own. ``latent``: narrow attention.
    ``whole``: by the model's own plan, tensor ranks do not divide its attention or its shared experts. ``cannot``: what of
    ``model_kinds.FEATURES`` zerorun refuses for the model.

    Of a mixture: ``shared_ffn``: the width of what all tokens go through beside experts; ``shared_gate``: it has a gate.
    ``dense_layers``: how many of the first blocks have an MLP of the width ``dense_ffn`` in place of experts.
    ``expert_biases``: router and experts have some. ``corrected``: the router has a buffer with a number for each expert.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    matrices: int
    vocab: int
    tied: bool = False
    experts: int = 1
    used_experts: int = 1
    gains: int = 2
    final_gains: int = 1
    biases: str = ""
    positions: int = 0
    rotary: int = 0
    normed: str = ""
    sinks: bool = False
    whole: bool = False
    cannot: frozenset[str] = frozenset()
    latent: LatentAttention | None = None
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    dense_ffn: int = 0
    expert_biases: bool = False
    corrected: bool = False

    def __post_init__(self) -> None:
        problems = [*_wrong_numbers(self)]
        if problems:
            raise ConfigError(problems, "ModelShape")

    @cached_property
    def kinds(self) -> tuple[ModelShape, ...]:
        """The model by kinds of blocks, in their order: each as a shape with blocks of one kind only."""
        if not self.dense_layers:
            return (self,)
        plain: dict[str, Any] = {
            "experts": 1,
            "used_experts": 1,
            "shared_ffn": 0,
            "shared_gate": False,
            "expert_biases": False,
        }
        dense = replace(self, **plain, ffn=self.dense_ffn, layers=self.dense_layers, dense_layers=0, corrected=False)
        return dense, replace(self, layers=self.layers - self.dense_layers, dense_layers=0)

    @cached_property
    def block(self) -> tuple[Weight, ...]:
        """The parameters of a block, of the last kind."""
        norms = (Weight(f"norm {number}", (self.hidden,), summed="rows") for number in range(self.gains))
        return (*self._attention, *(self._mixture if self.experts > 1 else self._mlp), *norms)

    @property
    def _attention(self) -> tuple[Weight, ...]:
        if self.latent is not None:
            return self._latent_attention(self.latent)
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = {"query": queries, "key": keys, "value": keys}
        found = [Weight("sinks", (self.heads,), 0)] if self.sinks else []
        for name, size in sides.items():
            found += _layer(name, (size, hidden), 0, bias=bool(self.biases) and self.biases != "mlp")
        found += _layer("output", (hidden, queries), 1, bias=self.biases in ("attention", "all"))
        if self.normed:
            own = (self.head_dim, self.head_dim) if self.normed == "head" else (queries, keys)
            summed = "always" if self.normed == "head" else ""
            found += [Weight(f"{name} norm", (size,), summed=summed) for name, size in zip(sides, own, strict=False)]
        return tuple(found)

    def _latent_attention(self, latent: LatentAttention) -> tuple[Weight, ...]:
        hidden, width = self.hidden, self.heads * (latent.plain + latent.rotary)
        made = [Weight("query", (width, latent.queries or hidden), 0)]
        if latent.queries:
            made += [Weight("narrow query", (latent.queries, hidden)), Weight("query norm", (latent.queries,))]
        return (
            *made,
            Weight("narrow key", (latent.keys + latent.rotary, hidden)),
            Weight("key norm", (latent.keys,)),
            Weight("key and value", (self.heads * (latent.plain + latent.values), latent.keys), 0),
            Weight("output", (hidden, self.heads * latent.values), 1),
        )

    @property
    def _mixture(self) -> tuple[Weight, ...]:
        hidden, count, inner = self.hidden, self.experts, (self.matrices - 1) * self.ffn
        found = [Weight("router", (count, hidden))]
        found += [
            Weight("up", (count, inner, hidden), 1, expert=True),
            Weight("down", (count, hidden, self.ffn), 2, expert=True),
        ]
        if self.expert_biases:
            found += [Weight("router bias", (count,)), Weight("up bias", (count, inner), 1, expert=True)]
            found.append(Weight("down bias", (count, hidden), expert=True))
        if self.shared_ffn:
            found += self._gated("shared ", self.shared_ffn)
        if self.shared_gate:
            found.append(Weight("shared gate", (1, hidden)))
        return tuple(found)

    @property
    def _mlp(self) -> tuple[Weight, ...]:
        return tuple(self._gated("", self.ffn, bias=self.biases in ("mlp", "all")))

    def _gated(self, prefix: str, width: int, *, bias: bool = False) -> list[Weight]:
        found: list[Weight] = []
        for name in ("gate", "up")[3 - self.matrices :]:
            found += _layer(prefix + name, (width, self.hidden), 0, bias=bias)
        return [*found, *_layer(f"{prefix}down", (self.hidden, width), 1, bias=bias)]

    @cached_property
    def before(self) -> tuple[Weight, ...]:
        """The parameters before the first block."""
        embedding = Weight("embedding", (self.vocab, self.hidden), 0)
        return (embedding, Weight("positions", (self.positions, self.hidden))) if self.positions else (embedding,)

    @cached_property
    def after(self) -> tuple[Weight, ...]:
        """The parameters after the last block; a head that is tied to the embedding is not among them."""
        norms = tuple(Weight(f"final norm {number}", (self.hidden,)) for number in range(self.final_gains))
        return norms if self.tied else (*norms, Weight("head", (self.vocab, self.hidden), 0))

    @cached_property
    def block_weights(self) -> int:
        """Those of a block, of the last kind."""
        return sum(prod(weight.shape) for weight in self.block)

    @cached_property
    def expert_weights(self) -> int:
        """Those of a block's experts, of the last kind."""
        return sum(prod(weight.shape) for weight in self.block if weight.expert)

    @cached_property
    def parameters(self) -> int:
        """The number of parameters."""
        outside = sum(prod(weight.shape) for weight in (*self.before, *self.after))
        return sum(kind.layers * kind.block_weights for kind in self.kinds) + outside

    @cached_property
    def used_parameters(self) -> int:
        """The parameters in products of one token: without the embedding's look-up and experts that it does not use."""
        spared = (self.experts - self.used_experts) * self.matrices * self.hidden * self.ffn
        used = sum(kind.layers * kind.block_weights for kind in self.kinds)
        return used - (self.layers - self.dense_layers) * spared + self.vocab * self.hidden

    @property
    def attended(self) -> float:
        """The elements of a head that a score and its value take, in the mean of both."""
        if self.latent is None:
            return self.head_dim
        return (self.latent.plain + self.latent.rotary + self.latent.values) / 2

    def flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs of a token in training, causal attention over ``sequence`` tokens, nothing recomputed."""
        return 6.0 * self.used_parameters + 6.0 * self.layers * self.heads * self.attended * sequence


def _layer(name: str, shape: tuple[int, int], divided: int, *, bias: bool) -> list[Weight]:
    """Return the parameters of a linear layer. Ranks that divide its inputs have all of its bias."""
    own = Weight(f"{name} bias", shape[:1], None if divided else 0, summed="rows" if divided else "")
    return [Weight(name, shape, divided), *([own] if bias else [])]


_MOST_LAYERS = 10_000
_FROM_0 = ("gains", "final_gains", "positions", "rotary", "shared_ffn", "dense_layers", "dense_ffn")
_FROM_1 = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "matrices", "vocab", "experts", "used_experts")


def too_deep(layers: int) -> Iterator[ConfigProblem]:
    """Yield the number of blocks if there are more than can be planned in seconds."""
    if layers > _MOST_LAYERS:
        yield ConfigProblem("layers", layers, f"is more than the {_MOST_LAYERS:,} blocks that are planned.", "give fewer.")


def _wrong_numbers(shape: ModelShape) -> Iterator[ConfigProblem]:
    """Yield the numbers of ``shape`` that are none, and those that do not go together."""
    from_1 = {name: getattr(shape, name) for name in _FROM_1}
    from_0 = {name: getattr(shape, name) for name in _FROM_0}
    problems = [*not_whole(from_1, 1), *not_whole(from_0, 0)]
    if problems:
        yield from problems
        return
    yield from too_deep(shape.layers)
    if shape.matrices not in (2, 3):
        yield ConfigProblem(
            "matrices", shape.matrices, "is no number of matrices of an MLP.", "give 2, or 3 if it is gated."
        )
    if shape.heads % shape.kv_heads:
        reason = f"does not divide {shape.heads} heads."
        yield ConfigProblem("kv_heads", shape.kv_heads, reason, "give a divisor of the heads.")
    if shape.used_experts > shape.experts:
        reason = f"is more than {shape.experts} experts."
        yield ConfigProblem("used_experts", shape.used_experts, reason, "give at most as many.")
    if shape.dense_layers >= shape.layers:
        reason = f"leaves none of {shape.layers} blocks with experts."
        yield ConfigProblem("dense_layers", shape.dense_layers, reason, "give fewer.")
    if shape.dense_layers and not shape.dense_ffn:
        yield ConfigProblem("dense_ffn", 0, "is no width of blocks without experts.", "give it.")
