"""Replay: a forward that is computed again in backward sends rows where the first one has sent them.

[Note: which forward it was]
Activation checkpointing runs a block again for what backward needs. The router may then choose other experts where two
are nearly equal: matrix products do not always give the same bits. Rows would go elsewhere, and what comes back would not
be what autograd has kept of the first run. So the first run keeps its routes, as long as its graph lives. The second run
is started by a node of that graph, at which backward is; and autograd numbers nodes in the order in which they are made.
So it was the last of the layer's forwards that had begun before that node was made.

With ``use_reentrant=True`` the first run makes no graph, and backward makes all of it: whatever the router chooses then,
forward and backward agree, and nothing is kept.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from .row_exchange import Rows

_REENTRANT = "CheckpointFunctionBackward"  # the node of torch.utils.checkpoint that runs a forward with a graph of its own


@dataclass(eq=False)
class Route:
    """Where the rows of one forward go: T rows for K experts each, V of which come here from all ranks.

    ``index`` [T, K] and ``weights`` [T, K] are those of the call. ``order`` [T * K]: the places in ``index``, by expert and
    then by row. ``sends`` and ``receives``: rows to and from each rank. ``experts`` [V]: the numbers of the experts here.
    ``defers``: the block went on before they came. ``tries``: the forward has tried whether the module is fit.
    """

    index: torch.Tensor
    weights: torch.Tensor
    order: torch.Tensor
    sends: Rows
    receives: Rows
    experts: torch.Tensor
    defers: bool
    tries: bool


@dataclass(eq=False)
class _KeptRoute:
    """``begun``: the number of the first node after the forward had begun. ``region``: what saves tensors around it."""

    route: Route
    begun: int
    region: Any = None
    alone: bool = True  # in its region


@dataclass(eq=False)
class Replay:
    """The routes of one layer's forwards whose graphs live."""

    _kept: list[weakref.ref[_KeptRoute]] = field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> Replay:
        return Replay()  # a copy of the layer has run no forward

    def recall(self) -> Route | None:
        """Return the route of the forward that runs again now; None if this is a first run, or if nothing was kept."""
        node = _current_node()
        if node is None:
            return None
        number = node._sequence_nr()
        found = max((kept for kept in self._living() if kept.begun <= number), key=lambda kept: kept.begun, default=None)
        return found.route if found is not None and found.alone else None

    def keep(self, route: Route, begun: int, output: torch.Tensor) -> None:
        """Keep the route of a forward as long as the graph of its ``output`` lives. ``begun``: see ``next_node``."""
        if output.grad_fn is None or _current_node() is not None:
            return
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        kept = _KeptRoute(route, begun, None if hooks is None else weakref.ref(hooks[0]))
        for other in self._living():
            if hooks is not None and other.region is not None and other.region() is hooks[0]:
                other.alone = kept.alone = False  # which of them a second run repeats cannot be told
        metadata: Any = output.grad_fn.metadata
        metadata["zerorun: route"] = kept
        self._kept = [entry for entry in self._kept if entry() is not None]
        self._kept.append(weakref.ref(kept))

    def _living(self) -> list[_KeptRoute]:
        return [kept for entry in self._kept if (kept := entry()) is not None]


def next_node() -> int:
    """The number that autograd gives the next node."""
    return int(torch._C._autograd._get_sequence_nr())


def _current_node() -> Any:
    """The node at which backward is, if a forward that runs now repeats another; else None."""
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    return None if node is None or type(node).__name__ == _REENTRANT else node
