"""The sum of squares of a flat tensor, exact to about 1e-7 for any number of elements, at the speed of fp32."""

from __future__ import annotations

import torch

# Elements summed in fp32 before the sum goes on in fp64: keeps the relative error near 1e-7 for tensors of any size.
_ROW = 4096


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares of ``flat`` [numel]: fp64 scalar on its device. NaN or inf if any element is."""
    whole = flat.numel() // _ROW * _ROW
    total = torch.linalg.vector_norm(flat[whole:]).double().square()
    if whole:
        rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
        total = total + rows.double().square().sum()
    return total
