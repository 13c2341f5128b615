"""The flat parameter group: parameters of a unit that lie one after the other in one buffer, and their gradients."""

from __future__ import annotations

import torch
from torch import nn

from ..distributed.layout import Layout
from ..distributed.replication import ALONE, Replication
from .norm import square_sum


class FlatGroup:
    """The parameters of a unit that have one dtype and replication, and are trainable or frozen all. See unit.py."""

    def __init__(
        self, names: list[str], params: list[nn.Parameter], layout: Layout, rank: int, replication: Replication = ALONE
    ) -> None:
        by_name = dict(zip(names, params, strict=True))
        self.layout, self.replication = layout, replication
        self.rank = rank  # on the shard axis
        self.pieces = layout.pieces(rank)
        self.mapped = False  # full is made of the memory of all ranks: gathers move nothing
        self.unpacked = False  # gradients are reduced from where autograd leaves them
        self.names = [entry.name for entry in layout.entries]
        self.params = [by_name[name] for name in self.names]
        self.dtype = self.params[0].dtype
        self.trainable = self.params[0].requires_grad
        self.packed = False  # memory that classes of other packages read in their own way: see weights.py
        self.full: torch.Tensor
        self.shard: torch.Tensor
        self.shard_is_in_place = False  # shard is a view of full
        self.master: torch.Tensor | None = None
        self.master_is_weight = False  # master is a view of full or shard: the optimizer updates the weights in place
        self.grad_full: torch.Tensor | None = None
        self.grad_shard: torch.Tensor | None = None
        self.host_grad: torch.Tensor | None = None
        self.fetched = False  # host_grad holds reduced gradients of this step
        self.square_sum: torch.Tensor | None = None  # of host_grad, where it was taken on arrival
        self.views: list[torch.Tensor] = []  # of full, one for each parameter
        self.grad_views: list[torch.Tensor] = []  # of grad_full
        self.gap_views: list[torch.Tensor] = []  # of grad_full: what belongs to no parameter
        self.loud: list[torch.Tensor] = []  # what the parameters show while released
        self.marks: torch.Tensor | None = None  # the elements that those are made of
        self.used = [False] * len(self.params)  # got a gradient on this rank since the last step
        self.late: dict[int, torch.Tensor] = {}  # fp32 gradients that came after the unit's turn, by parameter
        self.loose: list[torch.Tensor] | None = None  # the gradients where autograd left them, flat, instead of grad_full
        self.accumulated = False  # grad_full or loose holds gradients that are not reduced yet
        self.reduced = False  # grad_shard holds reduced gradients of this step
        self.carry: torch.Tensor | None = None  # reduced gradients set aside while grad_full fills again

    @property
    def low(self) -> int:
        return self.layout.bounds[self.rank]

    @property
    def high(self) -> int:
        return self.layout.bounds[self.rank + 1]

    @property
    def weight(self) -> torch.Tensor:
        """The compute-dtype values of what ``master`` holds: [owned]."""
        owns_all = self.master is not None and self.master.numel() == self.layout.numel
        return self.full if owns_all and self.shard_is_in_place else self.shard

    def adopt_full(self, full: torch.Tensor) -> None:
        """Use ``full`` [numel] as the place of the gathered parameters."""
        self.full = full
        self.views = [full[e.offset : e.end].view(e.shape) for e in self.layout.entries]

    def adopt_grad(self, grad_full: torch.Tensor) -> None:
        """Use ``grad_full`` [numel] fp32 as the place of the full gradients."""
        self.grad_full = grad_full
        self.grad_views = [grad_full[e.offset : e.end].view(e.shape) for e in self.layout.entries]
        ends = [0, *(e.end for e in self.layout.entries)]
        starts = [*(e.offset for e in self.layout.entries), self.layout.numel]
        self.gap_views = [grad_full[end:start] for end, start in zip(ends, starts, strict=True) if start > end]

    def take_loose(self) -> bool:
        """Take over ``parameter.grad`` as they lie, if they are all there, alone and in the dtype of the sum."""
        if self.accumulated or self.late or not self.unpacked:
            return False
        grads = [param.grad for param in self.params]
        if not all(grad is not None and grad.layout == torch.strided and grad.is_contiguous() for grad in grads):
            return False
        self._set_reduced_aside()
        self.loose = [grad.detach().view(-1) for grad in grads if grad is not None]
        self.used = [True] * len(self.params)
        for param in self.params:
            param.grad = None
        self.accumulated = True
        return True

    def parts(self) -> list[torch.Tensor]:
        """The unreduced gradients by parameter, flat."""
        assert self.grad_full is not None
        return self.loose or [self.grad_full[e.offset : e.end] for e in self.layout.entries]

    def accumulate(self) -> None:
        """Move ``parameter.grad`` into the gradient slot: copied if the slot is fresh, else added."""
        present, grads, missing = [], [], []
        for index, param in enumerate(self.params):
            grad, late = param.grad, self.late.pop(index, None)
            if late is not None:
                grad = late if grad is None else late.add_(grad)
            if grad is None:
                missing.append(self.grad_views[index])
                continue
            present.append(self.grad_views[index])
            grads.append(grad.to_dense() if grad.is_sparse else grad)
            self.used[index] = True
            param.grad = None
        if not self.accumulated:
            self._set_reduced_aside()
            if missing or self.gap_views:
                torch._foreach_zero_(missing + self.gap_views)
            if present:
                torch._foreach_copy_(present, grads)
            self.accumulated = True
        elif present:
            torch._foreach_add_(present, grads)

    def set_late_aside(self) -> None:
        """Keep gradients that came after the unit's turn in fp32, where autograd would add to them in their dtype."""
        for index, param in enumerate(self.params):
            if param.grad is not None:
                grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                kept = self.late.get(index)
                self.late[index] = grad.to(torch.float32, copy=True) if kept is None else kept.add_(grad)
                param.grad = None

    def _set_reduced_aside(self) -> None:
        """A second backward of the same step fills a slot whose shard part is already reduced: keep that part."""
        if self.reduced and self.grad_shard is not None and self.shares_grad_memory and self.host_grad is None:
            self.carry = self.grad_shard.clone()
            self.reduced = False

    @property
    def shares_grad_memory(self) -> bool:
        """True if grad_shard is a part of grad_full (stages 0 and 1)."""
        if self.grad_shard is None or self.grad_full is None:
            return False
        return self.grad_shard.untyped_storage().data_ptr() == self.grad_full.untyped_storage().data_ptr()

    def landed(self, *, final: bool) -> None:
        """``host_grad`` has changed. ``final``: most likely for the last time in this step."""
        assert self.host_grad is not None
        self.square_sum = square_sum(self.host_grad) if final else None

    def local_square_sum(self) -> torch.Tensor:
        """Of this rank's reduced gradients: fp64 scalar where they are. At stage 0, of its shard only."""
        if self.square_sum is not None:
            return self.square_sum
        shard = self.grad_shard if self.host_grad is None else self.host_grad
        assert shard is not None
        return square_sum(shard)

    def forget_gradients(self) -> None:
        """Start the next step with no gradient."""
        self.square_sum = None
        self.accumulated = self.reduced = self.fetched = False
        self.loose = self.carry = None
        self.late.clear()
        self.used = [False] * len(self.params)
        for param in self.params:
            param.grad = None
