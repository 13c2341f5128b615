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
from ..optim.nested_containers import TreeMap
from .buffers import BufferStates, modules_of
from .changed_in_place import Version
from .host_pool import Group, HostPool, Stored
from .random_streams import streams
from .selective import Keep, OperationWatch, Recall

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]


class Selection:
    """What one block keeps besides its inputs: nothing in its first forward, which is watched."""

    def __init__(self) -> None:
        self.chosen: frozenset[int] | None = None


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with ``function`` applied to each tensor in its containers. Objects of other classes stay."""
    return TreeMap(torch.Tensor, function, fresh=True).mapped(value)


class _Input:
    """One tensor that a checkpoint keeps."""

    def __init__(self, tensor: torch.Tensor, group: Group | None) -> None:
        self.shape, self.requires_grad = tensor.shape, tensor.requires_grad
        self._stored: Stored | None = None
        if group is not None and tensor.requires_grad:  # blocks share masks and positions, so these are kept only once
            self._stored = group.store(tensor)
        self._alias = tensor.detach() if self._stored is None else None
        self._version = Version(tensor)  # counts wherever the tensor is kept: a copy to the host may still be under way

    def get(self) -> torch.Tensor:
        self.check()
        found = self._stored.get() if self._stored is not None else self._alias
        assert found is not None
        return found.detach().requires_grad_(self.requires_grad)

    def check(self) -> None:
        """Raise ModelError if the tensor has been changed in place."""
        if self._version.is_past:
            raise _changed_input(self.shape)


def _changed_input(shape: torch.Size) -> ModelError:
    return ModelError(
        f"an input of a checkpointed call, of shape {tuple(shape)}, was changed in place, so that the call cannot "
        "be run again in backward. Remedy: make the change out of place (x = x + y instead of x += y), or leave this "
        "block out of activation checkpointing."
    )


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    pool: HostPool | None = None,
    selection: Selection | None = None,
    module: nn.Module | None = None,
) -> Any:
    """Call ``function(*args, **kwargs)`` and keep only its inputs, and what ``selection`` chooses.

    ``pool``: keep these in host memory. ``module``: whose forward it is, if ``function`` does not tell. Raises ModelError
    if the call changes an input in place.
    """
    group = pool.group() if pool is not None else None
    inputs: list[_Input] = []
    devices: dict[torch.device, None] = {}

    def keep(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            return tensor
        devices[tensor.device] = None
        inputs.append(_Input(tensor, group))
        return inputs[-1]

    kept = map_tensors((args, kwargs), keep)
    buffers = BufferStates(_modules_of_call(function if module is None else module, args, kwargs))
    given = [(args, kwargs)]  # taken by the first run
    random_states = streams.get_states()  # torch repeats the numbers of the default generators only

    def call(*anchors: torch.Tensor) -> Any:
        if given:
            now, named = given.pop()
            return function(*now, **named)
        if group is not None:
            group.open()
        now, named = TreeMap(_Input, _Input.get, fresh=True).mapped(kept)
        with buffers.as_before(), streams.as_before(random_states):
            return function(*now, **named)

    contexts = _Contexts(selection, group)
    anchors = [torch.empty(0, device=device) for device in devices]  # on which torch must repeat random numbers
    output = torch_checkpoint(call, *anchors, use_reentrant=False, context_fn=contexts)
    for kept_input in inputs:
        kept_input.check()
    buffers.finish()
    contexts.finish()
    return output


def _modules_of_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    """The modules that ``function`` is, has, or is given."""
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module))
    return [*modules_of(function), *given]


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
