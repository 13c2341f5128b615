"""Model shape: a decoder by its numbers, as a Hugging Face config.json has them, and the parameters that follow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConfigProblem


@dataclass(frozen=True)
class Weight:
    """A parameter. ``divided``: the dimension that tensor ranks divide; None if each of them has all of it."""

    name: str
    shape: tuple[int, ...]
    divided: int | None = None

    def on_rank(self, tensor: int) -> tuple[int, ...]:
        """Return the shape that the first of ``tensor`` ranks has."""
        if self.divided is None:
            return self.shape
        own = list(self.shape)
        own[self.divided] = -(-own[self.divided] // tensor)
        return tuple(own)


@dataclass(frozen=True)
class ModelShape:
    """A decoder. ``ffn``: the width of one expert, if a block has several. ``matrices``: of an expert, 3 if it is gated.

    ``gains``: vectors of norms in a block. ``biases``: which layers have them: "", "qkv" or "all". ``positions``: those of
    a table of positions. ``rotary``: bytes of buffers for rotary positions.
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

    @cached_property
    def block(self) -> tuple[Weight, ...]:
        """The parameters of a block."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = [
            Weight("query", (queries, hidden), 0),
            Weight("key", (keys, hidden), 0),
            Weight("value", (keys, hidden), 0),
            Weight("output", (hidden, queries), 1),
        ]
        if self.experts > 1:
            found += [
                Weight("router", (self.experts, hidden)),
                Weight("up", (self.experts, (self.matrices - 1) * self.ffn, hidden), 1),
                Weight("down", (self.experts, hidden, self.ffn), 2),
            ]
        else:
            names = ("gate", "up")[3 - self.matrices :]
            found += [Weight(name, (self.ffn, hidden), 0) for name in names] + [Weight("down", (hidden, self.ffn), 1)]
        if self.biases:
            found += [
                Weight(f"{name} bias", (size,), 0) for name, size in (("query", queries), ("key", keys), ("value", keys))
            ]
        if self.biases == "all":
            found += [Weight("output bias", (hidden,)), Weight("down bias", (hidden,)), Weight("up bias", (self.ffn,), 0)]
        return (*found, *(Weight(f"norm {number}", (hidden,)) for number in range(self.gains)))

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
        return sum(prod(weight.shape) for weight in self.block)

    @cached_property
    def parameters(self) -> int:
        """The number of parameters."""
        outside = sum(prod(weight.shape) for weight in (*self.before, *self.after))
        return self.layers * self.block_weights + outside

    @cached_property
    def used_parameters(self) -> int:
        """The parameters in products of one token: without the embedding's look-up and experts that it does not use."""
        spared = (self.experts - self.used_experts) * self.matrices * self.hidden * self.ffn
        return self.layers * (self.block_weights - spared) + self.vocab * self.hidden

    def flops_per_token(self, sequence: int) -> float:
        """Return the FLOPs of a token in training, causal attention over ``sequence`` tokens, nothing recomputed."""
        return 6.0 * self.used_parameters + 6.0 * self.layers * self.heads * self.head_dim * sequence


# Names of the same number in the configurations of models.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}
_NOT_GATED = ("gpt", "falcon", "opt", "bloom", "mpt", "phi")
_WITHOUT_GAINS = ("olmo",)


def read_shape(path: str | Path) -> ModelShape:
    """Read a ``config.json``. Raises ConfigError if it cannot be read, or does not have the numbers of a decoder."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            [ConfigProblem("model", str(path), f"cannot be read: {error}.", "give a config.json.")]
        ) from error
    return shape_of(values, str(path))


def shape_of(values: dict[str, Any], source: str = "model") -> ModelShape:
    """Return the shape that a model's configuration describes. Raises ConfigError if it lacks a number."""
    config = {**values, **values.get("text_config", {})}
    kind = str(config.get("model_type", "llama"))
    missing = [names[0] for names in _NAMES.values() if not any(isinstance(config.get(name), int) for name in names)]
    if missing:
        reason = "is not in the configuration of the model."
        raise ConfigError([ConfigProblem(key, None, reason, "give it.") for key in missing], source)
    numbers = {key: next(config[name] for name in names if name in config) for key, names in _NAMES.items()}
    hidden, heads = numbers["hidden"], numbers["heads"]
    table = kind.startswith("gpt2") or kind == "opt"
    head_dim = config.get("head_dim") or hidden // heads
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    norms = {"gains": 0, "final_gains": 0} if kind in _WITHOUT_GAINS else {}
    if table:
        norms = {"gains": 4, "final_gains": 2}
    biases = "all" if table else "qkv" if kind == "qwen2" or config.get("attention_bias") else ""
    ffn = config.get("moe_intermediate_size") or config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    tied = config.get("tie_word_embeddings", kind.startswith(_NOT_GATED))
    return ModelShape(
        **numbers,
        **norms,
        kv_heads=config.get("num_key_value_heads") or config.get("num_kv_heads") or heads,
        head_dim=head_dim,
        ffn=ffn,
        matrices=2 if kind.startswith(_NOT_GATED) else 3,
        tied=bool(tied),
        experts=experts,
        used_experts=config.get("num_experts_per_tok") or 1,
        biases=biases,
        positions=config.get("n_positions") or config.get("max_position_embeddings") or 1024 if table else 0,
        rotary=0 if table else 2 * 4 * (head_dim // 2),
    )
