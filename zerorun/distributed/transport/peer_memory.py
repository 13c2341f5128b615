"""Peer memory: processes of one host read each other's buffers directly, instead of sending them through sockets.

[Note: one-sided reads]
Linux lets a process copy from the memory of another one of the same user (process_vm_readv): one copy, made by whoever
needs the data, and no bytes through the network stack. For 6 MB between two busy ranks that costs about 1 ms, where
gloo over the loopback device costs 6 (the kernel copies twice, and its threads take the cores from the computation).

Each rank of a group keeps a *board* in its own memory, which only it writes and all others read:

    entries   [slot] -> (number, tag, address, count, size)   offer number n, in slot n % SLOTS: "at this address is a table
                                                              of the addresses of my ``count`` tensors"
    taken     [peer, slot] -> number                          "I have read offer n of that peer"
    agreements             -> number                          "I have come to agreement n", for messages about long waits
    left                   -> 0 or 1                          "my script is over, and I only wait for who still reads"

A collective is one offer and the reading of the others' offers of the same number. A rank that comes late finds the
others' offers and reads them at once; a rank that comes early reads when it needs the result. So nobody waits for a
rank that is less than one unit behind, and no thread is needed. ``tag`` tells apart what the ranks mean to do, and ``size``
how many bytes they mean to do it with: where they differ it is an error at once. Reads know no end of another's tensor.

Reading needs the reader to act, so whoever blocks must go on reading for the others' sake: ``wait_until`` does.

A rank that is done with a group may drop it while others have still to see that on its board. So a board outlives its
group, until all of these ranks have come to connect another one: they do not while they wait in the first.

An entry's address and tag are stored before its number. x86 lets no processor see these stores in another order; other
processors may, so they use gloo.

[Note: who may read]
Where the kernel restricts it (Yama), a process names one other that may read and write its memory, with all that this one
started. The ranks name the nearest process that started them all, which is the launcher, and not every process of the user.
Where there is none but the first process of the machine, or where it has ended, they have to name all. With the last group
nobody may any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import secrets
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch

from ...watch.board import board, span_of
from ..waits import time_limit, waiting

SLOTS = 4096  # offers that may wait to be read
_ENTRY = 5  # int64 of an entry
_ITEM = 8  # bytes of an int64
_CHECK_S = 0.05  # how often a waiting rank looks whether its peers are alive
# A rank that waits looks again after a pause, which becomes longer: at 0.2 ms looking takes a ninth of a core, which others
# need where ranks share cores, and after a long wait 2 % more of it do not matter.
_LONGER_S, _SHORT_PAUSE_S, _PAUSE_SHARE, _LONG_PAUSE_S = 5e-6, 2e-4, 0.02, 2e-3
_ENDED = "another rank of this host has ended"
_ENDING_MS = 10_000  # that a rank which cannot be read may take to end
_READ_BYTES = 1 << 30  # most of one call of the kernel, which copies less than 2 GiB and then says how much
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def number_of(tag: int) -> int:
    """Which of the collectives with its label a ``CommunicationStatistics.tag`` means; it begins anew after 1,023."""
    return tag >> 20


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class PeerMemoryError(RuntimeError):
    """A peer does not answer, or means to do something else."""


class PeerEnded(PeerMemoryError):
    """A peer's process has ended."""


class PeerLeft(PeerEnded):
    """A peer has come to the end of its script, as the text says, and this rank has not."""


class PeersDisagree(PeerMemoryError):
    """Two ranks mean to do different things, as the text says, with a remedy."""


