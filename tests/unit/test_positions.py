"""Flash attention on divided sequences: whether they are packed, the device is asked once for each tensor of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerorun.context_parallel.attention import _refuse_rows
from zerorun.errors import ModelError


class Waits(TorchDispatchMode):
    """Counts numbers that the program reads of tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def attend(positions: torch.Tensor) -> None:
    _refuse_rows("flash_attention_2", None, {"position_ids": positions})


def test_all_layers_of_a_forward_wait_once() -> None:
    positions = torch.arange(6).view(1, 6)
    with Waits() as waits:
        for _ in range(4):
            attend(positions)
    assert waits.count == 1


def test_positions_that_change_are_looked_at_again() -> None:
    """As those that a script writes into the same tensor for each batch."""
    positions = torch.arange(6).view(1, 6)
    attend(positions)
    positions[:, 3:] -= 3
    for _ in range(2):
        with pytest.raises(ModelError, match="packed sequences"):
            attend(positions)


def test_positions_may_be_made_for_inference_alone() -> None:
    with torch.inference_mode():
        attend(torch.arange(6).view(1, 6))
