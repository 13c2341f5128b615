"""The link between a device and host memory: copies between the two, and the thread that works on what lies there.

[Note: offload is a placement]
Nothing about the stages changes. The master weights, the moments and the reduced gradients of a unit are host tensors, and
so is, at stage 3, its shard of the parameters. The gradient is copied when its reduction is over, and added there when a
step has several; the update runs where its tensors are; the new weights are copied, rounded, into the shard. If the device
is the CPU the copies are made all the same: there is one path, and it is tested everywhere.

[Note: the norm comes first]
Clipping and overflow are decided by the norm of all gradients, so no update begins before the last gradient is reduced. To
speculate would mean to keep what an update replaces, 12 bytes per parameter of host memory on top of 16, and to do the
work twice in every step that is clipped. Instead updates are hidden behind the next forward, unit by unit, where no script
can look at old values: those of units that share slots (stage 3). Units whose parameters scripts may read after
``step()`` are up to date when it returns; on a GPU the way of one is hidden behind the update of the next.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Generic, TypeVar

import torch

from ...distributed.device import Arrival, CopyStream, host_empty, queues, select
from ...distributed.layout import aligned_bytes
from .nvme import StateFile

Result = TypeVar("Result")


class Disk:
    """What one rank keeps on disks: ``states``, and room for shards of parameters."""

    def __init__(self, states: StateFile | None, params: torch.Tensor | None) -> None:
        """``params``: [bytes] uint8."""
        self.states, self._params, self._taken = states, params, 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next [numel] of the room for parameters."""
        assert self._params is not None
        size = numel * dtype.itemsize
        part = self._params[self._taken : self._taken + size].view(dtype)
        self._taken += aligned_bytes(size)
        return part


