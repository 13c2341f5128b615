"""Unit: the memory of one piece of the model, and how it moves between shards and slots.

[Note: who owns which tensor]
Each tensor has one owner, and nobody else assigns it. ``numel`` counts the padded flat buffer of a flat group.

| tensor            | owner       | shape       | dtype   | where it lies                                               |
|-------------------|-------------|-------------|---------|-------------------------------------------------------------|
| parameter (.data) | FlatGroup   | the user's  | compute | a view of ``full`` while gathered, else a loud placeholder  |
| ``full``          | FlatGroup   | [numel]     | compute | own slot; at stage 3 a part of a shared slot, or ``mapped`` |
| ``shard``         | FlatGroup   | [shard]     | compute | a view of ``full`` if that is its own, else its own         |
| ``coded``         | FlatGroup   | [bytes]     | uint8   | where ``shard`` is, if gathers send codes                   |
| ``arriving``      | FlatGroup   | [bytes]     | uint8   | the codes of all ranks, behind ``full`` in the shared slot  |
| ``second``        | FlatGroup   | [part]      | compute | its own, if a node has a second copy, where ``shard`` is    |
| ``master``        | FlatGroup   | [owned]     | fp32 *  | ``shard`` itself in its dtype if both are placed alike      |
| ``rest``          | FlatGroup   | [owned]     | 16 bits | where ``master`` would be, if that is in bf16 and has one   |
| ``grad_full``     | FlatGroup   | [numel]     | fp32 *  | own slot, or a part of a shared slot (stages 2 and 3)       |
| ``grad_shard``    | FlatGroup   | [shard]     | fp32 *  | a view of ``grad_full`` if that is its own, else its own    |
| ``residual``      | FlatGroup   | [left out]  | fp32    | its own, if codes of gradients are corrected by feedback    |
| ``host_grad``     | FlatGroup   | [shard]     | fp32 *  | in host memory, if the optimizer is (placement.py)          |
| moments           | torch.optim | like master | fp32 *  | on 1-D (or whole) pieces of ``master``                      |
| parameter.grad    | autograd    | the user's  | compute | autograd's own, from its backward until ``accumulate``      |
| ``loose``         | FlatGroup   | flat, a list | fp32   | as autograd left them, from ``accumulate`` until sent       |

``owned`` is the shard, or at stage 0 the whole buffer. Frozen flat groups have no master and no gradient. (*) Or bf16: the
plan's ``master_format`` and ``gradient_dtype``, and the optimizer's formats of states, say so.

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
from ..distributed.transport.communicator import Communicator
from ..distributed.transport.huge_pages import make_huge, prefer_huge_pages
from ..distributed.transport.mapped_shards import let_go
from ..distributed.transport.quantised_sum import GradientCodes
from ..distributed.transport.second_copy import SecondCopy
from ..distributed.transport.statistics import Pending
from ..plan.sharding_plan import SlotPlan, UnitPlan
from .flat_group import FlatGroup, TrainedGroup, fresh_gradient
from .offload.host_link import HostLink
from .placeholders import is_loud


class SlotPool:
    """Buffers at fixed addresses, shared by units. Slot i serves units i, i + count, ..."""

    def __init__(self, plan: SlotPlan, device: torch.device) -> None:
        self.buffers = [
            torch.empty(plan.nbytes, dtype=torch.uint8, device=device) for _ in range(plan.count if plan.nbytes else 0)
        ]
        for buffer in self.buffers:
            prefer_huge_pages(buffer)
        self.count = plan.count
        # By slot: the index of the unit whose bytes it holds, or None. Changed in the agreed order only.
        self.occupant: list[int | None] = [None] * plan.count

    @property
    def bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers)

    def carve(self, index: int, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Consecutive typed views of slot ``index``, each aligned to 64 bytes."""
        views, offset = [], 0
        for numel, dtype in zip(numels, dtypes, strict=True):
            size = numel * dtype.itemsize
            views.append(self.buffers[index][offset : offset + size].view(dtype))
            offset += aligned_bytes(size)
        return views

    def close(self) -> None:
        """Free the buffers. No unit uses them any more."""
        self.buffers.clear()