class PeerCollective:
    """One collective: this rank's offer, and what it takes of the others' offers of the same number."""

    def __init__(
        self,
        memory: PeerMemory,
        number: int,
        tag: int,
        label: str,
        sources: Sequence[torch.Tensor],
        table: torch.Tensor,
        take: Callable[[list[torch.Tensor]], None],
        until_given: bool,
        size: int,
    ) -> None:
        self._memory, self._number, self._tag, self._label, self._size = memory, number, tag, label, size
        self._sources, self._table = sources, table  # others may be reading them
        self._take: Callable[[list[torch.Tensor]], None] | None = take
        self._until_given = until_given
        self._error: PeerMemoryError | None = None  # for all who wait for it: later there may be nothing left to read

    def progress(self) -> bool:
        """Take the others' parts if all have offered them. True once they are taken. Raises PeerMemoryError."""
        if self._error is not None:
            raise self._error
        try:
            return self._take is None or self._take_now(self._take)
        except PeerMemoryError as error:
            self._error = error
            raise

    def _take_now(self, take: Callable[[list[torch.Tensor]], None]) -> bool:
        tables = self._memory.offers(self._number, self._tag, self._table, self._label, self._size)
        if tables is None:
            return False
        begun = time.monotonic_ns()
        take(tables)
        board.end_transport(begun)
        self._take = None
        self._memory.confirm(self._number)
        return True

    @property
    def taken(self) -> bool:
        """True if the others' parts are taken."""
        return self._take is None

    def given(self) -> bool:
        """True once all others have read this rank's offer."""
        return self._memory.read_by_all(self._number)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the others' parts are taken; with ``until_given``, when they have taken this rank's, too."""
        if not (self.progress() and (not self._until_given or self.given())):
            memory = self._memory
            missing = partial(memory.absent, self._number, until_given=self._until_given)
            with waiting(self._label, missing, memory.span, number_of(self._tag)):
                self._memory.wait_until(lambda: self.progress() and (not self._until_given or self.given()), timeout)
        self._memory.forget_finished()


class PeerMemory:
    """The boards of one group. ``connect`` makes one, or says that this group must use the network."""

    def __init__(self, rank: int, size: int, names: Sequence[int] | None = None) -> None:
        self.rank, self._size = rank, size
        self._names = range(size) if names is None else names  # of its ranks, in the world
        self.span = span_of(self._names)
        self._agreements = SLOTS * (_ENTRY + size)  # where on the board
        self._left = self._agreements + 1
        self._board = (ctypes.c_int64 * (self._left + 1))()
        self._token = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        self._peers = [peer for peer in range(size) if peer != rank]
        self._boards: dict[int, tuple[int, int]] = {}  # peer -> (process, address)
        self._alive = select.poll()
        self._handles: dict[int, int] = {}  # of processes -> peer
        self._ended: set[int] = set()  # peers whose process has ended, as far as noticed
        self._over: set[int] = set()  # peers whose script is over, as far as noticed
        self._number = 0  # of the next offer
        self._reading: deque[PeerCollective] = deque()  # not taken yet
        self._offered: deque[PeerCollective] = deque()  # not known to be read by all others
        self._word = (ctypes.c_int64 * _ENTRY)()

    @classmethod
    def connect(
        cls, gather: Callable[[Any], list[Any]], rank: int, size: int, names: Sequence[int] | None = None
    ) -> PeerMemory | None:
        """Boards of a group if all its ranks can read one another, else None. All its ranks must call it.

        ``gather`` gives every rank's value to all of them. ``names``: the ranks as they are called in messages.
        """
        memory, card = cls(rank, size, names), None
        lines = gather(ancestors() if can_be_used() else None)
        with contextlib.suppress(PeersDisagree):  # in another group, which is no matter of this one
            serve()  # the others may drop boards when this is over: see on them what they have read
        if not all(line is not None for line in lines):
            return None
        _permission.widen(nearest_common(lines))
        token = ctypes.addressof(memory._token)
        card = (os.getpid(), ctypes.addressof(memory._board), token, memory._token.raw)
        if not all(gather(memory._open(gather(card)))):
            memory._boards.clear()  # nobody reads this one's
            _permission.end_unused()
            return None
        _served.append(weakref.ref(memory, _forget))
        present = {process for process, _ in memory._boards.values()}
        _left[:] = [(readers, board) for readers, board in _left if not readers <= present]
        return memory

    def _open(self, cards: list[Any]) -> bool:
        """Find every peer's board. False if one cannot be read, or is another process with the same number."""
        for peer in self._peers:
            process, board, token, expected = cards[peer]
            self._boards[peer] = process, board
            found = ctypes.create_string_buffer(len(expected))
            try:
                self.read(peer, token, ctypes.addressof(found), len(expected))
                handle = os.pidfd_open(process)
            except OSError:
                return False
            self._handles[handle] = peer
            self._alive.register(handle, select.POLLIN)
            if found.raw != expected:
                return False
        return True

    def __del__(self) -> None:
        for handle in self._handles:
            os.close(handle)
        if self._boards:
            _left.append(({process for process, _ in self._boards.values()}, self._board))

    # -- collectives ---------------------------------------------------------------------------------------------

    def exchange(
        self,
        tag: int,
        label: str,
        sources: Sequence[torch.Tensor],
        take: Callable[[list[torch.Tensor]], None],
        *,
        until_given: bool,
        size: int = 0,
    ) -> PeerCollective:
        """Offer ``sources``, and see to it that ``take(tables)`` is called: the addresses of every rank's, by rank.

        ``size``: a number of bytes that all ranks must have in common.

        ``sources`` are kept alive until all others have read them. If they change soon, wait ``until_given``; else
        ``finish`` before they do. All ranks of the group make the same exchanges in the same order.
        """
        self.forget_finished()
        if len(self._offered) >= SLOTS:
            self.finish()
        _permission.renew()
        number, slot = self._number, self._number % SLOTS
        table = torch.tensor([source.data_ptr() for source in sources], dtype=torch.int64)
        self._number += 1
        self._board[slot * _ENTRY + 1] = tag
        self._board[slot * _ENTRY + 2] = table.data_ptr()
        self._board[slot * _ENTRY + 3] = table.numel()
        self._board[slot * _ENTRY + 4] = size
        self._board[slot * _ENTRY] = number + 1  # last: now it can be seen
        made = PeerCollective(self, number, tag, label, sources, table, take, until_given, size)
        self._offered.append(made)
        with contextlib.suppress(PeerMemoryError):  # who waits for it gets the error
            if made.progress():
                return made
        self._reading.append(made)
        return made

    def finish(self, timeout: timedelta | None = None) -> None:
        """Return when every exchange is taken, and given to all others: buffers may change."""

        def finished() -> bool:
            serve()
            self.take_all()  # with the error, if there is one
            return not self._reading and not self._offered

        if not finished():
            last = self._number - 1
            missing = partial(self.absent, last, until_given=True)
            with waiting("others to read what this rank offers", missing, self.span):
                self.wait_until(finished, timeout)

    def take_all(self) -> None:
        """Take what all others have offered, in order. Raises PeerMemoryError."""
        for exchange in list(self._reading):
            if not exchange.progress():
                break
        self.forget_finished()

    def forget_finished(self) -> None:
        """Let go of the buffers of what is taken and given."""
        while self._reading and self._reading[0].taken:
            self._reading.popleft()
        while self._offered and self._offered[0].taken and self._offered[0].given():
            self._offered.popleft()

    def wait_until(self, done: Callable[[], bool], timeout: timedelta | None = None) -> None:
        """Read for others until ``done()``. Raises PeerEnded, or PeerMemoryError after the timeout."""
        begun, pause = time.monotonic(), 0.0
        limit_s = None if timeout is None else timeout.total_seconds()
        next_check = begun + _CHECK_S
        while not done():
            serve()
            now = time.monotonic()
            if now > next_check:
                next_check = now + _CHECK_S
                limit_s = time_limit().total_seconds() if limit_s is None else limit_s
                _permission.renew()
                left = self.left()
                self._ended.update(self._handles[handle] for handle, _ in self._alive.poll(0))
                if self._ended and not done():
                    raise left or PeerEnded(_ENDED)
            if limit_s is not None and now - begun > limit_s:
                raise PeerMemoryError(f"no answer from another rank in {limit_s:g} s")
            time.sleep(pause)
            pause = max(min(pause + _LONGER_S, _SHORT_PAUSE_S), min((now - begun) * _PAUSE_SHARE, _LONG_PAUSE_S))

    # -- boards --------------------------------------------------------------------------------------------------

    def read(self, peer: int, address: int, target: int, size: int) -> None:
        """Copy ``size`` bytes at ``address`` of ``peer`` to ``target``. Raises OSError."""
        process, done = self._boards[peer][0], 0
        while done < size:
            part = min(size - done, _READ_BYTES)
            here, there = _Range(target + done, part), _Range(address + done, part)
            copied = _readable().process_vm_readv(  # type: ignore[union-attr]
                process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0
            )
            if copied != part:
                code = ctypes.get_errno()
                raise OSError(
                    code, f"read {done + max(copied, 0)} of {size} bytes of process {process}: {os.strerror(code)}"
                )
            done += part

    def read_tensor(self, peer: int, address: int, out: torch.Tensor) -> None:
        """Fill the contiguous ``out`` with what lies at ``address`` of ``peer``."""
        try:
            self.read(peer, address, out.data_ptr(), out.numel() * out.element_size())
        except ProcessLookupError as error:
            raise PeerEnded(_ENDED) from error
        except OSError as error:
            # A process that ends lets go of its memory first, and may take a while to end, where others compute.
            gone = self.left() or (PeerEnded(_ENDED) if self._alive.poll(_ENDING_MS) else None)
            raise gone or PeerMemoryError(str(error)) from error

    def offers(self, number: int, tag: int, own: torch.Tensor, label: str, size: int) -> list[torch.Tensor] | None:
        """The tables of offer ``number`` by rank, ``own`` for this one; None if one is missing."""
        offset, found = number % SLOTS * _ENTRY * _ITEM, {}
        for peer in self._peers:
            if not self._read_board(peer, offset, 1) or self._word[0] != number + 1:
                return None
            if not self._read_board(peer, offset, _ENTRY):  # after the number: one copy may take what lies behind it first
                return None
            _, theirs, address, count, bytes_there = self._word
            if (theirs, count) != (tag, own.numel()):
                if (left := self.left(peer)) is not None:
                    raise left
                raise PeersDisagree(
                    f"ranks {self._names[self.rank]} and {self._names[peer]} make different collectives at the same time. "
                    "Remedy: let all ranks take the same path through the model, and let all of them call state_dict(), "
                    "save_checkpoint() and other methods of the engine, and none of them alone evaluate or end"
                )
            if bytes_there != size:
                raise PeersDisagree(
                    f"ranks {self._names[self.rank]} and {self._names[peer]} disagree on the size of '{label}': {size} and "
                    f"{bytes_there} bytes. Remedy: let all ranks that divide a layer give it tensors of the same shape"
                )
            found[peer] = address
        tables = []
        for rank in range(self._size):
            tables.append(own if rank == self.rank else torch.empty_like(own))
            if rank != self.rank:
                self.read_tensor(rank, found[rank], tables[rank])
        return tables

    def absent(self, number: int, *, until_given: bool) -> list[int]:
        """The ranks, by name, that have not offered their part of ``number``; ``until_given``: or not read this one's.

        For messages: another thread may ask.
        """
        slot = number % SLOTS
        offered, taken = slot * _ENTRY, SLOTS * (_ENTRY + self.rank) + slot
        fields = [offered, taken] if until_given else [offered]
        return [self._names[peer] for peer in self._peers if any(self._peek(peer, f) < number + 1 for f in fields)]

    def note_agreement(self, number: int) -> None:
        """Tell all others that this rank has come to agreement ``number``, which goes through the process group."""
        self._board[self._agreements] = number

    def absent_from_agreement(self, number: int) -> list[int]:
        """The ranks, by name, that have not come to agreement ``number``. For messages: another thread may ask."""
        return [self._names[peer] for peer in self._peers if self._peek(peer, self._agreements) < number]

    def note_left(self) -> None:
        """Tell all others that the script of this rank is over."""
        self._board[self._left] = 1

    def left(self, *peers: int) -> PeerLeft | None:
        """The error of a rank whose script is over, among ``peers`` or all others; None if there is none."""
        for peer in self._peers:
            with contextlib.suppress(OSError):  # its process has ended
                if self._peek(peer, self._left):
                    self._over.add(peer)
        over = sorted(self._over.intersection(peers or self._peers))
        return PeerLeft(f"rank {self._names[over[0]]} has come to the end of its script") if over else None

    def _peek(self, peer: int, index: int) -> int:
        word = ctypes.c_int64()
        self.read(peer, self._boards[peer][1] + index * _ITEM, ctypes.addressof(word), _ITEM)
        return word.value

    def confirm(self, number: int) -> None:
        """Tell all others that this rank has read their offers ``number``."""
        for peer in self._peers:
            self._board[SLOTS * (_ENTRY + peer) + number % SLOTS] = number + 1

    def read_by_all(self, number: int) -> bool:
        """True if all others have read this rank's offer ``number``, or never will."""
        offset = (SLOTS * (_ENTRY + self.rank) + number % SLOTS) * _ITEM
        return all(
            peer in self._ended or (self._read_board(peer, offset, 1) and self._word[0] == number + 1)
            for peer in self._peers
        )

    def _read_board(self, peer: int, offset: int, items: int) -> bool:
        """Copy int64 values of a peer's board to ``_word``. False if the peer has ended: who waits finds out."""
        try:
            self.read(peer, self._boards[peer][1] + offset, ctypes.addressof(self._word), items * _ITEM)
        except OSError:
            return False
        return True


