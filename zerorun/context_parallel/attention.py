"""Attention over divided sequences: what a Hugging Face layer calls is replaced, for the layers of divided blocks alone.

[Note: the seam]
The attention layers of transformers ask ``AttentionInterface.get_interface`` for the function that attends, by the name in
the model's configuration. While a divided block runs, they get one that exchanges queries, keys and values, calls the same
function, and brings its result back. So masks stay those of the model, and so do its kernels, "eager" and those that a
script has registered included. Other models, and the same one outside of its blocks, do not notice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ..distributed.device import on_gpu
from ..errors import ModelError
from .attention_exchange import fits, gather, heads_of, to_heads, to_rows
from .sequence_rows import Rows

AUTO, ULYSSES, GATHER = "auto", "ulysses", "gather"
Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass
class RunningBlock:
    """A divided block that is running. ``calls``: how often it has attended."""

    rows: Rows
    method: str
    calls: int = 0


class _Running(threading.local):
    block: RunningBlock | None = None


_running = _Running()


@contextlib.contextmanager
def running(block: RunningBlock | None) -> Iterator[None]:
    """Inside, attention is over the rows of ``block``; None: over what it is given."""
    before, _running.block = _running.block, block
    try:
        yield
    finally:
        _running.block = before


class AttentionSeam:
    """Replaces ``get_interface`` for as long as a model is divided. Several may be; the last one puts it back."""

    _lock = threading.Lock()
    _users = 0
    _original: Any = None

    def __init__(self) -> None:
        from transformers.modeling_utils import AttentionInterface

        with self._lock:
            if not AttentionSeam._users:
                AttentionSeam._original = AttentionInterface.get_interface
                AttentionInterface.get_interface = _looking(AttentionInterface.get_interface)  # type: ignore[method-assign]
            AttentionSeam._users += 1

    def remove(self) -> None:
        from transformers.modeling_utils import AttentionInterface

        with self._lock:
            AttentionSeam._users -= 1
            if not AttentionSeam._users:
                AttentionInterface.get_interface = AttentionSeam._original  # type: ignore[method-assign]


def _looking(original: Callable[..., Attend]) -> Callable[..., Attend]:
    """Return ``original``, the method, with a look at whether a divided block is running."""

    def get_interface(self: Any, implementation: str, default: Attend) -> Attend:
        found, block = original(self, implementation, default), _running.block
        return found if block is None else _divided(found, str(implementation), block)

    return get_interface


def _divided(inner: Attend, implementation: str, block: RunningBlock) -> Attend:
    @torch._disable_dynamo
    def attend(
        module: nn.Module,
        query: torch.Tensor,  # [batch, heads, own rows, width]
        key: torch.Tensor,  # [batch, heads of keys, own rows, width]
        value: torch.Tensor,  # [batch, heads of keys, own rows, width of values]
        attention_mask: Any = None,  # of the whole sequence
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        block.calls += 1
        _check(module, query, key, keywords, block.rows)
        way = _by_heads if chosen(block.method, query, key, value, block.rows.axis.size) == ULYSSES else _by_rows
        positions = keywords.get("position_ids")
        if isinstance(positions, torch.Tensor) and "flash" in implementation:  # which finds packed sequences by them
            keywords["position_ids"] = block.rows.join(positions, -1)
        return way(inner, implementation, block, module, query, key, value, attention_mask, **keywords), None

    return attend


def chosen(method: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int) -> str:
    """Return ULYSSES or GATHER: for "auto", the one that sends fewer bytes. Raises ModelError if heads do not fit."""
    heads, key_heads = query.shape[1], key.shape[1]
    if method == AUTO:
        width, both = query.shape[-1] + value.shape[-1], key.shape[-1] + value.shape[-1]
        fewer = heads * width + max(key_heads, size) * both <= size * key_heads * both  # if as many, it keeps less memory
        return ULYSSES if fewer and fits(heads, key_heads, size) else GATHER
    if method == ULYSSES and not fits(heads, key_heads, size):
        raise ModelError(
            f"{size} context ranks cannot divide {heads} heads of queries and {key_heads} of keys and values, as "
            f'context_parallel.method "ulysses" asks. Remedy: use "auto" or "gather", or another sequence_parallel_size.'
        )
    return method


def _check(module: nn.Module, query: torch.Tensor, key: torch.Tensor, keywords: dict[str, Any], rows: Rows) -> None:
    if query.shape[2] != rows.count or key.shape[2] != rows.count:
        raise ModelError(
            f"{type(module).__name__} attends from {query.shape[2]} to {key.shape[2]} tokens, where this rank has "
            f"{rows.count} of {rows.length}: it attends to something else than its own sequence. Remedy: remove "
            "sequence_parallel_size."
        )
    if keywords.get("output_attentions"):
        raise ModelError("output_attentions cannot be had from divided sequences. Remedy: leave it out.")


def _by_heads(
    inner: Attend,
    implementation: str,
    block: RunningBlock,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    **keywords: Any,
) -> torch.Tensor:
    heads, rows = query.shape[1], block.rows
    own = slice(*heads_of(heads, rows.axis.rank, rows.axis.size))
    query, key, value = to_heads(query, key, value, rows)
    if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[1] == heads > 1:
        mask = mask[:, own]
    keywords = {name: _own_heads(item, heads, own) for name, item in keywords.items()}
    view: Any = OwnHeads(module, heads, own, {"num_key_value_groups": query.shape[1] // key.shape[1]})
    output = inner(view, query, key, value, mask, **keywords)[0]  # [batch, sequence, own heads, width]
    return to_rows(output.transpose(1, 2), heads, rows).transpose(1, 2).contiguous()


def _own_heads(value: Any, heads: int, own: slice) -> Any:
    """Cut what there is one of for each head, such as the sinks [heads] of GPT-OSS, or a bias [batch, heads, ...]."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if value.dim() == 1 and value.shape[0] == heads:
        return value[own]
    return value[:, own] if value.dim() == 4 and value.shape[1] == heads else value


