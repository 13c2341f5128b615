"""The supervisor of ranks that another program has started, such as torchrun or srun, when they stand still.

    python -m zerorun.launcher.sidecar      started by the first rank of a host, with its order on stdin (watch/sidecars.py)

It reads the boards that the ranks of its host have made for themselves. That of rank 0's host also hears what those of the
other hosts see, says who is guilty of a hang, and has that rank ended, so that the program that has started them ends the
job; of a job on several hosts, which that program may not do, all are ended soon after. It ends when its ranks have.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from zerorun.errors import LaunchError
from zerorun.log import ranks_in_words
from zerorun.watch.board import RankProgress
from zerorun.watch.launch_environment import launched
from zerorun.watch.slow_ranks import Window

from .agent import Agent, Message
from .agent_line import Line
from .dump import job_of, variables
from .event_loop import dispatch
from .failures import RULE, WorkerEnd
from .hang_detection import Hangs
from .manual_launch import GuestNode, enter
from .node import Listener
from .worker_boards import Boards, Seen, descendants, is_gone, open_board

_LOOK_SECONDS = 0.5
_STACK_SECONDS = 0.5  # for a rank to write its stacks
_START_SECONDS = 60.0  # in which most ranks make their boards
_LATE_SECONDS = 5.0  # between two looks for those that come later
_OTHERS_SECONDS = 1.0  # for whoever has started the guilty to see that it was the first to end


class AdoptedRanks:
    """The ranks of ``job`` on this host, at most ``count`` of them, with the methods of a LocalNode.

    ``starter``: the process of the one that has started this supervisor.
    """

    def __init__(self, job: str, starter: int, count: int | None, listener: Listener) -> None:
        self._job, self._starter, self._count, self._listener = job, starter, count, listener
        self._boards = Boards()
        self._processes: dict[int, int] = {}  # rank -> process
        self._ended: set[int] = set()
        self._stacks: dict[int, float] = {}  # rank -> when its stacks will be there
        self._begun = self._next = self._next_search = time.monotonic()

    @property
    def busy(self) -> bool:
        """True while a rank is left, or the first one may still come.

        A rank may end before its board was found. Whoever reads its stderr, which is also that of this process, waits.
        """
        if not self._processes:
            return time.monotonic() < self._begun + _START_SECONDS and not is_gone(self._starter)
        return len(self._ended) < len(self._processes)

    def patience(self) -> float:
        """How long the loop may sleep, in seconds."""
        return _LOOK_SECONDS

    def pause(self, paused: bool) -> None:
        """Do nothing: the ranks' output does not come here."""

    def tick(self, now: float) -> None:
        """Look at the boards, if it is time for that."""
        if now < self._next:
            return
        self._next = now + _LOOK_SECONDS
        self._find(now)
        hangs = self._listener.hangs
        for rank, seen in self._boards.look(now):
            hangs.on_seen(rank, seen)
        windows = self._boards.new_windows()
        if windows:
            hangs.on_windows(windows)
        for rank in [rank for rank, ready in self._stacks.items() if now >= ready]:
            del self._stacks[rank]
            hangs.on_stacks(rank, self._boards.stacks(rank))
        self._note_ends(now)

    def _find(self, now: float) -> None:
        """Adopt the boards of ranks that have made them."""
        if len(self._processes) == self._count or now < self._next_search:
            return
        self._next_search = now + (_LATE_SECONDS if now > self._begun + _START_SECONDS else 0.0)
        for process in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):
            if process not in self._processes.values() and job_of(variables(process)) == self._job:
                with contextlib.suppress(OSError, ValueError):
                    rank = self._boards.adopt(process, *open_board(process), now)
                    self._processes[rank] = process
                    self._listener.hangs.on_seen(rank, None)  # so that it is known where it is

    def _note_ends(self, now: float) -> None:
        for rank, process in self._processes.items():
            if rank not in self._ended and is_gone(process):
                self._ended.add(rank)
                self._listener.hangs.on_seen(rank, self._boards.take_last(rank))
                self._listener.on_end(rank, 0, now, False)
        if not self.busy:
            self._listener.on_empty([], 0, [])

    def ask_stacks(self, rank: int) -> None:
        """Have ``on_stacks`` hear of what each thread of a rank is doing."""
        self._boards.ask_stacks(rank)
        self._stacks[rank] = time.monotonic() + _STACK_SECONDS

    def show_slow(self, rank: int, thousandths: int) -> None:
        """Tell rank 0, if it is here, which rank of the job is slow."""
        self._boards.show_slow(rank, thousandths)

    def terminate(self, grace: float) -> None:
        """Do nothing: without the others nobody knows whether they have to end."""

    def end(self, ranks: Iterable[int]) -> None:
        """Kill those of ``ranks`` that are here, and what they have started, such as processes that load their data."""
        processes = [self._processes[rank] for rank in set(ranks) & set(self._processes) - self._ended]
        started = [child for process in processes for child in descendants(process) if child != os.getpid()]
        for process in (*processes, *started):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def end_now(self) -> None:
        """Look at no board any more."""
        self._boards.close()


