"""NCCL's ways on a CPU: the transport that GPUs would use, over process groups that behave as NCCL's do.

What is different from gloo, and what a program can get wrong: calls are carried out one after the other for each process
group, in the order in which they are made; messages have no tags; a send is over when the receive that it meets is. Here a
thread for each group carries the calls out, by gloo, after a delay that is drawn by chance. Each call is written down.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from zerorun.distributed.transport import connect
from zerorun.distributed.transport.nccl import Nccl

_MOST_DELAY_S = 0.002
_PATIENCE_S = 20.0
Call = tuple[str, int, str]  # operation, elements, dtype


class Queued:
    """A call that is in a queue, as a ``dist.Work``."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._future.result(timeout.total_seconds() if timeout else _PATIENCE_S)
        except TimeoutError as error:
            raise RuntimeError("NCCL would wait for ever") from error
        return True

    def is_completed(self) -> bool:
        return self._future.done()


class InOrder:
    """A process group whose calls are carried out in order, each when the one before is over."""

    def __init__(self, group: dist.ProcessGroup, seed: int) -> None:
        self._group, self.ranks = group, tuple(dist.get_process_group_ranks(group))
        self._random = random.Random(seed * 1000 + dist.get_rank())
        self.calls: list[Call] = []
        self._queue: SimpleQueue[tuple[Future[None], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work_off, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_PATIENCE_S)

    def _work_off(self) -> None:
        while (entry := self._queue.get()) is not None:
            future, call = entry
            time.sleep(self._random.uniform(0, _MOST_DELAY_S))
            try:
                call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _begin(self, name: str, tensor: torch.Tensor, call: Callable[[], Any]) -> Queued:
        self.calls.append((name, tensor.numel(), str(tensor.dtype)))
        future: Future[None] = Future()
        self._queue.put((future, call))
        return Queued(future)

    def _allgather_base(self, full: torch.Tensor, own: torch.Tensor) -> Queued:
        assert full.numel() == own.numel() * len(self.ranks)
        return self._begin("all_gather", full, lambda: self._group._allgather_base(full, own.clone()).wait())

    def _reduce_scatter_base(self, own: torch.Tensor, full: torch.Tensor, options: Any) -> Queued:
        assert full.numel() == own.numel() * len(self.ranks)

        def call() -> None:
            found = torch.empty_like(own)
            self._group._reduce_scatter_base(found, full.clone(), options).wait()
            own.copy_(found)

        return self._begin("reduce_scatter", full, call)

    def allreduce(self, tensors: list[torch.Tensor]) -> Queued:
        return self._begin("all_reduce", tensors[0], lambda: self._group.allreduce(tensors).wait())

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Queued:
        def call() -> None:
            self._group.send(tensors, peer, 1).wait()
            self._group.recv([torch.empty(1)], peer, 2).wait()  # it has been received

        return self._begin("send", tensors[0], call)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Queued:
        def call() -> None:
            self._group.recv(tensors, peer, 1).wait()
            self._group.send([torch.empty(1)], peer, 2).wait()

        return self._begin("receive", tensors[0], call)


@contextlib.contextmanager
def nccl_on_cpu(seed: int = 0) -> Iterator[list[InOrder]]:
    """Engines made in the block use NCCL's transport on the CPU. Gives the groups that they have used, as they come."""
    found: weakref.WeakKeyDictionary[dist.ProcessGroup, InOrder] = weakref.WeakKeyDictionary()
    groups: list[InOrder] = []

    def joined(transport: Nccl) -> Any:
        assert transport.group is not None
        if transport.axis == "pipe":  # what it sends is in host memory, for which the group has gloo
            return transport.group
        if transport.group not in found:
            groups.append(InOrder(transport.group, seed))
            found[transport.group] = groups[-1]
        return found[transport.group]

    before = connect.uses_nccl
    connect.uses_nccl = lambda device, group=None: True
    Nccl.joined = property(joined)  # type: ignore[assignment,method-assign]
    Nccl.names = property(lambda transport: dist.get_process_group_ranks(transport.group))  # type: ignore
    try:
        yield groups
    finally:
        connect.uses_nccl = before
        del Nccl.joined, Nccl.names
        for group in groups:
            group.close()


def refuse_different_calls(groups: list[InOrder]) -> None:
    """Raise AssertionError unless the ranks of each group have made the same collectives in the same order."""
    mine = [(group.ranks, [call for call in group.calls if call[0] not in ("send", "receive")]) for group in groups]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    for ranks, calls in mine:
        for rank in ranks:
            theirs = [other for members, other in found[rank] if members == ranks]
            assert calls in theirs, f"rank {dist.get_rank()}, group {ranks}: other collectives than rank {rank}"
