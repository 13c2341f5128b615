"""A job on one or many hosts: lets the nodes start the workers, decides when all must end, and says why they did.

Everything happens in one thread and one ``select`` loop. What ends a job:

* *A worker fails.* The others get ``SETTLE_SECONDS`` to fail by themselves, so that the report can tell a failure of one
  rank from a failure of all, and the first of them by the hosts' clocks from those that followed. Then all are ended.
* *A host is lost*: its carrier ends, or it is silent for SILENT_SECONDS. Workers that failed within SETTLE_SECONDS before
  it failed because of it.
* *The launcher gets SIGINT, SIGTERM or SIGHUP.* It is passed on once; another Ctrl-C kills at once. SIGUSR1 and SIGUSR2
  are passed to the workers and end nothing here.
* *A worker ends well while others go on*: nothing, but after EARLY_SECONDS the user hears of it once.
* *The launcher is killed.* Its own workers: see bootstrap.py. The lines to other hosts break, and agents end theirs.

A job that failed starts again, as a whole and on a new port, while restarts are left; hosts that are lost are tried again,
and left out if they do not come and ``min_nodes`` are there without them.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zerorun
from zerorun.errors import LaunchError

from .facts import bound_socket, describe_host, interface_of
from .failures import HostEnd, WorkerEnd, early_end_note, exit_status, failure_report, host_report
from .hosts import Host
from .job_plan import JobPlan, LaunchRequest, ProgramKind, Rendezvous, WorkerCommand, build_plan, on_one_host
from .loop import PASSED_SIGNALS, STOP_SIGNALS, dispatch, signals_as_bytes
from .node import STREAMS, LocalNode, log_file, make_log_dir
from .remote import RemoteNode
from .sbatch import REQUEUE_STATUS
from .screen import Forwarder, Tail, open_screens

SETTLE_SECONDS = 1.0
CONNECT_SECONDS = 30.0  # until an agent has said hello
ANSWER_SECONDS = 20.0  # until a host has answered a question
FAN_OUT = 64  # carriers that connect at a time
HOST_LOST_STATUS = 69  # EX_UNAVAILABLE
LEAVE_SECONDS = 2.0  # for all agents together to hang up
EARLY_SECONDS = 30.0  # after a worker has ended well while others go on, until the user hears of it
_FLUSH_SECONDS = 1.0


@dataclass(frozen=True)
class JobOptions:
    """``carrier``: the command that reaches a host, None for the launcher's own host."""

    carrier: Callable[[Host], Sequence[str] | None] = lambda host: None
    master_addr: str | None = None
    master_port: int | None = None
    grace: float = 5.0
    log_dir: Path | None = None
    max_restarts: int = 0
    min_nodes: int | None = None  # None: all
    shown: Mapping[str, bool] = field(default_factory=dict)  # by stream; those that are not there are
    shown_local_ranks: frozenset[int] | None = None  # None: all


class OwnNode(LocalNode):
    """The launcher's own host."""

    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.name = name
        self.facts = describe_host(os.environ)
        self.trouble: str | None = None
        self.lost: str | None = None

    def leave(self, status: int) -> None:
        """Nobody waits here for the exit status."""

    @property
    def gone(self) -> bool:
        return True

    def close(self) -> None:
        self.end_now()


Node = OwnNode | RemoteNode


@dataclass
class _Round:
    """One run of the workers. Times are of this host's ``time.monotonic``."""

    plan: JobPlan
    start: float
    ends: dict[int, WorkerEnd] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)  # ranks that failed by themselves
    lost: list[HostEnd] = field(default_factory=list)
    by_signal: int | None = None
    settle_until: float | None = None
    terminated: bool = False
    early_said: bool = False  # that some have ended well and others have not
    unkillable: list[int] = field(default_factory=list)
    oom_kills: int = 0

    @property
    def stopping(self) -> bool:
        return bool(self.failed or self.lost or self.by_signal is not None)

    def host_of(self, rank: int) -> str:
        return next(node.host for node in self.plan.nodes if any(worker.rank == rank for worker in node.workers))