class Unit:
    """A part of the model whose parameters are unsharded, resharded and reduced together."""

    def __init__(
        self, plan: UnitPlan, modules: Sequence[nn.Module], flat_groups: Sequence[FlatGroup], link: HostLink
    ) -> None:
        """``modules``: that enter and leave the unit; hooks sit on them. ``link``: to the host, for what lies there."""
        self.plan, self.modules, self.flat_groups = plan, list(modules), list(flat_groups)
        self.index, self.name, self.placement = plan.index, plan.name, plan.placement
        self.resident = plan.resident  # the parameters are whole all the time, unless a gather is finished later
        self._has_shown_placeholders = not plan.resident
        self.param_slot, self.grad_slot = plan.param_slot, plan.grad_slot
        self.trainable = [group for group in flat_groups if isinstance(group, TrainedGroup)]
        self.link = link
        self.unsharded = True
        self.deferred = plan.deferred  # gradients may come after the unit's turn: reduce it when the backward is over
        self._gathering: list[Pending] = []
        self._decoding: list[FlatGroup] = []  # of what is being gathered
        self._reducing: list[Pending] = []
        self._is_final = False  # nothing will be added in this step to what is being reduced
        self._leaving: list[Callable[[], None]] = []  # reduced gradients on their way to the host
        self._updating: Callable[[], None] | None = None  # waits for the update that is going on
        self._was_updated = False

    # -- parameters ----------------------------------------------------------------------------------------------

    def start_gather(self, comm: Communicator, phase: str) -> None:
        """Issue the all-gather of every flat group into its slot. ``finish_gather`` must follow before use."""
        self.updated()
        for flat_group in _gathered(self):
            self._gathering.append(_gather(self, comm, flat_group, flat_group.arrives_in, phase))
            if flat_group.arriving is not None:
                self._decoding.append(flat_group)

    def start_gather_of_updated(self, comm: Communicator) -> None:
        """``start_gather`` of the flat groups of a resident unit that have been trained."""
        self.updated()
        for flat_group in self.trainable:
            self._gathering.append(self.gather_into(comm, flat_group, flat_group.full, "updated parameters"))

    def finish_gather_later(self) -> None:
        """Whoever needs the parameters first waits for them, see ``updated``: until then they are loud placeholders."""
        self.hide()
        self.update_by(self.unshard)

    def hide(self) -> None:
        """Let the parameters be loud placeholders, though the unit is resident."""
        self.reshard()
        self._has_shown_placeholders = True

    def gather_into(self, comm: Communicator, group: FlatGroup, full: torch.Tensor, phase: str) -> Pending:
        """Begin to gather ``group`` into ``full`` [numel], exactly as the shards are."""
        label = f"{self.name}: all-gather {phase}"
        return _all_gather(self, comm, group, full, group.layout.bounds, None if self.resident else group.shard, label)

    def finish_gather(self) -> None:
        """Wait for the gather in flight, if any."""
        for pending in self._gathering:
            pending.wait()
        self._gathering.clear()
        for flat_group in self._decoding:
            flat_group.decode()
        self._decoding.clear()

    def unshard(self) -> None:
        """Wait for the gather in flight, and make the parameters views of the slot."""
        if not self.unsharded:
            self.finish_gather()
            for flat_group in self.flat_groups:
                flat_group.unshard()
            self.unsharded = True

    def reshard(self) -> None:
        """Make the parameters loud placeholders."""
        if self.unsharded:
            for flat_group in self.flat_groups:
                flat_group.reshard()
            self.unsharded = False

    def replaced(self) -> Iterator[tuple[FlatGroup, int]]:
        """(flat group, entry) of the parameters that the script has given another tensor."""
        for flat_group in self.flat_groups:
            own = flat_group.views if self.unsharded else flat_group.loud
            for entry, param in enumerate(flat_group.params):
                if param.data_ptr() != own[entry].data_ptr():
                    yield flat_group, entry

    def overwritten(self) -> Iterator[str]:
        """Names of the parameters whose placeholder the script has written to. Waits for the device."""
        for flat_group in self.flat_groups if self._has_shown_placeholders else ():
            if not bool(is_loud(flat_group.marks).all()):
                yield from (
                    name for name, mark in zip(flat_group.names, flat_group.marks, strict=True) if not is_loud(mark)
                )

    def let_go_of_others(self) -> None:
        """Drop the pages of other ranks' parameters, together with whatever a module has written to them."""
        for flat_group in self.flat_groups:
            if flat_group.plan.mapped:
                let_go(flat_group.full[: flat_group.plan.low])
                let_go(flat_group.full[flat_group.plan.high :])

    def has_new_values(self) -> None:
        """The shards have changed: drop outdated pages of others. After the first change make this rank's pages huge."""
        self.let_go_of_others()
        for flat_group in self.flat_groups if not self._was_updated else ():
            if flat_group.plan.mapped:
                make_huge(flat_group.shard)
        self._was_updated = True

    # -- gradients -----------------------------------------------------------------------------------------------

    def defer(self) -> None:
        """From now on reduce the unit when the backward is over."""
        self.deferred = True

    def has_gradient(self) -> bool:
        """True if autograd has left a gradient that is not accumulated yet."""
        return any(flat_group.has_gradient() for flat_group in self.trainable)

    def names_with_gradient(self) -> list[str]:
        """Names of the parameters whose gradient is still where autograd left it, for error messages."""
        return [n for g in self.trainable for n, p in zip(g.names, g.params, strict=True) if fresh_gradient(p) is not None]

    def take_loose(self) -> bool:
        """Leave the gradients where they are if possible. True if the unit does not need the gradient slot."""
        self.vacate()
        loose = [flat_group.take_loose() for flat_group in self.trainable]
        return all(loose) and not self.placement.optimizer

    def accumulate(self) -> None:
        """Move the gradients that do not stay in place into the gradient slot."""
        self.vacate()
        for flat_group in self.trainable:
            if flat_group.loose is None:
                flat_group.accumulate()
            else:
                flat_group.clear_gaps()

    def start_reduce(self, comm: Communicator, coding: GradientCodes, *, final: bool) -> None:
        """Issue the reduction of what is accumulated. ``finish_reduce`` must follow before the shard is read.

        ``final``: no more gradients come in this step, as far as is known.
        """
        self._is_final = final
        label = f"{self.name}: reduce-scatter gradients"
        for group in self.trainable:
            adds, channels = group.adds_to_reduced, comm.of(group.plan.family)
            if group.plan.unpacked:
                pending = channels.shard.sum_parts(group.parts(), group.pieces, group.grad_shard, label, accumulate=adds)
            else:
                full, shard, bounds = group.grad_full, group.grad_shard, group.layout.bounds
                codes = coding.of(label, full.device, group.residual) if group.plan.codes_gradients else None
                pending = channels.reduce_scatter(full, bounds, shard, label, accumulate=adds, codes=codes)
            self._reducing.append(pending)
            group.reduction_begins()

    def go_on_reducing(self) -> None:
        """Begin the next part of the reduction, if it has one."""
        for pending in self._reducing:
            pending.go_on()

    def finish_reduce(self) -> None:
        """Wait until the shard holds the reduced gradients."""
        if not self._reducing:
            return
        for pending in self._reducing:
            pending.wait()  # for the sum
        self._reducing.clear()
        for group in self.trainable:
            group.reduction_ends()
            if group.host_grad is not None:
                self._fetch(group, group.host_grad)

    def _fetch(self, group: TrainedGroup, host_grad: torch.Tensor) -> None:
        """Begin to move the reduced gradients of ``group`` to the host."""
        then = partial(group.landed, final=self._is_final)
        self._leaving.append(self.link.fetch(group.grad_shard, host_grad, add=group.fetch_begins(), then=then))

    def vacate(self) -> None:
        """Return when the gradient slot may be written again."""
        self.finish_reduce()
        for left in self._leaving:
            left()
        self._leaving.clear()

    # -- updates -------------------------------------------------------------------------------------------------

    def update_by(self, wait: Callable[[], None]) -> None:
        """An update of the masters has begun; ``wait`` returns when the shards have the new values, or raises.

        The one before must be over, see ``updated``.
        """
        self._updating = wait

    def updated(self) -> None:
        """Wait for the update that is going on, if any: host gradients and shards are free then."""
        if self._updating is not None:
            self._updating()  # after an error it stays, and fails again: half of an update must not pass for a whole one
            self._updating = None