# All groups of this process: who waits in one serves all.
_served: list[weakref.ref[PeerMemory]] = []
# Boards of groups that this process has dropped, and the processes that may still look at them.
_left: list[tuple[set[int], Any]] = []


def _forget(served: weakref.ref[PeerMemory]) -> None:
    _served.remove(served)
    _permission.end_unused()


# -- who may read ------------------------------------------------------------------------------------------------


class _Permission:
    """Which process, with its descendants, may read this one's memory: None, one of its ancestors, or ``_ANYBODY``."""

    def __init__(self) -> None:
        self._named: int | None = None
        self._alive: int | None = None  # handle of the named process
        self._changing = threading.RLock()  # groups come and go on any thread, and in the midst of this

    def widen(self, process: int) -> None:
        """Let ``process`` and its descendants read, beside those that may already: the older ancestor covers both."""
        with self._changing:
            self.renew()
            line = [*ancestors(), _ANYBODY]
            if self._named is None or line.index(process) > line.index(self._named):
                self._name(process)

    def renew(self) -> None:
        """Let anybody read if the process that was named has ended: its descendants may not any more."""
        if self._alive is None:
            return
        with self._changing:
            if self._alive is not None and _has_ended(self._alive):
                self._name(_ANYBODY)

    def end_unused(self) -> None:
        """Let nobody read where no group is left."""
        with self._changing:
            if not _served and self._named is not None:
                self._name(None)

    def _name(self, process: int | None) -> None:
        ended, self._named, self._alive = self._alive, process, None
        if ended is not None:
            os.close(ended)
        if process is not None and process != _ANYBODY:
            try:
                self._alive = os.pidfd_open(process)
            except OSError:  # it has ended just now
                self._named = _ANYBODY
        library = _readable()
        if library is not None:
            value = _PR_SET_PTRACER_ANY if self._named == _ANYBODY else ctypes.c_ulong(self._named or 0)
            library.prctl(_PR_SET_PTRACER, value, 0, 0, 0)  # fails where nothing is restricted


