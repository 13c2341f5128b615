"""Control: small values on the CPU that ranks tell each other, through the process group. For decisions, not for data."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...watch.board import ALL, OF_STAGES, Span, only, span_of
from ..topology import Topology, everyone
from ..waits import waiting
from .peer_memory import PeerEnded, PeerMemory
from .statistics import CommunicationStatistics, unanswered
from .world import gather_values, with_others

_AGREEMENT = "{}: an agreement of ranks, as in step() or a barrier"
# Work that this rank no longer waits for. Threads of gloo may still be using its memory.
_given_up: list[dist.Work] = []


def given_up_is_over() -> bool:
    """True if no thread is still working on what this rank no longer waits for."""
    return all(work.is_completed() for work in _given_up)


class Control:
    """What the ranks of one engine agree on. All ranks concerned make the same calls in the same order.

    Decisions are made by all ranks of the world. *Data-parallel ranks* are those that have the same part of the model.
    ``memory``: where this rank lets others read while it waits, so that nobody waits for it.
    """

    def __init__(self, topology: Topology, statistics: CommunicationStatistics, memory: PeerMemory | None) -> None:
        self._topology, self._statistics, self._memory = topology, statistics, memory
        self._world: dist.ProcessGroup | None = everyone()
        self._data = topology.group("data") if topology.data_size > 1 else None
        self._data_span = span_of(topology.ranks_along("data"))
        self._agreements = 0  # how many have gone through the process group, in the same order on all ranks

    # -- tensors -------------------------------------------------------------------------------------------------

    def sum(self, values: torch.Tensor, label: str = "control") -> torch.Tensor:
        """Sum a small CPU tensor over all ranks of the world, in place."""
        if self._topology.world_size > 1:
            self._count(values, label)
            self._finish(dist.all_reduce(values, group=self._world, async_op=True), label)
        return values

    def data_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a small CPU tensor over the data-parallel ranks, in place."""
        if self._data is not None:
            self._count(values)
            self._finish(dist.all_reduce(values, group=self._data, async_op=True), span=self._data_span)
        return values

    def data_gather(self, values: torch.Tensor, timeout_s: float | None = None, call: str = "") -> list[torch.Tensor]:
        """The data-parallel ranks' small CPU tensors, by rank. Raises OrderError if a rank does not answer in time.

        ``call``: what the script has called, for who asks why this rank waits.
        """
        if self._data is None:
            return [values]
        gathered = [torch.empty_like(values) for _ in range(self._topology.data_size)]
        self._count(values)
        work = dist.all_gather(gathered, values, group=self._data, async_op=True)
        self._finish(work, timeout_s=timeout_s, span=self._data_span, call=call)
        return gathered

    def data_broadcast(self, tensor: torch.Tensor, source: int, label: str) -> None:
        """Give every data-parallel rank the contiguous ``tensor`` of number ``source`` among them. For set-up."""
        if self._data is not None and tensor.numel():
            self._count(tensor, label)
            with with_others(label, span=self._data_span):
                dist.broadcast(tensor.view(-1).view(torch.uint8), group=self._data, group_src=source)  # bytes: any dtype

    def _count(self, values: torch.Tensor, label: str = "control") -> None:
        self._statistics.count(label, values.numel() * values.element_size())

    # -- values, see wire.py -------------------------------------------------------------------------------------

    def values(self, value: Any) -> list[Any]:
        """All ranks' values, by rank of the world. Set-up and error paths only."""
        return self._values(value, self._world, ALL)

    def data_values(self, value: Any) -> list[Any]:
        """The data-parallel ranks' values, by rank. Set-up and error paths only."""
        return [value] if self._data is None else self._values(value, self._data, self._data_span)

    def _values(self, value: Any, group: dist.ProcessGroup | None, span: Span) -> list[Any]:
        self._finish(dist.barrier(group=group, async_op=True), span=span)
        with waiting(_AGREEMENT.format("control"), span=span):
            return gather_values(value, group)

    def of_all_stages(self, own: dict[str, Any]) -> dict[str, Any]:
        """The named CPU tensors of all pipeline stages, in their order; of one name, the first stage's. Collective.

        Other values, which modules have as extra state, come as they are.
        """
        if self._topology.pipe == 1:
            return own
        group, span = self._topology.group("pipe"), span_of(self._topology.ranks_along("pipe"))
        found: dict[str, Any] = {}
        described = {name: (v.shape, v.dtype) if torch.is_tensor(v) else (v, None) for name, v in own.items()}
        for stage, names in enumerate(self._values(described, group, span)):
            for name, (shape, dtype) in names.items():
                if name in found:
                    continue
                if dtype is None:
                    found[name] = shape
                    continue
                here = stage == self._topology.pipe_rank
                flat = found[name] = own[name].contiguous() if here else torch.empty(shape, dtype=dtype)
                if flat.numel():
                    sent = flat.view(-1).view(torch.uint8)  # gloo does not know all dtypes
                    self._count(sent, "whole weights over stages")
                    self._finish(dist.broadcast(sent, group=group, group_src=stage, async_op=True), span=span)
        return found

    # -- waiting -------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return when all ranks of the world have called it."""
        self._finish(dist.barrier(group=self._world, async_op=True))

    def finish_message(self, message: Future[None], label: str, peer: int) -> None:
        """Wait for a message from or to the rank ``peer`` of the world, and serve ranks that wait for this one meanwhile.

        Raises OrderError.
        """
        watch = self._statistics.watch
        begun = None if watch is None else watch.now()
        try:
            with waiting(f"{OF_STAGES}{label}", lambda: [peer], only(peer)):
                if self._memory is not None:
                    self._memory.wait_until(message.done)
                message.result()
        except RuntimeError as error:
            raise unanswered(label, dist.get_rank(), error) from error
        if watch is not None:
            watch.add(f"{OF_STAGES}{label}", begun, begun)

    def _finish(
        self,
        work: dist.Work,
        label: str = "control",
        timeout_s: float | None = None,
        span: Span = ALL,
        call: str = "",
    ) -> None:
        """Wait for ``work``, and serve ranks that wait for this one meanwhile. Raises OrderError."""
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        memory = self._memory
        self._agreements += 1
        number, missing, watch = self._agreements, None, self._statistics.watch
        begun = None if watch is None else watch.now()
        if memory is not None:
            memory.note_agreement(number)
            missing = partial(memory.absent_from_agreement, number)
        try:
            what = f"{call}, which all ranks must call" if call else _AGREEMENT.format(label)
            with waiting(what, missing, span, number):
                if memory is not None:
                    with contextlib.suppress(PeerEnded):  # it may have done its part
                        memory.wait_until(work.is_completed, timeout)
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timeout)
        except RuntimeError as error:
            _given_up.append(work)
            left = None if memory is None else memory.left()
            raise unanswered("control", dist.get_rank(), left or error) from error
        if watch is not None:
            watch.add(label, begun, begun)

    def forget_groups(self) -> None:
        """Let go of the process groups. No agreement can follow."""
        self._world = self._data = None
