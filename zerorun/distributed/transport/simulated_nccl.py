"""A process group that behaves as NCCL's do, for the simulated device: gloo moves the bytes.

What is different from gloo, and what a program can get wrong: calls are carried out one after the other for each process
group, in the order in which they are made, on a stream of their own; messages have no tags; a send is over when the receive
that it meets is. Here a thread for each group carries the calls out, each after a delay that is drawn by chance.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from .. import simulated

_MOST_DELAY_S = 0.002
_PATIENCE_S = 60.0  # after that, NCCL would wait for ever
_GIVEN, _RECEIVED = 1, 2  # tags of gloo
# The dtypes that it knows, by torch's table.
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
_Call = tuple["Future[None]", Callable[[], object]]


def group_of(group: dist.ProcessGroup) -> SimulatedNccl:
    """What stands for NCCL's part of ``group``: one as long as the group exists, whoever else drops it on one rank only."""
    if group not in _groups:
        _groups[group] = SimulatedNccl(group)
    return _groups[group]


class SimulatedNccl:
    """The calls that the transport of NCCL makes, with its semantics. They return at once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """All ranks of ``group`` must make it. It has connections of its own, as NCCL has."""
        ranks = dist.get_process_group_ranks(group)
        store = dist.PrefixStore(f"simulated NCCL {group.group_name}", _get_process_group_store(group))
        self._group: Any = dist.ProcessGroupGloo(store, dist.get_rank(group), len(ranks), timedelta(seconds=_PATIENCE_S))
        self.stream = simulated.SimulatedStream(simulated.DEVICE, f"collectives of {ranks}, {group.group_desc}")
        self._rank, self._size, self._calls = dist.get_rank(group), len(ranks), SimpleQueue[_Call | None]()
        seed = dist.get_rank()
        threading.Thread(target=_work_off, args=(self._calls, seed), name="simulated NCCL", daemon=True).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def _begin(
        self,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        unset: Sequence[torch.Tensor],
        call: Callable[[], object],
    ) -> dist.Work:
        """``unset``: what of ``writes`` has no meaning from here on. Raises ValueError for a dtype that NCCL lacks."""
        for tensor in (*reads, *writes):
            if tensor.dtype not in _DTYPES:
                raise ValueError(f"NCCL knows no {tensor.dtype}")
        self.stream.wait_stream(_settled())
        simulated.observer().begin(self.stream, reads, writes, what)
        for tensor in unset:
            simulated.poison(tensor)
        future, inference = Future[None](), torch.is_inference_mode_enabled()

        def in_its_mode() -> None:  # that of the program, whose thread NCCL is called on
            with torch.inference_mode(inference):
                call()

        self._calls.put((future, in_its_mode))
        work: Any = _Work(future, self.stream, [*reads, *writes])
        return work  # type: ignore[no-any-return]

    def _allgather_base(self, full: torch.Tensor, own: torch.Tensor) -> dist.Work:
        _refuse_uneven(full, own, self._size)
        begin = self._rank * own.numel()
        in_place = own.data_ptr() == full[begin:].data_ptr()
        filled = [full[:begin], full[begin + own.numel() :]] if in_place else [full]
        return self._begin(
            "all_gather", [own], filled, filled, lambda: self._group._allgather_base(full, own.clone()).wait()
        )

    def _reduce_scatter_base(self, own: torch.Tensor, full: torch.Tensor, options: Any) -> dist.Work:
        _refuse_uneven(full, own, self._size)
        apart = own.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
        _settled()
        sent = full if apart else simulated.snapshot(full)

        def call() -> None:
            own.copy_(self._sum(sent).view(self._size, -1)[self._rank])

        return self._begin("reduce_scatter", [full], [own], [own], call)

    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work:
        (flat,) = tensors
        _settled()
        sent = simulated.snapshot(flat)  # flat is NaN until the sum is there
        return self._begin("all_reduce", tensors, tensors, tensors, lambda: flat.copy_(self._sum(sent)))

    def alltoall(self, received: list[torch.Tensor], sent: list[torch.Tensor], options: Any) -> dist.Work:
        def call() -> None:
            others = [peer for peer in range(self._size) if peer != self._rank]
            works = [self._group.recv([received[peer]], peer, _GIVEN) for peer in others if received[peer].numel()]
            works += [self._group.send([sent[peer]], peer, _GIVEN) for peer in others if sent[peer].numel()]
            for work in works:
                work.wait()

        return self._begin("all_to_all", sent, received, received, call)

    def _sum(self, flat: torch.Tensor) -> torch.Tensor:
        """Over ranks ascending, as the transports of CPUs have it, so that runs can be compared with theirs."""
        table = flat.new_empty(self._size, flat.numel())
        self._group._allgather_base(table.view(-1), flat.clone()).wait()
        total = table[0]
        for theirs in table[1:]:
            total = total + theirs
        return total

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        def call() -> None:
            self._group.send(tensors, peer, _GIVEN).wait()
            self._group.recv([torch.empty(1)], peer, _RECEIVED).wait()

        return self._begin("send", tensors, [], [], call)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        def call() -> None:
            self._group.recv(tensors, peer, _GIVEN).wait()
            self._group.send([torch.empty(1)], peer, _RECEIVED).wait()

        return self._begin("receive", [], tensors, tensors, call)


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, SimulatedNccl] = weakref.WeakKeyDictionary()


def _settled() -> simulated.SimulatedStream:
    """The stream of the program, all of whose work so far has been done: gloo reads what is there."""
    current = simulated.current_stream(simulated.DEVICE)
    current.run_to(current.given)
    return current


class _Work:
    """A call on its way. As with NCCL, ``buffers`` are not given back before it is waited for."""

    def __init__(self, future: Future[None], stream: simulated.SimulatedStream, buffers: list[torch.Tensor]) -> None:
        self._future, self._end, self._buffers = future, stream.record_event(), buffers

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for it. Raises RuntimeError where NCCL would wait for ever."""
        self._end.wait()
        try:
            self._future.result(timeout.total_seconds() if timeout else _PATIENCE_S)
        except TimeoutError as error:
            raise RuntimeError("a call of the simulated NCCL does not end") from error
        self._buffers.clear()
        return True

    def is_completed(self) -> bool:
        """What the program does after True comes after the call."""
        done = self._future.done()
        if done:
            self._end.see()
        return done


def _work_off(calls: SimpleQueue[_Call | None], seed: int) -> None:
    drawn = random.Random(seed)
    while (entry := calls.get()) is not None:
        future, call = entry
        time.sleep(drawn.uniform(0, _MOST_DELAY_S))
        try:
            call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del entry, future, call


def _refuse_uneven(full: torch.Tensor, own: torch.Tensor, size: int) -> None:
    if full.numel() != own.numel() * size:
        raise ValueError(f"NCCL refuses {own.numel()} of {full.numel()} elements on each of {size} ranks")