class _Host:
    """A host as the supervisor of rank 0's hears of it."""

    def __init__(self, name: str, job: Sidecar) -> None:
        self.name, self._job = name, job
        self.say = _say
        self.ranks: set[int] = set()  # that it has told of
        self.ended: set[int] = set()
        self.node: AdoptedRanks | GuestNode

    @property
    def hangs(self) -> _Host:
        """It hears of boards, too."""
        return self

    def on_seen(self, rank: int, seen: Seen | None) -> None:
        self._take(rank)
        self._job.hangs.on_seen(rank, seen)

    def on_windows(self, windows: list[Window]) -> None:
        for window in windows:
            self._take(window.rank)
        self._job.hangs.on_windows(windows)

    def on_progress(self, rank: int, progress: RankProgress) -> None:
        self._job.hangs.on_progress(rank, progress)

    def on_stacks(self, rank: int, text: str) -> None:
        self._job.hangs.on_stacks(rank, text)

    def on_end(self, rank: int, returncode: int, at: float, asked: bool) -> None:
        """How it has ended, only the program knows that has started it."""
        self._take(rank)
        self.ended.add(rank)
        batches = self._job.hangs.batches(rank)
        self._job.ends[rank] = WorkerEnd(
            rank, 0, time.monotonic() - self._job.begun, (), asked, host=self.name, batches=batches
        )

    def on_output(self, rank: int, stream: str, chunk: bytes) -> None:
        """It has none."""

    def on_empty(self, unkillable: list[int], oom_kills: int, held: list[int]) -> None:
        """Its ranks are gone; ``on_end`` has told of each."""

    def on_note(self, text: str) -> None:
        """There is none."""

    def on_signal(self, number: int) -> None:
        """There is none."""

    def warn_of_stranger(self, address: str) -> None:
        """Whoever does not know the secret is sent away, and nobody is told."""

    def _take(self, rank: int) -> None:
        self.ranks.add(rank)
        self._job.places[rank] = self


class _Colleague(GuestNode):
    """The supervisor of another host, which may tell of any rank."""

    def __init__(
        self, host: _Host, connection: socket.socket, secret: str, selector: selectors.BaseSelector, world_size: int
    ) -> None:
        super().__init__(host.name, connection, secret, selector, host)
        self._ranks = frozenset(range(world_size))


