"""ParallelizedModel: a model of which this rank has a part, and the conversion between parts and wholes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..distributed.replication import ALONE, Replication
from ..distributed.tensor_shard import TensorShard
from ..distributed.transport.transport import Transport
from ..zero.tied_copies import TiedCopy

if TYPE_CHECKING:
    from ..expert_parallel.rows_per_expert import ExpertLoads
    from ..tensor_parallel.axis import TransportAxis
    from ..tensor_parallel.random import CommonDraws


@dataclass
class ParallelizedModel:
    """A model of which this rank has a part."""

    model_axes: dict[str, Transport] = field(default_factory=dict)  # axes over which gradients may have to be summed
    shards: dict[int, TensorShard] = field(default_factory=dict)  # id(parameter) -> the part of it that is here
    replication_of: Callable[[nn.Parameter], Replication] = lambda param: ALONE
    changes: list[Callable[[], None]] = field(default_factory=list)  # what takes each of them back, the first one first
    axes: dict[str, TransportAxis] = field(default_factory=dict)  # between ranks with other parts, or rows, by name
    loads: ExpertLoads | None = None  # of experts that are spread
    copies: dict[str, str] = field(default_factory=dict)  # name here -> name in the first pipeline stage that has it
    tied: list[TiedCopy] = field(default_factory=list)  # one of each parameter that other pipeline stages have, too

    def undone_with(self, more: Callable[[], None]) -> ParallelizedModel:
        """Return a copy whose ``undo`` calls ``more`` at its end."""
        return replace(self, changes=[more, *self.changes])

    def undo(self) -> None:
        """Make the model whole again, once: it may have another engine by then. All ranks must call it."""
        while self.changes:
            self.changes.pop()()

    def whole(self, param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return the whole value, gradient or state of ``param``. All ranks with parts must call it, each with its own."""
        shard = self.shards.get(id(param))
        if shard is None:
            return part
        from ..tensor_parallel.layers import whole_of  # already imported if any layer is divided

        return whole_of(part.contiguous(), shard, self.axes[shard.axis])

    def part(self, param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``whole``, a value, gradient or state of ``param``."""
        shard = self.shards.get(id(param))
        return whole if shard is None or tuple(whole.shape) == shard.local_shape != shard.shape else shard.cut(whole)

    def of_same_batch(self, number: int) -> list[int]:
        """Return the ``number`` that each rank with the same batch passes: tensor ranks, for each context rank. All must
        call it."""
        found = [number]
        for axis in (self.axes[name] for name in ("tensor", "context") if name in self.axes):
            mine = torch.tensor(found, device=axis.transport.device)
            bounds = range(0, len(found) * axis.size + 1, len(found))
            found = axis.all_gather(mine, 0, bounds, "comparison of data").tolist()
        return found

    def common_draws(self, device: torch.device) -> CommonDraws:
        """What tells, at the end of a forward that begins now, whether all ranks with the same batch drew alike in it."""
        from ..tensor_parallel.random import CommonDraws  # already imported if there are such ranks

        return CommonDraws(device)

    def take(self, whole: torch.Tensor, tensor_rank: int) -> None:
        """Overwrite ``whole`` with the one that ``tensor_rank`` has. All tensor ranks must call it."""
        if "tensor" in self.axes:
            self.axes["tensor"].transport.broadcast(whole, "edited parameters", tensor_rank)
