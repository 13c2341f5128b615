"""``TiledMLP``: a layer that runs on parts of a sequence, one after the other, forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..activations.checkpointed_call import run


class TiledMLP:
    """DeepSpeed's autograd function of that name. Only ``apply`` is called, and here it is a function as others are."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: nn.Module,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return ``fn(self, x)``, computed in ``shards`` parts of x [..., sequence, features], of which each is kept.

        What ``fn`` has inside exists for one part at a time: backward computes it again. Each token must be on its own in
        ``fn``. ``compute_params`` has no effect: gradients of all parts are summed before a parameter has them.
        """
        parts = x.chunk(shards, dim=-2)
        if not torch.is_grad_enabled():
            return torch.cat([fn(self, part) for part in parts], dim=-2)
        return torch.cat([run(fn, (self, part), {}) for part in parts], dim=-2)