def gather_for_others(unit: Unit, comm: Communicator, phase: str) -> None:
    """Take part in a gather of ``unit`` of which this rank needs nothing, and return when it is over."""
    unit.updated()
    for flat_group in _gathered(unit):
        _gather(unit, comm, flat_group, torch.empty_like(flat_group.arrives_in), phase).wait()


def _gathered(unit: Unit) -> list[FlatGroup]:
    """The flat groups of a unit that shares slots, but for those that this rank has whole all the time."""
    return [flat_group for flat_group in unit.flat_groups if not flat_group.plan.resident]


def _gather(unit: Unit, comm: Communicator, group: FlatGroup, into: torch.Tensor, phase: str) -> Pending:
    """Begin to gather ``group``, or its codes, ``into`` what has room for them, from the second copy if there is one."""
    bounds: Sequence[int] = group.layout.bounds
    source, label = group.shard, f"{unit.name}: all-gather {phase}"
    state = comm.edits if group.master is None else comm.fences
    if group.arriving is not None:
        source, bounds = group.encode(state), [group.plan.code_bytes(bound) for bound in bounds]
    if group.second is not None and comm.second_copy is not None:
        copied_as = f"{unit.name}: second copy" if group.copies_anew(state) else None
        if unit.placement.params and comm.queues:
            return _gather_from_host_copy(
                unit, comm, comm.second_copy, group.second, into, bounds, source, label, copied_as
            )
        copied = None if copied_as is None else comm.second_copy.copy(source, group.second, bounds, copied_as)
        return comm.second_copy.all_gather(into, bounds, label, group.second, after=copied)
    return _all_gather(unit, comm, group, into, bounds, source, label)