class OwnHeads:
    """An attention layer as a function that attends sees it: with the heads of this rank, and what belongs to them."""

    def __init__(self, module: nn.Module, heads: int, own: slice, changes: dict[str, Any]) -> None:
        self._module, self._heads, self._own = module, heads, own
        self.__dict__.update(changes)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _own_heads(value, self._heads, self._own) if isinstance(value, nn.Parameter) else value


def _by_rows(
    inner: Attend,
    implementation: str,
    block: RunningBlock,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    **keywords: Any,
) -> torch.Tensor:
    rows = block.rows
    _refuse_rows(implementation, mask, keywords)
    key, value = gather(key, value, rows)
    bias = keywords.get("position_bias")
    if isinstance(bias, torch.Tensor):
        keywords["position_bias"] = bias = bias[..., rows.begin : rows.end, :]
    causal = keywords.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if isinstance(mask, torch.Tensor) and mask.dim() == 4:
        mask = mask[..., rows.begin : rows.end, :]
    elif causal and implementation != "eager":  # which is given a mask, or else attends to everything
        key, value = key[:, :, : rows.end], value[:, :, : rows.end]  # what comes later is not attended to
        if isinstance(mask, torch.Tensor):
            mask = mask[..., : rows.end]  # of padding [batch, sequence]; flash attention ends queries where keys end
        elif "flash" not in implementation and on_gpu(query):
            with _disable_current_modes():  # torch cannot make this class in a mode that looks at operations
                mask = causal_lower_right(rows.count, rows.end)  # no tensor: kernels know it
        elif "flash" not in implementation:
            key, value, mask = key.flip(2), value.flip(2), backwards(rows, query.dtype)
            if isinstance(bias, torch.Tensor):
                keywords["position_bias"] = bias[..., : rows.end].flip(-1)
    return inner(module, query, key, value, mask, **keywords)[0]


def backwards(rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [1, 1, own rows, end] by which own rows attend to what is not after them, where keys are in the
    reverse order.

    Then the sum of the numbers of row and column tells. So all rows of the mask lie in one line of memory, each a step
    after the one before, where a whole mask would take as much as many layers.
    """
    line = torch.zeros(rows.count - 1 + rows.end, dtype=dtype)
    line[: rows.count - 1] = -torch.inf
    return line.as_strided((1, 1, rows.count, rows.end), (0, 0, 1, 1))


def _refuse_rows(implementation: str, mask: Any, keywords: dict[str, Any]) -> None:
    packed = False
    if "flash" in implementation:
        positions = keywords.pop("position_ids", None)
        packed = any(name.startswith("cu_seq_lens") and value is not None for name, value in keywords.items())
        packed = packed or (positions is not None and _begin_anew(positions))
    if packed or not (mask is None or isinstance(mask, torch.Tensor)):
        raise ModelError(
            f"{implementation} with {'packed sequences' if packed else type(mask).__name__} cannot attend from a part of "
            'the rows. Remedy: context_parallel.method "ulysses", or the implementation "sdpa".'
        )


def _begin_anew(positions: torch.Tensor) -> bool:
    """True if they do not rise by one, as where sequences are packed. All layers of a forward get the same tensor: the
    first waits for the device."""
    if positions.is_inference():  # it has no version
        return bool((positions.diff(dim=-1) != 1).any())
    if positions not in _looked_at or _looked_at[positions][0] != positions._version:
        _looked_at[positions] = positions._version, bool((positions.diff(dim=-1) != 1).any())
    return bool(_looked_at[positions][1])


_looked_at: Any = WeakIdKeyDictionary()  # positions -> (their version, what was found)
