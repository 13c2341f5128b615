"""The link between a device and host memory: copies between the two, and the thread that works on host memory.

[Note: offload is a placement]
Nothing about the stages changes. The master weights, the moments and the reduced gradients of a unit are host tensors, and
so is, at stage 3, its shard of the parameters. The gradient is copied when its reduction is over, and added to the host
tensor if a step has several; the update runs where its tensors are; the new weights are rounded and copied into the shard.
If the device is the CPU, the copies are made all the same, so that there is one path, which is tested everywhere.

[Note: the norm comes first]
Clipping and overflow are decided by the norm of all gradients, so no update begins before the last gradient is reduced.
Speculation would have to keep what an update replaces, 12 bytes of host memory per parameter on top of 16, and to do the
work twice in every step that is clipped. Instead, updates are hidden behind the next forward, unit by unit, where no script
can see old values: in units that share slots (stage 3). Units whose parameters scripts may read after ``step()`` are up to
date when it returns; on a GPU, the copy of one unit is hidden behind the update of the next.
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
from ...ops.state_format import StatePart
from ...watch.board import stay_off_the_board
from .nvme import FP32, StateFile

Result = TypeVar("Result")


class Disk:
    """The data of one rank on disks: ``states``, and room for parameter shards."""

    def __init__(self, states: StateFile | None, params: torch.Tensor | None) -> None:
        """``params``: the room for parameter shards, [bytes] uint8."""
        self.states, self._params, self._taken = states, params, 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next [numel] of the room for parameter shards."""
        assert self._params is not None
        size = numel * dtype.itemsize
        part = self._params[self._taken : self._taken + size].view(dtype)
        self._taken += aligned_bytes(size)
        return part


class Staging:
    """Two host buffers of ``nbytes`` bytes, used in turn for data on its way to or from the device."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._buffers = [host_empty(nbytes, torch.uint8, pinned=pinned) for _ in range(2 if nbytes else 0)]
        self._busy: list[Callable[[], object] | None] = [None, None]  # each waits until its buffer is free again
        self._next = 0

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """Wait for a free buffer and return (its index, [numel] of it). ``hold`` must follow."""
        index, self._next = self._next, 1 - self._next
        wait, self._busy[index] = self._busy[index], None
        if wait is not None:
            wait()
        return index, self._buffers[index][: numel * dtype.itemsize].view(dtype)

    def hold(self, index: int, until: Callable[[], object]) -> None:
        """Keep buffer ``index`` in use until ``until`` returns."""
        self._busy[index] = until


class _Later(Generic[Result]):
    """Work that is done when it is first waited for. Later calls return the same result, or raise the same error."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work: Callable[[], Result] | None = work
        self._outcome: Future[Result] = Future()

    def __call__(self) -> Result:
        work, self._work = self._work, None
        if work is not None:
            with interrupts_later():  # from half an update, training could be neither saved nor continued
                try:
                    self._outcome.set_result(work())
                except BaseException as error:
                    self._outcome.set_exception(error)
        return self._outcome.result()


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Defer SIGINT (Ctrl-C) until after the body, if this is the thread that handles signals."""
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


def _begin_beside(device: torch.device) -> None:
    """Begin the thread that works beside the one that trains. A new thread's current GPU would be the first one."""
    select(device)
    stay_off_the_board()


