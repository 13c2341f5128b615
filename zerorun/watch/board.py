"""The board of a rank: a page of shared memory that says what the rank is doing. The rank writes it, others read it.

[Note: how a board is written and read]
The page belongs to the supervisor of the host, which makes it and hands it to the rank as an open file. So it can be read
whatever state the rank is in, also after its death, and nothing runs in the rank for it: no thread, no collective, and but
one question to the kernel in WINDOW steps: how long had the thread no core? A change is a few stores of words of 8 bytes,
and ends with one more event. A reader takes the page until two copies have the same number of events.

The times that a rank was busy in its phases become those of a window of steps (slow_ranks.py); the page keeps some windows.

The page is about the thread that trains. Threads that work beside it call ``stay_off_the_board``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import threading
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import partial, wraps
from time import monotonic_ns
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ..errors import ConfigError
from . import sidecars
from .launch_environment import is_on_one_host, rank_in

PAGE = 4096  # bytes
VARIABLE = "ZERORUN_BOARD"  # "12,13": the open files of the page and of the stacks
LIMIT_VARIABLE = "ZERORUN_HANG_TIMEOUT_S"
FILE_NAME, STACKS_NAME = "zerorun-board", "zerorun-stacks"  # of the files in memory
STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else 0
_MAGIC = 0x7A65726F_00000001  # "zero", and the version of the page
_LABEL_AT, _LONGEST_LABEL = PAGE - 256, 240  # bytes
_FILE_AT, _LONGEST_FILE = _LABEL_AT - 256, 256  # bytes
_MOST_LABELS = 4096  # that are kept encoded
_WINDOWS = 16  # that are on the page
_FIRST_STEPS = 2  # whose waits say nothing about later ones: ranks compile, open files, find their memory
_TRIES = 100
_LONGEST_LIMIT_S = 1e8

P = ParamSpec("P")
R = TypeVar("R")


class Phase(IntEnum):
    """What a rank is at. ``SCRIPT`` is everything between calls of the engine."""

    START = 0
    SCRIPT = auto()
    DATA = auto()
    FORWARD = auto()
    BACKWARD = auto()
    UPDATE = auto()
    PIPELINE = auto()
    INITIALIZE = auto()
    SAVE = auto()
    LOAD = auto()
    WHOLE_WEIGHTS = auto()
    COMPILE = auto()
    TRANSPORT = auto()  # no phase of its own: the work of sending and taking what ranks exchange, in any other
    DEVICE = auto()  # neither: the work of a GPU, which goes on beside all of them
    LEFT = auto()  # the script is over, and not by an error


class Word(IntEnum):
    """Where on the page is what, in words of 8 bytes."""

    MAGIC = 0
    EVENTS = auto()
    PID = auto()
    GIVES_STACKS = auto()  # 1: STACK_SIGNAL has the stacks of all threads written
    LIMIT = auto()  # "hang_timeout_s" in ms; -1: not given
    STEP = auto()  # optimizer steps that were made
    BATCHES = auto()  # micro-batches that were given to backward
    PHASE = auto()
    PHASE_SINCE = auto()  # ns of the monotonic clock
    WAITS = auto()  # 1: the rank waits
    WAIT_SINCE = auto()
    FIRST = auto()  # it waits for ranks FIRST, FIRST + STRIDE, ... of the world, COUNT of them
    STRIDE = auto()
    COUNT = auto()
    NUMBER = auto()  # of the collective, among those with its label
    LONGEST = auto()  # ns that a wait with this label has taken so far, at most
    LABEL = auto()  # bytes of the label
    RANK = auto()
    STAGE = auto()  # of the pipeline
    SLOW = auto()  # the supervisor's: 1 + the number of a slow rank, or 0
    SLOWNESS = auto()  # thousandths of what others take in that phase
    STEPS = auto()  # that were timed, of all engines
    SHOWN = auto()  # ns of the monotonic clock: when the page was first written, its imports behind it
    MET = auto()  # when it had met the other ranks
    BEGAN = auto()  # when its first optimizer step was over
    LOADING = auto()  # ns that it took to load a checkpoint
    LOADED = auto()  # 1 + the optimizer steps that the checkpoint had, or 0
    TRACE = auto()  # on the page of rank 0, whoever has asked: how many steps all ranks are to trace
    FILE = auto()  # bytes of the name of the file for it
    SIZED = auto()  # collectives whose sizes were noted


WINDOW = 20  # steps, whose times become one
TIMED = (Phase.SCRIPT, Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.TRANSPORT, Phase.DEVICE)
_WINDOWS_AT, _WINDOW_WORDS = 32, 1 + 2 * len(TIMED)  # in words; the number of a window comes first
_WINDOWS_END = _WINDOWS_AT + _WINDOWS * _WINDOW_WORDS
_SIZES = 16  # collectives whose sizes are on the page: a rank whose size fits by chance has gone on when others break off
_SIZES_AT, _SIZE_WORDS = _WINDOWS_END, 5  # the key, the three numbers of the span, bytes
NUMBERS = 1024  # of collectives with one label; then they begin anew
OF_SCRIPT = " of the script"  # how labels of collectives end that the script makes by itself
OF_STAGES = "pipeline: "  # how labels of messages between pipeline stages begin
RENDEZVOUS = "the rendezvous of"  # how the label begins of ranks that connect to each other


def checksum_of(label: str) -> int:
    """Of as much of a label as readers see."""
    return zlib.crc32(label.encode(errors="replace")[:_LONGEST_LABEL].decode(errors="ignore").encode())


Span = tuple[int, int, int]
"""Ranks of the world, as (the first, the step between two, how many)."""
NOBODY: Span = (0, 1, 0)
ALL: Span = (0, 1, -1)  # whatever their number is


def only(rank: int) -> Span:
    """One rank."""
    return rank, 1, 1


def span_of(ranks: Sequence[int]) -> Span:
    """``ranks``, which ascend by equal steps, as those of an axis do."""
    if not ranks:
        return NOBODY
    return ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1, len(ranks)


def ranks_of(span: Span, world_size: int) -> range:
    """The ranks of ``span``, of ``world_size``."""
    first, stride, count = span
    return range(world_size) if span == ALL else range(first, first + stride * count, stride or 1)


class Board:
    """The page of this process."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytearray(PAGE))
        self._words = self._bytes.cast("q")
        self._labels: dict[str, bytes] = {}
        self._checksums: dict[str, int] = {}  # of labels
        self._longest: dict[str, int] = {}
        self._waits = 0  # one within the other, or on several threads
        self._busy = [0] * len(Phase)  # ns in this step, by phase, without waits
        self._steps: list[list[int]] = []  # the same of the steps of this window
        self.agreed_trace = 0  # steps that all ranks are to trace
        self._missed = -1  # ns that the thread had no core, up to the window before; -1: no step is over yet
        self._device = 0  # ns that a GPU was busy in a step of this window, see ``note_device``
        self._apart = 0  # ns of waits and transport so far
        self._apart_at_phase = self._apart_at_wait = 0  # that when the phase, or the wait, began
        self.write(MAGIC=_MAGIC, PID=os.getpid(), LIMIT=-1, PHASE_SINCE=monotonic_ns())

    def go_on_at(self, memory: Any) -> None:
        """Go on at ``memory``, PAGE bytes that others see."""
        view = memoryview(memory)
        view[:] = self._bytes
        self._bytes, self._words = view, view.cast("q")

    def write(self, **values: int) -> None:
        """Write words by their names in ``Word``."""
        for name, value in values.items():
            self._words[Word[name]] = value
        self._words[Word.EVENTS] += 1

    # Positions stand as numbers where a step comes by often: an attribute of an enumeration takes as long as the store.

    def enter(self, phase: int) -> int:
        """Begin ``phase``, and return the one before."""
        words, now = self._words, monotonic_ns()
        before = words[7]
        self._busy[before] += now - words[8] - self._apart + self._apart_at_phase
        self._apart_at_phase = self._apart
        words[7], words[8] = phase, now
        words[1] += 1
        return before

    def end_transport(self, begun: int) -> None:
        """The work of an exchange is done, since ``begun`` of the monotonic clock. It has not waited for others."""
        spent = monotonic_ns() - begun
        self._busy[12] += spent
        self._apart += spent

    def end_batch(self, step: int, batches: int, *, over: bool) -> None:
        """Show the counts after a micro-batch; with ``over``, after an optimizer step, whose times are kept."""
        words = self._words
        words[5], words[6] = step, batches
        words[1] += 1
        if over:
            if self._missed < 0:  # its start does not count
                self._missed = _without_core()
                words[Word.BEGAN] = monotonic_ns()
            self._steps.append(self._busy)
            self._busy = [0] * len(Phase)
            if len(self._steps) == WINDOW:
                self._end_window()

    def _end_window(self) -> None:
        """Show of each phase what it took at least, and at most, in nine steps of ten.

        For want of a core a thread waits, too. That time may have come in any phase: no phase took it for certain.
        """
        words, steps, missed = self._words, self._steps, _without_core()
        per_step, self._missed = max(0, missed - self._missed) // WINDOW, missed
        words[Word.STEPS] += WINDOW
        number = words[Word.STEPS] // WINDOW
        for step in steps:
            step[Phase.TRANSPORT] += step[Phase.PIPELINE]  # messages between stages
            step[Phase.DEVICE] = self._device
        times = [sorted(step[phase] for step in steps) for phase in TIMED]
        least, most = ([found[rank] for found in times] for rank in (WINDOW // 10, -1 - WINDOW // 10))
        least = [ns if phase == Phase.DEVICE else max(0, ns - per_step) for phase, ns in zip(TIMED, least, strict=True)]
        at = _WINDOWS_AT + number % _WINDOWS * _WINDOW_WORDS
        words[at + 1 : at + _WINDOW_WORDS] = memoryview(array("q", least + most))
        words[at] = number
        words[1] += 1
        self._steps, self._device = [], -1 if self._device else 0

    @property
    def shown(self) -> int:
        """When the page was first shown, in ns of the monotonic clock; 0: not yet."""
        return self._words[Word.SHOWN]

    def note_load(self, begun: int, step: int) -> None:
        """A checkpoint of ``step`` optimizer steps is loaded, since ``begun`` of the monotonic clock."""
        self.write(LOADING=monotonic_ns() - begun, LOADED=1 + step)

    def note_device(self, ns: int) -> None:
        """Show with this window what a GPU was busy in a step; -1: there is one, and that is not known."""
        self._device = ns

    @property
    def wanted_trace(self) -> int:
        """How many steps somebody wants to be traced: on the page of rank 0, which lets the others know."""
        return self._words[Word.TRACE]

    def agree_on_trace(self, steps: int) -> None:
        """All ranks know that ``steps`` are to be traced; 0: none."""
        if steps:
            self.agreed_trace, self._words[Word.TRACE] = steps, 0

    def take_trace(self) -> tuple[int, str]:
        """Return what ranks have agreed on, once, and on rank 0 the name of the file for it."""
        steps, self.agreed_trace = self.agreed_trace, 0
        return steps, bytes(self._bytes[_FILE_AT : _FILE_AT + self._words[Word.FILE]]).decode(errors="replace")

    @property
    def slow(self) -> tuple[int, float] | None:
        """A slow rank of the job, and what it takes as a multiple of the others; None if the supervisor knows of none."""
        rank = self._words[Word.SLOW]
        return (rank - 1, self._words[Word.SLOWNESS] / 1e3) if rank else None

    def wait_begins(self, label: str, span: Span, number: int) -> None:
        """Show that the rank waits for those of ``span``. ``label`` says in what, ``number`` in which of that label."""
        if _beside and threading.get_ident() in _beside:
            return
        self._waits += 1
        if self._waits > 1:
            return
        words, written = self._words, self._labels.get(label) or self._encoded(label)
        self._bytes[_LABEL_AT : _LABEL_AT + len(written)] = written
        words[16], words[10] = len(written), monotonic_ns()
        words[11], words[12], words[13] = span
        words[14], words[15] = number, self._longest.get(label, 0)
        self._apart_at_wait = self._apart
        words[9] = 1
        words[1] += 1

    def wait_ends(self, label: str) -> None:
        """Show that the rank goes on."""
        if _beside and threading.get_ident() in _beside:
            return
        self._waits -= 1
        if self._waits:
            return
        words = self._words
        words[9] = 0
        words[1] += 1
        taken = monotonic_ns() - words[10]
        if words[13]:  # a disk for which nobody else waits is the rank's own matter
            self._apart = self._apart_at_wait + taken
        if words[5] >= _FIRST_STEPS and taken > self._longest.get(label, 0):
            self._longest[label] = taken

    def note_size(self, label: str, span: Span, number: int, size: int) -> None:
        """Show that the rank begins a collective of ``size`` bytes: as many as each other rank of ``span`` has, if all is
        well. ``number``: as of ``wait_begins``."""
        if _beside and threading.get_ident() in _beside:
            return
        checksum = self._checksums.get(label)
        if checksum is None:
            if len(self._checksums) >= _MOST_LABELS:
                self._checksums.clear()
            checksum = self._checksums[label] = checksum_of(label)
        words = self._words
        at = _SIZES_AT + words[29] % _SIZES * _SIZE_WORDS
        words[at], words[at + 4] = checksum << 16 | number, size
        words[at + 1], words[at + 2], words[at + 3] = span
        words[29] += 1
        words[1] += 1

    def tell(self, listener: Any) -> None:
        """Let ``listener`` have the same calls for phases and waits, before this board; None: nobody any more."""
        for name in ("enter", "wait_begins", "wait_ends"):
            self.__dict__.pop(name, None)
            if listener is not None:
                self.__dict__[name] = partial(_both, getattr(listener, name), getattr(self, name))

    def _encoded(self, label: str) -> bytes:
        if len(self._labels) >= _MOST_LABELS:
            self._labels.clear()
        self._labels[label] = written = label.encode(errors="replace")[:_LONGEST_LABEL] or b"?"
        return written


def _both(first: Callable[P, Any], second: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    if threading.get_ident() not in _beside:
        first(*args, **kwargs)
    return second(*args, **kwargs)


def _without_core() -> int:
    """Return for how many ns this thread has been ready, and had no core; 0 where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def during(phase: Phase) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: while it runs, the rank is in ``phase``. The start of a rank is over after the first one."""
    number = int(phase)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def shown(*args: P.args, **kwargs: P.kwargs) -> R:
            before = board.enter(number)
            try:
                return function(*args, **kwargs)
            finally:
                board.enter(before or Phase.SCRIPT)

        return shown

    return decorate


def limit_waits(seconds: float | None) -> None:
    """Have waits of more than ``seconds`` looked into; 0: none, None: as before. $ZERORUN_HANG_TIMEOUT_S comes first.

    Raises ConfigError if that is no such number.
    """
    given = os.environ.get(LIMIT_VARIABLE)
    if given is not None:
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= _LONGEST_LIMIT_S:
            raise ConfigError.saying(
                f"{LIMIT_VARIABLE}={given!r} is no number of seconds. Remedy: 0 for no limit, or unset it."
            )
    if seconds is not None:
        board.write(LIMIT=max(round(seconds * 1e3), 1) if seconds else 0)


def stay_off_the_board() -> None:
    """What the calling thread waits for is not shown: it works beside the one that trains."""
    _beside.add(threading.get_ident())


# -- the supervisor's files, in the rank -----------------------------------------------------------------------------


def show_board() -> None:
    """Go on at a page that a supervisor of this host reads, if there is one. Called again, do nothing."""
    files = os.environ.pop(VARIABLE, None)  # not for programs that this one starts, which do not have the files
    with contextlib.suppress(ConfigError):  # initialize() raises it
        limit_waits(None)
    board.write(RANK=rank_in(os.environ), SHOWN=board.shown or monotonic_ns())
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a wrapper of the script may have closed them
        if files is not None:
            page, stacks = map(int, files.split(","))
            if _is(page, FILE_NAME) and _is(stacks, STACKS_NAME):
                for file in (page, stacks):  # they stay open for whoever looks at them from outside, and are not inherited
                    os.set_inheritable(file, False)
                _go_on_at(page, stacks)
        elif not _supervised and sidecars.started_by_another(os.environ) and os.environ.get(LIMIT_VARIABLE) != "0":
            page, stacks = make_files()
            _go_on_at(page, stacks)
            if is_on_one_host(os.environ):
                sidecars.begin_alone()
            else:
                _alone.append(True)


def make_files() -> tuple[int, int]:
    """Make the files of a board: its page, and what stacks are written to. Others may empty that one: each adds at the end.

    Raises OSError or AttributeError where the system has no such files.
    """
    import fcntl  # which Windows has not

    page, stacks = os.memfd_create(FILE_NAME, 0), os.memfd_create(STACKS_NAME, 0)
    os.ftruncate(page, PAGE)
    fcntl.fcntl(stacks, fcntl.F_SETFL, os.O_APPEND)
    return page, stacks


def _go_on_at(page: int, stacks: int) -> None:
    board.go_on_at(mmap.mmap(page, PAGE))
    with contextlib.suppress(ValueError):  # on another thread than the main one
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # in force again while Python ends, when libraries may hang
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    board.write(GIVES_STACKS=1)
    _supervised.extend((page, stacks))


def is_read() -> bool:
    """True if somebody reads this board."""
    return bool(_supervised)


def watch_other_hosts(store: sidecars.Store, address: str) -> None:
    """Let somebody read the boards of ranks on several hosts, if nobody does. ``address``: at which rank 0's is reached."""
    if _alone:
        _alone.clear()
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # torch's errors of stores are of the last kind
            sidecars.begin_together(store, address)
    elif not _supervised and sidecars.started_by_another(os.environ) and rank_in(os.environ) == 0:
        sidecars.refuse(store)


def _is(file: int, name: str) -> bool:
    return os.readlink(f"/proc/self/fd/{file}").startswith(f"/memfd:{name}")


def _begin_anew() -> None:
    """A forked process is no rank: it has a page of its own, which nobody reads."""
    board.go_on_at(bytearray(PAGE))
    board.write(PID=os.getpid(), GIVES_STACKS=0)
    _beside.clear()
    _supervised.clear()
    _alone.clear()
    if STACK_SIGNAL:
        faulthandler.unregister(STACK_SIGNAL)


_beside: set[int] = set()
_supervised: list[int] = []  # the two files
_alone: list[bool] = []  # one True while nobody reads this board, because ranks on other hosts have not been met
board = Board()
os.register_at_fork(after_in_child=_begin_anew)


# -- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankProgress:
    """How a rank has started, and how far it is. Moments are in seconds of its host's monotonic clock, 0: not yet."""

    step: int  # optimizer steps that were made, also before this start
    at: float  # when it was read
    shown: float = 0.0  # its imports were behind it
    met: float = 0.0  # it had met the other ranks
    began: float = 0.0  # its first optimizer step was over
    load_s: float = 0.0
    loaded: int | None = None  # the step of the checkpoint that it has gone on from


class SizeNote(NamedTuple):
    """That a rank has ``size`` bytes for a collective. Those of other ranks for the same one are equal in all but that."""

    key: int
    first: int
    stride: int
    ranks: int
    size: int

    @property
    def collective(self) -> tuple[int, ...]:
        """What is equal on all ranks."""
        return self[:-1]

    def members(self, world_size: int) -> range:
        """The ranks of the collective."""
        return ranks_of((self.first, self.stride, self.ranks), world_size)

    def is_of(self, label: str) -> bool:
        """True if the collective has this label."""
        return self.key >> 16 == checksum_of(label)


@dataclass(frozen=True)
class Sight:
    """What was seen on a board. Times are in seconds, and end when it was read."""

    events: int
    pid: int
    rank: int
    gives_stacks: bool
    limit_s: float | None  # None: not given
    step: int
    batches: int
    phase: Phase
    phase_s: float
    wait_s: float | None  # None: it does not wait
    span: Span
    number: int
    longest_s: float
    label: str
    sizes: tuple[SizeNote, ...] = ()  # of collectives that it has begun last, in their order

    @property
    def waits(self) -> bool:
        """True if it waits for ranks, and not, say, for a disk."""
        return self.wait_s is not None and self.span[2] != 0

    @property
    def is_message(self) -> bool:
        """True if it waits for one rank, and not for a group."""
        return self.span[2] == 1

    def ranks(self, world_size: int) -> range:
        """The ranks of the collective that it waits in."""
        return ranks_of(self.span, world_size)


def read(page: mmap.mmap) -> Sight | None:
    """What is on ``page``, also before the rank has written on it; None if it is being written all the time."""
    copy = _copied(page)
    return None if copy is None else _sight(memoryview(copy).cast("q"), copy)


def read_progress(page: mmap.mmap) -> RankProgress | None:
    """How far the rank is; None if it has not shown itself, or is writing all the time."""
    copy = _copied(page)
    words = memoryview(copy or bytes(PAGE)).cast("q")
    if not words[Word.SHOWN]:
        return None
    shown, met, began, load_s = (words[word] / 1e9 for word in (Word.SHOWN, Word.MET, Word.BEGAN, Word.LOADING))
    loaded = words[Word.LOADED] - 1 if words[Word.LOADED] else None
    return RankProgress(words[Word.STEP], monotonic_ns() / 1e9, shown, met, began, load_s, loaded)


def read_times(page: mmap.mmap, after: int) -> tuple[int, dict[int, list[int]]]:
    """Return (the stage, number -> us of a step, at least and at most, by TIMED) of windows that ended since ``after``."""
    copy = _copied(page)
    if copy is None:
        return 0, {}
    words = memoryview(copy).cast("q")
    rows = [words[at : at + _WINDOW_WORDS].tolist() for at in range(_WINDOWS_AT, _WINDOWS_END, _WINDOW_WORDS)]
    return words[Word.STAGE], {number: [ns // 1000 for ns in busy] for number, *busy in sorted(rows) if number > after}


def show_slow(page: mmap.mmap, rank: int, thousandths: int) -> None:
    """Tell the rank that ``rank`` of its job is slow; -1: none is. For the owner of the page."""
    page[8 * Word.SLOW : 8 * Word.SLOWNESS + 8] = array("q", [rank + 1, thousandths]).tobytes()


def ask_trace(page: mmap.mmap, steps: int, file: str) -> None:
    """Ask the ranks of the job whose rank 0 writes on ``page`` for a trace of ``steps`` steps in ``file``.

    Raises ValueError if its name is too long.
    """
    name = file.encode()
    if len(name) > _LONGEST_FILE:
        raise ValueError(f"the name of a trace has at most {_LONGEST_FILE} bytes")
    page[_FILE_AT : _FILE_AT + len(name)] = name
    for word, value in ((Word.FILE, len(name)), (Word.TRACE, steps)):
        page[8 * word : 8 * word + 8] = array("q", [value]).tobytes()


def _copied(page: mmap.mmap) -> bytes | None:
    for _ in range(_TRIES):
        copy = page[:]
        if page[8:16] == copy[8:16]:
            return copy
    return None


def _sight(words: memoryview, copy: bytes) -> Sight:
    now, limit = monotonic_ns(), words[Word.LIMIT]
    return Sight(
        events=words[Word.EVENTS],
        pid=words[Word.PID],
        rank=words[Word.RANK],
        gives_stacks=words[Word.GIVES_STACKS] == 1,
        limit_s=None if limit < 0 or words[Word.MAGIC] != _MAGIC else limit / 1e3,
        step=words[Word.STEP],
        batches=words[Word.BATCHES],
        phase=Phase(words[Word.PHASE]),
        phase_s=(now - words[Word.PHASE_SINCE]) / 1e9 if words[Word.PHASE_SINCE] else 0.0,
        wait_s=(now - words[Word.WAIT_SINCE]) / 1e9 if words[Word.WAITS] else None,
        span=(words[Word.FIRST], words[Word.STRIDE] or 1, words[Word.COUNT]),
        number=words[Word.NUMBER],
        longest_s=words[Word.LONGEST] / 1e9,
        label=copy[_LABEL_AT : _LABEL_AT + words[Word.LABEL]].decode(errors="ignore"),
        sizes=_size_notes(words),
    )


def _size_notes(words: memoryview) -> tuple[SizeNote, ...]:
    count = words[Word.SIZED]
    places = [_SIZES_AT + number % _SIZES * _SIZE_WORDS for number in range(max(0, count - _SIZES), count)]
    return tuple(SizeNote(*words[at : at + _SIZE_WORDS]) for at in places)
