"""Label counts: do the micro-batches whose losses are averaged have equally many labels?

A loss that is a mean over its labels, averaged over micro-batches and ranks, is a mean of means: labels of a micro-batch
with few of them count more. The first micro-batches are looked at, where labels can be seen: in the argument ``labels``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..log import warn_once

IGNORED = -100  # the class that torch's cross-entropy leaves out
WATCHED_MICRO_BATCHES = 20  # the first; looking at labels on a device means waiting for it


class LabelCounts:
    """Of one rank's micro-batches. ``micro_batches``: how many losses are averaged in a step, over all ranks."""

    def __init__(self, micro_batches: int) -> None:
        self._left = WATCHED_MICRO_BATCHES if micro_batches > 1 else 0
        self._counts: set[int] = set()

    def look(self, inputs: Mapping[str, Any]) -> None:
        """At the ``labels`` of the next micro-batch, if it has any."""
        labels = inputs.get("labels")
        if self._left and isinstance(labels, torch.Tensor) and not labels.is_floating_point():
            self._left -= 1
            self._counts.add(int((labels != IGNORED).sum()))

    def advise(self) -> None:
        """Warn, once, if losses were averaged whose micro-batches differed."""
        if len(self._counts) > 1:
            warn_once(
                f"micro-batches have between {min(self._counts)} and {max(self._counts)} labels, and each counts the same: "
                "the gradient is that of a mean of means, and changes with the number of ranks and accumulation steps. "
                "Remedy: engine.backward(loss, weight=(labels != -100).sum()) averages over all labels of a step; "
                "with labels[..., 1:] for models that shift them, as decoders of Hugging Face do."
            )
            self._left, self._counts = 0, set()
