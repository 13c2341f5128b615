"""Other orders of summation: a mode in which sums and products of matrices add up the same terms in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
Order = Callable[[torch.Tensor, int], torch.Tensor]


def backwards(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """From the last to the first."""
    return tensor.flip(dim)


def interleaved(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Every second, then the others."""
    size = tensor.shape[dim]
    return tensor.index_select(dim, torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)]).to(tensor.device))


class PermutedSums(TorchDispatchMode):
    """Lets ``order`` decide in which order the terms of sums come, forward and backward."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # it computes with plain tensors, which come here then
        kwargs, order = kwargs or {}, self._order
        if func in (_aten.mm.default, _aten.bmm.default):
            a, b, *rest = args
            return func(order(a, a.dim() - 1), order(b, b.dim() - 2), *rest, **kwargs)
        if func in (_aten.addmm.default, _aten.baddbmm.default):
            base, a, b, *rest = args
            return func(base, order(a, a.dim() - 1), order(b, b.dim() - 2), *rest, **kwargs)
        if func is _aten.sum.dim_IntList and len(args) > 1 and args[1]:
            value, dims, *rest = args
            for dim in dims:
                value = order(value, dim % value.dim() if value.dim() else 0) if value.dim() else value
            return func(value, dims, *rest, **kwargs)
        if func is _aten.embedding_dense_backward.default:
            gradient, indices, *rest = args
            flat = gradient.reshape(-1, gradient.shape[-1])
            return func(order(flat, 0), order(indices.reshape(-1), 0), *rest, **kwargs)
        return func(*args, **kwargs)
