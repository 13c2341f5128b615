"""Unit: the memory of one piece of the model, and how it moves between shards and slots.

[Note: who owns which tensor]
Each tensor has one owner, and nobody else assigns it. ``numel`` counts the padded flat buffer of a flat group.

| tensor            | owner       | shape       | dtype   | where it lies                                               |
|-------------------|-------------|-------------|---------|-------------------------------------------------------------|
| parameter (.data) | FlatGroup   | the user's  | compute | a view of ``full`` while gathered, else a loud placeholder  |
| ``full``          | FlatGroup   | [numel]     | compute | own slot; at stage 3 a part of a shared slot, or ``mapped`` |
| ``shard``         | FlatGroup   | [shard]     | compute | a view of ``full`` if that is its own, else its own         |
| ``master``        | FlatGroup   | [owned]     | fp32    | ``shard`` itself in fp32 if both are placed alike; or own   |
| ``grad_full``     | FlatGroup   | [numel]     | fp32    | own slot, or a part of a shared slot (stages 2 and 3)       |
| ``grad_shard``    | FlatGroup   | [shard]     | fp32    | a view of ``grad_full`` if that is its own, else its own    |
| ``host_grad``     | FlatGroup   | [shard]     | fp32    | in host memory, if the optimizer is (placement.py)          |
| moments           | torch.optim | like master | fp32    | on 1-D (or whole) pieces of ``master``                      |
| parameter.grad    | autograd    | the user's  | compute | autograd's own, from its backward until ``accumulate``      |
| ``loose``         | FlatGroup   | flat, a list | fp32   | as autograd left them, from ``accumulate`` until sent       |

``owned`` is the shard, or at stage 0 the whole buffer. Frozen flat groups have no master and no gradient.

[Note: gradients come as a whole unit]
Autograd leaves fresh gradients on ``parameter.grad``. When the unit's backward is over, ``accumulate`` moves them all
into the gradient slot at once and in fp32: one call for a unit, no hook for a parameter, and 8 bytes of traffic per fp32
element instead of the 16 of zeroing a buffer and accumulating into it. Where ranks read each other's memory and the
parameters are large, even that is left out: an ``unpacked`` flat group is summed from where autograd left the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from ..distributed.layout import aligned_bytes
from ..distributed.transport.channel import Pending
from ..distributed.transport.communicator import Communicator
from ..distributed.transport.huge_pages import make_huge, prefer_huge_pages
from ..distributed.transport.mapped_shards import let_go
from .flat_group import FlatGroup
from .offload.placement import HostLink, Placement
from .placeholders import is_loud


class SlotPool:
    """``count`` buffers of ``nbytes`` bytes at fixed addresses, shared by units. Slot i serves units i, i + count, ..."""

    def __init__(self, count: int, nbytes: int, device: torch.device) -> None:
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count if nbytes else 0)]
        for buffer in self.buffers:
            prefer_huge_pages(buffer)
        self.count = count
        # The unit whose bytes a slot holds now, by index; None if nobody's. Set in the agreed order only.
        self.occupant: list[int | None] = [None] * count

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() for buffer in self.buffers)

    def carve(self, index: int, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Consecutive typed views of slot ``index``, each aligned to 64 bytes."""
        views, offset = [], 0
        for numel, dtype in zip(numels, dtypes, strict=True):
            size = numel * dtype.itemsize
            views.append(self.buffers[index][offset : offset + size].view(dtype))
            offset += aligned_bytes(size)
        return views


