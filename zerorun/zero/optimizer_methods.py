"""Outside step: the effects of those methods of a client's optimizer that torch's optimizers do not have.

[Note: masters that change between steps]
ScheduleFree's ``eval()`` replaces the weights by an average, and ``train()`` restores them. The optimizer sees fp32 masters
of this rank's shards, so such a change has to be rounded into the weights and gathered. The version counters of the masters
show whether there was a change. Publishing it is collective, and so is waiting for ranks that still read the old values. So
``train``, ``eval``, and methods that have changed masters before, must be called on all ranks. Nothing is known about any
other method, so that it may be called on one rank alone as long as it changes nothing.

[Note: gradients]
The optimizer has gradients in ``step()`` and nowhere else: they are reduced, averaged and clipped just before it. A method
that looked for them elsewhere would find None, and usually do nothing, so reading them is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import getattr_static
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import StepError
from .sharded_model import ShardedModel, may_change
from .sharded_optimizer import ShardedOptimizer

_TENSOR: Any = torch.Tensor
_GRADIENT = _TENSOR.grad.__get__


class OutsideStep:
    """Watches these methods until ``remove``. ``sharded``: that of ``model``, which wraps an optimizer of the client's."""

    def __init__(self, model: ShardedModel, sharded: ShardedOptimizer) -> None:
        self._model, self._sharded = model, sharded
        self._optimizer: Any = sharded.optimizer
        self._together = {"train", "eval"}  # methods that all ranks call
        self._running = False
        self._names = [name for name in dir(type(self._optimizer)) if _is_extra(type(self._optimizer), name)]
        for name in self._names:
            setattr(self._optimizer, name, self._watched(name, getattr(self._optimizer, name)))

    def remove(self) -> None:
        """Leave the optimizer as it was."""
        for name in self._names:
            vars(self._optimizer).pop(name, None)
        self._names = []

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._running or self._sharded.stepping:
                return method(*args, **kwargs)
            self._running = True
            try:
                return self._call(name, lambda: method(*args, **kwargs))
            finally:
                self._running = False

        return watched

    def _call(self, name: str, method: Callable[[], Any]) -> Any:
        self._model.make_ready()
        with may_change(self._model):
            return self._called(name, method)

    def _called(self, name: str, method: Callable[[], Any]) -> Any:
        comm, together = self._model.comm, name in self._together
        if together:
            comm.fence()
        before, reads = self._versions(), _Reads(piece.tensor for piece in self._sharded.pieces)
        try:
            with reads:
                result = method()
        except Exception as error:
            self._refuse_reading(name, reads, error)
            raise
        self._refuse_reading(name, reads)
        changed = self._versions() != before
        if together:
            changed = bool(comm.control.sum(torch.tensor([float(changed)]))[0])
        if changed or not (together or self._sharded.pieces):  # a rank without pieces cannot see a change
            self._together.add(name)
            comm.fence()
            self._sharded.write_back()
            self._model.publish()
        return result

    def _refuse_reading(self, name: str, reads: _Reads, error: Exception | None = None) -> None:
        if reads.any:
            raise StepError(
                f"{type(self._optimizer).__name__}.{name}() reads gradients, and outside of step() the optimizer has none: "
                "they are reduced, averaged and clipped just before it, and are gone after it. Remedy: an optimizer that "
                "reads them in step() only."
            ) from error

    def _versions(self) -> list[int]:
        return [piece.tensor._version for piece in self._sharded.pieces]


def _is_extra(kind: type, name: str) -> bool:
    """True for a public method that torch's optimizers do not have."""
    own = not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
    return own and isinstance(getattr_static(kind, name), FunctionType)


class _Reads(TorchFunctionMode):
    """Notes whether the gradient of one of ``tensors`` is read."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = {id(tensor) for tensor in tensors}
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GRADIENT and id(args[0]) in self._tensors:
            self.any = True
        return func(*args, **(kwargs or {}))