class HostLink:
    """Copies between a device and host memory, and the thread that works on host memory.

    [Note: who waits for what]
    On a GPU all copies are asynchronous, on two streams of their own, from and to pinned memory. The thread, and not the
    program, waits for a gradient that comes down: it adds the gradient if a step has several, and squares it if it is the
    last. The thread also does the updates, one unit after the other, in the order in which the next forward needs them. New
    weights go up after each update, and the gather of a unit waits for that unit's weights alone (``Unit.updated``). A
    shard in host memory goes up for each gather, on the stream of the weights; before shards are written to, the program
    waits for the last of these copies (``Communicator.fence``).

    On a CPU, whose cores the computation itself needs, there is no thread: the same work is done at once, and an update
    when it is first waited for. Updates write rounded weights directly to where they belong.
    """

    def __init__(
        self, device: torch.device, *, pinned: bool = True, apart: bool | None = None, store: StateFile | None = None
    ) -> None:
        """``apart``: work on a thread and through staging buffers; by default, only if the device is not the CPU.

        ``store``: masters and moments on a disk; with it, there is always a thread.
        """
        self.device = device
        self._pinned = pinned and queues(device)
        self._down, self._up = CopyStream(device), CopyStream(device)
        self.apart = queues(device) if apart is None else apart
        self.store = store
        self._worker = None
        if self.apart or store is not None:
            self._worker = ThreadPoolExecutor(1, "zerorun-host", initializer=_begin_beside, initargs=(device,))
        self._landings: list[Callable[[], None]] = []
        self._landing = self._rounded = Staging(0, pinned=False)

    def reserve(self, gradient_bytes: int, weight_bytes: int) -> None:
        """Make the staging buffers for the gradients and weights of the largest flat group; 0 bytes: none are needed."""
        self._landing = Staging(gradient_bytes, pinned=self._pinned)
        self._rounded = Staging(weight_bytes, pinned=self._pinned)

    @property
    def bytes(self) -> int:
        """The bytes of the staging buffers, and of the buffers in which states on a disk are updated."""
        return self._landing.bytes + self._rounded.bytes + (self.store.buffer_bytes if self.store is not None else 0)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat host tensor [numel], pinned if this link pins memory."""
        return host_empty(numel, dtype, pinned=self._pinned)

    # -- gradients, down -----------------------------------------------------------------------------------------

    def fetch(
        self, source: torch.Tensor, target: torch.Tensor, *, add: bool, then: Callable[[], object]
    ) -> Callable[[], None]:
        """Begin to copy ``source`` from the device into the host tensor ``target``, or to add it. Then call ``then``.

        ``drain`` must follow. The function that is returned must be called before ``source`` is written again.
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
        """Wait until everything that ``fetch`` began to copy is in its place."""
        landings, self._landings = self._landings, []
        for landed in landings:
            landed()

    # -- updates, and weights, up --------------------------------------------------------------------------------

    def open(self) -> None:
        """Let later copies to the device wait for the work queued on it so far, which reads the old weights."""
        self._up.follow()

    def begin(self, work: Callable[[], Result]) -> Callable[[], Result]:
        """Begin ``work`` after all work begun before. Return a function that waits for its result or raises its error."""
        return _Later(work) if self._worker is None else self._worker.submit(work).result

    def rounding_place(self, numel: int, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
        """Return (number, [numel]) of a buffer for rounded weights that go to the device. ``send`` must follow."""
        return self._rounded.take(numel, dtype)

    def send(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], place: int | None = None) -> Arrival:
        """Begin to copy ``pairs`` of (host source, target on the device).

        ``place``: the number of the rounding place that contains the sources; it is free again when the copies are over.
        """
        arrival = Arrival()
        for source, target in pairs:
            arrival = self._up.copy(source, target)
        if place is not None:
            self._rounded.hold(place, arrival.synchronize)
        return arrival

    def home(self, param: torch.Tensor, number: int, part: StatePart = FP32) -> torch.Tensor:
        """Return a part of a state, all zeros, for ``param``: on the disk if ``param`` is there, else in memory.

        The state is zeroed, and then filled, through the mapping of the file. Its pages also hold neighbouring bytes: if
        these were written to the disk directly at the same time, the kernel would write back their old values. So writes in
        flight must finish first.
        """
        if self.store is None:
            return part.zeros(param)
        if self.store.holds(param):
            self.flush()
        return self.store.home(param, number, part)

    def flush(self) -> None:
        """Wait until all updates are on the disk. Raises SwapError in this and every later call if writing failed."""
        if self.store is not None:
            self.begin(self.store.flush)()

    def close(self) -> None:
        """End the thread and close the file."""
        if self._worker is not None:
            self._worker.shutdown()
        if self.store is not None:
            self.store.close()