class Interrupted(Exception):
    """A signal came while no worker was running."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Job:
    """Runs ``request``; :meth:`run` returns the exit status of the launcher."""

    _may_share_machines = False

    def __init__(self, request: LaunchRequest, options: JobOptions) -> None:
        self._request, self._options = request, options
        self._selector = selectors.DefaultSelector()
        self._nodes: list[Node] = []
        self._round: _Round | None = None
        self._streams: dict[tuple[int, str], Forwarder] = {}
        self._tails: dict[int, Tail] = {}
        self._holder: socket.socket | None = None
        self._stopped = False  # a signal has asked for the end: no restart follows

    def run(self) -> int:
        """Raises LaunchError if no worker could be started."""
        _open_standard_streams()
        self._stdout, self._stderr = open_screens()
        make_log_dir(self._options.log_dir)
        status = 1
        with signals_as_bytes(may_sleep=not self._several) as wakeup:
            self._selector.register(wakeup, selectors.EVENT_READ, lambda: self._on_signals(os.read(wakeup, 64)))
            try:
                status = self._run_rounds()
            except Interrupted as interrupted:
                status = 128 + interrupted.number
                self.say(f"[zerorun] {signal.Signals(interrupted.number).name}: no worker is running")
            finally:
                self._close(status)
        return status

    def _run_rounds(self) -> int:
        self._connect(self._request.hosts)
        status, fine = self._run_and_conclude(0)
        for restart in range(1, self._options.max_restarts + 1):
            if fine or self._stopped:
                break
            try:
                if not self._regroup(restart):
                    break
                status, fine = self._run_and_conclude(restart)
            except LaunchError as error:
                self.say(f"[zerorun] no restart: {error}")
                break
        return status

    def _run_and_conclude(self, restart: int) -> tuple[int, bool]:
        """(exit status, whether nothing failed)."""
        ended = self._run_round(restart)
        return self._conclude(ended), not (ended.failed or ended.lost)

    def say(self, text: str) -> None:
        self._stderr.say(text)

    @property
    def _several(self) -> bool:
        return any(self._options.carrier(host) is not None for host in self._request.hosts)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _turn(self, timeout: float) -> None:
        """Wait for something to happen and handle it; see to output that a slow reader has not taken yet."""
        dispatch(self._selector, timeout)
        self._stdout.drain()
        self._stderr.drain()
        now = time.monotonic()
        for node in self._nodes:
            node.tick(now)
        congested = self._stdout.congested or self._stderr.congested
        for node in self._nodes:
            node.pause(congested)

    def _patience(self) -> float:
        """How long the loop may sleep, in seconds."""
        shortest = min((node.patience() for node in self._nodes), default=1.0)
        hurried = self._stdout.pending or self._stderr.pending or (self._round is not None and self._round.stopping)
        return min(shortest, 0.05) if hurried else shortest

    def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() >= deadline:
                return False
            self._turn(min(self._patience(), 0.05))
        return True

    # -- connecting --------------------------------------------------------------------------------------------------

    def _connect(self, hosts: Sequence[Host]) -> None:
        """Have a node for each of ``hosts``. Raises LaunchError that names every host that cannot be had."""
        nodes = self._open(hosts)
        problems = [f"{node.name}: {node.lost}" for node in nodes if node.lost is not None]
        nodes = [node for node in nodes if node.lost is None]
        least = self._options.min_nodes
        if least is None or len(nodes) < least:
            self._refuse(problems)
        elif problems:
            self.say("\n  ".join([f"[zerorun] {len(nodes)} hosts take part, without", *problems]))
        self._refuse(_other_versions(nodes))
        self._refuse(_missing_cores(nodes, self._request.core_list or ()))
        if not self._may_share_machines:
            self._refuse(_same_machines(nodes))
        self._nodes = nodes
        self._prepare(nodes)

    def _open(self, hosts: Sequence[Host]) -> list[Node]:
        """A node for each host, greeted or lost; at most FAN_OUT connect at a time."""
        nodes: list[Node] = []
        waiting: list[RemoteNode] = []
        for host in hosts:
            carrier = self._options.carrier(host)
            if carrier is None:
                nodes.append(self._own_node(host.name))
                continue
            self._until(lambda: sum(not _greeted(node) for node in waiting) < FAN_OUT, CONNECT_SECONDS)
            node = RemoteNode(host.name, self._selector, self, self.say)
            try:
                node.open(carrier)
            except FileNotFoundError:
                raise LaunchError(f"cannot run {carrier[0]!r}: it is not there. Remedy: install it.") from None
            except OSError as error:
                raise LaunchError(f"cannot run {carrier[0]!r}: {error.strerror}.") from None
            nodes.append(node)
            waiting.append(node)
            self._nodes.append(node)
        self._until(lambda: all(_greeted(node) for node in waiting), CONNECT_SECONDS)
        for node in waiting:
            if not _greeted(node):
                node.lose(f"no answer within {CONNECT_SECONDS:.0f} s")
        return nodes

    def _own_node(self, name: str) -> OwnNode:
        options = self._options
        base = {**os.environ, **self._request.exports}
        places: dict[str, Any] = {"grace": options.grace, "log_dir": options.log_dir, "gives_stdin": True}
        return OwnNode(name, self._selector, self, base=base, **places)

    def _prepare(self, nodes: Sequence[Node]) -> None:
        """Tell agents about the job, and have them check what can be checked before anything is started."""
        remote = [node for node in nodes if isinstance(node, RemoteNode)]
        for node in remote:
            node.ask("job", "ready", grace=self._options.grace, **self._place())
        self._await(remote, "ready")

    def _place(self) -> dict[str, Any]:
        """Where and with which variables agents run the workers."""
        request, log_dir = self._request, self._options.log_dir
        script = request.target if request.kind is ProgramKind.SCRIPT else None
        logs = None if log_dir is None else str(log_dir)
        return {"cwd": os.getcwd(), "env": dict(request.exports), "script": script, "log_dir": logs}

    def _await(self, nodes: Sequence[RemoteNode], answer: str) -> None:
        """Wait until each node has given ``answer``. Raises LaunchError with the troubles of those that have not."""
        self._until(lambda: all(node.trouble or node.lost or answer in node.answers for node in nodes), ANSWER_SECONDS)
        problems = []
        for node in nodes:
            if node.lost or answer not in node.answers:
                problems.append(f"{node.name}: {node.trouble or node.lost or f'no answer within {ANSWER_SECONDS:.0f} s'}")
            node.trouble = None
        self._refuse(problems)

    def _refuse(self, problems: Sequence[str]) -> None:
        if not problems:
            return
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise LaunchError("\n  ".join(["not all hosts can take part:", *problems[:8], *more]))

    # -- the rendezvous ----------------------------------------------------------------------------------------------

    def _meet(self) -> Rendezvous:
        """Choose an address and a free port of the first host, and let every host try to reach it."""
        first, options = self._nodes[0], self._options
        if len(self._nodes) == 1:
            return on_one_host(first.name, options.master_addr, self._reserve(first))
        address = options.master_addr or self._address_of(first)
        port = self._reserve(first, listen=True)
        remote = [node for node in self._nodes if isinstance(node, RemoteNode)]
        for node in remote:
            node.ask("probe", "probed", address=address, port=port)
        try:
            self._await(remote, "probed")
        except LaunchError as error:
            remedy = "Remedy: let the hosts reach each other, or name an address by --master-addr."
            raise LaunchError(f"{error}\n{remedy}") from None
        found = {node.name: node.answers["probed"]["interface"] for node in remote}
        if self._holder is not None:
            self._holder.shutdown(socket.SHUT_RDWR)  # no longer listens, but keeps the port
            found[first.name] = interface_of(address)
        return Rendezvous(address, port, {name: interface for name, interface in found.items() if interface})

    def _address_of(self, first: Node) -> str:
        address = first.facts.get("address")
        if isinstance(first, OwnNode):  # as the others see it, if they can tell
            seen = [node.facts.get("launcher_address") for node in self._nodes]
            address = next((value for value in seen if value), address)
        if not address:
            raise LaunchError(f"host {first.name!r} has no address but loopback. Remedy: give --master-addr.")
        return str(address)

    def _reserve(self, first: Node, *, listen: bool = False) -> int:
        self._release()
        if isinstance(first, RemoteNode):
            first.ask("reserve", "reserved", port=self._options.master_port, listen=listen)
            self._await([first], "reserved")
            return int(first.answers["reserved"]["port"])
        self._holder = bound_socket(self._options.master_port)
        if listen:
            self._holder.listen(1024)
        return int(self._holder.getsockname()[1])

    def _release(self) -> None:
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    # -- a round -----------------------------------------------------------------------------------------------------

    def _run_round(self, restart: int) -> _Round:
        """Start all workers and return when nothing of them is left."""
        rendezvous = self._meet()
        by_name = {host.name: host for host in self._request.hosts}
        hosts = [by_name[node.name] for node in self._nodes]
        cores = {node.name: node.facts["cores"] for node in self._nodes}
        plan = build_plan(self._request, rendezvous, cores=cores, restart=restart, hosts=hosts)
        self._streams, self._tails = {}, {}
        self._round = current = _Round(plan, time.monotonic())
        for node, share in zip(self._nodes, plan.nodes, strict=True):
            try:
                node.start(share.workers)
            except LaunchError as error:
                if not self._several:
                    raise
                node.trouble = str(error)  # as a remote one would say it
        while any(node.busy for node in self._nodes):
            self._turn(self._patience())
            self._advance(current, time.monotonic())
        self._advance(current, time.monotonic())
        self._release()
        self._round = None
        return current

    def _advance(self, current: _Round, now: float) -> None:
        """Notice nodes that are lost or could not start, and do what is due in the course of ending the round."""
        for node, share in zip(self._nodes, current.plan.nodes, strict=True):
            reason = node.lost or node.trouble
            ranks = [worker.rank for worker in share.workers]
            known = node.name in [end.host for end in current.lost] or all(rank in current.ends for rank in ranks)
            if reason is not None and not known:
                seen = node.since if isinstance(node, RemoteNode) and node.lost else now
                current.lost.append(HostEnd(node.name, reason, now - current.start, ranks, seen - current.start))
                if current.settle_until is None:
                    current.settle_until = now + SETTLE_SECONDS
        if current.settle_until is not None and now >= current.settle_until and not current.terminated:
            current.terminated = True
            for node in self._nodes:
                node.terminate(self._options.grace)
        self._say_who_ended_early(current, now)

    def _say_who_ended_early(self, current: _Round, now: float) -> None:
        """Once. It may be right (rank 0 writes a file), or the others wait in a collective for half an hour."""
        ended = [end for end in current.ends.values() if end.returncode == 0]
        if current.early_said or current.stopping or not ended:
            return
        ago = now - current.start - min(end.seconds for end in ended)
        running = [worker.rank for worker in current.plan.workers if worker.rank not in current.ends]
        if running and ago >= EARLY_SECONDS:
            current.early_said = True
            self.say(f"[zerorun] {early_end_note(ended, running, ago)}")

    def on_output(self, rank: int, stream: str, chunk: bytes) -> None:
        if self._round is None:
            return
        forwarder = self._streams.get((rank, stream))
        if forwarder is None:
            forwarder = self._streams[rank, stream] = self._forwarder(rank, stream, self._round.plan.workers)
        if chunk:
            forwarder.feed(chunk)
        else:
            forwarder.close()

    def _forwarder(self, rank: int, stream: str, workers: Sequence[WorkerCommand]) -> Forwarder:
        screen, fd = (self._stdout, 1) if stream == STREAMS[0] else (self._stderr, 2)
        tail = self._tails.setdefault(rank, Tail()) if stream == STREAMS[1] else None
        raw = rank == 0 and (len(workers) == 1 or os.isatty(fd))
        only = self._options.shown_local_ranks
        local_rank = next(worker.local_rank for worker in workers if worker.rank == rank)
        shown = self._options.shown.get(stream, True) and (only is None or local_rank in only)
        return Forwarder(rank, screen if shown else None, raw=raw, tail=tail)

    def on_end(self, rank: int, returncode: int, at: float, asked: bool) -> None:
        current = self._round
        if current is None:
            return
        log_dir = self._options.log_dir
        host = current.host_of(rank) if self._several else None
        log = None if log_dir is None else log_file(log_dir, rank, STREAMS[1])
        current.ends[rank] = WorkerEnd(rank, returncode, at - current.start, (), asked, log, host)
        if returncode != 0 and not asked and current.by_signal is None:
            current.failed.append(rank)
            # All ranks save at the same step, but not all are done at once.
            patience = self._options.grace if returncode == REQUEUE_STATUS else SETTLE_SECONDS
            until = time.monotonic() + patience
            current.settle_until = until if current.settle_until is None else min(until, current.settle_until)

    def on_empty(self, unkillable: list[int], oom_kills: int) -> None:
        if self._round is not None:
            self._round.unkillable += unkillable
            self._round.oom_kills += oom_kills

    def on_note(self, text: str) -> None:
        self.say(f"[zerorun] {text}")

    # -- signals -----------------------------------------------------------------------------------------------------

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGTSTP:
                self.say("[zerorun] Ctrl-Z has no effect: the other hosts would take a sleeping launcher for dead")
                continue
            if number in PASSED_SIGNALS:
                for node in self._nodes:
                    node.pass_on(number)
                continue
            self._stopped = self._stopped or number in STOP_SIGNALS
            if self._round is None:
                raise Interrupted(number)
            if not self._round.stopping:
                self._stop_for(self._round, number)
            elif number == signal.SIGINT:
                for node in self._nodes:
                    node.kill()

    def on_signal(self, number: int) -> None:
        self._on_signals(bytes([number]))

    def _stop_for(self, current: _Round, number: int) -> None:
        current.by_signal = number
        grace = self._options.grace
        again = "; Ctrl-C again kills them now" if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        self.say(f"[zerorun] {name}: passed on to the workers, which have {grace:g} s to end{again}")
        for node in self._nodes:
            node.interrupt(number, grace)

    # -- the end of a round ------------------------------------------------------------------------------------------

    def _conclude(self, ended: _Round) -> int:
        """Say how the round ended and give its exit status."""
        ends = {
            rank: replace(end, stderr_tail=self._tails[rank].lines() if rank in self._tails else ())
            for rank, end in ended.ends.items()
        }
        status = 0
        if ended.unkillable:
            self.say(f"[zerorun] SIGKILL did not end: {ended.unkillable}")
            status = 1
        if ended.by_signal is not None:
            status = self._conclude_signal(ended, ended.by_signal, list(ends.values()))
        elif ended.lost and not _failed_before(ended):
            self.say(host_report(ended.lost, list(ends.values())))
            status = HOST_LOST_STATUS
        elif ended.failed and all(ends[rank].returncode == REQUEUE_STATUS for rank in ended.failed):
            self.say(f"[zerorun] the workers ask to be started again (exit code {REQUEUE_STATUS})")
            status = REQUEUE_STATUS
        elif ended.failed:
            first = min(ended.failed, key=lambda rank: ends[rank].seconds)
            others = [end for rank, end in ends.items() if rank != first]
            self.say(failure_report(ends[first], others, oom_kills=ended.oom_kills))
            status = exit_status(ends[first].returncode)
        self._flush()
        return status

    def _conclude_signal(self, ended: _Round, number: int, ends: Sequence[WorkerEnd]) -> int:
        """0 when every worker ended well (it saved and left, say), else 128 + the signal, as a shell has it."""
        for end in ends:
            if end.returncode not in (0, -number, REQUEUE_STATUS):
                self.say(f"[zerorun] {end.where}: {end.how}")
        for lost in ended.lost:
            self.say(f"[zerorun] {lost.host}: {lost.reason}")
        if not ended.unkillable:
            self.say(f"[zerorun] stopped by {signal.Signals(number).name}; all {len(ends)} workers have ended")
        if not ended.lost and {end.returncode for end in ends} in ({REQUEUE_STATUS}, {0, REQUEUE_STATUS}):
            return REQUEUE_STATUS
        return 128 + number if ended.lost or any(end.returncode for end in ends) else 0

    def _regroup(self, restart: int) -> bool:
        """Have nodes for another round: those that are left, and those of the lost hosts that come back."""
        kept = [node for node in self._nodes if node.lost is None]
        for node in kept:
            node.trouble = None
        by_name = {host.name: host for host in self._request.hosts}
        missing = [host for name, host in by_name.items() if name not in {node.name for node in kept}]
        self._nodes = list(kept)
        back = [node for node in self._open(missing) if node.lost is None] if missing else []
        self._refuse(_other_versions(back))
        self._nodes = sorted([*kept, *back], key=lambda node: list(by_name).index(node.name))
        enough = len(by_name) if self._options.min_nodes is None else self._options.min_nodes
        if len(self._nodes) < enough:
            self.say(f"[zerorun] no restart: {len(self._nodes)} of {len(by_name)} hosts are left, {enough} are needed")
            return False
        self._prepare(back)
        where = f" on {len(self._nodes)} of {len(by_name)} hosts" if self._several else ""
        self.say(f"[zerorun] restart {restart} of {self._options.max_restarts}{where}")
        return True

    def _close(self, status: int) -> None:
        self._release()
        for node in self._nodes:
            node.leave(status)
        deadline = time.monotonic() + LEAVE_SECONDS
        while not all(node.gone for node in self._nodes) and time.monotonic() < deadline:
            time.sleep(0.01)
        for node in self._nodes:
            node.close()
        self._flush()
        self._selector.close()

    def _flush(self) -> None:
        deadline = time.monotonic() + _FLUSH_SECONDS
        while (self._stdout.pending or self._stderr.pending) and time.monotonic() < deadline:
            self._stdout.drain()
            self._stderr.drain()
            time.sleep(0.01)


def _failed_before(ended: _Round) -> bool:
    """Whether a worker failed before the first host was lost, and not because of it."""
    if not ended.failed:
        return False
    failed = min(ended.ends[rank].seconds for rank in ended.failed)
    return failed + SETTLE_SECONDS < min(host.last_seen for host in ended.lost)


def _greeted(node: RemoteNode) -> bool:
    return bool(node.facts) or node.lost is not None


def _other_versions(nodes: Sequence[Node]) -> list[str]:
    own = zerorun.__version__
    return [
        f"{node.name}: has zerorun {node.facts['version']}, this launcher is {own}. Remedy: install the same everywhere."
        for node in nodes
        if node.facts["version"] != own
    ]


def _missing_cores(nodes: Sequence[Node], wanted: Sequence[int]) -> list[str]:
    gone = [(node.name, sorted(set(wanted) - set(node.facts["cores"]))) for node in nodes]
    return [f"{name}: has no core {cores[0]} to bind to. Remedy: see --bind-core-list." for name, cores in gone if cores]


def _same_machines(nodes: Sequence[Node]) -> list[str]:
    seen: dict[str, str] = {}
    twins = [(node.name, seen.setdefault(node.facts["machine"], node.name)) for node in nodes]
    return [f"{name}: is the same machine as {twin}. Remedy: leave one out." for name, twin in twins if name != twin]


def _open_standard_streams() -> None:
    """Where the launcher was started with stdin, stdout or stderr closed, no pipe of ours may take that number."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd < 3:
        fd = os.dup(fd)
    os.close(fd)