def _has_ended(handle: int) -> bool:
    """True if the process of ``handle`` has ended. By poll(): select() takes no file from number 1024 on."""
    asked = select.poll()
    asked.register(handle, select.POLLIN)
    return bool(asked.poll(0))


_ANYBODY = -1
_permission = _Permission()


def ancestors() -> list[int]:
    """The processes that this one descends from, the nearest first, without the first process of the machine."""
    line, process = [], os.getppid()
    while process > 1:
        line.append(process)
        try:
            with open(f"/proc/{process}/stat", "rb") as stat:
                process = int(stat.read().rpartition(b")")[2].split()[1])  # a name may hold anything
        except (OSError, ValueError):
            break
    return line


def nearest_common(lines: Sequence[Sequence[int]]) -> int:
    """The first process of ``lines[0]`` that is in all ``lines``; ``_ANYBODY`` if there is none."""
    return next((process for process in lines[0] if all(process in line for line in lines)), _ANYBODY)


def serve() -> None:
    """Take whatever can be taken, in any group: others may wait for it. Raises PeersDisagree, after that.

    What a peer has offered may be gone: after an error in the midst of a step both ranks may have given up the engine, and
    one has freed its buffers before the other has read them. Who waits for that gets the error, and nobody else.
    """
    disagreement = None
    for served in tuple(_served):
        memory = served()
        if memory is None:
            continue
        try:
            memory.take_all()
        except PeersDisagree as error:
            disagreement = error
        except PeerMemoryError:
            continue
    if disagreement is not None:
        raise disagreement


def note_left() -> None:
    """Tell the others of all groups that the script of this rank is over: see PeerLeft."""
    for served in tuple(_served):
        if (memory := served()) is not None:
            memory.note_left()


def can_be_used() -> bool:
    """True if this system and the environment let ranks of one host read each other's memory, as far as one can tell."""
    return _readable() is not None and os.environ.get("ZERORUN_PEER_MEMORY", "1") != "0"


@cache
def _readable() -> ctypes.CDLL | None:
    """The C library, if this system can read the memory of other processes in the way this file needs."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "process_vm_readv") or not hasattr(os, "pidfd_open"):
        return None
    pointer, count = ctypes.POINTER(_Range), ctypes.c_ulong
    library.process_vm_readv.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    return library
