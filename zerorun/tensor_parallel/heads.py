"""Attention heads of an existing model: how many there are, which layers project to them, which attributes count them.

The numbers are read from attributes of the attention module and, where it has none, from the configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ModelError

QUERY_NAMES = {"q_proj", "query", "q_lin", "wq", "to_q", "q", "query_proj", "q_b_proj", "kv_b_proj"}
KEY_VALUE_NAMES = {"k_proj", "key", "k_lin", "wk", "to_k", "k", "key_proj"}
KEY_VALUE_NAMES |= {"v_proj", "value", "v_lin", "wv", "to_v", "v", "value_proj"}
FUSED_NAMES = {"c_attn", "qkv", "query_key_value", "qkv_proj", "Wqkv", "wqkv", "W_pack", "in_proj", "attn_qkv", "qkv_lin"}
FUSED_NAMES |= {"to_qkv"}
# Column-parallel layers of MLPs that may be in the same module as an attention.
MLP_NAMES = {"fc1", "fc_in", "c_fc", "up", "gate", "up_proj", "gate_proj", "gate_up_proj", "w1", "w3", "lin1", "linear1"}
MLP_NAMES |= {"dense_h_to_4h", "dense"}

_QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nheads")
_KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_GROUPS = ("num_key_value_groups", "n_rep")
_QUERY_WIDTHS = ("split_size", "embed_dim", "hidden_size", "all_head_size", "inner_dim", "n_embd", "width", "d_model")


@dataclass(frozen=True)
class Heads:
    """The numbers of query heads and of key-value heads of one attention."""

    query: int
    key_value: int

    def local(self, size: int) -> Heads:
        """Return the heads that one of ``size`` ranks computes. With fewer key-value heads than ranks, ranks share one."""
        return Heads(self.query // size, max(self.key_value // size, 1))

    def problem(self, name: str, size: int) -> str | None:
        """Return why ``size`` ranks cannot divide the heads of ``name`` among them, or None."""
        if self.query % size:
            fitting = [n for n in range(1, self.query + 1) if self.query % n == 0 and _fits(self.key_value, n)]
            return (
                f"{name} has {self.query} query heads, which tensor_parallel.size {size} does not divide. "
                f"Remedy: use a size of {fitting}."
            )
        if not _fits(self.key_value, size):
            fitting = [n for n in range(1, self.query + 1) if self.query % n == 0 and _fits(self.key_value, n)]
            return (
                f"{name} has {self.key_value} key-value heads, which tensor_parallel.size {size} neither divides nor is "
                f"a multiple of. Remedy: use a size of {fitting}."
            )
        return None


def _fits(key_value: int, size: int) -> bool:
    return key_value % size == 0 or size % key_value == 0


@dataclass(frozen=True)
class Attribute:
    """Attribute ``name`` of the module ``owner``, an int: ``whole`` in the ordinary model, ``local[rank]`` on a rank."""

    owner: str
    name: str
    whole: int
    local: tuple[int, ...]


def heads_of(attention: nn.Module, model: nn.Module) -> Heads | None:
    """Return the heads of ``attention``, or None if neither it nor a configuration tells their number."""
    sources = [attention, getattr(attention, "config", None), text_config(model)]
    query = _first(sources, _QUERY_COUNTS)
    if query is None:
        return None
    return Heads(query, _first(sources, _KEY_VALUE_COUNTS) or query)


def counts_heads(module: nn.Module) -> bool:
    """True if an attribute of ``module`` itself is a number of heads, or the width of one."""
    return _first([module], (*_QUERY_COUNTS, *_KEY_VALUE_COUNTS, *_GROUPS, "head_dim", "head_size")) is not None


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language model, or None."""
    config = getattr(model, "config", None)
    get = getattr(config, "get_text_config", None)
    return get() if callable(get) else config


def attributes_of(owner: str, attention: nn.Module, heads: Heads, query_width: int, size: int) -> list[Attribute]:
    """Return the attributes of ``attention`` that hold numbers of heads, or widths of all heads, with their new values.

    ``query_width``: columns of all query heads; 0 if widths stay as they are.
    """
    local = heads.local(size)
    wanted = dict.fromkeys(_QUERY_COUNTS, (heads.query, local.query))
    wanted |= dict.fromkeys(_KEY_VALUE_COUNTS, (heads.key_value, local.key_value))
    wanted |= dict.fromkeys(_GROUPS, (heads.query // heads.key_value, local.query // local.key_value))
    wanted |= dict.fromkeys(_QUERY_WIDTHS, (query_width, query_width // size))
    wanted["kv_dim"] = (heads.key_value * query_width // heads.query, local.key_value * query_width // heads.query)
    return [
        Attribute(owner, name, whole, (part,) * size)
        for name, (whole, part) in wanted.items()
        if type(vars(attention).get(name)) is int and vars(attention)[name] == whole != part
    ]


def query_width_of(heads: Heads, layers: Iterable[tuple[str, int]]) -> int | None:
    """Return the columns of all query heads, or None. ``layers``: (own name, output width) of column-parallel layers."""
    for name, width in layers:
        if name in FUSED_NAMES:
            return width * heads.query // (heads.query + 2 * heads.key_value)
        if name in QUERY_NAMES:
            return width
    return None


def fused_lengths(name: str, width: int, heads: Heads) -> tuple[int, int, int]:
    """Return the numbers of columns of query, key and value, which are consecutive blocks of the ``width`` columns of layer
    ``name``. Raises ModelError if ``width`` does not fit ``heads``."""
    head, rest = divmod(width, heads.query + 2 * heads.key_value)
    if rest:
        raise ModelError(
            f"{name} has {width} output columns, which are not those of {heads.query} query heads and twice "
            f"{heads.key_value} key-value heads. Remedy: give the lengths of its blocks: "
            '{"style": "fused_colwise", "lengths": [query, key, value]}.'
        )
    return heads.query * head, heads.key_value * head, heads.key_value * head


def _first(sources: Iterable[Any], names: Iterable[str]) -> int | None:
    for source in sources:
        for name in names:
            value = getattr(source, name, None) if not isinstance(source, nn.Module) else vars(source).get(name)
            if type(value) is int and value > 0:
                return value
    return None