class Sidecar:
    """The supervisor that judges. ``listener``: where those of other hosts connect, with ``secret``; None: all are here."""

    def __init__(self, job: str, starter: int, world_size: int, listener: socket.socket | None, secret: str) -> None:
        self.begun = time.monotonic()
        self.places: dict[int, _Host] = {}
        self.ends: dict[int, WorkerEnd] = {}
        self._secret, self._told_cause, self._told_unseen = secret, False, False
        self._several, self._world_size = listener is not None, world_size
        self._selector = selectors.DefaultSelector()
        self.hangs = Hangs(world_size, self._host_of, _say, self._ask_stacks, self._show_slow, exits_known=False)
        own = _Host(socket.gethostname(), self)
        own.node = self._own = AdoptedRanks(job, starter, _count_here(os.environ), own)
        self._guests: list[_Host] = []
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def run(self) -> None:
        """Return when no rank is left, or the job has been ended."""
        while self._own.busy or any(guest.lost is None and guest.facts for _, guest in self._there()):
            if self._selector.get_map():
                dispatch(self._selector, _LOOK_SECONDS)
            else:
                time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            self._own.tick(now)
            for _, guest in self._there():
                guest.tick(now)
            self._tell_cause()
            self._tell_unseen()
            silent = self._silent()
            if self.hangs.must_end(self.ends, now):
                self._end_job(self.hangs.report(), self.hangs.guilty)
                return
            if silent is not None:
                self._end_job(silent, ())
                return

    def _tell_cause(self) -> None:
        """Say once, when ranks have ended, why that may be: the program that has started them does not know."""
        if self.ends and not self._told_cause:
            cause = self.hangs.other_sizes() or self.hangs.left_early(self.ends)
            if cause is not None:
                self._told_cause = True
                _say(f"{RULE}\nzerorun: {cause}\n{RULE}")

    def _tell_unseen(self) -> None:
        """Say once that ranks wait, and that no board of some others was ever seen: they may be the cause."""
        unseen = sorted(set(range(self._world_size)) - self.places.keys())
        if unseen and not self._told_unseen and self.hangs.some_wait_too_long():
            self._told_unseen = True
            _say(
                f"[zerorun] ranks wait for others, and nothing is known of {ranks_in_words(unseen)}: not at initialize() "
                "yet, or on a host whose supervisor has not come. "
                "Remedy: look at these hosts, with zerorun --dump --hostfile."
            )

    def _there(self) -> list[tuple[_Host, GuestNode]]:
        return [(host, host.node) for host in self._guests if isinstance(host.node, GuestNode)]

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, address = listener.accept()
            host = _Host(str(address[0]), self)
            host.node = guest = _Colleague(host, connection, self._secret, self._selector, self._world_size)
            self._guests.append(host)

            def greeted() -> None:
                host.name = guest.name = str(guest.facts["hostname"])

            guest.on_hello = greeted

    def _silent(self) -> str | None:
        """The report on a host that does not answer any more, while ranks wait; None if there is none."""
        for host, guest in self._there():
            gone = sorted(host.ranks - host.ended)
            if guest.lost is not None and "nothing was heard" in guest.lost and self.hangs.some_wait_too_long():
                told = ", ".join(map(str, gone)) or "not known"
                return f"{RULE}\nzerorun: the job hangs: host {host.name} is lost: {guest.lost}. Its ranks: {told}\n{RULE}"
        return None

    def _host_of(self, rank: int) -> str | None:
        return self.places[rank].name if self._several and rank in self.places else None

    def _ask_stacks(self, rank: int) -> None:
        if rank in self.places:
            self.places[rank].node.ask_stacks(rank)

    def _show_slow(self, rank: int, thousandths: int) -> None:
        self._own.show_slow(rank, thousandths)

    def _end_job(self, report: str, guilty: Iterable[int]) -> None:
        """Say why, and end whoever is guilty: whoever has started the ranks then ends the others, at least of that host."""
        _say(report)
        everyone = range(self._world_size)
        first = [rank for rank in guilty if rank not in self.ends]
        self._end(first or everyone)
        until = time.monotonic() + _OTHERS_SECONDS
        while self._several and self._own.busy and time.monotonic() < until:
            dispatch(self._selector, 0.1)
            self._own.tick(time.monotonic())
        if self._several:
            self._end(everyone)

    def _end(self, ranks: Iterable[int]) -> None:
        self._own.end(ranks)
        for _, guest in self._there():
            if guest.facts:
                guest.send("end", ranks=list(ranks))
                if guest.line is not None:
                    guest.line.flush()


class _Guest(Agent):
    """The supervisor of a host without rank 0: it tells what it sees, and ends ranks when it is told to."""

    def __init__(self, line: Line, job: str, starter: int) -> None:
        super().__init__(line)
        self._ranks = AdoptedRanks(job, starter, _count_here(os.environ), self)
        self._node = self._ranks  # type: ignore[assignment]  # it has the methods that are used

    def _signal(self, node: Any, order: str, message: Message) -> None:
        if order == "end":
            self._ranks.end(map(int, message["ranks"]))
        else:
            super()._signal(node, order, message)

    def on_empty(self, unkillable: list[int], oom_kills: int, held: list[int]) -> None:
        """Hang up: no rank is left here."""
        self._status = 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _count_here(environment: Any) -> int | None:
    """How many ranks are on this host; None if that is not known."""
    count = launched(environment).get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdecimal() else None


def main() -> None:
    """Do what the rank that has started this process says on stdin."""
    order = json.loads(sys.stdin.buffer.read())
    starter = int(order["starter"])
    told = variables(starter)
    if not told:  # it has ended
        return
    job = job_of(told)
    if "address" in order:
        with contextlib.suppress(LaunchError):  # its ranks are seen by --dump alone
            _Guest(enter(order["address"], order["port"], order["secret"]), job, starter).run()
        return
    listener = socket.socket(fileno=order["listener"]) if "listener" in order else None
    Sidecar(job, starter, order["world_size"], listener, order.get("secret", "")).run()


if __name__ == "__main__":
    main()