def _all_gather(
    unit: Unit,
    comm: Communicator,
    group: FlatGroup,
    full: torch.Tensor,
    bounds: Sequence[int],
    source: torch.Tensor | None,
    label: str,
) -> Pending:
    shard = comm.of(group.plan.family).shard
    if source is None or not (unit.placement.params and comm.queues):
        return shard.all_gather(full, bounds, label, source)  # on a CPU others may read the source
    own = full[bounds[shard.rank] : bounds[shard.rank + 1]]
    unit.link.open()  # what reads the slot goes first
    arrival = unit.link.send([(source, own)])
    comm.reads(source, arrival)
    return shard.all_gather_after(arrival, full, bounds, label, own)


def _gather_from_host_copy(
    unit: Unit,
    comm: Communicator,
    copy: SecondCopy,
    second: torch.Tensor,
    into: torch.Tensor,
    bounds: Sequence[int],
    source: torch.Tensor,
    label: str,
    copied_as: str | None,
) -> Pending:
    """Begin to gather a unit whose shard ``source`` and part of the second copy are in host memory.

    The part goes up into its place for each gather. If it is to be made anew, it comes there from all shards, and down
    from there before anything else is done with the slot.
    """
    part, rank, link = copy.place(into, bounds), comm.dense.shard.rank, unit.link
    link.open()  # what reads the slot goes first
    if copied_as is None:
        arrival = link.send([(second, part)])
        comm.reads(second, arrival)
        return copy.all_gather(into, bounds, label, part, after=arrival)
    own = into[bounds[rank] : bounds[rank + 1]]
    uploaded = link.send([(source, own)])
    comm.reads(source, uploaded)
    uploaded.wait()
    gathered = copy.all_gather(into, bounds, label, part, after=copy.copy(own, part, bounds, copied_as))
    return Pending(comm.statistics, label, [gathered], lambda: link.fetch(part, second, add=False, then=_nothing)())


def _nothing() -> None:
    """Follows copies that nobody works on."""


def links_of(units: Sequence[Unit]) -> list[HostLink]:
    """The links between ``units`` and the host, without repetition."""
    return list(dict.fromkeys(unit.link for unit in units))


def finish_updates(units: Sequence[Unit]) -> None:
    """Wait for updates in the background. Afterwards masters, moments and weights may be used by anybody."""
    for unit in units:
        unit.updated()
    for link in links_of(units):
        link.flush()
