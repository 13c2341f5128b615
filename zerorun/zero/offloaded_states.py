"""States that are away: memory of the device that an engine gives back for a while, for generation in between say.

[Note: memory goes, tensors stay]
A buffer has many views: parameters, pieces of the optimizer, parts that are reduced. So none of them is replaced. Only the
memory behind them goes: its storage is copied to the host and emptied, and later gets memory again, and the copy back. What
is to be computed anew before it is read, such as a slot, is not copied at all.

While the memory is away, tensors that scripts may read must not point to nothing: parameters show loud placeholders, and
the tensors of the optimizer show the copies on the host.

[Note: what is needed comes back]
A forward brings the weights back, a backward also the gradients, and all else that reads or writes states brings back what
it needs. To read the weights, as trainers do that send them to an inference engine, nothing else comes back.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from ..distributed.device import Arrival, CopyStream, empty_storage, give_back_unused, holds, host_empty, queues
from ..log import info_once
from ..plan.parameter_kinds import strides_of
from ..plan.sharding_plan import DEVICE, HOST
from .flat_group import TrainedGroup
from .sharded_optimizer import ShardedOptimizer
from .unit import SlotPool, Unit


class StateKind(str, enum.Enum):
    """What can be away, by DeepSpeed's names: moments, masters, weights, reduced gradients, and buffers of full gradients.

    Weights in fp32, which are their own masters, count as weights.
    """

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


WEIGHTS, MASTERS, MOMENTS = StateKind.lp_params, StateKind.hp_params, StateKind.optim_states
GRADIENTS = (StateKind.lp_grads, StateKind.contiguous_grad_buffer)
SLOTS = "slots"  # that units share for parameters: their contents are never needed
_KINDS = {
    "full": WEIGHTS,
    "shard": WEIGHTS,
    "coded": WEIGHTS,
    "second": WEIGHTS,
    "master": MASTERS,
    "rest": MASTERS,
    "grad_full": StateKind.contiguous_grad_buffer,
    "grad_shard": StateKind.lp_grads,
}


@dataclass
class _Absent:
    """The memory of one storage. ``flat``: all of it as [bytes] uint8. ``host``: the copy; None if nobody needs the values.

    ``shown``: tensors in it that show the copy meanwhile. ``pinned``: the copy is in pinned memory.
    """

    flat: torch.Tensor
    host: torch.Tensor | None = None
    shown: list[torch.Tensor] = field(default_factory=list)
    pinned: bool = False

    def show(self, flat: torch.Tensor) -> None:
        """Let the tensors be views of ``flat`` [bytes]."""
        for tensor in self.shown:
            tensor.data = flat.view(tensor.dtype).as_strided(tensor.shape, strides_of(tensor), tensor.storage_offset())


@dataclass
class States:
    """The memory of one engine that can be away. ``units``, ``param_slots``, ``grad_slots``: what the builder has made."""

    units: list[Unit]
    param_slots: SlotPool
    grad_slots: SlotPool
    device: torch.device
    away: dict[str, list[_Absent]] = field(default_factory=dict)  # what has left, by kind
    _copies: CopyStream | None = None
    _loading: RemovableHandle | None = None  # of a hook on the optimizer, as long as something is away
    _pinned: dict[int, torch.Tensor] = field(default_factory=dict)  # host memory by storage, kept for the next time

    # -- leaving -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @torch.inference_mode(False)
    def leave(self, kinds: Collection[StateKind], optimizer: ShardedOptimizer | None, *, pinned: bool, wait: bool) -> None:
        """Give back the device's memory of ``kinds``, except what is in host memory or in a file anyway.

        ``pinned``: the copies are in pinned memory, which is kept for the next time. Without ``wait``, they may go on when
        this returns. Slots that units share must be empty, and no reduction may be going on.
        """
        for kind in kinds if queues(self.device) else ():  # the memory of a CPU is the host's
            if kind in self.away:
                continue
            if kind == WEIGHTS:
                self.empty_slots()
                for unit in self.units:
                    unit.hide()
            found = self._found(kind, optimizer)
            if optimizer is not None and self._loading is None:
                hook = optimizer.optimizer.register_load_state_dict_pre_hook
                self._loading = hook(lambda *_: self.bring_back())
            self.away[kind] = [self._absent(flat, read, pinned) if kept else _Absent(flat) for flat, read, kept in found]
            self._copy_out(self.away[kind], wait)
        give_back_unused(self.device)

    def empty_slots(self) -> None:
        """Give back the memory of the slots that units share for parameters. They must be empty."""
        if queues(self.device) and SLOTS not in self.away:
            self.away[SLOTS] = [_Absent(flat) for flat in _storages(self.param_slots.buffers)]
            self._copy_out(self.away[SLOTS], wait=True)
            give_back_unused(self.device)

    def _found(
        self, kind: StateKind, optimizer: ShardedOptimizer | None
    ) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], bool]]:
        """Yield (memory on the device as [bytes] uint8, tensors in it that scripts read, whether its values are needed)."""
        groups = [group for unit in self.units for group in unit.flat_groups]
        if kind == MOMENTS:
            read = list(self._moments(optimizer)) if optimizer is not None else []
            found = read
        else:
            read = [piece.tensor for piece in optimizer.pieces] if optimizer is not None else []
            found = [
                getattr(group, buffer.tensor)
                for group in groups
                for buffer in group.plan.buffers
                if _KINDS.get(buffer.tensor) == kind and buffer.place == DEVICE
            ]
        if kind == StateKind.contiguous_grad_buffer:
            found += self.grad_slots.buffers
        kept = kind not in GRADIENTS or any(g.accumulated or g.reduced for g in groups if isinstance(g, TrainedGroup))
        for flat in _storages(found):
            yield flat, [tensor for tensor in read if storage_number(tensor) == storage_number(flat)], kept

    def _moments(self, optimizer: ShardedOptimizer) -> Iterator[torch.Tensor]:
        """The states of the optimizer that are on the device; for wrappers, what is in them."""
        on_device = {id(g) for unit in self.units for g in unit.trainable if unit.plan.states_place == DEVICE}
        states = optimizer.optimizer.state  # once: an access waits for the updates of all units
        for piece in optimizer.pieces if on_device else ():
            for value in states.get(piece.tensor, {}).values():
                if id(piece.flat_group) in on_device and isinstance(value, torch.Tensor) and value.dim():
                    yield from (tensor for tensor in _inside(value) if holds(self.device, tensor))

    def _absent(self, flat: torch.Tensor, read: list[torch.Tensor], pinned: bool) -> _Absent:
        host = self._pinned.get(storage_number(flat)) if pinned else None
        if host is None or host.numel() != flat.numel():
            host = host_empty(flat.numel(), torch.uint8, pinned=pinned)
            if pinned:
                self._pinned[storage_number(flat)] = host
        return _Absent(flat, host, read, pinned)

    def _copy_out(self, leaving: list[_Absent], wait: bool) -> None:
        if self._copies is None:
            self._copies = CopyStream(self.device)
        for absent in leaving:
            arrival = Arrival()
            if absent.host is not None:
                self._copies.follow(read=absent.flat)
                arrival = self._copies.copy(absent.flat, absent.host)
                if wait or not absent.pinned:
                    arrival.synchronize()
                absent.show(absent.host)
            empty_storage(absent.flat, arrival)

    # -- coming back ---------------------------------------------------------------------------------------------

    def bring_back(self, *kinds: str, wait: bool = False, asked: bool = False) -> None:
        """Bring back what is away of ``kinds``; everything if none is given.

        The device waits for the copies, and with ``wait`` the program, too. ``asked``: the script knows.
        """
        for kind in kinds or tuple(self.away) if self.away else ():
            returning = self.away.pop(kind, [])
            if not asked and any(absent.host is not None for absent in returning):
                info_once("states that offload_states() has moved come back because they are needed.")
            self._copy_in(returning, wait)
            for unit in self.units if kind == WEIGHTS and returning else ():
                if unit.resident:
                    unit.unshard()
        if self._loading is not None and not self.away:
            self._loading.remove()
            self._loading = None

    @torch.no_grad()
    @torch.inference_mode(False)
    def _copy_in(self, returning: list[_Absent], wait: bool) -> None:
        for absent in returning:
            absent.flat.untyped_storage().resize_(absent.flat.numel())
            if absent.host is None:
                absent.flat.zero_()  # as gradients of padding are from the beginning
                continue
            assert self._copies is not None
            self._copies.follow()
            arrival = self._copies.copy(absent.host, absent.flat)
            self._copies.lead()
            absent.show(absent.flat)
            if wait or not absent.pinned:
                arrival.synchronize()

    # -- what is where -------------------------------------------------------------------------------------------

    @property
    def bytes_kept(self) -> int:
        """Bytes of pinned host memory that is kept for the next time, and holds nothing now."""
        used = {id(absent.host) for absents in self.away.values() for absent in absents}
        return sum(host.numel() for host in self._pinned.values() if id(host) not in used)

    def is_away(self, kind: StateKind) -> bool:
        """True if ``kind`` is away."""
        return kind in self.away

    def places(self) -> dict[int, str | None]:
        """Return where the memory is that is away, by its storage: HOST, or None if it is nowhere."""
        return {
            storage_number(absent.flat): None if absent.host is None else HOST
            for absents in self.away.values()
            for absent in absents
        }


def _inside(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that ``value`` consists of: itself, or what is in a wrapper."""
    if not is_traceable_wrapper_subclass(value):
        yield value
        return
    for attribute in value.__tensor_flatten__()[0]:
        yield from _inside(getattr(value, attribute))


def _storages(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the whole memory behind ``tensors`` as [bytes] uint8, each once, if there is any."""
    for tensor in {storage_number(tensor): tensor for tensor in tensors}.values():
        if tensor.untyped_storage().nbytes():
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def storage_number(tensor: torch.Tensor) -> int:
    """A number of the storage, which stays the same when its memory goes."""
    return tensor.untyped_storage()._cdata
