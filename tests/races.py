"""A race checker for the simulated device: what touches memory in no guaranteed order.

Every operation is an access of one *agent*: a stream, or a thread of the program for what lies in host memory. Each agent
has a vector clock (Lamport 1978, Communications of the ACM 21(7); Mattern 1989): what it knows to be over. Giving work to a
stream, waiting for events, collectives and futures hand clocks on. Two accesses of the same bytes, one of which writes, are
a race if neither knows of the other. So is memory that is given back while a stream may still be at it.

Memory of the device is what was made there, or computed from that. Memory of the host is what was pinned, or computed from
host memory alone. Of what was just made nobody can say; it is where that is with which it is first used.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from zerorun.distributed import simulated
from zerorun.distributed.simulated import COMPUTATION, SimulatedStream
from zerorun.ops import single_pass

Agent = Any  # a SimulatedStream, or the number of a thread
Clock = dict[Agent, int]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass
class Access:
    """Bytes ``low`` to ``high`` of a storage, touched by ``agent`` at its time ``time``."""

    low: int
    high: int
    agent: Agent
    time: int
    writes: bool
    where: str


@dataclass
class Memory:
    """One storage. ``maker``: the stream whose allocator it comes from; None for host memory. ``known``: where it is."""

    maker: SimulatedStream | None
    known: bool
    accesses: list[Access] = field(default_factory=list)
    kept_for: set[Agent] = field(default_factory=set)


class Races:
    """The observer. ``found``: a line for each race, the same one once. It counts, too, what it sees."""

    at_once = True

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self.launches: Counter[str] = Counter()  # of the computation, by operation
        self.host_waits: Counter[str] = Counter()  # for work that the device was given since ``begin_step``, by place
        self._long_given: dict[Agent, int] = {}
        self._lock = threading.RLock()
        self._clocks: dict[Agent, Clock] = defaultdict(dict)
        self._then: dict[tuple[Agent, int], Clock] = {}  # clocks as they were
        self._memory: dict[int, Memory] = {}  # by address of the storage
        self._frees: dict[int, weakref.finalize[Any, Any]] = {}  # by address, too
        self._resized: dict[int, SimulatedStream | None] = {}  # makers of the memory that is away, by storage

    # -- what the simulated device tells -----------------------------------------------------------------------------

    def begin(
        self, stream: SimulatedStream, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], what: str
    ) -> None:
        with self._lock:
            self._join(stream, self._clocks[threading.get_ident()])
            self._touch(stream, reads, writes, what)

    def now(self, stream: SimulatedStream) -> int:
        with self._lock:
            time = self._clocks[stream].get(stream, 0)
            self._then[stream, time] = dict(self._clocks[stream])
            return time

    def wait(self, waiter: SimulatedStream | None, stream: SimulatedStream, number: int) -> None:
        with self._lock:
            if waiter is None and number > self._long_given.get(stream, 0):
                self.host_waits[f"a wait at {_place()}"] += 1
            self._join(threading.get_ident() if waiter is None else waiter, self._then.get((stream, number), {}))

    def see(self, stream: SimulatedStream, number: int) -> None:
        with self._lock:
            self._join(threading.get_ident(), self._then.get((stream, number), {}))

    def keep(self, tensor: torch.Tensor, stream: SimulatedStream) -> None:
        with self._lock:
            self._memory_of(tensor).kept_for.add(stream)

    def pin(self, tensor: torch.Tensor) -> None:
        with self._lock:
            self._memory_of(tensor).known = True

    # -- what the program does ---------------------------------------------------------------------------------------

    def operate(self, func: Any, args: Sequence[Any], result: Any, made_on_device: bool) -> None:
        """An operation of torch that is not put into a stream of copies."""
        if _makes_views(func):
            return
        written: list[torch.Tensor] = []
        read: list[torch.Tensor] = []
        for writes, value in zip(_writes_to(func), args, strict=False):
            (written if writes else read).extend(_tensors(value))
        ids = {id(tensor) for tensor in written}
        made = [tensor for tensor in _tensors(result) if id(tensor) not in ids]
        if any(type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor) for tensor in (*read, *written, *made)):
            return  # of tensors that have no memory of their own
        with self._lock:
            touched = [self._memory_of(tensor) for tensor in (*read, *written, *made)]
            device = made_on_device or any(memory.maker is not None for memory in touched)
            agent: Agent = COMPUTATION if device else threading.get_ident()
            for memory in touched:
                if not memory.known and (device or read or written):
                    memory.maker = simulated.current_stream(simulated.DEVICE) if device else None
                    memory.known = device or any(m.known for m in touched)
            if device:
                self._join(COMPUTATION, self._clocks[threading.get_ident()])
            if "empty" not in func.__name__:
                self._touch(agent, read, [*written, *made], func.__name__)
            self.launches[func.__name__] += device and "empty" not in func.__name__
            if device and _waits(func, args, [memory.maker is None for memory in touched]):
                self.host_waits[f"{func.__name__} at {_place()}"] += 1
                self._join(threading.get_ident(), self._clocks[COMPUTATION])

    def begin_step(self) -> None:
        """What streams were given before is done by the time that the program asks for it: waiting for it costs nothing."""
        with self._lock:
            self._long_given = {agent: clock.get(agent, 0) for agent, clock in self._clocks.items()}
            self.host_waits.clear()

    def hand_over(self) -> Clock:
        """What the calling thread knows."""
        with self._lock:
            thread = threading.get_ident()
            self._clocks[thread][thread] = self._clocks[thread].get(thread, 0) + 1
            return dict(self._clocks[thread])

    def take_over(self, clock: Clock) -> None:
        """The calling thread knows ``clock`` from here on."""
        with self._lock:
            self._join(threading.get_ident(), clock)

    # -- the check ---------------------------------------------------------------------------------------------------

    def _join(self, agent: Agent, clock: Clock) -> None:
        mine = self._clocks[agent]
        for other, time in clock.items():
            if mine.get(other, 0) < time:
                mine[other] = time

    def _touch(self, agent: Agent, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], what: str) -> None:
        clock = self._clocks[agent]
        time = clock[agent] = clock.get(agent, 0) + 1
        where = f"{what} at {_place()}"
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    self._check(self._memory_of(tensor), Access(*_bytes_of(tensor), agent, time, is_write, where), clock)

    def _check(self, memory: Memory, new: Access, clock: Clock) -> None:
        for old in memory.accesses:
            overlaps = old.low < new.high and new.low < old.high
            unordered = old.agent != new.agent and clock.get(old.agent, 0) < old.time
            if overlaps and unordered and (old.writes or new.writes):
                self._report(f"{_name(old.agent)}: {old.where}  |  {_name(new.agent)}: {new.where}")
        memory.accesses = [
            old
            for old in memory.accesses
            if not (old.agent == new.agent and (old.low, old.high, old.writes) == (new.low, new.high, new.writes))
        ]
        memory.accesses.append(new)

    def _memory_of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._memory:
            self._note(storage, Memory(None, known=not storage.resizable()))  # else mapped: the host's
        return self._memory[address]

    def _note(self, storage: torch.UntypedStorage, memory: Memory) -> None:
        address = storage.data_ptr()
        self._memory[address] = memory
        self._frees[address] = weakref.finalize(storage, self._free, address)
        self._frees[address].atexit = False

    def resize(self, storage: torch.UntypedStorage, resize: Callable[[], Any]) -> Any:
        """The memory of a storage goes before the storage does, or comes again from where it was."""
        with self._lock:
            memory = self._memory.get(storage.data_ptr())
            if memory is not None:
                self._resized[storage._cdata] = memory.maker
                self._frees.pop(storage.data_ptr())()
            result = resize()
            if storage.nbytes() and storage._cdata in self._resized:
                self._note(storage, Memory(self._resized.pop(storage._cdata), known=True))
            return result

    def _free(self, address: int) -> None:
        """What is made next by the same stream may lie there."""
        with self._lock:
            self._frees.pop(address, None)
            memory = self._memory.pop(address, None)
            if memory is None or memory.maker is None:
                return
            clock, program = self._clocks[memory.maker], self._clocks[threading.get_ident()]
            for access in memory.accesses:
                stays = access.agent in memory.kept_for or access.agent is memory.maker
                if not stays and max(clock.get(access.agent, 0), program.get(access.agent, 0)) < access.time:
                    self._report(f"{_name(access.agent)}: {access.where}  |  given back to {memory.maker.name}")

    def _report(self, line: str) -> None:
        self.found[line] = None


class _Look(TorchDispatchMode):
    """Tells of every operation of this thread."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: torch need not see to that in every operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        named = [given.get(name) for name in _names(func)[len(args) :]] if given else []
        self._races.operate(func, [*args, *named], result, given.get("device") == simulated.DEVICE)
        return result


