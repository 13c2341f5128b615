"""Whether a tensor has been changed in place since it was kept, by the counter that autograd keeps of that."""

from __future__ import annotations

import torch


def version_of(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` has been changed in place; 0 for one of inference mode, of which nobody counts it."""
    return 0 if tensor.is_inference() else tensor._version


class Version:
    """The version that ``tensor`` has now. This keeps the counter alive, and not the memory, but for sparse tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counter = counting_alias(tensor)
        if tensor.layout == torch.strided:  # others take only data of their own layout
            self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._found = version_of(self._counter)

    @property
    def is_past(self) -> bool:
        """True if the tensor, or a view of it, has been changed in place since then."""
        return version_of(self._counter) != self._found


def counting_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory, outside of the graph, with the same counter; inside of modes that see operations, too."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
