"""A checkpointed call keeps its inputs, and backward computes again what it computed (Chen et al. 2016, arXiv:1604.06174).
The recomputation itself, with its random numbers and autocast, is torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..errors import ModelError
from .host_pool import Group, HostPool, Stored
from .selective import Keep, OperationWatch, Recall

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


class Selection:
    """What one block keeps besides its inputs: nothing in its first forward, which is watched."""

    def __init__(self) -> None:
        self.chosen: frozenset[int] | None = None


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with ``function`` applied to every tensor in its tuples, lists and dicts. Other objects stay."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, function) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


class _Input:
    """One tensor that a checkpoint keeps."""

    def __init__(self, tensor: torch.Tensor, group: Group | None) -> None:
        self.requires_grad = tensor.requires_grad
        self._stored: Stored | None = None
        if group is not None and tensor.requires_grad:  # blocks share masks and positions, so these are kept only once
            self._stored = group.store(tensor)
        self._alias = tensor.detach() if self._stored is None else None
        self._version = tensor._version

    def get(self) -> torch.Tensor:
        if self._stored is not None:
            return self._stored.get().requires_grad_(self.requires_grad)
        assert self._alias is not None
        if self._alias._version != self._version:
            raise _changed_input(self._alias)
        return self._alias.detach().requires_grad_(self.requires_grad)


def _changed_input(tensor: torch.Tensor) -> ModelError:
    return ModelError(
        f"an input of a checkpointed call, of shape {tuple(tensor.shape)}, was changed in place, so that the call cannot "
        "be run again in backward. Remedy: make the change out of place (x = x + y instead of x += y), or leave this "
        "block out of activation checkpointing."
    )


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pool: HostPool | None = None,
    selection: Selection | None = None,
) -> Any:
    """Call ``function(*args, **kwargs)`` and keep only its inputs, and what ``selection`` chooses.

    ``pool``: keep these in host memory. Raises ModelError if the call changes an input in place.
    """
    group = pool.group() if pool is not None else None
    inputs: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        inputs.append(tensor)
        return _Input(tensor, group)

    kept = map_tensors((args, kwargs), keep)
    versions = [tensor._version for tensor in inputs]
    given = [(args, kwargs)]  # taken by the first run

    def call(*anchors: torch.Tensor) -> Any:
        if given:
            now, named = given.pop()
        else:
            if group is not None:
                group.open()
            now, named = _recalled(kept)
        return function(*now, **named)

    contexts = _Contexts(selection, group)
    output = torch_checkpoint(call, *_anchors(inputs), use_reentrant=False, context_fn=contexts)
    for tensor, version in zip(inputs, versions, strict=True):
        if tensor._version != version:
            raise _changed_input(tensor)
    contexts.finish()
    return output


def _recalled(value: Any) -> Any:
    if isinstance(value, _Input):
        return value.get()
    if type(value) in (tuple, list):
        return type(value)(_recalled(item) for item in value)
    if type(value) is dict:
        return {key: _recalled(item) for key, item in value.items()}
    return value


def _anchors(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return empty tensors that tell torch on which devices it must repeat random numbers."""
    return [torch.empty(0, device=device) for device in {tensor.device: None for tensor in inputs}]


class _Contexts:
    """Makes the contexts of the first and of every further run, for torch's ``context_fn``."""

    def __init__(self, selection: Selection | None, group: Group | None) -> None:
        self._selection, self._group = selection, group
        self._watch: OperationWatch | None = None

    def __call__(self) -> Contexts:
        if self._selection is None:
            return contextlib.nullcontext(), contextlib.nullcontext()
        if self._selection.chosen is None:
            self._watch = OperationWatch()
            return self._watch, contextlib.nullcontext()
        keep = Keep(self._selection.chosen, self._group)
        return keep, Recall(keep)

    def finish(self) -> None:
        """Choose what to keep by what the first run, if it was watched, has shown."""
        if self._watch is not None and self._selection is not None:
            self._selection.chosen = self._watch.record.choose()
            self._watch = None