@contextlib.contextmanager
def looking_for_races() -> Iterator[Races]:
    """In the block all threads that get work from this one are watched. The simulated device has to be in use.

    torch runs the updates of optimizers: what the native library touches is not seen.
    """
    races = Races()
    submit, result, resize = ThreadPoolExecutor.submit, Future.result, torch.UntypedStorage.resize_

    def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
        return races.resize(storage, lambda: resize(storage, size))

    def watched_submit(pool: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
        known, submitted = races.hand_over(), threading.Event()

        def run() -> Any:
            submitted.wait()
            with _Look(races):
                races.take_over(known)
                try:
                    return work(*args, **kwargs)
                finally:
                    future.known = races.hand_over()

        future: Any = submit(pool, run)
        submitted.set()
        return future

    def watched_result(future: Any, timeout: float | None = None) -> Any:
        try:
            return result(future, timeout)
        finally:
            races.take_over(getattr(future, "known", {}))

    single_pass.leave_to_torch(torch.device("cpu"))
    before = simulated.watch(races)
    ThreadPoolExecutor.submit, Future.result = watched_submit, watched_result  # type: ignore[assignment,method-assign]
    torch.UntypedStorage.resize_ = watched_resize  # type: ignore[method-assign]
    try:
        with _Look(races):
            yield races
    finally:
        ThreadPoolExecutor.submit, Future.result = submit, result  # type: ignore[method-assign]
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        simulated.watch(before)
        single_pass._left_to_torch.clear()


def _waits(func: Any, args: Sequence[Any], in_host_memory: Sequence[bool]) -> bool:
    """True if the program goes on only when the device has come so far: reading a number, and ordinary copies across."""
    across = func is torch.ops.aten.copy_.default and len(set(in_host_memory)) == 2
    return func is torch.ops.aten._local_scalar_dense.default or (across and not any(args[2:]))


@cache
def _makes_views(func: Any) -> bool:
    aliases = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
    return aliases or func is torch.ops.aten._unsafe_view.default  # which does not say so


@cache
def _writes_to(func: Any) -> list[bool]:
    """For each argument."""
    return [arg.alias_info is not None and arg.alias_info.is_write for arg in func._schema.arguments]


@cache
def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """From the first byte to the last: as if there were no gaps."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = tensor.storage_offset() * tensor.element_size()
    return low, low + span * tensor.element_size()


def _name(agent: Agent) -> str:
    return agent.name if isinstance(agent, SimulatedStream) else "the program"


def _place() -> str:
    """The innermost line of zerorun's that does not belong to the simulation."""
    frame = inspect.currentframe()
    while frame is not None:
        if name := _of_zerorun(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the script"


@cache
def _of_zerorun(file: str) -> str:
    return file.rpartition("/zerorun/")[2] if "/zerorun/" in file and "simulated" not in file else ""
