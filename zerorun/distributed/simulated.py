"""A simulated device: host memory in place of a GPU's, and streams whose work is put off as long as nothing waits for it.

[Note: what it is for]
On a CPU every copy is done when its call returns, so a program that forgets to wait computes correctly there and wrongly
on a GPU. ``ZERORUN_DEVICE=simulated`` makes it wrong on the CPU, too. The computation runs at once, as on a device that is
never behind. Copies on other streams begin as late as possible: when somebody waits for one of their events. Until then,
the memory that they write holds NaN, and the memory that they read may have been overwritten. Collectives go through
simulated_nccl.py.

This shows waits that are missing after a copy. Waits that are missing before a copy do not show in the numbers, since the
computation is never behind. An observer is told of all work and all waits, and can find these by the order that is
guaranteed.

The names are those of torch.cuda. Tensors are on the CPU; the device is the CPU with an index, which no tensor has.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

NAME = "simulated"  # the value of ZERORUN_DEVICE
DEVICE = torch.device("cpu", 0)


class Observer(Protocol):
    """Is told, at once, of the work that the program gives to streams. A ``waiter`` of None is the program itself.

    ``at_once``: copies are not put off, so that memory is free when the program lets go of it.
    """

    at_once: bool

    def begin(
        self, stream: SimulatedStream, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], what: str
    ) -> None:
        """``stream`` is given work ``what``, which reads and writes these tensors."""
        ...

    def now(self, stream: SimulatedStream) -> int:
        """Return the number of the last work that was given to ``stream``."""
        ...

    def wait(self, waiter: SimulatedStream | None, stream: SimulatedStream, number: int) -> None:
        """Work of ``waiter`` from here on comes after work ``number`` of ``stream``, and all work before that."""
        ...

    def see(self, stream: SimulatedStream, number: int) -> None:
        """The program has found work ``number`` of ``stream`` done, without waiting for it."""
        ...

    def keep(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        """The memory of ``tensor`` is not reused before ``stream`` has done the work that it was given."""
        ...

    def pin(self, tensor: torch.Tensor) -> None:
        """``tensor`` is new, in pinned host memory, which the device reads and writes by itself."""
        ...


class Nobody:
    """An observer that looks at nothing."""

    at_once = False

    def begin(
        self, stream: SimulatedStream, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], what: str
    ) -> None:
        return

    def now(self, stream: SimulatedStream) -> int:
        return 0

    def wait(self, waiter: SimulatedStream | None, stream: SimulatedStream, number: int) -> None:
        return

    def see(self, stream: SimulatedStream, number: int) -> None:
        return

    def keep(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        return

    def pin(self, tensor: torch.Tensor) -> None:
        return


class _World:
    """What all streams of this process have in common."""

    def __init__(self) -> None:
        self.observer: Observer = Nobody()
        self.running = threading.RLock()  # streams run one at a time, on the thread that waits for them
        self.current = threading.local()


_world = _World()


class SimulatedStream:
    """Does work in order: the stream of the computation at once, others when somebody waits for the work."""

    def __init__(self, device: torch.device, name: str = "copies", *, at_once: bool = False) -> None:
        self.name, self._at_once = name, at_once
        self._left: deque[Callable[[], object]] = deque()
        self._touched: set[int] = set()  # addresses of the storages that this work touches
        self._done = 0

    def put(
        self, work: Callable[[], object], reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], what: str
    ) -> None:
        """Do ``work``, which reads and writes these tensors, after all that was put here before."""
        with _world.running:
            _world.observer.begin(self, reads, writes, what)
            if _world.observer.at_once:
                with _disable_current_modes():
                    work()
                return
            if not self._touched.isdisjoint(map(_storage, writes)):
                self.run_to(self.given)  # earlier work of this stream may read them, and they are poisoned now
            for tensor in writes:
                poison(tensor)
            self._touched.update(map(_storage, (*reads, *writes)))
            self._left.append(work)

    @property
    def given(self) -> int:
        """How many pieces of work were put here so far."""
        with _world.running:  # between the two, another thread may finish some
            return self._done + len(self._left)

    def record_event(self) -> Event:
        return Event(self, self.given, _world.observer.now(self))

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream come after the event."""
        _world.observer.wait(self, event.stream, event.number)
        if self._at_once:
            event.stream.run_to(event.place)
        else:
            with _world.running:
                self._left.append(lambda: event.stream.run_to(event.place))

    def wait_stream(self, other: SimulatedStream) -> None:
        self.wait_event(other.record_event())

    def run_to(self, place: int) -> None:
        """Do the first ``place`` pieces of work that were put here."""
        with _world.running, _disable_current_modes(), torch.no_grad():
            while self._left and self._done < place:
                self._left.popleft()()
                self._done += 1
            if not self._left:
                self._touched.clear()


class Event:
    """The end of the work that a stream had been given."""

    def __init__(self, stream: SimulatedStream, place: int, number: int) -> None:
        self.stream, self.place, self.number = stream, place, number

    def wait(self) -> None:
        """Let later work of the current stream wait for this event."""
        current_stream(DEVICE).wait_event(self)

    def synchronize(self) -> None:
        """Let the program wait for this event."""
        _world.observer.wait(None, self.stream, self.number)
        self.stream.run_to(self.place)

    def see(self) -> None:
        """The program has found out that this event is over."""
        _world.observer.see(self.stream, self.number)
        self.stream.run_to(self.place)


Stream = SimulatedStream  # as torch.cuda calls it
COMPUTATION = SimulatedStream(DEVICE, "computation", at_once=True)


def current_stream(device: torch.device) -> SimulatedStream:
    """Return the stream to which the calling thread gives its work."""
    found: SimulatedStream = getattr(_world.current, "stream", COMPUTATION)
    return found


@contextlib.contextmanager
def stream(chosen: SimulatedStream) -> Iterator[None]:
    """Send the copies of the block to ``chosen``. Any other operation except making tensors and views is an error."""
    before = current_stream(DEVICE)
    _world.current.stream = chosen
    try:
        with _PutOff(chosen):
            yield
    finally:
        _world.current.stream = before


class _PutOff(TorchDispatchMode):
    """Gives copies to a stream."""

    def __init__(self, stream: SimulatedStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            self._stream.put(lambda: target.copy_(source), [source], [target], "copy")
            return target
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        if is_view or "empty" in str(func):
            return func(*args, **(kwargs or {}))
        raise NotImplementedError(f"the simulated device knows no {func} on a stream of copies")


def keep(tensor: torch.Tensor, stream: SimulatedStream) -> None:
    """Simulate ``tensor.record_stream(stream)``: tell the observer."""
    _world.observer.keep(tensor, stream)


def poison(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with a value that no program means: NaN, or -1 for integers."""
    with _disable_current_modes(), torch.no_grad():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(-1)


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` of which neither streams nor observers know."""
    with _disable_current_modes(), torch.no_grad():
        return tensor.clone()


def watch(observer: Observer) -> Observer:
    """Tell ``observer`` from here on. Returns the previous one."""
    before, _world.observer = _world.observer, observer
    return before


def observer() -> Observer:
    """Return the observer that is told now."""
    return _world.observer


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