class Unit:
    """A part of the model whose parameters are gathered, released and reduced together."""

    def __init__(self, index: int, name: str, modules: list[nn.Module], flat_groups: list[FlatGroup]) -> None:
        self.index = index
        self.name = name
        self.modules = modules  # that enter and leave the unit: hooks sit on them
        self.flat_groups = flat_groups
        self.trainable = [flat_group for flat_group in flat_groups if flat_group.trainable]
        self.resident = True  # has a slot of its own for parameters
        self.param_slot = -1  # index in the shared pool, if not resident
        self.grad_slot = -1  # index in the shared pool, or -1 for a slot of its own
        self.gathering: list[Pending] = []
        self.reducing: list[Pending] = []
        self.unsharded = True
        self.keeps_others = False  # mapped pages of other ranks' parameters stay resident between its turns
        self.deferred = False  # its gradients may come after its turn: reduce it when the backward is over
        self.placement = Placement()
        self.link: HostLink | None = None  # to the host, if something of it is there
        self.gradients_final = False  # no more will be added in this step to what is being reduced
        self._leaving: list[Callable[[], None]] = []  # reduced gradients on their way to the host
        self._updating: Callable[[], None] | None = None  # waits for the update that is going on

    # -- parameters ----------------------------------------------------------------------------------------------

    def start_gather(self, comm: Communicator, phase: str) -> None:
        """Issue the all-gather of every flat group into its slot. ``finish_gather`` must follow before use."""
        self.updated()
        for flat_group in self.flat_groups:
            source = None if flat_group.shard_is_in_place else flat_group.shard
            label = f"{self.name}: all-gather {phase}"
            self.gathering.append(comm.all_gather(flat_group.full, flat_group.layout.bounds, label, source))

    def finish_gather(self) -> None:
        """Wait for the gather in flight, if any."""
        for pending in self.gathering:
            pending.wait()
        self.gathering.clear()

    def unshard(self) -> None:
        """Let the parameters be views of the slot."""
        if not self.unsharded:
            for flat_group in self.flat_groups:
                for param, view in zip(flat_group.params, flat_group.views, strict=True):
                    param.data = view
            self.unsharded = True

    def reshard(self) -> None:
        """Let the parameters be loud placeholders."""
        if self.unsharded:
            for flat_group in self.flat_groups:
                for param, loud in zip(flat_group.params, flat_group.loud, strict=True):
                    param.data = loud
            self.unsharded = False

    @property
    def has_packed(self) -> bool:
        """True if some of its parameters are packed."""
        return any(flat_group.packed for flat_group in self.flat_groups)

    def replaced(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of those that the script has given another tensor."""
        for flat_group in self.flat_groups:
            own = flat_group.views if self.unsharded else flat_group.loud
            for index, param in enumerate(flat_group.params):
                if param.data_ptr() != own[index].data_ptr():
                    yield flat_group.names[index], param

    def overwritten(self) -> Iterator[str]:
        """Names of the parameters whose placeholder the script has written to. Waits for the device."""
        for flat_group in self.flat_groups if not self.resident else ():
            if flat_group.marks is not None and not bool(is_loud(flat_group.marks).all()):
                yield from (
                    name for name, mark in zip(flat_group.names, flat_group.marks, strict=True) if not is_loud(mark)
                )

    @property
    def mapped_from_others(self) -> int:
        """Bytes of other ranks' parameters that are mapped."""
        return sum((s.layout.numel - s.high + s.low) * s.full.element_size() for s in self.flat_groups if s.mapped)

    def let_go_of_others(self) -> None:
        """Drop the pages of other ranks' parameters, and what a module has written to them."""
        for flat_group in self.flat_groups:
            if flat_group.mapped:
                let_go(flat_group.full[: flat_group.low])
                let_go(flat_group.full[flat_group.high :])

    def use_huge_pages(self) -> None:
        """Let the rank's own mapped parameters lie in huge pages, if the kernel makes them."""
        for flat_group in self.flat_groups:
            if flat_group.mapped:
                make_huge(flat_group.shard)

    # -- gradients -----------------------------------------------------------------------------------------------

    def has_gradient(self) -> bool:
        """True if autograd has left a gradient that is not absorbed yet."""
        for flat_group in self.trainable:  # plain loops: a generator would cost a Python call for each parameter
            if flat_group.late:
                return True
            for param in flat_group.params:
                if param.grad is not None:
                    return True
        return False

    def names_with_gradient(self) -> list[str]:
        """Parameters whose gradient lies where autograd left it. For error messages."""
        return [n for s in self.trainable for n, p in zip(s.names, s.params, strict=True) if p.grad is not None]

    def take_loose(self) -> bool:
        """Leave the gradients in place where possible. True if nothing of this unit needs the gradient slot then."""
        self.vacate()
        loose = [flat_group.take_loose() for flat_group in self.trainable]
        return all(loose) and not self.placement.optimizer

    def accumulate(self) -> None:
        """Move the gradients that do not stay in place into the gradient slot."""
        self.vacate()
        for flat_group in self.trainable:
            if flat_group.loose is None:
                flat_group.accumulate()

    def start_reduce(self, comm: Communicator) -> None:
        """Issue the reduction of what is accumulated. ``finish_reduce`` must follow before the shard is read."""
        for flat_group in self.trainable:
            full, out, bounds = flat_group.grad_full, flat_group.grad_shard, flat_group.layout.bounds
            assert full is not None
            assert out is not None
            label = f"{self.name}: reduce-scatter gradients"
            accumulate = flat_group.reduced and not flat_group.shares_grad_memory and flat_group.host_grad is None
            if flat_group.unpacked:
                pending = comm.sum_parts(flat_group.parts(), flat_group.pieces, out, label, accumulate=accumulate)
            else:
                pending = comm.reduce_scatter(full, bounds, out, label, accumulate=accumulate)
            self.reducing.append(pending)
            flat_group.loose = None  # the collective keeps them as long as it needs them
            flat_group.accumulated, flat_group.reduced = False, True

    def finish_reduce(self) -> None:
        """Wait until the shard holds the reduced gradients."""
        if not self.reducing:
            return
        for pending in self.reducing:
            pending.wait()
        self.reducing.clear()
        for flat_group in self.trainable:
            if flat_group.carry is not None and flat_group.grad_shard is not None:
                flat_group.grad_shard.add_(flat_group.carry)
                flat_group.carry = None
            if flat_group.host_grad is not None:
                self._fetch(flat_group)

    def _fetch(self, flat_group: FlatGroup) -> None:
        """Begin to move the reduced gradients of ``flat_group`` to the host."""
        assert self.link is not None
        assert flat_group.grad_shard is not None
        assert flat_group.host_grad is not None
        self.updated()  # which still reads the gradients of the step before
        then = partial(flat_group.landed, final=self.gradients_final)
        self._leaving.append(
            self.link.fetch(flat_group.grad_shard, flat_group.host_grad, add=flat_group.fetched, then=then)
        )
        flat_group.fetched = True

    def vacate(self) -> None:
        """Return when the gradient slot may be written again."""
        self.finish_reduce()
        for left in self._leaving:
            left()
        self._leaving.clear()

    # -- updates -------------------------------------------------------------------------------------------------

    def update_by(self, wait: Callable[[], None]) -> None:
        """An update of the masters has begun; ``wait`` returns when the shards have the new values, or raises."""
        self.updated()
        self._updating = wait

    def updated(self) -> None:
        """Wait for the update that is going on, if any: host gradients and shards are free then."""
        if self._updating is not None:
            self._updating()  # after an error it stays, and fails again: half of an update must not pass for a whole one
            self._updating = None


def links_of(units: Sequence[Unit]) -> list[HostLink]:
    """The links of ``units`` to the host, each once."""
    return list(dict.fromkeys(unit.link for unit in units if unit.link is not None))
