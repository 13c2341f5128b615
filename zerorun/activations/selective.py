"""Selective checkpointing: which results of a block are kept, and the two modes that keep and recall them.

[Note: what to keep]
Elementwise operations, norms and copies cost little compared with the memory that their results take, so they always run
again. Of the other operations (matrix products, attention, convolutions: all with a known number of FLOPs), those that save
the most FLOPs per byte are kept (Korthikanti et al. 2022, arXiv:2205.05198, use the same measure), until what is kept has
used up ``KEPT_SHARE`` of the bytes that recomputing everything would free. All of them together would be more than that: in
a GPT block of width h, their results are 10 h numbers per token, of the 15 h that can be freed.

The first forward of a block recomputes everything and is watched. The choice, made by the position of an operation among
those with FLOPs, then serves all later forwards. A forward that runs other operations keeps other results. They are still
correct, because the second run of a forward repeats the operations of its first run, and so their positions.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .changed_in_place import Version, counting_alias
from .host_pool import Group, Stored

KEPT_SHARE = 0.4
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # not in torch's registry


@functools.cache
def _flop_counter() -> Any:
    """Import torch's module only when it is needed: it imports triton where that is installed, 80 MB for every process."""
    return importlib.import_module("torch.utils.flop_counter")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# Of a sparse tensor, which has no memory of its own: the methods that return the tensors which it consists of.
_BY_ROWS, _BY_COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _BY_ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _BY_COLUMNS),
}


def storages(value: Any) -> dict[int, torch.UntypedStorage]:
    """Return the memory of the tensors in ``value``, by keys that hold while it lives."""
    found = {}
    for tensor in _tensors(value):
        names = _PARTS.get(tensor.layout)
        for part in (tensor,) if names is None else (getattr(tensor.detach(), name)() for name in names):
            storage = part.untyped_storage()
            found[storage._cdata] = storage
    return found


def counts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if ``func`` is worth keeping: it has a known number of FLOPs, and draws no random numbers.

    If an attention with dropout were kept, the second run would not draw its random numbers, and every later dropout would
    differ.
    """
    packet = getattr(func, "overloadpacket", None)  # a higher-order operator has none
    if packet not in _flop_counter().flop_registry and packet is not _CPU_ATTENTION:
        return False
    return not any(
        value for argument, value in zip(func._schema.arguments, args, strict=False) if argument.name == "dropout_p"
    ) and not kwargs.get("dropout_p", 0.0)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    if func.overloadpacket is _CPU_ATTENTION:
        return _attention_flops(*(tensor.shape for tensor in args[:3]))
    return int(_flop_counter().flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Return the FLOPs of two batched products, from shapes [batch, heads, length, width].

    Keys and values may have fewer heads than queries; torch's own counter refuses that before 2.12.
    """
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


@dataclass
class Result:
    """The FLOPs of an operation, and the memory of its results."""

    flops: int
    storages: dict[int, int]  # storage -> bytes


@dataclass
class Record:
    """A watched forward: its operations with FLOPs, and the memory of what autograd would keep."""

    results: list[Result] = field(default_factory=list)
    needed: int = 0  # number of results made before autograd saved its last tensor: later ones never run again
    saved: dict[int, int] = field(default_factory=dict)  # storage -> bytes
    made: set[int] = field(default_factory=set)  # storages that are neither inputs nor parameters

    @property
    def freed_bytes(self) -> int:
        """The bytes that recomputing everything frees."""
        return sum(size for storage, size in self.saved.items() if storage in self.made)

    def choose(self) -> frozenset[int]:
        """Return the positions of the results to keep."""
        left = KEPT_SHARE * self.freed_bytes
        sizes = {position: sum(result.storages.values()) for position, result in enumerate(self.results[: self.needed])}
        chosen = set()
        for position in sorted(sizes, key=lambda at: (-self.results[at].flops / max(sizes[at], 1), -sizes[at], at)):
            if sizes[position] <= left:
                chosen.add(position)
                left -= sizes[position]
        return frozenset(chosen)


class OperationWatch(TorchDispatchMode):
    """Fills a ``Record`` with what runs inside; changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self._alive: list[Any] = []  # if a storage were freed, another one could get its number
        self._hooks: Any = None

    def __enter__(self) -> OperationWatch:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack, unpack = outer or (_same, _same)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._packing(pack), unpack)
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__()
        self._hooks = None  # it holds this object
        self._alive.clear()

    def _packing(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def note(tensor: torch.Tensor) -> Any:
            found = storages(tensor)
            self.record.saved.update({key: storage.nbytes() for key, storage in found.items()})
            self.record.needed = len(self.record.results)
            self._alive += found.values()
            return pack(tensor)

        return note

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        found = storages(out)
        if not getattr(func, "is_view", False):  # a view of a parameter is not new memory, not even on fake tensors
            self.record.made.update(found.keys() - storages((args, kwargs)).keys())
        self._alive += found.values()
        if counts(func, args, kwargs):
            sizes = {key: storage.nbytes() for key, storage in found.items()}
            self.record.results.append(Result(_flops(func, args, kwargs, out), sizes))
        return out


def _same(value: Any) -> Any:
    return value


class Keep(TorchDispatchMode):
    """The first run: keeps the results at the chosen positions, in host memory if there is a ``group``.

    A result that is changed in place while the block runs is copied before. What is changed later, by whoever got it from
    the block, is not given to the second run.
    """

    def __init__(self, chosen: frozenset[int], group: Group | None) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}  # position -> result, with Stored for tensors in host memory
        self._versions: dict[int, list[Version]] = {}  # position -> those of its tensors, until they are copied
        self._chosen, self._group = chosen, group
        self._position = 0
        self._positions: dict[int, int] = {}  # storage -> position of the result that lies in it

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.kept and func._schema.is_mutable:
            self._save_from(func, args)
        out = func(*args, **kwargs)
        if counts(func, args, kwargs):
            if self._position in self._chosen:
                self._keep(out)
            self._position += 1
        return out

    def taken(self, position: int) -> Any:
        """Return the result at ``position``, once; None if it is not kept, or has been changed."""
        kept, versions = self.kept.pop(position, None), self._versions.get(position, ())
        return None if any(version.is_past for version in versions) else kept

    def _keep(self, out: Any) -> None:
        self.kept[self._position] = tree_map(self._keep_tensor, out)
        self._versions[self._position] = [Version(tensor) for tensor in _tensors(out)]
        self._positions.update(dict.fromkeys(storages(out), self._position))

    def _keep_tensor(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        stored = self._group.store(value) if self._group is not None else None
        return stored if stored is not None else counting_alias(value)

    def _save_from(self, func: Any, args: tuple[Any, ...]) -> None:
        """Keep copies of kept results that ``func`` is about to write into, as ReLU(inplace=True) does."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for key in storages(value):
                position = self._positions.pop(key, None)
                if position in self._versions:
                    self.kept[position] = tree_map(_copied, self.kept[position])
                    del self._versions[position]
                    if self._group is not None:  # a copy to host memory may still be running
                        self._group.pool.stream.lead()


class Recall(TorchDispatchMode):
    """The second run: gives what the first one kept, and computes the rest. A third run computes everything."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self._keep = keep
        self._position = 0

    def __enter__(self) -> Recall:
        self._position = 0
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if counts(func, args, kwargs):
            self._position += 1
            kept = self._keep.taken(self._position - 1)
            if kept is not None:
                return tree_map(lambda value: value.get() if isinstance(value, Stored) else value, kept)
        return func(*args, **kwargs)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
