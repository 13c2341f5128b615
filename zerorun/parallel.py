"""Parallel: what initialize() does about the axes beyond data parallelism. Divides layers, and says what is whole where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from .channel import Channel
from .config import Config
from .log import info_once
from .tensor_parallel.axis import ChannelAxis, make_axis
from .tensor_parallel.collectives import make_region
from .tensor_parallel.layers import whole_of
from .tensor_parallel.share import Share, partial_of, shares_of
from .topology import Topology
from .zero.spread import ALONE, Spread


@dataclass
class Divided:
    """A model of which this rank has a part. ``undo`` makes it whole again; all ranks must call it."""

    beyond: dict[str, Channel] = field(default_factory=dict)  # axes over which gradients may have to be summed
    shares: dict[int, Share] = field(default_factory=dict)  # id(parameter) -> what of it is here
    spread_of: Callable[[nn.Parameter], Spread] = lambda param: ALONE
    undo: Callable[[], None] = lambda: None
    axis: ChannelAxis | None = None
    copies: dict[str, str] = field(default_factory=dict)  # name here -> name in the first pipeline stage that has it

    def whole(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """The whole of what ``part`` of ``param`` is on this rank: a value, gradient or state. All tensor ranks call it."""
        share = self.shares.get(id(param))
        if share is None or self.axis is None:
            return part
        return whole_of(part.contiguous(), share, self.axis)

    def part(self, param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``whole``."""
        share = self.shares.get(id(param))
        return whole if share is None or tuple(whole.shape) == share.local_shape != share.shape else share.cut(whole)


def divide(model: nn.Module, config: Config, topology: Topology, device: torch.device) -> Divided:
    """Divide the layers of ``model`` in place, unless it is made of divided layers. All ranks must call it.

    Raises ModelError, on all ranks alike, with the model as it was.
    """
    if topology.tensor == 1:
        return Divided()
    section, axis = config.tensor_parallel, make_axis(topology, device)
    undo = Divided().undo
    if not shares_of(model):
        from .tensor_parallel.parallelize import parallelize

        made = parallelize(
            model,
            section.plan or None,
            region=make_region(topology, device),
            sequence_parallel=section.sequence_parallel,
            vocab_parallel_loss=section.vocab_parallel_loss,
        )
        undo = made.undo
        info_once(made.describe())
    shares, partial, first = shares_of(model), partial_of(model), topology.tensor_rank == 0
    _agree_on_whole(model, shares, axis)

    def spread_of(param: nn.Parameter) -> Spread:
        if id(param) in shares:
            return ALONE
        return Spread(("tensor",) if id(param) in partial else (), first)

    return Divided({"tensor": axis.channel}, shares, spread_of, undo, axis)


def _agree_on_whole(model: nn.Module, shares: dict[int, Share], axis: ChannelAxis) -> None:
    """What every tensor rank has whole, and the state of the default generators, are tensor rank 0's from here on."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in shares and not tensor.is_meta:
            axis.broadcast(tensor.data)
    state = torch.get_rng_state()
    axis.broadcast(state)
    torch.set_rng_state(state)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state = torch.cuda.get_rng_state()
        axis.broadcast(state)
        torch.cuda.set_rng_state(state)
