"""A job on one or many hosts: lets the nodes start the workers, decides when all must end, and reports why.

Everything happens in one thread and one ``select`` loop. What ends a job:

* *A worker fails.* The others get ``SETTLE_SECONDS`` to fail by themselves, so that the report can tell a failure of one
  rank from a failure of all, and find the first one by the hosts' clocks. Then all are ended, without grace if the job
  begins again.
* *A host is lost*: its carrier ends, or it is silent for SILENT_SECONDS. A worker that failed less than SETTLE_SECONDS
  before that is taken to have failed because of it.
* *The job hangs*: ranks wait for one that does not come (zerorun/watch). The user is told first.
* *The launcher gets SIGINT, SIGTERM or SIGHUP.* The signal is passed on once; another Ctrl-C kills the workers at once.
  SIGUSR1 and SIGUSR2 are passed to the workers and end nothing here.
* *A worker ends well while others go on.* This ends nothing, but after EARLY_SECONDS the user is told once
  (run_outcome.py).
* *Nobody reads the output at the end.* The launcher waits for the reader, until it is gone or another signal comes.
* *The launcher is killed.* See bootstrap.py for its own workers. The lines to other hosts break, and agents end theirs.

A job that has failed is started again as a whole while restarts are left, on a new port unless the user has chosen one. If
its workers ask for that (REQUEUE_STATUS) in a batch job, or after a signal that was passed on, it is left to the queue.
Lost hosts are tried again, also while the job goes on without them (spare_hosts.py); they are left out if they do not come
back and at least ``min_nodes`` hosts remain. A failure at the start, and three restarts in a row without a new step, are
final (restarts.py).
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import zerorun
from zerorun.errors import LaunchError
from zerorun.watch.launch_environment import without_choices

from .event_loop import PASSED_SIGNALS, STOP_SIGNALS, dispatch, signals_as_bytes
from .failures import HostEnd, WorkerEnd
from .hang_detection import Hangs
from .hosts import Host
from .job_plan import JobOptions, LaunchRequest, ProgramKind, Rendezvous, build_plan, lack_of_cores, warm_commands
from .node import STREAMS, log_file, make_log_dir
from .remote import Node, OwnNode, RemoteNode
from .rendezvous import Meeting, Questions, refuse_all
from .restarts import Restarts
from .run_outcome import SETTLE_SECONDS, Round
from .sbatch import REQUEUE_STATUS
from .spare_hosts import HostPlaces, Returning
from .worker_output import Outputs

CONNECT_SECONDS = 30.0  # until an agent has said hello
BACK_SECONDS = 5.0  # the same for a host that was lost, where the job can go on without it
FAN_OUT = 64  # carriers that connect at the same time
LEAVE_SECONDS = 2.0  # for all agents together to hang up
_READER_SECONDS = 0.01  # between two attempts to write what is left at the end


class Interrupted(Exception):
    """A signal came while no worker was running."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Job:
    """Runs ``request``; :meth:`run` returns the exit status of the launcher."""

    _may_share_machines = False
    _can_reconnect = True

    def __init__(self, request: LaunchRequest, options: JobOptions) -> None:
        self._request, self._options = request, options
        self._selector = selectors.DefaultSelector()
        self._nodes: list[Node] = []  # that have ranks
        self._spares: list[Node] = []  # that are in reserve
        self._round: Round | None = None
        self.hangs = Hangs(0, lambda _: None, self.say, lambda _: None, lambda *_: None)
        self._questions = Questions(self._until)
        self._meeting = Meeting(options.master_addr, options.master_port, self._questions)
        self._places = HostPlaces([host.name for host in request.hosts], request.spares)
        by_name = {host.name: host for host in request.hosts}
        self._returning = Returning(
            lambda name: _reach(by_name[name], self, self._selector, options),
            lambda node: _unfit([node], request),
            self._place,
        )
        self._restarts = Restarts(options.max_restarts, self.say)
        self._held = False  # nodes keep signals for the next workers
        self._stopped = False  # a signal has asked for the end: no restart follows
        self._passed: list[int] = []  # signals that came while no worker was running, or while all were being ended

    def run(self) -> int:
        """Run the job, and return the exit status. Raises LaunchError if no worker could be started."""
        self._outputs = Outputs(self._options.shown, self._options.shown_local_ranks)
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
                status = self._close(status)
        return status

    def _run_rounds(self) -> int:
        self._connect(self._request.hosts)
        self._take_places()
        _keep_warm(self._spares, self._request, self._options, self.say)
        status, over = self._run_round(0, self._meeting.arrange(self._nodes))
        for restart in range(1, self._options.max_restarts + 1):
            if over or self._stopped:
                break
            refusal = self._restarts.refusal()
            if refusal is not None:
                self.say(f"[zerorun] no restart: {refusal}")
                break
            try:
                rendezvous = self._regroup(restart)
                if rendezvous is None:
                    break
                status, over = self._run_round(restart, rendezvous)
            except LaunchError as error:
                self.say(f"[zerorun] no restart: {error}")
                break
        goodput = self._restarts.goodput()
        if goodput is not None:
            self.say(f"[zerorun] {goodput}")
        return status

    def say(self, text: str) -> None:
        self._outputs.say(text)

    @property
    def _several(self) -> bool:
        return any(self._options.carrier(host) is not None for host in self._request.hosts)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _turn(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for events and handle them; write output that a slow reader has not taken yet."""
        dispatch(self._selector, timeout)
        self._outputs.drain()
        now = time.monotonic()
        for node in (*self._nodes, *self._spares, *self._returning.nodes):
            node.tick(now)
        for node in self._nodes:
            node.pause(self._outputs.congested)

    def _patience(self) -> float:
        """How long the loop may sleep, in seconds."""
        shortest = min((node.patience() for node in self._nodes), default=1.0)
        hurried = self._outputs.pending or (self._round is not None and self._round.stopping)
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
        """Connect to ``hosts`` and prepare their nodes.

        Raises a LaunchError that names the hosts that cannot be had, unless ``min_nodes`` are left without them.
        """
        nodes = self._open(hosts)
        problems = [f"{node.name}: {node.lost}" for node in nodes if node.lost is not None]
        nodes = [node for node in nodes if node.lost is None]
        least = self._options.min_nodes or len(hosts) - self._request.spares
        if len(nodes) < least:
            refuse_all(problems)
        elif problems:
            self.say("\n  ".join([f"[zerorun] {len(nodes)} hosts take part, without", *problems]))
        refuse_all(_unfit(nodes, self._request))
        if not self._may_share_machines:
            refuse_all(_same_machines(nodes))
        self._nodes = nodes
        refuse_all(self._questions.prepare(nodes, self._place()).values())

    def _open(self, hosts: Sequence[Host], seconds: float = CONNECT_SECONDS) -> list[Node]:
        """Return a node for each host, either greeted or lost. At most FAN_OUT connect at a time. Raises LaunchError."""
        nodes: list[Node] = []
        waiting: list[RemoteNode] = []
        for host in hosts:
            carrier = self._options.carrier(host)
            if carrier is None:
                nodes.append(self._own_node(host.name))
                continue
            self._until(lambda: sum(not _greeted(node) for node in waiting) < FAN_OUT, seconds)
            try:
                node = _reach(host, self, self._selector, self._options)
            except FileNotFoundError:
                raise LaunchError(f"cannot run {carrier[0]!r}: no such program. Remedy: install it.") from None
            except OSError as error:
                raise LaunchError(f"cannot run {carrier[0]!r}: {error.strerror}.") from None
            nodes.append(node)
            waiting.append(node)
            self._nodes.append(node)
        self._until(lambda: all(_greeted(node) for node in waiting), seconds)
        for node in waiting:
            if not _greeted(node):
                node.lose(f"no answer within {seconds:.0f} s")
        return nodes

    def _own_node(self, name: str) -> OwnNode:
        options = self._options
        base = {**without_choices(os.environ), **self._request.exports}
        places: dict[str, Any] = {"grace": options.grace, "log_dir": options.log_dir, "gives_stdin": True}
        return OwnNode(name, self._selector, self, base=base, **places)

    def _place(self) -> dict[str, Any]:
        """Return how agents run the workers: folders, variables, script, grace."""
        request, log_dir = self._request, self._options.log_dir
        script = request.target if request.kind is ProgramKind.SCRIPT else None
        logs = None if log_dir is None else str(log_dir)
        place = {"cwd": os.getcwd(), "env": dict(request.exports), "script": script, "log_dir": logs}
        return {**place, "grace": self._options.grace}

    # -- a round -----------------------------------------------------------------------------------------------------

    def _run_round(self, restart: int, rendezvous: Rendezvous) -> tuple[int, bool]:
        """Start all workers, wait until no process of theirs is left, and return (exit status, whether that is the end)."""
        by_name = {host.name: host for host in self._request.hosts}
        hosts = [by_name[node.name] for node in self._nodes]
        cores = {node.name: node.facts["cores"] for node in self._nodes}
        plan = build_plan(self._request, rendezvous, cores=cores, restart=restart, hosts=hosts)
        self._outputs.expect(plan.workers)
        self._round = current = Round(plan, time.monotonic(), told=self._held)
        node_of = {
            worker.rank: node for node, share in zip(self._nodes, plan.nodes, strict=True) for worker in share.workers
        }
        names = {rank: node.name for rank, node in node_of.items()} if self._several else {}
        self.hangs = Hangs(
            len(node_of), names.get, self.say, lambda rank: node_of[rank].ask_stacks(rank), node_of[0].show_slow
        )
        for node, share in zip(self._nodes, plan.nodes, strict=True):
            try:
                node.start(share.workers)
            except LaunchError as error:
                if not self._several:
                    raise
                node.trouble = str(error)  # as a remote node would report it
        came, self._passed = bytes(self._passed), []
        self._on_signals(came)
        while any(node.busy for node in self._nodes):
            self._turn(self._patience())
            self._advance(current, time.monotonic())
        self._advance(current, time.monotonic())
        self._meeting.release()
        self._round, self._held = None, current.held
        tails, found = self._outputs.end(), self.hangs.progress
        current.other_sizes = self.hangs.other_sizes()
        self._restarts.end(current.attempt(tails, found, time.monotonic()), found)
        status, lines = current.conclude(tails)
        for line in lines:
            self.say(line)
        left = current.leaves(status, has_queue=self._options.has_queue)
        if left is not None and self._options.max_restarts:
            self.say(f"[zerorun] no restart: {left}")
        return status, left is not None or not (current.failed or current.lost or current.hang)

    def _advance(self, current: Round, now: float) -> None:
        """Record nodes that are lost or could not start, end all workers when that is due, and say if some ended early."""
        for node, share in zip(self._nodes, current.plan.nodes, strict=True):
            reason = node.lost or node.trouble
            ranks = [worker.rank for worker in share.workers]
            known = node.name in [end.host for end in current.lost] or all(rank in current.ends for rank in ranks)
            if reason is not None and not known:
                current.refused = current.refused or node.lost is None
                current.noticed = current.noticed or now
                seen = node.since if isinstance(node, RemoteNode) and node.lost else now
                current.lost.append(HostEnd(node.name, reason, now - current.start, ranks, seen - current.start))
                if current.settle_until is None:
                    current.settle_until = now + SETTLE_SECONDS
        if not current.stopping and self.hangs.must_end(current.ends, now):
            current.hang, current.settle_until = self.hangs.report(), now
            current.noticed = current.noticed or now
        if current.settle_until is not None and now >= current.settle_until and not current.terminated:
            current.terminated = True
            # Of a job that begins again, survivors have nothing to save: a save needs all ranks.
            again = self._restarts.left and not self._stopped and not current.asks_again
            for node in self._nodes:
                node.terminate(0.0 if again else self._options.grace)
        self._restarts.look(current.start, self.hangs.progress)
        if not current.warm and any(progress.began for progress in self.hangs.progress.values()):
            current.warm = True
            _keep_warm(self._nodes, self._request, self._options, self.say)
        note = current.early_note(now)
        if note is not None:
            self.say(f"[zerorun] {note}")
        if self._can_reconnect and self._restarts.left and not current.stopping:
            alive = [node.name for node in (*self._nodes, *self._spares) if node.lost is None]
            back = self._returning.tick(now, self._places.lost(alive))
            self._spares += back
            for node in back:
                self.say(f"[zerorun] {node.name} is back, in reserve")
            _keep_warm(back, self._request, self._options, self.say)

    def on_output(self, rank: int, stream: str, chunk: bytes) -> None:
        if self._round is not None:
            self._outputs.take(rank, stream, chunk)

    def on_end(self, rank: int, returncode: int, at: float, asked: bool) -> None:
        current = self._round
        if current is None:
            return
        log_dir = self._options.log_dir
        host = current.host_of(rank) if self._several else None
        log = None if log_dir is None else log_file(log_dir, rank, STREAMS[1])
        batches = self.hangs.batches(rank)
        current.ends[rank] = WorkerEnd(rank, returncode, at - current.start, (), asked, log, host, batches)
        if returncode != 0 and not asked and current.by_signal is None:
            current.failed.append(rank)
            current.noticed = current.noticed or time.monotonic()
            # All ranks save at the same step, but do not all finish at the same time.
            patience = self._options.grace if returncode == REQUEUE_STATUS else SETTLE_SECONDS
            until = time.monotonic() + patience
            current.settle_until = until if current.settle_until is None else min(until, current.settle_until)

    def on_empty(self, unkillable: list[int], oom_kills: int, held: list[int]) -> None:
        if self._round is not None:
            self._round.held = self._round.held or bool(held)
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
                if self._round is None or self._round.stopping:  # it is for the next workers, if there will be any
                    self._passed.append(number)
                if self._round is None:
                    continue
                self._round.told = True
                for node in self._nodes:
                    node.pass_on(number)
                continue
            self._stopped = self._stopped or number in STOP_SIGNALS
            if self._round is None:
                raise Interrupted(number)
            if not self._round.stopping:
                self._round.by_signal, grace = number, self._options.grace
                again = "; Ctrl-C again kills them now" if number == signal.SIGINT else ""
                name = signal.Signals(number).name
                self.say(f"[zerorun] {name}: passed on to the workers, which have {grace:g} s to end{again}")
                for node in self._nodes:
                    node.interrupt(number, grace)
            elif number == signal.SIGINT:
                for node in self._nodes:
                    node.kill()

    def on_signal(self, number: int) -> None:
        self._on_signals(bytes([number]))

    def _take_places(self) -> None:
        """Let each node that is there have ranks, or be in reserve."""
        by_name = {node.name: node for node in (*self._nodes, *self._spares) if node.lost is None}
        for lost, spare in self._places.fill(by_name):
            self.say(f"[zerorun] {spare} takes the place of {lost}")
        self._nodes = [by_name[name] for name in self._places.names if name in by_name]
        self._spares = [by_name[name] for name in self._places.reserve if name in by_name]

    def _regroup(self, restart: int) -> Rendezvous | None:
        """Gather nodes for another round, and arrange where they meet; None if too few are left.

        A host that is lost meanwhile is left out, as one is that cannot take part any more. Raises LaunchError.
        """
        for _ in self._request.hosts:
            if not self._gather():
                return None
            try:
                rendezvous = self._meeting.arrange(self._nodes)
            except LaunchError:
                if all(node.lost is None for node in self._nodes):
                    raise
                continue
            where = f" on {len(self._nodes)} of {len(self._places.names)} hosts" if self._several else ""
            self.say(f"[zerorun] restart {restart} of {self._options.max_restarts}{where}")
            return rendezvous
        raise LaunchError("hosts are lost as fast as they come back.")

    def _gather(self) -> bool:
        """Gather the nodes that are left, and those of lost hosts that return. True if they suffice."""
        for node in self._nodes:
            node.trouble = None
        self._take_places()
        alive = [node.name for node in (*self._nodes, *self._spares)]
        by_name, wanted = {host.name: host for host in self._request.hosts}, len(self._places.names)
        missing = [by_name[name] for name in self._places.missing(alive)]
        enough = wanted if self._options.min_nodes is None else self._options.min_nodes
        seconds = BACK_SECONDS if len(self._nodes) >= enough else CONNECT_SECONDS
        self._returning.give_up([host.name for host in missing])
        back = [node for node in self._open(missing, seconds) if node.lost is None] if missing else []
        self._let_in(back)
        self._take_places()
        if len(self._nodes) < enough:
            self.say(f"[zerorun] no restart: {len(self._nodes)} of {wanted} hosts are left, {enough} are needed")
            return False
        return True

    def _let_in(self, back: Sequence[Node]) -> None:
        """Have hosts that are back take part. One that cannot is lost, and the user is told why."""
        problems = {node.name: found[0] for node in back if (found := _unfit([node], self._request))}
        problems |= self._questions.prepare([node for node in back if node.name not in problems], self._place())
        for node in back:
            if node.name in problems and isinstance(node, RemoteNode):
                node.lose(problems[node.name])
        if problems:
            self.say("\n  ".join(["[zerorun] hosts that are back, and cannot take part:", *problems.values()]))
        self._nodes = [node for node in (*self._nodes, *back) if node.name not in problems]

    def _close(self, status: int) -> int:
        """Leave the hosts, and wait until all output is read. Return the exit status: a signal meanwhile is no success."""
        self._meeting.release()
        nodes = [*self._nodes, *self._spares, *self._returning.nodes]
        for node in nodes:
            node.leave(status)
        deadline = time.monotonic() + LEAVE_SECONDS
        while not all(node.gone for node in nodes) and time.monotonic() < deadline:
            time.sleep(0.01)
        for node in nodes:
            node.close()
        try:
            self._outputs.finish(lambda: dispatch(self._selector, _READER_SECONDS), stopped=self._stopped)
        except Interrupted as interrupted:
            status = status or 128 + interrupted.number
        self._outputs.drop()
        self._selector.close()
        return status


def _keep_warm(nodes: Sequence[Node], request: LaunchRequest, options: JobOptions, say: Callable[[str], None]) -> None:
    """Have processes in reserve on ``nodes``, if that is asked for."""
    by_name = {host.name: host for host in request.hosts}
    for node in nodes if options.keep_warm else ():
        commands = warm_commands(request, by_name[node.name], node.facts["cores"])
        try:
            if isinstance(node, RemoteNode):
                node.send("warm", workers=[asdict(command) for command in commands])
            else:
                node.warm_workers.keep(commands)
        except LaunchError as error:
            say(f"[zerorun] {node.name}: no process is in reserve: {error}")


def _greeted(node: RemoteNode) -> bool:
    return bool(node.facts) or node.lost is not None


def _reach(host: Host, job: Job, selector: selectors.BaseSelector, options: JobOptions) -> RemoteNode:
    """Begin to connect to another host. Raises OSError."""
    node, carrier = RemoteNode(host.name, selector, job, job.say), options.carrier(host)
    assert carrier is not None  # it is not the launcher's own
    node.open(carrier)
    return node


def _unfit(nodes: Sequence[Node], request: LaunchRequest) -> list[str]:
    """Say which of ``nodes`` cannot take part, and why."""
    return _other_versions(nodes) or _missing_cores(nodes, request.core_list or ()) or _too_few_cores(nodes, request)


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


def _too_few_cores(nodes: Sequence[Node], request: LaunchRequest) -> list[str]:
    slots = {host.name: len(host.slots or ()) for host in request.hosts}
    counts = [(node, slots.get(node.name) or node.facts["slots"]) for node in nodes]  # guests tell theirs
    found = [lack_of_cores(request, node.name, count, node.facts["cores"]) for node, count in counts]
    return [problem for problem in found if problem]


def _same_machines(nodes: Sequence[Node]) -> list[str]:
    seen: dict[str, str] = {}
    twins = [(node.name, seen.setdefault(node.facts["machine"], node.name)) for node in nodes]
    return [f"{name}: is the same machine as {twin}. Remedy: leave one out." for name, twin in twins if name != twin]