class Staging:
    """Two pinned host buffers of ``nbytes`` bytes, used in turn: what is on its way to or from the device lies here."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._buffers = [host_empty(nbytes, torch.uint8, pinned=pinned) for _ in range(2 if nbytes else 0)]
        self._busy: list[Callable[[], object] | None] = [None, None]  # returns when the buffer is free again
        self._next = 0

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """(index of a buffer that is free, [numel] of it). ``hold`` must follow."""
        index, self._next = self._next, 1 - self._next
        wait, self._busy[index] = self._busy[index], None
        if wait is not None:
            wait()
        return index, self._buffers[index][: numel * dtype.itemsize].view(dtype)

    def hold(self, index: int, until: Callable[[], object]) -> None:
        """Buffer ``index`` is in use until ``until`` returns."""
        self._busy[index] = until


class _Later(Generic[Result]):
    """Work that is done when it is first waited for. Afterwards it gives the same result, or raises the same error."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work: Callable[[], Result] | None = work
        self._outcome: Future[Result] = Future()

    def __call__(self) -> Result:
        work, self._work = self._work, None
        if work is not None:
            with _interrupts_later():  # half of an update could be neither saved nor gone on from
                try:
                    self._outcome.set_result(work())
                except BaseException as error:
                    self._outcome.set_exception(error)
        return self._outcome.result()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """SIGINT (Ctrl-C) is handled after the body, if this is the thread that gets it."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        for number, frame in came[:1]:
            before(number, frame)


class HostLink:
    """Copies between a device and host memory, and the thread that works on what lies there.

    [Note: who waits for what]
    On a GPU all copies are asynchronous, on two streams of their own, from and to pinned memory. A gradient that comes down
    is awaited by the thread, not by the program: it adds it where a step has several, and squares it if it is the last.
    Updates are done by the thread, one unit after the other, in the order in which the next forward needs them; new weights
    go up behind it, and whoever gathers a unit waits for that unit's alone (``Unit.updated``).

    On a CPU, whose cores the computation needs itself, there is no thread: the same work is done at once, and updates
    when they are first waited for. They write rounded weights where these belong.
    """

    def __init__(
        self, device: torch.device, *, pinned: bool = True, apart: bool | None = None, store: StateFile | None = None
    ) -> None:
        """``apart``: work on a thread and through staging buffers; by default, if the device is not the CPU.

        ``store``: masters and moments that are on a disk; there is a thread then, as well.
        """
        self.device = device
        self._pinned = pinned and queues(device)
        self._down, self._up = CopyStream(device), CopyStream(device)
        self.apart = queues(device) if apart is None else apart
        self.store = store
        self._worker = None
        if self.apart or store is not None:  # a thread begins with the first GPU as its own
            self._worker = ThreadPoolExecutor(1, "zerorun-host", initializer=select, initargs=(device,))
        self._landings: list[Callable[[], None]] = []
        self._landing = self._rounded = Staging(0, pinned=False)

    def reserve(self, gradient_bytes: int, weight_bytes: int) -> None:
        """Make the staging buffers, for gradients and for weights of the largest unit; 0 bytes where none are needed."""
        self._landing = Staging(gradient_bytes, pinned=self._pinned)
        self._rounded = Staging(weight_bytes, pinned=self._pinned)

    @property
    def bytes(self) -> int:
        """Of the staging buffers, and of those that a disk's bytes are updated in."""
        return self._landing.bytes + self._rounded.bytes + (self.store.buffer_bytes if self.store is not None else 0)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat host tensor."""
        return host_empty(numel, dtype, pinned=self._pinned)

    # -- gradients, down -----------------------------------------------------------------------------------------

    def fetch(
        self, source: torch.Tensor, target: torch.Tensor, *, add: bool, then: Callable[[], object]
    ) -> Callable[[], None]:
        """Begin to copy ``source`` from the device into the host tensor ``target``, or to add it; ``then`` is called after.

        ``drain`` must follow. What is returned must be called before ``source`` is written again.
        """
        place, landing = None, None
        self._down.follow()
        if add and self.apart:
            place, landing = self._landing.take(source.numel(), source.dtype)
        if add and landing is None:
            target.add_(source)
            left = Arrival()
        else:
            left = self._down.copy(source, target if landing is None else landing)

        def land() -> None:
            left.synchronize()
            if landing is not None:
                target.add_(landing)
            then()

        done = self.begin(land)
        if self._worker is None:
            done()
        else:
            self._landings.append(done)
        if place is not None:
            self._landing.hold(place, done)
        return left.wait

    def drain(self) -> None:
        """Wait until everything that was fetched is in its place."""
        landings, self._landings = self._landings, []
        for landed in landings:
            landed()

    # -- updates, and weights, up --------------------------------------------------------------------------------

    def open(self) -> None:
        """Weights may be sent from here on: what has been begun on the device reads the old ones."""
        self._up.follow()

    def begin(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Begin ``work``, after all that was begun before. What is returned waits for its result, or raises its error."""
        return _Later(work) if self._worker is None else self._worker.submit(work).result

    def rounding_place(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """Where an update writes rounded weights that go to the device: (number, [numel]). ``send`` must follow."""
        return self._rounded.take(numel, dtype)

    def send(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], place: int | None = None) -> Arrival:
        """Begin to copy (host source, target on the device).

        ``place``: the number of the rounding place that the sources lie in; it is free again when the copies are over.
        """
        arrival = Arrival()
        for source, target in pairs:
            arrival = self._up.copy(source, target)
        if place is not None:
            self._rounded.hold(place, arrival.synchronize)
        return arrival

    def home(self, param: torch.Tensor, number: int) -> torch.Tensor:
        """A state of zeros for ``param``, as optimizers want it: on the disk if ``param`` is there, else in memory.

        The state is zeroed, and then filled, through the mapping of the file. Pages of it hold neighbours as well: if the
        disk were given those at the same time, the kernel would write back what it had read of them before. So the disk
        finishes first.
        """
        if self.store is None:
            return torch.zeros_like(param, memory_format=torch.contiguous_format)
        if self.store.holds(param):
            self.flush()
        return self.store.home(param, number)

    def flush(self) -> None:
        """Wait until the disk has what was updated. Raises SwapError, again and again, if it did not take it."""
        if self.store is not None:
            self.begin(self.store.flush)()

    def close(self) -> None:
        """End the thread, and let go of the file."""
        if self._worker is not None:
            self._worker.shutdown()
        if self.store is not None:
            self.store.close()
